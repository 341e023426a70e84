"""The block device contract: batches of commands go into a queue, completions come out.

Not here: any device (``memory``, ``file``, ``stripe``, ``kvdev.initiator``).
Threads: a queue is driven by one thread at a time, the one that holds ``IoQueue.lock``.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdev.block.reservation import ReservationControl
from kvdev.clock import Deadline
from kvdev.drill import DrillPlan
from kvdev.errors import (
    CapacityError,
    CommandError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    QueueFullError,
    TransportError,
    UncertainWriteError,
    UnsupportedError,
    UsageError,
)
from kvdev.native.io import (
    EUNCERTAIN,
    IO_DONE_DTYPE,
    IO_DTYPE,
    IO_MAY_COPY,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    IoArray,
    IoDoneArray,
    address_of,
)
from kvdev.opcode import NvmOpcode, opcode_word

POLL_COUNT_MAX = 4096
"""Completions taken by one poll unless the caller says otherwise: bounds the array a poll allocates."""

WRITER_SETTLE_S = 10.0
"""For devices that do not say how long a writer that is gone may still have writes under way: what the initiator
takes for controllers without a CQT."""

_ABANDON_WAIT_S = 5.0
"""An abandoned command completes without waiting for its peer; this only bounds a broken queue."""

BUFFER_ALIGNMENT_BYTES = 4096
"""What O_DIRECT and registered memory accept everywhere; our own buffers start at such addresses."""


class IoQueue(Protocol):
    """Where commands for one or more devices are submitted and their completions are taken.

    Every command yields exactly one completion carrying its tag, whether it has a group or not. The
    payload belongs to the queue from ``submit`` until that completion has been polled.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by whoever submits and polls, from the first submit to the last completion; reentrant."""

    @property
    def capacity_count(self) -> int:
        """Commands that may be outstanding at once."""

    @property
    def outstanding_count(self) -> int:
        """Commands submitted whose completion has not been polled."""

    def submit(self, ios: IoArray) -> None:
        """Take all commands of an ``IO_DTYPE`` array (copied), or none.

        Raises QueueFullError when they do not fit beside the outstanding ones, UsageError when one of
        them is malformed: unknown device, range outside it, larger than its ``max_transfer_bytes``.
        """

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        """Completions as an ``IO_DONE_DTYPE`` array that the caller owns.

        Returns as soon as ``min_count`` are there (0: does not wait), and whatever there is when the
        deadline ends first, when nothing is outstanding any more, or at ``max_count``.
        """

    def abandon(self) -> None:
        """Give up on everything outstanding: each completes with an error at the next poll.

        No payload is touched after this returns, save by a device that is another process and shares the
        memory (``kvdev.vhost``: its quarantine says until when). Connections that carried commands are
        closed; writes among them have an unknown fate.
        """


@dataclass(frozen=True)
class DeviceIdentity:
    """What names a device whatever its address: None where the device has no such name.

    All-zero identifiers mean "none" on the wire; whoever fills this in passes None for them.
    """

    nguid: bytes | None = None
    eui64: bytes | None = None
    uuid: bytes | None = None
    serial: str | None = None

    def best(self) -> bytes:
        """16 bytes for a label: NGUID, else UUID, else EUI-64 padded with zeroes, else all zero."""
        if self.nguid is not None:
            return self.nguid
        if self.uuid is not None:
            return self.uuid
        if self.eui64 is not None:
            return self.eui64.ljust(16, b"\0")
        return bytes(16)


class BlockDevice(ABC):
    """A range of logical blocks behind a queue; ``device_index`` is its handle in that queue."""

    uri: str
    identity: DeviceIdentity
    block_size_bytes: int
    block_count: int
    max_transfer_bytes: int
    """Largest payload of one command, a multiple of the block size."""
    atomic_write_blocks: int = 1
    """Blocks, naturally aligned, that a crash leaves all old or all new; 1 when nothing more is known."""
    has_volatile_cache: bool = True
    """Whether a completed write may be lost until a flush; False makes ``flush`` a no-op."""
    metadata_size_bytes: int = 0
    """Metadata bytes per block; the store refuses a device that has any."""
    is_read_only: bool = False
    compare_and_write_blocks: int = 0
    """Blocks that one ``compare_and_write`` may cover; 0 where the device has none."""
    reservations: ReservationControl | None = None
    """Reservations on the device; None where it has none."""
    is_host_local: bool = False
    """Whether nobody outside this host, or outside the locks of this host, can write to it."""
    drill: DrillPlan | None = None
    """What goes wrong on it on purpose (``kvdev.block.drill``)."""
    lock_name: str = ""
    """What it is locked by on this host in place of ``uri``, when that says more than which device it is."""
    queue: IoQueue
    device_index: int

    @property
    def fence_ns(self) -> int:
        """Monotonic time after which no write of this process that was lost so far can take effect; 0: none was."""
        return 0

    @property
    def dead_writer_s(self) -> float:
        """How long after the end of another process of this host its last writes may still land."""
        return 0.0 if self.is_host_local else WRITER_SETTLE_S

    @property
    def lost_writer_s(self) -> float:
        """How long after another host has sent its last write that may still land."""
        return self.dead_writer_s

    @property
    def size_bytes(self) -> int:
        return self.block_size_bytes * self.block_count

    @property
    def cache_loss_count(self) -> int:
        """How often completed writes may have been lost with a cache since the device was opened."""
        return 0

    def note_writes(self, sent_ns: int) -> None:
        """Another process of this host completed writes here, the first of them sent at this monotonic time.

        A flush vouches for them as for this process's own: it fails when the cache that took them may be gone.
        """
        del sent_ns

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        """Write ``new`` from ``slba`` if the blocks there are ``expected``, with nothing in between; whether it was.

        Both are whole blocks, ``compare_and_write_blocks`` at most, and within one unit of a stripe. What was
        written is durable only after a flush. Raises UncertainWriteError when the connection was lost and nobody
        knows whether it was written: it may still be, until the device's fence; UnsupportedError where the device
        has no such command.
        """
        del slba, expected, new, deadline
        raise UnsupportedError(
            f"{self.uri}: compare and write: the device has no such command; "
            f"a writer is fenced by time here, not by comparing",
            feature="compare and write",
        )

    def _check_compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray
    ) -> None:
        count, rest = divmod(len(expected), self.block_size_bytes)
        if rest or len(new) != len(expected) or not 1 <= count <= self.compare_and_write_blocks:
            raise UsageError(
                f"{self.uri}: compare and write: expected 1 to {self.compare_and_write_blocks} blocks of "
                f"{self.block_size_bytes} bytes twice, got {len(expected)} and {len(new)} bytes"
            )
        if slba < 0 or slba + count > self.block_count:
            raise UsageError(
                f"{self.uri}: compare and write: expected blocks within 0 to {self.block_count - 1}, "
                f"got {count} from {slba}"
            )

    @abstractmethod
    def close(self) -> None:
        """Release the device; nothing may be outstanding on it. Closing twice does nothing."""


def aligned_buffer(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes at an address that any device takes without a bounce buffer."""
    raw = np.zeros(size_bytes + BUFFER_ALIGNMENT_BYTES, dtype=np.uint8)
    start = -address_of(raw) % BUFFER_ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def status_fields(status: int) -> tuple[int, int, bool]:
    """Status code type, status code and Do Not Retry of a completion's status (Base 4.2.3)."""
    return (status >> 8) & 0x7, status & 0xFF, bool(status & 0x4000)


