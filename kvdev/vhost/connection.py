"""One connection to a back end: what was agreed on, and handing it memory and rings.

Not here: commands (the C core); what becomes of them when the connection ends (``device``).
Threads: one at a time; blocks no longer than the deadline given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from kvdev.clock import Deadline
from kvdev.errors import KvdevError, ProtocolError, UnsupportedError
from kvdev.native.vhost import RANGE_COUNT_MAX, RingParams, VhostRings
from kvdev.units import is_power_of_two
from kvdev.vhost.channel import BackendChannel, Channel, connect
from kvdev.vhost.memory import SharedMemory
from kvdev.vhost.options import VhostOptions
from kvdev.vhost.protocol import (
    FEATURES_KNOWN,
    PROTOCOL_FEATURES_KNOWN,
    U64,
    VRING_ADDR,
    VRING_STATE,
    BlkConfig,
    Feature,
    Inflight,
    ProtocolFeature,
    Request,
    build_get_config,
    build_mem_table,
)
from kvdev.vhost.quarantine import PeerProcess

SECTOR_BYTES = 512
BLOCK_SIZE_BYTES_MAX = 65536


@dataclass(frozen=True)
class Agreement:
    """What the back end offers and we use."""

    features: Feature
    protocol_features: ProtocolFeature
    queue_count: int
    config: BlkConfig

    @property
    def block_size_bytes(self) -> int:
        return self.config.blk_size if Feature.BLK_SIZE in self.features else SECTOR_BYTES

    @property
    def block_count(self) -> int:
        return self.config.capacity_sectors * SECTOR_BYTES // self.block_size_bytes


@dataclass
class InflightBuffer:
    """The back end's note of what it has in flight; it outlives the connection."""

    layout: Inflight
    fd: int

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)


