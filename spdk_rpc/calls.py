"""A function for each method of the table: keyword arguments in, a checked call out.

Generated from ``table`` by ``generate``; edit these two. An argument left at None is not sent, so SPDK's own
default holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from spdk_rpc.address import address_family, listen_address, without_none
from spdk_rpc.call import Call, Shape, build_call
from spdk_rpc.results import (
    BdevInfo,
    BdevIoStat,
    ConfigCall,
    ControllerInfo,
    DiscoveryInfo,
    FrameworkSubsystem,
    Histogram,
    IobufModule,
    IoPaths,
    Key,
    Listener,
    Lvol,
    LvolStore,
    NbdDisk,
    Notification,
    NvmeController,
    NvmeHealth,
    NvmfStats,
    QpairInfo,
    RaidInfo,
    Reactors,
    Referral,
    Scheduler,
    ShallowCopy,
    SubsystemInfo,
    ThreadStats,
    TransportInfo,
    UblkDisk,
    Version,
    VhostController,
    VirtioBlkTransport,
)

AccelErrorInjectType = Literal["disable", "corrupt", "failure"]
AccelErrorOpcode = Literal[
    "copy",
    "fill",
    "dualcast",
    "compare",
    "crc32c",
    "copy_crc32c",
    "compress",
    "decompress",
    "encrypt",
    "decrypt",
    "xor",
    "dif_verify",
    "dif_verify_copy",
    "dif_generate",
    "dif_generate_copy",
    "dix_generate",
    "dix_verify",
]
BdevDelayLatencyType = Literal["avg_read", "p99_read", "avg_write", "p99_write"]
BdevErrorInjectErrorType = Literal["failure", "pending", "corrupt_data", "nomem", "nvme_failure"]
BdevErrorInjectIoType = Literal["clear", "read", "write", "unmap", "flush", "all"]
BdevNvmeCmdType = Literal["admin", "io"]
BdevNvmeDataDirection = Literal["h2c", "c2h"]
BdevNvmeMultipathMode = Literal["failover", "multipath", "disable"]
BdevNvmeMultipathPolicy = Literal["active_passive", "active_active"]
BdevNvmeMultipathSelector = Literal["round_robin", "queue_depth"]
BdevNvmeTimeoutAction = Literal["none", "reset", "abort"]
BdevRaidLevel = Literal["raid0", "0", "raid1", "1", "raid5f", "5f", "concat"]
BdevRaidState = Literal["online", "configuring", "offline", "all"]
BdevResetStatMode = Literal["all", "maxmin", "error", "none"]
DhchapDhgroup = Literal["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"]
DhchapDigest = Literal["sha256", "sha384", "sha512"]
FusesFeature = Literal["fcws"]
KillSignal = Literal["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGKILL", "SIGUSR1"]
LogLevel = Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]
LvolClearMethod = Literal["default", "none", "unmap", "write_zeroes"]
LvsClearMethod = Literal["unmap", "write_zeroes", "none"]
NvmeAnaState = Literal["optimized", "non_optimized", "inaccessible"]
NvmfDiscoveryFilter = Literal["transport", "address", "svcid"]
NvmfDupHostPolicy = Literal["allow", "restrict_per_listener"]
OncsFeature = Literal["nvmcmps", "nvmdsmsv", "nvmwzsv", "reservs", "nvmcpys"]


class BdevNvmeMultipathOpts(TypedDict, total=False):
    policy: BdevNvmeMultipathPolicy
    selector: BdevNvmeMultipathSelector
    min_io: int


class NvmfAdminCmdPassthru(TypedDict, total=False):
    identify_ctrlr: bool
    identify_uuid_list: bool
    get_log_page: bool
    get_set_features: bool
    sanitize: bool
    security_send_recv: bool
    fw_update: bool
    nvme_mi: bool
    vendor_specific: bool


def framework_start_init() -> Call[bool]:
    """End the startup state (--wait-for-rpc); RpcStateError when it has ended."""
    return build_call("framework_start_init", {}, Shape.BOOLEAN)


def framework_wait_init() -> Call[bool]:
    """Return when the framework is initialised."""
    return build_call("framework_wait_init", {}, Shape.BOOLEAN)


def framework_get_subsystems() -> Call[list[FrameworkSubsystem]]:
    return build_call("framework_get_subsystems", {}, Shape.OBJECTS)


def framework_get_config(name: str, *, with_batches: bool | None = None) -> Call[list[ConfigCall] | None]:
    """The calls that would bring a subsystem to its present state; None where it keeps none."""
    return build_call(
        "framework_get_config", {"name": name, "with_batches": with_batches}, Shape.OBJECTS_OR_NULL
    )


def framework_get_reactors() -> Call[Reactors]:
    return build_call("framework_get_reactors", {}, Shape.OBJECT)


def thread_get_stats() -> Call[ThreadStats]:
    return build_call("thread_get_stats", {}, Shape.OBJECT)


def framework_set_scheduler(
    name: str,
    *,
    period: int | None = None,
    load_limit: int | None = None,
    core_limit: int | None = None,
    core_busy: int | None = None,
    mappings: str | None = None,
) -> Call[bool]:
    return build_call(
        "framework_set_scheduler",
        {
            "name": name,
            "period": period,
            "load_limit": load_limit,
            "core_limit": core_limit,
            "core_busy": core_busy,
            "mappings": mappings,
        },
        Shape.BOOLEAN,
    )


def framework_get_scheduler() -> Call[Scheduler]:
    return build_call("framework_get_scheduler", {}, Shape.OBJECT)


def framework_enable_cpumask_locks() -> Call[bool]:
    return build_call("framework_enable_cpumask_locks", {}, Shape.BOOLEAN)


def framework_disable_cpumask_locks() -> Call[bool]:
    return build_call("framework_disable_cpumask_locks", {}, Shape.BOOLEAN)


def framework_monitor_context_switch(*, enabled: bool | None = None) -> Call[dict[str, bool]]:
    return build_call("framework_monitor_context_switch", {"enabled": enabled}, Shape.OBJECT)


def rpc_get_methods(*, current: bool | None = None, include_aliases: bool | None = None) -> Call[list[str]]:
    """Names of the methods; with current those that may be called in the present state."""
    return build_call(
        "rpc_get_methods", {"current": current, "include_aliases": include_aliases}, Shape.TEXTS
    )


def spdk_get_version() -> Call[Version]:
    return build_call("spdk_get_version", {}, Shape.OBJECT)


def spdk_kill_instance(sig_name: KillSignal) -> Call[bool]:
    return build_call("spdk_kill_instance", {"sig_name": sig_name}, Shape.BOOLEAN)


def notify_get_types() -> Call[list[str]]:
    return build_call("notify_get_types", {}, Shape.TEXTS)


def notify_get_notifications(
    *, first_id: int | None = None, max_count: int | None = None
) -> Call[list[Notification]]:
    """Ids count from 0 since the start of the application; old ones are forgotten."""
    return build_call("notify_get_notifications", {"id": first_id, "max": max_count}, Shape.OBJECTS)


def keyring_file_add_key(*, name: str, path: str) -> Call[bool]:
    """The file's path is absolute; the file is the application's own with no bit for group and others."""
    return build_call("keyring_file_add_key", {"name": name, "path": path}, Shape.BOOLEAN)


def keyring_file_remove_key(name: str) -> Call[bool]:
    return build_call("keyring_file_remove_key", {"name": name}, Shape.BOOLEAN)


def keyring_get_keys() -> Call[list[Key]]:
    return build_call("keyring_get_keys", {}, Shape.OBJECTS)


def keyring_linux_set_options(*, enable: bool | None = None) -> Call[bool]:
    return build_call("keyring_linux_set_options", {"enable": enable}, Shape.BOOLEAN)


def log_get_flags() -> Call[dict[str, bool]]:
    return build_call("log_get_flags", {}, Shape.OBJECT)


def log_set_flag(flag: str) -> Call[bool]:
    return build_call("log_set_flag", {"flag": flag}, Shape.BOOLEAN)


def log_clear_flag(flag: str) -> Call[bool]:
    return build_call("log_clear_flag", {"flag": flag}, Shape.BOOLEAN)


def log_set_level(level: LogLevel) -> Call[bool]:
    return build_call("log_set_level", {"level": level}, Shape.BOOLEAN)


def log_get_level() -> Call[str]:
    return build_call("log_get_level", {}, Shape.TEXT)


def log_set_print_level(level: LogLevel) -> Call[bool]:
    return build_call("log_set_print_level", {"level": level}, Shape.BOOLEAN)


def log_get_print_level() -> Call[str]:
    return build_call("log_get_print_level", {}, Shape.TEXT)


def log_enable_timestamps(enabled: bool) -> Call[bool]:
    return build_call("log_enable_timestamps", {"enabled": enabled}, Shape.BOOLEAN)


def accel_error_inject_error(
    *,
    opcode: AccelErrorOpcode,
    type: AccelErrorInjectType,
    count: int | None = None,
    interval: int | None = None,
    errcode: int | None = None,
) -> Call[bool]:
    return build_call(
        "accel_error_inject_error",
        {"opcode": opcode, "type": type, "count": count, "interval": interval, "errcode": errcode},
        Shape.BOOLEAN,
    )


def accel_assign_opc(*, opname: str, module: str) -> Call[bool]:
    return build_call("accel_assign_opc", {"opname": opname, "module": module}, Shape.BOOLEAN)


def iobuf_set_options(
    *,
    small_pool_count: int | None = None,
    large_pool_count: int | None = None,
    small_bufsize: int | None = None,
    large_bufsize: int | None = None,
    enable_numa: bool | None = None,
) -> Call[bool]:
    return build_call(
        "iobuf_set_options",
        {
            "small_pool_count": small_pool_count,
            "large_pool_count": large_pool_count,
            "small_bufsize": small_bufsize,
            "large_bufsize": large_bufsize,
            "enable_numa": enable_numa,
        },
        Shape.BOOLEAN,
    )


def iobuf_get_stats() -> Call[list[IobufModule]]:
    return build_call("iobuf_get_stats", {}, Shape.OBJECTS)


def sock_impl_get_options(impl_name: str) -> Call[dict[str, Any]]:
    return build_call("sock_impl_get_options", {"impl_name": impl_name}, Shape.OBJECT)


def sock_impl_set_options(
    impl_name: str,
    *,
    recv_buf_size: int | None = None,
    send_buf_size: int | None = None,
    enable_recv_pipe: bool | None = None,
    enable_quickack: bool | None = None,
    enable_placement_id: int | None = None,
    enable_zerocopy_send_server: bool | None = None,
    enable_zerocopy_send_client: bool | None = None,
    zerocopy_threshold: int | None = None,
    tls_version: int | None = None,
    enable_ktls: bool | None = None,
) -> Call[bool]:
    return build_call(
        "sock_impl_set_options",
        {
            "impl_name": impl_name,
            "recv_buf_size": recv_buf_size,
            "send_buf_size": send_buf_size,
            "enable_recv_pipe": enable_recv_pipe,
            "enable_quickack": enable_quickack,
            "enable_placement_id": enable_placement_id,
            "enable_zerocopy_send_server": enable_zerocopy_send_server,
            "enable_zerocopy_send_client": enable_zerocopy_send_client,
            "zerocopy_threshold": zerocopy_threshold,
            "tls_version": tls_version,
            "enable_ktls": enable_ktls,
        },
        Shape.BOOLEAN,
    )


def sock_set_default_impl(impl_name: str) -> Call[bool]:
    return build_call("sock_set_default_impl", {"impl_name": impl_name}, Shape.BOOLEAN)


def sock_get_default_impl() -> Call[dict[str, str]]:
    return build_call("sock_get_default_impl", {}, Shape.OBJECT)


def nvmf_create_transport(
    trtype: str = "TCP",
    *,
    tgt_name: str | None = None,
    max_queue_depth: int | None = None,
    max_io_qpairs_per_ctrlr: int | None = None,
    in_capsule_data_size: int | None = None,
    max_io_size: int | None = None,
    max_aq_depth: int | None = None,
    iobuf_small_cache_size: int | None = None,
    iobuf_large_cache_size: int | None = None,
    zcopy: bool | None = None,
    num_cqe: int | None = None,
    max_srq_depth: int | None = None,
    no_srq: bool | None = None,
    c2h_success: bool | None = None,
    dif_insert_or_strip: bool | None = None,
    sock_priority: int | None = None,
    acceptor_backlog: int | None = None,
    abort_timeout_sec: int | None = None,
    no_wr_batching: bool | None = None,
    control_msg_num: int | None = None,
    disable_mappable_bar0: bool | None = None,
    disable_adaptive_irq: bool | None = None,
    disable_shadow_doorbells: bool | None = None,
    acceptor_poll_rate: int | None = None,
    ack_timeout: int | None = None,
    data_wr_pool_size: int | None = None,
    disable_command_passthru: bool | None = None,
    kas: int | None = None,
    min_kato: int | None = None,
    masked_oncs: Sequence[OncsFeature] | None = None,
    masked_fuses: Sequence[FusesFeature] | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_create_transport",
        {
            "trtype": trtype,
            "tgt_name": tgt_name,
            "max_queue_depth": max_queue_depth,
            "max_io_qpairs_per_ctrlr": max_io_qpairs_per_ctrlr,
            "in_capsule_data_size": in_capsule_data_size,
            "max_io_size": max_io_size,
            "max_aq_depth": max_aq_depth,
            "iobuf_small_cache_size": iobuf_small_cache_size,
            "iobuf_large_cache_size": iobuf_large_cache_size,
            "zcopy": zcopy,
            "num_cqe": num_cqe,
            "max_srq_depth": max_srq_depth,
            "no_srq": no_srq,
            "c2h_success": c2h_success,
            "dif_insert_or_strip": dif_insert_or_strip,
            "sock_priority": sock_priority,
            "acceptor_backlog": acceptor_backlog,
            "abort_timeout_sec": abort_timeout_sec,
            "no_wr_batching": no_wr_batching,
            "control_msg_num": control_msg_num,
            "disable_mappable_bar0": disable_mappable_bar0,
            "disable_adaptive_irq": disable_adaptive_irq,
            "disable_shadow_doorbells": disable_shadow_doorbells,
            "acceptor_poll_rate": acceptor_poll_rate,
            "ack_timeout": ack_timeout,
            "data_wr_pool_size": data_wr_pool_size,
            "disable_command_passthru": disable_command_passthru,
            "kas": kas,
            "min_kato": min_kato,
            "masked_oncs": None if masked_oncs is None else list(masked_oncs),
            "masked_fuses": None if masked_fuses is None else list(masked_fuses),
        },
        Shape.BOOLEAN,
    )


def nvmf_get_subsystems(*, nqn: str | None = None, tgt_name: str | None = None) -> Call[list[SubsystemInfo]]:
    return build_call("nvmf_get_subsystems", {"nqn": nqn, "tgt_name": tgt_name}, Shape.OBJECTS)


def nvmf_create_subsystem(
    nqn: str,
    *,
    tgt_name: str | None = None,
    serial_number: str | None = None,
    model_number: str | None = None,
    admin_label: str | None = None,
    max_namespaces: int | None = None,
    allow_any_host: bool | None = None,
    ana_reporting: bool | None = None,
    min_cntlid: int | None = None,
    max_cntlid: int | None = None,
    dmrsl: int | None = None,
    wzsl: int | None = None,
    passthrough: bool | None = None,
    enable_nssr: bool | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_create_subsystem",
        {
            "nqn": nqn,
            "tgt_name": tgt_name,
            "serial_number": serial_number,
            "model_number": model_number,
            "admin_label": admin_label,
            "max_namespaces": max_namespaces,
            "allow_any_host": allow_any_host,
            "ana_reporting": ana_reporting,
            "min_cntlid": min_cntlid,
            "max_cntlid": max_cntlid,
            "dmrsl": dmrsl,
            "wzsl": wzsl,
            "passthrough": passthrough,
            "enable_nssr": enable_nssr,
        },
        Shape.BOOLEAN,
    )


def nvmf_delete_subsystem(nqn: str, *, tgt_name: str | None = None) -> Call[bool]:
    return build_call("nvmf_delete_subsystem", {"nqn": nqn, "tgt_name": tgt_name}, Shape.BOOLEAN)


def nvmf_subsystem_add_listener(
    *,
    nqn: str,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str,
    tgt_name: str | None = None,
    secure_channel: bool | None = None,
    ana_state: NvmeAnaState | None = None,
    sock_impl: str | None = None,
    numa_id: int | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_add_listener",
        {
            "nqn": nqn,
            "listen_address": listen_address(trtype=trtype, adrfam=adrfam, traddr=traddr, trsvcid=trsvcid),
            "tgt_name": tgt_name,
            "secure_channel": secure_channel,
            "ana_state": ana_state,
            "sock_impl": sock_impl,
            "numa_id": numa_id,
        },
        Shape.BOOLEAN,
    )


def nvmf_subsystem_remove_listener(
    *,
    nqn: str,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str,
    tgt_name: str | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_remove_listener",
        {
            "nqn": nqn,
            "listen_address": listen_address(trtype=trtype, adrfam=adrfam, traddr=traddr, trsvcid=trsvcid),
            "tgt_name": tgt_name,
        },
        Shape.BOOLEAN,
    )


def nvmf_subsystem_listener_set_ana_state(
    *,
    nqn: str,
    traddr: str,
    ana_state: NvmeAnaState,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str,
    tgt_name: str | None = None,
    anagrpid: int | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_listener_set_ana_state",
        {
            "nqn": nqn,
            "listen_address": listen_address(trtype=trtype, adrfam=adrfam, traddr=traddr, trsvcid=trsvcid),
            "ana_state": ana_state,
            "tgt_name": tgt_name,
            "anagrpid": anagrpid,
        },
        Shape.BOOLEAN,
    )


def nvmf_subsystem_add_ns(
    *,
    nqn: str,
    bdev_name: str,
    nsid: int | None = None,
    nguid: str | None = None,
    eui64: str | None = None,
    uuid: str | None = None,
    ptpl_file: str | None = None,
    anagrpid: int | None = None,
    no_auto_visible: bool | None = None,
    tgt_name: str | None = None,
) -> Call[int]:
    """Add a namespace; returns its nsid."""
    return build_call(
        "nvmf_subsystem_add_ns",
        {
            "nqn": nqn,
            "namespace": without_none(
                nsid=nsid,
                bdev_name=bdev_name,
                nguid=nguid,
                eui64=eui64,
                uuid=uuid,
                ptpl_file=ptpl_file,
                anagrpid=anagrpid,
                no_auto_visible=no_auto_visible,
            ),
            "tgt_name": tgt_name,
        },
        Shape.INTEGER,
    )


def nvmf_subsystem_remove_ns(*, nqn: str, nsid: int, tgt_name: str | None = None) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid, "tgt_name": tgt_name}, Shape.BOOLEAN
    )


def nvmf_subsystem_set_ns_ana_group(
    *, nqn: str, nsid: int, anagrpid: int, tgt_name: str | None = None
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_set_ns_ana_group",
        {"nqn": nqn, "nsid": nsid, "anagrpid": anagrpid, "tgt_name": tgt_name},
        Shape.BOOLEAN,
    )


def nvmf_subsystem_add_host(
    *,
    nqn: str,
    host: str,
    tgt_name: str | None = None,
    psk: str | None = None,
    dhchap_key: str | None = None,
    dhchap_ctrlr_key: str | None = None,
) -> Call[bool]:
    """Allow a host; psk and the dhchap keys are names in the target's keyring."""
    return build_call(
        "nvmf_subsystem_add_host",
        {
            "nqn": nqn,
            "host": host,
            "tgt_name": tgt_name,
            "psk": psk,
            "dhchap_key": dhchap_key,
            "dhchap_ctrlr_key": dhchap_ctrlr_key,
        },
        Shape.BOOLEAN,
    )


