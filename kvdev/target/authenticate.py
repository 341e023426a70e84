"""Authentication of hosts on the queues of the embedded target: Authentication Send and Receive, deadlines.

Each queue authenticates by itself (Base 2.1, 6.3). What a step computes runs on one thread of this module,
so that a large group holds up no keep alive.
Not here: the protocol (``kvdev.security.chap``); who must authenticate (``service``).
Threads: ``command`` and the rest under the service's lock; steps run without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvdev.errors import UsageError
from kvdev.native.target import CapsuleEvent, TargetCore
from kvdev.security.chap import ChapParty, ControllerChap, Counter, Credentials, OutOfTurnError, Verdict
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import read_secret
from kvdev.target.model import FileKey, TargetView
from kvdev.uri import KeySource
from kvdev.wire.auth import MESSAGE_SIZE_BYTES_MAX, AuthCommand
from kvdev.wire.nvme import STATUS_DNR, Sqe, Status

log = logging.getLogger("kvdev.target")

NS_PER_MS: Final = 1_000_000
TIMEOUT_MS_MAX: Final = 120_000
"""A transaction that takes longer than this, or than the keep alive timeout, is over (Base 2.1, 8.3.4.2)."""


@dataclass
class _QueueAuth:
    """One queue that authenticates, or may."""

    chap: ControllerChap
    where: str
    timeout_ns: int
    deadline_ns: int
    """Of the transaction under way or due; 0 for none."""
    is_admitted: bool
    is_busy: bool = False
    """A step of it is being computed."""


class Authenticator:
    """The authentications of one target; usable from its start until ``stop``."""

    def __init__(self, core: TargetCore, lock: threading.RLock) -> None:
        self._core = core
        self._lock = lock
        self._seqnums = Counter(32)
        self._queues: dict[int, _QueueAuth] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.failure_count = 0
        """Authentications that failed or were not finished in time."""

    def stop(self) -> None:
        """Let the step under way end, drop the others: their connections end with the target."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def expect(
        self,
        connection: int,
        party: ChapParty,
        credentials: Callable[[], Credentials],
        *,
        where: str,
        timeout_ms: int,
        now_ns: int,
    ) -> None:
        """A queue was connected that takes nothing else until its host is authenticated."""
        timeout_ns = min(timeout_ms, TIMEOUT_MS_MAX) * NS_PER_MS
        chap = ControllerChap(
            party, credentials, seqnums=self._seqnums, on_failure=lambda text: self._failed(where, text)
        )
        self._queues[connection] = _QueueAuth(chap, where, timeout_ns, now_ns + timeout_ns, is_admitted=False)

    def _failed(self, where: str, text: str) -> None:
        self.failure_count += 1
        log.warning("target: %s: authentication: %s", where, text)

    def forget(self, connection: int) -> None:
        self._queues.pop(connection, None)

    def expire(self, now_ns: int) -> None:
        """End the connections that did not authenticate in time; a stalled repetition is only dropped."""
        for connection, queue in list(self._queues.items()):
            if not queue.deadline_ns or now_ns < queue.deadline_ns or queue.is_busy:
                continue
            self._failed(queue.where, f"not finished within {queue.timeout_ns // NS_PER_MS} ms")
            queue.deadline_ns = 0
            if queue.is_admitted:
                queue.chap.abandon()
            else:
                del self._queues[connection]
                self._core.disconnect(connection)

    def command(self, event: CapsuleEvent, sqe: Sqe) -> None:
        """Answer an Authentication Send or Receive, at once or from the thread."""
        command = AuthCommand.from_sqe(sqe)
        queue = self._queues.get(event.connection)
        if queue is None:
            # Authentication is disabled for this host: Base 2.1, figure 749.
            self._core.complete_end(event.handle, status=Status.COMMAND_SEQUENCE_ERROR | STATUS_DNR)
            return
        size = len(event.data) if command.is_send else event.data_room
        if not command.is_protocol_known or not 0 < size == command.size_bytes <= MESSAGE_SIZE_BYTES_MAX:
            self._core.complete(event.handle, status=Status.INVALID_FIELD | STATUS_DNR)
            return
        if queue.is_busy:
            self._core.complete(event.handle, status=Status.COMMAND_SEQUENCE_ERROR | STATUS_DNR)
            return
        queue.is_busy = True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvdev-target-auth")
        self._thread.submit(self._step, queue, command, event)

    def _step(self, queue: _QueueAuth, command: AuthCommand, event: CapsuleEvent) -> None:
        message = b""
        status = 0
        try:
            if command.is_send:
                verdict = queue.chap.send(event.data)
            else:
                message, verdict = queue.chap.receive()
        except OutOfTurnError:
            status, verdict = Status.COMMAND_SEQUENCE_ERROR | STATUS_DNR, Verdict.GO_ON
        except Exception:
            log.exception("target: %s: authentication: a step could not be made", queue.where)
            status, verdict = Status.INTERNAL_ERROR | STATUS_DNR, Verdict.FAILED
        with self._lock:
            self._finish(queue, event, message[: event.data_room], status, verdict)

    def _finish(
        self, queue: _QueueAuth, event: CapsuleEvent, message: bytes, status: int, verdict: Verdict
    ) -> None:
        queue.is_busy = False
        if queue.deadline_ns == 0 and queue.chap.is_under_way:
            queue.deadline_ns = event.arrival_ns + queue.timeout_ns
        if message:
            self._core.put_data(event, message)
        if verdict is Verdict.FAILED:
            self._core.complete_end(event.handle, status=status)
        elif verdict is Verdict.AUTHENTICATED:
            log.info("target: %s: authenticated", queue.where)
            queue.is_admitted = True
            queue.deadline_ns = 0
            self._core.complete_admit(event.handle)
        else:
            self._core.complete(event.handle, status=status)


def credentials_of(view: TargetView, subnqn: str, host_nqn: str) -> Credentials:
    """The secrets of a host as its subsystem has them now, read from their files. Raises KvdevError."""
    subsystem = view.subsystem(subnqn)
    keys = subsystem.keys_of(host_nqn) if subsystem is not None else None
    if keys is None or keys.dhchap_key is None:
        raise UsageError(f"dhchap_key: {host_nqn} has none any more; nvmf_subsystem_set_keys gives it one")
    return Credentials(
        host=_read(keys.dhchap_key, "dhchap_key"),
        controller=_read(keys.dhchap_ctrlr_key, "dhchap_ctrlr_key") if keys.dhchap_ctrlr_key else None,
    )


def _read(key: FileKey, field: str) -> DhchapSecret:
    return read_secret(KeySource("file", key.path), field=f"{field} {key.name}")
