"""The host's NVMe/TCP queue pairs and the queue that drives them for a whole batch at a time.

Not here: what to send (``kvdev.initiator``); the admin thread (``admin``).
Trust: nothing a peer sends is used before the core has checked it; its faults become exceptions here.
Threads: a queue pair or queue belongs to one thread at a time; poll, connect and execute block, no
longer than their deadline, without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.clock import Deadline
from kvdev.errors import (
    CommandError,
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    DigestError,
    KvdevError,
    MalformedPduError,
    QueueFullError,
    SequenceError,
    TransportError,
    UncertainWriteError,
    UnsupportedError,
    UsageError,
)
from kvdev.native.io import (
    EUNCERTAIN,
    IO_DONE_DTYPE,
    IO_DTYPE,
    OPCODE_COMPARE,
    OPCODE_WRITE,
    IoArray,
    IoDoneArray,
    address_of,
)
from kvdev.native.tls import TlsHost, TlsInfo
from kvdev.native.tls import info_from_core as tls_info_from_core
from kvdev.opcode import command_name, opcode_name

POLL_COUNT_MAX = 4096
"""Completions one poll returns unless the caller says otherwise: bounds the array it allocates."""

POLL_SLICE_NS: Final = 100_000_000
"""One call into the core lasts no longer, so that an interrupt from the keyboard is served in time."""

IN_CAPSULE_SIZE_BYTES_ADMIN: Final = 8192
"""Fabrics and admin commands may always carry so much data in the capsule (TCP 3.3.1)."""

DIGEST_POLICIES: Final = {"off": 0, "prefer": 1, "require": 2}
"""How to ask for a digest: not at all, go on without when refused, fail when refused."""

DIRECTION_NONE: Final = 0
DIRECTION_C2H: Final = 1
DIRECTION_H2C: Final = 2

_FAULT_SOCKET = 1
_FAULT_CLOSED = 2
_FAULT_TIMEOUT = 3
_FAULT_PROTOCOL = 4
_FAULT_DIGEST = 5
_FAULT_REFUSED = 6
_FAULT_TERM = 7
_FAULT_LOCAL = 8
_FAULT_ASSOCIATION = 9
_FAULT_NAMES = {
    0: "none",
    _FAULT_SOCKET: "socket",
    _FAULT_CLOSED: "closed by the peer",
    _FAULT_TIMEOUT: "timeout",
    _FAULT_PROTOCOL: "protocol",
    _FAULT_DIGEST: "header digest",
    _FAULT_REFUSED: "digest refused",
    _FAULT_TERM: "terminated by the controller",
    _FAULT_LOCAL: "closed by us",
    _FAULT_ASSOCIATION: "association lost",
}
_FES_SEQUENCE = 2
_NEVER_NS = 0xFFFF_FFFF_FFFF_FFFF
_STATE_NAMES = {0: "idle", 1: "ready", 2: "dead"}
_REFUSALS = {
    1: ("device_index", "a device of this queue"),
    2: (
        "opcode",
        "flush 0x00, write 0x01, read 0x02, compare 0x05, write zeroes 0x08, deallocate 0x09, verify 0x0c "
        "or copy 0x19, as far as the device has it",
    ),
    3: ("lba_count", "1 to 65536 blocks (none for flush)"),
    4: ("slba", "a range inside the namespace"),
    5: ("byte_count", "lba_count times the block size (a multiple of 16, or 0, for deallocate)"),
    6: ("buf_addr", "an address for the payload"),
    7: ("priority", "0 to 7"),
    8: ("byte_count", "at most the device's max_transfer_bytes"),
    9: ("group_addr", "the address of an IO_GROUP_DTYPE element"),
    10: (
        "buf_addr",
        "a payload inside memory shared with the device: take it from a lease of an "
        "Arena(is_shareable=True) that was given to share()",
    ),
    11: ("byte_count", "no more deallocate ranges than the device takes in one command"),
}


@dataclass(frozen=True)
class QpairFault:
    """Why a queue pair is dead, as the core recorded it."""

    kind: str
    error: int
    """−errno that its outstanding commands completed with."""
    fes: int
    fei: int
    field: str
    field_offset: int
    pdu_type: int
    expected: int
    actual: int
    cid: int | None
    operation: str
    is_term_sent: bool
    """The H2CTermReq left whole."""
    text: str
    """One line: what was expected and what came."""


@dataclass(frozen=True)
class QpairInfo:
    """What was negotiated, and the counters of one queue pair."""

    state: str
    qid: int
    queue_size: int
    maxh2cdata: int
    cpda: int
    has_header_digest: bool
    has_data_digest: bool
    sqhd: int
    local_address: str
    peer_address: str
    outstanding_count: int
    in_flight_bytes: int
    rx_bytes: int
    tx_bytes: int
    rx_calls: int
    tx_calls: int
    rx_empty_calls: int
    commands: int
    ddgst_errors: int
    short_transfers: int


@dataclass(frozen=True)
class Completion:
    """A completion queue entry; ``status`` is the status field without the phase bit."""

    dw0: int
    dw1: int
    sqhd: int
    sqid: int
    cid: int
    status: int

    @property
    def sct(self) -> int:
        return (self.status >> 8) & 0x7

    @property
    def sc(self) -> int:
        return self.status & 0xFF

    @property
    def dnr(self) -> bool:
        return bool(self.status & 0x4000)

    @property
    def is_success(self) -> bool:
        return self.status & 0x7FF == 0

    def check(self, what: str, *, opcode: int, nsid: int = 0, slba: int = 0) -> Completion:
        """Raise CommandError naming ``what`` unless the command succeeded; returns itself."""
        if self.is_success:
            return self
        raise CommandError(
            f"{what}: expected status 0x0/0x00, got 0x{self.sct:x}/0x{self.sc:02x}",
            opcode=opcode,
            sct=self.sct,
            sc=self.sc,
            dnr=self.dnr,
            nsid=nsid,
            slba=slba,
        )


@dataclass(frozen=True)
class PairCompletion:
    """How a compare and write ended. The write is done if ``write_error`` is 0; −EUNCERTAIN: nobody knows."""

    compare_error: int
    """−errno; −EIO: the status has the verdict."""
    compare_status: int
    write_error: int
    write_status: int
    is_write_sent: bool
    """False: the write never left this host, so that it did not happen."""


def completion_from_bytes(cqe: bytes) -> Completion:
    """Decode the 16 bytes of a completion queue entry."""
    return Completion(
        dw0=int.from_bytes(cqe[0:4], "little"),
        dw1=int.from_bytes(cqe[4:8], "little"),
        sqhd=int.from_bytes(cqe[8:10], "little"),
        sqid=int.from_bytes(cqe[10:12], "little"),
        cid=int.from_bytes(cqe[12:14], "little"),
        status=int.from_bytes(cqe[14:16], "little") >> 1,
    )


def fault_from_core(raw: Any) -> QpairFault | None:
    """The fault in a ``struct kvdev_qpair_fault``; None while the queue pair is well."""
    if raw.kind == 0:
        return None
    field = ffi.string(raw.field).decode("ascii", "replace")
    operation = ffi.string(raw.operation).decode("ascii", "replace")
    if raw.opcode != 0xFFFFFFFF:
        operation = opcode_name(raw.opcode, is_admin=bool(raw.is_admin))
    return QpairFault(
        kind=_FAULT_NAMES.get(raw.kind, str(raw.kind)),
        error=int(raw.error),
        fes=int(raw.fes),
        fei=int(raw.fei),
        field=field,
        field_offset=int(raw.field_offset),
        pdu_type=int(raw.pdu_type),
        expected=int(raw.expected),
        actual=int(raw.actual),
        cid=None if raw.cid == 0xFFFFFFFF else int(raw.cid),
        operation=operation,
        is_term_sent=bool(raw.is_term_sent),
        text=_fault_text(raw, field, operation),
    )


def _fault_text(raw: Any, field: str, operation: str) -> str:
    if raw.kind == _FAULT_REFUSED:
        return (
            f"ICResp dgst+0x{raw.field_offset:x}: expected {field} enabled as required, got 0x{raw.actual:02x}; "
            f"ask with 'prefer' or 'off', or enable it on the target"
        )
    if raw.kind in (_FAULT_PROTOCOL, _FAULT_DIGEST):
        return f"{ffi.string(raw.text).decode('ascii', 'replace')}, FES 0x{raw.fes:02x}"
    if raw.kind == _FAULT_TERM:
        return f"the controller ended the connection: C2HTermReq FES 0x{raw.fes:02x} FEI 0x{raw.fei:x}"
    if raw.kind == _FAULT_SOCKET:
        return f"{operation}: {os.strerror(-raw.error)}"
    if raw.kind == _FAULT_TIMEOUT:
        return f"{operation}: no end within its time limit"
    if raw.kind == _FAULT_CLOSED:
        return f"{operation}: connection closed by the controller"
    return f"{operation}: {_FAULT_NAMES.get(raw.kind, 'dead')}"


def fault_error(fault: QpairFault, *, where: str, connecting: bool = False) -> KvdevError:
    """The exception a fault means, with ``where`` (peer and queue pair) in front of its text."""
    text = f"{where}: {fault.text}"
    if fault.kind == _FAULT_NAMES[_FAULT_DIGEST]:
        return DigestError(text, expected=fault.expected, actual=fault.actual)
    if fault.kind == _FAULT_NAMES[_FAULT_REFUSED]:
        return UnsupportedError(text, feature=fault.field)
    if fault.kind == _FAULT_NAMES[_FAULT_PROTOCOL]:
        if fault.fes == _FES_SEQUENCE:
            return SequenceError(text, state=fault.field)
        return MalformedPduError(text, field=fault.field, field_offset=fault.field_offset, fes=fault.fes)
    if fault.kind == _FAULT_NAMES[_FAULT_TIMEOUT]:
        return DeadlineError(text, operation=fault.operation, trid=where)
    if connecting:
        return ConnectError(text, errno=-fault.error, trid=where)
    return ConnectionLostError(text, errno=-fault.error, trid=where)


def execute_error(
    code: int, fault: QpairFault | None, *, where: str, operation: str, elapsed_ms: float
) -> KvdevError:
    """The exception of a synchronous command that returned ``code`` (−errno)."""
    number = -code
    if fault is not None:
        return fault_error(fault, where=where)
    if number == errno.ETIMEDOUT:
        return DeadlineError(
            f"{where}: {operation}: no completion in time",
            operation=operation,
            elapsed_ms=elapsed_ms,
            trid=where,
        )
    if number == EUNCERTAIN:
        return UncertainWriteError(
            f"{where}: {operation}: fate unknown: it was sent and the connection lost",
            errno=number,
            trid=where,
        )
    if number in (errno.ENOTCONN, errno.ECANCELED):
        return ConnectionLostError(f"{where}: {operation}: connection lost", errno=number, trid=where)
    if number == errno.EBUSY:
        return UsageError(f"{where}: {operation}: expected one thread at a time, got a second one")
    if number == errno.ECHILD:
        return UsageError(f"{where}: {operation}: expected the process that connected, got its fork")
    return TransportError(f"{where}: {operation}: {os.strerror(number)}", errno=number, trid=where)


class CommandBuffer:
    """The memory of one command's data, pinned as a C pointer while the command runs."""

    def __init__(self, data: Any, direction: int, *, what: str) -> None:
        self.pointer: Any = ffi.NULL
        self.size_bytes = 0
        self._pin: Any = None
        if data is None:
            if direction != DIRECTION_NONE:
                raise UsageError(f"{what}: data: expected a buffer, got None")
            return
        if direction == DIRECTION_NONE:
            raise UsageError(f"{what}: data: expected None for a command without data, got a buffer")
        self._pin = ffi.from_buffer("uint8_t[]", data, require_writable=direction == DIRECTION_C2H)
        self.pointer = self._pin
        self.size_bytes = len(self._pin)
        if self.size_bytes == 0 or self.size_bytes > 0xFFFFFFFF:
            raise UsageError(f"{what}: data: expected 1 byte to 4 GiB, got {self.size_bytes} bytes")


