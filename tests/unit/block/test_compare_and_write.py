"""Compare and write on devices without such a command: emulated on one host, or refused with the reason."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from kvdev.block.device import BlockDevice, read_blocks
from kvdev.block.file import FileDevice
from kvdev.block.memory import MemoryDevice
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.errors import DeadlineError, UnsupportedError, UsageError

BLOCK = 4096
OLD, NEW = bytes(BLOCK), b"\x5a" * BLOCK


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 20))
    return path


def check(device: BlockDevice) -> None:
    assert device.compare_and_write_blocks == 1
    assert not device.compare_and_write(9, NEW, OLD, soon())
    assert device.compare_and_write(9, OLD, NEW, soon())
    assert not device.compare_and_write(9, OLD, NEW, soon())
    assert read_blocks(device, 9, 1, soon()).tobytes() == NEW
    for slba, expected in ((device.block_count, OLD), (9, OLD + OLD), (9, OLD[:-1])):
        with pytest.raises(UsageError, match="compare and write"):
            device.compare_and_write(slba, expected, expected, soon())


def test_file_memory_and_stripe_do_it(path: Path) -> None:
    with_file = FileDevice(path)
    check(with_file)
    assert path.read_bytes()[9 * BLOCK : 10 * BLOCK] == NEW
    check(MemoryDevice(size_bytes=1 << 20))
    members = [MemoryDevice(size_bytes=1 << 20, name=str(index)) for index in range(2)]
    stripe = StripeDevice(members, strip_size_bytes=16384)
    check(stripe)
    # Strip 2 of two members is row 1 of the first: its block 5.
    assert bytes(members[0].data[5 * BLOCK : 6 * BLOCK]) == NEW
    with_file.close()


def test_read_only_file_is_refused(path: Path) -> None:
    device = FileDevice(path, is_read_only=True)
    with pytest.raises(UsageError, match="1 to 0 blocks"):
        device.compare_and_write(0, OLD, NEW, soon())
    device.close()


class Bare(MemoryDevice):
    """A device that has no such command, as one behind a vhost-user socket."""

    def __init__(self) -> None:
        super().__init__(size_bytes=1 << 20, name="bare")
        self.compare_and_write_blocks = 0

    compare_and_write = BlockDevice.compare_and_write


def test_device_without_it_says_what_fences_a_writer_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"mem:bare: compare and write: .*fenced by time"):
        Bare().compare_and_write(0, OLD, NEW, soon())
    stripe = StripeDevice([MemoryDevice(size_bytes=1 << 20), Bare()], strip_size_bytes=16384)
    assert stripe.compare_and_write_blocks == 0
    with pytest.raises(UnsupportedError, match="mem:bare"):
        stripe.compare_and_write(0, OLD, NEW, soon())


def _increment(path: str, steps: int) -> None:
    device = FileDevice(path)
    done = 0
    while done < steps:
        now = read_blocks(device, 3, 1, soon()).tobytes()
        value = int.from_bytes(now[:8], "little") + 1
        done += device.compare_and_write(3, now, value.to_bytes(8, "little") + now[8:], soon())
    device.close()


def test_counter_when_two_processes_and_two_threads_increment_then_no_step_is_lost(path: Path) -> None:
    steps = 20
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_increment, args=(str(path), steps)) for _ in range(2)]
    threads = [threading.Thread(target=_increment, args=(str(path), steps)) for _ in range(2)]
    for process in processes:
        process.start()
    for thread in threads:
        thread.start()
    for process in processes:
        process.join(60)
    for thread in threads:
        thread.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert int.from_bytes(path.read_bytes()[3 * BLOCK : 3 * BLOCK + 8], "little") == 4 * steps


def test_file_when_another_process_hangs_inside_then_ends_with_the_deadline(path: Path) -> None:
    first, second = FileDevice(path), FileDevice(path)
    with first._block_lock(3, soon()):
        with pytest.raises(DeadlineError, match="compare and write"):
            second.compare_and_write(3, OLD, NEW, soon(0.05))
        assert second.compare_and_write(4, OLD, NEW, soon())
    assert second.compare_and_write(3, OLD, NEW, soon())
    first.close()
    second.close()
