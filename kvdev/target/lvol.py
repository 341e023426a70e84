"""Which clusters of a store belong to which lvol, and the store as data that outlives its bdev.

Not here: bdevs (``stack``).
Trust: what ``LvolStoreImage.parse`` gets is ``untrusted``; raises only ValueError for it.
"""

from __future__ import annotations

import errno
import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdev.target.model import SpdkError, errno_error
from kvdev.units import MIB
from spdk_rpc.errors import ERROR_INVALID_PARAMS

CLUSTER_SIZE_DEFAULT_BYTES = 4 * MIB
CLUSTER_SIZE_MAX_BYTES = 1 << 30
LVOL_NAME_SIZE_LIMIT = 63
CLUSTER_COUNT_LIMIT = 1 << 20
"""Of one store; a mapping has at most so many extents."""
PAGE_SIZE_BYTES = 4096
_MASK_HEADER_BYTES = 5


@dataclass
class Lvol:
    """One logical volume; ``clusters`` are those of the base it lies on, in order."""

    name: str
    uuid: uuid_module.UUID
    clusters: list[int]
    is_thin: bool = False
    is_readonly: bool = False


@dataclass
class LvolStore:
    """A bdev cut into clusters. Invariant: a cluster is free or belongs to one lvol.

    The first clusters are left out, as many as SPDK's own metadata would take, so that sizes agree.
    """

    name: str
    uuid: uuid_module.UUID
    base_name: str
    cluster_size_bytes: int
    first_cluster: int
    cluster_count: int
    lvols: dict[str, Lvol] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    """Sorted, so that a new lvol lies in as few pieces as it can."""

    @classmethod
    def create(
        cls,
        *,
        name: str,
        uuid: uuid_module.UUID,
        base_name: str,
        base_size_bytes: int,
        cluster_size_bytes: int,
    ) -> LvolStore:
        """An empty store. Raises SpdkError when the cluster size or the bdev does not fit."""
        size = cluster_size_bytes
        if size % PAGE_SIZE_BYTES or not PAGE_SIZE_BYTES <= size <= CLUSTER_SIZE_MAX_BYTES:
            raise errno_error(
                errno.EINVAL, f"cluster_sz: expected a multiple of 4096 up to 1 GiB, got {size}"
            )
        total = base_size_bytes // size
        if total > CLUSTER_COUNT_LIMIT:
            raise errno_error(
                errno.EINVAL,
                f"cluster_sz: {total} clusters are more than {CLUSTER_COUNT_LIMIT}: take larger ones",
            )
        first = _metadata_cluster_count(total, size)
        if total <= first:
            message = errno_error(errno.EINVAL, "bdev_name: too small for one cluster").message
            raise SpdkError(ERROR_INVALID_PARAMS, message)
        store = cls(name, uuid, base_name, size, first, total - first)
        store._free = list(range(first, total))
        return store

    @property
    def free_cluster_count(self) -> int:
        return len(self._free)

    @property
    def max_growable_size_bytes(self) -> int:
        """What the mask of clusters could still describe, as SPDK tells it."""
        total = self.first_cluster + self.cluster_count
        pages = -(-(total // 8 + _MASK_HEADER_BYTES) // PAGE_SIZE_BYTES)
        return (pages * PAGE_SIZE_BYTES - _MASK_HEADER_BYTES) * 8 * self.cluster_size_bytes

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            reason = (
                f"size_in_mib: {count} clusters of {self.cluster_size_bytes} bytes, {len(self._free)} free"
            )
            message = errno_error(errno.ENOSPC, reason).message
            raise SpdkError(ERROR_INVALID_PARAMS, message)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def add(self, *, name: str, uuid: uuid_module.UUID, size_bytes: int, is_thin: bool) -> Lvol:
        """Take clusters for a new lvol, all of them at once."""
        lvol = Lvol(name, uuid, self._take(-(-size_bytes // self.cluster_size_bytes)), is_thin)
        self.lvols[name] = lvol
        return lvol

    def remove(self, name: str) -> None:
        lvol = self.lvols.pop(name)
        self._free = sorted([*self._free, *lvol.clusters])

    def rename(self, lvol: Lvol, name: str) -> None:
        self.lvols = {name if each is lvol else key: each for key, each in self.lvols.items()}
        lvol.name = name

    def resize(self, lvol: Lvol, size_bytes: int) -> None:
        """Add clusters at the end, or give those at the end back."""
        wanted = -(-size_bytes // self.cluster_size_bytes)
        more = wanted - len(lvol.clusters)
        if more > 0:
            lvol.clusters += self._take(more)
        else:
            self.restore(lvol, lvol.clusters[:wanted])

    def restore(self, lvol: Lvol, clusters: list[int]) -> None:
        """Set the clusters of an lvol to some that it has or had since the last change."""
        freed = set(lvol.clusters) - set(clusters)
        self._free = sorted((set(self._free) | freed) - set(clusters))
        lvol.clusters = list(clusters)

    def grow(self, base_size_bytes: int) -> None:
        """Add the clusters by which the base has become larger."""
        end = self.first_cluster + self.cluster_count
        total = min(base_size_bytes // self.cluster_size_bytes, CLUSTER_COUNT_LIMIT)
        if total > end:
            self._free += range(end, total)
            self.cluster_count = total - self.first_cluster

    def extents(self, clusters: list[int]) -> tuple[tuple[int, int], ...]:
        """(offset, length) in bytes; neighbouring clusters are one piece."""
        pieces: list[tuple[int, int]] = []
        size = self.cluster_size_bytes
        for cluster in clusters:
            offset = cluster * size
            if pieces and sum(pieces[-1]) == offset:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + size)
            else:
                pieces.append((offset, size))
        return tuple(pieces)


def _metadata_cluster_count(total: int, cluster_size_bytes: int) -> int:
    """Clusters for a super block, three masks and one page of metadata for each cluster."""
    mask_pages = -(-(total // 8 + _MASK_HEADER_BYTES) // PAGE_SIZE_BYTES)
    return -(-(1 + 3 * mask_pages + total) * PAGE_SIZE_BYTES // cluster_size_bytes)


@dataclass(frozen=True)
class LvolStoreImage:
    """A store without its bdev: what a disk would hold of it."""

    name: str
    uuid: uuid_module.UUID
    base_name: str
    cluster_size_bytes: int
    first_cluster: int
    cluster_count: int
    lvols: tuple[Mapping[str, Any], ...]

    def to_json(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "uuid": str(self.uuid),
            "base_name": self.base_name,
            "cluster_size_bytes": self.cluster_size_bytes,
            "first_cluster": self.first_cluster,
            "cluster_count": self.cluster_count,
            "lvols": [dict(each) for each in self.lvols],
        }

    @classmethod
    def parse(cls, untrusted: Any, place: str) -> LvolStoreImage:
        """Check what a file says before anything lies on it. Raises ValueError naming the place."""
        store = _object(untrusted, place)
        image = cls(
            name=_text(store, "name", place),
            uuid=_uuid(store, place),
            base_name=_text(store, "base_name", place),
            cluster_size_bytes=_number(
                store, "cluster_size_bytes", place, PAGE_SIZE_BYTES, CLUSTER_SIZE_MAX_BYTES
            ),
            first_cluster=_number(store, "first_cluster", place, 1, CLUSTER_COUNT_LIMIT),
            cluster_count=_number(store, "cluster_count", place, 1, CLUSTER_COUNT_LIMIT),
            lvols=tuple(_parse_lvols(store.get("lvols"), f"{place}.lvols")),
        )
        clusters = [cluster for each in image.lvols for cluster in each["clusters"]]
        end = image.first_cluster + image.cluster_count
        if len(set(clusters)) < len(clusters):
            raise ValueError(f"{place}.lvols: a cluster belongs to two")
        if any(not image.first_cluster <= each < end for each in clusters):
            raise ValueError(f"{place}.lvols: a cluster outside of the store")
        return image


def _parse_lvols(untrusted: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(untrusted, list):
        raise ValueError(f"{place}: expected a list")
    lvols = []
    for index, each in enumerate(untrusted):
        where = f"{place}[{index}]"
        lvol = _object(each, where)
        clusters = lvol.get("clusters")
        if not isinstance(clusters, list) or not clusters or not all(type(one) is int for one in clusters):
            raise ValueError(f"{where}.clusters: expected a list of numbers")
        lvols.append(
            {
                "name": _text(lvol, "name", where),
                "uuid": str(_uuid(lvol, where)),
                "clusters": clusters,
                "is_thin": lvol.get("is_thin") is True,
                "is_readonly": lvol.get("is_readonly") is True,
            }
        )
    return lvols


def _object(untrusted: Any, place: str) -> dict[str, Any]:
    if not isinstance(untrusted, dict):
        raise ValueError(f"{place}: expected an object")
    return untrusted


def _text(fields: Mapping[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{place}.{name}: expected a string")
    return value


def _uuid(fields: Mapping[str, Any], place: str) -> uuid_module.UUID:
    try:
        return uuid_module.UUID(_text(fields, "uuid", place))
    except ValueError as error:
        raise ValueError(f"{place}.uuid: expected a UUID") from error


def _number(fields: Mapping[str, Any], name: str, place: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{place}.{name}: expected a number from {low} to {high}")
    return value


def image_of(store: LvolStore) -> LvolStoreImage:
    lvols = tuple(
        {
            "name": lvol.name,
            "uuid": str(lvol.uuid),
            "clusters": list(lvol.clusters),
            "is_thin": lvol.is_thin,
            "is_readonly": lvol.is_readonly,
        }
        for lvol in store.lvols.values()
    )
    return LvolStoreImage(
        store.name,
        store.uuid,
        store.base_name,
        store.cluster_size_bytes,
        store.first_cluster,
        store.cluster_count,
        lvols,
    )


def store_of(image: LvolStoreImage, *, base_size_bytes: int) -> LvolStore:
    """The store an image shows. Raises SpdkError when the bdev is smaller than it was."""
    end = image.first_cluster + image.cluster_count
    if end * image.cluster_size_bytes > base_size_bytes:
        raise errno_error(errno.EINVAL, f"lvol store {image.name!r}: its bdev has become smaller")
    lvols = {
        each["name"]: Lvol(
            each["name"],
            uuid_module.UUID(each["uuid"]),
            list(each["clusters"]),
            each["is_thin"],
            each["is_readonly"],
        )
        for each in image.lvols
    }
    store = LvolStore(
        image.name,
        image.uuid,
        image.base_name,
        image.cluster_size_bytes,
        image.first_cluster,
        image.cluster_count,
        lvols,
    )
    used = {cluster for lvol in lvols.values() for cluster in lvol.clusters}
    store._free = [each for each in range(image.first_cluster, end) if each not in used]
    return store
