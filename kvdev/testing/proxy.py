"""A TCP relay between host and target that a test makes a bad network of: it stalls, cuts and comes back.

Not here: what goes through it (the relay knows no PDUs).
Threads: controls from any; one thread relays.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

CHUNK_BYTES = 1 << 18
BUFFER_BYTES_MAX = 8 << 20
"""Held of one direction while stalled; more stays with the sender."""
CONNECT_TIMEOUT_S = 5.0


@dataclass
class _Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    held: bytearray = field(default_factory=bytearray)
    is_ended: bool = False


class Relay:
    """Listens on a port of its own, which stays, and connects each connection to ``target``."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = "127.0.0.1"
        self.port: int = self._listener.getsockname()[1]
        self.accepted_count = 0
        self._lock = threading.RLock()
        self._pairs: list[tuple[_Flow, _Flow]] = []
        self._is_stalled = False
        self._is_cut = False
        self._is_stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    # ---- controls ----

    def stall(self) -> None:
        """Hold back everything from now on, both ways; nobody is told."""
        with self._lock:
            self._is_stalled = True
        self._wake()

    def resume(self) -> None:
        """Let go what was held, in its order."""
        with self._lock:
            self._is_stalled = False
        self._wake()

    def cut(self) -> None:
        """Reset all connections, and each new one, until ``mend``."""
        with self._lock:
            self._is_cut = True
            self._drop_all(is_reset=True)
        self._wake()

    def mend(self) -> None:
        with self._lock:
            self._is_cut = self._is_stalled = False
        self._wake()

    def strand(self) -> Callable[[], None]:
        """Stop relaying the newest connection alone, and tell neither side; call the result to close it."""
        with self._lock:
            pair = self._pairs.pop()
        self._wake()

        def close() -> None:
            for flow in pair:
                flow.source.close()

        return close

    @property
    def held_byte_count(self) -> int:
        with self._lock:
            return sum(len(flow.held) for pair in self._pairs for flow in pair)

    # ---- the thread ----

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._is_stopping:
            # poll(2) has no descriptor of its own: who counts descriptors is not to meet one that comes and goes.
            with selectors.PollSelector() as selector, self._lock:
                selector.register(self._wake_fd, selectors.EVENT_READ)
                selector.register(self._listener, selectors.EVENT_READ)
                interests: dict[socket.socket, int] = {}
                for pair in self._pairs:
                    for flow in pair:
                        if not flow.is_ended and len(flow.held) < BUFFER_BYTES_MAX:
                            interests[flow.source] = interests.get(flow.source, 0) | selectors.EVENT_READ
                        if flow.held and not self._is_stalled:
                            interests[flow.sink] = interests.get(flow.sink, 0) | selectors.EVENT_WRITE
                for sock, events in interests.items():
                    selector.register(sock, events)
                self._lock.release()
                try:
                    selector.select(0.5)
                finally:
                    self._lock.acquire()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                self._accept()
                for pair in self._pairs[:]:
                    self._pump(pair)

    def _accept(self) -> None:
        while True:
            try:
                host, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                return
            self.accepted_count += 1
            if self._is_cut:
                _reset(host)
                continue
            try:
                target = socket.create_connection(self.target, timeout=CONNECT_TIMEOUT_S)
            except OSError:
                _reset(host)
                continue
            for sock in (host, target):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((_Flow(host, target), _Flow(target, host)))

    def _pump(self, pair: tuple[_Flow, _Flow]) -> None:
        try:
            for flow in pair:
                self._move(flow)
            if all(flow.is_ended and not flow.held for flow in pair):
                self._drop(pair, is_reset=False)
        except OSError:
            # What one side did to its connection, the other one gets to know, unless the network is stalled.
            if not self._is_stalled:
                self._drop(pair, is_reset=True)
            else:
                for flow in pair:
                    flow.is_ended = True

    def _move(self, flow: _Flow) -> None:
        if not flow.is_ended and len(flow.held) < BUFFER_BYTES_MAX:
            with contextlib.suppress(BlockingIOError):
                data = flow.source.recv(CHUNK_BYTES)
                flow.held += data
                flow.is_ended = not data
        if self._is_stalled:
            return
        with contextlib.suppress(BlockingIOError):
            while flow.held:
                del flow.held[: flow.sink.send(flow.held[:CHUNK_BYTES])]
        if flow.is_ended and not flow.held:
            with contextlib.suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)

    def _drop(self, pair: tuple[_Flow, _Flow], *, is_reset: bool) -> None:
        self._pairs.remove(pair)
        for flow in pair:
            _reset(flow.source) if is_reset else flow.source.close()

    def _drop_all(self, *, is_reset: bool) -> None:
        for pair in self._pairs[:]:
            self._drop(pair, is_reset=is_reset)

    def close(self) -> None:
        self._is_stopping = True
        self._wake()
        self._thread.join(5)
        with self._lock:
            self._drop_all(is_reset=True)
            self._listener.close()
        os.close(self._wake_fd)

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
