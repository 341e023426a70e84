"""Every command's JSON has the keys that docs/cli.md lists, on a volume in files and on the embedded target."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev.pool import PoolServer
from kvdev.pool.service import PoolService
from kvdev.session import Session
from kvdev_tools.content import PageContent, request_keys
from kvdev_tools.main import run
from kvdev_tools.rig import Rig, running_rig
from kvdev_tools.trace import generate_trace

ROOT = Path(__file__).resolve().parents[3]
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e6f"
HOST = ["--host-nqn", HOST_NQN]
TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]


def documented(command: str) -> set[str]:
    """The keys in the table of a command's section."""
    text = (ROOT / "docs" / "cli.md").read_text()
    section = re.search(rf"^## kvdev {re.escape(command)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section, f"docs/cli.md has no section for {command}"
    return set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", section[1], re.M))


def keys_of(value: Any, prefix: str = "") -> set[str]:
    """Every leaf's path, lists as []; an empty list has none."""
    if isinstance(value, dict):
        return {
            key
            for name, each in value.items()
            for key in keys_of(each, f"{prefix}.{name}" if prefix else name)
        }
    if isinstance(value, list):
        return {key for each in value for key in keys_of(each, f"{prefix}[]")}
    return {prefix}


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def volume(tmp_path: Path) -> str:
    members = []
    for index in range(2):
        path = tmp_path / f"m{index}"
        path.touch()
        with path.open("r+b") as file:
            file.truncate(8 << 20)
        members.append(f"file:{path}")
    return "vol:" + ",".join(members)


def test_volume_namespace_page_and_replay_have_the_documented_keys(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = call(capsys, "volume", "create", volume, "--name", "pool")
    created = call(capsys, "namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "200")
    assert keys_of(created) == documented("namespace create")
    assert created["page_size_bytes"] == 512 * 2 * 4 * 2
    shown = call(capsys, "volume", "show", volume)
    assert keys_of(made) < keys_of(shown) == documented("volume create")
    with Path(volume.rpartition(":")[2]).open("r+b") as file:  # one member alone: nothing to take in
        file.truncate(9 << 20)
    grown = call(capsys, "volume", "grow", volume)
    assert keys_of(grown) == keys_of(shown) | documented("volume grow")
    assert grown["grown_bytes"] == 0
    assert shown["namespaces"][0]["quota_pages"] == 200
    listed = call(capsys, "namespace", "list", volume)
    assert {key.removeprefix("namespaces[].") for key in keys_of(listed)} == documented("namespace create")

    replayed = call(capsys, "replay", f"{volume}#kv", *TINY, "--requests", "8", "--seed", "3")
    assert keys_of(replayed) == documented("replay")
    assert replayed["mismatches"] == 0 < replayed["pages_restored"]
    assert sum(member["stored_bytes"] for member in replayed["members"]) == replayed["stored_pages"] * 8192

    after = call(capsys, "namespace", "show", f"{volume}#kv")
    assert keys_of(after) == documented("namespace create") | documented("namespace show")
    assert after["pages"] == replayed["stored_pages"] == replayed["pages_written"]
    pages = call(capsys, "page", "ls", f"{volume}#kv")
    assert keys_of(pages) == documented("page ls")
    assert pages["pages_total"] == len(pages["pages"]) == after["pages"]
    assert len(call(capsys, "page", "ls", "--limit", "2", f"{volume}#kv")["pages"]) == 2
    verified = call(capsys, "page", "verify", f"{volume}#kv")
    assert keys_of(verified) | {"damaged_keys[]"} == documented("page verify")
    assert verified["pages_checked"] == after["pages"]
    checked = call(capsys, "volume", "check", volume)
    assert {
        key
        for key in documented("volume check")
        if not key.startswith(("findings", "erasing", "skipped_namespaces", "intact_labels"))
    } == keys_of(checked)
    assert checked["is_ok"] and checked["go_on"] is None
    limited = call(capsys, "volume", "check", volume, "--repair", "--rate", "1GiB", "--start", "kv:3")
    assert limited["is_ok"] and limited["namespaces"][0]["skipped_pages"] == 3
    assert limited["namespaces"][0]["good_pages"] == checked["namespaces"][0]["good_pages"] - 3
    taken = call(capsys, "namespace", "takeover", f"{volume}#kv", "--yes", "kv")
    assert keys_of(taken) == documented("namespace takeover")
    assert (taken["fence"], taken["owner_pid"]) == ("lock", None)
    cloned = call(capsys, "namespace", "clone", f"{volume}#kv", "like")
    assert keys_of(cloned) == documented("namespace create")
    ruled = call(capsys, "namespace", "set", f"{volume}#like", "--priority", "3", "--reserve-pages", "2")
    assert keys_of(ruled) == documented("namespace create")
    assert (ruled["priority"], ruled["reserve_pages"]) == (3, 2)
    resized = call(capsys, "namespace", "resize", f"{volume}#like", "--quota-pages", "3")
    assert keys_of(resized) == documented("namespace resize")
    assert resized["previous_quota_pages"] == after["quota_pages"] and resized["quota_pages"] == 3
    call(capsys, "namespace", "delete", f"{volume}#like", "--yes", "like")
    renamed = call(capsys, "namespace", "rename", f"{volume}#kv", "new")
    assert keys_of(renamed) == documented("namespace rename")
    assert call(capsys, "namespace", "show", f"{volume}#new")["pages"] == after["pages"]
    deleted = call(capsys, "namespace", "delete", f"{volume}#new", "--yes", "new", "--erase")
    assert keys_of(deleted) == documented("namespace delete")
    assert deleted["erased_bytes"] == after["extent_bytes"]
    assert call(capsys, "namespace", "list", volume) == {"namespaces": [], "erasing": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ["volume", "show"],
        ["volume", "check"],
        ["namespace", "list"],
        ["namespace", "show"],
        ["page", "ls"],
        ["page", "verify"],
    ],
)
def test_text_says_the_same_in_lines(
    arguments: list[str], volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "volume", "create", volume, "--name", "pool")
    call(capsys, "namespace", "create", f"{volume}#kv", *TINY)
    uri = volume if arguments[0] == "volume" or arguments[1] == "list" else f"{volume}#kv"
    assert run([*arguments, uri]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert not shown.err


def test_owner_when_it_has_the_namespace_open_is_shown_and_in_the_way(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"{volume}#kv"
    call(capsys, "volume", "create", volume, "--name", "pool")
    call(capsys, "namespace", "create", uri, *TINY)
    with Session() as session:
        opened = session.open_kv_namespace(uri)
        shown = call(capsys, "namespace", "show", uri)
        assert (shown["owner_pid"], shown["owner_lease_ms"]) == (os.getpid(), 30_000)
        assert run(["namespace", "list", volume]) == 0
        assert f"process {os.getpid()}" in capsys.readouterr().out
        for arguments in (["takeover", uri, "--yes", "kv"], ["delete", uri, "--yes", "kv", "--takeover"]):
            assert run(["namespace", *arguments]) == 2
            assert f"owned by process {os.getpid()} of this host" in capsys.readouterr().err
        opened.close()
    assert call(capsys, "namespace", "show", uri)["owner_pid"] is None
    assert run(["namespace", "takeover", uri]) == 2
    assert "expected --yes kv, as its owner is stopped" in capsys.readouterr().err


def test_a_damaged_page_is_5_and_named(
    volume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(capsys, "volume", "create", volume, "--name", "pool")
    call(capsys, "namespace", "create", f"{volume}#kv", *TINY)
    call(capsys, "replay", f"{volume}#kv", *TINY, "--requests", "3")
    total = call(capsys, "page", "ls", f"{volume}#kv")["pages_total"]
    # Turn one bit of the first page, wherever it lies on the members.
    key = request_keys(generate_trace(1, seed=1)[0].hash_ids[:1])[0]
    needle = PageContent(8192).page(key)[:512].tobytes()
    for index in range(2):
        path = tmp_path / f"m{index}"
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at + 100] ^= 1
            path.write_bytes(data)
            break
    else:
        pytest.fail("the page is on no member")
    assert run(["page", "verify", f"{volume}#kv", "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert (found["pages_checked"], found["pages_damaged"]) == (total, 1)
    assert found["damaged_keys"] == [key.tobytes().hex()]
    assert run(["volume", "check", volume, "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    # What is being erased: test_tenant_cli.py.
    elsewhere = ("erasing", "skipped_namespaces", "intact_labels")
    assert keys_of(found) == {key for key in documented("volume check") if not key.startswith(elsewhere)}
    assert [each["lost_pages_max"] for each in found["findings"]] == [1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kvdev.store.throttle.Throttle.pace", interrupt)
        assert run(["volume", "check", volume, "--json"]) == 130
    printed = capsys.readouterr()
    partial = json.loads(printed.out)
    assert partial["findings"] == found["findings"] and partial["go_on"].startswith("kv:")
    assert f"go on with --start {partial['go_on']}" in printed.err
    assert run(["volume", "check", volume, "--structures-only"]) == 0
    capsys.readouterr()
    assert run(["replay", f"{volume}#kv", *TINY, "--requests", "3", "--json"]) == 5
    shown = capsys.readouterr()
    assert json.loads(shown.out)["page_errors"] == 1
    assert "1 damaged" in shown.err
    # The replay withdrew it and stored it anew.
    assert run(["page", "verify", f"{volume}#kv"]) == 0


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Rig, str]]:
    with running_rig() as rig:
        uri = rig.provision(host_nqn=HOST_NQN, namespace_count=2, namespace_size_bytes=4 << 20)
        yield rig, str(uri)


def test_discover_and_identify_have_the_documented_keys(
    rig: tuple[Rig, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = rig
    address = uri.split("/")[2]
    found = call(capsys, "discover", address, *HOST)
    assert keys_of(found) == documented("discover")
    assert uri in [entry["uri"] for entry in found["entries"]]
    controller = call(capsys, "identify", uri, *HOST)
    assert keys_of(controller) == documented("identify")
    assert [each["nsid"] for each in controller["namespaces"]] == [1, 2]
    assert [each["nsid"] for each in call(capsys, "identify", f"{uri}?nsid=2", *HOST)["namespaces"]] == [2]
    (entry,) = (entry for entry in found["entries"] if entry["uri"] == uri)
    assert [entry[name] for name in ("secure_channel", "security_type", "authentication")] == [
        "not required",
        "none",
        "not required",
    ]


def test_discover_and_identify_print_tables_for_people(
    rig: tuple[Rig, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = rig
    assert run(["discover", uri.split("/")[2], *HOST]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", header)[-3:] == ["secure channel", "security type", "authentication"]
    (row,) = (row for row in rows if row.startswith(uri))
    assert re.split(r"  +", row)[1:] == ["nvm", "tcp", "ipv4", "not required", "none", "not required"]
    assert run(["identify", uri, *HOST]) == 0
    shown = capsys.readouterr().out.splitlines()
    controller = dict(re.split(r"  +", line, maxsplit=1) for line in shown[: shown.index("")])
    assert controller["subsystem"] == uri.partition("//")[2].partition("/")[2]
    assert controller["keep alive"] == "within 10 s" and controller["I/O queue"].endswith(" entries")
    assert not [name for name in controller if "_" in name], "names for people, not keys"
    header, first, second = shown[shown.index("") + 1 :]
    columns = ["nsid", "size", "block", "metadata", "atomic write", "access", "identifier", "state"]
    assert re.split(r"  +", header.strip()) == columns
    assert re.split(r"  +", first.strip())[:4] == ["1", "4 MiB", "4 KiB", "-"]
    assert re.split(r"  +", second.strip())[-1] == "usable"


def test_namespace_show_and_list_print_tables_for_people(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "volume", "create", volume, "--name", "pool")
    arguments = [f"{volume}#kv", *TINY, "--quota-pages", "200", "--ttl", "60"]
    call(capsys, "namespace", "create", *arguments)
    assert run(["namespace", "list", volume]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", header)[3:] == [
        *("quota pages", "quota", "reserve", "priority", "extent", "eviction", "state")
    ]
    cells = re.split(r"  +", row.strip())
    assert cells[3:5] == ["200", "1.562 MiB"] and cells[-2:] == ["lru, after 60 s", "closed"]
    assert run(["namespace", "show", f"{volume}#kv"]) == 0
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert not [name for name in shown if "_" in name], "names for people, not keys"
    assert shown["stored"] == "0 pages, 0 B" and shown["quota"] == "200 pages, 1.562 MiB"
    assert shown["page"] == "8 KiB, 512 tokens" and shown["layers"] == "1 (0 to 0)"
    assert shown["KV heads"] == "1 (0 to 0) of 1" and shown["eviction"] == "lru, after 60 s"


def test_pool_status_has_the_documented_keys(
    volume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "volume", "create", volume, "--name", "pool")
    call(capsys, "namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "20")
    path = str(tmp_path / "pool.sock")
    stop = threading.Event()
    with Session() as session:
        service = PoolService(session.open_volume(volume), "kv", deadline=Deadline.after(60))
        server = PoolServer(path, [service], volume_uris=[volume], host={})
        thread = threading.Thread(target=server.serve, args=(stop.is_set,))
        thread.start()
        try:
            found = call(capsys, "pool", "status", "--socket", path)
            assert run(["pool", "status", "--socket", path]) == 0
            assert "pid" in capsys.readouterr().out
        finally:
            stop.set()
            thread.join(60)
            server.close()
            service.close(Deadline.after(60))
    assert keys_of(found) == documented("pool status")
    assert run(["pool", "status", "--socket", path]) == 3
    assert "start it with `kvdev pool serve`" in capsys.readouterr().err
    assert run(["pool", "serve", "vol:mem:m?size=4MiB#kv", "--socket", path]) == 2
    assert "expected devices that other processes reach as well" in capsys.readouterr().err
