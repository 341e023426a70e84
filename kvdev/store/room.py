"""Who gives space back, when a KV namespace needs what a volume has not free: those of lower priority, lowest first.

Each gives down to its reserve at most, and no more than is needed; one that has an owner gives nothing. All is decided
before the first page goes. Interrupted, some are smaller and their space is free: the same call again goes on.
Not here: a resize itself (``resize``); what fits where (``extents``).
Spec: docs/design/0002-tenants.md.
Threads: blocks while it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdev.clock import Deadline
from kvdev.errors import CapacityError, UsageError
from kvdev.geometry import Geometry
from kvdev.store.claim import check_free
from kvdev.store.extents import place_new, place_resized
from kvdev.store.fence import Fence
from kvdev.store.lease import Lease
from kvdev.store.lock import LockHeldError
from kvdev.store.plan import NamespacePlan, plan_namespace
from kvdev.store.resize import ResizeReport, resize_namespace
from kvdev.store.superblock import Record, policy_name
from kvdev.store.volume import NamespaceInfo, Volume, check_room_rules, quota_of
from kvdev.units import format_size

Fits = Callable[[Sequence[Record]], bool]
"""Whether there is room, were these the records of the volume."""


@dataclass(frozen=True)
class Gift:
    """What one namespace gave back, or is to."""

    name: str
    priority: int
    previous_quota_pages: int
    quota_pages: int
    freed_bytes: int
    evicted_pages: int = 0


def create_with_room(
    volume: Volume,
    name: str,
    geometry: Geometry,
    *,
    quota_bytes: int | None = None,
    quota_pages: int | None = None,
    priority: int = 0,
    reserve_pages: int = 0,
    journal_block_count: int | None = None,
    takes: bool = True,
    deadline: Deadline,
    **options: Any,
) -> tuple[NamespaceInfo, list[Gift]]:
    """``Volume.create_namespace``, with room made for it where there is none; and who gave.

    Args:
        takes: False takes from nobody.
        options: as there.
    """
    given: list[Gift] = []
    if takes:
        quota = quota_of(geometry, quota_bytes=quota_bytes, quota_pages=quota_pages)
        check_room_rules(priority=priority, reserve_pages=reserve_pages, quota_pages=quota)
        volume.check_new_name(name, deadline)
        plan = volume.plan(geometry, quota_pages=quota, journal_block_count=journal_block_count)

        def fits(records: Sequence[Record]) -> bool:
            return place_new(volume.space, plan, records) is not None

        gifts = plan_room(volume, f"namespace {name!r}", plan, fits, priority=priority, deadline=deadline)
        given = _give(volume, gifts, deadline)
    info = volume.create_namespace(
        name,
        geometry,
        quota_bytes=quota_bytes,
        quota_pages=quota_pages,
        priority=priority,
        reserve_pages=reserve_pages,
        journal_block_count=journal_block_count,
        deadline=deadline,
        **options,
    )
    return info, given


def resize_with_room(
    volume: Volume,
    name: str,
    *,
    quota_pages: int,
    journal_block_count: int | None = None,
    takes: bool = True,
    deadline: Deadline,
) -> tuple[ResizeReport, list[Gift]]:
    """``resize_namespace``, with room made for it where there is none; and who gave.

    Args:
        takes: False takes from nobody.
    """
    given: list[Gift] = []
    if takes:
        info = volume.namespace(name, deadline=deadline)
        refusal = _owner_of(volume, info.record, deadline)
        if refusal:
            raise UsageError(refusal)
        plan = volume.plan(info.geometry, quota_pages=quota_pages, journal_block_count=journal_block_count)

        def fits(records: Sequence[Record]) -> bool:
            return place_resized(volume.space, info.record, plan, records) is not None

        gifts = plan_room(
            volume, f"resize of {name!r}", plan, fits, priority=info.priority, name=name, deadline=deadline
        )
        given = _give(volume, gifts, deadline)
    report = resize_namespace(
        volume, name, quota_pages=quota_pages, journal_block_count=journal_block_count, deadline=deadline
    )
    return report, given


def plan_room(
    volume: Volume,
    what: str,
    plan: NamespacePlan,
    fits: Fits,
    *,
    priority: int,
    name: str = "",
    deadline: Deadline,
) -> list[Gift]:
    """What others would give so that ``fits``; nothing where it does already. Changes nothing.

    Raises CapacityError saying of each namespace what it could give, or why it does not.

    Args:
        name: of the namespace that grows, which gives nothing itself.
    """
    records = volume.records(deadline=deadline)
    gifts: list[Gift] = []
    notes: list[str] = []
    others = [record for record in records if record.name != name]
    for donor in sorted(others, key=_turn):
        if fits(records):
            return gifts
        note = _why_not(volume, donor, priority, deadline)
        if note:
            notes.append(f"{donor.name} {note}")
            continue
        rest = [record for record in records if record.name != donor.name]
        shrunk = _smaller(volume, donor, rest, fits)
        if shrunk is None:
            notes.append(f"{donor.name} has no room for the table of a smaller size")
            continue
        records = [*rest, shrunk]
        freed = (donor.block_count - shrunk.block_count) * volume.block_size_bytes
        gifts.append(Gift(donor.name, donor.priority, donor.quota_pages, shrunk.quota_pages, freed))
        notes.append(
            f"{donor.name} (priority {donor.priority}) could give {format_size(freed)} down to its reserve of "
            f"{donor.reserve_pages} pages"
        )
    if fits(records):
        return gifts
    free = sum(count for _, count in volume.space.free_runs(records)) * volume.block_size_bytes
    raise CapacityError(
        f"volume {volume.name}: {what} of priority {priority}: expected room for {plan.slot_count} slots of "
        f"{format_size(plan.slot_blocks * volume.block_size_bytes)} and "
        f"{format_size((plan.metadata_blocks - plan.padding_blocks) * volume.block_size_bytes)} of table and journal, "
        f"got {format_size(free)} free even so: {'; '.join(notes) or 'there is no other namespace'}"
    )


def _turn(record: Record) -> tuple[int, int, str]:
    """Lowest priority first, of equals the one with most above its reserve."""
    above = (record.quota_pages - record.reserve_pages) * record.slot_blocks
    return record.priority, -above, record.name


def _why_not(volume: Volume, donor: Record, priority: int, deadline: Deadline) -> str:
    """Why a namespace gives nothing; empty when it can."""
    if donor.is_erasing:
        return "is being erased"
    if donor.priority >= priority:
        return f"has priority {donor.priority}, not below {priority}"
    if policy_name(donor) == "none":
        return "lets no page go, as its eviction policy is none"
    if donor.quota_pages <= _least(donor):
        return f"has its reserve of {donor.reserve_pages} pages only"
    return _owner_of(volume, donor, deadline) and "is in use by its owner"


def _least(donor: Record) -> int:
    return max(1, donor.reserve_pages)


def _owner_of(volume: Volume, record: Record, deadline: Deadline) -> str:
    """Who has a namespace, as a refusal says it; empty when nobody does."""
    try:
        lock = volume.lock_namespace(record)
    except LockHeldError as held:
        return str(held)
    try:
        current = volume.directory.read(record.record_index, deadline).record
        if current is not None:
            check_free(current, Lease(f"{volume.name}#{record.name}", fence=Fence()), volume.members)
    except LockHeldError as held:
        return str(held)
    finally:
        lock.release()
    return ""


def _smaller(volume: Volume, donor: Record, rest: list[Record], fits: Fits) -> Record | None:
    """The largest size of a namespace with which there is room, else the smallest it may have; None if it has none."""

    def shrunk(quota_pages: int) -> Record | None:
        plan = _plan_smaller(volume, donor, quota_pages)
        return place_resized(volume.space, donor, plan, [*rest, donor])

    def has_room(quota_pages: int) -> bool:
        found = shrunk(quota_pages)
        return found is not None and fits([*rest, found])

    low, high = _least(donor), donor.quota_pages - 1
    if not has_room(low):
        return shrunk(low)
    while low < high:
        middle = (low + high + 1) // 2
        if has_room(middle):
            low = middle
        else:
            high = middle - 1
    return shrunk(low)


def _plan_smaller(volume: Volume, donor: Record, quota_pages: int) -> NamespacePlan:
    """What a smaller size takes: with a journal no larger than it has."""
    plan = plan_namespace(
        page_size_bytes=donor.page_size_bytes,
        quota_pages=quota_pages,
        block_size_bytes=volume.block_size_bytes,
        strip_size_bytes=volume.strip_size_bytes,
    )
    if plan.journal_blocks <= donor.journal_block_count:
        return plan
    return plan_namespace(
        page_size_bytes=donor.page_size_bytes,
        quota_pages=quota_pages,
        block_size_bytes=volume.block_size_bytes,
        strip_size_bytes=volume.strip_size_bytes,
        journal_block_count=donor.journal_block_count,
    )


def _give(volume: Volume, gifts: list[Gift], deadline: Deadline) -> list[Gift]:
    """Shrink those who give, one after the other; each is whole before the next."""
    given = []
    for gift in gifts:
        donor = volume.namespace(gift.name, deadline=deadline)
        before = donor.record.block_count * volume.block_size_bytes
        plan = _plan_smaller(volume, donor.record, gift.quota_pages)
        report = resize_namespace(
            volume,
            gift.name,
            quota_pages=gift.quota_pages,
            journal_block_count=plan.journal_blocks,
            deadline=deadline,
        )
        given.append(
            replace(gift, freed_bytes=before - report.extent_bytes, evicted_pages=report.evicted_pages)
        )
    return given


def set_room_rules(
    volume: Volume,
    name: str,
    *,
    priority: int | None = None,
    reserve_pages: int | None = None,
    deadline: Deadline,
) -> NamespaceInfo:
    """Give a namespace another priority or reserve; its pages stay. Refused while it may have an owner."""
    with volume.namespace_held(name, deadline) as current:
        priority = current.priority if priority is None else priority
        reserve_pages = current.reserve_pages if reserve_pages is None else reserve_pages
        check_room_rules(priority=priority, reserve_pages=reserve_pages, quota_pages=current.quota_pages)
        volume.write_both(replace(current, priority=priority, reserve_pages=reserve_pages), deadline)
    return volume.namespace(name, deadline=deadline)
