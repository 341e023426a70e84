"""The command line's frame: help without imports, one line per error, the documented exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
        (KeyboardInterrupt, ExitCode.INTERRUPTED, "kvdev: interrupted\n"),
        (main_module._TerminatedError, ExitCode.TERMINATED, "kvdev: terminated\n"),
        (
            lambda: errors.UsageError(f"name: got '{'x' * 5000}'; take another"),
            ExitCode.USAGE,
            f"kvdev: name: got '{'x' * 119}...{'x' * 38}'; take another\n",
        ),
        (MemoryError, ExitCode.REFUSED, "kvdev: memory: none left; free some memory, or ask for less\n"),
        (
            lambda: OSError(errno.EMFILE, "Too many open files", "/x"),
            ExitCode.REFUSED,
            "kvdev: /x: Too many open files; raise `ulimit -n`\n",
        ),
        (
            lambda: RuntimeError("can't start new thread"),
            ExitCode.REFUSED,
            "kvdev: threads: none can be started; free some memory, or raise `ulimit -u`\n",
        ),
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


# --- the process: what the shell gave it, and signals -------------------------------------------


def kvdev(script: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which $K is the command."""
    environment = {**os.environ, "K": f"{sys.executable} -c 'from kvdev_tools.entry import main; main()'"}
    return subprocess.run(
        ["bash", "-c", f'eval "{script}"'],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


SHOW = "$K volume create --name é mem:a?size=1MiB"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (f"{SHOW} | true; exit \\${{PIPESTATUS[0]}}", ExitCode.BROKEN_PIPE),
        ("$K --help | true; exit \\${PIPESTATUS[0]}", ExitCode.BROKEN_PIPE),
        (f"{SHOW} >&-", ExitCode.OK),
        (f"{SHOW} 2>&- <&-", ExitCode.OK),
        ("$K volume show nonsense 2>&-", ExitCode.USAGE),
        ("$K volume show nonsense 2>/dev/full", ExitCode.USAGE),
    ],
)
def test_standard_files_closed_full_or_gone_leave_the_exit_code(script: str, code: int) -> None:
    done = kvdev(script)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["", "--json"])
def test_no_room_for_the_output_is_one_line(option: str) -> None:
    done = kvdev(f"{SHOW} {option} >/dev/full")
    assert done.returncode == ExitCode.REFUSED
    assert done.stderr == "kvdev: output: cannot be written: No space left on device\n"


def test_output_in_a_poor_encoding_is_escaped() -> None:
    done = kvdev(f"PYTHONIOENCODING=ascii {SHOW} --json")
    assert json.loads(done.stdout)["name"] == "é"
    done = kvdev(f"PYTHONIOENCODING=ascii {SHOW}")
    assert "\\xe9" in done.stdout, done.stderr


def test_a_descriptor_that_was_closed_is_not_given_to_a_device(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom kvdev_tools.main import run\nrun(['--version'])\n"
        "print(os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT))\nassert os.get_inheritable(2)\n"
    )
    done = subprocess.run(
        ["bash", "-c", '"$@" 2>&-', "bash", sys.executable, "-c", script, str(tmp_path / "device")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert int(done.stdout.splitlines()[-1]) > 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_an_interrupt_that_lands_in_a_destructor_is_not_lost(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(number)

    @click.command()
    def busy() -> None:
        thing = Interrupted()
        del thing  # Python drops what a destructor raises
        signal.sigtimedwait([], 20)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run([], group=busy) == code
    finally:
        signal.signal(signal.SIGINT, former)
    assert len(capsys.readouterr().err.splitlines()) == 1


def groups(command: click.Command, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every group below ``command``, itself included, by the words that reach it."""
    if not isinstance(command, click.Group):
        return []
    context = click.Context(command)
    found = [path]
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None, name
        found += groups(child, (*path, name))
    return found


def test_help_of_every_group_fits_a_terminal_of_80_columns_uncut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = groups(main_module.cli, ())
    assert ("volume",) in found
    for words in found:
        assert run([*words, "--help"]) == 0
        lines = capsys.readouterr().out.split("Commands:\n", 1)[1].splitlines()
        assert not [line for line in lines if line.endswith("...")], words
