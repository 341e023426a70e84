"""The side of an SPDK that is a host: controllers of other targets, vhost controllers, keys.

Not here: JSON (``rpc_host``); connections and sockets, which the backend has or has not.
Threads: one, the RPC server's loop.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdev.target.model import (
    DISCOVERY_NQN,
    Bdev,
    BdevKind,
    FileKey,
    RemoteBackend,
    RemoteController,
    RemoteId,
    SpdkError,
    TargetModel,
    VhostBackend,
    errno_error,
)
from spdk_rpc.errors import ERROR_INVALID_PARAMS

CONTROLLER_COUNT_LIMIT = 1024
PATH_COUNT_LIMIT = 64
VHOST_COUNT_LIMIT = 1024
KEY_COUNT_LIMIT = 1024
NO_INITIATOR = "this target is no initiator: attach controllers with an SPDK, or open tcp: devices"
NO_VHOST = "this target serves no vhost-user sockets: use an SPDK"

NVME_OPTIONS: Mapping[str, Any] = {
    "action_on_timeout": "none",
    "timeout_us": 0,
    "timeout_admin_us": 0,
    "keep_alive_timeout_ms": 10000,
    "arbitration_burst": 0,
    "low_priority_weight": 0,
    "medium_priority_weight": 0,
    "high_priority_weight": 0,
    "nvme_adminq_poll_period_us": 10000,
    "nvme_ioq_poll_period_us": 0,
    "io_queue_requests": 512,
    "delay_cmd_submit": True,
    "transport_retry_count": 4,
    "bdev_retry_count": 3,
    "transport_ack_timeout": 0,
    "ctrlr_loss_timeout_sec": 0,
    "reconnect_delay_sec": 0,
    "fast_io_fail_timeout_sec": 0,
    "disable_auto_failback": False,
    "generate_uuids": False,
    "transport_tos": 0,
    "nvme_error_stat": False,
    "rdma_srq_size": 0,
    "io_path_stat": False,
    "allow_accel_sequence": False,
    "rdma_max_cq_size": 0,
    "rdma_cm_event_timeout_ms": 0,
    "dhchap_digests": ["sha256", "sha384", "sha512"],
    "dhchap_dhgroups": ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"],
    "rdma_umr_per_io": False,
    "tcp_connect_timeout_ms": 0,
    "enable_flush": False,
    "multipath_opts": {"policy": "active_passive"},
}
"""SPDK's defaults, in the order it writes them."""


@dataclass(frozen=True)
class NvmePath:
    """One connection of a controller; ``options`` are those it was attached with."""

    remote: RemoteId
    host_nqn: str
    options: Mapping[str, Any]
    controller: RemoteController
    is_enabled: bool = True


@dataclass
class NvmeController:
    """Paths to one subsystem, and the bdevs of its namespaces."""

    name: str
    paths: list[NvmePath] = field(default_factory=list)
    bdev_names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DiscoveryService:
    """A discovery controller, and the controllers that were attached for it."""

    name: str
    remote: RemoteId
    entries: tuple[RemoteId, ...]
    controller_names: tuple[str, ...]


