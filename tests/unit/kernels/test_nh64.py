"""NH-64: known answers from the definition in plain integers, what it always sees, and how parts add up."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev_kernels.nh64 import KEY_STEP, nh64, nh64_finish, nh64_total

MASK = (1 << 64) - 1


def total_by_definition(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    total = 0
    for index in range(len(data) // 8):
        key = (index + 1) * KEY_STEP & MASK
        mixed = int.from_bytes(data[8 * index : 8 * index + 8], "little") ^ key
        total += (2**32 + (mixed & 0xFFFFFFFF)) * (2**32 + (mixed >> 32))
    return total & MASK


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (bytes(1), 0xEBD73FA35F972F68),
        (bytes(8), 0xE5F6AEF1FC9256EA),
        (b"123456789", 0xA986FF8E698CE24D),
        (bytes(range(256)) * 256, 0x375D9BEA260B811A),
    ],
)
def test_nh64_when_known_answer_then_equal(data: bytes, expected: int) -> None:
    assert nh64(data) == expected


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 17, 4096, 9216, 32769])
def test_total_when_any_length_then_as_defined(size: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
    assert nh64_total(data) == total_by_definition(data)


def test_total_when_cut_into_parts_then_they_add_up(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 1003, dtype=np.uint8)
    for cut in range(0, 1003, 8):
        parts = nh64_total(data[:cut]) + nh64_total(data[cut:], first_word_index=cut // 8)
        assert parts & MASK == nh64_total(data)


def test_checksum_when_one_half_word_changes_then_it_differs(rng: np.random.Generator) -> None:
    # Every bit, and the differences most likely to vanish modulo 2^64: multiples of high powers of two.
    for data in (bytes(64), b"\xff" * 64, rng.integers(0, 256, 64, dtype=np.uint8).tobytes()):
        expected = nh64(data)
        for half in range(16):
            word = int.from_bytes(data[4 * half : 4 * half + 4], "little")
            for other in {word ^ (1 << bit) for bit in range(32)} | {0, 1, 1 << 31, 3 << 30, 0xFFFFFFFF}:
                changed = data[: 4 * half] + other.to_bytes(4, "little") + data[4 * half + 4 :]
                assert (nh64(changed) == expected) == (changed == data)


def test_term_when_the_other_half_is_a_power_of_two_then_no_change_is_missed() -> None:
    # The factor 2^32 + half has the most factors of two where half is 0 or a power of two.
    for half in [0, *(1 << bit for bit in range(32))]:
        for difference in [1 << bit for bit in range(32)]:
            assert (2**32 + half) * difference % 2**64


def test_checksum_when_words_or_sectors_trade_places_then_it_differs(rng: np.random.Generator) -> None:
    lone = np.zeros(32768, np.uint8)
    lone[0] = 1
    assert len({nh64(np.roll(lone, place)) for place in range(0, 32768, 8)}) == 32768 // 8
    pages = rng.integers(0, 256, 8 * 4096, dtype=np.uint8)
    swapped = pages.reshape(8, 4096)[[0, 2, 1, 3, 4, 5, 6, 7]].reshape(-1)
    assert nh64(swapped) != nh64(pages)


def test_checksum_when_only_the_length_differs_then_it_differs() -> None:
    values = {nh64(bytes(size)) for size in range(65)}
    assert len(values) == 65


def test_finish_when_totals_differ_then_checksums_differ() -> None:
    values = {nh64_finish(1 << bit, 8) for bit in range(64)} | {nh64_finish(0, 8)}
    assert len(values) == 65
