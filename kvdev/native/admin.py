"""The admin thread: one C thread that owns the admin queue pairs of the process.

It keeps connections alive while Python is idle, busy or blocked, and runs admin commands for any thread.
Not here: what the commands mean (``kvdev.initiator``).
Threads: any; ``execute`` and ``take_event`` block, no longer than their deadline, without the interpreter lock.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from typing import Any

from kvdev._core import ffi, lib
from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.native.queue import (
    CommandBuffer,
    Completion,
    HostQpair,
    QpairFault,
    QpairInfo,
    check_sqe,
    completion_from_bytes,
    direction_of,
    execute_error,
    fault_from_core,
    info_from_core,
)
from kvdev.native.tls import TlsPump
from kvdev.opcode import command_name


@dataclass(frozen=True)
class AdminInfo:
    """Liveness and counters of one adopted admin queue pair."""

    is_alive: bool
    keep_alive_ms: int
    keep_alives_sent: int
    keep_alives_done: int
    keep_alive_errors: int
    keep_alive_last_ns: int
    lost_ns: int
    events_dropped: int
    aer_outstanding: int
    events_pending: int
    keep_alive_sent_ns: int
    """When the controller's timer may have been started anew for the last time."""


class AdminThread:
    """The thread and its table; one per process is enough for 256 controllers."""

    def __init__(self) -> None:
        out = ffi.new("struct kvdev_admin **")
        code = lib.kvdev_admin_create(out)
        if code:
            raise MemoryError(f"admin thread: {os.strerror(-code)}")
        self.raw: Any = ffi.gc(out[0], lib.kvdev_admin_destroy)
        self._pump: TlsPump | None = None
        self._pump_lock = threading.Lock()
        self._handles: dict[int, AdminQpair] = {}

    def adopt(self, qpair: HostQpair, *, keep_alive_ms: int) -> AdminQpair:
        """Drive a connected admin queue pair from now on.

        ``keep_alive_ms`` is the KATO: a Keep Alive goes out every half of it, and one that is not
        answered within it means that the connection is lost. 0 sends none.
        """
        if self.raw is None:
            raise UsageError("admin thread: expected a running thread, got a closed one")
        if not 0 <= keep_alive_ms <= 0xFFFFFFFF:
            raise UsageError(f"keep_alive_ms: expected 0 to {0xFFFFFFFF}, got {keep_alive_ms}")
        qpair._check_mine("adopt")
        out = ffi.new("uint32_t *")
        code = lib.kvdev_admin_adopt(self.raw, qpair.raw, keep_alive_ms, out)
        if code == -errno.ENOSPC:
            raise UsageError(
                f"admin thread: expected at most {lib.KVDEV_ADMIN_QPAIRS_MAX} controllers, got more"
            )
        if code:
            raise UsageError(f"{qpair.where}: adopt: {os.strerror(-code)}")
        qpair.owner = self
        adopted = AdminQpair(self, qpair, int(out[0]))
        self._handles[adopted.handle] = adopted
        return adopted

    def set_notice(self, fd: int) -> None:
        """An eventfd to write when a connection is lost or an event has come; −1 for none."""
        if self.raw is not None:
            lib.kvdev_admin_notice_set(self.raw, fd)

    def forget(self, handle: int) -> None:
        self._handles.pop(handle, None)

    @property
    def tls_pump(self) -> TlsPump:
        """What encrypts for the connections of this host, made on first use. Raises UnsupportedError."""
        with self._pump_lock:
            if self._pump is None:
                self._pump = TlsPump()
            return self._pump

    def close(self) -> None:
        """Stop the thread; queue pairs still adopted are given back. Closing twice does nothing."""
        if self.raw is None:
            return
        for adopted in list(self._handles.values()):
            adopted.release()
        with self._pump_lock:
            pump, self._pump = self._pump, None
        if pump is not None:
            pump.close()
        raw, self.raw = self.raw, None
        ffi.release(raw)


