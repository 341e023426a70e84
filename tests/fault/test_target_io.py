"""I/O commands of the embedded target over real sockets: what they do and how each wrong one is refused."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvdev.native.target import CoreOptions
from kvdev.target.model import Transport
from kvdev.target.service import TargetOptions
from kvdev.testing.raw_host import (
    C2H_DATA,
    CAPSULE_RESP,
    R2T,
    RawHost,
    connected_admin,
    connected_io,
)
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.nvme import (
    DsmRange,
    NvmOpcode,
    Sqe,
    Status,
    build_dsm_deallocate,
    build_flush,
    build_read_write,
)

BLOCK = 4096
BLOCK_COUNT = (8 << 20) // BLOCK


def write(slba: int, data: bytes, *, nsid: int = 1, cid: int = 0, fua: bool = False) -> Sqe:
    return build_read_write(
        NvmOpcode.WRITE,
        nsid=nsid,
        slba=slba,
        lba_count=len(data) // BLOCK,
        byte_count=len(data),
        cid=cid,
        fua=fua,
    )


def read(slba: int, lba_count: int, *, nsid: int = 1, cid: int = 0) -> Sqe:
    return build_read_write(
        NvmOpcode.READ, nsid=nsid, slba=slba, lba_count=lba_count, byte_count=lba_count * BLOCK, cid=cid
    )


def random_bytes(rng: np.random.Generator, size: int) -> bytes:
    return rng.integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def target() -> Iterator[RunningTarget]:
    with running_target(namespace_count=2, namespace_size_bytes=BLOCK_COUNT * BLOCK) as running:
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
        # The queue id is free again when the target has seen the end.
    wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)


def wait_until(condition: object, *, turns: int = 2000) -> None:
    """Until the target's control thread has got there; bounded."""
    import threading

    assert callable(condition)
    for _ in range(turns):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("the target did not get there")


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK, 4 * BLOCK, 5 * BLOCK, 128 << 10])
@pytest.mark.parametrize(("hdgst", "ddgst"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("hpda", [0, 31])
def test_what_is_written_is_read_back(
    target: RunningTarget,
    admin: RawHost,
    rng: np.random.Generator,
    size: int,
    hdgst: bool,
    ddgst: bool,
    hpda: int,
) -> None:
    with connected_io(admin, target.nqn, qid=7, hdgst=hdgst, ddgst=ddgst, hpda=hpda) as io:
        data = random_bytes(rng, size)
        reply = io.execute(write(5, data), data, in_capsule=size == BLOCK)
        assert reply.cqe.is_success and reply.r2t_count == (size > BLOCK)
        assert target.bdev(1).read(5 * BLOCK, size) == data
        reply = io.execute(read(5, size // BLOCK))
        assert reply.cqe.is_success and reply.data == data and not reply.is_success_in_data
        assert target.bdev(2).read(5 * BLOCK, size) == bytes(size)
        io.close()
    wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)


@pytest.mark.parametrize("hdgst", [False, True])
@pytest.mark.parametrize("hpda", [0, 1, 3, 4, 5, 7, 15, 31])
def test_header_padding_is_what_the_host_demands_and_no_more_is_asked_of_it(
    target: RunningTarget, admin: RawHost, rng: np.random.Generator, hpda: int, hdgst: bool
) -> None:
    with connected_io(admin, target.nqn, qid=6, hpda=hpda, hdgst=hdgst) as io:
        data = random_bytes(rng, 6 * BLOCK)
        assert io.cpda == 0, "what the host asks is not asked of it"
        # Nothing that the host sends is padded (TCP 3.3: that is CPDA's to demand).
        assert io.execute(write(8, data[:BLOCK]), data[:BLOCK]).cqe.is_success
        reply = io.execute(write(9, data[BLOCK:]), data[BLOCK:], in_capsule=False)
        assert reply.cqe.is_success and reply.r2t_count == 1
        io.send(io.capsule(read(8, 6)))
        pdu = io.read_pdu()
        unit = 4 * (hpda + 1)
        head_size = 24 + 4 * hdgst
        # The first multiple of the unit after the header, also where that is longer than the unit.
        assert (pdu.type, pdu.pdo) == (C2H_DATA, -(-head_size // unit) * unit)
        assert pdu.data == data
        assert io.read_pdu().type == CAPSULE_RESP
        io.close()
    wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)


def test_success_comes_with_the_data_only_without_sq_flow_control(
    target: RunningTarget, admin: RawHost
) -> None:
    with connected_io(admin, target.nqn, qid=5, cattr=4) as io:
        assert io.execute(read(0, 8)).is_success_in_data
        # A command without data, or one that fails, still has its response; SQHD is 0 then.
        reply = io.execute(build_flush(nsid=1))
        assert reply.cqe.is_success and reply.cqe.sqhd == 0
        assert io.execute(read(BLOCK_COUNT, 1)).cqe.status & 0x7FF == Status.LBA_OUT_OF_RANGE


def test_c2h_success_off_sends_responses(rng: np.random.Generator) -> None:
    with (
        running_target(transport=Transport(c2h_success=False)) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn, cattr=4) as io,
    ):
        assert not io.execute(read(0, 8)).is_success_in_data


def test_sqhd_follows_the_submission_queue(io: RawHost) -> None:
    seen = [io.execute(build_flush(nsid=1)).cqe.sqhd for _ in range(40)]
    assert seen == [(2 + index) % 32 for index in range(40)]  # Connect was the first entry


@pytest.mark.parametrize(
    ("slba", "lba_count"),
    [(BLOCK_COUNT, 1), (BLOCK_COUNT - 1, 2), (2**64 - 1, 1), (2**64 - 1, 32), (1 << 63, 1)],
)
@pytest.mark.parametrize(
    "opcode", [NvmOpcode.READ, NvmOpcode.WRITE, NvmOpcode.COMPARE, NvmOpcode.WRITE_ZEROES]
)
def test_a_range_outside_the_namespace_is_refused(
    io: RawHost, opcode: NvmOpcode, slba: int, lba_count: int
) -> None:
    size = 0 if opcode == NvmOpcode.WRITE_ZEROES else lba_count * BLOCK
    sqe = build_read_write(opcode, nsid=1, slba=slba, lba_count=lba_count, byte_count=size)
    reply = io.execute(sqe)
    assert reply.cqe.status & 0x7FF == Status.LBA_OUT_OF_RANGE and reply.cqe.dnr and reply.r2t_count == 0


@pytest.mark.parametrize("nsid", [0, 3, 32, 33, 0xFFFFFFFE, 0xFFFFFFFF])
def test_a_namespace_that_is_not_there_is_refused(io: RawHost, nsid: int) -> None:
    for sqe in (read(0, 1, nsid=nsid), build_flush(nsid=nsid)):
        assert io.execute(sqe).cqe.status & 0x7FF == Status.INVALID_NAMESPACE_OR_FORMAT


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"opc": 0x04}, Status.INVALID_OPCODE),
        ({"opc": 0x03}, Status.INVALID_OPCODE),
        ({"opc": 0xFF}, Status.INVALID_OPCODE),
        ({"flags": 0x41}, Status.INVALID_FIELD),  # fused
        ({"flags": 0x00}, Status.INVALID_FIELD),  # PRP
        ({"sgl_type": 0x00}, Status.SGL_TYPE_INVALID),
        ({"sgl_type": 0x40}, Status.SGL_TYPE_INVALID),
        ({"sgl_type": 0x01}, Status.SGL_TYPE_INVALID),  # a read has nothing in its capsule
        ({"sgl_len": BLOCK - 4}, Status.DATA_SGL_LENGTH_INVALID),
        ({"sgl_len": 0}, Status.DATA_SGL_LENGTH_INVALID),
    ],
)
def test_a_malformed_read_fails_alone(io: RawHost, change: dict[str, int], status: Status) -> None:
    reply = io.execute(replace(read(0, 1), **change))
    assert reply.cqe.status & 0x7FF == status and reply.cqe.dnr
    assert io.execute(read(0, 1)).cqe.is_success


