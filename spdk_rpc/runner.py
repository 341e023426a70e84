"""What ``SpdkRpc`` and ``AsyncSpdkRpc`` share: a client, a deadline, batches, and what the peer can do.

Not here: the methods (``methods``, generated).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from spdk_rpc.aio import AsyncClient
from spdk_rpc.call import Call
from spdk_rpc.client import Client
from spdk_rpc.errors import RpcMethodError, RpcProtocolError, RpcUnsupportedError
from spdk_rpc.protocol import PeerInfo

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound="Runner")
A = TypeVar("A", bound="AsyncRunner")


class Runner:
    """Runs calls on a synchronous client."""

    def __init__(self, client: Client, *, timeout_s: float | None = None) -> None:
        self.client = client
        self._timeout_s = timeout_s

    def within(self: R, timeout_s: float) -> R:
        """The same connection with a deadline of its own for every call."""
        return type(self)(self.client, timeout_s=timeout_s)

    def run(self, call: Call[T]) -> T:
        """Send a call and wait for its result."""
        return call.result_of(self.client.call(call.method, call.params or None, timeout_s=self._timeout_s))

    def batch(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Send calls in order with few round trips; each result or RpcMethodError in its place."""
        requests = [(call.method, call.params or None) for call in calls]
        outcomes = self.client.batch(requests, timeout_s=self._timeout_s) if requests else []
        return _results(calls, outcomes)

    def call(self, method: str, expected: type[T], params: Mapping[str, Any] | None = None) -> T:
        """Call any method, also one the table does not have, and check the type of the result."""
        return _typed(method, expected, self.client.call(method, _given(params), timeout_s=self._timeout_s))

    def peer(self) -> PeerInfo:
        """Version and methods of the SPDK at the other end."""
        return self.client.peer()

    def supports(self, *methods: str) -> bool:
        """Whether the SPDK at the other end has all these methods."""
        return self.peer().methods.issuperset(methods)

    def require(self, *methods: str) -> None:
        """Raise RpcUnsupportedError for the first of these methods that the SPDK there does not have."""
        _require(self.peer(), methods, self.client.address)


class AsyncRunner:
    """Runs calls on an asyncio client."""

    def __init__(self, client: AsyncClient, *, timeout_s: float | None = None) -> None:
        self.client = client
        self._timeout_s = timeout_s

    def within(self: A, timeout_s: float) -> A:
        """The same connection with a deadline of its own for every call."""
        return type(self)(self.client, timeout_s=timeout_s)

    async def run(self, call: Call[T]) -> T:
        """Send a call and wait for its result."""
        return call.result_of(
            await self.client.call(call.method, call.params or None, timeout_s=self._timeout_s)
        )

    async def batch(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Send calls in order with few round trips; each result or RpcMethodError in its place."""
        requests = [(call.method, call.params or None) for call in calls]
        outcomes = await self.client.batch(requests, timeout_s=self._timeout_s) if requests else []
        return _results(calls, outcomes)

    async def call(self, method: str, expected: type[T], params: Mapping[str, Any] | None = None) -> T:
        """Call any method, also one the table does not have, and check the type of the result."""
        return _typed(
            method, expected, await self.client.call(method, _given(params), timeout_s=self._timeout_s)
        )

    async def peer(self) -> PeerInfo:
        """Version and methods of the SPDK at the other end."""
        return await self.client.peer()

    async def supports(self, *methods: str) -> bool:
        """Whether the SPDK at the other end has all these methods."""
        return (await self.peer()).methods.issuperset(methods)

    async def require(self, *methods: str) -> None:
        """Raise RpcUnsupportedError for the first of these methods that the SPDK there does not have."""
        _require(await self.peer(), methods, self.client.address)


def run_now(build: Callable[P, Call[T]]) -> Callable[Concatenate[Runner, P], T]:
    """A method that builds its call and runs it."""

    def method(self: Runner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(build(*args, **kwargs))

    functools.update_wrapper(method, build)
    return method


def awaited(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncRunner, P], Awaitable[T]]:
    """A coroutine method that builds its call and runs it."""

    async def method(self: AsyncRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(build(*args, **kwargs))

    functools.update_wrapper(method, build)
    return method


def _given(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {name: value for name, value in (params or {}).items() if value is not None} or None


def _results(calls: Sequence[Call[Any]], outcomes: Sequence[Any]) -> list[Any]:
    return [
        outcome if isinstance(outcome, RpcMethodError) else call.result_of(outcome)
        for call, outcome in zip(calls, outcomes, strict=True)
    ]


def _typed(method: str, expected: type[T], result: Any) -> T:
    # bool is an int to isinstance.
    if not isinstance(result, expected) or (expected is int and isinstance(result, bool)):
        raise RpcProtocolError(f"{method}: result: expected {expected.__name__}, got {type(result).__name__}")
    return result


def _require(peer: PeerInfo, methods: Sequence[str], address: str) -> None:
    for method in methods:
        if method not in peer.methods:
            raise RpcUnsupportedError(method, "Method not found", version=peer.version, address=address)