_STATUS_NAMES = {
    (0, 0x02): "invalid field",
    (0, 0x04): "data transfer error",
    (0, 0x06): "internal error",
    (0, 0x07): "abort requested",
    (0, 0x0B): "invalid namespace or format",
    (0, 0x20): "namespace is write protected",
    (0, 0x21): "command interrupted",
    (0, 0x22): "transient transport error",
    (0, 0x80): "LBA out of range",
    (0, 0x81): "capacity exceeded",
    (0, 0x82): "namespace not ready",
    (0, 0x14): "longer than the device writes in one piece",
    (0, 0x1B): "aborted: another host preempted this one's reservation",
    (0, 0x83): "reservation conflict: another host's reservation keeps this one out",
    (1, 0x83): "over the device's limit of one command",
    (1, 0x82): "write to a read-only range",
    (2, 0x80): "write fault",
    (2, 0x81): "unrecovered read error",
    (2, 0x85): "compare failure",
    (2, 0x86): "access denied",
}
"""Words for the statuses an operator meets on reads and writes (Base 4.2.3)."""


def _operation(opcode: int) -> str:
    return opcode_word(opcode) if opcode in tuple(NvmOpcode) else f"opcode 0x{opcode:02x}"


def error_of(*, error: int, status: int, opcode: int, slba: int, uri: str) -> KvdevError:
    """The exception that one failed command means; ``error`` is the completion's −errno."""
    where = f"{uri}: {_operation(opcode)} at LBA {slba}"
    if error == -EUNCERTAIN:
        what = "fate unknown: it was sent and the connection lost; it may take effect until its controller is fenced"
        if opcode == OPCODE_FLUSH:
            where = f"{uri}: flush"
            what = "a controller went away with its cache: writes completed since the last flush may be lost"
        return UncertainWriteError(f"{where}: {what}", errno=EUNCERTAIN, trid=uri)
    if status:
        sct, sc, dnr = status_fields(status)
        return CommandError(
            f"{where}: expected success, got status 0x{sct:x}/0x{sc:02x} {_STATUS_NAMES.get((sct, sc), '')}".rstrip(),
            opcode=opcode,
            sct=sct,
            sc=sc,
            dnr=dnr,
            slba=slba,
        )
    number = -error
    if number in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE):
        what = "connection lost: the target is gone or has dropped it; what was flushed is there on reopen"
        return ConnectionLostError(f"{where}: {what}", errno=number, trid=uri)
    if number == errno.ENODEV:
        return ConnectionLostError(
            f"{where}: the namespace is gone, or another one has its id", errno=number, trid=uri
        )
    if number in (errno.ETIMEDOUT, errno.ECANCELED):
        return DeadlineError(f"{where}: no completion in time", operation=_operation(opcode), trid=uri)
    if number in (errno.ENOSPC, errno.EDQUOT):
        # A sparse file, or a thin device, whose file system or pool is full.
        return CapacityError(f"{where}: {os.strerror(number)}; what is under the device is full")
    return TransportError(f"{where}: {os.strerror(number)}", errno=number, trid=uri)


