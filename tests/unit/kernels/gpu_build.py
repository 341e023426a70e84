"""Builds of the GPU kernels' source that tests run without a GPU: code objects, PTX, and C++ under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvdev_kernels.gpu_source import SOURCE_PATH

HERE = Path(__file__).parent
BUILD_TIMEOUT_S = 600
"""A busy machine compiles slowly."""


def need(*names: str) -> list[str]:
    """Paths of these programs; the test skips naming the first that is missing and its Debian package."""
    packages = {"clang++-19": "clang-19", "ld.lld-19": "lld-19", "llvm-objdump-19": "llvm-19", "g++": "g++"}
    found = []
    for name in names:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is missing (Debian package {packages.get(name, name)})")
        found.append(path)
    return found


def run(command: list[str | Path], *, timeout_s: float = BUILD_TIMEOUT_S) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def code_object(arch: str, folder: Path) -> Path:
    """The code object of an AMD architecture, built without ROCm: no headers, no device libraries."""
    clang, _ = need("clang++-19", "ld.lld-19")
    path = folder / f"pages-{arch}.co"
    if not path.exists():
        flags = ["-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", f"--offload-arch={arch}"]
        run(
            [
                clang,
                *flags,
                "-O3",
                "-Wall",
                "-Werror",
                "--no-gpu-bundle-output",
                "-c",
                SOURCE_PATH,
                "-o",
                path,
            ]
        )
    return path
