"""RPC methods of what stands on bdevs: splits, filters, lvol stores; limits and histograms of any bdev.

Not here: the rules (``stack``); the other methods (``rpc_methods``).
Trust: parameters are ``untrusted``; raises only SpdkError for bad input.
Threads: one, the RPC server's loop.
"""

from __future__ import annotations

import base64
import errno
import os
import struct
import uuid as uuid_module
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdev.target import model as m
from kvdev.target import rpc_params as p
from kvdev.target.lvol import CLUSTER_SIZE_DEFAULT_BYTES, Lvol, LvolStore
from kvdev.target.rpc_params import optional, required
from kvdev.target.rpc_table import TICK_RATE_HZ, Method, Result, flat, given, true_after
from kvdev.target.stack import ERROR_PREFIX, INJECTED_OPERATIONS, BdevStack
from spdk_rpc.errors import ERROR_INTERNAL, ERROR_INVALID_PARAMS

HISTOGRAM_GRANULARITY = 7
"""The data path counts so finely; a coarser histogram is folded from it."""
HISTOGRAM_MIN_NS = 1000
HISTOGRAM_MAX_NS = 120_000_000_000
IOS_PER_SEC_STEP = 1000
"""SPDK rounds a limit on operations up to so many."""
_LATENCY_TYPES = ("avg_read", "p99_read", "avg_write", "p99_write")
_ERROR_TYPES = ("failure", "pending", "corrupt_data", "nomem", "nvme_failure")
_CLEAR_METHODS = ("default", "none", "unmap", "write_zeroes")
_NO_SNAPSHOTS = "snapshots and clones are not kept here"


@dataclass(frozen=True)
class _HistogramOptions:
    handle: int
    granularity: int
    min_ns: int
    max_ns: int


