"""Bdevs on other bdevs: splits, delay and error filters, lvol stores; and what waits for a bdev that is to come.

Not here: RAID0 and the registry of bdevs (``model``); JSON (``rpc_stack``); where lvols lie (``lvol``).
Threads: one, the RPC server's loop.
"""

from __future__ import annotations

import errno
import uuid as uuid_module
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvdev.target.lvol import LVOL_NAME_SIZE_LIMIT, Lvol, LvolStore, LvolStoreImage, image_of, store_of
from kvdev.target.model import (
    NULL_UUID,
    Bdev,
    BdevKind,
    Injection,
    Latencies,
    SpdkError,
    TargetModel,
    errno_error,
)
from kvdev.units import MIB
from spdk_rpc.errors import ERROR_INVALID_PARAMS

ERROR_PREFIX = "EE_"
SPLIT_COUNT_LIMIT = 1024
WAITING_LIMIT = 4096
INJECTED_OPERATIONS = ("read", "write", "unmap", "flush")
_CONTENT_IS_LOST = (BdevKind.MALLOC, BdevKind.NULL)


@dataclass(frozen=True)
class SplitSpec:
    """Parts of a base; a size of 0 cuts it into equal ones."""

    base_name: str
    count: int
    size_mib: int


@dataclass(frozen=True)
class FilterSpec:
    """A delay (with ``latencies``) or error bdev to put on a base."""

    name: str
    base_name: str
    uuid: uuid_module.UUID | None
    latencies: Latencies | None


