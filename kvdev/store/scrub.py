"""Scrub: the stored pages of an open KV namespace, verified in the background while its owner goes on.

A page whose bytes are not those that were put, or that its device cannot read any more, leaves the table before anybody
asks for it: it is lost, and a miss. The scrub goes on where the last one was, of this owner or of one before it.
Not here: a check of everything, by an owner of its own (``check``).
Threads: one of its own. It reads one piece at a time without the namespace's lock, so whoever gets or puts a page waits
for one piece at most; the lock is held to look a few slots up, and to withdraw a page.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvdev.block.device import aligned_buffer
from kvdev.clock import Deadline, unix_time_s
from kvdev.errors import CommandError, KvdevError, LeaseLostError, TransportError, UsageError
from kvdev.native.index import EntryArray
from kvdev.native.io import address_of
from kvdev.store.check import grants_of
from kvdev.store.namespace import KvNamespace
from kvdev.store.throttle import Throttle
from kvdev.units import KIB, MIB

SCRUB_BYTES_PER_S_DEFAULT = 32 * MIB
"""A hundredth or less of what the members do: an array of 14 TB in five days."""
PIECE_BYTES = 256 * KIB
"""Read at once: what demand I/O may have to wait for."""
WINDOW_SLOTS = 1024
"""Slots looked up at once."""
READ_TIMEOUT_S = 30.0
AWAY_PAUSE_S = 2.0
"""After a device was out of reach, before it is asked again."""
PASS_PAUSE_S = 600.0
"""Between two passes: a small namespace is not read over and over."""
UNREADABLE_RUN_MAX = 3
"""Pages in a row that cannot be read and are withdrawn; from then on the device is suspected, not the page."""
_MEDIA_ERROR_SCT = 2

log = logging.getLogger("kvdev.store")


@dataclass(frozen=True)
class ScrubStat:
    """What a scrub has done since it was made."""

    is_running: bool
    bytes_per_s: int
    next_slot: int
    pass_count: int
    checked_pages: int
    damaged_pages: int
    """Read, and not what was put."""
    unreadable_pages: int
    withdrawn_pages: int
    """Of both: the others had been replaced meanwhile."""
    last_pass_unix_s: int
    """When one last came to the end, of this owner or of one before; 0 for never."""


class Scrubber:
    """Reads an owner's stored pages, slot by slot; ``start`` does so in a thread until ``stop`` or the owner's end."""

    def __init__(
        self,
        namespace: KvNamespace,
        *,
        bytes_per_s: int = SCRUB_BYTES_PER_S_DEFAULT,
        pass_pause_s: float = PASS_PAUSE_S,
        unix_s: Callable[[], int] = unix_time_s,
    ) -> None:
        """Nothing is read yet.

        Args:
            bytes_per_s: pages are read no faster than this.
            pass_pause_s: from the end of a pass to the start of the next.
        """
        if namespace.mode != "owner":
            raise UsageError(
                f"{namespace.what}: scrub: is open as {namespace.mode}; open it as owner, who alone can withdraw pages"
            )
        self.namespace = namespace
        self._throttle = Throttle(bytes_per_s)
        self._bytes_per_s = bytes_per_s
        self._pass_pause_s = pass_pause_s
        self._unix_s = unix_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._is_registered = False
        self._buffer = aligned_buffer(namespace.page_io.slot_size_bytes)
        self._next_slot = namespace.scrubbed[0] % namespace.slot_count
        self._unreadable_run = 0
        self._counts = dict.fromkeys(("passes", "checked", "damaged", "unreadable", "withdrawn"), 0)

    # --- the thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Go on in the background; does nothing when it does already."""
        with self._mutex:
            if self._thread is not None:
                return
            if self.namespace.is_closed:
                raise UsageError(f"{self.namespace.what}: scrub: is closed")
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="kvdev-scrub", daemon=True)
            self._thread.start()
            if not self._is_registered:
                self.namespace.call_before_end(self.stop)
                self._is_registered = True

    def stop(self) -> None:
        """Return once nothing is read any more; ``start`` goes on from there. Twice does nothing."""
        with self._mutex:
            thread = self._thread
            self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._mutex:
            if self._thread is thread:
                self._thread = None

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                size_bytes, is_end = self.step(), self._next_slot == 0
            except LeaseLostError:
                return  # whoever has it now reads its pages
            except KvdevError as error:
                log.warning("%s: scrub: %s; tried again", self.namespace.what, error)
                self._stopped.wait(AWAY_PAUSE_S)
                continue
            if is_end:
                self._stopped.wait(self._pass_pause_s)
            self._throttle.pace(size_bytes, self._stopped)

    # --- one page ----------------------------------------------------------------------------

    def step(self) -> int:
        """Verify the next page; returns the bytes read, 0 when the slots looked at have none.

        Raises the devices' errors where they say nothing of the page: it is the next one again then.
        """
        if self.namespace.is_closed:
            raise UsageError(f"{self.namespace.what}: scrub: is closed")
        entry = self._next_entry()
        if entry is None:
            return 0
        slot = int(entry["slot_index"][0])
        try:
            self.namespace.page_io.read_slot(
                slot, self._buffer, piece_bytes=PIECE_BYTES, deadline=Deadline.after(READ_TIMEOUT_S)
            )
        except (CommandError, TransportError) as error:
            if not self._is_of_the_page(error):
                raise
            self._withdraw(entry, "unreadable", str(error))
        else:
            self._unreadable_run = 0
            self._judge(entry)
        self._counts["checked"] += 1
        self._advance(slot + 1)
        return self._buffer.nbytes

    def _next_entry(self) -> EntryArray | None:
        """The first stored page from the next slot on, None when those looked at have none."""
        end = min(self._next_slot + WINDOW_SLOTS, self.namespace.slot_count)
        entries = self.namespace.entries(self._next_slot, end - self._next_slot)
        if not len(entries):
            self._advance(end)
            return None
        return entries[:1]

    def _advance(self, slot: int) -> None:
        ended_unix_s = self.namespace.scrubbed[1]
        if slot >= self.namespace.slot_count:
            slot, ended_unix_s = 0, self._unix_s()
            self._counts["passes"] += 1
        self._next_slot = slot
        self.namespace.scrubbed = (slot, ended_unix_s)

    def _judge(self, entry: EntryArray) -> None:
        grants = grants_of(entry)
        keys = np.ascontiguousarray(entry["key"])
        checksum = self.namespace.checksum
        places = np.array([address_of(self._buffer)], dtype=np.uint64)
        actual = checksum.sums(places, self.namespace.page_size_bytes)
        if not self.namespace.verify(keys, grants, actual)[0]:
            expected = self.namespace.sums_of(keys, grants)
            what = f"checksum: expected {checksum.text(expected[0])}, got {checksum.text(actual[0])}"
            self._withdraw(entry, "damaged", what)

    def _is_of_the_page(self, error: CommandError | TransportError) -> bool:
        """Whether an error says that this page's blocks are lost; too many in a row say that the device is."""
        if isinstance(error, CommandError):
            is_media = error.sct == _MEDIA_ERROR_SCT
        else:
            is_media = error.errno == errno.EIO
        self._unreadable_run += 1 if is_media else 0
        return is_media and self._unreadable_run <= UNREADABLE_RUN_MAX

    def _withdraw(self, entry: EntryArray, kind: str, what: str) -> None:
        """Take a page out of the table, unless its slot got another one while it was read."""
        namespace, grants = self.namespace, grants_of(entry)
        if not namespace.confirm(grants)[0]:
            return
        self._counts[kind] += 1
        count = namespace.withdraw(grants, deadline=Deadline.after(READ_TIMEOUT_S))
        self._counts["withdrawn"] += count
        slot = int(entry["slot_index"][0])
        log.warning(
            "%s: scrub: page in slot %d at %s: %s; withdrawn",
            namespace.what,
            slot,
            namespace.where(namespace.slot_slba(slot)),
            what,
        )

    def stat(self) -> ScrubStat:
        counts = self._counts
        return ScrubStat(
            is_running=self._thread is not None and self._thread.is_alive(),
            bytes_per_s=self._bytes_per_s,
            next_slot=self._next_slot,
            pass_count=counts["passes"],
            checked_pages=counts["checked"],
            damaged_pages=counts["damaged"],
            unreadable_pages=counts["unreadable"],
            withdrawn_pages=counts["withdrawn"],
            last_pass_unix_s=self.namespace.scrubbed[1],
        )
