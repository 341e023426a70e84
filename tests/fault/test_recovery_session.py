"""A session whose target dies, hangs, restarts or changes: what it tells its user, and what it goes on with."""

from __future__ import annotations

import dataclasses
import logging
import resource
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import NS_PER_MS, SYSTEM_CLOCK, Deadline
from kvdev.errors import ConnectionLostError, DeadlineError, TransportError, UncertainWriteError, UsageError
from kvdev.initiator.event import EventKind, HostEvent
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions, LostWrites
from kvdev.initiator.path import PathStage
from kvdev.initiator.subsystem import Subsystem
from kvdev.session import Session
from kvdev.target.model import Transport
from kvdev.testing.killable import KillableTarget, free_ports
from kvdev.testing.proxy import Relay
from kvdev.testing.target import RunningTarget, running_target

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    kato_ms=400,
    connect_timeout_s=1.0,
    admin_timeout_s=1.0,
    shutdown_timeout_s=0.3,
    reconnect_delay_s=0.3,
    ctrl_loss_tmo_s=30,
)
FAST_KEEP_ALIVE = Transport(kas=1, min_kato=100)


def soon(seconds: float = 15.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Descriptors and threads are as before when a test ends, whatever failed in it."""
    before, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threading.active_count() == threads


def wait_event(subsystem: Subsystem, kind: EventKind, *, seconds: float = 10) -> HostEvent:
    limit = soon(seconds)
    while (event := subsystem.take_event(deadline=limit)) is not None:
        if event.kind is kind:
            return event
    raise AssertionError(f"no event {kind.value}")


def through(relay: Relay, target: RunningTarget) -> str:
    return f"tcp://127.0.0.1:{relay.port}/{target.nqn}"


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
        for _ in range(3):
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
        assert (info.stage, info.loss_count, info.attempt_count) == (PathStage.LIVE, 3, 0)


def test_write_when_killed_under_it_then_held_for_the_rule_and_sent_again(tmp_path: Path) -> None:
    """Base 9.6.2: 2 x KATO after the last Keep Alive, then CQT, which our target reports as 100 ms."""
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        target.pause()
        results: list[float] = []

        def write() -> None:
            write_blocks(device, 0, b"\x11" * 4096, soon())
            results.append(time.monotonic())

        thread = threading.Thread(target=write)
        thread.start()
        threading.Event().wait(0.1)
        assert kv.queue.stats.in_flight_count == 1
        target.kill()
        lost = time.monotonic()
        target.start()
        started = time.monotonic()
        thread.join(15)
        # The last Keep Alive may be half of KATO old.
        assert results[0] - lost > 0.4
        assert results[0] - max(started, lost + 0.9) < 2
        assert kv.queue.stats.held == 1
        assert device.fence_ns <= SYSTEM_CLOCK.monotonic_ns()
        assert read_blocks(device, 0, 1, soon()).tobytes() == b"\x11" * 4096


def test_write_when_reporting_then_uncertain_error_and_the_fence_is_known(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, lost_writes=LostWrites.REPORT)
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        target.pause()
        timer = threading.Timer(0.2, target.kill)
        timer.start()
        with pytest.raises(UncertainWriteError, match="fate unknown"):
            write_blocks(device, 0, bytes(4096), soon())
        timer.join()
        wait_event(kv.subsystem(target.uri()), EventKind.PATH_DOWN)
        assert device.fence_ns > SYSTEM_CLOCK.monotonic_ns() + 100 * NS_PER_MS


def test_write_when_the_deadline_ends_while_held_then_uncertain(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, fence_wait_s=60)
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        target.pause()
        timer = threading.Timer(0.2, target.kill)
        timer.start()
        with pytest.raises(UncertainWriteError):
            write_blocks(device, 0, bytes(4096), soon(0.8))
        timer.join()
        target.start()
        assert len(read_blocks(device, 0, 1, soon())) == 4096


# ---- it stays away ----


def test_io_when_target_stays_away_then_fast_io_fail_and_ctrl_loss_bound_it(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, fast_io_fail_tmo_s=0.4, ctrl_loss_tmo_s=1.2)
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        subsystem = kv.subsystem(target.uri())
        target.kill()
        started = Deadline.after(0)
        with pytest.raises(ConnectionLostError, match="connection lost"):
            read_blocks(device, 0, 1, soon())
        assert 350 < started.elapsed_ms() < 900
        # From here on at once, until it is back.
        started = Deadline.after(0)
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        assert started.elapsed_ms() < 100
        ended = wait_event(subsystem, EventKind.PATH_ENDED)
        assert "ctrl_loss_tmo 1.2 s" in ended.text and "refused" in ended.text
        assert subsystem.is_ended
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        target.start()
        assert len(read_blocks(kv.open_device(f"{target.uri()}?nsid=1"), 0, 1, soon())) == 4096


def test_io_when_recovery_is_off_then_fails_at_once(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, ctrl_loss_tmo_s=0)
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        target.kill()
        started = Deadline.after(0)
        with pytest.raises(ConnectionLostError):
            read_blocks(device, 0, 1, soon())
        assert started.elapsed_ms() < 500


def test_close_when_target_is_gone_or_silent_then_bounded(tmp_path: Path) -> None:
    with KillableTarget(tmp_path) as target:
        for is_killed in (False, True):
            kv = Session(host=HOST, options=QUICK)
            kv.open_device(f"{target.uri()}?nsid=1")
            target.kill() if is_killed else target.pause()
            threading.Event().wait(0.6)  # connecting again, or waiting for a keep alive
            limit = soon(2.5)
            kv.close()
            assert not limit.is_expired
            if not is_killed:
                target.resume()


def test_reconnect_when_address_drops_packets_then_close_does_not_wait_for_it() -> None:
    """The relay accepts and says nothing: the attempt hangs in the ICResp."""
    with running_target(transport=FAST_KEEP_ALIVE) as target, Relay(("127.0.0.1", target.port)) as relay:
        options = dataclasses.replace(QUICK, connect_timeout_s=30.0)
        kv = Session(host=HOST, options=options)
        kv.open_device(f"{through(relay, target)}?nsid=1")
        relay.stall()
        wait_event(kv.subsystem(through(relay, target)), EventKind.PATH_DOWN)
        threading.Event().wait(0.2)
        limit = soon(2)
        kv.close()
        assert not limit.is_expired


def test_controllers_when_a_hundred_wait_for_a_dead_port_then_little_cpu_and_no_descriptors() -> None:
    """Under 2 % of a core, over the time in which the waits between attempts have grown to their limit."""
    count, seconds = 100, 3.0
    options = dataclasses.replace(QUICK, reconnect_delay_s=10.0, ctrl_loss_tmo_s=600, kato_ms=60_000)
    with running_target(transport=Transport(max_queue_depth=16)) as target:
        kv = Session(host=HOST, options=options)
        nothing = len(list(Path("/proc/self/fd").iterdir()))
        subsystems = []
        for index in range(count):
            name = f"nqn.2024-01.io.kvdev:many{index}"
            target.add_subsystem(name)
            subsystems.append(kv.subsystem(f"tcp://127.0.0.1:{target.port}/{name}"))
    # The target is gone: its port refuses.
    try:
        pause = threading.Event()
        limit = soon(20)
        while not limit.is_expired and any(each.path_infos[0].attempt_count < 6 for each in subsystems):
            pause.wait(0.1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        pause.wait(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
        assert spent_s / seconds < 0.02, f"{100 * spent_s / seconds:.2f} % of a core"
        assert len(list(Path("/proc/self/fd").iterdir())) <= nothing + 8
        limit = soon(10)
    finally:
        kv.close()
    assert not limit.is_expired


# ---- keep alive ----


def test_keep_alive_when_its_answer_is_lost_then_noticed_within_kato_and_reconnected() -> None:
    with (
        running_target(transport=FAST_KEEP_ALIVE) as target,
        Relay(("127.0.0.1", target.port)) as relay,
        Session(host=HOST, options=QUICK) as kv,
    ):
        device = kv.open_device(f"{through(relay, target)}?nsid=1")
        subsystem = kv.subsystem(through(relay, target))
        relay.stall()
        started = Deadline.after(0)
        event = wait_event(subsystem, EventKind.PATH_DOWN)
        # Sent every KATO / 2, given up after KATO.
        assert 350 < started.elapsed_ms() < 900
        assert "keep alive" in event.text
        relay.mend()
        wait_event(subsystem, EventKind.PATH_UP)
        assert len(read_blocks(device, 0, 1, soon())) == 4096


def test_command_when_over_its_time_limit_then_controller_is_reset_and_the_command_retried() -> None:
    """The I/O connection hangs while the admin one works: CC.EN is cleared, which is a fence."""
    options = dataclasses.replace(QUICK, command_timeout_s=0.3, kato_ms=5000)
    with (
        running_target(transport=FAST_KEEP_ALIVE) as target,
        Relay(("127.0.0.1", target.port)) as relay,
        Session(host=HOST, options=options) as kv,
    ):
        device = kv.open_device(f"{through(relay, target)}?nsid=1")
        subsystem = kv.subsystem(through(relay, target))
        close = relay.strand()  # the I/O queue pair's
        try:
            started = Deadline.after(0)
            write_blocks(device, 0, b"\x22" * 4096, soon())
            assert 300 < started.elapsed_ms() < 1500, "not 2 x KATO"
            event = wait_event(subsystem, EventKind.PATH_DOWN)
            assert "command 0x01" in event.text
            assert read_blocks(device, 0, 1, soon()).tobytes() == b"\x22" * 4096
        finally:
            close()


# ---- what changes while we look ----


def test_namespace_when_grown_shrunk_replaced_or_removed_then_told_and_acted_on(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, kato_ms=2000)
    with (
        running_target(namespace_count=1, transport=FAST_KEEP_ALIVE) as target,
        Session(host=HOST, options=options) as kv,
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
                write_blocks(device, 0, b"\x44" * 4096, soon(2))
            assert second.bdev(1).read(0, 4096) == bytes(4096)
    finally:
        kv.close()
        relay.close()


def test_loss_when_it_happens_then_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        running_target(transport=FAST_KEEP_ALIVE) as target,
        Relay(("127.0.0.1", target.port)) as relay,
        Session(host=HOST, options=QUICK) as kv,
    ):
        device = kv.open_device(f"{through(relay, target)}?nsid=1")
        with caplog.at_level(logging.INFO, logger="kvdev.initiator"):
            relay.cut()
            wait_event(kv.subsystem(through(relay, target)), EventKind.PATH_DOWN)
            relay.mend()
            assert len(read_blocks(device, 0, 1, soon())) == 4096
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("connection lost" in line for line in lines) == 1
    assert f"127.0.0.1:{relay.port}" in lines[0]


# ---- stopped, not dead ----


def test_target_when_stopped_for_twice_kato_then_late_writes_do_not_win(tmp_path: Path) -> None:
    """S-21: what sat in the sockets of a stopped target is executed when it goes on; the host has waited for it."""
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        for round_index in range(3):
            value = bytes([round_index + 1]) * 4096
            target.pause()
            timer = threading.Timer(1.0, target.resume)
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
        kv.open_device(f"tcp://127.0.0.1:{port}/nqn.2024-01.io.kvdev:none?nsid=1", deadline=soon(5))


def test_read_when_deadline_ends_while_reconnecting_then_deadline_error(tmp_path: Path) -> None:
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        target.kill()
        started = Deadline.after(0)
        with pytest.raises((DeadlineError, ConnectionLostError)):
            read_blocks(device, 0, 1, soon(0.5))
        assert started.elapsed_ms() < 1000
        target.start()
        assert len(read_blocks(device, 0, 1, soon())) == 4096
