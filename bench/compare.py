"""Two checkouts of kvdev on one machine, in turn: how much one's block commands cost next to the other's.

Run alone on the machine: ``.venv/bin/python bench/compare.py OTHER`` with another checkout that has its own ``.venv``
(``git worktree add OTHER COMMIT && make -C OTHER setup``). Each checkout has its own target (core 0) and its own
initiator (core 1), as its own code makes them; every cell is run by both, one right after the other, in an order that
turns. New processes are made several times, since where a process happens to have its memory moves its figures too.
A ratio over 1 means that this checkout is faster, or takes less CPU time. Compare a checkout with itself to see what
the machine's noise is. Ends with the bytes read back compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvdev
from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.native.io import IO_DTYPE, OPCODE_READ, OPCODE_WRITE, address_of
from kvdev.staging import Arena
from kvdev.units import KIB, MIB, format_size
from kvdev.uri import TcpUri
from kvdev_tools.connect import make_session
from kvdev_tools.rig import Rig

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:7a1c7c52-6d1e-4f0b-9f43-3f6f1d2b9c10"
CELL_TIMEOUT_S = 120.0
FLOOR = 0.97
"""What this checkout must reach next to the one before recovery was in it."""


@dataclass(frozen=True)
class Cell:
    direction: str
    op_size_bytes: int
    depth: int
    op_count: int


@dataclass(frozen=True)
class Scale:
    namespace_size_bytes: int
    arena_size_bytes: int
    cells: tuple[Cell, ...]
    process_count: int
    """Times that both sides are started anew."""
    round_count: int
    """Of all cells, with the same processes."""


def cells(counts: dict[tuple[int, int], int]) -> tuple[Cell, ...]:
    return tuple(
        Cell(direction, size, depth, count)
        for (size, depth), count in counts.items()
        for direction in ("read", "write")
    )


FULL = Scale(
    namespace_size_bytes=256 * MIB,
    arena_size_bytes=64 * MIB,
    cells=cells(
        {
            (4 * KIB, 1): 4096,
            (4 * KIB, 32): 16384,
            (16 * KIB, 16): 8192,
            (128 * KIB, 8): 3072,
            (128 * KIB, 32): 3072,
        }
    ),
    process_count=4,
    round_count=12,
)
TOY = Scale(
    namespace_size_bytes=8 * MIB,
    arena_size_bytes=4 * MIB,
    cells=cells({(4 * KIB, 4): 64, (128 * KIB, 2): 16}),
    process_count=1,
    round_count=2,
)


# --- one side: runs in the interpreter of the checkout that is measured --------------------------
# It uses what all checkouts have in common.


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, to the nanosecond where getrusage of another one has ticks."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


class Side:
    """A target and an open namespace on it."""

    def __init__(self, scale: Scale, seed: int, cores: tuple[int, int], stack: contextlib.ExitStack) -> None:
        rig = stack.enter_context(Rig())
        os.sched_setaffinity(0, {cores[0]})
        rig.start()
        os.sched_setaffinity(0, {cores[1]})
        subsystem = rig.provision(
            host_nqn=HOST_NQN, namespace_count=1, namespace_size_bytes=scale.namespace_size_bytes
        )
        session = stack.enter_context(make_session(HOST_NQN, None, timeout_s=30.0))
        uri = TcpUri(subsystem.addresses, subsystem.subnqn, nsid=1)
        self.device: BlockDevice = session.open_device(uri)
        arena = stack.enter_context(Arena(scale.arena_size_bytes))
        self.memory = arena.lease(1, scale.arena_size_bytes).array[0]
        assert rig.pid is not None
        self.pids = (os.getpid(), rig.pid)
        self.content = np.random.default_rng(seed).integers(0, 256, scale.arena_size_bytes, dtype=np.uint8)
        self.memory[:] = self.content

    def commands(self, cell: Cell, seed: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(seed)
        size, device = cell.op_size_bytes, self.device
        blocks = size // device.block_size_bytes
        # Of the namespace's first arena's worth every place holds the arena's bytes, whatever is written when.
        places = rng.integers(0, len(self.memory) // size, cell.op_count).astype(np.uint64)
        ios = np.zeros(cell.op_count, dtype=IO_DTYPE)
        ios["tag"] = np.arange(cell.op_count)
        ios["opcode"] = OPCODE_READ if cell.direction == "read" else OPCODE_WRITE
        ios["device_index"] = device.device_index
        ios["slba"] = places * np.uint64(blocks)
        ios["buf_addr"] = np.uint64(address_of(self.memory)) + places * np.uint64(size)
        ios["byte_count"] = size
        ios["lba_count"] = blocks
        return ios

    def run(self, cell: Cell, seed: int) -> dict[str, float]:
        """Keep ``depth`` commands outstanding until all have completed."""
        ios, queue = self.commands(cell, seed), self.device.queue
        limit = Deadline.after(CELL_TIMEOUT_S)
        before = [cpu_ns(pid) for pid in self.pids]
        started = time.perf_counter_ns()
        with queue.lock:
            submitted = completed = 0
            while completed < len(ios):
                take = min(cell.depth - (submitted - completed), len(ios) - submitted)
                if take:
                    queue.submit(ios[submitted : submitted + take])
                    submitted += take
                done = queue.poll(min_count=max(1, (submitted - completed) // 4), deadline=limit)
                limit.check("benchmark cell")
                assert not done["error"].any(), done[done["error"] != 0][0]
                completed += len(done)
        wall_ns = time.perf_counter_ns() - started
        after = [cpu_ns(pid) for pid in self.pids]
        used = [(b - a) / len(ios) for a, b in zip(before, after, strict=True)]
        return {"wall_ns": wall_ns / len(ios), "host_cpu_ns": used[0], "target_cpu_ns": used[1]}

    def _move_all(self, direction: str) -> None:
        """Every block once, in order, to or from its own place in memory."""
        size = 128 * KIB
        cell = Cell(direction, size, 8, len(self.memory) // size)
        ios = self.commands(cell, 0)
        index = np.arange(cell.op_count, dtype=np.uint64)
        ios["slba"] = index * np.uint64(size // self.device.block_size_bytes)
        ios["buf_addr"] = np.uint64(address_of(self.memory)) + index * np.uint64(size)
        self._all(ios)

    def fill(self) -> None:
        self._move_all("write")

    def verify(self) -> str:
        """Read the blocks back into cleared memory; a hash of them, which must be the content's."""
        self.memory[:] = 0
        self._move_all("read")
        assert np.array_equal(self.memory, self.content), "a block differs from what was written"
        return hashlib.sha256(self.memory.tobytes()).hexdigest()

    def _all(self, ios: np.ndarray[Any, Any]) -> None:
        limit = Deadline.after(CELL_TIMEOUT_S)
        with self.device.queue.lock:
            self.device.queue.submit(ios)
            left = len(ios)
            while left:
                done = self.device.queue.poll(min_count=1, deadline=limit)
                limit.check("fill")
                assert not done["error"].any()
                left -= len(done)


