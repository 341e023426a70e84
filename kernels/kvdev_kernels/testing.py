"""Paged tensors as engines keep them, between guard bytes: what every kernel is tested and measured on.

Every ``EngineCase`` builds NumPy tensors for a geometry and a block size, and their layout. The expected page bytes
come from plain indexing in the engine's own words, not through the layout.
Not here: tests; engines themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.geometry import Geometry
from kvdev_kernels.layout import FUSED_ORDERS, LMCACHE_AXES, SGLANG_HOST_AXES, PagedLayout

GUARD_SIZE_BYTES = 192
GUARD_BYTE = 0xA5
RAW_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Tensors = list[npt.NDArray[Any]]


class GuardedMemory:
    """Arrays that lie between guard bytes."""

    def __init__(self, rng: np.random.Generator | None, *, misalign_bytes: int = 0) -> None:
        self.rng = rng
        self.misalign_bytes = misalign_bytes
        self.whole: list[tuple[npt.NDArray[np.uint8], int, int]] = []

    def array(self, shape: tuple[int, ...], element_size: int) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * element_size
        whole = np.full(size + 2 * GUARD_SIZE_BYTES + 64, GUARD_BYTE, np.uint8)
        start = -whole.ctypes.data % 64 + GUARD_SIZE_BYTES // 2 // 64 * 64 + self.misalign_bytes
        body = whole[start : start + size]
        body[:] = 0 if self.rng is None else self.rng.integers(0, 256, size, dtype=np.uint8)
        self.whole.append((whole, start, size))
        return body.view(RAW_DTYPE[element_size]).reshape(shape)

    def check_guards(self) -> None:
        """Raise AssertionError when a byte outside the arrays has changed."""
        for whole, start, size in self.whole:
            if not (whole[:start] == GUARD_BYTE).all() or not (whole[start + size :] == GUARD_BYTE).all():
                raise AssertionError("bytes around a tensor were written")


@dataclass(frozen=True)
class EngineCase:
    """One engine layout."""

    name: str
    attention: str
    make: Callable[[GuardedMemory, Geometry, int, int], Any]
    """(memory, geometry, block count, block size) -> tensors"""
    layout: Callable[[Geometry, Any], PagedLayout]
    plane: Callable[[Any, int, int], npt.NDArray[Any]]
    """(tensors, layer, 0 for keys or 1 for values) -> [block, token, head, element]"""
    has_token_blocks: bool = False
    """A block is one token, as in token pools."""
    has_page_blocks: bool = False
    """A block is a whole page, as with opaque states."""

    def block_size(self, geometry: Geometry, wanted: int) -> int:
        """Tokens per block that this engine can have, ``wanted`` where it has the choice."""
        return geometry.tokens_per_page if self.has_page_blocks else 1 if self.has_token_blocks else wanted


def _per_layer(axes: str) -> Callable[[GuardedMemory, Geometry, int, int], Tensors]:
    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
        shape = _shape(axes, geometry, blocks, block_size)
        count = (
            geometry.layer_count if "K" in axes or geometry.attention == "mla" else 2 * geometry.layer_count
        )
        return [memory.array(shape, geometry.dtype_size_bytes) for _ in range(count)]

    return make


def _one(axes: str) -> Callable[[GuardedMemory, Geometry, int, int], npt.NDArray[Any]]:
    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> npt.NDArray[Any]:
        return memory.array(_shape(axes, geometry, blocks, block_size), geometry.dtype_size_bytes)

    return make


def _shape(axes: str, geometry: Geometry, blocks: int, block_size: int) -> tuple[int, ...]:
    extents = {
        "L": geometry.layer_count,
        "K": 2,
        "B": blocks,
        "N": block_size,
        "H": geometry.kv_head_count,
        "D": geometry.head_size,
        "C": geometry.head_size * geometry.planes_per_layer,
    }
    return tuple(extents[axis] for axis in axes)


def _fused_case(order: str, attention: str) -> EngineCase:
    def plane(tensor: Any, layer: int, kv: int) -> npt.NDArray[Any]:
        moved: npt.NDArray[Any] = np.moveaxis(tensor, [order.index(axis) for axis in "LBNHC"], range(5))[
            layer
        ]
        size = moved.shape[-1] // (2 if attention == "mha" else 1)
        return moved[..., kv * size : (kv + 1) * size]

    return EngineCase(
        f"fused-{order}-{attention}",
        attention,
        _one(order),
        lambda g, t: PagedLayout.from_fused(g, t, order),
        plane,
    )


def _permuted(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
    """vLLM's HND: the shape says tokens then heads, the strides say heads then tokens."""
    return [t.transpose(0, 1, 3, 2, 4) for t in _per_layer("KBHND")(memory, geometry, blocks, block_size)]


