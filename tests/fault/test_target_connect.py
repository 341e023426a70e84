"""Connect in all its wrong ways, allow lists, associations, keep alive, discovery and events of the target."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvdev.target.model import Transport
from kvdev.testing.raw_host import TEST_HOST_NQN, RawHost, connected_admin, connected_io
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.fabrics import (
    DISCOVERY_NQN,
    Cc,
    ConnectCommand,
    Csts,
    FabricsType,
    InvalidParameter,
    Property,
    Shn,
    Shst,
)
from kvdev.wire.features import AsyncEventConfig, Fid
from kvdev.wire.identify import Cns, IdentifyController, parse_nsid_list
from kvdev.wire.log import (
    DISCOVERY_HEADER_BYTES,
    ChangedNsLog,
    DiscoveryEntry,
    DiscoveryHeader,
    Lid,
    parse_discovery_entries,
)
from kvdev.wire.nvme import (
    AbortCommand,
    AsyncEvent,
    Cqe,
    FabricsStatus,
    FeaturesCommand,
    GetLogPageCommand,
    IdentifyCommand,
    Notice,
    Status,
    build_async_event_request,
    build_flush,
    build_keep_alive,
)

OTHER_HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-0000000000ff"
PRIVATE_NQN = "nqn.2024-01.io.kvdev:private"
QUICK = Transport(kas=1, min_kato=100)


@pytest.fixture(scope="module")
def target() -> Iterator[RunningTarget]:
    with running_target(transport=Transport(max_io_qpairs_per_ctrlr=4)) as running:
        running.add_subsystem(PRIVATE_NQN, hosts=[OTHER_HOST])
        yield running


@pytest.fixture
def host(target: RunningTarget) -> Iterator[RawHost]:
    with RawHost(target.address, target.port) as raw:
        raw.exchange_ic()
        yield raw


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("the target did not get there")


def refused_field(host: RawHost, command: ConnectCommand, data: bytes) -> str:
    reply = host.execute(command.to_sqe(), data)
    assert reply.cqe.status & 0x7FF == FabricsStatus.CONNECT_INVALID_PARAMETERS
    field = InvalidParameter.parse(reply.cqe.dw0).field
    # A controller that has ended a moment ago is no reason to give up on the subsystem.
    assert reply.cqe.dnr == (command.qid == 0 or field != "cntlid")
    return field


# ---- Connect ----


def test_an_unknown_record_format_is_refused(target: RunningTarget, host: RawHost) -> None:
    command = ConnectCommand(qid=0, sqsize_0based=31, recfmt=1)
    reply = host.execute(command.to_sqe(), host.connect_data(target.nqn))
    assert reply.cqe.status & 0x7FF == FabricsStatus.INCOMPATIBLE_FORMAT


@pytest.mark.parametrize("sqsize", [0, 128, 65535])
def test_a_queue_size_outside_the_limits_is_refused(
    target: RunningTarget, host: RawHost, sqsize: int
) -> None:
    command = ConnectCommand(qid=0, sqsize_0based=sqsize)
    assert refused_field(host, command, host.connect_data(target.nqn)) == "sqsize"


def test_an_unknown_subsystem_is_refused(host: RawHost) -> None:
    command = ConnectCommand(qid=0, sqsize_0based=31)
    assert refused_field(host, command, host.connect_data("nqn.2024-01.io.kvdev:none")) == "subnqn"


def test_a_host_name_that_is_none_is_refused(target: RunningTarget, host: RawHost) -> None:
    command = ConnectCommand(qid=0, sqsize_0based=31)
    host.hostnqn = "me"
    assert refused_field(host, command, host.connect_data(target.nqn)) == "hostnqn"
    data = bytearray(host.connect_data(target.nqn))
    data[512:768] = b"n" * 256  # no NUL
    assert refused_field(host, command, bytes(data)) == "hostnqn"
    data = bytearray(host.connect_data(target.nqn))
    data[256:512] = b"\xff" * 256
    assert refused_field(host, command, bytes(data)) == "subnqn"


def test_a_host_id_of_zero_is_refused(target: RunningTarget, host: RawHost) -> None:
    host.hostid = bytes(16)
    command = ConnectCommand(qid=0, sqsize_0based=31)
    assert refused_field(host, command, host.connect_data(target.nqn)) == "hostid"


def test_a_chosen_controller_id_is_refused(target: RunningTarget, host: RawHost) -> None:
    command = ConnectCommand(qid=0, sqsize_0based=31)
    assert refused_field(host, command, host.connect_data(target.nqn, cntlid=5)) == "cntlid"


def test_connect_data_of_another_length_is_refused(target: RunningTarget, host: RawHost) -> None:
    data = host.connect_data(target.nqn)
    sqe = replace(ConnectCommand(qid=0, sqsize_0based=31).to_sqe(), sgl_len=1020)
    assert host.execute(sqe, data[:1020]).cqe.status & 0x7FF == Status.DATA_SGL_LENGTH_INVALID
    # After all refusals the same connection may still connect.
    assert host.connect(target.nqn).cqe.is_success


def test_a_host_that_is_not_on_the_list_is_refused(target: RunningTarget, host: RawHost) -> None:
    reply = host.connect(PRIVATE_NQN)
    assert reply.cqe.status & 0x7FF == FabricsStatus.CONNECT_INVALID_HOST
    host.hostnqn = OTHER_HOST
    assert host.connect(PRIVATE_NQN).cqe.is_success


def test_a_subsystem_is_reached_only_through_its_listeners(target: RunningTarget) -> None:
    where = target.model.add_listener(PRIVATE_NQN, address="127.0.0.1", port=0)
    with RawHost(where.address, where.port) as host:
        host.exchange_ic()
        assert host.connect(target.nqn).cqe.status & 0x7FF == FabricsStatus.CONNECT_INVALID_HOST
        host.hostnqn = OTHER_HOST
        assert host.connect(PRIVATE_NQN).cqe.is_success
        target.model.remove_listener(PRIVATE_NQN, address=where.address, port=where.port)
        assert host.wait_closed() == b""
    with pytest.raises(ConnectionRefusedError):
        RawHost(where.address, where.port)


def test_taking_a_host_off_the_list_ends_its_controllers(target: RunningTarget) -> None:
    target.model.add_host(PRIVATE_NQN, TEST_HOST_NQN)
    with (
        connected_admin(target.address, target.port, PRIVATE_NQN) as admin,
        connected_io(admin, PRIVATE_NQN) as io,
    ):
        target.model.remove_host(PRIVATE_NQN, TEST_HOST_NQN)
        assert admin.wait_closed() == b"" and io.wait_closed() == b""


def test_io_connects_must_match_their_controller(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, target.nqn) as admin:

        def attempt(change: Callable[[RawHost], None], *, qid: int = 1, cntlid: int | None = None) -> str:
            with RawHost(target.address, target.port) as host:
                host.exchange_ic()
                change(host)
                data = host.connect_data(target.nqn, cntlid=admin.cntlid if cntlid is None else cntlid)
                return refused_field(host, ConnectCommand(qid=qid, sqsize_0based=31), data)

        def change_name(host: RawHost) -> None:
            host.hostnqn = OTHER_HOST

        def change_id(host: RawHost) -> None:
            host.hostid = bytes(15) + b"\1"

        assert attempt(lambda host: None, cntlid=0xFFFF) == "cntlid"
        assert attempt(lambda host: None, cntlid=0xFFE0) == "cntlid"
        assert attempt(change_name) == "hostnqn"
        assert attempt(change_id) == "hostid"
        assert attempt(lambda host: None, qid=5) == "qid"
        with connected_io(admin, target.nqn, qid=4), RawHost(target.address, target.port) as again:
            again.exchange_ic()
            reply = again.connect(target.nqn, qid=4, cntlid=admin.cntlid)
            assert reply.cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR


def test_io_queues_need_an_enabled_controller(target: RunningTarget, host: RawHost) -> None:
    assert host.connect(target.nqn).cqe.is_success
    with RawHost(target.address, target.port) as io:
        io.exchange_ic()
        reply = io.connect(target.nqn, qid=1, cntlid=host.cntlid)
        assert reply.cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
        host.enable()
        assert io.connect(target.nqn, qid=1, cntlid=host.cntlid).cqe.is_success
        assert io.execute(build_flush(nsid=1)).cqe.is_success
        # A second Connect, and other Fabrics commands, have no place on an I/O queue.
        reply = io.connect(target.nqn, qid=1, cntlid=host.cntlid)
        assert reply.cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
        assert io.property_get(0, 8).cqe.status & 0x7FF == Status.INVALID_FIELD


def test_controller_ids_come_in_turn_and_are_not_reused_at_once(target: RunningTarget) -> None:
    seen = []
    for _ in range(3):
        with connected_admin(target.address, target.port, target.nqn) as admin:
            seen.append(admin.cntlid)
        wait_until(lambda: not target.service.controllers(target.nqn))
    assert len(set(seen)) == 3


def test_a_subsystem_without_free_controller_ids_is_busy() -> None:
    from kvdev.testing.target import _subsystem

    nqn = "nqn.2024-01.io.kvdev:few"
    with running_target() as target:
        target.model.create_subsystem(replace(_subsystem(nqn, None), min_cntlid=7, max_cntlid=8))
        target.model.add_listener(nqn, address=target.address, port=target.port)
        with (
            connected_admin(target.address, target.port, nqn) as first,
            connected_admin(target.address, target.port, nqn) as second,
            RawHost(target.address, target.port) as third,
        ):
            assert {first.cntlid, second.cntlid} == {7, 8}
            third.exchange_ic()
            reply = third.connect(nqn)
            assert reply.cqe.status & 0x7FF == FabricsStatus.CONTROLLER_BUSY and not reply.cqe.dnr


# ---- associations ----


def test_losing_the_admin_connection_ends_the_io_queues(target: RunningTarget) -> None:
    admin = connected_admin(target.address, target.port, target.nqn)
    with (
        connected_io(admin, target.nqn, qid=1) as first,
        connected_io(admin, target.nqn, qid=2) as second,
        connected_admin(target.address, target.port, target.nqn) as other,
        connected_io(other, target.nqn) as alive,
    ):
        admin.close()
        assert first.wait_closed() == b"" and second.wait_closed() == b""
        assert alive.execute(build_flush(nsid=1)).cqe.is_success


def test_losing_an_io_connection_ends_that_queue_only(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, target.nqn) as admin:
        connected_io(admin, target.nqn, qid=1).close()
        wait_until(lambda: target.service.controllers(target.nqn)[0].io_qpair_count == 0)
        with connected_io(admin, target.nqn, qid=1) as again:
            assert again.execute(build_flush(nsid=1)).cqe.is_success
        assert admin.execute(build_keep_alive()).cqe.is_success


def test_shutdown_completes_and_stops_io(target: RunningTarget) -> None:
    with (
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn) as io,
    ):
        cc = Cc(en=1, iosqes=6, iocqes=4, shn=Shn.NORMAL)
        assert admin.property_set(Property.CC, cc.build()).cqe.is_success
        status = Csts.parse(admin.property_get(Property.CSTS, 4).cqe.dw0)
        assert status.shst == Shst.COMPLETE
        assert io.execute(build_flush(nsid=1)).cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR


def test_a_reset_ends_the_io_queues_and_keeps_the_admin_queue(target: RunningTarget) -> None:
    with (
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn) as io,
    ):
        assert admin.property_set(Property.CC, Cc().build()).cqe.is_success
        assert Csts.parse(admin.property_get(Property.CSTS, 4).cqe.dw0).rdy == 0
        assert io.wait_closed() == b""
        assert admin.execute(build_keep_alive()).cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
        admin.enable()
        with connected_io(admin, target.nqn) as again:
            assert again.execute(build_flush(nsid=1)).cqe.is_success


def test_removing_a_subsystem_ends_its_controllers() -> None:
    with running_target() as target:
        with (
            connected_admin(target.address, target.port, target.nqn) as admin,
            connected_io(admin, target.nqn) as io,
        ):
            target.model.delete_subsystem(target.nqn)
            assert admin.wait_closed() == b"" and io.wait_closed() == b""
        assert target.service.qpairs(target.nqn) == []


def test_the_rpc_sees_controllers_and_queue_pairs(target: RunningTarget) -> None:
    with (
        connected_admin(target.address, target.port, target.nqn) as admin,
        connected_io(admin, target.nqn, qid=2) as io,
    ):
        (controller,) = target.service.controllers(target.nqn)
        assert (controller.cntlid, controller.host_nqn) == (admin.cntlid, TEST_HOST_NQN)
        assert controller.io_qpair_count == 1
        pairs = {pair.qid: pair for pair in target.service.qpairs(target.nqn)}
        assert set(pairs) == {0, 2}
        assert pairs[2].peer.port == io.socket.getsockname()[1]
        assert (pairs[0].listen.address, pairs[0].listen.port) == (target.address, target.port)
        (group,) = target.service.poll_groups()
        assert group.current_admin_qpairs == 1 and group.current_io_qpairs == 1
        assert group.completed_nvme_io > 0 and group.thread_id > 0
    wait_until(lambda: target.service.poll_groups()[0].current_admin_qpairs == 0)


# ---- keep alive ----


def test_a_host_without_keep_alive_loses_its_association() -> None:
    with (
        running_target(transport=QUICK) as target,
        connected_admin(target.address, target.port, target.nqn, kato_ms=1200) as admin,
        connected_io(admin, target.nqn) as io,
        connected_admin(target.address, target.port, target.nqn) as other,
    ):
        # Commands of the I/O queue do not count: the timer is command based.
        for _ in range(4):
            admin.execute(build_keep_alive())
            threading.Event().wait(0.4)
        assert io.execute(build_flush(nsid=1)).cqe.is_success
        assert admin.wait_closed() == b"" and io.wait_closed() == b""
        assert other.execute(build_keep_alive()).cqe.is_success
        assert len(target.service.controllers(target.nqn)) == 1


def test_the_effective_keep_alive_is_read_back(target: RunningTarget) -> None:
    kato = FeaturesCommand(fid=Fid.KEEP_ALIVE_TIMER, is_set=False).to_sqe()
    with connected_admin(target.address, target.port, target.nqn, kato_ms=1) as admin:
        assert admin.execute(kato).cqe.dw0 == 10_000  # raised to min_kato
        for value, expected in ((10_001, 20_000), (60_000, 60_000)):
            command = FeaturesCommand(fid=Fid.KEEP_ALIVE_TIMER, is_set=True, value=value)
            assert admin.execute(command.to_sqe()).cqe.is_success
            assert admin.execute(kato).cqe.dw0 == expected
        for value in (0, 0xFFFFFFFF):
            command = FeaturesCommand(fid=Fid.KEEP_ALIVE_TIMER, is_set=True, value=value)
            assert admin.execute(command.to_sqe()).cqe.status & 0x7FF == Status.KEEP_ALIVE_INVALID
        assert admin.execute(kato).cqe.dw0 == 60_000
    with connected_admin(target.address, target.port, target.nqn, kato_ms=0) as admin:
        assert admin.execute(kato).cqe.dw0 == 120_000


# ---- discovery ----


def discovery_log(host: RawHost) -> tuple[DiscoveryHeader, list[DiscoveryEntry]]:
    command = GetLogPageCommand(lid=Lid.DISCOVERY, byte_count=DISCOVERY_HEADER_BYTES)
    head = DiscoveryHeader.parse(host.execute(command.to_sqe()).data)
    if head.numrec == 0:
        return head, []
    entries = GetLogPageCommand(
        lid=Lid.DISCOVERY, byte_count=1024 * head.numrec, offset=DISCOVERY_HEADER_BYTES
    )
    data = host.execute(entries.to_sqe()).data
    return head, parse_discovery_entries(data, entry_count=head.numrec)


def test_discovery_shows_each_host_what_it_may_connect_to(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, DISCOVERY_NQN) as host:
        head, entries = discovery_log(host)
        assert head.recfmt == 0
        assert [entry.subnqn for entry in entries] == [target.nqn]
        assert (entries[0].traddr, entries[0].trsvcid) == (target.address, str(target.port))
        target.model.add_host(PRIVATE_NQN, TEST_HOST_NQN)
        later, entries = discovery_log(host)
        assert {entry.subnqn for entry in entries} == {target.nqn, PRIVATE_NQN}
        assert later.genctr > head.genctr
        target.model.remove_host(PRIVATE_NQN, TEST_HOST_NQN)
        # It has no namespaces and takes no I/O queues.
        reply = host.execute(IdentifyCommand(cns=Cns.ACTIVE_NSID_LIST).to_sqe())
        assert reply.cqe.status & 0x7FF == Status.INVALID_FIELD
        with RawHost(target.address, target.port) as io:
            io.exchange_ic()
            reply = io.connect(DISCOVERY_NQN, qid=1, cntlid=host.cntlid)
            assert reply.cqe.status & 0x7FF == FabricsStatus.CONNECT_INVALID_PARAMETERS


def test_a_change_is_announced_to_persistent_discovery(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, DISCOVERY_NQN) as host:
        config = FeaturesCommand(
            fid=Fid.ASYNC_EVENT_CONFIG, is_set=True, value=AsyncEventConfig(discovery_change=1).build()
        )
        assert host.execute(config.to_sqe()).cqe.is_success
        host.send(host.capsule(build_async_event_request(cid=40)))
        target.model.add_host(PRIVATE_NQN, TEST_HOST_NQN)
        event = AsyncEvent.parse(host.finish(40).cqe.dw0)
        assert (event.info, event.lid) == (Notice.DISCOVERY_LOG_CHANGE, Lid.DISCOVERY)
        target.model.remove_host(PRIVATE_NQN, TEST_HOST_NQN)


# ---- events ----


def test_a_namespace_change_is_announced_once_until_its_log_is_read() -> None:
    with (
        running_target() as target,
        connected_admin(target.address, target.port, target.nqn) as admin,
    ):
        config = FeaturesCommand(
            fid=Fid.ASYNC_EVENT_CONFIG, is_set=True, value=AsyncEventConfig(namespace_attribute=1).build()
        )
        assert admin.execute(config.to_sqe()).cqe.is_success
        for cid in (50, 51):
            admin.send(admin.capsule(build_async_event_request(cid=cid)))
        assert target.add_memory_namespace(size_bytes=1 << 20) == 2
        event = AsyncEvent.parse(admin.finish(50).cqe.dw0)
        assert (event.info, event.lid) == (Notice.NAMESPACE_ATTRIBUTE, Lid.CHANGED_NS)
        assert target.add_memory_namespace(size_bytes=1 << 20) == 3
        listed = admin.execute(IdentifyCommand(cns=Cns.ACTIVE_NSID_LIST).to_sqe())
        assert parse_nsid_list(listed.data) == [1, 2, 3]
        log = GetLogPageCommand(lid=Lid.CHANGED_NS, byte_count=4096)
        admin.send(admin.capsule(log.to_sqe(cid=3)))
        # Reading lets the event that came meanwhile out.
        ends: dict[int, Cqe] = {}
        data = b""
        while len(ends) < 2:
            pdu = admin.read_pdu()
            if pdu.type == 0x07:
                data = pdu.data
            else:
                ends[pdu.cqe.cid] = pdu.cqe
        assert ChangedNsLog.parse(data).nsids == (2, 3)
        assert set(ends) == {3, 51}


def test_held_requests_are_limited_and_can_be_aborted(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, target.nqn) as admin:
        for cid in range(60, 64):
            admin.send(admin.capsule(build_async_event_request(cid=cid)))
        reply = admin.execute(build_async_event_request(cid=64))
        assert reply.cqe.status & 0x7FF == Status.AER_LIMIT_EXCEEDED
        admin.send(admin.capsule(AbortCommand(sqid=0, command_cid=61).to_sqe(cid=5)))
        first, second = admin.read_pdu().cqe, admin.read_pdu().cqe
        assert (first.cid, first.status & 0x7FF) == (61, Status.ABORT_REQUESTED)
        assert (second.cid, second.dw0) == (5, 0)
        assert admin.execute(AbortCommand(sqid=1, command_cid=9).to_sqe(cid=6)).cqe.dw0 & 1 == 1


def test_a_held_request_gives_way_to_a_command_with_its_cid(target: RunningTarget) -> None:
    """As SPDK's host does when it detaches."""
    with connected_admin(target.address, target.port, target.nqn) as admin:
        for cid in range(2):
            admin.send(admin.capsule(build_async_event_request(cid=cid)))
        for _ in range(3):
            assert admin.execute(build_keep_alive()).cqe.is_success  # CID 0 again and again
        reply = admin.execute(AbortCommand(sqid=0, command_cid=0).to_sqe(cid=7))
        assert reply.cqe.is_success  # the abandoned request ends without a response
        admin.send(admin.capsule(AbortCommand(sqid=0, command_cid=1).to_sqe(cid=7)))
        assert [admin.read_pdu().cqe.cid for _ in range(2)] == [1, 7]


