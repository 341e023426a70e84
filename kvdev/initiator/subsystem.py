"""A subsystem as a host uses it: its paths together, and the namespaces that are reached through them.

Not here: one path (``path``); what a change means (``change``); commands (the C queue).
Spec: NVM Express Base 8.1.1 (ANA), 8.1.2 (multipath), 5.1.13 (identity).
Threads: opening and closing from one thread; ``take_event`` and the properties from any.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvdev.clock import Deadline
from kvdev.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.initiator.change import Change, ana_path_states, compare
from kvdev.initiator.channel import sooner
from kvdev.initiator.controller import Controller, no_path_error
from kvdev.initiator.event import EventKind, EventQueue, HostEvent
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NamespaceInfo, NvmeNamespace, choose, scan
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.path import Path, PathInfo, PathStage
from kvdev.initiator.supervisor import Supervisor
from kvdev.native.admin import AdminThread
from kvdev.native.queue import HostQueue, PathState
from kvdev.uri import TcpUri

log = logging.getLogger("kvdev.initiator")

_KINDS = {
    Change.GROWN: EventKind.NAMESPACE_GROWN,
    Change.SHRUNK: EventKind.NAMESPACE_SHRUNK,
    Change.REMOVED: EventKind.NAMESPACE_REMOVED,
    Change.REPLACED: EventKind.NAMESPACE_REPLACED,
}

_T = TypeVar("_T")


class Subsystem:
    """Open from ``open`` until ``close``; its paths come and go meanwhile."""

    def __init__(
        self, uri: TcpUri, *, host: HostIdentity, options: ControllerOptions, supervisor: Supervisor
    ) -> None:
        """Used by ``open``."""
        self.uri = dataclasses.replace(uri, nsid=None)
        self.host = host
        self.options = options
        self.events = EventQueue()
        self.queue: HostQueue | None = None
        """Where its namespaces are; None until the first is opened."""
        self.lock = threading.RLock()
        """Over the table of namespaces and what each path is to them."""
        self.is_open = False
        self._supervisor = supervisor
        self._namespaces: list[NvmeNamespace] = []
        self._verdicts: dict[tuple[Path, NvmeNamespace], tuple[Change, str]] = {}
        self._failed: dict[NvmeNamespace, int] = {}
        self._identity: tuple[str, str, str] | None = None
        self._newest: Controller | None = None
        self._changed = threading.Condition()
        self.paths = [Path(self, address) for address in uri.addresses]

    @classmethod
    def open(
        cls,
        uri: TcpUri,
        *,
        host: HostIdentity,
        options: ControllerOptions,
        supervisor: Supervisor,
        deadline: Deadline,
    ) -> Subsystem:
        """Connect the first of the addresses that answers; the others are connected in the background.

        Raises what ``Controller.connect`` raises; nothing stays open then.
        """
        subsystem = cls(uri, host=host, options=options, supervisor=supervisor)
        failures: list[TransportError] = []
        for path in subsystem.paths:
            try:
                path.connect(deadline)
                break
            except TransportError as error:
                # Another path may do; a refusal by the target (CommandError) holds for all of them.
                failures.append(error)
        else:
            raise no_path_error(uri, failures)
        subsystem.is_open = True
        for path in subsystem.paths:
            supervisor.add(path)
            if not path.is_live:
                path.start()
        return subsystem

    @property
    def admin(self) -> AdminThread:
        return self._supervisor.admin

    @property
    def where(self) -> str:
        return str(self.uri)

    @property
    def controller(self) -> Controller:
        """The association of the first live path, or the last one there was."""
        for path in self.paths:
            if path.is_live and path.controller is not None:
                return path.controller
        assert self._newest is not None, "an open subsystem was connected once"
        return self._newest

    @property
    def is_ended(self) -> bool:
        """Whether no path will be connected again."""
        return all(path.stage in (PathStage.ENDED, PathStage.CLOSED) for path in self.paths)

    @property
    def fence_ns(self) -> int:
        return max(path.fence_ns for path in self.paths)

    @property
    def path_infos(self) -> list[PathInfo]:
        return [path.info for path in self.paths]

    def take_event(self, *, deadline: Deadline) -> HostEvent | None:
        """What happened next; None when nothing did by the deadline."""
        return self.events.take(deadline=deadline)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_paths(self, count: int, *, deadline: Deadline) -> bool:
        """Wait until ``count`` paths are live; whether they are."""
        with self._changed:
            while sum(path.is_live for path in self.paths) < count:
                if deadline.is_expired:
                    return False
                self._changed.wait(deadline.remaining_s())
        return True

    def live_controller(self, *, deadline: Deadline) -> Controller:
        """An association that stands; attempts that are due later are made now.

        Raises what the attempts fail with.
        """
        counts = {path: path.finished_count for path in self.paths}
        while True:
            with self._changed:
                for path in self.paths:
                    if path.is_live and path.controller is not None and path.controller.is_alive:
                        return path.controller
                waiting = [
                    path
                    for path, count in counts.items()
                    if path.stage in (PathStage.CONNECTING, PathStage.LIVE) and path.finished_count == count
                ]
                if not waiting or deadline.is_expired:
                    break
                for path in waiting:
                    path.look() if path.is_live else path.hurry()
                self._changed.wait(min(deadline.remaining_s(), 0.1))
        deadline.check("connect", trid=self.where)
        failures = [path.failure for path in self.paths if path.failure is not None]
        if failures:
            raise failures[0]
        raise ConnectError(f"{self.where}: no path: {self.paths[0].reason}", trid=str(self.uri.address))

    def ask(self, question: Callable[[Controller], _T], *, deadline: Deadline) -> _T:
        """What an association answers; one that is lost meanwhile is waited out as I/O waits it out.

        Raises ConnectionLostError or DeadlineError when no path comes back within ``fail_after_s`` or the deadline.
        """
        fail_after_s = self.options.fail_after_s
        limit = deadline if fail_after_s is None else sooner(deadline, fail_after_s)
        while True:
            controller = self.controller
            try:
                return question(controller)
            except (ConnectionLostError, DeadlineError):
                if self.is_ended or limit.is_expired:
                    raise
            with self._changed:
                for path in self.paths:
                    if path.is_live and path.controller is controller:
                        path.look()
                self._changed.wait(min(limit.remaining_s(), 0.1))

    # ---- namespaces ----

    def scan(self, *, deadline: Deadline) -> list[NamespaceInfo]:
        """Every active namespace, as the first live path has them."""
        return scan(self.live_controller(deadline=deadline), deadline=deadline)

    def open_namespace(
        self,
        nsid: int | None,
        queue: HostQueue,
        *,
        infos: Sequence[NamespaceInfo] | None = None,
        deadline: Deadline,
    ) -> NvmeNamespace:
        """An active namespace as a block device on ``queue``, through every path that has it.

        ``infos`` is a ``scan`` that is still fresh. Raises what ``namespace.choose`` raises.
        """
        controller = self.live_controller(deadline=deadline)
        if infos is None:
            infos = scan(controller, deadline=deadline)
        info = choose(infos, nsid, where=controller.where)
        self._check_queue(controller)
        with self.lock:
            if self.queue is not None and self.queue is not queue:
                raise UsageError(f"{self.where}: queue: expected the one in use, got another one")
            self._supervisor.watch_queue(queue)
            self.queue = queue
            self._attach_paths(controller, infos, deadline)
            self._refresh(controller, infos, info.nsid, deadline)
            namespace = NvmeNamespace(self, info, queue, uri=self.uri)
            self._namespaces.append(namespace)
            for path in self.paths:
                if path.is_live and path.queue_index is not None:
                    self.apply(path)
            self.settle()
        return namespace

    def _check_queue(self, controller: Controller) -> None:
        if controller.io_queue_count == 0:
            raise UnsupportedError(
                f"{controller.where}: number of queues: expected 1 or more, got none from the controller",
                feature="I/O queues",
            )

    def _attach_paths(self, scanned: Controller, infos: Sequence[NamespaceInfo], deadline: Deadline) -> None:
        """Queue pairs for the live paths that have none yet; one that fails starts anew, unless none is left."""
        failure: KvdevError | None = None
        for path in self.paths:
            if not path.is_live or path.queue_index is not None:
                continue
            try:
                path.attach(infos if path.controller is scanned else None, deadline)
            except KvdevError as error:
                failure = failure or error
                path.reset(f"I/O queue pairs: {error}")
        if failure is not None and not any(path.queue_index is not None for path in self.paths):
            raise failure

    def _refresh(
        self, scanned: Controller, infos: Sequence[NamespaceInfo], nsid: int, deadline: Deadline
    ) -> None:
        """What the paths know of a namespace that came after they were made, and whose event may be on its way."""
        for path in self.paths:
            if not path.is_live or path.controller is None:
                continue
            if path.controller is scanned:
                path.infos = {each.nsid: each for each in infos}
            elif nsid not in path.infos and path.queue_index is not None:
                try:
                    path.infos = {each.nsid: each for each in scan(path.controller, deadline=deadline)}
                except KvdevError as error:
                    path.reset(f"namespaces: {error}")

    def forget(self, namespace: NvmeNamespace) -> None:
        """A namespace is being closed."""
        with self.lock:
            if namespace in self._namespaces:
                self._namespaces.remove(namespace)
            self._failed.pop(namespace, None)
            for path in self.paths:
                self._verdicts.pop((path, namespace), None)

    def check_identity(self, path: Path, controller: Controller) -> None:
        """Every path must lead to the same subsystem, each to another controller of it."""
        self._newest = controller
        if controller.is_discovery:
            return
        identify = controller.identify
        found = (identify.subnqn, identify.sn, identify.mn)
        if self._identity is None:
            self._identity = found
        for name, expected, actual in zip(("SUBNQN", "serial", "model"), self._identity, found, strict=True):
            if expected != actual:
                raise UnsupportedError(
                    f"{path.where}: identify controller {name}: expected {expected!r} as on the other paths and "
                    f"before, got {actual!r}: it is another subsystem; correct path=",
                    feature="path",
                )
        for other in self.paths:
            if other is path or not other.is_live or other.controller is None:
                continue
            if other.controller.cntlid == controller.cntlid:
                raise UnsupportedError(
                    f"{path.where}: CNTLID: expected another one than on {other.address}, "
                    f"got 0x{controller.cntlid:04x}",
                    feature="path",
                )

    def apply(self, path: Path) -> None:
        """Take over what a live path has to say of the namespaces in use; with the lock held."""
        queue, index = self.queue, path.queue_index
        if queue is None or index is None:
            return
        nsids = [namespace.nsid for namespace in self._namespaces]
        states = dict.fromkeys(nsids, PathState.OPTIMIZED)
        if path.ana is not None:
            states = ana_path_states(path.ana, path.infos, nsids)
        told: list[HostEvent] = []
        for namespace in self._namespaces:
            verdict = self._judge(path, namespace, told)
            is_bad = verdict in (Change.REMOVED, Change.REPLACED)
            state = PathState.UNUSABLE if is_bad else states[namespace.nsid]
            queue.set_path(namespace.device_index, index, state)
        self.settle()
        # Whoever hears of it finds it done.
        for event in told:
            self.events.put(event)

    def _judge(self, path: Path, namespace: NvmeNamespace, told: list[HostEvent]) -> Change:
        """What the path's last scan says of one namespace; news of it is added to ``told``."""
        found = path.infos.get(namespace.nsid)
        change, text = compare(namespace.info, found, has_other_paths=len(self.paths) > 1)
        before = self._verdicts.get((path, namespace))
        self._verdicts[path, namespace] = (change, text)
        if change in (Change.GROWN, Change.SHRUNK):
            assert found is not None, "it was compared"
            namespace.resize(found)
        if change is not Change.NONE and before != (change, text):
            log.warning("%s nsid %d: %s: %s", path.where, namespace.nsid, change.value, text)
            told.append(HostEvent(_KINDS[change], path.where, namespace.nsid, text))
        return change

    def settle(self) -> None:
        """Fail the namespaces that no path has or will have, and those again that have come back."""
        with self.lock:
            queue = self.queue
            if queue is None or queue.is_closed:
                return
            for namespace in self._namespaces:
                number = self._failure_of(namespace)
                before = self._failed.get(namespace, 0)
                if number == before:
                    continue
                self._failed[namespace] = number
                queue.fail_device(namespace.device_index, number)
                if number == 0:
                    self.events.put(HostEvent(EventKind.NAMESPACE_RETURNED, self.where, namespace.nsid))

    def _failure_of(self, namespace: NvmeNamespace) -> int:
        """ENOTCONN when no path will come back, ENODEV when all that are live lack the namespace, else 0."""
        if self.is_ended:
            return errno.ENOTCONN
        live = [path for path in self.paths if path.is_live and path.queue_index is not None]
        if not live:
            # Between two associations the last verdict stands.
            return self._failed.get(namespace, 0)
        verdicts = [self._verdicts.get((path, namespace), (Change.NONE, ""))[0] for path in live]
        is_gone = all(verdict in (Change.REMOVED, Change.REPLACED) for verdict in verdicts)
        return errno.ENODEV if is_gone else 0

    # ----

    def close(self, deadline: Deadline | None = None) -> None:
        """Shut its controllers down in order and close everything; bounded by ``shutdown_timeout_s`` per path.

        Closing twice does nothing.
        """
        if not self.is_open:
            return
        self.is_open = False
        for path in self.paths:
            self._supervisor.remove(path)
        limit = deadline or Deadline.after(self.options.shutdown_timeout_s * len(self.paths))
        interrupt: BaseException | None = None
        for path in self.paths:
            try:
                path.close(limit)
            except KvdevError as error:
                log.warning("%s: close: %s", path.where, error)
            except BaseException as error:
                # Ctrl-C: the other connections are closed all the same, without waiting.
                interrupt = interrupt or error
                limit = Deadline.after(0)
        if interrupt is not None:
            raise interrupt
