"""One scenario through the typed client, against our target's RPC server and against a real spdk_tgt.

KVDEV_SPDK_TGT=/path/to/spdk_tgt adds the second (26.05 or later, started without huge pages).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev.target.model import DISCOVERY_NQN
from kvdev.target.serve import EmbeddedTarget
from spdk_rpc import (
    AsyncClient,
    AsyncSpdkRpc,
    Client,
    RpcMethodError,
    RpcStateError,
    RpcTransportError,
    RpcUnsupportedError,
    SpdkRpc,
    calls,
)

NQN = "nqn.2016-06.io.spdk:cnode1"
HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"
START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def our_target(folder: Path) -> Iterator[str]:
    with EmbeddedTarget(folder / "rpc.sock") as target:
        yield target.rpc_socket


@contextlib.contextmanager
def spdk_target(folder: Path, *, name: str = "spdk", core: int = 0) -> Iterator[str]:
    """A running spdk_tgt without huge pages; its vhost sockets lie in the folder."""
    binary = os.environ.get("KVDEV_SPDK_TGT")
    if not binary:
        pytest.skip("KVDEV_SPDK_TGT names no spdk_tgt")
    path = str(folder / f"{name}.sock")
    memory = ["--no-pci", "--no-huge", "-s", "1024"]
    place = ["-m", hex(1 << core), "--disable-cpumask-locks", "-S", str(folder)]
    with (
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen([binary, *memory, *place, "-r", path], stdout=log, stderr=log) as process,
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
    # "Invalid parameters" in 26.05, "Invalid nguid" after it.
    with refused(-32602, "Invalid "):
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


def create_delay(rpc: SpdkRpc, name: str, base_name: str, *, p99_read_latency: int = 20) -> str:
    return rpc.bdev_delay_create(
        name=name,
        base_bdev_name=base_name,
        avg_read_latency=10,
        p99_read_latency=p99_read_latency,
        avg_write_latency=30,
        p99_write_latency=40,
    )


def test_stacked_bdevs_read_back_as_asked_for(rpc: SpdkRpc) -> None:
    for name in ("M0", "M1", "M2"):
        rpc.bdev_malloc_create(name=name, num_blocks=8192, block_size=4096)
    store = rpc.bdev_lvol_create_lvstore(bdev_name="M0", lvs_name="lvs", cluster_sz=1 << 20)
    first = rpc.bdev_lvol_create(lvol_name="a", size_in_mib=5, lvs_name="lvs")
    rpc.bdev_lvol_create(lvol_name="b", size_in_mib=8, uuid=store)
    (described,) = rpc.bdev_lvol_get_lvstores(lvs_name="lvs")
    assert {each: described[each] for each in ("uuid", "name", "base_bdev", "cluster_size")} == {
        "uuid": store,
        "name": "lvs",
        "base_bdev": "M0",
        "cluster_size": 1 << 20,
    }
    assert described["total_data_clusters"] - described["free_clusters"] == 13
    lvol = rpc.bdev_lvol_get_lvols(lvs_name="lvs")[0]
    assert (lvol["alias"], lvol["uuid"], lvol["num_allocated_clusters"]) == ("lvs/a", first, 5)
    (bdev,) = rpc.bdev_get_bdevs(name="lvs/a")
    assert (bdev["name"], bdev["aliases"], bdev["num_blocks"]) == (first, ["lvs/a"], 1280)
    assert rpc.bdev_get_bdevs(name="M0")[0]["claim_type"] == "read_many_write_one"
    rpc.bdev_raid_create(name="R", strip_size_kb=64, base_bdevs=["lvs/a", "lvs/b"])
    (raid,) = rpc.bdev_raid_get_bdevs("online")
    assert [each["name"] for each in raid["base_bdevs_list"]] == ["lvs/a", "lvs/b"]
    assert rpc.bdev_get_bdevs(name="R")[0]["num_blocks"] == 2 * 1280
    assert rpc.bdev_split_create(base_bdev="M1", split_count=2) == ["M1p0", "M1p1"]
    assert rpc.bdev_get_bdevs(name="M1p1")[0]["driver_specific"] == {
        "split": {"base_bdev": "M1", "offset_blocks": 4096}
    }
    assert create_delay(rpc, "D", "M2") == "D"
    assert rpc.bdev_delay_update_latency(delay_bdev_name="D", latency_type="avg_read", latency_us=15)
    assert rpc.bdev_error_create("D")
    assert rpc.bdev_error_inject_error(name="EE_D", io_type="read", error_type="failure", num=2)
    assert rpc.bdev_error_resume_pending("EE_D")
    assert rpc.bdev_get_bdevs(name="EE_D")[0]["driver_specific"] == {"error_disk": {"base_bdev": "D"}}
    assert rpc.bdev_set_qos_limit(name="EE_D", rw_ios_per_sec=2500, w_mbytes_per_sec=7)
    assert rpc.bdev_get_bdevs(name="EE_D")[0]["assigned_rate_limits"] == {
        "rw_ios_per_sec": 3000,
        "rw_mbytes_per_sec": 0,
        "r_mbytes_per_sec": 0,
        "w_mbytes_per_sec": 7,
    }
    rpc.bdev_enable_histogram(name="D", enable=True)
    histogram = rpc.bdev_get_histogram("D")
    ranges = histogram["max_range"] - histogram["min_range"] + 1
    assert len(base64.b64decode(histogram["histogram"])) == ranges * (8 << histogram["granularity"])
    methods = [each["method"] for each in rpc.framework_get_config("bdev") or []]
    assert {"bdev_delay_create", "bdev_error_create", "bdev_split_create", "bdev_set_qos_limit"} <= set(
        methods
    )
    # From the top down, and each base is free again.
    rpc.bdev_error_delete("EE_D")
    rpc.bdev_delay_delete("D")
    rpc.bdev_split_delete("M1")
    rpc.bdev_raid_delete("R")
    rpc.bdev_lvol_delete("lvs/b")
    rpc.bdev_lvol_delete_lvstore(lvs_name="lvs")
    assert [(each["name"], each["claimed"]) for each in rpc.bdev_get_bdevs()] == [
        ("M0", False),
        ("M1", False),
        ("M2", False),
    ]


def test_refusals_of_stacked_bdevs_have_the_same_codes_and_texts(rpc: SpdkRpc) -> None:
    rpc.bdev_malloc_create(name="M", num_blocks=8192, block_size=4096)
    rpc.bdev_malloc_create(name="N", num_blocks=8192, block_size=4096)
    create_delay(rpc, "D", "M")
    with refused(-1, "Operation not permitted"):
        create_delay(rpc, "E", "M")
    with refused(-22, "Invalid argument"):
        create_delay(rpc, "E", "x", p99_read_latency=1)
    with refused(-32602, "The requested bdev does not exist."):
        rpc.bdev_delay_update_latency(delay_bdev_name="M", latency_type="avg_read", latency_us=1)
    with refused(-19, "No such device"):
        rpc.bdev_delay_delete("N")
    with refused(-1, "Operation not permitted"):
        rpc.bdev_error_create("M")
    rpc.bdev_error_create("D")
    with refused(-17, "File exists"):
        rpc.bdev_error_create("D")
    with refused(-22, "nvme_sct or nvme_sc should be specified"):
        rpc.bdev_error_inject_error(name="EE_D", io_type="read", error_type="nvme_failure")
    with refused(-22, "Invalid argument"):
        rpc.bdev_error_inject_error(name="EE_D", io_type="read", error_type="corrupt_data")
    with refused(-19, "No such device"):
        rpc.bdev_error_inject_error(name="N", io_type="read", error_type="failure")
    with refused(-32602, "Failed to create 0 split bdevs from 'N': Invalid argument"):
        rpc.bdev_split_create(base_bdev="N", split_count=0)
    with refused(-22, "Invalid argument"):
        rpc.bdev_lvol_create_lvstore(bdev_name="N", lvs_name="L", cluster_sz=1000)
    rpc.bdev_lvol_create_lvstore(bdev_name="N", lvs_name="L")
    with refused(-17, "File exists"):
        rpc.bdev_lvol_create_lvstore(bdev_name="EE_D", lvs_name="L")
    with refused(-32602, "No space left on device"):
        rpc.bdev_lvol_create(lvol_name="big", size_in_mib=1000, lvs_name="L")
    with refused(-22, "Invalid argument"):
        rpc.bdev_lvol_create(lvol_name="a", size_in_mib=4)
    with refused(-19, "No such device"):
        rpc.bdev_lvol_resize(name="N", size_in_mib=4)
    with refused(-2, "Lvol store x not found"):
        rpc.bdev_lvol_rename_lvstore(old_name="x", new_name="y")
    with refused(-22, "No rate limits specified"):
        rpc.bdev_set_qos_limit(name="M")
    with refused(-32603, "Invalid Io type"):
        rpc.bdev_enable_histogram(name="M", enable=True, opc="bogus")
    with refused(-19, "No such device"):
        rpc.bdev_get_histogram("x")
    with refused(-32602, "No such device"):
        rpc.vhost_delete_controller("x")
    with refused(-32602, "Operation not permitted"):
        rpc.vhost_create_blk_controller(ctrlr="v", dev_name="M")
    with refused(-32603, "No such device"):
        rpc.vhost_get_controllers(name="x")
    with refused(-19, "No such device"):
        rpc.bdev_nvme_detach_controller("x")


def test_key_files_are_checked_by_the_peer(rpc: SpdkRpc, tmp_path: Path) -> None:
    for name, mode in (("good", 0o600), ("wide", 0o644)):
        (tmp_path / name).write_text("NVMeTLSkey-1:01:x:")
        (tmp_path / name).chmod(mode)
    assert rpc.keyring_file_add_key(name="k", path=str(tmp_path / "good"))
    with refused(-17, "File exists"):
        rpc.keyring_file_add_key(name="k", path=str(tmp_path / "good"))
    for path in (str(tmp_path / "wide"), "good"):
        with refused(-1, "Operation not permitted"):
            rpc.keyring_file_add_key(name="w", path=path)
    (key,) = rpc.keyring_get_keys()
    assert (key["name"], key["module"], key["path"]) == ("k", "keyring_file", str(tmp_path / "good"))
    with refused(-126, "Required key not available"):
        rpc.keyring_file_remove_key("x")
    assert rpc.keyring_file_remove_key("k")


def test_batches_and_the_peers_version(rpc: SpdkRpc) -> None:
    peer = rpc.peer()
    assert peer.release >= (26, 1) and "bdev_get_bdevs" in peer.methods
    made = [calls.bdev_null_create(name=f"B{index}", num_blocks=8, block_size=512) for index in range(300)]
    assert rpc.batch(made) == [f"B{index}" for index in range(300)]
    missing, there = rpc.batch([calls.bdev_get_bdevs(name="x"), calls.bdev_get_bdevs(name="B7")])
    assert isinstance(missing, RpcMethodError) and missing.code == -19
    assert there[0]["num_blocks"] == 8
    with pytest.raises(RpcUnsupportedError, match=r"no_such_method: .* has no such method"):
        rpc.call("no_such_method", bool)
    with pytest.raises(RpcUnsupportedError):
        rpc.require("no_such_method")


def test_asyncio_calls_overlap_and_a_waiting_one_is_overtaken(rpc: SpdkRpc) -> None:
    async def run() -> None:
        async with AsyncClient(rpc.client.address, timeout_s=30) as client:
            overlapping = AsyncSpdkRpc(client)
            waiting = asyncio.ensure_future(overlapping.bdev_get_bdevs(name="Late", timeout_ms=20_000))
            await asyncio.sleep(0.05)
            for index in range(20):
                await overlapping.bdev_malloc_create(name=f"A{index}", num_blocks=8, block_size=512)
            assert not waiting.done()
            await overlapping.bdev_malloc_create(name="Late", num_blocks=8, block_size=512)
            assert (await waiting)[0]["name"] == "Late"
            assert len(await overlapping.bdev_get_bdevs()) == 21

    asyncio.run(run())


@pytest.fixture(params=["kvdev", "spdk_tgt"])
def array(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SpdkRpc]:
    """What stands for the array: the target that a real SPDK attaches to."""
    folder = tmp_path / "array"
    folder.mkdir()
    started = our_target(folder) if request.param == "kvdev" else spdk_target(folder, name="array", core=1)
    with started as path, Client(path, timeout_s=30) as client:
        yield SpdkRpc(client)


@pytest.mark.interop
def test_spdk_attaches_over_tcp_and_builds_what_a_host_needs(array: SpdkRpc, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "uring.img").touch()
    os.truncate(tmp_path / "uring.img", 16 << 20)
    array.bdev_malloc_create(name="M0", num_blocks=4096, block_size=4096)
    array.bdev_uring_create(name="U0", filename=str(tmp_path / "uring.img"), block_size=4096)
    array.nvmf_create_transport(in_capsule_data_size=8192)
    array.nvmf_create_subsystem(NQN, serial_number="KV1", allow_any_host=False)
    array.nvmf_subsystem_add_host(nqn=NQN, host=HOST)
    for name in ("M0", "U0"):
        array.nvmf_subsystem_add_ns(nqn=NQN, bdev_name=name)
    array.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)
    with spdk_target(tmp_path, name="host") as path, Client(path, timeout_s=30) as client:
        host = SpdkRpc(client)
        assert host.bdev_nvme_set_options(enable_flush=True, bdev_retry_count=4)
        with refused(-5, "Input/output error"):
            host.bdev_nvme_attach_controller(
                name="X", traddr="127.0.0.1", trsvcid=port, subnqn=NQN, hostnqn=HOST + "x"
            )
        attach = {"traddr": "127.0.0.1", "trsvcid": port, "subnqn": NQN, "hostnqn": HOST}
        names = host.bdev_nvme_attach_controller(
            name="N",
            **attach,  # type: ignore[arg-type]
            multipath="multipath",
            ctrlr_loss_timeout_sec=30,
            reconnect_delay_sec=2,
            fast_io_fail_timeout_sec=10,
            num_io_queues=2,
            hdgst=True,
            ddgst=True,
        )
        assert names == ["Nn1", "Nn2"]
        with refused(-1):
            host.bdev_nvme_set_options(enable_flush=False)
        with refused(-114, "A controller named N already exists with the specified network path"):
            host.bdev_nvme_attach_controller(name="N", **attach)  # type: ignore[arg-type]
        (controller,) = host.bdev_nvme_get_controllers(name="N")
        assert controller["ctrlrs"][0]["state"] == "enabled"
        assert controller["ctrlrs"][0]["trid"]["trsvcid"] == str(port)
        assert controller["ctrlrs"][0]["host"]["nqn"] == HOST
        for here, there in (("Nn1", "M0"), ("Nn2", "U0")):
            assert host.bdev_get_bdevs(name=here)[0]["uuid"] == array.bdev_get_bdevs(name=there)[0]["uuid"]
        assert host.bdev_nvme_get_controller_health_info("N")["serial_number"].strip() == "KV1"
        host.bdev_raid_create(name="R", strip_size_kb=64, base_bdevs=names)
        assert host.bdev_raid_get_bdevs("online")[0]["num_base_bdevs_operational"] == 2
        assert host.bdev_get_bdevs(name="R")[0]["num_blocks"] == 8192
        assert host.vhost_create_blk_controller(ctrlr="kv.0", dev_name="R")
        (vhost,) = host.vhost_get_controllers(name="kv.0")
        assert vhost["socket"] == str(tmp_path / "kv.0") and (tmp_path / "kv.0").is_socket()
        assert vhost["backend_specific"]["block"]["bdev"] == "R"
        assert len(array.nvmf_subsystem_get_controllers(NQN)) == 1
        assert len(array.nvmf_subsystem_get_qpairs(NQN)) >= 2
        assert host.bdev_nvme_reset_controller(name="N")
        host.vhost_delete_controller("kv.0")
        host.bdev_raid_delete("R")
        assert host.bdev_nvme_detach_controller("N")
        assert host.bdev_nvme_get_controllers() == []
    # The host has shut its controllers down in order.
    assert array.nvmf_subsystem_get_controllers(NQN) == []


@pytest.fixture
def official() -> str:
    """SPDK's own command, from PyPI (``pip install spdk`` in an environment of its own)."""
    found = os.environ.get("KVDEV_SPDK_RPC") or shutil.which("spdk-rpc")
    if not found:
        pytest.skip("no spdk-rpc on PATH, and KVDEV_SPDK_RPC names none: pip install spdk")
    return found


