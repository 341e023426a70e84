"""Launch parameters of the GPU page kernels: from a layout and page addresses to the structs of ``hip/pages.hip``.

Not here: what a layout is (``kvdev_kernels.layout``); launching (``kvdev_kernels.gpu``).
Trust: layouts and tables are checked by then; raises only ShapeError, for what a GPU kernel cannot count or reach.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev_kernels.errors import ShapeError
from kvdev_kernels.layout import PagedLayout

THREAD_COUNT = 256
UNROLL_COUNT = 4
TILE_UNITS = THREAD_COUNT * UNROLL_COUNT
UNIT_WIDTHS = (16, 4, 1)
"""Bytes that a thread moves at once, best first: 16 where everything is a multiple of it."""

DIVIDEND_LIMIT = 1 << 31
"""Units of a page and tiles of a launch stay below this: the kernel's divisions are exact below it."""

DIVISOR_DTYPE = np.dtype([("value", "<u4"), ("multiplier", "<u4"), ("shift", "<u4")])
PLANE_DTYPE = np.dtype([("address", "<u8"), ("block_stride", "<u8")])
SHAPE_DTYPE = np.dtype(
    {
        "names": [
            *("planes", "block_table", "pages", "totals", "done", "token_stride", "head_stride", "page_size"),
            *("run_units", "heads", "tokens", "blocks", "page_tiles"),
            *("unit_count", "tile_count", "workgroup_count", "reserved"),
        ],
        "formats": ["<u8"] * 8 + [DIVISOR_DTYPE] * 5 + ["<u4"] * 4,
        "offsets": [*range(0, 64, 8), *range(64, 124, 12), 124, 128, 132, 136],
        "itemsize": 144,
    }
)
"""``struct kv_shape``, passed by value."""
CHECK_DTYPE = np.dtype(
    [
        *((name, "<u8") for name in ("totals", "expected", "differs", "page_size")),
        *((name, "<u4") for name in ("page_count", "workgroup_count")),
    ]
)
"""``struct kv_check``, passed by value."""


class Tables(NamedTuple):
    """Device addresses of what a launch reads and adds to."""

    planes: int
    block_table: int
    pages: int
    totals: int
    done: int


def divisor(value: int) -> tuple[int, int, int]:
    """(value, multiplier, shift) with n // value == ((n x multiplier >> 32) + n) >> shift for n below 2^31."""
    shift = (value - 1).bit_length()
    return value, (1 << 32) * ((1 << shift) - value) // value + 1, shift


def plane_table(layout: PagedLayout) -> npt.NDArray[np.void]:
    """Address and block stride of each plane."""
    planes = np.zeros(len(layout.plane_addresses), PLANE_DTYPE)
    planes["address"] = layout.plane_addresses
    planes["block_stride"] = layout.block_stride
    return planes


def plane_span_bytes(layout: PagedLayout) -> int:
    """From a plane's first byte to the end of its last run."""
    last = (layout.block_count - 1) * layout.block_stride
    last += (layout.token_count - 1) * layout.token_stride + (layout.head_count - 1) * layout.head_stride
    return last + layout.run_size_bytes


def unit_width(layout: PagedLayout, addresses: AddressArray) -> int:
    """The widest access that all runs, strides and addresses are multiples of."""
    common = math.gcd(layout.run_size_bytes, layout.geometry.page_size_bytes)
    if layout.block_count > 1:
        common = math.gcd(common, layout.block_stride)
    if layout.token_count > 1:
        common = math.gcd(common, layout.token_stride)
    if layout.head_count > 1:
        common = math.gcd(common, layout.head_stride)
    for values in (layout.plane_addresses.astype(np.uint64), addresses):
        if values.size:
            common = math.gcd(common, int(np.bitwise_or.reduce(values)) & 15 or 16)
    return next(width for width in UNIT_WIDTHS if common % width == 0)


def move_shape(
    layout: PagedLayout,
    page_count: int,
    *,
    width: int,
    workgroup_limit: int,
    tables: Tables,
    plane_count: int | None = None,
) -> npt.NDArray[np.void]:
    """The parameters of pack and unpack kernels of this width, as one record of ``SHAPE_DTYPE``.

    ``plane_count`` planes from the tables' first on; without it, all.
    """
    planes = len(layout.plane_addresses)
    size = layout.geometry.page_size_bytes // planes * (planes if plane_count is None else plane_count)
    shape = _counted(size, page_count, width, workgroup_limit)
    for name, value in zip(Tables._fields, tables, strict=True):
        shape[name] = value
    shape["token_stride"] = layout.token_stride
    shape["head_stride"] = layout.head_stride
    shape["run_units"] = divisor(layout.run_size_bytes // width)
    shape["heads"] = divisor(layout.head_count)
    shape["tokens"] = divisor(layout.token_count)
    shape["blocks"] = divisor(layout.blocks_per_page)
    return shape


def sum_shape(
    page_size_bytes: int, page_count: int, *, workgroup_limit: int, tables: Tables
) -> npt.NDArray[np.void]:
    """The parameters of ``kvdev_sum``: only pages, totals and done of ``tables`` are read."""
    shape = _counted(page_size_bytes, page_count, 16, workgroup_limit)
    for name in ("pages", "totals", "done"):
        shape[name] = getattr(tables, name)
    return shape


def _counted(page_size_bytes: int, page_count: int, width: int, workgroup_limit: int) -> npt.NDArray[np.void]:
    units = -(-page_size_bytes // width)
    if units >= DIVIDEND_LIMIT:
        raise ShapeError(
            "page_size_bytes",
            expected=f"fewer than {DIVIDEND_LIMIT} units of {width} bytes a page (the widest its runs allow)",
            got=f"{page_size_bytes} bytes = {units} units",
        )
    page_tiles = -(-units // TILE_UNITS)
    if page_tiles * page_count >= DIVIDEND_LIMIT:
        raise ShapeError(
            "block_table: pages",
            expected=f"at most {(DIVIDEND_LIMIT - 1) // page_tiles} pages of {page_tiles} tiles in one call",
            got=page_count,
        )
    shape = np.zeros((), SHAPE_DTYPE)
    shape["page_size"] = page_size_bytes
    shape["page_tiles"] = divisor(page_tiles)
    shape["unit_count"] = units
    shape["tile_count"] = page_tiles * page_count
    shape["workgroup_count"] = max(1, min(workgroup_limit, page_tiles * page_count))
    return shape


def check_pages_apart(addresses: AddressArray, page_size_bytes: int) -> None:
    """ShapeError when two pages share bytes: threads would write them in any order."""
    order = np.argsort(addresses, kind="stable")
    gaps = np.diff(addresses[order])
    close = np.flatnonzero(gaps < np.uint64(page_size_bytes))
    if close.size:
        first, second = int(order[close[0]]), int(order[close[0] + 1])
        raise ShapeError(
            "pages",
            expected=f"pages at least {page_size_bytes} bytes apart",
            got=f"pages {first} and {second}, {int(gaps[close[0]])} bytes apart",
        )
