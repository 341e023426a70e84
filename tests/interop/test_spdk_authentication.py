"""DH-HMAC-CHAP with SPDK, as target of our host and as host of our target.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later, started without huge pages).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import AuthenticationError, KvdevError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import write_key_file
from kvdev.session import Session
from kvdev.target.model import FileKey, HostKeys
from kvdev.target.service import TargetOptions
from kvdev.testing.target import running_target
from kvdev.uri import KeySource
from kvdev.wire.auth import DhGroupId, HashId
from spdk_rpc import Client, RpcMethodError
from tests.interop.test_spdk_host import spdk

pytestmark = pytest.mark.interop

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
NQN = "nqn.2016-06.io.spdk:cnode1"
SECRETS = {
    "h": DhchapSecret(bytes(range(32)), 1),
    "c": DhchapSecret(bytes(range(100, 164)), 3),
    "w": DhchapSecret(bytes(48), 2),
}
PATIENT_S = 60.0


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    folder = tmp_path_factory.mktemp("spdk")
    for name, secret in SECRETS.items():
        write_key_file(str(folder / name), secret.text(), field="test")
    with spdk(folder) as client:
        for name in SECRETS:
            client.call("keyring_file_add_key", {"name": name, "path": str(folder / name)})
        yield client, folder


def options(folder: Path, host: str, controller: str | None, **more: object) -> ControllerOptions:
    return ControllerOptions(
        dhchap_key=KeySource("file", str(folder / host)),
        dhchap_ctrl_key=None if controller is None else KeySource("file", str(folder / controller)),
        ctrl_loss_tmo_s=0,
        io_queue_count=2,
        connect_timeout_s=PATIENT_S,
        admin_timeout_s=PATIENT_S,
        kato_ms=60_000,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def uri(peer: tuple[Client, Path]) -> str:
    """SPDK as target, with keys for our host."""
    client, _ = peer
    client.call("nvmf_create_transport", {"trtype": "TCP"})
    client.call("bdev_malloc_create", {"name": "m", "num_blocks": 4096, "block_size": 4096})
    client.call("nvmf_create_subsystem", {"nqn": NQN})
    client.call("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m"}})
    host = {"nqn": NQN, "host": HOST.host_nqn, "dhchap_key": "h", "dhchap_ctrlr_key": "c"}
    client.call("nvmf_subsystem_add_host", host)
    with running_target(namespace_count=0) as other:
        port = other.port  # free again when this target has ended
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    client.call("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address})
    return f"tcp://127.0.0.1:{port}/{NQN}"


@pytest.mark.parametrize("hash_id", list(HashId))
@pytest.mark.parametrize("group", list(DhGroupId))
def test_our_host_when_spdk_target_has_keys_then_both_authenticate(
    peer: tuple[Client, Path], uri: str, hash_id: HashId, group: DhGroupId
) -> None:
    chosen = options(peer[1], "h", "c", dhchap_digests=(hash_id,), dhchap_dhgroups=(group,))
    with Session(host=HOST, options=chosen) as kv:
        device = kv.open_device(f"{uri}?nsid=1", deadline=Deadline.after(PATIENT_S))
        pattern = bytes((hash_id, group)) * 2048
        write_blocks(device, 1, pattern, Deadline.after(PATIENT_S))
        kv.controller(uri).reauthenticate(deadline=Deadline.after(PATIENT_S))
        assert bytes(read_blocks(device, 1, 1, Deadline.after(PATIENT_S))) == pattern


@pytest.mark.parametrize(("host", "controller"), [("w", None), ("h", "w"), ("w", "c")])
def test_our_host_when_a_secret_is_wrong_then_refused(
    peer: tuple[Client, Path], uri: str, host: str, controller: str | None
) -> None:
    chosen = options(peer[1], host, controller)
    with (
        Session(host=HOST, options=chosen) as kv,
        pytest.raises(KvdevError, match="check that dhchap-") as caught,
    ):
        kv.controller(uri, deadline=Deadline.after(PATIENT_S))
    assert host == "w" or isinstance(caught.value, AuthenticationError)


@pytest.mark.parametrize("group", [DhGroupId.NULL, DhGroupId.FFDHE2048, DhGroupId.FFDHE8192])
def test_spdk_host_when_our_target_has_keys_then_both_authenticate(
    peer: tuple[Client, Path], group: DhGroupId
) -> None:
    client, folder = peer
    keys = HostKeys(FileKey("h", str(folder / "h")), FileKey("c", str(folder / "c")))
    with running_target(hosts=[], options=TargetOptions(dhchap_dhgroups=(group,))) as target:
        target.allow_host(HOST.host_nqn, keys)
        attach = {
            "name": "Nvme0",
            "trtype": "TCP",
            "adrfam": "IPv4",
            "traddr": target.address,
            "trsvcid": str(target.port),
            "subnqn": target.nqn,
            "hostnqn": HOST.host_nqn,
        }
        for wrong in ({"dhchap_key": "w"}, {}, {"dhchap_key": "h", "dhchap_ctrlr_key": "w"}):
            with pytest.raises(RpcMethodError):
                client.call("bdev_nvme_attach_controller", {**attach, **wrong})
        right = {"dhchap_key": "h", "dhchap_ctrlr_key": "c"}
        assert client.call("bdev_nvme_attach_controller", {**attach, **right}) == ["Nvme0n1"]
        client.call("bdev_nvme_detach_controller", {"name": "Nvme0"})
        assert target.service.defect_count == 0
