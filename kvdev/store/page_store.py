"""The page store: batches of pages by key, checked on the way in and on the way out.

``put`` returns when the pages can be read; ``flush`` when they are durable. A page that fails its checksum
is reported, withdrawn, and never counts as stored.
Not here: the table (``namespace``); where pages come from (``kvdev.staging``, engines).
Threads: any; batches on one namespace run one after the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import KvdevError
from kvdev.keys import KeyArray, PageKeys, check_salt
from kvdev.native.checksum import SumArray
from kvdev.native.index import SLOT_NONE, GrantArray
from kvdev.store.batch import (
    GetResult,
    PageStatus,
    PutResult,
    VerifyBy,
    check_array,
    check_batch,
    check_distinct,
    check_quota,
    check_verify,
    mismatch_error,
    put_in_parts,
)
from kvdev.store.namespace import KvNamespace

__all__ = ["BATCH_TIMEOUT_S", "GetResult", "PageStatus", "PageStore", "PutResult", "VerifyBy"]

BATCH_TIMEOUT_S = 30.0
"""A batch that names no deadline ends by this one."""


class PageStore:
    """Owner and I/O of one KV namespace in one object."""

    def __init__(self, namespace: KvNamespace, *, timeout_s: float = BATCH_TIMEOUT_S) -> None:
        """``close`` closes the namespace too."""
        self.namespace = namespace
        self.what = namespace.what
        self.geometry = namespace.geometry
        self.page_size_bytes = namespace.page_size_bytes
        self.checksum = namespace.checksum
        """Which checksum its pages have: what ``put`` takes and ``get`` gives."""
        self._timeout_s = timeout_s
        self.stale_count = 0
        """Pages that a follower found replaced under its hands, and reported as misses."""

    def page_keys(self, *, salt: str | bytes = b"", cache_group: str | bytes = b"") -> PageKeys:
        """What makes this tenant's page keys of an engine's; UsageError where the namespace's are made with another
        salt."""
        check_salt(self.what, salt, expected_mark=self.namespace.salt_mark)
        return PageKeys(salt, cache_group)

    def put(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        checksums: SumArray | None = None,
        deadline: Deadline | None = None,
    ) -> PutResult:
        """Store pages; those under a key that is stored replace it.

        Durable with the next ``flush``. A page that cannot be written is reported and not stored; what it
        would have replaced stays. The pages must not change until this returns.

        Args:
            checksums: of each page, by the namespace's algorithm, where a kernel has computed them already: ``(n,)
                uint32`` CRC32C, or ``(n,) uint64`` NH-64.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = check_batch(
            keys,
            pages,
            page_size_bytes=self.page_size_bytes,
            is_written=False,
            checksums=checksums,
            checksum=self.checksum,
        )
        check_quota(self.namespace.what, len(keys), self.namespace.quota_pages)

        def put_some(
            keys: KeyArray, addresses: AddressArray, checksums: SumArray | None
        ) -> tuple[npt.NDArray[np.bool_], SumArray, KvdevError | None]:
            return self._put_some(keys, addresses, checksums, deadline)

        limit = self.namespace.batch_limit
        return put_in_parts(put_some, keys, addresses, checksums, limit=limit, checksum=self.checksum)

    def _put_some(
        self,
        keys: KeyArray,
        addresses: AddressArray,
        checksums: SumArray | None,
        deadline: Deadline,
    ) -> tuple[npt.NDArray[np.bool_], SumArray, KvdevError | None]:
        namespace = self.namespace
        grants = namespace.reserve(keys, may_be_fewer=True, deadline=deadline)
        keys, addresses = keys[: len(grants)], addresses[: len(grants)]
        sent_ns = SYSTEM_CLOCK.monotonic_ns()
        try:
            result = namespace.page_io.write(
                grants, addresses, deadline=namespace.bounded(deadline), wants_sums=checksums is None
            )
        except BaseException:
            # Nobody knows how far it came: the slots stay out of use until nothing can land there any more.
            namespace.release(grants, is_fate_unknown=True, sent_ns=sent_ns, deadline=deadline)
            raise
        sums = result.sums if checksums is None else checksums[: len(grants)]
        stored = namespace.commit(
            keys,
            grants,
            sums,
            outcome=result.outcome,
            members=result.members,
            sent_ns=sent_ns,
            deadline=deadline,
        )
        # Only now: it may raise, and what was granted has been given back.
        namespace.note_failure(result.failure)
        return stored, sums, result.failure

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
            verify: ``store`` checks every page here; with ``kernel`` the caller compares ``sums`` with the
                bytes and reports the pages that differ to ``report_bad``.
        """
        check_verify(verify)
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = check_batch(keys, pages, page_size_bytes=self.page_size_bytes, is_written=True)
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
        sums = self.checksum.zeros(len(keys))
        if not len(hit_index):
            return GetResult(status, sums, grants, None)
        got = self._get_all(
            keys[hit_index], grants[hit_index], addresses[hit_index], verify, deadline, hit_index
        )
        status[hit_index] = got.status
        sums[hit_index] = got.sums
        return GetResult(status, sums, grants, got.failure)

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
        result = namespace.page_io.read(grants, addresses, deadline=deadline, wants_sums=verify == "store")
        actual = result.sums if verify == "store" else namespace.sums_of(keys, grants)
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
            where = np.arange(len(keys)) if positions is None else positions
            expected = namespace.sums_of(keys, grants)
            failure = failure or mismatch_error(
                namespace.what, where, is_bad, expected, actual, checksum=self.checksum
            )
        return GetResult(status, actual, grants, failure)

    def report_bad(
        self, result: GetResult, is_bad: npt.NDArray[np.bool_], *, deadline: Deadline | None = None
    ) -> int:
        """Withdraw pages whose bytes a kernel found wrong after ``get(verify="kernel")``; returns how many."""
        check_array("is_bad", is_bad, len(result.status), np.dtype(np.bool_))
        chosen = is_bad & (result.status == PageStatus.HIT)
        return self.namespace.withdraw(
            np.ascontiguousarray(result.grants[chosen]), deadline=deadline or Deadline.after(self._timeout_s)
        )

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which keys are stored; does not count as a use."""
        return self.namespace.contains(keys)

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on are stored; does not count as a use."""
        return self.namespace.longest_prefix(keys)

    def pin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Keep pages from being evicted until ``unpin`` or ``close``; True where there is one."""
        return self.namespace.pin(check_distinct(keys))

    def unpin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Let pages be evicted again; they count as used now."""
        return self.namespace.unpin(check_distinct(keys))

    def delete(self, keys: KeyArray, *, deadline: Deadline | None = None) -> npt.NDArray[np.bool_]:
        """Remove pages; True where there was one. Durable with the next ``flush``."""
        return self.namespace.delete(
            check_distinct(keys), deadline=deadline or Deadline.after(self._timeout_s)
        )

    def flush(self, *, deadline: Deadline | None = None) -> None:
        """Make everything put and deleted so far durable; an error withdraws what it covered."""
        self.namespace.flush(deadline=deadline or Deadline.after(self._timeout_s))

    def close(self, *, deadline: Deadline | None = None) -> None:
        """Flush and close the namespace; see ``KvNamespace.close``."""
        self.namespace.close(deadline=deadline)
