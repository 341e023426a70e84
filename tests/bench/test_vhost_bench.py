"""The vhost-user benchmark runs at toy size: every figure is there, and what was read is what the file holds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    shutil.which("qemu-storage-daemon") is None or shutil.which("fio") is None,
    reason="no qemu-storage-daemon or fio here: apt-get install qemu-system-common fio",
)
def test_vhost_bench_runs_at_toy_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--toy", "--json", str(result), "--seed", "5", "--aio", "threads", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "vhost.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert report["machine"]["seed"] == 5
    assert [(cell["op_size_bytes"], cell["depth"]) for cell in report["cells"]] == [(131072, 1), (131072, 4)]
    for cell in report["cells"]:
        assert cell["ops_per_s"] > 0 and cell["fio_ops_per_s"] > 0 and cell["lat_us_mean"] > 0
        assert cell["is_daemon_the_limit"] == (cell["daemon_share"] >= 0.95)
    # The file follows from the seed alone.
    content = np.random.default_rng(5).bytes(16 << 20)
    assert report["integrity"] == hashlib.sha256(content).hexdigest()
    assert report["integrity"][:16] in done.stdout


@pytest.mark.skipif(
    shutil.which("qemu-storage-daemon") is None,
    reason="no qemu-storage-daemon here: apt-get install qemu-system-common",
)
def test_vhost_bench_compares_rings_on_a_running_back_end(tmp_path: Path) -> None:
    script = ROOT / "tests" / "interop" / "lab" / "qsd.sh"
    socket, file, result = tmp_path / "s", tmp_path / "disk", tmp_path / "result.json"
    environment = {**os.environ, "QUEUES": "1", "POLL_NS": "1000"}
    subprocess.run(
        ["sh", str(script), str(socket), str(file), "16"], env=environment, check=True, capture_output=True
    )
    try:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "bench" / "vhost.py"),
                "--toy",
                "--json",
                str(result),
                "--socket",
                str(socket),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        subprocess.run(["sh", str(script), "stop", str(socket)], check=True)
    assert done.returncode == 0, done.stderr
    rings = json.loads(result.read_text())["rings"]
    assert rings["ops_per_s"] > 0 and rings["plain_ops_per_s"] > 0
    assert rings["ratio"] == rings["ops_per_s"] / rings["plain_ops_per_s"]
