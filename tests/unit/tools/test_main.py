"""The command line's frame: help without imports, one line per error, the documented exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from kvdev import __version__, errors
from kvdev_tools import main as main_module
from kvdev_tools.exits import ExitCode, exit_code_of
from kvdev_tools.main import run
from spdk_rpc import RpcMethodError, RpcTimeoutError, RpcTransportError, RpcUsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (RpcUsageError("x"), 2),
        (errors.ConnectError("x"), 3),
        (errors.ConnectionLostError("x"), 3),
        (errors.DeadlineError("x", operation="y"), 3),
        (RpcTransportError("x"), 3),
        (RpcTimeoutError("x", method="m", timeout_s=1), 3),
        (errors.CommandError("x", opcode=1, sct=0, sc=1), 4),
        (errors.CapacityError("x"), 4),
        (errors.SequenceError("x", state="y"), 4),
        (errors.UnsupportedError("x", feature="y"), 4),
        (RpcMethodError("m", -17, "File exists"), 4),
        (errors.CorruptionError("x"), 5),
        (errors.DigestError("x", expected=1, actual=2), 5),
        (ValueError("x"), 70),
        (OSError("x"), 70),
    ],
)
def test_exit_code_of_every_kind_of_error(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_help_and_version_need_no_heavy_import() -> None:
    script = (
        "import sys\nfrom kvdev_tools.main import run\n"
        "assert run(['--help']) == 0 and run(['--version']) == 0\n"
        "heavy = {'numpy', 'numba', 'cffi', 'kvdev._core'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"]])
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("kvdev: ")


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run([])
    captured = capsys.readouterr()
    assert "replay" in captured.out + captured.err


def with_command(raised: Callable[[], BaseException]) -> click.Command:
    @click.command()
    def failing() -> None:
        raise raised()

    return failing


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (
            lambda: errors.UsageError("strip_size: a\x1b[2Jb\nc"),
            ExitCode.USAGE,
            "kvdev: strip_size: a [2Jb c\n",
        ),
        (KeyboardInterrupt, ExitCode.INTERRUPTED, "\nkvdev: interrupted\n"),
        (main_module._TerminatedError, ExitCode.TERMINATED, "kvdev: terminated\n"),
    ],
)
def test_errors_become_one_printable_line(
    raised: Callable[[], BaseException], code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = click.Group(commands={"failing": with_command(raised)})
    assert main_module.run(["failing"], group=group) == code
    assert capsys.readouterr().err == shown


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    group = click.Group(commands={"failing": with_command(lambda: ZeroDivisionError("division"))})
    assert main_module.run(["failing"], group=group) == ExitCode.BUG
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1] == "kvdev: this is a bug: ZeroDivisionError: division"
