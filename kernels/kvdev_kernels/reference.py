"""NumPy page kernels: the oracle of every other back end, and the slow path where Numba is missing.

Written over whole strided arrays, apart from the run arithmetic that the fast kernels share.
Not here: checks (``kvdev_kernels.dispatch`` makes them before it calls a back end).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.native.crc import crc32c_at
from kvdev_kernels.layout import PagedLayout
from kvdev_kernels.nh64 import nh64
from kvdev_kernels.tensor import CPU

Bytes = npt.NDArray[np.uint8]


class _Memory:
    """Bytes at an address under NumPy's array protocol; the caller keeps them alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def memory_at(address: int, size_bytes: int) -> Bytes:
    """Memory as an array; the caller keeps it alive and knows that it may be touched."""
    return np.asarray(_Memory(address, (size_bytes,), None))


def checksum_at(address: int, size_bytes: int, kind: np.dtype[Any]) -> int:
    """The checksum that this type holds: CRC32C in 32 bits, NH-64 in 64."""
    return crc32c_at(address, size_bytes) if kind == np.uint32 else nh64(memory_at(address, size_bytes))


def _places(layout: PagedLayout, plane_index: int, page: int) -> Iterator[tuple[Bytes, Bytes]]:
    """The segments of one plane as bytes: in the tensor by block, and in the page at this address by block of the page.

    Both have the axes (block, tokens…, head, elements…, byte of an element).
    """
    geometry = layout.geometry
    plane_size = geometry.page_size_bytes // len(layout.planes)
    plane = layout.planes[plane_index]
    row = sum(part.size_bytes for part in plane.segments)
    for part in plane.segments:
        axes = (part.block, *part.tokens, part.head, *part.elements, (part.element_size_bytes, 1))
        extents = [extent for extent, _ in axes]
        tensor = np.asarray(_Memory(part.address, tuple(extents), tuple(stride for _, stride in axes)))
        steps = [1, part.element_size_bytes]
        for extent in reversed(extents[len(part.tokens) + 2 : -1]):
            steps.append(steps[-1] * extent)
        # Behind the last of the elements' steps stand whole rows: of a head, a token, a block.
        steps[-1] = row
        for extent in reversed(extents[1 : len(part.tokens) + 2]):
            steps.append(steps[-1] * extent)
        extents[0] = layout.blocks_per_page
        address = page + plane_index * plane_size + part.offset_bytes
        yield tensor, np.asarray(_Memory(address, tuple(extents), tuple(reversed(steps))))


class NumpyKernels:
    """The back end ``numpy``."""

    backend = "numpy"
    devices: tuple[str, ...] = (CPU,)

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: npt.NDArray[np.uint32] | npt.NDArray[np.uint64] | None,
    ) -> None:
        for page, blocks in zip(addresses, table, strict=True):
            for plane_index in range(len(layout.planes)):
                for tensor, place in _places(layout, plane_index, int(page)):
                    place[...] = tensor[blocks]
        self._checksum(layout, addresses, sums)

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: npt.NDArray[np.uint32] | npt.NDArray[np.uint64] | None,
    ) -> None:
        for page, blocks in zip(addresses, table, strict=True):
            for plane_index in range(len(layout.planes)):
                for tensor, place in _places(layout, plane_index, int(page)):
                    tensor[blocks] = place
        self._checksum(layout, addresses, sums)

    def _checksum(
        self,
        layout: PagedLayout,
        addresses: AddressArray,
        sums: npt.NDArray[np.uint32] | npt.NDArray[np.uint64] | None,
    ) -> None:
        if sums is not None:
            for index, address in enumerate(addresses):
                sums[index] = checksum_at(int(address), layout.geometry.page_size_bytes, sums.dtype)

    def close(self) -> None:
        """Nothing to give back."""
