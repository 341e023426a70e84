"""Check of a volume: labels, superblocks, records, tables, journals and every page's checksum.

Read-only unless repair is asked for. Repair brings nothing back: pages that fail leave the table, damaged
table blocks are written empty, lost copies of superblock and record are written from the intact ones.
Threads: blocks while it reads; ``progress`` is called from the same thread between batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvdev.block.device import BlockDevice, aligned_buffer
from kvdev.block.drill import refuse_drill
from kvdev.clock import Deadline
from kvdev.errors import CommandError, CorruptionError, KvdevError, UsageError
from kvdev.native.index import ENTRY_DTYPE, GRANT_DTYPE, EntryArray, GrantArray
from kvdev.native.io import address_of
from kvdev.store.claim import check_free
from kvdev.store.directory import COPY_COUNT, Place
from kvdev.store.fence import Fence
from kvdev.store.lease import Lease, describe_holder, is_held
from kvdev.store.lock import LockHeldError
from kvdev.store.members import read_label
from kvdev.store.namespace import KvNamespace
from kvdev.store.superblock import Record
from kvdev.store.superblock_io import read_superblock_copies, superblock_slbas
from kvdev.store.throttle import Throttle
from kvdev.store.volume import Volume
from kvdev.units import MIB

BATCH_BYTES = 32 * MIB
"""Pages read at once: bounds the buffer, long enough to keep every member busy."""
BATCH_TIMEOUT_S = 60.0
FINDING_COUNT_MAX = 1000
"""Findings kept per namespace; further ones are counted."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be: where, what, and what it costs."""

    where: str
    what: str
    lost_pages_max: int = 0
    is_repaired: bool = False

    @classmethod
    def of(cls, where: str, problem: KvdevError | str, *, is_repaired: bool = False) -> Finding:
        """Of an error; messages begin with the place, which is said once."""
        what = str(problem)
        for separator in (": ", " "):
            what = what.removeprefix(where + separator)
        return cls(where, what, is_repaired=is_repaired)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class IntactLabel:
    """What a member of a volume that does not open says of itself: no finding."""

    uri: str
    member_index: int
    member_count: int
    volume: str


@dataclass(frozen=True)
class CheckProgress:
    """How far the check of one namespace's pages has come."""

    namespace: str
    checked_pages: int
    total_pages: int
    next_slot: int
    """Where to go on: ``start_at`` of a later check. With repair where it began: nothing counts before it closes."""


@dataclass
class NamespaceCheck:
    """What the check of one KV namespace found."""

    name: str
    pages: int = 0
    good_pages: int = 0
    bad_pages: int = 0
    unreadable_pages: int = 0
    replayed_records: int = 0
    was_closed: bool = False
    """Repair has written everything back."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def skipped_pages(self) -> int:
        """Not read: they are before the start, or the check did not come to them, or left pages out."""
        return self.pages - self.good_pages - self.bad_pages - self.unreadable_pages


@dataclass(frozen=True)
class Erasing:
    """A KV namespace that is being erased: nobody's, and not free before it is erased to its end."""

    name: str
    erased_bytes: int
    """As far as its record says: what was erased since it was last written is erased again."""
    extent_bytes: int
    holder: str
    """Who erases it now, as far as its record says; empty when nobody does."""


@dataclass
class CheckReport:
    """The whole check; ``is_ok`` when there is no finding at all."""

    volume: str = ""
    findings: list[Finding] = field(default_factory=list)
    namespaces: list[NamespaceCheck] = field(default_factory=list)
    erasing: list[Erasing] = field(default_factory=list)
    """No finding, finished or not: nothing of them is to be found, and nothing of them is damaged."""
    skipped_namespaces: list[str] = field(default_factory=list)
    """Those before the start."""
    intact_labels: list[IntactLabel] = field(default_factory=list)
    """Of a volume that does not open."""

    @property
    def is_ok(self) -> bool:
        return not self.all_findings

    @property
    def all_findings(self) -> list[Finding]:
        """Those of the volume, then those of each namespace."""
        return [*self.findings, *(finding for each in self.namespaces for finding in each.findings)]


Progress = Callable[[CheckProgress], None]


