"""The read side of a page table in memory that other processes map; see csrc/pool_view.h.

Not here: the memory itself, and who is told of it (``kvdev.pool``).
Threads: one writer; readers any number, in any process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.native.index import GRANT_DTYPE, GrantArray, Uint8Array, Uint32Array


def hint_count(slot_count: int) -> int:
    """How many 32-bit places the hints of a table take."""
    return int(lib.kvdev_view_hint_count(slot_count))


def _pointer(array: npt.NDArray[Any], kind: str) -> Any:
    return ffi.from_buffer(kind, array)


class PageView:
    """Key to grant, over a table image and hints; both stay the caller's and alive meanwhile."""

    def __init__(
        self, table: Uint8Array, hints: Uint32Array, *, block_bytes: int, slot_count: int, seed: int
    ) -> None:
        assert len(hints) == hint_count(slot_count), "the hints are made for this table"
        self._keep = (ffi.from_buffer("uint8_t[]", table), ffi.from_buffer("uint32_t[]", hints))
        self._view = ffi.new(
            "struct kvdev_view *",
            {
                "table": self._keep[0],
                "hints": self._keep[1],
                "seed": seed,
                "hint_count": len(hints),
                "block_bytes": block_bytes,
                "slot_count": slot_count,
            },
        )

    def fill(self) -> None:
        """Take in every live entry of the image; for the writer."""
        lib.kvdev_view_fill(self._view)

    def insert(self, keys: Uint8Array, grants: GrantArray) -> None:
        """Say where keys are stored now; for the writer."""
        lib.kvdev_view_insert(
            self._view, _pointer(keys, "uint8_t[]"), _pointer(grants, "struct kvdev_grant[]"), len(keys)
        )

    def lookup(self, keys: Uint8Array) -> tuple[GrantArray, int]:
        """A grant per key, ``slot_index`` SLOT_NONE where it is not stored; and how many are."""
        grants = np.empty(len(keys), dtype=GRANT_DTYPE)
        return grants, self._run(keys, grants, is_prefix=False)

    def longest_prefix(self, keys: Uint8Array) -> int:
        """How many keys from the first on are stored."""
        return self._run(keys, np.empty(len(keys), dtype=GRANT_DTYPE), is_prefix=True)

    def _run(self, keys: Uint8Array, grants: GrantArray, *, is_prefix: bool) -> int:
        count = lib.kvdev_view_lookup(
            self._view,
            _pointer(keys, "uint8_t[]"),
            len(keys),
            int(is_prefix),
            _pointer(grants, "struct kvdev_grant[]"),
        )
        return int(count)
