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
from kvdev_kernels import PagedLayout

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
    *(_fused_case(order, "mha") for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")),
    _fused_case("BLNHC", "mla"),
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
