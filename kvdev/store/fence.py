"""Keeping other writers out of a volume's members: reservations where the devices have them, time where not.

Members hold type 5 (write exclusive, all registrants): every writer registers its key, readers need none, and
preempting a key ends its owner's writes. Two writers under one HOSTID are one registrant: only time parts them.
Not here: who may take over from whom (``lease``, ``claim``).
Spec: NVM Express Base 2.3 sections 7.5 to 7.8, 8.1.24, 9.6.2.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from collections.abc import Iterator, Sequence

from kvdev.block.device import BlockDevice
from kvdev.block.reservation import ReservationControl, ReservationStatus, ReservationType
from kvdev.clock import Deadline
from kvdev.errors import CommandError, KvdevError, UnsupportedError, UsageError

RESERVATION_TYPE = ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS
_KEY_PERSON = b"kvdev writer key"
_STATUS_CONFLICT = 0x83

log = logging.getLogger("kvdev.store")


def writer_key(host_id: bytes) -> int:
    """The reservation key of whoever writes under a HOSTID: one registrant has one key."""
    digest = hashlib.blake2b(host_id, digest_size=8, person=_KEY_PERSON).digest()
    return int.from_bytes(digest, "little") | 1


def is_conflict(error: BaseException | None) -> bool:
    """Whether a device refused a command because of another host's reservation."""
    return isinstance(error, CommandError) and (error.sct, error.sc) == (0, _STATUS_CONFLICT)


class Fence:
    """The registrations of one writer on the members of a volume; not registered until ``join``."""

    def __init__(self, members: Sequence[BlockDevice] = ()) -> None:
        self._members = list(members)
        self._controls: dict[int, ReservationControl] = {}
        self.host_id = bytes(16)
        self.key = 0

    @property
    def kind(self) -> str:
        """What keeps a writer out that lost its lease: ``reservation``, ``time``, or ``lock`` where nobody outside
        this host's locks can write."""
        if all(member.is_host_local for member in self._members):
            return "lock"
        return "reservation" if len(self._controls) == len(self._members) else "time"

    def join(self, deadline: Deadline) -> None:
        """Register with every member that has reservations, and hold type 5 there; again, it changes nothing."""
        for index, control, status in self._reports(deadline):
            self._join(self._members[index], control, status, deadline)
            self._controls[index] = control

    def _reports(self, deadline: Deadline) -> Iterator[tuple[int, ReservationControl, ReservationStatus]]:
        """The members that have reservations, each with what it says of them; the key is that of their host."""
        for index, member in enumerate(self._members):
            control = member.reservations
            if control is None:
                continue
            try:
                status = control.report(deadline)
            except UnsupportedError:
                continue
            self.host_id = control.host_id
            self.key = writer_key(self.host_id)
            yield index, control, status

    def _join(
        self, member: BlockDevice, control: ReservationControl, status: ReservationStatus, deadline: Deadline
    ) -> None:
        if status.reservation not in (None, RESERVATION_TYPE):
            holders = ", ".join(
                str(uuid.UUID(bytes=each.host_id)) for each in status.registrants if each.is_holder
            )
            raise UsageError(
                f"{member.uri}: reservation: expected none or {RESERVATION_TYPE.label}, got "
                f"{status.reservation.label} of HOSTID {holders or 'unknown'}; have it released, or clear it with "
                f"`kvdev reservation clear`"
            )
        mine = status.registrant(self.host_id)
        if mine is None:
            control.register(self.key, deadline)
        elif mine.key != self.key:
            control.replace(mine.key, self.key, deadline, ignores_key=True)
        if status.reservation is None:
            control.acquire(self.key, RESERVATION_TYPE, deadline)

    def strangers(self, deadline: Deadline) -> dict[int, tuple[BlockDevice, bytes]]:
        """Keys of other hosts that the members know: each with one that does, and its HOSTID."""
        found: dict[int, tuple[BlockDevice, bytes]] = {}
        for index, control, status in self._reports(deadline):
            for each in status.registrants:
                if each.host_id != control.host_id:
                    found.setdefault(each.key, (self._members[index], each.host_id))
        return found

    def is_joined(self, deadline: Deadline) -> bool:
        """Whether every member still knows this writer: a target that was started anew may not."""
        for control in self._controls.values():
            status = control.report(deadline)
            mine = status.registrant(self.host_id)
            if status.reservation is not RESERVATION_TYPE or mine is None or mine.key != self.key:
                return False
        return True

    def put_out(self, key: int, deadline: Deadline, *, new: Sequence[BlockDevice] = ()) -> list[BlockDevice]:
        """Preempt a key wherever it is registered; returns the members where that did not keep its owner out.

        On ``new`` members its owner had nothing to write: the reservation refuses it there as it does any stranger.
        """
        left = []
        for index, member in enumerate(self._members):
            control = self._controls.get(index)
            if control is None or key in (0, self.key):
                left.append(member)
                continue
            if any(each.key == key for each in control.report(deadline).registrants):
                control.preempt(self.key, key, RESERVATION_TYPE, deadline)
            elif member not in new:
                left.append(member)
        return left

    def leave(self, deadline: Deadline) -> None:
        """Unregister, as far as the members can be reached."""
        for control in self._controls.values():
            with contextlib.suppress(KvdevError):
                control.unregister(self.key, deadline)
        self._controls.clear()


class GuestFence(Fence):
    """For a change of the volume: registers where others hold a reservation, and takes none itself."""

    def join(self, deadline: Deadline) -> None:
        for index, control, status in self._reports(deadline):
            if status.reservation is RESERVATION_TYPE and status.registrant(self.host_id) is None:
                control.register(self.key, deadline)
                self._controls[index] = control
