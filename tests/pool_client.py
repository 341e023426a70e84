"""An engine without a model on a pool: replays a generated trace until it is killed, and compares every restored page.

``pool_client.py SOCKET SEED FIRST`` goes on with request FIRST; a line of JSON for each request it is done with. While
the pool process or the target is away it goes on with misses, as an engine does.
Not here: who is killed when (``crash/test_kill_in_turn.py``).
"""

from __future__ import annotations

import json
import sys
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvdev.errors import CapacityError, TransportError
from kvdev.initiator.options import ControllerOptions
from kvdev.keys import KeyArray
from kvdev.pool.client import PoolStore
from kvdev.session import open_pool
from kvdev.store import PageStatus
from kvdev_tools.content import PageContent, request_keys
from kvdev_tools.trace import generate_conversations

BATCH_MAX = 8
TIMEOUT_S = 120.0

Pages = npt.NDArray[np.uint8]


def restore(store: PoolStore, content: PageContent, keys: KeyArray, pages: Pages) -> dict[str, int]:
    """Get the longest stored prefix; how many pages came, and how many of them were wrong or unreadable."""
    found = store.longest_prefix(keys)
    restored = mismatches = errors = 0
    for start in range(0, found, BATCH_MAX):
        part = keys[start : min(start + BATCH_MAX, found)]
        got = store.get(part, pages[: len(part)])
        for key, page, status in zip(part, pages, got.status.tolist(), strict=False):
            mismatches += status == PageStatus.HIT and not np.array_equal(page, content.page(key))
            errors += status == PageStatus.ERROR
        hits = got.status == PageStatus.HIT
        restored += len(part) if bool(hits.all()) else int(np.argmin(hits))
        if not hits.all():
            break
    return {"restored": restored, "mismatches": mismatches, "errors": errors}


def offload(store: PoolStore, content: PageContent, keys: KeyArray, pages: Pages) -> dict[str, int]:
    """Put pages and flush; how many were stored, and how often somebody was away."""
    stored = lost = 0
    for start in range(0, len(keys), BATCH_MAX):
        part = keys[start : start + BATCH_MAX]
        for page, key in zip(pages, part, strict=False):
            page[:] = content.page(key)
        put = store.put(part, pages[: len(part)])
        stored += put.stored_count
        if put.failure is not None:
            if not isinstance(put.failure, TransportError | CapacityError):
                raise put.failure
            lost += 1
    try:
        store.flush()
    except TransportError:
        lost += 1
    return {"stored": stored, "lost": lost}


def main(arguments: list[str]) -> int:
    path, seed, first = arguments
    options = ControllerOptions(kato_ms=1000, reconnect_delay_s=0.5)
    store = open_pool(path, "kv", options=options, timeout_s=TIMEOUT_S)
    content = PageContent(store.page_size_bytes)
    pages = np.zeros((BATCH_MAX, store.page_size_bytes), dtype=np.uint8)
    for number, request in enumerate(islice(generate_conversations(seed=int(seed)), int(first), None)):
        keys = request_keys(request.hash_ids)
        tally = restore(store, content, keys, pages)
        tally |= offload(store, content, keys[tally["restored"] :], pages)
        print(json.dumps({"request": int(first) + number, "pages": len(keys), **tally}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
