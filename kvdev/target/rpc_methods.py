"""The RPC methods of the embedded target: parameters in, model changed or read, SPDK-shaped results out.

Not here: the stream and the envelope (``rpc_server``); the rules (``model``); parameter types
(``rpc_params``).
Trust: parameters are ``untrusted``; raises only SpdkError for bad input.
Threads: one, the RPC server's loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import resource
import time
import uuid as uuid_module
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any

import kvdev
from kvdev.target import model as m
from kvdev.target import rpc_params as p
from kvdev.target.rpc_absent import ABSENT
from kvdev.target.rpc_host import HostMethods
from kvdev.target.rpc_params import optional, required
from kvdev.target.rpc_stack import StackMethods, limits_json, lvol_driver_specific, stack_config
from kvdev.target.rpc_table import (
    TICK_RATE_HZ,
    Handler,
    Method,
    Result,
    given,
    no_params,
    nvmf,
    raid_row,
    true_after,
)
from kvdev.target.stack import BdevStack
from kvdev.units import KIB, is_power_of_two
from kvdev.wire.log import AnaState
from spdk_rpc.errors import (
    ERROR_INTERNAL,
    ERROR_INVALID_PARAMS,
    ERROR_INVALID_STATE,
    ERROR_METHOD_NOT_FOUND,
)

BDEV_WAIT_LIMIT_MS = 600_000
"""Longest wait of bdev_get_bdevs(name, timeout)."""
DEFAULT_SERIAL_NUMBER = "0" * 20
DEFAULT_MODEL_NUMBER = "kvdev target"
RPC_VERSION = {"major": 26, "minor": 9, "patch": 0, "suffix": "-kvdev"}
"""The SPDK release whose methods and shapes these are."""

STARTUP_ONLY_MESSAGE = (
    "Method may only be called before framework is initialized. Use --wait-for-rpc command line parameter "
    "and then issue this RPC before the framework_start_init RPC."
)
STARTUP_ONLY_METHODS = (
    "bdev_set_options",
    "framework_start_init",
    "iobuf_set_options",
    "nvmf_set_config",
    "nvmf_set_crdt",
    "nvmf_set_max_subsystems",
    "sock_impl_set_options",
    "sock_set_default_impl",
)
"""Known, and refused as SPDK refuses them once it runs: this target is always initialised."""

LOG_LEVELS = {
    "DISABLED": logging.CRITICAL + 10,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "NOTICE": logging.INFO,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
}
LOG_FLAGS = ("target", "target_rpc")

IO_TYPES = [
    "read",
    "write",
    "unmap",
    "flush",
    "reset",
    "nvme_admin",
    "nvme_io",
    "nvme_io_md",
    "write_zeroes",
    "zcopy",
    "get_zone_info",
    "zone_management",
    "zone_append",
    "compare",
    "compare_and_write",
    "abort",
    "seek_hole",
    "seek_data",
    "copy",
    "nvme_iov_md",
    "nvme_nssr",
    "write_uncorrectable",
]

# Methods that change no configuration, by name.
_READS = re.compile(r"_get_|_wait_|_reset_|_inject_|_resume_|^log_")

_PREFERRED_SIZES = (
    "preferred_write_alignment",
    "preferred_write_granularity",
    "optimal_write_size",
    "preferred_unmap_alignment",
    "preferred_unmap_granularity",
)

SUBSYSTEM_DEPENDENCIES: Mapping[str, list[str]] = {
    "keyring": [],
    "bdev": ["keyring"],
    "nvmf": ["bdev", "keyring"],
    "nbd": ["bdev"],
    "vhost_blk": ["bdev"],
}

_RESET_MODES = ("all", "maxmin", "error", "none")
_LISTEN_ADDRESS = {
    "trtype": required(p.text),
    "traddr": required(p.text),
    "adrfam": optional(p.text),
    "trsvcid": optional(p.text),
}
_NAMESPACE = {
    "bdev_name": required(p.text),
    "nsid": optional(p.uint32),
    "nguid": optional(p.hex_bytes(16)),
    "eui64": optional(p.hex_bytes(8)),
    "uuid": optional(p.uuid),
    "anagrpid": optional(p.uint32),
    "no_auto_visible": optional(p.boolean),
    "hide_metadata": optional(p.boolean),
    "ptpl_file": optional(p.text),
}
_ANA_STATES = {
    "optimized": AnaState.OPTIMIZED,
    "non_optimized": AnaState.NON_OPTIMIZED,
    "inaccessible": AnaState.INACCESSIBLE,
}
_SUBSYSTEM_NQN = {"nqn": required(p.text), "tgt_name": optional(p.text)}


class RpcMethods:
    """The table of methods over one model."""

    def __init__(self, model: m.TargetModel) -> None:
        self._model = model
        self.stack = BdevStack(model)
        self.host = HostMethods(model)
        self.on_change: Callable[[], None] | None = None
        """Called after each method that may have changed the configuration. Raises OSError."""
        self._bdev_waiters: set[asyncio.Future[None]] = set()
        self._log_level = "NOTICE"
        self._log_print_level = "INFO"
        self._log_flags = dict.fromkeys(LOG_FLAGS, False)
        self._methods = {
            **self._framework_methods(),
            **self._bdev_methods(),
            **self._raid_methods(),
            **self._nvmf_methods(),
            **StackMethods(model, self.stack).table(),
            **self.host.table(),
        }

    def names(self) -> tuple[str, ...]:
        """The methods that can be called now."""
        return tuple(self._methods)

    def fields(self) -> dict[str, Mapping[str, p.Field]]:
        """The parameters of each method."""
        return {name: method.fields or {} for name, method in self._methods.items()}

    async def call(self, name: str, untrusted: Any) -> Result:
        """Run a method with its ``params`` (None when the request has none). Raises SpdkError."""
        method = self._methods.get(name)
        if method is None:
            if name in STARTUP_ONLY_METHODS:
                raise m.SpdkError(ERROR_INVALID_STATE, STARTUP_ONLY_MESSAGE)
            reason = ABSENT.get(name)
            text = "Method not found" if reason is None else f"Method not found: {reason}"
            raise m.SpdkError(ERROR_METHOD_NOT_FOUND, text)
        if method.fields is None:
            if untrusted is not None:
                raise m.SpdkError(ERROR_INVALID_PARAMS, method.no_params_text)
            arguments = {}
        else:
            try:
                arguments = p.decode_object(
                    method.fields, {} if untrusted is None else untrusted, is_relaxed=method.is_relaxed
                )
            except p.ParamsError as error:
                raise m.SpdkError(method.refusal_code, f"{method.refusal_text}: {error}") from error
        if arguments.pop("tgt_name", None) not in (None, "nvmf_tgt"):
            raise m.SpdkError(ERROR_INVALID_PARAMS, "tgt_name: this target has one NVMe-oF target, nvmf_tgt")
        result = method.handler(**arguments)
        if isinstance(result, Awaitable):
            result = await result
        self._wake_bdev_waiters()
        if self.on_change is not None and not _READS.search(name):
            try:
                self.on_change()
            except OSError as error:
                reason = f"done, but not kept for a restart: {error.strerror or error}"
                raise m.SpdkError(ERROR_INTERNAL, f"Internal error: {reason}") from error
        return result

    def configuration(self) -> list[Mapping[str, Any]]:
        """What SPDK's save_config would ask for: the calls of every subsystem, in the order to run them."""
        return [
            {"subsystem": name, "config": self._framework_get_config(name)} for name in SUBSYSTEM_DEPENDENCIES
        ]

    def _wake_bdev_waiters(self) -> None:
        for waiter in self._bdev_waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Framework, log, notify.

    def _framework_methods(self) -> dict[str, Method]:
        invalid = ERROR_INVALID_PARAMS
        level = {"level": required(p.one_of(*LOG_LEVELS))}
        flag = {"flag": required(p.text)}
        return {
            "spdk_get_version": no_params(
                self._spdk_get_version, "spdk_get_version method requires no parameters"
            ),
            "rpc_get_methods": Method(
                self._rpc_get_methods,
                {"current": optional(p.boolean), "include_aliases": optional(p.boolean)},
                refusal_code=invalid,
                refusal_text="Invalid parameters",
            ),
            "framework_wait_init": Method(lambda: True, {}),
            "framework_get_subsystems": no_params(
                self._framework_get_subsystems, "'framework_get_subsystems' requires no arguments"
            ),
            "framework_get_config": Method(
                self._framework_get_config,
                {"name": required(p.text), "with_batches": optional(p.boolean)},
                refusal_code=invalid,
                refusal_text="Invalid arguments",
            ),
            "framework_get_reactors": no_params(
                self._framework_get_reactors, "`framework_get_reactors` requires no arguments"
            ),
            "notify_get_types": no_params(
                lambda: ["bdev_register", "bdev_unregister", "bdev_resize"], "No parameters required"
            ),
            "notify_get_notifications": Method(
                self._notify_get_notifications,
                {"id": optional(p.uint64), "max": optional(p.uint64)},
                refusal_code=invalid,
                refusal_text=os.strerror(errno.EINVAL),
            ),
            "log_get_flags": no_params(lambda: dict(self._log_flags), "log_get_flags requires no parameters"),
            "log_set_flag": Method(lambda flag: self._set_log_flag(flag, True), flag),
            "log_clear_flag": Method(lambda flag: self._set_log_flag(flag, False), flag),
            "log_get_level": no_params(lambda: self._log_level, "log_get_level requires no parameters"),
            "log_set_level": Method(self._log_set_level, level),
            "log_get_print_level": no_params(
                lambda: self._log_print_level, "log_get_print_level requires no parameters"
            ),
            "log_set_print_level": Method(self._log_set_print_level, level),
        }

    def _spdk_get_version(self) -> Result:
        return {"version": f"kvdev {kvdev.__version__} (RPC of SPDK v26.09)", "fields": dict(RPC_VERSION)}

    def _rpc_get_methods(self, current: bool = False, include_aliases: bool = False) -> Result:
        del include_aliases  # No method here has an alias.
        return [*self._methods, *(() if current else STARTUP_ONLY_METHODS)]

    def _framework_get_subsystems(self) -> Result:
        return [
            {"subsystem": name, "depends_on": depends_on}
            for name, depends_on in SUBSYSTEM_DEPENDENCIES.items()
        ]

    def _framework_get_config(self, name: str, with_batches: bool = False) -> Result:
        del with_batches  # A batch is an optimisation of loading; the flat list says the same.
        config: Mapping[str, Callable[[], Result]] = {
            "keyring": self.host.keyring_config,
            "bdev": self._bdev_config,
            "nvmf": self._nvmf_config,
            "nbd": list,
            "vhost_blk": self.host.vhost_config,
        }
        if name in config:
            return config[name]()
        raise m.SpdkError(ERROR_INVALID_PARAMS, f"Subsystem '{name}' not found")

    def _framework_get_reactors(self) -> Result:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        reactors = []
        for index, group in enumerate(self._model.poll_groups()):
            reactors.append(
                {
                    "lcore": index,
                    "numa_id": 0,
                    "tid": group.thread_id,
                    "busy": group.busy_ns,
                    "idle": group.idle_ns,
                    "in_interrupt": True,
                    "irq": 0,
                    "sys": int(usage.ru_stime * 100),
                    "usr": int(usage.ru_utime * 100),
                    "lw_threads": [
                        {
                            "name": group.name,
                            "id": index + 1,
                            "cpumask": _cpu_mask(),
                            "elapsed": group.busy_ns + group.idle_ns,
                        }
                    ],
                }
            )
        return {"tick_rate": TICK_RATE_HZ, "pid": os.getpid(), "reactors": reactors}

    # SPDK's parameter names are Python's names too: ``id`` and ``max`` shadow, and are keywords here only.
    def _notify_get_notifications(self, id: int = 0, max: int = m.EVENT_COUNT_LIMIT) -> Result:
        events = self._model.events(first_id=id, count_limit=max)
        return [{"type": event.type, "ctx": event.context, "id": event.id} for event in events]

    def _set_log_flag(self, flag: str, is_set: bool) -> Result:
        if flag == "all":
            flags: tuple[str, ...] = LOG_FLAGS
        elif flag in self._log_flags:
            flags = (flag,)
        else:
            raise m.SpdkError(ERROR_INVALID_PARAMS, "invalid log flag")
        for name in flags:
            self._log_flags[name] = is_set
            logging.getLogger(f"kvdev.{name}").setLevel(logging.DEBUG if is_set else logging.NOTSET)
        return True

    def _log_set_level(self, level: str) -> Result:
        self._log_level = level
        logging.getLogger("kvdev").setLevel(LOG_LEVELS[level])
        return True

    def _log_set_print_level(self, level: str) -> Result:
        self._log_print_level = level
        for handler in logging.getLogger("kvdev").handlers:
            handler.setLevel(LOG_LEVELS[level])
        return True

    # Bdevs.

    def _bdev_methods(self) -> dict[str, Method]:
        name = {"name": required(p.text)}
        methods = {
            "bdev_get_bdevs": Method(
                self._bdev_get_bdevs, {"name": optional(p.text), "timeout": optional(p.uint64)}
            ),
            "bdev_wait_for_examine": no_params(lambda: True, "bdev_wait_for_examine requires no parameters"),
            "bdev_get_iostat": Method(
                self._bdev_get_iostat,
                {
                    "names": optional(p.array_of(p.text)),
                    "per_channel": optional(p.boolean),
                    "reset_mode": optional(p.one_of(*_RESET_MODES)),
                },
            ),
            "bdev_reset_iostat": Method(
                self._bdev_reset_iostat,
                {"name": optional(p.text), "mode": optional(p.one_of(*_RESET_MODES))},
            ),
            "bdev_malloc_create": Method(
                self._bdev_malloc_create,
                {
                    "name": optional(p.text),
                    "block_size": required(p.uint32),
                    "num_blocks": required(p.uint64),
                    "uuid": optional(p.uuid),
                    "optimal_io_boundary": optional(p.uint32),
                    "md_size": optional(p.uint32),
                    "md_interleave": optional(p.boolean),
                    "dif_type": optional(p.int32),
                    "dif_is_head_of_md": optional(p.boolean),
                    "physical_block_size": optional(p.uint32),
                    "dif_pi_format": optional(p.uint32),
                    "numa_id": optional(p.int32),
                },
            ),
            "bdev_null_create": Method(
                self._bdev_null_create,
                {
                    "name": required(p.text),
                    "block_size": required(p.uint32),
                    "num_blocks": required(p.uint64),
                    "uuid": optional(p.uuid),
                    "physical_block_size": optional(p.uint32),
                    "md_size": optional(p.uint32),
                    "dif_type": optional(p.int32),
                    "dif_pi_format": optional(p.uint32),
                    "dif_is_head_of_md": optional(p.boolean),
                    "preferred_write_granularity": optional(p.uint32),
                    "preferred_write_alignment": optional(p.uint32),
                    "optimal_write_size": optional(p.uint32),
                    "preferred_unmap_granularity": optional(p.uint32),
                    "preferred_unmap_alignment": optional(p.uint32),
                },
            ),
            "bdev_aio_create": Method(
                self._bdev_aio_create,
                {
                    "name": required(p.text),
                    "filename": required(p.text),
                    "block_size": optional(p.uint32),
                    "readonly": optional(p.boolean),
                    "fallocate": optional(p.boolean),
                    "uuid": optional(p.uuid),
                    "nowait": optional(p.boolean),
                },
            ),
            "bdev_uring_create": Method(
                self._bdev_uring_create,
                {
                    "name": required(p.text),
                    "filename": required(p.text),
                    "block_size": optional(p.uint32),
                    "uuid": optional(p.uuid),
                },
            ),
        }
        kinds = {
            "malloc": m.BdevKind.MALLOC,
            "null": m.BdevKind.NULL,
            "aio": m.BdevKind.AIO,
            "uring": m.BdevKind.URING,
        }
        for word, kind in kinds.items():
            methods[f"bdev_{word}_delete"] = Method(self._deleter(kind), name)
        return methods

    def _deleter(self, kind: m.BdevKind) -> Handler:
        def delete(name: str) -> Result:
            self._model.delete_bdev(name, kind)
            return True

        return delete

    async def _bdev_get_bdevs(self, name: str | None = None, timeout: int = 0) -> Result:
        if name is None:
            return [self._bdev_info(bdev) for bdev in self._model.bdevs()]
        found = self._model.bdev(name)
        expires_ns = time.monotonic_ns() + min(timeout, BDEV_WAIT_LIMIT_MS) * 1_000_000
        while found is None:
            remaining_s = (expires_ns - time.monotonic_ns()) / 1e9
            if remaining_s <= 0:
                break
            waiter = asyncio.get_running_loop().create_future()
            self._bdev_waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=remaining_s)
            finally:
                self._bdev_waiters.discard(waiter)
            found = self._model.bdev(name)
        if found is None:
            # SPDK says so when it was asked to wait.
            raise m.errno_error(errno.ETIMEDOUT if timeout else errno.ENODEV, f"bdev {name!r}")
        return [self._bdev_info(found)]

    def _bdev_info(self, bdev: m.Bdev) -> Result:
        info: dict[str, Any] = {
            "name": bdev.name,
            "aliases": [bdev.alias or str(bdev.uuid)],
            "product_name": bdev.kind.value,
            "block_size": bdev.block_size_bytes,
            "num_blocks": bdev.block_count,
            **dict.fromkeys(_PREFERRED_SIZES, 0),
            "uuid": str(bdev.uuid),
        }
        if self._has_numa_id(bdev):
            info["numa_id"] = -1
        info["assigned_rate_limits"] = limits_json(bdev.limits)
        info["claimed"] = self._model.is_claimed(bdev.name)
        if info["claimed"]:
            info["claim_type"] = self._model.claim_type(bdev.name)
        info["zoned"] = False
        supported = {"read"} if bdev.is_readonly else {"read", "write", "unmap", "flush", "write_zeroes"}
        info["supported_io_types"] = {name: name in supported for name in IO_TYPES}
        info["driver_specific"] = self._driver_specific(bdev)
        return info

    def _has_numa_id(self, bdev: m.Bdev) -> bool:
        """SPDK tells a node for memory and NVMe, and for what stands on one bdev of these."""
        while len(bdev.base_names) == 1 and bdev.kind is not m.BdevKind.RAID0:
            bdev = self._model.find_bdev(bdev.base_names[0])
        return bdev.kind in (m.BdevKind.MALLOC, m.BdevKind.NVME)

    def _driver_specific(self, bdev: m.Bdev) -> Result:
        if bdev.kind is m.BdevKind.URING:
            return {"uring": {"filename": bdev.filename}}
        if bdev.kind is m.BdevKind.AIO:
            return {
                "aio": {
                    "filename": bdev.filename,
                    "block_size_override": bdev.block_size_override,
                    "readonly": bdev.is_readonly,
                    "fallocate": bdev.fallocate,
                    "nowait": bdev.nowait,
                }
            }
        if bdev.kind is m.BdevKind.SPLIT:
            offset_blocks = bdev.extents[0][0] // bdev.block_size_bytes
            return {"split": {"base_bdev": bdev.base_names[0], "offset_blocks": offset_blocks}}
        if bdev.kind is m.BdevKind.ERROR:
            return {"error_disk": {"base_bdev": bdev.base_names[0]}}
        if bdev.kind is m.BdevKind.DELAY and bdev.latencies is not None:
            latencies = {
                f"{each.name}_latency": getattr(bdev.latencies, each.name) for each in fields(m.Latencies)
            }
            named = {"name": bdev.name, "base_bdev_name": bdev.base_names[0], "uuid": str(bdev.uuid)}
            return {"delay": {**named, **latencies}}
        if bdev.kind is m.BdevKind.NVME:
            return self.host.nvme_driver_specific(bdev)
        lvol = self.stack.lvol(bdev.name)
        if lvol is not None:
            return {"lvol": lvol_driver_specific(*lvol)}
        raid = self._model.raid(bdev.name) if bdev.kind is m.BdevKind.RAID0 else None
        return {} if raid is None else {"raid": self._raid_info(raid)}

    def _bdev_get_iostat(
        self,
        names: list[str] | None = None,
        per_channel: bool = False,
        reset_mode: str = "none",
    ) -> Result:
        bdevs = self._model.bdevs() if names is None else [self._model.find_bdev(name) for name in names]
        head = {"tick_rate": TICK_RATE_HZ, "ticks": time.monotonic_ns()}
        if per_channel and len(bdevs) != 1:
            raise m.errno_error(errno.EINVAL, "per_channel: names one bdev only")
        if per_channel:
            # All pollers count into one place: the bdev has one channel.
            groups = self._model.poll_groups()
            thread_id = groups[0].thread_id if groups else 0
            channel = {"thread_id": thread_id, **_iostat_json(self._model.iostat(bdevs[0]))}
            result: Result = {**head, "name": bdevs[0].name, "channels": [channel]}
        else:
            stats = [{"name": bdev.name, **_iostat_json(self._model.iostat(bdev))} for bdev in bdevs]
            result = {**head, "bdevs": stats}
        if reset_mode != "none":
            self._reset(bdevs, reset_mode)
        return result

    def _bdev_reset_iostat(self, name: str | None = None, mode: str = "all") -> Result:
        self._reset(self._model.bdevs() if name is None else [self._model.find_bdev(name)], mode)
        return True

    def _reset(self, bdevs: list[m.Bdev] | tuple[m.Bdev, ...], mode: str) -> None:
        if mode in ("maxmin", "error"):
            raise m.errno_error(errno.EOPNOTSUPP, f"mode: {mode} alone cannot be reset here; use all")
        if mode == "all":
            for bdev in bdevs:
                self._model.reset_iostat(bdev)

    def _bdev_malloc_create(
        self,
        block_size: int,
        num_blocks: int,
        name: str | None = None,
        uuid: uuid_module.UUID | None = None,
        physical_block_size: int = 0,
        optimal_io_boundary: int = 0,
        numa_id: int = -1,
        **metadata: Any,
    ) -> Result:
        del optimal_io_boundary  # A hint; nothing here splits by it.
        _refuse_metadata(metadata)
        if numa_id != -1:
            raise m.errno_error(errno.EOPNOTSUPP, "numa_id: memory is not placed by node here; leave it out")
        return self._model.create_malloc(
            name=name,
            block_size_bytes=block_size,
            block_count=num_blocks,
            uuid=given(uuid),
            physical_block_size_bytes=physical_block_size,
        )

    def _bdev_null_create(
        self,
        name: str,
        block_size: int,
        num_blocks: int,
        uuid: uuid_module.UUID | None = None,
        md_size: int = 0,
        dif_type: int = 0,
        **hints: Any,
    ) -> Result:
        del hints  # Preferred sizes and the like are told to hosts only, and hosts get none.
        _refuse_metadata({"md_size": md_size, "dif_type": dif_type})
        return self._model.create_null(
            name=name, block_size_bytes=block_size, block_count=num_blocks, uuid=given(uuid)
        )

    def _bdev_aio_create(
        self,
        name: str,
        filename: str,
        block_size: int = 0,
        readonly: bool = False,
        fallocate: bool = False,
        uuid: uuid_module.UUID | None = None,
        nowait: bool = False,
    ) -> Result:
        return self._model.create_file(
            name=name,
            kind=m.BdevKind.AIO,
            filename=filename,
            block_size_bytes=block_size,
            uuid=given(uuid),
            is_readonly=readonly,
            fallocate=fallocate,
            nowait=nowait,
        )

    def _bdev_uring_create(
        self, name: str, filename: str, block_size: int = 0, uuid: uuid_module.UUID | None = None
    ) -> Result:
        try:
            return self._model.create_file(
                name=name,
                kind=m.BdevKind.URING,
                filename=filename,
                block_size_bytes=block_size,
                uuid=given(uuid),
            )
        except m.SpdkError as error:
            # This method tells no errno in SPDK.
            text = f"Unable to create URING bdev.: {error.message}"
            raise m.SpdkError(ERROR_INTERNAL, text) from error

    def _bdev_config(self) -> Result:
        calls: list[Result] = self.host.nvme_config()
        for bdev in self._model.bdevs():
            common = {"name": bdev.name, "block_size": bdev.block_size_bytes}
            if bdev.kind is m.BdevKind.MALLOC:
                params = {
                    **common,
                    "num_blocks": bdev.block_count,
                    "physical_block_size": bdev.physical_block_size_bytes,
                    "uuid": str(bdev.uuid),
                    "optimal_io_boundary": 0,
                    "md_size": 0,
                    "dif_type": 0,
                    "dif_is_head_of_md": False,
                    "dif_pi_format": 0,
                    "numa_id": -1,
                }
                calls.append({"method": "bdev_malloc_create", "params": params})
            elif bdev.kind is m.BdevKind.NULL:
                params = {**common, "num_blocks": bdev.block_count, "uuid": str(bdev.uuid)}
                calls.append({"method": "bdev_null_create", "params": params})
            elif bdev.kind is m.BdevKind.URING:
                params = {**common, "filename": bdev.filename, "uuid": str(bdev.uuid)}
                calls.append({"method": "bdev_uring_create", "params": params})
            elif bdev.kind is m.BdevKind.AIO:
                params = {
                    **common,
                    "filename": bdev.filename,
                    "readonly": bdev.is_readonly,
                    "fallocate": bdev.fallocate,
                    "uuid": str(bdev.uuid),
                    "nowait": bdev.nowait,
                }
                calls.append({"method": "bdev_aio_create", "params": params})
        calls += stack_config(self.stack, self._model.bdev)
        # After their bases, though a RAID0 would wait for them.
        for raid in self._model.raids():
            params = {
                "name": raid.name,
                "uuid": str(raid.uuid),
                "strip_size_kb": raid.strip_size_bytes // KIB,
                "raid_level": "raid0",
                "base_bdevs": list(raid.base_names),
            }
            calls.append({"method": "bdev_raid_create", "params": params})
        for bdev in self._model.bdevs():
            if bdev.limits != m.RateLimits():
                params = {"name": bdev.name, **limits_json(bdev.limits)}
                calls.append({"method": "bdev_set_qos_limit", "params": params})
        return [*calls, {"method": "bdev_wait_for_examine"}]

    # RAID0.

    def _raid_methods(self) -> dict[str, Method]:
        return {
            "bdev_raid_create": raid_row(
                self._bdev_raid_create,
                {
                    "name": required(p.text),
                    "strip_size_kb": optional(p.uint32),
                    "raid_level": required(p.one_of("raid0", "0", "raid1", "1", "raid5f", "5f", "concat")),
                    "base_bdevs": required(p.array_of(p.text, size_limit=m.RAID_BASE_COUNT_LIMIT)),
                    "uuid": optional(p.uuid),
                    "superblock": optional(p.boolean),
                },
            ),
            "bdev_raid_delete": raid_row(
                self._bdev_raid_delete, {"name": required(p.text), "clear_sb": optional(p.boolean)}
            ),
            "bdev_raid_get_bdevs": raid_row(
                self._bdev_raid_get_bdevs,
                {"category": required(p.one_of("all", "online", "configuring", "offline"))},
            ),
        }

    def _bdev_raid_create(
        self,
        name: str,
        raid_level: str,
        base_bdevs: list[str],
        strip_size_kb: int = 0,
        uuid: uuid_module.UUID | None = None,
        superblock: bool = False,
    ) -> Result:
        prefix = f"Failed to create RAID bdev {name}: "
        if any(not base_name for base_name in base_bdevs):
            raise m.errno_error(errno.EINVAL, prefix="The base bdev name cannot be empty: ")
        if raid_level not in ("raid0", "0"):
            raise m.errno_error(
                errno.EINVAL, f"raid_level: this target has raid0 only, got {raid_level}", prefix=prefix
            )
        if superblock:
            raise m.errno_error(
                errno.EOPNOTSUPP, "superblock: not supported here: create the raid again", prefix=prefix
            )
        self._model.create_raid0(
            name=name, strip_size_kb=strip_size_kb, base_names=base_bdevs, uuid=given(uuid)
        )
        return True

    def _bdev_raid_delete(self, name: str, clear_sb: bool = False) -> Result:
        del clear_sb  # There is no superblock to clear.
        self._model.delete_raid(name)
        return True

    def _bdev_raid_get_bdevs(self, category: str) -> Result:
        return [
            {"name": raid.name, **self._raid_info(raid)}
            for raid in self._model.raids()
            if category in ("all", raid.state)
        ]

    def _raid_info(self, raid: m.RaidState) -> Result:
        bases = []
        for base_name in raid.base_names:
            base = self._model.bdev(base_name)
            if base is not None and base.name not in raid.discovered:
                base = None
            bases.append(
                {
                    "name": base_name,
                    "uuid": str(base.uuid if base is not None else m.NULL_UUID),
                    "is_configured": base is not None,
                    "data_offset": 0,
                    "data_size": base.block_count if base is not None else 0,
                }
            )
        return {
            "uuid": str(raid.uuid),
            "strip_size_kb": raid.strip_size_bytes // KIB,
            "state": raid.state,
            "raid_level": "raid0",
            "superblock": False,
            "num_base_bdevs": len(raid.base_names),
            "num_base_bdevs_discovered": len(raid.discovered),
            "num_base_bdevs_operational": raid.operational_count,
            "base_bdevs_list": bases,
        }

    # NVMe-oF.

    def _nvmf_methods(self) -> dict[str, Method]:
        nqn = _SUBSYSTEM_NQN
        listen_address = {"listen_address": required(p.nested(_LISTEN_ADDRESS))}
        return {
            "nvmf_create_transport": nvmf(
                self._nvmf_create_transport,
                {
                    "trtype": required(p.text),
                    "tgt_name": optional(p.text),
                    "max_queue_depth": optional(p.uint16),
                    "max_io_qpairs_per_ctrlr": optional(p.uint16),
                    "in_capsule_data_size": optional(p.uint32),
                    "max_io_size": optional(p.uint32),
                    "max_aq_depth": optional(p.uint32),
                    "c2h_success": optional(p.boolean),
                    "sock_priority": optional(p.uint32),
                    "abort_timeout_sec": optional(p.uint32),
                    "ack_timeout": optional(p.uint32),
                    "zcopy": optional(p.boolean),
                    "dif_insert_or_strip": optional(p.boolean),
                    "kas": optional(p.uint16),
                    "min_kato": optional(p.uint32),
                },
                is_relaxed=True,
            ),
            "nvmf_get_transports": nvmf(
                self._nvmf_get_transports, {"trtype": optional(p.text), "tgt_name": optional(p.text)}
            ),
            "nvmf_create_subsystem": nvmf(
                self._nvmf_create_subsystem,
                {
                    **nqn,
                    "serial_number": optional(p.text),
                    "model_number": optional(p.text),
                    "admin_label": optional(p.text),
                    "max_namespaces": optional(p.uint32),
                    "allow_any_host": optional(p.boolean),
                    "ana_reporting": optional(p.boolean),
                    "min_cntlid": optional(p.uint16),
                    "max_cntlid": optional(p.uint16),
                    "dmrsl": optional(p.uint32),
                    "wzsl": optional(p.uint8),
                    "passthrough": optional(p.boolean),
                    "enable_nssr": optional(p.boolean),
                },
            ),
            "nvmf_delete_subsystem": nvmf(true_after(self._model.delete_subsystem), nqn),
            "nvmf_get_subsystems": nvmf(
                self._nvmf_get_subsystems, {"nqn": optional(p.text), "tgt_name": optional(p.text)}
            ),
            "nvmf_subsystem_add_ns": nvmf(
                self._nvmf_subsystem_add_ns, {**nqn, "namespace": required(p.nested(_NAMESPACE))}
            ),
            "nvmf_subsystem_remove_ns": nvmf(
                true_after(self._model.remove_namespace), {**nqn, "nsid": required(p.uint32)}
            ),
            "nvmf_subsystem_add_listener": nvmf(
                self._nvmf_subsystem_add_listener,
                {
                    **nqn,
                    **listen_address,
                    "secure_channel": optional(p.boolean),
                    "ana_state": optional(p.one_of("optimized", "non_optimized", "inaccessible")),
                    "sock_impl": optional(p.text),
                    "numa_id": optional(p.int32),
                },
            ),
            "nvmf_subsystem_listener_set_ana_state": nvmf(
                self._nvmf_subsystem_listener_set_ana_state,
                {
                    **nqn,
                    **listen_address,
                    "ana_state": required(p.one_of(*_ANA_STATES)),
                    "anagrpid": optional(p.uint32),
                },
            ),
            "nvmf_subsystem_remove_listener": nvmf(
                self._nvmf_subsystem_remove_listener, {**nqn, **listen_address}
            ),
            "nvmf_subsystem_get_listeners": nvmf(self._nvmf_subsystem_get_listeners, nqn),
            "nvmf_subsystem_add_host": nvmf(
                self._nvmf_subsystem_add_host,
                {
                    **nqn,
                    "host": required(p.text),
                    "psk": optional(p.secret),
                    "dhchap_key": optional(p.secret),
                    "dhchap_ctrlr_key": optional(p.secret),
                },
                is_relaxed=True,
            ),
            "nvmf_subsystem_set_keys": nvmf(
                self._nvmf_subsystem_set_keys,
                {
                    **nqn,
                    "host": required(p.text),
                    "dhchap_key": optional(p.secret),
                    "dhchap_ctrlr_key": optional(p.secret),
                },
            ),
            "nvmf_subsystem_remove_host": nvmf(
                self._nvmf_subsystem_remove_host,
                {**nqn, "host": required(p.text), "timeout_ms": optional(p.uint64)},
            ),
            "nvmf_subsystem_allow_any_host": nvmf(
                self._nvmf_subsystem_allow_any_host, {**nqn, "allow_any_host": required(p.boolean)}
            ),
            "nvmf_subsystem_get_controllers": nvmf(self._nvmf_subsystem_get_controllers, nqn),
            "nvmf_subsystem_get_qpairs": nvmf(self._nvmf_subsystem_get_qpairs, nqn),
            "nvmf_get_stats": nvmf(self._nvmf_get_stats, {"tgt_name": optional(p.text)}),
        }

    def _nvmf_create_transport(
        self, trtype: str, zcopy: bool = False, dif_insert_or_strip: bool = False, **options: Any
    ) -> Result:
        if trtype.upper() != "TCP":
            raise m.SpdkError(ERROR_INVALID_PARAMS, f"Invalid transport type '{trtype}'")
        transport = m.Transport(**options)
        if self._model.transport() is None:
            failed = "Transport type 'TCP' create failed: "
            if zcopy or dif_insert_or_strip:
                raise m.SpdkError(ERROR_INTERNAL, failed + "zcopy, dif_insert_or_strip: not supported here")
            reason = _transport_fault(transport)
            if reason:
                raise m.SpdkError(ERROR_INTERNAL, failed + reason)
        self._model.create_transport(transport)
        return True

    def _nvmf_get_transports(self, trtype: str | None = None) -> Result:
        transport = self._model.transport()
        if trtype is not None and (transport is None or trtype.upper() != transport.trtype):
            raise m.errno_error(errno.ENODEV, f"transport {trtype!r}")
        return [] if transport is None else [_transport_json(transport)]

    def _nvmf_create_subsystem(
        self,
        nqn: str,
        serial_number: str = DEFAULT_SERIAL_NUMBER,
        model_number: str = DEFAULT_MODEL_NUMBER,
        max_namespaces: int = 0,
        ana_reporting: bool = False,
        passthrough: bool = False,
        enable_nssr: bool = False,
        admin_label: str = "",
        **options: Any,
    ) -> Result:
        for name, value, size_limit in (
            ("serial_number", serial_number, 20),
            ("model_number", model_number, 40),
        ):
            if not (len(value) <= size_limit and value.isascii() and value.isprintable()):
                raise m.invalid_params(f"{name}: expected at most {size_limit} printable ASCII characters")
        for name, is_wanted in (
            ("passthrough", passthrough),
            ("enable_nssr", enable_nssr),
            ("admin_label", bool(admin_label)),
        ):
            if is_wanted:
                raise m.invalid_params(f"{name}: not supported here")
        defaults = m.Subsystem(nqn=nqn, serial_number=serial_number, model_number=model_number)
        self._model.create_subsystem(
            m.Subsystem(
                nqn=nqn,
                serial_number=serial_number,
                model_number=model_number,
                max_namespaces=max_namespaces or defaults.max_namespaces,
                ana_reporting=ana_reporting,
                **options,
            )
        )
        return True

    def _nvmf_get_subsystems(self, nqn: str | None = None) -> Result:
        subsystems = self._model.subsystems() if nqn is None else (self._model.find_subsystem(nqn),)
        return [_subsystem_json(subsystem) for subsystem in subsystems]

    def _nvmf_subsystem_add_ns(self, nqn: str, namespace: dict[str, Any]) -> Result:
        self._model.find_subsystem(nqn)
        options = dict(namespace)
        for name in ("no_auto_visible", "hide_metadata"):
            if options.pop(name, False):
                raise m.invalid_params(f"namespace.{name}: not supported here")
        if options.get("nsid") == m.NSID_BROADCAST:
            raise m.invalid_params("namespace.nsid: 0xffffffff names all namespaces")
        return self._model.add_namespace(nqn, **options)

    def _nvmf_subsystem_add_listener(
        self,
        nqn: str,
        listen_address: dict[str, str],
        secure_channel: bool = False,
        ana_state: str = "optimized",
        **placement: Any,
    ) -> Result:
        del placement  # sock_impl and numa_id: there is one kind of socket here, on any node.
        self._model.find_subsystem(nqn)
        address, port = _parse_listen_address(listen_address)
        if ana_state != "optimized" and not self._model.find_subsystem(nqn).ana_reporting:
            raise m.invalid_params(f"ana_state: {nqn} was created without ana_reporting")
        where = self._model.add_listener(nqn, address=address, port=port, is_secure=secure_channel)
        if ana_state != "optimized":
            self._model.set_ana_state(
                nqn, address=where.address, port=where.port, state=_ANA_STATES[ana_state]
            )
        return True

    def _nvmf_subsystem_listener_set_ana_state(
        self, nqn: str, listen_address: dict[str, str], ana_state: str, anagrpid: int | None = None
    ) -> Result:
        self._model.find_subsystem(nqn)
        address, port = _parse_listen_address(listen_address)
        self._model.set_ana_state(
            nqn, address=address, port=port, state=_ANA_STATES[ana_state], anagrpid=anagrpid
        )
        return True

    def _nvmf_subsystem_remove_listener(self, nqn: str, listen_address: dict[str, str]) -> Result:
        self._model.find_subsystem(nqn)
        address, port = _parse_listen_address(listen_address)
        self._model.remove_listener(nqn, address=address, port=port)
        return True

    def _nvmf_subsystem_get_listeners(self, nqn: str) -> Result:
        return [{"address": _listener_json(each)} for each in self._model.find_subsystem(nqn).listeners]

    def _nvmf_subsystem_add_host(
        self,
        nqn: str,
        host: str,
        psk: str | None = None,
        dhchap_key: str | None = None,
        dhchap_ctrlr_key: str | None = None,
    ) -> Result:
        self._model.find_subsystem(nqn)
        keys = self._host_keys(psk=psk, dhchap_key=dhchap_key, dhchap_ctrlr_key=dhchap_ctrlr_key)
        self._model.add_host(nqn, host, keys)
        return True

    def _nvmf_subsystem_set_keys(
        self, nqn: str, host: str, dhchap_key: str | None = None, dhchap_ctrlr_key: str | None = None
    ) -> Result:
        keys = self._host_keys(dhchap_key=dhchap_key, dhchap_ctrlr_key=dhchap_ctrlr_key)
        self._model.set_host_keys(nqn, host, keys)
        return True

    def _host_keys(self, **names: str | None) -> m.HostKeys:
        """Keys by the names they have in the keyring; the name is not repeated in a refusal."""
        found: dict[str, m.FileKey] = {}
        for parameter, name in names.items():
            if name is None:
                continue
            key = self.host.keyring.keys.get(name)
            if key is None:
                raise m.invalid_params(f"{parameter}: no such key: call keyring_file_add_key first")
            found[parameter] = key
        return m.HostKeys(**found)

    def _nvmf_subsystem_remove_host(self, nqn: str, host: str, timeout_ms: int = 0) -> Result:
        del timeout_ms  # Ending the host's controllers is bounded by the data path.
        self._model.remove_host(nqn, host)
        return True

    def _nvmf_subsystem_allow_any_host(self, nqn: str, allow_any_host: bool) -> Result:
        self._model.set_allow_any_host(nqn, allow_any_host)
        return True

    def _nvmf_subsystem_get_controllers(self, nqn: str) -> Result:
        return [
            {
                "cntlid": controller.cntlid,
                "cntrltype": "discovery" if controller.is_discovery else "io",
                "hostnqn": controller.host_nqn,
                "hostid": str(controller.host_id),
                "num_io_qpairs": controller.io_qpair_count,
            }
            for controller in self._model.controllers(nqn)
        ]

    def _nvmf_subsystem_get_qpairs(self, nqn: str) -> Result:
        return [
            {
                "cntlid": qpair.cntlid,
                "qid": qpair.qid,
                "state": qpair.state,
                "thread": qpair.poll_group,
                "hostnqn": qpair.host_nqn,
                "listen_address": _listener_json(qpair.listen),
                "peer_address": _listener_json(qpair.peer),
            }
            for qpair in self._model.qpairs(nqn)
        ]

    def _nvmf_get_stats(self) -> Result:
        transports = [] if self._model.transport() is None else [{"trtype": "TCP"}]
        groups = [
            {
                "name": group.name,
                "admin_qpairs": group.admin_qpairs,
                "io_qpairs": group.io_qpairs,
                "current_admin_qpairs": group.current_admin_qpairs,
                "current_io_qpairs": group.current_io_qpairs,
                "current_unassociated_qpairs": group.current_unassociated_qpairs,
                "pending_bdev_io": group.pending_bdev_io,
                "completed_nvme_io": group.completed_nvme_io,
                "transports": transports,
            }
            for group in self._model.poll_groups()
        ]
        return {"tick_rate": TICK_RATE_HZ, "poll_groups": groups}

    def _nvmf_config(self) -> Result:
        calls: list[Result] = []
        transport = self._model.transport()
        if transport is not None:
            calls.append({"method": "nvmf_create_transport", "params": _transport_json(transport)})
        subsystems = self._model.subsystems()
        for subsystem in subsystems:
            if subsystem.is_discovery:
                continue
            calls.append({"method": "nvmf_create_subsystem", "params": _subsystem_config(subsystem)})
            for host in reversed(subsystem.hosts):
                keys = subsystem.keys_of(host).names()
                params: dict[str, Any] = {"nqn": subsystem.nqn, "host": host, **keys}
                calls.append({"method": "nvmf_subsystem_add_host", "params": params})
            for entry in subsystem.namespaces.values():
                namespace = {"nsid": entry.nsid, "bdev_name": entry.bdev_name, **_identity_json(entry)}
                if entry.ptpl_file:
                    namespace["ptpl_file"] = entry.ptpl_file
                params = {"nqn": subsystem.nqn, "namespace": {**namespace, "no_auto_visible": False}}
                calls.append({"method": "nvmf_subsystem_add_ns", "params": params})
        for subsystem in subsystems:
            for listener in subsystem.listeners:
                params = {
                    "nqn": subsystem.nqn,
                    "listen_address": _listener_json(listener),
                    "secure_channel": listener in subsystem.secure_listeners,
                }
                calls.append({"method": "nvmf_subsystem_add_listener", "params": params})
                calls += _ana_config(subsystem, listener)
        return calls