def nvmf_subsystem_remove_host(
    *, nqn: str, host: str, tgt_name: str | None = None, timeout_ms: int | None = None
) -> Call[bool]:
    """Waits up to timeout_ms for the connections of the host to end."""
    return build_call(
        "nvmf_subsystem_remove_host",
        {"nqn": nqn, "host": host, "tgt_name": tgt_name, "timeout_ms": timeout_ms},
        Shape.BOOLEAN,
    )


def nvmf_subsystem_allow_any_host(
    *, nqn: str, allow_any_host: bool, tgt_name: str | None = None
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_allow_any_host",
        {"nqn": nqn, "allow_any_host": allow_any_host, "tgt_name": tgt_name},
        Shape.BOOLEAN,
    )


def nvmf_subsystem_set_keys(
    *,
    nqn: str,
    host: str,
    tgt_name: str | None = None,
    dhchap_key: str | None = None,
    dhchap_ctrlr_key: str | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_subsystem_set_keys",
        {
            "nqn": nqn,
            "host": host,
            "tgt_name": tgt_name,
            "dhchap_key": dhchap_key,
            "dhchap_ctrlr_key": dhchap_ctrlr_key,
        },
        Shape.BOOLEAN,
    )


def nvmf_subsystem_get_controllers(nqn: str, *, tgt_name: str | None = None) -> Call[list[ControllerInfo]]:
    return build_call("nvmf_subsystem_get_controllers", {"nqn": nqn, "tgt_name": tgt_name}, Shape.OBJECTS)


