"""NumPy layouts of the arrays the C core reads and writes in place (csrc/io.h), and memory by its address.

Not here: who fills them (``kvdev.block``, ``kvdev.store``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi
from kvdev.native.crc import crc32c_at

IO_DTYPE = np.dtype(
    {
        "names": [
            "tag",
            "buf_addr",
            "slba",
            "group_addr",
            "lba_count",
            "byte_count",
            "device_index",
            "opcode",
            "flags",
            "priority",
        ],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4", "u1", "u1", "u1"],
        "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 45, 46],
        "itemsize": 64,
    }
)
"""``struct kvdev_io``: one command on one device."""

IO_DONE_DTYPE = np.dtype(
    [
        ("tag", "<u8"),
        ("submit_ns", "<u8"),
        ("send_ns", "<u8"),
        ("complete_ns", "<u8"),
        ("error", "<i4"),
        ("status", "<u2"),
        ("qpair_index", "<u2"),
        ("device_index", "<u4"),
        ("result", "<u4"),
        ("reserved", "<u8"),
    ]
)
"""``struct kvdev_io_done``: one completion."""

IO_GROUP_DTYPE = np.dtype(
    {
        "names": [
            "buf_addr",
            "byte_count",
            "submit_ns",
            "complete_ns",
            "remaining",
            "flags",
            "crc32c",
            "error",
            "status",
        ],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4", "<i4", "<u2"],
        "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 48],
        "itemsize": 64,
    }
)
"""``struct kvdev_io_group``: commands that complete together, the pieces of one page."""

IoArray = npt.NDArray[Any]
IoDoneArray = npt.NDArray[Any]
IoGroupArray = npt.NDArray[Any]

OPCODE_FLUSH = 0x00
OPCODE_WRITE = 0x01
OPCODE_READ = 0x02
OPCODE_COMPARE = 0x05
OPCODE_WRITE_ZEROES = 0x08
OPCODE_DSM = 0x09
OPCODE_VERIFY = 0x0C
OPCODE_COPY = 0x19

IO_FUA = 0x01
IO_DEALLOCATE = 0x02
IO_MAY_COPY = 0x04
"""The payload may be copied on its way when it lies outside memory that the device shares: metadata."""
GROUP_CRC32C = 0x01


EUNCERTAIN = 1001
"""KVDEV_EUNCERTAIN of csrc/io.h, no errno of the kernel: a write whose fate nobody knows, or a flush that cannot
vouch for writes completed before."""


_GROUP = ffi.typeof("struct kvdev_io_group *")


def address_of(array: npt.NDArray[Any]) -> int:
    """Virtual address of an array's first byte; the caller keeps the array alive while it is used."""
    return int(array.ctypes.data)


def bytes_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A view of memory that the caller of the queue owns until the completion."""
    return np.frombuffer(ffi.buffer(ffi.cast("uint8_t *", address), size_bytes), dtype=np.uint8)


def count_down_group(group_addr: int, submit_ns: int, complete_ns: int, error: int, status: int) -> None:
    """What the C core does with a group when one of its commands completes."""
    group = ffi.cast(_GROUP, group_addr)
    if not group.submit_ns:
        group.submit_ns = submit_ns
    if error and not group.error:
        group.error = error
        group.status = status
    remaining = group.remaining
    if not remaining:
        return
    if remaining == 1:
        group.complete_ns = complete_ns
        if group.flags & GROUP_CRC32C and not group.error:
            group.crc32c = crc32c_at(group.buf_addr, group.byte_count)
    group.remaining = remaining - 1