def _ana_config(subsystem: m.Subsystem, listener: m.ListenAddress) -> list[Result]:
    """The calls that give a listener its ANA states."""
    names = {state: name for name, state in _ANA_STATES.items()}
    calls: list[Result] = []
    for (where, group), state in sorted(subsystem.ana_states.items()):
        if where != listener or state not in names:
            continue
        params: dict[str, Any] = {"nqn": subsystem.nqn, "listen_address": _listener_json(listener)}
        params["ana_state"] = names[state]
        if group:
            params["anagrpid"] = group
        calls.append({"method": "nvmf_subsystem_listener_set_ana_state", "params": params})
    return calls


def _refuse_metadata(options: Mapping[str, Any]) -> None:
    for name in ("md_size", "dif_type", "dif_pi_format"):
        if options.get(name):
            raise m.errno_error(errno.EOPNOTSUPP, f"{name}: metadata is not supported here; leave it out")


def _cpu_mask() -> str:
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    return f"{mask:x}"


def _iostat_json(stat: m.BdevIoStat) -> dict[str, Any]:
    counters: dict[str, Any] = {
        "bytes_read": stat.bytes_read,
        "num_read_ops": stat.num_read_ops,
        "bytes_written": stat.bytes_written,
        "num_write_ops": stat.num_write_ops,
        "bytes_unmapped": stat.bytes_unmapped,
        "num_unmap_ops": stat.num_unmap_ops,
        "bytes_copied": 0,
        "num_copy_ops": 0,
    }
    for word in ("read", "write", "unmap"):
        counters[f"{word}_latency_ticks"] = getattr(stat, f"{word}_latency_ns")
        counters[f"max_{word}_latency_ticks"] = getattr(stat, f"max_{word}_latency_ns")
        counters[f"min_{word}_latency_ticks"] = getattr(stat, f"min_{word}_latency_ns")
    for name in ("copy_latency_ticks", "max_copy_latency_ticks", "min_copy_latency_ticks"):
        counters[name] = 0
    counters["io_error"] = {"failed": stat.io_error_count} if stat.io_error_count else {}
    return counters


