"""The queue's promises against a scripted peer: data, windows, priorities, groups, deadlines, death."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest

from kvdev.block.device import run_batch
from kvdev.clock import Deadline
from kvdev.errors import ConnectionLostError, DeadlineError, QueueFullError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.io import (
    EUNCERTAIN,
    GROUP_CRC32C,
    IO_DEALLOCATE,
    IO_DTYPE,
    IO_FUA,
    IO_GROUP_DTYPE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    address_of,
)
from kvdev.native.queue import HostQpair
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.peer import MemoryScript, PduFromHost, PeerConnection, ScriptedPeer

BLOCK = 4096
REPORT = bytes([0x0E]) + bytes(63)  # reservation report
LATE_MS = 2000  # how late a busy machine may run what is due; a wait that nothing ends takes longer


def silent(connection: PeerConnection) -> None:
    """Takes commands and never answers."""
    connection.accept_ic()
    connection.wait_closed()


# ---- data ----

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "success_flag": ({"is_success_used": True}, {}),
    "small_pdus": ({"c2h_pdu_bytes": 4096, "r2t_bytes": 4096}, {}),
    "header_digest": ({}, {"header_digest": "require"}),
    "both_digests": ({"c2h_pdu_bytes": 20480}, {"header_digest": "require", "data_digest": "require"}),
    "padded_both_ways": ({"cpda": 3, "maxh2cdata": 8192}, {"hpda": 31}),
    "padded_with_digests": (
        {"cpda": 31, "maxh2cdata": 4096},
        {"hpda": 2, "header_digest": "require", "data_digest": "require"},
    ),
    "three_r2ts_ahead": ({"r2t_bytes": 16384, "r2t_ahead": 3}, {"maxr2t_0based": 2}),
    "in_capsule": ({}, {"in_capsule_size_bytes": 16384}),
    "in_capsule_padded_digests": (
        {"cpda": 15},
        {"in_capsule_size_bytes": 131072, "header_digest": "require", "data_digest": "require"},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_write_then_read_when_target_behaves_then_bytes_are_equal(
    name: str, rng: np.random.Generator
) -> None:
    script_options, host_options = VARIANTS[name]
    memory = bytearray(2 << 20)
    script = MemoryScript(memory, **script_options)
    sizes = [BLOCK, 2 * BLOCK, 16384, 65536, 131072, 131072 + BLOCK]
    starts = np.cumsum([0, *sizes]) // BLOCK
    with ScriptedPeer(script) as peer, PeerHost(peer, **host_options) as host:
        sources = [GuardedBuffer(size) for size in sizes]
        for index, buffer in enumerate(sources):
            buffer.array[:] = rng.integers(0, 256, len(buffer.array), dtype=np.uint8)
            host.submit(OPCODE_WRITE, buffer, slba=int(starts[index]), tag=index)
        done = host.poll(len(sizes))
        assert sorted(done["tag"]) == list(range(len(sizes)))
        assert not done["error"].any()
        assert bytes(memory[: sum(sizes)]) == b"".join(buffer.array.tobytes() for buffer in sources)
        targets = [GuardedBuffer(size) for size in sizes]
        for index, buffer in enumerate(targets):
            host.submit(OPCODE_READ, buffer, slba=int(starts[index]), tag=index)
        done = host.poll(len(sizes))
        assert len(done) == len(sizes) and not done["error"].any()
        for source, target in zip(sources, targets, strict=True):
            target.check_guards()
            assert (source.array == target.array).all()
        for row in done:
            assert row["submit_ns"] <= row["send_ns"] <= row["complete_ns"]
        assert host.queue.outstanding_count == 0
        info = host.qpair.info
        assert (info.outstanding_count, info.in_flight_bytes) == (0, 0)


@pytest.mark.parametrize("header_digest", ["off", "require"])
@pytest.mark.parametrize("cpda", [0, 1, 3, 4, 5, 7, 15, 31])
def test_write_when_controller_demands_an_alignment_then_data_starts_at_its_first_multiple(
    cpda: int, header_digest: str
) -> None:
    """TCP 3.3: also where the alignment is smaller than the header and does not divide it."""
    seen: list[PduFromHost] = []

    def script(connection: PeerConnection) -> None:
        connection.accept_ic(cpda=cpda)
        seen.append(connection.receive_command())
        connection.send_response(seen[0])
        command = connection.receive_command()
        connection.send(connection.pack_r2t(command.cid, 1, 0, 2 * BLOCK))
        seen.append(connection.receive_pdu())
        connection.send_response(command)
        connection.wait_closed()

    buffers = [GuardedBuffer(BLOCK), GuardedBuffer(2 * BLOCK)]
    with (
        ScriptedPeer(script) as peer,
        PeerHost(peer, in_capsule_size_bytes=BLOCK, header_digest=header_digest) as host,
    ):
        for buffer in buffers:
            assert host.run(OPCODE_WRITE, buffer)["error"] == 0
    unit = 4 * (cpda + 1)
    for pdu, buffer, header_size in zip(seen, buffers, (72, 24), strict=True):
        head_size = header_size + (4 if header_digest == "require" else 0)
        assert pdu.pdo == -(-head_size // unit) * unit
        assert pdu.padding == bytes(pdu.pdo - head_size)
        assert pdu.data == buffer.array.tobytes()


def test_commands_when_sent_then_the_capsule_is_what_the_specification_says() -> None:
    script = MemoryScript(bytearray(1 << 20))
    with ScriptedPeer(script) as peer, PeerHost(peer, in_capsule_size_bytes=BLOCK) as host:
        write, large = GuardedBuffer(BLOCK), GuardedBuffer(2 * BLOCK)
        assert host.run(OPCODE_WRITE, write, slba=5, flags=IO_FUA)["error"] == 0
        assert host.run(OPCODE_WRITE, large, slba=6)["error"] == 0
        assert host.run(OPCODE_READ, large, slba=6)["error"] == 0
        assert host.run(OPCODE_FLUSH, None)["error"] == 0
        assert host.run(OPCODE_WRITE_ZEROES, None, slba=8, lba_count=65536, flags=IO_DEALLOCATE)["error"] == 0
        assert host.run(OPCODE_DSM, None, slba=9, lba_count=3)["error"] == 0
        ranges = GuardedBuffer(32)
        ranges.array[:] = np.frombuffer(struct.pack("<IIQIIQ", 0, 1, 20, 0, 2, 30), dtype=np.uint8)
        assert host.run(OPCODE_DSM, ranges, lba_count=0)["error"] == 0
    sqes = [command.sqe for command in script.commands]
    for sqe in sqes:
        assert sqe[1] & 0xC0 == 0x40, "PSDT 01b"
        assert sqe[4:8] == (1).to_bytes(4, "little")
    in_capsule = struct.pack("<QI3xB", 0, BLOCK, 0x01)
    transport = struct.pack("<QI3xB", 0, 2 * BLOCK, 0x5A)
    assert sqes[0][24:40] == in_capsule
    assert sqes[0][40:56] == struct.pack("<QIxxxx", 5, 1 << 30)
    assert sqes[1][24:40] == sqes[2][24:40] == transport
    assert sqes[2][40:56] == struct.pack("<QIxxxx", 6, 1)
    assert sqes[3][40:] == bytes(24)
    assert sqes[4][40:56] == struct.pack("<QIxxxx", 8, 65535 | 1 << 25)
    assert sqes[5][40:48] == struct.pack("<II", 0, 4)
    assert script.commands[5].data == struct.pack("<IIQ", 0, 3, 9)
    assert sqes[6][40:48] == struct.pack("<II", 1, 4)
    assert script.commands[6].data == ranges.array.tobytes()


def test_commands_when_many_then_cids_carry_a_generation_and_the_queue_size_holds() -> None:
    cids: list[int] = []

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        outstanding: list[PduFromHost] = []
        for _ in range(20):
            while len(outstanding) < 3:
                outstanding.append(connection.receive_command())
                cids.append(outstanding[-1].cid)
            connection.sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.sock.recv(1)
            connection.sock.settimeout(5)
            connection.send_response(outstanding.pop(0))
        connection.close()

    with ScriptedPeer(script) as peer, PeerHost(peer, queue_size=4) as host:
        ios = np.zeros(100, dtype=IO_DTYPE)
        ios["device_index"] = host.device_index
        host.queue.submit(ios)
        done = host.poll(100)
        assert (done["error"] == 0).sum() == 20
        assert len(done) == 100
        never_sent = done[done["send_ns"] == 0]
        assert len(never_sent) >= 75 and (never_sent["error"] == -errno.ENOTCONN).all()
    assert len(set(cids)) == len(cids), "a CID comes back only after sixteen generations"
    assert {cid & 0xFFF for cid in cids} == {0, 1, 2}


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device_index": 1}, "device_index"),
        ({"device_index": 0xFFFFFFFF}, "device_index"),
        ({"opcode": 0x7F}, "opcode"),
        ({"lba_count": 0, "byte_count": 0}, "lba_count"),
        ({"opcode": OPCODE_WRITE_ZEROES, "lba_count": 65537, "byte_count": 0}, "lba_count"),
        ({"slba": 100}, "slba"),
        ({"slba": 99, "lba_count": 2}, "slba"),
        ({"slba": 2**64 - 1, "lba_count": 2}, "slba"),
        ({"byte_count": 512}, "byte_count"),
        ({"lba_count": 5, "byte_count": 5 * BLOCK}, "byte_count"),
        ({"buf_addr": 0}, "buf_addr"),
        ({"priority": 8}, "priority"),
        ({"group_addr": 4}, "group_addr"),
        ({"opcode": OPCODE_FLUSH}, "byte_count"),
        ({"opcode": OPCODE_DSM, "byte_count": 15}, "byte_count"),
    ],
)
def test_submit_when_a_command_is_malformed_then_error_names_it_and_nothing_is_taken(
    changes: dict[str, int], field: str
) -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        device = host.queue.add_namespace(
            nsid=2,
            block_size_bytes=BLOCK,
            block_count=100,
            qpair_indexes=[host.qpair_index],
            max_transfer_bytes=4 * BLOCK,
        )
        assert device == 1
        host.queue.remove_device(0)
        device = host.queue.add_namespace(
            nsid=2,
            block_size_bytes=BLOCK,
            block_count=100,
            qpair_indexes=[host.qpair_index],
            max_transfer_bytes=4 * BLOCK,
        )
        host.queue.remove_device(1)
        buffer = GuardedBuffer(8 * BLOCK)
        ios = np.zeros(2, dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_READ
        ios["lba_count"] = 1
        ios["byte_count"] = BLOCK
        ios["buf_addr"] = buffer.address
        ios["device_index"] = device
        for name, value in changes.items():
            ios[name][1] = value
        with pytest.raises(UsageError, match=rf"ios\[1\]\.{field}: expected .*, got"):
            host.queue.submit(ios)
        assert host.queue.outstanding_count == 0


def test_submit_when_full_then_queue_full_and_nothing_is_taken() -> None:
    script = MemoryScript(bytearray(1 << 16))
    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options={"capacity_count": 4}) as host:
        ios = np.zeros(3, dtype=IO_DTYPE)
        host.queue.submit(ios)
        with pytest.raises(QueueFullError, match="3 of 4"):
            host.queue.submit(ios[:2])
        host.queue.submit(ios[:1])
        assert len(host.poll(4)) == 4
        host.queue.submit(ios)
        assert len(host.poll(3)) == 3


# ---- window and priority ----


class Hoarder:
    """Answers reads only when nothing more comes for a while; keeps how many bytes were in flight then."""

    def __init__(self) -> None:
        self.in_flight_bytes: list[int] = []
        self.order: list[int] = []

    def __call__(self, connection: PeerConnection) -> None:
        connection.accept_ic()
        while True:
            commands = [connection.receive_command()]
            connection.sock.settimeout(0.05)
            try:
                while True:
                    commands.append(connection.receive_command())
            except TimeoutError:
                pass
            connection.sock.settimeout(5)
            self.in_flight_bytes.append(sum(command.sgl_length for command in commands))
            for command in commands:
                self.order.append(command.slba)
                connection.send_read(command, bytes(command.sgl_length))


def test_window_when_much_is_pending_then_bytes_in_flight_stay_under_it() -> None:
    script = Hoarder()
    size = 64 << 10
    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options={"window_size_bytes": 4 * size}) as host:
        buffers = [GuardedBuffer(size) for _ in range(10)]
        for index, buffer in enumerate(buffers):
            host.submit(OPCODE_READ, buffer, tag=index, slba=index)
        assert len(host.poll(10)) == 10
    assert script.in_flight_bytes == [4 * size, 4 * size, 2 * size]
    assert script.order == list(range(10))


def test_window_when_one_command_is_larger_then_it_goes_alone() -> None:
    script = Hoarder()
    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options={"window_size_bytes": 65536}) as host:
        for size in (262144, 4096, 262144):
            host.submit(OPCODE_READ, GuardedBufferKeeper.new(size))
        done = host.poll(3)
        assert len(done) == 3 and not done["error"].any()
    assert script.in_flight_bytes == [262144, 4096, 262144]


class GuardedBufferKeeper:
    """Keeps anonymous buffers alive for the length of the module."""

    kept: list[GuardedBuffer] = []  # noqa: RUF012

    @classmethod
    def new(cls, size: int) -> GuardedBuffer:
        cls.kept.append(GuardedBuffer(size))
        return cls.kept[-1]


def test_priority_when_urgent_commands_come_later_then_they_pass_what_is_pending() -> None:
    script = Hoarder()
    size = 65536
    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options={"window_size_bytes": 2 * size}) as host:
        for index in range(6):
            host.submit(OPCODE_READ, GuardedBufferKeeper.new(size), slba=index, priority=4)
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        # A small one of lower rank would fit into the window, but must not pass a larger one of higher rank.
        host.submit(OPCODE_READ, GuardedBufferKeeper.new(4096), slba=300, priority=7)
        host.submit(OPCODE_READ, GuardedBufferKeeper.new(size), slba=100, priority=0)
        host.submit(OPCODE_READ, GuardedBufferKeeper.new(size), slba=200, priority=1)
        assert len(host.poll(9)) == 9
    assert script.order == [0, 1, 100, 200, 2, 3, 4, 5, 300]


def test_qpairs_when_two_serve_a_namespace_then_both_are_used_and_one_may_die() -> None:
    memory = bytearray(1 << 20)
    scripts = [MemoryScript(memory), MemoryScript(memory)]
    with ScriptedPeer(scripts) as peer, PeerHost(peer) as host:
        second = HostQpair(qid=2, queue_size=32, trid="peer")
        second.connect(peer.address, peer.port, deadline=Deadline.after(60))
        index = host.queue.add_qpair(second)
        device = host.queue.add_namespace(
            nsid=1, block_size_bytes=BLOCK, block_count=256, qpair_indexes=[host.qpair_index, index]
        )
        host.device_index = device
        buffers = [GuardedBuffer(65536) for _ in range(8)]
        for buffer in buffers:
            host.submit(OPCODE_READ, buffer)
        done = host.poll(8)
        assert sorted(done["qpair_index"]) == [0] * 4 + [1] * 4
        assert host.queue.remove_qpair(host.qpair_index) is host.qpair
        assert host.queue.is_device_alive(device)
        for buffer in buffers:
            host.submit(OPCODE_READ, buffer)
        done = host.poll(8)
        assert (done["qpair_index"] == index).all() and not done["error"].any()
        host.queue.close()
        second.close()


# ---- groups ----


def test_group_when_its_last_command_completes_then_crc_is_there(rng: np.random.Generator) -> None:
    memory = bytearray(rng.bytes(1 << 18))
    with ScriptedPeer(MemoryScript(memory, c2h_pdu_bytes=10240)) as peer, PeerHost(peer) as host:
        page = GuardedBuffer(1 << 18)
        group = np.zeros(2, dtype=IO_GROUP_DTYPE)
        group["buf_addr"] = page.address
        group["byte_count"] = 1 << 18
        group["remaining"] = (4, 1)
        group["flags"] = (GROUP_CRC32C, 0)
        ios = np.zeros(4, dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_READ
        ios["slba"] = np.arange(4) * 16
        ios["lba_count"] = 16
        ios["byte_count"] = 65536
        ios["buf_addr"] = page.address + np.arange(4) * 65536
        ios["group_addr"] = address_of(group)
        ios["device_index"] = host.device_index
        host.queue.submit(ios)
        done = host.poll(4)
        assert not done["error"].any()
        assert group["remaining"][0] == 0 and group["error"][0] == 0
        assert group["crc32c"][0] == crc32c(bytes(memory))
        assert group["complete_ns"][0] == done["complete_ns"].max()
        assert group["submit_ns"][0] == done["submit_ns"].min()
        assert group["remaining"][1] == 1, "its neighbour is nobody's business"


@pytest.mark.parametrize("blocks", [64, 65, 256])
def test_group_when_its_span_is_long_then_pieces_of_any_size_and_order_add_up_to_the_crc(
    blocks: int, rng: np.random.Generator
) -> None:
    """From 256 KiB on the checksum is made of the pieces' own."""
    size = blocks * 4096
    memory = bytearray(rng.bytes(size))
    with ScriptedPeer(MemoryScript(memory, c2h_pdu_bytes=10240)) as peer, PeerHost(peer) as host:
        page = GuardedBuffer(size)
        cuts = np.sort(rng.choice(np.arange(1, blocks), size=6, replace=False))
        edges = np.concatenate([[0], cuts, [blocks]])
        group = np.zeros(1, dtype=IO_GROUP_DTYPE)
        # A page that does not fill its last block: the bytes behind it are not in the checksum.
        group["buf_addr"], group["byte_count"] = page.address, size - 100
        group["remaining"], group["flags"] = len(edges) - 1, GROUP_CRC32C
        ios = np.zeros(len(edges) - 1, dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_READ
        ios["slba"] = edges[:-1]
        ios["lba_count"] = np.diff(edges)
        ios["byte_count"] = np.diff(edges) * 4096
        ios["buf_addr"] = page.address + edges[:-1] * 4096
        ios["group_addr"] = address_of(group)
        ios["device_index"] = host.device_index
        host.queue.submit(rng.permutation(ios))
        assert not host.poll(len(ios))["error"].any()
        assert (group["remaining"][0], group["error"][0]) == (0, 0)
        assert group["crc32c"][0] == crc32c(bytes(memory[: size - 100]))


def test_group_when_a_command_fails_then_first_error_is_kept_and_no_crc() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        statuses = [0, 0x281, 0x4002]
        for status in statuses:
            connection.send_response(connection.receive_command(), status=status)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        group = np.zeros(1, dtype=IO_GROUP_DTYPE)
        group["remaining"] = 3
        group["flags"] = GROUP_CRC32C
        ios = np.zeros(3, dtype=IO_DTYPE)
        ios["group_addr"] = address_of(group)
        host.queue.submit(ios)
        done = host.poll(3)
        assert list(done["status"]) == [0, 0x281, 0x4002]
        assert list(done["error"]) == [0, -errno.EIO, -errno.EIO]
        assert (group["remaining"][0], group["error"][0], group["status"][0]) == (0, -errno.EIO, 0x281)
        assert group["crc32c"][0] == 0


# ---- time ----


@pytest.mark.parametrize("milliseconds", [1, 20, 250])
def test_poll_when_nothing_completes_then_it_ends_at_its_deadline(milliseconds: int) -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_FLUSH, None)
        deadline = Deadline.after(milliseconds / 1e3)
        assert len(host.queue.poll(min_count=1, deadline=deadline)) == 0
        assert milliseconds <= deadline.elapsed_ms() < milliseconds + LATE_MS
        assert host.queue.outstanding_count == 1


