"""Volumes: made whole or not at all, found by label, refused with the exact reason (scenario S-34)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.device import DeviceIdentity
from kvdev.block.file import FileDevice
from kvdev.block.memory import MemoryDevice
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, CorruptionError, UnsupportedError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.io import OPCODE_WRITE
from kvdev.store.lock import DevicesLock, LockHeldError, OwnerLock, device_key
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

MIB = 1 << 20
GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)


def soon() -> Deadline:
    return Deadline.after(30)


def devices(count: int, size: int = 2 * MIB, prefix: str = "d", block: int = 4096) -> list[MemoryDevice]:
    return [
        MemoryDevice(
            size_bytes=size,
            name=f"{prefix}{index}",
            block_size_bytes=block,
            identity=DeviceIdentity(nguid=f"{prefix}{index}".encode().ljust(16, b"\1")),
        )
        for index in range(count)
    ]


def create(members: Any, name: str = "v", **options: Any) -> Volume:
    return Volume.create(members, name=name, deadline=soon(), **{"strip_size_bytes": 16384, **options})


def copy_of(
    device: MemoryDevice, *, name: str | None = None, size: int | None = None, **changes: Any
) -> MemoryDevice:
    """The same bytes under another address, as far as asked for with other properties."""
    data = np.zeros(size or device.data.nbytes, dtype=np.uint8)
    data[: device.data.nbytes] = device.data[: data.nbytes]
    return MemoryDevice(
        size_bytes=data.nbytes,
        name=name or device.uri[4:],
        data=data,
        **{"block_size_bytes": device.block_size_bytes, "identity": device.identity, **changes},
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("block", [512, 4096])
def test_volume_when_reopened_in_any_order_is_the_same(count: int, block: int) -> None:
    members = devices(count, block=block)
    volume = create(members)
    again = Volume.open(members[::-1], deadline=soon())
    assert again.members == members
    assert (again.uuid, again.name, again.superblock) == (volume.uuid, "v", volume.superblock)
    assert again.size_bytes == volume.size_bytes > 0


def test_metadata_when_placed_lies_as_documented() -> None:
    members = devices(3)
    volume = create(members)
    for member in members:
        assert bytes(member.data[:8]) == b"KDEVVLBL"
    assert bytes(members[0].data[4096:4104]) == b"KDEVVSBK"
    assert bytes(members[1].data[4096:4104]) == b"KDEVVSBK"
    assert bytes(members[2].data[4096:4104]) == bytes(8)
    first, second = volume.superblock.directory_slba
    strip = 16384 // 4096
    assert first == 3 * strip
    assert (first // strip) % 3 != (second // strip) % 3
    single = devices(1)
    create(single)
    assert bytes(single[0].data[4096:4104]) == bytes(single[0].data[8192:8200]) == b"KDEVVSBK"


def test_missing_member_when_opened_is_named() -> None:
    members = devices(4)
    create(members)
    with pytest.raises(UsageError, match=r"volume 'v': member 2 of 4 is missing$"):
        Volume.open([members[0], members[1], members[3]], deadline=soon())
    with pytest.raises(UsageError, match=r"member 1 of 4 is missing, and 1 more"):
        Volume.open([members[0], members[3]], deadline=soon())
    with pytest.raises(
        UsageError, match=r"mem:d3: is member 3 of 4 of volume 'v': member 0 is missing, and 2"
    ):
        Volume.open([members[3]], deadline=soon())


def test_duplicated_member_when_opened_is_named() -> None:
    members = devices(2)
    create(members)
    copy = copy_of(members[1], name="copy", identity=DeviceIdentity())
    with pytest.raises(UsageError, match=r"mem:copy: is member 1 of volume 'v', and so is mem:d1"):
        Volume.open([*members, copy], deadline=soon())
    with pytest.raises(UsageError, match="mem:d1 is named twice"):
        Volume.open([*members, members[1]], deadline=soon())
    with pytest.raises(UsageError, match="mem:other and mem:d1 are the same device"):
        Volume.open([*members, copy_of(members[1], name="other")], deadline=soon())


def test_foreign_member_when_opened_is_named() -> None:
    members, others = devices(3), devices(3, prefix="x")
    create(members)
    create(others, name="w")
    with pytest.raises(UsageError, match=r"mem:x1: belongs to volume 'w' \([0-9a-f]{32}\), expected 'v'"):
        Volume.open([members[0], others[1], members[2]], deadline=soon())
    with pytest.raises(
        CorruptionError, match=r"mem:blank: label: magic: .*it is no member of a kvdev volume"
    ):
        Volume.open([members[0], MemoryDevice(size_bytes=MIB, name="blank")], deadline=soon())


def test_older_state_of_a_member_when_opened_is_named() -> None:
    from dataclasses import replace

    from kvdev.store.label import build_label, parse_label

    members = devices(2)
    create(members)
    label = parse_label(bytes(members[0].data[:4096]), what="m")
    members[0].data[:4096] = np.frombuffer(build_label(replace(label, sequence=2)), dtype=np.uint8)
    with pytest.raises(UsageError, match=r"mem:d1: label sequence: expected 2, got 1: it is an older state"):
        Volume.open(members, deadline=soon())


def test_shrunk_member_when_opened_is_named_and_a_grown_one_is_fine() -> None:
    members = devices(2)
    create(members)
    with pytest.raises(
        UsageError, match=r"mem:d1: member 1 .*size: expected 512 blocks, got 508: it was shrunk"
    ):
        Volume.open([members[0], copy_of(members[1], size=508 * 4096)], deadline=soon())
    grown = Volume.open([members[0], copy_of(members[1], size=4 * MIB)], deadline=soon())
    assert grown.superblock.row_count == 128


def test_replaced_member_when_opened_is_named() -> None:
    members = devices(2)
    create(members)
    other = copy_of(members[0], identity=DeviceIdentity(nguid=b"\7" * 16))
    with pytest.raises(
        UsageError, match=r"mem:d0: member 0 .*NGUID: expected .*: the namespace was replaced"
    ):
        Volume.open([other, members[1]], deadline=soon())


def test_differently_formatted_member_when_opened_is_named() -> None:
    members = devices(2)
    create(members)
    other = copy_of(members[1], block_size_bytes=512)
    with pytest.raises(UsageError, match=r"mem:d1: member 1 .*block size: expected 4096, got 512"):
        Volume.open([members[0], other], deadline=soon())


def test_damaged_label_when_opened_is_named() -> None:
    members = devices(2)
    create(members)
    members[1].data[100] ^= 1
    with pytest.raises(CorruptionError, match=r"mem:d1: label: checksum: the structure is damaged"):
        Volume.open(members, deadline=soon())


def test_label_of_a_later_version_when_opened_says_so() -> None:
    from kvdev.native.index import seal

    members = devices(1)
    create(members)
    members[0].data[8] = 9
    seal(members[0].data[:4096], 4096)
    with pytest.raises(CorruptionError, match=r"label: version: expected 1, got 9"):
        Volume.open(members, deadline=soon())


@pytest.mark.parametrize("lost", [0, 1])
def test_one_superblock_copy_when_lost_is_replaced_by_the_other(lost: int) -> None:
    members = devices(2)
    volume = create(members)
    members[lost].data[4096 + 70] ^= 1
    assert Volume.open(members, deadline=soon()).uuid == volume.uuid
    members[1 - lost].data[4096 + 70] ^= 1
    with pytest.raises(
        CorruptionError, match=r"superblock copy 0 at LBA 1 \(LBA 1 of mem:d0\): checksum.*--destroy"
    ):
        Volume.open(members, deadline=soon())


def test_create_when_cut_at_any_write_leaves_no_usable_half() -> None:
    """Every prefix of its writes opens as unfinished, and can be created again when named."""
    for limit in range(200):
        members = devices(2)
        left = [limit]

        def observer(opcode: int, slba: int, payload: object, left: list[int] = left) -> tuple[int, int]:
            if opcode == OPCODE_WRITE:
                left[0] -= 1
            return (-5 if left[0] < 0 else 0, 0)

        for member in members:
            member.observer = observer
        try:
            create(members)
        except OSError:
            pass
        else:
            break
        for member in members:
            member.observer = None
        try:
            Volume.open(members, deadline=soon())
        except CorruptionError:
            # Nothing on it yet, or a label that create recognises.
            create(members, destroy=frozenset(member.uri for member in members))
        else:
            assert limit >= 5  # all labels and one superblock copy: whole but for the second copy
    assert 5 < limit < 20


def test_members_that_cannot_be_are_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="members: expected at least one device, got none"):
        create([])
    with pytest.raises(UsageError, match="expected at most 64 devices, got 65"):
        create(devices(65))
    odd = devices(2)
    odd[1].metadata_size_bytes = 8
    with pytest.raises(UnsupportedError, match="mem:d1: metadata: expected a namespace without metadata"):
        create(odd)
    with pytest.raises(UsageError, match="mem:x0: block size: expected 4096 as mem:d0, got 512"):
        create([*devices(1), *devices(1, prefix="x", block=512)])
    with pytest.raises(UnsupportedError, match="block size: expected at most 4096, got 8192"):
        create(devices(1, block=8192))
    for strip in (1000, 8192, 24576, 8 * MIB):
        with pytest.raises(UsageError, match=f"strip size: .* got {strip}"):
            create(devices(2), strip_size_bytes=strip)
    with pytest.raises(UsageError, match=r"size: expected at most 4194304 bytes .*got 4194305"):
        create(devices(2), size_bytes=4 * MIB + 1)
    with pytest.raises(UsageError, match="use larger members"):
        create(devices(2, size=128 * 1024))
    for name in ("", "a\nb", "x" * 65):
        with pytest.raises(UsageError, match="volume name"):
            create(devices(1), name=name)
    read_only = devices(1)
    read_only[0].is_read_only = True
    with pytest.raises(UsageError, match="mem:d0: is read-only"):
        create(read_only)


def test_refused_create_when_one_member_is_taken_writes_to_none() -> None:
    members = devices(3)
    members[2].data[0x438:0x43A] = (0x53, 0xEF)
    before = [member.data.copy() for member in members]
    with pytest.raises(UsageError, match=r"mem:d2: holds a ext2/3/4 file system at byte 1080; .*--destroy"):
        create(members)
    with pytest.raises(UsageError, match=r"mem:d2: holds a ext"):
        create(members, destroy=frozenset({"mem:d1"}))
    with pytest.raises(UsageError, match=r"destroy: mem:zz: expected one of the members"):
        create(members, destroy=frozenset({"mem:zz"}))
    assert all(np.array_equal(member.data, old) for member, old in zip(members, before, strict=True))
    create(members, destroy=frozenset({"mem:d2"}))
    assert not members[2].data[0x438:0x43A].any()
    with pytest.raises(UsageError, match=r"mem:d0: holds a kvdev volume label of volume 'v' at byte 0"):
        create(members, name="w")


def through_one_device(members: list[MemoryDevice], strip: int = 16384) -> MemoryDevice:
    """What a RAID0 bdev over the members shows: the stripe's content as one plain device."""
    from kvdev.block.device import read_blocks

    stripe = StripeDevice(members, strip_size_bytes=strip)
    data = read_blocks(stripe, 0, stripe.block_count, soon())
    return MemoryDevice(size_bytes=data.nbytes, name="raid", data=data)


