"""Mixed verified I/O over 8 queue pairs of two paths, with random faults; memory and descriptors stay flat.

A share of it here; ``make soak SECONDS=n`` runs as long as one likes and prints the figures.
"""

from __future__ import annotations

import gc
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import SYSTEM_CLOCK
from kvdev.errors import UncertainWriteError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.subsystem import Subsystem
from kvdev.native.queue import PathPolicy
from kvdev.session import Session
from kvdev.testing.killable import KillableTarget
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import WAIT_S, descriptor_count, soon, until

SOAK_S = float(os.environ.get("KVDEV_SOAK_SECONDS", "5"))
HOST = HostIdentity.of("nqn.2024-01.io.example:soak")
OPTIONS = ControllerOptions(
    kato_ms=1000,
    io_queue_count=4,
    connect_timeout_s=20.0,
    admin_timeout_s=20.0,
    shutdown_timeout_s=0.5,
    reconnect_delay_s=0.2,
    ctrl_loss_tmo_s=600,
    fence_wait_s=0.3,
    path_policy=PathPolicy.ROUND_ROBIN,
)
OPERATION_S = 300.0
BLOCK_BYTES = 4096
BLOCK_COUNT = 2048
COMMAND_BLOCKS_MAX = 512
PERIOD_COUNT = 4
PERIOD_S_MAX = 30.0
"""Faults end that often, so that there is a calm moment to count at."""
FAULTS = ("cut", "cut", "cut", "stall", "stall", "stop", "kill")
GROWTH_BYTES_MAX = 24 << 20
"""After the first quarter: allocators and Python keep some, a connection's buffers each time are more."""


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Weather:
    """Makes one fault after the other in a thread of its own while entered, each mended before the next."""

    def __init__(self, target: KillableTarget, relays: list[Relay], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._target = target
        self._relays = relays
        self._random = np.random.default_rng(seed)
        self._deck: list[str] = []
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def _draw(self) -> str:
        """Each kind comes as often as it is in ``FAULTS``, in any order."""
        self._deck = self._deck or [FAULTS[index] for index in self._random.permutation(len(FAULTS))]
        return self._deck.pop()

    def _pause(self, low_s: float, high_s: float) -> bool:
        return self._is_done.wait(float(self._random.uniform(low_s, high_s)))

    def _kill(self, relay: Relay) -> None:
        self._target.kill()
        self._pause(0.0, 0.3)
        self._target.start()

    def _stop(self, relay: Relay) -> None:
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
        while not self._pause(0.05, 0.8):
            name = self._draw()
            faults[name](self._relays[int(self._random.integers(0, 2))])
            self.counts[name] += 1

    def __enter__(self) -> Weather:
        self._is_done.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None, "it was entered"
        self._is_done.set()
        self._thread.join()


class Work:
    """Operations on a namespace and what it has to hold after them."""

    def __init__(self, device: NvmeNamespace, rng: np.random.Generator) -> None:
        self.operation_count = 0
        self.byte_count = 0
        self.vain_flush_count = 0
        """Flushes that could not vouch for writes before them: a controller had gone away since the last one."""
        self._device = device
        self._random = rng
        self._model = np.zeros((BLOCK_COUNT, BLOCK_BYTES), dtype=np.uint8)

    def step(self) -> None:
        """Write, clear, flush, compare or read a piece; no write may be left in doubt."""
        is_large = self._random.integers(0, 4) == 0
        count = int(self._random.integers(1, COMMAND_BLOCKS_MAX + 1 if is_large else 33))
        slba = int(self._random.integers(0, BLOCK_COUNT - count + 1))
        want: NDArray[np.uint8] = self._model[slba : slba + count]
        match self._random.choice(
            ["write", "read", "zero", "flush", "compare"], p=[0.4, 0.4, 0.1, 0.05, 0.05]
        ):
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

    def check(self, slba: int = 0, count: int = BLOCK_COUNT) -> None:
        got = read_blocks(self._device, slba, count, soon(OPERATION_S)).reshape(count, BLOCK_BYTES)
        wrong = np.flatnonzero((got != self._model[slba : slba + count]).any(axis=1))
        assert not len(wrong), f"mismatch: {len(wrong)} of {count} blocks from {slba}"


class Flatness:
    """Descriptors as at the start, memory as after the first quarter."""

    def __init__(self, subsystem: Subsystem) -> None:
        self._subsystem = subsystem
        self._descriptors = descriptor_count()
        self._resident: list[int] = []

    def check(self, *, seconds: float) -> str:
        """Wait until all is connected again and what is closing has gone; the figures."""
        assert self._subsystem.wait_paths(2, deadline=soon())
        until(
            lambda: descriptor_count() == self._descriptors,
            f"the {self._descriptors} descriptors of the start",
            seconds=seconds,
        )
        resident = resident_bytes()
        self._resident.append(resident)
        growth = resident - self._resident[len(self._resident) // PERIOD_COUNT]
        assert growth <= GROWTH_BYTES_MAX, f"memory grew by {growth >> 20} MiB"
        return f"resident {resident >> 10} KiB, {self._descriptors} descriptors"


def soak(
    folder: Path,
    rng: np.random.Generator,
    *,
    duration_s: float,
    between: Callable[[KillableTarget], None] = lambda _: None,
    settle_s: float = 2 * WAIT_S,
) -> None:
    """``between`` is called once in each calm moment, before anything is looked at."""
    with KillableTarget(folder, port_count=2) as target:
        relays = [Relay(("127.0.0.1", port)) for port in target.ports]
        uri = target.uri(port=relays[0].port, paths=(relays[1].port,))
        with relays[0], relays[1], Session(host=HOST, options=OPTIONS) as kv:
            device = kv.open_device(f"{uri}&nsid=1")
            assert isinstance(device, NvmeNamespace)
            subsystem = kv.subsystem(uri)
            assert subsystem.wait_paths(2, deadline=soon())
            controllers = [path.controller for path in subsystem.paths if path.controller is not None]
            assert sum(len(each.qpair_indexes) for each in controllers) == 8
            work, flatness = Work(device, rng), Flatness(subsystem)
            started_ns = SYSTEM_CLOCK.monotonic_ns()
            weather = Weather(target, relays, int(rng.integers(0, 1 << 32)))
            period_count = max(PERIOD_COUNT, math.ceil(duration_s / PERIOD_S_MAX))
            for _ in range(period_count):
                with weather:
                    period = soon(duration_s / period_count)
                    while not period.is_expired:
                        work.step()
                between(target)
                figures = flatness.check(seconds=settle_s)
                age_s = (SYSTEM_CLOCK.monotonic_ns() - started_ns) / 1e9
                print(
                    f"soak: {age_s:.0f} s, {work.operation_count} operations, {work.byte_count >> 20} MiB, "
                    f"faults {dict(weather.counts)}, {figures}"
                )
            work.check()
            print(f"soak: {work.vain_flush_count} flushes in vain, {kv.queue.stats}")
            assert kv.queue.stats.uncertain == work.vain_flush_count


def test_io_when_faults_come_at_random_then_no_mismatch_and_nothing_grows(
    tmp_path: Path, rng: np.random.Generator, seed: int
) -> None:
    print(f"soak: seed {seed}, {SOAK_S:g} s")
    soak(tmp_path, rng, duration_s=SOAK_S)


def lose_a_byte(target: KillableTarget) -> None:
    """As a target that mixes up its data would: one byte of one block is another one."""
    with target.files[0].open("r+b", buffering=0) as file:
        file.seek(BLOCK_BYTES * 77)
        byte = file.read(1)
        file.seek(BLOCK_BYTES * 77)
        file.write(bytes([(byte[0] + 1) % 256]))


@pytest.mark.parametrize("what", ["descriptor", "buffer", "byte"])
def test_canary_when_something_leaks_or_is_lost_then_noticed(
    tmp_path: Path, rng: np.random.Generator, what: str
) -> None:
    leaked_fds: list[int] = []
    leaked_buffers: list[NDArray[np.uint8]] = []
    losses: dict[str, tuple[Callable[[KillableTarget], None], str]] = {
        "descriptor": (lambda _: leaked_fds.append(os.eventfd(0)), "descriptors of the start"),
        "buffer": (lambda _: leaked_buffers.append(np.ones(32 << 20, dtype=np.uint8)), "memory grew"),
        "byte": (lose_a_byte, "mismatch"),
    }
    between, message = losses[what]
    try:
        with pytest.raises(AssertionError, match=message):
            soak(tmp_path, rng, duration_s=1.0, between=between, settle_s=1.0)
    finally:
        for descriptor in leaked_fds:
            os.close(descriptor)
