"""A target backend without a data path: sizes for bdevs, real listening sockets, controllers as numbers.

For tests of the model, of the RPC server and of what drives them; it keeps the promises of ``TargetBackend``
that they see. With a ``MemoryFabric`` it is an initiator too, and finds the other backends of the fabric;
with a folder it makes vhost sockets that nobody answers on.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path

from kvdev.target.model import (
    Bdev,
    BdevIoStat,
    BdevKind,
    ControllerInfo,
    Injection,
    Latencies,
    PollGroupStat,
    QpairInfo,
    RateLimits,
    RemoteController,
    RemoteId,
    RemoteNamespace,
    TargetView,
    Transport,
)

HISTOGRAM_BUCKET_COUNT = 7424
"""128 buckets for each of the 58 powers of two that a latency can have."""


class MemoryFabric:
    """The backends that can reach each other, by the addresses they listen on."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], MemoryBackend] = {}
        self.next_cntlid = 1

    def connect(self, remote: RemoteId, host_nqn: str) -> RemoteController:
        """What a host finds there. OSError when nobody listens, knows the subsystem, or lets the host in."""
        view = self._view(remote)
        subsystem = view.subsystem(remote.subnqn)
        if subsystem is None or not subsystem.is_host_allowed(host_nqn):
            raise OSError(errno.ECONNREFUSED, "the target refuses")
        namespaces = []
        for entry in subsystem.namespaces.values():
            bdev = view.bdev(entry.bdev_name)
            if bdev is not None:
                sizes = (bdev.block_size_bytes, bdev.block_count)
                namespaces.append(RemoteNamespace(entry.nsid, entry.uuid, *sizes))
        self.next_cntlid += 1
        names = (subsystem.serial_number, subsystem.model_number)
        return RemoteController(self.next_cntlid - 1, *names, tuple(namespaces))

    def discover(self, remote: RemoteId) -> list[RemoteId]:
        """The NVM subsystems of a target, each at each of its listeners."""
        return [
            RemoteId("TCP", where.adrfam, where.address, str(where.port), subsystem.nqn)
            for subsystem in self._view(remote).subsystems()
            if not subsystem.is_discovery
            for where in subsystem.listeners
        ]

    def _view(self, remote: RemoteId) -> TargetView:
        port = int(remote.trsvcid) if remote.trsvcid.isdigit() else 0
        backend = self.listeners.get((remote.traddr, port))
        if backend is None or backend.view is None:
            raise OSError(errno.ECONNREFUSED, "nobody listens there")
        return backend.view


class MemoryRemote:
    """The initiator of a backend on a fabric; ``connected`` are its connections."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.connected: list[tuple[RemoteId, int]] = []
        self._fabric = fabric

    def connect(self, remote: RemoteId, host_nqn: str) -> RemoteController:
        found = self._fabric.connect(remote, host_nqn)
        self.connected.append((remote, found.cntlid))
        return found

    def disconnect(self, remote: RemoteId, cntlid: int) -> None:
        self.connected.remove((remote, cntlid))

    def discover(self, remote: RemoteId, host_nqn: str) -> list[RemoteId]:
        del host_nqn
        return self._fabric.discover(remote)


class MemoryVhost:
    """Sockets in a folder that listen and are not answered on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sockets: dict[str, socket.socket] = {}

    def create(self, name: str, handle: int, *, is_readonly: bool) -> None:
        del handle, is_readonly
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"{self.folder}/{name}")
        except OSError:
            listening.close()
            raise
        listening.listen()
        self.sockets[name] = listening

    def delete(self, name: str) -> None:
        self.sockets.pop(name).close()
        Path(f"{self.folder}/{name}").unlink()

    def bdev_gone(self, name: str) -> None:
        assert name in self.sockets