def check_volume(
    devices: Sequence[BlockDevice],
    *,
    progress: Progress | None = None,
    reads_pages: bool = True,
    repair: bool = False,
    bytes_per_s: int | None = None,
    start_at: tuple[str, int] | None = None,
    timeout_s: float = BATCH_TIMEOUT_S,
    report: CheckReport | None = None,
) -> CheckReport:
    """Verify everything on a volume's members; without ``repair`` nothing is written.

    Args:
        reads_pages: False checks the structures only.
        repair: open each namespace as its owner, and put right what is found; refused while one is in use.
        bytes_per_s: read pages no faster than this.
        start_at: namespace and slot where a check that was interrupted goes on.
        timeout_s: bounds each batch, not the whole check.
        report: filled in as it goes on, for what was found before an interrupt; a new one by default.

    Raises:
        LockHeldError: a namespace to repair is in use; nothing was written.
        UsageError: there is no such start.
    """
    if repair:
        refuse_drill(devices, "repair")
    options = _Options(progress, reads_pages, repair, Throttle(bytes_per_s), timeout_s)
    report = CheckReport() if report is None else report
    try:
        volume = Volume.open(devices, deadline=Deadline.after(timeout_s))
    except KvdevError as refusal:
        labels, report.intact_labels = _read_labels(devices, timeout_s)
        if str(refusal) not in map(str, labels):
            report.findings.append(_refusal_finding(str(refusal)))
        report.findings += labels
        return report
    places = volume.directory.read_all(Deadline.after(timeout_s))
    live = [place.record for place in places if place.record is not None and place.record.is_live]
    if start_at is not None:
        at = _find_start(live, start_at)
        report.skipped_namespaces = [record.name for record in live[:at]]
        live = live[at:]
    if repair:
        _refuse_in_use(volume, live)
    report.volume = volume.name
    report.findings += _superblock_findings(volume, options)
    for index, place in enumerate(places):
        found: NamespaceCheck | None = None
        if place.record in live:
            name = place.record.name
            found = NamespaceCheck(name)
            report.namespaces.append(found)
            first_slot = start_at[1] if start_at is not None and start_at[0] == name else 0
            _check_namespace(volume, index, found, options, first_slot)
        report.findings += _place_findings(volume, index, place, options, found)
    report.findings += _overlap_findings(volume, places)
    report.erasing = [
        erasing_of(place.record, volume.block_size_bytes)
        for place in places
        if place.record is not None and place.record.is_erasing
    ]
    return report


def _refusal_finding(refusal: str) -> Finding:
    """Why a volume does not open; most say which one first."""
    place, separator, _ = refusal.partition("': ")
    is_named = bool(separator) and place.startswith("volume '")
    return Finding.of(f"{place}'" if is_named else "volume", refusal)


def _find_start(records: Sequence[Record], start_at: tuple[str, int]) -> int:
    """Which of the live records a check begins with; UsageError when there is no such namespace or slot."""
    names = [record.name for record in records]
    name, slot = start_at
    if name not in names:
        raise UsageError(f"start: namespace: expected one of {', '.join(names) or 'none'}, got {name!r}")
    at = names.index(name)
    if not 0 <= slot < records[at].slot_count:
        raise UsageError(f"start: slot: expected 0 to {records[at].slot_count - 1}, got {slot}")
    return at


def _refuse_in_use(volume: Volume, records: Sequence[Record]) -> None:
    """LockHeldError, naming the holder, when one of the namespaces may have an owner."""
    for record in records:
        lock = volume.lock_namespace(record)
        try:
            lease = Lease(f"{volume.name}#{record.name}", fence=Fence(volume.members))
            check_free(record, lease, volume.members)
        finally:
            lock.release()


def erasing_of(record: Record, block_size_bytes: int) -> Erasing:
    """How far the erasure of a record's namespace has come."""
    extent_bytes = record.block_count * block_size_bytes
    return Erasing(
        record.name,
        min(record.erased_mib * MIB, extent_bytes),
        extent_bytes,
        describe_holder(record) if is_held(record) else "",
    )


