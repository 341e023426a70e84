"""The back end ``cpu-numba``: which code this processor can run, threads over pages or pieces of them, scratch memory.

Not here: the compiled code (``kvdev_kernels.cpu_code``, imported when the back end is opened); checks of arguments
(``kvdev_kernels.dispatch``).
Threads: one caller at a time; the GIL is released while pages move.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.native.crc import crc32c, crc32c_combine
from kvdev.units import MIB
from kvdev_kernels.errors import BackendUnavailableError
from kvdev_kernels.layout import PagedLayout
from kvdev_kernels.nh64 import nh64_finish
from kvdev_kernels.tensor import CPU

Checksums = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
"""A place per page: 32 bits take its CRC32C, 64 bits its NH-64."""

TIER_FEATURES: dict[str, tuple[str, ...]] = {
    "vpclmul": ("avx512f", "vpclmulqdq", "pclmul", "sse4.2", "crc32"),
    "vpclmul256": ("avx2", "vpclmulqdq", "pclmul", "sse4.2", "crc32"),
    "pclmul": ("pclmul", "sse4.2", "crc32"),
    "sse42": ("sse4.2", "crc32"),
    "pmull": ("neon", "aes", "crc"),
    "armcrc": ("crc",),
    "portable": (),
}
"""Best first: the LLVM features that each tier's instructions need."""

# Below this a second thread costs more than it saves.
THREAD_SIZE_BYTES_MIN = 2 * MIB
# About so many cores saturate the memory of a socket; a serving process has other use for the rest.
THREAD_COUNT_DEFAULT = 8
# Larger batches do not stay in the last-level cache anyway, so they are written past it.
STREAM_SIZE_BYTES_MIN = 4 * MIB
CACHE_LINE_BYTES = 64
ZEROS_COUNT_MAX = 16
"""Checksums of so many zero bytes that are kept; each takes some microseconds to make."""


def compiler_features() -> frozenset[str]:
    """The instruction sets that this processor has and that Numba tells LLVM to use.

    LLVM aborts the process when an instruction is asked for that its target lacks, so both must hold: a user may
    narrow Numba's target with NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
    """
    import llvmlite.binding as llvm
    import numba.core.config

    config: Any = numba.core.config

    try:
        host = {name for name, has in llvm.get_host_cpu_features().items() if has}
    except RuntimeError:
        return frozenset()
    if config.CPU_FEATURES is not None:
        told = {word.strip() for word in str(config.CPU_FEATURES).split(",")}
        host = {name for name in host if f"+{name}" in told}
    elif not config.ENABLE_AVX:
        host = {name for name in host if not name.startswith("avx")}
    return frozenset(host)


def runnable_tiers() -> list[str]:
    """The tiers that run here, best first."""
    has = compiler_features()
    return [name for name, needs in TIER_FEATURES.items() if has.issuperset(needs)]


def crc32c_of_zeros(size_bytes: int) -> int:
    """CRC32C of that many zero bytes, by doubling."""
    total, power, length = 0, crc32c(b"\0"), 1
    while size_bytes:
        if size_bytes & 1:
            total = crc32c_combine(total, power, length)
        power = crc32c_combine(power, power, length)
        length *= 2
        size_bytes >>= 1
    return total


