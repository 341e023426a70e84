"""What a controller may send wrong: each is found, named, answered with H2CTermReq, and touches nothing."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    DigestError,
    MalformedPduError,
    SequenceError,
    UnsupportedError,
)
from kvdev.native.io import EUNCERTAIN, OPCODE_READ, OPCODE_WRITE
from kvdev.native.queue import HostQpair
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.peer import (
    C2H_DATA,
    CAPSULE_RESP,
    FLAG_DDGST,
    FLAG_HDGST,
    FLAG_LAST,
    H2C_TERM,
    MemoryScript,
    PduFromHost,
    PeerConnection,
    ScriptedPeer,
    pack_common,
    pack_cqe,
    pack_ic_resp,
    pack_term,
)

SIZE = 16384
LATE_MS = 2000  # how late a busy machine may run what is due; a wait that nothing ends takes longer
DATA = bytes(range(256)) * (SIZE // 256)
Reply = Callable[[PeerConnection, PduFromHost], bytes]


def c2h_raw(
    cid: int,
    datao: int,
    datal: int,
    *,
    data: bytes = b"",
    flags: int = FLAG_LAST,
    hlen: int = 24,
    pdo: int = 24,
    plen: int | None = None,
    pdu_type: int = C2H_DATA,
) -> bytes:
    """A C2HData without digests whose every field can be wrong."""
    plen = 24 + len(data) if plen is None else plen
    return (
        pack_common(pdu_type, flags, hlen, pdo, plen) + struct.pack("<HHIII", cid, 0, datao, datal, 0) + data
    )


# name -> (what the controller answers to a 16 KiB read, FES, FEI; None where it has no meaning and is 0)
READ_FAULTS: dict[str, tuple[Reply, int, int | None]] = {
    "r2t_for_a_read": (lambda c, p: c.pack_r2t(p.cid, 1, 0, SIZE), 2, None),
    "data_beyond_the_buffer": (lambda c, p: c.pack_c2h_data(p.cid, 0, DATA + DATA), 4, None),
    "datao_gap": (lambda c, p: c.pack_c2h_data(p.cid, 4096, DATA[4096:]), 2, None),
    "datao_wraps": (lambda c, p: c.pack_c2h_data(p.cid, 0xFFFFFFFC, DATA[:8]), 4, None),
    "datao_repeated": (lambda c, p: c.pack_c2h_data(p.cid, 0, DATA[:64], is_last=False) * 2, 2, None),
    "cccid_never_used": (lambda c, p: c.pack_c2h_data(p.cid ^ 5, 0, DATA), 1, 8),
    "cccid_out_of_the_table": (lambda c, p: c.pack_c2h_data(p.cid | 0xFFF, 0, DATA), 1, 8),
    "cccid_of_another_generation": (lambda c, p: c.pack_c2h_data(p.cid ^ 0x3000, 0, DATA), 1, 8),
    "data_after_last": (
        lambda c, p: c.pack_c2h_data(p.cid, 0, DATA[:64]) + c.pack_c2h_data(p.cid, 64, DATA[64:]),
        2,
        None,
    ),
    "success_without_last": (
        lambda c, p: c.pack_c2h_data(p.cid, 0, DATA, is_last=False, is_success=True),
        1,
        1,
    ),
    "datal_zero": (lambda c, p: c2h_raw(p.cid, 0, 0), 1, 16),
    "datal_not_a_dword_multiple": (lambda c, p: c2h_raw(p.cid, 0, 6, data=DATA[:6]), 1, 16),
    "plen_above_datal": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, plen=24 + SIZE + 4), 1, 4),
    "plen_below_datal": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, plen=24 + SIZE - 4), 1, 4),
    "plen_0": (lambda c, p: c2h_raw(p.cid, 0, SIZE, plen=0), 1, 4),
    "plen_7": (lambda c, p: c2h_raw(p.cid, 0, SIZE, plen=7), 1, 4),
    "plen_7fffffff": (lambda c, p: c2h_raw(p.cid, 0, SIZE, plen=0x7FFFFFFF), 1, 4),
    "plen_ffffffff": (lambda c, p: c2h_raw(p.cid, 0, SIZE, plen=0xFFFFFFFF), 1, 4),
    "hlen_0": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, hlen=0), 1, 2),
    "hlen_255": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, hlen=255), 1, 2),
    "pdo_0": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, pdo=0), 1, 3),
    "pdo_not_a_multiple": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, pdo=26), 1, 3),
    "pdo_255": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, pdo=255), 1, 3),
    "header_digest_flag_not_agreed": (
        lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, flags=FLAG_LAST | FLAG_HDGST),
        1,
        1,
    ),
    "data_digest_flag_not_agreed": (
        lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, flags=FLAG_LAST | FLAG_DDGST),
        1,
        1,
    ),
    "unknown_type": (lambda c, p: pack_common(0x0A, 0, 24, 0, 24) + bytes(16), 1, 0),
    "wrong_direction": (lambda c, p: c2h_raw(p.cid, 0, SIZE, data=DATA, pdu_type=0x06), 1, 0),
    "ic_resp_again": (lambda c, p: pack_ic_resp(), 2, None),
    "completion_of_unknown_cid": (lambda c, p: c.pack_response(p.cid ^ 1), 1, 20),
    "completion_of_stale_generation": (lambda c, p: c.pack_response(p.cid ^ 0x1000), 1, 20),
    "response_plen_28": (
        lambda c, p: pack_common(CAPSULE_RESP, 0, 24, 0, 28) + pack_cqe(cid=p.cid) + bytes(4),
        1,
        4,
    ),
}

# The same for a 16 KiB write that waits for R2Ts, MAXR2T 0.
WRITE_FAULTS: dict[str, tuple[Reply, int, int | None]] = {
    "r2t_length_0": (lambda c, p: c.pack_r2t(p.cid, 1, 0, 0), 4, None),
    "r2t_wraps": (lambda c, p: c.pack_r2t(p.cid, 1, 0xFFFFF000, 0x1000), 4, None),
    "r2t_beyond_the_buffer": (lambda c, p: c.pack_r2t(p.cid, 1, 0, SIZE + 4), 4, None),
    "r2to_skips_ahead": (lambda c, p: c.pack_r2t(p.cid, 1, 4096, 4096), 2, None),
    "second_r2t_with_maxr2t_0": (
        lambda c, p: c.pack_r2t(p.cid, 1, 0, 4096) + c.pack_r2t(p.cid, 2, 4096, 4096),
        5,
        None,
    ),
    "r2t_of_unknown_cccid": (lambda c, p: c.pack_r2t(p.cid ^ 7, 1, 0, 4096), 1, 8),
    "data_for_a_write": (lambda c, p: c.pack_c2h_data(p.cid, 0, DATA), 2, None),
}


class Offender:
    """Answers the first command with bytes that break a rule, and keeps the H2CTermReq that comes back."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.sent = b""
        self.term: PduFromHost | None = None

    def __call__(self, connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        self.sent = self.reply(connection, command)
        connection.send(self.sent)
        self.term = connection.receive_term()
        assert connection.wait_closed() == b"", "nothing follows an H2CTermReq"

    def check(self, host: PeerHost, peer: ScriptedPeer, fes: int, fei: int | None) -> None:
        fault = host.qpair.fault
        assert fault is not None and fault.fes == fes and fault.is_term_sent, fault
        host.close()
        peer.join()
        assert self.term is not None and self.term.type == H2C_TERM
        assert self.term.fes == fes
        assert self.term.fei == (fei or 0)
        assert 24 < self.term.plen <= 152
        assert len(self.term.data) >= 8 and self.term.data in self.sent, (
            "the term carries the offending header"
        )


def memory_size_bytes() -> int:
    """Address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", READ_FAULTS)
def test_read_when_controller_breaks_a_rule_then_term_names_it_and_guards_hold(name: str) -> None:
    reply, fes, fei = READ_FAULTS[name]
    script = Offender(reply)
    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        before = memory_size_bytes()
        done = host.run(OPCODE_READ, buffer, tag=77)
        assert (done["tag"], done["error"]) == (77, -errno.ENOTCONN)
        assert memory_size_bytes() - before < 256 << 20, "no length of a peer's sizes an allocation"
        buffer.check_guards()
        script.check(host, peer, fes, fei)


@pytest.mark.parametrize("name", WRITE_FAULTS)
def test_write_when_controller_breaks_a_rule_then_term_names_it_and_buffer_is_untouched(name: str) -> None:
    reply, fes, fei = WRITE_FAULTS[name]
    script = Offender(reply)
    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_WRITE, buffer)
        assert done["error"] == -EUNCERTAIN
        assert done["send_ns"] != 0, "a write that was sent has an unknown fate"
        assert buffer.is_untouched
        script.check(host, peer, fes, fei)


def test_completion_when_sent_twice_then_queue_pair_dies_and_the_first_caller_is_unaffected() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        out = connection.pack_c2h_data(command.cid, 0, DATA) + connection.pack_response(command.cid)
        connection.send(out + connection.pack_response(command.cid))
        terms.append(connection.receive_term())

    terms: list[PduFromHost] = []
    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_READ, buffer)
        assert done["error"] == 0
        assert buffer.array.tobytes() == DATA
        # The duplicate is found with the next use at the latest, before anything is sent on the connection.
        late = host.run(OPCODE_READ, GuardedBuffer(SIZE))
        assert (late["error"], late["send_ns"]) == (-errno.ENOTCONN, 0)
        fault = host.qpair.fault
        assert fault is not None and (fault.fes, fault.fei) == (1, 20)
        host.close()
        peer.join()
    assert [term.fes for term in terms] == [1]


def test_read_when_a_completed_command_gets_more_data_then_its_buffer_stays() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        first, second = connection.receive_command(), connection.receive_command()
        connection.send_read(first, DATA)
        connection.send(connection.pack_c2h_data(first.cid, 0, bytes(SIZE)))
        connection.receive_term()
        del second

    first, second = GuardedBuffer(SIZE), GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_READ, first, tag=1)
        host.submit(OPCODE_READ, second, tag=2)
        done = host.poll(2)
        assert {int(d["tag"]): int(d["error"]) for d in done} == {1: 0, 2: -errno.ENOTCONN}
        fault = host.qpair.fault
        assert fault is not None and (fault.fes, fault.fei) == (1, 8)
        assert first.array.tobytes() == DATA
        assert second.is_untouched


@pytest.mark.parametrize("is_data", [True, False])
def test_read_when_answered_with_the_cid_of_another_queue_then_only_its_own_queue_pair_dies(
    is_data: bool,
) -> None:
    """S-05: CIDs are a queue's own, and its command table is the only one that is looked at."""
    others: list[PduFromHost] = []
    has_both, is_over = threading.Event(), threading.Event()

    def patient(connection: PeerConnection) -> None:
        connection.accept_ic()
        others.extend(connection.receive_command() for _ in range(2))
        has_both.set()
        assert is_over.wait(60)
        for command in others:
            connection.send_read(command, DATA)

    def reply(connection: PeerConnection, command: PduFromHost) -> bytes:
        (cid,) = {other.cid for other in others} - {command.cid}
        return connection.pack_c2h_data(cid, 0, DATA) if is_data else connection.pack_response(cid)

    script = Offender(reply)
    buffers = [GuardedBuffer(SIZE) for _ in range(3)]
    with (
        ScriptedPeer(patient) as other_peer,
        PeerHost(other_peer) as other,
        ScriptedPeer(script) as peer,
        PeerHost(peer, qid=2) as host,
    ):
        for buffer in buffers[:2]:
            other.submit(OPCODE_READ, buffer)
        while not has_both.is_set():
            other.poll(1, seconds=0.01)
        assert host.run(OPCODE_READ, buffers[2])["error"] == -errno.ENOTCONN
        script.check(host, peer, 1, 8 if is_data else 20)
        assert all(buffer.is_untouched for buffer in buffers)
        is_over.set()
        assert list(other.poll(2)["error"]) == [0, 0]
        assert all(buffer.array.tobytes() == DATA for buffer in buffers[:2])


@pytest.mark.parametrize("hpda", [1, 4, 31])
def test_read_when_data_is_not_where_the_host_demands_it_then_fatal(hpda: int) -> None:
    script = Offender(lambda c, p: c.pack_c2h_data(p.cid, 0, DATA, pad_size=-24 % (4 * hpda + 4) + 4))
    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer, hpda=hpda) as host:
        assert host.run(OPCODE_READ, buffer)["error"] == -errno.ENOTCONN
        assert buffer.is_untouched
        script.check(host, peer, 1, 3)


