"""docs/operations.md, a member dies: the commands of that section in their order, on the embedded target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.target.serve import EmbeddedTarget
from kvdev_tools.main import run
from kvdev_tools.provision.document import load_deployment
from spdk_rpc import Client
from tests.unit.tools.test_provision_cli import HOST_NQN, NQN, Site, call

DOC = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with EmbeddedTarget(made.rpc):
        yield made


def test_the_commands_of_the_section_are_these() -> None:
    section = DOC.read_text().partition("## 8. A member dies")[2].partition("\n## ")[0]
    commands = re.findall(r"^\s+kvdev (\w+ \w+)", section, re.M)
    assert commands == [
        "provision status",
        "provision plan",
        "provision apply",
        "volume recreate",
        "provision apply",
    ]
    assert "--replace" in section and "has no label" in section


def test_a_member_that_died_is_replaced_and_the_volume_made_anew(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    with Client(site.rpc) as client:
        client.call("bdev_aio_delete", {"name": "a0"})  # what SPDK does when a device goes
    shown = call(capsys, "status", file, code=3)
    healths = {each["nsid"]: each["health"] for each in shown["targets"][0]["subsystems"][0]["namespaces"]}
    assert healths == {1: "ok", 2: "missing"}
    assert shown["volumes"][0]["health"] == "unreachable" and shown["pending_steps"] > 0

    fresh = tmp_path / "fresh.img"
    with fresh.open("wb") as opened:
        opened.truncate(32 << 20)
    site.edit(str(site.image), str(fresh))
    planned = call(capsys, "plan", file)
    assert not planned["problems"] and "bdev a0" in {each["resource"] for each in planned["changes"]}
    # The target serves the new device; the volume is not made over members that still carry its labels.
    assert run(["provision", "apply", file]) == 4
    text = capsys.readouterr().err
    assert "volume pool" in text and "has no label, while other members have one" in text
    make_anew(site, capsys)


def make_anew(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(site.path)
    uris = [member.uri for member in load_deployment(file).volumes["pool"].members]
    volume = ["vol:" + ",".join(uris), "--host-nqn", HOST_NQN]
    assert run(["volume", "recreate", *volume, "--replace", uris[0]]) != 0, (
        "the one that lacks its label is another"
    )
    assert uris[1] in capsys.readouterr().err
    assert run(["volume", "recreate", *volume, "--replace", uris[1]]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert call(capsys, "apply", file)["is_done"]
    assert call(capsys, "plan", file)["is_empty"]
    (shown,) = call(capsys, "status", file)["volumes"]
    assert shown["health"] == "ok" and len(shown["kv_namespaces"]) == 2


def test_a_member_that_spdk_still_knows_is_named_for_replacement(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    fresh = tmp_path / "fresh.img"
    with fresh.open("wb") as opened:
        opened.truncate(32 << 20)
    site.edit(str(site.image), str(fresh))
    assert "--replace bdev:a0" in "\n".join(call(capsys, "plan", file, code=2)["problems"])
    planned = call(capsys, "plan", file, "--replace", "array0/bdev:a0")
    assert any("volume pool: a namespace below it is made anew" in note for note in planned["notes"])
    # It was whole when it was planned: apply looks again once its members are there.
    assert run(["provision", "apply", file, "--replace", "array0/bdev:a0"]) == 4
    shown = capsys.readouterr()
    assert "make bdev a0" in shown.out and f"remove namespace {NQN}#2" in shown.out
    assert "kvdev: volume pool: " in shown.err and "has no label" in shown.err
    make_anew(site, capsys)
