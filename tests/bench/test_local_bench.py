"""The benchmark of file devices runs at toy size: every figure is there, and what was read is what the file holds."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.file import choose_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio here: apt-get install fio")
def test_local_bench_runs_at_toy_size(tmp_path: Path) -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)
    result = tmp_path / "result.json"
    arguments = ["--toy", "--json", str(result), "--seed", "5", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "local.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert report["machine"]["seed"] == 5
    shapes = [(cell["op_size_bytes"], cell["depth"]) for cell in report["cells"]]
    assert shapes == [(4096, 1), (4096, 4), (131072, 1), (131072, 4)]
    for cell in report["cells"]:
        for who in ("", "fio_", "threads_", "huge_"):
            assert cell[f"{who}ops_per_s"] > 0 and cell[f"{who}lat_us_mean"] > 0
        assert cell["ratio"] == cell["ops_per_s"] / cell["fio_ops_per_s"]
    content = np.random.default_rng(5).bytes(16 << 20)
    assert report["integrity"] == hashlib.sha256(content).hexdigest()
    assert report["integrity"][:16] in done.stdout
