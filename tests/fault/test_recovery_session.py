"""A session whose target dies, hangs, restarts or changes: what it tells its user, and what it goes on with."""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import NS_PER_MS, SYSTEM_CLOCK, Deadline
from kvdev.errors import ConnectionLostError, DeadlineError, TransportError, UncertainWriteError, UsageError
from kvdev.initiator.event import EventKind
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions, LostWrites
from kvdev.initiator.path import FIRST_DELAY_S, JITTER, PathStage
from kvdev.session import Session
from kvdev.target.model import Transport
from kvdev.testing.controller import ControllerScript
from kvdev.testing.killable import KillableTarget, free_ports
from kvdev.testing.peer import PduFromHost, PeerConnection, ScriptedPeer
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import WAIT_S, descriptor_count, nothing_left_over, soon, until, wait_event
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.fabrics import ConnectCommand, FabricsType, InvalidParameter
from kvdev.wire.nvme import CNTLID_DYNAMIC, STATUS_DNR, AdminOpcode, FabricsStatus, Sqe

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
# The keep alive is so slow that a busy machine does not look like a lost connection.
QUICK = ControllerOptions(
    kato_ms=4000,
    connect_timeout_s=20.0,
    admin_timeout_s=20.0,
    shutdown_timeout_s=0.3,
    reconnect_delay_s=0.3,
    ctrl_loss_tmo_s=120,
)
# Where a lost connection has to be noticed by it, or waited for.
WATCHFUL = dataclasses.replace(QUICK, kato_ms=1000)
FAST_KEEP_ALIVE = Transport(kas=1, min_kato=100)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with nothing_left_over():
        yield


class SentWrite(threading.Thread):
    """A write whose command has left this host when the constructor returns."""

    def __init__(self, kv: Session, device: NvmeNamespace, data: bytes, deadline: Deadline) -> None:
        super().__init__(daemon=True)
        self.failure: Exception | None = None
        self.ended_ns = 0
        self._device, self._data, self._deadline = device, data, deadline

        def sent_bytes() -> int:
            qpairs = (kv.queue.qpair(index) for index in device.controller.qpair_indexes)
            return sum(qpair.info.tx_bytes for qpair in qpairs)

        before = sent_bytes()
        self.start()
        until(lambda: sent_bytes() > before, "the write is sent")

    def run(self) -> None:
        try:
            write_blocks(self._device, 0, self._data, self._deadline)
        except Exception as error:
            self.failure = error
        self.ended_ns = SYSTEM_CLOCK.monotonic_ns()

    def result(self) -> None:
        """Wait for the end; raises what it failed with."""
        self.join(WAIT_S)
        assert not self.is_alive(), "the write does not end"
        if self.failure is not None:
            raise self.failure


class Net(NamedTuple):
    """A target in this process, behind a network that a test makes bad."""

    target: RunningTarget
    relay: Relay

    @property
    def uri(self) -> str:
        return through(self.relay, self.target)


@pytest.fixture
def net() -> Iterator[Net]:
    with running_target(transport=FAST_KEEP_ALIVE) as target, Relay(("127.0.0.1", target.port)) as relay:
        yield Net(target, relay)


def through(relay: Relay, target: RunningTarget) -> str:
    return f"tcp://127.0.0.1:{relay.port}/{target.nqn}"


# ---- the association ends while it is being made ----


def test_io_connect_when_its_controller_has_just_gone_then_a_new_association_is_made() -> None:
    """The refusal says DNR, as that command can never succeed; another association can."""

    def admin_count() -> int:
        return sum(connect.cntlid == CNTLID_DYNAMIC for connect in script.connects)

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        is_connect = sqe.opc == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT
        if not is_connect or not ConnectCommand.from_sqe(sqe).qid or admin_count() not in (2, 3):
            return False
        status = FabricsStatus.CONNECT_INVALID_PARAMETERS | STATUS_DNR
        connection.send_response(pdu, status=status, dw0=InvalidParameter.of("cntlid").build())
        return True

    script = ControllerScript(answer=answer)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        uri = f"tcp://127.0.0.1:{peer.port}/{script.identify.subnqn}"
        device = kv.open_device(f"{uri}?nsid=1")
        for connection in peer.connections:
            connection.reset()
        assert not read_blocks(device, 0, 4, soon()).any()
        assert admin_count() == 4
        assert kv.subsystem(uri).path_infos[0].stage is PathStage.LIVE


# ---- the target comes back ----


