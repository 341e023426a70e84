"""The asyncio client: many calls at a time over one connection to SPDK, each until its own deadline.

Not here: what the methods mean (``methods``); ids, replies and refusals (``protocol``).
Trust: replies are untrusted; raises only ``SpdkRpcError`` subclasses (and CancelledError).
Threads: one event loop owns a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from spdk_rpc.address import parse_address
from spdk_rpc.client import closed, lost, timed_out, unreachable
from spdk_rpc.errors import (
    ERROR_METHOD_NOT_FOUND,
    RpcMethodError,
    RpcProtocolError,
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

OUTSTANDING_LIMIT = 64
"""Exchanges of one client under way at the same time; further ones wait for their turn."""
_READ_SIZE_BYTES = 64 << 10

T = TypeVar("T")

log = logging.getLogger("spdk_rpc")


class AsyncClient:
    """A connection that is made on the first call and made anew after it broke.

    Calls overlap and are answered in the order SPDK finishes them. After a timeout or a cancellation the
    connection takes no further calls: those under way on it end as they would, a late reply is dropped, and
    the next call makes a new connection. A call whose request was sent is never repeated by itself.
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
        self._ids = new_ids()
        self._connection: _Connection | None = None
        self._retired: set[_Connection] = set()
        self._connecting = asyncio.Lock()
        self._slots = asyncio.Semaphore(OUTSTANDING_LIMIT)
        self._dropped_reply_count = 0
        self._peer: tuple[_Connection, PeerInfo] | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.address!r})"

    @property
    def dropped_reply_count(self) -> int:
        """Replies to calls nobody waited for any more."""
        live = {*self._retired, *([self._connection] if self._connection else [])}
        return self._dropped_reply_count + sum(each.exchange.dropped_reply_count for each in live)

    async def close(self) -> None:
        """Close all connections; calls under way end with RpcTransportError, a later call makes a new one."""
        connections = [*self._retired, *([self._connection] if self._connection else [])]
        self._connection = None
        for connection in connections:
            await connection.close()

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Call a method and return its result.

        Raises RpcMethodError (refused), RpcTimeoutError, RpcTransportError, RpcProtocolError, or
        RpcUsageError for a request that cannot be sent. The deadline covers connecting, sending and waiting.
        """
        try:
            (reply,) = await self._run([(method, params)], timeout_s, is_array=False)
            return result_of(method, reply, params)
        except RpcMethodError as error:
            raise await self._explained(error) from None

    async def batch(self, requests: Sequence[Request], *, timeout_s: float | None = None) -> list[Any]:
        """Call methods in order with few round trips; each result or RpcMethodError in its place.

        A refused call does not keep the later ones from running. An SPDK before 26.05 gets them one by one.
        The deadline covers each array of calls; when it passes, or the connection breaks, what ran is unknown.
        """
        if not (await self.peer()).has_batches:
            return [await self._outcome(method, params, timeout_s) for method, params in requests]
        replies: list[dict[str, Any]] = []
        for part in cut_batch(requests):
            replies += await self._run(part, timeout_s, is_array=True)
        return [
            outcome_of(method, reply, params)
            for reply, (method, params) in zip(replies, requests, strict=True)
        ]

    async def peer(self) -> PeerInfo:
        """Version and methods of what answers; asked once per connection."""
        if self._peer is not None and self._peer[0] is self._connection:
            return self._peer[1]
        version = await self.call("spdk_get_version")
        methods = await self.call("rpc_get_methods", {"current": False})
        info = parse_peer_info(version, methods)
        if self._connection is not None:
            self._peer = (self._connection, info)
        return info

    async def _outcome(self, method: str, params: Params, timeout_s: float | None) -> Any:
        try:
            return await self.call(method, params, timeout_s=timeout_s)
        except RpcMethodError as error:
            return error

    async def _explained(self, error: RpcMethodError) -> RpcMethodError:
        """For a method that the peer does not have: the error that names the peer's version."""
        if error.code != ERROR_METHOD_NOT_FOUND or error.method == "spdk_get_version":
            return error
        try:
            found = await self.call("spdk_get_version")
            version = str(found["version"]) if isinstance(found, dict) else "a peer of unknown version"
        except (SpdkRpcError, KeyError):
            version = "a peer of unknown version"
        return RpcUnsupportedError(error.method, error.message, version=version, address=self.address)

    async def _run(
        self, requests: Sequence[Request], timeout_s: float | None, *, is_array: bool
    ) -> list[dict[str, Any]]:
        """Send and wait for all replies, until the deadline."""
        if timeout_s is None:
            timeout_s = max(
                deadline_s(method, params, ordinary_s=self.timeout_s, long_s=self.long_timeout_s)
                for method, params in requests
            )
        name = requests[0][0] if len(requests) == 1 else f"batch of {len(requests)}"
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        waiter = _Waiter(name, self.address, timeout_s, started_s + timeout_s)
        slot = asyncio.ensure_future(self._slots.acquire())
        try:
            await waiter.within(slot, "waiting for other calls of this client", was_sent=False)
        except BaseException:
            if slot.done() and not slot.cancelled():
                # Cancelled in the very turn that it became ours.
                self._slots.release()
            raise
        try:
            connection = await waiter.within(self._connected(), "connecting", was_sent=False)
            replies = await connection.run(requests, waiter, is_array=is_array)
        finally:
            self._slots.release()
        log.debug("%s: %s took %.3f s", self.address, name, loop.time() - started_s)
        return replies

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_usable:
                if self._connection is not None:
                    self._retire(self._connection)
                    self._connection = None
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _Connection:
        try:
            if isinstance(self._peer_address, str):
                reader, writer = await asyncio.open_unix_connection(self._peer_address)
            else:
                reader, writer = await asyncio.open_connection(*self._peer_address)
        except OSError as error:
            raise unreachable(self.address, error) from error
        return _Connection(reader, writer, Exchange(self._ids, address=self.address), self.address)

    def _retire(self, connection: _Connection) -> None:
        """Keep a connection until its last call has ended."""
        self._retired.add(connection)
        connection.when_done(lambda: self._forget(connection))

    def _forget(self, connection: _Connection) -> None:
        self._retired.discard(connection)
        self._dropped_reply_count += connection.exchange.dropped_reply_count


