"""Messages of in-band authentication and the Fabrics commands that carry them.

Not here: keys and responses (``kvdev.security``).
Spec: NVM Express Base 2.1 sections 6.1, 6.2, 8.3.4.4, 8.3.4.5.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError and check every length before they
read what it covers. Bytes behind a message are the rest of the buffer and ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from kvdev.errors import UsageError
from kvdev.wire.fabrics import FabricsType
from kvdev.wire.layout import WireError, WireStruct, u8, u16, u32
from kvdev.wire.nvme import AdminOpcode, Sqe

SECP_NVME = 0xE9
SPSP_AUTHENTICATION = 1
MESSAGE_SIZE_BYTES_MAX = 4096
"""Room for any message: the largest, a reply with SHA-512 and an 8192-bit group, has 1168 bytes."""
DESCRIPTOR_COUNT_MAX = 16
"""Protocol descriptors looked at in one negotiation; there is one protocol today."""
_IDENTIFIER_COUNT_MAX = 30


_Id = TypeVar("_Id", bound=enum.IntEnum)


class AuthType(enum.IntEnum):
    COMMON = 0x00
    DH_HMAC_CHAP = 0x01


class AuthId(enum.IntEnum):
    """Message identifiers; NEGOTIATE and the failures are common messages."""

    NEGOTIATE = 0x00
    CHALLENGE = 0x01
    REPLY = 0x02
    SUCCESS1 = 0x03
    SUCCESS2 = 0x04
    FAILURE2 = 0xF0
    FAILURE1 = 0xF1


class HashId(enum.IntEnum):
    SHA256 = 1
    SHA384 = 2
    SHA512 = 3

    @property
    def size_bytes(self) -> int:
        return 16 + 16 * self.value

    @property
    def algorithm(self) -> str:
        """The name that ``hashlib`` and option texts use."""
        return self.name.lower()


class DhGroupId(enum.IntEnum):
    NULL = 0
    FFDHE2048 = 1
    FFDHE3072 = 2
    FFDHE4096 = 3
    FFDHE6144 = 4
    FFDHE8192 = 5


def parse_names(text: str, kind: type[_Id], *, field: str) -> tuple[_Id, ...]:
    """Identifiers by their names in lower case, in the order given and separated by commas."""
    known = {each.name.lower(): each for each in kind}
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names) or not all(name in known for name in names):
        raise UsageError(f"{field}: expected some of {', '.join(known)}, got {text!r}")
    return tuple(known[name] for name in names)


class ScC(enum.IntEnum):
    """Secure channel concatenation."""

    NONE = 0
    NEW_TLS_PSK = 2
    REPLACE_TLS_PSK = 3


class FailureReason(enum.IntEnum):
    """Reason code explanation of an AUTH_Failure; the reason code itself is always 01h."""

    FAILED = 1
    PROTOCOL_UNUSABLE = 2
    CONCATENATION_MISMATCH = 3
    HASH_UNUSABLE = 4
    DH_GROUP_UNUSABLE = 5
    INCORRECT_PAYLOAD = 6
    INCORRECT_MESSAGE = 7


REASON_AUTHENTICATION_FAILURE = 1
AUTHENTICATION_PROTOCOL_DH_HMAC_CHAP = 1


@dataclass(frozen=True)
class AuthCommand:
    """Authentication Send (``is_send``) or Receive; ``size_bytes`` is its TL or AL."""

    size_bytes: int
    is_send: bool
    secp: int = SECP_NVME
    spsp0: int = SPSP_AUTHENTICATION
    spsp1: int = SPSP_AUTHENTICATION

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        fctype = FabricsType.AUTHENTICATION_SEND if self.is_send else FabricsType.AUTHENTICATION_RECEIVE
        return Sqe(
            opc=AdminOpcode.FABRICS,
            cid=cid,
            nsid=fctype,
            sgl_len=self.size_bytes,
            cdw10=self.spsp0 << 8 | self.spsp1 << 16 | self.secp << 24,
            cdw11=self.size_bytes,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> AuthCommand:
        return cls(
            size_bytes=sqe.cdw11,
            is_send=sqe.fctype == FabricsType.AUTHENTICATION_SEND,
            secp=sqe.cdw10 >> 24,
            spsp0=(sqe.cdw10 >> 8) & 0xFF,
            spsp1=(sqe.cdw10 >> 16) & 0xFF,
        )

    @property
    def is_protocol_known(self) -> bool:
        return (self.secp, self.spsp0, self.spsp1) == (SECP_NVME, SPSP_AUTHENTICATION, SPSP_AUTHENTICATION)


def is_auth_command(sqe: Sqe) -> bool:
    return sqe.opc == AdminOpcode.FABRICS and sqe.fctype in (
        FabricsType.AUTHENTICATION_SEND,
        FabricsType.AUTHENTICATION_RECEIVE,
    )


# ---- messages ----


@dataclass(frozen=True)
class AuthHeader(WireStruct):
    """What every message starts with."""

    SIZE: ClassVar[int] = 6

    auth_type: int = u8(0)
    auth_id: int = u8(1)
    t_id: int = u16(4)

    def is_a(self, auth_type: AuthType, auth_id: AuthId) -> bool:
        return (self.auth_type, self.auth_id) == (auth_type, auth_id)


def _wrong(owner: str, name: str, offset: int, expected: str, actual: object) -> WireError:
    return WireError(
        f"{owner} {name}+{offset:#x}: expected {expected}, got {actual}", field=name, field_offset=offset
    )


def _cut(owner: str, name: str, untrusted: bytes, offset: int, size: int) -> bytes:
    """``size`` bytes from ``offset`` on, which must be there."""
    if len(untrusted) < offset + size:
        raise _wrong(owner, name, offset, f"{size} bytes", max(0, len(untrusted) - offset))
    return bytes(untrusted[offset : offset + size])


def _check_hash_size(owner: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise _wrong(owner, "HL", 6, f"{expected} as the hash has", actual)


def _check_boolean(owner: str, name: str, value: int) -> None:
    if value > 1:
        raise _wrong(owner, name, 8, "0 or 1", value)


@dataclass(frozen=True)
class ProtocolDescriptor:
    """DH-HMAC-CHAP as a host offers it: identifiers in its order, unknown ones included."""

    SIZE: ClassVar[int] = 64

    hash_ids: tuple[int, ...]
    dh_group_ids: tuple[int, ...]
    auth_id: int = AUTHENTICATION_PROTOCOL_DH_HMAC_CHAP

    @classmethod
    def parse(cls, untrusted: bytes, *, offset: int) -> ProtocolDescriptor:
        """``offset`` is its place in the message, for errors."""
        hash_count, group_count = untrusted[2], untrusted[3]
        for name, at, count in (("HALEN", 2, hash_count), ("DHLEN", 3, group_count)):
            if not 1 <= count <= _IDENTIFIER_COUNT_MAX:
                raise _wrong("AUTH_Negotiate", name, offset + at, f"1 to {_IDENTIFIER_COUNT_MAX}", count)
        return cls(
            hash_ids=tuple(untrusted[4 : 4 + hash_count]),
            dh_group_ids=tuple(untrusted[34 : 34 + group_count]),
            auth_id=untrusted[0],
        )

    def build(self) -> bytes:
        for name, ids in (("hash_ids", self.hash_ids), ("dh_group_ids", self.dh_group_ids)):
            if not 1 <= len(ids) <= _IDENTIFIER_COUNT_MAX:
                raise UsageError(f"{name}: expected 1 to {_IDENTIFIER_COUNT_MAX} identifiers, got {len(ids)}")
        head = bytes((self.auth_id, 0, len(self.hash_ids), len(self.dh_group_ids)))
        hashes = bytes(self.hash_ids).ljust(_IDENTIFIER_COUNT_MAX, b"\0")
        return (head + hashes + bytes(self.dh_group_ids)).ljust(self.SIZE, b"\0")


@dataclass(frozen=True)
class _NegotiateHead(WireStruct):
    SIZE: ClassVar[int] = 8

    auth_type: int = u8(0, AuthType.COMMON)
    auth_id: int = u8(1, AuthId.NEGOTIATE)
    t_id: int = u16(4)
    sc_c: int = u8(6)
    napd: int = u8(7)


@dataclass(frozen=True)
class Negotiate:
    """AUTH_Negotiate, host to controller."""

    t_id: int
    descriptors: tuple[ProtocolDescriptor, ...]
    sc_c: int = ScC.NONE

    @classmethod
    def parse(cls, untrusted: bytes) -> Negotiate:
        head = _NegotiateHead.parse(untrusted)
        owner = "AUTH_Negotiate"
        if not 1 <= head.napd <= DESCRIPTOR_COUNT_MAX:
            raise _wrong(owner, "NAPD", 7, f"1 to {DESCRIPTOR_COUNT_MAX}", head.napd)
        descriptors = []
        for index in range(head.napd):
            offset = head.SIZE + index * ProtocolDescriptor.SIZE
            piece = _cut(owner, "APD", untrusted, offset, ProtocolDescriptor.SIZE)
            if piece[0] == AUTHENTICATION_PROTOCOL_DH_HMAC_CHAP:
                descriptors.append(ProtocolDescriptor.parse(piece, offset=offset))
        return cls(t_id=head.t_id, descriptors=tuple(descriptors), sc_c=head.sc_c)

    def build(self) -> bytes:
        head = _NegotiateHead(t_id=self.t_id, sc_c=self.sc_c, napd=len(self.descriptors))
        return head.build() + b"".join(descriptor.build() for descriptor in self.descriptors)


@dataclass(frozen=True)
class _ChallengeHead(WireStruct):
    SIZE: ClassVar[int] = 16

    auth_type: int = u8(0, AuthType.DH_HMAC_CHAP)
    auth_id: int = u8(1, AuthId.CHALLENGE)
    t_id: int = u16(4)
    hl: int = u8(6)
    hash_id: int = u8(8)
    dh_group_id: int = u8(9)
    dhvlen: int = u16(10)
    seqnum: int = u32(12)


@dataclass(frozen=True)
class Challenge:
    """DH-HMAC-CHAP_Challenge, controller to host."""

    t_id: int
    hash_id: int
    dh_group_id: int
    seqnum: int
    challenge: bytes = field(repr=False)
    dh_value: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, untrusted: bytes) -> Challenge:
        """The hash must be a known one, because its length says how to read the rest."""
        head = _ChallengeHead.parse(untrusted)
        owner = "DH-HMAC-CHAP_Challenge"
        if head.hash_id not in list(HashId):
            raise _wrong(owner, "HashID", 8, "a hash function that was offered", f"{head.hash_id:#04x}")
        _check_hash_size(owner, head.hl, HashId(head.hash_id).size_bytes)
        if head.seqnum == 0:
            raise _wrong(owner, "SEQNUM", 12, "a number other than 0", 0)
        if head.dhvlen % 4:
            raise _wrong(owner, "DHVLEN", 10, "a multiple of 4", head.dhvlen)
        return cls(
            t_id=head.t_id,
            hash_id=head.hash_id,
            dh_group_id=head.dh_group_id,
            seqnum=head.seqnum,
            challenge=_cut(owner, "CVAL", untrusted, 16, head.hl),
            dh_value=_cut(owner, "DHV", untrusted, 16 + head.hl, head.dhvlen),
        )

    def build(self) -> bytes:
        head = _ChallengeHead(
            t_id=self.t_id,
            hl=len(self.challenge),
            hash_id=self.hash_id,
            dh_group_id=self.dh_group_id,
            dhvlen=len(self.dh_value),
            seqnum=self.seqnum,
        )
        return head.build() + self.challenge + self.dh_value


@dataclass(frozen=True)
class _ReplyHead(WireStruct):
    SIZE: ClassVar[int] = 16

    auth_type: int = u8(0, AuthType.DH_HMAC_CHAP)
    auth_id: int = u8(1, AuthId.REPLY)
    t_id: int = u16(4)
    hl: int = u8(6)
    cvalid: int = u8(8)
    dhvlen: int = u16(10)
    seqnum: int = u32(12)


@dataclass(frozen=True)
class Reply:
    """DH-HMAC-CHAP_Reply, host to controller; ``challenge`` is None unless the controller is to answer it."""

    t_id: int
    response: bytes = field(repr=False)
    challenge: bytes | None = field(default=None, repr=False)
    seqnum: int = 0
    dh_value: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, untrusted: bytes, *, hash_size_bytes: int) -> Reply:
        head = _ReplyHead.parse(untrusted)
        owner = "DH-HMAC-CHAP_Reply"
        _check_hash_size(owner, head.hl, hash_size_bytes)
        _check_boolean(owner, "CVALID", head.cvalid)
        if head.cvalid and head.seqnum == 0:
            raise _wrong(owner, "SEQNUM", 12, "a number other than 0 beside a challenge", 0)
        if head.dhvlen % 4:
            raise _wrong(owner, "DHVLEN", 10, "a multiple of 4", head.dhvlen)
        challenge = _cut(owner, "CVAL", untrusted, 16 + head.hl, head.hl)
        return cls(
            t_id=head.t_id,
            response=_cut(owner, "RVAL", untrusted, 16, head.hl),
            challenge=challenge if head.cvalid else None,
            seqnum=head.seqnum,
            dh_value=_cut(owner, "DHV", untrusted, 16 + 2 * head.hl, head.dhvlen),
        )

    def build(self) -> bytes:
        size = len(self.response)
        head = _ReplyHead(
            t_id=self.t_id,
            hl=size,
            cvalid=int(self.challenge is not None),
            dhvlen=len(self.dh_value),
            seqnum=self.seqnum,
        )
        return head.build() + self.response + (self.challenge or bytes(size)) + self.dh_value


@dataclass(frozen=True)
class _Success1Head(WireStruct):
    SIZE: ClassVar[int] = 16

    auth_type: int = u8(0, AuthType.DH_HMAC_CHAP)
    auth_id: int = u8(1, AuthId.SUCCESS1)
    t_id: int = u16(4)
    hl: int = u8(6)
    rvalid: int = u8(8)


@dataclass(frozen=True)
class Success1:
    """DH-HMAC-CHAP_Success1, controller to host; ``response`` is None where the host asked for none."""

    t_id: int
    hash_size_bytes: int
    response: bytes | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, untrusted: bytes, *, hash_size_bytes: int) -> Success1:
        head = _Success1Head.parse(untrusted)
        owner = "DH-HMAC-CHAP_Success1"
        _check_hash_size(owner, head.hl, hash_size_bytes)
        _check_boolean(owner, "RVALID", head.rvalid)
        response = _cut(owner, "RVAL", untrusted, 16, head.hl) if head.rvalid else None
        return cls(t_id=head.t_id, hash_size_bytes=head.hl, response=response)

    def build(self) -> bytes:
        head = _Success1Head(t_id=self.t_id, hl=self.hash_size_bytes, rvalid=int(self.response is not None))
        return head.build() + (self.response or bytes(self.hash_size_bytes))


@dataclass(frozen=True)
class Success2(WireStruct):
    """DH-HMAC-CHAP_Success2, host to controller."""

    SIZE: ClassVar[int] = 16

    auth_type: int = u8(0, AuthType.DH_HMAC_CHAP)
    auth_id: int = u8(1, AuthId.SUCCESS2)
    t_id: int = u16(4)


@dataclass(frozen=True)
class Failure(WireStruct):
    """AUTH_Failure1 (controller to host) or AUTH_Failure2 (host to controller)."""

    SIZE: ClassVar[int] = 8

    auth_type: int = u8(0, AuthType.COMMON)
    auth_id: int = u8(1, AuthId.FAILURE1)
    t_id: int = u16(4)
    reason_code: int = u8(6, REASON_AUTHENTICATION_FAILURE)
    reason: int = u8(7)

    @property
    def reason_name(self) -> str:
        """The explanation in words."""
        if self.reason in list(FailureReason):
            return FailureReason(self.reason).name.lower().replace("_", " ")
        return f"reason 0x{self.reason:02x}"
