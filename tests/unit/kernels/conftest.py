"""Fixtures of the GPU kernels' tests: the driver library of our own, in place of both vendors' libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cffi
import pytest

from kvdev_kernels.driver_calls import VENDORS, Vendor
from kvdev_kernels.gpu_source import SOURCE_PATH
from tests.unit.kernels.gpu_build import HERE, need, run

CONTROLS = """
int fake_calls(const char *name);
void fake_order(const char *name, int code, int after);
void fake_silence(int count);
int fake_live(void);
void fake_reset(void);
void fake_dma_buf(int value);
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (compiler,) = need("g++")
    path = tmp_path_factory.mktemp("driver") / "libfake.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    run([compiler, *flags, f"-I{SOURCE_PATH.parent}", HERE / "fake_gpu.cpp", "-o", path])
    return path


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for vendor in VENDORS:
        monkeypatch.setenv(vendor.library_variable, str(library))
        monkeypatch.setenv(vendor.compiler_variable, str(library))
    monkeypatch.setenv("KVDEV_KERNEL_CACHE", str(tmp_path / "cache"))
    ffi = cffi.FFI()
    ffi.cdef(CONTROLS)
    lib = ffi.dlopen(str(library))
    lib.fake_reset()
    yield lib
    lib.fake_reset()


@pytest.fixture(params=VENDORS, ids=lambda vendor: vendor.backend)
def vendor(request: pytest.FixtureRequest) -> Vendor:
    assert isinstance(request.param, Vendor)
    return request.param
