"""Where KV namespaces lie on a volume: what is free, and where one of a new size could be.

Decisions only, on records; whoever asks holds the volume's lock.
Not here: how much a namespace takes (``plan``); writing it there (``volume``, ``resize``).
Spec: docs/on-disk-format.md, KV namespace extents, Resizing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvdev.errors import UsageError
from kvdev.native.extent import locate_grants
from kvdev.native.index import GrantArray
from kvdev.store.plan import NamespacePlan
from kvdev.store.superblock import FURTHER_EXTENT_COUNT_MAX, Extent, Record

Uint64Array = npt.NDArray[np.uint64]
Run = tuple[int, int]
"""First block and block count."""


class SlotMap:
    """Which block each slot of a KV namespace starts at."""

    def __init__(self, extents: tuple[Extent, ...], slot_blocks: int) -> None:
        self.slot_count = sum(extent.slot_count for extent in extents)
        self.slot_blocks = slot_blocks
        # What to add to slot index x slot size, from which slot on.
        self._firsts = np.cumsum([0, *(extent.slot_count for extent in extents[:-1])], dtype=np.int64)
        starts = np.array([extent.data_slba for extent in extents], dtype=np.int64)
        self._shifts = starts - self._firsts * slot_blocks
        self._only = extents[0].data_slba if len(extents) == 1 else None

    def locate(self, grants: GrantArray) -> Uint64Array:
        """The first block of each grant's slot; refuses a slot that the namespace does not have."""
        if self._only is not None:
            return locate_grants(
                grants, slot_count=self.slot_count, data_slba=self._only, slot_blocks=self.slot_blocks
            )
        slots = grants["slot_index"]
        if len(slots) and int(slots.max()) >= self.slot_count:
            raise UsageError(f"grants: slot_index: expected less than {self.slot_count}")
        return self.slbas(slots.astype(np.int64))

    def slbas(self, slots: npt.NDArray[np.int64]) -> Uint64Array:
        """The first block of each of these slots, which there are."""
        extents = np.searchsorted(self._firsts, slots, side="right") - 1
        return (slots * self.slot_blocks + self._shifts[extents]).astype(np.uint64)


def slot_map_of(record: Record) -> SlotMap:
    return SlotMap(record.extents, record.slot_blocks)


def is_consistent(record: Record, *, block_size_bytes: int, block_count: int) -> bool:
    """Whether everything that a record names lies in its extents, and those on a volume of so many blocks."""
    extents = record.extents
    metadata = (
        (record.table_slba, record.table_block_count + record.spare_block_count),
        (record.journal_slba, record.journal_block_count),
    )
    return (
        all(
            any(each.slba <= slba and slba + count <= each.end for each in extents)
            for slba, count in metadata
        )
        and all(
            each.slot_count >= 0
            and each.slba <= each.data_slba <= each.slots_end(record.slot_blocks) <= each.end <= block_count
            for each in extents
        )
        and record.page_size_bytes <= record.slot_blocks * block_size_bytes
        and 1 <= record.quota_pages <= record.slot_count
        and record.journal_block_count >= 4
        and record.tail_position < record.journal_block_count
    )


# --- what is free ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """The blocks that KV namespaces share: [first, end), cut into strips."""

    first: int
    end: int
    strip_blocks: int

    def free_runs(self, records: Iterable[Record]) -> list[Run]:
        """Unused runs of blocks, in order."""
        used = sorted((extent for record in records for extent in record.extents), key=lambda each: each.slba)
        free, start = [], self.first
        for extent in used:
            if extent.slba > start:
                free.append((start, extent.slba - start))
            start = max(start, extent.end)
        if start < self.end:
            free.append((start, self.end - start))
        return free

    def aligned(self, run: Run) -> Run:
        """What is left of a run from its first whole strip on."""
        padding = -run[0] % self.strip_blocks
        return run[0] + padding, max(0, run[1] - padding)


# --- a place for a new one -------------------------------------------------------------------


def place_new(space: Space, plan: NamespacePlan, records: Iterable[Record]) -> tuple[Extent, ...] | None:
    """Extents for a new namespace, metadata at the start of the first; None where there is no room.

    The first run that takes all of it, else the largest ones together.
    """
    runs = [space.aligned(run) for run in space.free_runs(records)]
    for slba, count in runs:
        if count >= plan.total_blocks:
            return (Extent(slba, plan.total_blocks, slba + plan.metadata_blocks, plan.slot_count),)
    return _spread(space, plan, runs, plan.slot_count, metadata_blocks=plan.metadata_blocks, count_max=4)


