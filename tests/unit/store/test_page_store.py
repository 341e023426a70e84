"""Batches: what is put is got, what fails is reported, and what is wrong is refused before any I/O."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from kvdev.buffers import AddressedPages
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, CommandError, CorruptionError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.io import OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.store.page_store import PageStatus


def test_put_then_get_when_some_keys_are_stored_says_hit_and_miss(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(10)
    result = store.put(keys[:7], pages[:7])
    assert result.stored_count == 7
    assert result.crc32c.tolist() == [crc32c(page) for page in pages[:7]]
    out = lab.room(10)
    out[:] = 0xAA
    got = store.get(keys, out)
    assert got.status.tolist() == [PageStatus.HIT] * 7 + [PageStatus.MISS] * 3
    assert np.array_equal(out[:7], pages[:7])
    assert (out[7:] == 0xAA).all()
    assert got.crc32c[:7].tolist() == result.crc32c.tolist()
    assert store.contains(keys).tolist() == [True] * 7 + [False] * 3
    assert store.longest_prefix(keys) == 7
    assert store.longest_prefix(keys[8:]) == 0
    assert store.longest_prefix(keys[:0]) == 0


def test_put_with_given_checksums_when_they_are_right_needs_none_of_ours(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(4)
    crcs = np.array([crc32c(page) for page in pages], dtype=np.uint32)
    crcs[3] ^= 1  # a wrong one is stored as given, and then refuses the page
    assert store.put(keys, pages, checksums=crcs).stored_count == 4
    got = store.get(keys, lab.room(4))
    assert got.status.tolist() == [PageStatus.HIT] * 3 + [PageStatus.ERROR]
    assert isinstance(got.failure, CorruptionError)
    assert not store.contains(keys[3:]).any()


def test_overwrite_when_got_gives_the_new_page_and_keeps_one_slot(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(5)
    store.put(keys, pages)
    store.put(keys, pages[::-1].copy())
    out = lab.room(5)
    assert store.get(keys, out).hit_count == 5
    assert np.array_equal(out, pages[::-1])
    stat = store.namespace.stat().index
    assert (stat.live_count, stat.free_count) == (5, stat.slot_count - 5)


def test_delete_when_flushed_stays_deleted_after_reopen(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(6)
    store.put(keys, pages)
    store.flush()
    assert store.delete(keys[:2]).tolist() == [True, True]
    assert store.delete(keys[:3]).tolist() == [False, False, True]
    store.flush()
    store = lab.reopen()
    assert store.contains(keys).tolist() == [False] * 3 + [True] * 3


def test_flushed_pages_when_the_process_dies_are_all_found(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.flush()
    store = lab.reopen()
    assert not store.namespace.open_report.was_clean
    out = lab.room(20)
    assert store.get(keys, out).hit_count == 20
    assert np.array_equal(out, pages)
    assert store.namespace.epoch == 2


def test_close_when_clean_leaves_nothing_to_replay(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    store.close()
    with pytest.raises(UsageError, match="v#kv: is closed"):
        store.put(keys, pages)
    store = lab.reopen()
    report = store.namespace.open_report
    assert report.was_clean
    assert report.replayed_record_count == 0
    assert store.get(keys, lab.room(20)).hit_count == 20


def test_quota_when_reached_evicts_the_least_recently_used(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(lab.quota_pages)
    store.put(keys[:16], pages[:16])
    store.put(keys[16:], pages[16:])
    store.get(keys[:8], lab.room(8))
    more_keys, more_pages = lab.batch(8)
    assert store.put(more_keys, more_pages).stored_count == 8
    there = store.contains(keys)
    assert there[:8].all()
    assert there[8:].sum() == lab.quota_pages - 16
    assert not there[8:16].any()
    assert store.namespace.stat().index.live_count == lab.quota_pages


def test_many_puts_at_the_quota_never_leak_a_slot(lab: Any) -> None:
    store = lab.store()
    for _ in range(12):
        keys, pages = lab.batch(lab.quota_pages)
        assert store.put(keys, pages).stored_count == lab.quota_pages
        out = lab.room(lab.quota_pages)
        assert store.get(keys, out).hit_count == lab.quota_pages
        assert np.array_equal(out, pages)
    store.flush()
    stat = store.namespace.stat().index
    assert stat.live_count + stat.free_count == stat.slot_count
    assert store.namespace.stat().withdrawn_count == 0


def test_put_when_larger_than_the_quota_is_refused(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(lab.quota_pages + 1)
    with pytest.raises(CapacityError, match=r"expected at most the quota of 32 pages, got 33"):
        store.put(keys, pages)
    assert store.namespace.stat().index.live_count == 0


def test_bad_batch_when_given_is_refused_before_any_io(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(4)
    store.put(keys, pages)
    lab.fail.update({(m, op): (-errno.EIO, 0) for m in range(3) for op in (OPCODE_READ, OPCODE_WRITE)})
    double = keys.copy()
    double[3] = double[1]
    twice = r"key 3 .* twice"
    with pytest.raises(UsageError, match=twice):
        store.put(double, pages)
    with pytest.raises(UsageError, match=twice):
        store.get(double, pages)
    with pytest.raises(UsageError, match=twice):
        store.delete(double)
    with pytest.raises(UsageError, match=r"keys: expected a \(n, 32\) uint8 array"):
        store.put(keys[:, :16], pages)
    with pytest.raises(UsageError, match=r"keys: expected a \(n, 32\) uint8 array"):
        store.contains(keys.astype(np.int32))
    with pytest.raises(UsageError, match="pages: expected a"):
        store.put(keys, pages[:, :-1])
    with pytest.raises(UsageError, match="pages: expected a"):
        store.get(keys, pages.astype(np.int8))
    with pytest.raises(UsageError, match="one page per key, got 3 for 4 keys"):
        store.get(keys, pages[:3])
    with pytest.raises(UsageError, match="pages of at least 8192 bytes, got 100"):
        store.get(keys, AddressedPages(np.ones(4, dtype=np.uint64), 100, None))
    with pytest.raises(UsageError, match="checksums: expected a"):
        store.put(keys, pages, checksums=np.zeros(3, dtype=np.uint32))
    with pytest.raises(UsageError, match="verify: expected store or kernel"):
        store.get(keys, pages, verify="nobody")


def flip(lab: Any, store: Any, key: Any) -> None:
    """One bit of a stored page, on the medium."""
    grant = store.namespace.lookup(key[None, :], touch=False)[0]
    lba = store.namespace.slot_slba(int(grant["slot_index"]))
    strip, within = divmod(lba, 4)
    row, member = divmod(strip, 3)
    lab.members[member].data[(row * 4 + within) * 4096 + 17] ^= 1


def test_bit_flip_when_got_is_an_error_then_a_miss_and_touches_no_other_page(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(6)
    store.put(keys, pages)
    flip(lab, store, keys[2])
    out = lab.room(6)
    got = store.get(keys, out)
    assert got.status.tolist() == [1, 1, 2, 1, 1, 1]
    assert isinstance(got.failure, CorruptionError)
    assert "page 2 of the batch: checksum" in str(got.failure)
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(out[others], pages[others])
    assert store.get(keys, out).status.tolist() == [1, 1, 0, 1, 1, 1]
    assert store.namespace.stat().withdrawn_count == 1


def test_verify_by_kernel_when_a_page_is_bad_is_left_to_the_caller(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(3)
    store.put(keys, pages)
    flip(lab, store, keys[1])
    out = lab.room(3)
    got = store.get(keys, out, verify="kernel")
    assert got.hit_count == 3
    is_bad = np.array([crc32c(page) for page in out], dtype=np.uint32) != got.crc32c
    assert is_bad.tolist() == [False, True, False]
    assert store.report_bad(got, is_bad) == 1
    assert store.contains(keys).tolist() == [True, False, True]


def test_swapped_slots_when_got_are_errors(lab: Any) -> None:
    """Whole, intact pages in each other's place: the checksum covers the key and the generation."""
    store = lab.store()
    keys, pages = lab.batch(2)
    pages[1] = pages[0]  # even equal bytes do not save a wrong identity
    store.put(keys, pages)
    entries = store.namespace.entries()
    assert entries["checksum"][0] != entries["checksum"][1]
    assert entries["checksum"][0] & 0xFFFFFFFF == entries["checksum"][1] & 0xFFFFFFFF


