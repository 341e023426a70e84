"""A KV namespace that grows and shrinks keeps its pages, and frees what it does not need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CapacityError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.store.check import check_volume
from kvdev.store.page_store import PageStore
from kvdev.store.resize import ResizeReport, resize_namespace
from kvdev.store.volume import Volume

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes


def soon() -> Deadline:
    return Deadline.after(60)


def keys_of(numbers: list[int]) -> KeyArray:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :2] = np.array(numbers, dtype="<u2").view(np.uint8).reshape(-1, 2)
    keys[:, 31] = 1
    return keys


def pages_of(numbers: list[int]) -> npt.NDArray[np.uint8]:
    return np.stack([np.full(PAGE, number * 7 % 251, dtype=np.uint8) for number in numbers])


class Tenant:
    """A namespace of few pages on a volume of one's own, opened anew for each step."""

    def __init__(self, lab: Any, quota_pages: int, **options: Any) -> None:
        self.lab = lab
        lab.volume.delete_namespace("kv", deadline=soon())
        lab.volume.create_namespace(
            "t", GEOMETRY, quota_pages=quota_pages, journal_block_count=8, deadline=soon(), **options
        )

    def put(self, numbers: list[int]) -> None:
        store = PageStore(self.lab.volume.open_namespace("t", deadline=soon()))
        for number in numbers:
            assert store.put(keys_of([number]), pages_of([number])).stored_count == 1
        store.close()

    def check(self, numbers: list[int]) -> None:
        """These pages and no others are there, byte for byte, by another opening of the volume."""
        volume = Volume.open(self.lab.members, deadline=soon())
        store = PageStore(volume.open_namespace("t", mode="reader", deadline=soon()))
        out = np.zeros((len(numbers), PAGE), dtype=np.uint8)
        assert store.get(keys_of(numbers), out).hit_count == len(numbers)
        assert np.array_equal(out, pages_of(numbers))
        assert store.namespace.stat().index.live_count == len(numbers)
        report = check_volume(self.lab.members)
        assert report.is_ok, report.all_findings

    def resize(self, quota_pages: int) -> ResizeReport:
        report = resize_namespace(
            self.lab.volume, "t", quota_pages=quota_pages, journal_block_count=8, deadline=soon()
        )
        info = self.lab.volume.namespace("t", deadline=soon())
        assert info.quota_pages == report.quota_pages == quota_pages
        return report

    def free_bytes(self) -> int:
        return int(sum(count for _, count in self.lab.volume.free_extents(soon()))) * 4096


def test_grow_keeps_every_page_in_its_place_and_has_room_for_more(lab: Any) -> None:
    tenant = Tenant(lab, 20)
    tenant.put(list(range(20)))
    report = tenant.resize(100)
    assert (report.evicted_pages, report.moved_pages) == (0, 0)
    tenant.check(list(range(20)))
    tenant.put(list(range(100, 180)))
    tenant.check([*range(20), *range(100, 180)])
    tenant.put([200])
    tenant.check([*range(1, 20), *range(100, 180), 200])


def test_shrink_evicts_by_the_policy_moves_the_rest_and_frees_the_room(lab: Any) -> None:
    tenant = Tenant(lab, 200)
    tenant.put(list(range(200)))
    free = tenant.free_bytes()
    report = tenant.resize(50)
    assert report.evicted_pages == 150 and report.moved_pages > 0
    tenant.check(list(range(150, 200)))
    assert tenant.free_bytes() - free > 140 * PAGE
    lab.volume.create_namespace("other", GEOMETRY, quota_pages=140, deadline=soon())
    tenant.put([300])
    tenant.check([*range(151, 200), 300])


def test_resize_up_and_down_many_times_keeps_pages_and_loses_no_room(lab: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tenant = Tenant(lab, 30)
    live: list[int] = []
    extents = []
    for step in range(12):
        fresh = list(range(1000 * step, 1000 * step + 10))
        tenant.put(fresh)
        quota = lab.volume.namespace("t", deadline=soon()).quota_pages
        live = [*live, *fresh][-quota:]
        tenant.check(live)
        quota = int(rng.integers(15, 200)) if step % 3 else 30
        extents.append((quota, tenant.resize(quota).extent_bytes))
        live = live[-quota:]
        tenant.check(live)
    small = [extent for quota, extent in extents if quota == 30]
    assert max(small) <= min(small) + 2 * 64 * 4096, "what a resize leaves behind is used by a later one"


def test_resize_when_there_is_no_room_is_refused_and_evicts_nothing(lab: Any) -> None:
    tenant = Tenant(lab, 20)
    tenant.put(list(range(20)))
    lab.volume.create_namespace("behind", GEOMETRY, quota_pages=20, deadline=soon())
    with pytest.raises(
        CapacityError, match=r"resize to 900 pages: expected .* further pieces, got .* free in"
    ):
        tenant.resize(900)
    tenant.check(list(range(20)))
    store = PageStore(lab.volume.open_namespace("t", deadline=soon()))
    with pytest.raises(UsageError, match="owned by"):
        tenant.resize(10)
    store.close()
    with pytest.raises(UsageError, match="at least one page"):
        tenant.resize(0)


def test_shrink_when_the_policy_lets_nothing_go_is_refused(lab: Any) -> None:
    tenant = Tenant(lab, 20, eviction_policy="none")
    tenant.put(list(range(20)))
    with pytest.raises(CapacityError, match="holds 20 pages and its eviction policy is none"):
        tenant.resize(10)
    tenant.check(list(range(20)))


def test_shrink_when_a_page_is_damaged_leaves_it_out(lab: Any) -> None:
    tenant = Tenant(lab, 200)
    tenant.put(list(range(200)))
    reader = lab.volume.open_namespace("t", mode="reader", deadline=soon())
    grant = reader.lookup(keys_of([199]))[0]
    assert grant["slot_index"] > 60
    lab.volume.io.write(reader.slot_slba(int(grant["slot_index"])), bytes(4096), soon())
    tenant.resize(50)
    tenant.check(list(range(150, 199)))


def test_erase_after_a_resize_leaves_nothing_of_the_namespace(lab: Any) -> None:
    tenant = Tenant(lab, 20)
    tenant.put(list(range(1, 20)))
    tenant.resize(60)
    record = lab.volume.namespace("t", deadline=soon()).record
    assert record.geometry_slba > record.extent_slba
    lab.volume.delete_namespace("t", erase=True, deadline=soon())
    assert not lab.volume.io.read(record.extent_slba, record.extent_block_count, soon()).any()
    assert not lab.volume.namespaces(deadline=soon())
