"""Scrub: damage in a page withdraws it before anybody asks; demand goes on, and so does the scrub after a restart."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import NS_PER_S, Deadline
from kvdev.errors import CommandError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.io import OPCODE_READ
from kvdev.store.page_store import PageStore
from kvdev.store.scrub import PIECE_BYTES, UNREADABLE_RUN_MAX, Scrubber
from kvdev.store.throttle import Throttle
from kvdev.store.volume import Volume

RATE = 1 << 40


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, pause = Deadline.after(120), threading.Event()
    while not condition():
        deadline.check("the scrub")
        pause.wait(0.01)


def whole_pass(scrubber: Scrubber) -> None:
    passes = scrubber.stat().pass_count
    while scrubber.stat().pass_count == passes:
        scrubber.step()


def place_of(lab: Any, lba: int) -> tuple[int, int]:
    """Member and byte of a logical block; strips of four blocks over three members."""
    strip, within = divmod(lba, 4)
    return strip % 3, (strip // 3 * 4 + within) * 4096


def damage(lab: Any, store: PageStore, slot: int) -> None:
    member, byte = place_of(lab, store.namespace.slot_slba(slot))
    lab.members[member].data[byte + 7] ^= 0x10


def filled(lab: Any, count: int = 20) -> tuple[PageStore, Any, Any]:
    store = lab.store()
    keys, pages = lab.batch(count)
    store.put(keys, pages)
    store.flush()
    return store, keys, pages


def test_damaged_pages_when_scrubbed_are_withdrawn_and_the_others_stay(lab: Any) -> None:
    store, keys, _ = filled(lab)
    slots = store.namespace.lookup(keys, touch=False)["slot_index"].tolist()
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE, unix_s=lambda: 1234)
    whole_pass(scrubber)
    assert scrubber.stat().checked_pages == 20 and scrubber.stat().withdrawn_pages == 0
    for number in (3, 11):
        damage(lab, store, slots[number])
    whole_pass(scrubber)
    stat = scrubber.stat()
    assert (stat.damaged_pages, stat.unreadable_pages, stat.withdrawn_pages) == (2, 0, 2)
    assert stat.pass_count == 2 and stat.last_pass_unix_s == 1234
    assert np.flatnonzero(~store.contains(keys)).tolist() == [3, 11]
    got = store.get(keys, lab.room(20))
    assert (got.hit_count, got.miss_count, got.error_count) == (18, 2, 0)
    store.flush()
    assert lab.reopen().contains(keys).sum() == 18


def test_page_that_cannot_be_read_any_more_is_withdrawn_and_a_lost_device_withdraws_none(lab: Any) -> None:
    store, keys, _ = filled(lab)
    slots = store.namespace.lookup(keys, touch=False)["slot_index"].tolist()
    bad = [place_of(lab, store.namespace.slot_slba(slots[5]))]
    answer = (0, 0x281)
    for index, member in enumerate(lab.members):
        member.observer = lambda opcode, slba, payload, i=index: (
            answer if opcode == OPCODE_READ and (i, slba * 4096) in bad else (0, 0)
        )
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE)
    whole_pass(scrubber)
    assert (scrubber.stat().unreadable_pages, scrubber.stat().withdrawn_pages) == (1, 1)
    # A connection that is lost says nothing of pages.
    bad.append(place_of(lab, store.namespace.slot_slba(slots[8])))
    answer = (-errno.ENOTCONN, 0)
    with pytest.raises(TransportError):
        whole_pass(scrubber)
    assert scrubber.stat().withdrawn_pages == 1
    # A whole device that reads nothing any more: the first pages go, then it is the device.
    answer = (0, 0x281)
    bad.extend((index, block * 4096) for index in range(3) for block in range(512))
    with pytest.raises(CommandError):
        whole_pass(scrubber)
    assert scrubber.stat().withdrawn_pages == 1 + UNREADABLE_RUN_MAX
    bad.clear()
    whole_pass(scrubber)
    assert store.contains(keys).sum() == 19 - UNREADABLE_RUN_MAX


def test_page_that_goes_while_it_is_read_is_no_damage_and_lookups_do_not_wait(lab: Any) -> None:
    store, keys, _ = filled(lab)
    slot = int(store.namespace.lookup(keys[:1], touch=False)["slot_index"][0])
    damage(lab, store, slot)
    member, byte = place_of(lab, store.namespace.slot_slba(slot))
    is_reading, may_go_on = threading.Event(), threading.Event()

    def observe(opcode: int, slba: int, payload: Any) -> tuple[int, int]:
        del payload
        if opcode == OPCODE_READ and slba * 4096 == byte:
            is_reading.set()
            assert may_go_on.wait(120)
        return 0, 0

    lab.members[member].observer = observe
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE)
    thread = threading.Thread(target=whole_pass, args=(scrubber,))
    thread.start()
    assert is_reading.wait(120)
    assert store.contains(keys).all()  # while the scrub is within its read
    store.delete(keys[:1])
    may_go_on.set()
    thread.join(120)
    assert not thread.is_alive()
    assert (scrubber.stat().damaged_pages, scrubber.stat().withdrawn_pages) == (0, 0)


def test_pages_when_scrubbed_are_read_in_small_pieces_one_at_a_time() -> None:
    large = Geometry(model_id="large", layer_count=5, kv_head_count=8, head_size=64, tokens_per_page=64)
    assert large.page_size_bytes > 2 * PIECE_BYTES
    queue, sizes, outstanding = LocalQueue(), [], []

    def observe(opcode: int, slba: int, payload: Any) -> tuple[int, int]:
        del slba, payload
        if opcode == OPCODE_READ:
            outstanding.append(queue.outstanding_count)
        return 0, 0

    members = [
        MemoryDevice(size_bytes=16 << 20, name=f"p{index}", queue=queue, observer=observe)
        for index in range(2)
    ]
    volume = Volume.create(members, name="p", strip_size_bytes=1 << 20, deadline=Deadline.after(60))
    volume.create_namespace("kv", large, quota_pages=4, deadline=Deadline.after(60))
    store = PageStore(volume.open_namespace("kv", deadline=Deadline.after(60)))
    rng = np.random.default_rng(5)
    store.put(
        rng.integers(0, 256, (2, 32), dtype=np.uint8),
        rng.integers(0, 256, (2, large.page_size_bytes), dtype=np.uint8),
    )
    before = volume.io.read_bytes.sum()
    outstanding.clear()
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE)
    while scrubber.stat().checked_pages < 2:
        sizes.append(scrubber.step())
    assert volume.io.read_bytes.sum() - before == 2 * large.page_size_bytes == sum(sizes)
    assert len(outstanding) >= 2 * -(-large.page_size_bytes // PIECE_BYTES)
    assert max(outstanding) <= 2  # a piece is cut where a strip ends, and no two pieces are under way
    store.close()


def test_scrub_goes_on_where_it_was_in_this_owner_and_the_next(lab: Any) -> None:
    store, _, _ = filled(lab)
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE)
    for _ in range(7):
        scrubber.step()
    place = scrubber.stat().next_slot
    assert place == 7
    assert Scrubber(store.namespace, bytes_per_s=RATE).stat().next_slot == place
    store.close()
    again = lab.reopen()
    later = Scrubber(again.namespace, bytes_per_s=RATE)
    assert later.stat().next_slot == place
    whole_pass(later)
    assert later.stat().checked_pages == 13
    again.close()
    record = lab.volume.namespace("kv", deadline=Deadline.after(60)).record
    assert record.scrub_slot == 0 and record.scrubbed_unix_s > 0


def test_thread_verifies_until_it_is_stopped_or_the_owner_ends(lab: Any) -> None:
    store, keys, pages = filled(lab)
    scrubber = Scrubber(store.namespace, bytes_per_s=RATE, pass_pause_s=0.0)
    scrubber.start()
    scrubber.start()
    wait_until(lambda: scrubber.stat().pass_count >= 2)
    damage(lab, store, int(store.namespace.lookup(keys[:1], touch=False)["slot_index"][0]))
    wait_until(lambda: scrubber.stat().withdrawn_pages == 1)
    assert store.put(keys[:5], pages[:5]).stored_count == 5  # demand, meanwhile
    assert store.get(keys, lab.room(20)).hit_count == 20
    scrubber.stop()
    scrubber.stop()
    assert not scrubber.stat().is_running
    checked = scrubber.stat().checked_pages
    scrubber.start()
    wait_until(lambda: scrubber.stat().checked_pages > checked)
    store.close()
    assert not scrubber.stat().is_running
    with pytest.raises(UsageError, match="v#kv: scrub: is closed"):
        scrubber.start()


def test_scrub_is_for_owners(lab: Any) -> None:
    reader = lab.volume.open_namespace("kv", mode="reader", deadline=Deadline.after(60))
    with pytest.raises(UsageError, match="scrub: is open as reader; open it as owner"):
        Scrubber(reader)
    store = lab.store()
    with pytest.raises(UsageError, match="bytes_per_s: expected at least 1, got 0"):
        Scrubber(store.namespace, bytes_per_s=0)


class Ticks:
    def __init__(self) -> None:
        self.now_ns = 5 * NS_PER_S

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_rate_is_kept_and_idle_time_is_not_made_up_for() -> None:
    clock = Ticks()
    throttle = Throttle(1000, clock=clock)
    assert throttle.count(500) == 0.5
    assert throttle.count(500) == 1.0
    clock.now_ns += 100 * NS_PER_S
    assert throttle.count(250) == 0.25
    assert Throttle(None, clock=clock).count(1 << 40) == 0.0
