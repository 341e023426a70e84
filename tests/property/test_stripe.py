"""The stripe's mapping equals an independent model that walks block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.block.device import execute, flush, read_blocks, transfer_ios, write_blocks
from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.native.extent import ExtentMap
from kvdev.native.io import IO_DTYPE, IO_GROUP_DTYPE, OPCODE_READ, address_of

STRIP_SIZES = [16384 << shift for shift in range(9)]
BLOCK = 4096


def model_place(block: int, member_count: int, strip_blocks: int) -> tuple[int, int]:
    """Member and LBA of a logical block, by definition: strips dealt to the members like cards."""
    strip, within = divmod(block, strip_blocks)
    row, member = divmod(strip, member_count)
    return member, row * strip_blocks + within


def members_of(
    count: int, size_bytes: int, queue: LocalQueue | None = None, block: int = BLOCK
) -> list[MemoryDevice]:
    return [
        MemoryDevice(size_bytes=size_bytes, name=f"m{index}", block_size_bytes=block, queue=queue)
        for index in range(count)
    ]


@pytest.mark.parametrize("member_count", range(1, 9))
@pytest.mark.parametrize("strip_size", STRIP_SIZES)
def test_mapping_when_any_extent_equals_the_block_model(
    member_count: int, strip_size: int, rng: np.random.Generator
) -> None:
    members = members_of(member_count, 3 * strip_size)
    stripe = StripeDevice(members, strip_size_bytes=strip_size)
    strip_blocks = strip_size // BLOCK
    assert stripe.block_count == member_count * 3 * strip_blocks
    for _ in range(4):
        slba = int(rng.integers(0, stripe.block_count))
        count = int(rng.integers(1, min(stripe.block_count - slba, 3 * strip_blocks + 2) + 1))
        ios = np.zeros(1, dtype=IO_DTYPE)
        ios["opcode"], ios["slba"], ios["lba_count"] = OPCODE_READ, slba, count
        ios["buf_addr"], ios["byte_count"] = 1 << 40, count * BLOCK
        pieces, piece_members, counts = stripe.map_ios(ios)
        assert counts.tolist() == [len(pieces)]
        # One flat list of (member, LBA, address) per block on both sides.
        got = [
            (int(member), int(piece["slba"]) + step, int(piece["buf_addr"]) + step * BLOCK)
            for piece, member in zip(pieces, piece_members, strict=True)
            for step in range(int(piece["lba_count"]))
        ]
        expected = [
            (*model_place(slba + step, member_count, strip_blocks), (1 << 40) + step * BLOCK)
            for step in range(count)
        ]
        assert got == expected
        assert all(int(piece["byte_count"]) == int(piece["lba_count"]) * BLOCK for piece in pieces)


@given(
    member_count=st.integers(1, 8),
    strip_shift=st.integers(0, 2),
    block=st.sampled_from([512, 4096]),
    is_shared=st.booleans(),
    data=st.data(),
)
def test_bytes_when_written_through_the_stripe_lie_where_the_model_says(
    member_count: int, strip_shift: int, block: int, is_shared: bool, data: st.DataObject
) -> None:
    strip_size = 16384 << strip_shift
    queue = LocalQueue() if is_shared else None
    members = members_of(member_count, 2 * strip_size + block, queue, block)
    stripe = StripeDevice(members, strip_size_bytes=strip_size)
    model = np.zeros(stripe.size_bytes, dtype=np.uint8)
    deadline = Deadline.after(60)
    for step in range(data.draw(st.integers(1, 4))):
        slba = data.draw(st.integers(0, stripe.block_count - 1))
        count = data.draw(st.integers(1, min(stripe.block_count - slba, 3 * strip_size // block)))
        payload = np.random.default_rng(step).integers(0, 256, count * block, dtype=np.uint8)
        write_blocks(stripe, slba, payload, deadline)
        model[slba * block : slba * block + payload.nbytes] = payload
    flush(stripe, deadline)
    strip_blocks = strip_size // block
    for logical in range(0, stripe.block_count, max(1, strip_blocks // 4)):
        member, lba = model_place(logical, member_count, strip_blocks)
        on_member = members[member].data[lba * block : (lba + 1) * block]
        assert np.array_equal(on_member, model[logical * block : (logical + 1) * block])
    assert np.array_equal(read_blocks(stripe, 0, stripe.block_count, deadline), model)


def test_a_batch_when_larger_than_every_queue_is_still_run_whole() -> None:
    members = members_of(3, 1 << 20, LocalQueue(capacity_count=8))
    stripe = StripeDevice(members, strip_size_bytes=16384)
    payload = np.arange(stripe.size_bytes, dtype=np.uint64).astype(np.uint8)
    ios = transfer_ios(stripe, 1, 0, payload.ctypes.data, payload.nbytes)
    single = np.repeat(ios[:1], 64)
    single["lba_count"], single["byte_count"] = 3, 3 * BLOCK
    single["slba"] = np.arange(64) * 3
    single["buf_addr"] = payload.ctypes.data + np.arange(64) * 3 * BLOCK
    execute(stripe, single, Deadline.after(10))
    assert np.array_equal(read_blocks(stripe, 0, 192, Deadline.after(10)), payload[: 192 * BLOCK])


@pytest.mark.parametrize("member_count", range(1, 9))
@pytest.mark.parametrize("strip_size", STRIP_SIZES[::2])
def test_split_in_the_core_when_any_extents_equals_the_python_twin(
    member_count: int, strip_size: int, rng: np.random.Generator
) -> None:
    stripe = StripeDevice(members_of(member_count, 3 * strip_size), strip_size_bytes=strip_size)
    handles = rng.permutation(member_count).astype(np.uint32)
    stripe.handles = handles
    split = ExtentMap(
        unit_blocks=stripe.unit_blocks,
        strip_blocks=stripe.strip_blocks,
        block_size_bytes=BLOCK,
        handles=handles.tolist(),
    )
    slba = rng.integers(0, stripe.block_count, 50, dtype=np.uint64)
    counts = np.array([rng.integers(1, stripe.block_count - int(at) + 1) for at in slba], dtype=np.uint64)
    ios = np.zeros(len(slba), dtype=IO_DTYPE)
    ios["opcode"], ios["slba"], ios["lba_count"] = OPCODE_READ, slba, counts
    ios["buf_addr"] = rng.integers(1, 1 << 40, len(slba))
    pieces, piece_members, piece_counts = stripe.map_ios(ios)
    got, groups, member_blocks = split.split(
        OPCODE_READ, slba, counts, ios["buf_addr"].copy(), blocks_total=int(counts.sum()), crc_bytes=77
    )
    for name in ("buf_addr", "slba", "lba_count", "byte_count", "device_index", "opcode", "flags"):
        assert np.array_equal(got[name], pieces[name]), name
    assert np.array_equal(got["tag"], np.arange(len(got)))
    owner = np.repeat(np.arange(len(slba)), piece_counts).astype(np.uint64)
    assert np.array_equal(
        got["group_addr"], np.uint64(address_of(groups)) + owner * np.uint64(IO_GROUP_DTYPE.itemsize)
    )
    assert np.array_equal(groups["remaining"], piece_counts)
    assert np.array_equal(groups["buf_addr"], ios["buf_addr"]) and (groups["byte_count"] == 77).all()
    blocks = np.bincount(piece_members, weights=pieces["lba_count"], minlength=member_count)
    assert np.array_equal(member_blocks, blocks.astype(np.int64))