def test_poll_when_it_waits_long_then_it_does_not_burn_the_processor() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_FLUSH, None)
        before = os.times()
        host.poll(1, seconds=0.5)
        after = os.times()
        used_s = after.user + after.system - before.user - before.system
        assert used_s < 0.1
        assert host.queue.stats.sleeps >= 1


def test_poll_when_min_count_is_zero_then_it_only_looks() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_FLUSH, None)
        deadline = Deadline.after(60)
        assert len(host.queue.poll(min_count=0, deadline=deadline)) == 0
        assert deadline.elapsed_ms() < LATE_MS
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        deadline = Deadline.after(60)
        assert len(host.queue.poll(min_count=1, deadline=deadline)) == 0, (
            "nothing outstanding: nothing to wait for"
        )
        assert deadline.elapsed_ms() < LATE_MS


def test_poll_when_fewer_fit_than_completed_then_the_rest_waits() -> None:
    with ScriptedPeer(MemoryScript(bytearray(4096))) as peer, PeerHost(peer) as host:
        ios = np.zeros(10, dtype=IO_DTYPE)
        ios["tag"] = np.arange(10)
        host.queue.submit(ios)
        tags: list[int] = []
        while host.queue.outstanding_count:
            done = host.queue.poll(min_count=10, deadline=Deadline.after(60), max_count=3)
            assert 1 <= len(done) <= 3
            tags += [int(tag) for tag in done["tag"]]
        assert tags == list(range(10))


