"""The owner's half and the data half apart; journal wrap, checkpoints, damage, readers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.index import SLOT_NONE
from kvdev.store.directory import Directory
from kvdev.store.lock import OwnerLock, boot_id, start_ticks
from kvdev.store.page_store import PageStore
from kvdev.store.plan import plan_namespace
from kvdev.store.superblock import build_record, parse_record
from kvdev.store.volume import Volume


def soon() -> Deadline:
    return Deadline.after(30)


def addresses(pages: Any) -> Any:
    return np.uint64(pages.ctypes.data) + np.arange(len(pages), dtype=np.uint64) * np.uint64(pages.shape[1])


def test_owner_and_data_halves_when_used_apart_do_the_same_as_the_store(lab: Any) -> None:
    namespace = lab.store().namespace
    keys, pages = lab.batch(5)
    grants = namespace.reserve(keys, deadline=soon())
    assert len(set(grants["generation"].tolist())) == 5
    assert not namespace.contains(keys).any()
    written = namespace.page_io.write(grants, addresses(pages), deadline=soon())
    namespace.commit(keys, grants, written.sums, members=written.members, deadline=soon())
    found = namespace.lookup(keys)
    assert np.array_equal(found["generation"], grants["generation"])
    out = lab.room(5)
    worker = Volume.open(lab.members, deadline=soon()).open_page_io("kv", deadline=soon())
    read = worker.read(found, addresses(out), deadline=soon())
    assert namespace.verify(keys, found, read.sums).all()
    assert not namespace.verify(np.roll(keys, 1, axis=0), found, read.sums).any()
    assert np.array_equal(out, pages)
    namespace.delete(keys[:1], deadline=soon())
    assert namespace.confirm(found).tolist() == [False, True, True, True, True]
    assert namespace.lookup(keys[:1])["slot_index"][0] == SLOT_NONE
    with pytest.raises(UsageError, match="grants: slot_index"):
        namespace.page_io.read(namespace.lookup(keys[:1]), addresses(out[:1]), deadline=soon())
    with pytest.raises(UsageError, match="expected one per grant"):
        namespace.page_io.read(found, addresses(out[:1]), deadline=soon())


def test_grants_given_back_unwritten_are_free_again(lab: Any) -> None:
    namespace = lab.store().namespace
    keys, _ = lab.batch(5)
    free = namespace.stat().index.free_count
    namespace.release(namespace.reserve(keys, deadline=soon()), deadline=soon())
    assert namespace.stat().index.free_count == free
    grants = namespace.reserve(keys, deadline=soon())
    namespace.release(grants, is_fate_unknown=True, deadline=soon())
    assert namespace.stat().index.quarantined_count == 5
    too_many, _ = lab.batch(namespace.batch_limit + 1)
    with pytest.raises(CapacityError, match="reserve: expected at most"):
        namespace.reserve(too_many, deadline=soon())


def test_slots_all_reserved_when_more_are_asked_for_says_so(lab: Any) -> None:
    namespace = lab.store().namespace
    for _ in range(namespace.stat().index.slot_count // 4):
        keys, _ = lab.batch(4)
        namespace.reserve(keys, deadline=soon())
    with pytest.raises(
        CapacityError, match=r"expected 4 free slots, got 0 of 36: 36 reserved, 0 quarantined"
    ):
        namespace.reserve(lab.batch(4)[0], deadline=soon())


def test_journal_when_it_wraps_many_times_loses_nothing(members: list[MemoryDevice], rng: Any) -> None:
    volume = Volume.create(members, name="v", strip_size_bytes=16384, deadline=soon())
    geometry = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
    volume.create_namespace("kv", geometry, quota_pages=16, journal_block_count=6, deadline=soon())
    model: dict[bytes, Any] = {}
    namespace = volume.open_namespace("kv", deadline=soon())
    for step in range(60):
        store = PageStore(namespace)
        keys = rng.integers(0, 24, (3, 32), dtype=np.uint8) * 0
        keys[:, 0] = rng.choice(24, size=3, replace=False)
        pages = rng.integers(0, 256, (3, 8192), dtype=np.uint8)
        store.put(keys, pages)
        model.update({key.tobytes(): page for key, page in zip(keys, pages, strict=True)})
        store.flush()
        if step % 7 == 6:
            namespace.abandon()
            namespace = volume.open_namespace("kv", deadline=soon())
            assert namespace.epoch == 2 + step // 7
    entries = namespace.entries()
    assert len(entries) == 16
    out = np.zeros((16, 8192), dtype=np.uint8)
    keys = np.ascontiguousarray(entries["key"])
    assert PageStore(namespace).get(keys, out).hit_count == 16
    assert all(np.array_equal(out[i], model[keys[i].tobytes()]) for i in range(16))
    assert namespace.stat().journal_used_blocks <= 5
    namespace.close()


def test_generations_when_reopened_never_repeat(lab: Any) -> None:
    seen: set[int] = set()
    for _ in range(4):
        store = lab.reopen()
        keys, pages = lab.batch(3)
        store.put(keys, pages)
        now = set(store.namespace.lookup(keys)["generation"].tolist())
        assert not now & seen
        assert min(now) > max(seen, default=0)
        seen |= now


def damage(lab: Any, lba: int, byte: int) -> None:
    strip, within = divmod(lba, 4)
    lab.members[strip % 3].data[(strip // 3 * 4 + within) * 4096 + byte] ^= 1


def test_damaged_table_block_when_opened_loses_its_pages_and_nothing_else(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.close()
    damage(lab, store.namespace.table_slba, 500)
    store = lab.reopen()
    assert store.namespace.open_report.damaged_table_blocks == (0,)
    assert not store.contains(keys).any()
    assert store.put(keys, pages).stored_count == 20
    store.close()
    store = lab.reopen()
    assert store.namespace.open_report.damaged_table_blocks == ()
    assert store.get(keys, lab.room(20)).hit_count == 20


def test_torn_journal_block_when_opened_ends_the_replay(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(9)
    for start in (0, 3, 6):
        store.put(keys[start : start + 3], pages[start : start + 3])
        store.flush()
    journal_slba = lab.volume.namespace("kv", deadline=soon()).record.journal_slba
    damage(lab, journal_slba + 1, 3000)
    store = lab.reopen()
    assert store.contains(keys).tolist() == [True] * 3 + [False] * 6
    store.put(keys[3:], pages[3:])
    store.flush()
    store = lab.reopen()
    assert store.get(keys, lab.room(9)).hit_count == 9


def test_lost_record_copy_when_the_journal_went_on_is_refused_not_believed(lab: Any) -> None:
    """The older copy's tail may have been overwritten: believing it could revive replaced pages."""
    store = lab.store()
    keys, pages = lab.batch(4)
    store.put(keys, pages)
    store.close()
    store = lab.reopen()
    store.put(keys[:1], pages[:1])
    store.flush()
    record = lab.volume.directory.read(0, soon()).record
    damage(lab, lab.volume.directory.slba_of(0, record.sequence % 2), 200)
    store.namespace.abandon()
    with pytest.raises(CorruptionError, match="are younger than the record's epoch 1"):
        lab.volume.open_namespace("kv", deadline=soon())


