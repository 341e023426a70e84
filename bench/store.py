"""What a KV namespace costs as it grows, from 10 thousand to 30 million pages, and its pages beside the raw device.

``.venv/bin/python bench/store.py``. Each namespace lies on a sparse file of its full size: table blocks are real,
written by a bulk loader, pages are holes. Files are mapped, so opening reads from the page cache. Times are the best
of several rounds, on the wall and in CPU time of this process: on a busy machine only the second says something.
Excluded: the loader. ``prefix us`` asks for keys that nobody asked for before: of a table many times the caches none
is there. ``swept us`` reads 64 MiB of something else first, which puts the interpreter's code and the page tables out
of the caches too; ``code warm`` asks for one key in between. Ends with a hash over what the look-ups answered. Pages
beside the raw device: see ``bench/store_pages.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdev
from kvdev.block.device import aligned_buffer
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.native.index import ENTRY_DTYPE, entries_per_block, format_table, seal
from kvdev.native.io import OPCODE_WRITE
from kvdev.store import KvNamespace, PageStore, Volume
from kvdev.store.plan import plan_namespace
from kvdev.store.superblock import Record
from kvdev.units import GIB, KIB, MIB, format_size

# The checkout, for the module beside this one, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.store_pages import FULL, TOY, line_of, page_geometry, run_pages

BLOCK_BYTES = 4096
STRIP_BYTES = 128 * KIB
SLOT_GEOMETRY = Geometry(model_id="bench", layer_count=1, kv_head_count=1, head_size=128, tokens_per_page=128)
"""64 KiB pages: 30 million of them fit a sparse file of any file system."""
LOAD_BLOCKS = 4096
TIMEOUT_S = 600.0
PREFIX_KEYS = 4096
PAGE_SIZES_BYTES = (256 * KIB, 4 * MIB)
LARGE_PAGE_COUNT = 10_000_000
"""Namespaces from this size on must meet the targets; the largest where none is."""
RATIO_FLOOR = 0.95
CEILINGS = {
    "open_s_per_10m": 2.0,
    "bytes_per_page": 100.0,
    "prefix_us": 150.0,
    "write_amplification": 1.02,
}
CONTAINS_FLOOR_M_PER_S = 40.0


def deadline() -> Deadline:
    return Deadline.after(TIMEOUT_S)


class KeySource:
    """Keys by number, the same in every run: no array of all of them is kept."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed)

    def keys(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """Four rounds of splitmix64 over number and word index."""
        with np.errstate(over="ignore"):
            x = (
                numbers[:, None] * np.uint64(4)
                + np.arange(4, dtype=np.uint64)
                + (self._seed << np.uint64(40))
            )
            x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return np.ascontiguousarray(x).view(np.uint8).reshape(-1, 32)


def bulk_load(volume: Volume, record: Record, source: KeySource, count: int) -> None:
    """Write table blocks as a checkpoint would: the first ``count`` slots live, used in a random order."""
    per_block = entries_per_block(BLOCK_BYTES)
    buffer = aligned_buffer(LOAD_BLOCKS * BLOCK_BYTES)
    rng = np.random.default_rng(count)
    for first in range(0, record.table_block_count, LOAD_BLOCKS):
        blocks = min(LOAD_BLOCKS, record.table_block_count - first)
        part = buffer[: blocks * BLOCK_BYTES]
        format_table(
            block_bytes=BLOCK_BYTES,
            first_block=first,
            block_count=blocks,
            slot_count=record.slot_count,
            uuid=record.namespace_uuid,
            out=part,
        )
        slots = np.arange(first * per_block, (first + blocks) * per_block, dtype=np.uint64)
        entries = np.zeros(len(slots), dtype=ENTRY_DTYPE)
        entries["slot_index"] = slots
        live = slots < count
        entries["key"][live] = source.keys(slots[live])
        entries["generation"][live] = slots[live] + np.uint64(1)
        entries["length"][live] = record.page_size_bytes
        entries["last_use"][live] = rng.integers(0, 1 << 20, int(live.sum()))
        entries["state"][live] = 1
        entries["algorithm"][live] = 1
        rows = part.reshape(blocks, BLOCK_BYTES)
        rows[:, 64 : 64 + per_block * 64] = entries.view(np.uint8).reshape(blocks, -1)
        if first + blocks == record.table_block_count:
            # The places behind the last slot are not entries.
            used = record.slot_count - (record.table_block_count - 1) * per_block
            rows[-1, 64 + used * 64 :] = 0
        seal(part, BLOCK_BYTES)
        volume.io.transfer(OPCODE_WRITE, record.table_slba + first, part, deadline())


def sparse_device(folder: Path, page_count: int) -> MemoryDevice:
    """A device over a mapped file that holds only what is written to it."""
    plan = plan_namespace(
        page_size_bytes=SLOT_GEOMETRY.page_size_bytes,
        quota_pages=page_count,
        block_size_bytes=BLOCK_BYTES,
        strip_size_bytes=STRIP_BYTES,
    )
    size = -(-(plan.total_bytes + 64 * STRIP_BYTES) // STRIP_BYTES) * STRIP_BYTES
    path = folder / f"pages{page_count}"
    path.touch()
    os.truncate(path, size)
    return MemoryDevice(size_bytes=size, name=path.name, data=np.memmap(path, dtype=np.uint8, mode="r+"))


def best_of(
    rounds: int, call: Callable[[], Any], prepare: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Shortest wall time and shortest CPU time of a call, in seconds."""
    walls, cpus = [], []
    for _ in range(rounds):
        prepare()
        wall, cpu = time.perf_counter(), _cpu_s()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(_cpu_s() - cpu)
    return min(walls), min(cpus)


def _cpu_s() -> float:
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


class Probe:
    """The look-ups of one namespace and a hash over their answers."""

    def __init__(
        self, namespace: KvNamespace, source: KeySource, page_count: int, batch: int, seed: int
    ) -> None:
        self._namespace = namespace
        self._source = source
        self._page_count = page_count
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._cold = np.ones(64 * MIB, dtype=np.uint8)
        self.digest = hashlib.sha256()
        self._keys = np.zeros((0, 32), dtype=np.uint8)

    def _numbers(self, count: int) -> npt.NDArray[np.uint64]:
        return self._rng.integers(0, self._page_count, count, dtype=np.uint64)

    def _take_hits(self) -> None:
        self._keys = self._source.keys(self._numbers(self._batch))

    def _take_misses(self) -> None:
        self._keys = self._source.keys(self._numbers(self._batch) + np.uint64(1 << 33))

    def _take_prefix(self) -> None:
        self._keys = self._source.keys(self._numbers(PREFIX_KEYS))
        self._cold.max()  # twice the caches of most machines pass by; read, so that no write-back is timed

    def _take_prefix_lukewarm(self) -> None:
        """Keys and what the index has of them are cold, the code that looks for them is not."""
        self._take_prefix()
        self._namespace.longest_prefix(self._source.keys(self._numbers(1)))

    def _take_prefix_fresh(self) -> None:
        """Keys that nobody asked for before: in a table of many times the caches they, and they alone, are cold."""
        self._keys = self._source.keys(self._numbers(PREFIX_KEYS))

    def _contains(self, *, expected: bool) -> None:
        found = self._namespace.contains(self._keys)
        assert bool((found == expected).all())
        self.digest.update(found.tobytes())

    def _prefix(self) -> None:
        length = self._namespace.longest_prefix(self._keys)
        assert length == PREFIX_KEYS
        self.digest.update(length.to_bytes(4, "little"))

    def run(self, rounds: int) -> dict[str, float]:
        hit = best_of(rounds, lambda: self._contains(expected=True), self._take_hits)
        miss = best_of(rounds, lambda: self._contains(expected=False), self._take_misses)
        prefix = best_of(4 * rounds, self._prefix, self._take_prefix)
        lukewarm = best_of(4 * rounds, self._prefix, self._take_prefix_lukewarm)
        fresh = best_of(4 * rounds, self._prefix, self._take_prefix_fresh)
        return {
            "contains_hit_m_per_s": self._batch / hit[0] / 1e6,
            "contains_hit_cpu_ns": hit[1] / self._batch * 1e9,
            "contains_miss_m_per_s": self._batch / miss[0] / 1e6,
            "contains_miss_cpu_ns": miss[1] / self._batch * 1e9,
            "prefix_us": fresh[0] * 1e6,
            "prefix_cpu_us": fresh[1] * 1e6,
            "prefix_swept_us": prefix[0] * 1e6,
            "prefix_swept_code_warm_us": lukewarm[0] * 1e6,
        }


def run_size(folder: Path, page_count: int, *, batch: int, rounds: int, seed: int) -> dict[str, Any]:
    device = sparse_device(folder, page_count)
    volume = Volume.create(
        [device], name=f"bench{page_count}", strip_size_bytes=STRIP_BYTES, deadline=deadline()
    )
    info = volume.create_namespace("kv", SLOT_GEOMETRY, quota_pages=page_count, deadline=deadline())
    source = KeySource(seed)
    bulk_load(volume, info.record, source, page_count)
    opened: list[KvNamespace] = []

    def reopen() -> None:
        for namespace in opened:
            namespace.abandon()
        opened.clear()

    def open_it() -> None:
        opened.append(volume.open_namespace("kv", deadline=deadline()))

    open_s = best_of(2, open_it, reopen)
    namespace = opened[0]
    stat = namespace.stat().index
    assert stat.live_count == page_count and not namespace.open_report.damaged_table_blocks
    table_bytes = info.record.table_block_count * BLOCK_BYTES
    cell: dict[str, Any] = {
        "pages": page_count,
        "open_s": open_s[0],
        "open_cpu_s": open_s[1],
        "bytes_per_page": (stat.memory_bytes + table_bytes) / page_count,
        "huge_page_bytes": huge_page_bytes(),
    }
    probe = Probe(namespace, source, page_count, min(batch, max(page_count, 1024)), seed)
    cell.update(probe.run(rounds))
    cell["answers"] = probe.digest.hexdigest()[:16]
    reopen()
    Path(folder / f"pages{page_count}").unlink()
    return cell


def write_amplification(page_bytes_wanted: int, page_count: int) -> dict[str, float]:
    """Bytes written to the members for each byte put, metadata and checkpoints included, with flushes."""
    geometry = page_geometry(page_bytes_wanted)
    size = page_bytes_wanted * (page_count + 16) + 64 * MIB
    volume = Volume.create(
        [MemoryDevice(size_bytes=size // STRIP_BYTES * STRIP_BYTES)],
        name="amplify",
        strip_size_bytes=STRIP_BYTES,
        deadline=deadline(),
    )
    volume.create_namespace("kv", geometry, quota_pages=page_count, deadline=deadline())
    store = PageStore(volume.open_namespace("kv", deadline=deadline()))
    before = int(volume.io.written_bytes.sum())
    batch = max(1, min(16 * MIB // page_bytes_wanted, page_count))
    pages = np.zeros((batch, page_bytes_wanted), dtype=np.uint8)
    source = KeySource(3)
    put = 0
    for start in range(0, 2 * page_count, batch):
        result = store.put(source.keys(np.arange(start, start + batch, dtype=np.uint64)), pages)
        assert result.failure is None, result.failure
        store.flush()
        put += pages.nbytes
    store.close()
    written = int(volume.io.written_bytes.sum()) - before
    return {"page_bytes": page_bytes_wanted, "put_bytes": put, "write_amplification": written / put}


def huge_page_bytes() -> int:
    """Memory of this process that lies in huge pages; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("AnonHugePages:")), 0)


def summarise(
    cells: list[dict[str, Any]],
    amplification: list[dict[str, float]],
    pages: list[dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    say(
        f"{'pages':>10} {'open s':>8} {'cpu s':>7} {'B/page':>7} {'huge MiB':>8} {'hit M/s':>8} {'cpu ns':>7} "
        f"{'miss M/s':>8} {'cpu ns':>7} {'prefix us':>9} {'cpu us':>7} {'swept us':>8} {'code warm':>9}"
    )
    for cell in cells:
        say(
            f"{cell['pages']:>10} {cell['open_s']:>8.3f} {cell['open_cpu_s']:>7.3f} {cell['bytes_per_page']:>7.1f} "
            f"{cell['huge_page_bytes'] / MIB:>8.0f} "
            f"{cell['contains_hit_m_per_s']:>8.1f} {cell['contains_hit_cpu_ns']:>7.1f} "
            f"{cell['contains_miss_m_per_s']:>8.1f} {cell['contains_miss_cpu_ns']:>7.1f} "
            f"{cell['prefix_us']:>9.0f} {cell['prefix_cpu_us']:>7.0f} {cell['prefix_swept_us']:>8.0f} "
            f"{cell['prefix_swept_code_warm_us']:>9.0f}"
        )
    first, last = cells[0], cells[-1]
    growth = (
        f"{name} x{last[field] / first[field]:.1f}"
        for name, field in (
            ("open", "open_s"),
            ("a key that is there", "contains_hit_cpu_ns"),
            ("one that is not", "contains_miss_cpu_ns"),
            ("prefix", "prefix_us"),
        )
    )
    say(
        f"from {first['pages']} to {last['pages']} pages, x{last['pages'] / first['pages']:.0f}: {', '.join(growth)}"
    )
    for row in amplification:
        say(
            f"write amplification at {format_size(int(row['page_bytes']))} pages: {row['write_amplification']:.4f} "
            f"({format_size(int(row['put_bytes']))} put, flushed every 16 MiB)"
        )
    if pages:
        say(f"raw device and store: {pages[0]['device']}")
    for cell in pages:
        say(line_of(cell))


def targets(
    cells: list[dict[str, Any]], amplification: list[dict[str, float]], pages: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The worst of the large namespaces, and of the pages, against what is asked of them."""
    large = [cell for cell in cells if cell["pages"] >= LARGE_PAGE_COUNT] or cells[-1:]
    got = {
        "open_s_per_10m": max(cell["open_s"] * 1e7 / cell["pages"] for cell in large),
        "bytes_per_page": max(cell["bytes_per_page"] for cell in large),
        "prefix_us": max(cell["prefix_us"] for cell in large),
        "write_amplification": amplification[-1]["write_amplification"],
    }
    rows = {
        name: {"target": CEILINGS[name], "got": value, "is_met": value < CEILINGS[name]}
        for name, value in got.items()
    }
    floors = {
        "contains_m_per_s": (CONTAINS_FLOOR_M_PER_S, min(cell["contains_hit_m_per_s"] for cell in large))
    }
    for cell in pages:
        name = f"{cell['what']}_{cell['page_bytes'] // KIB}_kib_ratio"
        floors[name] = (RATIO_FLOOR, cell["ratio"])
    for name, (floor, value) in floors.items():
        rows[name] = {"target": floor, "got": value, "is_met": value >= floor}
    return rows


def machine(seed: int) -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    return {
        "cpu": model,
        "cpu_count": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvdev": kvdev.__version__,
        "load_average": os.getloadavg()[0],
        "seed": seed,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a few seconds, figures mean nothing")
    parser.add_argument("--pages", type=float, action="append", help="sizes [1e4 1e5 1e6 1e7 3e7]")
    parser.add_argument("--folder", help="where the files go [a temporary folder]")
    parser.add_argument(
        "--device",
        metavar="URI",
        help="pages go to this device, whose content is DESTROYED [a file of 1.1 GiB in the folder]",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything measured there")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    sizes = [int(pages) for pages in given.pages or ([1e3, 1e4] if given.toy else [1e4, 1e5, 1e6, 1e7, 3e7])]
    report: dict[str, Any] = {"machine": machine(given.seed)}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report["cells"] = [
            run_size(
                Path(folder),
                pages,
                batch=1 << 14 if given.toy else 1 << 20,
                rounds=2 if given.toy else 7,
                seed=given.seed,
            )
            for pages in sizes
        ]
        report["pages"] = [
            cell
            for page_size in PAGE_SIZES_BYTES
            for cell in run_pages(
                Path(folder), given.device, page_size, TOY if given.toy else FULL, seed=given.seed
            )
        ]
    amplified = (
        ((256 * KIB, 32), (MIB, 32)) if given.toy else ((256 * KIB, GIB // (256 * KIB)), (4 * MIB, 256))
    )
    report["write_amplification"] = [write_amplification(size, count) for size, count in amplified]
    measured = (report["cells"], report["write_amplification"], report["pages"])
    summarise(*measured, print)
    report["targets"] = targets(*measured)
    for name, row in report["targets"].items():
        print(f"{name}: {row['got']:.3f} of {row['target']}: {'met' if row['is_met'] else 'MISSED'}")
    print("answers: " + " ".join(cell["answers"] for cell in [*report["cells"], *report["pages"][::2]]))
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
