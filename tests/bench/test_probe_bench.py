"""The benchmark of the probe beside fio runs at toy size: every figure is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdev.block.file import choose_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio here: apt-get install fio")
def test_probe_bench_runs_at_toy_size(tmp_path: Path) -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "bench" / "probe.py"),
            "--toy",
            "--json",
            str(result),
            "--folder",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert [(cell["block_size_bytes"], cell["depth"]) for cell in report["cells"]] == [
        (4096, 1),
        (4096, 4),
        (1 << 20, 1),
        (1 << 20, 4),
    ]
    for cell in report["cells"]:
        assert cell["iops"] > 0 and cell["clat_ns_p99"] >= cell["clat_ns_p50"] > 0
        assert cell["ratio"] == cell["iops"] / cell["fio_iops"]
    assert "read back and verified" in done.stdout