class MemoryBackend:
    """Counts what it was asked for; ``log`` holds the calls in order."""

    def __init__(
        self,
        *,
        memory_limit_bytes: int = 1 << 40,
        fabric: MemoryFabric | None = None,
        vhost_folder: str | None = None,
    ) -> None:
        self._fabric = fabric
        self.remote = MemoryRemote(fabric) if fabric is not None else None
        self.vhost = MemoryVhost(vhost_folder) if vhost_folder is not None else None
        self.log: list[tuple[str, object]] = []
        self.open_bdevs: dict[int, Bdev] = {}
        self.listeners: dict[tuple[str, int], socket.socket] = {}
        self.view: TargetView | None = None
        self.histogram_counts = [0] * HISTOGRAM_BUCKET_COUNT
        self._stats: dict[int, BdevIoStat] = {}
        self._memory_limit_bytes = memory_limit_bytes
        self._next_handle = 0

    def attach(self, view: TargetView) -> None:
        self.view = view

    def start(self) -> None:
        self.log.append(("start", None))

    def stop(self, *, timeout_s: float) -> None:
        del timeout_s
        for address in list(self.listeners):
            self.stop_listener(*address)
        if self.vhost is not None:
            for name in list(self.vhost.sockets):
                self.vhost.delete(name)
        self.log.append(("stop", None))

    def open_bdev(self, bdev: Bdev) -> int:
        is_memory = bdev.kind in (BdevKind.MALLOC, BdevKind.NULL, BdevKind.RAID0)
        if is_memory and bdev.block_size_bytes * bdev.block_count > self._memory_limit_bytes:
            raise OSError(errno.ENOMEM, "no memory for it")
        for handle in bdev.base_handles:
            if handle not in self.open_bdevs:
                raise OSError(errno.EBADF, f"base handle {handle} is not open")
        handle = self._next_handle
        self._next_handle += 1
        self.open_bdevs[handle] = replace(bdev, handle=handle)
        self._stats[handle] = BdevIoStat()
        self.log.append(("open_bdev", bdev.name))
        return handle

    def close_bdev(self, handle: int) -> None:
        for other in self.open_bdevs.values():
            if handle in other.base_handles:
                raise AssertionError(f"{other.name} still stands on handle {handle}")
        self.log.append(("close_bdev", self.open_bdevs.pop(handle).name))
        del self._stats[handle]

    def iostat(self, handle: int) -> BdevIoStat:
        return self._stats[handle]

    def reset_iostat(self, handle: int) -> None:
        self._stats[handle] = BdevIoStat()

    def clear_bdev(self, handle: int) -> None:
        self.log.append(("clear_bdev", self.open_bdevs[handle].name))

    def set_limits(self, handle: int, limits: RateLimits) -> None:
        self.log.append(("set_limits", (self.open_bdevs[handle].name, limits)))

    def set_latencies(self, handle: int, latencies: Latencies) -> None:
        self.log.append(("set_latencies", (self.open_bdevs[handle].name, latencies)))

    def inject(self, handle: int, operation: str, injection: Injection) -> None:
        self.log.append(("inject", (self.open_bdevs[handle].name, operation, injection)))

    def resume_pending(self, handle: int) -> None:
        self.log.append(("resume_pending", self.open_bdevs[handle].name))

    def start_histogram(self, handle: int, operation: str | None) -> None:
        self.log.append(("start_histogram", (self.open_bdevs[handle].name, operation)))

    def stop_histogram(self, handle: int) -> None:
        self.log.append(("stop_histogram", self.open_bdevs[handle].name))

    def histogram(self, handle: int) -> list[int]:
        assert handle in self.open_bdevs
        return list(self.histogram_counts)

    def count_io(self, handle: int, stat: BdevIoStat) -> None:
        """Set the counters, as I/O would."""
        self._stats[handle] = stat

    def create_transport(self, transport: Transport) -> None:
        self.log.append(("create_transport", transport.max_io_size))

    def start_listener(self, address: str, port: int, *, is_secure: bool = False) -> tuple[str, int]:
        del is_secure  # nobody answers there
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen()
        except OSError:
            listening.close()
            raise
        bound_address, bound_port = listening.getsockname()[:2]
        self.listeners[(bound_address, bound_port)] = listening
        if self._fabric is not None:
            self._fabric.listeners[(bound_address, bound_port)] = self
        self.log.append(("start_listener", bound_address))
        return bound_address, bound_port

    def stop_listener(self, address: str, port: int) -> None:
        self.listeners.pop((address, port)).close()
        if self._fabric is not None:
            del self._fabric.listeners[(address, port)]
        self.log.append(("stop_listener", address))

    def subsystem_added(self, nqn: str) -> None:
        self.log.append(("subsystem_added", nqn))

    def subsystem_removed(self, nqn: str) -> None:
        self.log.append(("subsystem_removed", nqn))

    def subsystem_changed(self, nqn: str) -> None:
        self.log.append(("subsystem_changed", nqn))

    def namespace_changed(self, nqn: str, nsid: int) -> None:
        self.log.append(("namespace_changed", (nqn, nsid)))

    def controllers(self, nqn: str) -> list[ControllerInfo]:
        del nqn
        return []

    def qpairs(self, nqn: str) -> list[QpairInfo]:
        del nqn
        return []

    def poll_groups(self) -> list[PollGroupStat]:
        return [PollGroupStat(name="kvdev_poll_group_000", thread_id=1)]
