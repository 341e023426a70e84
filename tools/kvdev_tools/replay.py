"""Replaying requests against a page store: restore the longest stored prefix, prefill the rest, offload it, flush.

Not here: where the store comes from (``kvdev_tools.client``); what is printed (``kvdev_tools.report``).
Threads: one; every call to the store is bounded by the store's own deadlines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from kvdev.errors import (
    CommandError,
    ConnectionLostError,
    CorruptionError,
    KvdevError,
    TransportError,
    UncertainWriteError,
)
from kvdev.keys import KeyArray, PageKeys
from kvdev.staging import Arena
from kvdev.store import PageStatus, PageStore
from kvdev_kernels import PageKernels
from kvdev_tools.content import PageContent, request_keys
from kvdev_tools.progress import RequestRecord, peak_rss_bytes
from kvdev_tools.tensors import BlockAllocator, BlockTable, EngineTensors
from kvdev_tools.trace import Request

log = logging.getLogger("kvdev.tools")

NowNs = Callable[[], int]


class Replayer:
    """An engine without a model: its paged tensors, its block table, and a page store behind them.

    Invariant between requests: every block is free, every lease is released, the store is flushed.
    """

    def __init__(
        self,
        *,
        store: PageStore,
        tensors: EngineTensors,
        arena: Arena,
        kernels: PageKernels,
        batch_page_count: int,
        seed: int,
        page_keys: PageKeys | None = None,
        now_ns: NowNs = time.monotonic_ns,
    ) -> None:
        """``batch_page_count`` pages fit into the arena and move together; ``page_keys`` has a tenant's salt."""
        self._store = store
        self._tensors = tensors
        self._arena = arena
        self._kernels = kernels
        self._batch_page_count = batch_page_count
        self._now_ns = now_ns
        self._page_keys = page_keys
        self._page_size_bytes = tensors.geometry.page_size_bytes
        self._flushes_lost = 0
        self._content = PageContent(self._page_size_bytes)
        self._blocks = BlockAllocator(
            block_count=tensors.block_count, blocks_per_page=tensors.blocks_per_page, seed=seed
        )

    def warm_up(self) -> None:
        """Have the kernels compiled before anything is timed: pack and unpack one page of nothing."""
        table = self._blocks.take(1)
        with self._arena.lease(1, self._page_size_bytes) as lease:
            self._kernels.pack(self._tensors.paged_layout, table, lease)
            self._kernels.unpack(self._tensors.paged_layout, table, lease)
        self._blocks.give_back(table)

    def replay(self, request_index: int, request: Request) -> RequestRecord:
        """Serve one request as an engine would; what was restored is compared bit for bit."""
        keys = request_keys(request.hash_ids, self._page_keys)
        table = self._blocks.take(len(keys))
        restored, page_errors, failed_reads, restore_ns = self._restore(keys, table)
        matching = sum(
            self._tensors.matches(blocks, self._content.page(key))
            for blocks, key in zip(table[:restored], keys, strict=False)
        )
        self._flushes_lost = 0
        written, offload_ns = self._offload(keys[restored:], table[restored:])
        self._blocks.give_back(table)
        return RequestRecord(
            request_index=request_index,
            pages_requested=len(keys),
            pages_restored=restored,
            pages_written=written,
            pages_verified=restored,
            mismatches=restored - matching,
            page_errors=page_errors,
            flushes_lost=self._flushes_lost,
            failed_reads=failed_reads,
            restore_ns=restore_ns,
            offload_ns=offload_ns,
            stored_pages=self._store.namespace.stat().index.live_count,
            rss_max_bytes=peak_rss_bytes(),
        )

    def _restore(self, keys: KeyArray, table: BlockTable) -> tuple[int, int, int, int]:
        """Bring the longest stored prefix into the tensors; returns pages, damaged ones, failed reads, nanoseconds."""
        started = self._now_ns()
        hit_count = self._store.longest_prefix(keys)
        spent_ns = self._now_ns() - started
        for blocks in table[:hit_count]:
            self._tensors.poison(blocks)
        restored = 0
        while restored < hit_count:
            end = min(restored + self._batch_page_count, hit_count)
            started = self._now_ns()
            with self._arena.lease(end - restored, self._page_size_bytes) as lease:
                got = self._store.get(keys[restored:end], lease, verify="kernel")
                if got.failure is not None:
                    self._check_read(got.failure)
                readable = _leading(got.status == PageStatus.HIT)
                error_count = int(np.count_nonzero(got.status == PageStatus.ERROR))
                is_damaged = np.zeros(end - restored, dtype=np.bool_)
                if readable:
                    # A kernel takes addresses: only of the pages that came, in order.
                    unpacked = self._kernels.unpack(
                        self._tensors.paged_layout,
                        table[restored : restored + readable],
                        lease.array[:readable],
                        verify=got.sums[:readable],
                        algorithm=self._store.checksum.name,
                    )
                    if not unpacked.is_ok.all():
                        is_damaged[:readable] = ~unpacked.is_ok
                        self._store.report_bad(got, is_damaged)
                    readable = _leading(unpacked.is_ok)
            spent_ns += self._now_ns() - started
            restored += readable
            if restored < end:
                # Evicted between the lookup and the read, or unreadable: an engine goes on with what it has.
                damaged = int(np.count_nonzero(is_damaged))
                if isinstance(got.failure, CorruptionError):
                    return restored, damaged + error_count, 0, spent_ns
                return restored, damaged, error_count, spent_ns
        return restored, 0, 0, spent_ns

    def _offload(self, keys: KeyArray, table: BlockTable) -> tuple[int, int]:
        """Prefill the pages, pack and put them, flush; returns pages stored and nanoseconds without prefill."""
        stored = spent_ns = 0
        for start in range(0, len(keys), self._batch_page_count):
            batch = slice(start, start + self._batch_page_count)
            for blocks, key in zip(table[batch], keys[batch], strict=True):
                self._tensors.fill(blocks, self._content.page(key))
            started = self._now_ns()
            with self._arena.lease(len(keys[batch]), self._page_size_bytes) as lease:
                sums = self._kernels.pack(
                    self._tensors.paged_layout, table[batch], lease, algorithm=self._store.checksum.name
                )
                put = self._store.put(keys[batch], lease, checksums=sums)
                if put.failure is not None:
                    self._check_lost(put.failure)
                stored += int(np.count_nonzero(put.status == PageStatus.STORED))
            spent_ns += self._now_ns() - started
        started = self._now_ns()
        try:
            self._store.flush()
        except UncertainWriteError as error:
            self._check_lost(error)
        return stored, spent_ns + self._now_ns() - started

    def _check_read(self, error: KvdevError) -> None:
        """Let pass what became of single reads: their pages are misses. Raises what concerns all of the store."""
        is_of_a_read = isinstance(error, (CommandError, CorruptionError, TransportError))
        if not is_of_a_read or isinstance(error, ConnectionLostError):
            raise error
        log.warning("replay: %s", error)

    def _check_lost(self, error: KvdevError) -> None:
        """Count what a target took with it when it went away: the store has withdrawn those pages, they are put
        again when they are asked for. Raises anything else."""
        if not isinstance(error, UncertainWriteError):
            raise error
        log.warning("replay: %s", error)
        self._flushes_lost += 1


def _leading(flags: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """How many are true before the first false."""
    return len(flags) if bool(flags.all()) else int(np.argmin(flags))