def test_io_when_target_is_killed_and_restarted_then_goes_on_by_itself(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        subsystem = kv.subsystem(target.uri())
        model = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
        write_blocks(device, 0, model, soon())
        first = kv.controller(target.uri())
        for _ in range(2):
            target.kill()
            restart = threading.Timer(0.2, target.start)
            restart.start()
            assert np.array_equal(read_blocks(device, 0, 1024, soon()), model)
            model = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
            write_blocks(device, 0, model, soon())
            assert np.array_equal(read_blocks(device, 0, 1024, soon()), model)
            restart.join()
            wait_event(subsystem, EventKind.PATH_UP)
        assert kv.controller(target.uri()) is not first
        assert not first.is_alive
        info = subsystem.path_infos[0]
        assert (info.stage, info.loss_count, info.attempt_count) == (PathStage.LIVE, 2, 0)


def test_zeroing_when_the_association_goes_before_its_limits_are_asked_then_goes_on(net: Net) -> None:
    """A controller's limits are asked once it is needed: that question meets a lost connection too."""
    with Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        write_blocks(device, 0, b"\x22" * 8 * device.block_size_bytes, soon())
        asks: list[Callable[[], None]] = [
            lambda: device.write_zeroes(0, 4, soon()),
            lambda: device.verify(0, 8, soon()),
            lambda: device.deallocate([(4, 2)], soon()),
        ]
        for ask in asks:
            net.relay.cut()
            net.relay.mend()
            ask()
        assert not read_blocks(device, 0, 4, soon()).any()


def test_write_when_cut_under_it_then_held_for_the_rule_and_sent_again(net: Net) -> None:
    """Base 9.6.2: 2 x KATO after the last Keep Alive, then CQT, which our target reports as 100 ms."""
    with Session(host=HOST, options=WATCHFUL) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        net.relay.stall()
        stalled_ns = SYSTEM_CLOCK.monotonic_ns()
        write = SentWrite(kv, device, b"\x11" * 4096, soon())
        net.relay.cut()
        net.relay.mend()
        write.result()
        # A Keep Alive is sent every KATO / 2; the last one may have come right before it, or late.
        assert write.ended_ns > stalled_ns + (2 * 1000 - 500 + 100) * NS_PER_MS
        assert write.ended_ns >= device.fence_ns
        assert kv.queue.stats.held == 1
        assert read_blocks(device, 0, 1, soon()).tobytes() == b"\x11" * 4096


def test_write_when_reporting_then_uncertain_error_and_the_fence_is_known(net: Net) -> None:
    options = dataclasses.replace(QUICK, lost_writes=LostWrites.REPORT)
    with Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        net.relay.stall()
        stalled_ns = SYSTEM_CLOCK.monotonic_ns()
        write = SentWrite(kv, device, bytes(4096), soon())
        net.relay.cut()
        with pytest.raises(UncertainWriteError, match="fate unknown"):
            write.result()
        wait_event(kv.subsystem(net.uri), EventKind.PATH_DOWN)
        assert device.fence_ns > stalled_ns + (2 * 4000 - 2000 + 100) * NS_PER_MS


def test_write_when_the_deadline_ends_while_held_then_uncertain(net: Net) -> None:
    options = dataclasses.replace(QUICK, fence_wait_s=600)
    with Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        net.relay.stall()
        write = SentWrite(kv, device, bytes(4096), soon(1))
        net.relay.cut()
        with pytest.raises(UncertainWriteError):
            write.result()
        net.relay.mend()
        assert len(read_blocks(device, 0, 1, soon())) == 4096


# ---- it stays away ----


def test_io_when_target_stays_away_then_fast_io_fail_and_ctrl_loss_bound_it(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, fast_io_fail_tmo_s=0.4, ctrl_loss_tmo_s=1.2)
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        subsystem = kv.subsystem(target.uri())
        started = Deadline.after(0)
        target.kill()
        with pytest.raises(ConnectionLostError, match="connection lost"):
            read_blocks(device, 0, 1, soon())
        assert started.elapsed_ms() >= 400
        # From here on without waiting, until it is back.
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        ended = wait_event(subsystem, EventKind.PATH_ENDED)
        assert "ctrl_loss_tmo 1.2 s" in ended.text and "refused" in ended.text
        assert subsystem.is_ended
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        target.start()
        assert len(read_blocks(kv.open_device(f"{target.uri()}?nsid=1"), 0, 1, soon())) == 4096


def test_io_when_recovery_is_off_then_fails_at_once(net: Net) -> None:
    with Session(host=HOST, options=dataclasses.replace(QUICK, ctrl_loss_tmo_s=0)) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        subsystem = kv.subsystem(net.uri)
        net.relay.cut()
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        assert "reconnecting is off" in wait_event(subsystem, EventKind.PATH_ENDED).text


@pytest.mark.parametrize("is_silent", [True, False])
def test_close_when_target_is_gone_or_silent_then_bounded(net: Net, is_silent: bool) -> None:
    """It is connecting again meanwhile: without an answer, or refused."""
    options = dataclasses.replace(WATCHFUL, connect_timeout_s=300.0, admin_timeout_s=300.0)
    kv = Session(host=HOST, options=options)
    kv.open_device(f"{net.uri}?nsid=1")
    net.relay.stall() if is_silent else net.relay.cut()
    wait_event(kv.subsystem(net.uri), EventKind.PATH_DOWN)
    limit = soon()
    kv.close()
    assert not limit.is_expired


def test_controllers_when_a_hundred_wait_for_a_dead_port_then_each_waits_its_delay_and_holds_nothing() -> (
    None
):
    """Nobody tries sooner and nothing leaks; what it costs in CPU is a figure of ``bench/reconnect.py``."""
    count, delay_s = 100, 10.0
    options = dataclasses.replace(QUICK, reconnect_delay_s=delay_s, ctrl_loss_tmo_s=600, kato_ms=60_000)
    with running_target(transport=Transport(max_queue_depth=16)) as target:
        kv = Session(host=HOST, options=options)
        before = descriptor_count()
        subsystems = []
        for index in range(count):
            name = f"nqn.2024-01.io.kvdev:many{index}"
            target.add_subsystem(name)
            subsystems.append(kv.subsystem(f"tcp://127.0.0.1:{target.port}/{name}"))

    # The target is gone: its port refuses.
    def attempts() -> list[int]:
        return [each.path_infos[0].attempt_count for each in subsystems]

    try:
        until(lambda: min(attempts()) >= 3, "everyone has begun")
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        first = attempts()
        until(lambda: min(attempts()) >= 5, "everyone goes on")
        last = attempts()
        elapsed_s = (SYSTEM_CLOCK.monotonic_ns() - started_ns) / 1e9
        for begin, end in zip(first, last, strict=True):
            waits_s = [min(delay_s, FIRST_DELAY_S * 2.0 ** (index - 1)) for index in range(begin + 1, end)]
            assert sum(waits_s) * (1 - JITTER) <= elapsed_s
        # One for the session's own wake-ups; the rest are attempts under way.
        assert descriptor_count() <= before + 1 + count
    finally:
        kv.close()


# ---- keep alive ----


def test_keep_alive_when_its_answer_is_lost_then_noticed_within_kato_and_reconnected(net: Net) -> None:
    with Session(host=HOST, options=WATCHFUL) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        subsystem = kv.subsystem(net.uri)
        net.relay.stall()
        # Sent every KATO / 2, given up after KATO, which is a second; nothing else would notice within a minute.
        assert "keep alive" in wait_event(subsystem, EventKind.PATH_DOWN, seconds=20).text
        net.relay.mend()
        wait_event(subsystem, EventKind.PATH_UP)
        assert len(read_blocks(device, 0, 1, soon())) == 4096


def test_command_when_over_its_time_limit_then_controller_is_reset_and_the_command_retried(net: Net) -> None:
    """The I/O connection hangs while the admin one works: CC.EN is cleared, which is a fence."""
    options = dataclasses.replace(QUICK, command_timeout_s=0.3, kato_ms=20_000)
    with Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        subsystem = kv.subsystem(net.uri)
        close = net.relay.strand()  # the I/O queue pair's
        try:
            started = Deadline.after(0)
            write_blocks(device, 0, b"\x22" * 4096, soon())
            assert 300 <= started.elapsed_ms() < 2 * 20_000, "not 2 x KATO"
            event = wait_event(subsystem, EventKind.PATH_DOWN)
            assert "write (01h)" in event.text
            assert read_blocks(device, 0, 1, soon()).tobytes() == b"\x22" * 4096
        finally:
            close()


# ---- what changes while we look ----


def test_namespace_when_grown_shrunk_replaced_or_removed_then_told_and_acted_on(tmp_path: Path) -> None:
    with (
        running_target(namespace_count=1, transport=FAST_KEEP_ALIVE) as target,
        Session(host=HOST, options=QUICK) as kv,
    ):
        identity = uuid.UUID(int=7)

        def attach(mib: int, name: uuid.UUID) -> None:
            bdev = target.model.create_malloc(name=None, block_size_bytes=4096, block_count=mib * 256)
            target.model.add_namespace(target.nqn, bdev_name=bdev, nsid=9, uuid=name, nguid=name.bytes)

        def detach() -> None:
            target.model.remove_namespace(target.nqn, 9)

        attach(8, identity)
        device = kv.open_device(f"{target.uri}?nsid=9")
        subsystem = kv.subsystem(target.uri)
        write_blocks(device, 0, bytes(4096), soon())
        detach()
        assert wait_event(subsystem, EventKind.NAMESPACE_REMOVED).nsid == 9
        with pytest.raises(ConnectionLostError, match="gone, or another one"):
            read_blocks(device, 0, 1, soon())
        attach(16, identity)
        wait_event(subsystem, EventKind.NAMESPACE_RETURNED)
        wait_event(subsystem, EventKind.NAMESPACE_GROWN)
        assert device.block_count == 16 * 256
        assert len(read_blocks(device, 16 * 256 - 1, 1, soon())) == 4096
        detach()
        wait_event(subsystem, EventKind.NAMESPACE_REMOVED)
        attach(4, identity)
        wait_event(subsystem, EventKind.NAMESPACE_SHRUNK)
        with pytest.raises(UsageError, match="slba"):
            read_blocks(device, 4 * 256, 1, soon())
        detach()
        wait_event(subsystem, EventKind.NAMESPACE_REMOVED)
        attach(4, uuid.UUID(int=8))
        event = wait_event(subsystem, EventKind.NAMESPACE_REPLACED)
        assert "expected" in event.text
        with pytest.raises(ConnectionLostError, match="gone, or another one"):
            write_blocks(device, 0, bytes(4096), soon())
        assert not target.bdev(9).read(0, 4096).strip(b"\0")


def test_namespace_when_another_one_is_there_after_a_restart_then_it_is_not_written_to(
    tmp_path: Path,
) -> None:
    with running_target(seed=1) as first:
        port = first.port
        relay = Relay(("127.0.0.1", port))
        kv = Session(host=HOST, options=QUICK)
        device = kv.open_device(f"{through(relay, first)}?nsid=1")
        subsystem = kv.subsystem(through(relay, first))
        write_blocks(device, 0, b"\x33" * 4096, soon())
    try:
        with running_target(seed=2) as second:
            relay.target = ("127.0.0.1", second.port)
            wait_event(subsystem, EventKind.NAMESPACE_REPLACED)
            with pytest.raises(TransportError, match="gone, or another one"):
                write_blocks(device, 0, b"\x44" * 4096, soon())
            assert second.bdev(1).read(0, 4096) == bytes(4096)
    finally:
        kv.close()
        relay.close()


def test_loss_when_it_happens_then_one_line_is_logged(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    with Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        with caplog.at_level(logging.INFO, logger="kvdev.initiator"):
            net.relay.cut()
            wait_event(kv.subsystem(net.uri), EventKind.PATH_DOWN)
            net.relay.mend()
            assert len(read_blocks(device, 0, 1, soon())) == 4096
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("connection lost" in line for line in lines) == 1
    assert f"127.0.0.1:{net.relay.port}" in lines[0]


# ---- stopped, not dead ----


def test_target_when_stopped_for_twice_kato_then_late_writes_do_not_win(tmp_path: Path) -> None:
    """S-21: what sat in the sockets of a stopped target is executed when it goes on; the host has waited for it."""
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=WATCHFUL) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        for round_index in range(2):
            value = bytes([round_index + 1]) * 4096
            target.pause()
            timer = threading.Timer(2.2, target.resume)
            timer.start()
            write_blocks(device, 0, value, soon())
            later = bytes([0x80 + round_index]) * 4096
            write_blocks(device, 0, later, soon())
            timer.join()
            assert read_blocks(device, 0, 1, soon()).tobytes() == later


def test_target_when_never_there_then_first_connect_says_so_at_once() -> None:
    (port,) = free_ports(1)
    with (
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(TransportError, match="is the target listening"),
    ):
        kv.open_device(f"tcp://127.0.0.1:{port}/nqn.2024-01.io.kvdev:none?nsid=1", deadline=soon())


def test_read_when_deadline_ends_while_reconnecting_then_deadline_error(net: Net) -> None:
    with Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{net.uri}?nsid=1")
        net.relay.cut()
        with pytest.raises(DeadlineError):
            read_blocks(device, 0, 1, soon(0.5))
        net.relay.mend()
        assert len(read_blocks(device, 0, 1, soon())) == 4096
