"""The README's library example and its command lines run as they stand, but for the port and the folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from kvdev.geometry import PRESETS
from kvdev.units import format_size
from kvdev_tools.main import _COMMANDS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def test_library_example_runs() -> None:
    example = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "Arena" in block)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def shell_blocks(port: int, folder: Path) -> tuple[str, str]:
    """The block that starts a target and the one that uses it, for this port and folder."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    serve = next(block for block in blocks if "kvdev target serve" in block)
    use = next(block for block in blocks if "kvdev volume create" in block)
    for name in ("4420", "/tmp/kvdev.sock", ". .venv/bin/activate\n"):
        assert name in serve
    renamed = {"4420": str(port), "/tmp/kvdev.sock": str(folder / "rpc.sock"), ". .venv/bin/activate\n": ""}
    for old, new in renamed.items():
        serve, use = serve.replace(old, new), use.replace(old, new)
    return serve, use


def test_command_lines_run_in_the_order_shown(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve, use = shell_blocks(port, tmp_path)
    command = tmp_path / "bin" / "kvdev"
    command.parent.mkdir()
    run = "import sys; sys.path[:1] = filter(None, sys.path[:1]); from kvdev_tools.main import main; main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "KVDEV_KERNELS": "numpy",
    }
    with subprocess.Popen(
        ["sh", "-e", "-c", serve],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as target:
        try:
            assert target.stdout is not None
            assert f"listening on 127.0.0.1:{port}" in target.stdout.readline()
            done = subprocess.run(
                ["sh", "-e", "-c", use],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert not done.stderr, done.stderr
            assert done.returncode == 0
            assert re.search(r"^mismatches +0$", done.stdout, re.M)
            assert re.search(r"\d\d+ pages checked, 0 damaged", done.stdout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(target.pid, signal.SIGTERM)


def test_every_command_line_shown_exists() -> None:
    shown = re.findall(r"^kvdev ([a-z]+)", README, re.M)
    assert shown
    assert set(shown) <= set(_COMMANDS)


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "docs/cli.md", "docs/dependencies.md"):
        path = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{name}: {target}"


def test_geometries_listed_are_those_there_are() -> None:
    section = (ROOT / "docs" / "cli.md").read_text().split("## Geometries")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\S+)` \| (\S+) .*\| ([^|]+) \|$", section, re.M)
    assert listed == [
        (name, each.model_id, format_size(each.page_size_bytes)) for name, each in PRESETS.items()
    ]