def test_command_when_its_time_is_over_then_queue_pair_dies_and_payload_is_free() -> None:
    released = threading.Event()

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        late = connection.receive_command()
        other = connection.receive_command()
        released.wait(5)
        # Too late: the host has given up, and nothing of this may reach its buffer.
        connection.send_read(late, bytes(65536))
        connection.send_read(other, bytes(65536))

    options = {"command_timeout_s": 0.2}
    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options=options) as host:
        first, second = GuardedBuffer(65536), GuardedBuffer(65536)
        deadline = Deadline.after(60)
        host.submit(OPCODE_READ, first, tag=1)
        host.submit(OPCODE_READ, second, tag=2)
        done = host.queue.poll(min_count=2, deadline=deadline)
        assert 200 <= deadline.elapsed_ms() < 200 + LATE_MS
        assert len(done) == 2
        assert set(done["error"]) <= {-errno.ETIMEDOUT, -errno.ENOTCONN} and -errno.ETIMEDOUT in done["error"]
        released.set()
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        assert first.is_untouched and second.is_untouched
        fault = host.qpair.fault
        assert fault is not None and fault.kind == "timeout" and "read (02h)" in fault.text


def test_interrupt_when_poll_waits_then_it_is_served_in_time() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_FLUSH, None)

        def raise_interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, raise_interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        deadline = Deadline.after(10)
        try:
            with pytest.raises(KeyboardInterrupt):
                host.queue.poll(min_count=1, deadline=deadline)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert deadline.elapsed_ms() < LATE_MS


