"""The RPC socket of the embedded target: connections, JSON-RPC envelopes and batches, as SPDK behaves.

Not here: the methods (``rpc_methods``); cutting the stream (``spdk_rpc.framing``).
Trust: what clients send is ``untrusted``; malformed JSON ends the connection without a reply.
Threads: one of its own runs the loop; ``start`` and ``stop`` are for the thread that owns the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvdev.errors import ConnectError, DeadlineError, UsageError
from kvdev.files import open_lock
from kvdev.target.model import SpdkError
from spdk_rpc.address import UNIX_PATH_LIMIT_BYTES
from spdk_rpc.errors import ERROR_INTERNAL, ERROR_INVALID_REQUEST
from spdk_rpc.framing import (
    REPLY_SIZE_LIMIT_BYTES,
    REQUEST_SIZE_LIMIT_BYTES,
    DuplicateKeys,
    FramingError,
    JsonSplitter,
    decode_value,
    encode_value,
)

CONNECTION_COUNT_LIMIT = 64
"""As SPDK; one more is closed at once."""
ID_SIZE_LIMIT = 128
SEND_WAIT_LIMIT_S = 30.0
"""A client that does not read its replies for so long loses its connection."""
OUTSTANDING_LIMIT = 128
"""Requests of one connection that wait at the same time; further ones are read later."""
_READ_SIZE_BYTES = 64 << 10
_ENVELOPE_NAMES = frozenset({"jsonrpc", "method", "params", "id"})

log = logging.getLogger("kvdev.target_rpc")

Call = Callable[[str, Any], Awaitable[Any]]


class ListeningSocket:
    """A UNIX socket of mode 0600 that this process alone listens on.

    Invariant: while it exists the lock beside it is held, so a dead process's socket is told from a
    living one's and may be replaced.
    """

    def __init__(self, path: str) -> None:
        size_bytes = len(os.fsencode(path))
        if not 0 < size_bytes <= UNIX_PATH_LIMIT_BYTES:
            raise UsageError(
                f"rpc socket: a path has 1 to {UNIX_PATH_LIMIT_BYTES} bytes, got {size_bytes}: {path!r}; "
                "choose a shorter one"
            )
        self.path = path
        self._lock_path = f"{path}.lock"
        self._lock_fd = self._take_lock()
        try:
            self.socket = self._listen()
        except BaseException:
            self._drop_lock()
            raise

    def close(self) -> None:
        """Stop listening and remove the socket and its lock."""
        with contextlib.suppress(OSError):
            self.socket.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()
        self._drop_lock()

    def _take_lock(self) -> int:
        while True:
            try:
                fd = open_lock(self._lock_path)
            except OSError as error:
                raise self._failed(error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The former owner may have removed the file between our open and our lock.
                if os.fstat(fd).st_ino == Path(self._lock_path).stat().st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise self._in_use() from None
            except FileNotFoundError:
                pass
            os.close(fd)

    def _drop_lock(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._lock_path).unlink()
        os.close(self._lock_fd)

    def _listen(self) -> socket.socket:
        self._remove_dead()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Linux gives the file the socket's own mode (less the umask), so it is never wider than this,
            # not for a moment, and the umask of other threads stays alone.
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(self.path)
            mode = stat.S_IMODE(Path(self.path).lstat().st_mode)
            if mode & 0o077:
                Path(self.path).unlink()
                raise UsageError(f"rpc socket: {self.path}: expected mode 0600, got {mode:#o}")
            listening.listen(CONNECTION_COUNT_LIMIT)
        except OSError as error:
            listening.close()
            raise self._failed(error) from error
        except BaseException:
            listening.close()
            raise
        return listening

    def _remove_dead(self) -> None:
        """Remove a socket nobody listens on; refuse anything else that stands there."""
        try:
            mode = Path(self.path).lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed(error) from error
        if not stat.S_ISSOCK(mode):
            raise UsageError(f"rpc socket: {self.path} exists and is no socket; choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex(self.path)
        # EAGAIN: alive, with a full backlog.
        if code in (0, errno.EAGAIN):
            raise self._in_use()
        if code not in (errno.ECONNREFUSED, errno.ENOENT):
            raise self._failed(OSError(code, os.strerror(code)))
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def _in_use(self) -> ConnectError:
        return ConnectError(
            f"rpc socket: {self.path}: another process listens there; stop it or choose another path",
            errno=errno.EADDRINUSE,
        )

    def _failed(self, error: OSError) -> ConnectError:
        return ConnectError(
            f"rpc socket: {self.path}: {error.strerror or error}; choose a directory you may write to",
            errno=error.errno or 0,
        )


class RpcServer:
    """Serves ``call(method, params)`` on a UNIX socket until it is stopped.

    Requests of one connection start in order and answer when they are done; methods that do not wait
    answer in order. ``call`` raises SpdkError for a refusal.
    """

    def __init__(self, path: str, call: Call) -> None:
        self.path = path
        self._call = call
        self._listening: ListeningSocket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._was_full = False

    def start(self) -> None:
        """Listen and serve in a thread of its own. Raises UsageError or ConnectError naming the path."""
        self._listening = ListeningSocket(self.path)
        self._thread = threading.Thread(target=self._run, name="kvdev-target-rpc", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            self._listening.close()
            raise self._failure

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End all connections, join the thread, remove the socket. Raises DeadlineError when a method hangs."""
        if self._thread is None or self._loop is None or self._listening is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._request_stop)
        self._thread.join(timeout_s)
        is_hanging = self._thread.is_alive()
        self._listening.close()
        self._thread = None
        if is_hanging:
            raise DeadlineError(
                f"rpc socket: {self.path}: a method did not end within {timeout_s:g} s", operation="rpc stop"
            )

    def run_call(self, method: str, params: Any, *, timeout_s: float) -> Any:
        """Run one method on the server's loop, as if a client had called it. Raises SpdkError."""
        if self._loop is None:
            raise UsageError("rpc server: not started")

        async def run() -> Any:
            return await self._call(method, params)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineError(f"{method}: no end within {timeout_s:g} s", operation=method) from None

    def _request_stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            log.exception("rpc socket %s: the server ended", self.path)
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        assert self._listening is not None
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_unix_server(
            self._accept, sock=self._listening.socket, limit=_READ_SIZE_BYTES
        )
        self._is_ready.set()
        await self._stopping.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTION_COUNT_LIMIT:
            # Once aloud: a log that nobody reads must not fill up, least of all a pipe.
            level = logging.INFO if self._was_full else logging.WARNING
            self._was_full = True
            log.log(level, "rpc socket %s: more than %d connections", self.path, CONNECTION_COUNT_LIMIT)
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await _Connection(reader, writer, self._call).serve()
        except (ConnectionError, FramingError, asyncio.TimeoutError) as error:
            log.info("rpc socket %s: connection ended: %s", self.path, error or type(error).__name__)
            writer.transport.abort()
        except asyncio.CancelledError:
            # Only ``stop`` cancels; asyncio's own callback would report the cancellation as an error.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()


