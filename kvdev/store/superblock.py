"""Superblock and KV namespace records: what a volume holds and where.

Spec: docs/on-disk-format.md, Superblock and KV namespace record.
Trust: the ``parse_`` functions take untrusted bytes; raise only CorruptionError.
"""

from __future__ import annotations

import struct
from dataclasses import MISSING, dataclass, field, fields, replace

from kvdev.errors import CorruptionError
from kvdev.native.checksum import CRC32C, PAGE_CHECKSUMS
from kvdev.store.media import (
    FORMAT_VERSION,
    HEADER_SIZE_BYTES,
    MAGIC_RECORD,
    MAGIC_SUPERBLOCK,
    NAME_BYTES,
    RECORD_VERSION,
    RECORD_VERSION_CHECKSUM,
    STRUCTURE_BYTES,
    MediaHeader,
    build_structure,
    pack_name,
    parse_structure,
    unpack_name,
)

RECORD_COUNT = 64
"""KV namespaces of a volume; the directory is two copies of as many places."""

_SUPERBLOCK = struct.Struct(f"<{NAME_BYTES}sHBxIIIQQQQQQ")


@dataclass(frozen=True)
class Superblock:
    """The volume itself; changes only when the volume does."""

    volume_uuid: bytes
    volume_name: str
    sequence: int
    member_count: int
    block_size_bytes: int
    strip_size_bytes: int
    row_count: int
    record_count: int
    directory_slba: tuple[int, int]
    payload_slba: int
    payload_end: int
    created_unix_s: int


def build_superblock(superblock: Superblock, *, copy_index: int) -> bytes:
    body = _SUPERBLOCK.pack(
        pack_name(superblock.volume_name),
        superblock.member_count,
        1,
        superblock.block_size_bytes,
        superblock.strip_size_bytes,
        superblock.record_count,
        superblock.row_count,
        *superblock.directory_slba,
        superblock.payload_slba,
        superblock.payload_end,
        superblock.created_unix_s,
    )
    header = MediaHeader(
        MAGIC_SUPERBLOCK, superblock.volume_uuid, index=copy_index, sequence=superblock.sequence
    )
    return build_structure(header, body, size_bytes=STRUCTURE_BYTES)


def parse_superblock(untrusted: bytes, *, what: str, volume_uuid: bytes, copy_index: int) -> Superblock:
    header, body = parse_structure(untrusted, magic=MAGIC_SUPERBLOCK, what=what, uuid=volume_uuid)
    if header.index != copy_index:
        raise CorruptionError(
            f"{what}: index: expected {copy_index}, got {header.index}: it is the other copy, of another member"
        )
    (
        name,
        member_count,
        _state,
        block_size,
        strip_size,
        record_count,
        row_count,
        directory_a,
        directory_b,
        payload_slba,
        payload_end,
        created,
    ) = _SUPERBLOCK.unpack_from(body)
    return Superblock(
        volume_uuid=header.uuid,
        volume_name=unpack_name(name),
        sequence=header.sequence,
        member_count=member_count,
        block_size_bytes=block_size,
        strip_size_bytes=strip_size,
        row_count=row_count,
        record_count=record_count,
        directory_slba=(directory_a, directory_b),
        payload_slba=payload_slba,
        payload_end=payload_end,
        created_unix_s=created,
    )


EVICTION_POLICIES = ("lru", "fifo", "none", "lfu", "s3fifo")
"""By their number in the record: the least recently used page goes, the one put first, none and puts fail, the least
often used with counts that fade, or as S3-FIFO says."""

RECORD_FREE = 0
RECORD_LIVE = 1
RECORD_ERASING = 2
"""Its pages are gone, and its blocks are being overwritten."""
PRIORITY_MAX = 255
FURTHER_EXTENT_COUNT_MAX = 3
FLAG_CLEAN = 0x01
FLAG_CLAIMED = 0x02
"""Its owner took over from one that may be alive, and has not waited for that one's writes yet."""

_RECORD = struct.Struct(f"<{NAME_BYTES}s16s32sBBBBIQIIIIQIIQIIQIIQQQQQ16sIIQQ")


_LEASE = struct.Struct("<16sQIIQ40s")
_LEASE_OFFSET = 336 - HEADER_SIZE_BYTES
"""Behind what the first version of the record had: all zero there means that nobody has a lease."""
HOST_NAME_BYTES = 40
_TENANT = struct.Struct("<IBB2x")
_TENANT_OFFSET = _LEASE_OFFSET + _LEASE.size
_EXTENT = struct.Struct("<QQII")
_EXTENT_OFFSET = _TENANT_OFFSET + _TENANT.size
_SCRUB = struct.Struct("<I4xQ")
_SCRUB_OFFSET = STRUCTURE_BYTES - _SCRUB.size - HEADER_SIZE_BYTES
assert _EXTENT_OFFSET + FURTHER_EXTENT_COUNT_MAX * _EXTENT.size <= _SCRUB_OFFSET


