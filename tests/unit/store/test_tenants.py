"""What tenants may ask of a KV namespace: an eviction policy, another name, to be erased."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CapacityError, CorruptionError, UnsupportedError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.session import Session
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
SECRET = np.full(PAGE, 0x5A, dtype=np.uint8)


def soon() -> Deadline:
    return Deadline.after(30)


def keys_of(*numbers: int) -> KeyArray:
    return np.stack([np.full(32, number + 1, dtype=np.uint8) for number in numbers])


def put(store: PageStore, *numbers: int) -> None:
    pages = np.stack([np.full(PAGE, number, dtype=np.uint8) for number in numbers])
    assert store.put(keys_of(*numbers), pages).stored_count == len(numbers)


def stored(store: PageStore, count: int) -> list[int]:
    return [int(number) for number in np.flatnonzero(store.contains(keys_of(*range(count))))]


def tenant(lab: Any, policy: str, quota_pages: int = 4) -> PageStore:
    info = lab.volume.create_namespace(
        policy, GEOMETRY, quota_pages=quota_pages, eviction_policy=policy, deadline=soon()
    )
    assert info.eviction_policy == policy
    store = PageStore(lab.volume.open_namespace(policy, deadline=soon()))
    lab.stores.append(store)
    return store


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [0, 3, 4, 5]), ("fifo", [2, 3, 4, 5]), ("lfu", [0, 3, 4, 5]), ("s3fifo", [0, 3, 4, 5])],
)
def test_page_at_the_quota_goes_by_the_policy(lab: Any, policy: str, expected: list[int]) -> None:
    store = tenant(lab, policy)
    for number in range(4):
        put(store, number)
    assert store.get(keys_of(0), lab.room(1)).hit_count == 1
    put(store, 4)
    put(store, 5)
    assert stored(store, 6) == expected
    store.close()
    again = PageStore(lab.volume.open_namespace(policy, deadline=soon()))
    assert again.namespace.eviction_policy == policy
    # The order is on media: what would have gone next goes next.
    put(again, 6)
    assert stored(again, 7) == sorted({*expected, 6} - {expected[0] if policy == "fifo" else 3})
    again.close()


def test_fifo_when_a_page_is_replaced_counts_it_as_new_and_keeps_the_quota(lab: Any) -> None:
    store = tenant(lab, "fifo")
    for number in range(4):
        put(store, number)
    put(store, 0, 9)
    assert stored(store, 10) == [0, 2, 3, 9]
    put(store, 8)
    assert stored(store, 10) == [0, 3, 8, 9]


def test_none_when_full_refuses_puts_and_keeps_every_page(lab: Any) -> None:
    store = tenant(lab, "none")
    put(store, 0, 1, 2, 3)
    with pytest.raises(CapacityError, match="is full: its quota is 4 pages and its eviction policy none"):
        store.put(keys_of(4), lab.room(1))
    for _ in range(8):
        put(store, 1, 2)  # replacing needs no room, however often
    assert stored(store, 5) == [0, 1, 2, 3]
    store.delete(keys_of(0))
    put(store, 4)
    assert stored(store, 5) == [1, 2, 3, 4]
    stat = store.namespace.stat().index
    assert stat.reserved_count == 0 and stat.live_count == 4


def test_policy_when_unknown_is_refused(lab: Any) -> None:
    with pytest.raises(
        UsageError, match="eviction_policy: expected one of lru, fifo, none, lfu, s3fifo, got 'mru'"
    ):
        lab.volume.create_namespace("x", GEOMETRY, quota_pages=4, eviction_policy="mru", deadline=soon())
    record = lab.volume.namespace("kv", deadline=soon()).record
    for step in (1, 2):
        newer = vars(record) | {"eviction_policy": 9, "sequence": record.sequence + step}
        lab.volume.directory.write(type(record)(**newer), soon())
    assert lab.volume.namespace("kv", deadline=soon()).eviction_policy == "unknown (9)"
    with pytest.raises(UnsupportedError, match=r"got unknown \(9\); use a newer kvdev"):
        lab.store()
    lab.volume.open_namespace("kv", mode="reader", deadline=soon())


def test_rename_keeps_pages_and_frees_the_name(lab: Any) -> None:
    store = lab.store()
    put(store, 1, 2)
    with pytest.raises(UsageError, match="owned by"):
        lab.volume.rename_namespace("kv", "other", deadline=soon())
    store.close()
    lab.volume.create_namespace("taken", GEOMETRY, quota_pages=4, deadline=soon())
    for name, reason in (("taken", "exists already"), ("", "new name"), ("kv", "exists already")):
        with pytest.raises(UsageError, match=reason):
            lab.volume.rename_namespace("kv", name, deadline=soon())
    lab.volume.rename_namespace("kv", "other", deadline=soon())
    volume = Volume.open(lab.members, deadline=soon())
    assert [info.name for info in volume.namespaces(deadline=soon())] == ["other", "taken"]
    again = PageStore(volume.open_namespace("other", deadline=soon()))
    assert stored(again, 4) == [1, 2]
    again.close()


def test_rename_when_either_copy_is_lost_shows_the_new_name(lab: Any) -> None:
    lab.volume.rename_namespace("kv", "other", deadline=soon())
    for copy in range(2):
        images = [member.data.copy() for member in lab.members]
        slba = lab.volume.directory.slba_of(0, copy)
        lab.volume.io.write(slba, bytes(4096), soon())
        volume = Volume.open(lab.members, deadline=soon())
        assert [info.name for info in volume.namespaces(deadline=soon())] == ["other"]
        for member, image in zip(lab.members, images, strict=True):
            member.data[:] = image


def count_secrets(members: list[MemoryDevice]) -> int:
    return sum(bytes(member.data).count(SECRET[:512].tobytes()) for member in members)


def test_erase_leaves_nothing_of_the_namespace_and_nothing_else_is_touched(lab: Any) -> None:
    other = tenant(lab, "lru")
    put(other, 3)
    other.close()
    store = lab.store()
    store.put(keys_of(1, 2), np.stack([SECRET, SECRET]))
    store.close()
    record = lab.volume.namespace("kv", deadline=soon()).record
    assert count_secrets(lab.members)
    seen: list[tuple[int, int]] = []
    lab.volume.delete_namespace(
        "kv", erase=True, progress=lambda done, total: seen.append((done, total)), deadline=soon()
    )
    assert not count_secrets(lab.members)
    assert not lab.volume.io.read(record.extent_slba, record.extent_block_count, soon()).any()
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    volume = Volume.open(lab.members, deadline=soon())
    assert [info.name for info in volume.namespaces(deadline=soon())] == ["lru"]
    assert stored(PageStore(volume.open_namespace("lru", mode="reader", deadline=soon())), 5) == [3]


def test_erase_when_a_write_fails_keeps_the_namespace_to_be_deleted_again(lab: Any) -> None:
    store = lab.store()
    store.put(keys_of(1), SECRET[None])
    store.close()
    lab.fail[1, 1] = (-5, 0x280)
    with pytest.raises(Exception, match="write fault"):
        lab.volume.delete_namespace("kv", erase=True, deadline=soon())
    lab.fail.clear()
    assert [info.name for info in lab.volume.namespaces(deadline=soon())] == ["kv"]
    lab.volume.delete_namespace("kv", erase=True, deadline=soon())
    assert not count_secrets(lab.members)
    assert not lab.volume.namespaces(deadline=soon())


def test_erase_when_a_device_ignores_writes_says_where(lab: Any) -> None:
    store = lab.store()
    store.put(keys_of(1), SECRET[None])
    store.close()
    image = lab.members[0].data.copy()
    first = lab.volume.namespace("kv", deadline=soon()).record.extent_slba

    def forget(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        if opcode == 2:
            lab.members[0].data[:] = image
        return 0, 0

    lab.members[0].observer = forget
    with pytest.raises(CorruptionError, match=r"erase: LBA \d+: expected zeroes") as refusal:
        lab.volume.delete_namespace("kv", erase=True, deadline=soon())
    assert int(str(refusal.value).split("LBA ")[1].split(":")[0]) >= first
    lab.members[0].observer = None
    # It is nobody's any more, and not free before it is erased to its end.
    with pytest.raises(UsageError, match="is being erased, 0 MiB of it so far; erase it to its end"):
        lab.store()
    with pytest.raises(UsageError, match="is being erased"):
        lab.volume.delete_namespace("kv", deadline=soon())
    with pytest.raises(UsageError, match="exists already"):
        lab.volume.create_namespace("kv", GEOMETRY, quota_pages=4, deadline=soon())
    with pytest.raises(UsageError, match="exists already"):
        tenant(lab, "lru").close()
        lab.volume.rename_namespace("lru", "kv", deadline=soon())
    lab.volume.delete_namespace("kv", erase=True, deadline=soon())
    assert not count_secrets(lab.members)
    assert [info.name for info in lab.volume.namespaces(deadline=soon())] == ["lru"]


def test_erase_when_interrupted_goes_on_where_it_was_and_tells_how_far(tmp_path: Path) -> None:
    member = MemoryDevice(size_bytes=120 << 20)
    volume = Volume.create([member], name="v", strip_size_bytes=1 << 20, deadline=soon())
    volume.create_namespace("kv", GEOMETRY, quota_pages=(100 << 20) // PAGE, deadline=soon())
    member.data[60 << 20 : 61 << 20] = 0x5A
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        volume.delete_namespace("kv", erase=True, progress=stop, deadline=soon())
    record = volume.records(deadline=soon())[0]
    assert record.is_erasing and record.is_clean and record.erased_mib == 64
    written: list[int] = []

    def note(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        if opcode == 1:
            written.append(slba)
        return 0, 0

    member.observer = note
    total = volume.delete_namespace(
        "kv", erase=True, progress=lambda done, total: seen.append((done, total)), deadline=soon()
    )
    member.observer = None
    assert seen == sorted(seen) and seen[-1] == (total, total) and total > 100 << 20
    data = [slba for slba in written if slba >= record.extent_slba]
    assert min(data) == record.extent_slba + (64 << 20) // 4096, "what was erased is not erased again"
    assert not volume.io.read(record.extent_slba, record.extent_block_count, soon()).any()
    assert not volume.records(deadline=soon())


def test_erase_when_somebody_owns_or_erases_it_is_refused(lab: Any) -> None:
    store = lab.store()
    with pytest.raises(UsageError, match="owned by"):
        lab.volume.delete_namespace("kv", erase=True, deadline=soon())
    put(store, 1)
    store.close()
    refusals: list[str] = []

    def other(done: int, total: int) -> None:
        for erase in (True, False):
            with pytest.raises(UsageError) as refusal:
                Volume.open(lab.members, deadline=soon()).delete_namespace("kv", erase=erase, deadline=soon())
            refusals.append(str(refusal.value))

    lab.volume.delete_namespace("kv", erase=True, progress=other, deadline=soon())
    assert "owned by" in refusals[0] and "is being erased" in refusals[1]
    with pytest.raises(UsageError, match="bytes_per_s: expected at least 1, got 0"):
        lab.volume.delete_namespace("x", erase=True, bytes_per_s=0, deadline=soon())


def test_erase_at_a_rate_takes_its_time(lab: Any) -> None:
    started_ns = SYSTEM_CLOCK.monotonic_ns()
    erased = lab.volume.delete_namespace("kv", erase=True, bytes_per_s=8 << 20, deadline=soon())
    assert SYSTEM_CLOCK.monotonic_ns() - started_ns >= 2 * erased * 10**9 // (8 << 20)


def test_erase_tells_members_that_can_deallocate(tmp_path: Path) -> None:
    paths = [tmp_path / f"m{index}" for index in range(3)]
    for path in paths:
        path.write_bytes(bytes(4 << 20))
    with Session() as session:
        devices = session.open_members("vol:" + ",".join(f"file:{path}" for path in paths))
        volume = Volume.create(devices, name="v", strip_size_bytes=16384, deadline=soon())
        start, count = volume.free_extents(soon())[0]
        for first in range(start, start + count, 4096):
            volume.io.write(first, bytes([7]) * 4096, soon())
        for slba, blocks in ((start + 3, 41), (start, 1), (start + 5, 2), (start + 7, 200)):
            before = volume.io.read(start, count, soon())
            assert volume.io.deallocate(slba, blocks, soon()) <= 3
            after = volume.io.read(start, count, soon())
            block = volume.block_size_bytes
            inside = slice((slba - start) * block, (slba - start + blocks) * block)
            before[inside] = after[inside] = 0
            assert np.array_equal(before, after), "nothing else is touched"


def test_pinned_page_is_never_evicted_until_it_is_unpinned(lab: Any) -> None:
    store = tenant(lab, "lru")
    for number in range(4):
        put(store, number)
    assert store.pin(keys_of(0, 1, 7)).tolist() == [True, True, False]
    for number in range(10, 20):
        put(store, number)
    assert stored(store, 20) == [0, 1, 18, 19]
    put(store, 0)  # what replaces a pinned page is pinned
    for number in range(10, 20):
        put(store, number)
    assert stored(store, 20) == [0, 1, 18, 19]
    store.pin(keys_of(18, 19))
    with pytest.raises(CapacityError, match="is full: 4 of 4 pages are pinned; unpin or delete pages first"):
        store.put(keys_of(5), lab.room(1))
    assert stored(store, 20) == [0, 1, 18, 19]
    assert store.namespace.stat().index.reserved_count == 0
    store.delete(keys_of(1))
    store.unpin(keys_of(0))
    assert store.namespace.stat().index.pinned_count == 2
    put(store, 5, 6)
    assert stored(store, 20) == [5, 6, 18, 19]
    store.unpin(keys_of(18, 19))
    put(store, 8, 9)
    put(store, 1, 2)
    assert stored(store, 20) == [1, 2, 8, 9]
    assert store.namespace.stat().index.pinned_count == 0


def test_pin_when_the_namespace_is_opened_again_is_gone(lab: Any) -> None:
    store = tenant(lab, "fifo")
    put(store, 0, 1, 2, 3)
    store.pin(keys_of(0, 1, 2, 3))
    store.close()
    again = PageStore(lab.volume.open_namespace("fifo", deadline=soon()))
    lab.stores.append(again)
    put(again, 4)
    assert len(stored(again, 5)) == 4 and 4 in stored(again, 5)


class Clock:
    """Seconds since 1970, as the test says."""

    def __init__(self) -> None:
        self.now = 2_000_000_000

    def __call__(self) -> int:
        return self.now


def aging(lab: Any, clock: Clock, mode: Any = "owner") -> PageStore:
    store = PageStore(lab.volume.open_namespace("aging", mode=mode, unix_s=clock, deadline=soon()))
    lab.stores.append(store)
    return store


def test_page_when_its_time_is_over_is_gone_for_owner_readers_and_after_a_crash(lab: Any) -> None:
    clock = Clock()
    lab.volume.create_namespace("aging", GEOMETRY, quota_pages=8, ttl_s=60, deadline=soon())
    assert lab.volume.namespace("aging", deadline=soon()).ttl_s == 60
    store = aging(lab, clock)
    put(store, 0, 1)
    clock.now += 30
    put(store, 2)
    store.pin(keys_of(1))
    store.get(keys_of(0), lab.room(1))  # being used does not make it younger
    store.flush()
    reader = aging(lab, clock, mode="reader")
    clock.now += 29
    assert stored(store, 4) == stored(reader, 4) == [0, 1, 2]
    clock.now += 1
    assert stored(reader, 4) == [2]
    assert store.longest_prefix(keys_of(0)) == 0
    assert store.get(keys_of(1), lab.room(1)).miss_count == 1
    assert stored(store, 4) == [2]
    assert store.namespace.stat().index.expired_count == 2
    store.namespace.abandon()  # their free records were not written: they are old all the same
    store = aging(lab, clock)
    assert stored(store, 4) == [2]
    put(store, 3)
    store.close()
    clock.now += 40
    assert stored(aging(lab, clock), 4) == [3]


def test_page_when_it_is_put_again_lives_as_long_again_whatever_the_clock_does(lab: Any) -> None:
    clock = Clock()
    lab.volume.create_namespace("aging", GEOMETRY, quota_pages=8, ttl_s=60, deadline=soon())
    store = aging(lab, clock)
    put(store, 0, 1)
    clock.now += 50
    put(store, 0)
    clock.now -= 1000  # set back: nothing grows younger than what was put before
    put(store, 2)
    clock.now += 1000 + 20
    assert stored(store, 4) == [0, 2]
    clock.now += 40
    assert stored(store, 4) == []


def test_ttl_when_more_pages_expire_than_records_fit_takes_them_all(lab: Any) -> None:
    clock = Clock()
    info = lab.volume.create_namespace(
        "aging", GEOMETRY, quota_pages=400, journal_block_count=4, ttl_s=5, deadline=soon()
    )
    assert info.quota_pages == 400
    store = aging(lab, clock)
    everything = np.arange(400, dtype=np.uint32)[:, None].repeat(8, axis=1).view(np.uint8).reshape(-1, 32)
    pages = np.zeros((400, PAGE), dtype=np.uint8)
    assert store.put(np.ascontiguousarray(everything), pages).stored_count == 400
    clock.now += 5
    assert not store.contains(everything).any()
    stat = store.namespace.stat().index
    assert stat.live_count == 0 and stat.expired_count == 400


@pytest.mark.parametrize("ttl_s", [-1, 1 << 32])
def test_ttl_when_it_cannot_be_kept_is_refused(lab: Any, ttl_s: int) -> None:
    with pytest.raises(UsageError, match="ttl_s: expected 0 for none, to "):
        lab.volume.create_namespace("aging", GEOMETRY, quota_pages=8, ttl_s=ttl_s, deadline=soon())


def test_clone_when_made_is_like_the_other_and_empty(lab: Any) -> None:
    made = lab.volume.create_namespace(
        "one", GEOMETRY, quota_pages=5, eviction_policy="s3fifo", ttl_s=7, deadline=soon()
    )
    store = PageStore(lab.volume.open_namespace("one", deadline=soon()))
    put(store, 1)
    store.close()
    info = lab.volume.clone_namespace("one", "two", deadline=soon())
    assert (info.geometry, info.quota_pages, info.eviction_policy, info.ttl_s) == (GEOMETRY, 5, "s3fifo", 7)
    assert info.uuid != made.uuid and info.slot_count == made.slot_count
    reader = PageStore(lab.volume.open_namespace("two", mode="reader", deadline=soon()))
    assert stored(reader, 3) == []
    with pytest.raises(UsageError, match="exists already"):
        lab.volume.clone_namespace("one", "kv", deadline=soon())
