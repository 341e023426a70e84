"""``kvdev reservation`` on an embedded target: two hosts, what they see, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.block.reservation import ReservationType
from kvdev.testing.target import running_target
from kvdev_tools.cmd_reservation import TYPE_NAMES
from kvdev_tools.main import run

ROOT = Path(__file__).resolve().parents[3]


def as_host(number: int) -> list[str]:
    identifier = f"0e7d5c1a-6a0f-4a53-8f0e-{number:012d}"
    return ["--host-nqn", f"nqn.2014-08.org.nvmexpress:uuid:{identifier}", "--host-id", identifier]


@pytest.fixture
def uri() -> Iterator[str]:
    with running_target(namespace_size_bytes=1 << 20) as target:
        yield f"{target.uri}?nsid=1"


def call(capsys: pytest.CaptureFixture[str], host: int, *arguments: str) -> Any:
    assert run(["reservation", *arguments, *as_host(host), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], host: int, code: int, *arguments: str) -> str:
    assert run(["reservation", *arguments, *as_host(host)]) == code
    err = capsys.readouterr().err
    assert err.startswith("kvdev: ") and err.count("\n") == 1
    return err


def documented() -> set[str]:
    text = (ROOT / "docs" / "cli.md").read_text()
    section = re.search(r"^## kvdev reservation show$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section
    return set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", section[1], re.M))


def test_type_names_are_those_of_the_library() -> None:
    assert tuple(rtype.label for rtype in ReservationType) == TYPE_NAMES


def test_two_hosts_register_acquire_preempt_release_and_clear(
    uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = call(capsys, 1, "show", uri)
    assert empty["reservation"] is None and empty["registrants"] == []
    shown = call(capsys, 1, "register", uri, "--key", "0x1a")
    leaves = {key for key in shown if key != "registrants"}
    leaves |= {f"registrants[].{key}" for key in shown["registrants"][0]}
    assert leaves == documented()
    held = call(capsys, 1, "acquire", uri, "--key", "26")
    assert held["reservation"] == "write-exclusive-all-registrants"
    assert held["registrants"][0] | {"cntlid": None} == {
        "host_id": held["host_id"],
        "key": "0x1a",
        "is_holder": True,
        "is_this_host": True,
        "cntlid": None,
    }
    assert "reservation conflict" in refusal(capsys, 2, 4, "acquire", uri, "--key", "0x2b")
    assert "is not this host's" in refusal(capsys, 2, 4, "release", uri, "--key", "0x1a")
    call(capsys, 2, "register", uri, "--key", "0x2b")
    taken = call(capsys, 2, "acquire", uri, "--key", "0x2b", "--preempt", "0x0", "--type", "exclusive-access")
    assert [each["key"] for each in taken["registrants"]] == ["0x2b"]
    assert taken["reservation"] == "exclusive-access"
    call(capsys, 2, "register", uri, "--key", "0x2c", "--replace", "0x2b")
    released = call(capsys, 2, "release", uri, "--key", "0x2c", "--type", "exclusive-access")
    assert released["reservation"] is None and released["registrants"]
    assert call(capsys, 2, "unregister", uri, "--key", "0x2c")["registrants"] == []


def test_clear_wants_a_yes_while_another_host_is_registered(
    uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, 1, "clear", uri)["registrants"] == []
    call(capsys, 1, "register", uri, "--key", "7")
    call(capsys, 1, "acquire", uri, "--key", "7")
    assert "repeat with --yes" in refusal(capsys, 2, 2, "clear", uri)
    assert call(capsys, 2, "show", uri)["reservation"]
    cleared = call(capsys, 2, "clear", uri, "--yes")
    assert cleared["reservation"] is None and cleared["registrants"] == []


def test_text_names_host_key_and_holder(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, 1, "register", uri, "--key", "0xbeef")
    call(capsys, 1, "acquire", uri, "--key", "0xbeef")
    assert run(["reservation", "show", uri, *as_host(1)]) == 0
    out = capsys.readouterr().out
    for word in ("write-exclusive-all-registrants", "0xbeef", "holder", "this host"):
        assert word in out


@pytest.mark.parametrize("key", ["", "x", "-1", "0x", "0x12345678901234567", str(1 << 64), "1.5"])
def test_key_when_not_64_bits_then_refused_before_anything_is_opened(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected 64 bits" in refusal(capsys, 1, 2, "register", "tcp://127.0.0.1:1/nqn.x", "--key", key)


def test_device_without_reservations_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    assert "only NVMe namespaces" in refusal(capsys, 1, 4, "show", f"file:{tmp_path}/f")
    persistent = ("register", "--key", "1", "--replace", "2", "--persistent", f"file:{tmp_path}/f")
    assert "--replace" in refusal(capsys, 1, 2, *persistent)
