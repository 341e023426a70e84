"""Followers: in another process or on another host they see what is durable, around the journal and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
JOURNAL_BLOCKS = 6


def soon() -> Deadline:
    return Deadline.after(30)


class Pair:
    """An owner and a follower of it, each with its own volume, and what the owner has put."""

    def __init__(self, rng: np.random.Generator, *, quota_pages: int = 24) -> None:
        self.rng = rng
        queue = LocalQueue()
        self.members = [MemoryDevice(size_bytes=4 << 20, name=f"m{i}", queue=queue) for i in range(3)]
        volume = Volume.create(self.members, name="v", strip_size_bytes=16384, deadline=soon())
        volume.create_namespace(
            "kv", GEOMETRY, quota_pages=quota_pages, journal_block_count=JOURNAL_BLOCKS, deadline=soon()
        )
        self.owner = self.open("owner")
        self.follower = self.open("follower")
        self.put: dict[bytes, list[bytes]] = {}

    def open(self, mode: Any) -> PageStore:
        volume = Volume.open(self.members, deadline=soon())
        return PageStore(volume.open_namespace("kv", mode=mode, deadline=soon()))

    def keys(self, numbers: Any) -> Any:
        keys = np.zeros((len(numbers), 32), dtype=np.uint8)
        keys[:, 0] = numbers
        keys[:, 1] = 7
        return keys

    def write(self, numbers: Any) -> None:
        keys = self.keys(numbers)
        pages = self.rng.integers(0, 256, (len(keys), GEOMETRY.page_size_bytes), dtype=np.uint8)
        assert self.owner.put(keys, pages).stored_count == len(keys)
        for key, page in zip(keys, pages, strict=True):
            self.put.setdefault(key.tobytes(), []).append(page.tobytes())
        self.owner.flush()

    def read(self, numbers: Any) -> list[int]:
        """What the follower says of each key; whatever it gives was once put under it."""
        keys = self.keys(numbers)
        out = np.zeros((len(keys), GEOMETRY.page_size_bytes), dtype=np.uint8)
        got = self.follower.get(keys, out)
        for key, status, page in zip(keys, got.status, out, strict=True):
            assert status != PageStatus.ERROR
            assert status != PageStatus.HIT or page.tobytes() in self.put[key.tobytes()]
        return [int(status) for status in got.status]

    def refresh(self) -> int:
        self.owner.namespace.renew(deadline=soon())
        return self.follower.namespace.refresh(deadline=soon())


@pytest.fixture
def pair(rng: np.random.Generator) -> Pair:
    return Pair(rng)


def test_follower_sees_what_is_durable_and_nothing_else(pair: Pair) -> None:
    pair.write([1, 2, 3])
    assert pair.read([1, 2, 3]) == [0, 0, 0]
    # The commit itself is known to be durable by what is written after it.
    assert pair.follower.namespace.refresh(deadline=soon()) == 0
    assert pair.refresh() == 3
    assert pair.read([1, 2, 3]) == [1, 1, 1]
    pair.write([4])
    pair.write([5])
    assert pair.follower.namespace.refresh(deadline=soon()) == 1
    assert pair.read([4, 5]) == [1, 0]
    late = pair.open("follower")
    assert late.contains(pair.keys([1, 2, 3, 4, 5])).tolist() == [True] * 4 + [False]
    assert late.longest_prefix(pair.keys([1, 2, 3, 4, 5])) == 4
    assert pair.open("reader").contains(pair.keys([5])).all()


def test_replaced_and_deleted_pages_are_followed(pair: Pair) -> None:
    pair.write([1, 2, 3])
    pair.refresh()
    pair.write([2])
    pair.owner.delete(pair.keys([3]))
    pair.owner.flush()
    assert pair.refresh() == 3
    assert pair.read([1, 2, 3]) == [1, 1, 0]
    out = np.zeros((1, GEOMETRY.page_size_bytes), dtype=np.uint8)
    pair.follower.get(pair.keys([2]), out)
    assert out[0].tobytes() == pair.put[pair.keys([2]).tobytes()][-1]
    entries = pair.follower.namespace.entries()
    assert len(entries) == len({entry["key"].tobytes() for entry in entries}) == 2


def test_follower_through_many_turns_of_the_journal_reads_blocks_not_tables(
    pair: Pair, rng: np.random.Generator
) -> None:
    for step in range(60):
        pair.write(rng.choice(40, size=3, replace=False))
        pair.refresh()
        owned = pair.owner.contains(pair.keys(range(40)))
        assert np.array_equal(pair.follower.contains(pair.keys(range(40))), owned), step
        pair.read(range(40))
    assert pair.owner.namespace.checkpoint_count > 5
    assert pair.follower.namespace.reload_count == 0


def test_follower_that_slept_through_turns_of_the_journal_loads_the_table(
    pair: Pair, rng: np.random.Generator
) -> None:
    pair.write(range(20))
    pair.refresh()
    for _ in range(30):
        pair.write(rng.choice(40, size=5, replace=False))
    # Before it looks it may say miss, or give what was put, and nothing else.
    pair.read(range(40))
    pair.refresh()
    assert pair.follower.namespace.reload_count == 1
    owned = pair.owner.contains(pair.keys(range(40)))
    assert np.array_equal(pair.follower.contains(pair.keys(range(40))), owned)
    assert np.array_equal(np.array(pair.read(range(40))) == PageStatus.HIT, owned)


def test_page_evicted_under_a_follower_is_a_miss(pair: Pair) -> None:
    pair.write(range(20))
    pair.refresh()
    for start in range(100, 200, 20):
        pair.write(range(start, start + 20))
    assert pair.read(range(20)) == [PageStatus.MISS] * 20
    assert pair.follower.stale_count == 20


def test_follower_when_the_owner_changes_goes_on(pair: Pair) -> None:
    pair.write([1, 2])
    for step in range(4):
        if step % 2:
            pair.owner.close()
        else:
            pair.owner.namespace.abandon()
        pair.owner = pair.open("owner")
        pair.write([10 + step])
        pair.refresh()
        assert pair.read([1, 2, 10 + step]) == [1, 1, 1]


def test_follower_looks_by_itself_once_in_a_while(pair: Pair) -> None:
    pair.write([1])
    pair.owner.namespace.renew(deadline=soon())
    limit = soon()
    while not pair.follower.contains(pair.keys([1])).all():
        assert not limit.is_expired


def test_follower_changes_nothing_and_a_reader_does_not_follow(pair: Pair) -> None:
    before = [member.data.copy() for member in pair.members]
    with pytest.raises(UsageError, match="v#kv: is open as follower; open it as owner to change it"):
        pair.follower.put(pair.keys([1]), np.zeros((1, GEOMETRY.page_size_bytes), dtype=np.uint8))
    with pytest.raises(UsageError, match="is open as reader; open it as follower to follow its owner"):
        pair.open("reader").namespace.refresh(deadline=soon())
    pair.follower.namespace.refresh(deadline=soon())
    pair.follower.close()
    assert all(np.array_equal(old, member.data) for old, member in zip(before, pair.members, strict=True))


def test_namespace_deleted_under_a_follower_is_named(pair: Pair) -> None:
    pair.owner.close()
    Volume.open(pair.members, deadline=soon()).delete_namespace("kv", deadline=soon())
    with pytest.raises(CorruptionError, match="v#kv: was deleted meanwhile"):
        pair.follower.namespace.refresh(deadline=soon())


def test_journal_block_torn_under_a_follower_is_waited_for(pair: Pair) -> None:
    pair.write([1])
    pair.write([2])
    info = Volume.open(pair.members, deadline=soon()).namespace("kv", deadline=soon())
    strip, within = divmod(info.record.journal_slba, 4)
    member, place = pair.members[strip % 3], (strip // 3 * 4 + within) * 4096 + 3000
    member.data[place] ^= 1
    assert pair.follower.namespace.refresh(deadline=soon()) == 0
    member.data[place] ^= 1
    assert pair.follower.namespace.refresh(deadline=soon()) == 1