@dataclass(frozen=True)
class Extent:
    """One run of blocks of a KV namespace, and the slots in it."""

    slba: int
    block_count: int
    data_slba: int
    """First block of its first slot."""
    slot_count: int

    @property
    def end(self) -> int:
        return self.slba + self.block_count

    def slots_end(self, slot_blocks: int) -> int:
        """The block behind its last slot."""
        return self.data_slba + self.slot_count * slot_blocks


@dataclass(frozen=True)
class Record:
    """One KV namespace: its extent, its state, and how far its table includes its journal."""

    volume_uuid: bytes
    record_index: int
    sequence: int
    epoch: int
    name: str
    namespace_uuid: bytes
    geometry_fingerprint: bytes
    state: int
    flags: int
    page_size_bytes: int
    slot_blocks: int
    slot_count: int
    quota_pages: int
    geometry_slba: int
    geometry_size_bytes: int
    geometry_crc32c: int
    table_slba: int
    table_block_count: int
    spare_block_count: int
    journal_slba: int
    journal_block_count: int
    tail_position: int
    tail_sequence: int
    epoch_first_sequence: int
    data_slba: int
    extent_slba: int
    extent_block_count: int
    owner_boot_id: bytes
    owner_pid: int
    owner_start_ticks: int
    created_unix_s: int
    eviction_policy: int = 0
    """Index in ``EVICTION_POLICIES``; a later version may know more."""
    lease_host_id: bytes = bytes(16)
    """HOSTID under which the owner writes; zero where the members have no such thing."""
    lease_key: int = 0
    """Reservation key of the owner; 0 where no member has reservations."""
    lease_ms: int = 0
    """How long the owner may write after it last wrote this record; 0 without a lease."""
    lease_pid_namespace: int = 0
    durable_sequence: int = 0
    """The newest journal record known to be durable when this was written, for those who follow the journal."""
    lease_host_name: str = ""
    ttl_s: int = 0
    """Seconds that a page lives after it was put; 0 for ever. Entries hold when they were put, then."""
    scrub_slot: int = 0
    """Where the scrub goes on."""
    scrubbed_unix_s: int = 0
    """When it last came to the end; 0 for never."""
    geometry_copy: bytes = field(default=b"", compare=False)
    """The geometry as it stands behind the record in its place, intact; empty where it does not."""
    priority: int = 0
    """Who gives space back first, when another needs it: the lowest."""
    reserve_pages: int = 0
    """Quota that is never taken for another."""
    salt_mark: int = 0
    """Tells the salt of its keys from others, not what it is; 0 where tenants choose their own, or none."""
    erased_mib: int = 0
    """While it is being erased: how much of its extents, one after the other, is."""
    further: tuple[Extent, ...] = ()
    """Runs of blocks after the first, with the slots that follow the first's."""
    checksum_number: int = CRC32C.number
    """Of the checksum that its pages have; a later version may know more."""

    @property
    def is_live(self) -> bool:
        return self.state == RECORD_LIVE

    @property
    def is_free(self) -> bool:
        return self.state == RECORD_FREE

    @property
    def is_erasing(self) -> bool:
        return self.state == RECORD_ERASING

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All runs of blocks, in the order of their slots."""
        first_count = self.slot_count - sum(extent.slot_count for extent in self.further)
        first = Extent(self.extent_slba, self.extent_block_count, self.data_slba, first_count)
        return (first, *self.further)

    @property
    def block_count(self) -> int:
        """Of all extents together."""
        return sum(extent.block_count for extent in self.extents)

    @property
    def version(self) -> int:
        """The lowest that a reader must know in order not to misread it."""
        if self.checksum_number != CRC32C.number:
            return RECORD_VERSION_CHECKSUM
        news = (self.priority, self.reserve_pages, self.salt_mark, self.erased_mib, self.further)
        return RECORD_VERSION if any(news) or self.is_erasing else FORMAT_VERSION

    @property
    def is_clean(self) -> bool:
        return bool(self.flags & FLAG_CLEAN)

    @property
    def is_claimed(self) -> bool:
        return bool(self.flags & FLAG_CLAIMED)

    @property
    def extent_end(self) -> int:
        return self.extent_slba + self.extent_block_count


def free_record(volume_uuid: bytes, record_index: int) -> Record:
    """A place without a KV namespace."""
    blank: dict[str, object] = {"int": 0, "str": "", "bytes": b""}
    values = {each.name: blank[str(each.type)] for each in fields(Record) if each.default is MISSING}
    return Record(
        **{  # type: ignore[arg-type]
            **{name: value for name, value in values.items() if name != "geometry_copy"},
            "volume_uuid": volume_uuid,
            "record_index": record_index,
            "namespace_uuid": bytes(16),
            "geometry_fingerprint": bytes(32),
            "owner_boot_id": bytes(16),
            "state": RECORD_FREE,
        }
    )


def policy_name(record: Record) -> str:
    """The eviction policy's name; a number this version does not know is shown as such."""
    number = record.eviction_policy
    return EVICTION_POLICIES[number] if number < len(EVICTION_POLICIES) else f"unknown ({number})"


def checksum_name(record: Record) -> str:
    """The page checksum's name; a number this version does not know is shown as such."""
    for each in PAGE_CHECKSUMS.values():
        if each.number == record.checksum_number:
            return each.name
    return f"unknown ({record.checksum_number})"


