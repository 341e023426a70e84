"""The directory of a volume: a place with two copies for each KV namespace's record.

A record is written to its copies in turn, so the one before it survives whatever happens to the write. Behind it each
place has a copy of the geometry, so that the namespace can be made anew when the member with its extent is lost.
Spec: docs/on-disk-format.md, KV namespace record.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError
from kvdev.native.crc import crc32c
from kvdev.native.index import media_error
from kvdev.store.extents import is_consistent
from kvdev.store.media import HEADER_SIZE_BYTES, MAGIC_RECORD, STRUCTURE_BYTES, UNIT_BYTES
from kvdev.store.superblock import Record, Superblock, build_record, parse_record
from kvdev.store.volume_io import MemberMask, VolumeIo

COPY_COUNT = 2
GEOMETRY_COPY_BYTES_MAX = UNIT_BYTES - STRUCTURE_BYTES
"""A larger geometry stands in its extent alone."""


@dataclass
class Place:
    """One record's place: the newest intact copy, and what is wrong with the others."""

    raw: tuple[bytes, ...] = ()
    """The first block of each copy, as read."""
    record: Record | None = None
    intact_count: int = 0
    problems: list[str] = field(default_factory=list)
    geometry_count: int = 0
    """How many copies of the geometry are intact; none in volumes made before there were any."""

    @property
    def is_doubtful(self) -> bool:
        """Whether a newer copy may have been lost: both are written when a record is made."""
        return self.intact_count < COPY_COUNT


class Directory:
    """Reads and writes records; the caller holds the lock that goes with what it writes."""

    def __init__(self, io: VolumeIo, superblock: Superblock) -> None:
        self._io = io
        self._superblock = superblock
        self._unit_blocks = UNIT_BYTES // io.block_size_bytes

    def slba_of(self, record_index: int, copy_index: int) -> int:
        return self._superblock.directory_slba[copy_index] + record_index * self._unit_blocks

    def read(self, record_index: int, deadline: Deadline) -> Place:
        """The record at one place, from both copies."""
        return self._judge(record_index, self._read_copies(record_index, self._unit_blocks, deadline))

    def read_raw(self, record_index: int, deadline: Deadline) -> list[bytes]:
        """The block of each copy."""
        return self._read_copies(record_index, 1, deadline)

    def _read_copies(self, record_index: int, block_count: int, deadline: Deadline) -> list[bytes]:
        runs = [(self.slba_of(record_index, copy), block_count) for copy in range(COPY_COUNT)]
        return [blocks.tobytes() for blocks in self._io.read_runs(runs, deadline)]

    def read_all(self, deadline: Deadline) -> list[Place]:
        """Every place, with one read per copy of the directory."""
        count = self._superblock.record_count
        runs = [(self.slba_of(0, copy), count * self._unit_blocks) for copy in range(COPY_COUNT)]
        regions = self._io.read_runs(runs, deadline)
        return [
            self._judge(index, [bytes(region[index * UNIT_BYTES :][:UNIT_BYTES]) for region in regions])
            for index in range(count)
        ]

    def _judge(self, record_index: int, units: list[bytes]) -> Place:
        place = Place(tuple(unit[: self._io.block_size_bytes] for unit in units))
        for copy_index, untrusted in enumerate(units):
            if not any(untrusted[:HEADER_SIZE_BYTES]):
                continue  # the common case, without an exception
            slba = self.slba_of(record_index, copy_index)
            what = f"record {record_index} copy {copy_index} at {self._io.where(slba)}"
            try:
                record = parse_record(
                    untrusted[:STRUCTURE_BYTES], what=what, volume_uuid=self._superblock.volume_uuid
                )
                if record.record_index != record_index:
                    raise CorruptionError(
                        f"{what}: index: expected {record_index}, got {record.record_index}"
                    )
            except CorruptionError as problem:
                if not _is_unused(untrusted, self._superblock.volume_uuid):
                    place.problems.append(str(problem))
                continue
            place.intact_count += 1
            if place.record is None or record.sequence > place.record.sequence:
                place.record = record
        if place.record is not None:
            copies = _geometry_copies(place.record, units)
            place.record = replace(place.record, geometry_copy=copies[0] if copies else b"")
            place.geometry_count = len(copies)
            if place.record.is_live and place.intact_count < COPY_COUNT and not place.problems:
                missing = 1 - place.record.sequence % COPY_COUNT
                where = self._io.where(self.slba_of(record_index, missing))
                place.problems.append(
                    f"record {record_index} copy {missing} at {where}: expected one of {place.record.name!r}, which "
                    f"has two, got nothing of this volume"
                )
        return place

    def write(self, record: Record, deadline: Deadline) -> MemberMask:
        """Write a record over the older copy; returns the members to flush before it is durable."""
        slba = self.slba_of(record.record_index, record.sequence % COPY_COUNT)
        return self._io.write(slba, self.build(record), deadline)

    def write_place(self, record: Record, deadline: Deadline) -> MemberMask:
        """As ``write``, with everything that stands behind the record, which changes with its geometry only."""
        slba = self.slba_of(record.record_index, record.sequence % COPY_COUNT)
        return self._io.write(slba, _build_place(record), deadline)

    def build(self, record: Record) -> bytes:
        """The block of a record's copy."""
        return _build_place(record)[: self._io.block_size_bytes]

    @property
    def can_compare(self) -> bool:
        """Whether the devices write a record only over what its writer expects."""
        return self._io.device.compare_and_write_blocks > 0

    def exchange(
        self, record: Record, *, expected: bytes, new: bytes, deadline: Deadline
    ) -> MemberMask | None:
        """Write a copy if it holds ``expected``; the members to flush, None if it holds something else, or cannot be
        compared."""
        if not self.can_compare:
            return None
        slba = self.slba_of(record.record_index, record.sequence % COPY_COUNT)
        return self._io.compare_and_write(slba, expected, new, deadline)

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        self._io.flush(members, deadline)

    def is_fenced(self, since_ns: int) -> bool:
        """Whether no write that was lost since then can take effect any more."""
        return self._io.is_fenced(since_ns)


def check_bounds(io: VolumeIo, record: Record, what: str) -> None:
    """Bounds that reading by the record relies on; its checksum is intact, so only a bug breaks them."""
    if not is_consistent(record, block_size_bytes=io.block_size_bytes, block_count=io.device.block_count):
        raise CorruptionError(f"{what}: record {record.record_index}: its extents contradict each other")


def _build_place(record: Record) -> bytes:
    copy = record.geometry_copy if len(record.geometry_copy) <= GEOMETRY_COPY_BYTES_MAX else b""
    return (build_record(record) + copy).ljust(UNIT_BYTES, b"\0")


def _geometry_copies(record: Record, untrusted: list[bytes]) -> list[bytes]:
    """The intact copies of a record's geometry in its place."""
    found = [unit[STRUCTURE_BYTES:][: record.geometry_size_bytes] for unit in untrusted]
    size_bytes = record.geometry_size_bytes
    return [data for data in found if len(data) == size_bytes > 0 and crc32c(data) == record.geometry_crc32c]


def _is_unused(untrusted: bytes, volume_uuid: bytes) -> bool:
    """Whether nothing of this volume was ever written there."""
    block = np.frombuffer(untrusted[:STRUCTURE_BYTES], dtype=np.uint8)
    return media_error(block, int.from_bytes(MAGIC_RECORD, "little"), volume_uuid) in ("magic", "uuid")