class BdevStack:
    """What stands on other bdevs of one model.

    Invariant: a base with something on it is claimed; when a base goes, what stands on it goes first. A split
    or filter of a base that is not there stays as asked for and is made when the base comes, as in SPDK.
    """

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._splits: dict[str, SplitSpec] = {}
        self._split_names: dict[str, list[str]] = {}
        self._filters: dict[str, FilterSpec] = {}
        self._stores: dict[str, LvolStore] = {}
        self._lvols: dict[str, tuple[LvolStore, Lvol]] = {}
        """By the name of their bdev."""
        self._images: dict[str, LvolStoreImage] = {}
        """Stores whose base is not there now, by its name."""
        model.examiners.append(self._examine)

    def _examine(self, base: Bdev) -> None:
        """Give a bdev that has just come to what waits for it; a failure leaves it waiting, as in SPDK."""
        waiting: list[Callable[[], Any]] = []
        for spec in self._filters.values():
            if spec.base_name == base.name:
                waiting.append(lambda spec=spec: self._put_filter(spec, base))  # type: ignore[misc]
        if base.name in self._splits:
            waiting.append(lambda: self._put_split(self._splits[base.name], base))
        if base.name in self._images:
            waiting.append(lambda: self._load_store(base))
        for put in waiting:
            try:
                put()
                return
            except SpdkError:
                continue

    # Splits.

    def splits(self) -> tuple[SplitSpec, ...]:
        return tuple(self._splits.values())

    def create_split(self, base_name: str, *, count: int, size_mib: int = 0) -> list[str]:
        """Cut a bdev into parts NAMEp0, NAMEp1, …; none yet while it does not exist."""
        prefix = f"Failed to create {count} split bdevs from '{base_name}': "
        if not 1 <= count <= SPLIT_COUNT_LIMIT:
            reason = f"split_count: expected 1 to {SPLIT_COUNT_LIMIT}"
            raise _refused(errno.EINVAL, reason, prefix=prefix)
        if base_name in self._splits:
            raise _refused(errno.EEXIST, prefix=prefix)
        if len(self._splits) >= WAITING_LIMIT:
            raise _refused(errno.ENOSPC, f"at most {WAITING_LIMIT} bdevs are split", prefix=prefix)
        base = self._model.bdev(base_name)
        spec = SplitSpec(base.name if base is not None else base_name, count, size_mib)
        self._splits[spec.base_name] = spec
        if base is None:
            return []
        try:
            return self._put_split(spec, base)
        except SpdkError as error:
            del self._splits[spec.base_name]
            raise SpdkError(ERROR_INVALID_PARAMS, prefix + error.message) from error

    def _put_split(self, spec: SplitSpec, base: Bdev) -> list[str]:
        size_blocks = spec.size_mib * MIB // base.block_size_bytes or base.block_count // spec.count
        if size_blocks == 0:
            raise errno_error(errno.EINVAL, f"{base.name!r} has fewer blocks than parts")
        # As many as fit; none at all leaves the base alone.
        count = min(spec.count, base.block_count // size_blocks)
        if count == 0:
            return []
        self._model.claim(base.name, lambda: self._drop_split(base.name))
        names = self._split_names[base.name] = []
        size_bytes = size_blocks * base.block_size_bytes
        try:
            for index in range(count):
                part = replace(
                    _over(base, f"{base.name}p{index}", BdevKind.SPLIT, f"split {index}"),
                    block_count=size_blocks,
                    extents=((index * size_bytes, size_bytes),),
                )
                names.append(self._model.register(part))
        except SpdkError:
            self._drop_split(base.name)
            raise
        return list(names)

    def delete_split(self, base_name: str) -> None:
        """Take the parts away; nothing happens where there are none, as in SPDK."""
        base = self._model.bdev(base_name)
        name = base.name if base is not None else base_name
        self._splits.pop(name, None)
        self._drop_split(name)

    def _drop_split(self, base_name: str) -> None:
        names = self._split_names.pop(base_name, None)
        if names is None:
            return
        for name in names:
            self._unregister(name)
        self._model.release(base_name)

    def _unregister(self, name: str) -> None:
        bdev = self._model.bdev(name)
        if bdev is not None:
            self._model.unregister(bdev)

    # Filters.

    def filters(self) -> tuple[FilterSpec, ...]:
        return tuple(self._filters.values())

    def create_delay(
        self, name: str, *, base_name: str, latencies: Latencies, uuid: uuid_module.UUID | None = None
    ) -> None:
        """A bdev that answers late; it appears when its base does."""
        if latencies.p99_read < latencies.avg_read or latencies.p99_write < latencies.avg_write:
            raise errno_error(
                errno.EINVAL, "p99_read_latency, p99_write_latency: expected at least the average"
            )
        self._create_filter(FilterSpec(name, base_name, uuid, latencies))

    def create_error(self, base_name: str, *, uuid: uuid_module.UUID | None = None) -> None:
        """A bdev EE_NAME that can inject errors; it appears when its base does."""
        self._create_filter(FilterSpec(f"{ERROR_PREFIX}{base_name}", base_name, uuid, None))

    def _create_filter(self, spec: FilterSpec) -> None:
        if spec.name in self._filters:
            raise errno_error(errno.EEXIST, f"bdev {spec.name!r}")
        if len(self._filters) >= WAITING_LIMIT:
            raise errno_error(errno.ENOSPC, f"a target has at most {WAITING_LIMIT} filters")
        base = self._model.bdev(spec.base_name)
        if base is not None:
            spec = replace(spec, base_name=base.name)
        self._filters[spec.name] = spec
        if base is None:
            return
        try:
            self._put_filter(spec, base)
        except SpdkError:
            self._filters.pop(spec.name, None)
            raise

    def _put_filter(self, spec: FilterSpec, base: Bdev) -> None:
        kind = BdevKind.ERROR if spec.latencies is None else BdevKind.DELAY
        self._model.claim(base.name, lambda: self._lose_filter(spec))
        bdev = replace(_over(base, spec.name, kind, kind.value), latencies=spec.latencies)
        if spec.uuid is not None and spec.uuid != NULL_UUID:
            bdev = replace(bdev, uuid=spec.uuid)
        try:
            self._model.register(bdev)
        except SpdkError:
            self._model.release(base.name)
            raise

    def _lose_filter(self, spec: FilterSpec) -> None:
        """The base goes: a delay comes again with it, an error bdev does not, as in SPDK."""
        self._unregister(spec.name)
        if spec.latencies is None:
            self._filters.pop(spec.name, None)

    def delete_filter(self, name: str, *, kind: BdevKind) -> None:
        bdev = self._model.bdev(name)
        if bdev is None or bdev.kind is not kind:
            raise errno_error(errno.ENODEV, f"{kind.value} {name!r}")
        del self._filters[bdev.name]
        self._model.unregister(bdev)
        self._model.release(bdev.base_names[0])

    def update_latency(self, name: str, *, which: str, latency_us: int) -> None:
        """Change one of the four latencies of a delay bdev."""
        bdev = self._model.bdev(name)
        if bdev is None or bdev.latencies is None:
            raise SpdkError(ERROR_INVALID_PARAMS, "The requested bdev does not exist.")
        latencies = replace(bdev.latencies, **{which: latency_us})
        self._model.set_latencies(bdev, latencies)
        self._filters[bdev.name] = replace(self._filters[bdev.name], latencies=latencies)

    def inject(self, name: str, *, io_type: str, injection: Injection) -> None:
        """Arm an error bdev for one kind of operation or ``all``; ``clear`` disarms it."""
        bdev = self._error_bdev(name)
        operations = INJECTED_OPERATIONS if io_type in ("all", "clear") else (io_type,)
        for operation in operations:
            count = 0 if io_type == "clear" else injection.count
            self._model.backend.inject(bdev.handle, operation, replace(injection, count=count))

    def resume_pending(self, name: str) -> None:
        self._model.backend.resume_pending(self._error_bdev(name).handle)

    def _error_bdev(self, name: str) -> Bdev:
        bdev = self._model.bdev(name)
        if bdev is None or bdev.kind is not BdevKind.ERROR:
            raise errno_error(errno.ENODEV, f"{BdevKind.ERROR.value} {name!r}")
        return bdev

    # Lvol stores.

    def stores(self) -> tuple[LvolStore, ...]:
        return tuple(self._stores.values())

    def lvol(self, bdev_name: str) -> tuple[LvolStore, Lvol] | None:
        """The store and the lvol behind a bdev."""
        return self._lvols.get(bdev_name)

    def find_store(self, *, name: str | None, uuid: str | None) -> LvolStore:
        """A store by exactly one of name and UUID."""
        if (name is None) == (uuid is None):
            raise errno_error(errno.EINVAL, "lvs_name, uuid: expected exactly one")
        for store in self._stores.values():
            if name == store.name or uuid == str(store.uuid):
                return store
        raise errno_error(errno.ENODEV, f"lvol store {name or uuid!r}")

    def create_store(self, base_name: str, *, name: str, cluster_size_bytes: int) -> LvolStore:
        """Make a bdev a store; what is on it is lost."""
        base = self._model.find_bdev(base_name)
        if not 0 < len(name) <= LVOL_NAME_SIZE_LIMIT:
            raise errno_error(errno.EINVAL, f"lvs_name: expected 1 to {LVOL_NAME_SIZE_LIMIT} characters")
        if any(name == each.name for each in self._stores.values()):
            raise errno_error(errno.EEXIST, f"lvol store {name!r}")
        if self._model.is_claimed(base.name):
            raise errno_error(errno.EPERM, f"bdev {base_name!r} is in use")
        store = LvolStore.create(
            name=name,
            uuid=self._model.new_uuid(),
            base_name=base.name,
            base_size_bytes=base.block_size_bytes * base.block_count,
            cluster_size_bytes=cluster_size_bytes,
        )
        self._images.pop(base.name, None)
        self._add_store(store)
        return store

    def _add_store(self, store: LvolStore) -> None:
        claim_type = "read_many_write_one"
        self._model.claim(store.base_name, lambda: self._unload_store(store), type=claim_type)
        self._stores[str(store.uuid)] = store

    def delete_store(self, *, name: str | None = None, uuid: str | None = None) -> None:
        """Delete a store with all its lvols; its base is free again."""
        store = self.find_store(name=name, uuid=uuid)
        self._drop_store(store)
        self._model.release(store.base_name)

    def _drop_store(self, store: LvolStore) -> None:
        for lvol in list(store.lvols.values()):
            self._unregister(str(lvol.uuid))
            del self._lvols[str(lvol.uuid)]
        del self._stores[str(store.uuid)]

    def _unload_store(self, store: LvolStore) -> None:
        """The base goes: what is on a disk is there again when the disk is."""
        base = self._model.find_bdev(store.base_name)
        if base.kind not in _CONTENT_IS_LOST:
            self._images[store.base_name] = image_of(store)
        self._drop_store(store)

    def _load_store(self, base: Bdev) -> None:
        store = store_of(self._images[base.name], base_size_bytes=base.block_size_bytes * base.block_count)
        self._add_store(store)
        del self._images[base.name]
        for lvol in store.lvols.values():
            self._register_lvol(store, lvol)

    def rename_store(self, old_name: str, new_name: str) -> None:
        store = next((each for each in self._stores.values() if each.name == old_name), None)
        if store is None:
            raise SpdkError(-errno.ENOENT, f"Lvol store {old_name} not found")
        if not 0 < len(new_name) <= LVOL_NAME_SIZE_LIMIT:
            raise _refused(errno.EINVAL, f"new_name: expected 1 to {LVOL_NAME_SIZE_LIMIT} characters")
        if any(new_name == each.name for each in self._stores.values() if each is not store):
            raise _refused(errno.EEXIST, f"lvol store {new_name!r}")
        store.name = new_name
        for lvol in store.lvols.values():
            self._model.rename_alias(str(lvol.uuid), f"{new_name}/{lvol.name}")

    def grow_store(self, *, name: str | None = None, uuid: str | None = None) -> None:
        """Take what its base has become larger by."""
        store = self.find_store(name=name, uuid=uuid)
        base = self._model.find_bdev(store.base_name)
        store.grow(base.block_size_bytes * base.block_count)

    def create_lvol(
        self, store: LvolStore, *, name: str, size_mib: int, is_thin: bool, is_cleared: bool
    ) -> uuid_module.UUID:
        """A new lvol; its bdev is named by its UUID and has the alias STORE/LVOL."""
        if not 0 < len(name) <= LVOL_NAME_SIZE_LIMIT:
            raise errno_error(errno.EINVAL, f"lvol_name: expected 1 to {LVOL_NAME_SIZE_LIMIT} characters")
        if name in store.lvols:
            raise errno_error(errno.EEXIST, f"lvol {name!r}")
        if size_mib == 0:
            raise errno_error(errno.EINVAL, "size_in_mib: expected at least 1, got 0")
        lvol = store.add(name=name, uuid=self._model.new_uuid(), size_bytes=size_mib * MIB, is_thin=is_thin)
        try:
            bdev = self._register_lvol(store, lvol)
            if is_cleared:
                # A former lvol's bytes are nobody's to read.
                self._clear(bdev, "lvol_name")
        except SpdkError:
            self._lvols.pop(str(lvol.uuid), None)
            self._unregister(str(lvol.uuid))
            store.remove(name)
            raise
        return lvol.uuid

    def _clear(self, bdev: Bdev, field: str) -> None:
        try:
            self._model.backend.clear_bdev(bdev.handle)
        except OSError as error:
            raise errno_error(
                error.errno or errno.EIO, f"{field}: {bdev.name!r} cannot be cleared"
            ) from error

    def _register_lvol(self, store: LvolStore, lvol: Lvol) -> Bdev:
        base = self._model.find_bdev(store.base_name)
        self._lvols[str(lvol.uuid)] = (store, lvol)
        self._model.register(_lvol_bdev(base, store, lvol))
        return self._model.find_bdev(str(lvol.uuid))

    def find_lvol(self, name: str) -> tuple[LvolStore, Lvol]:
        """By UUID or STORE/LVOL."""
        bdev = self._model.bdev(name)
        found = self._lvols.get(bdev.name) if bdev is not None else None
        if found is None:
            raise errno_error(errno.ENODEV, f"lvol {name!r}")
        return found

    def delete_lvol(self, name: str) -> None:
        store, lvol = self.find_lvol(name)
        self._unregister(str(lvol.uuid))
        del self._lvols[str(lvol.uuid)]
        store.remove(lvol.name)

    def rename_lvol(self, name: str, new_name: str) -> None:
        store, lvol = self.find_lvol(name)
        if not 0 < len(new_name) <= LVOL_NAME_SIZE_LIMIT:
            raise _refused(errno.EINVAL, f"new_name: expected 1 to {LVOL_NAME_SIZE_LIMIT} characters")
        if new_name in store.lvols and new_name != lvol.name:
            raise _refused(errno.EEXIST, f"lvol {new_name!r}")
        store.rename(lvol, new_name)
        self._model.rename_alias(str(lvol.uuid), f"{store.name}/{new_name}")

    def resize_lvol(self, name: str, *, size_mib: int) -> None:
        """Change the size; what is cut off is lost, what is added reads as zeroes."""
        store, lvol = self.find_lvol(name)
        if size_mib == 0:
            raise _refused(errno.EINVAL, "size_in_mib: expected at least 1, got 0")
        before = list(lvol.clusters)
        store.resize(lvol, size_mib * MIB)
        added = lvol.clusters[len(before) :]
        try:
            if added:
                self._clear_clusters(store, added)
            self._replace(store, lvol)
        except SpdkError:
            store.restore(lvol, before)
            raise

    def _clear_clusters(self, store: LvolStore, clusters: list[int]) -> None:
        """Clear clusters that no bdev shows yet, through one that lives for this only."""
        base = self._model.find_bdev(store.base_name)
        scratch = replace(
            _over(base, f"{store.uuid} clusters", BdevKind.LVOL, "scratch"),
            block_count=len(clusters) * store.cluster_size_bytes // base.block_size_bytes,
            extents=store.extents(clusters),
        )
        backend = self._model.backend
        try:
            handle = backend.open_bdev(scratch)
            try:
                backend.clear_bdev(handle)
            finally:
                backend.close_bdev(handle)
        except OSError as error:
            raise errno_error(error.errno or errno.EIO, f"lvol store {store.name!r}: {error}") from error

    def set_lvol_readonly(self, name: str) -> None:
        store, lvol = self.find_lvol(name)
        lvol.is_readonly = True
        self._replace(store, lvol)

    def _replace(self, store: LvolStore, lvol: Lvol) -> None:
        base = self._model.find_bdev(store.base_name)
        old = self._model.find_bdev(str(lvol.uuid))
        new = _lvol_bdev(base, store, lvol)
        self._model.replace_bdev(
            replace(
                old,
                block_count=new.block_count,
                extents=new.extents,
                is_readonly=new.is_readonly,
                base_handles=new.base_handles,
            )
        )

    # What survives a restart.

    def images(self) -> list[LvolStoreImage]:
        """Every store, also those whose base is not there now."""
        return [*self._images.values(), *(image_of(store) for store in self._stores.values())]

    def keep_images(self, images: list[LvolStoreImage]) -> None:
        """Stores that bdevs to come have on them."""
        self._images.update({image.base_name: image for image in images})


def _over(base: Bdev, name: str, kind: BdevKind, word: str) -> Bdev:
    """A bdev on one base with its properties; its UUID follows from the base's, as SPDK does it."""
    return Bdev(
        name=name,
        kind=kind,
        uuid=uuid_module.uuid5(base.uuid if base.uuid != NULL_UUID else uuid_module.NAMESPACE_OID, word),
        block_size_bytes=base.block_size_bytes,
        block_count=base.block_count,
        base_names=(base.name,),
        base_handles=(base.handle,),
        is_readonly=base.is_readonly,
    )


def _lvol_bdev(base: Bdev, store: LvolStore, lvol: Lvol) -> Bdev:
    extents = store.extents(lvol.clusters)
    return replace(
        _over(base, str(lvol.uuid), BdevKind.LVOL, ""),
        uuid=lvol.uuid,
        alias=f"{store.name}/{lvol.name}",
        block_count=len(lvol.clusters) * store.cluster_size_bytes // base.block_size_bytes,
        extents=extents,
        is_readonly=base.is_readonly or lvol.is_readonly,
    )


def _refused(code: int, reason: str = "", *, prefix: str = "") -> SpdkError:
    """The refusal of methods that flatten every errno to one code and keep its text."""
    return SpdkError(ERROR_INVALID_PARAMS, errno_error(code, reason, prefix=prefix).message)


def parse_images(document: Any) -> list[LvolStoreImage]:
    """From the JSON of a state file. Raises ValueError naming the place."""
    if not isinstance(document, list):
        raise ValueError("lvol_stores: expected a list")
    return [LvolStoreImage.parse(each, f"lvol_stores[{index}]") for index, each in enumerate(document)]


def images_json(images: list[LvolStoreImage]) -> list[Mapping[str, Any]]:
    return [image.to_json() for image in images]
