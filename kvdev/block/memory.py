"""Memory devices: the model in tests and the target of a dry run.

Not here: the embedded target's memory namespaces (``kvdev.target``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvdev.block.device import DeviceIdentity, aligned_buffer, error_of
from kvdev.block.local import (
    STATUS_COMPARE_FAILURE,
    STATUS_INVALID_OPCODE,
    LocalDevice,
    LocalQueue,
)
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import CapacityError, UsageError
from kvdev.native.io import (
    OPCODE_COMPARE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    address_of,
    bytes_at,
)
from kvdev.units import MIB

Observer: TypeAlias = Callable[[int, int, "npt.NDArray[np.uint8] | None"], "tuple[int, int]"]
"""Called before a command with opcode, slba and, for writes, the payload (not kept past the call).

Returns −errno and status; when either is not 0 the command fails with them and changes nothing.
"""


class MemoryDevice(LocalDevice):
    """Blocks in this process's memory; ``data`` is the whole of it, for tests to look at and to damage."""

    is_host_local = True

    def __init__(
        self,
        *,
        size_bytes: int,
        name: str = "memory",
        block_size_bytes: int = 4096,
        identity: DeviceIdentity | None = None,
        has_volatile_cache: bool = True,
        max_transfer_bytes: int = MIB,
        data: npt.NDArray[np.uint8] | None = None,
        observer: Observer | None = None,
        queue: LocalQueue | None = None,
    ) -> None:
        """A device of zeroes, or over ``data`` (not copied).

        Args:
            has_volatile_cache: what the device reports; the memory itself always keeps what is written.
            observer: sees every command first and may fail it; crash tests record and inject with it.
            queue: share this queue with other devices instead of having one's own.
        """
        if size_bytes <= 0 or size_bytes % block_size_bytes:
            raise UsageError(
                f"mem:{name}: size: expected a multiple of {block_size_bytes} bytes, got {size_bytes}"
            )
        self.uri = f"mem:{name}"
        self.identity = identity or DeviceIdentity()
        self.block_size_bytes = block_size_bytes
        self.block_count = size_bytes // block_size_bytes
        self.max_transfer_bytes = max_transfer_bytes
        self.has_volatile_cache = has_volatile_cache
        self.data = _memory(name, size_bytes) if data is None else data
        self.observer = observer
        self.queue: LocalQueue = queue or LocalQueue()
        self.device_index = self.queue.add_device(self)
        self.compare_and_write_blocks = 1

    @property
    def fence_ns(self) -> int:
        """Now: a command that failed is over."""
        return SYSTEM_CLOCK.monotonic_ns()

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        self._check_compare_and_write(slba, expected, new)
        del deadline  # one step, which nothing waits for
        with self.queue.lock:  # nobody else reaches this memory
            for opcode, data in ((OPCODE_COMPARE, expected), (OPCODE_WRITE, new)):
                payload = np.frombuffer(data, dtype=np.uint8)
                count = len(data) // self.block_size_bytes
                error, status = self.run(opcode, slba, count, address_of(payload))
                if status == STATUS_COMPARE_FAILURE:
                    return False
                if error:
                    raise error_of(error=error, status=status, opcode=opcode, slba=slba, uri=self.uri)
        return True

    def run(self, opcode: int, slba: int, lba_count: int, address: int) -> tuple[int, int]:
        start = slba * self.block_size_bytes
        size_bytes = lba_count * self.block_size_bytes
        payload: npt.NDArray[np.uint8] | None = None
        if opcode in (OPCODE_WRITE, OPCODE_COMPARE):
            payload = bytes_at(address, size_bytes)
        elif opcode == OPCODE_WRITE_ZEROES:
            payload = np.zeros(size_bytes, dtype=np.uint8)
        if self.observer is not None:
            error, status = self.observer(opcode, slba, payload)
            if error or status:
                return error or -errno.EIO, status
        if opcode == OPCODE_READ:
            bytes_at(address, size_bytes)[:] = self.data[start : start + size_bytes]
        elif opcode in (OPCODE_WRITE, OPCODE_WRITE_ZEROES):
            assert payload is not None
            self.data[start : start + size_bytes] = payload
        elif opcode == OPCODE_COMPARE:
            assert payload is not None
            if not np.array_equal(self.data[start : start + size_bytes], payload):
                return -errno.EIO, STATUS_COMPARE_FAILURE
        elif opcode not in (OPCODE_FLUSH, OPCODE_DSM):  # deallocation is advice: nothing to do
            return -errno.EIO, STATUS_INVALID_OPCODE
        return 0, 0

    def close(self) -> None:
        """Nothing to release; the data stay."""


def _memory(name: str, size_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        return aligned_buffer(size_bytes)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can say
        raise CapacityError(
            f"mem:{name}: size: expected what fits in memory, got {size_bytes} bytes"
        ) from error
