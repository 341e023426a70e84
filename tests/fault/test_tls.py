"""TLS between our host and our target, and of each with OpenSSL's own tools and with what is no TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.block.device import flush, read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectError, KvdevError, UnsupportedError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.secure import TlsHandshakeError
from kvdev.native.tls import TlsHost, TlsKey, TlsPump
from kvdev.security.psk import TlsPsk
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import write_key_file
from kvdev.session import Session
from kvdev.target.model import FileKey, HostKeys, SpdkError
from kvdev.target.service import TargetOptions
from kvdev.testing.killable import KillableTarget, free_ports
from kvdev.testing.raw_host import RawHost
from kvdev.testing.target import RunningTarget, running_target
from kvdev.uri import DISCOVERY_NQN, DigestPolicy, KeySource
from kvdev.wire.log import SECTYPE_TLS13

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
OTHER_NQN = "nqn.2024-01.io.kvdev:other"
QUICK = ControllerOptions(
    connect_timeout_s=60.0, admin_timeout_s=60.0, shutdown_timeout_s=0.5, ctrl_loss_tmo_s=0
)
KEY = TlsPsk(bytes(range(32)), 1)
LONG_KEY = TlsPsk(bytes(range(48)), 2)
WRONG_KEY = TlsPsk(bytes(32), 1)


def _has_openssl() -> str:
    try:
        TlsPump().close()
    except UnsupportedError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_has_openssl()), reason=_has_openssl() or "OpenSSL is there")


@dataclasses.dataclass(frozen=True)
class Secure:
    """A target with a plain listener and one with TLS, and files of keys by their names."""

    target: RunningTarget
    port: int
    folder: Path

    @property
    def uri(self) -> str:
        return f"tcp://127.0.0.1:{self.port}/{self.target.nqn}"

    def source(self, name: str) -> KeySource:
        return KeySource("file", str(self.folder / name))

    def options(self, name: str, **more: Any) -> ControllerOptions:
        return dataclasses.replace(QUICK, tls_psk=self.source(name), **more)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("keys")
    texts: dict[str, TlsPsk | DhchapSecret] = {
        "key": KEY,
        "long": LONG_KEY,
        "wrong": WRONG_KEY,
        "chap": DhchapSecret(bytes(range(9, 41)), 1),
    }
    for name, secret in texts.items():
        write_key_file(str(folder / name), secret.text(), field="test")
    # Connections that say nothing are given up soon.
    core = dataclasses.replace(TargetOptions().core, connect_timeout_ms=1500)
    with running_target(hosts=[], options=TargetOptions(core=core)) as target:
        target.allow_host(HOST.host_nqn, HostKeys(psk=FileKey("k", str(folder / "key"))))
        where = target.model.add_listener(target.nqn, address="127.0.0.1", port=0, is_secure=True)
        yield Secure(target, where.port, folder)


def connect_error(uri: str, options: ControllerOptions) -> KvdevError:
    with Session(host=HOST, options=options) as kv, pytest.raises(KvdevError) as caught:
        kv.open_device(f"{uri}?nsid=1", deadline=Deadline.after(120))
    assert "\n" not in str(caught.value)
    return caught.value


# ---- our host and our target ----


@pytest.mark.parametrize("key", ["key", "long"])
@pytest.mark.parametrize("digest", [DigestPolicy.OFF, DigestPolicy.REQUIRE])
def test_data_moves_under_tls(secure: Secure, key: str, digest: DigestPolicy) -> None:
    target = secure.target
    target.model.remove_host(target.nqn, HOST.host_nqn)
    target.allow_host(HOST.host_nqn, HostKeys(psk=FileKey("k", str(secure.folder / key))))
    try:
        options = secure.options(key, io_queue_count=2, header_digest=digest, data_digest=digest)
        with Session(host=HOST, options=options) as kv:
            device = kv.open_device(f"{secure.uri}?nsid=1")
            for seed in range(4):
                pattern = bytes((seed * 37 + index) & 0xFF for index in range(4096)) * 512
                write_blocks(device, seed, pattern, Deadline.after(30))
                assert bytes(read_blocks(device, seed, 512, Deadline.after(30))) == pattern
            assert target.bdev(1).read(3 * 4096, 4096) == pattern[:4096]
    finally:
        target.model.remove_host(target.nqn, HOST.host_nqn)
        target.allow_host(HOST.host_nqn, HostKeys(psk=FileKey("k", str(secure.folder / "key"))))


def test_both_tls_and_authentication(secure: Secure) -> None:
    target = secure.target
    keys = HostKeys(FileKey("c", str(secure.folder / "chap")), psk=FileKey("k", str(secure.folder / "key")))
    target.model.set_host_keys(target.nqn, HOST.host_nqn, keys)
    try:
        options = secure.options("key", dhchap_key=secure.source("chap"))
        with Session(host=HOST, options=options) as kv:
            assert len(read_blocks(kv.open_device(f"{secure.uri}?nsid=1"), 0, 1, Deadline.after(60))) == 4096
        assert "demands authentication" in str(connect_error(secure.uri, secure.options("key")))
    finally:
        target.model.set_host_keys(target.nqn, HOST.host_nqn, HostKeys())


def test_key_in_the_uri_is_that_of_the_options(secure: Secure) -> None:
    with Session(host=HOST, options=QUICK) as kv:
        kv.open_device(f"{secure.uri}?nsid=1&tls-psk={secure.source('key')}")


def test_nothing_readable_is_on_the_wire(secure: Secure) -> None:
    """What goes through the port, seen by somebody in between."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        port = between.getsockname()[1]

        def carry(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    seen.extend(data)
                    sink.sendall(data)
            except OSError:
                pass
            finally:
                for each in (source, sink):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            for _ in range(2):
                near, _ = between.accept()
                far = socket.create_connection(("127.0.0.1", secure.port))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Session(host=HOST, options=secure.options("key")) as kv:
            device = kv.open_device(f"tcp://127.0.0.1:{port}/{secure.target.nqn}?nsid=1")
            write_blocks(device, 0, b"in the clear" * 1024, Deadline.after(60))
            assert bytes(read_blocks(device, 0, 3, Deadline.after(60))) == b"in the clear" * 1024
        thread.join(10)
    assert len(seen) > 24_000
    assert b"in the clear" not in seen
    # The names are the exception: the identity of the key goes ahead of the key.
    assert HOST.host_nqn.encode() in seen


def test_each_failure_has_its_own_message_and_remedy(
    secure: Secure, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        wrong = connect_error(secure.uri, secure.options("wrong"))
        assert isinstance(wrong, TlsHandshakeError)
        assert f"check that tls-psk is the key that the target has for host {HOST.host_nqn}" in str(wrong)

        plain = connect_error(secure.uri, QUICK)
        assert isinstance(plain, ConnectError) and "name the key with tls-psk=" in str(plain)

        unsecured = connect_error(secure.target.uri, secure.options("key"))
        assert isinstance(unsecured, TlsHandshakeError) and "does not speak TLS 1.3" in str(unsecured)

        assert isinstance(connect_error(secure.uri, secure.options("chap")), UsageError)
        gone = connect_error(secure.uri, secure.options("nothing"))
        assert isinstance(gone, UsageError) and "No such file" in str(gone)
    assert "TLS handshake" in caplog.text
    for key in (KEY, LONG_KEY):
        assert key.text()[16:36] not in caplog.text


def test_key_of_one_subsystem_opens_no_other(secure: Secure) -> None:
    target = secure.target
    target.add_subsystem(OTHER_NQN, hosts=[HOST.host_nqn])
    target.model.add_listener(OTHER_NQN, address="127.0.0.1", port=secure.port, is_secure=True)
    # The host has no key there: TLS itself fails.
    error = connect_error(f"tcp://127.0.0.1:{secure.port}/{OTHER_NQN}", secure.options("key"))
    assert isinstance(error, TlsHandshakeError)
    # A host that comes in with the key of the first and then asks for the second is refused at Connect.
    with Tunnel(secure, KEY, OTHER_NQN) as raw:
        reply = raw.connect(OTHER_NQN)
        assert not reply.cqe.is_success
    with Tunnel(secure, KEY, target.nqn) as raw:
        assert raw.connect(target.nqn).cqe.is_success


def test_discovery_says_that_tls_is_needed(secure: Secure) -> None:
    with Session(host=HOST, options=QUICK) as kv:
        entries = {entry.trsvcid: entry for entry in kv.discover(f"127.0.0.1:{secure.target.port}")}
    assert entries[str(secure.port)].treq & 3 == 1 and entries[str(secure.port)].sectype == SECTYPE_TLS13
    plain = entries[str(secure.target.port)]
    assert plain.treq & 3 == 2 and plain.sectype == 0
    with Session(host=HOST, options=secure.options("key")) as kv:
        assert {entry.subnqn for entry in kv.discover(f"127.0.0.1:{secure.port}")} >= {secure.target.nqn}
    wrong = connect_error(f"tcp://127.0.0.1:{secure.port}/{DISCOVERY_NQN}", secure.options("wrong"))
    assert isinstance(wrong, TlsHandshakeError)


def test_one_port_has_tls_for_all_its_subsystems_or_for_none(secure: Secure) -> None:
    nqn = "nqn.2024-01.io.kvdev:third"
    model = secure.target.model
    secure.target.add_subsystem(nqn)
    with pytest.raises(SpdkError, match="listens with TLS for another subsystem"):
        model.add_listener(nqn, address="127.0.0.1", port=secure.port)
    model.remove_listener(nqn, address="127.0.0.1", port=secure.target.port)
    with pytest.raises(SpdkError, match="listens without TLS for another subsystem"):
        model.add_listener(nqn, address="127.0.0.1", port=secure.target.port, is_secure=True)
    model.delete_subsystem(nqn)


def test_host_goes_on_after_the_target_was_killed(tmp_path: Path) -> None:
    nqn = "nqn.2024-01.io.kvdev:killable"
    path = tmp_path / "key"
    write_key_file(str(path), KEY.text(), field="test")
    (port,) = free_ports(1)
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    first_calls = [{"method": "keyring_file_add_key", "params": {"name": "k", "path": str(path)}}]
    last_calls = [
        {"method": "nvmf_subsystem_add_host", "params": {"nqn": nqn, "host": HOST.host_nqn, "psk": "k"}},
        {
            "method": "nvmf_subsystem_add_listener",
            "params": {"nqn": nqn, "listen_address": address, "secure_channel": True},
        },
    ]
    with KillableTarget(tmp_path, nqn=nqn, first_calls=first_calls, last_calls=last_calls) as killable:
        options = dataclasses.replace(
            QUICK,
            tls_psk=KeySource("file", str(path)),
            ctrl_loss_tmo_s=60.0,
            reconnect_delay_s=0.2,
            fence_wait_s=0.0,
            kato_ms=1000,
        )
        with Session(host=HOST, options=options) as kv:
            device = kv.open_device(f"tcp://127.0.0.1:{port}/{nqn}?nsid=1")
            write_blocks(device, 0, b"a" * 4096, Deadline.after(30))
            flush(device, Deadline.after(30))
            killable.kill()
            killable.start()
            assert bytes(read_blocks(device, 0, 1, Deadline.after(60))) == b"a" * 4096


# ---- what is no TLS, or no longer ----


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 128, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(200)]
)
def test_listener_when_no_tls_comes_then_closed_and_others_are_served(secure: Secure, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=20) as wrong:
        wrong.sendall(data)
        try:
            while wrong.recv(4096):
                pass
        except ConnectionResetError:
            pass
    with Session(host=HOST, options=secure.options("key")) as kv:
        kv.open_device(f"{secure.uri}?nsid=1")
    assert secure.target.service.defect_count == 0


