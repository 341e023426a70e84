"""NVMe/TCP PDUs as values: built to bytes, parsed from the bytes of one whole PDU.

The Python twin of csrc/pdu.c, which alone handles live connections; the two are tested against each other.
Not here: splitting a stream into PDUs (``kvdev.native.pdu``); what capsules mean (``nvme``, ``fabrics``).
Spec: NVMe/TCP Transport 1.0, section 3.
Trust: ``untrusted`` bytes come from a peer; raises only MalformedPduError and DigestError for bad input.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from kvdev.errors import DigestError, MalformedPduError, UsageError
from kvdev.wire.crc32c import crc32c

COMMON_BYTES = 8
DIGEST_BYTES = 4
TERM_BYTES = 24
TERM_DATA_MAX = 128
PDA_MAX = 31
MAXH2CDATA_MIN = 4096
IN_CAPSULE_ADMIN_BYTES = 8192
"""In-capsule data a Fabrics or Admin command may always carry."""


class PduType(enum.IntEnum):
    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM = 0x02
    C2H_TERM = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


PDU_NAMES = {
    PduType.IC_REQ: "ICReq",
    PduType.IC_RESP: "ICResp",
    PduType.H2C_TERM: "H2CTermReq",
    PduType.C2H_TERM: "C2HTermReq",
    PduType.CAPSULE_CMD: "CapsuleCmd",
    PduType.CAPSULE_RESP: "CapsuleResp",
    PduType.H2C_DATA: "H2CData",
    PduType.C2H_DATA: "C2HData",
    PduType.R2T: "R2T",
}

HLEN = {
    PduType.IC_REQ: 128,
    PduType.IC_RESP: 128,
    PduType.H2C_TERM: 24,
    PduType.C2H_TERM: 24,
    PduType.CAPSULE_CMD: 72,
    PduType.CAPSULE_RESP: 24,
    PduType.H2C_DATA: 24,
    PduType.C2H_DATA: 24,
    PduType.R2T: 24,
}

TO_TARGET = frozenset({PduType.IC_REQ, PduType.H2C_TERM, PduType.CAPSULE_CMD, PduType.H2C_DATA})


class Role(enum.IntEnum):
    """What a receiver is."""

    HOST = 0
    TARGET = 1


class PduFlag(enum.IntFlag):
    HDGST = 0x01
    DDGST = 0x02
    LAST = 0x04
    SUCCESS = 0x08


class Fes(enum.IntEnum):
    """Fatal error status of a Term PDU; NONE: no Term PDU is owed, the connection is closed at once."""

    NONE = 0
    INVALID_HEADER = 1
    SEQUENCE = 2
    HDGST = 3
    OUT_OF_RANGE = 4
    LIMIT = 5
    UNSUPPORTED = 6


@dataclass(frozen=True)
class Framing:
    """What both ends agreed about PDUs in one direction; for an ICResp, what was asked for."""

    hdgst: bool = False
    ddgst: bool = False
    pda: int = 0
    """Alignment of data, 0's based dwords: CPDA towards the controller, HPDA towards the host."""
    maxh2cdata: int = 0xFFFFFFFF
    in_capsule_max: int = 0xFFFFFFFF


@dataclass(frozen=True)
class ICReq:
    TYPE: ClassVar[PduType] = PduType.IC_REQ

    hpda: int = 0
    hdgst: bool = False
    ddgst: bool = False
    maxr2t_0based: int = 0
    pfv: int = 0


@dataclass(frozen=True)
class ICResp:
    TYPE: ClassVar[PduType] = PduType.IC_RESP

    cpda: int = 0
    hdgst: bool = False
    ddgst: bool = False
    maxh2cdata: int = 131072
    pfv: int = 0


