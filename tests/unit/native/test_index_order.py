"""Which page the index gives up next, policy by policy, against models of a few lines each."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvdev.block.device import aligned_buffer
from kvdev.native.checksum import CRC32C
from kvdev.native.index import (
    CLOCK_NEVER,
    POLICY_NUMBERS,
    SLOT_NONE,
    PageIndex,
    Table,
    format_table,
    table_block_count,
)

UUID = bytes(range(16))
KEYS = np.random.default_rng(11).integers(0, 256, (4_000, 32), dtype=np.uint8)
SLOTS = 200
QUOTA = 100


def make_index(policy: str, *, has_ages: bool = False, slot_count: int = SLOTS) -> PageIndex:
    block_count = table_block_count(512, slot_count)
    image = aligned_buffer(block_count * 512)
    format_table(
        block_bytes=512, first_block=0, block_count=block_count, slot_count=slot_count, uuid=UUID, out=image
    )
    index = PageIndex(
        Table(image, block_bytes=512, slot_count=slot_count, uuid=UUID),
        pending_limit=16 * slot_count,
        next_generation=1,
        eviction_policy=policy,
        quota_pages=QUOTA,
        has_ages=has_ages,
    )
    index.load()
    return index


def put(index: PageIndex, *numbers: int) -> None:
    grants = index.reserve(len(numbers), 4096)
    assert grants is not None
    crc = np.array(numbers, dtype=np.uint32)
    done = index.commit(
        np.ascontiguousarray(KEYS[list(numbers)]), grants, crc, np.zeros(len(numbers), np.uint8)
    )
    assert done.all()


def use(index: PageIndex, *numbers: int) -> None:
    index.lookup(np.ascontiguousarray(KEYS[list(numbers)]), touch=True)


def settle(index: PageIndex) -> None:
    index.settle(index.collect())


def stored(index: PageIndex) -> set[int]:
    return set(np.flatnonzero(index.contains(KEYS)).tolist())


def evict(index: PageIndex, count: int, kept: list[int] | None = None) -> set[int]:
    before = stored(index)
    kept_keys = None if kept is None else np.ascontiguousarray(KEYS[kept])
    assert index.evict(count, kept_keys) == len(before) - len(stored(index))
    return before - stored(index)


@pytest.mark.parametrize("policy", sorted(POLICY_NUMBERS))
def test_evict_when_pages_are_kept_takes_all_others_and_none_of_them(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = make_index(policy)
    for number in range(QUOTA):
        put(index, number)
        use(index, *rng.integers(0, number + 1, 3).tolist())
    kept = rng.choice(QUOTA, 30, replace=False).tolist()
    evict(index, QUOTA - 31, kept)
    assert len(stored(index)) == 31 and stored(index) >= set(kept)
    assert len(evict(index, 5, kept)) == 1
    assert not evict(index, 5, kept)
    assert stored(index) == set(kept)
    assert evict(index, QUOTA) == set(kept)
    stat = index.stat()
    assert stat.live_count == 0 and stat.evicted_count == QUOTA


def test_lfu_when_pages_are_used_unequally_keeps_the_most_used_however_long_ago() -> None:
    index = make_index("lfu")
    put(index, *range(10))
    for number in range(10):
        for _ in range(number):
            use(index, number)
    assert [evict(index, 1) for _ in range(4)] == [{0}, {1}, {2}, {3}]
    put(index, 20, 21)
    use(index, 21)
    assert [evict(index, 1) for _ in range(3)] == [{20}, {21}, {4}]


def test_lfu_when_uses_are_long_past_forgets_them() -> None:
    index = make_index("lfu")
    put(index, *range(QUOTA))
    for _ in range(6):
        use(index, 0)
    # Each round lowers every count by one about once: others are used now and then, page 0 never again.
    for _ in range(12):
        for number in range(1, QUOTA):
            for _ in range(8):
                use(index, number)
    assert evict(index, 1) == {0}


def test_s3fifo_when_a_scan_passes_keeps_what_was_used_and_knows_what_comes_back() -> None:
    index = make_index("s3fifo")
    for number in range(QUOTA):
        put(index, number)
        use(index, number // 2)  # the first half
    for number in range(1000, 1000 + 3 * QUOTA):  # a scan: each page once
        evict(index, 1)
        put(index, number)
        settle(index)
    survivors = {number for number in stored(index) if number < QUOTA}
    assert len(survivors) > 40, "what was used outlives the scan"
    # A page of the scan that went lately comes back: it goes to the main list, and outlives another scan.
    gone = next(number for number in range(1299, 1000, -1) if number not in stored(index))
    evict(index, 1)
    put(index, gone)
    settle(index)
    for number in range(2000, 2030):
        evict(index, 1)
        put(index, number)
        settle(index)
    assert gone in stored(index)


class S3Model:
    """The published algorithm on Python lists, with the index's thresholds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()

    def use(self, number: int) -> None:
        for queue in (self.small, self.main):
            if number in queue:
                queue[number] = min(queue[number] + 1, 3)

    def evict(self) -> int:
        while True:
            if len(self.small) > self.capacity // 10 or not self.main:
                number, count = self.small.popitem(last=False)
                if count == 0:
                    return number
                self.main[number] = 0
            else:
                number, count = self.main.popitem(last=False)
                if count == 0:
                    return number
                self.main[number] = count - 1