def test_listener_when_hosts_come_and_go_then_nothing_leaks(secure: Secure) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def settle(limit: int) -> int:
        deadline = Deadline.after(15)
        while count() > limit and not deadline.is_expired:
            threading.Event().wait(0.02)
        return count()

    with Session(host=HOST, options=secure.options("key")) as kv:
        kv.open_device(f"{secure.uri}?nsid=1")
    before = settle(0 + count())
    for _ in range(3):
        with Session(host=HOST, options=secure.options("key")) as kv:
            kv.open_device(f"{secure.uri}?nsid=1")
        connect_error(secure.uri, secure.options("wrong"))
        socket.create_connection(("127.0.0.1", secure.port)).close()
    assert settle(before) <= before


# ---- OpenSSL's own tools ----

OPENSSL = shutil.which("openssl")


class Tunnel:
    """A raw host whose bytes go through ``openssl s_client`` with a key made for a subsystem."""

    def __init__(self, secure: Secure, key: TlsPsk, asked_nqn: str, *, version: int = 1) -> None:
        if OPENSSL is None:
            pytest.skip("no openssl here: apt-get install openssl")
        del asked_nqn
        made = key.material(host_nqn=HOST.host_nqn, subnqn=secure.target.nqn, version=version)
        ours, theirs = socket.socketpair()
        command = [OPENSSL, "s_client", "-connect", f"127.0.0.1:{secure.port}", "-tls1_3", "-quiet"]
        command += ["-psk", made.psk.hex(), "-psk_identity", made.identity]
        command += ["-ciphersuites", "TLS_AES_128_GCM_SHA256"]
        self._child = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
        )
        theirs.close()
        ours.settimeout(20)
        self.host = RawHost.over(ours)
        self.host.hostnqn, self.host.hostid = HOST.host_nqn, HOST.host_id_bytes

    def __enter__(self) -> RawHost:
        self.host.exchange_ic()
        return self.host

    def __exit__(self, *_exc: object) -> None:
        self.host.close()
        self._child.kill()
        self._child.wait(10)


