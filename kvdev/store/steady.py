"""A page store for an engine that goes on without it: when a member is lost there are misses, and puts are dropped.

The batch that finds out takes as long as its deadline allows; after it nothing is sent any more, so no call waits. The
namespace is given up, locks and all, so that the volume can be made anew; ``reopen`` takes up what there is then.
Not here: making it anew (``recreate``); the client of a pool process, which goes on by itself (``kvdev.pool``).
Threads: any; calls run one after the other, as the store's do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvdev.buffers import Pages
from kvdev.clock import Deadline
from kvdev.errors import ConnectionLostError, DeadlineError, KvdevError, LeaseLostError, UsageError
from kvdev.keys import KeyArray, check_keys
from kvdev.native.checksum import SumArray
from kvdev.native.index import GRANT_DTYPE, SLOT_NONE, GrantArray
from kvdev.store.batch import GetResult, PageStatus, PutResult, VerifyBy, check_verify
from kvdev.store.page_store import PageStore

CALL_TIMEOUT_S = 30.0
"""A call that names no deadline; running out of it means that a member does not answer."""

log = logging.getLogger("kvdev.store")
_T = TypeVar("_T")


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says that a member, or the namespace, is gone for this owner.

    A write of unknown fate alone does not: its target may be back already.
    """
    return isinstance(error, (ConnectionLostError, LeaseLostError))


@dataclass(frozen=True)
class SteadyStat:
    """What an engine went without."""

    is_away: bool
    reason: str
    """Why, of the last loss; empty before the first."""
    loss_count: int
    missed_pages: int
    """Asked for while the store was away, or lost with it in the batch that found out."""
    dropped_pages: int
    """Put likewise, and what failed to be put before."""


