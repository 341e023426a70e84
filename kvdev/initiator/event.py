"""What a host hears of a subsystem without having asked, as values for whoever wants to know.

Not here: acting on it (``subsystem``, ``path``).
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass

from kvdev.clock import Deadline

EVENT_COUNT_MAX = 256
"""Events kept for ``take``; the oldest go first, and are counted."""


class EventKind(enum.Enum):
    PATH_UP = "path up"
    PATH_DOWN = "path down"
    PATH_ENDED = "path ended"
    """It will not be connected again: refused, or over ctrl_loss_tmo."""
    NAMESPACE_ADDED = "namespace added"
    NAMESPACE_REMOVED = "namespace removed"
    NAMESPACE_GROWN = "namespace grown"
    NAMESPACE_SHRUNK = "namespace shrunk"
    NAMESPACE_REPLACED = "namespace replaced"
    """Another namespace, or another format, under an id in use."""
    NAMESPACE_RETURNED = "namespace returned"
    ANA_CHANGED = "ANA changed"
    SMART_WARNING = "SMART warning"
    CONTROLLER_ERROR = "controller error"
    RESERVATION_CHANGED = "reservation changed"
    """Another host has released, preempted or cleared what this host was registered for."""
    DISCOVERY_CHANGED = "discovery log changed"


@dataclass(frozen=True)
class HostEvent:
    """``where`` names the path or the subsystem; ``nsid`` is 0 unless it is about one namespace."""

    kind: EventKind
    where: str
    nsid: int = 0
    text: str = ""

    def __str__(self) -> str:
        nsid = f" nsid {self.nsid}" if self.nsid else ""
        return f"{self.where}{nsid}: {self.kind.value}{': ' if self.text else ''}{self.text}"


class EventQueue:
    """A bounded queue from the threads that notice to the one that asks."""

    def __init__(self) -> None:
        self._events: deque[HostEvent] = deque(maxlen=EVENT_COUNT_MAX)
        self._changed = threading.Condition()
        self.dropped_count = 0

    def put(self, event: HostEvent) -> None:
        with self._changed:
            if len(self._events) == EVENT_COUNT_MAX:
                self.dropped_count += 1
            self._events.append(event)
            self._changed.notify_all()

    def take(self, *, deadline: Deadline) -> HostEvent | None:
        """The oldest event; None when none came by the deadline."""
        with self._changed:
            while not self._events:
                if deadline.is_expired:
                    return None
                self._changed.wait(deadline.remaining_s())
            return self._events.popleft()
