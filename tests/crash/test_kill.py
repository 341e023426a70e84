"""kill -9 of a real process between and during flushes: what it said was flushed is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="kill", layer_count=1, kv_head_count=1, head_size=64, tokens_per_page=128)
BATCH = 4
QUOTA = 400

WRITER = """
import sys
import numpy as np
from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.store import PageStore, Volume

first = int(sys.argv[1])
devices = [FileDevice(path) for path in sys.argv[2:]]
deadline = Deadline.after(60)
store = PageStore(Volume.open(devices, deadline=deadline).open_namespace("kv", deadline=deadline))
size = store.page_size_bytes
for batch in range(first, 1000):
    numbers = np.arange(batch * 4, batch * 4 + 4)
    keys = np.zeros((4, 32), dtype=np.uint8)
    keys[:, :8] = numbers.astype("<u8").view(np.uint8).reshape(4, 8)
    pages = np.stack([np.random.default_rng(int(n)).integers(0, 256, size, dtype=np.uint8) for n in numbers])
    assert store.put(keys, pages).stored_count == 4
    store.flush()
    print(batch, flush=True)
"""


def deadline() -> Deadline:
    return Deadline.after(60)


def keys_of(
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :8] = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    return keys


def test_writer_when_killed_loses_nothing_it_called_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = [tmp_path / f"m{index}" for index in range(2)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(16 << 20)
    members = [FileDevice(path) for path in paths]
    volume = Volume.create(members, name="v", strip_size_bytes=16384, deadline=deadline())
    volume.create_namespace("kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=12, deadline=deadline())
    for member in members:
        member.close()
    last = -1
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(last + 1), *map(str, paths)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        try:
            assert writer.stdout is not None
            for _ in range(int(rng.integers(3, 25))):
                line = writer.stdout.readline()
                assert line, "the writer ended by itself"
                last = int(line)
        finally:
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read() if writer.stdout is not None else ""
            writer.wait(timeout=20)
        last = max([last, *(int(word) for word in rest.split() if word.isdigit())])
        devices = [FileDevice(path) for path in reversed(paths)]
        store = PageStore(Volume.open(devices, deadline=deadline()).open_namespace("kv", deadline=deadline()))
        numbers = np.arange((last + 1) * BATCH)[-QUOTA:]
        pages = np.zeros((len(numbers), GEOMETRY.page_size_bytes), dtype=np.uint8)
        # The batch under way when the writer died may have pushed out as many of the oldest.
        keys = keys_of(numbers)[BATCH if len(numbers) == QUOTA else 0 :]
        numbers = numbers[-len(keys) :]
        assert store.get(keys, pages[: len(keys)]).hit_count == len(keys)
        for number, page in zip(numbers.tolist(), pages, strict=False):
            expected = np.random.default_rng(number).integers(0, 256, len(page), dtype=np.uint8)
            assert np.array_equal(page, expected)
        store.namespace.abandon()
        for device in devices:
            device.close()