def test_in_capsule_data_must_fit_its_descriptor(io: RawHost) -> None:
    data = bytes(BLOCK)
    wrong_offset = replace(write(0, data), sgl_type=1, sgl_addr=4)
    io.send(io.capsule(wrong_offset, data))
    assert io.finish(0).cqe.status & 0x7FF == Status.SGL_OFFSET_INVALID
    for length in (BLOCK - 4, BLOCK + 4):
        io.send(io.capsule(replace(write(0, data), sgl_type=1, sgl_len=length), data))
        assert io.finish(0).cqe.status & 0x7FF == Status.DATA_SGL_LENGTH_INVALID
    io.send(io.capsule(replace(write(0, bytes(2 * BLOCK)), sgl_type=1, sgl_len=BLOCK), data))
    assert io.finish(0).cqe.status & 0x7FF == Status.DATA_SGL_LENGTH_INVALID


def test_more_than_mdts_is_refused(io: RawHost) -> None:
    reply = io.execute(read(0, 33))
    assert reply.cqe.status & 0x7FF == Status.INVALID_FIELD
    assert io.execute(read(0, 32)).cqe.is_success


def test_compare_tells_equal_from_different(io: RawHost, rng: np.random.Generator) -> None:
    for size in (BLOCK, 8 * BLOCK):
        data = random_bytes(rng, size)
        assert io.execute(write(64, data), data, in_capsule=size == BLOCK).cqe.is_success
        compare = replace(write(64, data), opc=NvmOpcode.COMPARE)
        assert io.execute(compare, data, in_capsule=size == BLOCK).cqe.is_success
        other = data[:-1] + bytes([data[-1] ^ 1])
        reply = io.execute(compare, other, in_capsule=size == BLOCK)
        assert reply.cqe.status & 0x7FF == Status.COMPARE_FAILURE


