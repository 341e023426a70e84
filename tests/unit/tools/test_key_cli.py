"""``kvdev key``: secrets made and checked, and places of secrets given to other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdev.target.model import FileKey, HostKeys
from kvdev.testing.target import running_target
from kvdev_tools.main import run

HOST_NQN = "nqn.2024-01.io.example:host"
SECRET = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"


def documented() -> set[str]:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    section = text.split("## kvdev key\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)`", section, re.M))


def test_generate_then_check_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k"
    for hash_name, size in (("none", 32), ("sha256", 32), ("sha384", 48), ("sha512", 64)):
        path.unlink(missing_ok=True)
        assert run(["key", "generate", "--hash", hash_name, "--output", str(path), "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made.keys() == documented()
        assert (made["hash"], made["size_bytes"], made["kind"]) == (hash_name, size, "dhchap")
        assert path.stat().st_mode & 0o777 == 0o600
        for place in (str(path), f"file:{path}"):
            assert run(["key", "check", place, "--json"]) == 0
            shown = capsys.readouterr().out
            assert json.loads(shown) == made
            assert path.read_text().strip()[10:30] not in shown
    assert run(["key", "check", str(path)]) == 0
    assert "sha512" in capsys.readouterr().out


def test_generate_when_the_file_is_there_then_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k"
    path.write_text("precious")
    assert run(["key", "generate", "--output", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "arguments",
    [
        ["key", "check", SECRET],
        ["identify", f"tcp://127.0.0.1/nqn.2024-01.io.example:s?dhchap-key={SECRET}"],
        ["identify", "tcp://127.0.0.1/nqn.2024-01.io.example:s", "--dhchap-key", SECRET],
        ["discover", "127.0.0.1", "--dhchap-ctrl-key", SECRET],
    ],
)
def test_a_secret_as_argument_is_refused_and_not_repeated(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert "got the secret itself" in shown.err
    assert SECRET[10:40] not in shown.err + shown.out


def test_check_when_damaged_or_open_to_others_then_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k"
    path.write_text(SECRET.replace("ia6z", "ib6z"))
    path.chmod(0o600)
    assert run(["key", "check", str(path)]) == 2
    assert "checksum" in capsys.readouterr().err
    path.chmod(0o640)
    assert run(["key", "check", str(path)]) == 2
    assert f"chmod 600 {path}" in capsys.readouterr().err


def test_keys_given_to_a_command_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEV_KERNELS", "numpy")
    host, controller = tmp_path / "h", tmp_path / "c"
    for path in (host, controller):
        assert run(["key", "generate", "--output", str(path)]) == 0
    with running_target(hosts=[]) as target:
        target.allow_host(HOST_NQN, HostKeys(FileKey("h", str(host)), FileKey("c", str(controller))))
        base = ["identify", target.uri, "--host-nqn", HOST_NQN]
        assert run([*base, "--dhchap-key", f"file:{host}", "--dhchap-ctrl-key", f"file:{controller}"]) == 0
        capsys.readouterr()
        assert run(base) == 4
        assert "--dhchap-key" in capsys.readouterr().err
        assert run([*base, "--dhchap-key", f"file:{controller}"]) == 4
        assert "refuses it" in capsys.readouterr().err
        pool = ["--host-nqn", HOST_NQN, "--dhchap-key", f"file:{host}"]
        volume = f"vol:{target.uri}?nsid=1"
        assert run(["volume", "create", volume, "--name", "p", *pool]) == 0
        assert (
            run(["namespace", "create", f"{volume}#kv", "--geometry", "small", "--quota-pages", "20", *pool])
            == 0
        )
        replay = ["replay", f"{volume}#kv", "--geometry", "small", "--requests", "2", *pool]
        assert run(replay) == 0


def test_tls_keys_are_made_and_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    for hash_name, size in (("none", 32), ("sha256", 32), ("sha384", 48)):
        path.unlink(missing_ok=True)
        command = [
            "key",
            "generate",
            "--kind",
            "tls-psk",
            "--hash",
            hash_name,
            "--output",
            str(path),
            "--json",
        ]
        assert run(command) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["kind"], made["hash"], made["size_bytes"]) == ("tls-psk", hash_name, size)
        assert run(["key", "check", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == made
    assert (
        run(["key", "generate", "--kind", "tls-psk", "--hash", "sha512", "--output", str(tmp_path / "u")])
        == 2
    )
    assert "--kind tls-psk" in capsys.readouterr().err
