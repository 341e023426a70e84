"""The pool process's socket: requests of many clients, answered one after the other by one thread.

Flushes that wait together are one. A client that sends what is no message is told so by name and dropped; one that
does not read its answers is dropped too.
Not here: what requests do (``service``); the command and its supervisor (``kvdev_tools.cmd_pool``).
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvdev.clock import Deadline
from kvdev.errors import KvdevError, LeaseLostError, UncertainWriteError, UsageError
from kvdev.native.io import EUNCERTAIN
from kvdev.pool.protocol import (
    BODY_SIZE_BYTES_MAX,
    HEADER_SIZE_BYTES,
    Header,
    MessageError,
    MessageType,
    build_error,
    build_json,
    build_message,
    parse_commit,
    parse_grants,
    parse_header,
    parse_json,
    parse_keys,
)
from kvdev.pool.service import PoolService
from kvdev.pool.worker import ClientProcess, Granted

CONNECTION_COUNT_MAX: Final = 1024
ANSWERS_BYTES_MAX: Final = 32 << 20
"""Answers that wait for one client to read them."""
READ_BYTES: Final = 1 << 18
TICK_S: Final = 0.5
"""How often orphans, leases and what is not durable are looked at."""
REQUEST_TIMEOUT_S: Final = 30.0
BACKLOG: Final = 64

log = logging.getLogger("kvdev.pool")


class Connection:
    """One client: what it sent and is not whole yet, what it has not read yet, what it was granted."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.process = ClientProcess(pid)
        self.received = bytearray()
        self.answers = bytearray()
        self.is_waiting = False
        self.header: Header | None = None
        self.granted = Granted()
        self.service: PoolService | None = None
        self.failures_known: int | None = None
        """Commits of the namespace that had failed before this client's first one that no flush has told it of."""