# ---- digests ----


def test_data_digest_when_wrong_then_that_read_fails_and_the_queue_pair_lives() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        for is_success in (False, True):
            bad = connection.receive_command()
            out = connection.pack_c2h_data(bad.cid, 0, DATA, data_digest=1, is_success=is_success)
            connection.send(out if is_success else out + connection.pack_response(bad.cid))
            connection.send_read(connection.receive_command(), DATA)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer, header_digest="require", data_digest="require") as host:
        for _ in range(2):
            bad = host.run(OPCODE_READ, GuardedBuffer(SIZE))
            assert (bad["error"], bad["status"]) == (-errno.EIO, 0x22), (
                "transient transport error, may be retried"
            )
            buffer = GuardedBuffer(SIZE)
            assert host.run(OPCODE_READ, buffer)["error"] == 0
            assert buffer.array.tobytes() == DATA
        assert host.qpair.info.ddgst_errors == 2
        assert host.qpair.is_alive


def test_data_digest_when_wrong_in_one_of_many_pdus_then_the_read_fails() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        for at in range(0, SIZE, 4096):
            is_last = at + 4096 == SIZE
            digest = 0xBAD if at == 4096 else None
            piece = DATA[at : at + 4096]
            connection.send(
                connection.pack_c2h_data(command.cid, at, piece, is_last=is_last, data_digest=digest)
            )
        connection.send_response(command)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer, data_digest="require") as host:
        done = host.run(OPCODE_READ, GuardedBuffer(SIZE))
        assert (done["error"], done["status"]) == (-errno.EIO, 0x22)