class StackMethods:
    """The rows of the table for one model and its stack."""

    def __init__(self, model: m.TargetModel, stack: BdevStack) -> None:
        self._model = model
        self._stack = stack
        self._histograms: dict[str, _HistogramOptions] = {}

    def table(self) -> dict[str, Method]:
        return {**self._filter_methods(), **self._lvol_methods(), **self._measure_methods()}

    # Splits and filters.

    def _filter_methods(self) -> dict[str, Method]:
        name = {"name": required(p.text)}
        stack = self._stack
        return {
            "bdev_split_create": flat(
                lambda base_bdev, split_count, split_size_mb=0: stack.create_split(
                    base_bdev, count=split_count, size_mib=split_size_mb
                ),
                {
                    "base_bdev": required(p.text),
                    "split_count": required(p.uint32),
                    "split_size_mb": optional(p.uint64),
                },
            ),
            "bdev_split_delete": flat(
                true_after(stack.delete_split, base_bdev="base_name"), {"base_bdev": required(p.text)}
            ),
            "bdev_delay_create": Method(
                self._bdev_delay_create,
                {
                    **name,
                    "base_bdev_name": required(p.text),
                    **{f"{each}_latency": required(p.uint64) for each in _LATENCY_TYPES},
                    "uuid": optional(p.uuid),
                },
            ),
            "bdev_delay_delete": Method(
                true_after(partial(stack.delete_filter, kind=m.BdevKind.DELAY)), name
            ),
            "bdev_delay_update_latency": Method(
                true_after(stack.update_latency, delay_bdev_name="name", latency_type="which"),
                {
                    "delay_bdev_name": required(p.text),
                    "latency_type": required(p.one_of(*_LATENCY_TYPES)),
                    "latency_us": required(p.uint64),
                },
            ),
            "bdev_error_create": Method(
                true_after(stack.create_error),
                {"base_name": required(p.text), "uuid": optional(p.uuid)},
            ),
            "bdev_error_delete": Method(
                true_after(partial(stack.delete_filter, kind=m.BdevKind.ERROR)), name
            ),
            "bdev_error_inject_error": Method(
                self._bdev_error_inject_error,
                {
                    **name,
                    "io_type": required(p.one_of("clear", "read", "write", "unmap", "flush", "all")),
                    "error_type": required(p.one_of(*_ERROR_TYPES)),
                    "nvme_sct": optional(p.uint32),
                    "nvme_sc": optional(p.uint32),
                    "num": optional(p.uint32),
                    "queue_depth": optional(p.uint64),
                    "corrupt_offset": optional(p.uint64),
                    "corrupt_value": optional(p.uint8),
                },
            ),
            "bdev_error_resume_pending": Method(true_after(stack.resume_pending), name),
        }

    def _bdev_delay_create(
        self, name: str, base_bdev_name: str, uuid: uuid_module.UUID | None = None, **latencies: int
    ) -> Result:
        by_type = {each: latencies[f"{each}_latency"] for each in _LATENCY_TYPES}
        self._stack.create_delay(
            name, base_name=base_bdev_name, latencies=m.Latencies(**by_type), uuid=given(uuid)
        )
        return name

    def _bdev_error_inject_error(
        self,
        name: str,
        io_type: str,
        error_type: str,
        num: int = 1,
        nvme_sct: int = 0,
        nvme_sc: int = 0,
        queue_depth: int = 0,
        corrupt_offset: int = 0,
        corrupt_value: int = 0,
    ) -> Result:
        has_status = (nvme_sct, nvme_sc) != (0, 0)
        if has_status != (error_type == "nvme_failure"):
            text = "nvme_sct or nvme_sc should be specified for NVMe error injection"
            raise m.SpdkError(-errno.EINVAL, text)
        if nvme_sct > 7 or nvme_sc > 0xFF:
            raise m.errno_error(
                errno.EINVAL, f"nvme_sct, nvme_sc: expected up to 7 and 255, got {nvme_sct}, {nvme_sc}"
            )
        if error_type == "corrupt_data" and corrupt_value == 0 and io_type != "clear":
            raise m.errno_error(errno.EINVAL, "corrupt_value: expected other than 0, which changes nothing")
        injection = m.Injection(
            error_type=error_type,
            count=num,
            queue_depth=queue_depth,
            corrupt_offset=corrupt_offset,
            corrupt_value=corrupt_value,
            sct=nvme_sct,
            sc=nvme_sc,
        )
        self._stack.inject(name, io_type=io_type, injection=injection)
        return True

    # Lvols.

    def _lvol_methods(self) -> dict[str, Method]:
        stack = self._stack
        name = {"name": required(p.text)}
        store = {"uuid": optional(p.text), "lvs_name": optional(p.text)}
        rename = {"old_name": required(p.text), "new_name": required(p.text)}
        return {
            "bdev_lvol_create_lvstore": Method(
                self._bdev_lvol_create_lvstore,
                {
                    "bdev_name": required(p.text),
                    "lvs_name": required(p.text),
                    "cluster_sz": optional(p.uint32),
                    "clear_method": optional(p.one_of("unmap", "write_zeroes", "none")),
                    "num_md_pages_per_cluster_ratio": optional(p.uint32),
                    "md_page_size": optional(p.uint32),
                },
            ),
            "bdev_lvol_delete_lvstore": Method(true_after(stack.delete_store, lvs_name="name"), store),
            "bdev_lvol_get_lvstores": Method(self._bdev_lvol_get_lvstores, store),
            "bdev_lvol_rename_lvstore": Method(true_after(stack.rename_store), rename),
            "bdev_lvol_grow_lvstore": Method(true_after(stack.grow_store, lvs_name="name"), store),
            "bdev_lvol_create": Method(
                self._bdev_lvol_create,
                {
                    "lvol_name": required(p.text),
                    "size_in_mib": required(p.uint64),
                    "thin_provision": optional(p.boolean),
                    **store,
                    "clear_method": optional(p.text),
                },
            ),
            "bdev_lvol_rename": Method(true_after(stack.rename_lvol, old_name="name"), rename),
            "bdev_lvol_resize": Method(
                true_after(stack.resize_lvol, size_in_mib="size_mib"),
                {**name, "size_in_mib": required(p.uint64)},
            ),
            "bdev_lvol_set_read_only": Method(true_after(stack.set_lvol_readonly), name),
            "bdev_lvol_delete": Method(true_after(stack.delete_lvol), name),
            "bdev_lvol_get_lvols": Method(
                self._bdev_lvol_get_lvols, {"lvs_uuid": optional(p.text), "lvs_name": optional(p.text)}
            ),
            "bdev_lvol_snapshot": Method(
                self._refuse_snapshot,
                {"lvol_name": required(p.text), "snapshot_name": required(p.text)},
            ),
            "bdev_lvol_clone": Method(
                self._refuse_snapshot,
                {"snapshot_name": required(p.text), "clone_name": required(p.text)},
            ),
            "bdev_lvol_inflate": Method(self._refuse_snapshot, name),
            "bdev_lvol_decouple_parent": Method(self._refuse_snapshot, name),
        }

    def _refuse_snapshot(
        self, name: str = "", lvol_name: str = "", snapshot_name: str = "", clone_name: str = ""
    ) -> Result:
        del clone_name
        self._stack.find_lvol(name or lvol_name or snapshot_name)
        message = m.errno_error(errno.EOPNOTSUPP, _NO_SNAPSHOTS).message
        raise m.SpdkError(ERROR_INVALID_PARAMS, message)

    def _bdev_lvol_create_lvstore(
        self, bdev_name: str, lvs_name: str, cluster_sz: int = 0, **metadata: Any
    ) -> Result:
        del metadata  # Nothing is written on the bdev: its bytes are those of the lvols.
        store = self._stack.create_store(
            bdev_name, name=lvs_name, cluster_size_bytes=cluster_sz or CLUSTER_SIZE_DEFAULT_BYTES
        )
        return str(store.uuid)

    def _stores(self, uuid: str | None, name: str | None) -> tuple[LvolStore, ...]:
        if uuid is None and name is None:
            return self._stack.stores()
        return (self._stack.find_store(name=name, uuid=uuid),)

    def _bdev_lvol_get_lvstores(self, uuid: str | None = None, lvs_name: str | None = None) -> Result:
        return [
            {
                "uuid": str(store.uuid),
                "name": store.name,
                "base_bdev": store.base_name,
                "total_data_clusters": store.cluster_count,
                "free_clusters": store.free_cluster_count,
                "block_size": self._model.find_bdev(store.base_name).block_size_bytes,
                "cluster_size": store.cluster_size_bytes,
                "max_growable_size": store.max_growable_size_bytes,
            }
            for store in self._stores(uuid, lvs_name)
        ]

    def _bdev_lvol_create(
        self,
        lvol_name: str,
        size_in_mib: int,
        thin_provision: bool = False,
        uuid: str | None = None,
        lvs_name: str | None = None,
        clear_method: str = "default",
    ) -> Result:
        store = self._stack.find_store(name=lvs_name, uuid=uuid)
        if clear_method not in _CLEAR_METHODS:
            raise m.SpdkError(-errno.EINVAL, "Invalid clean_method option")
        made = self._stack.create_lvol(
            store,
            name=lvol_name,
            size_mib=size_in_mib,
            is_thin=thin_provision,
            is_cleared=clear_method != "none",
        )
        return str(made)

    def _bdev_lvol_get_lvols(self, lvs_uuid: str | None = None, lvs_name: str | None = None) -> Result:
        return [
            {
                "alias": f"{store.name}/{lvol.name}",
                "uuid": str(lvol.uuid),
                "name": lvol.name,
                "is_thin_provisioned": lvol.is_thin,
                "is_snapshot": False,
                "is_clone": False,
                "is_esnap_clone": False,
                "is_degraded": False,
                "num_allocated_clusters": len(lvol.clusters),
                "lvs": {"name": store.name, "uuid": str(store.uuid)},
            }
            for store in self._stores(lvs_uuid, lvs_name)
            for lvol in store.lvols.values()
        ]

    # Limits and histograms.

    def _measure_methods(self) -> dict[str, Method]:
        limits = ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")
        name = {"name": required(p.text)}
        return {
            "bdev_set_qos_limit": Method(
                self._bdev_set_qos_limit, {**name, **{each: optional(p.uint64) for each in limits}}
            ),
            "bdev_enable_histogram": Method(
                self._bdev_enable_histogram,
                {
                    **name,
                    "enable": required(p.boolean),
                    "opc": optional(p.text),
                    "granularity": optional(p.uint8),
                    "min_nsec": optional(p.uint64),
                    "max_nsec": optional(p.uint64),
                },
            ),
            "bdev_get_histogram": Method(self._bdev_get_histogram, name),
            "bdev_get_histogram_borders": Method(
                self._bdev_get_histogram_borders,
                {**name, "borders": required(p.array_of(p.uint64, size_limit=256))},
            ),
            "bdev_null_resize": Method(self._bdev_null_resize, {**name, "new_size": required(p.uint64)}),
        }

    def _bdev_null_resize(self, name: str, new_size: int) -> Result:
        bdev = self._model.find_bdev(name)
        if bdev.kind is not m.BdevKind.NULL:
            raise m.errno_error(errno.EINVAL, f"name: {name!r} is no null bdev")
        self._model.resize_null(bdev, size_mib=new_size)
        return True

    def _bdev_set_qos_limit(self, name: str, **limits: int) -> Result:
        bdev = self._model.find_bdev(name)
        if not limits:
            raise m.SpdkError(-errno.EINVAL, "No rate limits specified")
        if "rw_ios_per_sec" in limits:
            limits["rw_ios_per_sec"] = -(-limits["rw_ios_per_sec"] // IOS_PER_SEC_STEP) * IOS_PER_SEC_STEP
        merged = m.RateLimits(**{**limits_json(bdev.limits), **limits})
        too_high = [each for each, value in limits_json(merged).items() if value >= 1 << 43]
        if too_high:
            message = f"Failed to configure rate limit: {os.strerror(errno.EINVAL)}: {too_high[0]}: too high"
            raise m.SpdkError(ERROR_INVALID_PARAMS, message)
        self._model.set_limits(bdev, merged)
        return True

    def _bdev_enable_histogram(
        self,
        name: str,
        enable: bool,
        opc: str | None = None,
        granularity: int = HISTOGRAM_GRANULARITY,
        min_nsec: int = HISTOGRAM_MIN_NS,
        max_nsec: int = HISTOGRAM_MAX_NS,
    ) -> Result:
        bdev = self._model.find_bdev(name)
        if not enable:
            self._model.backend.stop_histogram(bdev.handle)
            return True
        if opc is not None and opc not in INJECTED_OPERATIONS:
            text = "Invalid Io type"
            raise m.SpdkError(
                ERROR_INTERNAL, f"{text}: opc: expected one of {', '.join(INJECTED_OPERATIONS)}"
            )
        if not 1 <= granularity <= HISTOGRAM_GRANULARITY:
            raise m.errno_error(
                errno.EINVAL, f"granularity: expected 1 to {HISTOGRAM_GRANULARITY}, got {granularity}"
            )
        if min_nsec >= max_nsec:
            raise m.errno_error(errno.EINVAL, "min_nsec: expected less than max_nsec")
        self._model.backend.start_histogram(bdev.handle, opc)
        self._histograms[bdev.name] = _HistogramOptions(bdev.handle, granularity, min_nsec, max_nsec)
        return True

    def _counts(self, name: str) -> tuple[_HistogramOptions, list[int]]:
        bdev = self._model.find_bdev(name)
        options = self._histograms.get(bdev.name)
        if options is None or options.handle != bdev.handle:
            # SPDK's answer to a histogram that was never enabled.
            raise m.errno_error(errno.ENOMEM, f"no histogram of {name!r}: call bdev_enable_histogram first")
        return options, self._model.backend.histogram(bdev.handle)

    def _bdev_get_histogram(self, name: str) -> Result:
        options, counts = self._counts(name)
        low, high, folded = fold_histogram(counts, options.granularity, options.min_ns, options.max_ns)
        return {
            "histogram": base64.b64encode(struct.pack(f"<{len(folded)}Q", *folded)).decode("ascii"),
            "granularity": options.granularity,
            "min_range": low,
            "max_range": high,
            "tsc_rate": TICK_RATE_HZ,
        }

    def _bdev_get_histogram_borders(self, name: str, borders: list[int]) -> Result:
        _, counts = self._counts(name)
        sums = [0] * (len(borders) + 1)
        for start_ns, count in _buckets(counts):
            place = next(
                (index for index, each in enumerate(borders) if start_ns < each * 1000), len(borders)
            )
            sums[place] += count
        return {"borders_count": sums}


def limits_json(limits: m.RateLimits) -> dict[str, int]:
    return {
        "rw_ios_per_sec": limits.rw_ios_per_sec,
        "rw_mbytes_per_sec": limits.rw_mbytes_per_sec,
        "r_mbytes_per_sec": limits.r_mbytes_per_sec,
        "w_mbytes_per_sec": limits.w_mbytes_per_sec,
    }


def _range_of(value: int, granularity: int) -> int:
    """The range of buckets a value is in: all below 2^granularity, then one for each power of two."""
    return max(0, value.bit_length() - granularity)


def _buckets(counts: list[int]) -> Iterator[tuple[int, int]]:
    """(start in nanoseconds, count) of the buckets that counted something."""
    size = 1 << HISTOGRAM_GRANULARITY
    for index, count in enumerate(counts):
        if count:
            number, within = divmod(index, size)
            yield (within if number == 0 else (size + within) << (number - 1)), count


def fold_histogram(
    counts: list[int], granularity: int, min_ns: int, max_ns: int
) -> tuple[int, int, list[int]]:
    """(first range, last range, counts) as SPDK lays a histogram out; what is outside counts at the ends."""
    low, high = _range_of(min_ns, granularity), _range_of(max_ns - 1, granularity)
    size = 1 << granularity
    folded = [0] * ((high - low + 1) * size)
    for start_ns, count in _buckets(counts):
        number = _range_of(start_ns, granularity)
        within = (start_ns >> max(0, number - 1)) & (size - 1)
        if number < low:
            number, within = low, 0
        elif number > high:
            number, within = high, size - 1
        folded[(number - low) * size + within] += count
    return low, high, folded


def lvol_driver_specific(store: LvolStore, lvol: Lvol) -> Mapping[str, Any]:
    """What bdev_get_bdevs tells of an lvol."""
    return {
        "lvol_store_uuid": str(store.uuid),
        "base_bdev": store.base_name,
        "thin_provision": lvol.is_thin,
        "num_allocated_clusters": len(lvol.clusters),
        "snapshot": False,
        "clone": False,
        "esnap_clone": False,
    }


def stack_config(stack: BdevStack, find: Callable[[str], m.Bdev | None]) -> list[dict[str, Any]]:
    """The calls that put splits and filters back; lvols are not configuration, they lie on their bdev."""
    calls: list[dict[str, Any]] = []
    for spec in stack.filters():
        bdev = find(spec.name)
        uuid = spec.uuid or (bdev.uuid if bdev is not None else None)
        named = {} if uuid is None else {"uuid": str(uuid)}
        if spec.latencies is None:
            # By the name it was asked for with, which may be an alias: its own name follows from it.
            base_name = spec.name.removeprefix(ERROR_PREFIX)
            calls.append({"method": "bdev_error_create", "params": {"base_name": base_name, **named}})
            continue
        latencies = {f"{each}_latency": getattr(spec.latencies, each) for each in _LATENCY_TYPES}
        params = {"name": spec.name, "base_bdev_name": spec.base_name, **named, **latencies}
        calls.append({"method": "bdev_delay_create", "params": params})
    for split in stack.splits():
        params = {"base_bdev": split.base_name, "split_count": split.count, "split_size_mb": split.size_mib}
        calls.append({"method": "bdev_split_create", "params": params})
    return calls
