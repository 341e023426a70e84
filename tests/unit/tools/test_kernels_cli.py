"""``kvdev kernels``: documented keys, and reasons for what this machine lacks."""

from __future__ import annotations

import pytest

from kvdev_kernels.driver_calls import VENDORS
from kvdev_tools.main import run
from tests.unit.tools.test_cli_json import call, documented, keys_of


@pytest.fixture(autouse=True)
def no_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor in VENDORS:
        monkeypatch.setenv(vendor.library_variable, "/nonexistent/driver.so")


def test_kernels_when_there_is_no_driver_then_documented_keys_and_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = call(capsys, "kernels")
    measured = {key for key in documented("kernels") if key.startswith("routes[]")}
    assert keys_of(document) == documented("kernels") - measured and document["routes"] == []
    found = {each["backend"]: each for each in document["backends"]}
    assert found["numpy"]["is_available"] and not found["numpy"]["reason"]
    for vendor in VENDORS:
        row = found[vendor.backend]
        assert not row["is_available"] and "/nonexistent/driver.so cannot be opened" in row["reason"]
        assert vendor.library_variable in row["reason"]
    assert document["has_run_on_gpu"] is False


def test_kernels_when_printed_then_a_line_for_each_and_what_was_never_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["cpu-numba", "numpy", "hip", "cuda"]
    assert "emulated hardware only" in lines[-1]
