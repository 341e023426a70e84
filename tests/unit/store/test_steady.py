"""``SteadyStore``: what an engine gets while a member is lost, without a command being sent."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectionLostError, UsageError
from kvdev.native.io import OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.steady import SteadyStore, retry_pauses_s
from kvdev.store.volume import Volume

GONE = (-errno.ENOTCONN, 0)


class Counted:
    """A steady store over the lab's members, which count their commands."""

    def __init__(self, lab: Any, **options: Any) -> None:
        self.lab = lab
        self.command_count = 0
        for index, member in enumerate(lab.members):
            member.observer = lambda opcode, slba, payload, i=index: self.see(i, opcode)
        self.open_count = 0
        self.store = SteadyStore(self.open, **{"reopens_by_itself": False, **options})

    def see(self, member_index: int, opcode: int) -> tuple[int, int]:
        self.command_count += 1
        found: tuple[int, int] = self.lab.fail.get((member_index, opcode), (0, 0))
        return found

    def open(self, deadline: Deadline) -> PageStore:
        self.open_count += 1
        volume = Volume.open(self.lab.members, deadline=deadline)
        store = PageStore(volume.open_namespace("kv", deadline=deadline))
        self.lab.stores.append(store)
        return store

    def lose(self, *opcodes: int) -> None:
        for opcode in opcodes or (OPCODE_READ, OPCODE_WRITE, OPCODE_FLUSH):
            self.lab.fail[(1, opcode)] = GONE


def test_lost_member_means_misses_and_counted_puts_and_no_commands(lab: Any) -> None:
    counted = Counted(lab)
    store = counted.store
    keys, pages = lab.batch(20)
    assert store.put(keys, pages).stored_count == 20
    store.flush()
    counted.lose()
    out = lab.room(20)
    found = store.get(keys, out)
    assert found.error_count == 0 < found.hit_count < 20
    assert all(np.array_equal(out[i], pages[i]) for i in np.flatnonzero(found.status == PageStatus.HIT))
    assert store.is_away and store.store is None
    before = counted.command_count
    assert store.get(keys, out).miss_count == 20
    dropped = store.put(keys, pages)
    assert dropped.error_count == 20 and isinstance(dropped.failure, ConnectionLostError)
    assert not store.contains(keys).any() and store.longest_prefix(keys) == 0 and not store.delete(keys).any()
    with pytest.raises(
        ConnectionLostError, match=r"v#kv: flush: is away: mem:m1|v#kv: flush: is away: volume v"
    ):
        store.flush()
    assert counted.command_count == before
    stat = store.stat()
    assert (stat.loss_count, stat.missed_pages, stat.dropped_pages) == (1, found.miss_count + 20, 20)
    assert "connection lost" in stat.reason
    # What was flushed is there when the member comes back.
    lab.fail.clear()
    store.reopen()
    assert not store.is_away
    assert store.get(keys, out).hit_count == 20 and np.array_equal(out, pages)
    store.close()
    store.close()
    with pytest.raises(UsageError, match="v#kv: is closed"):
        store.get(keys, out)


@pytest.mark.parametrize("opcode", [OPCODE_WRITE, OPCODE_FLUSH])
def test_put_and_flush_that_meet_the_loss_claim_nothing(lab: Any, opcode: int) -> None:
    counted = Counted(lab)
    store = counted.store
    keys, pages = lab.batch(20)
    counted.lose(opcode)
    if opcode == OPCODE_WRITE:
        result = store.put(keys, pages)
        assert result.stored_count == 0 and result.failure is not None
        assert store.stat().dropped_pages == 20
    else:
        assert store.put(keys, pages).stored_count == 20
        with pytest.raises(ConnectionLostError):
            store.flush()
    assert store.is_away
    with pytest.raises(ConnectionLostError):
        store.flush()
    lab.fail.clear()
    store.reopen()
    assert not store.contains(keys).any()
    store.close()


def test_error_of_a_page_when_no_member_is_lost_stays_an_error(lab: Any) -> None:
    counted = Counted(lab)
    store = counted.store
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    lab.fail[(1, OPCODE_READ)] = (0, 0x281)
    found = store.get(keys, lab.room(20))
    assert found.error_count > 0 and isinstance(found.failure, CommandError)
    assert not store.is_away
    lab.fail.clear()
    store.close()


