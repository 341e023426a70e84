"""How much room a KV namespace takes on a volume, and where its parts lie in its extent.

Not here: which extent it gets (``volume``).
Spec: docs/on-disk-format.md, KV namespace extent.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdev.errors import UsageError
from kvdev.native.index import entries_per_block, table_block_count
from kvdev.store.media import UNIT_BYTES

SLOT_COUNT_MAX = (1 << 31) - 2
SPARE_SLOTS_MIN = 4
SPARE_SLOTS_MAX = 4096
SPARE_SLOTS_SHARE = 32
"""Slots beyond the quota, one for this many pages: a page put at the quota finds a slot that was freed
by a durable record, without waiting for the record of its own victim."""
JOURNAL_BLOCKS_MIN = 256
JOURNAL_RECORDS_MAX = 1 << 20
"""64 MiB of records: bounds the replay, and the memory a commit takes."""
JOURNAL_SHARE = 8
"""Records the journal holds: one for this many slots, within the two bounds above."""
TABLE_SPARE_SHARE = 1024
TABLE_SPARE_MIN = 8
"""Table blocks beside the table, for those whose place must not be written again."""


@dataclass(frozen=True)
class NamespacePlan:
    """Block counts of the parts, in the order in which they lie; all are whole logical blocks."""

    page_size_bytes: int
    block_size_bytes: int
    quota_pages: int
    slot_count: int
    slot_blocks: int
    geometry_blocks: int
    table_blocks: int
    spare_blocks: int
    journal_blocks: int
    padding_blocks: int
    """Between journal and slots, so that these start on a strip."""

    @property
    def metadata_blocks(self) -> int:
        parts = self.geometry_blocks + self.table_blocks + self.spare_blocks + self.journal_blocks
        return parts + self.padding_blocks

    @property
    def total_blocks(self) -> int:
        return self.metadata_blocks + self.slot_count * self.slot_blocks

    @property
    def total_bytes(self) -> int:
        return self.total_blocks * self.block_size_bytes


def plan_namespace(
    *,
    page_size_bytes: int,
    quota_pages: int,
    block_size_bytes: int,
    strip_size_bytes: int,
    journal_block_count: int | None = None,
) -> NamespacePlan:
    """The parts of a namespace for ``quota_pages`` pages; raises UsageError when there can be none such."""
    slot_count = quota_pages + min(max(quota_pages // SPARE_SLOTS_SHARE, SPARE_SLOTS_MIN), SPARE_SLOTS_MAX)
    if quota_pages < 1 or slot_count > SLOT_COUNT_MAX:
        raise UsageError(
            f"quota: expected at least one page of {page_size_bytes} bytes and less than {SLOT_COUNT_MAX} pages, "
            f"got {quota_pages} pages"
        )
    per_block = entries_per_block(block_size_bytes)
    if journal_block_count is None:
        records = min(slot_count // JOURNAL_SHARE, JOURNAL_RECORDS_MAX)
        journal_block_count = max(-(-records // per_block), JOURNAL_BLOCKS_MIN)
    if journal_block_count < 4:
        raise UsageError(f"journal_block_count: expected at least 4, got {journal_block_count}")
    table_blocks = table_block_count(block_size_bytes, slot_count)
    geometry_blocks = UNIT_BYTES // block_size_bytes
    spare_blocks = max(table_blocks // TABLE_SPARE_SHARE, TABLE_SPARE_MIN)
    before_slots = geometry_blocks + table_blocks + spare_blocks + journal_block_count
    return NamespacePlan(
        page_size_bytes=page_size_bytes,
        block_size_bytes=block_size_bytes,
        quota_pages=quota_pages,
        slot_count=slot_count,
        slot_blocks=-(-page_size_bytes // block_size_bytes),
        geometry_blocks=geometry_blocks,
        table_blocks=table_blocks,
        spare_blocks=spare_blocks,
        journal_blocks=journal_block_count,
        padding_blocks=-before_slots % (strip_size_bytes // block_size_bytes),
    )


def pages_within(
    size_bytes: int, *, page_size_bytes: int, block_size_bytes: int, strip_size_bytes: int
) -> int:
    """The largest quota, in pages, whose namespace takes at most ``size_bytes``; 0 when none does."""
    low, high = 0, min(size_bytes // page_size_bytes, SLOT_COUNT_MAX // 2)
    while low < high:
        middle = (low + high + 1) // 2
        plan = plan_namespace(
            page_size_bytes=page_size_bytes,
            quota_pages=middle,
            block_size_bytes=block_size_bytes,
            strip_size_bytes=strip_size_bytes,
        )
        if plan.total_bytes <= size_bytes:
            low = middle
        else:
            high = middle - 1
    return low
