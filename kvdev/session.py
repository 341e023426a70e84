"""A session: what one process has open, by URI, and one close for all of it.

Not here: what a volume or KV namespace is (``kvdev.store``); one controller (``kvdev.initiator``).
Threads: one thread at a time; devices are driven by the thread that drives their queue.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvdev.block.device import BlockDevice
from kvdev.block.drill import DrillCounts, DrillQueue
from kvdev.block.file import EngineChoice, FileDevice, FileOptions, choose_engine
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError, UsageError
from kvdev.initiator.controller import Controller
from kvdev.initiator.discovery import PersistentDiscovery, discover, follow_referrals
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NamespaceInfo
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.subsystem import Subsystem
from kvdev.initiator.supervisor import Supervisor
from kvdev.native.admin import AdminThread
from kvdev.native.file import REGION_COUNT_MAX, FileEngine, Region
from kvdev.native.poller import BackgroundPoller
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.uri import (
    DeviceUri,
    FileUri,
    KvNamespaceUri,
    MemUri,
    TcpUri,
    VhostUri,
    VolumeUri,
    parse_device_uri,
    parse_discovery_uri,
    parse_kv_namespace_uri,
    parse_subsystem_uri,
    parse_volume_uri,
)
from kvdev.vhost.device import VhostDevice
from kvdev.vhost.memory import SharedMemory
from kvdev.vhost.options import VhostOptions
from kvdev.wire.log import DiscoveryEntry

if TYPE_CHECKING:
    from kvdev.geometry import Geometry
    from kvdev.pool.client import PoolStore
    from kvdev.store.namespace import KvNamespace
    from kvdev.store.volume import Volume

Scans: TypeAlias = dict[Subsystem, list[NamespaceInfo]]

log = logging.getLogger("kvdev.session")

POLLER_GRACE_S = 0.5
"""What is in flight when a session closes may take so long; the rest of its time is for the controllers."""
drill_log = logging.getLogger("kvdev.drill")
"""Apart, so that the command line shows it whether or not it shows the library's log."""

OPEN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
INTERRUPTED_CLOSE_TIMEOUT_S = 1.0
"""All orderly shutdowns together after an interrupt: much for a peer that answers, bearable for a dead one."""
QUEUE_CAPACITY_COUNT = 16384
"""Commands outstanding over all NVMe/TCP devices of a session: 2 GiB in strips of 128 KiB."""


def _grace(limit: Deadline) -> Deadline:
    return Deadline.after(min(POLLER_GRACE_S, limit.remaining_s()))


