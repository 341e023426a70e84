"""The methods of SPDK's JSON-RPC that kvdev knows: parameters, results, when they may be called, how long they take.

Not here: Python signatures (``calls``, generated from this table by ``generate``); sending (``client``, ``aio``).

A method is ``name(parameter:type, optional?:type) -> result; flags`` and a line ``-- note``. After a type:
``=VALUE`` is our default, ``!as=NAME`` the name in Python, ``!secret`` is never shown, ``!waited`` are
milliseconds that SPDK itself waits, ``!deprecated`` is known and not offered. Flags: ``startup`` (only before
the framework is initialised), ``any`` (before and after), ``long`` (can outlast an ordinary deadline).
"""

# Names and types of methods and parameters are those of SPDK's schema/schema.yaml (26.09.0-pre, commit
# 3230130e6a41), Copyright (c) 2025 Dell Inc, or its subsidiaries, under this licence:
#
#   SPDX-License-Identifier: BSD-3-Clause
#
#   Redistribution and use in source and binary forms, with or without modification, are permitted provided
#   that the following conditions are met:
#
#   1. Redistributions of source code must retain the above copyright notice, this list of conditions and the
#      following disclaimer.
#   2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and
#      the following disclaimer in the documentation and/or other materials provided with the distribution.
#   3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or
#      promote products derived from this software without specific prior written permission.
#
#   THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED
#   WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A
#   PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR
#   ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED
#   TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION)
#   HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING
#   NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE
#   POSSIBILITY OF SUCH DAMAGE.

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

ENUMS_TEXT = """
accel_error_inject_type = disable corrupt failure
accel_error_opcode = copy fill dualcast compare crc32c copy_crc32c compress decompress encrypt decrypt xor
    dif_verify dif_verify_copy dif_generate dif_generate_copy dix_generate dix_verify
bdev_delay_latency_type = avg_read p99_read avg_write p99_write
bdev_error_inject_error_type = failure pending corrupt_data nomem nvme_failure
bdev_error_inject_io_type = clear read write unmap flush all
bdev_nvme_cmd_type = admin io
bdev_nvme_data_direction = h2c c2h
bdev_nvme_multipath_mode = failover multipath disable
bdev_nvme_multipath_policy = active_passive active_active
bdev_nvme_multipath_selector = round_robin queue_depth
bdev_nvme_timeout_action = none reset abort
bdev_raid_level = raid0 0 raid1 1 raid5f 5f concat
bdev_raid_state = online configuring offline all
bdev_reset_stat_mode = all maxmin error none
dhchap_dhgroup = null ffdhe2048 ffdhe3072 ffdhe4096 ffdhe6144 ffdhe8192
dhchap_digest = sha256 sha384 sha512
fuses_feature = fcws
kill_signal = SIGINT SIGTERM SIGQUIT SIGHUP SIGKILL SIGUSR1
log_level = ERROR WARNING NOTICE INFO DEBUG
lvol_clear_method = default none unmap write_zeroes
lvs_clear_method = unmap write_zeroes none
nvme_ana_state = optimized non_optimized inaccessible
nvmf_discovery_filter = transport address svcid
nvmf_dup_host_policy = allow restrict_per_listener
oncs_feature = nvmcmps nvmdsmsv nvmwzsv reservs nvmcpys
"""

OBJECTS_TEXT = """
bdev_nvme_multipath_opts = policy?:bdev_nvme_multipath_policy, selector?:bdev_nvme_multipath_selector,
    min_io?:uint32
nvmf_listen_address = trtype:string=TCP, adrfam?:string, traddr:string, trsvcid?:string
nvmf_namespace = nsid?:uint32, bdev_name:string, nguid?:string, eui64?:string, uuid?:uuid,
    ptpl_file?:string, anagrpid?:uint32, no_auto_visible?:boolean, hide_metadata?:boolean!deprecated
nvmf_admin_cmd_passthru = identify_ctrlr?:boolean, identify_uuid_list?:boolean, get_log_page?:boolean,
    get_set_features?:boolean, sanitize?:boolean, security_send_recv?:boolean, fw_update?:boolean,
    nvme_mi?:boolean, vendor_specific?:boolean
"""

