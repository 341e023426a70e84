"""Fabrics commands, Connect data and the controller properties they reach.

Not here: queue entries and status codes (``nvme``).
Spec: NVM Express Base 2.2 sections 3.1.4 (properties), 6.3 (Connect), 6.4 (Disconnect), 6.5, 6.6.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kvdev.errors import UsageError
from kvdev.opcode import FabricsType as FabricsType
from kvdev.wire.layout import BitStruct, WireStruct, bits, nqn, raw, u16
from kvdev.wire.nvme import CNTLID_DYNAMIC, SGL_IN_CAPSULE, AdminOpcode, Cqe, FabricsStatus, Sqe

CONNECT_DATA_BYTES = 1024
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
CATTR_DISABLE_SQ_FLOW_CONTROL = 1 << 2
SQHD_FLOW_CONTROL_DISABLED = 0xFFFF
"""SQHD of the Connect response when SQ flow control is off."""
AUTHREQ_ASCR = 1 << 18
AUTHREQ_ATR = 1 << 17


@dataclass(frozen=True)
class ConnectCommand:
    """Connect (Base 6.3); its 1024 bytes of data travel in the capsule."""

    qid: int
    sqsize_0based: int
    kato_ms: int = 0
    cattr: int = 0
    recfmt: int = 0

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        return Sqe(
            opc=AdminOpcode.FABRICS,
            cid=cid,
            nsid=FabricsType.CONNECT,
            sgl_len=CONNECT_DATA_BYTES,
            sgl_type=SGL_IN_CAPSULE,
            cdw10=self.recfmt | self.qid << 16,
            cdw11=self.sqsize_0based | self.cattr << 16,
            cdw12=self.kato_ms,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> ConnectCommand:
        return cls(
            qid=sqe.cdw10 >> 16,
            sqsize_0based=sqe.cdw11 & 0xFFFF,
            kato_ms=sqe.cdw12,
            cattr=(sqe.cdw11 >> 16) & 0xFF,
            recfmt=sqe.cdw10 & 0xFFFF,
        )


@dataclass(frozen=True)
class ConnectData(WireStruct):
    """Data of Connect (Base figure 569)."""

    SIZE: ClassVar[int] = CONNECT_DATA_BYTES

    hostid: bytes = raw(0, 16)
    cntlid: int = u16(16, CNTLID_DYNAMIC)
    subnqn: str = nqn(256)
    hostnqn: str = nqn(512)


@dataclass(frozen=True)
class ConnectResult:
    """DW0 of a successful Connect response."""

    cntlid: int
    authreq_atr: bool
    authreq_ascr: bool

    @classmethod
    def parse(cls, untrusted_dw0: int) -> ConnectResult:
        return cls(
            cntlid=untrusted_dw0 & 0xFFFF,
            authreq_atr=bool(untrusted_dw0 & AUTHREQ_ATR),
            authreq_ascr=bool(untrusted_dw0 & AUTHREQ_ASCR),
        )

    def build(self) -> int:
        return (
            self.cntlid
            | (AUTHREQ_ATR if self.authreq_atr else 0)
            | (AUTHREQ_ASCR if self.authreq_ascr else 0)
        )


CONNECT_SQE_FIELDS = {4: "fctype", 24: "sgl1", 40: "recfmt", 42: "qid", 44: "sqsize", 46: "cattr", 48: "kato"}
CONNECT_DATA_FIELDS = {0: "hostid", 16: "cntlid", 256: "subnqn", 512: "hostnqn"}


@dataclass(frozen=True)
class InvalidParameter:
    """DW0 of a Connect refused with Connect Invalid Parameters: IPO and IATTR (Base figure 571)."""

    offset: int
    is_in_data: bool

    @classmethod
    def parse(cls, untrusted_dw0: int) -> InvalidParameter:
        return cls(offset=untrusted_dw0 & 0xFFFF, is_in_data=bool(untrusted_dw0 >> 16 & 1))

    @classmethod
    def of(cls, field: str) -> InvalidParameter:
        """The parameter by its name in the command or in the Connect data."""
        for table, is_in_data in ((CONNECT_DATA_FIELDS, True), (CONNECT_SQE_FIELDS, False)):
            for offset, name in table.items():
                if name == field:
                    return cls(offset=offset, is_in_data=is_in_data)
        raise UsageError(f"connect parameter: no field is called {field!r}")

    def build(self) -> int:
        return self.offset | int(self.is_in_data) << 16

    @property
    def field(self) -> str:
        """Name of the field the offset lies in."""
        table = CONNECT_DATA_FIELDS if self.is_in_data else CONNECT_SQE_FIELDS
        starts = [start for start in table if start <= self.offset]
        return table[max(starts)] if starts else "reserved"

    def __str__(self) -> str:
        where = "connect data" if self.is_in_data else "connect command"
        return f"{where} byte {self.offset} ({self.field})"


def connect_error_detail(cqe: Cqe) -> str:
    """What a refused Connect says beyond its status code: the field it names, or nothing."""
    if cqe.status & 0x7FF == FabricsStatus.CONNECT_INVALID_PARAMETERS:
        return f"the controller refuses {InvalidParameter.parse(cqe.dw0)}"
    return ""


@dataclass(frozen=True)
class PropertyCommand:
    """Property Get or Property Set (Base 6.5, 6.6) of 4 or 8 bytes."""

    offset: int
    size_bytes: int
    is_set: bool
    value: int = 0

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        if self.size_bytes not in (4, 8):
            raise UsageError(f"property {self.offset:#x}: expected 4 or 8 bytes, got {self.size_bytes}")
        return Sqe(
            opc=AdminOpcode.FABRICS,
            cid=cid,
            nsid=FabricsType.PROPERTY_SET if self.is_set else FabricsType.PROPERTY_GET,
            cdw10=1 if self.size_bytes == 8 else 0,
            cdw11=self.offset,
            cdw12=self.value & 0xFFFFFFFF,
            cdw13=self.value >> 32,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> PropertyCommand:
        """``size_bytes`` is 0 for an ATTRIB that is reserved."""
        is_set = sqe.fctype == FabricsType.PROPERTY_SET
        size_bytes = {0: 4, 1: 8}.get(sqe.cdw10 & 7, 0)
        value = (sqe.cdw12 | sqe.cdw13 << 32) if is_set else 0
        return cls(
            offset=sqe.cdw11,
            size_bytes=size_bytes,
            is_set=is_set,
            value=value if size_bytes == 8 else value & 0xFFFFFFFF,
        )


def build_disconnect(*, cid: int = 0) -> Sqe:
    """Disconnect (Base 6.4): deletes the I/O queue it is sent on."""
    return Sqe(opc=AdminOpcode.FABRICS, cid=cid, nsid=FabricsType.DISCONNECT)


# ---- properties ----


class Property(enum.IntEnum):
    """Offsets of the properties Fabrics reaches."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C
    NSSR = 0x20
    NSSD = 0x64
    CRTO = 0x68


