"""Admin commands of one controller, synchronous: properties, Identify, features, log pages.

The queue pair is the caller's while the association is made and the admin thread's afterwards; what runs
over it does not change.
Not here: in which order they are sent (``controller``); what their data means (``kvdev.wire``).
Threads: any, once the admin thread drives the queue pair; every call blocks, no longer than its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvdev.clock import Deadline
from kvdev.errors import ConnectionLostError, UnsupportedError, UsageError
from kvdev.native.admin import AdminQpair, AdminThread
from kvdev.native.queue import Completion, HostQpair
from kvdev.wire.fabrics import PROPERTY_BYTES, Property, PropertyCommand
from kvdev.wire.layout import WireError
from kvdev.wire.nvme import (
    NSID_ALL,
    FeaturesCommand,
    GetLogPageCommand,
    IdentifyCommand,
    Sqe,
    command_error,
)

_T = TypeVar("_T")

LOG_CHUNK_SIZE_BYTES = 4096
"""Log pages are read in pieces of this size, which every MDTS allows."""
LOG_SIZE_BYTES_MAX = 16 << 20


def sooner(deadline: Deadline, seconds: float) -> Deadline:
    """The earlier of a deadline and ``seconds`` from now."""
    own = Deadline.after(seconds, clock=deadline.clock)
    return own if own.expires_ns < deadline.expires_ns else deadline


class AdminChannel:
    """The admin queue pair with the commands of its queue; open until ``close``."""

    def __init__(self, qpair: HostQpair, *, timeout_s: float) -> None:
        """``timeout_s`` bounds each command; one that takes longer ends the connection."""
        self.qpair = qpair
        self.adopted: AdminQpair | None = None
        """The admin thread's side; None while the caller drives the queue pair."""
        self._timeout_s = timeout_s
        self._is_closed = False

    @property
    def where(self) -> str:
        """Peer and queue pair, for messages."""
        return self.qpair.where

    @property
    def is_alive(self) -> bool:
        if self._is_closed:
            return False
        return self.adopted.is_alive if self.adopted is not None else self.qpair.is_alive

    def adopt(self, admin: AdminThread, *, keep_alive_ms: int) -> None:
        """Hand the queue pair to the admin thread, which keeps the association alive from now on."""
        self.adopted = admin.adopt(self.qpair, keep_alive_ms=keep_alive_ms)

    def cancel(self) -> None:
        """End what another thread is waiting for on this channel; the channel is of no more use."""
        if self.adopted is not None:
            self.adopted.release()
        else:
            self.qpair.cancel()

    def close(self) -> None:
        """Close the connection; closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.adopted is not None:
            self.adopted.close()
        else:
            self.qpair.close()

    def parse(self, parser: Callable[[bytes], _T], untrusted: bytes) -> _T:
        """Parse what this controller sent; the error says which controller that was."""
        try:
            return parser(untrusted)
        except WireError as error:
            raise WireError(
                f"{self.where}: {error}", field=error.field, field_offset=error.field_offset
            ) from error

    def run_unchecked(
        self, command: Sqe, *, what: str, data: Any = None, is_write: bool = False, deadline: Deadline
    ) -> Completion:
        """Run one command and return its completion, whatever the status.

        ``data`` is sent (``is_write``) or filled and the caller's again on return.
        """
        if self._is_closed:
            raise ConnectionLostError(f"{self.where}: {what}: the controller is closed", trid=self.qpair.trid)
        deadline.check(what, trid=self.where)
        limit = sooner(deadline, self._timeout_s)
        driver = self.adopted or self.qpair
        return driver.execute(command.build(), data=data, is_write=is_write, deadline=limit)

    def run(
        self, command: Sqe, *, what: str, data: Any = None, is_write: bool = False, deadline: Deadline
    ) -> Completion:
        """Run one command; raises CommandError naming ``what`` unless it succeeds."""
        completion = self.run_unchecked(command, what=what, data=data, is_write=is_write, deadline=deadline)
        if not completion.is_success:
            raise command_error(
                f"{self.where}: {what}",
                completion.status,
                opcode=command.opc,
                is_admin=True,
                nsid=command.nsid if command.nsid != NSID_ALL and command.opc != 0x7F else 0,
            )
        return completion

    def property_get(self, prop: Property, *, deadline: Deadline) -> int:
        """Value of a controller property."""
        command = PropertyCommand(offset=prop, size_bytes=PROPERTY_BYTES[prop], is_set=False)
        completion = self.run(command.to_sqe(), what=f"property get {prop.name}", deadline=deadline)
        if PROPERTY_BYTES[prop] == 8:
            return completion.dw0 | completion.dw1 << 32
        return completion.dw0

    def property_set(self, prop: Property, value: int, *, deadline: Deadline) -> None:
        """Set a controller property."""
        command = PropertyCommand(offset=prop, size_bytes=PROPERTY_BYTES[prop], is_set=True, value=value)
        self.run(command.to_sqe(), what=f"property set {prop.name}", deadline=deadline)

    def identify(self, cns: int, *, nsid: int = 0, csi: int = 0, deadline: Deadline) -> bytes:
        """The 4096 bytes of an Identify data structure."""
        data = bytearray(IdentifyCommand.DATA_BYTES)
        command = IdentifyCommand(cns=cns, nsid=nsid, csi=csi)
        self.run(command.to_sqe(), what=f"identify CNS 0x{cns:02x}", data=data, deadline=deadline)
        return bytes(data)

    def feature_get(self, fid: int, *, deadline: Deadline) -> Completion:
        """Completion of Get Features for the current value, unchecked: features are often optional."""
        command = FeaturesCommand(fid=fid, is_set=False)
        return self.run_unchecked(command.to_sqe(), what=f"get features 0x{fid:02x}", deadline=deadline)

    def feature_set(self, fid: int, value: int, *, deadline: Deadline) -> Completion:
        """Completion of Set Features, unchecked."""
        command = FeaturesCommand(fid=fid, is_set=True, value=value)
        return self.run_unchecked(command.to_sqe(), what=f"set features 0x{fid:02x}", deadline=deadline)

    def log_page(
        self,
        lid: int,
        size_bytes: int,
        *,
        nsid: int = NSID_ALL,
        retain_event: bool = False,
        has_offset: bool,
        deadline: Deadline,
    ) -> bytes:
        """The first ``size_bytes`` (a dword multiple) of a log page, read in pieces.

        ``has_offset`` says that the controller takes an offset (LPA bit 2); without it a page longer than
        one piece cannot be read. With ``retain_event`` the event that the page reports stays pending;
        otherwise the last piece clears it.
        """
        if size_bytes <= 0 or size_bytes % 4 or size_bytes > LOG_SIZE_BYTES_MAX:
            raise UsageError(
                f"log page 0x{lid:02x}: size: expected a multiple of 4 up to {LOG_SIZE_BYTES_MAX}, got {size_bytes}"
            )
        if size_bytes > LOG_CHUNK_SIZE_BYTES and not has_offset:
            raise UnsupportedError(
                f"{self.where}: log page 0x{lid:02x}: {size_bytes} bytes need an offset, which the controller "
                f"does not take (LPA bit 2)",
                feature="log page offset",
            )
        data = bytearray(size_bytes)
        view = memoryview(data)
        for offset in range(0, size_bytes, LOG_CHUNK_SIZE_BYTES):
            piece = view[offset : offset + LOG_CHUNK_SIZE_BYTES]
            is_last = offset + len(piece) == size_bytes
            command = GetLogPageCommand(
                lid=lid,
                byte_count=len(piece),
                offset=offset,
                nsid=nsid,
                retain_event=retain_event or not is_last,
            )
            self.run(command.to_sqe(), what=f"log page 0x{lid:02x}", data=piece, deadline=deadline)
        return bytes(data)
