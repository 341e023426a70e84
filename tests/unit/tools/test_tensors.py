"""Paged tensors of the replay: plain indexing agrees with the geometry's canonical order in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.errors import CapacityError, UsageError
from kvdev.geometry import Geometry
from kvdev_tools.tensors import (
    LAYOUTS,
    BlockAllocator,
    EngineTensors,
    block_tokens,
    check_layout,
    default_layout,
)

MHA = Geometry(model_id="t", layer_count=2, kv_head_count=3, head_size=4, tokens_per_page=32)
MLA = Geometry(
    model_id="t",
    layer_count=3,
    kv_head_count=1,
    head_size=6,
    tokens_per_page=32,
    attention="mla",
    dtype="uint8",
)
CASES = [(name, g) for name, kinds in LAYOUTS.items() for g in (MHA, MLA) if g.attention in kinds]


def element(
    tensors: EngineTensors, layer: int, plane: int, block: int, token: int, head: int, dim: int
) -> int:
    """One element of the engine's tensors, spelled out per layout."""
    t, name = tensors.tensors, tensors.layout_name
    if name == "nhd":
        return int(t[layer][plane, block, token, head, dim])
    if name == "hnd":
        return int(t[layer][plane, block, head, token, dim])
    if name == "block-outermost":
        return int(t[0][block, layer, plane, token, head, dim])
    if name == "mla":
        return int(t[layer][block, token, dim])
    return int(t[layer * tensors.geometry.planes_per_layer + plane][block, head, dim])


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_fill_puts_every_element_where_the_layout_has_it(
    layout: str, geometry: Geometry, rng: np.random.Generator
) -> None:
    tokens = block_tokens(layout, geometry)
    tensors = EngineTensors(geometry, layout=layout, page_count=3, block_tokens=tokens)
    blocks = rng.permutation(tensors.block_count)[: tensors.blocks_per_page].astype(np.int64)
    page = rng.integers(0, 256, geometry.page_size_bytes, dtype=np.uint8)
    tensors.fill(blocks, page)
    assert tensors.matches(blocks, page)
    elements = page.view(f"u{geometry.dtype_size_bytes}").reshape(geometry.page_shape)
    for layer, plane, token, head, dim in np.ndindex(*geometry.page_shape):
        got = element(tensors, layer, plane, int(blocks[token // tokens]), token % tokens, head, dim)
        assert got == int(elements[layer, plane, token, head, dim])


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_one_changed_bit_or_poison_is_noticed(
    layout: str, geometry: Geometry, rng: np.random.Generator
) -> None:
    tensors = EngineTensors(
        geometry, layout=layout, page_count=2, block_tokens=block_tokens(layout, geometry)
    )
    table = BlockAllocator(
        block_count=tensors.block_count, blocks_per_page=tensors.blocks_per_page, seed=1
    ).take(2)
    pages = rng.integers(0, 256, (2, geometry.page_size_bytes), dtype=np.uint8)
    for blocks, page in zip(table, pages, strict=True):
        tensors.fill(blocks, page)
    for at in rng.integers(0, geometry.page_size_bytes, 20):
        changed = pages[0].copy()
        changed[at] ^= 1 << int(at) % 8
        assert not tensors.matches(table[0], changed)
    tensors.poison(table[0])
    assert not tensors.matches(table[0], pages[0])
    assert tensors.matches(table[1], pages[1])


def test_layouts_fit_their_attention_kind_only() -> None:
    assert default_layout(MHA) == "nhd"
    assert default_layout(MLA) == "mla"
    with pytest.raises(UsageError, match=r"layout: expected one of sglang, mla for mla attention, got 'nhd'"):
        check_layout("nhd", MLA)
    with pytest.raises(UsageError, match="layout"):
        check_layout("zigzag", MHA)


def test_block_tokens_divide_the_page() -> None:
    assert block_tokens("nhd", MHA) == 16
    assert (
        block_tokens(
            "nhd", Geometry(model_id="t", layer_count=1, kv_head_count=1, head_size=1, tokens_per_page=9)
        )
        == 9
    )
    assert block_tokens("sglang", MHA) == 1
    assert block_tokens("hnd", MHA, 8) == 8
    for layout, wanted in (("nhd", 5), ("nhd", 0), ("nhd", 64), ("sglang", 16)):
        with pytest.raises(UsageError, match=f"block_tokens: .*got {wanted}"):
            block_tokens(layout, MHA, wanted)


def test_allocator_hands_out_every_block_once_and_takes_them_back(rng: np.random.Generator) -> None:
    allocator = BlockAllocator(block_count=40, blocks_per_page=4, seed=3)
    held = [allocator.take(3), allocator.take(7)]
    assert sorted(np.concatenate([table.ravel() for table in held]).tolist()) == list(range(40))
    with pytest.raises(CapacityError, match="blocks"):
        allocator.take(1)
    for _ in range(50):
        allocator.give_back(held.pop(int(rng.integers(len(held)))))
        count = int(rng.integers(1, allocator.free_page_count + 1))
        held.append(allocator.take(count))
        if allocator.free_page_count:
            held.append(allocator.take(allocator.free_page_count))
        assert sorted(np.concatenate([table.ravel() for table in held]).tolist()) == list(range(40))
    while held:
        allocator.give_back(held.pop())
    assert allocator.free_page_count == 10
    with pytest.raises(UsageError, match="given back"):
        allocator.give_back(np.zeros((1, 4), np.int64))
    with pytest.raises(UsageError, match="blocks"):
        BlockAllocator(block_count=3, blocks_per_page=4, seed=0)
