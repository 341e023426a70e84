"""Identify data structures, 4096 bytes each.

Not here: the Identify command (``nvme``); what to do with the values (``kvdev.initiator``, ``kvdev.target``).
Spec: NVM Express Base 2.2 section 5.1.13; NVM Command Set 1.0 section 4.1.5.
Trust: ``untrusted`` bytes come from a peer; parsers raise only WireError.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvdev.errors import UsageError
from kvdev.wire.layout import WireError, WireStruct, nqn, padded, parse_u32_list, raw, u8, u16, u32, u64, uint
from kvdev.wire.nvme import NSID_ALL

IDENTIFY_BYTES = 4096
NSID_LIST_COUNT = 1024
LBA_FORMAT_COUNT = 64


class Cns(enum.IntEnum):
    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NSID_LIST = 0x02
    NS_DESCRIPTOR_LIST = 0x03
    CSI_NAMESPACE = 0x05
    CSI_CONTROLLER = 0x06
    CSI_ACTIVE_NSID_LIST = 0x07
    CSI_INDEPENDENT_NAMESPACE = 0x08
    ALLOCATED_NSID_LIST = 0x10
    ALLOCATED_NAMESPACE = 0x11
    IO_COMMAND_SET_LIST = 0x1C


class Csi(enum.IntEnum):
    NVM = 0
    KEY_VALUE = 1
    ZONED = 2


class ControllerType(enum.IntEnum):
    NOT_REPORTED = 0
    IO = 1
    DISCOVERY = 2
    ADMIN = 3


OACS_NAMESPACE_MANAGEMENT = 1 << 3
ONCS_COMPARE = 1 << 0
ONCS_DSM = 1 << 2
ONCS_WRITE_ZEROES = 1 << 3
ONCS_SAVE_FEATURES = 1 << 4
ONCS_RESERVATIONS = 1 << 5
ONCS_VERIFY = 1 << 7
ONCS_COPY = 1 << 8
RESCAP_PTPL = 1 << 0
RESCAP_TYPES = 0x7E
"""All six types."""
RESCAP_IEKEY_1_3 = 1 << 7
"""Ignore Existing Key as since revision 1.3."""
CDFS_FORMAT_0 = 1 << 0
FUSES_COMPARE_AND_WRITE = 1 << 0
VWC_PRESENT = 1 << 0
VWC_FLUSH_ALL_NSID = 3 << 1
"""Flush with NSID FFFFFFFFh is supported (bits 2:1 = 11b)."""
CMIC_MULTI_PORT = 1 << 0
CMIC_MULTI_CONTROLLER = 1 << 1
CMIC_ANA = 1 << 3
OAES_NAMESPACE_ATTRIBUTE = 1 << 8
OAES_FIRMWARE_ACTIVATION = 1 << 9
OAES_ANA_CHANGE = 1 << 11
OAES_DISCOVERY_CHANGE = 1 << 31
CTRATT_HOSTID_128 = 1 << 0
CTRATT_TBKAS = 1 << 6
CTRATT_ELBAS = 1 << 15
LPA_SMART_PER_NAMESPACE = 1 << 0
LPA_EFFECTS = 1 << 1
LPA_EXTENDED = 1 << 2
SGLS_SUPPORTED = 1 << 0
SGLS_OFFSET = 1 << 20
SGLS_TRANSPORT = 1 << 21
ANACAP_STATES = 0x1F
NMIC_SHARED = 1 << 0
NSFEAT_THIN = 1 << 0
NSFEAT_ATOMIC = 1 << 1
NSFEAT_OPTPERF = 1 << 4
FLBAS_EXTENDED_LBA = 1 << 4
NSTAT_NRDY = 1 << 0


@dataclass(frozen=True)
class IdentifyController(WireStruct):
    """Identify Controller, CNS 01h (Base figure 313)."""

    SIZE: ClassVar[int] = IDENTIFY_BYTES

    vid: int = u16(0)
    ssvid: int = u16(2)
    sn: str = padded(4, 20)
    mn: str = padded(24, 40)
    fr: str = padded(64, 8)
    rab: int = u8(72)
    ieee: bytes = raw(73, 3)
    cmic: int = u8(76)
    mdts: int = u8(77)
    cntlid: int = u16(78)
    ver: int = u32(80)
    rtd3r_us: int = u32(84)
    rtd3e_us: int = u32(88)
    oaes: int = u32(92)
    ctratt: int = u32(96)
    rrls: int = u16(100)
    cntrltype: int = u8(111)
    fguid: bytes = raw(112, 16)
    crdt1_100ms: int = u16(128)
    crdt2_100ms: int = u16(130)
    crdt3_100ms: int = u16(132)
    oacs: int = u16(256)
    acl_0based: int = u8(258)
    aerl_0based: int = u8(259)
    frmw: int = u8(260)
    lpa: int = u8(261)
    elpe_0based: int = u8(262)
    npss_0based: int = u8(263)
    avscc: int = u8(264)
    wctemp_kelvin: int = u16(266)
    cctemp_kelvin: int = u16(268)
    tnvmcap: int = uint(280, 16)
    unvmcap: int = uint(296, 16)
    kas_100ms: int = u16(320)
    sanicap: int = u32(328)
    nsetidmax: int = u16(338)
    endgidmax: int = u16(340)
    anatt_s: int = u8(342)
    anacap: int = u8(343)
    anagrpmax: int = u32(344)
    nanagrpid: int = u32(348)
    domain_id: int = u16(356)
    cqt_ms: int = u16(386)
    sqes: int = u8(512)
    cqes: int = u8(513)
    maxcmd: int = u16(514)
    nn: int = u32(516)
    oncs: int = u16(520)
    fuses: int = u16(522)
    fna: int = u8(524)
    vwc: int = u8(525)
    awun_0based: int = u16(526)
    awupf_0based: int = u16(528)
    icsvscc: int = u8(530)
    nwpc: int = u8(531)
    acwu_0based: int = u16(532)
    cdfs: int = u16(534)
    sgls: int = u32(536)
    mnan: int = u32(540)
    subnqn: str = nqn(768)
    ioccsz_16b: int = u32(1792)
    iorcsz_16b: int = u32(1796)
    icdoff_16b: int = u16(1800)
    fcatt: int = u8(1802)
    msdbd: int = u8(1803)
    ofcs: int = u16(1804)
    dctype: int = u8(1806)

    @property
    def has_volatile_cache(self) -> bool:
        return bool(self.vwc & VWC_PRESENT)

    @property
    def in_capsule_bytes_max(self) -> int:
        """In-capsule data an I/O command may carry: IOCCSZ in bytes less the SQE (TCP 3.3.1)."""
        return max(0, self.ioccsz_16b * 16 - 64)

    def max_transfer_bytes(self, page_size_bytes_min: int) -> int:
        """MDTS in bytes, 0 for no limit; ``page_size_bytes_min`` is CAP.MPSMIN's. A shift beyond
        64 bits is as good as no limit."""
        return 0 if self.mdts == 0 or self.mdts > 40 else page_size_bytes_min << self.mdts


@dataclass(frozen=True)
class LbaFormat:
    """LBA format data structure: metadata size, data size as a power of two, relative performance."""

    ms: int = 0
    lbads: int = 9
    rp: int = 0

    @property
    def block_size_bytes(self) -> int:
        return 1 << self.lbads if self.lbads < 64 else 0


@dataclass(frozen=True)
class IdentifyNamespace(WireStruct):
    """Identify Namespace of the NVM command set, CNS 00h (NVM figure 97)."""

    SIZE: ClassVar[int] = IDENTIFY_BYTES

    nsze: int = u64(0)
    ncap: int = u64(8)
    nuse: int = u64(16)
    nsfeat: int = u8(24)
    nlbaf_0based: int = u8(25)
    flbas: int = u8(26)
    mc: int = u8(27)
    dpc: int = u8(28)
    dps: int = u8(29)
    nmic: int = u8(30)
    rescap: int = u8(31)
    fpi: int = u8(32)
    dlfeat: int = u8(33)
    nawun_0based: int = u16(34)
    nawupf_0based: int = u16(36)
    nacwu_0based: int = u16(38)
    nabsn_0based: int = u16(40)
    nabo: int = u16(42)
    nabspf_0based: int = u16(44)
    noiob: int = u16(46)
    nvmcap: int = uint(48, 16)
    npwg_0based: int = u16(64)
    npwa_0based: int = u16(66)
    npdg_0based: int = u16(68)
    npda_0based: int = u16(70)
    nows_0based: int = u16(72)
    mssrl: int = u16(74)
    mcl: int = u32(76)
    msrc_0based: int = u8(80)
    nulbaf: int = u8(82)
    anagrpid: int = u32(92)
    nsattr: int = u8(99)
    nvmsetid: int = u16(100)
    endgid: int = u16(102)
    nguid: bytes = raw(104, 16)
    eui64: bytes = raw(120, 8)
    lbaf: tuple[LbaFormat, ...] = (LbaFormat(),)
    """All formats; as many as NLBAF and NULBAF say, at most 64."""

    @classmethod
    def _parse_rest(cls, untrusted: bytes) -> dict[str, Any]:
        count = min(untrusted[25] + 1 + untrusted[82], LBA_FORMAT_COUNT)
        formats = []
        for index in range(count):
            value = int.from_bytes(untrusted[128 + 4 * index : 132 + 4 * index], "little")
            formats.append(LbaFormat(ms=value & 0xFFFF, lbads=value >> 16 & 0xFF, rp=value >> 24 & 3))
        return {"lbaf": tuple(formats)}

    def _build_rest(self, out: bytearray) -> None:
        if len(self.lbaf) > LBA_FORMAT_COUNT:
            raise UsageError(
                f"IdentifyNamespace lbaf: expected at most {LBA_FORMAT_COUNT}, got {len(self.lbaf)}"
            )
        for index, item in enumerate(self.lbaf):
            value = item.ms | item.lbads << 16 | item.rp << 24
            out[128 + 4 * index : 132 + 4 * index] = value.to_bytes(4, "little")

    @property
    def lba_format_index(self) -> int:
        """Index of the format in use: FLBAS bits 3:0, and 6:5 above them when there are more than 16."""
        index = self.flbas & 0x0F
        if self.nlbaf_0based + 1 + self.nulbaf > 16:
            index |= (self.flbas >> 5 & 3) << 4
        return index

    @property
    def lba_format(self) -> LbaFormat:
        """The format in use; WireError if FLBAS names one that is not there."""
        index = self.lba_format_index
        if index >= len(self.lbaf):
            raise WireError(
                f"IdentifyNamespace flbas+0x1a: expected a format below {len(self.lbaf)}, got {index}",
                field="flbas",
                field_offset=26,
            )
        return self.lbaf[index]

    @property
    def is_present(self) -> bool:
        """An inactive or absent namespace reads as all zero."""
        return self.ncap != 0


class NidType(enum.IntEnum):
    EUI64 = 1
    NGUID = 2
    UUID = 3
    CSI = 4


NID_BYTES = {NidType.EUI64: 8, NidType.NGUID: 16, NidType.UUID: 16, NidType.CSI: 1}


@dataclass(frozen=True)
class NsDescriptorList:
    """Namespace Identification Descriptor list, CNS 03h (Base figure 315); None where not reported."""

    eui64: bytes | None = None
    nguid: bytes | None = None
    uuid: uuid.UUID | None = None
    csi: int | None = None

    @classmethod
    def parse(cls, untrusted: bytes | bytearray | memoryview) -> NsDescriptorList:
        """Read descriptors up to NIDL 0; one whose length does not fit its type, or that leaves the
        structure, is a WireError. Unknown types are skipped, of a repeated one the first counts."""
        data = bytes(untrusted[:IDENTIFY_BYTES])
        found: dict[NidType, bytes] = {}
        at = 0
        while at + 4 <= len(data):
            nidt, nidl = data[at], data[at + 1]
            if nidl == 0:
                break
            if at + 4 + nidl > len(data):
                raise WireError(
                    f"NsDescriptorList nidl+{at + 1:#x}: expected at most {len(data) - at - 4} bytes, got {nidl}",
                    field="nidl",
                    field_offset=at + 1,
                )
            if nidt in NID_BYTES:
                kind = NidType(nidt)
                if nidl != NID_BYTES[kind]:
                    raise WireError(
                        f"NsDescriptorList nidl+{at + 1:#x}: expected {NID_BYTES[kind]} bytes for "
                        f"{kind.name}, got {nidl}",
                        field="nidl",
                        field_offset=at + 1,
                    )
                found.setdefault(kind, data[at + 4 : at + 4 + nidl])
            at += 4 + nidl
        return cls(
            eui64=found.get(NidType.EUI64),
            nguid=found.get(NidType.NGUID),
            uuid=uuid.UUID(bytes=found[NidType.UUID]) if NidType.UUID in found else None,
            csi=found[NidType.CSI][0] if NidType.CSI in found else None,
        )

    def build(self) -> bytes:
        out = b""
        values = (
            (NidType.EUI64, self.eui64),
            (NidType.NGUID, self.nguid),
            (NidType.UUID, None if self.uuid is None else self.uuid.bytes),
            (NidType.CSI, None if self.csi is None else bytes([self.csi])),
        )
        for kind, value in values:
            if value is None:
                continue
            if len(value) != NID_BYTES[kind]:
                raise UsageError(
                    f"NsDescriptorList {kind.name.lower()}: expected {NID_BYTES[kind]} bytes, got {len(value)}"
                )
            out += bytes((kind, len(value), 0, 0)) + value
        return out.ljust(IDENTIFY_BYTES, b"\0")


def parse_nsid_list(untrusted: bytes | bytearray | memoryview, *, after_nsid: int = 0) -> list[int]:
    """Active namespace ids, CNS 02h, 07h or 10h: up to 1024 above ``after_nsid``, in rising order.

    An order that does not rise is a WireError: a caller continuing from the last id would loop for ever.
    """
    if len(untrusted) < IDENTIFY_BYTES:
        raise WireError(
            f"nsid list: expected {IDENTIFY_BYTES} bytes, got {len(untrusted)}",
            field="nsid",
            field_offset=len(untrusted),
        )
    nsids = parse_u32_list(untrusted, count_max=NSID_LIST_COUNT)
    last = after_nsid
    for index, nsid in enumerate(nsids):
        if nsid <= last or nsid == NSID_ALL:
            raise WireError(
                f"nsid list+{4 * index:#x}: expected an id above {last}, got {nsid}",
                field="nsid",
                field_offset=4 * index,
            )
        last = nsid
    return nsids


def build_nsid_list(nsids: Iterable[int], *, after_nsid: int = 0) -> bytes:
    """The first 1024 of ``nsids`` above ``after_nsid``, as a controller answers."""
    chosen = sorted(nsid for nsid in nsids if nsid > after_nsid)[:NSID_LIST_COUNT]
    return b"".join(nsid.to_bytes(4, "little") for nsid in chosen).ljust(IDENTIFY_BYTES, b"\0")


@dataclass(frozen=True)
class CsiNamespaceNvm(WireStruct):
    """I/O command set specific Identify Namespace of the NVM command set, CNS 05h (NVM figure 100)."""

    SIZE: ClassVar[int] = IDENTIFY_BYTES

    lbstm: int = u64(0)
    pic: int = u8(8)
    pifa: int = u8(9)
    elbaf: tuple[int, ...] = (0,) * LBA_FORMAT_COUNT
    """Extended LBA formats: STS in 6:0, protection information format in 8:7."""

    @classmethod
    def _parse_rest(cls, untrusted: bytes) -> dict[str, Any]:
        return {
            "elbaf": tuple(
                int.from_bytes(untrusted[at : at + 4], "little")
                for at in range(12, 12 + 4 * LBA_FORMAT_COUNT, 4)
            )
        }

    def _build_rest(self, out: bytearray) -> None:
        if len(self.elbaf) > LBA_FORMAT_COUNT:
            raise UsageError(
                f"CsiNamespaceNvm elbaf: expected at most {LBA_FORMAT_COUNT}, got {len(self.elbaf)}"
            )
        for index, value in enumerate(self.elbaf):
            out[12 + 4 * index : 16 + 4 * index] = value.to_bytes(4, "little")


@dataclass(frozen=True)
class CsiControllerNvm(WireStruct):
    """I/O command set specific Identify Controller of the NVM command set, CNS 06h (NVM figure 101).
    Size limits are powers of two in units of the minimum page size; 0 is no limit reported."""

    SIZE: ClassVar[int] = IDENTIFY_BYTES

    vsl: int = u8(0)
    wzsl: int = u8(1)
    wusl: int = u8(2)
    dmrl: int = u8(3)
    dmrsl: int = u32(4)
    dmsl: int = u64(8)


@dataclass(frozen=True)
class CsiIndependentNamespace(WireStruct):
    """I/O command set independent Identify Namespace, CNS 08h (Base figure 320)."""

    SIZE: ClassVar[int] = IDENTIFY_BYTES

    nsfeat: int = u8(0)
    nmic: int = u8(1)
    rescap: int = u8(2)
    fpi: int = u8(3)
    anagrpid: int = u32(4)
    nsattr: int = u8(8)
    nvmsetid: int = u16(10)
    endgid: int = u16(12)
    nstat: int = u8(14, NSTAT_NRDY)

    @property
    def is_ready(self) -> bool:
        return bool(self.nstat & NSTAT_NRDY)


def parse_io_command_set_list(untrusted: bytes | bytearray | memoryview) -> list[int]:
    """I/O command set combinations, CNS 1Ch: one bit mask of CSIs per combination, up to the first 0."""
    if len(untrusted) < IDENTIFY_BYTES:
        raise WireError(
            f"I/O command set list: expected {IDENTIFY_BYTES} bytes, got {len(untrusted)}",
            field="iocsc",
            field_offset=len(untrusted),
        )
    data = bytes(untrusted[:IDENTIFY_BYTES])
    found = []
    for at in range(0, IDENTIFY_BYTES, 8):
        value = int.from_bytes(data[at : at + 8], "little")
        if value == 0:
            break
        found.append(value)
    return found


def build_io_command_set_list(combinations: Sequence[int]) -> bytes:
    """The data structure of CNS 1Ch from bit masks of CSIs."""
    return b"".join(value.to_bytes(8, "little") for value in combinations).ljust(IDENTIFY_BYTES, b"\0")