class _Scratch:
    """One thread's working memory."""

    def __init__(self, state_size_bytes: int) -> None:
        self._state = np.empty(state_size_bytes + CACHE_LINE_BYTES, np.uint8)
        self.state_address = -(-self._state.ctypes.data // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self._runs = np.empty(0, np.int64)

    def runs(self, count: int) -> npt.NDArray[np.int64]:
        if self._runs.size < count:
            self._runs = np.empty(count, np.int64)
        return self._runs[:count]


class CpuKernels:
    """Numba kernels of one tier; ``close`` ends its threads."""

    backend = "cpu-numba"
    devices: tuple[str, ...] = (CPU,)

    def __init__(self, *, tier: str | None = None, thread_count: int | None = None) -> None:
        try:
            runnable = runnable_tiers()
            from kvdev_kernels import cpu_code
        except ImportError as error:
            raise BackendUnavailableError(self.backend, f"numba cannot be imported: {error}") from error
        if tier is None:
            tier = runnable[0]
        elif tier not in TIER_FEATURES:
            raise BackendUnavailableError(
                self.backend, f"no tier {tier!r}; tiers are {', '.join(TIER_FEATURES)}"
            )
        elif tier not in runnable:
            raise BackendUnavailableError(
                self.backend, f"tier {tier} needs {', '.join(TIER_FEATURES[tier])}, not all of which are here"
            )
        self.tier = tier
        if thread_count is None:
            thread_count = min(THREAD_COUNT_DEFAULT, len(os.sched_getaffinity(0)))
        self.thread_count = max(1, thread_count)
        self._code = cpu_code
        self._moves: dict[bool, Any] = {}
        self._nh64_total: Any = None
        # What the threads work in; it grows to the largest layout and stays, so that moving allocates nothing.
        self._scratch: list[_Scratch] = []
        self._no_sums: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._pool: ThreadPoolExecutor | None = None
        self._zeros_crc: dict[int, int] = {}

    def pack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: Checksums | None,
    ) -> None:
        is_aligned = not bool((addresses % CACHE_LINE_BYTES).any())
        self._move(layout, table, addresses, sums, is_pack=True, is_aligned=is_aligned)

    def unpack(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: Checksums | None,
    ) -> None:
        self._move(
            layout, table, addresses, sums, is_pack=False, is_aligned=layout.is_aligned(CACHE_LINE_BYTES)
        )

    def _move(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        sums: Checksums | None,
        *,
        is_pack: bool,
        is_aligned: bool,
    ) -> None:
        page_size = layout.geometry.page_size_bytes
        page_count = len(addresses)
        total = page_size * page_count
        granule = layout.run_granule_bytes
        is_streamed = is_aligned and granule % CACHE_LINE_BYTES == 0 and total >= STREAM_SIZE_BYTES_MIN
        shape = np.array([page_size, granule, is_pack, is_streamed], dtype=np.int64)
        zeros_crc = self._crc_of_zeros(page_size)
        classes, block_runs = layout.run_table
        has_crc = sums is not None and sums.dtype == np.uint32
        nh64 = self._nh64() if sums is not None and not has_crc else None
        out = cast("npt.NDArray[np.uint32]", sums) if has_crc else self._no_sums
        move = self._compiled(has_crc=has_crc)

        pieces = min(
            self.thread_count // page_count,
            len(layout.plane_addresses),
            total // THREAD_SIZE_BYTES_MIN // page_count,
        )
        if pieces > 1 and nh64 is None:
            self._move_pieces(layout, table, addresses, out, shape, move, pieces)
            return
        share = min(self.thread_count, page_count, max(1, total // THREAD_SIZE_BYTES_MIN))

        def part(index: int) -> None:
            own, scratch = self._scratch_of(index, layout)
            first, last = page_count * index // share, page_count * (index + 1) // share
            step = 1 if nh64 is not None else last - first
            for start in range(first, last, step):
                move(
                    layout.plane_addresses,
                    layout.plane_class,
                    classes,
                    block_runs,
                    table,
                    addresses,
                    shape,
                    out,
                    scratch,
                    own.state_address,
                    np.uint32(zeros_crc),
                    start,
                    start + step,
                )
                if nh64 is not None and sums is not None:
                    # While the page, or its end, is in the cache.
                    sums[start] = nh64_finish(int(nh64(int(addresses[start]), page_size)), page_size)

        self._share(part, share)

    def _move_pieces(
        self,
        layout: PagedLayout,
        table: npt.NDArray[np.int64],
        addresses: AddressArray,
        out: npt.NDArray[np.uint32],
        shape: npt.NDArray[np.int64],
        move: Any,
        pieces: int,
    ) -> None:
        """Move few pages by more threads than pages: each page in runs of whole planes, whose checksums are joined."""
        planes, page_size = len(layout.plane_addresses), layout.geometry.page_size_bytes
        bounds = [planes * index // pieces for index in range(pieces + 1)]
        starts = [page_size // planes * bound for bound in bounds]
        sizes = [last - first for first, last in pairwise(starts)]
        zeros = [self._crc_of_zeros(size) for size in sizes]
        classes, block_runs = layout.run_table
        sums = np.zeros((len(addresses), pieces), np.uint32)

        def part(index: int) -> None:
            own, scratch = self._scratch_of(index, layout)
            page, piece = divmod(index, pieces)
            within = slice(bounds[piece], bounds[piece + 1])
            own_shape = shape.copy()
            own_shape[self._code.PAGE_SIZE] = sizes[piece]
            move(
                layout.plane_addresses[within],
                layout.plane_class[within],
                classes,
                block_runs,
                table[page : page + 1],
                addresses[page : page + 1] + np.uint64(starts[piece]),
                own_shape,
                sums[page, piece : piece + 1],
                scratch,
                own.state_address,
                np.uint32(zeros[piece]),
                0,
                1,
            )

        self._share(part, len(addresses) * pieces)
        if out.size:
            for page, row in enumerate(sums.tolist()):
                whole = row[0]
                for value, size in zip(row[1:], sizes[1:], strict=True):
                    whole = crc32c_combine(whole, value, size)
                out[page] = whole

    def _crc_of_zeros(self, size_bytes: int) -> int:
        """Of a page or piece; of one geometry there are three sizes at most."""
        if size_bytes not in self._zeros_crc:
            if len(self._zeros_crc) >= ZEROS_COUNT_MAX:
                self._zeros_crc.clear()
            self._zeros_crc[size_bytes] = crc32c_of_zeros(size_bytes)
        return self._zeros_crc[size_bytes]

    def _scratch_of(self, index: int, layout: PagedLayout) -> tuple[_Scratch, npt.NDArray[np.int64]]:
        """What one thread works in."""
        own = self._scratch[index]
        words = len(layout.classes) * 2 * (1 + layout.runs_per_plane)
        return own, own.runs(words).reshape(len(layout.classes), 2, 1 + layout.runs_per_plane)

    def _share(self, part: Callable[[int], None], count: int) -> None:
        """Run ``part`` once for each share, the first in this thread."""
        while len(self._scratch) < count:
            self._scratch.append(_Scratch(self._code.STATE_SIZE_BYTES))
        others = [self._submit(part, index) for index in range(1, count)]
        try:
            part(0)
        finally:
            # Nobody writes to the caller's memory any more when this returns or raises.
            for other in others:
                other.result()

    def _submit(self, part: Any, index: int) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.thread_count - 1, thread_name_prefix="kvdev-kernels")
        return self._pool.submit(part, index)

    def _compiled(self, *, has_crc: bool) -> Any:
        move = self._moves.get(has_crc)
        if move is None:
            move = self._moves[has_crc] = self._code.build_move(self.tier, has_crc=has_crc)
        return move

    def _nh64(self) -> Any:
        if self._nh64_total is None:
            self._nh64_total = self._code.build_nh64()
        return self._nh64_total

    def close(self) -> None:
        """End the threads; a later call starts them again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