def run_grouped(queue: IoQueue, ios: IoArray, deadline: Deadline) -> IoDoneArray | None:
    """As ``run_batch`` for commands whose tags count from 0 and whose groups tell all: None if none failed.

    Of a batch with failures the completions are those that failed, at their place; the rest is zero.
    """
    done_all = _run_all(queue, ios, deadline, keeps_all=False)
    return done_all if len(done_all) else None


def run_batch(queue: IoQueue, ios: IoArray, deadline: Deadline) -> IoDoneArray:
    """Submit commands, in pieces when the queue is smaller, and return their completions in order.

    Blocks until every one has completed. When the deadline ends first, what is outstanding is
    abandoned and completes with an error, so the payload is the caller's again on return whatever
    happened; −ECANCELED marks commands that never reached the device. The tags of ``ios`` are
    overwritten. Failed commands do not raise.
    """
    ios["tag"] = np.arange(len(ios), dtype=np.uint64)
    return _run_all(queue, ios, deadline, keeps_all=True)


def _run_all(queue: IoQueue, ios: IoArray, deadline: Deadline, *, keeps_all: bool) -> IoDoneArray:
    """Completions by tag; without ``keeps_all`` those that failed, and no array at all if none did."""
    kept = _Kept(len(ios), keeps_all=keeps_all)
    with queue.lock:
        if queue.outstanding_count:
            raise UsageError(f"queue: expected nothing outstanding, got {queue.outstanding_count} commands")
        try:
            submitted, completed = _run_until(queue, ios, kept, deadline)
            if completed < len(ios):
                _abandon_rest(queue, ios, kept, submitted, completed, deadline)
        except BaseException:
            # Ctrl-C among others: nobody may write to the payload once its owner has moved on.
            _take_back(queue, deadline)
            raise
    return kept.done


class _Kept:
    """The completions of a batch, by tag; sorting in what nobody looks at is left out."""

    def __init__(self, count: int, *, keeps_all: bool) -> None:
        self._count = count
        self._keeps_all = keeps_all
        self.done: IoDoneArray = np.zeros(count if keeps_all else 0, dtype=IO_DONE_DTYPE)

    def take(self, done: IoDoneArray) -> None:
        if not self._keeps_all:
            if not np.count_nonzero(done["error"]):
                return
            done = done[done["error"] != 0]
        self.room()[done["tag"].astype(np.int64)] = done

    def room(self) -> IoDoneArray:
        if len(self.done) < self._count:
            self.done = np.zeros(self._count, dtype=IO_DONE_DTYPE)
        return self.done


