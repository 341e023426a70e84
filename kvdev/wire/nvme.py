"""NVMe queue entries, status codes and the Admin and NVM commands built from them.

Not here: opcodes (``kvdev.opcode``); Fabrics commands (``fabrics``); what commands carry (``identify``, ``log``,
``features``).
Spec: NVM Express Base 2.2 sections 3.3, 4.1, 4.2, 5.1; NVM Command Set 1.0 section 3.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvdev.errors import CommandError, UsageError
from kvdev.opcode import AdminOpcode as AdminOpcode
from kvdev.opcode import NvmOpcode as NvmOpcode
from kvdev.opcode import opcode_name as opcode_name
from kvdev.wire.layout import WireStruct, u8, u16, u32, u64

SQE_BYTES = 64
CQE_BYTES = 16
NSID_ALL = 0xFFFFFFFF
CNTLID_DYNAMIC = 0xFFFF
PSDT_SGL = 0x40
"""SQE byte 1: SGLs are used, metadata pointer is an address; every command over Fabrics."""
SGL_IN_CAPSULE = 0x01
"""Data Block descriptor, offset into the capsule."""
SGL_TRANSPORT = 0x5A
"""Transport SGL Data Block descriptor: the data moves in data PDUs."""


class Status(enum.IntEnum):
    """Status type and code, ``sct << 8 | sc``; Fabrics commands have their own 0x180 and above."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_POWER_LOSS = 0x005
    INTERNAL_ERROR = 0x006
    ABORT_REQUESTED = 0x007
    ABORTED_SQ_DELETION = 0x008
    ABORTED_FAILED_FUSED = 0x009
    ABORTED_MISSING_FUSED = 0x00A
    INVALID_NAMESPACE_OR_FORMAT = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    INVALID_SGL_SEGMENT = 0x00D
    INVALID_SGL_COUNT = 0x00E
    DATA_SGL_LENGTH_INVALID = 0x00F
    METADATA_SGL_LENGTH_INVALID = 0x010
    SGL_TYPE_INVALID = 0x011
    INVALID_CMB_USE = 0x012
    PRP_OFFSET_INVALID = 0x013
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014
    OPERATION_DENIED = 0x015
    SGL_OFFSET_INVALID = 0x016
    HOST_ID_INCONSISTENT = 0x018
    KEEP_ALIVE_EXPIRED = 0x019
    KEEP_ALIVE_INVALID = 0x01A
    ABORTED_PREEMPT = 0x01B
    SANITIZE_FAILED = 0x01C
    SANITIZE_IN_PROGRESS = 0x01D
    SGL_GRANULARITY_INVALID = 0x01E
    NOT_SUPPORTED_IN_CMB = 0x01F
    NAMESPACE_WRITE_PROTECTED = 0x020
    COMMAND_INTERRUPTED = 0x021
    TRANSIENT_TRANSPORT_ERROR = 0x022
    PROHIBITED_BY_LOCKDOWN = 0x023
    ADMIN_MEDIA_NOT_READY = 0x024
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    NAMESPACE_NOT_READY = 0x082
    RESERVATION_CONFLICT = 0x083
    FORMAT_IN_PROGRESS = 0x084
    INVALID_CQ = 0x100
    INVALID_QID = 0x101
    INVALID_QUEUE_SIZE = 0x102
    ABORT_LIMIT_EXCEEDED = 0x103
    AER_LIMIT_EXCEEDED = 0x105
    INVALID_FIRMWARE_SLOT = 0x106
    INVALID_FIRMWARE_IMAGE = 0x107
    INVALID_INTERRUPT_VECTOR = 0x108
    INVALID_LOG_PAGE = 0x109
    INVALID_FORMAT = 0x10A
    INVALID_QUEUE_DELETION = 0x10C
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F
    OVERLAPPING_RANGE = 0x114
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115
    NAMESPACE_ID_UNAVAILABLE = 0x116
    NAMESPACE_ALREADY_ATTACHED = 0x118
    NAMESPACE_IS_PRIVATE = 0x119
    NAMESPACE_NOT_ATTACHED = 0x11A
    CONTROLLER_LIST_INVALID = 0x11C
    INVALID_CONTROLLER_ID = 0x11F
    ANA_GROUP_ID_INVALID = 0x124
    ANA_ATTACH_FAILED = 0x125
    IO_COMMAND_SET_NOT_SUPPORTED = 0x129
    IO_COMMAND_SET_NOT_ENABLED = 0x12A
    IO_COMMAND_SET_INVALID = 0x12C
    CONFLICTING_ATTRIBUTES = 0x180
    INVALID_PROTECTION_INFO = 0x181
    WRITE_TO_READ_ONLY_RANGE = 0x182
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    GUARD_CHECK_ERROR = 0x282
    APPLICATION_TAG_CHECK_ERROR = 0x283
    REFERENCE_TAG_CHECK_ERROR = 0x284
    COMPARE_FAILURE = 0x285
    ACCESS_DENIED = 0x286
    DEALLOCATED_BLOCK = 0x287
    INTERNAL_PATH_ERROR = 0x300
    ANA_PERSISTENT_LOSS = 0x301
    ANA_INACCESSIBLE = 0x302
    ANA_TRANSITION = 0x303
    CONTROLLER_PATH_ERROR = 0x360
    HOST_PATH_ERROR = 0x370
    ABORTED_BY_HOST = 0x371


