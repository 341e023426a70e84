"""The configuration that a target keeps in a file: written on each change, whole, and brought back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdev.errors import UsageError
from kvdev.target.model import SpdkError
from kvdev.target.serve import EmbeddedTarget
from kvdev.testing.target_backend import MemoryBackend, MemoryFabric
from spdk_rpc import Client, SpdkRpc

NQN = "nqn.2016-06.io.spdk:cnode1"
SUBSYSTEMS = ("keyring", "bdev", "nvmf", "nbd", "vhost_blk")


def target(folder: Path, fabric: MemoryFabric | None = None) -> EmbeddedTarget:
    backend = MemoryBackend(fabric=fabric or MemoryFabric(), vhost_folder=str(folder))
    return EmbeddedTarget(folder / "rpc.sock", backend=backend, state=folder / "state.json")


def provision(rpc: SpdkRpc, folder: Path) -> None:
    (folder / "disk").write_bytes(bytes(16 << 20))
    (folder / "key").write_text("key")
    (folder / "key").chmod(0o600)
    rpc.keyring_file_add_key(name="k", path=str(folder / "key"))
    rpc.bdev_aio_create(name="F", filename=str(folder / "disk"), block_size=4096)
    for name in ("M0", "M1", "M2", "M3", "V"):
        rpc.bdev_malloc_create(name=name, num_blocks=4096, block_size=4096)
    rpc.bdev_lvol_create_lvstore(bdev_name="F", lvs_name="L", cluster_sz=1 << 20)
    for name in "ab":
        rpc.bdev_lvol_create(lvol_name=name, size_in_mib=3, lvs_name="L")
    rpc.bdev_lvol_delete("L/a")
    rpc.bdev_lvol_create(lvol_name="c", size_in_mib=6, lvs_name="L")
    rpc.bdev_raid_create(name="R", strip_size_kb=64, base_bdevs=["M0", "M1"])
    rpc.bdev_delay_create(
        name="D",
        base_bdev_name="M2",
        avg_read_latency=1,
        p99_read_latency=2,
        avg_write_latency=3,
        p99_write_latency=4,
    )
    rpc.bdev_error_create("D")
    rpc.bdev_split_create(base_bdev="M3", split_count=2)
    rpc.bdev_set_qos_limit(name="L/c", rw_mbytes_per_sec=5)
    rpc.bdev_nvme_set_options(enable_flush=True)
    rpc.vhost_create_blk_controller(ctrlr="v0", dev_name="V")
    rpc.nvmf_create_transport(max_io_size=1 << 20)
    rpc.nvmf_create_subsystem(nqn=NQN, serial_number="S")
    for name in ("R", "EE_D", "M3p0", "L/c"):
        rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name=name)
    rpc.nvmf_subsystem_add_host(nqn=NQN, host=f"{NQN}.host")
    rpc.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=0)


def picture(rpc: SpdkRpc) -> list[Any]:
    """All that a restart has to bring back."""
    return [
        sorted(rpc.bdev_get_bdevs(), key=lambda each: each["name"]),
        rpc.nvmf_get_subsystems(),
        rpc.bdev_lvol_get_lvols(),
        rpc.bdev_lvol_get_lvstores(),
        rpc.bdev_raid_get_bdevs(),
        rpc.vhost_get_controllers(),
        [rpc.framework_get_config(name) for name in SUBSYSTEMS],
    ]


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with target(tmp_path) as running, Client(running.rpc_socket) as client:
        provision(SpdkRpc(client), tmp_path)
        before = picture(SpdkRpc(client))
    kept = (tmp_path / "state.json").read_bytes()
    for _ in range(2):
        with target(tmp_path) as running, Client(running.rpc_socket) as client:
            assert picture(SpdkRpc(client)) == before
            extents = [bdev.extents for bdev in running.model.bdevs() if bdev.alias == "L/c"]
            # Two free pieces of 3 MiB: what lay where must lie there again.
            assert len(extents[0]) == 2
    assert (tmp_path / "state.json").read_bytes() == kept
    assert (tmp_path / "state.json").stat().st_mode & 0o077 == 0


def test_change_is_kept_before_it_is_answered(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "kvdev.target", "--rpc-socket", str(tmp_path / "s"), "--state"]
    with subprocess.Popen([*program, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        with Client(tmp_path / "s") as client:
            SpdkRpc(client).bdev_malloc_create(name="M", num_blocks=8, block_size=512)
            uuid = SpdkRpc(client).bdev_get_bdevs()[0]["uuid"]
        process.kill()
    with EmbeddedTarget(tmp_path / "s", backend=MemoryBackend(), state=tmp_path / "state") as running:
        assert [str(bdev.uuid) for bdev in running.model.bdevs()] == [uuid]


def test_reading_and_refused_calls_write_nothing(tmp_path: Path) -> None:
    with target(tmp_path) as running, Client(running.rpc_socket) as client:
        rpc = SpdkRpc(client)
        rpc.bdev_malloc_create(name="M", num_blocks=8, block_size=512)
        stamp = (tmp_path / "state.json").stat().st_mtime_ns
        rpc.bdev_get_bdevs()
        rpc.bdev_get_iostat()
        with pytest.raises(Exception, match="File exists"):
            rpc.bdev_malloc_create(name="M", num_blocks=8, block_size=512)
        assert (tmp_path / "state.json").stat().st_mtime_ns == stamp


def test_change_that_cannot_be_kept_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    running = EmbeddedTarget(tmp_path / "s", backend=MemoryBackend(), state=folder / "state")
    with running, Client(tmp_path / "s") as client:
        (folder / "state.lock").unlink()
        folder.rmdir()
        with pytest.raises(Exception, match="done, but not kept for a restart: No such file"):
            SpdkRpc(client).bdev_malloc_create(name="M", num_blocks=8, block_size=512)
        assert [bdev.name for bdev in running.model.bdevs()] == ["M"]


def test_state_with_a_refused_call_is_left_alone(tmp_path: Path) -> None:
    with target(tmp_path) as running, Client(running.rpc_socket) as client:
        provision(SpdkRpc(client), tmp_path)
    (tmp_path / "disk").unlink()
    kept = (tmp_path / "state.json").read_bytes()
    with pytest.raises(SpdkError, match=r"state: .*state\.json: bdev_aio_create: No such file or directory"):
        target(tmp_path).start()
    assert (tmp_path / "state.json").read_bytes() == kept
    assert not (tmp_path / "rpc.sock").exists()
    (tmp_path / "disk").write_bytes(bytes(16 << 20))
    with target(tmp_path) as running:
        assert len(running.model.bdevs()) > 10


def test_second_target_may_not_write_the_same_state(tmp_path: Path) -> None:
    with target(tmp_path), pytest.raises(UsageError, match="another target keeps its state there"):
        EmbeddedTarget(tmp_path / "other", backend=MemoryBackend(), state=tmp_path / "state.json").start()


STORE = {
    "name": "L",
    "uuid": "11111111-2222-3333-4444-555555555555",
    "base_name": "F",
    "cluster_size_bytes": 4096,
    "first_cluster": 1,
    "cluster_count": 4,
    "lvols": [{"name": "a", "uuid": "21111111-2222-3333-4444-555555555555", "clusters": [1, 2]}],
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("[]", "expected a state of version 1"),
        ('{"kvdev_target_state": 2}', "expected a state of version 1"),
        ('{"kvdev_target_state": 1}', "expected a list of calls"),
        ({"subsystems": [{"config": [5]}]}, r"subsystems\[0\].config\[0\]: expected"),
        ({"lvol_stores": 5}, "lvol_stores: expected a list"),
        ({"lvol_stores": [5]}, r"lvol_stores\[0\]: expected an object"),
        ({"lvol_stores": [{**STORE, "uuid": "x"}]}, r"lvol_stores\[0\].uuid: expected a UUID"),
        ({"lvol_stores": [{**STORE, "cluster_count": 1}]}, "a cluster outside of the store"),
        ({"lvol_stores": [{**STORE, "cluster_count": True}]}, "cluster_count: expected a number"),
        ({"lvol_stores": [{**STORE, "lvols": STORE["lvols"] * 2}]}, "a cluster belongs to two"),  # type: ignore[operator]
        ({"lvol_stores": [{**STORE, "lvols": [{"name": "a"}]}]}, r"lvols\[0\].clusters: expected a list"),
    ],
)
def test_broken_state_is_refused_by_place_and_left_alone(tmp_path: Path, text: Any, reason: str) -> None:
    if not isinstance(text, str):
        text = json.dumps({"kvdev_target_state": 1, "subsystems": [], **text})
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UsageError, match=rf"state: .*state\.json: .*{reason}"):
        target(tmp_path).start()
    assert (tmp_path / "state.json").read_text() == text
    assert not (tmp_path / "rpc.sock").exists()
