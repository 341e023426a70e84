"""Page kernels on a GPU: pack and unpack between an engine's device tensors and registered staging.

A move runs on a stream of its own with the highest priority. It starts after what the caller's stream holds by then,
and the caller's stream can be told to wait for it; nothing here synchronises that stream. All is checked before
anything is submitted; a move whose kernels did not report every tile, or whose device has an error, raises.
Not here: the driver (``kvdev_kernels.driver``), compiling (``kvdev_kernels.gpu_compile``), launch parameters
(``kvdev_kernels.gpu_shape``).
Threads: one caller at a time. ``submit_*`` blocks only when all slots are in use; ``Move.wait`` blocks.
"""

from __future__ import annotations

import enum
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.clock import Deadline
from kvdev.errors import DeadlineError
from kvdev_kernels import gpu_shape
from kvdev_kernels.driver import Driver, GpuError
from kvdev_kernels.errors import KernelError, ShapeError
from kvdev_kernels.gpu_compile import code_object
from kvdev_kernels.gpu_source import CHECK_KERNEL, KERNEL_NAMES, SUM_KERNEL, move_kernel
from kvdev_kernels.layout import PagedLayout

WORKGROUP_COUNT_DEFAULT = 16
"""16 KiB in flight each: 256 KiB, twice what a link of 64 GB/s and 1.3 us needs, on a few of the GPU's units."""
SLOT_COUNT = 4
"""Moves in flight; more would only wait for the link."""
MOVE_TIMEOUT_S = 60.0
"""A move that takes longer than this is a GPU that hangs."""
_POLL_FIRST_S, _POLL_LAST_S = 20e-6, 1e-3
_ALIGNMENT_BYTES = 64
BOUNCE_ALIGNMENT_BYTES = 256


class Route(enum.Enum):
    """How bytes cross the link."""

    DIRECT = "direct"
    """The kernel reads or writes registered staging itself: lowest latency, holds compute units for the transfer."""
    BOUNCE = "bounce"
    """The kernel packs into device memory, and each page crosses as one copy."""
    COPIES = "copies"
    """The copy engines move every run by itself, in batches: no compute unit at all, a price for each run."""


class MoveResult(NamedTuple):
    """NH-64 of each page, and whether it is the expected one; None where it was not asked for."""

    nh64: npt.NDArray[np.uint64] | None
    is_ok: npt.NDArray[np.bool_] | None


class GpuFaultError(KernelError):
    """The device failed, or a kernel did not do its work: the bytes of the move are undefined."""


@dataclass
class _Parts:
    """Where the tables of a move lie in a slot, as offsets."""

    page_count: int
    planes: int
    block_table: int
    pages: int
    expected: int
    totals: int
    done: int
    differs: int
    size: int

    @classmethod
    def of(cls, plane_count: int, block_count: int, page_count: int, group_count: int) -> _Parts:
        pages = 8 * page_count
        sizes = (16 * plane_count, 8 * block_count, pages * group_count, pages, pages, 16, 4 * page_count)
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return cls(page_count, *starts)


