"""Pack and unpack: check everything, choose a back end, move the pages.

Not here: layouts (``kvdev_kernels.layout``); moving bytes (``kvdev_kernels.cpu``, ``kvdev_kernels.reference``).
Threads: one caller at a time per ``PageKernels``; calls block until the pages are moved, with the GIL released.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, overload

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages, page_addresses
from kvdev.errors import UsageError
from kvdev_kernels.errors import BackendUnavailableError, ShapeError
from kvdev_kernels.fp8 import check_scales, dequantize, fp8_geometry, quantize
from kvdev_kernels.layout import PagedLayout
from kvdev_kernels.reference import checksum_at, memory_at
from kvdev_kernels.tensor import CPU, is_tensor, stream_number, tensor_pages

if TYPE_CHECKING:
    from kvdev_kernels.gpu_backend import GpuBackend

BACKEND_VARIABLE = "KVDEV_KERNELS"
"""Environment variable that names the back end, for example ``numpy`` or ``cpu-numba:portable``."""

BACKENDS = ("cpu-numba", "numpy")
"""Of tensors the processor reaches, best first."""
GPU_DEVICE = "cuda"
"""Torch's word for devices of either vendor."""
GPU_BACKENDS = ("hip", "cuda")
"""Of tensors in the memory of a GPU; ``cuda:1`` is device 1."""

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
        backend: a name of ``BACKENDS`` or ``GPU_BACKENDS``, ``cpu-numba:TIER``, ``cuda:DEVICE``, or ``auto``: the
            environment variable KVDEV_KERNELS if it is set, else for each layout the best one that works where its
            tensors are; those of GPUs are opened when they are first needed.
        thread_count: threads over pages; by default one for each core this process may use, at most eight.
    """

    def __init__(self, backend: str = "auto", *, thread_count: int | None = None) -> None:
        if backend == "auto":
            backend = os.environ.get(BACKEND_VARIABLE) or "auto"
        self._is_auto = backend == "auto"
        self._backend = _open(backend, thread_count)
        self._gpus: dict[str, GpuBackend] = {}
        self._staging: dict[int, int] = {}
        self.backend = self._backend.backend
        """Of tensors on the CPU where it was chosen automatically."""

    @property
    def tier(self) -> str:
        """The instruction set in use; empty where a back end has only one."""
        return str(getattr(self._backend, "tier", ""))

    @overload
    def pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Any,
        *,
        checksums: bool = True,
        algorithm: Literal["crc32c"] = "crc32c",
        stream: Any = None,
    ) -> Crc32cArray | None: ...

    @overload
    def pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Any,
        *,
        checksums: bool = True,
        algorithm: str,
        stream: Any = None,
    ) -> SumArray | None: ...

    def pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Any,
        *,
        checksums: bool = True,
        algorithm: str = "crc32c",
        stream: Any = None,
    ) -> SumArray | None:
        """Gather pages out of the paged tensors into staging; returns each page's checksum.

        Args:
            block_table: (pages, blocks per page) block indices, in token order.
            pages: where to: an array, a lease or addresses (``kvdev.buffers``), or a torch tensor on the CPU or the
                layout's device, in the block table's order. For a GPU host memory is pinned (``register``).
            checksums: without, nothing is computed and None returned.
            algorithm: of ``ALGORITHMS``.
            stream: of a GPU, whose present work writes the tensors: a number or torch's stream. By default torch's
                current one where the tensors are torch's.
        """
        mover = self._mover(layout, stream)
        addresses = _addresses(pages, layout, is_written=True)
        table = layout.check_table(block_table, len(addresses), is_written=False)
        sums = _sums(algorithm, len(addresses))
        if len(addresses):
            mover.pack(layout, table, addresses, sums if checksums else None)
        return sums if checksums else None

    def unpack(
        self,
        layout: PagedLayout,
        block_table: Any,
        pages: Any,
        *,
        verify: npt.ArrayLike | None = None,
        algorithm: str = "crc32c",
        stream: Any = None,
    ) -> UnpackResult:
        """Scatter pages from staging into the paged tensors, computing each page's checksum on the way.

        ``verify`` holds the expected checksum of each page. A page that differs was scattered all the same: the blocks
        it names, and nothing else, hold wrong bytes, and ``is_ok`` says so; whoever called must not use them.
        ``stream``, as in ``pack``, is what may still read the blocks.
        """
        mover = self._mover(layout, stream)
        addresses = _addresses(pages, layout, is_written=False)
        table = layout.check_table(block_table, len(addresses), is_written=True)
        if not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        expected = _expected(verify, len(addresses))
        sums = _sums(algorithm, len(addresses))
        if len(addresses):
            mover.unpack(layout, table, addresses, sums)
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
        self._mover(layout, None)
        narrow = fp8_geometry(layout.geometry, dtype)
        factors = check_scales(layout.geometry, scales)
        addresses = _addresses(pages, layout, is_written=is_pack, size=narrow.page_size_bytes)
        table = layout.check_table(block_table, len(addresses), is_written=not is_pack)
        if not is_pack and not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        return table, addresses, factors

    def register(self, address: int, size_bytes: int) -> None:
        """Pin staging memory for every GPU that is used from now on; once, before pages in it are moved."""
        if address in self._staging:
            raise ShapeError("staging", expected="memory that is not registered yet", got=f"{address:#x}")
        done: list[GpuBackend] = []
        try:
            for gpu in self._opened():
                gpu.kernels.register(address, size_bytes)
                done.append(gpu)
        except BaseException:
            for gpu in done:
                gpu.kernels.unregister(address)
            raise
        self._staging[address] = size_bytes

    def unregister(self, address: int) -> None:
        """Undo ``register``, before the memory is unmapped."""
        if address not in self._staging:
            raise ShapeError("staging", expected="memory that was registered", got=f"{address:#x}")
        del self._staging[address]
        for gpu in self._opened():
            gpu.kernels.unregister(address)

    def _opened(self) -> list[GpuBackend]:
        from kvdev_kernels.gpu_backend import GpuBackend

        return [each for each in (self._backend, *self._gpus.values()) if isinstance(each, GpuBackend)]

    def _mover(self, layout: PagedLayout, stream: Any) -> Backend:
        """What moves this layout's pages, behind the work of ``stream``; ShapeError where nothing here can."""
        kind = layout.device.partition(":")[0]
        backend: Any = self._backend
        if kind not in backend.devices:
            if not self._is_auto or kind != GPU_DEVICE:
                raise ShapeError(
                    f"{layout.views[0].name}: device",
                    expected=f"{' or '.join(backend.devices)} for back end {self.backend}",
                    got=layout.device,
                )
            backend = self._gpu(layout)
        if kind != GPU_DEVICE:
            if stream is not None:
                raise ShapeError("stream", expected="none for tensors on the CPU", got=type(stream).__name__)
            return cast(Backend, backend)
        return _Behind(backend, stream_number(stream, layout.owners[0]))

    def _gpu(self, layout: PagedLayout) -> GpuBackend:
        """The back end of the layout's device, opened if it is not yet."""
        from kvdev_kernels.gpu_backend import open_backend

        found = self._gpus.get(layout.device)
        if found is None:
            found = open_backend(layout)
            try:
                for address, size_bytes in self._staging.items():
                    found.kernels.register(address, size_bytes)
            except BaseException:
                found.close()
                raise
            self._gpus[layout.device] = found
        return found

    def close(self) -> None:
        """End the back end's threads, and give back what GPUs hold."""
        for each in (*self._gpus.values(), self._backend):
            each.close()
        self._gpus.clear()

    def __enter__(self) -> PageKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Behind:
    """A GPU's back end, moving behind the work of one stream."""

    def __init__(self, gpu: GpuBackend, after: int | None) -> None:
        self.backend, self.devices = gpu.backend, gpu.devices
        self._gpu, self._after = gpu, after

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
    ) -> None:
        self._gpu.pack(layout, table, addresses, sums, after=self._after)

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: SumArray | None,
    ) -> None:
        self._gpu.unpack(layout, table, addresses, sums, after=self._after)

    def close(self) -> None:
        """It stays its owner's."""


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


