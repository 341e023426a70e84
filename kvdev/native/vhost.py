"""The rings of one vhost-user-blk device, in memory shared with the back end.

Not here: the handshake and every message on the socket (``kvdev.vhost``).
Trust: the core checks what the back end writes into the rings; its first lie is the ``fault`` here.
Threads: as the queue it is attached to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvdev._core import ffi, lib
from kvdev.errors import UsageError
from kvdev.native.queue import HostQueue

QUEUE_COUNT_MAX: Final = int(lib.KVDEV_VHOST_QUEUES_MAX)
QUEUE_SIZE_MAX: Final = int(lib.KVDEV_VHOST_QUEUE_SIZE_MAX)
REGION_COUNT_MAX: Final = int(lib.KVDEV_VHOST_REGIONS_MAX)
SEGMENT_COUNT_MAX: Final = int(lib.KVDEV_VHOST_SEGMENTS_MAX)
RANGE_COUNT_MAX: Final = int(lib.KVDEV_VHOST_RANGES_MAX)
BOUNCE_UNIT_BYTES: Final = int(lib.KVDEV_VHOST_BOUNCE_PIECES) * 4096
"""The bounce buffer's size is a multiple of this."""

_STATES = {0: "idle", 1: "ready", 2: "held", 3: "dead"}
_FAULTS = {
    0: "none",
    1: "closed by the back end",
    2: "timeout",
    3: "ring",
    4: "message",
    5: "given up",
}


@dataclass(frozen=True)
class RingParams:
    """What handshake and options agreed on; fields as in ``struct kvdev_vhost_params``."""

    block_count: int
    block_size_bytes: int
    max_transfer_bytes: int
    queue_count: int
    queue_size: int
    segment_size_bytes: int = 0
    """Largest payload descriptor, 0 for no limit."""
    segment_count: int = 1
    discard_sectors_max: int = 0
    discard_ranges_max: int = 0
    write_zeroes_sectors_max: int = 0
    bounce_size_bytes: int = 0
    window_size_bytes: int = 16 << 20
    has_indirect: bool = False
    has_event_idx: bool = False
    has_flush: bool = False
    has_discard: bool = False
    has_write_zeroes: bool = False
    may_unmap_zeroes: bool = False
    is_read_only: bool = False


@dataclass(frozen=True)
class RingLayout:
    """Where one virtqueue lies, for the messages that tell the back end."""

    desc_addr: int
    avail_addr: int
    used_addr: int
    base: int
    queue_size: int
    slot_count: int
    in_flight_count: int


@dataclass(frozen=True)
class RingFault:
    """Why a device is dead; for kind ``ring``: which field lied, what was expected, what came."""

    kind: str
    error: int
    queue_index: int | None
    field: str
    expected: int
    actual: int
    text: str


@dataclass(frozen=True)
class RingStats:
    """State and counters of a device's rings."""

    state: str
    in_flight_count: int
    commands: int
    kicks: int
    """System calls that told the back end of new commands."""
    wakes: int
    """Times the back end was asked to notify, because the queue went to sleep."""
    bounced_commands: int
    bounced_bytes: int
    unaligned_commands: int
    has_backend_message: bool


def control_size_bytes(params: RingParams) -> int:
    """Shared memory that the rings need; UsageError when the parameters do not make rings."""
    size = int(lib.kvdev_vhost_control_size(_raw_params(params, 0, 0)))
    if size == 0:
        raise UsageError(f"vhost rings: expected parameters that fit together, got {params}")
    return size


def _raw_params(params: RingParams, address: int, size_bytes: int) -> Any:
    values = {**params.__dict__, "control_addr": address, "control_size_bytes": size_bytes}
    return ffi.new("struct kvdev_vhost_params *", values)


