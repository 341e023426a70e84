"""What the embedded target is configured to be: bdevs, transports, subsystems, namespaces, listeners, hosts.

Not here: JSON (``rpc_methods``); sockets of the RPC server (``rpc_server``); the data path, which stands
behind ``TargetBackend``.
Threads: one writer, the RPC server's loop. Readers in any thread get immutable snapshots without a lock:
every change builds new objects and replaces the reference.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import ipaddress
import os
import re
import stat
import struct
import uuid as uuid_module
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from kvdev.target.ptpl import PtplError
from kvdev.target.ptpl import load as load_ptpl
from kvdev.units import KIB, MIB, is_power_of_two
from kvdev.wire.log import AnaState
from spdk_rpc.errors import ERROR_INTERNAL, ERROR_INVALID_PARAMS

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"

NAMESPACE_COUNT_LIMIT = 1024
"""Namespaces of one subsystem: the active namespace list of Identify then fits one 4 KiB page."""
SUBSYSTEM_COUNT_LIMIT = 1024
"""As SPDK's default max_subsystems; each discovery log entry is 1 KiB."""
BDEV_COUNT_LIMIT = 4096
HOST_COUNT_LIMIT = 4096
BDEV_NAME_SIZE_LIMIT = 255
RAID_BASE_COUNT_LIMIT = 255
"""SPDK counts base bdevs in eight bits."""
EVENT_COUNT_LIMIT = 1024
"""Notifications kept for ``notify_get_notifications``; older ones are forgotten, ids go on."""
CNTLID_MIN = 1
CNTLID_MAX = 0xFFEF
NSID_BROADCAST = 0xFFFFFFFF
NQN_SIZE_LIMIT_BYTES = 223

NULL_UUID = uuid_module.UUID(int=0)
NULL_NGUID = bytes(16)


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
    SPLIT = "Split Disk"
    LVOL = "Logical Volume"
    DELAY = "delay"
    ERROR = "Error Injection Disk"
    NVME = "NVMe disk"


@dataclass(frozen=True)
class RateLimits:
    """Limits of one bdev; 0 is none."""

    rw_ios_per_sec: int = 0
    rw_mbytes_per_sec: int = 0
    r_mbytes_per_sec: int = 0
    w_mbytes_per_sec: int = 0


@dataclass(frozen=True)
class Latencies:
    """What a delay bdev adds, in microseconds."""

    avg_read: int
    p99_read: int
    avg_write: int
    p99_write: int


@dataclass(frozen=True)
class Injection:
    """What an error bdev does to the next ``count`` operations of a kind (read, write, unmap, flush)."""

    error_type: str
    count: int
    queue_depth: int = 0
    corrupt_offset: int = 0
    corrupt_value: int = 0
    sct: int = 0
    sc: int = 0


@dataclass(frozen=True)
class Bdev:
    """A registered block device. ``handle`` is what the backend gave for it, -1 while it is being opened.

    ``filename`` is set for AIO and URING; ``base_names`` with their ``base_handles`` for what stands on other
    bdevs: RAID0, whose strip s lies on base s mod n at row s div n, and SPLIT, LVOL, DELAY, ERROR on one base.
    ``extents`` of SPLIT and LVOL are (offset, length) on the base in bytes, in order.
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
    alias: str = ""
    extents: tuple[tuple[int, int], ...] = ()
    latencies: Latencies | None = None
    limits: RateLimits = RateLimits()
    controller_name: str = ""
    remote_nsid: int = 0


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
    ptpl_file: str = ""
    """Where its reservations are kept that are to outlive the target; empty: they cannot."""


@dataclass(frozen=True)
class FileKey:
    """A key in a file; its bytes are read when they are used, never kept here."""

    name: str
    path: str


@dataclass(frozen=True)
class HostKeys:
    """What a host of a subsystem must prove to have, and what the subsystem proves to it."""

    dhchap_key: FileKey | None = None
    dhchap_ctrlr_key: FileKey | None = None
    psk: FileKey | None = None

    def names(self) -> dict[str, str]:
        """The names of those that are set, by SPDK's parameter."""
        keys = {name: getattr(self, name) for name in ("psk", "dhchap_key", "dhchap_ctrlr_key")}
        return {name: key.name for name, key in keys.items() if key is not None}


