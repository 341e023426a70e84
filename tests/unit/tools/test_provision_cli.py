"""``kvdev provision`` on the embedded target with its data path: keys, exit codes, one line of error."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.serve import EmbeddedTarget
from kvdev_tools.main import run
from kvdev_tools.provision.render import Painter
from kvdev_tools.provision.tree import tree_lines
from spdk_rpc import Client
from tests.unit.tools.test_cli_json import documented, keys_of

NQN = "nqn.2026-01.io.kvdev:a"
EXTRA_KEYS = ("entry", "resource", "reference", "part_count")
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Site:
    """A file over one embedded target: a raid of memory and a file, a volume over both, two ranks."""

    def __init__(self, folder: Path) -> None:
        self.rpc = str(folder / "rpc.sock")
        self.path = folder / "site.yaml"
        self.image = folder / "a0.img"
        with self.image.open("wb") as file:
            file.truncate(32 << 20)
        self.text = f"""\
version: 1
name: demo
targets:
  array0:
    rpc: {self.rpc}
    bdevs:
      m0: {{malloc: {{size: 16MiB}}}}
      m1: {{malloc: {{size: 16MiB}}}}
      a0: {{aio: {{file: {self.image}}}}}
    raids:
      r0: {{strip_size: 64KiB, members: [m0, m1]}}
    subsystems:
      {NQN}:
        serial_number: KV0
        hosts: [gpu0]
        listeners: ["127.0.0.1:{free_port()}"]
        namespaces: {{1: r0, 2: a0}}
