"""Volumes: RAID0 over labelled members, carrying KV namespaces.

Row 0 belongs to the volume: a label at the start of every member's strip, two superblock copies behind.
Not here: the page table of a namespace (``namespace``); what else lies on a device (``signature``).
Spec: docs/on-disk-format.md.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from kvdev.block.device import BlockDevice, aligned_buffer, flush, read_blocks, write_blocks
from kvdev.block.drill import refuse_drill
from kvdev.block.file import FileDevice
from kvdev.block.stripe import StripeDevice, check_strip_size
from kvdev.clock import Deadline, unix_time_s
from kvdev.errors import CapacityError, CorruptionError, KvdevError, UnsupportedError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.native.index import Uint8Array, format_table, table_buffer
from kvdev.native.io import OPCODE_WRITE
from kvdev.store.claim import claim, leave, wait_fenced
from kvdev.store.directory import Directory
from kvdev.store.erase import Progress, erase_blocks
from kvdev.store.fence import Fence, GuestFence
from kvdev.store.geometry_block import build_geometry, read_geometry
from kvdev.store.label import (
    IDENTITY_NAMES,
    LABEL_BYTES,
    MEMBER_COUNT_MAX,
    Label,
    MemberInfo,
    build_label,
    identity_of_kind,
    parse_label,
)
from kvdev.store.lease import LEASE_MS_DEFAULT, Lease, OwnerIdentity
from kvdev.store.lock import DevicesLock, OwnerLock, WriterLock
from kvdev.store.media import NAME_BYTES, STRUCTURE_BYTES, UNIT_BYTES
from kvdev.store.namespace import KvNamespace, Mode
from kvdev.store.page_io import PageIo, page_io_of
from kvdev.store.plan import NamespacePlan, pages_within, plan_namespace
from kvdev.store.signature import find_signatures, find_users, wipe
from kvdev.store.superblock import (
    EVICTION_POLICIES,
    RECORD_COUNT,
    RECORD_FREE,
    RECORD_LIVE,
    Record,
    Superblock,
    build_superblock,
    parse_superblock,
    policy_name,
)
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.units import MIB, format_size

STRIP_SIZE_BYTES_DEFAULT = 128 * 1024
BLOCK_SIZE_BYTES_MAX = UNIT_BYTES
FORMAT_PIECE_BYTES = MIB
ERASE_TIMEOUT_S = 30.0
"""For what follows the erasing of pages, whose length nobody can bound beforehand."""
LEAVE_TIMEOUT_S = 10.0
"""For giving registrations back, after whatever became of the change."""
TTL_S_MAX = 10 * 365 * 24 * 3600
"""Ten years: below what the seconds of an entry can tell."""
VOLUME_LOCK_BYTE = 0
"""Which lock byte of a member file stands for the volume; its KV namespaces' follow."""


@dataclass(frozen=True)
class NamespaceInfo:
    """A KV namespace as its record tells, without opening it."""

    name: str
    uuid: str
    geometry: Geometry
    page_size_bytes: int
    quota_pages: int
    slot_count: int
    extent_bytes: int
    epoch: int
    is_clean: bool
    eviction_policy: str
    ttl_s: int
    record: Record


