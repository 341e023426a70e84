"""Splits, filters, lvols, limits, keys, vhost and remote controllers through the RPC methods, as spdk_tgt does them."""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.model import SpdkError, TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.target.rpc_stack import fold_histogram
from kvdev.testing.target_backend import HISTOGRAM_BUCKET_COUNT, MemoryBackend, MemoryFabric

NQN = "nqn.2016-06.io.spdk:cnode1"


class Peer:
    """The methods of one target without a data path; ``peer.some_method(...)`` calls one."""

    def __init__(self, folder: Path, fabric: MemoryFabric | None = None) -> None:
        self.backend = MemoryBackend(fabric=fabric or MemoryFabric(), vhost_folder=str(folder))
        self.model = TargetModel(self.backend)
        self.methods = RpcMethods(self.model)

    def call(self, name: str, params: dict[str, Any] | None = None) -> Any:
        return asyncio.run(self.methods.call(name, params))

    def __getattr__(self, name: str) -> Any:
        return lambda **params: self.call(name, params or None)

    def names(self) -> list[str]:
        return [each["name"] for each in self.bdev_get_bdevs()]

    def malloc(self, *names: str, num_blocks: int = 16384, block_size: int = 4096) -> None:
        for name in names:
            self.bdev_malloc_create(name=name, num_blocks=num_blocks, block_size=block_size)


@pytest.fixture
def peer(tmp_path: Path) -> Any:
    made = Peer(tmp_path)
    yield made
    made.backend.stop(timeout_s=1)


def refused(code: int, text: str) -> Any:
    return pytest.raises(SpdkError, match=rf"^{text}.*\({code}\)$")


DELAY = {
    "avg_read_latency": 10,
    "p99_read_latency": 20,
    "avg_write_latency": 30,
    "p99_write_latency": 40,
}


def test_delay_bdev_stands_on_its_base_and_waits_for_it(peer: Peer) -> None:
    peer.malloc("M")
    assert peer.bdev_delay_create(name="D", base_bdev_name="M", **DELAY) == "D"
    (info,) = peer.bdev_get_bdevs(name="D")
    base = peer.model.find_bdev("M")
    assert info["product_name"] == "delay" and (info["num_blocks"], info["numa_id"]) == (16384, -1)
    # As SPDK's: it follows from the base's, so that it is the same each time.
    assert uuid.UUID(info["uuid"]).version == 5 and base.uuid != uuid.UUID(info["uuid"])
    assert info["driver_specific"]["delay"] == {
        "name": "D",
        "base_bdev_name": "M",
        "uuid": info["uuid"],
        **DELAY,
    }
    assert peer.bdev_get_bdevs(name="M")[0]["claim_type"] == "exclusive_write"
    with refused(-1, "Operation not permitted"):
        peer.bdev_delay_create(name="D1", base_bdev_name="M", **DELAY)
    with refused(-17, "File exists"):
        peer.bdev_delay_create(name="D", base_bdev_name="X", **DELAY)
    with refused(-22, "Invalid argument"):
        peer.bdev_delay_create(name="D8", base_bdev_name="X", **{**DELAY, "p99_read_latency": 1})
    assert peer.bdev_delay_create(name="Late", base_bdev_name="L", **DELAY) == "Late"
    assert peer.names() == ["M", "D"]
    peer.malloc("L")
    assert peer.names() == ["M", "D", "L", "Late"]
    assert peer.bdev_delay_update_latency(delay_bdev_name="D", latency_type="p99_read", latency_us=77)
    assert peer.bdev_get_bdevs(name="D")[0]["driver_specific"]["delay"]["p99_read_latency"] == 77
    for name in ("M", "none"):
        with refused(-32602, "The requested bdev does not exist."):
            peer.bdev_delay_update_latency(delay_bdev_name=name, latency_type="avg_read", latency_us=1)
        with refused(-19, "No such device"):
            peer.bdev_delay_delete(name=name)
    peer.bdev_malloc_delete(name="M")
    assert peer.names() == ["L", "Late"]
    peer.malloc("M")
    assert peer.names() == ["L", "Late", "M", "D"]
    assert (
        peer.bdev_get_bdevs(name="D")[0]["uuid"] == info["uuid"]
        or peer.model.find_bdev("M").uuid != base.uuid
    )
    assert peer.bdev_delay_delete(name="D") and not peer.model.is_claimed("M")


