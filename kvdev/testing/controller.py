"""A scripted controller: a whole association as data, so that a test changes the one answer it is about.

Not here: the connection and its PDUs (``peer``); a target that keeps data for real use (``kvdev.target``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvdev.testing.peer import MemoryScript, PduFromHost, PeerConnection
from kvdev.wire.fabrics import (
    Cap,
    Cc,
    ConnectCommand,
    ConnectData,
    Csts,
    FabricsType,
    Property,
    PropertyCommand,
)
from kvdev.wire.features import Fid
from kvdev.wire.identify import (
    ONCS_DSM,
    ONCS_WRITE_ZEROES,
    Cns,
    CsiControllerNvm,
    IdentifyController,
    IdentifyNamespace,
    LbaFormat,
    NsDescriptorList,
    build_nsid_list,
)
from kvdev.wire.log import DiscoveryEntry, Lid, SmartLog, build_discovery_log, cut_log
from kvdev.wire.nvme import AdminOpcode, FeaturesCommand, GetLogPageCommand, IdentifyCommand, Sqe, Status

SUBNQN = "nqn.2024-01.io.example:scripted"
Answer = Callable[[PeerConnection, PduFromHost, Sqe], bool]
"""Handles a command and returns True, or returns False to leave it to the script's default."""

GOOD_CONTROLLER = IdentifyController(
    sn="S1",
    mn="scripted",
    fr="1",
    cntlid=7,
    ver=0x20100,
    cntrltype=1,
    kas_100ms=10,
    maxcmd=64,
    nn=1024,
    oncs=ONCS_DSM | ONCS_WRITE_ZEROES,
    subnqn=SUBNQN,
    ioccsz_16b=4 + 8192 // 16,
    iorcsz_16b=1,
    lpa=1 << 2,
)
BLOCK_SIZE_BYTES = 4096
BLOCK_COUNT = 256
GOOD_NAMESPACE = IdentifyNamespace(
    nsze=BLOCK_COUNT, ncap=BLOCK_COUNT, nuse=BLOCK_COUNT, lbaf=(LbaFormat(lbads=12),)
)


