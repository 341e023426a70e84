"""NumPy page kernels: the oracle of every other back end, and the slow path where Numba is missing.

Written over whole strided arrays, apart from the run arithmetic that the fast kernels share.
Not here: checks (``kvdev_kernels.dispatch`` makes them before it calls a back end).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.native.crc import crc32c_at
from kvdev_kernels.layout import PagedLayout


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


def plane_view(layout: PagedLayout, plane_index: int) -> npt.NDArray[np.uint8]:
    """One plane as bytes: (block, token, head, byte of the head)."""
    geometry = layout.geometry
    row = geometry.head_size * geometry.dtype_size_bytes
    shape = (layout.block_count, layout.block_size, geometry.kv_head_count, row)
    strides = (layout.block_stride, *layout.row_strides, 1)
    return np.asarray(_Memory(int(layout.plane_addresses[plane_index]), shape, strides))


class NumpyKernels:
    """The back end ``numpy``."""

    backend = "numpy"

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        crc32c: npt.NDArray[np.uint32] | None,
    ) -> None:
        geometry = layout.geometry
        planes = geometry.layer_count * geometry.planes_per_layer
        for page, blocks in zip(addresses, table, strict=True):
            target = np.asarray(_Memory(int(page), (planes, geometry.page_size_bytes // planes), None))
            for plane_index in range(planes):
                target[plane_index] = plane_view(layout, plane_index)[blocks].reshape(-1)
        self._checksum(layout, addresses, crc32c)

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        crc32c: npt.NDArray[np.uint32] | None,
    ) -> None:
        geometry = layout.geometry
        planes = geometry.layer_count * geometry.planes_per_layer
        row = geometry.head_size * geometry.dtype_size_bytes
        shape = (planes, layout.blocks_per_page, layout.block_size, geometry.kv_head_count, row)
        for page, blocks in zip(addresses, table, strict=True):
            source = np.asarray(_Memory(int(page), shape, None))
            for plane_index in range(planes):
                plane_view(layout, plane_index)[blocks] = source[plane_index]
        self._checksum(layout, addresses, crc32c)

    def _checksum(
        self, layout: PagedLayout, addresses: AddressArray, crc32c: npt.NDArray[np.uint32] | None
    ) -> None:
        if crc32c is not None:
            for index, address in enumerate(addresses):
                crc32c[index] = crc32c_at(int(address), layout.geometry.page_size_bytes)

    def close(self) -> None:
        """Nothing to give back."""
