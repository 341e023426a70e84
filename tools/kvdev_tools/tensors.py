"""An engine's paged KV tensors in NumPy: allocated in one of the known layouts, filled and compared by plain indexing.

``fill`` and ``mismatches`` say with NumPy's own indexing where a page's bytes belong, independently of the kernels'
layout arithmetic, so that the replay's comparison tests the kernels too.
Not here: pack and unpack (``kvdev_kernels``); the bytes (``kvdev_tools.content``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdev.errors import CapacityError, UsageError
from kvdev.geometry import Geometry

if TYPE_CHECKING:
    from kvdev_kernels.layout import PagedLayout

LAYOUTS: dict[str, tuple[str, ...]] = {
    "nhd": ("mha",),
    "hnd": ("mha",),
    "block-outermost": ("mha",),
    "sglang": ("mha", "mla"),
    "mla": ("mla",),
}
"""Layouts by name, with the attention kinds that have them."""

BLOCK_TOKENS_DEFAULT = 16
"""Tokens of an engine's block unless told otherwise: vLLM's default."""

_POISON = 0xA5

BlockTable = npt.NDArray[np.int64]
_Strided = npt.NDArray[Any]


def default_layout(geometry: Geometry) -> str:
    return "mla" if geometry.attention == "mla" else "nhd"


def check_layout(layout: str, geometry: Geometry) -> str:
    """``layout`` when the geometry's attention kind has it, else UsageError naming those it has."""
    if layout not in LAYOUTS or geometry.attention not in LAYOUTS[layout]:
        fitting = ", ".join(name for name, kinds in LAYOUTS.items() if geometry.attention in kinds)
        raise UsageError(
            f"layout: expected one of {fitting} for {geometry.attention} attention, got {layout!r}"
        )
    return layout


def block_tokens(layout: str, geometry: Geometry, wanted: int | None = None) -> int:
    """Tokens per engine block: a token pool has 1, else ``wanted`` or the default where it divides a page."""
    if layout == "sglang":
        if wanted not in (None, 1):
            raise UsageError(
                f"block_tokens: expected 1, as an sglang pool has one token a slot, got {wanted}"
            )
        return 1
    if wanted is None:
        tokens = geometry.tokens_per_page
        return BLOCK_TOKENS_DEFAULT if tokens % BLOCK_TOKENS_DEFAULT == 0 else tokens
    if wanted < 1 or geometry.tokens_per_page % wanted:
        raise UsageError(
            f"block_tokens: expected a divisor of the page's {geometry.tokens_per_page} tokens, got {wanted}"
        )
    return wanted


def _element_dtype(geometry: Geometry) -> np.dtype[Any]:
    # Raw bits of the right width: NumPy has no bfloat16 or float8, and nothing here computes with them.
    return np.dtype({1: np.uint8, 2: np.uint16, 4: np.uint32}[geometry.dtype_size_bytes])


def _lane_dtype(size_bytes: int) -> np.dtype[Any]:
    """The widest integer that divides a run, so that copies and comparisons move whole words."""
    for width in (8, 4, 2):
        if size_bytes % width == 0:
            return np.dtype(f"u{width}")
    return np.dtype(np.uint8)


