"""Answers of a controller without any socket: Identify, features, log pages, events, the keep alive clock."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from kvdev.target.controller import (
    AER_LIMIT,
    Answer,
    Controller,
    IoTotals,
    NamespaceFacts,
    Surroundings,
)
from kvdev.target.model import ListenAddress, NamespaceEntry, Subsystem, Transport
from kvdev.wire.fabrics import Cap, Cc, Crto, Csts, Property, PropertyCommand, Shn, Shst
from kvdev.wire.features import AsyncEventConfig, Fid, NumberOfQueues
from kvdev.wire.identify import (
    Cns,
    CsiControllerNvm,
    CsiIndependentNamespace,
    CsiNamespaceNvm,
    IdentifyController,
    IdentifyNamespace,
    NsDescriptorList,
    parse_nsid_list,
)
from kvdev.wire.log import (
    AnaLog,
    EffectsLog,
    FirmwareSlotLog,
    Lid,
    SmartLog,
    parse_error_log,
)
from kvdev.wire.nvme import (
    NSID_ALL,
    AdminOpcode,
    FeaturesCommand,
    GetLogPageCommand,
    IdentifyCommand,
    NvmOpcode,
    Sqe,
    Status,
    build_async_event_request,
    build_keep_alive,
)

MS = 1_000_000
UUID = uuid.UUID("11111111-2222-3333-4444-555555555555")
ENTRY = NamespaceEntry(nsid=2, bdev_name="b", uuid=UUID, nguid=UUID.bytes, eui64=b"12345678", anagrpid=2)
FACTS = NamespaceFacts(entry=ENTRY, block_size_bytes=4096, block_count=1000, has_volatile_cache=False)


@dataclass
class Around:
    """What a controller asked for, and the namespaces it sees."""

    namespaces: dict[int, NamespaceFacts] = field(default_factory=lambda: {2: FACTS})
    ready: list[bool] = field(default_factory=list)
    dropped: int = 0
    completed: list[tuple[int, Answer]] = field(default_factory=list)
    flushing: list[Controller] = field(default_factory=list)

    def surroundings(self) -> Surroundings:
        def namespaces(nqn: str) -> Mapping[int, NamespaceFacts]:
            return self.namespaces

        def drop(controller: Controller) -> None:
            self.dropped += 1

        return Surroundings(
            namespaces=namespaces,
            io_totals=lambda nqn: IoTotals(read_bytes=512_001, read_count=3, write_bytes=1, write_count=1),
            discovery_log=lambda controller: bytes(1024),
            set_ready=lambda controller, is_ready: self.ready.append(is_ready),
            drop_io_queues=drop,
            complete_held=lambda controller, handle, answer: self.completed.append((handle, answer)),
            flush_for_shutdown=self.flushing.append,
            is_persistent=lambda nqn, nsid: False,
            set_persistent=lambda nqn, nsid, is_wanted: Status.FEATURE_NOT_CHANGEABLE,
        )


def make(around: Around | None = None, *, is_enabled: bool = True, **changes: object) -> Controller:
    subsystem = Subsystem(
        nqn="nqn.2024-01.io.kvdev:t", serial_number="SN1", model_number="MN1", allow_any_host=True
    )
    controller = Controller(
        subsystem=replace(subsystem, **changes),  # type: ignore[arg-type]
        transport=Transport(),
        cntlid=9,
        host_nqn="nqn.2024-01.io.kvdev:host",
        host_id=UUID,
        listen=ListenAddress("127.0.0.1", 4420),
        kato_ms=15_000,
        around=(around or Around()).surroundings(),
    )
    if is_enabled:
        assert run(controller, property_set(Cc(en=1, iosqes=6, iocqes=4))).status == 0
    return controller


def run(controller: Controller, sqe: Sqe, data: bytes = b"", *, at_ms: int = 0, handle: int = 1) -> Answer:
    return controller.execute(sqe, data, handle=handle, arrival_ns=at_ms * MS)


def property_set(cc: Cc) -> Sqe:
    return PropertyCommand(Property.CC, 4, is_set=True, value=cc.build()).to_sqe()


def identify(cns: int, *, nsid: int = 0, csi: int = 0) -> Sqe:
    return IdentifyCommand(cns=cns, nsid=nsid, csi=csi).to_sqe()


def log_page(lid: int, byte_count: int = 512, **values: int) -> Sqe:
    return GetLogPageCommand(lid=lid, byte_count=byte_count, **values).to_sqe()  # type: ignore[arg-type]


def get_feature(fid: int, byte_count: int = 0, value: int = 0) -> Sqe:
    return FeaturesCommand(fid=fid, is_set=False, value=value, byte_count=byte_count).to_sqe()


def set_feature(fid: int, value: int, **more: object) -> Sqe:
    return FeaturesCommand(fid=fid, is_set=True, value=value, **more).to_sqe()  # type: ignore[arg-type]


def code(answer: Answer) -> int:
    return answer.status & 0x7FF


# ---- properties ----


def test_properties_have_their_values() -> None:
    controller = make(is_enabled=False)

    def read(offset: int, size: int) -> int:
        answer = run(controller, PropertyCommand(offset, size, is_set=False).to_sqe())
        assert answer.status == 0
        return answer.dw0 | answer.dw1 << 32

    cap = Cap.parse(read(Property.CAP, 8))
    assert cap.mqes_0based == 127 and cap.cqr == 1 and cap.has_nvm_command_set and cap.mpsmin == 0
    assert Crto.parse(read(Property.CRTO, 4)).crwmt_500ms == cap.to_500ms > 0
    assert Csts.parse(read(Property.CSTS, 4)) == Csts()
    run(controller, property_set(Cc(en=1)))
    assert Csts.parse(read(Property.CSTS, 4)).rdy == 1
    assert Cc.parse(read(Property.CC, 4)).en == 1


@pytest.mark.parametrize(
    "cc", [Cc(mps=1), Cc(ams=1), Cc(css=1), Cc(css=6), Cc(en=1, iosqes=5), Cc(en=1, iocqes=5), Cc(shn=3)]
)
def test_a_configuration_that_is_not_supported_is_refused(cc: Cc) -> None:
    controller = make(is_enabled=False)
    assert code(run(controller, property_set(cc))) == Status.INVALID_FIELD
    assert controller.cc == Cc()


def test_enable_reset_and_shutdown_reach_the_data_path() -> None:
    around = Around()
    controller = make(around)
    run(controller, property_set(Cc()))
    assert around.ready == [True, False] and around.dropped == 1
    run(controller, property_set(Cc(en=1)))
    run(controller, property_set(Cc(en=1, shn=Shn.NORMAL)))
    assert around.ready[2:] == [True, False] and not controller.is_timer_active
    assert around.flushing == [controller] and controller.csts.shst == Shst.OCCURRING
    controller.shutdown_done()
    assert controller.csts.shst == Shst.COMPLETE


def test_a_reset_forgets_features_and_ends_held_requests() -> None:
    around = Around()
    controller = make(around)
    run(controller, build_async_event_request(cid=1), handle=77)
    run(controller, set_feature(Fid.ASYNC_EVENT_CONFIG, AsyncEventConfig(namespace_attribute=1).build()))
    run(controller, property_set(Cc()))
    assert around.completed == [(77, Answer(status=Status.ABORTED_SQ_DELETION))]
    run(controller, property_set(Cc(en=1)))
    assert run(controller, get_feature(Fid.ASYNC_EVENT_CONFIG)).dw0 == 0


# ---- keep alive (a simulated clock: time comes in with the commands) ----


def test_the_timer_runs_only_while_ready_and_restarts_with_keep_alive() -> None:
    controller = make(is_enabled=False)
    assert not controller.is_timer_active
    run(controller, property_set(Cc(en=1)), at_ms=1000)
    assert controller.is_timer_active
    assert controller.kato_ms == 20_000  # 15 s rounded up to KAS
    assert controller.expires_ns == 21_000 * MS
    run(controller, identify(Cns.CONTROLLER), at_ms=20_000)
    assert controller.expires_ns == 21_000 * MS  # command based: other commands do not count
    run(controller, build_keep_alive(), at_ms=20_999)
    assert controller.expires_ns == 40_999 * MS
    run(controller, set_feature(Fid.KEEP_ALIVE_TIMER, 30_000), at_ms=30_000)
    assert controller.expires_ns == 60_000 * MS
    run(controller, property_set(Cc(en=1, shn=Shn.NORMAL)), at_ms=31_000)
    assert not controller.is_timer_active


# ---- Identify ----


def test_identify_controller_has_what_hosts_look_for() -> None:
    data = IdentifyController.parse(run(make(), identify(Cns.CONTROLLER)).data)
    assert (data.sn, data.mn, data.cntlid, data.subnqn) == ("SN1", "MN1", 9, "nqn.2024-01.io.kvdev:t")
    assert data.kas_100ms == 100 and data.cntrltype == 1 and data.maxcmd == 128
    assert data.ioccsz_16b == 260 and data.iorcsz_16b == 1 and data.icdoff_16b == 0
    assert data.sgls & 1 and data.sqes == 0x66 and data.cqes == 0x44 and data.nn == 32
    assert data.vwc == 0 and data.mdts == 5 and data.cqt_ms > 0 and data.anacap == 0


def test_a_volatile_cache_is_reported_when_a_namespace_has_one() -> None:
    around = Around({2: FACTS, 3: replace(FACTS, has_volatile_cache=True)})
    controller = make(around)
    data = IdentifyController.parse(run(controller, identify(Cns.CONTROLLER)).data)
    assert data.vwc == 0b101
    assert run(controller, get_feature(Fid.VOLATILE_WRITE_CACHE)).dw0 == 1
    assert code(run(controller, set_feature(Fid.VOLATILE_WRITE_CACHE, 0))) == Status.FEATURE_NOT_CHANGEABLE
    assert code(run(make(), get_feature(Fid.VOLATILE_WRITE_CACHE))) == Status.INVALID_FIELD


def test_namespace_structures() -> None:
    controller = make()
    data = IdentifyNamespace.parse(run(controller, identify(Cns.NAMESPACE, nsid=2)).data)
    assert (data.nsze, data.ncap, data.lba_format.block_size_bytes) == (1000, 1000, 4096)
    assert data.nguid == UUID.bytes and data.eui64 == b"12345678"
    ids = NsDescriptorList.parse(run(controller, identify(Cns.NS_DESCRIPTOR_LIST, nsid=2)).data)
    assert ids == NsDescriptorList(eui64=b"12345678", nguid=UUID.bytes, uuid=UUID, csi=0)
    independent = CsiIndependentNamespace.parse(
        run(controller, identify(Cns.CSI_INDEPENDENT_NAMESPACE, nsid=2)).data
    )
    assert independent.is_ready
    nvm = CsiNamespaceNvm.parse(run(controller, identify(Cns.CSI_NAMESPACE, nsid=2)).data)
    assert nvm.elbaf[0] == 0
    limits = CsiControllerNvm.parse(run(controller, identify(Cns.CSI_CONTROLLER)).data)
    assert limits.wzsl == 0


def test_namespace_lists() -> None:
    controller = make(Around(dict.fromkeys((1, 2, 7), FACTS)))
    for cns in (Cns.ACTIVE_NSID_LIST, Cns.CSI_ACTIVE_NSID_LIST):
        assert parse_nsid_list(run(controller, identify(cns)).data) == [1, 2, 7]
        assert parse_nsid_list(run(controller, identify(cns, nsid=2)).data) == [7]
        assert code(run(controller, identify(cns, nsid=NSID_ALL))) == Status.INVALID_NAMESPACE_OR_FORMAT


def test_namespaces_that_are_not_there() -> None:
    controller = make()
    assert run(controller, identify(Cns.NAMESPACE, nsid=3)).data == bytes(4096)  # inactive: zeroes
    for nsid in (0, 33, NSID_ALL):
        assert code(run(controller, identify(Cns.NAMESPACE, nsid=nsid))) == Status.INVALID_NAMESPACE_OR_FORMAT
    for cns in (Cns.NS_DESCRIPTOR_LIST, Cns.CSI_NAMESPACE, Cns.CSI_INDEPENDENT_NAMESPACE):
        assert code(run(controller, identify(cns, nsid=3))) == Status.INVALID_NAMESPACE_OR_FORMAT


def test_identify_that_is_not_supported_is_refused() -> None:
    controller = make()
    for sqe in (
        identify(0x77),
        identify(Cns.CSI_NAMESPACE, nsid=2, csi=1),
        identify(Cns.CSI_CONTROLLER, csi=2),
    ):
        assert code(run(controller, sqe)) == Status.INVALID_FIELD
    short = replace(identify(Cns.CONTROLLER), sgl_len=4092)
    assert code(run(controller, short)) == Status.DATA_SGL_LENGTH_INVALID


# ---- features ----


def test_the_number_of_queues_is_granted_up_to_the_limit() -> None:
    controller = make()
    for asked, granted in (((4, 4), 4), ((1, 3), 1), ((500, 500), 127)):
        answer = run(controller, set_feature(Fid.NUMBER_OF_QUEUES, NumberOfQueues(*asked).build()))
        assert NumberOfQueues.parse(answer.dw0).qpair_count == granted
    assert NumberOfQueues.parse(run(controller, get_feature(Fid.NUMBER_OF_QUEUES)).dw0).sq_count == 127
    assert code(run(controller, set_feature(Fid.NUMBER_OF_QUEUES, 0xFFFF0001))) == Status.INVALID_FIELD
    controller.io_connections[1] = 5
    assert code(run(controller, set_feature(Fid.NUMBER_OF_QUEUES, 0))) == Status.COMMAND_SEQUENCE_ERROR


def test_features_with_data_and_without() -> None:
    controller = make()
    answer = run(controller, get_feature(Fid.HOST_IDENTIFIER, 16, value=1))
    assert answer.data == UUID.bytes
    assert code(run(controller, get_feature(Fid.HOST_IDENTIFIER, 16))) == Status.INVALID_FIELD
    assert code(run(controller, get_feature(Fid.HOST_IDENTIFIER, 8, 1))) == Status.DATA_SGL_LENGTH_INVALID
    assert run(controller, set_feature(Fid.HOST_BEHAVIOR_SUPPORT, 0), b"\1" + bytes(511)).status == 0
    assert run(controller, get_feature(Fid.HOST_BEHAVIOR_SUPPORT, 512)).data[0] == 1
    short = run(controller, set_feature(Fid.HOST_BEHAVIOR_SUPPORT, 0), b"\1")
    assert code(short) == Status.DATA_SGL_LENGTH_INVALID
    assert run(controller, set_feature(Fid.ARBITRATION, 7)).status == 0
    assert run(controller, get_feature(Fid.ARBITRATION)).dw0 == 7


@pytest.mark.parametrize(
    ("sqe", "status"),
    [
        (set_feature(Fid.ARBITRATION, 0, save=True), Status.FEATURE_NOT_SAVEABLE),
        (set_feature(0x7E, 0), Status.INVALID_FIELD),
        (get_feature(0x7E), Status.INVALID_FIELD),
        (set_feature(Fid.HOST_IDENTIFIER, 1), Status.COMMAND_SEQUENCE_ERROR),
        (set_feature(Fid.POWER_MANAGEMENT, 1), Status.INVALID_FIELD),
        (set_feature(Fid.ASYNC_EVENT_CONFIG, 1 << 31), Status.INVALID_FIELD),
        (set_feature(Fid.KEEP_ALIVE_TIMER, 0), Status.KEEP_ALIVE_INVALID),
    ],
)
def test_features_that_are_refused(sqe: Sqe, status: Status) -> None:
    assert code(run(make(), sqe)) == status


# ---- log pages ----


def test_log_pages_parse() -> None:
    controller = make()
    smart = SmartLog.parse(run(controller, log_page(Lid.SMART)).data)
    assert (smart.data_units_read, smart.data_units_written, smart.host_read_commands) == (2, 1, 3)
    assert FirmwareSlotLog.parse(run(controller, log_page(Lid.FIRMWARE_SLOT)).data).active_slot == 1
    effects = EffectsLog.parse(run(controller, log_page(Lid.EFFECTS, 4096)).data)
    assert NvmOpcode.WRITE in effects.io and AdminOpcode.KEEP_ALIVE in effects.admin
    assert NvmOpcode.COPY in effects.io and NvmOpcode.WRITE_UNCORRECTABLE not in effects.io
    supported = run(controller, log_page(Lid.SUPPORTED, 1024)).data
    assert supported[4 * Lid.SMART] == 1 and supported[4 * Lid.ANA] == 0


def test_the_error_log_has_the_newest_first_and_is_bounded() -> None:
    controller = make()
    for cid in range(20):
        run(controller, replace(identify(0x77), cid=cid))
    entries = parse_error_log(run(controller, log_page(Lid.ERROR, 1024)).data)
    assert [entry.cid for entry in entries] == list(range(19, 3, -1))
    assert entries[0].error_count == 20 and entries[0].status_p >> 1 & 0x7FF == Status.INVALID_FIELD


def test_the_ana_log_is_there_with_ana_reporting_only() -> None:
    assert code(run(make(), log_page(Lid.ANA))) == Status.INVALID_LOG_PAGE
    controller = make(ana_reporting=True)
    identified = IdentifyController.parse(run(controller, identify(Cns.CONTROLLER)).data)
    assert identified.cmic & 8 and identified.anagrpmax == 32
    log = AnaLog.parse(run(controller, log_page(Lid.ANA)).data[: 16 + 36], anagrpmax=32)
    assert [(group.anagrpid, group.nsids) for group in log.groups] == [(2, (2,))]


def test_log_pages_are_cut_and_bad_requests_refused() -> None:
    controller = make()
    whole = run(controller, log_page(Lid.FIRMWARE_SLOT)).data
    part = run(controller, log_page(Lid.FIRMWARE_SLOT, 16, offset=8)).data
    assert part == whole[8:24]
    assert run(controller, log_page(Lid.FIRMWARE_SLOT, 8, offset=512)).data == bytes(8)
    assert code(run(controller, log_page(Lid.FIRMWARE_SLOT, 8, offset=516))) == Status.INVALID_FIELD
    assert code(run(controller, log_page(0xC7))) == Status.INVALID_LOG_PAGE
    assert code(run(controller, log_page(Lid.SMART, nsid=1))) == Status.INVALID_FIELD
    short = replace(log_page(Lid.SMART), sgl_len=508)
    assert code(run(controller, short)) == Status.DATA_SGL_LENGTH_INVALID


# ---- events ----


def test_events_wait_for_a_request_and_for_their_feature() -> None:
    around = Around()
    controller = make(around)
    controller.notify_namespace_changed(2)
    run(controller, build_async_event_request(cid=1), handle=5)
    assert around.completed == []
    run(controller, set_feature(Fid.ASYNC_EVENT_CONFIG, AsyncEventConfig(namespace_attribute=1).build()))
    assert [handle for handle, _ in around.completed] == [5]
    controller.notify_namespace_changed(3)
    run(controller, build_async_event_request(cid=2), handle=6)
    assert len(around.completed) == 1  # masked until the log is read
    run(controller, log_page(Lid.CHANGED_NS, 4096, retain_event=True))
    assert len(around.completed) == 1
    run(controller, log_page(Lid.CHANGED_NS, 4096))
    assert [handle for handle, _ in around.completed] == [5, 6]


def test_requests_beyond_the_limit_are_refused() -> None:
    controller = make()
    for cid in range(AER_LIMIT):
        assert run(controller, build_async_event_request(cid=cid), handle=cid).is_held
    assert code(run(controller, build_async_event_request(cid=9), handle=9)) == Status.AER_LIMIT_EXCEEDED


# ---- the rest ----


def test_commands_before_enable_and_unknown_ones_are_refused() -> None:
    controller = make(is_enabled=False)
    assert code(run(controller, identify(Cns.CONTROLLER))) == Status.COMMAND_SEQUENCE_ERROR
    controller = make()
    for opcode in (AdminOpcode.FORMAT_NVM, AdminOpcode.CREATE_IO_SQ, AdminOpcode.SANITIZE, 0xC0):
        assert code(run(controller, Sqe(opc=opcode))) == Status.INVALID_OPCODE
    assert code(run(controller, Sqe(opc=AdminOpcode.KEEP_ALIVE, flags=0x41))) == Status.INVALID_FIELD


def test_a_discovery_controller_knows_only_its_own() -> None:
    controller = make(is_discovery=True)
    data = IdentifyController.parse(run(controller, identify(Cns.CONTROLLER)).data)
    assert data.cntrltype == 2 and data.oaes >> 31 == 1
    assert len(run(controller, log_page(Lid.DISCOVERY, 1024)).data) == 1024
    for sqe, status in (
        (identify(Cns.ACTIVE_NSID_LIST), Status.INVALID_FIELD),
        (log_page(Lid.SMART), Status.INVALID_LOG_PAGE),
        (set_feature(Fid.NUMBER_OF_QUEUES, 0), Status.INVALID_FIELD),
        (get_feature(Fid.NUMBER_OF_QUEUES), Status.INVALID_FIELD),
        (Sqe(opc=AdminOpcode.ABORT), Status.INVALID_OPCODE),
    ):
        assert code(run(controller, sqe)) == status
