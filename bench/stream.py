"""The yardstick of the data path: a raw TCP stream over loopback between two pinned processes, without any protocol.

``StreamServer`` is the far end in a process of its own; its buffer is as large as the namespaces, the caller's as large
as the arena, so that both move as much memory as the data path does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time

COMMAND = struct.Struct("<cQQ")
SEND_SIZES_BYTES = tuple(64 << 10 << shift for shift in range(5))
"""64 KiB to 1 MiB."""
RECEIVE_SIZE_BYTES = 1 << 20
TIMEOUT_S = 60.0


def _send(connection: socket.socket, buffer: memoryview, total: int, size: int) -> None:
    at = 0
    while total:
        part = min(size, total, len(buffer) - at)
        connection.sendall(buffer[at : at + part])
        total -= part
        at = (at + part) % len(buffer)


def _receive(connection: socket.socket, buffer: memoryview, total: int) -> None:
    at = 0
    while total:
        count = connection.recv_into(buffer[at : at + min(RECEIVE_SIZE_BYTES, total, len(buffer) - at)])
        if count == 0:
            raise ConnectionError("stream: the other side has gone")
        total -= count
        at = (at + count) % len(buffer)


def _serve(buffer_size: int) -> None:
    """Serve one connection: R sends, W receives and acknowledges, until it closes."""
    buffer = memoryview(bytearray(os.urandom(1 << 20) * -(-buffer_size // (1 << 20))))[:buffer_size]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        listener.settimeout(TIMEOUT_S)
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            command = connection.recv(COMMAND.size, socket.MSG_WAITALL)
            if len(command) < COMMAND.size:
                return
            direction, total, size = COMMAND.unpack(command)
            if direction == b"R":
                _send(connection, buffer, total, size)
            else:
                _receive(connection, buffer, total)
                connection.sendall(b".")


class StreamServer:
    """The far end on core ``core``; measures one transfer per call."""

    def __init__(self, *, buffer_size: int, core: int) -> None:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(buffer_size)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
            )
        finally:
            os.sched_setaffinity(0, before)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def measure(self, direction: str, buffer: memoryview, *, total: int, send_size: int) -> float:
        """Seconds to move ``total`` bytes to (``read``) or from (``write``) the buffer."""
        started = time.perf_counter()
        self._connection.sendall(COMMAND.pack(b"R" if direction == "read" else b"W", total, send_size))
        if direction == "read":
            _receive(self._connection, buffer, total)
        else:
            _send(self._connection, buffer, total, send_size)
            self._connection.recv(1)
        return time.perf_counter() - started

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
