"""docs/protocol.md names tests that exist, in the files that it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "protocol.md").read_text()


def test_protocol_page_when_it_names_a_test_then_that_test_is_there() -> None:
    defined = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"\btest_[a-z0-9_]+(?!\w|\.py)", DOC))
    missing = [
        name
        for name in sorted(names)
        if f"def {name}" not in defined and not list((ROOT / "tests").rglob(f"{name}.py"))
    ]
    assert len(names) > 100
    assert not missing


def test_protocol_page_when_it_names_a_file_then_it_is_there() -> None:
    tests = re.findall(r"`(tests/[a-z_/0-9]+\.(?:py|hex))`", DOC)
    sources = re.findall(r"`((?:csrc|wire|initiator|target)/[a-z_0-9]+\.(?:c|py))`", DOC)
    assert tests and sources
    assert not [name for name in tests if not (ROOT / name).exists()]
    assert not [name for name in sources if not (ROOT / "kvdev" / name).exists()]


def test_protocol_page_when_it_names_a_test_by_its_files_letters_then_it_is_in_that_file() -> None:
    files = dict(re.findall(r"\| ([A-Z]{2}) \| `(tests/[a-z_/0-9]+\.py)`", DOC))
    named = [
        (letters, name)
        for letters, names in re.findall(r"\b([A-Z]{2}) ((?:`test_[a-z0-9_]+`(?:, )?)+)", DOC)
        for name in re.findall(r"test_[a-z0-9_]+", names)
    ]
    assert len(files) > 10 and len(named) > 50
    assert not [
        (letters, name)
        for letters, name in named
        if f"def {name}(" not in (ROOT / files[letters]).read_text()
    ]


def test_protocol_page_when_others_differ_from_the_specification_then_each_row_names_a_test() -> None:
    (part,) = re.findall(r"## Where Linux and SPDK differ.*?(?=\n## )", DOC, re.S)
    rows = re.findall(r"^\| D(\d+) \|(.*)\|$", part, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 15))
    assert not [number for number, row in rows if not re.search(r"`test_[a-z0-9_]+`", row.split("|")[-1])]
