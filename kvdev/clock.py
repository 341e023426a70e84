"""Monotonic time and deadlines: every wait in kvdev is bounded by a ``Deadline``.

Not here: waiting itself (pollers and conditions do it).
"""

from __future__ import annotations

import time
from typing import Protocol

from kvdev.errors import DeadlineError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """A source of monotonic time; tests pass a simulated one."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""


class MonotonicClock:
    """CLOCK_MONOTONIC, the same clock the C core stamps completions with."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


SYSTEM_CLOCK: Clock = MonotonicClock()


class BootClock:
    """CLOCK_BOOTTIME: goes on while the machine is suspended, as what other hosts measure does."""

    def monotonic_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


BOOT_CLOCK: Clock = BootClock()


def unix_time_s() -> int:
    """Seconds since 1970 by this host's clock: for people to read, and for pages that are to go by their age."""
    return time.time_ns() // NS_PER_S


class Deadline:
    """A point in monotonic time after which a wait must end."""

    def __init__(self, expires_ns: int, *, started_ns: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.expires_ns = expires_ns
        self.started_ns = started_ns
        self.clock = clock

    @classmethod
    def after(cls, seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        now_ns = clock.monotonic_ns()
        return cls(now_ns + int(seconds * NS_PER_S), started_ns=now_ns, clock=clock)

    @property
    def is_expired(self) -> bool:
        return self.clock.monotonic_ns() >= self.expires_ns

    def remaining_ns(self) -> int:
        """Nanoseconds left, 0 when expired."""
        return max(0, self.expires_ns - self.clock.monotonic_ns())

    def remaining_s(self) -> float:
        return self.remaining_ns() / NS_PER_S

    def elapsed_ms(self) -> float:
        return (self.clock.monotonic_ns() - self.started_ns) / NS_PER_MS

    def check(self, operation: str, *, trid: str = "") -> None:
        """Raise DeadlineError naming the operation when the time is over."""
        if self.is_expired:
            limit_s = (self.expires_ns - self.started_ns) / NS_PER_S
            where = f"{trid}: " if trid else ""
            raise DeadlineError(
                f"{where}{operation}: no end within {limit_s:g} s",
                operation=operation,
                elapsed_ms=self.elapsed_ms(),
                trid=trid,
            )
