"""NH-64: the page checksum that a GPU can compute, defined by this reference; every back end gives the same value.

Definition. The bytes, padded with zeros to a multiple of eight, are little-endian words w[0], w[1], …, of 64 bits.
With k[i] = (i + 1) x 0x9E3779B97F4A7C15, x = w[i] xor k[i], low and high its halves of 32 bits, and modulo 2^64:
term(i) = (2^32 + low) x (2^32 + high); total = sum of all terms; checksum = finish(total, number of bytes).
Not here: CRC32C (``kvdev.native.crc``); fused kernels, which add terms in any order and leave ``finish`` to the host.
"""

# What follows from the definition, and is held by tests:
# - A change inside one aligned 4-byte half is always seen: 2^32 + other half is below 2^33, so times a difference below
#   2^32 it is no multiple of 2^64 (the power of two in the first is at most 32, in the second at most 31).
# - The sum has no order, so any grid of threads gives the same total, and totals of parts add up; the keys, which
#   differ in both halves for all words of a page, make the place of a word count.
# - 2^32 terms in both factors cost nothing: low x high + ((low + high) << 32), one 32-bit multiply-add per word.
# Other changes are missed about once in 2^32 or less. It guards against faults, not an adversary: keys are public.

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHECKSUM_ID = 2
"""Number of the algorithm beside CRC32C, which is 1."""

WORD_SIZE_BYTES = 8
KEY_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: halves of its multiples do not repeat within 2^30 words."""

_MASK = (1 << 64) - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def nh64_total(data: npt.NDArray[np.uint8] | bytes | memoryview, *, first_word_index: int = 0) -> int:
    """The sum of terms of bytes that lie ``first_word_index`` words into the page; parts add up modulo 2^64.

    Every part but a page's last is whole words long.
    """
    octets = np.frombuffer(data, np.uint8)
    padded = np.zeros(-(-octets.size // WORD_SIZE_BYTES) * WORD_SIZE_BYTES, np.uint8)
    padded[: octets.size] = octets
    words = padded.view("<u8")
    keys = (np.arange(words.size, dtype=np.uint64) + np.uint64(first_word_index + 1)) * np.uint64(KEY_STEP)
    mixed = words ^ keys
    low, high = mixed & _LOW, mixed >> _HALF
    terms = low * high + ((low + high) << _HALF)
    return int(np.add.reduce(terms, dtype=np.uint64))


def nh64_finish(total: int, size_bytes: int) -> int:
    """The checksum of ``size_bytes`` bytes with this total: the length counts, and every bit depends on every other.

    One-to-one for a given length, so it misses nothing that the total saw.
    """
    value = ((total & _MASK) ^ (size_bytes * KEY_STEP)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def nh64(data: npt.NDArray[np.uint8] | bytes | memoryview) -> int:
    """The NH-64 checksum of contiguous bytes."""
    octets = np.frombuffer(data, np.uint8)
    return nh64_finish(nh64_total(octets), octets.size)
