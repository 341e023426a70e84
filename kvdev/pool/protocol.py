"""Messages between pool process and clients: a header of 20 bytes and a body, over a UNIX stream socket.

Bodies are arrays one after the other, as in memory; JSON where nothing is hurried (hello, stat, errors).
Not here: sockets (``server``, ``client``).
Trust: ``parse_`` functions take untrusted bytes; raise only MessageError.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdev.errors import (
    CapacityError,
    CorruptionError,
    KvdevError,
    LeaseLostError,
    ProtocolError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.keys import KEY_SIZE_BYTES, KeyArray
from kvdev.native.checksum import PageChecksum, SumArray
from kvdev.native.index import GRANT_DTYPE, GrantArray, Uint8Array

MAGIC: Final = b"KDVP"
VERSION: Final = 2
HEADER: Final = struct.Struct("<4sHHIII")
"""Magic, version, type, request id, body size, reserved."""
HEADER_SIZE_BYTES: Final = HEADER.size
COUNT_MAX: Final = 1 << 16
"""Keys of one message."""
BODY_SIZE_BYTES_MAX: Final = 8 << 20
"""Room for a commit of COUNT_MAX pages; what is larger is refused before anything is allocated for it."""
ERROR_TEXT_MAX: Final = 2000
MEMBER_COUNT_MAX: Final = 64
_COMMIT: Final = struct.Struct("<IIQ")


class MessageType(enum.IntEnum):
    """Requests are answered by a message of the same type and id, or by ERROR; TOUCH is not answered.

    RESERVE_SOME may be answered by fewer grants than keys, for the first of them and at least one.
    """

    HELLO = 1
    RESERVE = 2
    COMMIT = 3
    DELETE = 4
    PIN = 5
    UNPIN = 6
    FLUSH = 7
    TOUCH = 8
    WITHDRAW = 9
    STAT = 10
    RESERVE_SOME = 11
    ERROR = 255


class MessageError(ProtocolError):
    """The bytes are no message of this protocol; the connection is of no more use."""


@dataclass(frozen=True)
class Header:
    """One message's start."""

    type: MessageType
    request_id: int
    body_size_bytes: int


def build_message(kind: MessageType, request_id: int, body: bytes = b"") -> bytes:
    assert len(body) <= BODY_SIZE_BYTES_MAX, "callers count before they build"
    return HEADER.pack(MAGIC, VERSION, kind, request_id, len(body), 0) + body


def parse_header(untrusted: bytes) -> Header:
    magic, version, kind, request_id, size, _ = HEADER.unpack(untrusted)
    if magic != MAGIC:
        raise MessageError(f"pool message magic+0x0: expected {MAGIC.hex()}, got {magic.hex()}")
    if version != VERSION:
        raise MessageError(
            f"pool message version+0x4: expected {VERSION}, got {version}: use the same kvdev on both sides"
        )
    if kind not in tuple(MessageType):
        raise MessageError(f"pool message type+0x6: expected 1 to {MessageType.RESERVE_SOME:d}, got {kind}")
    if size > BODY_SIZE_BYTES_MAX:
        raise MessageError(f"pool message size+0xc: expected at most {BODY_SIZE_BYTES_MAX}, got {size}")
    return Header(MessageType(kind), request_id, size)


def _split(what: str, untrusted: bytes, sizes: list[tuple[str, int]], count: int) -> list[bytes]:
    """Cut a body into arrays of ``count`` elements of these sizes."""
    expected = count * sum(size for _, size in sizes)
    if len(untrusted) != expected:
        names = ", ".join(name for name, _ in sizes)
        raise MessageError(f"pool {what}: expected {expected} bytes of {names}, got {len(untrusted)}")
    parts, start = [], 0
    for _, size in sizes:
        parts.append(untrusted[start : start + count * size])
        start += count * size
    return parts


def check_count(what: str, count: int) -> int:
    if not 0 < count <= COUNT_MAX:
        raise MessageError(f"pool {what}: expected 1 to {COUNT_MAX} pages, got {count}")
    return count


