"""The page index against a dict: every answer of every batch, at sizes where lines of the hash overflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import aligned_buffer
from kvdev.native import index as native
from kvdev.native.index import SLOT_NONE, PageIndex, Table, format_table, table_block_count

UUID = bytes(range(16))
KEYS = np.random.default_rng(7).integers(0, 256, (30_001, 32), dtype=np.uint8)


def make_index(slot_count: int, *, block_bytes: int = 512, pending_limit: int | None = None) -> PageIndex:
    block_count = table_block_count(block_bytes, slot_count)
    image = aligned_buffer(block_count * block_bytes)
    format_table(
        block_bytes=block_bytes,
        first_block=0,
        block_count=block_count,
        slot_count=slot_count,
        uuid=UUID,
        out=image,
    )
    table = Table(image, block_bytes=block_bytes, slot_count=slot_count, uuid=UUID)
    index = PageIndex(table, pending_limit=pending_limit or 8 * slot_count, next_generation=1)
    index.load()
    return index


def store(index: PageIndex, numbers: list[int]) -> None:
    keys = KEYS[numbers]
    grants = index.reserve(len(numbers), 4096)
    assert grants is not None
    crc = np.array(numbers, dtype=np.uint32)
    assert index.commit(keys, grants, crc, np.zeros(len(numbers), dtype=np.uint8)).all()


@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("slot_count", [1, 2, 7, 64, 701])
def test_random_calls_when_compared_with_a_dict_agree(slot_count: int, block_bytes: int, seed: int) -> None:
    rng = np.random.default_rng([seed, slot_count])
    index = make_index(slot_count, block_bytes=block_bytes)
    live: dict[int, int] = {}
    universe = 2 * slot_count + 2
    for _ in range(150):
        size = int(rng.integers(1, max(2, slot_count)))
        numbers = rng.choice(universe, size=min(size, universe), replace=False).tolist()
        kind = rng.integers(0, 4)
        if kind == 0:
            fitting = numbers[: index.stat().free_count]
            if fitting:
                store(index, fitting)
                live.update({number: number for number in fitting})
        elif kind == 1:
            done = index.remove(np.ascontiguousarray(KEYS[numbers]))
            assert done.tolist() == [number in live for number in numbers]
            for number in numbers:
                live.pop(number, None)
        elif kind == 2:
            index.evict(max(1, size // 4))
            there = index.contains(KEYS[:universe])
            live = {number: number for number in live if there[number]}
        else:
            records = index.collect()
            index.settle(records)
            # What media hold now gives the same index.
            index.load()
        assert index.contains(KEYS[:universe]).tolist() == [number in live for number in range(universe)]
        grants, stored_count = index.lookup(KEYS[:universe], touch=bool(rng.integers(0, 2)))
        assert stored_count == len(live)
        found = grants["slot_index"] != SLOT_NONE
        assert (grants["checksum"][found].astype(np.uint32) == np.flatnonzero(found)).all()
        stat = index.stat()
        assert stat.live_count == len(live)
        assert index.counts() == (stat.pending_count, len(live), stat.free_count, stat.reserved_count)
        assert stat.live_count + stat.free_count + stat.leaving_count == slot_count


def test_full_table_when_every_line_is_busy_finds_all_and_nothing_else() -> None:
    count = 20_000
    index = make_index(count, block_bytes=4096)
    for start in range(0, count, 1000):
        store(index, list(range(start, start + 1000)))
    assert index.stat().free_count == 0
    assert index.contains(KEYS[:count]).all()
    assert not index.contains(KEYS[count:]).any()
    removed = np.ascontiguousarray(KEYS[:count:2])
    assert index.remove(removed).all()
    assert index.contains(KEYS).tolist() == [
        number < count and number % 2 == 1 for number in range(len(KEYS))
    ]


@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 16_384, 19_999])
def test_shared_batches_when_of_any_size_answer_as_one_thread(count: int) -> None:
    index = make_index(20_000, block_bytes=4096)
    for start in range(0, 20_000, 1000):
        store(index, list(range(start, start + 1000)))
    keys = KEYS[:count]
    for threads in (1, 2, 3):  # whatever this machine has, all shares are tried
        index._probe_threads = threads
        index._probers = None
        assert index.contains(keys).all()
        assert index.longest_prefix(keys) == count
        for gap in {0, 1, count // 3, count // 2, count - 1} & set(range(count)):
            broken = keys.copy()
            broken[gap] = KEYS[30_000]
            assert index.longest_prefix(broken) == gap
            assert np.flatnonzero(~index.contains(broken)).tolist() == [gap]


@pytest.mark.parametrize("slot_count", [64, 701])
def test_batch_when_one_key_is_missing_at_any_place_of_any_size_answers_key_by_key(slot_count: int) -> None:
    """Keys go through the core in steps of sixteen that run behind one another."""
    index = make_index(slot_count)
    for start in range(0, slot_count, 8):
        store(index, list(range(start, min(start + 8, slot_count))))
    for count in range(71):
        numbers = np.arange(count) * 7 % slot_count
        assert index.longest_prefix(np.ascontiguousarray(KEYS[numbers])) == count
        for gap in range(count):
            keys = np.ascontiguousarray(KEYS[numbers])
            keys[gap] = KEYS[slot_count + gap]
            assert index.longest_prefix(keys) == gap
            assert np.flatnonzero(~index.contains(keys)).tolist() == [gap]
            keys[gap:] = KEYS[slot_count : slot_count + count - gap]
            assert index.longest_prefix(keys) == gap
            assert index.contains(keys).tolist() == [True] * gap + [False] * (count - gap)


def test_load_when_last_use_is_in_no_order_evicts_the_oldest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 5000
    index = make_index(count, block_bytes=4096, pending_limit=2 * count)
    for start in range(0, count, 1000):
        store(index, list(range(start, start + 1000)))
    index.settle(index.collect())
    per_block = native.entries_per_block(4096)
    uses = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    blocks = index.table.image.reshape(-1, 4096)
    for slot in range(count):
        place = 64 + slot % per_block * 64 + 52
        blocks[slot // per_block, place : place + 4] = uses[slot : slot + 1].view(np.uint8)
    index.load()
    slots = index.lookup(KEYS[:count], touch=False)[0]["slot_index"]
    order = np.argsort(uses[slots], kind="stable")
    index.evict(700)
    gone = np.flatnonzero(~index.contains(KEYS[:count]))
    assert set(gone.tolist()) == set(order[:700].tolist())


def test_memory_when_namespace_is_large_stays_under_100_bytes_a_page() -> None:
    count = 1_000_000
    index = make_index(count, block_bytes=4096, pending_limit=(1 << 20) // 16)
    assert (index.stat().memory_bytes + index.table.image.nbytes) / count < 100


def test_records_when_a_page_was_replaced_twice_have_every_new_page_before_every_freed_slot() -> None:
    index = make_index(20)
    store(index, [1, 2, 3])
    index.settle(index.collect())
    for _ in range(2):
        store(index, [1, 4])
    index.remove(np.ascontiguousarray(KEYS[[2]]))
    store(index, [5])
    records = index.collect()
    assert records["state"].tolist() == [1, 1, 1, 0, 0]
    assert index.stat().pending_count == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc: what a mapping is cannot be read")
def test_table_buffer_when_large_is_private_memory_on_whole_huge_pages() -> None:
    buffer = native.table_buffer(3 << 20)
    assert buffer.nbytes == 3 << 20 and not buffer.any()
    start = int(buffer.ctypes.data)
    assert start % native.HUGE_PAGE_BYTES == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, kind, _, device, *_ = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if first <= start < end:
            assert kind == "rw-p" and device == "00:00", f"no anonymous memory: {line}"
            return
    pytest.fail("the buffer is in no mapping")


def live_entries(count: int, claimed_twice: int, rng: np.random.Generator) -> np.ndarray:
    """Entries of ``count`` slots, nine in ten live, each with a key of its own; ``claimed_twice`` of those stand in a
    second entry as well, of a lower or higher generation, and of the same in one case."""
    entries = np.zeros(count, dtype=native.ENTRY_DTYPE)
    entries["slot_index"] = np.arange(count)
    entries["key"] = np.frombuffer(rng.bytes(count * 32), dtype=np.uint8).reshape(-1, 32)
    entries["generation"] = 1000 + rng.permutation(count)
    entries["length"], entries["algorithm"] = 4096, 1
    entries["last_use"] = rng.integers(0, 1 << 18, count)
    entries["state"] = rng.random(count) < 0.9
    live = rng.permutation(np.flatnonzero(entries["state"]))
    first, second = live[:claimed_twice], live[claimed_twice : 2 * claimed_twice]
    entries["key"][second] = entries["key"][first]
    entries["generation"][second[0]] = entries["generation"][first[0]]
    return entries


@pytest.mark.parametrize("slot_count", [5_000, 230_000])
def test_load_when_a_table_is_full_finds_every_key_in_its_youngest_slot(slot_count: int, seed: int) -> None:
    rng = np.random.default_rng([seed, slot_count])
    claimed_twice = slot_count // 100
    entries = live_entries(slot_count, claimed_twice, rng)
    index = make_index(slot_count, block_bytes=4096)
    assert index.replay(entries, 1)
    index.load()
    live = entries[entries["state"] == 1]
    stat = index.stat()
    assert (stat.live_count, stat.duplicate_count) == (len(live) - claimed_twice, claimed_twice)
    assert stat.leaving_count == claimed_twice and stat.free_count == slot_count - len(live)
    wanted: dict[bytes, tuple[int, int]] = {}
    for entry in live:  # in slot order: of two of one generation the lower slot stays
        key, claim = entry["key"].tobytes(), (int(entry["generation"]), int(entry["slot_index"]))
        if key not in wanted or claim[0] > wanted[key][0]:
            wanted[key] = claim
    keys = np.frombuffer(b"".join(wanted), dtype=np.uint8).reshape(-1, 32)
    assert index.contains(keys).all() and index.longest_prefix(keys) == len(keys)
    grants, stored_count = index.lookup(keys, touch=False)
    assert stored_count == len(keys)
    assert list(zip(grants["generation"].tolist(), grants["slot_index"].tolist(), strict=True)) == list(
        wanted.values()
    )
    # The order of eviction is that of the last use, and of the slots where it is the same.
    use = {int(entry["slot_index"]): (int(entry["last_use"]), int(entry["slot_index"])) for entry in live}
    by_use = sorted((slot for _, slot in wanted.values()), key=lambda slot: use[slot])
    index.evict(slot_count // 10)
    gone = grants["slot_index"][~index.contains(keys)]
    assert sorted(gone.tolist()) == sorted(by_use[: slot_count // 10])
