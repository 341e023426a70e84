"""How a controller is used: queue counts, digests and the bounds of every wait.

Not here: which controller (``kvdev.uri``), which host (``host``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdev.errors import UsageError
from kvdev.uri import DigestPolicy

IO_QUEUE_COUNT_MAX = 16
"""Queue pairs that one namespace is spread over."""
QUEUE_DEPTH_MAX = 4095
"""A CID has 12 bits of slot beside its generation, and one submission queue slot stays empty."""
KATO_MS_MAX = 600_000
TIMEOUT_S_MAX = 3600.0


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """Values are checked on construction; times are upper bounds.

    ``queue_depth`` counts commands in flight on one I/O queue pair; the controller may allow fewer.
    ``command_timeout_s`` bounds one I/O command, after which its queue pair is given up.
    ``disable_sq_flow_control`` asks for completions without SQHD, which lets the controller end a read with
    its last data PDU. ``window_size_bytes`` is the payload kept in flight on one queue pair.
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


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name}: expected {low} to {high}, got {value!r}")
