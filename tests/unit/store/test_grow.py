"""``Volume.grow``: what members have got larger by, taken in; members that are too small, refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, CorruptionError, UsageError
from kvdev.store.check import check_volume
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

MIB = 1 << 20


def soon() -> Deadline:
    return Deadline.after(60)


def enlarged(member: MemoryDevice, size_bytes: int) -> MemoryDevice:
    """The same device with another size."""
    data = np.zeros(size_bytes, dtype=np.uint8)
    kept = min(size_bytes, member.data.nbytes)
    data[:kept] = member.data[:kept]
    return MemoryDevice(size_bytes=size_bytes, name=member.uri.removeprefix("mem:"), data=data)


def test_members_that_got_larger_when_grown_give_their_room(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    larger = [enlarged(member, (4 + index) * MIB) for index, member in enumerate(lab.members)]
    volume = Volume.open(larger[::-1], deadline=soon())
    size_bytes = volume.size_bytes
    assert volume.growable_bytes == 6 * MIB
    assert volume.grow(deadline=soon()) == 6 * MIB
    assert volume.size_bytes == size_bytes + 6 * MIB
    assert volume.growable_bytes == volume.grow(deadline=soon()) == 0
    again = Volume.open(larger, deadline=soon())
    assert again.superblock == volume.superblock and again.size_bytes == volume.size_bytes
    assert check_volume(larger).is_ok
    # The room is there: more than the volume had before fits, and the pages that were there are.
    again.create_namespace("more", lab.geometry, quota_bytes=size_bytes, deadline=soon())
    found = PageStore(again.open_namespace("kv", deadline=soon()))
    out = lab.room(20)
    assert found.get(keys, out).hit_count == 20 and np.array_equal(out, pages)
    found.close()


def test_open_namespaces_when_the_volume_is_grown_go_on(lab: Any) -> None:
    larger = [enlarged(member, 4 * MIB) for member in lab.members]
    volume = Volume.open(larger, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    keys, pages = lab.batch(10)
    assert Volume.open(larger, deadline=soon()).grow(deadline=soon()) == 6 * MIB
    assert store.put(keys, pages).stored_count == 10
    store.close()
    # This one does not know yet; under the lock it reads what there is, and makes nothing smaller.
    assert volume.grow(size_bytes=12 * MIB, deadline=soon()) == 6 * MIB
    assert Volume.open(larger, deadline=soon()).superblock.row_count == 256


def test_part_of_the_room_when_asked_for_is_taken(lab: Any) -> None:
    larger = [enlarged(member, 4 * MIB) for member in lab.members]
    volume = Volume.open(larger, deadline=soon())
    assert volume.grow(size_bytes=9 * MIB, deadline=soon()) == 3 * MIB
    with pytest.raises(
        UsageError, match=r"size: expected 9437184 bytes \(9 MiB\).* to 12582912 .*got 12582913"
    ):
        volume.grow(size_bytes=12 * MIB + 1, deadline=soon())
    with pytest.raises(UsageError, match=r"size: expected 9437184 .*got 9437183"):
        volume.grow(size_bytes=9 * MIB - 1, deadline=soon())
    with pytest.raises(CapacityError):
        volume.create_namespace("more", lab.geometry, quota_bytes=9 * MIB, deadline=soon())


def test_member_that_shrinks_after_the_volume_has_grown_is_named(lab: Any) -> None:
    larger = [enlarged(member, 4 * MIB) for member in lab.members]
    Volume.open(larger, deadline=soon()).grow(deadline=soon())
    larger[1] = enlarged(larger[1], 3 * MIB)  # more than its label says, less than the volume has
    with pytest.raises(
        UsageError,
        match=r"mem:m1: member 1 of volume 'v': size: expected 1024 blocks, got 768: it was shrunk",
    ):
        Volume.open(larger, deadline=soon())


@pytest.mark.parametrize("member_count", [1, 2])
def test_superblock_copies_when_one_is_older_or_lost_are_written_again(member_count: int) -> None:
    members = [MemoryDevice(size_bytes=2 * MIB, name=f"g{index}") for index in range(member_count)]
    Volume.create(members, name="g", strip_size_bytes=16384, deadline=soon())
    old = [member.data[:16384].copy() for member in members]
    larger = [enlarged(member, 4 * MIB) for member in members]
    Volume.open(larger, deadline=soon()).grow(deadline=soon())
    second, place = (0, slice(8192, 8704)) if member_count == 1 else (1, slice(4096, 4608))
    larger[second].data[place] = old[second][place]  # as a cut between the two copies leaves it
    again = Volume.open(larger, deadline=soon())
    assert again.superblock.row_count == 256
    (finding,) = check_volume(larger).findings
    assert "sequence: expected 2, got 1: it is an older state" in finding.what
    assert again.grow(deadline=soon()) == 0
    assert check_volume(larger).is_ok
    larger[0].data[4096 + 70] ^= 1
    (finding,) = check_volume(larger, repair=True).findings
    assert (
        finding.is_repaired
        and str(finding).startswith("superblock copy 0 at LBA 1")
        and ": checksum" in str(finding)
    )
    assert check_volume(larger).is_ok


def test_members_whose_labels_changed_places_are_refused() -> None:
    members = [MemoryDevice(size_bytes=2 * MIB, name=f"s{index}") for index in range(2)]
    Volume.create(members, name="s", strip_size_bytes=16384, deadline=soon())
    first = members[0].data[:4096].copy()
    members[0].data[:4096] = members[1].data[:4096]
    members[1].data[:4096] = first
    with pytest.raises(
        CorruptionError, match=r"superblock copy 0 at LBA 1 \(LBA 1 of mem:s1\): index: expected 0"
    ):
        Volume.open(members, deadline=soon())
