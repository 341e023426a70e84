"""How fast the vhost-user path is: our front end on qemu-storage-daemon, in turn with fio's io_uring engine.

Run alone on the machine: ``.venv/bin/python bench/vhost.py``. Both read every place of one file in random order, again
and again, with O_DIRECT through io_uring, into memory in pages of 4 KiB (``--huge``: ours in huge pages, as arenas
are); rounds alternate, the ratio is of the medians. Excluded: connecting, and filling the file.
The daemon moves every request in one thread: where that thread is busy all the time, it is the limit, and the table
says so. Ends with the file's bytes, read through the front end, compared with the file. Where KVDEV_SPDK_TGT names an
spdk_tgt, our rings are then compared with rings driven from plain Python on its null and malloc bdevs. ``--socket``
measures our side alone on a back end that runs already.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.block.device import execute, transfer_ios
from kvdev.clock import Deadline
from kvdev.native.io import IO_DTYPE, OPCODE_READ, IoArray
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.staging.mapping import BACKING_AUTO
from kvdev.testing.plain_rings import PlainRings
from kvdev.units import KIB, MIB, format_size
from kvdev.vhost import SharedMemory, VhostDevice, VhostOptions
from spdk_rpc import Client, RpcTransportError, SpdkRpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine

ROOT = Path(__file__).resolve().parents[1]
QSD_SCRIPT = ROOT / "tests" / "interop" / "lab" / "qsd.sh"
FLOOR = 0.9
"""Of fio's rate, at 128 KiB and 1 MiB from depth 4."""
BUSY = 0.95
"""A daemon thread with this share of a core is the limit."""
BATCH_COUNT = 1024
RINGS_DEPTH = 32
RINGS_SPIN_US = 1000.0
"""The yardstick polls without end; so do we, then."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    file_size_bytes: int
    cells: tuple[tuple[int, int], ...]
    """Operation size and depth."""
    seconds: float
    round_count: int


FULL = Scale(
    file_size_bytes=1024 * MIB,
    cells=(
        (4 * KIB, 1), (4 * KIB, 32),
        (128 * KIB, 1), (128 * KIB, 4), (128 * KIB, 8), (128 * KIB, 16),
        (MIB, 1), (MIB, 4), (MIB, 8), (MIB, 16),
    ),
    seconds=0.7,
    round_count=3,
)  # fmt: skip
TOY = Scale(file_size_bytes=16 * MIB, cells=((128 * KIB, 1), (128 * KIB, 4)), seconds=0.3, round_count=1)


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    ops_per_s: float
    lat_us_mean: float
    """Completion latency."""
    cpu_us_per_op: float
    """Of the process that asks, waiting in a poll included; unlike the rest it hardly depends on what else runs."""
    daemon_share: float = 0.0
    """Of one core, by the daemon's busiest thread."""


# --- our side --------------------------------------------------------------------------------


