"""Arithmetic over Identify values, lies included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.initiator import limits


@pytest.mark.parametrize(
    ("mdts", "mpsmin", "block", "expected"),
    [
        (0, 0, 512, 1 << 20),
        (0, 0, 4096, 1 << 20),
        (5, 0, 512, 128 << 10),
        (1, 0, 512, 8192),
        (1, 4, 4096, 128 << 10),
        (255, 0, 4096, 1 << 20),
        (255, 15, 4096, 1 << 20),
        (1, 0, 65536, 0),
        (255, 0, 1536, (1 << 20) // 1536 * 1536),
        (8, 0, 4096, 1 << 20),
    ],
)
def test_max_transfer_when_mdts_then_whole_blocks(mdts: int, mpsmin: int, block: int, expected: int) -> None:
    assert limits.max_transfer_bytes(mdts=mdts, mpsmin=mpsmin, block_size_bytes=block) == expected


@given(st.integers(0, 255), st.integers(0, 15), st.integers(9, 16))
def test_max_transfer_when_anything_then_bounded(mdts: int, mpsmin: int, lbads: int) -> None:
    size = limits.max_transfer_bytes(mdts=mdts, mpsmin=mpsmin, block_size_bytes=1 << lbads)
    assert 0 <= size <= limits.TRANSFER_SIZE_BYTES_MAX
    assert size % (1 << lbads) == 0
    assert size >> lbads <= 65536


@pytest.mark.parametrize(
    ("awupf", "nawupf", "valid", "nabspf", "nabo", "expected"),
    [
        (0, 0, False, 0, 0, 1),
        (7, 0, False, 0, 0, 8),
        (7, 31, False, 0, 0, 8),
        (7, 31, True, 0, 0, 32),
        (7, 0, True, 0, 0, 8),
        (8, 0, False, 0, 0, 8),
        (65535, 0, False, 0, 0, 65536),
        (31, 0, False, 7, 0, 8),
        (31, 0, False, 7, 4, 4),
        (31, 0, False, 6, 0, 1),
        (31, 0, False, 31, 1, 1),
    ],
)
def test_atomic_write_blocks_when_boundaries_then_aligned_runs_fit(
    awupf: int, nawupf: int, valid: bool, nabspf: int, nabo: int, expected: int
) -> None:
    assert (
        limits.atomic_write_blocks(
            awupf=awupf, nawupf=nawupf, is_nawupf_valid=valid, nabspf=nabspf, nabo=nabo
        )
        == expected
    )


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_atomic_write_blocks_when_any_then_no_run_crosses_a_boundary(
    awupf: int, nabspf: int, nabo: int, run_index: int
) -> None:
    size = limits.atomic_write_blocks(awupf=awupf, nawupf=0, is_nawupf_valid=False, nabspf=nabspf, nabo=nabo)
    assert size & (size - 1) == 0
    assert 1 <= size <= awupf + 1
    if nabspf:
        first, last = run_index * size, run_index * size + size - 1
        # Boundaries lie before block NABO + k * (NABSPF + 1).
        assert (first - nabo) // (nabspf + 1) == (last - nabo) // (nabspf + 1)


@pytest.mark.parametrize(
    ("depth", "mqes", "maxcmd", "expected"),
    [
        (128, 1023, 0, 129),
        (128, 127, 0, 128),
        (128, 127, 64, 64),
        (1, 1023, 0, 2),
        (128, 0, 0, 2),
        (128, 1, 1, 2),
    ],
)
def test_queue_size_when_controller_limits_then_clamped(
    depth: int, mqes: int, maxcmd: int, expected: int
) -> None:
    assert limits.queue_size(queue_depth=depth, mqes=mqes, maxcmd=maxcmd) == expected


def test_timeouts_when_reported_then_used_within_bounds() -> None:
    assert limits.ready_timeout_s(cap_to=0, crms=False, crwmt=0) == 0.5
    assert limits.ready_timeout_s(cap_to=20, crms=False, crwmt=100) == 10.0
    assert limits.ready_timeout_s(cap_to=20, crms=True, crwmt=100) == 50.0
    assert limits.shutdown_timeout_s(rtd3e_us=0, limit_s=60.0) == 5.0
    assert limits.shutdown_timeout_s(rtd3e_us=2_000_000, limit_s=60.0) == 2.0
    assert limits.shutdown_timeout_s(rtd3e_us=0xFFFFFFFF, limit_s=1e9) == 60.0
    assert limits.shutdown_timeout_s(rtd3e_us=0, limit_s=1.0) == 1.0


def test_write_zeroes_blocks_when_limits_then_bounded() -> None:
    def blocks(wzsl: int, transfer: int = 128 << 10) -> int:
        return limits.write_zeroes_blocks(
            wzsl=wzsl, mpsmin=0, block_size_bytes=4096, max_transfer_bytes=transfer
        )

    assert blocks(0) == 32
    assert blocks(3) == 8
    assert blocks(255) == 65536


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 5000)), max_size=600),
    st.sampled_from([0, 1, 7, 255]),
    st.sampled_from([0, 1, 100, 0xFFFFFFFF]),
    st.sampled_from([0, 150, 10_000]),
)
def test_deallocate_groups_when_any_ranges_then_same_blocks_within_limits(
    ranges: list[tuple[int, int]], dmrl: int, dmrsl: int, dmsl: int
) -> None:
    ranges = ranges if dmrsl != 1 else [(slba, min(count, 20)) for slba, count in ranges[:50]]
    groups = limits.deallocate_groups(ranges, dmrl=dmrl, dmrsl=dmrsl, dmsl=dmsl)
    flat = [piece for group in groups for piece in group]
    assert sum(count for _, count in flat) == sum(count for _, count in ranges)
    merged: list[list[int]] = []
    for slba, count in flat:
        if merged and merged[-1][0] + merged[-1][1] == slba:
            merged[-1][1] += count
        else:
            merged.append([slba, count])
    expected: list[list[int]] = []
    for slba, count in ranges:
        if expected and expected[-1][0] + expected[-1][1] == slba:
            expected[-1][1] += count
        else:
            expected.append([slba, count])
    assert merged == expected
    for group in groups:
        assert 1 <= len(group) <= (dmrl or 256)
        assert all(0 < count <= (dmrsl or 0xFFFFFFFF) for _, count in group)
        assert not dmsl or sum(count for _, count in group) <= dmsl


def test_copy_groups_keep_every_limit() -> None:
    ranges = [(0, 5), (100, 1), (200, 20)]
    groups = limits.copy_groups(ranges, mssrl=4, mcl=10, msrc=2)
    assert groups == [
        [(0, 4), (4, 1), (100, 1)],
        [(200, 4), (204, 4), (208, 2)],
        [(210, 4), (214, 4), (218, 2)],
    ]
    assert limits.copy_groups(ranges, mssrl=100, mcl=26, msrc=127) == [ranges]
    assert limits.copy_groups([(0, 3)], mssrl=1, mcl=1, msrc=0) == [[(0, 1)], [(1, 1)], [(2, 1)]]
    assert limits.copy_groups([], mssrl=1, mcl=1, msrc=0) == []
