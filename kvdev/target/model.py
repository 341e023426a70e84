"""What the embedded target is configured to be: bdevs, transports, subsystems, namespaces, listeners, hosts.

Not here: JSON (``rpc_methods``); sockets of the RPC server (``rpc_server``); the data path, which stands
behind ``TargetBackend``.
Threads: one writer, the RPC server's loop. Readers in any thread get immutable snapshots without a lock:
every change builds new objects and replaces the reference.
"""

from __future__ import annotations

import enum
import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"


class SpdkError(Exception):
    """A refused call: ``code`` and ``message`` go into the JSON-RPC error as they are."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class BdevKind(enum.Enum):
    """What a block device is made of; the value is SPDK's ``product_name``."""

    MALLOC = "Malloc disk"
    NULL = "Null disk"
    AIO = "AIO disk"
    URING = "URING bdev"
    RAID0 = "Raid Volume"


@dataclass(frozen=True)
class Bdev:
    """A registered block device. ``handle`` is what the backend gave for it, -1 while it is being opened.

    ``filename`` is set for AIO and URING; ``strip_size_bytes`` and ``base_names`` with their
    ``base_handles`` for RAID0, whose strip s lies on base s mod n at row s div n.
    """

    name: str
    kind: BdevKind
    uuid: uuid_module.UUID
    block_size_bytes: int
    block_count: int
    handle: int = -1
    filename: str = ""
    is_readonly: bool = False
    fallocate: bool = False
    nowait: bool = False
    block_size_override: bool = False
    strip_size_bytes: int = 0
    base_names: tuple[str, ...] = ()
    base_handles: tuple[int, ...] = ()
    physical_block_size_bytes: int = 0


@dataclass(frozen=True)
class BdevIoStat:
    """Counters of one bdev since its creation or the last reset; latencies in nanoseconds."""

    bytes_read: int = 0
    num_read_ops: int = 0
    bytes_written: int = 0
    num_write_ops: int = 0
    bytes_unmapped: int = 0
    num_unmap_ops: int = 0
    read_latency_ns: int = 0
    max_read_latency_ns: int = 0
    min_read_latency_ns: int = 0
    write_latency_ns: int = 0
    max_write_latency_ns: int = 0
    min_write_latency_ns: int = 0
    unmap_latency_ns: int = 0
    max_unmap_latency_ns: int = 0
    min_unmap_latency_ns: int = 0
    io_error_count: int = 0


@dataclass(frozen=True)
class Transport:
    """The one NVMe/TCP transport, with SPDK's defaults."""

    trtype: str = "TCP"
    max_queue_depth: int = 128
    max_io_qpairs_per_ctrlr: int = 127
    in_capsule_data_size: int = 4096
    max_io_size: int = 131072
    max_aq_depth: int = 128
    c2h_success: bool = True
    sock_priority: int = 0
    abort_timeout_sec: int = 1
    ack_timeout: int = 0
    kas: int = 100
    min_kato: int = 10000


@dataclass(frozen=True, order=True)
class ListenAddress:
    """Where the target listens. In a stored listener ``port`` is the real one, never 0."""

    address: str
    port: int

    @property
    def adrfam(self) -> str:
        return "IPv6" if ":" in self.address else "IPv4"


@dataclass(frozen=True)
class NamespaceEntry:
    """A bdev seen by hosts under a namespace id; identity defaults come from the bdev's UUID."""

    nsid: int
    bdev_name: str
    uuid: uuid_module.UUID
    nguid: bytes
    eui64: bytes = b""
    anagrpid: int = 0
    is_auto_visible: bool = True


@dataclass(frozen=True)
class Subsystem:
    """One NVM subsystem, or the discovery subsystem (``is_discovery``)."""

    nqn: str
    serial_number: str
    model_number: str
    is_discovery: bool = False
    allow_any_host: bool = False
    max_namespaces: int = 32
    min_cntlid: int = 1
    max_cntlid: int = 0xFFEF
    ana_reporting: bool = False
    dmrsl: int = 0
    wzsl: int = 0
    hosts: tuple[str, ...] = ()
    listeners: tuple[ListenAddress, ...] = ()
    namespaces: Mapping[int, NamespaceEntry] = field(default_factory=lambda: MappingProxyType({}))

    def is_host_allowed(self, host_nqn: str) -> bool:
        return self.allow_any_host or host_nqn in self.hosts

    def is_listening_on(self, address: str, port: int) -> bool:
        """Whether this subsystem may be reached through that listening socket (its own local address)."""
        return ListenAddress(address, port) in self.listeners


