"""The geometry of a KV namespace on media: its fields as JSON, covered by a checksum in the record.

It stands twice in the directory, behind the record's copies, and at the start of the namespace's extent.
Spec: docs/on-disk-format.md, Geometry.
Trust: reads untrusted bytes; raises only CorruptionError for bad ones.
"""

from __future__ import annotations

import functools
import json

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.store.media import UNIT_BYTES
from kvdev.store.superblock import RECORD_COUNT, Record
from kvdev.store.volume_io import VolumeIo


def build_geometry(geometry: Geometry) -> bytes:
    text = json.dumps(geometry.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    data = text.encode("ascii")
    if len(data) > UNIT_BYTES:
        raise UsageError(f"geometry: expected at most {UNIT_BYTES} bytes as JSON, got {len(data)}")
    return data


def read_geometry(io: VolumeIo, record: Record, *, what: str, deadline: Deadline) -> Geometry:
    """The geometry of a record, as it came with it or from its extent; refused unless bytes and fingerprint are its."""
    if record.geometry_copy:
        return _parse_geometry(record.geometry_copy, record, f"{what}: geometry behind the record")
    return read_extent_geometry(io, record, what=what, deadline=deadline)


def read_extent_geometry(io: VolumeIo, record: Record, *, what: str, deadline: Deadline) -> Geometry:
    """The geometry that stands at the start of the extent."""
    where = f"{what}: geometry at {io.where(record.geometry_slba)}"
    if record.geometry_size_bytes > UNIT_BYTES:
        raise CorruptionError(
            f"{where}: size: expected at most {UNIT_BYTES}, got {record.geometry_size_bytes}"
        )
    blocks = UNIT_BYTES // io.block_size_bytes
    data = io.read(record.geometry_slba, blocks, deadline)[: record.geometry_size_bytes].tobytes()
    actual = crc32c(data)
    if actual != record.geometry_crc32c:
        raise CorruptionError(
            f"{where}: checksum: expected 0x{record.geometry_crc32c:08x}, got 0x{actual:08x}",
            expected=record.geometry_crc32c,
            actual=actual,
        )
    return _parse_geometry(data, record, where)


def _parse_geometry(data: bytes, record: Record, where: str) -> Geometry:
    """From bytes whose checksum is the record's."""
    try:
        geometry, fingerprint = _parse(data)
    except (ValueError, TypeError) as problem:
        raise CorruptionError(f"{where}: {problem}") from problem
    if fingerprint != record.geometry_fingerprint:
        raise CorruptionError(
            f"{where}: fingerprint: expected {record.geometry_fingerprint.hex()}, got {fingerprint.hex()}"
        )
    return geometry


@functools.lru_cache(maxsize=RECORD_COUNT)
def _parse(data: bytes) -> tuple[Geometry, bytes]:
    """The geometry that these bytes always mean, and its fingerprint: opening asks more than once."""
    geometry = Geometry.from_dict(json.loads(data))
    return geometry, geometry.fingerprint()
