"""What SPDK's methods answer, as TypedDicts with its own names.

Keys are as SPDK 26.09 writes them; which of them are there depends on the release and on the object, and a
later release may add more, so read with ``get`` where absence is possible.
"""

from __future__ import annotations

from typing import Any, TypedDict


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
    md_size: int
    preferred_write_alignment: int
    preferred_write_granularity: int
    optimal_write_size: int
    preferred_unmap_alignment: int
    preferred_unmap_granularity: int
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


class LwThread(TypedDict, total=False):
    name: str
    id: int
    cpumask: str
    busy: int
    idle: int
    elapsed: int
    active_pollers_count: int
    timed_pollers_count: int
    paused_pollers_count: int


class ThreadStats(TypedDict):
    tick_rate: int
    threads: list[LwThread]


class Scheduler(TypedDict, total=False):
    scheduler_name: str
    scheduler_period: int
    isolated_core_mask: str
    scheduling_core: int
    governor_name: str


class IobufPool(TypedDict, total=False):
    cache: int
    main: int
    retry: int
    cache_size: int


class IobufModule(TypedDict, total=False):
    module: str
    small_pool: IobufPool
    large_pool: IobufPool


class Key(TypedDict, total=False):
    """A key of the keyring, never its bytes."""

    name: str
    module: str
    removed: bool
    probed: bool
    refcnt: int
    path: str


class Referral(TypedDict, total=False):
    address: ListenAddress
    secure_channel: bool
    subnqn: str


class TransportId(TypedDict, total=False):
    trtype: str
    adrfam: str
    traddr: str
    trsvcid: str
    subnqn: str


class NvmeHost(TypedDict, total=False):
    nqn: str
    addr: str
    svcid: str
    no_shn_notification: bool


class NvmePath(TypedDict, total=False):
    """One path of a controller; ``state`` is enabled, disabled, resetting, reconnect_is_delayed, failed, …"""

    state: str
    trid: TransportId
    alternate_trids: list[TransportId]
    cntlid: int
    host: NvmeHost
    numa_id: int


class NvmeController(TypedDict, total=False):
    name: str
    ctrlrs: list[NvmePath]


class DiscoveryReferral(TypedDict, total=False):
    trid: TransportId


class DiscoveryInfo(TypedDict, total=False):
    name: str
    trid: TransportId
    referrals: list[DiscoveryReferral]


class IoPath(TypedDict, total=False):
    bdev_name: str
    cntlid: int
    current: bool
    connected: bool
    accessible: bool
    transport: TransportId


class IoPathGroup(TypedDict, total=False):
    thread: str
    io_paths: list[IoPath]


class IoPaths(TypedDict):
    poll_groups: list[IoPathGroup]


class NvmeHealth(TypedDict, total=False):
    model_number: str
    serial_number: str
    firmware_revision: str
    traddr: str
    critical_warning: int
    temperature_celsius: int
    available_spare_percentage: int
    available_spare_threshold_percentage: int
    percentage_used: int
    data_units_read: int
    data_units_written: int
    host_read_commands: int
    host_write_commands: int
    controller_busy_time: int
    power_cycles: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int
    num_err_log_entries: int
    warning_temperature_time_minutes: int
    critical_composite_temperature_time_minutes: int


class LvolStore(TypedDict, total=False):
    uuid: str
    name: str
    base_bdev: str
    total_data_clusters: int
    free_clusters: int
    block_size: int
    cluster_size: int
    max_growable_size: int


class LvolStoreName(TypedDict):
    name: str
    uuid: str


class Lvol(TypedDict, total=False):
    alias: str
    uuid: str
    name: str
    is_thin_provisioned: bool
    is_snapshot: bool
    is_clone: bool
    is_esnap_clone: bool
    is_degraded: bool
    num_allocated_clusters: int
    lvs: LvolStoreName


class ShallowCopy(TypedDict, total=False):
    state: str
    copied_clusters: int
    total_clusters: int
    error: str


class Histogram(TypedDict, total=False):
    """``histogram`` is base64 of one 64-bit count per bucket, little endian, range after range."""

    histogram: str
    granularity: int
    min_range: int
    max_range: int
    tsc_rate: int


class VhostSession(TypedDict, total=False):
    vid: int
    id: int
    name: str
    started: bool
    max_queues: int
    inflight_task_cnt: int


class VhostBlock(TypedDict, total=False):
    readonly: bool
    bdev: str | None
    transport: str


class VhostBackend(TypedDict, total=False):
    block: VhostBlock
    scsi: list[dict[str, Any]]


class VhostController(TypedDict, total=False):
    ctrlr: str
    cpumask: str
    delay_base_us: int
    iops_threshold: int
    socket: str
    sessions: list[VhostSession]
    backend_specific: VhostBackend


class VirtioBlkTransport(TypedDict, total=False):
    name: str


class UblkDisk(TypedDict, total=False):
    ublk_device: str
    id: int
    queue_depth: int
    num_queues: int
    bdev_name: str


class NbdDisk(TypedDict, total=False):
    nbd_device: str
    bdev_name: str