NO_KEYS = HostKeys()


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
    host_keys: Mapping[str, HostKeys] = field(default_factory=lambda: MappingProxyType({}))
    """By host NQN; hosts without keys are left out."""
    listeners: tuple[ListenAddress, ...] = ()
    secure_listeners: frozenset[ListenAddress] = frozenset()
    """Those of the listeners that demand TLS."""
    namespaces: Mapping[int, NamespaceEntry] = field(default_factory=lambda: MappingProxyType({}))
    ana_states: Mapping[tuple[ListenAddress, int], AnaState] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """State of an ANA group through a listener; group 0 stands for all that have none of their own."""

    def ana_state(self, listener: ListenAddress, anagrpid: int) -> AnaState:
        default = self.ana_states.get((listener, 0), AnaState.OPTIMIZED)
        return self.ana_states.get((listener, anagrpid), default)

    def is_host_allowed(self, host_nqn: str) -> bool:
        return self.allow_any_host or host_nqn in self.hosts

    def keys_of(self, host_nqn: str) -> HostKeys:
        return self.host_keys.get(host_nqn, NO_KEYS)

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

    def clear_bdev(self, handle: int) -> None:
        """Let a bdev read as zeroes from now on, as far as what it stands on can. Raises OSError."""

    def set_limits(self, handle: int, limits: RateLimits) -> None:
        """Operations beyond the limits start later, also those under way to bdevs above this one."""

    def set_latencies(self, handle: int, latencies: Latencies) -> None:
        """What a delay bdev adds from now on."""

    def inject(self, handle: int, operation: str, injection: Injection) -> None:
        """Arm an error bdev for one kind of operation; a count of 0 disarms it."""

    def resume_pending(self, handle: int) -> None:
        """Let go on what an error bdev holds back as pending."""

    def start_histogram(self, handle: int, operation: str | None) -> None:
        """Count latencies of a kind of operation, or of all, from zero."""

    def stop_histogram(self, handle: int) -> None: ...

    def histogram(self, handle: int) -> list[int]:
        """Counts of 128 buckets of 1 ns, then of 128 for each power of two; zeroes when stopped."""

    def create_transport(self, transport: Transport) -> None:
        """The transport exists from now on; its limits hold for queue pairs accepted later."""

    def start_listener(self, address: str, port: int, *, is_secure: bool = False) -> tuple[str, int]:
        """Listen; port 0 means any free one. Returns the bound address and port. Raises OSError.

        ``is_secure``: TLS with the keys of the hosts, and nothing without.
        """

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

    @property
    def remote(self) -> RemoteBackend | None:
        """None where this backend is no initiator."""

    @property
    def vhost(self) -> VhostBackend | None:
        """None where this backend serves no vhost-user sockets."""

    def poll_groups(self) -> list[PollGroupStat]: ...


@dataclass(frozen=True)
class RemoteId:
    """Where a controller of another target is, as SPDK writes it."""

    trtype: str
    adrfam: str
    traddr: str
    trsvcid: str
    subnqn: str


@dataclass(frozen=True)
class RemoteNamespace:
    """A namespace of a remote controller."""

    nsid: int
    uuid: uuid_module.UUID
    block_size_bytes: int
    block_count: int


@dataclass(frozen=True)
class RemoteController:
    """What a connection to another target found."""

    cntlid: int
    serial_number: str
    model_number: str
    namespaces: tuple[RemoteNamespace, ...]


class RemoteBackend(Protocol):
    """Connections to other targets, for a backend that can be an initiator. Raises OSError."""

    def connect(self, remote: RemoteId, host_nqn: str) -> RemoteController: ...

    def disconnect(self, remote: RemoteId, cntlid: int) -> None: ...

    def discover(self, remote: RemoteId, host_nqn: str) -> list[RemoteId]:
        """The NVM subsystems that a discovery controller names."""


class VhostBackend(Protocol):
    """vhost-user-blk sockets, for a backend that can serve them. Raises OSError."""

    folder: str
    """Where the sockets are made."""

    def create(self, name: str, handle: int, *, is_readonly: bool) -> None: ...

    def delete(self, name: str) -> None: ...

    def bdev_gone(self, name: str) -> None:
        """The bdev behind a socket goes: end its I/O before returning."""


class ServiceBackend(TargetBackend, Protocol):
    """A backend with a lifetime; ``kvdev.target.service.TargetService`` is the one with a data path."""

    def start(self) -> None:
        """Start the pollers and the control thread."""

    def stop(self, *, timeout_s: float) -> None:
        """End all queue pairs, listeners and threads. Raises DeadlineError when they do not end in time."""


@dataclass
class RaidState:
    """A RAID0 as it was asked for; its bdev exists while the state is online.

    ``discovered`` are the bdevs it holds claims on. What ``base_names`` names, by name or alias, need not exist
    yet; a bdev that comes later is recognised by its name only, as in SPDK.
    """

    name: str
    strip_size_bytes: int
    base_names: tuple[str, ...]
    uuid: uuid_module.UUID = NULL_UUID
    state: str = "configuring"
    discovered: set[str] = field(default_factory=set)
    operational_count: int = 0


@dataclass(frozen=True)
class Event:
    """A change of the set of bdevs, as ``notify_get_notifications`` reports it."""

    id: int
    type: str
    context: str


@dataclass(frozen=True)
class _Claim:
    """Who writes to a bdev: a namespace of a subsystem, a RAID0, or a stack (``on_lost`` when the bdev goes)."""

    nqn: str = ""
    nsid: int = 0
    raid_name: str = ""
    on_lost: Callable[[], None] | None = None
    type: str = "exclusive_write"


def errno_error(code: int, reason: str = "", *, prefix: str = "") -> SpdkError:
    """The refusal SPDK gives as a negative errno with its text; ours adds the reason after a colon."""
    text = f"{prefix}{os.strerror(code)}"
    return SpdkError(-code, f"{text}: {reason}" if reason else text)


def invalid_params(reason: str) -> SpdkError:
    """SPDK's general refusal of the nvmf methods, with the reason it only logs."""
    return SpdkError(ERROR_INVALID_PARAMS, f"Invalid parameters: {reason}")


_NQN_UUID_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_NQN_LABEL = r"[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NQN = re.compile(rf"nqn\.\d{{4}}-\d{{2}}\.{_NQN_LABEL}(?:\.{_NQN_LABEL})*:.+", re.ASCII | re.DOTALL)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def is_valid_nqn(nqn: str) -> bool:
    """Whether the text is an NVMe Qualified Name (Base specification 4.7)."""
    if len(nqn.encode("utf-8", "replace")) > NQN_SIZE_LIMIT_BYTES:
        return False
    if nqn == DISCOVERY_NQN:
        return True
    if nqn.startswith(_NQN_UUID_PREFIX):
        return _UUID.fullmatch(nqn[len(_NQN_UUID_PREFIX) :]) is not None
    return _NQN.fullmatch(nqn) is not None


