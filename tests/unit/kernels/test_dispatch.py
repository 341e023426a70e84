"""Back ends: choice, refusals, verification, threads, and tiers forced in processes of their own."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kvdev.buffers import AddressedPages
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.staging import Arena
from kvdev_kernels import (
    BackendUnavailableError,
    PagedLayout,
    PageKernels,
    ShapeError,
    availability,
    cpu,
    pack,
    unpack,
)
from kvdev_kernels.cpu import TIER_FEATURES, crc32c_of_zeros, runnable_tiers
from kvdev_kernels.nh64 import nh64
from kvdev_kernels.testing import ENGINE_CASES, GuardedMemory, expected_pages

SMALL = Geometry.preset("small")
ROW = Geometry(
    model_id="m",
    layer_count=1,
    kv_head_count=1,
    head_size=9,
    dtype="uint8",
    tokens_per_page=2,
    attention="mla",
)
NHD = ENGINE_CASES[0]


def make(
    rng: np.random.Generator, geometry: Geometry = SMALL, blocks: int = 80
) -> tuple[PagedLayout, object]:
    tensors = NHD.make(GuardedMemory(rng), geometry, blocks, 16)
    return NHD.layout(geometry, tensors), tensors


def test_pack_and_unpack_when_default_then_lease_round_trip(rng: np.random.Generator) -> None:
    layout, tensors = make(rng)
    table = rng.permutation(80)[:64].reshape(2, 32)
    with Arena(2 << 20) as arena, arena.lease(2, SMALL.page_size_bytes) as lease:
        crc = pack(layout, table, lease)
        assert np.array_equal(lease.array, expected_pages(NHD, SMALL, tensors, table))
        assert crc is not None and crc.tolist() == [crc32c(page) for page in lease.array]
        target, others = make(rng)
        assert unpack(target, table, lease, verify=crc).is_ok.all()
        assert np.array_equal(lease.array, expected_pages(NHD, SMALL, others, table))


def test_unpack_when_a_page_differs_then_only_that_page_is_reported(rng: np.random.Generator) -> None:
    layout, _ = make(rng)
    table = rng.permutation(80)[:64].reshape(2, 32)
    pages = np.zeros((2, SMALL.page_size_bytes), np.uint8)
    crc = pack(layout, table, pages)
    assert crc is not None
    pages[1, 12345] ^= 4
    result = unpack(layout, table, pages, verify=crc)
    assert result.is_ok.tolist() == [True, False]
    assert result.crc32c[0] == crc[0] and result.crc32c[1] == crc32c(pages[1])


def test_pages_when_wrong_then_shape_error_and_nothing_moves(rng: np.random.Generator) -> None:
    layout, _ = make(rng)
    table = np.arange(32).reshape(1, 32)
    with pytest.raises(ShapeError, match=r"pages: .*65536"):
        pack(layout, table, np.zeros((1, 100), np.uint8))
    read_only = np.zeros((1, SMALL.page_size_bytes), np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        pack(layout, table, read_only)
    with pytest.raises(ShapeError, match="at least 65536 bytes, got 4096"):
        pack(layout, table, AddressedPages(np.array([4096], np.uint64), 4096, None))
    with pytest.raises(ShapeError, match="verify: expected 1 whole numbers"):
        unpack(layout, table, read_only, verify=[1, 2])
    assert not read_only.any()


def test_pages_when_they_overlap_then_refused_before_anything_is_written(rng: np.random.Generator) -> None:
    layout, tensors = make(rng)
    memory = np.zeros(2 * SMALL.page_size_bytes, np.uint8)
    starts = np.array([0, SMALL.page_size_bytes - 1], np.uint64) + np.uint64(memory.ctypes.data)
    pages = AddressedPages(starts, SMALL.page_size_bytes, memory)
    with pytest.raises(
        ShapeError, match=r"expected 65536 bytes of memory for each page, got 0x\w+ only 65535"
    ):
        pack(layout, np.arange(64), pages)
    assert not memory.any()
    unpack(layout, np.arange(64), pages)
    inside = tensors[1].reshape(-1).view(np.uint8)[100 : 100 + SMALL.page_size_bytes]  # type: ignore[index]
    for move in (pack, unpack):
        with pytest.raises(
            ShapeError, match="pages: expected memory apart from the tensors', got a page inside"
        ):
            move(layout, np.arange(32), inside.reshape(1, -1))


class ElsewhereTensor:
    """What torch's tensor on a device looks like to us; the memory is never touched."""

    def __init__(self, address: int, shape: tuple[int, ...], device: str) -> None:
        self.address, self.shape, self.dtype, self.device = address, shape, "torch.bfloat16", device

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))