METHODS_TEXT = """
# Framework / log / notify / keyring / accel-fault
framework_start_init() -> bool; startup long
    -- End the startup state (--wait-for-rpc); RpcStateError when it has ended.
framework_wait_init() -> bool; any long
    -- Return when the framework is initialised.
framework_get_subsystems() -> list[FrameworkSubsystem]
framework_get_config(name:string, with_batches?:boolean) -> list[ConfigCall] | None
    -- The calls that would bring a subsystem to its present state; None where it keeps none.
framework_get_reactors() -> Reactors
thread_get_stats() -> ThreadStats
framework_set_scheduler(name:string, period?:uint64, load_limit?:uint8, core_limit?:uint8, core_busy?:uint8,
    mappings?:string) -> bool; any
framework_get_scheduler() -> Scheduler; any
framework_enable_cpumask_locks() -> bool; any
framework_disable_cpumask_locks() -> bool; any
framework_monitor_context_switch(enabled?:boolean) -> dict[str, bool]
rpc_get_methods(current?:boolean, include_aliases?:boolean) -> list[str]; any
    -- Names of the methods; with current those that may be called in the present state.
spdk_get_version() -> Version; any
spdk_kill_instance(sig_name:kill_signal) -> bool
notify_get_types() -> list[str]
notify_get_notifications(id?:uint64!as=first_id, max?:uint64!as=max_count) -> list[Notification]
    -- Ids count from 0 since the start of the application; old ones are forgotten.
keyring_file_add_key(name:string, path:string) -> bool
    -- The file's path is absolute; the file is the application's own with no bit for group and others.
keyring_file_remove_key(name:string) -> bool
keyring_get_keys() -> list[Key]
keyring_linux_set_options(enable?:boolean) -> bool; startup
log_get_flags() -> dict[str, bool]; any
log_set_flag(flag:string) -> bool; any
log_clear_flag(flag:string) -> bool; any
log_set_level(level:log_level) -> bool; any
log_get_level() -> str; any
log_set_print_level(level:log_level) -> bool; any
log_get_print_level() -> str; any
log_enable_timestamps(enabled:boolean) -> bool
accel_error_inject_error(opcode:accel_error_opcode, type:accel_error_inject_type, count?:uint64,
    interval?:uint64, errcode?:int32) -> bool
accel_assign_opc(opname:string, module:string) -> bool; startup
iobuf_set_options(small_pool_count?:uint64, large_pool_count?:uint64, small_bufsize?:uint32,
    large_bufsize?:uint32, enable_numa?:boolean) -> bool; startup
iobuf_get_stats() -> list[IobufModule]
sock_impl_get_options(impl_name:string) -> dict[str, Any]; any
sock_impl_set_options(impl_name:string, recv_buf_size?:uint32, send_buf_size?:uint32,
    enable_recv_pipe?:boolean, enable_quickack?:boolean, enable_placement_id?:uint32,
    enable_zerocopy_send_server?:boolean, enable_zerocopy_send_client?:boolean, zerocopy_threshold?:uint32,
    tls_version?:uint32, enable_ktls?:boolean) -> bool; startup
sock_set_default_impl(impl_name:string) -> bool; startup
sock_get_default_impl() -> dict[str, str]; any

# NVMe-oF target
nvmf_create_transport(trtype:string=TCP, tgt_name?:string, max_queue_depth?:uint16,
    max_io_qpairs_per_ctrlr?:uint16, in_capsule_data_size?:uint32, max_io_size?:uint32,
    io_unit_size?:uint32!deprecated, max_aq_depth?:uint32, num_shared_buffers?:uint32!deprecated,
    buf_cache_size?:uint32!deprecated, iobuf_small_cache_size?:uint32, iobuf_large_cache_size?:uint32,
    zcopy?:boolean, num_cqe?:int32, max_srq_depth?:uint32, no_srq?:boolean, c2h_success?:boolean,
    dif_insert_or_strip?:boolean, sock_priority?:uint32, acceptor_backlog?:int32, abort_timeout_sec?:uint32,
    no_wr_batching?:boolean, control_msg_num?:uint16, disable_mappable_bar0?:boolean,
    disable_adaptive_irq?:boolean, disable_shadow_doorbells?:boolean, acceptor_poll_rate?:uint32,
    ack_timeout?:uint32, data_wr_pool_size?:uint32, disable_command_passthru?:boolean, kas?:uint16,
    min_kato?:uint32, masked_oncs?:set(oncs_feature), masked_fuses?:set(fuses_feature)) -> bool; long
nvmf_get_subsystems(nqn?:string, tgt_name?:string) -> list[SubsystemInfo]
nvmf_create_subsystem(nqn:string, tgt_name?:string, serial_number?:string, model_number?:string,
    admin_label?:string, max_namespaces?:uint32, allow_any_host?:boolean, ana_reporting?:boolean,
    min_cntlid?:uint16, max_cntlid?:uint16, dmrsl?:uint32, wzsl?:uint8, passthrough?:boolean,
    enable_nssr?:boolean) -> bool; long
nvmf_delete_subsystem(nqn:string, tgt_name?:string) -> bool; long
nvmf_subsystem_add_listener(nqn:string, listen_address:nvmf_listen_address, tgt_name?:string,
    secure_channel?:boolean, ana_state?:nvme_ana_state, sock_impl?:string, numa_id?:int32) -> bool; long
nvmf_subsystem_remove_listener(nqn:string, listen_address:nvmf_listen_address, tgt_name?:string) -> bool;
    long
nvmf_subsystem_listener_set_ana_state(nqn:string, listen_address:nvmf_listen_address,
    ana_state:nvme_ana_state, tgt_name?:string, anagrpid?:uint32) -> bool; long
nvmf_subsystem_add_ns(nqn:string, namespace:nvmf_namespace, tgt_name?:string) -> int; long
    -- Add a namespace; returns its nsid.
nvmf_subsystem_remove_ns(nqn:string, nsid:uint32, tgt_name?:string) -> bool; long
nvmf_subsystem_set_ns_ana_group(nqn:string, nsid:uint32, anagrpid:uint32, tgt_name?:string) -> bool; long
nvmf_subsystem_add_host(nqn:string, host:string, tgt_name?:string, psk?:string!secret,
    dhchap_key?:string!secret, dhchap_ctrlr_key?:string!secret) -> bool
    -- Allow a host; psk and the dhchap keys are names in the target's keyring.
nvmf_subsystem_remove_host(nqn:string, host:string, tgt_name?:string, timeout_ms?:uint64!waited) -> bool;
    long
    -- Waits up to timeout_ms for the connections of the host to end.
nvmf_subsystem_allow_any_host(nqn:string, allow_any_host:boolean, tgt_name?:string) -> bool
nvmf_subsystem_set_keys(nqn:string, host:string, tgt_name?:string, dhchap_key?:string!secret,
    dhchap_ctrlr_key?:string!secret) -> bool
nvmf_subsystem_get_controllers(nqn:string, tgt_name?:string) -> list[ControllerInfo]; long
nvmf_subsystem_get_qpairs(nqn:string, tgt_name?:string) -> list[QpairInfo]; long
nvmf_subsystem_get_listeners(nqn:string, tgt_name?:string) -> list[Listener]
nvmf_ns_add_host(nqn:string, nsid:uint32, host:string, tgt_name?:string) -> bool; long
nvmf_ns_remove_host(nqn:string, nsid:uint32, host:string, tgt_name?:string) -> bool; long
nvmf_set_max_subsystems(max_subsystems:uint32) -> bool; startup
nvmf_discovery_add_referral(address:nvmf_listen_address, tgt_name?:string, secure_channel?:boolean,
    subnqn?:string) -> bool
nvmf_discovery_remove_referral(address:nvmf_listen_address, tgt_name?:string, subnqn?:string) -> bool
nvmf_discovery_get_referrals(tgt_name?:string) -> list[Referral]
nvmf_set_config(admin_cmd_passthru?:nvmf_admin_cmd_passthru, poll_groups_mask?:string,
    discovery_filter?:string!deprecated, discovery_filters?:set(nvmf_discovery_filter),
    dhchap_digests?:set(dhchap_digest), dhchap_dhgroups?:set(dhchap_dhgroup),
    dup_host_policy?:nvmf_dup_host_policy) -> bool; startup
nvmf_get_transports(tgt_name?:string, trtype?:string) -> list[TransportInfo]
nvmf_get_stats(tgt_name?:string) -> NvmfStats
nvmf_set_crdt(crdt1?:uint16, crdt2?:uint16, crdt3?:uint16) -> bool; startup
nvmf_publish_mdns_prr(tgt_name?:string) -> bool
nvmf_stop_mdns_prr(tgt_name?:string) -> bool

# bdev_nvme (initiator/multipath)
bdev_nvme_set_options(action_on_timeout?:bdev_nvme_timeout_action, timeout_us?:uint64,
    timeout_admin_us?:uint64, keep_alive_timeout_ms?:uint32, arbitration_burst?:uint32,
    low_priority_weight?:uint32, medium_priority_weight?:uint32, high_priority_weight?:uint32,
    nvme_adminq_poll_period_us?:uint64, nvme_ioq_poll_period_us?:uint64, io_queue_requests?:uint32,
    delay_cmd_submit?:boolean, transport_retry_count?:uint32, bdev_retry_count?:int32,
    transport_ack_timeout?:uint8, ctrlr_loss_timeout_sec?:int32, reconnect_delay_sec?:uint32,
    fast_io_fail_timeout_sec?:uint32, disable_auto_failback?:boolean, generate_uuids?:boolean,
    transport_tos?:uint8, nvme_error_stat?:boolean, rdma_srq_size?:uint32, io_path_stat?:boolean,
    allow_accel_sequence?:boolean, rdma_max_cq_size?:uint32, rdma_cm_event_timeout_ms?:uint16,
    dhchap_digests?:set(dhchap_digest), dhchap_dhgroups?:set(dhchap_dhgroup), rdma_umr_per_io?:boolean,
    tcp_connect_timeout_ms?:uint32, enable_flush?:boolean, multipath_opts?:bdev_nvme_multipath_opts) ->
    bool; any
    -- Refused (-1) once a controller is attached. Without enable_flush a flush ends at the initiator.
bdev_nvme_set_hotplug(enable:boolean, period_us?:uint64) -> bool
bdev_nvme_attach_controller(name:string, trtype:string=TCP, traddr:string, adrfam?:string, trsvcid?:string,
    priority?:string, subnqn?:string, hostnqn?:string, hostaddr?:string, hostsvcid?:string,
    prchk_reftag?:boolean, prchk_guard?:boolean, hdgst?:boolean, ddgst?:boolean,
    fabrics_connect_timeout_us?:uint64, multipath?:bdev_nvme_multipath_mode, num_io_queues?:uint32,
    ctrlr_loss_timeout_sec?:int32, reconnect_delay_sec?:uint32, fast_io_fail_timeout_sec?:uint32,
    psk?:string!secret, max_bdevs?:uint32, dhchap_key?:string!secret, dhchap_ctrlr_key?:string!secret,
    allow_unrecognized_csi?:boolean, multipath_opts?:bdev_nvme_multipath_opts,
    disable_sq_flow_control?:boolean) -> list[str]; long
    -- Connect, or add a path to a controller of that name (multipath); returns the names of its bdevs.
bdev_nvme_get_controllers(name?:string) -> list[NvmeController]
    -- Controllers with their paths and the state of each.
bdev_nvme_detach_controller(name:string, trtype?:string, traddr?:string, adrfam?:string, trsvcid?:string,
    subnqn?:string, hostaddr?:string, hostsvcid?:string) -> bool; long
    -- Remove a controller, or the one path that the other arguments name.
bdev_nvme_reset_controller(name:string, cntlid?:uint16) -> bool; long
bdev_nvme_enable_controller(name:string, cntlid?:uint16) -> bool; long
bdev_nvme_disable_controller(name:string, cntlid?:uint16) -> bool; long
bdev_nvme_start_discovery(name:string, trtype:string=TCP, traddr:string, adrfam?:string, trsvcid?:string,
    hostnqn?:string, wait_for_attach?:boolean, attach_timeout_ms?:uint64!waited,
    ctrlr_loss_timeout_sec?:int32, reconnect_delay_sec?:uint32, fast_io_fail_timeout_sec?:uint32) -> bool;
    long
    -- Attach all that a discovery controller names, now and later.
bdev_nvme_stop_discovery(name:string) -> bool; long
bdev_nvme_get_discovery_info() -> list[DiscoveryInfo]
bdev_nvme_get_io_paths(name?:string) -> IoPaths
bdev_nvme_set_preferred_path(name:string, cntlid:uint16) -> bool; long
bdev_nvme_set_multipath_policy(name:string, policy:bdev_nvme_multipath_policy,
    selector?:bdev_nvme_multipath_selector, rr_min_io?:uint32) -> bool; long
bdev_nvme_get_path_iostat(name:string) -> dict[str, Any]; long
bdev_nvme_cuse_register(name:string) -> bool
bdev_nvme_cuse_unregister(name:string) -> bool
bdev_nvme_set_keys(name:string, dhchap_key?:string!secret, dhchap_ctrlr_key?:string!secret) -> bool; long
bdev_nvme_apply_firmware(filename:string, bdev_name:string) -> Any; long
bdev_nvme_get_transport_statistics() -> dict[str, Any]
bdev_nvme_get_controller_health_info(name:string) -> NvmeHealth
bdev_nvme_opal_init(nvme_ctrlr_name:string, password:string!secret) -> bool
bdev_nvme_opal_revert(nvme_ctrlr_name:string, password:string!secret) -> bool
bdev_nvme_send_cmd(name:string, cmd_type:bdev_nvme_cmd_type, data_direction:bdev_nvme_data_direction,
    cmdbuf:string, data?:string, metadata?:string, data_len?:uint32, metadata_len?:uint32,
    timeout_ms?:uint32!waited) -> dict[str, Any]; long
bdev_nvme_add_error_injection(name:string, cmd_type:bdev_nvme_cmd_type, opc:uint8, do_not_submit?:boolean,
    timeout_in_us?:uint64, err_count?:uint32, sct?:uint8, sc?:uint8) -> bool
bdev_nvme_remove_error_injection(name:string, cmd_type:bdev_nvme_cmd_type, opc:uint8) -> bool
bdev_nvme_start_mdns_discovery(name:string, svcname:string, hostnqn?:string) -> bool
bdev_nvme_stop_mdns_discovery(name:string) -> bool
bdev_nvme_get_mdns_discovery_info() -> list[dict[str, Any]]

# bdev_raid
bdev_raid_set_options(process_window_size_kb?:uint32, process_max_bandwidth_mb_sec?:uint32) -> bool; any
bdev_raid_get_bdevs(category:bdev_raid_state=all) -> list[RaidInfo]
bdev_raid_create(name:string, raid_level:bdev_raid_level=raid0, base_bdevs:string[255], strip_size_kb?:uint32,
    uuid?:uuid, superblock?:boolean) -> bool; long
    -- Succeeds also while bases are missing: look at the state with bdev_raid_get_bdevs.
bdev_raid_delete(name:string, clear_sb?:boolean) -> bool; long
    -- The bases are free afterwards.
bdev_raid_add_base_bdev(raid_bdev:string, base_bdev:string) -> bool; long
bdev_raid_remove_base_bdev(name:string) -> bool; long

# bdev_lvol
bdev_lvol_create_lvstore(bdev_name:string, lvs_name:string, cluster_sz?:uint32,
    clear_method?:lvs_clear_method, num_md_pages_per_cluster_ratio?:uint32, md_page_size?:uint32) -> str;
    long
    -- Destroys what is on the bdev; returns the UUID of the store.
bdev_lvol_delete_lvstore(uuid?:string, lvs_name?:string) -> bool; long
bdev_lvol_get_lvstores(uuid?:string, lvs_name?:string) -> list[LvolStore]
bdev_lvol_rename_lvstore(old_name:string, new_name:string) -> bool
bdev_lvol_grow_lvstore(uuid?:string, lvs_name?:string) -> bool; long
bdev_lvol_create(lvol_name:string, size_in_mib:uint64, thin_provision?:boolean, uuid?:string,
    lvs_name?:string, clear_method?:lvol_clear_method) -> str; long
    -- Returns the UUID of the lvol; its bdev has the alias STORE/LVOL.
bdev_lvol_snapshot(lvol_name:string, snapshot_name:string) -> str; long
bdev_lvol_clone(snapshot_name:string, clone_name:string) -> str; long
bdev_lvol_clone_bdev(bdev:string, lvs_name:string, clone_name:string) -> str; long
bdev_lvol_rename(old_name:string, new_name:string) -> bool
bdev_lvol_resize(name:string, size_in_mib:uint64) -> bool; long
bdev_lvol_set_read_only(name:string) -> bool; long
bdev_lvol_delete(name:string) -> bool; long
bdev_lvol_inflate(name:string) -> bool; long
bdev_lvol_decouple_parent(name:string) -> bool; long
bdev_lvol_get_lvols(lvs_uuid?:string, lvs_name?:string) -> list[Lvol]
bdev_lvol_set_parent(lvol_name:string, parent_name:string) -> bool; long
bdev_lvol_set_parent_bdev(lvol_name:string, parent_name:string) -> bool; long
bdev_lvol_start_shallow_copy(src_lvol_name:string, dst_bdev_name:string) -> dict[str, int]
bdev_lvol_check_shallow_copy(operation_id:uint32) -> ShallowCopy

# Other bdevs
bdev_malloc_create(block_size:uint32, num_blocks:uint64, name?:string, uuid?:uuid,
    optimal_io_boundary?:uint32, md_size?:uint32, md_interleave?:boolean, dif_type?:int32,
    dif_is_head_of_md?:boolean, physical_block_size?:uint32, dif_pi_format?:uint32, numa_id?:int32) -> str;
    long
bdev_malloc_delete(name:string) -> bool; long
bdev_null_create(name:string, block_size:uint32, num_blocks:uint64, uuid?:uuid, physical_block_size?:uint32,
    md_size?:uint32, dif_type?:int32, dif_pi_format?:uint32, dif_is_head_of_md?:boolean,
    preferred_write_granularity?:uint32, preferred_write_alignment?:uint32, optimal_write_size?:uint32,
    preferred_unmap_granularity?:uint32, preferred_unmap_alignment?:uint32) -> str
bdev_null_delete(name:string) -> bool; long
bdev_null_resize(name:string, new_size:uint64) -> bool
bdev_aio_create(name:string, filename:string, block_size?:uint32, readonly?:boolean, fallocate?:boolean,
    uuid?:uuid, nowait?:boolean) -> str; long
bdev_aio_rescan(name:string) -> bool
bdev_aio_delete(name:string) -> bool; long
bdev_zone_block_create(name:string, base_bdev:string, zone_capacity:uint64, optimal_open_zones:uint64) ->
    str
bdev_zone_block_delete(name:string) -> bool
bdev_delay_create(name:string, base_bdev_name:string, avg_read_latency:uint64, p99_read_latency:uint64,
    avg_write_latency:uint64, p99_write_latency:uint64, uuid?:uuid) -> str
    -- A bdev that answers after the given times, in microseconds.
bdev_delay_delete(name:string) -> bool; long
bdev_delay_update_latency(delay_bdev_name:string, latency_type:bdev_delay_latency_type,
    latency_us:uint64) -> bool
bdev_error_create(base_name:string, uuid?:uuid) -> bool
    -- Put a filter that can inject errors on a bdev; its name is EE_ and the name of the bdev.
bdev_error_delete(name:string) -> bool; long
bdev_error_inject_error(name:string, io_type:bdev_error_inject_io_type,
    error_type:bdev_error_inject_error_type, nvme_sct?:uint32, nvme_sc?:uint32, num?:uint32,
    queue_depth?:uint64, corrupt_offset?:uint64, corrupt_value?:uint8) -> bool
    -- The next num operations of io_type fail so; clear takes all injections away.
bdev_error_resume_pending(name:string) -> bool
bdev_passthru_create(name:string, base_bdev_name:string, uuid?:uuid) -> str
bdev_passthru_delete(name:string) -> bool; long
bdev_split_create(base_bdev:string, split_count:uint32, split_size_mb?:uint64) -> list[str]
    -- Cut a bdev into equal parts, NAMEp0, NAMEp1, …; returns their names.
bdev_split_delete(base_bdev:string) -> bool; long
bdev_uring_create(filename:string, name:string, block_size?:uint32, uuid?:uuid) -> str
bdev_uring_rescan(name:string) -> bool
bdev_uring_delete(name:string) -> bool; long

# bdev core, QoS, iostat, histogram
bdev_set_options(bdev_io_pool_size?:uint32, bdev_io_cache_size?:uint32, bdev_auto_examine?:boolean,
    iobuf_small_cache_size?:uint32, iobuf_large_cache_size?:uint32) -> bool; startup
bdev_get_bdevs(name?:string, timeout?:uint64!waited!as=timeout_ms) -> list[BdevInfo]; long
    -- All bdevs, or the one of that name; waits timeout_ms for it to appear (-110; without a wait -19).
bdev_examine(name:string) -> bool; long
bdev_wait_for_examine() -> bool; long
bdev_set_qos_limit(name:string, rw_ios_per_sec?:uint64, rw_mbytes_per_sec?:uint64, r_mbytes_per_sec?:uint64,
    w_mbytes_per_sec?:uint64) -> bool; long
    -- Limits of 0 are none; those that are left out stay.
bdev_set_qd_sampling_period(name:string, period:uint64) -> bool
bdev_get_iostat(names?:string[1024], per_channel?:boolean, reset_mode?:bdev_reset_stat_mode) -> BdevIoStat;
    long
bdev_reset_iostat(name?:string, mode?:bdev_reset_stat_mode) -> bool
bdev_enable_histogram(name:string, enable:boolean, opc?:string, granularity?:uint8, min_nsec?:uint64,
    max_nsec?:uint64) -> bool; long
bdev_get_histogram(name:string) -> Histogram; long
bdev_get_histogram_borders(name:string, borders:uint64[256]) -> dict[str, Any]; long

# vhost / ublk / nbd
vhost_controller_set_coalescing(ctrlr:string, delay_base_us:uint32, iops_threshold:uint32) -> bool
vhost_create_scsi_controller(ctrlr:string, cpumask?:string, delay?:boolean) -> bool
vhost_start_scsi_controller(ctrlr:string) -> bool
vhost_scsi_controller_add_target(ctrlr:string, scsi_target_num:int32, bdev_name:string) -> int
vhost_scsi_controller_remove_target(ctrlr:string, scsi_target_num:uint32) -> bool; long
virtio_blk_create_transport(name:string) -> bool
virtio_blk_get_transports(name?:string) -> list[VirtioBlkTransport]
vhost_create_blk_controller(ctrlr:string, dev_name:string, readonly?:boolean, packed_ring?:boolean,
    cpumask?:string, transport?:string) -> bool
    -- Serve a bdev to a vhost-user front end; the socket is in SPDK's vhost directory.
vhost_get_controllers(name?:string) -> list[VhostController]
vhost_delete_controller(ctrlr:string) -> bool; long
ublk_create_target(cpumask?:string, disable_user_copy?:boolean) -> bool
ublk_destroy_target() -> bool; long
ublk_start_disk(bdev_name:string, ublk_id:uint32, queue_depth?:uint32, num_queues?:uint32) -> int; long
ublk_recover_disk(bdev_name:string, ublk_id:uint32) -> int; long
ublk_stop_disk(ublk_id:uint32) -> bool; long
ublk_get_disks(ublk_id?:uint32) -> list[UblkDisk]
nbd_start_disk(bdev_name:string, nbd_device?:string) -> str; long
nbd_stop_disk(nbd_device:string) -> bool; long
nbd_get_disks(nbd_device?:string) -> list[NbdDisk]
"""