def build_record(record: Record) -> bytes:
    body = _RECORD.pack(
        pack_name(record.name),
        record.namespace_uuid,
        record.geometry_fingerprint,
        record.state,
        record.eviction_policy,
        record.priority,
        record.flags,
        record.erased_mib,
        record.page_size_bytes,
        record.slot_blocks,
        record.slot_count,
        record.quota_pages,
        record.reserve_pages,
        record.geometry_slba,
        record.geometry_size_bytes,
        record.geometry_crc32c,
        record.table_slba,
        record.table_block_count,
        record.spare_block_count,
        record.journal_slba,
        record.journal_block_count,
        record.tail_position,
        record.tail_sequence,
        record.epoch_first_sequence,
        record.data_slba,
        record.extent_slba,
        record.extent_block_count,
        record.owner_boot_id,
        record.owner_pid,
        record.salt_mark,
        record.owner_start_ticks,
        record.created_unix_s,
    )
    assert len(body) <= _LEASE_OFFSET
    body = body.ljust(_LEASE_OFFSET, b"\0") + _LEASE.pack(
        record.lease_host_id,
        record.lease_key,
        record.lease_ms,
        record.lease_pid_namespace,
        record.durable_sequence,
        record.lease_host_name.encode()[:HOST_NAME_BYTES],
    )
    assert len(record.further) <= FURTHER_EXTENT_COUNT_MAX, "who lays out counts"
    own_checksum = 0 if record.checksum_number == CRC32C.number else record.checksum_number
    body += _TENANT.pack(record.ttl_s, len(record.further), own_checksum)
    for extent in record.further:
        body += _EXTENT.pack(
            extent.slba, extent.block_count, extent.data_slba - extent.slba, extent.slot_count
        )
    body = body.ljust(_SCRUB_OFFSET, b"\0") + _SCRUB.pack(record.scrub_slot, record.scrubbed_unix_s)
    header = MediaHeader(
        MAGIC_RECORD,
        record.volume_uuid,
        index=record.record_index,
        sequence=record.sequence,
        epoch=record.epoch,
        version=record.version,
    )
    return build_structure(header, body, size_bytes=STRUCTURE_BYTES)


def parse_record(untrusted: bytes, *, what: str, volume_uuid: bytes) -> Record:
    header, body = parse_structure(untrusted, magic=MAGIC_RECORD, what=what, uuid=volume_uuid)
    values = list(_RECORD.unpack_from(body))
    name, namespace_uuid, fingerprint, state, policy, priority, flags, erased_mib = values[:8]
    salt_mark, reserve_pages = values.pop(_SALT_PLACE), values.pop(_RESERVE_PLACE)
    record = Record(
        header.uuid,
        header.index,
        header.sequence,
        header.epoch,
        unpack_name(name),
        namespace_uuid,
        fingerprint,
        state,
        flags,
        *values[8:],
    )
    host_id, key, lease_ms, pid_namespace, durable, host_name = _LEASE.unpack_from(body, _LEASE_OFFSET)
    scrub_slot, scrubbed_unix_s = _SCRUB.unpack_from(body, _SCRUB_OFFSET)
    ttl_s, further_count, checksum_number = _TENANT.unpack_from(body, _TENANT_OFFSET)
    record = replace(
        record,
        scrub_slot=scrub_slot,
        scrubbed_unix_s=scrubbed_unix_s,
        eviction_policy=policy,
        lease_host_id=host_id,
        lease_key=key,
        lease_ms=lease_ms,
        lease_pid_namespace=pid_namespace,
        durable_sequence=durable,
        lease_host_name=unpack_name(host_name),
        ttl_s=ttl_s,
    )
    if header.version == FORMAT_VERSION:
        return record  # to which the rest is reserved, and ignored
    if state > RECORD_ERASING:
        raise CorruptionError(f"{what}: state: expected 0 to {RECORD_ERASING}, got {state}")
    if further_count > FURTHER_EXTENT_COUNT_MAX:
        raise CorruptionError(
            f"{what}: further extents: expected at most {FURTHER_EXTENT_COUNT_MAX}, got {further_count}"
        )
    if header.version >= RECORD_VERSION_CHECKSUM and checksum_number:
        record = replace(record, checksum_number=checksum_number)
    places = range(_EXTENT_OFFSET, _EXTENT_OFFSET + further_count * _EXTENT.size, _EXTENT.size)
    return replace(
        record,
        priority=priority,
        reserve_pages=reserve_pages,
        salt_mark=salt_mark,
        erased_mib=erased_mib,
        further=tuple(_parse_extent(body, place) for place in places),
    )


def _parse_extent(untrusted: bytes, place: int) -> Extent:
    slba, block_count, ahead_blocks, slot_count = _EXTENT.unpack_from(untrusted, place)
    return Extent(slba, block_count, slba + ahead_blocks, slot_count)


_RESERVE_PLACE, _SALT_PLACE = 12, 29
"""Where ``_RECORD`` has what came into its gaps later."""
