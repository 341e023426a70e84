"""Devices that remember every write and flush, and what a power cut may leave of them.

A write is safe when a flush of its device came after it. Of the others any subset may have reached the
medium, in any order between blocks, each block whole: that is what a logical block's atomicity promises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice, Observer
from kvdev.native.io import OPCODE_FLUSH, OPCODE_WRITE, OPCODE_WRITE_ZEROES

Bytes = npt.NDArray[np.uint8]


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
            if self.is_recording and opcode in (OPCODE_WRITE, OPCODE_WRITE_ZEROES, OPCODE_FLUSH):
                data = None if opcode == OPCODE_FLUSH or payload is None else payload.copy()
                self.events.append(CrashEvent(member_index, slba * self.block_size_bytes, data))
            return 0, 0

        return observe

    def start(self) -> None:
        """Record from here on; what the members hold now counts as durable."""
        self.is_recording = True
        self._start = [member.data.copy() for member in self.members]

    def states(self) -> CrashStates:
        return CrashStates(self)


class CrashStates:
    """Walks through the log's cut points in order and makes images a power cut there may leave."""

    def __init__(self, log: CrashLog) -> None:
        self._log = log
        self._durable = [image.copy() for image in log._start]
        self._unsafe: list[list[CrashEvent]] = [[] for _ in log.members]
        self.cut_index = 0
        """The power fails before this event."""

    @property
    def unsafe_count(self) -> int:
        return sum(len(writes) for writes in self._unsafe)

    def advance(self) -> bool:
        """Move past the next event; False at the end of the log."""
        if self.cut_index == len(self._log.events):
            return False
        event = self._log.events[self.cut_index]
        self.cut_index += 1
        if event.payload is not None:
            self._unsafe[event.member_index].append(event)
            return True
        for write in self._unsafe[event.member_index]:
            assert write.payload is not None
            image = self._durable[event.member_index]
            image[write.offset_bytes : write.offset_bytes + write.payload.nbytes] = write.payload
        self._unsafe[event.member_index].clear()
        return True

    def image(self, rng: np.random.Generator) -> list[Bytes]:
        """One possible content of every member: a random part of the unsafe writes, torn at blocks."""
        images = [image.copy() for image in self._durable]
        chance = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        tears = bool(rng.integers(0, 2))
        for image, writes in zip(images, self._unsafe, strict=True):
            for write in writes:
                assert write.payload is not None
                if not tears and rng.random() >= chance:
                    continue
                for start in range(0, write.payload.nbytes, self._log.block_size_bytes):
                    if tears and rng.random() >= chance:
                        continue
                    piece = write.payload[start : start + self._log.block_size_bytes]
                    image[write.offset_bytes + start : write.offset_bytes + start + piece.nbytes] = piece
        return images

    def devices(self, images: list[Bytes]) -> list[MemoryDevice]:
        """Fresh devices over images, named as the members were."""
        queue = LocalQueue()
        return [
            MemoryDevice(
                size_bytes=image.nbytes,
                name=f"crash{index}",
                block_size_bytes=self._log.block_size_bytes,
                data=image,
                queue=queue,
            )
            for index, image in enumerate(images)
        ]
