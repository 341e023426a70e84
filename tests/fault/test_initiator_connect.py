"""What a target may do wrong while it is connected, and what is left of it: an error that says so, nothing else."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import (
    AuthenticationError,
    CommandError,
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    MalformedPduError,
    ProtocolError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.initiator.event import EventKind
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NAMESPACE_COUNT_MAX, NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.path import PathStage
from kvdev.session import Session
from kvdev.testing.controller import GOOD_CONTROLLER, GOOD_NAMESPACE, SUBNQN, ControllerScript
from kvdev.testing.peer import (
    PduFromHost,
    PeerClosedError,
    PeerConnection,
    Script,
    ScriptedPeer,
    pack_ic_resp,
)
from kvdev.uri import DigestPolicy
from kvdev.wire.fabrics import Cap, FabricsType, Property, PropertyCommand
from kvdev.wire.identify import Cns, LbaFormat, NsDescriptorList
from kvdev.wire.layout import WireError
from kvdev.wire.log import DiscoveryEntry
from kvdev.wire.nvme import AdminOpcode, FabricsStatus, GetLogPageCommand, IdentifyCommand, Sqe

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
# One association at a time: what comes after a loss is the subject of other tests.
QUICK = ControllerOptions(
    connect_timeout_s=6.0, admin_timeout_s=6.0, shutdown_timeout_s=0.3, ctrl_loss_tmo_s=0
)


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Descriptors and threads are as before when a test ends, whatever failed in it."""
    before, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threading.active_count() == threads


def uri(peer: ScriptedPeer, nsid: int | None = None) -> str:
    query = "" if nsid is None else f"?nsid={nsid}"
    return f"tcp://{peer.address}:{peer.port}/{SUBNQN}{query}"


def open_error(script: Script, *, options: ControllerOptions = QUICK, nsid: int = 1) -> KvdevError:
    """The error of opening a namespace against a script, within its bounds."""
    limit = soon(8)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=options) as kv:
        with pytest.raises(KvdevError) as caught:
            kv.open_device(uri(peer, nsid), deadline=limit)
        assert not limit.is_expired
    assert "\n" not in str(caught.value)
    return caught.value


def test_open_when_controller_is_good_then_data_moves() -> None:
    script = ControllerScript()
    with (
        ScriptedPeer(script) as peer,
        Session(host=HOST, options=dataclasses.replace(QUICK, io_queue_count=3)) as kv,
    ):
        device = kv.open_device(uri(peer, 1))
        assert isinstance(device, NvmeNamespace)
        write_blocks(device, 3, bytes(range(256)) * 16, soon())
        assert bytes(read_blocks(device, 3, 1, soon())) == bytes(range(256)) * 16
        device.write_zeroes(3, 1, soon())
        assert not read_blocks(device, 3, 1, soon()).any()
        device.deallocate([(0, 4), (8, 8)], soon())
        assert device.controller.queue_size == 64
        assert len(device.controller.qpair_indexes) == 3
    assert {connect.hostid for connect in script.connects} == {HOST.host_id_bytes}
    assert [connect.cntlid for connect in script.connects] == [0xFFFF, 7, 7, 7]
    assert script.cc.shn == 1


# ---- ICResp ----


def ic(reply: bytes) -> Script:
    def script(connection: PeerConnection) -> None:
        connection.receive_pdu()
        connection.send(reply)
        connection.wait_closed()

    return script


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        (pack_ic_resp(pfv=1), "pfv"),
        (pack_ic_resp(cpda=32), "pda"),
        (pack_ic_resp(maxh2cdata=4092), "maxh2cdata"),
        (pack_ic_resp(maxh2cdata=4098), "maxh2cdata"),
        (pack_ic_resp(dgst=1), "dgst"),
        (pack_ic_resp(dgst=2), "dgst"),
    ],
)
def test_connect_when_ic_resp_is_wrong_then_error_names_the_field(reply: bytes, field: str) -> None:
    error = open_error(ic(reply))
    assert isinstance(error, MalformedPduError)
    assert field in error.field.lower()
    assert "qpair 0" in str(error)


