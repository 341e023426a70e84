"""A vhost-user-blk device: connect, share memory, survive the back end's restart, close.

Not here: rings and commands (the C core); messages (``connection``, ``protocol``).
Threads: driven by the thread that drives its queue; the methods block no longer than their deadline.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence

import numpy as np

from kvdev.block.device import BlockDevice, DeviceIdentity, execute, flush
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    UnsupportedError,
    UsageError,
)
from kvdev.native.io import IO_DEALLOCATE, IO_DTYPE, OPCODE_DSM, OPCODE_WRITE_ZEROES, IoArray
from kvdev.native.queue import HostQueue
from kvdev.native.vhost import (
    REGION_COUNT_MAX,
    RingFault,
    RingParams,
    RingStats,
    VhostRings,
    control_size_bytes,
)
from kvdev.uri import VhostUri
from kvdev.vhost.channel import BackendChannel
from kvdev.vhost.connection import SECTOR_BYTES, Agreement, Connection, InflightBuffer
from kvdev.vhost.memory import SharedMemory, allocate_control
from kvdev.vhost.options import VhostOptions
from kvdev.vhost.protocol import BackendRequest
from kvdev.vhost.quarantine import Quarantine

log = logging.getLogger("kvdev.vhost")

SHARED_COUNT_MAX = REGION_COUNT_MAX - 1
"""Pieces of shared memory; a memory table has 8 entries everywhere, and one is for the rings."""
STOP_TIMEOUT_S = 2.0
"""For an orderly end; a back end that does not answer is left."""
RESUME_TIMEOUT_S = 1.0
"""For the handshake with a restarted back end while commands wait: it happens inside a poll."""
RESUME_PAUSE_NS = 50_000_000
RECONNECT_PAUSE_S = 0.05
LBA_COUNT_MAX = 65536
"""Blocks of one write zeroes command in the queue's form."""