class Volume:
    """An open volume; the members stay the caller's to close, after the volume."""

    def __init__(self, io: VolumeIo, superblock: Superblock, members: Sequence[BlockDevice]) -> None:
        """For ``create`` and ``open`` only."""
        self.io = io
        self.superblock = superblock
        self.members = list(members)
        self.name = superblock.volume_name
        self.uuid = superblock.volume_uuid
        self.strip_size_bytes = superblock.strip_size_bytes
        self.block_size_bytes = superblock.block_size_bytes
        self.directory = Directory(io, superblock)

    # --- create ------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        members: Sequence[BlockDevice],
        *,
        name: str,
        strip_size_bytes: int = STRIP_SIZE_BYTES_DEFAULT,
        size_bytes: int | None = None,
        destroy: frozenset[str] = frozenset(),
        deadline: Deadline,
    ) -> Volume:
        """Label the members, in the order given, and make an empty volume.

        Everything is checked on every member before anything is written; a failure after that leaves
        labels without a superblock, which ``open`` and ``create`` recognise as unfinished.

        Args:
            size_bytes: use this much of the members instead of all of it.
            destroy: URIs of members whose present content may be overwritten.
        """
        check_name("volume name", name)
        _check_members(members)
        refuse_drill(members, "create a volume")
        check_strip_size(strip_size_bytes, members[0].block_size_bytes)
        stripe = StripeDevice(members, strip_size_bytes=strip_size_bytes, uri=f"volume {name}")
        row_count = _row_count(stripe, size_bytes)
        superblock = _lay_out(name, stripe, row_count)
        unknown = sorted(destroy - {member.uri for member in members})
        if unknown:
            raise UsageError(f"destroy: {unknown[0]}: expected one of the members, which it is not")
        # Two that make volumes at once, or one over a volume in use, would write into each other's.
        lock = DevicesLock(members, byte_count=VOLUME_LOCK_BYTE + 1 + RECORD_COUNT)
        try:
            _check_unused(members, destroy, deadline)
            io = _write_volume(stripe, superblock, destroy, deadline)
        finally:
            lock.release()
        return cls(io, superblock, members)

    # --- open --------------------------------------------------------------------------------

    @classmethod
    def open(cls, devices: Sequence[BlockDevice], *, deadline: Deadline) -> Volume:
        """Open by labels, whatever the order of the devices; or one RAID0 device that hides the members.

        Refuses, with the member and the reason, what does not add up to the volume as it was made.
        """
        _check_members(devices)
        labels = [read_label(device, deadline) for device in devices]
        device: BlockDevice
        if len(devices) == 1 and labels[0].member_count > 1:
            _check_hidden_members(devices[0], labels[0], deadline)
            device, members = devices[0], list(devices)
        else:
            members = _sort_members(devices, labels)
            device = StripeDevice(
                members,
                strip_size_bytes=labels[0].strip_size_bytes,
                uri=f"volume {labels[0].volume_name}",
            )
        io = VolumeIo(device, strip_size_bytes=labels[0].strip_size_bytes)
        return cls(io, _read_superblock(io, labels[0], deadline), members)

    # --- KV namespaces -----------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes that KV namespaces can share."""
        return (self.superblock.payload_end - self.superblock.payload_slba) * self.block_size_bytes

    def free_extents(self, deadline: Deadline) -> list[tuple[int, int]]:
        """Unused runs of blocks (first, count), in order."""
        records = [info.record for info in self.namespaces(deadline=deadline)]
        free = []
        start = self.superblock.payload_slba
        for record in sorted(records, key=lambda record: record.extent_slba):
            if record.extent_slba > start:
                free.append((start, record.extent_slba - start))
            start = record.extent_end
        if start < self.superblock.payload_end:
            free.append((start, self.superblock.payload_end - start))
        return free

    def namespaces(self, *, deadline: Deadline) -> list[NamespaceInfo]:
        """All KV namespaces by name; CorruptionError when a record has no intact copy."""
        infos = []
        for place in self.directory.read_all(deadline):
            if place.record is None:
                if place.problems:
                    raise CorruptionError(f"volume {self.name}: {place.problems[0]}; run volume check")
                continue
            if place.record.is_live:
                infos.append(self._info(place.record, deadline))
        return sorted(infos, key=lambda info: info.name)

    def _info(self, record: Record, deadline: Deadline) -> NamespaceInfo:
        return NamespaceInfo(
            name=record.name,
            uuid=str(uuid.UUID(bytes=record.namespace_uuid)),
            geometry=read_geometry(self.io, record, what=f"{self.name}#{record.name}", deadline=deadline),
            page_size_bytes=record.page_size_bytes,
            quota_pages=record.quota_pages,
            slot_count=record.slot_count,
            extent_bytes=record.extent_block_count * self.block_size_bytes,
            epoch=record.epoch,
            is_clean=record.is_clean,
            eviction_policy=policy_name(record),
            ttl_s=record.ttl_s,
            record=record,
        )

    def namespace(self, name: str, *, deadline: Deadline) -> NamespaceInfo:
        """The KV namespace of this name; UsageError listing those there are."""
        infos = self.namespaces(deadline=deadline)
        for info in infos:
            if info.name == name:
                return info
        if not infos:
            raise UsageError(
                f"volume {self.name}: namespace {name!r}: the volume has no KV namespace; create it first"
            )
        known = ", ".join(info.name for info in infos)
        raise UsageError(f"volume {self.name}: namespace {name!r}: expected one of {known}")

    def pages_for(self, geometry: Geometry, size_bytes: int) -> int:
        """The largest quota in pages of a namespace that takes at most ``size_bytes`` of the volume."""
        return pages_within(
            size_bytes,
            page_size_bytes=geometry.page_size_bytes,
            block_size_bytes=self.block_size_bytes,
            strip_size_bytes=self.strip_size_bytes,
        )

    def plan(
        self, geometry: Geometry, *, quota_pages: int, journal_block_count: int | None = None
    ) -> NamespacePlan:
        """What a namespace of this quota would take."""
        return plan_namespace(
            page_size_bytes=geometry.page_size_bytes,
            quota_pages=quota_pages,
            block_size_bytes=self.block_size_bytes,
            strip_size_bytes=self.strip_size_bytes,
            journal_block_count=journal_block_count,
        )

    def create_namespace(
        self,
        name: str,
        geometry: Geometry,
        *,
        quota_bytes: int | None = None,
        quota_pages: int | None = None,
        journal_block_count: int | None = None,
        eviction_policy: str = "lru",
        ttl_s: int = 0,
        deadline: Deadline,
    ) -> NamespaceInfo:
        """Make an empty KV namespace; one of the two quotas says how many pages it may hold.

        ``quota_bytes`` counts pages' bytes; table, journal and spare slots come on top (see ``plan``).

        Args:
            eviction_policy: what goes at the quota: ``lru`` the page unused longest, ``fifo`` the one put
                first, ``lfu`` the one used least often, ``s3fifo`` what was put and not used again, ``none``
                nothing, so that puts fail with CapacityError.
            ttl_s: pages are gone so many seconds after they were put, pinned or not; 0 for never.
        """
        check_name("namespace name", name)
        if eviction_policy not in EVICTION_POLICIES:
            raise UsageError(
                f"eviction_policy: expected one of {', '.join(EVICTION_POLICIES)}, got {eviction_policy!r}"
            )
        if not 0 <= ttl_s <= TTL_S_MAX:
            raise UsageError(f"ttl_s: expected 0 for none, to {TTL_S_MAX}, got {ttl_s}")
        if (quota_bytes is None) == (quota_pages is None):
            raise UsageError("quota: expected one of quota_bytes and quota_pages")
        if quota_pages is None:
            assert quota_bytes is not None
            quota_pages = quota_bytes // geometry.page_size_bytes
            if quota_pages < 1:
                raise UsageError(
                    f"quota_bytes: expected at least one page of {format_size(geometry.page_size_bytes)}, "
                    f"got {quota_bytes} bytes"
                )
        plan = self.plan(geometry, quota_pages=quota_pages, journal_block_count=journal_block_count)
        lock = self._lock_volume(deadline)
        try:
            infos = self.namespaces(deadline=deadline)
            if any(info.name == name for info in infos):
                raise UsageError(f"volume {self.name}: namespace {name!r}: exists already")
            place_index = self._free_place(deadline)
            slba = self._find_extent(plan, name, deadline)
            record = self._new_record(name, geometry, plan, slba, place_index, deadline)
            record = replace(record, eviction_policy=EVICTION_POLICIES.index(eviction_policy), ttl_s=ttl_s)
            self._format(record, geometry, deadline)
            for copy in range(2):
                # Both copies, one after the other: from here on one intact copy alone means a loss.
                record = replace(record, sequence=record.sequence + copy)
                self.io.flush(self.directory.write(record, deadline), deadline)
        finally:
            lock.release()
        return self._info(record, deadline)

    def _free_place(self, deadline: Deadline) -> int:
        for index, place in enumerate(self.directory.read_all(deadline)):
            if place.record is None or not place.record.is_live:
                return index
        raise CapacityError(
            f"volume {self.name}: expected at most {self.superblock.record_count} namespaces; delete one first"
        )

    def _find_extent(self, plan: NamespacePlan, name: str, deadline: Deadline) -> int:
        """First fit, starting on a strip."""
        strip_blocks = self.strip_size_bytes // self.block_size_bytes
        largest = 0
        for start, count in self.free_extents(deadline):
            padding = -start % strip_blocks
            if count - padding >= plan.total_blocks:
                return start + padding
            largest = max(largest, count - padding)
        block = self.block_size_bytes
        raise CapacityError(
            f"volume {self.name}: namespace {name!r}: expected {format_size(plan.total_bytes)} "
            f"({plan.slot_count} slots of {format_size(plan.slot_blocks * block)} and "
            f"{format_size(plan.metadata_blocks * block)} of table and journal), got "
            f"{format_size(max(largest, 0) * block)} free in one piece; lower the quota or enlarge the volume"
        )

    def _new_record(
        self,
        name: str,
        geometry: Geometry,
        plan: NamespacePlan,
        slba: int,
        place_index: int,
        deadline: Deadline,
    ) -> Record:
        data = build_geometry(geometry)
        old = self.directory.read(place_index, deadline).record
        table_slba = slba + plan.geometry_blocks
        journal_slba = table_slba + plan.table_blocks + plan.spare_blocks
        return Record(
            volume_uuid=self.uuid,
            record_index=place_index,
            sequence=(old.sequence if old is not None else 0) + 1,
            epoch=0,
            name=name,
            namespace_uuid=uuid.uuid4().bytes,
            geometry_fingerprint=geometry.fingerprint(),
            state=RECORD_LIVE,
            flags=1,
            page_size_bytes=plan.page_size_bytes,
            slot_blocks=plan.slot_blocks,
            slot_count=plan.slot_count,
            quota_pages=plan.quota_pages,
            geometry_slba=slba,
            geometry_size_bytes=len(data),
            geometry_crc32c=crc32c(data),
            table_slba=table_slba,
            table_block_count=plan.table_blocks,
            spare_block_count=plan.spare_blocks,
            journal_slba=journal_slba,
            journal_block_count=plan.journal_blocks,
            tail_position=0,
            tail_sequence=1,
            epoch_first_sequence=1,
            data_slba=slba + plan.metadata_blocks,
            extent_slba=slba,
            extent_block_count=plan.total_blocks,
            owner_boot_id=bytes(16),
            owner_pid=0,
            owner_start_ticks=0,
            created_unix_s=unix_time_s(),
        )

    def _format(self, record: Record, geometry: Geometry, deadline: Deadline) -> None:
        """Write geometry and an empty table, and make them durable; the journal starts by its UUID alone."""
        dirty: MemberMask = self.io.write(record.geometry_slba, build_geometry(geometry), deadline)
        block_bytes = self.block_size_bytes
        piece = FORMAT_PIECE_BYTES // block_bytes
        buffer = aligned_buffer(FORMAT_PIECE_BYTES)
        for first in range(0, record.table_block_count, piece):
            count = min(piece, record.table_block_count - first)
            format_table(
                block_bytes=block_bytes,
                first_block=first,
                block_count=count,
                slot_count=record.slot_count,
                uuid=record.namespace_uuid,
                out=buffer,
            )
            dirty = dirty | self.io.transfer(
                OPCODE_WRITE, record.table_slba + first, buffer[: count * block_bytes], deadline
            )
        self.io.flush(dirty, deadline)

    def open_namespace(
        self,
        name: str,
        *,
        mode: Mode = "owner",
        geometry: Geometry | None = None,
        takeover: bool = False,
        identity: OwnerIdentity | None = None,
        lease_ms: int = LEASE_MS_DEFAULT,
        unix_s: Callable[[], int] = unix_time_s,
        make_image: Callable[[int], Uint8Array] = table_buffer,
        deadline: Deadline,
    ) -> KvNamespace:
        """Open a KV namespace as its owner, or as one of any number of readers and followers.

        An owner is refused while another may be alive, naming that one.

        Args:
            geometry: what the caller expects; refused, naming the field, when the namespace has another.
            takeover: put an owner of another host out, which is known to be dead or shall stop.
            identity: who the record says owns it; by default this process.
            lease_ms: how long others wait, where only time keeps an owner out.
            unix_s: the clock by which pages grow old, where they do.
            make_image: memory for the table, by its size in bytes; zeroed, at the start of a page.
        """
        if mode not in get_args(Mode):
            names = ", ".join(repr(name) for name in get_args(Mode))
            raise UsageError(f"mode: expected one of {names}, got {mode!r}")
        info = self.namespace(name, deadline=deadline)
        what = f"{self.name}#{name}"
        if geometry is not None:
            check_geometry(what, expected=geometry, actual=info.geometry)
        index = info.record.record_index
        if mode == "owner":
            refuse_drill(self.members, f"own {what}", unless_honest=True)
        lock = self._lock_namespace(info.record) if mode == "owner" else None
        try:
            lease = None
            if lock is not None:
                self._check_still_there(info.record, what, deadline)
                lease = Lease(what, fence=Fence(self.members), identity=identity, lease_ms=lease_ms)
                claim(self.directory, index, lease, self.members, takeover=takeover, deadline=deadline)
                if lease.fence.kind != "reservation":
                    writers = self.writer_lock(info.record)
                    lease.writers_gone = lambda: not writers.is_held_elsewhere()
            return KvNamespace(
                self.io,
                self.directory,
                index,
                what=what,
                mode=mode,
                lock=lock,
                lease=lease,
                unix_s=unix_s,
                make_image=make_image,
                deadline=deadline,
            )
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def clone_namespace(self, name: str, new_name: str, *, deadline: Deadline) -> NamespaceInfo:
        """Make an empty KV namespace like another one: its geometry, quota, eviction policy and time to live."""
        model = self.namespace(name, deadline=deadline)
        return self.create_namespace(
            new_name,
            model.geometry,
            quota_pages=model.quota_pages,
            journal_block_count=model.record.journal_block_count,
            eviction_policy=model.eviction_policy,
            ttl_s=model.ttl_s,
            deadline=deadline,
        )

    def writer_lock(self, record: Record) -> WriterLock:
        """What a process holds while it writes under grants of a KV namespace's owner."""
        return WriterLock(
            f"writers-{record.namespace_uuid.hex()}", members=self.members, byte=record.record_index
        )

    def open_page_io(self, name: str, *, deadline: Deadline) -> PageIo:
        """A data-only handle: reads and writes pages by grants that the owner hands out, takes no lock."""
        return page_io_of(self.io, self.namespace(name, deadline=deadline).record)

    def delete_namespace(
        self,
        name: str,
        *,
        erase: bool = False,
        takeover: bool = False,
        progress: Progress | None = None,
        deadline: Deadline,
    ) -> None:
        """Remove a KV namespace and free its extent; refused while it may have an owner.

        Args:
            takeover: as in ``open_namespace``.
            erase: overwrite everything it held and verify that first. Interrupted, the namespace is still
                there, with fewer pages, to be deleted again. Each piece has its own deadline.
        """
        with self.namespace_held(name, deadline, takeover=takeover) as current:
            geometry_blocks = UNIT_BYTES // self.block_size_bytes
            if erase:
                # Without the geometry the volume's namespaces could not be listed: it goes last.
                first = current.geometry_slba + geometry_blocks
                if current.geometry_slba > current.extent_slba:
                    before = current.geometry_slba - current.extent_slba
                    erase_blocks(self.io, current.extent_slba, before, progress=progress)
                if first < current.extent_end:
                    erase_blocks(self.io, first, current.extent_end - first, progress=progress)
                deadline = Deadline.after(ERASE_TIMEOUT_S)
            self.write_both(replace(current, state=RECORD_FREE, lease_ms=0, lease_key=0), deadline)
            if erase:
                erase_blocks(self.io, current.geometry_slba, geometry_blocks)

    def rewrite_superblocks(self, damaged: Sequence[int], *, deadline: Deadline) -> None:
        """Write damaged copies again from the intact one, which is left alone."""
        lock = self._lock_volume(deadline)
        try:
            write_superblocks(self.io, self.superblock, deadline, copies=damaged)
        finally:
            lock.release()

    def rename_namespace(self, name: str, new_name: str, *, deadline: Deadline) -> None:
        """Give a KV namespace another name; refused while it may have an owner."""
        check_name("new name", new_name)
        with self.namespace_held(name, deadline) as current:
            if any(info.name == new_name for info in self.namespaces(deadline=deadline)):
                raise UsageError(f"volume {self.name}: namespace {new_name!r}: exists already")
            self.write_both(replace(current, name=new_name), deadline)

    @contextlib.contextmanager
    def namespace_held(self, name: str, deadline: Deadline, *, takeover: bool = False) -> Iterator[Record]:
        """The newest record of a namespace, under the locks that a change of it needs, its last owner kept out."""
        volume_lock = self._lock_volume(deadline)
        try:
            record = self.namespace(name, deadline=deadline).record
            lock = self._lock_namespace(record)
            try:
                lease = Lease(f"{self.name}#{name}", fence=Fence(self.members))
                if not record.is_clean:
                    claim(
                        self.directory,
                        record.record_index,
                        lease,
                        self.members,
                        takeover=takeover,
                        deadline=deadline,
                    )
                    wait_fenced(lease, deadline)
                current = self.directory.read(record.record_index, deadline).record
                assert current is not None
                yield current
                leave(lease.fence, self.directory, deadline)
            finally:
                lock.release()
        finally:
            volume_lock.release()

    def write_both(self, record: Record, deadline: Deadline) -> None:
        """Both copies, one after the other: the older state must not come back when the newer is damaged."""
        for step in (1, 2):
            newer = replace(record, sequence=record.sequence + step)
            self.io.flush(self.directory.write(newer, deadline), deadline)

    def _check_still_there(self, record: Record, what: str, deadline: Deadline) -> None:
        """What was read before the lock may have been deleted, and its place or devices given to another."""
        self._check_still_ours(deadline)
        current = self.directory.read(record.record_index, deadline).record
        if current is not None and (not current.is_live or current.namespace_uuid != record.namespace_uuid):
            raise UsageError(f"{what}: was deleted meanwhile; open the volume anew")

    def _check_still_ours(self, deadline: Deadline) -> None:
        label = read_label(self.members[0], deadline)
        if label.volume_uuid != self.uuid:
            raise UsageError(
                f"{self.members[0].uri}: expected volume {self.name!r} ({self.uuid.hex()}), got "
                f"{label.volume_name!r} ({label.volume_uuid.hex()}): it was made anew meanwhile"
            )

    def _lock_volume(self, deadline: Deadline) -> _VolumeLock:
        refuse_drill(self.members, f"change volume {self.name}")
        lock = OwnerLock(
            f"volume {self.name}", f"volume-{self.uuid.hex()}", members=self.members, byte=VOLUME_LOCK_BYTE
        )
        try:
            self._check_still_ours(deadline)
            fence = GuestFence(self.members)
            fence.join(deadline)
        except BaseException:
            lock.release()
            raise
        return _VolumeLock(lock, fence, self.directory)

    def _lock_namespace(self, record: Record) -> OwnerLock:
        return OwnerLock(
            f"{self.name}#{record.name}",
            f"namespace-{record.namespace_uuid.hex()}",
            members=self.members,
            byte=VOLUME_LOCK_BYTE + 1 + record.record_index,
        )


