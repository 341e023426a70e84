"""The journal of one KV namespace: a ring of blocks, each a run of records in gapless sequence.

Not here: when a record may be written (``namespace``); the records themselves (csrc/index.h).
Spec: docs/on-disk-format.md, Journal.
Trust: ``replay`` reads untrusted blocks; a block that is not the next one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdev.block.device import aligned_buffer
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CorruptionError
from kvdev.native.index import (
    ENTRY_DTYPE,
    MEDIA_HEADER_DTYPE,
    EntryArray,
    entries_per_block,
    media_error,
    seal,
)
from kvdev.native.io import OPCODE_WRITE
from kvdev.store.media import FORMAT_VERSION, HEADER_SIZE_BYTES, MAGIC_JOURNAL
from kvdev.store.quarantine import Quarantine, is_fate_unknown
from kvdev.store.superblock import Record
from kvdev.store.volume_io import MemberMask, VolumeIo


@dataclass
class ReplayReport:
    """What a replay found."""

    record_count: int = 0
    block_count: int = 0


@dataclass(frozen=True)
class JournalBlock:
    """One intact block in its turn."""

    records: EntryArray
    sequence: int
    durable_sequence: int

    @property
    def end_sequence(self) -> int:
        """The sequence behind its last record."""
        return self.sequence + len(self.records)


@dataclass(frozen=True)
class JournalGap:
    """Where the next block should be and is not, and up to which record there had been more."""

    position: int
    slba: int
    sequence: int
    last_sequence: int
    reason: str

    @property
    def record_count(self) -> int:
        return self.last_sequence - self.sequence + 1


def durable_mark(record: Record, blocks: Sequence[JournalBlock]) -> int:
    """The newest record known to be durable: by the table's tail, by the lease's renewal, or by a later block."""
    return max(
        record.tail_sequence - 1, record.durable_sequence, *(block.durable_sequence for block in blocks), 0
    )


def _is_of_its_turn(header: np.void, record: Record, first_sequence: int) -> bool:
    """Whether a block is of the epoch that its sequence belongs to, and not of a journal that an owner left behind."""
    sequence, epoch = int(header["sequence"]), int(header["epoch"])
    return sequence >= first_sequence and (epoch < record.epoch) == (sequence < record.epoch_first_sequence)


FOLLOW_PIECE_BLOCKS = 16
"""Read at once by those who follow: a commit is a block or a few."""


class Journal:
    """Where the next block goes, what sequence it has, and where the tail is.

    Positions run from 0 to ``block_count`` − 1 and wrap. The blocks from tail to head hold what the table
    on media may not include; one block always stays unused, so that head equal to tail means empty.
    """

    def __init__(self, io: VolumeIo, record: Record) -> None:
        """A journal that is empty at the record's tail; ``replay`` moves the head."""
        self._io = io
        self._slba = record.journal_slba
        self._uuid = record.namespace_uuid
        self.block_count = record.journal_block_count
        self.records_per_block = entries_per_block(io.block_size_bytes)
        self.head_position = self.tail_position = record.tail_position
        self.next_sequence = self.tail_sequence = record.tail_sequence
        self.durable_sequence = record.tail_sequence - 1
        self.is_uncertain = False
        self.quarantine = Quarantine(io.is_fenced)

    @property
    def used_blocks(self) -> int:
        return (self.head_position - self.tail_position) % self.block_count

    @property
    def room_blocks(self) -> int:
        """Blocks that can be appended: up to the tail, or to a block that a lost write may still reach."""
        room = self.block_count - 1 - self.used_blocks
        if len(self.quarantine):
            self.quarantine.release()
            ahead = [(place - self.head_position) % self.block_count for place in self.quarantine]
            room = min([room, *ahead])
        return room

    def pass_quarantine(self) -> None:
        """Move the head off blocks that must not be written; ``restart`` has to follow."""
        for _ in range(self.block_count):
            if self.head_position not in self.quarantine:
                return
            self.head_position = (self.head_position + 1) % self.block_count

    def blocks_for(self, record_count: int) -> int:
        return -(-record_count // self.records_per_block)

    def read(self, deadline: Deadline) -> npt.NDArray[np.uint8]:
        """The whole ring, one sequential read."""
        return self._io.read(self._slba, self.block_count, deadline)

    def replay(
        self,
        image: npt.NDArray[np.uint8],
        record: Record,
        apply: Callable[[EntryArray, int], bool],
        *,
        is_record_doubtful: bool,
        limit_sequence: int | None = None,
    ) -> ReplayReport:
        """Apply the blocks from the tail on, as long as each is the next one; the head stops behind them.

        Raises CorruptionError when the ring is younger than the record: then the record is an old copy,
        and what it calls the tail has been overwritten.

        Args:
            limit_sequence: the last record to apply; all if None.
        """
        report = ReplayReport()
        for block in self._chain(
            lambda position: self._block_of(image, position), record, is_record_doubtful=is_record_doubtful
        ):
            if limit_sequence is not None and block.end_sequence > limit_sequence + 1:
                break
            if not apply(block.records, block.sequence):
                break
            report.record_count += len(block.records)
            report.block_count += 1
            self._take(block)
        return report

    def follow(self, record: Record, apply: Callable[[EntryArray, int], bool], deadline: Deadline) -> int:
        """Apply what another owner has made durable since; returns how many records. Reads only new blocks."""
        pieces: dict[int, npt.NDArray[np.uint8]] = {}

        def block_at(position: int) -> npt.NDArray[np.uint8]:
            piece, within = divmod(position, FOLLOW_PIECE_BLOCKS)
            if piece not in pieces:
                start = piece * FOLLOW_PIECE_BLOCKS
                count = min(FOLLOW_PIECE_BLOCKS, self.block_count - start)
                pieces[piece] = self._io.read(self._slba + start, count, deadline)
            return self._block_of(pieces[piece], within)

        blocks = list(self._chain(block_at, record, is_record_doubtful=False))
        durable = durable_mark(record, blocks)
        count = 0
        for block in blocks:
            if block.end_sequence > durable + 1 or not apply(block.records, block.sequence):
                break
            count += len(block.records)
            self._take(block)
        return count

    def durable_mark(self, image: npt.NDArray[np.uint8], record: Record) -> int:
        """The newest record that the ring, or the namespace's record, says is durable."""
        chain = self._chain(
            lambda position: self._block_of(image, position), record, is_record_doubtful=False
        )
        return durable_mark(record, list(chain))

    def find_gap(self, image: npt.NDArray[np.uint8], record: Record) -> JournalGap | None:
        """Whether replay ended before records that had been durable: by what the blocks behind, and the record, say.

        Also where the block at the end is the next one but for its checksum: a block is written whole or not at all.
        """
        position, expected = self.head_position, self.next_sequence
        durable, magic = record.durable_sequence, int.from_bytes(MAGIC_JOURNAL, "little")
        for index in range(self.block_count):
            block = self._block_of(image, index)
            if media_error(block, magic, self._uuid) is not None:
                continue
            header = block[:HEADER_SIZE_BYTES].view(MEDIA_HEADER_DTYPE)[0]
            if int(header["index"]) != index and _is_of_its_turn(header, record, expected):
                durable = max(
                    durable, int(header["sequence"]) + int(header["count"]) - 1
                )  # it changed places
            elif _is_of_its_turn(header, record, expected + 1):
                durable = max(durable, int(header["durable_sequence"]))
        block = self._block_of(image, position)
        header = block[:HEADER_SIZE_BYTES].view(MEDIA_HEADER_DTYPE)[0]
        reason = media_error(block, magic, self._uuid)
        # One of another UUID is what a namespace before this one left there.
        is_ours = header["uuid"].tobytes() == self._uuid and int(header["sequence"]) == expected
        if reason == "checksum" and is_ours and _is_of_its_turn(header, record, expected):
            durable = max(durable, expected + max(1, min(int(header["count"]), self.records_per_block)) - 1)
        if durable < expected:
            return None
        return JournalGap(position, self._slba + position, expected, durable, reason or "another block")

    def _block_of(self, image: npt.NDArray[np.uint8], index: int) -> npt.NDArray[np.uint8]:
        return image[index * self._io.block_size_bytes :][: self._io.block_size_bytes]

    def _chain(
        self,
        block_at: Callable[[int], npt.NDArray[np.uint8]],
        record: Record,
        *,
        is_record_doubtful: bool,
    ) -> Iterator[JournalBlock]:
        """The intact blocks from the head on, each the next one; moves nothing."""
        position, next_sequence, previous_epoch = self.head_position, self.next_sequence, 0
        for _ in range(self.block_count - 1):
            block = block_at(position)
            reason = media_error(block, int.from_bytes(MAGIC_JOURNAL, "little"), self._uuid)
            if reason is not None:
                return
            header = block[:HEADER_SIZE_BYTES].view(MEDIA_HEADER_DTYPE)[0]
            sequence, epoch, count = int(header["sequence"]), int(header["epoch"]), int(header["count"])
            if epoch > record.epoch or (is_record_doubtful and sequence > next_sequence):
                raise CorruptionError(
                    f"journal position {position} at {self._io.where(self._slba + position)}: epoch {epoch}, sequence "
                    f"{sequence} are younger than the record's epoch {record.epoch}, tail "
                    f"{record.tail_sequence}: the record's newer copy is lost"
                )
            if (
                int(header["index"]) != position
                or sequence != next_sequence
                or epoch < previous_epoch
                or (epoch < record.epoch) != (sequence < record.epoch_first_sequence)
                or not 1 <= count <= self.records_per_block
            ):
                return
            end = HEADER_SIZE_BYTES + count * ENTRY_DTYPE.itemsize
            yield JournalBlock(
                block[HEADER_SIZE_BYTES:end].view(ENTRY_DTYPE), sequence, int(header["durable_sequence"])
            )
            position, next_sequence, previous_epoch = (
                (position + 1) % self.block_count,
                sequence + count,
                epoch,
            )

    def _take(self, block: JournalBlock) -> None:
        self._advance(1, len(block.records))

    def _advance(self, block_count: int, record_count: int) -> None:
        self.head_position = (self.head_position + block_count) % self.block_count
        self.next_sequence += record_count

    def append(self, records: EntryArray, *, epoch: int, deadline: Deadline) -> MemberMask:
        """Write the records to the next blocks; returns the members to flush before they are durable.

        The head moves in any case: after a failure the blocks hold nobody knows what, and
        ``is_uncertain`` is set until ``restart``.
        """
        count = self.blocks_for(len(records))
        assert count <= self.room_blocks, "a commit never finds the journal full"
        blocks = self._build(records, epoch)
        position = self.head_position
        self._advance(count, len(records))
        self.is_uncertain = True
        sent_ns = SYSTEM_CLOCK.monotonic_ns()
        before_wrap = min(count, self.block_count - position)
        block_bytes = self._io.block_size_bytes
        try:
            members = self._io.transfer(
                OPCODE_WRITE, self._slba + position, blocks[: before_wrap * block_bytes], deadline
            )
            if before_wrap < count:
                rest = blocks[before_wrap * block_bytes :]
                members = members | self._io.transfer(OPCODE_WRITE, self._slba, rest, deadline)
        except BaseException as error:
            if is_fate_unknown(error):
                places = ((position + step) % self.block_count for step in range(count))
                self.quarantine.add(places, since_ns=sent_ns)
            raise
        return members

    def confirm(self) -> None:
        """What was appended is durable."""
        self.is_uncertain = False
        self.durable_sequence = self.next_sequence - 1

    def restart(self, tail_position: int, tail_sequence: int) -> None:
        """The table on media includes everything before this tail, and a durable record says so."""
        self.tail_position = tail_position
        self.tail_sequence = tail_sequence
        self.durable_sequence = max(self.durable_sequence, tail_sequence - 1)
        if tail_position == self.head_position:
            self.is_uncertain = False

    def _build(self, records: EntryArray, epoch: int) -> npt.NDArray[np.uint8]:
        count = self.blocks_for(len(records))
        block_bytes = self._io.block_size_bytes
        raw = aligned_buffer(count * block_bytes)
        blocks = raw.reshape(count, block_bytes)
        room = self.records_per_block * ENTRY_DTYPE.itemsize
        padded = np.zeros(count * self.records_per_block, dtype=ENTRY_DTYPE)
        padded[: len(records)] = records
        blocks[:, HEADER_SIZE_BYTES : HEADER_SIZE_BYTES + room] = padded.view(np.uint8).reshape(count, room)
        headers = np.zeros(count, dtype=MEDIA_HEADER_DTYPE)
        step = np.arange(count, dtype=np.uint64)
        headers["magic"] = int.from_bytes(MAGIC_JOURNAL, "little")
        headers["version"] = FORMAT_VERSION
        headers["count"] = self.records_per_block
        headers["count"][-1] = len(records) - (count - 1) * self.records_per_block
        headers["size_bytes"] = block_bytes
        headers["index"] = (np.uint64(self.head_position) + step) % np.uint64(self.block_count)
        headers["uuid"] = np.frombuffer(self._uuid, dtype=np.uint8)
        headers["sequence"] = np.uint64(self.next_sequence) + step * np.uint64(self.records_per_block)
        headers["epoch"] = epoch
        headers["durable_sequence"] = self.durable_sequence
        blocks[:, :HEADER_SIZE_BYTES] = headers.view(np.uint8).reshape(count, HEADER_SIZE_BYTES)
        seal(raw, block_bytes)
        return raw