@pytest.mark.parametrize("which", ["header_digest", "data_digest"])
def test_connect_when_required_digest_is_refused_then_unsupported(which: str) -> None:
    options = dataclasses.replace(QUICK, **{which: DigestPolicy.REQUIRE})  # type: ignore[arg-type]
    error = open_error(ic(pack_ic_resp()), options=options)
    assert isinstance(error, UnsupportedError)
    assert "prefer" in str(error)


def test_connect_when_ic_resp_never_comes_then_deadline() -> None:
    def script(connection: PeerConnection) -> None:
        connection.wait_closed()

    error = open_error(script)
    assert isinstance(error, DeadlineError)
    assert "check that an NVMe/TCP target answers" in str(error)


def test_connect_when_peer_closes_at_once_then_connect_error() -> None:
    error = open_error(lambda connection: connection.close())
    assert isinstance(error, TransportError)
    assert "is it an NVMe/TCP target" in str(error)


def test_connect_when_nobody_listens_then_connect_error_with_remedy() -> None:
    with ScriptedPeer(ControllerScript()) as peer:
        address = f"tcp://{peer.address}:{peer.port}/{SUBNQN}"
    with (
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(ConnectError, match="is the target listening"),
    ):
        kv.controller(address)


def test_connect_when_first_path_is_dead_then_second_is_used() -> None:
    with ScriptedPeer(ControllerScript()) as dead:
        pass
    with ScriptedPeer(ControllerScript()) as peer, Session(host=HOST, options=QUICK) as kv:
        controller = kv.controller(
            f"tcp://127.0.0.1:{dead.port}/{SUBNQN}?path=127.0.0.1:{peer.port}", deadline=soon()
        )
        assert controller.address.port == peer.port


# ---- Connect ----


def on(opcode: int, fctype: int | None, respond: Callable[[PeerConnection, PduFromHost], Any]) -> Any:
    """An answer that takes over one kind of command."""

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc != opcode or (fctype is not None and sqe.fctype != fctype):
            return False
        respond(connection, pdu)
        return True

    return answer


@pytest.mark.parametrize(
    ("status", "dw0", "remedy"),
    [
        (FabricsStatus.CONNECT_INVALID_HOST, 0, f"add the host NQN {HOST.host_nqn} to the allow list"),
        (FabricsStatus.CONNECT_INVALID_PARAMETERS, 256 | 1 << 16, "kvdev discover"),
        (FabricsStatus.CONNECT_INVALID_PARAMETERS, 300 | 1 << 16, "subnqn"),
        (FabricsStatus.CONNECT_INVALID_PARAMETERS, 512 | 1 << 16, HOST.host_nqn),
        (FabricsStatus.CONNECT_INVALID_PARAMETERS, 44, "smaller queue depth"),
        (FabricsStatus.CONNECT_INVALID_PARAMETERS, 48, "keep alive"),
        (FabricsStatus.CONTROLLER_BUSY, 0, "try again later"),
        (FabricsStatus.CONNECT_RESTART_DISCOVERY, 0, "kvdev discover"),
        (FabricsStatus.AUTHENTICATION_REQUIRED, 0, "authentication"),
        (FabricsStatus.INCOMPATIBLE_FORMAT, 0, "record format"),
        (0x06, 0, "internal error"),
    ],
)
def test_connect_when_refused_then_error_has_the_remedy(status: int, dw0: int, remedy: str) -> None:
    refuse = on(
        AdminOpcode.FABRICS,
        FabricsType.CONNECT,
        lambda connection, pdu: connection.send_response(pdu, status=status, dw0=dw0),
    )
    error = open_error(ControllerScript(answer=refuse))
    assert isinstance(error, CommandError)
    assert (error.sct << 8 | error.sc) == status
    assert remedy in str(error)


@pytest.mark.parametrize(
    ("bit", "kind", "text"),
    [(17, AuthenticationError, "no secret for it"), (18, UnsupportedError, "secure channel")],
)
def test_connect_when_authentication_is_demanded_then_error_has_the_remedy(
    bit: int, kind: type[KvdevError], text: str
) -> None:
    error = open_error(
        ControllerScript(
            answer=on(
                AdminOpcode.FABRICS,
                FabricsType.CONNECT,
                lambda connection, pdu: connection.send_response(pdu, dw0=7 | 1 << bit),
            )
        )
    )
    assert isinstance(error, kind)
    assert text in str(error)


