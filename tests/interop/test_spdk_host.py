"""SPDK's NVMe/TCP host against the embedded target; what it attaches is read back through SPDK's own target.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later, started without huge pages).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.testing.raw_host import connected_admin, connected_io
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.nvme import NvmOpcode, build_flush, build_read_write
from spdk_rpc import Client, RpcTransportError

pytestmark = pytest.mark.interop

BLOCK = 4096
FRONT_NQN = "nqn.2016-06.io.spdk:front"
START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def spdk(folder: Path) -> Iterator[Client]:
    binary = os.environ.get("KVDEV_SPDK_TGT")
    if not binary:
        pytest.skip("KVDEV_SPDK_TGT names no spdk_tgt")
    path = str(folder / "spdk.sock")
    arguments = [binary, "--no-pci", "--no-huge", "-s", "1024", "-m", "0x1", "--disable-cpumask-locks"]
    with (
        (folder / "spdk.log").open("wb") as log,
        subprocess.Popen([*arguments, "-r", path], stdout=log, stderr=log) as process,
    ):
        try:
            deadline = Deadline.after(START_TIMEOUT_S)
            while True:
                with contextlib.suppress(RpcTransportError), Client(path, timeout_s=30) as client:
                    client.call("framework_wait_init")
                    yield client
                    return
                deadline.check("start of spdk_tgt")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                    raise AssertionError(f"spdk_tgt ended with {process.returncode}")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def show_through_spdk(client: Client, bdev_name: str) -> int:
    """Export a bdev of SPDK's through SPDK's target; the port."""
    port = free_port()
    client.call("nvmf_create_subsystem", {"nqn": FRONT_NQN, "allow_any_host": True})
    client.call("nvmf_subsystem_add_ns", {"nqn": FRONT_NQN, "namespace": {"bdev_name": bdev_name}})
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    client.call("nvmf_subsystem_add_listener", {"nqn": FRONT_NQN, "listen_address": address})
    return port


def check_data(target: RunningTarget, port: int, rng: np.random.Generator) -> None:
    with (
        connected_admin("127.0.0.1", port, FRONT_NQN) as admin,
        connected_io(admin, FRONT_NQN) as io,
    ):
        for size in (BLOCK, 4 * BLOCK, 32 * BLOCK):
            data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
            write, read = (
                build_read_write(opcode, nsid=1, slba=7, lba_count=size // BLOCK, byte_count=size)
                for opcode in (NvmOpcode.WRITE, NvmOpcode.READ)
            )
            assert io.execute(write, data, in_capsule=size == BLOCK).cqe.is_success
            assert target.bdev(1).read(7 * BLOCK, size) == data
            assert io.execute(read).data == data
        zeroes = build_read_write(NvmOpcode.WRITE_ZEROES, nsid=1, slba=7, lba_count=4, byte_count=0)
        assert io.execute(zeroes).cqe.is_success
        assert target.bdev(1).read(7 * BLOCK, 4 * BLOCK) == bytes(4 * BLOCK)
        assert io.execute(build_flush(nsid=1)).cqe.is_success


def wait_for_bdev(client: Client, name: str) -> None:
    client.call("bdev_get_bdevs", {"name": name, "timeout": 20_000})


def test_spdk_attaches_moves_data_and_sees_new_namespaces(tmp_path: Path, rng: np.random.Generator) -> None:
    with running_target(namespace_count=2, namespace_size_bytes=16 << 20) as target, spdk(tmp_path) as client:
        client.call("nvmf_create_transport", {"trtype": "TCP"})
        path = {
            "trtype": "TCP",
            "adrfam": "IPv4",
            "traddr": target.address,
            "trsvcid": str(target.port),
        }
        for digests in (False, True):
            options = {"name": "K", "subnqn": target.nqn, "hdgst": digests, "ddgst": digests, **path}
            names = client.call("bdev_nvme_attach_controller", options)
            assert isinstance(names, list) and names[:2] == ["Kn1", "Kn2"]
            check_data(target, show_through_spdk(client, "Kn1"), rng)
            nsid = target.add_memory_namespace(size_bytes=1 << 20)
            wait_for_bdev(client, f"Kn{nsid}")
            client.call("nvmf_delete_subsystem", {"nqn": FRONT_NQN})
            client.call("bdev_nvme_detach_controller", {"name": "K"})
        client.call("bdev_nvme_start_discovery", {"name": "D", "wait_for_attach": True, **path})
        wait_for_bdev(client, "D0n1")
        client.call("bdev_nvme_stop_discovery", {"name": "D"})
        # Its shutdown is orderly: no command of it is refused.
        assert b"COMMAND ID CONFLICT" not in (tmp_path / "spdk.log").read_bytes()
        assert target.service.defect_count == 0 and target.service.fault_log_count == 0
