"""The background poller: a C thread that drives a queue, and the channels through which any number of threads use it.

Not here: the queue, which a caller may drive by itself (``queue``); what it reaches (``kvdev.session``).
Threads: any; ``Channel.poll`` and ``close`` block, no longer than their deadline, without the interpreter lock.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.clock import Deadline
from kvdev.errors import QueueFullError, UsageError
from kvdev.native.io import IO_DONE_DTYPE, IO_DTYPE, IoArray, IoDoneArray, address_of
from kvdev.native.queue import POLL_COUNT_MAX, POLL_SLICE_NS, HostQueue

CLOSE_TIMEOUT_S = 5.0
"""What is in flight may take so long when a poller or a channel is closed; then it is given up."""
RING_COUNT_MAX = int(lib.KVDEV_POLLER_RING_MAX)


@dataclass(frozen=True)
class PollerStats:
    """What the thread did."""

    turns: int
    """Looks at the connections."""
    sleeps: int
    """Times that it waited in the kernel."""
    taken: int
    """Commands that came from channels."""
    wakes: int
    """Times that it made a channel's descriptor readable."""


def _fork_error(what: str, operation: str) -> UsageError:
    return UsageError(
        f"{what}: {operation}: expected the process that started the poller, got its fork; its thread is not in "
        f"this process: start a poller after forking"
    )


