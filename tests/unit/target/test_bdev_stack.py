"""Linear and filter devices of the core, limits and histograms, by themselves."""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest

from kvdev.native.target import BdevOp, InjectionType, NativeBdev, NativeInjection

BLOCK = 512


def memory(block_count: int = 64) -> NativeBdev:
    return NativeBdev.memory(block_size_bytes=BLOCK, block_count=block_count)


def test_linear_device_equals_its_pieces_of_the_base(rng: np.random.Generator) -> None:
    base = memory()
    pieces = [(40 * BLOCK, 8 * BLOCK), (0, 4 * BLOCK), (60 * BLOCK, 4 * BLOCK)]
    linear = NativeBdev.linear(base, pieces)
    assert (linear.info().block_count, linear.info().block_size_bytes) == (16, BLOCK)
    model = bytearray(16 * BLOCK)
    for _ in range(200):
        first, count = int(rng.integers(0, 16)), int(rng.integers(1, 17))
        count = min(count, 16 - first)
        data = rng.integers(0, 256, count * BLOCK, dtype=np.uint8).tobytes()
        linear.write(first * BLOCK, data)
        model[first * BLOCK : (first + count) * BLOCK] = data
        assert linear.read(0, 16 * BLOCK) == model
    parts = [base.read(offset, length) for offset, length in pieces]
    assert b"".join(parts) == model
    outside = base.read(4 * BLOCK, 36 * BLOCK) + base.read(48 * BLOCK, 12 * BLOCK)
    assert not any(outside)
    linear.deallocate(7 * BLOCK, 3 * BLOCK)
    model[7 * BLOCK : 10 * BLOCK] = bytes(3 * BLOCK)
    assert linear.read(0, 16 * BLOCK) == model
    linear.flush()


@pytest.mark.parametrize(
    "pieces",
    [[], [(0, 0)], [(0, BLOCK + 1)], [(1, BLOCK)], [(63 * BLOCK, 2 * BLOCK)], [(1 << 63, BLOCK)]],
)
def test_linear_device_refuses_pieces_that_are_none(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(OSError, match="linear bdev") as caught:
        NativeBdev.linear(memory(), pieces)
    assert caught.value.errno == errno.EINVAL


def test_linear_device_for_reading_refuses_writes() -> None:
    linear = NativeBdev.linear(memory(), [(0, BLOCK)], is_readonly=True)
    assert linear.info().is_readonly
    with pytest.raises(OSError) as caught:
        linear.write(0, bytes(BLOCK))
    assert caught.value.errno == errno.EROFS
    assert linear.read(0, BLOCK) == bytes(BLOCK)


def test_injected_failures_count_down_and_end() -> None:
    bdev = NativeBdev.filter(memory())
    bdev.inject(BdevOp.READ, NativeInjection(InjectionType.FAILURE, count=2))
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            bdev.read(0, BLOCK)
        assert caught.value.errno == errno.EIO
        bdev.write(0, bytes(BLOCK))
    assert bdev.read(0, BLOCK) == bytes(BLOCK)
    bdev.inject(BdevOp.READ, NativeInjection(InjectionType.FAILURE, count=5))
    bdev.inject(BdevOp.READ, NativeInjection(count=0))
    assert bdev.read(0, BLOCK) == bytes(BLOCK)
    assert (bdev.stat().error_count, bdev.stat().read_count) == (2, 2)


@pytest.mark.parametrize("op", list(BdevOp))
def test_injection_hits_its_operation_only(op: BdevOp) -> None:
    bdev = NativeBdev.filter(memory())
    bdev.inject(op, NativeInjection(InjectionType.FAILURE, count=1))
    failed = []
    for each, run in (
        (BdevOp.READ, lambda: bdev.read(0, BLOCK)),
        (BdevOp.WRITE, lambda: bdev.write(0, bytes(BLOCK))),
        (BdevOp.FLUSH, bdev.flush),
        (BdevOp.DEALLOCATE, lambda: bdev.deallocate(0, BLOCK)),
    ):
        try:
            run()
        except OSError:
            failed.append(each)
    assert failed == [op]


def test_corrupt_data_changes_one_byte_of_what_is_read_or_kept() -> None:
    base = memory()
    bdev = NativeBdev.filter(base)
    injection = NativeInjection(InjectionType.CORRUPT, count=1, corrupt_offset=7, corrupt_value=0x80)
    bdev.inject(BdevOp.READ, injection)
    assert bdev.read(0, BLOCK) == bytes(7) + b"\x80" + bytes(BLOCK - 8)
    assert bdev.read(0, BLOCK) == bytes(BLOCK)
    bdev.inject(BdevOp.WRITE, injection)
    bdev.write(0, b"\x01" * BLOCK)
    assert base.read(0, BLOCK) == b"\x01" * 7 + b"\x81" + b"\x01" * (BLOCK - 8)
    bdev.inject(BdevOp.READ, NativeInjection(InjectionType.CORRUPT, 1, corrupt_offset=BLOCK, corrupt_value=1))
    assert bdev.read(0, BLOCK) == base.read(0, BLOCK)


def test_filter_methods_are_for_filters() -> None:
    bdev = memory()
    calls: list[Callable[[], None]] = [
        lambda: bdev.inject(BdevOp.READ, NativeInjection(count=1)),
        bdev.resume,
        lambda: bdev.set_delay(read_ns_avg=1, read_ns_p99=1, write_ns_avg=1, write_ns_p99=1),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EINVAL


def test_device_is_held_by_its_own_limits_and_by_what_is_below() -> None:
    base = memory()
    linear = NativeBdev.linear(base, [(0, BLOCK)])
    assert not base.is_held and not linear.is_held
    base.set_limits(rw_ios=5)
    base.set_held(False)
    linear.set_held(base.is_held)
    assert base.is_held and linear.is_held
    base.set_limits()
    base.set_held(False)
    linear.set_held(base.is_held)
    assert not base.is_held and not linear.is_held
    filter_bdev = NativeBdev.filter(base)
    assert filter_bdev.is_held and NativeBdev.raid0((filter_bdev,), strip_size_bytes=BLOCK).is_held
    filter_bdev.set_held(False)
    assert filter_bdev.is_held


def test_histogram_counts_each_operation_once_from_its_start_to_its_end() -> None:
    bdev = memory()
    with pytest.raises(OSError):
        bdev.histogram()
    bdev.read(0, BLOCK)
    bdev.start_histogram()
    for _ in range(10):
        bdev.read(0, BLOCK)
    bdev.write(0, bytes(BLOCK))
    assert sum(bdev.histogram()) == 11
    bdev.start_histogram(BdevOp.WRITE)
    bdev.read(0, BLOCK)
    bdev.write(0, bytes(BLOCK))
    assert sum(bdev.histogram()) == 1
    bdev.stop_histogram()
    with pytest.raises(OSError) as caught:
        bdev.histogram()
    assert caught.value.errno == errno.EFAULT
