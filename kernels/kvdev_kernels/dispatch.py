"""Pack and unpack: check everything, choose a back end, move the pages.

Not here: layouts (``kvdev_kernels.layout``); moving bytes (``kvdev_kernels.cpu``, ``kvdev_kernels.reference``).
Threads: one caller at a time per ``PageKernels``; calls block until the pages are moved, with the GIL released.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages, page_addresses
from kvdev.errors import UsageError
from kvdev_kernels.errors import BackendUnavailableError, ShapeError
from kvdev_kernels.layout import PagedLayout
from kvdev_kernels.tensor import CPU

BACKEND_VARIABLE = "KVDEV_KERNELS"
"""Environment variable that names the back end, for example ``numpy`` or ``cpu-numba:portable``."""

BACKENDS = ("cpu-numba", "numpy")
"""Best first."""

Crc32cArray = npt.NDArray[np.uint32]


class Backend(Protocol):
    """What moves pages; arguments are checked, ``crc32c`` is filled in when it is there."""

    backend: str
    devices: tuple[str, ...]
    """Kinds of devices whose tensors it moves, as torch names them: ``cpu``, ``cuda``."""

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        crc32c: Crc32cArray | None,
    ) -> None: ...

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        crc32c: Crc32cArray | None,
    ) -> None: ...

    def close(self) -> None: ...


class UnpackResult(NamedTuple):
    """What ``unpack`` found: the checksum of every page, and whether it is the expected one."""

    crc32c: Crc32cArray
    is_ok: npt.NDArray[np.bool_]


class PageKernels:
    """Pack and unpack on one back end.

    Args:
        backend: a name of ``BACKENDS``, ``cpu-numba:TIER``, or ``auto``: the environment variable KVDEV_KERNELS if
            it is set, else the best one that works here.
        thread_count: threads over pages; by default two, or one on a single core.
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

    def pack(
        self, layout: PagedLayout, block_table: Any, pages: Pages, *, checksums: bool = True
    ) -> Crc32cArray | None:
        """Gather pages out of the paged tensors into staging; returns each page's CRC32C.

        Args:
            block_table: (pages, blocks per page) block indices, in token order.
            pages: where to: an array, a lease or addresses (``kvdev.buffers``), in the block table's order.
            checksums: without, nothing is computed and None returned.
        """
        self._check_device(layout)
        addresses = _addresses(pages, layout, is_written=True)
        table = layout.check_table(block_table, len(addresses), is_written=False)
        crc = np.zeros(len(addresses), np.uint32) if checksums else None
        if len(addresses):
            self._backend.pack(layout, table, addresses, crc)
        return crc

    def unpack(
        self, layout: PagedLayout, block_table: Any, pages: Pages, *, verify: npt.ArrayLike | None = None
    ) -> UnpackResult:
        """Scatter pages from staging into the paged tensors, computing each page's CRC32C on the way.

        ``verify`` holds the expected CRC32C of each page. A page that differs was scattered all the same: the blocks
        it names, and nothing else, hold wrong bytes, and ``is_ok`` says so; whoever called must not use them.
        """
        self._check_device(layout)
        addresses = _addresses(pages, layout, is_written=False)
        table = layout.check_table(block_table, len(addresses), is_written=True)
        if not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        expected = None
        if verify is not None:
            expected = np.asarray(verify)
            if expected.shape != addresses.shape or not np.issubdtype(expected.dtype, np.integer):
                raise ShapeError(
                    "verify",
                    expected=f"{len(addresses)} whole numbers",
                    got=f"{expected.shape} {expected.dtype}",
                )
        crc = np.zeros(len(addresses), np.uint32)
        if len(addresses):
            self._backend.unpack(layout, table, addresses, crc)
        is_ok = np.ones(len(addresses), np.bool_) if expected is None else crc == expected
        return UnpackResult(crc, is_ok)

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


def _addresses(pages: Pages, layout: PagedLayout, *, is_written: bool) -> AddressArray:
    size = layout.geometry.page_size_bytes
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
    kernels: PageKernels | None = None,
) -> Crc32cArray | None:
    """``PageKernels.pack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).pack(layout, block_table, pages, checksums=checksums)


def unpack(
    layout: PagedLayout,
    block_table: Any,
    pages: Pages,
    *,
    verify: npt.ArrayLike | None = None,
    kernels: PageKernels | None = None,
) -> UnpackResult:
    """``PageKernels.unpack`` on ``kernels`` or the default ones."""
    return (kernels or default_kernels()).unpack(layout, block_table, pages, verify=verify)
