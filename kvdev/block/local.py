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
import numpy.typing as npt

from kvdev.block.device import POLL_COUNT_MAX, BlockDevice, read_blocks, write_blocks
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import QueueFullError, UsageError
from kvdev.native.crc import crc32c_at
from kvdev.native.io import (
    GROUP_CRC32C,
    IO_DONE_DTYPE,
    IO_FUA,
    IO_GROUP_DTYPE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    IoArray,
    IoDoneArray,
)
from kvdev.opcode import opcode_name

STATUS_INVALID_OPCODE = 0x001
STATUS_COMPARE_FAILURE = 0x285
"""NVM command set 3.2.1: media and data integrity error 85h."""

QUEUE_CAPACITY_COUNT = 4096
"""Room of a local queue: 16 pages of 32 MiB in strips of 128 KiB, at 64 bytes a command."""


SMALL_BATCH_COUNT = 16
"""Batches up to this are checked command by command: as fast as a dozen NumPy calls."""

_IO_FIELDS = [
    "tag",
    "buf_addr",
    "slba",
    "group_addr",
    "lba_count",
    "device_index",
    "opcode",
    "flags",
    "byte_count",
]
_BYTE = np.ctypeslib.as_ctypes_type(np.uint8)


def bytes_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A view of memory that the caller of the queue owns until the completion."""
    return np.ctypeslib.as_array((_BYTE * size_bytes).from_address(address))


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
        rows = ios[_IO_FIELDS].tolist()
        if len(rows) > SMALL_BATCH_COUNT or not all(self._is_plain(row) for row in rows):
            self._check(ios)
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        self._pending.extend((now_ns, *row[:-1]) for row in rows)

    def _is_plain(self, row: tuple[Any, ...]) -> bool:
        """Whether a command is a read or write that ``check_ios`` passes, or a flush: cheap for few commands."""
        _, buf_addr, slba, _, lba_count, device_index, opcode, _, byte_count = row
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
        done = np.zeros(min(max_count, self.outstanding_count), dtype=IO_DONE_DTYPE)
        for index in range(len(done)):
            if self._abandoned:
                io, error, status = self._abandoned.popleft(), -errno.ECANCELED, 0
            elif index and deadline.is_expired:
                return done[:index]
            else:
                io = self._pending.popleft()
                error, status = self._run(io)
            submit_ns, tag, _, _, group_addr, _, device_index, _, _ = io
            now_ns = SYSTEM_CLOCK.monotonic_ns()
            done[index] = (tag, submit_ns, submit_ns, now_ns, error, status, 0, device_index, 0, 0)
            if group_addr:
                count_down_group(group_addr, submit_ns, now_ns, error, status)
        return done

    def abandon(self) -> None:
        self._abandoned.extend(self._pending)
        self._pending.clear()

    def _run(self, io: tuple[Any, ...]) -> tuple[int, int]:
        _, _, buf_addr, slba, _, lba_count, device_index, opcode, flags = io
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


def count_down_group(group_addr: int, submit_ns: int, complete_ns: int, error: int, status: int) -> None:
    """What the C core does with a group when one of its commands completes."""
    group = bytes_at(group_addr, IO_GROUP_DTYPE.itemsize).view(IO_GROUP_DTYPE)
    if group["submit_ns"][0] == 0:
        group["submit_ns"] = submit_ns
    group["complete_ns"] = complete_ns
    if error and not group["error"][0]:
        group["error"] = error
        group["status"] = status
    group["remaining"] -= 1
    if group["remaining"][0] == 0 and group["flags"][0] & GROUP_CRC32C and not group["error"][0]:
        group["crc32c"] = crc32c_at(int(group["buf_addr"][0]), int(group["byte_count"][0]))