class _Slot:
    """Tables of one move, on the host (pinned) and on the device; grows, and is then used again and again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.event = driver.make_event()
        self.size_bytes = 0
        self.host: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.device = 0
        self.bounce = 0
        self.bounce_size_bytes = 0
        self.layer_events: list[Any] = []
        self.is_busy = False

    def reserve_bounce(self, size_bytes: int) -> None:
        """Device memory for the pages of a move."""
        if size_bytes > self.bounce_size_bytes:
            if self.bounce:
                self.driver.free(self.bounce)
                self.bounce = 0
            self.bounce = self.driver.alloc(size_bytes)
            self.bounce_size_bytes = size_bytes

    def reserve_events(self, count: int) -> None:
        while len(self.layer_events) < count:
            self.layer_events.append(self.driver.make_event())

    def reserve(self, size_bytes: int) -> None:
        if size_bytes <= self.size_bytes:
            return
        self.release()
        size_bytes = -(-size_bytes // 65536) * 65536
        host = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self.driver.register_host(host.ctypes.data, size_bytes)
        self.host = host
        self.device = self.driver.alloc(size_bytes)
        self.size_bytes = size_bytes

    def release(self) -> None:
        if self.device:
            self.driver.free(self.device)
            self.device = 0
        if self.host.size:
            self.driver.unregister_host(self.host.ctypes.data)
            self.host = np.empty(0, np.uint8)
        self.size_bytes = 0

    def close(self) -> None:
        """Give everything back."""
        self.release()
        if self.bounce:
            self.driver.free(self.bounce)
            self.bounce = 0
        for event in [*self.layer_events, self.event]:
            self.driver.end_event(event)

    def view(self, start: int, count: int, dtype: Any) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        return self.host[start : start + count * kind.itemsize].view(kind)


@dataclass
class Move:
    """A submitted pack or unpack. The layout, the pages and their memory stay as they are until it is over."""

    kernels: GpuKernels
    slot: _Slot
    parts: _Parts
    page_count: int
    tile_count: int
    has_sum: bool
    has_expected: bool
    layer_ends: tuple[int, ...]
    """Layers that are there when each of the slot's layer events is over; empty: all at once."""
    keep: tuple[object, ...] = field(repr=False)
    result: MoveResult | None = None

    def is_over(self) -> bool:
        """Whether the move is done; raises GpuFaultError when it failed."""
        if self.result is not None:
            return True
        self.kernels._check_alive()
        try:
            if not self.slot.driver.is_over(self.slot.event):
                return False
        except GpuError as error:
            raise self.kernels._fail(str(error)) from error
        self._finish()
        return True

    def wait(self, deadline: Deadline | None = None) -> MoveResult:
        """What the move found, when it is over."""
        limit = deadline or Deadline.after(MOVE_TIMEOUT_S)
        pause, delay_s = threading.Event(), _POLL_FIRST_S
        while not self.is_over():
            if limit.is_expired:
                # Its slot and its pages may still be written to, so neither can be used again.
                raise DeadlineError("kernels: a move did not end in time", operation="gpu move")
            pause.wait(delay_s)
            delay_s = min(2 * delay_s, _POLL_LAST_S)
        assert self.result is not None
        return self.result

    def then(self, stream: int) -> None:
        """Let later work of a caller's stream wait for the move, without blocking anyone."""
        driver = self.slot.driver
        if self.result is None:
            driver.wait_on_stream(driver.stream_from(stream), self.slot.event)

    def then_layer(self, layer_index: int, stream: int) -> None:
        """Let later work of a caller's stream wait until this layer, of those of the page, is in the tensors.

        Its checksum is known only when the move is over: attention may run on it, its result is used after ``wait``.
        """
        driver = self.slot.driver
        if self.result is not None:
            return
        index = next((i for i, end in enumerate(self.layer_ends) if layer_index < end), None)
        event = self.slot.event if index is None else self.slot.layer_events[index]
        driver.wait_on_stream(driver.stream_from(stream), event)

    def _finish(self) -> None:
        slot, parts = self.slot, self.parts
        done = int(slot.view(parts.done, 1, np.uint64)[0])
        if done != self.tile_count:
            raise self.kernels._fail(f"a kernel reported {done} of {self.tile_count} tiles")
        sums = slot.view(parts.totals, self.page_count, np.uint64).copy() if self.has_sum else None
        is_ok = None
        if self.has_expected:
            is_ok = slot.view(parts.differs, self.page_count, np.uint32) == 0
        self.result = MoveResult(sums, is_ok)
        slot.is_busy = False
        self.keep = ()


class _Order(NamedTuple):
    """A move, checked."""

    layout: PagedLayout
    table: npt.NDArray[np.int64]
    addresses: AddressArray
    after: int | None
    expected: npt.NDArray[np.uint64] | None
    is_pack: bool
    has_sum: bool
    route: Route
    layers_per_event: int


def _layer_groups(layout: PagedLayout, layers_per_event: int) -> list[tuple[int, int]]:
    """First layer and the one after the last of each group."""
    count = layout.geometry.layer_count
    step = layers_per_event or count
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _tables(slot: _Slot, parts: _Parts, group_index: int) -> gpu_shape.Tables:
    pages = parts.pages + group_index * 8 * parts.page_count
    starts = (parts.planes, parts.block_table, pages, parts.totals, parts.done)
    return gpu_shape.Tables(*(slot.device + at for at in starts))


