"""A UNIX socket between an RPC client and its server that fails one call in the way a test asks for.

It forwards whole JSON requests and their replies; reading calls (``*_get_*`` and the like) are never counted.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import threading
from types import TracebackType

REQUEST_TIMEOUT_S = 60.0
_READING = ("_get_", "get_methods", "get_version", "wait_for_examine")


class Failure(enum.Enum):
    """What happens to the chosen call."""

    REFUSED = "refused"
    """Answered with an error, and never forwarded."""
    LOST = "lost"
    """The connection breaks before it is forwarded."""
    UNANSWERED = "unanswered"
    """It takes effect, and the connection breaks before the reply."""


class RpcProxy:
    """Fails the ``fail_at``-th changing call (0-based, over all connections) and forwards all others."""

    def __init__(self, path: str, server: str) -> None:
        self.path = path
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._fail_at = -1
        self._failure = Failure.REFUSED
        self.changing_count = 0
        self.has_failed = False

    def fail(self, at: int, failure: Failure) -> None:
        """Count from now on and fail that call; -1 fails none."""
        with self._lock:
            self._fail_at, self._failure, self.changing_count, self.has_failed = at, failure, 0, False

    def __enter__(self) -> RpcProxy:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            opened = [self._listener, *self._open]
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(REQUEST_TIMEOUT_S)

    def _spawn(self, target: object, *arguments: object) -> None:
        assert callable(target), "threads run callables"
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            self._open.add(upstream)
        try:
            connection.settimeout(REQUEST_TIMEOUT_S)
            upstream.settimeout(REQUEST_TIMEOUT_S)
            upstream.connect(self._server)
            while (request := _read_value(connection)) is not None:
                failure = self._failure_of(request)
                if failure is Failure.LOST:
                    return
                if failure is Failure.REFUSED:
                    connection.sendall(_refusal(request))
                    continue
                upstream.sendall(request)
                reply = _read_value(upstream)
                if reply is None or failure is Failure.UNANSWERED:
                    return
                connection.sendall(reply)
        except OSError:
            return
        finally:
            with self._lock:
                self._open -= {connection, upstream}
            connection.close()
            upstream.close()

    def _failure_of(self, request: bytes) -> Failure | None:
        method = str(json.loads(request).get("method"))
        if any(part in method for part in _READING):
            return None
        with self._lock:
            index = self.changing_count
            self.changing_count += 1
            if index != self._fail_at:
                return None
            self.has_failed = True
            return self._failure


def _read_value(connection: socket.socket) -> bytes | None:
    """The bytes of one JSON value; None when the peer has closed. One call is outstanding at a time."""
    data = b""
    while True:
        chunk = connection.recv(1 << 16)
        if not chunk:
            return None
        data += chunk
        with contextlib.suppress(ValueError):
            json.loads(data)
            return data


def _refusal(request: bytes) -> bytes:
    error = {"code": -5, "message": "Input/output error"}
    return json.dumps({"jsonrpc": "2.0", "id": json.loads(request)["id"], "error": error}).encode()
