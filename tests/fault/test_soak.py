"""Mixed verified I/O over 8 queue pairs of two paths, with random faults; memory and descriptors stay flat.

A share of it here; ``make soak SECONDS=n`` runs as long as one likes and prints the figures.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvdev.clock import SYSTEM_CLOCK
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.subsystem import Subsystem
from kvdev.native.queue import PathPolicy
from kvdev.session import Session
from kvdev.testing.killable import KillableTarget
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import WAIT_S, descriptor_count, soon, until
from kvdev.testing.soak import Weather, Work

SOAK_S = float(os.environ.get("KVDEV_SOAK_SECONDS", "4"))
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
PERIOD_COUNT = 4
PERIOD_S_MAX = 30.0
"""Faults end that often, so that there is a calm moment to count at."""
GROWTH_BYTES_MAX = 24 << 20
"""After the first quarter: allocators and Python keep some, a connection's buffers each time are more."""


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Flatness:
    """Descriptors as at the start, memory as after the first quarter."""

    def __init__(self, subsystem: Subsystem) -> None:
        self._subsystem = subsystem
        gc.collect()  # what earlier tests left to the collector would go meanwhile, and hide as much
        self._descriptors = descriptor_count()
        self._resident: list[int] = []

    def check(self, *, seconds: float) -> str:
        """Wait until all is connected again and what is closing has gone; the figures."""
        assert self._subsystem.wait_paths(2, deadline=soon())
        until(
            lambda: descriptor_count() <= self._descriptors,
            f"no more than the {self._descriptors} descriptors of the start",
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
        file.seek(4096 * 77)
        byte = file.read(1)
        file.seek(4096 * 77)
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