def test_attach_when_second_io_queue_is_refused_then_none_stays() -> None:
    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT and sqe.cdw10 >> 16 == 2:
            connection.send_response(pdu, status=FabricsStatus.CONNECT_INVALID_PARAMETERS, dw0=42)
            return True
        return False

    error = open_error(ControllerScript(answer=answer), options=dataclasses.replace(QUICK, io_queue_count=3))
    assert "fewer I/O queues" in str(error)


# ---- properties ----


def on_property(prop: Property, value: int) -> Any:
    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc != AdminOpcode.FABRICS or sqe.fctype != FabricsType.PROPERTY_GET:
            return False
        if PropertyCommand.from_sqe(sqe).offset != prop:
            return False
        cqe = value.to_bytes(8, "little") + bytes(4) + pdu.cid.to_bytes(2, "little") + bytes(2)
        connection.send(connection.pack(0x05, cqe))
        return True

    return answer


@pytest.mark.parametrize(
    ("prop", "value", "kind", "message"),
    [
        (Property.CAP, (1 << 64) - 1, ConnectError, "CAP: expected a value, got all ones"),
        (Property.CAP, Cap(css=1, mpsmin=3, mpsmax=2).build(), ProtocolError, "MPSMAX"),
        (Property.CAP, Cap(css=1 << 7).build(), UnsupportedError, "CAP.CSS"),
        (Property.CSTS, 0, DeadlineError, "enable: expected CSTS to show it within 1 s, got 0x00000000"),
        (Property.CSTS, 2, ConnectError, "CSTS.CFS"),
        (Property.CSTS, 0xFFFFFFFF, ConnectError, "all ones"),
    ],
)
def test_enable_when_properties_are_wrong_then_error_names_them(
    prop: Property, value: int, kind: type[KvdevError], message: str
) -> None:
    error = open_error(ControllerScript(answer=on_property(prop, value)))
    assert isinstance(error, kind)
    assert message in str(error)


def test_enable_when_enabled_already_then_disabled_first() -> None:
    script = ControllerScript()
    script.cc = dataclasses.replace(script.cc, en=1)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        kv.controller(uri(peer))
        sets = [
            PropertyCommand.from_sqe(sqe).value & 1
            for sqe in script.commands
            if sqe.opc == AdminOpcode.FABRICS and sqe.fctype == FabricsType.PROPERTY_SET
        ]
        assert sets == [0, 0, 1]


# ---- Identify ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cntlid": 8}, "CNTLID: expected 0x0007 as in connect, got 0x0008"),
        ({"kas_100ms": 0}, "KAS: expected more than 0"),
        ({"ioccsz_16b": 3}, "IOCCSZ: expected at least 4, got 3"),
        ({"iorcsz_16b": 0}, "IORCSZ: expected at least 1, got 0"),
        ({"icdoff_16b": 1}, "ICDOFF: expected 0, got 1"),
    ],
)
def test_identify_when_controller_lies_then_protocol_error(change: dict[str, int], message: str) -> None:
    error = open_error(ControllerScript(identify=dataclasses.replace(GOOD_CONTROLLER, **change)))  # type: ignore[arg-type]
    assert isinstance(error, ProtocolError)
    assert message in str(error)


def on_identify(cns: int, data: bytes) -> Any:
    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc != AdminOpcode.IDENTIFY or IdentifyCommand.from_sqe(sqe).cns != cns:
            return False
        connection.send_read(pdu, data)
        return True

    return answer


def test_identify_when_name_has_no_end_then_error_names_peer_and_field() -> None:
    data = bytearray(GOOD_CONTROLLER.build())
    data[768:1024] = b"n" * 256
    error = open_error(ControllerScript(answer=on_identify(Cns.CONTROLLER, bytes(data))))
    assert isinstance(error, WireError)
    assert error.field == "subnqn"
    assert str(error).startswith("127.0.0.1:")


