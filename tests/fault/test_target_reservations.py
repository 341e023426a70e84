"""Reservations over real sockets: rights by type, several controllers of a host, notices, preemption, restart."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvdev.block.reservation import ReservationType
from kvdev.native.target import BdevOp, InjectionType, NativeInjection
from kvdev.target.model import Bdev, BdevKind, SpdkError
from kvdev.testing.raw_host import (
    CAPSULE_RESP,
    R2T,
    RawHost,
    Reply,
    connected_io,
)
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.features import Fid
from kvdev.wire.identify import ONCS_RESERVATIONS, Cns, IdentifyController, IdentifyNamespace
from kvdev.wire.log import Lid, ReservationLog, ReservationNotice
from kvdev.wire.nvme import (
    SGL_IN_CAPSULE,
    AsyncEvent,
    DsmRange,
    FeaturesCommand,
    GetLogPageCommand,
    IdentifyCommand,
    NvmOpcode,
    Sqe,
    Status,
    build_async_event_request,
    build_copy,
    build_copy_ranges,
    build_dsm_deallocate,
    build_flush,
    build_read_write,
)
from kvdev.wire.reservation import (
    CNTLID_NONE,
    AcquireAction,
    AcquireCommand,
    ChangePtpl,
    KeyPair,
    OneKey,
    RegisterAction,
    RegisterCommand,
    ReleaseAction,
    ReleaseCommand,
    ReportCommand,
    ReservationReport,
)

BLOCK = 4096
NSID_ALL = 0xFFFFFFFF


class Host:
    """A host with its own identifier: the admin queue of one controller and one I/O queue."""

    def __init__(self, target: RunningTarget, number: int) -> None:
        self.admin = RawHost(target.address, target.port)
        self.admin.hostid = uuid.UUID(int=number).bytes
        self.admin.hostnqn = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(int=number)}"
        self.admin.exchange_ic()
        assert self.admin.connect(target.nqn).cqe.is_success
        self.admin.enable()
        self.io = connected_io(self.admin, target.nqn)
        self.number = number

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.io.close()
        self.admin.close()

    def register(
        self, new: int, *, old: int = 0, action: int = RegisterAction.REGISTER, ptpl: int = 0, nsid: int = 1
    ) -> int:
        command = RegisterCommand(action=action, change_ptpl=ptpl)
        return code(self.io.execute(command.to_sqe(nsid=nsid), KeyPair(old, new).build()))

    def acquire(self, key: int, rtype: int, *, action: int = 0, preempted: int = 0) -> int:
        command = AcquireCommand(action=action, rtype=rtype)
        return code(self.io.execute(command.to_sqe(nsid=1), KeyPair(key, preempted).build()))

    def release(self, key: int, rtype: int, *, action: int = ReleaseAction.RELEASE) -> int:
        command = ReleaseCommand(action=action, rtype=rtype)
        return code(self.io.execute(command.to_sqe(nsid=1), OneKey(key).build()))

    def report(self) -> ReservationReport:
        reply = self.io.execute(ReportCommand(4096).to_sqe(nsid=1))
        assert reply.cqe.is_success
        return ReservationReport.parse(reply.data)

    def reads(self) -> list[int]:
        """Statuses of every command that reads."""
        reads = [
            code(self.io.execute(rw(NvmOpcode.READ))),
            code(self.io.execute(rw(NvmOpcode.VERIFY, byte_count=0))),
            code(self.io.execute(rw(NvmOpcode.COMPARE), bytes(BLOCK))),
        ]
        return [0 if status == Status.COMPARE_FAILURE else status for status in reads]

    def writes(self) -> list[int]:
        """Statuses of every command that writes."""
        return [
            code(self.io.execute(rw(NvmOpcode.WRITE), bytes(BLOCK))),
            code(self.io.execute(rw(NvmOpcode.WRITE, 8), bytes(8 * BLOCK), in_capsule=False)),
            code(self.io.execute(rw(NvmOpcode.WRITE_ZEROES, byte_count=0))),
            code(self.io.execute(build_dsm_deallocate(nsid=1, range_count=1), DsmRange(lba_count=1).build())),
            code(self.io.execute(build_flush(nsid=1))),
        ]

    def copies(self) -> int:
        return code(self.io.execute(build_copy(nsid=1, slba=9, range_count=1), build_copy_ranges([(0, 1)])))

    def log_page(self) -> ReservationLog:
        sqe = GetLogPageCommand(lid=Lid.RESERVATION, byte_count=64).to_sqe()
        return ReservationLog.parse(self.admin.execute(sqe, read_size_bytes=64).data)

    def notices(self) -> list[ReservationNotice]:
        """All that wait, oldest first."""
        found = []
        while page := self.log_page().notice_type:
            found.append(ReservationNotice(page))
        return found


def rw(opcode: int, lba_count: int = 1, *, byte_count: int | None = None, slba: int = 0, cid: int = 0) -> Sqe:
    size = lba_count * BLOCK if byte_count is None else byte_count
    return build_read_write(opcode, nsid=1, slba=slba, lba_count=lba_count, byte_count=size, cid=cid)


def code(reply: Reply) -> int:
    return reply.cqe.status & 0x7FF


@pytest.fixture
def target() -> Iterator[RunningTarget]:
    with running_target() as running:
        yield running


# ---- what Identify and the features say ----


def test_identify_when_no_ptpl_file_then_all_types_and_no_persistence(target: RunningTarget) -> None:
    with Host(target, 1) as host:
        controller = IdentifyController.parse(
            host.admin.execute(IdentifyCommand(cns=Cns.CONTROLLER).to_sqe(), read_size_bytes=4096).data
        )
        assert controller.oncs & ONCS_RESERVATIONS
        namespace = IdentifyNamespace.parse(
            host.admin.execute(IdentifyCommand(cns=Cns.NAMESPACE, nsid=1).to_sqe(), read_size_bytes=4096).data
        )
        assert namespace.rescap == 0xFE
        assert host.register(5, ptpl=ChangePtpl.ON) == Status.INVALID_FIELD
        feature = FeaturesCommand(fid=Fid.RESERVATION_PERSISTENCE, is_set=True, nsid=1, value=1)
        assert code(host.admin.execute(feature.to_sqe())) == Status.FEATURE_NOT_CHANGEABLE
        assert not host.report().is_ptpl and not host.report().registrants


# ---- rights ----


@pytest.mark.parametrize("rtype", ReservationType)
def test_io_when_reserved_then_every_command_has_the_rights_of_its_type(
    target: RunningTarget, rtype: ReservationType
) -> None:
    """Base figures 702 and 703, for the holder, a registrant and a stranger."""
    with Host(target, 1) as holder, Host(target, 2) as registrant, Host(target, 3) as stranger:
        assert holder.register(11) == 0 and registrant.register(22) == 0
        for host in (holder, registrant, stranger):
            assert not any(host.reads() + host.writes())
        assert holder.acquire(11, rtype) == 0
        assert not any([*holder.reads(), *holder.writes(), holder.copies()])
        conflict = Status.RESERVATION_CONFLICT
        is_let_in = rtype >= 3
        assert set(registrant.writes()) == {0 if is_let_in else conflict}
        assert set(registrant.reads()) == {0 if is_let_in or not rtype.keeps_readers_out else conflict}
        assert registrant.copies() == (0 if is_let_in else conflict)
        assert set(stranger.writes()) == {conflict}
        assert set(stranger.reads()) == {conflict if rtype.keeps_readers_out else 0}
        assert stranger.acquire(0, rtype) == stranger.release(0, rtype) == conflict
        report = stranger.report()
        holders = [entry.is_holder for entry in report.registrants]
        assert report.rtype == rtype and holders == [True, rtype.is_all_registrants]
        assert holder.release(11, rtype) == 0
        assert not any(stranger.reads() + stranger.writes())


def test_conflict_is_not_to_be_retried(target: RunningTarget) -> None:
    with Host(target, 1) as holder, Host(target, 2) as stranger:
        assert holder.register(1) == 0 and holder.acquire(1, 2) == 0
        assert stranger.io.execute(rw(NvmOpcode.READ)).cqe.dnr


def test_second_controller_of_a_host_has_its_rights(target: RunningTarget) -> None:
    with Host(target, 1) as first, Host(target, 1) as second, Host(target, 2) as other:
        assert first.register(7) == 0 and first.acquire(7, 1) == 0
        assert not any(second.writes()) and second.register(7) == 0
        assert second.register(8) == Status.RESERVATION_CONFLICT
        report = other.report()
        assert [(entry.hostid, entry.rkey) for entry in report.registrants] == [(uuid.UUID(int=1).bytes, 7)]
        assert second.release(7, 1) == 0
        assert not any(other.writes())


def test_reservation_outlives_the_holders_connections(target: RunningTarget) -> None:
    with Host(target, 2) as other:
        with Host(target, 1) as holder:
            assert holder.register(7) == 0 and holder.acquire(7, 1) == 0
        wait_until(lambda: len(target.service.controllers(target.nqn)) == 1)
        assert set(other.writes()) == {Status.RESERVATION_CONFLICT}
        assert [entry.cntlid for entry in other.report().registrants] == [CNTLID_NONE]
        with Host(target, 1) as again:
            assert not any(again.writes())
            assert again.report().registrants[0].cntlid == again.admin.cntlid


def wait_until(condition: object) -> None:
    assert callable(condition)
    for _ in range(5000):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("the target did not get there")


def test_namespaces_have_their_own_reservations(target: RunningTarget) -> None:
    with Host(target, 1) as holder, Host(target, 2) as other:
        target.add_memory_namespace(size_bytes=1 << 20)
        assert holder.register(7) == 0 and holder.acquire(7, 2) == 0
        beside = build_read_write(NvmOpcode.READ, nsid=2, slba=0, lba_count=1, byte_count=BLOCK)
        assert code(other.io.execute(beside)) == 0
        assert other.register(1, nsid=9) == Status.INVALID_NAMESPACE_OR_FORMAT
        assert other.register(1, nsid=NSID_ALL) == Status.INVALID_NAMESPACE_OR_FORMAT
        # A namespace that is taken away and comes back is a new one.
        target.model.remove_namespace(target.nqn, 1)
        target.model.add_namespace(target.nqn, bdev_name=target.bdev_names[0], nsid=1)
        assert not any(other.writes())


# ---- malformed commands ----


def test_malformed_commands_are_refused_one_by_one(target: RunningTarget) -> None:
    with Host(target, 1) as host:
        register = RegisterCommand(RegisterAction.REGISTER).to_sqe(nsid=1)
        assert code(host.io.execute(register, bytes(8))) == Status.DATA_SGL_LENGTH_INVALID
        assert code(host.io.execute(replace(register, sgl_len=0))) == Status.DATA_SGL_LENGTH_INVALID
        report = ReportCommand(4096, is_extended=False).to_sqe(nsid=1)
        assert code(host.io.execute(report)) == Status.HOST_ID_INCONSISTENT
        short = ReportCommand(4096).to_sqe(nsid=1)
        assert code(host.io.execute(short, read_size_bytes=64)) == Status.DATA_SGL_LENGTH_INVALID
        header = host.io.execute(ReportCommand(24).to_sqe(nsid=1))
        assert header.cqe.is_success and len(header.data) == 24
        assert host.register(5) == 0 and host.acquire(5, 0) == host.acquire(5, 7) == Status.INVALID_FIELD


# ---- notices ----


def arm_event(host: Host, *, cid: int) -> None:
    host.admin.send(host.admin.capsule(build_async_event_request(cid=cid)))


def read_event(host: Host) -> AsyncEvent:
    pdu = host.admin.read_pdu()
    assert pdu.type == CAPSULE_RESP
    return AsyncEvent.parse(pdu.cqe.dw0)


def test_notice_when_released_cleared_or_preempted_then_event_and_log_page(target: RunningTarget) -> None:
    with Host(target, 1) as actor, Host(target, 2) as told, Host(target, 2) as twice:
        assert actor.register(1) == 0 and told.register(2) == 0
        arm_event(told, cid=77)
        assert actor.acquire(1, 3) == 0 and actor.release(1, 3) == 0
        assert read_event(told) == AsyncEvent(6, 0, Lid.RESERVATION)
        page = told.log_page()
        assert (page.notice_type, page.nsid, page.log_page_count) == (2, 1, 1)
        assert told.log_page() == ReservationLog() and not actor.notices()
        # The next one comes only now that the page has been read, and to each controller of the host.
        arm_event(told, cid=78)
        assert actor.acquire(1, 5, action=AcquireAction.PREEMPT, preempted=2) == 0
        assert read_event(told).lid == Lid.RESERVATION
        assert told.notices() == [ReservationNotice.REGISTRATION_PREEMPTED]
        kinds = [ReservationNotice.RESERVATION_RELEASED, ReservationNotice.REGISTRATION_PREEMPTED]
        assert twice.notices() == kinds
        assert told.register(2) == 0 and actor.release(1, 0, action=ReleaseAction.CLEAR) == 0
        assert told.notices() == [ReservationNotice.RESERVATION_PREEMPTED]


def test_notice_when_masked_then_none_and_the_mask_reads_back(target: RunningTarget) -> None:
    def mask(value: int, nsid: int) -> FeaturesCommand:
        return FeaturesCommand(fid=Fid.RESERVATION_NOTIFICATION_MASK, is_set=True, nsid=nsid, value=value)

    def read_mask(nsid: int) -> Sqe:
        return FeaturesCommand(fid=Fid.RESERVATION_NOTIFICATION_MASK, is_set=False, nsid=nsid).to_sqe()

    with Host(target, 1) as actor, Host(target, 2) as told:
        assert actor.register(1) == 0 and told.register(2) == 0
        assert told.admin.execute(mask(1 << 2, NSID_ALL).to_sqe()).cqe.is_success
        assert told.admin.execute(read_mask(1)).cqe.dw0 == 4
        assert code(told.admin.execute(read_mask(NSID_ALL))) == Status.INVALID_FIELD
        assert code(told.admin.execute(read_mask(9))) == Status.INVALID_FIELD
        assert code(told.admin.execute(mask(0, 9).to_sqe())) == Status.INVALID_FIELD
        assert actor.acquire(1, 3) == 0 and actor.release(1, 3) == 0
        assert not told.notices()
        assert actor.release(1, 0, action=ReleaseAction.CLEAR) == 0
        assert told.notices() == [ReservationNotice.RESERVATION_PREEMPTED]


# ---- preempt and abort ----


@pytest.mark.parametrize(
    ("action", "expected"),
    [(AcquireAction.PREEMPT, 0), (AcquireAction.PREEMPT_AND_ABORT, Status.ABORTED_PREEMPT)],
)
def test_preempt_when_a_write_waits_for_its_data_then_only_abort_ends_it(
    target: RunningTarget, action: int, expected: int
) -> None:
    """A command that was let in goes on (8.1.24), unless Preempt and Abort asks for its end."""
    data = b"x" * (2 * BLOCK)
    with Host(target, 1) as winner, Host(target, 2) as loser, Host(target, 3) as observer:
        assert loser.register(2) == 0 and winner.register(1) == 0 and loser.acquire(2, 1) == 0
        loser.io.send(loser.io.capsule(rw(NvmOpcode.WRITE, 2)))
        r2t = loser.io.read_pdu()
        assert r2t.type == R2T
        done: list[int] = []
        thread = threading.Thread(
            target=lambda: done.append(winner.acquire(1, 1, action=action, preempted=2))
        )
        thread.start()
        wait_until(lambda: len(observer.report().registrants) == 1)
        # The answer to Preempt and Abort waits for the command.
        assert action == AcquireAction.PREEMPT or not done
        loser.io.answer_r2t(r2t, data)
        assert loser.io.read_pdu().cqe.status & 0x7FF == expected
        thread.join(10)
        assert done == [0]
        assert target.bdev(1).read(0, 2 * BLOCK) == (data if expected == 0 else bytes(2 * BLOCK))
        assert set(loser.writes()) == {Status.RESERVATION_CONFLICT}


@pytest.mark.parametrize("lba_count", [2, 32])
def test_preempt_and_abort_when_the_host_never_sends_its_data_then_loses_its_connection(
    target: RunningTarget, lba_count: int
) -> None:
    """32 blocks go straight into the device's memory: what has come stays, but nothing comes after the answer."""
    target.service.preempt_timeout_s = 0.05
    with Host(target, 1) as winner, Host(target, 2) as loser:
        assert loser.register(2) == 0 and winner.register(1) == 0 and loser.acquire(2, 1) == 0
        loser.io.send(loser.io.capsule(rw(NvmOpcode.WRITE, lba_count)))
        r2t = loser.io.read_pdu()
        assert r2t.type == R2T
        psh_and_part = loser.io.h2c_data(
            cccid=r2t.cccid, ttag=r2t.ttag, datao=0, data=b"x" * (lba_count * BLOCK), is_last=True
        )
        loser.io.send(psh_and_part[: 24 + BLOCK])
        assert winner.acquire(1, 1, action=AcquireAction.PREEMPT_AND_ABORT, preempted=2) == 0
        loser.io.wait_closed()
        stored = target.bdev(1).read(BLOCK, (lba_count - 1) * BLOCK)
        assert stored == bytes((lba_count - 1) * BLOCK)
        # Its other connections, and its other commands, are its own affair.
        assert loser.admin.execute(
            IdentifyCommand(cns=Cns.CONTROLLER).to_sqe(), read_size_bytes=4096
        ).cqe.is_success


