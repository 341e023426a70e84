"""Extents of a volume as its members' commands (csrc/extent.h): one call for a whole batch.

Not here: running the commands (``kvdev.block.device``). The Python twin is ``kvdev.block.stripe``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.errors import UsageError
from kvdev.native.index import GrantArray
from kvdev.native.io import IO_DTYPE, IO_GROUP_DTYPE, IoArray, IoGroupArray

Uint64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]


class ExtentMap:
    """Where a volume's blocks lie on its members."""

    def __init__(
        self, *, unit_blocks: int, strip_blocks: int, block_size_bytes: int, handles: Sequence[int]
    ) -> None:
        """``unit_blocks`` divides ``strip_blocks``; ``handles`` are the members' device indices, in order."""
        self._unit_blocks = unit_blocks
        self._member_count = len(handles)
        self._handles = ffi.new("uint32_t[]", list(handles))
        self._map = ffi.new(
            "struct kvdev_extent_map *",
            {
                "unit_blocks": unit_blocks,
                "strip_blocks": strip_blocks,
                "block_bytes": block_size_bytes,
                "member_count": len(handles),
                "handles": self._handles,
            },
        )

    def split(
        self,
        opcode: int,
        slba: Uint64Array,
        block_count: Uint64Array,
        address: Uint64Array,
        *,
        blocks_total: int,
        crc_bytes: int,
        flags: int = 0,
    ) -> tuple[IoArray, IoGroupArray, Int64Array]:
        """Commands, a group per extent, and blocks per member. The commands point into the groups.

        All arrays are contiguous; ``blocks_total`` is at least the sum of ``block_count``.
        """
        count = len(slba)
        room = blocks_total // self._unit_blocks + 2 * count
        ios: IoArray = np.empty(room, dtype=IO_DTYPE)
        groups: IoGroupArray = np.empty(count, dtype=IO_GROUP_DTYPE)
        member_blocks = np.zeros(self._member_count, dtype=np.int64)
        used = lib.kvdev_extents_split(
            self._map,
            opcode,
            flags,
            ffi.from_buffer("uint64_t[]", slba),
            ffi.from_buffer("uint64_t[]", block_count),
            ffi.from_buffer("uint64_t[]", address),
            count,
            crc_bytes,
            ffi.from_buffer("struct kvdev_io_group[]", groups),
            ffi.from_buffer("struct kvdev_io[]", ios),
            room,
            ffi.from_buffer("int64_t[]", member_blocks),
        )
        if used < 0:
            raise UsageError(f"extents: expected at least one block each, {blocks_total} in all")
        return ios[:used], groups, member_blocks


def locate_grants(grants: GrantArray, *, slot_count: int, data_slba: int, slot_blocks: int) -> Uint64Array:
    """The first block of each grant's slot; refuses a slot that the namespace does not have."""
    slba = np.empty(len(grants), dtype=np.uint64)
    code = lib.kvdev_grants_locate(
        ffi.from_buffer("struct kvdev_grant[]", grants),
        len(grants),
        slot_count,
        data_slba,
        slot_blocks,
        ffi.from_buffer("uint64_t[]", slba),
    )
    if code:
        raise UsageError(f"grants: slot_index: expected less than {slot_count}")
    return slba
