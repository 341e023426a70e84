"""How a controller is used: queue counts, digests, recovery and the bounds of every wait.

Not here: which controller (``kvdev.uri``), which host (``host``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvdev.errors import UsageError
from kvdev.native.queue import PathPolicy
from kvdev.security.chap import DH_GROUPS_DEFAULT, HASHES_DEFAULT
from kvdev.uri import DigestPolicy, KeySource
from kvdev.wire.auth import DhGroupId, HashId

IO_QUEUE_COUNT_MAX = 16
"""Queue pairs that one namespace is spread over."""
QUEUE_DEPTH_MAX = 4095
"""A CID has 12 bits of slot beside its generation, and one submission queue slot stays empty."""
KATO_MS_MAX = 600_000
TIMEOUT_S_MAX = 3600.0
RECOVERY_S_MAX = 86_400.0
RETRY_COUNT_MAX = 255


class LostWrites(enum.Enum):
    """What becomes of a write that was sent and whose connection is lost."""

    RETRY = "retry"
    """It is sent again once nothing of the old association can take effect any more (Base 9.6.2)."""
    REPORT = "report"
    """It ends at once with UncertainWriteError; its blocks must not be used before that time."""


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """Values are checked on construction; times are upper bounds.

    ``queue_depth`` counts commands in flight on one I/O queue pair; the controller may allow fewer.
    ``command_timeout_s`` bounds one I/O command, after which its queue pair is given up.
    ``disable_sq_flow_control`` asks for completions without SQHD, which lets the controller end a read with
    its last data PDU. ``window_size_bytes`` is the payload kept in flight on one queue pair.

    Recovery, with the names and defaults of Linux; a timeout of -1 is off, for ever. After a loss a path is
    connected again at once, then after waits that double up to ``reconnect_delay_s``; it is given up after
    ``ctrl_loss_tmo_s`` (0: at once, no reconnect). Commands of a namespace without a usable path wait for
    ``fast_io_fail_tmo_s``, or for ``ctrl_loss_tmo_s`` when that is off. Where they are on,
    reconnect_delay <= fast_io_fail <= ctrl_loss.

    ``retry_count`` bounds how often a command is sent again after an error status or its time limit.
    ``fence_wait_s`` replaces the wait of Base 9.6.2 before lost writes are sent again; ``cqt_default_s`` is
    the last part of it for controllers that report no CQT. With ``is_peer_close_trusted`` a connection that
    the controller closes is taken to mean that it has noticed, which a middlebox can fake.
    ``is_cache_shared``: the controllers of a subsystem share its volatile cache, if it has one.

    ``dhchap_key`` is where this host's secret is kept, ``dhchap_ctrl_key`` the subsystem's: with the latter a
    controller that does not prove to have it is refused. Both are read at each connect. ``dhchap_digests`` and
    ``dhchap_dhgroups`` are what this host agrees to, in its order of preference. ``tls_psk`` is where the key
    of TLS is kept: with it connections are encrypted, or not made.
    """

    kato_ms: int = 10_000
    io_queue_count: int = 1
    queue_depth: int = 128
    header_digest: DigestPolicy = DigestPolicy.OFF
    data_digest: DigestPolicy = DigestPolicy.OFF
    connect_timeout_s: float = 10.0
    command_timeout_s: float = 30.0
    admin_timeout_s: float = 10.0
    shutdown_timeout_s: float = 5.0
    disable_sq_flow_control: bool = True
    window_size_bytes: int = 1 << 20
    reconnect_delay_s: float = 10.0
    ctrl_loss_tmo_s: float = 600.0
    fast_io_fail_tmo_s: float = -1
    retry_count: int = 5
    path_policy: PathPolicy = PathPolicy.ACTIVE_PASSIVE
    lost_writes: LostWrites = LostWrites.RETRY
    fence_wait_s: float | None = None
    cqt_default_s: float = 10.0
    is_peer_close_trusted: bool = False
    is_cache_shared: bool = True
    dhchap_key: KeySource | None = None
    dhchap_ctrl_key: KeySource | None = None
    tls_psk: KeySource | None = None
    dhchap_digests: tuple[HashId, ...] = HASHES_DEFAULT
    dhchap_dhgroups: tuple[DhGroupId, ...] = DH_GROUPS_DEFAULT

    @property
    def fail_after_s(self) -> float | None:
        """How long commands wait for a usable path; None for ever."""
        if self.fast_io_fail_tmo_s >= 0:
            return self.fast_io_fail_tmo_s
        return self.ctrl_loss_tmo_s if self.ctrl_loss_tmo_s >= 0 else None

    def __post_init__(self) -> None:
        _check_int("kato_ms", self.kato_ms, 1, KATO_MS_MAX)
        _check_int("io_queue_count", self.io_queue_count, 1, IO_QUEUE_COUNT_MAX)
        _check_int("queue_depth", self.queue_depth, 1, QUEUE_DEPTH_MAX)
        _check_int("window_size_bytes", self.window_size_bytes, 4096, 1 << 30)
        for name in ("header_digest", "data_digest"):
            if not isinstance(getattr(self, name), DigestPolicy):
                raise UsageError(f"{name}: expected require, prefer or off, got {getattr(self, name)!r}")
        for name in ("connect_timeout_s", "command_timeout_s", "admin_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value <= TIMEOUT_S_MAX
            ):
                raise UsageError(
                    f"{name}: expected more than 0 and at most {TIMEOUT_S_MAX:g} s, got {value!r}"
                )
        self._check_recovery()
        self._check_authentication()

    def _check_authentication(self) -> None:
        if self.dhchap_ctrl_key is not None and self.dhchap_key is None:
            raise UsageError("dhchap_ctrl_key: expected a dhchap_key as well: the host authenticates first")
        for name, kind in (("dhchap_digests", HashId), ("dhchap_dhgroups", DhGroupId)):
            values = getattr(self, name)
            if not values or not all(isinstance(each, kind) for each in values):
                names = ", ".join(each.name.lower() for each in kind)
                raise UsageError(f"{name}: expected one or more of {names}, got {values!r}")

    def _check_recovery(self) -> None:
        _check_int("retry_count", self.retry_count, 0, RETRY_COUNT_MAX)
        for name, kind in (("path_policy", PathPolicy), ("lost_writes", LostWrites)):
            if not isinstance(getattr(self, name), kind):
                names = " or ".join(each.value for each in kind)
                raise UsageError(f"{name}: expected {names}, got {getattr(self, name)!r}")
        _check_seconds("reconnect_delay_s", self.reconnect_delay_s)
        _check_seconds("ctrl_loss_tmo_s", self.ctrl_loss_tmo_s, off=-1)
        _check_seconds("fast_io_fail_tmo_s", self.fast_io_fail_tmo_s, off=-1)
        _check_seconds("cqt_default_s", self.cqt_default_s)
        _check_seconds("fence_wait_s", self.fence_wait_s, off=None)
        if self.reconnect_delay_s == 0:
            raise UsageError(
                "reconnect_delay_s: expected more than 0 s; ctrl_loss_tmo_s=0 turns reconnecting off"
            )
        fast, loss = self.fast_io_fail_tmo_s, self.ctrl_loss_tmo_s
        if fast > loss >= 0:
            raise UsageError(
                f"fast_io_fail_tmo_s: expected at most ctrl_loss_tmo_s {loss:g} s, got {fast:g} s"
            )
        for name, value in (("fast_io_fail_tmo_s", fast), ("ctrl_loss_tmo_s", loss)):
            if 0 < value < self.reconnect_delay_s:
                raise UsageError(
                    f"{name}: expected at least reconnect_delay_s {self.reconnect_delay_s:g} s, got {value:g} s"
                )


def _check_seconds(name: str, value: object, *, off: float | None = 0) -> None:
    """``off`` is a value besides 0 and more that is allowed."""
    if value == off and not isinstance(value, bool):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= RECOVERY_S_MAX:
        never = ", or -1 for never" if off == -1 else ""
        raise UsageError(f"{name}: expected 0 to {RECOVERY_S_MAX:g} s{never}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name}: expected {low} to {high}, got {value!r}")
