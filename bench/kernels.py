"""Benchmark of the page kernels: pack and unpack with CRC32C against copies and plain gathers, in one interleaved run.

GB/s are payload bytes per second. The ceiling is our own streaming copy of contiguous memory without a checksum, by as
many threads; the rows of a shape are sampled in turn, so that whatever else the machine does meets all of them alike.
Each shape runs on one thread and on all cores. Where a shape has a target, the run says whether it was met. Ends with a
comparison of the kernels' pages with the plain gather's and a hash of them.
Run: .venv/bin/python bench/kernels.py [--toy] [--json] [--threads N,…] [--shapes TEXT] [--backend NAME]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.staging import Arena
from kvdev_kernels import PagedLayout, PageKernels

SEED = 20260131
Pages = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """One engine layout: geometry, tokens per block, payload of a sample."""

    name: str
    geometry: Geometry
    block_size: int
    axes: str
    targets: tuple[float, float] = (0.0, 0.0)
    """Least ratio of pack + CRC32C to the ceiling, on one thread and on all cores; 0 for none."""


def shapes(*, is_toy: bool) -> list[Shape]:
    def mha(layers: int, heads: int, tokens: int) -> Geometry:
        return Geometry(
            model_id="bench", layer_count=layers, kv_head_count=heads, head_size=128, tokens_per_page=tokens
        )

    def mla(dtype: str) -> Geometry:
        return Geometry(
            model_id="bench",
            layer_count=2 if is_toy else 61,
            kv_head_count=1,
            head_size=576,
            dtype=dtype,
            tokens_per_page=64,
            attention="mla",
        )

    layers = 2 if is_toy else 64
    return [
        Shape("GQA 8 heads, 16 tokens: 32 KiB runs", mha(layers, 8, 16), 16, "KBNHD", (0.85, 0.95)),
        Shape("MLA bf16, 16 tokens: 18 KiB runs", mla("bf16"), 16, "BND"),
        Shape("MLA fp8, 16 tokens: 9 KiB runs", mla("fp8_e4m3"), 16, "BND", (0.75, 0.75)),
        Shape("medium, 512 tokens: 1 MiB pages, 4 KiB runs", Geometry.preset("medium"), 16, "KBNHD"),
        Shape("token rows, 8 heads: 2 KiB runs", mha(layers, 8, 64), 1, "BHD", (0.6, 0.6)),
        Shape("HND 8 heads, 16 tokens: 256 B runs", mha(layers, 8, 16), 16, "KBHND"),
    ]


class Bench:
    """The tensors, pages and rows of one shape."""

    def __init__(self, shape: Shape, *, payload_bytes: int) -> None:
        self.shape = shape
        geometry = shape.geometry
        self.page_count = max(1, payload_bytes // geometry.page_size_bytes)
        self.payload_bytes = self.page_count * geometry.page_size_bytes
        per_page = geometry.tokens_per_page // shape.block_size
        # Twice as many blocks as are moved, in random order: nothing to merge, little left in the caches.
        blocks = 2 * self.page_count * per_page
        rng = np.random.default_rng(SEED)
        extents = {
            "K": 2,
            "B": blocks,
            "N": shape.block_size,
            "H": geometry.kv_head_count,
            "D": geometry.head_size,
        }
        size = tuple(extents[axis] for axis in shape.axes)
        count = geometry.layer_count * (1 if "K" in shape.axes or geometry.attention == "mla" else 2)
        item = {1: np.uint8, 2: np.uint16}[geometry.dtype_size_bytes]
        pool = Arena(2 * self.payload_bytes + (1 << 21))
        memory = pool.lease(1, 2 * self.payload_bytes).array[0]
        for start in range(0, memory.size, 1 << 24):
            part = memory[start : start + (1 << 24)]
            part[:] = rng.integers(0, 256, part.size, dtype=np.uint8)
        self.tensors = list(memory.view(item).reshape(count, *size))
        self.layout = PagedLayout.from_axes(geometry, self.tensors, shape.axes)
        self.table = rng.permutation(blocks)[: self.page_count * per_page].reshape(self.page_count, per_page)
        self.pages = Arena(self.payload_bytes + (1 << 21)).lease(self.page_count, geometry.page_size_bytes)
        self.linear = memory[: self.payload_bytes].reshape(self.page_count, geometry.page_size_bytes)
        row = geometry.page_size_bytes
        opaque = Geometry(
            model_id="bench", layer_count=1, kv_head_count=1, head_size=512, dtype="uint8",
            tokens_per_page=row // 512, attention="mla",
        )  # fmt: skip
        whole = self.linear.reshape(self.page_count, row // 512, 512)
        self.linear_layout = PagedLayout.from_axes(opaque, [whole], "BND")
        self.linear_table = np.arange(self.page_count).reshape(-1, 1)

    def rows(self, kernels: PageKernels) -> dict[str, Callable[[], Any]]:
        layout, table, pages = self.layout, self.table, self.pages
        crc = kernels.pack(layout, table, pages)
        rows: dict[str, Callable[[], Any]] = {
            "streaming copy (ceiling)": lambda: kernels.pack(
                self.linear_layout, self.linear_table, pages, checksums=False
            ),
            "memcpy (numpy)": lambda: np.copyto(pages.array, self.linear),
            "pack": lambda: kernels.pack(layout, table, pages, checksums=False),
            "pack + CRC32C": lambda: kernels.pack(layout, table, pages),
            "unpack + verify": lambda: kernels.unpack(layout, table, pages, verify=crc),
            "plain gather (numpy take)": self.take,
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            tensors = [torch.from_numpy(t.view(np.int16) if t.itemsize == 2 else t) for t in self.tensors]
            index = torch.from_numpy(self.table.reshape(-1))
            axis = self.shape.axes.index("B")
            rows["torch index_select"] = lambda: [torch.index_select(t, axis, index) for t in tensors]
        return rows

    def take(self) -> None:
        """What an engine without kernels does: one indexed copy per plane and page."""
        axis = self.shape.axes.index("B")
        geometry = self.shape.geometry
        is_hnd = (
            self.shape.axes.index("H") < self.shape.axes.index("N")
            if "N" in self.shape.axes and "H" in (self.shape.axes)
            else False
        )
        planes = [p for t in self.tensors for p in (t if axis == 1 else [t])]
        out = self.pages.array
        for page, blocks in enumerate(self.table):
            target = out[page].reshape(len(planes), geometry.page_size_bytes // len(planes))
            for index, plane in enumerate(planes):
                picked = plane[blocks]
                target[index] = (
                    (picked.transpose(0, 2, 1, 3).copy() if is_hnd else picked).reshape(-1).view(np.uint8)
                )

    def check(self, kernels: PageKernels) -> str:
        """The kernels' pages equal the plain gather's; their hash."""
        self.take()
        expected = hashlib.blake2b(self.pages.array.tobytes(), digest_size=8).hexdigest()
        sums = [crc32c(page) for page in self.pages.array]
        self.pages.array[:] = 0
        packed = kernels.pack(self.layout, self.table, self.pages)
        if packed is None or packed.tolist() != sums:
            raise SystemExit(f"{self.shape.name}: checksums differ")
        if hashlib.blake2b(self.pages.array.tobytes(), digest_size=8).hexdigest() != expected:
            raise SystemExit(f"{self.shape.name}: pages differ")
        return expected


def measure(bench: Bench, kernels: PageKernels, samples: int) -> dict[str, dict[str, float]]:
    rows = bench.rows(kernels)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for run in rows.values():
        run()
    for _ in range(samples):
        for name, run in rows.items():
            started = time.perf_counter_ns()
            run()
            times[name].append((time.perf_counter_ns() - started) / 1e9)
    ceiling = bench.payload_bytes / min(times["streaming copy (ceiling)"]) / 1e9
    return {
        name: {
            "gb_per_s_best": round(bench.payload_bytes / min(values) / 1e9, 2),
            "gb_per_s_median": round(bench.payload_bytes / statistics.median(values) / 1e9, 2),
            "ratio_to_ceiling": round(bench.payload_bytes / min(values) / 1e9 / ceiling, 3),
        }
        for name, values in times.items()
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a fraction of a second, to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", default="", help="numbers of threads; 1 and all cores when not given")
    parser.add_argument("--shapes", default="", help="only shapes whose name has this text")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--torch", action="store_true", help="fail where torch.index_select cannot be compared with"
    )
    return parser.parse_args(arguments)


def import_torch(*, is_required: bool) -> Any:
    try:
        import torch
    except ImportError:
        if is_required:
            raise
        return None
    return torch


def verdict(shape: Shape, threads: int, rows: dict[str, dict[str, float]]) -> dict[str, Any] | None:
    target = shape.targets[0 if threads == 1 else 1]
    ratio = rows["pack + CRC32C"]["ratio_to_ceiling"]
    return {"target": target, "ratio": ratio, "is_met": ratio >= target} if target else None


def print_shape(entry: dict[str, Any]) -> None:
    print(
        f"{entry['name']}; {entry['threads']} thread(s), payload {entry['payload_bytes'] >> 20} MiB on "
        f"{entry['backing']}"
    )
    for name, row in entry["rows"].items():
        print(
            f"  {name:28} best {row['gb_per_s_best']:6.2f}  median {row['gb_per_s_median']:6.2f} GB/s"
            f"  {row['ratio_to_ceiling']:.2f} of the ceiling"
        )
    if entry["target"]:
        told = "met" if entry["target"]["is_met"] else "MISSED"
        print(f"  target {entry['target']['target']:.2f} of the ceiling with CRC32C: {told}")
    print(f"  pages {entry['pages_hash']}")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch = import_torch(is_required=options.torch)
    cores = len(os.sched_getaffinity(0))
    counts = [int(text) for text in options.threads.split(",") if text] or sorted({1, cores})
    started = time.monotonic()
    payload = (1 << 20) if options.toy else (96 << 20)
    samples = options.samples or (2 if options.toy else 15)
    every = {count: PageKernels(options.backend, thread_count=count) for count in counts}
    report: dict[str, Any] = {
        "machine": machine(SEED),
        "cpus": cores,
        "torch": torch.__version__ if torch else None,
        "backend": every[counts[0]].backend,
        "tier": every[counts[0]].tier,
        "samples": samples,
        "shapes": [],
    }
    for shape in shapes(is_toy=options.toy):
        if options.shapes not in shape.name:
            continue
        bench = Bench(shape, payload_bytes=payload)
        for count, kernels in every.items():
            if torch:
                torch.set_num_threads(count)
            rows = measure(bench, kernels, samples)
            entry = {
                "name": shape.name,
                "threads": count,
                "page_size_bytes": shape.geometry.page_size_bytes,
                "run_size_bytes": bench.layout.run_size_bytes,
                "payload_bytes": bench.payload_bytes,
                "backing": bench.pages._arena.backing,
                "rows": rows,
                "target": verdict(shape, count, rows),
                "pages_hash": bench.check(kernels),
            }
            report["shapes"].append(entry)
            if not options.json:
                print_shape(entry)
    report["elapsed_s"] = round(time.monotonic() - started, 2)
    if options.json:
        print(json.dumps(report))
    for kernels in every.values():
        kernels.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
