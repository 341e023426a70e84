"""What can go wrong with a call to SPDK: one class per way a caller acts, facts as attributes.

Messages name the peer, the method and the reason, never a parameter's value: parameters may be secrets.
"""

from __future__ import annotations

import errno as errno_module

ERROR_PARSE = -32700
ERROR_INVALID_REQUEST = -32600
ERROR_METHOD_NOT_FOUND = -32601
ERROR_INVALID_PARAMS = -32602
ERROR_INTERNAL = -32603
ERROR_INVALID_STATE = -1

# -1 is both "wrong state" and -EPERM; only the text tells them apart.
STATE_MESSAGE_PREFIX = "Method may only be called "


class SpdkRpcError(Exception):
    """Base of everything this package raises on purpose."""


class RpcUsageError(SpdkRpcError, ValueError):
    """The caller's mistake: an address that is none, a request that is too long or no JSON."""


class RpcTransportError(SpdkRpcError, OSError):
    """The connection could not be made or broke. ``is_fate_unknown``: the call may have taken effect."""

    def __init__(
        self, message: str, *, errno: int = 0, address: str = "", is_fate_unknown: bool = False
    ) -> None:
        # OSError's two-argument form would prefix "[Errno n]" to the text.
        super().__init__(message)
        self.errno = errno
        self.address = address
        self.is_fate_unknown = is_fate_unknown

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RpcTimeoutError(SpdkRpcError, TimeoutError):
    """No reply within the deadline; the call may still take effect. Its connection is closed."""

    def __init__(self, message: str, *, method: str, timeout_s: float, is_fate_unknown: bool = True) -> None:
        super().__init__(message)
        self.method = method
        self.timeout_s = timeout_s
        self.is_fate_unknown = is_fate_unknown

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RpcProtocolError(SpdkRpcError):
    """The peer's bytes are no JSON-RPC reply, or not of the shape the method promises."""


class RpcMethodError(SpdkRpcError):
    """The peer refused the call: ``code`` is JSON-RPC's (-32xxx) or a negative errno."""

    def __init__(self, method: str, code: int, message: str) -> None:
        super().__init__(f"{method}: {message} ({code})")
        self.method = method
        self.code = code
        self.message = message

    @property
    def errno(self) -> int:
        """The errno that the code stands for, 0 when it stands for none."""
        return -self.code if -self.code in errno_module.errorcode else 0


class RpcStateError(RpcMethodError):
    """The method may not be called in the framework's present state (before or after initialisation)."""

    @property
    def errno(self) -> int:
        return 0


class RpcUnsupportedError(RpcMethodError):
    """The running SPDK has no such method; ``version`` is what it calls itself."""

    def __init__(self, method: str, message: str, *, version: str, address: str) -> None:
        super().__init__(method, ERROR_METHOD_NOT_FOUND, message)
        self.version = version
        self.address = address

    def __str__(self) -> str:
        # What the peer says beyond SPDK's two words is its reason.
        reason = self.message.removeprefix("Method not found").lstrip(": ")
        text = f"{self.method}: {self.version} at {self.address} has no such method ({self.code})"
        return f"{text}: {reason}" if reason else text


def method_error(method: str, code: int, message: str) -> RpcMethodError:
    """The exception for an error reply; tells a wrong state from -EPERM, which share the code -1."""
    if code == ERROR_INVALID_STATE and message.startswith(STATE_MESSAGE_PREFIX):
        return RpcStateError(method, code, message)
    return RpcMethodError(method, code, message)