def test_write_zeroes_and_deallocate_leave_zeroes(io: RawHost, rng: np.random.Generator) -> None:
    data = random_bytes(rng, 32 * BLOCK)
    assert io.execute(write(0, data), data, in_capsule=False).cqe.is_success
    zero = build_read_write(NvmOpcode.WRITE_ZEROES, nsid=1, slba=4, lba_count=8, byte_count=0)
    assert io.execute(zero).cqe.is_success
    ranges = DsmRange(slba=20, lba_count=2).build() + DsmRange(slba=30, lba_count=1).build()
    assert io.execute(build_dsm_deallocate(nsid=1, range_count=2), ranges).cqe.is_success
    expected = bytearray(data)
    for first, count in ((4, 8), (20, 2), (30, 1)):
        expected[first * BLOCK : (first + count) * BLOCK] = bytes(count * BLOCK)
    assert io.execute(read(0, 32)).data == expected


def test_deallocate_checks_every_range_before_it_starts(io: RawHost, rng: np.random.Generator) -> None:
    data = random_bytes(rng, BLOCK)
    assert io.execute(write(0, data), data).cqe.is_success
    ranges = DsmRange(slba=0, lba_count=1).build() + DsmRange(slba=BLOCK_COUNT, lba_count=1).build()
    reply = io.execute(build_dsm_deallocate(nsid=1, range_count=2), ranges)
    assert reply.cqe.status & 0x7FF == Status.LBA_OUT_OF_RANGE
    assert io.execute(read(0, 1)).data == data
    hints = replace(build_dsm_deallocate(nsid=1, range_count=1), cdw11=1)
    assert io.execute(hints, ranges[:16]).cqe.is_success
    assert io.execute(read(0, 1)).data == data
    short = build_dsm_deallocate(nsid=1, range_count=3)
    reply = io.execute(replace(short, sgl_len=32), ranges)
    assert reply.cqe.status & 0x7FF == Status.DATA_SGL_LENGTH_INVALID


def test_many_commands_interleave_and_each_gets_its_own_data(io: RawHost, rng: np.random.Generator) -> None:
    data = [random_bytes(rng, 8 * BLOCK) for _ in range(30)]
    for cid in range(30):
        io.send(io.capsule(replace(write(cid * 8, data[cid], cid=cid), sgl_type=0x5A)))
    for _ in range(30):
        r2t = io.read_pdu()
        assert r2t.type == R2T
        io.answer_r2t(r2t, data[r2t.cccid])
    ends = {io.read_pdu().cqe.cid for _ in range(30)}
    assert ends == set(range(30))
    io.send(b"".join(io.capsule(read(cid * 8, 8, cid=cid)) for cid in range(30)))
    got: dict[int, bytes] = {}
    for _ in range(60):
        pdu = io.read_pdu()
        if pdu.type == C2H_DATA:
            got[pdu.cccid] = pdu.data
        else:
            assert pdu.type == CAPSULE_RESP and pdu.cqe.is_success
    assert [got[cid] for cid in range(30)] == data