class _Waiter:
    """The deadline of one exchange, on the loop's monotonic clock."""

    def __init__(self, method: str, address: str, limit_s: float, expires_s: float) -> None:
        self.method = method
        self._address = address
        self._limit_s = limit_s
        self._expires_s = expires_s

    async def within(self, awaitable: Awaitable[T], doing: str, *, was_sent: bool) -> T:
        """Await until the deadline. Raises RpcTimeoutError.

        ``asyncio.wait_for`` before Python 3.12 forgets a cancellation that comes in the turn in which the
        awaitable ends: the call would go on that its caller has given up.
        """
        remaining_s = self._expires_s - asyncio.get_running_loop().time()
        future = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({future}, timeout=max(0.0, remaining_s))
        except BaseException:
            _give_up(future)
            raise
        if future.done():
            return future.result()
        _give_up(future)
        await asyncio.wait({future})
        raise timed_out(self._address, self.method, self._limit_s, doing, is_fate_unknown=was_sent)


def _give_up(future: asyncio.Future[Any]) -> None:
    """Cancel what nobody waits for any more, and let its outcome pass without a word."""
    future.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    future.cancel()


class _Connection:
    """One stream: sends whole requests, and a task of its own hands replies to who waits for them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        exchange: Exchange,
        address: str,
    ) -> None:
        self.exchange = exchange
        self.is_usable = True
        self._address = address
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._task = asyncio.ensure_future(self._read())

    async def run(
        self, requests: Sequence[Request], waiter: _Waiter, *, is_array: bool
    ) -> list[dict[str, Any]]:
        """Send one request, or an array of them, and wait for every reply."""
        if is_array:
            ids, encoded = self.exchange.batch(requests)
        else:
            request_id, encoded = self.exchange.request(*requests[0])
            ids = [request_id]
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in ids]
        for request_id, future, (method, _) in zip(ids, futures, requests, strict=True):
            self._waiting[request_id] = (method, future)
        try:
            self._writer.write(encoded)
            await waiter.within(self._drain(waiter.method), "sending the request", was_sent=True)
            return list(await waiter.within(asyncio.gather(*futures), "waiting for the reply", was_sent=True))
        except BaseException:
            # Timeout, cancellation, a broken stream: its reply may still come, and nobody takes it.
            self.is_usable = False
            raise
        finally:
            for request_id, future in zip(ids, futures, strict=True):
                self._waiting.pop(request_id, None)
                self.exchange.forget(request_id)
                if future.done() and not future.cancelled():
                    future.exception()
            self._end_when_idle()

    async def _drain(self, method: str) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise lost(self._address, method, "send", error) from error

    async def _read(self) -> None:
        """Hand out replies until the stream ends; then every call that waits fails."""
        failure: SpdkRpcError | OSError | None = None
        try:
            while chunk := await self._reader.read(_READ_SIZE_BYTES):
                for request_id, reply in self.exchange.feed(chunk):
                    _, future = self._waiting[request_id]
                    if not future.done():
                        future.set_result(reply)
        except (RpcProtocolError, OSError) as error:
            failure = error
        finally:
            self.is_usable = False
            for method, future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._failure(method, failure))
            self._writer.close()

    def _failure(self, method: str, error: SpdkRpcError | OSError | None) -> SpdkRpcError:
        if isinstance(error, SpdkRpcError):
            return error
        return (
            closed(self._address, method) if error is None else lost(self._address, method, "receive", error)
        )

    def _end_when_idle(self) -> None:
        """A connection that is given up closes with its last call."""
        if not self.is_usable and not self._waiting:
            self._task.cancel()
            self._writer.close()

    def when_done(self, callback: Any) -> None:
        self._task.add_done_callback(lambda _: callback())

    async def close(self) -> None:
        self.is_usable = False
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for method, future in self._waiting.values():
            # A task that is cancelled before its first step runs no handler of its own.
            if not future.done():
                future.set_exception(closed(self._address, method))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
