"""Keys of hosts through the RPC methods: named, shown, replaced, kept for a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.model import SpdkError, TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.testing.target_backend import MemoryBackend

NQN = "nqn.2016-06.io.spdk:cnode1"
HOST = f"{NQN}.host"


class Peer:
    """The methods of one target without a data path."""

    def __init__(self) -> None:
        self.model = TargetModel(MemoryBackend())
        self.methods = RpcMethods(self.model)

    def __call__(self, method: str, /, **params: Any) -> Any:
        return asyncio.run(self.methods.call(method, params or None))

    def hosts(self) -> Any:
        return self("nvmf_get_subsystems", nqn=NQN)[0]["hosts"]


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    made = Peer()
    for name in ("a", "b", "c"):
        path = tmp_path / name
        path.write_text("key")
        path.chmod(0o600)
        made("keyring_file_add_key", name=name, path=str(path))
    made("nvmf_create_subsystem", nqn=NQN)
    return made


def test_keys_of_a_host_are_shown_by_name_and_replaced(peer: Peer) -> None:
    peer("nvmf_subsystem_add_host", nqn=NQN, host=HOST, dhchap_key="a", dhchap_ctrlr_key="b")
    assert peer.hosts() == [{"nqn": HOST, "dhchap_key": "a", "dhchap_ctrlr_key": "b"}]
    peer("nvmf_subsystem_set_keys", nqn=NQN, host=HOST, dhchap_key="c")
    assert peer.hosts() == [{"nqn": HOST, "dhchap_key": "c"}]
    peer("nvmf_subsystem_set_keys", nqn=NQN, host=HOST)
    assert peer.hosts() == [{"nqn": HOST}]
    peer("nvmf_subsystem_set_keys", nqn=NQN, host=HOST, dhchap_key="a")
    peer("nvmf_subsystem_remove_host", nqn=NQN, host=HOST)
    peer("nvmf_subsystem_add_host", nqn=NQN, host=HOST)
    assert peer.hosts() == [{"nqn": HOST}]


def test_keys_that_cannot_be_are_refused(peer: Peer) -> None:
    add = {"nqn": NQN, "host": HOST}
    for wrong, text in (
        ({"dhchap_key": "none"}, "dhchap_key: no such key"),
        ({"dhchap_key": "a", "dhchap_ctrlr_key": "none"}, "dhchap_ctrlr_key: no such key"),
        ({"dhchap_ctrlr_key": "b"}, "expected a dhchap_key as well"),
        ({"dhchap_key": "a", "dhchap_ctrlr_key": "a"}, "expected another key"),
        ({"dhchap_key": "DHHC-1:00:c2VjcmV0:"}, "no such key"),
    ):
        with pytest.raises(SpdkError, match=text) as caught:
            peer("nvmf_subsystem_add_host", **add, **wrong)
        assert "c2VjcmV0" not in str(caught.value)
    assert peer.hosts() == []
    with pytest.raises(SpdkError, match="not in the list"):
        peer("nvmf_subsystem_set_keys", **add, dhchap_key="a")


def test_key_in_use_stays(peer: Peer) -> None:
    peer("nvmf_subsystem_add_host", nqn=NQN, host=HOST, dhchap_key="a")
    with pytest.raises(SpdkError, match=f"used by {HOST}"):
        peer("keyring_file_remove_key", name="a")
    peer("nvmf_subsystem_set_keys", nqn=NQN, host=HOST, dhchap_key="b")
    assert peer("keyring_file_remove_key", name="a")


def test_configuration_has_names_and_can_be_run_again(peer: Peer) -> None:
    peer("nvmf_subsystem_add_host", nqn=NQN, host=HOST, dhchap_key="a", dhchap_ctrlr_key="b")
    again = Peer()
    for subsystem in peer.methods.configuration():
        for call in subsystem["config"]:
            again(call["method"], **call.get("params", {}))
    assert again.hosts() == peer.hosts()
    assert again.model.subsystem(NQN) == peer.model.subsystem(NQN)