# ---- death ----


@pytest.mark.parametrize("is_reset", [False, True])
def test_target_when_it_vanishes_mid_run_then_everything_completes_with_an_error_in_bounded_time(
    is_reset: bool,
) -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        for _ in range(5):
            command = connection.receive_command()
            connection.send_read(command, bytes(command.sgl_length))
        connection.send(connection.pack_c2h_data(connection.receive_command().cid, 0, bytes(65536))[:1000])
        if is_reset:
            connection.reset()
        else:
            connection.finish()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        buffers = [GuardedBuffer(65536) for _ in range(40)]
        for index, buffer in enumerate(buffers):
            host.submit(OPCODE_READ, buffer, tag=index)
        deadline = Deadline.after(60)
        done = host.queue.poll(min_count=40, deadline=deadline)
        assert deadline.elapsed_ms() < LATE_MS
        assert sorted(done["tag"]) == list(range(40))
        errors = list(done["error"])
        # After a reset the kernel may drop replies that had arrived: fewer successes, never wrong ones.
        assert errors.count(0) <= 5 and (is_reset or errors.count(0) == 5)
        assert errors.count(0) + errors.count(-errno.ENOTCONN) == 40
        for buffer in buffers:
            buffer.check_guards()
        assert not host.qpair.is_alive
        assert not host.queue.is_device_alive(host.device_index)
        late = host.run(OPCODE_READ, buffers[0])
        assert (late["error"], late["send_ns"]) == (-errno.ENOTCONN, 0)


