"""One JSON-RPC connection to SPDK: send a call, wait for its reply until a monotonic deadline.

Not here: what the methods mean (``methods``); cutting the stream (``framing``).
Trust: replies are untrusted; raises only ``SpdkRpcError`` subclasses.
Threads: any; calls of several threads run one after the other, and waiting for the turn counts against
the deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from spdk_rpc.errors import (
    RpcProtocolError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUsageError,
    method_error,
)
from spdk_rpc.framing import (
    REPLY_SIZE_LIMIT_BYTES,
    REQUEST_SIZE_LIMIT_BYTES,
    FramingError,
    JsonSplitter,
    decode_value,
    encode_value,
)

DEFAULT_ADDRESS = "/var/tmp/spdk.sock"
DEFAULT_TIMEOUT_S = 60.0
# sun_path holds 108 bytes with the terminating zero.
UNIX_PATH_LIMIT_BYTES = 107
_READ_SIZE_BYTES = 64 << 10
_TCP_ADDRESS = re.compile(r"(?:tcp://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^/:\[\]]+)):(?P<port>\d{1,5})")
_SECRET_NAMES = frozenset({"psk", "key", "dhchap_key", "dhchap_ctrlr_key", "password", "hex_key", "key2"})

log = logging.getLogger("spdk_rpc")


def parse_address(address: str | os.PathLike[str]) -> str | tuple[str, int]:
    """A UNIX socket path, or (host, port) for ``HOST:PORT``, ``[V6]:PORT`` and ``tcp://…``.

    Whatever contains a slash (or starts with ``unix:``) is a path.
    """
    text = os.fspath(address)
    if text.startswith("unix:"):
        text = text[len("unix:") :]
    else:
        match = _TCP_ADDRESS.fullmatch(text)
        if match is not None:
            port = int(match["port"])
            if not 0 < port < 65536:
                raise RpcUsageError(f"RPC address: port: expected 1 to 65535, got {port}")
            return match["v6"] or match["host"], port
        if "/" not in text:
            raise RpcUsageError(f"RPC address: expected a socket path or HOST:PORT, got {text!r}")
    size_bytes = len(os.fsencode(text))
    if not text or size_bytes > UNIX_PATH_LIMIT_BYTES:
        raise RpcUsageError(
            f"RPC address: a UNIX socket path has 1 to {UNIX_PATH_LIMIT_BYTES} bytes, got {size_bytes}: {text!r}"
        )
    return text


class Client:
    """A connection that is made on the first call and made anew after it broke.

    After a timeout or garbage the connection is closed and never used again, so a late reply can never be
    taken for another call's. A call whose request was sent is never repeated by itself.
    """

    def __init__(
        self, address: str | os.PathLike[str] = DEFAULT_ADDRESS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.address = os.fspath(address)
        self.timeout_s = timeout_s
        self.dropped_reply_count = 0
        self._peer = parse_address(address)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._splitter = JsonSplitter(size_limit_bytes=REPLY_SIZE_LIMIT_BYTES)
        self._last_id = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    def close(self) -> None:
        """Close the connection; a later call makes a new one."""
        with self._lock:
            self._drop_connection()

    def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Call a method and return its result.

        Raises RpcMethodError (refused), RpcTimeoutError, RpcTransportError, RpcProtocolError, or
        RpcUsageError for a request that cannot be sent. ``timeout_s`` covers connecting, sending and waiting.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        waiter = _Waiter(method, self.address, limit_s, started + limit_s)
        if not self._lock.acquire(timeout=max(0.0, limit_s)):
            raise waiter.timeout("waiting for another call on this client", is_fate_unknown=False)
        try:
            self._last_id += 1
            request = _build_request(method, params, self._last_id)
            reply = self._exchange(waiter, request, self._last_id)
        except BaseException:
            # Also on KeyboardInterrupt: the reply may still come, and must not meet the next call.
            self._drop_connection()
            raise
        finally:
            self._lock.release()
        log.debug("%s: %s took %.3f s", self.address, method, time.monotonic() - started)
        return _result_of(method, reply, params)

    def _exchange(self, waiter: _Waiter, request: bytes, request_id: int) -> dict[str, Any]:
        connection = self._connected(waiter)
        self._send(waiter, connection, request)
        for reply in self._replies(waiter, connection):
            if reply.get("id") == request_id:
                return reply
            # Only this call is outstanding here, so an error without an id is the answer to it.
            if reply.get("id") is None and "error" in reply:
                return reply
            self.dropped_reply_count += 1
        raise AssertionError("the reply stream ends by raising")

    def _connected(self, waiter: _Waiter) -> socket.socket:
        if self._socket is not None and _is_closed_by_peer(self._socket):
            # Seen before anything was sent: reconnecting is safe.
            self._drop_connection()
        if self._socket is None:
            self._socket = self._connect(waiter)
            self._splitter = JsonSplitter(size_limit_bytes=REPLY_SIZE_LIMIT_BYTES)
        return self._socket

    def _connect(self, waiter: _Waiter) -> socket.socket:
        failure: OSError | None = None
        for family, address in self._peer_addresses():
            try:
                return _connect_one(family, address, waiter)
            except TimeoutError:
                raise waiter.timeout("connecting", is_fate_unknown=False) from None
            except OSError as error:
                failure = error
        assert failure is not None, "a peer has at least one address"
        raise self._unreachable(failure) from failure

    def _unreachable(self, error: OSError) -> RpcTransportError:
        is_backlog_full = isinstance(error, BlockingIOError)
        reason = "the peer's backlog is full" if is_backlog_full else error.strerror or str(error)
        code = 0 if isinstance(error, socket.gaierror) else error.errno or 0
        return RpcTransportError(f"{self.address}: connect: {reason}", errno=code, address=self.address)

    def _peer_addresses(self) -> list[tuple[socket.AddressFamily, Any]]:
        if isinstance(self._peer, str):
            return [(socket.AF_UNIX, self._peer)]
        try:
            found = socket.getaddrinfo(*self._peer, type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._unreachable(error) from error
        return [(family, address) for family, _, _, _, address in found]

    def _send(self, waiter: _Waiter, connection: socket.socket, request: bytes) -> None:
        rest = memoryview(request)
        while rest:
            connection.settimeout(waiter.remaining_s("sending the request"))
            try:
                rest = rest[connection.send(rest) :]
            except TimeoutError:
                raise waiter.timeout("sending the request") from None
            except OSError as error:
                raise self._lost(waiter.method, "send", error) from error

    def _replies(self, waiter: _Waiter, connection: socket.socket) -> Iterator[dict[str, Any]]:
        """Reply objects as they come; never ends but by raising."""
        while True:
            connection.settimeout(waiter.remaining_s("waiting for the reply"))
            try:
                chunk = connection.recv(_READ_SIZE_BYTES)
            except TimeoutError:
                raise waiter.timeout("waiting for the reply") from None
            except OSError as error:
                raise self._lost(waiter.method, "receive", error) from error
            if not chunk:
                raise RpcTransportError(
                    f"{self.address}: {waiter.method}: connection closed before the reply",
                    address=self.address,
                    is_fate_unknown=True,
                )
            try:
                values = [decode_value(raw) for raw in self._splitter.feed(chunk)]
            except FramingError as error:
                raise RpcProtocolError(f"{self.address}: {waiter.method}: reply: {error}") from error
            for value in values:
                if not isinstance(value, dict):
                    raise RpcProtocolError(f"{self.address}: {waiter.method}: reply: expected an object")
                yield value

    def _lost(self, method: str, operation: str, error: OSError) -> RpcTransportError:
        return RpcTransportError(
            f"{self.address}: {method}: {operation}: {error.strerror or error}",
            errno=error.errno or 0,
            address=self.address,
            is_fate_unknown=True,
        )

    def _drop_connection(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


class _Waiter:
    """The deadline of one call and the error for when it has passed."""

    def __init__(self, method: str, address: str, limit_s: float, expires_s: float) -> None:
        self.method = method
        self._address = address
        self._limit_s = limit_s
        self._expires_s = expires_s

    def remaining_s(self, doing: str, *, is_fate_unknown: bool = True) -> float:
        remaining_s = self._expires_s - time.monotonic()
        if remaining_s <= 0:
            raise self.timeout(doing, is_fate_unknown=is_fate_unknown)
        return remaining_s

    def timeout(self, doing: str, *, is_fate_unknown: bool = True) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"{self._address}: {self.method}: no reply within {self._limit_s:g} s ({doing})",
            method=self.method,
            timeout_s=self._limit_s,
            is_fate_unknown=is_fate_unknown,
        )


def _build_request(method: str, params: Mapping[str, Any] | None, request_id: int) -> bytes:
    envelope: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "id": request_id}
    if params:
        envelope["params"] = dict(params)
    try:
        request = encode_value(envelope)
    except (TypeError, ValueError, RecursionError) as error:
        # The cause's text may hold a parameter's value.
        raise RpcUsageError(f"{method}: params: no JSON ({type(error).__name__})") from None
    if len(request) > REQUEST_SIZE_LIMIT_BYTES:
        raise RpcUsageError(
            f"{method}: request: expected at most {REQUEST_SIZE_LIMIT_BYTES} bytes, got {len(request)}"
        )
    return request


def _connect_one(family: socket.AddressFamily, address: Any, waiter: _Waiter) -> socket.socket:
    """Connect to one address; the deadline covers all of them. Raises OSError or RpcTimeoutError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(waiter.remaining_s("connecting", is_fate_unknown=False))
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_closed_by_peer(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(0):
        return False
    try:
        connection.settimeout(0)
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _result_of(method: str, reply: dict[str, Any], params: Mapping[str, Any] | None) -> Any:
    if "error" in reply and reply["error"] is not None:
        error = reply["error"]
        if not isinstance(error, dict):
            raise RpcProtocolError(f"{method}: reply: error: expected an object")
        code, message = error.get("code"), error.get("message")
        if type(code) is not int or not isinstance(message, str):
            raise RpcProtocolError(f"{method}: reply: error: expected an integer code and a text message")
        raise method_error(method, code, _without_secrets(message, params))
    if "result" not in reply:
        raise RpcProtocolError(f"{method}: reply: neither result nor error")
    return reply["result"]


def _without_secrets(message: str, params: Mapping[str, Any] | None) -> str:
    """The peer's text with the values of secret parameters blanked, should it quote them."""
    for name, value in (params or {}).items():
        if name in _SECRET_NAMES and isinstance(value, str) and value:
            message = message.replace(value, "***")
    return message
