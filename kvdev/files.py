"""Files that people name and that we keep: opened without waiting, made with their mode whatever the umask.

Not here: devices and their files (``kvdev.block``, ``kvdev.target``); what a file's text means (who reads it).
Trust: what is read is untrusted; raises only OSError, whose ``strerror`` is for the caller's line of error.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

PathLike = str | os.PathLike[str]

LOCK_MODE = 0o600

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: PathLike) -> BinaryIO:
    """Open a regular file to be read; anything else is refused: of a pipe that nobody writes nothing would come."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: PathLike, size_limit_bytes: int) -> bytes:
    """The content of a regular file; one byte more than the limit says that there is more."""
    with open_regular(path) as file:
        return file.read(size_limit_bytes + 1)


def open_kept(path: PathLike, flags: int, *, mode: int = 0o600) -> int:
    """A descriptor of a new file, or of an old one of ours that is written anew, for its owner to read again.

    ``flags`` are added to writing and making it. The umask takes nothing away from ``mode``: under 0777 its owner
    could not read it any more.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, mode)
    try:
        os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_lock(path: PathLike, flags: int = 0) -> int:
    """A descriptor of a file to be locked, and to be written by whoever has it; made with mode 0600 whatever the umask.

    One of ours with another mode is given this one: an umask of 0777 would keep its owner out for ever.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, LOCK_MODE)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != LOCK_MODE:
            os.fchmod(descriptor, LOCK_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
