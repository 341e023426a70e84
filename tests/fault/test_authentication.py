"""DH-HMAC-CHAP between our host and our target, and of each with a peer that does it wrong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvdev.block.device import flush, read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import AuthenticationError, ConnectionLostError, KvdevError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.security.chap import (
    HASHES_DEFAULT,
    ChapParty,
    ControllerChap,
    Counter,
    Credentials,
    HostChap,
    OutOfTurnError,
)
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import write_key_file
from kvdev.session import Session
from kvdev.target.model import FileKey, HostKeys, Transport
from kvdev.target.service import TargetOptions
from kvdev.testing.controller import SUBNQN, ControllerScript
from kvdev.testing.killable import KillableTarget
from kvdev.testing.peer import PduFromHost, PeerClosedError, PeerConnection, ScriptedPeer
from kvdev.testing.raw_host import RawHost, Reply, TargetClosedError
from kvdev.testing.target import RunningTarget, running_target
from kvdev.uri import KeySource
from kvdev.wire.auth import (
    AuthCommand,
    AuthHeader,
    AuthId,
    DhGroupId,
    Failure,
    FailureReason,
    HashId,
    is_auth_command,
)
from kvdev.wire.fabrics import AUTHREQ_ATR, Cc, ConnectCommand, FabricsType, Property
from kvdev.wire.identify import Cns
from kvdev.wire.nvme import (
    AdminOpcode,
    FabricsStatus,
    IdentifyCommand,
    NvmOpcode,
    Sqe,
    Status,
    build_keep_alive,
    build_read_write,
)

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
STRANGER = HostIdentity.of("nqn.2024-01.io.example:stranger")
QUICK = ControllerOptions(
    connect_timeout_s=60.0, admin_timeout_s=60.0, shutdown_timeout_s=0.5, ctrl_loss_tmo_s=0
)
HOST_SECRET = DhchapSecret(bytes(range(32)), 1)
CTRL_SECRET = DhchapSecret(bytes(range(100, 148)), 2)


@dataclasses.dataclass(frozen=True)
class Keys:
    """Files of the secrets of both sides, and of one that nobody has."""

    host: KeySource
    controller: KeySource
    wrong: KeySource

    @property
    def of_target(self) -> HostKeys:
        return HostKeys(FileKey("h", self.host.name), FileKey("c", self.controller.name))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    sources = []
    for name, secret in (("h", HOST_SECRET), ("c", CTRL_SECRET), ("w", DhchapSecret(bytes(32)))):
        write_key_file(str(folder / name), secret.text(), field="test")
        sources.append(KeySource("file", str(folder / name)))
    return Keys(*sources)


@pytest.fixture(scope="module")
def target(keys: Keys) -> Iterator[RunningTarget]:
    with running_target(hosts=[STRANGER.host_nqn], transport=Transport(min_kato=1000, kas=1)) as running:
        running.allow_host(HOST.host_nqn, keys.of_target)
        yield running


def both_ways(keys: Keys, **more: Any) -> ControllerOptions:
    return dataclasses.replace(QUICK, dhchap_key=keys.host, dhchap_ctrl_key=keys.controller, **more)


def connect_error(target: RunningTarget, options: ControllerOptions, host: HostIdentity = HOST) -> KvdevError:
    with Session(host=host, options=options) as kv, pytest.raises(KvdevError) as caught:
        kv.open_device(f"{target.uri}?nsid=1", deadline=Deadline.after(60))
    text = str(caught.value)
    assert "\n" not in text
    for secret in (HOST_SECRET, CTRL_SECRET):
        assert secret.text()[10:30] not in text
    return caught.value


# ---- our host and our target ----


@pytest.mark.parametrize("group", list(DhGroupId))
@pytest.mark.parametrize("hash_id", list(HashId))
def test_data_moves_after_both_sides_authenticated_with_each_hash_and_group(
    target: RunningTarget, keys: Keys, hash_id: HashId, group: DhGroupId
) -> None:
    options = both_ways(keys, dhchap_digests=(hash_id,), dhchap_dhgroups=(group,), io_queue_count=2)
    with Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{target.uri}?nsid=1")
        pattern = bytes((hash_id, group)) * 2048
        write_blocks(device, 1, pattern, Deadline.after(60))
        assert bytes(read_blocks(device, 1, 1, Deadline.after(60))) == pattern
        kv.controller(target.uri).reauthenticate(deadline=Deadline.after(60))
        assert bytes(read_blocks(device, 1, 1, Deadline.after(60))) == pattern


def test_keys_in_the_uri_are_those_of_the_options(target: RunningTarget, keys: Keys) -> None:
    uri = f"{target.uri}?nsid=1&dhchap-key={keys.host}&dhchap-ctrl-key={keys.controller}"
    with Session(host=HOST, options=QUICK) as kv:
        assert len(read_blocks(kv.open_device(uri), 0, 1, Deadline.after(60))) == 4096


def test_host_without_a_key_needs_none(target: RunningTarget) -> None:
    with Session(host=STRANGER, options=QUICK) as kv:
        kv.open_device(f"{target.uri}?nsid=1")


def test_each_failure_has_its_own_message_and_remedy(target: RunningTarget, keys: Keys) -> None:
    wrong = connect_error(target, dataclasses.replace(QUICK, dhchap_key=keys.wrong))
    assert isinstance(wrong, AuthenticationError) and wrong.reason == "failed" and not wrong.is_ours
    assert f"dhchap-key is the secret that the target has for host {HOST.host_nqn}" in str(wrong)

    none = connect_error(target, QUICK)
    assert isinstance(none, AuthenticationError) and none.reason == "no secret"
    assert "dhchap-key=file:/PATH or --dhchap-key" in str(none)

    imposter = connect_error(
        target, dataclasses.replace(QUICK, dhchap_key=keys.host, dhchap_ctrl_key=keys.wrong)
    )
    assert isinstance(imposter, AuthenticationError) and imposter.is_ours
    assert "is it the right target" in str(imposter) and "dhchap-ctrl-key" in str(imposter)

    silent = connect_error(target, both_ways(keys), STRANGER)
    assert isinstance(silent, AuthenticationError) and silent.reason == "no authentication"
    assert f"give {target.nqn} secrets for host {STRANGER.host_nqn}" in str(silent)

    same = connect_error(target, dataclasses.replace(QUICK, dhchap_key=keys.host, dhchap_ctrl_key=keys.host))
    assert isinstance(same, UsageError) and "each proves one side" in str(same)

    stranger = connect_error(target, both_ways(keys), HostIdentity.of("nqn.2024-01.io.example:nobody"))
    assert "allow list" in str(stranger)


def test_file_that_others_may_read_is_refused(target: RunningTarget, tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(str(path), HOST_SECRET.text(), field="test")
    path.chmod(0o640)
    error = connect_error(target, dataclasses.replace(QUICK, dhchap_key=KeySource("file", str(path))))
    assert isinstance(error, UsageError) and f"chmod 600 {path}" in str(error)


def test_target_when_its_key_file_is_open_to_others_then_refuses_and_logs_it(
    tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    write_key_file(str(path), HOST_SECRET.text(), field="test")
    with running_target(hosts=[]) as running, caplog.at_level(logging.INFO):
        running.allow_host(HOST.host_nqn, HostKeys(FileKey("h", str(path))))
        options = dataclasses.replace(QUICK, dhchap_key=keys.host)
        with Session(host=HOST, options=options) as kv:
            kv.controller(running.uri)
        path.chmod(0o644)
        assert isinstance(connect_error(running, options), AuthenticationError)
    assert f"chmod 600 {path}" in caplog.text
    assert HOST_SECRET.text()[10:30] not in caplog.text


def test_logs_of_both_sides_name_queue_and_reason_and_no_secret(
    target: RunningTarget, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with Session(host=HOST, options=both_ways(keys)) as kv:
            kv.open_device(f"{target.uri}?nsid=1")
        connect_error(target, dataclasses.replace(QUICK, dhchap_key=keys.wrong))
    assert "authenticated both ways" in caplog.text
    assert f"queue 1, host {HOST.host_nqn}: authenticated" in caplog.text
    assert "the host's response is wrong" in caplog.text
    for secret in (HOST_SECRET, CTRL_SECRET):
        assert secret.text()[10:30] not in caplog.text


def test_new_key_is_in_force_from_the_next_connection(keys: Keys, tmp_path: Path) -> None:
    new = tmp_path / "new"
    write_key_file(str(new), DhchapSecret.generate().text(), field="test")
    options = dataclasses.replace(QUICK, dhchap_key=keys.host)
    with running_target(hosts=[]) as running:
        running.allow_host(HOST.host_nqn, HostKeys(FileKey("h", keys.host.name)))
        with Session(host=HOST, options=options) as kv:
            device = kv.open_device(f"{running.uri}?nsid=1")
            running.model.set_host_keys(running.nqn, HOST.host_nqn, HostKeys(FileKey("n", str(new))))
            assert len(read_blocks(device, 0, 1, Deadline.after(60))) == 4096
            assert isinstance(connect_error(running, options), AuthenticationError)
            with pytest.raises(AuthenticationError):
                kv.controller(running.uri).reauthenticate(deadline=Deadline.after(60))
        fresh = dataclasses.replace(QUICK, dhchap_key=KeySource("file", str(new)))
        with Session(host=HOST, options=fresh) as kv:
            kv.open_device(f"{running.uri}?nsid=1")
        running.model.set_host_keys(running.nqn, HOST.host_nqn, HostKeys())
        with Session(host=HOST, options=QUICK) as kv:
            kv.open_device(f"{running.uri}?nsid=1")


def test_failed_reauthentication_ends_the_association(target: RunningTarget, tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(str(path), HOST_SECRET.text(), field="test")
    options = dataclasses.replace(QUICK, dhchap_key=KeySource("file", str(path)))
    with Session(host=HOST, options=options) as kv:
        controller = kv.controller(target.uri)
        path.unlink()
        write_key_file(str(path), DhchapSecret(bytes(32)).text(), field="test")
        with pytest.raises(AuthenticationError, match="refuses it"):
            controller.reauthenticate(deadline=Deadline.after(60))
        limit = Deadline.after(10)
        while controller.is_alive and not limit.is_expired:
            Event().wait(0.01)
        assert not controller.is_alive


def test_host_authenticates_again_after_the_target_was_killed(tmp_path: Path, keys: Keys) -> None:
    nqn = "nqn.2024-01.io.kvdev:killable"
    add_key = "keyring_file_add_key"
    host = {"nqn": nqn, "host": HOST.host_nqn, "dhchap_key": "h", "dhchap_ctrlr_key": "c"}
    first_calls = [
        {"method": add_key, "params": {"name": "h", "path": keys.host.name}},
        {"method": add_key, "params": {"name": "c", "path": keys.controller.name}},
    ]
    last_calls = [{"method": "nvmf_subsystem_add_host", "params": host}]
    with KillableTarget(tmp_path, nqn=nqn, first_calls=first_calls, last_calls=last_calls) as killable:
        options = both_ways(
            keys,
            io_queue_count=2,
            ctrl_loss_tmo_s=60.0,
            reconnect_delay_s=0.2,
            fence_wait_s=0.0,
            kato_ms=1000,
        )
        with Session(host=HOST, options=options) as kv:
            device = kv.open_device(f"{killable.uri()}?nsid=1")
            write_blocks(device, 0, b"a" * 4096, Deadline.after(30))
            flush(device, Deadline.after(30))
            killable.kill()
            killable.start()
            assert bytes(read_blocks(device, 0, 1, Deadline.after(60))) == b"a" * 4096


def test_hash_and_group_that_one_side_does_not_take_are_named(keys: Keys) -> None:
    strict = TargetOptions(dhchap_digests=(HashId.SHA384,), dhchap_dhgroups=(DhGroupId.FFDHE3072,))
    with running_target(hosts=[], options=strict) as running:
        running.allow_host(HOST.host_nqn, keys.of_target)
        with Session(host=HOST, options=both_ways(keys)) as kv:
            kv.open_device(f"{running.uri}?nsid=1")
        error = connect_error(running, both_ways(keys, dhchap_digests=(HashId.SHA256,)))
        assert isinstance(error, AuthenticationError) and error.reason == "hash_unusable"
        assert "this host takes sha256" in str(error)
        error = connect_error(running, both_ways(keys, dhchap_dhgroups=(DhGroupId.NULL,)))
        assert isinstance(error, AuthenticationError) and error.reason == "dh_group_unusable"


# ---- our target and a host that does it wrong ----


@pytest.fixture
def raw(target: RunningTarget) -> Iterator[RawHost]:
    with RawHost(target.address, target.port) as host:
        host.hostnqn, host.hostid = HOST.host_nqn, HOST.host_id_bytes
        host.exchange_ic()
        yield host


def chap_of(
    secrets: Credentials | None = None, groups: tuple[DhGroupId, ...] = (DhGroupId.NULL,)
) -> HostChap:
    party = ChapParty(HOST.host_nqn, "nqn.2024-01.io.kvdev:test", HASHES_DEFAULT, groups)
    return HostChap(party, secrets or Credentials(HOST_SECRET), t_ids=Counter(16), seqnums=Counter(32))


def send(host: RawHost, message: bytes, *, in_capsule: bool = True) -> Reply:
    return host.execute(AuthCommand(len(message), is_send=True).to_sqe(), message, in_capsule=in_capsule)


def receive(host: RawHost, size_bytes: int = 4096) -> Reply:
    return host.execute(AuthCommand(size_bytes, is_send=False).to_sqe(), read_size_bytes=size_bytes)


def authenticate(host: RawHost, *, in_capsule: bool = True) -> None:
    chap = chap_of()
    assert send(host, chap.negotiate(), in_capsule=in_capsule).cqe.is_success
    challenge = receive(host)
    assert challenge.cqe.is_success
    assert send(host, chap.reply(challenge.data), in_capsule=in_capsule).cqe.is_success
    assert chap.conclude(receive(host).data) is None


def fail_then_closed(host: RawHost) -> FailureReason:
    """The failure that is received next; the target closes after it."""
    reply = receive(host)
    assert reply.cqe.is_success
    failure = Failure.parse(reply.data)
    assert failure.auth_id == AuthId.FAILURE1
    assert host.wait_closed() == b""
    return FailureReason(failure.reason)


@pytest.mark.parametrize("in_capsule", [True, False])
def test_target_takes_nothing_else_before_it_is_convinced(
    target: RunningTarget, raw: RawHost, in_capsule: bool
) -> None:
    reply = raw.connect(target.nqn)
    assert reply.cqe.is_success and reply.cqe.dw0 & AUTHREQ_ATR
    refused = [
        raw.property_get(Property.CAP, 8),
        raw.property_set(Property.CC, Cc(en=1, iosqes=6, iocqes=4).build()),
        raw.execute(IdentifyCommand(cns=Cns.CONTROLLER).to_sqe(), read_size_bytes=4096),
        raw.execute(build_keep_alive()),
        raw.execute(Sqe(opc=AdminOpcode.FABRICS, nsid=FabricsType.DISCONNECT, sgl_type=0)),
    ]
    for each in refused:
        assert each.cqe.status & 0x7FF == FabricsStatus.AUTHENTICATION_REQUIRED and each.cqe.dnr
    authenticate(raw, in_capsule=in_capsule)
    raw.enable()
    # An I/O queue of an authenticated controller is no more trusted than the first one was.
    with RawHost(target.address, target.port) as io:
        io.hostnqn, io.hostid = HOST.host_nqn, HOST.host_id_bytes
        io.exchange_ic()
        reply = io.connect(target.nqn, qid=1, cntlid=raw.cntlid)
        assert reply.cqe.is_success and reply.cqe.dw0 & AUTHREQ_ATR
        read = build_read_write(NvmOpcode.READ, nsid=1, slba=0, lba_count=1, byte_count=4096)
        refused_read = io.execute(read, read_size_bytes=4096)
        assert refused_read.cqe.status & 0x7FF == FabricsStatus.AUTHENTICATION_REQUIRED
        authenticate(io, in_capsule=in_capsule)
        assert io.execute(read, read_size_bytes=4096).data == bytes(4096)
        authenticate(io, in_capsule=in_capsule)
        assert io.execute(read, read_size_bytes=4096).data == bytes(4096)


def test_target_without_a_key_for_the_host_ends_who_tries(target: RunningTarget, raw: RawHost) -> None:
    raw.hostnqn = STRANGER.host_nqn
    assert not raw.connect(target.nqn).cqe.dw0 & AUTHREQ_ATR
    reply = send(raw, chap_of().negotiate())
    assert reply.cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR and reply.cqe.dnr
    assert raw.wait_closed() == b""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\0\0\0\0", FailureReason.INCORRECT_PAYLOAD),
        (bytes(8), FailureReason.INCORRECT_PAYLOAD),
        (bytes(4096), FailureReason.INCORRECT_PAYLOAD),
        (b"\1\2" + bytes(78), FailureReason.INCORRECT_MESSAGE),
        (b"\1\4" + bytes(14), FailureReason.INCORRECT_MESSAGE),
        (b"\xff" * 64, FailureReason.INCORRECT_MESSAGE),
    ],
)
def test_target_when_first_message_is_wrong_then_failure_and_closed(
    target: RunningTarget, raw: RawHost, message: bytes, reason: FailureReason
) -> None:
    raw.connect(target.nqn)
    assert send(raw, message).cqe.is_success
    assert fail_then_closed(raw) is reason


def test_target_when_response_is_wrong_then_failure_and_closed(target: RunningTarget, raw: RawHost) -> None:
    raw.connect(target.nqn)
    chap = chap_of(Credentials(DhchapSecret(bytes(32))))
    send(raw, chap.negotiate())
    send(raw, chap.reply(receive(raw).data))
    assert fail_then_closed(raw) is FailureReason.FAILED


def test_target_when_reply_was_heard_before_then_failure(target: RunningTarget, raw: RawHost) -> None:
    raw.connect(target.nqn)
    chap = chap_of()
    negotiation = chap.negotiate()
    send(raw, negotiation)
    former = chap.reply(receive(raw).data)
    send(raw, former)
    assert chap.conclude(receive(raw).data) is None
    send(raw, negotiation)
    receive(raw)
    send(raw, former)
    assert fail_then_closed(raw) is FailureReason.FAILED


def test_target_when_host_gives_up_then_closed(target: RunningTarget, raw: RawHost) -> None:
    raw.connect(target.nqn)
    chap = chap_of()
    send(raw, chap.negotiate())
    receive(raw)
    assert send(raw, chap.failure(FailureReason.FAILED)).cqe.is_success
    assert raw.wait_closed() == b""


def test_target_when_command_is_wrong_then_refused_and_the_transaction_goes_on(
    target: RunningTarget, raw: RawHost
) -> None:
    raw.connect(target.nqn)
    negotiation = chap_of().negotiate()
    good = AuthCommand(len(negotiation), is_send=True)
    wrong = [
        dataclasses.replace(good, secp=0),
        dataclasses.replace(good, spsp0=0),
        dataclasses.replace(good, spsp1=2),
        dataclasses.replace(good, size_bytes=len(negotiation) + 4),
    ]
    for command in wrong:
        sqe = dataclasses.replace(command.to_sqe(), sgl_len=len(negotiation))
        assert raw.execute(sqe, negotiation).cqe.status & 0x7FF == Status.INVALID_FIELD
    big = AuthCommand(8192, is_send=False).to_sqe()
    assert raw.execute(big, read_size_bytes=8192).cqe.status & 0x7FF == Status.INVALID_FIELD
    assert receive(raw).cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR
    authenticate(raw)


def test_target_when_host_does_not_authenticate_in_time_then_closed(
    target: RunningTarget, raw: RawHost
) -> None:
    assert raw.connect(target.nqn, kato_ms=1000).cqe.is_success
    send(raw, chap_of().negotiate())
    assert raw.wait_closed() == b""


def test_target_when_host_leaves_in_the_middle_then_its_controller_goes(target: RunningTarget) -> None:
    for step in range(4):
        with RawHost(target.address, target.port) as host:
            host.hostnqn, host.hostid = HOST.host_nqn, HOST.host_id_bytes
            host.exchange_ic()
            host.connect(target.nqn)
            chap = chap_of(groups=(DhGroupId.FFDHE3072,))
            if step > 0:
                send(host, chap.negotiate())
            if step == 2:
                host.send(host.capsule(AuthCommand(4096, is_send=False).to_sqe()))
            if step == 3:
                message = chap.reply(receive(host).data)
                sqe = (
                    AuthCommand(len(message), is_send=True)
                    .to_sqe()
                    .with_transfer(len(message), in_capsule=True)
                )
                host.send(host.capsule(sqe, message))
    limit = Deadline.after(10)
    while target.service.controllers(target.nqn) and not limit.is_expired:
        Event().wait(0.01)
    assert target.service.controllers(target.nqn) == []
    assert target.service.defect_count == 0


def test_target_when_two_commands_come_at_once_then_one_is_out_of_turn(
    target: RunningTarget, raw: RawHost
) -> None:
    raw.connect(target.nqn)
    send(raw, chap_of(groups=(DhGroupId.FFDHE8192,)).negotiate())
    command = AuthCommand(4096, is_send=False).to_sqe()
    raw.send(
        raw.capsule(dataclasses.replace(command, cid=1)) + raw.capsule(dataclasses.replace(command, cid=2))
    )
    statuses: dict[int, int] = {}
    while len(statuses) < 2:
        pdu = raw.read_pdu()
        if pdu.type == 5:
            statuses[pdu.cqe.cid] = pdu.cqe.status & 0x7FF
    assert sorted(statuses.values()) == [0, Status.COMMAND_SEQUENCE_ERROR]


# ---- our host and a controller that does it wrong ----

Spoil = Callable[[AuthHeader, bytes], bytes | None]
"""What is sent instead of a message; None closes the connection."""


class AuthScript(ControllerScript):
    """A scripted controller that authenticates, and spoils the messages it sends."""

    def __init__(
        self, spoil: Spoil = lambda _header, message: message, *, secrets: Credentials | None = None
    ) -> None:
        super().__init__()
        self.spoil = spoil
        self.secrets = secrets or Credentials(HOST_SECRET, CTRL_SECRET)
        self.received: list[AuthHeader] = []
        self.failures: list[int] = []
        self.send_status = 0
        self.is_padded = True
        """Whether it fills the host's room, as some targets do, or sends the message alone, as others."""
        self.chap = self._new_chap()
        self.answer = self._answer

    def _new_chap(self) -> ControllerChap:
        return ControllerChap(ChapParty(HOST.host_nqn, SUBNQN), lambda: self.secrets, seqnums=Counter(32))

    def _answer(self, connection: PeerConnection, pdu: PduFromHost, sqe: Sqe) -> bool:
        if sqe.opc == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT:
            self.chap = self._new_chap()
            command = ConnectCommand.from_sqe(sqe)
            self.kato_ms = self.kato_ms if command.qid else command.kato_ms
            connection.send_response(pdu, dw0=self.cntlid | AUTHREQ_ATR)
            return True
        if not is_auth_command(sqe):
            return False
        if sqe.fctype == FabricsType.AUTHENTICATION_SEND:
            header = AuthHeader.parse(pdu.data)
            self.received.append(header)
            if header.auth_id == AuthId.FAILURE2:
                self.failures.append(Failure.parse(pdu.data).reason)
            self.chap.send(pdu.data)
            connection.send_response(pdu, status=self.send_status)
            return True
        try:
            message = self.chap.receive()[0]
        except OutOfTurnError:
            connection.send_response(pdu, status=Status.COMMAND_SEQUENCE_ERROR)
            return True
        spoilt = self.spoil(AuthHeader.parse(message), message)
        if spoilt is None:
            raise PeerClosedError("the script closes the connection")
        connection.send_read(pdu, spoilt.ljust(4096, b"\0") if self.is_padded else spoilt)
        return True