def nvmf_subsystem_get_qpairs(nqn: str, *, tgt_name: str | None = None) -> Call[list[QpairInfo]]:
    return build_call("nvmf_subsystem_get_qpairs", {"nqn": nqn, "tgt_name": tgt_name}, Shape.OBJECTS)


def nvmf_subsystem_get_listeners(nqn: str, *, tgt_name: str | None = None) -> Call[list[Listener]]:
    return build_call("nvmf_subsystem_get_listeners", {"nqn": nqn, "tgt_name": tgt_name}, Shape.OBJECTS)


def nvmf_ns_add_host(*, nqn: str, nsid: int, host: str, tgt_name: str | None = None) -> Call[bool]:
    return build_call(
        "nvmf_ns_add_host", {"nqn": nqn, "nsid": nsid, "host": host, "tgt_name": tgt_name}, Shape.BOOLEAN
    )


def nvmf_ns_remove_host(*, nqn: str, nsid: int, host: str, tgt_name: str | None = None) -> Call[bool]:
    return build_call(
        "nvmf_ns_remove_host", {"nqn": nqn, "nsid": nsid, "host": host, "tgt_name": tgt_name}, Shape.BOOLEAN
    )


def nvmf_set_max_subsystems(max_subsystems: int) -> Call[bool]:
    return build_call("nvmf_set_max_subsystems", {"max_subsystems": max_subsystems}, Shape.BOOLEAN)


def nvmf_discovery_add_referral(
    *,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str,
    tgt_name: str | None = None,
    secure_channel: bool | None = None,
    subnqn: str | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_discovery_add_referral",
        {
            "address": listen_address(trtype=trtype, adrfam=adrfam, traddr=traddr, trsvcid=trsvcid),
            "tgt_name": tgt_name,
            "secure_channel": secure_channel,
            "subnqn": subnqn,
        },
        Shape.BOOLEAN,
    )


def nvmf_discovery_remove_referral(
    *,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str,
    tgt_name: str | None = None,
    subnqn: str | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_discovery_remove_referral",
        {
            "address": listen_address(trtype=trtype, adrfam=adrfam, traddr=traddr, trsvcid=trsvcid),
            "tgt_name": tgt_name,
            "subnqn": subnqn,
        },
        Shape.BOOLEAN,
    )


def nvmf_discovery_get_referrals(*, tgt_name: str | None = None) -> Call[list[Referral]]:
    return build_call("nvmf_discovery_get_referrals", {"tgt_name": tgt_name}, Shape.OBJECTS)


def nvmf_set_config(
    *,
    admin_cmd_passthru: NvmfAdminCmdPassthru | None = None,
    poll_groups_mask: str | None = None,
    discovery_filters: Sequence[NvmfDiscoveryFilter] | None = None,
    dhchap_digests: Sequence[DhchapDigest] | None = None,
    dhchap_dhgroups: Sequence[DhchapDhgroup] | None = None,
    dup_host_policy: NvmfDupHostPolicy | None = None,
) -> Call[bool]:
    return build_call(
        "nvmf_set_config",
        {
            "admin_cmd_passthru": admin_cmd_passthru,
            "poll_groups_mask": poll_groups_mask,
            "discovery_filters": None if discovery_filters is None else list(discovery_filters),
            "dhchap_digests": None if dhchap_digests is None else list(dhchap_digests),
            "dhchap_dhgroups": None if dhchap_dhgroups is None else list(dhchap_dhgroups),
            "dup_host_policy": dup_host_policy,
        },
        Shape.BOOLEAN,
    )


