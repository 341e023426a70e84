"""Exit codes: what each kind of error means to a shell.

Not here: the errors (``kvdev.errors``, ``spdk_rpc``, ``kvdev_kernels``).
"""

from __future__ import annotations

import enum
import sys

from kvdev.errors import (
    CapacityError,
    CommandError,
    CorruptionError,
    DigestError,
    KvdevError,
    ProtocolError,
    TransportError,
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
    (CorruptionError, ExitCode.DATA_FAULT),
    (DigestError, ExitCode.DATA_FAULT),
    (TransportError, ExitCode.UNREACHABLE),
    (CommandError, ExitCode.REFUSED),
    (ProtocolError, ExitCode.REFUSED),
    (CapacityError, ExitCode.REFUSED),
    (UnsupportedError, ExitCode.REFUSED),
)


def exit_code_of(error: Exception) -> ExitCode:
    """The code for an exception; BUG for whatever no layer meant to raise."""
    for kind, code in _BY_CLASS:
        if isinstance(error, kind):
            return code
    if isinstance(error, KvdevError):
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
