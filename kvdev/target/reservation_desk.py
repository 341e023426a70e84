"""Reservation commands of a target's controllers: state by namespace, its file, and who hears of a change.

Not here: the rules (``reservation``); sockets and threads (``service``).
Threads: none of its own; the service calls under its lock. Saving waits for the disk, as its answer must.
"""

from __future__ import annotations

import logging
import uuid as uuid_module
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvdev.errors import ProtocolError
from kvdev.target import ptpl, reservation
from kvdev.target.controller import SUCCESS, Answer, refused
from kvdev.target.reservation import Outcome, Reservations
from kvdev.wire.log import ReservationNotice
from kvdev.wire.nvme import NvmOpcode, Sqe, Status
from kvdev.wire.reservation import (
    CNTLID_NONE,
    REGISTRANT_COUNT_MAX,
    AcquireCommand,
    KeyPair,
    OneKey,
    RegisterCommand,
    RegistrantEntry,
    ReleaseCommand,
    ReportCommand,
    ReservationReport,
)

log = logging.getLogger("kvdev.target")

Place = tuple[str, int]
"""Subsystem NQN and NSID."""


@dataclass
class _Namespace:
    uuid: uuid_module.UUID
    ptpl_file: str
    state: Reservations


@dataclass(frozen=True)
class Verdict:
    """The answer to a command, which is due once the commands of ``preempted`` hosts have ended."""

    answer: Answer
    preempted: tuple[uuid_module.UUID, ...] = ()


@dataclass
class ReservationDesk:
    """Invariant: what is in a namespace's file is what was answered last, where it is to persist."""

    changed: Callable[[str, int], None]
    """Rights on a namespace are others now: let the core know."""
    notify: Callable[[str, int, uuid_module.UUID, ReservationNotice], None]
    """Tell all controllers of a host."""
    _namespaces: dict[Place, _Namespace] = field(default_factory=dict)

    def open(self, nqn: str, nsid: int, *, uuid: uuid_module.UUID, ptpl_file: str) -> None:
        """A namespace is attached. Raises PtplError when its file cannot be used."""
        state = ptpl.load(ptpl_file, uuid) if ptpl_file else Reservations()
        self._namespaces[nqn, nsid] = _Namespace(uuid, ptpl_file, state)

    def close(self, nqn: str, nsid: int) -> None:
        """A namespace is gone, and with it who was registered; its file stays."""
        self._namespaces.pop((nqn, nsid), None)

    def state(self, nqn: str, nsid: int) -> Reservations:
        found = self._namespaces.get((nqn, nsid))
        return found.state if found is not None else Reservations()

    def is_persistent(self, nqn: str, nsid: int) -> bool:
        return self.state(nqn, nsid).is_ptpl

    def set_persistent(self, nqn: str, nsid: int, is_wanted: bool) -> int:
        """The Reservation Persistence feature; returns the status."""
        found = self._namespaces[nqn, nsid]
        if is_wanted and not found.ptpl_file:
            return Status.FEATURE_NOT_CHANGEABLE
        changed = replace(found.state, is_ptpl=is_wanted)
        return 0 if self._save(found, changed) else Status.INTERNAL_ERROR

    def execute(
        self,
        nqn: str,
        sqe: Sqe,
        untrusted_data: bytes,
        *,
        host: uuid_module.UUID,
        cntlids: Callable[[], Mapping[uuid_module.UUID, int]],
    ) -> Verdict:
        """One reservation command of a host's controller; ``cntlids`` gives a controller of each connected host."""
        found = self._namespaces.get((nqn, sqe.nsid))
        if found is None:
            return Verdict(refused(Status.INVALID_NAMESPACE_OR_FORMAT))
        if sqe.opc == NvmOpcode.RESERVATION_REPORT:
            return Verdict(self._report(found, sqe, cntlids))
        try:
            outcome = self._decide(found, sqe, untrusted_data, host)
        except ProtocolError:
            return Verdict(refused(Status.DATA_SGL_LENGTH_INVALID))
        if outcome.status:
            return Verdict(refused(outcome.status))
        before = found.state
        if outcome.state is not before and not self._save(found, outcome.state):
            return Verdict(refused(Status.INTERNAL_ERROR))
        if before.rtype is not None or outcome.state.rtype is not None:
            self.changed(nqn, sqe.nsid)
        for told, notice in outcome.notices.items():
            self.notify(nqn, sqe.nsid, told, notice)
        return Verdict(SUCCESS, outcome.preempted)

    def _decide(self, found: _Namespace, sqe: Sqe, data: bytes, host: uuid_module.UUID) -> Outcome:
        state = found.state
        if sqe.opc == NvmOpcode.RESERVATION_RELEASE:
            key = OneKey.parse(data).current
            return reservation.release(state, host, ReleaseCommand.from_sqe(sqe), current_key=key)
        keys = KeyPair.parse(data)
        if sqe.opc == NvmOpcode.RESERVATION_ACQUIRE:
            acquire = AcquireCommand.from_sqe(sqe)
            return reservation.acquire(
                state, host, acquire, current_key=keys.current, preempted_key=keys.other
            )
        register = RegisterCommand.from_sqe(sqe)
        outcome = reservation.register(state, host, register, current_key=keys.current, new_key=keys.other)
        if outcome.state.is_ptpl and not found.ptpl_file:
            return Outcome(state, Status.INVALID_FIELD)  # RESCAP says that it cannot persist
        if len(outcome.state.registrants) > REGISTRANT_COUNT_MAX:
            return Outcome(state, Status.INTERNAL_ERROR)  # more than a report can count
        return outcome

    @staticmethod
    def _save(found: _Namespace, state: Reservations) -> bool:
        if found.ptpl_file and (state.is_ptpl or found.state.is_ptpl):
            try:
                ptpl.save(found.ptpl_file, found.uuid, state)
            except OSError as error:
                log.error("target: ptpl_file: %s: %s", found.ptpl_file, error.strerror or error)
                return False
        found.state = state
        return True

    @staticmethod
    def _report(found: _Namespace, sqe: Sqe, cntlids: Callable[[], Mapping[uuid_module.UUID, int]]) -> Answer:
        command = ReportCommand.from_sqe(sqe)
        if not command.is_extended:
            return refused(Status.HOST_ID_INCONSISTENT)  # over Fabrics a host identifier has 128 bits
        if sqe.sgl_len < command.byte_count:
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        state, connected = found.state, cntlids()
        report = ReservationReport(
            generation=state.generation,
            rtype=int(state.rtype or 0),
            registrant_count=len(state.registrants),
            is_ptpl=state.is_ptpl,
            registrants=tuple(
                RegistrantEntry(
                    cntlid=connected.get(host, CNTLID_NONE),
                    rcsts=int(state.is_holder(host)),
                    rkey=key,
                    hostid=host.bytes,
                )
                for host, key in state.registrants.items()
            ),
        )
        return Answer(data=report.build()[: command.byte_count])