class FabricsStatus(enum.IntEnum):
    """Command specific status of Fabrics commands (Base figure 105)."""

    INCOMPATIBLE_FORMAT = 0x180
    CONTROLLER_BUSY = 0x181
    CONNECT_INVALID_PARAMETERS = 0x182
    CONNECT_RESTART_DISCOVERY = 0x183
    CONNECT_INVALID_HOST = 0x184
    INVALID_QUEUE_TYPE = 0x185
    DISCOVER_RESTART = 0x190
    AUTHENTICATION_REQUIRED = 0x191


STATUS_CODE_MASK = 0x7FF
STATUS_MORE = 1 << 13
STATUS_DNR = 1 << 14

_TYPE_NAMES = {0: "generic", 1: "command specific", 2: "media", 3: "path", 7: "vendor"}


def status_name(status: int, *, is_fabrics: bool = False) -> str:
    """Readable name of a status field (15 bits, as in ``Cqe.status``): ``lba out of range (00/80h)``."""
    code = status & STATUS_CODE_MASK
    sct, sc = code >> 8, code & 0xFF
    table: type[enum.IntEnum] = FabricsStatus if is_fabrics and sct == 1 and sc >= 0x80 else Status
    try:
        name = table(code).name.lower().replace("_", " ")
    except ValueError:
        name = f"{_TYPE_NAMES.get(sct, 'reserved')} status"
    return f"{name} ({sct:02x}/{sc:02x}h)"


def command_error(
    where: str,
    cqe_status: int,
    *,
    opcode: int,
    is_admin: bool,
    nsid: int = 0,
    slba: int = 0,
    detail: str = "",
) -> CommandError:
    """The exception for a failed command; ``cqe_status`` is the 15-bit status field."""
    code = cqe_status & STATUS_CODE_MASK
    text = status_name(cqe_status, is_fabrics=opcode == AdminOpcode.FABRICS)
    dnr = bool(cqe_status & STATUS_DNR)
    message = f"{where}: {opcode_name(opcode, is_admin=is_admin)}: {text}"
    if nsid:
        message += f", nsid {nsid}"
    if dnr:
        message += ", do not retry"
    if detail:
        message += f": {detail}"
    return CommandError(message, opcode=opcode, sct=code >> 8, sc=code & 0xFF, dnr=dnr, nsid=nsid, slba=slba)


@dataclass(frozen=True)
class Sqe(WireStruct):
    """Submission queue entry with one SGL descriptor (Base figure 92)."""

    SIZE: ClassVar[int] = SQE_BYTES

    opc: int = u8(0)
    flags: int = u8(1, PSDT_SGL)
    cid: int = u16(2)
    nsid: int = u32(4)
    cdw2: int = u32(8)
    cdw3: int = u32(12)
    mptr: int = u64(16)
    sgl_addr: int = u64(24)
    sgl_len: int = u32(32)
    sgl_type: int = u8(39, SGL_TRANSPORT)
    cdw10: int = u32(40)
    cdw11: int = u32(44)
    cdw12: int = u32(48)
    cdw13: int = u32(52)
    cdw14: int = u32(56)
    cdw15: int = u32(60)

    @property
    def fctype(self) -> int:
        """Fabrics command type, byte 4."""
        return self.nsid & 0xFF

    def with_transfer(self, byte_count: int, *, in_capsule: bool) -> Sqe:
        """The same command moving ``byte_count`` bytes, in its capsule or in data PDUs."""
        return replace(
            self,
            sgl_addr=0,
            sgl_len=byte_count,
            sgl_type=SGL_IN_CAPSULE if in_capsule else SGL_TRANSPORT,
        )


