"""Volumes and KV namespaces as they are and as they shall be: read through their members, made with the store.

Not here: SPDK's objects (``spdk_rpc.plan``); the order of everything (``work``).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvdev.block.device import BlockDevice, read_blocks
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev.session import Session
from kvdev.store import NamespaceInfo, Volume
from kvdev.store.lock import boot_id, start_ticks
from kvdev.store.media import UNIT_BYTES
from kvdev.store.members import read_label
from kvdev.store.signature import find_signatures, find_users
from kvdev.store.superblock import Record
from kvdev.store.volume import check_geometry
from kvdev.units import format_size
from kvdev_tools.connect import make_session
from kvdev_tools.provision.document import Deployment, EngineSpec, RankSpec, VolumeSpec


class VolumeState(enum.Enum):
    """How a volume was found."""

    ABSENT = "absent"
    """No member carries a label, and nothing stands in the way of making it."""
    PRESENT = "present"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """Its members hold something else, or not what the labels say."""


class Writer(enum.Enum):
    """Whether a KV namespace has an owner."""

    NONE = "none"
    LIVE = "live"
    DEAD = "dead"
    """Did not close it, and was a process of this boot of this host that is gone."""
    UNKNOWN = "unknown"
    """Did not close it, and ran on another host, or before this one booted."""


@dataclass
class VolumeSeen:
    """A volume at one moment. ``volume`` and its members are valid while its session is open."""

    spec: VolumeSpec
    state: VolumeState
    reason: str = ""
    volume: Volume | None = None
    namespaces: list[NamespaceInfo] = field(default_factory=list)
    free_bytes: int = 0
    has_volatile_cache: dict[str, bool] = field(default_factory=dict)
    unfinished: frozenset[str] = frozenset()
    """Members that an interrupted creation labelled; nothing can be stored on them yet."""

    def namespace(self, name: str) -> NamespaceInfo | None:
        return next((each for each in self.namespaces if each.name == name), None)


@dataclass(frozen=True)
class VolumeStep:
    """A volume or a KV namespace to make."""

    volume: VolumeSpec
    rank: RankSpec | None = None
    quota_bytes: int | None = None
    share_count: int = 1
    """Without a quota: among how many that follow, this one included, the free space is divided."""
    checksum: str = "crc32c"

    @property
    def title(self) -> str:
        if self.rank is None:
            return f"volume {self.volume.name}"
        return f"KV namespace {self.volume.name}#{self.rank.name}"

    def details(self) -> list[str]:
        """What it will be, line by line."""
        if self.rank is None:
            return [
                f"strip_size: {format_size(self.volume.strip_size_bytes)}",
                *(f"member {index}: {member.uri}" for index, member in enumerate(self.volume.members)),
            ]
        geometry = self.rank.geometry
        heads = ""
        if geometry.attention != "mla":
            total = geometry.kv_head_total or geometry.kv_head_count
            last = geometry.kv_head_first + geometry.kv_head_count - 1
            heads = f", KV heads {geometry.kv_head_first} to {last} of {total}"
        revision = f" at {geometry.revision}" if geometry.revision else ""
        quota = "a share of what is free" if self.quota_bytes is None else format_size(self.quota_bytes)
        layer_last = geometry.layer_first + geometry.layer_count - 1
        return [
            f"geometry: {geometry.model_id}{revision}, layers {geometry.layer_first} to {layer_last}{heads}, "
            f"{geometry.attention} of {geometry.head_size} {geometry.dtype}",
            f"page: {geometry.tokens_per_page} tokens, {format_size(geometry.page_size_bytes)}; quota: {quota}"
            + (f"; checksum: {self.checksum}" if self.checksum != "crc32c" else ""),
        ]


def writer_of(record: Record) -> Writer:
    """Whether somebody has it open for writing, as far as this host can tell."""
    if record.is_clean or record.owner_pid == 0:
        return Writer.NONE
    if record.owner_boot_id != boot_id():
        return Writer.UNKNOWN
    is_running = start_ticks(record.owner_pid) == record.owner_start_ticks
    return Writer.LIVE if is_running else Writer.DEAD


@contextlib.contextmanager
def session_for(spec: VolumeSpec, *, timeout_s: float) -> Iterator[Session]:
    """A session as the host that the volume's subsystems let in."""
    with make_session(spec.host_nqn, None, timeout_s=timeout_s, keys=spec.secrets) as session:
        yield session


