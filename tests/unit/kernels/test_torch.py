"""Torch CPU tensors are used in place; skipped where torch is not installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdev.geometry import Geometry
from kvdev_kernels import PagedLayout, ShapeError, pack, unpack

torch: Any = pytest.importorskip("torch", reason="torch is an optional extra and not installed")

GEOMETRY = Geometry(
    model_id="m", layer_count=2, kv_head_count=2, head_size=64, dtype="bf16", tokens_per_page=32
)


def test_torch_tensors_when_moved_then_in_place_and_equal() -> None:
    torch.manual_seed(1)
    shape = (2, 20, 16, 2, 64)
    source = [torch.randn(shape).to(torch.bfloat16) for _ in range(2)]
    target = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[3, 7], [19, 0]], dtype=torch.int32)
    pages = np.zeros((2, GEOMETRY.page_size_bytes), np.uint8)
    crc = pack(PagedLayout.from_vllm_nhd(GEOMETRY, source), table, pages)
    assert unpack(PagedLayout.from_vllm_nhd(GEOMETRY, target), table, pages, verify=crc).is_ok.all()
    for a, b in zip(source, target, strict=True):
        assert torch.equal(a[:, [3, 7, 19, 0]], b[:, [3, 7, 19, 0]])
        assert not b[:, [1, 2]].any()
    first = np.frombuffer(bytes(source[0][0, 3].view(torch.uint8).numpy()), np.uint8)
    assert np.array_equal(pages[0, : first.size], first)


def test_torch_tensors_when_permuted_or_sliced_then_strides_count() -> None:
    source = [
        torch.randn(2, 20, 5, 16, 64).to(torch.bfloat16)[:, :, 1:3].permute(0, 1, 3, 2, 4) for _ in range(2)
    ]
    pages = np.zeros((1, GEOMETRY.page_size_bytes), np.uint8)
    pack(PagedLayout.from_vllm_nhd(GEOMETRY, source), [4, 5], pages)
    expected = torch.stack([layer[kv, [4, 5]].reshape(32, 2, 64) for layer in source for kv in range(2)])
    assert np.array_equal(pages[0], expected.contiguous().view(torch.uint8).numpy().reshape(-1))


def test_torch_tensors_when_wrong_then_shape_error() -> None:
    with pytest.raises(ShapeError, match=r"dtype: expected bf16.*got float16"):
        PagedLayout.from_vllm_nhd(GEOMETRY, [torch.zeros((2, 20, 16, 2, 64), dtype=torch.float16)] * 2)
    with pytest.raises(ShapeError, match="device: expected a device with memory, got meta"):
        PagedLayout.from_vllm_nhd(
            GEOMETRY, [torch.zeros((2, 20, 16, 2, 64), dtype=torch.bfloat16, device="meta")] * 2
        )
