"""GPU drivers through cffi's ABI mode: devices, memory, streams, events, launches and copies of either vendor.

The libraries are opened here and nowhere else, when a driver is asked for; none is needed to import this.
Not here: compiling kernels (``kvdev_kernels.gpu_compile``); what is launched (``kvdev_kernels.gpu``).
Threads: any; the caller's thread is bound to the device by ``use``. Nothing here waits for a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt

from kvdev_kernels.driver_calls import AMD, Vendor
from kvdev_kernels.errors import BackendUnavailableError, KernelError

NOT_READY = 600
"""What both drivers answer when an event is not over."""
BATCH_COUNT_MAX = 8192
"""hipMemcpyBatchAsync faults above it; longer lists are cut."""
CUDA_BATCH_VERSION = 12080
"""12.8's cuMemcpyBatchAsync has nine arguments, 13's entry of the same name eight: it is asked for by version."""
EVENT_WITHOUT_TIMING = 2
STREAM_NON_BLOCKING = 1
HOST_REGISTER_PORTABLE_MAPPED = 3
HIP_COPY_KIND_BY_ADDRESS = 4
_COMPUTE_MAJOR, _COMPUTE_MINOR, _DMA_BUF_SUPPORTED = 75, 76, 124
_EXPORT_CALLS = {"hip": "hipMemGetHandleForAddressRange", "cuda": "cuMemGetHandleForAddressRange"}
_HIP_PROPERTIES_SIZE_BYTES = 8192
"""More than any version's hipDeviceProp_t."""


class GpuError(KernelError):
    """A driver's call failed; ``call``, ``code`` and ``name`` are the driver's own words."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call}: error {code} ({name}){f': {detail}' if detail else ''}")
        self.call = call
        self.code = code
        self.name = name


def open_library(ffi: Any, names: Sequence[str], variable: str, backend: str) -> Any:
    """The first of these libraries that can be opened; a file named by the environment variable stands alone."""
    chosen = os.environ.get(variable)
    candidates = [chosen] if chosen else [*names, *_wheel_libraries(names)]
    for name in candidates:
        for part in _parts_beside(Path(name)):
            with contextlib.suppress(OSError):
                ffi.dlopen(str(part), os.RTLD_NOW | os.RTLD_NODELETE)
        try:
            return ffi.dlopen(name)
        except OSError:
            continue
    where = f" ({variable})" if chosen else f" ({variable} may name a file)"
    raise BackendUnavailableError(backend, f"{' or '.join(map(str, candidates[:3]))} cannot be opened{where}")


def _parts_beside(path: Path) -> list[Path]:
    """What NVRTC 13 opens by name when it first compiles, and does not find where its package put both."""
    if not path.is_absolute() or not path.name.startswith("libnvrtc."):
        return []
    return sorted(path.parent.glob("libnvrtc-builtins.so.*"))


def _wheel_libraries(names: Sequence[str]) -> list[str]:
    """Where the packages of NVIDIA's libraries put them."""
    return [
        str(path)
        for entry in sys.path
        if entry
        for name in names
        for path in sorted(Path(entry).glob(f"nvidia/*/lib/{name}"))
    ]


