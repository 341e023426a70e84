"""``kvdev reservation``: who holds a namespace, and by what key; taking, giving back and clearing that.

Not here: the rules (the target's); when a store takes and preempts reservations (``kvdev.store``).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvdev_tools.connect import host_options, make_session, operation_deadline, timeout_option
from kvdev_tools.output import emit, fields, json_option, table

if TYPE_CHECKING:
    from kvdev.block.reservation import ReservationControl, ReservationStatus, ReservationType
    from kvdev.clock import Deadline

_Command = TypeVar("_Command", bound=Callable[..., Any])

TYPE_NAMES = (
    "write-exclusive",
    "exclusive-access",
    "write-exclusive-registrants-only",
    "exclusive-access-registrants-only",
    "write-exclusive-all-registrants",
    "exclusive-access-all-registrants",
)
"""As in ``ReservationType.label``; 1 to 6 on the wire. A test compares the two."""


def _parse_key(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A reservation key: 64 bits, decimal or with 0x."""
    if value is None:
        return None
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}|[0-9]{1,20}", value):
        key = int(value, 16) if value.startswith("0x") else int(value)
        if key < 1 << 64:
            return key
    raise click.BadParameter(f"expected 64 bits, as 0x1a2b or decimal, got {value!r}", ctx, param)


def _key_option(*names: str, is_required: bool = False, text: str) -> Callable[[_Command], _Command]:
    return click.option(*names, metavar="KEY", callback=_parse_key, required=is_required, help=text)


@click.group()
def reservation() -> None:
    """Show and change the reservation on an NVMe namespace.

    \b
    A host registers a key, then acquires; the target keeps other hosts' writes (or all their I/O) out.
    Keys are numbers of 64 bits: 0x1a2b, or decimal. A running kvdev that owns a volume keeps its own
    reservation: clearing it lets others write under it.
    """


def _namespace_options(command: _Command) -> _Command:
    command = json_option(timeout_option(host_options(command)))
    return click.argument("uri", metavar="tcp://HOST:PORT/NQN?nsid=N")(command)


def _type_option(command: _Command) -> _Command:
    return click.option(
        "--type",
        "type_name",
        type=click.Choice(TYPE_NAMES),
        default=TYPE_NAMES[4],
        show_default=True,
        help="Whom it keeps out, and who holds it.",
    )(command)


def _rtype(name: str) -> ReservationType:
    from kvdev.block.reservation import ReservationType

    return ReservationType(TYPE_NAMES.index(name) + 1)


@contextmanager
def _opened(
    uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float
) -> Iterator[tuple[ReservationControl, bytes, Deadline]]:
    """The reservations of a namespace, who we are to it, and the time that there is."""
    from kvdev.errors import UnsupportedError

    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        deadline = operation_deadline(timeout_s)
        device = session.open_device(uri, deadline=deadline)
        if device.reservations is None:
            raise UnsupportedError(
                f"{device.uri}: reservations: only NVMe namespaces have them: give a tcp:// device",
                feature="reservations",
            )
        yield device.reservations, session.host.host_id_bytes, deadline


def _show(status: ReservationStatus, own_id: bytes, *, as_json: bool) -> None:
    document = {
        "reservation": status.reservation.label if status.reservation else None,
        "is_persistent": status.is_persistent,
        "generation": status.generation,
        "host_id": str(uuid.UUID(bytes=own_id)),
        "registrants": [
            {
                "host_id": str(uuid.UUID(bytes=each.host_id)),
                "key": f"0x{each.key:x}",
                "is_holder": each.is_holder,
                "is_this_host": each.host_id == own_id,
                "cntlid": each.cntlid,
            }
            for each in status.registrants
        ],
    }

    def text() -> list[str]:
        lines = fields(
            [
                ("reservation", document["reservation"] or "none"),
                ("survives power loss", "yes" if status.is_persistent else "no"),
                ("generation", status.generation),
                ("this host", document["host_id"]),
            ]
        )
        rows = [
            [
                str(uuid.UUID(bytes=each.host_id)),
                f"0x{each.key:x}",
                "holder" if each.is_holder else "",
                "" if each.cntlid is None else str(each.cntlid),
                "this host" if each.host_id == own_id else "",
            ]
            for each in status.registrants
        ]
        return lines + (table(rows, header=["host", "key", "holds", "controller", ""]) if rows else [])

    emit(document, as_json=as_json, text=text)