def nvmf_get_transports(
    *, tgt_name: str | None = None, trtype: str | None = None
) -> Call[list[TransportInfo]]:
    return build_call("nvmf_get_transports", {"tgt_name": tgt_name, "trtype": trtype}, Shape.OBJECTS)


def nvmf_get_stats(*, tgt_name: str | None = None) -> Call[NvmfStats]:
    return build_call("nvmf_get_stats", {"tgt_name": tgt_name}, Shape.OBJECT)


def nvmf_set_crdt(
    *, crdt1: int | None = None, crdt2: int | None = None, crdt3: int | None = None
) -> Call[bool]:
    return build_call("nvmf_set_crdt", {"crdt1": crdt1, "crdt2": crdt2, "crdt3": crdt3}, Shape.BOOLEAN)


def nvmf_publish_mdns_prr(*, tgt_name: str | None = None) -> Call[bool]:
    return build_call("nvmf_publish_mdns_prr", {"tgt_name": tgt_name}, Shape.BOOLEAN)


def nvmf_stop_mdns_prr(*, tgt_name: str | None = None) -> Call[bool]:
    return build_call("nvmf_stop_mdns_prr", {"tgt_name": tgt_name}, Shape.BOOLEAN)


def bdev_nvme_set_options(
    *,
    action_on_timeout: BdevNvmeTimeoutAction | None = None,
    timeout_us: int | None = None,
    timeout_admin_us: int | None = None,
    keep_alive_timeout_ms: int | None = None,
    arbitration_burst: int | None = None,
    low_priority_weight: int | None = None,
    medium_priority_weight: int | None = None,
    high_priority_weight: int | None = None,
    nvme_adminq_poll_period_us: int | None = None,
    nvme_ioq_poll_period_us: int | None = None,
    io_queue_requests: int | None = None,
    delay_cmd_submit: bool | None = None,
    transport_retry_count: int | None = None,
    bdev_retry_count: int | None = None,
    transport_ack_timeout: int | None = None,
    ctrlr_loss_timeout_sec: int | None = None,
    reconnect_delay_sec: int | None = None,
    fast_io_fail_timeout_sec: int | None = None,
    disable_auto_failback: bool | None = None,
    generate_uuids: bool | None = None,
    transport_tos: int | None = None,
    nvme_error_stat: bool | None = None,
    rdma_srq_size: int | None = None,
    io_path_stat: bool | None = None,
    allow_accel_sequence: bool | None = None,
    rdma_max_cq_size: int | None = None,
    rdma_cm_event_timeout_ms: int | None = None,
    dhchap_digests: Sequence[DhchapDigest] | None = None,
    dhchap_dhgroups: Sequence[DhchapDhgroup] | None = None,
    rdma_umr_per_io: bool | None = None,
    tcp_connect_timeout_ms: int | None = None,
    enable_flush: bool | None = None,
    multipath_opts: BdevNvmeMultipathOpts | None = None,
) -> Call[bool]:
    """Refused (-1) once a controller is attached. Without enable_flush a flush ends at the initiator."""
    return build_call(
        "bdev_nvme_set_options",
        {
            "action_on_timeout": action_on_timeout,
            "timeout_us": timeout_us,
            "timeout_admin_us": timeout_admin_us,
            "keep_alive_timeout_ms": keep_alive_timeout_ms,
            "arbitration_burst": arbitration_burst,
            "low_priority_weight": low_priority_weight,
            "medium_priority_weight": medium_priority_weight,
            "high_priority_weight": high_priority_weight,
            "nvme_adminq_poll_period_us": nvme_adminq_poll_period_us,
            "nvme_ioq_poll_period_us": nvme_ioq_poll_period_us,
            "io_queue_requests": io_queue_requests,
            "delay_cmd_submit": delay_cmd_submit,
            "transport_retry_count": transport_retry_count,
            "bdev_retry_count": bdev_retry_count,
            "transport_ack_timeout": transport_ack_timeout,
            "ctrlr_loss_timeout_sec": ctrlr_loss_timeout_sec,
            "reconnect_delay_sec": reconnect_delay_sec,
            "fast_io_fail_timeout_sec": fast_io_fail_timeout_sec,
            "disable_auto_failback": disable_auto_failback,
            "generate_uuids": generate_uuids,
            "transport_tos": transport_tos,
            "nvme_error_stat": nvme_error_stat,
            "rdma_srq_size": rdma_srq_size,
            "io_path_stat": io_path_stat,
            "allow_accel_sequence": allow_accel_sequence,
            "rdma_max_cq_size": rdma_max_cq_size,
            "rdma_cm_event_timeout_ms": rdma_cm_event_timeout_ms,
            "dhchap_digests": None if dhchap_digests is None else list(dhchap_digests),
            "dhchap_dhgroups": None if dhchap_dhgroups is None else list(dhchap_dhgroups),
            "rdma_umr_per_io": rdma_umr_per_io,
            "tcp_connect_timeout_ms": tcp_connect_timeout_ms,
            "enable_flush": enable_flush,
            "multipath_opts": multipath_opts,
        },
        Shape.BOOLEAN,
    )


def bdev_nvme_set_hotplug(enable: bool, *, period_us: int | None = None) -> Call[bool]:
    return build_call("bdev_nvme_set_hotplug", {"enable": enable, "period_us": period_us}, Shape.BOOLEAN)


def bdev_nvme_attach_controller(
    *,
    name: str,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str | None = None,
    priority: str | None = None,
    subnqn: str | None = None,
    hostnqn: str | None = None,
    hostaddr: str | None = None,
    hostsvcid: str | None = None,
    prchk_reftag: bool | None = None,
    prchk_guard: bool | None = None,
    hdgst: bool | None = None,
    ddgst: bool | None = None,
    fabrics_connect_timeout_us: int | None = None,
    multipath: BdevNvmeMultipathMode | None = None,
    num_io_queues: int | None = None,
    ctrlr_loss_timeout_sec: int | None = None,
    reconnect_delay_sec: int | None = None,
    fast_io_fail_timeout_sec: int | None = None,
    psk: str | None = None,
    max_bdevs: int | None = None,
    dhchap_key: str | None = None,
    dhchap_ctrlr_key: str | None = None,
    allow_unrecognized_csi: bool | None = None,
    multipath_opts: BdevNvmeMultipathOpts | None = None,
    disable_sq_flow_control: bool | None = None,
) -> Call[list[str]]:
    """Connect, or add a path to a controller of that name (multipath); returns the names of its bdevs."""
    return build_call(
        "bdev_nvme_attach_controller",
        {
            "name": name,
            "trtype": trtype,
            "traddr": traddr,
            "adrfam": address_family(traddr) if adrfam is None else adrfam,
            "trsvcid": None if trsvcid is None else str(trsvcid),
            "priority": priority,
            "subnqn": subnqn,
            "hostnqn": hostnqn,
            "hostaddr": hostaddr,
            "hostsvcid": hostsvcid,
            "prchk_reftag": prchk_reftag,
            "prchk_guard": prchk_guard,
            "hdgst": hdgst,
            "ddgst": ddgst,
            "fabrics_connect_timeout_us": fabrics_connect_timeout_us,
            "multipath": multipath,
            "num_io_queues": num_io_queues,
            "ctrlr_loss_timeout_sec": ctrlr_loss_timeout_sec,
            "reconnect_delay_sec": reconnect_delay_sec,
            "fast_io_fail_timeout_sec": fast_io_fail_timeout_sec,
            "psk": psk,
            "max_bdevs": max_bdevs,
            "dhchap_key": dhchap_key,
            "dhchap_ctrlr_key": dhchap_ctrlr_key,
            "allow_unrecognized_csi": allow_unrecognized_csi,
            "multipath_opts": multipath_opts,
            "disable_sq_flow_control": disable_sq_flow_control,
        },
        Shape.TEXTS,
    )


def bdev_nvme_get_controllers(*, name: str | None = None) -> Call[list[NvmeController]]:
    """Controllers with their paths and the state of each."""
    return build_call("bdev_nvme_get_controllers", {"name": name}, Shape.OBJECTS)


