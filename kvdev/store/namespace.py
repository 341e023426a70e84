"""A KV namespace and its owner: the page table in memory, and the order in which media follow it.

The order of a commit: data; flush of every member with data; journal records; flush of their members.
Only then are slots that the records freed handed out again. When the journal is half full the table's
changed blocks are written and flushed, then the record moves the tail.
Not here: page I/O (``page_io``); batches of pages with their checks (``page_store``).
Threads: any; one lock per namespace, held during I/O.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvdev.block.device import aligned_buffer
from kvdev.clock import SYSTEM_CLOCK, Deadline, unix_time_s
from kvdev.errors import (
    CapacityError,
    CorruptionError,
    KvdevError,
    LeaseLostError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.keys import KEY_SIZE_BYTES, KeyArray, check_keys
from kvdev.native.checksum import SumArray
from kvdev.native.index import (
    OUTCOME_FAILED,
    OUTCOME_UNKNOWN,
    EntryArray,
    GrantArray,
    IndexStat,
    PageIndex,
    PendingFullError,
    Table,
    Uint8Array,
    Uint32Array,
    table_buffer,
)
from kvdev.native.io import OPCODE_READ
from kvdev.store.batch import check_commit, check_grants
from kvdev.store.claim import leave, wait_fenced
from kvdev.store.directory import Directory, check_bounds
from kvdev.store.extents import slot_map_of
from kvdev.store.fence import Fence, is_conflict
from kvdev.store.geometry_block import read_geometry
from kvdev.store.journal import Journal, JournalGap
from kvdev.store.lease import Lease
from kvdev.store.lock import OwnerLock
from kvdev.store.page_io import page_io_of
from kvdev.store.quarantine import Quarantine
from kvdev.store.record_keeper import RecordKeeper
from kvdev.store.superblock import EVICTION_POLICIES, FLAG_CLEAN, Record, policy_name
from kvdev.store.table_io import TableIo
from kvdev.store.volume_io import LossWatch, MemberMask, VolumeIo

Mode = Literal["owner", "reader", "follower"]
"""A reader has the table as it was when it opened, with everything in the journal; a follower acts on durable records
only, and goes on with its owner's journal."""

GENERATION_EPOCH_SHIFT = 40
"""Generations count from epoch × 2^40, so they never repeat across owners without being stored."""
READER_ATTEMPT_COUNT = 3
"""Times a reader loads a table that its owner changes meanwhile."""
CLOSE_TIMEOUT_S = 30.0
FOLLOW_INTERVAL_NS = 1_000_000_000
"""A follower that is used looks at its owner's journal so often."""
log = logging.getLogger("kvdev.store")


@dataclass(frozen=True)
class OpenReport:
    """What opening a namespace found."""

    was_clean: bool
    replayed_record_count: int
    replayed_block_count: int
    damaged_table_blocks: tuple[int, ...]
    """Table blocks that failed their check: their pages are lost, up to one block's entries each."""
    duplicate_count: int
    moved_block_count: int


@dataclass(frozen=True)
class NamespaceStat:
    """Counters of an open namespace."""

    index: IndexStat
    quota_pages: int
    epoch: int
    next_sequence: int
    journal_used_blocks: int
    journal_block_count: int
    withdrawn_count: int
    commit_count: int
    checkpoint_count: int


