"""Writes of unknown fate that land late, over whatever came after: the adversary is a device that keeps them back.

Any write may end with "fate unknown"; it lands at once, never, or at any time until the device's fence, in any order.
Whatever it does, a key gives what was put under it or a miss, and what was flushed stays (S-22). ``KVDEV_LONG=1`` runs
more histories; a fault names its seed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import KvdevError, LeaseLostError
from kvdev.geometry import Geometry
from kvdev.native.io import EUNCERTAIN, OPCODE_WRITE
from kvdev.store.namespace import KvNamespace
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.quarantine import Quarantine
from kvdev.store.volume import Volume

BLOCK = 512
GEOMETRY = Geometry(model_id="late", layer_count=1, kv_head_count=1, head_size=8, tokens_per_page=32)
PAGE = GEOMETRY.page_size_bytes
KEY_COUNT = 24
QUOTA = 14
JOURNAL_BLOCKS = 8
STRIP = 16384
FAR_NS = 1 << 60
HISTORY_COUNT = 400 if os.environ.get("KVDEV_LONG") else 8
OP_COUNT = 40

Bytes = npt.NDArray[np.uint8]


def soon() -> Deadline:
    return Deadline.after(20)


class LookClock:
    """Time that goes on by a microsecond with each look at it: how far a call comes is not up to the machine."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def at_once() -> Deadline:
    """For what may wait for a fence that does not come: ten times as many looks as any call takes that need not."""
    return Deadline.after(0.0003, clock=LookClock())


@dataclass
class Kept:
    """A write that was sent and is still on its way."""

    device: LateDevice
    slba: int
    payload: Bytes


