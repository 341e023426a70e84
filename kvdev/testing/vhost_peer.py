"""A scripted vhost-user-blk back end: does what it is told, right or wrong, on a disk in memory.

It shares no code with the front end but the names of messages, so that one's mistakes show in the other.
Run as a module it is a process of its own, to be stopped and killed:
``python -m kvdev.testing.vhost_peer SOCKET --size BYTES [--inflight] [--silent]``.
Threads: one of its own; it ends with ``close``.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvdev.vhost.protocol import BlkConfig, Feature, ProtocolFeature, Request

SECTOR = 512
STEP_S = 0.02
"""How often the thread looks whether it shall end."""

FEATURES_ALL = (
    Feature.SEG_MAX
    | Feature.BLK_SIZE
    | Feature.FLUSH
    | Feature.MQ
    | Feature.DISCARD
    | Feature.WRITE_ZEROES
    | Feature.INDIRECT_DESC
    | Feature.EVENT_IDX
    | Feature.PROTOCOL_FEATURES
    | Feature.VERSION_1
)
PROTOCOL_ALL = (
    ProtocolFeature.MQ
    | ProtocolFeature.REPLY_ACK
    | ProtocolFeature.BACKEND_REQ
    | ProtocolFeature.CONFIG
    | ProtocolFeature.RESET_DEVICE
)


def config_of(size_bytes: int, *, block_size_bytes: int = SECTOR, queue_count: int = 4) -> BlkConfig:
    """A plain configuration of a disk of this size."""
    return BlkConfig(
        capacity_sectors=size_bytes // SECTOR,
        size_max=0,
        seg_max=126,
        blk_size=block_size_bytes,
        min_io_size_blocks=1,
        opt_io_size_blocks=1,
        queue_count=queue_count,
        max_discard_sectors=32768,
        max_discard_seg=4,
        discard_sector_alignment=1,
        max_write_zeroes_sectors=32768,
        max_write_zeroes_seg=1,
        write_zeroes_may_unmap=True,
    )


@dataclass
class BlkRequest:
    """One request as it was found in the ring."""

    queue_index: int
    head: int
    kind: int
    sector: int
    data: list[memoryview]
    """Payload descriptors, writable ones of a read."""
    status: memoryview
    is_indirect: bool
    desc_count: int

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.data)


@dataclass
class VhostScript:
    """What the back end offers and how it misbehaves."""

    disk: bytearray
    features: int = FEATURES_ALL
    protocol_features: int = PROTOCOL_ALL
    config: BlkConfig | None = None
    queue_count: int = 4
    nack: frozenset[int] = frozenset()
    """Requests whose acknowledgement is 1."""
    hang_up_at: tuple[int, int] | None = None
    """(request, n): close the connection instead of serving its n-th occurrence (0 is the first)."""
    mute_at: int | None = None
    """A request that is never answered."""
    replies: dict[int, bytes] = field(default_factory=dict)
    """Whole messages sent in place of the reply to a request."""
    is_silent: bool = False
    """Takes requests from the rings and never completes one."""
    fail_sectors: frozenset[int] = frozenset()
    """Requests that start there end with an I/O error."""
    tamper: Callable[[Vring, BlkRequest, int], None] | None = None
    """Called instead of completing a request, with the length that would be right."""
    has_inflight: bool = False

    def __post_init__(self) -> None:
        if self.config is None:
            self.config = config_of(len(self.disk))
        if self.has_inflight:
            self.protocol_features |= ProtocolFeature.INFLIGHT_SHMFD


class Vring:
    """The back end's side of one split virtqueue."""

    def __init__(self, backend: VhostConnection, index: int) -> None:
        self.backend = backend
        self.index = index
        self.size = 0
        self.desc_addr = self.avail_addr = self.used_addr = 0
        self.last_avail = 0
        self.used_idx = 0
        self.kick_fd = -1
        self.call_fd = -1
        self.is_enabled = False
        self.calls = 0

    @property
    def is_running(self) -> bool:
        return self.is_enabled and self.kick_fd >= 0 and self.desc_addr != 0

    def _mem(self, address: int, size_bytes: int) -> memoryview:
        return self.backend.translate(address, size_bytes)

    def u16(self, address: int) -> int:
        return int(struct.unpack("<H", self._mem(address, 2))[0])

    def put_u16(self, address: int, value: int) -> None:
        self._mem(address, 2)[:] = struct.pack("<H", value & 0xFFFF)

    def heads(self) -> Iterator[int]:
        """Heads that the driver made available since the last time."""
        while self.last_avail != self.u16(self.avail_addr + 2):
            head = self.u16(self.avail_addr + 4 + 2 * (self.last_avail % self.size))
            self.last_avail = (self.last_avail + 1) & 0xFFFF
            yield head

    def ask_for_kicks(self) -> None:
        """Event index: tell of the next entry."""
        self.put_u16(self.used_addr + 4 + 8 * self.size, self.last_avail)

    def parse(self, head: int) -> BlkRequest:
        table, index, limit = self.desc_addr, head, self.size
        is_indirect = False
        chain: list[tuple[memoryview, int]] = []
        while True:
            address, size_bytes, flags, following = struct.unpack("<QIHH", self._mem(table + 16 * index, 16))
            if flags & 4:
                assert not is_indirect and size_bytes % 16 == 0, "indirect tables do not nest"
                is_indirect, table, index, limit = True, address, 0, size_bytes // 16
                continue
            chain.append((self._mem(address, size_bytes), flags))
            assert len(chain) <= limit, "a chain that does not end"
            if not flags & 1:
                break
            index = following
        header, status = chain[0][0], chain[-1][0]
        assert len(header) == 16 and len(status) == 1 and chain[-1][1] & 2
        kind, _, sector = struct.unpack("<IIQ", header)
        for _, flags in chain[1:-1]:
            assert bool(flags & 2) == (kind == 0), "only a read's payload is writable"
        data = [piece for piece, _ in chain[1:-1]]
        return BlkRequest(self.index, head, kind, sector, data, status, is_indirect, len(chain))

    def put_used(self, head: int, size_bytes: int) -> None:
        """One used element; ``publish`` makes it visible."""
        place = self.used_addr + 4 + 8 * (self.used_idx % self.size)
        self._mem(place, 8)[:] = struct.pack("<II", head & 0xFFFFFFFF, size_bytes & 0xFFFFFFFF)
        self.used_idx = (self.used_idx + 1) & 0xFFFF

    def publish(self, idx: int | None = None) -> None:
        """Show the used index (or another one), and notify if the driver wants that."""
        before = self.u16(self.used_addr + 2)
        after = self.used_idx if idx is None else idx
        self.put_u16(self.used_addr + 2, after)
        if self.backend.features & Feature.EVENT_IDX:
            event = self.u16(self.avail_addr + 4 + 2 * self.size)
            is_wanted = (after - event - 1) & 0xFFFF < (after - before) & 0xFFFF
        else:
            is_wanted = not self.u16(self.avail_addr) & 1
        if is_wanted and self.call_fd >= 0:
            self.calls += 1
            os.eventfd_write(self.call_fd, 1)


