"""How near the probe is to fio: the same job file through fio's io_uring engine and through ``kvdev probe``, in turn.

Run alone on the machine: ``.venv/bin/python bench/probe.py``. Random reads of one file, by default from the page cache
(there the tools are measured, not a drive), with registered files and memory on both sides. Rounds alternate, ratios
are of the medians; percentiles are those of completion latency. Excluded: start and filling. Ends with a verified
write of the probe, checked by reading.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.units import KIB, MIB, format_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine

TIMEOUT_S = 120.0
PROBE = [sys.executable, "-m", "kvdev_tools.main", "probe"]
PERCENTILES = ("50.000000", "99.000000")


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    file_size_bytes: int
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: float
    round_count: int


FULL = Scale(256 * MIB, (4 * KIB, 64 * KIB, MIB), (1, 4, 16, 64), seconds=1.0, round_count=3)
TOY = Scale(4 * MIB, (4 * KIB, MIB), (1, 4), seconds=0.1, round_count=1)


@dataclass(frozen=True)
class Cell:
    """One shape of job; ratios are the probe's figure to fio's."""

    block_size_bytes: int
    depth: int
    iops: float
    fio_iops: float
    ratio: float
    clat_ns_p50: float
    fio_clat_ns_p50: float
    clat_ns_p99: float
    fio_clat_ns_p99: float


def job_text(path: Path, *, size: int, depth: int, scale: Scale, is_direct: bool) -> str:
    return (
        f"[global]\nioengine=io_uring\nthread\nfilename={path}\nsize={scale.file_size_bytes}\ninvalidate=0\n"
        f"fixedbufs=1\nregisterfiles=1\nnorandommap\ntime_based\nruntime={int(scale.seconds * 1000)}ms\n"
        f"direct={int(is_direct)}\n[read]\nrw=randread\nbs={size}\niodepth={depth}\n"
    )


def run_tool(tool: list[str], job: Path) -> tuple[float, float, float]:
    """IOPS, and the 50th and 99th percentile of clat."""
    done = subprocess.run(
        [*tool, "--output-format=json", str(job)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    if done.returncode:
        raise SystemExit(f"bench: {tool[0]}: {done.stderr.strip() or done.stdout.strip()}")
    read: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    p50, p99 = (float(read["clat_ns"]["percentile"][each]) for each in PERCENTILES)
    return float(read["iops"]), p50, p99


def measure(folder: Path, path: Path, *, scale: Scale, is_direct: bool) -> list[Cell]:
    cells = []
    for size in scale.sizes:
        for depth in scale.depths:
            job = folder / "job.fio"
            job.write_text(job_text(path, size=size, depth=depth, scale=scale, is_direct=is_direct))
            rounds = [(run_tool(["fio"], job), run_tool(PROBE, job)) for _ in range(scale.round_count)]
            fio, own = (
                [statistics.median(each[who][i] for each in rounds) for i in range(3)] for who in (0, 1)
            )
            cells.append(Cell(size, depth, own[0], fio[0], own[0] / fio[0], own[1], fio[1], own[2], fio[2]))
            print(
                f"{format_size(size):>8}  depth {depth:3d}  {own[0]:10.0f} IOPS, fio {fio[0]:10.0f}  "
                f"ratio {own[0] / fio[0]:.3f}  clat p50 {own[1]:9.0f} ns ({own[1] / fio[1]:.2f})  "
                f"p99 {own[2]:9.0f} ns ({own[2] / fio[2]:.2f})",
                flush=True,
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a small run that shows it works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--direct", action="store_true", help="past the page cache")
    parser.add_argument("--folder", type=Path, help="where the file is made  [default: the temporary folder]")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("bench: no fio here: apt-get install fio")
    scale = TOY if options.toy else FULL
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        path = folder / "device.img"
        path.write_bytes(np.random.default_rng(options.seed).bytes(scale.file_size_bytes))
        cells = measure(folder, path, scale=scale, is_direct=options.direct)
        check = [
            *PROBE,
            "--name=check",
            "--rw=randwrite",
            "--bs=64k",
            f"--filename={path}",
            f"--destroy={path}",
        ]
        check += [f"--size={min(scale.file_size_bytes, 64 * MIB)}", "--verify=crc32c", "--verify_fatal=1"]
        verified = subprocess.run(
            check,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        if verified.returncode:
            raise SystemExit(f"bench: what was written does not verify: {verified.stderr.strip()}")
    print("integrity: what the probe wrote was read back and verified")
    report = {
        "machine": machine(options.seed),
        "is_direct": options.direct,
        "cells": [asdict(each) for each in cells],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
