"""What a replayed page holds: bytes that follow from its key and the position alone, made and compared fast.

A page is cut into pieces of ``PIECE_LANES`` 64-bit lanes; lane i of piece p is (h(i) xor mix(key, p)) times an odd
number made of the key, so that a lost, shifted, stale or foreign run differs wherever it lies. Independent of
what was stored: the expected bytes are made anew for every comparison.
Not here: where an engine keeps them (``kvdev_tools.tensors``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdev.errors import UsageError
from kvdev.keys import KEY_SIZE_BYTES, KeyArray, PageKeys

SALT = "kvdev replay"
# 64 KiB a piece: the lanes, the result and one temporary stay in the second-level cache.
PIECE_LANES = 8192
_LANE_SIZE_BYTES = 8
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """A bijection of 64-bit numbers in which every input bit reaches every output bit (xor-shift, multiply)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_keys(hash_ids: tuple[int, ...], keys: PageKeys | None = None) -> KeyArray:
    """The page keys of a request's blocks: derived from the trace's prefix hashes, and a tenant's salt if any."""
    return (keys or PageKeys(SALT)).derive(hash_id.to_bytes(8, "little") for hash_id in hash_ids)


class PageContent:
    """Makes the canonical bytes of pages of one size; holds 64 KiB of lanes and one page of scratch."""

    def __init__(self, page_size_bytes: int) -> None:
        if page_size_bytes < 1:
            raise UsageError(f"page_size_bytes: expected at least 1, got {page_size_bytes}")
        self.page_size_bytes = page_size_bytes
        with np.errstate(over="ignore"):
            index = np.arange(1, PIECE_LANES + 1, dtype=np.uint64)
            lanes = index * np.uint64(0x9E3779B97F4A7C15)
            self._lanes = lanes ^ (lanes >> np.uint64(29))
        lane_count = -(-page_size_bytes // _LANE_SIZE_BYTES)
        self._scratch = np.empty(lane_count, dtype=np.uint64)

    def page(self, key: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The page's canonical bytes, in scratch memory that the next call overwrites."""
        if key.shape != (KEY_SIZE_BYTES,):
            raise UsageError(f"key: expected {KEY_SIZE_BYTES} bytes, got shape {key.shape}")
        words = [int(word) for word in np.ascontiguousarray(key).view("<u8")]
        seed = 0
        for word in words:
            seed = _mix(seed ^ word)
        odd = np.uint64(_mix(seed ^ 1) | 1)
        out = self._scratch
        for piece, start in enumerate(range(0, len(out), PIECE_LANES)):
            part = out[start : start + PIECE_LANES]
            np.bitwise_xor(self._lanes[: len(part)], np.uint64(_mix(seed + piece & _MASK)), out=part)
            np.multiply(part, odd, out=part)
        return out.view(np.uint8)[: self.page_size_bytes]
