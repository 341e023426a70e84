"""After a power cut at any write the store opens, and no key gives bytes that were not put under it.

Every state is judged twice: by the bytes of every recovered entry without any checksum (the order of writes
alone must hold), and by ``get`` as users call it. Histories with device errors are among them. Canaries break
the order on purpose and must be caught. ``KVDEV_LONG=1`` explores 200,000 states, ``KVDEV_CRASH_STATES`` any
number. A fault names seed, cut and choice: the same test with that ``KVDEV_SEED`` replays it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.native.checksum import SumArray
from kvdev.native.index import SLOT_NONE, EntryArray, GrantArray
from kvdev.native.io import OPCODE_FLUSH
from kvdev.store.directory import Directory
from kvdev.store.fence import Fence
from kvdev.store.lease import Lease, OwnerIdentity
from kvdev.store.namespace import KvNamespace
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.resize import resize_namespace
from kvdev.store.superblock import RECORD_COUNT
from kvdev.store.superblock_io import write_superblocks
from kvdev.store.volume import Volume
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.testing.crash_device import CrashLog, CrashStates, Fault, Piece

BLOCK = 512
GEOMETRY = Geometry(model_id="crash", layer_count=1, kv_head_count=1, head_size=8, tokens_per_page=32)
PAGE = GEOMETRY.page_size_bytes
assert PAGE == 2 * BLOCK, "a page tears"
KEY_COUNT = 10
ALL_KEYS = np.stack([np.full(32, number + 1, dtype=np.uint8) for number in range(KEY_COUNT)])
QUOTA = 6
JOURNAL_BLOCKS = 6
STRIP = 16384
MEMBER_BYTES = 1 << 20
IDENTITY = OwnerIdentity.current()
"""Asked of the kernel once, not for each of many thousand owners."""
assert RECORD_COUNT * 4096 * 2 + 8 * STRIP < MEMBER_BYTES
EXHAUSTIVE_COUNT = 4
"""Up to so many unsafe blocks every subset is tried: 16 states."""
RANDOM_COUNT = 6
OP_COUNT = 120
STATE_COUNT = int(
    os.environ.get("KVDEV_CRASH_STATES") or (200_000 if os.environ.get("KVDEV_LONG") else 4_000)
)
CASE_COUNT = 8 + 3
"""Among so many: cuts with and without faults on 1 to 4 members, resizes on 1 to 3."""

Bytes = npt.NDArray[np.uint8]


def deadline() -> Deadline:
    return Deadline.after(120)


def page_of(number: int, version: int) -> Bytes:
    return np.random.default_rng([number, version]).integers(0, 256, PAGE, dtype=np.uint8)


@dataclass
class Op:
    """One call: which events it spans, what it put, and what it may have taken away."""

    start: int
    end: int
    kind: str
    put: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    live: dict[int, int] = field(default_factory=dict)
    has_failed: bool = False


class History:
    """A random sequence of calls on a recorded volume, and what it may leave behind."""

    def __init__(
        self,
        seed: int,
        member_count: int,
        op_count: int = OP_COUNT,
        *,
        has_faults: bool = False,
        resizes: bool = False,
        namespace_type: type[KvNamespace] = KvNamespace,
        io_type: type[VolumeIo] = VolumeIo,
    ) -> None:
        self.seed = seed
        self.rng = np.random.default_rng([seed, member_count, int(has_faults)])
        self.namespace_type = namespace_type
        self.resizes = resizes
        self.log = CrashLog(member_count, size_bytes=MEMBER_BYTES, block_size_bytes=BLOCK)
        volume = Volume.create(self.log.members, name="crash", strip_size_bytes=STRIP, deadline=deadline())
        info = volume.create_namespace(
            "kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=JOURNAL_BLOCKS, deadline=deadline()
        )
        self.record = info.record
        self.io = io_type(volume.io.device, strip_size_bytes=STRIP)
        self.volume = volume
        self.live: dict[int, int] = {}
        self.put_at: dict[bytes, tuple[int, int, int]] = {}
        """Page bytes -> key, version, and the event before which they were put."""
        self.version = 0
        self.ops: list[Op] = []
        self.log.start()
        self.open()
        for _ in range(op_count):
            self.step(has_faults=has_faults)

    def open(self) -> None:
        self.namespace = open_namespace(
            self.io, self.volume.directory, self.record.record_index, self.namespace_type
        )
        self.store = PageStore(self.namespace)

    def fault(self, member_index: int, opcode: int) -> str | None:
        """One command in eight fails, half of the writes among them after they reached the medium."""
        if self.rng.integers(0, 8):
            return None
        return "lost" if opcode == OPCODE_FLUSH or self.rng.integers(0, 2) else "taken"

    def step(self, *, has_faults: bool) -> None:
        kinds = ["put", "put", "put", "delete", "flush", "flush", "get", "reopen"]
        kind = str(self.rng.choice([*kinds, "resize"] if self.resizes else kinds))
        numbers = self.rng.choice(KEY_COUNT, size=int(self.rng.integers(1, 4)), replace=False).tolist()
        is_faulty = has_faults and kind in ("put", "delete", "flush") and not self.rng.integers(0, 3)
        self.do(kind, numbers, fault=self.fault if is_faulty else None)

    def do(self, kind: str, numbers: list[int], *, fault: Fault | None = None) -> None:
        """One call, with ``fault`` deciding which of its commands fail; notes what it did."""
        op = Op(len(self.log.events), 0, kind)
        self.ops.append(op)
        keys = np.ascontiguousarray(ALL_KEYS[numbers])
        self.log.fault = fault
        try:
            self.call(op, numbers, keys)
        except KvdevError:
            if fault is None:
                raise
            op.has_failed = True
        self.log.fault = None
        if fault is not None or kind in ("reopen", "resize"):
            after = self.read_live()
        else:
            there = self.namespace.contains(ALL_KEYS)
            after = {number: version for number, version in (self.live | op.put).items() if there[number]}
        op.gone |= set(self.live) - set(after)
        self.live = after
        op.live = dict(after)
        op.end = len(self.log.events)

    def call(self, op: Op, numbers: list[int], keys: KeyArray) -> None:
        if op.kind == "put":
            self.version += 1
            op.put = dict.fromkeys(numbers, self.version)
            pages = np.stack([page_of(number, self.version) for number in numbers])
            for number, page in zip(numbers, pages, strict=True):
                self.put_at[page.tobytes()] = (number, self.version, op.start)
            stored = self.store.put(keys, pages).stored_count
            assert stored == len(numbers) or self.log.fault is not None
        elif op.kind == "delete":
            op.gone |= set(numbers)
            self.store.delete(keys)
        elif op.kind == "flush":
            self.store.flush()
        elif op.kind == "get":
            out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
            result = self.store.get(keys, out)
            for number, status, page in zip(numbers, result.status, out, strict=True):
                assert (status == PageStatus.HIT) == (number in self.live)
                if number in self.live:
                    assert np.array_equal(page, page_of(number, self.live[number]))
        elif op.kind == "resize":
            self.store.close()
            quota = int(self.rng.integers(4, 2 * QUOTA))
            resize_namespace(
                self.volume, "kv", quota_pages=quota, journal_block_count=JOURNAL_BLOCKS, deadline=deadline()
            )
            self.open()
        elif self.rng.integers(0, 2):
            self.store.close()
            self.open()
        else:
            self.namespace.abandon()  # as kill -9 would leave it; what was not flushed may be lost
            self.open()

    def read_live(self) -> dict[int, int]:
        out = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
        result = self.store.get(ALL_KEYS, out)
        live = {}
        for number in np.flatnonzero(result.status == PageStatus.HIT).tolist():
            owner, version, _ = self.put_at[out[number].tobytes()]
            assert owner == number
            live[number] = version
        return live

    def must_survive(self, cut: int) -> dict[int, set[int]]:
        """Pages that a cut may not take, and the versions of which one must be found.

        What a flush returned for stays until it is deleted or evicted; a page that is being replaced is
        found as itself or as its successor. A failed call withdraws what it covered.
        """
        kept: dict[int, set[int]] = {}
        for op in self.ops:
            if op.start >= cut:
                break
            for number, version in op.put.items():
                if number in kept:
                    kept[number].add(version)
            for number in op.gone:
                kept.pop(number, None)
            if op.has_failed:
                kept = {number: versions for number, versions in kept.items() if len(versions) == 1}
            elif op.kind in ("flush", "reopen", "resize") and op.end <= cut:
                kept = {number: {version} for number, version in op.live.items()}
        return kept


def open_namespace(
    io: VolumeIo, directory: Directory, record_index: int, namespace_type: type[KvNamespace] = KvNamespace
) -> KvNamespace:
    lease = Lease("crash#kv", fence=Fence(), identity=IDENTITY)
    return namespace_type(
        io,
        directory,
        record_index,
        what="crash#kv",
        mode="owner",
        lock=None,
        lease=lease,
        deadline=deadline(),
    )


@dataclass
class Found:
    """What opening a state gave, whenever the power failed."""

    refusal: str = ""
    raw: dict[int, bytes] = field(default_factory=dict)
    """What lies on media in the slot of each live key."""
    fault: str | None = None


class Judge:
    """Opens states of one history's cuts and says what is wrong with them.

    Many cuts leave the same bytes: those are opened once, and judged for each cut.
    """

    def __init__(self, history: History, states: CrashStates) -> None:
        self.history = history
        self.states = states
        self.found: dict[int, Found] = {}
        # Labels and superblock are written before the recording starts: each state has the same.
        volume = Volume.open(states.devices, deadline=deadline())
        self.io = volume.io
        self.directory = volume.directory
        self.checked = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)

    def raw_page(self, slot_index: int) -> bytes:
        """A slot's bytes as they lie on media, past every layer that might check them."""
        record = self.history.record
        strip_blocks = STRIP // BLOCK
        block = record.data_slba + slot_index * record.slot_blocks
        strip, within = divmod(block, strip_blocks)
        row, member = divmod(strip, len(self.states.devices))
        start = (row * strip_blocks + within) * BLOCK
        return self.states.devices[member].data[start : start + PAGE].tobytes()

    def fault_of(self, choice: list[Piece], must: dict[int, set[int]]) -> str | None:
        """What is wrong with the state in which the chosen blocks have reached media, or None."""
        cut = self.states.cut_index
        key = self.states.key_of(choice)
        found = self.found.get(key)
        if found is None:
            self.states.apply(choice)
            found = self.found[key] = self.open()
            self.states.restore()
        if found.refusal:
            return f"refused to open: {found.refusal}"
        for number, page in found.raw.items():
            owner, version, start = self.history.put_at.get(page, (-1, -1, cut))
            if owner != number or start >= cut:
                return f"key {number}: live, but its bytes were never put under it"
            if number in must and version not in must[number]:
                return f"key {number}: was flushed and is another version"
        for number in must:
            if number not in found.raw:
                return f"key {number}: was flushed and is gone"
        return found.fault

    def open(self) -> Found:
        try:
            namespace = open_namespace(self.io, self.directory, self.history.record.record_index)
        except CorruptionError as refusal:
            return Found(refusal=str(refusal))
        slots = namespace.lookup(ALL_KEYS, touch=False)["slot_index"].tolist()
        raw = {number: self.raw_page(slot) for number, slot in enumerate(slots) if slot != SLOT_NONE}
        return Found(raw=raw, fault=self.fault_of_get(namespace, raw) or self.fault_of_slots(namespace))

    def fault_of_get(self, namespace: KvNamespace, raw: dict[int, bytes]) -> str | None:
        """Users get what lies on media, and no more than that."""
        result = PageStore(namespace).get(ALL_KEYS, self.checked)
        if result.error_count or result.hit_count != len(raw):
            return f"get: expected {len(raw)} hits, got {result.hit_count}, {result.error_count} errors"
        if any(self.checked[number].tobytes() != page for number, page in raw.items()):
            return "get: other bytes than those on media"
        return None

    def fault_of_slots(self, namespace: KvNamespace) -> str | None:
        stat = namespace.stat().index
        if stat.live_count + stat.free_count + stat.leaving_count != stat.slot_count:
            return f"slots leak: {stat}"
        namespace.flush(deadline=deadline())
        if namespace.stat().index.leaving_count:
            return "slots leak: some never become free"
        return None


