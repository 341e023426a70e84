"""Exit codes: what each kind of error means to a shell.

Not here: the errors (``kvdev.errors``, ``spdk_rpc``, ``kvdev_kernels``).
"""

from __future__ import annotations

import enum
import errno
import os
import sys

from kvdev.errors import (
    AuthenticationError,
    CapacityError,
    CommandError,
    CorruptionError,
    DigestError,
    KvdevError,
    ProtocolError,
    TransportError,
    UnlabelledError,
    UnsupportedError,
    UsageError,
)


class ExitCode(enum.IntEnum):
    """The codes of every command; docs/cli.md lists them."""

    OK = 0
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    DATA_FAULT = 5
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


# The first class that matches decides: more specific ones come first.
_BY_CLASS: tuple[tuple[type[Exception], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (UnlabelledError, ExitCode.USAGE),
    (CorruptionError, ExitCode.DATA_FAULT),
    (DigestError, ExitCode.DATA_FAULT),
    (TransportError, ExitCode.UNREACHABLE),
    (AuthenticationError, ExitCode.REFUSED),
    (CommandError, ExitCode.REFUSED),
    (ProtocolError, ExitCode.REFUSED),
    (CapacityError, ExitCode.REFUSED),
    (UnsupportedError, ExitCode.REFUSED),
)


_REMEDIES = {
    errno.ENOMEM: "free some memory, or ask for less",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the disk quota, or free some space",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
}
_SHORT_OF = {errno.ENOMEM: "memory", errno.EMFILE: "descriptors", errno.ENFILE: "descriptors"}
_CHAIN_LENGTH_MAX = 16


def shortage_of(error: BaseException) -> str | None:
    """The line that names what this machine ran out of, if that is what the error comes from; else None.

    For errors that no layer translated: any allocation, open or write may meet these.
    """
    if isinstance(error, KvdevError):
        return None
    link: BaseException | None = error
    for _ in range(_CHAIN_LENGTH_MAX):
        if isinstance(link, MemoryError):
            return f"memory: {str(link) or 'none left'}; {_REMEDIES[errno.ENOMEM]}"
        if isinstance(link, OSError) and link.errno in _REMEDIES:
            where = link.filename or _SHORT_OF.get(link.errno, "output")
            return f"{where}: {os.strerror(link.errno)}; {_REMEDIES[link.errno]}"
        if isinstance(link, RuntimeError) and "start new thread" in str(link):
            return "threads: none can be started; free some memory, or raise `ulimit -u`"
        if isinstance(link, ImportError) and "failed to map segment" in str(link):
            return f"memory: {link}; {_REMEDIES[errno.ENOMEM]}"
        if link is None:
            return None
        link = link.__cause__ or link.__context__
    return None


def exit_code_of(error: Exception) -> ExitCode:
    """The code for an exception; BUG for whatever no layer meant to raise."""
    for kind, code in _BY_CLASS:
        if isinstance(error, kind):
            return code
    if isinstance(error, KvdevError) or shortage_of(error) is not None:
        return ExitCode.REFUSED
    # Imported only where they are loaded already: an error of theirs means that, and most commands need neither.
    if "spdk_rpc" in sys.modules:
        import spdk_rpc

        if isinstance(error, spdk_rpc.RpcUsageError):
            return ExitCode.USAGE
        if isinstance(error, (spdk_rpc.RpcTransportError, spdk_rpc.RpcTimeoutError)):
            return ExitCode.UNREACHABLE
        if isinstance(error, spdk_rpc.SpdkRpcError):
            return ExitCode.REFUSED
    if "kvdev_kernels" in sys.modules:
        from kvdev_kernels.errors import BackendUnavailableError

        if isinstance(error, BackendUnavailableError):
            return ExitCode.USAGE
    return ExitCode.BUG
