"""Memory that a back end may reach: arenas, what the caller gives with a descriptor, and our own rings.

Threads: any; nothing blocks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from kvdev.errors import UsageError
from kvdev.native.io import address_of
from kvdev.staging import Arena
from kvdev.vhost.protocol import MemoryRegion

PAGE_BYTES = 4096
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a back end that cut the memory would make us die of SIGBUS."""


class SharedMemory:
    """A piece of mapped, shared memory that payload may lie in; it stays mapped while this object lives."""

    def __init__(
        self,
        *,
        address: int,
        size_bytes: int,
        fd: int,
        fd_offset: int = 0,
        keep: object = None,
        hold: Callable[[int, int, Callable[[], bool]], None] | None = None,
        name: str = "memory",
    ) -> None:
        """Describe memory of the caller's, mapped shared from ``fd``; the descriptor is duplicated.

        Args:
            keep: an object that owns the mapping: it is referenced as long as a device may use the memory.
            hold: called with address, size and a predicate when a back end may still write there although its
                device is dead; whoever owns the memory must not reuse it before the predicate is true.
        """
        for field, value in (("address", address), ("size_bytes", size_bytes), ("fd_offset", fd_offset)):
            if value % PAGE_BYTES or value < 0 or (value == 0 and field != "fd_offset"):
                raise UsageError(
                    f"vhost: shared memory {name}: {field}: expected a multiple of {PAGE_BYTES}, got {value}"
                )
        try:
            file_size = os.fstat(fd).st_size
            self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise UsageError(
                f"vhost: shared memory {name}: fd: expected an open descriptor, got {fd}: {error}"
            ) from error
        weakref.finalize(self, os.close, self._fd)
        if file_size < fd_offset + size_bytes:
            raise UsageError(
                f"vhost: shared memory {name}: fd: expected at least {fd_offset + size_bytes} bytes of "
                f"shared memory behind it, got {file_size}"
            )
        self.address = address
        self.size_bytes = size_bytes
        self.fd_offset = fd_offset
        self.name = name
        self.hold = hold
        self._keep = keep

    @classmethod
    def of(cls, arena: Arena) -> SharedMemory:
        """The memory of an arena made with ``is_shareable=True``."""
        return cls(
            address=arena.address,
            size_bytes=arena.size_bytes,
            fd=arena.fd,
            keep=arena.bytes(),
            hold=arena.hold,
            name=f"arena at 0x{arena.address:x}",
        )

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.address, self.size_bytes, self.fd_offset)

    def overlaps(self, address: int, size_bytes: int) -> bool:
        return address < self.address + self.size_bytes and self.address < address + size_bytes


def allocate_control(size_bytes: int) -> SharedMemory:
    """Zeroed, sealed memory for the rings of one device."""
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    fd = os.memfd_create("kvdev-vhost", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        view = np.frombuffer(mapped, dtype=np.uint8)
        view[::PAGE_BYTES] = 0  # populate
        return SharedMemory(address=address_of(view), size_bytes=size_bytes, fd=fd, keep=view, name="rings")
    finally:
        os.close(fd)
