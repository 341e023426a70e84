"""Data-only access to pages: reads and writes the slots of grants, knows no keys and no table.

Not here: which slot holds what (``namespace``).
Threads: as the devices' queue, which serialises batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdev.block.device import aligned_buffer
from kvdev.clock import Deadline
from kvdev.errors import KvdevError, UsageError
from kvdev.native.checksum import CRC32C, PageChecksum, SumArray, checksum_numbered
from kvdev.native.index import (
    OUTCOME_FAILED,
    OUTCOME_UNKNOWN,
    GrantArray,
    copy_many,
)
from kvdev.native.io import OPCODE_READ, OPCODE_WRITE, address_of
from kvdev.store.extents import SlotMap, slot_map_of
from kvdev.store.superblock import Record
from kvdev.store.volume_io import ExtentResult, MemberMask, VolumeIo

Uint64Array = npt.NDArray[np.uint64]

TAIL_BUFFER_BYTES_MAX = 16 << 20
"""Bounce buffers for the last, partial block of pages: 4096 pages at once."""


@dataclass(frozen=True)
class PageResult:
    """What became of each page of a batch."""

    error: npt.NDArray[np.int32]
    """−errno, 0 for success."""
    sums: SumArray
    """Checksum of the page's bytes where asked for and where the page did not fail."""
    outcome: npt.NDArray[np.uint8]
    """OUTCOME_WRITTEN, OUTCOME_FAILED or OUTCOME_UNKNOWN: the owner's ``commit`` takes it."""
    members: MemberMask
    """Members that were touched; after a write they need a flush."""
    failure: KvdevError | None
    """The first page's error as an exception."""


