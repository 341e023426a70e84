"""What the probe's tests share: job files, fio where it is installed, and files to probe."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

JOBS = Path(__file__).parent / "jobs"
FIO = shutil.which("fio")
WAIT_S = 120.0


def job_files() -> list[Path]:
    return sorted(JOBS.glob("*.fio"))


def is_refused(path: Path) -> bool:
    return "-bad-" in path.name or path.name == "28-outside.fio"


def run_fio(*arguments: str, cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    assert FIO is not None
    return subprocess.run(
        [FIO, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.fixture
def probe_file(tmp_path: Path) -> Path:
    """16 MiB of bytes from a fixed seed."""
    path = tmp_path / "device.img"
    np.random.default_rng(1).integers(0, 256, 16 << 20, dtype=np.uint8).tofile(path)
    return path
