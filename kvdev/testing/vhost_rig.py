"""A vhost-user device on a back end, with a staging arena: what the tests of both sides need.

Not here: the back end (``kvdev.testing.vhost_peer``, or a real one).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev.native.io import IO_DTYPE, OPCODE_READ, OPCODE_WRITE, IoArray, IoDoneArray
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.units import MIB
from kvdev.vhost import SharedMemory, VhostDevice, VhostOptions


class VhostRig:
    """A connected device, its queue and one lease; commands by block and page offset."""

    def __init__(
        self,
        path: str,
        *,
        options: VhostOptions | None = None,
        arena_size_bytes: int = 8 * MIB,
        timeout_s: float = 10.0,
        command_timeout_s: float = 30.0,
    ) -> None:
        self.timeout_s = timeout_s
        self.arena = Arena(arena_size_bytes, is_shareable=True)
        self.lease = self.arena.lease(1, arena_size_bytes)
        self.bytes: npt.NDArray[np.uint8] = self.lease.array[0]
        self.queue = HostQueue(command_timeout_s=command_timeout_s)
        try:
            self.device = VhostDevice(
                path,
                self.queue,
                memory=[SharedMemory.of(self.arena)],
                options=options,
                deadline=self.deadline(),
            )
        except BaseException:
            self.queue.close()
            self.arena.close()
            raise

    def deadline(self) -> Deadline:
        return Deadline.after(self.timeout_s)

    def io(
        self, opcode: int, *, slba: int = 0, size_bytes: int = 0, offset: int = 0, **fields: Any
    ) -> IoArray:
        """One command; payload at ``offset`` of the lease."""
        ios = np.zeros(1, dtype=IO_DTYPE)
        ios["opcode"], ios["slba"] = opcode, slba
        ios["device_index"] = self.device.device_index
        ios["lba_count"] = size_bytes // self.device.block_size_bytes
        if opcode in (OPCODE_READ, OPCODE_WRITE):
            ios["byte_count"] = size_bytes
            ios["buf_addr"] = int(self.lease.addresses[0]) + offset
        for name, value in fields.items():
            ios[name] = value
        return ios

    def submit(self, opcode: int, **fields: Any) -> None:
        self.queue.submit(self.io(opcode, **fields))

    def poll(self, count: int, timeout_s: float | None = None) -> IoDoneArray:
        deadline = self.deadline() if timeout_s is None else Deadline.after(timeout_s)
        return self.queue.poll(min_count=count, deadline=deadline)

    def run(self, opcode: int, **fields: Any) -> Any:
        """One command to its completion."""
        self.submit(opcode, **fields)
        done = self.poll(1)
        assert len(done) == 1, "no completion within the deadline"
        return done[0]

    def fill(self, rng: np.random.Generator, size_bytes: int, offset: int = 0) -> bytes:
        """Random payload; returns it."""
        data = rng.integers(0, 256, size_bytes, dtype=np.uint8)
        self.bytes[offset : offset + size_bytes] = data
        return data.tobytes()

    def close(self) -> None:
        self.device.close()
        self.queue.close()
        if not self.lease.is_released:
            self.bytes = self.bytes[:0]
            self.lease.release()
        self.arena.close()

    def __enter__(self) -> VhostRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
