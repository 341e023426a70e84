"""``check_volume``: damage in, what it says and what was lost out; and it never writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdev.native.io import OPCODE_READ
from kvdev.store.check import CheckProgress, check_volume


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
    assert seen[-1] == CheckProgress("kv", 20, 20)
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
    assert f"slot {slot} at LBA {lba}: checksum: expected" in finding.what
    assert (report.namespaces[0].bad_pages, report.namespaces[0].good_pages) == (1, 19)

    strip, within = divmod(table_lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + 99] ^= 1
    report = check_volume(lab.members)
    assert f"table block 0 at LBA {table_lba}: damaged" in report.namespaces[0].findings[0].what
    assert report.namespaces[0].findings[0].lost_pages_max == 63
    assert report.namespaces[0].pages == 0


def test_lost_superblock_copy_and_record_copy_when_checked_are_named(lab: Any) -> None:
    lab.members[1].data[4096 + 80] ^= 1
    report = check_volume(lab.members)
    assert [finding.where for finding in report.findings] == ["superblock copy 1 at LBA 5"]
    lba = lab.volume.directory.slba_of(0, 1)
    strip, within = divmod(lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + 80] ^= 1
    report = check_volume(lab.members)
    assert f"record 0 copy 1 at LBA {lba}: checksum" in report.findings[1].what


def test_volume_that_does_not_open_when_checked_says_why_and_what_each_member_is(lab: Any) -> None:
    report = check_volume(lab.members[:2])
    assert "member 2 of 3 is missing" in report.findings[0].what
    assert len(report.findings) == 3
    assert "label intact: member 1 of 3 of volume 'v'" in report.findings[2].what


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
