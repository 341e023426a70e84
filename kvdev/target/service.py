"""The embedded target's data path as the model's backend: bdevs, listeners, associations, the control thread.

Not here: configuration and its rules (``model``); the answers to commands (``controller``); I/O (the C core).
Threads: the model's calls come from one thread, the control thread runs here; one lock guards what both
touch, and nothing waits while holding it. No wait is longer than its named limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import DeadlineError, UsageError
from kvdev.native.target import (
    BLOCK_SIZE_BYTES_MAX,
    EVENT_COUNT_MAX,
    HISTOGRAM_BUCKET_COUNT,
    BdevOp,
    CapsuleEvent,
    ClosedEvent,
    CoreOptions,
    CoreTransport,
    InjectionType,
    NativeBdev,
    NativeInjection,
    TargetCore,
)
from kvdev.security.chap import DH_GROUPS_DEFAULT, HASHES_DEFAULT, ChapParty
from kvdev.target.authenticate import Authenticator, credentials_of
from kvdev.target.controller import (
    KATO_MS_MAX,
    Answer,
    Controller,
    IoTotals,
    NamespaceFacts,
    Surroundings,
    refused,
)
from kvdev.target.model import (
    DISCOVERY_NQN,
    Bdev,
    BdevIoStat,
    BdevKind,
    ControllerInfo,
    Injection,
    Latencies,
    ListenAddress,
    NamespaceEntry,
    PollGroupStat,
    QpairInfo,
    RateLimits,
    Subsystem,
    TargetView,
    Transport,
)
from kvdev.target.ptpl import PtplError
from kvdev.target.reservation_desk import ReservationDesk
from kvdev.target.secure import SecureListeners
from kvdev.units import MIB, is_power_of_two
from kvdev.wire.auth import DhGroupId, HashId, is_auth_command
from kvdev.wire.fabrics import (
    CATTR_DISABLE_SQ_FLOW_CONTROL,
    CONNECT_DATA_BYTES,
    ConnectCommand,
    ConnectData,
    ConnectResult,
    InvalidParameter,
)
from kvdev.wire.layout import WireError
from kvdev.wire.log import (
    SECTYPE_TLS13,
    TREQ_AUTHENTICATION,
    TREQ_SQ_FLOW_CONTROL_OPTIONAL,
    AddressFamily,
    DiscoveryEntry,
    ReservationNotice,
    SecureChannel,
    build_discovery_log,
)
from kvdev.wire.nvme import CNTLID_DYNAMIC, FabricsStatus, Sqe, Status

log = logging.getLogger("kvdev.target")

NAMESPACE_CLEAR_TIMEOUT_S: Final = 5.0
"""A namespace's I/O has so long to end, then its connections are closed and it has so long again."""
SUBSYSTEM_END_TIMEOUT_S: Final = 10.0
LISTENER_END_TIMEOUT_S: Final = 5.0
PREEMPT_TIMEOUT_S: Final = 1.0
"""Preempt and Abort: what a preempted host has begun may take so long before its connections are closed."""
LISTEN_BACKLOG: Final = 128
CONTROL_WAIT_LIMIT_S: Final = 1.0
"""The control thread looks at the clock at least so often."""
CNTLID_DYNAMIC_STATIC: Final = 0xFFFE
MEMORY_RESERVE_BYTES: Final = 256 << 20
"""Left to the rest of the machine by a memory bdev."""


@dataclass(frozen=True)
class TargetOptions:
    """What SPDK's RPC has no name for."""

    core: CoreOptions = field(default_factory=CoreOptions)
    maxh2cdata_bytes: int = 131072
    hdgst: bool = True
    """Grant header digests to hosts that ask."""
    ddgst: bool = True
    cpda: int = 0
    """Alignment demanded of hosts' data, 0's based dwords; for tests of hosts."""
    populate_memory: bool = False
    """Touch the memory of bdevs when they are made."""
    volatile_seed: int | None = None
    """Give file bdevs a volatile cache: a kill loses what was not flushed, but for blocks the seed chooses."""
    dhchap_digests: tuple[HashId, ...] = HASHES_DEFAULT
    """What hosts may authenticate with; of what a host offers the first of these is taken."""
    dhchap_dhgroups: tuple[DhGroupId, ...] = DH_GROUPS_DEFAULT


_OPERATIONS = {
    "read": BdevOp.READ,
    "write": BdevOp.WRITE,
    "unmap": BdevOp.DEALLOCATE,
    "flush": BdevOp.FLUSH,
}
_INJECTIONS = {
    "failure": InjectionType.FAILURE,
    "pending": InjectionType.PENDING,
    "corrupt_data": InjectionType.CORRUPT,
    "nomem": InjectionType.NOMEM,
    "nvme_failure": InjectionType.NVME,
}


def _set_latencies(native: NativeBdev, latencies: Latencies) -> None:
    native.set_delay(
        read_ns_avg=latencies.avg_read * 1000,
        read_ns_p99=latencies.p99_read * 1000,
        write_ns_avg=latencies.avg_write * 1000,
        write_ns_p99=latencies.p99_write * 1000,
    )


@dataclass
class _Listener:
    address: ListenAddress
    core_id: int


@dataclass
class _SubsystemState:
    core_index: int
    namespaces: dict[int, NamespaceFacts] = field(default_factory=dict)
    controllers: dict[int, Controller] = field(default_factory=dict)
    """By CNTLID."""
    next_cntlid: int = 1


