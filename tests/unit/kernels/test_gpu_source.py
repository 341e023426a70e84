"""The source of the GPU kernels without a GPU: it builds for each architecture, its logic runs under sanitizers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvdev_kernels import gpu_shape
from kvdev_kernels.gpu_source import KERNEL_NAMES, SOURCE_PATH, source_text
from tests.unit.kernels.gpu_build import HERE, code_object, need, run

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
def test_source_when_compiled_for_amd_then_all_kernels_without_scratch_or_spills(
    arch: str, tmp_path: Path
) -> None:
    path = code_object(arch, tmp_path)
    (readelf,) = need("llvm-readelf-19")
    notes = run([readelf, "--notes", path])
    names = re.findall(r"\.name: +(kvdev_\w+)", notes)
    assert sorted(names) == sorted(KERNEL_NAMES)
    for field in ("private_segment_fixed_size", "sgpr_spill_count", "vgpr_spill_count"):
        assert re.findall(rf"\.{field}: +(\d+)", notes) == ["0"] * len(names), field
    assert max(int(count) for count in re.findall(r"\.vgpr_count: +(\d+)", notes)) <= 64
    (objdump,) = need("llvm-objdump-19")
    code = run([objdump, "-d", f"--mcpu={arch}", path])
    assert "flat_load" not in code and "flat_store" not in code and "scratch_" not in code
    wide = "global_load_b128" if arch == "gfx1100" else "global_load_dwordx4"
    assert len(re.findall(rf"{wide} .*", code)) >= 4 * 4


def test_source_when_compiled_for_nvidia_then_no_spills(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is missing (CUDA toolkit)")
    output = run(
        [
            nvcc,
            "-x",
            "cu",
            "-cubin",
            "-arch=sm_90",
            "-Xptxas",
            "-v",
            "-o",
            tmp_path / "pages.cubin",
            SOURCE_PATH,
        ]
    )
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", output)) == sorted(KERNEL_NAMES)
    assert set(re.findall(r"(\d+) bytes spill", output)) == {"0"}
    assert all(int(count) <= 64 for count in re.findall(r"Used (\d+) registers", output))


def test_source_when_run_as_cpp_under_sanitizers_then_bytes_and_totals_are_right(tmp_path: Path) -> None:
    (compiler,) = need("g++")
    program = tmp_path / "shim"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *SANITIZE]
    run([compiler, *flags, f"-I{SOURCE_PATH.parent}", HERE / "shim_main.cpp", "-o", program])
    assert run([program]) == "7 cases\n"


def test_source_when_read_then_its_kernels_are_the_listed_ones() -> None:
    assert tuple(re.findall(r"KV_KERNEL\(KV_THREADS\) void (\w+)\(", source_text())) == KERNEL_NAMES


def test_source_when_read_then_its_constants_are_those_of_the_launch() -> None:
    text = source_text()
    assert f"#define KV_THREADS {gpu_shape.THREAD_COUNT}\n" in text
    assert f"#define KV_UNROLL {gpu_shape.UNROLL_COUNT}\n" in text
    assert f"sizeof(struct kv_shape) == {gpu_shape.SHAPE_DTYPE.itemsize}" in text
    assert f"sizeof(struct kv_check) == {gpu_shape.CHECK_DTYPE.itemsize}" in text


def test_divisor_when_any_value_then_division_is_exact(rng: np.random.Generator) -> None:
    limit = gpu_shape.DIVIDEND_LIMIT
    values = [1, 2, 3, 5, 7, 8, 9, 41, 1000, 4097, limit // 3, limit - 1, limit - 2]
    values += [int(value) for value in rng.integers(1, limit, 200)]
    for value in values:
        _, multiplier, shift = gpu_shape.divisor(value)
        assert 0 < multiplier < 1 << 32
        numbers = [0, 1, value - 1, value, value + 1, limit - 1, limit // value * value - 1, limit // 2]
        for n in [*numbers, *(int(number) for number in rng.integers(0, limit, 50))]:
            if 0 <= n < limit:
                assert ((n * multiplier >> 32) + n) >> shift == n // value, (n, value)
