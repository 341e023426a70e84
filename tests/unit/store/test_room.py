"""Namespaces in several extents, and who gives space back to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CapacityError, KvdevError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.store.check import check_volume
from kvdev.store.page_store import PageStore
from kvdev.store.resize import resize_namespace
from kvdev.store.room import create_with_room, plan_room, resize_with_room, set_room_rules
from kvdev.store.superblock import build_record
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
JOURNAL = 8


def soon() -> Deadline:
    return Deadline.after(120)


def keys_of(numbers: list[int]) -> KeyArray:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :2] = np.array(numbers, dtype="<u2").view(np.uint8).reshape(-1, 2)
    keys[:, 31] = 1
    return keys


def pages_of(numbers: list[int]) -> npt.NDArray[np.uint8]:
    return np.stack([np.full(PAGE, number * 7 % 251, dtype=np.uint8) for number in numbers])


class Town:
    """Namespaces side by side on one volume, and what each holds."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.volume: Volume = lab.volume
        self.volume.delete_namespace("kv", deadline=soon())
        self.held: dict[str, list[int]] = {}

    def make(self, name: str, quota_pages: int, **options: Any) -> None:
        self.volume.create_namespace(
            name, GEOMETRY, quota_pages=quota_pages, journal_block_count=JOURNAL, deadline=soon(), **options
        )
        self.held[name] = []

    def put(self, name: str, numbers: list[int]) -> None:
        store = PageStore(self.volume.open_namespace(name, deadline=soon()))
        for number in numbers:
            assert store.put(keys_of([number]), pages_of([number])).stored_count == 1
        store.close()
        quota = self.volume.namespace(name, deadline=soon()).quota_pages
        self.held[name] = [*self.held[name], *numbers][-quota:]

    def resize(self, name: str, quota_pages: int, *, takes: bool = False) -> Any:
        report, gifts = resize_with_room(
            self.volume,
            name,
            quota_pages=quota_pages,
            journal_block_count=JOURNAL,
            takes=takes,
            deadline=soon(),
        )
        self.held[name] = self.held[name][-quota_pages:]
        for gift in gifts:
            self.held[gift.name] = self.held[gift.name][-gift.quota_pages :]
        return report, gifts

    def check(self) -> None:
        """Every namespace has its pages and no others, by another opening; no block belongs to two."""
        volume = Volume.open(self.lab.members, deadline=soon())
        assert [info.name for info in volume.namespaces(deadline=soon())] == sorted(self.held)
        owned: set[int] = set()
        for record in volume.records(deadline=soon()):
            for extent in record.extents:
                blocks = set(range(extent.slba, extent.end))
                assert not owned & blocks
                owned |= blocks
        free = {
            block for first, count in volume.free_extents(soon()) for block in range(first, first + count)
        }
        assert not owned & free
        assert len(owned) + len(free) == volume.size_bytes // volume.block_size_bytes
        for name, numbers in self.held.items():
            store = PageStore(volume.open_namespace(name, mode="reader", deadline=soon()))
            assert store.namespace.stat().index.live_count == len(numbers)
            if numbers:
                out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
                assert store.get(keys_of(numbers), out).hit_count == len(numbers)
                assert np.array_equal(out, pages_of(numbers))
        report = check_volume(self.lab.members)
        assert report.is_ok, report.all_findings

    def quotas(self) -> dict[str, int]:
        return {info.name: info.quota_pages for info in self.volume.namespaces(deadline=soon())}

    def further(self, name: str) -> int:
        return len(self.volume.namespace(name, deadline=soon()).record.further)


def test_grow_beside_a_neighbour_takes_a_further_extent_and_gives_it_back(lab: Any) -> None:
    town = Town(lab)
    town.make("a", 40)
    town.make("b", 40)
    town.put("a", list(range(40)))
    town.put("b", list(range(500, 540)))
    town.resize("a", 120)
    assert town.further("a") == 1
    town.check()
    town.put("a", list(range(100, 180)))
    town.check()
    town.put("a", [300])  # at the quota: one goes
    town.resize("a", 60)
    town.check()
    town.resize("b", 100)
    town.put("b", list(range(600, 660)))
    town.check()
    town.resize("a", 40)  # the present table lies before the slots: the new one stands apart
    town.resize("a", 39)  # and comes home
    assert town.further("a") == 0
    town.check()


