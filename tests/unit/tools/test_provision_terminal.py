"""``kvdev provision`` on a terminal: colours by themselves, and destroy asks for the name."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.target.serve import EmbeddedTarget
from kvdev_tools.main import run
from kvdev_tools.provision.render import Painter
from spdk_rpc import Client
from tests.unit.tools.test_provision_cli import Site

DEADLINE_S = 120.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    # Memory only, and nobody to connect to: the dialogue is what counts here.
    made.write(made.text.partition("hosts:\n  gpu0")[0].replace("hosts: [gpu0]", "allow_any_host: true"))
    with EmbeddedTarget(made.rpc):
        yield made


def on_terminal(*arguments: str, answers: list[tuple[str, str]], **environment: str) -> tuple[int, str]:
    """Run a command with a terminal for all three streams; each answer is typed once its question is there."""
    try:
        ours, theirs = pty.openpty()
    except OSError as error:  # a bare chroot
        pytest.skip(f"no pseudo-terminal to be had: {error}; mount /dev/pts")
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdev_tools.main", "provision", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**variables, "TERM": "xterm", **environment},
        start_new_session=True,
    )
    os.close(theirs)
    shown, waiting = "", list(answers)
    try:
        while select.select([ours], [], [], DEADLINE_S)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the last process has closed it
                break
            if not chunk:
                break
            shown += chunk.decode(errors="replace")
            if waiting and waiting[0][0] in shown:
                os.write(ours, waiting.pop(0)[1].encode())
        return process.wait(DEADLINE_S), shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_plan_has_colours_on_a_terminal_unless_they_are_not_wanted(site: Site) -> None:
    code, shown = on_terminal("plan", str(site.path), answers=[])
    assert code == 0 and "\x1b[32m  + raid r0" in shown
    code, shown = on_terminal("plan", str(site.path), answers=[], NO_COLOR="1")
    assert code == 0 and "+ raid r0" in shown and "\x1b[" not in shown
    for stream, environment, is_coloured in (
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ):
        assert (Painter(stream, environment=environment).paint("31", "x") != "x") == is_coloured


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_destroy_shows_what_goes_and_asks_for_the_name(site: Site) -> None:
    assert run(["provision", "apply", str(site.path)]) == 0
    question = "Type demo to destroy it"
    code, shown = on_terminal("destroy", str(site.path), answers=[(question, "Demo\n")])
    assert code == 2 and "nothing was changed" in shown
    assert shown.index("raid r0") < shown.index(question), "what goes stands above the question"
    assert "DATA IS LOST" in shown
    with Client(site.rpc) as client:
        assert len(client.call("bdev_get_bdevs")) == 4
    code, shown = on_terminal("destroy", str(site.path), answers=[(question, "demo\n")])
    assert code == 0 and "steps done" in shown
    with Client(site.rpc) as client:
        assert client.call("bdev_get_bdevs") == []
