"""One scenario through the typed client, against our target's RPC server and against a real spdk_tgt.

KVDEV_SPDK_TGT=/path/to/spdk_tgt adds the second (26.05 or later, started without huge pages).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.clock import Deadline
from kvdev.target.model import DISCOVERY_NQN
from kvdev.target.serve import EmbeddedTarget
from spdk_rpc import Client, RpcMethodError, RpcStateError, RpcTransportError, SpdkRpc

NQN = "nqn.2016-06.io.spdk:cnode1"
HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"
START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def our_target(folder: Path) -> Iterator[str]:
    with EmbeddedTarget(folder / "rpc.sock") as target:
        yield target.rpc_socket


@contextlib.contextmanager
def spdk_target(folder: Path) -> Iterator[str]:
    binary = os.environ.get("KVDEV_SPDK_TGT")
    if not binary:
        pytest.skip("KVDEV_SPDK_TGT names no spdk_tgt")
    path = str(folder / "spdk.sock")
    arguments = [
        binary,
        "--no-pci",
        "--no-huge",
        "-s",
        "1024",
        "-m",
        "0x1",
        "--disable-cpumask-locks",
        "-r",
        path,
    ]
    with (
        (folder / "spdk.log").open("wb") as log,
        subprocess.Popen(arguments, stdout=log, stderr=log) as process,
    ):
        try:
            wait_until_it_answers(path, process)
            yield path
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_it_answers(path: str, process: subprocess.Popen[bytes]) -> None:
    deadline = Deadline.after(START_TIMEOUT_S)
    while True:
        try:
            SpdkRpc(Client(path, timeout_s=START_TIMEOUT_S)).framework_wait_init()
            return
        except RpcTransportError:
            deadline.check("start of spdk_tgt")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            raise AssertionError(f"spdk_tgt ended with {process.returncode}")


@pytest.fixture(params=["kvdev", pytest.param("spdk_tgt", marks=pytest.mark.interop)])
def rpc(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SpdkRpc]:
    started = our_target(tmp_path) if request.param == "kvdev" else spdk_target(tmp_path)
    with started as path, Client(path, timeout_s=30) as client:
        yield SpdkRpc(client)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def refused(
    code: int, message: str = ""
) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[RpcMethodError]]:
    """Expect a refusal with this code and a text that starts so."""

    @contextlib.contextmanager
    def expecting() -> Iterator[pytest.ExceptionInfo[RpcMethodError]]:
        with pytest.raises(RpcMethodError) as caught:
            yield caught
        assert caught.value.code == code, caught.value
        assert caught.value.message.startswith(message), caught.value

    return expecting()


def provision(rpc: SpdkRpc, folder: Path, port: int) -> None:
    """Four members, a raid of two of them, one subsystem that shows the raid and the other two."""
    rpc.bdev_malloc_create(name="M0", num_blocks=4096, block_size=4096)
    rpc.bdev_malloc_create(name="M1", num_blocks=4096, block_size=4096)
    rpc.bdev_null_create(name="N0", num_blocks=1 << 20, block_size=4096)
    (folder / "member.img").touch()
    os.truncate(folder / "member.img", 8 << 20)
    rpc.bdev_aio_create(name="A0", filename=str(folder / "member.img"), block_size=4096)
    rpc.bdev_raid_create(name="Raid0", strip_size_kb=64, base_bdevs=["M0", "M1"])
    rpc.nvmf_create_transport(max_io_size=1 << 20, in_capsule_data_size=8192)
    rpc.nvmf_create_subsystem(nqn=NQN, serial_number="KV1", model_number="model", max_namespaces=8)
    assert rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="Raid0") == 1
    assert rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="N0", nsid=5) == 5
    assert rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="A0") == 2
    rpc.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)


def test_provisioning_reads_back_as_asked_for(rpc: SpdkRpc, tmp_path: Path) -> None:
    port = free_port()
    provision(rpc, tmp_path, port)
    (transport,) = rpc.nvmf_get_transports(trtype="TCP")
    assert (transport["max_io_size"], transport["in_capsule_data_size"]) == (1 << 20, 8192)
    discovery, subsystem = rpc.nvmf_get_subsystems()
    assert (discovery["nqn"], discovery["subtype"]) == (DISCOVERY_NQN, "Discovery")
    assert (subsystem["serial_number"], subsystem["model_number"]) == ("KV1", "model")
    assert [(each["nsid"], each["bdev_name"]) for each in subsystem["namespaces"]] == [
        (1, "Raid0"),
        (2, "A0"),
        (5, "N0"),
    ]
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    assert subsystem["listen_addresses"] == [address]
    assert rpc.nvmf_subsystem_get_listeners(NQN)[0]["address"] == address
    assert rpc.nvmf_get_subsystems(nqn=NQN) == [subsystem]
    (raid,) = rpc.bdev_raid_get_bdevs("online")
    assert [each["name"] for each in raid["base_bdevs_list"]] == ["M0", "M1"]
    (bdev,) = rpc.bdev_get_bdevs(name="Raid0")
    assert (bdev["num_blocks"], bdev["block_size"], bdev["claimed"]) == (8192, 4096, True)
    # The identity of a namespace comes from its bdev.
    assert subsystem["namespaces"][0]["uuid"] == bdev["uuid"]
    assert subsystem["namespaces"][0]["nguid"] == bdev["uuid"].replace("-", "").upper()
    assert rpc.nvmf_subsystem_get_controllers(NQN) == []
    assert rpc.nvmf_subsystem_get_qpairs(NQN) == []
    assert rpc.nvmf_get_stats()["poll_groups"]
    (stat,) = rpc.bdev_get_iostat(names=["N0"])["bdevs"]
    assert stat["name"] == "N0"
    assert rpc.bdev_reset_iostat(name="N0")


def test_refusals_have_the_same_codes_and_texts(rpc: SpdkRpc, tmp_path: Path) -> None:
    port = free_port()
    provision(rpc, tmp_path, port)
    with refused(-17, "File exists"):
        rpc.bdev_malloc_create(name="M0", num_blocks=16, block_size=512)
    with refused(-22, "Invalid argument"):
        rpc.bdev_malloc_create(name="M9", num_blocks=16, block_size=513)
    with refused(-22, "Invalid argument"):
        rpc.bdev_malloc_create(name="M9", num_blocks=0, block_size=512)
    for delete in (rpc.bdev_malloc_delete, rpc.bdev_aio_delete, rpc.bdev_null_delete):
        with refused(-19, "No such device"):
            delete("Nope")
    with refused(-19, "No such device"):
        rpc.bdev_aio_delete("M0")
    with refused(-2, "No such file or directory"):
        rpc.bdev_aio_create(name="A9", filename=str(tmp_path / "none"), block_size=4096)
    with refused(-22, "Invalid argument"):
        rpc.bdev_aio_create(name="A9", filename=str(tmp_path / "member.img"), block_size=1000)
    with refused(-22, "Invalid argument"):
        rpc.bdev_aio_create(name="A9", filename=str(tmp_path / "member.img"))
    with refused(-1, "Failed to create RAID bdev R9: Operation not permitted"):
        rpc.bdev_raid_create(name="R9", strip_size_kb=64, base_bdevs=["M0"])
    with refused(-17, "Failed to create RAID bdev Raid0: File exists"):
        rpc.bdev_raid_create(name="Raid0", strip_size_kb=64, base_bdevs=["x"])
    with refused(-22, "Failed to create RAID bdev R9: Invalid argument"):
        rpc.bdev_raid_create(name="R9", strip_size_kb=0, base_bdevs=["x"])
    with refused(-22, "Failed to create RAID bdev R9: Invalid argument"):
        rpc.bdev_raid_create(name="R9", strip_size_kb=64, base_bdevs=[])
    with refused(-32700, "spdk_json_decode_object failed"):
        # Our own client refuses that level before it is sent.
        rpc.client.call(
            "bdev_raid_create",
            {"name": "R9", "strip_size_kb": 64, "base_bdevs": ["x"], "raid_level": "raid77"},
        )
    with refused(-19, "raid bdev R9 not found"):
        rpc.bdev_raid_delete("R9")
    with refused(-19, "No such device"):
        rpc.bdev_get_bdevs(name="Nope")
    with refused(-110, "Connection timed out"):
        rpc.bdev_get_bdevs(name="Nope", timeout_ms=20)
    with refused(-19, "No such device"):
        rpc.bdev_get_iostat(names=["Nope"])
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="Raid0", nsid=7)
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="M0", nsid=9)
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_remove_ns(nqn=NQN, nsid=7)
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="M0", nguid="AB")
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)
    with refused(-32602, "Invalid parameters"):
        rpc.nvmf_subsystem_remove_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port - 1)
    with refused(-32603, "Unable to create subsystem"):
        rpc.nvmf_create_subsystem(nqn=NQN)
    with refused(-32602, "Invalid cntlid range [5-4]"):
        rpc.nvmf_create_subsystem(nqn=NQN + "b", min_cntlid=5, max_cntlid=4)
    with refused(-32603, "Transport type 'TCP' already exists"):
        rpc.nvmf_create_transport()
    with refused(-32602, "Invalid transport type 'CARRIER'"):
        rpc.nvmf_create_transport(trtype="CARRIER")
    with refused(-19, "No such device"):
        rpc.nvmf_get_transports(trtype="RDMA")
    with refused(-32601, "Method not found"):
        rpc.call("no_such_method", bool)
    with pytest.raises(RpcStateError):
        rpc.framework_start_init()
    # A subsystem that could not be made is not half there.
    assert [each["nqn"] for each in rpc.nvmf_get_subsystems()] == [DISCOVERY_NQN, NQN]


def test_hosts_are_listed_newest_first_and_refused_twice(rpc: SpdkRpc) -> None:
    rpc.nvmf_create_subsystem(nqn=NQN, allow_any_host=False)
    other = HOST.replace("1111", "2222")
    rpc.nvmf_subsystem_add_host(nqn=NQN, host=HOST)
    rpc.nvmf_subsystem_add_host(nqn=NQN, host=other)
    (subsystem,) = rpc.nvmf_get_subsystems(nqn=NQN)
    assert [each["nqn"] for each in subsystem["hosts"]] == [other, HOST]
    assert subsystem["allow_any_host"] is False
    with refused(-32603, "Internal error"):
        rpc.nvmf_subsystem_add_host(nqn=NQN, host=HOST)
    with refused(-32603, "Internal error"):
        rpc.nvmf_subsystem_add_host(nqn=NQN, host="nonsense")
    rpc.nvmf_subsystem_remove_host(nqn=NQN, host=HOST)
    with refused(-32603, "Internal error"):
        rpc.nvmf_subsystem_remove_host(nqn=NQN, host=HOST)
    rpc.nvmf_subsystem_allow_any_host(nqn=NQN, allow_any_host=True)
    (subsystem,) = rpc.nvmf_get_subsystems(nqn=NQN)
    assert [each["nqn"] for each in subsystem["hosts"]] == [other]
    assert subsystem["allow_any_host"] is True


def test_bdev_deleted_under_a_namespace_takes_it_along(rpc: SpdkRpc, tmp_path: Path) -> None:
    provision(rpc, tmp_path, free_port())
    rpc.bdev_null_delete("N0")
    (subsystem,) = rpc.nvmf_get_subsystems(nqn=NQN)
    assert [each["nsid"] for each in subsystem["namespaces"]] == [1, 2]


def test_base_deleted_under_a_raid_takes_it_offline(rpc: SpdkRpc, tmp_path: Path) -> None:
    provision(rpc, tmp_path, free_port())
    rpc.bdev_malloc_delete("M0")
    (raid,) = rpc.bdev_raid_get_bdevs("all")
    assert (raid["state"], raid["num_base_bdevs_discovered"], raid["num_base_bdevs_operational"]) == (
        "offline",
        1,
        1,
    )
    assert [each["is_configured"] for each in raid["base_bdevs_list"]] == [False, True]
    assert [each["name"] for each in raid["base_bdevs_list"]][1] == "M1"
    with refused(-19):
        rpc.bdev_get_bdevs(name="Raid0")
    (subsystem,) = rpc.nvmf_get_subsystems(nqn=NQN)
    assert [each["nsid"] for each in subsystem["namespaces"]] == [2, 5]
    rpc.bdev_raid_delete("Raid0")
    assert rpc.bdev_raid_get_bdevs("all") == []
    assert rpc.bdev_get_bdevs(name="M1")[0]["claimed"] is False


def test_raid_waits_for_its_bases_and_goes_online_with_the_last(rpc: SpdkRpc) -> None:
    rpc.bdev_raid_create(name="Raid0", strip_size_kb=64, base_bdevs=["B0", "B1"])
    rpc.bdev_malloc_create(name="B1", num_blocks=1000, block_size=4096)
    (raid,) = rpc.bdev_raid_get_bdevs("configuring")
    assert raid["num_base_bdevs_discovered"] == 1
    assert rpc.bdev_get_bdevs(name="B1")[0]["claimed"] is True
    rpc.bdev_malloc_create(name="B0", num_blocks=2000, block_size=4096)
    (raid,) = rpc.bdev_raid_get_bdevs("online")
    # 1000 blocks are 62 whole strips of 16.
    assert rpc.bdev_get_bdevs(name="Raid0")[0]["num_blocks"] == 2 * 62 * 16
    rpc.bdev_raid_delete("Raid0")
    assert [each["claimed"] for each in rpc.bdev_get_bdevs()] == [False, False]


def test_removal_gives_everything_back(rpc: SpdkRpc, tmp_path: Path) -> None:
    port = free_port()
    provision(rpc, tmp_path, port)
    rpc.nvmf_subsystem_remove_ns(nqn=NQN, nsid=5)
    assert rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name="N0") == 3
    rpc.nvmf_subsystem_remove_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)
    assert rpc.nvmf_subsystem_get_listeners(NQN) == []
    rpc.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)
    rpc.nvmf_delete_subsystem(NQN)
    assert [each["nqn"] for each in rpc.nvmf_get_subsystems()] == [DISCOVERY_NQN]
    rpc.bdev_raid_delete("Raid0")
    for name in ("M0", "M1"):
        rpc.bdev_malloc_delete(name)
    rpc.bdev_null_delete("N0")
    rpc.bdev_aio_delete("A0")
    assert rpc.bdev_get_bdevs() == []
    kinds = [(each["type"], each["ctx"]) for each in rpc.notify_get_notifications()]
    assert ("bdev_register", "Raid0") in kinds and ("bdev_unregister", "M0") in kinds
    ids = [each["id"] for each in rpc.notify_get_notifications(first_id=2, max_count=2)]
    assert ids == [2, 3]


def test_configuration_lists_calls_that_bring_it_back(rpc: SpdkRpc, tmp_path: Path) -> None:
    provision(rpc, tmp_path, free_port())
    names = {each["subsystem"] for each in rpc.framework_get_subsystems()}
    assert {"bdev", "nvmf"} <= names
    calls = [call for name in ("bdev", "nvmf") for call in rpc.framework_get_config(name) or ()]
    before = rpc.nvmf_get_subsystems()
    rpc.nvmf_delete_subsystem(NQN)
    rpc.bdev_raid_delete("Raid0")
    for name in ("M0", "M1"):
        rpc.bdev_malloc_delete(name)
    rpc.bdev_null_delete("N0")
    rpc.bdev_aio_delete("A0")
    ours = (
        "bdev_malloc",
        "bdev_null",
        "bdev_aio",
        "bdev_raid_create",
        "nvmf_create_subsystem",
        "nvmf_subsystem_add",
    )
    for call in calls:
        if call["method"].startswith(ours):
            rpc.client.call(call["method"], call["params"])
    assert rpc.nvmf_get_subsystems() == before


def test_levels_flags_reactors_and_methods(rpc: SpdkRpc) -> None:
    assert rpc.spdk_get_version()["fields"]["major"] >= 26
    assert {"bdev_get_bdevs", "nvmf_get_subsystems"} <= set(rpc.rpc_get_methods(current=True))
    level = rpc.log_get_level()
    assert rpc.log_set_level("WARNING") and rpc.log_get_level() == "WARNING"
    assert level != "WARNING"
    assert rpc.log_set_print_level("ERROR") and rpc.log_get_print_level() == "ERROR"
    flag = next(iter(rpc.log_get_flags()))
    assert rpc.log_set_flag(flag) and rpc.log_get_flags()[flag] is True
    assert rpc.log_clear_flag(flag) and rpc.log_get_flags()[flag] is False
    with refused(-32602, "invalid log flag"):
        rpc.log_set_flag("no such flag")
    assert "bdev_register" in rpc.notify_get_types()
    assert rpc.framework_get_reactors()["reactors"]
    assert rpc.bdev_wait_for_examine()