def test_make_when_no_run_is_large_enough_takes_several(lab: Any) -> None:
    town = Town(lab)
    for name in "abcde":
        town.make(name, 100)
    free = town.volume.free_extents(soon())
    for name in "ac":
        town.volume.delete_namespace(name, deadline=soon())
        del town.held[name]
    largest = max(count for _, count in town.volume.free_extents(soon())) * 4096
    assert largest < 150 * PAGE and free
    town.make("f", 150)
    assert town.further("f") >= 1
    town.put("f", list(range(150)))
    town.put("b", list(range(300, 400)))
    town.check()
    secret = pages_of([7])[0].tobytes()
    assert any(secret in bytes(member.data) for member in lab.members)
    record = town.volume.namespace("f", deadline=soon()).record
    erased = town.volume.delete_namespace("f", erase=True, deadline=soon())
    assert erased == record.block_count * 4096
    for extent in record.extents:
        assert not town.volume.io.read(extent.slba, extent.block_count, soon()).any()
    del town.held["f"]
    town.check()


def fill(town: Town) -> int:
    """Two namespaces to take from and one that grows, on a full volume; how many pages fit in what is left."""
    town.make("low", 100, priority=1, reserve_pages=30)
    town.make("mid", 100, priority=2)
    town.make("mine", 60, priority=5, reserve_pages=60)
    left = max(count for _, count in town.volume.free_extents(soon())) * 4096
    town.make("last", (left - 100_000) // PAGE * 30 // 33 - 5, priority=9)
    town.put("low", list(range(100)))
    town.put("mid", list(range(200, 300)))
    town.put("mine", list(range(400, 460)))
    return sum(count for _, count in town.volume.free_extents(soon())) * 4096 // PAGE


def test_room_is_made_by_the_lowest_priority_first_down_to_its_reserve(lab: Any) -> None:
    town = Town(lab)
    fill(town)
    before = town.quotas()
    with pytest.raises(CapacityError, match="lower priority make room"):
        town.resize("mine", 110)
    town.check()
    _, gifts = town.resize("mine", 110, takes=True)
    assert [gift.name for gift in gifts] == ["low"]
    assert gifts[0].quota_pages >= 30 and gifts[0].evicted_pages == 100 - gifts[0].quota_pages > 0
    town.check()
    _, gifts = town.resize("mine", 160, takes=True)
    assert [gift.name for gift in gifts] == ["low", "mid"]
    assert gifts[0].quota_pages == 30
    town.put("mine", list(range(1000, 1160)))
    town.check()
    after = town.quotas()
    assert after["last"] == before["last"] and after["mine"] == 160 and after["low"] == 30
    info, gifts = create_with_room(
        town.volume,
        "new",
        GEOMETRY,
        quota_pages=30,
        journal_block_count=JOURNAL,
        priority=3,
        deadline=soon(),
    )
    assert [gift.name for gift in gifts] == ["mid"] and info.priority == 3
    town.held["new"] = []
    town.held["mid"] = town.held["mid"][-gifts[0].quota_pages :]
    town.check()


def test_room_when_it_cannot_be_made_is_refused_with_the_arithmetic_and_takes_nothing(lab: Any) -> None:
    town = Town(lab)
    fill(town)
    owner = town.volume.open_namespace("mid", deadline=soon())
    with pytest.raises(CapacityError) as refusal:
        town.resize("mine", 400, takes=True)
    text = str(refusal.value)
    assert "resize of 'mine' of priority 5: expected room for 412 slots of 8 KiB" in text
    assert "low (priority 1) could give" in text and "down to its reserve of 30 pages" in text
    assert "mid is in use by its owner" in text
    assert "last has priority 9, not below 5" in text
    owner.close()
    town.check()
    set_room_rules(town.volume, "low", reserve_pages=100, deadline=soon())
    set_room_rules(town.volume, "mid", priority=5, deadline=soon())
    with pytest.raises(CapacityError) as refusal:
        town.resize("mine", 110, takes=True)
    assert "low has its reserve of 100 pages only" in str(refusal.value)
    assert "mid has priority 5, not below 5" in str(refusal.value)
    with pytest.raises(UsageError, match="owned by"):
        owner = town.volume.open_namespace("mine", deadline=soon())
        try:
            town.resize("mine", 61, takes=True)
        finally:
            owner.close()
    town.check()


def test_reserve_when_a_resize_goes_below_it_is_refused(lab: Any) -> None:
    town = Town(lab)
    town.make("a", 40, reserve_pages=30)
    with pytest.raises(UsageError, match="quota: expected at least its reserve of 30 pages, got 29"):
        resize_namespace(town.volume, "a", quota_pages=29, journal_block_count=JOURNAL, deadline=soon())
    town.resize("a", 30)
    for options, match in [
        ({"priority": 256}, "priority: expected 0 to 255, got 256"),
        ({"priority": -1}, "priority: expected 0 to 255, got -1"),
        ({"reserve_pages": 31}, "reserve: expected at most the quota of 30 pages, got 31"),
    ]:
        with pytest.raises(UsageError, match=match):
            set_room_rules(town.volume, "a", deadline=soon(), **options)
        with pytest.raises(UsageError, match=match):
            town.make("b", 30, **options)
    info = set_room_rules(town.volume, "a", priority=7, reserve_pages=5, deadline=soon())
    assert (info.priority, info.reserve_pages) == (7, 5)
    assert build_record(info.record)[8] == 2, "who does not know reserves is to refuse it"
    clone = town.volume.clone_namespace("a", "b", deadline=soon())
    assert (clone.priority, clone.reserve_pages) == (7, 5)
    info = set_room_rules(town.volume, "a", priority=0, reserve_pages=0, deadline=soon())
    assert build_record(info.record)[8] == 1


def test_room_when_a_write_fails_anywhere_leaves_every_page_that_was_not_to_go(lab: Any) -> None:
    """The same call again goes on; what was not evicted is there all the time."""
    town = Town(lab)
    fill(town)
    kept = set(town.held["mid"]) | set(town.held["mine"]) | set(town.held["low"][-30:])
    writes = {"left": -1}

    def fail(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        if opcode == 1 and writes["left"] >= 0:
            writes["left"] -= 1
            if writes["left"] < 0:
                writes["left"] = 0
                return -5, 0x280
        return 0, 0

    for member in lab.members:
        member.observer = fail
    failures = 0
    for count in [*range(1, 40, 3), *range(40, 400, 37)]:
        writes["left"] = count
        try:
            town.resize("mine", 110, takes=True)
        except KvdevError:
            failures += 1
        writes["left"] = -1
        volume = Volume.open(lab.members, deadline=soon())
        found: set[int] = set()
        for name in ("low", "mid", "mine"):
            store = PageStore(volume.open_namespace(name, deadline=soon()))
            there = store.contains(keys_of(sorted(kept)))
            found |= {number for number, is_there in zip(sorted(kept), there, strict=True) if is_there}
            store.close()
        assert found == kept
    assert failures > 5
    assert town.quotas()["mine"] == 110
    report = check_volume(lab.members)
    assert report.is_ok, report.all_findings


def test_sizes_of_several_namespaces_over_random_changes_keep_pages_and_blocks_apart(
    lab: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    town = Town(lab)
    for index, name in enumerate("abc"):
        town.make(name, 30, priority=index)
    refused = taken = split = 0
    for step in range(30):
        name = "abc"[int(rng.integers(0, 3))]
        start = 10 * int(rng.integers(0, 6000))
        town.put(name, [start % 60000 + each for each in range(10)] if start not in town.held[name] else [])
        try:
            _, gifts = town.resize(name, int(rng.integers(5, 330)), takes=True)
            taken += len(gifts)
        except CapacityError:
            refused += 1
        split = max(split, *(town.further(each) for each in "abc"))
        if step % 3 == 2:
            town.check()
    town.check()
    print(f"seed {seed}: {refused} refused, {taken} gave, {split} further extents at most")
    assert taken and split


def test_plan_when_there_is_room_already_takes_nothing(lab: Any) -> None:
    town = Town(lab)
    town.make("a", 10)
    plan = town.volume.plan(GEOMETRY, quota_pages=5, journal_block_count=JOURNAL)
    assert plan_room(town.volume, "x", plan, lambda records: True, priority=9, deadline=soon()) == []
