"""What the kernel knows of a block device of this machine: shape, cache, polling, identity.

Not here: reading and writing it (``file``); who else uses it (``kvdev.store.signature``).
"""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

from kvdev.block.device import DeviceIdentity

BLKSSZGET = 0x1268
"""Logical block size, linux/fs.h."""
BLKROGET = 0x125E
"""Whether it is read-only, linux/fs.h."""
BLKGETSIZE64 = 0x80081272
"""Size in bytes, linux/fs.h."""


@dataclass(frozen=True)
class QueueFacts:
    """Of the request queue under a block device; the defaults are what is assumed when sysfs is not there."""

    has_volatile_cache: bool = True
    can_poll: bool = False
    optimal_io_bytes: int = 0
    """0: the device does not say."""
    physical_block_bytes: int = 512


def block_shape(fd: int) -> tuple[int, int, bool]:
    """Logical block size, size in bytes and whether it is read-only."""
    block_size = struct.unpack("I", fcntl.ioctl(fd, BLKSSZGET, bytes(4)))[0]
    is_read_only = struct.unpack("i", fcntl.ioctl(fd, BLKROGET, bytes(4)))[0] != 0
    return int(block_size), size_of_block_device(fd), is_read_only


def size_of_block_device(fd: int) -> int:
    return int(struct.unpack("Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))[0])


def sysfs_folder(device_number: int, *, root: Path = Path("/sys")) -> Path:
    return root / f"dev/block/{os.major(device_number)}:{os.minor(device_number)}"


def queue_facts(folder: Path) -> QueueFacts:
    """Read the queue of a device's sysfs folder; a partition's is its disk's."""
    queue = folder / "queue"
    if not queue.is_dir():
        queue = folder.resolve().parent / "queue"

    def number(name: str, otherwise: int) -> int:
        text = _attribute(queue, name)
        return int(text) if text.isdecimal() and text.isascii() else otherwise

    return QueueFacts(
        # Anything but a clear statement is taken as a cache that must be flushed.
        has_volatile_cache=_attribute(queue, "write_cache") != "write through",
        can_poll=number("io_poll", 0) == 1,
        optimal_io_bytes=number("optimal_io_size", 0),
        physical_block_bytes=number("physical_block_size", 512),
    )


def sysfs_identity(folder: Path) -> DeviceIdentity:
    """The identifiers of an NVMe block device, over a fabric or not; nothing for other kinds."""

    def identifier(name: str, size_bytes: int) -> bytes | None:
        digits = _attribute(folder, name).replace("-", "").replace(" ", "")
        try:
            value = bytes.fromhex(digits)
        except ValueError:
            return None
        return value if len(value) == size_bytes and any(value) else None

    uuid_text = _attribute(folder, "uuid")
    try:
        uuid_bytes = uuid.UUID(uuid_text).bytes if uuid_text else None
    except ValueError:
        uuid_bytes = None
    return DeviceIdentity(
        nguid=identifier("nguid", 16),
        eui64=identifier("eui", 8),
        uuid=uuid_bytes,
        serial=_attribute(folder, "device/serial") or None,
    )


def _attribute(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return ""
