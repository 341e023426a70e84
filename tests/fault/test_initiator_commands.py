"""Compare and write, reservations, verify and copy as a host uses them: on our target, and on controllers that fail."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.block.reservation import ReservationType
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CommandError, DeadlineError, UncertainWriteError, UnsupportedError, UsageError
from kvdev.initiator.event import EventKind
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.native.io import EUNCERTAIN
from kvdev.native.queue import HostQpair, HostQueue, PairCompletion, PathState, Recovery
from kvdev.session import Session
from kvdev.target.model import ListenAddress
from kvdev.testing.controller import GOOD_CONTROLLER, GOOD_NAMESPACE, ControllerScript
from kvdev.testing.peer import PduFromHost, PeerConnection, ScriptedPeer
from kvdev.testing.proxy import Relay
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.identify import FUSES_COMPARE_AND_WRITE, ONCS_COMPARE, ONCS_RESERVATIONS, LbaFormat
from kvdev.wire.log import AnaState
from kvdev.wire.nvme import NvmOpcode, Sqe, Status
from kvdev.wire.reservation import ReservationReport

BLOCK = 4096
OLD, NEW, OTHER = b"\x11" * BLOCK, b"\x22" * BLOCK, b"\x33" * BLOCK
WE_ALL = ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS
QUICK = ControllerOptions(
    kato_ms=2000,
    connect_timeout_s=1.0,
    admin_timeout_s=2.0,
    shutdown_timeout_s=0.3,
    reconnect_delay_s=0.2,
    ctrl_loss_tmo_s=30,
)


def soon(seconds: float = 15.0) -> Deadline:
    return Deadline.after(seconds)


def identity(number: int) -> HostIdentity:
    host_id = str(uuid.UUID(int=number))
    return HostIdentity.of(f"nqn.2014-08.org.nvmexpress:uuid:{host_id}", host_id=host_id)


@pytest.fixture(scope="module")
def target() -> Iterator[RunningTarget]:
    with running_target() as running:
        yield running


@pytest.fixture
def fresh() -> Iterator[RunningTarget]:
    with running_target() as running:
        yield running


def open_namespace(stack: ExitStack, uri: str, number: int = 1) -> NvmeNamespace:
    session = stack.enter_context(Session(host=identity(number), options=QUICK))
    device = session.open_device(f"{uri}?nsid=1")
    assert isinstance(device, NvmeNamespace)
    return device


@pytest.fixture
def device(target: RunningTarget) -> Iterator[NvmeNamespace]:
    with ExitStack() as stack:
        yield open_namespace(stack, target.uri)


# ---- compare, compare and write ----


def test_compare_and_write_when_equal_then_written_else_not(device: NvmeNamespace) -> None:
    assert device.compare_and_write_blocks == 1
    write_blocks(device, 5, OLD, soon())
    assert not device.compare_and_write(5, OTHER, NEW, soon())
    assert device.compare(5, OLD, soon()) and not device.compare(5, OTHER, soon())
    assert device.compare_and_write(5, OLD, NEW, soon())
    assert read_blocks(device, 5, 1, soon()).tobytes() == NEW


@pytest.mark.parametrize(
    ("slba", "expected", "new", "word"),
    [
        (0, OLD[1:], NEW[1:], "1 to 1 blocks"),
        (0, OLD, NEW + NEW, "1 to 1 blocks"),
        (0, OLD + OLD, NEW + NEW, "1 to 1 blocks"),
        (0, b"", b"", "1 to 1 blocks"),
        (4096, OLD, NEW, "within 0 to 4095"),
        (-1, OLD, NEW, "within 0 to 4095"),
    ],
)
def test_compare_and_write_when_malformed_then_refused_here(
    device: NvmeNamespace, slba: int, expected: bytes, new: bytes, word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        device.compare_and_write(slba, expected, new, soon())


def test_compare_when_longer_than_a_transfer_then_split(
    device: NvmeNamespace, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 256, 100 * BLOCK, dtype=np.uint8)
    write_blocks(device, 100, data, soon())
    assert device.compare(100, data.tobytes(), soon())
    data[70 * BLOCK] ^= 1
    assert not device.compare(100, data.tobytes(), soon())


def test_counter_when_two_hosts_increment_then_no_step_is_lost(fresh: RunningTarget) -> None:
    steps = 25
    with ExitStack() as stack:
        devices = [open_namespace(stack, fresh.uri, number) for number in (1, 2)]

        def increment(device: NvmeNamespace) -> None:
            done = 0
            while done < steps:
                now = read_blocks(device, 3, 1, soon()).tobytes()
                value = int.from_bytes(now[:8], "little") + 1
                done += device.compare_and_write(3, now, value.to_bytes(8, "little") + now[8:], soon())

        threads = [threading.Thread(target=increment, args=(each,)) for each in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stored = read_blocks(devices[0], 3, 1, soon()).tobytes()
        assert int.from_bytes(stored[:8], "little") == 2 * steps


def test_compare_and_write_when_connection_is_down_then_waits_for_the_next(fresh: RunningTarget) -> None:
    with Relay((fresh.address, fresh.port)) as relay, ExitStack() as stack:
        device = open_namespace(stack, f"tcp://127.0.0.1:{relay.port}/{fresh.nqn}")
        relay.cut()
        timer = threading.Timer(0.3, relay.mend)
        timer.start()
        assert device.compare_and_write(7, bytes(BLOCK), NEW, soon())
        timer.join()
        assert fresh.bdev(1).read(7 * BLOCK, BLOCK) == NEW


def test_compare_and_write_when_connection_is_lost_under_it_then_uncertain(fresh: RunningTarget) -> None:
    with Relay((fresh.address, fresh.port)) as relay, ExitStack() as stack:
        device = open_namespace(stack, f"tcp://127.0.0.1:{relay.port}/{fresh.nqn}")
        assert device.compare_and_write(7, bytes(BLOCK), OLD, soon())
        relay.stall()
        timer = threading.Timer(0.2, relay.cut)
        timer.start()
        with pytest.raises(UncertainWriteError, match="fate unknown"):
            device.compare_and_write(7, OLD, NEW, soon())
        timer.join()
        relay.mend()
        # After the fence what is there stays.
        assert read_blocks(device, 7, 1, soon()).tobytes() in (OLD, NEW)


def test_compare_and_write_when_ana_state_changes_then_other_path() -> None:
    with running_target(ana_reporting=True) as target, ExitStack() as stack:
        port = target.add_port()
        uri = f"{target.uri}?path=127.0.0.1:{port}"
        session = stack.enter_context(Session(host=identity(1), options=QUICK))
        device = session.open_device(f"{uri}&nsid=1")
        assert session.subsystem(uri).wait_paths(2, deadline=soon())
        for state, where in (
            (AnaState.INACCESSIBLE, target.listener()),
            (AnaState.OPTIMIZED, target.listener()),
            (AnaState.INACCESSIBLE, ListenAddress(target.address, port)),
        ):
            target.model.set_ana_state(target.nqn, address=where.address, port=where.port, state=state)
            now = read_blocks(device, 9, 1, soon()).tobytes()
            assert device.compare_and_write(9, now, bytes([state + 1]) * BLOCK, soon())
            assert device.reservations is not None
            assert device.reservations.report(soon()).reservation is None


# ---- halves of a pair, against scripted controllers ----

Script = Callable[[PeerConnection], None]


class PairRig:
    """One namespace behind one scripted queue pair."""

    def __init__(self, script: Script, *, block_size_bytes: int = BLOCK, **qpair_options: int) -> None:
        self.peer = ScriptedPeer(script)
        self.queue = HostQueue()
        self.qpair = HostQpair(qid=1, queue_size=32, **qpair_options)  # type: ignore[arg-type]
        self.qpair.connect(self.peer.address, self.peer.port, deadline=soon())
        self.device = self.queue.add_multipath(
            nsid=1, block_size_bytes=block_size_bytes, block_count=1024, recovery=Recovery()
        )
        self.controller = self.queue.add_controller()
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        self.queue.raise_controller(self.controller, [self.qpair], made_ns=now_ns)
        self.queue.set_path(self.device, self.controller, PathState.OPTIMIZED)
        self.block_size_bytes = block_size_bytes

    def run(self, *, seconds: float = 60, lba_count: int = 1) -> PairCompletion:
        size = lba_count * self.block_size_bytes
        return self.queue.compare_and_write(
            self.device,
            slba=4,
            lba_count=lba_count,
            expected=np.full(size, 1, dtype=np.uint8),
            new=np.full(size, 2, dtype=np.uint8),
            deadline=soon(seconds),
        )

    def __enter__(self) -> PairRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()
        self.qpair.close()
        self.peer.stop()


def receive_pair(connection: PeerConnection) -> tuple[PduFromHost, PduFromHost]:
    first, second = connection.receive_command(), connection.receive_command()
    assert (first.opcode, first.sqe[1] & 3) == (NvmOpcode.COMPARE, 1)
    assert (second.opcode, second.sqe[1] & 3) == (NvmOpcode.WRITE, 2)
    assert (first.slba, first.lba_count) == (second.slba, second.lba_count) == (4, 1)
    return first, second


def interrupted(connection: PeerConnection) -> None:
    """Sends Ctrl-C to the test once a pair has come, then waits for the end of the connection."""
    connection.accept_ic()
    receive_pair(connection)
    os.kill(os.getpid(), signal.SIGINT)
    connection.wait_closed()


def test_compare_and_write_when_interrupted_then_it_ends_at_once_and_nothing_more_is_sent() -> None:
    with PairRig(interrupted) as rig:
        limit = soon(100)
        with pytest.raises(KeyboardInterrupt):
            rig.run(seconds=120)
        assert not limit.is_expired
        assert not rig.qpair.is_alive, "what was sent may still be answered: only a reset keeps that off"
        assert rig.queue.outstanding_count == 0


def answering(*replies: tuple[int, int]) -> Script:
    """A controller that answers halves (index, status) in this order, then closes."""

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        halves = receive_pair(connection)
        for half in halves:
            connection.receive_write_data(half, ttag=half.cid & 0xFF | 1, r2to=0, r2tl=BLOCK)
        for index, status in replies:
            connection.send_response(halves[index], status=status)
        if len(replies) == len(halves):
            connection.finish()

    return script


FAILED = Status.ABORTED_FAILED_FUSED


@pytest.mark.parametrize(
    ("replies", "write_error", "write_status"),
    [
        ([(0, 0), (1, 0)], 0, 0),
        ([(1, 0), (0, 0)], 0, 0),
        ([(0, Status.COMPARE_FAILURE), (1, FAILED)], -5, FAILED),
        ([(1, FAILED), (0, Status.COMPARE_FAILURE)], -5, FAILED),
        # The controller dies between the halves, or before it has answered any.
        ([(0, 0)], -EUNCERTAIN, 0),
        ([(0, Status.COMPARE_FAILURE)], -EUNCERTAIN, 0),
        ([(1, 0)], 0, 0),
        ([(1, FAILED)], -5, FAILED),
        ([], -EUNCERTAIN, 0),
    ],
)
def test_pair_when_answered_in_part_then_only_what_is_known_is_said(
    replies: list[tuple[int, int]], write_error: int, write_status: int
) -> None:
    with PairRig(answering(*replies)) as rig:
        pair = rig.run()
        assert (pair.write_error, pair.write_status & 0x7FF) == (write_error, write_status)
        assert pair.is_write_sent
        if (0, Status.COMPARE_FAILURE) in replies:
            assert pair.compare_error == -5 and pair.compare_status & 0x7FF == Status.COMPARE_FAILURE


def test_pair_when_the_second_half_never_left_then_it_did_not_happen() -> None:
    """The first half alone fills what the network takes: the second one is still here when the peer resets."""
    is_over = threading.Event()

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        assert is_over.wait(10)
        connection.reset()

    with PairRig(
        script, block_size_bytes=65536, in_capsule_size_bytes=1 << 20, sndbuf_size_bytes=4096
    ) as rig:
        timer = threading.Timer(0.2, is_over.set)
        timer.start()
        pair = rig.run(lba_count=16)
        timer.join()
    assert not pair.is_write_sent and pair.write_error < 0 and pair.write_error != -EUNCERTAIN


def test_pair_when_no_answer_by_the_deadline_then_uncertain_and_the_memory_is_free() -> None:
    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        receive_pair(connection)
        connection.wait_closed()

    with PairRig(script) as rig:
        pair = rig.run(seconds=0.2)
        assert pair.write_error == -EUNCERTAIN
        assert rig.queue.outstanding_count == 0


def test_pair_when_there_is_no_path_then_it_ends_with_its_deadline_unsent() -> None:
    with PairRig(answering()) as rig:
        rig.queue.drop_controller(rig.controller, fence_ns=0)
        pair = rig.run(seconds=0.2)
        assert not pair.is_write_sent and pair.write_error == pair.compare_error == -110
        assert rig.queue.outstanding_count == 0 and rig.queue.stats.pending_count == 0


def test_pair_when_other_commands_wait_then_it_goes_past_them() -> None:
    """Its halves stay next to each other whatever else is pending."""
    order: list[int] = []

    def script(connection: PeerConnection) -> None:
        connection.accept_ic()
        for _ in range(6):
            command = connection.receive_command()
            order.append(command.opcode)
            if command.opcode != NvmOpcode.FLUSH:
                connection.receive_write_data(command, ttag=len(order), r2to=0, r2tl=BLOCK)
            connection.send_response(command)
        connection.finish()

    with PairRig(script) as rig:
        from kvdev.native.io import IO_DTYPE

        flushes = np.zeros(4, dtype=IO_DTYPE)
        flushes["device_index"] = rig.device
        rig.queue.submit(flushes)
        assert rig.run().write_error == 0
        assert len(rig.queue.poll(min_count=4, deadline=soon())) == 4
    assert sorted(order) == [0, 0, 0, 0, 1, 5] and order.index(1) == order.index(5) + 1


# ---- controllers that lack a command ----


def scripted(stack: ExitStack, script: ControllerScript) -> NvmeNamespace:
    peer = stack.enter_context(ScriptedPeer(script))
    return open_namespace(stack, f"tcp://{peer.address}:{peer.port}/nqn.2024-01.io.example:bare")


def test_commands_when_the_controller_lacks_them_then_named_by_field() -> None:
    with ExitStack() as stack:
        script = ControllerScript(identify=replace(GOOD_CONTROLLER, oncs=0, fuses=0))
        device = scripted(stack, script)
        assert device.compare_and_write_blocks == 0
        with pytest.raises(UnsupportedError, match=r"FUSES 0x0000.*reservations.*time"):
            device.compare_and_write(0, OLD, NEW, soon())
        attempts: list[Callable[[], object]] = [
            lambda: device.verify(0, 1, soon()),
            lambda: device.compare(0, OLD, soon()),
            lambda: device.copy(0, [(8, 1)], soon()),
            lambda: device.reservations.report(soon()),  # type: ignore[union-attr]
        ]
        for attempt in attempts:
            with pytest.raises(UnsupportedError, match="ONCS 0x0000"):
                attempt()


def test_reservations_when_the_namespace_has_none_then_named_by_field() -> None:
    with ExitStack() as stack:
        identify = replace(
            GOOD_CONTROLLER, oncs=ONCS_RESERVATIONS | ONCS_COMPARE, fuses=FUSES_COMPARE_AND_WRITE
        )
        bare = scripted(stack, ControllerScript(identify=identify))
        assert bare.compare_and_write_blocks == 1 and bare.reservations is not None
        with pytest.raises(UnsupportedError, match="RESCAP 0x00"):
            bare.reservations.report(soon())
    with ExitStack() as stack:
        namespace = replace(GOOD_NAMESPACE, rescap=0x02, lbaf=(LbaFormat(lbads=12),))
        some = scripted(stack, ControllerScript(identify=identify, namespaces={1: namespace}))
        assert some.reservations is not None
        with pytest.raises(UnsupportedError, match=r"write-exclusive-all-registrants.*RESCAP 0x02"):
            some.reservations.acquire(1, WE_ALL, soon())


@pytest.mark.parametrize("announced", [1, 64, 65535])
def test_report_when_it_announces_more_than_it_has_then_an_error_and_no_hang(announced: int) -> None:
    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc != NvmOpcode.RESERVATION_REPORT or not pdu.sgl_length:
            return False
        report = ReservationReport(generation=1, rtype=9, registrant_count=announced, is_ptpl=False)
        connection.send_read(pdu, report.build().ljust(pdu.sgl_length, b"\0"))
        return True

    identify = replace(GOOD_CONTROLLER, oncs=ONCS_RESERVATIONS)
    namespace = replace(GOOD_NAMESPACE, rescap=0xFE)
    with ExitStack() as stack:
        script = ControllerScript(answer=answer, identify=identify, namespaces={1: namespace})
        device = scripted(stack, script)
        assert device.reservations is not None
        words = {1: "RTYPE", 64: "RTYPE", 65535: "registrants"}
        with pytest.raises(Exception, match=words[announced]):
            device.reservations.report(soon())


# ---- reservations ----


def test_reservations_when_two_hosts_then_the_second_is_fenced_and_told(fresh: RunningTarget) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(Session(host=identity(n), options=QUICK)) for n in (1, 2)]
        first, second = (each.open_device(f"{fresh.uri}?nsid=1") for each in sessions)
        assert first.reservations is not None and second.reservations is not None
        first.reservations.register(0xA, soon())
        first.reservations.register(0xA, soon())
        first.reservations.acquire(0xA, WE_ALL, soon())
        with pytest.raises(CommandError, match="reservation conflict"):
            write_blocks(second, 0, NEW, soon())
        with pytest.raises(CommandError, match=r"kvdev reservation show"):
            second.reservations.acquire(0xB, WE_ALL, soon())
        read_blocks(second, 0, 1, soon())
        second.reservations.register(0xB, soon())
        write_blocks(second, 0, NEW, soon())
        status = first.reservations.report(soon())
        assert status.reservation is WE_ALL and not status.is_persistent
        assert {(each.host_id, each.key, each.is_holder) for each in status.registrants} == {
            (uuid.UUID(int=1).bytes, 0xA, True),
            (uuid.UUID(int=2).bytes, 0xB, True),
        }
        assert all(each.cntlid is not None for each in status.registrants)
        # Takeover: the key of the other host is preempted, and what it had sent is gone.
        second.reservations.preempt(0xB, 0xA, WE_ALL, soon())
        with pytest.raises(CommandError, match="reservation conflict"):
            write_blocks(first, 0, OLD, soon())
        limit = soon()
        while (event := sessions[0].subsystem(fresh.uri).take_event(deadline=limit)) is not None:
            if event.kind is EventKind.RESERVATION_CHANGED:
                break
        assert event is not None and event.nsid == 1 and event.text == "registration preempted"
        second.reservations.replace(0xB, 0xC, soon())
        second.reservations.release(0xC, WE_ALL, soon())
        write_blocks(first, 0, OLD, soon())
        second.reservations.clear(0xC, soon())
        assert not second.reservations.report(soon()).registrants


def test_register_when_persistence_is_not_offered_then_named_by_field(device: NvmeNamespace) -> None:
    assert device.reservations is not None
    with pytest.raises(UnsupportedError, match=r"RESCAP 0xfe without bit 0.*ptpl_file"):
        device.reservations.register(1, soon(), is_persistent=True)
    with pytest.raises(UsageError, match="64 bits"):
        device.reservations.register(1 << 64, soon())


def test_report_when_there_are_more_than_one_page_holds_then_all(fresh: RunningTarget) -> None:
    """64 registrants do not fit 4096 bytes; they are put in from the target's side."""
    from types import MappingProxyType

    from kvdev.target.reservation import Reservations

    registrants = {uuid.UUID(int=n + 10): n for n in range(100)}
    fresh.service._reservations._namespaces[fresh.nqn, 1].state = Reservations(
        registrants=MappingProxyType(registrants)
    )
    with ExitStack() as stack:
        device = open_namespace(stack, fresh.uri)
        assert device.reservations is not None
        found = device.reservations.report(soon()).registrants
        assert {each.host_id: each.key for each in found} == {
            host.bytes: key for host, key in registrants.items()
        }


