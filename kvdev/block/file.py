"""File devices: a regular file or a block device of this machine, past the page cache where it can be.

Kernel-attached NVMe-oF namespaces (``/dev/nvme0n1``) are used through it too.
Not here: who else uses a device (``kvdev.store.signature``).
Threads: driven by the thread that drives its queue.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvdev.block.device import BUFFER_ALIGNMENT_BYTES, BlockDevice, DeviceIdentity, aligned_buffer, execute
from kvdev.block.kernel_device import (
    QueueFacts,
    block_shape,
    queue_facts,
    size_of_block_device,
    sysfs_folder,
    sysfs_identity,
)
from kvdev.block.local import compare_then_write
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import TransportError, UnsupportedError, UsageError
from kvdev.native.file import (
    IO_URING,
    RANGE_COUNT_MAX,
    REQUEST_COUNT_MAX,
    THREADS,
    TRANSFER_SIZE_BYTES_MAX,
    FileEngine,
    FileHandle,
    FileInfo,
    dio_alignment,
)
from kvdev.native.io import IO_DEALLOCATE, IO_DTYPE, OPCODE_DSM, OPCODE_WRITE_ZEROES, address_of
from kvdev.native.queue import HostQueue
from kvdev.units import MIB, is_power_of_two

log = logging.getLogger("kvdev.file")

REGULAR_FILE_BLOCK_SIZE_BYTES = 4096
LBA_COUNT_MAX = 65536
"""Blocks of one write zeroes command in the queue's form."""
ENGINES = ("auto", IO_URING, THREADS)
DIRECT = ("auto", "on", "off")
DEPTH_DEFAULT = 64
"""Enough to fill a local NVMe drive with strips of 128 KiB; the rest waits on our side, by priority."""
QUEUE_CAPACITY_COUNT = 4096
_FLOCK = struct.Struct("hhqqi4x")
COMPARE_AND_WRITE_LOCK_OFFSET = 3 << 61
"""Where the lock byte of block 0 lies: far past any data, and past the store's own locks."""
_LOCK_PAUSE_S = 0.001
FENCE_NEVER_NS = 1 << 62
"""A fence that is not in sight: the kernel still holds operations that were given up."""