class PageIo:
    """Moves whole pages between memory and slots."""

    def __init__(
        self, io: VolumeIo, slots: SlotMap, *, page_size_bytes: int, checksum: PageChecksum = CRC32C
    ) -> None:
        self._io = io
        self._slots = slots
        self.page_size_bytes = page_size_bytes
        self.checksum = checksum
        self._whole_blocks = page_size_bytes // io.block_size_bytes
        self._tail_bytes = page_size_bytes % io.block_size_bytes

    def all_members(self) -> MemberMask:
        """A mask of every member."""
        return self._io.all_members()

    def read(
        self,
        grants: GrantArray,
        addresses: Uint64Array,
        *,
        deadline: Deadline,
        wants_sums: bool = True,
        may_copy: bool = False,
    ) -> PageResult:
        """Read each grant's page to its address; the bytes at a failed page's address are undefined.

        ``may_copy`` is for checks that read into memory no device shares.
        """
        return self._run(
            OPCODE_READ, grants, addresses, deadline=deadline, wants_sums=wants_sums, may_copy=may_copy
        )

    def read_slot(
        self, slot_index: int, buffer: npt.NDArray[np.uint8], *, piece_bytes: int, deadline: Deadline
    ) -> None:
        """Read a whole slot into ``buffer``, one piece after the other: who wants the devices waits for one.

        Raises the first error.
        """
        block_bytes = self._io.block_size_bytes
        assert buffer.nbytes == self.slot_size_bytes and 0 <= slot_index < self._slots.slot_count
        slot_slba = int(self._slots.slbas(np.array([slot_index]))[0])
        for first in range(0, self._slots.slot_blocks, max(1, piece_bytes // block_bytes)):
            part = buffer[first * block_bytes :][: max(1, piece_bytes // block_bytes) * block_bytes]
            self._io.transfer(OPCODE_READ, slot_slba + first, part, deadline)

    @property
    def slot_size_bytes(self) -> int:
        """A page and what its last block has behind it."""
        return self._slots.slot_blocks * self._io.block_size_bytes

    def write(
        self, grants: GrantArray, addresses: Uint64Array, *, deadline: Deadline, wants_sums: bool = True
    ) -> PageResult:
        """Write each page to its grant's slot; the pages must not change until this returns."""
        return self._run(OPCODE_WRITE, grants, addresses, deadline=deadline, wants_sums=wants_sums)

    def _run(
        self,
        opcode: int,
        grants: GrantArray,
        addresses: Uint64Array,
        *,
        deadline: Deadline,
        wants_sums: bool,
        may_copy: bool = False,
    ) -> PageResult:
        if len(grants) != len(addresses):
            raise UsageError(f"pages: expected one per grant, got {len(addresses)} for {len(grants)} grants")
        slba = self._slots.locate(grants)
        if self._tail_bytes:
            return self._run_with_tails(
                opcode, slba, addresses, deadline=deadline, wants_sums=wants_sums, may_copy=may_copy
            )
        result = self._io.run(
            opcode,
            slba,
            np.full(len(slba), self._whole_blocks, dtype=np.uint64),
            addresses,
            deadline=deadline,
            # The core sums pages as they come; others are looked at once more when all are there.
            crc_bytes=self.page_size_bytes if wants_sums and self.checksum is CRC32C else 0,
            blocks_total=len(slba) * self._whole_blocks,
            may_copy=may_copy,
        )
        sums: SumArray = result.groups["crc32c"].copy()
        if self.checksum is not CRC32C:
            sums = self.checksum.zeros(len(slba))
            if wants_sums:
                sums = self.checksum.sums(np.ascontiguousarray(addresses), self.page_size_bytes)
        return self._page_result(result, sums)

    def _run_with_tails(
        self,
        opcode: int,
        slba: Uint64Array,
        addresses: Uint64Array,
        *,
        deadline: Deadline,
        wants_sums: bool,
        may_copy: bool,
    ) -> PageResult:
        """Pages that end within a block: that block goes through a buffer, so no byte past a page is touched.

        The copy is of less than a block per page; the checksum is computed when the page is whole.
        """
        block = self._io.block_size_bytes
        piece = TAIL_BUFFER_BYTES_MAX // block
        results = []
        sums = self.checksum.zeros(len(slba))
        for start in range(0, max(len(slba), 1), piece):
            part = slice(start, start + piece)
            count = len(slba[part])
            buffer = aligned_buffer(count * block)
            tail_addresses = np.uint64(address_of(buffer)) + np.arange(count, dtype=np.uint64) * np.uint64(
                block
            )
            page_tails = addresses[part] + np.uint64(self.page_size_bytes - self._tail_bytes)
            if opcode == OPCODE_WRITE:
                copy_many(tail_addresses, page_tails, self._tail_bytes)
            whole = np.uint64(self._whole_blocks)
            # Page and tail stand side by side in the batch: one submission, every member busy.
            starts = np.stack([slba[part], slba[part] + whole], axis=1).reshape(-1)
            counts = np.tile(np.array([whole, 1], dtype=np.uint64), count)
            places = np.stack([addresses[part], tail_addresses], axis=1).reshape(-1)
            has_blocks = counts > 0
            result = self._io.run(
                opcode,
                starts[has_blocks],
                counts[has_blocks],
                places[has_blocks],
                deadline=deadline,
                may_copy=np.tile(np.array([may_copy, True]), count)[has_blocks],
            )
            if opcode == OPCODE_READ:
                copy_many(page_tails, tail_addresses, self._tail_bytes)
            results.append(_fold_tails(result, count))
            if wants_sums:
                sums[part] = self.checksum.sums(np.ascontiguousarray(addresses[part]), self.page_size_bytes)
        members = np.logical_or.reduce([result.members for result in results])
        groups = np.concatenate([result.groups for result in results])
        has_failures = any(result.has_failures for result in results)
        return self._page_result(ExtentResult(groups, members, opcode, slba, has_failures), sums)

    def _page_result(self, result: ExtentResult, sums: SumArray) -> PageResult:
        error = result.groups["error"].copy()
        outcome = np.zeros(len(error), dtype=np.uint8)
        if result.has_failures:
            outcome[error != 0] = OUTCOME_FAILED
            outcome[result.has_unknown_fate] = OUTCOME_UNKNOWN
        return PageResult(error, sums, outcome, result.members, result.first_error(self._io.device.uri))


def page_io_of(io: VolumeIo, record: Record, *, what: str) -> PageIo:
    """Page I/O on the slots of a KV namespace's record; UnsupportedError for a checksum that nobody here computes."""
    checksum = checksum_numbered(what, record.checksum_number)
    return PageIo(io, slot_map_of(record), page_size_bytes=record.page_size_bytes, checksum=checksum)


def _fold_tails(result: ExtentResult, page_count: int) -> ExtentResult:
    """One group per page out of one for its whole blocks and one for its tail: the worse of the two."""
    if len(result.groups) == page_count:
        return result
    pairs = result.groups.reshape(page_count, 2)
    groups = pairs[:, 0].copy()
    # An unknown fate outweighs a plain failure: it decides whether the slot may be used again.
    unknown = result.has_unknown_fate.reshape(page_count, 2)[:, 1]
    takes_tail = (pairs[:, 1]["error"] != 0) & ((groups["error"] == 0) | unknown)
    groups[takes_tail] = pairs[takes_tail, 1]
    return ExtentResult(groups, result.members, result.opcode, result.slba[::2], result.has_failures)
