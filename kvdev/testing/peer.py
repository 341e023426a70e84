"""A scripted NVMe/TCP target: a test writes down, byte for byte if it likes, what the other side sends.

A script is a function that gets a ``PeerConnection``; ``ScriptedPeer`` runs one for each connection, in
order, on a thread of its own. PDUs are packed here, not by the core under test, so that a script can
say anything, the wrong thing included.
Not here: a target that keeps data for real use (``kvdev.target``).
Spec: NVM Express TCP Transport 1.0, 3.6.2.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType

from kvdev.errors import KvdevError
from kvdev.native.crc import crc32c

IC_REQ = 0x00
IC_RESP = 0x01
H2C_TERM = 0x02
C2H_TERM = 0x03
CAPSULE_CMD = 0x04
CAPSULE_RESP = 0x05
H2C_DATA = 0x06
C2H_DATA = 0x07
R2T = 0x09

FLAG_HDGST = 0x01
FLAG_DDGST = 0x02
FLAG_LAST = 0x04
FLAG_SUCCESS = 0x08

SCRIPT_TIMEOUT_S = 10.0
"""No script waits longer for the host: a test that goes wrong ends."""

Script = Callable[["PeerConnection"], None]


class PeerClosedError(KvdevError):
    """The host closed or terminated the connection while the script expected something else."""


@dataclass(frozen=True)
class PduFromHost:
    """One PDU as received: the header of HLEN bytes, and the data without padding and digests."""

    header: bytes
    data: bytes
    padding: bytes = b""
    """Between the header, or its digest, and the data."""

    @property
    def type(self) -> int:
        return self.header[0]

    @property
    def flags(self) -> int:
        return self.header[1]

    @property
    def pdo(self) -> int:
        return self.header[3]

    @property
    def plen(self) -> int:
        return int.from_bytes(self.header[4:8], "little")

    @property
    def sqe(self) -> bytes:
        return self.header[8:72]

    @property
    def opcode(self) -> int:
        return self.header[8]

    @property
    def cid(self) -> int:
        """CID of a command, CCCID of data."""
        start = 10 if self.type == CAPSULE_CMD else 8
        return int.from_bytes(self.header[start : start + 2], "little")

    @property
    def ttag(self) -> int:
        return int.from_bytes(self.header[10:12], "little")

    @property
    def datao(self) -> int:
        return int.from_bytes(self.header[12:16], "little")

    @property
    def datal(self) -> int:
        return int.from_bytes(self.header[16:20], "little")

    @property
    def slba(self) -> int:
        return int.from_bytes(self.header[48:56], "little")

    @property
    def lba_count(self) -> int:
        return int.from_bytes(self.header[56:58], "little") + 1

    @property
    def sgl_length(self) -> int:
        return int.from_bytes(self.header[40:44], "little")

    @property
    def sgl_type(self) -> int:
        return self.header[47]

    @property
    def fes(self) -> int:
        """Of an H2CTermReq."""
        return int.from_bytes(self.header[8:10], "little")

    @property
    def fei(self) -> int:
        """Of an H2CTermReq; the field is not aligned."""
        return int.from_bytes(self.header[10:14], "little")


def pack_common(pdu_type: int, flags: int, hlen: int, pdo: int, plen: int) -> bytes:
    return struct.pack("<BBBBI", pdu_type, flags, hlen, pdo, plen)


def pack_ic_resp(*, pfv: int = 0, cpda: int = 0, dgst: int = 0, maxh2cdata: int = 131072) -> bytes:
    return pack_common(IC_RESP, 0, 128, 0, 128) + struct.pack("<HBBI", pfv, cpda, dgst, maxh2cdata).ljust(
        120, b"\0"
    )


def pack_cqe(*, cid: int, status: int = 0, dw0: int = 0, dw1: int = 0, sqhd: int = 0, sqid: int = 1) -> bytes:
    """``status`` is the field without the phase bit."""
    return struct.pack("<IIHHHH", dw0, dw1, sqhd, sqid, cid, status << 1)


def pack_term(*, fes: int, fei: int = 0, data: bytes = b"", plen: int | None = None) -> bytes:
    head = pack_common(C2H_TERM, 0, 24, 0, 24 + len(data) if plen is None else plen)
    return head + struct.pack("<HI", fes, fei).ljust(16, b"\0") + data


@dataclass
class PeerConnection:
    """One accepted connection, and what was agreed on it."""

    sock: socket.socket
    has_header_digest: bool = False
    has_data_digest: bool = False
    hpda: int = 0
    cpda: int = 0
    maxh2cdata: int = 131072
    digest_errors: list[str] = field(default_factory=list)
    """Digests of the host's that did not match; a test expects none."""
    stashed: deque[PduFromHost] = field(default_factory=deque)
    """Commands that came while a script waited for data; ``receive_pdu`` gives them next."""
    tamper: Callable[[bytes], bytes] | None = None
    """Applied to everything sent from then on: a test's bit flips, cuts and insertions."""
    script_ident: int = 0
    is_done: threading.Event = field(default_factory=threading.Event)
    """The script has ended and the socket is closed."""

    def receive(self, size: int) -> bytes:
        """Exactly so many bytes; raises PeerClosedError when the host closes first."""
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.sock.recv(size - len(parts))
            except ConnectionError as error:
                raise PeerClosedError(
                    f"peer: expected {size} bytes, got a reset after {len(parts)}"
                ) from error
            if not part:
                raise PeerClosedError(f"peer: expected {size} bytes, got the end after {len(parts)}")
            parts += part
        return bytes(parts)

    def receive_pdu(self) -> PduFromHost:
        """The host's next PDU; digests are checked where they were agreed."""
        return self.stashed.popleft() if self.stashed else self._receive_pdu()

    def _receive_pdu(self) -> PduFromHost:
        header = self.receive(8)
        hlen, pdo, plen = header[2], header[3], int.from_bytes(header[4:8], "little")
        header += self.receive(hlen - 8)
        if header[0] in (IC_REQ, H2C_TERM):
            return PduFromHost(header, self.receive(plen - hlen))
        position = hlen
        if self.has_header_digest:
            self._check_digest("header digest", header, self.receive(4))
            position += 4
        if plen == position:
            return PduFromHost(header, b"")
        padding = self.receive(pdo - position)
        digest_size = 4 if self.has_data_digest else 0
        data = self.receive(plen - pdo - digest_size)
        if self.has_data_digest:
            self._check_digest("data digest", data, self.receive(4))
        return PduFromHost(header, data, padding)

    def _check_digest(self, what: str, covered: bytes, digest: bytes) -> None:
        if crc32c(covered) != int.from_bytes(digest, "little"):
            self.digest_errors.append(what)

    def receive_command(self) -> PduFromHost:
        pdu = self.receive_pdu()
        self._check_not_term(pdu)
        if pdu.type != CAPSULE_CMD:
            raise KvdevError(f"peer: expected CapsuleCmd 0x04, got PDU type 0x{pdu.type:02x}")
        return pdu

    def _check_not_term(self, pdu: PduFromHost) -> None:
        if pdu.type == H2C_TERM:
            raise PeerClosedError(f"peer: the host sent H2CTermReq FES 0x{pdu.fes:02x} FEI 0x{pdu.fei:x}")

    def receive_term(self) -> PduFromHost:
        """The H2CTermReq that ends the connection; PDUs on their way before it are skipped."""
        while True:
            pdu = self.receive_pdu()
            if pdu.type == H2C_TERM:
                return pdu

    def wait_closed(self) -> bytes:
        """Everything until the host closes."""
        rest = bytearray()
        try:
            while part := self.sock.recv(65536):
                rest += part
        except ConnectionError:
            pass
        return bytes(rest)

    def send(self, data: bytes, *, chunk_size: int = 0) -> None:
        """Send bytes; with ``chunk_size``, in segments of so many."""
        if self.tamper is not None:
            data = self.tamper(data)
        try:
            if not chunk_size:
                self.sock.sendall(data)
                return
            for start in range(0, len(data), chunk_size):
                self.sock.sendall(data[start : start + chunk_size])
        except ConnectionError as error:
            raise PeerClosedError("peer: expected an open connection, got it closed by the host") from error

    def accept_ic(
        self,
        *,
        header_digest: bool | None = None,
        data_digest: bool | None = None,
        cpda: int = 0,
        maxh2cdata: int = 131072,
    ) -> PduFromHost:
        """Answer ICReq; digests None: as the host asks."""
        request = self.receive_pdu()
        asked = request.header[11]
        self.has_header_digest = bool(asked & 1) if header_digest is None else header_digest
        self.has_data_digest = bool(asked & 2) if data_digest is None else data_digest
        self.hpda = request.header[10]
        self.cpda = cpda
        self.maxh2cdata = maxh2cdata
        dgst = int(self.has_header_digest) | int(self.has_data_digest) << 1
        self.send(pack_ic_resp(cpda=cpda, dgst=dgst, maxh2cdata=maxh2cdata))
        return request

    def pack(
        self,
        pdu_type: int,
        specific: bytes,
        *,
        data: bytes = b"",
        flags: int = 0,
        pad_size: int | None = None,
        data_digest: int | None = None,
        header_digest: int | None = None,
    ) -> bytes:
        """A PDU with the agreed digests and padding; a digest given replaces the right one."""
        hlen = 8 + len(specific)
        pdo = 0
        plen = hlen
        if self.has_header_digest:
            flags |= FLAG_HDGST
            plen += 4
        padding = b""
        if data:
            unit = (self.hpda + 1) * 4
            padding = bytes(-plen % unit if pad_size is None else pad_size)
            pdo = plen + len(padding)
            plen = pdo + len(data)
            if self.has_data_digest:
                flags |= FLAG_DDGST
                plen += 4
        header = pack_common(pdu_type, flags, hlen, pdo, plen) + specific
        out = header
        if self.has_header_digest:
            out += (crc32c(header) if header_digest is None else header_digest).to_bytes(4, "little")
        out += padding + data
        if data and self.has_data_digest:
            out += (crc32c(data) if data_digest is None else data_digest).to_bytes(4, "little")
        return out

    def pack_c2h_data(
        self,
        cid: int,
        datao: int,
        data: bytes,
        *,
        is_last: bool = True,
        is_success: bool = False,
        data_digest: int | None = None,
        pad_size: int | None = None,
    ) -> bytes:
        flags = (FLAG_LAST if is_last else 0) | (FLAG_SUCCESS if is_success else 0)
        specific = struct.pack("<HHIII", cid, 0, datao, len(data), 0)
        return self.pack(
            C2H_DATA, specific, data=data, flags=flags, data_digest=data_digest, pad_size=pad_size
        )

    def pack_response(self, cid: int, *, status: int = 0, dw0: int = 0, sqhd: int = 0) -> bytes:
        return self.pack(CAPSULE_RESP, pack_cqe(cid=cid, status=status, dw0=dw0, sqhd=sqhd))

    def pack_r2t(self, cid: int, ttag: int, r2to: int, r2tl: int) -> bytes:
        return self.pack(R2T, struct.pack("<HHIII", cid, ttag, r2to, r2tl, 0))

    def send_read(self, command: PduFromHost, data: bytes, *, is_success: bool = False) -> None:
        """All data of a read in one PDU, and its completion."""
        out = self.pack_c2h_data(command.cid, 0, data, is_success=is_success)
        self.send(out if is_success else out + self.pack_response(command.cid))

    def send_response(self, command: PduFromHost, *, status: int = 0, dw0: int = 0) -> None:
        self.send(self.pack_response(command.cid, status=status, dw0=dw0))

    def receive_write_data(self, command: PduFromHost, *, ttag: int, r2to: int, r2tl: int) -> bytes:
        """Ask for a part of a write's data and take it; checks what the host must hold to."""
        self.send(self.pack_r2t(command.cid, ttag, r2to, r2tl))
        return self.receive_h2c_data(command, ttag=ttag, r2to=r2to, r2tl=r2tl)

    def receive_h2c_data(self, command: PduFromHost, *, ttag: int, r2to: int, r2tl: int) -> bytes:
        data = bytearray()
        while len(data) < r2tl:
            pdu = self._receive_pdu()
            self._check_not_term(pdu)
            if pdu.type == CAPSULE_CMD:
                self.stashed.append(pdu)
                continue
            is_last = len(data) + len(pdu.data) == r2tl
            unit = (self.cpda + 1) * 4
            expected = (H2C_DATA, command.cid, ttag, r2to + len(data), len(pdu.data), is_last, 0)
            actual = (
                pdu.type,
                pdu.cid,
                pdu.ttag,
                pdu.datao,
                pdu.datal,
                bool(pdu.flags & FLAG_LAST),
                pdu.pdo % unit,
            )
            if expected != actual or not 0 < pdu.datal <= self.maxh2cdata:
                raise KvdevError(f"peer: H2CData: expected {expected} up to {self.maxh2cdata}, got {actual}")
            data += pdu.data
        return bytes(data)

    def finish(self) -> None:
        """End the stream behind everything sent, so that the host receives all of it, then close."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            self.wait_closed()
        self.sock.close()

    def close(self) -> None:
        """Close at once; with commands unread the kernel drops what the host has not received yet."""
        self.sock.close()

    def reset(self) -> None:
        """End so that the host sees a connection reset; from another thread, the script's end is waited for.

        One that has ended already, as when the host gives up on all of an association, stays so.
        """
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if threading.get_ident() == self.script_ident:
            self.sock.close()
            return
        # The script's thread may be inside recv: only it may close, or the descriptor could be another's by then.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)
        self.is_done.wait(SCRIPT_TIMEOUT_S)


class ScriptedPeer:
    """A listening socket and the scripts for the connections that come to it; the last one repeats.

    Used as a context manager: leaving it stops the thread and raises what a script raised, except
    PeerClosedError, which a fault test brings about on purpose.
    """

    def __init__(self, scripts: Script | Iterable[Script]) -> None:
        self._scripts = [scripts] if callable(scripts) else list(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(SCRIPT_TIMEOUT_S)
        self.address = "127.0.0.1"
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[PeerConnection] = []
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._is_stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._is_stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self._is_stopping.is_set():
                sock.close()
                return
            sock.settimeout(SCRIPT_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = PeerConnection(sock)
            script = self._scripts[min(len(self.connections), len(self._scripts) - 1)]
            self.connections.append(connection)
            thread = threading.Thread(target=self._run, args=(script, connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, script: Script, connection: PeerConnection) -> None:
        connection.script_ident = threading.get_ident()
        try:
            script(connection)
        except PeerClosedError:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            connection.close()
            connection.is_done.set()

    def join(self) -> None:
        """Wait for the scripts of all connections made so far, and raise what one of them raised."""
        for thread in list(self._threads):
            thread.join(SCRIPT_TIMEOUT_S)
            if thread.is_alive():
                raise KvdevError("peer: a script did not end")
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        """End all connections and threads; a second call does nothing."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        # A connection of our own wakes the acceptor; closing a listener under accept does not.
        with contextlib.suppress(OSError):
            socket.create_connection((self.address, self.port), timeout=1).close()
        self._acceptor.join(SCRIPT_TIMEOUT_S)
        self._listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SCRIPT_TIMEOUT_S)

    def __enter__(self) -> ScriptedPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and self.errors:
            raise self.errors[0]


