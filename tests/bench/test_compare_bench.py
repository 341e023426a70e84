"""The comparison of two checkouts runs at toy size, with this one on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "compare.py"


def test_compare_runs_at_toy_size_without_git(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv: make setup")
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), str(ROOT), "--toy", "--seed", "5", "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert report["trees"] == {"ours": "unknown", "other": "unknown"}
    assert report["pair_count"] == 2
    assert [(cell["direction"], cell["op_size_bytes"], cell["depth"]) for cell in report["cells"]] == [
        ("read", 4096, 4),
        ("write", 4096, 4),
        ("read", 131072, 2),
        ("write", 131072, 2),
    ]
    for cell in report["cells"]:
        low, high = cell["wall_ns_quartiles"]
        assert 0 < low <= cell["wall_ns_ratio"] <= high
        assert cell["wall_ns_ours"] > 0 and cell["host_cpu_ns_ours"] > 0
    assert report["integrity"][:16] in done.stdout


def test_compare_when_the_other_is_no_checkout_then_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), str(tmp_path), "--toy"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert f"run make -C {tmp_path} setup" in done.stderr
