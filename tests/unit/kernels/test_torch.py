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


def test_torch_pages_and_tables_when_moved_then_as_numpy_ones() -> None:
    torch.manual_seed(2)
    shape = (2, 20, 16, 2, 64)
    tensors = [torch.randn(shape).to(torch.bfloat16) for _ in range(2)]
    layout = PagedLayout.from_vllm_nhd(GEOMETRY, tensors)
    table = torch.tensor([[3, 7], [19, 0]])
    expected = np.zeros((2, GEOMETRY.page_size_bytes), np.uint8)
    crc = pack(layout, table.numpy(), expected)
    # Every second row of a larger tensor: rows are contiguous, the tensor is not.
    pages = torch.zeros((4, GEOMETRY.page_size_bytes), dtype=torch.uint8)[::2]
    found = pack(layout, table, pages)
    assert found is not None and crc is not None and found.tolist() == crc.tolist()
    assert np.array_equal(pages.numpy(), expected)
    target = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    back = PagedLayout.from_vllm_nhd(GEOMETRY, target)
    assert unpack(back, table, pages, verify=torch.tensor(crc.astype(np.int64))).is_ok.all()
    for a, b in zip(tensors, target, strict=True):
        assert torch.equal(a[:, [3, 7, 19, 0]], b[:, [3, 7, 19, 0]])


def test_torch_pages_when_wrong_then_shape_error() -> None:
    tensors = [torch.zeros((2, 20, 16, 2, 64), dtype=torch.bfloat16) for _ in range(2)]
    layout, size = PagedLayout.from_vllm_nhd(GEOMETRY, tensors), GEOMETRY.page_size_bytes
    pages = torch.zeros((1, size), dtype=torch.uint8)
    cases = [
        (torch.zeros((1, size - 1), dtype=torch.uint8), rf"pages: expected a \(n, {size}\) tensor of uint8"),
        (torch.zeros((1, size), dtype=torch.int16), "pages: expected a .* got .* int16"),
        (torch.zeros((size, 1), dtype=torch.uint8).t().expand(2, size), "pages: strides: expected rows that"),
        (
            torch.zeros((1, size), dtype=torch.uint8, device="meta"),
            "pages: device: expected a device with memory",
        ),
    ]
    for wrong, match in cases:
        with pytest.raises(ShapeError, match=match):
            pack(layout, [[0, 1]], wrong)
    with pytest.raises(ShapeError, match="pages: expected memory apart from the tensors'"):
        pack(layout, [[0, 1]], tensors[0].view(torch.uint8).reshape(-1)[:size].reshape(1, size))
    with pytest.raises(ShapeError, match="stream: expected none for tensors on the CPU"):
        pack(layout, [[0, 1]], pages, stream=3)


def test_dlpack_pages_when_moved_then_in_place() -> None:
    class Pages:
        """Of another library: nothing but DLPack."""

        def __init__(self, tensor: Any, *, is_old: bool = False) -> None:
            self.tensor, self.is_old = tensor, is_old

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**({} if self.is_old else options))

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    tensors = [torch.randn((2, 20, 16, 2, 64)).to(torch.bfloat16) for _ in range(2)]
    layout = PagedLayout.from_vllm_nhd(GEOMETRY, tensors)
    pages, expected = (torch.zeros((1, GEOMETRY.page_size_bytes), dtype=torch.uint8) for _ in range(2))
    pack(layout, [[4, 5]], Pages(pages))
    pack(layout, [[4, 5]], expected)
    assert torch.equal(pages, expected) and pages.any()
    old = Pages(pages, is_old=True)
    with pytest.raises(
        ShapeError, match="pages: expected writable memory, got a read-only tensor, or DLPack before"
    ):
        pack(layout, [[4, 5]], old)
    assert unpack(layout, [[4, 5]], old).is_ok.all()