@dataclass(frozen=True)
class FileOptions:
    """How to use a file or block device."""

    engine: str = "auto"
    """``io_uring``, ``threads`` (blocking calls), or ``auto``: io_uring where it can be had."""
    direct: str = "auto"
    """Past the page cache: ``on``, ``off``, or ``auto``: where the file system takes it."""
    depth: int = DEPTH_DEFAULT
    """Operations in flight on the device."""
    is_polled: bool = False
    """Ask for completions instead of being interrupted, where the device's queue can do that (io_uring, direct)."""

    def __post_init__(self) -> None:
        rules = (
            ("engine", self.engine in ENGINES, ", ".join(ENGINES)),
            ("direct", self.direct in DIRECT, ", ".join(DIRECT)),
            ("depth", 1 <= self.depth <= REQUEST_COUNT_MAX, f"1 to {REQUEST_COUNT_MAX}"),
        )
        for name, is_good, expected in rules:
            if not is_good:
                raise UsageError(f"file options: {name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class EngineChoice:
    """An engine and why it is this one."""

    engine: FileEngine
    note: str = ""
    """Why it is not the one that was wished for."""


def choose_engine(wanted: str = "auto", *, wants_iopoll: bool = False) -> EngineChoice:
    """io_uring where it can be had, else threads, with the reason; UnsupportedError when io_uring was insisted on."""
    if wanted == THREADS:
        return EngineChoice(FileEngine(THREADS))
    try:
        return EngineChoice(FileEngine(IO_URING, wants_iopoll=wants_iopoll))
    except UnsupportedError as refusal:
        if wanted == IO_URING:
            raise
        log.warning("file devices use threads: %s", refusal)
        return EngineChoice(FileEngine(THREADS), str(refusal))


class FileDevice(BlockDevice):
    """A file opened for direct I/O; a payload that is not aligned for it is copied once.

    After a batch was given up, what the kernel still holds of it is waited for, and withheld by its arena if that
    takes long; until it is back the device takes no commands (``is_stuck``).
    """

    queue: HostQueue

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size_bytes: int | None = None,
        is_read_only: bool = False,
        max_transfer_bytes: int = MIB,
        options: FileOptions | None = None,
        queue: HostQueue | None = None,
        choice: EngineChoice | None = None,
    ) -> None:
        """Open ``path``.

        Args:
            block_size_bytes: for regular files only (4096 if not given).
            queue: share this queue with other devices instead of having one's own.
            choice: the engine, shared by the file devices of one queue; one's own if not given.

        Raises UsageError naming the path when it cannot be opened or has no whole block, UnsupportedError when the
        options insist on what is not there.
        """
        self.path = os.fspath(path)
        self.uri = f"file:{self.path}"
        self.options = options or FileOptions()
        if not 512 <= max_transfer_bytes <= TRANSFER_SIZE_BYTES_MAX:
            raise UsageError(
                f"{self.uri}: max_transfer_bytes: expected 512 to {TRANSFER_SIZE_BYTES_MAX}, got {max_transfer_bytes}"
            )
        self.max_transfer_bytes = max_transfer_bytes
        self.is_read_only = is_read_only
        self.notes: list[str] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pause = threading.Event()  # never set: a pause between two looks at a lock
        self._fd = _open(self.path, is_read_only=is_read_only)
        try:
            self._read_shape(block_size_bytes)
            self._choose_direct()
            self._take_engine(queue, choice)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    # ---- opening ----

    def _read_shape(self, block_size_bytes: int | None) -> None:
        mode = os.fstat(self._fd)
        self.is_block_device = stat.S_ISBLK(mode.st_mode)
        # Of a regular file whoever may write holds a lock on it; a block device may be another host's as well.
        self.is_host_local = not self.is_block_device
        self.queue_facts = QueueFacts()
        if self.is_block_device:
            block_size, size_bytes, is_read_only = block_shape(self._fd)
            folder = sysfs_folder(mode.st_rdev)
            self.identity = sysfs_identity(folder)
            self.queue_facts = queue_facts(folder)
            self.is_read_only = self.is_read_only or is_read_only
            if block_size_bytes not in (None, block_size):
                raise UsageError(
                    f"{self.uri}: block size: expected {block_size}, as formatted, got {block_size_bytes}"
                )
        elif stat.S_ISREG(mode.st_mode):
            block_size = block_size_bytes or REGULAR_FILE_BLOCK_SIZE_BYTES
            size_bytes = mode.st_size
            self.identity = DeviceIdentity()
        else:
            raise UsageError(f"{self.uri}: expected a regular file or a block device")
        if not is_power_of_two(block_size) or not 512 <= block_size <= 65536:
            raise UsageError(
                f"{self.uri}: block size: expected a power of two from 512 to 65536, got {block_size}"
            )
        if size_bytes < block_size:
            raise UsageError(
                f"{self.uri}: size: expected at least one block of {block_size} bytes, got {size_bytes}"
            )
        self.block_size_bytes = int(block_size)
        self.block_count = int(size_bytes // block_size)

    def _choose_direct(self) -> None:
        """Switch the descriptor to direct I/O where the file takes it."""
        self.is_direct = False
        self._memory_alignment = 1
        if self.options.direct == "off":
            return
        refusal = self._try_direct()
        if refusal:
            if self.options.direct == "on":
                raise UnsupportedError(
                    f"{self.uri}: direct=on: {refusal}; use direct=auto to go through the page cache",
                    feature="direct I/O",
                )
            self.notes.append(f"through the page cache: {refusal}")
            log.warning("%s: through the page cache: %s", self.uri, refusal)

    def _try_direct(self) -> str:
        """Why not; empty when the descriptor is for direct I/O now."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as failure:
            if failure.errno != errno.EINVAL:
                raise
            return "the file system refuses O_DIRECT"
        memory, offset = dio_alignment(self._fd) or (BUFFER_ALIGNMENT_BYTES, 0)
        refusal = ""
        if offset > self.block_size_bytes:
            refusal = (
                f"direct I/O here is in units of {offset} bytes, more than a block of {self.block_size_bytes}"
            )
        else:
            # Some file systems accept the flag and then not the I/O.
            try:
                os.preadv(self._fd, [aligned_buffer(self.block_size_bytes).data], 0)
            except OSError as failure:
                if failure.errno == errno.EINVAL:
                    refusal = f"direct reads of one block of {self.block_size_bytes} bytes are refused"
        if refusal:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return refusal
        self.is_direct = True
        self._memory_alignment = min(max(memory, 1), BUFFER_ALIGNMENT_BYTES)
        return ""

    def _take_engine(self, queue: HostQueue | None, choice: EngineChoice | None) -> None:
        self._owns_queue, self._owns_engine = queue is None, choice is None
        is_polled = self._may_poll()
        choice = choice or choose_engine(self.options.engine, wants_iopoll=is_polled)
        if choice.note:
            self.notes.append(choice.note)
        if is_polled and not choice.engine.info.has_iopoll:
            self.notes.append(f"not polled: the engine is {choice.engine.kind}, without a ring for that")
            is_polled = False
        self.engine = choice.engine
        self.has_volatile_cache = not self.is_direct or self.queue_facts.has_volatile_cache
        self.compare_and_write_blocks = 0 if self.is_read_only else 1
        self._handle = FileHandle(
            self.engine,
            fd=self._fd,
            block_size_bytes=self.block_size_bytes,
            block_count=self.block_count,
            max_transfer_bytes=self.max_transfer_bytes,
            depth=self.options.depth,
            memory_alignment=self._memory_alignment,
            has_volatile_cache=self.has_volatile_cache,
            is_block_device=self.is_block_device,
            is_polled=is_polled,
        )
        self.queue = queue or HostQueue(capacity_count=QUEUE_CAPACITY_COUNT)
        self.device_index = self._handle.attach(self.queue)
        self.queue.attend(self.device_index, self._attend)

    def _may_poll(self) -> bool:
        if not self.options.is_polled:
            return False
        if self.is_direct and self.is_block_device and self.queue_facts.can_poll:
            return True
        self.notes.append("not polled: that takes direct I/O on a block device with queue/io_poll 1 in sysfs")
        return False

    # ---- what is known ----

    @property
    def fd(self) -> int:
        """The open descriptor, for locks on it; closed by ``close``.

        A lock on it lasts as long as an operation of ours may run, after the end of this process too.
        """
        return self._fd

    @property
    def stats(self) -> FileInfo:
        return self._handle.info

    @property
    def is_polled(self) -> bool:
        """Whether completions are asked for; it ends when the kernel says that this device cannot be polled."""
        return self._handle.info.is_polled

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel still holds what was given up: no command is taken meanwhile."""
        return self._fd >= 0 and not self._are_orphans_back()

    @property
    def fence_ns(self) -> int:
        """Now, unless the kernel still holds what was given up."""
        return FENCE_NEVER_NS if self.is_stuck else SYSTEM_CLOCK.monotonic_ns()

    @property
    def description(self) -> str:
        """One line: engine, cache and registration in use, and why not better ones."""
        info = self.engine.info
        parts = [
            self.engine.kind,
            "direct" if self.is_direct else "page cache",
            f"depth {self.options.depth}",
        ]
        if self.is_polled:
            parts.append("polled")
        if self.engine.kind == IO_URING:
            parts.append(f"{info.registered_count} of {info.region_count} memory regions registered")
        if self.is_block_device:
            parts.append("write cache" if self.has_volatile_cache else "no volatile write cache")
        if self.queue_facts.optimal_io_bytes:
            parts.append(f"optimal I/O {self.queue_facts.optimal_io_bytes} bytes")
        if self.is_read_only:
            parts.append("read-only")
        refusals = {region.refusal for region in self.engine.regions if region.refusal}
        notes = [*self.notes, *(f"memory not registered: {text}" for text in sorted(refusals))]
        return ", ".join(parts) + "".join(f"; {note}" for note in notes)

    # ---- what is not in the batch contract ----

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        """As every device's, among the processes of this host that use this method; plain writes do not wait.

        Another process that stops inside it keeps others out until it ends: then DeadlineError.
        """
        self._check_compare_and_write(slba, expected, new)
        with self._block_lock(slba, deadline):
            return compare_then_write(self, slba, expected, new, deadline)

    @contextlib.contextmanager
    def _block_lock(self, slba: int, deadline: Deadline) -> Iterator[None]:
        """An open-file-description lock on one byte that stands for a block; processes that die let go of it."""

        def lock(kind: int) -> None:
            place = _FLOCK.pack(kind, os.SEEK_SET, COMPARE_AND_WRITE_LOCK_OFFSET + slba, 1, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, place)

        with self._lock:  # the descriptor is one owner to the kernel, whichever thread asks
            while True:
                try:
                    lock(fcntl.F_WRLCK)
                    break
                except OSError as refusal:
                    if refusal.errno not in (errno.EAGAIN, errno.EACCES):
                        raise TransportError(
                            f"{self.uri}: lock of block {slba}: {refusal.strerror}", errno=refusal.errno or 0
                        ) from refusal
                deadline.check("compare and write", trid=self.uri)
                self._pause.wait(min(_LOCK_PAUSE_S, deadline.remaining_s()))
            try:
                yield
            finally:
                lock(fcntl.F_UNLCK)

    def write_zeroes(
        self, slba: int, block_count: int, deadline: Deadline, *, may_deallocate: bool = False
    ) -> None:
        """Zero a range without sending zeroes, where the file system or device can do that."""
        self._check_range(slba, block_count)
        starts = range(slba, slba + block_count, LBA_COUNT_MAX)
        ios = np.zeros(len(starts), dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_WRITE_ZEROES
        ios["slba"] = starts
        ios["lba_count"] = [min(LBA_COUNT_MAX, slba + block_count - start) for start in starts]
        ios["flags"] = IO_DEALLOCATE if may_deallocate else 0
        execute(self, ios, deadline)

    def deallocate(self, ranges: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Tell that ranges (slba, block count) are not needed; their contents are undefined."""
        for slba, block_count in ranges:
            self._check_range(slba, block_count)
            if block_count >= 1 << 32:
                raise UsageError(f"{self.uri}: range: expected under 2^32 blocks, got {block_count}")
        raw = np.zeros(len(ranges), dtype=[("attributes", "<u4"), ("block_count", "<u4"), ("slba", "<u8")])
        raw["slba"] = [slba for slba, _ in ranges]
        raw["block_count"] = [block_count for _, block_count in ranges]
        pieces = range(0, len(raw), RANGE_COUNT_MAX)
        ios = np.zeros(len(pieces), dtype=IO_DTYPE)
        ios["opcode"], ios["flags"] = OPCODE_DSM, IO_DEALLOCATE
        for index, start in enumerate(pieces):
            piece = raw[start : start + RANGE_COUNT_MAX]
            ios["buf_addr"][index], ios["byte_count"][index] = address_of(piece), piece.nbytes
        execute(self, ios, deadline)

    def refresh(self) -> None:
        """Look at the size again: a file or block device may have been made larger or smaller."""
        self._check_open()
        size_bytes = size_of_block_device(self._fd) if self.is_block_device else os.fstat(self._fd).st_size
        block_count = size_bytes // self.block_size_bytes
        if block_count == 0:
            raise UsageError(f"{self.uri}: size: expected at least one block, got {size_bytes} bytes")
        if block_count != self.block_count:
            log.warning("%s: capacity: was %d blocks, is %d", self.uri, self.block_count, block_count)
            with self.queue.lock:
                self._handle.set_block_count(block_count)
            self.block_count = block_count

    def _check_range(self, slba: int, block_count: int) -> None:
        self._check_open()
        if slba < 0 or block_count <= 0 or slba + block_count > self.block_count:
            raise UsageError(
                f"{self.uri}: range: expected blocks within 0 to {self.block_count - 1}, "
                f"got {block_count} from {slba}"
            )

    # ---- after a batch was given up ----

    def _attend(self) -> None:
        """Called by the queue's poll: have memory withheld that the kernel may still touch."""
        for address, size_bytes in self._handle.take_spans():
            log.warning("%s: the kernel still holds %d bytes of a batch given up", self.uri, size_bytes)
            for region in self.engine.regions:
                if region.hold is not None and region.overlaps(address, size_bytes):
                    region.hold(address, size_bytes, self._are_orphans_back)

    def _are_orphans_back(self) -> bool:
        if os.getpid() != self._pid or self._handle.is_closed or not self._handle.info.orphan_count:
            return True
        # Whoever drives the queue at the moment collects them too.
        if self.queue.lock.acquire(blocking=False):
            try:
                self.engine.reap()
            finally:
                self.queue.lock.release()
        if self._handle.info.orphan_count:
            return False
        if self._fd < 0:
            self._let_go()
        return True

    # ---- end ----

    def _check_open(self) -> None:
        if self._fd < 0:
            raise UsageError(f"{self.uri}: expected an open device, got a closed one")

    def close(self) -> None:
        """Stop using the file; what is outstanding completes with −ENOTCONN once the kernel is done with it."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if os.getpid() != self._pid:  # a fork: queue, engine and locks are the parent's
            os.close(fd)
            return
        if not self.queue.is_closed:
            self.queue.remove_device(self.device_index)
        is_idle = not self._handle.info.orphan_count
        if is_idle:
            # The engine lets go of the open file a moment later; its locks shall be free now.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        os.close(fd)
        if self._owns_queue:
            self.queue.close()
        if is_idle:
            self._let_go()

    def _let_go(self) -> None:
        """Close what the kernel's last operations needed."""
        self._handle.close()
        if self._owns_engine:
            self.engine.close()


def _open(path: str, *, is_read_only: bool) -> int:
    flags = os.O_CLOEXEC | (os.O_RDONLY if is_read_only else os.O_RDWR)
    try:
        return os.open(path, flags)
    except OSError as failure:
        raise UsageError(f"file:{path}: cannot be opened: {os.strerror(failure.errno or 0)}") from failure
