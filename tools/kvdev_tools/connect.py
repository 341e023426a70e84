"""Options and helpers that every command which reaches a device shares: who we are, how long we wait.

Not here: what is opened (``kvdev.session``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvdev.clock import Deadline
    from kvdev.session import Session

_Command = TypeVar("_Command", bound=Callable[..., Any])

TIMEOUT_S_DEFAULT = 30.0
TIMEOUT_S_MAX = 3600.0
KATO_MS_DEFAULT = 10_000


def host_options(command: _Command) -> _Command:
    """``--host-nqn`` and ``--host-id``."""
    for option in (
        click.option("--host-id", metavar="UUID", help="Host identifier; by default it belongs to the NQN."),
        click.option(
            "--host-nqn", metavar="NQN", help="Connect as this host; by default this machine's NQN."
        ),
    ):
        command = option(command)
    return command


def timeout_option(command: _Command) -> _Command:
    """``--timeout``, passed as ``timeout_s``."""
    return click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=click.FloatRange(0.1, TIMEOUT_S_MAX),
        default=TIMEOUT_S_DEFAULT,
        show_default=True,
        help="Longest wait for a target before giving up.",
    )(command)


def operation_deadline(timeout_s: float) -> Deadline:
    from kvdev.clock import Deadline

    return Deadline.after(timeout_s)


def make_session(
    host_nqn: str | None,
    host_id: str | None,
    *,
    timeout_s: float,
    io_queue_count: int = 1,
    kato_ms: int = KATO_MS_DEFAULT,
) -> Session:
    """A session as this host, every wait of which ends within the timeout."""
    from kvdev.initiator.host import HostIdentity
    from kvdev.initiator.options import ControllerOptions
    from kvdev.session import Session

    options = ControllerOptions(
        kato_ms=kato_ms,
        io_queue_count=io_queue_count,
        connect_timeout_s=min(timeout_s, 10.0),
        command_timeout_s=timeout_s,
        admin_timeout_s=min(timeout_s, 10.0),
    )
    host = (
        None
        if host_nqn is None and host_id is None
        else HostIdentity.load(host_nqn=host_nqn, host_id=host_id)
    )
    return Session(host=host, options=options)
