"""The synchronous client: one connection to SPDK, a call at a time, each until a monotonic deadline.

Not here: what the methods mean (``methods``); ids, replies and refusals (``protocol``); asyncio (``aio``).
Trust: replies are untrusted; raises only ``SpdkRpcError`` subclasses.
Threads: any; calls of several threads run one after the other, and waiting for the turn counts against
the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from spdk_rpc.address import parse_address
from spdk_rpc.errors import (
    ERROR_METHOD_NOT_FOUND,
    RpcMethodError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUnsupportedError,
    SpdkRpcError,
)
from spdk_rpc.protocol import (
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_S,
    LONG_TIMEOUT_S,
    Exchange,
    Params,
    PeerInfo,
    Request,
    cut_batch,
    deadline_s,
    new_ids,
    outcome_of,
    parse_peer_info,
    result_of,
)

_READ_SIZE_BYTES = 64 << 10

log = logging.getLogger("spdk_rpc")


class Client:
    """A connection that is made on the first call and made anew after it broke.

    After a timeout or garbage the connection is closed and never used again, so a late reply can never be
    taken for another call's. A call whose request was sent is never repeated by itself. ``timeout_s`` is for
    ordinary methods, ``long_timeout_s`` for those that wait for devices, hosts or outstanding I/O; a call's
    own ``timeout_s`` goes before both.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        long_timeout_s: float = LONG_TIMEOUT_S,
    ) -> None:
        self.address = os.fspath(address)
        self.timeout_s = timeout_s
        self.long_timeout_s = long_timeout_s
        self._peer_address = parse_address(address)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ids = new_ids()
        self._exchange = Exchange(self._ids, address=self.address)
        self._dropped_reply_count = 0
        self._peer: PeerInfo | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    @property
    def dropped_reply_count(self) -> int:
        """Replies to calls nobody waited for any more."""
        return self._dropped_reply_count + self._exchange.dropped_reply_count

    def close(self) -> None:
        """Close the connection; a later call makes a new one."""
        with self._lock:
            self._drop_connection()

    def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Call a method and return its result.

        Raises RpcMethodError (refused), RpcTimeoutError, RpcTransportError, RpcProtocolError, or
        RpcUsageError for a request that cannot be sent. The deadline covers connecting, sending and waiting.
        """
        waiter = self._waiter([(method, params)], timeout_s)
        with self._turn(waiter):
            request_id, encoded = self._exchange.request(method, params)
            reply = self._round_trip(waiter, encoded, [request_id])[request_id]
        log.debug("%s: %s took %.3f s", self.address, method, waiter.elapsed_s)
        try:
            return result_of(method, reply, params)
        except RpcMethodError as error:
            raise self._explained(error) from None

    def batch(self, requests: Sequence[Request], *, timeout_s: float | None = None) -> list[Any]:
        """Call methods in order with few round trips; each result or RpcMethodError in its place.

        A refused call does not keep the later ones from running. An SPDK before 26.05 gets them one by one.
        The deadline covers all; when it passes, or the connection breaks, what ran is unknown.
        """
        if not self.peer().has_batches:
            return [self._outcome(method, params, timeout_s) for method, params in requests]
        waiter = self._waiter(requests, timeout_s)
        replies: dict[int, dict[str, Any]] = {}
        all_ids: list[int] = []
        with self._turn(waiter):
            for part in cut_batch(requests):
                ids, encoded = self._exchange.batch(part)
                replies.update(self._round_trip(waiter, encoded, ids))
                all_ids += ids
        log.debug("%s: %s took %.3f s", self.address, waiter.method, waiter.elapsed_s)
        return [
            outcome_of(method, replies[request_id], params)
            for request_id, (method, params) in zip(all_ids, requests, strict=True)
        ]

    def peer(self) -> PeerInfo:
        """Version and methods of what answers; asked once per connection."""
        if self._peer is None:
            # A new connection may be another process: ``_drop_connection`` forgets the answer.
            version = self.call("spdk_get_version")
            methods = self.call("rpc_get_methods", {"current": False})
            self._peer = parse_peer_info(version, methods)
        return self._peer

    def _outcome(self, method: str, params: Params, timeout_s: float | None) -> Any:
        try:
            return self.call(method, params, timeout_s=timeout_s)
        except RpcMethodError as error:
            return error

    def _explained(self, error: RpcMethodError) -> RpcMethodError:
        """For a method that the peer does not have: the error that names the peer's version."""
        if error.code != ERROR_METHOD_NOT_FOUND or error.method == "spdk_get_version":
            return error
        try:
            found = self.call("spdk_get_version")
            version = str(found["version"]) if isinstance(found, dict) else "a peer of unknown version"
        except (SpdkRpcError, KeyError):
            version = "a peer of unknown version"
        return RpcUnsupportedError(error.method, error.message, version=version, address=self.address)

    def _waiter(self, requests: Sequence[Request], timeout_s: float | None) -> _Waiter:
        if timeout_s is None:
            limits = [
                deadline_s(method, params, ordinary_s=self.timeout_s, long_s=self.long_timeout_s)
                for method, params in requests
            ]
            timeout_s = max(limits, default=self.timeout_s)
        name = requests[0][0] if len(requests) == 1 else f"batch of {len(requests)}"
        return _Waiter(name, self.address, timeout_s)

    @contextlib.contextmanager
    def _turn(self, waiter: _Waiter) -> Iterator[None]:
        """This client's connection for one exchange; after any failure it is not used again."""
        if not self._lock.acquire(timeout=max(0.0, waiter.limit_s)):
            raise waiter.timeout("waiting for another call on this client", is_fate_unknown=False)
        try:
            if self._socket is not None and _is_closed_by_peer(self._socket):
                # Seen before anything was sent: reconnecting is safe.
                self._drop_connection()
            yield
        except BaseException:
            # Also on KeyboardInterrupt: the reply may still come, and must not meet the next call.
            self._drop_connection()
            raise
        finally:
            self._lock.release()

    def _round_trip(self, waiter: _Waiter, encoded: bytes, ids: list[int]) -> dict[int, dict[str, Any]]:
        if self._socket is None:
            self._socket = self._connect(waiter)
        self._send(waiter, self._socket, encoded)
        waiting = set(ids)
        replies: dict[int, dict[str, Any]] = {}
        while waiting:
            for request_id, reply in self._exchange.feed(self._receive(waiter, self._socket)):
                replies[request_id] = reply
                waiting.discard(request_id)
        return replies

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
        raise unreachable(self.address, failure) from failure

    def _peer_addresses(self) -> list[tuple[socket.AddressFamily, Any]]:
        if isinstance(self._peer_address, str):
            return [(socket.AF_UNIX, self._peer_address)]
        try:
            found = socket.getaddrinfo(*self._peer_address, type=socket.SOCK_STREAM)
        except OSError as error:
            raise unreachable(self.address, error) from error
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
                raise lost(self.address, waiter.method, "send", error) from error

    def _receive(self, waiter: _Waiter, connection: socket.socket) -> bytes:
        connection.settimeout(waiter.remaining_s("waiting for the reply"))
        try:
            chunk = connection.recv(_READ_SIZE_BYTES)
        except TimeoutError:
            raise waiter.timeout("waiting for the reply") from None
        except OSError as error:
            raise lost(self.address, waiter.method, "receive", error) from error
        if not chunk:
            raise closed(self.address, waiter.method)
        return chunk

    def _drop_connection(self) -> None:
        self._peer = None
        self._dropped_reply_count += self._exchange.dropped_reply_count
        self._exchange = Exchange(self._ids, address=self.address)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