def test_idle_connection_when_closed_meanwhile_then_next_command_is_known_not_to_be_sent() -> None:
    closed = threading.Event()

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        connection.send_response(connection.receive_command())
        connection.close()
        closed.set()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        assert host.run(OPCODE_FLUSH, None)["error"] == 0
        assert closed.wait(5)
        threading.Event().wait(0.02)
        done = host.run(OPCODE_WRITE, GuardedBuffer(BLOCK))
        assert (done["error"], done["send_ns"]) == (-errno.ENOTCONN, 0)


def test_one_of_two_controllers_when_it_dies_then_the_other_goes_on() -> None:
    memory = bytearray(1 << 20)
    with ScriptedPeer([silent, MemoryScript(memory)]) as peer, PeerHost(peer) as host:
        second = HostQpair(qid=1, queue_size=32, trid="other")
        second.connect(peer.address, peer.port, deadline=Deadline.after(60))
        index = host.queue.add_qpair(second)
        other = host.queue.add_namespace(
            nsid=1, block_size_bytes=BLOCK, block_count=256, qpair_indexes=[index]
        )
        host.submit(OPCODE_FLUSH, None, tag=1)
        host.device_index = other
        host.submit(OPCODE_FLUSH, None, tag=2)
        assert list(host.poll(1)["tag"]) == [2]
        peer.connections[0].reset()
        done = host.poll(1)
        assert (done["tag"][0], done["error"][0]) == (1, -errno.ENOTCONN)
        assert host.run(OPCODE_FLUSH, None)["error"] == 0
        host.queue.close()
        second.close()


