"""Block devices of the target's core, by themselves: memory, file, null, raid0."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvdev.native.target import BdevBacking, NativeBdev

BLOCK = 512


def random_bytes(rng: np.random.Generator, size: int) -> bytes:
    return rng.integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture
def backing_file(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 20))
    return path


def open_each(backing_file: Path) -> list[NativeBdev]:
    return [
        NativeBdev.memory(block_size_bytes=BLOCK, block_count=2048),
        NativeBdev.file(str(backing_file), block_size_bytes=BLOCK),
        NativeBdev.file(str(backing_file), block_size_bytes=BLOCK, is_buffered=True),
    ]


def test_every_device_equals_a_byte_array(backing_file: Path, rng: np.random.Generator) -> None:
    for bdev in open_each(backing_file):
        model = bytearray(1 << 20)
        for _ in range(60):
            first, count = int(rng.integers(0, 2040)), int(rng.integers(1, 9))
            offset, size = first * BLOCK, count * BLOCK
            match int(rng.integers(0, 4)):
                case 0:
                    data = random_bytes(rng, size)
                    bdev.write(offset, data, fua=bool(rng.integers(0, 2)))
                    model[offset : offset + size] = data
                case 1:
                    bdev.write_zeroes(offset, size)
                    model[offset : offset + size] = bytes(size)
                case 2:
                    assert bdev.compare(offset, bytes(model[offset : offset + size]))
                case _:
                    assert bdev.read(offset, size) == model[offset : offset + size]
        bdev.flush()
        assert bdev.read(0, 1 << 20) == model
        bdev.deallocate(0, 1 << 20)
        bdev.write_zeroes(0, 1 << 20)
        bdev.close()


def test_a_miscompare_is_told_from_an_error(rng: np.random.Generator) -> None:
    bdev = NativeBdev.memory(block_size_bytes=BLOCK, block_count=8)
    bdev.write(0, random_bytes(rng, BLOCK))
    assert not bdev.compare(0, bytes(BLOCK))
    with pytest.raises(OSError) as raised:
        bdev.compare(8 * BLOCK, bytes(BLOCK))
    assert raised.value.errno == errno.EINVAL
    bdev.close()


@pytest.mark.parametrize(("offset", "length"), [(0, 9), (8, 1), (7, 2), (1 << 40, 1)])
def test_a_range_outside_is_refused(offset: int, length: int) -> None:
    bdev = NativeBdev.memory(block_size_bytes=BLOCK, block_count=8)
    with pytest.raises(OSError) as raised:
        bdev.read(offset * BLOCK, length * BLOCK)
    assert raised.value.errno == errno.EINVAL
    bdev.close()


def test_a_long_zero_fill_gives_zeroes_at_every_edge(rng: np.random.Generator) -> None:
    size = 6 << 20
    bdev = NativeBdev.memory(block_size_bytes=BLOCK, block_count=size // BLOCK)
    data = random_bytes(rng, size)
    bdev.write(0, data)
    first, last = 3 * BLOCK, size - 5 * BLOCK
    bdev.write_zeroes(first, last - first)
    assert bdev.read(0, size) == data[:first] + bytes(last - first) + data[last:]
    bdev.close()


def test_a_file_device_keeps_what_was_flushed(backing_file: Path, rng: np.random.Generator) -> None:
    data = random_bytes(rng, 64 << 10)
    bdev = NativeBdev.file(str(backing_file), block_size_bytes=4096)
    bdev.write(8192, data)
    bdev.flush()
    info = bdev.info()
    bdev.close()
    assert info.has_volatile_cache and info.block_count == 256
    assert info.backing in (BdevBacking.DIRECT, BdevBacking.BUFFERED)
    assert backing_file.read_bytes()[8192 : 8192 + len(data)] == data


def test_a_readonly_file_refuses_writes(backing_file: Path) -> None:
    bdev = NativeBdev.file(str(backing_file), block_size_bytes=4096, is_readonly=True)
    assert bdev.read(0, 4096) == bytes(4096)
    changes: list[Callable[[], None]] = [
        lambda: bdev.write(0, bytes(4096)),
        lambda: bdev.write_zeroes(0, 4096),
        lambda: bdev.deallocate(0, 4096),
    ]
    for change in changes:
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EROFS
    bdev.close()


def test_a_file_that_is_missing_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        NativeBdev.file(str(tmp_path / "none"), block_size_bytes=512)
    assert raised.value.errno == errno.ENOENT
    small = tmp_path / "small"
    small.write_bytes(bytes(4096))
    with pytest.raises(OSError) as raised:
        NativeBdev.file(str(small), block_size_bytes=512, block_count=9)
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError):
        NativeBdev.file(str(tmp_path), block_size_bytes=512)


def test_null_reads_zeroes() -> None:
    bdev = NativeBdev.null(block_size_bytes=BLOCK, block_count=1 << 30)
    bdev.write(0, b"\xff" * BLOCK)
    assert bdev.read(0, BLOCK) == bytes(BLOCK)
    bdev.close()


@pytest.mark.parametrize("block_size", [0, 256, 513, 1000, 131072])
def test_a_block_size_that_is_no_power_of_two_is_refused(block_size: int) -> None:
    with pytest.raises(OSError):
        NativeBdev.memory(block_size_bytes=block_size, block_count=8)


@pytest.mark.parametrize("member_count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("strip_blocks", [1, 2, 8, 32])
def test_raid0_puts_each_block_where_the_formula_says(
    member_count: int, strip_blocks: int, rng: np.random.Generator
) -> None:
    counts = [100 + int(rng.integers(0, 60)) for _ in range(member_count)]
    members = tuple(NativeBdev.memory(block_size_bytes=BLOCK, block_count=count) for count in counts)
    raid = NativeBdev.raid0(members, strip_size_bytes=strip_blocks * BLOCK)
    rows = min(counts) // strip_blocks
    block_count = rows * strip_blocks * member_count
    assert raid.info().block_count == block_count
    data = random_bytes(rng, block_count * BLOCK)
    at = 0
    while at < block_count:  # in pieces that do not fit the strips
        count = min(int(rng.integers(1, 3 * strip_blocks + 2)), block_count - at)
        raid.write(at * BLOCK, data[at * BLOCK : (at + count) * BLOCK])
        at += count
    for block in range(block_count):
        strip, inside = divmod(block, strip_blocks)
        row, member = divmod(strip, member_count)
        got = members[member].read((row * strip_blocks + inside) * BLOCK, BLOCK)
        assert got == data[block * BLOCK : (block + 1) * BLOCK], block
    assert raid.read(0, len(data)) == data
    raid.close()
    for one in members:
        one.close()


def test_raid0_refuses_members_that_do_not_fit() -> None:
    small = NativeBdev.memory(block_size_bytes=512, block_count=64)
    large = NativeBdev.memory(block_size_bytes=4096, block_count=64)
    for members, strip in (((small, large), 4096), ((small,), 768), ((small,), 256), ((small,), 1 << 20)):
        with pytest.raises(OSError) as raised:
            NativeBdev.raid0(members, strip_size_bytes=strip)
        assert raised.value.errno == errno.EINVAL
    small.close()
    large.close()


def test_counters_say_what_was_done() -> None:
    members = tuple(NativeBdev.memory(block_size_bytes=BLOCK, block_count=64) for _ in range(2))
    raid = NativeBdev.raid0(members, strip_size_bytes=BLOCK)
    raid.write(0, bytes(4 * BLOCK))
    raid.read(0, BLOCK)
    raid.deallocate(0, 2 * BLOCK)
    stat = raid.stat()
    assert (stat.write_bytes, stat.write_count) == (4 * BLOCK, 1)
    assert (stat.read_bytes, stat.read_count) == (BLOCK, 1)
    assert (stat.unmap_bytes, stat.unmap_count) == (2 * BLOCK, 1)
    assert 0 < stat.write_ns_min <= stat.write_ns_max <= stat.write_ns
    assert members[1].stat().write_bytes == 2 * BLOCK
    raid.reset_stat()
    assert raid.stat().write_count == 0
    raid.close()
    for one in members:
        one.close()


# ---- the volatile cache ----


def test_volatile_cache_when_killed_then_only_flushed_and_chosen_blocks_are_there(tmp_path: Path) -> None:
    """What a kill leaves is what the file holds while the process lives: nothing else is ever written there."""
    blocks = 256
    path = tmp_path / "file"
    path.write_bytes(bytes(blocks * 4096))

    def survivors(first: int) -> list[int]:
        data = path.read_bytes()
        return [block for block in range(first, blocks) if data[block * 4096]]

    kept: list[list[int]] = []
    for seed in (1, 1, 2):
        path.write_bytes(bytes(blocks * 4096))
        bdev = NativeBdev.file(str(path), block_size_bytes=4096, volatile_seed=seed)
        assert bdev.info().has_volatile_cache
        for block in range(blocks):
            bdev.write(block * 4096, bytes([block % 255 + 1]) * 4096)
        assert bdev.read(0, blocks * 4096) == b"".join(bytes([b % 255 + 1]) * 4096 for b in range(blocks))
        kept.append(survivors(0))
        bdev.close()
        assert len(survivors(0)) == blocks, "an orderly end loses nothing"
    assert kept[0] == kept[1] != kept[2]
    assert blocks // 8 < len(kept[0]) < blocks // 2


def test_volatile_cache_when_flushed_or_forced_then_on_the_medium(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    bdev = NativeBdev.file(str(path), block_size_bytes=4096, volatile_seed=7)
    bdev.write(0, b"\x01" * 32 * 4096)
    bdev.flush()
    assert path.read_bytes()[: 32 * 4096] == b"\x01" * 32 * 4096
    bdev.write(40 * 4096, b"\x02" * 8 * 4096, fua=True)
    assert path.read_bytes()[40 * 4096 : 48 * 4096] == b"\x02" * 8 * 4096
    bdev.write(0, b"\x03" * 4096)
    assert bdev.compare(0, b"\x03" * 4096 + b"\x01" * 4096)
    assert not bdev.compare(0, b"\x01" * 4096)
    bdev.write_zeroes(0, 8 * 4096)
    assert bdev.read(0, 8 * 4096) == bytes(8 * 4096)
    assert path.read_bytes()[: 8 * 4096] != bytes(8 * 4096)
    bdev.close()
    assert path.read_bytes()[: 8 * 4096] == bytes(8 * 4096)
