"""The reservation notices of one controller: its queue of log pages, and what it masks.

Not here: the event that announces them (``controller``).
Spec: NVM Express Base 2.3 sections 5.2.12.1.35, 5.2.26.1.33.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from kvdev.wire.log import ReservationLog, ReservationNotice

NOTICE_COUNT_LIMIT: Final = 256
MASK_BITS: Final = 0xE
_COUNT_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF


@dataclass
class NoticeQueue:
    """Oldest first. When it is full the newest entry takes the count of what is lost."""

    masks: dict[int, int] = field(default_factory=dict)
    """NSID to the notices that are not wanted: bit 1 << notice."""
    _count: int = 0
    _entries: deque[ReservationLog] = field(default_factory=deque)

    def add(self, nsid: int, notice: ReservationNotice) -> bool:
        """Whether there is a new log page."""
        if self.masks.get(nsid, 0) & 1 << notice:
            return False
        self._count = self._count + 1 if self._count < _COUNT_MAX else 1
        if len(self._entries) >= NOTICE_COUNT_LIMIT:
            self._entries[-1] = replace(self._entries[-1], log_page_count=self._count)
            return False
        self._entries.append(ReservationLog(log_page_count=self._count, notice_type=notice, nsid=nsid))
        return True

    def take(self) -> ReservationLog:
        """The oldest log page, removed; an empty one when there is none."""
        if not self._entries:
            return ReservationLog()
        return replace(self._entries.popleft(), available_count=min(len(self._entries), 255))
