"""The store against a plain dict, over random calls; and the index against the same."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdev.block.device import aligned_buffer
from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.native.index import SLOT_NONE, PageIndex, Table, format_table, table_block_count
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="model", layer_count=1, kv_head_count=1, head_size=16, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
QUOTA = 8
KEYS = 14


def key(number: int) -> bytes:
    return bytes([number + 1]) * 32


calls = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete", "flush", "crash", "close"]),
        st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5, unique=True),
    ),
    min_size=1,
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=calls, member_count=st.integers(1, 3))
def test_store_when_called_at_random_answers_as_an_lru_dict(
    steps: list[tuple[str, list[int]]],
    member_count: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        run_model(steps, member_count)


def run_model(steps: list[tuple[str, list[int]]], member_count: int) -> None:
    deadline = Deadline.after(60)
    queue = LocalQueue()
    members = [MemoryDevice(size_bytes=1 << 20, name=f"m{i}", queue=queue) for i in range(member_count)]
    volume = Volume.create(members, name="v", strip_size_bytes=16384, deadline=deadline)
    volume.create_namespace("kv", GEOMETRY, quota_pages=QUOTA, journal_block_count=6, deadline=deadline)
    store = PageStore(volume.open_namespace("kv", deadline=deadline))
    model: OrderedDict[int, int] = OrderedDict()  # key -> version, least recently used first
    version = 0
    for kind, numbers in steps:
        keys = np.frombuffer(b"".join(map(key, numbers)), dtype=np.uint8).reshape(-1, 32)
        if kind == "put":
            version += 1
            pages = np.full((len(numbers), PAGE), version, dtype=np.uint8)
            assert store.put(keys, pages).stored_count == len(numbers)
            # The store frees room before it stores: what is replaced counts as used, so others go.
            for number in reversed(numbers):
                if number in model:
                    model.move_to_end(number)
            while len(model) + sum(number not in model for number in numbers) > QUOTA:
                model.popitem(last=False)
            for number in reversed(numbers):
                model.pop(number, None)
                model[number] = version
            every = np.frombuffer(b"".join(map(key, range(KEYS))), dtype=np.uint8).reshape(-1, 32)
            assert set(np.flatnonzero(store.contains(every)).tolist()) == set(model)
        elif kind == "get":
            out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
            result = store.get(keys, out)
            for number, status, page in zip(numbers, result.status, out, strict=True):
                assert status == (PageStatus.HIT if number in model else PageStatus.MISS)
                assert (page == model.get(number, 0)).all()
            for number in reversed(numbers):
                if number in model:
                    model.move_to_end(number)
            prefix = next((i for i, number in enumerate(numbers) if number not in model), len(numbers))
            assert store.longest_prefix(keys) == prefix
        elif kind == "delete":
            assert store.delete(keys).tolist() == [number in model for number in numbers]
            for number in numbers:
                model.pop(number, None)
        elif kind == "flush":
            store.flush()
        else:
            if kind == "close":
                store.close()
            else:
                store.flush()
                store.namespace.abandon()
            store = PageStore(
                Volume.open(members[::-1], deadline=deadline).open_namespace("kv", deadline=deadline)
            )
            entries = store.namespace.entries()
            assert {int(k[0]) - 1 for k in entries["key"]} == set(model)
            # The order of use is kept as of the last record of each page; take the store's own.
            use = {int(e["key"][0]) - 1: (int(e["last_use"]), int(e["slot_index"])) for e in entries}
            model = OrderedDict(sorted(model.items(), key=lambda item: use[item[0]]))
    stat = store.namespace.stat().index
    assert stat.live_count == len(model)
    assert stat.live_count + stat.free_count + stat.leaving_count == stat.slot_count
    store.namespace.abandon()


index_calls = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "evict", "settle"]), st.lists(st.integers(0, 60), max_size=6)
    ),
    max_size=80,
)


@given(steps=index_calls, block=st.sampled_from([512, 4096]))
def test_index_when_called_at_random_answers_as_a_dict(
    steps: list[tuple[str, list[int]]], block: int
) -> None:
    slots = 40
    blocks = table_block_count(block, slots)
    image = aligned_buffer(blocks * block)
    format_table(
        block_bytes=block, first_block=0, block_count=blocks, slot_count=slots, uuid=bytes(16), out=image
    )
    table = Table(image, block_bytes=block, slot_count=slots, uuid=bytes(16))
    index = PageIndex(table, pending_limit=1000, next_generation=1)
    index.load()
    model: OrderedDict[int, int] = OrderedDict()
    for kind, numbers in steps:
        unique = list(dict.fromkeys(numbers))
        keys = np.frombuffer(b"".join(map(key, unique)), dtype=np.uint8).reshape(-1, 32)
        if kind == "put":
            grants = index.reserve(len(unique), 5)
            if grants is None:
                assert index.stat().free_count < len(unique)
                continue
            zero = np.zeros(len(unique), dtype=np.uint32)
            assert index.commit(keys, grants, zero, np.zeros(len(unique), dtype=np.uint8)).all()
            # The first of a batch counts as the latest used.
            for number, generation in reversed(list(zip(unique, grants["generation"].tolist(), strict=True))):
                model.pop(number, None)
                model[number] = generation
        elif kind == "remove":
            assert index.remove(keys).tolist() == [number in model for number in unique]
            for number in unique:
                model.pop(number, None)
        elif kind == "evict":
            count = min(len(numbers), len(model))
            assert index.evict(len(numbers)) == count
            for _ in range(count):
                model.popitem(last=False)
        else:
            index.settle(index.collect())
        everything = np.frombuffer(b"".join(key(n) for n in range(61)), dtype=np.uint8).reshape(-1, 32)
        found, found_count = index.lookup(everything, touch=False)
        assert found_count == len(model)
        expected = [model.get(number) for number in range(61)]
        got = [
            None if slot == SLOT_NONE else generation
            for slot, generation in zip(
                found["slot_index"].tolist(), found["generation"].tolist(), strict=True
            )
        ]
        assert got == expected
        stat = index.stat()
        assert stat.live_count == len(model)
        assert stat.live_count + stat.free_count + stat.leaving_count == slots
