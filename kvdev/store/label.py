"""Labels: the first blocks of every member say which member of which volume it is.

Spec: docs/on-disk-format.md, Label.
Trust: ``parse_label`` takes untrusted bytes; raises only CorruptionError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvdev.block.device import BlockDevice, DeviceIdentity
from kvdev.errors import CorruptionError
from kvdev.store.media import (
    HEADER_SIZE_BYTES,
    MAGIC_LABEL,
    NAME_BYTES,
    UNIT_BYTES,
    MediaHeader,
    build_structure,
    pack_name,
    parse_structure,
    unpack_name,
)

LABEL_BYTES = UNIT_BYTES
_BODY = struct.Struct(f"<{NAME_BYTES}sHHIIIQ16s24x")
_MEMBER = struct.Struct("<QB7x16s")
MEMBER_COUNT_MAX = 64
"""Bounded by the label: 64 entries of 32 bytes leave it half empty for what comes later."""
assert HEADER_SIZE_BYTES + _BODY.size + MEMBER_COUNT_MAX * _MEMBER.size <= LABEL_BYTES

IDENTITY_NONE = 0
IDENTITY_NGUID = 1
IDENTITY_UUID = 2
IDENTITY_EUI64 = 3
IDENTITY_NAMES = {IDENTITY_NGUID: "NGUID", IDENTITY_UUID: "UUID", IDENTITY_EUI64: "EUI-64"}


@dataclass(frozen=True)
class MemberInfo:
    """What the labels say of one member."""

    block_count: int
    identity_kind: int
    identity: bytes

    @classmethod
    def of(cls, device: BlockDevice) -> MemberInfo:
        kind, value = best_identity(device.identity)
        return cls(device.block_count, kind, value)


@dataclass(frozen=True)
class Label:
    """One member's label; all labels of a volume differ in ``member_index`` only."""

    volume_uuid: bytes
    volume_name: str
    sequence: int
    member_index: int
    block_size_bytes: int
    strip_size_bytes: int
    row_count: int
    """As many as there were when the label was written; the superblock says how many there are."""
    members: tuple[MemberInfo, ...]
    former_uuid: bytes = bytes(16)
    """The volume in whose place this one was made after the loss of a member; zero for others."""

    @property
    def member_count(self) -> int:
        return len(self.members)


def best_identity(identity: DeviceIdentity) -> tuple[int, bytes]:
    """Kind and 16 bytes of the strongest identifier a device has."""
    if identity.nguid is not None:
        return IDENTITY_NGUID, identity.nguid
    if identity.uuid is not None:
        return IDENTITY_UUID, identity.uuid
    if identity.eui64 is not None:
        return IDENTITY_EUI64, identity.eui64.ljust(16, b"\0")
    return IDENTITY_NONE, bytes(16)


def identity_of_kind(identity: DeviceIdentity, kind: int) -> bytes | None:
    """The device's identifier of the kind a label names; None when it has none."""
    value = {
        IDENTITY_NGUID: identity.nguid,
        IDENTITY_UUID: identity.uuid,
        IDENTITY_EUI64: identity.eui64,
    }.get(kind)
    return None if value is None else value.ljust(16, b"\0")


def build_label(label: Label) -> bytes:
    body = _BODY.pack(
        pack_name(label.volume_name),
        label.member_count,
        label.member_index,
        label.block_size_bytes,
        label.strip_size_bytes,
        0,
        label.row_count,
        label.former_uuid,
    )
    body += b"".join(_MEMBER.pack(m.block_count, m.identity_kind, m.identity) for m in label.members)
    header = MediaHeader(
        MAGIC_LABEL,
        label.volume_uuid,
        index=label.member_index,
        count=label.member_count,
        sequence=label.sequence,
    )
    return build_structure(header, body, size_bytes=LABEL_BYTES)


def parse_label(untrusted: bytes, *, what: str) -> Label:
    header, body = parse_structure(untrusted, magic=MAGIC_LABEL, what=f"{what}: label")
    name, member_count, member_index, block_size, strip_size, _, row_count, former_uuid = _BODY.unpack_from(
        body
    )
    if not 1 <= member_count <= MEMBER_COUNT_MAX or member_index >= member_count:
        raise CorruptionError(
            f"{what}: label: member: expected index below count of 1 to {MEMBER_COUNT_MAX}, "
            f"got {member_index} of {member_count}"
        )
    members = tuple(
        MemberInfo(*_MEMBER.unpack_from(body, _BODY.size + index * _MEMBER.size))
        for index in range(member_count)
    )
    return Label(
        volume_uuid=header.uuid,
        volume_name=unpack_name(name),
        sequence=header.sequence,
        member_index=member_index,
        block_size_bytes=block_size,
        strip_size_bytes=strip_size,
        row_count=row_count,
        members=members,
        former_uuid=former_uuid,
    )