def _place_findings(
    volume: Volume, index: int, place: Place, options: _Options, found: NamespaceCheck | None
) -> list[Finding]:
    """Damaged copies of a record and of the geometry behind it; with repair they are written again."""
    # An owner that closes in order has written both copies of its record.
    is_closed = options.repair and found is not None and found.was_closed
    findings = [Finding.of(f"record {index}", problem, is_repaired=is_closed) for problem in place.problems]
    record = place.record
    if record is None and place.problems:
        if options.repair:
            volume.free_lost_place(index, deadline=Deadline.after(options.timeout_s))
        text = "no copy is intact: its KV namespace is lost"
        findings = [replace(finding, is_repaired=options.repair) for finding in findings]
        findings.append(Finding(f"record {index}", text, is_repaired=options.repair))
    if record is not None and record.is_live and place.geometry_count < COPY_COUNT:
        if is_closed:
            volume.rewrite_geometry(record.name, deadline=Deadline.after(options.timeout_s))
        if place.geometry_count > 0 and place.intact_count == COPY_COUNT:
            text = "a copy of the geometry behind it is damaged"
            findings.append(Finding(f"record {index}", text, is_repaired=is_closed))
    return findings


def _overlap_findings(volume: Volume, places: Sequence[Place]) -> list[Finding]:
    """KV namespaces that claim the same blocks."""
    records = [place.record for place in places if place.record is not None and not place.record.is_free]
    pairs = [(extent, record) for record in records for extent in record.extents]
    ordered = sorted(pairs, key=lambda pair: pair[0].slba)
    return [
        Finding(
            f"record {after.record_index}",
            f"{volume.name}#{after.name}: extent at LBA {other.slba}: expected it to start behind that of "
            f"{before.name}, at LBA {one.end}",
        )
        for (one, before), (other, after) in pairwise(ordered)
        if other.slba < one.end
    ]


@dataclass(frozen=True)
class _Options:
    progress: Progress | None
    reads_pages: bool
    repair: bool
    throttle: Throttle
    timeout_s: float
    never: threading.Event = field(default_factory=threading.Event)


def _read_labels(devices: Sequence[BlockDevice], timeout_s: float) -> tuple[list[Finding], list[IntactLabel]]:
    """What each member by itself says when they do not make a volume."""
    findings, intact = [], []
    for device in devices:
        try:
            label = read_label(device, Deadline.after(timeout_s))
        except KvdevError as problem:
            findings.append(Finding.of(device.uri, problem))
            continue
        intact.append(IntactLabel(device.uri, label.member_index, label.member_count, label.volume_name))
    return findings, intact


def _superblock_findings(volume: Volume, options: _Options) -> list[Finding]:
    found = read_superblock_copies(volume.io, volume.superblock, Deadline.after(options.timeout_s))
    if found.damaged and options.repair:
        volume.repair_superblocks(deadline=Deadline.after(options.timeout_s))
    return [
        Finding.of(
            f"superblock copy {index} at {volume.io.where(superblock_slbas(volume.superblock)[index])}",
            found.problems[index],
            is_repaired=options.repair,
        )
        for index in found.damaged
    ]


def _open_reader(volume: Volume, record_index: int, what: str, options: _Options) -> KvNamespace:
    return KvNamespace(
        volume.io,
        volume.directory,
        record_index,
        what=what,
        mode="reader",
        lock=None,
        deadline=Deadline.after(options.timeout_s),
    )


def _check_namespace(
    volume: Volume, record_index: int, found: NamespaceCheck, options: _Options, first_slot: int
) -> None:
    timeout_s = options.timeout_s
    name = found.name
    what = f"{volume.name}#{name}"
    try:
        # What it looks like before an owner writes its record.
        namespace = _open_reader(volume, record_index, what, options)
        structures = _structure_findings(volume, namespace, options)
        if options.repair:
            namespace = volume.open_namespace(name, deadline=Deadline.after(timeout_s))
    except LockHeldError:  # came between
        raise
    except KvdevError as problem:
        found.findings.append(Finding.of(what, problem))
        return
    found.replayed_records = namespace.open_report.replayed_record_count
    found.findings += structures
    entries = namespace.entries()
    found.pages = len(entries)
    try:
        if options.reads_pages:
            later = entries[entries["slot_index"] >= first_slot]
            _check_pages(namespace, later, found, options, first_slot)
        if options.repair:
            namespace.rewrite_damaged_table()
            namespace.close(deadline=Deadline.after(timeout_s))
            found.was_closed = True
            volume.rewrite_geometry(name, deadline=Deadline.after(timeout_s), only_damaged=True)
            found.findings = [replace(finding, is_repaired=True) for finding in found.findings]
    finally:
        namespace.abandon()