def see_volume(session: Session, spec: VolumeSpec, *, timeout_s: float) -> VolumeSeen:
    """Read labels, superblock and records; changes nothing. Never raises for what it finds."""
    deadline = Deadline.after(timeout_s)
    members: list[BlockDevice] = []
    try:
        for member in spec.members:
            members.append(session.open_device(member.uri, deadline=deadline))
        unlabelled = [member for member in members if not _has_label(member, deadline)]
        unfinished = _unfinished(spec, members, unlabelled, deadline)
        if len(unlabelled) == len(members) or unfinished:
            return _see_unlabelled(spec, members, unfinished, deadline)
        if unlabelled:
            raise UsageError(
                f"{unlabelled[0].uri}: has no label, while other members have one; if a member was replaced its pages "
                f"are lost: make the volume anew with kvdev volume create --destroy"
            )
        volume = Volume.open(members, deadline=deadline)
        if volume.name != spec.name:
            raise UsageError(f"its members are those of volume {volume.name!r}")
        order = [member.uri for member in volume.members]
        if order != [str(member.uri) for member in spec.members]:
            raise UsageError("its members are labelled in another order than the file's")
        if volume.strip_size_bytes != spec.strip_size_bytes:
            raise UsageError(
                f"strip_size: expected {format_size(spec.strip_size_bytes)}, got "
                f"{format_size(volume.strip_size_bytes)}, which cannot be changed"
            )
        free = sum(count for _, count in volume.free_extents(deadline)) * volume.block_size_bytes
        return VolumeSeen(
            spec,
            VolumeState.PRESENT,
            volume=volume,
            namespaces=volume.namespaces(deadline=deadline),
            free_bytes=free,
            has_volatile_cache={member.uri: member.has_volatile_cache for member in volume.members},
        )
    except TransportError as error:
        return VolumeSeen(spec, VolumeState.UNREACHABLE, str(error))
    except KvdevError as error:
        return VolumeSeen(spec, VolumeState.REFUSED, str(error))


def _has_label(device: BlockDevice, deadline: Deadline) -> bool:
    try:
        read_label(device, deadline)
    except CorruptionError:
        return False
    return True


def _unfinished(
    spec: VolumeSpec, members: list[BlockDevice], unlabelled: list[BlockDevice], deadline: Deadline
) -> frozenset[str]:
    """The labelled members, if a creation of this volume was interrupted before its superblock was written.

    Creating zeroes the place of the superblock's copies on all members, labels one member after the other, and
    writes the superblock last: with zeroes there on every labelled member, nothing was ever stored.
    """
    labelled = [member for member in members if member not in unlabelled]
    if not labelled or labelled != members[: len(labelled)]:
        return frozenset()
    labels = [read_label(member, deadline) for member in labelled]
    if any(label.volume_name != spec.name or label.volume_uuid != labels[0].volume_uuid for label in labels):
        return frozenset()
    for member in labelled:
        unit_blocks = UNIT_BYTES // member.block_size_bytes
        if read_blocks(member, unit_blocks, 3 * unit_blocks, deadline).any():
            return frozenset()
    return frozenset(member.uri for member in labelled)


def _see_unlabelled(
    spec: VolumeSpec, members: list[BlockDevice], unfinished: frozenset[str], deadline: Deadline
) -> VolumeSeen:
    for member in members:
        if member.uri in unfinished:
            continue
        users = find_users(member)
        signatures = find_signatures(member, deadline)
        if users or signatures:
            what = f"is in use: {users[0]}" if users else f"holds a {signatures[0]}"
            reason = f"{member.uri}: {what}; `kvdev volume create --destroy` overwrites it"
            return VolumeSeen(spec, VolumeState.REFUSED, reason)
    sizes = {member.block_size_bytes for member in members}
    if len(sizes) > 1:
        listed = ", ".join(f"{member.uri} {member.block_size_bytes}" for member in members)
        return VolumeSeen(spec, VolumeState.REFUSED, f"expected members of equal block sizes, got {listed}")
    caches = {member.uri: member.has_volatile_cache for member in members}
    return VolumeSeen(spec, VolumeState.ABSENT, has_volatile_cache=caches, unfinished=unfinished)


@dataclass
class VolumePlan:
    """What to make on one volume, and what stands in the way."""

    steps: list[VolumeStep] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_volume(deployment: Deployment, seen: VolumeSeen, *, is_coming: bool) -> VolumePlan:
    """Compare a volume with the file. ``is_coming``: its members are made by the same plan."""
    spec = seen.spec
    plan = VolumePlan()
    where = f"volume {spec.name}"
    if seen.state is VolumeState.REFUSED or (seen.state is VolumeState.UNREACHABLE and not is_coming):
        plan.problems.append(f"{where}: {seen.reason}")
        return plan
    if seen.state is VolumeState.UNREACHABLE:
        plan.notes.append(f"{where}: its members are not served yet; what they hold is read when they are")
    if seen.state is not VolumeState.PRESENT:
        plan.steps.append(VolumeStep(spec))
    wanted = [(engine, rank) for engine in deployment.of_volume(spec.name) for rank in engine.ranks]
    missing: list[tuple[EngineSpec, RankSpec]] = []
    for engine, rank in wanted:
        info = seen.namespace(rank.name)
        if info is None:
            missing.append((engine, rank))
        else:
            plan.problems += _differences(spec, engine, rank, info)
    unlimited = [rank for engine, rank in missing if engine.quota_bytes is None]
    # Fixed quotas first: the others share what is left.
    for engine, rank in sorted(missing, key=lambda each: each[0].quota_bytes is None):
        share = len(unlimited) - unlimited.index(rank) if engine.quota_bytes is None else 1
        plan.steps.append(VolumeStep(spec, rank, engine.quota_bytes, share, engine.checksum))
    names = {rank.name for _, rank in wanted}
    for info in seen.namespaces:
        if info.name not in names:
            plan.notes.append(f"KV namespace {spec.name}#{info.name}: is not in the file and stays")
    return plan


