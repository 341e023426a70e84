"""A GPU as a back end of ``PageKernels``: calls that end when the pages are moved, with either checksum.

NH-64 is computed on the device. CRC32C needs carryless multiplication, which GPUs lack: it is computed here over the
staging pages, part by part while the next part is on the link (docs/design/0003-gpu-checksum.md).
Not here: moves that do not wait (``kvdev_kernels.gpu``); which route bytes take (``kvdev_kernels.gpu_calibration``).
Threads: one caller at a time; calls block until the pages are moved.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.native.checksum import CRC32C, SumArray
from kvdev_kernels.driver import Driver
from kvdev_kernels.driver_calls import VENDORS, Vendor
from kvdev_kernels.errors import BackendUnavailableError, ShapeError
from kvdev_kernels.gpu import SLOT_COUNT, GpuKernels, Move
from kvdev_kernels.gpu_calibration import calibration_path, load_calibration, route_from_environment
from kvdev_kernels.gpu_compile import cache_folder
from kvdev_kernels.layout import PagedLayout

PART_SIZE_BYTES = 16 << 20
"""Pages of one move: bounds the device memory of the bounce route, and is 0.3 ms of a link of 64 GB/s, so that little
of a checksum on the CPU comes after the last byte."""


class GpuBackend:
    """One device. What it is given is checked again by ``GpuKernels`` before anything is launched."""

    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, driver: Driver) -> None:
        folder = cache_folder()
        self.kernels = GpuKernels(driver, route=route_from_environment(), cache=folder)
        self.backend = driver.backend
        self.tier = driver.arch
        saved = folder and load_calibration(calibration_path(driver, folder, self.kernels.workgroup_limit))
        if saved:
            self.kernels.choose_route = lambda is_pack, size: saved.route(
                is_pack=is_pack, run_size_bytes=size
            )

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
        *,
        after: int | None = None,
    ) -> None:
        """As ``Backend.pack``, behind the present work of the caller's stream ``after``."""
        is_crc = self._is_crc(addresses, layout, sums)
        moves: deque[tuple[slice, Move]] = deque()
        for part in self._parts(layout, addresses):
            if len(moves) == SLOT_COUNT:
                self._end_pack(moves.popleft(), layout, addresses, sums, is_crc=is_crc)
            move = self.kernels.submit_pack(
                layout, table[part], addresses[part], after=after, has_sum=sums is not None and not is_crc
            )
            moves.append((part, move))
        while moves:
            self._end_pack(moves.popleft(), layout, addresses, sums, is_crc=is_crc)

    def _end_pack(
        self,
        sent: tuple[slice, Move],
        layout: PagedLayout,
        addresses: AddressArray,
        sums: SumArray | None,
        *,
        is_crc: bool,
    ) -> None:
        part, move = sent
        found = move.wait().nh64
        if sums is not None and is_crc:
            sums[part] = _crc32c(layout, addresses[part])
        elif sums is not None:
            assert found is not None, "it was asked for"
            sums[part] = found

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
        *,
        after: int | None = None,
    ) -> None:
        """As ``Backend.unpack``, behind the present work of the caller's stream ``after``."""
        is_crc = self._is_crc(addresses, layout, sums)
        moves: deque[tuple[slice, Move]] = deque()
        for part in self._parts(layout, addresses):
            if len(moves) == SLOT_COUNT:
                self._end_unpack(moves.popleft(), sums, is_crc=is_crc)
            move = self.kernels.submit_unpack(
                layout, table[part], addresses[part], after=after, has_sum=sums is not None and not is_crc
            )
            moves.append((part, move))
            if sums is not None and is_crc:
                # While the part is on the link: it is read there as here.
                sums[part] = _crc32c(layout, addresses[part])
        while moves:
            self._end_unpack(moves.popleft(), sums, is_crc=is_crc)

    def _end_unpack(self, sent: tuple[slice, Move], sums: SumArray | None, *, is_crc: bool) -> None:
        part, move = sent
        found = move.wait().nh64
        if sums is not None and not is_crc:
            assert found is not None, "it was asked for"
            sums[part] = found

    def _is_crc(self, addresses: AddressArray, layout: PagedLayout, sums: SumArray | None) -> bool:
        """Whether the CPU has to compute the sums; ShapeError where it does not reach the pages."""
        if sums is None or sums.dtype != CRC32C.sum_dtype:
            return False
        if self.kernels.is_device_memory(addresses, layout.geometry.page_size_bytes):
            raise ShapeError(
                "algorithm",
                expected="nh64 for pages in the memory of a GPU, which cannot compute others",
                got="crc32c",
            )
        return True

    def _parts(self, layout: PagedLayout, addresses: AddressArray) -> list[slice]:
        step = max(1, PART_SIZE_BYTES // layout.geometry.page_size_bytes)
        return [slice(first, first + step) for first in range(0, len(addresses), step)]

    def close(self) -> None:
        self.kernels.close()


def _crc32c(layout: PagedLayout, addresses: AddressArray) -> SumArray:
    return CRC32C.sums(np.ascontiguousarray(addresses), layout.geometry.page_size_bytes)


def vendor_named(name: str) -> Vendor | None:
    """The vendor whose back end has this name."""
    return next((vendor for vendor in VENDORS if vendor.backend == name), None)


def open_backend(layout: PagedLayout) -> GpuBackend:
    """The back end of the device that the layout's tensors are on; BackendUnavailableError with every vendor's reason.

    ``cuda`` is torch's word on ROCm as well, so the driver that knows the memory is taken.
    """
    index = int(layout.device.partition(":")[2] or 0)
    address = int(layout.plane_addresses[0])
    reasons: list[str] = []
    found: Driver | None = None
    for vendor in VENDORS:
        try:
            driver = Driver(vendor, index)
        except BackendUnavailableError as error:
            reasons.append(f"{vendor.backend}: {error.reason}")
            continue
        if driver.allocation_of(address) is not None:
            return GpuBackend(driver)
        found = found or driver  # it says what is wrong with the memory
    if found is not None:
        return GpuBackend(found)
    raise BackendUnavailableError(layout.device, "; ".join(reasons))
