"""Batches of extents on a volume: cut at strips, spread over the members, flushed where written.

Not here: what the extents hold (``namespace``, ``page_io``); the mapping itself (``kvdev.block.stripe``).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvdev.block.device import BlockDevice, aligned_buffer, error_of, flush, run_grouped
from kvdev.block.stripe import StripeDevice, split_extents
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import KvdevError, UncertainWriteError, UnsupportedError
from kvdev.native.extent import ExtentMap
from kvdev.native.io import (
    EUNCERTAIN,
    IO_GROUP_DTYPE,
    IO_MAY_COPY,
    OPCODE_READ,
    OPCODE_WRITE,
    IoArray,
    IoGroupArray,
    address_of,
)
from kvdev.units import MIB

MemberMask = npt.NDArray[np.bool_]
Uint64Array = npt.NDArray[np.uint64]

UNKNOWN_FATE_ERRORS = np.array(
    [-EUNCERTAIN, -errno.ENOTCONN, -errno.ECONNRESET, -errno.EPIPE, -errno.ETIMEDOUT], dtype=np.int32
)
"""A write that failed like this may still reach the medium, now or later; −ECANCELED was never sent."""

WHOLE_DEVICE_BLOCKS = 1 << 62
"""Strips of a device that is not cut into any: a multiple of every unit."""

SEQUENTIAL_PIECE_BYTES = MIB
"""Long runs are read and written in extents of this size: bounds one group, keeps every member busy."""


@runtime_checkable
class Deallocates(Protocol):
    """A device that can be told which blocks are not needed."""

    def deallocate(self, ranges: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Ranges are (slba, block count); UnsupportedError where its far end does not have it."""


@dataclass(frozen=True)
class ExtentResult:
    """What became of each extent of a batch."""

    groups: IoGroupArray
    members: MemberMask
    """Members that the batch touched."""
    opcode: int
    slba: Uint64Array
    has_failures: bool
    """Whether any extent has an error: spares the common case the look."""

    @property
    def error(self) -> npt.NDArray[np.int32]:
        """−errno per extent, 0 for success."""
        result: npt.NDArray[np.int32] = self.groups["error"]
        return result

    @property
    def has_unknown_fate(self) -> npt.NDArray[np.bool_]:
        return np.isin(self.groups["error"], UNKNOWN_FATE_ERRORS)

    def first_error(self, uri: str) -> KvdevError | None:
        """The exception that the first failed extent means."""
        if not self.has_failures:
            return None
        failed = np.flatnonzero(self.groups["error"])
        group = self.groups[failed[0]]
        return error_of(
            error=int(group["error"]),
            status=int(group["status"]),
            opcode=self.opcode,
            slba=int(self.slba[failed[0]]),
            uri=uri,
        )