@dataclass(frozen=True)
class Cqe(WireStruct):
    """Completion queue entry (Base figure 96)."""

    SIZE: ClassVar[int] = CQE_BYTES

    dw0: int = u32(0)
    dw1: int = u32(4)
    sqhd: int = u16(8)
    sqid: int = u16(10)
    cid: int = u16(12)
    status_p: int = u16(14)

    @classmethod
    def of(
        cls, status: int = 0, *, cid: int, dw0: int = 0, dw1: int = 0, sqhd: int = 0, dnr: bool = False
    ) -> Cqe:
        """A completion with ``Status`` or ``FabricsStatus`` ``status``."""
        field = status | (STATUS_DNR if dnr else 0)
        return cls(dw0=dw0, dw1=dw1, sqhd=sqhd, cid=cid, status_p=field << 1)

    @property
    def status(self) -> int:
        """Status field, 15 bits: SC 7:0, SCT 10:8, CRD 12:11, more 13, DNR 14."""
        return self.status_p >> 1

    @property
    def sc(self) -> int:
        return self.status & 0xFF

    @property
    def sct(self) -> int:
        return (self.status >> 8) & 7

    @property
    def crd(self) -> int:
        """Command retry delay: 0 none, 1 to 3 index CRDT1 to CRDT3."""
        return (self.status >> 11) & 3

    @property
    def dnr(self) -> bool:
        return bool(self.status & STATUS_DNR)

    @property
    def is_success(self) -> bool:
        return self.status & STATUS_CODE_MASK == 0

    @property
    def result64(self) -> int:
        """DW0 and DW1 as one value (Property Get)."""
        return self.dw0 | self.dw1 << 32


# ---- Admin commands ----


