"""Virtqueue 0 of a vhost-user-blk back end driven from plain Python: the yardstick of the C rings.

As little as will do: one region, no event index, a batch of reads, the next one when all of it has been answered.
Not here: anything that a real front end needs (``kvdev.vhost``).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Final

from kvdev.staging import Arena
from kvdev.units import MIB

QUEUE_SIZE: Final = 128
DESCS_PER_READ: Final = 3
_HEAD = struct.Struct("<III")
_GET_FEATURES, _SET_FEATURES, _SET_OWNER, _SET_MEM_TABLE = 1, 2, 3, 5
_SET_VRING_NUM, _SET_VRING_ADDR, _SET_VRING_BASE = 8, 9, 10
_SET_VRING_KICK, _SET_VRING_CALL = 12, 13
_GET_PROTOCOL_FEATURES, _SET_PROTOCOL_FEATURES, _SET_VRING_ENABLE = 15, 16, 18
_VERSION_1, _PROTOCOL_FEATURES = 1 << 32, 1 << 30
_NEXT, _WRITE = 1, 2
_AVAIL, _USED, _LINES, _DATA = 4096, 8192, 16384, MIB


class PlainRings:
    """A connection and its one virtqueue, in the first MiB of an arena; payload follows."""

    def __init__(self, path: str, *, op_size_bytes: int, depth: int) -> None:
        if not 1 <= depth <= QUEUE_SIZE // DESCS_PER_READ:
            raise ValueError(f"depth: expected 1 to {QUEUE_SIZE // DESCS_PER_READ}, got {depth}")
        self.arena = Arena(_DATA + max(MIB, depth * op_size_bytes), is_shareable=True)
        self._memory = self.arena.bytes().data
        self._depth, self._size = depth, op_size_bytes
        self._kick, self._call = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
        self._socket.connect(path)
        self._avail_idx = self._used_idx = 0
        self._handshake()
        for slot in range(depth):
            self._build(slot)

    def _send(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._socket, [_HEAD.pack(request, 1, len(payload)) + payload], list(fds))

    def _ask(self, request: int) -> int:
        self._send(request)
        reply = b""
        while len(reply) < _HEAD.size + 8:
            got = self._socket.recv(_HEAD.size + 8 - len(reply))
            if not got:
                raise ConnectionError("the back end closed the connection")
            reply += got
        return int.from_bytes(reply[_HEAD.size :], "little")

    def _handshake(self) -> None:
        features = self._ask(_GET_FEATURES)
        self._send(_SET_OWNER)
        if features & _PROTOCOL_FEATURES:
            self._ask(_GET_PROTOCOL_FEATURES)
            self._send(_SET_PROTOCOL_FEATURES, struct.pack("<Q", 0))
        self._send(_SET_FEATURES, struct.pack("<Q", features & (_VERSION_1 | _PROTOCOL_FEATURES)))
        base = self.arena.address
        region = struct.pack("<IIQQQQ", 1, 0, base, self.arena.size_bytes, base, 0)
        self._send(_SET_MEM_TABLE, region, (self.arena.fd,))
        self._send(_SET_VRING_NUM, struct.pack("<II", 0, QUEUE_SIZE))
        self._send(_SET_VRING_BASE, struct.pack("<II", 0, 0))
        addresses = struct.pack("<IIQQQQ", 0, 0, base, base + _USED, base + _AVAIL, 0)
        self._send(_SET_VRING_ADDR, addresses)
        self._send(_SET_VRING_CALL, struct.pack("<Q", 0), (self._call,))
        self._send(_SET_VRING_KICK, struct.pack("<Q", 0), (self._kick,))
        if features & _PROTOCOL_FEATURES:
            self._send(_SET_VRING_ENABLE, struct.pack("<II", 0, 1))

    def _build(self, slot: int) -> None:
        """A chain that reads one place; it is used over and over, which is all that this needs."""
        base = self.arena.address
        line, payload = base + _LINES + 32 * slot, base + _DATA + self._size * slot
        struct.pack_into("<IIQ", self._memory, _LINES + 32 * slot, 0, 0, slot * (self._size // 512))
        first = DESCS_PER_READ * slot
        struct.pack_into("<QIHH", self._memory, 16 * first, line, 16, _NEXT, first + 1)
        struct.pack_into(
            "<QIHH", self._memory, 16 * (first + 1), payload, self._size, _NEXT | _WRITE, first + 2
        )
        struct.pack_into("<QIHH", self._memory, 16 * (first + 2), line + 16, 1, _WRITE, 0)

    def measure(self, seconds: float) -> float:
        """Reads a second, in batches of the depth."""
        memory, depth = self._memory, self._depth
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            for slot in range(depth):
                place = _AVAIL + 4 + 2 * ((self._avail_idx + slot) % QUEUE_SIZE)
                struct.pack_into("<H", memory, place, DESCS_PER_READ * slot)
                memory[_LINES + 32 * slot + 16] = 0xFF
            self._avail_idx = (self._avail_idx + depth) & 0xFFFF
            struct.pack_into("<H", memory, _AVAIL + 2, self._avail_idx)
            os.eventfd_write(self._kick, 1)
            limit = time.perf_counter() + 10
            while struct.unpack_from("<H", memory, _USED + 2)[0] != self._avail_idx:
                if time.perf_counter() > limit:
                    raise TimeoutError("plain rings: no answer in 10 s")
            bad = [slot for slot in range(depth) if memory[_LINES + 32 * slot + 16]]
            if bad:
                raise OSError(f"plain rings: read in slot {bad[0]} failed")
            count += depth
        return count / elapsed

    def close(self) -> None:
        self._socket.close()
        os.close(self._kick)
        os.close(self._call)
        self._memory.release()
        self.arena.close()
