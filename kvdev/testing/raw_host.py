"""A host that says what a test tells it to, one PDU at a time over a blocking socket, wrong PDUs included.

PDUs are packed here, not by the core under test. Not here: a host for real use (``kvdev.initiator``).
Spec: NVM Express TCP Transport 1.0, 3.6.2.
"""

from __future__ import annotations

import socket
import struct
import uuid as uuid_module
from dataclasses import dataclass, replace
from types import TracebackType

from kvdev.errors import KvdevError
from kvdev.native.crc import crc32c
from kvdev.wire.fabrics import Cc, ConnectCommand, ConnectData, Property, PropertyCommand
from kvdev.wire.nvme import CNTLID_DYNAMIC, SGL_IN_CAPSULE, SGL_TRANSPORT, Cqe, Sqe

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

WAIT_LIMIT_S = 10.0
"""No test waits longer for the target."""
TEST_HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:7c6e3b6e-43a1-4f6c-9d6c-000000000001"
TEST_HOST_ID = uuid_module.UUID("7c6e3b6e-43a1-4f6c-9d6c-000000000001")


class TargetClosedError(KvdevError):
    """The target ended the connection while the test expected bytes."""


@dataclass(frozen=True)
class PduFromTarget:
    """One PDU as received: header of HLEN bytes, data without padding and digests."""

    header: bytes
    data: bytes
    is_data_digest_right: bool = True

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
    def cqe(self) -> Cqe:
        return Cqe.parse(self.header[8:24])

    @property
    def cccid(self) -> int:
        return int(struct.unpack_from("<H", self.header, 8)[0])

    @property
    def ttag(self) -> int:
        return int(struct.unpack_from("<H", self.header, 10)[0])

    @property
    def offset_and_length(self) -> tuple[int, int]:
        """DATAO and DATAL, or R2TO and R2TL."""
        first, second = struct.unpack_from("<II", self.header, 12)
        return int(first), int(second)

    @property
    def fes_and_fei(self) -> tuple[int, int]:
        """Of a C2HTermReq; FEI is at the unaligned bytes 13:10."""
        fes, fei = struct.unpack_from("<HI", self.header, 8)
        return int(fes), int(fei)


@dataclass(frozen=True)
class Reply:
    """How one command ended: its completion, and the data that came for it."""

    cqe: Cqe
    data: bytes
    is_success_in_data: bool = False
    r2t_count: int = 0


