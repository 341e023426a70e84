"""JSON-RPC over one connection without its sockets: requests out as bytes, bytes in as replies matched by id.

Not here: cutting the stream (``framing``); sockets and deadlines (``client``, ``aio``).
Trust: replies are ``untrusted``; raises only RpcProtocolError for bad input, RpcUsageError for a request that
cannot be sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spdk_rpc import table
from spdk_rpc.errors import RpcMethodError, RpcProtocolError, RpcUsageError, method_error
from spdk_rpc.framing import (
    REPLY_SIZE_LIMIT_BYTES,
    REQUEST_SIZE_LIMIT_BYTES,
    FramingError,
    JsonSplitter,
    decode_value,
    encode_value,
)
from spdk_rpc.secrets import without_secrets

DEFAULT_ADDRESS = "/var/tmp/spdk.sock"
DEFAULT_TIMEOUT_S = 60.0
LONG_TIMEOUT_S = 600.0
"""For methods that wait for devices, other hosts or outstanding I/O: filling a large disk takes minutes."""
BATCH_CALL_COUNT_LIMIT = 128
"""Calls in one array; a longer batch is sent as several arrays, one after the other."""
BATCH_VALUE_COUNT_LIMIT = 8000
"""SPDK parses at most 8192 JSON values of one request, names included."""
BATCH_VERSION = (26, 5)
"""The first release that takes arrays of requests."""

Params = Mapping[str, Any] | None
Request = tuple[str, Params]


def deadline_s(method: str, params: Params, *, ordinary_s: float, long_s: float) -> float:
    """How long a call may take: by its method, and longer by what SPDK was asked to wait."""
    known = table.methods().get(method)
    if known is None or not known.is_long:
        return ordinary_s
    limit_s = max(ordinary_s, long_s)
    for field in known.params:
        waited = (params or {}).get(field.name) if field.is_waited else None
        if isinstance(waited, int) and not isinstance(waited, bool):
            limit_s += waited / 1000
    return limit_s


@dataclass(frozen=True)
class PeerInfo:
    """What answers at the other end."""

    version: str
    release: tuple[int, int]
    methods: frozenset[str]

    @property
    def has_batches(self) -> bool:
        return self.release >= BATCH_VERSION


def parse_peer_info(version: Any, methods: Any) -> PeerInfo:
    """From the results of spdk_get_version and rpc_get_methods."""
    fields = version.get("fields") if isinstance(version, dict) else None
    if not isinstance(fields, dict):
        raise RpcProtocolError("spdk_get_version: result: expected an object with fields")
    release = (fields.get("major"), fields.get("minor"))
    if not all(type(each) is int for each in release):
        raise RpcProtocolError("spdk_get_version: result: fields.major, fields.minor: expected numbers")
    if not isinstance(methods, list) or not all(isinstance(each, str) for each in methods):
        raise RpcProtocolError("rpc_get_methods: result: expected a list of strings")
    return PeerInfo(str(version.get("version", "")), (release[0], release[1]), frozenset(methods))  # type: ignore[arg-type]


class Exchange:
    """What one connection has sent and not been answered yet.

    Ids come from a counter that outlives the connection, so a reply is never taken for another call's.
    """

    def __init__(self, ids: Iterator[int], *, address: str) -> None:
        self._ids = ids
        self._address = address
        self._splitter = JsonSplitter(size_limit_bytes=REPLY_SIZE_LIMIT_BYTES)
        self._outstanding: dict[int, str] = {}
        self._batch_count = 0
        self.dropped_reply_count = 0

    @property
    def outstanding_count(self) -> int:
        return len(self._outstanding)

    def request(self, method: str, params: Params) -> tuple[int, bytes]:
        """The id and the bytes of a request."""
        request_id = next(self._ids)
        encoded = _encode(method, _envelope(method, params, request_id))
        self._outstanding[request_id] = method
        return request_id, encoded

    def batch(self, requests: Sequence[Request]) -> tuple[list[int], bytes]:
        """The ids and the bytes of an array of requests, which ``cut_batch`` made short enough."""
        ids = [next(self._ids) for _ in requests]
        envelopes = [
            _envelope(method, params, each) for each, (method, params) in zip(ids, requests, strict=True)
        ]
        encoded = _encode(f"batch of {len(requests)}", envelopes)
        self._batch_count += 1
        self._outstanding.update(zip(ids, (method for method, _ in requests), strict=True))
        return ids, encoded

    def forget(self, request_id: int) -> None:
        """Nobody waits for this reply any more; it is dropped when it comes."""
        self._outstanding.pop(request_id, None)

    def feed(self, untrusted: bytes) -> list[tuple[int, dict[str, Any]]]:
        """The replies that are complete now, each with the id it answers."""
        try:
            values = [decode_value(raw) for raw in self._splitter.feed(untrusted)]
        except FramingError as error:
            raise RpcProtocolError(f"{self._where()}: reply: {error}") from error
        answered: list[tuple[int, dict[str, Any]]] = []
        for value in values:
            for each in self._open_array(value) if isinstance(value, list) else [value]:
                match = self._match(each)
                if match is not None:
                    answered.append(match)
        return answered

    def _open_array(self, untrusted: list[Any]) -> list[Any]:
        """Only a batch is answered with an array, and once."""
        if not self._batch_count:
            raise RpcProtocolError(f"{self._where()}: reply: expected an object, got an array")
        self._batch_count -= 1
        return untrusted

    def _match(self, untrusted: Any) -> tuple[int, dict[str, Any]] | None:
        if not isinstance(untrusted, dict):
            raise RpcProtocolError(f"{self._where()}: reply: expected an object")
        request_id = untrusted.get("id")
        if request_id is None and "error" in untrusted:
            # An error without an id answers the only call there is; of several it could be any.
            if len(self._outstanding) != 1:
                raise RpcProtocolError(f"{self._where()}: reply: an error that names no request")
            request_id = next(iter(self._outstanding))
        if type(request_id) is not int or request_id not in self._outstanding:
            self.dropped_reply_count += 1
            return None
        del self._outstanding[request_id]
        return request_id, untrusted

    def _where(self) -> str:
        names = ", ".join(sorted(set(self._outstanding.values()))) or "no call"
        return f"{self._address}: {names}"


def result_of(method: str, reply: Mapping[str, Any], params: Params) -> Any:
    """The result in a reply. Raises RpcMethodError for a refusal, with secrets blanked."""
    error = reply.get("error")
    if error is not None:
        if not isinstance(error, dict):
            raise RpcProtocolError(f"{method}: reply: error: expected an object")
        code, message = error.get("code"), error.get("message")
        if type(code) is not int or not isinstance(message, str):
            raise RpcProtocolError(f"{method}: reply: error: expected an integer code and a text message")
        raise method_error(method, code, without_secrets(message, params))
    if "result" not in reply:
        raise RpcProtocolError(f"{method}: reply: neither result nor error")
    return reply["result"]


def outcome_of(method: str, reply: Mapping[str, Any], params: Params) -> Any:
    """As ``result_of``, but a refusal is returned: in a batch each call has its own."""
    try:
        return result_of(method, reply, params)
    except RpcMethodError as error:
        return error


def cut_batch(requests: Sequence[Request]) -> list[Sequence[Request]]:
    """Parts of a batch that SPDK takes as one array each, in order."""
    parts: list[Sequence[Request]] = []
    start = size_bytes = value_count = 0
    for index, (method, params) in enumerate(requests):
        envelope = _envelope(method, params, 1 << 53)
        each_bytes = len(_encode(method, envelope)) + 1
        each_count = _value_count(envelope)
        is_full = (
            size_bytes + each_bytes + 2 > REQUEST_SIZE_LIMIT_BYTES
            or value_count + each_count + 2 > BATCH_VALUE_COUNT_LIMIT
            or index - start >= BATCH_CALL_COUNT_LIMIT
        )
        if is_full and index > start:
            parts.append(requests[start:index])
            start, size_bytes, value_count = index, 0, 0
        size_bytes += each_bytes
        value_count += each_count
    if start < len(requests):
        parts.append(requests[start:])
    return parts


def _value_count(value: Any) -> int:
    if isinstance(value, Mapping):
        return 2 + sum(1 + _value_count(each) for each in value.values())
    if isinstance(value, list | tuple):
        return 2 + sum(_value_count(each) for each in value)
    return 1


def _envelope(method: str, params: Params, request_id: int) -> dict[str, Any]:
    envelope: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "id": request_id}
    if params:
        envelope["params"] = dict(params)
    return envelope


def _encode(name: str, request: Any) -> bytes:
    try:
        encoded = encode_value(request)
    except (TypeError, ValueError, RecursionError) as error:
        # The cause's text may hold a parameter's value.
        raise RpcUsageError(f"{name}: params: no JSON ({type(error).__name__})") from None
    if len(encoded) > REQUEST_SIZE_LIMIT_BYTES:
        raise RpcUsageError(
            f"{name}: request: expected at most {REQUEST_SIZE_LIMIT_BYTES} bytes, got {len(encoded)}"
        )
    return encoded


def new_ids() -> Iterator[int]:
    """Ids of one client, over all its connections."""
    return itertools.count(1)
