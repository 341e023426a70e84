"""A volume made anew after the loss of a member: the same KV namespaces, empty, under new UUIDs.

RAID0 has no spare: with a member every page is lost. What the surviving members say of the KV namespaces is kept:
names, quotas, policies, geometries, places. UUIDs are new, of the volume so that the lost member is a stranger when it
comes back, of the namespaces so that nothing left on media looks like a page of theirs.
Not here: the check of a set of members as it was made (``members``).
Spec: docs/on-disk-format.md, Making a volume anew.
Threads: blocks while it reads and writes.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvdev.block.device import BlockDevice
from kvdev.block.drill import refuse_drill
from kvdev.block.stripe import StripeDevice
from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Deadline, unix_time_s
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.claim import check_free, wait_fenced
from kvdev.store.directory import COPY_COUNT, Directory
from kvdev.store.fence import Fence
from kvdev.store.geometry_block import build_geometry, read_geometry
from kvdev.store.label import Label
from kvdev.store.lease import LEASE_MS_DEFAULT, Lease, OwnerIdentity, is_held, is_provably_dead
from kvdev.store.lock import DevicesLock, LockHeldError, OwnerLock
from kvdev.store.members import check_members, check_unused, read_label
from kvdev.store.superblock import FLAG_CLEAN, RECORD_COUNT, Record, Superblock
from kvdev.store.superblock_io import (
    clear_member,
    labels_of,
    lay_out_volume,
    read_superblock_copies,
    write_label,
    write_superblocks,
)
from kvdev.store.volume import LEAVE_TIMEOUT_S, VOLUME_LOCK_BYTE, Volume
from kvdev.store.volume_io import VolumeIo

LEASES_WAITED = 2
"""An owner that this host cannot see may have renewed once more, by the copy of its record that was lost to us."""

log = logging.getLogger("kvdev.store")


@dataclass(frozen=True)
class RecreateReport:
    """What became of the volume."""

    volume: Volume
    former_uuid: bytes
    lost_members: tuple[int, ...]
    namespaces: tuple[str, ...]
    """Made anew, empty."""
    dropped: tuple[str, ...]
    lost_places: tuple[int, ...]
    """Places of the directory of which no copy survived: whether there was a KV namespace nobody can tell."""


def recreate_volume(
    members: Sequence[BlockDevice],
    *,
    replaced: Sequence[str],
    destroy: frozenset[str] = frozenset(),
    drop: frozenset[str] = frozenset(),
    takeover: bool = False,
    deadline: Deadline,
) -> RecreateReport:
    """Make an empty volume with the same KV namespaces of the members that are left and of new ones.

    Everything is checked before anything is written. Interrupted at any write, neither the old volume nor half of the
    new one opens, and the same call made again goes on. Owners on this host have to have given up before
    (``SteadyStore`` does when a member is lost); one elsewhere that may be alive is refused unless ``takeover``.

    Args:
        members: all members of the new volume, in any order.
        replaced: URIs of those that take the place of lost ones, for the lowest index first.
        destroy: URIs of new members whose present content may be overwritten.
        drop: names of KV namespaces to leave out.
        takeover: owners on other hosts are known to be dead or shall stop.
    """
    check_members(members)
    refuse_drill(members, "make a volume anew")
    uris = [member.uri for member in members]
    for field, named in (("replace", replaced), ("destroy", destroy)):
        for uri in named:
            if uri not in uris:
                raise UsageError(f"{field}: {uri}: expected one of the members, which it is not")
    for uri in sorted(destroy):
        if uri not in replaced:
            raise UsageError(
                f"destroy: {uri}: expected one that is named in --replace; others keep their label"
            )
    lock = DevicesLock(members, byte_count=VOLUME_LOCK_BYTE + 1 + RECORD_COUNT)
    try:
        return _Recreation(members, tuple(replaced), destroy, drop, deadline).run(takeover=takeover)
    finally:
        lock.release()


class _Recreation:
    """One call: what was found, checked when this is made; ``run`` writes."""

    def __init__(
        self,
        members: Sequence[BlockDevice],
        replaced: tuple[str, ...],
        destroy: frozenset[str],
        drop: frozenset[str],
        deadline: Deadline,
    ) -> None:
        self._deadline = deadline
        self._destroy = destroy
        survivors = [each for each in members if each.uri not in replaced]
        self._label, places = _read_survivors(survivors, deadline)
        newcomers = sorted(
            (each for each in members if each.uri in replaced), key=lambda each: replaced.index(each.uri)
        )
        label, self._newcomers = self._label, newcomers
        self._name = label.volume_name
        self._lost = tuple(index for index in range(label.member_count) if index not in places)
        if len(newcomers) != len(self._lost) or not newcomers:
            missing = ", ".join(map(str, self._lost)) or "none"
            raise UsageError(
                f"volume {self._name!r}: replace: expected one device for each lost member of "
                f"{label.member_count} ({missing}), got {len(newcomers)}"
            )
        places |= dict(zip(self._lost, newcomers, strict=True))
        self._members = [places[index] for index in range(len(places))]
        stripe = StripeDevice(
            self._members, strip_size_bytes=label.strip_size_bytes, uri=f"volume {self._name}"
        )
        self._io = VolumeIo(stripe, strip_size_bytes=label.strip_size_bytes)
        self._check_sizes(label.row_count)
        own = [_label_or_none(each, deadline) for each in newcomers]
        self._choose_uuids(survivors, own)
        for member, its_label in zip(newcomers, own, strict=True):
            # What an interrupted call has labelled holds nothing of anybody's.
            is_ours = its_label is not None and its_label.volume_uuid == self._volume_uuid
            check_unused([member], destroy | ({member.uri} if is_ours else set()), deadline)
        rows = self._row_count()
        self._check_sizes(rows)
        self._superblock = replace(lay_out_volume(self._name, stripe, rows), volume_uuid=self._volume_uuid)
        self._directory = Directory(self._io, self._superblock)
        found, self._lost_places = self._read_records()
        unknown = sorted(drop - {record.name for record in found})
        if unknown:
            known = ", ".join(record.name for record in found) or "none"
            raise UsageError(f"drop: {unknown[0]!r}: expected one of {known}")
        self._dropped = tuple(record.name for record in found if record.name in drop)
        self._records = [record for record in found if record.name not in drop]
        for record in self._records:
            if record.is_erasing:
                raise UsageError(
                    f"volume {self._name!r}: {record.name!r}: is being erased, and not to its end; leave it out with "
                    f"--drop, then what is left of it stays on its members"
                )
        self._check_extents()
        self._geometries = [self._geometry(record) for record in self._records]

    # --- what is there -----------------------------------------------------------------------

    def _choose_uuids(self, survivors: Sequence[BlockDevice], own: Sequence[Label | None]) -> None:
        """A fresh UUID, or that of a call which was interrupted: its labels are there, and no superblock of it."""
        label = self._label
        is_finished = self._superblock_of(label.volume_uuid) is not None
        if is_finished:
            for member, its_label in zip(self._newcomers, own, strict=True):
                is_member = its_label is not None and its_label.volume_uuid == label.volume_uuid
                if is_member and member.uri not in self._destroy:
                    raise UsageError(
                        f"{member.uri}: replace: is a member of volume {self._name!r}, which is whole"
                    )
            for member in survivors:
                if read_label(member, self._deadline).volume_uuid != label.volume_uuid:
                    raise UsageError(
                        f"{member.uri}: is a lost member of volume {self._name!r} ({label.former_uuid.hex()}), which "
                        f"was made anew without it"
                    )
        if any(label.former_uuid) and not is_finished:
            self._volume_uuid, self._former_uuid = label.volume_uuid, label.former_uuid
        else:
            self._volume_uuid, self._former_uuid = uuid.uuid4().bytes, label.volume_uuid

    def _superblock_of(self, volume_uuid: bytes) -> Superblock | None:
        return read_superblock_copies(self._io, self._label, self._deadline, volume_uuid=volume_uuid).newest

    def _row_count(self) -> int:
        """By the superblock, where a copy is left; labels do not know that a volume has grown."""
        found = [self._superblock_of(each) for each in (self._volume_uuid, self._former_uuid)]
        return max([self._label.row_count, *(each.row_count for each in found if each is not None)])

    def _check_sizes(self, row_count: int) -> None:
        needed = row_count * (self._label.strip_size_bytes // self._label.block_size_bytes)
        for index, member in enumerate(self._members):
            if member.block_count < needed:
                raise UsageError(
                    f"{member.uri}: size: expected at least {needed} blocks for member {index} of volume "
                    f"{self._name!r}, got {member.block_count}"
                )

    def _read_records(self) -> tuple[list[Record], tuple[int, ...]]:
        """The live records, by place: those of the volume that was, or as an interrupted call has written them."""
        views = [
            Directory(self._io, replace(self._superblock, volume_uuid=each)).read_all(self._deadline)
            for each in (self._volume_uuid, self._former_uuid)
        ]
        records, lost = [], []
        for index, (new, old) in enumerate(zip(*views, strict=True)):
            record = new.record or old.record
            is_out_of_reach = all(self._is_on_newcomer(index, copy) for copy in range(COPY_COUNT))
            if record is None and (new.problems or old.problems or is_out_of_reach):
                lost.append(index)
            if record is not None and not record.is_free:
                records.append(record)
        return records, tuple(lost)

    def _check_extents(self) -> None:
        """A namespace whose deletion was cut, and the copy that said so lost, may lie where another is now."""
        pairs = [(extent, record) for record in self._records for extent in record.extents]
        ordered = sorted(pairs, key=lambda pair: pair[0].slba)
        for (one, before), (other, after) in pairwise(ordered):
            if other.slba < one.end:
                older = min(before, after, key=lambda record: record.created_unix_s)
                raise CorruptionError(
                    f"volume {self._name!r}: {before.name!r} and {after.name!r} both have LBA "
                    f"{other.slba}: one was deleted; leave it out with --drop, {older.name!r} is the older"
                )
        for extent, record in ordered:
            if extent.slba < self._superblock.payload_slba or extent.end > self._superblock.payload_end:
                raise CorruptionError(
                    f"volume {self._name!r}: {record.name!r}: extent: expected LBA "
                    f"{self._superblock.payload_slba} to {self._superblock.payload_end}, got {extent.slba} to "
                    f"{extent.end}; leave it out with --drop"
                )

    def _geometry(self, record: Record) -> Geometry:
        try:
            return read_geometry(
                self._io,
                record,
                what=f"{self._name}#{record.name}",
                deadline=self._deadline,
            )
        except CorruptionError as problem:
            raise CorruptionError(
                f"{problem}: it was on a lost member; leave {record.name!r} out with --drop, and create it again"
            ) from problem

    # --- the new volume ----------------------------------------------------------------------

    def run(self, *, takeover: bool) -> RecreateReport:
        """Labels first: from then on nobody opens what is neither the old volume nor the new one."""
        fence = Fence(self._members)
        with contextlib.ExitStack() as locks:
            for record in self._records:
                what = f"{self._name}#{record.name}"
                # The devices' own locks say nothing of memory devices.
                locks.callback(OwnerLock(what, f"namespace-{record.namespace_uuid.hex()}").release)
                if not takeover:
                    check_free(record, Lease(what, fence=Fence()), self._members)
            strangers = fence.strangers(self._deadline)
            if not takeover:
                self._check_strangers(strangers)
            # After whatever became of it, late or not.
            locks.callback(lambda: fence.leave(Deadline.after(LEAVE_TIMEOUT_S)))
            fence.join(self._deadline)
            return self._write(fence, frozenset(strangers))

    def _check_strangers(self, strangers: Mapping[int, tuple[BlockDevice, bytes]]) -> None:
        """The newer copy of a record may have been on the lost member: its owner shows in the reservations alone."""
        known = {record.lease_key for record in self._records if is_held(record)}
        for key, (member, host_id) in strangers.items():
            if key not in known:
                raise LockHeldError(
                    f"volume {self._name}: HOSTID {uuid.UUID(bytes=host_id)} is registered with {member.uri}, and may "
                    f"own a KV namespace whose record says so on a lost member only; stop it there, or once it is "
                    f"known to be dead: --takeover",
                    pid=0,
                )

    def _write(self, fence: Fence, strangers: frozenset[int]) -> RecreateReport:
        deadline = self._deadline
        for member in self._newcomers:
            clear_member(member, deadline, wipes=member.uri in self._destroy)
        labels = labels_of(self._superblock, self._members, former_uuid=self._former_uuid)
        is_going_on = self._volume_uuid == self._label.volume_uuid
        sequence = self._label.sequence + 1 if is_going_on else 1
        survivors = [index for index in range(len(labels)) if index not in self._lost]
        for index in (*self._lost, *survivors):
            write_label(self._members[index], replace(labels[index], sequence=sequence), deadline)
        records = [
            self._anew(record, geometry)
            for record, geometry in zip(self._records, self._geometries, strict=True)
        ]
        # An owner that may still be alive finds its record gone when it renews; what it was granted before ends.
        records = self._write_records(records)
        self._wait_for_owners(fence, strangers)
        volume = Volume(self._io, self._superblock, self._members)
        for record, geometry in zip(records, self._geometries, strict=True):
            volume.format_namespace(record, geometry, deadline)
        records = self._write_records(records)
        write_superblocks(self._io, self._superblock, deadline)
        return RecreateReport(
            volume,
            self._former_uuid,
            self._lost,
            tuple(sorted(record.name for record in records)),
            self._dropped,
            self._lost_places,
        )

    def _anew(self, record: Record, geometry: Geometry) -> Record:
        """The same namespace, empty, with another UUID and nobody's."""
        return replace(
            record,
            volume_uuid=self._superblock.volume_uuid,
            namespace_uuid=uuid.uuid4().bytes,
            epoch=0,
            flags=FLAG_CLEAN,
            tail_position=0,
            tail_sequence=1,
            epoch_first_sequence=1,
            durable_sequence=0,
            scrub_slot=0,
            scrubbed_unix_s=0,
            owner_boot_id=bytes(16),
            owner_pid=0,
            owner_start_ticks=0,
            lease_host_id=bytes(16),
            lease_key=0,
            lease_ms=0,
            lease_pid_namespace=0,
            lease_host_name="",
            created_unix_s=unix_time_s(),
            geometry_copy=build_geometry(geometry),
        )

    def _write_records(self, records: Sequence[Record]) -> list[Record]:
        """Both copies of each, durable, one after the other: first the one that is on a new member, if one is."""
        written = [replace(record, sequence=record.sequence + COPY_COUNT) for record in records]
        for turn in range(COPY_COUNT):
            dirty = self._io.no_members()
            for record in written:
                copies = [replace(record, sequence=record.sequence - step) for step in (1, 0)]
                copies.sort(
                    key=lambda each: not self._is_on_newcomer(each.record_index, each.sequence % COPY_COUNT)
                )
                dirty = dirty | self._directory.write_place(copies[turn], self._deadline)
            self._io.flush(dirty, self._deadline)
        return written

    def _is_on_newcomer(self, record_index: int, copy_index: int) -> bool:
        slba = self._directory.slba_of(record_index, copy_index)
        strip_blocks = self._superblock.strip_size_bytes // self._superblock.block_size_bytes
        return slba // strip_blocks % len(self._members) in self._lost

    def _wait_for_owners(self, fence: Fence, strangers: frozenset[int]) -> None:
        """Return when nothing that owners of the volume that was have sent can land any more.

        Of those whose record was on a lost member alone only the keys are known, the ``strangers``.
        """
        me, wait_s = OwnerIdentity.current(), 0.0
        held = [record for record in self._records if not record.is_clean]
        # Owners of one host have one key: put out once, it is not found a second time.
        keys = {record.lease_key for record in held}
        left = {key: fence.put_out(key, self._deadline, new=self._newcomers) for key in keys | strangers}
        for key in strangers - keys:
            for member in left[key]:
                wait_s = max(wait_s, member.lost_writer_s + LEASES_WAITED * LEASE_MS_DEFAULT / 1000)
        for record in held:
            is_dead = not is_held(record) or is_provably_dead(record, me, self._members)
            for member in left[record.lease_key]:
                alive_s = member.lost_writer_s + LEASES_WAITED * record.lease_ms / 1000
                wait_s = max(wait_s, member.dead_writer_s if is_dead else alive_s)
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        # What this process itself has lost on these devices, under an owner before.
        until_ns = max(now_ns + int(wait_s * NS_PER_S), *(member.fence_ns for member in self._members))
        lease = Lease(f"volume {self._name}", fence=fence)
        lease.fence_until_ns = until_ns
        if wait_s:
            log.warning("%s: writes of its owners before may land for %g s", lease.what, wait_s)
        wait_fenced(lease, self._deadline)


