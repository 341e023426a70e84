"""The first lines of the ``kvdev`` script: Ctrl-C while the command line is imported ends it without a traceback.

Imports nothing else at its top, so that the window before it is the interpreter's own start.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the ``kvdev`` script."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvdev_tools.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
