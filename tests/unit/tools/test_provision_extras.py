"""What runs and the file does not name, and targets that are not ours to configure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.serve import EmbeddedTarget
from kvdev_tools.connect import make_session
from kvdev_tools.main import run
from kvdev_tools.pool import opened_namespace
from kvdev_tools.provision.document import load_deployment
from spdk_rpc import Client
from tests.unit.tools.test_provision_cli import (
    EXTRA_KEYS,
    HOST_NQN,
    NQN,
    Site,
    call,
    free_port,
    refused,
    refused_plan,
)

ENGINES = "    engines:\n      llama: {volume: pool, geometry: small, tensor_parallel: 2}\n"
VOLUMES = f'volumes:\n  pool:\n    members: [{{target: array0, subsystem: "{NQN}"}}]\n    strip_size: 64KiB\n'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with EmbeddedTarget(made.rpc):
        yield made


def names_of_bdevs(rpc: str) -> set[str]:
    with Client(rpc) as client:
        return {str(each["name"]) for each in client.call("bdev_get_bdevs")}


def test_what_runs_beside_the_file_is_named_and_goes_only_when_it_is_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    other = "nqn.2026-01.io.kvdev:other"
    with Client(site.rpc) as client:
        for name in ("x0", "x1", "x2"):
            client.call("bdev_malloc_create", {"name": name, "num_blocks": 4096, "block_size": 4096})
        client.call("bdev_set_qos_limit", {"name": "x0", "rw_mbytes_per_sec": 5})
        client.call("bdev_set_qos_limit", {"name": "m0", "rw_mbytes_per_sec": 5})
        client.call("bdev_split_create", {"base_bdev": "x2", "split_count": 2})
        client.call("nvmf_create_subsystem", {"nqn": other, "allow_any_host": True})
        client.call("nvmf_subsystem_add_ns", {"nqn": other, "namespace": {"bdev_name": "x0"}})
    planned = call(capsys, "plan", file)
    assert planned["is_empty"]
    assert all(set(each) == set(EXTRA_KEYS) for each in planned["extras"])
    extras = {each["resource"]: each for each in planned["extras"]}
    assert set(extras) == {
        "bdev x0",
        "bdev x1",
        "bdev x2",
        "bdev x2p0",
        "bdev x2p1",
        f"subsystem {other}",
    }
    assert extras["bdev x0"]["part_count"] == 1 and extras["bdev x1"]["reference"] == "bdev:x1"
    assert extras["bdev x2p0"]["reference"] is None  # a split: the file has no words for it
    notes = "\n".join(planned["notes"])
    assert "qos m0: is not in the file and stays; --prune removes it" in notes
    assert f"subsystem {other} with 1 part: runs, is not in the file, and stays" in notes

    assert "is in the file; take it out there first" in refused(
        capsys, "plan", file, "--remove", "bdev:m0", code=2
    )
    assert "runs nowhere" in refused(capsys, "plan", file, "--remove", "bdev:x9", code=2)
    call(capsys, "apply", file, "--prune", "--remove", f"subsystem:{other}", "--remove", "array0/bdev:x1")
    assert {"x0", "x2", "m0"} < names_of_bdevs(site.rpc) and "x1" not in names_of_bdevs(site.rpc)
    with Client(site.rpc) as client:
        assert other not in {each["nqn"] for each in client.call("nvmf_get_subsystems")}
        (m0,) = client.call("bdev_get_bdevs", {"name": "m0"})
        assert m0["assigned_rate_limits"]["rw_mbytes_per_sec"] == 0
    assert call(capsys, "plan", file)["is_empty"]


def test_many_extras_are_counted_in_the_text_and_listed_in_json(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(site.rpc) as client:
        for index in range(20):
            client.call("bdev_null_create", {"name": f"n{index}", "num_blocks": 1024, "block_size": 4096})
    planned = call(capsys, "plan", str(site.path))
    assert len(planned["extras"]) == 20
    assert sum("runs, is not in the file" in note for note in planned["notes"]) == 16
    assert any("4 more run" in note for note in planned["notes"])


def test_an_engine_a_volume_and_a_namespace_that_left_the_file_are_told(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    site.edit(ENGINES, "")
    planned = call(capsys, "plan", file)
    assert planned["is_empty"]
    assert "KV namespace pool#llama.1: is not in the file and stays" in "\n".join(planned["notes"])
    site.edit(VOLUMES, "")
    notes = "\n".join(call(capsys, "plan", file)["notes"])
    assert f"volume pool on {NQN}#1, {NQN}#2 with KV namespaces llama.0, llama.1: is not in the file" in notes
    # Half of the volume is left: it cannot be opened, and what it holds cannot be told.
    call(capsys, "apply", file)
    site.edit("2: a0}", "}")
    call(capsys, "apply", file, "--prune")
    notes = "\n".join(call(capsys, "plan", file)["notes"])
    assert f"volume pool on {NQN}#1: is not in the file and stays; it cannot be opened" in notes
    assert "whether it has a writer cannot be told" in refused(
        capsys, "destroy", file, "--yes", "demo", code=4
    )
    assert call(capsys, "destroy", file, "--yes", "demo", "--assume-dead")["is_done"]


def test_nothing_is_taken_from_under_a_writer_of_a_volume_the_file_forgot(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    uris = ",".join(member.uri for member in load_deployment(file).volumes["pool"].members)
    site.edit(ENGINES, "")
    site.edit(VOLUMES, "")
    with (
        make_session(HOST_NQN, None, timeout_s=10) as session,
        opened_namespace(session, f"vol:{uris}#llama.0", timeout_s=10),
    ):
        writer = f"KV namespace pool#llama.0: has a live writer, process {os.getpid()}"
        assert writer in refused(capsys, "destroy", file, "--yes", "demo", code=4)
        (note,) = [
            each
            for each in call(capsys, "destroy", file, "--dry-run")["notes"]
            if each.startswith("would be refused")
        ]
        assert writer in note
        site.edit("2: a0}", "}")
        site.edit("      a0: {aio: {file: " + str(site.image) + "}}\n", "")
        for options in (["--prune"], ["--remove", "bdev:a0"]):
            assert run(["provision", "apply", file, *options]) == 2
            assert (
                f"namespace {NQN}#2: would be removed, and KV namespace pool#llama.0 has a live writer"
                in (capsys.readouterr().err)
            )
        assert "a0" in names_of_bdevs(site.rpc)
    call(capsys, "apply", file, "--remove", "bdev:a0")
    assert "a0" not in names_of_bdevs(site.rpc)


def test_kv_namespaces_of_workers_without_a_local_spdk_are_adopted(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "apply", str(site.path))
    written = tmp_path / "adopted.yaml"
    found = call(
        capsys, "adopt", "--target", f"array0={site.rpc}", "--host-nqn", HOST_NQN, "-o", str(written)
    )
    assert any("host0: stands for the workers" in note for note in found["notes"])
    (engine,) = load_deployment(str(written)).engines
    assert (engine.name, engine.volume, len(engine.ranks)) == ("llama", "pool", 2)
    planned = call(capsys, "plan", str(written))
    assert planned["is_empty"] and not planned["notes"] and not planned["extras"]


# --- targets that are not ours ------------------------------------------------------------------


def vendor_text(port: int, namespaces: str, *, dead_port: int | None = None) -> str:
    dead = f', "127.0.0.1:{dead_port}"' if dead_port else ""
    return f"""\
