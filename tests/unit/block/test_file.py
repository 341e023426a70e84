"""File devices: the same bytes as memory, refusals that name the path."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import execute, flush, read_blocks, transfer_ios, write_blocks
from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.errors import CommandError, TransportError, UsageError
from kvdev.native.io import IO_DTYPE, OPCODE_COMPARE, OPCODE_WRITE_ZEROES, address_of


def soon() -> Deadline:
    return Deadline.after(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 20))
    return path


def test_bytes_when_written_are_in_the_file(path: Path, rng: np.random.Generator) -> None:
    device = FileDevice(path)
    assert (device.block_size_bytes, device.block_count) == (4096, 256)
    data = rng.integers(0, 256, 3 * 4096 + 1, dtype=np.uint8)[1:]  # not aligned: takes the bounce buffer
    write_blocks(device, 5, data, soon())
    flush(device, soon())
    assert path.read_bytes()[5 * 4096 : 8 * 4096] == data.tobytes()
    assert np.array_equal(read_blocks(device, 5, 3, soon()), data)
    device.close()
    device.close()


def test_write_zeroes_and_compare_when_run_do_what_they_say(path: Path) -> None:
    device = FileDevice(path, block_size_bytes=512)
    data = np.ones(2 << 19, dtype=np.uint8)
    write_blocks(device, 0, data, soon())
    ios = np.zeros(1, dtype=IO_DTYPE)
    ios["opcode"], ios["slba"], ios["lba_count"] = OPCODE_WRITE_ZEROES, 1, 2047
    execute(device, ios, soon())
    assert path.read_bytes() == bytes([1]) * 512 + bytes((1 << 20) - 512)
    compare = transfer_ios(device, OPCODE_COMPARE, 0, address_of(data), 512)
    execute(device, compare, soon())
    compare = transfer_ios(device, OPCODE_COMPARE, 1, address_of(data), 512)
    with pytest.raises(CommandError) as failure:
        execute(device, compare, soon())
    assert (failure.value.sct, failure.value.sc) == (2, 0x85)
    device.close()


def test_open_when_it_cannot_names_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"file:.*/none: cannot be opened: No such file"):
        FileDevice(tmp_path / "none")
    (tmp_path / "small").write_bytes(b"x" * 100)
    with pytest.raises(UsageError, match=r"small: size: expected at least one block of 4096 bytes, got 100"):
        FileDevice(tmp_path / "small")
    (tmp_path / "odd").write_bytes(bytes(8192))
    with pytest.raises(UsageError, match=r"odd: block size: expected a power of two"):
        FileDevice(tmp_path / "odd", block_size_bytes=1000)
    with pytest.raises(UsageError, match="/dev/null: expected a regular file or a block device"):
        FileDevice("/dev/null")


def test_read_only_device_when_written_fails_with_the_errno(path: Path) -> None:
    device = FileDevice(path, is_read_only=True)
    with pytest.raises(TransportError) as failure:
        write_blocks(device, 0, bytes(4096), soon())
    assert failure.value.errno == errno.EBADF
    device.close()


def test_file_that_shrank_when_read_fails_instead_of_giving_zeroes(path: Path) -> None:
    device = FileDevice(path)
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(TransportError):
        read_blocks(device, 1, 1, soon())
    device.close()