@pytest.mark.parametrize("version", [0, 1])
def test_openssl_as_host_with_either_identity(secure: Secure, version: int) -> None:
    with Tunnel(secure, KEY, secure.target.nqn, version=version) as raw:
        assert raw.connect(secure.target.nqn).cqe.is_success
        raw.enable()


@pytest.mark.parametrize("version", [0, 1])
def test_our_host_with_openssl_as_target_tries_both_identities(secure: Secure, version: int) -> None:
    if OPENSSL is None:
        pytest.skip("no openssl here: apt-get install openssl")
    (port,) = free_ports(1)
    made = KEY.material(host_nqn=HOST.host_nqn, subnqn=secure.target.nqn, version=version)
    command = [OPENSSL, "s_server", "-accept", f"127.0.0.1:{port}", "-tls1_3", "-nocert", "-quiet"]
    command += ["-psk", made.psk.hex(), "-psk_identity", made.identity]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        options = secure.options("key", connect_timeout_s=3.0)
        limit = Deadline.after(30)
        while True:
            error = connect_error(f"tcp://127.0.0.1:{port}/{secure.target.nqn}", options)
            if not re.search("refused", str(error)) or limit.is_expired:
                break
        # It agreed on TLS, and then nobody answered the ICReq, which had arrived in the clear.
        assert not isinstance(error, TlsHandshakeError), error
        server.kill()
        assert server.stdout is not None
        assert server.stdout.read().startswith(b"\0\0\x80\0\x80\0\0\0")
    finally:
        server.kill()
        server.wait(10)


# ---- keys ----


def test_key_that_cannot_be_is_refused() -> None:
    pump = TlsPump()
    try:
        with pytest.raises(UsageError, match="identity"):
            TlsHost(pump, TlsKey("x" * 600, bytes(32), 1))
        with pytest.raises(OSError, match="tls"):
            TlsHost(pump, TlsKey("x", bytes(32), 3))
        with pytest.raises(OSError, match="tls"):
            TlsHost(pump, TlsKey("x", b"", 1))
        host = TlsHost(pump, TlsKey("x", bytes(32), 1))
    finally:
        pump.close()
    host.close()
    assert repr(TlsKey("x", b"secret" * 6, 1)).count("secret") == 0


def test_error_when_a_command_error_comes_through_tls_then_it_is_one(secure: Secure) -> None:
    options = dataclasses.replace(secure.options("key"), queue_depth=4000)
    with Session(host=HOST, options=options) as kv:
        device = kv.open_device(f"{secure.uri}?nsid=1")
        with pytest.raises((CommandError, UsageError)):
            read_blocks(device, device.block_count, 1, Deadline.after(10))
