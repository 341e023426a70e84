"""Arenas and leases: staging memory that devices, the C core and page kernels reach at fixed addresses.

Not here: how the memory is mapped (``kvdev.staging.mapping``).
Threads: any; nothing blocks but the constructor, which populates the memory.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.errors import CapacityError, UnsupportedError, UsageError
from kvdev.staging.mapping import BACKING_AUTO, Mapping, check_size_bytes, map_memory
from kvdev.units import format_size

PAGE_ALIGNMENT_BYTES = 4096
"""Every leased page starts at a multiple of this: O_DIRECT, IOMMU pages and 64-byte vector stores are content."""


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES


class Lease:
    """Pages of one arena in use by one caller, contiguous, until ``release``.

    The memory is never reused or unmapped before ``release``, not even when the arena is closed. Whoever releases
    states that no device, C call or kernel still touches the pages. Contents are undefined at first.
    """

    def __init__(
        self, arena: Arena, mapping: Mapping, offset: int, page_count: int, page_size_bytes: int
    ) -> None:
        self.page_count = page_count
        self.page_size_bytes = page_size_bytes
        self.page_stride_bytes = _aligned(page_size_bytes)
        self.offset = offset
        """Of the first page in the arena, for those who share it by fd."""
        self._arena = arena
        self._mapping: Mapping | None = mapping
        run = mapping.bytes()[offset : offset + page_count * self.page_stride_bytes]
        self._array = run.reshape(page_count, self.page_stride_bytes)[:, :page_size_bytes]
        first = mapping.address + offset
        self._addresses: AddressArray = np.arange(page_count, dtype=np.uint64) * np.uint64(
            self.page_stride_bytes
        ) + np.uint64(first)
        self._addresses.flags.writeable = False

    @property
    def is_released(self) -> bool:
        return self._mapping is None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The pages as a ``(page_count, page_size_bytes)`` view; rows are contiguous and 4 KiB aligned."""
        self._check()
        return self._array

    @property
    def addresses(self) -> AddressArray:
        """The address of each page."""
        self._check()
        return self._addresses

    def _check(self) -> None:
        if self._mapping is None:
            raise UsageError("staging lease: used after release; lease pages again")

    def release(self) -> None:
        """Give the pages back; a second release raises UsageError."""
        self._arena._give_back(self)

    def __len__(self) -> int:
        return self.page_count

    def __enter__(self) -> Lease:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()


