"""Reservations against a model written straight from the tables of Base 8.1.24: several hosts, every command.

The model keeps one row per host and shares no code with the state machine; after each step access by type, the report's
contents and who is told must agree.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdev.block.reservation import ReservationType
from kvdev.target import ptpl, reservation
from kvdev.target.reservation import Outcome, Reservations
from kvdev.wire.reservation import AcquireCommand, RegisterCommand, ReleaseCommand

CONFLICT, INVALID = 0x83, 0x02
PREEMPTED_REGISTRATION, RELEASED, PREEMPTED_RESERVATION = 1, 2, 3

# Base figure 702: reservation type -> (holder reads, writes, registrant reads, writes, other reads, writes).
ACCESS = {
    0: "YYYYYY",
    1: "YYYNYN",
    2: "YYNNNN",
    3: "YYYYYN",
    4: "YYYYNN",
    5: "YYYYYN",
    6: "YYYYNN",
}


@dataclass
class Model:
    """Lists indexed by host; -1 is no key."""

    keys: list[int]
    rtype: int = 0
    holds: list[bool] = field(default_factory=list)
    generation: int = 0
    ptpl: bool = False

    def all_hold(self) -> bool:
        return self.rtype in (5, 6)

    def settle(self) -> None:
        """Who holds, after keys have changed; releases what nobody holds."""
        for host, key in enumerate(self.keys):
            self.holds[host] = self.rtype != 0 and key >= 0 and (self.all_hold() or self.holds[host])
        if not any(self.holds):
            self.rtype = 0

    def registrants(self) -> list[int]:
        return [host for host, key in enumerate(self.keys) if key >= 0]

    def register(self, host: int, action: int, ignore: bool, cptpl: int, crkey: int, nrkey: int) -> object:
        if action > 2 or cptpl == 1:
            return INVALID
        mine = self.keys[host]
        if action == 0 and mine >= 0 and mine != nrkey:
            return CONFLICT
        if action in (1, 2) and not ignore and (mine < 0 or mine != crkey):
            return CONFLICT
        self.generation += 1
        if cptpl:
            self.ptpl = cptpl == 3
        if action != 1:
            self.keys[host] = nrkey
            self.settle()
            return {}
        before = self.rtype
        self.keys[host] = -1
        self.settle()
        if before in (3, 4) and self.rtype == 0:
            return dict.fromkeys(self.registrants(), RELEASED)
        return {}

    def acquire(self, host: int, action: int, ignore: bool, rtype: int, crkey: int, prkey: int) -> object:
        if ignore or action > 2:
            return INVALID
        if self.keys[host] < 0 or self.keys[host] != crkey:
            return CONFLICT
        if action == 0:
            if not 1 <= rtype <= 6:
                return INVALID
            if self.rtype and not (self.holds[host] and self.rtype == rtype):
                return CONFLICT
            self.take(host, rtype)
            return {}
        victims = [other for other in self.registrants() if self.keys[other] == prkey]
        if self.all_hold():
            takes = prkey == 0
            victims = self.registrants() if takes else victims
        else:
            takes = any(self.holds[other] for other in victims)
            if not takes and prkey == 0 and self.rtype:
                return INVALID
        if takes and not 1 <= rtype <= 6:
            return INVALID
        if not takes and not victims:
            return CONFLICT
        if takes:
            victims = [other for other in victims if other != host]
        before = self.rtype
        for victim in victims:
            self.keys[victim] = -1
        if takes:
            self.take(host, rtype)
        else:
            self.settle()
        self.generation += 1
        told = {victim: PREEMPTED_REGISTRATION for victim in victims if victim != host}
        if before and self.rtype != before:
            told |= {other: RELEASED for other in self.registrants() if other != host}
        return told

    def take(self, host: int, rtype: int) -> None:
        self.rtype = rtype
        self.holds = [other == host for other in range(len(self.keys))]
        self.settle()

    def release(self, host: int, action: int, ignore: bool, rtype: int, crkey: int) -> object:
        if ignore or action > 1:
            return INVALID
        if self.keys[host] < 0 or self.keys[host] != crkey:
            return CONFLICT
        others = [other for other in self.registrants() if other != host]
        if action == 1:
            self.keys = [-1] * len(self.keys)
            self.settle()
            self.generation += 1
            return dict.fromkeys(others, PREEMPTED_RESERVATION)
        if not self.holds[host]:
            return {}
        if rtype != self.rtype:
            return INVALID
        before, self.rtype = self.rtype, 0
        self.settle()
        return dict.fromkeys(others, RELEASED) if before >= 3 else {}


HOST_COUNT = 4
HOSTS = [uuid.UUID(int=index + 1) for index in range(HOST_COUNT)]
hosts = st.integers(0, HOST_COUNT - 1)
keys = st.integers(0, 3)
actions = st.sampled_from([0, 0, 0, 1, 1, 2, 2, 3])
types = st.sampled_from([1, 2, 3, 4, 5, 6, 5, 6, 0, 7])
rarely = st.sampled_from([False] * 7 + [True])


class ReservationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = Reservations()
        self.model = Model(keys=[-1] * HOST_COUNT, holds=[False] * HOST_COUNT)

    def check(self, host: int, outcome: Outcome, expected: object, *, is_abort: bool = False) -> None:
        if isinstance(expected, int):
            assert outcome.status == expected and outcome.state == self.state
            assert not outcome.notices and not outcome.preempted
            return
        assert outcome.status == 0
        told = {HOSTS.index(other): int(notice) for other, notice in outcome.notices.items()}
        assert told == expected and host not in told
        assert isinstance(expected, dict)
        gone = {other for other, notice in expected.items() if notice == PREEMPTED_REGISTRATION}
        assert {HOSTS.index(other) for other in outcome.preempted} == (gone if is_abort else set())
        self.state = outcome.state

    @rule(
        host=hosts,
        action=actions,
        ignore=rarely,
        cptpl=st.sampled_from([0, 0, 0, 1, 2, 3]),
        crkey=keys,
        nrkey=keys,
    )
    def register(self, host: int, action: int, ignore: bool, cptpl: int, crkey: int, nrkey: int) -> None:
        command = RegisterCommand(action=action, ignores_existing_key=ignore, change_ptpl=cptpl)
        outcome = reservation.register(self.state, HOSTS[host], command, current_key=crkey, new_key=nrkey)
        self.check(host, outcome, self.model.register(host, action, ignore, cptpl, crkey, nrkey))

    @rule(host=hosts, action=actions, ignore=rarely, rtype=types, own=st.booleans(), crkey=keys, prkey=keys)
    def acquire(
        self, host: int, action: int, ignore: bool, rtype: int, own: bool, crkey: int, prkey: int
    ) -> None:
        if own:
            crkey = max(self.model.keys[host], 0)
        command = AcquireCommand(action=action, rtype=rtype, ignores_existing_key=ignore)
        outcome = reservation.acquire(
            self.state, HOSTS[host], command, current_key=crkey, preempted_key=prkey
        )
        expected = self.model.acquire(host, action, ignore, rtype, crkey, prkey)
        self.check(host, outcome, expected, is_abort=action == 2)

    @rule(
        host=hosts,
        action=st.sampled_from([0, 0, 0, 1, 2]),
        ignore=rarely,
        rtype=types,
        own=st.booleans(),
        crkey=keys,
    )
    def release(self, host: int, action: int, ignore: bool, rtype: int, own: bool, crkey: int) -> None:
        if own:
            crkey, rtype = max(self.model.keys[host], 0), self.model.rtype or rtype
        command = ReleaseCommand(action=action, rtype=rtype, ignores_existing_key=ignore)
        outcome = reservation.release(self.state, HOSTS[host], command, current_key=crkey)
        self.check(host, outcome, self.model.release(host, action, ignore, rtype, crkey))

    @invariant()
    def report_and_access_agree(self) -> None:
        state, model = self.state, self.model
        assert int(state.rtype or 0) == model.rtype and state.generation == model.generation
        assert state.is_ptpl == model.ptpl
        for index, host in enumerate(HOSTS):
            assert state.registrants.get(host, -1) == model.keys[index]
            assert state.is_holder(host) == model.holds[index]
            column = 0 if model.holds[index] else 2 if model.keys[index] >= 0 else 4
            rights = ACCESS[model.rtype][column : column + 2]
            assert ("Y" if state.may_read(host) else "N") + ("Y" if state.may_write(host) else "N") == rights


ReservationMachine.TestCase.settings = settings(
    max_examples=2000 if os.environ.get("KVDEV_LONG") else 30, stateful_step_count=30, deadline=None
)
TestReservations = ReservationMachine.TestCase


def test_canary_when_registrants_lose_their_rights_then_the_model_notices() -> None:
    """The table must bite: a type that treats registrants as strangers is caught."""
    host, other = HOSTS[:2]
    rtype = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY
    wrong = Reservations(registrants={host: 1, other: 2}, rtype=ReservationType.WRITE_EXCLUSIVE, holder=host)
    machine = ReservationMachine()
    machine.state = wrong
    machine.model = Model(keys=[1, 2, -1, -1], rtype=int(rtype), holds=[True, False, False, False])
    try:
        machine.report_and_access_agree()
    except AssertionError:
        return
    raise AssertionError("the wrong state went unnoticed")


def test_generation_wraps() -> None:
    state = Reservations(generation=0xFFFFFFFF)
    outcome = reservation.register(state, HOSTS[0], RegisterCommand(0), current_key=0, new_key=5)
    assert outcome.state.generation == 0


def test_saved_when_persistent_then_loads_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "ptpl.json")
    for rtype in (None, *ReservationType):
        holder = HOSTS[1] if rtype is not None and not rtype.is_all_registrants else None
        state = Reservations(
            registrants={HOSTS[0]: 0, HOSTS[1]: (1 << 64) - 1}, rtype=rtype, holder=holder, is_ptpl=True
        )
        ptpl.save(path, HOSTS[3], state)
        assert ptpl.load(path, HOSTS[3]) == state
