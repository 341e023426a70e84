"""The superblock on media: where a volume's parts lie, how they are written, and which copy counts.

Not here: what the structures hold (``superblock``, ``label``); which devices are members (``members``).
Spec: docs/on-disk-format.md, Stripe and Superblock.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from kvdev.block.device import flush, write_blocks
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline, unix_time_s
from kvdev.errors import CorruptionError, UsageError
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
    infos = tuple(MemberInfo.of(member) for member in stripe.members)
    for member in stripe.members:
        if member.uri in destroy:
            wipe(member, deadline)
        # The whole place of label and superblock copies: nothing old may look like one of them.
        write_blocks(member, 0, bytes(4 * UNIT_BYTES), deadline)
    for index, member in enumerate(stripe.members):
        label = Label(
            volume_uuid=superblock.volume_uuid,
            volume_name=superblock.volume_name,
            sequence=1,
            member_index=index,
            block_size_bytes=superblock.block_size_bytes,
            strip_size_bytes=superblock.strip_size_bytes,
            row_count=superblock.row_count,
            members=infos,
        )
        write_blocks(member, 0, build_label(label), deadline)
        flush(member, deadline)
    io = VolumeIo(stripe, strip_size_bytes=superblock.strip_size_bytes)
    write_superblocks(io, superblock, deadline)
    return io


def write_superblocks(
    io: VolumeIo, superblock: Superblock, deadline: Deadline, *, copies: Sequence[int] = (0, 1)
) -> None:
    """The copies, one after the other: a crash never finds both half written."""
    for copy_index in copies:
        slba = superblock_slbas(superblock)[copy_index]
        data = build_superblock(superblock, copy_index=copy_index)
        io.flush(io.write(slba, data, deadline), deadline)


def read_superblock(io: VolumeIo, label: Label, deadline: Deadline) -> Superblock:
    """The newest intact copy; refused when neither is, or when it contradicts the labels."""
    found: list[Superblock] = []
    problems: list[str] = []
    for index, slba in enumerate(superblock_slbas(label)):
        what = f"volume {label.volume_name!r}: superblock copy {index} at LBA {slba}"
        data = io.read(slba, 1, deadline).tobytes()[:STRUCTURE_BYTES]
        try:
            found.append(parse_superblock(data, what=what, volume_uuid=label.volume_uuid))
        except CorruptionError as problem:
            problems.append(str(problem))
    if not found:
        raise CorruptionError(
            f"{problems[0]}; and copy 1 likewise: the volume was never finished, or both copies are lost; "
            f"create it again with --destroy"
        )
    superblock = max(found, key=lambda copy: copy.sequence)
    expected = (label.member_count, label.block_size_bytes, label.strip_size_bytes, label.row_count)
    actual = (
        superblock.member_count,
        superblock.block_size_bytes,
        superblock.strip_size_bytes,
        superblock.row_count,
    )
    if expected != actual or superblock.payload_end > io.device.block_count:
        raise CorruptionError(
            f"volume {label.volume_name!r}: superblock: members, block size, strip size, rows: "
            f"expected {expected} by the labels, got {actual}"
        )
    return superblock
