"""Child processes of a command: started apart from the terminal, ended with their parent, stopped in bounded time.

Not here: what they run (``kvdev_tools.rig``, ``kvdev_tools.supervisor``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from kvdev.errors import UsageError

STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1

# ``-m`` looks for modules in the working directory first, and a folder there named kvdev, such as the one that a
# checkout stands in, would hide the package. Python 3.11 has -P against that; this works from 3.10 on.
_RUN_MODULE = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to terminate this process when its parent ends, however it ends; for a child's first lines."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        return
    if os.getppid() != parent_pid:
        # The parent ended before the call: nobody would tell us any more.
        os.kill(os.getpid(), signal.SIGTERM)


def start(
    module: str,
    arguments: Sequence[str],
    *,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Run a module of ours with this interpreter, whatever the working directory holds.

    The child has a session of its own, so that Ctrl-C reaches only us.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN_MODULE, module, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"process: cannot start {' '.join([module, *arguments[:2]])!r}: {error.strerror}"
        ) from error


def stop(process: subprocess.Popen[bytes], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Terminate a child in order, or by force when it does not end in time; its pipes are closed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