hosts:
  gpu0:
    nqn: {HOST_NQN}
    engines:
      llama: {{volume: pool, geometry: small, tensor_parallel: 2}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
    strip_size: 64KiB
"""
        self.write(self.text)

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def edit(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert old in text
        self.write(text.replace(old, new, 1))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with EmbeddedTarget(made.rpc):
        yield made


def call(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert run(["provision", *arguments, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    assert run(["provision", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("kvdev: ") and error.count("\n") == 1, error
    return error


def test_apply_twice_status_adopt_and_destroy(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    planned = call(capsys, "plan", file)
    lists = {"notes[]", "problems[]"} | {f"extras[].{each}" for each in EXTRA_KEYS}
    assert keys_of(planned) - {"extras"} | lists == documented("provision plan")
    assert not planned["is_empty"] and not planned["problems"]
    first = call(capsys, "apply", file)
    assert keys_of(first) == documented("provision apply")
    assert first["is_done"] and first["steps_done"] == first["steps"] == len(planned["changes"])
    again = call(capsys, "apply", file)
    assert again["steps"] == 0 and call(capsys, "plan", file)["is_empty"]

    shown = call(capsys, "status", file)
    expected = documented("provision status")
    assert {key for key in expected if ".hosts[]" not in key and not key.startswith("hosts[]")} >= keys_of(
        shown
    ) - {"hosts"}
    assert shown["pending_steps"] == 0
    (volume,) = shown["volumes"]
    assert [each["name"] for each in volume["kv_namespaces"]] == ["llama.0", "llama.1"]
    assert [each["state"] for each in volume["flush"]] == ["not needed", "effective"]
    (target,) = shown["targets"]
    counters = target["subsystems"][0]["namespaces"][0]
    assert counters["bytes_written"] > 0 and counters["member_index"] == 0

    adopted = tmp_path / "adopted.yaml"
    found = call(
        capsys, "adopt", "--target", f"array0={site.rpc}", "--host-nqn", HOST_NQN, "-o", str(adopted)
    )
    assert keys_of(found) | {"notes[]"} == documented("provision adopt")
    assert call(capsys, "plan", str(adopted))["is_empty"]
    # The only host that is let in is the one to look as.
    alone = tmp_path / "alone.yaml"
    call(capsys, "adopt", "--target", f"array0={site.rpc}", "-o", str(alone))
    assert "llama" in alone.read_text() and call(capsys, "plan", str(alone))["is_empty"]
    assert "File exists" in refused(capsys, "adopt", "--target", f"a={site.rpc}", "-o", str(adopted), code=2)

    # A rank's namespace is replayed in its own geometry: heads of the whole model would not fit it.
    pool = f"vol:{','.join(volume['members'])}#llama.0"
    assert run(["replay", pool, "--requests", "3", "--host-nqn", HOST_NQN, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["mismatches"] == 0 and replayed["pages_written"] > 0

    config = tmp_path / "spdk.json"
    exported = call(capsys, "export", file, "array0", "-o", str(config))
    assert keys_of(exported) == documented("provision export")
    assert config.stat().st_mode & 0o777 == 0o600

    for arguments, got in ((["--yes", "dem"], "'dem'"), ([], "no --yes")):
        said = refused(capsys, "destroy", file, *arguments, code=2)
        assert f"expected the name 'demo', got {got} (volume pool would go with it); nothing was" in said
    gone = call(capsys, "destroy", file, "--yes", "demo")
    assert keys_of(gone) == documented("provision apply") and gone["is_done"]
    with Client(site.rpc) as client:
        assert client.call("bdev_get_bdevs") == []
    assert call(capsys, "destroy", file, "--yes", "demo")["steps"] == 0


def test_what_is_not_as_the_file_says_is_told_by_health_and_exit_code(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    before = call(capsys, "status", file, code=3)
    assert before["volumes"][0]["health"] == "unreachable"
    call(capsys, "apply", file)
    call(capsys, "status", file)
    with Client(site.rpc) as client:
        client.call("bdev_aio_delete", {"name": "a0"})
    shown = call(capsys, "status", file, code=3)
    (target,) = shown["targets"]
    assert (target["health"], target["subsystems"][0]["health"]) == ("degraded", "degraded")
    healths = {each["nsid"]: each["health"] for each in target["subsystems"][0]["namespaces"]}
    assert healths == {1: "ok", 2: "missing"}
    assert shown["volumes"][0]["health"] != "ok"


def test_what_was_exported_survives_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path)
    config = tmp_path / "spdk.json"
    site.edit("namespaces: {1: r0, 2: a0}", "namespaces: {2: a0}")
    with EmbeddedTarget(site.rpc):
        call(capsys, "apply", str(site.path))
        call(capsys, "export", str(site.path), "array0", "-o", str(config))
    arguments = [sys.executable, "-m", "kvdev.target", "--rpc-socket", site.rpc, "--config", str(config)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            # Bytes and identity of the file's namespace are as before, so the volume is the same.
            assert call(capsys, "plan", str(site.path))["is_empty"]
        finally:
            process.terminate()


def test_text_and_colours_only_where_they_are_wanted(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(site.path)
    assert run(["provision", "plan", file]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "+ raid r0" in plain and "bdev_raid_create {" in plain
    assert run(["provision", "plan", file, "--color", "always"]) == 0
    assert "\x1b[32m" in capsys.readouterr().out
    assert run(["provision", "apply", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/") and lines[-1].endswith("steps done")
    assert run(["provision", "status", file]) == 0
    tree = capsys.readouterr().out
    for part in (
        "target array0",
        f"subsystem {NQN}",
        "namespace 1",
        "volume pool",
        "KV namespace llama.1",
        "flush by",
    ):
        assert part in tree


def test_ways_of_a_flush_that_are_alike_are_one_line_with_their_number() -> None:
    def way(name: str, state: str, *hops: tuple[str, str, str]) -> dict[str, Any]:
        named = [dict(zip(("where", "state", "reason"), hop, strict=True)) for hop in hops]
        return {"way": name, "state": state, "hops": named}

    memory = ("not needed", "malloc: memory")
    flush = [
        way("tcp://a?nsid=1", "not needed", ("t#1", "not needed", "nvmf"), ("m0", *memory)),
        way("tcp://a?nsid=2", "not needed", ("t#2", "not needed", "nvmf"), ("m1", *memory)),
        way("tcp://a?nsid=3", "effective", ("t#3", "effective", "nvmf"), ("m2", "effective", "aio")),
        way("host g", "not needed", ("vhost x", "not needed", "vhost"), ("m0", *memory), ("m1", *memory)),
    ]
    volume = {
        "name": "pool",
        "health": "ok",
        "reason": None,
        "size_bytes": 1,
        "free_bytes": 1,
        "members": [],
        "flush": flush,
        "kv_namespaces": [],
    }
    document = {"name": "d", "targets": [], "hosts": [], "volumes": [volume], "pending_steps": 0}
    lines = list(tree_lines({**document, "notes": [], "problems": []}, Painter(io.StringIO())))
    assert [line.lstrip("│├─ ") for line in lines[2:]] == [
        "flush by tcp://a?nsid=1 and 1 more: not needed",
        "· t#1 and 1 more: not needed (nvmf)",
        "· m0 and 1 more: not needed (malloc: memory)",
        "flush by tcp://a?nsid=3: effective",
        "· t#3: effective (nvmf)",
        "· m2: effective (aio)",
        "flush by host g: not needed",
        "· vhost x: not needed (vhost)",
        "· m0 and 1 more: not needed (malloc: memory)",
    ]


def test_dry_run_changes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert not call(capsys, "apply", str(site.path), "--dry-run")["is_empty"]
    with Client(site.rpc) as client:
        assert client.call("bdev_get_bdevs") == []
    call(capsys, "apply", str(site.path))
    planned = call(capsys, "destroy", str(site.path), "--dry-run")
    lost = {each["resource"] for each in planned["changes"] if each["loses_data"]}
    assert lost == {"bdev m0", "bdev m1"}
    assert call(capsys, "plan", str(site.path))["is_empty"]


def test_a_difference_that_costs_something_has_to_be_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    site.edit(
        'volumes:\n  pool:\n    members: [{target: array0, subsystem: "'
        + NQN
        + '"}]\n    strip_size: 64KiB\n',
        "",
    )
    site.edit("    engines:\n      llama: {volume: pool, geometry: small, tensor_parallel: 2}\n", "")
    call(capsys, "apply", file)
    site.edit("strip_size: 64KiB, members", "strip_size: 128KiB, members")
    assert run(["provision", "plan", file]) == 2
    text = capsys.readouterr()
    assert "site.yaml:11:7: targets.array0.raids.r0: raid r0: strip_size_kb: expected 128, got 64" in text.err
    assert "--replace raid:R0" not in text.err and "--replace raid:r0" in text.err
    call(capsys, "apply", file, "--replace", "array0/raid:r0")
    assert call(capsys, "plan", file)["is_empty"]
    assert "expected KIND:NAME" in refused(capsys, "plan", file, "--replace", "raid:nope", code=2)


def test_what_the_file_does_not_name_stays_unless_it_is_pruned(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    call(capsys, "apply", file)
    other = HOST_NQN.replace("1111", "2222")
    with Client(site.rpc) as client:
        client.call("nvmf_subsystem_add_host", {"nqn": NQN, "host": other})
        client.call("bdev_null_create", {"name": "n9", "num_blocks": 1024, "block_size": 4096})
    planned = call(capsys, "plan", file)
    assert planned["is_empty"] and other in planned["notes"][0]
    call(capsys, "apply", file, "--prune")
    with Client(site.rpc) as client:
        (subsystem,) = client.call("nvmf_get_subsystems", {"nqn": NQN})
        assert [each["nqn"] for each in subsystem["hosts"]] == [HOST_NQN]
        assert "n9" in [each["name"] for each in client.call("bdev_get_bdevs")]


def test_what_stands_in_the_way_is_found_before_anything_is_done(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(site.path)
    with Client(site.rpc) as client:
        client.call("bdev_malloc_create", {"name": "m0", "num_blocks": 4096, "block_size": 4096})
        client.call(
            "bdev_raid_create",
            {"name": "rX", "strip_size_kb": 64, "raid_level": "raid0", "base_bdevs": ["m0"]},
        )
        # Left configuring: its second base never came.
        bases = ["m1", "never"]
        client.call(
            "bdev_raid_create",
            {"name": "r0", "strip_size_kb": 64, "raid_level": "raid0", "base_bdevs": bases},
        )
    assert "raid r0: bdev m0: is claimed by raid rX" in refused_plan(capsys, file)
    with Client(site.rpc) as client:
        client.call("bdev_raid_delete", {"name": "rX"})
    planned = call(capsys, "plan", file)
    assert {"action": "repair", "resource": "raid r0"}.items() <= next(
        each for each in planned["changes"] if each["resource"] == "raid r0"
    ).items()
    call(capsys, "apply", file)
    assert call(capsys, "plan", file)["is_empty"]

    site.edit('listeners: ["127.0.0.1:', 'listeners: ["127.0.0.2:')
    assert "listens on another address than the file says" in refused_plan(capsys, file)
    site.write(site.text)
    site.edit(str(site.image), str(tmp_path / "none.img"))
    site.edit("a0: {", "a7: {")
    site.edit("2: a0}", "2: a0, 3: a7}")
    site.edit("    raids:\n", f"      a0: {{aio: {{file: {site.image}}}}}\n    raids:\n")
    assert "is not there; make it first" in refused_plan(capsys, file)
    key = tmp_path / "k0"
    key.write_text("NVMeTLSkey-1:01:secret:")
    key.chmod(0o644)
    site.write(site.text)
    site.edit("    bdevs:\n", f"    keys: {{k0: {key}}}\n    bdevs:\n")
    assert run(["provision", "plan", file]) == 2
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err


def refused_plan(capsys: pytest.CaptureFixture[str], file: str) -> str:
    assert run(["provision", "plan", file]) == 2
    return capsys.readouterr().err


def test_a_swallowed_flush_is_refused_unless_it_is_accepted(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.edit(f"aio: {{file: {site.image}}}", f"uring: {{file: {site.image}}}")
    shown = call(capsys, "plan", str(site.path), code=2)
    assert any(
        "durability: a flush by" in each and "uring bdev has no flush" in each for each in shown["problems"]
    )
    site.write(site.path.read_text() + "    durability: none\n")
    assert not call(capsys, "plan", str(site.path))["problems"]


def test_nobody_there_is_3_and_a_second_apply_is_refused(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvdev_tools.provision.document import load_deployment
    from kvdev_tools.provision.lock import locked

    with locked(load_deployment(str(site.path))):
        # Another process: a lock of our own would be granted again.
        done = subprocess.run(
            [sys.executable, "-m", "kvdev_tools.main", "provision", "apply", str(site.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert f"another provision apply or destroy is running, process {os.getpid()}" in done.stderr
    site.edit(site.rpc, str(tmp_path / "nobody.sock"))
    refused(capsys, "plan", str(site.path), code=3)
    shown = call(capsys, "status", str(site.path), code=3)
    assert shown["targets"][0]["health"] == "unreachable" and shown["pending_steps"] is None


def test_destroy_is_refused_while_somebody_writes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    from kvdev_tools.connect import make_session
    from kvdev_tools.pool import opened_namespace
    from kvdev_tools.provision.document import load_deployment

    file = str(site.path)
    call(capsys, "apply", file)
    uris = ",".join(member.uri for member in load_deployment(file).volumes["pool"].members)
    with (
        make_session(HOST_NQN, None, timeout_s=10) as session,
        opened_namespace(session, f"vol:{uris}#llama.0", timeout_s=10),
    ):
        text = refused(capsys, "destroy", file, "--yes", "demo", code=4)
        assert f"KV namespace pool#llama.0: has a live writer, process {os.getpid()}" in text
        writers = {
            each["name"]: each["writer"]
            for each in call(capsys, "status", file)["volumes"][0]["kv_namespaces"]
        }
        assert writers == {"llama.0": "live", "llama.1": "none"}
    assert call(capsys, "destroy", file, "--yes", "demo")["is_done"]
