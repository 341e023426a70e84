"""TLS below NVMe/TCP connections: the pump that holds their sockets, and the keys of hosts and listeners.

Not here: how a key is made (``kvdev.security.psk``). libssl is opened by the core, when the first pump is made.
Threads: any. A pump outlives the contexts made with it; connections outlive both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdev._core import ffi, lib
from kvdev.errors import UnsupportedError, UsageError

SUITE_AES_128_GCM_SHA256 = 1
SUITE_AES_256_GCM_SHA384 = 2
_STATE_NAMES = {0: "handshake", 1: "open", 2: "closed"}


@dataclass(frozen=True)
class TlsKey:
    """One pre-shared key of TLS 1.3; ``tag`` is the caller's name for it, not 0."""

    identity: str
    psk: bytes = field(repr=False)
    suite: int
    tag: int = 1

    def _values(self) -> dict[str, Any]:
        identity = self.identity.encode()
        if not 0 < len(identity) < lib.KVDEV_TLS_IDENTITY_MAX or b"\0" in identity:
            raise UsageError(
                f"tls key: identity: expected 1 to {lib.KVDEV_TLS_IDENTITY_MAX - 1} bytes, got {len(identity)}"
            )
        return {
            "identity": identity,
            "psk": list(self.psk),
            "psk_len": len(self.psk),
            "suite": self.suite,
            "tag": self.tag,
        }


@dataclass(frozen=True)
class TlsInfo:
    """How the TLS below a connection stands."""

    state: str
    tag: int
    is_version_refused: bool
    """The other side does not speak TLS 1.3: most likely no TLS at all."""
    error: str


def info_from_core(raw: Any) -> TlsInfo:
    return TlsInfo(
        state=_STATE_NAMES[raw.state],
        tag=int(raw.tag),
        is_version_refused=bool(raw.is_version_refused),
        error=ffi.string(raw.error).decode("ascii", "replace"),
    )


class TlsPump:
    """The thread that encrypts for all connections of one host or target."""

    def __init__(self) -> None:
        """Raises UnsupportedError where this machine has no OpenSSL 3."""
        out = ffi.new("struct kvdev_tls_pump **")
        code = lib.kvdev_tls_pump_create(out)
        if code == -errno.ENOSYS:
            raise UnsupportedError(
                "tls: this machine has no libssl.so.3: install OpenSSL 3 (Debian: libssl3)", feature="TLS"
            )
        if code:
            raise OSError(-code, f"tls: {os.strerror(-code)}")
        self.raw: Any = ffi.gc(out[0], lib.kvdev_tls_pump_destroy)

    def close(self) -> None:
        """End the thread and its connections; closing twice does nothing."""
        raw, self.raw = self.raw, None
        if raw is not None:
            ffi.release(raw)


class TlsHost:
    """What one host offers to one subsystem: a key."""

    def __init__(self, pump: TlsPump, key: TlsKey) -> None:
        out = ffi.new("struct kvdev_tls_context **")
        code = lib.kvdev_tls_host_create(pump.raw, ffi.new("struct kvdev_tls_psk *", key._values()), out)
        if code:
            raise OSError(-code, f"tls: {os.strerror(-code)}")
        self._pump = pump
        self.raw: Any = ffi.gc(out[0], lib.kvdev_tls_context_destroy)

    def close(self) -> None:
        """Connections under way keep what they need; closing twice does nothing."""
        raw, self.raw = self.raw, None
        if raw is not None:
            ffi.release(raw)


class TlsListener:
    """What listeners of one target accept: the keys of its hosts."""

    def __init__(self, pump: TlsPump) -> None:
        out = ffi.new("struct kvdev_tls_context **")
        code = lib.kvdev_tls_listener_create(pump.raw, out)
        if code:
            raise OSError(-code, f"tls: {os.strerror(-code)}")
        self._pump = pump
        self.raw: Any = ffi.gc(out[0], lib.kvdev_tls_context_destroy)

    def set_keys(self, keys: Sequence[TlsKey]) -> None:
        """The keys from now on; connections that are open stay."""
        array = ffi.new("struct kvdev_tls_psk[]", [key._values() for key in keys]) if keys else ffi.NULL
        code = lib.kvdev_tls_listener_set(self.raw, array, len(keys))
        if code:
            raise OSError(-code, f"tls: keys: {os.strerror(-code)}")

    def close(self) -> None:
        """To be called when no listener uses it any more; closing twice does nothing."""
        raw, self.raw = self.raw, None
        if raw is not None:
            ffi.release(raw)