def test_both_record_copies_when_lost_are_named_and_block_new_namespaces(lab: Any) -> None:
    for copy in range(2):
        damage(lab, lab.volume.directory.slba_of(0, copy), 200)
    with pytest.raises(CorruptionError, match=r"record 0 copy 0 at LBA \d+ .*: checksum: .*check --repair"):
        lab.volume.namespaces(deadline=soon())
    with pytest.raises(CorruptionError):
        lab.volume.create_namespace("b", lab.geometry, quota_pages=1, deadline=soon())


def test_moved_table_block_when_opened_is_taken_where_it_is_younger(lab: Any) -> None:
    """A later version may move a block to the spare area rather than rewrite its place."""
    store = lab.store()
    keys, pages = lab.batch(5)
    store.put(keys, pages)
    store.close()
    info = lab.volume.namespace("kv", deadline=soon())
    spare = info.record.table_slba + info.record.table_block_count + 2
    block = lab.volume.io.read(info.record.table_slba, 1, soon())
    lab.volume.io.write(spare, block, soon())
    lab.volume.io.write(info.record.table_slba, bytes(4096), soon())
    store = lab.reopen()
    assert store.namespace.open_report.moved_block_count == 1
    assert store.namespace.open_report.damaged_table_blocks == ()
    assert store.get(keys, lab.room(5)).hit_count == 5


def test_geometry_on_media_when_damaged_everywhere_is_refused(lab: Any) -> None:
    record = lab.volume.namespace("kv", deadline=soon()).record
    damage(lab, record.geometry_slba, 20)
    lab.volume.open_namespace("kv", deadline=soon()).abandon()
    for copy in range(2):
        assert lab.volume.namespace("kv", deadline=soon()).geometry == lab.geometry
        damage(lab, lab.volume.directory.slba_of(record.record_index, copy), 512 + 20)
    with pytest.raises(
        CorruptionError, match=r"v#kv: geometry at LBA \d+ \(LBA \d+ of mem:m\d\): checksum: exp"
    ):
        lab.volume.open_namespace("kv", deadline=soon())


def test_record_when_built_and_parsed_is_equal(lab: Any) -> None:
    record = lab.volume.namespace("kv", deadline=soon()).record
    assert parse_record(build_record(record), what="r", volume_uuid=record.volume_uuid) == record
    with pytest.raises(CorruptionError, match="r: uuid: expected"):
        parse_record(build_record(record), what="r", volume_uuid=bytes(16))
    odd = replace(record, table_slba=record.extent_end)
    lab.volume.io.flush(lab.volume.directory.write(replace(odd, sequence=99), soon()), soon())
    with pytest.raises(CorruptionError, match="its extents contradict each other"):
        lab.volume.open_namespace("kv", deadline=soon())