def test_peer_when_it_stops_reading_then_poll_still_ends_and_close_too() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        connection.send(connection.pack_r2t(command.cid, 1, 0, command.sgl_length))
        done.wait(10)

    done = threading.Event()
    with ScriptedPeer(script) as peer, PeerHost(peer, sndbuf_size_bytes=65536) as host:
        host.submit(OPCODE_WRITE, GuardedBufferKeeper.new(32 << 20))
        deadline = Deadline.after(0.3)
        assert len(host.queue.poll(min_count=1, deadline=deadline)) == 0
        assert 300 <= deadline.elapsed_ms() < 300 + LATE_MS
        host.queue.abandon()
        completions = host.queue.poll(min_count=1, deadline=Deadline.after(1))
        assert list(completions["error"]) == [-EUNCERTAIN]
        host.close()
        assert deadline.elapsed_ms() < LATE_MS
        done.set()


def test_abandon_when_commands_are_pending_and_in_flight_then_each_completes_once() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer, queue_size=4) as host:
        ios = np.zeros(10, dtype=IO_DTYPE)
        ios["tag"] = np.arange(10)
        host.queue.submit(ios)
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        host.queue.abandon()
        done = host.poll(10)
        assert sorted(done["tag"]) == list(range(10))
        sent = done[done["send_ns"] != 0]
        assert len(sent) == 3 and (sent["error"] == -errno.ENOTCONN).all()
        assert (done[done["send_ns"] == 0]["error"] == -errno.ECANCELED).all()