class BackgroundPoller:
    """Drives ``queue`` from construction until ``close``; commands come through ``channel``.

    Meanwhile ``submit`` and ``poll`` of the queue itself are refused. What else a queue does goes on: devices and
    connections come and go, and commands that a caller waits for (``execute``, ``compare_and_write``) are done while
    the thread stands aside.
    """

    def __init__(self, queue: HostQueue, *, core: int | None = None, ring_count: int = 4096) -> None:
        """Start the thread; nothing may be outstanding on the queue.

        Args:
            queue: it must stay open until the poller is closed.
            core: the CPU on which the thread stays; None for any.
            ring_count: commands of all channels submitted and not yet seen by the thread; rounded up to a power of
                two.
        """
        if not 1 <= ring_count <= RING_COUNT_MAX:
            raise UsageError(f"ring_count: expected 1 to {RING_COUNT_MAX}, got {ring_count}")
        cores = os.sched_getaffinity(0)
        if core is not None and core not in cores:
            names = ", ".join(str(each) for each in sorted(cores)[:16])
            raise UsageError(f"core: expected one that this process may use ({names}), got {core}")
        self._ring_count = max(2, 1 << (ring_count - 1).bit_length())
        options = ffi.new(
            "struct kvdev_poller_options *",
            {"ring_size": self._ring_count, "core": -1 if core is None else core},
        )
        out = ffi.new("struct kvdev_poller **")
        code = lib.kvdev_poller_create(queue.take_for_poller(self), options, out)
        if code:
            queue.leave_to_callers(self)
            if code == -errno.EBUSY:
                raise UsageError(
                    f"poller: expected a queue that nobody drives, with nothing outstanding, got one in use with "
                    f"{queue.outstanding_count} commands"
                )
            if code == -errno.ENOMEM:
                raise MemoryError("poller: no memory")
            raise UsageError(f"poller: thread: {os.strerror(-code)}")
        self._raw: Any = ffi.gc(out[0], lib.kvdev_poller_destroy)
        self._lock = threading.Lock()
        self._is_closed = False
        self.queue = queue

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def ring_count(self) -> int:
        return self._ring_count

    def channel(self, *, capacity_count: int = 1024) -> Channel:
        """A new place to submit at, with room for so many commands whose completions have not been polled."""
        if self._is_closed:
            raise UsageError("poller: channel: expected an open poller, got a closed one")
        return Channel(self, capacity_count=capacity_count)

    def abandon(self) -> None:
        """Give up on everything outstanding, of all channels: it completes with an error at the next polls.

        No payload is touched after this returns, as with ``HostQueue.abandon``.
        """
        if lib.kvdev_poller_abandon(self._raw) == -errno.ECHILD:
            raise _fork_error("poller", "abandon")

    @property
    def stats(self) -> PollerStats:
        raw = ffi.new("struct kvdev_poller_stats *")
        lib.kvdev_poller_stats_read(self._raw, raw)
        return PollerStats(
            turns=int(raw.turns), sleeps=int(raw.sleeps), taken=int(raw.taken), wakes=int(raw.wakes)
        )

    def close(self, *, deadline: Deadline | None = None) -> None:
        """End the thread; the queue is its caller's to drive again.

        What is in flight may complete until the deadline (``CLOSE_TIMEOUT_S``) and is given up then. Every command
        completes, and can still be polled at its channel; no payload is touched after this returns. A command that
        another thread waits for on the queue is let finish first. In a fork nothing is done. Closing twice does
        nothing.
        """
        limit = deadline or Deadline.after(CLOSE_TIMEOUT_S)
        with self._lock:
            if self._is_closed or lib.kvdev_poller_stop(self._raw, limit.remaining_ns()) == -errno.ECHILD:
                return
            self._is_closed = True
            self.queue.leave_to_callers(self)

    def __enter__(self) -> BackgroundPoller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Channel:
    """Commands and completions of one user of a poller (``kvdev.block.IoQueue``).

    Any thread may submit, several at once; one at a time polls, the others wait for it. ``fileno`` is readable while
    there are completions, for ``select`` or an event loop. A malformed command is not refused by ``submit``: it
    completes with −EINVAL, and ``result`` has the reason as in csrc/queue.h.
    """

    def __init__(self, poller: BackgroundPoller, *, capacity_count: int) -> None:
        """Used by ``BackgroundPoller.channel``."""
        if not 1 <= capacity_count <= poller.ring_count:
            raise UsageError(
                f"capacity_count: expected 1 to {poller.ring_count}, the poller's ring_count, got {capacity_count}"
            )
        out = ffi.new("struct kvdev_channel **")
        code = lib.kvdev_channel_create(poller._raw, capacity_count, out)
        if code == -errno.ENOMEM:
            raise MemoryError("channel: no memory")
        if code:
            raise UsageError(f"channel: {os.strerror(-code)}")
        # Freed when no thread is inside a call any more, since each holds a reference of its own.
        self._raw: Any = ffi.gc(out[0], lib.kvdev_channel_destroy)
        self.poller = poller
        self._pid = os.getpid()
        self._capacity_count = capacity_count
        self.lock = threading.RLock()

    def _check_usable(self, operation: str) -> Any:
        raw = self._raw
        if raw is None:
            raise UsageError(f"channel: {operation}: expected an open channel, got a closed one")
        if os.getpid() != self._pid:
            raise _fork_error("channel", operation)
        return raw

    @property
    def is_closed(self) -> bool:
        return self._raw is None

    @property
    def capacity_count(self) -> int:
        return self._capacity_count

    @property
    def outstanding_count(self) -> int:
        """Commands submitted whose completion has not been polled."""
        raw = self._raw
        return 0 if raw is None else int(lib.kvdev_channel_outstanding(raw))

    def fileno(self) -> int:
        """A descriptor to wait on, readable while there are completions; reading it is ``poll``'s business."""
        return int(lib.kvdev_channel_fd(self._check_usable("fileno")))

    def submit(self, ios: IoArray) -> None:
        """Take all commands of an ``IO_DTYPE`` array (copied), or none; does not wait.

        Raises QueueFullError when they do not fit. Payload belongs to the poller until its completion is polled.
        """
        raw = self._check_usable("submit")
        if ios.dtype != IO_DTYPE or ios.ndim != 1:
            raise UsageError(f"ios: expected a one-dimensional IO_DTYPE array, got {ios.dtype} of {ios.ndim}")
        if not ios.flags.c_contiguous:
            # A strided view of commands is legal; 64 bytes a command are copied, never payload.
            ios = np.ascontiguousarray(ios)
        code = lib.kvdev_channel_submit(raw, ffi.cast("const struct kvdev_io *", address_of(ios)), len(ios))
        if code == -errno.EAGAIN:
            raise QueueFullError(
                f"channel: submit: expected room for {len(ios)}, got {self.outstanding_count} of "
                f"{self._capacity_count} commands outstanding here and a ring of {self.poller.ring_count} that all "
                f"channels share; poll first"
            )
        if code == -errno.ESHUTDOWN:
            raise UsageError("channel: submit: expected an open channel and poller, got a closed one")
        if code == -errno.ECHILD:
            raise _fork_error("channel", "submit")

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        """Completions as an ``IO_DONE_DTYPE`` array that the caller owns.

        Returns as soon as ``min_count`` are there (0: does not wait), and whatever there is when the deadline ends,
        when nothing is outstanding any more, or at ``max_count``.
        """
        self._check_usable("poll")
        if not self.lock.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            return np.empty(0, dtype=IO_DONE_DTYPE)
        try:
            return self._poll(min_count, deadline, max_count)
        finally:
            self.lock.release()

    def _poll(self, min_count: int, deadline: Deadline, max_count: int) -> IoDoneArray:
        wanted = min(max_count, max(min_count, 1), self._capacity_count)
        limit = max(1, min(max_count, self.outstanding_count))
        done: npt.NDArray[Any] = np.empty(limit, dtype=IO_DONE_DTYPE)
        base = address_of(done)
        count = 0
        while True:
            raw = self._check_usable("poll")
            slice_ns = 0 if min_count == 0 else min(deadline.remaining_ns(), POLL_SLICE_NS)
            count += int(
                lib.kvdev_channel_poll(
                    raw,
                    ffi.cast("struct kvdev_io_done *", base + count * IO_DONE_DTYPE.itemsize),
                    limit - count,
                    0 if min_count == 0 else max(0, wanted - count),
                    slice_ns,
                )
            )
            if count >= wanted or count == limit or min_count == 0:
                break
            if lib.kvdev_channel_outstanding(raw) == 0 or deadline.is_expired:
                break
        return done[:count]

    def abandon(self) -> None:
        """Give up on everything outstanding: of all channels of the poller, whose connections are reset.

        No payload is touched after this returns.
        """
        self._check_usable("abandon")
        self.poller.abandon()

    def close(self, *, deadline: Deadline | None = None) -> None:
        """Accept nothing more, wait for what is outstanding, and drop its completions.

        What has not completed by the deadline (``CLOSE_TIMEOUT_S``) is given up as by ``abandon``. Payload is the
        caller's again on return. In a fork nothing is done. Closing twice does nothing.
        """
        raw = self._raw
        if raw is None or os.getpid() != self._pid:
            return
        limit = deadline or Deadline.after(CLOSE_TIMEOUT_S)
        lib.kvdev_channel_close(raw)
        self._raw = None  # a thread inside poll notices after its slice
        with self.lock:
            self._drain(raw, limit)

    def _drain(self, raw: Any, limit: Deadline) -> None:
        done: npt.NDArray[Any] = np.empty(self._capacity_count, dtype=IO_DONE_DTYPE)
        pointer = ffi.cast("struct kvdev_io_done *", address_of(done))
        while lib.kvdev_channel_outstanding(raw):
            if limit.is_expired:
                self.poller.abandon()
            wait_ns = min(limit.remaining_ns(), POLL_SLICE_NS)
            lib.kvdev_channel_poll(raw, pointer, len(done), len(done), wait_ns)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