@dataclass(frozen=True)
class ControllerInfo:
    """A connected controller as ``nvmf_subsystem_get_controllers`` lists it."""

    cntlid: int
    host_nqn: str
    host_id: uuid_module.UUID
    io_qpair_count: int
    is_discovery: bool = False


@dataclass(frozen=True)
class QpairInfo:
    """A connected queue pair as ``nvmf_subsystem_get_qpairs`` lists it."""

    cntlid: int
    qid: int
    host_nqn: str
    listen: ListenAddress
    peer: ListenAddress
    poll_group: str = "kvdev_poll_group_000"
    state: str = "enabled"


@dataclass(frozen=True)
class PollGroupStat:
    """One poller thread of the data path; counters since start, ``current_*`` now."""

    name: str
    admin_qpairs: int = 0
    io_qpairs: int = 0
    current_admin_qpairs: int = 0
    current_io_qpairs: int = 0
    current_unassociated_qpairs: int = 0
    pending_bdev_io: int = 0
    completed_nvme_io: int = 0
    thread_id: int = 0
    busy_ns: int = 0
    idle_ns: int = 0


class TargetView(Protocol):
    """The readable side of the model that a backend gets; every method is safe in any thread."""

    def transport(self) -> Transport | None:
        """The transport, or None before ``nvmf_create_transport``."""

    def bdev(self, name: str) -> Bdev | None: ...

    def subsystem(self, nqn: str) -> Subsystem | None:
        """One subsystem; DISCOVERY_NQN is always there."""

    def subsystems(self) -> tuple[Subsystem, ...]:
        """All, the discovery subsystem first."""


class TargetBackend(Protocol):
    """The data path that the model drives. Calls come from the RPC server's thread, one at a time.

    A method may block for what it waits for (outstanding I/O, a kernel call), never for a peer without a
    bound. OSError from ``open_bdev`` and ``start_listener`` becomes the refusal of the RPC.
    """

    def attach(self, view: TargetView) -> None:
        """Take the view to read from; called once, before any other method."""

    def open_bdev(self, bdev: Bdev) -> int:
        """Open or allocate; a handle >= 0. RAID0 members are ``bdev.base_handles``. Raises OSError."""

    def close_bdev(self, handle: int) -> None:
        """Release; no namespace refers to it any more."""

    def iostat(self, handle: int) -> BdevIoStat:
        """Counters of one bdev."""

    def reset_iostat(self, handle: int) -> None:
        """Set the counters of one bdev to zero."""

    def create_transport(self, transport: Transport) -> None:
        """The transport exists from now on; its limits hold for queue pairs accepted later."""

    def start_listener(self, address: str, port: int) -> tuple[str, int]:
        """Listen; port 0 means any free one. Returns the bound address and port. Raises OSError."""

    def stop_listener(self, address: str, port: int) -> None:
        """Stop accepting there and end the queue pairs that came in through it."""

    def subsystem_added(self, nqn: str) -> None:
        """A subsystem is there and may be connected to."""

    def subsystem_removed(self, nqn: str) -> None:
        """The subsystem is gone from the view: end its controllers before returning."""

    def subsystem_changed(self, nqn: str) -> None:
        """Hosts or listeners changed: end controllers no longer allowed, announce discovery changes."""

    def namespace_changed(self, nqn: str, nsid: int) -> None:
        """A namespace came, went or was replaced: on return no I/O runs on what it was before."""

    def controllers(self, nqn: str) -> list[ControllerInfo]: ...

    def qpairs(self, nqn: str) -> list[QpairInfo]: ...

    def poll_groups(self) -> list[PollGroupStat]: ...