def bdev_nvme_detach_controller(
    name: str,
    *,
    trtype: str | None = None,
    traddr: str | None = None,
    adrfam: str | None = None,
    trsvcid: int | str | None = None,
    subnqn: str | None = None,
    hostaddr: str | None = None,
    hostsvcid: str | None = None,
) -> Call[bool]:
    """Remove a controller, or the one path that the other arguments name."""
    return build_call(
        "bdev_nvme_detach_controller",
        {
            "name": name,
            "trtype": trtype,
            "traddr": traddr,
            "adrfam": address_family(traddr) if adrfam is None else adrfam,
            "trsvcid": None if trsvcid is None else str(trsvcid),
            "subnqn": subnqn,
            "hostaddr": hostaddr,
            "hostsvcid": hostsvcid,
        },
        Shape.BOOLEAN,
    )


def bdev_nvme_reset_controller(name: str, *, cntlid: int | None = None) -> Call[bool]:
    return build_call("bdev_nvme_reset_controller", {"name": name, "cntlid": cntlid}, Shape.BOOLEAN)


def bdev_nvme_enable_controller(name: str, *, cntlid: int | None = None) -> Call[bool]:
    return build_call("bdev_nvme_enable_controller", {"name": name, "cntlid": cntlid}, Shape.BOOLEAN)


def bdev_nvme_disable_controller(name: str, *, cntlid: int | None = None) -> Call[bool]:
    return build_call("bdev_nvme_disable_controller", {"name": name, "cntlid": cntlid}, Shape.BOOLEAN)


def bdev_nvme_start_discovery(
    *,
    name: str,
    traddr: str,
    trtype: str = "TCP",
    adrfam: str | None = None,
    trsvcid: int | str | None = None,
    hostnqn: str | None = None,
    wait_for_attach: bool | None = None,
    attach_timeout_ms: int | None = None,
    ctrlr_loss_timeout_sec: int | None = None,
    reconnect_delay_sec: int | None = None,
    fast_io_fail_timeout_sec: int | None = None,
) -> Call[bool]:
    """Attach all that a discovery controller names, now and later."""
    return build_call(
        "bdev_nvme_start_discovery",
        {
            "name": name,
            "trtype": trtype,
            "traddr": traddr,
            "adrfam": address_family(traddr) if adrfam is None else adrfam,
            "trsvcid": None if trsvcid is None else str(trsvcid),
            "hostnqn": hostnqn,
            "wait_for_attach": wait_for_attach,
            "attach_timeout_ms": attach_timeout_ms,
            "ctrlr_loss_timeout_sec": ctrlr_loss_timeout_sec,
            "reconnect_delay_sec": reconnect_delay_sec,
            "fast_io_fail_timeout_sec": fast_io_fail_timeout_sec,
        },
        Shape.BOOLEAN,
    )


def bdev_nvme_stop_discovery(name: str) -> Call[bool]:
    return build_call("bdev_nvme_stop_discovery", {"name": name}, Shape.BOOLEAN)


def bdev_nvme_get_discovery_info() -> Call[list[DiscoveryInfo]]:
    return build_call("bdev_nvme_get_discovery_info", {}, Shape.OBJECTS)


def bdev_nvme_get_io_paths(*, name: str | None = None) -> Call[IoPaths]:
    return build_call("bdev_nvme_get_io_paths", {"name": name}, Shape.OBJECT)


def bdev_nvme_set_preferred_path(*, name: str, cntlid: int) -> Call[bool]:
    return build_call("bdev_nvme_set_preferred_path", {"name": name, "cntlid": cntlid}, Shape.BOOLEAN)


def bdev_nvme_set_multipath_policy(
    *,
    name: str,
    policy: BdevNvmeMultipathPolicy,
    selector: BdevNvmeMultipathSelector | None = None,
    rr_min_io: int | None = None,
) -> Call[bool]:
    return build_call(
        "bdev_nvme_set_multipath_policy",
        {"name": name, "policy": policy, "selector": selector, "rr_min_io": rr_min_io},
        Shape.BOOLEAN,
    )


def bdev_nvme_get_path_iostat(name: str) -> Call[dict[str, Any]]:
    return build_call("bdev_nvme_get_path_iostat", {"name": name}, Shape.OBJECT)


def bdev_nvme_cuse_register(name: str) -> Call[bool]:
    return build_call("bdev_nvme_cuse_register", {"name": name}, Shape.BOOLEAN)


def bdev_nvme_cuse_unregister(name: str) -> Call[bool]:
    return build_call("bdev_nvme_cuse_unregister", {"name": name}, Shape.BOOLEAN)


def bdev_nvme_set_keys(
    name: str, *, dhchap_key: str | None = None, dhchap_ctrlr_key: str | None = None
) -> Call[bool]:
    return build_call(
        "bdev_nvme_set_keys",
        {"name": name, "dhchap_key": dhchap_key, "dhchap_ctrlr_key": dhchap_ctrlr_key},
        Shape.BOOLEAN,
    )


def bdev_nvme_apply_firmware(*, filename: str, bdev_name: str) -> Call[Any]:
    return build_call("bdev_nvme_apply_firmware", {"filename": filename, "bdev_name": bdev_name}, Shape.ANY)


def bdev_nvme_get_transport_statistics() -> Call[dict[str, Any]]:
    return build_call("bdev_nvme_get_transport_statistics", {}, Shape.OBJECT)


def bdev_nvme_get_controller_health_info(name: str) -> Call[NvmeHealth]:
    return build_call("bdev_nvme_get_controller_health_info", {"name": name}, Shape.OBJECT)


def bdev_nvme_opal_init(*, nvme_ctrlr_name: str, password: str) -> Call[bool]:
    return build_call(
        "bdev_nvme_opal_init", {"nvme_ctrlr_name": nvme_ctrlr_name, "password": password}, Shape.BOOLEAN
    )


def bdev_nvme_opal_revert(*, nvme_ctrlr_name: str, password: str) -> Call[bool]:
    return build_call(
        "bdev_nvme_opal_revert", {"nvme_ctrlr_name": nvme_ctrlr_name, "password": password}, Shape.BOOLEAN
    )


def bdev_nvme_send_cmd(
    *,
    name: str,
    cmd_type: BdevNvmeCmdType,
    data_direction: BdevNvmeDataDirection,
    cmdbuf: str,
    data: str | None = None,
    metadata: str | None = None,
    data_len: int | None = None,
    metadata_len: int | None = None,
    timeout_ms: int | None = None,
) -> Call[dict[str, Any]]:
    return build_call(
        "bdev_nvme_send_cmd",
        {
            "name": name,
            "cmd_type": cmd_type,
            "data_direction": data_direction,
            "cmdbuf": cmdbuf,
            "data": data,
            "metadata": metadata,
            "data_len": data_len,
            "metadata_len": metadata_len,
            "timeout_ms": timeout_ms,
        },
        Shape.OBJECT,
    )


def bdev_nvme_add_error_injection(
    *,
    name: str,
    cmd_type: BdevNvmeCmdType,
    opc: int,
    do_not_submit: bool | None = None,
    timeout_in_us: int | None = None,
    err_count: int | None = None,
    sct: int | None = None,
    sc: int | None = None,
) -> Call[bool]:
    return build_call(
        "bdev_nvme_add_error_injection",
        {
            "name": name,
            "cmd_type": cmd_type,
            "opc": opc,
            "do_not_submit": do_not_submit,
            "timeout_in_us": timeout_in_us,
            "err_count": err_count,
            "sct": sct,
            "sc": sc,
        },
        Shape.BOOLEAN,
    )


def bdev_nvme_remove_error_injection(*, name: str, cmd_type: BdevNvmeCmdType, opc: int) -> Call[bool]:
    return build_call(
        "bdev_nvme_remove_error_injection", {"name": name, "cmd_type": cmd_type, "opc": opc}, Shape.BOOLEAN
    )


def bdev_nvme_start_mdns_discovery(*, name: str, svcname: str, hostnqn: str | None = None) -> Call[bool]:
    return build_call(
        "bdev_nvme_start_mdns_discovery",
        {"name": name, "svcname": svcname, "hostnqn": hostnqn},
        Shape.BOOLEAN,
    )


def bdev_nvme_stop_mdns_discovery(name: str) -> Call[bool]:
    return build_call("bdev_nvme_stop_mdns_discovery", {"name": name}, Shape.BOOLEAN)


