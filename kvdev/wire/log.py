"""Log pages: error, SMART, firmware slots, changed namespaces, effects, ANA, reservation, discovery.

Not here: the Get Log Page command and event DW0 (``nvme``).
Spec: NVM Express Base 2.2 sections 5.1.12.1, 5.1.12.3 (discovery), 8.1.1 (ANA), 8.3.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError and size nothing by a count
that the peer sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvdev.errors import UsageError
from kvdev.wire.layout import WireError, WireStruct, nqn, padded, parse_u32_list, raw, u8, u16, u32, u64, uint


class Lid(enum.IntEnum):
    SUPPORTED = 0x00
    ERROR = 0x01
    SMART = 0x02
    FIRMWARE_SLOT = 0x03
    CHANGED_NS = 0x04
    EFFECTS = 0x05
    ANA = 0x0C
    DISCOVERY = 0x70
    RESERVATION = 0x80


@dataclass(frozen=True)
class ErrorEntry(WireStruct):
    """Error Information log entry, page 01h (Base figure 206); ``error_count`` 0 is no entry."""

    SIZE: ClassVar[int] = 64

    error_count: int = u64(0)
    sqid: int = u16(8)
    cid: int = u16(10)
    status_p: int = u16(12)
    parameter_error_location: int = u16(14)
    lba: int = u64(16)
    nsid: int = u32(24)
    vendor_available: int = u8(28)
    trtype: int = u8(29)
    csi: int = u8(30)
    opcode: int = u8(31)
    command_specific: int = u64(32)
    transport_specific: int = u16(40)
    log_page_version: int = u8(63, 1)


def parse_error_log(untrusted: bytes | bytearray | memoryview) -> list[ErrorEntry]:
    """Entries of page 01h, newest first, up to the first that is empty."""
    found = []
    for at in range(0, len(untrusted) - ErrorEntry.SIZE + 1, ErrorEntry.SIZE):
        entry = ErrorEntry.parse(untrusted[at:])
        if entry.error_count == 0:
            break
        found.append(entry)
    return found


@dataclass(frozen=True)
class SmartLog(WireStruct):
    """SMART / Health Information, page 02h (Base figure 207)."""

    SIZE: ClassVar[int] = 512

    critical_warning: int = u8(0)
    composite_temperature_kelvin: int = u16(1)
    available_spare_percent: int = u8(3)
    available_spare_threshold_percent: int = u8(4)
    percentage_used: int = u8(5)
    endurance_group_critical_warning: int = u8(6)
    data_units_read: int = uint(32, 16)
    data_units_written: int = uint(48, 16)
    host_read_commands: int = uint(64, 16)
    host_write_commands: int = uint(80, 16)
    controller_busy_minutes: int = uint(96, 16)
    power_cycles: int = uint(112, 16)
    power_on_hours: int = uint(128, 16)
    unsafe_shutdowns: int = uint(144, 16)
    media_errors: int = uint(160, 16)
    error_log_entries: int = uint(176, 16)
    warning_temperature_minutes: int = u32(192)
    critical_temperature_minutes: int = u32(196)

    DATA_UNIT_BYTES: ClassVar[int] = 512_000
    """One data unit: a thousand units of 512 bytes."""


@dataclass(frozen=True)
class FirmwareSlotLog(WireStruct):
    """Firmware Slot Information, page 03h (Base figure 208)."""

    SIZE: ClassVar[int] = 512

    afi: int = u8(0, 1)
    frs1: str = padded(8, 8)
    frs2: str = padded(16, 8)
    frs3: str = padded(24, 8)
    frs4: str = padded(32, 8)
    frs5: str = padded(40, 8)
    frs6: str = padded(48, 8)
    frs7: str = padded(56, 8)

    @property
    def active_slot(self) -> int:
        return self.afi & 7


CHANGED_NS_BYTES = 4096
CHANGED_NS_OVERFLOW = 0xFFFFFFFF


@dataclass(frozen=True)
class ChangedNsLog:
    """Changed Attached Namespace list, page 04h; ``has_overflowed``: more than 1024, scan everything."""

    nsids: tuple[int, ...]
    has_overflowed: bool

    @classmethod
    def parse(cls, untrusted: bytes | bytearray | memoryview) -> ChangedNsLog:
        nsids = parse_u32_list(untrusted, count_max=CHANGED_NS_BYTES // 4)
        if nsids and nsids[0] == CHANGED_NS_OVERFLOW:
            return cls(nsids=(), has_overflowed=True)
        return cls(nsids=tuple(nsids), has_overflowed=False)

    def build(self) -> bytes:
        nsids = sorted(set(self.nsids))
        if self.has_overflowed or len(nsids) > CHANGED_NS_BYTES // 4:
            nsids = [CHANGED_NS_OVERFLOW]
        return b"".join(nsid.to_bytes(4, "little") for nsid in nsids).ljust(CHANGED_NS_BYTES, b"\0")


EFFECTS_BYTES = 4096
EFFECT_SUPPORTED = 1 << 0
EFFECT_LOGICAL_BLOCK_CHANGE = 1 << 1
EFFECT_NAMESPACE_CAPABILITY_CHANGE = 1 << 2
EFFECT_NAMESPACE_INVENTORY_CHANGE = 1 << 3
EFFECT_CONTROLLER_CAPABILITY_CHANGE = 1 << 4


@dataclass(frozen=True)
class EffectsLog:
    """Commands Supported and Effects, page 05h (Base figure 210): opcode to effects, absent = unsupported."""

    admin: dict[int, int]
    io: dict[int, int]

    @classmethod
    def parse(cls, untrusted: bytes | bytearray | memoryview) -> EffectsLog:
        if len(untrusted) < EFFECTS_BYTES:
            raise WireError(
                f"EffectsLog: expected {EFFECTS_BYTES} bytes, got {len(untrusted)}",
                field="acs",
                field_offset=len(untrusted),
            )
        data = bytes(untrusted[:2048])
        words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, 2048, 4)]
        return cls(
            admin={opcode: value for opcode, value in enumerate(words[:256]) if value & EFFECT_SUPPORTED},
            io={opcode: value for opcode, value in enumerate(words[256:]) if value & EFFECT_SUPPORTED},
        )

    def build(self) -> bytes:
        out = bytearray(EFFECTS_BYTES)
        for base, table in ((0, self.admin), (1024, self.io)):
            for opcode, value in table.items():
                out[base + 4 * opcode : base + 4 * opcode + 4] = value.to_bytes(4, "little")
        return bytes(out)


class AnaState(enum.IntEnum):
    OPTIMIZED = 0x1
    NON_OPTIMIZED = 0x2
    INACCESSIBLE = 0x3
    PERSISTENT_LOSS = 0x4
    CHANGE = 0xF


@dataclass(frozen=True)
class AnaGroup:
    """ANA Group Descriptor (Base figure 222)."""

    HEADER_BYTES: ClassVar[int] = 32

    anagrpid: int
    state: AnaState
    change_count: int = 0
    nsids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AnaLog:
    """Asymmetric Namespace Access, page 0Ch (Base figure 221)."""

    HEADER_BYTES: ClassVar[int] = 16

    change_count: int
    groups: tuple[AnaGroup, ...]

    @classmethod
    def parse(cls, untrusted: bytes | bytearray | memoryview, *, anagrpmax: int) -> AnaLog:
        """Check every group: id 1 to ``anagrpmax`` and not repeated, a defined state, sizes within
        what was read."""
        data = bytes(untrusted)
        if len(data) < cls.HEADER_BYTES:
            raise WireError(
                f"AnaLog: expected {cls.HEADER_BYTES} bytes, got {len(data)}",
                field="chgcnt",
                field_offset=len(data),
            )
        group_count = int.from_bytes(data[8:10], "little")
        groups: list[AnaGroup] = []
        seen: set[int] = set()
        at = cls.HEADER_BYTES
        for index in range(group_count):  # ends with the data at the latest
            group = cls._parse_group(data, at, index, anagrpmax)
            if group.anagrpid in seen:
                raise WireError(
                    f"AnaLog group {index} anagrpid+{at:#x}: {group.anagrpid} appears twice",
                    field="anagrpid",
                    field_offset=at,
                )
            seen.add(group.anagrpid)
            groups.append(group)
            at += AnaGroup.HEADER_BYTES + 4 * len(group.nsids)
        return cls(change_count=int.from_bytes(data[0:8], "little"), groups=tuple(groups))

    @staticmethod
    def _parse_group(data: bytes, at: int, index: int, anagrpmax: int) -> AnaGroup:
        def fault(field: str, offset: int, expected: str, got: object) -> WireError:
            return WireError(
                f"AnaLog group {index} {field}+{offset:#x}: expected {expected}, got {got}",
                field=field,
                field_offset=offset,
            )

        if at + AnaGroup.HEADER_BYTES > len(data):
            raise fault("anagrpid", at, f"{AnaGroup.HEADER_BYTES} bytes", len(data) - at)
        anagrpid = int.from_bytes(data[at : at + 4], "little")
        nsid_count = int.from_bytes(data[at + 4 : at + 8], "little")
        state = data[at + 16] & 0x0F
        if not 1 <= anagrpid <= anagrpmax:
            raise fault("anagrpid", at, f"1 to {anagrpmax}", anagrpid)
        if state not in AnaState._value2member_map_:
            raise fault("state", at + 16, "an ANA state", f"{state:#x}")
        first = at + AnaGroup.HEADER_BYTES
        if nsid_count > (len(data) - first) // 4:
            raise fault("nnsids", at + 4, f"at most {(len(data) - first) // 4}", nsid_count)
        return AnaGroup(
            anagrpid=anagrpid,
            state=AnaState(state),
            change_count=int.from_bytes(data[at + 8 : at + 16], "little"),
            nsids=tuple(
                int.from_bytes(data[first + 4 * i : first + 4 * i + 4], "little") for i in range(nsid_count)
            ),
        )

    def build(self) -> bytes:
        out = self.change_count.to_bytes(8, "little") + len(self.groups).to_bytes(2, "little") + bytes(6)
        for group in self.groups:
            out += group.anagrpid.to_bytes(4, "little")
            out += len(group.nsids).to_bytes(4, "little")
            out += group.change_count.to_bytes(8, "little")
            out += bytes([group.state]) + bytes(15)
            out += b"".join(nsid.to_bytes(4, "little") for nsid in group.nsids)
        return out


class ReservationNotice(enum.IntEnum):
    EMPTY = 0
    REGISTRATION_PREEMPTED = 1
    RESERVATION_RELEASED = 2
    RESERVATION_PREEMPTED = 3


@dataclass(frozen=True)
class ReservationLog(WireStruct):
    """Reservation Notification, page 80h (Base figure 290)."""

    SIZE: ClassVar[int] = 64

    log_page_count: int = u64(0)
    notice_type: int = u8(8)
    available_count: int = u8(9)
    nsid: int = u32(12)


# ---- discovery ----

DISCOVERY_HEADER_BYTES = 1024
DISCOVERY_ENTRY_BYTES = 1024
DISCOVERY_ENTRY_COUNT_MAX = 4096
"""Records we are willing to read from one discovery controller."""


class TransportType(enum.IntEnum):
    RDMA = 1
    FC = 2
    TCP = 3
    LOOP = 254


class AddressFamily(enum.IntEnum):
    IPV4 = 1
    IPV6 = 2
    IB = 3
    FC = 4
    LOOP = 254


class SubsystemType(enum.IntEnum):
    REFERRAL = 1
    NVM = 2
    CURRENT_DISCOVERY = 3


SECTYPE_TLS13 = 2
"""First byte of TSAS on TCP."""
TREQ_SQ_FLOW_CONTROL_OPTIONAL = 1 << 2
"""Hosts may connect without SQ flow control. With TSC 10b TREQ is 6, for which nvme-cli has no word."""
TREQ_AUTHENTICATION = 1 << 4
"""TASC 01b: hosts must authenticate, without a secure channel made of it (Base 2.1, figure 295)."""


class SecureChannel(enum.IntEnum):
    """TREQ bits 1:0, TSC."""

    NOT_SPECIFIED = 0
    REQUIRED = 1
    NOT_REQUIRED = 2


@dataclass(frozen=True)
class DiscoveryEntry(WireStruct):
    """Discovery log page entry (Base figure 295)."""

    SIZE: ClassVar[int] = DISCOVERY_ENTRY_BYTES

    trtype: int = u8(0, TransportType.TCP)
    adrfam: int = u8(1, AddressFamily.IPV4)
    subtype: int = u8(2, SubsystemType.NVM)
    treq: int = u8(3)
    portid: int = u16(4)
    cntlid: int = u16(6, 0xFFFF)
    asqsz: int = u16(8, 32)
    eflags: int = u16(10)
    trsvcid: str = padded(32, 32)
    subnqn: str = nqn(256)
    traddr: str = padded(512, 256)
    tsas: bytes = raw(768, 256)

    @property
    def sectype(self) -> int:
        """TCP: 0 no security, 1 TLS 1.2, 2 TLS 1.3 and later."""
        return self.tsas[0]

    @property
    def tsc(self) -> int:
        """TREQ bits 1:0: a ``SecureChannel``, or 3, which is reserved."""
        return self.treq & 3

    @property
    def tasc(self) -> int:
        """TREQ bits 5:4: 0 no authentication, 1 required, 2 required with a secure channel made of it."""
        return self.treq >> 4 & 3


@dataclass(frozen=True)
class DiscoveryHeader(WireStruct):
    """First 1024 bytes of page 70h (Base figure 294)."""

    SIZE: ClassVar[int] = DISCOVERY_HEADER_BYTES

    genctr: int = u64(0)
    numrec: int = u64(8)
    recfmt: int = u16(16)

    def check(self) -> DiscoveryHeader:
        """WireError for a record format we do not know or more records than anyone has."""
        if self.recfmt != 0:
            raise WireError(
                f"DiscoveryHeader recfmt+0x10: expected 0, got {self.recfmt}", field="recfmt", field_offset=16
            )
        if self.numrec > DISCOVERY_ENTRY_COUNT_MAX:
            raise WireError(
                f"DiscoveryHeader numrec+0x8: expected at most {DISCOVERY_ENTRY_COUNT_MAX}, got {self.numrec}",
                field="numrec",
                field_offset=8,
            )
        return self


def parse_discovery_entries(
    untrusted: bytes | bytearray | memoryview, *, entry_count: int
) -> list[DiscoveryEntry]:
    """``entry_count`` records that follow the header; WireError if fewer are there."""
    return [DiscoveryEntry.parse(untrusted[i * DISCOVERY_ENTRY_BYTES :]) for i in range(entry_count)]


def build_discovery_log(entries: Sequence[DiscoveryEntry], *, genctr: int) -> bytes:
    """The whole of page 70h."""
    header = DiscoveryHeader(genctr=genctr, numrec=len(entries)).build()
    return header + b"".join(entry.build() for entry in entries)


def build_supported_log(lids: Sequence[int]) -> bytes:
    """Supported Log Pages, page 00h: one dword per id, bit 0 says supported."""
    out = bytearray(1024)
    for lid in lids:
        if not 0 <= lid < 256:
            raise UsageError(f"log page id: expected 0 to 255, got {lid}")
        out[4 * lid] = 1
    return bytes(out)


def cut_log(page: bytes, *, offset: int, byte_count: int) -> bytes:
    """The part of a page a host asked for, zero filled past its end (Base 5.1.12)."""
    return page[offset : offset + byte_count].ljust(byte_count, b"\0")