def test_data_digest_when_the_controller_reports_its_own_error_then_that_stays() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.send(connection.pack_c2h_data(command.cid, 0, DATA, data_digest=1))
        connection.send_response(command, status=0x281)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer, data_digest="require") as host:
        done = host.run(OPCODE_READ, GuardedBuffer(SIZE))
        assert (done["error"], done["status"]) == (-errno.EIO, 0x281)


def test_header_digest_when_wrong_then_fatal_with_the_received_digest_as_fei() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.send(connection.pack(CAPSULE_RESP, pack_cqe(cid=command.cid), header_digest=0x12345678))
        terms.append(connection.receive_term())

    terms: list[PduFromHost] = []
    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer, header_digest="require") as host:
        assert host.run(OPCODE_READ, buffer)["error"] == -errno.ENOTCONN
        assert buffer.is_untouched
        fault = host.qpair.fault
        assert fault is not None and (fault.kind, fault.fes) == ("header digest", 3)
        peer.join()
    assert (terms[0].fes, terms[0].fei) == (3, 0x12345678)


def test_header_digest_when_flag_is_cleared_then_fatal() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.send(pack_common(CAPSULE_RESP, 0, 24, 0, 24) + pack_cqe(cid=command.cid))
        terms.append(connection.receive_term())

    terms: list[PduFromHost] = []
    with ScriptedPeer(script) as peer, PeerHost(peer, header_digest="require") as host:
        assert host.run(OPCODE_READ, GuardedBuffer(SIZE))["error"] == -errno.ENOTCONN
        peer.join()
    assert (terms[0].fes, terms[0].fei) == (1, 1)