def test_preempt_and_abort_when_a_write_hangs_in_the_device_then_waits_for_it() -> None:
    with running_target(namespace_count=0) as target:
        base = target.model.create_malloc(name="base", block_size_bytes=BLOCK, block_count=256)
        target.model.register(
            Bdev(
                name="filter",
                kind=BdevKind.ERROR,
                uuid=uuid.uuid4(),
                block_size_bytes=BLOCK,
                block_count=256,
                base_names=(base,),
                base_handles=(target.model.find_bdev(base).handle,),
            )
        )
        target.model.add_namespace(target.nqn, bdev_name="filter")
        device = target.bdev(1)
        target.service.preempt_timeout_s = 5.0
        with Host(target, 1) as winner, Host(target, 2) as loser, Host(target, 3) as observer:
            assert loser.register(2) == 0 and winner.register(1) == 0 and loser.acquire(2, 1) == 0
            device.inject(BdevOp.WRITE, NativeInjection(type=InjectionType.PENDING, count=1))
            sqe = rw(NvmOpcode.WRITE, cid=5)
            loser.io.send(loser.io.capsule(replace(sqe, sgl_type=SGL_IN_CAPSULE), b"x" * BLOCK))
            done: list[int] = []
            thread = threading.Thread(
                target=lambda: done.append(
                    winner.acquire(1, 1, action=AcquireAction.PREEMPT_AND_ABORT, preempted=2)
                )
            )
            thread.start()
            wait_until(lambda: len(observer.report().registrants) == 1)
            assert not done
            target.service.resume_pending(target.model.find_bdev("filter").handle)
            thread.join(10)
            # It could not be aborted any more: it has ended before the answer, one way or the other.
            assert done == [0] and loser.io.read_pdu().type == CAPSULE_RESP