def serve_side(scale: Scale, seed: int, cores: tuple[int, int]) -> None:
    """Answer requests, one JSON line each; ends with its input."""
    with contextlib.ExitStack() as stack:
        side = Side(scale, seed, cores, stack)
        side.fill()
        print(json.dumps({"kvdev": kvdev.__file__}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if request["what"] == "verify":
                answer: dict[str, Any] = {"sha256": side.verify()}
            else:
                answer = side.run(Cell(**request["cell"]), request["seed"])
            print(json.dumps(answer), flush=True)


# --- both sides ----------------------------------------------------------------------------------


class Runner:
    """A process that is one side."""

    def __init__(self, tree: Path, arguments: list[str]) -> None:
        python = tree / ".venv" / "bin" / "python"
        if not python.exists():
            raise SystemExit(
                f"compare: {tree}: expected a checkout with .venv, got none; run make -C {tree} setup"
            )
        self._tree = tree
        command = [str(python), str(Path(__file__).resolve()), str(tree), "--side", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree
        )
        where = Path(self._read()["kvdev"]).resolve()
        if not where.is_relative_to(tree.resolve()):
            self.close()
            raise SystemExit(f"compare: {tree}: expected its .venv to use its own kvdev, got {where}")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"compare: {self._tree}: its side ended with code {self._process.wait()}")
        return dict(json.loads(line))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def running(tree: Path, arguments: list[str]) -> Iterator[Runner]:
    runner = Runner(tree, arguments)
    try:
        yield runner
    finally:
        runner.close()


KINDS = ("wall_ns", "host_cpu_ns", "target_cpu_ns")


def summarise(cell: Cell, ours: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = asdict(cell)
    for kind in KINDS:
        ratios = sorted(b[kind] / a[kind] for a, b in zip(ours, other, strict=True) if a[kind] and b[kind])
        row[f"{kind}_ours"] = statistics.median(each[kind] for each in ours)
        row[f"{kind}_other"] = statistics.median(each[kind] for each in other)
        row[f"{kind}_ratio"] = statistics.median(ratios) if ratios else 1.0
        row[f"{kind}_quartiles"] = (
            [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]] if ratios else [1.0, 1.0]
        )
    return row


def run(scale: Scale, other: Path, arguments: list[str], *, seed: int) -> dict[str, Any]:
    tree = Path(__file__).resolve().parents[1]
    samples: dict[Cell, tuple[list[dict[str, float]], list[dict[str, float]]]] = {
        cell: ([], []) for cell in scale.cells
    }
    hashes = set()
    for process in range(scale.process_count):
        with running(tree, arguments) as first, running(other, arguments) as second:
            for index in range(scale.round_count + 1):
                for cell in scale.cells:
                    request = {"what": "cell", "cell": asdict(cell), "seed": seed + index}
                    # A B B A: what drifts from one run to the next falls on both.
                    order = (0, 1) if (index + process) % 2 else (1, 0)
                    got = {which: (first, second)[which].ask(request) for which in order}
                    if index:  # the first round warms up
                        for which in (0, 1):
                            samples[cell][which].append({kind: float(got[which][kind]) for kind in KINDS})
            hashes |= {runner.ask({"what": "verify"})["sha256"] for runner in (first, second)}
    assert len(hashes) == 1, hashes
    # Here, not at the top: the other checkout's side runs this file too, and has its own kvdev.
    sys.path.insert(0, str(tree))
    from bench.common import machine

    rows = [summarise(cell, *samples[cell]) for cell in scale.cells]
    return {
        "machine": machine(seed),
        "trees": {"ours": commit_of(tree), "other": commit_of(other)},
        "pair_count": scale.process_count * scale.round_count,
        "cells": rows,
        "ratio": statistics.median(row["wall_ns_ratio"] for row in rows),
        "integrity": hashes.pop(),
    }


def commit_of(tree: Path) -> str:
    """As git names it; a machine may have the tree without git."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def show(report: dict[str, Any]) -> None:
    trees = report["trees"]
    print(
        f"this checkout {trees['ours']} next to {trees['other']}, {report['pair_count']} pairs a cell, medians; load "
        f"average {report['machine']['load_average']:.1f} at the end\n"
    )
    print(f"{'':22} {'us per command':>22}  {'ratio (quartiles)':22} {'host CPU':>14} {'target CPU':>14}")
    for row in report["cells"]:
        low, high = row["wall_ns_quartiles"]
        name = f"{format_size(row['op_size_bytes'])} {row['direction']} depth {row['depth']}"
        print(
            f"{name:22} {row['wall_ns_ours'] / 1e3:>10.2f}  {row['wall_ns_other'] / 1e3:>10.2f}  "
            f"{row['wall_ns_ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"{row['host_cpu_ns_ours'] / 1e3:>7.2f} {row['host_cpu_ns_ratio']:>6.3f} "
            f"{row['target_cpu_ns_ours'] / 1e3:>7.2f} {row['target_cpu_ns_ratio']:>6.3f}"
        )
    verdict = "met" if report["ratio"] >= FLOOR else "MISSED"
    print(f"\nmedian of the ratios: {report['ratio']:.3f}, floor {FLOOR}: {verdict}")
    print(f"every block read back as written, by both: sha256 {report['integrity'][:16]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--toy", action="store_true", help="a few seconds, figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything measured there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="pairs of each cell with the same processes [12]")
    parser.add_argument("--processes", type=int, help="times that both sides are started anew [4]")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    scale = TOY if given.toy else FULL
    scale = Scale(
        scale.namespace_size_bytes,
        scale.arena_size_bytes,
        scale.cells,
        given.processes or scale.process_count,
        given.rounds or scale.round_count,
    )
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[1] if len(available) > 1 else available[0])
    if given.side:
        serve_side(scale, given.seed, cores)
        return 0
    passed = ["--seed", str(given.seed), *(["--toy"] if given.toy else [])]
    report = run(scale, given.other.resolve(), passed, seed=given.seed)
    show(report)
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