def test_wrong_fabrics_commands_of_the_admin_queue_are_refused(target: RunningTarget) -> None:
    from kvdev.wire.nvme import AdminOpcode, Sqe

    with connected_admin(target.address, target.port, target.nqn) as admin:
        for fctype, status in (
            (FabricsType.DISCONNECT, Status.INVALID_FIELD),
            (0x33, Status.INVALID_FIELD),
        ):
            reply = admin.execute(Sqe(opc=AdminOpcode.FABRICS, nsid=fctype, sgl_type=0))
            assert reply.cqe.status & 0x7FF == status
        for offset, size in ((Property.CAP, 4), (Property.CC, 8), (Property.NSSR, 4), (0x1000, 4)):
            assert admin.property_get(offset, size).cqe.status & 0x7FF == Status.INVALID_FIELD
        assert admin.property_set(Property.CSTS, 0).cqe.status & 0x7FF == Status.INVALID_FIELD
        assert admin.property_get(Property.VS, 4).cqe.dw0 >= 0x20000


def test_identify_matches_connect_and_states_the_limits(target: RunningTarget) -> None:
    with connected_admin(target.address, target.port, target.nqn) as admin:
        data = admin.execute(IdentifyCommand(cns=Cns.CONTROLLER).to_sqe()).data
        identify = IdentifyController.parse(data)
        assert identify.cntlid == admin.cntlid and identify.subnqn == target.nqn
        assert identify.max_transfer_bytes(4096) == 131072
        assert identify.in_capsule_bytes_max == 4096 and identify.icdoff_16b == 0
        assert 0 < identify.cqt_ms <= 1000 and identify.kas_100ms > 0 and identify.vwc == 0


@pytest.mark.parametrize("address", ["::1"])
def test_ipv6_listeners_work(address: str) -> None:
    try:
        with running_target(address=address) as target:
            with connected_admin(target.address, target.port, target.nqn) as admin:
                assert admin.execute(build_keep_alive()).cqe.is_success
            with connected_admin(target.address, target.port, DISCOVERY_NQN) as host:
                _, entries = discovery_log(host)
                assert (entries[0].adrfam, entries[0].traddr) == (2, "::1")
    except Exception as error:
        if "Cannot assign" in str(error) or "family not supported" in str(error):
            pytest.skip("this machine has no IPv6 loopback")
        raise


def test_a_port_in_use_is_refused_in_one_line(target: RunningTarget) -> None:
    with running_target() as other, pytest.raises(Exception) as raised:
        other.model.add_listener(other.nqn, address=target.address, port=target.port)
    assert str(target.port) in str(raised.value) and "in use" in str(raised.value)
