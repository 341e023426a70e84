"""Pack and unpack: check everything, choose a back end, move the pages.

Not here: layouts (``kvdev_kernels.layout``); moving bytes (``kvdev_kernels.cpu``, ``kvdev_kernels.reference``).
Threads: one caller at a time per ``PageKernels``; calls block until the pages are moved, with the GIL released.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages, page_addresses
from kvdev.errors import UsageError
from kvdev_kernels.errors import BackendUnavailableError, ShapeError
from kvdev_kernels.fp8 import check_scales, dequantize, fp8_geometry, quantize
from kvdev_kernels.layout import PagedLayout
from kvdev_kernels.reference import checksum_at, memory_at
from kvdev_kernels.tensor import CPU

BACKEND_VARIABLE = "KVDEV_KERNELS"
"""Environment variable that names the back end, for example ``numpy`` or ``cpu-numba:portable``."""

BACKENDS = ("cpu-numba", "numpy")
"""Best first."""

ALGORITHMS = ("crc32c", "nh64")
"""Page checksums: CRC32C of 32 bits, which the store keeps, and NH-64 of 64, which a GPU can compute."""

Crc32cArray = npt.NDArray[np.uint32]
SumArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


class Backend(Protocol):
    """What moves pages; arguments are checked. ``sums`` is filled in where it is there: uint32 CRC32C, uint64 NH-64."""

    backend: str
    devices: tuple[str, ...]
    """Kinds of devices whose tensors it moves, as torch names them: ``cpu``, ``cuda``."""

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
    ) -> None: ...

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
    ) -> None: ...

    def close(self) -> None: ...


class UnpackResult(NamedTuple):
    """What ``unpack`` found: the checksum of every page, and whether it is the expected one."""

    checksum: SumArray
    is_ok: npt.NDArray[np.bool_]

    @property
    def crc32c(self) -> SumArray:
        """``checksum`` under the name of the algorithm that is meant unless another was asked for."""
        return self.checksum


class PageKernels:
    """Pack and unpack on one back end.

    Args:
        backend: a name of ``BACKENDS``, ``cpu-numba:TIER``, or ``auto``: the environment variable KVDEV_KERNELS if
            it is set, else the best one that works here.
        thread_count: threads over pages; by default one for each core this process may use, at most eight.
    """

    def __init__(self, backend: str = "auto", *, thread_count: int | None = None) -> None:
        if backend == "auto":
            backend = os.environ.get(BACKEND_VARIABLE) or "auto"
        self._backend = _open(backend, thread_count)
        self.backend = self._backend.backend

    @property
    def tier(self) -> str:
        """The instruction set in use; empty where a back end has only one."""
        return str(getattr(self._backend, "tier", ""))

    @overload
    def pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        *,
        checksums: bool = True,
        algorithm: Literal["crc32c"] = "crc32c",
    ) -> Crc32cArray | None: ...

    @overload
    def pack(
        self, layout: PagedLayout, block_table: Any, pages: Pages, *, checksums: bool = True, algorithm: str
    ) -> SumArray | None: ...

    def pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        *,
        checksums: bool = True,
        algorithm: str = "crc32c",
    ) -> SumArray | None:
        """Gather pages out of the paged tensors into staging; returns each page's checksum.

        Args:
            block_table: (pages, blocks per page) block indices, in token order.
            pages: where to: an array, a lease or addresses (``kvdev.buffers``), in the block table's order.
            checksums: without, nothing is computed and None returned.
            algorithm: of ``ALGORITHMS``.
        """
        self._check_device(layout)
        addresses = _addresses(pages, layout, is_written=True)
        table = layout.check_table(block_table, len(addresses), is_written=False)
        sums = _sums(algorithm, len(addresses))
        if len(addresses):
            self._backend.pack(layout, table, addresses, sums if checksums else None)
        return sums if checksums else None

    def unpack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        *,
        verify: npt.ArrayLike | None = None,
        algorithm: str = "crc32c",
    ) -> UnpackResult:
        """Scatter pages from staging into the paged tensors, computing each page's checksum on the way.

        ``verify`` holds the expected checksum of each page. A page that differs was scattered all the same: the blocks
        it names, and nothing else, hold wrong bytes, and ``is_ok`` says so; whoever called must not use them.
        """
        self._check_device(layout)
        addresses = _addresses(pages, layout, is_written=False)
        table = layout.check_table(block_table, len(addresses), is_written=True)
        if not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        expected = _expected(verify, len(addresses))
        sums = _sums(algorithm, len(addresses))
        if len(addresses):
            self._backend.unpack(layout, table, addresses, sums)
        is_ok = np.ones(len(addresses), np.bool_) if expected is None else sums == expected
        return UnpackResult(sums, is_ok)

    def pack_fp8(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        *,
        dtype: str,
        scales: npt.ArrayLike,
        checksums: bool = True,
        algorithm: str = "crc32c",
    ) -> SumArray | None:
        """As ``pack`` with elements of 16 bits made into fp8 (``kvdev_kernels.fp8``): half the bytes, less precision.

        Args:
            pages: of ``fp8_geometry(layout.geometry, dtype)``.
            dtype: ``fp8_e4m3`` or ``fp8_e4m3fnuz``.
            scales: (layer, plane, KV head) positive numbers; what is stored is the fp8 next to element / scale.
        """
        table, addresses, factors = self._fp8_arguments(
            layout, block_table, pages, dtype, scales, is_pack=True
        )
        wide = np.empty((1, layout.geometry.page_size_bytes), np.uint8)
        wide_address = np.array([wide.ctypes.data], np.uint64)
        narrow = fp8_geometry(layout.geometry, dtype)
        sums = _sums(algorithm, len(addresses))
        for index, address in enumerate(addresses):
            self._backend.pack(layout, table[index : index + 1], wide_address, None)
            target = memory_at(int(address), narrow.page_size_bytes)
            quantize(wide[0], target, layout.geometry, dtype, factors, is_compiled=self._is_compiled)
            sums[index] = checksum_at(int(address), narrow.page_size_bytes, sums.dtype)
        return sums if checksums else None

    def unpack_fp8(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        *,
        dtype: str,
        scales: npt.ArrayLike,
        verify: npt.ArrayLike | None = None,
        algorithm: str = "crc32c",
    ) -> UnpackResult:
        """As ``unpack`` from pages that ``pack_fp8`` made, with the same ``dtype`` and ``scales``."""
        table, addresses, factors = self._fp8_arguments(
            layout, block_table, pages, dtype, scales, is_pack=False
        )
        expected = _expected(verify, len(addresses))
        wide = np.empty((1, layout.geometry.page_size_bytes), np.uint8)
        wide_address = np.array([wide.ctypes.data], np.uint64)
        narrow = fp8_geometry(layout.geometry, dtype)
        sums = _sums(algorithm, len(addresses))
        for index, address in enumerate(addresses):
            source = memory_at(int(address), narrow.page_size_bytes)
            sums[index] = checksum_at(int(address), narrow.page_size_bytes, sums.dtype)
            dequantize(source, wide[0], layout.geometry, dtype, factors, is_compiled=self._is_compiled)
            self._backend.unpack(layout, table[index : index + 1], wide_address, None)
        is_ok = np.ones(len(addresses), np.bool_) if expected is None else sums == expected
        return UnpackResult(sums, is_ok)

    @property
    def _is_compiled(self) -> bool:
        return self.backend == "cpu-numba"

    def _fp8_arguments(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Pages,
        dtype: str,
        scales: npt.ArrayLike,
        *,
        is_pack: bool,
    ) -> tuple[npt.NDArray[np.int64], AddressArray, npt.NDArray[np.float32]]:
        if layout.device != CPU:
            raise ShapeError("tensors: device", expected="cpu, where fp8 is made", got=layout.device)
        self._check_device(layout)
        narrow = fp8_geometry(layout.geometry, dtype)
        factors = check_scales(layout.geometry, scales)
        addresses = _addresses(pages, layout, is_written=is_pack, size=narrow.page_size_bytes)
        table = layout.check_table(block_table, len(addresses), is_written=not is_pack)
        if not is_pack and not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        return table, addresses, factors

    def _check_device(self, layout: PagedLayout) -> None:
        kind = layout.device.partition(":")[0]
        if kind not in self._backend.devices:
            raise ShapeError(
                f"{layout.views[0].name}: device",
                expected=f"{' or '.join(self._backend.devices)} for back end {self.backend}",
                got=layout.device,
            )

    def close(self) -> None:
        """End the back end's threads."""
        self._backend.close()

    def __enter__(self) -> PageKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sums(algorithm: str, count: int) -> SumArray:
    if algorithm not in ALGORITHMS:
        raise ShapeError("algorithm", expected="one of " + ", ".join(ALGORITHMS), got=repr(algorithm))
    return np.zeros(count, np.uint32) if algorithm == "crc32c" else np.zeros(count, np.uint64)


