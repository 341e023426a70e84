"""The record of one KV namespace, written by its owner and by nobody else meanwhile.

Each write compares first: by the device's compare and write where it has that, else by reading. Whoever finds
something that is not its own has lost the namespace.
Not here: what the record says (``superblock``); when it changes (``namespace``).
"""

from __future__ import annotations

import threading
from dataclasses import replace

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import KvdevError, UncertainWriteError
from kvdev.store.directory import COPY_COUNT, Directory, Place
from kvdev.store.lease import Lease
from kvdev.store.superblock import Record
from kvdev.store.volume_io import MemberMask

_FENCE_LOOK_S = 0.05


class RecordKeeper:
    """The newest record that is known to be written, and what both copies hold."""

    def __init__(self, directory: Directory, place: Place, lease: Lease | None) -> None:
        """``place`` as it was read; without a lease nothing can be written."""
        assert place.record is not None
        self.record: Record = place.record
        self._directory = directory
        self._lease = lease
        self._copies = list(place.raw)
        self._attempts: list[bytes] = []
        """What failed writes since the last success may have left in the copy that they went to."""
        self._uncertain_since_ns = 0

    def write(self, deadline: Deadline, **fields: object) -> None:
        """The next state, durable on return. After a failure the record before is still the last one known.

        Raises LeaseLostError when a copy holds what this owner did not write.
        """
        lease = self._lease
        assert lease is not None, "a reader writes no record"
        # After a failure the same copy is written again: the other one is the last that is known good.
        sequence = self.record.sequence + 1 + COPY_COUNT * len(self._attempts)
        record = replace(self.record, sequence=sequence, **fields)  # type: ignore[arg-type]
        raw = self._directory.build(record)
        started_ns = lease.clock.monotonic_ns()
        sent_ns = SYSTEM_CLOCK.monotonic_ns()
        self._wait_fenced(deadline)
        try:
            self._directory.flush(self._exchange(record, raw, lease, deadline), deadline)
        except UncertainWriteError:
            self._uncertain_since_ns = sent_ns
            self._attempts.append(raw)
            raise
        except KvdevError:
            self._attempts.append(raw)
            raise
        self._copies[sequence % COPY_COUNT] = raw
        self._attempts.clear()
        self.record = record
        lease.note_written(started_ns)

    def _exchange(self, record: Record, raw: bytes, lease: Lease, deadline: Deadline) -> MemberMask:
        copy_index = record.sequence % COPY_COUNT
        if self._attempts:
            self._check_ours(lease, deadline)
        members = self._directory.exchange(
            record, expected=self._copies[copy_index], new=raw, deadline=deadline
        )
        if members is not None:
            return members
        if self._directory.can_compare:
            raise self._lost(lease, deadline)
        self._check_ours(lease, deadline)
        return self._directory.write(record, deadline)

    def _check_ours(self, lease: Lease, deadline: Deadline) -> None:
        """Look at both copies: only what this owner knows of may be there."""
        for copy_index, raw in enumerate(self._directory.read_raw(self.record.record_index, deadline)):
            if raw != self._copies[copy_index]:
                if raw not in self._attempts:
                    raise self._lost(lease, deadline)
                self._copies[copy_index] = raw

    def check(self, deadline: Deadline) -> None:
        """LeaseLostError when the record on media is somebody else's."""
        if self._lease is not None:
            self._check_ours(self._lease, deadline)

    def _lost(self, lease: Lease, deadline: Deadline) -> KvdevError:
        found = self._directory.read(self.record.record_index, deadline).record
        return lease.lose(found)

    def _wait_fenced(self, deadline: Deadline) -> None:
        """A plain write of unknown fate may still land over a newer one: its place rests until it cannot."""
        if not self._uncertain_since_ns or self._directory.can_compare:
            return  # compared, it cannot: what it expects is not there any more
        pause = threading.Event()  # never set: a pause between two looks
        while not self._directory.is_fenced(self._uncertain_since_ns):
            deadline.check(f"{self.record.name}: record: an earlier write of unknown fate may still land")
            pause.wait(min(_FENCE_LOOK_S, deadline.remaining_s()))
        self._uncertain_since_ns = 0
