"""The engine of file devices: io_uring, or threads that make blocking calls; and the devices on it.

Not here: opening a file and what is known of it (``kvdev.block.file``).
Threads: as the queue that drives the devices; nothing here blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdev._core import ffi, lib
from kvdev.errors import UnsupportedError, UsageError
from kvdev.native.queue import HostQueue

TRANSFER_SIZE_BYTES_MAX: Final = int(lib.KVDEV_FILE_TRANSFER_MAX)
REQUEST_COUNT_MAX: Final = int(lib.KVDEV_FILE_REQUESTS_MAX)
REQUEST_COUNT_SMALL: Final = 64
THREAD_COUNT_MAX: Final = int(lib.KVDEV_FILE_THREADS_MAX)
REGION_COUNT_MAX: Final = int(lib.KVDEV_FILE_REGIONS_MAX)
RANGE_COUNT_MAX: Final = int(lib.KVDEV_FILE_RANGES_MAX)

IO_URING: Final = "io_uring"
THREADS: Final = "threads"
_KINDS: Final = {IO_URING: lib.KVDEV_FILE_ENGINE_IO_URING, THREADS: lib.KVDEV_FILE_ENGINE_THREADS}

Hold = Callable[[int, int, Callable[[], bool]], None]
"""Address, size and a predicate: nobody may reuse that memory before the predicate is true."""


@dataclass(frozen=True)
class Region:
    """Memory that payload lies in, and how its owner withholds it while the kernel may still touch it."""

    address: int
    size_bytes: int
    refusal: str
    """Why the kernel did not register it; empty when it did."""
    keep: object
    hold: Hold | None

    def overlaps(self, address: int, size_bytes: int) -> bool:
        return address < self.address + self.size_bytes and self.address < address + size_bytes


@dataclass(frozen=True)
class EngineInfo:
    """Counters of an engine and what the kernel granted it."""

    calls: int
    """System calls that submitted or asked for completions; of threads: hand-overs."""
    operations: int
    fixed_operations: int
    """Those on registered memory."""
    in_flight_count: int
    orphan_count: int
    region_count: int
    registered_count: int
    has_fixed_files: bool
    has_fixed_buffers: bool
    has_iopoll: bool


@dataclass(frozen=True)
class FileInfo:
    """Counters of one device of an engine."""

    commands: int
    resumed: int
    """Transfers that went on after a short one."""
    retried: int
    bounced_commands: int
    zeroed_by_writing: int
    ignored_deallocations: int
    in_flight_count: int
    orphan_count: int
    """Given up, but still with the kernel: no command is taken before they are back."""
    is_polled: bool


class FileEngine:
    """A ring, or a set of threads, for the file devices of one queue."""

    def __init__(
        self,
        kind: str,
        *,
        request_count: int = 512,
        thread_count: int = 8,
        wants_iopoll: bool = False,
        give_up_wait_s: float = 5.0,
    ) -> None:
        """Set it up; UnsupportedError says why it cannot be had here.

        Args:
            request_count: operations in flight over all devices; 64 where the memlock limit allows no more.
            thread_count: of the ``threads`` engine: operations that really run at once.
            wants_iopoll: make a second ring for devices that are polled.
            give_up_wait_s: how long a device given up waits for the kernel to be done with its memory before
                that memory is withheld instead (where its owner can do that; without limit where not).
        """
        if kind not in _KINDS:
            raise UsageError(f"file engine: kind: expected {IO_URING} or {THREADS}, got {kind!r}")
        for name, value, high in (
            ("request_count", request_count, REQUEST_COUNT_MAX),
            ("thread_count", thread_count, THREAD_COUNT_MAX),
        ):
            if not 1 <= value <= high:
                raise UsageError(f"file engine: {name}: expected 1 to {high}, got {value}")
        options = ffi.new(
            "struct kvdev_file_engine_options *",
            {
                "kind": _KINDS[kind],
                "request_count": request_count,
                "thread_count": thread_count,
                "wants_iopoll": wants_iopoll,
                "give_up_wait_ns": max(1, int(give_up_wait_s * 1e9)),
            },
        )
        out = ffi.new("struct kvdev_file_engine **")
        code = lib.kvdev_file_engine_create(options, out)
        if code == -errno.ENOMEM and request_count > REQUEST_COUNT_SMALL:
            # Rings count as locked memory for ordinary users, and some systems allow 64 KiB of that.
            options.request_count = REQUEST_COUNT_SMALL
            code = lib.kvdev_file_engine_create(options, out)
        if code:
            raise UnsupportedError(f"{kind}: {unavailable_reason(-code)}", feature=kind)
        self.kind = kind
        self.request_count = int(options.request_count)
        self.raw: Any = ffi.gc(out[0], lib.kvdev_file_engine_destroy)
        self.regions: list[Region] = []

    def add_region(
        self, address: int, size_bytes: int, *, keep: object = None, hold: Hold | None = None
    ) -> Region:
        """Tell where payload lies often: registered with the kernel where it lets us.

        Args:
            keep: what owns the mapping; it stays alive, and the memory mapped, until the region is removed.
            hold: how to withhold memory that the kernel may still touch.
        """
        code = int(lib.kvdev_file_engine_region_add(self.raw, address, size_bytes))
        if code < 0:
            raise UsageError(
                f"file engine: region 0x{address:x}: expected one of at most {REGION_COUNT_MAX} regions, "
                f"got {os.strerror(-code)}"
            )
        refusal = "" if code == 0 or self.kind != IO_URING else _register_refusal(code)
        region = Region(address, size_bytes, refusal, keep, hold)
        self.regions.append(region)
        return region

    def remove_region(self, region: Region) -> None:
        """Payload there is as anywhere again; what is in flight goes on."""
        lib.kvdev_file_engine_region_remove(self.raw, region.address)
        self.regions.remove(region)

    def reap(self) -> int:
        """Collect orphans that the kernel is done with; how many are left. Only with the queue's lock held."""
        return int(lib.kvdev_file_engine_reap(self.raw))

    @property
    def info(self) -> EngineInfo:
        raw = ffi.new("struct kvdev_file_engine_info *")
        lib.kvdev_file_engine_info_read(self.raw, raw)
        return EngineInfo(
            calls=int(raw.calls),
            operations=int(raw.operations),
            fixed_operations=int(raw.fixed_operations),
            in_flight_count=int(raw.in_flight_count),
            orphan_count=int(raw.orphan_count),
            region_count=int(raw.region_count),
            registered_count=int(raw.registered_count),
            has_fixed_files=bool(raw.has_fixed_files),
            has_fixed_buffers=bool(raw.has_fixed_buffers),
            has_iopoll=bool(raw.has_iopoll),
        )

    def close(self) -> None:
        """Let go of it: it ends with its last device."""
        if self.raw is not None and not self.info.orphan_count:
            raw, self.raw = self.raw, None
            ffi.release(raw)


