"""Host names to numeric addresses within a deadline.

Not here: connecting (the C core takes numeric addresses only).
Threads: a name that needs DNS is looked up in a daemon thread, so that a dead resolver cannot hold the
caller past its deadline; the thread ends when the resolver gives up.
"""

from __future__ import annotations

import socket
import threading

from kvdev.clock import Deadline
from kvdev.errors import ConnectError, DeadlineError
from kvdev.uri import TcpAddress

ADDRESS_COUNT_MAX = 8
"""Addresses of one name that are tried: a bound on what DNS can make us connect to."""


def resolve(address: TcpAddress, *, deadline: Deadline) -> list[str]:
    """Numeric addresses of a host, at least one, in the resolver's order.

    Raises ConnectError when the name is unknown, DeadlineError when the resolver does not answer.
    """
    try:
        return _look_up(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    found: list[str] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(_look_up(address, 0))
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=look_up, name="kvdev-resolve", daemon=True)
    thread.start()
    thread.join(deadline.remaining_s())
    if failure:
        raise ConnectError(
            f"{address}: host: expected a known name, got {address.host!r} ({failure[0].strerror}); "
            f"check the spelling or give the address",
            errno=failure[0].errno or 0,
            trid=str(address),
        ) from failure[0]
    if not found:
        raise DeadlineError(
            f"{address}: host: the resolver has no answer for {address.host!r} after "
            f"{deadline.elapsed_ms():.0f} ms; give the address",
            operation="resolve",
            elapsed_ms=deadline.elapsed_ms(),
            trid=str(address),
        )
    return found


def _look_up(address: TcpAddress, flags: int) -> list[str]:
    answers = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=flags
    )
    numeric: list[str] = []
    for _family, _kind, _proto, _name, endpoint in answers:
        host = str(endpoint[0])
        # getaddrinfo drops the zone of a link-local address from the text but keeps its index.
        if len(endpoint) == 4 and endpoint[3] and "%" not in host:
            host = f"{host}%{endpoint[3]}"
        if host not in numeric:
            numeric.append(host)
    return numeric[:ADDRESS_COUNT_MAX]
