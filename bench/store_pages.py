"""Pages through a store in turn with the raw device under it: same engine, same memory, as many commands in flight.

Not here: the command line, and what an index costs as it grows (``bench/store.py``).
Raw rounds are one batch of commands of a strip each, so the device never runs dry, to the very blocks of the store's
slots, written while those are free: some places of a disk are faster than others. Pages go in batches, with checksums,
and a round of puts ends with the store's flush, a raw one with the device's. A raw round touches no byte that it reads;
one more has a thread beside it that checksums as many of them, which is what any use of the bytes costs where the
device and the processors share memory. Excluded: opening, filling the device, deleting the pages between rounds.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.block.device import flush, run_batch
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.native.io import IO_DTYPE, OPCODE_READ, OPCODE_WRITE, IoArray
from kvdev.session import Session
from kvdev.store import PageStore, Volume
from kvdev.store.extents import slot_map_of
from kvdev.store.plan import plan_namespace
from kvdev.units import KIB, MIB, format_size

STRIP_BYTES = 128 * KIB
TIMEOUT_S = 600.0
FILL_BYTES = 16 * MIB


@dataclass(frozen=True)
class Traffic:
    """How much a round moves, and how many rounds there are."""

    round_bytes: int
    batch_bytes: int
    round_count: int


FULL = Traffic(round_bytes=512 * MIB, batch_bytes=64 * MIB, round_count=7)
TOY = Traffic(round_bytes=16 * MIB, batch_bytes=8 * MIB, round_count=2)


def deadline() -> Deadline:
    return Deadline.after(TIMEOUT_S)


def page_geometry(page_size_bytes: int) -> Geometry:
    """Pages of 64 KiB a layer."""
    geometry = Geometry(
        model_id="bench",
        layer_count=page_size_bytes // (64 * KIB),
        kv_head_count=1,
        head_size=128,
        tokens_per_page=128,
    )
    assert geometry.page_size_bytes == page_size_bytes
    return geometry


def needed_bytes(page_size_bytes: int, traffic: Traffic) -> int:
    """Size of a device with room for the store."""
    plan = plan_namespace(
        page_size_bytes=page_size_bytes,
        quota_pages=traffic.round_bytes // page_size_bytes,
        block_size_bytes=4096,
        strip_size_bytes=STRIP_BYTES,
    )
    return -(-plan.total_bytes // MIB) * MIB + 64 * MIB


def make_file(path: Path, size_bytes: int) -> None:
    """A file whose blocks are all allocated and written: what is measured is not the file system's first write."""
    with path.open("wb") as file:
        for start in range(0, size_bytes, FILL_BYTES):
            file.write(bytes(min(FILL_BYTES, size_bytes - start)))
        file.flush()
        os.fsync(file.fileno())