PROPERTY_BYTES = {
    Property.CAP: 8,
    Property.VS: 4,
    Property.CC: 4,
    Property.CSTS: 4,
    Property.NSSR: 4,
    Property.NSSD: 4,
    Property.CRTO: 4,
}


@dataclass(frozen=True)
class Cap(BitStruct):
    """Controller Capabilities (Base 3.1.4.1)."""

    BYTES: ClassVar[int] = 8

    mqes_0based: int = bits(0, 15)
    cqr: int = bits(16, default=1)
    ams: int = bits(17, 18)
    to_500ms: int = bits(24, 31)
    dstrd: int = bits(32, 35)
    nssrs: int = bits(36)
    css: int = bits(37, 44)
    bps: int = bits(45)
    cps: int = bits(46, 47)
    mpsmin: int = bits(48, 51)
    mpsmax: int = bits(52, 55)
    pmrs: int = bits(56)
    cmbs: int = bits(57)
    nsss: int = bits(58)
    crwms: int = bits(59)
    crims: int = bits(60)

    @property
    def has_nvm_command_set(self) -> bool:
        return bool(self.css & 1)

    @property
    def has_io_command_sets(self) -> bool:
        """CAP.CSS bit 6: Identify lists the I/O command sets."""
        return bool(self.css & 1 << 6)

    @property
    def page_size_bytes_min(self) -> int:
        return 1 << (12 + self.mpsmin)


@dataclass(frozen=True)
class Version(BitStruct):
    """Version (Base 3.1.4.2)."""

    tertiary: int = bits(0, 7)
    minor: int = bits(8, 15)
    major: int = bits(16, 31)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.tertiary}"


class CcCss(enum.IntEnum):
    NVM = 0
    ALL_SUPPORTED = 6
    ADMIN_ONLY = 7


class Shn(enum.IntEnum):
    NONE = 0
    NORMAL = 1
    ABRUPT = 2


class Shst(enum.IntEnum):
    NONE = 0
    OCCURRING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class Cc(BitStruct):
    """Controller Configuration (Base 3.1.4.5)."""

    en: int = bits(0)
    css: int = bits(4, 6)
    mps: int = bits(7, 10)
    ams: int = bits(11, 13)
    shn: int = bits(14, 15)
    iosqes: int = bits(16, 19)
    iocqes: int = bits(20, 23)
    crime: int = bits(24)


@dataclass(frozen=True)
class Csts(BitStruct):
    """Controller Status (Base 3.1.4.6)."""

    rdy: int = bits(0)
    cfs: int = bits(1)
    shst: int = bits(2, 3)
    nssro: int = bits(4)
    pp: int = bits(5)
    st: int = bits(6)


CSTS_GONE = 0xFFFFFFFF
"""A read of all ones: the controller is no longer there."""


@dataclass(frozen=True)
class Crto(BitStruct):
    """Controller Ready Timeouts (Base 3.1.4.22), in units of 500 ms."""

    crwmt_500ms: int = bits(0, 15)
    crimt_500ms: int = bits(16, 31)