def _head_slice(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
    """The middle heads of wider tensors: a rank's part seen from a tensor over more heads."""
    heads = geometry.kv_head_count
    shape = (2, blocks, block_size, heads + 3, geometry.head_size)
    size = geometry.dtype_size_bytes
    return [memory.array(shape, size)[:, :, :, 1 : 1 + heads] for _ in range(geometry.layer_count)]


def _vllm_case(order: str) -> EngineCase:
    """vLLM's layers, 4-D views of one memory in some order, always of the shape blocks, heads, tokens, content."""

    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
        whole = _one(order)(memory, geometry, blocks, block_size)
        return list(whole.transpose([order.index(axis) for axis in "LBHNC"]))

    def plane(tensors: Any, layer: int, kv: int) -> npt.NDArray[Any]:
        size = tensors[0].shape[-1] // 2
        found: npt.NDArray[Any] = tensors[layer].transpose(0, 2, 1, 3)[..., kv * size : (kv + 1) * size]
        return found

    return EngineCase(f"vllm-{order}", "mha", make, PagedLayout.from_vllm, plane)


def _inner(extent: int, geometry: Geometry) -> int:
    """The engines' x: elements of 16 bytes where that divides."""
    return int(np.gcd(extent, 16 // geometry.dtype_size_bytes))


def _shuffled(value_axes: str) -> Callable[[GuardedMemory, Geometry, int, int], Tensors]:
    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
        heads, size, item = geometry.kv_head_count, geometry.head_size, geometry.dtype_size_bytes
        x = _inner(size, geometry)
        keys = (blocks, heads, size // x, block_size, x)
        y = _inner(block_size, geometry)
        values = (
            (blocks, heads, block_size // y, size, y)
            if "n" in value_axes
            else (blocks, heads, size, block_size)
        )
        return [memory.array(shape, item) for _ in range(geometry.layer_count) for shape in (keys, values)]

    return make


def _shuffled_plane(tensors: Any, layer: int, kv: int) -> npt.NDArray[Any]:
    tensor = tensors[2 * layer + kv]
    if tensor.ndim == 4:
        moved: npt.NDArray[Any] = tensor.transpose(0, 3, 1, 2)
        return moved
    blocks, heads, outer, middle, inner = tensor.shape
    if kv == 0:
        keys: npt.NDArray[Any] = tensor.transpose(0, 3, 1, 2, 4).reshape(blocks, middle, heads, outer * inner)
        return keys
    values: npt.NDArray[Any] = tensor.transpose(0, 2, 4, 1, 3).reshape(blocks, outer * inner, heads, middle)
    return values


def _split_parts(geometry: Geometry) -> list[int]:
    row = geometry.head_size * geometry.dtype_size_bytes
    return [row - row // 3, row // 3] if row >= 3 else [row]


def _split(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> list[Any]:
    """Blocks of mla that keep every token's values, then every token's scales; the geometry goes with them."""
    tensors = _per_layer("BND")(memory, geometry, blocks, block_size)
    return [geometry, *[tensor.reshape(blocks, -1) for tensor in tensors]]


def _split_plane(tensors: Any, layer: int, _kv: int) -> npt.NDArray[Any]:
    geometry = tensors[0]
    raw = np.ascontiguousarray(tensors[1 + layer]).view(np.uint8)
    tokens = raw.shape[1] // (geometry.head_size * geometry.dtype_size_bytes)
    parts, start = [], 0
    for size in _split_parts(geometry):
        parts.append(raw[:, start : start + tokens * size].reshape(len(raw), tokens, size))
        start += tokens * size
    return np.concatenate(parts, axis=2)[:, :, None]


def _states(memory: GuardedMemory, geometry: Geometry, blocks: int, _block_size: int) -> list[list[Any]]:
    """Two parts of a state, side by side in each block of one memory, as a hybrid model's cache has them."""
    size = geometry.page_size_bytes // geometry.layer_count
    first = size - size // 4
    whole = [memory.array((blocks, size), 1) for _ in range(geometry.layer_count)]
    return [[each[:, :first], each[:, first:]] if first < size else [each] for each in whole]


def _unequal(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Tensors:
    """Layers that are padded differently: no two have the strides in common."""
    heads, size = geometry.kv_head_count, geometry.dtype_size_bytes
    return [
        memory.array((2, blocks, block_size, heads + layer, geometry.head_size), size)[:, :, :, :heads]
        for layer in range(geometry.layer_count)
    ]


def _host_case(order: str, attention: str) -> EngineCase:
    axes = SGLANG_HOST_AXES[attention][order]

    def plane(tensor: Any, layer: int, kv: int) -> npt.NDArray[Any]:
        wanted = [axis for axis in "LKBNHD" if axis in axes]
        moved: npt.NDArray[Any] = tensor.transpose([axes.index(axis) for axis in wanted])[layer]
        moved = moved[kv] if attention == "mha" else moved
        return moved if "N" in axes else moved[:, None]

    return EngineCase(
        f"sglang-host-{order}-{attention}",
        attention,
        _one(axes),
        lambda g, t: PagedLayout.from_sglang_host(g, t, order),
        plane,
        has_token_blocks="N" not in axes,
    )


def _trtllm(axes: str, *, is_flat: bool) -> Callable[[GuardedMemory, Geometry, int, int], Any]:
    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> Any:
        pool = _one(axes)(memory, geometry, blocks, block_size)
        # What the test indexes, and what the layout is given.
        return pool, pool.reshape(*pool.shape[:3], -1) if is_flat else pool

    return make


def _lmcache_case(memory_format: str) -> EngineCase:
    attention = "mla" if memory_format == "KV_MLA_FMT" else "mha"
    apart = {"KV_2LTD": "KLBHD", "KV_T2D": "BKHD", "KV_2TD": "KBHD", "KV_MLA_FMT": "HLBD"}[memory_format]

    def make(memory: GuardedMemory, geometry: Geometry, blocks: int, block_size: int) -> tuple[Any, Any]:
        if "L" not in apart:
            layers = _per_layer(apart)(memory, geometry, blocks, block_size)
            return layers, [layer.reshape(*layer.shape[:2], -1) for layer in layers]
        whole = _one(apart)(memory, geometry, blocks, block_size)
        return whole, whole if attention == "mla" else whole.reshape(*whole.shape[:3], -1)

    def plane(tensors: Any, layer: int, kv: int) -> npt.NDArray[Any]:
        whole = tensors[0]
        found: npt.NDArray[Any] = {
            "KV_2LTD": lambda: whole[kv, layer],
            "KV_T2D": lambda: whole[layer][:, kv],
            "KV_2TD": lambda: whole[layer][kv],
            "KV_MLA_FMT": lambda: whole[:, layer].transpose(1, 0, 2),
        }[memory_format]()
        return found[:, None]

    return EngineCase(
        f"lmcache-{memory_format}",
        attention,
        make,
        lambda g, t: PagedLayout.from_lmcache(g, t[1], memory_format),
        plane,
        has_token_blocks=True,
    )


ENGINE_CASES = [
    EngineCase(
        "vllm-nhd", "mha", _per_layer("KBNHD"), PagedLayout.from_vllm_nhd, lambda t, layer, kv: t[layer][kv]
    ),
    EngineCase(
        "vllm-hnd",
        "mha",
        _per_layer("KBHND"),
        PagedLayout.from_vllm_hnd,
        lambda t, layer, kv: t[layer][kv].transpose(0, 2, 1, 3),
    ),
    EngineCase(
        "vllm-permuted", "mha", _permuted, PagedLayout.from_vllm_nhd, lambda t, layer, kv: t[layer][kv]
    ),
    EngineCase(
        "head-slice", "mha", _head_slice, PagedLayout.from_vllm_nhd, lambda t, layer, kv: t[layer][kv]
    ),
    EngineCase(
        "flashinfer-nhd",
        "mha",
        _per_layer("BKNHD"),
        PagedLayout.from_flashinfer_nhd,
        lambda t, layer, kv: t[layer][:, kv],
    ),
    EngineCase(
        "flashinfer-hnd",
        "mha",
        _per_layer("BKHND"),
        PagedLayout.from_flashinfer_hnd,
        lambda t, layer, kv: t[layer][:, kv].transpose(0, 2, 1, 3),
    ),
    EngineCase(
        "block-outermost",
        "mha",
        _one("BLKNHD"),
        PagedLayout.from_block_outermost,
        lambda t, layer, kv: t[:, layer, kv],
    ),
    EngineCase(
        "sglang-mha",
        "mha",
        _per_layer("BHD"),
        lambda g, t: PagedLayout.from_sglang_mha(g, t[0::2], t[1::2]),
        lambda t, layer, kv: t[2 * layer + kv][:, None],
        has_token_blocks=True,
    ),
    EngineCase(
        "vllm-mla",
        "mla",
        _per_layer("BND"),
        PagedLayout.from_vllm_mla,
        lambda t, layer, _kv: t[layer][:, :, None],
    ),
    EngineCase(
        "sglang-mla",
        "mla",
        _per_layer("BHD"),
        PagedLayout.from_sglang_mla,
        lambda t, layer, _kv: t[layer][:, None],
        has_token_blocks=True,
    ),
    *(_fused_case(order, "mha") for order in FUSED_ORDERS),
    _fused_case("BLNHC", "mla"),
    *(_vllm_case(order) for order in FUSED_ORDERS),
    EngineCase(
        "rocm-paged",
        "mha",
        _shuffled("BHDN"),
        lambda g, t: PagedLayout.from_rocm_paged(g, t[0::2], t[1::2]),
        _shuffled_plane,
    ),
    EngineCase(
        "aiter-shuffled",
        "mha",
        _shuffled("BHNDn"),
        lambda g, t: PagedLayout.from_aiter_shuffled(g, t[0::2], t[1::2]),
        _shuffled_plane,
    ),
    EngineCase(
        "mla-split",
        "mla",
        _split,
        lambda g, t: PagedLayout.from_mla_split(g, t[1:], _split_parts(g)),
        _split_plane,
    ),
    EngineCase(
        "states",
        "mla",
        _states,
        PagedLayout.from_states,
        lambda t, layer, _kv: np.concatenate(t[layer], axis=1)[:, None, None],
        has_page_blocks=True,
    ),
    EngineCase("unequal", "mha", _unequal, PagedLayout.from_vllm_nhd, lambda t, layer, kv: t[layer][kv]),
    *(_host_case(order, attention) for attention, orders in SGLANG_HOST_AXES.items() for order in orders),
    *(
        EngineCase(
            f"trtllm-{'flat' if is_flat else 'apart'}-{attention}",
            attention,
            _trtllm("BLKHND" if attention == "mha" else "BLHND", is_flat=is_flat),
            lambda g, t: PagedLayout.from_trtllm(g, t[1]),
            lambda t, layer, kv: (t[0][:, layer, kv] if t[0].ndim == 6 else t[0][:, layer]).transpose(
                0, 2, 1, 3
            ),
        )
        for attention in ("mha", "mla")
        for is_flat in (True, False)
    ),
    *(_lmcache_case(memory_format) for memory_format in LMCACHE_AXES),
]


def expected_pages(
    case: EngineCase, geometry: Geometry, tensors: Any, table: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Canonical page bytes by plain loops over layer, plane, token and head of the engine's tensors."""
    pages = []
    for blocks in table:
        parts = [
            np.ascontiguousarray(case.plane(tensors, layer, kv)[block]).tobytes()
            for layer in range(geometry.layer_count)
            for kv in range(geometry.planes_per_layer)
            for block in blocks
        ]
        pages.append(np.frombuffer(b"".join(parts), np.uint8))
    return np.array(pages, np.uint8).reshape(len(table), geometry.page_size_bytes)
