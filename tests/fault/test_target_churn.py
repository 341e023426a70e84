"""Hosts that die in the middle of everything, and hosts that send noise: the target loses nothing of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvdev.native.target import BUFFER_COUNT
from kvdev.target.model import Transport
from kvdev.testing.raw_host import RawHost, TargetClosedError, connected_admin, connected_io
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.nvme import NvmOpcode, Sqe, build_flush, build_keep_alive, build_read_write

BLOCK = 4096
BLOCK_COUNT = (4 << 20) // BLOCK


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2500):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("the target did not get there")


def transfer(opcode: int, nsid: int, slba: int, lba_count: int, cid: int) -> Sqe:
    return build_read_write(
        opcode, nsid=nsid, slba=slba, lba_count=lba_count, byte_count=lba_count * BLOCK, cid=cid
    )


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def check_idle(target: RunningTarget) -> None:
    """No connection, no buffer and no namespace reference is left."""
    core = target.service._core
    wait_until(lambda: core.poller_stat(0).io_qpairs_now == 0 and core.poller_stat(0).unbound_now == 0)
    wait_until(lambda: core.poller_stat(0).admin_qpairs_now == 0)
    wait_until(lambda: core.poller_stat(0).buffers_free == BUFFER_COUNT)
    wait_until(lambda: not target.service.controllers(target.nqn))
    assert target.service.defect_count == 0


def test_hosts_that_die_in_the_middle_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path / "disk"
    path.write_bytes(bytes(BLOCK_COUNT * BLOCK))
    with running_target(namespace_size_bytes=BLOCK_COUNT * BLOCK, transport=Transport()) as target:
        file_nsid = target.add_file_namespace(str(path))
        for _ in range(60):
            admin = connected_admin(target.address, target.port, target.nqn)
            hosts = [
                connected_io(
                    admin,
                    target.nqn,
                    qid=qid,
                    hdgst=bool(rng.integers(0, 2)),
                    ddgst=bool(rng.integers(0, 2)),
                    cattr=4 * int(rng.integers(0, 2)),
                )
                for qid in range(1, 1 + int(rng.integers(1, 4)))
            ]
            for host in hosts:
                stream = b""
                for cid in range(int(rng.integers(1, 30))):
                    opcode = int(rng.choice([NvmOpcode.READ, NvmOpcode.WRITE, NvmOpcode.COMPARE]))
                    nsid = int(rng.choice([1, file_nsid]))
                    count = int(rng.integers(1, 33))
                    sqe = transfer(opcode, nsid, int(rng.integers(0, BLOCK_COUNT - 32)), count, cid)
                    if opcode == NvmOpcode.WRITE and count == 1:
                        stream += host.capsule(replace(sqe, sgl_type=1), bytes(BLOCK))
                    else:
                        stream += host.capsule(sqe)
                host.send(stream[: int(rng.integers(1, len(stream) + 1))])
            for index in rng.permutation(len(hosts) + 1):
                with contextlib.suppress(TargetClosedError, OSError):
                    (admin if index == len(hosts) else hosts[index]).close()
        check_idle(target)
        # Every namespace can be taken away at once: nothing holds it.
        target.model.remove_namespace(target.nqn, 1)
        target.model.remove_namespace(target.nqn, file_nsid)


def test_noise_ends_only_the_connection_it_came_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with (
        running_target() as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn) as steady,
    ):
        for turn in range(200):
            kind = turn % 3
            with contextlib.suppress(TargetClosedError, OSError, AssertionError):
                if kind == 0:
                    host = RawHost(target.address, target.port)
                elif kind == 1:
                    host = RawHost(target.address, target.port)
                    host.exchange_ic()
                else:
                    host = connected_io(admin, target.nqn, qid=2, hdgst=turn % 2 == 0)
                right = host.capsule(
                    replace(transfer(NvmOpcode.WRITE, 1, 0, 1, 3), sgl_type=1), bytes(BLOCK)
                ) + host.capsule(build_flush(nsid=1, cid=4))
                noise = bytearray(right)
                for _ in range(int(rng.integers(1, 4))):
                    at = int(rng.integers(0, 72)) if rng.integers(0, 2) else int(rng.integers(0, len(noise)))
                    noise[at] = int(rng.integers(0, 256))
                host.send(bytes(noise))
                host.socket.shutdown(1)
                host.wait_closed()
                host.close()
            assert steady.execute(build_flush(nsid=1)).cqe.is_success
        assert admin.execute(build_keep_alive()).cqe.is_success
        assert target.service.defect_count == 0


def test_random_admin_commands_never_trouble_the_control_thread(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with running_target() as target:
        admin = connected_admin(target.address, target.port, target.nqn)
        for turn in range(600):
            wire = bytearray(rng.integers(0, 256, 64, dtype=np.uint8).tobytes())
            if turn % 4:  # mostly opcodes that exist
                wire[0] = int(rng.choice([0x02, 0x06, 0x08, 0x09, 0x0A, 0x18, 0x7F, 0x0C]))
                wire[1] = 0x40
                wire[39] = int(rng.choice([0x01, 0x5A, 0x00]))
                wire[32:36] = int(rng.choice([0, 16, 512, 4096])).to_bytes(4, "little")
                if wire[0] in (0x02, 0x06, 0x09, 0x0A):
                    wire[40] = int(rng.integers(0, 0x20))
            try:
                admin.send(admin.pdu(0x04, bytes(wire)))
                admin.send(admin.capsule(build_flush(nsid=0, cid=turn)))
                while True:
                    pdu = admin.read_pdu()
                    if pdu.type == 0x05 and pdu.cqe.cid == turn:
                        break
            except (TargetClosedError, OSError, AssertionError):
                admin.close()
                admin = connected_admin(target.address, target.port, target.nqn)
        admin.close()
        check_idle(target)


def test_connections_that_come_and_go_cost_no_memory() -> None:
    with running_target() as target:

        def turn() -> None:
            with connected_admin(target.address, target.port, target.nqn) as admin:
                connected_io(admin, target.nqn).close()
            check_idle(target)

        for _ in range(10):
            turn()
        before = mapped_bytes()
        for _ in range(40):
            turn()
        assert mapped_bytes() - before < 8 << 20  # one connection maps more than 2 MiB
