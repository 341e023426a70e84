"""Pages of ranks that split the KV heads one way, for ranks that split them another: as bytes, and in the tensors."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.store.resplit import HeadPages, join_heads
from kvdev_kernels import PageKernels
from kvdev_kernels.testing import ENGINE_CASES, EngineCase, GuardedMemory, expected_pages

CASES = [case for case in ENGINE_CASES if case.attention == "mha"]
HEADS = 8


def ranges(cuts: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, HEADS, *cuts})
    return [(first, end - first) for first, end in itertools.pairwise(edges)]


@given(
    case=st.sampled_from(CASES),
    head_size=st.sampled_from([4, 16, 40]),
    before=st.lists(st.integers(1, HEADS - 1), max_size=7),
    after=st.lists(st.integers(1, HEADS - 1), max_size=7),
    seed=st.integers(0, 2**32),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_pages_when_split_anew_then_as_packed_by_the_new_ranks(
    case: EngineCase, head_size: int, before: list[int], after: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    geometry = Geometry(
        model_id="split", layer_count=2, kv_head_count=HEADS, head_size=head_size, tokens_per_page=8
    )
    block_size = case.block_size(geometry, 4)
    per_page = 8 // block_size
    memory, others = GuardedMemory(rng), GuardedMemory(None)
    tensors = case.make(memory, geometry, 3 * per_page, block_size)
    table = rng.permutation(3 * per_page)[: 2 * per_page].reshape(2, per_page)
    whole = expected_pages(case, geometry, tensors, table).reshape(2, *geometry.page_shape[:4], -1)
    layout = case.layout(geometry, tensors)
    target = case.make(others, geometry, 3 * per_page, block_size)
    with PageKernels("numpy") as kernels:
        parts = []
        for first, count in ranges(before):
            own = layout.heads(first, count)
            pages = np.zeros((2, own.geometry.page_size_bytes), np.uint8)
            kernels.pack(own, table, pages)
            assert np.array_equal(pages, cut(whole, first, count))
            parts.append(HeadPages(own.geometry, pages))
            # In the tensors: the reader's layout of the writer's heads takes the writer's pages as they are.
            kernels.unpack(case.layout(geometry, target).heads(first, count), table, pages)
    assert np.array_equal(expected_pages(case, geometry, target, table), whole.reshape(2, -1))
    others.check_guards()
    for first, count in ranges(after):
        wanted = dataclasses.replace(geometry, kv_head_first=first, kv_head_count=count)
        assert np.array_equal(join_heads(parts, wanted), cut(whole, first, count))


def cut(whole: npt.NDArray[np.uint8], first: int, count: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(whole[:, :, :, :, first : first + count]).reshape(len(whole), -1)


def test_join_when_parts_do_not_fit_then_the_field_or_the_heads_are_named() -> None:
    geometry = Geometry.preset("small")
    half = dataclasses.replace(geometry, kv_head_count=1)
    pages = np.zeros((2, half.page_size_bytes), np.uint8)
    with pytest.raises(UsageError, match="expected KV heads 0 to 1, got none for 1 to 1"):
        join_heads([HeadPages(half, pages)], geometry)
    with pytest.raises(UsageError, match="head_size: expected 8"):
        join_heads([HeadPages(dataclasses.replace(half, head_size=16), pages)], geometry)
    with pytest.raises(UsageError, match=r"pages: expected a \(n, 32768\) uint8 array"):
        join_heads([HeadPages(half, pages[:, 1:])], geometry)
    with pytest.raises(UsageError, match="pages of KV heads 1 to 1: expected 2 as the first part has, got 1"):
        join_heads(
            [HeadPages(half, pages), HeadPages(dataclasses.replace(half, kv_head_first=1), pages[:1])],
            geometry,
        )
    with pytest.raises(UsageError, match="at least one head range"):
        join_heads([], geometry)
