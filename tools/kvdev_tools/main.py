"""``kvdev``: the command line's entry, its lazily loaded commands, and the one place where errors become exit codes.

Not here: the commands (``kvdev_tools.cmd_*``); which error has which code (``kvdev_tools.exits``).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import click

from kvdev import __version__
from kvdev_tools.exits import ExitCode, exit_code_of

# Command -> (module, attribute, one line of help): the modules are loaded only when their command is used.
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "target": ("kvdev_tools.cmd_target", "target", "Run the embedded NVMe/TCP target."),
    "discover": ("kvdev_tools.cmd_fabric", "discover", "List the subsystems of a discovery service."),
    "identify": ("kvdev_tools.cmd_fabric", "identify", "Show a controller and its namespaces."),
    "volume": ("kvdev_tools.cmd_volume", "volume", "Make and inspect RAID0 volumes."),
    "namespace": ("kvdev_tools.cmd_namespace", "namespace", "Make and inspect KV namespaces of a volume."),
    "page": ("kvdev_tools.cmd_page", "page", "List and verify stored pages."),
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
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s"
        )


class _TerminatedError(BaseException):
    """SIGTERM came: unwinds like a KeyboardInterrupt, so that what was started is stopped."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _TerminatedError


def run(arguments: Sequence[str] | None = None, *, group: click.Command = cli, is_child: bool = False) -> int:
    """Run one command line; returns its exit code. Whatever happens, at most one line of error, or a traceback.

    ``is_child``: a parent of ours stops us with SIGTERM and says why itself.
    """
    # An error is one line; warnings of the library belong to those who ask for a log.
    for name in ("kvdev", "spdk_rpc"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    with contextlib.suppress(ValueError):  # not in the main thread: the caller keeps its handlers
        signal.signal(signal.SIGTERM, _terminate)
    try:
        result = group.main(
            args=None if arguments is None else list(arguments), prog_name="kvdev", standalone_mode=False
        )
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
        return _complain("interrupted", ExitCode.INTERRUPTED)
    except _TerminatedError:
        if is_child:
            return int(ExitCode.TERMINATED)
        return _complain("terminated", ExitCode.TERMINATED)
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.BROKEN_PIPE)
    except Exception as error:
        code = exit_code_of(error)
        if code is ExitCode.BUG:
            traceback.print_exc()
            return _complain(f"this is a bug: {type(error).__name__}: {error}", code)
        return _complain(str(error), code)


def _complain(text: str, code: ExitCode) -> int:
    # One line whatever a peer or a file put into the message.
    line = "".join(c if c.isprintable() else " " for c in text)
    click.echo(f"kvdev: {line}", err=True)
    return int(code)


def _usage_line(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".").replace("\n", " ")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        text += f"; see {context.command_path} --help"
    return text


def main() -> None:
    """Entry point of the ``kvdev`` script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
