"""Background pollers: many threads on one queue, data verified, and every way in which it may end."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.channel_device import ChannelDevice
from kvdev.block.device import read_blocks, run_batch, transfer_ios, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import QueueFullError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.native.io import IO_DTYPE, OPCODE_READ, OPCODE_WRITE, address_of
from kvdev.native.poller import BackgroundPoller, Channel
from kvdev.session import Session
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.killable import KillableTarget
from kvdev.testing.peer import MemoryScript, PeerConnection, ScriptedPeer
from kvdev.testing.recovery import WAIT_S, nothing_left_over, soon, until

BLOCK = 4096
IS_LONG = bool(os.environ.get("KVDEV_LONG"))
HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    kato_ms=4000, connect_timeout_s=20.0, admin_timeout_s=20.0, shutdown_timeout_s=0.3, reconnect_delay_s=0.3
)
REFUSED_OPCODE = 2  # as in csrc/queue.h
REFUSED_RANGE = 4


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with nothing_left_over():
        yield


def silent(connection: PeerConnection) -> None:
    """Takes commands and never answers."""
    connection.accept_ic()
    connection.wait_closed()


def command(host: PeerHost, opcode: int, buffer: GuardedBuffer, *, slba: int = 0, tag: int = 0) -> Any:
    io = np.zeros(1, dtype=IO_DTYPE)
    io["tag"], io["opcode"], io["slba"] = tag, opcode, slba
    io["lba_count"] = len(buffer.array) // BLOCK
    io["byte_count"], io["buf_addr"] = len(buffer.array), buffer.address
    io["device_index"] = host.device_index
    return io


class Workers:
    """Threads that run one function, and what they failed with."""

    def __init__(self, count: int, work: Any) -> None:
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work, index)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Any, index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a worker does not end"
        if self.failures:
            raise self.failures[0]


# ---- one poller, many threads ----


def test_channels_when_many_threads_submit_then_each_gets_its_own_completions_and_data() -> None:
    memory = bytearray(4 << 20)
    turns, thread_count, area = (200, 6, 64) if IS_LONG else (12, 6, 64)
    with ScriptedPeer(MemoryScript(memory)) as peer, PeerHost(peer) as host:
        with BackgroundPoller(host.queue, ring_count=64) as poller:

            def work(index: int) -> None:
                rng = np.random.default_rng(index)
                with poller.channel(capacity_count=16) as channel:
                    for turn in range(turns):
                        sizes = rng.integers(1, 5, 4) * BLOCK
                        slbas = index * area + np.arange(4) * 4
                        sources = [GuardedBuffer(int(size)) for size in sizes]
                        targets = [GuardedBuffer(int(size)) for size in sizes]
                        for buffers, opcode in ((sources, OPCODE_WRITE), (targets, OPCODE_READ)):
                            for each, (buffer, slba) in enumerate(zip(buffers, slbas, strict=True)):
                                if opcode == OPCODE_WRITE:
                                    buffer.array[:] = rng.integers(0, 256, len(buffer.array), dtype=np.uint8)
                                tag = index << 32 | turn << 8 | each
                                channel.submit(command(host, opcode, buffer, slba=int(slba), tag=tag))
                            done = channel.poll(min_count=4, deadline=soon())
                            assert not done["error"].any()
                            assert sorted(done["tag"]) == [
                                index << 32 | turn << 8 | each for each in range(4)
                            ]
                        for source, target in zip(sources, targets, strict=True):
                            target.check_guards()
                            assert (source.array == target.array).all()

            Workers(thread_count, work).join()
            assert poller.stats.taken == 2 * 4 * turns * thread_count
        assert host.queue.outstanding_count == 0
        # The queue is its caller's again.
        buffer = GuardedBuffer(BLOCK)
        assert host.run(OPCODE_READ, buffer)["error"] == 0


def test_one_channel_when_several_threads_submit_and_one_polls_then_every_command_completes_once() -> None:
    per_thread = 400 if IS_LONG else 40
    with (
        ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer,
        PeerHost(peer) as host,
        BackgroundPoller(host.queue, ring_count=32) as poller,
        poller.channel(capacity_count=24) as channel,
    ):
        buffers = [GuardedBuffer(BLOCK) for _ in range(4)]

        def work(index: int) -> None:
            pause = threading.Event()
            for number in range(per_thread):
                io = command(host, OPCODE_READ, buffers[index], slba=index, tag=index * per_thread + number)
                while True:
                    try:
                        channel.submit(io)
                        break
                    except QueueFullError:
                        pause.wait(0.001)

        workers = Workers(4, work)
        tags: list[int] = []
        limit = soon()
        while len(tags) < 4 * per_thread:
            done = channel.poll(min_count=1, deadline=Deadline.after(0.05))
            assert not done["error"].any() and not limit.is_expired
            tags += [int(tag) for tag in done["tag"]]
        workers.join()
        assert sorted(tags) == list(range(4 * per_thread))


def test_submit_when_full_then_none_is_taken_and_malformed_commands_complete_with_the_reason() -> None:
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer, PeerHost(peer, block_count=256) as host:
        buffer = GuardedBuffer(BLOCK)
        with (
            BackgroundPoller(host.queue, ring_count=8) as poller,
            poller.channel(capacity_count=8) as channel,
        ):
            with pytest.raises(QueueFullError, match="room for 9"):
                channel.submit(np.repeat(command(host, OPCODE_READ, buffer), 9))
            assert channel.outstanding_count == 0
            ios = np.repeat(command(host, OPCODE_READ, buffer), 3)
            ios["tag"] = [1, 2, 3]
            ios["opcode"][1] = 0x77
            ios["slba"][2] = 256
            channel.submit(ios)
            done = channel.poll(min_count=3, deadline=soon())
            by_tag = {int(row["tag"]): row for row in done}
            assert int(by_tag[1]["error"]) == 0
            assert (int(by_tag[2]["error"]), int(by_tag[2]["result"])) == (-errno.EINVAL, REFUSED_OPCODE)
            assert (int(by_tag[3]["error"]), int(by_tag[3]["result"])) == (-errno.EINVAL, REFUSED_RANGE)
            with pytest.raises(UsageError, match="IO_DTYPE"):
                channel.submit(np.zeros(1, dtype=np.uint64))


# ---- waiting without a thread ----


def test_fileno_when_completions_are_there_then_readable_until_all_are_taken() -> None:
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer, PeerHost(peer) as host:
        buffer = GuardedBuffer(BLOCK)
        with BackgroundPoller(host.queue) as poller, poller.channel() as channel:
            waiter = select.poll()
            waiter.register(channel.fileno(), select.POLLIN)
            assert waiter.poll(0) == []
            for turn in range(20):
                channel.submit(np.repeat(command(host, OPCODE_READ, buffer, tag=turn), 2))
                assert waiter.poll(WAIT_S * 1000)
                until(lambda: host.queue.stats.in_flight_count == 0, "both have completed")
                until(lambda: host.queue.stats.done_count == 0, "both are at the channel")
                assert len(channel.poll(min_count=0, deadline=soon(), max_count=1)) == 1
                assert waiter.poll(WAIT_S * 1000), "one is left"
                assert len(channel.poll(min_count=1, deadline=soon())) == 1
                assert waiter.poll(0) == []


def test_event_loop_when_it_watches_the_channel_then_commands_are_awaited() -> None:
    async def go(host: PeerHost, channel: Channel) -> list[int]:
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[int]] = {}

        def arrived() -> None:
            for row in channel.poll(min_count=0, deadline=soon()):
                futures.pop(int(row["tag"])).set_result(int(row["error"]))

        loop.add_reader(channel.fileno(), arrived)
        buffers = [GuardedBuffer(BLOCK) for _ in range(8)]

        async def read(tag: int) -> int:
            future: asyncio.Future[int] = loop.create_future()
            futures[tag] = future
            channel.submit(command(host, OPCODE_READ, buffers[tag % 8], slba=tag % 8, tag=tag))
            return await asyncio.wait_for(future, WAIT_S)

        errors = []
        for start in range(0, 40, 8):
            errors += await asyncio.gather(*(read(tag) for tag in range(start, start + 8)))
        loop.remove_reader(channel.fileno())
        return errors

    with (
        ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer,
        PeerHost(peer) as host,
        BackgroundPoller(host.queue) as poller,
        poller.channel() as channel,
    ):
        assert asyncio.run(go(host, channel)) == [0] * 40


# ---- closing ----


def has_taken(poller: BackgroundPoller, count: int) -> bool:
    return poller.stats.taken >= count


def test_close_when_commands_are_in_flight_then_given_up_at_the_deadline_and_memory_is_left_alone() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host:
        buffers = [GuardedBuffer(BLOCK) for _ in range(40)]  # more than the queue pair takes
        poller = BackgroundPoller(host.queue)
        channel = poller.channel()
        for index, buffer in enumerate(buffers):
            channel.submit(command(host, OPCODE_READ, buffer, tag=index))
        waited: list[int] = []
        waiter = threading.Thread(
            target=lambda: waited.append(len(channel.poll(min_count=40, deadline=soon()))), daemon=True
        )
        waiter.start()
        until(lambda: host.queue.stats.in_flight_count > 0, "some are sent")
        poller.close(deadline=Deadline.after(0.05))
        waiter.join(WAIT_S)
        assert waited == [40], "every command has completed, and the waiter got them"
        assert host.qpair.info.state == "dead"
        assert all(buffer.is_untouched for buffer in buffers)
        with pytest.raises(UsageError, match="closed"):
            channel.submit(command(host, OPCODE_READ, buffers[0]))
        channel.close()
        with pytest.raises(UsageError, match="closed"):
            poller.channel()


def test_close_of_a_channel_when_commands_are_in_flight_then_they_end_first() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host, BackgroundPoller(host.queue) as poller:
        buffer = GuardedBuffer(BLOCK)
        channel = poller.channel()
        channel.submit(command(host, OPCODE_READ, buffer))
        channel.close(deadline=Deadline.after(0.05))
        assert channel.is_closed and buffer.is_untouched
        assert host.queue.outstanding_count == 0
        channel.close()


def test_channel_when_forgotten_with_commands_in_flight_then_they_are_given_up() -> None:
    with ScriptedPeer(silent) as peer, PeerHost(peer) as host, BackgroundPoller(host.queue) as poller:
        buffer = GuardedBuffer(BLOCK)
        channel: Channel | None = poller.channel()
        assert channel is not None
        channel.submit(command(host, OPCODE_READ, buffer))
        channel = None
        assert host.queue.outstanding_count == 0 and buffer.is_untouched


def test_close_of_the_queue_when_a_poller_drives_it_then_the_poller_ends_first() -> None:
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer, PeerHost(peer) as host:
        buffer = GuardedBuffer(BLOCK)
        poller = BackgroundPoller(host.queue)
        channel = poller.channel()
        channel.submit(command(host, OPCODE_READ, buffer))
        host.queue.close()
        assert poller.is_closed
        assert len(channel.poll(min_count=1, deadline=soon())) == 1
        channel.close()


def test_threads_when_the_poller_closes_under_them_then_every_command_completes() -> None:
    """Closing races with submitting: what was accepted completes, what was not raises."""
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer:
        for turn in range(20 if IS_LONG else 4):
            with PeerHost(peer) as host:
                poller = BackgroundPoller(host.queue, ring_count=16)
                begun = threading.Barrier(5)

                def work(
                    index: int,
                    host: PeerHost = host,
                    poller: BackgroundPoller = poller,
                    begun: threading.Barrier = begun,
                ) -> None:
                    buffer = GuardedBuffer(BLOCK)
                    with poller.channel(capacity_count=8) as channel:
                        begun.wait(WAIT_S)
                        accepted = completed = 0
                        while not channel.is_closed:
                            try:
                                channel.submit(command(host, OPCODE_READ, buffer, slba=index))
                                accepted += 1
                            except QueueFullError:
                                pass
                            except UsageError:
                                break
                            completed += len(channel.poll(min_count=0, deadline=soon()))
                        while completed < accepted:
                            got = len(channel.poll(min_count=1, deadline=soon()))
                            assert got, "an accepted command does not complete"
                            completed += got
                        assert channel.outstanding_count == 0

                workers = Workers(4, work)
                begun.wait(WAIT_S)
                until(functools.partial(has_taken, poller, turn * 5), "some were taken")
                poller.close(deadline=soon())
                workers.join()


# ---- misuse ----


def test_queue_when_a_poller_drives_it_then_callers_are_sent_to_channels() -> None:
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer, PeerHost(peer) as host:
        buffer = GuardedBuffer(BLOCK)
        with BackgroundPoller(host.queue) as poller:
            with pytest.raises(UsageError, match="use one of the poller's channels"):
                host.submit(OPCODE_READ, buffer)
            with pytest.raises(UsageError, match="use one of the poller's channels"):
                host.poll(1)
            with pytest.raises(UsageError, match="share its channels"):
                BackgroundPoller(host.queue)
            assert not poller.is_closed
        host.submit(OPCODE_READ, buffer)
        with pytest.raises(UsageError, match="nothing outstanding, got one in use with 1 commands"):
            BackgroundPoller(host.queue)
        assert len(host.poll(1)) == 1
        with pytest.raises(UsageError, match="core: expected one that this process may use"):
            BackgroundPoller(host.queue, core=4095)
        with pytest.raises(UsageError, match="ring_count: expected 1 to 65536, got 0"):
            BackgroundPoller(host.queue, ring_count=0)
        core = min(os.sched_getaffinity(0))
        with BackgroundPoller(host.queue, core=core) as poller:
            with pytest.raises(UsageError, match="the poller's ring_count, got 4097"):
                poller.channel(capacity_count=4097)
            with poller.channel() as channel:
                channel.submit(command(host, OPCODE_READ, buffer))
                assert not channel.poll(min_count=1, deadline=soon())["error"].any()


def test_fork_when_a_poller_runs_then_the_child_is_refused_and_may_end() -> None:
    with ScriptedPeer(MemoryScript(bytearray(1 << 20))) as peer, PeerHost(peer) as host:
        buffer = GuardedBuffer(BLOCK)
        with BackgroundPoller(host.queue) as poller, poller.channel() as channel:
            channel.submit(command(host, OPCODE_READ, buffer))
            assert len(channel.poll(min_count=1, deadline=soon())) == 1
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    refused = 0
                    misuses: list[Callable[[], object]] = [
                        lambda: channel.submit(command(host, OPCODE_READ, buffer)),
                        lambda: channel.poll(min_count=0, deadline=soon()),
                        poller.abandon,
                    ]
                    for misuse in misuses:
                        try:
                            misuse()
                        except UsageError as error:
                            refused += "start a poller after forking" in str(error)
                    channel.close()
                    poller.close()
                    code = 0 if refused == 3 else 2
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            # The parent goes on.
            channel.submit(command(host, OPCODE_READ, buffer))
            assert not channel.poll(min_count=1, deadline=soon())["error"].any()


# ---- with a session: recovery, and what is done while the poller stands aside ----


def test_io_when_target_is_killed_under_load_then_recovery_works_through_the_poller(tmp_path: Path) -> None:
    turns = 30 if IS_LONG else 4
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        poller = kv.start_poller()
        begun = threading.Barrier(4)

        def work(index: int) -> None:
            rng = np.random.default_rng(index)
            with poller.channel() as channel:
                view = ChannelDevice(device, channel)
                first = index * 256
                begun.wait(WAIT_S)
                for _ in range(turns):
                    data = rng.integers(0, 256, 64 * BLOCK, dtype=np.uint8)
                    ios = transfer_ios(view, OPCODE_WRITE, first, address_of(data), data.nbytes)
                    assert not run_batch(channel, ios, soon())["error"].any()
                    assert (read_blocks(view, first, 64, soon()) == data).all()

        workers = Workers(3, work)
        begun.wait(WAIT_S)
        for _ in range(2):
            target.kill()
            target.start()
        workers.join()
        assert kv.subsystem(target.uri()).path_infos[0].loss_count >= 1
        with poller.channel() as channel:
            view = ChannelDevice(device, channel)
            write_blocks(view, 0, bytes(BLOCK), soon())
        # Devices come and go while it runs.
        device.close()
        again = kv.open_device(f"{target.uri()}?nsid=1")
        with poller.channel() as channel:
            assert not read_blocks(ChannelDevice(again, channel), 0, 1, soon()).any()


def test_compare_and_write_when_a_poller_drives_the_queue_then_it_stands_aside(tmp_path: Path) -> None:
    with KillableTarget(tmp_path) as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri()}?nsid=1")
        poller = kv.start_poller()
        begun, stop = threading.Barrier(2), threading.Event()

        def load(_: int) -> None:
            with poller.channel() as channel:
                view = ChannelDevice(device, channel)
                begun.wait(WAIT_S)
                while not stop.is_set():
                    read_blocks(view, 512, 8, soon())

        workers = Workers(1, load)
        begun.wait(WAIT_S)
        old = bytes(BLOCK)
        for turn in range(1, 6):
            new = bytes([turn]) * BLOCK
            assert device.compare_and_write(0, old, new, soon())
            assert not device.compare_and_write(0, old, new, soon())
            old = new
        stop.set()
        workers.join()


def test_example_of_the_documentation_when_run_then_it_works(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "pollers.md").read_text()
    example = text.split("```python\n", 1)[1].split("```", 1)[0]
    with KillableTarget(tmp_path) as target:
        exec(example.replace("tcp://HOST:PORT/NQN", target.uri()), {})
