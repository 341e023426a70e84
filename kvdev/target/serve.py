"""Run an embedded target: the data path, the model and the RPC server as one thing with one lifetime.

``EmbeddedTarget`` is for a process that does other work too, ``serve`` for one that does only this.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from kvdev.errors import DeadlineError, KvdevError, TransportError, UsageError
from kvdev.target.model import ListenAddress, ServiceBackend, SpdkError, TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.target.rpc_server import RpcServer
from kvdev.target.state import ConfigCall, StateFile, parse_calls, read_json

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_BUG = 70

CONFIG_CALL_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServeOptions:
    """What ``kvdev target serve`` takes."""

    rpc_socket: str
    allow_remote: bool = False
    config: str | None = None
    ready_file: str | None = None
    is_json: bool = False
    state: str | None = None
    volatile_seed: int | None = None
    """Seed of a volatile cache over every file; None for none."""


def make_service(*, volatile_seed: int | None = None) -> ServiceBackend:
    """The data path in C with its control thread."""
    from kvdev.target.service import TargetOptions, TargetService

    return TargetService(TargetOptions(volatile_seed=volatile_seed))


class EmbeddedTarget:
    """A running target; ``with EmbeddedTarget(...) as target`` starts and stops it."""

    def __init__(
        self,
        rpc_socket: str | os.PathLike[str],
        *,
        backend: ServiceBackend | None = None,
        allow_remote: bool = False,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rpc_socket = os.fspath(rpc_socket)
        self._backend = backend if backend is not None else make_service()
        self.model = TargetModel(self._backend, allow_remote=allow_remote)
        self._methods = RpcMethods(self.model)
        self._state_path = None if state is None else os.fspath(state)
        self._state: StateFile | None = None
        self._server = RpcServer(self.rpc_socket, self._methods.call)

    def __enter__(self) -> EmbeddedTarget:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the data path, then the RPC server, then bring back the state if one is kept.

        Raises UsageError, ConnectError, or SpdkError for a call of the state that is refused; nothing stays
        behind, and the state file is as it was.
        """
        if self._state_path is not None:
            self._state = StateFile(self._state_path)
        try:
            self._backend.start()
            try:
                self._server.start()
                if self._state is not None:
                    self._bring_back(self._state)
            except BaseException:
                self._server.stop(timeout_s=STOP_TIMEOUT_S / 2)
                self._backend.stop(timeout_s=STOP_TIMEOUT_S)
                raise
        except BaseException:
            self._close_state()
            raise

    def _bring_back(self, state: StateFile) -> None:
        calls, images = state.load()
        self._methods.stack.keep_images(images)
        for method, params in calls:
            try:
                self.call(method, params)
            except SpdkError as error:
                raise SpdkError(error.code, f"state: {state.path}: {method}: {error.message}") from error
        # Only a state that is there as a whole may take the place of the one in the file.
        self._methods.on_change = lambda: state.save(
            self._methods.configuration(), self._methods.stack.images()
        )

    def _close_state(self) -> None:
        self._methods.on_change = None
        if self._state is not None:
            self._state.close()
            self._state = None

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the RPC server, then the data path; the socket is gone afterwards."""
        try:
            self._server.stop(timeout_s=timeout_s / 2)
        finally:
            self._close_state()
            self._backend.stop(timeout_s=timeout_s / 2)

    def call(self, method: str, params: Any = None, *, timeout_s: float = CONFIG_CALL_TIMEOUT_S) -> Any:
        """Run one RPC method in this process. Raises SpdkError."""
        return self._server.run_call(method, params, timeout_s=timeout_s)


def read_config(path: str) -> list[ConfigCall]:
    """The calls of a configuration file: a list of calls, or what SPDK's save_config writes.

    Raises UsageError naming the file and the place.
    """
    return parse_calls(path, "config", read_json(path, "config"))


def serve(options: ServeOptions, *, make_backend: Callable[[], ServiceBackend] | None = None) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; returns the exit code.

    Call it from the main thread. Prints one ready line, and one clear line for whatever goes wrong.
    """
    try:
        make = make_backend or (lambda: make_service(volatile_seed=options.volatile_seed))
        calls = read_config(options.config) if options.config else []
        with _StopRequest() as stopping:
            return _serve_until(options, calls, make, stopping)
    except SpdkError as error:
        return _fail(str(error), EXIT_REFUSED)
    except UsageError as error:
        return _fail(str(error), EXIT_USAGE)
    except TransportError as error:
        return _fail(str(error), EXIT_UNREACHABLE)
    except KvdevError as error:
        return _fail(str(error), EXIT_REFUSED)


