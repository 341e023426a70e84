"""TLS with SPDK's ssl sockets, as target of our host and as host of our target.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later, started without huge pages).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.secure import TlsHandshakeError
from kvdev.security.psk import TlsPsk
from kvdev.security.source import write_key_file
from kvdev.session import Session
from kvdev.target.model import FileKey, HostKeys
from kvdev.testing.killable import free_ports
from kvdev.testing.target import running_target
from kvdev.uri import KeySource
from spdk_rpc import Client
from tests.interop.test_spdk_host import spdk

pytestmark = pytest.mark.interop

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
NQN = "nqn.2016-06.io.spdk:cnode1"
KEYS = {"a": TlsPsk(bytes(range(32)), 1), "b": TlsPsk(bytes(range(48)), 2)}
PATIENT_S = 60.0


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    folder = tmp_path_factory.mktemp("spdk")
    for name, key in KEYS.items():
        write_key_file(str(folder / name), key.text(), field="test")
    with spdk(folder) as client:
        for name in KEYS:
            client.call("keyring_file_add_key", {"name": name, "path": str(folder / name)})
        yield client, folder


def test_our_host_when_spdk_listener_demands_tls_then_data_moves(peer: tuple[Client, Path]) -> None:
    client, folder = peer
    (port,) = free_ports(1)
    client.call("nvmf_create_transport", {"trtype": "TCP"})
    client.call("bdev_malloc_create", {"name": "m", "num_blocks": 4096, "block_size": 4096})
    client.call("nvmf_create_subsystem", {"nqn": NQN})
    client.call("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m"}})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    listener = {"nqn": NQN, "listen_address": address, "secure_channel": True}
    client.call("nvmf_subsystem_add_listener", listener)
    uri = f"tcp://127.0.0.1:{port}/{NQN}"
    for name in KEYS:
        client.call("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST.host_nqn, "psk": name})
        for used in KEYS:
            options = ControllerOptions(
                tls_psk=KeySource("file", str(folder / used)),
                ctrl_loss_tmo_s=0,
                kato_ms=60_000,
                connect_timeout_s=PATIENT_S,
                admin_timeout_s=PATIENT_S,
            )
            with Session(host=HOST, options=options) as kv:
                if used != name:
                    with pytest.raises(TlsHandshakeError, match="check that tls-psk"):
                        kv.controller(uri, deadline=Deadline.after(PATIENT_S))
                    continue
                device = kv.open_device(f"{uri}?nsid=1", deadline=Deadline.after(PATIENT_S))
                pattern = name.encode() * 65536
                write_blocks(device, 1, pattern, Deadline.after(PATIENT_S))
                assert bytes(read_blocks(device, 1, 16, Deadline.after(PATIENT_S))) == pattern
        client.call("nvmf_subsystem_remove_host", {"nqn": NQN, "host": HOST.host_nqn})


@pytest.mark.parametrize("name", list(KEYS))
def test_spdk_host_when_our_listener_demands_tls_then_attaches(peer: tuple[Client, Path], name: str) -> None:
    client, folder = peer
    with running_target(hosts=[]) as target:
        target.allow_host(HOST.host_nqn, HostKeys(psk=FileKey(name, str(folder / name))))
        where = target.model.add_listener(target.nqn, address="127.0.0.1", port=0, is_secure=True)
        attach = {
            "name": "Nvme0",
            "trtype": "TCP",
            "adrfam": "IPv4",
            "traddr": "127.0.0.1",
            "trsvcid": str(where.port),
            "subnqn": target.nqn,
            "hostnqn": HOST.host_nqn,
            "psk": name,
        }
        assert client.call("bdev_nvme_attach_controller", attach) == ["Nvme0n1"]
        client.call("bdev_nvme_detach_controller", {"name": "Nvme0"})
        assert target.service.defect_count == 0
