"""The superblock on media: where a volume's parts lie, how they are written, and which copy counts.

Not here: what the structures hold (``superblock``, ``label``); which devices are members (``members``).
Spec: docs/on-disk-format.md, Stripe and Superblock.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdev.block.device import BlockDevice, flush, write_blocks
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline, unix_time_s
from kvdev.errors import CommandError, CorruptionError, UsageError
from kvdev.store.label import Label, MemberInfo, build_label
from kvdev.store.media import STRUCTURE_BYTES, UNIT_BYTES
from kvdev.store.signature import wipe
from kvdev.store.superblock import RECORD_COUNT, Superblock, build_superblock, parse_superblock
from kvdev.store.volume_io import VolumeIo
from kvdev.units import format_size


def row_count_of(stripe: StripeDevice, size_bytes: int | None) -> int:
    rows = stripe.row_count
    row_bytes = stripe.strip_size_bytes * len(stripe.members)
    capacity = rows * row_bytes
    if size_bytes is not None:
        if size_bytes > capacity:
            raise UsageError(
                f"size: expected at most {capacity} bytes ({format_size(capacity)}: {len(stripe.members)} "
                f"members, the smallest {format_size(min(m.size_bytes for m in stripe.members))}), "
                f"got {size_bytes}"
            )
        rows = size_bytes // row_bytes
    return rows


def lay_out_volume(name: str, stripe: StripeDevice, row_count: int) -> Superblock:
    """Where directory and payload lie: the directory's copies start on different members if there are any."""
    member_count = len(stripe.members)
    strip_blocks = stripe.strip_blocks
    directory_blocks = RECORD_COUNT * UNIT_BYTES // stripe.block_size_bytes
    directory_strips = -(-directory_blocks // strip_blocks)
    step = directory_strips + (1 if member_count > 1 and directory_strips % member_count == 0 else 0)
    first_strip = member_count
    payload_strip = -(-(first_strip + step + directory_strips) // member_count) * member_count
    end = row_count * member_count * strip_blocks
    if payload_strip * strip_blocks >= end:
        raise UsageError(
            f"members: expected more than {payload_strip // member_count} strips of "
            f"{format_size(stripe.strip_size_bytes)} on each member, got {row_count}; "
            f"use larger members or a smaller strip size"
        )
    return Superblock(
        volume_uuid=uuid.uuid4().bytes,
        volume_name=name,
        sequence=1,
        member_count=member_count,
        block_size_bytes=stripe.block_size_bytes,
        strip_size_bytes=stripe.strip_size_bytes,
        row_count=row_count,
        record_count=RECORD_COUNT,
        directory_slba=(first_strip * strip_blocks, (first_strip + step) * strip_blocks),
        payload_slba=payload_strip * strip_blocks,
        payload_end=end,
        created_unix_s=unix_time_s(),
    )


def superblock_slbas(superblock: Superblock | Label) -> tuple[int, int]:
    """Behind the labels of members 0 and 1, or twice on a single member, each in a unit of its own."""
    unit_blocks = UNIT_BYTES // superblock.block_size_bytes
    if superblock.member_count == 1:
        return unit_blocks, 2 * unit_blocks
    return unit_blocks, superblock.strip_size_bytes // superblock.block_size_bytes + unit_blocks


def write_volume(
    stripe: StripeDevice, superblock: Superblock, destroy: frozenset[str], deadline: Deadline
) -> VolumeIo:
    """Labels, then the superblock copies: a volume is there when the first of these is."""
    for member in stripe.members:
        clear_member(member, deadline, wipes=member.uri in destroy)
    for index, label in enumerate(labels_of(superblock, stripe.members)):
        write_label(stripe.members[index], label, deadline)
    io = VolumeIo(stripe, strip_size_bytes=superblock.strip_size_bytes)
    write_superblocks(io, superblock, deadline)
    return io


def clear_member(member: BlockDevice, deadline: Deadline, *, wipes: bool) -> None:
    """Take away what a device holds where label and superblock copies come; with ``wipes`` every signature."""
    if wipes:
        wipe(member, deadline)
    # The whole place: nothing old may look like one of them.
    write_blocks(member, 0, bytes(4 * UNIT_BYTES), deadline)


def labels_of(
    superblock: Superblock, members: Sequence[BlockDevice], *, former_uuid: bytes = bytes(16)
) -> list[Label]:
    """The labels of a volume over these members, in order."""
    infos = tuple(MemberInfo.of(member) for member in members)
    return [
        Label(
            volume_uuid=superblock.volume_uuid,
            volume_name=superblock.volume_name,
            sequence=1,
            member_index=index,
            block_size_bytes=superblock.block_size_bytes,
            strip_size_bytes=superblock.strip_size_bytes,
            row_count=superblock.row_count,
            members=infos,
            former_uuid=former_uuid,
        )
        for index in range(len(infos))
    ]


def write_label(member: BlockDevice, label: Label, deadline: Deadline) -> None:
    """Durable on return."""
    write_blocks(member, 0, build_label(label), deadline)
    flush(member, deadline)


def write_superblocks(
    io: VolumeIo, superblock: Superblock, deadline: Deadline, *, copies: Sequence[int] = (0, 1)
) -> None:
    """The copies, one after the other: a crash never finds both half written."""
    for copy_index in copies:
        slba = superblock_slbas(superblock)[copy_index]
        data = build_superblock(superblock, copy_index=copy_index)
        io.flush(io.write(slba, data, deadline), deadline)


@dataclass(frozen=True)
class SuperblockCopies:
    """What stands in the two places: each copy where it is intact, and what is wrong with it where not."""

    copies: tuple[Superblock | None, Superblock | None]
    problems: tuple[str, str]
    """Empty for a copy that is intact and not older than the other."""

    @property
    def newest(self) -> Superblock | None:
        found = [copy for copy in self.copies if copy is not None]
        return max(found, key=lambda copy: copy.sequence) if found else None

    @property
    def write_order(self) -> tuple[int, int]:
        """The copy whose loss costs least first: what is not intact, then what is older."""
        first = min((0, 1), key=lambda index: copy.sequence if (copy := self.copies[index]) else -1)
        return first, 1 - first

    @property
    def damaged(self) -> list[int]:
        """Copies that have to be written again from the other one."""
        return [index for index in (0, 1) if self.problems[index]]


def read_superblock_copies(
    io: VolumeIo, place: Superblock | Label, deadline: Deadline, *, volume_uuid: bytes | None = None
) -> SuperblockCopies:
    """Both copies of a volume's superblock, of that of ``place`` unless another is named."""
    copies: list[Superblock | None] = []
    problems: list[str] = []
    for index, slba in enumerate(superblock_slbas(place)):
        what = f"superblock copy {index} at {io.where(slba)}"
        try:
            data = io.read(slba, 1, deadline).tobytes()[:STRUCTURE_BYTES]
            copies.append(
                parse_superblock(
                    data, what=what, volume_uuid=volume_uuid or place.volume_uuid, copy_index=index
                )
            )
            problems.append("")
        except (CorruptionError, CommandError) as problem:  # damaged, or a place that cannot be read any more
            copies.append(None)
            problems.append(str(problem))
    newest = max((copy.sequence for copy in copies if copy is not None), default=0)
    for index, copy in enumerate(copies):
        if copy is not None and copy.sequence < newest:
            slba = superblock_slbas(place)[index]
            problems[index] = (
                f"superblock copy {index} at {io.where(slba)}: sequence: expected {newest}, got {copy.sequence}: "
                f"it is an older state"
            )
    return SuperblockCopies((copies[0], copies[1]), (problems[0], problems[1]))


def read_superblock(io: VolumeIo, label: Label, deadline: Deadline) -> Superblock:
    """The newest intact copy; refused when neither is, or when it contradicts labels or members."""
    found = read_superblock_copies(io, label, deadline)
    superblock = found.newest
    if superblock is None:
        remedy = (
            "making it anew was interrupted; run kvdev volume recreate again"
            if any(label.former_uuid)
            else "the volume was never finished, or both copies are lost; create it again with --destroy"
        )
        raise CorruptionError(
            f"volume {label.volume_name!r}: {found.problems[0]}; and copy 1 likewise: {remedy}"
        )
    expected = (label.member_count, label.block_size_bytes, label.strip_size_bytes)
    actual = (superblock.member_count, superblock.block_size_bytes, superblock.strip_size_bytes)
    # A volume that has grown has more rows than its labels say: these stay as they were written.
    if expected != actual or superblock.row_count < label.row_count:
        raise CorruptionError(
            f"volume {label.volume_name!r}: superblock: members, block size, strip size, rows: "
            f"expected {(*expected, label.row_count)} by the labels, got {(*actual, superblock.row_count)}"
        )
    check_rows(io, superblock)
    return superblock


def check_rows(io: VolumeIo, superblock: Superblock) -> None:
    """Whether the members hold all rows of the superblock; UsageError naming the one that does not."""
    needed = superblock.row_count * (superblock.strip_size_bytes // superblock.block_size_bytes)
    if superblock.payload_end > needed * superblock.member_count:
        raise CorruptionError(
            f"volume {superblock.volume_name!r}: superblock: end: expected at most "
            f"{needed * superblock.member_count} by its rows, got {superblock.payload_end}"
        )
    device = io.device
    if not isinstance(device, StripeDevice):
        needed = needed * superblock.member_count
        members: list[BlockDevice] = [device]
    else:
        members = device.members
    for index, member in enumerate(members):
        if member.block_count < needed:
            raise UsageError(
                f"{member.uri}: member {index} of volume {superblock.volume_name!r}: size: expected {needed} "
                f"blocks, got {member.block_count}: it was shrunk"
            )


def grown(superblock: Superblock, io: VolumeIo, size_bytes: int | None) -> Superblock:
    """The superblock with all rows that the members hold now, or those within a size; it itself if it has them.

    Raises UsageError when the size is less than the volume has, or more than the members hold.
    """
    row_bytes = superblock.strip_size_bytes * superblock.member_count
    rows = io.device.size_bytes // row_bytes
    if size_bytes is not None:
        present = superblock.row_count * row_bytes
        if not present <= size_bytes <= rows * row_bytes:
            raise UsageError(
                f"size: expected {present} bytes ({format_size(present)}), which the volume has, to "
                f"{rows * row_bytes} ({format_size(rows * row_bytes)}), which its members hold, got {size_bytes}"
            )
        rows = size_bytes // row_bytes
    if rows <= superblock.row_count:
        return superblock
    row_blocks = row_bytes // superblock.block_size_bytes
    return replace(
        superblock, sequence=superblock.sequence + 1, row_count=rows, payload_end=rows * row_blocks
    )
