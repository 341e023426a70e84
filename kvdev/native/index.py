"""The page table's index in the C core, on NumPy arrays.

Not here: I/O and the order of writes (``kvdev.store.namespace``); the layouts (csrc/index.h).
Threads: one caller at a time per index. The table image stays the caller's and alive meanwhile.
"""

from __future__ import annotations

import errno
import mmap
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.errors import CapacityError, UnsupportedError, UsageError
from kvdev.native.checksum import CRC32C, PageChecksum, SumArray

_T = TypeVar("_T")

SLOT_NONE = 0xFFFFFFFF
"""``slot_index`` of a grant whose key is not stored."""

MEDIA_HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u2"),
        ("count", "<u2"),
        ("size_bytes", "<u4"),
        ("crc32c", "<u4"),
        ("index", "<u4"),
        ("uuid", "u1", (16,)),
        ("sequence", "<u8"),
        ("epoch", "<u8"),
        ("durable_sequence", "<u8"),
    ]
)
"""``struct kvdev_media_header``: the first 64 bytes of every structure on media."""

ENTRY_DTYPE = np.dtype(
    [
        ("key", "u1", (32,)),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("length", "<u4"),
        ("last_use", "<u4"),
        ("state", "u1"),
        ("algorithm", "u1"),
        ("use", "<u2"),
        ("slot_index", "<u4"),
    ]
)
"""``struct kvdev_entry``: one slot, in the page table and as a journal record."""

GRANT_DTYPE = np.dtype([("generation", "<u8"), ("checksum", "<u8"), ("slot_index", "<u4"), ("length", "<u4")])
"""``struct kvdev_grant``: leave to read or write one slot as long as its generation stands."""

OUTCOME_WRITTEN = 0
OUTCOME_FAILED = 1
OUTCOME_UNKNOWN = 2

POLICY_NUMBERS = {
    "lru": int(lib.KVDEV_POLICY_LRU),
    "fifo": int(lib.KVDEV_POLICY_FIFO),
    "none": int(lib.KVDEV_POLICY_NONE),
    "lfu": int(lib.KVDEV_POLICY_LFU),
    "s3fifo": int(lib.KVDEV_POLICY_S3FIFO),
}
"""Eviction policies by name, with their number in a KV namespace's record."""

CLOCK_NEVER = 0xFFFFFFFF
"""The second at which the oldest page was stored, where there is none."""

TABLE_ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
PROBE_THREADS_MAX = 4
"""Threads that share a large batch of look-ups: a few saturate what memory gives at random."""
PROBE_SHARE_MIN = 8192
"""Keys a thread must have to itself: waking one costs 0.1 ms, as long as probing two thousand."""

Uint8Array = npt.NDArray[np.uint8]
Uint32Array = npt.NDArray[np.uint32]
Uint64Array = npt.NDArray[np.uint64]
GrantArray = npt.NDArray[Any]
EntryArray = npt.NDArray[Any]


class PendingFullError(CapacityError):
    """So many records are due that the batch does not fit beside them: commit, then try again."""


@dataclass(frozen=True)
class IndexStat:
    """``struct kvdev_index_stat``."""

    slot_count: int
    live_count: int
    free_count: int
    reserved_count: int
    leaving_count: int
    quarantined_count: int
    pending_count: int
    pending_limit: int
    dirty_block_count: int
    pinned_count: int
    duplicate_count: int
    evicted_count: int
    expired_count: int
    next_generation: int
    memory_bytes: int


_STAT_FIELDS = operator.attrgetter(*IndexStat.__dataclass_fields__)


def _pointer(array: npt.NDArray[Any], kind: str) -> Any:
    """An array as a C array; refuses one that is not contiguous."""
    return ffi.from_buffer(kind, array)


def _keys(array: Uint8Array) -> Any:
    return ffi.from_buffer("uint8_t[]", array)


def _grants(array: GrantArray) -> Any:
    return ffi.from_buffer("struct kvdev_grant[]", array)


def entries_per_block(block_bytes: int) -> int:
    """Entries of a table block, records of a journal block."""
    return int(lib.kvdev_table_entries_per_block(block_bytes))