# ---- persistence ----


def test_persistent_reservation_outlives_the_target(tmp_path: Path) -> None:
    file, ptpl = tmp_path / "ns", tmp_path / "reservations.json"
    file.write_bytes(bytes(1 << 20))
    identity = uuid.UUID(int=99)

    def start(stack: ExitStack) -> RunningTarget:
        target = stack.enter_context(running_target(namespace_count=0))
        target.add_file_namespace(str(file))
        target.model.remove_namespace(target.nqn, 1)
        target.model.add_namespace(
            target.nqn, bdev_name=target.bdev_names[0], nsid=1, uuid=identity, ptpl_file=str(ptpl)
        )
        return target

    with ExitStack() as stack:
        target = start(stack)
        with Host(target, 1) as holder, Host(target, 2) as other:
            namespace = IdentifyNamespace.parse(
                holder.admin.execute(
                    IdentifyCommand(cns=Cns.NAMESPACE, nsid=1).to_sqe(), read_size_bytes=4096
                ).data
            )
            assert namespace.rescap == 0xFF
            assert holder.register(11, ptpl=ChangePtpl.ON) == 0 and other.register(22) == 0
            assert holder.acquire(11, 1) == 0 and holder.report().is_ptpl
    with ExitStack() as stack:
        target = start(stack)
        with Host(target, 1) as holder, Host(target, 2) as other, Host(target, 3) as stranger:
            assert set(other.writes()) == set(stranger.writes()) == {Status.RESERVATION_CONFLICT}
            assert not any(holder.writes())
            report = other.report()
            assert report.is_ptpl and [entry.rkey for entry in report.registrants] == [11, 22]
            feature = FeaturesCommand(fid=Fid.RESERVATION_PERSISTENCE, is_set=False, nsid=1)
            assert holder.admin.execute(feature.to_sqe()).cqe.dw0 == 1
            off = FeaturesCommand(fid=Fid.RESERVATION_PERSISTENCE, is_set=True, nsid=1, value=0)
            assert holder.admin.execute(off.to_sqe()).cqe.is_success
            assert set(other.writes()) == {Status.RESERVATION_CONFLICT}
    with ExitStack() as stack:
        target = start(stack)
        with Host(target, 2) as other:
            assert not any(other.writes()) and not other.report().registrants


