"""Reservations on a shared device, as those who use one see them: types, registrants, notices.

Not here: the commands (``kvdev.initiator``) and the rules (``kvdev.target.reservation``).
Spec: NVM Express Base 2.3 section 8.1.24.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from kvdev.clock import Deadline

KEY_MAX = 0xFFFF_FFFF_FFFF_FFFF


class ReservationType(enum.IntEnum):
    """RTYPE: whom a reservation keeps out, and who holds it."""

    WRITE_EXCLUSIVE = 1
    EXCLUSIVE_ACCESS = 2
    WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3
    EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4
    WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5
    EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6

    @property
    def keeps_readers_out(self) -> bool:
        return self in _EXCLUSIVE_ACCESS

    @property
    def lets_registrants_in(self) -> bool:
        return self >= ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY

    @property
    def is_all_registrants(self) -> bool:
        """Whether every registrant is a holder."""
        return self >= ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS

    @property
    def label(self) -> str:
        """As on the command line: ``write-exclusive-all-registrants``."""
        return self.name.lower().replace("_", "-")


_EXCLUSIVE_ACCESS = (
    ReservationType.EXCLUSIVE_ACCESS,
    ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS_ONLY,
    ReservationType.EXCLUSIVE_ACCESS_ALL_REGISTRANTS,
)


@dataclass(frozen=True)
class Registrant:
    """A host with a key on the device."""

    host_id: bytes
    key: int
    is_holder: bool
    cntlid: int | None
    """A controller it is connected to; None when it is connected to none, or the device does not say."""


@dataclass(frozen=True)
class ReservationStatus:
    """What a report says; ``reservation`` is None where none is held."""

    generation: int
    """Counts registrations, preemptions and clears."""
    reservation: ReservationType | None
    is_persistent: bool
    """Whether registrants and the reservation outlive the target (PTPL)."""
    registrants: tuple[Registrant, ...]

    def registrant(self, host_id: bytes) -> Registrant | None:
        return next((each for each in self.registrants if each.host_id == host_id), None)


class ReservationControl(Protocol):
    """What a host may do to the reservations of one device.

    Every method blocks, no longer than its deadline, and raises CommandError where the device refuses: a conflict
    (00/83h) says that the key given is not this host's, or that another host holds the reservation. Raises
    UncertainWriteError when the connection was lost under a command that changes something: ask for a report.
    """

    @property
    def host_id(self) -> bytes:
        """As whom this process is connected: HOSTID."""

    def report(self, deadline: Deadline) -> ReservationStatus:
        """Who is registered, and what is held."""

    def register(self, key: int, deadline: Deadline, *, is_persistent: bool | None = None) -> None:
        """Register this host; the same key again changes nothing. ``is_persistent`` sets PTPL for the device."""

    def replace(self, key: int, new_key: int, deadline: Deadline, *, ignores_key: bool = False) -> None:
        """Another key for this host; with ``ignores_key`` whatever it had, even none."""

    def unregister(self, key: int, deadline: Deadline, *, ignores_key: bool = False) -> None:
        """Forget this host; what it alone held is released."""

    def acquire(self, key: int, rtype: ReservationType, deadline: Deadline) -> None:
        """Take the reservation; holding it already, with the same type, is success."""

    def preempt(
        self,
        key: int,
        preempted_key: int,
        rtype: ReservationType,
        deadline: Deadline,
        *,
        aborts: bool = True,
    ) -> None:
        """Put out the hosts with a key, and take over what they held as ``rtype``.

        With ``aborts`` nothing they sent before has an effect after this returns. A ``preempted_key`` of 0 puts
        out all others where all registrants hold the reservation.
        """

    def release(self, key: int, rtype: ReservationType, deadline: Deadline) -> None:
        """Give the reservation back; without effect when this host holds none."""

    def clear(self, key: int, deadline: Deadline) -> None:
        """Release whatever is held and forget every registrant, this host's too."""
