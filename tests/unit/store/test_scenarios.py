"""Fault scenarios of one step: no room at each write (S-27), pages cut at each block (S-28)."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev.errors import KvdevError
from kvdev.native.io import OPCODE_WRITE
from kvdev.store.page_store import PageStatus

CAPACITY_EXCEEDED = 0x081
WRITE_LIMIT = 40
"""Writes that replacing pages and flushing twice take at most; the test says so when there are more."""

Bytes = npt.NDArray[np.uint8]


class FailsOnce:
    """The nth write says that there is no room."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.has_failed = False

    def __call__(self, opcode: int, slba: int, payload: Bytes | None) -> tuple[int, int]:
        del slba, payload
        if opcode != OPCODE_WRITE or self.has_failed:
            return 0, 0
        self.left -= 1
        if self.left:
            return 0, 0
        self.has_failed = True
        return -errno.EIO, CAPACITY_EXCEEDED


def replace_under(lab: Any, failing: FailsOnce) -> tuple[Any, Bytes, Bytes, Bytes]:
    """Replace half of what is stored and add some, while one write fails; store, keys, old and new pages."""
    store = lab.reopen()
    keys, old = lab.batch(8)
    assert store.put(keys, old).stored_count == 8
    store.flush()
    new = old ^ 0xFF
    for member in lab.members:
        member.observer = failing
    try:
        store.put(keys[:4], new[:4])
        store.flush()
        store.put(*lab.batch(3))
        store.flush()
        store.namespace._checkpoint(soon())
    except KvdevError:
        pass
    for member in lab.members:
        member.observer = lambda opcode, slba, payload: (0, 0)
    return store, keys, old, new


def soon() -> Deadline:
    return Deadline.after(30)


def test_no_room_at_each_write_leaves_old_or_new_and_leaks_no_slot(lab: Any) -> None:
    """S-27."""
    for number in range(1, WRITE_LIMIT):
        failing = FailsOnce(number)
        store, keys, old, new = replace_under(lab, failing)
        for again in range(2):
            out = lab.room(8)
            got = store.get(keys, out)
            assert got.error_count == 0, f"write {number}"
            for index in range(8):
                if got.status[index] == PageStatus.HIT:
                    assert out[index].tobytes() in (old[index].tobytes(), new[index].tobytes())
            # What was not touched stays; what was being replaced is there in one of its versions, or withdrawn.
            assert (got.status[4:] == PageStatus.HIT).all()
            if again == 0:
                store = lab.reopen()
        stat = store.namespace.stat().index
        assert stat.live_count + stat.free_count + stat.leaving_count == stat.slot_count
        assert store.put(keys, new).stored_count == 8
        store.flush()
        assert store.get(keys, lab.room(8)).hit_count == 8
        if not failing.has_failed:
            return
    raise AssertionError(f"it takes more than {WRITE_LIMIT} writes: raise the limit")


def test_no_room_for_a_page_keeps_what_it_would_have_replaced(lab: Any) -> None:
    """S-27, at the data write: the put says so, the old version is read on."""
    store = lab.store()
    keys, pages = lab.batch(4)
    store.put(keys, pages)
    store.flush()
    free = store.namespace.stat().index.free_count
    for index in range(3):
        lab.fail[(index, OPCODE_WRITE)] = (-errno.EIO, CAPACITY_EXCEEDED)
    put = store.put(keys, pages ^ 0xFF)
    assert put.error_count == 4
    assert "capacity exceeded" in str(put.failure)
    lab.fail.clear()
    out = lab.room(4)
    assert store.get(keys, out).hit_count == 4
    assert np.array_equal(out, pages)
    assert store.namespace.stat().index.free_count == free


def test_page_of_which_only_the_first_blocks_were_written_is_never_a_hit(lab: Any) -> None:
    """S-28: for every number of blocks; the bytes behind are those of the page before in that slot."""
    block = lab.volume.block_size_bytes
    for written in range(lab.geometry.page_size_bytes // block):
        store = lab.reopen()
        keys, pages = lab.batch(1)
        store.put(keys, pages)
        store.flush()
        slot = int(store.namespace.lookup(keys)["slot_index"][0])
        older = lab.rng.integers(0, 256, lab.geometry.page_size_bytes, dtype=np.uint8)
        slba = store.namespace.slot_slba(slot)
        lab.volume.io.write(slba + written, older[written * block :], soon())
        out = lab.room(1)
        assert store.get(keys, out).status.tolist() == [PageStatus.ERROR]
        assert store.get(keys, out).status.tolist() == [PageStatus.MISS]
        assert lab.reopen().put(keys, pages).stored_count == 1