def test_deadline_of_the_caller_when_it_ends_loses_nothing(lab: Any) -> None:
    counted = Counted(lab)
    store = counted.store
    keys, pages = lab.batch(5)
    store.put(keys, pages)
    lab.fail[(1, OPCODE_READ)] = (-errno.ETIMEDOUT, 0)
    store.get(keys, lab.room(5), deadline=Deadline.after(30))
    assert not store.is_away
    store.get(keys, lab.room(5))
    assert store.is_away
    lab.fail.clear()
    store.reopen()
    store.close()


def test_reopen_when_it_fails_stays_away_and_can_be_tried_again(lab: Any) -> None:
    counted = Counted(lab)
    store = counted.store
    keys, pages = lab.batch(20)
    counted.lose()
    store.put(keys, pages)
    with pytest.raises(ConnectionLostError):
        store.reopen()
    assert store.is_away and store.get(keys, lab.room(20)).miss_count == 20
    lab.fail.clear()
    store.reopen()
    store.reopen()  # of one that is there: closed in order, and opened
    assert store.put(keys, pages).stored_count == 20
    store.close()


def test_pages_left_to_a_kernel_are_reported_through_it_and_away_nothing_is_left_to_report(lab: Any) -> None:
    store = Counted(lab).store
    keys, pages = lab.batch(4)
    put = store.put(keys, pages)
    with pytest.raises(UsageError, match="verify: expected store or kernel, got 'x'"):
        store.get(keys, lab.room(4), verify="x")  # type: ignore[arg-type]
    got = store.get(keys, lab.room(4), verify="kernel")
    assert got.hit_count == 4 and np.array_equal(got.sums, put.sums)
    is_bad = np.array([True, False, False, True])
    assert store.report_bad(got, is_bad) == 2
    assert store.contains(keys).tolist() == [False, True, True, False]
    for opcode in (OPCODE_READ, OPCODE_WRITE, OPCODE_FLUSH):
        lab.fail[(1, opcode)] = GONE
    store.put(keys, pages)
    assert store.is_away and store.report_bad(got, is_bad) == 0
    lab.fail.clear()
    store.close()


def wait_for(condition: Callable[[], bool]) -> None:
    limit, pause = Deadline.after(60), threading.Event()
    while not condition():
        assert not limit.is_expired, "it does not come"
        pause.wait(0.005)


def test_store_that_is_away_comes_back_by_itself_and_says_each_change_once(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(lab, reopens_by_itself=True, retry_s_min=0.001, retry_s_max=0.002)
    store = counted.store
    keys, pages = lab.batch(20)
    store.put(keys, pages)
    store.flush()
    counted.lose()
    assert store.put(keys, pages).stored_count == 0
    wait_for(lambda: store.stat().attempt_count >= 5)
    away = store.stat()
    assert away.is_away and away.reopen_count == 0 and "connection lost" in away.refusal
    assert store.get(keys, lab.room(20)).miss_count == 20
    lab.fail.clear()
    wait_for(lambda: not store.is_away)
    stat = store.stat()
    assert (stat.loss_count, stat.reopen_count, stat.refusal) == (1, 1, "")
    assert 5 < stat.attempt_count == counted.open_count - 1
    out = lab.room(20)
    assert store.get(keys, out).hit_count == 20 and np.array_equal(out, pages)
    said = [each.getMessage() for each in caplog.records if "taken over" not in each.getMessage()]
    assert ["misses and dropped puts until it is back" in each for each in said] == [True, False]
    assert said[1] == "v#kv: is back"
    counted.lose()  # and again
    store.put(keys, pages)
    lab.fail.clear()
    wait_for(lambda: store.stat().reopen_count == 2)
    store.close()


def test_close_of_a_store_that_is_away_ends_the_attempts(lab: Any) -> None:
    counted = Counted(lab, reopens_by_itself=True, retry_s_min=0.001, retry_s_max=0.001)
    keys, pages = lab.batch(3)
    counted.lose()
    counted.store.put(keys, pages)
    wait_for(lambda: counted.open_count > 2)
    counted.store.close()
    seen = counted.open_count
    threading.Event().wait(0.05)
    assert counted.open_count == seen
    with pytest.raises(UsageError, match="is closed"):
        counted.store.reopen()


def test_pauses_between_attempts_double_up_to_their_bound(lab: Any) -> None:
    pauses = retry_pauses_s(0.5, 3.0)
    assert [next(pauses) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    with pytest.raises(
        UsageError, match="retry_s_min: expected more than 0 and at most retry_s_max, 1, got 2"
    ):
        Counted(lab, retry_s_min=2, retry_s_max=1)
