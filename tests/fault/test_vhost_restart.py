"""The back end goes away: commands of unknown fate, quarantine, reconnection, commands that survive a restart."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CapacityError, ConnectError, DeadlineError, UnsupportedError
from kvdev.native.io import IO_FUA, OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.testing.vhost_peer import VhostPeer, VhostScript, config_of
from kvdev.testing.vhost_rig import VhostRig
from kvdev.vhost import VhostOptions

DISK_BYTES = 4 << 20


def script(**fields: Any) -> VhostScript:
    return VhostScript(bytearray(DISK_BYTES), **fields)


class Process:
    """The scripted back end as a process of its own."""

    def __init__(self, path: Path, *args: str) -> None:
        command = [
            sys.executable,
            "-m",
            "kvdev.testing.vhost_peer",
            str(path),
            "--size",
            str(DISK_BYTES),
            *args,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def back_end(path: Path, *args: str) -> Iterator[Process]:
    path.unlink(missing_ok=True)
    process = Process(path, *args)
    try:
        yield process
    finally:
        process.kill()
        assert process.process.stdout is not None
        process.process.stdout.close()


# ---- the connection ends, the process lives ----


def test_hang_up_when_commands_are_in_flight_then_not_connected_and_memory_is_held(tmp_path: Path) -> None:
    offer = script(is_silent=True)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        for tag in range(3):
            rig.submit(OPCODE_WRITE, size_bytes=4096, offset=4096 * tag, tag=tag)
        rig.submit(OPCODE_FLUSH, tag=3)
        rig.poll(1, timeout_s=0.02)
        peer.hang_up()
        done = rig.poll(4)
        assert sorted(done["tag"].tolist()) == [0, 1, 2, 3]
        assert set(done["error"].tolist()) == {-errno.ENOTCONN} and done["send_ns"].all(), (
            "uncertain: it was sent"
        )
        assert rig.device.state == "dead" and not rig.queue.is_device_alive(rig.device.device_index)
        assert rig.run(OPCODE_READ, size_bytes=512)["error"] == -errno.ENOTCONN
        (quarantine,) = rig.device.quarantines
        assert quarantine.size_bytes == 3 * 4096
        with pytest.raises(
            DeadlineError, match=rf"process {os.getpid()} still runs and may write to 12288 bytes"
        ):
            rig.device.wait_quarantine(Deadline.after(0.01))
        rig.bytes = rig.bytes[:0]
        rig.lease.release()
        assert rig.arena.held_bytes == rig.arena.size_bytes, "the lease had memory in flight"
        with pytest.raises(CapacityError, match="held until a dead device's process ends"):
            rig.arena.lease(1, 4096)


def test_hang_up_when_nothing_is_in_flight_then_the_next_command_was_never_sent(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script()) as peer, VhostRig(peer.path) as rig:
        assert rig.run(OPCODE_READ, size_bytes=512)["error"] == 0
        peer.hang_up()
        rig.device._pause.wait(0.01)
        done = rig.run(OPCODE_WRITE, size_bytes=512)
        assert (done["error"], done["send_ns"]) == (-errno.ENOTCONN, 0)
        assert rig.device.quarantines == () and rig.device.fault is not None
        assert "closed the connection" in rig.device.fault.text
        assert not any(request.kind == 1 for request in peer.requests)


@pytest.mark.parametrize("answered", range(4))
def test_hang_up_when_some_were_answered_then_only_the_others_are_uncertain(
    answered: int, tmp_path: Path
) -> None:
    with VhostPeer(tmp_path / "s", script(is_silent=True)) as peer, VhostRig(peer.path) as rig:
        for tag in range(4):
            rig.submit(OPCODE_WRITE, slba=tag, size_bytes=512, tag=tag)
        rig.poll(1, timeout_s=0.02)

        def answer(connection: Any) -> None:
            for ring, request in connection.outstanding[:answered]:
                connection.complete(ring, request)
            connection.sock.close()

        peer.do(answer)
        done = {int(row["tag"]): int(row["error"]) for row in rig.poll(4)}
        assert sorted(done) == [0, 1, 2, 3]
        assert [done[tag] for tag in range(answered)] == [0] * answered, "what was answered is believed"
        assert all(done[tag] == -errno.ENOTCONN for tag in range(answered, 4))


# ---- reconnection ----


def test_reconnect_when_the_back_end_is_back_then_the_same_device_goes_on(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    offer = script()
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        index = rig.device.device_index
        for round_ in range(3):
            data = rig.fill(rng, 65536)
            assert rig.run(OPCODE_WRITE, slba=round_ * 128, size_bytes=65536)["error"] == 0
            assert bytes(offer.disk[round_ * 65536 :][:65536]) == data
            peer.hang_up()
            rig.device._pause.wait(0.01)
            assert rig.run(OPCODE_READ, size_bytes=512)["error"] == -errno.ENOTCONN
            rig.device.reconnect(rig.deadline())
            assert (rig.device.state, rig.device.device_index) == ("ready", index)
        rig.device.reconnect(rig.deadline())  # nothing to do
        assert peer.connection_count == 4


def test_reconnect_when_nobody_comes_back_then_the_deadline_ends_it(tmp_path: Path) -> None:
    peer = VhostPeer(tmp_path / "s", script())
    with VhostRig(peer.path) as rig:
        peer.close()
        rig.device._pause.wait(0.01)
        assert rig.run(OPCODE_READ, size_bytes=512)["error"] == -errno.ENOTCONN
        deadline = Deadline.after(0.2)
        with pytest.raises(ConnectError, match="start the back end"):
            rig.device.reconnect(deadline)
        assert deadline.elapsed_ms() < 1000


def test_reconnect_when_the_blocks_are_others_then_refused(tmp_path: Path) -> None:
    offer = script()
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        offer.config = config_of(DISK_BYTES, block_size_bytes=4096)
        peer.hang_up()
        rig.device._pause.wait(0.01)
        rig.run(OPCODE_READ, size_bytes=512)
        with pytest.raises(UnsupportedError, match="blk_size: expected 512 as before, got 4096"):
            rig.device.reconnect(rig.deadline())
        assert rig.device.state == "dead"


# ---- processes ----


def test_kill_when_the_process_is_dead_then_the_quarantine_ends_and_leases_return(tmp_path: Path) -> None:
    with back_end(tmp_path / "s", "--silent") as process, VhostRig(str(tmp_path / "s")) as rig:
        rig.submit(OPCODE_READ, size_bytes=65536)
        rig.poll(1, timeout_s=0.05)
        assert rig.device._connection.process.pid == process.process.pid
        process.process.send_signal(signal.SIGSTOP)
        rig.device._rings.kill(errno.ENOTCONN, "test")
        assert rig.poll(1)["error"].tolist() == [-errno.ENOTCONN]
        with pytest.raises(DeadlineError, match=f"process {process.process.pid} still runs"):
            rig.device.wait_quarantine(Deadline.after(0.02))
        rig.bytes = rig.bytes[:0]
        rig.lease.release()
        with pytest.raises(CapacityError):
            rig.arena.lease(1, 4096)
        process.kill()
        rig.device.wait_quarantine(Deadline.after(60))
        assert rig.device.quarantines == () and rig.arena.held_bytes == 0
        rig.lease = rig.arena.lease(1, rig.arena.size_bytes)


def test_restart_when_both_keep_commands_in_flight_then_they_end_with_the_successor(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, file = tmp_path / "s", tmp_path / "disk"
    options = VhostOptions(queue_count=2)
    with (
        back_end(path, "--inflight", "--silent", "--file", str(file)) as first,
        VhostRig(str(path), options=options) as rig,
    ):
        data = rig.fill(rng, 16 * 4096)
        for tag in range(16):
            rig.submit(
                OPCODE_WRITE,
                slba=8 * tag,
                size_bytes=4096,
                offset=4096 * tag,
                tag=tag,
                flags=IO_FUA * (tag & 1),
            )
        assert len(rig.poll(1, timeout_s=0.1)) == 0
        first.kill()
        assert len(rig.poll(1, timeout_s=0.2)) == 0, "held, not failed"
        assert rig.device.state == "held" and rig.queue.is_device_alive(rig.device.device_index)
        rig.submit(OPCODE_FLUSH, tag=99)
        with back_end(path, "--inflight", "--file", str(file)) as second:
            done = rig.poll(17)
            assert sorted(done["tag"].tolist()) == [*range(16), 99] and not done["error"].any()
            assert file.read_bytes()[: len(data)] == data
            assert rig.device._connection.process.pid == second.process.pid
            assert rig.device.state == "ready" and rig.device.quarantines == ()
            rig.bytes[:] = 0
            assert rig.run(OPCODE_READ, size_bytes=16 * 4096)["error"] == 0
            assert rig.bytes[: len(data)].tobytes() == data


def test_restart_when_no_successor_comes_then_commands_end_by_their_time_limit(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        back_end(path, "--inflight", "--silent") as process,
        VhostRig(str(path), command_timeout_s=0.5) as rig,
    ):
        rig.submit(OPCODE_WRITE, size_bytes=512)
        rig.poll(1, timeout_s=0.05)
        process.kill()
        assert rig.poll(1, timeout_s=5)["error"].tolist() == [-errno.ETIMEDOUT]
        assert rig.device.state == "dead" and rig.device.quarantines == ()


def test_restart_when_the_old_process_still_lives_then_no_successor_is_used(tmp_path: Path) -> None:
    """Stopped and continued, it would carry out its commands a second time, after the new one has."""
    offer = script(is_silent=True, has_inflight=True)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path, command_timeout_s=0.4) as rig:
        rig.submit(OPCODE_WRITE, size_bytes=512)
        rig.poll(1, timeout_s=0.05)
        peer.hang_up()
        assert len(rig.poll(1, timeout_s=0.2)) == 0 and rig.device.state == "held"
        assert rig.poll(1)["error"].tolist() == [-errno.ETIMEDOUT]
        assert peer.connection_count == 1
        assert len(rig.device.quarantines) == 1


def test_restart_when_the_successor_offers_less_then_commands_fail_and_the_reason_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with back_end(path, "--inflight", "--silent") as process, VhostRig(str(path)) as rig:
        rig.submit(OPCODE_WRITE, size_bytes=512)
        rig.poll(1, timeout_s=0.05)
        process.kill()
        path.unlink()
        other = script(has_inflight=True, config=replace(config_of(DISK_BYTES), max_discard_sectors=64))
        with VhostPeer(path, other):
            assert rig.poll(1)["error"].tolist() == [-errno.ENOTCONN]
        assert rig.device.fault is not None
        assert "discard_sectors_max: expected 32768 as before the restart, got 64" in rig.device.fault.text


# ---- changes ----


@pytest.mark.parametrize("needs_reply", [False, True])
def test_capacity_when_the_back_end_tells_of_a_change_then_it_is_read_again(
    needs_reply: bool, tmp_path: Path
) -> None:
    offer = script()
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        offer.disk.extend(bytes(DISK_BYTES))
        offer.config = config_of(2 * DISK_BYTES)
        peer.do(lambda connection: connection.tell_config_change(needs_reply=needs_reply))
        rig.device._pause.wait(0.01)
        assert rig.run(OPCODE_READ, size_bytes=512)["error"] == 0
        assert rig.device.block_count == 2 * DISK_BYTES // 512
        assert rig.run(OPCODE_READ, slba=DISK_BYTES // 512, size_bytes=4096)["error"] == 0
        if needs_reply:
            connection = peer.connection
            assert connection is not None and connection.channel is not None
            assert connection.channel.recv(64)[:8] == bytes.fromhex("0200000005000000")


def test_back_end_channel_when_it_carries_rubbish_then_the_device_is_dead(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script(is_silent=True)) as peer, VhostRig(peer.path) as rig:
        rig.submit(OPCODE_READ, size_bytes=512)
        rig.poll(1, timeout_s=0.05)

        def rubbish(connection: Any) -> None:
            connection.channel.sendall(b"\xff" * 64)

        peer.do(rubbish)
        assert rig.poll(1)["error"].tolist() == [-errno.ENOTCONN]
        assert rig.device.fault is not None and "back end channel" in rig.device.fault.text
