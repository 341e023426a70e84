"""The read side of a table: what it finds is right whatever happens to the table meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.native.checksum import CRC32C
from kvdev.native.index import GRANT_DTYPE, SLOT_NONE, PageIndex, Table, format_table, table_block_count
from kvdev.native.view import PageView, hint_count

BLOCK = 512
UUID = bytes(range(16))


class Store:
    """A table with its index, and a view of it."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        blocks = table_block_count(BLOCK, slot_count)
        self.image = np.zeros(blocks * BLOCK, dtype=np.uint8)
        format_table(
            block_bytes=BLOCK,
            first_block=0,
            block_count=blocks,
            slot_count=slot_count,
            uuid=UUID,
            out=self.image,
        )
        table = Table(self.image, block_bytes=BLOCK, slot_count=slot_count, uuid=UUID)
        self.index = PageIndex(table, pending_limit=4 * slot_count, next_generation=1 << 40)
        self.index.load()
        self.hints = np.zeros(hint_count(slot_count), dtype=np.uint32)
        self.view = self.attach(self.hints)

    def attach(self, hints: npt.NDArray[np.uint32]) -> PageView:
        return PageView(
            self.image, hints, block_bytes=BLOCK, slot_count=self.slot_count, seed=0x1234567890ABCDEF
        )

    def put(self, keys: Any) -> None:
        grants = self.index.reserve(len(keys), 100)
        if grants is None:
            self.index.evict(len(keys))
            self.index.settle(self.index.collect())
            grants = self.index.reserve(len(keys), 100)
        assert grants is not None
        crc = keys[:, 0].astype(np.uint32)
        self.index.commit(keys, grants, crc, np.zeros(len(keys), dtype=np.uint8))
        self.view.insert(keys, grants)


def keys_of(numbers: Any) -> Any:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :8] = np.asarray(numbers, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return keys


def test_view_when_the_table_turns_over_many_times_finds_what_the_index_finds(
    rng: np.random.Generator,
) -> None:
    store = Store(200)
    for step in range(300):
        store.put(keys_of(rng.choice(1000, size=10, replace=False)))
        if step % 3 == 0:
            store.index.remove(keys_of(rng.choice(1000, size=20, replace=False)))
        keys = keys_of(range(1000))
        expected, count = store.index.lookup(keys, touch=False)
        found, found_count = store.view.lookup(keys)
        assert found_count == count
        assert np.array_equal(found["slot_index"], expected["slot_index"])
        stored = expected["slot_index"] != SLOT_NONE
        for name in ("generation", "checksum", "length"):
            assert np.array_equal(found[name][stored], expected[name][stored])


def test_view_when_attached_later_has_all_and_prefixes_end_at_the_first_miss(
    rng: np.random.Generator,
) -> None:
    store = Store(500)
    for start in range(0, 400, 50):
        store.put(keys_of(range(start, start + 50)))
    late = store.attach(np.zeros(hint_count(500), dtype=np.uint32))
    assert late.longest_prefix(keys_of(range(500))) == 0
    late.fill()
    assert late.longest_prefix(keys_of(range(500))) == 400
    store.index.remove(keys_of([123]))
    assert late.longest_prefix(keys_of(range(500))) == 123
    assert late.lookup(keys_of(range(500)))[1] == 399
    assert late.lookup(keys_of([]))[1] == 0


def test_view_over_hints_that_are_nonsense_finds_nothing_wrong(rng: np.random.Generator) -> None:
    store = Store(100)
    store.put(keys_of(range(50)))
    for _ in range(50):
        hints = rng.integers(0, 1 << 32, hint_count(100), dtype=np.uint32)
        view = store.attach(hints)
        found, _ = view.lookup(keys_of(range(100)))
        expected, _ = store.index.lookup(keys_of(range(100)), touch=False)
        hit = found["slot_index"] != SLOT_NONE
        assert np.array_equal(found["slot_index"][hit], expected["slot_index"][hit])
        view.fill()
        assert view.lookup(keys_of(range(50)))[1] == 50


def test_view_while_another_thread_changes_the_table_gives_whole_entries() -> None:
    store = Store(64)
    stop = threading.Event()
    problems: list[str] = []

    def read() -> None:
        keys = keys_of(range(300))
        crc = keys[:, 0].astype(np.uint32)
        while not stop.is_set():
            grants, _ = store.view.lookup(keys)
            hit = np.flatnonzero(grants["slot_index"] != SLOT_NONE)
            right, count = CRC32C.verify(
                UUID, np.ascontiguousarray(keys[hit]), np.ascontiguousarray(grants[hit]), crc[hit], length=100
            )
            if count != len(hit):
                problems.append(f"key {hit[~right][0]}: an entry that is not its own")
                return

    reader = threading.Thread(target=read)
    reader.start()
    rng = np.random.default_rng(5)
    for _ in range(2000):
        store.put(keys_of(rng.choice(300, size=4, replace=False)))
    stop.set()
    reader.join(60)
    assert not problems


def test_checksum_tells_another_key_generation_or_length() -> None:
    store = Store(10)
    keys = keys_of([1, 2, 3])
    store.put(keys)
    grants, _ = store.view.lookup(keys)
    crc = keys[:, 0].astype(np.uint32)
    assert CRC32C.verify(UUID, keys, grants, crc, length=100)[1] == 3
    assert CRC32C.verify(UUID, keys[::-1].copy(), grants, crc, length=100)[1] == 1
    assert CRC32C.verify(UUID, keys, grants, crc + 1, length=100)[1] == 0
    assert CRC32C.verify(UUID, keys, grants, crc, length=99)[1] == 0
    other = grants.copy()
    other["generation"] += 1
    assert CRC32C.verify(UUID, keys, other, crc, length=100)[1] == 0
    assert GRANT_DTYPE.itemsize == 24
