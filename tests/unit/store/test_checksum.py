"""A KV namespace whose pages have NH-64: everything that reads, writes, moves and judges pages goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UnsupportedError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.check import check_volume
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.resize import resize_namespace
from kvdev.store.scrub import Scrubber
from kvdev.store.volume import Volume
from kvdev_kernels.nh64 import nh64
from tests.unit.store.conftest import Lab


def soon() -> Deadline:
    return Deadline.after(30)


@pytest.fixture
def nh64_lab(members: list[MemoryDevice]) -> Iterator[Lab]:
    made = Lab(members, checksum="nh64")
    yield made
    for store in made.stores:
        store.namespace.abandon()


def flip(lab: Any, store: PageStore, key: Any) -> None:
    """One bit of a stored page, on the medium; strips of four blocks over three members."""
    grant = store.namespace.lookup(key[None, :], touch=False)[0]
    strip, within = divmod(store.namespace.slot_slba(int(grant["slot_index"])), 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + 17] ^= 1


def sums_of(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([nh64(page) for page in pages], dtype=np.uint64)


def test_pages_when_put_and_got_have_their_nh64_also_after_a_crash(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(6)
    assert store.put(keys[:3], pages[:3]).sums.tolist() == sums_of(pages[:3]).tolist()
    given = sums_of(pages[3:])
    assert store.put(keys[3:], pages[3:], checksums=given).stored_count == 3
    assert (store.namespace.entries()["algorithm"] == 2).all()
    store.flush()
    again = nh64_lab.reopen()
    assert (
        again.checksum.name == "nh64" and nh64_lab.volume.namespace("kv", deadline=soon()).checksum == "nh64"
    )
    for verify in ("store", "kernel"):
        out = nh64_lab.room(6)
        got = again.get(keys, out, verify=verify)
        assert got.hit_count == 6 and np.array_equal(out, pages)
        assert got.sums.tolist() == sums_of(pages).tolist()


def test_bit_flip_when_got_scrubbed_or_checked_is_found(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(6)
    store.put(keys, pages)
    flip(nh64_lab, store, keys[2])
    got = store.get(keys, nh64_lab.room(6))
    assert got.status.tolist() == [1, 1, 2, 1, 1, 1] and isinstance(got.failure, CorruptionError)
    expected, actual = got.failure.expected, got.failure.actual
    assert expected == nh64(pages[2]) != actual
    assert f"checksum: expected 0x{expected:016x}, got 0x{actual:016x}; withdrawn" in str(got.failure)

    flip(nh64_lab, store, keys[3])
    scrubber = Scrubber(store.namespace, bytes_per_s=1 << 30)
    while not scrubber.stat().pass_count:
        scrubber.step()
    assert (scrubber.stat().checked_pages, scrubber.stat().damaged_pages) == (5, 1)

    flip(nh64_lab, store, keys[4])
    out = nh64_lab.room(6)
    got = store.get(keys, out, verify="kernel")
    is_bad = (got.status == PageStatus.HIT) & (sums_of(out) != got.sums)
    assert np.flatnonzero(is_bad).tolist() == [4] and store.report_bad(got, is_bad) == 1

    flip(nh64_lab, store, keys[5])
    store.close()
    report = check_volume(nh64_lab.members)
    assert (report.namespaces[0].good_pages, report.namespaces[0].bad_pages) == (2, 1)
    assert f"checksum: expected 0x{nh64(pages[5]):016x}, got" in report.namespaces[0].findings[0].what


def test_sums_that_are_not_nh64_are_refused_before_anything_is_written(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(2)
    with pytest.raises(UsageError, match=r"checksums: expected a \(2,\) uint64 array, got \(2,\) uint32"):
        store.put(keys, pages, checksums=np.zeros(2, np.uint32))
    grants = store.namespace.reserve(keys, deadline=soon())
    with pytest.raises(UsageError, match=r"sums: expected a \(2,\) uint64 array"):
        store.namespace.commit(keys, grants, np.zeros(2, np.uint32), deadline=soon())
    store.namespace.release(grants, deadline=soon())
    assert store.namespace.stat().index.live_count == 0


def test_swapped_pages_of_equal_bytes_have_other_checksums(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(2)
    pages[1] = pages[0]
    store.put(keys, pages)
    entries = store.namespace.entries()
    assert entries["checksum"][0] != entries["checksum"][1]


def test_pages_when_moved_by_a_resize_are_good_still_and_a_clone_is_alike(nh64_lab: Any) -> None:
    volume = nh64_lab.volume
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(32)
    store.put(keys, pages)
    store.close()
    resize_namespace(volume, "kv", quota_pages=8, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    kept = store.contains(keys)
    out = nh64_lab.room(int(kept.sum()))
    assert kept.sum() == 8 and store.get(keys[kept], out).hit_count == 8
    assert np.array_equal(out, pages[kept]) and store.namespace.entries()["slot_index"].max() < 32
    store.close()
    assert volume.clone_namespace("kv", "more", deadline=soon()).checksum == "nh64"
    # What follows in the place of a deleted one is what it was made as.
    volume.delete_namespace("kv", deadline=soon())
    volume.create_namespace("kv", nh64_lab.geometry, quota_pages=4, deadline=soon())
    info = volume.namespace("kv", deadline=soon())
    assert info.checksum == "crc32c" and info.record.version == 1


def test_follower_reads_by_it(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    volume = Volume.open(nh64_lab.members, deadline=soon())
    follower = PageStore(volume.open_namespace("kv", mode="follower", deadline=soon()))
    keys, pages = nh64_lab.batch(3)
    store.put(keys, pages)
    store.flush()
    store.namespace.renew(deadline=soon())
    follower.namespace.refresh(deadline=soon())
    out = nh64_lab.room(3)
    assert follower.get(keys, out).hit_count == 3 and np.array_equal(out, pages)


def test_pages_that_end_within_a_block_have_it_too(members: list[MemoryDevice]) -> None:
    geometry = Geometry(model_id="odd", layer_count=1, kv_head_count=1, head_size=24, tokens_per_page=50)
    assert geometry.page_size_bytes % 4096
    lab = Lab(members, geometry=geometry, checksum="nh64")
    store = lab.store()
    keys, pages = lab.batch(4)
    assert store.put(keys, pages).sums.tolist() == sums_of(pages).tolist()
    out = lab.room(4)
    assert store.get(keys, out).hit_count == 4 and np.array_equal(out, pages)
    store.namespace.abandon()


def test_number_that_nobody_knows_is_refused_by_name_and_read_as_unknown(nh64_lab: Any) -> None:
    volume = nh64_lab.volume
    record = volume.namespace("kv", deadline=soon()).record
    volume.write_both(replace(record, checksum_number=9), soon())
    text = r"v#kv: page checksum: expected one of 1 \(crc32c\), 2 \(nh64\), got 9; use a kvdev that knows it"
    for mode in ("owner", "reader"):
        with pytest.raises(UnsupportedError, match=text):
            volume.open_namespace("kv", mode=mode, deadline=soon())
    with pytest.raises(UnsupportedError, match=text):
        volume.open_page_io("kv", deadline=soon())
    assert volume.namespace("kv", deadline=soon()).checksum == "unknown (9)"
    with pytest.raises(UsageError, match="checksum: expected one of crc32c, nh64, got 'unknown"):
        volume.clone_namespace("kv", "more", deadline=soon())


def test_page_with_another_number_than_its_namespace_is_refused_with_its_slot(nh64_lab: Any) -> None:
    store = nh64_lab.store()
    keys, pages = nh64_lab.batch(2)
    store.put(keys, pages)
    store.flush()
    store.namespace.abandon()
    volume = nh64_lab.volume
    record = volume.namespace("kv", deadline=soon()).record
    volume.write_both(replace(record, checksum_number=1), soon())
    text = r"v#kv: slot \d+: page checksum: expected 1 \(crc32c\), got 2"
    with pytest.raises(UnsupportedError, match=text):
        volume.open_namespace("kv", deadline=soon())
    volume.write_both(replace(volume.namespace("kv", deadline=soon()).record, checksum_number=2), soon())
    out = nh64_lab.room(2)
    assert nh64_lab.store().get(keys, out).hit_count == 2 and np.array_equal(out, pages)
