"""What a job reads and writes: its device opened for one thread alone, with payload memory that the device reaches.

Files are made, and made larger, as fio does it; nothing else is changed by opening.
Not here: whether it may be written (``guard``); the jobs' I/O (``run``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvdev.block.device import BlockDevice
from kvdev.block.file import FileDevice, FileOptions, choose_engine
from kvdev.block.memory import MemoryDevice
from kvdev.errors import CapacityError, UnsupportedError, UsageError
from kvdev.native.probe import ProbeMember
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.uri import DeviceUri, FileUri, KvNamespaceUri, MemUri, VolumeUri, parse_uri
from kvdev_tools.probe.job import Job, is_uri

if TYPE_CHECKING:
    from kvdev.clock import Deadline
    from kvdev.session import Session

FILE_BLOCK_SIZES = (4096, 2048, 1024, 512)
"""Of a regular file whichever is the largest that all of a job's blocks are multiples of."""
LAYOUT_STEP_BYTES = 1 << 20
QUEUE_SPARE_COUNT = 64


@dataclass
class Target:
    """An open device; ``members`` is what the core drives."""

    uri: str
    members: tuple[ProbeMember, ...]
    devices: tuple[BlockDevice, ...]
    block_size_bytes: int
    size_bytes: int
    queue: HostQueue | None
    arena: Arena
    strip_size_bytes: int = 0
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Close what opening it opened; the arena last, which devices may know."""
        while self.closers:
            self.closers.pop()()


def uri_of(job: Job) -> DeviceUri | VolumeUri | KvNamespaceUri:
    """The device of a job: its filename, or the file of that name with the job's engine and direct."""
    direct = None if job.direct is None else ("on" if job.direct else "off")
    if not is_uri(job.filename):
        path = os.path.abspath(job.filename)  # noqa: PTH100 (no links are followed)
        return FileUri(path, engine=job.engine, direct=direct)
    uri = parse_uri(job.filename)
    if isinstance(uri, FileUri):
        return FileUri(
            uri.path,
            engine=uri.engine or job.engine,
            direct=uri.direct or direct,
            depth=uri.depth,
            is_polled=uri.is_polled,
            drill=uri.drill,
        )
    return uri


def wanted_size(job: Job) -> int:
    """Bytes that a regular file must have for a job; 0 where the job takes it as it is."""
    if job.size is None or job.size.is_percent:
        return 0
    wanted = job.size.value
    if not job.offset.is_percent and not job.offset_increment.is_percent:
        wanted += job.offset.value + job.jobnum * job.offset_increment.value
    return wanted


def prepare_file(job: Job, undo: contextlib.ExitStack) -> None:
    """Make the regular file that a job needs, or make it as large; ``undo`` puts it back as it was.

    Devices are as large as they are.
    """
    uri = uri_of(job)
    wanted = wanted_size(job)
    if not isinstance(uri, FileUri) or not wanted:
        return
    path = Path(uri.path)
    try:
        if path.exists():
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size >= wanted:
                return
        _lay_out(job, path, wanted, undo)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"{job.name}: size: {path} cannot get {wanted} bytes: {error.strerror}; lower size"
            ) from error
        raise UsageError(
            f"{job.name}: filename: {path}: {error.strerror}; name a file that can be written"
        ) from error


def _lay_out(job: Job, path: Path, size_bytes: int, undo: contextlib.ExitStack) -> None:
    """Fill a file up to a size with bytes that no file system compresses or shares."""
    have = path.stat().st_size if path.exists() else None
    space = os.statvfs(path.parent)
    free = space.f_bavail * space.f_frsize
    if size_bytes - (have or 0) > free:
        raise CapacityError(
            f"{job.name}: size: expected at most the {free} bytes that are free where {path} lies, "
            f"got {size_bytes - (have or 0)} more to lay out; lower size"
        )
    undo.callback(_put_back, path, have)
    with path.open("ab") as file:
        have = have or 0
        step = bytearray(os.urandom(LAYOUT_STEP_BYTES))
        step[510:512] = bytes(2)  # by chance it were a boot sector's signature
        while have < size_bytes:
            have += file.write(step[: size_bytes - have])
        file.flush()
        os.fsync(file.fileno())


def _put_back(path: Path, size_bytes: int | None) -> None:
    """Give a file the size that it had, or take away the one that was not there."""
    with contextlib.suppress(FileNotFoundError):
        if size_bytes is None:
            path.unlink()
        else:
            os.truncate(path, size_bytes)