class _StopRequest:
    """Set by SIGTERM and SIGINT while entered; of the main thread only.

    Not an Event: its lock may be held by the very code that the handler interrupts. Python's handlers run between
    two instructions, so that a signal right before a wait would not end it: the wakeup descriptor does.
    """

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> _StopRequest:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._former_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._former = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def _request(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_set = True

    def wait(self) -> None:
        """Wait until it is set, however long that takes."""
        while not self.is_set:
            select.select([self._reader], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, select.PIPE_BUF)


def _serve_until(
    options: ServeOptions,
    calls: list[ConfigCall],
    make_backend: Callable[[], ServiceBackend],
    stopping: _StopRequest,
) -> int:
    target = EmbeddedTarget(
        options.rpc_socket,
        backend=make_backend(),
        allow_remote=options.allow_remote,
        state=options.state,
    )
    target.start()
    try:
        for method, params in calls:
            if stopping.is_set:
                break
            try:
                target.call(method, params)
            except SpdkError as error:
                raise SpdkError(error.code, f"config: {options.config}: {method}: {error.message}") from error
        else:
            with _ready_file(options, target):
                stopping.wait()
    finally:
        _stop(target)
    return EXIT_OK


def _stop(target: EmbeddedTarget) -> None:
    try:
        target.stop()
    except DeadlineError as error:
        # A thread hangs and would keep the interpreter from ending.
        _fail(f"stop: {error}", EXIT_BUG)
        sys.stdout.flush()
        os._exit(EXIT_BUG)


@contextlib.contextmanager
def _ready_file(options: ServeOptions, target: EmbeddedTarget) -> Iterator[None]:
    """Say that the target is ready, on standard output and in the ready file while it runs."""
    listeners = sorted({each for subsystem in target.model.subsystems() for each in subsystem.listeners})
    ready = {
        "rpc_socket": target.rpc_socket,
        "pid": os.getpid(),
        "listeners": [{"address": each.address, "port": each.port} for each in listeners],
    }
    if options.ready_file:
        # Renamed into place, so that a reader never sees a part of it; that must not take a device or a FIFO away.
        if os.path.lexists(options.ready_file) and not Path(options.ready_file).is_file():
            raise UsageError(
                f"ready file: {options.ready_file}: expected a regular file or none; name another"
            )
        partial = Path(f"{options.ready_file}.{os.getpid()}")
        try:
            if Path(options.ready_file).exists() and not Path(options.ready_file).is_file():
                raise UsageError(
                    f"ready file: {options.ready_file}: expected a file of ours to replace, "
                    f"got something else; choose another path"
                )
            partial.write_text(json.dumps(ready) + "\n", encoding="utf-8")
            partial.replace(options.ready_file)
        except OSError as error:
            raise UsageError(f"ready file: {options.ready_file}: {error.strerror or error}") from error
    line = (
        json.dumps(ready)
        if options.is_json
        else f"kvdev target ready: rpc {target.rpc_socket} pid {os.getpid()} listening on {_shown(listeners)}"
    )
    print(line, flush=True)
    try:
        yield
    finally:
        if options.ready_file:
            Path(options.ready_file).unlink(missing_ok=True)


def _shown(listeners: list[ListenAddress]) -> str:
    pairs = (
        f"[{each.address}]:{each.port}" if ":" in each.address else f"{each.address}:{each.port}"
        for each in listeners
    )
    return ", ".join(pairs) or "nothing yet: give it a configuration"


def _fail(message: str, code: int) -> int:
    print(f"kvdev target: {message}", file=sys.stderr, flush=True)
    return code
