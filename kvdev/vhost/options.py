"""Options of a vhost-user-blk device, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from kvdev.errors import UsageError
from kvdev.native.vhost import BOUNCE_UNIT_BYTES, QUEUE_COUNT_MAX, QUEUE_SIZE_MAX
from kvdev.units import KIB, MIB, is_power_of_two


@dataclass(frozen=True)
class VhostOptions:
    """How to use a back end; the defaults suit a local SPDK and qemu-storage-daemon."""

    queue_count: int = 1
    """Virtqueues, at most so many as the back end has. More help only a back end that has a thread for each."""
    queue_size: int = 128
    """Descriptors per virtqueue, a power of two."""
    max_transfer_bytes: int = MIB
    window_size_bytes: int = 16 * MIB
    """Payload in flight per virtqueue; the rest waits on our side, by priority."""
    bounce_size_bytes: int = 4 * MIB
    """Shared memory through which payload marked as metadata is copied when it lies in memory that is not shared;
    0 refuses such payload. Pages are never copied."""
    has_event_idx: bool = True
    has_indirect: bool = True
    """Whether to use these where the back end offers them."""
    wants_inflight: bool = True
    """Where the back end keeps its commands in flight in shared memory, let them survive its restart: they wait,
    within their time limit, for a successor on the same socket. Without it each completes with −ENOTCONN."""

    def __post_init__(self) -> None:
        rules = (
            ("queue_count", 1 <= self.queue_count <= QUEUE_COUNT_MAX, f"1 to {QUEUE_COUNT_MAX}"),
            (
                "queue_size",
                4 <= self.queue_size <= QUEUE_SIZE_MAX and is_power_of_two(self.queue_size),
                f"a power of two from 4 to {QUEUE_SIZE_MAX}",
            ),
            (
                "max_transfer_bytes",
                4 * KIB <= self.max_transfer_bytes <= 64 * MIB and is_power_of_two(self.max_transfer_bytes),
                "a power of two from 4 KiB to 64 MiB",
            ),
            ("window_size_bytes", 4 * KIB <= self.window_size_bytes <= 1 << 30, "4 KiB to 1 GiB"),
            (
                "bounce_size_bytes",
                0 <= self.bounce_size_bytes <= 256 * MIB and self.bounce_size_bytes % BOUNCE_UNIT_BYTES == 0,
                f"a multiple of {BOUNCE_UNIT_BYTES} up to 256 MiB",
            ),
        )
        for name, is_good, expected in rules:
            if not is_good:
                raise UsageError(f"vhost options: {name}: expected {expected}, got {getattr(self, name)}")
