"""The drill's queue over a memory device: each fault is what it says, seeded, and nothing else changes."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.device import (
    BlockDevice,
    aligned_buffer,
    flush,
    read_blocks,
    run_batch,
    run_grouped,
    transfer_ios,
    write_blocks,
)
from kvdev.block.drill import DrillQueue, refuse_drill
from kvdev.block.memory import MemoryDevice
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.drill import DrillPlan
from kvdev.errors import CommandError, DeadlineError, QueueFullError, UncertainWriteError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.io import (
    GROUP_CRC32C,
    IO_DTYPE,
    IO_GROUP_DTYPE,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    address_of,
)

BLOCK = 4096
COUNT = 256


def soon() -> Deadline:
    return Deadline.after(30)


class Seen:
    """What reaches the device, in its order."""

    def __init__(self) -> None:
        self.slbas: list[tuple[int, int]] = []

    def __call__(self, opcode: int, slba: int, payload: npt.NDArray[np.uint8] | None) -> tuple[int, int]:
        del payload
        self.slbas.append((opcode, slba))
        return 0, 0


def drilled(**options: Any) -> tuple[MemoryDevice, MemoryDevice, Seen]:
    """A device with a drill, and the same memory without."""
    seen = Seen()
    device = MemoryDevice(size_bytes=COUNT * BLOCK, observer=seen)
    DrillQueue(device.queue).put_on(device, DrillPlan(**options))
    return device, MemoryDevice(size_bytes=COUNT * BLOCK, data=device.data), seen


def counts(device: BlockDevice) -> Any:
    assert isinstance(device.queue, DrillQueue)
    return device.queue.counts(device)


@pytest.mark.parametrize(
    "options",
    [
        {"delay_ms": 1, "delay": 0.3},
        {"reorder": 16},
        {"throttle_mib": 512},
        {"delay_ms": 1, "delay": 0.5, "reorder": 4, "throttle_mib": 800},
    ],
)
def test_io_when_nothing_fails_then_every_byte_is_right(
    options: dict[str, Any], rng: np.random.Generator
) -> None:
    device, _, _ = drilled(**options)
    model = np.zeros(COUNT * BLOCK, dtype=np.uint8)
    for _ in range(20):
        count = int(rng.integers(1, 40))
        slba = int(rng.integers(0, COUNT - count))
        data = rng.integers(0, 256, count * BLOCK, dtype=np.uint8)
        write_blocks(device, slba, data, soon())
        model[slba * BLOCK : slba * BLOCK + data.nbytes] = data
        flush(device, soon())
    assert np.array_equal(read_blocks(device, 0, COUNT, soon()), model)
    assert device.queue.outstanding_count == 0


def test_group_when_its_commands_are_late_then_it_completes_with_its_checksum(
    rng: np.random.Generator,
) -> None:
    device, plain, _ = drilled(delay_ms=2, delay=0.5, reorder=8)
    data = rng.integers(0, 256, 32 * BLOCK, dtype=np.uint8)
    write_blocks(plain, 0, data, soon())
    buffer, group = aligned_buffer(data.nbytes), np.zeros(1, dtype=IO_GROUP_DTYPE)
    ios = transfer_ios(device, OPCODE_READ, 0, address_of(buffer), BLOCK).repeat(32)
    ios["slba"] = np.arange(32)
    ios["buf_addr"] += np.arange(32, dtype=np.uint64) * np.uint64(BLOCK)
    ios["tag"] = np.arange(32)
    group["buf_addr"], group["byte_count"] = address_of(buffer), data.nbytes
    group["remaining"], group["flags"] = 32, GROUP_CRC32C
    ios["group_addr"] = address_of(group)
    assert run_grouped(device.queue, ios, soon()) is None
    assert np.array_equal(buffer, data)
    assert (int(group["remaining"][0]), int(group["error"][0])) == (0, 0)
    assert int(group["crc32c"][0]) == crc32c(data.tobytes())


def fates(seed: int) -> list[str]:
    device, _, _ = drilled(error=0.3, seed=seed)
    found = []
    for index in range(60):
        try:
            if index % 2:
                write_blocks(device, index, bytes(BLOCK), soon())
            else:
                read_blocks(device, index, 1, soon())
            found.append("")
        except CommandError as error:
            assert (error.sct, error.sc) == ((2, 0x80) if index % 2 else (2, 0x81))
            found.append(str(error))
    return found


def test_error_when_seeded_then_the_same_commands_fail_and_another_seed_has_others() -> None:
    assert fates(1) == fates(1) != fates(2)
    assert 5 < sum(map(bool, fates(1))) < 40


def test_error_when_every_command_fails_then_the_device_sees_none() -> None:
    device, _, seen = drilled(error=1.0)
    with pytest.raises(CommandError):
        write_blocks(device, 0, b"\x01" * BLOCK, soon())
    with pytest.raises(CommandError, match="internal error"):
        flush(device, soon())
    assert not seen.slbas and not device.data.any()


@pytest.mark.parametrize(("on", "fails"), [("reads", [True, False]), ("writes", [False, True])])
def test_error_when_on_one_kind_then_the_other_passes(on: str, fails: list[bool]) -> None:
    device, _, _ = drilled(error=1.0, on=on)
    got, buffer = [], aligned_buffer(BLOCK)
    for opcode in (OPCODE_READ, OPCODE_WRITE):
        ios = transfer_ios(device, opcode, 0, address_of(buffer), BLOCK)
        got.append(bool(run_batch(device.queue, ios, soon())["error"][0]))
    assert got == fails


def test_drop_when_write_then_its_fate_is_unknown_and_either_happened() -> None:
    device, plain, _ = drilled(drop=1.0, drop_ms=1)
    outcomes = set()
    for slba in range(24):
        with pytest.raises(UncertainWriteError):
            write_blocks(device, slba, b"\x07" * BLOCK, soon())
        outcomes.add(set(read_blocks(plain, slba, 1, soon()).tolist()).pop())
    assert outcomes == {0, 7}
    with pytest.raises(DeadlineError):
        read_blocks(device, 0, 1, soon())
    assert counts(device).dropped == 25


def test_drop_when_its_owner_gives_up_first_then_the_payload_is_its_own_again() -> None:
    device, _, _ = drilled(drop=1.0, drop_ms=60_000)
    started = soon()
    with pytest.raises((DeadlineError, UncertainWriteError)):
        write_blocks(device, 0, b"\x07" * BLOCK, Deadline.after(0.05))
    assert device.queue.outstanding_count == 0
    assert not started.is_expired, "nobody waited for the drop to end"


def test_corrupt_when_read_then_one_bit_is_wrong_and_the_device_keeps_its_own() -> None:
    device, plain, _ = drilled(corrupt=1.0)
    for slba in range(8):
        got = read_blocks(device, slba, 4, soon())
        assert int(np.unpackbits(got).sum()) == 1
    assert not read_blocks(plain, 0, COUNT, soon()).any()
    assert counts(device).corrupted == 8


def test_corrupt_write_when_allowed_then_one_bit_is_stored_wrong_and_the_payload_stays() -> None:
    device, plain, _ = drilled(corrupt_write=1.0, allows_damage=True)
    data = np.full(4 * BLOCK, 0x5A, dtype=np.uint8)
    write_blocks(device, 3, data, soon())
    assert (data == 0x5A).all()
    stored = read_blocks(plain, 3, 4, soon())
    assert int(np.unpackbits(stored ^ np.uint8(0x5A)).sum()) == 1


def batch(device: BlockDevice, count: int) -> tuple[Any, npt.NDArray[np.uint8]]:
    buffer = aligned_buffer(count * BLOCK)
    ios = transfer_ios(device, OPCODE_READ, 0, address_of(buffer), BLOCK).repeat(count)
    ios["slba"] = np.arange(count)
    ios["buf_addr"] += np.arange(count, dtype=np.uint64) * np.uint64(BLOCK)
    return ios, buffer


def test_reorder_when_many_are_submitted_then_each_window_is_shuffled_and_completes() -> None:
    device, _, seen = drilled(reorder=8)
    ios, _ = batch(device, 32)
    assert not run_batch(device.queue, ios, soon())["error"].any()
    order = [slba for _, slba in seen.slbas]
    assert order != list(range(32))
    for start in range(0, 32, 8):
        assert sorted(order[start : start + 8]) == list(range(start, start + 8))


def test_delay_and_throttle_when_on_then_no_command_is_sooner() -> None:
    device, _, _ = drilled(delay_ms=20)
    started = soon()
    read_blocks(device, 0, 1, soon())
    assert started.elapsed_ms() >= 20
    device, _, _ = drilled(throttle_mib=20)
    started = soon()
    ios, _ = batch(device, COUNT)
    run_batch(device.queue, ios, soon())
    assert started.elapsed_ms() >= 1000 * (COUNT - 1) * BLOCK / (20 << 20)


def test_abandon_when_commands_are_held_then_all_complete_and_no_payload_is_touched() -> None:
    device, plain, _ = drilled(delay_ms=60_000, delay=0.5, corrupt=1.0)
    write_blocks(plain, 0, b"\xff" * (32 * BLOCK), soon())
    ios, buffer = batch(device, 32)
    queue = device.queue
    with queue.lock:
        queue.submit(ios)
        got = len(queue.poll(min_count=0, deadline=soon()))
        queue.abandon()
        buffer[:] = 0x11
        while queue.outstanding_count:
            got += len(queue.poll(min_count=1, deadline=soon()))
    assert got == 32
    assert (buffer == 0x11).all()


def test_submit_when_malformed_or_too_many_then_none_is_taken() -> None:
    device, _, _ = drilled(error=0.5)
    ios, _ = batch(device, 2)
    ios["slba"][1] = COUNT
    with pytest.raises(UsageError, match="within"):
        device.queue.submit(ios)
    ios["device_index"] = 5
    with pytest.raises(UsageError, match="no such device"):
        device.queue.submit(ios)
    many = np.zeros(device.queue.capacity_count + 1, dtype=IO_DTYPE)
    many["opcode"] = OPCODE_FLUSH
    with pytest.raises(QueueFullError):
        device.queue.submit(many)
    assert device.queue.outstanding_count == 0


def test_submit_when_the_device_refuses_a_command_then_it_completes_with_that() -> None:
    device, _, _ = drilled(delay_ms=1)
    ios = np.zeros(1, dtype=IO_DTYPE)
    ios["opcode"] = 0x0D
    done = run_batch(device.queue, ios, soon())
    assert done["error"][0] in (-errno.EIO, -errno.EINVAL)


def test_stripe_when_one_member_has_a_drill_then_the_other_meets_no_fault(rng: np.random.Generator) -> None:
    device, _, _ = drilled(error=1.0, on="reads")
    other = MemoryDevice(size_bytes=COUNT * BLOCK)
    stripe = StripeDevice([device, other], strip_size_bytes=16384)
    data = rng.integers(0, 256, 8 * BLOCK, dtype=np.uint8)
    write_blocks(stripe, 0, data, soon())
    with pytest.raises(CommandError):
        read_blocks(stripe, 0, 1, soon())
    assert np.array_equal(read_blocks(stripe, 4, 4, soon()), data[4 * BLOCK :])


def test_refuse_when_what_is_about_to_be_done_could_do_harm() -> None:
    honest, misleading = drilled(error=0.1)[0], drilled(corrupt=0.1)[0]
    reckless = drilled(corrupt=0.1, allows_damage=True)[0]
    with pytest.raises(UsageError, match="erase: expected a device without a drill, because it may fail"):
        refuse_drill([honest], "erase")
    refuse_drill([honest], "own", unless_honest=True)
    with pytest.raises(UsageError, match="reads of it may be wrong"):
        refuse_drill([honest, misleading], "own", unless_honest=True)
    refuse_drill([reckless, MemoryDevice(size_bytes=BLOCK)], "erase")