class VhostDevice(BlockDevice):
    """A block device of another process, reached through shared memory.

    Payload must lie in memory that was shared (``share``), or be marked as metadata. When the connection
    ends, commands in flight complete with −ENOTCONN, their writes uncertain, and the payload memory stays in
    ``quarantines`` until the back end's process is dead; ``reconnect`` then makes the device usable again.
    Where both sides keep a buffer of the commands in flight, these wait for the restarted back end instead.
    """

    queue: HostQueue

    def __init__(
        self,
        path: str,
        queue: HostQueue,
        *,
        memory: Sequence[SharedMemory] = (),
        options: VhostOptions | None = None,
        deadline: Deadline,
    ) -> None:
        """Connect to the socket at ``path`` and become a device of ``queue``.

        Raises ConnectError, UnsupportedError (naming the feature), ProtocolError or DeadlineError.
        """
        self.path = path
        self.uri = str(VhostUri(path))
        self.options = options or VhostOptions()
        self.queue = queue
        self.identity = DeviceIdentity()
        self.atomic_write_blocks = 1
        self._memory = list(memory)
        self._check_memory()
        self._quarantines: list[Quarantine] = []
        self._is_closed = False
        self._is_death_known = False
        self._next_resume_ns = 0
        self._pause = threading.Event()
        self._inflight: InflightBuffer | None = None
        self._connection, self._control, self._rings = self._connect(deadline)
        self._take_shape(self._rings.params)
        try:
            self.device_index = self._rings.attach(queue)
        except BaseException:
            self._connection.close()
            raise
        queue.attend(self.device_index, self._attend)

    # ---- making the connection ----

    def _connect(self, deadline: Deadline) -> tuple[Connection, SharedMemory, VhostRings]:
        """A new connection with new rings: an old back end may still write into the old ones."""
        connection = Connection.open(self.path, self.options, where=self.uri, deadline=deadline)
        try:
            params = connection.ring_params()
            control = allocate_control(control_size_bytes(params))
            rings = VhostRings(params, address=control.address, size_bytes=control.size_bytes)
            self._inflight = connection.fetch_inflight(deadline)
            for piece in self._memory:
                rings.add_region(piece.address, piece.size_bytes)
            self._give(connection, control, rings, deadline)
        except BaseException:
            connection.close()
            raise
        return connection, control, rings

    def _give(
        self, connection: Connection, control: SharedMemory, rings: VhostRings, deadline: Deadline
    ) -> None:
        connection.give(
            rings,
            [control, *self._memory],
            self._inflight,
            is_held_on_loss=self._inflight is not None and connection.process.is_known,
            deadline=deadline,
        )

    def _take_shape(self, params: RingParams) -> None:
        self.block_size_bytes = params.block_size_bytes
        self.block_count = params.block_count
        self.max_transfer_bytes = params.max_transfer_bytes
        self.has_volatile_cache = params.has_flush
        self.is_read_only = params.is_read_only

    # ---- shared memory ----

    def _check_memory(self) -> None:
        if len(self._memory) > SHARED_COUNT_MAX:
            raise UsageError(
                f"{self.uri}: shared memory: expected at most {SHARED_COUNT_MAX} pieces, got {len(self._memory)}; "
                f"use one larger arena"
            )
        for index, piece in enumerate(self._memory):
            for other in self._memory[:index]:
                if piece.overlaps(other.address, other.size_bytes):
                    raise UsageError(
                        f"{self.uri}: shared memory: expected pieces apart, got {piece.name} over {other.name}"
                    )

    def share(self, memory: SharedMemory, *, deadline: Deadline) -> None:
        """Let payload lie in ``memory`` from now on; nothing may be outstanding on the device."""
        self._check_open()
        if any(memory is piece for piece in self._memory):
            return
        with self.queue.lock:
            in_flight = self._rings.stats.in_flight_count
            if in_flight:
                raise UsageError(f"{self.uri}: share: expected nothing outstanding, got {in_flight} commands")
            self._memory.append(memory)
            try:
                self._check_memory()
                if self.state == "ready":
                    self._connection.set_memory([self._control, *self._memory], deadline)
                self._rings.add_region(memory.address, memory.size_bytes)
            except BaseException:
                self._memory.remove(memory)
                raise

    # ---- state ----

    @property
    def state(self) -> str:
        """``ready``; ``held``: commands wait for the back end's restart; ``dead``: see ``fault``; ``closed``."""
        return "closed" if self._is_closed else self._rings.state

    @property
    def fault(self) -> RingFault | None:
        """Why the device is dead."""
        return self._rings.fault

    @property
    def stats(self) -> RingStats:
        return self._rings.stats

    @property
    def agreement(self) -> Agreement:
        """What was negotiated with the present back end."""
        return self._connection.agreement

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Payload memory that back ends of earlier connections may still touch; empty once they are dead."""
        self._quarantines = [item for item in self._quarantines if not item.is_over]
        return tuple(self._quarantines)

    def wait_quarantine(self, deadline: Deadline) -> None:
        """Return when no dead connection's back end can touch payload any more; DeadlineError names those that
        can. The remedies: end that process, or go on with another arena."""
        for item in self.quarantines:
            if not item.wait(deadline):
                raise DeadlineError(
                    f"{self.uri}: quarantine: {item.process} still runs and may write to {item.size_bytes} bytes "
                    f"of payload; end it, or use another arena",
                    operation="quarantine",
                    elapsed_ms=deadline.elapsed_ms(),
                    trid=self.uri,
                )

    def _attend(self) -> None:
        """Called by the queue's poll when something happened to the device."""
        stats = self._rings.stats
        if stats.state == "dead":
            self._note_death()
        elif stats.state == "held":
            self._try_resume()
        elif stats.has_backend_message:
            self._rings.clear_attention()
            self._read_backend_messages()

    def _note_death(self) -> None:
        """Before the caller learns of it by completions: put the payload in quarantine."""
        self._rings.clear_attention()
        if self._is_death_known:
            return
        self._is_death_known = True
        fault = self._rings.fault
        log.warning("%s: device dead: %s", self.uri, fault.text if fault else "unknown")
        spans = tuple(self._rings.spans())
        if not spans:
            return
        quarantine = Quarantine(self._connection.process, spans)
        self._quarantines.append(quarantine)
        for address, size_bytes in spans:
            for piece in self._memory:
                if piece.hold is not None and piece.overlaps(address, size_bytes):
                    piece.hold(address, size_bytes, lambda: quarantine.is_over)

    # ---- changes that the back end tells of ----

    def _read_backend_messages(self) -> None:
        channel = self._connection.backend_channel
        assert channel is not None, "only its readiness brings us here"
        try:
            self._handle_messages(channel)
        except KvdevError as error:
            self._rings.kill(errno.ENOTCONN, f"back end channel: {error}"[:150])

    def _handle_messages(self, channel: BackendChannel) -> None:
        for head in channel.take():
            is_known = head.request == BackendRequest.CONFIG_CHANGE_MSG
            if is_known:
                self.refresh(Deadline.after(RESUME_TIMEOUT_S))
            if head.needs_reply:
                channel.acknowledge(head, 0 if is_known else 1)

    def refresh(self, deadline: Deadline) -> None:
        """Read the configuration again: the capacity may have changed. Other values stay as agreed on."""
        self._check_open()
        config = self._connection.read_config(deadline)
        block_count = config.capacity_sectors * SECTOR_BYTES // self.block_size_bytes
        if block_count != self.block_count:
            log.warning("%s: capacity: was %d blocks, is %d", self.uri, self.block_count, block_count)
            self._rings.set_block_count(block_count)
            self.block_count = block_count

    # ---- after the back end is gone ----

    def _try_resume(self) -> None:
        """Give the rings, commands in flight and all, to a restarted back end; later if there is none yet."""
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        if now_ns < self._next_resume_ns:
            return
        self._next_resume_ns = now_ns + RESUME_PAUSE_NS
        # The old process could carry out its commands a second time, after the new one has.
        if not self._connection.process.is_dead:
            return
        deadline = Deadline.after(RESUME_TIMEOUT_S)
        try:
            connection = Connection.open(self.path, self.options, where=self.uri, deadline=deadline)
        except (ConnectError, ConnectionLostError, DeadlineError):
            return
        except KvdevError as error:
            self._rings.kill(errno.ENOTCONN, str(error)[:150])
            return
        try:
            self._check_same(connection)
            self._give(connection, self._control, self._rings, deadline)
        except KvdevError as error:
            connection.close()
            if self._rings.state == "held" and not isinstance(error, ConnectionLostError | DeadlineError):
                self._rings.kill(errno.ENOTCONN, str(error)[:150])
            return
        self._connection.close()
        self._connection = connection
        self._rings.clear_attention()
        log.warning("%s: resumed with %s", self.uri, connection.process)

    def _check_same(self, connection: Connection) -> None:
        """Rings that are in use fit only a back end that agrees on the same."""
        ours, theirs = self._rings.params, connection.ring_params()
        for field in RingParams.__dataclass_fields__:
            expected, actual = getattr(ours, field), getattr(theirs, field)
            if field != "block_count" and expected != actual:
                raise UnsupportedError(
                    f"{self.uri}: {field}: expected {expected} as before the restart, got {actual}",
                    feature=field,
                )
        if theirs.block_count < self.block_count:
            raise UnsupportedError(
                f"{self.uri}: capacity: expected {self.block_count} blocks as before the restart, "
                f"got {theirs.block_count}",
                feature="capacity",
            )

    def reconnect(self, deadline: Deadline) -> None:
        """Connect a dead device again, trying until the deadline; its ``device_index`` stays.

        Memory in quarantine stays there. Raises the last ConnectError when there is no back end in time, and
        UnsupportedError when the one there has other blocks.
        """
        self._check_open()
        with self.queue.lock:
            if self._rings.state == "held":
                self._rings.kill(errno.ENOTCONN, "reconnected without the commands in flight")
            if self._rings.state == "ready":
                return
            self._note_death()
            while True:
                try:
                    connection, control, rings = self._connect(deadline)
                    break
                except (ConnectError, ConnectionLostError):
                    if deadline.remaining_s() < RECONNECT_PAUSE_S:
                        raise
                    self._pause.wait(RECONNECT_PAUSE_S)
            try:
                if rings.params.block_size_bytes != self.block_size_bytes:
                    raise UnsupportedError(
                        f"{self.uri}: blk_size: expected {self.block_size_bytes} as before, "
                        f"got {rings.params.block_size_bytes}",
                        feature="blk_size",
                    )
                rings.succeed(self.queue, self.device_index)
            except BaseException:
                connection.close()
                raise
            self._connection.close()
            self._connection, self._control, self._rings = connection, control, rings
            self._is_death_known = False
            self._take_shape(rings.params)

    # ---- what is not in the batch contract ----

    def flush(self, deadline: Deadline) -> None:
        """Make completed writes durable as far as the back end does."""
        flush(self, deadline)

    def write_zeroes(
        self, slba: int, block_count: int, deadline: Deadline, *, may_deallocate: bool = False
    ) -> None:
        """Zero a range without sending zeroes; split at what one command may cover."""
        params = self._rings.params
        self._check_feature(params.has_write_zeroes, "write zeroes")
        self._check_range(slba, block_count)
        piece = min(params.write_zeroes_sectors_max * SECTOR_BYTES // self.block_size_bytes, LBA_COUNT_MAX)
        ios = _ranges([(slba, block_count)], piece)
        ios["opcode"] = OPCODE_WRITE_ZEROES
        ios["flags"] = IO_DEALLOCATE if may_deallocate else 0
        execute(self, ios, deadline)

    def deallocate(self, ranges: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Tell the device that ranges (slba, block count) are not needed; their contents are undefined."""
        params = self._rings.params
        self._check_feature(params.has_discard, "deallocate")
        for slba, block_count in ranges:
            self._check_range(slba, block_count)
        piece = min(params.discard_sectors_max * SECTOR_BYTES // self.block_size_bytes, (1 << 32) - 1)
        ios = _ranges(ranges, piece)
        ios["opcode"] = OPCODE_DSM
        ios["flags"] = IO_DEALLOCATE
        execute(self, ios, deadline)

    def _check_feature(self, has_it: bool, feature: str) -> None:
        if not has_it:
            raise UnsupportedError(
                f"{self.uri}: {feature}: the back end does not have it (features 0x{self.agreement.features:x})",
                feature=feature,
            )

    def _check_range(self, slba: int, block_count: int) -> None:
        if slba < 0 or block_count <= 0 or slba + block_count > self.block_count:
            raise UsageError(
                f"{self.uri}: range: expected blocks within 0 to {self.block_count - 1}, "
                f"got {block_count} from {slba}"
            )

    # ---- end ----

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.uri}: expected an open device, got a closed one")

    def close(self) -> None:
        """Stop the virtqueues in order and disconnect; what is outstanding completes with −ENOTCONN."""
        if self._is_closed:
            return
        if self.state == "ready" and not self._rings.stats.in_flight_count:
            self._connection.stop(Deadline.after(STOP_TIMEOUT_S))
            self._is_death_known = True  # an end in order is nothing to report
        self._rings.kill(errno.ENOTCONN, "closed")
        self._note_death()
        self._is_closed = True
        if not self.queue.is_closed:
            self.queue.remove_device(self.device_index)
        self._connection.close()


def _ranges(ranges: Sequence[tuple[int, int]], piece_blocks: int) -> IoArray:
    """Commands without payload that cover ranges (slba, block count) in pieces."""
    pieces = [
        (start, min(piece_blocks, slba + block_count - start))
        for slba, block_count in ranges
        for start in range(slba, slba + block_count, piece_blocks)
    ]
    ios: IoArray = np.zeros(len(pieces), dtype=IO_DTYPE)
    ios["slba"] = [start for start, _ in pieces]
    ios["lba_count"] = [count for _, count in pieces]
    return ios
