"""After a power cut at any write of a change to the volume itself it has its old state or the new one.

Blocks in flight at the cut are also torn to nonsense. ``KVDEV_LONG=1`` explores more of each cut. A fault names seed,
cut and choice: the same test with that ``KVDEV_SEED`` replays it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.members import read_label
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.recreate import _Recreation, recreate_volume
from kvdev.store.superblock import Record
from kvdev.store.volume import Volume
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.testing.crash_device import CrashLog, CrashStates

BLOCK = 512
STRIP = 16384
MIB = 1 << 20
GEOMETRY = Geometry(model_id="crash", layer_count=1, kv_head_count=1, head_size=8, tokens_per_page=32)
PAGE = GEOMETRY.page_size_bytes
EXHAUSTIVE_COUNT = 4
RANDOM_COUNT = 32 if os.environ.get("KVDEV_LONG") else 6
NONSENSE = 0xA5


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def deadline() -> Deadline:
    return Deadline.after(120)


def states_of(log: CrashLog, seed: int) -> Iterator[tuple[CrashStates, str]]:
    """Every cut, with sets of unsafe blocks that reached media, whole or torn; undone when the next is asked for."""
    rng = np.random.default_rng(seed)
    kept = 1.0 if os.environ.get("KVDEV_LONG") else 0.1
    states = log.states()
    while True:
        choices = states.choices(rng, exhaustive_count=EXHAUSTIVE_COUNT, random_count=RANDOM_COUNT)
        for number, choice in enumerate(choices):
            torn = [(member, place, np.full_like(data, NONSENSE)) for member, place, data in choice]
            for variant, word in ((choice, "whole"), (torn, "torn")) if choice else ((choice, "whole"),):
                if 0 < number < len(choices) - 1 and rng.random() >= kept:
                    continue  # none of the blocks, and all of them, are always tried
                states.apply(variant)
                yield (
                    states,
                    f"KVDEV_SEED={seed}, cut {states.cut_index} of {len(log.events)}, choice {number}, {word}",
                )
                states.restore()
        if not states.advance():
            return


def batch(rng: np.random.Generator, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    keys = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    return keys, rng.integers(0, 256, (count, PAGE), dtype=np.uint8)


class Grown:
    """A volume that takes its members in step by step, each with a KV namespace in the new room."""

    def __init__(self, member_count: int, seed: int, *, io_type: Callable[..., VolumeIo] = VolumeIo) -> None:
        rng = np.random.default_rng([seed, member_count])
        self.log = CrashLog(member_count, size_bytes=MIB, block_size_bytes=BLOCK)
        row_bytes = STRIP * member_count
        rows = MIB // STRIP
        first = rows - 24
        volume = Volume.create(
            self.log.members,
            name="grown",
            strip_size_bytes=STRIP,
            size_bytes=first * row_bytes,
            deadline=deadline(),
        )
        self.pages: list[tuple[int, str, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = []
        self.steps: list[tuple[int, int, int]] = [(0, 0, first)]
        """First event, end, and rows of each size."""
        self.log.start()
        volume.io = io_type(volume.io.device, strip_size_bytes=STRIP)
        self.fill(volume, "kv0", rng)
        for step, count in enumerate((first + 8, first + 9, rows), start=1):
            start = len(self.log.events)
            volume.grow(size_bytes=count * row_bytes, deadline=deadline())
            self.steps.append((start, len(self.log.events), count))
            if step != 2:
                self.fill(volume, f"kv{step}", rng)

    def fill(self, volume: Volume, name: str, rng: np.random.Generator) -> None:
        """A namespace that takes most of what is free, with a page that is flushed."""
        volume.create_namespace(name, GEOMETRY, quota_pages=6, journal_block_count=6, deadline=deadline())
        store = PageStore(volume.open_namespace(name, deadline=deadline()))
        keys, pages = batch(rng, 2)
        store.put(keys, pages)
        store.close()
        self.pages.append((len(self.log.events), name, keys, pages))

    def fault_of(self, states: CrashStates) -> str | None:
        cut = states.cut_index
        done = [rows for _, end, rows in self.steps if end <= cut]
        begun = [rows for start, end, rows in self.steps if start < cut < end]
        volume = Volume.open(states.devices, deadline=deadline())
        if volume.superblock.row_count not in (done[-1], *begun):
            return f"{volume.superblock.row_count} rows, expected {done[-1]} or {begun}"
        for end, name, keys, pages in self.pages:
            if end > cut:
                continue
            store = PageStore(volume.open_namespace(name, deadline=deadline()))
            out = np.zeros_like(pages)
            is_whole = store.get(keys, out).hit_count == len(keys) and np.array_equal(out, pages)
            store.namespace.abandon()
            if not is_whole:
                return f"{name}: a flushed page is gone"
        volume.grow(deadline=deadline())
        if Volume.open(states.devices, deadline=deadline()).superblock.row_count != self.steps[-1][2]:
            return "growing again does not finish it"
        return None


@pytest.mark.parametrize("member_count", [1, 2, 4])
def test_any_cut_while_a_volume_grows_leaves_the_old_size_or_the_new_one(
    member_count: int, seed: int
) -> None:
    history = Grown(member_count, seed)
    starts = [start for start, _, _ in history.steps[1:]]
    count = 0
    for states, where in states_of(history.log, seed):
        if any(start <= states.cut_index <= start + 8 for start in starts) or states.cut_index % 8 == 0:
            if "torn" in where and not any(
                start < states.cut_index <= end for start, end, _ in history.steps
            ):
                continue  # what a namespace does when its own blocks tear is judged elsewhere
            fault = history.fault_of(states)
            assert fault is None, f"{where}: {fault}"
            count += 1
    assert count > 25


class NeverFlushed(VolumeIo):
    """Canary: nothing is flushed between the copies of the superblock, or after them."""

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        del members, deadline


def test_canary_when_a_grown_superblock_is_not_flushed_is_caught(seed: int) -> None:
    log = CrashLog(2, size_bytes=MIB, block_size_bytes=BLOCK)
    volume = Volume.create(log.members, name="c", strip_size_bytes=STRIP, size_bytes=MIB, deadline=deadline())
    log.start()
    volume.io = NeverFlushed(volume.io.device, strip_size_bytes=STRIP)
    volume.grow(deadline=deadline())
    for states, _ in states_of(log, seed):
        try:
            Volume.open(states.devices, deadline=deadline())
        except Exception as fault:
            print(fault)
            return
    pytest.fail("no state showed the missing flush")


# --- made anew ---------------------------------------------------------------------------------


class Recreated:
    """A volume whose member 1 is lost, made anew with a blank one in its place."""

    NAMES = ("a", "b", "c")

    def __init__(self, member_count: int, lost: int, seed: int) -> None:
        rng = np.random.default_rng([seed, member_count, lost])
        self.lost = lost
        # The lost member and the new one are both of the log, so that a state can be opened with either.
        self.log = CrashLog(member_count + 1, size_bytes=MIB, block_size_bytes=BLOCK)
        old = self.log.members[:member_count]
        volume = Volume.create(old, name="anew", strip_size_bytes=STRIP, deadline=deadline())
        self.former_uuid = volume.uuid
        self.put: dict[bytes, bytes] = {}
        self.keys: dict[str, npt.NDArray[np.uint8]] = {}
        for name in self.NAMES:
            volume.create_namespace(
                name,
                GEOMETRY,
                quota_pages=4,
                journal_block_count=6,
                eviction_policy="fifo",
                ttl_s=900,
                priority=3,
                reserve_pages=2,
                salt_mark=5,
                checksum="nh64",
                deadline=deadline(),
            )
            store = PageStore(volume.open_namespace(name, deadline=deadline()))
            self.keys[name], pages = batch(rng, 3)
            store.put(self.keys[name], pages)
            self.put |= {
                key.tobytes(): page.tobytes() for key, page in zip(self.keys[name], pages, strict=True)
            }
            store.flush()
            if name == "b":
                store.namespace.abandon()  # as kill -9 would leave it
            else:
                store.close()
        self.facts = self.facts_of(volume)
        self.log.start()
        self.recreate(self.log.members)

    def facts_of(self, volume: Volume) -> list[tuple[object, ...]]:
        return [
            (
                info.name,
                info.geometry,
                info.quota_pages,
                info.slot_count,
                info.eviction_policy,
                info.ttl_s,
                info.priority,
                info.reserve_pages,
                info.salt_mark,
                info.checksum,
                info.record.extent_slba,
            )
            for info in volume.namespaces(deadline=deadline())
        ]

    def recreate(self, devices: Sequence[BlockDevice]) -> None:
        *others, newcomer = self.after(devices)
        recreate_volume([*others, newcomer], replaced=[newcomer.uri], deadline=deadline())

    def after(self, devices: Sequence[BlockDevice]) -> list[BlockDevice]:
        """Those that are left, and the new one."""
        return [device for index, device in enumerate(devices) if index != self.lost]

    def fault_of(self, states: CrashStates) -> str | None:
        with contextlib.suppress(UsageError, CorruptionError):
            volume = Volume.open(states.devices[:-1], deadline=deadline())
            if fault := self.old_fault(volume):
                return fault
        devices = self.after(states.devices)
        try:
            volume = Volume.open(devices, deadline=deadline())
        except (UsageError, CorruptionError):
            self.again(states)
            volume = Volume.open(devices, deadline=deadline())
        if volume.uuid == self.former_uuid:
            return "the volume that was opens with the new member"
        if self.facts_of(volume) != self.facts:
            return f"other namespaces: {self.facts_of(volume)}"
        for name in self.NAMES:
            store = PageStore(volume.open_namespace(name, deadline=deadline()))
            keys = self.keys[name]
            if store.contains(keys).any():
                return f"{name}: has pages of the volume that was"
            pages = np.full((len(keys), PAGE), 7, dtype=np.uint8)
            out = np.zeros_like(pages)
            store.put(keys, pages)
            if store.get(keys, out).hit_count != len(keys) or not np.array_equal(out, pages):
                return f"{name}: cannot be used"
            store.close()
        return None

    def again(self, states: CrashStates) -> None:
        """The same call; a member whose label is nonsense now counts as one more new one."""
        devices = self.after(states.devices)
        torn = [device.uri for device in devices[:-1] if not has_label(device)]
        # Where nothing else is left, the new one has its label already.
        replaced = torn if len(torn) == len(devices) - 1 else [*torn, devices[-1].uri]
        places = {device.uri: index for index, device in enumerate(states.devices)} | {
            devices[-1].uri: self.lost
        }
        replaced = sorted(replaced, key=lambda uri: places[uri])
        recreate_volume(devices, replaced=replaced, destroy=frozenset(replaced), deadline=deadline())

    def old_fault(self, volume: Volume) -> str | None:
        """The lost member came back: what opens is the volume that was, with what was put."""
        if volume.uuid != self.former_uuid:
            return "the lost member is one of the new volume"
        for name in self.NAMES:
            with contextlib.suppress(UsageError, CorruptionError):
                store = PageStore(volume.open_namespace(name, mode="reader", deadline=deadline()))
                keys = self.keys[name]
                out = np.zeros((len(keys), PAGE), dtype=np.uint8)
                status = store.get(keys, out).status
                for key, page, word in zip(keys, out, status, strict=True):
                    if word == PageStatus.HIT and self.put[key.tobytes()] != page.tobytes():
                        return f"{name}: a wrong page"
        return None


def has_label(device: BlockDevice) -> bool:
    try:
        read_label(device, deadline())
    except CorruptionError:
        return False
    return True


@pytest.mark.parametrize(("member_count", "lost"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_any_cut_while_a_volume_is_made_anew_leaves_one_that_the_same_call_finishes(
    member_count: int, lost: int, seed: int
) -> None:
    history = Recreated(member_count, lost, seed)
    count = 0
    for states, where in states_of(history.log, seed):
        fault = history.fault_of(states)
        assert fault is None, f"{where}: {fault}"
        count += 1
    assert count > 50


class QuotaForgotten(_Recreation):
    """Canary: what the namespaces may hold is taken from their slots."""

    def _anew(self, record: Record, geometry: Geometry) -> Record:
        return replace(super()._anew(record, geometry), quota_pages=record.slot_count)


class RecreatedWithoutQuota(Recreated):
    def recreate(self, devices: Sequence[BlockDevice]) -> None:
        *others, newcomer = self.after(devices)
        none: frozenset[str] = frozenset()
        again = QuotaForgotten([*others, newcomer], (newcomer.uri,), none, none, deadline())
        again.run(takeover=False)


def test_canary_when_a_volume_made_anew_forgets_a_quota_is_caught(seed: int) -> None:
    history = RecreatedWithoutQuota(2, 0, seed)
    faults = [fault for states, _ in states_of(history.log, seed) if (fault := history.fault_of(states))]
    assert faults and all("other namespaces" in fault for fault in faults)
