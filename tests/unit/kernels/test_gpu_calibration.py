"""The calibration of routes: measured by moving pages, kept per device, overruled by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.errors import UsageError
from kvdev_kernels import gpu_calibration
from kvdev_kernels.driver import Driver
from kvdev_kernels.driver_calls import AMD
from kvdev_kernels.gpu import GpuKernels, Route
from kvdev_kernels.gpu_calibration import (
    Calibration,
    Rate,
    calibrate,
    calibration_path,
    load_calibration,
    measure_routes,
    route_from_environment,
)
from tests.unit.tools.test_cli_json import call, documented, keys_of


def measured(kernels: GpuKernels, route: Route, is_pack: bool, run_size_bytes: int) -> float:
    """Copies win for long runs, direct for packing short ones, the bounce otherwise."""
    if run_size_bytes == 65536:
        return {Route.COPIES: 3.0}.get(route, 1.0)
    return {Route.DIRECT: 2.0 if is_pack else 0.5}.get(route, 1.0)


def test_route_when_measured_then_the_fastest_of_the_size_below(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = GpuKernels(Driver(AMD))
    assert kernels.choose_route(True, 4096) is Route.BOUNCE
    found = calibrate(kernels, tmp_path, measure=measured)
    for size, pack, unpack in (
        (16, Route.DIRECT, Route.BOUNCE),
        (1024, Route.DIRECT, Route.BOUNCE),
        (65535, Route.DIRECT, Route.BOUNCE),
        (65536, Route.COPIES, Route.COPIES),
        (1 << 30, Route.COPIES, Route.COPIES),
    ):
        assert found.route(is_pack=True, run_size_bytes=size) is pack is kernels.choose_route(True, size)
        assert found.route(is_pack=False, run_size_bytes=size) is unpack is kernels.choose_route(False, size)
    monkeypatch.setenv("KVDEV_GPU_ROUTE", "direct")
    assert calibrate(kernels, tmp_path, measure=measured) == found
    assert kernels.choose_route(False, 65536) is Route.DIRECT
    kernels.close()


def test_calibration_when_saved_then_not_measured_again_and_damage_is_repaired(
    fake: Any, tmp_path: Path
) -> None:
    kernels = GpuKernels(Driver(AMD))
    calls: list[Route] = []

    def counted(kernels: GpuKernels, route: Route, is_pack: bool, size: int) -> float:
        calls.append(route)
        return measured(kernels, route, is_pack, size)

    first = calibrate(kernels, tmp_path / "new", measure=counted)
    assert len(calls) == 2 * 3 * 3
    assert calibrate(kernels, tmp_path / "new", measure=counted) == first and len(calls) == 18
    (path,) = (tmp_path / "new").iterdir()
    text = path.read_text()
    for damaged in ("", text[:-5], "[]", text.replace("bounce", "teleport"), text.replace("1024", "1000")):
        path.write_text(damaged)
        assert load_calibration(path) is None
    assert calibrate(kernels, tmp_path / "new", measure=counted) == first and len(calls) == 36
    assert path.read_text() == text
    other = calibration_path(kernels.driver, tmp_path, kernels.workgroup_limit + 1)
    assert other.name != path.name
    kernels.close()


def test_measurement_when_taken_then_every_route_moves_and_all_is_given_back(
    fake: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    # A small size: the fake driver runs kernels a thread at a time.
    for name, value in (
        ("PAGE_SIZE_BYTES", 65536 * 8),
        ("PAGE_COUNT", 1),
        ("ROUND_COUNT", 1),
        ("RUN_SIZES_BYTES", (65536,)),
    ):
        monkeypatch.setattr(gpu_calibration, name, value)
    kernels = GpuKernels(Driver(AMD))
    measure_routes(kernels)  # slots keep what they have for later moves
    live = fake.fake_live()
    found = measure_routes(kernels)
    assert fake.fake_live() == live
    assert [(rate.is_pack, rate.route) for rate in found.rates] == [
        (is_pack, route) for is_pack in (True, False) for route in (Route.BOUNCE, Route.DIRECT, Route.COPIES)
    ]
    assert all(rate.bytes_per_s > 0 for rate in found.rates)
    kernels.close()


def test_route_when_named_by_the_environment_then_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert route_from_environment() is None
    monkeypatch.setenv("KVDEV_GPU_ROUTE", "copies")
    assert route_from_environment() is Route.COPIES
    monkeypatch.setenv("KVDEV_GPU_ROUTE", "fast")
    with pytest.raises(
        UsageError, match="KVDEV_GPU_ROUTE: expected one of direct, bounce, copies, got 'fast'"
    ):
        route_from_environment()


def test_calibration_when_rates_tie_then_the_bounce() -> None:
    rates = tuple(Rate(True, 1024, route, 1.0) for route in (Route.BOUNCE, Route.DIRECT, Route.COPIES))
    assert Calibration(rates).route(is_pack=True, run_size_bytes=1) is Route.BOUNCE


def test_kvdev_kernels_when_measured_then_its_table_has_the_documented_keys(
    fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("PAGE_SIZE_BYTES", 65536 * 8),
        ("PAGE_COUNT", 1),
        ("ROUND_COUNT", 1),
        ("RUN_SIZES_BYTES", (65536,)),
    ):
        monkeypatch.setattr(gpu_calibration, name, value)
    assert call(capsys, "kernels")["routes"] == []
    document = call(capsys, "kernels", "--calibrate")
    assert keys_of(document) == documented("kernels")
    assert len(document["routes"]) == 3 * 2 * 3  # devices, ways, routes
    assert sum(row["is_chosen"] for row in document["routes"]) == 3 * 2
    assert call(capsys, "kernels")["routes"] == document["routes"]