def test_tensors_when_on_another_device_then_refused_before_anything_moves() -> None:
    shape = (2, 40, 16, 2, 8)
    size = 2 * int(np.prod(shape))
    remote = [ElsewhereTensor(1 << 40, shape, "cuda:0"), ElsewhereTensor((1 << 40) + size, shape, "cuda:0")]
    layout = PagedLayout.from_vllm_nhd(SMALL, remote)
    assert layout.device == "cuda:0"
    pages = np.zeros((1, SMALL.page_size_bytes), np.uint8)
    for backend in ("numpy", "cpu-numba"):
        with pytest.raises(ShapeError, match=rf"device: expected cpu for back end {backend}, got cuda:0"):
            PageKernels(backend).pack(layout, np.arange(32), pages)
        with pytest.raises(ShapeError, match="device: expected cpu"):
            PageKernels(backend).unpack(layout, np.arange(32), pages)
    remote[1].device = "cuda:1"
    with pytest.raises(
        ShapeError, match=r"tensors\[1\]: device: expected cuda:0 as tensors\[0\], got cuda:1"
    ):
        PagedLayout.from_vllm_nhd(SMALL, remote)


def test_unpack_when_tensors_are_read_only_then_refused(rng: np.random.Generator) -> None:
    tensors = NHD.make(GuardedMemory(rng), SMALL, 40, 16)
    for tensor in tensors:
        tensor.flags.writeable = False
    pages = np.zeros((1, SMALL.page_size_bytes), np.uint8)
    layout = NHD.layout(SMALL, tensors)
    pack(layout, np.arange(32), pages)
    with pytest.raises(ShapeError, match="writable"):
        unpack(layout, np.arange(32), pages)


def test_lease_when_released_then_refused(rng: np.random.Generator) -> None:
    layout, _ = make(rng)
    with Arena(2 << 20) as arena:
        lease = arena.lease(1, SMALL.page_size_bytes)
        lease.release()
        with pytest.raises(ValueError, match="after release"):
            pack(layout, np.arange(32), lease)