def bdev_nvme_get_mdns_discovery_info() -> Call[list[dict[str, Any]]]:
    return build_call("bdev_nvme_get_mdns_discovery_info", {}, Shape.OBJECTS)


def bdev_raid_set_options(
    *, process_window_size_kb: int | None = None, process_max_bandwidth_mb_sec: int | None = None
) -> Call[bool]:
    return build_call(
        "bdev_raid_set_options",
        {
            "process_window_size_kb": process_window_size_kb,
            "process_max_bandwidth_mb_sec": process_max_bandwidth_mb_sec,
        },
        Shape.BOOLEAN,
    )


def bdev_raid_get_bdevs(category: BdevRaidState = "all") -> Call[list[RaidInfo]]:
    return build_call("bdev_raid_get_bdevs", {"category": category}, Shape.OBJECTS)


def bdev_raid_create(
    *,
    name: str,
    base_bdevs: Sequence[str],
    raid_level: BdevRaidLevel = "raid0",
    strip_size_kb: int | None = None,
    uuid: str | None = None,
    superblock: bool | None = None,
) -> Call[bool]:
    """Succeeds also while bases are missing: look at the state with bdev_raid_get_bdevs."""
    return build_call(
        "bdev_raid_create",
        {
            "name": name,
            "raid_level": raid_level,
            "base_bdevs": list(base_bdevs),
            "strip_size_kb": strip_size_kb,
            "uuid": uuid,
            "superblock": superblock,
        },
        Shape.BOOLEAN,
    )


def bdev_raid_delete(name: str, *, clear_sb: bool | None = None) -> Call[bool]:
    """The bases are free afterwards."""
    return build_call("bdev_raid_delete", {"name": name, "clear_sb": clear_sb}, Shape.BOOLEAN)


def bdev_raid_add_base_bdev(*, raid_bdev: str, base_bdev: str) -> Call[bool]:
    return build_call(
        "bdev_raid_add_base_bdev", {"raid_bdev": raid_bdev, "base_bdev": base_bdev}, Shape.BOOLEAN
    )


def bdev_raid_remove_base_bdev(name: str) -> Call[bool]:
    return build_call("bdev_raid_remove_base_bdev", {"name": name}, Shape.BOOLEAN)


def bdev_lvol_create_lvstore(
    *,
    bdev_name: str,
    lvs_name: str,
    cluster_sz: int | None = None,
    clear_method: LvsClearMethod | None = None,
    num_md_pages_per_cluster_ratio: int | None = None,
    md_page_size: int | None = None,
) -> Call[str]:
    """Destroys what is on the bdev; returns the UUID of the store."""
    return build_call(
        "bdev_lvol_create_lvstore",
        {
            "bdev_name": bdev_name,
            "lvs_name": lvs_name,
            "cluster_sz": cluster_sz,
            "clear_method": clear_method,
            "num_md_pages_per_cluster_ratio": num_md_pages_per_cluster_ratio,
            "md_page_size": md_page_size,
        },
        Shape.TEXT,
    )


def bdev_lvol_delete_lvstore(*, uuid: str | None = None, lvs_name: str | None = None) -> Call[bool]:
    return build_call("bdev_lvol_delete_lvstore", {"uuid": uuid, "lvs_name": lvs_name}, Shape.BOOLEAN)


def bdev_lvol_get_lvstores(*, uuid: str | None = None, lvs_name: str | None = None) -> Call[list[LvolStore]]:
    return build_call("bdev_lvol_get_lvstores", {"uuid": uuid, "lvs_name": lvs_name}, Shape.OBJECTS)


def bdev_lvol_rename_lvstore(*, old_name: str, new_name: str) -> Call[bool]:
    return build_call("bdev_lvol_rename_lvstore", {"old_name": old_name, "new_name": new_name}, Shape.BOOLEAN)


def bdev_lvol_grow_lvstore(*, uuid: str | None = None, lvs_name: str | None = None) -> Call[bool]:
    return build_call("bdev_lvol_grow_lvstore", {"uuid": uuid, "lvs_name": lvs_name}, Shape.BOOLEAN)


def bdev_lvol_create(
    *,
    lvol_name: str,
    size_in_mib: int,
    thin_provision: bool | None = None,
    uuid: str | None = None,
    lvs_name: str | None = None,
    clear_method: LvolClearMethod | None = None,
) -> Call[str]:
    """Returns the UUID of the lvol; its bdev has the alias STORE/LVOL."""
    return build_call(
        "bdev_lvol_create",
        {
            "lvol_name": lvol_name,
            "size_in_mib": size_in_mib,
            "thin_provision": thin_provision,
            "uuid": uuid,
            "lvs_name": lvs_name,
            "clear_method": clear_method,
        },
        Shape.TEXT,
    )


def bdev_lvol_snapshot(*, lvol_name: str, snapshot_name: str) -> Call[str]:
    return build_call(
        "bdev_lvol_snapshot", {"lvol_name": lvol_name, "snapshot_name": snapshot_name}, Shape.TEXT
    )


def bdev_lvol_clone(*, snapshot_name: str, clone_name: str) -> Call[str]:
    return build_call(
        "bdev_lvol_clone", {"snapshot_name": snapshot_name, "clone_name": clone_name}, Shape.TEXT
    )


def bdev_lvol_clone_bdev(*, bdev: str, lvs_name: str, clone_name: str) -> Call[str]:
    return build_call(
        "bdev_lvol_clone_bdev", {"bdev": bdev, "lvs_name": lvs_name, "clone_name": clone_name}, Shape.TEXT
    )


def bdev_lvol_rename(*, old_name: str, new_name: str) -> Call[bool]:
    return build_call("bdev_lvol_rename", {"old_name": old_name, "new_name": new_name}, Shape.BOOLEAN)


def bdev_lvol_resize(*, name: str, size_in_mib: int) -> Call[bool]:
    return build_call("bdev_lvol_resize", {"name": name, "size_in_mib": size_in_mib}, Shape.BOOLEAN)


def bdev_lvol_set_read_only(name: str) -> Call[bool]:
    return build_call("bdev_lvol_set_read_only", {"name": name}, Shape.BOOLEAN)


def bdev_lvol_delete(name: str) -> Call[bool]:
    return build_call("bdev_lvol_delete", {"name": name}, Shape.BOOLEAN)


def bdev_lvol_inflate(name: str) -> Call[bool]:
    return build_call("bdev_lvol_inflate", {"name": name}, Shape.BOOLEAN)


def bdev_lvol_decouple_parent(name: str) -> Call[bool]:
    return build_call("bdev_lvol_decouple_parent", {"name": name}, Shape.BOOLEAN)


def bdev_lvol_get_lvols(*, lvs_uuid: str | None = None, lvs_name: str | None = None) -> Call[list[Lvol]]:
    return build_call("bdev_lvol_get_lvols", {"lvs_uuid": lvs_uuid, "lvs_name": lvs_name}, Shape.OBJECTS)


def bdev_lvol_set_parent(*, lvol_name: str, parent_name: str) -> Call[bool]:
    return build_call(
        "bdev_lvol_set_parent", {"lvol_name": lvol_name, "parent_name": parent_name}, Shape.BOOLEAN
    )


def bdev_lvol_set_parent_bdev(*, lvol_name: str, parent_name: str) -> Call[bool]:
    return build_call(
        "bdev_lvol_set_parent_bdev", {"lvol_name": lvol_name, "parent_name": parent_name}, Shape.BOOLEAN
    )


def bdev_lvol_start_shallow_copy(*, src_lvol_name: str, dst_bdev_name: str) -> Call[dict[str, int]]:
    return build_call(
        "bdev_lvol_start_shallow_copy",
        {"src_lvol_name": src_lvol_name, "dst_bdev_name": dst_bdev_name},
        Shape.OBJECT,
    )


def bdev_lvol_check_shallow_copy(operation_id: int) -> Call[ShallowCopy]:
    return build_call("bdev_lvol_check_shallow_copy", {"operation_id": operation_id}, Shape.OBJECT)


