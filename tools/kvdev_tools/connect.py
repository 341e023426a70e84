"""Options and helpers that every command which reaches a device shares: who we are, how long we wait.

Not here: what is opened (``kvdev.session``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvdev.clock import Deadline
    from kvdev.session import Session

_Command = TypeVar("_Command", bound=Callable[..., Any])

TIMEOUT_S_DEFAULT = 30.0
TIMEOUT_S_MAX = 3600.0
KATO_MS_DEFAULT = 10_000


_KEYS = "kvdev_tools.keys"
"""Where a command's context keeps the places of its secrets."""


def _keep_key(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    from kvdev.uri import parse_key_source

    assert param.name is not None, "an option has a name"
    source = parse_key_source(value, field=f"--{param.name.replace('_', '-')}")
    ctx.meta.setdefault(_KEYS, {})[param.name] = str(source)


def session_keys() -> dict[str, str]:
    """The places of secrets that this command was given, by option of ``ControllerOptions``."""
    ctx = click.get_current_context(silent=True)
    return dict(ctx.meta.get(_KEYS, {})) if ctx is not None else {}


def host_options(command: _Command) -> _Command:
    """``--host-nqn`` and ``--host-id``; the places of secrets are for ``make_session``."""
    for option in (
        click.option(
            "--tls-psk",
            metavar="PLACE",
            expose_value=False,
            callback=_keep_key,
            help="Where the key of TLS is kept; with it connections are encrypted, or not made.",
        ),
        click.option(
            "--dhchap-ctrl-key",
            metavar="PLACE",
            expose_value=False,
            callback=_keep_key,
            help="Where the subsystem's secret is kept, which it must prove to have.",
        ),
        click.option(
            "--dhchap-key",
            metavar="PLACE",
            expose_value=False,
            callback=_keep_key,
            help="Where this host's secret is kept: file:/PATH or keyring:NAME.",
        ),
        click.option("--host-id", metavar="UUID", help="Host identifier; by default it belongs to the NQN."),
        click.option(
            "--host-nqn", metavar="NQN", help="Connect as this host; by default this machine's NQN."
        ),
    ):
        command = option(command)
    return command


class FiniteRange(click.FloatRange):
    """Numbers within limits; not a number is none, although it compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return float(number)


def timeout_option(command: _Command) -> _Command:
    """``--timeout``, passed as ``timeout_s``."""
    return click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=FiniteRange(0.1, TIMEOUT_S_MAX),
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
    keys: Mapping[str, str] | None = None,
    is_writer: bool = False,
) -> Session:
    """A session as this host, every wait of which ends within the timeout.

    ``is_writer`` gives this process a HOSTID of its own, unless one was given: so that a reservation tells its
    writes from those of other processes of this host.

    ``keys`` are places of secrets as ``session_keys`` has them; by default those of this command.
    """
    from kvdev.initiator.host import HostIdentity
    from kvdev.initiator.options import ControllerOptions
    from kvdev.session import Session
    from kvdev.uri import parse_key_source

    places = session_keys() if keys is None else keys
    sources = {name: parse_key_source(place, field=name) for name, place in places.items()}
    options = ControllerOptions(
        kato_ms=kato_ms,
        io_queue_count=io_queue_count,
        connect_timeout_s=min(timeout_s, 10.0),
        command_timeout_s=timeout_s,
        admin_timeout_s=min(timeout_s, 10.0),
        dhchap_key=sources.get("dhchap_key"),
        dhchap_ctrl_key=sources.get("dhchap_ctrl_key"),
        tls_psk=sources.get("tls_psk"),
    )
    host = (
        None
        if host_nqn is None and host_id is None
        else HostIdentity.load(host_nqn=host_nqn, host_id=host_id)
    )
    if is_writer and host_id is None:
        host = (host or HostIdentity.load()).for_this_process()
    return Session(host=host, options=options)