# ---- data that did not move ----


@pytest.mark.parametrize(
    ("size", "is_success"), [(0, False), (4096, False), (4096, True), (SIZE - 4, False), (SIZE - 4, True)]
)
def test_read_when_success_comes_short_of_data_then_it_fails(size: int, is_success: bool) -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        out = connection.pack_c2h_data(command.cid, 0, DATA[:size], is_success=is_success) if size else b""
        connection.send(out if is_success else out + connection.pack_response(command.cid))
        connection.send_read(connection.receive_command(), DATA)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_READ, GuardedBuffer(SIZE))
        assert (done["error"], done["status"]) == (-errno.EIO, 0x04)
        assert host.run(OPCODE_READ, GuardedBuffer(SIZE))["error"] == 0
        assert host.qpair.info.short_transfers == 1


def test_write_when_success_comes_before_all_data_was_asked_for_then_it_fails() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.receive_write_data(command, ttag=3, r2to=0, r2tl=4096)
        connection.send_response(command)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_WRITE, GuardedBuffer(SIZE))
        assert (done["error"], done["status"]) == (-errno.EIO, 0x04)


def test_write_when_controller_fails_it_early_then_queued_data_is_dropped_and_the_stream_goes_on() -> None:
    """TCP 3.3.2.2: the controller may complete with an error before it asked for everything."""
    size = 8 << 20

    def script(connection: PeerConnection) -> None:
        connection.accept_ic(maxh2cdata=65536)
        first = connection.receive_command()
        # The whole is asked for, far more than the socket takes, and given up while it is on its way.
        connection.send(
            connection.pack_r2t(first.cid, 9, 0, size) + connection.pack_response(first.cid, status=0x80)
        )
        received = 0
        while True:
            pdu = connection.receive_pdu()
            if pdu.type == 0x04:
                break
            assert (pdu.ttag, pdu.datao) == (9, received), "data PDUs stay whole and in order"
            assert pdu.data == bytes([0x5A]) * len(pdu.data), "and carry the command's own bytes"
            received += len(pdu.data)
        assert received < size, "what had not left was dropped"
        connection.send_read(pdu, DATA)
        connection.wait_closed()

    with (
        ScriptedPeer(script) as peer,
        PeerHost(peer, sndbuf_size_bytes=65536, maxr2t_0based=1) as host,
    ):
        buffer = GuardedBuffer(size)
        done = host.run(OPCODE_WRITE, buffer)
        assert (done["error"], done["status"]) == (-errno.EIO, 0x80)
        buffer.array[:] = 0  # ours again: were it still read, the peer would see zeroes
        read = GuardedBuffer(SIZE)
        assert host.run(OPCODE_READ, read)["error"] == 0
        assert read.array.tobytes() == DATA


