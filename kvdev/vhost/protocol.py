"""vhost-user messages and the virtio block configuration as bytes; no I/O.

Spec: the vhost-user protocol of QEMU; Virtual I/O Device 1.2, sections 2.7 and 5.2.
Trust: arguments named ``untrusted`` come from the back end; raises only ProtocolError for bad ones.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from kvdev.errors import ProtocolError

HEADER = struct.Struct("<III")
HEADER_SIZE_BYTES = 12
assert HEADER.size == HEADER_SIZE_BYTES
PAYLOAD_SIZE_BYTES_MAX = 4096
"""More than any message has: bounds what a back end can make us read."""
VERSION = 1
FLAGS_VERSION = 0x3
FLAG_REPLY = 1 << 2
FLAG_NEED_REPLY = 1 << 3

U64 = struct.Struct("<Q")
VRING_STATE = struct.Struct("<II")
VRING_ADDR = struct.Struct("<IIQQQQ")
MEM_HEAD = struct.Struct("<II")
MEM_REGION = struct.Struct("<QQQQ")
CONFIG_HEAD = struct.Struct("<III")
INFLIGHT = struct.Struct("<QQHH4x")
VRING_INDEX_MASK = 0xFF
CONFIG_SIZE_BYTES = 60
"""``struct virtio_blk_config`` up to its write zeroes fields (Virtio 1.2 section 5.2.4)."""
_CONFIG = struct.Struct("<QIIHBBIBBHIBBHIIIIIB3x")
assert _CONFIG.size == CONFIG_SIZE_BYTES


class Request(enum.IntEnum):
    """Messages of the front end."""

    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18
    SET_BACKEND_REQ_FD = 21
    GET_CONFIG = 24
    GET_INFLIGHT_FD = 31
    SET_INFLIGHT_FD = 32
    RESET_DEVICE = 34


class BackendRequest(enum.IntEnum):
    """Messages of the back end, on its own channel."""

    CONFIG_CHANGE_MSG = 2


class ProtocolFeature(enum.IntFlag):
    """Protocol features that this front end knows how to use."""

    MQ = 1 << 0
    REPLY_ACK = 1 << 3
    BACKEND_REQ = 1 << 5
    CONFIG = 1 << 9
    INFLIGHT_SHMFD = 1 << 12
    RESET_DEVICE = 1 << 13


class Feature(enum.IntFlag):
    """Device features that this front end knows how to use (Virtio 1.2 sections 5.2.3 and 6)."""

    SIZE_MAX = 1 << 1
    SEG_MAX = 1 << 2
    RO = 1 << 5
    BLK_SIZE = 1 << 6
    FLUSH = 1 << 9
    TOPOLOGY = 1 << 10
    MQ = 1 << 12
    DISCARD = 1 << 13
    WRITE_ZEROES = 1 << 14
    INDIRECT_DESC = 1 << 28
    EVENT_IDX = 1 << 29
    PROTOCOL_FEATURES = 1 << 30
    VERSION_1 = 1 << 32


FEATURES_KNOWN = (
    Feature.SIZE_MAX
    | Feature.SEG_MAX
    | Feature.RO
    | Feature.BLK_SIZE
    | Feature.FLUSH
    | Feature.TOPOLOGY
    | Feature.MQ
    | Feature.DISCARD
    | Feature.WRITE_ZEROES
    | Feature.INDIRECT_DESC
    | Feature.EVENT_IDX
    | Feature.PROTOCOL_FEATURES
    | Feature.VERSION_1
)
"""CONFIG_WCE is left alone: without it a device that has FLUSH keeps a write-back cache (5.2.5.2), whatever the
back end's ``writeback`` field says, and we flush."""

PROTOCOL_FEATURES_KNOWN = (
    ProtocolFeature.MQ
    | ProtocolFeature.REPLY_ACK
    | ProtocolFeature.BACKEND_REQ
    | ProtocolFeature.CONFIG
    | ProtocolFeature.INFLIGHT_SHMFD
    | ProtocolFeature.RESET_DEVICE
)


@dataclass(frozen=True)
class MessageHead:
    """The 12 bytes that every message starts with."""

    request: int
    flags: int
    size_bytes: int

    @property
    def is_reply(self) -> bool:
        return bool(self.flags & FLAG_REPLY)

    @property
    def needs_reply(self) -> bool:
        return bool(self.flags & FLAG_NEED_REPLY)


def build_message(request: int, payload: bytes = b"", *, flags: int = 0) -> bytes:
    return HEADER.pack(request, VERSION | flags, len(payload)) + payload