def _structure_findings(volume: Volume, namespace: KvNamespace, options: _Options) -> list[Finding]:
    """Geometry, table and journal of one namespace."""
    findings = []
    try:
        volume.read_extent_geometry(namespace.record_index, deadline=Deadline.after(options.timeout_s))
    except (CorruptionError, CommandError) as problem:
        findings.append(Finding.of(namespace.what, problem))
    for block in namespace.open_report.damaged_table_blocks:
        text = f"table block {block} at {volume.io.where(namespace.table_slba + block)}: damaged; its pages are lost"
        findings.append(Finding(namespace.what, text, lost_pages_max=namespace.entries_per_table_block))
    gap = namespace.find_journal_gap(deadline=Deadline.after(options.timeout_s))
    if gap is not None:
        text = (
            f"journal position {gap.position} at {volume.io.where(gap.slba)}: expected a block with sequence "
            f"{gap.sequence}, got {gap.reason}: records {gap.sequence} to {gap.last_sequence} are lost"
        )
        findings.append(Finding(namespace.what, text, lost_pages_max=gap.record_count))
    return findings


def _check_pages(
    namespace: KvNamespace,
    entries: EntryArray,
    found: NamespaceCheck,
    options: _Options,
    first_slot: int,
) -> None:
    timeout_s = options.timeout_s
    progress = options.progress or (lambda _: None)
    progress(CheckProgress(found.name, 0, len(entries), first_slot))
    page_bytes = namespace.page_size_bytes
    batch_count = max(1, BATCH_BYTES // page_bytes)
    buffer = aligned_buffer(min(batch_count, max(len(entries), 1)) * page_bytes)
    places = np.uint64(address_of(buffer)) + np.arange(batch_count, dtype=np.uint64) * np.uint64(page_bytes)
    for start in range(0, len(entries), batch_count):
        batch = entries[start : start + batch_count]
        grants = grants_of(batch)
        result = namespace.page_io.read(
            grants, places[: len(batch)], deadline=Deadline.after(timeout_s), may_copy=True
        )
        keys: npt.NDArray[np.uint8] = np.ascontiguousarray(batch["key"])
        is_right = namespace.verify(keys, grants, result.sums)
        expected = namespace.sums_of(keys, grants)
        is_read = result.error == 0
        found.good_pages += int((is_read & is_right).sum())
        found.bad_pages += int((is_read & ~is_right).sum())
        found.unreadable_pages += int((~is_read).sum())
        is_bad = ~(is_read & is_right)
        if options.repair and is_bad.any():
            # Also what cannot be read: a get of it is an error each time, a miss is filled again.
            namespace.withdraw(grants[is_bad], deadline=Deadline.after(timeout_s))
        for index in np.flatnonzero(is_bad):
            if len(found.findings) < FINDING_COUNT_MAX:
                what = "cannot be read"
                if is_read[index]:
                    text = namespace.checksum.text
                    what = f"checksum: expected {text(expected[index])}, got {text(result.sums[index])}"
                found.findings.append(_page_finding(namespace, batch[index], what))
        next_slot = first_slot
        if not options.repair:
            # The last slot again, rather than one that is not there.
            next_slot = min(int(batch["slot_index"][-1]) + 1, namespace.slot_count - 1)
        # First: an interrupt comes in the pause, most likely.
        progress(CheckProgress(found.name, start + len(batch), len(entries), next_slot))
        options.throttle.pace(len(batch) * page_bytes, options.never)


def _page_finding(namespace: KvNamespace, entry: np.void, what: str) -> Finding:
    slot = int(entry["slot_index"])
    place = namespace.where(namespace.slot_slba(slot))
    key = bytes(entry["key"]).hex()
    return Finding(namespace.what, f"page {key} in slot {slot} at {place}: {what}", lost_pages_max=1)


def grants_of(entries: EntryArray) -> GrantArray:
    """Grants to read what entries name."""
    assert entries.dtype == ENTRY_DTYPE
    grants = np.zeros(len(entries), dtype=GRANT_DTYPE)
    for name in ("generation", "checksum", "slot_index", "length"):
        grants[name] = entries[name]
    return grants