def test_write_when_connection_ends_after_one_of_three_r2ts_then_its_fate_is_unknown() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.receive_write_data(command, ttag=1, r2to=0, r2tl=4096)
        connection.send(connection.pack_r2t(command.cid, 2, 4096, 4096))
        connection.close()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_WRITE, GuardedBuffer(SIZE))
        assert done["error"] == -EUNCERTAIN
        assert done["send_ns"] != 0


# ---- termination by the controller ----


@pytest.mark.parametrize("plen", [None, 23, 153, 0xFFFFFFFF])
def test_term_when_controller_sends_it_then_it_is_decoded_or_ignored_and_the_queue_pair_is_dead(
    plen: int | None,
) -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.send(pack_term(fes=1, fei=0x2C, data=command.header[:24], plen=plen))
        assert connection.wait_closed() == b"", "a Term PDU is not answered"

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        done = host.run(OPCODE_READ, GuardedBuffer(SIZE))
        assert done["error"] == -errno.ENOTCONN
        fault = host.qpair.fault
        assert fault is not None and not fault.is_term_sent
        if plen is None:
            assert (fault.kind, fault.fes, fault.fei) == ("terminated by the controller", 1, 0x2C)
        peer.join()


# ---- connecting ----


def connect(peer: ScriptedPeer, seconds: float = 60.0, **options: Any) -> HostQpair:
    qpair = HostQpair(qid=1, queue_size=8, trid="peer", **options)
    qpair.connect(peer.address, peer.port, deadline=Deadline.after(seconds))
    return qpair


def answer(data: bytes, terms: list[PduFromHost]) -> Callable[[PeerConnection], None]:
    def script(connection: PeerConnection) -> None:
        connection.receive_pdu()
        connection.send(data)
        terms.append(connection.receive_term())

    return script


