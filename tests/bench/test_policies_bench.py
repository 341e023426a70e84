"""The comparison of eviction policies runs at toy size, and gives the same rates every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_policies_bench_runs_at_toy_size_and_repeats_itself() -> None:
    command = [sys.executable, str(ROOT / "bench" / "policies.py"), "--requests", "200", "--seed", "5"]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    rows = [line.split() for line in outputs[0].splitlines()[-3:]]
    assert all(0 < float(rate) < 1 for row in rows for rate in row[1:])
