"""Temporary folders of commands: gone when the command ends, and where it was killed, at the next one's start.

A folder is its owner's as long as that holds the lock in it; the kernel takes the lock back whatever ends the
process, and unlike a process id it means the same in every container that shares the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvdev.errors import UsageError
from kvdev.files import open_lock

PREFIX = "kvdev-replay-"
LOCK_NAME = "owner"
_ATTEMPT_COUNT_MAX = 16
"""A folder is lost only to a sweep that comes between its making and its lock."""
_SWEEP_COUNT_MAX = 256
"""Folders that one start looks at: the rest is left to the next."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of our own; those that killed commands left are removed first. UsageError where none can be made."""
    sweep()
    try:
        folder, lock = _make()
    except OSError as error:
        raise UsageError(
            f"temporary folder: {error.filename or tempfile.gettempdir()}: {error.strerror}; "
            f"free some space there, or set TMPDIR to a folder that can be written"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of ours whose owner is gone; what cannot be looked at or removed stays."""
    parent = Path(tempfile.gettempdir())
    for folder in itertools.islice(sorted(parent.glob(f"{PREFIX}*")), _SWEEP_COUNT_MAX):
        with contextlib.suppress(OSError):
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    # Another user's folder, or a link to elsewhere, is none of ours.
    if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
        return
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _make() -> tuple[Path, int]:
    for _ in range(_ATTEMPT_COUNT_MAX):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        folder.chmod(0o700)  # whatever the umask
        lock = open_lock(folder / LOCK_NAME, os.O_EXCL)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return folder, lock
        os.close(lock)
    raise OSError(0, "other commands take every folder away", tempfile.gettempdir())