@dataclass(frozen=True)
class IdentifyCommand:
    """Identify (Base 5.1.13): CNS chooses the structure, 4096 bytes come back."""

    DATA_BYTES: ClassVar[int] = 4096

    cns: int
    nsid: int = 0
    cntid: int = 0
    csi: int = 0
    cns_specific_id: int = 0

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        return Sqe(
            opc=AdminOpcode.IDENTIFY,
            cid=cid,
            nsid=self.nsid,
            sgl_len=self.DATA_BYTES,
            cdw10=self.cns | self.cntid << 16,
            cdw11=self.cns_specific_id | self.csi << 24,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> IdentifyCommand:
        return cls(
            cns=sqe.cdw10 & 0xFF,
            nsid=sqe.nsid,
            cntid=sqe.cdw10 >> 16,
            csi=sqe.cdw11 >> 24,
            cns_specific_id=sqe.cdw11 & 0xFFFF,
        )


@dataclass(frozen=True)
class GetLogPageCommand:
    """Get Log Page (Base 5.1.12): ``byte_count`` bytes from ``offset``, both dword multiples."""

    lid: int
    byte_count: int
    offset: int = 0
    nsid: int = NSID_ALL
    lsp: int = 0
    lsi: int = 0
    csi: int = 0
    retain_event: bool = False

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        if self.byte_count < 4 or self.byte_count % 4 or self.offset % 4:
            raise UsageError(
                f"get log page: expected byte_count and offset in dwords, got {self.byte_count} at {self.offset}"
            )
        numd = self.byte_count // 4 - 1
        return Sqe(
            opc=AdminOpcode.GET_LOG_PAGE,
            cid=cid,
            nsid=self.nsid,
            sgl_len=self.byte_count,
            cdw10=self.lid | self.lsp << 8 | int(self.retain_event) << 15 | (numd & 0xFFFF) << 16,
            cdw11=numd >> 16 | self.lsi << 16,
            cdw12=self.offset & 0xFFFFFFFF,
            cdw13=self.offset >> 32,
            cdw14=self.csi << 24,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> GetLogPageCommand:
        numd = sqe.cdw10 >> 16 | (sqe.cdw11 & 0xFFFF) << 16
        return cls(
            lid=sqe.cdw10 & 0xFF,
            byte_count=(numd + 1) * 4,
            offset=sqe.cdw12 | sqe.cdw13 << 32,
            nsid=sqe.nsid,
            lsp=(sqe.cdw10 >> 8) & 0x7F,
            lsi=sqe.cdw11 >> 16,
            csi=sqe.cdw14 >> 24,
            retain_event=bool(sqe.cdw10 & 1 << 15),
        )


@dataclass(frozen=True)
class FeaturesCommand:
    """Get Features or Set Features (Base 5.1.11, 5.1.25)."""

    fid: int
    is_set: bool
    nsid: int = 0
    value: int = 0
    """Set: DW11."""
    select: int = 0
    """Get: 0 current, 1 default, 2 saved, 3 supported capabilities."""
    save: bool = False
    cdw12: int = 0
    cdw13: int = 0
    byte_count: int = 0
    """Length of the data structure the feature has, 0 for most."""

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        return Sqe(
            opc=AdminOpcode.SET_FEATURES if self.is_set else AdminOpcode.GET_FEATURES,
            cid=cid,
            nsid=self.nsid,
            sgl_len=self.byte_count,
            cdw10=self.fid | (int(self.save) << 31 if self.is_set else self.select << 8),
            cdw11=self.value,
            cdw12=self.cdw12,
            cdw13=self.cdw13,
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> FeaturesCommand:
        is_set = sqe.opc == AdminOpcode.SET_FEATURES
        return cls(
            fid=sqe.cdw10 & 0xFF,
            is_set=is_set,
            nsid=sqe.nsid,
            value=sqe.cdw11,
            select=0 if is_set else (sqe.cdw10 >> 8) & 7,
            save=is_set and bool(sqe.cdw10 >> 31),
            cdw12=sqe.cdw12,
            cdw13=sqe.cdw13,
            byte_count=sqe.sgl_len,
        )


def build_keep_alive(*, cid: int = 0) -> Sqe:
    """Keep Alive (Base 5.1.14)."""
    return Sqe(opc=AdminOpcode.KEEP_ALIVE, cid=cid)


def build_async_event_request(*, cid: int = 0) -> Sqe:
    """Asynchronous Event Request (Base 5.1.2)."""
    return Sqe(opc=AdminOpcode.ASYNC_EVENT_REQUEST, cid=cid)


@dataclass(frozen=True)
class AbortCommand:
    """Abort (Base 5.1.1); bit 0 of the completion's DW0 set means not aborted."""

    sqid: int
    command_cid: int

    def to_sqe(self, *, cid: int = 0) -> Sqe:
        return Sqe(opc=AdminOpcode.ABORT, cid=cid, cdw10=self.sqid | self.command_cid << 16)

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> AbortCommand:
        return cls(sqid=sqe.cdw10 & 0xFFFF, command_cid=sqe.cdw10 >> 16)


class AsyncEventType(enum.IntEnum):
    ERROR = 0
    SMART = 1
    NOTICE = 2
    IMMEDIATE = 3
    ONE_SHOT = 4
    IO_COMMAND_SET = 6
    VENDOR = 7


class Notice(enum.IntEnum):
    """Information of AsyncEventType.NOTICE."""

    NAMESPACE_ATTRIBUTE = 0x00
    FIRMWARE_ACTIVATION = 0x01
    TELEMETRY = 0x02
    ANA_CHANGE = 0x03
    PREDICTABLE_LATENCY = 0x04
    LBA_STATUS = 0x05
    ENDURANCE_GROUP = 0x06
    DISCOVERY_LOG_CHANGE = 0xF0


RESERVATION_LOG_AVAILABLE = 0x00
"""Information of AsyncEventType.IO_COMMAND_SET."""


@dataclass(frozen=True)
class AsyncEvent:
    """DW0 of an Asynchronous Event Request's completion (Base figure 151)."""

    event_type: int
    info: int
    lid: int

    @classmethod
    def parse(cls, untrusted_dw0: int) -> AsyncEvent:
        return cls(
            event_type=untrusted_dw0 & 7, info=(untrusted_dw0 >> 8) & 0xFF, lid=(untrusted_dw0 >> 16) & 0xFF
        )

    def build(self) -> int:
        return self.event_type | self.info << 8 | self.lid << 16


# ---- NVM commands ----

NLB_COUNT_MAX = 65536
DSM_RANGE_BYTES = 16
DSM_RANGE_COUNT_MAX = 256
DSM_DEALLOCATE = 1 << 2
FUA = 1 << 30
FUSE_FIRST = 1 << 0
FUSE_SECOND = 1 << 1
"""SQE byte 1: the halves of a fused pair."""
WRITE_ZEROES_DEALLOCATE = 1 << 25
COPY_RANGE_BYTES = 32
COPY_RANGE_COUNT_MAX = 256


def build_read_write(
    opcode: int, *, nsid: int, slba: int, lba_count: int, byte_count: int, cid: int = 0, fua: bool = False
) -> Sqe:
    """Read, Write, Compare or (``byte_count`` 0) Write Zeroes or Verify of ``lba_count`` logical blocks."""
    if not 1 <= lba_count <= NLB_COUNT_MAX:
        raise UsageError(f"lba_count: expected 1 to {NLB_COUNT_MAX}, got {lba_count}")
    return Sqe(
        opc=opcode,
        cid=cid,
        nsid=nsid,
        sgl_len=byte_count,
        cdw10=slba & 0xFFFFFFFF,
        cdw11=slba >> 32,
        cdw12=(lba_count - 1) | (FUA if fua else 0),
    )


def build_flush(*, nsid: int, cid: int = 0) -> Sqe:
    """Flush (Base 7.2)."""
    return Sqe(opc=NvmOpcode.FLUSH, cid=cid, nsid=nsid)


@dataclass(frozen=True)
class DsmRange(WireStruct):
    """One range of Dataset Management (NVM 3.2.3)."""

    SIZE: ClassVar[int] = DSM_RANGE_BYTES

    context_attributes: int = u32(0)
    lba_count: int = u32(4)
    slba: int = u64(8)


def build_dsm_deallocate(*, nsid: int, range_count: int, cid: int = 0) -> Sqe:
    """Dataset Management, deallocate; the data is ``range_count`` DsmRange structures."""
    if not 1 <= range_count <= DSM_RANGE_COUNT_MAX:
        raise UsageError(f"range_count: expected 1 to {DSM_RANGE_COUNT_MAX}, got {range_count}")
    return Sqe(
        opc=NvmOpcode.DSM,
        cid=cid,
        nsid=nsid,
        sgl_len=range_count * DSM_RANGE_BYTES,
        cdw10=range_count - 1,
        cdw11=DSM_DEALLOCATE,
    )


@dataclass(frozen=True)
class CopyRange(WireStruct):
    """Source Range Entry of a Copy command, descriptor format 0 (NVM 3.2.2)."""

    SIZE: ClassVar[int] = COPY_RANGE_BYTES

    slba: int = u64(8)
    nlb_0based: int = u16(16)


def build_copy(*, nsid: int, slba: int, range_count: int, cid: int = 0, descriptor_format: int = 0) -> Sqe:
    """Copy to ``slba``; the data is ``range_count`` CopyRange structures."""
    if not 1 <= range_count <= COPY_RANGE_COUNT_MAX:
        raise UsageError(f"range_count: expected 1 to {COPY_RANGE_COUNT_MAX}, got {range_count}")
    return Sqe(
        opc=NvmOpcode.COPY,
        cid=cid,
        nsid=nsid,
        sgl_len=range_count * COPY_RANGE_BYTES,
        cdw10=slba & 0xFFFFFFFF,
        cdw11=slba >> 32,
        cdw12=range_count - 1 | descriptor_format << 8,
    )


def build_copy_ranges(ranges: Sequence[tuple[int, int]]) -> bytes:
    """The data of a Copy: (first block, block count) of each source."""
    return b"".join(CopyRange(slba=slba, nlb_0based=count - 1).build() for slba, count in ranges)
