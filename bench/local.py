"""How fast file devices are: our io_uring engine in turn with fio's on the same file, and our threads beside them.

Run alone on the machine: ``.venv/bin/python bench/local.py``. All read every place of one file in random order, again
and again, past the page cache, with registered memory and files; rounds alternate, the ratio is of the medians. fio and
we have payload memory in pages of 4 KiB; "huge" is an arena as it comes, in huge pages, which fio 3.33 can have only
where some are reserved. Excluded: opening, and filling the file. fio runs as a thread of one process, so that it has
this process's priority. Ends with the file's bytes, read through the engine, compared with the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.block.device import execute, transfer_ios
from kvdev.block.file import EngineChoice, FileDevice, FileOptions
from kvdev.clock import Deadline
from kvdev.native.file import IO_URING, THREADS, FileEngine
from kvdev.native.io import IO_DTYPE, OPCODE_READ, IoArray
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.staging.mapping import BACKING_AUTO
from kvdev.units import KIB, MIB, format_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine

BATCH_COUNT = 4096
"""Commands that Python hands over at once, so that its turns do not count."""
BACKING = "4KiB"
HUGE = "huge"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    file_size_bytes: int
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: float
    round_count: int


FULL = Scale(1024 * MIB, (4 * KIB, 128 * KIB, MIB), (1, 4, 8, 16, 32), seconds=0.7, round_count=3)
TOY = Scale(16 * MIB, (4 * KIB, 128 * KIB), (1, 4), seconds=0.2, round_count=1)


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    ops_per_s: float
    lat_us_mean: float
    """From giving the operation to the engine until its completion was taken."""
    cpu_us_per_op: float
    calls_per_op: float = 0.0
    """System calls that submitted or asked for completions."""


class Reader:
    """A file device with so many operations in flight; the core keeps them there, whatever Python does."""

    def __init__(
        self, file: Path, *, engine: str, depth: int, op_size_bytes: int, seed: int, backing: str = BACKING
    ) -> None:
        self.depth = depth
        self.arena = Arena(max(2 * MIB, depth * op_size_bytes), backing=backing)
        self.queue = HostQueue(capacity_count=4 * BATCH_COUNT)
        self.engine = FileEngine(engine, thread_count=depth)
        self.engine.add_region(self.arena.address, self.arena.size_bytes, keep=self.arena.bytes())
        self.device = FileDevice(
            file,
            options=FileOptions(engine=engine, depth=depth),
            queue=self.queue,
            choice=EngineChoice(self.engine),
        )
        self._ios = self._make_ios(op_size_bytes, np.random.default_rng(seed))
        # Often enough to end in time: some 64 MiB of data.
        self._wanted = max(1, min(BATCH_COUNT // 4, 64 * MIB // op_size_bytes))

    def _make_ios(self, size: int, rng: np.random.Generator) -> IoArray:
        block = self.device.block_size_bytes
        place_count = self.device.size_bytes // size
        # Whole rounds over the file that are whole quarters of a batch as well.
        count = np.lcm(place_count, BATCH_COUNT // 4)
        ios = np.zeros(count, dtype=IO_DTYPE)
        ios["opcode"], ios["device_index"] = OPCODE_READ, self.device.device_index
        ios["slba"] = np.tile(rng.permutation(place_count), count // place_count) * (size // block)
        ios["lba_count"], ios["byte_count"] = size // block, size
        slots = np.arange(count) % (self.arena.size_bytes // size)
        ios["buf_addr"] = np.uint64(self.arena.address) + slots.astype(np.uint64) * np.uint64(size)
        return ios

    def measure(self, seconds: float) -> Sample:
        deadline = Deadline.after(TIMEOUT_S)
        count, waited_ns, at = 0, 0.0, 0
        before = self.engine.info
        started, cpu_started = time.perf_counter(), time.process_time()  # noqa: TID251
        while time.perf_counter() - started < seconds:
            if self.depth == 1:
                self.queue.submit(self._ios[at : at + 1])
                at = (at + 1) % len(self._ios)
            else:
                while self.queue.outstanding_count < BATCH_COUNT // 2:
                    self.queue.submit(self._ios[at : at + BATCH_COUNT // 4])
                    at = (at + BATCH_COUNT // 4) % len(self._ios)
            done = self.queue.poll(min_count=1 if self.depth == 1 else self._wanted, deadline=deadline)
            assert not done["error"].any(), "a read failed"
            count += len(done)
            waited_ns += float((done["complete_ns"] - done["send_ns"]).sum())
        elapsed, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started  # noqa: TID251
        after = self.engine.info
        while self.queue.outstanding_count:
            self.queue.poll(min_count=1, deadline=deadline)
        calls = (after.calls - before.calls) / max(1, after.operations - before.operations)
        return Sample(count / elapsed, waited_ns / count / 1000, cpu_s * 1e6 / count, calls)

    def close(self) -> None:
        self.device.close()
        self.queue.close()
        self.engine.close()
        self.arena.close()


def measure_ours(
    file: Path,
    *,
    engine: str,
    op_size_bytes: int,
    depth: int,
    seconds: float,
    seed: int,
    backing: str = BACKING,
) -> Sample:
    reader = Reader(file, engine=engine, depth=depth, op_size_bytes=op_size_bytes, seed=seed, backing=backing)
    try:
        return reader.measure(seconds)
    finally:
        reader.close()


def measure_fio(file: Path, *, op_size_bytes: int, depth: int, seconds: float, seed: int) -> Sample:
    command = [
        "fio", "--name=read", f"--filename={file}", "--rw=randread", "--ioengine=io_uring", "--direct=1",
        "--fixedbufs=1", "--registerfiles=1", f"--bs={op_size_bytes}", f"--iodepth={depth}", "--thread",
        "--time_based", f"--runtime={seconds}", f"--randseed={seed}", "--output-format=json", "--size=100%",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    ops_per_s = float(job["read"]["iops"])
    cpu_s_per_s = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Sample(ops_per_s, float(job["read"]["lat_ns"]["mean"]) / 1000, cpu_s_per_s * 1e6 / ops_per_s)


def run_cell(file: Path, *, op_size_bytes: int, depth: int, scale: Scale, seed: int) -> dict[str, Any]:
    """All of them in turn; medians of the rounds."""
    samples: dict[str, list[Sample]] = {"fio": [], IO_URING: [], THREADS: [], HUGE: []}
    for round_index in range(scale.round_count):
        shape: dict[str, Any] = {"op_size_bytes": op_size_bytes, "depth": depth, "seconds": scale.seconds}
        shape["seed"] = seed + round_index
        samples["fio"].append(measure_fio(file, **shape))
        samples[IO_URING].append(measure_ours(file, engine=IO_URING, **shape))
        samples[THREADS].append(measure_ours(file, engine=THREADS, **shape))
        samples[HUGE].append(measure_ours(file, engine=IO_URING, backing=BACKING_AUTO, **shape))

    def median(who: str, what: str) -> float:
        return float(statistics.median(getattr(sample, what) for sample in samples[who]))

    cell: dict[str, Any] = {"op_size_bytes": op_size_bytes, "depth": depth}
    for who, prefix in (("fio", "fio_"), (IO_URING, ""), (THREADS, "threads_"), (HUGE, "huge_")):
        for what in ("ops_per_s", "lat_us_mean", "cpu_us_per_op"):
            cell[prefix + what] = median(who, what)
    cell["calls_per_op"] = median(IO_URING, "calls_per_op")
    cell["ratio"] = cell["ops_per_s"] / cell["fio_ops_per_s"]
    # Of rounds side by side: what else ran then slowed both.
    pairs = zip(samples[IO_URING], samples["fio"], strict=True)
    cell["pair_ratios"] = [ours.ops_per_s / theirs.ops_per_s for ours, theirs in pairs]
    cell["pair_ratio"] = statistics.median(cell["pair_ratios"])
    cell["threads_ratio"] = cell["threads_ops_per_s"] / cell["fio_ops_per_s"]
    cell["huge_ratio"] = cell["huge_ops_per_s"] / cell["fio_ops_per_s"]
    return cell


def integrity(file: Path) -> str:
    """Hash of the file as the engine reads it; an error unless it is the file's."""
    reader = Reader(file, engine=IO_URING, depth=16, op_size_bytes=MIB, seed=0)
    seen, wanted = hashlib.sha256(), hashlib.sha256(file.read_bytes())
    device, arena = reader.device, reader.arena
    view = arena.bytes()
    for start in range(0, device.size_bytes, arena.size_bytes):
        size = min(arena.size_bytes, device.size_bytes - start)
        ios = transfer_ios(device, OPCODE_READ, start // device.block_size_bytes, arena.address, size)
        execute(device, ios, Deadline.after(TIMEOUT_S))
        seen.update(view[:size].data)
    reader.close()
    if seen.digest() != wanted.digest():
        raise SystemExit("bench: the bytes read through the engine differ from the file's")
    return seen.hexdigest()


def line_of(cell: dict[str, Any]) -> str:
    return (
        f"{format_size(cell['op_size_bytes']):>8} depth {cell['depth']:>3}: {cell['ops_per_s']:>8.0f} op/s "
        f"{cell['ops_per_s'] * cell['op_size_bytes'] / 1e9:6.2f} GB/s, fio {cell['fio_ops_per_s']:>8.0f} op/s, "
        f"ratio {cell['ratio']:.2f} (pairs {min(cell['pair_ratios']):.2f} to {max(cell['pair_ratios']):.2f}), "
        f"latency {cell['lat_us_mean']:.0f} and {cell['fio_lat_us_mean']:.0f} us, "
        f"CPU {cell['cpu_us_per_op']:.1f} and {cell['fio_cpu_us_per_op']:.1f} us/op, "
        f"{cell['calls_per_op']:.2f} calls/op; "
        f"threads {cell['threads_ratio']:.2f}, huge {cell['huge_ratio']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a small run that shows it works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="real-time priority for everything measured: on a busy machine",
    )
    parser.add_argument("--folder", type=Path, help="where the file is made  [default: the temporary folder]")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("bench: no fio here: apt-get install fio")
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    scale = TOY if options.toy else FULL
    rng = np.random.default_rng(options.seed)
    report: dict[str, Any] = {"machine": machine(options.seed), "scale": asdict(scale), "cells": []}
    with tempfile.TemporaryDirectory(prefix="kvdev-bench-", dir=options.folder) as folder:
        file = Path(folder) / "disk.img"
        with file.open("wb") as out:
            for _ in range(scale.file_size_bytes // (16 * MIB)):
                out.write(rng.bytes(16 * MIB))
            os.fsync(out.fileno())
        for size in scale.sizes:
            for depth in scale.depths:
                cell = run_cell(file, op_size_bytes=size, depth=depth, scale=scale, seed=options.seed)
                report["cells"].append(cell)
                print(line_of(cell), flush=True)
        report["integrity"] = integrity(file)
        print(f"integrity {report['integrity'][:16]}: what was read is what the file holds")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