# --- labels ----------------------------------------------------------------------------------


def _label_or_none(device: BlockDevice, deadline: Deadline) -> Label | None:
    try:
        return read_label(device, deadline)
    except (CorruptionError, UsageError):  # not one of ours, or too small for any
        return None


def _read_survivors(
    devices: Sequence[BlockDevice], deadline: Deadline
) -> tuple[Label, dict[int, BlockDevice]]:
    """The members that are left, each in its place: of one volume, or of it and what an interrupted call makes of it.

    The label is one of the newest.
    """
    if not devices:
        raise UsageError("replace: expected at least one member that is left, got none; make a new volume")
    labels = [read_label(device, deadline) for device in devices]
    check_not_hidden(devices, labels, deadline)
    uuids = {label.volume_uuid for label in labels}
    newest = max(labels, key=lambda label: (label.former_uuid in uuids, label.sequence))
    known = {newest.volume_uuid, *({newest.former_uuid} & uuids)}
    places: dict[int, BlockDevice] = {}
    for device, label in zip(devices, labels, strict=True):
        if label.volume_uuid not in known:
            raise UsageError(
                f"{device.uri}: belongs to volume {label.volume_name!r} ({label.volume_uuid.hex()}), "
                f"expected {newest.volume_name!r} ({newest.volume_uuid.hex()})"
            )
        if label.member_index in places:
            raise UsageError(
                f"{device.uri}: is member {label.member_index} of volume {label.volume_name!r}, and so is "
                f"{places[label.member_index].uri}: one of them is a copy"
            )
        places[label.member_index] = device
    return newest, places


def check_not_hidden(devices: Sequence[BlockDevice], labels: Sequence[Label], deadline: Deadline) -> None:
    """One RAID0 device over the members shows the second one's label in its own second strip."""
    label, device = labels[0], devices[0]
    strip_blocks = label.strip_size_bytes // label.block_size_bytes
    if len(devices) > 1 or label.member_count == 1 or device.block_count < 2 * strip_blocks:
        return
    with contextlib.suppress(CorruptionError):
        if read_label(device, deadline, slba=strip_blocks).volume_uuid == label.volume_uuid:
            raise UsageError(
                f"{device.uri}: expected the members by themselves, got one device over all of them"
            )