def test_register_when_connection_is_lost_under_it_then_uncertain_and_report_tells(
    fresh: RunningTarget,
) -> None:
    with Relay((fresh.address, fresh.port)) as relay, ExitStack() as stack:
        device = open_namespace(stack, f"tcp://127.0.0.1:{relay.port}/{fresh.nqn}")
        assert device.reservations is not None
        device.reservations.report(soon())
        relay.stall()
        timer = threading.Timer(0.2, relay.cut)
        timer.start()
        with pytest.raises(UncertainWriteError):
            device.reservations.register(1, soon())
        timer.join()
        relay.mend()
        assert len(device.reservations.report(soon()).registrants) in (0, 1)


def test_report_when_there_is_no_connection_then_ends_with_its_deadline(fresh: RunningTarget) -> None:
    with Relay((fresh.address, fresh.port)) as relay, ExitStack() as stack:
        device = open_namespace(stack, f"tcp://127.0.0.1:{relay.port}/{fresh.nqn}")
        assert device.reservations is not None
        relay.cut()
        with pytest.raises(DeadlineError):
            device.reservations.report(soon(0.3))


# ---- verify and copy ----


def test_verify_when_longer_than_one_command_then_split(device: NvmeNamespace) -> None:
    device.verify(0, device.block_count, soon())
    with pytest.raises(UsageError, match="range"):
        device.verify(device.block_count, 1, soon())


def test_copy_when_longer_than_one_command_then_split(
    device: NvmeNamespace, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 256, 300 * BLOCK, dtype=np.uint8)
    write_blocks(device, 0, data, soon())
    ranges = [(200, 90), (0, 1), *((10 + 2 * i, 1) for i in range(60))]
    device.copy(1000, ranges, soon())
    expected = b"".join(data[s * BLOCK : (s + n) * BLOCK].tobytes() for s, n in ranges)
    copied = read_blocks(device, 1000, sum(n for _, n in ranges), soon())
    assert copied.tobytes() == expected
    for bad in ([(999, 2)], [(1000, 1)], [(5, 1), (1001, 1)]):
        with pytest.raises(UsageError, match="apart from the destination"):
            device.copy(1000, bad, soon())
    device.copy(1000, [(998, 2)], soon())
    device.copy(1000, [], soon())