def test_s3fifo_when_called_at_random_answers_as_the_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, model = make_index("s3fifo"), S3Model(QUOTA)
    fresh = 0
    for _ in range(3000):
        live = stored(index)
        if rng.integers(0, 3) and live:
            number = int(rng.choice(sorted(live)))
            use(index, number)
            model.use(number)
            continue
        if len(live) == QUOTA:
            assert evict(index, 1) == {model.evict()}
        put(index, fresh)  # never seen before: ghosts have no say
        model.small[fresh] = 0
        settle(index)
        fresh += 1
    assert fresh > 800


@pytest.mark.parametrize("policy", ["lfu", "s3fifo"])
def test_load_when_counts_are_in_the_entries_goes_on_by_them(policy: str) -> None:
    index = make_index(policy)
    put(index, *range(QUOTA))
    for _ in range(12 if policy == "lfu" else 0):  # so often that all counts are lowered on the way
        use(index, *range(QUOTA))
    for _ in range(3):
        use(index, *range(50))
    index.load()
    assert all(number >= 50 for number in evict(index, 40))


def test_expire_when_pages_are_old_takes_them_in_the_order_they_came_pinned_or_not() -> None:
    index = make_index("lru", has_ages=True)
    assert index.expire(100, 10) == (0, CLOCK_NEVER)
    for second in range(10, 20):
        index.set_clock(second)
        put(index, second)
    use(index, 10)
    index.pin(np.ascontiguousarray(KEYS[[11]]), is_pinned=True)
    assert index.expire(10, 10) == (0, 10)
    assert index.expire(13, 2) == (2, 12)
    assert index.expire(13, 2) == (1, 13)
    assert stored(index) == set(range(13, 20)) and index.stat().pinned_count == 0
    settle(index)
    index.load()
    assert index.expire(15, 10) == (2, 15), "ages are in the entries"
    put(index, 17)  # what replaces a page is as young as it was put
    assert index.expire(19, 10) == (3, 19) and stored(index) == {17, 19}
    assert index.stat().expired_count == 8


def test_move_when_pages_go_to_other_slots_keeps_order_pins_and_bytes() -> None:
    index = make_index("lru")
    put(index, *range(8))
    settle(index)
    use(index, 3)
    index.pin(np.ascontiguousarray(KEYS[[5]]), is_pinned=True)
    source, _ = index.lookup(np.ascontiguousarray(KEYS[:8]), touch=False)
    index.limit_slots(100)
    target = index.reserve(8, 4096)
    assert target is not None and (target["slot_index"] < 100).all()
    index.remove(np.ascontiguousarray(KEYS[[6]]))
    assert index.move(source, target).tolist() == [True] * 6 + [False, True]
    found, count = index.lookup(np.ascontiguousarray(KEYS[:8]), touch=False)
    assert count == 7 and found["slot_index"][6] == SLOT_NONE
    rest = [0, 1, 2, 3, 4, 5, 7]
    assert (found["slot_index"][rest] == target["slot_index"][rest]).all()
    crc = np.arange(8, dtype=np.uint32)
    assert CRC32C.verify(UUID, np.ascontiguousarray(KEYS[rest]), found[rest], crc[rest], length=4096)[1] == 7
    settle(index)
    settle(index)
    assert index.stat().leaving_count == 0
    # Of one batch the last counts as the oldest; page 3 was used since, page 5 is pinned.
    assert [evict(index, 1) for _ in range(6)] == [{7}, {4}, {2}, {1}, {0}, {3}]
    assert stored(index) == {5}


def test_limit_slots_when_pages_leave_behind_it_never_hands_those_out_again() -> None:
    index = make_index("lru")
    put(index, *range(150))
    settle(index)
    index.limit_slots(60)
    assert index.stat().free_count == 0 and index.stat().quarantined_count == 50
    evict(index, 150)
    settle(index)
    grants = index.reserve(60, 4096)
    assert grants is not None and sorted(grants["slot_index"].tolist()) == list(range(60))
    assert index.reserve(1, 4096) is None
    stat = index.stat()
    assert stat.quarantined_count == SLOTS - 60


def test_keys_when_they_share_every_line_are_all_found(seed: int) -> None:
    """Structured keys, that a weak hash would throw together: few bits differ, and words cancel out."""
    index = make_index("lru", slot_count=600)
    keys = np.zeros((512, 32), dtype=np.uint8)
    for number in range(256):
        keys[number] = number
        keys[256 + number, number % 32] = 1 + number // 32
    keys = np.unique(keys, axis=0)
    grants = index.reserve(len(keys), 1)
    assert grants is not None
    assert index.commit(keys, grants, np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint8)).all()
    assert index.contains(keys).all() and index.longest_prefix(keys) == len(keys)
    others = np.random.default_rng(seed).integers(0, 256, (20_000, 32), dtype=np.uint8)
    others[:, 8:24] = 0
    assert not index.contains(others).any()
    assert index.remove(np.ascontiguousarray(keys[::2])).all()
    assert index.contains(keys).tolist() == [bool(number % 2) for number in range(len(keys))]