class PoolServer:
    """Serves KV namespaces until told to stop."""

    def __init__(
        self,
        path: str | Path,
        services: Sequence[PoolService],
        *,
        volume_uris: Sequence[str],
        host: dict[str, str],
    ) -> None:
        """Bind the socket, with mode 0600. ``volume_uris`` are the services', for clients to open; ``host`` is as
        whom: they write as the pool's host, so that taking over from the pool keeps them out as well."""
        self.path = str(path)
        self._services = {service.name: service for service in services}
        self._volume_uris = {service.name: uri for service, uri in zip(services, volume_uris, strict=True)}
        if len(self._services) != len(services):
            raise UsageError("pool: namespaces: expected different names, got one twice")
        self._host = host
        self._connections: dict[int, Connection] = {}
        self._flushes: list[tuple[Connection, int]] = []
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(self.path)
        self._inode = Path(self.path).stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.request_count = 0
        self.refused_count = 0

    def serve(self, is_stopped: Callable[[], bool]) -> None:
        """Until ``is_stopped``, asked every half second; LeaseLostError when a namespace was taken over."""
        tick = Deadline.after(TICK_S)
        while not is_stopped():
            for key, events in self._selector.select(tick.remaining_s()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            self._flush()
            if tick.is_expired:
                self._tick()
                tick = Deadline.after(TICK_S)

    def _tick(self) -> None:
        for service in self._services.values():
            deadline = Deadline.after(REQUEST_TIMEOUT_S)
            try:
                service.settle_orphans(deadline=deadline)
                service.namespace.keep()
                service.namespace.flush(deadline=deadline)
                self._note_durable(service)
            except LeaseLostError:
                raise
            except KvdevError as error:
                log.warning("%s: %s", service.namespace.what, error)

    # --- connections -------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("%s: accept: %s", self.path, error)
            return
        sock.setblocking(False)
        if len(self._connections) >= CONNECTION_COUNT_MAX:
            self.refused_count += 1
            log.warning("%s: a client beyond %d was refused", self.path, CONNECTION_COUNT_MAX)
            sock.close()
            return
        connection = Connection(sock)
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        self._flushes = [item for item in self._flushes if item[0] is not connection]
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.service is not None:
            connection.service.orphan(connection.granted, connection.process)
        else:
            connection.process.close()

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection, b"")
            if events & selectors.EVENT_READ and not self._receive(connection):
                self._drop(connection)
        except MessageError as error:
            self.refused_count += 1
            log.warning("%s: process %d: %s", self.path, connection.process.pid, error)
            with contextlib.suppress(OSError):
                connection.sock.send(build_message(MessageType.ERROR, 0, build_error(error)))
            self._drop(connection)
        except OSError:
            self._drop(connection)

    def _receive(self, connection: Connection) -> bool:
        """Take what there is, and answer what is whole; False when the client has gone."""
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        connection.received += data
        while True:
            header = connection.header
            if header is None:
                if len(connection.received) < HEADER_SIZE_BYTES:
                    return True
                header = parse_header(bytes(connection.received[:HEADER_SIZE_BYTES]))
                del connection.received[:HEADER_SIZE_BYTES]
                connection.header = header
            if len(connection.received) < header.body_size_bytes:
                return True
            body = bytes(connection.received[: header.body_size_bytes])
            del connection.received[: header.body_size_bytes]
            connection.header = None
            self._answer(connection, header, body)

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.answers += data
        if len(connection.answers) > ANSWERS_BYTES_MAX:
            raise MessageError(
                f"pool: expected answers to be read, got {len(connection.answers)} bytes of them"
            )
        if connection.answers:
            with contextlib.suppress(BlockingIOError):
                sent = connection.sock.send(connection.answers)
                del connection.answers[:sent]
        if bool(connection.answers) != connection.is_waiting:
            connection.is_waiting = bool(connection.answers)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_waiting else 0)
            self._selector.modify(connection.sock, wanted, connection)

    # --- requests ----------------------------------------------------------------------------

    def _answer(self, connection: Connection, header: Header, body: bytes) -> None:
        self.request_count += 1
        try:
            if header.type == MessageType.HELLO:
                self._hello(connection, header, body)
                return
            answer = self._run(connection, header, body)
        except (MessageError, LeaseLostError):
            raise
        except KvdevError as error:
            answer = None
            self._send(connection, build_message(MessageType.ERROR, header.request_id, build_error(error)))
        if answer is not None:
            self._send(connection, build_message(header.type, header.request_id, answer))

    def _run(self, connection: Connection, header: Header, body: bytes) -> bytes | None:
        """Run one request; the answer's body, None when there is none (yet)."""
        kind, service = header.type, connection.service
        if kind == MessageType.STAT:
            return build_json(self.stat())
        if service is None:
            raise MessageError(f"pool {kind.name.lower()}: expected hello first")
        namespace, what = service.namespace, kind.name.lower()
        deadline = Deadline.after(REQUEST_TIMEOUT_S)
        if kind in (MessageType.RESERVE, MessageType.RESERVE_SOME):
            grants = service.reserve(
                connection.granted,
                parse_keys(what, body),
                may_be_fewer=kind == MessageType.RESERVE_SOME,
                deadline=deadline,
            )
            return grants.tobytes()
        if kind == MessageType.COMMIT:
            if connection.failures_known is None:
                connection.failures_known = namespace.failed_commit_count
            commit = parse_commit(body, service.namespace.checksum)
            return service.commit(connection.granted, commit, deadline=deadline).tobytes()
        if kind == MessageType.FLUSH:
            self._flushes.append((connection, header.request_id))
            return None
        if kind == MessageType.TOUCH:
            namespace.lookup(parse_keys(what, body))
            return None
        if kind == MessageType.DELETE:
            return namespace.delete(parse_keys(what, body), deadline=deadline).tobytes()
        if kind == MessageType.PIN:
            return namespace.pin(parse_keys(what, body)).tobytes()
        if kind == MessageType.UNPIN:
            return namespace.unpin(parse_keys(what, body)).tobytes()
        if kind == MessageType.WITHDRAW:
            return struct.pack("<I", namespace.withdraw(parse_grants(what, body), deadline=deadline))
        raise MessageError(f"pool {what}: expected a request")

    def stat(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "socket": self.path,
            "clients": len(self._connections),
            "requests": self.request_count,
            "refused": self.refused_count,
            "namespaces": [service.stat() for service in self._services.values()],
        }

    def _hello(self, connection: Connection, header: Header, body: bytes) -> None:
        name = parse_json("hello", body).get("namespace")
        service = self._services.get(name) if isinstance(name, str) else None
        if connection.service is not None:
            raise MessageError("pool hello: expected one, got a second")
        if service is None:
            raise UsageError(
                f"pool {self.path}: namespace {name!r}: expected one of {', '.join(self._services)}"
            )
        connection.service = service
        answer = service.describe() | {"volume": self._volume_uris[service.name], "host": self._host}
        message = build_message(MessageType.HELLO, header.request_id, build_json(answer))
        fds = array.array("i", [service.table.fd, service.hints.fd])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        # The first answer on a fresh connection: there is room for its few hundred bytes.
        sent = connection.sock.sendmsg([message], ancillary)
        self._send(connection, message[sent:])

    def _flush(self) -> None:
        """One flush for all who wait for one; each is told what became of it."""
        waiting, self._flushes = self._flushes, []
        for service in self._services.values():
            mine = [item for item in waiting if item[0].service is service]
            if not mine:
                continue
            kind, answer = MessageType.FLUSH, b""
            try:
                service.namespace.flush(deadline=Deadline.after(REQUEST_TIMEOUT_S))
            except LeaseLostError:
                raise
            except KvdevError as error:
                kind, answer = MessageType.ERROR, build_error(error)
            if kind == MessageType.FLUSH:
                self._note_durable(service)
            for connection, request_id in mine:
                told = (kind, answer)
                if kind == MessageType.FLUSH and connection.failures_known is not None:
                    told = (MessageType.ERROR, build_error(_withdrawn_error(service)))
                connection.failures_known = None
                try:
                    self._send(connection, build_message(told[0], request_id, told[1]))
                except (OSError, MessageError):
                    self._drop(connection)

    def _note_durable(self, service: PoolService) -> None:
        """A flush succeeded: everything is durable but what one before it, whoever asked for it, has withdrawn."""
        for connection in self._connections.values():
            if (
                connection.service is service
                and connection.failures_known == service.namespace.failed_commit_count
            ):
                connection.failures_known = None

    # --- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Take the socket away and drop every client; the services stay the caller's to close."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            if Path(self.path).stat().st_ino == self._inode:  # not one that another pool has made meanwhile
                Path(self.path).unlink()


def _withdrawn_error(service: PoolService) -> UncertainWriteError:
    what = service.namespace.what
    return UncertainWriteError(
        f"{what}: flush: a flush before this one failed: pages put since the last success were withdrawn",
        errno=EUNCERTAIN,
        trid=what,
    )


def _listen(path: str) -> socket.socket:
    """A listening socket that only this user can reach; a dead one's place is taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if Path(path).exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink()
                else:
                    raise UsageError(
                        f"pool: {path}: another process serves there; stop it or choose another --socket"
                    )
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UsageError(f"pool: {path}: cannot listen there: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


assert BODY_SIZE_BYTES_MAX < ANSWERS_BYTES_MAX