@pytest.mark.parametrize("name", ["cuda", "cpu-numba:avx1024", "numpy:fast"])
def test_backend_when_unknown_then_unavailable_error(name: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        PageKernels(name)
    assert caught.value.reason


def test_backend_when_named_by_environment_then_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEV_KERNELS", "numpy")
    assert PageKernels().backend == "numpy"
    assert PageKernels("cpu-numba").backend == "cpu-numba"
    monkeypatch.setenv("KVDEV_KERNELS", "cpu-numba:portable")
    assert PageKernels().tier == "portable"
    monkeypatch.setenv("KVDEV_KERNELS", "nonsense")
    with pytest.raises(BackendUnavailableError, match="nonsense"):
        PageKernels()


def test_availability_when_all_here_then_no_reasons() -> None:
    assert availability() == {"cpu-numba": "", "numpy": ""}


def test_threads_when_many_pages_then_same_bytes_and_checksums(rng: np.random.Generator) -> None:
    geometry = Geometry.preset("medium")
    layout, tensors = make(rng, geometry, blocks=300)
    table = rng.permutation(300)[: 9 * 32].reshape(9, 32)
    results = []
    for threads in (1, 2, 5):
        pages = np.zeros((9, geometry.page_size_bytes), np.uint8)
        with PageKernels("cpu-numba", thread_count=threads) as kernels:
            crc = kernels.pack(layout, table, pages)
        assert crc is not None
        results.append((pages, crc))
    assert np.array_equal(results[0][0], expected_pages(NHD, geometry, tensors, table))
    for pages, crc in results[1:]:
        assert np.array_equal(pages, results[0][0]) and np.array_equal(crc, results[0][1])


@pytest.mark.parametrize("tier", runnable_tiers())
@pytest.mark.parametrize("head_size", [576, 577])
def test_threads_when_fewer_pages_than_threads_then_pieces_of_pages_and_one_checksum(
    tier: str, head_size: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with planes that do not divide evenly, and with runs that are no multiple of anything."""
    monkeypatch.setattr(cpu, "THREAD_SIZE_BYTES_MIN", 4096)
    geometry = Geometry(
        model_id="m", layer_count=7, kv_head_count=1, head_size=head_size, dtype="uint8", tokens_per_page=64,
        attention="mla",
    )  # fmt: skip
    tensors = [rng.integers(0, 256, (20, 16, head_size), dtype=np.uint8) for _ in range(7)]
    layout = PagedLayout.from_vllm_mla(geometry, tensors)
    table = rng.permutation(20)[:8].reshape(2, 4)
    for page_count, threads in ((1, 2), (1, 5), (1, 16), (2, 5)):
        expected = np.zeros((page_count, geometry.page_size_bytes), np.uint8)
        with PageKernels("numpy") as reference:
            crc = reference.pack(layout, table[:page_count], expected)
            assert crc is not None
        pages = np.zeros_like(expected)
        with PageKernels(f"cpu-numba:{tier}", thread_count=threads) as kernels:
            found = kernels.pack(layout, table[:page_count], pages)
            assert found is not None and np.array_equal(found, crc)
            backend = kernels._backend
            assert isinstance(backend, cpu.CpuKernels)
            assert len(backend._scratch) == page_count * min(7, threads // page_count), "threads at work"
            assert np.array_equal(pages, expected)
            target = [np.zeros_like(tensor) for tensor in tensors]
            back = PagedLayout.from_vllm_mla(geometry, target)
            assert kernels.unpack(back, table[:page_count], pages, verify=crc).is_ok.all()
            blocks = table[:page_count].ravel()
            for old, new in zip(tensors, target, strict=True):
                assert np.array_equal(old[blocks], new[blocks]) and new.any(axis=(1, 2)).sum() == len(blocks)
            nh = kernels.pack(layout, table[:page_count], pages, algorithm="nh64")
            assert nh is not None and nh.tolist() == [nh64(page) for page in expected]
            assert kernels.pack(layout, table[:page_count], pages, checksums=False) is None


@pytest.mark.parametrize("tier", runnable_tiers())
@pytest.mark.parametrize(
    "size", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 9216]
)
def test_checksum_when_any_length_then_equals_the_core(
    tier: str, size: int, rng: np.random.Generator
) -> None:
    geometry = Geometry(
        model_id="m",
        layer_count=1,
        kv_head_count=1,
        head_size=size,
        dtype="uint8",
        tokens_per_page=2,
        attention="mla",
    )
    tensor = rng.integers(0, 256, (4, 1, size), dtype=np.uint8)
    pages = np.zeros((1, 2 * size), np.uint8)
    crc = PageKernels(f"cpu-numba:{tier}").pack(PagedLayout.from_vllm_mla(geometry, [tensor]), [3, 1], pages)
    assert crc is not None and int(crc[0]) == crc32c(tensor[3].tobytes() + tensor[1].tobytes())


@pytest.mark.parametrize("backend", ["numpy", "cpu-numba"])
def test_checksum_when_nh64_then_the_definition_and_pages_alike(
    backend: str, rng: np.random.Generator
) -> None:
    for size in (1, 7, 8, 9, 4095, 4096):
        geometry = dataclasses.replace(ROW, head_size=size)
        tensor = rng.integers(0, 256, (4, 1, size), dtype=np.uint8)
        layout = PagedLayout.from_vllm_mla(geometry, [tensor])
        pages = np.zeros((2, 2 * size), np.uint8)
        with PageKernels(backend) as kernels:
            sums = kernels.pack(layout, [[3, 1], [0, 2]], pages, algorithm="nh64")
            assert sums is not None and sums.dtype == np.uint64
            assert sums.tolist() == [nh64(page) for page in pages]
            pages[1, 0] ^= 1
            result = kernels.unpack(layout, [[3, 1], [0, 2]], pages, verify=sums, algorithm="nh64")
            assert result.is_ok.tolist() == [True, False]
            assert np.array_equal(np.concatenate([tensor[0], tensor[2]]).ravel(), pages[1])
            with pytest.raises(ShapeError, match="algorithm: expected one of crc32c, nh64, got 'md5'"):
                kernels.pack(layout, [[3, 1], [0, 2]], pages, algorithm="md5")


def test_memory_when_pages_move_again_and_again_then_nothing_is_allocated(rng: np.random.Generator) -> None:
    geometry = Geometry.preset("medium")
    layout, _ = make(rng, geometry, blocks=300)
    table = rng.permutation(300)[: 8 * 32].reshape(8, 32)
    pages = np.zeros((8, geometry.page_size_bytes), np.uint8)
    with PageKernels("cpu-numba", thread_count=2) as kernels:
        for _ in range(3):
            kernels.unpack(layout, table, pages, verify=kernels.pack(layout, table, pages))
        gc.collect()
        tracemalloc.start()
        try:
            kernels.unpack(layout, table, pages, verify=kernels.pack(layout, table, pages))
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            for _ in range(20):
                kernels.unpack(layout, table, pages, verify=kernels.pack(layout, table, pages))
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # The block table, the checksums and what threads are told, for 8 MiB of pages each way; nothing stays.
    assert peak - before < 64 * 1024
    assert after - before < 8 * 1024


def test_checksum_when_known_answer_then_equal() -> None:
    geometry = Geometry(
        model_id="m",
        layer_count=1,
        kv_head_count=1,
        head_size=9,
        dtype="uint8",
        tokens_per_page=1,
        attention="mla",
    )
    tensor = np.frombuffer(b"123456789", np.uint8).reshape(1, 1, 9)
    for tier in runnable_tiers():
        pages = np.zeros((1, 9), np.uint8)
        crc = PageKernels(f"cpu-numba:{tier}").pack(PagedLayout.from_vllm_mla(geometry, [tensor]), [0], pages)
        assert crc is not None and int(crc[0]) == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 2, 31, 4096, 65537])
def test_crc_of_zeros_when_any_length_then_equals_the_core(size: int) -> None:
    assert crc32c_of_zeros(size) == crc32c(bytes(size))


CHECK = """
import numpy as np
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev_kernels import PageKernels
from kvdev_kernels.testing import ENGINE_CASES, GuardedMemory, expected_pages
kernels = PageKernels("cpu-numba")
for case in ENGINE_CASES[:2]:
    geometry = Geometry.preset("small")
    tensors = case.make(GuardedMemory(np.random.default_rng(1)), geometry, 40, 16)
    pages = np.zeros((1, geometry.page_size_bytes), np.uint8)
    crc = kernels.pack(case.layout(geometry, tensors), np.arange(32), pages)
    assert (pages == expected_pages(case, geometry, tensors, np.arange(32).reshape(1, 32))).all()
    assert int(crc[0]) == crc32c(pages)
print(kernels.tier)
"""


@pytest.mark.parametrize(
    ("environment", "tier"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, "portable"),
        ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse4.2,+crc32"}, "sse42"),
        ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse4.2,+crc32,+pclmul"}, "pclmul"),
        ({"NUMBA_ENABLE_AVX": "0"}, "pclmul"),
        (
            {
                "NUMBA_CPU_NAME": "generic",
                "NUMBA_CPU_FEATURES": "+sse4.2,+crc32,+pclmul,+avx,+avx2,+vpclmulqdq",
            },
            "vpclmul256",
        ),
    ],
)
def test_tier_when_compiler_is_narrowed_then_lower_tier_and_no_abort(
    environment: dict[str, str], tier: str
) -> None:
    if tier not in runnable_tiers():
        pytest.skip(f"this processor lacks {', '.join(TIER_FEATURES[tier])}")
    run = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == tier


def test_tier_when_forced_beyond_the_compiler_then_unavailable_not_abort() -> None:
    code = (
        "from kvdev_kernels import PageKernels, BackendUnavailableError\n"
        "try: PageKernels('cpu-numba:vpclmul')\n"
        "except BackendUnavailableError as error: print(error.reason)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0 and "tier vpclmul needs avx512f" in run.stdout, run.stderr


def test_package_when_imported_then_numba_is_not() -> None:
    code = "import sys, kvdev_kernels; assert 'numba' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_package_when_numba_is_missing_then_numpy_and_the_reason() -> None:
    code = (
        "import sys; sys.modules['numba'] = None; sys.modules['llvmlite'] = None\n"
        "from kvdev_kernels import PageKernels, availability\n"
        "assert PageKernels().backend == 'numpy'; assert 'cannot be imported' in availability()['cpu-numba']"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KVDEV_KERNELS"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


def test_memory_when_kernels_have_run_then_process_stays_small() -> None:
    code = (
        CHECK + "\nprint(max(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout.split()[-1]) < 250 * 1024


def test_cache_when_it_cannot_be_written_then_compiled_all_the_same() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "NUMBA_CACHE_DIR": "/proc/no-such-folder"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
