"""The tests that docs/protocol.md names for its fault scenarios are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(\.\.\.|[\w./]+\.py)::(test_\w+?)(_\.\.\.)?(\[\w+\*?\])?`")


def test_scenarios_when_they_name_a_test_then_it_exists() -> None:
    section = (ROOT / "docs/protocol.md").read_text().split("## Fault scenarios")[1].split("\n## ")[0]
    path, text, count = Path(), "", 0
    for file, name, is_cut, _ in NAMED.findall(section):
        if file != "...":
            path = (ROOT / "tests/fault" / file).resolve()
            text = path.read_text()
        end = r"\w*" if is_cut else ""
        assert re.search(rf"^def {name}{end}\(", text, re.M), f"docs/protocol.md: no {name} in {path}"
        count += 1
    assert count >= 50
