"""How fast the data path is: our initiator against our target over loopback, next to a raw TCP stream.

Run alone on the machine: ``.venv/bin/python bench/datapath.py``. Target and stream server run on core 0, everything
measured on core 1. Excluded: connecting, making volumes, filling namespaces. Commands go to random places; buffers and
namespaces are as large as the stream's, so that both move as much memory. Ends with the bytes read back compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.keys import derive_keys
from kvdev.native.io import IO_DONE_DTYPE, IO_DTYPE, OPCODE_READ, OPCODE_WRITE, address_of
from kvdev.session import Session
from kvdev.staging import Arena
from kvdev.store import PageStatus, PageStore, Volume
from kvdev.units import GIB, KIB, MIB, format_size, parse_size
from kvdev.uri import TcpUri, VolumeUri
from kvdev_tools.connect import make_session
from kvdev_tools.content import PageContent
from kvdev_tools.pool import size_pool
from kvdev_tools.rig import Rig

# The checkout, for the module beside this one, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine
from bench.stream import SEND_SIZES_BYTES, StreamServer

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:7a1c7c52-6d1e-4f0b-9f43-3f6f1d2b9c10"
MEMBER_COUNT = 4
STRIP_SIZE_BYTES = 128 * KIB
CELL_TIMEOUT_S = 120.0
FLOOR = 0.8
PYTHON_SHARE_LIMIT = 0.05


@dataclass(frozen=True)
class Scale:
    """How much is moved."""

    namespace_size_bytes: int
    arena_size_bytes: int
    op_sizes_bytes: tuple[int, ...]
    depths: tuple[int, ...]
    cell_bytes_max: int
    cell_ops_max: int
    page_sizes: tuple[str, ...]
    batch_size_bytes: int
    round_bytes: int
    round_count: int


FULL = Scale(
    namespace_size_bytes=GIB,
    arena_size_bytes=256 * MIB,
    op_sizes_bytes=tuple(4 * KIB << shift for shift in (0, 2, 4, 5, 6, 8, 10)),
    depths=(1, 2, 4, 8, 16, 32, 64),
    cell_bytes_max=512 * MIB,
    cell_ops_max=8192,
    page_sizes=("small", "medium"),
    batch_size_bytes=64 * MIB,
    round_bytes=GIB,
    round_count=7,
)
TOY = Scale(
    namespace_size_bytes=8 * MIB,
    arena_size_bytes=4 * MIB,
    op_sizes_bytes=(4 * KIB, MIB),
    depths=(1, 4),
    cell_bytes_max=4 * MIB,
    cell_ops_max=64,
    page_sizes=("small",),
    batch_size_bytes=MIB,
    round_bytes=4 * MIB,
    round_count=1,
)


# --- measuring ---------------------------------------------------------------------------------


class CpuMeter:
    """CPU seconds of this process and of another one between start and read."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        parts = self._stat.read_text().rpartition(")")[2].split()
        ticks = int(parts[11]) + int(parts[12])
        return own.ru_utime + own.ru_stime, ticks / os.sysconf("SC_CLK_TCK")

    def read(self) -> tuple[float, float]:
        now = self._now()
        return now[0] - self._start[0], now[1] - self._start[1]


class CoreClock:
    """Time inside the C core: every call through the modules' ``lib`` is counted while it is installed."""

    MODULES = ("kvdev.native.queue", "kvdev.native.index", "kvdev.native.crc", "kvdev.native.admin")

    def __init__(self) -> None:
        self.core_s = 0.0
        self.call_count = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, name)
        if not callable(function):
            return function

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.core_s += time.perf_counter() - started
                self.call_count += 1

        # Found directly the next time: the wrapper costs little beside a call.
        self.__dict__[name] = timed
        return timed

    @contextlib.contextmanager
    def installed(self) -> Iterator[CoreClock]:
        modules: list[Any] = [importlib.import_module(name) for name in self.MODULES]
        self._lib = modules[0].lib
        originals = [module.lib for module in modules]
        for module in modules:
            module.lib = self
        try:
            yield self
        finally:
            for module, original in zip(modules, originals, strict=True):
                module.lib = original


