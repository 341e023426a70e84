"""Run kvdev command lines from standard input, each in a child of this process; stop at the first that fails.

Under emulation an interpreter's start and imports take ten seconds and more: here they are paid once.
"""

from __future__ import annotations

import os
import shlex
import sys
import time

import kvdev.session
import kvdev.store
import kvdev_tools.client
import kvdev_tools.cmd_namespace
import kvdev_tools.cmd_page
import kvdev_tools.cmd_replay
import kvdev_tools.cmd_volume
import kvdev_tools.launch  # noqa: F401 (as the imports above: loaded before the first child)
from kvdev_tools.main import run


def run_child(line: str) -> int:
    """One kvdev command in a child; its exit code."""
    child = os.fork()
    if child == 0:
        os._exit(run(shlex.split(line)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    for line in sys.stdin:
        started = time.monotonic()
        print(f"$ kvdev {line.strip()}", flush=True)
        code = run_child(line)
        print(f"# exit {code} after {time.monotonic() - started:.1f} s", flush=True)
        if code:
            return 1
    return 0


sys.exit(main())