def test_reader_when_the_owner_goes_on_sees_a_whole_table(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(10)
    store.put(keys[:5], pages[:5])
    store.flush()
    store.put(keys[5:], pages[5:])
    reader = PageStore(
        Volume.open(lab.members, deadline=soon()).open_namespace("kv", mode="reader", deadline=soon())
    )
    out = lab.room(10)
    assert reader.get(keys, out).hit_count == 5
    assert np.array_equal(out[:5], pages[:5])
    with pytest.raises(UsageError, match="v#kv: is open as reader"):
        reader.put(keys, pages)
    # The owner reuses a slot: the reader's stale entry proves wrong by its checksum.
    for _ in range(4):
        store.put(*lab.batch(lab.quota_pages))
        store.flush()
    got = reader.get(keys[:5], out[:5])
    assert got.hit_count == 0
    reader.close()


@pytest.mark.parametrize("block", [512, 4096])
def test_pages_that_end_within_a_block_touch_nothing_behind_them(block: int, rng: Any) -> None:
    queue = LocalQueue()
    members = [
        MemoryDevice(size_bytes=4 << 20, name=f"m{i}", block_size_bytes=block, queue=queue) for i in range(2)
    ]
    volume = Volume.create(members, name="v", strip_size_bytes=16384, deadline=soon())
    geometry = Geometry(model_id="odd", layer_count=3, kv_head_count=1, head_size=50, tokens_per_page=29)
    size = geometry.page_size_bytes
    assert size % 512
    volume.create_namespace("kv", geometry, quota_pages=40, deadline=soon())
    store = PageStore(volume.open_namespace("kv", deadline=soon()))
    keys = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (40, size), dtype=np.uint8)
    assert store.put(keys, pages).stored_count == 40
    out = np.full((40, size + 64), 0xAA, dtype=np.uint8)
    assert store.get(keys, out[:, :size]).hit_count == 40
    assert np.array_equal(out[:, :size], pages)
    assert (out[:, size:] == 0xAA).all()
    store.close()


@pytest.mark.parametrize("size", [1, 511, 512, 4095])
def test_page_smaller_than_a_block_is_stored_too(lab: Any, size: int, rng: Any) -> None:
    geometry = Geometry(
        model_id="tiny",
        layer_count=1,
        kv_head_count=1,
        head_size=size,
        dtype="int8",
        tokens_per_page=1,
        attention="mla",
    )
    lab.volume.create_namespace("tiny", geometry, quota_pages=4, deadline=soon())
    store = PageStore(lab.volume.open_namespace("tiny", deadline=soon()))
    keys = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (4, size), dtype=np.uint8)
    store.put(keys, pages)
    out = np.zeros_like(pages)
    assert store.get(keys, out).hit_count == 4
    assert np.array_equal(out, pages)
    store.close()


def test_bytes_per_member_when_summed_are_the_slots(lab: Any) -> None:
    store = lab.store()
    keys, pages = lab.batch(30)
    written = lab.volume.io.written_bytes.sum()
    store.put(keys, pages)
    assert store.namespace.member_bytes().sum() == 30 * 8192
    assert (store.namespace.member_bytes() > 0).all()
    assert lab.volume.io.written_bytes.sum() - written == 30 * 8192


def test_memory_per_page_when_counted_is_below_100_bytes() -> None:
    for block in (512, 4096):
        plan = plan_namespace(
            page_size_bytes=1 << 20, quota_pages=1_000_000, block_size_bytes=block, strip_size_bytes=131072
        )
        table = (plan.table_blocks + plan.spare_blocks) * block
        index = plan.slot_count * (9 + 8 * 4 / 3)
        pending = (plan.journal_blocks // 2) * (block // 64 - 1) * 4
        assert (table + index + pending) / plan.quota_pages < 100


def test_lock_when_held_names_the_holder_and_is_free_after_its_death(tmp_path: Path) -> None:
    code = (
        "import sys, os; from kvdev.store.lock import OwnerLock; lock = OwnerLock('thing', 'key');"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        with pytest.raises(UsageError, match=f"thing: is owned by process {pid} of this host"):
            OwnerLock("thing", "key")
        assert start_ticks(pid) is not None
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
    lock = OwnerLock("thing", "key")
    lock.release()
    lock.release()
    assert len(boot_id()) == 16
    assert start_ticks(2**22 + 1) is None


def test_directory_when_a_record_write_fails_writes_the_same_copy_again(lab: Any) -> None:
    directory = Directory(lab.volume.io, lab.volume.superblock)
    before = directory.read(0, soon()).record
    assert before is not None
    store = lab.store()
    after = directory.read(0, soon()).record
    assert after is not None
    assert after.sequence == before.sequence + 1
    assert after.epoch == 1
    assert after.owner_pid == os.getpid()
    store.close()
    closed = directory.read(0, soon()).record
    assert closed is not None
    assert closed.is_clean
