"""Our initiator on the Linux kernel's target in a QEMU guest: paths cut, the guest stopped, killed and booted again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.native.queue import PathPolicy
from kvdev.session import Session
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import soon
from kvdev.testing.soak import Weather, Work
from kvdev.uri import DigestPolicy
from tests.interop.conftest import BOOT_LIMIT_S, BOOT_S, Lab, free_port, run_script

pytestmark = pytest.mark.interop

IS_LONG = bool(os.environ.get("KVDEV_LONG"))
CYCLE_COUNT = int(os.environ.get("KVDEV_CYCLES", "100" if IS_LONG else "6"))
FAULTS = ("cut",) * 9 + ("stall",) * 2 + ("stop",) * 8 + ("kill",)
FEW_FAULTS = ("cut", "cut", "stall", "stop", "stop", "kill")
PATIENT_S = 120.0
"""The guest is emulated, and boots now and then."""
NQN = "nqn.2024-01.lab:nvmet"
HOST = HostIdentity.of("nqn.2024-01.io.example.kvdev:interop")
PORT_TRY_COUNT = 50


def free_neighbours(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(PORT_TRY_COUNT):
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError(f"no {count} free ports in a row")


@dataclass
class KillableNvmet:
    """A guest with a Linux target whose namespaces are files here: they stay when it is killed."""

    lab: Lab
    block_sizes: str
    port_count: int = 2
    is_buffered: bool = False
    """The target writes to the guest's page cache: what was not flushed is gone with it."""
    first_port: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_port = free_neighbours(self.port_count)

    @property
    def ports(self) -> list[int]:
        return list(range(self.first_port, self.first_port + self.port_count))

    def start(self) -> None:
        env = {**self.lab.env, "NQN": NQN, "BACKEND": "disk", "BOOT_S": str(BOOT_S)}
        env |= {"BS": self.block_sizes, "PORTS": str(self.port_count), "BUFFERED": str(int(self.is_buffered))}
        count = len(self.block_sizes.split(","))
        run_script("run-nvmet.sh", str(self.first_port), str(count), "32", env=env, timeout_s=BOOT_LIMIT_S)

    def _signal(self, number: int) -> None:
        os.kill(int((self.lab.directory / f"nvmet-{self.first_port}.pid").read_text()), number)

    def kill(self) -> None:
        """As a power cut: what the guest had completed, or flushed where it is buffered, is in its files."""
        self._signal(signal.SIGKILL)
        run_script("run-nvmet.sh", "stop", str(self.first_port), env=self.lab.env, timeout_s=60)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.resume()
        run_script("run-nvmet.sh", "stop", str(self.first_port), env=self.lab.env, timeout_s=60)
        for path in self.lab.directory.glob(f"nvmet-{self.first_port}*"):
            path.unlink()


@pytest.fixture
def target(lab: Lab) -> Iterator[KillableNvmet]:
    found = KillableNvmet(lab, "512,4096")
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("nsid", "digests"), [(1, DigestPolicy.REQUIRE), (2, DigestPolicy.OFF)], ids=["512-digests", "4096"]
)
def test_io_when_nvmet_is_cut_off_stopped_and_killed_then_every_byte_is_right(
    target: KillableNvmet, rng: np.random.Generator, seed: int, nsid: int, digests: DigestPolicy
) -> None:
    options = ControllerOptions(
        kato_ms=4000,
        io_queue_count=2,
        connect_timeout_s=15.0,
        admin_timeout_s=30.0,
        command_timeout_s=PATIENT_S,
        shutdown_timeout_s=5.0,
        reconnect_delay_s=1.0,
        ctrl_loss_tmo_s=600,
        fence_wait_s=1.0,
        path_policy=PathPolicy.ROUND_ROBIN,
        header_digest=digests,
        data_digest=digests,
    )
    with contextlib.ExitStack() as stack:
        relays = [stack.enter_context(Relay(("127.0.0.1", port))) for port in target.ports]
        kv = stack.enter_context(Session(host=HOST, options=options))
        uri = f"tcp://127.0.0.1:{relays[0].port}/{NQN}?path=127.0.0.1:{relays[1].port}"
        device = kv.open_device(f"{uri}&nsid={nsid}", deadline=soon(PATIENT_S))
        assert isinstance(device, NvmeNamespace)
        assert device.block_size_bytes == {1: 512, 2: 4096}[nsid]
        assert kv.subsystem(uri).wait_paths(2, deadline=soon(PATIENT_S))
        work = Work(device, rng, size_bytes=8 << 20, has_compare=False)
        faults = FAULTS if len(FAULTS) <= CYCLE_COUNT else FEW_FAULTS
        weather = Weather(target, relays, int(rng.integers(0, 1 << 32)), faults=faults, pause_s=(0.5, 2.0))
        with weather:
            while weather.counts.total() < CYCLE_COUNT and weather.failure is None:
                work.step()
        work.check()
        print(
            f"seed {seed}: {dict(weather.counts)}, {work.operation_count} operations, "
            f"{work.byte_count >> 20} MiB, {kv.queue.stats}"
        )
        assert work.operation_count > weather.counts.total()
        assert kv.queue.stats.uncertain == work.vain_flush_count
        assert kv.subsystem(uri).wait_paths(2, deadline=soon(PATIENT_S))