_CONNECT_REMEDIES = {
    errno.ENOENT: "; start that SPDK, or name the RPC socket of one that runs",
    errno.ECONNREFUSED: "; start that SPDK: nobody listens there any more",
    errno.EACCES: "; run as the user of that SPDK",
    errno.ENOTSOCK: "; name SPDK's RPC socket",
}


def unreachable(address: str, error: OSError) -> RpcTransportError:
    """The error of a connection that could not be made."""
    is_backlog_full = isinstance(error, BlockingIOError)
    code = 0 if isinstance(error, socket.gaierror) else error.errno or 0
    # asyncio puts a text of its own into strerror.
    reason = os.strerror(code) if code else error.strerror or str(error)
    if is_backlog_full:
        reason = "the peer's backlog is full"
    remedy = _CONNECT_REMEDIES.get(code, "")
    return RpcTransportError(f"{address}: connect: {reason}{remedy}", errno=code, address=address)


def lost(address: str, method: str, operation: str, error: OSError) -> RpcTransportError:
    """The error of a connection that broke after a request may have been sent."""
    return RpcTransportError(
        f"{address}: {method}: {operation}: {error.strerror or error}",
        errno=error.errno or 0,
        address=address,
        is_fate_unknown=True,
    )


def closed(address: str, method: str) -> RpcTransportError:
    """The error of a connection that the peer closed while a call waited."""
    return RpcTransportError(
        f"{address}: {method}: connection closed before the reply", address=address, is_fate_unknown=True
    )


class _Waiter:
    """The deadline of one exchange and the error for when it has passed."""

    def __init__(self, method: str, address: str, limit_s: float) -> None:
        self.method = method
        self.limit_s = limit_s
        self._address = address
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def remaining_s(self, doing: str, *, is_fate_unknown: bool = True) -> float:
        remaining_s = self.limit_s - self.elapsed_s
        if remaining_s <= 0:
            raise self.timeout(doing, is_fate_unknown=is_fate_unknown)
        return remaining_s

    def timeout(self, doing: str, *, is_fate_unknown: bool = True) -> RpcTimeoutError:
        return timed_out(self._address, self.method, self.limit_s, doing, is_fate_unknown=is_fate_unknown)


def timed_out(
    address: str, method: str, limit_s: float, doing: str, *, is_fate_unknown: bool
) -> RpcTimeoutError:
    """The error of a deadline that has passed."""
    return RpcTimeoutError(
        f"{address}: {method}: no reply within {limit_s:g} s ({doing})",
        method=method,
        timeout_s=limit_s,
        is_fate_unknown=is_fate_unknown,
    )


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
