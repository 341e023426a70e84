"""File devices: a regular file or a block device of this machine, past the page cache where it can be.

Not here: io_uring (``kvdev.target``, the local NVMe tier); who else uses a device (``kvdev.store.signature``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import uuid
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdev.block.device import BUFFER_ALIGNMENT_BYTES, DeviceIdentity, aligned_buffer
from kvdev.block.local import STATUS_COMPARE_FAILURE, STATUS_INVALID_OPCODE, LocalDevice, LocalQueue, bytes_at
from kvdev.errors import UsageError
from kvdev.native.io import (
    OPCODE_COMPARE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    address_of,
)
from kvdev.units import MIB, is_power_of_two

BLKSSZGET = 0x1268
"""Logical block size of a block device, linux/fs.h."""
BLKGETSIZE64 = 0x80081272
"""Size in bytes of a block device, linux/fs.h."""

REGULAR_FILE_BLOCK_SIZE_BYTES = 4096
ZERO_PIECE_BYTES = MIB
"""Write zeroes goes out in pieces of this size: bounds its buffer."""


class FileDevice(LocalDevice):
    """A file opened for direct I/O; a buffer that is not aligned for it is copied once."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size_bytes: int | None = None,
        is_read_only: bool = False,
        max_transfer_bytes: int = MIB,
        queue: LocalQueue | None = None,
    ) -> None:
        """Open ``path``; ``block_size_bytes`` is for regular files only (4096 if not given).

        Raises UsageError naming the path when it cannot be opened or has no whole block.
        """
        self.path = os.fspath(path)
        self.uri = f"file:{self.path}"
        self.is_read_only = is_read_only
        self.max_transfer_bytes = max_transfer_bytes
        self._fd, self.is_direct = _open(self.path, is_read_only=is_read_only)
        try:
            self._read_shape(block_size_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.has_volatile_cache = True
        self.queue: LocalQueue = queue or LocalQueue()
        self.device_index = self.queue.add_device(self)

    @property
    def fd(self) -> int:
        """The open descriptor, for locks on it; closed by ``close``."""
        return self._fd

    def _read_shape(self, block_size_bytes: int | None) -> None:
        mode = os.fstat(self._fd)
        self.is_block_device = stat.S_ISBLK(mode.st_mode)
        if self.is_block_device:
            block_size = struct.unpack("I", fcntl.ioctl(self._fd, BLKSSZGET, bytes(4)))[0]
            size_bytes = struct.unpack("Q", fcntl.ioctl(self._fd, BLKGETSIZE64, bytes(8)))[0]
            self.identity = _sysfs_identity(mode.st_rdev)
            if block_size_bytes not in (None, block_size):
                raise UsageError(
                    f"{self.uri}: block size: expected {block_size}, as formatted, got {block_size_bytes}"
                )
        elif stat.S_ISREG(mode.st_mode):
            block_size = block_size_bytes or REGULAR_FILE_BLOCK_SIZE_BYTES
            size_bytes = mode.st_size
            self.identity = DeviceIdentity()
        else:
            raise UsageError(f"{self.uri}: expected a regular file or a block device")
        if not is_power_of_two(block_size) or not 512 <= block_size <= 65536:
            raise UsageError(
                f"{self.uri}: block size: expected a power of two from 512 to 65536, got {block_size}"
            )
        if size_bytes < block_size:
            raise UsageError(
                f"{self.uri}: size: expected at least one block of {block_size} bytes, got {size_bytes}"
            )
        self.block_size_bytes = int(block_size)
        self.block_count = int(size_bytes // block_size)

    def run(self, opcode: int, slba: int, lba_count: int, address: int) -> tuple[int, int]:
        offset = slba * self.block_size_bytes
        size_bytes = lba_count * self.block_size_bytes
        try:
            if opcode == OPCODE_FLUSH:
                os.fdatasync(self._fd)
            elif opcode == OPCODE_READ:
                self._read(bytes_at(address, size_bytes), offset)
            elif opcode == OPCODE_WRITE:
                self._write(bytes_at(address, size_bytes), offset)
            elif opcode == OPCODE_WRITE_ZEROES:
                zeroes = aligned_buffer(min(size_bytes, ZERO_PIECE_BYTES))
                for start in range(0, size_bytes, ZERO_PIECE_BYTES):
                    self._write(zeroes[: size_bytes - start], offset + start)
            elif opcode == OPCODE_COMPARE:
                stored = aligned_buffer(size_bytes)
                self._read(stored, offset)
                if not np.array_equal(stored, bytes_at(address, size_bytes)):
                    return -errno.EIO, STATUS_COMPARE_FAILURE
            elif opcode != OPCODE_DSM:  # deallocation is advice: nothing to do
                return -errno.EIO, STATUS_INVALID_OPCODE
        except OSError as failure:
            return -(failure.errno or errno.EIO), 0
        return 0, 0

    def _needs_bounce(self, buffer: npt.NDArray[np.uint8]) -> bool:
        return self.is_direct and address_of(buffer) % BUFFER_ALIGNMENT_BYTES != 0

    def _read(self, buffer: npt.NDArray[np.uint8], offset: int) -> None:
        # O_DIRECT refuses unaligned memory: such a payload is copied through an aligned buffer.
        target = aligned_buffer(buffer.nbytes) if self._needs_bounce(buffer) else buffer
        done = 0
        while done < target.nbytes:
            count = os.preadv(self._fd, [target[done:].data], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += count
        if target is not buffer:
            buffer[:] = target

    def _write(self, buffer: npt.NDArray[np.uint8], offset: int) -> None:
        source = buffer
        if self._needs_bounce(buffer):  # as in _read
            source = aligned_buffer(buffer.nbytes)
            source[:] = buffer
        done = 0
        while done < source.nbytes:
            done += os.pwritev(self._fd, [source[done:].data], offset + done)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: str, *, is_read_only: bool) -> tuple[int, bool]:
    """Descriptor and whether it bypasses the page cache (some file systems refuse to)."""
    flags = os.O_CLOEXEC | (os.O_RDONLY if is_read_only else os.O_RDWR)
    try:
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as refusal:
            if refusal.errno != errno.EINVAL:
                raise
            return os.open(path, flags), False
    except OSError as failure:
        raise UsageError(f"file:{path}: cannot be opened: {os.strerror(failure.errno or 0)}") from failure


def _sysfs_identity(device_number: int) -> DeviceIdentity:
    """What the kernel knows of an NVMe block device; nothing for other kinds."""
    folder = Path(f"/sys/dev/block/{os.major(device_number)}:{os.minor(device_number)}")

    def attribute(name: str) -> str:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            return ""

    def identifier(name: str, size_bytes: int) -> bytes | None:
        digits = attribute(name).replace("-", "").replace(" ", "")
        try:
            value = bytes.fromhex(digits)
        except ValueError:
            return None
        return value if len(value) == size_bytes and any(value) else None

    uuid_text = attribute("uuid")
    try:
        uuid_bytes = uuid.UUID(uuid_text).bytes if uuid_text else None
    except ValueError:
        uuid_bytes = None
    return DeviceIdentity(
        nguid=identifier("nguid", 16),
        eui64=identifier("eui", 8),
        uuid=uuid_bytes,
        serial=attribute("device/serial") or None,
    )
