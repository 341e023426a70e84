"""One owner: who is refused, who may take over, and what becomes of the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CorruptionError, LeaseLostError, UsageError
from kvdev.store.fence import Fence, writer_key
from kvdev.store.lease import Lease, OwnerIdentity, describe_holder
from kvdev.store.lock import LockHeldError
from kvdev.store.namespace import KvNamespace
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.record_keeper import RecordKeeper
from kvdev.store.volume import Volume

HERE = OwnerIdentity.current()
THERE = replace(HERE, boot_id=b"another boot id!", pid=4242, host_name="kv-b")
LEASE_MS = 300


def soon() -> Deadline:
    return Deadline.after(30)


class SharedDevice(MemoryDevice):
    """Blocks that other hosts reach too, as those of an array without reservations."""

    is_host_local = False
    dead_writer_s = 0.0
    lost_writer_s = 0.05


class PlainDevice(SharedDevice):
    """The same without compare and write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compare_and_write_blocks = 0


@pytest.fixture(params=[SharedDevice, PlainDevice])
def members(request: pytest.FixtureRequest) -> list[MemoryDevice]:
    queue = LocalQueue()
    return [request.param(size_bytes=2 << 20, name=f"m{index}", queue=queue) for index in range(3)]


@pytest.fixture
def other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, locks are another host's."""

    def move() -> None:
        folder = tmp_path / "other"
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))

    return move


def owned(lab: Any, identity: OwnerIdentity, *, takeover: bool = False) -> PageStore:
    volume = Volume.open(lab.members, deadline=soon())
    opened = volume.open_namespace(
        "kv", takeover=takeover, identity=identity, lease_ms=LEASE_MS, deadline=soon()
    )
    lab.stores.append(PageStore(opened))
    return PageStore(opened)


def test_owner_of_another_host_when_asked_for_is_named_and_nobody_else_gets_in(
    lab: Any, other_host: Any
) -> None:
    first = owned(lab, THERE)
    other_host()
    with pytest.raises(
        LockHeldError, match=r"v#kv: is owned by process 4242 of host kv-b, with a lease of 0.3 s"
    ):
        owned(lab, HERE)
    changes: tuple[Callable[[], object], ...] = (
        lambda: lab.volume.rename_namespace("kv", "other", deadline=soon()),
        lambda: lab.volume.delete_namespace("kv", deadline=soon()),
    )
    for change in changes:
        with pytest.raises(LockHeldError, match="take over: kvdev namespace takeover"):
            change()
    first.close()
    second = owned(lab, HERE)
    assert second.namespace.fence_kind == "time"
    second.close()
    assert lab.volume.namespace("kv", deadline=soon()).record.lease_ms == 0


def test_takeover_when_the_owner_lives_stops_it_and_keeps_what_it_flushed(lab: Any, other_host: Any) -> None:
    first = owned(lab, THERE)
    keys, pages = lab.batch(4)
    first.put(keys, pages)
    first.flush()
    other_host()
    second = owned(lab, HERE, takeover=True)
    # Reads are served at once; the first write waits for the other's lease to end.
    assert second.get(keys, lab.room(4)).hit_count == 4
    assert second.namespace.epoch == 0
    flushed = []
    with pytest.raises(LeaseLostError, match=f"v#kv: was taken over by process {HERE.pid} of host"):
        while True:
            more, bytes_ = lab.batch(1)
            first.put(more, bytes_)
            first.flush()
            flushed.append((more, bytes_))
    assert second.put(keys[:1], pages[1:2]).stored_count == 1
    assert second.namespace.epoch == 2
    for more, bytes_ in flushed[-8:]:  # the quota pushes earlier ones out
        out = lab.room(1)
        assert second.get(more, out).hit_count == 1
        assert np.array_equal(out, bytes_)
    calls: tuple[Callable[[], object], ...] = (
        lambda: first.put(keys, pages),
        lambda: first.get(keys, lab.room(4)),
        lambda: first.contains(keys),
        first.flush,
        first.close,
    )
    for call in calls:
        with pytest.raises(LeaseLostError):
            call()
    second.close()
    third = owned(lab, THERE)
    out = lab.room(1)
    assert third.get(keys[:1], out).hit_count == 1
    assert np.array_equal(out, pages[1:2])


