"""The C data path of the embedded target and its block devices, typed.

Not here: what Fabrics and Admin commands mean (``kvdev.target``).
Threads: ``control_wait`` belongs to one thread; the rest may be called from any. Calls that wait do so
without the interpreter lock and no longer than their timeout.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvdev._core import ffi, lib
from kvdev.errors import CapacityError, DeadlineError, UsageError
from kvdev.native.tls import TlsListener

STAGE_SIZE_BYTES: Final = int(lib.KVDEV_TARGET_STAGE_BYTES)
IN_CAPSULE_SIZE_BYTES_MAX: Final = int(lib.KVDEV_TARGET_IN_CAPSULE_MAX)
BLOCK_SIZE_BYTES_MAX: Final = 65536
MAX_IO_SIZE_BYTES_LIMIT: Final = 16 << 20
"""Largest ``max_io_size``: the size of one buffer of the pool. Untouched buffers cost no memory."""
BUFFER_COUNT: Final = 32
"""Buffers of a poller: commands on files, or across strips, that are under way at the same time; more wait."""
EVENT_COUNT_MAX: Final = 64
HISTOGRAM_BUCKET_COUNT: Final = int(lib.KVDEV_BDEV_HISTOGRAM_BUCKETS)
NS_PER_S: Final = 1_000_000_000


class BdevBacking(enum.IntEnum):
    """What a device's bytes lie on."""

    NONE = 0
    HUGETLB = 1
    THP = 2
    DIRECT = 3
    BUFFERED = 4


@dataclass(frozen=True)
class NativeBdevInfo:
    block_size_bytes: int
    block_count: int
    strip_size_bytes: int
    backing: BdevBacking
    is_readonly: bool
    has_volatile_cache: bool


@dataclass(frozen=True)
class NativeBdevStat:
    """``struct kvdev_bdev_stat``; latencies in nanoseconds, the minimum 0 before the first operation."""

    read_bytes: int
    read_count: int
    read_ns: int
    read_ns_max: int
    read_ns_min: int
    write_bytes: int
    write_count: int
    write_ns: int
    write_ns_max: int
    write_ns_min: int
    unmap_bytes: int
    unmap_count: int
    unmap_ns: int
    unmap_ns_max: int
    unmap_ns_min: int
    flush_count: int
    error_count: int


class BdevOp(enum.IntEnum):
    """An operation of a device."""

    READ = int(lib.KVDEV_BDEV_OP_READ)
    WRITE = int(lib.KVDEV_BDEV_OP_WRITE)
    FLUSH = int(lib.KVDEV_BDEV_OP_FLUSH)
    DEALLOCATE = int(lib.KVDEV_BDEV_OP_DEALLOCATE)


class InjectionType(enum.IntEnum):
    """How an injected error shows."""

    FAILURE = int(lib.KVDEV_BDEV_INJECT_FAILURE)
    PENDING = int(lib.KVDEV_BDEV_INJECT_PENDING)
    CORRUPT = int(lib.KVDEV_BDEV_INJECT_CORRUPT)
    NOMEM = int(lib.KVDEV_BDEV_INJECT_NOMEM)
    NVME = int(lib.KVDEV_BDEV_INJECT_NVME)


@dataclass(frozen=True)
class NativeInjection:
    """``struct kvdev_bdev_injection``; a count of 0 takes the injection away."""

    type: InjectionType = InjectionType.FAILURE
    count: int = 0
    queue_depth: int = 0
    corrupt_offset: int = 0
    corrupt_value: int = 0
    sct: int = 0
    sc: int = 0


def _check(result: int, what: str) -> None:
    if result == -errno.ETIMEDOUT:
        raise DeadlineError(f"target: {what}: no end within its timeout", operation=what)
    if result == -errno.EAGAIN:  # pthread_create; nothing else here says so
        raise CapacityError(
            f"target: {what}: no thread can be started; free some memory, or raise `ulimit -u`"
        )
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)