@pytest.mark.parametrize("size", [4, 4092])
def test_identify_when_data_is_short_then_error(size: int) -> None:
    error = open_error(ControllerScript(answer=on_identify(Cns.CONTROLLER, GOOD_CONTROLLER.build()[:size])))
    assert isinstance(error, (CommandError, ProtocolError))


def nsid_list(*nsids: int) -> bytes:
    return b"".join(nsid.to_bytes(4, "little") for nsid in nsids).ljust(4096, b"\0")


@pytest.mark.parametrize(
    ("nsids", "message"),
    [
        ((2, 1), "above 2, got 1"),
        ((1, 1), "above 1, got 1"),
        ((0xFFFFFFFF,), "4294967295"),
        ((2000,), "NN 1024"),
    ],
)
def test_namespace_list_when_wrong_then_protocol_error(nsids: tuple[int, ...], message: str) -> None:
    error = open_error(ControllerScript(answer=on_identify(Cns.ACTIVE_NSID_LIST, nsid_list(*nsids))))
    assert isinstance(error, ProtocolError)
    assert message in str(error)


def test_namespace_list_when_endless_then_bounded() -> None:
    asked: list[int] = []

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc != AdminOpcode.IDENTIFY or IdentifyCommand.from_sqe(sqe).cns != Cns.ACTIVE_NSID_LIST:
            return False
        asked.append(sqe.nsid)
        connection.send_read(pdu, nsid_list(*range(sqe.nsid + 1, sqe.nsid + 1025)))
        return True

    endless = dataclasses.replace(GOOD_CONTROLLER, nn=0xFFFFFFFE)
    error = open_error(ControllerScript(answer=answer, identify=endless))
    assert isinstance(error, UnsupportedError)
    assert len(asked) == NAMESPACE_COUNT_MAX // 1024 + 1


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"flbas": 3}, ProtocolError, "flbas"),
        ({"lbaf": (LbaFormat(lbads=12, ms=8),)}, UnsupportedError, "8 bytes of metadata"),
        ({"lbaf": (LbaFormat(lbads=0),)}, UnsupportedError, "LBADS 0"),
        ({"lbaf": (LbaFormat(lbads=8),)}, UnsupportedError, "LBADS 8"),
        ({"lbaf": (LbaFormat(lbads=63),)}, UnsupportedError, "LBADS 63"),
        ({"lbaf": (LbaFormat(lbads=255),)}, UnsupportedError, "LBADS 255"),
        ({"nsze": 1 << 63}, UnsupportedError, "NSZE"),
        ({"nsze": 0, "ncap": 0}, UsageError, "active namespaces (none), got 1"),
    ],
)
def test_namespace_when_identify_is_unusable_then_refused_with_the_reason(
    change: dict[str, Any], kind: type[KvdevError], message: str
) -> None:
    error = open_error(ControllerScript(namespaces={1: dataclasses.replace(GOOD_NAMESPACE, **change)}))
    assert isinstance(error, kind)
    assert message in str(error)


def test_namespace_when_format_index_needs_the_high_bits_then_used() -> None:
    formats = (*(LbaFormat(lbads=9) for _ in range(17)), LbaFormat(lbads=12))
    extended = dataclasses.replace(GOOD_NAMESPACE, nlbaf_0based=17, flbas=0x21, lbaf=formats)
    with (
        ScriptedPeer(ControllerScript(namespaces={1: extended})) as peer,
        Session(host=HOST, options=QUICK) as kv,
    ):
        assert kv.open_device(uri(peer, 1)).block_size_bytes == 4096


def test_namespace_when_mdts_is_smaller_than_a_block_then_refused() -> None:
    big = dataclasses.replace(GOOD_NAMESPACE, lbaf=(LbaFormat(lbads=16),))
    error = open_error(
        ControllerScript(identify=dataclasses.replace(GOOD_CONTROLLER, mdts=1), namespaces={1: big})
    )
    assert isinstance(error, UnsupportedError)
    assert "MDTS 1" in str(error)


def test_namespace_when_other_command_set_then_refused() -> None:
    error = open_error(ControllerScript(descriptors={1: NsDescriptorList(csi=2)}))
    assert "command set 0x02" in str(error)


