"""Another quota for a KV namespace, larger or smaller; its pages stay where they are, or move.

Slots never change their place: the table of the new size is written where nothing of the old state lies, and one
record switches. Before a smaller one is written the slots that go are emptied as their owner would do it: by eviction
and by moving pages, durable by the ordinary order of writes.
Not here: what a namespace of a size takes (``plan``); the order of writes of an owner (``namespace``).
Spec: docs/on-disk-format.md, Resizing.
Threads: blocks while it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvdev.block.device import aligned_buffer
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, UsageError
from kvdev.native.index import (
    ENTRY_DTYPE,
    MEDIA_HEADER_DTYPE,
    EntryArray,
    GrantArray,
    Uint8Array,
    entries_per_block,
    format_table,
    seal,
)
from kvdev.native.io import OPCODE_WRITE, address_of
from kvdev.store.check import grants_of
from kvdev.store.extents import place_resized
from kvdev.store.geometry_block import build_geometry, read_geometry
from kvdev.store.media import HEADER_SIZE_BYTES, UNIT_BYTES
from kvdev.store.namespace import KvNamespace
from kvdev.store.plan import NamespacePlan
from kvdev.store.superblock import FURTHER_EXTENT_COUNT_MAX, Record
from kvdev.store.volume import Volume
from kvdev.store.volume_io import MemberMask
from kvdev.units import MIB, format_size

MOVE_BYTES = 16 * MIB
"""Pages copied at once: bounds the buffer."""
PIECE_BYTES = MIB
"""Metadata written at once."""


@dataclass(frozen=True)
class ResizeReport:
    """What became of the namespace."""

    quota_pages: int
    extent_bytes: int
    evicted_pages: int
    moved_pages: int


def resize_namespace(
    volume: Volume,
    name: str,
    *,
    quota_pages: int,
    journal_block_count: int | None = None,
    deadline: Deadline,
) -> ResizeReport:
    """Give a namespace another quota; refused while it may have an owner.

    Whatever interrupts it, the namespace has its old size or its new one, and every page that was not evicted.
    Raises CapacityError where there is no room for what it would have more of.
    """
    info = volume.namespace(name, deadline=deadline)
    if quota_pages < info.record.reserve_pages:
        raise UsageError(
            f"{volume.name}#{name}: quota: expected at least its reserve of {info.record.reserve_pages} pages, got "
            f"{quota_pages}; lower the reserve first"
        )
    plan = volume.plan(info.geometry, quota_pages=quota_pages, journal_block_count=journal_block_count)
    # What cannot be is refused before anything is evicted.
    _place(volume, info.record, plan, deadline)
    namespace = volume.open_namespace(name, deadline=deadline)
    try:
        evicted, moved = vacate(namespace, plan.slot_count, quota_pages, deadline=deadline)
        namespace.close(deadline=deadline)
    finally:
        namespace.abandon()
    entries = namespace.entries()
    with volume.namespace_held(name, deadline) as current:
        if not current.is_clean or current.epoch != namespace.epoch:
            raise UsageError(f"{namespace.what}: was opened meanwhile; stop its owner and resize it again")
        record = _place(volume, current, plan, deadline)
        _write_metadata(volume, current, record, entries, deadline)
        volume.write_both(record, deadline)
    return ResizeReport(quota_pages, record.block_count * volume.block_size_bytes, evicted, moved)


# --- emptying the slots that go --------------------------------------------------------------


def vacate(
    namespace: KvNamespace, slot_count: int, quota_pages: int, *, deadline: Deadline
) -> tuple[int, int]:
    """Have at most ``quota_pages`` pages, all in the first ``slot_count`` slots; returns how many went and moved.

    Pages are handed no slots behind those any more, as long as the namespace is open.
    """
    evicted = namespace.shrink(slot_count, quota_pages, deadline=deadline)
    moved = 0
    entries = namespace.entries()
    behind = entries[entries["slot_index"] >= slot_count]
    batch_count = min(max(1, MOVE_BYTES // namespace.page_size_bytes), namespace.batch_limit)
    for start in range(0, len(behind), batch_count):
        moved += _move(
            namespace, grants_of(behind[start : start + batch_count]), behind[start:][:batch_count], deadline
        )
    return evicted, moved


def _move(namespace: KvNamespace, source: GrantArray, entries: EntryArray, deadline: Deadline) -> int:
    """Copy pages to slots that stay, and let them be found there; what cannot be read whole is withdrawn."""
    page_bytes = namespace.page_size_bytes
    buffer = aligned_buffer(len(source) * page_bytes)
    places = np.uint64(address_of(buffer)) + np.arange(len(source), dtype=np.uint64) * np.uint64(page_bytes)
    result = namespace.page_io.read(source, places, deadline=deadline, may_copy=True)
    is_good = namespace.verify(np.ascontiguousarray(entries["key"]), source, result.sums) & (
        result.error == 0
    )
    if not is_good.all():
        namespace.withdraw(source[~is_good], deadline=deadline)
    if not is_good.any():
        return 0
    return namespace.move(source[is_good], np.ascontiguousarray(places[is_good]), deadline=deadline)


# --- the new table ---------------------------------------------------------------------------


def _place(volume: Volume, current: Record, plan: NamespacePlan, deadline: Deadline) -> Record:
    """The record of the new size, its metadata where the present one's is not."""
    records = volume.records(deadline=deadline)
    record = place_resized(volume.space, current, plan, records)
    if record is not None:
        return record
    block = volume.block_size_bytes
    free = volume.space.free_runs(records)
    more = max(0, plan.slot_count - current.slot_count) * plan.slot_blocks
    raise CapacityError(
        f"{volume.name}#{current.name}: resize to {plan.quota_pages} pages: expected {format_size(more * block)} for "
        f"slots and {format_size((plan.metadata_blocks - plan.padding_blocks) * block)} for table and journal, in at "
        f"most {1 + FURTHER_EXTENT_COUNT_MAX - len(current.extents)} further pieces, got "
        f"{format_size(sum(count for _, count in free) * block)} free in {len(free)}; delete or shrink another "
        f"namespace, or have those of lower priority make room"
    )


