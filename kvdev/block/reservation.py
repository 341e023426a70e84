"""Reservations on a shared device, as those who use one see them: types, registrants, notices.

Not here: the commands (``kvdev.initiator``) and the rules (``kvdev.target.reservation``).
Spec: NVM Express Base 2.3 section 8.1.24.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