@dataclass(frozen=True)
class H2CTermReq:
    TYPE: ClassVar[PduType] = PduType.H2C_TERM

    fes: int
    fei: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class C2HTermReq:
    TYPE: ClassVar[PduType] = PduType.C2H_TERM

    fes: int
    fei: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class CapsuleCmd:
    TYPE: ClassVar[PduType] = PduType.CAPSULE_CMD

    sqe: bytes
    data: bytes = b""


@dataclass(frozen=True)
class CapsuleResp:
    TYPE: ClassVar[PduType] = PduType.CAPSULE_RESP

    cqe: bytes


@dataclass(frozen=True)
class H2CData:
    TYPE: ClassVar[PduType] = PduType.H2C_DATA

    cccid: int
    ttag: int
    datao: int
    data: bytes
    is_last: bool = True


@dataclass(frozen=True)
class C2HData:
    TYPE: ClassVar[PduType] = PduType.C2H_DATA

    cccid: int
    datao: int
    data: bytes
    is_last: bool = True
    is_success: bool = False


@dataclass(frozen=True)
class R2T:
    TYPE: ClassVar[PduType] = PduType.R2T

    cccid: int
    ttag: int
    r2to: int
    r2tl: int


Pdu = ICReq | ICResp | H2CTermReq | C2HTermReq | CapsuleCmd | CapsuleResp | H2CData | C2HData | R2T


# ---- building ----


def _le(value: int, size: int, name: str) -> bytes:
    if not 0 <= value < 1 << (8 * size):
        raise UsageError(f"{name}: expected an integer of {size} bytes, got {value}")
    return value.to_bytes(size, "little")


def _psh(pdu: Pdu) -> bytes:
    """The header after its first eight bytes."""
    if isinstance(pdu, (ICReq, ICResp)):
        is_req = isinstance(pdu, ICReq)
        pda, limit = (pdu.hpda, pdu.maxr2t_0based) if isinstance(pdu, ICReq) else (pdu.cpda, pdu.maxh2cdata)
        dgst = int(pdu.hdgst) | int(pdu.ddgst) << 1
        name = "maxr2t" if is_req else "maxh2cdata"
        return (_le(pdu.pfv, 2, "pfv") + _le(pda, 1, "pda") + bytes([dgst]) + _le(limit, 4, name)).ljust(
            120, b"\0"
        )
    if isinstance(pdu, (H2CTermReq, C2HTermReq)):
        return (_le(pdu.fes, 2, "fes") + _le(pdu.fei, 4, "fei")).ljust(16, b"\0")
    if isinstance(pdu, CapsuleCmd):
        if len(pdu.sqe) != 64:
            raise UsageError(f"sqe: expected 64 bytes, got {len(pdu.sqe)}")
        return pdu.sqe
    if isinstance(pdu, CapsuleResp):
        if len(pdu.cqe) != 16:
            raise UsageError(f"cqe: expected 16 bytes, got {len(pdu.cqe)}")
        return pdu.cqe
    if isinstance(pdu, R2T):
        return (
            _le(pdu.cccid, 2, "cccid")
            + _le(pdu.ttag, 2, "ttag")
            + _le(pdu.r2to, 4, "r2to")
            + _le(pdu.r2tl, 4, "r2tl")
            + bytes(4)
        )
    ttag = pdu.ttag if isinstance(pdu, H2CData) else 0
    return (
        _le(pdu.cccid, 2, "cccid")
        + _le(ttag, 2, "ttag")
        + _le(pdu.datao, 4, "datao")
        + _le(len(pdu.data), 4, "datal")
        + bytes(4)
    )


