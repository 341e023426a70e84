"""What bad input gets: one clear line that names the field, the value and the remedy; nothing half made."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.host import _read_text as read_text
from kvdev.initiator.options import IO_QUEUE_COUNT_MAX
from kvdev.session import Session
from kvdev_tools.exits import exit_code_of, shortage_of
from kvdev_tools.main import run
from kvdev_tools.rig import Rig, running_rig
from kvdev_tools.trace import generate_trace

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e6f"
HOST = ["--host-nqn", HOST_NQN]
TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
MEMBER_SIZE_BYTES = 4 << 20


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Rig, str]]:
    with running_rig() as rig:
        uri = rig.provision(host_nqn=HOST_NQN, namespace_count=2, namespace_size_bytes=MEMBER_SIZE_BYTES)
        yield rig, str(uri)


@pytest.fixture
def members(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "m0", tmp_path / "m1"]
    for path in paths:
        path.touch()
        os.truncate(path, MEMBER_SIZE_BYTES)
    return paths


def volume_of(members: list[Path]) -> str:
    return "vol:" + ",".join(f"file:{path}" for path in members)


def digest(paths: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def refused(capsys: pytest.CaptureFixture[str], code: int, arguments: list[str], *parts: str) -> str:
    """Run a command that must fail with this code and one line that has all parts; returns the line."""
    got = run(arguments)
    shown = capsys.readouterr()
    assert got == code, shown.err
    assert not shown.out
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("kvdev: ")
    for part in parts:
        assert part in lines[0]
    return lines[0]


def closed_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- names and addresses -----------------------------------------------------------------------


def test_address_where_nothing_listens_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    where = f"127.0.0.1:{closed_port()}"
    refused(capsys, 3, ["discover", where], where, "refused")
    refused(capsys, 3, ["identify", f"tcp://{where}/nqn.2026-01.io.kvdev:x"], where, "refused")
    refused(capsys, 3, ["volume", "show", f"vol+tcp://{where}/nqn.2026-01.io.kvdev:x"], where, "refused")
    refused(capsys, 3, ["replay", f"vol+tcp://{where}/nqn.2026-01.io.kvdev:x#kv"], where, "refused")


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("tcp://127.0.0.1:99999/nqn.2026-01.io.kvdev:x", ["port", "99999"]),
        ("tcp://127.0.0.1/kvdev", ["NQN", "'kvdev'"]),
        ("tcp://1.2.3.400:4420/nqn.2026-01.io.kvdev:x", ["host", "1.2.3.400"]),
        ("tcp://127.0.0.1:4420/nqn.2026-01.io.kvdev:x?nsid=0", ["nsid", "'0'"]),
        ("tcp://127.0.0.1:4420/nqn.2026-01.io.kvdev:x?hdgst=maybe", ["hdgst", "'maybe'"]),
        ("file:/tmp", ["subsystem", "file:/tmp"]),
        ("nonsense", ["expected", "'nonsense'"]),
    ],
)
def test_malformed_uri_is_2_and_names_the_part(
    uri: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, 2, ["identify", uri], "uri", *parts)


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("vol:", ["members", "at least one"]),
        ("vol:mem:a?size=1MiB,", ["member 1"]),
        ("vol:mem:a?size=1MiB,mem:a?size=1MiB", ["named twice"]),
        ("vol:tcp://127.0.0.1:4420/nqn.2026-01.io.kvdev:x", ["nsid"]),
        ("vol+file:/tmp/x", ["vol+tcp"]),
        ("vol:mem:a?size=lots", ["size", "'lots'"]),
    ],
)
def test_malformed_volume_is_2(uri: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, 2, ["volume", "create", "--name", "x", uri], "uri", *parts)


def test_unknown_subsystem_and_host_are_refused_by_the_target(
    rig: tuple[Rig, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = rig
    other = uri.rpartition(":")[0] + ":other"
    refused(capsys, 4, ["identify", other, *HOST], ":other")
    refused(capsys, 4, ["identify", uri, "--host-nqn", "nqn.2026-01.io.kvdev:stranger"], "host")


def test_namespace_that_is_not_there_names_it(
    rig: tuple[Rig, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = rig
    refused(capsys, 2, ["identify", f"{uri}?nsid=77", *HOST], "nsid", "77", "1, 2")
    assert run(["volume", "create", "--name", "x", f"vol:{uri}?nsid=77", *HOST]) in (2, 4)
    assert "77" in capsys.readouterr().err


# --- volumes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--strip-size", "100KiB"], ["strip", "102400"]),
        (["--strip-size", "8KiB"], ["strip", "8192"]),
        (["--strip-size", "8MiB"], ["strip", "8388608"]),
        (["--strip-size", "many"], ["strip_size", "'many'"]),
        (["--size", "1TiB"], ["size", "1099511627776", "2 members"]),
        (["--size", "-1"], ["size"]),
        (["--name", "x" * 100], ["name"]),
        (["--destroy", "file:/nonexistent"], ["destroy", "/nonexistent"]),
        (["--destroy", "what"], ["uri", "'what'"]),
    ],
)
def test_volume_create_with_a_bad_option_changes_no_member(
    options: list[str], parts: list[str], members: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(members)
    base = ["volume", "create", volume_of(members)]
    if "--name" not in options:
        base += ["--name", "pool"]
    refused(capsys, 2, [*base, *options], *parts)
    assert digest(members) == before


def test_volume_create_refuses_what_holds_other_data_unless_named(
    members: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with members[1].open("r+b") as file:
        file.seek(0x438)
        file.write(b"\x53\xef")
    before = digest(members)
    create = ["volume", "create", volume_of(members), "--name", "pool"]
    refused(capsys, 2, create, str(members[1]), "ext", "--destroy")
    refused(capsys, 2, [*create, "--destroy", f"file:{members[0]}"], str(members[1]), "ext")
    assert digest(members) == before
    assert run([*create, "--destroy", f"file:{members[1]}"]) == 0
    capsys.readouterr()
    refused(capsys, 2, create, str(members[0]), "kvdev volume", "--destroy")


def test_volume_create_over_one_in_use_on_a_target_is_refused(
    rig: tuple[Rig, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = rig
    volume, members = f"vol+{uri}", [f"{uri}?nsid={nsid}" for nsid in (1, 2)]
    destroy = [part for member in members for part in ("--destroy", member)]
    create = ["volume", "create", "vol:" + ",".join(members), "--name", "pool", *HOST, *destroy]
    assert run(create) == 0
    assert run(["namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "8", *HOST]) == 0
    with Session(host=HostIdentity.of(HOST_NQN)) as session:
        limit = Deadline.after(30)
        owner = session.open_volume(volume, deadline=limit).open_namespace("kv", deadline=limit)
        capsys.readouterr()
        refused(capsys, 2, create, f"{uri}?nsid=1", "in use by process")
        owner.close(deadline=limit)
    assert run(["namespace", "show", f"{volume}#kv", *HOST]) == 0
    assert run(create) == 0
    capsys.readouterr()


def test_one_member_is_allowed_and_a_missing_or_foreign_one_is_named(
    members: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["volume", "create", volume_of(members), "--name", "pool"]) == 0
    single = tmp_path / "single"
    single.touch()
    os.truncate(single, MEMBER_SIZE_BYTES)
    assert run(["volume", "create", f"file:{single}", "--name", "one"]) == 0
    capsys.readouterr()
    refused(capsys, 2, ["volume", "show", volume_of(members[:1])], "member 1 is missing")
    refused(capsys, 2, ["volume", "show", volume_of([*members, single])], str(single), "'one'")
    blank = tmp_path / "blank"
    blank.touch()
    os.truncate(blank, MEMBER_SIZE_BYTES)
    for command in (["volume", "show"], ["namespace", "list"]):
        refused(capsys, 2, [*command, f"vol:file:{blank}"], str(blank), "label", "`kvdev volume create`")
    refused(capsys, 2, ["page", "ls", f"vol:file:{blank}#kv"], str(blank), "`kvdev volume create`")
    with blank.open("r+b") as file:
        file.write(members[0].read_bytes()[:64])
    refused(capsys, 5, ["volume", "show", f"vol:file:{blank}"], str(blank), "damaged")
    os.truncate(members[1], MEMBER_SIZE_BYTES // 2)
    refused(capsys, 2, ["volume", "show", volume_of(members)], str(members[1]), "shrunk")


def test_memory_beyond_this_machine_is_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("900TiB", "7000000TiB"):
        refused(
            capsys, 4, ["volume", "create", "--name", "x", f"mem:a?size={size}"], "mem:a", "size", "memory"
        )
    refused(capsys, 2, ["volume", "create", "--name", "x", f"mem:a?size={'9' * 400}"], "size", "999")


def test_devices_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert run(["volume", "create", f"file:{missing}", "--name", "x"]) in (2, 3)
    shown = capsys.readouterr().err
    assert str(missing) in shown
    assert len(shown.splitlines()) == 1
    assert not missing.exists()


# --- KV namespaces -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--geometry", "gpt9"], 2, ["geometry", "'gpt9'", "llama3-8b"]),
        (["--layers", "2"], 2, ["--head-size"]),
        ([*TINY, "--geometry", "small"], 2, ["geometry", "'small'", "--layers"]),
        (["--layers", "0", "--kv-heads", "1", "--head-size", "4"], 2, ["layer_count", "0"]),
        ([*TINY, "--dtype", "float12"], 2, ["dtype", "'float12'"]),
        ([*TINY, "--attention", "flash"], 2, ["attention", "'flash'"]),
        ([*TINY, "--quota", "1GiB"], 4, ["quota", "free", "GiB"]),
        ([*TINY, "--quota", "1"], 2, ["quota", "page"]),
        ([*TINY, "--quota", "1MiB", "--quota-pages", "4"], 2, ["quota", "both"]),
        (["--geometry", "llama3-8b"], 4, ["room", "64 MiB"]),
    ],
)
def test_namespace_create_with_a_bad_option_makes_none(
    options: list[str], code: int, parts: list[str], members: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    volume = volume_of(members)
    assert run(["volume", "create", volume, "--name", "pool"]) == 0
    capsys.readouterr()
    before = digest(members)
    refused(capsys, code, ["namespace", "create", f"{volume}#kv", *options], *parts)
    assert digest(members) == before


def test_namespace_names_are_checked(members: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    volume = volume_of(members)
    assert run(["volume", "create", volume, "--name", "pool"]) == 0
    assert run(["namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "8"]) == 0
    capsys.readouterr()
    refused(capsys, 2, ["namespace", "create", f"{volume}#kv", *TINY], "'kv'", "exists")
    refused(capsys, 2, ["namespace", "create", volume, *TINY], "append #NAME")
    for command in (["namespace", "show"], ["page", "ls"], ["page", "verify"]):
        refused(capsys, 2, [*command, f"{volume}#other"], "'other'", "kv")
    refused(capsys, 2, ["namespace", "delete", f"{volume}#kv"], "--yes kv", "got no --yes")
    refused(capsys, 2, ["namespace", "delete", f"{volume}#kv", "--yes", "other"], "'other'")
    refused(capsys, 2, ["replay", f"{volume}#kv", "--geometry", "small"], "geometry", "model_id")


# --- replay ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--requests", "0"], ["requests", "0"]),
        (["--requests", "many"], ["requests", "many"]),
        (["--geometry", "gpt9"], ["geometry", "gpt9"]),
        (["--layout", ""], ["layout", "''"]),
        (["--layout", "zigzag"], ["layout", "zigzag", "nhd"]),
        (["--layout", "mla"], ["layout", "mha"]),
        (["--block-tokens", "5"], ["block_tokens", "5"]),
        (["--strip-size", "100KiB"], ["strip", "102400"]),
        (["--strip-size", "4KiB"], ["strip", "4096"]),
        (["--capacity", "1KiB", "--geometry", "small"], ["capacity", "64 KiB", "1 KiB"]),
        (["--arena", "1KiB"], ["arena", "1 MiB", "1 KiB"]),
        (["--members", "0"], ["members", "0"]),
        (["--io-queues", str(IO_QUEUE_COUNT_MAX + 1)], ["io-queues", "17"]),
        (["--trace", "/nonexistent/trace.jsonl"], ["trace", "/nonexistent/trace.jsonl"]),
        (["--trace", "/dev/zero"], ["trace", "/dev/zero", "regular file"]),
        (["--requests", "10000000000"], ["requests", "10000000000"]),
        (["--files", "/nonexistent"], ["files", "/nonexistent"]),
        (["--files", ""], ["files", "''"]),
        (["--files", "a\0b"], ["files", "null"]),
        (["--trace", ""], ["trace", "''"]),
        (["--trace", "a\0b"], ["trace", "null"]),
        (["--trace", "/proc/self/mem"], ["trace", "/proc/self/mem"]),
        (["--requests", "9" * 30], ["requests", "1000000"]),
        (["--requests", "2147483648"], ["requests", "1000000"]),
        (["--capacity", "9" * 400], ["capacity", "999"]),
        (["--strip-size", ""], ["strip_size", "''"]),
        (["--geometry", ""], ["geometry", "''"]),
        ([*TINY, "--dtype", ""], ["dtype", "''"]),
        ([*TINY, "--attention", ""], ["attention", "''"]),
        (
            ["--geometry", "qwen2.5-32b", "--requests", "3000"],
            ["plan", "memory", "namespaces", "try --requests"],
        ),
        (["--geometry", "qwen2.5-32b", "--capacity", "900TiB"], ["plan", "memory", "lower --capacity"]),
    ],
)
def test_replay_with_a_bad_option_is_2_before_anything_is_started(
    options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, 2, ["replay", *options], *parts)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["line"]),
        ("", ["at least one request"]),
        (json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1}), ["hash_ids"]),
        (
            json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}),
            ["hash_ids", "expected 2 blocks"],
        ),
    ],
)
def test_replay_of_a_bad_trace_names_file_line_and_field(
    line: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    good = generate_trace(1, seed=1)[0].to_json() + "\n" if line else ""
    path.write_text(good + line + "\n")
    where = f"{path}:2" if line else str(path)
    refused(capsys, 2, ["replay", *TINY, "--trace", str(path)], where, *parts)


def test_replay_options_of_the_embedded_target_do_not_go_with_a_pool(
    members: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--embedded"], ["--members", "2"], ["--files", "/tmp"], ["--capacity", "1MiB"]):
        refused(capsys, 2, ["replay", f"{volume_of(members)}#kv", *options], options[0])


# --- target ------------------------------------------------------------------------------------


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdev_tools.main", "target", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_target_serve_names_a_port_in_use_and_leaves_no_socket(tmp_path: Path) -> None:
    nqn = "nqn.2026-01.io.kvdev:t"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}
        calls = [
            {"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
            {"method": "nvmf_create_subsystem", "params": {"nqn": nqn}},
            {"method": "nvmf_subsystem_add_listener", "params": {"nqn": nqn, "listen_address": address}},
        ]
        config = tmp_path / "config.json"
        config.write_text(json.dumps(calls))
        done = serve("--rpc-socket", str(tmp_path / "rpc"), "--config", str(config))
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1
    assert "nvmf_subsystem_add_listener" in done.stderr
    assert not (tmp_path / "rpc").exists()


def test_target_serve_names_a_socket_in_use_and_a_bad_config(rig: tuple[Rig, str], tmp_path: Path) -> None:
    in_use = str(rig[0].folder / "rpc.sock")
    done = serve("--rpc-socket", in_use)
    assert done.returncode in (2, 3)
    assert in_use in done.stderr
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "config").write_text("{")
    done = serve("--rpc-socket", str(tmp_path / "rpc"), "--config", str(tmp_path / "config"))
    assert done.returncode == 2
    assert "config" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_numbers_that_are_none_and_limits_that_mean_nothing_are_2(
    members: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    device = f"file:{members[0]}"
    for command in (
        ["drill", "--seconds", "nan", "--error", "0.5", device],
        ["drill", "--timeout", "nan", "--error", "0.5", device],
        ["doctor", "--timeout", "nan"],
    ):
        assert run(command) == 2
        assert "not a number" in capsys.readouterr().err
    assert run(["page", "ls", "--limit", "0", f"{volume_of(members)}#kv"]) == 2
    assert "--limit" in capsys.readouterr().err


def test_one_file_under_two_names_is_one_device(
    members: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(members[0])
    for other in (link, tmp_path / ".." / tmp_path.name / members[0].name):
        uri = f"vol:file:{members[0]},file:{other}"
        refused(capsys, 2, ["volume", "create", uri, "--name", "pool"], "are the same device")


@pytest.mark.parametrize(
    ("rpc", "expected"),
    [
        ("spdk", "expected a socket path or HOST:PORT, got 'spdk'; write ./spdk"),
        ("host:0", "port: expected 1 to 65535, got 0 in 'host:0'; name"),
        ("host:70000", "port: expected 1 to 65535, got 70000"),
        ("/" + "x" * 200, "expected a UNIX socket path of 1 to 107 bytes, got 201"),
        ("/a\0b", "expected a socket path without a NUL"),
    ],
)
def test_an_rpc_address_that_is_none_is_named_with_its_place_and_a_remedy(
    rpc: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, 2, ["doctor", "--rpc", rpc], f"--rpc: {expected}", "; ")
    refused(capsys, 2, ["provision", "adopt", "--target", f"a={rpc}"], f"--target a: {expected}", "; ")
    refused(capsys, 2, ["provision", "adopt", "--host", f"b={rpc}"], f"--host b: {expected}", "; ")
    site = tmp_path / "site.yaml"
    site.write_text(f"version: 1\nname: demo\ntargets:\n  a:\n    rpc: {json.dumps(rpc)}\n")
    refused(capsys, 2, ["provision", "plan", str(site)], f"{site}:5:5: targets.a.rpc: address: {expected}")


def test_an_rpc_socket_that_is_not_there_is_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone.sock"
    adopt = ["provision", "adopt", "--target", f"a={gone}"]
    refused(capsys, 3, adopt, f"{gone}: connect: No such file or directory; start that SPDK")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(gone))
    refused(capsys, 3, adopt, f"{gone}: connect: Connection refused; start that SPDK")


def test_a_pipe_in_a_files_place_is_refused_and_nothing_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(["target", "serve", "--rpc-socket", str(tmp_path / "s"), "--state", str(pipe)]) == 2
    assert "expected a regular file or none" in capsys.readouterr().err
    assert not (tmp_path / "pipe.lock").exists()
    for command in (
        ["provision", "plan", str(pipe)],
        ["provision", "export", str(pipe), "array0"],
        ["replay", "--trace", str(pipe)],
        ["key", "check", f"file:{pipe}"],
        ["target", "serve", "--rpc-socket", str(tmp_path / "s"), "--config", str(pipe)],
    ):
        assert run(command) == 2
        said = capsys.readouterr().err
        assert f"{pipe}: expected a regular file, got a pipe; " in said and said.count("\n") == 1
    with pytest.raises(UsageError, match="expected a regular file, got a pipe; give the host NQN"):
        read_text(pipe)


def test_a_library_that_finds_no_memory_is_no_bug() -> None:
    error = ImportError("mtrand.so: failed to map segment from shared object")
    assert (shortage_of(error) or "").startswith("memory: ") and exit_code_of(error) == 4


@pytest.mark.parametrize(
    ("limit", "value", "code", "part"),
    [
        (resource.RLIMIT_NOFILE, 10, 4, "ulimit -n"),
        (resource.RLIMIT_FSIZE, 4096, 2, "ulimit -f"),
    ],
)
def test_a_limit_that_the_embedded_target_meets_is_named_with_its_remedy(
    limit: int, value: int, code: int, part: str, tmp_path: Path
) -> None:
    arguments = ["replay", *TINY, "--requests", "5", "--files", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "kvdev_tools.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )
    assert done.returncode == code, done.stderr
    assert part in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
