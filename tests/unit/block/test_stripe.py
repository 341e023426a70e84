"""The stripe beyond its mapping: groups, flushes, errors, and members it refuses."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvdev.block.device import aligned_buffer, execute, flush, transfer_ios
from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice, Observer
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.errors import CommandError, UnsupportedError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.io import (
    GROUP_CRC32C,
    IO_DTYPE,
    IO_GROUP_DTYPE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    address_of,
)


def soon() -> Deadline:
    return Deadline.after(10)


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_large_command_with_a_group_when_done_has_its_crc(is_shared: bool) -> None:
    queue = LocalQueue() if is_shared else None
    members = [MemoryDevice(size_bytes=1 << 18, name=f"m{i}", queue=queue) for i in range(3)]
    for index, member in enumerate(members):
        member.data[:] = index + 1
    stripe = StripeDevice(members, strip_size_bytes=16384)
    assert (stripe.common_queue is not None) == is_shared
    buffer = aligned_buffer(100 * 4096)
    ios = transfer_ios(stripe, OPCODE_READ, 2, address_of(buffer), buffer.nbytes)
    assert len(ios) == 1
    group = np.zeros(1, dtype=IO_GROUP_DTYPE)
    group["buf_addr"], group["byte_count"] = address_of(buffer), buffer.nbytes
    group["remaining"], group["flags"] = 1, GROUP_CRC32C
    ios["group_addr"] = address_of(group)
    done = execute(stripe, ios, soon())
    assert len(done) == 1
    assert done["complete_ns"][0] >= done["submit_ns"][0] > 0
    assert group["remaining"][0] == 0
    assert group["crc32c"][0] == crc32c(buffer)
    assert set(buffer[::4096].tolist()) == {1, 2, 3}


def test_flush_when_sent_reaches_every_member_with_a_cache() -> None:
    seen: list[int] = []

    def observer(index: int) -> Observer:
        def observe(opcode: int, slba: int, payload: object) -> tuple[int, int]:
            if opcode == OPCODE_FLUSH:
                seen.append(index)
            return 0, 0

        return observe

    members = [MemoryDevice(size_bytes=1 << 18, name=f"m{i}", observer=observer(i)) for i in range(4)]
    stripe = StripeDevice(members, strip_size_bytes=16384)
    flush(stripe, soon())
    assert sorted(seen) == [0, 1, 2, 3]
    seen.clear()
    members[2].has_volatile_cache = False
    stripe.flush_members([1, 2, 3], soon())
    assert sorted(seen) == [1, 3]


def test_one_member_failing_when_flushed_is_named_and_the_others_still_flush() -> None:
    seen: list[int] = []

    def observer(index: int) -> Observer:
        def observe(opcode: int, slba: int, payload: object) -> tuple[int, int]:
            seen.append(index)
            return (0, 0x006) if index == 0 else (0, 0)

        return observe

    members = [MemoryDevice(size_bytes=1 << 18, name=f"m{i}", observer=observer(i)) for i in range(3)]
    stripe = StripeDevice(members, strip_size_bytes=16384)
    with pytest.raises(CommandError, match="mem:m0"):
        stripe.flush_members([0, 1, 2], soon())
    assert sorted(seen) == [0, 1, 2]


def test_failed_piece_when_folded_fails_its_command_only() -> None:
    def lose(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        return -errno.ENOTCONN, 0

    members = [
        MemoryDevice(size_bytes=1 << 18, name="m0"),
        MemoryDevice(size_bytes=1 << 18, name="m1", observer=lose),
    ]
    stripe = StripeDevice(members, strip_size_bytes=16384)
    buffer = aligned_buffer(32768)
    ios = np.repeat(transfer_ios(stripe, OPCODE_READ, 0, address_of(buffer), 16384), 2)
    ios["slba"][1] = 4
    ios["buf_addr"][1] += 16384
    stripe.queue.submit(ios)
    done = stripe.queue.poll(min_count=2, deadline=soon())
    assert sorted(done["error"].tolist()) == [-errno.ENOTCONN, 0]
    assert stripe.queue.outstanding_count == 0


def test_members_that_do_not_fit_together_are_refused() -> None:
    small = MemoryDevice(size_bytes=8192)
    with pytest.raises(UsageError, match="expected at least one device"):
        StripeDevice([], strip_size_bytes=16384)
    with pytest.raises(UsageError, match="at least one strip"):
        StripeDevice([small], strip_size_bytes=16384)
    with pytest.raises(UsageError, match="block size: expected 4096"):
        other = MemoryDevice(size_bytes=1 << 18, name="b", block_size_bytes=512)
        StripeDevice([MemoryDevice(size_bytes=1 << 18), other], strip_size_bytes=16384)
    for strip in (8192, 24576, 8 << 20, 0):
        with pytest.raises(UsageError, match="strip size: expected a power of two from 16 KiB to 4 MiB"):
            StripeDevice([MemoryDevice(size_bytes=1 << 18)], strip_size_bytes=strip)


def test_dataset_management_when_sent_to_a_stripe_is_refused() -> None:
    stripe = StripeDevice([MemoryDevice(size_bytes=1 << 18)], strip_size_bytes=16384)
    ios = np.zeros(1, dtype=IO_DTYPE)
    ios["opcode"] = OPCODE_DSM
    with pytest.raises(UnsupportedError):
        execute(stripe, ios, soon())
