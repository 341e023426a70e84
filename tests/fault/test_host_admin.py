"""The admin thread: keep alive whatever Python does, commands from any thread, loss found in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectionLostError, DeadlineError, UsageError
from kvdev.native.admin import AdminQpair, AdminThread
from kvdev.native.queue import HostQpair
from kvdev.testing.peer import PduFromHost, PeerConnection, ScriptedPeer

KEEP_ALIVE = 0x18
LATE_S = 2.0  # how late a busy machine may run what is due; a wait that nothing ends takes longer
IDENTIFY = 0x06
AER = 0x0C


class AdminScript:
    """An admin queue: answers Keep Alive and Identify, collects event requests."""

    def __init__(self, *, keep_alives_answered: int = 1 << 30) -> None:
        self.keep_alives_answered = keep_alives_answered
        self.keep_alive_times: list[float] = []
        self.event_requests: list[PduFromHost] = []
        self.is_silent = threading.Event()

    def __call__(self, connection: PeerConnection) -> None:
        connection.accept_ic()
        while True:
            command = connection.receive_command()
            if self.is_silent.is_set():
                continue
            if command.opcode == KEEP_ALIVE:
                self.keep_alive_times.append(time.monotonic())
                if len(self.keep_alive_times) <= self.keep_alives_answered:
                    connection.send_response(command)
            elif command.opcode == AER:
                self.event_requests.append(command)
            elif command.opcode == IDENTIFY:
                connection.send_read(command, command.sqe[40:44] * (command.sgl_length // 4))
            else:
                connection.send_response(command, status=0x4001)


@contextmanager
def adopted(script: AdminScript, *, keep_alive_ms: int = 0, queue_size: int = 32) -> Iterator[AdminQpair]:
    with ScriptedPeer(script) as peer:
        thread = AdminThread()
        qpair = HostQpair(qid=0, queue_size=queue_size, trid="peer")
        qpair.connect(peer.address, peer.port, deadline=Deadline.after(60))
        try:
            yield thread.adopt(qpair, keep_alive_ms=keep_alive_ms)
        finally:
            thread.close()
            qpair.close()


def identify(cdw10: int) -> bytes:
    return bytes([IDENTIFY]) + bytes(39) + cdw10.to_bytes(4, "little") + bytes(20)


def wait_until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = Deadline.after(seconds)
    while not condition():
        deadline.check("condition")
        threading.Event().wait(0.005)


def test_keep_alive_when_python_holds_the_interpreter_then_it_still_goes_out() -> None:
    script = AdminScript()
    with adopted(script, keep_alive_ms=1000) as admin:
        # Holds the interpreter lock in one C call after another: no Python thread could send in between,
        # the peer's included, so that the count is taken from the core.
        before = admin.info.keep_alives_sent
        end = time.monotonic() + 1.0 + LATE_S
        while admin.info.keep_alives_sent - before < 2 and time.monotonic() < end:
            sum(range(200000))
        assert admin.info.keep_alives_sent - before >= 2
        assert admin.is_alive
        wait_until(lambda: admin.info.keep_alives_done >= 2)
        assert admin.info.keep_alive_last_ns > 0


def test_keep_alive_when_idle_for_three_kato_then_half_kato_apart_and_connected() -> None:
    script = AdminScript()
    with adopted(script, keep_alive_ms=600) as admin:
        wait_until(lambda: len(script.keep_alive_times) >= 6)
        assert admin.is_alive
        # The mean: one that the peer sees late makes one gap longer and the next one shorter.
        mean_s = (script.keep_alive_times[5] - script.keep_alive_times[0]) / 5
        assert 0.2 < mean_s < 0.6, script.keep_alive_times


def test_keep_alive_when_its_completion_is_lost_then_connection_loss_by_kato() -> None:
    script = AdminScript(keep_alives_answered=1)
    with adopted(script, keep_alive_ms=400) as admin:
        wait_until(lambda: not admin.is_alive)
        lost_s = time.monotonic() - script.keep_alive_times[1]
        assert 0.2 < lost_s < 0.4 + LATE_S, "KATO after the Keep Alive that nobody answered, not half of it"
        fault = admin.fault
        assert fault is not None and fault.kind == "timeout" and fault.operation.startswith("keep alive")
        assert admin.info.lost_ns > 0
        with pytest.raises((ConnectionLostError, DeadlineError)):
            admin.execute(identify(1), data=bytearray(4096), deadline=Deadline.after(1))


def test_keep_alive_when_changed_then_the_new_interval_holds_and_zero_stops_it() -> None:
    script = AdminScript()
    with adopted(script, keep_alive_ms=60000) as admin:
        admin.set_keep_alive_ms(400)
        wait_until(lambda: admin.info.keep_alives_done >= 3)
        admin.set_keep_alive_ms(0)
        sent = admin.info.keep_alives_sent
        threading.Event().wait(0.3)
        assert admin.info.keep_alives_sent == sent


def test_execute_when_many_threads_call_then_each_gets_its_own_answer() -> None:
    script = AdminScript()
    wrong: list[object] = []

    # Queue size 4: two commands beside the slot kept for Keep Alive, the others wait their turn.
    with adopted(script, keep_alive_ms=400, queue_size=4) as admin:

        def work(thread_index: int) -> None:
            for index in range(20):
                value = thread_index << 16 | index
                data = bytearray(4096)
                completion = admin.execute(identify(value), data=data, deadline=Deadline.after(10))
                if not completion.is_success or bytes(data) != value.to_bytes(4, "little") * 1024:
                    wrong.append((value, completion))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert admin.qpair_info.commands >= 120


def test_execute_when_controller_refuses_then_status_is_handed_out() -> None:
    with adopted(AdminScript()) as admin:
        completion = admin.execute(bytes([0x0A]) + bytes(63), deadline=Deadline.after(60))
        assert (completion.sct, completion.sc, completion.dnr) == (0, 1, True)
        with pytest.raises(CommandError, match="get features: expected status 0x0/0x00, got 0x0/0x01"):
            completion.check("get features", opcode=0x0A)


def test_execute_when_no_answer_comes_then_deadline_error_and_the_buffer_is_free() -> None:
    script = AdminScript()
    script.is_silent.set()
    with adopted(script) as admin:
        data = bytearray(4096)
        deadline = Deadline.after(0.2)
        with pytest.raises(DeadlineError, match=r"identify \(06h\)"):
            admin.execute(identify(1), data=data, deadline=deadline)
        assert 200 <= deadline.elapsed_ms() < 200 + 1e3 * LATE_S
        assert not admin.is_alive
        data.clear()  # not possible while the core still had it


def test_execute_when_target_vanishes_then_waiting_threads_end_at_once() -> None:
    script = AdminScript()
    script.is_silent.set()
    errors: list[BaseException] = []
    with ScriptedPeer(script) as peer:
        thread = AdminThread()
        qpair = HostQpair(qid=0, queue_size=8, trid="peer")
        qpair.connect(peer.address, peer.port, deadline=Deadline.after(60))
        admin = thread.adopt(qpair, keep_alive_ms=0)

        def call() -> None:
            try:
                admin.execute(identify(1), data=bytearray(4096), deadline=Deadline.after(30))
            except ConnectionLostError as error:
                errors.append(error)

        callers = [threading.Thread(target=call) for _ in range(10)]
        for caller in callers:
            caller.start()
        wait_until(lambda: admin.qpair_info.outstanding_count >= 6)
        peer.connections[0].reset()
        for caller in callers:
            caller.join(5)
        assert len(errors) == 10
        thread.close()
        qpair.close()


def test_release_when_threads_wait_then_they_end_and_the_queue_pair_is_the_callers() -> None:
    script = AdminScript()
    script.is_silent.set()
    errors: list[BaseException] = []
    with adopted(script) as admin:

        def call() -> None:
            try:
                admin.execute(identify(1), data=bytearray(4096), deadline=Deadline.after(30))
            except ConnectionLostError as error:
                errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        wait_until(lambda: admin.qpair_info.outstanding_count == 1)
        qpair = admin.release()
        caller.join(5)
        assert len(errors) == 1
        assert not qpair.is_alive, "the command may still run: the connection cannot be used on"
        with pytest.raises(UsageError, match="released"):
            admin.execute(identify(1), data=bytearray(4096), deadline=Deadline.after(1))


def test_release_when_idle_then_the_queue_pair_works_on_for_the_caller() -> None:
    with adopted(AdminScript(), keep_alive_ms=400) as admin:
        admin.arm_events(2)
        wait_until(lambda: admin.info.keep_alives_done >= 1)
        qpair = admin.release()
        data = bytearray(4096)
        assert qpair.execute(identify(9), data=data, deadline=Deadline.after(60)).is_success
        assert bytes(data[:4]) == b"\x09\0\0\0"


def test_events_when_armed_then_they_arrive_and_are_armed_again() -> None:
    script = AdminScript()
    with ScriptedPeer(script) as peer:
        thread = AdminThread()
        qpair = HostQpair(qid=0, queue_size=8, trid="peer")
        qpair.connect(peer.address, peer.port, deadline=Deadline.after(60))
        admin = thread.adopt(qpair, keep_alive_ms=1000)
        admin.arm_events(2)
        wait_until(lambda: len(script.event_requests) == 2)
        assert admin.take_event(deadline=Deadline.after(0.05)) is None
        peer.connections[0].send_response(script.event_requests[0], dw0=0x00040002)
        assert admin.take_event(deadline=Deadline.after(60)) == 0x00040002
        wait_until(lambda: len(script.event_requests) == 3)
        # Refused (limit exceeded): not asked for again, or the two would never stop.
        peer.connections[0].send_response(script.event_requests[1], status=0x105)
        wait_until(lambda: admin.info.aer_outstanding == 1)
        assert len(script.event_requests) == 3
        peer.connections[0].reset()
        with pytest.raises(ConnectionLostError):
            admin.take_event(deadline=Deadline.after(60))
        thread.close()
        qpair.close()


def test_thread_when_it_owns_many_controllers_then_each_lives_by_itself() -> None:
    scripts = [AdminScript(keep_alives_answered=2 if index == 3 else 1 << 30) for index in range(8)]
    with ScriptedPeer(scripts) as peer:
        thread = AdminThread()
        admins = []
        for _ in scripts:
            qpair = HostQpair(qid=0, queue_size=8, trid="peer")
            qpair.connect(peer.address, peer.port, deadline=Deadline.after(60))
            admins.append(thread.adopt(qpair, keep_alive_ms=600))
        wait_until(lambda: not admins[3].is_alive)
        assert [admin.is_alive for admin in admins] == [index != 3 for index in range(8)]
        thread.close()
        for admin in admins:
            admin.qpair.close()


def test_thread_when_used_in_a_fork_then_usage_error_and_close_does_not_hang() -> None:
    with adopted(AdminScript()) as admin:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                admin.execute(identify(1), data=bytearray(4096), deadline=Deadline.after(1))
            except UsageError as error:
                os.write(writer, str(error).encode())
            admin._thread.close()
            os.write(writer, b"; closed")
            os._exit(0)
        os.close(writer)
        text = b""
        while part := os.read(reader, 200):
            text += part
        os.close(reader)
        os.waitpid(pid, 0)
        assert b"its fork" in text and b"closed" in text
        assert admin.is_alive, "the parent is not disturbed"


def test_close_when_peer_is_gone_then_it_is_prompt() -> None:
    deadline = Deadline.after(60)
    with adopted(AdminScript(), keep_alive_ms=1000) as admin:
        admin.qpair_info.peer_address.index("127.0.0.1")
    assert deadline.elapsed_ms() < 1e3 * LATE_S
