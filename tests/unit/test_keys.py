"""Page keys: golden vectors that must never change, and refusals."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvdev.errors import UsageError
from kvdev.keys import check_keys, derive_keys

GOLDEN = [
    (b"", b"", b"\x00", "25c2fc3ba3b30b41ba76a92f6472bfcbefc2750cfaf5d0504c37604a01c8ca9f"),
    (
        b"tenant-1",
        b"main",
        b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f",
        "fd43b5e1ba051308481546962196591459c32d48ac58c825434461934b5327ce",
    ),
    (
        b"s\xc3\xa4lt",
        b"lora:7",
        b"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "6eb2e1e62a283793ea04a9c6052917c878fbf1790f01df32e955b4bff7ab238d",
    ),
]


@pytest.mark.parametrize(("salt", "group", "engine_key", "expected"), GOLDEN)
def test_derive_keys_equals_the_golden_vector(
    salt: bytes, group: bytes, engine_key: bytes, expected: str
) -> None:
    assert derive_keys(salt, group, [engine_key])[0].tobytes().hex() == expected


def test_derive_keys_equals_the_written_definition() -> None:
    message = b"\x02\x00ab\x01\x00c" + b"key"
    expected = hashlib.blake2b(message, digest_size=32, person=b"kvdev page key 1").digest()
    assert derive_keys("ab", b"c", [b"key"])[0].tobytes() == expected


def test_derive_keys_when_batch_then_shape_order_and_rows_match() -> None:
    rows = np.arange(5 * 16, dtype=np.uint8).reshape(5, 16)
    keys = derive_keys(b"s", "g", rows)
    assert keys.shape == (5, 32) and keys.dtype == np.uint8 and check_keys(keys) is keys
    assert np.array_equal(keys, derive_keys(b"s", "g", [row.tobytes() for row in rows]))
    assert len({k.tobytes() for k in keys}) == 5
    assert derive_keys(b"s", "g", []).shape == (0, 32)


def test_derive_keys_when_parts_shift_then_keys_differ() -> None:
    assert not np.array_equal(derive_keys(b"ab", b"c", [b"k"]), derive_keys(b"a", b"bc", [b"k"]))
    assert not np.array_equal(derive_keys(b"a", b"b", [b"ck"]), derive_keys(b"a", b"bc", [b"k"]))


def test_derive_keys_when_input_is_bad_then_error_names_it() -> None:
    with pytest.raises(UsageError, match="salt"):
        derive_keys(b"x" * 65536, b"", [b"k"])
    with pytest.raises(UsageError, match="cache_group"):
        derive_keys(b"", b"x" * 65536, [b"k"])
    with pytest.raises(UsageError, match=r"engine_keys\[1\]"):
        derive_keys(b"", b"", [b"k", b""])


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros((2, 31), np.uint8),
        np.zeros(32, np.uint8),
        np.zeros((2, 32), np.int8),
        np.zeros((2, 64), np.uint8)[:, ::2],
    ],
)
def test_check_keys_when_shape_is_wrong_then_refused(keys: np.ndarray) -> None:
    with pytest.raises(UsageError, match="keys"):
        check_keys(keys)
