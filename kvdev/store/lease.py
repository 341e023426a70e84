"""Who owns a KV namespace: the lease in its record, and how an owner whose lease ended knows.

A lease is a promise of its holder: it writes nothing once so much time has passed since it last wrote the record.
Whoever takes over changes the record first, so that the holder cannot renew; then keeps its writes out (``fence``),
or waits until the promise has ended them.
Not here: the record's bytes (``superblock``); when it is written (``namespace``).
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdev.block.device import BlockDevice
from kvdev.clock import BOOT_CLOCK, NS_PER_MS, SYSTEM_CLOCK, Clock
from kvdev.errors import LeaseLostError, UsageError
from kvdev.store.fence import Fence
from kvdev.store.lock import boot_id, start_ticks
from kvdev.store.superblock import HOST_NAME_BYTES, Record

LEASE_MS_DEFAULT = 30_000
LEASE_MS_MIN = 100
LEASE_MS_MAX = 3_600_000
RENEWALS_PER_LEASE = 3
"""The holder renews when it is used and a third of the lease has gone by: two attempts may fail."""
_POSTPONEMENTS_PER_LEASE = 10


@dataclass(frozen=True)
class OwnerIdentity:
    """One process: what a record says of its owner."""

    boot_id: bytes
    pid: int
    start_ticks: int
    pid_namespace: int
    host_name: str

    @classmethod
    def current(cls) -> OwnerIdentity:
        pid = os.getpid()
        name = socket.gethostname().encode()[:HOST_NAME_BYTES].decode(errors="ignore")
        return cls(boot_id(), pid, start_ticks(pid) or 0, _pid_namespace(), name)


def _pid_namespace() -> int:
    """Process ids mean something only within it; 0 when the kernel does not tell."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino & 0xFFFF_FFFF
    except OSError:
        return 0


def is_held(record: Record) -> bool:
    """Whether an owner has the namespace open, or has ended without closing it."""
    return record.lease_ms != 0 and not record.is_clean


def is_provably_dead(record: Record, me: OwnerIdentity, members: Sequence[BlockDevice]) -> bool:
    """Whether the last owner has ended for sure; asked by whoever has the locks of this host.

    A process of the same boot and PID namespace that is gone has ended, and so has one of this very process that
    gave its lock back. On devices that nobody outside this host's locks can write to, the locks are proof enough.
    """
    return all(member.is_host_local for member in members) or is_process_gone(record, me)


def is_process_gone(record: Record, me: OwnerIdentity) -> bool:
    """Whether the owner was a process of this boot and PID namespace that is no more, or this one."""
    if (record.owner_boot_id, record.lease_pid_namespace) != (me.boot_id, me.pid_namespace):
        return False
    if (record.owner_pid, record.owner_start_ticks) == (me.pid, me.start_ticks):
        return True
    return start_ticks(record.owner_pid) != record.owner_start_ticks


def describe_holder(record: Record) -> str:
    """``process 12 of host db1 (HOSTID ...)``."""
    text = f"process {record.owner_pid}"
    if record.lease_host_name:
        text += f" of host {record.lease_host_name}"
    if any(record.lease_host_id):
        text += f" (HOSTID {uuid.UUID(bytes=record.lease_host_id)})"
    return text


class Lease:
    """An owner's own lease. ``fence`` keeps others' writes out where the devices can."""

    def __init__(
        self,
        what: str,
        *,
        fence: Fence,
        identity: OwnerIdentity | None = None,
        lease_ms: int = LEASE_MS_DEFAULT,
        clock: Clock = BOOT_CLOCK,
    ) -> None:
        if isinstance(lease_ms, bool) or not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise UsageError(f"lease: expected {LEASE_MS_MIN} to {LEASE_MS_MAX} ms, got {lease_ms!r}")
        self.what = what
        self.fence = fence
        self.identity = identity or OwnerIdentity.current()
        self.lease_ms = lease_ms
        self.clock = clock
        self.fence_until_ns = 0
        """When, by the monotonic clock, nothing of the owner before can land any more; nothing is written earlier."""
        self.writers_gone: Callable[[], bool] = lambda: True
        """Whether no process of this host writes any more under what the owner before granted."""
        self.lost_to = ""
        self._valid_until_ns = 0
        self._due_ns = 0

    @property
    def is_fenced(self) -> bool:
        """Whether nothing of the owner before can land any more."""
        return SYSTEM_CLOCK.monotonic_ns() >= self.fence_until_ns and self.writers_gone()

    def fields(self) -> dict[str, object]:
        """What the record says of this owner."""
        return {
            "flags": 0,
            "owner_boot_id": self.identity.boot_id,
            "owner_pid": self.identity.pid,
            "owner_start_ticks": self.identity.start_ticks,
            "lease_host_id": self.fence.host_id,
            "lease_key": self.fence.key,
            "lease_ms": self.lease_ms,
            "lease_pid_namespace": self.identity.pid_namespace,
            "lease_host_name": self.identity.host_name,
        }

    def note_written(self, started_ns: int) -> None:
        """The record was written, by a command sent no earlier than this."""
        self._valid_until_ns = started_ns + self.lease_ms * NS_PER_MS
        self._due_ns = started_ns + self.lease_ms * NS_PER_MS // RENEWALS_PER_LEASE

    def postpone(self) -> None:
        """A renewal failed while the lease is good: the next attempt is a little later."""
        self._due_ns = self.clock.monotonic_ns() + self.lease_ms * NS_PER_MS // _POSTPONEMENTS_PER_LEASE

    @property
    def is_due(self) -> bool:
        return self.clock.monotonic_ns() >= self._due_ns

    @property
    def remaining_s(self) -> float:
        return max(0, self._valid_until_ns - self.clock.monotonic_ns()) / 1e9

    @property
    def is_valid(self) -> bool:
        return not self.lost_to and self.remaining_s > 0

    def lose(self, record: Record | None) -> LeaseLostError:
        """Note who has it now; the error that everything raises from here on."""
        self.lost_to = "somebody who removed it" if record is None else describe_holder(record)
        return self.lost_error()

    def lost_error(self) -> LeaseLostError:
        return LeaseLostError(f"{self.what}: was taken over by {self.lost_to}; open it anew to go on")
