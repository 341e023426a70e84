"""Which eviction policy keeps more of a request trace: pages found as a prefix, by policy and size of the cache.

``.venv/bin/python bench/policies.py [TRACE]``: a file of one JSON request a line with ``hash_ids``, else a generated
mix (conversations that come back, a shared prefix, one-off requests). No I/O: the index alone decides. Each request
looks its pages up, counts those found from the first on, and puts the others, as a connector does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvdev.block.device import aligned_buffer
from kvdev.keys import KeyArray
from kvdev.native.index import SLOT_NONE, PageIndex, Table, format_table, table_block_count

BLOCK_BYTES = 4096
POLICIES = ("lru", "lfu", "s3fifo", "fifo")
SHARES = (0.01, 0.05, 0.2)
BATCH_MAX = 1024


def read_trace(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [list(dict.fromkeys(json.loads(line)["hash_ids"]))[:BATCH_MAX] for line in lines]


def generate(seed: int, count: int) -> list[list[int]]:
    """Half of the requests go on with one of the last 200 conversations, the others come once; all share 4 pages."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(4, 1 << 40))
    conversations: list[list[int]] = [list(range(4))]
    requests = []
    for _ in range(count):
        if rng.integers(0, 2):
            request = [
                *conversations[int(rng.integers(max(0, len(conversations) - 200), len(conversations)))]
            ]
            request += [next(fresh) for _ in range(int(rng.integers(1, 8)))]
            conversations.append(request)
        else:
            request = [*range(4), *(next(fresh) for _ in range(int(rng.integers(1, 24))))]
            if not rng.integers(0, 8):
                conversations.append(request)
        requests.append(request[:BATCH_MAX])
    return requests


def keys_of(numbers: list[int]) -> KeyArray:
    keys = np.zeros((len(numbers), 4), dtype=np.uint64)
    keys[:] = np.array(numbers, dtype=np.uint64)[:, None] + np.uint64(1)
    return keys.view(np.uint8).reshape(-1, 32)


def make_index(policy: str, quota_pages: int) -> PageIndex:
    slot_count = quota_pages + BATCH_MAX
    block_count = table_block_count(BLOCK_BYTES, slot_count)
    image = aligned_buffer(block_count * BLOCK_BYTES)
    table = Table(image, block_bytes=BLOCK_BYTES, slot_count=slot_count, uuid=bytes(16))
    format_table(
        block_bytes=BLOCK_BYTES,
        first_block=0,
        block_count=block_count,
        slot_count=slot_count,
        uuid=bytes(16),
        out=image,
    )
    index = PageIndex(
        table,
        pending_limit=4 * BATCH_MAX,
        next_generation=1,
        eviction_policy=policy,
        quota_pages=quota_pages,
    )
    index.load()
    return index


def _hits(
    index: PageIndex, requests: list[list[int]], quota_pages: int, *, counts_uses: bool
) -> Iterator[int]:
    for numbers in requests:
        keys = keys_of(numbers[:quota_pages])
        grants, _ = index.lookup(keys, touch=counts_uses)
        is_missing = grants["slot_index"] == SLOT_NONE
        yield int(np.argmax(is_missing)) if is_missing.any() else len(keys)
        new = np.ascontiguousarray(keys[is_missing])
        excess = index.counts()[1] + len(new) - quota_pages
        if excess > 0:
            index.evict(excess, keys[~is_missing])
            index.settle(index.collect())
        reserved = index.reserve(len(new), 1)
        assert reserved is not None, "as many slots as the quota and a batch"
        zero = np.zeros(len(new), dtype=np.uint32)
        index.commit(new, reserved, zero, np.zeros(len(new), dtype=np.uint8))
        index.settle(index.collect())


def hit_rate(policy: str, requests: list[list[int]], quota_pages: int) -> float:
    """Pages found as a prefix, of all that were asked for."""
    index = make_index(policy, quota_pages)
    hits = sum(_hits(index, requests, quota_pages, counts_uses=policy != "fifo"))
    assert index.stat().live_count <= quota_pages
    return hits / sum(map(len, requests))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, help="the first so many [all; 4000 generated]")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.trace is not None:
        requests = read_trace(given.trace)[: given.requests]
        print(f"{given.trace.name}: {len(requests)} requests")
    else:
        requests = generate(given.seed, given.requests or 4_000)
        print(f"generated: seed {given.seed}, {len(requests)} requests")
    distinct = len({number for numbers in requests for number in numbers})
    print(f"{distinct} pages in all\n{'quota pages':>12} " + " ".join(f"{policy:>8}" for policy in POLICIES))
    for share in SHARES:
        quota = max(int(distinct * share), 64)
        rates = [hit_rate(policy, requests, quota) for policy in POLICIES]
        print(f"{quota:>12} " + " ".join(f"{rate:>8.4f}" for rate in rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
