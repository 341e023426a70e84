"""Volumes on memory devices, small enough that a test takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)


def soon() -> Deadline:
    return Deadline.after(30)


@dataclass
class Lab:
    """A volume with one KV namespace of 8 KiB pages, and ways to get at its inside."""

    members: list[MemoryDevice]
    geometry: Geometry = GEOMETRY
    quota_pages: int = 32
    checksum: str = "crc32c"
    fail: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(member, opcode) -> what its commands answer from now on: −errno and status."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    volume: Volume = field(init=False)
    stores: list[PageStore] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, member in enumerate(self.members):
            member.observer = lambda opcode, slba, payload, i=index: self.fail.get((i, opcode), (0, 0))
        self.volume = Volume.create(self.members, name="v", strip_size_bytes=16384, deadline=soon())
        self.volume.create_namespace(
            "kv",
            self.geometry,
            quota_pages=self.quota_pages,
            checksum=self.checksum,
            deadline=soon(),
        )

    def store(self) -> PageStore:
        self.stores.append(PageStore(self.volume.open_namespace("kv", deadline=soon())))
        return self.stores[-1]

    def batch(self, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        keys = self.rng.integers(0, 256, (count, 32), dtype=np.uint8)
        return keys, self.rng.integers(0, 256, (count, self.geometry.page_size_bytes), dtype=np.uint8)

    def room(self, count: int) -> npt.NDArray[np.uint8]:
        return np.zeros((count, self.geometry.page_size_bytes), dtype=np.uint8)

    def reopen(self) -> PageStore:
        """As after a crash of the process: nothing is written, another owner comes."""
        for store in self.stores:
            store.namespace.abandon()
        self.volume = Volume.open(self.members, deadline=soon())
        return self.store()


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of a test are nobody else's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def members() -> list[MemoryDevice]:
    queue = LocalQueue()
    return [MemoryDevice(size_bytes=2 << 20, name=f"m{index}", queue=queue) for index in range(3)]


@pytest.fixture
def lab(members: list[MemoryDevice]) -> Iterator[Lab]:
    made = Lab(members)
    yield made
    for store in made.stores:
        store.namespace.abandon()
