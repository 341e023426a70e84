"""Arithmetic over Identify values, lies included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.initiator import limits


@pytest.mark.parametrize(
    ("mdts", "mpsmin", "block", "expected"),
    [
        (0, 0, 512, 65536 * 512),
        (0, 0, 4096, 64 << 20),
        (5, 0, 512, 128 << 10),
        (1, 0, 512, 8192),
        (1, 4, 4096, 128 << 10),
        (255, 0, 4096, 64 << 20),
        (255, 15, 4096, 64 << 20),
        (1, 0, 65536, 0),
        (8, 0, 1536, (1 << 20) // 1536 * 1536),
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
    assert limits.ready_timeout_s(cap_to=0, crms=0, crwmt=0) == 0.5
    assert limits.ready_timeout_s(cap_to=20, crms=0, crwmt=100) == 10.0
    assert limits.ready_timeout_s(cap_to=20, crms=1, crwmt=100) == 50.0
    assert limits.shutdown_timeout_s(rtd3e_us=0, limit_s=60.0) == 5.0
    assert limits.shutdown_timeout_s(rtd3e_us=2_000_000, limit_s=60.0) == 2.0
    assert limits.shutdown_timeout_s(rtd3e_us=0xFFFFFFFF, limit_s=1e9) == 60.0
    assert limits.shutdown_timeout_s(rtd3e_us=0, limit_s=1.0) == 1.0