class Connection:
    """A back end that has answered; ``give`` makes it work on rings."""

    def __init__(self, channel: Channel, options: VhostOptions) -> None:
        """Used by ``open``."""
        self.channel = channel
        self.options = options
        self.process = PeerProcess(channel.sock)
        self.backend_channel: BackendChannel | None = None
        self.agreement: Agreement
        self.kick_fds: list[int] = []
        self.call_fd = -1

    @classmethod
    def open(cls, path: str, options: VhostOptions, *, where: str, deadline: Deadline) -> Connection:
        """Connect and agree on features; raises ConnectError, UnsupportedError, ProtocolError, DeadlineError."""
        connection = cls(Channel(connect(path, deadline), where=where), options)
        try:
            connection._negotiate(deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def where(self) -> str:
        return self.channel.where

    def _negotiate(self, deadline: Deadline) -> None:
        channel = self.channel
        channel.send(Request.SET_OWNER, deadline=deadline)
        offered = channel.ask_u64(Request.GET_FEATURES, deadline=deadline)
        features = Feature(offered & FEATURES_KNOWN)
        for bit, why in (
            (Feature.VERSION_1, "legacy rings have no defined byte order"),
            (Feature.PROTOCOL_FEATURES, "without them its size cannot be asked for"),
        ):
            if not features & bit:
                raise UnsupportedError(
                    f"{self.where}: features 0x{offered:x}: expected {bit.name}, which it does not offer: {why}",
                    feature=str(bit.name),
                )
        if not self.options.has_event_idx:
            features &= ~Feature.EVENT_IDX
        if not self.options.has_indirect:
            features &= ~Feature.INDIRECT_DESC
        protocol = self._negotiate_protocol(deadline)
        config = self.read_config(deadline)
        self.agreement = Agreement(features, protocol, 1, config)
        offered_queues = 1
        if Feature.MQ in features and ProtocolFeature.MQ in protocol:
            offered_queues = max(
                1, min(config.queue_count, channel.ask_u64(Request.GET_QUEUE_NUM, deadline=deadline))
            )
        self.agreement = dataclasses.replace(
            self.agreement, queue_count=min(self.options.queue_count, offered_queues)
        )
        self._check_config()

    def _negotiate_protocol(self, deadline: Deadline) -> ProtocolFeature:
        channel = self.channel
        offered = channel.ask_u64(Request.GET_PROTOCOL_FEATURES, deadline=deadline)
        protocol = ProtocolFeature(offered & PROTOCOL_FEATURES_KNOWN)
        if not self.options.wants_inflight:
            protocol &= ~ProtocolFeature.INFLIGHT_SHMFD
        if ProtocolFeature.CONFIG not in protocol:
            raise UnsupportedError(
                f"{self.where}: protocol features 0x{offered:x}: expected CONFIG, which it does not offer: "
                f"without it the device's size cannot be read",
                feature="CONFIG",
            )
        channel.send(Request.SET_PROTOCOL_FEATURES, U64.pack(protocol), deadline=deadline)
        channel.has_reply_ack = ProtocolFeature.REPLY_ACK in protocol
        if ProtocolFeature.BACKEND_REQ in protocol:
            self.backend_channel = BackendChannel()
            theirs = self.backend_channel.theirs.fileno()
            channel.order(Request.SET_BACKEND_REQ_FD, fds=[theirs], deadline=deadline)
            self.backend_channel.give()
        return protocol

    def read_config(self, deadline: Deadline) -> BlkConfig:
        return BlkConfig.parse(
            self.channel.ask(Request.GET_CONFIG, build_get_config(), deadline=deadline),
        )

    def _check_config(self) -> None:
        """Values that no device can have end here, before anything is computed from them."""
        agreed, config = self.agreement, self.agreement.config
        block = agreed.block_size_bytes
        rules = (
            (
                "blk_size",
                is_power_of_two(block) and SECTOR_BYTES <= block <= BLOCK_SIZE_BYTES_MAX,
                f"a power of two from 512 to {BLOCK_SIZE_BYTES_MAX}",
                block,
            ),
            (
                "capacity",
                block // SECTOR_BYTES <= config.capacity_sectors < 1 << 54,
                "at least one block and less than 2^63 bytes",
                config.capacity_sectors,
            ),
            (
                "size_max",
                Feature.SIZE_MAX not in agreed.features or config.size_max == 0 or config.size_max >= block,
                f"at least one block of {block} bytes",
                config.size_max,
            ),
        )
        for field, is_good, expected, actual in rules:
            if not is_good:
                raise ProtocolError(f"{self.where}: config {field}: expected {expected}, got {actual}")

    def ring_params(self) -> RingParams:
        """The rings that suit what was agreed on."""
        agreed, config, options = self.agreement, self.agreement.config, self.options
        features = agreed.features
        block = agreed.block_size_bytes
        has_indirect = Feature.INDIRECT_DESC in features
        segment_size = config.size_max // block * block if Feature.SIZE_MAX in features else 0
        segment_limit = config.seg_max if Feature.SEG_MAX in features else 1
        segment_limit = max(1, min(segment_limit, 126, options.queue_size - 2))
        max_transfer = options.max_transfer_bytes
        if segment_size:
            max_transfer = min(max_transfer, segment_size * segment_limit)
        max_transfer = max(block, max_transfer // block * block)
        discard_sectors = config.max_discard_sectors if Feature.DISCARD in features else 0
        zeroes_sectors = config.max_write_zeroes_sectors if Feature.WRITE_ZEROES in features else 0
        return RingParams(
            block_count=agreed.block_count,
            block_size_bytes=block,
            max_transfer_bytes=max_transfer,
            queue_count=agreed.queue_count,
            queue_size=options.queue_size,
            segment_size_bytes=segment_size,
            segment_count=-(-max_transfer // segment_size) if segment_size else 1,
            discard_sectors_max=discard_sectors,
            discard_ranges_max=min(max(config.max_discard_seg, 1), RANGE_COUNT_MAX) if discard_sectors else 0,
            write_zeroes_sectors_max=zeroes_sectors,
            bounce_size_bytes=options.bounce_size_bytes,
            window_size_bytes=options.window_size_bytes,
            has_indirect=has_indirect,
            has_event_idx=Feature.EVENT_IDX in features,
            has_flush=Feature.FLUSH in features,
            has_discard=discard_sectors >= block // SECTOR_BYTES,
            has_write_zeroes=zeroes_sectors >= block // SECTOR_BYTES,
            may_unmap_zeroes=config.write_zeroes_may_unmap,
            is_read_only=Feature.RO in features,
        )

    def fetch_inflight(self, deadline: Deadline) -> InflightBuffer | None:
        """The buffer for its commands in flight; None where the back end has no such thing."""
        if ProtocolFeature.INFLIGHT_SHMFD not in self.agreement.protocol_features:
            return None
        wanted = Inflight(0, 0, self.agreement.queue_count, self.options.queue_size)
        body, fds = self.channel.ask_fds(Request.GET_INFLIGHT_FD, wanted.build(), deadline=deadline)
        try:
            layout = Inflight.parse(body)
            if len(fds) != 1 or layout.size_bytes == 0:
                raise ProtocolError(
                    f"{self.where}: GET_INFLIGHT_FD reply: expected one descriptor of a buffer, "
                    f"got {len(fds)} of {layout.size_bytes} bytes"
                )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return InflightBuffer(layout, fds[0])

    def give(
        self,
        rings: VhostRings,
        memory: Sequence[SharedMemory],
        inflight: InflightBuffer | None,
        *,
        is_held_on_loss: bool,
        deadline: Deadline,
    ) -> None:
        """Make the back end work on the rings: features, memory, every virtqueue, then start."""
        channel = self.channel
        channel.order(Request.SET_FEATURES, U64.pack(self.agreement.features), deadline=deadline)
        if inflight is not None:
            channel.order(
                Request.SET_INFLIGHT_FD, inflight.layout.build(), fds=[inflight.fd], deadline=deadline
            )
        self.set_memory(memory, deadline)
        self._make_eventfds()
        for queue_index in range(self.agreement.queue_count):
            self._set_vring(queue_index, rings, deadline)
        for queue_index in range(self.agreement.queue_count):
            channel.order(Request.SET_VRING_ENABLE, VRING_STATE.pack(queue_index, 1), deadline=deadline)
        self._settle(deadline)
        rings.start(
            socket_fd=channel.fileno(),
            channel_fd=-1 if self.backend_channel is None else self.backend_channel.fileno(),
            kick_fds=self.kick_fds,
            call_fd=self.call_fd,
            is_held_on_loss=is_held_on_loss,
        )

    def set_memory(self, memory: Sequence[SharedMemory], deadline: Deadline) -> None:
        """Tell the back end of all shared memory, in place of what it was told before; nothing may be in flight."""
        payload = build_mem_table([piece.region for piece in memory])
        self.channel.order(
            Request.SET_MEM_TABLE, payload, fds=[piece.fd for piece in memory], deadline=deadline
        )
        self._settle(deadline)

    def _make_eventfds(self) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.call_fd = os.eventfd(0, flags)
        self.kick_fds = [os.eventfd(0, flags) for _ in range(self.agreement.queue_count)]

    def _set_vring(self, queue_index: int, rings: VhostRings, deadline: Deadline) -> None:
        channel, layout = self.channel, rings.layout(queue_index)
        state = VRING_STATE.pack(queue_index, layout.queue_size)
        channel.order(Request.SET_VRING_NUM, state, deadline=deadline)
        channel.order(Request.SET_VRING_BASE, VRING_STATE.pack(queue_index, layout.base), deadline=deadline)
        address = VRING_ADDR.pack(queue_index, 0, layout.desc_addr, layout.used_addr, layout.avail_addr, 0)
        channel.order(Request.SET_VRING_ADDR, address, deadline=deadline)
        index = U64.pack(queue_index)
        channel.order(Request.SET_VRING_CALL, index, fds=[self.call_fd], deadline=deadline)
        channel.order(Request.SET_VRING_KICK, index, fds=[self.kick_fds[queue_index]], deadline=deadline)

    def _settle(self, deadline: Deadline) -> None:
        """Without acknowledgements, an answer to any question shows that the orders before it were carried out."""
        if not self.channel.has_reply_ack:
            self.channel.ask_u64(Request.GET_FEATURES, deadline=deadline)

    def stop(self, deadline: Deadline) -> None:
        """Stop the virtqueues in order; a back end that fails to is left, the socket is closed anyway."""
        with contextlib.suppress(KvdevError):
            for queue_index in range(self.agreement.queue_count):
                self.channel.ask(Request.GET_VRING_BASE, VRING_STATE.pack(queue_index, 0), deadline=deadline)
            if ProtocolFeature.RESET_DEVICE in self.agreement.protocol_features:
                self.channel.order(Request.RESET_DEVICE, deadline=deadline)

    def close(self) -> None:
        """Close the socket and the descriptors; the rings must not be in use any more."""
        self.channel.close()
        if self.backend_channel is not None:
            self.backend_channel.close()
        for fd in [*self.kick_fds, self.call_fd]:
            if fd >= 0:
                os.close(fd)
        self.kick_fds, self.call_fd = [], -1