def bdev_malloc_create(
    *,
    block_size: int,
    num_blocks: int,
    name: str | None = None,
    uuid: str | None = None,
    optimal_io_boundary: int | None = None,
    md_size: int | None = None,
    md_interleave: bool | None = None,
    dif_type: int | None = None,
    dif_is_head_of_md: bool | None = None,
    physical_block_size: int | None = None,
    dif_pi_format: int | None = None,
    numa_id: int | None = None,
) -> Call[str]:
    return build_call(
        "bdev_malloc_create",
        {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "name": name,
            "uuid": uuid,
            "optimal_io_boundary": optimal_io_boundary,
            "md_size": md_size,
            "md_interleave": md_interleave,
            "dif_type": dif_type,
            "dif_is_head_of_md": dif_is_head_of_md,
            "physical_block_size": physical_block_size,
            "dif_pi_format": dif_pi_format,
            "numa_id": numa_id,
        },
        Shape.TEXT,
    )


def bdev_malloc_delete(name: str) -> Call[bool]:
    return build_call("bdev_malloc_delete", {"name": name}, Shape.BOOLEAN)


def bdev_null_create(
    *,
    name: str,
    block_size: int,
    num_blocks: int,
    uuid: str | None = None,
    physical_block_size: int | None = None,
    md_size: int | None = None,
    dif_type: int | None = None,
    dif_pi_format: int | None = None,
    dif_is_head_of_md: bool | None = None,
    preferred_write_granularity: int | None = None,
    preferred_write_alignment: int | None = None,
    optimal_write_size: int | None = None,
    preferred_unmap_granularity: int | None = None,
    preferred_unmap_alignment: int | None = None,
) -> Call[str]:
    return build_call(
        "bdev_null_create",
        {
            "name": name,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "uuid": uuid,
            "physical_block_size": physical_block_size,
            "md_size": md_size,
            "dif_type": dif_type,
            "dif_pi_format": dif_pi_format,
            "dif_is_head_of_md": dif_is_head_of_md,
            "preferred_write_granularity": preferred_write_granularity,
            "preferred_write_alignment": preferred_write_alignment,
            "optimal_write_size": optimal_write_size,
            "preferred_unmap_granularity": preferred_unmap_granularity,
            "preferred_unmap_alignment": preferred_unmap_alignment,
        },
        Shape.TEXT,
    )


def bdev_null_delete(name: str) -> Call[bool]:
    return build_call("bdev_null_delete", {"name": name}, Shape.BOOLEAN)


def bdev_null_resize(*, name: str, new_size: int) -> Call[bool]:
    return build_call("bdev_null_resize", {"name": name, "new_size": new_size}, Shape.BOOLEAN)


def bdev_aio_create(
    *,
    name: str,
    filename: str,
    block_size: int | None = None,
    readonly: bool | None = None,
    fallocate: bool | None = None,
    uuid: str | None = None,
    nowait: bool | None = None,
) -> Call[str]:
    return build_call(
        "bdev_aio_create",
        {
            "name": name,
            "filename": filename,
            "block_size": block_size,
            "readonly": readonly,
            "fallocate": fallocate,
            "uuid": uuid,
            "nowait": nowait,
        },
        Shape.TEXT,
    )


def bdev_aio_rescan(name: str) -> Call[bool]:
    return build_call("bdev_aio_rescan", {"name": name}, Shape.BOOLEAN)


def bdev_aio_delete(name: str) -> Call[bool]:
    return build_call("bdev_aio_delete", {"name": name}, Shape.BOOLEAN)


def bdev_zone_block_create(
    *, name: str, base_bdev: str, zone_capacity: int, optimal_open_zones: int
) -> Call[str]:
    return build_call(
        "bdev_zone_block_create",
        {
            "name": name,
            "base_bdev": base_bdev,
            "zone_capacity": zone_capacity,
            "optimal_open_zones": optimal_open_zones,
        },
        Shape.TEXT,
    )


def bdev_zone_block_delete(name: str) -> Call[bool]:
    return build_call("bdev_zone_block_delete", {"name": name}, Shape.BOOLEAN)


def bdev_delay_create(
    *,
    name: str,
    base_bdev_name: str,
    avg_read_latency: int,
    p99_read_latency: int,
    avg_write_latency: int,
    p99_write_latency: int,
    uuid: str | None = None,
) -> Call[str]:
    """A bdev that answers after the given times, in microseconds."""
    return build_call(
        "bdev_delay_create",
        {
            "name": name,
            "base_bdev_name": base_bdev_name,
            "avg_read_latency": avg_read_latency,
            "p99_read_latency": p99_read_latency,
            "avg_write_latency": avg_write_latency,
            "p99_write_latency": p99_write_latency,
            "uuid": uuid,
        },
        Shape.TEXT,
    )


def bdev_delay_delete(name: str) -> Call[bool]:
    return build_call("bdev_delay_delete", {"name": name}, Shape.BOOLEAN)


def bdev_delay_update_latency(
    *, delay_bdev_name: str, latency_type: BdevDelayLatencyType, latency_us: int
) -> Call[bool]:
    return build_call(
        "bdev_delay_update_latency",
        {"delay_bdev_name": delay_bdev_name, "latency_type": latency_type, "latency_us": latency_us},
        Shape.BOOLEAN,
    )


def bdev_error_create(base_name: str, *, uuid: str | None = None) -> Call[bool]:
    """Put a filter that can inject errors on a bdev; its name is EE_ and the name of the bdev."""
    return build_call("bdev_error_create", {"base_name": base_name, "uuid": uuid}, Shape.BOOLEAN)


def bdev_error_delete(name: str) -> Call[bool]:
    return build_call("bdev_error_delete", {"name": name}, Shape.BOOLEAN)


def bdev_error_inject_error(
    *,
    name: str,
    io_type: BdevErrorInjectIoType,
    error_type: BdevErrorInjectErrorType,
    nvme_sct: int | None = None,
    nvme_sc: int | None = None,
    num: int | None = None,
    queue_depth: int | None = None,
    corrupt_offset: int | None = None,
    corrupt_value: int | None = None,
) -> Call[bool]:
    """The next num operations of io_type fail so; clear takes all injections away."""
    return build_call(
        "bdev_error_inject_error",
        {
            "name": name,
            "io_type": io_type,
            "error_type": error_type,
            "nvme_sct": nvme_sct,
            "nvme_sc": nvme_sc,
            "num": num,
            "queue_depth": queue_depth,
            "corrupt_offset": corrupt_offset,
            "corrupt_value": corrupt_value,
        },
        Shape.BOOLEAN,
    )


def bdev_error_resume_pending(name: str) -> Call[bool]:
    return build_call("bdev_error_resume_pending", {"name": name}, Shape.BOOLEAN)


def bdev_passthru_create(*, name: str, base_bdev_name: str, uuid: str | None = None) -> Call[str]:
    return build_call(
        "bdev_passthru_create", {"name": name, "base_bdev_name": base_bdev_name, "uuid": uuid}, Shape.TEXT
    )


def bdev_passthru_delete(name: str) -> Call[bool]:
    return build_call("bdev_passthru_delete", {"name": name}, Shape.BOOLEAN)


def bdev_split_create(
    *, base_bdev: str, split_count: int, split_size_mb: int | None = None
) -> Call[list[str]]:
    """Cut a bdev into equal parts, NAMEp0, NAMEp1, …; returns their names."""
    return build_call(
        "bdev_split_create",
        {"base_bdev": base_bdev, "split_count": split_count, "split_size_mb": split_size_mb},
        Shape.TEXTS,
    )


def bdev_split_delete(base_bdev: str) -> Call[bool]:
    return build_call("bdev_split_delete", {"base_bdev": base_bdev}, Shape.BOOLEAN)


def bdev_uring_create(
    *, filename: str, name: str, block_size: int | None = None, uuid: str | None = None
) -> Call[str]:
    return build_call(
        "bdev_uring_create",
        {"filename": filename, "name": name, "block_size": block_size, "uuid": uuid},
        Shape.TEXT,
    )


def bdev_uring_rescan(name: str) -> Call[bool]:
    return build_call("bdev_uring_rescan", {"name": name}, Shape.BOOLEAN)


def bdev_uring_delete(name: str) -> Call[bool]:
    return build_call("bdev_uring_delete", {"name": name}, Shape.BOOLEAN)


def bdev_set_options(
    *,
    bdev_io_pool_size: int | None = None,
    bdev_io_cache_size: int | None = None,
    bdev_auto_examine: bool | None = None,
    iobuf_small_cache_size: int | None = None,
    iobuf_large_cache_size: int | None = None,
) -> Call[bool]:
    return build_call(
        "bdev_set_options",
        {
            "bdev_io_pool_size": bdev_io_pool_size,
            "bdev_io_cache_size": bdev_io_cache_size,
            "bdev_auto_examine": bdev_auto_examine,
            "iobuf_small_cache_size": iobuf_small_cache_size,
            "iobuf_large_cache_size": iobuf_large_cache_size,
        },
        Shape.BOOLEAN,
    )


