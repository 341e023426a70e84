"""Reservations of a namespace, by the commands of its controllers.

Not here: the rules (the target's); the types and the contract (``kvdev.block.reservation``).
Spec: NVM Express Base 2.3 sections 7.5 to 7.8, 8.1.24. The host is its HOSTID: all its paths are one registrant.
Threads: as the namespace's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from kvdev.block.reservation import KEY_MAX, Registrant, ReservationStatus, ReservationType
from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectionLostError, ProtocolError, UnsupportedError, UsageError
from kvdev.wire.identify import ONCS_RESERVATIONS, RESCAP_PTPL
from kvdev.wire.layout import WireError
from kvdev.wire.nvme import NvmOpcode, Sqe, Status, command_error
from kvdev.wire.reservation import (
    CNTLID_NONE,
    REGISTRANT_BYTES,
    REPORT_HEADER_BYTES,
    AcquireAction,
    AcquireCommand,
    ChangePtpl,
    KeyPair,
    OneKey,
    RegisterAction,
    RegisterCommand,
    ReleaseAction,
    ReleaseCommand,
    ReportCommand,
    ReservationReport,
)

if TYPE_CHECKING:
    from kvdev.initiator.namespace import NvmeNamespace

_T = TypeVar("_T")

PATH_RETRY_COUNT: Final = 5
"""A command whose path turns out to be of no use is sent again on another so often."""
REPORT_READ_COUNT: Final = 3
"""Readings of a report that grows while it is read."""
REPORT_SIZE_BYTES: Final = 4096
_PATH_STATUSES = (
    Status.INTERNAL_PATH_ERROR,
    Status.ANA_PERSISTENT_LOSS,
    Status.ANA_INACCESSIBLE,
    Status.ANA_TRANSITION,
    Status.CONTROLLER_PATH_ERROR,
    Status.HOST_PATH_ERROR,
)
_CNTLID_DYNAMIC = 0xFFFF
_REMEDIES = {
    Status.RESERVATION_CONFLICT: "the key is not this host's, or another host holds the reservation; "
    "`kvdev reservation show` tells who does",
    Status.HOST_ID_INCONSISTENT: "the controller wants host identifiers of another size",
}


def on_some_path(action: Callable[[], _T], deadline: Deadline) -> _T:
    """Run a command again, on another path, while it fails for its path's sake and had no effect."""
    for _ in range(PATH_RETRY_COUNT):
        try:
            return action()
        except CommandError as error:
            if error.dnr or error.sct << 8 | error.sc not in _PATH_STATUSES or deadline.is_expired:
                raise
    return action()