@dataclass
class ControllerScript:
    """A well-behaved controller with one 1 MiB namespace; a test replaces a field or hooks ``answer``."""

    answer: Answer = lambda _connection, _pdu, _sqe: False
    identify: IdentifyController = GOOD_CONTROLLER
    namespaces: dict[int, IdentifyNamespace] = field(default_factory=lambda: {1: GOOD_NAMESPACE})
    descriptors: dict[int, NsDescriptorList] = field(default_factory=dict)
    cap: Cap = field(default_factory=lambda: Cap(mqes_0based=127, to_500ms=2, css=1, mpsmax=4))
    cntlid: int = 7
    queue_count: int = 4
    kato_ms: int | None = None
    """Effective keep alive timeout; None: as the host asks."""
    discovery: list[DiscoveryEntry] = field(default_factory=list)
    genctr: int = 1
    cc: Cc = field(default_factory=Cc)
    commands: list[Sqe] = field(default_factory=list)
    connects: list[ConnectData] = field(default_factory=list)
    memory: bytearray = field(default_factory=lambda: bytearray(BLOCK_COUNT * BLOCK_SIZE_BYTES))

    def __call__(self, connection: PeerConnection) -> None:
        """One connection: the IC exchange, Connect, then commands of that queue until the host closes."""
        connection.accept_ic()
        qid = 0
        while True:
            pdu = connection.receive_command()
            sqe = Sqe.parse(pdu.sqe)
            self.commands.append(sqe)
            if sqe.opc == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT:
                qid = ConnectCommand.from_sqe(sqe).qid
            if self.answer(connection, pdu, sqe):
                continue
            if qid and sqe.opc != AdminOpcode.FABRICS:
                MemoryScript(self.memory, block_size_bytes=BLOCK_SIZE_BYTES).serve(connection, pdu)
            else:
                self.serve(connection, pdu, sqe)

    def serve(self, connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> None:
        """The right answer to a Fabrics or admin command."""
        if sqe.opc == AdminOpcode.FABRICS:
            self._serve_fabrics(connection, pdu, sqe)
        elif sqe.opc == AdminOpcode.IDENTIFY:
            data = self._identify(IdentifyCommand.from_sqe(sqe))
            if data is None:
                connection.send_response(pdu, status=Status.INVALID_FIELD)
            else:
                connection.send_read(pdu, data)
        elif sqe.opc == AdminOpcode.GET_LOG_PAGE:
            log = GetLogPageCommand.from_sqe(sqe)
            connection.send_read(
                pdu, cut_log(self._log(log.lid), offset=log.offset, byte_count=log.byte_count)
            )
        elif sqe.opc in (AdminOpcode.GET_FEATURES, AdminOpcode.SET_FEATURES):
            connection.send_response(pdu, dw0=self._feature(FeaturesCommand.from_sqe(sqe)))
        elif sqe.opc == AdminOpcode.KEEP_ALIVE:
            connection.send_response(pdu)
        elif sqe.opc != AdminOpcode.ASYNC_EVENT_REQUEST:
            connection.send_response(pdu, status=Status.INVALID_OPCODE)

    def _serve_fabrics(self, connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> None:
        if sqe.fctype == FabricsType.CONNECT:
            self.connects.append(ConnectData.parse(pdu.data))
            if ConnectCommand.from_sqe(sqe).qid == 0 and self.kato_ms is None:
                self.kato_ms = ConnectCommand.from_sqe(sqe).kato_ms
            connection.send_response(pdu, dw0=self.cntlid)
            return
        command = PropertyCommand.from_sqe(sqe)
        if command.is_set:
            self.cc = Cc.parse(command.value)
            connection.send_response(pdu)
            return
        values = {
            Property.CAP: self.cap.build(),
            Property.VS: self.identify.ver,
            Property.CC: self.cc.build(),
            Property.CSTS: Csts(rdy=self.cc.en, shst=2 if self.cc.shn else 0).build(),
        }
        value = values.get(Property(command.offset), 0)
        connection.send(
            connection.pack_response(pdu.cid, dw0=value & 0xFFFFFFFF)
            if value < 1 << 32
            else connection.pack(0x05, _cqe64(pdu.cid, value))
        )

    def _identify(self, command: IdentifyCommand) -> bytes | None:
        if command.cns == Cns.CONTROLLER:
            return self.identify.build()
        if command.cns == Cns.ACTIVE_NSID_LIST:
            return build_nsid_list(self.namespaces, after_nsid=command.nsid)
        if command.cns == Cns.NAMESPACE:
            return self.namespaces.get(command.nsid, IdentifyNamespace(lbaf=())).build()
        if command.cns == Cns.NS_DESCRIPTOR_LIST:
            return self.descriptors.get(command.nsid, NsDescriptorList(csi=0)).build()
        if command.cns == Cns.CSI_CONTROLLER:
            return CsiControllerNvm().build()
        return None

    def _log(self, lid: int) -> bytes:
        if lid == Lid.DISCOVERY:
            return build_discovery_log(self.discovery, genctr=self.genctr)
        if lid == Lid.SMART:
            return SmartLog().build()
        return bytes(4096)

    def _feature(self, command: FeaturesCommand) -> int:
        if command.fid == Fid.NUMBER_OF_QUEUES:
            return (self.queue_count - 1) | (self.queue_count - 1) << 16
        if command.fid == Fid.KEEP_ALIVE_TIMER:
            return self.kato_ms or 0
        return 0


def _cqe64(cid: int, value: int) -> bytes:
    """A successful completion entry whose result takes both result dwords."""
    return value.to_bytes(8, "little") + bytes(4) + cid.to_bytes(2, "little") + bytes(2)
