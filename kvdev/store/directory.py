"""The directory of a volume: a place with two copies for each KV namespace's record.

Spec: docs/on-disk-format.md, Directory. A record is written to its copies in turn, so the one before it
survives whatever happens to the write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError
from kvdev.native.index import media_error
from kvdev.store.media import HEADER_SIZE_BYTES, MAGIC_RECORD, STRUCTURE_BYTES, UNIT_BYTES
from kvdev.store.superblock import Record, Superblock, build_record, parse_record
from kvdev.store.volume_io import MemberMask, VolumeIo

COPY_COUNT = 2


@dataclass
class Place:
    """One record's place: the newest intact copy, and what is wrong with the others."""

    raw: tuple[bytes, ...] = ()
    """The first block of each copy, as read."""
    record: Record | None = None
    intact_count: int = 0
    problems: list[str] = field(default_factory=list)

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
        return self._judge(record_index, self.read_raw(record_index, deadline))

    def read_raw(self, record_index: int, deadline: Deadline) -> list[bytes]:
        """The block of each copy."""
        return [
            self._io.read(self.slba_of(record_index, copy), 1, deadline).tobytes()
            for copy in range(COPY_COUNT)
        ]

    def read_all(self, deadline: Deadline) -> list[Place]:
        """Every place, with one read per copy of the directory."""
        count = self._superblock.record_count
        regions = [
            self._io.read(self.slba_of(0, copy), count * self._unit_blocks, deadline)
            for copy in range(COPY_COUNT)
        ]
        block = self._io.block_size_bytes
        return [
            self._judge(index, [bytes(region[index * UNIT_BYTES :][:block]) for region in regions])
            for index in range(count)
        ]

    def _judge(self, record_index: int, copies: list[bytes]) -> Place:
        place = Place(tuple(copies))
        for copy_index, untrusted in enumerate(copies):
            if not any(untrusted[:HEADER_SIZE_BYTES]):
                continue  # the common case, without an exception
            slba = self.slba_of(record_index, copy_index)
            what = f"record {record_index} copy {copy_index} at LBA {slba}"
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
        return place

    def write(self, record: Record, deadline: Deadline) -> MemberMask:
        """Write a record over the older copy; returns the members to flush before it is durable."""
        slba = self.slba_of(record.record_index, record.sequence % COPY_COUNT)
        return self._io.write(slba, build_record(record), deadline)

    def build(self, record: Record) -> bytes:
        """The block of a record's copy."""
        return build_record(record).ljust(self._io.block_size_bytes, b"\0")

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


def _is_unused(untrusted: bytes, volume_uuid: bytes) -> bool:
    """Whether nothing of this volume was ever written there."""
    block = np.frombuffer(untrusted[:STRUCTURE_BYTES], dtype=np.uint8)
    return media_error(block, int.from_bytes(MAGIC_RECORD, "little"), volume_uuid) in ("magic", "uuid")
