"""Reservation commands, their data, and the report.

Not here: which of them succeed (``kvdev.target.reservation``); the notification log page (``log``).
Spec: NVM Express Base 2.3 sections 7.5 to 7.8, 8.1.24.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError and size nothing by a count it sent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kvdev.errors import UsageError
from kvdev.wire.layout import WireError, WireStruct, raw, u8, u16, u64
from kvdev.wire.nvme import NvmOpcode, Sqe

IEKEY = 1 << 3
REPORT_HEADER_BYTES = 64
REGISTRANT_BYTES = 64
REGISTRANT_COUNT_MAX = 0xFFFF
CNTLID_NONE = 0xFFFD
"""In a report: the registrant is associated with no controller."""


class RegisterAction(enum.IntEnum):
    REGISTER = 0
    UNREGISTER = 1
    REPLACE = 2


class AcquireAction(enum.IntEnum):
    ACQUIRE = 0
    PREEMPT = 1
    PREEMPT_AND_ABORT = 2


class ReleaseAction(enum.IntEnum):
    RELEASE = 0
    CLEAR = 1


class ChangePtpl(enum.IntEnum):
    """CPTPL: what becomes of the Persist Through Power Loss state."""

    KEEP = 0
    OFF = 2
    ON = 3


@dataclass(frozen=True)
class KeyPair(WireStruct):
    """The data of Register (CRKEY, NRKEY) and Acquire (CRKEY, PRKEY)."""

    SIZE: ClassVar[int] = 16

    current: int = u64(0)
    other: int = u64(8)


@dataclass(frozen=True)
class OneKey(WireStruct):
    """The data of Release (CRKEY)."""

    SIZE: ClassVar[int] = 8

    current: int = u64(0)


@dataclass(frozen=True)
class RegisterCommand:
    """Reservation Register (Base 7.6); its data is ``KeyPair(current key, new key)``. Actions may be reserved ones."""

    action: int
    ignores_existing_key: bool = False
    change_ptpl: int = ChangePtpl.KEEP

    def to_sqe(self, *, nsid: int) -> Sqe:
        cdw10 = self.action | (IEKEY if self.ignores_existing_key else 0) | self.change_ptpl << 30
        return Sqe(opc=NvmOpcode.RESERVATION_REGISTER, nsid=nsid, sgl_len=KeyPair.SIZE, cdw10=cdw10)

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> RegisterCommand:
        return cls(
            action=sqe.cdw10 & 7,
            ignores_existing_key=bool(sqe.cdw10 & IEKEY),
            change_ptpl=sqe.cdw10 >> 30,
        )


@dataclass(frozen=True)
class AcquireCommand:
    """Reservation Acquire (Base 7.5); its data is ``KeyPair(current key, key to preempt)``."""

    action: int
    rtype: int
    ignores_existing_key: bool = False

    def to_sqe(self, *, nsid: int) -> Sqe:
        cdw10 = self.action | (IEKEY if self.ignores_existing_key else 0) | self.rtype << 8
        return Sqe(opc=NvmOpcode.RESERVATION_ACQUIRE, nsid=nsid, sgl_len=KeyPair.SIZE, cdw10=cdw10)

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> AcquireCommand:
        return cls(
            action=sqe.cdw10 & 7,
            rtype=sqe.cdw10 >> 8 & 0xFF,
            ignores_existing_key=bool(sqe.cdw10 & IEKEY),
        )


@dataclass(frozen=True)
class ReleaseCommand:
    """Reservation Release (Base 7.7); its data is ``OneKey(current key)``."""

    action: int
    rtype: int = 0
    ignores_existing_key: bool = False

    def to_sqe(self, *, nsid: int) -> Sqe:
        cdw10 = self.action | (IEKEY if self.ignores_existing_key else 0) | self.rtype << 8
        return Sqe(opc=NvmOpcode.RESERVATION_RELEASE, nsid=nsid, sgl_len=OneKey.SIZE, cdw10=cdw10)

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> ReleaseCommand:
        return cls(
            action=sqe.cdw10 & 7,
            rtype=sqe.cdw10 >> 8 & 0xFF,
            ignores_existing_key=bool(sqe.cdw10 & IEKEY),
        )


@dataclass(frozen=True)
class ReportCommand:
    """Reservation Report (Base 7.8) of ``byte_count`` bytes; ``is_extended`` for 128-bit host identifiers."""

    byte_count: int
    is_extended: bool = True

    def to_sqe(self, *, nsid: int) -> Sqe:
        if self.byte_count < 4 or self.byte_count % 4:
            raise UsageError(f"reservation report: expected byte_count in dwords, got {self.byte_count}")
        return Sqe(
            opc=NvmOpcode.RESERVATION_REPORT,
            nsid=nsid,
            sgl_len=self.byte_count,
            cdw10=self.byte_count // 4 - 1,
            cdw11=int(self.is_extended),
        )

    @classmethod
    def from_sqe(cls, sqe: Sqe) -> ReportCommand:
        return cls(byte_count=(sqe.cdw10 + 1) * 4, is_extended=bool(sqe.cdw11 & 1))


@dataclass(frozen=True)
class RegistrantEntry(WireStruct):
    """Registrant Extended data structure (Base figure 618)."""

    SIZE: ClassVar[int] = REGISTRANT_BYTES

    cntlid: int = u16(0)
    rcsts: int = u8(2)
    rkey: int = u64(8)
    hostid: bytes = raw(16, 16)

    @property
    def is_holder(self) -> bool:
        return bool(self.rcsts & 1)


@dataclass(frozen=True)
class ReservationReport:
    """Extended Reservation Status data structure (Base figure 616); ``registrants`` are those that fitted."""

    generation: int
    rtype: int
    registrant_count: int
    is_ptpl: bool
    registrants: tuple[RegistrantEntry, ...] = ()

    @classmethod
    def parse(cls, untrusted: bytes | bytearray | memoryview) -> ReservationReport:
        """Read the header and the whole entries that follow it, no more than it announces."""
        data = bytes(untrusted)
        if len(data) < REPORT_HEADER_BYTES:
            raise WireError(
                f"ReservationReport: expected {REPORT_HEADER_BYTES} bytes, got {len(data)}",
                field="ReservationReport",
                field_offset=len(data),
            )
        announced = int.from_bytes(data[5:7], "little")
        fitting = (len(data) - REPORT_HEADER_BYTES) // REGISTRANT_BYTES
        return cls(
            generation=int.from_bytes(data[0:4], "little"),
            rtype=data[4],
            registrant_count=announced,
            is_ptpl=bool(data[9] & 1),
            registrants=tuple(
                RegistrantEntry.parse(data[REPORT_HEADER_BYTES + at * REGISTRANT_BYTES :])
                for at in range(min(announced, fitting))
            ),
        )

    def build(self) -> bytes:
        out = bytearray(REPORT_HEADER_BYTES)
        out[0:4] = (self.generation & 0xFFFFFFFF).to_bytes(4, "little")
        out[4] = self.rtype
        out[5:7] = self.registrant_count.to_bytes(2, "little")
        out[9] = int(self.is_ptpl)
        return bytes(out) + b"".join(entry.build() for entry in self.registrants)