class KvNamespace:
    """One open KV namespace; made by ``Volume.open_namespace``."""

    def __init__(
        self,
        io: VolumeIo,
        directory: Directory,
        record_index: int,
        *,
        what: str,
        mode: Mode,
        lock: OwnerLock | None,
        lease: Lease | None = None,
        unix_s: Callable[[], int] = unix_time_s,
        make_image: Callable[[int], Uint8Array] = table_buffer,
        deadline: Deadline,
    ) -> None:
        """Load the table and, as owner, take a new epoch; what the owner before may still write is waited for
        before the first write, not here. ``lock`` is released by ``close``."""
        self.what = what
        self.mode: Mode = mode
        self._io = io
        self._directory = directory
        self._lock = lock
        self.mutex = threading.RLock()
        self._is_closed = False
        if mode == "owner":
            lease = lease or Lease(what, fence=Fence())
        self._lease = lease
        self._make_image = make_image
        self._is_settled = False
        self._unix_s = unix_s
        self._age_clock = 0
        self.withdrawn_count = 0
        self.commit_count = 0
        self.failed_commit_count = 0
        self.checkpoint_count = 0
        self.epoch = 0
        self.reload_count = 0
        self._refreshed_ns = SYSTEM_CLOCK.monotonic_ns()
        self._before_end: list[Callable[[], None]] = []
        self._load(record_index, deadline)
        self.scrubbed = (self._record.scrub_slot, self._record.scrubbed_unix_s)
        """Where a scrub goes on, and when one last came to the end; the record says so when it is next written."""
        # Whoever wrote before us may have left completed writes in caches: what we read becomes durable
        # before the first record that builds on it.
        self._dirty_data: MemberMask = io.all_members()
        self._losses = LossWatch(io)
        if mode == "owner" and not self._is_fence_ahead():
            self.settle(deadline=deadline)

    # --- opening -----------------------------------------------------------------------------

    def _load(self, record_index: int, deadline: Deadline) -> None:
        self._loaded_ns = SYSTEM_CLOCK.monotonic_ns()
        for attempt in range(READER_ATTEMPT_COUNT):
            try:
                record = self._load_once(record_index, deadline)
            except CorruptionError:
                if self.mode == "owner" or attempt + 1 == READER_ATTEMPT_COUNT:
                    raise
                continue
            if self.mode == "owner":
                return
            again = self._directory.read(record_index, deadline).record
            if again is not None and (again.tail_sequence, again.epoch) == (
                record.tail_sequence,
                record.epoch,
            ):
                return
        raise UsageError(f"{self.what}: its owner changes it faster than it can be read; try again")

    def _load_once(self, record_index: int, deadline: Deadline) -> Record:
        place = self._directory.read(record_index, deadline)
        record = place.record
        if record is None or not record.is_live:
            problems = "; ".join(place.problems) or "it was deleted"
            raise CorruptionError(f"{self.what}: no intact record: {problems}")
        check_bounds(self._io, record, self.what)
        self._keeper = RecordKeeper(self._directory, place, self._lease)
        self.uuid = record.namespace_uuid
        self.name = record.name
        self.quota_pages = record.quota_pages
        self.ttl_s = record.ttl_s
        self.salt_mark = record.salt_mark
        self.eviction_policy = policy_name(record)
        if self.eviction_policy not in EVICTION_POLICIES and self.mode == "owner":
            raise UnsupportedError(
                f"{self.what}: eviction policy: expected one of {', '.join(EVICTION_POLICIES)}, got "
                f"{self.eviction_policy}; use a newer kvdev",
                feature="eviction policy",
            )
        self._counts_uses = self.eviction_policy in ("lru", "lfu", "s3fifo")
        self.page_size_bytes = record.page_size_bytes
        self.geometry = read_geometry(self._io, record, what=self.what, deadline=deadline)
        if self.geometry.page_size_bytes != record.page_size_bytes:
            raise CorruptionError(
                f"{self.what}: page size: expected {self.geometry.page_size_bytes} by its geometry, "
                f"got {record.page_size_bytes}"
            )
        self.page_io = page_io_of(self._io, record, what=self.what)
        self.checksum = self.page_io.checksum
        block_bytes = self._io.block_size_bytes
        blocks = self._make_image((record.table_block_count + record.spare_block_count) * block_bytes)
        ring = aligned_buffer(record.journal_block_count * block_bytes)
        parts = [(record.table_slba, blocks), (record.journal_slba, ring)]
        # While somebody else may write, the journal comes after the table: so what the table misses is in it.
        is_alone = self.mode == "owner" and not self._is_fence_ahead()
        for runs in [parts] if is_alone else [parts[:1], parts[1:]]:
            self._io.transfer_runs(OPCODE_READ, runs, deadline)
        table_bytes = record.table_block_count * block_bytes
        self._image = blocks
        table = Table(
            blocks[:table_bytes],
            block_bytes=block_bytes,
            slot_count=record.slot_count,
            uuid=record.namespace_uuid,
        )
        moved_count = table.merge(blocks[table_bytes:])
        bad_count, bad = table.check(bad_max=record.table_block_count)
        self._table_io = TableIo(self._io, record)
        self._lost_slots = Quarantine(self._io.is_fenced)
        self._journal = Journal(self._io, record)
        # Half the journal takes any commit: the other half holds what came since the last checkpoint.
        self._pending_limit = (record.journal_block_count // 2 - 1) * self._journal.records_per_block
        self._index = PageIndex(
            table,
            pending_limit=self._pending_limit,
            next_generation=(record.epoch + 1) << GENERATION_EPOCH_SHIFT,
            # Of a policy that this version does not know only readers get here, who evict nothing.
            eviction_policy=self.eviction_policy if self.eviction_policy in EVICTION_POLICIES else "none",
            quota_pages=record.quota_pages,
            has_ages=record.ttl_s > 0,
            checksum=self.checksum,
        )
        report = self._journal.replay(
            ring,
            record,
            self._index.replay,
            is_record_doubtful=place.is_doubtful,
            limit_sequence=self._journal.durable_mark(ring, record) if self.mode == "follower" else None,
        )
        self._index.load(self.what)
        self.open_report = OpenReport(
            was_clean=record.is_clean,
            replayed_record_count=report.record_count,
            replayed_block_count=report.block_count,
            damaged_table_blocks=tuple(bad.tolist()) if bad_count else (),
            duplicate_count=self._index.stat().duplicate_count,
            moved_block_count=moved_count,
        )
        return record

    @property
    def _record(self) -> Record:
        return self._keeper.record

    # --- ownership ---------------------------------------------------------------------------

    @property
    def fence_kind(self) -> str:
        """What keeps an owner out that lost its lease: ``reservation``, ``time`` or ``lock``; empty for readers."""
        return "" if self._lease is None else self._lease.fence.kind

    @property
    def lease_ms(self) -> int:
        """How long this owner may write after it last renewed; 0 for readers."""
        return 0 if self._lease is None else self._lease.lease_ms

    def _is_fence_ahead(self) -> bool:
        return self._lease is not None and not self._lease.is_fenced

    def settle(self, *, deadline: Deadline) -> None:
        """Wait until nothing of the owner before can land any more, then become the owner on media.

        The first write does so by itself. Until then pages are read as they were found.
        """
        with self.mutex:
            if self._is_settled or self._lease is None:
                return
            self._check_owned()
            wait_fenced(self._lease, deadline)
            if self._loaded_ns < self._lease.fence_until_ns:
                # It may have gone on while we waited: what it made durable is there, and counts.
                self._load(self._record.record_index, deadline)
            self._take_epoch(deadline)
            self._is_settled = True

    def renew(self, *, deadline: Deadline) -> None:
        """Write the lease anew. Whoever uses the namespace does so by itself, when it is due.

        A failure is an error only when the lease is over: until then the next use tries again.
        """
        with self.mutex:
            self._check_owned()
            lease = self._lease
            if lease is None or not self._is_settled:
                return
            try:
                if not lease.fence.is_joined(deadline):
                    # A target that was started anew forgot us, or somebody put us out: that shows in the record.
                    self._keeper.check(deadline)
                    lease.fence.join(deadline)
                self._write_record(deadline)
            except LeaseLostError:
                lease.fence.leave(deadline)
                raise
            except KvdevError as error:
                if not lease.is_valid:
                    raise
                log.warning("%s: lease: not renewed yet: %s", self.what, error)
                lease.postpone()

    def keep(self) -> None:
        """Renew the lease if that is due; for an owner that may be idle for long."""
        with self.mutex:
            self._check_open()

    def note_failure(self, error: KvdevError | None) -> None:
        """Tell of a write that failed: a reservation conflict is how an owner learns that it was put out."""
        if is_conflict(error):
            with self.mutex:
                self.renew(deadline=Deadline.after(CLOSE_TIMEOUT_S))

    def _check_owned(self) -> None:
        if self._lease is not None and self._lease.lost_to:
            raise self._lease.lost_error()

    def _keep_lease(self) -> None:
        """Before anything that an owner does: it must be one. Costs a look at the clock."""
        lease = self._lease
        if lease is None or not self._is_settled:
            return
        if lease.lost_to or lease.is_due:
            self.renew(deadline=Deadline.after(CLOSE_TIMEOUT_S))

    def bounded(self, deadline: Deadline) -> Deadline:
        """Where only time keeps a lost owner out, nothing is sent after its lease has ended."""
        lease = self._lease
        if lease is None or lease.fence.kind != "time" or deadline.remaining_s() <= lease.remaining_s:
            return deadline
        return Deadline.after(lease.remaining_s, clock=deadline.clock)

    def _take_epoch(self, deadline: Deadline) -> None:
        """Become the owner on media: a higher epoch, durable before anything is written under it."""
        self._io.flush(self._dirty_data, deadline)
        self._dirty_data = self._io.no_members()
        self.epoch = self._record.epoch + 1
        included = int(self._index.table.headers()["sequence"].max())
        if included >= self._journal.next_sequence:
            # A journal that failed was left behind by the table: go on after what the table includes.
            self._journal.next_sequence = included + 1
            self._journal.is_uncertain = True
        owner = self._owner_fields()
        if self._journal.is_uncertain or self._journal.used_blocks > self._journal.block_count // 2:
            self._checkpoint(deadline, **owner)
        else:
            self._write_record(deadline, **owner)

    def _owner_fields(self) -> dict[str, object]:
        assert self._lease is not None, "only an owner takes an epoch"
        return {
            "epoch": self.epoch,
            "epoch_first_sequence": self._journal.next_sequence,
            "durable_sequence": self._journal.next_sequence - 1,
            **self._lease.fields(),
        }

    # --- a follower's table ------------------------------------------------------------------

    def refresh(self, *, deadline: Deadline) -> int:
        """Take over what the owner, on whatever host, made durable since; returns how many changes.

        The last commit is seen once the owner commits again or renews its lease. A gap, as when the owner went
        around the journal meanwhile, has the whole table read anew.
        """
        with self.mutex:
            self._check_open()
            if self.mode != "follower":
                raise UsageError(
                    f"{self.what}: is open as {self.mode}; open it as follower to follow its owner"
                )
            self._refreshed_ns = SYSTEM_CLOCK.monotonic_ns()
            place = self._directory.read(self._record.record_index, deadline)
            record = place.record
            if record is None or not record.is_live or record.namespace_uuid != self.uuid:
                raise CorruptionError(f"{self.what}: was deleted meanwhile; open the volume anew")
            before, count = self._journal.next_sequence, 0
            # Blocks before the tail are good as long as they stand: the table includes them, ours may not.
            with contextlib.suppress(CorruptionError):  # a new owner came between record and journal
                count = self._journal.follow(record, self._index.follow, deadline)
            if self._journal.next_sequence >= record.tail_sequence:
                self._keeper.record = record
                return count
            self._load(record.record_index, deadline)
            self.reload_count += 1
            return self._journal.next_sequence - before

    def _follow(self) -> None:
        """Refresh when the last time is a while ago; what cannot be read now is read the next time."""
        if SYSTEM_CLOCK.monotonic_ns() - self._refreshed_ns < FOLLOW_INTERVAL_NS:
            return
        try:
            self.refresh(deadline=Deadline.after(CLOSE_TIMEOUT_S))
        except TransportError as error:
            log.warning("%s: not refreshed: %s", self.what, error)

    # --- the owner's table -------------------------------------------------------------------

    @property
    def batch_limit(self) -> int:
        """Pages that one reserve and commit may take: their records must fit the journal's free half."""
        return max(1, min(self._pending_limit // 4, self.quota_pages))

    def lookup(self, keys: KeyArray, *, touch: bool = True) -> GrantArray:
        """A grant to read each key's page; ``slot_index`` SLOT_NONE where it is not stored."""
        with self.mutex:
            self._check_usable()
            return self._index.lookup(check_keys(keys), touch=touch and self._counts_uses)[0]

    def lookup_counted(self, keys: KeyArray) -> tuple[GrantArray, int]:
        """``lookup`` as a use, and how many of the keys are stored."""
        with self.mutex:
            self._check_usable()
            return self._index.lookup(keys, touch=self._counts_uses)

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        with self.mutex:
            self._check_usable()
            return self._index.contains(check_keys(keys))

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on are stored."""
        with self.mutex:
            self._check_usable()
            return self._index.longest_prefix(check_keys(keys))

    def verify(self, keys: KeyArray, grants: GrantArray, sums: SumArray) -> npt.NDArray[np.bool_]:
        """Where the bytes read under a grant are those put under its key, by their checksum."""
        return self.verify_counted(keys, grants, sums)[0]

    def verify_counted(
        self, keys: KeyArray, grants: GrantArray, sums: SumArray
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """``verify``, and how many are right."""
        return self.checksum.verify(self.uuid, keys, grants, sums, length=self.page_size_bytes)

    def sums_of(self, keys: KeyArray, grants: GrantArray) -> SumArray:
        """The checksums that the bytes of the grants' pages must have."""
        return self.checksum.grant_sums(self.uuid, keys, grants)

    def confirm(self, grants: GrantArray) -> npt.NDArray[np.bool_]:
        """Where a grant's slot still holds the page it was given for; asked after a read without the lock."""
        with self.mutex:
            return self._index.confirm(grants)

    def reserve(self, keys: KeyArray, *, may_be_fewer: bool = False, deadline: Deadline) -> GrantArray:
        """Grants to write a page for each key, evicting at the quota by the namespace's policy.

        May flush, when only slots are left whose free records are not durable. Raises CapacityError when
        the batch exceeds ``batch_limit``, or when no slot can be had.

        Args:
            may_be_fewer: grant the first keys, at least one, where there are not slots for all: pages that are
                replaced keep theirs until their successors are stored.
        """
        check_keys(keys)
        with self.mutex:
            self._check_writable(deadline)
            count = len(keys)
            if count > self.batch_limit:
                raise CapacityError(
                    f"{self.what}: reserve: expected at most {self.batch_limit} pages at once, got {count}"
                )
            if len(self._lost_slots):
                self._index.release(np.array(self._lost_slots.release(), dtype=np.uint32))
            # At most: victims at the quota, victims for want of slots, the pages, what they replace.
            live_count, reserved_count = self._make_room(4 * count, deadline)
            # What the batch replaces counts as used, so that the victims are others.
            _, replaced = self._index.lookup(keys, touch=True)
            excess = live_count + reserved_count + count - replaced - self.quota_pages
            if excess > 0:
                self._evict(excess, keys)
            grants = self._index.reserve(count, self.page_size_bytes)
            if grants is None:
                self._commit(deadline)
                grants = self._index.reserve(count, self.page_size_bytes)
            if grants is None:
                # Replaced pages keep their slots until the new ones are stored: make room for both.
                grants = self._reserve_beside(count, keys, deadline, may_be_fewer=may_be_fewer)
            if grants is None:
                stat = self._index.stat()
                raise CapacityError(
                    f"{self.what}: expected {count} free slots, got {stat.free_count} of {stat.slot_count}: "
                    f"{stat.reserved_count} reserved, {stat.quarantined_count} quarantined"
                )
            return grants

    def _reserve_beside(
        self, count: int, keys: KeyArray, deadline: Deadline, *, may_be_fewer: bool
    ) -> GrantArray | None:
        """Slots beside those of the pages that are replaced: of evicted pages, else as many as are free."""
        try:
            self._evict(count - self._index.counts()[2], keys)
            self._commit(deadline)
            grants = self._index.reserve(count, self.page_size_bytes)
        except CapacityError:
            if not may_be_fewer:
                raise
            self._commit(deadline)
            grants = None
        if grants is None and may_be_fewer:
            free_count = self._index.counts()[2]
            grants = self._index.reserve(free_count, self.page_size_bytes) if free_count else None
        return grants

    def _evict(self, count: int, kept_keys: KeyArray) -> None:
        if self.eviction_policy == "none":
            raise CapacityError(
                f"{self.what}: is full: its quota is {self.quota_pages} pages and its eviction policy none; "
                f"delete pages first"
            )
        if self._index.evict(count, kept_keys) == count:
            return
        pinned_count = self._index.stat().pinned_count
        if pinned_count:  # else the slots are reserved, and the caller finds none free
            raise CapacityError(
                f"{self.what}: is full: {pinned_count} of {self.quota_pages} pages are pinned; "
                f"unpin or delete pages first"
            )

    def _make_room(self, count: int, deadline: Deadline) -> tuple[int, int]:
        """Have room for ``count`` more records; returns how many slots are live and reserved then."""
        pending, live, _, reserved = self._index.counts()
        if pending + count > self._pending_limit:
            self._commit(deadline)
            _, live, _, reserved = self._index.counts()
        return live, reserved

    def commit(
        self,
        keys: KeyArray,
        grants: GrantArray,
        sums: SumArray,
        *,
        outcome: Uint8Array | None = None,
        members: MemberMask | None = None,
        sent_ns: int | None = None,
        deadline: Deadline,
    ) -> npt.NDArray[np.bool_]:
        """Make written grants readable, and give the others back: failed ones at once, those of unknown
        fate never. Durable with the next ``flush``. Also when it raises no grant is held any more.

        Args:
            outcome: per grant OUTCOME_WRITTEN, OUTCOME_FAILED or OUTCOME_UNKNOWN; all written if None.
            members: which members the data went to; all if None.
            sent_ns: monotonic time before the first of them was sent: slots of unknown fate are used again once
                nothing sent since then can land; now if None, which may be never.
        """
        if outcome is None:
            outcome = np.zeros(len(keys), dtype=np.uint8)
        check_commit(keys, grants, sums, outcome, checksum=self.checksum)
        with self.mutex:
            self._dirty_data |= self._io.all_members() if members is None else members
            lost = grants["slot_index"][outcome == OUTCOME_UNKNOWN].tolist()
            since_ns = SYSTEM_CLOCK.monotonic_ns() if sent_ns is None else sent_ns
            self._lost_slots.add(lost, since_ns=since_ns)
            try:
                self._check_writable(deadline)
                try:
                    return self._index.commit(keys, grants, sums, outcome)
                except PendingFullError:
                    self._commit(deadline)
                    return self._index.commit(keys, grants, sums, outcome)
            except BaseException:
                # What was written is whole, and nobody will ask for it: its slots can be used again.
                outcome = np.where(outcome == OUTCOME_UNKNOWN, outcome, np.uint8(OUTCOME_FAILED))
                self._index.commit(keys, grants, sums, outcome)
                raise

    def release(
        self,
        grants: GrantArray,
        *,
        is_fate_unknown: bool = False,
        sent_ns: int | None = None,
        deadline: Deadline,
    ) -> None:
        """Give reserved grants back unwritten, or quarantined when a write may still be under way."""
        value = OUTCOME_UNKNOWN if is_fate_unknown else OUTCOME_FAILED
        self.commit(
            np.zeros((len(grants), KEY_SIZE_BYTES), dtype=np.uint8),
            grants,
            self.checksum.zeros(len(grants)),
            outcome=np.full(len(grants), value, dtype=np.uint8),
            members=self._io.no_members(),
            sent_ns=sent_ns,
            deadline=deadline,
        )

    def pin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Keep pages from being evicted while this owner has the namespace open; True where there is one.

        They can be deleted and replaced; what replaces one is pinned.
        """
        with self.mutex:
            self._check_writable()
            return self._index.pin(check_keys(keys), is_pinned=True)

    def unpin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Let pages be evicted again; they count as used now."""
        with self.mutex:
            self._check_writable()
            return self._index.pin(check_keys(keys), is_pinned=False)

    def delete(self, keys: KeyArray, *, deadline: Deadline) -> npt.NDArray[np.bool_]:
        """Remove pages; True where there was one. Until the next ``flush`` a crash may bring them back."""
        with self.mutex:
            self._check_writable(deadline)
            done = np.zeros(len(check_keys(keys)), dtype=np.bool_)
            for start in range(0, len(keys), self._pending_limit):
                part = slice(start, start + self._pending_limit)
                self._make_room(len(keys[part]), deadline)
                done[part] = self._index.remove(keys[part])
            return done

    def withdraw(self, grants: GrantArray, *, deadline: Deadline) -> int:
        """Remove pages that proved to be bad, unless they were replaced meanwhile; returns how many."""
        grants = check_grants(grants)
        with self.mutex:
            if self.mode != "owner":
                return 0
            count = 0
            for start in range(0, len(grants), self._pending_limit):
                part = np.ascontiguousarray(grants[start : start + self._pending_limit])
                self._make_room(len(part), deadline)
                count += int(self._index.withdraw(part).sum())
            self.withdrawn_count += count
            return count

    def shrink(self, slot_count: int, quota_pages: int, *, deadline: Deadline) -> int:
        """Evict down to ``quota_pages`` and hand out the first ``slot_count`` slots only, until this owner closes.

        Returns how many pages went, durably. Raises CapacityError when the policy lets none go.
        """
        with self.mutex:
            self._check_writable(deadline)
            live_count = self._index.counts()[1]
            excess = max(0, live_count - quota_pages)
            if excess and self.eviction_policy == "none":
                raise CapacityError(
                    f"{self.what}: holds {live_count} pages and its eviction policy is none: expected a quota of at "
                    f"least that, got {quota_pages}; delete pages first"
                )
            self._index.limit_slots(min(slot_count, self._record.slot_count))
            for start in range(0, excess, self._pending_limit // 4):
                self._make_room(self._pending_limit // 4, deadline)
                self._index.evict(min(self._pending_limit // 4, excess - start))
            self._commit(deadline)
            return excess

    def move(self, source: GrantArray, addresses: npt.NDArray[np.uint64], *, deadline: Deadline) -> int:
        """Write pages, as they were read under ``source``, to other slots and let them be found there; durable.

        Returns how many moved: what was replaced meanwhile stays gone.
        """
        with self.mutex:
            self._check_writable(deadline)
            self._make_room(4 * len(source), deadline)
            target = self._index.reserve(len(source), self.page_size_bytes)
            if target is None:
                raise CapacityError(
                    f"{self.what}: expected {len(source)} free slots to move pages to, got fewer"
                )
            sent_ns = SYSTEM_CLOCK.monotonic_ns()
            try:
                result = self.page_io.write(target, addresses, deadline=deadline, wants_sums=False)
                if result.failure is not None:
                    raise result.failure
            except BaseException:
                self.release(target, is_fate_unknown=True, sent_ns=sent_ns, deadline=deadline)
                raise
            self._dirty_data |= result.members
            moved = int(self._index.move(source, target).sum())
            self._commit(deadline)
            return moved

    def flush(self, *, deadline: Deadline) -> None:
        """Make everything committed and deleted so far durable.

        When a flush fails nothing since the last success is durable: what it covered is withdrawn, and
        the error raised.
        """
        with self.mutex:
            self._check_writable(deadline)
            self._commit(deadline)

    # --- the order of writes -----------------------------------------------------------------

    def _commit(self, deadline: Deadline) -> None:
        if self._index.counts()[0] == 0:
            return
        deadline = self.bounded(deadline)
        try:
            self._io.flush(self._dirty_data, deadline)
            self._losses.check()
        except KvdevError as error:
            self._losses.reset()
            self.failed_commit_count += 1
            self.withdrawn_count += self._index.drop_pending()
            self.note_failure(error)
            raise
        self._dirty_data = self._io.no_members()
        records = self._index.collect()
        if not len(records):
            return
        try:
            if (
                self._journal.is_uncertain
                or self._journal.blocks_for(len(records)) > self._journal.room_blocks
            ):
                self._commit_past_journal(records, deadline)
            else:
                members = self._journal.append(records, epoch=self.epoch, deadline=deadline)
                self._io.flush(members, deadline)
                self._losses.check()
                self._journal.confirm()
        except KvdevError as error:
            self._losses.reset()
            self.failed_commit_count += 1
            self.withdrawn_count += self._index.fail(records)
            self.note_failure(error)
            raise
        self._index.settle(records)
        self.commit_count += 1
        if self._journal.used_blocks > self._journal.block_count // 2:
            self._checkpoint(deadline)

    def _commit_past_journal(self, records: EntryArray, deadline: Deadline) -> None:
        """After a journal write of unknown fate: its blocks are left alone, the table takes the records.

        The sequence moves past theirs, so that nothing the lost blocks hold is ever replayed over it. Table
        blocks have no order among them: first they are written with what the records free still live, so
        that a cut leaves a replaced page or its successor, then once more without.
        """
        self._journal.next_sequence += len(records)
        self._journal.pass_quarantine()
        self._index.revive(records, is_live=True)
        try:
            self._write_dirty(self._index.dirty_blocks(), self.epoch, deadline)
        finally:
            self._index.revive(records, is_live=False)
        self._checkpoint(deadline)

    def _checkpoint(self, deadline: Deadline, **fields: object) -> None:
        """Write the table's changed blocks, flush, then move the journal's tail in the record."""
        blocks = self._index.dirty_blocks()
        epoch = int(str(fields.get("epoch", self.epoch)))
        self._write_dirty(blocks, epoch, deadline)
        head, sequence = self._journal.head_position, self._journal.next_sequence
        self._write_record(deadline, tail_position=head, tail_sequence=sequence, **fields)
        self._index.clear_dirty(blocks)
        self._journal.restart(head, sequence)
        self.checkpoint_count += 1

    def rewrite_damaged_table(self) -> None:
        """Have the next checkpoint write the table blocks that were damaged: empty, their pages are lost."""
        with self.mutex:
            self._check_writable()
            self._index.mark_dirty(np.array(self.open_report.damaged_table_blocks, dtype=np.uint32))

    def _write_dirty(self, blocks: Uint32Array, epoch: int, deadline: Deadline) -> None:
        """Write table blocks as they are, sealed with the newest sequence, and make them durable."""
        if len(blocks):
            self._index.seal(blocks, sequence=self._journal.next_sequence - 1, epoch=epoch)
            self._io.flush(self._table_io.write(blocks, self._index.table.image, deadline), deadline)
            self._table_io.confirm()

    def _write_record(self, deadline: Deadline, **fields: object) -> None:
        slot, ended = self.scrubbed
        own = {
            "durable_sequence": self._journal.durable_sequence,
            "scrub_slot": slot,
            "scrubbed_unix_s": ended,
        }
        self._keeper.write(deadline, **{**own, **fields})

    # --- end ---------------------------------------------------------------------------------

    def stat(self) -> NamespaceStat:
        with self.mutex:
            return NamespaceStat(
                index=self._index.stat(),
                quota_pages=self.quota_pages,
                epoch=self.epoch,
                next_sequence=self._journal.next_sequence,
                journal_used_blocks=self._journal.used_blocks,
                journal_block_count=self._journal.block_count,
                withdrawn_count=self.withdrawn_count,
                commit_count=self.commit_count,
                checkpoint_count=self.checkpoint_count,
            )

    def no_members(self) -> MemberMask:
        """A mask with a place for each member, none of them set."""
        return self._io.no_members()

    def find_journal_gap(self, *, deadline: Deadline) -> JournalGap | None:
        """Whether the journal lacks records that had been durable; of a namespace that has not written since."""
        with self.mutex:
            return self._journal.find_gap(self._journal.read(deadline), self._record)

    def entries(self, first_slot: int = 0, slot_count: int | None = None) -> EntryArray:
        """The live pages' entries, by slot; of all slots unless told which."""
        with self.mutex:
            entries = self._index.table.entries(first_slot, slot_count)
            live: EntryArray = entries[entries["state"] == 1]
            return live

    @property
    def slot_count(self) -> int:
        return self._record.slot_count

    @property
    def record_index(self) -> int:
        """Place in the volume's directory."""
        return self._record.record_index

    @property
    def table_slba(self) -> int:
        return self._record.table_slba

    @property
    def entries_per_table_block(self) -> int:
        return self._journal.records_per_block

    def slot_slba(self, slot_index: int) -> int:
        """First logical block of a slot, in the volume's blocks."""
        return int(slot_map_of(self._record).slbas(np.array([slot_index]))[0])

    def where(self, slba: int) -> str:
        """A block of the volume for people, with the member that it is on."""
        return self._io.where(slba)

    def member_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of stored pages on each member (on one sum, where a RAID0 device hides the members)."""
        record = self._record
        slots = self.entries()["slot_index"].astype(np.int64)
        return self._io.member_bytes(slot_map_of(record).slbas(slots), record.slot_blocks)

    def close(self, *, deadline: Deadline | None = None) -> None:
        """Flush, write the table, mark the record clean, and give the locks back; twice does nothing.

        The locks are given back even when the flush fails; the error is raised then.
        """
        self._end_others()
        with self.mutex:
            if self._is_closed:
                return
            deadline = deadline or Deadline.after(CLOSE_TIMEOUT_S)
            try:
                if self.mode == "owner":
                    self._check_owned()
                if self._is_settled:
                    self._keep_lease()
                    self._commit(deadline)
                    if self._has_quarantine():
                        log.warning("%s: not marked closed: writes of unknown fate may still land", self.what)
                        self._checkpoint(deadline)
                        return
                    self._checkpoint(deadline, flags=FLAG_CLEAN, lease_ms=0, lease_key=0)
                    if self._lease is not None:
                        leave(self._lease.fence, self._directory, deadline)
            finally:
                self.abandon()

    def call_before_end(self, callback: Callable[[], None]) -> None:
        """Have this called, once, when the namespace is closed or given up: what runs in the background ends."""
        self._before_end.append(callback)

    def _end_others(self) -> None:
        while self._before_end:
            self._before_end.pop()()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _has_quarantine(self) -> bool:
        """Whether anything that was lost, or is granted, may still land: then whoever opens next has to wait for it."""
        places = (self._lost_slots, self._journal.quarantine, self._table_io.quarantine)
        for each in places:
            each.release()
        return any(len(each) for each in places) or self._index.counts()[3] > 0

    def abandon(self) -> None:
        """Give the locks back and write nothing, as a crash would leave it."""
        self._end_others()
        self._is_closed = True
        if self._lock is not None:
            self._lock.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.what}: is closed")
        self._keep_lease()
        if self.ttl_s:
            self._expire()

    def _expire(self) -> None:
        """Before anything is asked or put: pages whose time is over are not there."""
        now = self._unix_s() - self._record.created_unix_s
        # A clock that was set back makes pages live longer, not younger than those put before them.
        self._age_clock = max(self._age_clock, now)
        self._index.set_clock(self._age_clock)
        first_kept = self._age_clock - self.ttl_s + 1
        while first_kept > 0:
            # A reader, and an owner that may not write yet, forget: the records are not theirs to write.
            _, oldest = self._index.expire(first_kept, self._pending_limit, is_owner=self._is_settled)
            if oldest >= first_kept:
                return
            self._commit(Deadline.after(CLOSE_TIMEOUT_S))

    def _check_usable(self) -> None:
        self._check_open()
        if self.mode == "follower":
            self._follow()
            if self.ttl_s:
                self._expire()

    def _check_writable(self, deadline: Deadline | None = None) -> None:
        self._check_open()
        if self.mode != "owner":
            raise UsageError(f"{self.what}: is open as {self.mode}; open it as owner to change it")
        if not self._is_settled:
            self.settle(deadline=deadline or Deadline.after(CLOSE_TIMEOUT_S))
