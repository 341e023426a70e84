"""The reservations of one namespace: who is registered, who holds what, and what each command makes of it.

Not here: commands on the wire (``kvdev.wire.reservation``); controllers, files and I/O (``reservation_desk``).
Spec: NVM Express Base 2.3 sections 7.5 to 7.8, 8.1.24. Where 8.1.24.7 leaves a preemption of a key that nobody has
open, it is a conflict, as with Linux and SPDK.
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvdev.block.reservation import ReservationType
from kvdev.wire.log import ReservationNotice
from kvdev.wire.nvme import Status
from kvdev.wire.reservation import (
    AcquireAction,
    AcquireCommand,
    ChangePtpl,
    RegisterAction,
    RegisterCommand,
    ReleaseAction,
    ReleaseCommand,
)

HostId = uuid_module.UUID


@dataclass(frozen=True)
class Reservations:
    """Invariant: ``holder`` is a registrant and set only for the types with one holder; a reservation of an
    all-registrants type has at least one registrant."""

    registrants: Mapping[HostId, int] = field(default_factory=lambda: MappingProxyType({}))
    """Host to key."""
    rtype: ReservationType | None = None
    holder: HostId | None = None
    generation: int = 0
    is_ptpl: bool = False

    def is_holder(self, host: HostId) -> bool:
        if self.rtype is None:
            return False
        return host in self.registrants if self.rtype.is_all_registrants else host == self.holder

    def may_read(self, host: HostId) -> bool:
        return self.rtype is None or not self.rtype.keeps_readers_out or self._is_let_in(host)

    def may_write(self, host: HostId) -> bool:
        return self.rtype is None or self._is_let_in(host)

    def _is_let_in(self, host: HostId) -> bool:
        assert self.rtype is not None, "the callers ask only where there is a reservation"
        return self.is_holder(host) or (self.rtype.lets_registrants_in and host in self.registrants)


@dataclass(frozen=True)
class Outcome:
    """How a command ends: with a status other than 0 nothing has changed."""

    state: Reservations
    status: int = 0
    notices: Mapping[HostId, ReservationNotice] = field(default_factory=dict)
    """Hosts to tell; never the one that issued the command."""
    preempted: tuple[HostId, ...] = ()
    """Hosts whose commands are to be aborted (Preempt and Abort)."""


def register(
    state: Reservations, host: HostId, command: RegisterCommand, *, current_key: int, new_key: int
) -> Outcome:
    """Reservation Register (8.1.24.3, 8.1.24.4)."""
    if command.change_ptpl not in tuple(ChangePtpl) or command.action not in tuple(RegisterAction):
        return Outcome(state, Status.INVALID_FIELD)
    key = state.registrants.get(host)
    if command.action == RegisterAction.REGISTER:
        is_conflict = key is not None and key != new_key
    else:
        is_conflict = not command.ignores_existing_key and key != current_key
    if is_conflict:
        return Outcome(state, Status.RESERVATION_CONFLICT)
    changed = replace(state, generation=_next(state.generation))
    if command.change_ptpl != ChangePtpl.KEEP:
        changed = replace(changed, is_ptpl=command.change_ptpl == ChangePtpl.ON)
    if command.action != RegisterAction.UNREGISTER:
        return Outcome(replace(changed, registrants=MappingProxyType({**state.registrants, host: new_key})))
    after = _without(changed, {host})
    notices: dict[HostId, ReservationNotice] = {}
    if after.rtype is None and state.rtype in (
        ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY,
        ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS_ONLY,
    ):
        notices = dict.fromkeys(after.registrants, ReservationNotice.RESERVATION_RELEASED)
    return Outcome(after, notices=notices)


def acquire(
    state: Reservations, host: HostId, command: AcquireCommand, *, current_key: int, preempted_key: int
) -> Outcome:
    """Reservation Acquire (8.1.24.5, 8.1.24.7)."""
    if command.ignores_existing_key or command.action not in tuple(AcquireAction):
        return Outcome(state, Status.INVALID_FIELD)
    if state.registrants.get(host) != current_key:
        return Outcome(state, Status.RESERVATION_CONFLICT)
    if command.action != AcquireAction.ACQUIRE:
        return _preempt(state, host, command, preempted_key)
    rtype = _rtype(command.rtype)
    if rtype is None:
        return Outcome(state, Status.INVALID_FIELD)
    if state.rtype is None:
        return Outcome(_hold(state, host, rtype))
    if state.is_holder(host) and state.rtype is rtype:
        return Outcome(state)
    return Outcome(state, Status.RESERVATION_CONFLICT)


def _preempt(state: Reservations, host: HostId, command: AcquireCommand, key: int) -> Outcome:
    matching = {other for other, theirs in state.registrants.items() if theirs == key}
    if state.rtype is not None and state.rtype.is_all_registrants:
        takes_over = key == 0
        gone = set(state.registrants) - {host} if takes_over else matching
    else:
        takes_over = state.holder in matching
        gone = matching - {host} if takes_over else matching
    rtype = _rtype(command.rtype)
    if takes_over and rtype is None:
        return Outcome(state, Status.INVALID_FIELD)
    if not takes_over and key == 0 and state.rtype is not None and not state.rtype.is_all_registrants:
        return Outcome(state, Status.INVALID_FIELD)
    if not takes_over and not matching:
        return Outcome(state, Status.RESERVATION_CONFLICT)
    after = replace(_without(state, gone), generation=_next(state.generation))
    if takes_over:
        assert rtype is not None, "checked above"
        after = _hold(after, host, rtype)
    notices = dict.fromkeys(gone - {host}, ReservationNotice.REGISTRATION_PREEMPTED)
    if state.rtype is not None and after.rtype is not state.rtype:
        notices |= dict.fromkeys(set(after.registrants) - {host}, ReservationNotice.RESERVATION_RELEASED)
    is_abort = command.action == AcquireAction.PREEMPT_AND_ABORT
    return Outcome(after, notices=notices, preempted=tuple(gone - {host}) if is_abort else ())


def release(state: Reservations, host: HostId, command: ReleaseCommand, *, current_key: int) -> Outcome:
    """Reservation Release (8.1.24.6, 8.1.24.8)."""
    if command.ignores_existing_key or command.action not in tuple(ReleaseAction):
        return Outcome(state, Status.INVALID_FIELD)
    if state.registrants.get(host) != current_key:
        return Outcome(state, Status.RESERVATION_CONFLICT)
    others = set(state.registrants) - {host}
    if command.action == ReleaseAction.CLEAR:
        cleared = replace(
            state,
            registrants=MappingProxyType({}),
            rtype=None,
            holder=None,
            generation=_next(state.generation),
        )
        return Outcome(cleared, notices=dict.fromkeys(others, ReservationNotice.RESERVATION_PREEMPTED))
    if not state.is_holder(host):
        return Outcome(state)
    if command.rtype != state.rtype:
        return Outcome(state, Status.INVALID_FIELD)
    is_told = state.rtype not in (ReservationType.WRITE_EXCLUSIVE, ReservationType.EXCLUSIVE_ACCESS)
    notices = dict.fromkeys(others, ReservationNotice.RESERVATION_RELEASED) if is_told else {}
    return Outcome(replace(state, rtype=None, holder=None), notices=notices)


def _rtype(value: int) -> ReservationType | None:
    return ReservationType(value) if value in tuple(ReservationType) else None


def _next(generation: int) -> int:
    return (generation + 1) & 0xFFFFFFFF


def _hold(state: Reservations, host: HostId, rtype: ReservationType) -> Reservations:
    return replace(state, rtype=rtype, holder=None if rtype.is_all_registrants else host)


def _without(state: Reservations, gone: set[HostId]) -> Reservations:
    """Unregister hosts; a reservation that nobody holds any more is released with them (8.1.24.4)."""
    kept = {host: key for host, key in state.registrants.items() if host not in gone}
    is_released = state.rtype is not None and (
        not kept if state.rtype.is_all_registrants else state.holder in gone
    )
    return replace(
        state,
        registrants=MappingProxyType(kept),
        rtype=None if is_released else state.rtype,
        holder=None if is_released else state.holder,
    )