class NvmeHost:
    """Controllers of other targets by name.

    Invariant: every path of a controller leads to one subsystem; a bdev of a controller goes with it.
    """

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self.options: dict[str, Any] = dict(NVME_OPTIONS)
        self.controllers: dict[str, NvmeController] = {}
        self.discoveries: dict[str, DiscoveryService] = {}

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change what holds for controllers to come; refused once there is one, as in SPDK."""
        if self.controllers:
            raise errno_error(errno.EPERM, "controllers are attached already")
        self.options.update(options)

    def _remote(self) -> RemoteBackend:
        remote = self._model.backend.remote
        if remote is None:
            raise errno_error(errno.EOPNOTSUPP, NO_INITIATOR)
        return remote

    def attach(
        self, name: str, remote: RemoteId, *, host_nqn: str | None, mode: str, options: Mapping[str, Any]
    ) -> list[str]:
        """Connect; the names of the new bdevs, or of the controller's when a path was added."""
        backend = self._remote()
        known = self.controllers.get(name)
        if known is None and len(self.controllers) >= CONTROLLER_COUNT_LIMIT:
            raise errno_error(errno.ENOSPC, f"at most {CONTROLLER_COUNT_LIMIT} controllers")
        if known is not None:
            self._check_path(known, remote, mode)
            host_nqn = known.paths[0].host_nqn
        else:
            self._check_unused(remote, host_nqn)
        nqn = host_nqn or f"nqn.2014-08.org.nvmexpress:uuid:{self._model.new_uuid()}"
        try:
            found = backend.connect(remote, nqn)
        except OSError as error:
            raise errno_error(
                errno.EIO, f"{remote.traddr}:{remote.trsvcid}: {error.strerror or error}"
            ) from error
        path = NvmePath(remote, nqn, options, found)
        if known is not None:
            known.paths.append(path)
            return list(known.bdev_names)
        controller = self.controllers[name] = NvmeController(name, [path])
        for namespace in found.namespaces:
            bdev = Bdev(
                name=f"{name}n{namespace.nsid}",
                kind=BdevKind.NVME,
                uuid=namespace.uuid,
                block_size_bytes=namespace.block_size_bytes,
                block_count=namespace.block_count,
                controller_name=name,
                remote_nsid=namespace.nsid,
            )
            try:
                controller.bdev_names.append(self._model.register(bdev))
            except SpdkError:
                # A UUID that is here already, through another controller: SPDK shows it once too.
                continue
        return list(controller.bdev_names)

    @staticmethod
    def _check_path(known: NvmeController, remote: RemoteId, mode: str) -> None:
        if any(path.remote == remote for path in known.paths):
            text = f"A controller named {known.name} already exists with the specified network path"
            raise SpdkError(-errno.EALREADY, text)
        if mode == "disable":
            text = f"A controller named {known.name} already exists and multipath is disabled"
            raise SpdkError(-errno.EALREADY, text)
        if known.paths and known.paths[0].remote.subnqn != remote.subnqn:
            raise errno_error(
                errno.EINVAL, f"subnqn: {known.name} is a controller of {known.paths[0].remote.subnqn}"
            )
        if len(known.paths) >= PATH_COUNT_LIMIT:
            raise errno_error(errno.ENOSPC, f"a controller has at most {PATH_COUNT_LIMIT} paths")

    def _check_unused(self, remote: RemoteId, host_nqn: str | None) -> None:
        for other in self.controllers.values():
            for path in other.paths:
                if path.remote == remote and host_nqn in (None, path.host_nqn):
                    raise errno_error(errno.EEXIST, f"{other.name} is attached there")

    def find(self, name: str) -> NvmeController:
        found = self.controllers.get(name)
        if found is None:
            raise errno_error(errno.ENODEV, f"controller {name!r}")
        return found

    def detach(self, name: str, remote: Mapping[str, str]) -> None:
        """Remove a controller, or the paths that the given parts of an address name."""
        controller = self.find(name)
        gone = [path for path in controller.paths if _matches(path.remote, remote)]
        if not gone:
            raise errno_error(errno.ENXIO, f"controller {name!r} has no such path")
        controller.paths = [path for path in controller.paths if path not in gone]
        if not controller.paths:
            for bdev_name in controller.bdev_names:
                bdev = self._model.bdev(bdev_name)
                if bdev is not None:
                    self._model.unregister(bdev)
            del self.controllers[name]
        for path in gone:
            self._remote().disconnect(path.remote, path.controller.cntlid)

    def reset(self, name: str) -> None:
        """Connect every path anew."""
        controller = self.find(name)
        for index, path in enumerate(controller.paths):
            self._remote().disconnect(path.remote, path.controller.cntlid)
            try:
                found = self._remote().connect(path.remote, path.host_nqn)
            except OSError as error:
                raise errno_error(errno.EIO, f"controller {name!r}: {error.strerror or error}") from error
            controller.paths[index] = replace(path, controller=found)

    def set_enabled(self, name: str, is_enabled: bool) -> None:
        controller = self.find(name)
        if any(path.is_enabled == is_enabled for path in controller.paths):
            raise errno_error(errno.EALREADY, f"controller {name!r}")
        controller.paths = [replace(path, is_enabled=is_enabled) for path in controller.paths]

    def start_discovery(self, name: str, remote: RemoteId, *, host_nqn: str | None) -> None:
        """Attach what a discovery controller names; its entries stay known until it is stopped."""
        backend = self._remote()
        if name in self.discoveries:
            raise errno_error(errno.EEXIST, f"discovery service {name!r}")
        nqn = host_nqn or f"nqn.2014-08.org.nvmexpress:uuid:{self._model.new_uuid()}"
        discovery = replace(remote, subnqn=DISCOVERY_NQN)
        try:
            entries = backend.discover(discovery, nqn)
        except OSError as error:
            raise errno_error(
                errno.EIO, f"{remote.traddr}:{remote.trsvcid}: {error.strerror or error}"
            ) from error
        names: list[str] = []
        for index, entry in enumerate(entries):
            try:
                self.attach(f"{name}{index}", entry, host_nqn=nqn, mode="multipath", options={})
            except SpdkError:
                # One that refuses us, or is attached already, does not keep the others away.
                continue
            names.append(f"{name}{index}")
        self.discoveries[name] = DiscoveryService(name, discovery, tuple(entries), tuple(names))

    def stop_discovery(self, name: str) -> None:
        service = self.discoveries.pop(name, None)
        if service is None:
            raise errno_error(errno.ENODEV, f"discovery service {name!r}")
        for each in service.controller_names:
            if each in self.controllers:
                self.detach(each, {})