class Beside:
    """A store of one page size, and the blocks of its slots without it."""

    def __init__(
        self, session: Session, uri: str, page_size_bytes: int, traffic: Traffic, *, seed: int
    ) -> None:
        self._traffic = traffic
        self._page_size_bytes = page_size_bytes
        self._page_count = traffic.round_bytes // page_size_bytes
        self._batch = traffic.batch_bytes // page_size_bytes
        self._device = session.open_device(uri)
        size_bytes = self._device.block_count * self._device.block_size_bytes
        if size_bytes < needed_bytes(page_size_bytes, traffic):
            raise SystemExit(
                f"bench: {uri}: expected room for {format_size(needed_bytes(page_size_bytes, traffic))}, got "
                f"{format_size(size_bytes)}; give a larger device"
            )
        self._arena = session.make_arena(traffic.batch_bytes)
        self._lease = self._arena.lease(self._batch, page_size_bytes)
        rng = np.random.default_rng(seed)
        self._lease.array[:] = np.frombuffer(rng.bytes(traffic.batch_bytes), dtype=np.uint8).reshape(
            self._batch, -1
        )
        self._wanted = self._lease.array.copy()
        volume = Volume.create(
            [self._device],
            name="bench",
            strip_size_bytes=STRIP_BYTES,
            destroy=frozenset([self._device.uri]),
            deadline=deadline(),
        )
        info = volume.create_namespace(
            "kv", page_geometry(page_size_bytes), quota_pages=self._page_count, deadline=deadline()
        )
        self.store = PageStore(volume.open_namespace("kv", deadline=deadline()), timeout_s=TIMEOUT_S)
        slot_map = slot_map_of(info.record)
        self._slot_slba = slot_map.slbas(np.arange(self._page_count, dtype=np.int64))
        self._unit_blocks = volume.io.unit_blocks
        self._user = ThreadPoolExecutor(1, thread_name_prefix="bench-user")
        self._keys = np.zeros((self._page_count, 32), dtype=np.uint8)
        self._keys[:, :8] = np.arange(self._page_count, dtype="<u8").view(np.uint8).reshape(-1, 8)

    # --- one round each ----------------------------------------------------------------------

    def _raw_ios(self, opcode: int) -> IoArray:
        unit = self._unit_blocks * self._device.block_size_bytes
        numbers = np.arange(self._traffic.round_bytes // unit, dtype=np.uint64)
        ios: IoArray = np.zeros(len(numbers), dtype=IO_DTYPE)
        ios["opcode"], ios["device_index"] = opcode, self._device.device_index
        per_page = self._page_size_bytes // unit
        ios["slba"] = np.repeat(self._slot_slba, per_page) + numbers % np.uint64(per_page) * np.uint64(
            self._unit_blocks
        )
        ios["lba_count"], ios["byte_count"] = self._unit_blocks, unit
        ios["buf_addr"] = np.uint64(self._lease.array.ctypes.data) + (
            numbers * np.uint64(unit) % np.uint64(self._traffic.batch_bytes)
        )
        return ios

    def raw(self, opcode: int) -> None:
        done = run_batch(self._device.queue, self._raw_ios(opcode), deadline())
        assert not done["error"].any(), "a raw command failed"
        if opcode == OPCODE_WRITE:
            flush(self._device, deadline())

    def raw_used(self) -> None:
        """Read as ``raw`` does, while a thread passes over as many of those bytes."""

        def use() -> None:
            for _ in range(0, self._traffic.round_bytes, self._traffic.batch_bytes):
                crc32c(self._lease.array)

        used = self._user.submit(use)
        self.raw(OPCODE_READ)
        used.result()

    def put(self) -> None:
        for keys in self._batches():
            result = self.store.put(keys, self._lease.array[: len(keys)])
            if result.failure is not None:
                raise result.failure
        self.store.flush()

    def get(self) -> None:
        for keys in self._batches():
            result = self.store.get(keys, self._lease.array[: len(keys)])
            if result.hit_count != len(keys):
                raise result.failure or AssertionError("a page that was put is missed")

    def _batches(self) -> list[npt.NDArray[np.uint8]]:
        return [self._keys[start : start + self._batch] for start in range(0, self._page_count, self._batch)]

    def clear(self) -> None:
        """Delete the pages, durably, so that no round waits for slots of the round before."""
        self.store.delete(self._keys)
        self.store.flush()

    # --- rounds in turn ------------------------------------------------------------------------

    def _timed(self, call: Callable[[], None]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        call()
        return time.perf_counter() - wall, time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - cpu

    def _check(self) -> None:
        """What was read is what was written."""
        if not np.array_equal(self._lease.array, self._wanted):
            raise SystemExit("bench: bytes that were read differ from those that were written")

    def measure(self) -> list[dict[str, Any]]:
        """A cell for puts and one for gets, each beside the raw device's."""
        steps: dict[str, Callable[[], None]] = {
            "raw write": lambda: self.raw(OPCODE_WRITE),
            "raw read": lambda: self.raw(OPCODE_READ),
            "raw read, used": self.raw_used,
            "put": self.put,
            "get": self.get,
        }
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        commits: list[int] = []
        for round_index in range(self._traffic.round_count + 1):  # the first one warms up
            before = self.store.namespace.commit_count
            for name, call in steps.items():
                is_read = name in ("raw read", "raw read, used", "get")
                if is_read:
                    self._lease.array[:] = 0
                sample = self._timed(call)
                if is_read:
                    self._check()
                if round_index:
                    samples[name].append(sample)
            if round_index:
                commits.append(self.store.namespace.commit_count - before)
            self.clear()
        return [
            self._cell("put", samples["put"], samples["raw write"], statistics.mean(commits)),
            {
                **self._cell("get", samples["get"], samples["raw read"], 0),
                "used_ratio": self._ratio(samples["get"], samples["raw read, used"]),
            },
        ]

    @staticmethod
    def _ratio(ours: list[tuple[float, float]], raw: list[tuple[float, float]]) -> float:
        return statistics.median(theirs[0] / mine[0] for mine, theirs in zip(ours, raw, strict=True))

    def _cell(
        self, what: str, ours: list[tuple[float, float]], raw: list[tuple[float, float]], commits: float
    ) -> dict[str, Any]:
        size = self._traffic.round_bytes
        ratios = [theirs[0] / mine[0] for mine, theirs in zip(ours, raw, strict=True)]
        return {
            "what": what,
            "page_bytes": self._page_size_bytes,
            "gb_per_s": size / statistics.median(wall for wall, _ in ours) / 1e9,
            "raw_gb_per_s": size / statistics.median(wall for wall, _ in raw) / 1e9,
            "ratio": self._ratio(ours, raw),
            "pair_ratios": ratios,
            "cpu_s_per_gb": statistics.median(cpu for _, cpu in ours) / size * 1e9,
            "raw_cpu_s_per_gb": statistics.median(cpu for _, cpu in raw) / size * 1e9,
            "commits_per_round": commits,
        }

    def close(self) -> str:
        """Hash of every page, read once more."""
        self.put()
        digest = hashlib.sha256()
        for keys in self._batches():
            self._lease.array[:] = 0
            result = self.store.get(keys, self._lease.array[: len(keys)])
            assert result.hit_count == len(keys), "a page that was put is missed"
            digest.update(self._lease.array[: len(keys)].data)
        self.store.close()
        self._user.shutdown()
        self._lease.release()
        self._arena.close()
        return digest.hexdigest()[:16]


def run_pages(
    folder: Path, device_uri: str | None, page_size_bytes: int, traffic: Traffic, *, seed: int
) -> list[dict[str, Any]]:
    """Puts and gets of one page size beside the raw device: a file in ``folder`` where none is given."""
    path = folder / f"device{page_size_bytes}"
    if device_uri is None:
        make_file(path, needed_bytes(page_size_bytes, traffic))
    with Session() as session:
        beside = Beside(session, device_uri or f"file:{path}", page_size_bytes, traffic, seed=seed)
        cells = beside.measure()
        answers = beside.close()
        for cell in cells:
            cell["device"] = getattr(beside._device, "description", beside._device.uri)
            cell["answers"] = answers
    path.unlink(missing_ok=True)
    return cells


def line_of(cell: dict[str, Any]) -> str:
    low, high = min(cell["pair_ratios"]), max(cell["pair_ratios"])
    commits = f", {cell['commits_per_round']:.1f} commits a round" if cell["what"] == "put" else ""
    used = f", {cell['used_ratio']:.3f} of it with its bytes used" if "used_ratio" in cell else ""
    return (
        f"{cell['what']} of {format_size(cell['page_bytes'])} pages: {cell['gb_per_s']:.2f} GB/s = "
        f"{cell['ratio']:.3f} of the raw device's {cell['raw_gb_per_s']:.2f} (pairs {low:.2f} to {high:.2f}){used}, "
        f"CPU {cell['cpu_s_per_gb']:.3f} and {cell['raw_cpu_s_per_gb']:.3f} s/GB{commits}"
    )
