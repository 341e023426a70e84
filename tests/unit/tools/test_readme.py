"""The README's library example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvdev_tools.main import _COMMANDS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def test_library_example_runs() -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "Arena" in block)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_command_line_shown_exists() -> None:
    shown = re.findall(r"^kvdev ([a-z]+)", README, re.M)
    assert shown
    assert set(shown) <= set(_COMMANDS)


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "docs/cli.md", "docs/dependencies.md"):
        path = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{name}: {target}"
