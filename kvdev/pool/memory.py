"""Memory that the pool process writes and its clients read: a sealed memfd, mapped by each.

Not here: what stands in it (``kvdev.native.view``).
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvdev.errors import TransportError

_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
"""Its size stays, and nobody who gets the descriptor can map it for writing."""


class SharedMemory:
    """One piece of this process's making; ``array`` is the writable view of it."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._map = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self.fd)
            raise
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)[:size_bytes]

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_shared(fd: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A read-only view of memory that another process made; the descriptor may be closed afterwards."""
    actual = os.fstat(fd).st_size
    if actual < size_bytes:
        raise TransportError(f"pool: shared memory: expected at least {size_bytes} bytes, got {actual}")
    mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(mapped, dtype=np.uint8)
