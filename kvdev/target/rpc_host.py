"""RPC methods of the host side and of the process: controllers of other targets, vhost, ublk, nbd, keys, threads.

Not here: the rules (``host_side``); the other methods (``rpc_methods``).
Trust: parameters are ``untrusted``; raises only SpdkError for bad input.
Threads: one, the RPC server's loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from kvdev.target import model as m
from kvdev.target.host_side import (
    Keyring,
    NvmeController,
    NvmeHost,
    NvmePath,
    VhostController,
    VhostControllers,
)
from kvdev.target.rpc_params import fields_of
from kvdev.target.rpc_table import TICK_RATE_HZ, Method, Result, flat, no_params, true_after
from spdk_rpc.errors import ERROR_INTERNAL, ERROR_INVALID_PARAMS

_SOCK_IMPL = "posix"
_ADDRESS_NAMES = ("trtype", "adrfam", "traddr", "trsvcid", "subnqn")
_TRADDR_FAMILIES = {"ipv4": "IPv4", "ipv6": "IPv6"}


class HostMethods:
    """The rows of the table for one model."""

    def __init__(self, model: m.TargetModel) -> None:
        self._model = model
        self.host = NvmeHost(model)
        self.vhost = VhostControllers(model)
        self.keyring = Keyring()

    def table(self) -> dict[str, Method]:
        return {
            **self._nvme_methods(),
            **self._vhost_methods(),
            **self._kernel_methods(),
            **self._process_methods(),
        }

    # Controllers of other targets.

    def _nvme_methods(self) -> dict[str, Method]:
        def row(name: str, handler: Any) -> tuple[str, Method]:
            return name, Method(handler, fields_of(name))

        host = self.host
        return dict(
            (
                row("bdev_nvme_set_options", self._bdev_nvme_set_options),
                row("bdev_nvme_set_hotplug", self._bdev_nvme_set_hotplug),
                row("bdev_nvme_attach_controller", self._bdev_nvme_attach_controller),
                row("bdev_nvme_get_controllers", self._bdev_nvme_get_controllers),
                row("bdev_nvme_detach_controller", self._bdev_nvme_detach_controller),
                row("bdev_nvme_reset_controller", self._bdev_nvme_reset_controller),
                row("bdev_nvme_enable_controller", self._enabler(True)),
                row("bdev_nvme_disable_controller", self._enabler(False)),
                row("bdev_nvme_start_discovery", self._bdev_nvme_start_discovery),
                row("bdev_nvme_stop_discovery", true_after(host.stop_discovery)),
                row("bdev_nvme_get_discovery_info", self._bdev_nvme_get_discovery_info),
                row("bdev_nvme_get_io_paths", self._bdev_nvme_get_io_paths),
                row("bdev_nvme_get_transport_statistics", lambda: {"poll_groups": []}),
                row("bdev_nvme_get_controller_health_info", self._bdev_nvme_get_controller_health_info),
            )
        )

    def _bdev_nvme_set_options(self, **options: Any) -> Result:
        self.host.set_options(options)
        return True

    def _bdev_nvme_set_hotplug(self, enable: bool, period_us: int = 0) -> Result:
        del period_us
        if enable:
            raise m.invalid_params("enable: there are no PCIe devices here")
        return True

    def _bdev_nvme_attach_controller(
        self,
        name: str,
        hostnqn: str | None = None,
        multipath: str = "multipath",
        psk: str | None = None,
        dhchap_key: str | None = None,
        dhchap_ctrlr_key: str | None = None,
        **parameters: Any,
    ) -> Result:
        for field, key in (("psk", psk), ("dhchap_key", dhchap_key), ("dhchap_ctrlr_key", dhchap_ctrlr_key)):
            if key is not None and key not in self.keyring.keys:
                raise m.errno_error(errno.ENOKEY, f"{field}: no such key: call keyring_file_add_key first")
        remote = _remote_id(parameters)
        options = {name: value for name, value in parameters.items() if name not in _ADDRESS_NAMES}
        if not options.get("allow_unrecognized_csi"):
            options.pop("allow_unrecognized_csi", None)
        return self.host.attach(name, remote, host_nqn=hostnqn, mode=multipath, options=options)

    def _bdev_nvme_detach_controller(self, name: str, **address: str) -> Result:
        named = {each: value for each, value in address.items() if each in _ADDRESS_NAMES}
        self.host.detach(name, named)
        return True

    def _bdev_nvme_reset_controller(self, name: str, cntlid: int | None = None) -> Result:
        del cntlid  # All its paths are connected anew.
        self.host.reset(name)
        return True

    def _enabler(self, is_enabled: bool) -> Any:
        def change(name: str, cntlid: int | None = None) -> Result:
            del cntlid
            self.host.set_enabled(name, is_enabled)
            return True

        return change

    def _bdev_nvme_get_controllers(self, name: str | None = None) -> Result:
        controllers = list(self.host.controllers.values()) if name is None else [self.host.find(name)]
        return [
            {"name": each.name, "ctrlrs": [_path_json(path) for path in each.paths]} for each in controllers
        ]

    def _bdev_nvme_start_discovery(
        self, name: str, hostnqn: str | None = None, wait_for_attach: bool = False, **parameters: Any
    ) -> Result:
        del wait_for_attach  # Attaching is done when the call returns.
        self.host.start_discovery(name, _remote_id({"subnqn": "", **parameters}), host_nqn=hostnqn)
        return True

    def _bdev_nvme_get_discovery_info(self) -> Result:
        return [
            {
                "name": service.name,
                "trid": _trid_json(service.remote),
                "referrals": [{"trid": _trid_json(service.remote)}],
            }
            for service in self.host.discoveries.values()
        ]

    def _bdev_nvme_get_io_paths(self, name: str | None = None) -> Result:
        if name is not None:
            self._model.find_bdev(name)
        return {"poll_groups": []}

    def _bdev_nvme_get_controller_health_info(self, name: str) -> Result:
        controller = self.host.controllers.get(name)
        if controller is None:
            raise m.SpdkError(ERROR_INTERNAL, f"{os.strerror(errno.ENODEV)}: controller {name!r}")
        path = controller.paths[0]
        return {
            "model_number": path.controller.model_number,
            "serial_number": path.controller.serial_number,
            "firmware_revision": "26.09",
            "traddr": path.remote.traddr,
            "critical_warning": 0,
            # SPDK subtracts 273 from the 0 Kelvin of a target without a sensor, in 64 bits.
            "temperature_celsius": (1 << 64) - 273,
            **dict.fromkeys(_HEALTH_COUNTERS, 0),
        }

    def nvme_config(self) -> list[dict[str, Any]]:
        """The calls that put options and controllers back."""
        calls: list[dict[str, Any]] = [{"method": "bdev_nvme_set_options", "params": dict(self.host.options)}]
        discovered = {name for each in self.host.discoveries.values() for name in each.controller_names}
        for controller in self.host.controllers.values():
            if controller.name not in discovered:
                calls += [_attach_call(controller, path) for path in controller.paths]
        for service in self.host.discoveries.values():
            params = {"name": service.name, **_trid_json(service.remote)}
            del params["subnqn"]
            calls.append({"method": "bdev_nvme_start_discovery", "params": params})
        return calls

    def nvme_driver_specific(self, bdev: m.Bdev) -> Result:
        """What bdev_get_bdevs tells of a namespace of a remote controller."""
        controller = self.host.controllers.get(bdev.controller_name)
        paths = controller.paths if controller is not None else []
        described = [
            {
                "trid": _trid_json(path.remote),
                "ctrlr_data": {
                    "cntlid": path.controller.cntlid,
                    "vendor_id": "0x0000",
                    "model_number": path.controller.model_number,
                    "serial_number": path.controller.serial_number,
                    "firmware_revision": "26.09",
                    "subnqn": path.remote.subnqn,
                    "oacs": {"security": 0, "format": 0, "firmware": 0, "ns_manage": 0},
                    "multi_ctrlr": True,
                    "ana_reporting": False,
                },
                "vs": {"nvme_version": "2.0"},
                "ns_data": {"id": bdev.remote_nsid, "can_share": True},
            }
            for path in paths
        ]
        return {"nvme": described, "mp_policy": "active_passive"}

    # vhost.

    def _vhost_methods(self) -> dict[str, Method]:
        strerror = os.strerror(errno.EINVAL)
        return {
            "vhost_create_blk_controller": flat(
                self._vhost_create_blk_controller, fields_of("vhost_create_blk_controller"), strerror
            ),
            "vhost_get_controllers": Method(
                self._vhost_get_controllers, fields_of("vhost_get_controllers"), refusal_text=strerror
            ),
            "vhost_delete_controller": flat(
                true_after(self.vhost.delete), fields_of("vhost_delete_controller"), strerror
            ),
            "vhost_controller_set_coalescing": flat(
                true_after(self.vhost.set_coalescing), fields_of("vhost_controller_set_coalescing"), strerror
            ),
            "virtio_blk_get_transports": flat(
                self._virtio_blk_get_transports, fields_of("virtio_blk_get_transports"), strerror
            ),
        }

    def _vhost_create_blk_controller(
        self,
        ctrlr: str,
        dev_name: str,
        readonly: bool = False,
        packed_ring: bool = False,
        cpumask: str = "",
        transport: str = "vhost_user_blk",
    ) -> Result:
        if transport != "vhost_user_blk":
            raise m.SpdkError(ERROR_INVALID_PARAMS, f"{os.strerror(errno.EINVAL)}: transport: {transport!r}")
        self.vhost.create_blk(
            ctrlr, bdev_name=dev_name, is_readonly=readonly, cpumask=cpumask or "0x1", is_packed=packed_ring
        )
        return True

    def _vhost_get_controllers(self, name: str | None = None) -> Result:
        if name is None:
            return [self._vhost_json(each) for each in self.vhost.controllers.values()]
        return [self._vhost_json(self.vhost.find(name, ERROR_INTERNAL))]

    def _vhost_json(self, controller: VhostController) -> Result:
        backend = {
            "readonly": controller.is_readonly,
            "bdev": controller.bdev_name,
            "transport": "vhost_user_blk",
        }
        return {
            "ctrlr": controller.name,
            "cpumask": controller.cpumask,
            "delay_base_us": controller.delay_base_us,
            "iops_threshold": controller.iops_threshold,
            "socket": f"{self.vhost.backend().folder}/{controller.name}",
            "sessions": [],
            "backend_specific": {"block": backend},
        }

    def _virtio_blk_get_transports(self, name: str | None = None) -> Result:
        is_there = self._model.backend.vhost is not None and name in (None, "vhost_user_blk")
        if name is not None and not is_there:
            raise m.errno_error(errno.ENODEV, f"transport {name!r}")
        return [{"name": "vhost_user_blk"}] if is_there else []

    def vhost_config(self) -> list[dict[str, Any]]:
        return [
            {
                "method": "vhost_create_blk_controller",
                "params": {
                    "ctrlr": each.name,
                    "dev_name": each.bdev_name,
                    "cpumask": each.cpumask,
                    "readonly": each.is_readonly,
                    "transport": "vhost_user_blk",
                },
            }
            for each in self.vhost.controllers.values()
            if each.bdev_name is not None
        ]

    # ublk and nbd: devices of a kernel this process does not drive.

    def _kernel_methods(self) -> dict[str, Method]:
        return {
            "ublk_create_target": Method(
                self._refuse_ublk, fields_of("ublk_create_target"), refusal_text="Invalid parameters"
            ),
            "ublk_get_disks": Method(self._ublk_get_disks, fields_of("ublk_get_disks")),
            "nbd_get_disks": Method(self._nbd_get_disks, fields_of("nbd_get_disks")),
            "nbd_start_disk": Method(self._nbd_start_disk, fields_of("nbd_start_disk")),
        }

    def _refuse_ublk(self, **unused: Any) -> Result:
        del unused
        # What SPDK says where the kernel has no ublk driver.
        reason = "this target drives no ublk devices"
        raise m.SpdkError(ERROR_INTERNAL, f"{os.strerror(errno.ENOENT)}: {reason}")

    def _ublk_get_disks(self, ublk_id: int | None = None) -> Result:
        if ublk_id is not None:
            raise m.errno_error(errno.ENODEV, f"ublk disk {ublk_id}")
        return []

    def _nbd_get_disks(self, nbd_device: str | None = None) -> Result:
        if nbd_device is not None:
            raise m.errno_error(errno.ENODEV, f"nbd device {nbd_device!r}")
        return []

    def _nbd_start_disk(self, bdev_name: str, nbd_device: str = "") -> Result:
        bdev = self._model.bdev(bdev_name)
        if bdev is None:
            raise m.SpdkError(-errno.ENODEV, "nbd device not found")
        if self._model.is_claimed(bdev.name):
            raise m.errno_error(errno.EPERM, f"bdev {bdev_name!r} is in use")
        raise m.errno_error(
            errno.EOPNOTSUPP, f"{nbd_device or 'nbd_device'}: this target drives no nbd devices"
        )

    # Keys, threads, buffers, sockets.

    def _process_methods(self) -> dict[str, Method]:
        strerror = os.strerror(errno.EINVAL)
        return {
            "keyring_file_add_key": Method(
                true_after(self.keyring.add),
                fields_of("keyring_file_add_key"),
                refusal_code=ERROR_INVALID_PARAMS,
                refusal_text=strerror,
                is_relaxed=True,
            ),
            "keyring_file_remove_key": flat(
                true_after(self._keyring_remove_key), fields_of("keyring_file_remove_key"), strerror
            ),
            "keyring_get_keys": Method(self._keyring_get_keys, {}),
            "thread_get_stats": no_params(self._thread_get_stats, "'thread_get_stats' requires no arguments"),
            "iobuf_get_stats": no_params(list, "iobuf_get_stats requires no parameters"),
            "sock_get_default_impl": no_params(
                lambda: {"impl_name": _SOCK_IMPL}, "sock_get_default_impl requires no parameters"
            ),
            "sock_impl_get_options": flat(self._sock_impl_get_options, fields_of("sock_impl_get_options")),
            "framework_get_scheduler": no_params(
                self._framework_get_scheduler, "'framework_get_scheduler' requires no arguments"
            ),
        }

    def _keyring_remove_key(self, name: str) -> None:
        """Remove a key that nothing names: what names one could not be configured again at a restart."""
        for subsystem in self._model.subsystems():
            for host, keys in subsystem.host_keys.items():
                if name in keys.names().values():
                    raise m.errno_error(errno.EBUSY, f"key {name!r} is used by {host} of {subsystem.nqn}")
        self.keyring.remove(name)

    def _keyring_get_keys(self) -> Result:
        return [
            {
                "name": key.name,
                "module": "keyring_file",
                "removed": False,
                "probed": False,
                "refcnt": 1,
                "path": key.path,
            }
            for key in self.keyring.keys.values()
        ]

    def keyring_config(self) -> list[dict[str, Any]]:
        return [
            {"method": "keyring_file_add_key", "params": {"name": key.name, "path": key.path}}
            for key in self.keyring.keys.values()
        ]

    def _thread_get_stats(self) -> Result:
        threads = [
            {
                "name": group.name,
                "id": index + 1,
                "cpumask": f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}",
                "busy": group.busy_ns,
                "idle": group.idle_ns,
                "active_pollers_count": 0,
                "timed_pollers_count": 0,
                "paused_pollers_count": 0,
            }
            for index, group in enumerate(self._model.poll_groups())
        ]
        return {"tick_rate": TICK_RATE_HZ, "threads": threads}

    def _sock_impl_get_options(self, impl_name: str) -> Result:
        if impl_name != _SOCK_IMPL:
            raise m.SpdkError(ERROR_INVALID_PARAMS, f"Invalid parameters: impl_name: expected {_SOCK_IMPL}")
        return {
            # The kernel sizes the buffers by itself.
            "recv_buf_size": 0,
            "send_buf_size": 0,
            "enable_recv_pipe": False,
            "enable_quickack": False,
            "enable_placement_id": 0,
            "enable_zerocopy_send_server": False,
            "enable_zerocopy_send_client": False,
            "zerocopy_threshold": 0,
            "tls_version": 0,
            "enable_ktls": False,
        }

    def _framework_get_scheduler(self) -> Result:
        return {
            "scheduler_name": "static",
            "scheduler_period": 0,
            "isolated_core_mask": "0",
            "scheduling_core": 0,
        }


_HEALTH_COUNTERS = (
    "available_spare_percentage",
    "available_spare_threshold_percentage",
    "percentage_used",
    "data_units_read",
    "data_units_written",
    "host_read_commands",
    "host_write_commands",
    "controller_busy_time",
    "power_cycles",
    "power_on_hours",
    "unsafe_shutdowns",
    "media_errors",
    "num_err_log_entries",
    "warning_temperature_time_minutes",
    "critical_composite_temperature_time_minutes",
)


def _remote_id(parameters: Mapping[str, Any]) -> m.RemoteId:
    """The address among the parameters, in SPDK's spelling."""
    trtype = parameters["trtype"].upper()
    if trtype != "TCP":
        raise m.errno_error(errno.EINVAL, f"trtype: expected TCP, got {parameters['trtype']!r}")
    traddr = parameters["traddr"]
    family = parameters.get("adrfam") or ("ipv6" if ":" in traddr else "ipv4")
    adrfam = _TRADDR_FAMILIES.get(family.lower())
    if adrfam is None:
        raise m.errno_error(errno.EINVAL, f"adrfam: expected ipv4 or ipv6, got {family!r}")
    return m.RemoteId(
        trtype, adrfam, traddr, parameters.get("trsvcid", ""), parameters.get("subnqn", m.DISCOVERY_NQN)
    )


def _trid_json(remote: m.RemoteId) -> dict[str, str]:
    return {name: getattr(remote, name) for name in _ADDRESS_NAMES}


def _path_json(path: NvmePath) -> dict[str, Any]:
    return {
        "state": "enabled" if path.is_enabled else "disabled",
        "trid": _trid_json(path.remote),
        "cntlid": path.controller.cntlid,
        "host": {"nqn": path.host_nqn, "addr": "", "svcid": "", "no_shn_notification": False},
    }


def _attach_call(controller: NvmeController, path: NvmePath) -> dict[str, Any]:
    params = {
        "name": controller.name,
        **_trid_json(path.remote),
        "prchk_reftag": False,
        "prchk_guard": False,
        "ctrlr_loss_timeout_sec": 0,
        "reconnect_delay_sec": 0,
        "fast_io_fail_timeout_sec": 0,
        "hostnqn": path.host_nqn,
        "hdgst": False,
        "ddgst": False,
        "multipath": "multipath",
        "fabrics_connect_timeout_us": 500000,
        "num_io_queues": 127,
        "disable_sq_flow_control": False,
        "multipath_opts": {"policy": "active_passive"},
        **path.options,
    }
    return {"method": "bdev_nvme_attach_controller", "params": params}
