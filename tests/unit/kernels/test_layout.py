"""Layouts: runs that real tensors reduce to, and refusals before memory is touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvdev.geometry import Geometry
from kvdev_kernels import PagedLayout, ShapeError

MHA = Geometry(model_id="m", layer_count=2, kv_head_count=4, head_size=32, dtype="bf16", tokens_per_page=64)
MLA = Geometry(
    model_id="m",
    layer_count=2,
    kv_head_count=1,
    head_size=576,
    dtype="bf16",
    tokens_per_page=64,
    attention="mla",
)


def nhd(**changes: Any) -> list[np.ndarray[Any, Any]]:
    shape = changes.pop("shape", (2, 10, 16, 4, 32))
    return [np.zeros(shape, changes.get("dtype", np.uint16)) for _ in range(changes.get("layers", 2))]


def test_nhd_when_contiguous_then_one_run_per_block() -> None:
    layout = PagedLayout.from_vllm_nhd(MHA, nhd())
    assert layout.run_size_bytes == 16 * 4 * 32 * 2
    assert (layout.token_count, layout.head_count, layout.runs_per_plane) == (1, 1, 4)
    assert layout.block_stride == layout.run_size_bytes
    assert layout.blocks_per_page == 4
    assert len(layout.plane_addresses) == 4


def test_hnd_when_contiguous_then_one_run_per_token_and_head() -> None:
    layout = PagedLayout.from_vllm_hnd(MHA, nhd(shape=(2, 10, 4, 16, 32)))
    assert (layout.run_size_bytes, layout.token_count, layout.head_count) == (64, 16, 4)
    assert layout.runs_per_plane == 4 * 16 * 4


def test_hnd_when_one_head_then_same_runs_as_nhd() -> None:
    geometry = dataclasses.replace(MHA, kv_head_count=1, kv_head_total=1)
    layout = PagedLayout.from_vllm_hnd(geometry, nhd(shape=(2, 10, 1, 16, 32)))
    assert (layout.run_size_bytes, layout.runs_per_plane) == (16 * 64, 4)


def test_token_pool_then_one_run_per_token() -> None:
    pools = [np.zeros((100, 4, 32), np.uint16) for _ in range(4)]
    layout = PagedLayout.from_sglang_mha(MHA, pools[:2], pools[2:])
    assert (layout.run_size_bytes, layout.block_size, layout.blocks_per_page) == (256, 1, 64)
    assert layout.plane_addresses.tolist() == [pools[i].ctypes.data for i in (0, 2, 1, 3)]


def test_mla_then_one_plane_per_layer() -> None:
    layout = PagedLayout.from_vllm_mla(MLA, [np.zeros((10, 16, 576), np.uint16) for _ in range(2)])
    assert (layout.run_size_bytes, len(layout.plane_addresses)) == (16 * 1152, 2)
    layout = PagedLayout.from_sglang_mla(MLA, [np.zeros((10, 1, 576), np.uint16) for _ in range(2)])
    assert layout.run_size_bytes == 1152


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (nhd(layers=1), "tensors: expected 2 of axes KBNHD, got 1"),
        (
            nhd(shape=(2, 10, 16, 4, 32), dtype=np.float32),
            r"tensors\[0\]: dtype: expected bf16 .*got float32",
        ),
        (nhd(dtype=np.float16), "dtype: expected bf16"),
        (nhd(dtype=np.int16), "dtype: expected bf16"),
        (nhd(shape=(2, 10, 16, 128)), r"rank: expected 5: keys and values, block, token in block.*got 4"),
        (nhd(shape=(3, 10, 16, 4, 32)), "keys and values extent: expected 2, got 3"),
        (nhd(shape=(2, 10, 16, 8, 32)), "KV head extent: expected 4, got 8"),
        (nhd(shape=(2, 10, 16, 4, 64)), "element extent: expected 32, got 64"),
        (
            nhd(shape=(2, 10, 24, 4, 32)),
            "tokens per block: expected a divisor of the page's 64 tokens.*got 24",
        ),
        (nhd(shape=(2, 0, 16, 4, 32)), "tokens per block.*got 16 in 0 blocks"),
        ([t[..., ::2] for t in nhd(shape=(2, 10, 16, 4, 64))], "element stride: expected 2 bytes .*got 4"),
        ([t[..., ::-1] for t in nhd()], "element stride"),
        ([t[:, ::-1] for t in nhd()], "block stride: expected at least 2 bytes.*got -4096"),
        ([np.broadcast_to(t[:, :1], (2, 10, 16, 4, 32)) for t in nhd()], "block stride.*got 0 bytes"),
        (
            [nhd()[0], nhd(shape=(2, 11, 16, 4, 32))[0]],
            r"tensors\[1\]: block extent: expected 10 as tensors\[0\], got 11",
        ),
        ([nhd()[0]] * 2, "distinct memory for every layer"),
        ([b"abc", b"def"], r"tensors\[0\]: expected a NumPy array or torch tensor, got bytes"),
    ],
)
def test_tensors_when_wrong_then_shape_error(tensors: list[Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        PagedLayout.from_vllm_nhd(MHA, tensors)


def test_shape_error_when_raised_then_facts_are_attributes() -> None:
    with pytest.raises(ShapeError) as caught:
        PagedLayout.from_vllm_nhd(MHA, nhd(shape=(2, 10, 16, 8, 32)))
    error = caught.value
    assert (error.field, error.expected, error.got) == ("tensors[0]: KV head extent", 4, 8)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("axes", ["KNHD", "KBNHDD", "KBNHX", "KBNH", "KBNHDC", "KBNHC"])
def test_axes_when_malformed_then_shape_error(axes: str) -> None:
    with pytest.raises(ShapeError, match="axes"):
        PagedLayout.from_axes(MHA, nhd(), axes)


def test_axes_when_k_for_mla_or_no_head_axis_then_shape_error() -> None:
    with pytest.raises(ShapeError, match="no K"):
        PagedLayout.from_axes(MLA, [np.zeros((2, 10, 16, 576), np.uint16)] * 2, "KBND")
    with pytest.raises(ShapeError, match="several KV heads"):
        PagedLayout.from_axes(MHA, [np.zeros((2, 10, 16, 32), np.uint16)] * 2, "KBND")
    with pytest.raises(ShapeError, match="order"):
        PagedLayout.from_fused(MHA, np.zeros(1, np.uint16), "LBNHD")
    with pytest.raises(ShapeError, match="v_buffers"):
        PagedLayout.from_sglang_mha(MHA, [1, 2], [1])


def test_table_when_flat_or_of_other_integers_then_same() -> None:
    layout = PagedLayout.from_vllm_nhd(MHA, nhd())
    expected = np.array([[0, 3, 5, 9], [1, 2, 4, 6]])
    for dtype in (np.int32, np.uint8, np.uint64, np.int64):
        table = expected.astype(dtype)
        assert np.array_equal(layout.check_table(table, 2, is_written=True), expected)
        assert np.array_equal(layout.check_table(table.ravel(), 2, is_written=True), expected)
    assert np.array_equal(layout.check_table(expected.tolist(), 2, is_written=True), expected)
    assert layout.check_table(np.zeros((0, 4), np.int64), 0, is_written=True).shape == (0, 4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2, 10]], "index: expected 0 to 9, got 10"),
        ([[0, -1, 2, 3]], "index: expected 0 to 9, got -1"),
        ([[0, 2**40, 2, 3]], "index: expected 0 to 9"),
        (np.array([[0, 2**64 - 1, 2, 3]], np.uint64), "index: expected 0 to 9"),
        ([[0, 1, 2]], r"shape: expected \(1, 4\), got \(1, 3\)"),
        ([[0, 1, 2, 3]] * 2, r"shape: expected \(1, 4\)"),
        ([[0.0, 1.0, 2.0, 3.0]], "dtype: expected whole numbers"),
        ([[True, False, True, False]], "dtype: expected whole numbers"),
    ],
)
def test_table_when_wrong_then_shape_error(table: Any, message: str) -> None:
    layout = PagedLayout.from_vllm_nhd(MHA, nhd())
    with pytest.raises(ShapeError, match="block_table: " + message):
        layout.check_table(table, 1, is_written=False)


def test_table_when_block_named_twice_then_refused_for_writing_only() -> None:
    layout = PagedLayout.from_vllm_nhd(MHA, nhd())
    table = [[0, 1, 7, 7]]
    assert layout.check_table(table, 1, is_written=False).tolist() == table
    with pytest.raises(ShapeError, match="every block once, got block 7 twice"):
        layout.check_table(table, 1, is_written=True)


def whole(order: str, geometry: Geometry = MHA, blocks: int = 6, tokens: int = 16) -> np.ndarray[Any, Any]:
    extents = {"L": geometry.layer_count, "B": blocks, "H": geometry.kv_head_count, "N": tokens, "C": 64}
    return np.zeros([extents[axis] for axis in order], np.uint16)


@pytest.mark.parametrize(
    ("order", "run", "tokens", "heads"),
    [
        ("LBHNC", 64, 16, 4),
        ("LBNHC", 64, 16, 4),
        ("LHBNC", 64, 16, 4),
        ("BLHNC", 64, 16, 4),
        ("BLNHC", 64, 16, 4),
        ("BHLNC", 64, 16, 4),
    ],
)
def test_vllm_layers_when_views_of_one_memory_then_as_the_whole(
    order: str, run: int, tokens: int, heads: int
) -> None:
    tensor = whole(order)
    layers = list(tensor.transpose([order.index(axis) for axis in "LBHNC"]))
    from_views, fused = PagedLayout.from_vllm(MHA, layers), PagedLayout.from_fused(MHA, tensor, order)
    for layout in (from_views, fused):
        assert (layout.run_size_bytes, layout.token_count, layout.head_count) == (run, tokens, heads)
        assert layout.is_regular and len(layout.classes) == 1
    assert from_views.plane_addresses.tolist() == fused.plane_addresses.tolist()
    assert from_views.block_stride == fused.block_stride


def test_runs_when_layout_is_regular_then_both_descriptions_agree() -> None:
    for tensors, axes in ((nhd(), "KBNHD"), (nhd(shape=(2, 10, 4, 16, 32)), "KBHND")):
        layout = PagedLayout.from_axes(MHA, tensors, axes)
        expected = [
            token * layout.token_stride + head * layout.head_stride
            for token in range(layout.token_count)
            for head in range(layout.head_count)
        ]
        assert layout.classes[0].offsets.tolist() == expected
        assert set(layout.classes[0].sizes.tolist()) == {layout.run_size_bytes}


def test_rocm_paged_then_runs_of_x_elements_and_single_values() -> None:
    keys = [np.zeros((6, 4, 4, 16, 8), np.uint16) for _ in range(2)]
    values = [np.zeros((6, 4, 32, 16), np.uint16) for _ in range(2)]
    layout = PagedLayout.from_rocm_paged(MHA, keys, values)
    assert not layout.is_regular and layout.plane_class.tolist() == [0, 1, 0, 1]
    assert {int(size) for size in layout.classes[0].sizes} == {16}
    assert {int(size) for size in layout.classes[1].sizes} == {2}
    assert (layout.run_granule_bytes, layout.run_size_bytes) == (2, 2)
    with pytest.raises(ShapeError, match="value_caches: expected 2"):
        PagedLayout.from_rocm_paged(MHA, keys, values[:1])
    with pytest.raises(ShapeError, match=r"tensors\[0\]: element extent: expected 32, got 24"):
        PagedLayout.from_rocm_paged(MHA, [key[:, :, :3] for key in keys], values)


def test_mla_when_values_and_scales_are_apart_then_two_runs_per_token() -> None:
    geometry = dataclasses.replace(MLA, head_size=132, dtype="uint8")
    caches = [np.zeros((10, 64 * 132), np.uint8) for _ in range(2)]
    layout = PagedLayout.from_mla_split(geometry, caches, (128, 4))
    assert layout.classes[0].offsets[:4].tolist() == [0, 64 * 128, 128, 64 * 128 + 4]
    assert layout.classes[0].sizes[:4].tolist() == [128, 4, 128, 4]
    with pytest.raises(ShapeError, match=r"part_sizes_bytes: expected parts of mla's row of 132 bytes"):
        PagedLayout.from_mla_split(geometry, caches, (128, 8))


def test_groups_of_a_hybrid_model_when_they_share_memory_then_each_has_its_own_layout() -> None:
    memory = np.zeros((2, 12, 16384), np.uint8)
    full = dataclasses.replace(MHA, tokens_per_page=32)
    sliding = dataclasses.replace(full, kv_head_count=2, kv_head_total=2)
    one = PagedLayout.from_axes(full, [t.view(np.uint16).reshape(12, 2, 32, 4, 32) for t in memory], "BKNHD")
    two = PagedLayout.from_axes(
        sliding, [t[:, :8192].view(np.uint16).reshape(12, 2, 32, 2, 32) for t in memory], "BKNHD"
    )
    assert one.block_stride == two.block_stride == 16384
    state = Geometry.opaque("m", layer_count=2, state_size_bytes=16000)
    three = PagedLayout.from_states(state, [[t[:, :1000], t[:, 1000:16000]] for t in memory])
    assert (three.blocks_per_page, three.runs_per_plane, three.block_stride) == (1, 1, 16384)


def test_states_when_wrong_then_shape_error() -> None:
    geometry = Geometry.opaque("m", layer_count=1, state_size_bytes=600)
    with pytest.raises(ShapeError, match=r"states\[0\]: expected 600 bytes per block, got 500"):
        PagedLayout.from_states(geometry, [[np.zeros((4, 500), np.uint8)]])
    with pytest.raises(ShapeError, match="block stride: expected 500 bytes for every part"):
        PagedLayout.from_states(geometry, [[np.zeros((4, 500), np.uint8), np.zeros((4, 100), np.uint8)]])
    with pytest.raises(ShapeError, match="state stride"):
        PagedLayout.from_states(geometry, [[np.zeros((4, 30, 40), np.uint8)[:, :, :20]]])


def test_heads_when_cut_out_then_the_other_heads_are_apart() -> None:
    layout = PagedLayout.from_vllm_nhd(MHA, nhd())
    half = layout.heads(2, 2)
    assert (half.geometry.kv_head_first, half.geometry.kv_head_count, half.geometry.kv_head_total) == (
        2,
        2,
        4,
    )
    assert half.plane_addresses.tolist() == (layout.plane_addresses + 2 * 64).tolist()
    assert (half.run_size_bytes, half.token_count) == (128, 16)
    for first, count in ((0, 0), (3, 2), (-1, 1), (1.0, 1)):
        with pytest.raises(ShapeError, match="heads: expected a part of the 4 KV heads"):
            layout.heads(first, count)  # type: ignore[arg-type]


def test_tensors_when_they_share_memory_then_shape_error() -> None:
    memory = np.zeros((10, 3, 16, 4, 64), np.uint16)
    PagedLayout.from_vllm(MHA, [memory[:, 0], memory[:, 2]], "BNHC")
    with pytest.raises(ShapeError, match=r"tensors\[1\]: memory: expected apart from tensors\[0\]"):
        flat = memory.reshape(10, -1)
        layers = [flat[:, start : start + 4096].reshape(10, 16, 4, 64) for start in (0, 64)]
        PagedLayout.from_vllm(MHA, layers, "BNHC")


def test_axes_when_merged_or_taken_apart_wrongly_then_shape_error() -> None:
    flat = [np.zeros((2, 10, 16, 128), np.uint16)] * 2
    for axes in ("KBN(HD", "KB(NH)D)", "KBN()D", "KB(NB)D", "KBHDn", "KBNHd", "KB(Nn)HD"):
        with pytest.raises(ShapeError, match="axes"):
            PagedLayout.from_axes(MHA, flat, axes)
    with pytest.raises(ShapeError, match="KV head x element extent: expected 128, got 127"):
        PagedLayout.from_axes(MHA, [each[..., :127] for each in flat], "KBN(HD)")
    with pytest.raises(
        ShapeError, match="token in block x element extent: expected a multiple of 576, got 600"
    ):
        PagedLayout.from_axes(MLA, [np.zeros((10, 600), np.uint16)] * 2, "B(ND)")
    with pytest.raises(ShapeError, match="order"):
        PagedLayout.from_sglang_host(MHA, flat[0], "page_last")
    with pytest.raises(ShapeError, match="memory_format"):
        PagedLayout.from_lmcache(MHA, flat[0], "BINARY")