class _Connection:
    """One client: reads requests, starts them, writes each reply whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> None:
        self._reader = reader
        self._writer = writer
        self._call = call
        self._splitter = JsonSplitter(size_limit_bytes=REQUEST_SIZE_LIMIT_BYTES)
        self._slots = asyncio.Semaphore(OUTSTANDING_LIMIT)
        self._waiting: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        try:
            while chunk := await self._reader.read(_READ_SIZE_BYTES):
                for raw in self._splitter.feed(chunk):
                    if self._writer.is_closing():
                        return
                    await self._start(decode_value(raw))
        finally:
            # The client is gone: nobody waits for these. What a method has begun it has finished already.
            for task in self._waiting:
                task.cancel()

    async def _start(self, untrusted: Any) -> None:
        """Run a request; methods that wait go on in the background, and later requests overtake them."""
        await self._slots.acquire()
        task = asyncio.ensure_future(self._answer(untrusted))
        self._waiting.add(task)
        task.add_done_callback(self._end)
        # Let it run until it first waits, so that requests take effect in the order they came in.
        await asyncio.sleep(0)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            log.info("rpc: reply not delivered: %s", task.exception())
            self._writer.transport.abort()

    async def _answer(self, untrusted: Any) -> None:
        if isinstance(untrusted, list) and untrusted:
            replies = [reply for each in untrusted if (reply := await self._reply_to(each)) is not None]
            if replies:
                await self._write(b"[" + b",".join(replies) + b"]\n")
            return
        reply = await self._reply_to(untrusted)
        if reply is not None:
            await self._write(reply + b"\n")

    async def _write(self, reply: bytes) -> None:
        if self._writer.is_closing():  # asyncio would log each write to a client that has gone
            raise ConnectionResetError("the client has gone")
        self._writer.write(reply)
        await asyncio.wait_for(self._writer.drain(), SEND_WAIT_LIMIT_S)

    async def _reply_to(self, untrusted: Any) -> bytes | None:
        """The reply to one request, None for a notification."""
        request = _parse_request(untrusted)
        if request is None:
            return _encode_error(None, ERROR_INVALID_REQUEST, "Invalid request")
        method, params, request_id = request
        try:
            result = await self._call(method, params)
        except SpdkError as error:
            # The reason may quote a name the client sent; secrets are never in it.
            log.info("%s refused: %s (%d)", method, error.message, error.code)
            return None if request_id is None else _encode_error(request_id, error.code, error.message)
        except Exception as error:
            # A fault of ours must not take the other clients' target with it.
            log.exception("%s failed", method)
            text = f"Internal error: {type(error).__name__}"
            return None if request_id is None else _encode_error(request_id, ERROR_INTERNAL, text)
        if request_id is None:
            return None
        reply = encode_value({"jsonrpc": "2.0", "id": request_id, "result": result})
        if len(reply) >= REPLY_SIZE_LIMIT_BYTES:
            return _encode_error(request_id, ERROR_INTERNAL, "Internal error: the result is over 32 MiB")
        return reply


def _parse_request(untrusted: Any) -> tuple[str, Any, Any] | None:
    """(method, params, id) of a valid request; params and id None when absent or null."""
    if not isinstance(untrusted, dict) or isinstance(untrusted, DuplicateKeys):
        return None
    if not _ENVELOPE_NAMES.issuperset(untrusted):
        return None
    if untrusted.get("jsonrpc", "2.0") != "2.0":
        return None
    method, params, request_id = (untrusted.get(name) for name in ("method", "params", "id"))
    if not isinstance(method, str) or not isinstance(params, dict | list | None):
        return None
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | float | None):
        return None
    if isinstance(request_id, float) and not math.isfinite(request_id):
        return None
    if isinstance(request_id, str) and len(request_id) > ID_SIZE_LIMIT:
        return None
    if isinstance(request_id, int) and request_id.bit_length() > 4 * ID_SIZE_LIMIT:
        return None
    return method, params, request_id


def _encode_error(request_id: Any, code: int, message: str) -> bytes:
    return encode_value({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}})