class AdminQpair:
    """An admin queue pair in the thread's hands."""

    def __init__(self, thread: AdminThread, qpair: HostQpair, handle: int) -> None:
        self._thread = thread
        self.qpair = qpair
        self.handle = handle
        self._is_released = False
        self._release_lock = threading.Lock()

    def _raw(self, operation: str) -> Any:
        if self._is_released or self._thread.raw is None:
            raise UsageError(
                f"{self.qpair.where}: {operation}: expected an adopted queue pair, got a released one"
            )
        return self._thread.raw

    def execute(
        self,
        sqe: bytes | bytearray | memoryview,
        *,
        data: Any = None,
        is_write: bool = False,
        deadline: Deadline,
    ) -> Completion:
        """As ``HostQpair.execute``, from any thread; several may run at once."""
        raw = self._raw("execute")
        raw_sqe = check_sqe(sqe, what=self.qpair.where)
        direction = direction_of(data, is_write=is_write)
        buffer = CommandBuffer(data, direction, what=self.qpair.where)
        cqe = ffi.new("uint8_t[16]")
        code = lib.kvdev_admin_execute(
            raw,
            self.handle,
            raw_sqe,
            buffer.pointer,
            buffer.size_bytes,
            direction,
            deadline.remaining_ns(),
            cqe,
        )
        if code:
            raise execute_error(
                code,
                None if code == -errno.ECHILD else self.fault,
                where=self.qpair.where,
                operation=command_name(raw_sqe, is_admin=True),
                elapsed_ms=deadline.elapsed_ms(),
            )
        return completion_from_bytes(bytes(ffi.buffer(cqe)))

    def set_keep_alive_ms(self, keep_alive_ms: int) -> None:
        """Use another KATO: the effective value read back, or 0 before shutdown."""
        lib.kvdev_admin_keep_alive_set(self._raw("set_keep_alive_ms"), self.handle, keep_alive_ms)

    def set_traffic_based(self, *, is_traffic_based: bool) -> None:
        """Whether any command counts as a sign of life (CTRATT.TBKAS), so that Keep Alive is sent when idle."""
        lib.kvdev_admin_traffic_based_set(self._raw("set_traffic_based"), self.handle, is_traffic_based)

    def arm_events(self, count: int) -> None:
        """Keep ``count`` Asynchronous Event Requests outstanding (at most AERL + 1 and 8)."""
        code = lib.kvdev_admin_events_arm(self._raw("arm_events"), self.handle, count)
        if code == -errno.EINVAL:
            raise UsageError(f"count: expected 1 to {lib.KVDEV_ADMIN_AER_MAX}, got {count}")
        if code:
            raise execute_error(
                code, self.fault, where=self.qpair.where, operation="arm_events", elapsed_ms=0.0
            )

    def take_event(self, *, deadline: Deadline) -> int | None:
        """The next asynchronous event's DW0; None when none came by the deadline.

        Raises what the connection was lost to when none will come any more.
        """
        out = ffi.new("uint32_t *")
        code = lib.kvdev_admin_event_take(self._raw("take_event"), self.handle, deadline.remaining_ns(), out)
        if code == 0:
            return int(out[0])
        if code == -errno.EAGAIN:
            return None
        raise execute_error(
            code,
            self.fault,
            where=self.qpair.where,
            operation="take_event",
            elapsed_ms=deadline.elapsed_ms(),
        )

    @property
    def is_alive(self) -> bool:
        return not self._is_released and self.info.is_alive

    @property
    def info(self) -> AdminInfo:
        raw = ffi.new("struct kvdev_admin_info *")
        lib.kvdev_admin_info_read(self._raw("info"), self.handle, raw)
        return AdminInfo(
            is_alive=bool(raw.is_alive),
            keep_alive_ms=int(raw.keep_alive_ms),
            keep_alives_sent=int(raw.keep_alives_sent),
            keep_alives_done=int(raw.keep_alives_done),
            keep_alive_errors=int(raw.keep_alive_errors),
            keep_alive_last_ns=int(raw.keep_alive_last_ns),
            lost_ns=int(raw.lost_ns),
            events_dropped=int(raw.events_dropped),
            aer_outstanding=int(raw.aer_outstanding),
            events_pending=int(raw.events_pending),
            keep_alive_sent_ns=int(raw.keep_alive_sent_ns),
        )

    @property
    def qpair_info(self) -> QpairInfo:
        raw = ffi.new("struct kvdev_qpair_info *")
        lib.kvdev_admin_qpair_info_read(self._raw("qpair_info"), self.handle, raw)
        return info_from_core(raw)

    @property
    def fault(self) -> QpairFault | None:
        """Why the connection was lost; None while it lives."""
        if self._is_released:
            return self.qpair.fault
        raw = ffi.new("struct kvdev_qpair_fault *")
        lib.kvdev_admin_fault_read(self._raw("fault"), self.handle, raw)
        return fault_from_core(raw)

    def release(self) -> HostQpair:
        """Take the queue pair back: keep alive ends, threads waiting on it get ConnectionLostError."""
        with self._release_lock:
            if not self._is_released:
                if self._thread.raw is not None:
                    lib.kvdev_admin_release(self._thread.raw, self.handle)
                self._thread.forget(self.handle)
                self._is_released = True
                self.qpair.owner = None
        return self.qpair

    def close(self) -> None:
        """Release the queue pair and close its connection; closing twice does nothing."""
        self.release().close()