# What SPDK's own parser takes; beyond a JSON number's 64 bits there is nothing.
INTEGERS: Mapping[str, tuple[int, int]] = {
    "uint8": (0, 0xFF),
    "uint16": (0, 0xFFFF),
    "uint32": (0, 0xFFFFFFFF),
    "uint64": (0, 0xFFFFFFFFFFFFFFFF),
    "int32": (-(1 << 31), (1 << 31) - 1),
}
SECRET_NAMES = frozenset(
    {"psk", "key", "key2", "hex_key", "dhchap_key", "dhchap_ctrlr_key", "password", "secret"}
)
"""Never shown, whatever method they belong to, also those that this table does not have."""

_ENTRY = re.compile(
    r"(?P<name>\w+)\((?P<params>[^)]*(?:\([^)]*\)[^)]*)*)\) -> (?P<result>[^;]+?)(?:; (?P<flags>[\w ]+))?"
    r"(?: -- (?P<note>.+))?",
    re.DOTALL,
)
_PARAM = re.compile(
    r"(?P<name>\w+)(?P<optional>\??):(?P<set>set\()?(?P<type>\w+)\)?(?:\[(?P<limit>\d+)\])?"
    r"(?:=(?P<default>\w+))?(?P<marks>(?:!\w+(?:=\w+)?)*)"
)


