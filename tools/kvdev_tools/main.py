"""``kvdev``: the command line's entry, its lazily loaded commands, and the one place where errors become exit codes.

Not here: the commands (``kvdev_tools.cmd_*``); which error has which code (``kvdev_tools.exits``).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TextIO

import click

from kvdev import __version__
from kvdev_tools.exits import ExitCode, exit_code_of, shortage_of

# Command -> (module, attribute, one line of help): the modules are loaded only when their command is used.
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "target": ("kvdev_tools.cmd_target", "target", "Run the embedded NVMe/TCP target."),
    "discover": ("kvdev_tools.cmd_fabric", "discover", "List the subsystems of a discovery service."),
    "identify": ("kvdev_tools.cmd_fabric", "identify", "Show a controller and its namespaces."),
    "reservation": (
        "kvdev_tools.cmd_reservation",
        "reservation",
        "Show and change who may write to a namespace.",
    ),
    "volume": ("kvdev_tools.cmd_volume", "volume", "Make and inspect RAID0 volumes."),
    "namespace": ("kvdev_tools.cmd_namespace", "namespace", "Make and inspect KV namespaces of a volume."),
    "page": ("kvdev_tools.cmd_page", "page", "List and verify stored pages."),
    "pool": ("kvdev_tools.cmd_pool", "pool", "Own KV namespaces for all engine processes of this host."),
    "provision": ("kvdev_tools.cmd_provision", "provision", "Make targets, hosts and volumes from one file."),
    "key": ("kvdev_tools.cmd_key", "key", "Make and check secrets for authentication."),
    "drill": ("kvdev_tools.cmd_drill", "drill", "Let faults happen on a device, and watch it under reads."),
    "probe": ("kvdev_tools.cmd_probe", "probe", "Measure devices with fio's job files."),
    "doctor": ("kvdev_tools.cmd_doctor", "doctor", "Check this host, and name what it lacks."),
    "kernels": ("kvdev_tools.cmd_kernels", "kernels", "List the page kernels that this machine can run."),
    "replay": ("kvdev_tools.cmd_replay", "replay", "Offload and restore the KV pages of a request trace."),
}


# From click 8.2 on, a group without a command raises its help text; before, it printed it.
_HELP_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if kind is not None
)


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, so that ``kvdev --help`` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (signature of click)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="kvdev")
@click.option("-v", "--verbose", is_flag=True, help="Log to standard error.")
def cli(verbose: bool) -> None:
    """KV caches of LLM serving engines on NVMe-oF storage.

    \b
    Names:  device        tcp://HOST:PORT/NQN?nsid=N   file:/PATH   mem:NAME?size=SIZE
            volume        vol:DEVICE,DEVICE,...        vol+tcp://HOST:PORT/NQN
            KV namespace  VOLUME#NAME

    \b
    Try it on this machine alone:  kvdev replay
    Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 data fault, 70 a bug of kvdev.
    """
    if verbose:
        logging.getLogger("kvdev.drill").removeHandler(_DRILL_HANDLER)  # the log has it
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s"
        )


class _TerminatedError(BaseException):
    """SIGTERM came: unwinds like a KeyboardInterrupt, so that what was started is stopped."""


LOST_INTERRUPT_WAIT_S = 0.05
"""After an interrupt was dropped: enough to leave the callback or destructor that it landed in."""


class _Interrupts:
    """While entered, SIGTERM unwinds like Ctrl-C, and neither is lost.

    An exception that a signal raises inside a callback of C code or a destructor is dropped by Python: only
    ``sys.unraisablehook`` sees it. It is raised again a moment later, until it unwinds.
    """

    def __init__(self) -> None:
        self._dropped: type[BaseException] = KeyboardInterrupt

    def __enter__(self) -> None:
        self._is_active = threading.current_thread() is threading.main_thread()
        if self._is_active:
            self._former_hook = sys.unraisablehook
            sys.unraisablehook = self._see_dropped
            handlers = ((signal.SIGTERM, _terminate), (signal.SIGALRM, self._raise_again))
            self._former = [(number, signal.signal(number, handler)) for number, handler in handlers]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_active:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self._former:
                signal.signal(number, handler)
            sys.unraisablehook = self._former_hook

    def _see_dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, (KeyboardInterrupt, _TerminatedError)):
            self._dropped = unraisable.exc_type
            signal.setitimer(signal.ITIMER_REAL, LOST_INTERRUPT_WAIT_S)
        else:
            self._former_hook(unraisable)

    def _raise_again(self, _number: int, _frame: FrameType | None) -> None:
        raise self._dropped


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _TerminatedError


def run(arguments: Sequence[str] | None = None, *, group: click.Command = cli, is_child: bool = False) -> int:
    """Run one command line; returns its exit code. Whatever happens, at most one line of error, or a traceback.

    ``is_child``: a parent of ours stops us with SIGTERM and says why itself.
    """
    _open_standard_files()
    # An error is one line; warnings of the library belong to those who ask for a log.
    for name in ("kvdev", "spdk_rpc", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    logging.getLogger("kvdev.drill").addHandler(_DRILL_HANDLER)
    try:
        with _Interrupts():
            result = _invoke(group, list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
        return result if isinstance(result, int) else int(ExitCode.OK)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, _HELP_ERRORS):
            click.echo(error.format_message(), err=True)
            return int(ExitCode.USAGE)
        return _complain(_usage_line(error), ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        if sys.stderr.isatty():
            click.echo(err=True)  # after the ^C of the terminal
        return _complain("interrupted", ExitCode.INTERRUPTED)
    except _TerminatedError:
        if is_child:
            return int(ExitCode.TERMINATED)
        return _complain("terminated", ExitCode.TERMINATED)
    except BrokenPipeError:
        return int(ExitCode.BROKEN_PIPE)
    except Exception as error:
        code = exit_code_of(error)
        shortage = shortage_of(error)
        if shortage is not None:
            return _complain(shortage, code)
        if code is ExitCode.BUG:
            with contextlib.suppress(OSError):
                traceback.print_exc()
            return _complain(f"this is a bug: {type(error).__name__}: {error}", code)
        return _complain(str(error), code)
    finally:
        _give_up_output(sys.stdout)


class _DrillHandler(logging.Handler):
    """Says on standard error that faults are made on purpose, also where no log was asked for."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            click.echo(f"kvdev: {_one_line(record.getMessage())}", err=True)