class _VolumeLock:
    """The lock of this host for a change of the volume, and leave to write where members are reserved."""

    def __init__(self, lock: OwnerLock, fence: GuestFence, directory: Directory) -> None:
        self._lock = lock
        self._fence = fence
        self._directory = directory

    def release(self) -> None:
        try:
            with contextlib.suppress(KvdevError):
                leave(self._fence, self._directory, Deadline.after(LEAVE_TIMEOUT_S))
        finally:
            self._lock.release()


# --- checks ----------------------------------------------------------------------------------


def check_name(field: str, name: str) -> None:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
        raise UsageError(f"{field}: expected printable text of 1 to {NAME_BYTES} bytes, got {name!r:.100}")


def check_geometry(what: str, *, expected: Geometry, actual: Geometry) -> None:
    """Raise UsageError naming the first field in which two geometries differ."""
    stored = actual.to_dict()
    for field, value in expected.to_dict().items():
        if stored[field] != value:
            raise UsageError(
                f"{what}: geometry: {field}: expected {value!r}, the namespace has {stored[field]!r}; "
                "name its geometry, or none"
            )


def _check_members(members: Sequence[BlockDevice]) -> None:
    """What any set of members must fulfil, labelled or not."""
    if not members:
        raise UsageError("members: expected at least one device, got none")
    if len(members) > MEMBER_COUNT_MAX:
        raise UsageError(f"members: expected at most {MEMBER_COUNT_MAX} devices, got {len(members)}")
    seen: dict[object, str] = {}
    for member in members:
        if member.metadata_size_bytes:
            raise UnsupportedError(
                f"{member.uri}: metadata: expected a namespace without metadata, got "
                f"{member.metadata_size_bytes} bytes per block; format it without",
                feature="metadata",
            )
        if member.block_size_bytes > BLOCK_SIZE_BYTES_MAX:
            raise UnsupportedError(
                f"{member.uri}: block size: expected at most {BLOCK_SIZE_BYTES_MAX}, "
                f"got {member.block_size_bytes}",
                feature="block size",
            )
        for mark in (id(member), member.uri):
            if mark in seen:
                raise UsageError(f"members: {member.uri} is named twice")
            seen[mark] = member.uri
        same = seen.setdefault(_identity_mark(member), member.uri)
        if same != member.uri:
            raise UsageError(f"members: {member.uri} and {same} are the same device")


