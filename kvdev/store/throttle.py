"""A rate for reading in the background: how long to wait so that so many bytes a second are not exceeded.

Not here: limits on demand I/O (``kvdev.target``).
"""

from __future__ import annotations

import threading

from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Clock
from kvdev.errors import UsageError


class Throttle:
    """Keeps reading at or below a rate; time that was not used is not made up for."""

    def __init__(self, bytes_per_s: int | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if bytes_per_s is not None and bytes_per_s < 1:
            raise UsageError(f"bytes_per_s: expected at least 1, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._due_ns = clock.monotonic_ns()

    def count(self, size_bytes: int) -> float:
        """Note bytes that were read; how many seconds to wait before the next."""
        if self.bytes_per_s is None:
            return 0.0
        now_ns = self._clock.monotonic_ns()
        self._due_ns = max(self._due_ns, now_ns) + size_bytes * NS_PER_S // self.bytes_per_s
        return (self._due_ns - now_ns) / NS_PER_S

    def pace(self, size_bytes: int, stopped: threading.Event) -> bool:
        """``count``, and wait; True when ``stopped`` was set meanwhile."""
        return stopped.wait(self.count(size_bytes)) if self.bytes_per_s is not None else stopped.is_set()