_DRILL_HANDLER = _DrillHandler()


def _invoke(group: click.Command, arguments: list[str]) -> object:
    # Not group.main: it turns a closed pipe into exit code 1, and puts an empty line before an interrupt.
    instruction = os.environ.get("_KVDEV_COMPLETE")
    if instruction and group is cli:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "kvdev", "_KVDEV_COMPLETE", instruction)
    with group.make_context("kvdev", arguments) as context:
        return group.invoke(context)


def _open_standard_files() -> None:
    """Open those of the descriptors 0 to 2 that our parent closed.

    Else the next device or socket would get such a number, and a line of error would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (as long as the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (as long as the process)


def _give_up_output(stream: TextIO) -> None:
    """Drop what cannot be written any more: Python would try again at its end, and complain."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


WORD_LENGTH_MAX = 200
"""Of a message: an overlong value is named by its ends."""


def _complain(text: str, code: ExitCode) -> int:
    try:
        click.echo(f"kvdev: {_one_line(text)}", err=True)
    except (OSError, ValueError):
        _give_up_output(sys.stderr)
    return int(code)


def _one_line(text: str) -> str:
    """One line whatever a peer or a file put into the message."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(rf"\S{{{WORD_LENGTH_MAX + 1},}}", lambda word: f"{word[0][:120]}...{word[0][-40:]}", line)


def _usage_line(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".").replace("\n", " ")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        text += f"; see {context.command_path} --help"
    return text


def main() -> None:
    """Run the command line of this process; the ``kvdev`` script comes here by ``kvdev_tools.entry``."""
    sys.exit(run())


if __name__ == "__main__":
    main()