def _transport_fault(transport: m.Transport) -> str:
    """Why the data path could not serve these limits; empty when it can."""
    if not 2 <= transport.max_queue_depth <= 4096:
        return f"max_queue_depth: expected 2 to 4096, got {transport.max_queue_depth}"
    if not 2 <= transport.max_aq_depth <= 4096:
        return f"max_aq_depth: expected 2 to 4096, got {transport.max_aq_depth}"
    if not 1 <= transport.max_io_qpairs_per_ctrlr <= 1023:
        return f"max_io_qpairs_per_ctrlr: expected 1 to 1023, got {transport.max_io_qpairs_per_ctrlr}"
    size = transport.max_io_size
    if not (4 * KIB <= size <= 16384 * KIB and is_power_of_two(size)):
        # MDTS is a power of two of 4 KiB pages.
        return f"max_io_size: expected a power of two from 4 KiB to 16 MiB, got {size}"
    size = transport.in_capsule_data_size
    if size % 16 or size > 128 * KIB:
        # IOCCSZ counts 16-byte units.
        return f"in_capsule_data_size: expected a multiple of 16 up to 128 KiB, got {size}"
    return ""


def _transport_json(transport: m.Transport) -> dict[str, Any]:
    return {
        "trtype": transport.trtype,
        "max_queue_depth": transport.max_queue_depth,
        "max_io_qpairs_per_ctrlr": transport.max_io_qpairs_per_ctrlr,
        "in_capsule_data_size": transport.in_capsule_data_size,
        "max_io_size": transport.max_io_size,
        "max_aq_depth": transport.max_aq_depth,
        "iobuf_small_cache_size": 0xFFFFFFFF,
        "iobuf_large_cache_size": 0xFFFFFFFF,
        "dif_insert_or_strip": False,
        "zcopy": False,
        "c2h_success": transport.c2h_success,
        "sock_priority": transport.sock_priority,
        "abort_timeout_sec": transport.abort_timeout_sec,
        "ack_timeout": transport.ack_timeout,
        "data_wr_pool_size": 0,
        "disable_command_passthru": False,
        "kas": transport.kas,
        "min_kato": transport.min_kato,
    }


