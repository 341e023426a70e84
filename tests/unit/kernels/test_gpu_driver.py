"""The bindings of GPU drivers and compilers, against a driver library of our own, from opening to launching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev_kernels import BackendUnavailableError, gpu_shape
from kvdev_kernels.driver import BATCH_COUNT_MAX, Driver, GpuError
from kvdev_kernels.driver_calls import AMD, NVIDIA, Vendor
from kvdev_kernels.gpu_compile import cache_folder, code_object
from kvdev_kernels.gpu_source import KERNEL_NAMES, SUM_KERNEL
from kvdev_kernels.gpu_status import gpu_status
from kvdev_kernels.nh64 import nh64_total
from kvdev_tools.main import run
from tests.unit.kernels.gpu_fake import Tensor, wait


def test_cache_when_used_then_compiled_once_and_damage_is_repaired(
    fake: Any, vendor: Vendor, tmp_path: Path
) -> None:
    driver = Driver(vendor)
    folder = cache_folder()
    assert folder == tmp_path / "cache"
    call = vendor.compiler_calls["compile"].encode()
    code, is_cached = code_object(driver, folder)
    assert not is_cached and fake.fake_calls(call) == 1
    assert code_object(driver, folder) == (code, True) and fake.fake_calls(call) == 1
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:20], whole[:32], whole[:-1], whole[:40] + b"?" + whole[41:]):
        entry.write_bytes(damaged)
        count = fake.fake_calls(call)
        assert code_object(driver, folder) == (code, False) and fake.fake_calls(call) == count + 1
        assert entry.read_bytes() == whole and list(folder.iterdir()) == [entry]
    driver.version += 1
    assert code_object(driver, folder) == (code, False)
    driver.arch = "gfx000"
    with pytest.raises(
        BackendUnavailableError, match="no code object for gfx000: error: unknown target gfx000"
    ):
        code_object(driver, folder)


def test_cache_when_its_folder_cannot_be_written_then_compiled_each_time(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    driver = Driver(AMD)
    for _ in range(2):
        assert code_object(driver, tmp_path / "file" / "below")[1] is False


def test_driver_when_library_is_missing_then_unavailable_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEV_HIP_LIBRARY", "/nonexistent/libamdhip64.so.7")
    with pytest.raises(
        BackendUnavailableError, match=r"hip: .*/nonexistent/libamdhip64.so.7 cannot be opened"
    ):
        Driver(AMD)


def test_driver_when_init_fails_or_device_is_not_there_then_unavailable(fake: Any) -> None:
    fake.fake_order(b"cuInit", 100, 0)
    with pytest.raises(BackendUnavailableError, match="cuInit: error 100"):
        Driver(NVIDIA)
    with pytest.raises(BackendUnavailableError, match="device 1: expected one of 1 devices"):
        Driver(NVIDIA, 1)


def test_registration_when_done_twice_or_refused_then_the_drivers_error(fake: Any, vendor: Vendor) -> None:
    driver = Driver(vendor)
    memory = np.zeros(4096, np.uint8)
    address, live = memory.ctypes.data, fake.fake_live()
    fake.fake_order(vendor.calls["host_pointer"].encode(), 1, 0)
    with pytest.raises(GpuError, match=vendor.calls["host_pointer"]):
        driver.register_host(address, 4096)
    assert fake.fake_live() == live
    device = driver.register_host(address, 4096)
    assert device != address and driver.allocation_of(device + 4095) == (device, 4096)
    assert driver.allocation_of(device + 4096) is None and driver.allocation_of(address) is None
    with pytest.raises(GpuError, match=f"{vendor.calls['host_register']}: error 712"):
        driver.register_host(address, 4096)
    driver.unregister_host(address)
    assert driver.allocation_of(device) is None and fake.fake_live() == live


def test_kernels_when_launched_through_the_driver_then_checksums_and_later_a_fault(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    driver = Driver(vendor)
    functions = {
        name: driver.function(driver.load_module(code_object(driver, None)[0]), name) for name in KERNEL_NAMES
    }
    page = rng.integers(0, 256, 40_004, dtype=np.uint8)
    tensor = Tensor(driver, page)
    tables = Tensor(driver, np.array([tensor.address, 0, 0], np.uint64))
    at = gpu_shape.Tables(0, 0, tables.address, tables.address + 8, tables.address + 16)
    shape = gpu_shape.sum_shape(page.size, 1, workgroup_limit=2, tables=at)
    stream, event = driver.make_stream(), driver.make_event()

    def launch() -> None:
        count = int(shape["workgroup_count"])
        driver.launch(functions[SUM_KERNEL], count, gpu_shape.THREAD_COUNT, shape.tobytes(), stream)
        driver.record(event, stream)

    launch()
    assert not driver.is_over(event)
    wait(lambda: driver.is_over(event))
    _, total, done = tables.read().tolist()
    assert (total, done) == (nh64_total(page), int(shape["tile_count"]))
    driver.free(tensor.address)
    launch()
    with pytest.raises(GpuError, match=r"error 700 \(\w*(IllegalAddress|ILLEGAL_ADDRESS)\)"):
        wait(lambda: driver.is_over(event))
    with pytest.raises(GpuError, match="error 700"):
        driver.alloc(64)
    with pytest.raises(GpuError, match="error 700"):
        driver.launch(functions[SUM_KERNEL], 1, gpu_shape.THREAD_COUNT, shape.tobytes(), stream)


def test_image_when_not_of_this_device_or_kernel_is_unknown_then_the_drivers_error(
    fake: Any, vendor: Vendor
) -> None:
    driver = Driver(vendor)
    with pytest.raises(GpuError, match="error 209"):
        driver.load_module(bytes(64))
    module = driver.load_module(code_object(driver, None)[0])
    with pytest.raises(GpuError, match="error 500"):
        driver.function(module, "kvdev_no_such_kernel")
    driver.unload_module(module)
    with pytest.raises(GpuError, match="error 400"):
        driver.function(module, KERNEL_NAMES[0])


def test_batch_when_longer_than_the_drivers_limit_then_cut(
    fake: Any, vendor: Vendor, rng: np.random.Generator
) -> None:
    driver = Driver(vendor)
    count = BATCH_COUNT_MAX + 3
    source = Tensor(driver, rng.integers(0, 256, count, dtype=np.uint8))
    target = Tensor(driver, np.zeros(count, np.uint8))
    places = np.arange(count, dtype=np.uint64)
    stream, event = driver.make_stream(), driver.make_event()
    sizes = np.ones(count, np.uint64)
    driver.copy_batch(
        places[::-1] + np.uint64(target.address), places + np.uint64(source.address), sizes, stream
    )
    driver.record(event, stream)
    wait(lambda: driver.is_over(event))
    assert np.array_equal(target.read(), source.array[::-1])
    name = b"hipMemcpyBatchAsync" if vendor is AMD else b"cuMemcpyBatchAsync"
    assert driver.has_batches and fake.fake_calls(name) == 2


def test_status_when_drivers_are_there_then_devices_and_when_not_then_reasons(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gpu_status()
    assert [(each.backend, each.device, each.arch, each.reason) for each in found] == [
        ("hip", "0: Fake Instinct", "gfx942:sramecc+:xnack-", ""),
        ("hip", "1: Fake Instinct", "gfx942:sramecc+:xnack-", ""),
        ("cuda", "0: Fake H200", "sm_90", ""),
    ]
    monkeypatch.setenv("KVDEV_HIPRTC_LIBRARY", "/nonexistent/libhiprtc.so")
    monkeypatch.setenv("KVDEV_CUDA_LIBRARY", "/nonexistent/libcuda.so.1")
    reasons = [each.reason for each in gpu_status()]
    assert "libhiprtc" in reasons[0] and "libcuda" in reasons[2]


def test_dma_buf_when_the_driver_has_it_is_reported_and_never_called(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [each.has_dma_buf for each in gpu_status()] == [True] * 3
    assert run(["kernels"]) == 0
    lines = capsys.readouterr().out
    assert "cuda 0: Fake H200: dma-buf export of its memory is available and unused\n" in lines
    fake.fake_dma_buf(0)
    assert [each.has_dma_buf for each in gpu_status()] == [True, True, False]
    assert run(["kernels"]) == 0
    assert "cuda 0: Fake H200: dma-buf export of its memory is not available\n" in capsys.readouterr().out
    for name in (b"cuMemGetHandleForAddressRange", b"hipMemGetHandleForAddressRange"):
        assert fake.fake_calls(name) == 0