class VhostRings:
    """A device's rings; they live as long as this object or the queue that drives them.

    The memory they are in, the regions and the descriptors given to ``start`` are the caller's to keep.
    """

    def __init__(self, params: RingParams, *, address: int, size_bytes: int) -> None:
        out = ffi.new("struct kvdev_vhost **")
        code = lib.kvdev_vhost_create(_raw_params(params, address, size_bytes), out)
        if code:
            raise UsageError(f"vhost rings: create: {os.strerror(-code)}")
        self.raw: Any = ffi.gc(out[0], lib.kvdev_vhost_destroy)
        self.params = params

    def add_region(self, address: int, size_bytes: int) -> None:
        """Let payload lie there; the caller keeps it mapped as long as the rings live."""
        code = lib.kvdev_vhost_region_add(self.raw, address, size_bytes)
        if code:
            raise UsageError(
                f"vhost rings: region 0x{address:x}: expected one of at most {REGION_COUNT_MAX} regions, "
                f"got {os.strerror(-code)}"
            )

    def layout(self, queue_index: int) -> RingLayout:
        raw = ffi.new("struct kvdev_vhost_ring *")
        code = lib.kvdev_vhost_ring_read(self.raw, queue_index, raw)
        if code:
            raise UsageError(f"vhost rings: queue_index: expected one of the device's, got {queue_index}")
        return RingLayout(
            desc_addr=int(raw.desc_addr),
            avail_addr=int(raw.avail_addr),
            used_addr=int(raw.used_addr),
            base=int(raw.base),
            queue_size=int(raw.queue_size),
            slot_count=int(raw.slot_count),
            in_flight_count=int(raw.in_flight_count),
        )

    def start(
        self,
        *,
        socket_fd: int,
        channel_fd: int,
        kick_fds: Sequence[int],
        call_fd: int,
        is_held_on_loss: bool,
    ) -> None:
        """Work may begin, or go on after the connection of a held device was made again."""
        assert len(kick_fds) == self.params.queue_count
        code = lib.kvdev_vhost_start(
            self.raw, socket_fd, channel_fd, ffi.new("int[]", list(kick_fds)), call_fd, is_held_on_loss
        )
        if code:
            raise UsageError(f"vhost rings: start: expected an idle or held device, got {self.stats.state}")

    def attach(self, queue: HostQueue) -> int:
        """Make it a device of the queue; returns the device index."""
        out = ffi.new("uint32_t *")
        queue._check(lib.kvdev_vhost_attach(self.raw, queue._check_usable("attach"), out), "attach")
        return int(out[0])

    def succeed(self, queue: HostQueue, device_index: int) -> None:
        """Take over a device index; what was in flight on its old rings completes with −ENOTCONN."""
        queue._check(
            lib.kvdev_vhost_succeed(self.raw, queue._check_usable("succeed"), device_index), "succeed"
        )

    def set_block_count(self, block_count: int) -> None:
        lib.kvdev_vhost_capacity_set(self.raw, block_count)

    def kill(self, error: int, text: str) -> None:
        """End the device; what is in flight completes with −``error``."""
        lib.kvdev_vhost_kill(self.raw, -error, text.encode(errors="replace"))

    def clear_attention(self) -> None:
        """Say that the state as it is now has been seen."""
        lib.kvdev_vhost_attention_clear(self.raw)

    @property
    def state(self) -> str:
        """``idle``, ``ready``, ``held`` (waits for another start) or ``dead``."""
        return self.stats.state

    @property
    def stats(self) -> RingStats:
        raw = ffi.new("struct kvdev_vhost_info *")
        lib.kvdev_vhost_info_read(self.raw, raw)
        return RingStats(
            state=_STATES[int(raw.state)],
            in_flight_count=int(raw.in_flight_count),
            commands=int(raw.commands),
            kicks=int(raw.kicks),
            wakes=int(raw.wakes),
            bounced_commands=int(raw.bounced_commands),
            bounced_bytes=int(raw.bounced_bytes),
            unaligned_commands=int(raw.unaligned_commands),
            has_backend_message=bool(raw.has_backend_message),
        )

    @property
    def fault(self) -> RingFault | None:
        """Why the device is dead; None while it is not."""
        raw = ffi.new("struct kvdev_vhost_fault *")
        lib.kvdev_vhost_fault_read(self.raw, raw)
        if raw.kind == 0:
            return None
        return RingFault(
            kind=_FAULTS[int(raw.kind)],
            error=int(raw.error),
            queue_index=None if raw.queue_index == 0xFFFFFFFF else int(raw.queue_index),
            field=ffi.string(raw.field).decode("ascii", "replace"),
            expected=int(raw.expected),
            actual=int(raw.actual),
            text=ffi.string(raw.text).decode("ascii", "replace"),
        )

    def spans(self) -> list[tuple[int, int]]:
        """Address and size of each payload that was in the back end's hands when the device died."""
        raw = ffi.new("struct kvdev_vhost_info *")
        lib.kvdev_vhost_info_read(self.raw, raw)
        count = int(raw.span_count)
        out = ffi.new("struct kvdev_vhost_span[]", max(count, 1))
        count = int(lib.kvdev_vhost_spans_read(self.raw, out, count))
        return [(int(out[index].addr), int(out[index].size_bytes)) for index in range(count)]