def direction_of(data: Any, *, is_write: bool) -> int:
    """Which way a command's data goes."""
    if data is None:
        return DIRECTION_NONE
    return DIRECTION_H2C if is_write else DIRECTION_C2H


def check_sqe(sqe: Any, *, what: str) -> bytes:
    raw = bytes(sqe)
    if len(raw) != 64:
        raise UsageError(f"{what}: sqe: expected 64 bytes, got {len(raw)}")
    return raw


class HostQpair:
    """One host queue pair: alive from ``connect`` until its first fault or ``close``, never again after."""

    def __init__(
        self,
        *,
        qid: int,
        queue_size: int,
        header_digest: str = "off",
        data_digest: str = "off",
        hpda: int = 0,
        maxr2t_0based: int = 0,
        rcvbuf_size_bytes: int = 0,
        sndbuf_size_bytes: int = 0,
        in_capsule_size_bytes: int = 0,
        trid: str = "",
    ) -> None:
        """Allocate a queue pair; ``queue_size`` is the SQ's entry count (``sqsize_0based`` + 1).

        Socket buffer sizes of 0 leave the kernel's automatic sizing on.
        """
        for name, policy in (("header_digest", header_digest), ("data_digest", data_digest)):
            if policy not in DIGEST_POLICIES:
                raise UsageError(f"{name}: expected off, prefer or require, got {policy!r}")
        for name, value, low, high in (
            ("qid", qid, 0, 65535),
            ("queue_size", queue_size, 2, 4096),
            ("hpda", hpda, 0, 31),
            ("maxr2t_0based", maxr2t_0based, 0, 15),
            ("rcvbuf_size_bytes", rcvbuf_size_bytes, 0, 1 << 30),
            ("sndbuf_size_bytes", sndbuf_size_bytes, 0, 1 << 30),
            ("in_capsule_size_bytes", in_capsule_size_bytes, 0, 1 << 20),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name}: expected {low} to {high}, got {value}")
        params = ffi.new(
            "struct kvdev_qpair_params *",
            {
                "qid": qid,
                "queue_size": queue_size,
                "header_digest": DIGEST_POLICIES[header_digest],
                "data_digest": DIGEST_POLICIES[data_digest],
                "hpda": hpda,
                "maxr2t_0based": maxr2t_0based,
                "rcvbuf_size_bytes": rcvbuf_size_bytes,
                "sndbuf_size_bytes": sndbuf_size_bytes,
                "in_capsule_size_bytes": in_capsule_size_bytes,
            },
        )
        out = ffi.new("struct kvdev_qpair **")
        code = lib.kvdev_qpair_create(params, out)
        if code:
            raise MemoryError(f"qpair {qid}: {os.strerror(-code)}")
        self.raw: Any = ffi.gc(out[0], lib.kvdev_qpair_destroy)
        self._life_lock = threading.Lock()
        self._tls: TlsHost | None = None
        self.qid = qid
        self.queue_size = queue_size
        self.trid = trid
        self.owner: object = None
        """The HostQueue or AdminThread that drives it; None while it is the caller's."""

    @property
    def where(self) -> str:
        return f"{self.trid or 'nvme/tcp'} qpair {self.qid}"

    def _check_mine(self, operation: str) -> None:
        if self.raw is None:
            raise UsageError(f"{self.where}: {operation}: expected an open queue pair, got a closed one")
        if self.owner is not None:
            raise UsageError(
                f"{self.where}: {operation}: expected a queue pair nobody drives, got one in use"
            )

    def set_tls(self, tls: TlsHost) -> None:
        """Let ``connect`` go over TLS with this key; to be called once, before it."""
        self._check_mine("set_tls")
        self._tls = tls
        lib.kvdev_qpair_tls_set(self.raw, tls.raw)

    @property
    def tls_info(self) -> TlsInfo | None:
        """How the TLS below it stands; None without TLS."""
        raw = ffi.new("struct kvdev_tls_info *")
        if self.raw is None or lib.kvdev_qpair_tls_read(self.raw, raw):
            return None
        return tls_info_from_core(raw)

    def connect(self, address: str, port: int, *, deadline: Deadline) -> None:
        """TCP connect and ICReq/ICResp; blocks until done or the deadline ends.

        ``address`` is numeric. Raises ConnectError, DeadlineError, a ProtocolError naming the field, or
        UnsupportedError when a required digest is refused; the queue pair is dead after any of them.
        """
        self._check_mine("connect")
        code = lib.kvdev_qpair_connect(self.raw, address.encode("ascii"), port, deadline.remaining_ns())
        if code == 0:
            return
        fault = self.fault
        if fault is None:
            raise UsageError(
                f"{self.where}: connect to {address}:{port}: expected a numeric address and an unused "
                f"queue pair, got {os.strerror(-code)}"
            )
        raise fault_error(fault, where=self.where, connecting=True)

    def execute(
        self,
        sqe: bytes | bytearray | memoryview,
        *,
        data: Any = None,
        is_write: bool = False,
        deadline: Deadline,
    ) -> Completion:
        """Run one 64-byte command to its completion; CID, PSDT and SGL1 are filled in by the core.

        ``data`` is sent (``is_write``) or filled; it is the caller's again on return, whatever happened.
        The completion may carry an error status: see ``Completion.check``. Raises when the queue pair
        dies or the deadline ends, which kills it.
        """
        self._check_mine("execute")
        raw_sqe = check_sqe(sqe, what=self.where)
        direction = direction_of(data, is_write=is_write)
        buffer = CommandBuffer(data, direction, what=self.where)
        cqe = ffi.new("uint8_t[16]")
        code = lib.kvdev_qpair_execute(
            self.raw, raw_sqe, buffer.pointer, buffer.size_bytes, direction, deadline.remaining_ns(), cqe
        )
        if code:
            raise execute_error(
                code,
                self.fault,
                where=self.where,
                operation=command_name(raw_sqe, is_admin=self.qid == 0),
                elapsed_ms=deadline.elapsed_ms(),
            )
        return completion_from_bytes(bytes(ffi.buffer(cqe)))

    @property
    def info(self) -> QpairInfo:
        """Negotiated values and counters; a snapshot when another thread drives the queue pair."""
        raw = ffi.new("struct kvdev_qpair_info *")
        if self.raw is not None:
            lib.kvdev_qpair_info_read(self.raw, raw)
        return info_from_core(raw)

    @property
    def fault(self) -> QpairFault | None:
        """Why it is dead; None while it is well."""
        if self.raw is None:
            return None
        raw = ffi.new("struct kvdev_qpair_fault *")
        lib.kvdev_qpair_fault_read(self.raw, raw)
        return fault_from_core(raw)

    @property
    def is_alive(self) -> bool:
        return self.raw is not None and self.info.state == "ready"

    @property
    def local_address(self) -> str:
        return self.info.local_address

    @property
    def peer_address(self) -> str:
        return self.info.peer_address

    def join(self, admin: HostQpair) -> None:
        """Belong to the association of ``admin``: when its connection is lost this one is given up too.

        The admin connection closes only after every queue pair that joined it. To be called once.
        """
        self._check_mine("join")
        if admin.raw is None or lib.kvdev_qpair_join(self.raw, admin.raw):
            raise UsageError(f"{self.where}: join: expected an I/O queue pair and an open admin queue pair")

    def set_in_capsule_size_bytes(self, size_bytes: int) -> None:
        """In-capsule limit of I/O commands, IOCCSZ × 16 − 64, once Identify told it."""
        if not 0 <= size_bytes <= 1 << 20:
            raise UsageError(f"in_capsule_size_bytes: expected 0 to 1 MiB, got {size_bytes}")
        lib.kvdev_qpair_in_capsule_set(self.raw, size_bytes)

    def cancel(self) -> None:
        """End a ``connect`` or ``execute`` that another thread is inside, and any later one, very soon."""
        with self._life_lock:
            if self.raw is not None:
                lib.kvdev_qpair_cancel(self.raw)

    def close(self) -> None:
        """Close the connection and free the queue pair; closing twice does nothing.

        Raises UsageError while a queue or the admin thread drives it: take it back first.
        """
        if self.raw is None:
            return
        self._check_mine("close")
        with self._life_lock:
            raw, self.raw = self.raw, None
        ffi.release(raw)


