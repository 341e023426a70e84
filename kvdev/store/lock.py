"""Locks of one host: who owns a KV namespace, who changes a volume, who uses the devices under them.

An open-file-description lock on a file in a per-user folder, named after the UUID and holding the
owner's pid; on file members a lock on the file itself too, so that another user is excluded as well, and so that
writes of a process that was killed have ended before there is a next owner.
Whoever holds one also shares the devices; making a volume takes them for itself alone.
Not here: fencing of other hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from kvdev.block.device import BlockDevice
from kvdev.block.file import FileDevice
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.files import open_lock

_FLOCK = struct.Struct("hhqqi4x")
LINGER_S = 1.0
"""A killed process holds the locks of its member files until the kernel has ended its operations: normally moments."""
LINGER_PAUSE_S = 0.01
MEMBER_LOCK_OFFSET = 1 << 62
"""Locks on a member file lie far past its end, so that they meet nobody's lock on its bytes."""

WRITER_LOCK_OFFSET = (1 << 62) + (1 << 20)
"""Of those who write under grants, a byte for each KV namespace."""


class LockHeldError(UsageError):
    """Another process owns it; ``pid`` is 0 when it cannot be told."""

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


def runtime_folder() -> Path:
    """The per-user folder of lock files; made with mode 0700, refused when somebody else owns it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    user_id = os.getuid()
    folder = Path(base) / "kvdev" if base else Path("/tmp") / f"kvdev-{user_id}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)  # whatever the umask
        status = folder.lstat()
    except OSError as failure:
        raise UsageError(f"lock folder {folder}: {os.strerror(failure.errno or 0)}") from failure
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user_id:
        raise UsageError(f"lock folder {folder}: expected a folder of user {user_id}; set XDG_RUNTIME_DIR")
    return folder


class _Locks:
    """Lock files and bytes of member files, held until ``release``, or until nobody has this object any more."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        # The device, not its descriptor: that number is another file's once the device has been closed.
        self._member_locks: list[tuple[FileDevice, int, int]] = []

    def __del__(self) -> None:
        self.release()

    def _lock_file(self, what: str, key: str, *, kind: int, verb: str) -> None:
        path = runtime_folder() / f"{key}.lock"
        try:
            fd = open_lock(path)
        except OSError as failure:
            raise UsageError(f"lock {path}: {os.strerror(failure.errno or 0)}") from failure
        try:
            if not _try_lock(fd, kind, 0):
                pid = _holder(fd)
                name = f"process {pid}" if pid else "a process"
                raise LockHeldError(f"{what}: is {verb} {name} of this host; stop it first", pid=pid)
            if kind == fcntl.F_WRLCK or not _holder(fd):  # of those who share it, the first is named
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as failure:
            os.close(fd)
            if isinstance(failure, UsageError):
                raise
            raise UsageError(f"lock {path}: {os.strerror(failure.errno or 0)}") from failure
        except BaseException:
            os.close(fd)
            raise
        self._fds.append(fd)

    def _lock_member(self, what: str, member: FileDevice, offset: int, size_bytes: int = 1) -> None:
        kind = fcntl.F_RDLCK if member.is_read_only else fcntl.F_WRLCK
        if not _lock_soon(member.fd, kind, offset, size_bytes):
            raise LockHeldError(
                f"{what}: {member.uri} is locked by another process of this host; stop it first", pid=0
            )
        self._member_locks.append((member, offset, size_bytes))

    def release(self) -> None:
        """Give the locks back; twice does nothing."""
        for member, offset, size_bytes in self._member_locks:
            if member.fd >= 0:  # else closing it has released the lock
                _try_lock(member.fd, fcntl.F_UNLCK, offset, size_bytes)
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._member_locks.clear()


class OwnerLock(_Locks):
    """Holds the locks of one thing from construction until ``release``."""

    def __init__(self, what: str, key: str, *, members: Sequence[BlockDevice] = (), byte: int = 0) -> None:
        """Take them, or raise LockHeldError naming the holder.

        Args:
            what: how messages call the thing.
            key: its UUID, names the lock file.
            byte: which of a member file's lock bytes stands for it.
        """
        super().__init__()
        try:
            self._lock_file(what, key, kind=fcntl.F_WRLCK, verb="owned by")
            for member in members:
                if isinstance(member, FileDevice):
                    self._lock_member(what, member, MEMBER_LOCK_OFFSET + byte)
                elif not isinstance(member, MemoryDevice):
                    self._lock_file(member.uri, device_key(member), kind=fcntl.F_RDLCK, verb="in use by")
        except BaseException:
            self.release()
            raise


