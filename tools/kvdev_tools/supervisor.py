"""Runs replay clients as processes and kills one half way, between two requests, with SIGKILL.

Not here: what a client does (``kvdev_tools.client``).
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
from pathlib import Path

from kvdev.clock import Deadline
from kvdev.errors import DeadlineError, KvdevError
from kvdev_tools import process
from kvdev_tools.client import PAUSED_LINE, ClientConfig, write_config
from kvdev_tools.exits import ExitCode

_LOOK_INTERVAL_S = 1.0
_PIPE_READ_BYTES = 4096


class ClientFailedError(KvdevError):
    """A client process ended with an error, which it has printed itself unless a signal ended it."""

    def __init__(self, status: int) -> None:
        self.has_said_why = status > 0
        self.code = status
        text = f"ended with code {status}"
        if status < 0:
            number = -status
            is_killed = number == signal.SIGKILL
            self.code = int(ExitCode.REFUSED if is_killed else ExitCode.BUG)
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            text = f"ended by signal {name}" + (
                ": memory ran out, or somebody killed it" if is_killed else ""
            )
        super().__init__(f"replay client: {text}")


def run_clients(config: ClientConfig, *, kill_after: int | None, folder: Path) -> int:
    """Run the replay in child processes; returns how many were killed.

    With ``kill_after`` the first client is killed after that many requests and a second one goes on. Raises
    ClientFailedError when a client fails by itself, DeadlineError when one makes no progress any more.
    """
    kills = 0
    config = dataclasses.replace(config, parent_pid=os.getpid())
    if kill_after is not None and 0 < kill_after < config.request_count:
        _run(dataclasses.replace(config, pause_after=kill_after), folder / "client-0.json", is_killed=True)
        kills = 1
    _run(config, folder / f"client-{kills}.json", is_killed=False)
    return kills


def _run(config: ClientConfig, path: Path, *, is_killed: bool) -> None:
    write_config(config, path)
    child = process.start("kvdev_tools.client", [str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        is_paused = _wait(child, config)
        if is_paused and is_killed:
            child.send_signal(signal.SIGKILL)
            child.wait(process.STOP_TIMEOUT_S)
            return
        code = child.wait(process.STOP_TIMEOUT_S)
        if code != 0:
            raise ClientFailedError(code)
    finally:
        process.stop(child)


def _wait(child: subprocess.Popen[bytes], config: ClientConfig) -> bool:
    """Wait until the client pauses (True) or ends; its progress file must grow all the while."""
    assert child.stdout is not None
    # One request may take a command's timeout for each of several steps: lookups, reads, writes, flush.
    stall_s = 60.0 + 10 * config.timeout_s
    limit, size_bytes = Deadline.after(stall_s), -1
    received = b""
    while True:
        ready, _, _ = select.select([child.stdout], [], [], _LOOK_INTERVAL_S)
        if ready:
            data = os.read(child.stdout.fileno(), _PIPE_READ_BYTES)
            received += data
            if PAUSED_LINE in received:
                return True
            if not data:
                return False
        grown = _size_bytes(Path(config.progress_path))
        if grown != size_bytes:
            limit, size_bytes = Deadline.after(stall_s), grown
        if limit.is_expired:
            raise DeadlineError(
                f"replay client: no request finished within {stall_s:.0f} s",
                operation="replay",
                elapsed_ms=limit.elapsed_ms(),
            )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