def _write_metadata(
    volume: Volume, current: Record, record: Record, entries: EntryArray, deadline: Deadline
) -> None:
    """Geometry, table, and emptied spare blocks and journal of the new record, durable on return."""
    io = volume.io
    geometry = read_geometry(io, current, what=f"{volume.name}#{current.name}", deadline=deadline)
    data = build_geometry(geometry).ljust(UNIT_BYTES, b"\0")
    dirty: MemberMask = io.write(record.geometry_slba, data, deadline)
    piece_blocks = PIECE_BYTES // volume.block_size_bytes
    for first, part in _table_pieces(record, entries, volume.block_size_bytes, piece_blocks):
        dirty = dirty | io.transfer(OPCODE_WRITE, record.table_slba + first, part, deadline)
    # What lay there may look like blocks of this namespace: it wrote there itself, or a page may say anything.
    empty = aligned_buffer(PIECE_BYTES)
    rest_slba = record.table_slba + record.table_block_count
    rest_count = record.spare_block_count + record.journal_block_count
    for first in range(0, rest_count, piece_blocks):
        part = empty[: min(piece_blocks, rest_count - first) * volume.block_size_bytes]
        dirty = dirty | io.transfer(OPCODE_WRITE, rest_slba + first, part, deadline)
    io.flush(dirty, deadline)


def _table_pieces(
    record: Record, entries: EntryArray, block_bytes: int, piece_blocks: int
) -> Iterator[tuple[int, Uint8Array]]:
    """Table blocks with these entries, ascending by slot; first block and bytes of each piece."""
    per_block = entries_per_block(block_bytes)
    for first in range(0, record.table_block_count, piece_blocks):
        count = min(piece_blocks, record.table_block_count - first)
        part = aligned_buffer(count * block_bytes)
        format_table(
            block_bytes=block_bytes,
            first_block=first,
            block_count=count,
            slot_count=record.slot_count,
            uuid=record.namespace_uuid,
            out=part,
        )
        blocks = part.reshape(count, block_bytes)
        headers = blocks[:, :HEADER_SIZE_BYTES].view(MEDIA_HEADER_DTYPE)
        headers["sequence"] = record.tail_sequence - 1
        headers["epoch"] = record.epoch
        low, high = np.searchsorted(entries["slot_index"], [first * per_block, (first + count) * per_block])
        chosen = entries[low:high]
        slots = chosen["slot_index"].astype(np.int64) - first * per_block
        body = blocks[:, HEADER_SIZE_BYTES : HEADER_SIZE_BYTES + per_block * ENTRY_DTYPE.itemsize]
        places = body.reshape(count, per_block, ENTRY_DTYPE.itemsize)
        places[slots // per_block, slots % per_block] = chosen.view(np.uint8).reshape(
            -1, ENTRY_DTYPE.itemsize
        )
        seal(part, block_bytes)
        yield first, part
