"""Asynchronous events, retry delays and traffic based keep alive, against a scripted controller."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from kvdev.block.device import execute, read_blocks, transfer_ios
from kvdev.clock import Deadline
from kvdev.initiator.event import EventKind, HostEvent
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.subsystem import Subsystem
from kvdev.native.io import OPCODE_READ
from kvdev.session import Session
from kvdev.testing.controller import GOOD_CONTROLLER, SUBNQN, ControllerScript
from kvdev.testing.host import GuardedBuffer
from kvdev.testing.peer import FLAG_HDGST, PduFromHost, PeerConnection, ScriptedPeer
from kvdev.testing.recovery import WAIT_S, soon, until, wait_event
from kvdev.uri import DigestPolicy
from kvdev.wire.features import Fid
from kvdev.wire.identify import CTRATT_TBKAS, OAES_NAMESPACE_ATTRIBUTE
from kvdev.wire.log import ErrorEntry, Lid, SmartLog
from kvdev.wire.nvme import (
    AdminOpcode,
    AsyncEvent,
    AsyncEventType,
    GetLogPageCommand,
    Notice,
    Sqe,
)

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    connect_timeout_s=20.0, admin_timeout_s=20.0, shutdown_timeout_s=0.3, reconnect_delay_s=0.2
)


class Announcer(ControllerScript):
    """Holds event requests, and completes one when the test says so."""

    def prepare(self) -> None:
        self.requests: list[tuple[PeerConnection, PduFromHost]] = []
        self.arrived = threading.Condition()
        self.changed_ns = bytes(4096)
        self.error_log = bytes(64)
        self.answer = self._answer

    def _answer(self, connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.ASYNC_EVENT_REQUEST:
            with self.arrived:
                self.requests.append((connection, pdu))
                self.arrived.notify_all()
            return True
        if sqe.opc == AdminOpcode.GET_LOG_PAGE:
            command = GetLogPageCommand.from_sqe(sqe)
            pages = {
                Lid.SMART: SmartLog(critical_warning=4).build(),
                Lid.CHANGED_NS: self.changed_ns,
                Lid.ERROR: self.error_log,
            }
            if command.lid in pages:
                connection.send_read(pdu, pages[Lid(command.lid)][: command.byte_count])
                return True
        return False

    def announce(self, event_type: int, info: int, lid: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: bool(self.requests), WAIT_S), "no event request is out"
            connection, pdu = self.requests.pop()
        connection.send_response(pdu, dw0=AsyncEvent(event_type, info, lid).build())


@pytest.fixture
def announcer() -> Iterator[tuple[Announcer, Session, NvmeNamespace, Subsystem]]:
    identify = dataclasses.replace(GOOD_CONTROLLER, aerl_0based=3, oaes=OAES_NAMESPACE_ATTRIBUTE)
    script = Announcer(identify=identify)
    script.prepare()
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        uri = f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1"
        device = kv.open_device(uri)
        assert isinstance(device, NvmeNamespace)
        yield script, kv, device, kv.subsystem(uri)


Rig = tuple[Announcer, Session, NvmeNamespace, Subsystem]


def test_event_when_smart_warning_then_the_log_is_read_and_told(announcer: Rig) -> None:
    script, _, _, subsystem = announcer
    for _ in range(2):
        script.announce(AsyncEventType.SMART, 1, Lid.SMART)
        assert "0x04" in wait_event(subsystem, EventKind.SMART_WARNING).text
    assert subsystem.path_infos[0].loss_count == 0


def test_event_when_persistent_internal_error_then_the_controller_is_reset(announcer: Rig) -> None:
    script, _, device, subsystem = announcer
    entry = ErrorEntry(error_count=9, sqid=1, cid=0x105, status_p=0x281 << 1, nsid=1, lba=77)
    script.error_log = entry.build() * 2
    first = device.controller
    script.announce(AsyncEventType.ERROR, 3, Lid.ERROR)
    told = wait_event(subsystem, EventKind.CONTROLLER_ERROR).text
    assert "newest of 1 error log entries: qpair 1 CID 0x0105 status 0x0281 nsid 1 LBA 77" in told
    assert "persistent internal error" in wait_event(subsystem, EventKind.PATH_DOWN).text
    wait_event(subsystem, EventKind.PATH_UP)
    assert device.controller is not first
    assert len(read_blocks(device, 0, 1, soon())) == 4096


@pytest.mark.parametrize(
    "page",
    [
        b"\xff\xff\xff\xff",  # overflow: more than 1024 have changed
        b"\x05\0\0\0\x03\0\0\0",  # not increasing
        b"\x01\0\0\0" * 1024,
        b"",
    ],
)
def test_event_when_namespaces_changed_then_all_are_scanned_whatever_the_list_says(
    announcer: Rig, page: bytes
) -> None:
    """S-25: the list of changed namespaces is not trusted; the scan is bounded by its own rules."""
    script, _, device, subsystem = announcer
    script.changed_ns = page.ljust(4096, b"\0")
    grown = dataclasses.replace(script.namespaces[1], nsze=512, ncap=512)
    script.namespaces = {1: grown, 7: grown}
    script.announce(AsyncEventType.NOTICE, Notice.NAMESPACE_ATTRIBUTE, Lid.CHANGED_NS)
    assert wait_event(subsystem, EventKind.NAMESPACE_GROWN).nsid == 1
    assert wait_event(subsystem, EventKind.NAMESPACE_ADDED).nsid == 7
    assert device.block_count == 512
    assert len(read_blocks(device, 0, 1, soon())) == 4096


def test_event_when_more_than_anyone_reads_then_the_newest_are_kept(announcer: Rig) -> None:
    script, _, _, subsystem = announcer
    for _ in range(300):
        subsystem.events.put(HostEvent(EventKind.ANA_CHANGED, "x"))
    assert subsystem.events.dropped_count == 300 - 256
    script.announce(AsyncEventType.SMART, 1, Lid.SMART)
    wait_event(subsystem, EventKind.SMART_WARNING)


def test_retry_delay_when_controller_has_one_then_it_is_enabled_and_kept() -> None:
    statuses = [0x082 | 2 << 11]
    features: list[Sqe] = []

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.SET_FEATURES and sqe.cdw10 & 0xFF == Fid.HOST_BEHAVIOR_SUPPORT:
            features.append(sqe)
            assert pdu.data[0] == 1, "ACRE"
        if sqe.opc == 2 and sqe.nsid == 1 and sqe.sgl_len == 4096 and not sqe.cdw10 and statuses:
            connection.send_response(pdu, status=statuses.pop())
            return True
        return False

    identify = dataclasses.replace(GOOD_CONTROLLER, crdt1_100ms=1, crdt2_100ms=3)
    script = ControllerScript(answer=answer, identify=identify)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1")
        started = Deadline.after(0)
        assert len(read_blocks(device, 0, 1, soon())) == 4096
        assert started.elapsed_ms() >= 300
    assert len(features) == 1 and not statuses


@pytest.mark.parametrize("is_flag_cleared", [False, True])
def test_header_digest_when_broken_then_a_new_association_and_the_right_bytes(is_flag_cleared: bool) -> None:
    """S-10: a header that cannot be trusted ends the queue pair; nothing behind it is looked at."""
    broken: list[PeerConnection] = []

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        # A read of the namespace on the first association's I/O connection.
        if broken or sqe.opc != 2 or sqe.sgl_len != 4096 or connection is peer.connections[0]:
            return False
        broken.append(connection)
        good = bytearray(connection.pack_c2h_data(pdu.cid, 0, b"\xbd" * 4096))
        if is_flag_cleared:
            good[1] &= ~FLAG_HDGST
        else:
            good[24] ^= 1
        connection.send(bytes(good) + connection.pack_response(pdu.cid))
        return True

    script = ControllerScript(answer=answer, memory=bytearray(b"\x6e" * (1 << 20)))
    options = dataclasses.replace(QUICK, header_digest=DigestPolicy.REQUIRE)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=options) as kv:
        uri = f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1"
        device = kv.open_device(uri)
        buffer = GuardedBuffer(4096)
        execute(device, transfer_ios(device, OPCODE_READ, 0, buffer.address, 4096), soon())
        assert buffer.array.tobytes() == b"\x6e" * 4096
        buffer.check_guards()
        event = wait_event(kv.subsystem(uri), EventKind.PATH_DOWN)
        assert ("flags+0x1" if is_flag_cleared else "hdgst") in event.text
        assert broken and kv.subsystem(uri).path_infos[0].loss_count == 1


@pytest.mark.parametrize("is_traffic_based", [False, True])
def test_keep_alive_when_there_is_traffic_then_sent_unless_traffic_counts(is_traffic_based: bool) -> None:
    """Idle it is sent in both modes: every KATO / 2, or every KATO / 4."""
    kato_ms = 1200
    times: list[int] = []

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.KEEP_ALIVE and connection is peer.connections[0]:
            times.append(1)
        return False

    identify = dataclasses.replace(GOOD_CONTROLLER, ctratt=CTRATT_TBKAS if is_traffic_based else 0)
    script = ControllerScript(answer=answer, identify=identify)
    options = dataclasses.replace(QUICK, kato_ms=kato_ms)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1")
        # A pause of our own, on a busy machine, is idle time: keep alives may be sent in it.
        begun, quiet_count, busy_ms = Deadline.after(0), 1, 0.0
        while busy_ms < kato_ms or (not is_traffic_based and len(times) < 2):
            read_blocks(device, 0, 1, soon())
            threading.Event().wait(0.01)
            now_ms = begun.elapsed_ms()
            quiet_count += int((now_ms - busy_ms) / (0.2 * kato_ms))
            busy_ms = now_ms
            assert busy_ms < 1000 * WAIT_S
        busy = len(times)
        assert not is_traffic_based or busy <= quiet_count
        until(lambda: len(times) >= busy + (4 if is_traffic_based else 2), "keep alives while idle")
        assert kv.subsystem(f"tcp://{peer.address}:{peer.port}/{SUBNQN}").path_infos[0].loss_count == 0


def test_keep_alive_when_refused_then_the_association_is_given_up() -> None:
    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.KEEP_ALIVE and connection is peer.connections[0]:
            connection.send_response(pdu, status=0x01)
            return True
        return False

    options = dataclasses.replace(QUICK, kato_ms=300)
    with ScriptedPeer(ControllerScript(answer=answer)) as peer, Session(host=HOST, options=options) as kv:
        uri = f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1"
        device = kv.open_device(uri)
        assert "keep alive" in wait_event(kv.subsystem(uri), EventKind.PATH_DOWN).text
        assert len(read_blocks(device, 0, 1, soon())) == 4096