def seal(blocks: Uint8Array, block_bytes: int) -> None:
    """Write the checksum into the header of each block of a contiguous buffer."""
    lib.kvdev_media_seal_many(_keys(blocks), block_bytes, blocks.nbytes // block_bytes)


def media_error(block: Uint8Array, magic: int, uuid: bytes | None) -> str | None:
    """Why a block is not an intact structure of this kind and owner; None when it is."""
    owner = ffi.NULL if uuid is None else ffi.from_buffer("uint8_t[]", uuid)
    code = lib.kvdev_media_check(_keys(block), block.nbytes, magic, owner)
    return None if code == 0 else _MEDIA_ERRORS[-code]


_MEDIA_ERRORS = {
    errno.EBADMSG: "magic",
    errno.EPROTO: "version",
    errno.EMSGSIZE: "size",
    errno.EILSEQ: "checksum",
    errno.ESTALE: "uuid",
}


class Table:
    """The page table's image: blocks as they lie on media, in a buffer of the caller."""

    def __init__(self, image: Uint8Array, *, block_bytes: int, slot_count: int, uuid: bytes) -> None:
        self.image = image
        self.block_bytes = block_bytes
        self.slot_count = slot_count
        self.uuid = uuid
        self.block_count = table_block_count(block_bytes, slot_count)
        assert image.nbytes >= self.block_count * block_bytes

    def check(self, *, bad_max: int = 1024) -> tuple[int, Uint32Array]:
        """Check every block; bad ones become empty. Returns how many were, and which (the first)."""
        bad = np.zeros(bad_max, dtype=np.uint32)
        count = int(
            lib.kvdev_table_check(
                _keys(self.image),
                self.block_bytes,
                self.block_count,
                self.slot_count,
                self.uuid,
                _pointer(bad, "uint32_t[]"),
                bad_max,
            )
        )
        return count, bad[:count]

    def merge(self, moved: Uint8Array) -> int:
        """Take blocks that moved to the spare area where they are younger; returns how many were."""
        return int(
            lib.kvdev_table_merge(
                _keys(self.image),
                self.block_bytes,
                self.block_count,
                self.slot_count,
                self.uuid,
                _keys(moved),
                moved.nbytes // self.block_bytes,
            )
        )

    def headers(self) -> npt.NDArray[Any]:
        """The blocks' headers, a strided view."""
        blocks = self.image[: self.block_count * self.block_bytes].reshape(-1, self.block_bytes)
        return blocks[:, : MEDIA_HEADER_DTYPE.itemsize].view(MEDIA_HEADER_DTYPE)[:, 0]

    def entries(self, first_slot: int = 0, slot_count: int | None = None) -> EntryArray:
        """Slots' entries, copied, in slot order; all of them unless told which."""
        per_block = entries_per_block(self.block_bytes)
        end = self.slot_count if slot_count is None else min(first_slot + slot_count, self.slot_count)
        first_block, end_block = first_slot // per_block, -(-end // per_block)
        blocks = self.image[: self.block_count * self.block_bytes].reshape(-1, self.block_bytes)
        body = blocks[first_block:end_block, 64 : 64 + per_block * ENTRY_DTYPE.itemsize]
        skipped = first_block * per_block
        return np.ascontiguousarray(body).view(ENTRY_DTYPE).reshape(-1)[first_slot - skipped : end - skipped]


def table_buffer(size_bytes: int) -> Uint8Array:
    """Zeroed bytes for a table image, large ones on huge pages where the kernel has them: it is read at random.

    Private to this process: what could be shared is a file to the kernel, which gives those no huge pages unless told.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        small = np.zeros(size_bytes + TABLE_ALIGNMENT_BYTES, dtype=np.uint8)
        start = -int(small.ctypes.data) % TABLE_ALIGNMENT_BYTES
        return small[start : start + size_bytes]
    memory = mmap.mmap(-1, size_bytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw: Uint8Array = np.frombuffer(memory, dtype=np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -int(raw.ctypes.data) % HUGE_PAGE_BYTES
    return raw[start : start + size_bytes]


def table_block_count(block_bytes: int, slot_count: int) -> int:
    return -(-slot_count // entries_per_block(block_bytes))


def format_table(
    *, block_bytes: int, first_block: int, block_count: int, slot_count: int, uuid: bytes, out: Uint8Array
) -> None:
    """Empty, sealed table blocks ``first_block`` and following, into ``out``."""
    assert out.nbytes >= block_count * block_bytes
    lib.kvdev_table_format(_keys(out), block_bytes, first_block, block_count, slot_count, uuid)


class PageIndex:
    """Key to slot, free slots, the order in which pages go and the records due; over a table image."""

    def __init__(
        self,
        table: Table,
        *,
        pending_limit: int,
        next_generation: int,
        eviction_policy: str = "lru",
        quota_pages: int | None = None,
        has_ages: bool = False,
        checksum: PageChecksum = CRC32C,
    ) -> None:
        """An index with nothing in it; ``replay`` and ``load`` build it from the image.

        Args:
            quota_pages: how many pages the policy is to expect; the slots when not given.
            has_ages: an entry's last use is the second in which it was stored, and ``expire`` goes by it.
            checksum: of all its pages.
        """
        config = ffi.new(
            "struct kvdev_index_config *",
            {
                "uuid": list(table.uuid),
                "next_generation": next_generation,
                "block_bytes": table.block_bytes,
                "slot_count": table.slot_count,
                "pending_limit": pending_limit,
                "policy": POLICY_NUMBERS[eviction_policy],
                "quota_pages": table.slot_count if quota_pages is None else quota_pages,
                "has_ages": int(has_ages),
                "algorithm": checksum.number,
            },
        )
        out = ffi.new("struct kvdev_index **")
        code = lib.kvdev_index_create(_keys(table.image), config, out)
        if code:
            raise CapacityError(f"page index of {table.slot_count} slots: {os.strerror(-code)}")
        self.table = table
        self.pending_limit = pending_limit
        self.checksum = checksum
        self._probe_threads = min(len(os.sched_getaffinity(0)), PROBE_THREADS_MAX)
        self._counts = ffi.new("uint32_t[4]")
        self._probers: ThreadPoolExecutor | None = None
        self._handle = ffi.gc(out[0], lib.kvdev_index_destroy)

    def replay(self, records: EntryArray, first_sequence: int) -> bool:
        """Apply one journal block to the table image; False when a record is not of this table."""
        code = lib.kvdev_table_apply(
            _keys(self.table.image),
            self.table.block_bytes,
            self.table.slot_count,
            lib.kvdev_index_dirty_map(self._handle),
            _pointer(records, "struct kvdev_entry[]"),
            len(records),
            first_sequence,
        )
        return bool(code == 0)

    def load(self, what: str = "page table") -> None:
        """Build hash, lists and states from the table image; UnsupportedError for pages of another checksum."""
        code = lib.kvdev_index_load(self._handle)
        if code == -errno.EPROTO:
            slot = int(
                lib.kvdev_table_find_algorithm(
                    _keys(self.table.image),
                    self.table.block_bytes,
                    self.table.slot_count,
                    self.checksum.number,
                )
            )
            number = int(self.table.entries(slot, 1)["algorithm"][0])
            raise UnsupportedError(
                f"{what}: slot {slot}: page checksum: expected {self.checksum.number} ({self.checksum.name}), "
                f"got {number}",
                feature="page checksum",
            )
        if code:
            raise CapacityError(f"page index of {self.table.slot_count} slots: {os.strerror(-code)}")

    def release(self, slots: Uint32Array) -> None:
        """Free quarantined slots: nothing can land there any more."""
        lib.kvdev_index_release(self._handle, _pointer(slots, "uint32_t[]"), len(slots))

    def follow(self, records: EntryArray, first_sequence: int) -> bool:
        """Take over what another owner's journal says, after ``load``; False when a record is not of this table."""
        code = lib.kvdev_index_follow(
            self._handle, _pointer(records, "struct kvdev_entry[]"), len(records), first_sequence
        )
        return bool(code == 0)

    def stat(self) -> IndexStat:
        out = ffi.new("struct kvdev_index_stat *")
        lib.kvdev_index_stat(self._handle, out)
        return IndexStat(*_STAT_FIELDS(out))

    def counts(self) -> tuple[int, int, int, int]:
        """Records due, and slots live, free and reserved: what a batch asks for, without the work of ``stat``."""
        lib.kvdev_index_counts(self._handle, self._counts)
        pending, live, free, reserved = self._counts
        return pending, live, free, reserved

    def lookup(self, keys: Uint8Array, *, touch: bool) -> tuple[GrantArray, int]:
        """A grant per key, ``slot_index`` SLOT_NONE where the key is not stored; and how many are stored."""
        grants = np.empty(len(keys), dtype=GRANT_DTYPE)
        count = lib.kvdev_index_lookup(self._handle, _keys(keys), len(keys), int(touch), _grants(grants))
        return grants, int(count)

    def contains(self, keys: Uint8Array) -> npt.NDArray[np.bool_]:
        """Which keys are stored; large batches are shared among threads, as nothing changes meanwhile.

        By 64 bits of a keyed hash and its place: one key in 2^60 that is not stored passes for stored.
        """
        found = np.empty(len(keys), dtype=np.bool_)

        def probe(part: slice) -> None:
            lib.kvdev_index_contains(
                self._handle, _keys(keys[part]), len(keys[part]), _pointer(found[part], "uint8_t[]")
            )

        if len(keys) < 2 * PROBE_SHARE_MIN:
            probe(slice(None))
        else:
            self._share(len(keys), probe)
        return found

    def longest_prefix(self, keys: Uint8Array) -> int:
        """How many keys from the first on are stored; large batches are shared as in ``contains``."""
        if len(keys) < 2 * PROBE_SHARE_MIN:
            # An engine's request: what Python does here comes from a cold cache too, and counts.
            return int(lib.kvdev_index_prefix(self._handle, _keys(keys), len(keys)))

        def probe(part: slice) -> int:
            return int(lib.kvdev_index_prefix(self._handle, _keys(keys[part]), len(keys[part])))

        total = 0
        for part, count in self._share(len(keys), probe):
            total += count
            if count < part.stop - part.start:
                break
        return total

    def _share(self, count: int, probe: Callable[[slice], _T]) -> list[tuple[slice, _T]]:
        """Run ``probe`` on parts of ``count`` keys, the first in this thread, the others beside it."""
        share_count = max(1, min(self._probe_threads, count // PROBE_SHARE_MIN))
        step = -(-count // share_count)
        parts = [slice(start, min(start + step, count)) for start in range(0, count, max(step, 1))]
        if len(parts) <= 1:
            return [(part, probe(part)) for part in parts]
        if self._probers is None:
            self._probers = ThreadPoolExecutor(self._probe_threads - 1, thread_name_prefix="kvdev-probe")
        others = [self._probers.submit(probe, part) for part in parts[1:]]
        try:
            results = [probe(parts[0])]
        finally:
            # Whatever happens here, the others read the caller's keys until they are done.
            wait(others)
        return list(zip(parts, results + [other.result() for other in others], strict=True))

    def reserve(self, count: int, length: int) -> GrantArray | None:
        """Grants to write ``count`` free slots; None, and nothing taken, when there are fewer."""
        grants = np.empty(count, dtype=GRANT_DTYPE)
        code = lib.kvdev_index_reserve(self._handle, count, length, _grants(grants))
        return grants if code == 0 else None

    def commit(
        self, keys: Uint8Array, grants: GrantArray, sums: SumArray, outcome: Uint8Array
    ) -> npt.NDArray[np.bool_]:
        """Make entries of the grants that were written, free the others; fills in the grants' checksums."""
        assert sums.dtype == self.checksum.sum_dtype
        done = np.empty(len(keys), dtype=np.bool_)
        code = lib.kvdev_index_commit(
            self._handle,
            _keys(keys),
            _grants(grants),
            ffi.from_buffer(sums),
            _keys(outcome),
            len(keys),
            _pointer(done, "uint8_t[]"),
        )
        self._check_room(code)
        return done

    def remove(self, keys: Uint8Array) -> npt.NDArray[np.bool_]:
        done = np.empty(len(keys), dtype=np.bool_)
        self._check_room(
            lib.kvdev_index_remove(self._handle, _keys(keys), len(keys), _pointer(done, "uint8_t[]"))
        )
        return done

    def withdraw(self, grants: GrantArray) -> npt.NDArray[np.bool_]:
        """Remove the entries that are still those of the grants."""
        done = np.empty(len(grants), dtype=np.bool_)
        self._check_room(
            lib.kvdev_index_withdraw(self._handle, _grants(grants), len(grants), _pointer(done, "uint8_t[]"))
        )
        return done

    def confirm(self, grants: GrantArray) -> npt.NDArray[np.bool_]:
        """Where the grant's entry is still the one it was given for."""
        valid = np.empty(len(grants), dtype=np.bool_)
        lib.kvdev_index_confirm(self._handle, _grants(grants), len(grants), _pointer(valid, "uint8_t[]"))
        return valid

    def pin(self, keys: Uint8Array, *, is_pinned: bool) -> npt.NDArray[np.bool_]:
        """Keep pages from being evicted, or allow it again; True where there is one."""
        done = np.empty(len(keys), dtype=np.bool_)
        lib.kvdev_index_pin(self._handle, _keys(keys), len(keys), int(is_pinned), _pointer(done, "uint8_t[]"))
        return done

    def evict(self, count: int, kept_keys: Uint8Array | None = None) -> int:
        """Remove up to ``count`` pages by the policy, none of those kept; returns how many."""
        evicted = ffi.new("uint32_t *")
        kept = ffi.NULL if kept_keys is None else _keys(kept_keys)
        kept_count = 0 if kept_keys is None else len(kept_keys)
        self._check_room(lib.kvdev_index_evict(self._handle, count, kept, kept_count, evicted))
        return int(evicted[0])

    def set_clock(self, second: int) -> None:
        """With ages: the second it is now."""
        lib.kvdev_index_set_clock(self._handle, second)

    def expire(self, second: int, count: int, *, is_owner: bool = True) -> tuple[int, int]:
        """Remove up to ``count`` pages stored before ``second``, as far as there is room for their records.

        Returns how many, and when the oldest one left was stored: CLOCK_NEVER when there is none. Who is not
        the owner forgets them, without records.
        """
        oldest = ffi.new("uint32_t *")
        expired = int(lib.kvdev_index_expire(self._handle, second, count, int(is_owner), oldest))
        return expired, int(oldest[0])

    def limit_slots(self, slot_limit: int) -> None:
        """Hand out slots below ``slot_limit`` only."""
        lib.kvdev_index_limit_slots(self._handle, slot_limit)

    def move(self, source: GrantArray, target: GrantArray) -> npt.NDArray[np.bool_]:
        """Let pages that were copied to reserved slots be found there; False where the page is gone."""
        done = np.empty(len(source), dtype=np.bool_)
        self._check_room(
            lib.kvdev_index_move(
                self._handle, _grants(source), _grants(target), len(source), _pointer(done, "uint8_t[]")
            )
        )
        return done

    def collect(self) -> EntryArray:
        """The records due, in order; in flight until ``settle`` or ``fail``."""
        records = np.empty(self.pending_limit, dtype=ENTRY_DTYPE)
        count = lib.kvdev_index_collect(
            self._handle, _pointer(records, "struct kvdev_entry[]"), self.pending_limit
        )
        return records[:count]

    def settle(self, records: EntryArray) -> None:
        """The records are durable: slots they freed may be written again."""
        lib.kvdev_index_settle(self._handle, _pointer(records, "struct kvdev_entry[]"), len(records))

    def revive(self, records: EntryArray, *, is_live: bool) -> None:
        """Make the table's entries of slots that the records free live again, or free for good."""
        lib.kvdev_index_revive(
            self._handle, _pointer(records, "struct kvdev_entry[]"), len(records), int(is_live)
        )

    def fail(self, records: EntryArray) -> int:
        """The records' fate is unknown: withdraw what they stored; returns how many entries that were."""
        return int(
            lib.kvdev_index_fail(self._handle, _pointer(records, "struct kvdev_entry[]"), len(records))
        )

    def drop_pending(self) -> int:
        """Withdraw the entries whose record is due: their data may be lost; returns how many."""
        return int(lib.kvdev_index_drop_pending(self._handle))

    def dirty_blocks(self) -> Uint32Array:
        """Table blocks that differ from media, ascending."""
        blocks = np.empty(self.table.block_count, dtype=np.uint32)
        count = lib.kvdev_index_dirty_blocks(self._handle, _pointer(blocks, "uint32_t[]"), len(blocks))
        dirty: Uint32Array = blocks[:count].copy()
        return dirty

    def mark_dirty(self, blocks: Uint32Array) -> None:
        """Take table blocks for different from media."""
        dirty = np.frombuffer(
            ffi.buffer(lib.kvdev_index_dirty_map(self._handle), self.table.block_count), dtype=np.uint8
        )
        dirty[blocks] = 1

    def seal(self, blocks: Uint32Array, *, sequence: int, epoch: int) -> None:
        """Write the headers of table blocks: they include everything up to ``sequence``."""
        lib.kvdev_index_seal(self._handle, _pointer(blocks, "uint32_t[]"), len(blocks), sequence, epoch)

    def clear_dirty(self, blocks: Uint32Array) -> None:
        lib.kvdev_index_clear_dirty(self._handle, _pointer(blocks, "uint32_t[]"), len(blocks))

    def _check_room(self, code: int) -> None:
        if code == -errno.ENOBUFS:
            raise PendingFullError(f"page index: more than {self.pending_limit} records are due")
        assert code == 0, "the index fails for nothing else"


def find_duplicate(keys: Uint8Array) -> int | None:
    """Position of the first key that repeats an earlier one of the batch."""
    scratch = np.empty(max(4 * len(keys), 1), dtype=np.uint32)
    place = int(lib.kvdev_keys_find_duplicate(_keys(keys), len(keys), _pointer(scratch, "uint32_t[]")))
    return None if place == len(keys) else place


def copy_many(to: Uint64Array, source: Uint64Array, size_bytes: int) -> None:
    """Copy ``size_bytes`` between each pair of addresses; the caller keeps both sides alive."""
    if len(to) != len(source):
        raise UsageError(f"copy: expected as many sources as destinations, got {len(source)} and {len(to)}")
    lib.kvdev_copy_many(_pointer(to, "uint64_t[]"), _pointer(source, "uint64_t[]"), size_bytes, len(to))