def _listener_json(listener: m.ListenAddress) -> dict[str, Any]:
    return {
        "trtype": "TCP",
        "adrfam": listener.adrfam,
        "traddr": listener.address,
        "trsvcid": str(listener.port),
    }


def _identity_json(entry: m.NamespaceEntry) -> dict[str, Any]:
    identity: dict[str, Any] = {"nguid": entry.nguid.hex().upper()}
    if entry.eui64:
        identity["eui64"] = entry.eui64.hex().upper()
    identity["uuid"] = str(entry.uuid)
    return identity


def _subsystem_json(subsystem: m.Subsystem) -> dict[str, Any]:
    described: dict[str, Any] = {
        "nqn": subsystem.nqn,
        "subtype": "Discovery" if subsystem.is_discovery else "NVMe",
        "listen_addresses": [_listener_json(listener) for listener in subsystem.listeners],
        "allow_any_host": subsystem.allow_any_host,
        "hosts": [{"nqn": host, **subsystem.keys_of(host).names()} for host in subsystem.hosts],
    }
    if subsystem.is_discovery:
        return described
    namespaces = [
        {"nsid": entry.nsid, "bdev_name": entry.bdev_name, "name": entry.bdev_name, **_identity_json(entry)}
        for entry in subsystem.namespaces.values()
    ]
    return {
        **described,
        "serial_number": subsystem.serial_number,
        "model_number": subsystem.model_number,
        "max_namespaces": subsystem.max_namespaces,
        "passthrough": False,
        "min_cntlid": subsystem.min_cntlid,
        "max_cntlid": subsystem.max_cntlid,
        "dmrsl": subsystem.dmrsl,
        "wzsl": subsystem.wzsl,
        "namespaces": namespaces,
    }


