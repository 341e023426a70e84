"""Where the blocks of a page table lie on media: at home, or among the spare blocks while their home must rest.

A write of unknown fate may land over whatever is written to its place later; so the block goes to a spare place,
with a higher sequence, and home again once nothing can land there any more.
Not here: what the blocks hold (``kvdev.native.index``); when they are written (``namespace``).
Spec: docs/on-disk-format.md, Table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import UncertainWriteError
from kvdev.native.io import EUNCERTAIN, OPCODE_WRITE, address_of
from kvdev.store.quarantine import Quarantine
from kvdev.store.superblock import Record
from kvdev.store.volume_io import MemberMask, VolumeIo

Uint32Array = npt.NDArray[np.uint32]


class TableIo:
    """Writes table blocks from the table's image."""

    def __init__(self, io: VolumeIo, record: Record) -> None:
        self._io = io
        self._record = record
        self.quarantine = Quarantine(io.is_fenced)
        """Places by their number: blocks first, spare ones after them."""
        self._moved: dict[int, int] = {}
        """Blocks whose newest durable state stands in a spare place, and in which."""
        self._written: dict[int, int] = {}

    def write(self, blocks: Uint32Array, image: npt.NDArray[np.uint8], deadline: Deadline) -> MemberMask:
        """Write blocks as they stand in the image; returns the members to flush. Raises the first error."""
        places = self._places(blocks)
        block_bytes = np.uint64(self._io.block_size_bytes)
        follows = (np.diff(blocks.astype(np.int64), prepend=-2) == 1) & (
            np.diff(places.astype(np.int64), prepend=-2) == 1
        )
        starts = np.flatnonzero(~follows)
        counts = np.diff(starts, append=len(blocks)).astype(np.uint64)
        sent_ns = SYSTEM_CLOCK.monotonic_ns()
        try:
            result = self._io.run(
                OPCODE_WRITE,
                np.uint64(self._record.table_slba) + places[starts].astype(np.uint64),
                counts,
                np.uint64(address_of(image)) + blocks[starts].astype(np.uint64) * block_bytes,
                deadline=deadline,
                may_copy=True,
            )
        except BaseException:
            self.quarantine.add(places.tolist(), since_ns=sent_ns)
            raise
        failure = result.first_error(self._io.device.uri)
        if failure is not None:
            for extent in np.flatnonzero(result.has_unknown_fate):
                first = int(starts[extent])
                lost = places[first : first + int(counts[extent])]
                self.quarantine.add(lost.tolist(), since_ns=sent_ns)
            raise failure
        self._written.update(zip(blocks.tolist(), places.tolist(), strict=True))
        return result.members

    def confirm(self) -> None:
        """What was written is durable: spare places whose blocks have moved on may be used again."""
        for block, place in self._written.items():
            if place < self._record.table_block_count:
                self._moved.pop(block, None)
            else:
                self._moved[block] = place
        self._written.clear()

    def _places(self, blocks: Uint32Array) -> Uint32Array:
        """Where each block goes now."""
        self._written.clear()
        if not len(self.quarantine):
            return blocks
        self.quarantine.release()
        places: Uint32Array = blocks.copy()
        taken = set(self._moved.values())
        spare = iter(range(self._record.table_block_count, self._end))
        for index in np.flatnonzero([int(block) in self.quarantine for block in blocks]):
            place = self._moved.get(int(blocks[index]))
            if place is None or place in self.quarantine:
                place = next(
                    (each for each in spare if each not in taken and each not in self.quarantine), None
                )
            if place is None:
                raise UncertainWriteError(
                    f"{self._io.device.uri}: table block {int(blocks[index])}: an earlier write of it may still "
                    f"land, and all {self._record.spare_block_count} spare places are taken until it cannot",
                    errno=EUNCERTAIN,
                    trid=self._io.device.uri,
                )
            places[index] = place
        return places

    @property
    def _end(self) -> int:
        return self._record.table_block_count + self._record.spare_block_count