def scripted_error(script: AuthScript, keys: Keys, **more: Any) -> KvdevError:
    with ScriptedPeer(script) as peer:
        options = both_ways(keys, dhchap_dhgroups=(DhGroupId.FFDHE2048,), **more)
        with Session(host=HOST, options=options) as kv, pytest.raises(KvdevError) as caught:
            kv.controller(f"tcp://{peer.address}:{peer.port}/{SUBNQN}", deadline=Deadline.after(60))
    return caught.value


def on_message(auth_id: AuthId, change: Callable[[bytes], bytes | None]) -> Spoil:
    return lambda header, message: change(message) if header.auth_id == auth_id else message


@pytest.mark.parametrize("is_padded", [True, False])
def test_host_connects_to_a_scripted_controller_that_does_it_right(keys: Keys, is_padded: bool) -> None:
    script = AuthScript()
    script.is_padded = is_padded
    with ScriptedPeer(script) as peer, Session(host=HOST, options=both_ways(keys)) as kv:
        kv.open_device(f"tcp://{peer.address}:{peer.port}/{SUBNQN}?nsid=1")
    assert [each.auth_id for each in script.received] == [0, 2, 4] * 2
    assert len({each.t_id for each in script.received}) == 2


def patched(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda message: message[:offset] + value + message[offset + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (on_message(AuthId.CHALLENGE, patched(0, b"\0")), FailureReason.INCORRECT_MESSAGE),
        (on_message(AuthId.CHALLENGE, patched(1, b"\3")), FailureReason.INCORRECT_MESSAGE),
        (on_message(AuthId.CHALLENGE, patched(4, b"\0\0")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(6, b"\x30")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(8, b"\4")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(9, b"\2")), FailureReason.DH_GROUP_UNUSABLE),
        (on_message(AuthId.CHALLENGE, patched(10, b"\0\0")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(10, b"\xfc\xff")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(12, bytes(4))), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.CHALLENGE, patched(48, bytes(256))), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.SUCCESS1, patched(1, b"\4")), FailureReason.INCORRECT_MESSAGE),
        (on_message(AuthId.SUCCESS1, patched(6, b"\0")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.SUCCESS1, patched(8, b"\0")), FailureReason.FAILED),
        (on_message(AuthId.SUCCESS1, patched(8, b"\2")), FailureReason.INCORRECT_PAYLOAD),
        (on_message(AuthId.SUCCESS1, patched(20, b"\0\0\0\0")), FailureReason.FAILED),
    ],
)
def test_host_when_controller_errs_then_it_is_told_and_the_connection_ends(
    keys: Keys, spoil: Spoil, reason: FailureReason
) -> None:
    script = AuthScript(spoil)
    error = scripted_error(script, keys)
    assert isinstance(error, AuthenticationError) and error.is_ours
    assert error.reason == reason.name.lower()
    assert script.failures == [reason]


