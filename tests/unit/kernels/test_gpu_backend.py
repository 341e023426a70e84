"""``PageKernels`` over tensors in the memory of a GPU, against the fake driver: chosen by where the tensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.buffers import AddressArray, AddressedPages
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev_kernels import BackendUnavailableError, PagedLayout, PageKernels, ShapeError
from kvdev_kernels import gpu_backend as module
from kvdev_kernels.driver import Driver
from kvdev_kernels.driver_calls import AMD, NVIDIA, Vendor
from kvdev_kernels.gpu import GpuFaultError
from kvdev_kernels.nh64 import nh64
from tests.unit.kernels.gpu_fake import Tensor

GEOMETRY = Geometry(
    model_id="m", layer_count=2, kv_head_count=3, head_size=24, dtype="fp16", tokens_per_page=32
)
SIZE = GEOMETRY.page_size_bytes
BLOCKS, BLOCK_SIZE, PAGES = 30, 16, 12


class Rig:
    """The same tensors in NumPy arrays and in the memory of the fake driver, and pages in a row."""

    def __init__(self, vendor: Vendor, rng: np.random.Generator) -> None:
        self.driver = Driver(vendor)
        shape = (2, BLOCKS, BLOCK_SIZE, GEOMETRY.kv_head_count, GEOMETRY.head_size)
        self.arrays = [rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(2)]
        self.tensors = [Tensor(self.driver, array.copy()) for array in self.arrays]
        self.layout = PagedLayout.from_vllm_nhd(GEOMETRY, self.tensors)
        whole = np.zeros(PAGES * SIZE + 64, np.uint8)
        self.pages = whole[-whole.ctypes.data % 64 :][: PAGES * SIZE].reshape(PAGES, SIZE)
        self.table = rng.permutation(BLOCKS)[: 2 * PAGES].reshape(PAGES, 2)
        self.expected = np.zeros_like(self.pages)
        with PageKernels("numpy") as reference:
            reference.pack(PagedLayout.from_vllm_nhd(GEOMETRY, self.arrays), self.table, self.expected)

    def register(self, kernels: PageKernels) -> None:
        kernels.register(self.pages.ctypes.data, self.pages.nbytes)


SUMS: dict[str, Any] = {"crc32c": crc32c, "nh64": nh64}


@pytest.fixture(params=[1, 3, 100], ids="{}-pages-a-part".format)
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than moves in flight, some that are not full, and one."""
    monkeypatch.setattr(module, "PART_SIZE_BYTES", request.param * SIZE)


@pytest.mark.parametrize("algorithm", ["crc32c", "nh64"])
def test_auto_when_tensors_are_on_a_gpu_moves_them_there_with_either_checksum(
    fake: Any, rng: np.random.Generator, algorithm: str, part: None
) -> None:
    rig = Rig(AMD, rng)
    with PageKernels() as kernels:
        rig.register(kernels)
        sums = kernels.pack(rig.layout, rig.table, rig.pages, algorithm=algorithm)
        assert np.array_equal(rig.pages, rig.expected)
        expected = [SUMS[algorithm](page) for page in rig.expected]
        assert sums is not None and sums.tolist() == expected
        assert fake.fake_calls(b"hipModuleLaunchKernel") > 0
        # Back into other blocks; one page is damaged on its way.
        rig.pages[4, 99] ^= 1
        result = kernels.unpack(
            rig.layout, rig.table[::-1].copy(), rig.pages, verify=sums, algorithm=algorithm
        )
        assert np.flatnonzero(~result.is_ok).tolist() == [4]
        back = [tensor.read() for tensor in rig.tensors]
        again = np.zeros_like(rig.pages)
        with PageKernels("numpy") as reference:
            reference.pack(PagedLayout.from_vllm_nhd(GEOMETRY, back), rig.table[::-1].copy(), again)
        assert np.array_equal(again, rig.pages)
        assert kernels.pack(rig.layout, rig.table, rig.pages, checksums=False) is None


def test_auto_when_tensors_are_here_and_there_uses_both(fake: Any, rng: np.random.Generator) -> None:
    rig = Rig(NVIDIA, rng)
    with PageKernels() as kernels:
        rig.register(kernels)
        here = np.zeros_like(rig.pages)
        kernels.pack(PagedLayout.from_vllm_nhd(GEOMETRY, rig.arrays), rig.table, here)
        assert np.array_equal(here, rig.expected) and not fake.fake_calls(b"hipModuleLaunchKernel")
        kernels.pack(rig.layout, rig.table, rig.pages)
        assert np.array_equal(rig.pages, rig.expected)