def test_error_bdev_takes_injections_and_goes_with_its_base_for_good(peer: Peer) -> None:
    peer.malloc("M")
    assert peer.bdev_error_create(base_name="M") is True
    assert peer.bdev_get_bdevs(name="EE_M")[0]["driver_specific"] == {"error_disk": {"base_bdev": "M"}}
    with refused(-17, "File exists"):
        peer.bdev_error_create(base_name="M")
    inject = {"name": "EE_M", "io_type": "read", "error_type": "failure"}
    assert peer.bdev_error_inject_error(**inject, num=3)
    assert peer.bdev_error_inject_error(
        **{**inject, "io_type": "all", "error_type": "nvme_failure"}, nvme_sc=5
    )
    assert peer.bdev_error_inject_error(**{**inject, "io_type": "clear"})
    armed = [call[1] for call in peer.backend.log if call[0] == "inject"]
    assert [(each[1], each[2].count) for each in armed] == [  # type: ignore[index]
        ("read", 3),
        *((operation, 1) for operation in ("read", "write", "unmap", "flush")),
        *((operation, 0) for operation in ("read", "write", "unmap", "flush")),
    ]
    for wrong, text in (
        ({"error_type": "nvme_failure"}, "nvme_sct or nvme_sc should be specified for NVMe error injection"),
        ({"nvme_sc": 1}, "nvme_sct or nvme_sc should be specified for NVMe error injection"),
        ({"error_type": "nvme_failure", "nvme_sct": 8}, "Invalid argument: nvme_sct, nvme_sc"),
        ({"error_type": "corrupt_data"}, "Invalid argument: corrupt_value"),
    ):
        with refused(-22, text):
            peer.bdev_error_inject_error(**{**inject, **wrong})
    for name in ("M", "none"):
        for call in (peer.bdev_error_delete, peer.bdev_error_resume_pending):
            with refused(-19, "No such device"):
                call(name=name)
    assert peer.bdev_error_resume_pending(name="EE_M")
    peer.bdev_malloc_delete(name="M")
    peer.malloc("M")
    assert peer.names() == ["M"]


def test_split_cuts_equal_parts_or_as_many_of_a_size_as_fit(peer: Peer) -> None:
    peer.malloc("M", block_size=512)
    assert peer.bdev_split_create(base_bdev="M", split_count=2) == ["Mp0", "Mp1"]
    assert peer.bdev_get_bdevs(name="Mp1")[0]["driver_specific"] == {
        "split": {"base_bdev": "M", "offset_blocks": 8192}
    }
    with refused(-32602, "Failed to create 2 split bdevs from 'M': File exists"):
        peer.bdev_split_create(base_bdev="M", split_count=2)
    with refused(-32602, "Failed to create 0 split bdevs from 'X': Invalid argument"):
        peer.bdev_split_create(base_bdev="X", split_count=0)
    # 4 MiB hold no part of 100 MiB; SPDK answers with no names too.
    assert peer.bdev_split_create(base_bdev="Mp0", split_count=2, split_size_mb=100) == []
    assert peer.bdev_split_create(base_bdev="Mp1", split_count=9, split_size_mb=1) == [
        f"Mp1p{i}" for i in range(4)
    ]
    assert peer.bdev_split_create(base_bdev="later", split_count=2) == []
    peer.malloc("later")
    assert peer.names()[-2:] == ["laterp0", "laterp1"]
    assert peer.bdev_split_delete(base_bdev="M") and peer.bdev_split_delete(base_bdev="M")
    assert peer.names() == ["M", "later", "laterp0", "laterp1"] and not peer.model.is_claimed("M")