@pytest.mark.parametrize("reason", list(FailureReason))
def test_host_when_controller_fails_then_error_has_the_remedy(keys: Keys, reason: FailureReason) -> None:
    def fail(header: AuthHeader, _message: bytes) -> bytes:
        return Failure(t_id=header.t_id, reason=reason).build()

    error = scripted_error(AuthScript(fail), keys)
    assert isinstance(error, AuthenticationError) and not error.is_ours
    assert error.reason == reason.name.lower()
    remedies = {
        FailureReason.FAILED: "check that dhchap-key",
        FailureReason.HASH_UNUSABLE: "this host takes sha256, sha384, sha512",
        FailureReason.DH_GROUP_UNUSABLE: "this host takes ffdhe2048",
        FailureReason.CONCATENATION_MISMATCH: "without a secure channel",
        FailureReason.PROTOCOL_UNUSABLE: "DH-HMAC-CHAP",
    }
    assert remedies.get(reason, "is it an NVMe/TCP target") in str(error)


def test_host_when_controller_closes_in_the_middle_then_connection_lost(keys: Keys) -> None:
    for auth_id in (AuthId.CHALLENGE, AuthId.SUCCESS1):
        error = scripted_error(AuthScript(on_message(auth_id, lambda _message: None)), keys)
        assert isinstance(error, ConnectionLostError)
        assert "while this host authenticated; check that dhchap-key is the secret" in str(error)


def test_host_when_controller_refuses_the_command_then_error_names_the_status(keys: Keys) -> None:
    script = AuthScript()
    script.send_status = Status.INTERNAL_ERROR
    error = scripted_error(script, keys)
    assert isinstance(error, AuthenticationError) and "authentication send" in str(error)
    script = AuthScript()
    script.send_status = Status.INVALID_OPCODE
    error = scripted_error(script, keys)
    assert isinstance(error, AuthenticationError) and error.reason == "no authentication"


def test_raw_host_sees_the_connection_end(target: RunningTarget, raw: RawHost) -> None:
    raw.connect(target.nqn)
    send(raw, b"\1\4" + bytes(14))
    receive(raw)
    with pytest.raises((TargetClosedError, ConnectionError)):
        raw.property_get(Property.CAP, 8)