def percentile_us(sample_ns: np.ndarray[Any, Any], percentile: float) -> float:
    return float(np.percentile(sample_ns, percentile)) / 1e3


@dataclass(frozen=True)
class Cell:
    """One measured combination; ratio is to the best raw stream in the same direction."""

    what: str
    direction: str
    op_size_bytes: int
    depth: int
    gb_per_s: float
    iops: float
    lat_us_p50: float
    lat_us_p99: float
    client_cpu_s_per_gb: float
    target_cpu_s_per_gb: float
    ratio: float


# --- block commands ----------------------------------------------------------------------------


def run_block_cell(
    device: BlockDevice,
    arena_bytes: np.ndarray[Any, Any],
    *,
    direction: str,
    op_size: int,
    depth: int,
    scale: Scale,
    rng: np.random.Generator,
    pid: int,
    best: float,
) -> Cell:
    """Keep ``depth`` operations outstanding; one larger than the device's transfer is several commands."""
    op_count = max(4 * depth, min(scale.cell_bytes_max // op_size, scale.cell_ops_max))
    pieces = -(-op_size // device.max_transfer_bytes)
    piece = op_size // pieces
    places = rng.integers(0, device.size_bytes // op_size, op_count).astype(np.uint64)
    buffers = (
        np.arange(op_count, dtype=np.uint64) % np.uint64(max(1, len(arena_bytes) // op_size))
    ) * np.uint64(op_size)
    ios = np.zeros(op_count * pieces, dtype=IO_DTYPE)
    inner = np.tile(np.arange(pieces, dtype=np.uint64) * np.uint64(piece), op_count)
    block = np.uint64(device.block_size_bytes)
    ios["tag"] = np.arange(len(ios))
    ios["opcode"] = OPCODE_READ if direction == "read" else OPCODE_WRITE
    ios["device_index"] = device.device_index
    ios["slba"] = (np.repeat(places * np.uint64(op_size), pieces) + inner) // block
    ios["buf_addr"] = np.uint64(address_of(arena_bytes)) + np.repeat(buffers, pieces) + inner
    ios["byte_count"] = piece
    ios["lba_count"] = piece // device.block_size_bytes
    done = np.zeros(len(ios), dtype=IO_DONE_DTYPE)
    limit = Deadline.after(CELL_TIMEOUT_S)
    queue = device.queue
    meter = CpuMeter(pid)
    started = time.perf_counter_ns()
    with queue.lock:
        submitted = completed = 0
        while completed < len(ios):
            room = depth * pieces - (submitted - completed)
            if room >= pieces and submitted < len(ios):
                take = min(room - room % pieces, len(ios) - submitted)
                queue.submit(ios[submitted : submitted + take])
                submitted += take
            wanted = max(1, (submitted - completed) // 4)
            got = queue.poll(min_count=wanted, deadline=limit)
            limit.check("benchmark cell")
            done[completed : completed + len(got)] = got
            completed += len(got)
    elapsed = (time.perf_counter_ns() - started) / 1e9
    client_cpu, target_cpu = meter.read()
    assert not done["error"].any(), done[done["error"] != 0][0]
    order = np.argsort(done["tag"])
    begin = done["submit_ns"][order].reshape(op_count, pieces).min(axis=1)
    end = done["complete_ns"][order].reshape(op_count, pieces).max(axis=1)
    lat = (end - begin).astype(np.int64)
    gb = op_count * op_size / 1e9
    return Cell(
        "block",
        direction,
        op_size,
        depth,
        gb / elapsed,
        op_count / elapsed,
        percentile_us(lat, 50),
        percentile_us(lat, 99),
        client_cpu / gb,
        target_cpu / gb,
        gb / elapsed / best,
    )


# --- pages -------------------------------------------------------------------------------------


def _quota_pages(geometry: Geometry, scale: Scale) -> int:
    """Room for every page and for a batch that replaces some: nothing is evicted."""
    return (scale.namespace_size_bytes + 2 * scale.batch_size_bytes) // geometry.page_size_bytes


class Pages:
    """A page store over the striped namespaces, filled, with its batches in random order."""

    def __init__(
        self, session: Session, members: VolumeUri, preset: str, scale: Scale, rng: np.random.Generator
    ) -> None:
        self.geometry = Geometry.preset(preset)
        self.page_size = self.geometry.page_size_bytes
        limit = Deadline.after(CELL_TIMEOUT_S)
        devices = session.open_members(members, deadline=limit)
        destroy = frozenset(device.uri for device in devices)
        self.volume = Volume.create(
            devices, name=preset, strip_size_bytes=STRIP_SIZE_BYTES, destroy=destroy, deadline=limit
        )
        self.page_count = scale.namespace_size_bytes // self.page_size
        self.batch = max(1, scale.batch_size_bytes // self.page_size)
        quota_pages = _quota_pages(self.geometry, scale)
        self.volume.create_namespace("kv", self.geometry, quota_pages=quota_pages, deadline=limit)
        self.store = PageStore(self.volume.open_namespace("kv", deadline=limit), timeout_s=CELL_TIMEOUT_S)
        self.keys = derive_keys(
            "bench", "", [index.to_bytes(8, "little") for index in range(self.page_count)]
        )
        self.content = PageContent(self.page_size)
        self.rng = rng

    def batches(self, total_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
        """Keys of random pages, distinct within a batch, until so many bytes have been named."""
        for _ in range(max(1, total_bytes // (self.batch * self.page_size))):
            yield np.ascontiguousarray(self.keys[self.rng.permutation(self.page_count)[: self.batch]])

    def fill(self, arena: Arena) -> None:
        for start in range(0, self.page_count, self.batch):
            keys = self.keys[start : start + self.batch]
            with arena.lease(len(keys), self.page_size) as lease:
                for row, key in zip(lease.array, keys, strict=True):
                    row[:] = self.content.page(key)
                result = self.store.put(keys, lease)
                assert result.failure is None, result.failure
            self.store.flush()

    def move(self, arena: Arena, *, direction: str, total_bytes: int, verify: Any = "store") -> list[int]:
        """Put or get random pages; nanoseconds of each batch. Puts rewrite pages with what they hold."""
        times = []
        batches = list(self.batches(total_bytes))
        # Leases go round the arena: a batch's buffers are as cold as the stream's.
        lease_count = max(1, arena.size_bytes // (self.batch * self.page_size))
        leases = [arena.lease(self.batch, self.page_size) for _ in range(lease_count)]
        try:
            if direction == "write":
                for lease, keys in zip(leases, batches, strict=False):
                    for row, key in zip(lease.array, keys, strict=True):
                        row[:] = self.content.page(key)
            for index, keys in enumerate(batches):
                lease = leases[index % lease_count]
                if direction == "write":
                    keys = batches[index % lease_count]
                started = time.perf_counter_ns()
                if direction == "read":
                    got = self.store.get(keys, lease, verify=verify)
                    times.append(time.perf_counter_ns() - started)
                    assert bool((got.status == PageStatus.HIT).all()), got.failure
                else:
                    put = self.store.put(keys, lease)
                    times.append(time.perf_counter_ns() - started)
                    assert put.failure is None, put.failure
            if direction == "write":
                started = time.perf_counter_ns()
                self.store.flush()
                times[-1] += time.perf_counter_ns() - started
        finally:
            for lease in leases:
                lease.release()
        return times

    def verify_all(self, arena: Arena) -> str:
        """Read every page, compare it with its key's bytes, and return a hash over all of them."""
        digest = hashlib.sha256()
        for start in range(0, self.page_count, self.batch):
            keys = self.keys[start : start + self.batch]
            with arena.lease(len(keys), self.page_size) as lease:
                got = self.store.get(keys, lease)
                assert bool((got.status == PageStatus.HIT).all()), got.failure
                for row, key in zip(lease.array, keys, strict=True):
                    assert np.array_equal(row, self.content.page(key)), "a page differs from what was put"
                digest.update(lease.array.tobytes())
        return digest.hexdigest()


def run_page_cell(
    pages: Pages, arena: Arena, *, direction: str, scale: Scale, pid: int, best: float, verify: Any = "store"
) -> Cell:
    meter = CpuMeter(pid)
    times = pages.move(arena, direction=direction, total_bytes=scale.round_bytes, verify=verify)
    client_cpu, target_cpu = meter.read()
    batch_bytes = pages.batch * pages.page_size
    gb = len(times) * batch_bytes / 1e9
    elapsed = sum(times) / 1e9
    sample = np.array(times)
    what = "page put" if direction == "write" else f"page get, verify by {verify}"
    return Cell(
        what,
        direction,
        pages.page_size,
        pages.batch,
        gb / elapsed,
        len(times) * pages.batch / elapsed,
        percentile_us(sample, 50),
        percentile_us(sample, 99),
        client_cpu / gb,
        target_cpu / gb,
        gb / elapsed / best,
    )


def python_share(pages: Pages, arena: Arena, *, direction: str, scale: Scale) -> dict[str, float]:
    """Share of a batch's time outside the C core, and what one call costs there."""
    pages.move(arena, direction=direction, total_bytes=scale.round_bytes // 4)
    with CoreClock().installed() as clock:
        times = pages.move(arena, direction=direction, total_bytes=scale.round_bytes)
    wall = sum(times) / 1e9
    return {
        "batch_size_bytes": pages.batch * pages.page_size,
        "wall_s": wall,
        "core_s": clock.core_s,
        "python_share": max(0.0, 1 - clock.core_s / wall),
        "python_us_per_batch": max(0.0, wall - clock.core_s) / len(times) * 1e6,
    }


def call_overhead_us(pages: Pages, arena: Arena, *, count: int) -> dict[str, float]:
    """A get of a single page: all of it, and the part outside the C core."""
    key = pages.keys[:1]
    with arena.lease(1, pages.page_size) as lease:
        pages.store.get(key, lease)
        with CoreClock().installed() as clock:
            times = []
            for _ in range(count):
                started = time.perf_counter_ns()
                pages.store.get(key, lease)
                times.append(time.perf_counter_ns() - started)
    total = statistics.median(times) / 1e3
    return {"get_one_page_us": total, "python_us": max(0.0, (sum(times) / 1e9 - clock.core_s) / count * 1e6)}


# --- the whole ---------------------------------------------------------------------------------


def stream_rates(server: StreamServer, buffer: memoryview, direction: str, total: int) -> dict[int, float]:
    """GB/s at each send size, once."""
    return {
        size: total / server.measure(direction, buffer, total=total, send_size=size) / 1e9
        for size in SEND_SIZES_BYTES
    }


def pairs(
    server: StreamServer, buffer: memoryview, pages: Pages, arena: Arena, scale: Scale, direction: str
) -> dict[str, Any]:
    """Stream and pages in turn; the ratio of medians, the stream's at its best send size."""
    stream: dict[int, list[float]] = {size: [] for size in SEND_SIZES_BYTES}
    ours: list[float] = []
    for _ in range(scale.round_count):
        for size, rate in stream_rates(server, buffer, direction, scale.round_bytes).items():
            stream[size].append(rate)
        times = pages.move(arena, direction=direction, total_bytes=scale.round_bytes)
        ours.append(len(times) * pages.batch * pages.page_size / sum(times))
    medians = {size: statistics.median(rates) for size, rates in stream.items()}
    best_size = max(medians, key=lambda size: medians[size])
    return {
        "direction": direction,
        "page_size_bytes": pages.page_size,
        "pair_count": scale.round_count,
        "stream_gb_per_s": medians[best_size],
        "stream_send_size_bytes": best_size,
        "stream_all_gb_per_s": {str(size): rate for size, rate in medians.items()},
        "pages_gb_per_s": statistics.median(ours),
        "pages_all_gb_per_s": ours,
        "ratio": statistics.median(ours) / medians[best_size],
    }


def run(scale: Scale, seed: int, *, cores: tuple[int, int], is_quiet: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    report: dict[str, Any] = {"machine": machine(seed), "scale": asdict(scale), "cells": []}

    def say(text: str) -> None:
        if not is_quiet:
            print(text, flush=True)

    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(Rig())
        os.sched_setaffinity(0, {cores[0]})
        rig.start()
        os.sched_setaffinity(0, {cores[1]})
        largest = max((Geometry.preset(name) for name in scale.page_sizes), key=lambda g: g.page_size_bytes)
        member_size = max(
            size_pool(
                Geometry.preset(name),
                page_count=_quota_pages(Geometry.preset(name), scale),
                member_count=MEMBER_COUNT,
                strip_size_bytes=STRIP_SIZE_BYTES,
            ).member_size_bytes
            for name in scale.page_sizes
        )
        # The last namespace, as large as all members together, takes the block commands.
        subsystem = rig.provision(
            host_nqn=HOST_NQN,
            namespace_count=MEMBER_COUNT + 1,
            namespace_size_bytes=max(member_size, scale.namespace_size_bytes),
        )
        uris = [TcpUri(subsystem.addresses, subsystem.subnqn, nsid=n + 1) for n in range(MEMBER_COUNT + 1)]
        assert rig.pid is not None
        pid = rig.pid
        session = stack.enter_context(make_session(HOST_NQN, None, timeout_s=30.0))
        device = session.open_device(uris[-1])
        arena = stack.enter_context(Arena(scale.arena_size_bytes))
        whole = arena.lease(1, scale.arena_size_bytes)
        arena_bytes = whole.array[0]
        server = StreamServer(buffer_size=scale.namespace_size_bytes, core=cores[0])
        stack.callback(server.close)
        buffer = memoryview(arena_bytes)
        report["machine"]["arena_backing"] = arena.backing

        best = {}
        for direction in ("read", "write"):
            stream_rates(server, buffer, direction, scale.round_bytes)  # warm up
            best[direction] = max(stream_rates(server, buffer, direction, scale.round_bytes).values())
        say(f"raw TCP stream: read {best['read']:.2f} GB/s, write {best['write']:.2f} GB/s\n")
        say(
            f"{'what':28} {'size':>8} {'depth':>6} {'GB/s':>7} {'IOPS':>9} {'p50 us':>9} {'p99 us':>9} "
            f"{'CPU s/GB':>8} {'target':>7} {'ratio':>6}"
        )

        def keep(cell: Cell) -> None:
            report["cells"].append(asdict(cell))
            say(
                f"{cell.what + ' ' + cell.direction:28.28} {format_size(cell.op_size_bytes):>8} {cell.depth:>6} "
                f"{cell.gb_per_s:>7.2f} {cell.iops:>9.0f} {cell.lat_us_p50:>9.0f} {cell.lat_us_p99:>9.0f} "
                f"{cell.client_cpu_s_per_gb:>8.3f} {cell.target_cpu_s_per_gb:>7.3f} {cell.ratio:>6.2f}"
            )

        for direction in ("write", "read"):
            for op_size in scale.op_sizes_bytes:
                # Measured anew for each row of depths: a machine's speed wanders.
                best[direction] = max(stream_rates(server, buffer, direction, scale.round_bytes).values())
                for depth in scale.depths:
                    keep(
                        run_block_cell(
                            device,
                            arena_bytes,
                            direction=direction,
                            op_size=op_size,
                            depth=depth,
                            scale=scale,
                            rng=rng,
                            pid=pid,
                            best=best[direction],
                        )
                    )
        whole.release()
        members = VolumeUri(members=tuple(uris[:-1]))
        report["integrity"] = {}
        for preset in scale.page_sizes:
            pages = Pages(session, members, preset, scale, rng)
            pages.fill(arena)
            for direction, verify in (("write", "store"), ("read", "store"), ("read", "kernel")):
                keep(
                    run_page_cell(
                        pages,
                        arena,
                        direction=direction,
                        scale=scale,
                        pid=pid,
                        best=best[direction],
                        verify=verify,
                    )
                )
            if pages.geometry == largest:
                report["python"] = {
                    direction: python_share(pages, arena, direction=direction, scale=scale)
                    for direction in ("read", "write")
                }
                report["call_overhead"] = call_overhead_us(pages, arena, count=200)
                yardstick = arena.lease(1, scale.arena_size_bytes // 2)
                # Half of the arena: the other half holds the pages' leases.
                yard = memoryview(yardstick.array[0])
                report["pairs"] = []
                for direction in ("read", "write"):
                    report["pairs"].append(_pairs_in_half(server, yard, pages, arena, scale, direction))
                yardstick.release()
            report["integrity"][preset] = pages.verify_all(arena)
            pages.store.close()
    _summarise(report, say)
    return report


def _pairs_in_half(
    server: StreamServer, yard: memoryview, pages: Pages, arena: Arena, scale: Scale, direction: str
) -> dict[str, Any]:
    half = _HalfArena(arena, len(yard))
    return pairs(server, yard, pages, half, scale, direction)  # type: ignore[arg-type]


class _HalfArena:
    """The part of an arena that is free beside the stream's buffer: as large as that buffer."""

    def __init__(self, arena: Arena, size_bytes: int) -> None:
        self._arena = arena
        self.size_bytes = size_bytes
        self.lease = arena.lease


def _summarise(report: dict[str, Any], say: Any) -> None:
    say("")
    for pair in report["pairs"]:
        say(
            f"{format_size(pair['page_size_bytes'])} page {pair['direction']}: {pair['pages_gb_per_s']:.2f} GB/s = "
            f"{pair['ratio']:.2f} of the raw stream's {pair['stream_gb_per_s']:.2f} GB/s (sends of "
            f"{format_size(pair['stream_send_size_bytes'])}, {pair['pair_count']} pairs, medians)"
        )
    for direction, share in report["python"].items():
        say(
            f"Python {direction}: {share['python_share']:.1%} of the time of batches of "
            f"{format_size(share['batch_size_bytes'])}, {share['python_us_per_batch']:.0f} us a batch"
        )
    overhead = report["call_overhead"]
    say(
        f"get of one page: {overhead['get_one_page_us']:.0f} us, of which {overhead['python_us']:.0f} us in Python"
    )
    read = next(pair for pair in report["pairs"] if pair["direction"] == "read")
    report["floors"] = {
        "page_read_ratio": {"floor": FLOOR, "got": read["ratio"], "is_met": read["ratio"] >= FLOOR},
        "python_share": {
            "limit": PYTHON_SHARE_LIMIT,
            "got": max(share["python_share"] for share in report["python"].values()),
            "is_met": all(share["python_share"] < PYTHON_SHARE_LIMIT for share in report["python"].values()),
        },
    }
    for name, floor in report["floors"].items():
        say(f"{name}: {floor['got']:.3f}, {'met' if floor['is_met'] else 'MISSED'}")
    for preset, digest in report["integrity"].items():
        say(f"every {preset} page read back as put: sha256 {digest[:16]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a few seconds, figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything measured there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="interleaved pairs [7]")
    parser.add_argument(
        "--sizes", metavar="SIZE,…", help="of the block commands [4K,16K,64K,128K,256K,1M,4M]"
    )
    parser.add_argument("--depths", metavar="N,…", help="of the block commands [1,2,4,8,16,32,64]")
    parser.add_argument("--round-size", metavar="SIZE", help="bytes that each side of a pair moves [1G]")
    given = parser.parse_args(arguments)
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[1] if len(available) > 1 else available[0])
    scale = TOY if given.toy else FULL
    if given.rounds:
        scale = replace(scale, round_count=given.rounds)
    if given.sizes:
        sizes = tuple(parse_size(text, field="--sizes") for text in given.sizes.split(","))
        scale = replace(scale, op_sizes_bytes=sizes)
    if given.depths:
        scale = replace(scale, depths=tuple(int(text) for text in given.depths.split(",")))
    if given.round_size:
        scale = replace(scale, round_bytes=parse_size(given.round_size, field="--round-size"))
    report = run(scale, given.seed, cores=cores)
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
