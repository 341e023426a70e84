"""``recreate_volume``: after the loss of a member the same KV namespaces, empty, and strangers to all that was."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.check import check_volume
from kvdev.store.lock import LockHeldError
from kvdev.store.page_store import PageStore
from kvdev.store.recreate import RecreateReport, recreate_volume
from kvdev.store.volume import Volume
from kvdev_tools.main import run

MIB = 1 << 20
SMALL = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=16)


def soon() -> Deadline:
    return Deadline.after(60)


def fresh(name: str, size_bytes: int = 2 * MIB, **options: Any) -> MemoryDevice:
    return MemoryDevice(size_bytes=size_bytes, name=name, **options)


def recreate(members: list[MemoryDevice], *replaced: str, **options: Any) -> RecreateReport:
    return recreate_volume(members, replaced=replaced, deadline=soon(), **options)


def filled(lab: Any) -> tuple[Any, Any]:
    """Three namespaces of different kinds; pages in two of them, flushed."""
    lab.volume.create_namespace(
        "fifo", SMALL, quota_pages=20, eviction_policy="fifo", ttl_s=600, deadline=soon()
    )
    lab.volume.create_namespace("small", SMALL, quota_pages=3, eviction_policy="none", deadline=soon())
    keys, pages = lab.batch(20)
    store = lab.store()
    store.put(keys, pages)
    store.close()
    small = PageStore(lab.volume.open_namespace("small", deadline=soon()))
    small.put(keys[:3], pages[:3, : SMALL.page_size_bytes].copy())
    small.close()
    return keys, pages


def facts(volume: Volume) -> list[tuple[Any, ...]]:
    return [
        (
            info.name,
            info.geometry,
            info.quota_pages,
            info.slot_count,
            info.eviction_policy,
            info.ttl_s,
            info.record.extent_slba,
            info.extent_bytes,
        )
        for info in volume.namespaces(deadline=soon())
    ]


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1], [1, 2]])
def test_volume_made_anew_has_the_same_namespaces_and_none_of_the_pages(lab: Any, lost: list[int]) -> None:
    keys, pages = filled(lab)
    before, uuids = (
        facts(lab.volume),
        {info.uuid for info in lab.volume.namespaces(deadline=soon())},
    )
    newcomers = {index: fresh(f"n{index}", (2 + index) * MIB) for index in lost}
    members = [newcomers.get(index, member) for index, member in enumerate(lab.members)]
    names = [f"mem:n{index}" for index in lost]
    report = recreate(members[::-1], *names)
    if lost == [
        0,
        1,
    ]:  # both superblock copies, and both of every record: it can only say that it cannot tell
        assert report.namespaces == () and {0, 1, 2} <= set(report.lost_places)
        assert report.volume.size_bytes == lab.volume.size_bytes
        assert check_volume(members).is_ok
        return
    assert not {0, 1, 2} & set(report.lost_places)
    assert report.former_uuid == lab.volume.uuid != report.volume.uuid
    assert report.lost_members == tuple(lost) and report.namespaces == ("fifo", "kv", "small")
    volume = Volume.open(members, deadline=soon())
    assert facts(volume) == before == facts(report.volume)
    assert not uuids & {info.uuid for info in volume.namespaces(deadline=soon())}
    assert volume.name == "v"
    assert check_volume(members).is_ok
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    assert not store.contains(keys).any()
    assert store.put(keys, pages).stored_count == 20
    out = lab.room(20)
    assert store.get(keys, out).hit_count == 20 and np.array_equal(out, pages)
    store.close()
    # The lost member comes back: it is named, and nothing is opened with it.
    for index in lost:
        back = list(members)
        back[index] = lab.members[index]
        with pytest.raises(UsageError, match=rf"mem:m{index}: .*made anew.* it was lost meanwhile"):
            Volume.open(back, deadline=soon())


def test_volume_made_anew_twice_goes_on_from_the_second(lab: Any) -> None:
    filled(lab)
    before = facts(lab.volume)
    first = [fresh("n0"), *lab.members[1:]]
    recreate(first, "mem:n0")
    second = [first[0], fresh("n1"), first[2]]
    report = recreate(second, "mem:n1")
    assert facts(Volume.open(second, deadline=soon())) == before
    assert report.former_uuid != lab.volume.uuid


def test_volume_that_had_grown_when_made_anew_keeps_its_size(lab: Any) -> None:
    from tests.unit.store.test_grow import enlarged

    larger = [enlarged(member, 4 * MIB) for member in lab.members]
    volume = Volume.open(larger, deadline=soon())
    volume.grow(deadline=soon())
    volume.create_namespace("far", SMALL, quota_pages=2000, deadline=soon())
    members = [larger[0], larger[1], fresh("n2", 4 * MIB)]
    with pytest.raises(UsageError, match=r"mem:n9: size: expected at least 1024 blocks for member 2"):
        recreate([larger[0], larger[1], fresh("n9", 3 * MIB)], "mem:n9")
    report = recreate(members, "mem:n2")
    assert report.volume.size_bytes == volume.size_bytes
    assert report.namespaces == ("far", "kv")


def test_geometry_that_was_on_the_lost_member_alone_is_named_and_can_be_left_out(lab: Any) -> None:
    """As of volumes that were made before the directory had copies of it."""
    filled(lab)
    for info in lab.volume.namespaces(deadline=soon()):
        for copy in range(2):
            slba = lab.volume.directory.slba_of(info.record.record_index, copy)
            block = lab.volume.io.read(slba, 1, soon())
            block[512:] = 0
            lab.volume.io.write(slba, block, soon())
    assert [info.geometry for info in lab.volume.namespaces(deadline=soon())] == [SMALL, lab.geometry, SMALL]
    lost = {info.record.geometry_slba // 4 % 3: info.name for info in lab.volume.namespaces(deadline=soon())}
    index, name = next(iter(lost.items()))
    members = [fresh("n") if place == index else member for place, member in enumerate(lab.members)]
    before = [member.data.copy() for member in members]
    with pytest.raises(CorruptionError, match=rf"v#{name}: geometry at LBA .*leave '{name}' out with --drop"):
        recreate(members, "mem:n")
    with pytest.raises(UsageError, match="drop: 'zz': expected one of"):
        recreate(members, "mem:n", drop=frozenset({"zz"}))
    assert all(np.array_equal(m.data, old) for m, old in zip(members, before, strict=True))
    dropped = frozenset(
        info.name
        for info in lab.volume.namespaces(deadline=soon())
        if info.record.geometry_slba // 4 % 3 == index
    )
    report = recreate(members, "mem:n", drop=dropped)
    assert set(report.dropped) == dropped
    assert {*report.namespaces, *report.dropped} == {"fifo", "kv", "small"}


def test_owner_that_has_not_given_up_is_named_and_nothing_is_written(lab: Any) -> None:
    lab.store()
    members = [lab.members[0], fresh("n"), lab.members[2]]
    before = [member.data.copy() for member in members]
    with pytest.raises(LockHeldError, match=r"v#kv: is owned by process \d+ of this host; stop it first"):
        recreate(members, "mem:n")
    assert all(np.array_equal(m.data, old) for m, old in zip(members, before, strict=True))
    lab.stores[0].namespace.abandon()
    assert recreate(members, "mem:n").namespaces == ("kv",)


def test_members_that_make_no_volume_are_refused_by_name(lab: Any) -> None:
    one, two, three = lab.members
    stranger = [fresh(f"s{index}") for index in range(2)]
    Volume.create(stranger, name="other", strip_size_bytes=16384, deadline=soon())
    cases: list[tuple[list[MemoryDevice], tuple[str, ...], dict[str, Any], str]] = [
        ([one, two, three], (), {}, r"volume 'v': replace: expected one device .* of 3 \(none\), got 0"),
        ([one, two, three, fresh("n")], ("mem:n",), {}, r"replace: expected .*\(none\), got 1"),
        ([one, fresh("n")], ("mem:n",), {}, r"volume 'v': replace: expected .* of 3 \(1, 2\), got 1"),
        ([one, two], (), {}, r"of 3 \(2\), got 0"),
        ([fresh("n")], ("mem:n",), {}, "replace: expected at least one member that is left"),
        ([one, two, fresh("n")], ("mem:zz",), {}, "replace: mem:zz: expected one of the members"),
        ([one, two, stranger[0]], ("mem:s0",), {}, r"mem:s0: holds a kvdev volume label .*--destroy"),
        ([one, stranger[1], fresh("n")], ("mem:n",), {}, r"mem:s1: belongs to volume 'other'"),
        ([one, two, three], ("mem:m2",), {}, r"mem:m2: replace: is a member of volume 'v', which is whole"),
        (
            [one, two, fresh("n")],
            ("mem:n",),
            {"destroy": frozenset({"mem:m0"})},
            "destroy: mem:m0: expected one",
        ),
        ([one, two, fresh("n", MIB)], ("mem:n",), {}, r"mem:n: size: expected at least 512 blocks .*got 256"),
        ([one, two, fresh("n", block_size_bytes=512)], ("mem:n",), {}, "mem:n: block size: expected 4096"),
    ]
    everything = [*lab.members, *stranger]
    before = [member.data.copy() for member in everything]
    for members, replaced, options, text in cases:
        with pytest.raises(UsageError, match=text):
            recreate(members, *replaced, **options)
    assert all(np.array_equal(m.data, old) for m, old in zip(everything, before, strict=True))
    assert recreate([one, two, stranger[0]], "mem:s0", destroy=frozenset({"mem:s0"})).namespaces == ("kv",)
    # Called again by mistake, it destroys nothing.
    with pytest.raises(UsageError, match="mem:s0: replace: is a member of volume 'v', which is whole"):
        recreate([one, two, stranger[0]], "mem:s0")


def test_store_and_readers_of_the_volume_that_was_never_find_a_page_of_the_new_one(lab: Any) -> None:
    keys, pages = filled(lab)
    reader = PageStore(lab.volume.open_namespace("kv", mode="reader", deadline=soon()))
    follower = PageStore(lab.volume.open_namespace("kv", mode="follower", deadline=soon()))
    members = [lab.members[0], lab.members[1], fresh("n")]
    volume = recreate(members, "mem:n").volume
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    store.put(keys, pages[::-1].copy())
    store.flush()
    out = lab.room(20)
    for old in (reader, follower):
        with contextlib.suppress(CorruptionError):  # a follower may look at the record by itself meanwhile
            result = old.get(keys, out)
            hits = np.flatnonzero(result.status == 1)
            assert all(np.array_equal(out[hit], pages[hit]) for hit in hits)
    with pytest.raises(CorruptionError, match="v#kv: was deleted meanwhile; open the volume anew"):
        follower.namespace.refresh(deadline=soon())
    with pytest.raises(UsageError, match="was made anew meanwhile"):
        lab.volume.create_namespace("late", SMALL, quota_pages=1, deadline=soon())
    store.close()


def test_command_replaces_a_member_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"m{index}" for index in range(3)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(8 * MIB)
    uris = [f"file:{path}" for path in paths]
    assert run(["volume", "create", f"vol:{uris[0]},{uris[1]}", "--name", "pool"]) == 0
    tiny = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
    assert run(["namespace", "create", f"vol:{uris[0]},{uris[1]}#kv", *tiny, "--quota-pages", "50"]) == 0
    capsys.readouterr()
    left = f"vol:{uris[0]},{uris[2]}"
    assert run(["volume", "show", left]) == 2
    assert run(["volume", "recreate", left, "--replace", uris[2], "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["replaced_members"] == [1] and found["dropped"] == found["lost_records"] == []
    assert [(each["name"], each["quota_pages"]) for each in found["namespaces"]] == [("kv", 50)]
    assert run(["volume", "check", left]) == 0
    assert run(["volume", "show", f"vol:{uris[0]},{uris[1]}"]) == 2
    assert "it was lost meanwhile" in capsys.readouterr().err
