"""One KV namespace that a pool process owns, and what its clients map of it.

Not here: the socket (``server``).
"""

from __future__ import annotations

import logging
import secrets
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.keys import KeyArray
from kvdev.native.index import OUTCOME_WRITTEN, GrantArray
from kvdev.native.view import PageView, hint_count
from kvdev.pool.memory import SharedMemory
from kvdev.pool.protocol import Commit
from kvdev.pool.worker import SETTLE_S_MIN, ClientProcess, Granted, Orphans
from kvdev.store.namespace import KvNamespace
from kvdev.store.scrub import Scrubber
from kvdev.store.volume import Volume

ORPHANS_MAX = 4096
"""Clients that went away with grants and may still write; a further one is not served before one has settled."""

log = logging.getLogger("kvdev.pool")


class PoolService:
    """Owner of one KV namespace; everything is called from the server's thread."""

    def __init__(self, volume: Volume, name: str, *, takeover: bool = False, deadline: Deadline) -> None:
        """Become the owner and wait until nothing of the one before can land any more."""
        self.name = name
        self._images: list[SharedMemory] = []
        self._orphans: list[Orphans] = []
        self.volume = volume
        self._scrubber: Scrubber | None = None
        self.namespace: KvNamespace = volume.open_namespace(
            name, takeover=takeover, make_image=self._make_image, deadline=deadline
        )
        try:
            self.namespace.settle(deadline=deadline)
            self._share()
        except BaseException:
            self.namespace.abandon()
            self._release_memory()
            raise

    def _make_image(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Table memory in a memfd; a table that is read again gets a new one, and that is what is shared."""
        self._release_memory()
        self._images.append(SharedMemory("kvdev-pool-table", size_bytes))
        return self._images[-1].array

    def _share(self) -> None:
        slot_count = self.namespace.slot_count
        self.table = self._images[-1]
        self.hints = SharedMemory("kvdev-pool-hints", 4 * hint_count(slot_count))
        self.seed = secrets.randbits(64)
        self.view = PageView(
            self.table.array,
            self.hints.array.view(np.uint32),
            block_bytes=self.volume.block_size_bytes,
            slot_count=slot_count,
            seed=self.seed,
        )
        self.view.fill()

    def describe(self) -> dict[str, Any]:
        """What a client needs to know, beside the two descriptors."""
        namespace = self.namespace
        return {
            "namespace": self.name,
            "what": namespace.what,
            "uuid": uuid.UUID(bytes=namespace.uuid).hex,
            "epoch": namespace.epoch,
            "geometry": namespace.geometry.to_dict(),
            "page_size_bytes": namespace.page_size_bytes,
            "quota_pages": namespace.quota_pages,
            "batch_limit": namespace.batch_limit,
            "salt_mark": namespace.salt_mark,
            "block_size_bytes": self.volume.block_size_bytes,
            "slot_count": namespace.slot_count,
            "seed": self.seed,
            "fence": namespace.fence_kind,
            "lease_ms": namespace.lease_ms,
            "table_bytes": self.table.array.nbytes,
            "hint_bytes": self.hints.array.nbytes,
        }

    # --- requests ----------------------------------------------------------------------------

    def reserve(
        self, granted: Granted, keys: KeyArray, *, may_be_fewer: bool, deadline: Deadline
    ) -> GrantArray:
        if len(self._orphans) >= ORPHANS_MAX:
            raise UsageError(
                f"{self.namespace.what}: {ORPHANS_MAX} clients went away while they wrote; try later"
            )
        grants = self.namespace.reserve(keys, may_be_fewer=may_be_fewer, deadline=deadline)
        granted.add(grants)
        return grants

    def commit(self, granted: Granted, commit: Commit, *, deadline: Deadline) -> npt.NDArray[np.bool_]:
        if not granted.holds(commit.grants):
            raise UsageError(
                f"{self.namespace.what}: commit: grants: expected what was reserved here, each once"
            )
        if len(commit.members) != len(self.namespace.no_members()):
            raise UsageError(
                f"{self.namespace.what}: commit: expected {len(self.namespace.no_members())} members, "
                f"got {len(commit.members)}"
            )
        if (commit.outcome == OUTCOME_WRITTEN).any():
            # The client's writes went through its own connections: our flush has to know of them.
            self.volume.io.note_writes(commit.members, commit.sent_ns)
        try:
            stored = self.namespace.commit(
                commit.keys,
                commit.grants,
                commit.sums,
                outcome=commit.outcome,
                members=commit.members,
                sent_ns=commit.sent_ns,
                deadline=deadline,
            )
        finally:
            granted.remove(commit.grants)  # also when it raises: their slots may be another client's soon
        if stored.any():
            self.view.insert(
                np.ascontiguousarray(commit.keys[stored]), np.ascontiguousarray(commit.grants[stored])
            )
        return stored

    def start_scrub(self, bytes_per_s: int) -> None:
        """Verify stored pages in the background, no faster than this, until the namespace is closed."""
        self._scrubber = Scrubber(self.namespace, bytes_per_s=bytes_per_s)
        self._scrubber.start()

    def stat(self) -> dict[str, Any]:
        stat = self.namespace.stat()
        scrub = None if self._scrubber is None else self._scrubber.stat()
        return {
            "namespace": self.name,
            "pages": stat.index.live_count,
            "quota_pages": stat.quota_pages,
            "free_slots": stat.index.free_count,
            "reserved_slots": stat.index.reserved_count,
            "quarantined_slots": stat.index.quarantined_count,
            "evicted_count": stat.index.evicted_count,
            "commit_count": stat.commit_count,
            "epoch": stat.epoch,
            "orphaned_clients": len(self._orphans),
            "scrub_bytes_per_s": scrub.bytes_per_s if scrub else 0,
            "scrub_next_slot": scrub.next_slot if scrub else self.namespace.scrubbed[0],
            "scrub_checked_pages": scrub.checked_pages if scrub else 0,
            "scrub_withdrawn_pages": scrub.withdrawn_pages if scrub else 0,
            "scrubbed_unix_s": self.namespace.scrubbed[1],
        }

    # --- clients that go away ----------------------------------------------------------------

    def orphan(self, granted: Granted, process: ClientProcess) -> None:
        """A connection ended: what it was granted rests until it cannot be written any more."""
        grants = granted.take_all()
        if not len(grants):
            process.close()
            return
        settle_s = max([SETTLE_S_MIN, *(member.dead_writer_s for member in self.volume.members)])
        self._orphans.append(Orphans(process, grants, settle_s))
        log.warning(
            "%s: process %d went away with %d pages being written; their slots rest until they cannot be",
            self.namespace.what,
            process.pid,
            len(grants),
        )

    def settle_orphans(self, *, deadline: Deadline) -> None:
        """Free the slots of clients that cannot write any more."""
        for orphans in [each for each in self._orphans if each.is_settled]:
            self.namespace.release(orphans.grants, deadline=deadline)
            self._orphans.remove(orphans)
            orphans.process.close()

    # --- end ---------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Close in order; grants that are out make it an unclean close, so that the next owner waits for them."""
        try:
            self.namespace.close(deadline=deadline)
        finally:
            for orphans in self._orphans:
                orphans.process.close()
            self._orphans.clear()
            self._release_memory()
            self.hints.close()

    def _release_memory(self) -> None:
        for image in self._images:
            image.close()
        self._images.clear()