class SteadyStore:
    """The calls of ``PageStore``; those of a store that is away cost nothing and find nothing."""

    def __init__(
        self,
        open_store: Callable[[Deadline], PageStore],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        deadline: Deadline | None = None,
    ) -> None:
        """Open; raises what that raises. ``open_store`` opens devices and all, and is called again by ``reopen``."""
        self._open_store = open_store
        self._timeout_s = timeout_s
        self._mutex = threading.RLock()
        self._is_closed = False
        self._reason: KvdevError | None = None
        self.loss_count = self.missed_pages = self.dropped_pages = 0
        self._store: PageStore | None = open_store(deadline or Deadline.after(timeout_s))
        self.page_size_bytes = self._store.page_size_bytes
        self.checksum = self._store.checksum
        self.what = self._store.namespace.what

    # --- what is away ------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        return self._store is None

    @property
    def store(self) -> PageStore | None:
        """The store behind this, None while it is away."""
        return self._store

    def stat(self) -> SteadyStat:
        with self._mutex:
            reason = "" if self._reason is None else str(self._reason)
            return SteadyStat(
                self._store is None, reason, self.loss_count, self.missed_pages, self.dropped_pages
            )

    def reopen(self, *, deadline: Deadline | None = None) -> None:
        """Take up the volume as it is now, made anew or back; what is still open is closed first.

        Raises what opening raises; the store is away then, and this may be called again. Refused, and away, when the
        namespace has pages of another size, or with another checksum, now.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        with self._mutex:
            self._check_open()
            if self._store is not None:
                store, self._store = self._store, None
                store.close(deadline=deadline)
            found = self._open_store(deadline)
            for name, expected, actual in (
                ("page size", self.page_size_bytes, found.page_size_bytes),
                ("checksum", self.checksum.name, found.checksum.name),
            ):
                if actual != expected:
                    found.close(deadline=deadline)
                    raise UsageError(
                        f"{self.what}: {name}: expected {expected}, got {actual}: the namespace is another one"
                    )
            self._store = found
            log.warning("%s: is back", self.what)

    def _lose(self, error: KvdevError | None) -> None:
        """Give the namespace up, as it is: what was flushed is on media if these come back."""
        store, self._store = self._store, None
        if store is None:
            return
        self._reason = error
        self.loss_count += 1
        store.namespace.abandon()
        log.warning("%s: misses and dropped puts until it is opened again: %s", self.what, error)

    def _is_loss(self, error: KvdevError | None, deadline: Deadline | None) -> bool:
        """A deadline of the caller's own may be as short as it likes."""
        return is_loss(error) or (deadline is None and isinstance(error, DeadlineError))

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.what}: is closed")

    # --- pages -------------------------------------------------------------------------------

    def put(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        checksums: SumArray | None = None,
        deadline: Deadline | None = None,
    ) -> PutResult:
        """As ``PageStore.put``; what is not stored for want of a member is an ERROR, and counted."""
        with self._mutex:
            self._check_open()
            store, failure = self._store, self._reason
            if store is not None:
                try:
                    result = store.put(keys, pages, checksums=checksums, deadline=self._limit(deadline))
                except KvdevError as error:
                    if not self._is_loss(error, deadline):
                        raise
                    self._lose(error)
                    failure = error
                else:
                    if self._is_loss(result.failure, deadline):
                        self._lose(result.failure)
                        # Nothing of this owner's is to be found any more, what it stored in this batch included.
                        self.dropped_pages += len(keys)
                        status = np.full(len(keys), PageStatus.ERROR, dtype=np.uint8)
                        return replace(result, status=status)
                    self.dropped_pages += result.error_count
                    return result
            self.dropped_pages += len(keys)
            status = np.full(len(keys), PageStatus.ERROR, dtype=np.uint8)
            return PutResult(status, self.checksum.zeros(len(keys)), failure)

    def get(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        verify: VerifyBy = "store",
        deadline: Deadline | None = None,
    ) -> GetResult:
        """As ``PageStore.get``; what cannot be read for want of a member is a MISS, and counted."""
        check_verify(verify)
        with self._mutex:
            self._check_open()
            store = self._store
            if store is not None:
                try:
                    result = store.get(keys, pages, verify=verify, deadline=self._limit(deadline))
                except KvdevError as error:
                    if not self._is_loss(error, deadline):
                        raise
                    self._lose(error)
                else:
                    if self._is_loss(result.failure, deadline):
                        self._lose(result.failure)
                        is_error = result.status == PageStatus.ERROR
                        self.missed_pages += int(is_error.sum())
                        status = np.where(is_error, PageStatus.MISS, result.status).astype(np.uint8)
                        return replace(result, status=status)
                    return result
            self.missed_pages += len(keys)
            grants: GrantArray = np.zeros(len(keys), dtype=GRANT_DTYPE)
            grants["slot_index"] = SLOT_NONE
            return GetResult(
                np.zeros(len(keys), dtype=np.uint8), self.checksum.zeros(len(keys)), grants, None
            )

    def report_bad(
        self, result: GetResult, is_bad: npt.NDArray[np.bool_], *, deadline: Deadline | None = None
    ) -> int:
        """As ``PageStore.report_bad``; nothing is left to withdraw while the store is away."""
        return self._ask(
            None, lambda store: store.report_bad(result, is_bad, deadline=self._limit(deadline)), 0, deadline
        )

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which keys are stored; none while the store is away."""
        return self._ask(keys, lambda store: store.contains(keys), np.zeros(len(keys), dtype=np.bool_))

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on are stored; none while the store is away."""
        return self._ask(keys, lambda store: store.longest_prefix(keys), 0)

    def delete(self, keys: KeyArray, *, deadline: Deadline | None = None) -> npt.NDArray[np.bool_]:
        """As ``PageStore.delete``; nothing is there while the store is away."""
        none = np.zeros(len(keys), dtype=np.bool_)
        return self._ask(
            keys, lambda store: store.delete(keys, deadline=self._limit(deadline)), none, deadline
        )

    def _ask(
        self,
        keys: KeyArray | None,
        call: Callable[[PageStore], _T],
        away: _T,
        deadline: Deadline | None = None,
    ) -> _T:
        if keys is not None:
            check_keys(keys)
        with self._mutex:
            self._check_open()
            if self._store is None:
                return away
            try:
                return call(self._store)
            except KvdevError as error:
                if not self._is_loss(error, deadline):
                    raise
                self._lose(error)
                return away

    def flush(self, *, deadline: Deadline | None = None) -> None:
        """As ``PageStore.flush``; raises why the store is away: what was put is not durable."""
        with self._mutex:
            self._check_open()
            if self._store is None:
                raise ConnectionLostError(f"{self.what}: flush: is away: {self._reason}", trid=self.what)
            try:
                self._store.flush(deadline=self._limit(deadline))
            except KvdevError as error:
                if self._is_loss(error, deadline):
                    self._lose(error)
                raise

    def _limit(self, deadline: Deadline | None) -> Deadline:
        return deadline or Deadline.after(self._timeout_s)

    def close(self, *, deadline: Deadline | None = None) -> None:
        """Close what is open; a store that is away has nothing to close. Twice does nothing."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            store, self._store = self._store, None
            if store is not None:
                store.close(deadline=deadline)