@pytest.mark.parametrize(
    ("data", "field", "fes", "fei"),
    [
        (pack_ic_resp(pfv=1), "pfv", 6, 8),
        (pack_ic_resp(cpda=32), "pda", 1, 10),
        (pack_ic_resp(maxh2cdata=4092), "maxh2cdata", 1, 12),
        (pack_ic_resp(maxh2cdata=4095), "maxh2cdata", 1, 12),
        (pack_ic_resp(maxh2cdata=4098), "maxh2cdata", 1, 12),
        (pack_ic_resp(dgst=1), "dgst", 1, 11),
        (pack_ic_resp(dgst=2), "dgst", 1, 11),
        (pack_common(0x01, 0, 127, 0, 128) + bytes(120), "hlen", 1, 2),
        (pack_common(0x01, 0, 128, 0, 132) + bytes(124), "plen", 1, 4),
        (pack_common(CAPSULE_RESP, 0, 24, 0, 24) + bytes(16), "type", 2, None),
        (pack_ic_resp() + pack_ic_resp(), "type", 2, None),
    ],
)
def test_connect_when_ic_resp_is_wrong_then_error_names_the_field_and_term_is_sent(
    data: bytes, field: str, fes: int, fei: int | None
) -> None:
    terms: list[PduFromHost] = []
    with ScriptedPeer(answer(data, terms)) as peer:
        with pytest.raises((MalformedPduError, SequenceError), match=rf"peer qpair 1: \w+ {field}\+0x"):
            connect(peer)
        peer.join()
    assert terms[0].fes == fes
    if fei is not None:
        assert terms[0].fei == fei


@pytest.mark.parametrize(
    ("option", "text"), [("header_digest", "header digest"), ("data_digest", "data digest")]
)
def test_connect_when_required_digest_is_refused_then_error_names_it(option: str, text: str) -> None:
    terms: list[PduFromHost] = []
    with ScriptedPeer(answer(pack_ic_resp(), terms)) as peer:
        with pytest.raises(UnsupportedError, match=f"expected {text} enabled as required"):
            connect(peer, 5.0, **{option: "require"})
        peer.join()
    assert (terms[0].fes, terms[0].fei) == (6, 11)


@pytest.mark.parametrize(("granted", "refused"), [(1, "data digest"), (2, "header digest")])
def test_connect_when_one_of_two_required_digests_is_refused_then_error_names_that(
    granted: int, refused: str
) -> None:
    terms: list[PduFromHost] = []
    with ScriptedPeer(answer(pack_ic_resp(dgst=granted), terms)) as peer:
        with pytest.raises(UnsupportedError, match=f"expected {refused} enabled as required"):
            connect(peer, 5.0, header_digest="require", data_digest="require")
        peer.join()
    assert (terms[0].fes, terms[0].fei) == (6, 11)


def test_connect_when_preferred_digests_are_refused_then_it_goes_on_without() -> None:
    with ScriptedPeer(MemoryScript(bytearray(4096), header_digest=False, data_digest=False)) as peer:
        qpair = connect(peer, header_digest="prefer", data_digest="prefer")
        info = qpair.info
        assert (info.has_header_digest, info.has_data_digest) == (False, False)
        qpair.close()


def test_connect_when_ic_resp_never_comes_then_deadline_error_in_time() -> None:
    def script(connection: PeerConnection) -> None:
        connection.wait_closed()

    with ScriptedPeer(script) as peer:
        deadline = Deadline.after(0.3)
        qpair = HostQpair(qid=0, queue_size=8, trid="peer")
        with pytest.raises(DeadlineError, match="ICResp"):
            qpair.connect(peer.address, peer.port, deadline=deadline)
        assert 300 <= deadline.elapsed_ms() < 300 + LATE_MS
        qpair.close()


def test_connect_when_ic_resp_trickles_then_the_deadline_still_holds() -> None:
    def script(connection: PeerConnection) -> None:
        connection.receive_pdu()
        connection.send(pack_ic_resp()[:127], chunk_size=1)
        connection.wait_closed()

    with ScriptedPeer(script) as peer:
        deadline = Deadline.after(0.3)
        with pytest.raises(DeadlineError):
            connect(peer, seconds=0.3)
        assert deadline.elapsed_ms() < 300 + LATE_MS


