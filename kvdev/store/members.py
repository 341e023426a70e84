"""Members: which devices make a volume, by the labels that they carry, and what is wrong when they do not.

Not here: what else lies on a device (``signature``); the volume that they make (``volume``).
Spec: docs/on-disk-format.md, Label.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence

from kvdev.block.device import BlockDevice, read_blocks
from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.errors import (
    CorruptionError,
    UnlabelledError,
    UnsupportedError,
    UsageError,
)
from kvdev.store.label import (
    IDENTITY_NAMES,
    LABEL_BYTES,
    MEMBER_COUNT_MAX,
    Label,
    identity_of_kind,
    parse_label,
)
from kvdev.store.media import (
    MAGIC_LABEL,
    UNIT_BYTES,
)
from kvdev.store.signature import find_signatures, find_users

BLOCK_SIZE_BYTES_MAX = UNIT_BYTES


def check_members(members: Sequence[BlockDevice]) -> None:
    """What any set of members must fulfil, labelled or not."""
    if not members:
        raise UsageError("members: expected at least one device, got none")
    if len(members) > MEMBER_COUNT_MAX:
        raise UsageError(f"members: expected at most {MEMBER_COUNT_MAX} devices, got {len(members)}")
    seen: dict[object, str] = {}
    for member in members:
        if member.metadata_size_bytes:
            raise UnsupportedError(
                f"{member.uri}: metadata: expected a namespace without metadata, got "
                f"{member.metadata_size_bytes} bytes per block; format it without",
                feature="metadata",
            )
        if member.block_size_bytes > BLOCK_SIZE_BYTES_MAX:
            raise UnsupportedError(
                f"{member.uri}: block size: expected at most {BLOCK_SIZE_BYTES_MAX}, "
                f"got {member.block_size_bytes}",
                feature="block size",
            )
        for mark in (id(member), member.uri):
            if mark in seen:
                raise UsageError(f"members: {member.uri} is named twice")
            seen[mark] = member.uri
        same = seen.setdefault(_identity_mark(member), member.uri)
        if same != member.uri:
            raise UsageError(f"members: {member.uri} and {same} are the same device")


def _identity_mark(member: BlockDevice) -> object:
    identity = member.identity
    for value in (identity.nguid, identity.uuid, identity.eui64):
        if value is not None:
            return value
    if isinstance(member, FileDevice):
        # By whatever name: through links, or written another way.
        found = os.fstat(member.fd)
        return (found.st_rdev,) if stat.S_ISBLK(found.st_mode) else (found.st_dev, found.st_ino)
    return member.uri


def check_unused(members: Sequence[BlockDevice], destroy: frozenset[str], deadline: Deadline) -> None:
    for member in members:
        if member.is_read_only:
            raise UsageError(f"{member.uri}: is read-only")
        if member.uri in destroy:
            continue
        users = find_users(member)
        if users:
            raise UsageError(f"{member.uri}: is in use: {users[0]}; release it, or name it in --destroy")
        found = find_signatures(member, deadline)
        if found:
            raise UsageError(
                f"{member.uri}: holds a {found[0]}; name this device in --destroy to overwrite it"
            )


def read_label(device: BlockDevice, deadline: Deadline, *, slba: int = 0) -> Label:
    """The label at the start of a member, or at ``slba`` of a device that hides it."""
    if device.size_bytes < 4 * UNIT_BYTES:
        raise UsageError(
            f"{device.uri}: size: expected at least {4 * UNIT_BYTES} bytes, got {device.size_bytes}"
        )
    data = read_blocks(device, slba, LABEL_BYTES // device.block_size_bytes, deadline).tobytes()
    try:
        return parse_label(data, what=device.uri)
    except CorruptionError as problem:
        kind = CorruptionError if data.startswith(MAGIC_LABEL) else UnlabelledError
        remedy = "; `kvdev volume create` makes a volume of a new device, `recreate --replace` takes it for a lost one"
        if kind is CorruptionError:
            remedy = ""
        raise kind(f"{problem}; it is no member of a kvdev volume, or its label is lost{remedy}") from problem


def sort_members(devices: Sequence[BlockDevice], labels: Sequence[Label]) -> list[BlockDevice]:
    """The devices in the order of their labels, once everything about them is as the labels say."""
    # The volume that most of the devices belong to, so that the stranger is named and not the others.
    volume_uuid = Counter(label.volume_uuid for label in labels).most_common(1)[0][0]
    reference = next(label for label in labels if label.volume_uuid == volume_uuid)
    newest = max(label.sequence for label in labels if label.volume_uuid == volume_uuid)
    places: dict[int, BlockDevice] = {}
    for device, label in zip(devices, labels, strict=True):
        if label.volume_uuid != volume_uuid:
            if reference.volume_uuid == label.former_uuid or label.volume_uuid == reference.former_uuid:
                raise UsageError(
                    f"{device.uri}: is of volume {label.volume_name!r} ({label.volume_uuid.hex()}), which is or was "
                    f"made anew, and others of {volume_uuid.hex()}: it was lost meanwhile, or "
                    f"kvdev volume recreate was interrupted; run that again"
                )
            raise UsageError(
                f"{device.uri}: belongs to volume {label.volume_name!r} ({label.volume_uuid.hex()}), "
                f"expected {reference.volume_name!r} ({volume_uuid.hex()})"
            )
        if label.sequence != newest:
            raise UsageError(
                f"{device.uri}: label sequence: expected {newest}, got {label.sequence}: "
                f"it is an older state of member {label.member_index}"
            )
        if label.member_index in places:
            raise UsageError(
                f"{device.uri}: is member {label.member_index} of volume {label.volume_name!r}, and so is "
                f"{places[label.member_index].uri}: one of them is a copy"
            )
        _check_member(device, label)
        places[label.member_index] = device
    missing = [index for index in range(reference.member_count) if index not in places]
    if missing:
        raise UsageError(
            f"volume {reference.volume_name!r}: member {missing[0]} of {reference.member_count} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return [places[index] for index in range(reference.member_count)]


def _check_member(device: BlockDevice, label: Label) -> None:
    """Whether a device is still the one that was labelled."""
    info = label.members[label.member_index]
    what = f"{device.uri}: member {label.member_index} of volume {label.volume_name!r}"
    if device.block_size_bytes != label.block_size_bytes:
        raise UsageError(
            f"{what}: block size: expected {label.block_size_bytes}, got {device.block_size_bytes}: "
            f"it was formatted differently"
        )
    if device.block_count < info.block_count:
        raise UsageError(
            f"{what}: size: expected {info.block_count} blocks, got {device.block_count}: it was shrunk"
        )
    if info.identity_kind in IDENTITY_NAMES:
        actual = identity_of_kind(device.identity, info.identity_kind)
        if actual is not None and actual != info.identity:
            raise UsageError(
                f"{what}: {IDENTITY_NAMES[info.identity_kind]}: expected {info.identity.hex()}, got "
                f"{actual.hex()}: the namespace was replaced, this is a copy"
            )


def check_hidden_members(device: BlockDevice, first: Label, deadline: Deadline) -> None:
    """One device over all members: their labels stand in its logical strips, in order."""
    if device.block_size_bytes != first.block_size_bytes:
        raise UsageError(
            f"{device.uri}: block size: expected {first.block_size_bytes}, got {device.block_size_bytes}"
        )
    strip_blocks = first.strip_size_bytes // first.block_size_bytes
    expected = first.row_count * first.member_count * strip_blocks
    seconds_end = strip_blocks + LABEL_BYTES // first.block_size_bytes
    try:
        second = (
            read_label(device, deadline, slba=strip_blocks) if device.block_count >= seconds_end else None
        )
    except CorruptionError:
        second = None
    if second is None or second.volume_uuid != first.volume_uuid:
        others = [index for index in range(first.member_count) if index != first.member_index]
        raise UsageError(
            f"{device.uri}: is member {first.member_index} of {first.member_count} of volume "
            f"{first.volume_name!r}: member {others[0]} is missing"
            + (f", and {len(others) - 1} more" if len(others) > 1 else "")
        )
    for index in range(first.member_count):
        label = read_label(device, deadline, slba=index * strip_blocks)
        if label.volume_uuid != first.volume_uuid:
            raise UsageError(
                f"{device.uri}: strip {index} belongs to volume {label.volume_name!r}, "
                f"expected {first.volume_name!r}"
            )
        if label.member_index != index:
            raise UsageError(
                f"{device.uri}: strip {index}: expected member {index}, got member {label.member_index}: "
                f"its members are in another order than the volume's"
            )
    if device.block_count < expected:
        raise UsageError(
            f"{device.uri}: size: expected at least {expected} blocks, got {device.block_count}: "
            f"a member was shrunk"
        )