def bdev_get_bdevs(*, name: str | None = None, timeout_ms: int | None = None) -> Call[list[BdevInfo]]:
    """All bdevs, or the one of that name; waits timeout_ms for it to appear (-110; without a wait -19)."""
    return build_call("bdev_get_bdevs", {"name": name, "timeout": timeout_ms}, Shape.OBJECTS)


def bdev_examine(name: str) -> Call[bool]:
    return build_call("bdev_examine", {"name": name}, Shape.BOOLEAN)


def bdev_wait_for_examine() -> Call[bool]:
    return build_call("bdev_wait_for_examine", {}, Shape.BOOLEAN)


def bdev_set_qos_limit(
    name: str,
    *,
    rw_ios_per_sec: int | None = None,
    rw_mbytes_per_sec: int | None = None,
    r_mbytes_per_sec: int | None = None,
    w_mbytes_per_sec: int | None = None,
) -> Call[bool]:
    """Limits of 0 are none; those that are left out stay."""
    return build_call(
        "bdev_set_qos_limit",
        {
            "name": name,
            "rw_ios_per_sec": rw_ios_per_sec,
            "rw_mbytes_per_sec": rw_mbytes_per_sec,
            "r_mbytes_per_sec": r_mbytes_per_sec,
            "w_mbytes_per_sec": w_mbytes_per_sec,
        },
        Shape.BOOLEAN,
    )


def bdev_set_qd_sampling_period(*, name: str, period: int) -> Call[bool]:
    return build_call("bdev_set_qd_sampling_period", {"name": name, "period": period}, Shape.BOOLEAN)


def bdev_get_iostat(
    *,
    names: Sequence[str] | None = None,
    per_channel: bool | None = None,
    reset_mode: BdevResetStatMode | None = None,
) -> Call[BdevIoStat]:
    return build_call(
        "bdev_get_iostat",
        {
            "names": None if names is None else list(names),
            "per_channel": per_channel,
            "reset_mode": reset_mode,
        },
        Shape.OBJECT,
    )


def bdev_reset_iostat(*, name: str | None = None, mode: BdevResetStatMode | None = None) -> Call[bool]:
    return build_call("bdev_reset_iostat", {"name": name, "mode": mode}, Shape.BOOLEAN)


def bdev_enable_histogram(
    *,
    name: str,
    enable: bool,
    opc: str | None = None,
    granularity: int | None = None,
    min_nsec: int | None = None,
    max_nsec: int | None = None,
) -> Call[bool]:
    return build_call(
        "bdev_enable_histogram",
        {
            "name": name,
            "enable": enable,
            "opc": opc,
            "granularity": granularity,
            "min_nsec": min_nsec,
            "max_nsec": max_nsec,
        },
        Shape.BOOLEAN,
    )


def bdev_get_histogram(name: str) -> Call[Histogram]:
    return build_call("bdev_get_histogram", {"name": name}, Shape.OBJECT)


def bdev_get_histogram_borders(*, name: str, borders: Sequence[int]) -> Call[dict[str, Any]]:
    return build_call("bdev_get_histogram_borders", {"name": name, "borders": list(borders)}, Shape.OBJECT)


def vhost_controller_set_coalescing(*, ctrlr: str, delay_base_us: int, iops_threshold: int) -> Call[bool]:
    return build_call(
        "vhost_controller_set_coalescing",
        {"ctrlr": ctrlr, "delay_base_us": delay_base_us, "iops_threshold": iops_threshold},
        Shape.BOOLEAN,
    )


def vhost_create_scsi_controller(
    ctrlr: str, *, cpumask: str | None = None, delay: bool | None = None
) -> Call[bool]:
    return build_call(
        "vhost_create_scsi_controller", {"ctrlr": ctrlr, "cpumask": cpumask, "delay": delay}, Shape.BOOLEAN
    )


def vhost_start_scsi_controller(ctrlr: str) -> Call[bool]:
    return build_call("vhost_start_scsi_controller", {"ctrlr": ctrlr}, Shape.BOOLEAN)


def vhost_scsi_controller_add_target(*, ctrlr: str, scsi_target_num: int, bdev_name: str) -> Call[int]:
    return build_call(
        "vhost_scsi_controller_add_target",
        {"ctrlr": ctrlr, "scsi_target_num": scsi_target_num, "bdev_name": bdev_name},
        Shape.INTEGER,
    )


def vhost_scsi_controller_remove_target(*, ctrlr: str, scsi_target_num: int) -> Call[bool]:
    return build_call(
        "vhost_scsi_controller_remove_target",
        {"ctrlr": ctrlr, "scsi_target_num": scsi_target_num},
        Shape.BOOLEAN,
    )


def virtio_blk_create_transport(name: str) -> Call[bool]:
    return build_call("virtio_blk_create_transport", {"name": name}, Shape.BOOLEAN)


def virtio_blk_get_transports(*, name: str | None = None) -> Call[list[VirtioBlkTransport]]:
    return build_call("virtio_blk_get_transports", {"name": name}, Shape.OBJECTS)


def vhost_create_blk_controller(
    *,
    ctrlr: str,
    dev_name: str,
    readonly: bool | None = None,
    packed_ring: bool | None = None,
    cpumask: str | None = None,
    transport: str | None = None,
) -> Call[bool]:
    """Serve a bdev to a vhost-user front end; the socket is in SPDK's vhost directory."""
    return build_call(
        "vhost_create_blk_controller",
        {
            "ctrlr": ctrlr,
            "dev_name": dev_name,
            "readonly": readonly,
            "packed_ring": packed_ring,
            "cpumask": cpumask,
            "transport": transport,
        },
        Shape.BOOLEAN,
    )


def vhost_get_controllers(*, name: str | None = None) -> Call[list[VhostController]]:
    return build_call("vhost_get_controllers", {"name": name}, Shape.OBJECTS)


def vhost_delete_controller(ctrlr: str) -> Call[bool]:
    return build_call("vhost_delete_controller", {"ctrlr": ctrlr}, Shape.BOOLEAN)


def ublk_create_target(*, cpumask: str | None = None, disable_user_copy: bool | None = None) -> Call[bool]:
    return build_call(
        "ublk_create_target", {"cpumask": cpumask, "disable_user_copy": disable_user_copy}, Shape.BOOLEAN
    )


def ublk_destroy_target() -> Call[bool]:
    return build_call("ublk_destroy_target", {}, Shape.BOOLEAN)


def ublk_start_disk(
    *, bdev_name: str, ublk_id: int, queue_depth: int | None = None, num_queues: int | None = None
) -> Call[int]:
    return build_call(
        "ublk_start_disk",
        {"bdev_name": bdev_name, "ublk_id": ublk_id, "queue_depth": queue_depth, "num_queues": num_queues},
        Shape.INTEGER,
    )


def ublk_recover_disk(*, bdev_name: str, ublk_id: int) -> Call[int]:
    return build_call("ublk_recover_disk", {"bdev_name": bdev_name, "ublk_id": ublk_id}, Shape.INTEGER)


def ublk_stop_disk(ublk_id: int) -> Call[bool]:
    return build_call("ublk_stop_disk", {"ublk_id": ublk_id}, Shape.BOOLEAN)


def ublk_get_disks(*, ublk_id: int | None = None) -> Call[list[UblkDisk]]:
    return build_call("ublk_get_disks", {"ublk_id": ublk_id}, Shape.OBJECTS)


def nbd_start_disk(bdev_name: str, *, nbd_device: str | None = None) -> Call[str]:
    return build_call("nbd_start_disk", {"bdev_name": bdev_name, "nbd_device": nbd_device}, Shape.TEXT)


def nbd_stop_disk(nbd_device: str) -> Call[bool]:
    return build_call("nbd_stop_disk", {"nbd_device": nbd_device}, Shape.BOOLEAN)


def nbd_get_disks(*, nbd_device: str | None = None) -> Call[list[NbdDisk]]:
    return build_call("nbd_get_disks", {"nbd_device": nbd_device}, Shape.OBJECTS)
