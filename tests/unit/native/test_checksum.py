"""Page checksums of the C core: NH-64 by every implementation is what its definition says."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.errors import UnsupportedError, UsageError
from kvdev.native.checksum import (
    CRC32C,
    NH64,
    PAGE_CHECKSUMS,
    Nh64Impl,
    PageChecksum,
    checksum_named,
    checksum_numbered,
    nh64_impl,
    nh64_impls,
)
from kvdev.native.crc import crc32c
from kvdev.native.index import GRANT_DTYPE
from kvdev_kernels.nh64 import CHECKSUM_ID, nh64

UUID = bytes(range(16))


@pytest.mark.parametrize("impl", nh64_impls())
def test_nh64_when_any_length_and_alignment_then_as_defined(impl: Nh64Impl, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 700, dtype=np.uint8)
    for start in (0, 1, 7):
        for length in range(700 - start):
            part = data[start : start + length]
            assert nh64_impl(impl, part) == nh64(part), (start, length)


@pytest.mark.parametrize("impl", nh64_impls())
def test_nh64_when_a_page_long_then_as_defined(impl: Nh64Impl, rng: np.random.Generator) -> None:
    for data in (rng.integers(0, 256, (1 << 20) + 13, dtype=np.uint8), np.full(65536, 0xFF, np.uint8)):
        assert nh64_impl(impl, data) == nh64(data)


def test_nh64_when_a_processor_lacks_an_implementation_says_which() -> None:
    for impl in set(Nh64Impl) - set(nh64_impls()):
        with pytest.raises(UnsupportedError, match=impl.name):
            nh64_impl(impl, b"x")
    assert Nh64Impl.PORTABLE in nh64_impls()


def test_sums_of_many_pages_are_those_of_each(rng: np.random.Generator) -> None:
    pages = rng.integers(0, 256, (5, 4100), dtype=np.uint8)
    places = np.array([page.ctypes.data for page in pages], dtype=np.uint64)
    assert CRC32C.sums(places, 4100).tolist() == [crc32c(page) for page in pages]
    assert NH64.sums(places, 4100).tolist() == [nh64(page) for page in pages]


@pytest.mark.parametrize("checksum", PAGE_CHECKSUMS.values(), ids=list(PAGE_CHECKSUMS))
def test_entry_checksum_names_page_place_and_write_and_gives_the_sum_back(
    checksum: PageChecksum, rng: np.random.Generator
) -> None:
    keys = rng.integers(0, 256, (3, 32), dtype=np.uint8)
    sums = checksum.zeros(3)
    sums[:] = rng.integers(0, 1 << 32, 3)
    grants = np.zeros(3, dtype=GRANT_DTYPE)
    grants["generation"], grants["length"] = [7, 8, 9], 100
    for index in range(3):
        grants["checksum"][index] = checksum.entry_checksum(
            UUID, keys[index].tobytes(), 7 + index, 100, int(sums[index])
        )
    assert checksum.grant_sums(UUID, keys, grants).tolist() == sums.tolist()
    assert checksum.verify(UUID, keys, grants, sums, length=100)[0].tolist() == [True] * 3
    other = grants.copy()
    other["generation"] += 1
    wrong = [
        checksum.verify(UUID, keys[::-1].copy(), grants, sums, length=100),
        checksum.verify(UUID[::-1], keys, grants, sums, length=100),
        checksum.verify(UUID, keys, other, sums, length=100),
        checksum.verify(UUID, keys, grants, checksum.zeros(3), length=100),
        checksum.verify(UUID, keys, grants, sums, length=99),
    ]
    assert [count for _, count in wrong] == [1, 0, 0, 0, 0]  # of three turned round the middle one stays


def test_numbers_and_names_that_are_none_are_refused() -> None:
    assert NH64.number == CHECKSUM_ID and checksum_numbered("x", 1) is CRC32C
    with pytest.raises(UsageError, match="checksum: expected one of crc32c, nh64, got 'md5'"):
        checksum_named("md5")
    text = r"v#kv: page checksum: expected one of 1 \(crc32c\), 2 \(nh64\), got 3; use a kvdev that knows it"
    with pytest.raises(UnsupportedError, match=text):
        checksum_numbered("v#kv", 3)