def test_namespace_when_descriptor_runs_out_of_the_list_then_protocol_error() -> None:
    data = bytes((2, 255, 0, 0)) * 1024
    error = open_error(ControllerScript(answer=on_identify(Cns.NS_DESCRIPTOR_LIST, data)))
    assert isinstance(error, WireError)
    assert error.field == "nidl"


@pytest.mark.parametrize("kind", ["nguid", "eui64"])
def test_namespaces_when_two_share_an_identifier_then_both_refused(kind: str) -> None:
    def descriptors(value: int) -> NsDescriptorList:
        if kind == "nguid":
            return NsDescriptorList(csi=0, nguid=bytes([value]) * 16)
        return NsDescriptorList(csi=0, eui64=bytes([value]) * 8)

    same, other = descriptors(1), descriptors(2)
    script = ControllerScript(
        namespaces={1: GOOD_NAMESPACE, 2: GOOD_NAMESPACE, 3: GOOD_NAMESPACE},
        descriptors={1: same, 2: same, 3: other},
    )
    for nsid in (1, 2):
        error = open_error(script, nsid=nsid)
        assert isinstance(error, UnsupportedError)
        assert "belongs to the namespaces 1, 2" in str(error)
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        assert kv.open_device(uri(peer, 3)).block_count == 256
        assert [device.uri.rpartition("=")[2] for device in kv.open_members(f"vol+{uri(peer)}")] == ["3"]


def test_open_when_nsid_is_missing_or_wrong_then_active_ones_named() -> None:
    error = open_error(ControllerScript(), nsid=9)
    assert "active namespaces (1), got 9" in str(error)
    with (
        ScriptedPeer(ControllerScript()) as peer,
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(UsageError, match=r"active namespaces \(1\), got none"),
    ):
        kv.open_device(uri(peer))


# ---- features ----


def test_queues_when_none_granted_then_admin_works_and_open_is_refused() -> None:
    script = ControllerScript(
        answer=on(AdminOpcode.SET_FEATURES, None, lambda c, pdu: c.send_response(pdu, status=0x02))
    )
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        controller = kv.controller(uri(peer))
        assert controller.smart_log(deadline=soon()).media_errors == 0
        with pytest.raises(UnsupportedError, match="number of queues"):
            kv.open_device(uri(peer, 1))


def test_keep_alive_when_controller_raises_it_then_effective_value_is_used() -> None:
    with ScriptedPeer(ControllerScript(kato_ms=20_000)) as peer, Session(host=HOST, options=QUICK) as kv:
        controller = kv.controller(uri(peer))
        adopted = controller.channel.adopted
        assert adopted is not None
        assert (controller.kato_ms, adopted.info.keep_alive_ms) == (20_000, 20_000)


def test_keep_alive_when_effective_value_is_zero_then_protocol_error() -> None:
    error = open_error(ControllerScript(kato_ms=0))
    assert isinstance(error, ProtocolError)
    assert "KATO" in str(error)


# ---- vanishing ----


@pytest.mark.parametrize("count", range(18))
def test_open_when_target_vanishes_after_any_command_then_bounded_error(count: int) -> None:
    script = ControllerScript()

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if len(script.commands) > count:
            connection.reset()
            raise PeerClosedError("vanished")
        return False

    script.answer = answer
    if count < 14:
        assert isinstance(open_error(script), TransportError)
        return
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        try:
            kv.open_device(uri(peer, 1))
        except TransportError:
            assert count < 17


def test_command_when_target_stops_answering_then_deadline_and_close_is_bounded() -> None:
    silent = threading.Event()

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        return silent.is_set()

    with ScriptedPeer(ControllerScript(answer=answer)) as peer:
        kv = Session(host=HOST, options=QUICK)
        device = kv.open_device(uri(peer, 1))
        silent.set()
        with pytest.raises(DeadlineError):
            read_blocks(device, 0, 1, soon(0.3))
        limit = soon(3)
        kv.close()
        assert not limit.is_expired


