"""CRC32C: every implementation against known answers and against the Python twin."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.errors import UnsupportedError
from kvdev.native import crc
from kvdev.native.crc import Crc32cImpl
from kvdev.wire.crc32c import crc32c as crc32c_twin

KNOWN = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes.fromhex("050118001c000000") + bytes(16), int.from_bytes(bytes.fromhex("9b120389"), "little")),
]
IMPLS = crc.available_impls()
STREAM_EDGES = [3 * 512, 3 * 4096]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_impl_when_known_answer_then_equal(impl: Crc32cImpl, data: bytes, expected: int) -> None:
    assert crc.crc32c_impl(impl, data) == expected
    assert crc.crc32c(data) == expected
    assert crc32c_twin(data) == expected


@pytest.mark.parametrize("impl", IMPLS)
def test_impl_when_any_length_and_alignment_then_as_twin(impl: Crc32cImpl, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 1400, dtype=np.uint8).tobytes()
    for start in (0, 1, 7):
        expected = 0x12345678
        for length in range(1400 - start):
            assert crc.crc32c_impl(impl, memoryview(data)[start : start + length], 0x12345678) == expected, (
                length
            )
            expected = crc32c_twin(data[start + length : start + length + 1], expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_impl_when_around_block_edges_then_as_table(impl: Crc32cImpl, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 65536 + 64, dtype=np.uint8)
    for edge in [*STREAM_EDGES, 2 * STREAM_EDGES[1], 65536]:
        for length in range(edge - 3, edge + 4):
            expected = crc.crc32c_impl(Crc32cImpl.TABLE, data[:length], 99)
            assert crc.crc32c_impl(impl, data[:length], 99) == expected, length
            assert crc.crc32c(data[:length], 99) == expected, length


def test_crc32c_when_cut_anywhere_then_chains(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 700, dtype=np.uint8).tobytes()
    whole = crc.crc32c(data)
    for cut in range(len(data) + 1):
        assert crc.crc32c(data[cut:], crc.crc32c(data[:cut])) == whole
        assert crc.crc32c_combine(crc.crc32c(data[:cut]), crc.crc32c(data[cut:]), len(data) - cut) == whole


def test_combine_when_lengths_are_huge_then_zeros_add_up() -> None:
    """Appending 2^40 zero bytes twice is appending 2^41 of them."""
    register = 0xDEADBEEF
    once = crc.crc32c_combine(register, 0, 1 << 40)
    assert crc.crc32c_combine(once, 0, 1 << 40) == crc.crc32c_combine(register, 0, 1 << 41)
    assert crc.crc32c_combine(register, 0, 0) == register


def test_crc32c_at_when_address_then_as_buffer(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 5000, dtype=np.uint8)
    assert crc.crc32c_at(int(data.ctypes.data) + 3, 4000, 5) == crc.crc32c(data[3:4003], 5)


def test_impl_when_processor_lacks_it_then_unsupported() -> None:
    missing = [impl for impl in Crc32cImpl if impl not in IMPLS]
    assert missing, "no processor has both x86 and Arm instructions"
    with pytest.raises(UnsupportedError) as caught:
        crc.crc32c_impl(missing[0], b"x")
    assert caught.value.feature == missing[0].name
    assert crc.best_impl() in IMPLS