class Network:
    """Decides which writes are lost, and lets them land late."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.kept: list[Kept] = []
        self.chance = 0.0
        self.fence_ns = 0
        self.lost_count = 0
        self.late_count = 0

    def lose(self, device: LateDevice, slba: int, payload: Bytes) -> bool:
        if self.rng.random() >= self.chance:
            return False
        self.lost_count += 1
        self.fence_ns = FAR_NS
        if self.rng.random() < 0.3:
            device.land(slba, payload)  # executed, and the answer was lost
        self.kept.append(Kept(device, slba, payload.copy()))
        return True

    def land_some(self) -> None:
        """Some of what is under way arrives, in any order; the rest goes on or gets lost."""
        order = self.rng.permutation(len(self.kept))
        landing = [self.kept[index] for index in order if self.rng.random() < 0.4]
        for each in landing:
            each.device.land(each.slba, each.payload)
            self.late_count += 1
        self.kept = [each for each in self.kept if not any(each is other for other in landing)]

    def fence(self) -> None:
        """From now on nothing lands any more."""
        self.land_some()
        self.kept.clear()
        self.fence_ns = SYSTEM_CLOCK.monotonic_ns()


class LateDevice(MemoryDevice):
    """Memory behind a network that may keep writes back."""

    def __init__(self, network: Network, *, has_compare: bool, name: str, queue: LocalQueue) -> None:
        super().__init__(size_bytes=1 << 20, name=name, block_size_bytes=BLOCK, queue=queue)
        self.network = network
        self.observer = self.observe
        if not has_compare:
            self.compare_and_write_blocks = 0

    @property
    def fence_ns(self) -> int:
        return self.network.fence_ns

    def land(self, slba: int, payload: Bytes) -> None:
        self.data[slba * BLOCK : slba * BLOCK + payload.nbytes] = payload

    def observe(self, opcode: int, slba: int, payload: Bytes | None) -> tuple[int, int]:
        if opcode == OPCODE_WRITE and payload is not None and self.network.lose(self, slba, payload):
            return -EUNCERTAIN, 0
        return 0, 0


class History:
    """Random calls under random losses, next to a model of what each key may give."""

    def __init__(self, seed: int, *, member_count: int, has_compare: bool) -> None:
        self.rng = np.random.default_rng([seed, member_count, int(has_compare)])
        self.network = Network(self.rng)
        queue = LocalQueue()
        self.members = [
            LateDevice(self.network, has_compare=has_compare, name=f"m{index}", queue=queue)
            for index in range(member_count)
        ]
        volume = Volume.create(self.members, name="late", strip_size_bytes=STRIP, deadline=soon())
        volume.create_namespace(
            "kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=JOURNAL_BLOCKS, deadline=soon()
        )
        self.put: dict[int, set[bytes]] = {number: set() for number in range(KEY_COUNT)}
        self.flushed: dict[int, bytes] = {}
        """Where nothing but what was flushed may be found: not touched, replaced or failed since."""
        self.open()

    def open(self) -> None:
        volume = Volume.open(self.members, deadline=soon())
        self.store = PageStore(volume.open_namespace("kv", deadline=soon()))

    def keys(self, numbers: list[int]) -> Bytes:
        keys = np.zeros((len(numbers), 32), dtype=np.uint8)
        keys[:, 0] = np.array(numbers) + 1
        return keys

    def run(self, op_count: int) -> str | None:
        for step in range(op_count):
            fault = self.step()
            if fault is not None:
                return f"step {step}: {fault}"
        return None

    def step(self) -> str | None:
        kind = str(self.rng.choice(["put", "put", "put", "flush", "flush", "delete", "fence", "reopen"]))
        numbers = self.rng.choice(KEY_COUNT, size=int(self.rng.integers(1, 4)), replace=False).tolist()
        self.network.chance = float(self.rng.choice([0, 0.1, 0.1, 0.4]))
        try:
            self.call(kind, numbers)
        except LeaseLostError:
            return "nobody took it over"
        except KvdevError:
            self.flushed = {number: page for number, page in self.flushed.items() if self.holds(number, page)}
        self.network.chance = 0.0
        self.network.land_some()
        return self.judge()

    def call(self, kind: str, numbers: list[int]) -> None:
        keys = self.keys(numbers)
        if kind == "put":
            pages = self.rng.integers(0, 256, (len(numbers), PAGE), dtype=np.uint8)
            for number, page in zip(numbers, pages, strict=True):
                self.put[number].add(page.tobytes())
                self.flushed.pop(number, None)
            self.store.put(keys, pages, deadline=at_once())
            there = self.store.contains(self.keys(list(range(KEY_COUNT))))
            self.flushed = {number: page for number, page in self.flushed.items() if there[number]}
        elif kind == "flush":
            self.store.flush(deadline=at_once())
            self.flushed = self.read()
        elif kind == "delete":
            for number in numbers:
                self.flushed.pop(number, None)
            self.store.delete(keys, deadline=at_once())
        elif kind == "fence":
            self.network.fence()
        else:
            self.reopen()

    def reopen(self) -> None:
        """Closed in order where that works, else given up; the next owner waits for the fence."""
        try:
            self.store.close(deadline=at_once())
        except KvdevError:
            self.store.namespace.abandon()
        is_clean = self.store.namespace._record.is_clean
        self.network.chance = 0.0
        if not is_clean:
            self.network.fence()
        self.open()

    def holds(self, number: int, page: bytes) -> bool:
        return self.read().get(number) == page

    def read(self) -> dict[int, bytes]:
        self.network.chance = 0.0
        out = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
        got = self.store.get(self.keys(list(range(KEY_COUNT))), out)
        return {
            number: out[number].tobytes() for number in np.flatnonzero(got.status == PageStatus.HIT).tolist()
        }

    def judge(self) -> str | None:
        """What media hold now, opened by somebody who was not there, once nothing more lands."""
        images = [member.data.copy() for member in self.members]
        queue = LocalQueue()
        devices = [
            MemoryDevice(size_bytes=1 << 20, name=f"m{i}", block_size_bytes=BLOCK, data=image, queue=queue)
            for i, image in enumerate(images)
        ]
        volume = Volume.open(devices, deadline=soon())
        namespace = KvNamespace(
            volume.io,
            volume.directory,
            0,
            what="judge",
            mode="owner",
            lock=None,
            deadline=soon(),
        )
        out = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
        got = PageStore(namespace).get(self.keys(list(range(KEY_COUNT))), out)
        for number in range(KEY_COUNT):
            if got.status[number] == PageStatus.ERROR:
                return (
                    f"key {number}: an entry that its bytes do not fit: order alone must keep them together"
                )
            if got.status[number] == PageStatus.HIT and out[number].tobytes() not in self.put[number]:
                return f"key {number}: bytes that were never put under it"
            expected = self.flushed.get(number)
            if expected is not None and (
                got.status[number] != PageStatus.HIT or out[number].tobytes() != expected
            ):
                return f"key {number}: was flushed and is {'gone' if not got.status[number] else 'another'}"
        return None


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("has_compare", [True, False])
@pytest.mark.parametrize("member_count", [1, 3])
def test_late_writes_when_they_land_change_nothing_that_counts(
    member_count: int, has_compare: bool, seed: int
) -> None:
    lost = late = 0
    for index in range(HISTORY_COUNT // 4):
        history = History(seed + index, member_count=member_count, has_compare=has_compare)
        fault = history.run(OP_COUNT)
        assert fault is None, f"KVDEV_SEED={seed + index}: {fault}"
        lost += history.network.lost_count
        late += history.network.late_count
    print(f"seed {seed}: {lost} writes lost, {late} of them landed late")
    assert lost and late


def test_slots_of_lost_writes_rest_until_the_fence_and_are_used_again(seed: int) -> None:
    history = History(seed, member_count=2, has_compare=True)
    history.network.chance = 1.0
    pages = np.zeros((4, PAGE), dtype=np.uint8)
    result = history.store.put(history.keys([1, 2, 3, 4]), pages)
    assert result.status.tolist() == [PageStatus.ERROR] * 4
    history.network.chance = 0.0
    assert history.store.put(history.keys([5]), pages[:1]).stored_count == 1
    assert history.store.namespace.stat().index.quarantined_count == 4
    history.network.fence()
    assert history.store.put(history.keys([6]), pages[:1]).stored_count == 1
    assert history.store.namespace.stat().index.quarantined_count == 0


def test_owner_that_closes_while_something_may_land_leaves_the_wait_to_the_next(seed: int) -> None:
    history = History(seed, member_count=2, has_compare=True)
    history.network.chance = 1.0
    history.store.put(history.keys([1]), np.zeros((1, PAGE), dtype=np.uint8))
    history.network.chance = 0.0
    history.store.close()
    volume = Volume.open(history.members, deadline=soon())
    assert not volume.namespace("kv", deadline=soon()).is_clean
    following = volume.open_namespace("kv", deadline=soon())
    with pytest.raises(TimeoutError, match="writes of the owner before may still land"):
        following.flush(deadline=at_once())
    history.network.fence()
    following.abandon()
    history.open()
    assert history.store.put(history.keys([1]), np.zeros((1, PAGE), dtype=np.uint8)).stored_count == 1


class NeverRests(Quarantine):
    """Canary: places are written again although something may still land there."""

    def __contains__(self, place: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0


def test_canary_when_nothing_is_quarantined_is_caught(seed: int) -> None:
    for index in range(60):
        history = History(seed + index, member_count=1, has_compare=True)
        for _ in range(OP_COUNT):
            namespace = history.store.namespace
            for owner in (namespace._table_io, namespace._journal):
                if not isinstance(owner.quarantine, NeverRests):
                    owner.quarantine = NeverRests(namespace._io.is_fenced)
            if history.step() is not None:
                return
    pytest.fail("a store that rewrites what lost writes may still reach was not caught")
