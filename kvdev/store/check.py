"""Read-only check of a volume: labels, superblocks, records, tables, journals and every page's checksum.

Not here: repair. A page that fails is lost: it is reported, and a get of it is a miss already.
Threads: blocks while it reads; ``progress`` is called from the same thread between batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdev.block.device import BlockDevice, aligned_buffer
from kvdev.clock import Deadline
from kvdev.errors import KvdevError
from kvdev.native.index import ENTRY_DTYPE, GRANT_DTYPE, EntryArray, GrantArray
from kvdev.native.io import address_of
from kvdev.store.media import STRUCTURE_BYTES
from kvdev.store.namespace import KvNamespace
from kvdev.store.superblock import parse_superblock
from kvdev.store.volume import Volume, read_label, superblock_slbas
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


@dataclass(frozen=True)
class CheckProgress:
    """How far the check of one namespace's pages has come."""

    namespace: str
    checked_pages: int
    total_pages: int


@dataclass
class NamespaceCheck:
    """What the check of one KV namespace found."""

    name: str
    pages: int = 0
    good_pages: int = 0
    bad_pages: int = 0
    unreadable_pages: int = 0
    replayed_records: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass
class CheckReport:
    """The whole check; ``is_ok`` when there is no finding at all."""

    volume: str = ""
    findings: list[Finding] = field(default_factory=list)
    namespaces: list[NamespaceCheck] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.findings and not any(namespace.findings for namespace in self.namespaces)


Progress = Callable[[CheckProgress], None]


def check_volume(
    devices: Sequence[BlockDevice],
    *,
    progress: Progress | None = None,
    reads_pages: bool = True,
    timeout_s: float = BATCH_TIMEOUT_S,
) -> CheckReport:
    """Verify everything on a volume's members without writing anything.

    Args:
        reads_pages: False checks the structures only.
        timeout_s: bounds each batch, not the whole check.
    """
    report = CheckReport()
    try:
        volume = Volume.open(devices, deadline=Deadline.after(timeout_s))
    except KvdevError as refusal:
        report.findings.append(Finding("volume", str(refusal)))
        report.findings += _label_findings(devices, timeout_s)
        return report
    report.volume = volume.name
    report.findings += _superblock_findings(volume, timeout_s)
    for index, place in enumerate(volume.directory.read_all(Deadline.after(timeout_s))):
        report.findings += [Finding(f"record {index}", problem) for problem in place.problems]
        if place.record is not None and place.record.is_live:
            found = _check_namespace(
                volume, index, place.record.name, progress, reads_pages=reads_pages, timeout_s=timeout_s
            )
            report.namespaces.append(found)
    return report


def _label_findings(devices: Sequence[BlockDevice], timeout_s: float) -> list[Finding]:
    """What each member by itself says when they do not make a volume."""
    findings = []
    for device in devices:
        try:
            label = read_label(device, Deadline.after(timeout_s))
        except KvdevError as problem:
            findings.append(Finding(device.uri, str(problem)))
            continue
        findings.append(
            Finding(
                device.uri,
                f"label intact: member {label.member_index} of {label.member_count} of volume "
                f"{label.volume_name!r}",
            )
        )
    return findings


def _superblock_findings(volume: Volume, timeout_s: float) -> list[Finding]:
    findings = []
    for index, slba in enumerate(superblock_slbas(volume.superblock)):
        what = f"superblock copy {index} at LBA {slba}"
        try:
            data = volume.io.read(slba, 1, Deadline.after(timeout_s)).tobytes()[:STRUCTURE_BYTES]
            parse_superblock(data, what=what, volume_uuid=volume.uuid)
        except KvdevError as problem:
            findings.append(Finding(what, str(problem)))
    return findings


def _check_namespace(
    volume: Volume,
    record_index: int,
    name: str,
    progress: Progress | None,
    *,
    reads_pages: bool,
    timeout_s: float,
) -> NamespaceCheck:
    found = NamespaceCheck(name)
    what = f"{volume.name}#{name}"
    try:
        namespace = KvNamespace(
            volume.io,
            volume.directory,
            record_index,
            what=what,
            mode="reader",
            lock=None,
            deadline=Deadline.after(timeout_s),
        )
    except KvdevError as problem:
        found.findings.append(Finding(what, str(problem)))
        return found
    found.replayed_records = namespace.open_report.replayed_record_count
    for block in namespace.open_report.damaged_table_blocks:
        slba = namespace.table_slba + block
        text = f"table block {block} at LBA {slba}: damaged; its pages are lost"
        found.findings.append(Finding(what, text, lost_pages_max=namespace.entries_per_table_block))
    entries = namespace.entries()
    found.pages = len(entries)
    if reads_pages:
        _check_pages(namespace, entries, found, progress, timeout_s)
    return found


def _check_pages(
    namespace: KvNamespace,
    entries: EntryArray,
    found: NamespaceCheck,
    progress: Progress | None,
    timeout_s: float,
) -> None:
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
        is_right = namespace.verify(keys, grants, result.crc32c)
        is_read = result.error == 0
        found.good_pages += int((is_read & is_right).sum())
        found.bad_pages += int((is_read & ~is_right).sum())
        found.unreadable_pages += int((~is_read).sum())
        for index in np.flatnonzero(~(is_read & is_right)):
            if len(found.findings) < FINDING_COUNT_MAX:
                found.findings.append(
                    _page_finding(namespace, batch[index], result.crc32c[index], is_read[index])
                )
        if progress is not None:
            progress(CheckProgress(found.name, start + len(batch), len(entries)))


def _page_finding(namespace: KvNamespace, entry: np.void, crc32c: np.uint32, is_read: np.bool_) -> Finding:
    slot = int(entry["slot_index"])
    slba = namespace.slot_slba(slot)
    expected = int(entry["checksum"]) & 0xFFFFFFFF
    what = f"checksum: expected 0x{expected:08x}, got 0x{int(crc32c):08x}" if is_read else "cannot be read"
    key = bytes(entry["key"]).hex()
    return Finding(namespace.what, f"page {key} in slot {slot} at LBA {slba}: {what}", lost_pages_max=1)


def grants_of(entries: EntryArray) -> GrantArray:
    """Grants to read what entries name."""
    assert entries.dtype == ENTRY_DTYPE
    grants = np.zeros(len(entries), dtype=GRANT_DTYPE)
    for name in ("generation", "checksum", "slot_index", "length"):
        grants[name] = entries[name]
    return grants