@dataclass
class _Link:
    """A granted connection. The controller may be gone from its subsystem already."""

    controller: Controller
    qid: int


def _available_memory_bytes() -> int:
    """MemAvailable of this machine; a huge number where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _free_huge_memory_bytes() -> int:
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", encoding="ascii") as file:
            return int(file.read()) << 21
    except (OSError, ValueError):
        return 0


class TargetService:
    """Implements ``kvdev.target.model.ServiceBackend``. Usable between ``start`` and ``stop``."""

    def __init__(self, options: TargetOptions | None = None) -> None:
        self._options = options or TargetOptions()
        self._lock = threading.RLock()
        self._core_or_none: TargetCore | None = None
        self._auth_or_none: Authenticator | None = None
        self._secure: SecureListeners | None = None
        self._view: TargetView | None = None
        self._transport = Transport()
        self._bdevs: dict[int, NativeBdev] = {}
        self._bdev_next = 0
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._listener_addresses: dict[int, ListenAddress] = {}
        self._subsystems: dict[str, _SubsystemState] = {}
        self._links: dict[int, _Link] = {}
        self._discovery_generation = 1
        self._host_tags: dict[uuid_module.UUID, int] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.namespace_clear_timeout_s = NAMESPACE_CLEAR_TIMEOUT_S
        self.fault_log_count = 0
        """Connections that ended with a protocol fault of the host."""
        self.defect_count = 0
        """Events that raised in the control thread; always 0 unless there is a bug."""
        self.expired_count = 0
        """Associations that ended for want of a Keep Alive."""
        self.preempt_timeout_s = PREEMPT_TIMEOUT_S
        self._aborts: list[threading.Thread] = []
        self._reservations = ReservationDesk(
            changed=self._reservation_changed_locked, notify=self._notify_host_locked
        )
        self._around = Surroundings(
            namespaces=self._namespaces_of,
            io_totals=self._io_totals,
            discovery_log=self._discovery_log,
            set_ready=self._set_ready,
            drop_io_queues=self._drop_io_queues,
            complete_held=self._complete_held,
            flush_for_shutdown=self._flush_for_shutdown,
            is_persistent=self._reservations.is_persistent,
            set_persistent=self._reservations.set_persistent,
        )

    # ---- life ----

    def start(self) -> None:
        """Start the pollers, the workers and the control thread."""
        if self._core_or_none is not None:
            raise UsageError("target: it runs already")
        self._core_or_none = TargetCore(self._options.core)
        self._auth_or_none = Authenticator(self._core_or_none, self._lock)
        self._stopping = False
        self._subsystem_added_locked(DISCOVERY_NQN, nsid_max=1)
        self._thread = threading.Thread(target=self._control_loop, name="kvdev-target-control", daemon=True)
        self._thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End all queue pairs, listeners and threads; DeadlineError when they do not end in time."""
        core, thread = self._core_or_none, self._thread
        if core is None:
            return
        deadline = Deadline.after(timeout_s)
        self._stopping = True
        core.control_wake()
        if thread is not None:
            thread.join(deadline.remaining_s())
            if thread.is_alive():
                raise DeadlineError("target: the control thread does not end", operation="stop target")
        self._auth.stop()
        for abort in self._aborts:
            abort.join()  # no longer than twice preempt_timeout_s: it works on the core
        self._aborts.clear()
        self._thread = None
        self._core_or_none = None
        core.close(timeout_s=max(deadline.remaining_s(), 0.1))
        if self._secure is not None:
            self._secure.close()
            self._secure = None
        for handle in sorted(self._bdevs, reverse=True):  # a raid0 was opened after its members
            self._bdevs.pop(handle).close()
        self._listeners.clear()
        self._listener_addresses.clear()
        self._subsystems.clear()
        self._links.clear()

    def __enter__(self) -> TargetService:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def _core(self) -> TargetCore:
        if self._core_or_none is None:
            raise UsageError("target: it is not running: call start first")
        return self._core_or_none

    @property
    def _auth(self) -> Authenticator:
        assert self._auth_or_none is not None, "made with the core"
        return self._auth_or_none

    def attach(self, view: TargetView) -> None:
        self._view = view

    # ---- bdevs ----

    def open_bdev(self, bdev: Bdev) -> int:
        """Open or allocate. Raises OSError, whose text says what does not fit."""
        native = self._make_bdev(bdev)
        with self._lock:
            handle = self._bdev_next
            self._bdev_next += 1
            self._bdevs[handle] = native
        return handle

    def _make_bdev(self, bdev: Bdev) -> NativeBdev:
        block_size, count = bdev.block_size_bytes, bdev.block_count
        if not is_power_of_two(block_size) or not 512 <= block_size <= BLOCK_SIZE_BYTES_MAX:
            raise OSError(
                errno.EINVAL,
                f"block_size: expected a power of two from 512 to {BLOCK_SIZE_BYTES_MAX} bytes, got {block_size}",
            )
        match bdev.kind:
            case BdevKind.MALLOC:
                self._check_memory(block_size * count)
                return NativeBdev.memory(
                    block_size_bytes=block_size, block_count=count, populate=self._options.populate_memory
                )
            case BdevKind.NULL:
                return NativeBdev.null(block_size_bytes=block_size, block_count=count)
            case BdevKind.AIO | BdevKind.URING:
                return NativeBdev.file(
                    bdev.filename,
                    block_size_bytes=block_size,
                    block_count=count,
                    is_readonly=bdev.is_readonly,
                    volatile_seed=self._options.volatile_seed,
                )
            case BdevKind.RAID0:
                members = tuple(self._bdevs[handle] for handle in bdev.base_handles)
                return NativeBdev.raid0(members, strip_size_bytes=bdev.strip_size_bytes)
            case BdevKind.SPLIT | BdevKind.LVOL:
                base = self._bdevs[bdev.base_handles[0]]
                return NativeBdev.linear(base, bdev.extents, is_readonly=bdev.is_readonly)
            case BdevKind.DELAY | BdevKind.ERROR:
                native = NativeBdev.filter(self._bdevs[bdev.base_handles[0]])
                if bdev.latencies is not None:
                    _set_latencies(native, bdev.latencies)
                return native
        raise OSError(errno.EINVAL, f"kind: {bdev.kind}")

    @staticmethod
    def _check_memory(size_bytes: int) -> None:
        available = _available_memory_bytes() - MEMORY_RESERVE_BYTES
        if size_bytes > available and size_bytes > _free_huge_memory_bytes():
            raise OSError(
                errno.ENOMEM,
                f"{size_bytes} bytes are more than the {max(available, 0)} this machine has to spare",
            )

    def close_bdev(self, handle: int) -> None:
        with self._lock:
            native = self._bdevs.pop(handle)
        native.close()

    def iostat(self, handle: int) -> BdevIoStat:
        stat = self._bdevs[handle].stat()
        return BdevIoStat(
            bytes_read=stat.read_bytes,
            num_read_ops=stat.read_count,
            bytes_written=stat.write_bytes,
            num_write_ops=stat.write_count,
            bytes_unmapped=stat.unmap_bytes,
            num_unmap_ops=stat.unmap_count,
            read_latency_ns=stat.read_ns,
            max_read_latency_ns=stat.read_ns_max,
            min_read_latency_ns=stat.read_ns_min,
            write_latency_ns=stat.write_ns,
            max_write_latency_ns=stat.write_ns_max,
            min_write_latency_ns=stat.write_ns_min,
            unmap_latency_ns=stat.unmap_ns,
            max_unmap_latency_ns=stat.unmap_ns_max,
            min_unmap_latency_ns=stat.unmap_ns_min,
            io_error_count=stat.error_count,
        )

    def reset_iostat(self, handle: int) -> None:
        self._bdevs[handle].reset_stat()

    @property
    def remote(self) -> None:
        """This data path is no initiator."""
        return None

    @property
    def vhost(self) -> None:
        """This data path serves no vhost-user sockets."""
        return None

    def clear_bdev(self, handle: int) -> None:
        native = self._bdevs[handle]
        info = native.info()
        native.deallocate(0, info.block_size_bytes * info.block_count)

    def set_limits(self, handle: int, limits: RateLimits) -> None:
        with self._lock:
            self._bdevs[handle].set_limits(
                rw_ios=limits.rw_ios_per_sec,
                rw_bytes=limits.rw_mbytes_per_sec * MIB,
                read_bytes=limits.r_mbytes_per_sec * MIB,
                write_bytes=limits.w_mbytes_per_sec * MIB,
            )
            # Handles count up, and what a device stands on was opened before it.
            for each in sorted(self._bdevs):
                native = self._bdevs[each]
                native.set_held(any(member.is_held for member in native.members))
        self._core.release()

    def set_latencies(self, handle: int, latencies: Latencies) -> None:
        _set_latencies(self._bdevs[handle], latencies)

    def inject(self, handle: int, operation: str, injection: Injection) -> None:
        self._bdevs[handle].inject(
            _OPERATIONS[operation],
            NativeInjection(
                type=_INJECTIONS[injection.error_type],
                count=injection.count,
                queue_depth=injection.queue_depth,
                corrupt_offset=injection.corrupt_offset,
                corrupt_value=injection.corrupt_value,
                sct=injection.sct,
                sc=injection.sc,
            ),
        )

    def resume_pending(self, handle: int) -> None:
        self._bdevs[handle].resume()
        self._core.release()

    def start_histogram(self, handle: int, operation: str | None) -> None:
        self._bdevs[handle].start_histogram(None if operation is None else _OPERATIONS[operation])

    def stop_histogram(self, handle: int) -> None:
        self._bdevs[handle].stop_histogram()

    def histogram(self, handle: int) -> list[int]:
        try:
            return self._bdevs[handle].histogram()
        except OSError:
            return [0] * HISTOGRAM_BUCKET_COUNT

    def bdev(self, handle: int) -> NativeBdev:
        """The core's device behind a handle; for tests and for tools in this process."""
        return self._bdevs[handle]

    # ---- transport and listeners ----

    def create_transport(self, transport: Transport) -> None:
        self._core.set_transport(
            CoreTransport(
                max_io_size_bytes=transport.max_io_size,
                in_capsule_data_size_bytes=transport.in_capsule_data_size,
                maxh2cdata_bytes=self._options.maxh2cdata_bytes,
                queue_depth_max=max(transport.max_queue_depth, transport.max_aq_depth),
                c2h_success=transport.c2h_success,
                hdgst=self._options.hdgst,
                ddgst=self._options.ddgst,
                cpda=self._options.cpda,
            )
        )
        with self._lock:
            self._transport = transport

    def start_listener(self, address: str, port: int, *, is_secure: bool = False) -> tuple[str, int]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listening.bind((address, port))
            except socket.gaierror as error:
                raise OSError(errno.EINVAL, f"{address!r} is no address of this machine") from error
            listening.listen(LISTEN_BACKLOG)
            listening.setblocking(False)
            bound = listening.getsockname()
            where = ListenAddress(address, int(bound[1]))
            with self._lock:
                # Under the lock: a connection may come in before the listener's address is known.
                tls = self._secure_listeners_locked().listener if is_secure else None
                fd = os.dup(listening.fileno())
                try:
                    core_id = self._core.add_listener(fd, tls=tls)
                except OSError:
                    os.close(fd)
                    raise
                self._listeners[(where.address, where.port)] = _Listener(where, core_id)
                self._listener_addresses[core_id] = where
                self._discovery_changed_locked()
        return where.address, where.port

    def _secure_listeners_locked(self) -> SecureListeners:
        """Made when first needed. Raises OSError."""
        if self._secure is None:
            self._secure = SecureListeners()
            self._update_keys_locked()
        return self._secure

    def _update_keys_locked(self) -> None:
        if self._secure is not None and self._view is not None:
            self._secure.update(self._view.subsystems())

    def stop_listener(self, address: str, port: int) -> None:
        with self._lock:
            listener = self._listeners.pop((address, port))
            self._listener_addresses.pop(listener.core_id, None)
            self._discovery_changed_locked()
        self._core.remove_listener(listener.core_id, timeout_s=LISTENER_END_TIMEOUT_S)

    # ---- subsystems ----

    def _subsystem_added_locked(self, nqn: str, *, nsid_max: int) -> None:
        self._subsystems[nqn] = _SubsystemState(core_index=self._core.create_subsystem(nsid_max=nsid_max))

    def subsystem_added(self, nqn: str) -> None:
        subsystem = self._subsystem(nqn)
        assert subsystem is not None
        with self._lock:
            self._subsystem_added_locked(nqn, nsid_max=subsystem.max_namespaces)
            self._subsystems[nqn].next_cntlid = subsystem.min_cntlid
            self._discovery_changed_locked()

    def subsystem_removed(self, nqn: str) -> None:
        with self._lock:
            self._update_keys_locked()
            state = self._subsystems.pop(nqn)
            nsids = sorted(state.namespaces)
            for controller in list(state.controllers.values()):
                self._end_controller_locked(state, controller, "its subsystem was removed")
            self._discovery_changed_locked()
        for nsid in nsids:
            self._core.clear_namespace(state.core_index, nsid, timeout_s=self.namespace_clear_timeout_s)
            self._reservations.close(nqn, nsid)
        self._core.destroy_subsystem(state.core_index, timeout_s=SUBSYSTEM_END_TIMEOUT_S)

    def subsystem_changed(self, nqn: str) -> None:
        """End the controllers whose host or listener is no longer allowed; tell discovery."""
        with self._lock:
            subsystem = self._subsystem(nqn)
            state = self._subsystems.get(nqn)
            if subsystem is None or state is None:
                return
            self._update_keys_locked()
            for controller in list(state.controllers.values()):
                where = controller.listen
                if not subsystem.is_host_allowed(controller.host_nqn):
                    self._end_controller_locked(state, controller, "its host is no longer allowed")
                elif not subsystem.is_discovery and not subsystem.is_listening_on(where.address, where.port):
                    self._end_controller_locked(state, controller, "its listener is gone")
                else:
                    groups = {facts.entry.anagrpid for facts in state.namespaces.values()}
                    before, controller.subsystem = controller.subsystem, subsystem
                    if any(before.ana_state(where, g) != subsystem.ana_state(where, g) for g in groups):
                        self._set_gates_locked(state, controller)
                        controller.notify_ana_changed()
            self._discovery_changed_locked()

    def _set_gates_locked(self, state: _SubsystemState, controller: Controller) -> None:
        """Let the core refuse I/O that its ANA state or a reservation keeps from this controller."""
        for nsid in state.namespaces:
            self._set_gate_locked(state, controller, nsid)

    def _set_gate_locked(self, state: _SubsystemState, controller: Controller, nsid: int) -> None:
        reservations = self._reservations.state(controller.subsystem.nqn, nsid)
        self._core.set_controller_gate(
            controller.core_index,
            nsid,
            ana_status=controller.ana_status(state.namespaces[nsid].entry),
            may_read=reservations.may_read(controller.host_id),
            may_write=reservations.may_write(controller.host_id),
        )

    def _reservation_changed_locked(self, nqn: str, nsid: int) -> None:
        state = self._subsystems[nqn]
        for controller in state.controllers.values():
            self._set_gate_locked(state, controller, nsid)

    def _notify_host_locked(
        self, nqn: str, nsid: int, host: uuid_module.UUID, notice: ReservationNotice
    ) -> None:
        for controller in self._subsystems[nqn].controllers.values():
            if controller.host_id == host:
                controller.notify_reservation(nsid, notice)

    def namespace_changed(self, nqn: str, nsid: int) -> None:
        subsystem = self._subsystem(nqn)
        with self._lock:
            state = self._subsystems[nqn]
            had = state.namespaces.pop(nsid, None)
        if had is not None:
            self._core.clear_namespace(state.core_index, nsid, timeout_s=self.namespace_clear_timeout_s)
            self._reservations.close(nqn, nsid)
        entry = subsystem.namespaces.get(nsid) if subsystem is not None else None
        with self._lock:
            if entry is not None and self._view is not None:
                bdev = self._view.bdev(entry.bdev_name)
                assert bdev is not None
                native = self._bdevs[bdev.handle]
                info = native.info()
                state.namespaces[nsid] = NamespaceFacts(
                    entry=entry,
                    block_size_bytes=info.block_size_bytes,
                    block_count=info.block_count,
                    has_volatile_cache=info.has_volatile_cache,
                    optimal_io_boundary_blocks=info.strip_size_bytes // info.block_size_bytes,
                )
                self._open_reservations_locked(nqn, entry)
                self._core.set_namespace(state.core_index, nsid, native)
            for controller in state.controllers.values():
                if subsystem is not None:
                    controller.subsystem = subsystem
                self._set_gates_locked(state, controller)
                controller.notify_namespace_changed(nsid)

    def _open_reservations_locked(self, nqn: str, entry: NamespaceEntry) -> None:
        try:
            self._reservations.open(nqn, entry.nsid, uuid=entry.uuid, ptpl_file=entry.ptpl_file)
        except PtplError as error:
            # The model has read the file a moment ago. Its hosts may have lost their rights: none gets in by mistake.
            raise OSError(errno.EIO, str(error)) from error

    # ---- what the RPC shows ----

    def controllers(self, nqn: str) -> list[ControllerInfo]:
        with self._lock:
            state = self._subsystems.get(nqn)
            return [
                ControllerInfo(
                    cntlid=controller.cntlid,
                    host_nqn=controller.host_nqn,
                    host_id=controller.host_id,
                    io_qpair_count=len(controller.io_connections),
                    is_discovery=controller.is_discovery,
                )
                for controller in (state.controllers.values() if state else ())
            ]

    def qpairs(self, nqn: str) -> list[QpairInfo]:
        found = []
        with self._lock:
            for connection, link in self._links.items():
                if link.controller.subsystem.nqn != nqn:
                    continue
                info = self._core.connection_info(connection)
                if info is None:
                    continue
                found.append(
                    QpairInfo(
                        cntlid=link.controller.cntlid,
                        qid=link.qid,
                        host_nqn=link.controller.host_nqn,
                        listen=ListenAddress(info.local_address, info.local_port),
                        peer=ListenAddress(info.peer_address, info.peer_port),
                        poll_group=f"kvdev_poll_group_{info.poller_index:03d}",
                    )
                )
        return found

    def poll_groups(self) -> list[PollGroupStat]:
        groups = []
        for index in range(self._options.core.poller_count):
            stat = self._core.poller_stat(index)
            groups.append(
                PollGroupStat(
                    name=f"kvdev_poll_group_{index:03d}",
                    admin_qpairs=stat.admin_qpairs,
                    io_qpairs=stat.io_qpairs,
                    current_admin_qpairs=stat.admin_qpairs_now,
                    current_io_qpairs=stat.io_qpairs_now,
                    current_unassociated_qpairs=stat.unbound_now,
                    completed_nvme_io=stat.command_count,
                    thread_id=stat.thread_id,
                    busy_ns=stat.busy_ns,
                    idle_ns=stat.idle_ns,
                )
            )
        return groups

    # ---- what controllers ask ----

    def _subsystem(self, nqn: str) -> Subsystem | None:
        return self._view.subsystem(nqn) if self._view is not None else None

    def _namespaces_of(self, nqn: str) -> Mapping[int, NamespaceFacts]:
        state = self._subsystems.get(nqn)
        return state.namespaces if state is not None else {}

    def _io_totals(self, nqn: str) -> IoTotals:
        totals = [0, 0, 0, 0]
        for facts in self._namespaces_of(nqn).values():
            bdev = self._view.bdev(facts.entry.bdev_name) if self._view is not None else None
            native = self._bdevs.get(bdev.handle) if bdev is not None else None
            if native is None:
                continue
            stat = native.stat()
            for index, value in enumerate(
                (stat.read_bytes, stat.read_count, stat.write_bytes, stat.write_count)
            ):
                totals[index] += value
        return IoTotals(*totals)

    def _set_ready(self, controller: Controller, is_ready: bool) -> None:
        self._core.set_controller_ready(controller.core_index, is_ready)

    def _drop_io_queues(self, controller: Controller) -> None:
        for connection in controller.io_connections.values():
            self._core.disconnect(connection)
            self._links.pop(connection, None)
        controller.io_connections.clear()

    def _complete_held(self, controller: Controller, handle: int, answer: Answer) -> None:
        del controller
        self._core.complete(handle, status=answer.status, dw0=answer.dw0)

    def _flush_for_shutdown(self, controller: Controller) -> None:
        cached = []
        for facts in self._namespaces_of(controller.subsystem.nqn).values():
            bdev = self._view.bdev(facts.entry.bdev_name) if self._view is not None else None
            native = self._bdevs.get(bdev.handle) if bdev is not None else None
            if native is not None and facts.has_volatile_cache:
                cached.append(native)
        if not cached:
            controller.shutdown_done()
            return

        def flush() -> None:
            for native in cached:
                try:
                    native.flush()
                except OSError as error:
                    # The host has no status for this; it must not read "complete" over lost data.
                    log.error("target: flush at shutdown of %s: %s", controller.subsystem.nqn, error)
                    return
            with self._lock:
                controller.shutdown_done()

        # Off the control thread: a disk may take longer than a host's keep alive.
        threading.Thread(target=flush, name="kvdev-target-flush", daemon=True).start()

    # ---- discovery ----

    def _discovery_changed_locked(self) -> None:
        self._discovery_generation += 1
        state = self._subsystems.get(DISCOVERY_NQN)
        for controller in state.controllers.values() if state else ():
            controller.notify_discovery_changed()

    def _discovery_log(self, controller: Controller) -> bytes:
        """Every address of every subsystem that this host may connect to."""
        info = self._core.connection_info(controller.connection)
        local = info.local_address if info is not None else controller.listen.address
        entries = []
        ports = {where: number for number, where in enumerate(sorted(self._listener_addresses.values()), 1)}
        for subsystem in self._view.subsystems() if self._view is not None else ():
            if subsystem.is_discovery or not subsystem.is_host_allowed(controller.host_nqn):
                continue
            has_key = subsystem.keys_of(controller.host_nqn).dhchap_key is not None
            for where in subsystem.listeners:
                # A wildcard address says nothing to a host: it gets the one it came to.
                address = local if where.address in ("0.0.0.0", "::") else where.address
                is_secure = where in subsystem.secure_listeners
                entries.append(
                    DiscoveryEntry(
                        adrfam=AddressFamily.IPV6 if ":" in address else AddressFamily.IPV4,
                        treq=(SecureChannel.REQUIRED if is_secure else SecureChannel.NOT_REQUIRED)
                        | TREQ_SQ_FLOW_CONTROL_OPTIONAL
                        | (TREQ_AUTHENTICATION if has_key else 0),
                        tsas=bytes((SECTYPE_TLS13 if is_secure else 0,)).ljust(256, b"\0"),
                        portid=ports.get(where, 0),
                        asqsz=self._transport.max_aq_depth,
                        trsvcid=str(where.port),
                        subnqn=subsystem.nqn,
                        traddr=address,
                    )
                )
        return build_discovery_log(entries, genctr=self._discovery_generation)

    # ---- the control thread ----

    def _control_loop(self) -> None:
        core = self._core
        while not self._stopping:
            events = core.control_wait(timeout_s=self._wait_s())
            with self._lock:
                for event in events:
                    if self._stopping:
                        return
                    self._event_locked(core, event)
                # Only now, with every Keep Alive counted by its arrival time, is the clock looked at: this
                # thread's own lateness must not cost a host its association. When more events may be
                # waiting, what is known is the time up to the last one taken.
                is_drained = len(events) < EVENT_COUNT_MAX
                self._expire_locked(SYSTEM_CLOCK.monotonic_ns() if is_drained else events[-1].arrival_ns)

    def _event_locked(self, core: TargetCore, event: CapsuleEvent | ClosedEvent) -> None:
        try:
            if isinstance(event, ClosedEvent):
                self._closed_locked(event)
            else:
                self._capsule_locked(core, event)
        except Exception:
            # A defect of ours must cost one host its connection, not all hosts their keep alives.
            self.defect_count += 1
            log.exception("target: connection %d: a command could not be answered", event.connection)
            core.disconnect(event.connection)
            if isinstance(event, CapsuleEvent):
                with contextlib.suppress(OSError):
                    core.complete(event.handle, status=Status.INTERNAL_ERROR)

    def _wait_s(self) -> float:
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        with self._lock:
            ends = [
                controller.expires_ns
                for state in self._subsystems.values()
                for controller in state.controllers.values()
                if controller.is_timer_active
            ]
        wait_s = (min(ends) - now_ns) / 1e9 if ends else CONTROL_WAIT_LIMIT_S
        return min(max(wait_s, 0.0), CONTROL_WAIT_LIMIT_S)

    def _expire_locked(self, now_ns: int) -> None:
        self._auth.expire(now_ns)
        for state in self._subsystems.values():
            for controller in list(state.controllers.values()):
                if controller.is_timer_active and now_ns >= controller.expires_ns:
                    self.expired_count += 1
                    self._end_controller_locked(
                        state, controller, f"no Keep Alive for {controller.kato_ms} ms"
                    )

    def _end_controller_locked(self, state: _SubsystemState, controller: Controller, reason: str) -> None:
        log.info(
            "target: controller %d of %s, host %s: ended: %s",
            controller.cntlid,
            controller.subsystem.nqn,
            controller.host_nqn,
            reason,
        )
        self._forget_controller_locked(state, controller)

    def _forget_controller_locked(self, state: _SubsystemState, controller: Controller) -> None:
        """Take the association out of every table; its connections end in the core."""
        if state.controllers.get(controller.cntlid) is not controller:
            return
        del state.controllers[controller.cntlid]
        for connection in (controller.connection, *controller.io_connections.values()):
            self._links.pop(connection, None)
        for handle in controller.aers.values():
            self._core.complete(handle, status=Status.ABORTED_SQ_DELETION)
        controller.aers.clear()
        self._core.destroy_controller(controller.core_index)

    def _closed_locked(self, event: ClosedEvent) -> None:
        if event.fault_text:
            self.fault_log_count += 1
            log.warning("target: connection %d: %s", event.connection, event.fault_text)
        self._auth.forget(event.connection)
        link = self._links.pop(event.connection, None)
        if link is None:
            return
        controller = link.controller
        if link.qid != 0:
            if controller.io_connections.get(link.qid) == event.connection:
                del controller.io_connections[link.qid]
            return
        state = self._subsystems.get(controller.subsystem.nqn)
        if state is not None:
            # The core has ended the I/O queues already: the Admin queue takes them with it.
            self._forget_controller_locked(state, controller)

    def _capsule_locked(self, core: TargetCore, event: CapsuleEvent) -> None:
        sqe = Sqe.parse(event.sqe)
        link = self._links.get(event.connection)
        if link is None:
            if event.controller >= 0:
                # Its association ended while this command was on its way here.
                core.complete(event.handle, status=Status.ABORTED_SQ_DELETION)
                return
            answer = self._connect_locked(core, event, sqe)
            if answer is not None:
                core.complete(event.handle, status=answer.status, dw0=answer.dw0)
            return
        if is_auth_command(sqe):
            self._auth.command(event, sqe)
            return
        if link.qid:
            self._reservation_locked(core, event, sqe, link.controller)
            return
        answer = link.controller.execute(sqe, event.data, handle=event.handle, arrival_ns=event.arrival_ns)
        if not answer.is_held:
            self._answer(core, event, answer)

    @staticmethod
    def _answer(core: TargetCore, event: CapsuleEvent, answer: Answer) -> None:
        if answer.data:
            core.put_data(event, answer.data[: event.data_room])
        core.complete(event.handle, status=answer.status, dw0=answer.dw0, dw1=answer.dw1)

    # ---- reservations: the only I/O commands that come here ----

    def _reservation_locked(
        self, core: TargetCore, event: CapsuleEvent, sqe: Sqe, controller: Controller
    ) -> None:
        nqn = controller.subsystem.nqn
        state = self._subsystems[nqn]
        facts = state.namespaces.get(sqe.nsid)
        if not controller.csts.rdy or not controller.is_timer_active:
            self._answer(core, event, refused(Status.COMMAND_SEQUENCE_ERROR))
            return
        ana_status = controller.ana_status(facts.entry) if facts is not None else 0
        if ana_status:
            self._answer(core, event, refused(ana_status, is_final=False))
            return
        verdict = self._reservations.execute(
            nqn, sqe, event.data, host=controller.host_id, cntlids=lambda: _cntlids(state)
        )
        if not verdict.preempted:
            self._answer(core, event, verdict.answer)
            return
        tags = [self._host_tags[host] for host in verdict.preempted if host in self._host_tags]

        def abort() -> None:
            answer = verdict.answer
            try:
                core.abort_hosts(state.core_index, sqe.nsid, tags, timeout_s=self.preempt_timeout_s)
            except (OSError, DeadlineError) as error:
                # They are out, but what they began may still take effect: the host must not read "done".
                log.error("target: preempt and abort on %s nsid %d: %s", nqn, sqe.nsid, error)
                answer = refused(Status.INTERNAL_ERROR)
            with contextlib.suppress(OSError):
                self._answer(core, event, answer)

        if tags:
            # Off the control thread: a disk may take longer than a host's keep alive.
            thread = threading.Thread(target=abort, name="kvdev-target-preempt", daemon=True)
            self._aborts = [each for each in self._aborts if each.is_alive()]
            self._aborts.append(thread)
            thread.start()
        else:
            self._answer(core, event, verdict.answer)

    # ---- Connect (Base 6.3) ----

    def _connect_locked(self, core: TargetCore, event: CapsuleEvent, sqe: Sqe) -> Answer | None:
        """Decide a Connect: an Answer that refuses it, or None when it was granted."""
        command = ConnectCommand.from_sqe(sqe)
        if command.recfmt != 0:
            return refused(FabricsStatus.INCOMPATIBLE_FORMAT)
        if len(event.data) != CONNECT_DATA_BYTES:
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        try:
            data = ConnectData.parse(event.data)
        except WireError as error:
            return _invalid(error.field)
        entries_max = self._transport.max_queue_depth if command.qid else self._transport.max_aq_depth
        if not 1 <= command.sqsize_0based < entries_max:
            return _invalid("sqsize")
        subsystem = self._subsystem(data.subnqn)
        state = self._subsystems.get(data.subnqn)
        if subsystem is None or state is None:
            return _invalid("subnqn")
        if not data.hostnqn.startswith("nqn."):
            return _invalid("hostnqn")
        where = self._listener_addresses.get(event.listener)
        if where is None or not (
            subsystem.is_discovery or subsystem.is_listening_on(where.address, where.port)
        ):
            return refused(FabricsStatus.CONNECT_INVALID_HOST)
        if not subsystem.is_host_allowed(data.hostnqn):
            return refused(FabricsStatus.CONNECT_INVALID_HOST)
        if event.tls_tag:
            peer = self._secure.peer(event.tls_tag) if self._secure is not None else None
            if peer is None or not peer.may_connect(data.subnqn, data.hostnqn):
                return refused(FabricsStatus.CONNECT_INVALID_HOST)
        if command.qid == 0:
            return self._connect_admin_locked(core, event, command, data, subsystem, state, where)
        return self._connect_io_locked(core, event, command, data, state)

    def _connect_admin_locked(
        self,
        core: TargetCore,
        event: CapsuleEvent,
        command: ConnectCommand,
        data: ConnectData,
        subsystem: Subsystem,
        state: _SubsystemState,
        where: ListenAddress,
    ) -> Answer | None:
        if data.cntlid not in (CNTLID_DYNAMIC, CNTLID_DYNAMIC_STATIC):
            return _invalid("cntlid")
        if not any(data.hostid) and not subsystem.is_discovery:
            return _invalid("hostid")
        if command.kato_ms > KATO_MS_MAX:
            return refused(Status.KEEP_ALIVE_INVALID)
        cntlid = self._free_cntlid(subsystem, state)
        if cntlid is None:
            return refused(FabricsStatus.CONTROLLER_BUSY, is_final=False)
        controller = Controller(
            subsystem=subsystem,
            transport=self._transport,
            cntlid=cntlid,
            host_nqn=data.hostnqn,
            host_id=uuid_module.UUID(bytes=data.hostid),
            listen=where,
            kato_ms=command.kato_ms,
            around=self._around,
        )
        try:
            tag = self._host_tags.setdefault(controller.host_id, len(self._host_tags) + 1)
            controller.core_index = core.create_controller(state.core_index, host_tag=tag)
        except OSError:
            return refused(FabricsStatus.CONTROLLER_BUSY, is_final=False)
        controller.connection = event.connection
        state.controllers[cntlid] = controller
        self._set_gates_locked(state, controller)
        self._links[event.connection] = _Link(controller, 0)
        self._grant(core, event, command, controller)
        return None

    @staticmethod
    def _free_cntlid(subsystem: Subsystem, state: _SubsystemState) -> int | None:
        """The next number that is free, in turn: a number just given back is used again last."""
        low, count = subsystem.min_cntlid, subsystem.max_cntlid - subsystem.min_cntlid + 1
        for step in range(count):
            cntlid = low + (state.next_cntlid - low + step) % count
            if cntlid not in state.controllers:
                state.next_cntlid = cntlid + 1
                return cntlid
        return None

    def _connect_io_locked(
        self,
        core: TargetCore,
        event: CapsuleEvent,
        command: ConnectCommand,
        data: ConnectData,
        state: _SubsystemState,
    ) -> Answer | None:
        controller = state.controllers.get(data.cntlid)
        if controller is None or controller.is_discovery:
            # It may have ended this moment, by its keep alive or a restart: a new association is the remedy, not
            # none any more, which hosts make of DNR here.
            return _invalid("cntlid", is_final=False)
        if data.hostnqn != controller.host_nqn:
            return _invalid("hostnqn")
        if data.hostid != controller.host_id.bytes:
            return _invalid("hostid")
        if command.qid > controller.io_queue_count:
            return _invalid("qid")
        if command.qid in controller.io_connections or not controller.is_timer_active:
            return refused(Status.COMMAND_SEQUENCE_ERROR)
        controller.io_connections[command.qid] = event.connection
        self._links[event.connection] = _Link(controller, command.qid)
        self._grant(core, event, command, controller)
        return None

    def _grant(
        self, core: TargetCore, event: CapsuleEvent, command: ConnectCommand, controller: Controller
    ) -> None:
        must_authenticate = controller.subsystem.keys_of(controller.host_nqn).dhchap_key is not None
        if must_authenticate:
            self._expect_authentication_locked(event, command.qid, controller)
        result = ConnectResult(controller.cntlid, authreq_atr=must_authenticate, authreq_ascr=False)
        core.complete_connect(
            event.handle,
            dw0=result.build(),
            must_authenticate=must_authenticate,
            controller=controller.core_index,
            qid=command.qid,
            sqsize_0based=command.sqsize_0based,
            sq_flow_control_off=bool(command.cattr & CATTR_DISABLE_SQ_FLOW_CONTROL),
        )

    def _expect_authentication_locked(self, event: CapsuleEvent, qid: int, controller: Controller) -> None:
        subnqn, host_nqn, view = controller.subsystem.nqn, controller.host_nqn, self._view
        assert view is not None, "a host was let in by it"
        self._auth.expect(
            event.connection,
            ChapParty(host_nqn, subnqn, self._options.dhchap_digests, self._options.dhchap_dhgroups),
            lambda: credentials_of(view, subnqn, host_nqn),
            where=f"controller {controller.cntlid} of {subnqn}, queue {qid}, host {host_nqn}",
            timeout_ms=controller.kato_ms,
            now_ns=event.arrival_ns,
        )


def _cntlids(state: _SubsystemState) -> dict[uuid_module.UUID, int]:
    """The lowest controller of each host."""
    found: dict[uuid_module.UUID, int] = {}
    for cntlid in sorted(state.controllers, reverse=True):
        found[state.controllers[cntlid].host_id] = cntlid
    return found


def _invalid(parameter: str, *, is_final: bool = True) -> Answer:
    dw0 = InvalidParameter.of(parameter).build()
    return refused(FabricsStatus.CONNECT_INVALID_PARAMETERS, dw0=dw0, is_final=is_final)
