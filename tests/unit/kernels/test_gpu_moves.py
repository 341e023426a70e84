"""Packing and unpacking on a GPU against the fake driver, whose device addresses are not the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.buffers import AddressArray
from kvdev.clock import Deadline
from kvdev.errors import DeadlineError
from kvdev.geometry import Geometry
from kvdev_kernels import PagedLayout, ShapeError
from kvdev_kernels.driver import Driver
from kvdev_kernels.driver_calls import AMD, Vendor
from kvdev_kernels.gpu import SLOT_COUNT, GpuFaultError, GpuKernels, MoveResult, Route
from kvdev_kernels.nh64 import nh64
from tests.unit.kernels.gpu_fake import Tensor, wait

GEOMETRY = Geometry(
    model_id="m", layer_count=2, kv_head_count=3, head_size=24, dtype="fp16", tokens_per_page=32
)
BLOCKS, BLOCK_SIZE = 9, 16


class Bench:
    """Kernels on the fake driver with tensors in its memory and registered staging."""

    def __init__(
        self, vendor: Vendor, rng: np.random.Generator, cache: Path | None = None, **options: Any
    ) -> None:
        self.driver = Driver(vendor)
        self.kernels = GpuKernels(self.driver, cache=cache, **options)
        shape = (2, BLOCKS, GEOMETRY.kv_head_count, BLOCK_SIZE, GEOMETRY.head_size)
        self.tensors = [
            Tensor(self.driver, rng.integers(0, 1 << 16, shape, dtype=np.uint16)) for _ in range(2)
        ]
        self.layout = PagedLayout.from_vllm_hnd(GEOMETRY, self.tensors)
        size = GEOMETRY.page_size_bytes
        whole = np.zeros(8 * size + 64, np.uint8)
        self.pages = whole[-whole.ctypes.data % 64 :][: 8 * size].reshape(8, size)
        self.kernels.register(self.pages.ctypes.data, self.pages.nbytes)

    def addresses(self, *rows: int) -> AddressArray:
        return np.array([self.pages[row].ctypes.data for row in rows], np.uint64)

    def expected(self, table: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        pages = []
        for blocks in np.asarray(table):
            parts = [
                np.ascontiguousarray(tensor.array[kv][block].transpose(1, 0, 2)).tobytes()
                for tensor in self.tensors
                for kv in range(2)
                for block in blocks
            ]
            pages.append(np.frombuffer(b"".join(parts), np.uint8))
        return np.array(pages)


def test_pack_when_driver_is_fake_then_bytes_and_checksums(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    bench = Bench(vendor, rng)
    table = [[3, 1], [8, 0], [2, 5]]
    move = bench.kernels.submit_pack(bench.layout, table, bench.addresses(0, 2, 5))
    assert not bench.pages.any(), "a submitted move has already run: the fake driver tests nothing"
    result = move.wait()
    assert np.array_equal(bench.pages[[0, 2, 5]], bench.expected(table))
    assert result.nh64 is not None and result.is_ok is None
    assert result.nh64.tolist() == [nh64(page) for page in bench.expected(table)]
    assert not bench.pages[[1, 3, 4, 6, 7]].any()
    bench.kernels.close()


def test_unpack_when_pages_are_checked_then_only_the_damaged_one_is_named(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    bench = Bench(vendor, rng)
    bench.pages[:] = rng.integers(0, 256, bench.pages.shape, dtype=np.uint8)
    expected = np.array([nh64(bench.pages[row]) for row in (1, 4)], np.uint64)
    bench.pages[4, 77] ^= 1
    before = [tensor.array.copy() for tensor in bench.tensors]
    move = bench.kernels.submit_unpack(
        bench.layout, [[7, 2], [0, 4]], bench.addresses(1, 4), expected=expected
    )
    result = move.wait()
    assert result.is_ok is not None and result.is_ok.tolist() == [True, False]
    for tensor in bench.tensors:
        tensor.array = tensor.read()
    assert np.array_equal(bench.expected([[7, 2], [0, 4]]), bench.pages[[1, 4]])
    untouched = [1, 3, 5, 6, 8]
    for tensor, old in zip(bench.tensors, before, strict=True):
        assert np.array_equal(tensor.array[:, untouched], old[:, untouched])
    bench.kernels.close()


def test_streams_when_given_then_ordered_by_events_and_never_synchronised(
    fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    driver, caller = bench.driver, bench.driver.make_stream()
    newer = rng.integers(0, 1 << 16, bench.tensors[0].array.shape, dtype=np.uint16)
    driver.copy(bench.tensors[0].address, newer.ctypes.data, newer.nbytes, caller)
    number = int(driver.ffi.cast("uintptr_t", caller))
    move = bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0), after=number)
    bench.tensors[0].array = newer
    # What the caller's stream does next waits for the move: here, overwriting a block that it reads.
    move.then(number)
    later = np.zeros_like(newer)
    driver.copy(bench.tensors[0].address, later.ctypes.data, later.nbytes, caller)
    move.wait()
    assert np.array_equal(bench.pages[0], bench.expected([[0, 1]])[0])
    for name in ("hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize"):
        assert fake.fake_calls(name.encode()) == 0
    bench.kernels.close()


def test_moves_when_more_than_slots_then_all_right_and_nothing_is_allocated(
    fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    tables = [[[int(b) for b in rng.permutation(BLOCKS)[:2]]] for _ in range(3 * SLOT_COUNT)]
    for _ in range(SLOT_COUNT):
        bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    names = (b"hipMalloc", b"hipHostRegister", b"hipEventCreateWithFlags")
    before = [fake.fake_calls(name) for name in names]
    moves = [
        (table, row % 8, bench.kernels.submit_pack(bench.layout, table, bench.addresses(row % 8)))
        for row, table in enumerate(tables)
    ]
    for table, row, move in moves[-8:]:
        move.wait()
        assert np.array_equal(bench.pages[row], bench.expected(table)[0])
    assert [fake.fake_calls(name) for name in names] == before
    bench.kernels.close()


def test_close_when_called_then_everything_is_given_back(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    driver = Driver(vendor)
    live = fake.fake_live()
    kernels = GpuKernels(driver)
    whole = np.zeros(8192, np.uint8)
    kernels.register(whole.ctypes.data, whole.nbytes)
    kernels.close()
    kernels.close()
    assert fake.fake_live() == live


@pytest.mark.parametrize("call", ["hipModuleLaunchKernel", "hipMemcpyAsync", "hipEventRecord"])
def test_move_when_a_call_fails_then_fault_and_no_later_success(
    call: str, fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    fake.fake_order(call.encode(), 719, 0)
    with pytest.raises(GpuFaultError, match=f"{call}: error 719"):
        bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    with pytest.raises(GpuFaultError, match="after a fault"):
        bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    bench.kernels.close()


def test_move_when_the_kernel_faults_then_fault_with_the_drivers_word(
    fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    move = bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    bench.driver.free(bench.tensors[1].address)  # while the move is in flight
    with pytest.raises(GpuFaultError, match=r"hipEventQuery: error 700 \(hipErrorIllegalAddress\)"):
        move.wait()
    with pytest.raises(GpuFaultError, match="after a fault"):
        move.wait()
    bench.kernels.close()


def test_move_when_a_launch_does_nothing_then_fault(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    bench = Bench(vendor, rng)
    fake.fake_silence(1)
    move = bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    with pytest.raises(GpuFaultError, match="reported 0 of"):
        move.wait()
    bench.kernels.close()


def test_move_when_it_never_ends_then_deadline(fake: Any, rng: np.random.Generator) -> None:
    bench = Bench(AMD, rng)
    fake.fake_order(b"hipEventQuery", 600, 0)
    move = bench.kernels.submit_pack(bench.layout, [[0, 1]], bench.addresses(0))
    with pytest.raises(DeadlineError):
        move.wait(Deadline.after(0))
    bench.kernels.close()


def test_bad_input_when_given_then_refused_before_anything_is_submitted(
    fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    kernels, layout = bench.kernels, bench.layout
    size = GEOMETRY.page_size_bytes
    good = bench.addresses(0)
    stranger = np.zeros(size, np.uint8)
    launches = fake.fake_calls(b"hipModuleLaunchKernel")
    with pytest.raises(ShapeError, match=r"block_table: index: expected 0 to 8, got 9"):
        kernels.submit_pack(layout, [[0, 9]], good)
    with pytest.raises(ShapeError, match=r"block_table: index: expected every block once, got block 3 twice"):
        kernels.submit_unpack(layout, [[3, 3]], good)
    with pytest.raises(
        ShapeError, match=rf"pages: expected pages at least {size} bytes apart, got pages 0 and 1, 0"
    ):
        kernels.submit_pack(layout, [[0, 1], [2, 3]], bench.addresses(0, 0))
    with pytest.raises(ShapeError, match=rf"pages\[0\]: expected {size} bytes of staging registered"):
        kernels.submit_pack(layout, [[0, 1]], np.array([stranger.ctypes.data], np.uint64))
    with pytest.raises(ShapeError, match=r"expected \(1,\) uint64"):
        kernels.submit_unpack(layout, [[0, 1]], good, expected=np.zeros(2, np.uint64))
    with pytest.raises(ShapeError, match="one page or more"):
        kernels.submit_pack(layout, np.zeros((0, 2), np.int64), good[:0])
    elsewhere = [Tensor(bench.driver, tensor.array, "cuda:1") for tensor in bench.tensors]
    with pytest.raises(ShapeError, match="tensors: device: expected cuda:0 for back end hip, got cuda:1"):
        kernels.submit_pack(PagedLayout.from_vllm_hnd(GEOMETRY, elsewhere), [[0, 1]], good)
    on_cpu = PagedLayout.from_vllm_hnd(GEOMETRY, [tensor.array for tensor in bench.tensors])
    with pytest.raises(ShapeError, match="got cpu"):
        kernels.submit_pack(on_cpu, [[0, 1]], good)
    bench.driver.free(bench.tensors[1].address)
    with pytest.raises(ShapeError, match=r"plane [23]: expected live memory of this device, got address 0x"):
        kernels.submit_pack(layout, [[0, 1]], good)
    assert fake.fake_calls(b"hipModuleLaunchKernel") == launches
    kernels.close()


def test_odd_runs_when_moved_then_narrow_kernels_and_a_separate_sum(
    fake: Any, rng: np.random.Generator
) -> None:
    geometry = Geometry(
        model_id="m",
        layer_count=1,
        kv_head_count=1,
        head_size=133,
        dtype="fp8",
        tokens_per_page=8,
        attention="mla",
    )
    driver = Driver(AMD)
    kernels = GpuKernels(driver, workgroup_limit=3)
    tensor = Tensor(driver, rng.integers(0, 256, (5, 4, 133), dtype=np.uint8))
    layout = PagedLayout.from_vllm_mla(geometry, [tensor])
    pages = np.zeros(4096, np.uint8)
    start = -pages.ctypes.data % 16
    kernels.register(pages.ctypes.data, pages.nbytes)
    addresses = np.array([pages.ctypes.data + start], np.uint64)
    page = pages[start : start + geometry.page_size_bytes]
    result = kernels.submit_pack(layout, [[4, 2]], addresses).wait()
    assert page.tobytes() == tensor.array[4].tobytes() + tensor.array[2].tobytes()
    assert result.nh64 is not None and result.nh64.tolist() == [nh64(page)]
    checked = kernels.submit_unpack(layout, [[1, 3]], addresses, expected=result.nh64).wait()
    assert checked.is_ok is not None and checked.is_ok.all()
    assert np.array_equal(tensor.read()[[1, 3]], tensor.array[[4, 2]])
    odd = np.array([pages.ctypes.data + start + 1], np.uint64)
    with pytest.raises(ShapeError, match="multiples of 16 to checksum"):
        kernels.submit_pack(layout, [[4, 2]], odd)
    assert kernels.submit_pack(layout, [[4, 2]], odd, has_sum=False).wait() == MoveResult(None, None)
    assert pages[start + 1 :][: page.size].tobytes() == tensor.array[4].tobytes() + tensor.array[2].tobytes()
    kernels.close()


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("has_sum", [False, True])
def test_routes_when_taken_then_same_bytes_and_checksums(
    route: Route, has_sum: bool, fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    bench = Bench(vendor, rng)
    table, addresses = [[3, 1], [8, 0]], bench.addresses(1, 3)
    launches = fake.fake_calls(vendor.calls["launch"].encode())
    result = bench.kernels.submit_pack(bench.layout, table, addresses, route=route, has_sum=has_sum).wait()
    assert np.array_equal(bench.pages[[1, 3]], bench.expected(table)) and not bench.pages[[0, 2]].any()
    sums = [nh64(page) for page in bench.expected(table)]
    assert (result.nh64 is not None) == has_sum and (result.nh64 is None or result.nh64.tolist() == sums)
    launched = fake.fake_calls(vendor.calls["launch"].encode()) - launches
    assert launched == {Route.DIRECT: 1, Route.BOUNCE: 1, Route.COPIES: 0}[route] + has_sum * (
        2 if route is Route.COPIES else 1
    )
    bench.pages[:] = rng.integers(0, 256, bench.pages.shape, dtype=np.uint8)
    expected = np.array([nh64(bench.pages[row]) for row in (1, 3)], np.uint64) if has_sum else None
    other = [[5, 7], [2, 6]]
    move = bench.kernels.submit_unpack(
        bench.layout, other, addresses, expected=expected, has_sum=has_sum, route=route
    )
    verdict = move.wait().is_ok
    assert (verdict is None) == (not has_sum) and (verdict is None or verdict.all())
    for tensor in bench.tensors:
        tensor.array = tensor.read()
    assert np.array_equal(bench.expected(other), bench.pages[[1, 3]])
    bench.kernels.close()


@pytest.mark.parametrize("route", [Route.DIRECT, Route.BOUNCE])
@pytest.mark.parametrize("layers_per_event", [1, 2, 3])
def test_layers_when_unpacked_in_groups_then_each_is_there_after_its_event(
    route: Route, layers_per_event: int, fake: Any, rng: np.random.Generator
) -> None:
    bench = Bench(AMD, rng)
    bench.pages[:] = rng.integers(0, 256, bench.pages.shape, dtype=np.uint8)
    expected = np.array([nh64(bench.pages[0]) ^ 1], np.uint64)
    driver, caller = bench.driver, bench.driver.make_stream()
    number = int(driver.ffi.cast("uintptr_t", caller))
    move = bench.kernels.submit_unpack(
        bench.layout,
        [[4, 1]],
        bench.addresses(0),
        expected=expected,
        route=route,
        layers_per_event=layers_per_event,
    )
    # A caller's stream that waits for the first layer alone copies that layer: it sees the new bytes.
    move.then_layer(0, number)
    first = bench.tensors[0]
    seen = np.zeros_like(first.array)
    driver.copy(seen.ctypes.data, first.address, seen.nbytes, caller)
    event = driver.make_event()
    driver.record(event, caller)
    wait(lambda: driver.is_over(event))
    assert (move.result is None) or layers_per_event > 1
    result = move.wait()
    assert result.is_ok is not None and not result.is_ok[0]
    bench.tensors[0].array = seen
    bench.tensors[1].array = bench.tensors[1].read()
    assert np.array_equal(bench.expected([[4, 1]])[0], bench.pages[0])
    move.then_layer(1, number)  # over: nothing to wait for
    events = fake.fake_calls(b"hipEventCreateWithFlags")
    for _ in range(SLOT_COUNT):
        bench.kernels.submit_unpack(
            bench.layout, [[4, 1]], bench.addresses(0), route=route, layers_per_event=layers_per_event
        ).wait()
    assert fake.fake_calls(b"hipEventCreateWithFlags") == events
    with pytest.raises(ShapeError, match="layers_per_event: expected 0 or more, got -1"):
        bench.kernels.submit_unpack(bench.layout, [[4, 1]], bench.addresses(0), layers_per_event=-1)
    bench.kernels.close()
