"""Power cuts while quota moves from one KV namespace to another, and while one is being erased.

At every write boundary: what was not to go is there, nothing is half alive, no block belongs to two, and what is free
after an erasure holds nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.store.page_store import PageStore
from kvdev.store.room import resize_with_room
from kvdev.store.volume import Volume
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.testing.crash_device import CrashLog

GEOMETRY = Geometry(model_id="crash", layer_count=1, kv_head_count=1, head_size=8, tokens_per_page=32)
PAGE = GEOMETRY.page_size_bytes
SECRET = bytes(range(1, 65))
STRIP = 16384
STATE_MAX = 1000 if os.environ.get("KVDEV_LONG") else 100
"""Of one history; which of them is drawn from the seed."""


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def deadline() -> Deadline:
    return Deadline.after(240)


def keys_of(count: int) -> KeyArray:
    keys = np.zeros((count, 32), dtype=np.uint8)
    keys[:, :2] = np.arange(1, count + 1, dtype="<u2").view(np.uint8).reshape(-1, 2)
    return keys


def pages_of(name: str, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    pages = np.zeros((count, PAGE), dtype=np.uint8)
    for number in range(count):
        pages[number] = np.resize(np.frombuffer(SECRET, np.uint8), PAGE)
        pages[number, :3] = (ord(name[0]), number % 256, number // 256)
    return pages


def make(log: CrashLog, sizes: dict[str, int], **priorities: int) -> Volume:
    """A volume whose namespaces are full, closed and durable; recorded from here on."""
    volume = Volume.create(log.members, name="crash", strip_size_bytes=STRIP, deadline=deadline())
    for name, count in sizes.items():
        volume.create_namespace(
            name,
            GEOMETRY,
            quota_pages=count,
            journal_block_count=6,
            priority=priorities.get(name, 0),
            deadline=deadline(),
        )
        store = PageStore(volume.open_namespace(name, deadline=deadline()))
        assert store.put(keys_of(count), pages_of(name, count)).stored_count == count
        store.close()
    log.start()
    return volume


def stored(volume: Volume, name: str, count: int) -> set[int]:
    """Which pages are found; each that is must have the bytes that were put."""
    out = np.zeros((count, PAGE), dtype=np.uint8)
    got = PageStore(volume.open_namespace(name, mode="reader", deadline=deadline())).get(keys_of(count), out)
    assert not got.error_count
    hits = set(np.flatnonzero(got.status == 1).tolist())
    expected = pages_of(name, count)
    assert all(np.array_equal(out[number], expected[number]) for number in hits)
    return hits


def explore(log: CrashLog, seed: int, judge: Callable[[Volume], None]) -> int:
    """Judge states at every cut, or a drawn part of them."""
    rng = np.random.default_rng(seed)
    share = min(1.0, STATE_MAX / (3 * len(log.events)))
    states, count = log.states(), 0
    while True:
        for number, choice in enumerate(states.choices(rng, exhaustive_count=3, random_count=3)):
            if rng.random() > share and states.cut_index not in (0, len(log.events)):
                continue
            states.apply(choice)
            try:
                judge(Volume.open(states.devices, deadline=deadline()))
            except BaseException:
                print(f"KVDEV_SEED={seed}, cut {states.cut_index} of {len(log.events)}, choice {number}")
                raise
            states.restore()
            count += 1
        if not states.advance():
            return count


def holds_secret(volume: Volume) -> bool:
    return any(SECRET[8:56] in bytes(member.data) for member in volume.members)  # type: ignore[attr-defined]


@pytest.mark.parametrize("member_count", [1, 3])
def test_cut_of_an_erasure_leaves_it_whole_or_being_erased_or_gone_without_a_trace(
    member_count: int, seed: int
) -> None:
    log = CrashLog(member_count, size_bytes=1 << 20, block_size_bytes=512)
    volume = make(log, {"gone": 12})
    volume.delete_namespace("gone", erase=True, deadline=deadline())
    seen = set()

    def judge(volume: Volume) -> None:
        record = next(iter(volume.records(deadline=deadline())), None)
        if record is None:
            seen.add("gone")
        elif record.is_live:
            seen.add("whole")
            assert stored(volume, "gone", 12) == set(range(12))
            return
        else:
            seen.add("erasing")
            with pytest.raises(UsageError, match="is being erased"):
                volume.open_namespace("gone", deadline=deadline())
            with pytest.raises(UsageError, match="exists already"):
                volume.create_namespace("gone", GEOMETRY, quota_pages=2, deadline=deadline())
            assert not set(volume.free_extents(deadline())) & {
                (record.extent_slba, record.extent_block_count)
            }
            volume.delete_namespace("gone", erase=True, deadline=deadline())
            assert not volume.records(deadline=deadline())
        assert not holds_secret(volume), "what is free holds what was erased"

    assert explore(log, seed, judge) > 20
    assert {"whole", "gone"} <= seen <= {"whole", "erasing", "gone"}


class NoFlush(VolumeIo):
    """Canary: zeroes are not flushed before they are read back."""

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        del members, deadline


def test_canary_when_zeroes_are_not_flushed_is_caught(seed: int) -> None:
    log = CrashLog(2, size_bytes=1 << 20, block_size_bytes=512)
    volume = make(log, {"gone": 12})
    volume.io = NoFlush(volume.io.device, strip_size_bytes=STRIP)
    volume.delete_namespace("gone", erase=True, deadline=deadline())

    def judge(volume: Volume) -> None:
        assert volume.records(deadline=deadline()) or not holds_secret(volume)

    with pytest.raises(AssertionError):
        explore(log, seed, judge)


@pytest.mark.parametrize("member_count", [1, 2])
def test_cut_while_quota_moves_loses_only_pages_that_were_to_go(member_count: int, seed: int) -> None:
    log = CrashLog(member_count, size_bytes=(1 << 20) * 2 // member_count, block_size_bytes=512)
    volume = make(log, {"low": 300, "mine": 100}, mine=1)
    left = max(count for _, count in volume.free_extents(deadline())) * 512 // PAGE
    report, gifts = resize_with_room(
        volume, "mine", quota_pages=100 + left, journal_block_count=6, deadline=deadline()
    )
    assert gifts and report.quota_pages == 100 + left
    kept = stored(volume, "low", 300)
    assert len(kept) == gifts[0].quota_pages < 300
    sizes = set()

    def judge(volume: Volume) -> None:
        found = {info.name: info for info in volume.namespaces(deadline=deadline())}
        assert sorted(found) == ["low", "mine"]
        extents = sorted((each.slba, each.end) for info in found.values() for each in info.record.extents)
        assert all(one[1] <= two[0] for one, two in pairwise(extents))
        assert stored(volume, "mine", 100) == set(range(100))
        assert stored(volume, "low", 300) >= kept
        sizes.add((found["low"].quota_pages, found["mine"].quota_pages))
        for name in found:  # and whoever comes next can write
            store = PageStore(volume.open_namespace(name, deadline=deadline()))
            store.namespace.abandon()

    assert explore(log, seed, judge) > 50
    low, mine = gifts[0].quota_pages, 100 + left
    assert {(300, 100), (low, mine)} <= sizes <= {(300, 100), (low, 100), (low, mine)}