@dataclass(frozen=True)
class Param:
    """One parameter. ``element_count_limit`` above 0: an array of ``type``; ``is_set``: an array of enum names."""

    name: str
    type: str
    is_required: bool
    element_count_limit: int = 0
    is_set: bool = False
    default: str | None = None
    python_name: str = ""
    is_secret: bool = False
    is_waited: bool = False
    is_deprecated: bool = False


@dataclass(frozen=True)
class Method:
    """One method; ``result`` is its Python type."""

    name: str
    params: tuple[Param, ...]
    result: str
    is_startup_only: bool = False
    is_any_state: bool = False
    is_long: bool = False
    note: str = ""

    def param(self, name: str) -> Param | None:
        return next((each for each in self.params if each.name == name), None)


def _entries(text: str) -> Iterator[str]:
    """Joined continuation lines, without comments."""
    entry = ""
    for line in text.strip().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith(" "):
            entry += " " + line.strip()
        else:
            if entry:
                yield entry
            entry = line.strip()
    if entry:
        yield entry


def _parse_param(text: str) -> Param:
    match = _PARAM.fullmatch(text.strip())
    assert match is not None, f"table: parameter {text!r}"
    marks: dict[str, str] = dict(mark.partition("=")[::2] for mark in match["marks"].split("!") if mark)
    return Param(
        name=match["name"],
        type=match["type"],
        is_required=not match["optional"],
        element_count_limit=int(match["limit"] or 0),
        is_set=match["set"] is not None,
        default=match["default"],
        python_name=marks.get("as") or match["name"],
        is_secret="secret" in marks,
        is_waited="waited" in marks,
        is_deprecated="deprecated" in marks,
    )


