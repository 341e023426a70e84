"""The exceptions of kvdev: one class per way a caller acts, facts as attributes.

Not here: SPDK's RPC errors (``spdk_rpc``); kernel errors (``kvdev_kernels``).
"""

from __future__ import annotations


class KvdevError(Exception):
    """Base of everything kvdev raises on purpose."""


class UsageError(KvdevError, ValueError):
    """The caller broke the contract: a wrong argument, flag, file or format."""


class ProtocolError(KvdevError):
    """The peer broke NVMe/TCP; the queue pair it happened on is dead."""


class MalformedPduError(ProtocolError):
    """One header is invalid; carries what an H2CTermReq or C2HTermReq reports."""

    def __init__(self, message: str, *, field: str, field_offset: int, fes: int) -> None:
        super().__init__(message)
        self.field = field
        self.field_offset = field_offset
        self.fes = fes


class DigestError(ProtocolError):
    """A header or data digest does not match what it covers."""

    def __init__(self, message: str, *, expected: int, actual: int) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class SequenceError(ProtocolError):
    """A legal PDU in a state that does not allow it."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class TransportError(KvdevError, OSError):
    """The way to the peer failed; ``trid`` names the peer."""

    def __init__(self, message: str, *, errno: int = 0, trid: str = "") -> None:
        # OSError's two-argument form sets errno and would prefix "[Errno n]" to the text.
        super().__init__(message)
        self.errno = errno
        self.trid = trid

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConnectError(TransportError):
    """The connection could not be made."""


class ConnectionLostError(TransportError):
    """The connection broke; commands outstanding on it have an unknown fate."""


class UncertainWriteError(TransportError):
    """A write was sent and its connection lost: it may take effect, now or until its controller is fenced.

    From a flush: writes that had completed may be lost with the cache of a controller that went away.
    """


class DeadlineError(TransportError, TimeoutError):
    """A bounded wait ended first."""

    def __init__(self, message: str, *, operation: str, elapsed_ms: float = 0.0, trid: str = "") -> None:
        super().__init__(message, trid=trid)
        self.operation = operation
        self.elapsed_ms = elapsed_ms


class CommandError(KvdevError):
    """The controller completed a command with an error status (Base specification 4.2.3)."""

    def __init__(
        self,
        message: str,
        *,
        opcode: int,
        sct: int,
        sc: int,
        dnr: bool = False,
        nsid: int = 0,
        slba: int = 0,
    ) -> None:
        super().__init__(message)
        self.opcode = opcode
        self.sct = sct
        self.sc = sc
        self.dnr = dnr
        self.nsid = nsid
        self.slba = slba

    @property
    def is_retryable(self) -> bool:
        """Whether the same command may succeed later: the Do Not Retry bit is clear."""
        return not self.dnr


class LeaseLostError(KvdevError):
    """Another owner took a KV namespace over: nothing that this one does counts any more; open it anew."""


class AuthenticationError(KvdevError):
    """One side could not prove who it is; ``reason`` is the specification's word for why.

    ``is_ours``: this side found the fault. No secret and no message's content is in the text.
    """

    def __init__(self, message: str, *, reason: str, is_ours: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_ours = is_ours


class CorruptionError(KvdevError):
    """Stored bytes fail their checksum, or a structure on media contradicts itself."""

    def __init__(self, message: str, *, extent: object = None, expected: int = 0, actual: int = 0) -> None:
        super().__init__(message)
        self.extent = extent
        self.expected = expected
        self.actual = actual


class UnlabelledError(CorruptionError):
    """A device has no label of a volume at all: most likely it is the wrong one, or none was made on it yet."""


class CapacityError(KvdevError):
    """No extent, slot, lease or page is left."""


class QueueFullError(CapacityError):
    """Back pressure: poll, then submit again."""


class UnsupportedError(KvdevError):
    """A feature that the peer or this build lacks."""

    def __init__(self, message: str, *, feature: str) -> None:
        super().__init__(message)
        self.feature = feature
