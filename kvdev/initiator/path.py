"""One address of a subsystem: connected, lost and connected again, with one association at a time.

A path does its work on a thread of its own that runs only while there is some, so that none waits for
another.
Not here: what a namespace makes of it (``subsystem``); commands in flight (the C queue).
Spec: NVM Express Base 3.3.2.4, 9.5, 9.6.2.
Threads: ``look`` and ``hurry`` from any; ``connect`` before ``start``; ``close`` once.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Deadline
from kvdev.errors import (
    AuthenticationError,
    CommandError,
    DeadlineError,
    KvdevError,
    UnsupportedError,
    UsageError,
)
from kvdev.initiator.cancel import CancelToken
from kvdev.initiator.change import ana_log_size_bytes, is_changing
from kvdev.initiator.channel import LOG_CHUNK_SIZE_BYTES
from kvdev.initiator.controller import Controller
from kvdev.initiator.event import EventKind, HostEvent
from kvdev.initiator.fence import fence_ns
from kvdev.initiator.namespace import NamespaceInfo, scan
from kvdev.native.queue import HostQpair
from kvdev.uri import TcpAddress
from kvdev.wire.identify import LPA_EXTENDED
from kvdev.wire.log import AnaLog, Lid, ReservationNotice
from kvdev.wire.nvme import AsyncEvent, AsyncEventType, Notice

if TYPE_CHECKING:
    from kvdev.initiator.subsystem import Subsystem

log = logging.getLogger("kvdev.initiator")

FIRST_DELAY_S = 0.1
"""Between the first attempt after a loss, which comes at once, and the second."""
JITTER = 0.2
"""Part of a delay by which it is made longer or shorter: hosts that lost one target do not come back as one."""
RESET_TIMEOUT_S = 2.0
"""How long a controller whose admin connection still works may take to stop before it is left alone."""
EVENT_COUNT_MAX = 16
"""Events handled in one step, before losses are looked at again."""
CLOSE_GRACE_S = 0.5
"""What a path is in the middle of may take so long before it is ended by force."""
_PERSISTENT_INTERNAL_ERROR = 3
_PEER_CLOSED = ("closed by the peer",)


class PathStage(enum.Enum):
    CONNECTING = "connecting"
    LIVE = "live"
    ENDED = "ended"
    """Refused, or over ctrl_loss_tmo: it is not connected again."""
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True)
class PathInfo:
    """A path as an operator sees it."""

    address: str
    stage: PathStage
    cntlid: int | None
    loss_count: int
    attempt_count: int
    """Since it was lost; 0 while it lives."""
    reason: str
    """Why it is not live, or was not the last time."""


class Path:
    """See the module; ``stage`` only changes under ``_changed``."""

    def __init__(self, subsystem: Subsystem, address: TcpAddress) -> None:
        self.subsystem = subsystem
        self.address = address
        self.stage = PathStage.CONNECTING
        self.controller: Controller | None = None
        self.queue_index: int | None = None
        """The place of its associations in the queue; None until a namespace is opened."""
        self.infos: dict[int, NamespaceInfo] = {}
        self.ana: AnaLog | None = None
        self.fence_ns = 0
        self.reason = ""
        self.failure: KvdevError | None = None
        self.attempt_count = 0
        self.finished_count = 0
        """Attempts that have ended, ever."""
        self.loss_count = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._token = CancelToken()
        self._is_closing = False
        self._wants_reset = ""
        self._lost_ns = SYSTEM_CLOCK.monotonic_ns()
        self._next_ns = 0
        self._ana_limit_ns = 0
        seed = hashlib.sha256(subsystem.host.host_id_bytes + str(address).encode()).digest()
        self._rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))

    @property
    def where(self) -> str:
        return f"{self.address} {self.subsystem.uri.subnqn}"

    @property
    def is_live(self) -> bool:
        return self.stage is PathStage.LIVE

    @property
    def info(self) -> PathInfo:
        controller = self.controller
        return PathInfo(
            address=str(self.address),
            stage=self.stage,
            cntlid=controller.cntlid if controller is not None and self.is_live else None,
            loss_count=self.loss_count,
            attempt_count=self.attempt_count,
            reason=self.reason,
        )

    # ---- from other threads ----

    def connect(self, deadline: Deadline) -> None:
        """The first attempt, on the caller's thread; raises what it fails with."""
        self._attempt(deadline)

    def start(self) -> None:
        """Connect on the path's own thread from now on."""
        self._lost_ns = self._next_ns = SYSTEM_CLOCK.monotonic_ns()
        self._kick()

    def look(self) -> None:
        """Start the thread when there is something to do; does not wait."""
        with self._changed:
            if self._wait_s() is not None:
                self._kick_locked()

    def hurry(self) -> None:
        """Make the next attempt now."""
        with self._changed:
            self._next_ns = 0
            self._kick_locked()

    def reset(self, reason: str) -> None:
        """Give the association up and make a new one."""
        with self._changed:
            self._wants_reset = reason
            self._kick_locked()

    def _kick(self) -> None:
        with self._changed:
            self._kick_locked()

    def _kick_locked(self) -> None:
        if self._is_closing:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"kvdev-path-{self.address}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def close(self, deadline: Deadline) -> None:
        """End the thread, shut the controller down in order, close everything; bounded."""
        with self._changed:
            self._is_closing = True
            thread = self._thread
            self._changed.notify_all()
        self._token.cancel()
        if thread is not None:
            thread.join(min(CLOSE_GRACE_S, deadline.remaining_s()))
            if thread.is_alive() and self.controller is not None:
                self.controller.channel.cancel()
            thread.join()
        queue = self.subsystem.queue
        if queue is not None and self.queue_index is not None and not queue.is_closed:
            queue.remove_controller(self.queue_index)
        self.queue_index = None
        if self.controller is not None:
            self.controller.close(deadline)
        self.stage = PathStage.CLOSED

    # ---- the path's own thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_s = self._wait_s()
                if wait_s is None or self._is_closing:
                    self._thread = None
                    return
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
            try:
                self._step()
            except Exception as error:
                # Nobody else sees it: a path that cannot be looked after starts anew, after a pause.
                log.exception("%s: recovery failed", self.where)
                self._go_down(str(error))

    def _wait_s(self) -> float | None:
        """Time until there is something to do; None when there is nothing."""
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        if self.stage is PathStage.CONNECTING:
            return max(0.0, (min(self._next_ns, self._give_up_ns()) - now_ns) / NS_PER_S)
        if self.stage is not PathStage.LIVE:
            return None
        if self._loss() or self._has_events() or self._has_ana_error():
            return 0.0
        if self._ana_limit_ns:
            return max(0.0, (self._ana_limit_ns - now_ns) / NS_PER_S)
        return None

    def _step(self) -> None:
        if self.stage is PathStage.CONNECTING:
            self._reconnect()
            return
        reason = self._loss()
        if reason:
            self._go_down(reason)
        elif self._has_events():
            self._handle_events()
        elif self._has_ana_error():
            self._guard(self._read_ana, "ANA log")
        elif self._ana_limit_ns and SYSTEM_CLOCK.monotonic_ns() >= self._ana_limit_ns:
            self._go_down("an ANA group has been changing for longer than ANATT")

    def _give_up_ns(self) -> int:
        limit_s = self.subsystem.options.ctrl_loss_tmo_s
        return self._lost_ns + int(limit_s * NS_PER_S) if limit_s >= 0 else 1 << 63

    # ---- connecting ----

    def _reconnect(self) -> None:
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        if now_ns >= self._give_up_ns():
            limit_s = self.subsystem.options.ctrl_loss_tmo_s
            self._end(f"no connection within ctrl_loss_tmo {limit_s:g} s: {self.reason}")
            return
        options = self.subsystem.options
        try:
            self._attempt(Deadline.after(options.connect_timeout_s + options.admin_timeout_s))
        except KvdevError as error:
            if self._is_closing:
                return
            is_final = (isinstance(error, CommandError) and error.dnr) or isinstance(
                error, (UnsupportedError, AuthenticationError)
            )
            if is_final:
                self._end(str(error))
                return
            level = logging.WARNING if self.attempt_count == 1 else logging.DEBUG
            log.log(level, "%s: attempt %d: %s", self.where, self.attempt_count, error)
            self._next_ns = SYSTEM_CLOCK.monotonic_ns() + int(self._delay_s() * NS_PER_S)

    def _delay_s(self) -> float:
        limit_s = self.subsystem.options.reconnect_delay_s
        delay_s = min(limit_s, FIRST_DELAY_S * 2.0 ** min(self.attempt_count - 1, 20))
        return delay_s * float(self._rng.uniform(1 - JITTER, 1 + JITTER))

    def _attempt(self, deadline: Deadline) -> None:
        """One whole association, from the connection to queue pairs in use."""
        subsystem = self.subsystem
        self.attempt_count += 1
        controller: Controller | None = None
        qpairs: list[HostQpair] = []
        try:
            controller = Controller.connect(
                dataclasses.replace(subsystem.uri, addresses=(self.address,)),
                host=subsystem.host,
                admin=subsystem.admin,
                options=subsystem.options,
                token=self._token,
                deadline=deadline,
            )
            subsystem.check_identity(self, controller)
            infos, ana = self._survey(controller, deadline)
            if subsystem.queue is not None:
                qpairs = self._connect_io(controller, deadline)
            self._go_live(controller, infos, ana, qpairs, deadline)
        except BaseException as error:
            for qpair in qpairs:
                if qpair.owner is None:
                    qpair.close()
            if controller is not None and not self.is_live:
                controller.abandon()
            if isinstance(error, KvdevError):
                self.reason, self.failure = str(error), error
            raise
        finally:
            self._token.clear()
            self.finished_count += 1
            subsystem.notify()

    def _survey(
        self, controller: Controller, deadline: Deadline
    ) -> tuple[dict[int, NamespaceInfo], AnaLog | None]:
        """Its namespaces and their ANA states, where any of them is in use."""
        if controller.is_discovery or self.subsystem.queue is None:
            return {}, None
        infos = {info.nsid: info for info in scan(controller, deadline=deadline)}
        return infos, read_ana_log(controller, deadline=deadline)

    @staticmethod
    def _connect_io(controller: Controller, deadline: Deadline) -> list[HostQpair]:
        if controller.io_queue_count == 0:
            raise UnsupportedError(
                f"{controller.where}: number of queues: expected 1 or more, got none from the controller",
                feature="I/O queues",
            )
        return controller.connect_io_qpairs(deadline=deadline)

    def _go_live(
        self,
        controller: Controller,
        infos: dict[int, NamespaceInfo],
        ana: AnaLog | None,
        qpairs: list[HostQpair],
        deadline: Deadline,
    ) -> None:
        subsystem = self.subsystem
        with subsystem.lock:
            if subsystem.queue is not None and not qpairs:
                # A namespace was opened while this association was made.
                infos, ana = self._survey(controller, deadline)
                qpairs += self._connect_io(controller, deadline)
            self.infos = infos
            self._set_ana(controller, ana)
            if subsystem.queue is not None:
                if self.queue_index is None:
                    self.queue_index = subsystem.queue.add_controller()
                made_ns = SYSTEM_CLOCK.monotonic_ns()
                controller.attach_as(subsystem.queue, self.queue_index, qpairs, made_ns=made_ns)
            self.controller = controller
            with self._changed:
                self.stage = PathStage.LIVE
                self._wants_reset = ""
            subsystem.apply(self)
        attempt_count, self.attempt_count = self.attempt_count, 0
        self.failure = None
        if self.loss_count or subsystem.is_open:
            self._tell(EventKind.PATH_UP, f"after {attempt_count} attempts")
        # What happened while nobody watched.
        self.look()

    def attach(self, infos: Sequence[NamespaceInfo] | None, deadline: Deadline) -> None:
        """Bring a live association into the queue, for the first namespace; with the subsystem's lock held.

        ``infos`` is a fresh scan of its controller; without it, one is made.
        """
        controller = self.controller
        assert controller is not None, "only live paths are attached"
        if self.queue_index is not None:
            return
        if infos is None:
            infos = scan(controller, deadline=deadline)
        self.infos = {info.nsid: info for info in infos}
        self._set_ana(controller, read_ana_log(controller, deadline=deadline))
        qpairs = self._connect_io(controller, deadline)
        queue = self.subsystem.queue
        assert queue is not None, "the first namespace brings it"
        try:
            index = queue.add_controller()
            controller.attach_as(queue, index, qpairs, made_ns=SYSTEM_CLOCK.monotonic_ns())
            self.queue_index = index
        finally:
            for qpair in qpairs:
                if qpair.owner is None:
                    qpair.close()
        # An ANA group that is changing has a time limit, which the path's thread keeps.
        self.look()

    # ---- losing ----

    def _loss(self) -> str:
        """Why the association is of no more use; empty while it is."""
        controller = self.controller
        if controller is None:
            return "no association"
        if self._wants_reset:
            return self._wants_reset
        if not controller.is_alive:
            try:
                fault = controller.channel.adopted.fault if controller.channel.adopted else None
            except UsageError:
                fault = None
            return fault.text if fault is not None else "closed"
        queue = self.subsystem.queue
        if queue is None or self.queue_index is None or queue.is_closed:
            return ""
        return self._io_fault() if queue.controller_info(self.queue_index).has_fallen else ""

    def _io_fault(self) -> str:
        """What happened to the I/O queue pair that died (Base 3.3.2.4: it takes the association with it)."""
        controller, queue = self.controller, self.subsystem.queue
        assert controller is not None and queue is not None
        for index in controller.qpair_indexes:
            try:
                fault = queue.qpair(index).fault
            except KeyError:
                continue
            if fault is not None:
                return f"qpair {queue.qpair(index).qid}: {fault.text}"
        return "an I/O queue pair is dead"

    def _go_down(self, reason: str) -> None:
        """Close every connection, then say from when on lost writes may be sent again."""
        subsystem, controller = self.subsystem, self.controller
        if controller is None:
            return
        queue = subsystem.queue if self.queue_index is not None else None
        kato_ms, sent_ns, is_peer_closed = controller.kato_ms, SYSTEM_CLOCK.monotonic_ns(), False
        adopted = controller.channel.adopted
        try:
            if adopted is not None:
                sent_ns = adopted.info.keep_alive_sent_ns
                fault = adopted.fault
                is_peer_closed = fault is not None and (
                    fault.kind in _PEER_CLOSED or fault.error == -errno.ECONNRESET
                )
        except UsageError:
            pass  # closed by its user, who has a reference to it
        with self._changed:
            self.stage = PathStage.CONNECTING
            self.reason = reason
            self.loss_count += 1
            self._wants_reset = ""
        if queue is not None and self.queue_index is not None:
            queue.drop_controller(self.queue_index, fence_ns=None)
        is_stopped = self._stop(controller)
        controller.abandon()
        closed_ns = SYSTEM_CLOCK.monotonic_ns()
        options = subsystem.options
        self.fence_ns = fence_ns(
            closed_ns=closed_ns,
            keep_alive_sent_ns=sent_ns,
            kato_ms=kato_ms,
            is_traffic_based=controller.is_traffic_based,
            cqt_ms=controller.identify.cqt_ms,
            cqt_default_s=options.cqt_default_s,
            is_detected=is_stopped or (is_peer_closed and options.is_peer_close_trusted),
            wait_s=options.fence_wait_s,
        )
        if queue is not None and self.queue_index is not None:
            queue.drop_controller(self.queue_index, fence_ns=self.fence_ns)
        self._ana_limit_ns = 0
        self.attempt_count = 0
        self._lost_ns = self._next_ns = closed_ns
        log.warning("%s: connection lost: %s", self.where, reason)
        self._tell(EventKind.PATH_DOWN, reason)
        subsystem.settle()
        subsystem.notify()
        if options.ctrl_loss_tmo_s == 0:
            self._end(f"{reason}; reconnecting is off (ctrl_loss_tmo 0)")

    def _stop(self, controller: Controller) -> bool:
        """Reset a controller that still listens: then it is known to execute nothing any more."""
        if not controller.is_alive:
            return False
        try:
            controller.reset(Deadline.after(RESET_TIMEOUT_S))
        except KvdevError as error:
            log.info("%s: reset: %s", self.where, error)
            return False
        return True

    def _end(self, reason: str) -> None:
        with self._changed:
            self.stage = PathStage.ENDED
            self.reason = reason
        log.error("%s: given up: %s", self.where, reason)
        self._tell(EventKind.PATH_ENDED, reason)
        self.subsystem.settle()
        self.subsystem.notify()

    # ---- events ----

    def _has_events(self) -> bool:
        controller = self.controller
        adopted = controller.channel.adopted if controller is not None else None
        try:
            return adopted is not None and adopted.info.events_pending > 0
        except UsageError:
            return False

    def _has_ana_error(self) -> bool:
        queue = self.subsystem.queue
        if queue is None or self.queue_index is None or queue.is_closed:
            return False
        return queue.controller_info(self.queue_index).has_ana_error

    def _handle_events(self) -> None:
        controller = self.controller
        assert controller is not None, "a live path has one"
        for _ in range(EVENT_COUNT_MAX):
            try:
                event = controller.take_event(deadline=Deadline.after(0))
            except KvdevError as error:
                self._give_up_on(error, "event")
                return
            if event is None:
                return
            self._handle_event(controller, event)

    def _handle_event(self, controller: Controller, event: AsyncEvent) -> None:
        limit = Deadline.after(self.subsystem.options.admin_timeout_s)
        if event.event_type == AsyncEventType.NOTICE and event.info == Notice.NAMESPACE_ATTRIBUTE:
            self._guard(self._rescan, "namespaces")
        elif event.event_type == AsyncEventType.NOTICE and event.info == Notice.ANA_CHANGE:
            self._guard(self._read_ana, "ANA log")
        elif event.event_type == AsyncEventType.NOTICE and event.info == Notice.DISCOVERY_LOG_CHANGE:
            self._tell(EventKind.DISCOVERY_CHANGED)
        elif event.event_type == AsyncEventType.IO_COMMAND_SET and event.lid == Lid.RESERVATION:
            self._tell_notices(controller, limit)
        elif event.event_type == AsyncEventType.SMART:
            try:
                warning = controller.smart_log(deadline=limit).critical_warning
            except KvdevError as error:
                self._give_up_on(error, "SMART log")
                return
            log.warning("%s: SMART: critical warning 0x%02x", self.where, warning)
            self._tell(EventKind.SMART_WARNING, f"critical warning 0x{warning:02x}")
        elif event.event_type == AsyncEventType.ERROR:
            text = f"information 0x{event.info:02x}{self._newest_error(controller, limit)}"
            log.warning("%s: the controller reports an error: %s", self.where, text)
            self._tell(EventKind.CONTROLLER_ERROR, text)
            if event.info == _PERSISTENT_INTERNAL_ERROR:
                self._wants_reset = "the controller reports a persistent internal error"

    def _newest_error(self, controller: Controller, limit: Deadline) -> str:
        """What the error log has to say; without it the event is told all the same."""
        try:
            entries = controller.error_log(deadline=limit)
        except KvdevError as error:
            log.info("%s: error log: %s", self.where, error)
            return ""
        if not entries:
            return ""
        newest = entries[0]
        return (
            f"; newest of {len(entries)} error log entries: qpair {newest.sqid} CID {newest.cid:#06x} "
            f"status {newest.status_p >> 1:#06x} nsid {newest.nsid} LBA {newest.lba}"
        )

    def _tell_notices(self, controller: Controller, limit: Deadline) -> None:
        try:
            notices = controller.reservation_notices(deadline=limit)
        except KvdevError as error:
            self._give_up_on(error, "reservation notices")
            return
        for notice in notices:
            is_known = notice.notice_type in tuple(ReservationNotice)
            text = (
                ReservationNotice(notice.notice_type).name.lower().replace("_", " ")
                if is_known
                else f"notice {notice.notice_type}"
            )
            log.warning("%s nsid %d: %s", self.where, notice.nsid, text)
            self._tell(EventKind.RESERVATION_CHANGED, text, nsid=notice.nsid)

    def _guard(self, action: object, what: str) -> None:
        assert callable(action)
        try:
            action()
        except KvdevError as error:
            self._give_up_on(error, what)

    def _give_up_on(self, error: KvdevError, what: str) -> None:
        """A log or a scan that cannot be had leaves us with wrong ideas: start anew."""
        if self.controller is not None and self.controller.is_alive:
            self._wants_reset = f"{what}: {error}"

    def _rescan(self) -> None:
        """All namespaces: the list of changed ones says only that something has (Base 5.1.12.1.5)."""
        controller, subsystem = self.controller, self.subsystem
        assert controller is not None, "a live path has one"
        if subsystem.queue is None:
            return
        limit = Deadline.after(subsystem.options.admin_timeout_s)
        infos, ana = self._survey(controller, limit)
        with subsystem.lock:
            added = sorted(set(infos) - set(self.infos)) if self.infos else []
            self.infos = infos
            self._set_ana(controller, ana)
            subsystem.apply(self)
        for nsid in added:
            self._tell(EventKind.NAMESPACE_ADDED, nsid=nsid)

    def _read_ana(self) -> None:
        controller, subsystem = self.controller, self.subsystem
        assert controller is not None, "a live path has one"
        if subsystem.queue is None:
            return
        limit = Deadline.after(subsystem.options.admin_timeout_s)
        ana = read_ana_log(controller, deadline=limit)
        with subsystem.lock:
            before = self.ana
            self._set_ana(controller, ana)
            subsystem.apply(self)
        if ana is not None and (before is None or before.change_count != ana.change_count):
            groups = ", ".join(f"group {group.anagrpid} {group.state.name}" for group in ana.groups[:8])
            self._tell(EventKind.ANA_CHANGED, groups)

    def _set_ana(self, controller: Controller, ana: AnaLog | None) -> None:
        self.ana = ana
        if ana is None or not is_changing(ana):
            self._ana_limit_ns = 0
        elif not self._ana_limit_ns:
            # Twice ANATT, as hosts do: the controller has its own timer.
            limit_s = 2 * max(1, controller.identify.anatt_s)
            self._ana_limit_ns = SYSTEM_CLOCK.monotonic_ns() + limit_s * NS_PER_S

    def _tell(self, kind: EventKind, text: str = "", *, nsid: int = 0) -> None:
        self.subsystem.events.put(HostEvent(kind, self.where, nsid, text))


def read_ana_log(controller: Controller, *, deadline: Deadline) -> AnaLog | None:
    """The ANA log, checked; None where the controller has none.

    Raises ProtocolError when it breaks the format, DeadlineError when it changes too fast to be read.
    """
    if not controller.has_ana:
        return None
    identify = controller.identify
    size_bytes = ana_log_size_bytes(nanagrpid=identify.nanagrpid, nn=identify.mnan or identify.nn)
    if not identify.lpa & LPA_EXTENDED:
        size_bytes = min(size_bytes, LOG_CHUNK_SIZE_BYTES)
    for _ in range(3):
        data = controller.log_page(Lid.ANA, size_bytes, deadline=deadline)
        head = data[:8]
        ana = controller.channel.parse(
            lambda untrusted: AnaLog.parse(untrusted, anagrpmax=identify.anagrpmax), data
        )
        if (
            size_bytes <= LOG_CHUNK_SIZE_BYTES
            or controller.log_page(Lid.ANA, 16, deadline=deadline)[:8] == head
        ):
            return ana
    raise DeadlineError(
        f"{controller.where}: ANA log: it changed under three readings",
        operation="ANA log",
        elapsed_ms=deadline.elapsed_ms(),
        trid=str(controller.address),
    )