def info_from_core(raw: Any) -> QpairInfo:
    return QpairInfo(
        state=_STATE_NAMES.get(raw.state, "dead"),
        qid=int(raw.qid),
        queue_size=int(raw.queue_size),
        maxh2cdata=int(raw.maxh2cdata),
        cpda=int(raw.cpda),
        has_header_digest=bool(raw.hdgst),
        has_data_digest=bool(raw.ddgst),
        sqhd=int(raw.sqhd),
        local_address=ffi.string(raw.local_address).decode(),
        peer_address=ffi.string(raw.peer_address).decode(),
        outstanding_count=int(raw.outstanding_count),
        in_flight_bytes=int(raw.in_flight_bytes),
        rx_bytes=int(raw.rx_bytes),
        tx_bytes=int(raw.tx_bytes),
        rx_calls=int(raw.rx_calls),
        tx_calls=int(raw.tx_calls),
        rx_empty_calls=int(raw.rx_empty_calls),
        commands=int(raw.commands),
        ddgst_errors=int(raw.ddgst_errors),
        short_transfers=int(raw.short_transfers),
    )


@dataclass(frozen=True)
class QueueStats:
    """Counters of one queue."""

    submitted: int
    completed: int
    failed: int
    polls: int
    sleeps: int
    pending_count: int
    in_flight_count: int
    done_count: int
    capacity_count: int
    requeued: int
    """Commands sent again after a loss, a path error or a transient status."""
    held: int
    """Lost writes that had to wait for the fence of their controller."""
    uncertain: int
    """Commands that ended with EUNCERTAIN."""


