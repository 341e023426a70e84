"""A host of one queue pair for the fault tests: buffers between guard bytes, commands by name.

Not here: what the other side says (``peer``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from kvdev.clock import Deadline
from kvdev.native.io import IO_DTYPE, IoDoneArray, address_of
from kvdev.native.queue import HostQpair, HostQueue
from kvdev.testing.peer import ScriptedPeer

GUARD_SIZE_BYTES = 4096
GUARD_BYTE = 0xA5
FILL_BYTE = 0x5A


class GuardedBuffer:
    """Memory for payload between two guards that nobody may write."""

    def __init__(self, size_bytes: int) -> None:
        self._whole = np.full(size_bytes + 2 * GUARD_SIZE_BYTES, GUARD_BYTE, dtype=np.uint8)
        self.array = self._whole[GUARD_SIZE_BYTES : GUARD_SIZE_BYTES + size_bytes]
        self.array[:] = FILL_BYTE
        self.address = address_of(self.array)

    def check_guards(self) -> None:
        size = len(self.array)
        assert (self._whole[:GUARD_SIZE_BYTES] == GUARD_BYTE).all(), "bytes before the buffer were written"
        assert (self._whole[GUARD_SIZE_BYTES + size :] == GUARD_BYTE).all(), (
            "bytes behind the buffer were written"
        )

    @property
    def is_untouched(self) -> bool:
        self.check_guards()
        return bool((self.array == FILL_BYTE).all())


class PeerHost:
    """One queue pair to a scripted peer, in a queue with one namespace of 4 KiB blocks."""

    block_size_bytes = 4096

    def __init__(
        self,
        peer: ScriptedPeer,
        *,
        block_count: int = 1 << 20,
        queue_options: dict[str, Any] | None = None,
        **qpair_options: Any,
    ) -> None:
        self.qpair = HostQpair(**{"qid": 1, "queue_size": 32, "trid": "peer", **qpair_options})
        self.qpair.connect(peer.address, peer.port, deadline=Deadline.after(60))
        self.queue = HostQueue(**(queue_options or {}))
        self.qpair_index = self.queue.add_qpair(self.qpair)
        self.device_index = self.queue.add_namespace(
            nsid=1,
            block_size_bytes=self.block_size_bytes,
            block_count=block_count,
            qpair_indexes=[self.qpair_index],
        )

    def submit(
        self,
        opcode: int,
        buffer: GuardedBuffer | None,
        *,
        slba: int = 0,
        lba_count: int | None = None,
        tag: int = 0,
        priority: int = 0,
        flags: int = 0,
        group_addr: int = 0,
    ) -> None:
        """Submit one command whose payload is the whole buffer."""
        io = np.zeros(1, dtype=IO_DTYPE)
        size = 0 if buffer is None else len(buffer.array)
        io["tag"] = tag
        io["opcode"] = opcode
        io["slba"] = slba
        io["lba_count"] = size // self.block_size_bytes if lba_count is None else lba_count
        io["byte_count"] = size
        io["buf_addr"] = 0 if buffer is None else buffer.address
        io["device_index"] = self.device_index
        io["priority"] = priority
        io["flags"] = flags
        io["group_addr"] = group_addr
        self.queue.submit(io)

    def poll(self, count: int, *, seconds: float = 60.0) -> IoDoneArray:
        return self.queue.poll(min_count=count, deadline=Deadline.after(seconds))

    def run(self, opcode: int, buffer: GuardedBuffer | None, **options: Any) -> Any:
        """One command to its completion; returns that."""
        self.submit(opcode, buffer, **options)
        done = self.poll(1)
        assert len(done) == 1, "the command did not complete in time"
        return done[0]

    def close(self) -> None:
        self.queue.close()
        self.qpair.close()

    def __enter__(self) -> PeerHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