@dataclass
class MemoryScript:
    """A script that serves one namespace from a byte array, as a well-behaved target does.

    Also the conformance check of the host's sending side: SGL types, padding, digests and data PDUs are
    verified by the connection as they arrive.
    """

    memory: bytearray
    block_size_bytes: int = 4096
    c2h_pdu_bytes: int = 1 << 30
    """Most data in one C2HData."""
    r2t_bytes: int = 1 << 30
    """Most data asked for by one R2T."""
    r2t_ahead: int = 1
    """R2Ts outstanding per command."""
    is_success_used: bool = False
    header_digest: bool | None = None
    data_digest: bool | None = None
    cpda: int = 0
    maxh2cdata: int = 131072
    chunk_size: int = 0
    """Segment size of what is sent; 0 sends each reply at once."""
    commands: list[PduFromHost] = field(default_factory=list)

    def __call__(self, connection: PeerConnection) -> None:
        connection.accept_ic(
            header_digest=self.header_digest,
            data_digest=self.data_digest,
            cpda=self.cpda,
            maxh2cdata=self.maxh2cdata,
        )
        while True:
            command = connection.receive_command()
            self.commands.append(command)
            self.serve(connection, command)
            if connection.digest_errors:
                raise KvdevError(f"peer: expected matching digests, got {connection.digest_errors}")

    def serve(self, connection: PeerConnection, command: PduFromHost) -> None:
        start = command.slba * self.block_size_bytes
        size = command.lba_count * self.block_size_bytes
        if command.opcode == 0x02:
            self._read(connection, command, bytes(self.memory[start : start + size]))
            return
        if command.opcode == 0x01:
            data = command.data or self._pull(connection, command, size)
            self.memory[start : start + size] = data
        elif command.opcode == 0x08:
            self._clear(start, size)
        elif command.opcode == 0x09:
            for at in range(0, len(command.data), 16):
                _, count, slba = struct.unpack_from("<IIQ", command.data, at)
                self._clear(slba * self.block_size_bytes, count * self.block_size_bytes)
        connection.send(connection.pack_response(command.cid), chunk_size=self.chunk_size)

    def _clear(self, start: int, size: int) -> None:
        """What lies beyond the memory stays unwritten: a quarter of a gigabyte of zeroes takes seconds."""
        size = max(0, min(size, len(self.memory) - start))
        self.memory[start : start + size] = bytes(size)

    def _read(self, connection: PeerConnection, command: PduFromHost, data: bytes) -> None:
        out = bytearray()
        for at in range(0, len(data), self.c2h_pdu_bytes):
            piece = data[at : at + self.c2h_pdu_bytes]
            is_last = at + len(piece) == len(data)
            out += connection.pack_c2h_data(
                command.cid, at, piece, is_last=is_last, is_success=is_last and self.is_success_used
            )
        if not self.is_success_used:
            out += connection.pack_response(command.cid)
        connection.send(bytes(out), chunk_size=self.chunk_size)

    def _pull(self, connection: PeerConnection, command: PduFromHost, size: int) -> bytes:
        pieces = [(at, min(self.r2t_bytes, size - at)) for at in range(0, size, self.r2t_bytes)]
        data = bytearray()
        asked = 0
        for index, (at, length) in enumerate(pieces):
            while asked < min(len(pieces), index + self.r2t_ahead):
                connection.send(connection.pack_r2t(command.cid, asked + 1, *pieces[asked]))
                asked += 1
            data += connection.receive_h2c_data(command, ttag=index + 1, r2to=at, r2tl=length)
        return bytes(data)