def test_register_when_the_file_cannot_be_written_then_refused_and_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with running_target() as target:
        target.model.remove_namespace(target.nqn, 1)
        target.model.add_namespace(
            target.nqn, bdev_name=target.bdev_names[0], nsid=1, ptpl_file=str(folder / "file")
        )
        with Host(target, 1) as host:
            assert host.register(5, ptpl=ChangePtpl.ON) == 0
            (folder / "file").unlink()
            folder.rmdir()
            assert host.register(6, old=5, action=RegisterAction.REPLACE) == Status.INTERNAL_ERROR
            assert [entry.rkey for entry in host.report().registrants] == [5]
            folder.mkdir()
            assert host.register(6, old=5, action=RegisterAction.REPLACE) == 0
            assert json.loads((folder / "file").read_text())["registrants"][0]["rkey"] == 6


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "Expecting"),
        ("[]", "document"),
        ('{"ptpl": 1}', "bdev_uuid"),
        ('{"bdev_uuid": "UUID", "ptpl": 1}', "ptpl"),
        ('{"bdev_uuid": "00000000-0000-0000-0000-000000000001", "ptpl": true}', "bdev_uuid"),
        ('{"bdev_uuid": "UUID", "ptpl": true, "rtype": 9, "registrants": []}', "9"),
        ('{"bdev_uuid": "UUID", "ptpl": true, "rtype": 5, "registrants": []}', "registrants"),
        (
            '{"bdev_uuid": "UUID", "ptpl": true, "rtype": 0, "registrants": [{"rkey": -1, "host_uuid": "UUID"}]}',
            "key",
        ),
        (
            '{"bdev_uuid": "UUID", "ptpl": true, "rtype": 1, "holder_uuid": "UUID", "registrants": []}',
            "holder_uuid",
        ),
    ],
)
def test_namespace_when_its_file_is_not_right_then_not_attached(tmp_path: Path, text: str, word: str) -> None:
    path, identity = tmp_path / "file", uuid.UUID(int=77)
    path.write_text(text.replace("UUID", str(identity)))
    with running_target() as target:
        target.model.remove_namespace(target.nqn, 1)
        with pytest.raises(SpdkError, match=f"ptpl_file: {path}.*{word}"):
            target.model.add_namespace(
                target.nqn, bdev_name=target.bdev_names[0], uuid=identity, ptpl_file=str(path)
            )
        assert target.model.add_namespace(target.nqn, bdev_name=target.bdev_names[0]) == 1


def test_namespace_when_another_keeps_its_reservations_there_then_refused(tmp_path: Path) -> None:
    with running_target(namespace_count=2) as target:
        path = str(tmp_path / "file")
        for nsid, name in enumerate(target.bdev_names, 1):
            target.model.remove_namespace(target.nqn, nsid)
            if nsid == 1:
                target.model.add_namespace(target.nqn, bdev_name=name, nsid=nsid, ptpl_file=path)
                continue
            with pytest.raises(SpdkError, match="another namespace"):
                target.model.add_namespace(target.nqn, bdev_name=name, nsid=nsid, ptpl_file=path)
