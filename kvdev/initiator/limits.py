"""What Identify data allows: transfer sizes, atomic units, queue sizes. Arithmetic only.

Spec: NVM Express Base, Identify Controller; NVM Command Set, Identify Namespace and section 2.1.4.
Trust: every argument may be a lie of the peer; nothing here overflows or allocates by it.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_SIZE_BYTES_MIN = 512
BLOCK_SIZE_BYTES_MAX = 1 << 16
TRANSFER_BLOCK_COUNT_MAX = 1 << 16
"""NLB is 16 bits, 0's based."""
TRANSFER_SIZE_BYTES_MAX = 1 << 20
"""Our own bound: a larger command gains nothing and holds its queue up, and controllers that report no MDTS
still fail large ones (Linux nvmet above 4 MiB)."""
DSM_RANGE_COUNT_MAX = 256
DSM_RANGE_BLOCK_COUNT_MAX = 0xFFFF_FFFF
MDTS_SHIFT_MAX = 40
"""Shifts beyond this are "no limit" in any unit that matters."""


def max_transfer_bytes(*, mdts: int, mpsmin: int, block_size_bytes: int) -> int:
    """Largest payload of one command in bytes, whole blocks; 0 when not even one block may be moved."""
    limit = min(TRANSFER_SIZE_BYTES_MAX, TRANSFER_BLOCK_COUNT_MAX * block_size_bytes)
    # MDTS is a power of two in units of the smallest memory page; 0 means no limit.
    shift = mdts + 12 + mpsmin
    if mdts != 0 and shift < MDTS_SHIFT_MAX:
        limit = min(limit, 1 << shift)
    return limit - limit % block_size_bytes


def atomic_write_blocks(*, awupf: int, nawupf: int, is_nawupf_valid: bool, nabspf: int, nabo: int) -> int:
    """Largest power-of-two run of naturally aligned blocks that power failure leaves all old or all new.

    All arguments are the 0's based wire values. A namespace's own NAWUPF counts only when NSFEAT says so
    and it is not 0; a boundary (NABSPF not 0, first one NABO blocks in) must not be crossed.
    """
    unit = (nawupf if is_nawupf_valid and nawupf else awupf) + 1
    size = 1 << (unit.bit_length() - 1)
    if nabspf:
        boundary = nabspf + 1
        while size > 1 and (boundary % size or nabo % size):
            size >>= 1
    return size


def queue_size(*, queue_depth: int, mqes: int, maxcmd: int) -> int:
    """Submission queue entries for ``queue_depth`` commands in flight, at least 2.

    One entry of a queue stays empty; MQES is 0's based; MAXCMD 0 means nothing was reported.
    """
    size = min(queue_depth + 1, mqes + 1)
    if maxcmd:
        size = min(size, maxcmd)
    return max(size, 2)


def ready_timeout_s(*, cap_to: int, crms: bool, crwmt: int) -> float:
    """How long CSTS.RDY may take: CAP.TO, or CRTO where the controller has it, in units of 500 ms."""
    return max(cap_to, crwmt if crms else 0, 1) * 0.5


def shutdown_timeout_s(*, rtd3e_us: int, limit_s: float) -> float:
    """How long CSTS.SHST may take: RTD3E, 5 s when not reported, never more than ``limit_s`` or 60 s."""
    wanted = rtd3e_us / 1e6 if rtd3e_us else 5.0
    return min(max(wanted, 0.1), limit_s, 60.0)


def write_zeroes_blocks(*, wzsl: int, mpsmin: int, block_size_bytes: int, max_transfer_bytes: int) -> int:
    """Most blocks one Write Zeroes may cover, at least 1.

    WZSL is a power of two in units of the smallest memory page. A controller that reports none gets no
    more than one transfer at a time, which keeps a slow one inside the command timeout.
    """
    shift = wzsl + 12 + mpsmin
    size_bytes = 1 << min(shift, MDTS_SHIFT_MAX) if wzsl else max_transfer_bytes
    return max(1, min(size_bytes // block_size_bytes, TRANSFER_BLOCK_COUNT_MAX))


def verify_blocks(*, vsl: int, mpsmin: int, block_size_bytes: int, max_transfer_bytes: int) -> int:
    """Most blocks one Verify may cover, at least 1; VSL as WZSL in ``write_zeroes_blocks``."""
    return write_zeroes_blocks(
        wzsl=vsl, mpsmin=mpsmin, block_size_bytes=block_size_bytes, max_transfer_bytes=max_transfer_bytes
    )


def copy_groups(
    ranges: Sequence[tuple[int, int]], *, mssrl: int, mcl: int, msrc: int
) -> list[list[tuple[int, int]]]:
    """Ranges (slba, block count) cut and grouped into Copy commands: at most MSSRL blocks a range, MCL a command,
    and MSRC (0's based) ranges."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for slba, block_count in ranges:
        while block_count:
            if not room or len(groups[-1]) > msrc:
                groups.append([])
                room = mcl
            part = min(block_count, mssrl, room)
            groups[-1].append((slba, part))
            slba, block_count, room = slba + part, block_count - part, room - part
    return groups


def deallocate_groups(
    ranges: Sequence[tuple[int, int]], *, dmrl: int, dmrsl: int, dmsl: int
) -> list[list[tuple[int, int]]]:
    """Ranges (slba, block count) cut and grouped into commands that keep DMRL, DMRSL and DMSL.

    Each limit counts ranges, blocks of a range and blocks of a command; 0 means none beyond the format's.
    """
    range_limit = min(dmrl or DSM_RANGE_COUNT_MAX, DSM_RANGE_COUNT_MAX)
    piece_limit = min(
        dmrsl or DSM_RANGE_BLOCK_COUNT_MAX, dmsl or DSM_RANGE_BLOCK_COUNT_MAX, DSM_RANGE_BLOCK_COUNT_MAX
    )
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for slba, block_count in ranges:
        while block_count:
            part = min(block_count, piece_limit)
            if not groups or len(groups[-1]) == range_limit or (dmsl and part > room):
                groups.append([])
                room = dmsl
            groups[-1].append((slba, part))
            slba, block_count, room = slba + part, block_count - part, room - part
    return groups
