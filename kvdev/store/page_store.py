"""The page store: batches of pages by key, checked on the way in and on the way out.

``put`` returns when the pages can be read; ``flush`` when they are durable. A page that fails its checksum
is reported, withdrawn, and never counts as stored.
Not here: the table (``namespace``); where pages come from (``kvdev.staging``, engines).
Threads: any; batches on one namespace run one after the other.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvdev.buffers import Pages, page_addresses
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CapacityError, CorruptionError, KvdevError, UsageError
from kvdev.keys import KeyArray, check_keys
from kvdev.native.index import SLOT_NONE, GrantArray, find_duplicate
from kvdev.store.namespace import KvNamespace

VerifyBy = Literal["store", "kernel"]

BATCH_TIMEOUT_S = 30.0
"""A batch that names no deadline ends by this one."""


class PageStatus(enum.IntEnum):
    """What a batch says of one page."""

    MISS = 0
    HIT = 1
    ERROR = 2
    STORED = 3


StatusArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PutResult:
    """Per page STORED or ERROR; ``failure`` is the first page's error."""

    status: StatusArray
    crc32c: npt.NDArray[np.uint32]
    failure: KvdevError | None

    @property
    def stored_count(self) -> int:
        return int((self.status == PageStatus.STORED).sum())

    @property
    def error_count(self) -> int:
        return int((self.status == PageStatus.ERROR).sum())


@dataclass(frozen=True)
class GetResult:
    """Per page HIT, MISS or ERROR.

    Only a HIT's bytes may be used; an ERROR's are undefined, a MISS's untouched, unless a follower found the page
    replaced when it had read it. ``crc32c`` is that of the
    bytes read with ``verify="store"``, and what the bytes must have with ``verify="kernel"``.
    """

    status: StatusArray
    crc32c: npt.NDArray[np.uint32]
    grants: GrantArray
    failure: KvdevError | None

    @property
    def hit_count(self) -> int:
        return int((self.status == PageStatus.HIT).sum())

    @property
    def miss_count(self) -> int:
        return int((self.status == PageStatus.MISS).sum())

    @property
    def error_count(self) -> int:
        return int((self.status == PageStatus.ERROR).sum())