@pytest.mark.parametrize("vendor", [AMD, NVIDIA], ids=["hip", "cuda"])
def test_named_back_end_moves_device_tensors_only(
    fake: Any, rng: np.random.Generator, vendor: Vendor
) -> None:
    rig = Rig(vendor, rng)
    with PageKernels(f"{vendor.backend}:0") as kernels:
        assert kernels.backend == vendor.backend and kernels.tier == rig.driver.arch
        rig.register(kernels)
        kernels.pack(rig.layout, rig.table, rig.pages, algorithm="nh64")
        assert np.array_equal(rig.pages, rig.expected)
        with pytest.raises(ShapeError, match=f"device: expected cuda for back end {vendor.backend}, got cpu"):
            kernels.pack(PagedLayout.from_vllm_nhd(GEOMETRY, rig.arrays), rig.table, rig.pages)
    with pytest.raises(BackendUnavailableError, match="device 7: expected one of"):
        PageKernels(f"{vendor.backend}:7")


def test_pages_when_pinned_by_others_or_on_the_device_need_no_registration(
    fake: Any, rng: np.random.Generator
) -> None:
    rig = Rig(AMD, rng)
    with PageKernels() as kernels:
        rig.driver.register_host(rig.pages.ctypes.data, rig.pages.nbytes)
        kernels.pack(rig.layout, rig.table, rig.pages)
        assert np.array_equal(rig.pages, rig.expected)
        there = Tensor(rig.driver, np.zeros_like(rig.pages))
        sums = kernels.pack(rig.layout, rig.table, there, algorithm="nh64")
        assert sums is not None and sums.tolist() == [nh64(page) for page in rig.expected]
        assert np.array_equal(there.read(), rig.expected)
        assert kernels.unpack(rig.layout, rig.table, there, verify=sums, algorithm="nh64").is_ok.all()
        with pytest.raises(ShapeError, match="algorithm: expected nh64 for pages in the memory of a GPU"):
            kernels.pack(rig.layout, rig.table, there)


def test_stream_when_given_is_waited_for_by_an_event(fake: Any, rng: np.random.Generator) -> None:
    rig = Rig(AMD, rng)

    class Stream:
        cuda_stream = int(rig.driver.ffi.cast("uintptr_t", rig.driver.make_stream()))

    newer = rng.integers(0, 1 << 16, rig.arrays[0].shape, dtype=np.uint16)
    with PageKernels() as kernels:
        rig.register(kernels)
        for stream in (Stream(), Stream.cuda_stream):
            newer = newer[::-1].copy()
            queue = rig.driver.stream_from(Stream.cuda_stream)
            rig.driver.copy(rig.tensors[0].address, newer.ctypes.data, newer.nbytes, queue)
            kernels.pack(rig.layout, rig.table, rig.pages, stream=stream)
            with PageKernels("numpy") as reference:
                layout = PagedLayout.from_vllm_nhd(GEOMETRY, [newer, rig.arrays[1]])
                reference.pack(layout, rig.table, rig.expected)
            assert np.array_equal(rig.pages, rig.expected)
        with pytest.raises(ShapeError, match="stream: expected a stream's number or torch's stream, got str"):
            kernels.pack(rig.layout, rig.table, rig.pages, stream="0")
        with pytest.raises(ShapeError, match="stream: expected none for tensors on the CPU, got int"):
            kernels.pack(PagedLayout.from_vllm_nhd(GEOMETRY, rig.arrays), rig.table, rig.pages, stream=0)


def launched(fake: Any) -> int:
    return int(fake.fake_calls(b"hipModuleLaunchKernel") + fake.fake_calls(b"hipMemcpyAsync"))