version: 1
name: vendors
targets:
  vendor:
    managed: false
    subsystems:
      {NQN}:
        listeners: ["127.0.0.1:{port}"{dead}]
        namespaces: {namespaces}
hosts:
  gpu0: {{nqn: "{HOST_NQN}"}}
"""


def vendor_site(site: Site, capsys: pytest.CaptureFixture[str]) -> int:
    """A target that somebody else configured."""
    call(capsys, "apply", str(site.path))
    (subsystem,) = load_deployment(str(site.path)).subsystems.values()
    return int(subsystem.listeners[0].rpartition(":")[2])


def target_of(document: Any) -> Any:
    (target,) = document["targets"]
    return target


def test_an_unmanaged_target_is_asked_and_compared_and_never_configured(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = vendor_site(site, capsys)
    path = tmp_path / "vendor.yaml"
    path.write_text(vendor_text(port, "{1: {size: 32MiB, block_size: 4096}, 2: {}}"))
    planned = call(capsys, "plan", str(path))
    assert planned["is_empty"] and not planned["notes"] and not planned["calls"]
    target = target_of(call(capsys, "status", str(path)))
    (subsystem,) = target["subsystems"]
    assert (target["health"], subsystem["health"]) == ("ok", "ok")
    assert target["version"] == "kvdev target" and subsystem["listeners"][0]["health"] == "ok"
    assert [(each["nsid"], each["health"], each["size_bytes"]) for each in subsystem["namespaces"]] == [
        (1, "ok", 32 << 20),
        (2, "ok", 32 << 20),
    ]

    path.write_text(vendor_text(port, "{1: {size: 1GiB}, 2: {block_size: 512}, 7: {}}"))
    shown = call(capsys, "plan", str(path), code=2)
    texts = "\n".join(shown["problems"])
    assert "vendor.yaml:9:22: targets.vendor" in texts
    for part in ("size is 32 MiB, expected 1 GiB", "block_size is 4096, expected 512", "active are 1, 2"):
        assert part in texts
    subsystem = target_of(call(capsys, "status", str(path), code=3))["subsystems"][0]
    healths = [each["health"] for each in subsystem["namespaces"]]
    assert subsystem["health"] == "degraded"
    assert healths == ["size is 32 MiB", "block_size is 4096", "missing"]


def test_an_unmanaged_targets_lost_path_is_a_note_and_the_last_one_a_problem(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, dead_port = vendor_site(site, capsys), free_port()
    path = tmp_path / "vendor.yaml"
    path.write_text(vendor_text(port, "{1: {}}", dead_port=dead_port))
    planned = call(capsys, "plan", str(path))
    notes = "\n".join(planned["notes"])
    assert f"a path is down: 127.0.0.1:{dead_port}" in notes and "has namespaces 2, which" in notes
    assert run(["provision", "status", str(path)]) == 0
    assert f"· 127.0.0.1:{dead_port}: " in capsys.readouterr().out
    path.write_text(vendor_text(dead_port, "{1: {}}"))
    assert "Connection refused" in refused_plan(capsys, str(path))
    target = target_of(call(capsys, "status", str(path), code=3))
    assert target["health"] == target["subsystems"][0]["namespaces"][0]["health"] == "unreachable"
    # Somebody whom it does not let in.
    path.write_text(vendor_text(port, "{1: {}}").replace("11111111-1111", "22222222-1111"))
    assert "connect invalid host" in refused_plan(capsys, str(path))
