"""Which way bytes should cross the link on this device: measured once, kept on disk, overruled by the operator.

Each route moves the same pages of a synthetic layout both ways, for runs of several sizes; the fastest is taken.
Not here: the routes (``kvdev_kernels.gpu``).
Threads: one caller at a time; ``measure_routes`` blocks for some seconds at most and uses the device meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.clock import SYSTEM_CLOCK, Clock
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev_kernels.driver import Driver
from kvdev_kernels.gpu import GpuKernels, Route
from kvdev_kernels.gpu_source import source_digest
from kvdev_kernels.layout import PagedLayout

ROUTE_VARIABLE = "KVDEV_GPU_ROUTE"
"""``direct``, ``bounce`` or ``copies``: taken for every move instead of what was measured."""
RUN_SIZES_BYTES = (1024, 8192, 65536)
PAGE_SIZE_BYTES = 1 << 20
PAGE_COUNT = 16
ROUND_COUNT = 5
"""Of each measurement; the median counts."""
_VERSION = 1

Measure = Callable[[GpuKernels, Route, bool, int], float]
"""(kernels, route, is_pack, run size) -> bytes per second"""


@dataclass(frozen=True)
class Rate:
    """One measurement."""

    is_pack: bool
    run_size_bytes: int
    route: Route
    bytes_per_s: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on one device."""

    rates: tuple[Rate, ...]

    def route(self, *, is_pack: bool, run_size_bytes: int) -> Route:
        """The fastest route for runs of about this size: of the largest measured size that is not larger."""
        sizes = sorted({rate.run_size_bytes for rate in self.rates})
        size = max((each for each in sizes if each <= run_size_bytes), default=sizes[0])
        found = [rate for rate in self.rates if rate.is_pack == is_pack and rate.run_size_bytes == size]
        return max(found, key=lambda rate: rate.bytes_per_s).route


def route_from_environment() -> Route | None:
    """The operator's choice; UsageError when it is no route."""
    text = os.environ.get(ROUTE_VARIABLE)
    if not text:
        return None
    try:
        return Route(text)
    except ValueError:
        names = ", ".join(route.value for route in Route)
        raise UsageError(f"{ROUTE_VARIABLE}: expected one of {names}, got {text!r}") from None


def measure_routes(kernels: GpuKernels, *, measure: Measure | None = None) -> Calibration:
    """Measure every route on this device."""
    take = measure or _Bench(kernels, SYSTEM_CLOCK)
    try:
        return Calibration(
            tuple(
                Rate(is_pack, size, route, take(kernels, route, is_pack, size))
                for is_pack in (True, False)
                for size in RUN_SIZES_BYTES
                for route in (Route.BOUNCE, Route.DIRECT, Route.COPIES)
            )
        )
    finally:
        if isinstance(take, _Bench):
            take.close()


class _DeviceTensor:
    """Device memory of the calibration's own, with torch's tensor methods."""

    dtype = "uint8"

    def __init__(self, driver: Driver, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.device = _Device(driver.device_index)
        self.address = driver.alloc(int(np.prod(shape)))

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[axis + 1 :])) for axis in range(len(self.shape)))

    def element_size(self) -> int:
        return 1


