"""``check_volume``: damage in, what it says and what was lost out; it writes only to repair."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import UsageError
from kvdev.native.io import OPCODE_READ
from kvdev.store.check import CheckProgress, CheckReport, check_volume


def test_sound_volume_when_checked_has_no_finding_and_reports_progress(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.flush()
    before = [member.data.copy() for member in lab.members]
    seen: list[CheckProgress] = []
    report = check_volume(lab.members[::-1], progress=seen.append)
    assert report.is_ok
    assert report.namespaces[0].good_pages == report.namespaces[0].pages == 20
    assert report.namespaces[0].replayed_records == 20
    assert seen[-1] == CheckProgress("kv", 20, 20, next_slot=20)
    assert all(np.array_equal(m.data, old) for m, old in zip(lab.members, before, strict=True))


def test_damage_when_checked_is_named_with_its_place(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    slot = int(store.namespace.entries()["slot_index"][3])
    lba = store.namespace.slot_slba(slot)
    table_lba = store.namespace.table_slba
    strip, within = divmod(lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096] ^= 0x80
    report = check_volume(lab.members)
    assert not report.is_ok
    (finding,) = report.namespaces[0].findings
    assert f"slot {slot} at LBA {lba} (LBA " in finding.what and ": checksum: expected" in finding.what
    assert (report.namespaces[0].bad_pages, report.namespaces[0].good_pages) == (1, 19)

    strip, within = divmod(table_lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + 99] ^= 1
    report = check_volume(lab.members)
    assert f"table block 0 at LBA {table_lba} (LBA " in report.namespaces[0].findings[0].what
    assert report.namespaces[0].findings[0].lost_pages_max == 63
    assert report.namespaces[0].pages == 0


def test_lost_superblock_copy_and_record_copy_when_checked_are_named(lab: Any) -> None:
    lab.members[1].data[4096 + 80] ^= 1
    report = check_volume(lab.members)
    assert [finding.where for finding in report.findings] == ["superblock copy 1 at LBA 5 (LBA 1 of mem:m1)"]
    lba = lab.volume.directory.slba_of(0, 1)
    strip, within = divmod(lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + 80] ^= 1
    report = check_volume(lab.members)
    assert report.findings[1].where == "record 0"
    assert report.findings[1].what.startswith(f"copy 1 at LBA {lba} (LBA ")
    assert str(report.findings[0]).count("superblock copy 1") == 1  # its place is said once


def test_volume_that_does_not_open_when_checked_says_why_and_what_each_member_is(lab: Any) -> None:
    report = check_volume(lab.members[:2])
    (finding,) = report.findings
    assert str(finding).startswith("volume 'v': member 2 of 3 is missing")
    labels = [(each.uri, each.member_index, each.member_count, each.volume) for each in report.intact_labels]
    assert labels == [("mem:m0", 0, 3, "v"), ("mem:m1", 1, 3, "v")]


def test_label_that_is_lost_when_checked_is_one_finding(lab: Any) -> None:
    lab.members[1].data[100] ^= 1
    report = check_volume(lab.members, repair=True)
    (finding,) = report.findings
    assert str(finding).startswith("mem:m1: label: checksum: ") and not finding.is_repaired
    assert [each.uri for each in report.intact_labels] == ["mem:m0", "mem:m2"]


def test_unreadable_page_when_checked_is_counted_apart(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(4)
    store.put(keys, pages)
    store.close()
    first = store.namespace.slot_slba(0)
    places = {
        ((lba // 4) % 3, lba // 4 // 3 * 4 + lba % 4) for lba in range(first, store.namespace.slot_slba(4))
    }
    for index, member in enumerate(lab.members):
        member.observer = lambda opcode, slba, payload, i=index: (
            (0, 0x281) if opcode == OPCODE_READ and (i, slba) in places else (0, 0)
        )
    report = check_volume(lab.members)
    assert report.namespaces[0].unreadable_pages == 4
    assert "cannot be read" in report.namespaces[0].findings[0].what


def test_unreadable_structure_when_checked_is_a_finding(lab: Any) -> None:
    lab.store().close()
    table_lba = lab.stores[0].namespace.table_slba
    place = ((table_lba // 4) % 3, table_lba // 4 // 3 * 4 + table_lba % 4)
    for index, member in enumerate(lab.members):
        member.observer = lambda opcode, slba, payload, i=index: (
            (0, 0x281) if opcode == OPCODE_READ and (i, slba) == place else (0, 0)
        )
    report = check_volume(lab.members)
    assert "got status 0x2/0x81" in report.namespaces[0].findings[0].what


def flip(lab: Any, lba: int, byte: int = 80) -> None:
    strip, within = divmod(lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + byte] ^= 1


def test_damage_of_every_kind_when_repaired_is_gone_and_only_what_was_lost_is(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    flip(lab, store.namespace.slot_slba(int(store.namespace.entries()["slot_index"][3])))
    lab.members[1].data[4096 + 80] ^= 1
    # A copy of the record that is not the newest: a loss of the newest is refused rather than guessed.
    record = lab.volume.namespace("kv", deadline=Deadline.after(30)).record
    flip(lab, lab.volume.directory.slba_of(0, (record.sequence + 1) % 2))
    before = check_volume(lab.members)
    assert len(before.all_findings) == 3 and not any(each.is_repaired for each in before.all_findings)
    repaired = check_volume(lab.members, repair=True)
    assert len(repaired.all_findings) == 3 and all(each.is_repaired for each in repaired.all_findings)
    after = check_volume(lab.members)
    assert after.is_ok, after
    assert after.namespaces[0].pages == after.namespaces[0].good_pages == 19
    assert lab.reopen().contains(keys).sum() == 19


def test_damaged_table_block_when_repaired_is_empty_and_whole(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(5)
    store.put(keys, pages)
    store.close()
    flip(lab, store.namespace.table_slba)
    (finding,) = check_volume(lab.members, repair=True).all_findings
    assert finding.is_repaired and finding.lost_pages_max == 63
    after = check_volume(lab.members)
    assert after.is_ok and after.namespaces[0].pages == 0
    again = lab.reopen()
    assert again.put(keys, pages).stored_count == 5


def test_namespace_in_use_when_repair_is_asked_for_is_refused_before_anything_is_written(lab: Any) -> None:
    lab.store()
    lab.members[1].data[4096 + 80] ^= 1  # a superblock copy, which repair would write again
    before = [member.data.copy() for member in lab.members]
    with pytest.raises(UsageError, match=r"^v#kv: is owned by process \d+ of this host; stop it first$"):
        check_volume(lab.members, repair=True)
    assert all(np.array_equal(m.data, old) for m, old in zip(lab.members, before, strict=True))


def test_check_when_started_at_a_slot_reads_the_rest(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    report = check_volume(lab.members, start_at=("kv", 15))
    assert (report.namespaces[0].good_pages, report.namespaces[0].skipped_pages) == (5, 15)
    last = store.namespace.slot_count - 1
    with pytest.raises(UsageError, match=f"^start: slot: expected 0 to {last}, got 99999$"):
        check_volume(lab.members, start_at=("kv", 99999))
    with pytest.raises(UsageError, match="start: namespace: expected one of kv, got 'other'"):
        check_volume(lab.members, start_at=("other", 0))


def test_check_when_limited_takes_its_time(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    started_ns = SYSTEM_CLOCK.monotonic_ns()
    check_volume(lab.members, bytes_per_s=10 * pages.nbytes)
    assert SYSTEM_CLOCK.monotonic_ns() - started_ns >= 100_000_000
    with pytest.raises(UsageError, match="bytes_per_s: expected at least 1, got 0"):
        check_volume(lab.members, bytes_per_s=0)


def test_check_that_is_interrupted_has_what_was_found_and_says_where_to_go_on(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    flip(lab, store.namespace.slot_slba(int(store.namespace.entries()["slot_index"][3])))
    seen: list[CheckProgress] = []
    for repair in (False, True):
        report = CheckReport()

        def stop(now: CheckProgress) -> None:
            seen.append(now)
            if now.checked_pages:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            check_volume(lab.members, progress=stop, repair=repair, report=report)
        assert report.volume == "v" and report.namespaces[0].bad_pages == 1
        # Nothing counts as repaired before the owner has closed in order.
        assert [each.is_repaired for each in report.all_findings] == [False]
    assert [each.next_slot for each in seen] == [0, 20, 0, 0]


def test_pause_of_a_limited_check_comes_after_it_said_how_far_it_is(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    said = threading.Event()

    def note(now: CheckProgress) -> None:
        if now.checked_pages:
            said.set()
            raise KeyboardInterrupt  # else it pauses for a day

    with pytest.raises(KeyboardInterrupt):
        check_volume(lab.members, progress=note, bytes_per_s=max(1, pages.nbytes // 86400))
    assert said.is_set()


def test_namespaces_before_the_start_when_skipped_are_named(lab: Any) -> None:
    lab.volume.create_namespace("later", lab.geometry, quota_pages=4, deadline=Deadline.after(60))
    report = check_volume(lab.members, start_at=("later", 0))
    assert report.skipped_namespaces == ["kv"] and [each.name for each in report.namespaces] == ["later"]