def test_connect_when_nobody_listens_then_connect_error() -> None:
    with ScriptedPeer(lambda connection: None) as peer:
        port = peer.port
    qpair = HostQpair(qid=0, queue_size=8, trid="tcp://127.0.0.1")
    with pytest.raises(ConnectError, match="Connection refused") as caught:
        qpair.connect("127.0.0.1", port, deadline=Deadline.after(2))
    assert caught.value.errno == errno.ECONNREFUSED


def test_connect_when_peer_closes_then_connect_error_says_so() -> None:
    with ScriptedPeer(lambda connection: None) as peer, pytest.raises(ConnectError, match=r"closed by|reset"):
        connect(peer)


# ---- framing ----


@pytest.mark.parametrize("digests", ["off", "require"])
@pytest.mark.parametrize("chunk_size", [1, 7, 23, 24, 25, 4095])
def test_read_when_stream_is_cut_anywhere_then_the_result_is_the_same(
    chunk_size: int, digests: str, rng: np.random.Generator
) -> None:
    size = 4096 if chunk_size < 8 else 65536
    memory = bytearray(rng.bytes(size * 4))
    script = MemoryScript(memory, c2h_pdu_bytes=1024 if chunk_size < 8 else 8192, chunk_size=chunk_size)
    with (
        ScriptedPeer(script) as peer,
        PeerHost(peer, header_digest=digests, data_digest=digests, hpda=4) as host,
    ):
        buffers = [GuardedBuffer(size) for _ in range(4)]
        for index, buffer in enumerate(buffers):
            host.submit(OPCODE_READ, buffer, slba=index * size // 4096, tag=index)
        done = host.poll(4)
        assert sorted(int(d["tag"]) for d in done if d["error"] == 0) == [0, 1, 2, 3]
        for index, buffer in enumerate(buffers):
            buffer.check_guards()
            assert buffer.array.tobytes() == bytes(memory[index * size : (index + 1) * size])


@pytest.mark.parametrize("at", [0, 1, 7, 8, 23, 24, 25, 1000, 24 + SIZE, 24 + SIZE + 8, 24 + SIZE + 23])
def test_read_when_stream_ends_inside_it_then_connection_lost(at: int) -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        out = connection.pack_c2h_data(command.cid, 0, DATA) + connection.pack_response(command.cid)
        connection.send(out[:at])

    buffer = GuardedBuffer(SIZE)
    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        assert host.run(OPCODE_READ, buffer)["error"] == -errno.ENOTCONN
        buffer.check_guards()
        fault = host.qpair.fault
        assert fault is not None and fault.kind == "closed by the peer"


def test_execute_when_peer_breaks_a_rule_then_the_exception_is_its_class() -> None:
    def reply(data: Callable[[PeerConnection, PduFromHost], bytes]) -> Callable[[PeerConnection], None]:
        def script(connection: PeerConnection) -> None:
            connection.accept_ic()
            connection.send(data(connection, connection.receive_command()))
            connection.wait_closed()

        return script

    def execute(peer: ScriptedPeer, **options: Any) -> None:
        qpair = connect(peer, 5.0, **options)
        sqe = bytes([0x06]) + bytes(63)
        try:
            qpair.execute(sqe, data=bytearray(4096), deadline=Deadline.after(1))
        finally:
            qpair.close()

    with (
        ScriptedPeer(reply(lambda c, p: c.pack_c2h_data(p.cid, 4096, DATA))) as peer,
        pytest.raises(MalformedPduError),
    ):
        execute(peer)
    with ScriptedPeer(reply(lambda c, p: pack_ic_resp())) as peer, pytest.raises(SequenceError):
        execute(peer)
    with (
        ScriptedPeer(reply(lambda c, p: c.pack(CAPSULE_RESP, pack_cqe(cid=p.cid), header_digest=1))) as peer,
        pytest.raises(DigestError),
    ):
        execute(peer, header_digest="require")
    with (
        ScriptedPeer(reply(lambda c, p: pack_term(fes=2))) as peer,
        pytest.raises(ConnectionLostError, match="FES 0x02"),
    ):
        execute(peer)