def test_a_host_that_does_not_read_stalls_only_itself(
    target: RunningTarget, admin: RawHost, rng: np.random.Generator
) -> None:
    data = random_bytes(rng, 32 * BLOCK)
    with connected_io(admin, target.nqn, qid=3) as slow, connected_io(admin, target.nqn, qid=4) as quick:
        assert quick.execute(write(128, data), data, in_capsule=False).cqe.is_success
        slow.send(b"".join(slow.capsule(read(128, 32, cid=cid)) for cid in range(31)))
        for _ in range(20):
            assert quick.execute(read(128, 32)).data == data
        for _ in range(31):
            pdu = slow.read_pdu()
            assert pdu.type == C2H_DATA and pdu.data == data
            assert slow.read_pdu().cqe.is_success
    wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)


@pytest.mark.parametrize("ddgst", [False, True])
def test_a_block_cut_by_a_full_socket_is_sent_whole(
    target: RunningTarget, admin: RawHost, ddgst: bool
) -> None:
    """Reads go straight from memory; while they wait for the socket, writes change that memory.

    A digest covers what is sent: with one, what changed meanwhile would make it wrong, so a copy is sent.
    """
    with (
        connected_io(admin, target.nqn, qid=3, sqsize_0based=127, ddgst=ddgst) as reader,
        connected_io(admin, target.nqn, qid=4) as writer,
    ):
        reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        count = 120  # 15 MiB: more than the target's socket buffer grows to, so that it stops in the middle
        old, new = b"\x11" * (32 * BLOCK), b"\x22" * (32 * BLOCK)
        assert writer.execute(write(0, old), old, in_capsule=False).cqe.is_success
        for value in (new, old):
            reader.send(b"".join(reader.capsule(read(0, 32, cid=cid)) for cid in range(count)))
            for block in range(32):
                piece = value[:BLOCK]
                assert writer.execute(write(block, piece), piece).cqe.is_success
            for _ in range(count):
                pdu = reader.read_pdu()
                assert pdu.type == C2H_DATA and pdu.is_data_digest_right
                for at in range(0, len(pdu.data), BLOCK):
                    block_bytes = pdu.data[at : at + BLOCK]
                    assert block_bytes in (old[:BLOCK], new[:BLOCK]), at // BLOCK
                assert reader.read_pdu().cqe.is_success
    wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)


def test_a_small_write_cut_by_the_connection_leaves_the_old_block(
    target: RunningTarget, admin: RawHost, rng: np.random.Generator
) -> None:
    old = random_bytes(rng, 4 * BLOCK)
    target.bdev(1).write(0, old)
    for cut in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 17, 4 * BLOCK - 1):
        with connected_io(admin, target.nqn, qid=2) as io:
            io.send(io.capsule(replace(write(0, old), sgl_type=0x5A)))
            r2t = io.read_pdu()
            pdu = io.h2c_data(cccid=0, ttag=r2t.ttag, datao=0, data=bytes(4 * BLOCK), is_last=True)
            io.send(pdu[: 24 + cut])
        wait_until(lambda: not target.service.controllers(target.nqn)[0].io_qpair_count)
        assert target.bdev(1).read(0, 4 * BLOCK) == old