def _spread(
    space: Space,
    plan: NamespacePlan,
    runs: list[Run],
    slot_count: int,
    *,
    metadata_blocks: int,
    count_max: int,
) -> tuple[Extent, ...] | None:
    """So many slots in the largest runs, behind metadata in the first of them; None when they are too few."""
    extents: list[Extent] = []
    before = metadata_blocks
    for slba, count in sorted(runs, key=lambda run: -run[1])[:count_max]:
        if not slot_count and not before:
            break
        ahead = before + -(slba + before) % space.strip_blocks
        fitting = min(slot_count, max(0, count - ahead) // plan.slot_blocks)
        if count < before or not (fitting or before):
            return None
        data_slba = slba + ahead if fitting else slba + before
        end = data_slba + fitting * plan.slot_blocks
        extents.append(Extent(slba, end - slba, data_slba, fitting))
        slot_count -= fitting
        before = 0
    return None if slot_count or before else tuple(extents)


# --- a place for another size ----------------------------------------------------------------


def place_resized(
    space: Space, current: Record, plan: NamespacePlan, records: Iterable[Record]
) -> Record | None:
    """The record of the new size; None where there is no room.

    Slots that stay keep their places, and metadata goes where the present metadata and slots are not: so the record
    of the old size is good until that of the new one is written.
    """
    free = space.free_runs(records)
    needed = plan.metadata_blocks - plan.padding_blocks
    kept = _truncated(current.extents, min(plan.slot_count, current.slot_count))
    old = (current.geometry_slba, current.journal_slba + current.journal_block_count)
    more = plan.slot_count - sum(extent.slot_count for extent in kept)
    grown = [*kept[:-1], replace(kept[-1], slot_count=kept[-1].slot_count + more)]
    hole = _hole(kept, old, needed)
    return _settle(current, plan, grown, hole, old, needed, free) or _grow_apart(
        space, current, plan, kept, hole, needed, free
    )


def _truncated(extents: tuple[Extent, ...], slot_count: int) -> list[Extent]:
    """The extents that the first slots lie in, each with its slots only behind its start."""
    kept: list[Extent] = []
    for extent in extents:
        count = min(extent.slot_count, slot_count)
        if count or not kept:
            kept.append(replace(extent, slot_count=count))
        slot_count -= count
    return kept


def _limit(extent: Extent, free: list[Run]) -> int:
    """How far an extent could reach: to the end of the free run behind it, or its own."""
    return next((slba + count for slba, count in free if slba == extent.end), extent.end)


def _hole(kept: list[Extent], old: Run, needed: int) -> int | None:
    """Where there is room for metadata before the slots of an extent, other than where it is now."""
    for extent in kept:
        before = (extent.slba, extent.data_slba)
        if before[1] - before[0] >= needed and not _meets(before, old):
            return extent.slba
    return None


def _settle(
    current: Record,
    plan: NamespacePlan,
    kept: list[Extent],
    hole: int | None,
    old: Run,
    needed: int,
    free: list[Run],
) -> Record | None:
    """These extents with their slots, the metadata before or behind those of one; None where it fits nowhere."""
    limits = [_limit(extent, free) for extent in kept]
    ends = [extent.slots_end(plan.slot_blocks) for extent in kept]
    if any(end > limit for end, limit in zip(ends, limits, strict=True)):
        return None
    trimmed = _trimmed(kept, plan)
    if hole is not None:
        return _lay_out(current, plan, trimmed, hole)
    for index in reversed(range(len(kept))):
        first = ends[index]
        if _meets((first, first + needed), old):
            first = old[1]
        if first + needed <= limits[index]:
            trimmed[index] = replace(trimmed[index], block_count=first + needed - trimmed[index].slba)
            return _lay_out(current, plan, trimmed, first)
    return None


def _meets(one: Run, other: Run) -> bool:
    """Whether two ranges [first, end) share a block."""
    return one[0] < other[1] and other[0] < one[1]


def _trimmed(kept: list[Extent], plan: NamespacePlan) -> list[Extent]:
    """The extents up to the end of their slots."""
    return [replace(each, block_count=each.slots_end(plan.slot_blocks) - each.slba) for each in kept]


def _grow_apart(
    space: Space,
    current: Record,
    plan: NamespacePlan,
    kept: list[Extent],
    hole: int | None,
    needed: int,
    free: list[Run],
) -> Record | None:
    """Further extents for the slots that are missing, and for the metadata where no present one has room before it."""
    added = _spread(
        space,
        plan,
        [space.aligned(run) for run in free],
        plan.slot_count - sum(extent.slot_count for extent in kept),
        metadata_blocks=0 if hole is not None else needed,
        count_max=1 + FURTHER_EXTENT_COUNT_MAX - len(kept),
    )
    if added is None:
        return None
    return _lay_out(current, plan, [*_trimmed(kept, plan), *added], added[0].slba if hole is None else hole)


def _lay_out(current: Record, plan: NamespacePlan, extents: list[Extent], first: int) -> Record:
    """The record with these extents, and its metadata from block ``first`` on."""
    table_slba = first + plan.geometry_blocks
    journal_slba = table_slba + plan.table_blocks + plan.spare_blocks
    return replace(
        current,
        quota_pages=plan.quota_pages,
        slot_count=plan.slot_count,
        geometry_slba=first,
        table_slba=table_slba,
        table_block_count=plan.table_blocks,
        spare_block_count=plan.spare_blocks,
        journal_slba=journal_slba,
        journal_block_count=plan.journal_blocks,
        tail_position=0,
        extent_block_count=extents[0].block_count,
        further=tuple(extents[1:]),
    )