def test_bad_input_when_tensors_are_on_a_gpu_is_refused_before_a_launch(
    fake: Any, rng: np.random.Generator
) -> None:
    rig = Rig(AMD, rng)
    kernels = PageKernels()
    before = launched(fake)
    addresses: AddressArray = np.array([page.ctypes.data for page in rig.pages], np.uint64)
    twice, wild = rig.table.copy(), rig.table.copy()
    twice[1, 0], wild[3, 1] = twice[0, 0], BLOCKS
    cases: list[tuple[str, Any, Any]] = [
        (r"pages\[0\]: expected \d+ bytes of staging registered with this device \(register\)", rig.table, None),
        (rf"block_table: index: expected 0 to {BLOCKS - 1}, got {BLOCKS}", wild, None),
        ("block_table: index: expected every block once, got block", twice, None),
        ("pages: expected pages of this geometry", rig.table, rig.pages[:, :-1]),
        (r"pages: expected a \(n, \d+\) tensor of uint8", rig.table, Tensor(rig.driver, rig.pages.view("<u2"))),
        ("pages: device: expected cpu or cuda:0, got cuda:1", rig.table, Tensor(rig.driver, rig.pages, "cuda:1")),
        ("pages: expected memory apart from the tensors'", rig.table,
         AddressedPagesOnDevice(rig.tensors[0].address)),
    ]  # fmt: skip
    copies = launched(fake)
    for match, table, pages in cases:
        with pytest.raises(ShapeError, match=match):
            kernels.unpack(rig.layout, table, rig.pages if pages is None else pages)
    freed = rig.tensors[1]
    rig.driver.free(freed.address)
    kernels.register(rig.pages.ctypes.data, rig.pages.nbytes)
    with pytest.raises(ShapeError, match=r"plane \d: expected live memory of this device, got address 0x"):
        kernels.pack(rig.layout, rig.table, AddressedPages(addresses, SIZE, rig.pages))
    assert launched(fake) == copies and before <= copies
    with pytest.raises(ShapeError, match="staging: expected memory that is not registered yet"):
        kernels.register(rig.pages.ctypes.data, rig.pages.nbytes)
    kernels.unregister(rig.pages.ctypes.data)
    with pytest.raises(ShapeError, match="staging: expected memory that was registered"):
        kernels.unregister(rig.pages.ctypes.data)
    kernels.close()


class AddressedPagesOnDevice:
    """A tensor of pages whose memory is where the layout's tensors are."""

    device, dtype = "cuda:0", "torch.uint8"

    def __init__(self, address: int) -> None:
        self.address, self.shape = address, (PAGES, SIZE)

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return (SIZE, 1)

    def element_size(self) -> int:
        return 1


def test_device_tensors_when_no_driver_is_there_are_refused_with_every_reason(
    fake: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(AMD, rng)
    monkeypatch.setenv("KVDEV_HIP_LIBRARY", "/none/hip.so")
    monkeypatch.setenv("KVDEV_CUDA_LIBRARY", "/none/cuda.so")
    with (
        PageKernels() as kernels,
        pytest.raises(BackendUnavailableError, match=r"hip: .*none.*; cuda: ") as found,
    ):
        kernels.pack(rig.layout, rig.table, rig.pages)
    assert found.value.backend == "cuda:0"
    with (
        PageKernels("numpy") as kernels,
        pytest.raises(ShapeError, match="device: expected cpu for back end numpy"),
    ):
        kernels.pack(rig.layout, rig.table, rig.pages)


def test_route_named_wrong_in_the_environment_is_refused(
    fake: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(AMD, rng)
    monkeypatch.setenv("KVDEV_GPU_ROUTE", "tunnel")
    with PageKernels() as kernels, pytest.raises(UsageError, match="KVDEV_GPU_ROUTE: expected one of direct"):
        kernels.pack(rig.layout, rig.table, rig.pages)


def test_fault_when_a_kernel_does_nothing_is_never_success(fake: Any, rng: np.random.Generator) -> None:
    rig = Rig(AMD, rng)
    kernels = PageKernels()
    rig.register(kernels)
    fake.fake_silence(100)
    with pytest.raises(GpuFaultError, match="reported 0 of"):
        kernels.pack(rig.layout, rig.table, rig.pages)
    kernels.close()


def test_everything_when_closed_is_given_back(fake: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    rig = Rig(AMD, rng)
    live = fake.fake_live()
    with PageKernels() as kernels:
        rig.register(kernels)
        table: npt.NDArray[np.int64] = rig.table.astype(np.int64)
        kernels.pack(rig.layout, table, rig.pages)
        assert fake.fake_live() > live
    assert fake.fake_live() == live
