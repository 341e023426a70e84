"""Replaying random traces on a volume in memory: the model's prefixes, every byte, and a canary that must be caught."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import ConnectionLostError
from kvdev.geometry import Geometry
from kvdev.native.io import OPCODE_READ
from kvdev.staging import Arena
from kvdev.store import PageStore, Volume
from kvdev_kernels import PageKernels
from kvdev_tools.content import PageContent, request_keys
from kvdev_tools.plan import count_needs
from kvdev_tools.pool import size_pool
from kvdev_tools.replay import Replayer
from kvdev_tools.report import Totals
from kvdev_tools.tensors import EngineTensors, block_tokens
from kvdev_tools.trace import Request, summarise

GEOMETRY = Geometry(model_id="t", layer_count=1, kv_head_count=2, head_size=4, tokens_per_page=64)
BATCH_PAGE_COUNT = 3


@pytest.fixture(scope="module")
def kernels() -> Iterator[PageKernels]:
    with PageKernels("numpy") as kernels:
        yield kernels


class Setup:
    """A replayer on a fresh volume of memory devices."""

    def __init__(self, kernels: PageKernels, *, quota_pages: int, page_count: int, member_count: int) -> None:
        limit = Deadline.after(60)
        size = size_pool(
            GEOMETRY, page_count=quota_pages, member_count=member_count, strip_size_bytes=16 << 10
        )
        self.devices = [
            MemoryDevice(size_bytes=size.member_size_bytes, name=f"m{index}", block_size_bytes=4096)
            for index in range(member_count)
        ]
        self.volume = Volume.create(self.devices, name="v", strip_size_bytes=16 << 10, deadline=limit)
        self.volume.create_namespace("kv", GEOMETRY, quota_pages=quota_pages, deadline=limit)
        self.store = PageStore(self.volume.open_namespace("kv", deadline=limit))
        self.tensors = EngineTensors(
            GEOMETRY, layout="nhd", page_count=page_count, block_tokens=block_tokens("nhd", GEOMETRY)
        )
        self.arena = Arena(BATCH_PAGE_COUNT * 4096)
        self.replayer = Replayer(
            store=self.store,
            tensors=self.tensors,
            arena=self.arena,
            kernels=kernels,
            batch_page_count=BATCH_PAGE_COUNT,
            seed=1,
        )

    def close(self) -> None:
        self.store.close()
        self.arena.close()
        for device in self.devices:
            device.close()


@contextlib.contextmanager
def set_up(
    kernels: PageKernels, *, quota_pages: int, page_count: int, member_count: int = 2
) -> Iterator[Setup]:
    setup = Setup(kernels, quota_pages=quota_pages, page_count=page_count, member_count=member_count)
    try:
        yield setup
    finally:
        setup.close()


def to_request(ids: list[int]) -> Request:
    return Request(0, 512 * len(ids), 1, tuple(ids))


traces = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True).map(to_request), min_size=1, max_size=12
)


@given(requests=traces, member_count=st.integers(1, 5))
def test_with_room_for_all_the_replay_restores_what_the_trace_implies(
    kernels: PageKernels, requests: list[Request], member_count: int
) -> None:
    needs, summary = count_needs(requests), summarise(requests)
    assert needs.pages_distinct is not None
    with set_up(
        kernels,
        quota_pages=needs.pages_distinct,
        page_count=needs.pages_per_request_max,
        member_count=member_count,
    ) as setup:
        totals = Totals.of(setup.replayer.replay(index, each) for index, each in enumerate(requests))
        stored = setup.store.namespace.member_bytes()
        assert setup.arena.lease_count == 0
    assert (totals.mismatches, totals.page_errors) == (0, 0)
    assert totals.pages_restored == totals.pages_verified == summary.pages_restorable
    assert totals.hit_rate == summary.hit_rate
    assert totals.pages_written == summary.pages_requested - summary.pages_restorable
    assert totals.stored_pages == summary.pages_distinct
    assert sum(stored) == summary.pages_distinct * 4096


@given(requests=traces, quota_pages=st.integers(BATCH_PAGE_COUNT, 8))
def test_with_little_room_every_restored_page_is_right(
    kernels: PageKernels, requests: list[Request], quota_pages: int
) -> None:
    needs, summary = count_needs(requests), summarise(requests)
    with set_up(kernels, quota_pages=quota_pages, page_count=needs.pages_per_request_max) as setup:
        totals = Totals.of(setup.replayer.replay(index, each) for index, each in enumerate(requests))
    assert (totals.mismatches, totals.page_errors) == (0, 0)
    assert totals.pages_restored <= summary.pages_restorable
    assert totals.pages_restored + totals.pages_written == summary.pages_requested
    assert totals.stored_pages <= quota_pages


def test_canary_a_bit_turned_on_media_is_caught(kernels: PageKernels, rng: np.random.Generator) -> None:
    request = to_request([1, 2, 3, 4, 5])
    with set_up(kernels, quota_pages=8, page_count=5) as setup:
        setup.replayer.replay(0, request)
        needle = PageContent(GEOMETRY.page_size_bytes).page(request_keys((3,))[0]).tobytes()
        for device in setup.devices:
            at = device.data.tobytes().find(needle)
            if at >= 0:
                device.data[at + int(rng.integers(len(needle)))] ^= 1
                break
        else:
            pytest.fail("the page is on no member")
        record = setup.replayer.replay(1, request)
        assert (record.pages_restored, record.page_errors, record.mismatches) == (2, 1, 0)
        # Withdrawn, filled and stored again.
        assert record.pages_written == 3
        again = setup.replayer.replay(2, request)
        assert (again.pages_restored, again.page_errors, again.mismatches) == (5, 0, 0)


class WrongKernels(PageKernels):
    """A kernel that puts two pages into each other's blocks but reports the right checksums."""

    def unpack(self, layout, block_table, pages, *, verify=None, algorithm="crc32c", stream=None):  # type: ignore[no-untyped-def]
        result = super().unpack(layout, block_table, pages, verify=verify, algorithm=algorithm)
        super().unpack(layout, np.asarray(block_table)[::-1], pages)
        return result


