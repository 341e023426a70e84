"""Volumes: RAID0 over labelled members, carrying KV namespaces.

Row 0 belongs to the volume: a label at the start of every member's strip, two superblock copies behind.
Not here: the page table of a namespace (``namespace``); which devices make a volume (``members``); where its parts
lie (``superblock_io``).
Spec: docs/on-disk-format.md.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from kvdev.block.device import BlockDevice, aligned_buffer
from kvdev.block.drill import refuse_drill
from kvdev.block.stripe import StripeDevice, check_strip_size
from kvdev.clock import Deadline, unix_time_s
from kvdev.errors import CapacityError, CommandError, CorruptionError, KvdevError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.checksum import checksum_named
from kvdev.native.crc import crc32c
from kvdev.native.index import Uint8Array, format_table, table_buffer
from kvdev.native.io import OPCODE_WRITE
from kvdev.store.claim import claim, leave, wait_fenced
from kvdev.store.directory import Directory, Place
from kvdev.store.erase import Progress, delete_namespace
from kvdev.store.extents import Run, Space, place_new
from kvdev.store.fence import Fence, GuestFence
from kvdev.store.geometry_block import build_geometry, read_extent_geometry, read_geometry
from kvdev.store.lease import LEASE_MS_DEFAULT, Lease, OwnerIdentity
from kvdev.store.lock import DevicesLock, OwnerLock, WriterLock
from kvdev.store.media import NAME_BYTES, UNIT_BYTES
from kvdev.store.members import (
    check_hidden_members,
    check_members,
    check_unused,
    read_label,
    sort_members,
)
from kvdev.store.namespace import KvNamespace, Mode
from kvdev.store.page_io import PageIo, page_io_of
from kvdev.store.plan import NamespacePlan, pages_within, plan_namespace
from kvdev.store.superblock import (
    EVICTION_POLICIES,
    FURTHER_EXTENT_COUNT_MAX,
    PRIORITY_MAX,
    RECORD_COUNT,
    RECORD_LIVE,
    Extent,
    Record,
    Superblock,
    checksum_name,
    free_record,
    policy_name,
)
from kvdev.store.superblock_io import (
    grown,
    lay_out_volume,
    read_superblock,
    read_superblock_copies,
    row_count_of,
    write_superblocks,
    write_volume,
)
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.units import MIB, format_size

STRIP_SIZE_BYTES_DEFAULT = 128 * 1024
FORMAT_PIECE_BYTES = MIB
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
    priority: int
    reserve_pages: int
    salt_mark: int
    checksum: str
    """Name of its pages' checksum; a number that this version does not know is shown as such."""
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
        check_members(members)
        refuse_drill(members, "create a volume")
        check_strip_size(strip_size_bytes, members[0].block_size_bytes)
        stripe = StripeDevice(members, strip_size_bytes=strip_size_bytes, uri=f"volume {name}")
        row_count = row_count_of(stripe, size_bytes)
        superblock = lay_out_volume(name, stripe, row_count)
        unknown = sorted(destroy - {member.uri for member in members})
        if unknown:
            raise UsageError(f"destroy: {unknown[0]}: expected one of the members, which it is not")
        # Two that make volumes at once, or one over a volume in use, would write into each other's.
        lock = DevicesLock(members, byte_count=VOLUME_LOCK_BYTE + 1 + RECORD_COUNT)
        try:
            check_unused(members, destroy, deadline)
            io = write_volume(stripe, superblock, destroy, deadline)
        finally:
            lock.release()
        return cls(io, superblock, members)

    # --- open --------------------------------------------------------------------------------

    @classmethod
    def open(cls, devices: Sequence[BlockDevice], *, deadline: Deadline) -> Volume:
        """Open by labels, whatever the order of the devices; or one RAID0 device that hides the members.

        Refuses, with the member and the reason, what does not add up to the volume as it was made.
        """
        check_members(devices)
        labels = [read_label(device, deadline) for device in devices]
        device: BlockDevice
        if len(devices) == 1 and labels[0].member_count > 1:
            check_hidden_members(devices[0], labels[0], deadline)
            device, members = devices[0], list(devices)
        else:
            members = sort_members(devices, labels)
            device = StripeDevice(
                members,
                strip_size_bytes=labels[0].strip_size_bytes,
                uri=f"volume {labels[0].volume_name}",
            )
        io = VolumeIo(device, strip_size_bytes=labels[0].strip_size_bytes)
        return cls(io, read_superblock(io, labels[0], deadline), members)

    # --- KV namespaces -----------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes that KV namespaces can share."""
        return (self.superblock.payload_end - self.superblock.payload_slba) * self.block_size_bytes

    @property
    def growable_bytes(self) -> int:
        """What ``grow`` would gain: members that have got larger have it."""
        return self._gain_bytes(grown(self.superblock, self.io, None))

    def _gain_bytes(self, superblock: Superblock) -> int:
        return (superblock.payload_end - self.superblock.payload_end) * self.block_size_bytes

    def grow(self, *, size_bytes: int | None = None, deadline: Deadline) -> int:
        """Take in what the members have got larger by; returns the bytes gained, 0 when there are none.

        Only the superblock changes, one copy after the other: whatever interrupts it, the volume has its old size or
        the new one, and a second call finishes it. Owners of KV namespaces go on meanwhile.

        Args:
            size_bytes: use so much of the members, as in ``create``, instead of all of it.
        """
        lock = self.lock_volume(deadline)
        try:
            # Read again under the lock: what another process made of it meanwhile stays.
            found = read_superblock_copies(self.io, self.superblock, deadline)
            current = found.newest
            if current is None:
                raise CorruptionError(f"volume {self.name}: {found.problems[0]}; and copy 1 likewise")
            new = grown(current, self.io, size_bytes)
            if new is not current:
                write_superblocks(self.io, new, deadline, copies=found.write_order)
            elif found.damaged:
                write_superblocks(self.io, current, deadline, copies=found.damaged)
        finally:
            lock.release()
        gained = self._gain_bytes(new)
        self.superblock = new
        return gained

    @property
    def space(self) -> Space:
        """The blocks that KV namespaces share."""
        block = self.superblock
        return Space(block.payload_slba, block.payload_end, self.strip_size_bytes // self.block_size_bytes)

    def free_extents(self, deadline: Deadline) -> list[Run]:
        """Unused runs of blocks (first, count), in order."""
        return self.space.free_runs(self.records(deadline=deadline))

    def records(self, *, deadline: Deadline) -> list[Record]:
        """The records of all KV namespaces, those that are being erased among them; CorruptionError when one has no
        intact copy."""
        records = []
        for place in self.directory.read_all(deadline):
            if place.record is None:
                if place.problems:
                    raise CorruptionError(
                        f"volume {self.name}: {place.problems[0]}, and no other is intact; kvdev volume check --repair "
                        f"gives the lost KV namespace up"
                    )
            elif not place.record.is_free:
                records.append(place.record)
        return records

    def namespaces(self, *, deadline: Deadline) -> list[NamespaceInfo]:
        """All live KV namespaces by name; CorruptionError when a record has no intact copy."""
        infos = [self._info(record, deadline) for record in self.records(deadline=deadline) if record.is_live]
        return sorted(infos, key=lambda info: info.name)

    def _info(self, record: Record, deadline: Deadline) -> NamespaceInfo:
        return NamespaceInfo(
            name=record.name,
            uuid=str(uuid.UUID(bytes=record.namespace_uuid)),
            geometry=read_geometry(self.io, record, what=f"{self.name}#{record.name}", deadline=deadline),
            page_size_bytes=record.page_size_bytes,
            quota_pages=record.quota_pages,
            slot_count=record.slot_count,
            extent_bytes=record.block_count * self.block_size_bytes,
            epoch=record.epoch,
            is_clean=record.is_clean,
            eviction_policy=policy_name(record),
            ttl_s=record.ttl_s,
            priority=record.priority,
            reserve_pages=record.reserve_pages,
            salt_mark=record.salt_mark,
            checksum=checksum_name(record),
            record=record,
        )

    def namespace(self, name: str, *, deadline: Deadline) -> NamespaceInfo:
        """The KV namespace of this name; UsageError listing those there are."""
        for place in self.directory.read_all(deadline):
            if place.record is None or place.record.name != name or place.record.is_free:
                continue
            if place.record.is_erasing:
                raise UsageError(
                    f"volume {self.name}: namespace {name!r}: is being erased, {place.record.erased_mib} MiB of it so "
                    f"far; erase it to its end: kvdev namespace delete --erase"
                )
            return self._info(place.record, deadline)
        # One that is lost bars none of the others.
        known = ", ".join(info.name for info in self.namespaces(deadline=deadline))
        if not known:
            raise UsageError(
                f"volume {self.name}: namespace {name!r}: the volume has no KV namespace; create it first"
            )
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
        priority: int = 0,
        reserve_pages: int = 0,
        salt_mark: int = 0,
        checksum: str = "crc32c",
        deadline: Deadline,
    ) -> NamespaceInfo:
        """Make an empty KV namespace; one of the two quotas says how many pages it may hold.

        ``quota_bytes`` counts pages' bytes; table, journal and spare slots come on top (see ``plan``).

        Args:
            eviction_policy: what goes at the quota: ``lru`` the page unused longest, ``fifo`` the one put
                first, ``lfu`` the one used least often, ``s3fifo`` what was put and not used again, ``none``
                nothing, so that puts fail with CapacityError.
            ttl_s: pages are gone so many seconds after they were put, pinned or not; 0 for never.
            priority: 0 to 255: those of lower priority make room for it, and it for those of higher.
            reserve_pages: as much of the quota as never makes room for another.
            salt_mark: ``keys.salt_mark`` of the salt that all of its keys are to be made with; 0 leaves that to
                those who use it.
            checksum: what its pages are verified by: ``crc32c``, or ``nh64``, which a GPU computes as well.
        """
        check_name("namespace name", name)
        checksum_number = checksum_named(checksum).number
        if eviction_policy not in EVICTION_POLICIES:
            raise UsageError(
                f"eviction_policy: expected one of {', '.join(EVICTION_POLICIES)}, got {eviction_policy!r}"
            )
        if not 0 <= ttl_s <= TTL_S_MAX:
            raise UsageError(f"ttl_s: expected 0 for none, to {TTL_S_MAX}, got {ttl_s}")
        quota_pages = quota_of(geometry, quota_bytes=quota_bytes, quota_pages=quota_pages)
        check_room_rules(priority=priority, reserve_pages=reserve_pages, quota_pages=quota_pages)
        plan = self.plan(geometry, quota_pages=quota_pages, journal_block_count=journal_block_count)
        lock = self.lock_volume(deadline)
        try:
            self.check_new_name(name, deadline)
            place_index = self._free_place(deadline)
            extents = self._find_extents(plan, name, deadline)
            record = self._new_record(name, geometry, plan, extents, place_index, deadline)
            record = replace(
                record,
                eviction_policy=EVICTION_POLICIES.index(eviction_policy),
                ttl_s=ttl_s,
                priority=priority,
                reserve_pages=reserve_pages,
                salt_mark=salt_mark,
                checksum_number=checksum_number,
            )
            self.format_namespace(record, geometry, deadline)
            # Both copies: from here on one intact copy alone means a loss.
            record = self.write_both(replace(record, sequence=record.sequence - 1), deadline)
        finally:
            lock.release()
        return self._info(record, deadline)

    def _free_place(self, deadline: Deadline) -> int:
        for index, place in enumerate(self.directory.read_all(deadline)):
            if place.record is None or place.record.is_free:
                return index
        raise CapacityError(
            f"volume {self.name}: expected at most {self.superblock.record_count} namespaces; delete one first"
        )

    def check_new_name(self, name: str, deadline: Deadline) -> None:
        """UsageError where a KV namespace has the name, or one that is being erased."""
        if any(record.name == name for record in self.records(deadline=deadline)):
            raise UsageError(f"volume {self.name}: namespace {name!r}: exists already")

    def _find_extents(self, plan: NamespacePlan, name: str, deadline: Deadline) -> tuple[Extent, ...]:
        """In one piece where there is such a one, else in the largest ones."""
        records = self.records(deadline=deadline)
        extents = place_new(self.space, plan, records)
        if extents is not None:
            return extents
        block = self.block_size_bytes
        free = [self.space.aligned(run)[1] for run in self.space.free_runs(records)]
        raise CapacityError(
            f"volume {self.name}: namespace {name!r}: expected {format_size(plan.total_bytes)} "
            f"({plan.slot_count} slots of {format_size(plan.slot_blocks * block)} and "
            f"{format_size(plan.metadata_blocks * block)} of table and journal) in at most "
            f"{1 + FURTHER_EXTENT_COUNT_MAX} pieces, got {format_size(sum(free) * block)} free, "
            f"{format_size(max(free, default=0) * block)} of it in one piece; lower the quota, enlarge the volume, or "
            f"have namespaces of lower priority make room"
        )

    def _new_record(
        self,
        name: str,
        geometry: Geometry,
        plan: NamespacePlan,
        extents: tuple[Extent, ...],
        place_index: int,
        deadline: Deadline,
    ) -> Record:
        data = build_geometry(geometry)
        old = self.directory.read(place_index, deadline).record
        first, *further = extents
        table_slba = first.slba + plan.geometry_blocks
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
            geometry_slba=first.slba,
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
            data_slba=first.data_slba,
            extent_slba=first.slba,
            extent_block_count=first.block_count,
            further=tuple(further),
            owner_boot_id=bytes(16),
            owner_pid=0,
            owner_start_ticks=0,
            created_unix_s=unix_time_s(),
            geometry_copy=data,
        )

    def format_namespace(self, record: Record, geometry: Geometry, deadline: Deadline) -> None:
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
        lock = self.lock_namespace(info.record) if mode == "owner" else None
        try:
            lease = None
            if lock is not None:
                place = self._check_still_there(info.record, what, deadline)
                lease = Lease(what, fence=Fence(self.members), identity=identity, lease_ms=lease_ms)
                claim(self.directory, place, lease, self.members, takeover=takeover, deadline=deadline)
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
        """Make an empty KV namespace like another one, with all that was said of it when it was made."""
        model = self.namespace(name, deadline=deadline)
        return self.create_namespace(
            new_name,
            model.geometry,
            quota_pages=model.quota_pages,
            journal_block_count=model.record.journal_block_count,
            eviction_policy=model.eviction_policy,
            ttl_s=model.ttl_s,
            priority=model.priority,
            reserve_pages=model.reserve_pages,
            salt_mark=model.salt_mark,
            checksum=model.checksum,
            deadline=deadline,
        )

    def writer_lock(self, record: Record) -> WriterLock:
        """What a process holds while it writes under grants of a KV namespace's owner."""
        return WriterLock(
            f"writers-{record.namespace_uuid.hex()}", members=self.members, byte=record.record_index
        )

    def open_page_io(self, name: str, *, deadline: Deadline) -> PageIo:
        """A data-only handle: reads and writes pages by grants that the owner hands out, takes no lock."""
        record = self.namespace(name, deadline=deadline).record
        return page_io_of(self.io, record, what=f"{self.name}#{name}")

    def delete_namespace(
        self,
        name: str,
        *,
        erase: bool = False,
        takeover: bool = False,
        bytes_per_s: int | None = None,
        progress: Progress | None = None,
        deadline: Deadline,
    ) -> int:
        """Remove a KV namespace and free its extents; see ``erase.delete_namespace``."""
        return delete_namespace(
            self,
            name,
            erase=erase,
            takeover=takeover,
            bytes_per_s=bytes_per_s,
            progress=progress,
            deadline=deadline,
        )

    def repair_superblocks(self, *, deadline: Deadline) -> None:
        """Write damaged and older copies again from the newest intact one, which is left alone."""
        lock = self.lock_volume(deadline)
        try:
            found = read_superblock_copies(self.io, self.superblock, deadline)
            if found.newest is not None:
                write_superblocks(self.io, found.newest, deadline, copies=found.damaged)
        finally:
            lock.release()

    def read_extent_geometry(self, record_index: int, *, deadline: Deadline) -> Geometry:
        """The geometry that stands in a KV namespace's extent, where opening takes the one behind its record."""
        record = self.directory.read(record_index, deadline).record
        assert record is not None
        return read_extent_geometry(self.io, record, what=f"{self.name}#{record.name}", deadline=deadline)

    def rewrite_geometry(self, name: str, *, only_damaged: bool = False, deadline: Deadline) -> None:
        """Write a KV namespace's geometry where it is damaged or missing: in its extent, and behind its record."""
        with self.namespace_held(name, deadline) as current:
            what = f"{self.name}#{name}"
            data = build_geometry(read_geometry(self.io, current, what=what, deadline=deadline))
            try:
                read_extent_geometry(self.io, current, what=what, deadline=deadline)
            except (CorruptionError, CommandError):
                block = data.ljust(UNIT_BYTES, b"\0")
                self.io.flush(self.io.write(current.geometry_slba, block, deadline), deadline)
            if not only_damaged:
                self.write_both(replace(current, geometry_copy=data), deadline)

    def free_lost_place(self, record_index: int, *, deadline: Deadline) -> None:
        """Give up a KV namespace of whose record no copy is intact: its place and its extent are free then."""
        lock = self.lock_volume(deadline)
        try:
            place = self.directory.read(record_index, deadline)
            if place.record is None and place.problems:
                self.write_both(free_record(self.uuid, record_index), deadline)
        finally:
            lock.release()

    def rename_namespace(self, name: str, new_name: str, *, deadline: Deadline) -> None:
        """Give a KV namespace another name; refused while it may have an owner."""
        check_name("new name", new_name)
        with self.namespace_held(name, deadline) as current:
            self.check_new_name(new_name, deadline)
            self.write_both(replace(current, name=new_name), deadline)

    @contextlib.contextmanager
    def namespace_held(self, name: str, deadline: Deadline, *, takeover: bool = False) -> Iterator[Record]:
        """The newest record of a namespace, under the locks that a change of it needs, its last owner kept out."""
        volume_lock = self.lock_volume(deadline)
        try:
            record = self.namespace(name, deadline=deadline).record
            lock = self.lock_namespace(record)
            try:
                lease = Lease(f"{self.name}#{name}", fence=Fence(self.members))
                if not record.is_clean:
                    claim(
                        self.directory,
                        self.directory.read(record.record_index, deadline),
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

    def write_both(self, record: Record, deadline: Deadline) -> Record:
        """Both copies, one after the other: the older state must not come back when the newer is damaged.

        Returns the record as the newer copy has it.
        """
        for _ in range(2):
            record = replace(record, sequence=record.sequence + 1)
            self.io.flush(self.directory.write_place(record, deadline), deadline)
        return record

    def _check_still_there(self, record: Record, what: str, deadline: Deadline) -> Place:
        """What was read before the lock may have been deleted, and its place or devices given to another."""
        self._check_still_ours(deadline)
        place = self.directory.read(record.record_index, deadline)
        current = place.record
        if current is not None and (not current.is_live or current.namespace_uuid != record.namespace_uuid):
            raise UsageError(f"{what}: was deleted meanwhile; open the volume anew")
        return place

    def _check_still_ours(self, deadline: Deadline) -> None:
        label = read_label(self.members[0], deadline)
        if label.volume_uuid != self.uuid:
            raise UsageError(
                f"{self.members[0].uri}: expected volume {self.name!r} ({self.uuid.hex()}), got "
                f"{label.volume_name!r} ({label.volume_uuid.hex()}): it was made anew meanwhile"
            )

    def lock_volume(self, deadline: Deadline) -> _VolumeLock:
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

    def lock_namespace(self, record: Record) -> OwnerLock:
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


def quota_of(geometry: Geometry, *, quota_bytes: int | None, quota_pages: int | None) -> int:
    """The quota in pages, said in one of the two ways."""
    if (quota_bytes is None) == (quota_pages is None):
        raise UsageError("quota: expected one of quota_bytes and quota_pages")
    if quota_pages is not None:
        return quota_pages
    assert quota_bytes is not None
    if quota_bytes < geometry.page_size_bytes:
        raise UsageError(
            f"quota_bytes: expected at least one page of {format_size(geometry.page_size_bytes)}, "
            f"got {quota_bytes} bytes"
        )
    return quota_bytes // geometry.page_size_bytes


def check_room_rules(*, priority: int, reserve_pages: int, quota_pages: int) -> None:
    """UsageError for a priority or a reserve that a KV namespace of this quota cannot have."""
    if isinstance(priority, bool) or not 0 <= priority <= PRIORITY_MAX:
        raise UsageError(f"priority: expected 0 to {PRIORITY_MAX}, got {priority!r}")
    if isinstance(reserve_pages, bool) or not 0 <= reserve_pages <= quota_pages:
        raise UsageError(
            f"reserve: expected at most the quota of {quota_pages} pages, got {reserve_pages}; raise the quota first"
        )


def check_geometry(what: str, *, expected: Geometry, actual: Geometry) -> None:
    """Raise UsageError naming the first field in which two geometries differ."""
    stored = actual.to_dict()
    for field, value in expected.to_dict().items():
        if stored[field] != value:
            raise UsageError(
                f"{what}: geometry: {field}: expected {value!r}, the namespace has {stored[field]!r}; "
                "name its geometry, or none"
            )