class Session:
    """Everything opened through it is closed by ``close``, in the reverse order, in bounded time.

    All devices but memory share one queue, controllers are shared by the namespaces of a subsystem, and files by the
    engine that moves their data.
    """

    def __init__(
        self,
        *,
        host: HostIdentity | None = None,
        options: ControllerOptions | None = None,
        vhost_options: VhostOptions | None = None,
        queue_capacity_count: int = QUEUE_CAPACITY_COUNT,
    ) -> None:
        """Nothing is connected or started yet; ``host`` defaults to this machine's identity."""
        self.options = options or ControllerOptions()
        self.vhost_options = vhost_options or VhostOptions()
        self._host = host
        self._queue_capacity_count = queue_capacity_count
        self._admin: AdminThread | None = None
        self._queue: HostQueue | None = None
        self._drill_base: HostQueue | None = None
        self._drill_queue: DrillQueue | None = None
        self._drilled: list[tuple[str, DrillCounts]] = []
        self._supervisor: Supervisor | None = None
        self._subsystems: dict[TcpUri, Subsystem] = {}
        self._memories: dict[str, MemoryDevice] = {}
        self._vhosts: list[VhostDevice] = []
        self._shared: list[SharedMemory] = []
        self._arenas: list[Arena] = []
        self._engines: dict[tuple[str, bool], EngineChoice] = {}
        self._regions: list[tuple[Arena, FileEngine, Region]] = []
        self._closers: list[tuple[str, Callable[[Deadline], None]]] = []
        self._is_closed = False

    @property
    def host(self) -> HostIdentity:
        """Who this host is, loaded on first use."""
        if self._host is None:
            self._host = HostIdentity.load()
        return self._host

    @property
    def admin(self) -> AdminThread:
        """The thread that keeps connections alive, started on first use."""
        self._check_open()
        if self._admin is None:
            self._admin = AdminThread()
        return self._admin

    @property
    def queue(self) -> HostQueue:
        """The queue of all devices but memory, and but those with a drill."""
        self._check_open()
        if self._queue is None:
            self._queue = self._make_queue()
        return self._queue

    def start_poller(self, *, core: int | None = None, ring_count: int = 4096) -> BackgroundPoller:
        """Have a thread of the C core drive the queue from now on; closed with the session.

        Devices are used through its channels then (``ChannelDevice``), by any number of threads. For a thread on each
        of several cores, each with its own connections, make a session for each core.
        """
        poller = BackgroundPoller(self.queue, core=core, ring_count=ring_count)
        self._closers.append(("background poller", lambda limit: poller.close(deadline=_grace(limit))))
        return poller

    def _make_queue(self) -> HostQueue:
        return HostQueue(
            capacity_count=self._queue_capacity_count,
            window_size_bytes=self.options.window_size_bytes,
            command_timeout_s=self.options.command_timeout_s,
        )

    def _queue_of(self, uri: DeviceUri) -> HostQueue:
        """The queue that a device is opened on: those with a drill have theirs, whose completions nobody else takes."""
        if uri.drill is None:
            return self.queue
        if self._drill_base is None:
            self._drill_base = self._make_queue()
            self._drill_queue = DrillQueue(self._drill_base)
        return self._drill_base

    def subsystem(self, uri: TcpUri | str, *, deadline: Deadline | None = None) -> Subsystem:
        """A subsystem with all its paths, connected on first use and shared afterwards.

        What is lost is connected again by itself, as the options say. One whose paths have all been given
        up is made anew.
        """
        self._check_open()
        if isinstance(uri, str):
            uri = parse_subsystem_uri(uri)
        key = dataclasses.replace(uri, nsid=None)
        found = self._subsystems.get(key)
        if found is not None and not found.is_ended:
            return found
        if self._supervisor is None:
            self._supervisor = Supervisor(self.admin)
        subsystem = Subsystem.open(
            key,
            host=self.host,
            options=self.options,
            supervisor=self._supervisor,
            deadline=deadline or Deadline.after(OPEN_TIMEOUT_S),
        )
        self._subsystems[key] = subsystem
        self._closers.append((str(key), subsystem.close))
        return subsystem

    def controller(self, uri: TcpUri | str, *, deadline: Deadline | None = None) -> Controller:
        """A controller of a subsystem, as it is connected now; after a loss there is another one."""
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        return self.subsystem(uri, deadline=deadline).live_controller(deadline=deadline)

    def discover(
        self, uri: TcpUri | str, *, has_referrals: bool = False, deadline: Deadline | None = None
    ) -> list[DiscoveryEntry]:
        """Entries of the discovery log of ``[tcp://]HOST[:PORT]``.

        With ``has_referrals`` the discovery services that it refers to are asked as well.
        """
        self._check_open()
        uri = parse_discovery_uri(uri) if isinstance(uri, str) else uri
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        entries = discover(uri, host=self.host, admin=self.admin, options=self.options, deadline=deadline)
        if not has_referrals:
            return entries
        return follow_referrals(
            entries,
            came_from=uri,
            host=self.host,
            admin=self.admin,
            options=self.options,
            deadline=deadline,
        )

    def persistent_discovery(self, uri: TcpUri | str) -> PersistentDiscovery:
        """A discovery service that says when its log changes; closed with the session."""
        self._check_open()
        uri = parse_discovery_uri(uri) if isinstance(uri, str) else uri
        service = PersistentDiscovery(uri, host=self.host, admin=self.admin, options=self.options)
        self._closers.append((str(uri), service.close))
        return service

    def open_device(self, uri: DeviceUri | str, *, deadline: Deadline | None = None) -> BlockDevice:
        """One device; it stays open until ``close`` of itself or of the session."""
        self._check_open()
        if isinstance(uri, str):
            uri = parse_device_uri(uri)
        return self._open_device(uri, {}, deadline or Deadline.after(OPEN_TIMEOUT_S))

    def _open_device(self, uri: DeviceUri, scans: Scans, deadline: Deadline) -> BlockDevice:
        """One device; ``scans`` keeps what was identified, so that many namespaces cost one scan."""
        if isinstance(uri, MemUri):
            return self._open_memory(uri)
        device: BlockDevice
        if isinstance(uri, TcpUri):
            subsystem = self.subsystem(uri, deadline=deadline)
            infos = self._scan(subsystem, scans, deadline)
            device = subsystem.open_namespace(uri.nsid, self._queue_of(uri), infos=infos, deadline=deadline)
        elif isinstance(uri, FileUri):
            device = self._open_file(uri)
        else:
            device = self._open_vhost(uri, deadline)
        self._closers.append((str(uri), lambda _: device.close()))
        if uri.drill is not None:
            assert self._drill_queue is not None, "the device was opened on its base"
            self._put_drill(device, self._drill_queue, uri)
        return device

    def _put_drill(self, device: BlockDevice, queue: DrillQueue, uri: DeviceUri) -> None:
        """Let what the URI says go wrong on a device, and say so."""
        assert uri.drill is not None, "the URI has a drill"
        plain = str(dataclasses.replace(parse_device_uri(device.uri), drill=None))
        queue.put_on(device, uri.drill)
        device.lock_name = plain
        device.uri = str(dataclasses.replace(parse_device_uri(plain), drill=uri.drill))
        self._drilled.append((plain, queue.counts(device)))
        drill_log.warning("DRILL on %s: %s: faults from here on are made on purpose", plain, uri.drill)

    def open_members(self, uri: VolumeUri | str, *, deadline: Deadline | None = None) -> list[BlockDevice]:
        """The devices of a volume's URI, in its order; for ``vol+tcp:`` every usable active namespace.

        Which of them carry labels is the store's to say. When one fails none of them stays open.
        """
        self._check_open()
        if isinstance(uri, str):
            uri = parse_volume_uri(uri)
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        scans: Scans = {}
        uris: list[DeviceUri] = list(uri.members)
        if uri.subsystem is not None:
            uris += self._namespace_uris(uri.subsystem, scans, deadline)
        members: list[BlockDevice] = []
        try:
            for member_uri in uris:
                members.append(self._open_device(member_uri, scans, deadline))
        except BaseException:
            self._release(members)
            raise
        return members

    def open_volume(self, uri: VolumeUri | str, *, deadline: Deadline | None = None) -> Volume:
        """A volume by its labels; of ``vol+tcp:`` the namespaces that carry one are its members.

        Members stay open until the session closes. When it fails none of them stays open.
        """
        from kvdev.store.volume import Volume

        if isinstance(uri, str):
            uri = parse_volume_uri(uri)
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        members = self.open_members(uri, deadline=deadline)
        try:
            if uri.subsystem is not None:
                members = self._labelled(uri, members, deadline)
            return Volume.open(members, deadline=deadline)
        except BaseException:
            self._release(members)
            raise

    def _labelled(
        self, uri: VolumeUri, candidates: list[BlockDevice], deadline: Deadline
    ) -> list[BlockDevice]:
        """Those of a subsystem's namespaces that carry a label; the others are closed."""
        from kvdev.store.members import read_label

        members: list[BlockDevice] = []
        for device in candidates:
            try:
                read_label(device, deadline)
            except (CorruptionError, UsageError) as error:
                log.info("%s: left out: %s", device.uri, error)
                self._release([device])
            else:
                members.append(device)
        if not members:
            raise UsageError(
                f"{uri}: members: expected at least one labelled namespace, got none of {len(candidates)}; "
                f"`kvdev volume create` makes a volume of them"
            )
        return members

    def open_kv_namespace(
        self,
        uri: KvNamespaceUri | str,
        *,
        mode: Literal["owner", "reader", "follower"] = "owner",
        geometry: Geometry | None = None,
        deadline: Deadline | None = None,
    ) -> KvNamespace:
        """A KV namespace of a volume, closed (flushed) with the session if not before."""
        if isinstance(uri, str):
            uri = parse_kv_namespace_uri(uri)
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        volume = self.open_volume(uri.volume, deadline=deadline)
        namespace = volume.open_namespace(uri.name, mode=mode, geometry=geometry, deadline=deadline)
        self._closers.append((str(uri), lambda limit: namespace.close(deadline=limit)))
        return namespace

    def _release(self, devices: list[BlockDevice]) -> None:
        """Close what was opened in vain; memory stays, its name may be in use elsewhere in the session."""
        for device in devices:
            if not isinstance(device, MemoryDevice):
                device.close()

    def _scan(self, subsystem: Subsystem, scans: Scans, deadline: Deadline) -> list[NamespaceInfo]:
        if subsystem not in scans:
            scans[subsystem] = subsystem.scan(deadline=deadline)
        return scans[subsystem]

    def _namespace_uris(self, subsystem: TcpUri, scans: Scans, deadline: Deadline) -> list[DeviceUri]:
        infos = self._scan(self.subsystem(subsystem, deadline=deadline), scans, deadline)
        for info in infos:
            if info.problem:
                log.warning("%s nsid %d: left out: %s", subsystem, info.nsid, info.problem)
        usable: list[DeviceUri] = [
            dataclasses.replace(subsystem, nsid=info.nsid) for info in infos if not info.problem
        ]
        if not usable:
            raise UsageError(
                f"vol+{subsystem}: members: expected at least one usable namespace, "
                f"got {len(infos)} active ones, none usable"
            )
        return usable

    def _open_file(self, uri: FileUri) -> FileDevice:
        usual = FileOptions()
        options = FileOptions(
            engine=uri.engine or usual.engine,
            direct=uri.direct or usual.direct,
            depth=uri.depth or usual.depth,
            is_polled=bool(uri.is_polled),
        )
        choice = self._engine(options)
        return FileDevice(uri.path, options=options, queue=self._queue_of(uri), choice=choice)

    def _engine(self, options: FileOptions) -> EngineChoice:
        """The engine of all files with these options, made on first use."""
        key = (options.engine, options.is_polled)
        if key not in self._engines:
            self._engines[key] = choose_engine(options.engine, wants_iopoll=options.is_polled)
            for arena in self._arenas:
                self._register(arena, self._engines[key].engine)
        return self._engines[key]

    def _register(self, arena: Arena, engine: FileEngine) -> None:
        """Have an engine know where payload will lie."""
        if arena.is_closed or len(engine.regions) == REGION_COUNT_MAX:
            return  # payload there is pinned by each operation instead
        region = engine.add_region(arena.address, arena.size_bytes, keep=arena.bytes(), hold=arena.hold)
        self._regions.append((arena, engine, region))
        if region.refusal:
            log.warning("arena of %d bytes: not registered: %s", arena.size_bytes, region.refusal)

    def _note_arena(self, arena: Arena) -> None:
        """Register an arena with every engine, now and later, and let go of those that were closed."""
        for each, engine, region in self._regions:
            if each.is_closed:
                engine.remove_region(region)
        self._regions = [item for item in self._regions if not item[0].is_closed]
        self._arenas = [each for each in self._arenas if not each.is_closed]
        self._arenas.append(arena)
        for choice in self._engines.values():
            self._register(arena, choice.engine)

    def _open_vhost(self, uri: VhostUri, deadline: Deadline) -> VhostDevice:
        device = VhostDevice(
            uri.path, self._queue_of(uri), memory=self._shared, options=self.vhost_options, deadline=deadline
        )
        self._vhosts.append(device)
        return device

    def share(self, memory: Arena | SharedMemory, *, deadline: Deadline | None = None) -> None:
        """Let pages lie in this memory on vhost-user devices, those open and those opened later.

        Nothing may be outstanding on those devices. The memory stays mapped as long as the session.
        """
        self._check_open()
        shared = SharedMemory.of(memory) if isinstance(memory, Arena) else memory
        deadline = deadline or Deadline.after(OPEN_TIMEOUT_S)
        self._vhosts = [device for device in self._vhosts if device.state != "closed"]
        for device in self._vhosts:
            device.share(shared, deadline=deadline)
        self._shared.append(shared)
        if isinstance(memory, Arena):
            self._note_arena(memory)

    def make_arena(self, size_bytes: int) -> Arena:
        """A staging arena that all devices open now can reach; the caller's to close.

        With file devices its memory stays mapped until the next arena is made or the session closes.
        """
        if not self._vhosts:
            arena = Arena(size_bytes)
            self._note_arena(arena)
            return arena
        arena = Arena(size_bytes, is_shareable=True)
        try:
            self.share(arena)
        except BaseException:
            arena.close()
            raise
        return arena

    def _open_memory(self, uri: MemUri) -> MemoryDevice:
        found = self._find_memory(uri)
        if uri.drill is None:
            return found
        # The same memory behind a queue of its own: who has it without the drill is not to meet the faults.
        drilled = MemoryDevice(size_bytes=found.size_bytes, name=uri.name, data=found.data)
        self._put_drill(drilled, DrillQueue(drilled.queue), uri)
        return drilled

    def _find_memory(self, uri: MemUri) -> MemoryDevice:
        found = self._memories.get(uri.name)
        if found is None:
            if uri.size_bytes is None:
                raise UsageError(f"{uri}: size: expected {uri}?size=SIZE where the name is opened first")
            found = MemoryDevice(size_bytes=uri.size_bytes, name=uri.name)
            self._memories[uri.name] = found
            memory = found
            self._closers.append((str(uri), lambda _: memory.close()))
        elif uri.size_bytes not in (None, found.size_bytes):
            raise UsageError(
                f"{uri}: size: expected {found.size_bytes} as first opened, got {uri.size_bytes}"
            )
        return found

    def close(self, deadline: Deadline | None = None) -> None:
        """Close everything in reverse order; bounded, also with dead peers. Closing twice does nothing.

        An interrupt (Ctrl-C) meanwhile skips what is left of the orderly shutdowns, still closes every
        connection, and is raised again at the end.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for plain, counts in self._drilled:
            drill_log.warning("DRILL on %s: over: %s", plain, counts)
        limit = deadline or Deadline.after(CLOSE_TIMEOUT_S)
        interrupt: BaseException | None = None
        closers = [*self._closers[::-1]]
        if self._supervisor is not None:
            supervisor = self._supervisor
            closers.append(("supervisor", lambda _: supervisor.close()))
        for queue in (self._queue, self._drill_base):
            if queue is not None:
                closers.append(("queue", lambda _, queue=queue: queue.close()))  # type: ignore[misc]
        closers += [(f"engine {name}", self._engine_closer(name)) for name in self._engines]
        if self._admin is not None:
            admin = self._admin
            closers.append(("admin thread", lambda _: admin.close()))
        for name, closer in closers:
            try:
                closer(limit)
            except KvdevError as error:
                log.warning("%s: close: %s", name, error)
            except BaseException as error:
                interrupt = interrupt or error
                limit = Deadline.after(0)
        self._closers.clear()
        self._subsystems.clear()
        self._memories.clear()
        self._drilled.clear()
        self._vhosts.clear()
        self._shared.clear()
        self._arenas.clear()
        self._regions.clear()
        if interrupt is not None:
            raise interrupt

    def _engine_closer(self, key: tuple[str, bool]) -> Callable[[Deadline], None]:
        engine = self._engines[key].engine
        return lambda _: engine.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("session: expected an open session, got a closed one")

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_interrupted = error is not None and not isinstance(error, Exception)
        self.close(Deadline.after(INTERRUPTED_CLOSE_TIMEOUT_S) if is_interrupted else None)


def open_pool(
    path: str,
    namespace: str,
    *,
    geometry: Geometry | None = None,
    options: ControllerOptions | None = None,
    arenas: Sequence[Arena] = (),
    timeout_s: float = OPEN_TIMEOUT_S,
    deadline: Deadline | None = None,
) -> PoolStore:
    """The page store of a KV namespace that the pool process at ``path`` owns.

    The volume is opened as the pool's host, anew whenever the pool process is another one.

    Args:
        options: for the connections of NVMe/TCP members.
        arenas: memory that pages will lie in; members that share memory are told of it.
    """
    from kvdev.pool.client import PoolFacts, PoolStore

    def open_volume(facts: PoolFacts, limit: Deadline) -> tuple[Volume, Callable[[], None]]:
        session = Session(host=HostIdentity.of(facts.host_nqn, host_id=facts.host_id), options=options)
        try:
            for arena in arenas:
                session.share(arena, deadline=limit)
            return session.open_volume(facts.volume_uri, deadline=limit), session.close
        except BaseException:
            session.close()
            raise

    return PoolStore(path, namespace, open_volume, geometry=geometry, timeout_s=timeout_s, deadline=deadline)