class Opener:
    """Opens targets; memory devices are shared by the jobs that name them, all else is each job's own."""

    def __init__(self, make_session: Callable[[], Session], *, is_read_only: bool = False) -> None:
        self._make_session = make_session
        self.is_read_only = is_read_only
        self._memories: dict[str, MemoryDevice] = {}

    def open(self, job: Job, deadline: Deadline) -> Target:
        """Open what a job names, with payload memory for its depth; the caller closes it."""
        uri = uri_of(job)
        if isinstance(uri, KvNamespaceUri):
            raise UsageError(
                f"{job.name}: filename: expected a device or a volume, got the KV namespace {uri}; `kvdev replay` "
                f"measures its pages, and without #{uri.name} its volume is probed"
            )
        if getattr(uri, "drill", None) is not None:
            raise UnsupportedError(
                f"{job.name}: filename: a device under a drill is not driven by the core alone; `kvdev drill` "
                f"measures it",
                feature="probe of a drill",
            )
        with contextlib.ExitStack() as undo:
            target = self._open(job, uri, undo, deadline)
            target.closers = [undo.pop_all().close]
        return target

    def _open(
        self, job: Job, uri: DeviceUri | VolumeUri, undo: contextlib.ExitStack, deadline: Deadline
    ) -> Target:
        if isinstance(uri, MemUri):
            return self._memory(job, uri, undo)
        if isinstance(uri, FileUri):
            return self._file(job, uri, undo)
        session = undo.enter_context(self._make_session())
        strip = 0
        if isinstance(uri, VolumeUri):
            volume = session.open_volume(uri, deadline=deadline)
            members = volume.members
            strip, size = volume.strip_size_bytes, volume.io.device.size_bytes
            block = volume.block_size_bytes
        else:
            members = [session.open_device(uri, deadline=deadline)]
            size, block = members[0].size_bytes, members[0].block_size_bytes
        arena = session.make_arena(_arena_size(job))
        undo.callback(arena.close)
        queues = {id(each.queue): each.queue for each in members if isinstance(each.queue, HostQueue)}
        if len(queues) > 1:
            raise UnsupportedError(
                f"{job.name}: filename: {uri}: its members are driven by several queues",
                feature="several queues",
            )
        return Target(
            uri=str(uri),
            members=tuple(_member(device) for device in members),
            devices=tuple(members),
            block_size_bytes=block,
            size_bytes=size,
            queue=next(iter(queues.values()), None),
            arena=arena,
            strip_size_bytes=strip,
        )

    def _memory(self, job: Job, uri: MemUri, undo: contextlib.ExitStack) -> Target:
        device = self._memories.get(uri.name)
        if device is None:
            size = uri.size_bytes
            if size is None:
                if job.size is None or job.size.is_percent:
                    raise UsageError(f"{job.name}: filename: expected mem:{uri.name}?size=SIZE, or a size")
                size = -(-(job.offset.value + job.size.value) // 4096) * 4096
            device = MemoryDevice(size_bytes=size, name=uri.name)
            self._memories[uri.name] = device
        arena = undo.enter_context(Arena(_arena_size(job)))
        return Target(
            uri=device.uri,
            members=(_member(device),),
            devices=(device,),
            block_size_bytes=_file_block(job),
            size_bytes=device.size_bytes,
            queue=None,
            arena=arena,
        )

    def _file(self, job: Job, uri: FileUri, undo: contextlib.ExitStack) -> Target:
        is_regular = Path(uri.path).is_file()
        options = FileOptions(
            engine=uri.engine or "auto",
            direct=uri.direct or "auto",
            depth=uri.depth or max(job.iodepth, FileOptions().depth),
            is_polled=bool(uri.is_polled),
        )
        engine = choose_engine(options.engine, wants_iopoll=options.is_polled)
        undo.callback(engine.engine.close)
        queue = HostQueue(capacity_count=max(4096, _commands_of(job) + QUEUE_SPARE_COUNT))
        undo.callback(queue.close)
        device = FileDevice(
            uri.path,
            block_size_bytes=_file_block(job) if is_regular else None,
            is_read_only=self.is_read_only or not job.writes,
            options=options,
            queue=queue,
            choice=engine,
        )
        undo.callback(device.close)
        arena = undo.enter_context(Arena(_arena_size(job)))
        region = engine.engine.add_region(
            arena.address, arena.size_bytes, keep=arena.bytes(), hold=arena.hold
        )
        undo.callback(engine.engine.remove_region, region)
        return Target(
            uri=device.uri,
            members=(_member(device),),
            devices=(device,),
            block_size_bytes=device.block_size_bytes,
            size_bytes=device.size_bytes,
            queue=queue,
            arena=arena,
        )


def _member(device: BlockDevice) -> ProbeMember:
    memory = int(device.data.ctypes.data) if isinstance(device, MemoryDevice) else 0
    return ProbeMember(
        size_bytes=device.size_bytes,
        max_transfer_bytes=max(device.max_transfer_bytes, 1),
        device_index=device.device_index,
        memory_addr=memory,
    )


def _file_block(job: Job) -> int:
    """The largest block size that fits every block of the job and where it begins."""
    sizes = [job.offset.value if not job.offset.is_percent else 0, job.offset_increment.value]
    if job.size is not None and not job.size.is_percent:
        sizes.append(job.size.value)
    for way, has in enumerate(job.rw.has):
        if has:
            blocks = job.blocks[way]
            sizes += [blocks.low, blocks.align, *(size for size, _ in blocks.splits)]
    return next((size for size in FILE_BLOCK_SIZES if not any(each % size for each in sizes)), 512)


def buffer_stride(job: Job) -> int:
    """Bytes from one payload to the next: whole pages."""
    return -(-max(job.bs_high, 4096) // 4096) * 4096


def _commands_of(job: Job) -> int:
    return job.iodepth * (job.bs_high // (1 << 20) + 2)


def _arena_size(job: Job) -> int:
    return job.iodepth * buffer_stride(job)