def test_file_namespaces_persist_and_flush(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4 << 20))
    data = random_bytes(rng, 32 * BLOCK)
    with running_target(namespace_count=0) as target:
        nsid = target.add_file_namespace(str(path))
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            for slba, size in ((0, BLOCK), (7, 4 * BLOCK), (100, 32 * BLOCK)):
                piece = data[:size]
                reply = io.execute(write(slba, piece, nsid=nsid), piece, in_capsule=size == BLOCK)
                assert reply.cqe.is_success
                assert io.execute(read(slba, size // BLOCK, nsid=nsid)).data == piece
            assert io.execute(build_flush(nsid=nsid)).cqe.is_success
            fua = write(200, data[:BLOCK], nsid=nsid, fua=True)
            assert io.execute(fua, data[:BLOCK]).cqe.is_success
            zero = build_read_write(NvmOpcode.WRITE_ZEROES, nsid=nsid, slba=7, lba_count=1, byte_count=0)
            assert io.execute(zero).cqe.is_success
    with open(path, "rb") as file:
        bytes_on_disk = file.read()
    assert bytes_on_disk[:BLOCK] == data[:BLOCK]
    assert bytes_on_disk[7 * BLOCK : 8 * BLOCK] == bytes(BLOCK)
    assert bytes_on_disk[8 * BLOCK : 11 * BLOCK] == data[BLOCK : 4 * BLOCK]
    assert bytes_on_disk[100 * BLOCK : 132 * BLOCK] == data
    with running_target(namespace_count=0) as target:
        nsid = target.add_file_namespace(str(path))
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            assert io.execute(read(100, 32, nsid=nsid)).data == data


def test_more_large_file_commands_than_buffers_all_end(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "disk"
    size = 96 * 8 * BLOCK
    data = random_bytes(rng, size)
    path.write_bytes(data)
    with running_target(namespace_count=0, transport=Transport(max_queue_depth=128)) as target:
        nsid = target.add_file_namespace(str(path))
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn, sqsize_0based=127) as io,
        ):
            io.send(b"".join(io.capsule(read(8 * cid, 8, nsid=nsid, cid=cid)) for cid in range(96)))
            got: dict[int, bytes] = {}
            ends = 0
            while ends < 96:
                pdu = io.read_pdu()
                if pdu.type == C2H_DATA:
                    got[pdu.cccid] = pdu.data
                else:
                    assert pdu.cqe.is_success
                    ends += 1
    assert b"".join(got[cid] for cid in range(96)) == data


def test_a_readonly_namespace_refuses_writes(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(os.urandom(BLOCK) + bytes(15 * BLOCK))
    with running_target(namespace_count=0) as target:
        nsid = target.add_file_namespace(str(path), is_readonly=True)
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            reply = io.execute(write(0, bytes(BLOCK), nsid=nsid), bytes(BLOCK))
            assert reply.cqe.status & 0x7FF == Status.NAMESPACE_WRITE_PROTECTED
            assert io.execute(read(0, 1, nsid=nsid)).data == path.read_bytes()[:BLOCK]


def test_a_normal_shutdown_flushes_file_namespaces(tmp_path: Path) -> None:
    from kvdev.wire.fabrics import Cc, Csts, Property, Shn, Shst

    path = tmp_path / "disk"
    path.write_bytes(bytes(16 * BLOCK))
    with running_target(namespace_count=0) as target:
        nsid = target.add_file_namespace(str(path))
        with connected_admin(target.address, target.port, target.nqn) as admin:
            before = target.bdev(nsid).stat().flush_count
            cc = Cc(en=1, iosqes=6, iocqes=4, shn=Shn.NORMAL)
            assert admin.property_set(Property.CC, cc.build()).cqe.is_success
            wait_until(lambda: Csts.parse(admin.property_get(Property.CSTS, 4).cqe.dw0).shst == Shst.COMPLETE)
            assert target.bdev(nsid).stat().flush_count == before + 1


def test_a_long_fill_leaves_the_poller_free(rng: np.random.Generator) -> None:
    size = 64 << 20
    with (
        running_target(namespace_size_bytes=size) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn) as io,
    ):
        target.bdev(1).write(0, random_bytes(rng, 1 << 20) * (size >> 20))
        zero = build_read_write(
            NvmOpcode.WRITE_ZEROES, nsid=1, slba=1, lba_count=size // BLOCK - 2, byte_count=0
        )
        assert io.execute(zero).cqe.is_success
        assert target.bdev(1).read(BLOCK, size - 2 * BLOCK) == bytes(size - 2 * BLOCK)
        assert any(target.bdev(1).read(0, BLOCK)) and any(target.bdev(1).read(size - BLOCK, BLOCK))
        whole = DsmRange(slba=0, lba_count=size // BLOCK).build()
        assert io.execute(build_dsm_deallocate(nsid=1, range_count=1), whole).cqe.is_success
        assert target.bdev(1).read(0, size) == bytes(size)


def test_several_pollers_share_the_connections(rng: np.random.Generator) -> None:
    options = TargetOptions(core=CoreOptions(poller_count=3))
    with (
        running_target(namespace_count=2, options=options) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
    ):
        queues = [connected_io(admin, target.nqn, qid=qid) for qid in range(1, 7)]
        groups = target.service.poll_groups()
        assert [group.current_io_qpairs for group in groups] == [2, 2, 2]
        data = [random_bytes(rng, 32 * BLOCK) for _ in queues]
        for turn, (queue, piece) in enumerate(zip(queues, data, strict=True)):
            queue.send(queue.capsule(replace(write(turn * 32, piece, cid=turn), sgl_type=0x5A)))
        for turn, (queue, piece) in enumerate(zip(queues, data, strict=True)):
            assert queue.finish(turn, piece).cqe.is_success
        for turn, queue in enumerate(queues):
            other = (turn + 1) % len(queues)
            assert queue.execute(read(other * 32, 32)).data == data[other]
        admin.close()
        for queue in queues:
            assert queue.wait_closed() == b""
            queue.close()


def test_a_raid0_namespace_maps_as_its_formula(rng: np.random.Generator) -> None:
    with running_target(namespace_count=0) as target:
        names = [
            target.model.create_malloc(name=None, block_size_bytes=512, block_count=16384) for _ in range(3)
        ]
        target.model.create_raid0(name="raid", strip_size_kb=64, base_names=names)
        nsid = target.model.add_namespace(target.nqn, bdev_name="raid")
        data = random_bytes(rng, 3 * 128 << 10)
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            for at in range(0, len(data), 128 << 10):
                piece = data[at : at + (128 << 10)]
                sqe = build_read_write(
                    NvmOpcode.WRITE, nsid=nsid, slba=at // 512, lba_count=256, byte_count=len(piece)
                )
                assert io.execute(sqe, piece, in_capsule=False).cqe.is_success
            got = b""
            for at in range(0, len(data), 64 << 10):
                sqe = build_read_write(
                    NvmOpcode.READ, nsid=nsid, slba=at // 512, lba_count=128, byte_count=64 << 10
                )
                got += io.execute(sqe).data
        assert got == data
        for strip in range(6):
            bdev = target.model.bdev(names[strip % 3])
            assert bdev is not None
            piece = target.service.bdev(bdev.handle).read((strip // 3) * (64 << 10), 64 << 10)
            assert piece == data[strip * (64 << 10) : (strip + 1) * (64 << 10)]


def test_a_namespace_that_is_removed_takes_no_more_io_and_frees_its_bdev(rng: np.random.Generator) -> None:
    with (
        running_target(namespace_count=2) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn) as io,
    ):
        data = random_bytes(rng, 8 * BLOCK)
        # A write that waits for its data keeps the namespace busy: the removal ends that connection.
        io.send(io.capsule(replace(write(0, data), sgl_type=0x5A)))
        assert io.read_pdu().type == R2T
        with connected_io(admin, target.nqn, qid=2) as other:
            target.service.namespace_clear_timeout_s = 0.2
            target.model.remove_namespace(target.nqn, 1)
            assert io.wait_closed() == b""
            reply = other.execute(read(0, 1, nsid=1))
            assert reply.cqe.status & 0x7FF == Status.INVALID_NAMESPACE_OR_FORMAT
            assert other.execute(read(0, 1, nsid=2)).cqe.is_success
            target.model.delete_bdev(target.bdev_names[0], target.model.bdevs()[0].kind)
            name = target.model.create_malloc(name="fresh", block_size_bytes=512, block_count=64)
            assert target.model.add_namespace(target.nqn, bdev_name=name) == 1
            sqe = build_read_write(NvmOpcode.READ, nsid=1, slba=0, lba_count=64, byte_count=32768)
            assert other.execute(sqe).data == bytes(32768)


def test_iostat_counts_direct_and_staged_transfers(target: RunningTarget, io: RawHost) -> None:
    stat_before = target.bdev(2).stat()
    data = bytes(32 * BLOCK)
    assert io.execute(write(0, data, nsid=2), data, in_capsule=False).cqe.is_success
    assert io.execute(write(0, data[:BLOCK], nsid=2), data[:BLOCK]).cqe.is_success
    assert io.execute(read(0, 32, nsid=2)).cqe.is_success
    stat = target.bdev(2).stat()
    assert stat.write_bytes - stat_before.write_bytes == 33 * BLOCK
    assert stat.write_count - stat_before.write_count == 2
    assert stat.read_bytes - stat_before.read_bytes == 32 * BLOCK


def test_admin_data_may_come_by_r2t(admin: RawHost) -> None:
    from kvdev.wire.features import Fid
    from kvdev.wire.nvme import FeaturesCommand

    behavior = b"\x01" + bytes(511)
    command = FeaturesCommand(fid=Fid.HOST_BEHAVIOR_SUPPORT, is_set=True)
    reply = admin.execute(command.to_sqe(), behavior, in_capsule=False)
    assert reply.cqe.is_success and reply.r2t_count == 1
    read_back = FeaturesCommand(fid=Fid.HOST_BEHAVIOR_SUPPORT, is_set=False, byte_count=512)
    assert admin.execute(read_back.to_sqe()).data == behavior
    assert struct.unpack("<B", behavior[:1]) == (1,)