def _runs(order: _Order) -> tuple[AddressArray, AddressArray, npt.NDArray[np.uint64]]:
    """Where each run lies in the tensors and in staging, and its size; holes are left out."""
    layout, count = order.layout, len(order.addresses)
    blocks = order.table[:, None, :] * layout.block_stride + layout.plane_addresses[None, :, None]
    rows = np.arange(layout.token_count) * layout.token_stride
    heads = np.arange(layout.head_count) * layout.head_stride
    runs = blocks[..., None, None] + rows[:, None] + heads
    inside = np.arange(runs[0].size).reshape(runs[0].shape) * layout.run_size_bytes
    places = order.addresses.astype(np.int64).reshape(count, 1, 1, 1, 1) + inside
    is_there = np.broadcast_to(order.table[:, None, :, None, None] >= 0, runs.shape)
    sizes = np.full(int(is_there.sum()), layout.run_size_bytes, np.uint64)
    return runs[is_there].astype(np.uint64), places[is_there].astype(np.uint64), sizes


class GpuKernels:
    """Pack and unpack on one device; ``close`` gives everything back.

    Staging is registered with ``register`` before pages in it are moved; whoever registered it unregisters it before
    unmapping it.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        workgroup_limit: int = WORKGROUP_COUNT_DEFAULT,
        route: Route | None = None,
        cache: Path | None = None,
    ) -> None:
        if workgroup_limit < 1:
            raise ShapeError("workgroup_limit", expected="1 or more", got=workgroup_limit)
        self.driver = driver
        self.backend = driver.backend
        self.workgroup_limit = workgroup_limit
        self.route = route
        """For every move that names none, whatever was measured."""
        self.choose_route: Callable[[bool, int], Route] = lambda _is_pack, _run_size_bytes: Route.BOUNCE
        """(is_pack, run size) -> the route of moves that name none; a calibration sets it. One copy a page is what
        is least likely to hold anything up on a card that was not measured."""
        image, self.is_from_cache = code_object(driver, cache)
        driver.use()
        self._module = driver.load_module(image)
        self._functions = {name: driver.function(self._module, name) for name in KERNEL_NAMES}
        self._stream = driver.make_stream()
        self._before = driver.make_event()
        self._slots = [_Slot(driver) for _ in range(SLOT_COUNT)]
        self._registered: dict[int, tuple[int, int]] = {}
        self._moves: list[Move] = []
        self._fault = ""
        self._is_closed = False

    # --- staging
    def register(self, address: int, size_bytes: int) -> int:
        """Pin staging memory and map it into the device; its device address."""
        self._check_alive()
        self.driver.use()
        device = self.driver.register_host(address, size_bytes)
        self._registered[address] = (size_bytes, device)
        return device

    def unregister(self, address: int) -> None:
        """Undo ``register``; no move may be using it."""
        if address not in self._registered:
            raise ShapeError("staging", expected="memory that was registered", got=f"{address:#x}")
        self.driver.use()
        self.driver.unregister_host(address)
        del self._registered[address]

    def is_device_memory(self, addresses: AddressArray, size_bytes: int) -> bool:
        """Whether any of these pages lies in the memory of the device, where the processor does not reach it."""
        self.driver.use()
        return bool(self._device_addresses(addresses, size_bytes)[1].any())

    def _device_addresses(
        self, addresses: AddressArray, size_bytes: int
    ) -> tuple[AddressArray, npt.NDArray[np.bool_]]:
        """Where the device finds each page, and whether it is in its own memory."""
        out = np.zeros(len(addresses), np.uint64)
        is_own = np.zeros(len(addresses), np.bool_)
        for start, (size, device) in self._registered.items():
            inside = (addresses >= np.uint64(start)) & (
                addresses + np.uint64(size_bytes) <= np.uint64(start + size)
            )
            out[inside] = addresses[inside] - np.uint64(start) + np.uint64(device)
        for index in np.flatnonzero(out == 0).tolist():
            out[index], is_own[index] = self._foreign_page(index, int(addresses[index]), size_bytes)
        return out, is_own

    def _foreign_page(self, index: int, address: int, size_bytes: int) -> tuple[int, bool]:
        """A page in memory that somebody else pinned or allocated (torch): its device address, and if it is there."""
        first, last = (self.driver.mapped_host(address + at) for at in (0, size_bytes - 1))
        if first is not None and last == first + size_bytes - 1:
            return first, False
        found = self.driver.allocation_of(address)
        if found is not None and address + size_bytes <= found[0] + found[1]:
            return address, True
        raise ShapeError(
            f"pages[{index}]",
            expected=f"{size_bytes} bytes of staging registered with this device (register), pinned, or its own memory",
            got=f"address {address:#x}",
        )

    # --- moves
    def submit_pack(
        self,
        layout: PagedLayout,
        block_table: Any,
        addresses: AddressArray,
        *,
        after: int | None = None,
        has_sum: bool = True,
        route: Route | None = None,
    ) -> Move:
        """Gather pages out of the paged tensors into staging.

        Args:
            addresses: host address of each page, in registered staging.
            after: the caller's stream (torch's ``cuda_stream``) whose present work writes the tensors.
            has_sum: compute each page's NH-64.
            route: instead of the kernels' own.
        """
        table = layout.check_table(block_table, len(addresses), is_written=False)
        gpu_shape.check_pages_apart(addresses, layout.geometry.page_size_bytes)
        chosen = self._route(route, layout, is_pack=True)
        order = _Order(layout, table, addresses, after, None, True, has_sum, chosen, 0)
        return self._submit(order)

    def submit_unpack(
        self,
        layout: PagedLayout,
        block_table: Any,
        addresses: AddressArray,
        *,
        after: int | None = None,
        expected: npt.NDArray[np.uint64] | None = None,
        has_sum: bool = True,
        route: Route | None = None,
        layers_per_event: int = 0,
    ) -> Move:
        """Scatter pages from staging into the paged tensors; with ``expected``, say of each whether its NH-64 is that.

        A page that differs was scattered all the same: the caller must not use the blocks it names.
        ``layers_per_event``: so many layers at a time, in order, so that ``Move.then_layer`` waits for no more than
        it needs; 0: all at once.
        """
        table = layout.check_table(block_table, len(addresses), is_written=True)
        if not layout.is_writable:
            raise ShapeError("tensors", expected="writable memory", got="a read-only array")
        if expected is not None and (expected.shape != addresses.shape or expected.dtype != np.uint64):
            raise ShapeError(
                "expected", expected=f"({len(addresses)},) uint64", got=f"{expected.shape} {expected.dtype}"
            )
        has_sum = has_sum or expected is not None
        if layers_per_event < 0:
            raise ShapeError("layers_per_event", expected="0 or more", got=layers_per_event)
        chosen = self._route(route, layout, is_pack=False)
        order = _Order(layout, table, addresses, after, expected, False, has_sum, chosen, layers_per_event)
        return self._submit(order)

    def _route(self, route: Route | None, layout: PagedLayout, *, is_pack: bool) -> Route:
        return route or self.route or self.choose_route(is_pack, layout.run_size_bytes)

    def _submit(self, order: _Order) -> Move:
        self._check_alive()
        layout, addresses = order.layout, order.addresses
        size, count = layout.geometry.page_size_bytes, len(addresses)
        if not count:
            raise ShapeError("pages", expected="one page or more", got=0)
        self._check_layout(layout)
        self.driver.use()
        pages, is_own = self._device_addresses(addresses, size)
        if is_own.any():
            order = order._replace(route=Route.DIRECT)  # no link to cross
        if order.has_sum and bool((pages % np.uint64(16)).any()):
            raise ShapeError("pages", expected="addresses at multiples of 16 to checksum them", got="others")
        self._check_memory(layout)
        groups = _layer_groups(layout, order.layers_per_event)
        parts = _Parts.of(len(layout.plane_addresses), order.table.size, count, len(groups))
        slot = self._free_slot()
        slot.reserve(parts.size)
        slot.reserve_events(len(groups) if len(groups) > 1 else 0)
        if order.route is Route.BOUNCE:
            stride = -(-size // BOUNCE_ALIGNMENT_BYTES) * BOUNCE_ALIGNMENT_BYTES
            slot.reserve_bounce(count * stride)
            pages = np.arange(count, dtype=np.uint64) * np.uint64(stride) + np.uint64(slot.bounce)
        width = gpu_shape.unit_width(layout, pages)
        is_fused = order.has_sum and width == 16 and len(groups) == 1 and order.route is not Route.COPIES
        launches = self._launches(order, slot, parts, groups, width, has_fused_sum=is_fused)
        has_own_sum = order.has_sum and not is_fused
        sums = gpu_shape.sum_shape(
            size, count, workgroup_limit=self.workgroup_limit, tables=_tables(slot, parts, 0)
        )
        self._fill(order, slot, parts, groups, pages)
        try:
            self._enqueue(order, slot, parts, launches, sums if has_own_sum else None, pages)
        except GpuError as error:
            # Some of it may have been submitted, so the slot and the pages are no longer known to be at rest.
            raise self._fail(str(error)) from error
        slot.is_busy = True
        tiles = sum(int(shape["tile_count"]) for _, shape in launches)
        tiles += int(sums["tile_count"]) if has_own_sum else 0
        ends = tuple(last for _, last in groups) if len(groups) > 1 else ()
        is_checked = order.expected is not None
        made = Move(self, slot, parts, count, tiles, order.has_sum, is_checked, ends, (layout, addresses))
        self._moves = [each for each in self._moves if each.result is None] + [made]
        return made

    def _launches(
        self,
        order: _Order,
        slot: _Slot,
        parts: _Parts,
        groups: list[tuple[int, int]],
        width: int,
        *,
        has_fused_sum: bool,
    ) -> list[tuple[str, npt.NDArray[np.void]]]:
        """One launch for each group of layers; none where the copy engines move the runs."""
        if order.route is Route.COPIES:
            return []
        name = move_kernel(width, is_pack=order.is_pack, has_sum=has_fused_sum)
        found = []
        for index, (first, last) in enumerate(groups):
            tables = _tables(slot, parts, index)
            planes = order.layout.geometry.planes_per_layer
            shape = gpu_shape.move_shape(
                order.layout,
                len(order.addresses),
                width=width,
                workgroup_limit=self.workgroup_limit,
                tables=tables._replace(
                    planes=tables.planes + gpu_shape.PLANE_DTYPE.itemsize * first * planes
                ),
                plane_count=(last - first) * planes,
            )
            found.append((name, shape))
        return found

    def _fill(
        self, order: _Order, slot: _Slot, parts: _Parts, groups: list[tuple[int, int]], pages: AddressArray
    ) -> None:
        layout, count = order.layout, len(pages)
        slot.host[: parts.size] = 0
        planes = slot.view(parts.planes, len(layout.plane_addresses), gpu_shape.PLANE_DTYPE)
        planes[:] = gpu_shape.plane_table(layout)
        slot.view(parts.block_table, order.table.size, np.int64)[:] = order.table.reshape(-1)
        layer_bytes = layout.geometry.page_size_bytes // layout.geometry.layer_count
        for index, (first, _) in enumerate(groups):
            part = slot.view(parts.pages + 8 * count * index, count, np.uint64)
            part[:] = pages + np.uint64(first * layer_bytes)
        if order.expected is not None:
            slot.view(parts.expected, count, np.uint64)[:] = order.expected

    def _enqueue(
        self,
        order: _Order,
        slot: _Slot,
        parts: _Parts,
        launches: list[tuple[str, npt.NDArray[np.void]]],
        sums: npt.NDArray[np.void] | None,
        pages: AddressArray,
    ) -> None:
        driver, stream = self.driver, self._stream
        if order.after is not None:
            driver.record(self._before, driver.stream_from(order.after))
            driver.wait_on_stream(stream, self._before)
        driver.copy(slot.device, slot.host.ctypes.data, parts.size, stream)
        sizes = np.full(len(pages), order.layout.geometry.page_size_bytes, np.uint64)
        if order.route is Route.BOUNCE and not order.is_pack:
            driver.copy_batch(pages, order.addresses, sizes, stream)
        # Staging is complete after a pack and before an unpack.
        if sums is not None and not order.is_pack:
            self._launch(SUM_KERNEL, sums)
        if order.route is Route.COPIES:
            runs, places, run_sizes = _runs(order)
            driver.copy_batch(*((places, runs) if order.is_pack else (runs, places)), run_sizes, stream)
        for index, (name, shape) in enumerate(launches):
            self._launch(name, shape)
            if len(launches) > 1:
                driver.record(slot.layer_events[index], stream)
        if sums is not None and order.is_pack:
            self._launch(SUM_KERNEL, sums)
        if order.has_sum:
            check = np.zeros((), gpu_shape.CHECK_DTYPE)
            check["totals"] = slot.device + parts.totals
            check["expected"] = slot.device + parts.expected if order.expected is not None else 0
            check["differs"] = slot.device + parts.differs
            check["page_size"], check["page_count"] = sizes[0], len(pages)
            check["workgroup_count"] = 1
            self._launch(CHECK_KERNEL, check)
        if order.route is Route.BOUNCE and order.is_pack:
            driver.copy_batch(order.addresses, pages, sizes, stream)
        results = parts.size - parts.totals
        driver.copy(slot.host.ctypes.data + parts.totals, slot.device + parts.totals, results, stream)
        driver.record(slot.event, stream)

    def _launch(self, name: str, parameters: npt.NDArray[np.void]) -> None:
        count = int(parameters["workgroup_count"])
        self.driver.launch(
            self._functions[name], count, gpu_shape.THREAD_COUNT, parameters.tobytes(), self._stream
        )

    # --- checks
    def _check_layout(self, layout: PagedLayout) -> None:
        device = f"cuda:{self.driver.device_index}"  # torch's word on ROCm as well
        if layout.device not in (device, "cuda"):
            raise ShapeError(
                "tensors: device", expected=f"{device} for back end {self.backend}", got=layout.device
            )
        if not layout.is_regular:
            raise ShapeError(
                "tensors: runs",
                expected="one size, token stride and head stride for all planes on a GPU",
                got=f"{len(layout.classes)} classes of runs",
            )

    def _check_memory(self, layout: PagedLayout) -> None:
        """Every plane lies in live memory of the device."""
        span = gpu_shape.plane_span_bytes(layout)
        base, end = 0, 0
        for index in np.argsort(layout.plane_addresses):
            address = int(layout.plane_addresses[index])
            if base <= address and address + span <= end:
                continue
            found = self.driver.allocation_of(address)
            if found is None:
                raise ShapeError(
                    f"plane {int(index)}",
                    expected="live memory of this device",
                    got=f"address {address:#x}, which the driver does not know (freed, or another device's)",
                )
            base, end = found[0], found[0] + found[1]
            # Allocators that grow by mapping more memory (torch's expandable segments) give neighbouring pieces.
            while address + span > end and (more := self.driver.allocation_of(end)) is not None:
                end = more[0] + more[1]
            if address + span > end:
                raise ShapeError(
                    f"plane {int(index)}",
                    expected=f"{span} bytes of device memory from {address:#x} on",
                    got=f"memory that ends {end - address} bytes on",
                )

    def _check_alive(self) -> None:
        if self._is_closed:
            raise KernelError("kernels: used after close")
        if self._fault:
            raise GpuFaultError(f"kernels: {self.backend}: not usable after a fault: {self._fault}")

    def _fail(self, reason: str) -> GpuFaultError:
        self._fault = self._fault or reason
        return GpuFaultError(f"kernels: {self.backend}: {reason}; the bytes of this move are undefined")

    def _free_slot(self) -> _Slot:
        for slot in self._slots:
            if not slot.is_busy:
                return slot
        oldest = next(each for each in self._moves if each.result is None)
        oldest.wait()
        return oldest.slot

    def close(self) -> None:
        """Wait for moves in flight and give everything back; after a fault, give back what the driver lets go."""
        if self._is_closed:
            return
        if not self._fault:
            for move in self._moves:
                if move.result is None:
                    move.wait()
        self._is_closed = True
        steps: list[Any] = [self.driver.use, *(slot.close for slot in self._slots)]
        steps += [lambda: self.driver.end_event(self._before), lambda: self.driver.end_stream(self._stream)]
        steps += [lambda: self.driver.unload_module(self._module)]
        steps += [
            lambda address=address: self.driver.unregister_host(address) for address in self._registered
        ]
        for step in steps:
            try:
                step()
            except GpuError:
                if not self._fault:
                    raise

    def __enter__(self) -> GpuKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