class FileHandle:
    """One open file on an engine; the descriptor is duplicated."""

    def __init__(
        self,
        engine: FileEngine,
        *,
        fd: int,
        block_size_bytes: int,
        block_count: int,
        max_transfer_bytes: int,
        depth: int,
        memory_alignment: int,
        has_volatile_cache: bool,
        is_block_device: bool,
        is_polled: bool,
    ) -> None:
        params = ffi.new(
            "struct kvdev_file_params *",
            {
                "block_count": block_count,
                "fd": fd,
                "block_size_bytes": block_size_bytes,
                "max_transfer_bytes": max_transfer_bytes,
                "depth": depth,
                "memory_alignment": memory_alignment,
                "has_volatile_cache": has_volatile_cache,
                "is_block_device": is_block_device,
                "is_polled": is_polled,
            },
        )
        out = ffi.new("struct kvdev_file **")
        code = lib.kvdev_file_create(engine.raw, params, out)
        if code:
            raise UsageError(f"file: create: {os.strerror(-code)}")
        self.raw: Any = ffi.gc(out[0], lib.kvdev_file_destroy)
        self._engine = engine  # its memory table is looked at as long as this lives

    def attach(self, queue: HostQueue) -> int:
        """Make it a device of the queue; returns the device index."""
        out = ffi.new("uint32_t *")
        queue._check(lib.kvdev_file_attach(self.raw, queue._check_usable("attach"), out), "attach")
        return int(out[0])

    def set_block_count(self, block_count: int) -> None:
        lib.kvdev_file_block_count_set(self.raw, block_count)

    @property
    def info(self) -> FileInfo:
        raw = ffi.new("struct kvdev_file_info *")
        lib.kvdev_file_info_read(self.raw, raw)
        return FileInfo(
            commands=int(raw.commands),
            resumed=int(raw.resumed),
            retried=int(raw.retried),
            bounced_commands=int(raw.bounced_commands),
            zeroed_by_writing=int(raw.zeroed_by_writing),
            ignored_deallocations=int(raw.ignored_deallocations),
            in_flight_count=int(raw.in_flight_count),
            orphan_count=int(raw.orphan_count),
            is_polled=bool(raw.is_polled),
        )

    def take_spans(self) -> list[tuple[int, int]]:
        """Address and size of payload that the kernel may still touch; says that they have been seen."""
        count = self.info.orphan_count
        out = ffi.new("struct kvdev_file_span[]", max(count, 1))
        count = int(lib.kvdev_file_spans_read(self.raw, out, count))
        lib.kvdev_file_attention_clear(self.raw)
        return [(int(out[index].addr), int(out[index].size_bytes)) for index in range(count)]

    @property
    def is_closed(self) -> bool:
        return self.raw is None

    def close(self) -> None:
        """Let go of it, once its queue has."""
        raw, self.raw = self.raw, None
        ffi.release(raw)


def dio_alignment(fd: int) -> tuple[int, int] | None:
    """What direct I/O on an open file asks of memory addresses and of offsets; None when the kernel does not tell.

    0 and 0: the file does not take direct I/O.
    """
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    if lib.kvdev_file_dio_align(fd, memory, offset):
        return None
    return int(memory[0]), int(offset[0])


def unavailable_reason(code: int) -> str:
    """Why there is no io_uring here, and the remedy."""
    name = errno.errorcode.get(code, str(code))
    if code == errno.ENOSYS:
        return "this kernel has none that is complete enough (ENOSYS); use Linux 5.10 or later"
    if code == errno.EPERM:
        if disabled := _disabled_by_sysctl():
            return f"kernel.io_uring_disabled is {disabled} (EPERM); sysctl kernel.io_uring_disabled=0"
        calls = "io_uring_setup, io_uring_enter and io_uring_register"
        return f"not permitted (EPERM): a seccomp profile must allow {calls}"
    if code == errno.ENOMEM:
        return "no memory for the ring (ENOMEM): raise the memlock limit (ulimit -l)"
    return f"{os.strerror(code)} ({name})"


def _disabled_by_sysctl() -> str:
    try:
        text = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def _register_refusal(code: int) -> str:
    name = errno.errorcode.get(code, str(code))
    if code == errno.ENOMEM:
        return "the memlock limit is too low for it (ENOMEM): LimitMEMLOCK=infinity, ulimit -l unlimited"
    if code == errno.EOPNOTSUPP:
        return "this kernel has no table for it; Linux 5.19 has"
    return f"{os.strerror(code)} ({name})"
