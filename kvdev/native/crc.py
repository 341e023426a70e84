"""CRC32C of the C core: NVMe/TCP digests and page checksums.

Values are the finished CRC of the bytes so far: start with 0, pass the last result to go on.
Threads: any; the GIL is released while the core computes.
"""

from __future__ import annotations

import enum
from typing import Any

from kvdev._core import ffi, lib
from kvdev.errors import UnsupportedError

BytesLike = Any
"""Anything with the buffer protocol, C-contiguous: bytes, bytearray, memoryview, NumPy array."""


class Crc32cImpl(enum.IntEnum):
    """The implementations, ``enum kvdev_crc32c_id``."""

    TABLE = 0
    SSE42 = 1
    PCLMUL = 2
    VPCLMUL = 3
    ARM = 4


def crc32c(data: BytesLike, crc: int = 0) -> int:
    """CRC32C of ``data`` after bytes whose CRC is ``crc``."""
    buffer = ffi.from_buffer(data)
    return int(lib.kvdev_crc32c(crc, buffer, len(buffer)))


def crc32c_at(address: int, byte_count: int, crc: int = 0) -> int:
    """CRC32C of memory at ``address``; the caller keeps it alive and readable meanwhile."""
    return int(lib.kvdev_crc32c(crc, ffi.cast("const void *", address), byte_count))


def crc32c_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """CRC32C of A followed by B, from theirs and the length of B."""
    return int(lib.kvdev_crc32c_combine(crc_a, crc_b, len_b))


def crc32c_impl(impl: Crc32cImpl, data: BytesLike, crc: int = 0) -> int:
    """As ``crc32c`` with the implementation named; UnsupportedError if this processor lacks it."""
    buffer = ffi.from_buffer(data)
    out = ffi.new("uint32_t *")
    if lib.kvdev_crc32c_impl(int(impl), crc, buffer, len(buffer), out) != 0:
        raise UnsupportedError(f"crc32c: this processor lacks {impl.name}", feature=impl.name)
    return int(out[0])


def available_impls() -> list[Crc32cImpl]:
    """The implementations that run on this processor."""
    return [impl for impl in Crc32cImpl if lib.kvdev_crc32c_available(int(impl))]


def best_impl() -> Crc32cImpl:
    """The implementation that ``crc32c`` takes for long buffers."""
    return Crc32cImpl(lib.kvdev_crc32c_best())
