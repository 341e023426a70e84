"""Tenants' rules over random calls, against a plain dict: every policy, pins, pages that go by their age.

Which page goes is the policy's (tests/unit/native/test_index_order.py); here: that as many go as must, none that may
not, first in first out exactly (until it is opened again), and that whatever is found is what was put last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CapacityError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.superblock import EVICTION_POLICIES
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="model", layer_count=1, kv_head_count=1, head_size=16, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
QUOTA = 8
KEYS = 14
TTL_S = 50
SPARE_SLOTS = 4
"""A larger batch of replacements evicts others for want of slots, since replaced pages keep theirs meanwhile."""


def keys_of(numbers: list[int]) -> KeyArray:
    return np.stack([np.full(32, number + 1, dtype=np.uint8) for number in numbers])


EVERY = keys_of(list(range(KEYS)))

calls = st.lists(
    st.tuples(
        st.sampled_from(
            ["put", "put", "put", "get", "pin", "unpin", "delete", "wait", "flush", "crash", "close"]
        ),
        st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=SPARE_SLOTS, unique=True),
    ),
    min_size=1,
    max_size=40,
)


@dataclass
class Model:
    """What is stored: key to version and second of its last put, in the order of these puts."""

    has_ttl: bool
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    now: int = 0

    def forget(self, number: int) -> None:
        self.live.pop(number, None)
        self.pinned.discard(number)

    def expire(self) -> None:
        if self.has_ttl:
            for number in [number for number, (_, put_s) in self.live.items() if self.now - put_s >= TTL_S]:
                self.forget(number)

    def store(self, numbers: list[int], version: int) -> None:
        for number in reversed(numbers):  # of one batch the last counts as put first
            self.live.pop(number, None)
            self.live[number] = (version, self.now)


class Run:
    """One namespace and its model, call by call."""

    def __init__(self, policy: str, *, has_ttl: bool) -> None:
        self.policy = policy
        self.members = [MemoryDevice(size_bytes=1 << 20)]
        self.deadline = Deadline.after(120)
        self.model = Model(has_ttl)
        self.version = 0
        self.is_order_known = True
        volume = Volume.create(self.members, name="v", strip_size_bytes=16384, deadline=self.deadline)
        info = volume.create_namespace(
            "kv",
            GEOMETRY,
            quota_pages=QUOTA,
            journal_block_count=6,
            eviction_policy=policy,
            ttl_s=TTL_S if has_ttl else 0,
            deadline=self.deadline,
        )
        self.created_s = info.record.created_unix_s
        self.open()

    def open(self) -> None:
        volume = Volume.open(self.members, deadline=self.deadline)
        self.store = PageStore(
            volume.open_namespace(
                "kv", unix_s=lambda: self.created_s + self.model.now, deadline=self.deadline
            )
        )

    def call(self, kind: str, numbers: list[int]) -> None:
        keys, model = keys_of(numbers), self.model
        if kind == "put":
            self.put(numbers)
        elif kind == "get":
            self.get(numbers)
        elif kind == "pin":
            assert self.store.pin(keys).tolist() == [number in model.live for number in numbers]
            model.pinned |= set(numbers) & set(model.live)
        elif kind == "unpin":
            self.store.unpin(keys)
            for number in numbers:
                if number in model.pinned:
                    model.live[number] = model.live.pop(number)  # counts as used just now
            model.pinned -= set(numbers)
        elif kind == "delete":
            assert self.store.delete(keys).tolist() == [number in model.live for number in numbers]
            for number in numbers:
                model.forget(number)
        elif kind == "wait":
            model.now += 7 * numbers[0]
            model.expire()
        elif kind == "flush":
            self.store.flush()
        else:
            if kind == "close":
                self.store.close()
            else:
                self.store.flush()
                self.store.namespace.abandon()
            model.pinned.clear()  # pins are the owner's, not the media's
            self.is_order_known = False  # of one batch, or one second, it is not on media
            self.open()

    def put(self, numbers: list[int]) -> None:
        model = self.model
        self.version += 1
        pages = np.full((len(numbers), PAGE), self.version, dtype=np.uint8)
        excess = len(set(model.live) | set(numbers)) - QUOTA
        may_go = [number for number in model.live if number not in model.pinned and number not in numbers]
        if excess > 0 and (self.policy == "none" or excess > len(may_go)):
            with pytest.raises(CapacityError, match="is full"):
                self.store.put(keys_of(numbers), pages)
            # What could go may have gone, before it was seen that it is not enough.
            for number in set(may_go) - self.found() if self.policy != "none" else ():
                model.forget(number)
            return
        assert self.store.put(keys_of(numbers), pages).stored_count == len(numbers)
        gone = set(model.live) - self.found()
        assert gone <= set(may_go) and len(gone) == max(0, excess)
        if self.policy == "fifo" and self.is_order_known:
            assert gone == set(may_go[: len(gone)])
        for number in gone:
            model.forget(number)
        model.store(numbers, self.version)

    def get(self, numbers: list[int]) -> None:
        out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
        result = self.store.get(keys_of(numbers), out)
        for number, status, page in zip(numbers, result.status, out, strict=True):
            assert status == (PageStatus.HIT if number in self.model.live else PageStatus.MISS)
            assert (page == self.model.live.get(number, (0, 0))[0]).all()

    def found(self) -> set[int]:
        return set(np.flatnonzero(self.store.contains(EVERY)).tolist())

    def check(self) -> None:
        assert self.found() == set(self.model.live)
        stat = self.store.namespace.stat().index
        assert (stat.live_count, stat.pinned_count) == (len(self.model.live), len(self.model.pinned))
        assert stat.live_count + stat.free_count + stat.leaving_count == stat.slot_count


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=calls, policy=st.sampled_from(EVICTION_POLICIES), has_ttl=st.booleans())
def test_tenant_when_called_at_random_keeps_quota_pins_ages_and_bytes(
    steps: list[tuple[str, list[int]]],
    policy: str,
    has_ttl: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        run = Run(policy, has_ttl=has_ttl)
        for kind, numbers in steps:
            run.call(kind, numbers)
            run.check()
        run.store.namespace.abandon()
