"""Compiling the GPU kernels at run time, hiprtc for AMD and NVRTC for NVIDIA, and the cache of what they made.

A cache entry is one file named by a digest of source, architecture, options, driver and compiler versions; it starts
with a digest of its content. It is written beside and renamed; one that is damaged counts as missing, and is made anew.
Not here: the source (``kvdev_kernels.gpu_source``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import cffi

from kvdev_kernels.driver import Driver, GpuError, open_library
from kvdev_kernels.driver_calls import AMD, Vendor
from kvdev_kernels.errors import BackendUnavailableError
from kvdev_kernels.gpu_source import source_digest, source_text

CACHE_VARIABLE = "KVDEV_KERNEL_CACHE"
"""Folder of compiled kernels; empty: none is kept."""
DIGEST_SIZE_BYTES = 32
LOG_SIZE_MAX = 2000
"""Of a compiler's complaints, what goes into an error's text."""


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: KVDEV_KERNEL_CACHE, else under the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvdev" / "kernels"


class Compiler:
    """One vendor's run-time compiler."""

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        self._ffi = cffi.FFI()
        self._ffi.cdef(vendor.compiler_cdef)
        names, variable = vendor.compiler_libraries, vendor.compiler_variable
        self._lib: Any = open_library(self._ffi, names, variable, vendor.backend)
        major, minor = self._ffi.new("int *"), self._ffi.new("int *")
        self._call("version", major, minor)
        self.version = f"{int(major[0])}.{int(minor[0])}"

    def _code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._lib, self.vendor.compiler_calls[name])(*arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._code(name, *arguments)
        if code:
            text = self._ffi.string(getattr(self._lib, self.vendor.compiler_calls["error_string"])(code))
            raise GpuError(self.vendor.compiler_calls[name], code, text.decode(errors="replace"))

    def options(self, arch: str) -> list[str]:
        if self.vendor is AMD:
            return [f"--offload-arch={arch}", "-O3"]
        return [f"--gpu-architecture={arch}"]

    def compile(self, arch: str) -> bytes:
        """The code object for an architecture; BackendUnavailableError with the compiler's words where it has none."""
        program = self._ffi.new("void **")
        null = self._ffi.NULL
        self._call("create", program, source_text().encode(), b"pages.hip", 0, null, null)
        try:
            words = [self._ffi.new("char[]", word.encode()) for word in self.options(arch)]
            code = self._code("compile", program[0], len(words), self._ffi.new("char *[]", words))
            if code:
                log = self._bytes(program[0], "log_size", "log").rstrip(b"\0").decode(errors="replace")
                raise BackendUnavailableError(
                    self.vendor.backend, f"no code object for {arch}: {log[:LOG_SIZE_MAX] or f'error {code}'}"
                )
            return self._bytes(program[0], "code_size", "code")
        finally:
            self._code("destroy", program)

    def _bytes(self, program: Any, size_call: str, call: str) -> bytes:
        size = self._ffi.new("size_t *")
        self._call(size_call, program, size)
        data = self._ffi.new("char[]", max(1, int(size[0])))
        self._call(call, program, data)
        return bytes(self._ffi.buffer(data, int(size[0])))


def code_object(driver: Driver, folder: Path | None) -> tuple[bytes, bool]:
    """The kernels' code for this driver's device, and whether it came out of the cache."""
    compiler = Compiler(driver.vendor)
    entry = _entry(driver, compiler)
    if folder is not None:
        cached = _read(folder / entry)
        if cached is not None:
            return cached, True
    code = compiler.compile(driver.arch)
    if folder is not None:
        # A cache that cannot be written costs a compilation at each start and nothing else.
        with contextlib.suppress(OSError):
            _write(folder / entry, code)
    return code, False


def _entry(driver: Driver, compiler: Compiler) -> str:
    parts = [
        *("1", driver.backend, source_digest(), driver.arch, str(driver.version)),
        *(compiler.version, *compiler.options(driver.arch)),
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest() + ".code"


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=DIGEST_SIZE_BYTES).digest()


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[DIGEST_SIZE_BYTES:]
    return code if code and data[:DIGEST_SIZE_BYTES] == _digest(code) else None


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(code) + code)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