def test_owner_that_provably_died_when_followed_costs_a_line_and_no_question(
    lab: Any, other_host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gone = replace(HERE, pid=2**22 + 1, start_ticks=77)
    keys, pages = lab.batch(2)
    first = owned(lab, gone)
    first.put(keys, pages)
    first.flush()
    first.namespace.abandon()
    with caplog.at_level(logging.WARNING):
        second = owned(lab, HERE)
    lines = [record.getMessage() for record in caplog.records if "taken over" in record.getMessage()]
    assert len(lines) == 1
    assert f"v#kv: taken over from process {gone.pid} of host" in lines[0]
    assert "has ended" in lines[0]
    assert second.get(keys, lab.room(2)).hit_count == 2
    assert second.namespace.epoch == 2
    # The same number in another PID namespace, or another start, proves nothing, or everything.
    other_host()
    for stranger in (replace(gone, pid_namespace=1), replace(gone, boot_id=b"x" * 16)):
        second.close()
        owned(lab, stranger).namespace.abandon()
        with pytest.raises(LockHeldError):
            owned(lab, HERE)
        second = owned(lab, HERE, takeover=True)
        second.flush()
    second.close()
    owned(lab, replace(HERE, start_ticks=HERE.start_ticks + 1)).namespace.abandon()
    owned(lab, HERE).close()


def test_takeover_that_died_before_its_wait_was_over_passes_the_wait_on(lab: Any, other_host: Any) -> None:
    owned(lab, THERE)
    other_host()
    owned(lab, replace(HERE, pid=2**22 + 1), takeover=True).namespace.abandon()
    assert lab.volume.namespace("kv", deadline=soon()).record.is_claimed
    before_ns = SYSTEM_CLOCK.monotonic_ns()
    third = owned(lab, HERE)
    assert third.put(*lab.batch(1)).stored_count == 1
    assert SYSTEM_CLOCK.monotonic_ns() - before_ns >= (LEASE_MS / 1000 + 0.05) * 1e9
    third.close()


def test_wait_for_the_owner_before_when_longer_than_the_deadline_is_an_error_and_goes_on(
    lab: Any, other_host: Any
) -> None:
    owned(lab, THERE)
    other_host()
    second = owned(lab, HERE, takeover=True)
    keys, pages = lab.batch(1)
    with pytest.raises(TimeoutError, match="writes of the owner before may still land"):
        second.put(keys, pages, deadline=Deadline.after(0.01))
    assert second.put(keys, pages).stored_count == 1


def test_lease_when_used_is_renewed_and_an_idle_one_that_nobody_took_goes_on(lab: Any) -> None:
    store = owned(lab, THERE)
    before = lab.volume.namespace("kv", deadline=soon()).record
    limit, lease = soon(), store.namespace._lease
    assert lease is not None
    while not lease.is_due:
        assert not limit.is_expired
    store.contains(lab.batch(1)[0])
    after = lab.volume.namespace("kv", deadline=soon()).record
    assert after.sequence == before.sequence + 1
    assert (after.epoch, after.tail_sequence) == (before.epoch, before.tail_sequence)
    while lease.is_valid:
        assert not limit.is_expired
    assert store.put(*lab.batch(1)).stored_count == 1
    store.close()


def test_two_that_open_at_once_have_one_winner(lab: Any) -> None:
    place = lab.volume.directory.read(0, soon())
    keepers = [
        RecordKeeper(lab.volume.directory, place, Lease("v#kv", fence=Fence(), identity=who))
        for who in (HERE, THERE)
    ]
    for keeper in keepers:
        assert keeper._lease is not None
    keepers[1].write(soon(), **keepers[1]._lease.fields())  # type: ignore[union-attr]
    with pytest.raises(LeaseLostError, match="v#kv: was taken over by process 4242 of host kv-b"):
        keepers[0].write(soon(), **keepers[0]._lease.fields())  # type: ignore[union-attr]
    keepers[1].write(soon())


def test_record_write_that_failed_is_written_again_to_the_same_copy(lab: Any) -> None:
    place = lab.volume.directory.read(0, soon())
    keeper = RecordKeeper(lab.volume.directory, place, Lease("v#kv", fence=Fence()))
    sequence = keeper.record.sequence
    for index in range(3):
        lab.fail[(index, 1)] = (-5, 0x006)
    for _ in range(2):
        with pytest.raises(Exception, match="write at LBA"):
            keeper.write(soon())
    lab.fail.clear()
    for index in range(3):
        lab.fail[(index, 0)] = (-5, 0x006)
    with pytest.raises(Exception, match="flush"):
        keeper.write(soon())
    lab.fail.clear()
    keeper.write(soon())
    assert keeper.record.sequence == sequence + 1 + 2 * 3
    found = lab.volume.directory.read(0, soon())
    assert (found.record.sequence, found.intact_count) == (keeper.record.sequence, 2)


def test_record_of_before_leases_is_opened_as_it_was(lab: Any) -> None:
    """All zero where the lease stands: an unclean close by any host is followed as before there were leases."""
    store = owned(lab, THERE)
    record = store.namespace._record
    store.namespace.abandon()
    bare = replace(
        record, sequence=record.sequence + 1, lease_ms=0, lease_pid_namespace=0, lease_host_name=""
    )
    lab.volume.io.flush(lab.volume.directory.write(bare, soon()), soon())
    again = owned(lab, HERE)
    assert again.put(*lab.batch(1)).stored_count == 1
    again.close()


def test_deleted_namespace_when_its_owner_goes_on_says_so(lab: Any, other_host: Any) -> None:
    store = owned(lab, THERE)
    other_host()
    lab.volume.delete_namespace("kv", takeover=True, deadline=soon())
    with pytest.raises(LeaseLostError):
        for _ in range(100_000):
            store.put(*lab.batch(1))
    with pytest.raises(UsageError, match="has no KV namespace"):
        owned(lab, HERE)


@pytest.mark.parametrize("lease_ms", [0, 99, 3_600_001, True])
def test_lease_that_is_none_is_refused(lab: Any, lease_ms: int) -> None:
    with pytest.raises(UsageError, match="lease: expected 100 to 3600000 ms"):
        lab.volume.open_namespace("kv", lease_ms=lease_ms, deadline=soon())


def test_keys_of_writers_differ_and_are_never_zero() -> None:
    keys = {writer_key(bytes([number]) * 16) for number in range(100)}
    assert len(keys) == 100
    assert all(0 < key < 1 << 64 for key in keys)


def test_readers_when_the_owner_is_elsewhere_are_let_in(lab: Any, other_host: Any) -> None:
    keys, pages = lab.batch(3)
    store = owned(lab, THERE)
    store.put(keys, pages)
    store.flush()
    other_host()
    reader = PageStore(lab.volume.open_namespace("kv", mode="reader", deadline=soon()))
    got = reader.get(keys, lab.room(3))
    assert got.status.tolist() == [PageStatus.HIT] * 3
    assert isinstance(reader.namespace, KvNamespace)
    assert reader.namespace.fence_kind == ""


def test_record_that_is_gone_when_claimed_is_refused(lab: Any) -> None:
    info = lab.volume.namespace("kv", deadline=soon())
    assert describe_holder(info.record) == "process 0"
    lab.volume.delete_namespace("kv", deadline=soon())
    with pytest.raises((CorruptionError, UsageError)):
        owned(lab, HERE)