def _identity_mark(member: BlockDevice) -> object:
    identity = member.identity
    for value in (identity.nguid, identity.uuid, identity.eui64):
        if value is not None:
            return value
    if isinstance(member, FileDevice):
        # By whatever name: through links, or written another way.
        found = os.fstat(member.fd)
        return (found.st_rdev,) if stat.S_ISBLK(found.st_mode) else (found.st_dev, found.st_ino)
    return member.uri


def _row_count(stripe: StripeDevice, size_bytes: int | None) -> int:
    rows = stripe.row_count
    row_bytes = stripe.strip_size_bytes * len(stripe.members)
    capacity = rows * row_bytes
    if size_bytes is not None:
        if size_bytes > capacity:
            raise UsageError(
                f"size: expected at most {capacity} bytes ({format_size(capacity)}: {len(stripe.members)} "
                f"members, the smallest {format_size(min(m.size_bytes for m in stripe.members))}), "
                f"got {size_bytes}"
            )
        rows = size_bytes // row_bytes
    return rows


def _lay_out(name: str, stripe: StripeDevice, row_count: int) -> Superblock:
    """Where directory and payload lie: the directory's copies start on different members if there are any."""
    member_count = len(stripe.members)
    strip_blocks = stripe.strip_blocks
    directory_blocks = RECORD_COUNT * UNIT_BYTES // stripe.block_size_bytes
    directory_strips = -(-directory_blocks // strip_blocks)
    step = directory_strips + (1 if member_count > 1 and directory_strips % member_count == 0 else 0)
    first_strip = member_count
    payload_strip = -(-(first_strip + step + directory_strips) // member_count) * member_count
    end = row_count * member_count * strip_blocks
    if payload_strip * strip_blocks >= end:
        raise UsageError(
            f"members: expected more than {payload_strip // member_count} strips of "
            f"{format_size(stripe.strip_size_bytes)} on each member, got {row_count}; "
            f"use larger members or a smaller strip size"
        )
    return Superblock(
        volume_uuid=uuid.uuid4().bytes,
        volume_name=name,
        sequence=1,
        member_count=member_count,
        block_size_bytes=stripe.block_size_bytes,
        strip_size_bytes=stripe.strip_size_bytes,
        row_count=row_count,
        record_count=RECORD_COUNT,
        directory_slba=(first_strip * strip_blocks, (first_strip + step) * strip_blocks),
        payload_slba=payload_strip * strip_blocks,
        payload_end=end,
        created_unix_s=unix_time_s(),
    )


def superblock_slbas(superblock: Superblock | Label) -> tuple[int, int]:
    """Behind the labels of members 0 and 1, or twice on a single member, each in a unit of its own."""
    unit_blocks = UNIT_BYTES // superblock.block_size_bytes
    if superblock.member_count == 1:
        return unit_blocks, 2 * unit_blocks
    return unit_blocks, superblock.strip_size_bytes // superblock.block_size_bytes + unit_blocks


def _write_volume(
    stripe: StripeDevice, superblock: Superblock, destroy: frozenset[str], deadline: Deadline
) -> VolumeIo:
    """Labels, then the superblock copies: a volume is there when the first of these is."""
    infos = tuple(MemberInfo.of(member) for member in stripe.members)
    for member in stripe.members:
        if member.uri in destroy:
            wipe(member, deadline)
        # The whole place of label and superblock copies: nothing old may look like one of them.
        write_blocks(member, 0, bytes(4 * UNIT_BYTES), deadline)
    for index, member in enumerate(stripe.members):
        label = Label(
            volume_uuid=superblock.volume_uuid,
            volume_name=superblock.volume_name,
            sequence=1,
            member_index=index,
            block_size_bytes=superblock.block_size_bytes,
            strip_size_bytes=superblock.strip_size_bytes,
            row_count=superblock.row_count,
            members=infos,
        )
        write_blocks(member, 0, build_label(label), deadline)
        flush(member, deadline)
    io = VolumeIo(stripe, strip_size_bytes=superblock.strip_size_bytes)
    write_superblocks(io, superblock, deadline)
    return io


def write_superblocks(
    io: VolumeIo, superblock: Superblock, deadline: Deadline, *, copies: Sequence[int] = (0, 1)
) -> None:
    """The copies, one after the other: a crash never finds both half written."""
    for copy_index in copies:
        slba = superblock_slbas(superblock)[copy_index]
        data = build_superblock(superblock, copy_index=copy_index)
        io.flush(io.write(slba, data, deadline), deadline)


def _check_unused(members: Sequence[BlockDevice], destroy: frozenset[str], deadline: Deadline) -> None:
    for member in members:
        if member.is_read_only:
            raise UsageError(f"{member.uri}: is read-only")
        if member.uri in destroy:
            continue
        users = find_users(member)
        if users:
            raise UsageError(f"{member.uri}: is in use: {users[0]}; release it, or name it in --destroy")
        found = find_signatures(member, deadline)
        if found:
            raise UsageError(
                f"{member.uri}: holds a {found[0]}; name this device in --destroy to overwrite it"
            )


def read_label(device: BlockDevice, deadline: Deadline, *, slba: int = 0) -> Label:
    """The label at the start of a member, or at ``slba`` of a device that hides it."""
    if device.size_bytes < 4 * UNIT_BYTES:
        raise UsageError(
            f"{device.uri}: size: expected at least {4 * UNIT_BYTES} bytes, got {device.size_bytes}"
        )
    data = read_blocks(device, slba, LABEL_BYTES // device.block_size_bytes, deadline).tobytes()
    try:
        return parse_label(data, what=device.uri)
    except CorruptionError as problem:
        raise CorruptionError(
            f"{problem}; it is no member of a kvdev volume, or its label is lost"
        ) from problem


def _sort_members(devices: Sequence[BlockDevice], labels: Sequence[Label]) -> list[BlockDevice]:
    """The devices in the order of their labels, once everything about them is as the labels say."""
    # The volume that most of the devices belong to, so that the stranger is named and not the others.
    volume_uuid = Counter(label.volume_uuid for label in labels).most_common(1)[0][0]
    reference = next(label for label in labels if label.volume_uuid == volume_uuid)
    newest = max(label.sequence for label in labels if label.volume_uuid == volume_uuid)
    places: dict[int, BlockDevice] = {}
    for device, label in zip(devices, labels, strict=True):
        if label.volume_uuid != volume_uuid:
            raise UsageError(
                f"{device.uri}: belongs to volume {label.volume_name!r} ({label.volume_uuid.hex()}), "
                f"expected {reference.volume_name!r} ({volume_uuid.hex()})"
            )
        if label.sequence != newest:
            raise UsageError(
                f"{device.uri}: label sequence: expected {newest}, got {label.sequence}: "
                f"it is an older state of member {label.member_index}"
            )
        if label.member_index in places:
            raise UsageError(
                f"{device.uri}: is member {label.member_index} of volume {label.volume_name!r}, and so is "
                f"{places[label.member_index].uri}: one of them is a copy"
            )
        _check_member(device, label)
        places[label.member_index] = device
    missing = [index for index in range(reference.member_count) if index not in places]
    if missing:
        raise UsageError(
            f"volume {reference.volume_name!r}: member {missing[0]} of {reference.member_count} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return [places[index] for index in range(reference.member_count)]


def _check_member(device: BlockDevice, label: Label) -> None:
    """Whether a device is still the one that was labelled."""
    info = label.members[label.member_index]
    what = f"{device.uri}: member {label.member_index} of volume {label.volume_name!r}"
    if device.block_size_bytes != label.block_size_bytes:
        raise UsageError(
            f"{what}: block size: expected {label.block_size_bytes}, got {device.block_size_bytes}: "
            f"it was formatted differently"
        )
    if device.block_count < info.block_count:
        raise UsageError(
            f"{what}: size: expected {info.block_count} blocks, got {device.block_count}: it was shrunk"
        )
    if info.identity_kind in IDENTITY_NAMES:
        actual = identity_of_kind(device.identity, info.identity_kind)
        if actual is not None and actual != info.identity:
            raise UsageError(
                f"{what}: {IDENTITY_NAMES[info.identity_kind]}: expected {info.identity.hex()}, got "
                f"{actual.hex()}: the namespace was replaced, this is a copy"
            )


def _check_hidden_members(device: BlockDevice, first: Label, deadline: Deadline) -> None:
    """One device over all members: their labels stand in its logical strips, in order."""
    if device.block_size_bytes != first.block_size_bytes:
        raise UsageError(
            f"{device.uri}: block size: expected {first.block_size_bytes}, got {device.block_size_bytes}"
        )
    strip_blocks = first.strip_size_bytes // first.block_size_bytes
    expected = first.row_count * first.member_count * strip_blocks
    seconds_end = strip_blocks + LABEL_BYTES // first.block_size_bytes
    try:
        second = (
            read_label(device, deadline, slba=strip_blocks) if device.block_count >= seconds_end else None
        )
    except CorruptionError:
        second = None
    if second is None or second.volume_uuid != first.volume_uuid:
        others = [index for index in range(first.member_count) if index != first.member_index]
        raise UsageError(
            f"{device.uri}: is member {first.member_index} of {first.member_count} of volume "
            f"{first.volume_name!r}: member {others[0]} is missing"
            + (f", and {len(others) - 1} more" if len(others) > 1 else "")
        )
    for index in range(first.member_count):
        label = read_label(device, deadline, slba=index * strip_blocks)
        if label.volume_uuid != first.volume_uuid:
            raise UsageError(
                f"{device.uri}: strip {index} belongs to volume {label.volume_name!r}, "
                f"expected {first.volume_name!r}"
            )
        if label.member_index != index:
            raise UsageError(
                f"{device.uri}: strip {index}: expected member {index}, got member {label.member_index}: "
                f"its members are in another order than the volume's"
            )
    if device.block_count < expected:
        raise UsageError(
            f"{device.uri}: size: expected at least {expected} blocks, got {device.block_count}: "
            f"a member was shrunk"
        )


def _read_superblock(io: VolumeIo, label: Label, deadline: Deadline) -> Superblock:
    """The newest intact copy; refused when neither is, or when it contradicts the labels."""
    found: list[Superblock] = []
    problems: list[str] = []
    for index, slba in enumerate(superblock_slbas(label)):
        what = f"volume {label.volume_name!r}: superblock copy {index} at LBA {slba}"
        data = io.read(slba, 1, deadline).tobytes()[:STRUCTURE_BYTES]
        try:
            found.append(parse_superblock(data, what=what, volume_uuid=label.volume_uuid))
        except CorruptionError as problem:
            problems.append(str(problem))
    if not found:
        raise CorruptionError(
            f"{problems[0]}; and copy 1 likewise: the volume was never finished, or both copies are lost; "
            f"create it again with --destroy"
        )
    superblock = max(found, key=lambda copy: copy.sequence)
    expected = (label.member_count, label.block_size_bytes, label.strip_size_bytes, label.row_count)
    actual = (
        superblock.member_count,
        superblock.block_size_bytes,
        superblock.strip_size_bytes,
        superblock.row_count,
    )
    if expected != actual or superblock.payload_end > io.device.block_count:
        raise CorruptionError(
            f"volume {label.volume_name!r}: superblock: members, block size, strip size, rows: "
            f"expected {expected} by the labels, got {actual}"
        )
    return superblock