def _matches(remote: RemoteId, wanted: Mapping[str, str]) -> bool:
    return all(getattr(remote, name).lower() == value.lower() for name, value in wanted.items())


@dataclass
class VhostController:
    """A vhost-user-blk socket. ``bdev_name`` is None once its bdev is gone."""

    name: str
    bdev_name: str | None
    is_readonly: bool
    cpumask: str
    is_packed_ring: bool = False
    delay_base_us: int = 0
    iops_threshold: int = 60000


class VhostControllers:
    """vhost controllers by name; a bdev may go from under them, as in SPDK."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self.controllers: dict[str, VhostController] = {}
        model.removal_watchers.append(self._bdev_goes)

    def backend(self) -> VhostBackend:
        vhost = self._model.backend.vhost
        if vhost is None:
            raise _flat(errno.EOPNOTSUPP, NO_VHOST)
        return vhost

    def create_blk(
        self, name: str, *, bdev_name: str, is_readonly: bool, cpumask: str, is_packed: bool
    ) -> None:
        """Serve a bdev that nobody has claimed."""
        if not name or "/" in name or len(name) > 64:
            raise _flat(errno.EINVAL, "ctrlr: expected 1 to 64 characters without a slash")
        if name in self.controllers:
            raise _flat(errno.EEXIST, f"vhost controller {name!r}")
        if len(self.controllers) >= VHOST_COUNT_LIMIT:
            raise _flat(errno.ENOSPC, f"at most {VHOST_COUNT_LIMIT} vhost controllers")
        bdev = self._model.bdev(bdev_name)
        if bdev is None:
            raise _flat(errno.ENODEV, f"bdev {bdev_name!r}")
        if self._model.is_claimed(bdev.name) and not is_readonly:
            raise _flat(errno.EPERM, f"bdev {bdev_name!r} is in use")
        try:
            self.backend().create(name, bdev.handle, is_readonly=is_readonly)
        except OSError as error:
            raise _flat(error.errno or errno.EIO, f"ctrlr: {name!r}: {error.strerror or error}") from error
        self.controllers[name] = VhostController(name, bdev.name, is_readonly, cpumask, is_packed)

    def find(self, name: str, code: int = ERROR_INVALID_PARAMS) -> VhostController:
        found = self.controllers.get(name)
        if found is None:
            raise SpdkError(code, errno_error(errno.ENODEV, f"vhost controller {name!r}").message)
        return found

    def delete(self, ctrlr: str) -> None:
        self.find(ctrlr)
        self.backend().delete(ctrlr)
        del self.controllers[ctrlr]

    def set_coalescing(self, ctrlr: str, delay_base_us: int, iops_threshold: int) -> None:
        controller = self.find(ctrlr)
        controller.delay_base_us = delay_base_us
        controller.iops_threshold = iops_threshold

    def _bdev_goes(self, bdev: Bdev) -> None:
        for controller in self.controllers.values():
            if controller.bdev_name == bdev.name:
                self.backend().bdev_gone(controller.name)
                controller.bdev_name = None


class Keyring:
    """Keys by name."""

    def __init__(self) -> None:
        self.keys: dict[str, FileKey] = {}

    def add(self, name: str, path: str) -> None:
        """Take a key file: absolute, ours, and with no bit for group and others."""
        check_key_file(path)
        if not name or len(name) > 255:
            raise errno_error(errno.EINVAL, "name: expected 1 to 255 characters")
        if name in self.keys:
            raise errno_error(errno.EEXIST, f"key {name!r}")
        if len(self.keys) >= KEY_COUNT_LIMIT:
            raise errno_error(errno.ENOSPC, f"at most {KEY_COUNT_LIMIT} keys")
        self.keys[name] = FileKey(name, path)

    def remove(self, name: str) -> None:
        if self.keys.pop(name, None) is None:
            raise errno_error(errno.ENOKEY, f"key {name!r}")


def check_key_file(path: str) -> None:
    """Refuse a file that others may read. Raises SpdkError naming the path and the remedy."""
    if not path.startswith("/"):
        raise errno_error(errno.EPERM, f"path: expected an absolute path, got {path!r}")
    try:
        found = Path(path).stat()
    except OSError as error:
        raise errno_error(error.errno or errno.EIO, f"path: {path}") from error
    except ValueError as error:
        raise errno_error(errno.EINVAL, "path: no path") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise errno_error(errno.EPERM, f"path: {path} has mode {mode:04o}, expected 0600: chmod 600 it")
    if found.st_uid != os.getuid():
        raise errno_error(errno.EPERM, f"path: {path} belongs to uid {found.st_uid}, expected {os.getuid()}")


def _flat(code: int, reason: str) -> SpdkError:
    """The refusal of vhost methods: one code, the errno's text."""
    return SpdkError(ERROR_INVALID_PARAMS, errno_error(code, reason).message)
