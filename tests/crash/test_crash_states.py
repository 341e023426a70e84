"""After a power cut at any write the store opens, and no key gives bytes that were not put under it.

Every state is judged twice: by the bytes of every recovered entry without any checksum (the order of
writes alone must hold), and by ``get`` as users call it. Canaries break the order on purpose.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.native.index import SLOT_NONE, GrantArray
from kvdev.store.namespace import KvNamespace
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.volume import Volume
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.testing.crash_device import CrashLog

PAGE = 8192
GEOMETRY = Geometry(model_id="crash", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
KEY_COUNT = 10
QUOTA = 6
MEMBER_BYTES = 1 << 20


def deadline() -> Deadline:
    return Deadline.after(30)


def key_of(number: int) -> KeyArray:
    return np.full((1, 32), number + 1, dtype=np.uint8)


@functools.lru_cache(maxsize=4096)
def page_of(number: int, version: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([number, version]).integers(0, 256, PAGE, dtype=np.uint8)


@dataclass
class Op:
    """One call: which events it spans, what it put, which keys it may have changed."""

    start: int
    end: int
    kind: str
    put: dict[int, int] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    live: dict[int, int] = field(default_factory=dict)


class History:
    """A random sequence of calls on a recorded volume, and what it may leave behind."""

    def __init__(
        self,
        seed: int,
        member_count: int,
        op_count: int,
        *,
        namespace_type: type[KvNamespace] = KvNamespace,
        io_type: type[VolumeIo] = VolumeIo,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.namespace_type = namespace_type
        self.log = CrashLog(member_count, size_bytes=MEMBER_BYTES)
        volume = Volume.create(self.log.members, name="crash", strip_size_bytes=16384, deadline=deadline())
        volume.create_namespace("kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=6, deadline=deadline())
        self.io = io_type(volume.io.device, strip_size_bytes=16384)
        self.volume = volume
        self.live: dict[int, int] = {}
        self.version = 0
        self.ops: list[Op] = []
        self.log.start()
        self.open()
        for _ in range(op_count):
            self.step()
        self.namespace.abandon()

    def open(self) -> None:
        info = self.volume.namespace("kv", deadline=deadline())
        self.namespace = self.namespace_type(
            self.io,
            self.volume.directory,
            info.record.record_index,
            what="crash#kv",
            mode="owner",
            lock=None,
            deadline=deadline(),
        )
        self.store = PageStore(self.namespace)

    def step(self) -> None:
        kind = str(self.rng.choice(["put", "put", "put", "delete", "flush", "flush", "get", "reopen"]))
        op = Op(len(self.log.events), 0, kind)
        numbers = self.rng.choice(KEY_COUNT, size=int(self.rng.integers(1, 4)), replace=False).tolist()
        keys = np.concatenate([key_of(number) for number in numbers])
        if kind == "put":
            self.version += 1
            op.put = dict.fromkeys(numbers, self.version)
            pages = np.stack([page_of(number, self.version) for number in numbers])
            assert self.store.put(keys, pages).stored_count == len(numbers)
            self.live.update(op.put)
            op.changed |= set(numbers)
        elif kind == "delete":
            self.store.delete(keys)
            op.changed |= set(numbers)
            for number in numbers:
                self.live.pop(number, None)
        elif kind == "flush":
            self.store.flush()
        elif kind == "get":
            out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
            result = self.store.get(keys, out)
            for number, status, page in zip(numbers, result.status, out, strict=True):
                assert (status == PageStatus.HIT) == (number in self.live)
                if number in self.live:
                    assert np.array_equal(page, page_of(number, self.live[number]))
        elif self.rng.integers(0, 2):
            self.store.close()
            self.open()
        else:
            self.namespace.abandon()  # as kill -9 would leave it; what was not flushed may be lost
            self.open()
            op.changed |= set(self.live)
        all_keys = np.concatenate([key_of(number) for number in range(KEY_COUNT)])
        is_there = self.namespace.contains(all_keys)
        if kind == "reopen":
            self.live = self.read_live(all_keys)
        gone = {number for number in self.live if not is_there[number]}
        op.changed |= gone
        for number in gone:
            del self.live[number]
        op.live = dict(self.live)
        op.end = len(self.log.events)
        self.ops.append(op)

    def read_live(self, all_keys: KeyArray) -> dict[int, int]:
        out = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
        result = self.store.get(all_keys, out)
        return {
            number: version
            for number in range(KEY_COUNT)
            if result.status[number] == PageStatus.HIT
            for version in self.versions(number, len(self.log.events) + 1)
            if np.array_equal(out[number], page_of(number, version))
        }

    def versions(self, number: int, cut: int) -> list[int]:
        return [op.put[number] for op in self.ops if op.start < cut and number in op.put]

    def must_survive(self, cut: int) -> dict[int, int]:
        """Pages whose flush returned before the cut and that nothing since may have changed."""
        kept: dict[int, int] = {}
        for op in self.ops:
            if op.start >= cut:
                break
            for number in op.changed:
                kept.pop(number, None)
            is_durable = op.kind == "flush" or (op.kind == "reopen" and not op.changed)
            if is_durable and op.end <= cut:
                kept = dict(op.live)
        return kept


def judge(history: History, cut: int, devices: list[MemoryDevice]) -> str | None:
    """What is wrong with the state, or None."""
    try:
        return judge_opened(history, cut, Volume.open(devices, deadline=deadline()))
    except CorruptionError as refusal:
        return f"refused to open: {refusal}"


def judge_opened(history: History, cut: int, volume: Volume) -> str | None:
    info = volume.namespace("kv", deadline=deadline())
    namespace = KvNamespace(
        volume.io,
        volume.directory,
        info.record.record_index,
        what="crash#kv",
        mode="owner",
        lock=None,
        deadline=deadline(),
    )
    all_keys = np.concatenate([key_of(number) for number in range(KEY_COUNT)])
    grants = namespace.lookup(all_keys, touch=False)
    there = np.flatnonzero(grants["slot_index"] != SLOT_NONE)
    raw = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
    addresses = np.uint64(raw.ctypes.data) + np.arange(KEY_COUNT, dtype=np.uint64) * np.uint64(PAGE)
    namespace.page_io.read(grants[there], addresses[there], deadline=deadline(), wants_crc=False)
    for number in there.tolist():
        if not any(np.array_equal(raw[number], page_of(number, v)) for v in history.versions(number, cut)):
            return f"key {number}: live, but its bytes were never put under it"
    for number, version in history.must_survive(cut).items():
        if number not in there:
            return f"key {number}: was flushed and is gone"
        if not np.array_equal(raw[number], page_of(number, version)):
            return f"key {number}: was flushed and is another version"
    checked = np.zeros_like(raw)
    result = PageStore(namespace).get(all_keys, checked)
    if result.error_count or result.hit_count != len(there) or not np.array_equal(checked, raw):
        return f"get: expected {len(there)} hits as read, got {result.hit_count}, {result.error_count} errors"
    stat = namespace.stat().index
    if stat.live_count + stat.free_count + stat.leaving_count != stat.slot_count:
        return f"slots leak: {stat}"
    namespace.flush(deadline=deadline())
    if namespace.stat().index.leaving_count:
        return "slots leak: some never become free"
    return None


def explore(history: History, seed: int, *, images_per_cut: int, stop_at: int = 1) -> tuple[int, list[str]]:
    """Judge several states at every cut; returns how many, and what was wrong with the first bad ones."""
    rng = np.random.default_rng(seed)
    states = history.log.states()
    count = 0
    faults: list[str] = []
    while True:
        for _ in range(images_per_cut if states.unsafe_count else 1):
            devices = states.devices(states.image(rng))
            fault = judge(history, states.cut_index, devices)
            count += 1
            if fault is not None:
                faults.append(f"cut {states.cut_index} of {len(history.log.events)}: {fault}")
                if len(faults) >= stop_at:
                    return count, faults
        if not states.advance():
            return count, faults


@pytest.mark.parametrize("member_count", [1, 2, 4])
def test_any_cut_when_reopened_gives_what_was_put_or_a_miss(member_count: int, seed: int) -> None:
    history = History(seed + member_count, member_count, op_count=80)
    count, faults = explore(history, seed, images_per_cut=4)
    print(f"seed {seed}, {member_count} members: {count} states of {len(history.log.events)} events")
    assert not faults, faults


class EntryBeforeData(KvNamespace):
    """Canary: the journal tells of pages whose data may still be in caches."""

    def _commit(self, deadline: Deadline) -> None:
        data, self._dirty_data = self._dirty_data, self._io.no_members()
        super()._commit(deadline)
        self._io.flush(data, deadline)


class OneMemberForgotten(VolumeIo):
    """Canary: member 1 is never flushed."""

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        members = members.copy()
        members[1] = False
        super().flush(members, deadline)


class SlotReusedEarly(KvNamespace):
    """Canary: slots of evicted pages are handed out before their free records are durable."""

    def reserve(self, keys: KeyArray, *, deadline: Deadline) -> GrantArray:
        stat = self._index.stat()
        self._index.evict(max(0, stat.live_count + len(keys) - self.quota_pages))
        pending = self._index.collect()
        self._index.settle(pending[pending["state"] == 0])
        self._index.fail(pending[pending["state"] == 1])
        return super().reserve(keys, deadline=deadline)


@pytest.mark.parametrize(
    ("namespace_type", "io_type"),
    [(EntryBeforeData, VolumeIo), (KvNamespace, OneMemberForgotten), (SlotReusedEarly, VolumeIo)],
)
def test_canary_when_the_order_is_broken_is_caught(
    namespace_type: type[KvNamespace], io_type: type[VolumeIo], seed: int
) -> None:
    for attempt in range(4):
        history = History(seed + attempt, 2, op_count=45, namespace_type=namespace_type, io_type=io_type)
        _, faults = explore(history, seed + attempt, images_per_cut=4)
        if faults:
            return
    pytest.fail("no state showed the broken order")
