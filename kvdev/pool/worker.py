"""What a client has been granted, and what becomes of it when the client goes away.

A process that is gone may have writes under way: its slots rest until its devices cannot let them land any more. A
process that lives and has only lost its connection may write on: they rest as long as it lives.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field

import numpy as np

from kvdev.clock import NS_PER_S, SYSTEM_CLOCK
from kvdev.native.index import GRANT_DTYPE, GrantArray

SETTLE_S_MIN = 1.0
"""After the end of a process the kernel may still run what it had given to a device of this host."""


class ClientProcess:
    """The process behind a connection, and whether it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.dead_ns = 0
        try:
            self._pidfd = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            self._pidfd, self.dead_ns = -1, SYSTEM_CLOCK.monotonic_ns()
        except OSError:
            self._pidfd = -1

    @property
    def is_dead(self) -> bool:
        """True only when it is certain: a process of another PID namespace cannot be observed."""
        if self.dead_ns:
            return True
        if self._pidfd >= 0:
            waiter = select.poll()
            waiter.register(self._pidfd, select.POLLIN)
            if waiter.poll(0):
                self.dead_ns = SYSTEM_CLOCK.monotonic_ns()
        return self.dead_ns != 0

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@dataclass
class Granted:
    """Slots that one client may write, by their generation."""

    slots: dict[int, int] = field(default_factory=dict)

    def add(self, grants: GrantArray) -> None:
        self.slots.update(zip(grants["slot_index"].tolist(), grants["generation"].tolist(), strict=True))

    def holds(self, grants: GrantArray) -> bool:
        """Whether all of them are this client's, each once."""
        pairs = list(zip(grants["slot_index"].tolist(), grants["generation"].tolist(), strict=True))
        return len(set(pairs)) == len(pairs) and all(self.slots.get(slot) == number for slot, number in pairs)

    def remove(self, grants: GrantArray) -> None:
        for slot in grants["slot_index"].tolist():
            self.slots.pop(slot, None)

    def take_all(self) -> GrantArray:
        grants = np.zeros(len(self.slots), dtype=GRANT_DTYPE)
        grants["slot_index"] = list(self.slots)
        grants["generation"] = list(self.slots.values())
        self.slots.clear()
        return grants


@dataclass
class Orphans:
    """Grants of a client that went away without giving them back."""

    process: ClientProcess
    grants: GrantArray
    settle_s: float

    @property
    def is_settled(self) -> bool:
        """Whether nothing can be written under them any more."""
        if not self.process.is_dead:
            return False
        return SYSTEM_CLOCK.monotonic_ns() >= self.process.dead_ns + int(self.settle_s * NS_PER_S)
