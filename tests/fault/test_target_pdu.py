"""What the embedded target does with PDUs that break the rules: one C2HTermReq, close, others live on."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvdev.native.crc import crc32c
from kvdev.native.target import CoreOptions
from kvdev.target.service import TargetOptions
from kvdev.testing.raw_host import (
    C2H_TERM,
    CAPSULE_CMD,
    CAPSULE_RESP,
    H2C_DATA,
    H2C_TERM,
    IC_RESP,
    R2T,
    RawHost,
    connected_admin,
    connected_io,
)
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.fabrics import ConnectCommand
from kvdev.wire.nvme import (
    NvmOpcode,
    Sqe,
    Status,
    build_flush,
    build_keep_alive,
    build_read_write,
)

BLOCK = 4096
FES_INVALID_HEADER, FES_SEQUENCE, FES_HDGST, FES_RANGE, FES_LIMIT = 1, 2, 3, 4, 5


@pytest.fixture(scope="module")
def target() -> Iterator[RunningTarget]:
    with running_target() as running:
        yield running


@pytest.fixture(scope="module")
def bystander(target: RunningTarget) -> Iterator[RawHost]:
    """Another association, which must notice nothing."""
    with (
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn, qid=9) as io,
    ):
        yield io


@pytest.fixture
def admin(target: RunningTarget, bystander: RawHost) -> Iterator[RawHost]:
    with connected_admin(target.address, target.port, target.nqn) as host:
        yield host
    assert bystander.execute(build_flush(nsid=1)).cqe.is_success
    assert bystander.execute(read(0, 16)).cqe.is_success


@pytest.fixture
def io(target: RunningTarget, admin: RawHost) -> Iterator[RawHost]:
    with connected_io(admin, target.nqn) as host:
        yield host


def write(slba: int, size: int, *, cid: int = 0) -> Sqe:
    return build_read_write(
        NvmOpcode.WRITE, nsid=1, slba=slba, lba_count=size // BLOCK, byte_count=size, cid=cid
    )


def read(slba: int, lba_count: int, *, cid: int = 0) -> Sqe:
    return build_read_write(
        NvmOpcode.READ, nsid=1, slba=slba, lba_count=lba_count, byte_count=lba_count * BLOCK, cid=cid
    )


def header(kind: int, *, flags: int = 0, hlen: int = 72, pdo: int = 0, plen: int = 72) -> bytes:
    return struct.pack("<BBBBI", kind, flags, hlen, pdo, plen)


def check_term(host: RawHost, fes: int, fei: int | None = None, *, sent: bytes = b"") -> None:
    term = host.expect_term()
    got_fes, got_fei = term.fes_and_fei
    assert got_fes == fes
    if fei is not None:
        assert got_fei == fei
    if sent:
        assert term.data[:8] == sent[:8]  # the offending header comes back


# ---- S-12: lengths, S-13: types and order ----


@pytest.mark.parametrize("plen", [0, 7, 71])
def test_a_capsule_shorter_than_its_header_is_fatal(io: RawHost, plen: int) -> None:
    pdu = header(CAPSULE_CMD, plen=plen) + bytes(64)
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, 4, sent=pdu)


@pytest.mark.parametrize("plen", [72 + BLOCK + 4, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_capsule_longer_than_the_target_takes_is_fatal(io: RawHost, plen: int) -> None:
    pdu = header(CAPSULE_CMD, plen=plen, pdo=72) + bytes(64)
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, 4, sent=pdu)


@pytest.mark.parametrize("hlen", [0, 8, 71, 73, 255])
def test_a_header_of_impossible_length_is_fatal(io: RawHost, hlen: int) -> None:
    pdu = header(CAPSULE_CMD, hlen=hlen) + bytes(64)
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, 2, sent=pdu)


@pytest.mark.parametrize("pdo", [0, 71, 73, 255])
def test_a_data_offset_that_is_wrong_is_fatal(io: RawHost, pdo: int) -> None:
    pdu = header(CAPSULE_CMD, plen=72 + 512, pdo=pdo) + replace(write(0, BLOCK), sgl_type=1).build()
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, sent=pdu)


@pytest.mark.parametrize("kind", [IC_RESP, C2H_TERM, CAPSULE_RESP, 0x07, 0x08, R2T, 0x0A, 0xFF])
def test_a_type_that_hosts_do_not_send_is_fatal(io: RawHost, kind: int) -> None:
    pdu = header(kind, hlen=24, plen=24) + bytes(16)
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, 0, sent=pdu)


def test_a_second_ic_request_is_a_sequence_error(io: RawHost) -> None:
    io.send(RawHost.ic_req())
    check_term(io, FES_SEQUENCE)


def test_a_capsule_before_the_ic_exchange_is_a_sequence_error(target: RunningTarget) -> None:
    with RawHost(target.address, target.port) as host:
        command = ConnectCommand(qid=0, sqsize_0based=31).to_sqe()
        host.send(host.capsule(command, host.connect_data(target.nqn)))
        check_term(host, FES_SEQUENCE)


@pytest.mark.parametrize(
    "request_bytes",
    [RawHost.ic_req(pfv=1), RawHost.ic_req(hpda=32)],
)
def test_an_ic_request_with_a_bad_field_is_fatal(target: RunningTarget, request_bytes: bytes) -> None:
    with RawHost(target.address, target.port) as host:
        host.send(request_bytes)
        fes, _ = host.expect_term().fes_and_fei
        assert fes in (FES_INVALID_HEADER, 6)


def test_more_in_capsule_data_than_offered_is_fatal(io: RawHost) -> None:
    data = bytes(2 * BLOCK)
    io.send(io.capsule(replace(write(0, len(data)), sgl_type=1), data))
    check_term(io, FES_INVALID_HEADER, 4)


def test_a_termination_request_closes_without_an_answer(io: RawHost) -> None:
    io.send(header(H2C_TERM, hlen=24, plen=24 + 8) + struct.pack("<HI", 1, 0) + bytes(10) + bytes(8))
    assert io.wait_closed() == b""


def test_other_commands_before_connect_are_refused(target: RunningTarget) -> None:
    with RawHost(target.address, target.port) as host:
        host.exchange_ic()
        reply = host.execute(build_keep_alive())
        assert reply.cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
        assert host.property_get(0, 8).cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
        assert host.connect(target.nqn).cqe.is_success
        assert host.connect(target.nqn).cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR


# ---- S-11: any split of the stream gives the same ----


def test_every_split_of_the_stream_gives_the_same_result(target: RunningTarget, admin: RawHost) -> None:
    data = bytes(range(256)) * 16
    with connected_io(admin, target.nqn, qid=2, hdgst=True, ddgst=True) as io:
        stream = b"".join(
            (
                io.capsule(replace(write(3, BLOCK, cid=1), sgl_type=1), data),
                io.capsule(read(3, 1, cid=2)),
                io.capsule(build_flush(nsid=1, cid=3)),
            )
        )
        cuts = [*range(1, 90), *range(len(stream) - 200, len(stream), 3), *range(100, len(stream) - 200, 211)]
        for cut in cuts:
            io.send(stream[:cut])
            io.send(stream[cut:])
            check_stream_answer(io, data)


def test_one_byte_a_segment_gives_the_same_result(target: RunningTarget, admin: RawHost) -> None:
    data = bytes(range(256)) * 16
    with connected_io(admin, target.nqn, qid=2, hdgst=True, ddgst=True) as io:
        stream = b"".join(
            (
                io.capsule(replace(write(3, BLOCK, cid=1), sgl_type=1), data),
                io.capsule(read(3, 1, cid=2)),
                io.capsule(build_flush(nsid=1, cid=3)),
            )
        )
        for at in range(len(stream)):
            io.send(stream[at : at + 1])
        check_stream_answer(io, data)


def check_stream_answer(io: RawHost, data: bytes) -> None:
    assert io.read_pdu().cqe.cid == 1
    got = io.read_pdu()
    assert got.data == data and got.is_data_digest_right
    assert [io.read_pdu().cqe.cid for _ in range(2)] == [2, 3]


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 71, 72, 73, 72 + 100, 72 + BLOCK - 1])
def test_a_pdu_cut_by_the_end_of_the_stream_does_nothing(
    io: RawHost, target: RunningTarget, cut: int
) -> None:
    target.bdev(1).write(0, b"\x5a" * BLOCK)
    pdu = io.capsule(replace(write(0, BLOCK), sgl_type=1), bytes(BLOCK))
    io.send(pdu[:cut])
    io.socket.shutdown(1)
    assert io.wait_closed() == b""
    assert target.bdev(1).read(0, BLOCK) == b"\x5a" * BLOCK


# ---- S-15: H2CData ----


def started_write(io: RawHost, size: int = 32 * BLOCK) -> tuple[int, int]:
    """Send a write; its TTAG and CID."""
    io.send(io.capsule(write(0, size, cid=11)))
    r2t = io.read_pdu()
    assert r2t.type == R2T and r2t.offset_and_length == (0, size)
    return r2t.ttag, r2t.cccid


H2CChange = Callable[[RawHost, int, int], bytes]


@pytest.mark.parametrize(
    ("make", "fes", "fei"),
    [
        (
            lambda io, ttag, cid: io.h2c_data(cccid=cid, ttag=0, datao=0, data=bytes(BLOCK), is_last=False),
            1,
            10,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=0xFFFF, datao=0, data=bytes(BLOCK), is_last=False
            ),
            1,
            10,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=ttag % 32 + 1, datao=0, data=bytes(BLOCK), is_last=False
            ),
            1,
            10,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid + 1, ttag=ttag, datao=0, data=bytes(BLOCK), is_last=False
            ),
            1,
            8,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=ttag, datao=4, data=bytes(BLOCK), is_last=False
            ),
            2,
            0,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=ttag, datao=0xFFFFFFFC, data=bytes(BLOCK), is_last=False
            ),
            4,
            0,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(cccid=cid, ttag=ttag, datao=0, data=bytes(BLOCK), is_last=True),
            1,
            1,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=ttag, datao=0, data=bytes(33 * BLOCK), is_last=False
            ),
            5,
            0,
        ),
        (
            lambda io, ttag, cid: io.h2c_data(
                cccid=cid, ttag=ttag, datao=0, data=bytes(32 * BLOCK), is_last=False
            ),
            1,
            1,
        ),
        (
            lambda io, ttag, cid: (
                header(H2C_DATA, hlen=24, pdo=24, plen=24 + BLOCK)
                + struct.pack("<HHII4x", cid, ttag, 0, BLOCK - 4)
            ),
            1,
            4,
        ),
        (
            lambda io, ttag, cid: (
                header(H2C_DATA, hlen=24, pdo=24, plen=24) + struct.pack("<HHII4x", cid, ttag, 0, 0)
            ),
            1,
            16,
        ),
    ],
    ids=[
        "ttag-0",
        "ttag-65535",
        "ttag-without-r2t",
        "another-cid",
        "datao-gap",
        "datao-wraps",
        "last-too-early",
        "more-than-maxh2cdata",
        "last-missing",
        "datal-not-plen",
        "datal-0",
    ],
)
def test_h2c_data_that_breaks_a_rule_is_fatal(io: RawHost, make: H2CChange, fes: int, fei: int) -> None:
    ttag, cid = started_write(io)
    sent = make(io, ttag, cid)
    io.send(sent)
    check_term(io, fes, fei, sent=sent)


def test_h2c_data_without_any_r2t_is_fatal(io: RawHost) -> None:
    io.send(io.h2c_data(cccid=0, ttag=1, datao=0, data=bytes(BLOCK), is_last=True))
    check_term(io, FES_INVALID_HEADER, 10)


def test_h2c_data_after_its_last_is_fatal(io: RawHost) -> None:
    ttag, cid = started_write(io, 16 * BLOCK)
    pdu = io.h2c_data(cccid=cid, ttag=ttag, datao=0, data=bytes(16 * BLOCK), is_last=True)
    io.send(pdu)
    assert io.read_pdu().cqe.is_success
    io.send(pdu)
    check_term(io, FES_INVALID_HEADER, 10)


# ---- S-16: queue overrun and CIDs ----


def test_more_commands_than_the_queue_holds_end_the_association(
    target: RunningTarget, admin: RawHost
) -> None:
    with connected_io(admin, target.nqn, qid=3, sqsize_0based=7) as io:
        io.send(b"".join(io.capsule(write(0, 8 * BLOCK, cid=cid)) for cid in range(8)))
        assert [io.read_pdu().type for _ in range(8)] == [R2T] * 8
        io.send(io.capsule(write(0, 8 * BLOCK, cid=8)))
        check_term(io, FES_SEQUENCE)
        assert admin.wait_closed() == b""


def test_a_cid_in_use_is_a_conflict(io: RawHost) -> None:
    ttag, cid = started_write(io)
    for sqe in (build_flush(nsid=1, cid=cid), replace(write(0, BLOCK, cid=cid), sgl_type=1)):
        io.send(io.capsule(sqe, bytes(BLOCK) if sqe.sgl_type == 1 else b""))
        assert io.read_pdu().cqe.status & 0x7FF == Status.COMMAND_ID_CONFLICT
    # The first command is not disturbed, and its CID is free afterwards.
    io.send(io.h2c_data(cccid=cid, ttag=ttag, datao=0, data=bytes(32 * BLOCK), is_last=True))
    assert io.read_pdu().cqe.is_success
    assert io.execute(build_flush(nsid=1, cid=cid)).cqe.is_success


# ---- digests ----


def test_a_wrong_header_digest_is_fatal_and_reported_as_received(
    target: RunningTarget, admin: RawHost
) -> None:
    with connected_io(admin, target.nqn, qid=3, hdgst=True) as io:
        pdu = bytearray(io.capsule(build_flush(nsid=1)))
        pdu[-1] ^= 0x80
        io.send(bytes(pdu))
        check_term(io, FES_HDGST, struct.unpack("<I", pdu[-4:])[0])


def test_a_header_without_the_agreed_digest_is_fatal(target: RunningTarget, admin: RawHost) -> None:
    with connected_io(admin, target.nqn, qid=3, hdgst=True) as io:
        io.hdgst = False
        io.send(io.capsule(build_flush(nsid=1)))
        fes, _ = io.expect_term().fes_and_fei
        assert fes == FES_INVALID_HEADER


@pytest.mark.parametrize("block_count", [1, 32])
def test_a_wrong_data_digest_fails_the_command_alone(
    target: RunningTarget, admin: RawHost, block_count: int
) -> None:
    old = b"\x77" * (block_count * BLOCK)
    data = bytes(block_count * BLOCK)
    target.bdev(1).write(0, old)
    with connected_io(admin, target.nqn, qid=3, hdgst=True, ddgst=True) as io:
        if block_count == 1:
            pdu = bytearray(io.capsule(replace(write(0, BLOCK), sgl_type=1), data))
        else:
            io.send(io.capsule(write(0, len(data))))
            r2t = io.read_pdu()
            pdu = bytearray(io.h2c_data(cccid=0, ttag=r2t.ttag, datao=0, data=data, is_last=True))
        pdu[-2] ^= 0x01
        io.send(bytes(pdu))
        cqe = io.read_pdu().cqe
        assert cqe.status & 0x7FF == Status.TRANSIENT_TRANSPORT_ERROR and not cqe.dnr
        assert target.bdev(1).read(0, len(old)) == old  # checked before it touches the namespace
        assert io.execute(write(0, len(data)), data, in_capsule=block_count == 1).cqe.is_success
        assert target.bdev(1).read(0, len(old)) == data


def test_digests_are_granted_only_when_allowed_and_asked(target: RunningTarget) -> None:
    options = TargetOptions(ddgst=False)
    with running_target(options=options) as other, RawHost(other.address, other.port) as host:
        host.exchange_ic(hdgst=True, ddgst=True)
        assert (host.hdgst, host.ddgst) == (True, False)
    with RawHost(target.address, target.port) as host:
        host.exchange_ic()
        assert (host.hdgst, host.ddgst) == (False, False)


# ---- alignment the target demands ----


def test_data_must_be_padded_as_the_target_demands() -> None:
    with (
        running_target(options=TargetOptions(cpda=31)) as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
    ):
        data = b"\x42" * BLOCK
        with connected_io(admin, target.nqn) as io:
            assert io.cpda == 31
            assert io.execute(write(0, BLOCK), data).cqe.is_success
            assert io.execute(write(1, 8 * BLOCK), data * 8, in_capsule=False).cqe.is_success
            assert io.execute(read(0, 9)).data == data * 9
            io.cpda = 0
            io.send(io.capsule(replace(write(0, BLOCK), sgl_type=1), data))
            fes, fei = io.expect_term().fes_and_fei
            assert (fes, fei) == (FES_INVALID_HEADER, 3)


# ---- bounds in time and number ----


def test_a_connection_that_never_speaks_is_closed() -> None:
    options = TargetOptions(core=CoreOptions(connect_timeout_ms=600))
    with running_target(options=options) as target:
        with RawHost(target.address, target.port) as silent, RawHost(target.address, target.port) as half:
            half.exchange_ic()
            assert silent.wait_closed() == b"" and half.wait_closed() == b""
        with connected_admin(target.address, target.port, target.nqn) as admin:
            threading.Event().wait(1.0)
            assert admin.execute(build_keep_alive()).cqe.is_success


def test_connections_beyond_the_bound_are_refused() -> None:
    options = TargetOptions(core=CoreOptions(connection_count_max=3))
    with running_target(options=options) as target:
        admin = connected_admin(target.address, target.port, target.nqn)
        first, second = RawHost(target.address, target.port), RawHost(target.address, target.port)
        first.exchange_ic()
        second.exchange_ic()
        with RawHost(target.address, target.port) as third:
            assert third.wait_closed() == b""
        assert admin.execute(build_keep_alive()).cqe.is_success
        first.close()
        for _ in range(200):
            try:
                with RawHost(target.address, target.port) as again:
                    again.exchange_ic()
                break
            except (AssertionError, OSError, Exception):
                threading.Event().wait(0.005)
        else:
            raise AssertionError("a freed place is not given again")
        for host in (admin, second):
            host.close()


def test_stopping_with_connections_and_commands_open_is_quick() -> None:
    with running_target() as target:
        admin = connected_admin(target.address, target.port, target.nqn)
        io = connected_io(admin, target.nqn)
        io.send(io.capsule(write(0, 32 * BLOCK)))
        assert io.read_pdu().type == R2T
    assert io.wait_closed() == b"" and admin.wait_closed() == b""
    io.close()
    admin.close()


def test_the_digest_of_a_known_response_is_the_specifications() -> None:
    assert (
        crc32c(bytes.fromhex("050118001c000000") + bytes(16))
        == struct.unpack("<I", bytes.fromhex("9b120389"))[0]
    )
