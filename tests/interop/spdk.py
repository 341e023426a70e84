"""A real spdk_tgt for a test: started without huge pages on one core, killed or stopped, its files in one folder.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvdev.clock import Deadline
from spdk_rpc import Client, RpcTransportError
from tests.interop.conftest import missing

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def spdk_binary() -> str:
    """The spdk_tgt to run; without one the test skips."""
    return os.environ.get("KVDEV_SPDK_TGT") or missing("KVDEV_SPDK_TGT names no spdk_tgt")


class Spdk:
    """One spdk_tgt; its RPC socket, log and vhost sockets lie in the folder under its name, restart after restart."""

    def __init__(self, folder: Path, name: str, *, core: int = 0, memory_mib: int = 1024) -> None:
        self.name = name
        self.folder = folder
        self.path = str(folder / f"{name}.sock")
        self._memory_mib = memory_mib
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, config: Path | None = None) -> None:
        """Start it and wait until it has come up, with a configuration of its own format if one is given."""
        arguments = [spdk_binary(), "--no-pci", "--no-huge", "-s", str(self._memory_mib)]
        arguments += ["-m", hex(1 << self._core), "--disable-cpumask-locks"]
        arguments += ["-S", str(self.folder), "-r", self.path, *(["--json", str(config)] if config else [])]
        with self.log_path.open("ab") as log:
            # A session of its own: what interrupts the test does not reach it.
            self._process = subprocess.Popen(
                arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        deadline = Deadline.after(START_TIMEOUT_S)
        while True:
            with contextlib.suppress(RpcTransportError), Client(self.path, timeout_s=30) as client:
                client.call("framework_wait_init")
                return
            deadline.check(f"start of {self.name}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
                raise AssertionError(
                    f"{self.name} ended with {self._process.returncode}: {self.log_path.read_text()[-2000:]}"
                )

    def client(self, *, timeout_s: float = 60.0) -> Client:
        return Client(self.path, timeout_s=timeout_s)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End it in order if it runs; by force when it does not end."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def running_spdk(
    folder: Path, name: str, *, core: int = 0, memory_mib: int = 1024, config: Path | None = None
) -> Iterator[Spdk]:
    """A started spdk_tgt for the length of a block."""
    spdk = Spdk(folder, name, core=core, memory_mib=memory_mib)
    try:
        spdk.start(config=config)
        yield spdk
    finally:
        spdk.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
