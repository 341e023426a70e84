"""Methods of SPDK that this target has not, each with the reason that its refusal gives.

Not here: the methods it has (``rpc_methods``, ``rpc_stack``, ``rpc_host``).
"""

from __future__ import annotations

from collections.abc import Mapping

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "lvols are mappings of whole clusters and share none",
        (
            "bdev_lvol_check_shallow_copy",
            "bdev_lvol_clone_bdev",
            "bdev_lvol_set_parent",
            "bdev_lvol_set_parent_bdev",
            "bdev_lvol_start_shallow_copy",
        ),
    ),
    (
        "this target is no initiator: attach controllers with an SPDK, or open tcp: devices",
        (
            "bdev_nvme_add_error_injection",
            "bdev_nvme_get_mdns_discovery_info",
            "bdev_nvme_get_path_iostat",
            "bdev_nvme_remove_error_injection",
            "bdev_nvme_send_cmd",
            "bdev_nvme_set_keys",
            "bdev_nvme_set_multipath_policy",
            "bdev_nvme_set_preferred_path",
            "bdev_nvme_start_mdns_discovery",
            "bdev_nvme_stop_mdns_discovery",
        ),
    ),
    (
        "there are no local NVMe devices here",
        (
            "bdev_nvme_apply_firmware",
            "bdev_nvme_cuse_register",
            "bdev_nvme_cuse_unregister",
            "bdev_nvme_opal_init",
            "bdev_nvme_opal_revert",
        ),
    ),
    (
        "raid0 is the only level, and it loses nothing it could rebuild from",
        ("bdev_raid_add_base_bdev", "bdev_raid_remove_base_bdev", "bdev_raid_set_options"),
    ),
    ("a file's size is read when its bdev is made", ("bdev_aio_rescan", "bdev_uring_rescan")),
    ("bdevs are examined when they are made", ("bdev_examine",)),
    (
        "there are no zoned and no passthru bdevs",
        (
            "bdev_passthru_create",
            "bdev_passthru_delete",
            "bdev_zone_block_create",
            "bdev_zone_block_delete",
        ),
    ),
    ("queue depths are not sampled", ("bdev_set_qd_sampling_period",)),
    (
        "there is no accel framework: checksums are computed in the core",
        ("accel_assign_opc", "accel_error_inject_error"),
    ),
    (
        "there are no reactors to place: the kernel schedules its threads",
        (
            "framework_disable_cpumask_locks",
            "framework_enable_cpumask_locks",
            "framework_monitor_context_switch",
            "framework_set_scheduler",
        ),
    ),
    ("keys stand in files", ("keyring_linux_set_options",)),
    ("log lines have their time from what reads them", ("log_enable_timestamps",)),
    ("a process ends by a signal", ("spdk_kill_instance",)),
    (
        "it drives no kernel devices",
        (
            "nbd_stop_disk",
            "ublk_destroy_target",
            "ublk_recover_disk",
            "ublk_start_disk",
            "ublk_stop_disk",
        ),
    ),
    (
        "it serves no vhost-user sockets: use an SPDK",
        (
            "vhost_create_scsi_controller",
            "vhost_scsi_controller_add_target",
            "vhost_scsi_controller_remove_target",
            "vhost_start_scsi_controller",
            "virtio_blk_create_transport",
        ),
    ),
    (
        "its discovery log names its own subsystems only",
        (
            "nvmf_discovery_add_referral",
            "nvmf_discovery_get_referrals",
            "nvmf_discovery_remove_referral",
            "nvmf_publish_mdns_prr",
            "nvmf_stop_mdns_prr",
        ),
    ),
    (
        "every namespace of a subsystem is visible to each of its hosts",
        ("nvmf_ns_add_host", "nvmf_ns_remove_host"),
    ),
    (
        "a namespace's ANA group is given when it is added",
        ("nvmf_subsystem_set_ns_ana_group",),
    ),
    ("it has no DPDK, and writes no files for its callers", ("env_dpdk_get_mem_stats",)),
)

ABSENT: Mapping[str, str] = {name: reason for reason, names in _GROUPS for name in names}
"""Method -> why it is not there."""
