"""What the queue does with commands whose connection is lost, against scripted controllers."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvdev.clock import NS_PER_MS, SYSTEM_CLOCK, Deadline
from kvdev.errors import UncertainWriteError, UsageError
from kvdev.native.io import (
    EUNCERTAIN,
    IO_DTYPE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
)
from kvdev.native.queue import HostQpair, HostQueue, PathPolicy, PathState, Recovery
from kvdev.testing.host import GuardedBuffer
from kvdev.testing.peer import MemoryScript, PduFromHost, PeerConnection, ScriptedPeer

BLOCK = 4096


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


class Rig:
    """A queue with one multipath namespace, and peers that are its controllers."""

    def __init__(
        self, stack: ExitStack, *, queue_options: dict[str, Any] | None = None, **recovery: Any
    ) -> None:
        self.stack = stack
        self.queue = HostQueue(**(queue_options or {}))
        self.qpairs: list[HostQpair] = []
        self.buffers: list[GuardedBuffer] = []
        """All that were submitted: a lost command keeps its buffer's address for as long as it is held."""
        stack.callback(self._close)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.queue.set_notice(self.fd)
        self.device = self.queue.add_multipath(
            nsid=1, block_size_bytes=BLOCK, block_count=1024, recovery=Recovery(**recovery)
        )

    def _close(self) -> None:
        self.queue.set_notice(-1)
        os.close(self.fd)
        self.queue.close()
        for qpair in self.qpairs:
            qpair.close()
        for buffer in self.buffers:
            buffer.check_guards()

    def peer(self, script: Callable[[PeerConnection], None]) -> ScriptedPeer:
        return self.stack.enter_context(ScriptedPeer(script))

    def controller(self, peer: ScriptedPeer, **options: Any) -> int:
        index = self.queue.add_controller()
        self.up(index, peer, **options)
        return index

    def up(
        self,
        index: int,
        peer: ScriptedPeer,
        *,
        state: PathState = PathState.OPTIMIZED,
        count: int = 1,
        has_ana: bool = False,
        retry_delays_ns: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        qpairs = []
        for qid in range(1, count + 1):
            # A deallocate's range goes with the command, all other data does not.
            qpair = HostQpair(qid=qid, queue_size=32, in_capsule_size_bytes=16, trid=f"peer {index}")
            self.qpairs.append(qpair)
            qpair.connect(peer.address, peer.port, deadline=soon())
            qpairs.append(qpair)
        self.queue.raise_controller(
            index,
            qpairs,
            made_ns=SYSTEM_CLOCK.monotonic_ns(),
            has_ana=has_ana,
            retry_delays_ns=retry_delays_ns,
        )
        self.queue.set_path(self.device, index, state)

    def down(self, index: int, *, fence_ms: float | None = 0) -> int:
        fence_ns = None if fence_ms is None else SYSTEM_CLOCK.monotonic_ns() + int(fence_ms * NS_PER_MS)
        self.queue.drop_controller(index, fence_ns=fence_ns)
        return fence_ns or 0

    def submit(
        self, opcode: int, buffer: GuardedBuffer | None = None, *, slba: int = 0, tag: int = 0
    ) -> None:
        if buffer is not None:
            self.buffers.append(buffer)
        io = np.zeros(1, dtype=IO_DTYPE)
        size = 0 if buffer is None else len(buffer.array)
        io["tag"] = tag
        io["opcode"] = opcode
        io["slba"] = slba
        io["lba_count"] = 0 if opcode == OPCODE_FLUSH else max(1, size // BLOCK)
        io["byte_count"] = size
        io["buf_addr"] = 0 if buffer is None else buffer.address
        io["device_index"] = self.device
        self.queue.submit(io)

    def poll(self, count: int, *, seconds: float = 60.0) -> Any:
        return self.queue.poll(min_count=count, deadline=soon(seconds))

    def run(self, opcode: int, buffer: GuardedBuffer | None = None, **options: Any) -> Any:
        self.submit(opcode, buffer, **options)
        done = self.poll(1)
        assert len(done) == 1, "no completion in time"
        return done[0]

    def poll_until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds; nothing may complete meanwhile."""
        limit = soon()
        while not condition():
            assert not limit.is_expired, "it did not come to pass"
            assert len(self.poll(1, seconds=0.01)) == 0

    def lose(self, index: int) -> None:
        """Poll until a connection of this controller is found dead; nothing may complete meanwhile."""
        self.poll_until(lambda: self.queue.controller_info(index).has_fallen)

    def wait_notice(self) -> None:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        assert poller.poll(60_000), "no notice came"
        os.eventfd_read(self.fd)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def dying(connection: PeerConnection) -> None:
    """Takes one command and closes."""
    connection.accept_ic()
    connection.receive_command()
    connection.close()


def answering(
    statuses: list[int], seen: list[PduFromHost], memory: bytearray
) -> Callable[[PeerConnection], None]:
    """Answers commands with these statuses in turn, then as it should."""
    lock = threading.Lock()
    good = MemoryScript(memory)

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        while True:
            command = connection.receive_command()
            with lock:
                seen.append(command)
                status = statuses.pop(0) if statuses else 0
            if status:
                connection.send_response(command, status=status)
            else:
                good.serve(connection, command)

    return script


# ---- losses ----


def test_read_when_connection_is_lost_then_sent_again_on_the_next_association(stack: ExitStack) -> None:
    rig = Rig(stack)
    memory = bytearray(os.urandom(1024 * BLOCK))
    good, bad = rig.peer(MemoryScript(memory)), rig.peer(dying)
    index = rig.controller(bad)
    buffer = GuardedBuffer(8 * BLOCK)
    rig.submit(OPCODE_READ, buffer, slba=3)
    rig.lose(index)
    rig.wait_notice()
    rig.down(index)
    assert buffer.is_untouched
    rig.up(index, good)
    done = rig.poll(1)
    assert list(done["error"]) == [0]
    buffer.check_guards()
    assert buffer.array.tobytes() == bytes(memory[3 * BLOCK : 11 * BLOCK])
    assert rig.queue.stats.requeued == 1


def test_poll_when_asleep_then_goes_on_by_itself_once_there_is_a_path(stack: ExitStack) -> None:
    rig = Rig(stack)
    good = rig.peer(MemoryScript(bytearray(1024 * BLOCK)))
    index = rig.queue.add_controller()
    timer = threading.Timer(0.15, rig.up, (index, good))
    timer.start()
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == 0
    assert rig.queue.stats.sleeps < 50
    timer.join()


@pytest.mark.parametrize("opcode", [OPCODE_WRITE, OPCODE_WRITE_ZEROES, OPCODE_DSM])
def test_write_when_lost_after_sending_then_waits_for_the_fence_and_is_sent_again(
    stack: ExitStack, opcode: int
) -> None:
    rig = Rig(stack)
    seen: list[PduFromHost] = []
    memory = bytearray(b"\xff" * (64 * BLOCK))
    good, bad = rig.peer(answering([], seen, memory)), rig.peer(dying)
    index = rig.controller(bad)
    buffer = GuardedBuffer(2 * BLOCK) if opcode == OPCODE_WRITE else None
    rig.submit(opcode, buffer, slba=1)
    rig.lose(index)
    rig.down(index, fence_ms=None)
    assert rig.queue.controller_info(index).held_count == 1
    # Meanwhile the others go on.
    other = rig.controller(good)
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK), slba=40)["error"] == 0
    assert rig.queue.controller_info(index).held_count == 1
    fence_ns = rig.down(index, fence_ms=150)
    done = rig.poll(1)
    assert list(done["error"]) == [0]
    assert int(done["complete_ns"][0]) >= fence_ns
    assert rig.queue.controller_info(other).is_up
    assert [command.opcode for command in seen] == [OPCODE_READ, opcode]
    expected = b"\x5a" if opcode == OPCODE_WRITE else b"\0"
    assert bytes(memory[BLOCK : 2 * BLOCK]) == expected * BLOCK
    assert memory[0] == memory[3 * BLOCK] == 0xFF


def test_write_when_closed_after_one_of_three_h2c_data_then_delayed_retry_of_the_whole(
    stack: ExitStack,
) -> None:
    """S-01: no part of it counts, and nobody hears of it before the fence."""

    def closes_in_the_middle(connection: PeerConnection) -> None:
        connection.accept_ic(maxh2cdata=BLOCK)
        command = connection.receive_command()
        connection.send(connection.pack_r2t(command.cid, 1, 0, 3 * BLOCK))
        assert connection.receive_pdu().datal == BLOCK
        connection.close()

    rig = Rig(stack)
    memory, seen = bytearray(b"\xff" * (64 * BLOCK)), list[PduFromHost]()
    index = rig.controller(rig.peer(closes_in_the_middle))
    buffer = GuardedBuffer(3 * BLOCK)
    rig.submit(OPCODE_WRITE, buffer, slba=5)
    rig.lose(index)
    rig.down(index, fence_ms=None)
    rig.controller(rig.peer(answering([], seen, memory)))
    assert len(rig.poll(1, seconds=0.05)) == 0 and not seen
    fence_ns = rig.down(index, fence_ms=50)
    done = rig.poll(1)
    assert list(done["error"]) == [0] and int(done["complete_ns"][0]) >= fence_ns
    assert memory[5 * BLOCK : 8 * BLOCK] == buffer.array.tobytes() and buffer.is_untouched
    assert memory[8 * BLOCK] == memory[5 * BLOCK - 1] == 0xFF


def test_write_when_fence_is_not_known_yet_then_held_until_it_is(stack: ExitStack) -> None:
    rig = Rig(stack)
    memory = bytearray(64 * BLOCK)
    good, bad = rig.peer(MemoryScript(memory)), rig.peer(dying)
    index = rig.controller(bad)
    rig.submit(OPCODE_WRITE, GuardedBuffer(BLOCK))
    rig.lose(index)
    rig.down(index, fence_ms=None)
    rig.up(index, good)
    assert len(rig.poll(1, seconds=0.1)) == 0
    rig.down(index, fence_ms=0)
    rig.up(index, good)
    assert list(rig.poll(1)["error"]) == [0]


def test_write_when_never_sent_then_no_fence_holds_it(stack: ExitStack) -> None:
    """More than the queue size: what is still on this side goes on at once, only what was sent waits."""
    rig = Rig(stack, queue_options={"window_size_bytes": 4096})
    memory = bytearray(64 * BLOCK)
    good, bad = rig.peer(MemoryScript(memory)), rig.peer(dying)
    index = rig.controller(bad)
    buffers = [GuardedBuffer(BLOCK) for _ in range(8)]
    for tag, buffer in enumerate(buffers):
        rig.submit(OPCODE_WRITE, buffer, slba=tag, tag=tag)
    rig.lose(index)
    rig.down(index, fence_ms=None)
    rig.controller(good)
    assert sorted(rig.poll(7)["tag"]) == list(range(1, 8))
    rig.down(index, fence_ms=0)
    assert list(rig.poll(1)["tag"]) == [0]
    for buffer in buffers:
        buffer.check_guards()


def test_write_when_reporting_then_uncertain_at_once(stack: ExitStack) -> None:
    rig = Rig(stack, is_uncertain_reported=True)
    rig.controller(rig.peer(dying))
    buffer = GuardedBuffer(BLOCK)
    done = rig.run(OPCODE_WRITE, buffer)
    assert done["error"] == -EUNCERTAIN
    assert done["send_ns"] != 0
    assert buffer.is_untouched
    assert rig.queue.stats.uncertain == 1


def test_abandon_when_writes_are_held_then_uncertain_and_the_rest_cancelled(stack: ExitStack) -> None:
    rig = Rig(stack)
    index = rig.controller(rig.peer(dying))
    rig.submit(OPCODE_WRITE, GuardedBuffer(BLOCK), tag=1)
    rig.lose(index)
    rig.down(index, fence_ms=None)
    rig.submit(OPCODE_WRITE, GuardedBuffer(BLOCK), tag=2)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK), tag=3)
    rig.queue.abandon()
    done = {int(row["tag"]): row for row in rig.poll(3)}
    assert done[1]["error"] == -EUNCERTAIN and done[1]["send_ns"] != 0
    assert done[2]["error"] == done[3]["error"] == -errno.ECANCELED
    assert done[2]["send_ns"] == 0


def test_namespace_when_no_path_for_too_long_then_fails_and_recovers(stack: ExitStack) -> None:
    rig = Rig(stack, fail_after_s=0.3)
    memory = bytearray(64 * BLOCK)
    index = rig.controller(rig.peer(dying))
    rig.submit(OPCODE_WRITE, GuardedBuffer(BLOCK), tag=1)
    started = Deadline.after(0)
    rig.lose(index)
    rig.down(index, fence_ms=None)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK), tag=2)
    done = {int(row["tag"]): int(row["error"]) for row in rig.poll(2)}
    assert started.elapsed_ms() >= 300
    assert done == {1: -EUNCERTAIN, 2: -errno.ENOTCONN}
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == -errno.ENOTCONN
    rig.up(index, rig.peer(MemoryScript(memory)))
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == 0


def test_command_when_every_connection_dies_under_it_then_bounded(stack: ExitStack) -> None:
    rig = Rig(stack)
    bad = rig.peer(dying)
    index = rig.queue.add_controller()
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK))
    losses = 0
    done = rig.poll(0)
    while not len(done) and losses < 40:
        rig.up(index, bad)
        limit = soon()
        while not len(done) and not rig.queue.controller_info(index).has_fallen:
            assert not limit.is_expired
            done = rig.poll(1, seconds=0.01)
        rig.down(index)
        losses += 1
    assert list(done["error"]) == [-errno.ENOTCONN]
    assert losses == 33


def test_command_when_over_its_time_limit_then_retried_elsewhere_and_counted(stack: ExitStack) -> None:
    rig = Rig(stack, retry_count=1, queue_options={"command_timeout_s": 0.1})
    released = threading.Event()

    def silent(connection: PeerConnection) -> None:
        connection.accept_ic()
        connection.receive_command()
        released.wait(120)

    bad = rig.peer(silent)
    stack.callback(released.set)
    index = rig.controller(bad)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK))
    rig.lose(index)
    rig.down(index)
    rig.up(index, bad)
    assert list(rig.poll(1)["error"]) == [-errno.ETIMEDOUT]


def test_late_data_when_connection_is_given_up_then_the_buffer_stays_untouched(stack: ExitStack) -> None:
    rig = Rig(stack)
    go, sent = threading.Event(), threading.Event()

    def late(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        go.wait(120)
        try:
            connection.send_read(command, bytes(16 * BLOCK))
        finally:
            sent.set()

    index = rig.controller(rig.peer(late))
    buffer = GuardedBuffer(16 * BLOCK)
    rig.submit(OPCODE_READ, buffer)
    rig.poll(1, seconds=0.05)
    rig.down(index)
    rig.queue.abandon()
    assert list(rig.poll(1)["error"]) == [-errno.ECANCELED]
    go.set()
    assert sent.wait(60)
    rig.poll(0)
    assert buffer.is_untouched


# ---- statuses ----


@pytest.mark.parametrize(
    ("status", "is_retried"),
    [
        (0x005, True),
        (0x008, True),
        (0x021, True),
        (0x022, True),
        (0x024, True),
        (0x082, True),
        (0x300, True),
        (0x360, True),
        (0x370, True),
        (0x371, True),
        # Path errors of a controller without ANA mean nothing about ANA: retried, never stuck.
        (0x301, True),
        (0x302, True),
        (0x303, True),
        (0x4022, False),
        (0x4302, False),
        (0x002, False),
        (0x004, False),
        (0x006, False),
        (0x080, False),
        (0x081, False),
        (0x083, False),
        (0x281, False),
        (0x285, False),
        (0x782, False),
    ],
)
def test_command_when_status_then_retried_by_the_table(
    stack: ExitStack, status: int, is_retried: bool
) -> None:
    rig = Rig(stack)
    seen: list[PduFromHost] = []
    rig.controller(rig.peer(answering([status], seen, bytearray(64 * BLOCK))))
    done = rig.run(OPCODE_READ, GuardedBuffer(BLOCK))
    assert done["error"] == (0 if is_retried else -errno.EIO)
    assert len(seen) == (2 if is_retried else 1)
    if not is_retried:
        assert done["status"] == status


def test_command_when_status_stays_then_retry_count_bounds_it(stack: ExitStack) -> None:
    rig = Rig(stack, retry_count=3)
    seen: list[PduFromHost] = []
    rig.controller(rig.peer(answering([0x022] * 50, seen, bytearray(BLOCK))))
    done = rig.run(OPCODE_READ, GuardedBuffer(BLOCK))
    assert (done["error"], done["status"]) == (-errno.EIO, 0x022)
    assert len(seen) == 4


@pytest.mark.parametrize("crd", [1, 2, 3])
def test_command_when_controller_asks_for_a_delay_then_it_is_kept(stack: ExitStack, crd: int) -> None:
    delays_ms = (50, 150, 250)
    rig = Rig(stack)
    seen: list[PduFromHost] = []
    delays_ns = tuple(delay * NS_PER_MS for delay in delays_ms)
    script = answering([0x082 | crd << 11], seen, bytearray(BLOCK))
    rig.controller(rig.peer(script), retry_delays_ns=delays_ns)
    started = Deadline.after(0)
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == 0
    assert started.elapsed_ms() >= delays_ms[crd - 1]


# ---- paths ----


def test_paths_when_one_dies_then_reads_go_on_over_the_other_without_an_error(stack: ExitStack) -> None:
    rig = Rig(stack)
    memory = bytearray(os.urandom(64 * BLOCK))
    first = rig.controller(rig.peer(dying))
    second = rig.controller(rig.peer(MemoryScript(memory)))
    buffer = GuardedBuffer(BLOCK)
    done = rig.run(OPCODE_READ, buffer, slba=5)
    assert done["error"] == 0
    assert buffer.array.tobytes() == bytes(memory[5 * BLOCK : 6 * BLOCK])
    assert rig.queue.controller_info(first).has_fallen
    rig.down(first)
    assert rig.queue.controller_info(second).is_up


def test_paths_when_ana_error_then_other_path_and_the_log_is_asked_for(stack: ExitStack) -> None:
    rig = Rig(stack)
    seen: list[PduFromHost] = []
    first = rig.controller(rig.peer(answering([0x302] * 9, seen, bytearray(BLOCK))), has_ana=True)
    second = rig.controller(rig.peer(MemoryScript(bytearray(64 * BLOCK))), has_ana=True)
    for _ in range(3):
        assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == 0
    assert len(seen) == 1, "a path that is suspect is left alone until its log was read"
    rig.wait_notice()
    assert rig.queue.controller_info(first).has_ana_error
    assert not rig.queue.controller_info(second).has_ana_error
    rig.queue.set_path(rig.device, first, PathState.UNUSABLE)
    assert not rig.queue.controller_info(first).has_ana_error


def test_paths_when_all_have_an_ana_error_then_queued_until_one_is_usable(stack: ExitStack) -> None:
    rig = Rig(stack, fail_after_s=120)
    seen: list[PduFromHost] = []
    index = rig.controller(rig.peer(answering([0x303], seen, bytearray(64 * BLOCK))), has_ana=True)
    rig.submit(OPCODE_WRITE, GuardedBuffer(BLOCK))
    rig.poll_until(lambda: rig.queue.controller_info(index).has_ana_error)
    rig.queue.set_path(rig.device, index, PathState.NON_OPTIMIZED)
    assert list(rig.poll(1)["error"]) == [0]
    assert len(seen) == 2


def test_paths_when_states_differ_then_the_best_is_used(stack: ExitStack) -> None:
    rig = Rig(stack, policy=PathPolicy.QUEUE_DEPTH)
    counts: list[list[PduFromHost]] = [[], [], []]
    peers = [rig.peer(answering([], seen, bytearray(64 * BLOCK))) for seen in counts]
    indexes = [rig.controller(peer, state=PathState.NON_OPTIMIZED) for peer in peers]
    rig.queue.set_path(rig.device, indexes[2], PathState.OPTIMIZED)
    for _ in range(4):
        rig.run(OPCODE_READ, GuardedBuffer(BLOCK))
    assert [len(seen) for seen in counts] == [0, 0, 4]
    rig.queue.set_path(rig.device, indexes[2], PathState.UNUSABLE)
    for _ in range(4):
        rig.run(OPCODE_READ, GuardedBuffer(BLOCK))
    assert len(counts[2]) == 4 and len(counts[0]) + len(counts[1]) == 4


@pytest.mark.parametrize("policy", list(PathPolicy))
def test_paths_when_policy_then_commands_spread_by_it(stack: ExitStack, policy: PathPolicy) -> None:
    rig = Rig(stack, policy=policy, queue_options={"window_size_bytes": 8 * BLOCK})
    counts: list[list[PduFromHost]] = [[], []]
    for seen in counts:
        rig.controller(rig.peer(answering([], seen, bytearray(1024 * BLOCK))))
    for _ in range(3):
        for tag in range(16):
            rig.submit(OPCODE_READ, GuardedBuffer(BLOCK), tag=tag)
        done = rig.poll(16)
        assert len(done) == 16 and not done["error"].any()
    lengths = [len(seen) for seen in counts]
    assert sum(lengths) == 48
    if policy is PathPolicy.ACTIVE_PASSIVE:
        assert lengths == [48, 0]
    elif policy is PathPolicy.ROUND_ROBIN:
        assert lengths == [24, 24]
    else:
        assert min(lengths) >= 12


def test_other_namespace_when_one_has_no_path_then_it_is_not_held_up(stack: ExitStack) -> None:
    rig = Rig(stack)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK), tag=1)
    lame, rig.device = (
        rig.device,
        rig.queue.add_multipath(nsid=2, block_size_bytes=BLOCK, block_count=64, recovery=Recovery()),
    )
    rig.controller(rig.peer(MemoryScript(bytearray(64 * BLOCK))))
    for tag in range(2, 6):
        assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK), tag=tag)["tag"] == tag
    rig.queue.remove_device(lame)
    assert list(rig.poll(1)["error"]) == [-errno.ECANCELED]


# ---- flushes ----


def flushing(stack: ExitStack, **options: Any) -> Rig:
    return Rig(stack, has_volatile_cache=True, **options)


def test_flush_when_controller_was_lost_after_a_write_then_uncertain_once(stack: ExitStack) -> None:
    rig = flushing(stack)
    memory = bytearray(64 * BLOCK)
    peer = rig.peer(MemoryScript(memory))
    index = rig.controller(peer)
    assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    rig.down(index)
    rig.up(index, peer)
    assert rig.run(OPCODE_FLUSH)["error"] == -EUNCERTAIN
    assert rig.run(OPCODE_FLUSH)["error"] == 0
    assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    assert rig.run(OPCODE_FLUSH)["error"] == 0
    rig.down(index)
    rig.up(index, peer)
    assert rig.run(OPCODE_FLUSH)["error"] == 0, "nothing was written since the last flush"


@pytest.mark.parametrize("is_cache_shared", [True, False])
def test_flush_when_another_controller_lived_on_then_it_vouches(
    stack: ExitStack, is_cache_shared: bool
) -> None:
    rig = flushing(stack, is_cache_shared=is_cache_shared)
    seen: list[PduFromHost] = []
    memory = bytearray(64 * BLOCK)
    first = rig.controller(rig.peer(MemoryScript(memory)))
    rig.controller(rig.peer(answering([], seen, memory)))
    assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    rig.down(first)
    assert rig.run(OPCODE_FLUSH)["error"] == (0 if is_cache_shared else -EUNCERTAIN)
    assert [command.opcode for command in seen] == [OPCODE_FLUSH]


def test_flush_when_the_other_controller_came_after_the_write_then_it_cannot_vouch(stack: ExitStack) -> None:
    """It may be a new incarnation with an empty cache, however alive it is now."""
    rig = flushing(stack)
    peer = rig.peer(MemoryScript(bytearray(64 * BLOCK)))
    first = rig.controller(peer)
    assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    rig.controller(peer)
    rig.down(first)
    assert rig.run(OPCODE_FLUSH)["error"] == -EUNCERTAIN


def test_flush_when_the_other_came_before_the_completion_was_seen_then_it_cannot_vouch_either(
    stack: ExitStack,
) -> None:
    """The completion of a target that has crashed since may wait in the socket while its next incarnation connects."""
    rig = flushing(stack)
    memory = bytearray(64 * BLOCK)
    arrived, answered, go = threading.Event(), threading.Event(), threading.Event()
    good = MemoryScript(memory)

    def slow(connection: PeerConnection) -> None:
        connection.accept_ic()
        command = connection.receive_command()
        arrived.set()
        assert go.wait(60)
        good.serve(connection, command)
        answered.set()
        connection.receive_command()

    first = rig.controller(rig.peer(slow))
    # Short enough to travel with its command, so that nothing more is asked of a host that does not poll.
    rig.submit(OPCODE_WRITE_ZEROES, slba=3)
    rig.poll_until(arrived.is_set)
    rig.controller(rig.peer(MemoryScript(memory)))
    go.set()
    assert answered.wait(60)
    assert list(rig.poll(1)["error"]) == [0]
    rig.down(first)
    assert rig.run(OPCODE_FLUSH)["error"] == -EUNCERTAIN


def test_flush_when_two_controllers_took_writes_then_both_get_it(stack: ExitStack) -> None:
    rig = flushing(stack, policy=PathPolicy.ROUND_ROBIN)
    counts: list[list[PduFromHost]] = [[], []]
    memory = bytearray(64 * BLOCK)
    for seen in counts:
        rig.controller(rig.peer(answering([], seen, memory)))
    for _ in range(4):
        assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    assert rig.run(OPCODE_FLUSH)["error"] == 0
    for seen in counts:
        assert [command.opcode for command in seen] == [OPCODE_WRITE] * 2 + [OPCODE_FLUSH]
    assert rig.run(OPCODE_FLUSH)["error"] == 0
    assert sum(len(seen) for seen in counts) == 7


def test_flush_when_in_flight_at_the_loss_then_sent_again_and_honest(stack: ExitStack) -> None:
    rig = flushing(stack)
    memory = bytearray(64 * BLOCK)

    def dies_under_a_flush(connection: PeerConnection) -> None:
        connection.accept_ic()
        good = MemoryScript(memory)
        while (command := connection.receive_command()).opcode != OPCODE_FLUSH:
            good.serve(connection, command)
        connection.close()

    index = rig.controller(rig.peer(dies_under_a_flush))
    assert rig.run(OPCODE_WRITE, GuardedBuffer(BLOCK))["error"] == 0
    rig.submit(OPCODE_FLUSH)
    rig.lose(index)
    rig.down(index)
    rig.up(index, rig.peer(MemoryScript(memory)))
    assert list(rig.poll(1)["error"]) == [-EUNCERTAIN]


# ---- the tables ----


def test_device_when_failed_then_commands_end_with_its_error_until_it_is_back(stack: ExitStack) -> None:
    rig = Rig(stack)
    index = rig.controller(rig.peer(MemoryScript(bytearray(64 * BLOCK))))
    rig.queue.set_path(rig.device, index, PathState.UNUSABLE)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK))
    assert len(rig.poll(1, seconds=0.02)) == 0
    rig.queue.fail_device(rig.device, errno.ENODEV)
    assert list(rig.poll(1)["error"]) == [-errno.ENODEV]
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == -errno.ENODEV
    rig.queue.fail_device(rig.device, 0)
    rig.queue.set_path(rig.device, index, PathState.OPTIMIZED)
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK))["error"] == 0


def test_device_when_resized_then_its_end_moves(stack: ExitStack) -> None:
    rig = Rig(stack)
    rig.controller(rig.peer(MemoryScript(bytearray(2048 * BLOCK))))
    with pytest.raises(UsageError, match="slba"):
        rig.submit(OPCODE_READ, GuardedBuffer(BLOCK), slba=1024)
    rig.queue.resize_device(rig.device, 1025)
    assert rig.run(OPCODE_READ, GuardedBuffer(BLOCK), slba=1024)["error"] == 0


def test_passthrough_when_lost_after_sending_then_uncertain_unless_it_only_reads(stack: ExitStack) -> None:
    rig = Rig(stack)
    index = rig.controller(rig.peer(dying))
    sqe = bytearray(64)
    sqe[0] = 0x11  # reservation acquire
    with pytest.raises(UncertainWriteError, match="fate unknown"):
        rig.queue.execute(rig.device, sqe, data=bytes(16), is_write=True, deadline=soon())
    rig.down(index)


def test_controllers_when_too_many_or_wrong_then_refused(stack: ExitStack) -> None:
    rig = Rig(stack)
    indexes = [rig.queue.add_controller() for _ in range(256)]
    assert indexes == list(range(256))
    with pytest.raises(UsageError, match="full"):
        rig.queue.add_controller()
    for index in indexes[1:17]:
        rig.queue.set_path(rig.device, index, PathState.OPTIMIZED)
    with pytest.raises(UsageError, match="full"):
        rig.queue.set_path(rig.device, 0, PathState.OPTIMIZED)
    with pytest.raises(UsageError):
        rig.queue.set_path(rig.device, 300, PathState.OPTIMIZED)
    for index in indexes:
        rig.queue.remove_controller(index)
    assert rig.queue.add_controller() == 0


def test_tables_when_changed_by_one_thread_while_another_polls_then_every_command_completes_once(
    stack: ExitStack, rng: np.random.Generator
) -> None:
    """Associations come and go a few hundred times under I/O."""
    rig = Rig(stack, policy=PathPolicy.ROUND_ROBIN)
    memory = bytearray(os.urandom(64 * BLOCK))
    peer = rig.peer(MemoryScript(memory))
    indexes = [rig.controller(peer) for _ in range(2)]
    is_done = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            while not is_done.wait(float(rng.uniform(0.001, 0.006))):
                index = indexes[int(rng.integers(0, 2))]
                rig.down(index)
                rig.up(index, peer)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    buffers = [GuardedBuffer(2 * BLOCK) for _ in range(16)]
    for _ in range(200):
        for tag, buffer in enumerate(buffers):
            buffer.array[:] = 0x5A
            rig.submit(OPCODE_READ, buffer, slba=tag, tag=tag)
        done = rig.poll(16)
        assert sorted(done["tag"]) == list(range(16))
        assert not done["error"].any()
        for tag, buffer in enumerate(buffers):
            buffer.check_guards()
            assert buffer.array.tobytes() == bytes(memory[tag * BLOCK : (tag + 2) * BLOCK])
    is_done.set()
    thread.join()
    assert not failures
    assert rig.queue.stats.requeued > 0, "some were under way when their connection went"


def test_poll_when_the_tables_were_changed_before_then_it_sleeps_all_the_same(stack: ExitStack) -> None:
    released = threading.Event()

    def silent(connection: PeerConnection) -> None:
        connection.accept_ic()
        connection.receive_command()
        released.wait(120)

    rig = Rig(stack)
    rig.controller(rig.peer(silent))
    stack.callback(released.set)
    rig.submit(OPCODE_READ, GuardedBuffer(BLOCK))
    assert len(rig.poll(1, seconds=0.3)) == 0
    assert rig.queue.stats.sleeps < 20
