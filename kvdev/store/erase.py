"""Deleting a KV namespace, and erasing what it held: overwritten with zeroes, flushed, and read back to prove it.

One that is being erased is nobody's any more: its record says so before the first block goes, and how far it has
come. Whoever deletes it again goes on there.
Not here: who may delete it (``claim``).
Spec: docs/on-disk-format.md, Erasing.
Threads: blocks while it writes and reads; ``progress`` is called from the same thread between pieces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdev.block.device import aligned_buffer
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError, UsageError
from kvdev.native.checksum import CRC32C
from kvdev.native.io import OPCODE_READ, OPCODE_WRITE
from kvdev.store.claim import claim, leave, wait_fenced
from kvdev.store.fence import Fence
from kvdev.store.lease import Lease
from kvdev.store.lock import LockHeldError
from kvdev.store.record_keeper import RecordKeeper
from kvdev.store.superblock import FLAG_CLEAN, RECORD_ERASING, RECORD_FREE, Record
from kvdev.store.throttle import Throttle
from kvdev.store.volume_io import VolumeIo
from kvdev.units import MIB

if TYPE_CHECKING:
    from kvdev.store.volume import Volume

PIECE_BYTES = 32 * MIB
"""Written at once: bounds the buffer, long enough to keep every member busy."""
PIECE_TIMEOUT_S = 60.0
NOTE_MIB = 1024
"""So much is erased anew, at most, after an interruption."""
STEP_TIMEOUT_S = 30.0
"""For each step beside the pieces, whose number nobody can bound beforehand."""
VOLUME_LOCK_PAUSE_S = 0.05

Progress = Callable[[int, int], None]
"""Bytes that are erased and verified, and bytes in all."""


def delete_namespace(
    volume: Volume,
    name: str,
    *,
    erase: bool = False,
    takeover: bool = False,
    bytes_per_s: int | None = None,
    progress: Progress | None = None,
    deadline: Deadline,
) -> int:
    """Remove a KV namespace and free its extents; refused while it may have an owner. Returns the bytes erased.

    Args:
        takeover: as in ``Volume.open_namespace``.
        erase: overwrite everything it held and verify that before its extents are free. Interrupted at any point, the
            namespace is whole, or it is being erased: then it can only be deleted, with ``erase``, which goes on.
        bytes_per_s: write and read no faster than this, together.
        deadline: until erasing begins; each piece of it has its own.
    """
    throttle = Throttle(bytes_per_s)
    record = next((each for each in volume.records(deadline=deadline) if each.name == name), None)
    if record is None or not record.is_erasing:
        with volume.namespace_held(name, deadline, takeover=takeover) as current:
            if not erase:
                volume.write_both(_freed(current), deadline)
                return 0
            # From here on nobody opens it: what its pages were is half there.
            record = replace(
                current, state=RECORD_ERASING, flags=FLAG_CLEAN, lease_ms=0, lease_key=0, erased_mib=0
            )
            volume.write_both(record, deadline)
    elif not erase:
        raise UsageError(
            f"{volume.name}#{name}: is being erased, {record.erased_mib} MiB of it so far; erase it to its end: "
            f"kvdev namespace delete --erase"
        )
    lock = volume.lock_namespace(record)
    try:
        return _Eraser(volume, record, throttle, takeover=takeover, deadline=deadline).run(progress)
    finally:
        lock.release()


def _freed(record: Record) -> Record:
    """The record of a place that is free."""
    return replace(
        record,
        state=RECORD_FREE,
        flags=FLAG_CLEAN,
        geometry_copy=b"",
        lease_ms=0,
        lease_key=0,
        priority=0,
        reserve_pages=0,
        salt_mark=0,
        checksum_number=CRC32C.number,
        erased_mib=0,
        further=(),
        scrub_slot=0,
        scrubbed_unix_s=0,
    )


class _Eraser:
    """Owns a namespace that is being erased; the caller has its lock."""

    def __init__(
        self, volume: Volume, record: Record, throttle: Throttle, *, takeover: bool, deadline: Deadline
    ) -> None:
        """Become its owner, so that nobody else erases or frees it meanwhile."""
        self._volume = volume
        self._throttle = throttle
        self._never = threading.Event()
        self._lease = Lease(f"{volume.name}#{record.name}", fence=Fence(volume.members))
        directory = volume.directory
        place = directory.read(record.record_index, deadline)
        claim(directory, place, self._lease, volume.members, takeover=takeover, deadline=deadline)
        wait_fenced(self._lease, deadline)
        place = directory.read(record.record_index, deadline)
        current = place.record
        if current is None or not current.is_erasing or current.namespace_uuid != record.namespace_uuid:
            raise UsageError(f"{self._lease.what}: was erased meanwhile")
        self._keeper = RecordKeeper(directory, place, self._lease)
        self._keeper.write(deadline, **self._lease.fields())

    def run(self, progress: Progress | None) -> int:
        record = self._keeper.record
        total = record.block_count * self._volume.block_size_bytes
        done_mib = noted_mib = record.erased_mib
        try:
            for slba, block_count, done in self._pieces(record):
                if self._lease.is_due or done_mib - noted_mib >= NOTE_MIB:
                    self._note(erased_mib=done_mib)
                    noted_mib = done_mib
                erase_blocks(self._volume.io, slba, block_count, timeout_s=self._piece_timeout_s)
                self._throttle.pace(2 * block_count * self._volume.block_size_bytes, self._never)
                done_mib = done // MIB
                if progress is not None:
                    progress(done, total)
            self._free()
        except BaseException:
            # It is the next one's to go on with, at once.
            with contextlib.suppress(KvdevError):
                self._note(erased_mib=done_mib, flags=FLAG_CLEAN, lease_ms=0, lease_key=0)
            raise
        finally:
            leave(self._lease.fence, self._volume.directory, Deadline.after(STEP_TIMEOUT_S))
        return total

    def _note(self, **fields: object) -> None:
        self._keeper.write(Deadline.after(STEP_TIMEOUT_S), **fields)

    @property
    def _piece_timeout_s(self) -> float:
        """Where only time keeps a lost owner out, nothing is written after its lease has ended."""
        if self._lease.fence.kind != "time":
            return PIECE_TIMEOUT_S
        return min(PIECE_TIMEOUT_S, self._lease.remaining_s)

    def _pieces(self, record: Record) -> Iterator[tuple[int, int, int]]:
        """First block and count of what is left, one extent after the other; and bytes that are done then."""
        block = self._volume.block_size_bytes
        rate = self._throttle.bytes_per_s
        piece_bytes = PIECE_BYTES if rate is None else max(MIB, min(PIECE_BYTES, rate // MIB * MIB))
        before, start = 0, record.erased_mib * MIB
        for extent in record.extents:
            end = before + extent.block_count * block
            at = max(before, start)
            while at < end:
                # To the next whole number of MiB, which is what the record can tell.
                stop = min(end, (at // piece_bytes + 1) * piece_bytes)
                yield extent.slba + (at - before) // block, (stop - at) // block, stop
                at = stop
            before = end

    def _free(self) -> None:
        """Both copies, under the volume's lock: whoever gets the place next writes there at once."""
        limit = Deadline.after(STEP_TIMEOUT_S)
        pause = threading.Event()
        while True:
            try:
                volume_lock = self._volume.lock_volume(limit)
                break
            except LockHeldError:
                limit.check(f"{self._lease.what}: is erased; the volume is being changed by another process")
                pause.wait(VOLUME_LOCK_PAUSE_S)
        try:
            # With what stands behind the record, the geometry; nobody else writes there, as the record is ours.
            self._keeper.check(limit)
            self._volume.write_both(_freed(self._keeper.record), limit)
        finally:
            volume_lock.release()


def erase_blocks(
    io: VolumeIo,
    slba: int,
    block_count: int,
    *,
    timeout_s: float = PIECE_TIMEOUT_S,
) -> None:
    """Deallocate and overwrite a run of blocks, and verify by reading that nothing of it is left.

    Raises CorruptionError naming the first block that reads as something else.

    Args:
        timeout_s: bounds each piece, not the whole.
    """
    # What a device keeps beside (its own copies, flash pages that were written before) it may drop now.
    io.deallocate(slba, block_count, Deadline.after(timeout_s))
    piece_blocks = PIECE_BYTES // io.block_size_bytes
    buffer = aligned_buffer(min(block_count, piece_blocks) * io.block_size_bytes)
    dirty = io.no_members()
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
        if opcode == OPCODE_WRITE:
            io.flush(dirty, Deadline.after(timeout_s))
