"""Ends the making of an association from another thread: nothing that is closed waits for a peer.

Not here: what is being made (``controller``, ``path``).
Threads: ``cancel`` from any; the rest from the thread that makes the association.
"""

from __future__ import annotations

import threading
from typing import Protocol

from kvdev.errors import ConnectionLostError


class Cancellable(Protocol):
    """Something that another thread may be waiting in."""

    def cancel(self) -> None: ...


class CancelToken:
    """What an attempt is inside of; once cancelled it stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Cancellable] = []
        self._is_cancelled = False

    def watch(self, waiting: Cancellable) -> None:
        """Cancel this too from now on; raises ConnectionLostError when it is too late for that."""
        with self._lock:
            if self._is_cancelled:
                raise ConnectionLostError("connect: given up: the subsystem is being closed")
            self._watched.append(waiting)

    def clear(self) -> None:
        """The attempt is over."""
        with self._lock:
            self._watched.clear()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            watched = self._watched[:]
        for waiting in watched:
            waiting.cancel()
