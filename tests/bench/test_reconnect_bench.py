"""The benchmark of waiting runs at toy size: attempts are counted, and what they held is given back between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_reconnect_bench_runs_at_toy_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    toy = ["--controllers", "3", "--delay", "0.2", "--seconds", "1", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "reconnect.py"), *toy],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(result.read_text())
    assert report["attempts"] >= 3
    assert report["most_descriptors"] <= 1 + 3