def parse_head(untrusted: bytes) -> MessageHead:
    """The head of a message; ProtocolError when the version or the size cannot be."""
    if len(untrusted) != HEADER_SIZE_BYTES:
        raise ProtocolError(f"message: expected {HEADER_SIZE_BYTES} bytes of head, got {len(untrusted)}")
    request, flags, size_bytes = HEADER.unpack(untrusted)
    if flags & FLAGS_VERSION != VERSION:
        raise ProtocolError(f"message flags+0x4: expected version {VERSION}, got 0x{flags:08x}")
    if size_bytes > PAYLOAD_SIZE_BYTES_MAX:
        raise ProtocolError(
            f"message size+0x8: expected at most {PAYLOAD_SIZE_BYTES_MAX} bytes, got {size_bytes}"
        )
    return MessageHead(request, flags, size_bytes)


def name_of(request: int) -> str:
    """A message's name in errors."""
    try:
        return Request(request).name
    except ValueError:
        return f"request {request}"


def parse_u64(untrusted: bytes, *, what: str) -> int:
    if len(untrusted) != U64.size:
        raise ProtocolError(f"{what} reply: expected {U64.size} bytes, got {len(untrusted)}")
    return int(U64.unpack(untrusted)[0])


@dataclass(frozen=True)
class MemoryRegion:
    """One shared region as a memory table names it; addresses of descriptors are addresses of ours."""

    address: int
    size_bytes: int
    fd_offset: int


def build_mem_table(regions: list[MemoryRegion]) -> bytes:
    """Payload of SET_MEM_TABLE; the descriptors travel beside it in the same order."""
    return MEM_HEAD.pack(len(regions), 0) + b"".join(
        MEM_REGION.pack(region.address, region.size_bytes, region.address, region.fd_offset)
        for region in regions
    )


@dataclass(frozen=True)
class Inflight:
    """The shared buffer in which a back end notes what it has in flight."""

    size_bytes: int
    offset: int
    queue_count: int
    queue_size: int

    def build(self) -> bytes:
        return INFLIGHT.pack(self.size_bytes, self.offset, self.queue_count, self.queue_size)

    @classmethod
    def parse(cls, untrusted: bytes) -> Inflight:
        # The structure ends at a multiple of its alignment; a back end that packs it leaves the last 4 bytes out.
        if not INFLIGHT.size - 4 <= len(untrusted) <= INFLIGHT.size:
            raise ProtocolError(
                f"GET_INFLIGHT_FD reply: expected {INFLIGHT.size} bytes, got {len(untrusted)}"
            )
        return cls(*INFLIGHT.unpack(untrusted.ljust(INFLIGHT.size, b"\0")))


@dataclass(frozen=True)
class BlkConfig:
    """``struct virtio_blk_config``; fields whose feature is not negotiated mean nothing."""

    capacity_sectors: int
    size_max: int
    seg_max: int
    blk_size: int
    min_io_size_blocks: int
    opt_io_size_blocks: int
    queue_count: int
    max_discard_sectors: int
    max_discard_seg: int
    discard_sector_alignment: int
    max_write_zeroes_sectors: int
    max_write_zeroes_seg: int
    write_zeroes_may_unmap: bool

    @classmethod
    def parse(cls, untrusted: bytes) -> BlkConfig:
        """Of the whole GET_CONFIG payload: offset, size and flags, then the configuration.

        A short answer is an older device: what it does not have reads as 0.
        """
        if len(untrusted) < CONFIG_HEAD.size + 8:
            raise ProtocolError(
                f"GET_CONFIG reply: expected at least {CONFIG_HEAD.size + 8} bytes, got {len(untrusted)}"
            )
        body = untrusted[CONFIG_HEAD.size :][:CONFIG_SIZE_BYTES].ljust(CONFIG_SIZE_BYTES, b"\0")
        values = _CONFIG.unpack(body)
        return cls(
            capacity_sectors=values[0],
            size_max=values[1],
            seg_max=values[2],
            blk_size=values[6],
            min_io_size_blocks=values[9],
            opt_io_size_blocks=values[10],
            queue_count=values[13],
            max_discard_sectors=values[14],
            max_discard_seg=values[15],
            discard_sector_alignment=values[16],
            max_write_zeroes_sectors=values[17],
            max_write_zeroes_seg=values[18],
            write_zeroes_may_unmap=bool(values[19]),
        )

    def build(self) -> bytes:
        """The configuration alone, as a back end has it."""
        return _CONFIG.pack(
            self.capacity_sectors,
            self.size_max,
            self.seg_max,
            0,
            0,
            0,
            self.blk_size,
            0,
            0,
            self.min_io_size_blocks,
            self.opt_io_size_blocks,
            0,
            0,
            self.queue_count,
            self.max_discard_sectors,
            self.max_discard_seg,
            self.discard_sector_alignment,
            self.max_write_zeroes_sectors,
            self.max_write_zeroes_seg,
            int(self.write_zeroes_may_unmap),
        )


def build_get_config() -> bytes:
    return CONFIG_HEAD.pack(0, CONFIG_SIZE_BYTES, 0) + bytes(CONFIG_SIZE_BYTES)
