"""The kernel benchmark still runs, and its own comparison of the moved pages holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "kernels.py"


def test_kernel_bench_when_toy_then_every_shape_is_measured_and_checked() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCH), "--toy", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    report = json.loads(run.stdout)
    assert len(report["shapes"]) == 6
    for shape in report["shapes"]:
        assert len(shape["pages_hash"]) == 16
        assert shape["rows"]["pack + CRC32C"]["gb_per_s_best"] > 0