def _run_until(queue: IoQueue, ios: IoArray, kept: _Kept, deadline: Deadline) -> tuple[int, int]:
    """Submit and poll until all have completed or the deadline ends; how many went out and came back."""
    submitted = completed = 0
    piece_limit = len(ios)
    while completed < len(ios) and not (deadline.is_expired and completed < submitted):
        room = min(len(ios) - submitted, queue.capacity_count - queue.outstanding_count, piece_limit)
        if room > 0 and not deadline.is_expired:
            try:
                queue.submit(ios[submitted : submitted + room])
                submitted += room
                continue
            except QueueFullError:
                # The queue has a limit besides its count: go on with fewer at once.
                if room == 1 and queue.outstanding_count == 0:
                    raise
                piece_limit = max(1, room // 2)
        elif completed == submitted:
            break
        wanted = _wait_count(submitted - completed, len(ios) - submitted)
        done = queue.poll(min_count=wanted, deadline=deadline)
        kept.take(done)
        completed += len(done)
    return submitted, completed


def _take_back(queue: IoQueue, deadline: Deadline) -> None:
    """Empty a queue of which nobody knows any more what it holds."""
    queue.abandon()
    limit = Deadline.after(_ABANDON_WAIT_S, clock=deadline.clock)
    while queue.outstanding_count and not limit.is_expired:
        queue.poll(min_count=min(queue.outstanding_count, POLL_COUNT_MAX), deadline=limit)


def _wait_count(outstanding_count: int, unsubmitted_count: int) -> int:
    """How many completions to wait for: all at the end, half before, so that the device never runs dry."""
    wanted = outstanding_count if unsubmitted_count == 0 else outstanding_count // 2
    return min(max(wanted, 1), POLL_COUNT_MAX)


def _abandon_rest(
    queue: IoQueue, ios: IoArray, kept: _Kept, submitted: int, completed: int, deadline: Deadline
) -> None:
    """Take the payload of an expired batch back from the queue; mark what never completed as cancelled."""
    if completed < submitted:
        queue.abandon()
    limit = Deadline.after(_ABANDON_WAIT_S, clock=deadline.clock)
    while completed < submitted:
        done = queue.poll(min_count=min(submitted - completed, POLL_COUNT_MAX), deadline=limit)
        # They ended because the time was over; that their connection went with them is the consequence.
        done["error"][done["error"] == -errno.ENOTCONN] = -errno.ETIMEDOUT
        kept.take(done)
        completed += len(done)
        assert len(done) or not limit.is_expired, "a queue completes what it abandoned"
    if submitted < len(ios):
        done_all = kept.room()
        done_all["tag"][submitted:] = ios["tag"][submitted:]
        done_all["error"][submitted:] = -errno.ECANCELED


def execute(device: BlockDevice, ios: IoArray, deadline: Deadline) -> IoDoneArray:
    """Run commands of one device to completion and raise the first error among them.

    Fills in ``device_index`` and the tags. See ``run_batch`` for blocking and ownership.
    """
    ios["device_index"] = device.device_index
    done = run_batch(device.queue, ios, deadline)
    failed = np.flatnonzero(done["error"])
    if len(failed):
        first = int(failed[0])
        raise error_of(
            error=int(done["error"][first]),
            status=int(done["status"][first]),
            opcode=int(ios["opcode"][first]),
            slba=int(ios["slba"][first]),
            uri=device.uri,
        )
    return done


def transfer_ios(device: BlockDevice, opcode: int, slba: int, address: int, size_bytes: int) -> IoArray:
    """Commands that move memory to or from consecutive blocks, split at the device's largest transfer."""
    piece = device.max_transfer_bytes
    count = -(-size_bytes // piece)
    ios = np.zeros(count, dtype=IO_DTYPE)
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(piece)
    sizes = np.minimum(np.uint64(size_bytes) - offsets, np.uint64(piece))
    ios["opcode"] = opcode
    ios["buf_addr"] = np.uint64(address) + offsets
    ios["slba"] = np.uint64(slba) + offsets // np.uint64(device.block_size_bytes)
    ios["byte_count"] = sizes
    ios["lba_count"] = sizes // np.uint64(device.block_size_bytes)
    ios["device_index"] = device.device_index
    return ios


def read_blocks(
    device: BlockDevice, slba: int, block_count: int, deadline: Deadline
) -> npt.NDArray[np.uint8]:
    """Bytes of ``block_count`` blocks from ``slba``, in a new aligned buffer."""
    buffer = aligned_buffer(block_count * device.block_size_bytes)
    ios = transfer_ios(device, OPCODE_READ, slba, address_of(buffer), buffer.nbytes)
    ios["flags"] = IO_MAY_COPY
    execute(device, ios, deadline)
    return buffer


def write_blocks(
    device: BlockDevice, slba: int, data: bytes | npt.NDArray[np.uint8], deadline: Deadline
) -> None:
    """Write whole blocks from ``slba``; returns when the device has taken them (see ``flush``)."""
    buffer = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    if buffer.nbytes % device.block_size_bytes or not buffer.flags.c_contiguous:
        raise UsageError(
            f"{device.uri}: write: expected contiguous whole blocks of {device.block_size_bytes} bytes, "
            f"got {buffer.nbytes}"
        )
    ios = transfer_ios(device, OPCODE_WRITE, slba, address_of(buffer), buffer.nbytes)
    ios["flags"] = IO_MAY_COPY
    execute(device, ios, deadline)


def flush(device: BlockDevice, deadline: Deadline) -> None:
    """Make every completed write of the device durable; nothing to do without a volatile cache."""
    if not device.has_volatile_cache:
        return
    ios = np.zeros(1, dtype=IO_DTYPE)
    ios["opcode"] = OPCODE_FLUSH
    execute(device, ios, deadline)
