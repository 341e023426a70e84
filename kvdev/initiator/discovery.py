"""The discovery log of a discovery controller: which subsystems are there, and where; once, or with an eye on it.

Spec: NVM Express Base 5.1.12 (log page 70h), 8.3.1.
Trust: the record count is the peer's and capped; a log that keeps changing ends in an error.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from kvdev.clock import Deadline
from kvdev.errors import DeadlineError, KvdevError, TransportError, UsageError
from kvdev.initiator.controller import Controller
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.native.admin import AdminThread
from kvdev.uri import DISCOVERY_NQN, PORT_DISCOVERY, TcpUri, parse_address
from kvdev.wire.log import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_HEADER_BYTES,
    DiscoveryEntry,
    DiscoveryHeader,
    Lid,
    SubsystemType,
    TransportType,
    parse_discovery_entries,
)

log = logging.getLogger("kvdev.initiator")

ATTEMPT_COUNT_MAX = 10
"""How often a log that changes while it is read is read again."""


REFERRAL_COUNT_MAX = 16
"""Discovery services that are asked for one answer, the first included."""
PERSISTENT_KATO_MS = 120_000
"""What targets expect of a discovery controller that stays (Base 5.1.25.1.8)."""
RETRY_S = 1.0
"""Between two attempts to reach a discovery service that went away."""


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


def follow_referrals(
    entries: Sequence[DiscoveryEntry],
    *,
    came_from: TcpUri,
    host: HostIdentity,
    admin: AdminThread,
    options: ControllerOptions | None = None,
    deadline: Deadline,
) -> list[DiscoveryEntry]:
    """The entries with those that other discovery services are named for in their place.

    Each service is asked once, ``REFERRAL_COUNT_MAX`` in all; one that cannot be had is logged and left out.
    """
    found = [entry for entry in entries if entry.subtype != SubsystemType.REFERRAL]
    waiting = list(_referrals(entries))
    asked = {(str(came_from.address), came_from.subnqn)}
    while waiting:
        uri = waiting.pop(0)
        key = (str(uri.address), uri.subnqn)
        if key in asked:
            continue
        if len(asked) >= REFERRAL_COUNT_MAX:
            log.warning("%s: referrals: more than %d services, the rest is left out", uri, REFERRAL_COUNT_MAX)
            break
        asked.add(key)
        try:
            more = discover(uri, host=host, admin=admin, options=options, deadline=deadline)
        except KvdevError as error:
            log.warning("%s: referral left out: %s", uri, error)
            continue
        found += [entry for entry in more if entry.subtype == SubsystemType.NVM]
        waiting += _referrals(more)
    return found


def _referrals(entries: Sequence[DiscoveryEntry]) -> Iterator[TcpUri]:
    """The discovery services that TCP entries refer to; one whose address makes no sense is logged and left out."""
    for entry in entries:
        if entry.subtype != SubsystemType.REFERRAL or entry.trtype != TransportType.TCP:
            continue
        address = f"[{entry.traddr}]" if ":" in entry.traddr else entry.traddr
        try:
            where = parse_address(f"{address}:{entry.trsvcid}", port=PORT_DISCOVERY, field="referral")
        except UsageError as error:
            log.warning("discovery: referral left out: %s", error)
            continue
        yield TcpUri(addresses=(where,), subnqn=DISCOVERY_NQN)


class PersistentDiscovery:
    """A discovery controller that stays connected and says when its log changes.

    Connected on first use, and again by itself when it is lost, which counts as a change.
    Threads: one at a time.
    """

    def __init__(
        self, uri: TcpUri, *, host: HostIdentity, admin: AdminThread, options: ControllerOptions | None = None
    ) -> None:
        self.uri = uri
        self._host = host
        self._admin = admin
        self._options = dataclasses.replace(options or ControllerOptions(), kato_ms=PERSISTENT_KATO_MS)
        self._controller: Controller | None = None
        self._is_closed = False
        self._pause = threading.Event()

    def entries(self, *, deadline: Deadline) -> list[DiscoveryEntry]:
        """The log as it is now. Raises what ``discover`` raises."""
        return read_log(self._connected(deadline), deadline=deadline)

    def wait_change(self, *, deadline: Deadline) -> bool:
        """Wait until the log may have changed since it was read; False when it did not by the deadline.

        A service that went away is tried again every second meanwhile.
        """
        is_new = self._controller is None or not self._controller.is_alive
        while not deadline.is_expired:
            try:
                controller = self._connected(deadline)
                if is_new:
                    return True
                event = controller.take_event(deadline=deadline)
                if event is None:
                    return False
                if event.lid == Lid.DISCOVERY:
                    return True
            except TransportError as error:
                log.info("%s: discovery: %s", self.uri, error)
                is_new = True
                self._pause.wait(min(RETRY_S, deadline.remaining_s()))
        return False

    def _connected(self, deadline: Deadline) -> Controller:
        if self._is_closed:
            raise UsageError(f"{self.uri}: discovery: expected an open service, got a closed one")
        if self._controller is not None and self._controller.is_alive:
            return self._controller
        if self._controller is not None:
            self._controller.abandon()
            self._controller = None
        controller = Controller.connect(
            self.uri, host=self._host, admin=self._admin, options=self._options, deadline=deadline
        )
        try:
            controller.arm_events(deadline=deadline)
        except BaseException:
            controller.abandon()
            raise
        self._controller = controller
        return controller

    def close(self, deadline: Deadline | None = None) -> None:
        """Shut the controller down; bounded, and closing twice does nothing."""
        self._is_closed = True
        if self._controller is not None:
            self._controller.close(deadline)
            self._controller = None


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