class Arena:
    """One populated piece of staging memory, handed out in leases of whole pages.

    ``is_shareable`` insists on a memfd, so that ``fd`` can be passed to another process, even where only other
    memory gets huge pages. The attribute ``backing`` says what was granted, ``hugetlb-1GiB``, ``hugetlb-2MiB``,
    ``thp`` or ``4KiB``; the argument insists on one of them. ``numa_node`` has all of the memory on that node:
    ``numa_node_of_pci`` tells the one next to a GPU or NIC. ``is_locked`` keeps it from being swapped.
    When its process ends, however it ends, so do the arena and its leases; other processes that were given the fd
    keep the memory until they close it.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        is_shareable: bool = False,
        backing: str = BACKING_AUTO,
        numa_node: int | None = None,
        is_locked: bool = False,
    ) -> None:
        check_size_bytes(size_bytes)
        mapping = map_memory(
            size_bytes,
            is_shareable=is_shareable,
            backing=backing,
            numa_node=numa_node,
            is_locked=is_locked,
        )
        self.numa_node = numa_node
        self.size_bytes = mapping.size_bytes
        self.address = mapping.address
        self.backing = mapping.backing
        self._mapping: Mapping | None = mapping
        self._lock = threading.Lock()
        # Free runs as (offset, size), ascending, never touching each other; bounded by the number of leases + 1.
        self._free: list[tuple[int, int]] = [(0, mapping.size_bytes)]
        self._lease_count = 0
        # Memory that something outside may still write to, and released runs of it that wait for that to end.
        self._holds: list[tuple[int, int, Callable[[], bool]]] = []
        self._parked: list[tuple[int, int]] = []

    @property
    def fd(self) -> int:
        """The memfd, valid until ``close``; duplicate it to keep it. UnsupportedError where there is none."""
        mapping = self._open_mapping()
        if mapping.fd is None:
            raise UnsupportedError(
                "staging arena: fd: this arena is anonymous memory; make it with is_shareable=True",
                feature="shareable arena",
            )
        return mapping.fd

    @property
    def has_fd(self) -> bool:
        return self._open_mapping().fd is not None

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of the memory; it stays mapped while the array lives. For those who share it with another process."""
        return self._open_mapping().bytes()

    def hold(self, address: int, size_bytes: int, is_over: Callable[[], bool]) -> None:
        """Lease these bytes to nobody, once released, before ``is_over`` is true: a device that died may still write
        to them. ``is_over`` must not block."""
        start = address - self.address
        with self._lock:
            self._holds.append((start, start + size_bytes, is_over))

    @property
    def held_bytes(self) -> int:
        """Released, but not yet free because of a ``hold``."""
        with self._lock:
            self._unpark()
            return sum(size for _, size in self._parked)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._unpark()
            return sum(size for _, size in self._free)

    @property
    def lease_count(self) -> int:
        """Leases not yet released."""
        return self._lease_count

    def lease(self, page_count: int, page_size_bytes: int) -> Lease:
        """Lease contiguous pages, each aligned to 4 KiB; never waits.

        Raises UsageError when the arena could never hold them, CapacityError when it cannot now.
        """
        for field, value in (("page_count", page_count), ("page_size_bytes", page_size_bytes)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise UsageError(f"staging lease: {field}: expected a positive whole number, got {value!r}")
        page_count, page_size_bytes = int(page_count), int(page_size_bytes)
        want = page_count * _aligned(page_size_bytes)
        wanted = f"{page_count} pages x {format_size(_aligned(page_size_bytes))} = {format_size(want)}"
        if want > self.size_bytes:
            raise UsageError(
                f"staging lease: expected at most the arena's {format_size(self.size_bytes)}, got {wanted}; "
                f"lease fewer pages at a time or make the arena larger"
            )
        with self._lock:
            mapping = self._open_mapping()
            self._unpark()
            offset = self._take(want)
            if offset is None:
                free = sum(size for _, size in self._free)
                largest = max((size for _, size in self._free), default=0)
                held = sum(size for _, size in self._parked)
                waits = f", {format_size(held)} held until a dead device's process ends" if held else ""
                raise CapacityError(
                    f"staging lease: no run of {wanted} is free: {format_size(free)} of "
                    f"{format_size(self.size_bytes)} free, largest run {format_size(largest)}{waits}; "
                    f"release a lease first"
                )
            lease = Lease(self, mapping, offset, page_count, page_size_bytes)
            self._lease_count += 1
        return lease

    def close(self) -> None:
        """Hand out no more leases and free the memory: now, or when the last lease or array of it is gone."""
        with self._lock:
            self._mapping = None

    def _open_mapping(self) -> Mapping:
        if self._mapping is None:
            raise UsageError("staging arena: used after close")
        return self._mapping

    def _take(self, want: int) -> int | None:
        """Cut ``want`` bytes from the first free run that has them."""
        for index, (offset, size) in enumerate(self._free):
            if size >= want:
                if size == want:
                    del self._free[index]
                else:
                    self._free[index] = (offset + want, size - want)
                return offset
        return None

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            if lease._mapping is None:
                raise UsageError("staging lease: released twice")
            lease._mapping = None
            lease._array = np.empty((0, 0), np.uint8)
            self._lease_count -= 1
            self._parked.append((lease.offset, lease.page_count * lease.page_stride_bytes))
            self._unpark()

    def _unpark(self) -> None:
        """Free the released runs that nobody writes to any more."""
        if self._holds:
            self._holds = [hold for hold in self._holds if not hold[2]()]
        parked, self._parked = self._parked, []
        for start, size in parked:
            if any(first < start + size and start < end for first, end, _ in self._holds):
                self._parked.append((start, size))
            else:
                self._free_run(start, size)

    def _free_run(self, start: int, size: int) -> None:
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            before = self._free.pop(index)
            start, size = before[0], before[1] + size
        self._free.insert(index, (start, size))

    def __enter__(self) -> Arena:
        self._open_mapping()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
