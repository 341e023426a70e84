"""The bytes of replayed pages: determined by the key, different for another key or place."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.errors import UsageError
from kvdev_tools.content import PIECE_LANES, PageContent, request_keys

PIECE_SIZE_BYTES = PIECE_LANES * 8


def lane(key: bytes, index: int) -> int:
    """One lane in plain integers: what the vectorised code must give."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    seed = 0
    for at in range(0, 32, 8):
        seed = mix(seed ^ int.from_bytes(key[at : at + 8], "little"))
    piece, inner = divmod(index, PIECE_LANES)
    position = (inner + 1) * 0x9E3779B97F4A7C15 & mask
    position ^= position >> 29
    return (position ^ mix((seed + piece) & mask)) * (mix(seed ^ 1) | 1) & mask


@pytest.mark.parametrize(
    "size_bytes", [1, 7, 8, 9, PIECE_SIZE_BYTES, PIECE_SIZE_BYTES + 1, 2 * PIECE_SIZE_BYTES]
)
def test_page_equals_the_formula_at_any_size(size_bytes: int) -> None:
    key = request_keys((7,))[0]
    page = PageContent(size_bytes).page(key).tobytes()
    assert len(page) == size_bytes
    for index in {0, 1, size_bytes // 16, (size_bytes - 1) // 8}:
        expected = lane(key.tobytes(), index).to_bytes(8, "little")
        got = page[index * 8 : index * 8 + 8]
        assert got == expected[: len(got)]


def test_pages_of_different_keys_or_places_share_no_piece() -> None:
    content = PageContent(4 * PIECE_SIZE_BYTES)
    pieces = set()
    for key in request_keys(tuple(range(20))):
        pieces |= {row.tobytes() for row in content.page(key).reshape(-1, 512)}
    assert len(pieces) == 20 * 4 * PIECE_SIZE_BYTES // 512


def test_page_is_the_same_again_and_in_another_object() -> None:
    keys = request_keys((1, 2))
    content = PageContent(100_000)
    first = content.page(keys[0]).copy()
    content.page(keys[1])
    assert np.array_equal(content.page(keys[0]), first)
    assert np.array_equal(PageContent(100_000).page(keys[0]), first)


def test_request_keys_follow_from_the_hash_alone() -> None:
    assert request_keys((5, 6)).tolist() == [request_keys((5,))[0].tolist(), request_keys((6,))[0].tolist()]
    assert request_keys(((1 << 64) - 1,)).shape == (1, 32)


def test_bad_sizes_and_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="page_size_bytes"):
        PageContent(0)
    with pytest.raises(UsageError, match="key"):
        PageContent(8).page(np.zeros(16, np.uint8))