class VhostConnection:
    """One front end being served."""

    def __init__(self, sock: socket.socket, script: VhostScript, requests: list[BlkRequest]) -> None:
        self.sock = sock
        self.script = script
        self.requests = requests
        self.features = 0
        self.protocol_features = 0
        self.regions: list[tuple[int, int, mmap.mmap, int]] = []
        self.rings: dict[int, Vring] = {}
        self.inflight: mmap.mmap | None = None
        self.channel: socket.socket | None = None
        self.messages: list[int] = []
        self.outstanding: list[tuple[Vring, BlkRequest]] = []

    def translate(self, address: int, size_bytes: int) -> memoryview:
        for start, size, mapped, offset in self.regions:
            if start <= address and address + size_bytes <= start + size:
                return memoryview(mapped)[offset + address - start :][:size_bytes]
        raise ValueError(f"address 0x{address:x} + {size_bytes} lies in no shared region")

    # ---- messages ----

    def serve_message(self) -> bool:
        """One message from the front end; False when it is gone."""
        fds = array.array("i")
        head, ancillary, _, _ = self.sock.recvmsg(12, socket.CMSG_SPACE(4 * 16))
        for _, _, data in ancillary:
            fds.frombytes(data)
        while head and len(head) < 12:
            head += self.sock.recv(12 - len(head))
        if not head:
            return False
        request, flags, size = struct.unpack("<III", head)
        assert flags & 3 == 1, "version 1"
        payload = b""
        while len(payload) < size:
            payload += self.sock.recv(size - len(payload))
        occurrence = self.messages.count(request)
        self.messages.append(request)
        if self.script.hang_up_at == (request, occurrence):
            for fd in fds:
                os.close(fd)
            return False
        reply = self._handle(request, payload, list(fds))
        if request == self.script.mute_at:
            return True
        if request in self.script.replies:
            self.sock.sendall(self.script.replies[request])
        elif reply is not None:
            body, out = reply
            ancillary_out = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", out))] if out else []
            self.sock.sendmsg([struct.pack("<III", request, 5, len(body)) + body], ancillary_out)
            for fd in out:
                os.close(fd)
        elif flags & 8:
            assert self.protocol_features & ProtocolFeature.REPLY_ACK, "acknowledgements were not agreed on"
            code = int(request in self.script.nack)
            self.sock.sendall(struct.pack("<IIIQ", request, 5, 8, code))
        return True

    def _handle(self, request: int, payload: bytes, fds: list[int]) -> tuple[bytes, list[int]] | None:
        """Acts on a message; its reply, None when it has none."""
        script = self.script
        u64 = int.from_bytes(payload[:8], "little")
        if request == Request.GET_FEATURES:
            return struct.pack("<Q", script.features), []
        if request == Request.SET_FEATURES:
            assert u64 & ~script.features == 0, f"features 0x{u64:x} were not offered"
            self.features = u64
        elif request == Request.GET_PROTOCOL_FEATURES:
            return struct.pack("<Q", script.protocol_features), []
        elif request == Request.SET_PROTOCOL_FEATURES:
            assert u64 & ~script.protocol_features == 0
            self.protocol_features = u64
        elif request == Request.GET_QUEUE_NUM:
            assert self.protocol_features & ProtocolFeature.MQ
            return struct.pack("<Q", script.queue_count), []
        elif request == Request.GET_CONFIG:
            assert self.protocol_features & ProtocolFeature.CONFIG and script.config is not None
            return payload[:12] + script.config.build(), []
        elif request == Request.SET_BACKEND_REQ_FD:
            self.channel = socket.socket(fileno=fds.pop())
        elif request == Request.SET_MEM_TABLE:
            self._set_memory(payload, fds)
        elif request in (Request.GET_INFLIGHT_FD, Request.SET_INFLIGHT_FD):
            return self._inflight(request, payload, fds)
        elif request in _RING_REQUESTS:
            return self._ring_message(request, payload, fds)
        for fd in fds:
            os.close(fd)
        return None

    def _set_memory(self, payload: bytes, fds: list[int]) -> None:
        count, _ = struct.unpack_from("<II", payload)
        assert count == len(fds), "one descriptor per region"
        self.regions.clear()
        for index in range(count):
            address, size, user, offset = struct.unpack_from("<QQQQ", payload, 8 + 32 * index)
            assert address == user
            mapped = mmap.mmap(fds[index], offset + size, mmap.MAP_SHARED)
            self.regions.append((address, size, mapped, offset))

    def _inflight(self, request: int, payload: bytes, fds: list[int]) -> tuple[bytes, list[int]] | None:
        size, offset, queue_count, queue_size = struct.unpack("<QQHH4x", payload)
        if request == Request.GET_INFLIGHT_FD:
            fd = os.memfd_create("inflight")
            size = -(-queue_count * queue_size // 4096) * 4096
            os.ftruncate(fd, size)
            return struct.pack("<QQHH4x", size, 0, queue_count, queue_size), [fd]
        self.inflight = mmap.mmap(fds[0], offset + size, mmap.MAP_SHARED)
        os.close(fds.pop())
        return None

    def _ring_message(self, request: int, payload: bytes, fds: list[int]) -> tuple[bytes, list[int]] | None:
        index, value = struct.unpack_from("<II", payload)
        if request in (Request.SET_VRING_KICK, Request.SET_VRING_CALL):
            index &= 0xFF
        ring = self.rings.setdefault(index, Vring(self, index))
        if request == Request.SET_VRING_NUM:
            ring.size = value
        elif request == Request.SET_VRING_BASE:
            ring.last_avail = value
        elif request == Request.SET_VRING_ADDR:
            _, _, ring.desc_addr, ring.used_addr, ring.avail_addr, _ = struct.unpack("<IIQQQQ", payload)
            ring.used_idx = ring.u16(ring.used_addr + 2)
        elif request == Request.SET_VRING_CALL:
            ring.call_fd = fds.pop()
        elif request == Request.SET_VRING_KICK:
            ring.kick_fd = fds.pop()
            self._resubmit(ring)
        elif request == Request.SET_VRING_ENABLE:
            ring.is_enabled = bool(value)
            if ring.is_running:
                self.serve_ring(ring)
        elif request == Request.GET_VRING_BASE:
            ring.is_enabled = False
            return struct.pack("<II", index, ring.last_avail), []
        return None

    def _resubmit(self, ring: Vring) -> None:
        """Carry out what an earlier back end had taken and not finished."""
        if self.inflight is None:
            return
        heads = [head for head in range(ring.size) if self.inflight[ring.index * ring.size + head]]
        ring.last_avail = (ring.used_idx + len(heads)) & 0xFFFF
        for head in heads:
            self._serve_head(ring, head)

    # ---- requests ----

    def serve_ring(self, ring: Vring) -> None:
        while True:
            for head in ring.heads():
                self._serve_head(ring, head)
            ring.ask_for_kicks()
            if ring.last_avail == ring.u16(ring.avail_addr + 2):
                return

    def _serve_head(self, ring: Vring, head: int) -> None:
        if self.inflight is not None:
            self.inflight[ring.index * ring.size + head] = 1
        request = ring.parse(head)
        self.requests.append(request)
        if self.script.is_silent:
            self.outstanding.append((ring, request))
            return
        self.complete(ring, request)

    def complete(self, ring: Vring, request: BlkRequest) -> None:
        """Carry out a request and put it into the used ring."""
        written = self.execute(request)
        if self.script.tamper is not None:
            self.script.tamper(ring, request, written)
            return
        ring.put_used(request.head, written)
        if self.inflight is not None:
            self.inflight[ring.index * ring.size + request.head] = 0
        ring.publish()

    def execute(self, request: BlkRequest) -> int:
        """Bytes written to the request's buffers."""
        disk, start = self.script.disk, request.sector * SECTOR
        size = request.size_bytes
        status, written = 0, 1
        if request.sector in self.script.fail_sectors or (
            request.kind in (0, 1) and start + size > len(disk)
        ):
            status = 1
        elif request.kind == 0:
            for piece in request.data:
                piece[:] = disk[start : start + len(piece)]
                start += len(piece)
            written += size
        elif request.kind == 1:
            for piece in request.data:
                disk[start : start + len(piece)] = piece
                start += len(piece)
        elif request.kind in (11, 13):
            for sector, count, _ in struct.iter_unpack("<QII", b"".join(request.data)):
                disk[sector * SECTOR : (sector + count) * SECTOR] = bytes(count * SECTOR)
        elif request.kind != 4:
            status = 2
        request.status[0] = status
        return written

    def tell_config_change(self, *, needs_reply: bool) -> None:
        """CONFIG_CHANGE_MSG on the back end's own channel."""
        assert self.channel is not None
        self.channel.sendall(struct.pack("<III", 2, 1 | (8 if needs_reply else 0), 0))

    def close(self) -> None:
        self.sock.close()
        self.regions.clear()
        if self.channel is not None:
            self.channel.close()
        for ring in self.rings.values():
            for fd in (ring.kick_fd, ring.call_fd):
                if fd >= 0:
                    os.close(fd)
            ring.kick_fd = ring.call_fd = -1


_RING_REQUESTS = frozenset(
    {
        Request.SET_VRING_NUM,
        Request.SET_VRING_ADDR,
        Request.SET_VRING_BASE,
        Request.GET_VRING_BASE,
        Request.SET_VRING_KICK,
        Request.SET_VRING_CALL,
        Request.SET_VRING_ENABLE,
    }
)


class VhostPeer:
    """The back end on a socket, in a thread: one front end at a time, the next when it has gone."""

    def __init__(self, path: str | os.PathLike[str], script: VhostScript) -> None:
        self.path = os.fspath(path)
        self.script = script
        self.requests: list[BlkRequest] = []
        """Every request taken, over all connections."""
        self.connection: VhostConnection | None = None
        self.connection_count = 0
        self.errors: list[BaseException] = []
        self._orders: list[tuple[Callable[[VhostConnection], None], threading.Event]] = []
        self._is_stopping = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, name="vhost peer", daemon=True)
        self._thread.start()

    def do(self, order: Callable[[VhostConnection], None], timeout_s: float = 5.0) -> None:
        """Run ``order`` in the back end's thread and wait for it."""
        done = threading.Event()
        self._orders.append((order, done))
        assert done.wait(timeout_s), "the back end did not get to it"

    def hang_up(self) -> None:
        """Close the present connection."""
        self.do(lambda connection: connection.sock.shutdown(socket.SHUT_RDWR))

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            if not select.select([self._listener], [], [], STEP_S)[0]:
                continue
            sock, _ = self._listener.accept()
            connection = VhostConnection(sock, self.script, self.requests)
            self.connection = connection
            self.connection_count += 1
            try:
                self._serve(connection)
            except OSError:
                pass
            except Exception as error:  # a test looks at it
                self.errors.append(error)
            finally:
                connection.close()

    def _serve(self, connection: VhostConnection) -> None:
        while not self._is_stopping.is_set():
            while self._orders:
                order, done = self._orders.pop(0)
                order(connection)
                done.set()
            kicks = {ring.kick_fd: ring for ring in connection.rings.values() if ring.is_running}
            ready, _, _ = select.select([connection.sock.fileno(), *kicks], [], [], STEP_S)
            for fd in ready:
                if fd == connection.sock.fileno():
                    if not connection.serve_message():
                        return
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    connection.serve_ring(kicks[fd])

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.join(5)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def __enter__(self) -> VhostPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="a vhost-user-blk back end for tests")
    parser.add_argument("socket")
    parser.add_argument("--size", type=int, required=True, help="bytes of the disk, which is in memory")
    parser.add_argument("--file", help="keep the disk here between runs")
    parser.add_argument("--inflight", action="store_true")
    parser.add_argument("--silent", action="store_true")
    options = parser.parse_args()
    disk: bytearray | mmap.mmap = bytearray(options.size)
    if options.file:
        file = Path(options.file)
        if not file.exists():
            file.write_bytes(bytes(options.size))
        with file.open("r+b") as handle:
            disk = mmap.mmap(handle.fileno(), options.size)
    script = VhostScript(
        disk,  # type: ignore[arg-type]
        has_inflight=options.inflight,
        is_silent=options.silent,
    )
    peer = VhostPeer(options.socket, script)
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    peer.close()


if __name__ == "__main__":
    main()
