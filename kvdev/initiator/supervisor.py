"""The thread that hears of losses and events, and has the paths they belong to look after them.

It sleeps on one eventfd that the queue and the admin thread write; it never waits for a peer.
Not here: what a path does about it (``path``).
Threads: ``add``, ``remove`` and ``close`` from any.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import Protocol

from kvdev.native.admin import AdminThread
from kvdev.native.queue import HostQueue

log = logging.getLogger("kvdev.initiator")


class Watched(Protocol):
    """Something that may have lost its connection or got an event."""

    def look(self) -> None:
        """Find out, and start what has to be done on another thread; must not wait."""


class Supervisor:
    """Runs from construction until ``close``."""

    def __init__(self, admin: AdminThread) -> None:
        self.admin = admin
        self._lock = threading.Lock()
        self._watched: list[Watched] = []
        self._queues: list[HostQueue] = []
        self._is_stopping = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        admin.set_notice(self._fd)
        self._thread = threading.Thread(target=self._run, name="kvdev-supervisor", daemon=True)
        self._thread.start()

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.append(watched)

    def remove(self, watched: Watched) -> None:
        with self._lock:
            if watched in self._watched:
                self._watched.remove(watched)

    def watch_queue(self, queue: HostQueue) -> None:
        """Hear of connections that die under the queue's commands; doing it again does nothing."""
        with self._lock:
            if queue in self._queues:
                return
            self._queues.append(queue)
        queue.set_notice(self._fd)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while not self._is_stopping:
            poller.poll()
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                continue
            with self._lock:
                watched = self._watched[:]
            for each in watched:
                try:
                    each.look()
                except Exception:
                    # A defect in one path must not leave the others without recovery.
                    log.exception("supervisor: a path could not be looked at")

    def close(self) -> None:
        """End the thread; paths are closed before. Closing twice does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self.admin.set_notice(-1)
        for queue in self._queues:
            queue.set_notice(-1)
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