def test_read_when_target_is_gone_then_error_says_so() -> None:
    with ScriptedPeer(ControllerScript()) as peer:
        kv = Session(host=HOST, options=QUICK)
        device = kv.open_device(uri(peer, 1))
    try:
        with pytest.raises(TransportError):
            read_blocks(device, 0, 1, soon())
    finally:
        kv.close()


def test_session_when_closed_then_nothing_more_can_be_opened() -> None:
    kv = Session(host=HOST, options=QUICK)
    kv.close()
    kv.close()
    with pytest.raises(UsageError, match="closed"):
        kv.open_device("mem:a?size=1MiB")


# ---- discovery ----

ENTRY = DiscoveryEntry(trsvcid="4420", subnqn=SUBNQN, traddr="192.0.2.1")


def discovery_uri(peer: ScriptedPeer) -> str:
    return f"{peer.address}:{peer.port}"


def test_discover_when_log_is_longer_than_a_piece_then_whole() -> None:
    entries = [dataclasses.replace(ENTRY, portid=index) for index in range(9)]
    with ScriptedPeer(ControllerScript(discovery=entries)) as peer, Session(host=HOST, options=QUICK) as kv:
        assert kv.discover(discovery_uri(peer)) == entries


def test_discover_when_log_changes_once_then_read_again() -> None:
    script = ControllerScript(discovery=[ENTRY])
    reads: list[int] = []

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.GET_LOG_PAGE:
            reads.append(GetLogPageCommand.from_sqe(sqe).byte_count)
            if len(reads) == 2:
                script.genctr += 1
                script.discovery = [ENTRY, dataclasses.replace(ENTRY, portid=2)]
        return False

    script.answer = answer
    with ScriptedPeer(script) as peer, Session(host=HOST, options=QUICK) as kv:
        assert len(kv.discover(discovery_uri(peer))) == 2
    assert len(reads) == 6


def test_discover_when_log_never_settles_then_bounded_error() -> None:
    script = ControllerScript(discovery=[ENTRY])

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        script.genctr += sqe.opc == AdminOpcode.GET_LOG_PAGE
        return False

    script.answer = answer
    with (
        ScriptedPeer(script) as peer,
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(DeadlineError, match="generation changed"),
    ):
        kv.discover(discovery_uri(peer))


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ((1).to_bytes(8, "little") + (1 << 60).to_bytes(8, "little"), "numrec"),
        ((1).to_bytes(8, "little") + bytes(8) + b"\x01\x00", "recfmt"),
    ],
)
def test_discover_when_header_is_wrong_then_error_names_the_field(header: bytes, field: str) -> None:
    answer = on(AdminOpcode.GET_LOG_PAGE, None, lambda c, pdu: c.send_read(pdu, header.ljust(1024, b"\0")))
    with (
        ScriptedPeer(ControllerScript(answer=answer)) as peer,
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(WireError) as caught,
    ):
        kv.discover(discovery_uri(peer))
    assert caught.value.field == field


# ---- association ----


@pytest.mark.parametrize("is_waiting", [False, True])
def test_io_when_admin_connection_is_lost_then_given_up_with_it(is_waiting: bool) -> None:
    """Base 3.3.2.4: the association goes with its admin connection, long before the command timeout."""
    silent = threading.Event()

    def answer(connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if silent.is_set() and sqe.opc == 2:
            peer.connections[0].reset()
            return True
        return False

    with ScriptedPeer(ControllerScript(answer=answer)) as peer, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(uri(peer, 1))
        subsystem = kv.subsystem(uri(peer))
        assert isinstance(device, NvmeNamespace)
        if is_waiting:
            silent.set()
        else:
            peer.connections[0].sock.shutdown(socket.SHUT_RDWR)
            limit = soon(5)
            while device.controller.is_alive and not limit.is_expired:
                threading.Event().wait(0.01)
        started = Deadline.after(0)
        with pytest.raises(ConnectionLostError, match="connection lost"):
            read_blocks(device, 0, 1, soon(20))
        assert started.elapsed_ms() < 5000  # of the 20 s that the command had
        event = subsystem.take_event(deadline=soon(5))
        assert event is not None and event.kind is EventKind.PATH_DOWN
        assert subsystem.path_infos[0].stage is PathStage.ENDED