def test_remove_device_when_commands_are_pending_then_they_are_cancelled_and_the_rest_goes_on() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer, queue_size=3) as host:
        ios = np.zeros(5, dtype=IO_DTYPE)
        host.queue.submit(ios)
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        host.queue.remove_device(host.device_index)
        done = host.poll(3)
        assert list(done["error"]) == [-errno.ECANCELED] * 3
        assert host.queue.outstanding_count == 2
        with pytest.raises(UsageError, match="device_index"):
            host.queue.submit(ios)


# ---- passthrough ----


def test_execute_when_window_is_full_of_other_commands_then_it_still_ends_and_they_stay() -> None:
    memory = bytearray(1 << 20)

    def script(connection: PeerConnection) -> None:
        inner = MemoryScript(memory)
        connection.accept_ic()
        while True:
            command = connection.receive_command()
            if command.opcode == 0x0E:
                connection.send(
                    connection.pack_c2h_data(command.cid, 0, bytes(range(64)))
                    + connection.pack_response(command.cid, dw0=7)
                )
            elif command.opcode == 0x0D:
                data = connection.receive_write_data(command, ttag=1, r2to=0, r2tl=command.sgl_length)
                connection.send_response(command, status=0x83, dw0=len(data))
            else:
                inner.serve(connection, command)

    with ScriptedPeer(script) as peer, PeerHost(peer, queue_options={"window_size_bytes": 65536}) as host:
        buffers = [GuardedBuffer(65536) for _ in range(4)]
        for index, buffer in enumerate(buffers):
            host.submit(OPCODE_READ, buffer, tag=index)
        report = bytearray(64)
        completion = host.queue.execute(
            host.device_index, bytes([0x0E]) + bytes(63), data=report, deadline=Deadline.after(60)
        )
        assert completion.is_success and completion.dw0 == 7
        assert bytes(report) == bytes(range(64))
        completion = host.queue.execute(
            host.device_index,
            bytes([0x0D]) + bytes(63),
            data=bytes(16),
            is_write=True,
            deadline=Deadline.after(60),
        )
        assert (completion.sct, completion.sc, completion.dw0) == (0, 0x83, 16)
        assert sorted(host.poll(4)["tag"]) == [0, 1, 2, 3]


def test_execute_when_no_answer_comes_then_deadline_error_and_the_buffer_is_free() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        deadline = Deadline.after(0.2)
        with pytest.raises(DeadlineError, match=r"reservation report \(0eh\): no completion in time"):
            host.queue.execute(host.device_index, REPORT, data=bytearray(4096), deadline=deadline)
        assert 200 <= deadline.elapsed_ms() < 200 + LATE_MS
        with pytest.raises(ConnectionLostError):
            host.queue.execute(host.device_index, bytes(64), deadline=Deadline.after(1))


def test_execute_when_it_cannot_even_start_then_it_ends_at_its_deadline_and_the_connection_lives() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer, queue_size=2) as host:
        host.submit(OPCODE_FLUSH, None, tag=5)
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        deadline = Deadline.after(0.2)
        with pytest.raises(DeadlineError):
            host.queue.execute(host.device_index, bytes(64), deadline=deadline)
        assert host.qpair.is_alive
        assert host.queue.outstanding_count == 1


def interrupted_by(peer: PeerConnection) -> None:
    """Sends Ctrl-C to the test once a command has come, then waits for the end of the connection."""
    peer.accept_ic()
    peer.receive_command()
    os.kill(os.getpid(), signal.SIGINT)
    peer.wait_closed()