def _expected(verify: npt.ArrayLike | None, count: int) -> npt.NDArray[Any] | None:
    if verify is None:
        return None
    expected = np.asarray(verify)
    if expected.shape != (count,) or not np.issubdtype(expected.dtype, np.integer):
        raise ShapeError(
            "verify", expected=f"{count} whole numbers", got=f"{expected.shape} {expected.dtype}"
        )
    return expected


def _addresses(pages: Pages, layout: PagedLayout, *, is_written: bool, size: int = 0) -> AddressArray:
    size = size or layout.geometry.page_size_bytes
    try:
        addresses = page_addresses(pages, size, is_written=is_written)
    except UsageError as error:
        raise ShapeError("pages", expected="pages of this geometry", got=str(error)) from error
    if layout.device == CPU and layout.shares_memory(addresses, size):
        raise ShapeError("pages", expected="memory apart from the tensors'", got="a page inside a tensor")
    return addresses


def _open(name: str, thread_count: int | None) -> Backend:
    kind, _, tier = name.partition(":")
    if kind == "auto":
        try:
            return _open("cpu-numba", thread_count)
        except BackendUnavailableError:
            # The caller sees which one it got in ``backend``; ``availability`` says why.
            return _open("numpy", thread_count)
    if kind == "cpu-numba":
        from kvdev_kernels.cpu import CpuKernels

        return CpuKernels(tier=tier or None, thread_count=thread_count)
    if kind == "numpy" and not tier:
        from kvdev_kernels.reference import NumpyKernels

        return NumpyKernels()
    raise BackendUnavailableError(name, f"no such back end; expected one of {', '.join(BACKENDS)} or auto")


def availability() -> dict[str, str]:
    """Each back end and why it cannot run here; empty text where it can."""
    found = {}
    for name in BACKENDS:
        try:
            _open(name, 1).close()
            found[name] = ""
        except BackendUnavailableError as error:
            found[name] = error.reason
    return found


@functools.lru_cache(maxsize=1)
def default_kernels() -> PageKernels:
    """The kernels that ``pack`` and ``unpack`` use when they are given none: automatic, one thread."""
    return PageKernels(thread_count=1)


def pack(
    layout: PagedLayout,
    block_table: Any,
    pages: Pages,
    *,
    checksums: bool = True,
    algorithm: str = "crc32c",
    kernels: PageKernels | None = None,
) -> SumArray | None:
    """``PageKernels.pack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).pack(
        layout, block_table, pages, checksums=checksums, algorithm=algorithm
    )


def unpack(
    layout: PagedLayout,
    block_table: Any,
    pages: Pages,
    *,
    verify: npt.ArrayLike | None = None,
    algorithm: str = "crc32c",
    kernels: PageKernels | None = None,
) -> UnpackResult:
    """``PageKernels.unpack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).unpack(
        layout, block_table, pages, verify=verify, algorithm=algorithm
    )
