"""``kvdev provision`` on real SPDK: one spdk_tgt as target, another as host that attaches it and serves vhost.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later; started without huge pages, on one core each).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev.security.psk import TlsPsk
from kvdev.security.source import write_key_file
from kvdev.testing.rpc_proxy import Failure, RpcProxy
from kvdev_tools.main import run
from spdk_rpc import Client, RpcTransportError

pytestmark = pytest.mark.interop

NQN = "nqn.2026-01.io.kvdev:a"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"
START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def spdk(folder: Path, name: str, core: int, *, config: Path | None = None) -> Iterator[str]:
    binary = os.environ.get("KVDEV_SPDK_TGT")
    if not binary:
        pytest.skip("KVDEV_SPDK_TGT names no spdk_tgt")
    path = str(folder / f"{name}.sock")
    arguments = [
        binary,
        "--no-pci",
        "--no-huge",
        "-s",
        "1024",
        "-m",
        hex(1 << core),
        "--disable-cpumask-locks",
    ]
    arguments += ["-S", str(folder), "-r", path, *(["--json", str(config)] if config else [])]
    with (
        (folder / f"{name}.log").open("ab") as log,
        subprocess.Popen(arguments, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = Deadline.after(START_TIMEOUT_S)
            while True:
                with contextlib.suppress(RpcTransportError), Client(path, timeout_s=30) as client:
                    client.call("framework_wait_init")
                    break
                deadline.check("start of spdk_tgt")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                    raise AssertionError(f"spdk_tgt ended with {process.returncode}")
            yield path
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def site_text(folder: Path, target: str, host: str, ports: list[int], *, driver: str = "uring") -> str:
    listeners = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    return f"""\
version: 1
name: real
targets:
  array0:
    rpc: {target}
    cores: "0x1"
    transport: {{max_io_size: 1MiB, in_capsule_data_size: 8KiB}}
    bdevs:
      m0: {{malloc: {{size: 64MiB}}}}
      m1: {{malloc: {{size: 64MiB}}, qos: {{rw_ios_per_sec: 100000}}}}
      f0: {{{driver}: {{file: {folder}/f0.img}}}}
      f1: {{aio: {{file: {folder}/f1.img}}}}
    raids:
      r0: {{strip_size: 64KiB, members: [m0, m1]}}
    lvstores:
      lvs0: {{bdev: f0, cluster_size: 1MiB, lvols: {{l0: {{size: 128MiB, thin: true}}}}}}
    subsystems:
      {NQN}:
        serial_number: KV0
        hosts: [gpu0]
        listeners: [{listeners}]
        namespaces: {{1: r0, 2: lvs0/l0, 3: f1}}
