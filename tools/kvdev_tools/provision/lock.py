"""One apply at a time: a lock beside the RPC socket of every process that would be changed.

Beside the socket, so that containers that share it and users of the same machine exclude each other. Over TCP the
lock is this user's on this machine only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvdev.errors import UsageError
from kvdev.files import open_lock
from kvdev.store.lock import runtime_folder
from kvdev_tools.provision.document import Deployment
from spdk_rpc import parse_address


def lock_path(rpc: str) -> Path:
    """The lock file of a process, whatever way its socket's path is written."""
    address = parse_address(rpc)
    if isinstance(address, str):
        return Path(os.path.realpath(address) + ".provision.lock")
    key = hashlib.sha256(f"{address[0]}:{address[1]}".encode()).hexdigest()[:16]
    return runtime_folder() / f"provision-{key}.lock"


@contextlib.contextmanager
def locked(deployment: Deployment) -> Iterator[None]:
    """Hold the locks of all processes of the file, or raise UsageError naming who holds one."""
    with contextlib.ExitStack() as stack:
        # In one order, so that two applies never hold one lock each and both fail.
        for path in sorted({lock_path(endpoint.rpc) for endpoint in deployment.endpoints}):
            stack.enter_context(_locked(path))
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        fd = open_lock(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot lock: {error.strerror}; run as the user of that SPDK") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise UsageError(
                f"{path}: another provision apply or destroy is running, process {holder}; wait for it"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