class NamespaceReservations:
    """``kvdev.block.reservation.ReservationControl`` of one namespace."""

    def __init__(self, namespace: NvmeNamespace) -> None:
        self._namespace = namespace

    @property
    def host_id(self) -> bytes:
        return self._namespace.controller.host.host_id_bytes

    def report(self, deadline: Deadline) -> ReservationStatus:
        size_bytes = REPORT_SIZE_BYTES
        for _ in range(REPORT_READ_COUNT):
            report = self._read_report(size_bytes, deadline)
            missing = report.registrant_count - len(report.registrants)
            if not missing:
                return self._status(report)
            size_bytes = REPORT_HEADER_BYTES + (report.registrant_count + 8) * REGISTRANT_BYTES
            limit = self._namespace.max_transfer_bytes
            if size_bytes > limit:
                raise UnsupportedError(
                    f"{self._namespace.uri}: reservation report: expected at most {limit} bytes, "
                    f"got {report.registrant_count} registrants",
                    feature="number of registrants",
                )
        raise ProtocolError(
            f"{self._namespace.uri}: reservation report: it grew under {REPORT_READ_COUNT} readings"
        )

    def _read_report(self, size_bytes: int, deadline: Deadline) -> ReservationReport:
        def read() -> ReservationReport:
            data = bytearray(size_bytes)
            self._run(
                ReportCommand(size_bytes).to_sqe(nsid=self._namespace.nsid), data, deadline, is_write=False
            )
            try:
                return ReservationReport.parse(data)
            except WireError as error:
                raise WireError(
                    f"{self._namespace.uri}: {error}", field=error.field, field_offset=error.field_offset
                ) from error

        for _ in range(PATH_RETRY_COUNT):
            try:
                return read()
            except ConnectionLostError:
                # It changes nothing: asked again as soon as there is a connection.
                if deadline.is_expired:
                    raise
        return read()

    def _status(self, report: ReservationReport) -> ReservationStatus:
        if report.rtype and report.rtype not in tuple(ReservationType):
            raise ProtocolError(
                f"{self._namespace.uri}: reservation report RTYPE: expected 0 to 6, got {report.rtype}"
            )
        return ReservationStatus(
            generation=report.generation,
            reservation=ReservationType(report.rtype) if report.rtype else None,
            is_persistent=report.is_ptpl,
            registrants=tuple(
                Registrant(
                    host_id=entry.hostid,
                    key=entry.rkey,
                    is_holder=entry.is_holder,
                    cntlid=None if entry.cntlid in (CNTLID_NONE, _CNTLID_DYNAMIC) else entry.cntlid,
                )
                for entry in report.registrants
            ),
        )

    def register(self, key: int, deadline: Deadline, *, is_persistent: bool | None = None) -> None:
        if is_persistent:
            self._check_persistence()
        self._register(RegisterAction.REGISTER, 0, key, deadline, is_persistent=is_persistent)

    def replace(self, key: int, new_key: int, deadline: Deadline, *, ignores_key: bool = False) -> None:
        self._register(RegisterAction.REPLACE, key, new_key, deadline, ignores_key=ignores_key)

    def unregister(self, key: int, deadline: Deadline, *, ignores_key: bool = False) -> None:
        self._register(RegisterAction.UNREGISTER, key, 0, deadline, ignores_key=ignores_key)

    def acquire(self, key: int, rtype: ReservationType, deadline: Deadline) -> None:
        self._acquire(AcquireAction.ACQUIRE, key, 0, rtype, deadline)

    def preempt(
        self,
        key: int,
        preempted_key: int,
        rtype: ReservationType,
        deadline: Deadline,
        *,
        aborts: bool = True,
    ) -> None:
        action = AcquireAction.PREEMPT_AND_ABORT if aborts else AcquireAction.PREEMPT
        self._acquire(action, key, preempted_key, rtype, deadline)

    def release(self, key: int, rtype: ReservationType, deadline: Deadline) -> None:
        self._release(ReleaseAction.RELEASE, key, int(rtype), deadline)

    def clear(self, key: int, deadline: Deadline) -> None:
        self._release(ReleaseAction.CLEAR, key, 0, deadline)

    # ---- commands ----

    def _register(
        self,
        action: RegisterAction,
        key: int,
        new_key: int,
        deadline: Deadline,
        *,
        ignores_key: bool = False,
        is_persistent: bool | None = None,
    ) -> None:
        change = ChangePtpl.KEEP
        if is_persistent is not None:
            change = ChangePtpl.ON if is_persistent else ChangePtpl.OFF
        command = RegisterCommand(action=action, ignores_existing_key=ignores_key, change_ptpl=change)
        self._run(command.to_sqe(nsid=self._namespace.nsid), self._keys(key, new_key), deadline)

    def _acquire(
        self, action: AcquireAction, key: int, other: int, rtype: ReservationType, deadline: Deadline
    ) -> None:
        capabilities = self._namespace.info.reservation_capabilities
        if not capabilities & 1 << rtype:
            raise UnsupportedError(
                f"{self._namespace.uri}: reservation type {rtype.label}: the namespace does not have it "
                f"(RESCAP 0x{capabilities:02x})",
                feature=rtype.label,
            )
        command = AcquireCommand(action=action, rtype=rtype)
        self._run(command.to_sqe(nsid=self._namespace.nsid), self._keys(key, other), deadline)

    def _release(self, action: ReleaseAction, key: int, rtype: int, deadline: Deadline) -> None:
        self._keys(key, 0)
        command = ReleaseCommand(action=action, rtype=rtype)
        self._run(command.to_sqe(nsid=self._namespace.nsid), bytearray(OneKey(key).build()), deadline)

    def _keys(self, key: int, other: int) -> bytearray:
        for value in (key, other):
            if not 0 <= value <= KEY_MAX:
                raise UsageError(f"{self._namespace.uri}: reservation key: expected 64 bits, got {value}")
        return bytearray(KeyPair(key, other).build())

    def _check_persistence(self) -> None:
        capabilities = self._namespace.info.reservation_capabilities
        if not capabilities & RESCAP_PTPL:
            raise UnsupportedError(
                f"{self._namespace.uri}: reservation that outlives the target: the namespace cannot "
                f"(RESCAP 0x{capabilities:02x} without bit 0); on this project's and SPDK's targets it takes ptpl_file",
                feature="PTPL",
            )

    def _run(self, sqe: Sqe, data: bytearray, deadline: Deadline, *, is_write: bool = True) -> None:
        namespace = self._namespace
        namespace.check_feature(ONCS_RESERVATIONS, "reservations")
        if not namespace.info.reservation_capabilities:
            raise UnsupportedError(
                f"{namespace.uri}: reservations: the namespace has none (RESCAP 0x00)", feature="reservations"
            )

        def run() -> None:
            completion = namespace.queue.execute(
                namespace.device_index, sqe.build(), data=data, is_write=is_write, deadline=deadline
            )
            if not completion.is_success:
                raise command_error(
                    namespace.uri,
                    completion.status,
                    opcode=NvmOpcode(sqe.opc),
                    is_admin=False,
                    detail=_REMEDIES.get(Status(completion.status & 0x7FF), "")
                    if completion.status & 0x7FF in tuple(Status)
                    else "",
                )

        on_some_path(run, deadline)
