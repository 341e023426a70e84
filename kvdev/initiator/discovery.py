"""The discovery log of a discovery controller: which subsystems are there, and where.

Not here: keeping an eye on it (persistent discovery).
Spec: NVM Express Base 5.1.12 (log page 70h), 8.3.1.
Trust: the record count is the peer's and capped; a log that keeps changing ends in an error.
"""

from __future__ import annotations

from functools import partial

from kvdev.clock import Deadline
from kvdev.errors import DeadlineError
from kvdev.initiator.controller import Controller
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.native.admin import AdminThread
from kvdev.uri import TcpUri
from kvdev.wire.log import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_HEADER_BYTES,
    DiscoveryEntry,
    DiscoveryHeader,
    Lid,
    parse_discovery_entries,
)

ATTEMPT_COUNT_MAX = 10
"""How often a log that changes while it is read is read again."""


def discover(
    uri: TcpUri,
    *,
    host: HostIdentity,
    admin: AdminThread,
    options: ControllerOptions | None = None,
    deadline: Deadline,
) -> list[DiscoveryEntry]:
    """Entries of the discovery log at ``uri``, read once, in the log's order.

    Blocks no longer than the deadline; connects, reads and disconnects. Raises what ``Controller.connect``
    raises, and ProtocolError for a log that breaks the format.
    """
    with Controller.connect(uri, host=host, admin=admin, options=options, deadline=deadline) as controller:
        return read_log(controller, deadline=deadline)


def read_log(controller: Controller, *, deadline: Deadline) -> list[DiscoveryEntry]:
    """The whole log as of one generation: read again while the generation moves under us."""
    channel = controller.channel
    for _ in range(ATTEMPT_COUNT_MAX):
        before = _read_header(controller, deadline)
        size_bytes = DISCOVERY_HEADER_BYTES + before.numrec * DISCOVERY_ENTRY_BYTES
        data = controller.log_page(Lid.DISCOVERY, size_bytes, nsid=0, retain_event=True, deadline=deadline)
        # Reading the header again without RAE also rearms the change event.
        after = _read_header(controller, deadline)
        if (before.genctr, before.numrec) == (after.genctr, after.numrec):
            return channel.parse(
                partial(parse_discovery_entries, entry_count=before.numrec), data[DISCOVERY_HEADER_BYTES:]
            )
    raise DeadlineError(
        f"{controller.where}: discovery log: its generation changed under {ATTEMPT_COUNT_MAX} readings; "
        f"try again later",
        operation="discovery log",
        elapsed_ms=deadline.elapsed_ms(),
        trid=str(controller.address),
    )


def _read_header(controller: Controller, deadline: Deadline) -> DiscoveryHeader:
    """The log's header, its record format and count checked."""
    data = controller.log_page(Lid.DISCOVERY, DISCOVERY_HEADER_BYTES, nsid=0, deadline=deadline)
    return controller.channel.parse(lambda untrusted: DiscoveryHeader.parse(untrusted).check(), data)
