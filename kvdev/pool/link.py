"""A client's connection to the pool process: requests and answers, and whether it is still there.

Not here: what is asked (``client``).
Threads: one request at a time; the caller holds the lock.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev.errors import ConnectError, ConnectionLostError, DeadlineError
from kvdev.pool.memory import map_shared
from kvdev.pool.protocol import (
    HEADER_SIZE_BYTES,
    MessageError,
    MessageType,
    build_json,
    build_message,
    parse_error,
    parse_header,
    parse_json,
)

_FD_COUNT = 2
_RECEIVE_BYTES = 1 << 18


class Channel:
    """One connection to a pool process."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        """Connect; ConnectError when nobody serves there."""
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._next_id = 1
        self._received = bytearray()
        self._fds: list[int] = []
        try:
            self._connect(deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline: Deadline) -> None:
        try:
            self._sock.settimeout(max(deadline.remaining_s(), 0.001))
            self._sock.connect(self.path)
        except OSError as error:
            raise ConnectError(
                f"pool {self.path}: {error.strerror or error}; start it with `kvdev pool serve`",
                errno=error.errno or 0,
                trid=self.path,
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether the pool process still has its end open: a look, no round trip."""
        if self._sock.fileno() < 0:
            return False
        waiter = select.poll()
        waiter.register(self._sock, select.POLLRDHUP)
        return not waiter.poll(0)

    def tell(self, kind: MessageType, body: bytes) -> None:
        """Send what is not answered, if there is room for it now."""
        try:
            if self._sock.fileno() >= 0 and select.select([], [self._sock], [], 0)[1]:
                self._sock.settimeout(1.0)
                self._sock.sendall(build_message(kind, 0, body))
        except OSError:
            self.close()

    def ask(self, kind: MessageType, body: bytes, deadline: Deadline) -> bytes:
        """The body of the answer; raises what the owner raised, or ConnectionLostError, DeadlineError.

        After one of the latter two the link is closed: an answer that comes late would be taken for the next.
        """
        request_id = self._next_id
        self._next_id = self._next_id % 0xFFFF_FFFF + 1
        try:
            self._set_timeout(deadline)
            self._sock.sendall(build_message(kind, request_id, body))
            header = parse_header(self._take(HEADER_SIZE_BYTES, deadline))
            answer = self._take(header.body_size_bytes, deadline)
        except TimeoutError as error:
            self.close()
            raise DeadlineError(
                f"pool {self.path}: {kind.name.lower()}: no answer in time",
                operation=kind.name.lower(),
                elapsed_ms=deadline.elapsed_ms(),
                trid=self.path,
            ) from error
        except (OSError, MessageError) as error:
            self.close()
            raise ConnectionLostError(
                f"pool {self.path}: connection lost: {error}", trid=self.path
            ) from error
        if header.type == MessageType.ERROR:
            if header.request_id != request_id:
                self.close()
            raise parse_error(answer, what=f"pool {self.path}")
        if (header.type, header.request_id) != (kind, request_id):
            self.close()
            raise ConnectionLostError(
                f"pool {self.path}: expected answer {request_id} of {kind.name.lower()}, "
                f"got {header.request_id} of {header.type.name.lower()}",
                trid=self.path,
            )
        return answer

    def _set_timeout(self, deadline: Deadline) -> None:
        if deadline.is_expired:
            raise TimeoutError
        self._sock.settimeout(deadline.remaining_s())

    def _take(self, size_bytes: int, deadline: Deadline) -> bytes:
        while len(self._received) < size_bytes:
            self._set_timeout(deadline)
            data, ancillary, _, _ = self._sock.recvmsg(
                _RECEIVE_BYTES,
                socket.CMSG_SPACE(_FD_COUNT * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
            self._keep_descriptors(ancillary)
            if not data:
                raise ConnectionLostError(f"{self.path}: the pool process has gone", trid=self.path)
            self._received += data
        taken = bytes(self._received[:size_bytes])
        del self._received[:size_bytes]
        return taken

    def _keep_descriptors(self, ancillary: list[tuple[int, int, Any]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds += fds.tolist()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class PoolLink(Channel):
    """A connection for one KV namespace, with what its hello told: ``facts``, and the memory of table and hints."""

    def __init__(self, path: str, namespace: str, deadline: Deadline) -> None:
        super().__init__(path, deadline)
        try:
            body = build_json({"namespace": namespace})
            self.facts = parse_json("hello", self.ask(MessageType.HELLO, body, deadline))
            self.table, self.hints = self._map()
        except BaseException:
            self.close()
            raise
        finally:
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()

    def _map(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        if len(self._fds) != _FD_COUNT:
            raise MessageError(f"pool hello: expected {_FD_COUNT} descriptors, got {len(self._fds)}")
        sizes = [self.facts.get("table_bytes"), self.facts.get("hint_bytes")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise MessageError(f"pool hello: table_bytes, hint_bytes: expected sizes, got {sizes}")
        table, hints = (map_shared(fd, int(size or 0)) for fd, size in zip(self._fds, sizes, strict=True))
        return table, hints.view(np.uint32)


def ask_status(path: str, deadline: Deadline) -> dict[str, Any]:
    """A pool process's counters, without becoming a client of a namespace."""
    channel = Channel(path, deadline)
    try:
        return parse_json("stat", channel.ask(MessageType.STAT, b"", deadline))
    finally:
        channel.close()
