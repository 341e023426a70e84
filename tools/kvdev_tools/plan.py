"""What a replay needs, worked out before anything is made: pages, tensors, arena, volume, against what there is.

Not here: running it (``kvdev_tools.replay``, ``kvdev_tools.rig``).
Trust: the requests come from a checked trace; raises UsageError with the arithmetic when the plan does not fit.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.units import MIB, format_size
from kvdev_tools.trace import Request

ARENA_SIZE_BYTES_TARGET = 64 * MIB
"""One batch of pages: enough to keep every connection busy, small enough to stay out of the way."""
ARENA_PAGE_COUNT_MAX = 1024
CLIENT_BASE_BYTES = 300 * MIB
"""The client's interpreter, libraries, compiled kernels and buffers."""
TARGET_BASE_BYTES = 150 * MIB
STORED_PAGE_BYTES = 100
"""The client's memory per stored page: the bound that the page table keeps."""
MEMORY_SHARE = 0.9
"""Of the memory that is available; the rest is left to the system."""


@dataclass(frozen=True)
class TraceNeeds:
    """What a trace asks for, counted in one pass."""

    requests: int
    pages_requested: int
    pages_per_request_max: int
    pages_distinct: int | None
    """None when it was not counted."""
    distinct_by_request: array[int]
    """Distinct pages after each request; empty when not counted."""

    def requests_within(self, page_count: int) -> int:
        """How many requests from the start have at most ``page_count`` distinct pages."""
        return int(np.searchsorted(np.frombuffer(self.distinct_by_request, np.int64), page_count, "right"))


def count_needs(requests: Iterable[Request], *, is_distinct_counted: bool = True) -> TraceNeeds:
    """Count a trace's needs; 16 bytes a requested page while counting distinct ones, else nothing per page."""
    ids = array("Q")
    ends = array("q")
    count = requested = widest = 0
    for request in requests:
        count += 1
        requested += len(request.hash_ids)
        widest = max(widest, len(request.hash_ids))
        if is_distinct_counted:
            ids.extend(request.hash_ids)
            ends.append(requested)
    if not is_distinct_counted or not count:
        return TraceNeeds(count, requested, widest, None, array("q"))
    _, first = np.unique(np.frombuffer(ids, np.uint64), return_index=True)
    first.sort()
    by_request = array("q")
    by_request.frombytes(np.searchsorted(first, np.frombuffer(ends, np.int64)).astype(np.int64).tobytes())
    return TraceNeeds(count, requested, widest, len(first), by_request)


@dataclass(frozen=True)
class Available:
    """What this machine has left, in bytes."""

    memory_bytes: int
    memory_source: str


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Available:
    """The least of MemAvailable and what the enclosing control groups still allow."""
    best = Available(1 << 62, "unknown")
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                best = Available(int(line.split()[1]) * 1024, "MemAvailable")
        relative = cgroup.read_text().strip().rpartition("::")[2].lstrip("/")
    except (OSError, ValueError, IndexError):
        return best
    folder = root / relative
    while folder.is_relative_to(root):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                left = max(0, int(limit) - used)
                if left < best.memory_bytes:
                    best = Available(left, str(folder / "memory.max"))
        except (OSError, ValueError):
            pass
        if folder == root:
            break
        folder = folder.parent
    return best


@dataclass(frozen=True)
class ClientPlan:
    """Sizes of the replaying process."""

    batch_page_count: int
    """Pages that the arena holds, moved in one batch."""
    tensor_page_count: int
    arena_size_bytes: int
    tensors_size_bytes: int


def plan_client(geometry: Geometry, needs: TraceNeeds, *, arena_size_bytes: int | None = None) -> ClientPlan:
    """Tensors for the largest request; an arena for a batch of it."""
    page = -(-geometry.page_size_bytes // 4096) * 4096
    tensor_pages = max(1, needs.pages_per_request_max)
    if arena_size_bytes is not None and arena_size_bytes < page:
        raise UsageError(
            f"arena: expected room for one page of {format_size(page)}, got {format_size(arena_size_bytes)}"
        )
    wanted = (arena_size_bytes or max(ARENA_SIZE_BYTES_TARGET, page)) // page
    batch = max(1, min(wanted, tensor_pages, ARENA_PAGE_COUNT_MAX))
    return ClientPlan(
        batch_page_count=batch,
        tensor_page_count=tensor_pages,
        arena_size_bytes=batch * page,
        tensors_size_bytes=tensor_pages * geometry.page_size_bytes,
    )


@dataclass(frozen=True)
class Demand:
    """One line of the arithmetic."""

    what: str
    size_bytes: int
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what} {format_size(self.size_bytes)}" + (f" ({self.how})" if self.how else "")


def client_demands(geometry: Geometry, client: ClientPlan, stored_page_count: int) -> list[Demand]:
    """What the client keeps in memory."""
    page = format_size(geometry.page_size_bytes)
    return [
        Demand("paged tensors", client.tensors_size_bytes, f"{client.tensor_page_count} pages x {page}"),
        Demand("staging arena", client.arena_size_bytes, f"{client.batch_page_count} pages x {page}"),
        Demand(
            "page table",
            stored_page_count * STORED_PAGE_BYTES,
            f"{stored_page_count} pages x {STORED_PAGE_BYTES} B",
        ),
        Demand("client", CLIENT_BASE_BYTES),
    ]


def check_fit(
    demands: list[Demand], *, available_bytes: int, where: str, remedy: str, share: float = MEMORY_SHARE
) -> None:
    """Raise UsageError with the whole sum when the demands exceed the share of what is available."""
    total = sum(demand.size_bytes for demand in demands)
    allowed = int(available_bytes * share)
    if total <= allowed:
        return
    sum_text = " + ".join(str(demand) for demand in demands)
    raise UsageError(
        f"plan: {where}: {sum_text} = {format_size(total)}, but {share:.0%} of the {format_size(available_bytes)} "
        f"available is {format_size(allowed)}; {remedy}"
    )


def disk_free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there."""
    try:
        return shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"files: {folder}: {reason}; name an existing folder with room for the namespaces"
        ) from error