class VolumeIo:
    """Reads and writes extents of a volume's blocks, and counts the bytes moved on each member."""

    def __init__(self, device: BlockDevice, *, strip_size_bytes: int) -> None:
        """``device`` is a StripeDevice over the members, or one RAID0 device that hides them."""
        self.device = device
        self.block_size_bytes = device.block_size_bytes
        self._stripe = device if isinstance(device, StripeDevice) else None
        if self._stripe is not None:
            self.member_count = len(self._stripe.members)
            self.unit_blocks = self._stripe.unit_blocks
            self._direct_queue = self._stripe.common_queue
        else:
            self.member_count = 1
            limit = min(strip_size_bytes, device.max_transfer_bytes) // device.block_size_bytes
            self.unit_blocks = 1 << (limit.bit_length() - 1)
            self._direct_queue = None
        # Members on one queue get their commands at once; others through the device that knows them.
        if self._stripe is not None and self._direct_queue is not None:
            self._queue = self._direct_queue
            strip_blocks, handles = self._stripe.strip_blocks, self._stripe.handles.tolist()
        else:
            self._queue = device.queue
            strip_blocks, handles = WHOLE_DEVICE_BLOCKS, [device.device_index]
        self._map = ExtentMap(
            unit_blocks=self.unit_blocks,
            strip_blocks=strip_blocks,
            block_size_bytes=self.block_size_bytes,
            handles=handles,
        )
        self.read_bytes = np.zeros(self.member_count, dtype=np.int64)
        self.written_bytes = np.zeros(self.member_count, dtype=np.int64)

    def no_members(self) -> MemberMask:
        return np.zeros(self.member_count, dtype=np.bool_)

    def all_members(self) -> MemberMask:
        return np.ones(self.member_count, dtype=np.bool_)

    def run(
        self,
        opcode: int,
        slba: Uint64Array,
        block_count: Uint64Array,
        address: Uint64Array,
        *,
        deadline: Deadline,
        crc_bytes: int = 0,
        blocks_total: int | None = None,
        may_copy: bool | npt.NDArray[np.bool_] = False,
    ) -> ExtentResult:
        """Move extents to or from memory; returns when all have completed, failed ones included.

        With ``crc_bytes`` the core computes each extent's CRC32C over that many bytes at its address.
        ``blocks_total`` spares summing ``block_count`` where the caller knows it. Arrays are contiguous.
        ``may_copy``, of all extents or of each: a device that shares memory may copy those that lie outside
        it, where it would refuse others. For metadata, never for pages.
        """
        flags = IO_MAY_COPY if may_copy is True else 0
        total = int(block_count.sum()) if blocks_total is None else blocks_total
        ios, groups, member_blocks = self._map.split(
            opcode, slba, block_count, address, blocks_total=total, crc_bytes=crc_bytes, flags=flags
        )
        if isinstance(may_copy, np.ndarray):
            ios["flags"] = may_copy[self._extents_of(ios, groups)] * np.uint8(IO_MAY_COPY)
        failed = run_grouped(self._queue, ios, deadline)
        if failed is not None:
            pieces = np.flatnonzero(failed["error"])
            # Also what was never submitted: the core has not seen those, so their groups know nothing.
            for piece, extent in zip(pieces, self._extents_of(ios[pieces], groups), strict=True):
                if not groups["error"][extent]:
                    groups["error"][extent] = failed["error"][piece]
                    groups["status"][extent] = failed["status"][piece]
        if len(member_blocks) != self.member_count:
            member_blocks = self._count_members(ios)
        total_bytes = self.written_bytes if opcode == OPCODE_WRITE else self.read_bytes
        total_bytes += member_blocks * self.block_size_bytes
        return ExtentResult(groups, member_blocks > 0, opcode, slba, failed is not None)

    @staticmethod
    def _extents_of(ios: IoArray, groups: IoGroupArray) -> npt.NDArray[np.int64]:
        """Which extent each command belongs to."""
        offset = (ios["group_addr"] - np.uint64(address_of(groups))) // np.uint64(IO_GROUP_DTYPE.itemsize)
        index: npt.NDArray[np.int64] = offset.astype(np.int64)
        return index

    def _count_members(self, ios: IoArray) -> npt.NDArray[np.int64]:
        """Blocks on each member of commands that go through the stripe."""
        members = self._member_of(ios["slba"])
        blocks = np.bincount(members, weights=ios["lba_count"], minlength=self.member_count)
        return blocks.astype(np.int64)

    def _member_of(self, slba: Uint64Array) -> npt.NDArray[np.int64]:
        if self._stripe is None:
            return np.zeros(len(slba), dtype=np.int64)
        strip = slba // np.uint64(self._stripe.strip_blocks)
        member: npt.NDArray[np.int64] = (strip % np.uint64(self.member_count)).astype(np.int64)
        return member

    def member_bytes(self, slba: Uint64Array, block_count: int) -> npt.NDArray[np.int64]:
        """Bytes of equally long extents on each member."""
        counts = np.full(len(slba), block_count, dtype=np.uint64)
        _, piece_slba, piece_blocks, _ = split_extents(slba, counts, self.unit_blocks)
        blocks = np.bincount(self._member_of(piece_slba), weights=piece_blocks, minlength=self.member_count)
        return (blocks * self.block_size_bytes).astype(np.int64)

    def where(self, slba: int) -> str:
        """A block for people: its number, and the member's own where the members are known."""
        if self._stripe is None or self.member_count == 1:
            return f"LBA {slba}"
        strip, within = divmod(slba, self._stripe.strip_blocks)
        row, member = divmod(strip, self.member_count)
        own = row * self._stripe.strip_blocks + within
        return f"LBA {slba} (LBA {own} of {self._stripe.members[member].uri})"

    def transfer(
        self, opcode: int, slba: int, buffer: npt.NDArray[np.uint8], deadline: Deadline
    ) -> MemberMask:
        """Move one run of blocks; raises the first error. Returns the members it touched."""
        return self.transfer_runs(opcode, [(slba, buffer)], deadline)

    def transfer_runs(
        self, opcode: int, runs: Sequence[tuple[int, npt.NDArray[np.uint8]]], deadline: Deadline
    ) -> MemberMask:
        """As ``transfer`` for several runs at once, each from its first block; in no order among them."""
        block = self.block_size_bytes
        starts, counts, addresses = [], [], []
        for slba, buffer in runs:
            address = address_of(buffer)
            for offset in range(0, buffer.nbytes, SEQUENTIAL_PIECE_BYTES):
                starts.append(slba + offset // block)
                counts.append(min(SEQUENTIAL_PIECE_BYTES, buffer.nbytes - offset) // block)
                addresses.append(address + offset)
        result = self.run(
            opcode,
            np.array(starts, dtype=np.uint64),
            np.array(counts, dtype=np.uint64),
            np.array(addresses, dtype=np.uint64),
            deadline=deadline,
            blocks_total=sum(counts),
            may_copy=True,
        )
        failure = result.first_error(self.device.uri)
        if failure is not None:
            raise failure
        return result.members

    def read(self, slba: int, block_count: int, deadline: Deadline) -> npt.NDArray[np.uint8]:
        """A run of blocks in a new aligned buffer."""
        return self.read_runs([(slba, block_count)], deadline)[0]

    def read_runs(self, runs: Sequence[tuple[int, int]], deadline: Deadline) -> list[npt.NDArray[np.uint8]]:
        """Runs of blocks, first and count, all at once, each in a new aligned buffer."""
        buffers = [aligned_buffer(count * self.block_size_bytes) for _, count in runs]
        places = [(slba, buffer) for (slba, _), buffer in zip(runs, buffers, strict=True)]
        self.transfer_runs(OPCODE_READ, places, deadline)
        return buffers

    def write(self, slba: int, data: bytes | npt.NDArray[np.uint8], deadline: Deadline) -> MemberMask:
        """A run of blocks from ``data``, zero padded to whole blocks; returns the members to flush."""
        size_bytes = -(-len(data) // self.block_size_bytes) * self.block_size_bytes
        buffer = aligned_buffer(size_bytes)
        buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
        return self.transfer(OPCODE_WRITE, slba, buffer, deadline)

    def compare_and_write(
        self, slba: int, expected: bytes, new: bytes, deadline: Deadline
    ) -> MemberMask | None:
        """Replace one block if it is as expected; the members to flush, None when it is not."""
        if not self.device.compare_and_write(slba, expected, new, deadline):
            return None
        members = self.no_members()
        members[self._member_of(np.array([slba], dtype=np.uint64))] = True
        self.written_bytes[members] += self.block_size_bytes
        return members

    def deallocate(self, slba: int, block_count: int, deadline: Deadline) -> int:
        """Tell the members that a run of blocks is not needed; what it reads as is undefined then.

        Advice: returns how many members took it.
        """
        told = 0
        for member, first, count in self._member_runs(slba, block_count):
            if isinstance(member, Deallocates):
                with contextlib.suppress(UnsupportedError):
                    member.deallocate([(first, count)], deadline)
                    told += 1
        return told

    def _member_runs(self, slba: int, block_count: int) -> Iterator[tuple[BlockDevice, int, int]]:
        """The blocks that a run of the volume's has on each member: one run there, as rows follow each other."""
        if self._stripe is None:
            yield self.device, slba, block_count
            return
        strip, count, end = self._stripe.strip_blocks, len(self._stripe.members), slba + block_count
        first_strip, last_strip = slba // strip, (end - 1) // strip
        for index, member in enumerate(self._stripe.members):
            first = first_strip + (index - first_strip) % count
            last = last_strip - (last_strip - index) % count
            if first > last:
                continue
            start = first // count * strip + (slba % strip if first == first_strip else 0)
            stop = last // count * strip + ((end - 1) % strip + 1 if last == last_strip else strip)
            yield member, start, stop - start

    def is_fenced(self, since_ns: int) -> bool:
        """Whether no write that was sent since then and lost can take effect any more.

        Until the loss has been noticed the answer is no: its fence lies after the write.
        """
        devices = [self.device] if self._stripe is None else self._stripe.members
        fence_ns = max(device.fence_ns for device in devices)
        return since_ns <= fence_ns <= SYSTEM_CLOCK.monotonic_ns()

    @property
    def _flushed_devices(self) -> list[BlockDevice]:
        return [self.device] if self._stripe is None else list(self._stripe.members)

    def cache_loss_counts(self) -> npt.NDArray[np.int64]:
        """Per member, how often completed writes may have been lost with a cache."""
        return np.array([device.cache_loss_count for device in self._flushed_devices], dtype=np.int64)

    def note_writes(self, members: MemberMask, sent_ns: int) -> None:
        """Another process of this host completed writes on these members, the first sent then."""
        sent_ns = min(sent_ns, SYSTEM_CLOCK.monotonic_ns())
        for device, is_written in zip(self._flushed_devices, members.tolist(), strict=True):
            if is_written:
                device.note_writes(sent_ns)

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        """Flush these members; every one is tried, the first failure raises."""
        if not np.count_nonzero(members):
            return
        if self._stripe is None:
            flush(self.device, deadline)
        else:
            self._stripe.flush_members(np.flatnonzero(members).tolist(), deadline)


class LossWatch:
    """Whether a cache was lost with completed writes since this user of a volume last looked.

    A device tells of a loss by the first flush after it, which may be another KV namespace's, or a lease's.
    """

    def __init__(self, io: VolumeIo) -> None:
        self._io = io
        self.reset()

    def reset(self) -> None:
        """What was lost up to now is dealt with."""
        self._counts = self._io.cache_loss_counts()

    def check(self) -> None:
        """After a flush that succeeded; UncertainWriteError when it does not vouch for everything before it."""
        if (self._io.cache_loss_counts() != self._counts).any():
            raise UncertainWriteError(
                f"{self._io.device.uri}: flush: a controller went away with its cache: writes completed since the last "
                f"flush may be lost",
                errno=EUNCERTAIN,
                trid=self._io.device.uri,
            )