def pad_to(header: bytes, alignment: int) -> bytes:
    """``header`` with zeroes up to a multiple of ``alignment``, which becomes its PDO."""
    size = -(-len(header) // alignment) * alignment
    return header.ljust(size, b"\0")


class RawHost:
    """One connection. ``hdgst`` and ``ddgst`` are what the IC exchange agreed, after ``exchange_ic``."""

    def __init__(self, address: str, port: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        sock = socket.create_connection((address, port), timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin(sock)

    @classmethod
    def over(cls, sock: socket.socket) -> RawHost:
        """A host on a socket that leads to the target in some other way."""
        host = cls.__new__(cls)
        host._begin(sock)
        return host

    def _begin(self, sock: socket.socket) -> None:
        self.socket = sock
        self.hdgst = False
        self.ddgst = False
        self.cpda = 0
        self.maxh2cdata = 0
        self.cntlid = CNTLID_DYNAMIC
        self.hostnqn = TEST_HOST_NQN
        self.hostid = TEST_HOST_ID.bytes

    def __enter__(self) -> RawHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # ---- bytes ----

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            piece = self.socket.recv(size - len(got))
            if not piece:
                raise TargetClosedError(f"target closed after {len(got)} of {size} bytes")
            got += piece
        return bytes(got)

    def wait_closed(self) -> bytes:
        """Read up to the target's end of the connection; a reset counts as one."""
        got = bytearray()
        try:
            while piece := self.socket.recv(65536):
                got += piece
        except ConnectionResetError:
            pass
        return bytes(got)

    # ---- PDUs ----

    def pdu(self, kind: int, psh: bytes, data: bytes = b"", *, flags: int = 0) -> bytes:
        """A right PDU with the agreed digests and the padding the target demands."""
        hlen = 8 + len(psh)
        has_hdgst = self.hdgst and kind not in (IC_REQ, H2C_TERM)
        has_ddgst = self.ddgst and bool(data)
        flags |= (FLAG_HDGST if has_hdgst else 0) | (FLAG_DDGST if has_ddgst else 0)
        size = hlen + (4 if has_hdgst else 0)
        pdo = 0
        if data:
            alignment = (self.cpda + 1) * 4
            pdo = -(-size // alignment) * alignment
        plen = (pdo + len(data) if data else size) + (4 if has_ddgst else 0)
        header = struct.pack("<BBBBI", kind, flags, hlen, pdo, plen) + psh
        if has_hdgst:
            header += struct.pack("<I", crc32c(header))
        if not data:
            return header
        out = header.ljust(pdo, b"\0") + data
        return out + (struct.pack("<I", crc32c(data)) if has_ddgst else b"")

    def capsule(self, sqe: Sqe, data: bytes = b"") -> bytes:
        return self.pdu(CAPSULE_CMD, sqe.build(), data)

    def h2c_data(self, *, cccid: int, ttag: int, datao: int, data: bytes, is_last: bool) -> bytes:
        psh = struct.pack("<HHII4x", cccid, ttag, datao, len(data))
        return self.pdu(H2C_DATA, psh, data, flags=FLAG_LAST if is_last else 0)

    def read_pdu(self) -> PduFromTarget:
        common = self.read(8)
        kind, flags, hlen, pdo, plen = struct.unpack("<BBBBI", common)
        body = self.read(plen - 8)
        header = common + body[: hlen - 8]
        if flags & FLAG_HDGST and kind != C2H_TERM:
            digest = struct.unpack_from("<I", body, hlen - 8)[0]
            assert digest == crc32c(header), "header digest of the target"
        data, right = b"", True
        if kind == C2H_DATA:
            end = plen - 8 - (4 if flags & FLAG_DDGST else 0)
            data = body[pdo - 8 : end]
            if flags & FLAG_DDGST:
                right = struct.unpack_from("<I", body, end)[0] == crc32c(data)
        elif kind == C2H_TERM:
            data = body[hlen - 8 :]
        return PduFromTarget(header, data, right)

    def expect_term(self) -> PduFromTarget:
        """The C2HTermReq after which the target closes; responses on the way before it are skipped."""
        while True:
            pdu = self.read_pdu()
            if pdu.type == C2H_TERM:
                break
        assert self.wait_closed() == b""
        return pdu

    # ---- the usual ways ----

    @staticmethod
    def ic_req(*, hpda: int = 0, dgst: int = 0, maxr2t: int = 0, pfv: int = 0) -> bytes:
        return struct.pack("<BBBBIHBBI112x", IC_REQ, 0, 128, 0, 128, pfv, hpda, dgst, maxr2t)

    def exchange_ic(self, *, hdgst: bool = False, ddgst: bool = False, hpda: int = 0) -> None:
        self.send(self.ic_req(hpda=hpda, dgst=int(hdgst) | int(ddgst) << 1))
        answer = self.read(128)
        kind, _, hlen, _, plen, pfv, self.cpda, dgst, self.maxh2cdata = struct.unpack_from(
            "<BBBBIHBBI", answer
        )
        assert (kind, hlen, plen, pfv) == (IC_RESP, 128, 128, 0)
        self.hdgst, self.ddgst = bool(dgst & 1), bool(dgst & 2)

    def execute(
        self, sqe: Sqe, data: bytes = b"", *, in_capsule: bool = True, read_size_bytes: int = 0
    ) -> Reply:
        """Send one command, serve its R2Ts, return its end. Nothing else may be outstanding."""
        if data:
            sqe = replace(
                sqe,
                sgl_len=sqe.sgl_len or len(data),
                sgl_type=SGL_IN_CAPSULE if in_capsule else SGL_TRANSPORT,
            )
        elif read_size_bytes:
            sqe = replace(sqe, sgl_len=read_size_bytes)
        self.send(self.capsule(sqe, data if in_capsule else b""))
        return self.finish(sqe.cid, data)

    def finish(self, cid: int, data: bytes = b"") -> Reply:
        """Wait for the end of command ``cid``; sends ``data`` where R2Ts ask for it."""
        got = bytearray()
        r2t_count = 0
        while True:
            pdu = self.read_pdu()
            if pdu.type == R2T:
                assert pdu.cccid == cid
                r2t_count += 1
                self.answer_r2t(pdu, data)
            elif pdu.type == C2H_DATA:
                assert pdu.cccid == cid and pdu.offset_and_length == (len(got), len(pdu.data))
                assert pdu.is_data_digest_right
                got += pdu.data
                if pdu.flags & FLAG_SUCCESS:
                    return Reply(Cqe.of(cid=cid), bytes(got), True, r2t_count)
            elif pdu.type == CAPSULE_RESP:
                assert pdu.cqe.cid == cid
                return Reply(pdu.cqe, bytes(got), False, r2t_count)
            else:
                raise AssertionError(f"unexpected PDU type {pdu.type:#x}: {pdu.header.hex()}")

    def answer_r2t(self, r2t: PduFromTarget, data: bytes) -> None:
        """All that one R2T asks for, in PDUs of at most MAXH2CDATA."""
        offset, length = r2t.offset_and_length
        end = offset + length
        while offset < end:
            size = min(self.maxh2cdata, end - offset)
            self.send(
                self.h2c_data(
                    cccid=r2t.cccid,
                    ttag=r2t.ttag,
                    datao=offset,
                    data=data[offset : offset + size],
                    is_last=offset + size == end,
                )
            )
            offset += size

    def connect_data(self, subnqn: str, *, cntlid: int = CNTLID_DYNAMIC) -> bytes:
        return ConnectData(hostid=self.hostid, cntlid=cntlid, subnqn=subnqn, hostnqn=self.hostnqn).build()

    def connect(
        self,
        subnqn: str,
        *,
        qid: int = 0,
        cntlid: int = CNTLID_DYNAMIC,
        sqsize_0based: int = 31,
        kato_ms: int = 30_000,
        cattr: int = 0,
    ) -> Reply:
        command = ConnectCommand(
            qid=qid, sqsize_0based=sqsize_0based, kato_ms=0 if qid else kato_ms, cattr=cattr
        )
        reply = self.execute(command.to_sqe(), self.connect_data(subnqn, cntlid=cntlid))
        if reply.cqe.is_success:
            self.cntlid = reply.cqe.dw0 & 0xFFFF
        return reply

    def property_get(self, offset: int, size_bytes: int) -> Reply:
        return self.execute(PropertyCommand(offset, size_bytes, is_set=False).to_sqe())

    def property_set(self, offset: int, value: int) -> Reply:
        return self.execute(PropertyCommand(offset, 4, is_set=True, value=value).to_sqe())

    def enable(self) -> None:
        assert self.property_set(Property.CC, Cc(en=1, iosqes=6, iocqes=4).build()).cqe.is_success
        assert self.property_get(Property.CSTS, 4).cqe.dw0 & 1


def connected_admin(address: str, port: int, subnqn: str, *, kato_ms: int = 30_000) -> RawHost:
    """An Admin queue of an enabled controller."""
    host = RawHost(address, port)
    host.exchange_ic()
    reply = host.connect(subnqn, kato_ms=kato_ms)
    assert reply.cqe.is_success, reply
    host.enable()
    return host


def connected_io(
    admin: RawHost,
    subnqn: str,
    *,
    qid: int = 1,
    sqsize_0based: int = 31,
    hdgst: bool = False,
    ddgst: bool = False,
    hpda: int = 0,
    cattr: int = 0,
) -> RawHost:
    """An I/O queue of the controller that ``admin`` belongs to."""
    host = RawHost(*admin.socket.getpeername()[:2])
    host.hostnqn, host.hostid = admin.hostnqn, admin.hostid
    host.exchange_ic(hdgst=hdgst, ddgst=ddgst, hpda=hpda)
    reply = host.connect(subnqn, qid=qid, cntlid=admin.cntlid, sqsize_0based=sqsize_0based, cattr=cattr)
    assert reply.cqe.is_success, reply
    return host