class _Device:
    type = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class _Bench:
    """Pages in registered staging and blocks in device memory, moved to and fro."""

    def __init__(self, kernels: GpuKernels, clock: Clock) -> None:
        self.kernels, self.clock = kernels, clock
        self.staging = np.frombuffer(mmap.mmap(-1, PAGE_COUNT * PAGE_SIZE_BYTES), np.uint8)
        self.staging[:] = 0  # populated, so that pinning does not count
        self.addresses = np.arange(PAGE_COUNT, dtype=np.uint64) * np.uint64(PAGE_SIZE_BYTES)
        self.addresses += np.uint64(self.staging.ctypes.data)
        kernels.register(self.staging.ctypes.data, self.staging.nbytes)
        self.layouts: dict[int, tuple[PagedLayout, list[_DeviceTensor]]] = {}

    def __call__(self, kernels: GpuKernels, route: Route, is_pack: bool, run_size_bytes: int) -> float:
        layout = self._layout(run_size_bytes)
        # Blocks in an order that no copy can merge.
        table = np.random.default_rng(1).permutation(PAGE_COUNT * layout.blocks_per_page)
        submit = kernels.submit_pack if is_pack else kernels.submit_unpack
        rates = []
        for _ in range(ROUND_COUNT):
            begin_ns = self.clock.monotonic_ns()
            submit(layout, table, self.addresses, route=route, has_sum=False).wait()
            elapsed_ns = max(1, self.clock.monotonic_ns() - begin_ns)
            rates.append(self.staging.nbytes * 1e9 / elapsed_ns)
        return statistics.median(rates)

    def _layout(self, run_size_bytes: int) -> PagedLayout:
        if run_size_bytes not in self.layouts:
            layers = 8
            geometry = Geometry(
                model_id="calibration",
                layer_count=layers,
                kv_head_count=1,
                head_size=run_size_bytes,
                dtype="uint8",
                tokens_per_page=PAGE_SIZE_BYTES // layers // run_size_bytes,
                attention="mla",
            )
            blocks = PAGE_COUNT * geometry.tokens_per_page
            driver = self.kernels.driver
            tensors = [_DeviceTensor(driver, (blocks, 1, run_size_bytes)) for _ in range(layers)]
            self.layouts[run_size_bytes] = PagedLayout.from_vllm_mla(geometry, tensors), tensors
        return self.layouts[run_size_bytes][0]

    def close(self) -> None:
        for _, tensors in self.layouts.values():
            for tensor in tensors:
                self.kernels.driver.free(tensor.address)
        self.kernels.unregister(self.staging.ctypes.data)


def calibration_path(driver: Driver, folder: Path, workgroup_limit: int) -> Path:
    """The file of this device, driver, source and number of workgroups."""
    parts = [
        driver.backend,
        driver.device_name,
        driver.arch,
        driver.version,
        source_digest(),
        workgroup_limit,
    ]
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()
    return folder / f"routes-{digest}.json"


def load_calibration(path: Path) -> Calibration | None:
    """What was saved; None when there is nothing, or nothing whole."""
    try:
        document: Any = json.loads(path.read_text())
        if document["version"] != _VERSION:
            return None
        rates = tuple(
            Rate(
                bool(row["is_pack"]),
                int(row["run_size_bytes"]),
                Route(row["route"]),
                float(row["bytes_per_s"]),
            )
            for row in document["rates"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    expected = {
        (is_pack, size, route) for is_pack in (True, False) for size in RUN_SIZES_BYTES for route in Route
    }
    is_whole = {(rate.is_pack, rate.run_size_bytes, rate.route) for rate in rates} == expected
    return Calibration(rates) if is_whole else None


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write beside and rename."""
    rows = [
        {
            "is_pack": rate.is_pack,
            "run_size_bytes": rate.run_size_bytes,
            "route": rate.route.value,
            "bytes_per_s": rate.bytes_per_s,
        }
        for rate in calibration.rates
    ]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    with os.fdopen(handle, "w") as file:
        json.dump({"version": _VERSION, "rates": rows}, file)
    Path(name).replace(path)


def calibrate(kernels: GpuKernels, folder: Path | None, *, measure: Measure | None = None) -> Calibration:
    """The saved calibration of this device, or a new one, saved; the kernels use it from now on.

    KVDEV_GPU_ROUTE is taken instead of what was measured; a move's own argument goes before both.
    """
    named = route_from_environment()
    path = calibration_path(kernels.driver, folder, kernels.workgroup_limit) if folder is not None else None
    found = load_calibration(path) if path is not None else None
    if found is None:
        found = measure_routes(kernels, measure=measure)
        if path is not None:
            save_calibration(path, found)
    kernels.choose_route = lambda is_pack, size: named or found.route(is_pack=is_pack, run_size_bytes=size)
    return found
