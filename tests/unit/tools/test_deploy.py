"""The recipes under deploy/: their commands exist, their sockets meet, their limits are those that doctor asks for."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvdev_tools.main import cli
from kvdev_tools.provision.document import build_deployment
from kvdev_tools.provision.source import load_text
from kvdev_tools.provision.work import Look, flush_of_volume

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RPC = "/run/kvdev/spdk/spdk.sock"


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def check_kvdev(arguments: list[str]) -> None:
    """Walk a command line down our commands: every command and option has to exist."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments.pop(0))
        assert found is not None
        command = found
    command.make_parser(context).parse_args(arguments)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_units_commands_exist(path: Path) -> None:
    service = unit(path)["Service"]
    words = shlex.split(service["ExecStart"])
    if words[0].endswith("/kvdev"):
        check_kvdev(words[1:])
    else:
        assert words[0].endswith("/spdk_tgt")
        assert words[words.index("-r") + 1] == RPC
    assert int(service["LimitNOFILE"]) >= 4096


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for each in UNITS:
        # What they start is not installed here; everything else is checked.
        text = (
            each.read_text()
            .replace("/opt/kvdev/bin/kvdev", "/bin/true")
            .replace("/opt/spdk/bin/spdk_tgt", "/bin/true")
        )
        (tmp_path / each.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert path.name not in done.stderr, done.stderr


def test_whoever_locks_memory_may_lock_all() -> None:
    for name in ("kvdev-spdk.service", "kvdev-target.service"):
        assert unit(DEPLOY / "systemd" / name)["Service"]["LimitMEMLOCK"] == "infinity"


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "Pod":
                yield path.name, document["spec"]
            elif document["kind"] == "DaemonSet":
                yield path.name, document["spec"]["template"]["spec"]


def test_containers_share_sockets_and_have_their_limits() -> None:
    found = dict(pods())
    assert len(found) == len(MANIFESTS) == 2
    for name, spec in found.items():
        volumes = {volume["name"] for volume in spec["volumes"]}
        containers = {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}
        for container in containers.values():
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes, (name, container["name"])
            assert mounts["/run/kvdev/spdk"] == "spdk"
            limits = container.get("resources", {}).get("limits", {})
            if "hugepages-2Mi" in limits:
                assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
                assert {"cpu", "memory"} <= set(limits)
        spdk = containers["spdk"]
        assert spdk["args"][spdk["args"].index("-r") + 1] == RPC
        assert "hugepages-2Mi" in spdk["resources"]["limits"]
    engine = found["engine-pod.yaml"]
    assert engine["shareProcessNamespace"] is True
    assert {"/run/kvdev/spdk", "/run/kvdev/vhost"} <= {
        mount["mountPath"] for mount in engine["containers"][0]["volumeMounts"]
    }


def test_the_commands_in_manifests_exist() -> None:
    for _, spec in pods():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            if container["name"] == "provision" and "args" in container:
                check_kvdev(list(container["args"]))


def test_the_site_in_the_manifest_is_one() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "engine-pod.yaml").read_text()))
    site = build_deployment(load_text(documents[0]["data"]["site.yaml"]))
    assert [rank.name for rank in site.engines[0].ranks] == [f"llama.{rank}" for rank in range(8)]
    assert site.endpoints[0].rpc == RPC
    look = Look(site, [], {})
    assert [hops[0].state.value for _, hops in flush_of_volume(look, site.volumes["pool"])] == [
        "unknown",
        "unknown",
    ]
