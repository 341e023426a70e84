"""Page buffers: addresses of arrays and address lists, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.buffers import AddressedPages, page_addresses
from kvdev.errors import UsageError


def test_page_addresses_when_array_then_row_starts() -> None:
    array = np.zeros((3, 64), np.uint8)
    expected = [array.ctypes.data + 64 * i for i in range(3)]
    assert page_addresses(array, 64).tolist() == expected
    assert page_addresses(array[::2], 64).tolist() == expected[::2]
    assert page_addresses(array[::-1], 64).tolist() == expected[::-1]
    assert page_addresses(array[:0], 64).tolist() == []


def test_page_addresses_when_rows_are_padded_then_strides_count() -> None:
    array = np.zeros((4, 128), np.uint8)[:, :100]
    assert np.diff(page_addresses(array, 100)).tolist() == [128] * 3


def test_page_addresses_when_addressed_then_same() -> None:
    array = np.zeros((2, 64), np.uint8)
    pages = AddressedPages(page_addresses(array, 64), 64, array)
    assert page_addresses(pages, 64) is pages.addresses
    assert page_addresses(pages, 32) is pages.addresses
    with pytest.raises(UsageError, match="at least 65 bytes, got 64"):
        page_addresses(pages, 65)


def test_page_addresses_when_array_is_wrong_then_refused() -> None:
    array = np.zeros((2, 64), np.uint8)
    with pytest.raises(UsageError, match=r"\(n, 65\) uint8"):
        page_addresses(array, 65)
    with pytest.raises(UsageError, match="uint8"):
        page_addresses(array.view(np.int8), 64)
    with pytest.raises(UsageError, match="contiguous rows"):
        page_addresses(np.zeros((2, 128), np.uint8)[:, ::2], 64)
    with pytest.raises(UsageError, match="bytes"):
        page_addresses(b"abc", 64)  # type: ignore[arg-type]
    array.flags.writeable = False
    assert page_addresses(array, 64).size == 2
    with pytest.raises(UsageError, match="read-only"):
        page_addresses(array, 64, is_written=True)


def test_page_addresses_when_written_rows_overlap_then_refused() -> None:
    window = np.lib.stride_tricks.as_strided(np.zeros(128, np.uint8), (2, 64), (32, 1), writeable=True)
    with pytest.raises(UsageError, match="overlap"):
        page_addresses(window, 64, is_written=True)


def test_addressed_pages_when_null_or_mistyped_then_refused() -> None:
    with pytest.raises(UsageError, match="got 0"):
        AddressedPages(np.zeros(1, np.uint64), 64, None)
    with pytest.raises(UsageError, match="uint64"):
        AddressedPages(np.ones(1, np.int64), 64, None)