def test_lvols_as_a_real_target_has_them(peer: Peer) -> None:
    peer.malloc("M0", "M1")
    peer.malloc("T", num_blocks=100)
    with refused(-19, "No such device"):
        peer.bdev_lvol_create_lvstore(bdev_name="none", lvs_name="l")
    with refused(-32602, "Invalid argument: bdev_name: too small"):
        peer.bdev_lvol_create_lvstore(bdev_name="T", lvs_name="l")
    with refused(-22, "Invalid argument: cluster_sz"):
        peer.bdev_lvol_create_lvstore(bdev_name="M0", lvs_name="l", cluster_sz=1000)
    store = peer.bdev_lvol_create_lvstore(bdev_name="M0", lvs_name="lvs")
    with refused(-1, "Operation not permitted"):
        peer.bdev_lvol_create_lvstore(bdev_name="M0", lvs_name="lvs2")
    with refused(-17, "File exists"):
        peer.bdev_lvol_create_lvstore(bdev_name="M1", lvs_name="lvs")
    described = {
        "uuid": store,
        "name": "lvs",
        "base_bdev": "M0",
        "total_data_clusters": 15,
        "free_clusters": 15,
        "block_size": 4096,
        "cluster_size": 4 << 20,
        "max_growable_size": 137271181312,
    }
    assert peer.bdev_lvol_get_lvstores() == [described] == peer.bdev_lvol_get_lvstores(uuid=store)
    with refused(-22, "Invalid argument"):
        peer.bdev_lvol_get_lvstores(uuid=store, lvs_name="lvs")
    made = peer.bdev_lvol_create(lvol_name="a", size_in_mib=5, lvs_name="lvs")
    (info,) = peer.bdev_get_bdevs(name="lvs/a")
    assert (info["name"], info["uuid"], info["aliases"], info["num_blocks"]) == (made, made, ["lvs/a"], 2048)
    assert peer.backend.log[-1] == ("clear_bdev", made)
    for params, code, text in (
        ({"lvol_name": "c", "size_in_mib": 60, "lvs_name": "lvs"}, -32602, "No space left on device"),
        ({"lvol_name": "d", "size_in_mib": 4}, -22, "Invalid argument"),
        ({"lvol_name": "a", "size_in_mib": 4, "lvs_name": "lvs"}, -17, "File exists"),
        ({"lvol_name": "d", "size_in_mib": 4, "lvs_name": "none"}, -19, "No such device"),
        ({"lvol_name": "x" * 64, "size_in_mib": 4, "lvs_name": "lvs"}, -22, "Invalid argument"),
        ({"lvol_name": "", "size_in_mib": 4, "lvs_name": "lvs"}, -22, "Invalid argument"),
        (
            {"lvol_name": "d", "size_in_mib": 4, "lvs_name": "lvs", "clear_method": "x"},
            -22,
            "Invalid clean_method",
        ),
    ):
        with refused(code, text):
            peer.bdev_lvol_create(**params)
    assert peer.bdev_lvol_resize(name="lvs/a", size_in_mib=9)
    assert peer.bdev_get_bdevs(name=made)[0]["num_blocks"] == 3072
    assert peer.bdev_lvol_resize(name="lvs/a", size_in_mib=4)
    with refused(-32602, "No space left on device"):
        peer.bdev_lvol_resize(name="lvs/a", size_in_mib=400)
    assert peer.bdev_lvol_get_lvstores()[0]["free_clusters"] == 14
    peer.bdev_lvol_create(lvol_name="c", size_in_mib=4, lvs_name="lvs")
    assert peer.bdev_lvol_rename(old_name="lvs/a", new_name="a2")
    with refused(-32602, "File exists"):
        peer.bdev_lvol_rename(old_name="lvs/a2", new_name="c")
    assert peer.bdev_lvol_set_read_only(name="lvs/a2") and peer.model.find_bdev(made).is_readonly
    assert peer.bdev_lvol_rename_lvstore(old_name="lvs", new_name="L")
    with refused(-2, "Lvol store lvs not found"):
        peer.bdev_lvol_rename_lvstore(old_name="lvs", new_name="L")
    assert [each["alias"] for each in peer.bdev_lvol_get_lvols(lvs_name="L")] == ["L/a2", "L/c"]
    for call in (peer.bdev_lvol_delete, peer.bdev_lvol_set_read_only, peer.bdev_lvol_inflate):
        with refused(-19, "No such device"):
            call(name="M1")
    with refused(-32602, "Operation not supported: snapshots"):
        peer.bdev_lvol_snapshot(lvol_name="L/c", snapshot_name="s")
    assert peer.bdev_lvol_delete(name="L/c")
    kinds = [each["type"] for each in peer.notify_get_notifications() if each["ctx"] == made]
    assert kinds == ["bdev_register", "bdev_resize", "bdev_resize"]
    assert peer.bdev_lvol_delete_lvstore(lvs_name="L") and peer.bdev_lvol_get_lvstores() == []
    assert peer.names() == ["M0", "M1", "T"] and not peer.model.is_claimed("M0")


