"""Tenants on the command line: room made by others, rules about it, salts, an erasure at a rate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev.session import Session
from kvdev_tools.main import run

TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
PAGE = 8192


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = tmp_path / "m0"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(16 << 20)
    uri = f"vol:file:{path}"
    call(capsys, "volume", "create", uri, "--name", "v")
    return uri


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], text: str, *arguments: str) -> None:
    assert run(list(arguments)) == 2
    assert text in capsys.readouterr().err


def test_room_is_made_on_the_command_line(volume: str, capsys: pytest.CaptureFixture[str]) -> None:
    create = ["namespace", "create"]
    low = call(capsys, *create, f"{volume}#low", *TINY, "--quota", "8MiB", "--reserve", "2MiB")
    assert (low["priority"], low["reserve_pages"], low["given"]) == (0, 256, [])
    more = [f"{volume}#mine", *TINY, "--quota", "5MiB", "--priority", "4"]
    assert run([*create, *more]) != 0
    assert "have namespaces of lower priority make room" in capsys.readouterr().err
    mine = call(capsys, *create, *more, "--make-room")
    assert [(each["name"], each["previous_quota_pages"]) for each in mine["given"]] == [("low", 1024)]
    assert 256 <= mine["given"][0]["quota_pages"] < 1024 and mine["given"][0]["freed_bytes"] > 0
    grown = call(capsys, "namespace", "resize", f"{volume}#mine", "--quota", "6MiB", "--make-room")
    assert grown["given"][0]["name"] == "low"
    assert run(["namespace", "resize", f"{volume}#mine", "--quota", "13MiB", "--make-room"]) != 0
    said = capsys.readouterr().err
    assert "low (priority 0) could give" in said and "reserve of 256 pages" in said
    listed = call(capsys, "namespace", "list", volume)["namespaces"]
    assert {each["name"]: each["priority"] for each in listed} == {"low": 0, "mine": 4}
    refused(
        capsys, "got both", "namespace", "set", f"{volume}#low", "--reserve", "1MiB", "--reserve-pages", "1"
    )
    refused(capsys, "got none of them", "namespace", "set", f"{volume}#low")
    refused(capsys, "make-room: expected --quota", *create, f"{volume}#x", *TINY, "--make-room")
    refused(
        capsys, "reserve: expected at most the quota", *create, f"{volume}#x", *TINY, "--quota-pages", "5",
        "--reserve-pages", "6",
    )  # fmt: skip


def test_salts_and_erasures_on_the_command_line(
    volume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    salt = str(tmp_path / "salt")
    made = call(capsys, "key", "generate", "--kind", "salt", "--output", salt)
    assert (made["kind"], made["hash"], made["size_bytes"]) == ("salt", None, 32)
    assert call(capsys, "key", "check", salt) == made
    refused(
        capsys, "expected no --hash", "key", "generate", "--kind", "salt", "--size", "32", "--output", salt
    )
    info = call(
        capsys, "namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "100", "--salt-file", salt
    )
    assert len(info["salt_mark"]) == 8
    assert call(capsys, "namespace", "show", f"{volume}#kv")["salt_mark"] == info["salt_mark"]
    refused(
        capsys,
        "salt-file: /none: No such file",
        "namespace",
        "create",
        f"{volume}#x",
        *TINY,
        "--salt-file",
        "/none",
    )
    replay = ["replay", f"{volume}#kv", "--requests", "2"]
    refused(capsys, f"of mark {info['salt_mark']}, got none; name its file with --salt-file", *replay)
    assert call(capsys, *replay, "--salt-file", salt)["requests"] == 2
    refused(
        capsys,
        "rate: expected --erase",
        "namespace",
        "delete",
        f"{volume}#kv",
        "--yes",
        "kv",
        "--rate",
        "1MiB",
    )
    gone = call(capsys, "namespace", "delete", f"{volume}#kv", "--yes", "kv", "--erase", "--rate", "1GiB")
    assert gone["erased_bytes"] == info["extent_bytes"]


def test_checksum_on_the_command_line_is_made_shown_and_replayed(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    create = ("namespace", "create", f"{volume}#kv", *TINY, "--quota-pages", "100")
    refused(capsys, "'md5' is not one of 'crc32c', 'nh64'", *create, "--checksum", "md5")
    assert call(capsys, *create, "--checksum", "nh64")["checksum"] == "nh64"
    assert call(capsys, "namespace", "show", f"{volume}#kv")["checksum"] == "nh64"
    found = call(capsys, "replay", f"{volume}#kv", "--requests", "4")
    assert found["requests"] == 4 and found["stored_pages"] > 0
    assert call(capsys, "namespace", "show", f"{volume}#kv")["pages"] > 0


def test_check_and_list_name_what_is_being_erased_how_far_and_what_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = f"vol:file:{tmp_path / 'large'}"
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 100 << 20)
    call(capsys, "volume", "create", volume, "--name", "large")
    call(capsys, "namespace", "create", f"{volume}#kv", *TINY, "--quota", "64MiB")
    call(capsys, "namespace", "create", f"{volume}#left", *TINY, "--quota", "1MiB")
    held: list[dict[str, Any]] = []

    def stop(done: int, total: int) -> None:
        assert 0 < done < total
        held.extend(call(capsys, "volume", "check", volume)["erasing"])
        raise KeyboardInterrupt

    with Session() as session:
        opened = session.open_volume(volume)
        with pytest.raises(KeyboardInterrupt):
            opened.delete_namespace("kv", erase=True, progress=stop, deadline=soon())
    assert f"process {os.getpid()}" in held[0]["holder"]
    checked = call(capsys, "volume", "check", volume)
    (found,) = checked["erasing"]
    assert found == {
        "name": "kv",
        "erased_bytes": 32 << 20,
        "extent_bytes": held[0]["extent_bytes"],
        "holder": "",
    }
    assert checked["is_ok"] and [each["name"] for each in checked["namespaces"]] == ["left"]
    assert call(capsys, "namespace", "list", volume)["erasing"] == [found]
    for command in ("volume check", "namespace list"):
        assert run([*command.split(), volume]) == 0
        said = capsys.readouterr().out
        assert "kv: being erased, 32 MiB of " in said
        assert f"to go on: kvdev namespace delete --erase '{volume}#kv'" in said
    call(capsys, "namespace", "delete", "--erase", f"{volume}#kv", "--yes", "kv")
    assert call(capsys, "volume", "check", volume)["erasing"] == []
