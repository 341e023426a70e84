"""Becoming the owner of a KV namespace after another: who may, and what comes first.

An owner that closed in order leaves nothing behind. One that provably died is put out at once. Any other may be alive:
only ``takeover`` goes past it, and says so in the record before anything else, so that it cannot renew its lease.
Not here: the lease (``lease``); reservations (``fence``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvdev.block.device import BlockDevice
from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Deadline
from kvdev.errors import CorruptionError
from kvdev.store.directory import Directory, Place
from kvdev.store.fence import Fence
from kvdev.store.lease import Lease, describe_holder, is_held, is_provably_dead
from kvdev.store.lock import LockHeldError
from kvdev.store.record_keeper import RecordKeeper
from kvdev.store.superblock import FLAG_CLAIMED, Record

FENCE_LOOK_S = 0.05
"""Pause between two looks at whether the owner before is fenced."""

log = logging.getLogger("kvdev.store")


def check_free(record: Record, lease: Lease, members: Sequence[BlockDevice]) -> None:
    """LockHeldError, naming the holder, while somebody may own the namespace who did not provably die."""
    if not is_held(record) or is_provably_dead(record, lease.identity, members):
        return
    raise LockHeldError(
        f"{lease.what}: is owned by {describe_holder(record)}, with a lease of {record.lease_ms / 1000:g} s; stop "
        f"it there, or once it is known to be dead take over: kvdev namespace takeover",
        pid=0,
    )


def wait_fenced(lease: Lease, deadline: Deadline) -> None:
    """Return once nothing of the owner before can land any more; DeadlineError when that is too far."""
    pause = threading.Event()
    while not lease.is_fenced:
        deadline.check(f"{lease.what}: writes of the owner before may still land")
        pause.wait(min(FENCE_LOOK_S, deadline.remaining_s()))


def leave(fence: Fence, directory: Directory, deadline: Deadline) -> None:
    """Unregister from the members, unless a KV namespace is owned under the same key."""
    if not fence.key:
        return
    records = [place.record for place in directory.read_all(deadline)]
    if not any(each is not None and each.lease_key == fence.key and is_held(each) for each in records):
        fence.leave(deadline)


def claim(
    directory: Directory,
    place: Place,
    lease: Lease,
    members: Sequence[BlockDevice],
    *,
    takeover: bool,
    deadline: Deadline,
) -> None:
    """Put the last owner out, or note until when its writes may land; the caller has the locks of this host.

    ``place`` is the record's, read under these locks.
    """
    record = place.record
    if record is None:
        raise CorruptionError(
            f"{lease.what}: no intact record: {'; '.join(place.problems) or 'it was deleted'}"
        )
    if not takeover:
        check_free(record, lease, members)
    lease.fence.join(deadline)
    if record.is_clean:
        return
    is_dead = not is_held(record) or is_provably_dead(record, lease.identity, members)
    # A claim that its owner did not live to see through: the one before it may still be alive.
    is_dead = is_dead and not record.is_claimed
    if not is_dead:
        # From here on it cannot renew; what it was granted before ends by itself.
        keeper = RecordKeeper(directory, place, lease)
        keeper.write(deadline, **{**lease.fields(), "flags": FLAG_CLAIMED})
    left = lease.fence.put_out(0 if record.is_claimed else record.lease_key, deadline)
    if is_dead:
        wait_s = max((member.dead_writer_s for member in left), default=0.0)
    else:
        wait_s = max((member.lost_writer_s + record.lease_ms / 1000 for member in left), default=0.0)
    now_ns = SYSTEM_CLOCK.monotonic_ns()
    # What this process itself has lost on these devices, under an owner before.
    lease.fence_until_ns = max(now_ns + int(wait_s * NS_PER_S), *(member.fence_ns for member in members))
    if is_held(record):
        log.warning(
            "%s: taken over from %s, which %s; %s",
            lease.what,
            describe_holder(record),
            "has ended" if is_dead else "may be alive",
            f"its writes may land for {wait_s:g} s, nothing is written before"
            if wait_s
            else "its writes are kept out",
        )