def _differences(spec: VolumeSpec, engine: EngineSpec, rank: RankSpec, info: NamespaceInfo) -> list[str]:
    what = f"KV namespace {spec.name}#{rank.name}"
    try:
        check_geometry(what, expected=rank.geometry, actual=info.geometry)
    except UsageError as error:
        return [f"{error}; delete it with `kvdev namespace delete`, or name the engine otherwise"]
    if info.checksum != engine.checksum:
        return [f"{what}: checksum: expected {engine.checksum}, got {info.checksum}"]
    if engine.quota_bytes is not None:
        expected = engine.quota_bytes // info.page_size_bytes
        if expected != info.quota_pages:
            return [f"{what}: quota_per_rank: expected {expected} pages, got {info.quota_pages}"]
    return []


def make_step(session: Session, step: VolumeStep, *, timeout_s: float) -> str:
    """Make a volume or KV namespace and read it back; says what was made, or that it was there."""
    deadline = Deadline.after(timeout_s)
    seen = see_volume(session, step.volume, timeout_s=timeout_s)
    if seen.state in (VolumeState.REFUSED, VolumeState.UNREACHABLE):
        raise UsageError(seen.reason)
    if step.rank is None:
        if seen.state is VolumeState.PRESENT:
            return "was there"
        members = [session.open_device(member.uri, deadline=deadline) for member in step.volume.members]
        Volume.create(
            members,
            name=step.volume.name,
            strip_size_bytes=step.volume.strip_size_bytes,
            destroy=seen.unfinished,
            deadline=deadline,
        )
        after = see_volume(session, step.volume, timeout_s=timeout_s)
        if after.state is not VolumeState.PRESENT:
            raise CorruptionError(f"{step.title}: was made, but reads as {after.state.value}: {after.reason}")
        return "made"
    if seen.volume is None:
        raise UsageError(f"{step.title}: volume {step.volume.name} is not there")
    if seen.namespace(step.rank.name) is not None:
        return "was there"
    pages = _quota_pages(seen.volume, step, deadline)
    info = seen.volume.create_namespace(
        step.rank.name, step.rank.geometry, quota_pages=pages, checksum=step.checksum, deadline=deadline
    )
    return f"made, {info.quota_pages} pages"


def _quota_pages(volume: Volume, step: VolumeStep, deadline: Deadline) -> int:
    assert step.rank is not None, "only KV namespaces have a quota"
    geometry: Geometry = step.rank.geometry
    if step.quota_bytes is not None:
        return step.quota_bytes // geometry.page_size_bytes
    largest = max((count for _, count in volume.free_extents(deadline)), default=0)
    # Extents start at strips, so a strip at either end of each share may stay unused.
    share_bytes = largest * volume.block_size_bytes // step.share_count - 2 * volume.strip_size_bytes
    pages = volume.pages_for(geometry, max(0, share_bytes))
    if pages < 1:
        raise UsageError(
            f"{step.title}: expected room for one page of {format_size(geometry.page_size_bytes)}, got "
            f"{format_size(largest * volume.block_size_bytes)} free for {step.share_count} KV namespaces"
        )
    return pages


def describe_namespaces(
    seen: VolumeSeen, *, timeout_s: float, on_error: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Each KV namespace with its use; opening for reading takes no lock."""
    found = []
    for info in seen.namespaces:
        described: dict[str, Any] = {
            "name": info.name,
            "model_id": info.geometry.model_id,
            "page_size_bytes": info.page_size_bytes,
            "quota_pages": info.quota_pages,
            "pages": None,
            "stored_bytes": None,
            "extent_bytes": info.extent_bytes,
            "writer": writer_of(info.record).value,
        }
        if seen.volume is not None:
            try:
                opened = seen.volume.open_namespace(
                    info.name, mode="reader", deadline=Deadline.after(timeout_s)
                )
                described["pages"] = opened.stat().index.live_count
                described["stored_bytes"] = described["pages"] * info.page_size_bytes
                opened.close()
            except KvdevError as error:
                on_error(f"KV namespace {seen.spec.name}#{info.name}: {error}")
        found.append(described)
    return found
