"""A page store for an engine that goes on without it: when a member is lost there are misses, and puts are dropped.

The batch that finds out takes as long as its deadline allows; after it no call sends anything, so none waits. The
namespace is given up, locks and all, so that the volume can be made anew. A thread of the store's own looks for it
again and again, and takes up what there is then: the volume that is back, or the one made anew.
Not here: making it anew (``recreate``); the client of a pool process, which goes on by itself (``kvdev.pool``).
Threads: any; calls run one after the other, as the store's do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
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

RETRY_S_MIN = 0.5
RETRY_S_MAX = 30.0
"""Between two attempts to open a store that is away: doubles from the one to the other."""

log = logging.getLogger("kvdev.store")
_T = TypeVar("_T")


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says that a member, or the namespace, is gone for this owner.

    A write of unknown fate alone does not: its target may be back already.
    """
    return isinstance(error, (ConnectionLostError, LeaseLostError))


def retry_pauses_s(least_s: float, most_s: float) -> Iterator[float]:
    """Pauses between attempts, without end: each twice the one before, up to the most."""
    pause_s = least_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


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
    attempt_count: int
    """How often it was tried to open it again."""
    reopen_count: int
    """How often that succeeded."""
    refusal: str
    """What the last attempt since the last loss said; empty when there was none, or it succeeded."""


class SteadyStore:
    """The calls of ``PageStore``; those of a store that is away cost nothing and find nothing."""

    def __init__(
        self,
        open_store: Callable[[Deadline], PageStore],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        reopens_by_itself: bool = True,
        retry_s_min: float = RETRY_S_MIN,
        retry_s_max: float = RETRY_S_MAX,
        deadline: Deadline | None = None,
    ) -> None:
        """Open; raises what that raises.

        Args:
            open_store: opens devices and all. It is called again, from a thread of the store's own and one call at a
                time, while the store is away: what it uses, a session above all, must be nobody else's then.
            reopens_by_itself: False leaves that to ``reopen``.
            retry_s_min: pause before the first attempt; it doubles with each, to ``retry_s_max``.
        """
        if not 0 < retry_s_min <= retry_s_max:
            raise UsageError(
                f"retry_s_min: expected more than 0 and at most retry_s_max, {retry_s_max:g}, got {retry_s_min:g}"
            )
        self._open_store = open_store
        self._timeout_s = timeout_s
        self._reopens_by_itself = reopens_by_itself
        self._retry_s = (retry_s_min, retry_s_max)
        self._mutex = threading.RLock()
        self._opening = (
            threading.Lock()
        )  # of whoever calls open_store; taken before the mutex, never within it
        self._ended = threading.Event()
        self._seeker: threading.Thread | None = None
        self._is_closed = False
        self._reason: KvdevError | None = None
        self.loss_count = self.missed_pages = self.dropped_pages = 0
        self.attempt_count = self.reopen_count = 0
        self._refusal: KvdevError | None = None
        self._store: PageStore | None = open_store(deadline or Deadline.after(timeout_s))
        self.page_size_bytes = self._store.page_size_bytes
        self.checksum = self._store.checksum
        self.what = self._store.namespace.what
        self._uuid = self._store.namespace.uuid

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
            return SteadyStat(
                self._store is None,
                "" if self._reason is None else str(self._reason),
                self.loss_count,
                self.missed_pages,
                self.dropped_pages,
                self.attempt_count,
                self.reopen_count,
                "" if self._refusal is None else str(self._refusal),
            )

    def reopen(self, *, deadline: Deadline | None = None) -> None:
        """Take up the volume as it is now, made anew or back; what is still open is closed first.

        Waits for an attempt that is under way. Raises what opening raises; the store is away then, and this may be
        called again. Refused, and away, when the namespace has pages of another size, or with another checksum, now.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        while not self._opening.acquire(timeout=deadline.remaining_s()):
            deadline.check(f"{self.what}: reopen: an attempt is under way")
        try:
            with self._mutex:
                self._check_open()
                if self._store is not None:
                    store, self._store = self._store, None
                    store.close(deadline=deadline)
            self._open_again(deadline)
        finally:
            self._opening.release()

    def _open_again(self, deadline: Deadline) -> None:
        """One attempt, by whoever has ``_opening``; calls go on as misses meanwhile."""
        self.attempt_count += 1
        try:
            found = self._open_store(deadline)
            self._check_same(found, deadline)
        except KvdevError as refusal:
            self._refusal = refusal
            raise
        with self._mutex:
            if self._is_closed:
                found.close(deadline=deadline)
                return
            self._store, self._refusal = found, None
            self.reopen_count += 1
            is_anew = found.namespace.uuid != self._uuid  # as after the loss of a member
            self._uuid = found.namespace.uuid
            log.warning("%s: is back%s", self.what, ", with an empty namespace" * is_anew)

    def _check_same(self, found: PageStore, deadline: Deadline) -> None:
        for name, expected, actual in (
            ("page size", self.page_size_bytes, found.page_size_bytes),
            ("checksum", self.checksum.name, found.checksum.name),
        ):
            if actual != expected:
                found.close(deadline=deadline)
                raise UsageError(
                    f"{self.what}: {name}: expected {expected}, got {actual}: the namespace is another one"
                )

    def _seek(self) -> None:
        """Try until the store is back, by this or by ``reopen``, or closed."""
        for pause_s in retry_pauses_s(*self._retry_s):
            if self._ended.wait(pause_s):
                return
            with self._opening:
                is_another_sought = self._seeker is not threading.current_thread()
                if self._store is not None or self._is_closed or is_another_sought:
                    return
                with contextlib.suppress(KvdevError):  # ``stat`` says what it was
                    self._open_again(Deadline.after(self._timeout_s))
                    return

    def _lose(self, error: KvdevError | None) -> None:
        """Give the namespace up, as it is: what was flushed is on media if these come back."""
        store, self._store = self._store, None
        if store is None:
            return
        self._reason, self._refusal = error, None
        self.loss_count += 1
        store.namespace.abandon()
        log.warning("%s: misses and dropped puts until it is back: %s", self.what, error)
        if self._reopens_by_itself:
            self._seeker = threading.Thread(target=self._seek, name=f"kvdev-steady-{self.what}", daemon=True)
            self._seeker.start()

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
        """Close what is open; a store that is away has nothing to close. Twice does nothing.

        Waits for an attempt to open it that is under way: ``open_store`` is not called any more on return.
        """
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            self._ended.set()
            store, self._store = self._store, None
            if store is not None:
                store.close(deadline=deadline)
        if self._seeker is not None:
            self._seeker.join()  # bounded: its attempt has a deadline
