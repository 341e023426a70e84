"""Volumes and KV namespaces as commands open them: by URI, for the length of a block, sized ahead.

Not here: the store (``kvdev.store``); what commands print.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvdev.block.device import BlockDevice, read_blocks
from kvdev.block.stripe import check_strip_size
from kvdev.clock import Deadline
from kvdev.errors import KvdevError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev.session import Session
from kvdev.store import KvNamespace, PageStore, Volume
from kvdev.store.check import Erasing
from kvdev.store.media import MAGIC_LABEL, UNIT_BYTES
from kvdev.store.namespace import Mode
from kvdev.store.plan import plan_namespace
from kvdev.store.superblock import RECORD_COUNT
from kvdev.store.volume import check_geometry
from kvdev.units import format_size
from kvdev.uri import KvNamespaceUri, VolumeUri, parse_kv_namespace_uri
from kvdev_tools.connect import operation_deadline
from kvdev_tools.rig import BLOCK_SIZE_BYTES

INTERRUPTED_TIMEOUT_S = 1.0
"""For the orderly close after Ctrl-C or SIGTERM: much for a target that answers, bearable for one that does not."""
CREATE_TIMEOUT_FACTOR = 4
"""Making a volume and a namespace on it takes several steps, each within the timeout."""


@dataclass(frozen=True)
class PoolSize:
    """A volume that holds one KV namespace of a given quota and nothing else."""

    quota_pages: int
    strip_size_bytes: int
    member_size_bytes: int


def size_pool(geometry: Geometry, *, page_count: int, member_count: int, strip_size_bytes: int) -> PoolSize:
    """The least members for a namespace of ``page_count`` pages, with the volume's own structures."""
    check_strip_size(strip_size_bytes, BLOCK_SIZE_BYTES)
    plan = plan_namespace(
        page_size_bytes=geometry.page_size_bytes,
        quota_pages=page_count,
        block_size_bytes=BLOCK_SIZE_BYTES,
        strip_size_bytes=strip_size_bytes,
    )
    # Row 0, two copies of the directory with a strip between them, and a row to round up each of the two parts.
    directory_strips = -(-RECORD_COUNT * UNIT_BYTES // strip_size_bytes)
    strips = member_count + 2 * directory_strips + 1 + -(-plan.total_bytes // strip_size_bytes)
    rows = -(-strips // member_count) + 2
    return PoolSize(page_count, strip_size_bytes, rows * strip_size_bytes)


def erasing_line(erasing: Erasing, volume_uri: str) -> str:
    """A KV namespace that is being erased, for people: how far it is, and who or what goes on with it."""
    done = f"{format_size(erasing.erased_bytes)} of {format_size(erasing.extent_bytes)} done"
    if erasing.holder:
        return f"{erasing.name}: being erased by {erasing.holder}, {done} when it last said so"
    return (
        f"{erasing.name}: being erased, {done}, by nobody now; to go on: "
        f"kvdev namespace delete --erase '{volume_uri}#{erasing.name}'"
    )


def open_members(
    session: Session, uri: VolumeUri, *, besides: Collection[str] = (), deadline: Deadline
) -> list[BlockDevice]:
    """The devices that a volume's URI means; of a whole subsystem the namespaces with a label of ours, and those whose
    URIs are among ``besides``."""
    members = session.open_members(uri, deadline=deadline)
    if uri.subsystem is None:
        return members
    labelled = [member for member in members if member.uri in besides or _has_label(member, deadline)]
    if not labelled:
        raise UsageError(
            f"{uri}: members: expected at least one labelled namespace, got none; "
            f"make a volume with kvdev volume create"
        )
    return labelled


def open_volume(session: Session, uri: VolumeUri, *, deadline: Deadline) -> Volume:
    """Open a volume by its members' labels."""
    return Volume.open(open_members(session, uri, deadline=deadline), deadline=deadline)


def _has_label(device: BlockDevice, deadline: Deadline) -> bool:
    if device.size_bytes < UNIT_BYTES:
        return False
    return read_blocks(device, 0, 1, deadline)[: len(MAGIC_LABEL)].tobytes() == MAGIC_LABEL


@contextlib.contextmanager
def opened_namespace(
    session: Session,
    uri: KvNamespaceUri | str,
    *,
    mode: Mode = "owner",
    geometry: Geometry | None = None,
    timeout_s: float,
) -> Iterator[tuple[Volume, KvNamespace]]:
    """An open KV namespace; closed in order, soon after an interrupt, or given up when its devices are out of reach."""
    if isinstance(uri, str):
        uri = parse_kv_namespace_uri(uri)
    volume = open_volume(session, uri.volume, deadline=operation_deadline(timeout_s))
    namespace = volume.open_namespace(
        uri.name, mode=mode, geometry=geometry, deadline=operation_deadline(timeout_s)
    )
    try:
        yield volume, namespace
    except TransportError:
        # What was flushed is there on reopen; waiting for a dead peer again would gain nothing.
        namespace.abandon()
        raise
    except BaseException as error:
        # Who interrupts does not wait: what was flushed is there on reopen, closed in order or not.
        limit_s = timeout_s if isinstance(error, Exception) else min(timeout_s, INTERRUPTED_TIMEOUT_S)
        with contextlib.suppress(KvdevError):
            namespace.close(deadline=operation_deadline(limit_s))
        raise
    namespace.close(deadline=operation_deadline(timeout_s))


@contextlib.contextmanager
def opened_store(
    session: Session, uri: KvNamespaceUri | str, *, geometry: Geometry, timeout_s: float
) -> Iterator[tuple[Volume, PageStore]]:
    """The page store of a KV namespace, as its owner."""
    with opened_namespace(session, uri, geometry=geometry, timeout_s=timeout_s) as (volume, namespace):
        yield volume, PageStore(namespace, timeout_s=timeout_s)


def create_pool(
    session: Session, uri: VolumeUri, *, name: str, geometry: Geometry, size: PoolSize, timeout_s: float
) -> None:
    """Label the members, make the volume and its one KV namespace."""
    deadline = operation_deadline(CREATE_TIMEOUT_FACTOR * timeout_s)
    members = session.open_members(uri, deadline=deadline)
    volume = Volume.create(members, name=name, strip_size_bytes=size.strip_size_bytes, deadline=deadline)
    volume.create_namespace(name, geometry, quota_pages=size.quota_pages, deadline=deadline)


def pool_geometry(session: Session, uri: KvNamespaceUri, *, deadline: Deadline) -> Geometry:
    """The geometry that a KV namespace was made with."""
    volume = open_volume(session, uri.volume, deadline=deadline)
    return volume.namespace(uri.name, deadline=deadline).geometry


def check_pool(session: Session, uri: KvNamespaceUri, geometry: Geometry, *, deadline: Deadline) -> int:
    """The quota of a KV namespace; UsageError when it is not there or has another geometry."""
    volume = open_volume(session, uri.volume, deadline=deadline)
    info = volume.namespace(uri.name, deadline=deadline)
    check_geometry(str(uri), expected=geometry, actual=info.geometry)
    return info.quota_pages