class NativeBdev:
    """One block device of the core; open until ``close``. Whoever uses it keeps this object alive."""

    def __init__(self, pointer: Any, members: tuple[NativeBdev, ...] = ()) -> None:
        self._pointer = pointer
        self._members = members  # they must outlive a raid0
        self._lock = threading.Lock()  # an operation of this process against close

    @classmethod
    def memory(cls, *, block_size_bytes: int, block_count: int, populate: bool = False) -> NativeBdev:
        """Zeroed memory; OSError ENOMEM if the kernel has none."""
        out = ffi.new("struct kvdev_bdev **")
        flags = lib.KVDEV_BDEV_POPULATE if populate else 0
        _check(lib.kvdev_bdev_create_memory(block_size_bytes, block_count, flags, out), "memory bdev")
        return cls(out[0])

    @classmethod
    def null(cls, *, block_size_bytes: int, block_count: int) -> NativeBdev:
        out = ffi.new("struct kvdev_bdev **")
        _check(lib.kvdev_bdev_create_null(block_size_bytes, block_count, out), "null bdev")
        return cls(out[0])

    @classmethod
    def file(
        cls,
        path: str,
        *,
        block_size_bytes: int,
        block_count: int = 0,
        is_readonly: bool = False,
        is_buffered: bool = False,
        volatile_seed: int | None = None,
    ) -> NativeBdev:
        """An existing file or block device; 0 blocks takes what fits in its size.

        With ``volatile_seed`` it gets a volatile cache: what is written is lost with the process unless it was
        flushed, but for some blocks that the seed chooses.
        """
        flags = (lib.KVDEV_BDEV_READONLY if is_readonly else 0) | (
            lib.KVDEV_BDEV_BUFFERED if is_buffered else 0
        )
        out = ffi.new("struct kvdev_bdev **")
        result = lib.kvdev_bdev_create_file(os.fsencode(path), block_size_bytes, block_count, flags, out)
        _check(result, path)
        bdev = cls(out[0])
        if volatile_seed is not None:
            result = lib.kvdev_bdev_volatile_set(out[0], volatile_seed & 0xFFFF_FFFF_FFFF_FFFF)
            if result:
                bdev.close()
            _check(result, f"{path}: volatile cache")
        return bdev

    @classmethod
    def raid0(cls, members: tuple[NativeBdev, ...], *, strip_size_bytes: int) -> NativeBdev:
        out = ffi.new("struct kvdev_bdev **")
        array = ffi.new("struct kvdev_bdev *[]", [member._pointer for member in members])
        _check(lib.kvdev_bdev_create_raid0(array, len(members), strip_size_bytes, out), "raid0 bdev")
        return cls(out[0], members)

    @classmethod
    def linear(
        cls, base: NativeBdev, extents: Sequence[tuple[int, int]], *, is_readonly: bool = False
    ) -> NativeBdev:
        """Pieces (offset, length) of a base in bytes, one after the other."""
        out = ffi.new("struct kvdev_bdev **")
        pieces = ffi.new(
            "struct kvdev_bdev_extent[]", [{"offset": at, "length": size} for at, size in extents]
        )
        flags = lib.KVDEV_BDEV_READONLY if is_readonly else 0
        result = lib.kvdev_bdev_create_linear(base._pointer, pieces, len(extents), flags, out)
        _check(result, "linear bdev")
        return cls(out[0], (base,))

    @classmethod
    def filter(cls, base: NativeBdev) -> NativeBdev:
        """The base seen through delays and injected errors."""
        out = ffi.new("struct kvdev_bdev **")
        _check(lib.kvdev_bdev_create_filter(base._pointer, out), "filter bdev")
        return cls(out[0], (base,))

    @property
    def members(self) -> tuple[NativeBdev, ...]:
        """The devices this one stands on."""
        return self._members

    def set_limits(
        self, *, rw_ios: int = 0, rw_bytes: int = 0, read_bytes: int = 0, write_bytes: int = 0
    ) -> None:
        """Limits per second, 0 for none; then ``set_held`` on this device and on those above it."""
        limits = {
            "rw_ios": rw_ios,
            "rw_bytes": rw_bytes,
            "read_bytes": read_bytes,
            "write_bytes": write_bytes,
        }
        lib.kvdev_bdev_set_limits(self._pointer, ffi.new("struct kvdev_bdev_limits *", limits))

    def set_held(self, is_held: bool) -> None:
        """Whether a device below this one may hold operations back; its own limits count by themselves."""
        lib.kvdev_bdev_set_held(self._pointer, int(is_held))

    @property
    def is_held(self) -> bool:
        return bool(lib.kvdev_bdev_is_held(self._pointer))

    def set_delay(self, *, read_ns_avg: int, read_ns_p99: int, write_ns_avg: int, write_ns_p99: int) -> None:
        """Latencies of a filter."""
        delay = {
            "read_ns_avg": read_ns_avg,
            "read_ns_p99": read_ns_p99,
            "write_ns_avg": write_ns_avg,
            "write_ns_p99": write_ns_p99,
        }
        _check(lib.kvdev_bdev_set_delay(self._pointer, ffi.new("struct kvdev_bdev_delay *", delay)), "delay")

    def inject(self, op: BdevOp, injection: NativeInjection) -> None:
        """Let the next operations of a filter go wrong."""
        values = {
            "queue_depth": injection.queue_depth,
            "corrupt_offset": injection.corrupt_offset,
            "count": injection.count,
            "type": int(injection.type),
            "corrupt_value": injection.corrupt_value,
            "sct": injection.sct,
            "sc": injection.sc,
        }
        wire = ffi.new("struct kvdev_bdev_injection *", values)
        _check(lib.kvdev_bdev_inject(self._pointer, int(op), wire), "inject")

    def resume(self) -> None:
        """Let go what a filter holds as pending; ``TargetCore.release`` wakes who carries it out."""
        _check(lib.kvdev_bdev_resume(self._pointer), "resume")

    def start_histogram(self, op: BdevOp | None = None) -> None:
        """Count latencies of one operation, or of all, from zero."""
        _check(lib.kvdev_bdev_histogram_start(self._pointer, -1 if op is None else int(op)), "histogram")

    def stop_histogram(self) -> None:
        lib.kvdev_bdev_histogram_stop(self._pointer)

    def histogram(self) -> list[int]:
        """Counts of 128 buckets of one nanosecond, then of 128 for each power of two. OSError EFAULT: stopped."""
        counts = ffi.new("uint64_t[]", HISTOGRAM_BUCKET_COUNT)
        _check(lib.kvdev_bdev_histogram_read(self._pointer, counts), "histogram")
        return list(counts)

    def close(self) -> None:
        """Release it; no namespace and no raid0 may use it any more."""
        with self._lock:
            pointer, self._pointer = self._pointer, None
            if pointer is not None:
                lib.kvdev_bdev_destroy(pointer)

    def info(self) -> NativeBdevInfo:
        info = ffi.new("struct kvdev_bdev_info *")
        lib.kvdev_bdev_info_read(self._pointer, info)
        return NativeBdevInfo(
            block_size_bytes=info.block_size,
            block_count=info.block_count,
            strip_size_bytes=info.strip_size,
            backing=BdevBacking(info.backing),
            is_readonly=bool(info.is_readonly),
            has_volatile_cache=bool(info.has_volatile_cache),
        )

    def stat(self) -> NativeBdevStat:
        stat = ffi.new("struct kvdev_bdev_stat *")
        lib.kvdev_bdev_stat_read(self._pointer, stat)
        names = NativeBdevStat.__dataclass_fields__
        return NativeBdevStat(**{name: int(getattr(stat, name)) for name in names})

    def reset_stat(self) -> None:
        lib.kvdev_bdev_stat_reset(self._pointer)

    def _execute(self, op: int, offset: int, length: int, buffer: Any, flags: int = 0) -> None:
        _check(self._try(op, offset, length, buffer, flags), "bdev operation")

    def _try(self, op: int, offset: int, length: int, buffer: Any, flags: int = 0) -> int:
        with self._lock:
            if self._pointer is None:
                return -errno.EBADF
            return int(lib.kvdev_bdev_execute(self._pointer, op, flags, offset, length, buffer))

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of whole blocks; the caller waits for the disk."""
        buffer = ffi.new("uint8_t[]", length)
        self._execute(lib.KVDEV_BDEV_OP_READ, offset, length, buffer)
        return bytes(ffi.buffer(buffer))

    def write(self, offset: int, data: bytes, *, fua: bool = False) -> None:
        flags = lib.KVDEV_BDEV_FUA if fua else 0
        self._execute(
            lib.KVDEV_BDEV_OP_WRITE, offset, len(data), ffi.from_buffer("uint8_t[]", bytearray(data)), flags
        )

    def compare(self, offset: int, data: bytes) -> bool:
        buffer = ffi.from_buffer("uint8_t[]", bytearray(data))
        result = self._try(lib.KVDEV_BDEV_OP_COMPARE, offset, len(data), buffer)
        if result == -errno.EILSEQ:
            return False
        _check(result, "bdev compare")
        return True

    def write_zeroes(self, offset: int, length: int) -> None:
        self._execute(lib.KVDEV_BDEV_OP_WRITE_ZEROES, offset, length, ffi.NULL)

    def deallocate(self, offset: int, length: int) -> None:
        self._execute(lib.KVDEV_BDEV_OP_DEALLOCATE, offset, length, ffi.NULL)

    def flush(self) -> None:
        self._execute(lib.KVDEV_BDEV_OP_FLUSH, 0, 0, ffi.NULL)


@dataclass(frozen=True)
class CoreOptions:
    """Bounds of one target; ``struct kvdev_target_opts``."""

    poller_count: int = 1
    worker_count: int = 4
    """Threads that wait for disks: I/O on files under way at the same time."""
    connection_count_max: int = 1024
    subsystem_count_max: int = 1024
    controller_count_max: int = 1024
    listener_count_max: int = 256
    connect_timeout_ms: int = 30_000
    """From accepting a connection to a granted Connect."""
    linger_timeout_ms: int = 1_000
    """From a C2HTermReq to closing when the host does not."""


@dataclass(frozen=True)
class CoreTransport:
    """Limits of connections accepted from now on; ``struct kvdev_target_transport``."""

    max_io_size_bytes: int = 131072
    in_capsule_data_size_bytes: int = 4096
    maxh2cdata_bytes: int = 131072
    queue_depth_max: int = 128
    c2h_success: bool = True
    hdgst: bool = True
    ddgst: bool = True
    cpda: int = 0


@dataclass(frozen=True)
class CapsuleEvent:
    """A Fabrics or Admin command; ``handle`` completes it once. Its data room lives until then."""

    handle: int
    arrival_ns: int
    connection: int
    listener: int
    controller: int
    qid: int
    sqe: bytes
    data: bytes
    data_room: int
    data_address: int
    tls_tag: int = 0
    """Of the key that the connection came in with; 0 without TLS."""


@dataclass(frozen=True)
class ClosedEvent:
    """A connection is gone. ``error`` is an errno, 0 for an end of file; a protocol fault has a text."""

    arrival_ns: int
    connection: int
    listener: int
    controller: int
    qid: int
    error: int
    fault_fes: int
    fault_text: str


@dataclass(frozen=True)
class ConnectionInfo:
    peer_address: str
    peer_port: int
    local_address: str
    local_port: int
    hdgst: bool
    ddgst: bool
    poller_index: int


@dataclass(frozen=True)
class PollerStat:
    busy_ns: int
    idle_ns: int
    command_count: int
    rx_bytes: int
    tx_bytes: int
    fault_count: int
    refused_count: int
    buffers_free: int
    admin_qpairs: int
    io_qpairs: int
    admin_qpairs_now: int
    io_qpairs_now: int
    unbound_now: int
    thread_id: int


class TargetCore:
    """The pollers and workers of one target. Numbers it gives out are the core's table slots or ids."""

    def __init__(self, options: CoreOptions | None = None) -> None:
        options = options or CoreOptions()
        self.options = options
        opts = ffi.new(
            "struct kvdev_target_opts *",
            {
                "poller_count": options.poller_count,
                "worker_count": options.worker_count,
                "connections_max": options.connection_count_max,
                "subsystems_max": options.subsystem_count_max,
                "controllers_max": options.controller_count_max,
                "listeners_max": options.listener_count_max,
                "buffer_count": BUFFER_COUNT,
                "buffer_bytes": MAX_IO_SIZE_BYTES_LIMIT,
                "connect_timeout_ms": options.connect_timeout_ms,
                "linger_timeout_ms": options.linger_timeout_ms,
            },
        )
        out = ffi.new("struct kvdev_target **")
        _check(lib.kvdev_target_create(opts, out), "create target")
        self._pointer = out[0]
        self._events = ffi.new("struct kvdev_target_event[]", EVENT_COUNT_MAX)
        self._count = ffi.new("uint32_t *")

    def close(self, *, timeout_s: float) -> None:
        """End all connections and threads; nothing else may be called after."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            _check(lib.kvdev_target_destroy(pointer, int(timeout_s * NS_PER_S)), "stop target")

    def set_transport(self, transport: CoreTransport) -> None:
        wire = ffi.new(
            "struct kvdev_target_transport *",
            {
                "max_io_size": transport.max_io_size_bytes,
                "in_capsule_data_size": transport.in_capsule_data_size_bytes,
                "maxh2cdata": transport.maxh2cdata_bytes,
                "queue_depth_max": transport.queue_depth_max,
                "c2h_success": int(transport.c2h_success),
                "hdgst": int(transport.hdgst),
                "ddgst": int(transport.ddgst),
                "cpda": transport.cpda,
            },
        )
        if lib.kvdev_target_set_transport(self._pointer, wire) != 0:
            raise UsageError(f"transport: a limit is outside of what the target serves: {transport}")

    def add_listener(self, fd: int, *, tls: TlsListener | None = None) -> int:
        """Accept from a bound, listening, non-blocking socket; the core owns ``fd`` from here on."""
        out = ffi.new("uint32_t *")
        tls_pointer = tls.raw if tls is not None else ffi.NULL
        _check(lib.kvdev_target_listener_add(self._pointer, fd, tls_pointer, out), "add listener")
        return int(out[0])

    def remove_listener(self, listener: int, *, timeout_s: float) -> None:
        result = lib.kvdev_target_listener_remove(self._pointer, listener, int(timeout_s * NS_PER_S))
        _check(result, "remove listener")

    def create_subsystem(self, *, nsid_max: int) -> int:
        out = ffi.new("int32_t *")
        _check(lib.kvdev_target_subsystem_create(self._pointer, nsid_max, out), "create subsystem")
        return int(out[0])

    def destroy_subsystem(self, subsystem: int, *, timeout_s: float) -> None:
        result = lib.kvdev_target_subsystem_destroy(self._pointer, subsystem, int(timeout_s * NS_PER_S))
        _check(result, "destroy subsystem")

    def set_namespace(self, subsystem: int, nsid: int, bdev: NativeBdev) -> None:
        result = lib.kvdev_target_namespace_set(self._pointer, subsystem, nsid, bdev._pointer)
        _check(result, "set namespace")

    def clear_namespace(self, subsystem: int, nsid: int, *, timeout_s: float) -> None:
        result = lib.kvdev_target_namespace_clear(self._pointer, subsystem, nsid, int(timeout_s * NS_PER_S))
        _check(result, "clear namespace")

    def release(self) -> None:
        """Look at the operations held back again: a filter was resumed, or limits changed."""
        lib.kvdev_target_release(self._pointer)

    def create_controller(self, subsystem: int, *, host_tag: int) -> int:
        """``host_tag``: the caller's number for the host, the same for all its controllers."""
        out = ffi.new("int32_t *")
        result = lib.kvdev_target_controller_create(self._pointer, subsystem, host_tag, out)
        _check(result, "create controller")
        return int(out[0])

    def set_controller_ready(self, controller: int, is_ready: bool) -> None:
        result = lib.kvdev_target_controller_set_ready(self._pointer, controller, int(is_ready))
        _check(result, "set controller ready")

    def set_controller_gate(
        self, controller: int, nsid: int, *, ana_status: int, may_read: bool, may_write: bool
    ) -> None:
        """What its I/O to a namespace completes with for its ANA state (0: not at all), and what a reservation denies.

        Commands that have begun go on.
        """
        gate = ana_status
        gate |= 0 if may_read else lib.KVDEV_TARGET_GATE_NO_READS
        gate |= 0 if may_write else lib.KVDEV_TARGET_GATE_NO_WRITES
        result = lib.kvdev_target_controller_gate_set(self._pointer, controller, nsid, gate)
        _check(result, "set controller gate")

    def abort_hosts(self, subsystem: int, nsid: int, host_tags: Sequence[int], *, timeout_s: float) -> None:
        """Abort what hosts have begun on a namespace; returns when nothing of it is left.

        What takes ``timeout_s`` costs its connection; DeadlineError when it takes as long again.
        """
        tags = ffi.new("uint32_t[]", list(host_tags))
        timeout_ns = int(timeout_s * NS_PER_S)
        result = lib.kvdev_target_abort_hosts(
            self._pointer, subsystem, nsid, tags, len(host_tags), timeout_ns
        )
        _check(result, "abort hosts' commands")

    def destroy_controller(self, controller: int) -> None:
        """End its connections; the number is used again once they are gone."""
        _check(lib.kvdev_target_controller_destroy(self._pointer, controller), "destroy controller")

    def disconnect(self, connection: int) -> None:
        """End one connection; one that is gone already is none of the caller's worries."""
        lib.kvdev_target_disconnect(self._pointer, connection)

    def control_wait(self, *, timeout_s: float) -> list[CapsuleEvent | ClosedEvent]:
        """What happened, oldest first; empty after the timeout or a wake."""
        lib.kvdev_target_control_wait(
            self._pointer, self._events, EVENT_COUNT_MAX, int(timeout_s * NS_PER_S), self._count
        )
        return [self._event(self._events[index]) for index in range(self._count[0])]

    @staticmethod
    def _event(event: Any) -> CapsuleEvent | ClosedEvent:
        if event.type == lib.KVDEV_TARGET_EVENT_CLOSED:
            return ClosedEvent(
                arrival_ns=event.arrival_ns,
                connection=event.connection,
                listener=event.listener,
                controller=event.controller,
                qid=event.qid,
                error=-event.reason,
                fault_fes=event.fault_fes,
                fault_text=ffi.string(event.fault_text).decode("ascii", "replace"),
            )
        data = b""
        if event.data_len:
            data = bytes(ffi.buffer(ffi.cast("uint8_t *", event.data_addr), event.data_len))
        return CapsuleEvent(
            handle=event.handle,
            arrival_ns=event.arrival_ns,
            connection=event.connection,
            listener=event.listener,
            controller=event.controller,
            qid=event.qid,
            sqe=bytes(ffi.buffer(event.sqe)),
            data=data,
            data_room=event.data_room,
            data_address=event.data_addr,
            tls_tag=event.tls_tag,
        )

    def control_wake(self) -> None:
        lib.kvdev_target_control_wake(self._pointer)

    def complete(self, handle: int, *, status: int = 0, dw0: int = 0, dw1: int = 0) -> None:
        """Answer a command; on success the host gets its whole data room as it is."""
        self._complete({"handle": handle, "status": status, "dw0": dw0, "dw1": dw1})

    def put_data(self, event: CapsuleEvent, data: bytes) -> None:
        """Place the data that goes to the host on success; more than the room is an error of ours."""
        assert len(data) <= event.data_room
        ffi.memmove(ffi.cast("uint8_t *", event.data_address), data, len(data))

    def complete_connect(
        self,
        handle: int,
        *,
        controller: int,
        qid: int,
        sqsize_0based: int,
        sq_flow_control_off: bool,
        dw0: int,
        must_authenticate: bool = False,
    ) -> None:
        """Grant a Connect: its connection becomes that queue of the controller.

        With ``must_authenticate`` it takes only Authentication Send and Receive until ``complete_admit``.
        """
        self._complete(
            {
                "handle": handle,
                "dw0": dw0,
                "must_authenticate": int(must_authenticate),
                "action": lib.KVDEV_TARGET_ACTION_BIND,
                "controller": controller,
                "qid": qid,
                "sqsize": sqsize_0based,
                "sq_flow_control_off": int(sq_flow_control_off),
            }
        )

    def complete_admit(self, handle: int) -> None:
        """Complete the command that ends an authentication: the queue takes all its commands from now on."""
        self._complete({"handle": handle, "action": lib.KVDEV_TARGET_ACTION_ADMIT})

    def complete_end(self, handle: int, *, status: int = 0) -> None:
        """Complete a command; its connection ends once that is sent."""
        self._complete({"handle": handle, "status": status, "action": lib.KVDEV_TARGET_ACTION_END})

    def _complete(self, values: dict[str, int]) -> None:
        completion = ffi.new("struct kvdev_target_completion *", values)
        _check(lib.kvdev_target_complete(self._pointer, completion), "complete command")

    def connection_info(self, connection: int) -> ConnectionInfo | None:
        info = ffi.new("struct kvdev_target_connection_info *")
        if lib.kvdev_target_connection_read(self._pointer, connection, info) != 0:
            return None
        return ConnectionInfo(
            peer_address=ffi.string(info.peer_address).decode(),
            peer_port=info.peer_port,
            local_address=ffi.string(info.local_address).decode(),
            local_port=info.local_port,
            hdgst=bool(info.hdgst),
            ddgst=bool(info.ddgst),
            poller_index=info.poller,
        )

    def poller_stat(self, poller_index: int) -> PollerStat:
        stat = ffi.new("struct kvdev_target_poller_stat *")
        _check(lib.kvdev_target_poller_stat_read(self._pointer, poller_index, stat), "poller statistics")
        names = PollerStat.__dataclass_fields__
        return PollerStat(**{name: int(getattr(stat, name)) for name in names})