def explore(history: History, *, state_limit: int = 1 << 30) -> tuple[int, str | None]:
    """Judge states at every cut; returns how many, and what was wrong with the first bad one."""
    rng = np.random.default_rng(history.seed)
    states = history.log.states()
    judge = Judge(history, states)
    count = 0
    while count < state_limit:
        must = history.must_survive(states.cut_index)
        choices = states.choices(rng, exhaustive_count=EXHAUSTIVE_COUNT, random_count=RANDOM_COUNT)
        for number, choice in enumerate(choices):
            fault = judge.fault_of(choice, must)
            count += 1
            if fault is not None:
                where = f"cut {states.cut_index} of {len(history.log.events)}, choice {number}"
                return count, f"KVDEV_SEED={history.seed}, {where}: {fault}"
        if not states.advance():
            break
    return count, None


@pytest.mark.parametrize("has_faults", [False, True])
@pytest.mark.parametrize("member_count", [1, 2, 3, 4])
def test_any_cut_when_reopened_gives_what_was_put_or_a_miss(
    member_count: int, has_faults: bool, seed: int
) -> None:
    wanted = -(-STATE_COUNT // CASE_COUNT)
    count = histories = faults = 0
    while count < wanted:
        history = History(seed + histories, member_count, has_faults=has_faults)
        done, fault = explore(history, state_limit=wanted - count)
        assert fault is None, fault
        count += done
        histories += 1
        faults += history.log.fault_count
    print(f"seed {seed}, {member_count} members, {faults} faults: {count} states of {histories} histories")
    assert bool(faults) == has_faults


@pytest.mark.parametrize("member_count", [1, 2, 3])
def test_any_cut_of_a_resize_leaves_the_old_size_or_the_new_one_and_every_page(
    member_count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    wanted = -(-STATE_COUNT // CASE_COUNT)
    count = histories = 0
    while count < wanted:
        history = History(seed + histories, member_count, op_count=60, resizes=True)
        assert any(op.kind == "resize" for op in history.ops)
        done, fault = explore(history, state_limit=wanted - count)
        assert fault is None, fault
        count += done
        histories += 1


def test_states_of_one_history_have_one_key_exactly_when_their_bytes_are_the_same(seed: int) -> None:
    history = History(seed, 2, op_count=30, has_faults=True)
    rng = np.random.default_rng(seed)
    states = history.log.states()
    key_of_bytes: dict[bytes, int] = {}
    bytes_of_key: dict[int, bytes] = {}
    count = 0
    while True:
        for choice in states.choices(rng, exhaustive_count=EXHAUSTIVE_COUNT, random_count=RANDOM_COUNT):
            key = states.key_of(choice)
            states.apply(choice)
            content = hashlib.sha256(b"".join(device.data.tobytes() for device in states.devices)).digest()
            states.restore()
            assert key_of_bytes.setdefault(content, key) == key
            assert bytes_of_key.setdefault(key, content) == content
            count += 1
        if not states.advance():
            break
    assert 100 < len(bytes_of_key) < count


def test_canary_when_the_new_table_is_not_flushed_everywhere_is_caught(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for attempt in range(8):
        history = History(seed + attempt, 2, op_count=0)
        history.do("put", list(range(5)))
        history.do("flush", [])
        history.volume.io = OneMemberForgotten(history.volume.io.device, strip_size_bytes=STRIP)
        history.do("resize", [])
        _, fault = explore(history, state_limit=4000)
        if fault is not None:
            print(fault)
            return
    pytest.fail("no state showed the broken order")


def test_cut_between_the_blocks_of_a_commit_that_replaces_a_page_twice_keeps_one_of_them() -> None:
    """What 200,000 states found once: the free record stood in the first block, the new page in the second."""
    history = History(20260145, 4)
    _, fault = explore(history, state_limit=700)
    assert fault is None, fault


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

    def reserve(self, keys: KeyArray, *, may_be_fewer: bool = False, deadline: Deadline) -> GrantArray:
        stat = self._index.stat()
        self._index.evict(max(0, stat.live_count + len(keys) - self.quota_pages))
        pending = self._index.collect()
        self._index.settle(pending[pending["state"] == 0])
        self._index.fail(pending[pending["state"] == 1])
        return super().reserve(keys, may_be_fewer=may_be_fewer, deadline=deadline)


class FirstWriteFails:
    """The first write of a flush is the journal's: the pages were written before."""

    def __init__(self, fate: str) -> None:
        self.fate: str | None = fate

    def __call__(self, member_index: int, opcode: int) -> str | None:
        if opcode == OPCODE_FLUSH:
            return None
        fate, self.fate = self.fate, None
        return fate


def failed_journal_history(seed: int, namespace_type: type[KvNamespace]) -> History:
    """Flushed pages are replaced after a journal write failed: the table has to take the records."""
    history = History(seed, 2, 0, namespace_type=namespace_type)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        numbers = rng.choice(5, size=3, replace=False).tolist()
        history.do("put", numbers)
        history.do("flush", [])
        history.do("put", rng.choice(5, size=2, replace=False).tolist())
        history.do("flush", [], fault=FirstWriteFails("lost" if rng.integers(0, 2) else "taken"))
        history.do("put", numbers)
        history.do("flush", [])
    return history


def test_cut_after_a_failed_journal_write_keeps_pages_that_are_being_replaced(seed: int) -> None:
    for attempt in range(max(1, STATE_COUNT // 4000)):
        history = failed_journal_history(seed + attempt, KvNamespace)
        assert history.log.fault_count == 6
        count, fault = explore(history)
        assert fault is None, fault
        assert count > 500


class TableOnce(KvNamespace):
    """Canary: without a journal the table takes new pages and what they replace in one go."""

    def _commit_past_journal(self, records: EntryArray, deadline: Deadline) -> None:
        self._journal.next_sequence += len(records)
        self._checkpoint(deadline)


def test_canary_when_the_table_takes_both_at_once_is_caught(seed: int) -> None:
    for attempt in range(8):
        _, fault = explore(failed_journal_history(seed + attempt, TableOnce))
        if fault is not None:
            print(fault)
            return
    pytest.fail("no state showed the broken order")


@pytest.mark.parametrize(
    ("namespace_type", "io_type"),
    [(EntryBeforeData, VolumeIo), (KvNamespace, OneMemberForgotten), (SlotReusedEarly, VolumeIo)],
)
def test_canary_when_the_order_is_broken_is_caught(
    namespace_type: type[KvNamespace], io_type: type[VolumeIo], seed: int
) -> None:
    for attempt in range(8):
        history = History(seed + attempt, 2, namespace_type=namespace_type, io_type=io_type)
        _, fault = explore(history, state_limit=4000)
        if fault is not None:
            print(fault)
            return
    pytest.fail("no state showed the broken order")


# --- bit flips ---------------------------------------------------------------------------------


class ChecksumIgnored(KvNamespace):
    """Canary: whatever was read is right."""

    def verify_counted(
        self, keys: KeyArray, grants: GrantArray, sums: SumArray
    ) -> tuple[npt.NDArray[np.bool_], int]:
        return np.ones(len(keys), dtype=np.bool_), len(keys)


def wrong_pages_after_flips(namespace_type: type[KvNamespace], seed: int) -> int:
    """Flip a bit in each of many slots; how many gets called a page a hit that is not what was put."""
    history = History(seed, 2, op_count=40)
    rng = np.random.default_rng(seed)
    record = history.record
    wrong = 0
    for _ in range(20):
        namespace = open_namespace(history.io, history.volume.directory, record.record_index, namespace_type)
        flipped = set()
        for slot in range(record.slot_count):
            strip, within = divmod(record.data_slba + slot * record.slot_blocks, STRIP // BLOCK)
            row, member = divmod(strip, 2)
            place = (row * (STRIP // BLOCK) + within) * BLOCK + int(rng.integers(0, PAGE))
            history.log.members[member].data[place] ^= np.uint8(1 << int(rng.integers(0, 8)))
            flipped.add((member, place))
        out = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
        result = PageStore(namespace).get(ALL_KEYS, out)
        hits = np.flatnonzero(result.status == PageStatus.HIT)
        wrong += sum(history.put_at.get(out[number].tobytes(), (-1,))[0] != number for number in hits)
        namespace.abandon()
    return wrong


def test_flipped_bits_when_read_are_never_a_hit(seed: int) -> None:
    assert wrong_pages_after_flips(KvNamespace, seed) == 0


def test_canary_when_the_checksum_is_not_compared_is_caught(seed: int) -> None:
    assert wrong_pages_after_flips(ChecksumIgnored, seed) > 0


# --- superblock --------------------------------------------------------------------------------


def superblock_refusals(seed: int, *, member_count: int, at_once: bool) -> int:
    """Rewrite the superblock; a block in flight at the cut may be torn to nonsense. How often nothing opens."""
    log = CrashLog(member_count, size_bytes=MEMBER_BYTES, block_size_bytes=BLOCK)
    volume = Volume.create(log.members, name="super", strip_size_bytes=STRIP, deadline=deadline())
    log.start()
    io = (OneFlush if at_once else VolumeIo)(volume.io.device, strip_size_bytes=STRIP)
    for sequence in range(2, 5):
        write_superblocks(io, replace(volume.superblock, sequence=sequence), deadline())
    rng = np.random.default_rng(seed)
    states = log.states()
    refused = 0
    while True:
        for choice in states.choices(rng, exhaustive_count=EXHAUSTIVE_COUNT, random_count=RANDOM_COUNT):
            torn = [(member, place, np.full_like(data, 0xA5)) for member, place, data in choice]
            for variant in (choice, torn):
                states.apply(variant)
                try:
                    Volume.open(states.devices, deadline=deadline())
                except CorruptionError:
                    refused += 1
                states.restore()
        if not states.advance():
            return refused


class OneFlush(VolumeIo):
    """Canary: the flush between the two copies is left out."""

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        del members, deadline


@pytest.mark.parametrize("member_count", [1, 2, 4])
def test_superblock_when_rewritten_survives_even_torn_blocks(member_count: int, seed: int) -> None:
    assert superblock_refusals(seed, member_count=member_count, at_once=False) == 0


def test_canary_when_both_superblock_copies_are_written_at_once_is_caught(seed: int) -> None:
    assert superblock_refusals(seed, member_count=2, at_once=True) > 0
