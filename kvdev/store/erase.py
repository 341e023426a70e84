"""Erasing blocks of a volume: overwritten with zeroes, flushed, and read back to prove it.

Not here: whose blocks they are (``volume``).
Threads: blocks while it writes and reads; ``progress`` is called from the same thread between pieces.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdev.block.device import aligned_buffer
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError
from kvdev.native.io import OPCODE_READ, OPCODE_WRITE
from kvdev.store.volume_io import VolumeIo
from kvdev.units import MIB

PIECE_BYTES = 32 * MIB
"""Written at once: bounds the buffer, long enough to keep every member busy."""
PIECE_TIMEOUT_S = 60.0

Progress = Callable[[int, int], None]
"""Bytes done, of writing and reading together, and bytes in all."""


def erase_blocks(
    io: VolumeIo,
    slba: int,
    block_count: int,
    *,
    progress: Progress | None = None,
    timeout_s: float = PIECE_TIMEOUT_S,
) -> None:
    """Overwrite a run of blocks and verify by reading that nothing of it is left.

    Raises CorruptionError naming the first block that reads as something else.

    Args:
        timeout_s: bounds each piece, not the whole.
    """
    piece_blocks = PIECE_BYTES // io.block_size_bytes
    buffer = aligned_buffer(min(block_count, piece_blocks) * io.block_size_bytes)
    dirty = io.no_members()
    total = 2 * block_count * io.block_size_bytes
    for opcode in (OPCODE_WRITE, OPCODE_READ):
        for first in range(0, block_count, piece_blocks):
            count = min(piece_blocks, block_count - first)
            part = buffer[: count * io.block_size_bytes]
            members = io.transfer(opcode, slba + first, part, Deadline.after(timeout_s))
            if opcode == OPCODE_WRITE:
                dirty = dirty | members
            elif part.any():
                block = slba + first + int(part.nonzero()[0][0]) // io.block_size_bytes
                raise CorruptionError(
                    f"{io.device.uri}: erase: LBA {block}: expected zeroes, got what was there or other bytes"
                )
            if progress is not None:
                done = (first + count) * io.block_size_bytes
                progress(done + (total // 2 if opcode == OPCODE_READ else 0), total)
        if opcode == OPCODE_WRITE:
            io.flush(dirty, Deadline.after(timeout_s))