@reservation.command()
@_namespace_options
def show(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> None:
    """Show the reservation, and every registered host with its key."""
    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        _show(control.report(deadline), own_id, as_json=as_json)


@reservation.command()
@_namespace_options
@_key_option("--key", is_required=True, text="The key of this host from now on.")
@_key_option("--replace", "old_key", text="The key that it has now.")
@click.option(
    "--persistent/--volatile",
    "is_persistent",
    default=None,
    help="Whether registrations and the reservation outlive the target.  [default: as it is]",
)
def register(
    uri: str,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    key: int,
    old_key: int | None,
    is_persistent: bool | None,
) -> None:
    """Register this host, or give it another key."""
    from kvdev.errors import UsageError

    if old_key is not None and is_persistent is not None:
        raise UsageError(
            "--replace: expected it without --persistent and --volatile; register with these first"
        )
    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        if old_key is None:
            control.register(key, deadline, is_persistent=is_persistent)
        else:
            control.replace(old_key, key, deadline)
        _show(control.report(deadline), own_id, as_json=as_json)


@reservation.command(short_help="Forget this host, and what it alone holds.")
@_namespace_options
@_key_option("--key", is_required=True, text="This host's key.")
def unregister(
    uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool, key: int
) -> None:
    """Forget this host; a reservation that it alone holds is released."""
    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        control.unregister(key, deadline)
        _show(control.report(deadline), own_id, as_json=as_json)


@reservation.command()
@_namespace_options
@_key_option("--key", is_required=True, text="This host's key: register it first.")
@_type_option
@_key_option("--preempt", "victim", text="Put out the hosts with this key, and abort what they sent.")
def acquire(
    uri: str,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    key: int,
    type_name: str,
    victim: int | None,
) -> None:
    """Take the reservation, from another host with --preempt."""
    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        if victim is None:
            control.acquire(key, _rtype(type_name), deadline)
        else:
            control.preempt(key, victim, _rtype(type_name), deadline)
        _show(control.report(deadline), own_id, as_json=as_json)


@reservation.command()
@_namespace_options
@_key_option("--key", is_required=True, text="This host's key.")
@_type_option
def release(
    uri: str,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    key: int,
    type_name: str,
) -> None:
    """Give the reservation back; this host stays registered."""
    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        control.release(key, _rtype(type_name), deadline)
        _show(control.report(deadline), own_id, as_json=as_json)


@reservation.command()
@_namespace_options
@_key_option("--key", text="This host's key; without it this host takes one for the occasion.")
@click.option("--yes", "is_confirmed", is_flag=True, help="Do it although other hosts lose their rights.")
def clear(
    uri: str,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    key: int | None,
    is_confirmed: bool,
) -> None:
    """Release whatever is held and forget every registered host.

    A host that is alive and relies on its reservation may be written under after this: see that it is
    stopped, or use `acquire --preempt`.
    """
    from kvdev.errors import UsageError

    with _opened(uri, host_nqn, host_id, timeout_s) as (control, own_id, deadline):
        status = control.report(deadline)
        others = [each for each in status.registrants if each.host_id != own_id]
        if others and not is_confirmed:
            names = ", ".join(str(uuid.UUID(bytes=each.host_id)) for each in others[:4])
            raise UsageError(
                f"{uri}: clear: {len(others)} other hosts are registered ({names}{', ...' if others[4:] else ''}): "
                f"stop what uses the namespace there, then repeat with --yes"
            )
        if status.registrants:
            own = status.registrant(own_id)
            if key is None and own is None:
                key = int.from_bytes(uuid.uuid4().bytes[:8], "little") | 1
                control.register(key, deadline)
            elif key is None and own is not None:
                key = own.key
            assert key is not None, "one of the three gave it"
            control.clear(key, deadline)
        _show(control.report(deadline), own_id, as_json=as_json)
