"""``kvdev page get``: pages of other head ranges on the command line, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev.session import Session
from kvdev.store import PageStore, Volume
from kvdev_tools.main import run
from tests.unit.tools.test_cli_json import documented, keys_of

HEADS, TOKENS, SIZE, PAGES = 4, 16, 64, 5
WHOLE = Geometry(
    model_id="split", layer_count=2, kv_head_count=HEADS, head_size=SIZE, tokens_per_page=TOKENS, dtype="bf16"
)
KEYS = np.arange(PAGES * 32, dtype=np.uint8).reshape(PAGES, 32)


def soon() -> Deadline:
    return Deadline.after(60)


def part(pages: Any, first: int, count: int) -> Any:
    """The canonical pages of some heads."""
    return np.ascontiguousarray(pages[:, :, :, :, first : first + count]).view(np.uint8).reshape(PAGES, -1)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> tuple[str, Any]:
    """A volume with the namespaces tp.0 and tp.1, of which the second lacks the last page; and the whole pages."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "m0"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    pages = rng.integers(0, 1 << 16, (PAGES, 2, 2, TOKENS, HEADS, SIZE), dtype=np.uint16)
    with Session() as session:
        volume = Volume.create([session.open_device(f"file:{path}")], name="v", deadline=soon())
        for index in range(2):
            geometry = replace(WHOLE, kv_head_first=2 * index, kv_head_count=2)
            volume.create_namespace(f"tp.{index}", geometry, quota_pages=8, deadline=soon())
            store = PageStore(volume.open_namespace(f"tp.{index}", deadline=soon()))
            count = PAGES - index
            assert store.put(KEYS[:count], part(pages, 2 * index, 2)[:count]).stored_count == count
            store.close()
        other = replace(WHOLE, model_id="another", kv_head_first=2, kv_head_count=2)
        volume.create_namespace("other", other, quota_pages=8, deadline=soon())
    return f"vol:file:{path}", pages


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["page", "get", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], text: str, *arguments: str) -> None:
    assert run(["page", "get", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_pages_of_two_ranks_are_joined_and_parts_taken(
    stored: tuple[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, pages = stored
    ranks = [f"{volume}#tp.1", f"{volume}#tp.0"]
    keys = [option for key in KEYS for option in ("--key", key.tobytes().hex())]
    found = call(capsys, *ranks, *keys, "--output", str(tmp_path / "out"))
    assert keys_of(found) == documented("page get")
    assert found["sources"] == ["v#tp.0", "v#tp.1"] and (found["kv_head_first"], found["kv_head_count"]) == (
        0,
        4,
    )
    assert [each["status"] for each in found["pages"]] == ["hit"] * 4 + ["miss"]
    whole = part(pages, 0, 4)
    assert (tmp_path / "out").read_bytes() == whole[:4].tobytes()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    assert [each["crc32c"] for each in found["pages"][:4]] == [
        f"{crc32c(page.tobytes()):08x}" for page in whole[:4]
    ]
    # Heads of both, and of one alone; without keys those of the first namespace.
    middle = call(capsys, *ranks, "--heads", "1:2", "--output", str(tmp_path / "middle"))
    assert [each["status"] for each in middle["pages"]] == ["hit"] * 4
    order = [bytes.fromhex(each["key"])[0] // 32 for each in middle["pages"]]
    assert (tmp_path / "middle").read_bytes() == part(pages, 1, 2)[order].tobytes()
    one = call(capsys, f"{volume}#tp.0", "--heads", "1:1")
    assert len(one["pages"]) == 5 and one["sources"] == ["v#tp.0"]
    assert run(["page", "get", *ranks, *keys]) == 0
    assert "KV heads 0 to 3 from v#tp.0, v#tp.1: 4 pages found, 1 missing" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_by_name(
    stored: tuple[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, _ = stored
    tp0 = f"{volume}#tp.0"
    refused(capsys, "v#other: geometry: model_id: expected 'split' as the reader has", tp0, f"{volume}#other")
    refused(capsys, "kv_head_first: expected KV heads 0 to 3, got none for 2 to 3", tp0, "--heads", "0:4")
    refused(capsys, "kv_head_total", tp0, "--heads", "3:2")
    refused(capsys, "heads: expected FIRST:COUNT, such as 0:2, got '2'", tp0, "--heads", "2")
    refused(capsys, "heads: expected FIRST:COUNT", tp0, "--heads", "1:0")
    refused(capsys, "key: expected 32 bytes as 64 hex digits, got 'abcd'", tp0, "--key", "abcd")
    refused(capsys, "key: expected 32 bytes as 64 hex digits, got 'ab'", tp0, "--key", "ab")
    refused(capsys, "namespace 'none': expected one of", f"{volume}#none")
    (tmp_path / "there").touch()
    refused(capsys, "there: File exists; name a new file", tp0, "--output", str(tmp_path / "there"))


def test_page_that_is_damaged_in_one_source_is_an_error_and_the_code_says_so(
    stored: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    volume, pages = stored
    path = Path(volume.removeprefix("vol:file:"))
    data = bytearray(path.read_bytes())
    data[data.find(part(pages, 2, 2)[1].tobytes())] ^= 1
    path.write_bytes(data)
    key = KEYS[1].tobytes().hex()
    assert run(["page", "get", f"{volume}#tp.0", f"{volume}#tp.1", "--key", key, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["pages"] == [{"key": key, "status": "error", "crc32c": ""}]
