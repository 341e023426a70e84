"""What a back end may still touch after its device died, and how one knows that it no longer can.

A connection that ended says nothing about the process behind it: stopped and continued, it writes into
payload memory that it still has mapped. Only its death ends that.
Threads: any; ``wait`` blocks no longer than its deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import weakref
from dataclasses import dataclass

from kvdev.clock import NS_PER_MS, Deadline

_SO_PEERPIDFD = 77
"""Linux 6.5: a descriptor of the very process, without a moment in which its number could be reused."""
_WAIT_SLICE_MS = 1000


class PeerProcess:
    """The process behind a UNIX socket: the one that listened when the connection was made."""

    def __init__(self, connection: socket.socket) -> None:
        """Of a connected socket. ``pid`` 0 is a process that this one cannot see (another PID namespace)."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, self.gid = struct.unpack("3i", raw)
        self._pidfd = _pidfd_of(connection, self.pid)
        if self._pidfd >= 0:
            os.set_inheritable(self._pidfd, False)
            weakref.finalize(self, os.close, self._pidfd)

    @property
    def is_known(self) -> bool:
        """Whether its death can be observed."""
        return self._pidfd >= 0

    @property
    def is_dead(self) -> bool:
        """True only when it is certain."""
        return self.is_known and self._poll(0)

    def wait_dead(self, deadline: Deadline) -> bool:
        """Whether it ended before the deadline."""
        while self.is_known:
            if self._poll(min(_WAIT_SLICE_MS, -(-deadline.remaining_ns() // NS_PER_MS))):
                return True
            if deadline.is_expired:
                break
        return False

    def _poll(self, timeout_ms: int) -> bool:
        waiter = select.poll()
        waiter.register(self._pidfd, select.POLLIN)
        return bool(waiter.poll(timeout_ms))

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid > 0 else "a process of another PID namespace"


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    """A descriptor of the peer's process; -1 when it is gone already or the kernel gives none."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


@dataclass(frozen=True)
class Quarantine:
    """Payload memory that the back end of a dead device may still write to or send to its medium."""

    process: PeerProcess
    spans: tuple[tuple[int, int], ...]
    """Address and size of each payload that was in flight."""

    @property
    def is_over(self) -> bool:
        """The process has ended: nothing touches the spans any more, and no write of it is on its way to the
        back end's kernel."""
        return self.process.is_dead

    def wait(self, deadline: Deadline) -> bool:
        """Whether it was over before the deadline; the remedy where not: end the process, or use another arena."""
        return self.process.wait_dead(deadline)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.spans)