def _parse_params(text: str) -> tuple[Param, ...]:
    return tuple(_parse_param(each) for each in text.split(",") if each.strip())


def _parse_method(entry: str) -> Method:
    match = _ENTRY.fullmatch(entry)
    assert match is not None, f"table: method {entry!r}"
    flags = (match["flags"] or "").split()
    return Method(
        name=match["name"],
        params=_parse_params(match["params"]),
        result=match["result"],
        is_startup_only="startup" in flags,
        is_any_state="any" in flags,
        is_long="long" in flags,
        note=match["note"] or "",
    )


@functools.cache
def enums() -> Mapping[str, tuple[str, ...]]:
    """Name of an enum -> its values."""
    pairs = (entry.split(" = ") for entry in _entries(ENUMS_TEXT))
    return MappingProxyType({name: tuple(values.split()) for name, values in pairs})


@functools.cache
def objects() -> Mapping[str, tuple[Param, ...]]:
    """Name of an object type -> its fields."""
    pairs = (entry.split(" = ", 1) for entry in _entries(OBJECTS_TEXT))
    return MappingProxyType({name: _parse_params(fields) for name, fields in pairs})


@functools.cache
def methods() -> Mapping[str, Method]:
    """All methods by name."""
    return MappingProxyType({each.name: each for each in map(_parse_method, _entries(METHODS_TEXT))})