class PageStore:
    """Owner and I/O of one KV namespace in one object."""

    def __init__(self, namespace: KvNamespace, *, timeout_s: float = BATCH_TIMEOUT_S) -> None:
        """``close`` closes the namespace too."""
        self.namespace = namespace
        self.page_size_bytes = namespace.page_size_bytes
        self._timeout_s = timeout_s
        self.stale_count = 0
        """Pages that a follower found replaced under its hands, and reported as misses."""

    def put(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        checksums: npt.NDArray[np.uint32] | None = None,
        deadline: Deadline | None = None,
    ) -> PutResult:
        """Store pages; those under a key that is stored replace it.

        Durable with the next ``flush``. A page that cannot be written is reported and not stored; what it
        would have replaced stays. The pages must not change until this returns.

        Args:
            checksums: CRC32C of each page, ``(n,) uint32``, where a kernel has computed them already.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = self._check_batch(keys, pages, is_written=False)
        if checksums is not None:
            _check_checksums(checksums, len(keys))
        if len(keys) > self.namespace.quota_pages:
            raise CapacityError(
                f"{self.namespace.what}: put: expected at most the quota of {self.namespace.quota_pages} pages, "
                f"got {len(keys)}"
            )
        status = np.full(len(keys), PageStatus.ERROR, dtype=np.uint8)
        crc32c = np.zeros(len(keys), dtype=np.uint32)
        failure: KvdevError | None = None
        limit = self.namespace.batch_limit
        for start in range(0, len(keys), limit):
            part = slice(start, start + limit)
            given = None if checksums is None else np.ascontiguousarray(checksums[part])
            stored, crc32c[part], problem = self._put_some(keys[part], addresses[part], given, deadline)
            status[part][stored] = PageStatus.STORED
            failure = failure or problem
        return PutResult(status, crc32c, failure)

    def _put_some(
        self,
        keys: KeyArray,
        addresses: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint32] | None,
        deadline: Deadline,
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32], KvdevError | None]:
        namespace = self.namespace
        grants = namespace.reserve(keys, deadline=deadline)
        sent_ns = SYSTEM_CLOCK.monotonic_ns()
        try:
            result = namespace.page_io.write(
                grants, addresses, deadline=namespace.bounded(deadline), wants_crc=checksums is None
            )
        except BaseException:
            # Nobody knows how far it came: the slots stay out of use until nothing can land there any more.
            namespace.release(grants, is_fate_unknown=True, sent_ns=sent_ns, deadline=deadline)
            raise
        namespace.note_failure(result.failure)
        crc32c = result.crc32c if checksums is None else checksums
        stored = namespace.commit(
            keys,
            grants,
            crc32c,
            outcome=result.outcome,
            members=result.members,
            sent_ns=sent_ns,
            deadline=deadline,
        )
        return stored, crc32c, result.failure

    def get(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        verify: VerifyBy = "store",
        deadline: Deadline | None = None,
    ) -> GetResult:
        """Read the pages that are stored, each to its place; they count as used, the first as the latest.

        Args:
            verify: ``store`` checks every page here; with ``kernel`` the caller compares ``crc32c`` with the
                bytes and reports the pages that differ to ``report_bad``.
        """
        if verify not in ("store", "kernel"):
            raise UsageError(f"verify: expected store or kernel, got {verify!r}")
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = self._check_batch(keys, pages, is_written=True)
        # Held from lookup to check: no slot is given to another page while it is read.
        with self.namespace.mutex:
            return self._get_locked(keys, addresses, verify, deadline)

    def _get_locked(
        self, keys: KeyArray, addresses: npt.NDArray[np.uint64], verify: VerifyBy, deadline: Deadline
    ) -> GetResult:
        namespace = self.namespace
        grants, stored_count = namespace.lookup_counted(keys)
        if stored_count == len(keys) > 0:
            return self._get_all(keys, grants, addresses, verify, deadline)
        hit_index = np.flatnonzero(grants["slot_index"] != SLOT_NONE)
        status = np.zeros(len(keys), dtype=np.uint8)
        crc32c = np.zeros(len(keys), dtype=np.uint32)
        if not len(hit_index):
            return GetResult(status, crc32c, grants, None)
        got = self._get_all(
            keys[hit_index], grants[hit_index], addresses[hit_index], verify, deadline, hit_index
        )
        status[hit_index] = got.status
        crc32c[hit_index] = got.crc32c
        return GetResult(status, crc32c, grants, got.failure)

    def _get_all(
        self,
        keys: KeyArray,
        grants: GrantArray,
        addresses: npt.NDArray[np.uint64],
        verify: VerifyBy,
        deadline: Deadline,
        positions: npt.NDArray[np.intp] | None = None,
    ) -> GetResult:
        """Read and check pages that are all stored; ``positions`` are their places in the caller's batch."""
        namespace = self.namespace
        result = namespace.page_io.read(grants, addresses, deadline=deadline, wants_crc=verify == "store")
        actual = result.crc32c if verify == "store" else grants["checksum"].astype(np.uint32)
        is_right, right_count = namespace.verify_counted(keys, grants, actual)
        if right_count == len(keys) and result.failure is None:
            return GetResult(np.full(len(keys), PageStatus.HIT, dtype=np.uint8), actual, grants, None)
        is_read = result.error == 0
        is_bad = is_read & ~is_right
        status = np.where(is_read & is_right, PageStatus.HIT, PageStatus.ERROR).astype(np.uint8)
        failure = result.failure
        if namespace.mode == "follower" and is_bad.any():
            # Its owner gave the slot to another page: what this one knows of the table is behind that.
            status[is_bad] = PageStatus.MISS
            self.stale_count += int(is_bad.sum())
        elif is_bad.any():
            namespace.withdraw(grants[is_bad], deadline=deadline)
            expected = grants["checksum"].astype(np.uint32)
            where = np.arange(len(keys)) if positions is None else positions
            failure = failure or self._mismatch(where, is_bad, expected, actual)
        return GetResult(status, actual, grants, failure)

    def _mismatch(
        self,
        hit_index: npt.NDArray[np.intp],
        is_bad: npt.NDArray[np.bool_],
        expected: npt.NDArray[np.uint32],
        actual: npt.NDArray[np.uint32],
    ) -> CorruptionError:
        first = int(np.flatnonzero(is_bad)[0])
        return CorruptionError(
            f"{self.namespace.what}: page {int(hit_index[first])} of the batch: checksum: "
            f"expected 0x{int(expected[first]):08x}, got 0x{int(actual[first]):08x}; withdrawn",
            extent=int(hit_index[first]),
            expected=int(expected[first]),
            actual=int(actual[first]),
        )

    def report_bad(
        self, result: GetResult, is_bad: npt.NDArray[np.bool_], *, deadline: Deadline | None = None
    ) -> int:
        """Withdraw pages whose bytes a kernel found wrong after ``get(verify="kernel")``; returns how many."""
        chosen = is_bad & (result.status == PageStatus.HIT)
        return self.namespace.withdraw(
            result.grants[chosen], deadline=deadline or Deadline.after(self._timeout_s)
        )

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which keys are stored; does not count as a use."""
        return self.namespace.contains(check_keys(keys))

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on are stored; does not count as a use."""
        return self.namespace.longest_prefix(check_keys(keys))

    def pin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Keep pages from being evicted until ``unpin`` or ``close``; True where there is one."""
        return self.namespace.pin(check_keys(keys))

    def unpin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Let pages be evicted again; they count as used now."""
        return self.namespace.unpin(check_keys(keys))

    def delete(self, keys: KeyArray, *, deadline: Deadline | None = None) -> npt.NDArray[np.bool_]:
        """Remove pages; True where there was one. Durable with the next ``flush``."""
        check_keys(keys)
        _check_distinct(keys)
        return self.namespace.delete(keys, deadline=deadline or Deadline.after(self._timeout_s))

    def flush(self, *, deadline: Deadline | None = None) -> None:
        """Make everything put and deleted so far durable; an error withdraws what it covered."""
        self.namespace.flush(deadline=deadline or Deadline.after(self._timeout_s))

    def close(self, *, deadline: Deadline | None = None) -> None:
        """Flush and close the namespace; see ``KvNamespace.close``."""
        self.namespace.close(deadline=deadline)

    def _check_batch(self, keys: KeyArray, pages: Pages, *, is_written: bool) -> npt.NDArray[np.uint64]:
        """Everything that can be wrong with a batch, before any I/O; the pages' addresses."""
        check_keys(keys)
        addresses = page_addresses(pages, self.page_size_bytes, is_written=is_written)
        if len(addresses) != len(keys):
            raise UsageError(f"pages: expected one page per key, got {len(addresses)} for {len(keys)} keys")
        _check_distinct(keys)
        return addresses


def _check_checksums(checksums: object, count: int) -> None:
    got = f"{type(checksums).__name__}"
    if isinstance(checksums, np.ndarray):
        if checksums.shape == (count,) and checksums.dtype == np.uint32:
            return
        got = f"{checksums.shape} {checksums.dtype}"
    raise UsageError(f"checksums: expected a ({count},) uint32 array, got {got}")


def _check_distinct(keys: KeyArray) -> None:
    place = find_duplicate(keys)
    if place is not None:
        raise UsageError(f"keys: key {place} ({keys[place].tobytes().hex()[:16]}...) is in the batch twice")
