"""The UNIX socket to a back end: messages out, replies in, each within a deadline.

Trust: every reply is checked for version, request and size before it is used; raises ProtocolError for bad
ones, ConnectionLostError when the back end hangs up, DeadlineError when it does not answer.
Threads: one at a time; blocks no longer than the deadline given.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections.abc import Sequence

from kvdev.clock import Deadline
from kvdev.errors import ConnectError, ConnectionLostError, DeadlineError, ProtocolError, TransportError
from kvdev.vhost.protocol import (
    FLAG_NEED_REPLY,
    FLAG_REPLY,
    HEADER_SIZE_BYTES,
    U64,
    MessageHead,
    build_message,
    name_of,
    parse_head,
    parse_u64,
)

FD_COUNT_MAX = 8
"""Descriptors that one reply may bring; more are closed by the kernel."""
_TIMEOUT_S_MIN = 0.001


def connect(path: str, deadline: Deadline) -> socket.socket:
    """A connected socket; ConnectError says what is wrong with the path and what to do."""
    where = f"vhost:{path}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(max(deadline.remaining_s(), _TIMEOUT_S_MIN))
        sock.connect(path)
    except TimeoutError as error:
        sock.close()
        raise DeadlineError(
            f"{where}: connect: no end within the deadline: the back end serves another front end?",
            operation="connect",
            elapsed_ms=deadline.elapsed_ms(),
            trid=where,
        ) from error
    except OSError as error:
        sock.close()
        remedy = {
            errno.ENOENT: "start the back end, or correct the path",
            errno.ECONNREFUSED: "nobody listens on it: start the back end",
            errno.EACCES: "run as a user that may write to the socket",
            errno.EAGAIN: "the back end's backlog is full: it serves another front end",
        }.get(error.errno or 0, "expected the socket of a vhost-user-blk back end")
        raise ConnectError(
            f"{where}: {error.strerror or error}; {remedy}", errno=error.errno or 0, trid=where
        ) from error
    return sock


class Channel:
    """Requests and replies on a connected socket, which it owns."""

    def __init__(self, sock: socket.socket, *, where: str) -> None:
        self.sock = sock
        self.where = where
        self.has_reply_ack = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(
        self, request: int, payload: bytes = b"", *, fds: Sequence[int] = (), deadline: Deadline
    ) -> None:
        """A request that is not answered."""
        self._transmit(request, payload, 0, fds, deadline)

    def order(
        self, request: int, payload: bytes = b"", *, fds: Sequence[int] = (), deadline: Deadline
    ) -> None:
        """A request without a reply of its own; acknowledged where that was negotiated."""
        flags = FLAG_NEED_REPLY if self.has_reply_ack else 0
        self._transmit(request, payload, flags, fds, deadline)
        if self.has_reply_ack:
            self._check_ack(request, deadline)

    def _check_ack(self, request: int, deadline: Deadline) -> None:
        body, fds = self._receive(request, deadline)
        _close_all(fds)
        code = parse_u64(body, what=name_of(request))
        if code:
            raise ConnectError(
                f"{self.where}: {name_of(request)}: expected acknowledgement 0, got 0x{code:x}: the back end "
                f"refused it; see its log",
                errno=errno.EPROTO,
                trid=self.where,
            )

    def ask(
        self, request: int, payload: bytes = b"", *, fds: Sequence[int] = (), deadline: Deadline
    ) -> bytes:
        """The payload of a request's reply."""
        body, received = self.ask_fds(request, payload, fds=fds, deadline=deadline)
        _close_all(received)
        return body

    def ask_fds(
        self, request: int, payload: bytes = b"", *, fds: Sequence[int] = (), deadline: Deadline
    ) -> tuple[bytes, list[int]]:
        """The same, with the descriptors that came along; they are the caller's."""
        self._transmit(request, payload, 0, fds, deadline)
        return self._receive(request, deadline)

    def ask_u64(self, request: int, *, deadline: Deadline) -> int:
        return parse_u64(self.ask(request, deadline=deadline), what=name_of(request))

    def _transmit(
        self, request: int, payload: bytes, flags: int, fds: Sequence[int], deadline: Deadline
    ) -> None:
        message = build_message(request, payload, flags=flags)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = 0
        try:
            while sent < len(message):
                self._arm(deadline)
                sent += self.sock.sendmsg([message[sent:]], ancillary)
                ancillary = []
        except OSError as error:
            raise self._failure(error, name_of(request), deadline) from error

    def _receive(self, request: int, deadline: Deadline) -> tuple[bytes, list[int]]:
        fds: list[int] = []
        try:
            head = self._receive_head(request, fds, deadline)
            return self._receive_exactly(head.size_bytes, fds, name_of(request), deadline), fds
        except BaseException:
            _close_all(fds)
            raise

    def _receive_head(self, request: int, fds: list[int], deadline: Deadline) -> MessageHead:
        what = name_of(request)
        raw = self._receive_exactly(HEADER_SIZE_BYTES, fds, what, deadline)
        try:
            head = parse_head(raw)
        except ProtocolError as error:
            raise ProtocolError(f"{self.where}: reply to {what}: {error}") from error
        if head.request != request or not head.flags & FLAG_REPLY:
            raise ProtocolError(
                f"{self.where}: reply to {what}: expected request {int(request)} with the reply flag, "
                f"got {head.request} with flags 0x{head.flags:x}"
            )
        return head

    def _receive_exactly(self, size_bytes: int, fds: list[int], what: str, deadline: Deadline) -> bytes:
        got = b""
        space = socket.CMSG_SPACE(4 * FD_COUNT_MAX)
        while len(got) < size_bytes:
            try:
                self._arm(deadline)
                part, ancillary, _, _ = self.sock.recvmsg(
                    size_bytes - len(got), space, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise self._failure(error, what, deadline) from error
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                    fds.extend(numbers)
            if not part:
                raise ConnectionLostError(
                    f"{self.where}: {what}: the back end closed the connection after {len(got)} of "
                    f"{size_bytes} bytes; see its log",
                    errno=errno.ECONNRESET,
                    trid=self.where,
                )
            got += part
        return got

    def _arm(self, deadline: Deadline) -> None:
        if deadline.is_expired:
            raise TimeoutError
        self.sock.settimeout(max(deadline.remaining_s(), _TIMEOUT_S_MIN))

    def _failure(self, error: OSError, what: str, deadline: Deadline) -> TransportError:
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"{self.where}: {what}: no answer within {deadline.elapsed_ms():.0f} ms: the back end hangs, "
                f"or serves another front end",
                operation=what,
                elapsed_ms=deadline.elapsed_ms(),
                trid=self.where,
            )
        return ConnectionLostError(
            f"{self.where}: {what}: {error.strerror or error}; see the back end's log",
            errno=error.errno or 0,
            trid=self.where,
        )


class BackendChannel:
    """The back end's own channel: it tells of changes there, and may ask for an acknowledgement."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ours.setblocking(False)
        self._unread = b""

    def fileno(self) -> int:
        return self._ours.fileno()

    def give(self) -> None:
        """The other end has been passed on: close ours of it."""
        self.theirs.close()

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()

    def take(self, *, limit: int = 16) -> list[MessageHead]:
        """The heads of what has come, at most ``limit`` messages; never waits. ProtocolError for rubbish."""
        heads: list[MessageHead] = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._unread += self._ours.recv(4096)
        while len(heads) < limit and len(self._unread) >= HEADER_SIZE_BYTES:
            head = parse_head(self._unread[:HEADER_SIZE_BYTES])
            if len(self._unread) < HEADER_SIZE_BYTES + head.size_bytes:
                break
            self._unread = self._unread[HEADER_SIZE_BYTES + head.size_bytes :]
            heads.append(head)
        return heads

    def acknowledge(self, head: MessageHead, code: int) -> None:
        """Answer a message that asked for it; a back end that does not read its answer loses it."""
        with contextlib.suppress(OSError):
            self._ours.send(build_message(head.request, U64.pack(code), flags=FLAG_REPLY))


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