def test_volume_when_opened_through_one_raid_device_has_the_same_pages(rng: np.random.Generator) -> None:
    members = devices(3)
    volume = create(members)
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    keys = rng.integers(0, 256, (8, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (8, 8192), dtype=np.uint8)
    store.put(keys, pages)
    store.close()
    raid = through_one_device(members)
    again = Volume.open([raid], deadline=soon())
    store = PageStore(again.open_namespace("kv", deadline=soon()))
    out = np.zeros_like(pages)
    assert store.get(keys, out).hit_count == 8
    assert np.array_equal(out, pages)
    store.put(keys[:1], pages[1:2])
    store.close()
    stripe = StripeDevice(members, strip_size_bytes=16384)
    from kvdev.block.device import write_blocks

    write_blocks(stripe, 0, raid.data, soon())
    store = PageStore(Volume.open(members[::-1], deadline=soon()).open_namespace("kv", deadline=soon()))
    assert store.get(keys, out).hit_count == 8
    assert np.array_equal(out[0], pages[1])
    store.close()


def test_raid_device_with_its_members_in_another_order_is_refused() -> None:
    members = devices(3)
    create(members)
    with pytest.raises(UsageError, match=r"mem:raid: strip 0: expected member 0, got member 1"):
        Volume.open([through_one_device([members[1], members[0], members[2]])], deadline=soon())
    with pytest.raises(UsageError, match=r"mem:raid: strip 1: expected member 1, got member 2"):
        Volume.open([through_one_device([members[0], members[2], members[1]])], deadline=soon())
    raid = through_one_device(members)
    smaller = MemoryDevice(size_bytes=3 * MIB, name="raid", data=raid.data[: 3 * MIB])
    with pytest.raises(UsageError, match=r"mem:raid: size: expected at least 1536 blocks, got 768"):
        Volume.open([smaller], deadline=soon())


def test_namespaces_when_made_share_the_volume_and_give_it_back() -> None:
    volume = create(devices(3))
    free = volume.free_extents(soon())
    infos = [volume.create_namespace(f"n{i}", GEOMETRY, quota_pages=8, deadline=soon()) for i in range(3)]
    assert [info.name for info in volume.namespaces(deadline=soon())] == ["n0", "n1", "n2"]
    assert infos[0].geometry == GEOMETRY
    ends = sorted((info.record.extent_slba, info.record.extent_end) for info in infos)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    volume.delete_namespace("n1", deadline=soon())
    assert [info.name for info in volume.namespaces(deadline=soon())] == ["n0", "n2"]
    again = volume.create_namespace("n3", GEOMETRY, quota_pages=8, deadline=soon())
    assert again.record.extent_slba == infos[1].record.extent_slba
    for name in ("n0", "n2", "n3"):
        volume.delete_namespace(name, deadline=soon())
    assert volume.free_extents(soon()) == free


def test_deleted_namespace_when_its_place_is_used_again_shows_none_of_its_pages(
    rng: np.random.Generator,
) -> None:
    volume = create(devices(2))
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    keys = rng.integers(0, 256, (8, 32), dtype=np.uint8)
    store.put(keys, rng.integers(0, 256, (8, 8192), dtype=np.uint8))
    with pytest.raises(UsageError, match=r"v#kv: is owned by process \d+ of this host"):
        volume.delete_namespace("kv", deadline=soon())
    store.close()
    volume.delete_namespace("kv", deadline=soon())
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    assert not store.contains(keys).any()
    store.close()


def test_namespace_requests_that_cannot_be_are_refused_with_the_arithmetic() -> None:
    volume = create(devices(2))
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    with pytest.raises(UsageError, match="namespace 'kv': exists already"):
        volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    with pytest.raises(UsageError, match="quota: expected at least one page"):
        volume.create_namespace("b", GEOMETRY, quota_pages=0, deadline=soon())
    with pytest.raises(UsageError, match="quota_bytes: expected at least one page of 8 KiB, got 8191"):
        volume.create_namespace("b", GEOMETRY, quota_bytes=8191, deadline=soon())
    with pytest.raises(UsageError, match="expected one of quota_bytes and quota_pages"):
        volume.create_namespace("b", GEOMETRY, deadline=soon())
    with pytest.raises(CapacityError, match=r"expected .* MiB \(.*slots of 8 KiB.* of it in one piece"):
        volume.create_namespace("b", GEOMETRY, quota_pages=10_000, deadline=soon())
    with pytest.raises(UsageError, match="namespace 'zz': expected one of kv"):
        volume.open_namespace("zz", deadline=soon())
    with pytest.raises(UsageError, match="namespace name"):
        volume.create_namespace("", GEOMETRY, quota_pages=1, deadline=soon())
    other = Geometry(model_id="unit", layer_count=2, kv_head_count=1, head_size=32, tokens_per_page=64)
    with pytest.raises(UsageError, match="v#kv: geometry: layer_count: expected 2, the namespace has 1"):
        volume.open_namespace("kv", geometry=other, deadline=soon())
    assert len(volume.namespaces(deadline=soon())) == 1


def test_quota_that_fits_exactly_when_asked_for_is_granted() -> None:
    volume = create(devices(2))
    pages = volume.pages_for(GEOMETRY, volume.size_bytes)
    assert volume.plan(GEOMETRY, quota_pages=pages).total_bytes <= volume.size_bytes
    assert volume.plan(GEOMETRY, quota_pages=pages + 1).total_bytes > volume.size_bytes
    volume.create_namespace("kv", GEOMETRY, quota_pages=pages, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    assert store.namespace.quota_pages == pages
    store.close()


def test_volume_on_files_when_opened_twice_is_owned_once(tmp_path: Path) -> None:
    for index in range(2):
        with (tmp_path / f"m{index}").open("wb") as file:
            file.truncate(2 * MIB)

    def open_files() -> list[FileDevice]:
        return [FileDevice(tmp_path / f"m{index}") for index in range(2)]

    volume = create(open_files())
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    first = volume.open_namespace("kv", deadline=soon())
    again = Volume.open(open_files()[::-1], deadline=soon())
    with pytest.raises(UsageError, match=r"v#kv: is owned by process \d+ of this host"):
        again.open_namespace("kv", deadline=soon())
    reader = again.open_namespace("kv", mode="reader", deadline=soon())
    with pytest.raises(UsageError, match="open as reader"):
        reader.flush(deadline=soon())
    first.close()
    again.open_namespace("kv", deadline=soon()).close()


def test_owner_of_another_user_when_it_holds_the_files_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lock folders differ between users, so the member files are locked as well."""
    path = tmp_path / "m"
    with path.open("wb") as file:
        file.truncate(2 * MIB)
    volume = create([FileDevice(path)])
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    owner = volume.open_namespace("kv", deadline=soon())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match=r"v#kv: file:.*/m is locked by another process"):
        Volume.open([FileDevice(path)], deadline=soon()).open_namespace("kv", deadline=soon())
    owner.close()


# --- more than one process at work -------------------------------------------------------------


def files(folder: Path, count: int) -> list[FileDevice]:
    paths = [folder / f"m{index}" for index in range(count)]
    for path in paths:
        with path.open("ab") as file:
            file.truncate(2 * MIB)
    return [FileDevice(path) for path in paths]


def test_volume_over_one_in_use_when_made_is_refused_even_with_destroy(tmp_path: Path) -> None:
    volume = create(files(tmp_path, 2))
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    owner = volume.open_namespace("kv", deadline=soon())
    before = [(tmp_path / name).read_bytes() for name in ("m0", "m1")]
    again = files(tmp_path, 2)[::-1]
    with pytest.raises(LockHeldError, match="m1 is locked by another process"):
        create(again, destroy=frozenset(member.uri for member in again))
    assert [(tmp_path / name).read_bytes() for name in ("m0", "m1")] == before
    owner.close(deadline=soon())
    create(again, destroy=frozenset(member.uri for member in again))


def test_devices_by_identifier_when_in_use_are_not_given_to_another() -> None:
    """As namespaces of a target are: no file to lock, another URI on another path."""
    device = StripeDevice(devices(2), strip_size_bytes=16384, uri="tcp:one")
    same = StripeDevice(devices(2), strip_size_bytes=16384, uri="tcp:two")
    other = StripeDevice(devices(2, prefix="e"), strip_size_bytes=16384, uri="tcp:three")
    device.identity = same.identity = DeviceIdentity(nguid=b"7" * 16)
    first = OwnerLock("kv", "namespace-unit-1", members=[device])
    second = OwnerLock("other kv", "namespace-unit-2", members=[same])
    with pytest.raises(LockHeldError, match=r"tcp:two: is in use by process \d+ of this host"):
        DevicesLock([other, same], byte_count=1)
    DevicesLock([other], byte_count=1).release()
    first.release()
    second.release()
    alone = DevicesLock([same], byte_count=1)
    with pytest.raises(LockHeldError, match="tcp:one: is in use by"):
        OwnerLock("kv", "namespace-unit-1", members=[device])
    alone.release()


def test_volume_object_when_its_members_were_made_anew_changes_nothing() -> None:
    members = devices(2)
    volume = create(members, name="old")
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    create(members, name="new", destroy=frozenset(member.uri for member in members))
    before = [member.data.copy() for member in members]
    for act in (
        lambda: volume.create_namespace("more", GEOMETRY, quota_pages=8, deadline=soon()),
        lambda: volume.delete_namespace("kv", deadline=soon()),
    ):
        with pytest.raises(UsageError, match=r"expected volume 'old'.*got 'new'.*made anew"):
            act()
    assert all(np.array_equal(member.data, data) for member, data in zip(members, before, strict=True))


def test_namespace_deleted_and_made_again_between_look_and_lock_is_refused() -> None:
    members = devices(2)
    volume, other = create(members), Volume.open(members, deadline=soon())
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    stale = other.namespace("kv", deadline=soon())
    volume.delete_namespace("kv", deadline=soon())
    with pytest.raises(UsageError, match="deleted meanwhile"):
        other._check_still_there(stale.record, "v#kv", soon())
    volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
    with pytest.raises(UsageError, match="deleted meanwhile"):
        other._check_still_there(stale.record, "v#kv", soon())


def test_lock_file_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvdev" / "thing.lock").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"lock .*thing\.lock: Is a directory"):
        OwnerLock("thing", "thing")


def test_owner_that_was_dropped_without_close_holds_nothing(tmp_path: Path) -> None:
    for members in (devices(2), files(tmp_path, 2)):
        volume = create(members)
        volume.create_namespace("kv", GEOMETRY, quota_pages=8, deadline=soon())
        namespace = volume.open_namespace("kv", deadline=soon())
        del namespace
        gc.collect()
        volume.open_namespace("kv", deadline=soon()).close(deadline=soon())


def test_lock_released_after_its_device_was_closed_leaves_the_next_file_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with (tmp_path / name).open("ab") as file:
            file.truncate(2 * MIB)
    first = FileDevice(tmp_path / "a")
    late = OwnerLock("first", "unit-first", members=[first])
    number = first.fd
    first.close()
    second = FileDevice(tmp_path / "b")
    assert second.fd == number
    kept = OwnerLock("second", "unit-second", members=[second])
    late.release()
    with pytest.raises(LockHeldError):
        DevicesLock([FileDevice(tmp_path / "b")], byte_count=1)
    kept.release()


def test_lock_that_many_share_names_one_that_lives(tmp_path: Path) -> None:
    device = StripeDevice(devices(1), strip_size_bytes=16384, uri=f"tcp:{tmp_path}")
    code = (
        "import sys; from kvdev.store.lock import *; from kvdev.store.lock import _Locks; import fcntl;"
        "_Locks()._lock_file('x', sys.argv[1], kind=fcntl.F_RDLCK, verb='')"
    )
    subprocess.run([sys.executable, "-c", code, device_key(device)], check=True, timeout=60)
    shared = OwnerLock("thing", "unit-shared", members=[device])
    with pytest.raises(LockHeldError) as held:
        DevicesLock([device], byte_count=1)
    assert held.value.pid == os.getpid()
    shared.release()


@pytest.mark.parametrize("name", ["", "x" * 1000, "a\nb", None, 5, b"kv"])
def test_names_that_are_none_are_refused(name: Any) -> None:
    volume = create(devices(1))
    with pytest.raises(UsageError, match="namespace name: expected printable text"):
        volume.create_namespace(name, GEOMETRY, quota_pages=1, deadline=soon())


def test_mode_that_is_none_is_refused() -> None:
    volume = create(devices(1))
    volume.create_namespace("kv", GEOMETRY, quota_pages=1, deadline=soon())
    mode: Any = "writer"
    with pytest.raises(UsageError, match="mode: expected one of 'owner', 'reader', 'follower', got 'writer'"):
        volume.open_namespace("kv", mode=mode, deadline=soon())