def build_pdu(pdu: Pdu, framing: Framing | None = None) -> bytes:
    """All bytes of one PDU: header, header digest, padding, data, data digest."""
    framing = framing or Framing()
    kind = pdu.TYPE
    hlen = HLEN[kind]
    psh = _psh(pdu)
    if isinstance(pdu, (ICReq, ICResp, H2CTermReq, C2HTermReq)):  # never with digests
        data = pdu.data if isinstance(pdu, (H2CTermReq, C2HTermReq)) else b""
        if len(data) > TERM_DATA_MAX:
            raise UsageError(f"term data: expected at most {TERM_DATA_MAX} bytes, got {len(data)}")
        return bytes([kind, 0, hlen, 0]) + _le(hlen + len(data), 4, "plen") + psh + data
    carried = pdu.data if isinstance(pdu, (CapsuleCmd, H2CData, C2HData)) else b""
    flags = PduFlag.HDGST if framing.hdgst else PduFlag(0)
    if isinstance(pdu, (H2CData, C2HData)) and pdu.is_last:
        flags |= PduFlag.LAST
    if isinstance(pdu, C2HData) and pdu.is_success:
        flags |= PduFlag.SUCCESS
    head_bytes = hlen + (DIGEST_BYTES if framing.hdgst else 0)
    has_ddgst = framing.ddgst and bool(carried)
    pdo = 0
    plen = head_bytes
    if carried or isinstance(pdu, (H2CData, C2HData)):
        align = 4 * (framing.pda + 1)
        pdo = -(-head_bytes // align) * align
        plen = pdo + len(carried) + (DIGEST_BYTES if has_ddgst else 0)
    if has_ddgst:
        flags |= PduFlag.DDGST
    head = bytes([kind, int(flags), hlen, pdo]) + _le(plen, 4, "plen") + psh
    if framing.hdgst:
        head += _le(crc32c(head), 4, "hdgst")
    out = head.ljust(pdo, b"\0") + carried
    if has_ddgst:
        out += _le(crc32c(carried), 4, "ddgst")
    return out


# ---- parsing ----


class _Header:
    """The fields every check looks at, and how a check fails."""

    def __init__(self, untrusted: bytes) -> None:
        self.bytes = untrusted
        self.type = untrusted[0]
        self.flags = untrusted[1]
        self.hlen = untrusted[2]
        self.pdo = untrusted[3]
        self.plen = self.uint(4, 4)

    def uint(self, offset: int, size: int) -> int:
        return int.from_bytes(self.bytes[offset : offset + size], "little")

    @property
    def name(self) -> str:
        return PDU_NAMES[PduType(self.type)] if self.type in PduType._value2member_map_ else "PDU"

    def fault(
        self, field: str, offset: int, expected: object, got: object, fes: Fes = Fes.INVALID_HEADER
    ) -> NoReturn:
        raise MalformedPduError(
            f"{self.name} {field}+{offset:#x}: expected {expected}, got {got}",
            field=field,
            field_offset=offset,
            fes=fes,
        )


def parse_pdu(untrusted: bytes, framing: Framing | None = None, *, receiver: Role) -> Pdu:
    """The PDU that ``untrusted`` is, all of it and nothing more.

    Sequence (what may come when) is not looked at. Raises MalformedPduError, or DigestError for either
    digest.
    """
    framing = framing or Framing()
    if len(untrusted) < COMMON_BYTES:
        raise MalformedPduError(
            f"PDU: expected {COMMON_BYTES} bytes of common header, got {len(untrusted)}",
            field="plen",
            field_offset=4,
            fes=Fes.INVALID_HEADER,
        )
    head = _Header(bytes(untrusted))
    kind = _check_common(head, framing, receiver)
    if kind in (PduType.H2C_TERM, PduType.C2H_TERM):
        _check_size(head)
        cls = H2CTermReq if kind == PduType.H2C_TERM else C2HTermReq
        return cls(fes=head.uint(8, 2), fei=head.uint(10, 4), data=head.bytes[TERM_BYTES:])
    if kind in (PduType.IC_REQ, PduType.IC_RESP):
        return _parse_ic(head, framing, kind)
    head_bytes = head.hlen + (DIGEST_BYTES if framing.hdgst else 0)
    if framing.hdgst:
        expected, actual = crc32c(head.bytes[: head.hlen]), head.uint(head.hlen, 4)
        if expected != actual:
            raise DigestError(
                f"{head.name} hdgst: expected {expected:#010x}, got {actual:#010x}",
                expected=expected,
                actual=actual,
            )
    if kind == PduType.CAPSULE_CMD:
        return CapsuleCmd(sqe=head.bytes[8:72], data=_capsule_data(head, framing, head_bytes))
    if kind == PduType.CAPSULE_RESP:
        if head.plen != head_bytes:
            head.fault("plen", 4, head_bytes, head.plen)
        _check_size(head)
        return CapsuleResp(cqe=head.bytes[8:24])
    if kind == PduType.R2T:
        return _parse_r2t(head, head_bytes)
    return _parse_data(head, framing, head_bytes, kind)


def _check_size(head: _Header) -> None:
    if len(head.bytes) != head.plen:
        head.fault("plen", 4, len(head.bytes), head.plen)


def _check_common(head: _Header, framing: Framing, receiver: Role) -> PduType:
    if head.type not in PduType._value2member_map_:
        head.fault("type", 0, "a PDU type", f"{head.type:#04x}")
    kind = PduType(head.type)
    if (kind in TO_TARGET) != (receiver == Role.TARGET):
        head.fault("type", 0, f"a PDU sent to a {receiver.name.lower()}", head.name)
    if kind in (PduType.H2C_TERM, PduType.C2H_TERM):
        if head.hlen != TERM_BYTES:
            head.fault("hlen", 2, TERM_BYTES, head.hlen, Fes.NONE)
        if not TERM_BYTES <= head.plen <= TERM_BYTES + TERM_DATA_MAX:
            head.fault("plen", 4, f"{TERM_BYTES} to {TERM_BYTES + TERM_DATA_MAX}", head.plen, Fes.NONE)
        return kind
    if head.hlen != HLEN[kind]:
        head.fault("hlen", 2, HLEN[kind], head.hlen)
    want = head.hlen
    if kind not in (PduType.IC_REQ, PduType.IC_RESP):
        if bool(head.flags & PduFlag.HDGST) != framing.hdgst:
            head.fault("flags", 1, f"HDGSTF {int(framing.hdgst)}", f"{head.flags:#04x}")
        want += DIGEST_BYTES if framing.hdgst else 0
    if head.plen < want:
        head.fault("plen", 4, f"at least {want}", head.plen)
    if len(head.bytes) < want:
        head.fault("plen", 4, f"{want} bytes of header", len(head.bytes))
    return kind


def _parse_ic(head: _Header, framing: Framing, kind: PduType) -> Pdu:
    pda, dgst, limit = head.uint(10, 1), head.uint(11, 1) & 3, head.uint(12, 4)
    if head.plen != 128:
        head.fault("plen", 4, 128, head.plen)
    if head.uint(8, 2) != 0:
        head.fault("pfv", 8, 0, head.uint(8, 2), Fes.UNSUPPORTED)
    if pda > PDA_MAX:
        head.fault("pda", 10, f"at most {PDA_MAX}", pda)
    hdgst, ddgst = bool(dgst & 1), bool(dgst & 2)
    if kind == PduType.IC_REQ:
        _check_size(head)
        return ICReq(hpda=pda, hdgst=hdgst, ddgst=ddgst, maxr2t_0based=limit)
    if (hdgst and not framing.hdgst) or (ddgst and not framing.ddgst):
        head.fault("dgst", 11, "only digests that were asked for", f"{dgst:#04x}")
    if limit < MAXH2CDATA_MIN:
        head.fault("maxh2cdata", 12, f"at least {MAXH2CDATA_MIN}", limit)
    if limit % 4:
        head.fault("maxh2cdata", 12, "a multiple of 4", limit)
    _check_size(head)
    return ICResp(cpda=pda, hdgst=hdgst, ddgst=ddgst, maxh2cdata=limit)


def _check_data_offset(head: _Header, framing: Framing, head_bytes: int) -> None:
    if bool(head.flags & PduFlag.DDGST) != framing.ddgst:
        head.fault("flags", 1, f"DDGSTF {int(framing.ddgst)}", f"{head.flags:#04x}")
    if head.pdo < head_bytes:
        head.fault("pdo", 3, f"at least {head_bytes}", head.pdo)
    align = 4 * (framing.pda + 1)
    if head.pdo % align:
        head.fault("pdo", 3, f"a multiple of {align}", head.pdo)


def _data(head: _Header, framing: Framing) -> bytes:
    """The data of a PDU whose lengths were checked; verifies its digest."""
    _check_size(head)
    end = head.plen - (DIGEST_BYTES if framing.ddgst else 0)
    data = head.bytes[head.pdo : end]
    if framing.ddgst:
        expected, actual = crc32c(data), head.uint(end, 4)
        if expected != actual:
            raise DigestError(
                f"{head.name} ddgst: expected {expected:#010x}, got {actual:#010x}",
                expected=expected,
                actual=actual,
            )
    return data


def _capsule_data(head: _Header, framing: Framing, head_bytes: int) -> bytes:
    if head.plen == head_bytes:
        if head.flags & PduFlag.DDGST:
            head.fault("flags", 1, "DDGSTF 0 without data", f"{head.flags:#04x}")
        _check_size(head)
        return b""
    _check_data_offset(head, framing, head_bytes)
    least = head.pdo + (DIGEST_BYTES if framing.ddgst else 0) + 1
    if head.plen < least:
        head.fault("plen", 4, f"at least {least}", head.plen)
    if head.plen - least + 1 > framing.in_capsule_max:
        head.fault("plen", 4, f"at most {framing.in_capsule_max} bytes of data", head.plen)
    return _data(head, framing)


def _parse_data(head: _Header, framing: Framing, head_bytes: int, kind: PduType) -> Pdu:
    datao, datal = head.uint(12, 4), head.uint(16, 4)
    _check_data_offset(head, framing, head_bytes)
    if datal == 0:
        head.fault("datal", 16, "at least 4", 0)
    if datal % 4:
        head.fault("datal", 16, "a multiple of 4", datal)
    if datao % 4:
        head.fault("datao", 12, "a multiple of 4", datao)
    whole = head.pdo + datal + (DIGEST_BYTES if framing.ddgst else 0)
    if head.plen != whole:
        head.fault("plen", 4, whole, head.plen)
    is_last = bool(head.flags & PduFlag.LAST)
    if kind == PduType.C2H_DATA:
        is_success = bool(head.flags & PduFlag.SUCCESS)
        if is_success and not is_last:
            head.fault("flags", 1, "LAST_PDU with SUCCESS", f"{head.flags:#04x}")
        return C2HData(
            cccid=head.uint(8, 2),
            datao=datao,
            data=_data(head, framing),
            is_last=is_last,
            is_success=is_success,
        )
    if datal > framing.maxh2cdata:
        head.fault("datal", 16, f"at most {framing.maxh2cdata}", datal, Fes.LIMIT)
    return H2CData(
        cccid=head.uint(8, 2), ttag=head.uint(10, 2), datao=datao, data=_data(head, framing), is_last=is_last
    )


def _parse_r2t(head: _Header, head_bytes: int) -> R2T:
    r2to, r2tl = head.uint(12, 4), head.uint(16, 4)
    if head.plen != head_bytes:
        head.fault("plen", 4, head_bytes, head.plen)
    if r2tl == 0:
        head.fault("r2tl", 16, "at least 4", 0, Fes.OUT_OF_RANGE)
    if r2tl % 4:
        head.fault("r2tl", 16, "a multiple of 4", r2tl)
    if r2to % 4:
        head.fault("r2to", 12, "a multiple of 4", r2to)
    _check_size(head)
    return R2T(cccid=head.uint(8, 2), ttag=head.uint(10, 2), r2to=r2to, r2tl=r2tl)
