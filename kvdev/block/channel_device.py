"""A device as one user of its queue's background poller sees it: the same blocks, commands through a channel.

Not here: the poller and its channels (``kvdev.native.poller``).
"""

from __future__ import annotations

from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.native.poller import Channel


class ChannelDevice(BlockDevice):
    """For the thread that has the channel: everything that takes a BlockDevice works on it, the store included.

    Geometry is the device's at the time of construction. Closing it closes neither the device nor the channel.
    """

    def __init__(self, device: BlockDevice, channel: Channel) -> None:
        if device.queue is not channel.poller.queue:
            raise UsageError(
                f"{device.uri}: channel: expected one of the poller that drives the device's queue, got another's"
            )
        self._device = device
        self.uri = device.uri
        self.identity = device.identity
        self.block_size_bytes = device.block_size_bytes
        self.block_count = device.block_count
        self.max_transfer_bytes = device.max_transfer_bytes
        self.atomic_write_blocks = device.atomic_write_blocks
        self.has_volatile_cache = device.has_volatile_cache
        self.metadata_size_bytes = device.metadata_size_bytes
        self.is_read_only = device.is_read_only
        self.compare_and_write_blocks = device.compare_and_write_blocks
        self.reservations = device.reservations
        self.queue = channel
        self.device_index = device.device_index

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        """As the device does it; the poller stands aside until it has ended."""
        return self._device.compare_and_write(slba, expected, new, deadline)

    @property
    def cache_loss_count(self) -> int:
        return self._device.cache_loss_count

    def note_writes(self, sent_ns: int) -> None:
        self._device.note_writes(sent_ns)

    def close(self) -> None:
        """Nothing to do: the device is its opener's."""
