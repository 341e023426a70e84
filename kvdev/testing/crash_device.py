"""Devices that remember every write and flush, and what a power cut may leave of them.

A write is safe when a flush of its device came after it. Of the others any subset may have reached the
medium, in any order between blocks, each block whole: that is what a logical block's atomicity promises.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice, Observer
from kvdev.native.io import OPCODE_FLUSH, OPCODE_WRITE, OPCODE_WRITE_ZEROES

Bytes = npt.NDArray[np.uint8]
Fault = Callable[[int, int], "str | None"]
"""Asked for member index and opcode of each write and flush: None lets it run; ``lost`` fails it and nothing
was written; ``taken`` fails it although it was."""


@dataclass(frozen=True)
class CrashEvent:
    """One write, or a flush when ``payload`` is None."""

    member_index: int
    offset_bytes: int
    payload: Bytes | None


class CrashLog:
    """Members on one queue whose writes and flushes are recorded in order."""

    def __init__(self, member_count: int, *, size_bytes: int, block_size_bytes: int = 4096) -> None:
        self.block_size_bytes = block_size_bytes
        self.events: list[CrashEvent] = []
        self.is_recording = False
        self.fault: Fault | None = None
        self.fault_count = 0
        queue = LocalQueue()
        self.members = [
            MemoryDevice(
                size_bytes=size_bytes,
                name=f"crash{index}",
                block_size_bytes=block_size_bytes,
                observer=self._observer(index),
                queue=queue,
            )
            for index in range(member_count)
        ]

    def _observer(self, member_index: int) -> Observer:
        def observe(opcode: int, slba: int, payload: Bytes | None) -> tuple[int, int]:
            if not self.is_recording or opcode not in (OPCODE_WRITE, OPCODE_WRITE_ZEROES, OPCODE_FLUSH):
                return 0, 0
            fate = self.fault(member_index, opcode) if self.fault is not None else None
            offset = slba * self.block_size_bytes
            if fate is not None:
                self.fault_count += 1
            if fate != "lost":
                data = None if opcode == OPCODE_FLUSH or payload is None else payload.copy()
                self.events.append(CrashEvent(member_index, offset, data))
                if fate == "taken" and data is not None:
                    self.members[member_index].data[offset : offset + data.nbytes] = data
            return (0, 0) if fate is None else (-errno.EIO, 0x006)

        return observe

    def start(self) -> None:
        """Record from here on; what the members hold now counts as durable."""
        self.is_recording = True
        self._start = [member.data.copy() for member in self.members]

    def states(self) -> CrashStates:
        return CrashStates(self)


Piece = tuple[int, int, Bytes]
"""Member, byte offset, and what a block of an unsafe write holds."""


class CrashStates:
    """Walks through the log's cut points in order and puts ``devices`` into states a cut there may leave.

    The devices are the same throughout: a state is the durable content and the chosen unsafe blocks, and
    ``restore`` undoes these and whatever was written to the devices since.
    """

    def __init__(self, log: CrashLog) -> None:
        self._log = log
        self._durable = [image.copy() for image in log._start]
        self._unsafe: list[CrashEvent] = []
        self._dirty: list[tuple[int, int, int]] = []
        self._durable_key = 0
        self.cut_index = 0
        """The power fails before this event."""
        queue = LocalQueue()
        self.devices = [
            MemoryDevice(
                size_bytes=image.nbytes,
                name=f"crash{index}",
                block_size_bytes=log.block_size_bytes,
                data=image.copy(),
                observer=self._watch(index),
                queue=queue,
            )
            for index, image in enumerate(log._start)
        ]
        """Fresh devices, named as the members were."""

    def _watch(self, member_index: int) -> Observer:
        def observe(opcode: int, slba: int, payload: Bytes | None) -> tuple[int, int]:
            del opcode
            if payload is not None:
                self._dirty.append((member_index, slba * self._log.block_size_bytes, payload.nbytes))
            return 0, 0

        return observe

    def advance(self) -> bool:
        """Move past the next event; False at the end of the log."""
        if self.cut_index == len(self._log.events):
            return False
        event = self._log.events[self.cut_index]
        self.cut_index += 1
        if event.payload is not None:
            self._unsafe.append(event)
            return True
        for write in self._unsafe:
            if write.member_index == event.member_index and write.payload is not None:
                part = slice(write.offset_bytes, write.offset_bytes + write.payload.nbytes)
                self._durable_key ^= self._change_of(self._pieces_of(write))
                self._durable[write.member_index][part] = write.payload
                self.devices[write.member_index].data[part] = write.payload
        self._unsafe = [write for write in self._unsafe if write.member_index != event.member_index]
        return True

    def pieces(self) -> list[list[Piece]]:
        """The blocks of each unsafe write, in order."""
        return [self._pieces_of(write) for write in self._unsafe]

    def _pieces_of(self, write: CrashEvent) -> list[Piece]:
        assert write.payload is not None, "a flush is not kept among the writes"
        block = self._log.block_size_bytes
        return [
            (write.member_index, write.offset_bytes + start, write.payload[start : start + block])
            for start in range(0, write.payload.nbytes, block)
        ]

    def key_of(self, choice: list[Piece]) -> int:
        """A number that two states of one log share, at whatever cuts, exactly when all their bytes are the same."""
        return self._durable_key ^ self._change_of(choice)

    def _change_of(self, pieces: list[Piece]) -> int:
        """What writing these blocks makes of the number of the durable content: each block counts by itself."""
        change = 0
        last = {(member_index, offset): data for member_index, offset, data in pieces}
        for (member_index, offset), data in last.items():
            before = self._durable[member_index][offset : offset + data.nbytes]
            for content in (before, data):
                place = member_index.to_bytes(8, "little") + offset.to_bytes(8, "little")
                digest = hashlib.blake2b(content.tobytes(), digest_size=16, key=place).digest()
                change ^= int.from_bytes(digest, "little")
        return change

    def choices(
        self, rng: np.random.Generator, *, exhaustive_count: int, random_count: int
    ) -> list[list[Piece]]:
        """Sets of unsafe blocks that may have reached media: all while there are few, else random ones."""
        writes = self.pieces()
        flat = [piece for write in writes for piece in write]
        if len(flat) <= exhaustive_count:
            return [
                [piece for piece, is_there in zip(flat, mask, strict=True) if is_there]
                for mask in product((False, True), repeat=len(flat))
            ]
        chosen = []
        for _ in range(random_count):
            chance = float(rng.choice([0.0, 0.2, 0.5, 0.8, 1.0]))
            if rng.integers(0, 2):
                mask = rng.random(len(flat)) < chance
                chosen.append([piece for piece, is_there in zip(flat, mask, strict=True) if is_there])
            else:
                whole = rng.random(len(writes)) < chance
                chosen.append(
                    [
                        piece
                        for write, is_there in zip(writes, whole, strict=True)
                        if is_there
                        for piece in write
                    ]
                )
        return chosen

    def apply(self, choice: list[Piece]) -> None:
        """Let the chosen blocks have reached media."""
        for member_index, offset, data in choice:
            self.devices[member_index].data[offset : offset + data.nbytes] = data
            self._dirty.append((member_index, offset, data.nbytes))

    def restore(self) -> None:
        """Back to the durable content."""
        for member_index, offset, size_bytes in self._dirty:
            part = slice(offset, offset + size_bytes)
            self.devices[member_index].data[part] = self._durable[member_index][part]
        self._dirty.clear()
