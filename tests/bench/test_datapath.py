"""The data path's benchmark runs at toy size: every figure is there, and what was read back is what was put."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_datapath_runs_at_toy_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "datapath.py"), "--toy", "--json", str(result), "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert {"cpu", "kernel", "python", "numpy", "kvdev", "seed"} <= set(report["machine"])
    assert report["machine"]["seed"] == 5
    assert {(cell["what"].split()[0], cell["direction"]) for cell in report["cells"]} == {
        ("block", "read"),
        ("block", "write"),
        ("page", "read"),
        ("page", "write"),
    }
    assert all(cell["gb_per_s"] > 0 and cell["lat_us_p50"] <= cell["lat_us_p99"] for cell in report["cells"])
    assert {pair["direction"] for pair in report["pairs"]} == {"read", "write"}
    assert all(pair["ratio"] > 0 for pair in report["pairs"])
    # The bytes follow from the keys alone: the same hash on every machine and for every seed.
    assert report["integrity"] == {
        "small": "6ef73b616eeb127f99c40cbf235f8a1897780bf4ea35a4711868dee85ae26c61"
    }
    assert report["integrity"]["small"][:16] in done.stdout
