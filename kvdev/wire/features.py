"""Features: identifiers and the values they carry in DW11, in the completion's DW0 or in data.

Not here: the Get and Set Features commands (``nvme``).
Spec: NVM Express Base 2.2 section 5.1.25.
Trust: ``untrusted`` values come from a peer; parsers raise only WireError.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kvdev.errors import UsageError
from kvdev.wire.layout import BitStruct, WireStruct, bits, u8

QUEUE_COUNT_MAX = 65535


class Fid(enum.IntEnum):
    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    INTERRUPT_COALESCING = 0x08
    INTERRUPT_VECTOR = 0x09
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENT_CONFIG = 0x0B
    TIMESTAMP = 0x0E
    KEEP_ALIVE_TIMER = 0x0F
    HOST_BEHAVIOR_SUPPORT = 0x16
    HOST_IDENTIFIER = 0x81
    RESERVATION_NOTIFICATION_MASK = 0x82
    RESERVATION_PERSISTENCE = 0x83


@dataclass(frozen=True)
class NumberOfQueues:
    """Feature 07h: submission and completion queue counts (not 0's based here)."""

    sq_count: int
    cq_count: int

    @classmethod
    def parse(cls, untrusted_value: int) -> NumberOfQueues:
        return cls(sq_count=(untrusted_value & 0xFFFF) + 1, cq_count=(untrusted_value >> 16) + 1)

    def build(self) -> int:
        for name, count in (("sq_count", self.sq_count), ("cq_count", self.cq_count)):
            if not 1 <= count <= QUEUE_COUNT_MAX:
                raise UsageError(f"{name}: expected 1 to {QUEUE_COUNT_MAX}, got {count}")
        return (self.sq_count - 1) | (self.cq_count - 1) << 16

    @property
    def qpair_count(self) -> int:
        """Queue pairs that can be made of them."""
        return min(self.sq_count, self.cq_count)


@dataclass(frozen=True)
class AsyncEventConfig(BitStruct):
    """Feature 0Bh; the notice bits stand where Identify's OAES has them."""

    smart: int = bits(0, 7)
    namespace_attribute: int = bits(8)
    firmware_activation: int = bits(9)
    telemetry: int = bits(10)
    ana_change: int = bits(11)
    predictable_latency: int = bits(12)
    lba_status: int = bits(13)
    endurance_group: int = bits(14)
    discovery_change: int = bits(31)


@dataclass(frozen=True)
class HostBehaviorSupport(WireStruct):
    """Data of feature 16h (Base figure 412)."""

    SIZE: ClassVar[int] = 512

    acre: int = u8(0)
    """1: the host honours the retry delays CRDT1 to CRDT3."""
    etdas: int = u8(1)
    lbafee: int = u8(2)
    """1: the host knows LBA formats above 15."""


@dataclass(frozen=True)
class VolatileWriteCache(BitStruct):
    """Feature 06h."""

    wce: int = bits(0)