class EngineTensors:
    """``page_count`` pages' worth of paged tensors, with a layout for the kernels and a view for the checks.

    A page lies in ``blocks_per_page`` blocks, named by one row of a block table.
    """

    def __init__(self, geometry: Geometry, *, layout: str, page_count: int, block_tokens: int) -> None:
        check_layout(layout, geometry)
        self.geometry = geometry
        self.layout_name = layout
        self.block_tokens = block_tokens
        self.blocks_per_page = geometry.tokens_per_page // block_tokens
        self.block_count = page_count * self.blocks_per_page
        self.size_bytes = page_count * geometry.page_size_bytes
        self.tensors = self._allocate()
        self.paged_layout = self._describe()
        self._planes = self._plane_views()

    def _allocate(self) -> list[_Strided]:
        g, blocks, tokens = self.geometry, self.block_count, self.block_tokens
        heads, size = g.kv_head_count, g.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "nhd": (2, blocks, tokens, heads, size),
            "hnd": (2, blocks, heads, tokens, size),
            "block-outermost": (blocks, g.layer_count, 2, tokens, heads, size),
            "sglang": (blocks, heads, size),
            "mla": (blocks, tokens, size),
        }
        count = g.layer_count
        if self.layout_name == "block-outermost":
            count = 1
        elif self.layout_name == "sglang":
            count *= g.planes_per_layer
        shape, dtype = shapes[self.layout_name], _element_dtype(g)
        # Touched here: what does not fit in memory is found before the first request, and faults are not timed.
        return [np.full(shape, 0, dtype=dtype) for _ in range(count)]

    def _describe(self) -> PagedLayout:
        from kvdev_kernels.layout import PagedLayout

        g, tensors = self.geometry, self.tensors
        if self.layout_name == "nhd":
            return PagedLayout.from_vllm_nhd(g, tensors)
        if self.layout_name == "hnd":
            return PagedLayout.from_vllm_hnd(g, tensors)
        if self.layout_name == "block-outermost":
            return PagedLayout.from_block_outermost(g, tensors[0])
        if self.layout_name == "mla":
            return PagedLayout.from_vllm_mla(g, tensors)
        if g.attention == "mla":
            return PagedLayout.from_sglang_mla(g, tensors)
        return PagedLayout.from_sglang_mha(g, tensors[0::2], tensors[1::2])

    def _plane_views(self) -> list[_Strided]:
        """Each plane in canonical order as a view ``[block, token, head, lane]``."""
        g = self.geometry
        lane = _lane_dtype(g.head_size * g.dtype_size_bytes)
        planes: list[_Strided] = []
        for tensor in self.tensors:
            view = tensor.view(lane)
            if self.layout_name == "nhd":
                planes += [view[0], view[1]]
            elif self.layout_name == "hnd":
                planes += [view[index].transpose(0, 2, 1, 3) for index in (0, 1)]
            elif self.layout_name == "block-outermost":
                planes += [view[:, layer, index] for layer in range(g.layer_count) for index in (0, 1)]
            elif self.layout_name == "sglang":
                planes.append(view[:, None, :, :])
            else:
                planes.append(view[:, :, None, :])
        return planes

    def _canonical(self, page: npt.NDArray[np.uint8]) -> _Strided:
        """Canonical page bytes as ``[plane, block, token, head, lane]``."""
        g = self.geometry
        plane_count = g.layer_count * g.planes_per_layer
        shape = (plane_count, self.blocks_per_page, self.block_tokens, g.kv_head_count, -1)
        return page.view(_lane_dtype(g.head_size * g.dtype_size_bytes)).reshape(shape)

    def fill(self, blocks: npt.NDArray[np.int64], page: npt.NDArray[np.uint8]) -> None:
        """Put a page's canonical bytes where the engine's layout has them: one row of a block table."""
        for plane, data in zip(self._planes, self._canonical(page), strict=True):
            plane[blocks] = data

    def matches(self, blocks: npt.NDArray[np.int64], page: npt.NDArray[np.uint8]) -> bool:
        """Whether the page in these blocks is bit for bit the given canonical bytes."""
        return all(
            np.array_equal(plane[blocks], data)
            for plane, data in zip(self._planes, self._canonical(page), strict=True)
        )

    def poison(self, blocks: npt.NDArray[np.int64]) -> None:
        """Overwrite a page's blocks, so that bytes left from an earlier use cannot pass for restored ones."""
        for plane in self._planes:
            plane[blocks] = plane.dtype.type(int.from_bytes(bytes([_POISON]) * plane.itemsize, "little"))


class BlockAllocator:
    """A bounded pool of block indices, handed out a page at a time in an order mixed by the seed."""

    def __init__(self, *, block_count: int, blocks_per_page: int, seed: int) -> None:
        if block_count < blocks_per_page:
            raise UsageError(f"blocks: expected at least {blocks_per_page} for one page, got {block_count}")
        order = np.random.default_rng(seed).permutation(block_count).astype(np.int64)
        self._order = order
        self._blocks_per_page = blocks_per_page
        self._free_first = 0
        self._free_count = block_count
        self.block_count = block_count

    @property
    def free_page_count(self) -> int:
        return self._free_count // self._blocks_per_page

    def take(self, page_count: int) -> BlockTable:
        """A block table ``(page_count, blocks_per_page)``; CapacityError when the pool has too few free."""
        count = page_count * self._blocks_per_page
        if count > self._free_count:
            raise CapacityError(f"blocks: expected at most {self._free_count} free ones, asked for {count}")
        at = (self._free_first + np.arange(count)) % self.block_count
        self._free_first = (self._free_first + count) % self.block_count
        self._free_count -= count
        return self._order[at].reshape(page_count, self._blocks_per_page)

    def give_back(self, table: BlockTable) -> None:
        """Return blocks taken before; they are handed out again last."""
        count = table.size
        if count > self.block_count - self._free_count:
            raise UsageError(f"blocks: {count} given back, but fewer were taken")
        at = (self._free_first + self._free_count + np.arange(count)) % self.block_count
        self._order[at] = table.ravel()
        self._free_count += count