@pytest.mark.interop
def test_official_client_provisions_the_embedded_target(official: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        command = [official, "-s", str(tmp_path / "rpc.sock"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout.strip()

    with our_target(tmp_path) as path, Client(path) as client:
        rpc = SpdkRpc(client)
        for name in ("M0", "M1", "M2"):
            assert run("bdev_malloc_create", "-b", name, "16", "4096") == name
        run("bdev_raid_create", "-n", "Raid0", "-z", "64", "-r", "raid0", "-b", "M0 M1")
        run("bdev_lvol_create_lvstore", "M2", "lvs", "-c", str(1 << 20))
        run("bdev_lvol_create", "-l", "lvs", "lvol0", "4")
        run(
            "bdev_delay_create", "-b", "lvs/lvol0", "-d", "D0", "-r", "10", "-t", "20", "-w", "30", "-n", "40"
        )
        run("bdev_error_create", "D0")
        assert run("bdev_split_create", "EE_D0", "2") == "EE_D0p0 EE_D0p1"
        run("bdev_set_qos_limit", "M0", "--rw-mbytes-per-sec", "100")
        run("bdev_nvme_set_options", "--enable-flush")
        run("nvmf_create_transport", "-t", "TCP", "-i", "131072")
        run("nvmf_create_subsystem", NQN, "-s", "KV1", "-m", "8")
        run("nvmf_subsystem_add_host", NQN, HOST)
        run("nvmf_subsystem_add_ns", NQN, "Raid0")
        run("nvmf_subsystem_add_ns", NQN, "EE_D0p0", "-n", "3")
        run("nvmf_subsystem_add_listener", NQN, "-t", "tcp", "-f", "ipv4", "-a", "127.0.0.1", "-s", "0")
        assert run("nvmf_get_subsystems") == rpc.nvmf_get_subsystems()
        assert run("bdev_get_bdevs") == rpc.bdev_get_bdevs()
        assert run("bdev_raid_get_bdevs", "all") == rpc.bdev_raid_get_bdevs()
        assert run("bdev_lvol_get_lvstores") == rpc.bdev_lvol_get_lvstores()
        assert run("vhost_get_controllers") == [] == run("bdev_nvme_get_controllers")
        saved = run("save_config")
        assert [each["subsystem"] for each in saved["subsystems"]] == [
            each["subsystem"] for each in rpc.framework_get_subsystems()
        ]
        ours = {each["subsystem"]: each["config"] for each in saved["subsystems"]}
        assert ours["nvmf"] == rpc.framework_get_config("nvmf")
        run("bdev_error_inject_error", "EE_D0", "read", "failure", "-n", "2")
        run("nvmf_delete_subsystem", NQN)
        run("bdev_malloc_delete", "M2")
        assert sorted(each["name"] for each in run("bdev_get_bdevs")) == ["M0", "M1", "Raid0"]