class PathPolicy(enum.Enum):
    """How a namespace with several usable controllers spreads its commands."""

    ACTIVE_PASSIVE = "active_passive"
    """One controller until it fails, or another one is better by its ANA state."""
    ROUND_ROBIN = "round_robin"
    QUEUE_DEPTH = "queue_depth"
    """Where the fewest bytes are in flight."""


class PathState(enum.IntEnum):
    """What one controller is to one namespace."""

    OPTIMIZED = 0
    NON_OPTIMIZED = 1
    UNUSABLE = 2


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What becomes of a namespace's commands whose connection is lost; see ``struct kvdev_queue_recovery``."""

    fail_after_s: float | None = None
    """Without a usable controller for so long, commands fail; None never."""
    retry_count: int = 5
    policy: PathPolicy = PathPolicy.ACTIVE_PASSIVE
    is_uncertain_reported: bool = False
    has_volatile_cache: bool = False
    is_cache_shared: bool = True


@dataclass(frozen=True)
class QueueControllerInfo:
    """One controller address as the queue sees it."""

    is_up: bool
    has_fallen: bool
    """A queue pair of it died."""
    has_ana_error: bool
    held_count: int
    fence_ns: int


class QueuePoller(Protocol):
    """A background poller as the queue that it drives knows it."""

    def close(self) -> None: ...