class WriterLock:
    """Shared by the processes that write under an owner's grants, each as long as it has any.

    The next owner writes nothing while one is held: a slot that looks free may be written under an old grant.
    """

    def __init__(self, key: str, *, members: Sequence[BlockDevice], byte: int) -> None:
        """Nothing is held yet."""
        self._path = runtime_folder() / f"{key}.lock"
        self._members = [member for member in members if isinstance(member, FileDevice)]
        self._byte = WRITER_LOCK_OFFSET + byte
        self._fd = -1

    def take(self) -> bool:
        """False while a next owner looks; nothing is held then."""
        self._fd = self._open()
        places = [(self._fd, 0), *((member.fd, self._byte) for member in self._members)]
        if all(_try_lock(fd, fcntl.F_RDLCK, offset) for fd, offset in places):
            return True
        self.drop()
        return False

    def drop(self) -> None:
        """Everything written has ended; twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            for member in self._members:
                if member.fd >= 0:
                    _try_lock(member.fd, fcntl.F_UNLCK, self._byte)

    def is_held_elsewhere(self) -> bool:
        """Whether another process, or another opening of the devices, holds it."""
        fd = self._open()
        try:
            is_free = _try_lock(fd, fcntl.F_WRLCK, 0)
            for member in self._members if is_free else ():
                is_free = is_free and _try_lock(member.fd, fcntl.F_WRLCK, self._byte)
                _try_lock(member.fd, fcntl.F_UNLCK, self._byte)
            return not is_free
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            return open_lock(self._path)
        except OSError as failure:
            raise UsageError(f"lock {self._path}: {os.strerror(failure.errno or 0)}") from failure


class DevicesLock(_Locks):
    """Devices for oneself alone: nobody on this host owns a KV namespace on them, or changes their volume."""

    def __init__(self, devices: Sequence[BlockDevice], *, byte_count: int) -> None:
        """Take them, or raise LockHeldError naming device and holder.

        Args:
            byte_count: how many lock bytes of a member file stand for something.
        """
        super().__init__()
        try:
            for device in devices:
                if isinstance(device, FileDevice):
                    self._lock_member("volume", device, MEMBER_LOCK_OFFSET, byte_count)
                elif not isinstance(device, MemoryDevice):  # nobody else has that memory
                    self._lock_file(device.uri, device_key(device), kind=fcntl.F_WRLCK, verb="in use by")
        except BaseException:
            self.release()
            raise


def device_key(device: BlockDevice) -> str:
    """Names a device's lock file: the same whichever path leads to it, when the device has an identifier."""
    identity = device.identity
    mark = identity.nguid or identity.uuid or identity.eui64 or (device.lock_name or device.uri).encode()
    return f"device-{hashlib.sha256(mark).hexdigest()[:32]}"


def _holder(fd: int) -> int:
    """The process that a lock file names, 0 when there is no such one."""
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    pid = int(text) if text.isdecimal() and text.isascii() else 0
    return pid if pid and start_ticks(pid) is not None else 0


def _try_lock(fd: int, kind: int, offset: int, size_bytes: int = 1) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, size_bytes, 0))
    except OSError as refusal:
        if refusal.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _lock_soon(fd: int, kind: int, offset: int, size_bytes: int) -> bool:
    """As ``_try_lock``, with time for the operations of a process that has just died."""
    deadline = Deadline.after(LINGER_S)
    pause = threading.Event()
    while not _try_lock(fd, kind, offset, size_bytes):
        if deadline.is_expired:
            return False
        pause.wait(LINGER_PAUSE_S)
    return True


@functools.cache
def boot_id() -> bytes:
    """16 bytes that change with every boot of this host; zero when the kernel does not tell."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): field 22; the command in field 2 may hold blanks and parentheses.
    return int(text.rpartition(")")[2].split()[19])