class Driver:
    """One vendor's driver, initialised, and one of its devices."""

    def __init__(self, vendor: Vendor, device_index: int = 0) -> None:
        self.vendor = vendor
        self.backend = vendor.backend
        self.ffi = cffi.FFI()
        self.ffi.cdef(vendor.cdef)
        self._lib = open_library(self.ffi, vendor.libraries, vendor.library_variable, vendor.backend)
        self._batch: Any = None
        self._context: Any = None
        self.device_index = device_index
        try:
            self._open()
        except GpuError as error:
            raise BackendUnavailableError(vendor.backend, str(error)) from error
        except AttributeError as error:
            raise BackendUnavailableError(vendor.backend, f"the library lacks a call: {error}") from error

    def _open(self) -> None:
        self._call("init", 0)
        self.device_count = self._int("device_count")
        self.version = self._int("driver_version")
        if not 0 <= self.device_index < self.device_count:
            raise BackendUnavailableError(
                self.backend, f"device {self.device_index}: expected one of {self.device_count} devices"
            )
        if self.vendor is not AMD:
            context = self.ffi.new("void **")
            self._raw("cuDevicePrimaryCtxRetain", context, self._device())
            self._context = context[0]
        self.use()
        self.arch = self._arch()
        self.device_name = self._device_name()

    # --- calls
    def _raw(self, symbol: str, *arguments: Any) -> None:
        code = int(getattr(self._lib, symbol)(*arguments))
        if code:
            raise GpuError(symbol, code, self._error_name(code))

    def _call(self, name: str, *arguments: Any) -> None:
        self._raw(self.vendor.calls[name], *arguments)

    def _int(self, name: str) -> int:
        out = self.ffi.new("int *")
        self._call(name, out)
        return int(out[0])

    def _handle(self, name: str, *arguments: Any) -> Any:
        out = self.ffi.new("void **")
        self._call(name, out, *arguments)
        return out[0]

    def _address(self, name: str, *arguments: Any) -> int:
        out = self.ffi.new("uint64_t *")
        self._call(name, out, *arguments)
        return int(out[0])

    def _error_name(self, code: int) -> str:
        if self.vendor is AMD:
            return str(self.ffi.string(self._lib.hipGetErrorName(code)).decode())
        out = self.ffi.new("const char **")
        if self._lib.cuGetErrorName(code, out) or not out[0]:
            return "unknown"
        return str(self.ffi.string(out[0]).decode())

    # --- the device
    def use(self) -> None:
        """Make this device current in the calling thread."""
        if self.vendor is AMD:
            self._raw("hipSetDevice", self.device_index)
        else:
            self._raw("cuCtxSetCurrent", self._context)

    def _device(self) -> int:
        out = self.ffi.new("int *")
        self._raw("cuDeviceGet", out, self.device_index)
        return int(out[0])

    def _arch(self) -> str:
        if self.vendor is AMD:
            # The struct's layout differs between versions; the architecture is the one text in it of this form.
            properties = self.ffi.new("char[]", _HIP_PROPERTIES_SIZE_BYTES)
            self._raw("hipGetDevicePropertiesR0600", properties, self.device_index)
            found = re.search(rb"(gfx[0-9a-f]{3,5})(:[a-z0-9:+-]*)?\0", bytes(self.ffi.buffer(properties)))
            if found is None:
                raise BackendUnavailableError(
                    self.backend, "the driver does not name the device's architecture"
                )
            return found[0][:-1].decode()
        major, minor = (self._attribute(number) for number in (_COMPUTE_MAJOR, _COMPUTE_MINOR))
        return f"sm_{major}{minor}"

    def _attribute(self, number: int) -> int:
        out = self.ffi.new("int *")
        self._raw("cuDeviceGetAttribute", out, number, self._device())
        return int(out[0])

    def _device_name(self) -> str:
        text = self.ffi.new("char[]", 256)
        device = self.device_index if self.vendor is AMD else self._device()
        self._call("device_name", text, 256, device)
        return str(self.ffi.string(text).decode(errors="replace"))

    # --- memory
    def alloc(self, size_bytes: int) -> int:
        """Device memory, until ``free``."""
        return self._address("alloc", size_bytes)

    def free(self, address: int) -> None:
        self._call("free", address)

    def register_host(self, address: int, size_bytes: int) -> int:
        """Pin host memory and map it into the device; its device address, which need not be the host's (AMD)."""
        host = self.ffi.cast("void *", address)
        self._call("host_register", host, size_bytes, HOST_REGISTER_PORTABLE_MAPPED)
        try:
            return self._address("host_pointer", host, 0)
        except GpuError:
            self._call("host_unregister", host)
            raise

    def mapped_host(self, address: int) -> int | None:
        """The device address of host memory that is pinned, by whomever; None where it is not."""
        try:
            return self._address("host_pointer", self.ffi.cast("void *", address), 0)
        except GpuError:
            return None

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``; before the memory is unmapped."""
        self._call("host_unregister", self.ffi.cast("void *", address))

    def allocation_of(self, address: int) -> tuple[int, int] | None:
        """(base, size) of the allocation that a device address lies in; None where there is none."""
        base, size = self.ffi.new("uint64_t *"), self.ffi.new("size_t *")
        symbol = self.vendor.calls["address_range"]
        if int(getattr(self._lib, symbol)(base, size, address)):
            return None
        return int(base[0]), int(size[0])

    def copy(self, to: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy on a stream; either side is device memory or registered host memory."""
        if self.vendor is AMD:
            self._raw("hipMemcpyAsync", to, source, size_bytes, HIP_COPY_KIND_BY_ADDRESS, stream)
        else:
            self._raw("cuMemcpyAsync", to, source, size_bytes, stream)

    def copy_batch(
        self,
        to: npt.NDArray[np.uint64],
        source: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: Any,
    ) -> None:
        """Many copies with few submissions; one by one where the driver has no batches."""
        batch = self._batch_entry()
        if batch is None:
            for one_to, one_from, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
                self.copy(one_to, one_from, size, stream)
            return
        failed = self.ffi.new("size_t *")
        for first in range(0, len(to), BATCH_COUNT_MAX):
            part = slice(first, first + BATCH_COUNT_MAX)
            lists = [np.ascontiguousarray(each[part], np.uint64) for each in (to, source, sizes)]
            kinds = ("uint64_t[]", "uint64_t[]", "size_t[]")
            pointers = [self.ffi.from_buffer(kind, each) for kind, each in zip(kinds, lists, strict=True)]
            null = self.ffi.NULL
            code = int(batch(*pointers, len(lists[0]), null, null, 0, failed, stream))
            if code:
                detail = f"copy {first + int(failed[0])} of {len(to)}"
                raise GpuError("memcpy batch", code, self._error_name(code), detail)

    @property
    def has_dma_buf(self) -> bool:
        """Whether memory of this device can be exported as dma-buf, by the driver's word; nothing here does yet."""
        try:
            getattr(self._lib, _EXPORT_CALLS[self.backend])
            # HIP has no attribute for it: where there is the call, it is what tells.
            return self.vendor is AMD or self._attribute(_DMA_BUF_SUPPORTED) == 1
        except (AttributeError, GpuError):
            return False

    @property
    def has_batches(self) -> bool:
        return self._batch_entry() is not None

    def _batch_entry(self) -> Any:
        if self._batch is None:
            self._batch = self._find_batch() or False
        return self._batch or None

    def _find_batch(self) -> Any:
        if self.vendor is AMD:
            return getattr(self._lib, "hipMemcpyBatchAsync", None)
        out, status = self.ffi.new("void **"), self.ffi.new("int *")
        try:
            self._raw("cuGetProcAddress_v2", b"cuMemcpyBatchAsync", out, CUDA_BATCH_VERSION, 0, status)
        except (AttributeError, GpuError):
            return None
        signature = (
            "int (*)(uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, size_t *, void *)"
        )
        return self.ffi.cast(signature, out[0]) if out[0] else None

    # --- code, streams, events
    def load_module(self, image: bytes) -> Any:
        return self._handle("module_load", self.ffi.from_buffer(image))

    def unload_module(self, module: Any) -> None:
        self._call("module_unload", module)

    def function(self, module: Any, name: str) -> Any:
        return self._handle("module_function", module, name.encode())

    def launch(self, function: Any, workgroups: int, threads: int, parameters: bytes, stream: Any) -> None:
        """Launch with one struct as the only parameter, passed by value."""
        value = self.ffi.from_buffer(parameters)
        params = self.ffi.new("void *[]", [self.ffi.cast("void *", value)])
        self._call("launch", function, workgroups, 1, 1, threads, 1, 1, 0, stream, params, self.ffi.NULL)

    def make_stream(self) -> Any:
        """A stream of the highest priority that does not wait for the default stream."""
        least, greatest = self.ffi.new("int *"), self.ffi.new("int *")
        self._call("priority_range", least, greatest)
        return self._handle("stream_create", STREAM_NON_BLOCKING, int(greatest[0]))

    def end_stream(self, stream: Any) -> None:
        self._call("stream_destroy", stream)

    def stream_from(self, number: int) -> Any:
        """A stream of someone else, by its address (torch's ``cuda_stream``)."""
        return self.ffi.cast("void *", number)

    def make_event(self) -> Any:
        return self._handle("event_create", EVENT_WITHOUT_TIMING)

    def end_event(self, event: Any) -> None:
        self._call("event_destroy", event)

    def record(self, event: Any, stream: Any) -> None:
        self._call("event_record", event, stream)

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Let later work of the stream wait for the event; the host does not wait."""
        self._call("stream_wait", stream, event, 0)

    def is_over(self, event: Any) -> bool:
        """Whether what was recorded before the event is done; raises GpuError when the device failed."""
        symbol = self.vendor.calls["event_query"]
        code = int(getattr(self._lib, symbol)(event))
        if code in (0, NOT_READY):
            return code == 0
        raise GpuError(symbol, code, self._error_name(code))