def test_resize_is_seen_by_a_namespace_and_refused_under_a_raid(peer: Peer) -> None:
    peer.malloc("M", "N")
    for base in ("M", "N"):
        peer.bdev_lvol_create_lvstore(bdev_name=base, lvs_name=base)
        peer.bdev_lvol_create(lvol_name="a", size_in_mib=4, lvs_name=base)
    peer.nvmf_create_subsystem(nqn=NQN)
    peer.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "M/a"})
    peer.backend.log.clear()
    peer.bdev_lvol_resize(name="M/a", size_in_mib=8)
    assert [call[0] for call in peer.backend.log][-3:] == ["open_bdev", "namespace_changed", "close_bdev"]
    peer.bdev_raid_create(name="R", strip_size_kb=64, raid_level="raid0", base_bdevs=["N/a"])
    (base,) = peer.bdev_raid_get_bdevs(category="online")[0]["base_bdevs_list"]
    assert (base["name"], base["is_configured"]) == ("N/a", True)
    name = peer.model.find_bdev("N/a").name
    with refused(-16, "Device or resource busy"):
        peer.bdev_lvol_resize(name="N/a", size_in_mib=8)
    assert peer.bdev_lvol_get_lvols(lvs_name="N")[0]["num_allocated_clusters"] == 1
    assert peer.model.find_bdev(name).block_count == 1024


def test_raid_waits_for_a_bdev_by_its_name_and_not_by_its_alias(peer: Peer) -> None:
    peer.malloc("M")
    peer.bdev_raid_create(name="R", strip_size_kb=64, raid_level="raid0", base_bdevs=["L/a"])
    peer.bdev_lvol_create_lvstore(bdev_name="M", lvs_name="L")
    peer.bdev_lvol_create(lvol_name="a", size_in_mib=4, lvs_name="L")
    (raid,) = peer.bdev_raid_get_bdevs(category="all")
    assert (raid["state"], raid["num_base_bdevs_discovered"]) == ("configuring", 0)
    assert peer.bdev_raid_delete(name="R")
    peer.bdev_raid_create(name="R", strip_size_kb=64, raid_level="raid0", base_bdevs=["L/a"])
    peer.bdev_lvol_delete(name="L/a")
    assert peer.bdev_raid_get_bdevs(category="all") == []


def test_error_bdev_over_an_alias_is_named_by_it(peer: Peer) -> None:
    peer.malloc("M")
    peer.bdev_lvol_create_lvstore(bdev_name="M", lvs_name="L")
    peer.bdev_lvol_create(lvol_name="a", size_in_mib=4, lvs_name="L")
    peer.bdev_error_create(base_name="L/a")
    assert peer.names()[-1] == "EE_L/a"
    (call,) = (
        each for each in peer.framework_get_config(name="bdev") if each["method"] == "bdev_error_create"
    )
    assert call["params"]["base_name"] == "L/a"


def test_store_on_a_file_comes_back_with_its_bdev_and_one_in_memory_does_not(
    peer: Peer, tmp_path: Path
) -> None:
    (tmp_path / "disk").write_bytes(bytes(16 << 20))
    file = {"name": "F", "filename": str(tmp_path / "disk"), "block_size": 512}
    peer.bdev_aio_create(**file)
    peer.malloc("M")
    for base in ("F", "M"):
        peer.bdev_lvol_create_lvstore(bdev_name=base, lvs_name=base, cluster_sz=1 << 20)
        peer.bdev_lvol_create(lvol_name="a", size_in_mib=2, lvs_name=base)
    before = peer.bdev_lvol_get_lvols(lvs_name="F")
    peer.bdev_aio_delete(name="F")
    peer.bdev_malloc_delete(name="M")
    assert peer.bdev_lvol_get_lvols() == []
    peer.bdev_aio_create(**file)
    peer.malloc("M")
    assert peer.bdev_lvol_get_lvols() == before
    peer.bdev_aio_delete(name="F")
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    peer.bdev_aio_create(**file)
    # A disk that has become smaller does not have it any more.
    assert peer.bdev_lvol_get_lvols() == [] and not peer.model.is_claimed("F")


