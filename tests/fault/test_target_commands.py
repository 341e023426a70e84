"""Verify, Copy and fused pairs of the embedded target over real sockets: what they do, and each wrong one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvdev.testing.raw_host import R2T, RawHost, Reply, connected_admin, connected_io
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.identify import (
    ONCS_COPY,
    ONCS_VERIFY,
    Cns,
    CsiControllerNvm,
    IdentifyController,
    IdentifyNamespace,
)
from kvdev.wire.nvme import (
    FUSE_FIRST,
    FUSE_SECOND,
    PSDT_SGL,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    IdentifyCommand,
    NvmOpcode,
    Sqe,
    Status,
    build_copy,
    build_copy_ranges,
    build_flush,
    build_read_write,
)

BLOCK = 4096
BLOCK_COUNT = (8 << 20) // BLOCK
FIRST, SECOND = 11, 12
"""CIDs of a pair."""


def command(
    opcode: int, slba: int, lba_count: int = 1, *, byte_count: int | None = None, cid: int = 0
) -> Sqe:
    size = lba_count * BLOCK if byte_count is None else byte_count
    return build_read_write(opcode, nsid=1, slba=slba, lba_count=lba_count, byte_count=size, cid=cid)


def code(reply: Reply) -> int:
    return reply.cqe.status & 0x7FF


def random_bytes(rng: np.random.Generator, size: int) -> bytes:
    return rng.integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module", params=["memory", "file", "cached"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningTarget]:
    """One namespace, run by the pollers, by the workers, or by the workers over a volatile cache."""
    from kvdev.target.service import TargetOptions

    options = TargetOptions(volatile_seed=3 if request.param == "cached" else None)
    memory_count = int(request.param == "memory")
    with running_target(
        namespace_count=memory_count, namespace_size_bytes=BLOCK_COUNT * BLOCK, options=options
    ) as running:
        if not memory_count:
            path = tmp_path_factory.mktemp("ns") / "file"
            path.write_bytes(bytes(BLOCK_COUNT * BLOCK))
            running.add_file_namespace(str(path))
        yield running


@pytest.fixture(scope="module")
def admin(target: RunningTarget) -> Iterator[RawHost]:
    with connected_admin(target.address, target.port, target.nqn) as host:
        yield host


@pytest.fixture
def io(target: RunningTarget, admin: RawHost) -> Iterator[RawHost]:
    with connected_io(admin, target.nqn) as host:
        yield host
        host.close()
    wait_idle(target)


def wait_idle(target: RunningTarget) -> None:
    for _ in range(5000):
        if not target.service.controllers(target.nqn)[0].io_qpair_count:
            return
        threading.Event().wait(0.002)
    raise AssertionError("the target did not see the queue's end")


# ---- Identify tells the truth ----


def identify(admin: RawHost, cns: int, *, nsid: int = 0) -> bytes:
    return admin.execute(IdentifyCommand(cns=cns, nsid=nsid).to_sqe(), read_size_bytes=4096).data


def test_identify_names_the_commands_and_their_limits(admin: RawHost) -> None:
    controller = IdentifyController.parse(identify(admin, Cns.CONTROLLER))
    assert controller.oncs & (ONCS_COPY | ONCS_VERIFY) == ONCS_COPY | ONCS_VERIFY
    assert controller.fuses == 1 and controller.acwu_0based == 0 and controller.cdfs == 1
    namespace = IdentifyNamespace.parse(identify(admin, Cns.NAMESPACE, nsid=1))
    limit = controller.max_transfer_bytes(4096) // BLOCK
    assert (namespace.mssrl, namespace.mcl, namespace.msrc_0based) == (limit, limit, 127)
    assert namespace.nmic == 1 and namespace.rescap == 0xFE and namespace.dlfeat == 1
    limits = CsiControllerNvm.parse(identify(admin, Cns.CSI_CONTROLLER))
    assert 4096 << limits.vsl == limit * BLOCK


# ---- Verify ----


def test_verify_when_in_range_then_succeeds_and_moves_nothing(io: RawHost) -> None:
    reply = io.execute(command(NvmOpcode.VERIFY, 0, 32, byte_count=0))
    assert reply.cqe.is_success and reply.data == b""


@pytest.mark.parametrize(
    ("slba", "lba_count", "status"),
    [
        (BLOCK_COUNT, 1, Status.LBA_OUT_OF_RANGE),
        (BLOCK_COUNT - 1, 2, Status.LBA_OUT_OF_RANGE),
        (0, 33, Status.INVALID_FIELD),  # over VSL
    ],
)
def test_verify_when_out_of_limits_then_refused(io: RawHost, slba: int, lba_count: int, status: int) -> None:
    assert code(io.execute(command(NvmOpcode.VERIFY, slba, lba_count, byte_count=0))) == status


def test_verify_when_the_medium_fails_then_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * BLOCK))
    with running_target(namespace_count=0) as target:
        target.add_file_namespace(str(path))
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            assert io.execute(command(NvmOpcode.VERIFY, 0, 32, byte_count=0)).cqe.is_success
            with path.open("r+b") as file:
                file.truncate(8 * BLOCK)  # what lies beyond cannot be read any more
            assert io.execute(command(NvmOpcode.VERIFY, 0, 8, byte_count=0)).cqe.is_success
            reply = io.execute(command(NvmOpcode.VERIFY, 7, 2, byte_count=0))
            assert code(reply) == Status.UNRECOVERED_READ_ERROR


# ---- Copy ----


def copy(io: RawHost, slba: int, ranges: list[tuple[int, int]], **changes: int) -> Reply:
    sqe = build_copy(nsid=1, slba=slba, range_count=len(ranges), **changes)
    return io.execute(sqe, build_copy_ranges(ranges), in_capsule=len(ranges) < 100)


def fill(target: RunningTarget, rng: np.random.Generator, lba_count: int) -> bytes:
    data = random_bytes(rng, lba_count * BLOCK)
    target.bdev(1).write(0, data)
    return data


def blocks(data: bytes, slba: int, lba_count: int = 1) -> bytes:
    return data[slba * BLOCK : (slba + lba_count) * BLOCK]


def test_copy_when_several_ranges_then_one_after_the_other(
    target: RunningTarget, io: RawHost, rng: np.random.Generator
) -> None:
    data = fill(target, rng, 64)
    ranges = [(5, 3), (40, 1), (0, 2), (5, 1)]
    assert copy(io, 100, ranges).cqe.is_success
    expected = b"".join(blocks(data, slba, count) for slba, count in ranges)
    assert target.bdev(1).read(100 * BLOCK, len(expected)) == expected
    assert target.bdev(1).read(0, len(data)) == data


@pytest.mark.parametrize("slba", [9, 10, 11, 14, 17])
def test_copy_when_ranges_overlap_the_destination_then_all_was_read_before(
    target: RunningTarget, io: RawHost, rng: np.random.Generator, slba: int
) -> None:
    data = fill(target, rng, 64)
    assert copy(io, slba, [(10, 4), (13, 4)]).cqe.is_success
    moved = blocks(data, 10, 4) + blocks(data, 13, 4)
    expected = blocks(data, 0, slba) + moved + blocks(data, slba + 8, 64 - slba - 8)
    assert target.bdev(1).read(0, len(data)) == expected


def test_copy_when_at_its_limits_then_done(
    target: RunningTarget, io: RawHost, rng: np.random.Generator
) -> None:
    data = fill(target, rng, 64)
    assert copy(io, 64, [(32, 32)]).cqe.is_success
    assert target.bdev(1).read(64 * BLOCK, 32 * BLOCK) == blocks(data, 32, 32)
    assert copy(io, BLOCK_COUNT - 32, [(i, 1) for i in range(32)]).cqe.is_success
    assert target.bdev(1).read((BLOCK_COUNT - 32) * BLOCK, 32 * BLOCK) == blocks(data, 0, 32)


@pytest.mark.parametrize(
    ("slba", "ranges", "changes", "status"),
    [
        (0, [(0, 33)], {}, Status.COMMAND_SIZE_LIMIT_EXCEEDED),  # MSSRL
        (0, [(0, 32), (0, 1)], {}, Status.COMMAND_SIZE_LIMIT_EXCEEDED),  # MCL
        (0, [(0, 1)] * 129, {}, Status.COMMAND_SIZE_LIMIT_EXCEEDED),  # MSRC
        (0, [(BLOCK_COUNT, 1)], {}, Status.LBA_OUT_OF_RANGE),
        (0, [(0, 1), (BLOCK_COUNT - 1, 2)], {}, Status.LBA_OUT_OF_RANGE),
        (0, [((1 << 64) - 1, 2)], {}, Status.LBA_OUT_OF_RANGE),
        (BLOCK_COUNT, [(0, 1)], {}, Status.LBA_OUT_OF_RANGE),
        ((1 << 64) - 1, [(0, 1)], {}, Status.LBA_OUT_OF_RANGE),
        (BLOCK_COUNT - 1, [(0, 2)], {}, Status.LBA_OUT_OF_RANGE),
        (0, [(0, 1)], {"descriptor_format": 1}, Status.INVALID_FIELD),
    ],
)
def test_copy_when_out_of_limits_then_refused_and_nothing_written(
    target: RunningTarget,
    io: RawHost,
    rng: np.random.Generator,
    slba: int,
    ranges: list[tuple[int, int]],
    changes: dict[str, int],
    status: int,
) -> None:
    data = fill(target, rng, 64)
    reply = copy(io, slba, ranges, **changes)
    assert code(reply) == status and reply.cqe.dnr and reply.cqe.dw0 == 0
    assert target.bdev(1).read(0, len(data)) == data


# ---- fused pairs ----


def pair(slba: int, *, lba_count: int = 1, in_capsule: bool = True, **second: int) -> tuple[Sqe, Sqe]:
    sgl_type = SGL_IN_CAPSULE if in_capsule else SGL_TRANSPORT
    compare = replace(
        command(NvmOpcode.COMPARE, slba, lba_count, cid=FIRST),
        flags=PSDT_SGL | FUSE_FIRST,
        sgl_type=sgl_type,
    )
    write = replace(
        command(NvmOpcode.WRITE, slba, lba_count, cid=SECOND), flags=PSDT_SGL | FUSE_SECOND, sgl_type=sgl_type
    )
    return compare, replace(write, **second)


def run_pair(io: RawHost, sqes: tuple[Sqe, Sqe], expected: bytes, new: bytes) -> tuple[int, int]:
    """Send both, serve the R2Ts, return both statuses."""
    data = {FIRST: expected, SECOND: new}
    sent = b"".join(io.capsule(sqe, data[sqe.cid] if sqe.sgl_type == SGL_IN_CAPSULE else b"") for sqe in sqes)
    io.send(sent)
    return finish_pair(io, data)


def finish_pair(io: RawHost, data: dict[int, bytes], *, count: int = 2) -> tuple[int, int]:
    statuses: dict[int, int] = {}
    while len(statuses) < count:
        pdu = io.read_pdu()
        if pdu.type == R2T:
            io.answer_r2t(pdu, data[pdu.cccid])
        else:
            statuses[pdu.cqe.cid] = pdu.cqe.status & 0x7FF
    return statuses.get(FIRST, -1), statuses.get(SECOND, -1)


@pytest.mark.parametrize("in_capsule", [True, False])
def test_pair_when_equal_then_written_else_untouched(
    target: RunningTarget, io: RawHost, rng: np.random.Generator, in_capsule: bool
) -> None:
    old, new, other = (random_bytes(rng, BLOCK) for _ in range(3))
    target.bdev(1).write(7 * BLOCK, old)
    sqes = pair(7, in_capsule=in_capsule)
    assert run_pair(io, sqes, other, new) == (Status.COMPARE_FAILURE, Status.ABORTED_FAILED_FUSED)
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == old
    assert run_pair(io, sqes, old, new) == (0, 0)
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == new


def test_pair_when_one_half_in_capsule_and_the_other_by_r2t_then_written(
    target: RunningTarget, io: RawHost, rng: np.random.Generator
) -> None:
    new = random_bytes(rng, BLOCK)
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    compare, write = pair(7)
    assert run_pair(io, (replace(compare, sgl_type=SGL_TRANSPORT), write), bytes(BLOCK), new) == (0, 0)
    assert run_pair(io, (compare, replace(write, sgl_type=SGL_TRANSPORT)), new, bytes(BLOCK)) == (0, 0)
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == bytes(BLOCK)


@pytest.mark.parametrize(
    ("changes", "statuses"),
    [
        # The second half alone is at fault: the first is aborted with it.
        ({"cdw10": BLOCK_COUNT}, (Status.ABORTED_FAILED_FUSED, Status.LBA_OUT_OF_RANGE)),
        ({"nsid": 9}, (Status.ABORTED_FAILED_FUSED, Status.INVALID_NAMESPACE_OR_FORMAT)),
        ({"opc": NvmOpcode.COMPARE}, (Status.ABORTED_FAILED_FUSED, Status.INVALID_FIELD)),
        # Both are right, but do not belong together.
        ({"cdw10": 8}, (Status.INVALID_FIELD, Status.INVALID_FIELD)),
    ],
)
@pytest.mark.parametrize("in_capsule", [True, False])
def test_pair_when_second_half_is_wrong_then_both_fail(
    target: RunningTarget, io: RawHost, changes: dict[str, int], statuses: tuple[int, int], in_capsule: bool
) -> None:
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    assert run_pair(io, pair(7, in_capsule=in_capsule, **changes), bytes(BLOCK), b"x" * BLOCK) == statuses
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == bytes(BLOCK)
    assert run_pair(io, pair(7), bytes(BLOCK), bytes(BLOCK)) == (0, 0)


def test_pair_when_first_half_is_wrong_then_second_aborted(target: RunningTarget, io: RawHost) -> None:
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    compare, write = pair(7)
    for wrong, status in (
        ({"cdw10": BLOCK_COUNT}, Status.LBA_OUT_OF_RANGE),
        ({"opc": NvmOpcode.WRITE}, Status.INVALID_FIELD),
        ({"opc": 0x7E}, Status.INVALID_OPCODE),
    ):
        statuses = run_pair(io, (replace(compare, **wrong), write), bytes(BLOCK), b"x" * BLOCK)
        assert statuses == (status, Status.ABORTED_FAILED_FUSED)
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == bytes(BLOCK)


def test_pair_when_longer_than_acwu_then_refused(target: RunningTarget, io: RawHost) -> None:
    sqes = pair(7, lba_count=2, in_capsule=False)
    statuses = run_pair(io, sqes, bytes(2 * BLOCK), bytes(2 * BLOCK))
    assert statuses == (Status.ATOMIC_WRITE_UNIT_EXCEEDED, Status.ABORTED_FAILED_FUSED)


def test_second_half_alone_is_aborted(target: RunningTarget, io: RawHost) -> None:
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    reply = io.execute(pair(7)[1], b"x" * BLOCK)
    assert code(reply) == Status.ABORTED_MISSING_FUSED
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == bytes(BLOCK)


@pytest.mark.parametrize("in_capsule", [True, False])
def test_first_half_alone_is_aborted_by_what_comes_next(io: RawHost, in_capsule: bool) -> None:
    first, second = pair(7, in_capsule=in_capsule)
    sent = io.capsule(first, bytes(BLOCK) if in_capsule else b"")
    io.send(sent + io.capsule(build_flush(nsid=1, cid=SECOND)))
    statuses = finish_pair(io, {FIRST: bytes(BLOCK)})
    assert statuses == (Status.ABORTED_MISSING_FUSED, 0)
    # The half that came too late finds none.
    assert (
        code(io.execute(replace(second, sgl_type=SGL_IN_CAPSULE), bytes(BLOCK)))
        == Status.ABORTED_MISSING_FUSED
    )


def test_two_first_halves_then_a_second_makes_one_pair(target: RunningTarget, io: RawHost) -> None:
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    first, second = pair(7)
    io.send(io.capsule(replace(first, cid=1), bytes(BLOCK)))
    io.send(io.capsule(first, bytes(BLOCK)) + io.capsule(second, b"x" * BLOCK))
    completed = {cqe.cid: cqe.status & 0x7FF for cqe in (io.read_pdu().cqe for _ in range(3))}
    assert completed == {1: Status.ABORTED_MISSING_FUSED, FIRST: 0, SECOND: 0}
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == b"x" * BLOCK


def test_both_fuse_bits_are_refused(io: RawHost) -> None:
    sqe = replace(pair(7)[1], flags=PSDT_SGL | FUSE_FIRST | FUSE_SECOND)
    assert code(io.execute(sqe, bytes(BLOCK))) == Status.INVALID_FIELD


@pytest.mark.parametrize("in_capsule", [True, False])
def test_pair_when_connection_ends_after_first_half_then_nothing_written(
    target: RunningTarget, admin: RawHost, in_capsule: bool
) -> None:
    target.bdev(1).write(7 * BLOCK, bytes(BLOCK))
    with connected_io(admin, target.nqn, qid=2) as host:
        first, second = pair(7, in_capsule=in_capsule)
        host.send(host.capsule(first, bytes(BLOCK) if in_capsule else b""))
        if not in_capsule:
            # The second half's capsule came as well, but not its data.
            host.send(host.capsule(second))
            pdu = host.read_pdu()
            assert pdu.type == R2T
            host.answer_r2t(pdu, bytes(BLOCK))
    wait_idle(target)
    assert target.bdev(1).read(7 * BLOCK, BLOCK) == bytes(BLOCK)
    with connected_io(admin, target.nqn) as host:
        assert run_pair(host, pair(7), bytes(BLOCK), b"x" * BLOCK) == (0, 0)
    wait_idle(target)


def test_pairs_and_writes_of_several_hosts_lose_no_step(target: RunningTarget, admin: RawHost) -> None:
    """A counter that three queues increment by compare and write, while plain writes go to blocks beside it."""
    steps, workers = (400, 3) if os.environ.get("KVDEV_LONG") else (40, 3)
    target.bdev(1).write(20 * BLOCK, bytes(3 * BLOCK))
    failures: list[str] = []
    successes = [0] * workers

    def increment(index: int) -> None:
        with connected_io(admin, target.nqn, qid=10 + index) as host:
            while successes[index] < steps:
                now = host.execute(command(NvmOpcode.READ, 21)).data
                value = int.from_bytes(now[:8], "little") + 1
                statuses = run_pair(host, pair(21), now, value.to_bytes(8, "little") + now[8:])
                if statuses == (0, 0):
                    successes[index] += 1
                elif statuses != (Status.COMPARE_FAILURE, Status.ABORTED_FAILED_FUSED):
                    failures.append(str(statuses))
                    return
                beside = bytes([index + 1]) * BLOCK
                reply = host.execute(replace(command(NvmOpcode.WRITE, 20 + 2 * (index % 2))), beside)
                if not reply.cqe.is_success:
                    failures.append(str(reply))

    threads = [threading.Thread(target=increment, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    stored = target.bdev(1).read(21 * BLOCK, BLOCK)
    assert int.from_bytes(stored[:8], "little") == steps * workers
    wait_idle(target)


# ---- read-only, and blocks that are too large to fuse ----


def test_read_only_namespace_lets_verify_in_and_copy_and_pairs_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * BLOCK))
    with running_target(namespace_count=0) as target:
        target.add_file_namespace(str(path), is_readonly=True)
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            assert io.execute(command(NvmOpcode.VERIFY, 0, 4, byte_count=0)).cqe.is_success
            assert code(copy(io, 0, [(1, 1)])) == Status.NAMESPACE_WRITE_PROTECTED
            statuses = run_pair(io, pair(7), bytes(BLOCK), b"x" * BLOCK)
            assert statuses == (Status.ABORTED_FAILED_FUSED, Status.NAMESPACE_WRITE_PROTECTED)
    assert path.read_bytes() == bytes(64 * BLOCK)


def test_fuses_is_off_where_a_block_is_larger_than_a_pair_may_be() -> None:
    with (
        running_target(namespace_count=1, block_size_bytes=32768) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
    ):
        assert IdentifyController.parse(identify(admin, Cns.CONTROLLER)).fuses == 0