class FrontEnd:
    """A device with depth for its ring size: the core keeps it full, whatever Python does."""

    def __init__(
        self,
        socket: str,
        *,
        depth: int,
        op_size_bytes: int,
        seed: int,
        spin_us: float = 20.0,
        is_huge: bool = False,
    ) -> None:
        self.depth = depth
        backing = BACKING_AUTO if is_huge else "4KiB"
        self.arena = Arena(max(2 * MIB, min(depth, 64) * op_size_bytes), is_shareable=True, backing=backing)
        self.queue = HostQueue(capacity_count=4 * BATCH_COUNT, spin_us=spin_us)
        options = VhostOptions(
            queue_size=max(4, 1 << (depth - 1).bit_length()),
            max_transfer_bytes=MIB,
            window_size_bytes=max(4096, depth * op_size_bytes),
        )
        self.device = VhostDevice(
            socket,
            self.queue,
            memory=[SharedMemory.of(self.arena)],
            options=options,
            deadline=Deadline.after(TIMEOUT_S),
        )
        self._ios = self._make_ios(op_size_bytes, np.random.default_rng(seed))

    def _make_ios(self, size: int, rng: np.random.Generator) -> IoArray:
        block = self.device.block_size_bytes
        place_count = self.device.size_bytes // size
        # Whole rounds over the device that are whole quarters of a batch as well.
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
        started, cpu_started = time.perf_counter(), time.process_time()  # noqa: TID251
        while time.perf_counter() - started < seconds:
            if self.depth == 1:
                self.queue.submit(self._ios[at : at + 1])
                at = (at + 1) % len(self._ios)
            else:
                while self.queue.outstanding_count < BATCH_COUNT:
                    self.queue.submit(self._ios[at : at + BATCH_COUNT // 4])
                    at = (at + BATCH_COUNT // 4) % len(self._ios)
            # While this waits, the core keeps the ring full from what it has.
            done = self.queue.poll(min_count=1 if self.depth == 1 else BATCH_COUNT // 4, deadline=deadline)
            assert not done["error"].any(), self.device.fault
            count += len(done)
            waited_ns += float((done["complete_ns"] - done["send_ns"]).sum())
        elapsed, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started  # noqa: TID251
        while self.queue.outstanding_count:
            self.queue.poll(min_count=1, deadline=deadline)
        return Sample(count / elapsed, waited_ns / count / 1000, cpu_s * 1e6 / count)

    def close(self) -> None:
        self.device.close()
        self.queue.close()
        self.arena.close()


class ThreadMeter:
    """Seconds of CPU per thread of a process since the start."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._started = time.perf_counter()
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        found = {}
        for task in self._tasks.iterdir():
            with contextlib.suppress(OSError):
                parts = (task / "stat").read_text().rpartition(")")[2].split()
                found[task.name] = (int(parts[11]) + int(parts[12])) / ticks
        return found

    def busiest_share(self) -> float:
        elapsed = time.perf_counter() - self._started
        now = self._read()
        return max((used - self._before.get(name, 0.0)) / elapsed for name, used in now.items())


# --- fio -------------------------------------------------------------------------------------


def measure_fio(
    file: Path, *, op_size_bytes: int, depth: int, seconds: float, seed: int, is_huge: bool = False
) -> Sample:
    command = [
        "fio", "--name=read", f"--filename={file}", "--rw=randread", "--ioengine=io_uring", "--direct=1",
        f"--bs={op_size_bytes}", f"--iodepth={depth}", "--time_based", f"--runtime={seconds}",
        f"--randseed={seed}", "--output-format=json", "--size=100%", "--thread",
        f"--iomem={'mmaphuge' if is_huge else 'malloc'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    ops_per_s = float(job["read"]["iops"])
    cpu_s_per_s = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Sample(ops_per_s, float(job["read"]["clat_ns"]["mean"]) / 1000, cpu_s_per_s * 1e6 / ops_per_s)


# --- the daemon ------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon(
    folder: Path, size_bytes: int, rng: np.random.Generator, *, aio: str, poll_us: int | None
) -> Iterator[tuple[str, Path, int]]:
    """Socket, file and process of a qemu-storage-daemon with O_DIRECT."""
    socket, file = folder / "vhost.sock", folder / "disk.img"
    with file.open("wb") as out:
        for _ in range(size_bytes // (16 * MIB)):
            out.write(rng.bytes(16 * MIB))
        os.fsync(out.fileno())
    env = {**os.environ, "DIRECT": "on", "AIO": aio, "QUEUES": "1"}
    if poll_us is not None:
        env["POLL_NS"] = str(poll_us * 1000)
    subprocess.run(
        ["sh", str(QSD_SCRIPT), str(socket), str(file)], env=env, check=True, stdout=subprocess.DEVNULL
    )
    try:
        yield str(socket), file, int(Path(f"{socket}.pid").read_text())
    finally:
        subprocess.run(["sh", str(QSD_SCRIPT), "stop", str(socket)], check=True)


def measure_ours(
    socket: str,
    *,
    op_size_bytes: int,
    depth: int,
    seconds: float,
    seed: int,
    pid: int,
    spin_us: float = 20.0,
    is_huge: bool = False,
) -> Sample:
    front_end = FrontEnd(
        socket, depth=depth, op_size_bytes=op_size_bytes, seed=seed, spin_us=spin_us, is_huge=is_huge
    )
    try:
        meter = ThreadMeter(pid) if pid else None
        sample = front_end.measure(seconds)
        share = meter.busiest_share() if meter else 0.0
        return replace(sample, daemon_share=share)
    finally:
        front_end.close()


def run_cell(
    socket: str,
    file: Path,
    pid: int,
    *,
    op_size_bytes: int,
    depth: int,
    scale: Scale,
    seed: int,
    **ways: Any,
) -> dict[str, Any]:
    """Both, in turn; medians of the rounds."""
    ours, theirs = [], []
    for round_index in range(scale.round_count):
        shape: dict[str, Any] = {"op_size_bytes": op_size_bytes, "depth": depth, "seconds": scale.seconds}
        is_huge = bool(ways.get("is_huge"))
        theirs.append(measure_fio(file, **shape, seed=seed + round_index, is_huge=is_huge))
        ours.append(measure_ours(socket, **shape, seed=seed + round_index, pid=pid, **ways))
    our_ops = statistics.median(sample.ops_per_s for sample in ours)
    fio_ops = statistics.median(sample.ops_per_s for sample in theirs)
    share = statistics.median(sample.daemon_share for sample in ours)
    our_lat = statistics.median(sample.lat_us_mean for sample in ours)
    fio_lat = statistics.median(sample.lat_us_mean for sample in theirs)
    return {
        "op_size_bytes": op_size_bytes,
        "depth": depth,
        "ops_per_s": our_ops,
        "fio_ops_per_s": fio_ops,
        "gb_per_s": our_ops * op_size_bytes / 1e9,
        "ratio": our_ops / fio_ops,
        # Of rounds side by side: what else used the disk then slowed both.
        "pair_ratios": [a.ops_per_s / b.ops_per_s for a, b in zip(ours, theirs, strict=True)],
        "lat_us_mean": our_lat,
        "fio_lat_us_mean": fio_lat,
        "added_us": our_lat - fio_lat,
        "cpu_us_per_op": statistics.median(sample.cpu_us_per_op for sample in ours),
        "fio_cpu_us_per_op": statistics.median(sample.cpu_us_per_op for sample in theirs),
        "daemon_share": share,
        "is_daemon_the_limit": share >= BUSY,
    }


def integrity(socket: str, file: Path) -> str:
    """Hash of the file as the front end reads it; an error unless it is the file's."""
    front_end = FrontEnd(socket, depth=16, op_size_bytes=MIB, seed=0)
    seen, wanted = hashlib.sha256(), hashlib.sha256(file.read_bytes())
    device, arena = front_end.device, front_end.arena
    view = arena.bytes()
    for start in range(0, device.size_bytes, arena.size_bytes):
        size = min(arena.size_bytes, device.size_bytes - start)
        ios = transfer_ios(device, OPCODE_READ, start // device.block_size_bytes, arena.address, size)
        execute(device, ios, Deadline.after(TIMEOUT_S))
        seen.update(view[:size].data)
    front_end.close()
    if seen.digest() != wanted.digest():
        raise SystemExit("bench: the bytes read through vhost-user differ from the file's")
    return seen.hexdigest()


def line_of(cell: dict[str, Any]) -> str:
    limit = "  the daemon's thread is the limit" if cell["is_daemon_the_limit"] else ""
    return (
        f"{format_size(cell['op_size_bytes']):>8} depth {cell['depth']:>3}: {cell['ops_per_s']:>9.0f} op/s "
        f"{cell['gb_per_s']:6.2f} GB/s, fio {cell['fio_ops_per_s']:>9.0f} op/s, ratio {cell['ratio']:.2f} "
        f"(pairs {min(cell['pair_ratios']):.2f} to {max(cell['pair_ratios']):.2f}), "
        f"latency {cell['lat_us_mean']:.0f} us ({cell['added_us']:+.0f}), "
        f"CPU {cell['cpu_us_per_op']:.1f} and {cell['fio_cpu_us_per_op']:.1f} us/op, "
        f"daemon {100 * cell['daemon_share']:.0f} %{limit}"
    )


def compare_rings(socket: str, scale: Scale, seed: int, *, pid: int) -> dict[str, Any]:
    """The C rings in turn with rings driven from plain Python, on the same back end: 4 KiB at depth 32."""
    ours, plain = [], []
    for round_index in range(scale.round_count):
        rings = PlainRings(socket, op_size_bytes=4 * KIB, depth=RINGS_DEPTH)
        try:
            plain.append(rings.measure(scale.seconds))
        finally:
            rings.close()
        ours.append(
            measure_ours(
                socket,
                op_size_bytes=4 * KIB,
                depth=RINGS_DEPTH,
                seconds=scale.seconds,
                seed=seed + round_index,
                pid=pid,
                spin_us=RINGS_SPIN_US,
            )
        )
    found = {
        "ops_per_s": statistics.median(sample.ops_per_s for sample in ours),
        "plain_ops_per_s": statistics.median(plain),
        "cpu_us_per_op": statistics.median(sample.cpu_us_per_op for sample in ours),
        "daemon_share": statistics.median(sample.daemon_share for sample in ours),
    }
    found["ratio"] = found["ops_per_s"] / found["plain_ops_per_s"]
    print(
        f"rings, 4 KiB depth {RINGS_DEPTH}: {found['ops_per_s']:.0f} op/s in C, {found['plain_ops_per_s']:.0f} from "
        f"plain Python, ratio {found['ratio']:.2f}, CPU {found['cpu_us_per_op']:.2f} us/op",
        flush=True,
    )
    return found


@contextlib.contextmanager
def spdk(binary: str, folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """A real SPDK on core 0 with two vhost-blk controllers: sockets by the name of their bdev, and its process."""
    rpc_path = str(folder / "rpc.sock")
    command = [binary, "--no-pci", "--no-huge", "-s", "1024", "-m", "0x1", "--disable-cpumask-locks"]
    command += ["-r", rpc_path, "-S", str(folder)]
    with (
        (folder / "spdk.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            with connect_rpc(rpc_path, process) as client:
                rpc = SpdkRpc(client)
                rpc.bdev_null_create(name="Null", num_blocks=1 << 20, block_size=512)
                rpc.bdev_malloc_create(name="Malloc", num_blocks=1 << 19, block_size=512)
                for name in ("Null", "Malloc"):
                    rpc.vhost_create_blk_controller(ctrlr=name, dev_name=name)
                yield {name: str(folder / name) for name in ("Null", "Malloc")}, process.pid
        finally:
            process.terminate()


def connect_rpc(path: str, process: subprocess.Popen[bytes]) -> Client:
    deadline = Deadline.after(TIMEOUT_S)
    while True:
        try:
            client = Client(path, timeout_s=TIMEOUT_S)
            SpdkRpc(client).framework_wait_init()
            return client
        except RpcTransportError:
            deadline.check("start of spdk_tgt")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            raise SystemExit(f"bench: spdk_tgt ended with {process.returncode}")


def measure_spdk(binary: str, folder: Path, scale: Scale, seed: int) -> dict[str, Any]:
    """The rings on a back end that polls: what they cost by themselves."""
    cores = os.sched_getaffinity(0)
    with spdk(binary, folder) as (sockets, pid):
        # Its reactor has core 0 to itself.
        os.sched_setaffinity(0, cores - {0} or cores)
        try:
            found = {}
            for name, socket in sockets.items():
                print(f"SPDK {name}: ", end="")
                found[name] = compare_rings(socket, scale, seed, pid=pid)
            return found
        finally:
            os.sched_setaffinity(0, cores)


def measure_socket(socket: str, scale: Scale, seed: int) -> list[dict[str, Any]]:
    """Our side alone on a back end that runs already; nothing is written to it."""
    cells = []
    for size, depth in scale.cells:
        sample = measure_ours(
            socket, op_size_bytes=size, depth=depth, seconds=scale.seconds, seed=seed, pid=0
        )
        cells.append({"op_size_bytes": size, "depth": depth, **asdict(sample)})
        print(
            f"{format_size(size):>8} depth {depth:>3}: {sample.ops_per_s:>9.0f} op/s "
            f"{sample.ops_per_s * size / 1e9:6.2f} GB/s, latency {sample.lat_us_mean:.1f} us, "
            f"CPU {sample.cpu_us_per_op:.2f} us/op",
            flush=True,
        )
    return cells


def measure_daemon(folder: Path, options: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    """qemu-storage-daemon in turn with fio."""
    for program in ("fio", "qemu-storage-daemon"):
        if shutil.which(program) is None:
            raise SystemExit(f"bench: no {program} here: apt-get install fio qemu-system-common")
    rng = np.random.default_rng(options.seed)
    cells = []
    backend = daemon(folder, scale.file_size_bytes, rng, aio=options.aio, poll_us=options.poll_us)
    with backend as (socket, file, pid):
        for size, depth in scale.cells:
            cell = run_cell(
                socket,
                file,
                pid,
                op_size_bytes=size,
                depth=depth,
                scale=scale,
                seed=options.seed,
                spin_us=options.spin_us,
                is_huge=options.huge,
            )
            cells.append(cell)
            print(line_of(cell), flush=True)
        digest = integrity(socket, file)
        print(f"integrity {digest[:16]}: what was read is what the file holds")
    big = [cell for cell in cells if cell["op_size_bytes"] >= 128 * KIB and cell["depth"] >= 4]
    is_held = all(cell["ratio"] >= FLOOR or cell["is_daemon_the_limit"] for cell in big)
    return {"cells": cells, "integrity": digest, "is_floor_held": is_held}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a small run that shows it works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the file is made  [default: the temporary folder]")
    parser.add_argument(
        "--aio", default="io_uring", help="how the daemon reads the file  [default: io_uring]"
    )
    parser.add_argument(
        "--poll-us", type=int, help="give the daemon a thread for the export that polls for so long"
    )
    parser.add_argument(
        "--spin-us", type=float, default=20.0, help="how long our poll looks before it sleeps  [default: 20]"
    )
    parser.add_argument("--huge", action="store_true", help="payload memory in huge pages")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="real-time priority for everything measured: on a busy machine",
    )
    parser.add_argument("--socket", help="measure our side alone on this back end; nothing is written to it")
    parser.add_argument(
        "--spdk-only", action="store_true", help="only the rings on the SPDK of KVDEV_SPDK_TGT"
    )
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    scale = TOY if options.toy else FULL
    binary = os.environ.get("KVDEV_SPDK_TGT", "")
    if options.spdk_only and not binary:
        raise SystemExit("bench: --spdk-only: KVDEV_SPDK_TGT names no spdk_tgt")
    report: dict[str, Any] = {"machine": machine(options.seed), "scale": asdict(scale), "cells": []}
    with tempfile.TemporaryDirectory(prefix="kvdev-bench-", dir=options.folder) as folder:
        if options.socket:
            report["cells"] = measure_socket(options.socket, scale, options.seed)
            report["rings"] = compare_rings(options.socket, scale, options.seed, pid=0)
        elif not options.spdk_only:
            report.update(measure_daemon(Path(folder), options, scale))
        if binary and not options.socket:
            report["spdk"] = measure_spdk(binary, Path(folder), scale, options.seed)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