def test_canary_pages_in_the_wrong_blocks_are_mismatches() -> None:
    request = to_request([1, 2])
    with WrongKernels("numpy") as kernels, set_up(kernels, quota_pages=8, page_count=5) as setup:
        setup.replayer.replay(0, request)
        assert setup.replayer.replay(1, request).mismatches == 2


@pytest.mark.parametrize(
    ("error", "ends"), [(-errno.ETIMEDOUT, False), (-errno.EIO, False), (-errno.ENOTCONN, True)]
)
def test_read_that_fails_or_takes_too_long_is_a_miss_and_a_lost_device_ends_the_replay(
    kernels: PageKernels, error: int, ends: bool
) -> None:
    request = to_request([1, 2, 3, 4, 5])
    with set_up(kernels, quota_pages=8, page_count=5, member_count=1) as setup:
        setup.replayer.replay(0, request)
        reads = 0

        def fail_third(opcode: int, slba: int, payload: object) -> tuple[int, int]:
            nonlocal reads
            reads += opcode == OPCODE_READ
            return (error, 0) if opcode == OPCODE_READ and reads == 3 else (0, 0)

        setup.devices[0].observer = fail_third
        if ends:
            with pytest.raises(ConnectionLostError):
                setup.replayer.replay(1, request)
            return
        record = setup.replayer.replay(1, request)
        assert (record.pages_restored, record.failed_reads, record.page_errors) == (2, 1, 0)
        assert (record.pages_written, record.mismatches) == (3, 0)
        again = setup.replayer.replay(2, request)
        assert (again.pages_restored, again.failed_reads) == (5, 0)
