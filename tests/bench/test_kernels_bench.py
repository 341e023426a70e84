"""The kernel benchmark still runs, and its own comparison of the moved pages holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "kernels.py"


def test_kernel_bench_when_toy_then_every_shape_is_measured_and_checked() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCH), "--toy", "--json", "--threads", "1,2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    report = json.loads(run.stdout)
    assert [shape["threads"] for shape in report["shapes"]] == [1, 2] * 6
    with_targets = {shape["run_size_bytes"] for shape in report["shapes"] if shape["target"]}
    assert with_targets == {32768, 9216, 2048}
    for shape in report["shapes"]:
        assert len(shape["pages_hash"]) == 16
        assert {"streaming copy (ceiling)", "plain gather (numpy take)"} <= set(shape["rows"])
        assert shape["rows"]["pack + CRC32C"]["gb_per_s_best"] > 0