def test_write_errors_when_put_are_reported_and_nothing_is_replaced(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(6)
    store.put(keys, pages)
    lab.fail[1, OPCODE_WRITE] = (0, 0x280)
    result = store.put(keys, pages[::-1].copy())
    assert result.error_count > 0
    assert isinstance(result.failure, CommandError)
    del lab.fail[1, OPCODE_WRITE]
    out = lab.room(6)
    assert store.get(keys, out).hit_count == 6
    for index in range(6):
        is_new = result.status[index] == PageStatus.STORED
        assert np.array_equal(out[index], pages[5 - index] if is_new else pages[index])
    store.flush()
    stat = store.namespace.stat().index
    assert stat.live_count + stat.free_count == stat.slot_count


def test_writes_of_unknown_fate_when_put_quarantine_their_slots(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(6)
    lab.fail[0, OPCODE_WRITE] = (-errno.ENOTCONN, 0)
    result = store.put(keys, pages)
    assert store.namespace.stat().index.quarantined_count == result.error_count > 0
    assert not store.contains(keys[result.status == PageStatus.ERROR]).any()


def test_read_errors_when_got_are_errors_and_the_entry_stays(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(6)
    store.put(keys, pages)
    lab.fail[2, OPCODE_READ] = (-errno.ENOTCONN, 0)
    got = store.get(keys, lab.room(6))
    assert got.error_count > 0
    assert got.miss_count == 0
    lab.fail.clear()
    assert store.get(keys, lab.room(6)).hit_count == 6


def test_failed_flush_when_it_covers_pages_withdraws_them(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(8)
    store.put(keys[:4], pages[:4])
    store.flush()
    store.put(keys[4:], pages[4:])
    lab.fail[1, OPCODE_FLUSH] = (0, 0x006)
    with pytest.raises(CommandError):
        store.flush()
    assert store.contains(keys).tolist() == [True] * 4 + [False] * 4
    assert store.namespace.stat().withdrawn_count == 4
    lab.fail.clear()
    store.flush()
    assert store.put(keys[4:], pages[4:]).stored_count == 4
    store.flush()
    store = lab.reopen()
    assert store.get(keys, lab.room(8)).hit_count == 8


def test_failed_journal_write_when_flushed_withdraws_and_the_next_flush_recovers(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(12)
    store.put(keys[:4], pages[:4])
    store.flush()
    store.put(keys[4:8], pages[4:8])
    lab.fail.update({(member, OPCODE_WRITE): (-errno.EIO, 0) for member in range(3)})
    with pytest.raises(OSError, match="Input/output error"):
        store.flush()
    lab.fail.clear()
    assert store.contains(keys[:8]).tolist() == [True] * 4 + [False] * 4
    store.put(keys[8:], pages[8:])
    store.flush()
    store = lab.reopen()
    assert store.contains(keys).tolist() == [True] * 4 + [False] * 4 + [True] * 4
    store.put(keys[4:8], pages[4:8])
    store.flush()
    store = lab.reopen()
    assert store.get(keys, lab.room(12)).hit_count == 12


def test_expired_deadline_when_put_leaves_the_slots_alone(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(4)
    result = store.put(keys, pages, deadline=Deadline.after(0))
    assert result.error_count == 4
    assert not store.contains(keys).any()


def test_group_commit_when_many_puts_are_flushed_once_costs_two_rounds_of_flushes(lab: Any) -> None:
    store = lab.store()
    flushes: list[int] = []

    def count(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        if opcode == OPCODE_FLUSH:
            flushes.append(slba)
        return 0, 0

    for member in lab.members:
        member.observer = count
    for _ in range(8):
        keys, pages = lab.batch(3)
        store.put(keys, pages)
    store.flush()
    assert len(flushes) <= 2 * len(lab.members)
    store.flush()
    assert len(flushes) <= 2 * len(lab.members)