def test_limits_add_up_and_are_rounded_as_spdk_does(peer: Peer) -> None:
    peer.malloc("M")
    with refused(-22, "No rate limits specified"):
        peer.bdev_set_qos_limit(name="M")
    with refused(-19, "No such device"):
        peer.bdev_set_qos_limit(name="none", rw_ios_per_sec=1)
    peer.bdev_set_qos_limit(name="M", rw_ios_per_sec=100)
    peer.bdev_set_qos_limit(name="M", w_mbytes_per_sec=7)
    assert peer.bdev_get_bdevs(name="M")[0]["assigned_rate_limits"] == {
        "rw_ios_per_sec": 1000,
        "rw_mbytes_per_sec": 0,
        "r_mbytes_per_sec": 0,
        "w_mbytes_per_sec": 7,
    }
    with refused(-32602, "Failed to configure rate limit: Invalid argument: w_mbytes_per_sec"):
        peer.bdev_set_qos_limit(name="M", w_mbytes_per_sec=1 << 60)
    config = peer.framework_get_config(name="bdev")
    assert {"method": "bdev_set_qos_limit"}.items() <= config[-2].items()
    peer.bdev_set_qos_limit(name="M", rw_ios_per_sec=0, w_mbytes_per_sec=0)
    assert not any(each["method"] == "bdev_set_qos_limit" for each in peer.framework_get_config(name="bdev"))


def test_histogram_has_spdks_layout(peer: Peer) -> None:
    peer.malloc("M")
    with refused(-12, "Cannot allocate memory: no histogram"):
        peer.bdev_get_histogram(name="M")
    with refused(-32603, "Invalid Io type"):
        peer.bdev_enable_histogram(name="M", enable=True, opc="bogus")
    with refused(-22, "Invalid argument: granularity"):
        peer.bdev_enable_histogram(name="M", enable=True, granularity=8)
    peer.bdev_enable_histogram(name="M", enable=True)
    histogram = peer.bdev_get_histogram(name="M")
    assert {name: value for name, value in histogram.items() if name != "histogram"} == {
        "granularity": 7,
        "min_range": 3,
        "max_range": 30,
        "tsc_rate": 1_000_000_000,
    }
    assert len(base64.b64decode(histogram["histogram"])) == 28 * 128 * 8
    peer.bdev_enable_histogram(name="M", enable=True, granularity=1, min_nsec=4, max_nsec=16)
    # 128 buckets of one nanosecond, then of two from 128 on.
    peer.backend.histogram_counts[3] = 1
    peer.backend.histogram_counts[5] = 2
    peer.backend.histogram_counts[14] = 4
    peer.backend.histogram_counts[200] = 8
    raw = base64.b64decode(peer.bdev_get_histogram(name="M")["histogram"])
    # Ranges 4-7 and 8-15 of two buckets each; what is below and above counts at the ends.
    assert struct.unpack("<4Q", raw) == (1 + 2, 0, 0, 4 + 8)
    peer.backend.histogram_counts[128 + 8 * 128] = 16
    assert peer.bdev_get_histogram_borders(name="M", borders=[1, 100]) == {"borders_count": [15, 16, 0]}
    assert peer.bdev_enable_histogram(name="M", enable=False)


