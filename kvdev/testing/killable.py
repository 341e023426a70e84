"""An embedded target in a process of its own, on files that stay, to be killed and stopped like a machine.

Not here: a target inside the test's process (``target``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvdev.clock import Deadline
from kvdev.errors import DeadlineError

START_TIMEOUT_S = 120.0


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now: of use to a process that is started several times."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


class KillableTarget:
    """``python -m kvdev.target`` with file namespaces, on the same ports each time it is started."""

    def __init__(
        self,
        folder: Path,
        *,
        nqn: str = "nqn.2024-01.io.kvdev:killable",
        namespace_count: int = 1,
        namespace_size_bytes: int = 16 << 20,
        block_size_bytes: int = 4096,
        port_count: int = 1,
        min_kato_ms: int = 100,
        ana_reporting: bool = False,
        volatile_seed: int | None = None,
        first_calls: Sequence[dict[str, Any]] = (),
        last_calls: Sequence[dict[str, Any]] = (),
    ) -> None:
        """``first_calls`` and ``last_calls`` go around the configuration made here."""
        self.folder = folder
        self.nqn = nqn
        self.ports = free_ports(port_count)
        self.volatile_seed = volatile_seed
        self.block_size_bytes = block_size_bytes
        self.files = [folder / f"namespace{index}" for index in range(namespace_count)]
        for path in self.files:
            path.touch()
            os.truncate(path, namespace_size_bytes)
        self.child: subprocess.Popen[bytes] | None = None
        self.calls = [*first_calls, *self._calls(min_kato_ms, ana_reporting), *last_calls]
        """Its configuration, in the words of SPDK's RPC."""

    def uri(self, *, port: int | None = None, paths: tuple[int, ...] = ()) -> str:
        """The subsystem, at a port (the first one's), with further ports as paths."""
        options = "&".join(f"path=127.0.0.1:{each}" for each in paths)
        return f"tcp://127.0.0.1:{port or self.ports[0]}/{self.nqn}{'?' + options if options else ''}"

    def _calls(self, min_kato_ms: int, ana_reporting: bool) -> list[dict[str, Any]]:
        transport = {"trtype": "TCP", "kas": 1, "min_kato": min_kato_ms}
        subsystem = {"nqn": self.nqn, "allow_any_host": True, "ana_reporting": ana_reporting}
        calls: list[dict[str, Any]] = [
            {"method": "nvmf_create_transport", "params": transport},
            {"method": "nvmf_create_subsystem", "params": subsystem},
        ]
        for index, path in enumerate(self.files):
            # The same identity each time, as a device has.
            uuid = f"0e7d5c1a-6a0f-4a53-8f0e-{index:012x}"
            bdev = {
                "name": f"b{index}",
                "filename": str(path),
                "block_size": self.block_size_bytes,
                "uuid": uuid,
            }
            calls.append({"method": "bdev_aio_create", "params": bdev})
            params = {"nqn": self.nqn, "namespace": {"bdev_name": f"b{index}"}}
            calls.append({"method": "nvmf_subsystem_add_ns", "params": params})
        for port in self.ports:
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
            params = {"nqn": self.nqn, "listen_address": address}
            calls.append({"method": "nvmf_subsystem_add_listener", "params": params})
        return calls

    @property
    def rpc_socket(self) -> Path:
        return self.folder / "rpc"

    def start(self) -> None:
        """Start it and wait until it is ready."""
        ready, config = self.folder / "ready", self.folder / "config"
        ready.unlink(missing_ok=True)
        self.rpc_socket.unlink(missing_ok=True)
        config.write_text(json.dumps(self.calls))
        arguments = [sys.executable, "-m", "kvdev.target", "--rpc-socket", str(self.rpc_socket)]
        arguments += ["--config", str(config), "--ready-file", str(ready)]
        if self.volatile_seed is not None:
            arguments += ["--volatile-cache", str(self.volatile_seed)]
        self.child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        limit = Deadline.after(START_TIMEOUT_S)
        pause = threading.Event()
        while not ready.exists():
            if self.child.poll() is not None or limit.is_expired:
                raise DeadlineError("killable target: it does not start", operation="start target")
            pause.wait(0.01)

    def signal(self, number: int) -> None:
        assert self.child is not None, "it was started"
        self.child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.child.kill()
        self.child.wait(60)
        self.child = None

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def __enter__(self) -> KillableTarget:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
        self.kill()
