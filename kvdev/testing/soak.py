"""Mixed verified I/O on a namespace, and the faults that come meanwhile: what a soak is made of.

Not here: what may not grow meanwhile, and for how long (the tests).
Threads: ``Weather`` makes its faults in one of its own; ``Work`` is the caller's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdev.block.device import read_blocks, write_blocks
from kvdev.errors import UncertainWriteError
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import soon

FAULTS = ("cut", "cut", "cut", "stall", "stall", "stop", "kill")
OPERATION_S = 300.0
COMMAND_BYTES_MAX = 2 << 20
SMALL_BYTES_MAX = 128 << 10


class Killable(Protocol):
    """A target in a process of its own, on media that stay."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Weather:
    """Makes one fault after the other in a thread of its own while entered, each mended before the next."""

    def __init__(
        self,
        target: Killable,
        relays: Sequence[Relay],
        seed: int,
        *,
        faults: Sequence[str] = FAULTS,
        pause_s: tuple[float, float] = (0.05, 0.8),
    ) -> None:
        """``faults`` is a deck of cut, stall, stop and kill; ``pause_s`` the least and most between two."""
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._target = target
        self._relays = relays
        self._random = np.random.default_rng(seed)
        self._faults = list(faults)
        self._pause_s = pause_s
        self._deck: list[str] = []
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def _draw(self) -> str:
        """Each kind comes as often as it is in the deck, in any order."""
        if not self._deck:
            self._deck = [self._faults[index] for index in self._random.permutation(len(self._faults))]
        return self._deck.pop()

    def _pause(self, low_s: float, high_s: float) -> bool:
        return self._is_done.wait(float(self._random.uniform(low_s, high_s)))

    def _kill(self, relay: Relay) -> None:
        del relay
        self._target.kill()
        self._pause(0.0, 0.3)
        self._target.start()

    def _stop(self, relay: Relay) -> None:
        del relay
        self._target.pause()
        self._pause(0.1, 1.0)
        self._target.resume()

    def _cut(self, relay: Relay) -> None:
        relay.cut()
        self._pause(0.0, 0.5)
        relay.mend()

    def _stall(self, relay: Relay) -> None:
        relay.stall()
        self._pause(0.1, 1.0)
        relay.resume()

    def _run(self) -> None:
        faults: dict[str, Callable[[Relay], None]]
        faults = {"cut": self._cut, "stall": self._stall, "stop": self._stop, "kill": self._kill}
        try:
            while not self._pause(*self._pause_s):
                name = self._draw()
                faults[name](self._relays[int(self._random.integers(0, len(self._relays)))])
                self.counts[name] += 1
        except BaseException as error:  # a target that does not start again: whoever entered gets to know
            self.failure = error

    def __enter__(self) -> Weather:
        self._is_done.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None, "it was entered"
        self._is_done.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


class Work:
    """Operations on the first blocks of a namespace and what they have to hold after them."""

    def __init__(
        self,
        device: NvmeNamespace,
        rng: np.random.Generator,
        *,
        size_bytes: int = 8 << 20,
        has_compare: bool = True,
    ) -> None:
        """Writes all of them first, whatever they held."""
        self.operation_count = 0
        self.byte_count = 0
        self.vain_flush_count = 0
        """Flushes that could not vouch for writes before them: a controller had gone away since the last one."""
        self._device = device
        self._random = rng
        self._block_count = size_bytes // device.block_size_bytes
        self._model = np.zeros((self._block_count, device.block_size_bytes), dtype=np.uint8)
        self._names = ["write", "read", "zero", "flush", *(["compare"] if has_compare else [])]
        self._chances = [0.4, 0.4, 0.1, 0.05, 0.05] if has_compare else [0.4, 0.45, 0.1, 0.05]
        write_blocks(device, 0, self._model.reshape(-1), soon(OPERATION_S))

    def step(self) -> None:
        """Write, clear, flush, compare or read a piece; no write may be left in doubt."""
        is_large = self._random.integers(0, 4) == 0
        limit_bytes = COMMAND_BYTES_MAX if is_large else SMALL_BYTES_MAX
        count = int(self._random.integers(1, limit_bytes // self._device.block_size_bytes + 1))
        slba = int(self._random.integers(0, self._block_count - count + 1))
        want: npt.NDArray[np.uint8] = self._model[slba : slba + count]
        match self._random.choice(self._names, p=self._chances):
            case "write":
                want[:] = self._random.integers(0, 256, want.shape, dtype=np.uint8)
                write_blocks(self._device, slba, want.reshape(-1), soon(OPERATION_S))
            case "zero":
                want[:] = 0
                self._device.write_zeroes(slba, count, soon(OPERATION_S))
            case "flush":
                try:
                    self._device.flush(soon(OPERATION_S))
                except UncertainWriteError:
                    self.vain_flush_count += 1
            case "compare":
                assert self._device.compare(slba, want.tobytes(), soon(OPERATION_S)), "mismatch: compare"
            case _:
                self.check(slba, count)
        self.operation_count += 1
        self.byte_count += want.nbytes

    def check(self, slba: int = 0, count: int | None = None) -> None:
        """AssertionError when a block from ``slba`` on (all of them) holds something else."""
        want = self._model[slba : slba + (self._block_count if count is None else count)]
        count = len(want)
        got = read_blocks(self._device, slba, count, soon(OPERATION_S)).reshape(want.shape)
        wrong = np.flatnonzero((got != want).any(axis=1))
        assert not len(wrong), f"mismatch: {len(wrong)} of {count} blocks from {slba}"
