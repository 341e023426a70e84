"""Batches as callers get them wrong: an error that names the field before any I/O, for an owner and a pool's client.

And batches that there is no room for: stored as far as there is, told page by page, no slot lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.buffers import AddressedPages
from kvdev.errors import CapacityError, KvdevError, UsageError
from kvdev.native.index import GRANT_DTYPE
from kvdev.session import Session, open_pool
from kvdev.store import PageStatus, PageStore, Volume
from kvdev.store.batch import put_in_parts
from tests.served import GEOMETRY, PAGE, QUOTA, ServerThread, keys_of, make_volume, pages_of, soon


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Rig:
    """A page store as its owner or a pool's client has it, and what it has done so far."""

    def __init__(self, store: Any, halves: Any, work: Callable[[], tuple[int, ...]], free: Callable[[], int]):
        self.store = store
        self.halves = halves
        """Where ``reserve`` and ``commit`` are."""
        self.work = work
        """Bytes moved and requests made."""
        self.free = free
        """Slots that can be reserved."""


@pytest.fixture(params=["owner", "client"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    uri = make_volume(tmp_path, kv="lru", none="none")
    yield from rig_of(request.param, uri, tmp_path, "kv")


@pytest.fixture(params=["owner", "client"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """With the policy none, and full."""
    uri = make_volume(tmp_path, kv="lru", none="none")
    for each in rig_of(request.param, uri, tmp_path, "none"):
        assert each.store.put(keys_of(range(QUOTA)), pages_of(range(QUOTA))).stored_count == QUOTA
        yield each


def rig_of(kind: str, uri: str, folder: Path, name: str) -> Iterator[Rig]:
    def moved(io: Any) -> int:
        return int(io.read_bytes.sum() + io.written_bytes.sum())

    if kind == "owner":
        with Session() as session:
            volume = session.open_volume(uri)
            # A lease that is not renewed while the test looks at what is written.
            store = PageStore(volume.open_namespace(name, lease_ms=3_600_000, deadline=soon()))
            space = store.namespace
            yield Rig(store, space, lambda: (moved(volume.io),), lambda: free_of(space))
            store.close()
        return
    served = ServerThread(uri, folder / "pool.sock", name)
    client = open_pool(served.path, name)
    attached = client._attached
    assert attached is not None
    io, link, own = attached.page_io._io, attached.link, served.services[0]
    yield Rig(
        client,
        client,
        lambda: (moved(io), link._next_id),
        lambda: free_of(own.namespace),
    )
    client.close()
    served.close()


def free_of(namespace: Any) -> int:
    """Free now, or once the records that free them are durable."""
    stat = namespace.stat().index
    assert stat.reserved_count == stat.quarantined_count == 0
    return int(stat.free_count + stat.leaving_count)


KEYS = keys_of([1, 2])
PAGES = np.zeros((2, PAGE), dtype=np.uint8)
TWICE = keys_of([1, 1])
BAD_KEYS = [
    (keys_of([1, 2])[:, :31].copy(), r"keys: expected a \(n, 32\) uint8 array, got \(2, 31\) uint8"),
    (KEYS.view(np.int8), r"keys: expected a \(n, 32\) uint8 array, got \(2, 32\) int8"),
    (KEYS[0], r"keys: expected a \(n, 32\) uint8 array, got \(32,\) uint8"),
    (keys_of([1, 2, 3, 4])[::2], "keys: expected a C-contiguous array"),
    ([b"k" * 32], r"keys: expected a \(n, 32\) uint8 array, got list"),
]


def addressed(step: int, size_bytes: int = PAGE) -> AddressedPages:
    memory = np.zeros(4 * PAGE, dtype=np.uint8)
    start = memory.ctypes.data
    return AddressedPages(np.array([start + step, start], dtype=np.uint64), size_bytes, memory)


BAD_PAGES = [
    (PAGES[:1], "pages: expected one page per key, got 1 for 2 keys"),
    (PAGES[:, :-1], rf"pages: expected a \(n, {PAGE}\) uint8 array, got \(2, {PAGE - 1}\) uint8"),
    (np.zeros((2, PAGE // 2), dtype=np.uint16), rf"pages: expected a \(n, {PAGE}\) uint8 array, .* uint16"),
    (np.zeros((2, PAGE), dtype=np.float32), "pages: expected .* uint8 array, got .* float32"),
    (np.zeros((2, 2 * PAGE), dtype=np.uint8)[:, ::2], "pages: expected contiguous rows"),
    (addressed(PAGE, PAGE - 1), rf"pages: expected pages of at least {PAGE} bytes, got {PAGE - 1}"),
    (bytes(2 * PAGE), "pages: expected a .* uint8 array, a lease or AddressedPages, got bytes"),
]
READ_ONLY = PAGES.copy()
READ_ONLY.flags.writeable = False
BAD_PLACES = [
    (READ_ONLY, "pages: expected a writable array"),
    (np.broadcast_to(PAGES[0], (2, PAGE)), "pages: expected .*"),
    (
        addressed(PAGE - 1),
        f"pages: addresses: expected {PAGE} bytes of memory for each page, got .* {PAGE - 1} ",
    ),
    (addressed(0), f"pages: addresses: expected {PAGE} bytes of memory for each page, got .* only 0 bytes"),
]
BAD_CHECKSUMS = [
    (np.zeros(2, dtype=np.uint64), r"checksums: expected a \(2,\) uint32 array, got \(2,\) uint64"),
    (np.zeros(3, dtype=np.uint32), r"checksums: expected a \(2,\) uint32 array, got \(3,\) uint32"),
    ([0, 0], r"checksums: expected a \(2,\) uint32 array, got list"),
]


def refuses(rig: Rig, match: str, call: Callable[..., object], *given: object, **named: object) -> None:
    before = rig.work()
    with pytest.raises(UsageError, match=match):
        call(*given, **named)
    assert rig.work() == before, "nothing is read, written or asked for"


def test_batch_when_it_is_wrong_is_refused_before_any_io(rig: Rig) -> None:
    store = rig.store
    assert store.put(KEYS, pages_of([1, 2])).stored_count == 2
    free = rig.free()
    for keys, match in [*BAD_KEYS, (TWICE, "keys: key 1 .* is in the batch twice")]:
        for name in ("put", "get"):
            refuses(rig, match, getattr(store, name), keys, PAGES)
        for name in ("delete", "pin", "unpin"):
            refuses(rig, match, getattr(store, name), keys)
    for keys, match in BAD_KEYS:
        for name in ("contains", "longest_prefix"):
            refuses(rig, match, getattr(store, name), keys)
        refuses(rig, match, rig.halves.reserve, keys, deadline=soon())
        refuses(rig, match, rig.halves.lookup, keys)
    for pages, match in BAD_PAGES:
        refuses(rig, match, store.put, KEYS, pages)
        refuses(rig, match, store.get, KEYS, pages)
    for pages, match in BAD_PLACES:
        refuses(rig, match, store.get, KEYS, pages)
    for checksums, match in BAD_CHECKSUMS:
        refuses(rig, match, store.put, KEYS, PAGES, checksums=checksums)
    before = rig.work()
    with pytest.raises(
        CapacityError, match=f"put: expected at most the quota of {QUOTA} pages, got {QUOTA + 1}"
    ):
        store.put(keys_of(range(QUOTA + 1)), np.zeros((QUOTA + 1, PAGE), dtype=np.uint8))
    assert rig.work() == before
    assert rig.free() == free
    out = PAGES.copy()
    assert store.get(KEYS, out).hit_count == 2 and np.array_equal(out, pages_of([1, 2]))


def test_halves_when_given_back_wrong_are_refused_and_the_grants_stay(rig: Rig) -> None:
    grants = rig.halves.reserve(KEYS, deadline=soon())
    crc, members = np.zeros(2, dtype=np.uint32), np.ones(2, dtype=np.bool_)
    outcome = np.ones(2, dtype=np.uint8)
    for change, match in [
        ({"keys": KEYS[:, :31].copy()}, "keys: expected"),
        ({"grants": grants[:1]}, r"grants: expected a \(2,\) grant array, got \(1,\) grant"),
        (
            {"grants": np.zeros(2, dtype=np.uint64)},
            r"grants: expected a \(2,\) grant array, got \(2,\) uint64",
        ),
        ({"grants": np.zeros(4, dtype=GRANT_DTYPE)[::2]}, "grants: expected a contiguous array"),
        (
            {"sums": np.zeros(2, dtype=np.int64)},
            r"sums: expected a \(2,\) uint32 array, got \(2,\) int64",
        ),
        ({"sums": crc[:1]}, r"sums: expected a \(2,\) uint32 array, got \(1,\) uint32"),
        ({"outcome": outcome.astype(np.bool_)}, r"outcome: expected a \(2,\) uint8 array, got \(2,\) bool"),
        ({"outcome": np.full(2, 3, dtype=np.uint8)}, "outcome: expected 0 to 2, got 3"),
    ]:
        given: dict[str, Any] = {"keys": KEYS, "grants": grants, "sums": crc, "outcome": outcome} | change
        refuses(rig, match, rig.halves.commit, **given, members=members, deadline=soon())
    done = rig.halves.commit(KEYS, grants, crc, outcome=outcome, members=members, deadline=soon())
    assert not done.any()
    got = rig.store.get(KEYS, PAGES.copy())
    for is_bad in (np.zeros(2), np.zeros(1, np.bool_)):
        refuses(rig, r"is_bad: expected a \(2,\) bool array", rig.store.report_bad, got, is_bad)
    assert len(rig.halves.reserve(keys_of([]), deadline=soon())) == 0
    assert rig.free() == QUOTA + 4


# --- no room ---------------------------------------------------------------------------------


def test_none_when_more_is_replaced_than_slots_are_spare_replaces_all_of_it(full: Rig) -> None:
    everything = list(range(QUOTA))
    out = np.zeros((QUOTA, PAGE), dtype=np.uint8)
    for version in (1, 2, 3):
        numbers = [number + 1000 * version for number in everything]
        assert full.store.put(keys_of(everything), pages_of(numbers)).stored_count == QUOTA
        assert full.store.get(keys_of(everything), out).hit_count == QUOTA
        assert np.array_equal(out, pages_of(numbers))
    full.store.flush()
    assert full.free() == 4


def test_none_when_full_refuses_what_is_new_and_keeps_every_page(full: Rig) -> None:
    everything = list(range(QUOTA))
    numbers = [*everything[:30], QUOTA]
    with pytest.raises(CapacityError, match="is full: its quota is 64 pages and its eviction policy none"):
        full.store.put(keys_of(numbers), pages_of(numbers))
    assert full.store.contains(keys_of(everything)).all()
    full.store.delete(keys_of([63]))
    assert full.store.put(keys_of(numbers), pages_of(numbers)).stored_count == 31
    full.store.flush()
    assert full.free() == 4


def test_pinned_pages_when_more_are_replaced_than_slots_are_spare_are_replaced(rig: Rig) -> None:
    everything = list(range(QUOTA))
    rig.store.put(keys_of(everything), pages_of(everything))
    assert rig.store.pin(keys_of(everything)).all()
    numbers = [number + 500 for number in everything]
    assert rig.store.put(keys_of(everything), pages_of(numbers)).stored_count == QUOTA
    out = np.zeros((QUOTA, PAGE), dtype=np.uint8)
    assert rig.store.get(keys_of(everything), out).hit_count == QUOTA
    assert np.array_equal(out, pages_of(numbers))


def test_put_in_parts_when_room_ends_half_way_says_so_page_by_page() -> None:
    room = {0, 1, 2, 5, 7}

    def put_some(keys: Any, addresses: Any, checksums: Any) -> tuple[Any, Any, KvdevError | None]:
        numbers = keys[:, 0].tolist()
        if not set(numbers) <= room:
            raise CapacityError("v#kv: is full")
        return np.ones(len(keys), np.bool_), np.array(numbers, np.uint32), None

    keys = np.arange(8, dtype=np.uint8)[:, None].repeat(32, axis=1)
    result = put_in_parts(put_some, keys, np.ones(8, np.uint64), None, limit=3)
    assert np.flatnonzero(result.status == PageStatus.STORED).tolist() == sorted(room)
    assert result.error_count == 3 and result.crc32c.tolist() == [0, 1, 2, 0, 0, 5, 0, 7]
    assert str(result.failure) == "page 3 of the batch: v#kv: is full"
    with pytest.raises(CapacityError, match="is full"):
        put_in_parts(put_some, keys[3:], np.ones(5, np.uint64), None, limit=3)


def test_commit_when_its_flush_fails_gives_every_slot_back() -> None:
    fails: list[bool] = []
    member = MemoryDevice(size_bytes=8 << 20)
    member.observer = lambda opcode, slba, payload: (-5, 0x280) if fails and opcode == 0 else (0, 0)
    volume = Volume.create([member], name="v", strip_size_bytes=16384, deadline=soon())
    volume.create_namespace("kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=4, deadline=soon())
    namespace = volume.open_namespace("kv", deadline=soon())
    store = PageStore(namespace)
    numbers = list(range(100, 112))
    grants = namespace.reserve(keys_of(numbers), deadline=soon())
    # Others put meanwhile: their records leave no room for those of these.
    for first in range(0, 45, 5):
        store.put(keys_of(range(first, first + 5)), pages_of(range(5)))
    assert namespace.stat().index.pending_count + 2 * 11 > namespace.stat().index.pending_limit
    fails.append(True)
    crc = np.zeros(len(numbers), dtype=np.uint32)
    outcome = np.zeros(len(numbers), dtype=np.uint8)
    outcome[3] = 2
    with pytest.raises(KvdevError, match="write fault"):
        namespace.commit(keys_of(numbers), grants, crc, outcome=outcome, deadline=soon())
    fails.clear()
    stat = namespace.stat().index
    assert (stat.reserved_count, stat.quarantined_count) == (0, 1)
    assert not namespace.contains(keys_of(numbers)).any()
    store.flush()
    stat = namespace.stat().index
    assert stat.live_count + stat.free_count + 1 == stat.slot_count
    namespace.abandon()