class HostQueue:
    """A caller-driven queue over NVMe/TCP queue pairs (``kvdev.block.IoQueue``).

    Every command accepted completes exactly once. An error of a completion: −EIO with an NVMe status,
    −ENOTCONN connection lost without effect, −EUNCERTAIN a write of unknown fate, −ETIMEDOUT its own time
    limit, −ECANCELED given up, −ENODEV the namespace is gone; ``send_ns`` 0 means that it never left this
    host, so that a write did not happen.
    """

    def __init__(
        self,
        *,
        capacity_count: int = 4096,
        window_size_bytes: int = 1 << 20,
        command_timeout_s: float = 30.0,
        spin_us: float = 20.0,
    ) -> None:
        """Allocate a queue.

        Args:
            capacity_count: commands accepted and not yet polled.
            window_size_bytes: payload in flight per queue pair; the rest waits, by priority.
            command_timeout_s: from sending to completion; over it the queue pair is killed.
            spin_us: how long a poll looks before it sleeps while little is in flight; with more than
                256 KiB it sleeps at once, which lets data gather.
        """
        if not 1 <= capacity_count <= 1 << 20:
            raise UsageError(f"capacity_count: expected 1 to {1 << 20}, got {capacity_count}")
        if not 4096 <= window_size_bytes <= 1 << 30:
            raise UsageError(f"window_size_bytes: expected 4096 to {1 << 30}, got {window_size_bytes}")
        if not 0 < command_timeout_s <= 86400:
            raise UsageError(f"command_timeout_s: expected over 0 to 86400, got {command_timeout_s}")
        if not 0 <= spin_us <= 1_000_000:
            raise UsageError(f"spin_us: expected 0 to 1000000, got {spin_us}")
        options = ffi.new(
            "struct kvdev_queue_options *",
            {
                "capacity": capacity_count,
                "window_size_bytes": window_size_bytes,
                "command_timeout_ns": max(1, int(command_timeout_s * 1e9)),
                "spin_ns": max(1, int(spin_us * 1e3)),
            },
        )
        out = ffi.new("struct kvdev_queue **")
        code = lib.kvdev_queue_create(options, out)
        if code:
            raise MemoryError(f"queue: {os.strerror(-code)}")
        self._raw: Any = ffi.gc(out[0], lib.kvdev_queue_destroy)
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._capacity_count = capacity_count
        self._qpairs: dict[int, HostQpair] = {}
        self._attendants: dict[int, Callable[[], None]] = {}
        self._qpairs_of: dict[int, list[int]] = {}
        self._poller: QueuePoller | None = None
        # The call under ``lock`` and its payload: kept here, so that they outlive the frame of a caller that an
        # interrupt unwinds, however often it is interrupted, until the core has given them back.
        self._call = ffi.new("struct kvdev_queue_call *")
        self._call_data: tuple[Any, ...] = ()
        self._count_out = ffi.new("size_t *")

    def _check(self, code: int, operation: str) -> None:
        if code == 0:
            return
        number = -code
        if number == errno.EBUSY and self._poller is not None:
            raise UsageError(
                f"queue: {operation}: expected a queue that its caller drives, got one with a background poller; "
                f"use one of the poller's channels"
            )
        if number == errno.EBUSY:
            raise UsageError(f"queue: {operation}: expected one thread at a time, got a second one")
        if number == errno.EAGAIN:
            raise QueueFullError(
                f"queue: {operation}: expected room, got {self.outstanding_count} of "
                f"{self._capacity_count} commands outstanding; poll first"
            )
        if number == errno.ENOSPC:
            raise UsageError(f"queue: {operation}: the table is full")
        raise UsageError(f"queue: {operation}: {os.strerror(number)}")

    def _check_usable(self, operation: str) -> Any:
        if self._raw is None:
            raise UsageError(f"queue: {operation}: expected an open queue, got a closed one")
        if os.getpid() != self._pid:
            raise UsageError(f"queue: {operation}: expected the process that made the queue, got its fork")
        return self._raw

    def add_qpair(self, qpair: HostQpair) -> int:
        """Drive a connected queue pair from now on; returns its index."""
        raw = self._check_usable("add_qpair")
        qpair._check_mine("add_qpair")
        out = ffi.new("uint32_t *")
        self._check(lib.kvdev_queue_qpair_add(raw, qpair.raw, out), "add_qpair")
        index = int(out[0])
        qpair.owner = self
        self._qpairs[index] = qpair
        return index

    def remove_qpair(self, qpair_index: int) -> HostQpair:
        """Close a queue pair and give it back; what was outstanding completes with −ENOTCONN."""
        raw = self._check_usable("remove_qpair")
        if qpair_index not in self._qpairs:
            raise UsageError(f"queue: qpair_index: expected one of this queue, got {qpair_index}")
        self._check(lib.kvdev_queue_qpair_remove(raw, qpair_index), "remove_qpair")
        qpair = self._qpairs.pop(qpair_index)
        qpair.owner = None
        return qpair

    def qpair(self, qpair_index: int) -> HostQpair:
        """The queue pair behind a completion's ``qpair_index``."""
        return self._qpairs[qpair_index]

    def add_namespace(
        self,
        *,
        nsid: int,
        block_size_bytes: int,
        block_count: int,
        qpair_indexes: Sequence[int],
        max_transfer_bytes: int = 0,
    ) -> int:
        """Make a namespace reachable through queue pairs of its controller; returns the device index.

        ``max_transfer_bytes`` 0 means no limit of the controller's.
        """
        raw = self._check_usable("add_namespace")
        if not 1 <= len(qpair_indexes) <= 16:
            raise UsageError(f"qpair_indexes: expected 1 to 16 queue pairs, got {len(qpair_indexes)}")
        for index in qpair_indexes:
            if index not in self._qpairs:
                raise UsageError(f"qpair_indexes: expected queue pairs of this queue, got {index}")
        namespace = ffi.new(
            "struct kvdev_queue_namespace *",
            {
                "nsid": nsid,
                "block_size_bytes": block_size_bytes,
                "block_count": block_count,
                "max_transfer_bytes": max_transfer_bytes,
                "qpair_count": len(qpair_indexes),
                "qpair_index": list(qpair_indexes),
            },
        )
        out = ffi.new("uint32_t *")
        self._check(lib.kvdev_queue_namespace_add(raw, namespace, out), "add_namespace")
        return int(out[0])

    def attend(self, device_index: int, attendant: Callable[[], None]) -> None:
        """Have a device with a driver looked after: called during polls, before completions are returned,
        when its connection ended or the device changed. It must not wait and must not raise."""
        if self._poller is not None:
            raise self._unattended()
        self._attendants[device_index] = attendant

    @staticmethod
    def _unattended() -> UnsupportedError:
        return UnsupportedError(
            "queue: background poller: a vhost-user device needs a caller that polls and looks after it; give it a "
            "queue, or a session, of its own",
            feature="background poller of vhost-user devices",
        )

    def take_for_poller(self, poller: QueuePoller) -> Any:
        """Used by a background poller that starts: it is closed before the queue is."""
        raw = self._check_usable("background poller")
        if self._attendants:
            raise self._unattended()
        if self._poller is not None:
            raise UsageError("queue: expected none, got a background poller already; share its channels")
        self._poller = poller
        return raw

    def leave_to_callers(self, poller: QueuePoller) -> None:
        """Used by a background poller that has ended."""
        if self._poller is poller:
            self._poller = None

    def _look_after(self) -> None:
        if self._raw is not None and self._attendants and lib.kvdev_queue_attention(self._raw):
            for attendant in list(self._attendants.values()):
                attendant()

    # ---- recovery: these may be called by any thread, also while another one polls ----

    def set_notice(self, fd: int) -> None:
        """An eventfd to write when a controller falls or meets an ANA error; −1 for none."""
        if self._raw is not None:
            lib.kvdev_queue_notice_set(self._raw, fd)

    def add_controller(self) -> int:
        """A place for the associations that follow each other with one controller address."""
        out = ffi.new("uint32_t *")
        self._check(
            lib.kvdev_queue_controller_add(self._check_usable("add_controller"), out), "add_controller"
        )
        return int(out[0])

    def remove_controller(self, controller_index: int) -> None:
        """Take it down, and out of every namespace."""
        raw = self._check_usable("remove_controller")
        self._check(lib.kvdev_queue_controller_remove(raw, controller_index), "remove_controller")
        self._give_back(controller_index)

    def raise_controller(
        self,
        controller_index: int,
        qpairs: Sequence[HostQpair],
        *,
        made_ns: int,
        has_ana: bool = False,
        retry_delays_ns: Sequence[int] = (0, 0, 0),
    ) -> list[int]:
        """Drive the connected queue pairs of a new association; returns their indexes.

        ``made_ns`` is when it was made, ``retry_delays_ns`` CRDT1 to CRDT3. A namespace uses them once
        ``set_path`` says that it is there.
        """
        raw = self._check_usable("raise_controller")
        for qpair in qpairs:
            qpair._check_mine("raise_controller")
        association = ffi.new(
            "struct kvdev_queue_association *",
            {
                "made_ns": made_ns,
                "retry_delay_ns": list(retry_delays_ns),
                "qpair_count": len(qpairs),
                "has_ana": has_ana,
            },
        )
        pointers = ffi.new("struct kvdev_qpair *[]", [qpair.raw for qpair in qpairs])
        indexes = ffi.new("uint32_t[]", len(qpairs))
        code = lib.kvdev_queue_controller_up(raw, controller_index, association, pointers, indexes)
        self._check(code, "raise_controller")
        self._qpairs_of[controller_index] = [int(index) for index in indexes]
        for index, qpair in zip(self._qpairs_of[controller_index], qpairs, strict=True):
            qpair.owner = self
            self._qpairs[index] = qpair
        return self._qpairs_of[controller_index]

    def drop_controller(self, controller_index: int, *, fence_ns: int | None) -> None:
        """Close its queue pairs, and give them back to their owner.

        What they carried goes on over other controllers, or waits; writes wait until ``fence_ns``, when
        nothing sent to the old association can take effect any more. None: not known yet, call again.
        """
        raw = self._check_usable("drop_controller")
        fence = _NEVER_NS if fence_ns is None else fence_ns
        self._check(lib.kvdev_queue_controller_down(raw, controller_index, fence), "drop_controller")
        self._give_back(controller_index)

    def _give_back(self, controller_index: int) -> None:
        for index in self._qpairs_of.pop(controller_index, ()):
            qpair = self._qpairs.pop(index, None)
            if qpair is not None:
                qpair.owner = None

    def controller_info(self, controller_index: int) -> QueueControllerInfo:
        raw = ffi.new("struct kvdev_queue_controller_info *")
        code = lib.kvdev_queue_controller_read(self._check_usable("controller_info"), controller_index, raw)
        self._check(code, "controller_info")
        return QueueControllerInfo(
            is_up=bool(raw.is_up),
            has_fallen=bool(raw.has_fallen),
            has_ana_error=bool(raw.has_ana_error),
            held_count=int(raw.held_count),
            fence_ns=int(raw.fence_ns),
        )

    def add_multipath(
        self,
        *,
        nsid: int,
        block_size_bytes: int,
        block_count: int,
        max_transfer_bytes: int = 0,
        recovery: Recovery,
    ) -> int:
        """Make a namespace that is reached through controllers; its commands wait until it has one."""
        if not 0 <= recovery.retry_count <= 255:
            raise UsageError(f"retry_count: expected 0 to 255, got {recovery.retry_count}")
        raw = self._check_usable("add_multipath")
        namespace = ffi.new(
            "struct kvdev_queue_namespace *",
            {
                "nsid": nsid,
                "block_size_bytes": block_size_bytes,
                "block_count": block_count,
                "max_transfer_bytes": max_transfer_bytes,
            },
        )
        wait_s = recovery.fail_after_s
        rules = ffi.new(
            "struct kvdev_queue_recovery *",
            {
                "fail_after_ns": _NEVER_NS if wait_s is None else int(wait_s * 1e9),
                "retry_count": recovery.retry_count,
                "policy": list(PathPolicy).index(recovery.policy),
                "is_uncertain_reported": recovery.is_uncertain_reported,
                "has_volatile_cache": recovery.has_volatile_cache,
                "is_cache_shared": recovery.is_cache_shared,
            },
        )
        out = ffi.new("uint32_t *")
        self._check(lib.kvdev_queue_multipath_add(raw, namespace, rules, out), "add_multipath")
        return int(out[0])

    def set_path(self, device_index: int, controller_index: int, state: PathState) -> None:
        """Say what a controller is to a namespace; it counts until the controller's association ends."""
        raw = self._check_usable("set_path")
        self._check(lib.kvdev_queue_path_set(raw, device_index, controller_index, int(state)), "set_path")

    def note_writes(self, device_index: int, sent_ns: int) -> None:
        """Another process of this host completed writes on the device, the first sent then; flushes cover them too."""
        raw = self._check_usable("note_writes")
        self._check(lib.kvdev_queue_writes_note(raw, device_index, sent_ns), "note_writes")

    def lost_count(self, device_index: int) -> int:
        """How often completed writes may have been lost with a controller's cache; 0 once the queue is closed."""
        return 0 if self._raw is None else int(lib.kvdev_queue_lost_count(self._raw, device_index))

    def resize_device(self, device_index: int, block_count: int) -> None:
        """The namespace has grown or shrunk; what lies beyond its end is refused from now on."""
        raw = self._check_usable("resize_device")
        self._check(lib.kvdev_queue_device_resize(raw, device_index, block_count), "resize_device")

    def fail_device(self, device_index: int, number: int) -> None:
        """Complete every command of the device with −``number`` (ENODEV); 0 ends that."""
        raw = self._check_usable("fail_device")
        self._check(lib.kvdev_queue_device_fail(raw, device_index, -number), "fail_device")

    # ----

    def remove_device(self, device_index: int) -> None:
        """Forget a device; what is pending for it completes with −ECANCELED.

        What is in flight goes on, except on a device with a driver, where it completes with −ENOTCONN.
        """
        raw = self._check_usable("remove_device")
        self._check(lib.kvdev_queue_device_remove(raw, device_index), "remove_device")
        self._attendants.pop(device_index, None)

    def is_device_alive(self, device_index: int) -> bool:
        """Whether at least one of its queue pairs is ready."""
        return bool(lib.kvdev_queue_device_is_alive(self._check_usable("is_device_alive"), device_index))

    @property
    def is_closed(self) -> bool:
        return self._raw is None

    @property
    def capacity_count(self) -> int:
        return self._capacity_count

    @property
    def outstanding_count(self) -> int:
        """Commands submitted whose completion has not been polled."""
        return 0 if self._raw is None else int(lib.kvdev_queue_outstanding(self._raw))

    def submit(self, ios: IoArray) -> None:
        """Take all commands of an ``IO_DTYPE`` array (copied), or none.

        Raises QueueFullError when they do not fit, UsageError naming the field when one is malformed.
        Nothing is sent before the next poll. Payload belongs to the queue until its completion is polled.
        """
        raw = self._check_usable("submit")
        if ios.dtype != IO_DTYPE or ios.ndim != 1:
            raise UsageError(f"ios: expected a one-dimensional IO_DTYPE array, got {ios.dtype} of {ios.ndim}")
        if not ios.flags.c_contiguous:
            # A strided view of commands is legal; 64 bytes a command are copied, never payload.
            ios = np.ascontiguousarray(ios)
        code = lib.kvdev_queue_submit(raw, ffi.cast("const struct kvdev_io *", address_of(ios)), len(ios))
        if code == -errno.EINVAL:
            raise self._refusal(ios)
        self._check(code, "submit")

    def _refusal(self, ios: IoArray) -> UsageError:
        index_out = ffi.new("size_t *")
        reason_out = ffi.new("uint32_t *")
        lib.kvdev_queue_refusal_read(self._raw, index_out, reason_out)
        index = int(index_out[0])
        field, expected = _REFUSALS.get(int(reason_out[0]), ("", "a valid command"))
        if not field:
            return UsageError(f"queue: submit: expected {expected}")
        value = int(ios[index][field])
        got = f"0x{value:x}" if field.endswith("_addr") else str(value)
        return UsageError(f"ios[{index}].{field}: expected {expected}, got {got}")

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        """Completions as an ``IO_DONE_DTYPE`` array that the caller owns.

        Returns as soon as ``min_count`` are there (0: looks once, does not wait), and whatever there is
        when the deadline ends, when nothing is outstanding any more, or at ``max_count``.
        """
        raw = self._check_usable("poll")
        wanted = min(max_count, max(min_count, 1), self._capacity_count)
        limit = max(1, min(max_count, self.outstanding_count))
        done: npt.NDArray[Any] = np.empty(limit, dtype=IO_DONE_DTYPE)
        base = address_of(done)
        count = 0
        while True:
            if self._raw is None:
                raise UsageError("queue: poll: closed by another thread meanwhile")
            remaining_ns = 0 if min_count == 0 else min(deadline.remaining_ns(), POLL_SLICE_NS)
            self._check(
                lib.kvdev_queue_poll(
                    raw,
                    ffi.cast("struct kvdev_io_done *", base + count * IO_DONE_DTYPE.itemsize),
                    limit - count,
                    max(0, wanted - count),
                    remaining_ns,
                    self._count_out,
                ),
                "poll",
            )
            count += int(self._count_out[0])
            self._look_after()
            if count >= wanted or count == limit or min_count == 0:
                break
            if lib.kvdev_queue_outstanding(raw) == 0 or deadline.is_expired:
                break
        return done[:count]

    def abandon(self) -> None:
        """Give up on everything outstanding: each completes with an error at the next poll.

        No payload is touched after this returns. Queue pairs with commands are reset; writes among those
        that were sent have an unknown fate.
        """
        self._check(lib.kvdev_queue_abandon(self._check_usable("abandon")), "abandon")
        self._look_after()

    def execute(
        self,
        device_index: int,
        sqe: bytes | bytearray | memoryview,
        *,
        data: Any = None,
        is_write: bool = False,
        deadline: Deadline,
    ) -> Completion:
        """Run one 64-byte command on a device's controller to its completion, past all pending commands.

        For what has no batch form: reservations, logs of an I/O command set. The SQE's NSID is sent as it
        is. Completions of other commands stay for the next poll. A command that does not end by the
        deadline takes its queue pair down.
        """
        raw = self._check_usable("execute")
        where = f"device {device_index}"
        raw_sqe = check_sqe(sqe, what=where)
        direction = direction_of(data, is_write=is_write)
        buffer = CommandBuffer(data, direction, what=where)

        def start(call: Any) -> int:
            return int(
                lib.kvdev_queue_call_start(
                    raw,
                    device_index,
                    raw_sqe,
                    buffer.pointer,
                    buffer.size_bytes,
                    direction,
                    deadline.remaining_ns(),
                    call,
                )
            )

        with self.lock:
            self._check(self._run_call(start, (buffer,)), f"execute on {where}")
            error, cqe = int(self._call.halves[0].error), bytes(ffi.buffer(self._call.halves[0].cqe))
        if error not in (0, -errno.EIO):  # EIO: the verdict is in the CQE's status
            raise execute_error(
                error,
                None,
                where=where,
                operation=command_name(raw_sqe, is_admin=False),
                elapsed_ms=deadline.elapsed_ms(),
            )
        return completion_from_bytes(cqe)

    def _run_call(self, start: Callable[[Any], int], data: tuple[Any, ...]) -> int:
        """Start ``_call`` and wait for it, a slice at a time; under ``lock``.

        However this ends, by an interrupt too, the core has neither the call nor ``data`` any more. Returns what
        ``start`` refused it with, or 0.
        """
        raw = self._check_usable("call")
        if self._call_data:
            self._cancel_call(raw)  # of a caller that was interrupted twice
        self._call_data = data
        ffi.buffer(self._call)[:] = bytes(ffi.sizeof("struct kvdev_queue_call"))
        try:
            code = start(self._call)
            while code == 0 and not self._is_call_done():
                if self._raw is None:
                    raise UsageError("queue: call: closed by another thread meanwhile")
                code = lib.kvdev_queue_call_wait(raw, self._call, POLL_SLICE_NS)
                if code == -errno.EAGAIN:
                    code = 0
                self._check(code, "call")
        except BaseException:
            self._cancel_call(raw)
            raise
        self._call_data = ()
        return code

    def _is_call_done(self) -> bool:
        return all(self._call.halves[index].is_done for index in range(self._call.half_count))

    def _cancel_call(self, raw: Any) -> None:
        lib.kvdev_queue_call_cancel(raw, self._call)
        self._call_data = ()

    def compare_and_write(
        self,
        device_index: int,
        *,
        slba: int,
        lba_count: int,
        expected: npt.NDArray[np.uint8],
        new: npt.NDArray[np.uint8],
        deadline: Deadline,
    ) -> PairCompletion:
        """A fused pair on one queue pair, past all pending commands; it is sent once, whatever happens to it.

        Both buffers are the caller's again on return. A pair that does not end by the deadline takes its
        queue pair down.
        """
        raw = self._check_usable("compare_and_write")
        ios = np.zeros(2, dtype=IO_DTYPE)
        ios["device_index"], ios["slba"], ios["lba_count"] = device_index, slba, lba_count
        ios["opcode"] = OPCODE_COMPARE, OPCODE_WRITE
        ios["buf_addr"] = address_of(expected), address_of(new)
        ios["byte_count"] = expected.nbytes, new.nbytes
        base = ffi.cast("const struct kvdev_io *", address_of(ios))

        def start(call: Any) -> int:
            return int(lib.kvdev_queue_pair_start(raw, base, base + 1, deadline.remaining_ns(), call))

        with self.lock:
            code = self._run_call(start, (expected, new))
            if code == -errno.EINVAL:
                raise self._refusal(ios)
            self._check(code, "compare_and_write")
            halves = self._call.halves
            first, second = (completion_from_bytes(bytes(ffi.buffer(half.cqe))) for half in halves)
            return PairCompletion(
                compare_error=int(halves[0].error),
                compare_status=first.status,
                write_error=int(halves[1].error),
                write_status=second.status,
                is_write_sent=halves[1].send_ns != 0,
            )

    def set_window_size_bytes(self, window_size_bytes: int) -> None:
        """Change the payload in flight per queue pair; takes effect with the next poll."""
        if not 4096 <= window_size_bytes <= 1 << 30:
            raise UsageError(f"window_size_bytes: expected 4096 to {1 << 30}, got {window_size_bytes}")
        lib.kvdev_queue_window_set(self._check_usable("set_window_size_bytes"), window_size_bytes)

    @property
    def stats(self) -> QueueStats:
        raw = ffi.new("struct kvdev_queue_stats *")
        lib.kvdev_queue_stats_read(self._check_usable("stats"), raw)
        return QueueStats(
            submitted=int(raw.submitted),
            completed=int(raw.completed),
            failed=int(raw.failed),
            polls=int(raw.polls),
            sleeps=int(raw.sleeps),
            pending_count=int(raw.pending_count),
            in_flight_count=int(raw.in_flight_count),
            done_count=int(raw.done_count),
            capacity_count=int(raw.capacity),
            requeued=int(raw.requeued),
            held=int(raw.held),
            uncertain=int(raw.uncertain),
        )

    def close(self) -> None:
        """Free the queue, resetting queue pairs with commands outstanding; they are the caller's again.

        A thread that waits in ``poll`` under ``lock``, as batches do, is sent away first: it looks at the
        latest after a slice of its wait.
        """
        if self._raw is None:
            return
        if self._poller is not None:
            self._poller.close()
        raw, self._raw = self._raw, None
        # In a fork the thread that holds the lock does not exist.
        with self.lock if os.getpid() == self._pid else contextlib.nullcontext():
            ffi.release(raw)
        for qpair in self._qpairs.values():
            qpair.owner = None
        self._qpairs.clear()
        self._attendants.clear()
