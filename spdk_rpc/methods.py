"""Typed calls for the methods that kvdev uses: keyword arguments in, TypedDicts as SPDK writes them out.

An argument left at None is not sent, so SPDK's own default holds. The outer type of each result is
checked; keys are as SPDK 26.09 has them, and a later release may add more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

from spdk_rpc.client import Client
from spdk_rpc.errors import RpcProtocolError

T = TypeVar("T")

RaidCategory = Literal["all", "online", "configuring", "offline"]
ResetMode = Literal["all", "maxmin", "error", "none"]
LogLevel = Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]
AnaState = Literal["optimized", "non_optimized", "inaccessible"]


class VersionFields(TypedDict, total=False):
    major: int
    minor: int
    patch: int
    suffix: str
    commit: str


class Version(TypedDict):
    version: str
    fields: VersionFields


class ListenAddress(TypedDict, total=False):
    trtype: str
    adrfam: str
    traddr: str
    trsvcid: str


class Listener(TypedDict, total=False):
    address: ListenAddress
    ana_states: list[dict[str, Any]]


class NamespaceInfo(TypedDict, total=False):
    nsid: int
    bdev_name: str
    name: str
    nguid: str
    eui64: str
    uuid: str
    anagrpid: int


class HostInfo(TypedDict, total=False):
    nqn: str
    dhchap_key: str
    dhchap_ctrlr_key: str


class SubsystemInfo(TypedDict, total=False):
    nqn: str
    subtype: str
    listen_addresses: list[ListenAddress]
    allow_any_host: bool
    hosts: list[HostInfo]
    serial_number: str
    model_number: str
    max_namespaces: int
    passthrough: bool
    min_cntlid: int
    max_cntlid: int
    dmrsl: int
    wzsl: int
    namespaces: list[NamespaceInfo]


class TransportInfo(TypedDict, total=False):
    trtype: str
    max_queue_depth: int
    max_io_qpairs_per_ctrlr: int
    in_capsule_data_size: int
    max_io_size: int
    max_aq_depth: int
    iobuf_small_cache_size: int
    iobuf_large_cache_size: int
    dif_insert_or_strip: bool
    zcopy: bool
    c2h_success: bool
    sock_priority: int
    abort_timeout_sec: int
    ack_timeout: int
    data_wr_pool_size: int
    disable_command_passthru: bool
    kas: int
    min_kato: int


class ControllerInfo(TypedDict, total=False):
    cntlid: int
    cntrltype: str
    hostnqn: str
    hostid: str
    num_io_qpairs: int


class QpairInfo(TypedDict, total=False):
    cntlid: int
    qid: int
    state: str
    thread: str
    hostnqn: str
    listen_address: ListenAddress
    peer_address: ListenAddress


class PollGroup(TypedDict, total=False):
    name: str
    admin_qpairs: int
    io_qpairs: int
    current_admin_qpairs: int
    current_io_qpairs: int
    current_unassociated_qpairs: int
    pending_bdev_io: int
    completed_nvme_io: int
    transports: list[dict[str, Any]]


class NvmfStats(TypedDict):
    tick_rate: int
    poll_groups: list[PollGroup]


class BdevInfo(TypedDict, total=False):
    name: str
    aliases: list[str]
    product_name: str
    block_size: int
    num_blocks: int
    uuid: str
    numa_id: int
    assigned_rate_limits: dict[str, int]
    claimed: bool
    claim_type: str
    zoned: bool
    supported_io_types: dict[str, bool]
    memory_domains: list[dict[str, Any]]
    driver_specific: dict[str, Any]


class IoStat(TypedDict, total=False):
    name: str
    thread_id: int
    bytes_read: int
    num_read_ops: int
    bytes_written: int
    num_write_ops: int
    bytes_unmapped: int
    num_unmap_ops: int
    bytes_copied: int
    num_copy_ops: int
    read_latency_ticks: int
    max_read_latency_ticks: int
    min_read_latency_ticks: int
    write_latency_ticks: int
    max_write_latency_ticks: int
    min_write_latency_ticks: int
    unmap_latency_ticks: int
    max_unmap_latency_ticks: int
    min_unmap_latency_ticks: int
    copy_latency_ticks: int
    max_copy_latency_ticks: int
    min_copy_latency_ticks: int
    io_error: dict[str, Any]


class BdevIoStat(TypedDict, total=False):
    """``bdevs``, or with per_channel ``name`` and ``channels``."""

    tick_rate: int
    ticks: int
    bdevs: list[IoStat]
    name: str
    channels: list[IoStat]


class RaidBaseInfo(TypedDict, total=False):
    name: str
    uuid: str
    is_configured: bool
    data_offset: int
    data_size: int


class RaidInfo(TypedDict, total=False):
    name: str
    uuid: str
    strip_size_kb: int
    state: str
    raid_level: str
    superblock: bool
    num_base_bdevs: int
    num_base_bdevs_discovered: int
    num_base_bdevs_operational: int
    base_bdevs_list: list[RaidBaseInfo]


class Notification(TypedDict):
    type: str
    ctx: str
    id: int


class FrameworkSubsystem(TypedDict):
    subsystem: str
    depends_on: list[str]


class Reactors(TypedDict, total=False):
    tick_rate: int
    pid: int
    reactors: list[dict[str, Any]]


class ConfigCall(TypedDict, total=False):
    method: str
    params: dict[str, Any]


def listen_address(*, traddr: str, trsvcid: int | str, trtype: str = "TCP") -> ListenAddress:
    """The address of a listener; the family follows from the address."""
    family = "ipv6" if ":" in traddr else "ipv4"
    return {"trtype": trtype, "adrfam": family, "traddr": traddr, "trsvcid": str(trsvcid)}


class SpdkRpc:
    """Typed methods over one Client. Every method raises what ``Client.call`` raises."""

    def __init__(self, client: Client, *, timeout_s: float | None = None) -> None:
        self.client = client
        self._timeout_s = timeout_s

    def within(self, timeout_s: float) -> SpdkRpc:
        """The same connection with another deadline, for calls known to take long."""
        return SpdkRpc(self.client, timeout_s=timeout_s)

    def call(self, method: str, expected: type[T], params: Mapping[str, Any] | None = None) -> T:
        """Call any method, without the parameters that are None, and check the type of the result."""
        given = {name: value for name, value in (params or {}).items() if value is not None}
        result = self.client.call(method, given or None, timeout_s=self._timeout_s)
        # bool is an int to isinstance.
        if not isinstance(result, expected) or (expected is int and isinstance(result, bool)):
            raise RpcProtocolError(
                f"{method}: result: expected {expected.__name__}, got {type(result).__name__}"
            )
        return result

    def _list(self, method: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        result = self.call(method, list, params)
        if not all(isinstance(element, dict) for element in result):
            raise RpcProtocolError(f"{method}: result: expected a list of objects")
        return result

    # Framework, log, notify.

    def spdk_get_version(self) -> Version:
        return cast(Version, self.call("spdk_get_version", dict))

    def rpc_get_methods(
        self, *, current: bool | None = None, include_aliases: bool | None = None
    ) -> list[str]:
        return self.call("rpc_get_methods", list, {"current": current, "include_aliases": include_aliases})

    def framework_wait_init(self) -> bool:
        """Return when the framework is initialised."""
        return self.call("framework_wait_init", bool)

    def framework_start_init(self) -> bool:
        """End the startup state (``--wait-for-rpc``). RpcStateError when it has ended."""
        return self.call("framework_start_init", bool)

    def framework_get_subsystems(self) -> list[FrameworkSubsystem]:
        return cast("list[FrameworkSubsystem]", self._list("framework_get_subsystems"))

    def framework_get_config(self, name: str) -> list[ConfigCall]:
        """The calls that would bring the subsystem to its present state (none for some subsystems)."""
        result = self.client.call("framework_get_config", {"name": name}, timeout_s=self._timeout_s)
        if result is None:
            return []
        if not isinstance(result, list):
            raise RpcProtocolError("framework_get_config: result: expected a list or null")
        return cast("list[ConfigCall]", result)

    def framework_get_reactors(self) -> Reactors:
        return cast(Reactors, self.call("framework_get_reactors", dict))

    def notify_get_types(self) -> list[str]:
        return self.call("notify_get_types", list)

    def notify_get_notifications(
        self, *, first_id: int | None = None, max_count: int | None = None
    ) -> list[Notification]:
        return cast(
            "list[Notification]",
            self._list("notify_get_notifications", {"id": first_id, "max": max_count}),
        )

    def log_get_flags(self) -> dict[str, bool]:
        return self.call("log_get_flags", dict)

    def log_set_flag(self, flag: str) -> bool:
        return self.call("log_set_flag", bool, {"flag": flag})

    def log_clear_flag(self, flag: str) -> bool:
        return self.call("log_clear_flag", bool, {"flag": flag})

    def log_get_level(self) -> str:
        return self.call("log_get_level", str)

    def log_set_level(self, level: LogLevel) -> bool:
        return self.call("log_set_level", bool, {"level": level})

    def log_get_print_level(self) -> str:
        return self.call("log_get_print_level", str)

    def log_set_print_level(self, level: LogLevel) -> bool:
        return self.call("log_set_print_level", bool, {"level": level})

    # Bdevs.

    def bdev_get_bdevs(self, *, name: str | None = None, timeout_ms: int | None = None) -> list[BdevInfo]:
        """All bdevs, or the one of that name, waiting up to timeout_ms for it to appear (-110, without a wait -19)."""
        return cast("list[BdevInfo]", self._list("bdev_get_bdevs", {"name": name, "timeout": timeout_ms}))

    def bdev_wait_for_examine(self) -> bool:
        return self.call("bdev_wait_for_examine", bool)

    def bdev_get_iostat(
        self,
        *,
        names: Sequence[str] | None = None,
        per_channel: bool | None = None,
        reset_mode: ResetMode | None = None,
    ) -> BdevIoStat:
        params = {
            "names": None if names is None else list(names),
            "per_channel": per_channel,
            "reset_mode": reset_mode,
        }
        return cast(BdevIoStat, self.call("bdev_get_iostat", dict, params))

    def bdev_reset_iostat(self, *, name: str | None = None, mode: ResetMode | None = None) -> bool:
        return self.call("bdev_reset_iostat", bool, {"name": name, "mode": mode})

    def bdev_malloc_create(
        self, *, num_blocks: int, block_size: int, name: str | None = None, uuid: str | None = None
    ) -> str:
        params = {"name": name, "num_blocks": num_blocks, "block_size": block_size, "uuid": uuid}
        return self.call("bdev_malloc_create", str, params)

    def bdev_malloc_delete(self, name: str) -> bool:
        return self.call("bdev_malloc_delete", bool, {"name": name})

    def bdev_null_create(
        self, *, name: str, num_blocks: int, block_size: int, uuid: str | None = None
    ) -> str:
        params = {"name": name, "num_blocks": num_blocks, "block_size": block_size, "uuid": uuid}
        return self.call("bdev_null_create", str, params)

    def bdev_null_delete(self, name: str) -> bool:
        return self.call("bdev_null_delete", bool, {"name": name})

    def bdev_aio_create(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        readonly: bool | None = None,
        fallocate: bool | None = None,
        uuid: str | None = None,
    ) -> str:
        params = {
            "name": name,
            "filename": filename,
            "block_size": block_size,
            "readonly": readonly,
            "fallocate": fallocate,
            "uuid": uuid,
        }
        return self.call("bdev_aio_create", str, params)

    def bdev_aio_delete(self, name: str) -> bool:
        return self.call("bdev_aio_delete", bool, {"name": name})

    def bdev_uring_create(
        self, *, name: str, filename: str, block_size: int | None = None, uuid: str | None = None
    ) -> str:
        params = {"name": name, "filename": filename, "block_size": block_size, "uuid": uuid}
        return self.call("bdev_uring_create", str, params)

    def bdev_uring_delete(self, name: str) -> bool:
        return self.call("bdev_uring_delete", bool, {"name": name})

    def bdev_raid_create(
        self,
        *,
        name: str,
        strip_size_kb: int,
        base_bdevs: Sequence[str],
        raid_level: str = "raid0",
        superblock: bool | None = None,
        uuid: str | None = None,
    ) -> bool:
        """Succeeds also while base bdevs are missing: check the state with bdev_raid_get_bdevs."""
        params = {
            "name": name,
            "strip_size_kb": strip_size_kb,
            "raid_level": raid_level,
            "base_bdevs": list(base_bdevs),
            "superblock": superblock,
            "uuid": uuid,
        }
        return self.call("bdev_raid_create", bool, params)

    def bdev_raid_delete(self, name: str) -> bool:
        return self.call("bdev_raid_delete", bool, {"name": name})

    def bdev_raid_get_bdevs(self, category: RaidCategory = "all") -> list[RaidInfo]:
        return cast("list[RaidInfo]", self._list("bdev_raid_get_bdevs", {"category": category}))

    # NVMe-oF target.

    def nvmf_create_transport(
        self,
        *,
        trtype: str = "TCP",
        max_queue_depth: int | None = None,
        max_io_qpairs_per_ctrlr: int | None = None,
        in_capsule_data_size: int | None = None,
        max_io_size: int | None = None,
        max_aq_depth: int | None = None,
        c2h_success: bool | None = None,
        sock_priority: int | None = None,
        abort_timeout_sec: int | None = None,
        kas: int | None = None,
        min_kato: int | None = None,
    ) -> bool:
        params = {
            "trtype": trtype,
            "max_queue_depth": max_queue_depth,
            "max_io_qpairs_per_ctrlr": max_io_qpairs_per_ctrlr,
            "in_capsule_data_size": in_capsule_data_size,
            "max_io_size": max_io_size,
            "max_aq_depth": max_aq_depth,
            "c2h_success": c2h_success,
            "sock_priority": sock_priority,
            "abort_timeout_sec": abort_timeout_sec,
            "kas": kas,
            "min_kato": min_kato,
        }
        return self.call("nvmf_create_transport", bool, params)

    def nvmf_get_transports(self, *, trtype: str | None = None) -> list[TransportInfo]:
        return cast("list[TransportInfo]", self._list("nvmf_get_transports", {"trtype": trtype}))

    def nvmf_create_subsystem(
        self,
        *,
        nqn: str,
        serial_number: str | None = None,
        model_number: str | None = None,
        max_namespaces: int | None = None,
        allow_any_host: bool | None = None,
        ana_reporting: bool | None = None,
        min_cntlid: int | None = None,
        max_cntlid: int | None = None,
    ) -> bool:
        params = {
            "nqn": nqn,
            "serial_number": serial_number,
            "model_number": model_number,
            "max_namespaces": max_namespaces,
            "allow_any_host": allow_any_host,
            "ana_reporting": ana_reporting,
            "min_cntlid": min_cntlid,
            "max_cntlid": max_cntlid,
        }
        return self.call("nvmf_create_subsystem", bool, params)

    def nvmf_delete_subsystem(self, nqn: str) -> bool:
        return self.call("nvmf_delete_subsystem", bool, {"nqn": nqn})

    def nvmf_get_subsystems(self, *, nqn: str | None = None) -> list[SubsystemInfo]:
        return cast("list[SubsystemInfo]", self._list("nvmf_get_subsystems", {"nqn": nqn}))

    def nvmf_subsystem_add_ns(
        self,
        *,
        nqn: str,
        bdev_name: str,
        nsid: int | None = None,
        uuid: str | None = None,
        nguid: str | None = None,
        eui64: str | None = None,
        anagrpid: int | None = None,
    ) -> int:
        """Add a namespace; returns its nsid."""
        identity = {
            "bdev_name": bdev_name,
            "nsid": nsid,
            "uuid": uuid,
            "nguid": nguid,
            "eui64": eui64,
            "anagrpid": anagrpid,
        }
        namespace = {name: value for name, value in identity.items() if value is not None}
        return self.call("nvmf_subsystem_add_ns", int, {"nqn": nqn, "namespace": namespace})

    def nvmf_subsystem_remove_ns(self, *, nqn: str, nsid: int) -> bool:
        return self.call("nvmf_subsystem_remove_ns", bool, {"nqn": nqn, "nsid": nsid})

    def nvmf_subsystem_add_listener(
        self,
        *,
        nqn: str,
        traddr: str,
        trsvcid: int | str,
        trtype: str = "TCP",
        secure_channel: bool | None = None,
        ana_state: AnaState | None = None,
    ) -> bool:
        params = {
            "nqn": nqn,
            "listen_address": listen_address(trtype=trtype, traddr=traddr, trsvcid=trsvcid),
            "secure_channel": secure_channel,
            "ana_state": ana_state,
        }
        return self.call("nvmf_subsystem_add_listener", bool, params)

    def nvmf_subsystem_remove_listener(
        self, *, nqn: str, traddr: str, trsvcid: int | str, trtype: str = "TCP"
    ) -> bool:
        params = {
            "nqn": nqn,
            "listen_address": listen_address(trtype=trtype, traddr=traddr, trsvcid=trsvcid),
        }
        return self.call("nvmf_subsystem_remove_listener", bool, params)

    def nvmf_subsystem_get_listeners(self, nqn: str) -> list[Listener]:
        return cast("list[Listener]", self._list("nvmf_subsystem_get_listeners", {"nqn": nqn}))

    def nvmf_subsystem_add_host(
        self,
        *,
        nqn: str,
        host: str,
        psk: str | None = None,
        dhchap_key: str | None = None,
        dhchap_ctrlr_key: str | None = None,
    ) -> bool:
        """Allow a host. The keys are names in the target's keyring."""
        params = {
            "nqn": nqn,
            "host": host,
            "psk": psk,
            "dhchap_key": dhchap_key,
            "dhchap_ctrlr_key": dhchap_ctrlr_key,
        }
        return self.call("nvmf_subsystem_add_host", bool, params)

    def nvmf_subsystem_remove_host(self, *, nqn: str, host: str, timeout_ms: int | None = None) -> bool:
        params = {"nqn": nqn, "host": host, "timeout_ms": timeout_ms}
        return self.call("nvmf_subsystem_remove_host", bool, params)

    def nvmf_subsystem_allow_any_host(self, *, nqn: str, allow_any_host: bool) -> bool:
        params = {"nqn": nqn, "allow_any_host": allow_any_host}
        return self.call("nvmf_subsystem_allow_any_host", bool, params)

    def nvmf_subsystem_get_controllers(self, nqn: str) -> list[ControllerInfo]:
        return cast("list[ControllerInfo]", self._list("nvmf_subsystem_get_controllers", {"nqn": nqn}))

    def nvmf_subsystem_get_qpairs(self, nqn: str) -> list[QpairInfo]:
        return cast("list[QpairInfo]", self._list("nvmf_subsystem_get_qpairs", {"nqn": nqn}))

    def nvmf_get_stats(self) -> NvmfStats:
        return cast(NvmfStats, self.call("nvmf_get_stats", dict))
