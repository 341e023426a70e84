"""RAID0: logical strip s lies on member s mod n, at row s div n; strips are a power of two in size.

The mapping is that of SPDK's raid0 bdev (without superblock) and, for equal members, of Linux md.
Not here: labels, and which device is which member (``kvdev.store``).
Threads: as every queue, one at a time; whoever drives the stripe drives its members' queues.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.block.device import POLL_COUNT_MAX, BlockDevice, DeviceIdentity, IoQueue, error_of, run_batch
from kvdev.block.local import check_ios
from kvdev.clock import NS_PER_MS, Deadline
from kvdev.errors import QueueFullError, UnsupportedError, UsageError
from kvdev.native.io import (
    IO_DONE_DTYPE,
    IO_DTYPE,
    IO_GROUP_DTYPE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    IoArray,
    IoDoneArray,
    bytes_at,
)
from kvdev.units import KIB, MIB, format_size, is_power_of_two

STRIP_SIZE_BYTES_MIN = 16 * KIB
STRIP_SIZE_BYTES_MAX = 4 * MIB
PIECE_COUNT_MAX = 256
"""Member commands that one command of the stripe may become; sets ``max_transfer_bytes``."""
OPERATION_COUNT_MAX = 4096
"""Commands of the stripe outstanding at once: the size of its table of split commands."""
_POLL_SLICE_NS = NS_PER_MS
"""Members on different queues have no common wait: each is polled for at most this long in turn."""


def check_strip_size(strip_size_bytes: int, block_size_bytes: int) -> None:
    """Raise UsageError unless strips of this size can be made of such blocks."""
    if (
        not is_power_of_two(strip_size_bytes)
        or not STRIP_SIZE_BYTES_MIN <= strip_size_bytes <= STRIP_SIZE_BYTES_MAX
        or strip_size_bytes % block_size_bytes
    ):
        raise UsageError(
            f"strip size: expected a power of two from {format_size(STRIP_SIZE_BYTES_MIN)} to "
            f"{format_size(STRIP_SIZE_BYTES_MAX)} and a multiple of the block size {block_size_bytes}, "
            f"got {strip_size_bytes}"
        )


def split_extents(
    slba: npt.NDArray[np.uint64], block_count: npt.NDArray[np.uint64], unit_blocks: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Cut extents at every multiple of ``unit_blocks``.

    Returns per piece: index of its extent, first block, block count; and per extent: its piece count.
    """
    unit = np.uint64(unit_blocks)
    end = slba + block_count
    first = slba // unit
    counts = ((end + (unit - np.uint64(1))) // unit - first).astype(np.int64)
    if len(counts) and counts.max() == 1:
        return np.arange(len(slba)), slba, block_count, counts
    extent_index = np.repeat(np.arange(len(slba)), counts)
    piece_first = np.cumsum(counts) - counts
    within = np.arange(len(extent_index)) - piece_first[extent_index]
    unit_start = (first[extent_index] + within.astype(np.uint64)) * unit
    piece_slba = np.maximum(unit_start, slba[extent_index])
    piece_end = np.minimum(unit_start + unit, end[extent_index])
    return extent_index, piece_slba, piece_end - piece_slba, counts


class StripeDevice(BlockDevice):
    """Members as one range of blocks; they stay the caller's to close."""

    def __init__(self, members: Sequence[BlockDevice], *, strip_size_bytes: int, uri: str = "") -> None:
        if not members:
            raise UsageError("stripe: members: expected at least one device, got none")
        self.members = list(members)
        self.uri = uri or "stripe:" + ",".join(member.uri for member in members)
        self.block_size_bytes = members[0].block_size_bytes
        for member in members:
            if member.block_size_bytes != self.block_size_bytes:
                raise UsageError(
                    f"{member.uri}: block size: expected {self.block_size_bytes} as {members[0].uri}, "
                    f"got {member.block_size_bytes}"
                )
        check_strip_size(strip_size_bytes, self.block_size_bytes)
        self.strip_size_bytes = strip_size_bytes
        self.strip_blocks = strip_size_bytes // self.block_size_bytes
        self.row_count = min(member.block_count for member in members) // self.strip_blocks
        if self.row_count == 0:
            raise UsageError(f"{self.uri}: members: expected at least one strip of {strip_size_bytes} bytes")
        self.block_count = len(members) * self.row_count * self.strip_blocks
        self.identity = DeviceIdentity()
        self.unit_blocks = _unit_blocks(self.strip_blocks, members)
        # A transfer that starts within a unit touches one unit more than its size says.
        piece_limit = min(PIECE_COUNT_MAX, *(member.queue.capacity_count for member in members))
        self.max_transfer_bytes = self.unit_blocks * self.block_size_bytes * max(1, piece_limit - 1)
        self.atomic_write_blocks = min(member.atomic_write_blocks for member in members)
        self.has_volatile_cache = any(member.has_volatile_cache for member in members)
        self.is_read_only = any(member.is_read_only for member in members)
        self.compare_and_write_blocks = min(member.compare_and_write_blocks for member in members)
        self.device_index = 0
        self.handles = np.array([member.device_index for member in members], dtype=np.uint32)
        self.queue: StripeQueue = StripeQueue(self)

    @property
    def common_queue(self) -> IoQueue | None:
        """The queue that all members share, None when they have several."""
        queue = self.members[0].queue
        return queue if all(member.queue is queue for member in self.members) else None

    def map_ios(self, ios: IoArray) -> tuple[IoArray, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Member commands of stripe commands that have a range.

        Returns them in order (tags as given, groups not adjusted), the member index of each, and per
        stripe command how many it became.
        """
        extent_index, piece_slba, piece_blocks, counts = split_extents(
            ios["slba"], ios["lba_count"].astype(np.uint64), self.unit_blocks
        )
        pieces = ios[extent_index]
        has_payload = pieces["buf_addr"] != 0
        offset = (piece_slba - pieces["slba"]) * np.uint64(self.block_size_bytes)
        pieces["buf_addr"] += offset * has_payload
        member_index = self.locate(pieces, piece_slba, piece_blocks)
        return pieces, member_index, counts

    def locate(
        self, pieces: IoArray, piece_slba: npt.NDArray[np.uint64], piece_blocks: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Fill in member, LBA and size of commands that each lie within one unit; returns the members."""
        strip_blocks = np.uint64(self.strip_blocks)
        strip = piece_slba // strip_blocks
        row, member = np.divmod(strip, np.uint64(len(self.members)))
        member_index: npt.NDArray[np.int64] = member.astype(np.int64)
        pieces["slba"] = row * strip_blocks + (piece_slba - strip * strip_blocks)
        pieces["lba_count"] = piece_blocks
        pieces["byte_count"] = (piece_blocks * np.uint64(self.block_size_bytes)) * (pieces["buf_addr"] != 0)
        pieces["device_index"] = self.handles[member_index]
        return member_index

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        if not self.compare_and_write_blocks:
            missing = next(member for member in self.members if not member.compare_and_write_blocks)
            return missing.compare_and_write(0, expected, new, deadline)  # refused with its reason
        self._check_compare_and_write(slba, expected, new)
        strip, within = divmod(slba, self.strip_blocks)
        row, index = divmod(strip, len(self.members))
        if within + len(expected) // self.block_size_bytes > self.strip_blocks:
            raise UsageError(
                f"{self.uri}: compare and write: expected blocks of one strip, got two from {slba}"
            )
        return self.members[index].compare_and_write(
            row * self.strip_blocks + within, expected, new, deadline
        )

    def flush_members(self, member_indices: Sequence[int], deadline: Deadline) -> None:
        """Flush these members, all at once; every one is tried, then the first failure raises."""
        failure: Exception | None = None
        wanted = [self.members[index] for index in member_indices if self.members[index].has_volatile_cache]
        for queue in _distinct([member.queue for member in wanted]):
            group = [member for member in wanted if member.queue is queue]
            ios = np.zeros(len(group), dtype=IO_DTYPE)
            ios["opcode"] = OPCODE_FLUSH
            ios["device_index"] = [member.device_index for member in group]
            done = run_batch(queue, ios, deadline)
            if failure is None and np.count_nonzero(done["error"]):
                first = int(np.flatnonzero(done["error"])[0])
                failure = error_of(
                    error=int(done["error"][first]),
                    status=int(done["status"][first]),
                    opcode=OPCODE_FLUSH,
                    slba=0,
                    uri=group[first].uri,
                )
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Nothing to release: the members are the caller's."""


def _unit_blocks(strip_blocks: int, members: Sequence[BlockDevice]) -> int:
    """Largest power of two of blocks that divides a strip and fits one command of every member."""
    limit = min(member.max_transfer_bytes // member.block_size_bytes for member in members)
    if limit < 1:
        raise UsageError("stripe: members: expected max_transfer_bytes of at least one block")
    return min(strip_blocks, 1 << (limit.bit_length() - 1))


def _distinct(queues: Sequence[IoQueue]) -> list[IoQueue]:
    return list({id(queue): queue for queue in queues}.values())


class _LockGroup:
    """Several queues' locks taken together, always in the same order."""

    def __init__(self, queues: Sequence[IoQueue]) -> None:
        self._locks = [queue.lock for queue in sorted(queues, key=id)]
        self._held: list[ExitStack] = []
        self._own = threading.RLock()

    def __enter__(self) -> _LockGroup:
        with ExitStack() as stack:
            stack.enter_context(self._own)
            for lock in self._locks:
                stack.enter_context(lock)
            self._held.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.pop().__exit__(kind, value, trace)


class StripeQueue:
    """Splits commands over the members and completes each when its last piece has; see ``IoQueue``.

    Commands with a group keep it: the group counts pieces, so it is raised by what the split adds.
    """

    def __init__(self, device: StripeDevice) -> None:
        self._device = device
        self._queues = _distinct([member.queue for member in device.members])
        self._queue_of_member = np.array([self._queues.index(member.queue) for member in device.members])
        self.lock: AbstractContextManager[Any] = (
            self._queues[0].lock if len(self._queues) == 1 else _LockGroup(self._queues)
        )
        self._operations = np.zeros(OPERATION_COUNT_MAX, dtype=IO_DONE_DTYPE)
        self._remaining = np.zeros(OPERATION_COUNT_MAX, dtype=np.int64)
        self._free = list(range(OPERATION_COUNT_MAX))[::-1]
        self._queue_turn = 0

    @property
    def capacity_count(self) -> int:
        return min(OPERATION_COUNT_MAX, *(queue.capacity_count for queue in self._queues))

    @property
    def outstanding_count(self) -> int:
        return OPERATION_COUNT_MAX - len(self._free)

    def submit(self, ios: IoArray) -> None:
        if len(ios) > len(self._free):
            raise QueueFullError(f"stripe: expected at most {len(self._free)} commands, got {len(ios)}")
        if (ios["opcode"] == OPCODE_DSM).any():
            raise UnsupportedError(
                f"{self._device.uri}: dataset management on a stripe; deallocate with write zeroes",
                feature="dataset management",
            )
        check_ios(self._device, ios)
        slots = np.array(self._free[len(self._free) - len(ios) :], dtype=np.int64)[::-1]
        work = ios.copy()
        work["tag"] = slots
        pieces, piece_members, counts = self._split(work)
        batches = self._batches(pieces, piece_members)
        _raise_groups(work, counts)
        for queue, batch in zip(self._queues, batches, strict=True):
            if len(batch):
                queue.submit(batch)
        del self._free[len(self._free) - len(ios) :]
        self._operations[slots] = np.zeros(1, dtype=IO_DONE_DTYPE)
        self._operations["tag"][slots] = ios["tag"]
        self._operations["submit_ns"][slots] = np.iinfo(np.uint64).max
        self._remaining[slots] = counts

    def _split(self, work: IoArray) -> tuple[IoArray, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Member commands, the member of each, and into how many each command split; a flush goes to all."""
        is_flush = work["opcode"] == OPCODE_FLUSH
        counts = np.full(len(work), len(self._device.members), dtype=np.int64)
        pieces, members, counts[~is_flush] = self._device.map_ios(work[~is_flush])
        if is_flush.any():
            flushes = np.repeat(work[is_flush], len(self._device.members))
            flush_members = np.tile(np.arange(len(self._device.members)), int(is_flush.sum()))
            flushes["device_index"] = self._device.handles[flush_members]
            pieces = np.concatenate([pieces, flushes])
            members = np.concatenate([members, flush_members])
        return pieces, members, counts

    def _batches(self, pieces: IoArray, piece_members: npt.NDArray[np.int64]) -> list[IoArray]:
        """The commands of each queue; raises QueueFullError before any of them has been given something."""
        queue_index = self._queue_of_member[piece_members]
        batches = [pieces[queue_index == index] for index in range(len(self._queues))]
        for queue, batch in zip(self._queues, batches, strict=True):
            if len(batch) > queue.capacity_count - queue.outstanding_count:
                raise QueueFullError(f"stripe: a member's queue has no room for {len(batch)} commands")
        return batches

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        wanted = min(min_count, max_count, self.outstanding_count)
        found: list[IoDoneArray] = []
        count = 0
        while True:
            waits = count < wanted and not deadline.is_expired
            got = self._collect(self._poll_members(deadline, waits=waits, max_count=max_count - count))
            found.append(got)
            count += len(got)
            if not waits or count >= wanted:
                break
        return np.concatenate(found)

    def _poll_members(self, deadline: Deadline, *, waits: bool, max_count: int) -> IoDoneArray:
        """One round over the queues; with ``waits`` it returns with something, or at the deadline."""
        busy = [queue for queue in self._queues if queue.outstanding_count]
        if len(busy) == 1:
            return busy[0].poll(min_count=int(waits), deadline=deadline, max_count=max_count)
        found: list[IoDoneArray] = [np.zeros(0, dtype=IO_DONE_DTYPE)]
        for queue in busy:
            found.append(queue.poll(min_count=0, deadline=deadline, max_count=max_count))
            max_count -= len(found[-1])
            if max_count <= 0:
                break
        if busy and waits and not any(len(part) for part in found):
            self._queue_turn += 1
            expires_ns = min(deadline.expires_ns, deadline.clock.monotonic_ns() + _POLL_SLICE_NS)
            piece = Deadline(expires_ns, started_ns=deadline.started_ns, clock=deadline.clock)
            found.append(
                busy[self._queue_turn % len(busy)].poll(min_count=1, deadline=piece, max_count=max_count)
            )
        return np.concatenate(found)

    def _collect(self, done: IoDoneArray) -> IoDoneArray:
        """Fold members' completions into their commands; the commands this finished."""
        slots = done["tag"].astype(np.int64)
        operations = self._operations
        np.minimum.at(operations["submit_ns"], slots, done["submit_ns"])
        np.maximum.at(operations["send_ns"], slots, done["send_ns"])
        np.maximum.at(operations["complete_ns"], slots, done["complete_ns"])
        for index in np.flatnonzero(done["error"]):
            slot = slots[index]
            if not operations["error"][slot]:
                operations["error"][slot] = done["error"][index]
                operations["status"][slot] = done["status"][index]
        np.subtract.at(self._remaining, slots, 1)
        touched = np.unique(slots)
        finished = touched[self._remaining[touched] == 0]
        self._free.extend(finished.tolist())
        result: IoDoneArray = operations[finished]
        return result

    def abandon(self) -> None:
        for queue in self._queues:
            queue.abandon()


def _raise_groups(ios: IoArray, counts: npt.NDArray[np.int64]) -> None:
    """Add to each group the pieces that the split of its commands makes more."""
    for index in np.flatnonzero((counts > 1) & (ios["group_addr"] != 0)):
        group: Any = bytes_at(int(ios["group_addr"][index]), IO_GROUP_DTYPE.itemsize).view(IO_GROUP_DTYPE)
        group["remaining"] += np.uint32(counts[index] - 1)
