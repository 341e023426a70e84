"""Page buffers: from what a caller holds to the addresses that the C core and the kernels work on.

Not here: allocation (``kvdev.staging``); layouts of paged tensors (``kvdev_kernels.layout``).
Threads: any. The addresses are valid while the caller keeps the buffer alive and, for a lease, unreleased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvdev.errors import UsageError

AddressArray = npt.NDArray[np.uint64]
"""``(n,) uint64``, C-contiguous: the virtual address of each page's first byte."""


@runtime_checkable
class PageBuffers(Protocol):
    """Something that knows where its pages are: a staging lease, or ``AddressedPages``."""

    @property
    def addresses(self) -> AddressArray:
        """Address of each page; raises UsageError when the memory is no longer the caller's."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that may be touched from each address on."""


@dataclass(frozen=True)
class AddressedPages:
    """Pages at given addresses, with whatever keeps the memory alive."""

    addresses: AddressArray
    page_size_bytes: int
    owner: object

    def __post_init__(self) -> None:
        addresses = self.addresses
        if (
            not isinstance(addresses, np.ndarray)
            or addresses.dtype != np.uint64
            or addresses.ndim != 1
            or not addresses.flags.c_contiguous
        ):
            raise UsageError("pages: addresses: expected a contiguous (n,) uint64 array")
        if addresses.size and int(addresses.min()) == 0:
            raise UsageError("pages: addresses: expected virtual addresses, got 0")


Pages = npt.NDArray[Any] | PageBuffers
"""What page calls accept."""


def page_addresses(pages: Pages, page_size_bytes: int, *, is_written: bool = False) -> AddressArray:
    """The address of every page, checked: each has ``page_size_bytes`` bytes that may be touched.

    Accepts a ``(n, page_size_bytes) uint8`` array whose rows are contiguous, or any ``PageBuffers``. The
    caller keeps ``pages`` alive until the last access. ``is_written`` refuses a read-only array.
    """
    if isinstance(pages, np.ndarray):
        return _array_addresses(pages, page_size_bytes, is_written=is_written)
    if isinstance(pages, PageBuffers):
        addresses = pages.addresses
        if pages.page_size_bytes < page_size_bytes:
            raise UsageError(
                f"pages: expected pages of at least {page_size_bytes} bytes, got {pages.page_size_bytes}"
            )
        if is_written and isinstance(pages, AddressedPages):  # a lease cuts its memory itself
            _check_apart(addresses, page_size_bytes)
        return addresses
    raise UsageError(
        f"pages: expected a (n, {page_size_bytes}) uint8 array, a lease or AddressedPages, "
        f"got {type(pages).__name__}"
    )


def _check_apart(addresses: AddressArray, page_size_bytes: int) -> None:
    """UsageError when two pages share memory: one would be written over the other."""
    ordered = np.sort(addresses)
    close = np.flatnonzero(np.diff(ordered) < np.uint64(page_size_bytes))
    if len(close):
        first, second = int(ordered[close[0]]), int(ordered[close[0] + 1])
        raise UsageError(
            f"pages: addresses: expected {page_size_bytes} bytes of memory for each page, got 0x{second:x} only "
            f"{second - first} bytes behind 0x{first:x}"
        )


def _array_addresses(pages: npt.NDArray[Any], page_size_bytes: int, *, is_written: bool) -> AddressArray:
    if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != page_size_bytes:
        raise UsageError(
            f"pages: expected a (n, {page_size_bytes}) uint8 array, got {pages.shape} {pages.dtype}"
        )
    if pages.shape[0] and pages.shape[1] > 1 and pages.strides[1] != 1:
        raise UsageError(f"pages: expected contiguous rows, got strides {pages.strides}")
    if is_written and not pages.flags.writeable:
        raise UsageError("pages: expected a writable array, got a read-only one")
    if is_written and pages.shape[0] > 1 and abs(pages.strides[0]) < page_size_bytes:
        raise UsageError(f"pages: expected rows that do not overlap, got strides {pages.strides}")
    start = pages.ctypes.data
    offsets = np.arange(pages.shape[0], dtype=np.int64) * pages.strides[0]
    return (offsets + start).astype(np.uint64)
