"""Structures on media: the 64-byte header they all start with, and the units they are placed in.

Spec: docs/on-disk-format.md.
Trust: arguments named ``untrusted`` come from a device; raises only CorruptionError for bad bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kvdev.errors import CorruptionError
from kvdev.native.index import media_error, seal

FORMAT_VERSION = 1
RECORD_VERSION = 2
"""Of records that say what version 1 does not know; others are written as version 1."""
RECORD_VERSION_CHECKSUM = 3
"""Of records whose pages have another checksum than CRC32C: who does not know it would take them for damaged."""
HEADER = struct.Struct("<8sHHIII16sQQQ")
HEADER_SIZE_BYTES = 64
assert HEADER.size == HEADER_SIZE_BYTES

UNIT_BYTES = 4096
"""Each label, superblock copy and record stands alone in a place of this size, so that no device
rewrites one of them with another."""
STRUCTURE_BYTES = 512
"""Size of a superblock copy and of a record: one logical block of every device."""
NAME_BYTES = 64

MAGIC_LABEL = b"KDEVVLBL"
MAGIC_SUPERBLOCK = b"KDEVVSBK"
MAGIC_RECORD = b"KDEVVREC"
MAGIC_TABLE = b"KDEVVTBL"
MAGIC_JOURNAL = b"KDEVVJRN"


@dataclass(frozen=True)
class MediaHeader:
    """What every structure says about itself; ``kvdev_media_header`` of the C core."""

    magic: bytes
    uuid: bytes
    index: int = 0
    count: int = 0
    sequence: int = 0
    epoch: int = 0
    durable_sequence: int = 0
    version: int = FORMAT_VERSION


def build_structure(header: MediaHeader, body: bytes, *, size_bytes: int) -> bytes:
    """Header and body, zero padded to ``size_bytes``, with the checksum filled in."""
    head = HEADER.pack(
        header.magic,
        header.version,
        header.count,
        size_bytes,
        0,
        header.index,
        header.uuid,
        header.sequence,
        header.epoch,
        header.durable_sequence,
    )
    raw = np.frombuffer((head + body).ljust(size_bytes, b"\0"), dtype=np.uint8).copy()
    assert raw.nbytes == size_bytes
    seal(raw, size_bytes)
    return bytes(raw)


def parse_structure(
    untrusted: bytes, *, magic: bytes, what: str, uuid: bytes | None = None
) -> tuple[MediaHeader, bytes]:
    """Header and body of an intact structure; CorruptionError says what is wrong with any other."""
    raw = np.frombuffer(untrusted, dtype=np.uint8)
    reason = media_error(raw, int.from_bytes(magic, "little"), uuid)
    if reason is not None:
        raise CorruptionError(f"{what}: {_explain(reason, untrusted, magic, uuid)}")
    _, version, count, size_bytes, _, index, owner, sequence, epoch, durable = HEADER.unpack_from(untrusted)
    header = MediaHeader(magic, owner, index, count, sequence, epoch, durable, version)
    return header, untrusted[HEADER_SIZE_BYTES:size_bytes]


def _explain(reason: str, untrusted: bytes, magic: bytes, uuid: bytes | None) -> str:
    if reason == "magic":
        return f"magic: expected {magic.decode()}, got {untrusted[:8].hex()}"
    if reason == "version":
        version = int.from_bytes(untrusted[8:10], "little")
        known = f"1 to {RECORD_VERSION_CHECKSUM}" if magic == MAGIC_RECORD else f"{FORMAT_VERSION}"
        return f"version: expected {known}, got {version}; use a kvdev that knows version {version}"
    if reason == "uuid" and uuid is not None:
        return f"uuid: expected {uuid.hex()}, got {untrusted[24:40].hex()}"
    return f"{reason}: the structure is damaged"


def pack_name(name: str) -> bytes:
    return name.encode().ljust(NAME_BYTES, b"\0")


def unpack_name(untrusted: bytes) -> str:
    return untrusted.rstrip(b"\0").decode(errors="replace")
