"""A queue for devices that this process serves itself: commands run, in order, when they are polled.

Not here: what a command does to a device (``memory``, ``file``).
Threads: as every queue, one at a time; no thread of its own.
"""

from __future__ import annotations

import errno
import threading
from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np

from kvdev.block.device import POLL_COUNT_MAX, BlockDevice, read_blocks, write_blocks
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import QueueFullError, UsageError
from kvdev.native.io import (
    IO_DONE_DTYPE,
    IO_FUA,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    IoArray,
    IoDoneArray,
    count_down_group,
)
from kvdev.opcode import opcode_name

STATUS_INVALID_OPCODE = 0x001
STATUS_COMPARE_FAILURE = 0x285
"""NVM command set 3.2.1: media and data integrity error 85h."""

QUEUE_CAPACITY_COUNT = 4096
"""Room of a local queue: 16 pages of 32 MiB in strips of 128 KiB, at 64 bytes a command."""


SMALL_BATCH_COUNT = 16
"""Batches up to this are checked command by command: as fast as a dozen NumPy calls."""


def compare_then_write(
    device: BlockDevice, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
) -> bool:
    """Compare and write in two steps; the caller keeps everybody else away meanwhile."""
    count = len(expected) // device.block_size_bytes
    if read_blocks(device, slba, count, deadline).tobytes() != bytes(expected):
        return False
    write_blocks(device, slba, bytes(new), deadline)
    return True


class LocalDevice(BlockDevice):
    """A device whose commands are plain function calls."""

    @abstractmethod
    def run(self, opcode: int, slba: int, lba_count: int, address: int) -> tuple[int, int]:
        """Run one checked command; returns −errno and the NVMe status, both 0 for success."""


class LocalQueue:
    """The queue of one or more local devices; see ``IoQueue`` for the contract."""

    def __init__(self, *, capacity_count: int = QUEUE_CAPACITY_COUNT) -> None:
        self.lock = threading.RLock()
        self._capacity_count = capacity_count
        self._devices: list[LocalDevice] = []
        self._pending: deque[tuple[Any, ...]] = deque()
        self._abandoned: deque[tuple[Any, ...]] = deque()

    def add_device(self, device: LocalDevice) -> int:
        """The handle of a device, the ``device_index`` of its commands."""
        self._devices.append(device)
        return len(self._devices) - 1

    @property
    def capacity_count(self) -> int:
        return self._capacity_count

    @property
    def outstanding_count(self) -> int:
        return len(self._pending) + len(self._abandoned)

    def submit(self, ios: IoArray) -> None:
        if len(ios) + self.outstanding_count > self._capacity_count:
            raise QueueFullError(
                f"queue: expected at most {self._capacity_count} commands, "
                f"got {len(ios)} beside {self.outstanding_count}"
            )
        rows: list[tuple[Any, ...]] = ios.tolist()  # each in the order of IO_DTYPE
        if len(rows) > SMALL_BATCH_COUNT or not all(self._is_plain(row) for row in rows):
            self._check(ios)
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        self._pending.extend((now_ns, *row) for row in rows)

    def _is_plain(self, row: tuple[Any, ...]) -> bool:
        """Whether a command is a read or write that ``check_ios`` passes, or a flush: cheap for few commands."""
        _, buf_addr, slba, _, lba_count, byte_count, device_index, opcode, _, _ = row
        if device_index >= len(self._devices):
            return False
        device = self._devices[device_index]
        if opcode == OPCODE_FLUSH:
            return True
        return bool(
            opcode in (OPCODE_READ, OPCODE_WRITE)
            and buf_addr
            and lba_count > 0
            and slba + lba_count <= device.block_count
            and byte_count == lba_count * device.block_size_bytes <= device.max_transfer_bytes
        )

    def _check(self, ios: IoArray) -> None:
        for device_index in np.unique(ios["device_index"]):
            if device_index >= len(self._devices):
                raise UsageError(f"queue: device_index {device_index}: no such device")
            device = self._devices[device_index]
            check_ios(device, ios[ios["device_index"] == device_index])

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        del min_count  # Nothing happens unless it is done here, so there is never less to wait for.
        done: list[tuple[int, ...]] = []  # each in the order of IO_DONE_DTYPE
        for index in range(min(max_count, self.outstanding_count)):
            if self._abandoned:
                io, error, status = self._abandoned.popleft(), -errno.ECANCELED, 0
            elif index and deadline.is_expired:
                break
            else:
                io = self._pending.popleft()
                error, status = self._run(io)
            submit_ns, tag, _, _, group_addr, _, _, device_index, _, _, _ = io
            now_ns = SYSTEM_CLOCK.monotonic_ns()
            done.append((tag, submit_ns, submit_ns, now_ns, error, status, 0, device_index, 0, 0))
            if group_addr:
                count_down_group(group_addr, submit_ns, now_ns, error, status)
        return np.array(done, dtype=IO_DONE_DTYPE)

    def abandon(self) -> None:
        self._abandoned.extend(self._pending)
        self._pending.clear()

    def _run(self, io: tuple[Any, ...]) -> tuple[int, int]:
        _, _, buf_addr, slba, _, lba_count, _, device_index, opcode, flags, _ = io
        device = self._devices[device_index]
        error, status = device.run(opcode, slba, lba_count, buf_addr)
        if not error and flags & IO_FUA and opcode in (OPCODE_WRITE, OPCODE_WRITE_ZEROES):
            error, status = device.run(OPCODE_FLUSH, 0, 0, 0)
        return error, status


def check_ios(device: BlockDevice, ios: IoArray) -> None:
    """Raise UsageError for the first command of the array that the device cannot take."""
    has_range = (ios["opcode"] != OPCODE_FLUSH) & (ios["opcode"] != OPCODE_DSM)
    ranged = ios[has_range]
    end = ranged["slba"] + ranged["lba_count"]
    bad = (
        (ranged["lba_count"] == 0)
        | (end > np.uint64(device.block_count))
        | (end < ranged["slba"])
        | (
            (ranged["opcode"] != OPCODE_WRITE_ZEROES)
            & (
                (ranged["byte_count"] > device.max_transfer_bytes)
                | (
                    ranged["byte_count"].astype(np.uint64)
                    != ranged["lba_count"] * np.uint64(device.block_size_bytes)
                )
                | (ranged["buf_addr"] == 0)
            )
        )
    )
    for io in ranged[bad][:1]:
        raise UsageError(
            f"{device.uri}: {opcode_name(int(io['opcode']), is_admin=False)}: expected a payload of lba_count x "
            f"{device.block_size_bytes} bytes, at most {device.max_transfer_bytes}, within {device.block_count} "
            f"blocks, got LBA {io['slba']}, {io['lba_count']} blocks, {io['byte_count']} bytes"
        )