hosts:
  gpu0:
    rpc: {host}
    nqn: {HOST_NQN}
    controllers:
      Nvme0:
        target: array0
        subsystem: {NQN}
        ctrlr_loss_timeout_s: -1
        reconnect_delay_s: 2
    raids:
      R0: {{strip_size: 64KiB, members: [Nvme0n1, Nvme0n2, Nvme0n3]}}
    engines:
      llama: {{volume: pool, geometry: small, tensor_parallel: 8}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
    strip_size: 64KiB
    durability: none
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    got = run(["provision", *arguments, "--json"])
    captured = capsys.readouterr()
    assert got == code, captured.err
    return json.loads(captured.out)


def make_images(folder: Path) -> None:
    for name in ("f0", "f1"):
        with (folder / f"{name}.img").open("wb") as file:
            file.truncate(256 << 20)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    make_images(tmp_path)
    with spdk(tmp_path, "target", 0) as target, spdk(tmp_path, "host", 1) as host:
        path = tmp_path / "site.yaml"
        path.write_text(site_text(tmp_path, target, host, [free_port(), free_port()]))
        yield path


def test_a_site_on_real_spdk(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(site)
    began = time.monotonic()
    done = call(capsys, "apply", file)
    assert done["is_done"], done
    took = time.monotonic() - began
    assert call(capsys, "plan", file)["is_empty"]
    assert call(capsys, "apply", file)["steps"] == 0
    shown = call(capsys, "status", file)
    assert shown["pending_steps"] == 0 and not shown["problems"]
    (host,) = shown["hosts"]
    assert host["controllers"][0]["path_states"] == ["enabled", "enabled"]
    assert [each["health"] for each in host["vhosts"]] == ["ok"] * 8
    (volume,) = shown["volumes"]
    assert len(volume["kv_namespaces"]) == 8
    states = {way["way"].rpartition("nsid=")[2]: way["state"] for way in volume["flush"]}
    assert states == {"1": "not needed", "2": "swallowed", "3": "effective", "host gpu0": "swallowed"}
    hops = {hop["where"]: hop["state"] for hop in volume["flush"][-1]["hops"]}
    assert hops["Nvme0n3"] == "effective" and hops["Nvme0n1"] == "not needed"

    # What runs, written as a file, is a file that changes nothing.
    adopted = tmp_path / "adopted.yaml"
    rpcs = {entry["name"]: entry["rpc"] for entry in (*shown["targets"], *shown["hosts"])}
    options = ["--target", f"array0={rpcs['array0']}", "--host", f"gpu0={rpcs['gpu0']}"]
    call(capsys, "adopt", *options, "--host-nqn", HOST_NQN, "-o", str(adopted))
    assert call(capsys, "plan", str(adopted))["is_empty"]

    with Client(rpcs["gpu0"]) as client:
        config = client.call("framework_get_config", {"name": "bdev"})
        (flush,) = [
            each["params"]["enable_flush"] for each in config if each["method"] == "bdev_nvme_set_options"
        ]
        assert flush is True
    gone = call(capsys, "destroy", file, "--yes", "real")
    assert gone["is_done"], gone
    assert len(call(capsys, "plan", file)["changes"]) > 0
    with capsys.disabled():
        print(f"\nprovision on spdk_tgt: {done['steps']} steps in {took:.2f} s")


def test_a_site_over_tls(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target's listeners take TLS only: SPDK's initiator and ours both come with the host's key."""
    for name in ("target.key", "host.key"):
        write_key_file(str(tmp_path / name), TlsPsk(bytes(range(32)), 1).text(), field="test")
    text = site.read_text()
    for address in re.findall(r'"(127[0-9.]+:[0-9]+)"', text):
        text = text.replace(f'"{address}"', f'{{address: "{address}", secure_channel: true}}')
    text = text.replace("hosts: [gpu0]", "hosts: [{host: gpu0, psk: to-gpu0}]")
    text = text.replace('    cores: "0x1"\n', f"    keys: {{to-gpu0: {tmp_path}/target.key}}\n")
    text = text.replace(
        f"    nqn: {HOST_NQN}\n",
        f"    nqn: {HOST_NQN}\n    keys: {{own: {tmp_path}/host.key}}\n    psk: own\n",
    )
    site.write_text(text)
    done = call(capsys, "apply", str(site))
    assert done["is_done"], done
    assert call(capsys, "plan", str(site))["is_empty"]
    shown = call(capsys, "status", str(site))
    assert shown["hosts"][0]["controllers"][0]["path_states"] == ["enabled", "enabled"]
    (volume,) = shown["volumes"]
    assert volume["health"] == "ok" and len(volume["kv_namespaces"]) == 8
    assert call(capsys, "destroy", str(site), "--yes", "real")["is_done"]


def test_flush_that_was_forgotten_is_found_and_set_with_the_controllers_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path)
    with spdk(tmp_path, "target", 0) as target, spdk(tmp_path, "host", 1) as host:
        port = free_port()
        path = tmp_path / "site.yaml"
        path.write_text(site_text(tmp_path, target, host, [port], driver="aio"))
        file = str(path)
        text = path.read_text()
        target_only = text[: text.index("hosts:\n  gpu0:")].replace("hosts: [gpu0]", f'hosts: ["{HOST_NQN}"]')
        (tmp_path / "target.yaml").write_text(target_only)
        assert call(capsys, "apply", str(tmp_path / "target.yaml"))["is_done"]
        with Client(host) as client:
            # Somebody attached it by hand, with SPDK's defaults.
            client.call(
                "bdev_nvme_attach_controller",
                {
                    "name": "Nvme0",
                    "trtype": "TCP",
                    "adrfam": "IPv4",
                    "traddr": "127.0.0.1",
                    "trsvcid": str(port),
                    "subnqn": NQN,
                    "hostnqn": HOST_NQN,
                    "ctrlr_loss_timeout_sec": -1,
                    "reconnect_delay_sec": 2,
                },
            )
        shown = call(capsys, "plan", file, code=2)
        assert any("--replace controller:Nvme0" in each for each in shown["problems"])
        done = call(capsys, "apply", file, "--replace", "controller:Nvme0")
        assert done["is_done"], done
        assert call(capsys, "plan", file)["is_empty"]


@pytest.mark.parametrize("failure", list(Failure))
def test_a_failure_in_the_middle_leaves_a_site_that_the_next_apply_completes(
    failure: Failure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path)
    with (
        spdk(tmp_path, "target", 0) as target,
        spdk(tmp_path, "host", 1) as host,
        RpcProxy(str(tmp_path / "p0"), target) as first,
        RpcProxy(str(tmp_path / "p1"), host) as second,
    ):
        path = tmp_path / "site.yaml"
        path.write_text(site_text(tmp_path, first.path, second.path, [free_port()]))
        for proxy, at in ((first, 4), (first, 3), (second, 1), (second, 2)):
            proxy.fail(at, failure)
            code = run(["provision", "apply", str(path), "--json"])
            outcome = json.loads(capsys.readouterr().out)
            assert proxy.has_failed and code in (0, 3, 4), outcome
            proxy.fail(-1, failure)
        assert call(capsys, "apply", str(path))["is_done"]
        assert call(capsys, "plan", str(path))["is_empty"]


def test_an_exported_configuration_brings_both_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path)
    path = tmp_path / "site.yaml"
    configs = {name: tmp_path / f"{name}.json" for name in ("array0", "gpu0")}
    with spdk(tmp_path, "target", 0) as target, spdk(tmp_path, "host", 1) as host:
        text = site_text(tmp_path, target, host, [free_port()], driver="aio")
        # Only what has its bytes on files: memory comes back empty.
        text = text.replace("1: r0, ", "").replace("Nvme0n1, ", "")
        path.write_text(text)
        assert call(capsys, "apply", str(path))["is_done"]
        for name, config in configs.items():
            call(capsys, "export", str(path), name, "-o", str(config))
    with (
        spdk(tmp_path, "target", 0, config=configs["array0"]),
        spdk(tmp_path, "host", 1, config=configs["gpu0"]),
    ):
        assert call(capsys, "plan", str(path))["is_empty"]


def test_changes_in_place_and_a_member_that_goes_and_comes_back(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site)
    text = site.read_text()
    start = text.index("listeners: [")
    both = text[start : text.index("]", start) + 1]
    one = both.split(",")[0] + "]"
    site.write_text(text.replace(both, one))
    assert call(capsys, "apply", file)["is_done"]
    # A second path, a larger lvol, other limits.
    larger = text.replace("l0: {size: 128MiB", "l0: {size: 160MiB").replace("100000", "200000")
    site.write_text(larger)
    planned = call(capsys, "plan", file)
    actions = {each["resource"]: each["action"] for each in planned["changes"]}
    assert actions.pop(next(name for name in actions if name.startswith("listener"))) == "create"
    assert actions == {"controller Nvme0": "update", "lvol lvs0/l0": "update", "qos m1": "update"}
    assert call(capsys, "apply", file)["is_done"]
    shown = call(capsys, "status", file)
    assert shown["hosts"][0]["controllers"][0]["path_states"] == ["enabled", "enabled"]
    assert shown["pending_steps"] == 0
    # One path goes again, with the listener: the file alone does not take a listener away.
    site.write_text(larger.replace(both, one))
    assert call(capsys, "apply", file, "--prune")["is_done"]
    assert call(capsys, "plan", file)["is_empty"]
    # A member goes under the running raid. What it leaves behind is repaired without being named.
    with Client(shown["targets"][0]["rpc"]) as client:
        client.call("bdev_aio_delete", {"name": "f1"})
    with Client(shown["hosts"][0]["rpc"]) as client:
        deadline = Deadline.after(30)
        while any(each["name"] == "R0" for each in client.call("bdev_get_bdevs")):
            deadline.check("the raid to notice")
    shown = call(capsys, "status", file, code=3)
    health = {each["nsid"]: each["health"] for each in shown["targets"][0]["subsystems"][0]["namespaces"]}
    assert health[3] == "missing" and shown["hosts"][0]["raids"][0]["health"] != "ok"
    done = call(capsys, "apply", file)
    assert done["is_done"], done
    assert call(capsys, "plan", file)["is_empty"]
    shown = call(capsys, "status", file)
    assert [each["health"] for each in shown["hosts"][0]["vhosts"]] == ["ok"] * 8
    assert shown["volumes"][0]["health"] == "ok"