def test_fold_histogram_puts_each_latency_into_its_bucket() -> None:
    counts = [0] * HISTOGRAM_BUCKET_COUNT
    for latency_ns in (3, 5, 14, 200):
        number = max(0, latency_ns.bit_length() - 7)
        counts[number * 128 + (latency_ns >> max(0, number - 1)) % 128] += 1
    # Granularity 1: ranges 0-1, 2-3, 4-7, 8-15, each of two buckets; 4 to 15 are kept.
    low, high, folded = fold_histogram(counts, 1, 4, 16)
    assert (low, high) == (2, 3)
    # 3 is below and counts first; 5 is in 4-5; 14 in 12-15; 200 is above and counts last.
    assert folded == [2, 0, 0, 2]


def test_key_files_are_checked(peer: Peer, tmp_path: Path) -> None:
    good, wide = tmp_path / "good", tmp_path / "wide"
    for path, mode in ((good, 0o600), (wide, 0o640)):
        path.write_text("NVMeTLSkey-1:01:hidden:")
        path.chmod(mode)
    assert peer.keyring_file_add_key(name="k", path=str(good))
    with refused(-17, "File exists"):
        peer.keyring_file_add_key(name="k", path=str(good))
    with refused(-1, "Operation not permitted: path: .*/wide has mode 0640, expected 0600: chmod 600 it"):
        peer.keyring_file_add_key(name="w", path=str(wide))
    with refused(-1, "Operation not permitted: path: expected an absolute path, got 'good'"):
        peer.keyring_file_add_key(name="w", path="good")
    with refused(-2, "No such file or directory"):
        peer.keyring_file_add_key(name="w", path="/nonexistent/key")
    with refused(-32602, "Invalid argument"):
        peer.keyring_file_add_key(name="w")
    assert peer.keyring_get_keys() == [
        {
            "name": "k",
            "module": "keyring_file",
            "removed": False,
            "probed": False,
            "refcnt": 1,
            "path": str(good),
        }
    ]
    assert peer.framework_get_config(name="keyring") == [
        {"method": "keyring_file_add_key", "params": {"name": "k", "path": str(good)}}
    ]
    with refused(-126, "Required key not available"):
        peer.keyring_file_remove_key(name="none")
    assert peer.keyring_file_remove_key(name="k") and peer.keyring_get_keys() == []


def test_vhost_controllers_serve_unclaimed_bdevs(peer: Peer, tmp_path: Path) -> None:
    peer.malloc("M", "N")
    peer.bdev_error_create(base_name="N")
    for params, text in (
        ({"ctrlr": "v", "dev_name": "none"}, "No such device"),
        ({"ctrlr": "v", "dev_name": "N"}, "Operation not permitted"),
        ({"ctrlr": "a/b", "dev_name": "M"}, "Invalid argument: ctrlr"),
        ({"ctrlr": "v", "dev_name": "M", "transport": "x"}, "Invalid argument: transport"),
        ({"ctrlr": "v"}, "Invalid argument: dev_name: missing"),
    ):
        with refused(-32602, text):
            peer.vhost_create_blk_controller(**params)
    assert peer.vhost_create_blk_controller(ctrlr="v", dev_name="M", cpumask="0x3")
    with refused(-32602, "File exists"):
        peer.vhost_create_blk_controller(ctrlr="v", dev_name="M")
    peer.vhost_controller_set_coalescing(ctrlr="v", delay_base_us=5, iops_threshold=9)
    (info,) = peer.vhost_get_controllers(name="v")
    assert (info["socket"], info["cpumask"], info["delay_base_us"]) == (str(tmp_path / "v"), "0x3", 5)
    assert (tmp_path / "v").is_socket()
    with refused(-32603, "No such device"):
        peer.vhost_get_controllers(name="none")
    with refused(-32602, "No such device"):
        peer.vhost_delete_controller(ctrlr="none")
    peer.bdev_malloc_delete(name="M")
    assert peer.vhost_get_controllers()[0]["backend_specific"]["block"]["bdev"] is None
    assert peer.vhost_delete_controller(ctrlr="v") and not (tmp_path / "v").exists()


