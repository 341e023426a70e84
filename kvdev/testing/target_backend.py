"""A target backend without a data path: memory for bdevs, real listening sockets, no controllers.

For tests of the model and of the RPC server; it keeps the promises of ``TargetBackend`` that they see.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

from kvdev.target.model import (
    Bdev,
    BdevIoStat,
    ControllerInfo,
    PollGroupStat,
    QpairInfo,
    TargetView,
    Transport,
)


class MemoryBackend:
    """Counts what it was asked for; ``log`` holds the calls in order."""

    def __init__(self, *, memory_limit_bytes: int = 1 << 40) -> None:
        self.log: list[tuple[str, object]] = []
        self.open_bdevs: dict[int, Bdev] = {}
        self.listeners: dict[tuple[str, int], socket.socket] = {}
        self.view: TargetView | None = None
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
        self.log.append(("stop", None))

    def open_bdev(self, bdev: Bdev) -> int:
        if bdev.block_size_bytes * bdev.block_count > self._memory_limit_bytes:
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

    def count_io(self, handle: int, stat: BdevIoStat) -> None:
        """Set the counters, as I/O would."""
        self._stats[handle] = stat

    def create_transport(self, transport: Transport) -> None:
        self.log.append(("create_transport", transport.max_io_size))

    def start_listener(self, address: str, port: int) -> tuple[str, int]:
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
        self.log.append(("start_listener", bound_address))
        return bound_address, bound_port

    def stop_listener(self, address: str, port: int) -> None:
        self.listeners.pop((address, port)).close()
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