def parse_keys(what: str, untrusted: bytes) -> KeyArray:
    count, rest = divmod(len(untrusted), KEY_SIZE_BYTES)
    if rest:
        raise MessageError(
            f"pool {what}: expected keys of {KEY_SIZE_BYTES} bytes, got {len(untrusted)} bytes"
        )
    check_count(what, count)
    return np.frombuffer(untrusted, dtype=np.uint8).reshape(count, KEY_SIZE_BYTES)


def parse_grants(what: str, untrusted: bytes) -> GrantArray:
    count, rest = divmod(len(untrusted), GRANT_DTYPE.itemsize)
    if rest:
        raise MessageError(
            f"pool {what}: expected grants of {GRANT_DTYPE.itemsize} bytes, got {len(untrusted)} bytes"
        )
    check_count(what, count)
    grants: GrantArray = np.frombuffer(untrusted, dtype=GRANT_DTYPE).copy()
    return grants


@dataclass(frozen=True)
class Commit:
    """Written grants on their way to the owner."""

    keys: KeyArray
    grants: GrantArray
    sums: SumArray
    outcome: Uint8Array
    members: npt.NDArray[np.bool_]
    sent_ns: int

    def build(self) -> bytes:
        head = _COMMIT.pack(len(self.keys), len(self.members), self.sent_ns)
        arrays = (self.members.astype(np.uint8), self.keys, self.grants, self.sums, self.outcome)
        return head + b"".join(array.tobytes() for array in arrays)


def parse_commit(untrusted: bytes, checksum: PageChecksum) -> Commit:
    """``checksum`` is that of the KV namespace."""
    if len(untrusted) < _COMMIT.size:
        raise MessageError(f"pool commit: expected at least {_COMMIT.size} bytes, got {len(untrusted)}")
    count, member_count, sent_ns = _COMMIT.unpack_from(untrusted)
    check_count("commit", count)
    if not 0 < member_count <= MEMBER_COUNT_MAX:
        raise MessageError(f"pool commit: expected 1 to {MEMBER_COUNT_MAX} members, got {member_count}")
    rest = untrusted[_COMMIT.size :]
    sizes = [
        ("keys", KEY_SIZE_BYTES),
        ("grants", GRANT_DTYPE.itemsize),
        ("sums", checksum.sum_dtype.itemsize),
        ("outcome", 1),
    ]
    keys, grants, sums, outcome = _split("commit", rest[member_count:], sizes, count)
    outcomes = np.frombuffer(outcome, dtype=np.uint8)
    if outcomes.max(initial=0) > 2:
        raise MessageError(f"pool commit: outcome: expected 0 to 2, got {int(outcomes.max())}")
    return Commit(
        np.frombuffer(keys, dtype=np.uint8).reshape(count, KEY_SIZE_BYTES),
        np.frombuffer(grants, dtype=GRANT_DTYPE).copy(),
        np.frombuffer(sums, dtype=checksum.sum_dtype).copy(),
        outcomes,
        np.frombuffer(rest[:member_count], dtype=np.uint8) != 0,
        sent_ns,
    )


def build_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def parse_json(what: str, untrusted: bytes) -> dict[str, Any]:
    try:
        value = json.loads(untrusted)
    except ValueError as error:
        raise MessageError(f"pool {what}: expected JSON, got {untrusted[:40]!r}") from error
    if not isinstance(value, dict):
        raise MessageError(f"pool {what}: expected a JSON object, got {untrusted[:40]!r}")
    return value


# What a client acts on differently; anything else is a failure of the way to the pool.
_ERRORS: dict[str, type[KvdevError]] = {
    "UsageError": UsageError,
    "CapacityError": CapacityError,
    "LeaseLostError": LeaseLostError,
    "CorruptionError": CorruptionError,
}


def build_error(error: KvdevError) -> bytes:
    name = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), type(error).__name__)
    return build_json({"error": name, "message": str(error)[:ERROR_TEXT_MAX]})


def parse_error(untrusted: bytes, *, what: str) -> KvdevError:
    """The exception that the owner raised, as one of this side."""
    value = parse_json("error", untrusted)
    name, message = str(value.get("error")), str(value.get("message"))[:ERROR_TEXT_MAX]
    kind = _ERRORS.get(name)
    if kind is not None:
        return kind(message)
    if name == "UnsupportedError":
        return UnsupportedError(message, feature="pool")
    return TransportError(f"{what}: {message}", trid=what)