def probe_file(filename: str, *, is_readonly: bool) -> tuple[int, int]:
    """Size in bytes and the logical block size of a file or block device (0 for a regular file).

    Raises OSError.
    """
    # O_NONBLOCK: opening a FIFO by mistake must not wait for its other end.
    flags = (os.O_RDONLY if is_readonly else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(filename, flags)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISBLK(mode):
            blkssz_get = 0x1268
            (block_size_bytes,) = struct.unpack("i", fcntl.ioctl(fd, blkssz_get, struct.pack("i", 0)))
            return os.lseek(fd, 0, os.SEEK_END), block_size_bytes
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "neither a regular file nor a block device")
        return os.fstat(fd).st_size, 0
    finally:
        os.close(fd)


def _check_keys(keys: HostKeys) -> None:
    if keys.dhchap_ctrlr_key is not None and keys.dhchap_key is None:
        raise invalid_params("dhchap_ctrlr_key: expected a dhchap_key as well")
    if keys.dhchap_key is not None and keys.dhchap_key == keys.dhchap_ctrlr_key:
        raise invalid_params("dhchap_ctrlr_key: expected another key than dhchap_key: each proves one side")


def _with_keys(subsystem: Subsystem, host_nqn: str, keys: HostKeys) -> Mapping[str, HostKeys]:
    others = {nqn: kept for nqn, kept in subsystem.host_keys.items() if nqn != host_nqn}
    return MappingProxyType(others if keys == NO_KEYS else {**others, host_nqn: keys})


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class TargetModel:
    """The configuration of one target; every change is checked here and then carried out by the backend.

    Invariants: a bdev has at most one claim; a namespace's bdev is registered and claimed by it; an online
    RAID0 has a registered bdev and all its bases claimed; each listening socket of the backend is named by
    at least one subsystem. An operation that raises changed nothing, unless its text says otherwise.
    """

    def __init__(
        self,
        backend: TargetBackend,
        *,
        allow_remote: bool = False,
        make_uuid: Callable[[], uuid_module.UUID] = uuid_module.uuid4,
    ) -> None:
        self._backend = backend
        self._allow_remote = allow_remote
        self._make_uuid = make_uuid
        self._transport: Transport | None = None
        self._bdevs: Mapping[str, Bdev] = {}
        self._aliases: dict[str, str] = {}
        self.examiners: list[Callable[[Bdev], None]] = []
        """Told of each bdev that has come and has no claim yet; what waits for it may take it."""
        self.removal_watchers: list[Callable[[Bdev], None]] = []
        """Told of each bdev that is about to go."""
        self._claims: dict[str, _Claim] = {}
        self._raids: dict[str, RaidState] = {}
        self._listener_users: dict[ListenAddress, set[str]] = {}
        self._secure: set[ListenAddress] = set()
        self._events: deque[Event] = deque(maxlen=EVENT_COUNT_LIMIT)
        self._event_count = 0
        self._auto_name_count = 0
        discovery = Subsystem(
            nqn=DISCOVERY_NQN, serial_number="", model_number="", is_discovery=True, allow_any_host=True
        )
        self._subsystems: Mapping[str, Subsystem] = {DISCOVERY_NQN: discovery}
        backend.attach(self)

    # What readers in any thread may ask.

    def transport(self) -> Transport | None:
        return self._transport

    def bdev(self, name: str) -> Bdev | None:
        """A bdev by name or by an alias: its UUID, STORE/LVOL."""
        bdevs = self._bdevs
        found = bdevs.get(name) or bdevs.get(self._aliases.get(name, ""))
        if found is None and _UUID.fullmatch(name):
            wanted = uuid_module.UUID(name)
            found = next((bdev for bdev in bdevs.values() if bdev.uuid == wanted), None)
        return found

    def bdevs(self) -> tuple[Bdev, ...]:
        """All, in the order of their registration."""
        return tuple(self._bdevs.values())

    def subsystem(self, nqn: str) -> Subsystem | None:
        return self._subsystems.get(nqn)

    def subsystems(self) -> tuple[Subsystem, ...]:
        return tuple(self._subsystems.values())

    # Questions of the RPC methods.

    @property
    def backend(self) -> TargetBackend:
        return self._backend

    def new_uuid(self) -> uuid_module.UUID:
        return self._make_uuid()

    def is_claimed(self, name: str) -> bool:
        return name in self._claims

    def claim_type(self, name: str) -> str:
        """What SPDK calls the claim; empty without one."""
        claim = self._claims.get(name)
        return claim.type if claim is not None else ""

    def claim(self, name: str, on_lost: Callable[[], None], *, type: str = "exclusive_write") -> None:
        """Take a bdev for a stack; ``on_lost`` is called when it goes and must free what stands on it."""
        if name in self._claims:
            raise errno_error(errno.EPERM, f"bdev {name!r} is in use")
        self._claims[name] = _Claim(on_lost=on_lost, type=type)

    def release(self, name: str) -> None:
        """Give a bdev back that ``claim`` took."""
        claim = self._claims.get(name)
        if claim is not None and claim.on_lost is not None:
            del self._claims[name]

    def raids(self) -> tuple[RaidState, ...]:
        return tuple(self._raids.values())

    def raid(self, name: str) -> RaidState | None:
        return self._raids.get(name)

    def events(self, *, first_id: int, count_limit: int) -> list[Event]:
        kept = [event for event in self._events if event.id >= first_id]
        return kept[:count_limit]

    def iostat(self, bdev: Bdev) -> BdevIoStat:
        return self._backend.iostat(bdev.handle)

    def reset_iostat(self, bdev: Bdev) -> None:
        self._backend.reset_iostat(bdev.handle)

    def controllers(self, nqn: str) -> list[ControllerInfo]:
        return self._backend.controllers(self.find_subsystem(nqn).nqn)

    def qpairs(self, nqn: str) -> list[QpairInfo]:
        return self._backend.qpairs(self.find_subsystem(nqn).nqn)

    def poll_groups(self) -> list[PollGroupStat]:
        return self._backend.poll_groups()

    def find_subsystem(self, nqn: str) -> Subsystem:
        found = self._subsystems.get(nqn)
        if found is None:
            raise SpdkError(ERROR_INVALID_PARAMS, f"Subsystem with NQN '{nqn}' not found")
        return found

    def find_bdev(self, name: str) -> Bdev:
        found = self.bdev(name)
        if found is None:
            raise errno_error(errno.ENODEV, f"bdev {name!r}")
        return found

    # Bdevs.

    def create_malloc(
        self,
        *,
        name: str | None,
        block_size_bytes: int,
        block_count: int,
        uuid: uuid_module.UUID | None = None,
        physical_block_size_bytes: int = 0,
    ) -> str:
        """A bdev in memory; without a name it is Malloc0, Malloc1, …, counted as SPDK does."""
        if block_count == 0:
            raise errno_error(errno.EINVAL, "num_blocks: expected at least 1, got 0")
        if block_size_bytes == 0 or block_size_bytes % 512:
            raise errno_error(
                errno.EINVAL, f"block_size: expected a multiple of 512 bytes, got {block_size_bytes}"
            )
        if physical_block_size_bytes % 512:
            raise errno_error(
                errno.EINVAL,
                f"physical_block_size: expected a multiple of 512 bytes, got {physical_block_size_bytes}",
            )
        if name is None:
            # The number is used up even when the name turns out to be taken.
            name = f"Malloc{self._auto_name_count}"
            self._auto_name_count += 1
        return self.register(
            Bdev(
                name=name,
                kind=BdevKind.MALLOC,
                uuid=uuid or self._make_uuid(),
                block_size_bytes=block_size_bytes,
                block_count=block_count,
                physical_block_size_bytes=physical_block_size_bytes or block_size_bytes,
            )
        )

    def create_null(
        self, *, name: str, block_size_bytes: int, block_count: int, uuid: uuid_module.UUID | None = None
    ) -> str:
        """A bdev that forgets what is written and reads as zeroes."""
        if block_count == 0:
            raise errno_error(errno.EINVAL, "num_blocks: expected at least 1, got 0")
        if block_size_bytes == 0 or block_size_bytes % 512:
            raise errno_error(
                errno.EINVAL, f"block_size: expected a multiple of 512 bytes, got {block_size_bytes}"
            )
        return self.register(
            Bdev(
                name=name,
                kind=BdevKind.NULL,
                uuid=uuid or self._make_uuid(),
                block_size_bytes=block_size_bytes,
                block_count=block_count,
            )
        )

    def create_file(
        self,
        *,
        name: str,
        kind: BdevKind,
        filename: str,
        block_size_bytes: int = 0,
        uuid: uuid_module.UUID | None = None,
        is_readonly: bool = False,
        fallocate: bool = False,
        nowait: bool = False,
    ) -> str:
        """A bdev over a file or block device; block size 0 takes the device's own."""
        self._check_new_name(name)
        try:
            size_bytes, detected_bytes = probe_file(filename, is_readonly=is_readonly)
        except OSError as error:
            code = error.errno or errno.EIO
            reason = "" if error.strerror == os.strerror(code) else f": {error.strerror}"
            raise errno_error(code, f"filename: {filename}{reason}") from error
        wanted_bytes = block_size_bytes or detected_bytes
        if wanted_bytes < 512 or not is_power_of_two(wanted_bytes):
            raise errno_error(
                errno.EINVAL,
                f"block_size: expected a power of two from 512, got {wanted_bytes}"
                + ("" if block_size_bytes else " (a regular file has none of its own: name one)"),
            )
        if wanted_bytes < detected_bytes:
            raise errno_error(
                errno.EINVAL,
                f"block_size: {filename} has blocks of {detected_bytes} bytes, got {wanted_bytes}",
            )
        if size_bytes == 0 or size_bytes % wanted_bytes:
            raise errno_error(
                errno.EINVAL,
                f"filename: {filename} has {size_bytes} bytes, expected a multiple of {wanted_bytes} above 0",
            )
        return self.register(
            Bdev(
                name=name,
                kind=kind,
                uuid=uuid or self._make_uuid(),
                block_size_bytes=wanted_bytes,
                block_count=size_bytes // wanted_bytes,
                filename=filename,
                is_readonly=is_readonly,
                fallocate=fallocate,
                nowait=nowait,
                block_size_override=block_size_bytes != 0,
            )
        )

    def delete_bdev(self, name: str, kind: BdevKind) -> None:
        """Remove a bdev; a namespace on it goes with it, a RAID0 over it goes offline (as SPDK does)."""
        bdev = self.bdev(name)
        if bdev is None or bdev.kind is not kind:
            raise errno_error(errno.ENODEV, f"{kind.value} {name!r}")
        self.unregister(bdev)

    def _check_new_name(self, name: str) -> None:
        if not name or len(name) > BDEV_NAME_SIZE_LIMIT:
            raise errno_error(
                errno.EINVAL, f"name: expected 1 to {BDEV_NAME_SIZE_LIMIT} characters, got {len(name)}"
            )
        if self.bdev(name) is not None:
            raise errno_error(errno.EEXIST, f"bdev {name!r}")
        if len(self._bdevs) >= BDEV_COUNT_LIMIT:
            raise errno_error(errno.ENOSPC, f"a target has at most {BDEV_COUNT_LIMIT} bdevs")

    def register(self, bdev: Bdev) -> str:
        self._check_new_name(bdev.name)
        if bdev.uuid != NULL_UUID and any(other.uuid == bdev.uuid for other in self._bdevs.values()):
            raise errno_error(errno.EEXIST, f"bdev with uuid {bdev.uuid}")
        try:
            handle = self._backend.open_bdev(bdev)
        except OSError as error:
            raise errno_error(error.errno or errno.EIO, f"bdev {bdev.name!r}: {error}") from error
        self._bdevs = {**self._bdevs, bdev.name: replace(bdev, handle=handle)}
        if bdev.alias:
            self._aliases[bdev.alias] = bdev.name
        self._notify("bdev_register", bdev.name)
        self._examine(bdev.name)
        for examiner in self.examiners:
            if bdev.name in self._bdevs and bdev.name not in self._claims:
                examiner(self._bdevs[bdev.name])
        return bdev.name

    def replace_bdev(self, changed: Bdev) -> None:
        """Put a bdev of another size, mapping or access in the place of one of the same name.

        Hosts see their namespace change; a bdev that something else stands on is refused.
        """
        old = self._bdevs[changed.name]
        claim = self._claims.get(old.name)
        if claim is not None and not claim.nqn:
            raise errno_error(errno.EBUSY, f"bdev {old.name!r} is in use")
        try:
            handle = self._backend.open_bdev(changed)
        except OSError as error:
            raise errno_error(error.errno or errno.EIO, f"bdev {old.name!r}: {error}") from error
        self._bdevs = {**self._bdevs, old.name: replace(changed, handle=handle)}
        if changed.limits != RateLimits():
            self._backend.set_limits(handle, changed.limits)
        if claim is not None:
            self._backend.namespace_changed(claim.nqn, claim.nsid)
        self._backend.close_bdev(old.handle)
        if changed.block_count != old.block_count:
            self._notify("bdev_resize", old.name)

    def rename_alias(self, name: str, alias: str) -> None:
        """Give a bdev another alias."""
        old = self._bdevs[name]
        self._aliases.pop(old.alias, None)
        self._aliases[alias] = name
        self._bdevs = {**self._bdevs, name: replace(old, alias=alias)}

    def set_limits(self, bdev: Bdev, limits: RateLimits) -> None:
        self._backend.set_limits(bdev.handle, limits)
        self._bdevs = {**self._bdevs, bdev.name: replace(bdev, limits=limits)}

    def set_latencies(self, bdev: Bdev, latencies: Latencies) -> None:
        self._backend.set_latencies(bdev.handle, latencies)
        self._bdevs = {**self._bdevs, bdev.name: replace(bdev, latencies=latencies)}

    def resize_null(self, bdev: Bdev, *, size_mib: int) -> None:
        """Give a null bdev another size."""
        block_count = size_mib * MIB // bdev.block_size_bytes
        if block_count == 0:
            raise errno_error(errno.EINVAL, f"new_size: expected at least 1 MiB, got {size_mib}")
        self.replace_bdev(replace(bdev, block_count=block_count))

    def unregister(self, bdev: Bdev) -> None:
        claim = self._claims.get(bdev.name)
        if claim is not None and claim.raid_name:
            self._lose_base(self._raids[claim.raid_name], bdev.name)
        elif claim is not None:
            if claim.on_lost is not None:
                claim.on_lost()
                self._claims.pop(bdev.name, None)
            else:
                self._drop_namespace(self._subsystems[claim.nqn], claim.nsid)
        for watcher in self.removal_watchers:
            watcher(bdev)
        self._aliases.pop(bdev.alias, None)
        self._bdevs = {name: other for name, other in self._bdevs.items() if name != bdev.name}
        self._backend.close_bdev(bdev.handle)
        self._notify("bdev_unregister", bdev.name)

    def _notify(self, kind: str, context: str) -> None:
        self._events.append(Event(id=self._event_count, type=kind, context=context))
        self._event_count += 1

    # RAID0.

    def create_raid0(
        self,
        *,
        name: str,
        strip_size_kb: int,
        base_names: list[str],
        uuid: uuid_module.UUID | None = None,
    ) -> None:
        """Stripe over bases; while one does not exist the RAID0 stays "configuring" and waits for it."""
        prefix = f"Failed to create RAID bdev {name}: "
        if not name or len(name) > BDEV_NAME_SIZE_LIMIT:
            raise errno_error(errno.EINVAL, "name: empty or too long", prefix=prefix)
        if name in self._raids or self.bdev(name) is not None:
            raise errno_error(errno.EEXIST, prefix=prefix)
        if not is_power_of_two(strip_size_kb):
            raise errno_error(
                errno.EINVAL, f"strip_size_kb: expected a power of two, got {strip_size_kb}", prefix=prefix
            )
        if not 1 <= len(base_names) <= RAID_BASE_COUNT_LIMIT:
            raise errno_error(
                errno.EINVAL,
                f"base_bdevs: expected 1 to {RAID_BASE_COUNT_LIMIT} names, got {len(base_names)}",
                prefix=prefix,
            )
        raid = RaidState(
            name=name,
            strip_size_bytes=strip_size_kb * KIB,
            base_names=tuple(base_names),
            uuid=uuid or NULL_UUID,
            operational_count=len(base_names),
        )
        self._raids[name] = raid
        try:
            for base_name in base_names:
                base = self.bdev(base_name)
                if base is not None:
                    self._claim_base(raid, base)
            self._go_online_when_complete(raid)
        except SpdkError as error:
            self._forget_raid(raid)
            if error.message.startswith(prefix):
                raise
            raise SpdkError(error.code, prefix + error.message) from error

    def delete_raid(self, name: str) -> None:
        """Remove a RAID0 in whatever state; its bases are free again."""
        raid = self._raids.get(name)
        if raid is None:
            raise SpdkError(-errno.ENODEV, f"raid bdev {name} not found")
        if raid.state == "online":
            self.unregister(self._bdevs[name])
        self._forget_raid(raid)

    def _claim_base(self, raid: RaidState, base: Bdev) -> None:
        if base.name in self._claims:
            raise errno_error(errno.EPERM, f"base_bdevs: {base.name!r} is in use")
        if raid.strip_size_bytes % base.block_size_bytes:
            raise errno_error(
                errno.EINVAL,
                f"strip_size_kb: {base.name!r} has blocks of {base.block_size_bytes} bytes, "
                f"the strip has {raid.strip_size_bytes}",
            )
        for other_name in raid.discovered:
            other = self._bdevs[other_name]
            if other.block_size_bytes != base.block_size_bytes:
                raise errno_error(
                    errno.EINVAL,
                    f"base_bdevs: {other_name!r} has blocks of {other.block_size_bytes} bytes, "
                    f"{base.name!r} of {base.block_size_bytes}",
                )
        self._claims[base.name] = _Claim(raid_name=raid.name)
        raid.discovered.add(base.name)

    def _go_online_when_complete(self, raid: RaidState) -> None:
        if len(raid.discovered) < len(raid.base_names):
            return
        bases = [self.find_bdev(base_name) for base_name in raid.base_names]
        strip_blocks = raid.strip_size_bytes // bases[0].block_size_bytes
        row_count = min(base.block_count for base in bases) // strip_blocks
        if row_count == 0:
            raise errno_error(errno.EINVAL, "base_bdevs: the smallest is smaller than one strip")
        self.register(
            Bdev(
                name=raid.name,
                kind=BdevKind.RAID0,
                uuid=raid.uuid if raid.uuid != NULL_UUID else self._make_uuid(),
                block_size_bytes=bases[0].block_size_bytes,
                block_count=row_count * strip_blocks * len(bases),
                strip_size_bytes=raid.strip_size_bytes,
                base_names=tuple(base.name for base in bases),
                base_handles=tuple(base.handle for base in bases),
            )
        )
        raid.uuid = self._bdevs[raid.name].uuid
        raid.state = "online"

    def _examine(self, name: str) -> None:
        """Give a bdev that has just come to the RAID0 that waits for it, if one does."""
        for raid in list(self._raids.values()):
            if raid.state != "configuring" or name not in raid.base_names or name in raid.discovered:
                continue
            try:
                self._claim_base(raid, self._bdevs[name])
            except SpdkError:
                # SPDK's examination refuses silently too: the RAID0 goes on waiting, get_bdevs shows it.
                continue
            try:
                self._go_online_when_complete(raid)
            except SpdkError:
                self._release_base(raid, name)

    def _lose_base(self, raid: RaidState, base_name: str) -> None:
        """A base is going: an online RAID0 cannot do without it and goes offline."""
        if raid.state == "online":
            raid.operational_count -= 1
            raid.state = "offline"
            self.unregister(self._bdevs[raid.name])
        self._release_base(raid, base_name)
        if raid.state == "offline" and not raid.discovered:
            self._raids.pop(raid.name, None)

    def _release_base(self, raid: RaidState, base_name: str) -> None:
        raid.discovered.discard(base_name)
        self._claims.pop(base_name, None)

    def _forget_raid(self, raid: RaidState) -> None:
        for base_name in list(raid.discovered):
            self._release_base(raid, base_name)
        self._raids.pop(raid.name, None)

    # Transport and subsystems.

    def create_transport(self, transport: Transport) -> None:
        if self._transport is not None:
            raise SpdkError(ERROR_INTERNAL, f"Transport type '{transport.trtype}' already exists")
        self._backend.create_transport(transport)
        self._transport = transport

    def create_subsystem(self, subsystem: Subsystem) -> None:
        nqn = subsystem.nqn
        refused = f"Unable to create subsystem {nqn}"
        if not is_valid_nqn(nqn) or nqn == DISCOVERY_NQN:
            raise SpdkError(ERROR_INTERNAL, f"{refused}: nqn: no valid NVM subsystem NQN")
        if nqn in self._subsystems:
            raise SpdkError(ERROR_INTERNAL, f"{refused}: it exists")
        if len(self._subsystems) >= SUBSYSTEM_COUNT_LIMIT:
            raise SpdkError(ERROR_INTERNAL, f"{refused}: a target has at most {SUBSYSTEM_COUNT_LIMIT}")
        low, high = subsystem.min_cntlid, subsystem.max_cntlid
        if not CNTLID_MIN <= low <= high <= CNTLID_MAX:
            raise SpdkError(ERROR_INVALID_PARAMS, f"Invalid cntlid range [{low}-{high}]")
        if not 1 <= subsystem.max_namespaces <= NAMESPACE_COUNT_LIMIT:
            raise SpdkError(
                ERROR_INTERNAL,
                f"{refused}: max_namespaces: expected 1 to {NAMESPACE_COUNT_LIMIT}, "
                f"got {subsystem.max_namespaces}",
            )
        self._subsystems = {**self._subsystems, nqn: subsystem}
        self._backend.subsystem_added(nqn)

    def delete_subsystem(self, nqn: str) -> None:
        subsystem = self.find_subsystem(nqn)
        if subsystem.is_discovery:
            raise invalid_params("nqn: the discovery subsystem stays")
        self._subsystems = {name: other for name, other in self._subsystems.items() if name != nqn}
        self._backend.subsystem_removed(nqn)
        for entry in subsystem.namespaces.values():
            self._claims.pop(entry.bdev_name, None)
        for listener in subsystem.listeners:
            self._release_listener(nqn, listener)

    def _replace_subsystem(self, subsystem: Subsystem) -> None:
        self._subsystems = {**self._subsystems, subsystem.nqn: subsystem}

    def add_namespace(
        self,
        nqn: str,
        *,
        bdev_name: str,
        nsid: int = 0,
        uuid: uuid_module.UUID | None = None,
        nguid: bytes = NULL_NGUID,
        eui64: bytes = b"",
        anagrpid: int = 0,
        ptpl_file: str = "",
    ) -> int:
        """Show a bdev to hosts; nsid 0 takes the lowest free one. Without UUID and NGUID both are the bdev's UUID."""
        subsystem = self.find_subsystem(nqn)
        if subsystem.is_discovery:
            raise invalid_params("nqn: the discovery subsystem has no namespaces")
        nsid = self._new_nsid(subsystem, nsid)
        if anagrpid > subsystem.max_namespaces:
            raise invalid_params(
                f"namespace.anagrpid: expected at most {subsystem.max_namespaces}, got {anagrpid}"
            )
        bdev = self.bdev(bdev_name)
        if bdev is None:
            raise invalid_params(f"namespace.bdev_name: no bdev {bdev_name!r}")
        if bdev.name in self._claims:
            raise invalid_params(f"namespace.bdev_name: bdev {bdev_name!r} is in use")
        uuid = uuid if uuid is not None and uuid != NULL_UUID else bdev.uuid
        entry = NamespaceEntry(
            nsid=nsid,
            bdev_name=bdev.name,
            uuid=uuid,
            nguid=nguid if any(nguid) else uuid.bytes,
            eui64=eui64 if any(eui64) else b"",
            anagrpid=anagrpid or nsid,
            ptpl_file=self._checked_ptpl_file(ptpl_file, uuid),
        )
        self._claims[bdev.name] = _Claim(nqn=nqn, nsid=nsid)
        namespaces = MappingProxyType(dict(sorted({**subsystem.namespaces, nsid: entry}.items())))
        self._replace_subsystem(replace(subsystem, namespaces=namespaces))
        self._backend.namespace_changed(nqn, nsid)
        return nsid

    def _checked_ptpl_file(self, path: str, uuid: uuid_module.UUID) -> str:
        if not path:
            return ""
        for subsystem in self._subsystems.values():
            if any(entry.ptpl_file == path for entry in subsystem.namespaces.values()):
                raise invalid_params(
                    f"namespace.ptpl_file: {path}: another namespace keeps its reservations there"
                )
        try:
            load_ptpl(path, uuid)
        except PtplError as error:
            raise invalid_params(f"namespace.{error}") from error
        return path

    def _new_nsid(self, subsystem: Subsystem, nsid: int) -> int:
        limit = subsystem.max_namespaces
        if nsid == 0:
            free = (number for number in range(1, limit + 1) if number not in subsystem.namespaces)
            nsid = next(free, 0)
            if nsid == 0:
                raise invalid_params(f"namespace.nsid: all {limit} are in use")
        if nsid > limit:
            raise invalid_params(f"namespace.nsid: expected 1 to {limit}, got {nsid}")
        if nsid in subsystem.namespaces:
            raise invalid_params(f"namespace.nsid: {nsid} is in use")
        return nsid

    def remove_namespace(self, nqn: str, nsid: int) -> None:
        subsystem = self.find_subsystem(nqn)
        if nsid not in subsystem.namespaces:
            raise invalid_params(f"nsid: subsystem has no namespace {nsid}")
        self._drop_namespace(subsystem, nsid)

    def _drop_namespace(self, subsystem: Subsystem, nsid: int) -> None:
        kept = {number: entry for number, entry in subsystem.namespaces.items() if number != nsid}
        self._replace_subsystem(replace(subsystem, namespaces=MappingProxyType(kept)))
        # Returns when no I/O runs on it any more; only then may the bdev go or be claimed again.
        self._backend.namespace_changed(subsystem.nqn, nsid)
        self._claims.pop(subsystem.namespaces[nsid].bdev_name, None)

    # Listeners and hosts.

    def add_listener(self, nqn: str, *, address: str, port: int, is_secure: bool = False) -> ListenAddress:
        """Listen for a subsystem; port 0 is any free port, and the real one is stored.

        With ``is_secure`` hosts need TLS there, for every subsystem that listens on that address.
        """
        subsystem = self.find_subsystem(nqn)
        if self._transport is None:
            raise invalid_params("listen_address.trtype: no TCP transport: call nvmf_create_transport first")
        if not self._allow_remote and not _is_loopback(address):
            raise invalid_params(
                f"listen_address.traddr: {address} is not loopback: start the target with --allow-remote"
            )
        wanted = ListenAddress(address, port)
        if wanted in subsystem.listeners:
            raise invalid_params(f"listen_address: {address}:{port} is a listener of it")
        if wanted in self._listener_users and is_secure != (wanted in self._secure):
            raise invalid_params(
                f"secure_channel: {address}:{port} listens {'without' if is_secure else 'with'} TLS for another "
                f"subsystem: take another port"
            )
        if wanted not in self._listener_users:
            try:
                wanted = ListenAddress(*self._backend.start_listener(address, port, is_secure=is_secure))
            except OSError as error:
                reason = error.strerror or str(error)
                raise invalid_params(f"listen_address: {address}:{port}: {reason}") from error
            self._listener_users[wanted] = set()
            if is_secure:
                self._secure.add(wanted)
        self._listener_users[wanted].add(nqn)
        secure = subsystem.secure_listeners | ({wanted} if is_secure else frozenset())
        self._replace_subsystem(
            replace(subsystem, listeners=(*subsystem.listeners, wanted), secure_listeners=secure)
        )
        self._backend.subsystem_changed(nqn)
        return wanted

    def remove_listener(self, nqn: str, *, address: str, port: int) -> None:
        subsystem = self.find_subsystem(nqn)
        listener = ListenAddress(address, port)
        if listener not in subsystem.listeners:
            raise invalid_params(f"listen_address: {address}:{port} is no listener of it")
        kept = tuple(other for other in subsystem.listeners if other != listener)
        secure = subsystem.secure_listeners - {listener}
        self._replace_subsystem(replace(subsystem, listeners=kept, secure_listeners=secure))
        self._backend.subsystem_changed(nqn)
        self._release_listener(nqn, listener)

    def set_ana_state(
        self, nqn: str, *, address: str, port: int, state: AnaState, anagrpid: int | None = None
    ) -> None:
        """What one ANA group, or all of them, are through one listener; controllers there are told."""
        subsystem = self.find_subsystem(nqn)
        listener = ListenAddress(address, port)
        if not subsystem.ana_reporting:
            raise invalid_params(f"ana_state: {nqn} was created without ana_reporting")
        if listener not in subsystem.listeners:
            raise invalid_params(f"listen_address: {address}:{port} is no listener of it")
        if anagrpid is not None and not 1 <= anagrpid <= subsystem.max_namespaces:
            raise invalid_params(f"anagrpid: expected 1 to {subsystem.max_namespaces}, got {anagrpid}")
        states = dict(subsystem.ana_states)
        if anagrpid is None:
            states = {key: kept for key, kept in states.items() if key[0] != listener}
        states[listener, anagrpid or 0] = state
        self._replace_subsystem(replace(subsystem, ana_states=MappingProxyType(states)))
        self._backend.subsystem_changed(nqn)

    def _release_listener(self, nqn: str, listener: ListenAddress) -> None:
        users = self._listener_users[listener]
        users.discard(nqn)
        if not users:
            del self._listener_users[listener]
            self._secure.discard(listener)
            self._backend.stop_listener(listener.address, listener.port)

    def add_host(self, nqn: str, host_nqn: str, keys: HostKeys = NO_KEYS) -> None:
        subsystem = self.find_subsystem(nqn)
        if not is_valid_nqn(host_nqn):
            raise SpdkError(ERROR_INTERNAL, f"Internal error: host: no valid NQN: {host_nqn!r}")
        if host_nqn in subsystem.hosts:
            raise SpdkError(ERROR_INTERNAL, f"Internal error: host: {host_nqn} is allowed already")
        if len(subsystem.hosts) >= HOST_COUNT_LIMIT:
            raise SpdkError(ERROR_INTERNAL, f"Internal error: host: at most {HOST_COUNT_LIMIT} per subsystem")
        _check_keys(keys)
        # SPDK lists the newest first.
        hosts = (host_nqn, *subsystem.hosts)
        self._replace_subsystem(
            replace(subsystem, hosts=hosts, host_keys=_with_keys(subsystem, host_nqn, keys))
        )
        self._backend.subsystem_changed(nqn)

    def set_host_keys(self, nqn: str, host_nqn: str, keys: HostKeys) -> None:
        """Replace a host's DH-HMAC-CHAP keys, from its next authentication on; what is connected stays."""
        subsystem = self.find_subsystem(nqn)
        if host_nqn not in subsystem.hosts:
            raise SpdkError(ERROR_INTERNAL, f"Internal error: host: {host_nqn} is not in the list")
        _check_keys(keys)
        keys = replace(keys, psk=subsystem.keys_of(host_nqn).psk)
        self._replace_subsystem(replace(subsystem, host_keys=_with_keys(subsystem, host_nqn, keys)))
        self._backend.subsystem_changed(nqn)

    def remove_host(self, nqn: str, host_nqn: str) -> None:
        subsystem = self.find_subsystem(nqn)
        if host_nqn not in subsystem.hosts:
            raise SpdkError(ERROR_INTERNAL, f"Internal error: host: {host_nqn} is not in the list")
        kept = tuple(other for other in subsystem.hosts if other != host_nqn)
        keys = _with_keys(subsystem, host_nqn, NO_KEYS)
        self._replace_subsystem(replace(subsystem, hosts=kept, host_keys=keys))
        self._backend.subsystem_changed(nqn)

    def set_allow_any_host(self, nqn: str, is_allowed: bool) -> None:
        subsystem = self.find_subsystem(nqn)
        self._replace_subsystem(replace(subsystem, allow_any_host=is_allowed))
        self._backend.subsystem_changed(nqn)