def test_execute_when_interrupted_then_it_ends_at_once_and_the_buffer_is_free() -> None:
    with ScriptedPeer(interrupted_by) as peer, PeerHost(peer) as host:
        data = bytearray(4096)
        deadline = Deadline.after(120)
        with pytest.raises(KeyboardInterrupt):
            host.queue.execute(host.device_index, REPORT, data=data, deadline=deadline)
        assert not deadline.is_expired
        assert not host.qpair.is_alive, "what was sent may still be answered: only a reset keeps that off"
        assert host.queue.outstanding_count == 0
        data.clear()  # not possible while the core still had it


def test_execute_when_interrupted_before_it_was_sent_then_the_connection_lives() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer, queue_size=2) as host:
        host.submit(OPCODE_FLUSH, None, tag=5)
        host.queue.poll(min_count=0, deadline=Deadline.after(1))
        sleeps = host.queue.stats.sleeps

        def interrupt() -> None:
            while host.queue.stats.sleeps == sleeps:
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        deadline = Deadline.after(120)
        with pytest.raises(KeyboardInterrupt):
            host.queue.execute(host.device_index, REPORT, data=bytearray(4096), deadline=deadline)
        thread.join()
        assert not deadline.is_expired
        assert host.qpair.is_alive
        assert host.queue.outstanding_count == 1, "the flush before it"


def test_execute_when_interrupted_then_commands_beside_it_end_and_the_next_one_is_told() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        for _ in range(2):
            connection.receive_command()
        os.kill(os.getpid(), signal.SIGINT)
        connection.wait_closed()

    with ScriptedPeer(script) as peer, PeerHost(peer) as host:
        buffer = GuardedBuffer(BLOCK)
        host.submit(OPCODE_READ, buffer, tag=9)
        with pytest.raises(KeyboardInterrupt):
            host.queue.execute(host.device_index, REPORT, data=bytearray(64), deadline=Deadline.after(120))
        done = host.poll(1)
        assert (done["tag"].tolist(), done["error"].tolist()) == ([9], [-errno.ENOTCONN])
        assert buffer.is_untouched
        with pytest.raises(ConnectionLostError, match=r"reservation report \(0eh\)"):
            host.queue.execute(host.device_index, REPORT, data=bytearray(64), deadline=Deadline.after(60))


def test_execute_when_the_queue_is_closed_meanwhile_then_it_ends_first() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                host.queue.execute(
                    host.device_index, REPORT, data=bytearray(64), deadline=Deadline.after(120)
                )
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while host.queue.stats.sleeps == 0:
            threading.Event().wait(0.01)
        deadline = Deadline.after(100)
        host.queue.close()
        thread.join(60)
        assert not deadline.is_expired
        assert len(errors) == 1 and "closed by another thread" in str(errors[0])


# ---- misuse ----


def test_queue_when_two_threads_call_then_the_second_is_told() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        host.submit(OPCODE_FLUSH, None)
        started = threading.Event()

        def wait() -> None:
            started.set()
            host.poll(1, seconds=0.3)

        thread = threading.Thread(target=wait)
        thread.start()
        started.wait(5)
        with pytest.raises(UsageError, match="one thread at a time"):
            for _ in range(1000):
                host.submit(OPCODE_FLUSH, None)
                threading.Event().wait(0.001)
        thread.join(5)


def test_queue_when_closed_while_a_batch_waits_then_the_batch_ends_first() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        errors: list[BaseException] = []

        def wait() -> None:
            ios = np.zeros(1, dtype=IO_DTYPE)
            ios["device_index"], ios["opcode"] = host.device_index, OPCODE_FLUSH
            try:
                run_batch(host.queue, ios, Deadline.after(20))
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while host.queue.stats.sleeps == 0:
            threading.Event().wait(0.01)
        deadline = Deadline.after(20)
        host.queue.close()
        thread.join(5)
        assert deadline.elapsed_ms() < LATE_MS
        assert len(errors) == 1, "sent away, neither lost nor in memory that is gone"


def test_queue_when_used_after_fork_or_close_then_usage_error() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        with pytest.raises(UsageError, match="nobody drives"):
            host.qpair.execute(bytes(64), deadline=Deadline.after(1))
        with pytest.raises(UsageError, match="nobody drives"):
            host.qpair.close()
        left, right = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                host.submit(OPCODE_FLUSH, None)
            except UsageError as error:
                right.sendall(str(error).encode())
            os._exit(0)
        right.close()
        assert b"its fork" in left.recv(200)
        os.waitpid(pid, 0)
        host.queue.close()
        with pytest.raises(UsageError, match="closed one"):
            host.submit(OPCODE_FLUSH, None)
        assert host.qpair.is_alive, "an idle queue pair is the caller's again"