def test_controllers_of_another_target_are_attached_by_path(tmp_path: Path) -> None:
    fabric = MemoryFabric()
    target, host = Peer(tmp_path, fabric), Peer(tmp_path, fabric)
    target.malloc("A", "B")
    target.nvmf_create_transport(trtype="TCP")
    target.nvmf_create_subsystem(nqn=NQN, allow_any_host=True)
    for name in "AB":
        target.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": name})
    ports = []
    for _ in range(2):
        address = {"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0"}
        target.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address)
        ports.append(target.nvmf_subsystem_get_listeners(nqn=NQN)[-1]["address"]["trsvcid"])
    assert host.bdev_nvme_set_options(enable_flush=True)
    path = {"name": "N", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "subnqn": NQN}
    assert host.bdev_nvme_attach_controller(**path, trsvcid=ports[0]) == ["Nn1", "Nn2"]
    with refused(-1, "Operation not permitted: controllers are attached already"):
        host.bdev_nvme_set_options(enable_flush=False)
    with refused(-114, "A controller named N already exists with the specified network path"):
        host.bdev_nvme_attach_controller(**path, trsvcid=ports[0])
    with refused(-114, "A controller named N already exists and multipath is disabled"):
        host.bdev_nvme_attach_controller(**path, trsvcid=ports[1], multipath="disable")
    assert host.bdev_nvme_attach_controller(**path, trsvcid=ports[1], multipath="multipath") == ["Nn1", "Nn2"]
    (controller,) = host.bdev_nvme_get_controllers(name="N")
    assert [each["trid"]["trsvcid"] for each in controller["ctrlrs"]] == ports
    assert host.bdev_get_bdevs(name="Nn1")[0]["uuid"] == target.bdev_get_bdevs(name="A")[0]["uuid"]
    host.bdev_raid_create(name="R", strip_size_kb=64, raid_level="raid0", base_bdevs=["Nn1", "Nn2"])
    assert host.bdev_nvme_reset_controller(name="N")
    config = host.framework_get_config(name="bdev")
    assert config[0]["params"]["enable_flush"] is True
    attached = [
        each["params"]["trsvcid"] for each in config if each["method"] == "bdev_nvme_attach_controller"
    ]
    assert attached == ports
    host.bdev_nvme_detach_controller(name="N", traddr="127.0.0.1", trsvcid=ports[0])
    assert host.names() == ["Nn1", "Nn2", "R"]
    with refused(-6, "No such device or address"):
        host.bdev_nvme_detach_controller(name="N", traddr="127.0.0.1", trsvcid=ports[0])
    host.bdev_nvme_detach_controller(name="N")
    assert host.names() == [] and host.backend.remote is not None and host.backend.remote.connected == []
    with refused(-126, "Required key not available: psk: no such key") as caught:
        host.bdev_nvme_attach_controller(**path, trsvcid=ports[0], psk="hidden")
    assert "hidden" not in str(caught.value)
    for wrong in ({"subnqn": NQN + "x", "trsvcid": ports[0]}, {"trsvcid": "1"}):
        with refused(-5, "Input/output error"):
            host.bdev_nvme_attach_controller(**{**path, **wrong})
    assert host.bdev_nvme_start_discovery(name="D", trtype="TCP", traddr="127.0.0.1", trsvcid=ports[0])
    assert [each["name"] for each in host.bdev_nvme_get_controllers()] == ["D0", "D1"]
    assert host.bdev_nvme_stop_discovery(name="D") and host.bdev_nvme_get_controllers() == []
    for each in (target, host):
        each.backend.stop(timeout_s=1)


def test_backend_that_is_target_only_refuses_the_host_side_by_name() -> None:
    backend = MemoryBackend()
    methods = RpcMethods(TargetModel(backend))
    asyncio.run(methods.call("bdev_malloc_create", {"name": "M", "num_blocks": 8, "block_size": 512}))
    path = {"name": "N", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1", "subnqn": NQN}
    with refused(-95, "Operation not supported: this target is no initiator"):
        asyncio.run(methods.call("bdev_nvme_attach_controller", path))
    with refused(-32602, "Operation not supported: this target serves no vhost-user sockets"):
        asyncio.run(methods.call("vhost_create_blk_controller", {"ctrlr": "v", "dev_name": "M"}))
    for name in ("bdev_nvme_get_controllers", "vhost_get_controllers", "virtio_blk_get_transports"):
        assert asyncio.run(methods.call(name, None)) == []
    assert methods.host.vhost_config() == []