def _subsystem_config(subsystem: m.Subsystem) -> dict[str, Any]:
    return {
        "nqn": subsystem.nqn,
        "allow_any_host": subsystem.allow_any_host,
        "serial_number": subsystem.serial_number,
        "model_number": subsystem.model_number,
        "max_namespaces": subsystem.max_namespaces,
        "min_cntlid": subsystem.min_cntlid,
        "max_cntlid": subsystem.max_cntlid,
        "ana_reporting": subsystem.ana_reporting,
        "dmrsl": subsystem.dmrsl,
        "wzsl": subsystem.wzsl,
        "passthrough": False,
        "enable_nssr": False,
    }


def _parse_listen_address(listen_address: dict[str, str]) -> tuple[str, int]:
    """Numeric address and port of an NVMe/TCP listener; port 0 is any free one."""
    if listen_address["trtype"].upper() != "TCP":
        raise m.invalid_params(f"listen_address.trtype: expected TCP, got {listen_address['trtype']!r}")
    try:
        address = ipaddress.ip_address(listen_address["traddr"])
    except ValueError:
        raise m.invalid_params(
            f"listen_address.traddr: expected an IP address, got {listen_address['traddr']!r}"
        ) from None
    family = listen_address.get("adrfam", f"ipv{address.version}")
    if family.lower() != f"ipv{address.version}":
        raise m.invalid_params(f"listen_address.adrfam: {address} is no {family} address")
    service = listen_address.get("trsvcid", "")
    if not (service.isascii() and service.isdigit() and int(service[:6]) < 65536 and len(service) < 6):
        raise m.invalid_params(f"listen_address.trsvcid: expected a port of 0 to 65535, got {service!r}")
    return str(address), int(service)