def _addresses(pages: Any, layout: PagedLayout, *, is_written: bool, size: int = 0) -> AddressArray:
    size = size or layout.geometry.page_size_bytes
    page_device = CPU
    if not isinstance(pages, np.ndarray) and is_tensor(pages):
        pages, page_device = tensor_pages(pages, size, is_written=is_written)
        if page_device not in (CPU, layout.device):
            raise ShapeError("pages: device", expected=f"cpu or {layout.device}", got=page_device)
    try:
        addresses = page_addresses(pages, size, is_written=is_written)
    except UsageError as error:
        raise ShapeError("pages", expected="pages of this geometry", got=str(error)) from error
    if layout.device == page_device and layout.shares_memory(addresses, size):
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
    if kind in GPU_BACKENDS and (not tier or tier.isdecimal()):
        from kvdev_kernels.driver import Driver
        from kvdev_kernels.gpu_backend import GpuBackend, vendor_named

        vendor = vendor_named(kind)
        assert vendor is not None, "GPU_BACKENDS are the vendors'"
        return GpuBackend(Driver(vendor, int(tier or 0)))
    known = ", ".join((*BACKENDS, *GPU_BACKENDS))
    raise BackendUnavailableError(name, f"no such back end; expected one of {known} or auto")


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
    pages: Any,
    *,
    checksums: bool = True,
    algorithm: str = "crc32c",
    stream: Any = None,
    kernels: PageKernels | None = None,
) -> SumArray | None:
    """``PageKernels.pack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).pack(
        layout, block_table, pages, checksums=checksums, algorithm=algorithm, stream=stream
    )


def unpack(
    layout: PagedLayout,
    block_table: Any,
    pages: Any,
    *,
    verify: npt.ArrayLike | None = None,
    algorithm: str = "crc32c",
    stream: Any = None,
    kernels: PageKernels | None = None,
) -> UnpackResult:
    """``PageKernels.unpack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).unpack(
        layout, block_table, pages, verify=verify, algorithm=algorithm, stream=stream
    )
