"""The embedded target as a child process, provisioned over SPDK's JSON-RPC like a real one.

Not here: the target (``kvdev.target``); volumes on its namespaces (``kvdev.store``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from kvdev.clock import Deadline
from kvdev.errors import ConnectError, DeadlineError, KvdevError, UsageError
from kvdev.uri import TcpAddress, TcpUri
from kvdev_tools import process
from kvdev_tools.exits import ExitCode
from kvdev_tools.scratch import scratch_folder
from spdk_rpc import Client, RpcTransportError, SpdkRpc

START_TIMEOUT_S = 30.0
RPC_TIMEOUT_S = 120.0
"""Creating a bdev touches all of its memory."""
SUBNQN = "nqn.2026-01.io.kvdev:replay"
INTERRUPTED_STOP_TIMEOUT_S = 1.0
"""After an interrupt nobody waits for a target that does not answer; what it keeps is of no use without us."""
BLOCK_SIZE_BYTES = 4096
_STDERR_TAIL_BYTES = 4096


@dataclass(frozen=True)
class MemberTraffic:
    """What the target counted for one namespace."""

    bytes_read: int
    bytes_written: int


class TargetEndedInterrupt(KeyboardInterrupt):
    """The target has ended: unwinds as Ctrl-C does, since nobody will answer an orderly close."""


class Rig:
    """A target of our own: started by ``start``, gone after ``close`` with everything it kept."""

    def __init__(self) -> None:
        self._scratch = contextlib.ExitStack()
        self.folder = self._scratch.enter_context(scratch_folder())
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._names: list[str] = []
        self._files: list[Path] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def rpc(self) -> SpdkRpc:
        assert self._client is not None, "start comes first"
        return SpdkRpc(self._client)

    def start(self, *, deadline: Deadline | None = None) -> None:
        """Start the target and wait until its RPC socket answers; ConnectError says why it does not."""
        limit = deadline or Deadline.after(START_TIMEOUT_S)
        socket_path = self.folder / "rpc.sock"
        ready_path = self.folder / "ready"
        errors_path = self.folder / "target.err"
        arguments = ["target", "serve", "--rpc-socket", str(socket_path)]
        # Memory is touched when it is provisioned, as SPDK's is: page faults are no part of what is measured.
        arguments += ["--ready-file", str(ready_path), "--parent-pid", str(os.getpid()), "--populate"]
        with errors_path.open("wb") as errors:
            child = process.start("kvdev_tools.main", arguments, stdout=subprocess.DEVNULL, stderr=errors)
        self._process = child
        while not ready_path.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(0.02)
                # What it was refused for is what this command is refused for.
                kinds: dict[int, type[KvdevError]] = {
                    ExitCode.USAGE: UsageError,
                    ExitCode.REFUSED: KvdevError,
                }
                raise kinds.get(code, ConnectError)(
                    f"embedded target: ended with code {code}: {self._last_error()}"
                )
            if limit.is_expired:
                raise DeadlineError(
                    f"embedded target: not ready within {limit.elapsed_ms() / 1000:.0f} s: {self._last_error()}",
                    operation="start of the embedded target",
                    elapsed_ms=limit.elapsed_ms(),
                )
        self._client = Client(socket_path, timeout_s=RPC_TIMEOUT_S)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise TargetEndedInterrupt as soon as the target ends, whatever is waited for; of the main thread only.

        The kernel's own signal for it is used: it ends a wait as Ctrl-C does, and nothing has to look.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # nobody can interrupt this thread: it meets the end of the connection
            return
        is_armed = True

        def look(number: int, frame: FrameType | None) -> None:
            if is_armed and self._has_ended():
                raise TargetEndedInterrupt
            if callable(former):
                former(number, frame)

        former = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, look)
        try:
            if self._has_ended():
                raise TargetEndedInterrupt
            yield
        finally:
            is_armed = False
            # None: somebody's handler in C, which cannot be put back.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if former is None else former)

    def _has_ended(self) -> bool:
        """Whether the target has ended; leaves its exit code to ``end_text``, as a signal's handler has to."""
        if self._process is None:
            return False
        if self._process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:
            return True

    def end_text(self) -> str | None:
        """How the target ended; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"ended with code {code}: {self._last_error()}"
        return f"ended by {signal.Signals(-code).name}"

    def _last_error(self) -> str:
        """The last line that the target wrote on stderr, of its own if there is one."""
        try:
            tail = (self.folder / "target.err").read_bytes()[-_STDERR_TAIL_BYTES:]
        except OSError:
            tail = b""
        lines = tail.decode(errors="replace").strip().splitlines()
        own = [line for line in lines if line.startswith("kvdev")]
        return (own or lines or ["it said nothing"])[-1]

    def provision(
        self, *, host_nqn: str, namespace_count: int, namespace_size_bytes: int, files: Path | None = None
    ) -> TcpUri:
        """Transport, bdevs, subsystem with namespaces, listener and allowed host; returns the subsystem's URI.

        Bdevs are of memory, or, with ``files``, sparse files in that folder. They have lost their names by the
        time this returns, so that none stays behind, however this process and the target end.
        """
        rpc = self.rpc
        rpc.nvmf_create_transport(trtype="TCP")
        for index in range(namespace_count):
            name = f"replay{index}"
            if files is None:
                rpc.bdev_malloc_create(
                    name=name,
                    num_blocks=namespace_size_bytes // BLOCK_SIZE_BYTES,
                    block_size=BLOCK_SIZE_BYTES,
                )
            else:
                path = files / f"{self.folder.name}-{index}"
                self._make_file(path, namespace_size_bytes)
                rpc.bdev_aio_create(name=name, filename=str(path), block_size=BLOCK_SIZE_BYTES)
            self._names.append(name)
        self._remove_files()
        rpc.nvmf_create_subsystem(
            nqn=SUBNQN, serial_number="KVDEVREPLAY", max_namespaces=max(32, namespace_count)
        )
        for name in self._names:
            rpc.nvmf_subsystem_add_ns(nqn=SUBNQN, bdev_name=name)
        rpc.nvmf_subsystem_add_host(nqn=SUBNQN, host=host_nqn)
        rpc.nvmf_subsystem_add_listener(nqn=SUBNQN, traddr="127.0.0.1", trsvcid=0)
        address = rpc.nvmf_subsystem_get_listeners(SUBNQN)[0]["address"]
        return TcpUri((TcpAddress(address["traddr"], int(address["trsvcid"])),), SUBNQN)

    def _make_file(self, path: Path, size_bytes: int) -> None:
        try:
            with path.open("xb") as file:
                self._files.append(path)
                file.truncate(size_bytes)
        except OSError as error:
            remedy = (
                "raise `ulimit -f`, or lower --capacity"
                if error.errno == errno.EFBIG
                else "name a folder that can be written"
            )
            raise UsageError(f"files: {path}: {error.strerror}; {remedy}") from error

    def _remove_files(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def traffic(self) -> list[MemberTraffic]:
        """Bytes moved at each namespace since it was made, in the order of their ids."""
        stats = {each["name"]: each for each in self.rpc.bdev_get_iostat().get("bdevs", [])}
        return [
            MemberTraffic(stats[name].get("bytes_read", 0), stats[name].get("bytes_written", 0))
            for name in self._names
            if name in stats
        ]

    def close(self, *, timeout_s: float = process.STOP_TIMEOUT_S) -> None:
        """Stop the target, by force once the time is over, and remove its files; safe to call at any point."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            process.stop(self._process, timeout_s=timeout_s)
        self._remove_files()
        self._scratch.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_interrupted = value is not None and not isinstance(value, Exception)
        self.close(timeout_s=INTERRUPTED_STOP_TIMEOUT_S if is_interrupted else process.STOP_TIMEOUT_S)


@contextlib.contextmanager
def running_rig() -> Iterator[Rig]:
    """A started rig for the length of a block."""
    with Rig() as rig:
        try:
            rig.start()
            yield rig
        except RpcTransportError as error:
            if rig.pid is not None and not Path(f"/proc/{rig.pid}").exists():
                raise ConnectError(f"embedded target: {rig._last_error()}") from error
            raise
