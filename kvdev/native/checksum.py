"""The page checksums that a KV namespace can have, by name and number; of many pages at once.

A checksum of a page's bytes is a *sum* here: an entry of the page table binds it to key, place and write, and calls
that its checksum. Definitions: CRC32C (``kvdev.native.crc``), NH-64 (``kvdev_kernels.nh64``).
Threads: any; the GIL is released while the core computes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.errors import UnsupportedError, UsageError

SumArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
"""One sum for each page: uint32 CRC32C, uint64 NH-64."""


class Nh64Impl(enum.IntEnum):
    """The implementations, ``enum kvdev_nh64_id``."""

    PORTABLE = 0
    AVX2 = 1


@dataclass(frozen=True)
class PageChecksum:
    """One algorithm."""

    name: str
    number: int
    """In entries on media."""
    sum_dtype: np.dtype[np.uint32] | np.dtype[np.uint64]

    def zeros(self, count: int) -> SumArray:
        return np.zeros(count, dtype=self.sum_dtype)

    def text(self, value: int) -> str:
        """A sum for people to read, with all its digits."""
        return f"0x{int(value):0{2 * self.sum_dtype.itemsize}x}"

    def sums(self, addresses: npt.NDArray[np.uint64], size_bytes: int) -> SumArray:
        """Sums of the bytes at each address; the caller keeps them alive and readable."""
        out = np.empty(len(addresses), dtype=self.sum_dtype)
        places = ffi.from_buffer("uint64_t[]", addresses)
        if self is NH64:
            lib.kvdev_nh64_many(places, size_bytes, len(addresses), ffi.from_buffer("uint64_t[]", out))
        else:
            lib.kvdev_crc32c_many(places, size_bytes, len(addresses), ffi.from_buffer("uint32_t[]", out))
        return out

    def entry_checksum(self, uuid: bytes, key: bytes, generation: int, length: int, value: int) -> int:
        """What an entry of the page table holds for a page whose bytes have this sum."""
        return int(lib.kvdev_entry_checksum(self.number, uuid, key, generation, length, value))

    def grant_sums(self, uuid: bytes, keys: npt.NDArray[np.uint8], grants: npt.NDArray[Any]) -> SumArray:
        """The sums that the bytes of the grants' pages must have."""
        out = np.empty(len(grants), dtype=self.sum_dtype)
        lib.kvdev_grants_sums(
            self.number,
            uuid,
            ffi.from_buffer("uint8_t[]", keys),
            ffi.from_buffer("struct kvdev_grant[]", grants),
            len(grants),
            ffi.from_buffer(out),
        )
        return out

    def verify(
        self,
        uuid: bytes,
        keys: npt.NDArray[np.uint8],
        grants: npt.NDArray[Any],
        sums: SumArray,
        *,
        length: int,
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Where bytes with these sums, read under a grant, are those put under its key; and how many are."""
        assert sums.dtype == self.sum_dtype and len(sums) == len(grants) == len(keys)
        valid = np.empty(len(keys), dtype=np.bool_)
        count = lib.kvdev_grants_verify(
            self.number,
            uuid,
            ffi.from_buffer("uint8_t[]", keys),
            ffi.from_buffer("struct kvdev_grant[]", grants),
            ffi.from_buffer(sums),
            length,
            len(keys),
            ffi.from_buffer("uint8_t[]", valid),
        )
        return valid, int(count)


CRC32C = PageChecksum("crc32c", int(lib.KVDEV_CHECKSUM_CRC32C), np.dtype(np.uint32))
NH64 = PageChecksum("nh64", int(lib.KVDEV_CHECKSUM_NH64), np.dtype(np.uint64))
PAGE_CHECKSUMS = {each.name: each for each in (CRC32C, NH64)}
"""By name, the one first that a KV namespace has when nobody says otherwise."""


def checksum_named(name: str) -> PageChecksum:
    """The algorithm of this name; UsageError listing those there are."""
    if name not in PAGE_CHECKSUMS:
        raise UsageError(f"checksum: expected one of {', '.join(PAGE_CHECKSUMS)}, got {name!r}")
    return PAGE_CHECKSUMS[name]


def checksum_numbered(what: str, number: int) -> PageChecksum:
    """The algorithm of this number on media; UnsupportedError for one that this version does not know."""
    for each in PAGE_CHECKSUMS.values():
        if each.number == number:
            return each
    known = ", ".join(f"{each.number} ({each.name})" for each in PAGE_CHECKSUMS.values())
    raise UnsupportedError(
        f"{what}: page checksum: expected one of {known}, got {number}; use a kvdev that knows it",
        feature="page checksum",
    )


def nh64_impl(impl: Nh64Impl, data: Any) -> int:
    """NH-64 with the implementation named; UnsupportedError if this processor lacks it."""
    buffer = ffi.from_buffer(data)
    out = ffi.new("uint64_t *")
    if lib.kvdev_nh64_impl(int(impl), buffer, len(buffer), out) != 0:
        raise UnsupportedError(f"nh64: this processor lacks {impl.name}", feature=impl.name)
    return int(out[0])


def nh64_impls() -> list[Nh64Impl]:
    """The implementations that run on this processor."""
    return [impl for impl in Nh64Impl if lib.kvdev_nh64_available(int(impl))]
