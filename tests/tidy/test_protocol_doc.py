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
