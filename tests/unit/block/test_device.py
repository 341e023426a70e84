"""Batches over a queue: completion order, errors as exceptions, deadlines that give the payload back."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvdev.block.device import (
    aligned_buffer,
    error_of,
    execute,
    flush,
    read_blocks,
    run_batch,
    run_grouped,
    transfer_ios,
    write_blocks,
)
from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import (
    CapacityError,
    CommandError,
    ConnectionLostError,
    DeadlineError,
    QueueFullError,
    TransportError,
    UsageError,
)
from kvdev.native.crc import crc32c
from kvdev.native.io import GROUP_CRC32C, IO_DTYPE, IO_GROUP_DTYPE, OPCODE_READ, OPCODE_WRITE, address_of


def soon() -> Deadline:
    return Deadline.after(10)


def test_write_then_read_when_larger_than_a_transfer_is_split_and_equal(rng: np.random.Generator) -> None:
    device = MemoryDevice(size_bytes=1 << 20, max_transfer_bytes=12288)
    data = rng.integers(0, 256, 65536, dtype=np.uint8)
    write_blocks(device, 3, data, soon())
    flush(device, soon())
    assert np.array_equal(read_blocks(device, 3, 16, soon()), data)
    assert not device.data[: 3 * 4096].any()


def test_batch_when_larger_than_the_queue_is_run_in_pieces() -> None:
    device = MemoryDevice(size_bytes=1 << 20, queue=LocalQueue(capacity_count=3))
    data = np.arange(256 * 4096, dtype=np.uint32).astype(np.uint8)
    ios = np.repeat(transfer_ios(device, OPCODE_WRITE, 0, address_of(data), 4096), 256)
    ios["slba"] = np.arange(256)
    ios["buf_addr"] = address_of(data) + np.arange(256) * 4096
    done = execute(device, ios, soon())
    assert done["tag"].tolist() == list(range(256))
    assert np.array_equal(device.data, data)


def test_group_when_its_last_command_completes_has_the_crc() -> None:
    device = MemoryDevice(size_bytes=1 << 20, max_transfer_bytes=8192)
    device.data[:] = np.arange(device.data.size, dtype=np.uint32).astype(np.uint8)
    buffer = aligned_buffer(65536)
    group = np.zeros(1, dtype=IO_GROUP_DTYPE)
    ios = transfer_ios(device, OPCODE_READ, 0, address_of(buffer), 65536)
    group["buf_addr"], group["byte_count"] = address_of(buffer), 65536
    group["remaining"], group["flags"] = len(ios), GROUP_CRC32C
    ios["group_addr"] = address_of(group)
    execute(device, ios, soon())
    assert group["remaining"][0] == 0
    assert group["crc32c"][0] == crc32c(device.data[:65536])
    assert group["complete_ns"][0] >= group["submit_ns"][0] > 0


def test_failed_command_when_executed_raises_its_status_and_marks_the_group() -> None:
    device = MemoryDevice(
        size_bytes=1 << 20, observer=lambda opcode, slba, payload: (0, 0x281 if slba == 2 else 0)
    )
    buffer = aligned_buffer(4096 * 4)
    ios = np.repeat(transfer_ios(device, OPCODE_READ, 0, address_of(buffer), 4096), 4)
    ios["slba"] = np.arange(4)
    group = np.zeros(1, dtype=IO_GROUP_DTYPE)
    group["remaining"] = 4
    ios["group_addr"] = address_of(group)
    with pytest.raises(CommandError, match=r"LBA 2: .*got status 0x2/0x81") as failure:
        execute(device, ios, soon())
    assert failure.value.sct == 2
    assert failure.value.sc == 0x81
    assert (group["error"][0], group["status"][0]) == (-errno.EIO, 0x281)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errno.ENOTCONN, ConnectionLostError),
        (errno.ETIMEDOUT, DeadlineError),
        (errno.EIO, TransportError),
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
    ],
)
def test_error_of_a_completion_is_the_class_a_caller_acts_on(error: int, kind: type[Exception]) -> None:
    assert type(error_of(error=-error, status=0, opcode=1, slba=7, uri="mem:x")) is kind


def test_expired_batch_when_it_returns_has_given_everything_back() -> None:
    device = MemoryDevice(size_bytes=1 << 20, queue=LocalQueue(capacity_count=2))
    buffer = aligned_buffer(4096)
    ios = np.repeat(transfer_ios(device, OPCODE_WRITE, 0, address_of(buffer), 4096), 8)
    done = run_batch(device.queue, ios, Deadline.after(0))
    assert device.queue.outstanding_count == 0
    assert set(done["error"].tolist()) == {-errno.ECANCELED}
    assert done["tag"].tolist() == list(range(8))


def test_grouped_batch_when_none_fails_keeps_nothing_else_what_failed() -> None:
    bad = {2, 5}

    def fail_some(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        return (-errno.EIO, 0x281) if slba in bad else (0, 0)

    device = MemoryDevice(size_bytes=1 << 20, observer=fail_some, queue=LocalQueue(capacity_count=3))
    buffer = aligned_buffer(4096)
    ios = np.repeat(transfer_ios(device, OPCODE_WRITE, 0, address_of(buffer), 4096), 8)
    ios["slba"] = ios["tag"] = np.arange(8)
    failed = run_grouped(device.queue, ios, soon())
    assert failed is not None
    assert np.flatnonzero(failed["error"]).tolist() == [2, 5]
    assert failed["status"][2] == 0x281
    bad.clear()
    assert run_grouped(device.queue, ios, soon()) is None
    late = run_grouped(device.queue, ios, Deadline.after(0))
    assert late is not None
    assert set(late["error"].tolist()) == {-errno.ECANCELED}


@pytest.mark.parametrize(
    "change",
    [{"slba": 256}, {"lba_count": 0}, {"byte_count": 512}, {"buf_addr": 0}, {"slba": (1 << 64) - 1}],
)
def test_malformed_command_when_submitted_is_refused_and_nothing_runs(change: dict[str, int]) -> None:
    device = MemoryDevice(size_bytes=1 << 20)
    buffer = aligned_buffer(8192)
    buffer[:] = 1
    ios = np.repeat(transfer_ios(device, OPCODE_WRITE, 0, address_of(buffer), 4096), 2)
    for name, value in change.items():
        ios[name][1] = value
    with pytest.raises(UsageError, match="expected a payload"):
        execute(device, ios, soon())
    assert not device.data.any()


def test_queue_when_full_says_so() -> None:
    queue = LocalQueue(capacity_count=1)
    device = MemoryDevice(size_bytes=1 << 20, queue=queue)
    ios = np.zeros(2, dtype=IO_DTYPE)
    ios["device_index"] = device.device_index
    with pytest.raises(QueueFullError):
        queue.submit(ios)
    ios["device_index"] = 9
    with pytest.raises(UsageError, match="device_index 9"):
        queue.submit(ios[:1])


def test_interrupted_batch_when_it_raises_has_emptied_the_queue() -> None:
    def interrupt(opcode: int, slba: int, payload: object) -> tuple[int, int]:
        if slba == 3:
            raise KeyboardInterrupt
        return 0, 0

    device = MemoryDevice(size_bytes=1 << 20, observer=interrupt)
    buffer = aligned_buffer(4096)
    ios = np.repeat(transfer_ios(device, OPCODE_WRITE, 0, address_of(buffer), 4096), 8)
    ios["slba"] = np.arange(8)
    with pytest.raises(KeyboardInterrupt):
        execute(device, ios, soon())
    assert device.queue.outstanding_count == 0
    device.observer = None
    execute(device, ios, soon())
