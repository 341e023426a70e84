"""Read what an SPDK process is made of, with its own names, and what stands behind each bdev.

Not here: what it shall be; whether it is well (``flush`` says what a flush does on the way).
Trust: results are ``untrusted``; raises RpcProtocolError when one has not the shape that SPDK documents.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spdk_rpc.errors import RpcMethodError, RpcProtocolError
from spdk_rpc.plan.resource import (
    NVME_OPTIONS,
    QOS_LIMITS,
    Id,
    Kind,
    Resource,
    State,
    bdevs_claimed,
    join_address,
    state_of,
)

Caller = Callable[[str, Mapping[str, Any] | None], Any]
"""Sends one RPC and returns its result: ``spdk_rpc.Client.call`` is one."""

DRIVERS = {
    "Malloc disk": "malloc",
    "Null disk": "null",
    "AIO disk": "aio",
    "URING bdev": "uring",
}
"""Product names of the bdevs that a file can describe."""

MIB = 1 << 20
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
ALL_KINDS = frozenset(Kind)

_METHODS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    Kind.OPTIONS: ("framework_get_config",),
    Kind.KEY: ("keyring_get_keys",),
    Kind.TRANSPORT: ("nvmf_get_transports",),
    Kind.BDEV: ("bdev_get_bdevs",),
    Kind.CONTROLLER: ("bdev_nvme_get_controllers", "framework_get_config"),
    Kind.RAID: ("bdev_raid_get_bdevs",),
    Kind.LVSTORE: ("bdev_lvol_get_lvstores",),
    Kind.LVOL: ("bdev_get_bdevs", "bdev_lvol_get_lvstores"),
    Kind.QOS: ("bdev_get_bdevs",),
    Kind.SUBSYSTEM: ("nvmf_get_subsystems", "framework_get_config"),
    Kind.HOST: ("nvmf_get_subsystems", "framework_get_config"),
    Kind.NAMESPACE: ("nvmf_get_subsystems", "framework_get_config"),
    Kind.LISTENER: ("nvmf_get_subsystems", "framework_get_config"),
    Kind.VHOST: ("vhost_get_controllers",),
}
"""What reading a kind takes."""


@dataclass(frozen=True)
class BdevFacts:
    """A registered bdev, under the name by which others refer to it (an lvol's is its alias)."""

    name: str
    product_name: str
    block_size: int
    num_blocks: int
    uuid: str
    is_claimed: bool
    is_flush_supported: bool
    driver_specific: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return self.block_size * self.num_blocks


@dataclass
class Observed:
    """One SPDK process at one moment."""

    version: str = ""
    methods: frozenset[str] = frozenset()
    state: State = field(default_factory=dict)
    bdevs: dict[str, BdevFacts] = field(default_factory=dict)
    controller_states: dict[str, list[str]] = field(default_factory=dict)
    """State of each path of each controller: ``enabled``, ``resetting``, ``failed``, …"""
    vhost_sockets: dict[str, str] = field(default_factory=dict)
    vhost_session_counts: dict[str, int] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    def holders(self, bdev_name: str) -> list[Id]:
        """The resources that keep others from a bdev."""
        return [each.id for each in self.state.values() if bdev_name in bdevs_claimed(each)]


@dataclass(frozen=True)
class Focus:
    """One resource to read: with the bdevs it refers to, and whether only the configuration shows it whole."""

    id: Id
    bdev_names: tuple[str, ...] = ()
    is_in_config: bool = True


def observe(
    call: Caller, *, kinds: Iterable[Kind] = ALL_KINDS, methods: frozenset[str] | None = None
) -> Observed:
    """Read everything, or only what tells about some kinds; ``methods`` when they are known already."""
    return _Reader(call, frozenset(kinds), methods).read()


def observe_one(call: Caller, focus: Focus, *, methods: frozenset[str] | None = None) -> Resource | None:
    """Read one resource with as little else as SPDK's methods allow; None when it is not there."""
    reader = _Reader(call, frozenset((focus.id.kind,)), methods, focus)
    return reader.read().state.get(focus.id)


def lacking_methods(kind: Kind, methods: frozenset[str]) -> list[str]:
    """The reading methods of a kind that a process does not have."""
    return [each for each in _METHODS_OF_KIND[kind] if each not in methods]


class _Reader:
    """One observation; the results of methods that several kinds need are kept."""

    def __init__(
        self,
        call: Caller,
        kinds: frozenset[Kind],
        methods: frozenset[str] | None,
        focus: Focus | None = None,
    ) -> None:
        self._call = call
        self._methods = methods
        self._focus = focus
        self._kinds = kinds
        self._results: dict[tuple[str, str], Any] = {}
        self.observed = Observed()
        self._names: dict[str, str] = {}
        """Every name and alias of a bdev -> the name we use."""

    def read(self) -> Observed:
        found = self.observed
        if self._methods is None:
            version = _object(self._get("spdk_get_version"), "spdk_get_version")
            found.version = str(version.get("version", "an SPDK"))
            found.methods = frozenset(_list(self._get("rpc_get_methods", current=True), "rpc_get_methods"))
        else:
            found.methods = self._methods
        resources: list[Resource] = []
        # Bdevs first: everything else refers to them by any of their names.
        if self._wants(Kind.BDEV, Kind.LVOL, Kind.QOS, Kind.RAID, Kind.NAMESPACE, Kind.VHOST, Kind.LVSTORE):
            resources += self._bdevs()
        for kind, reader in (
            (Kind.OPTIONS, self._options),
            (Kind.KEY, self._keys),
            (Kind.TRANSPORT, self._transports),
            (Kind.CONTROLLER, self._controllers),
            (Kind.RAID, self._raids),
            (Kind.VHOST, self._vhosts),
        ):
            if self._wants(kind):
                resources += reader()
        if self._wants(Kind.SUBSYSTEM, Kind.HOST, Kind.NAMESPACE, Kind.LISTENER):
            resources += self._subsystems()
        if self._kinds == ALL_KINDS and "framework_get_reactors" in found.methods:
            reactors = _object(self._get("framework_get_reactors"), "framework_get_reactors")
            found.cores = tuple(sorted(int(each.get("lcore", 0)) for each in reactors.get("reactors", [])))
        found.state = state_of(each for each in resources if each.id.kind in self._kinds)
        return found

    def _wants(self, *kinds: Kind) -> bool:
        return any(kind in self._kinds and not lacking_methods(kind, self.observed.methods) for kind in kinds)

    def _get(self, method: str, **params: Any) -> Any:
        key = (method, repr(sorted(params.items())))
        if key not in self._results:
            self._results[key] = self._call(method, params or None)
        return self._results[key]

    def _config(self, subsystem: str) -> list[dict[str, Any]]:
        try:
            calls = self._get("framework_get_config", name=subsystem)
        except RpcMethodError:
            return []  # a build without that subsystem
        return _objects(calls, "framework_get_config")

    def _name(self, name: Any) -> str:
        return self._names.get(str(name), str(name))

    # --- bdevs ---

    def _bdevs(self) -> list[Resource]:
        stores = self._lvstores()
        found: list[Resource] = []
        for each in self._bdev_objects():
            specific = each.get("driver_specific") or {}
            aliases = [str(alias) for alias in each.get("aliases") or ()]
            name = str(each.get("name"))
            is_lvol = "lvol" in specific
            if is_lvol:
                # An lvol's own name is its UUID; people name it LVSTORE/LVOL.
                name = next((alias for alias in aliases if "/" in alias), name)
            for alias in (str(each.get("name")), *aliases):
                self._names[alias] = name
            facts = BdevFacts(
                name=name,
                product_name=str(each.get("product_name", "")),
                block_size=int(each.get("block_size", 0)),
                num_blocks=int(each.get("num_blocks", 0)),
                uuid=str(each.get("uuid", "")),
                is_claimed=bool(each.get("claimed")),
                is_flush_supported=bool((each.get("supported_io_types") or {}).get("flush")),
                driver_specific=specific,
            )
            self.observed.bdevs[name] = facts
            if is_lvol:
                found.append(_lvol(facts, specific["lvol"], stores))
            elif facts.product_name in DRIVERS:
                found.append(_bdev(facts))
            limits = each.get("assigned_rate_limits") or {}
            if any(limits.get(limit) for limit in QOS_LIMITS):
                values = {limit: int(limits.get(limit, 0)) for limit in QOS_LIMITS}
                found.append(Resource(Id(Kind.QOS, name), values))
        for uuid, store in stores.items():
            attributes = {
                "bdev_name": self._name(store.get("base_bdev")),
                "cluster_sz": int(store.get("cluster_size", 0)),
            }
            identity = {"uuid": uuid}
            found.append(Resource(Id(Kind.LVSTORE, str(store.get("name"))), attributes, identity))
        return found

    def _bdev_objects(self) -> list[dict[str, Any]]:
        method = "bdev_get_bdevs"
        names = self._focused_bdevs()
        if names is None:
            return _objects(self._get(method), method)
        return [each for name in names for each in self._named_objects(method, name=name)]

    def _focused_bdevs(self) -> tuple[str, ...] | None:
        """The bdevs that matter; None when all do."""
        if self._focus is None:
            return None
        own = self._focus.id
        match own.kind:
            case Kind.BDEV | Kind.QOS:
                return (own.name,)
            case Kind.LVOL:
                return (f"{own.parent}/{own.name}",)
            case Kind.NAMESPACE | Kind.VHOST | Kind.RAID:
                return self._focus.bdev_names
            case _:
                return None

    def _named_objects(self, method: str, **name: str) -> list[dict[str, Any]]:
        """One object by name, or none. Releases refuse an unknown name in different ways, so all are read then."""
        try:
            return _objects(self._get(method, **name), method)
        except RpcMethodError as error:
            if error.errno == errno.ENODEV:
                return []
            ((key, value),) = name.items()
            return [each for each in _objects(self._get(method), method) if each.get(key) == value]

    def _lvstores(self) -> dict[str, dict[str, Any]]:
        if "bdev_lvol_get_lvstores" not in self.observed.methods:
            return {}
        method = "bdev_lvol_get_lvstores"
        return {str(each.get("uuid")): each for each in _objects(self._get(method), method)}

    def _raids(self) -> list[Resource]:
        found = []
        method = "bdev_raid_get_bdevs"
        for each in _objects(self._get(method, category="all"), method):
            bases = [self._name(base.get("name")) for base in each.get("base_bdevs_list") or ()]
            attributes = {
                "raid_level": each.get("raid_level"),
                "strip_size_kb": each.get("strip_size_kb"),
                "base_bdevs": tuple(bases),
                "superblock": bool(each.get("superblock")),
                "state": each.get("state"),
            }
            identity = {"uuid": str(each.get("uuid", ""))}
            found.append(Resource(Id(Kind.RAID, str(each.get("name"))), attributes, identity))
        return found

    # --- bdev_nvme ---

    def _options(self) -> list[Resource]:
        for each in self._config("bdev"):
            if each.get("method") == "bdev_nvme_set_options":
                is_set = bool((each.get("params") or {}).get("enable_flush"))
                return [Resource(Id(Kind.OPTIONS, NVME_OPTIONS), {"enable_flush": is_set})]
        return []

    def _controllers(self) -> list[Resource]:
        method = "bdev_nvme_get_controllers"
        paths: dict[str, list[dict[str, Any]]] = {}
        for each in _objects(self._get(method), method):
            entries = _objects(each.get("ctrlrs", []), f"{method}: ctrlrs")
            name = str(each.get("name"))
            self.observed.controller_states[name] = [str(entry.get("state")) for entry in entries]
            for entry in entries:
                trids = [entry.get("trid") or {}, *(entry.get("alternate_trids") or ())]
                host = (entry.get("host") or {}).get("nqn")
                paths.setdefault(name, []).extend({**trid, "hostnqn": host} for trid in trids)
        attached: dict[str, dict[str, Any]] = {}
        for each in self._config("bdev"):
            if each.get("method") == "bdev_nvme_attach_controller":
                params = each.get("params") or {}
                attached.setdefault(str(params.get("name")), params)
        return [_controller(name, trids, attached.get(name, {})) for name, trids in paths.items()]

    # --- NVMe-oF target ---

    def _keys(self) -> list[Resource]:
        return [
            Resource(Id(Kind.KEY, str(each.get("name"))), {"path": each.get("path")})
            for each in _objects(self._get("keyring_get_keys"), "keyring_get_keys")
            if not each.get("removed")
        ]

    def _transports(self) -> list[Resource]:
        method = "nvmf_get_transports"
        found = []
        for each in _objects(self._get(method), method):
            limits = {name: value for name, value in each.items() if name != "trtype"}
            found.append(Resource(Id(Kind.TRANSPORT, str(each.get("trtype"))), limits))
        return found

    def _subsystems(self) -> list[Resource]:
        """From the configuration, which alone shows PSKs and secure channels; what is listed there lives."""
        found: dict[Id, Resource] = {}
        method = "nvmf_get_subsystems"
        own = None if self._focus is None else self._focus.id
        if own is None:
            listed = _objects(self._get(method), method)
        else:
            listed = self._named_objects(method, nqn=own.parent or own.name)
        for each in listed:
            if each.get("subtype") != "Discovery":
                resources = self._subsystem(each)
                found |= {resource.id: resource for resource in resources}
        if self._focus is not None and not self._focus.is_in_config:
            return list(found.values())
        for each in self._config("nvmf"):
            params = each.get("params") or {}
            nqn = str(params.get("nqn"))
            if each.get("method") == "nvmf_subsystem_add_host":
                own = Id(Kind.HOST, str(params.get("host")), nqn)
                names = ("psk", "dhchap_key", "dhchap_ctrlr_key")
                if own in found:
                    found[own] = Resource(own, {name: params.get(name) for name in names})
            elif each.get("method") == "nvmf_subsystem_add_listener":
                address = params.get("listen_address") or {}
                own = Id(Kind.LISTENER, _address(address), nqn)
                if own in found:
                    found[own] = Resource(own, {"secure_channel": bool(params.get("secure_channel"))})
        return list(found.values())

    def _subsystem(self, each: Mapping[str, Any]) -> list[Resource]:
        nqn = str(each.get("nqn"))
        names = ("serial_number", "model_number", "max_namespaces", "allow_any_host")
        found = [Resource(Id(Kind.SUBSYSTEM, nqn), {name: each.get(name) for name in names})]
        for host in each.get("hosts") or ():
            keys = {name: host.get(name) for name in ("psk", "dhchap_key", "dhchap_ctrlr_key")}
            found.append(Resource(Id(Kind.HOST, str(host.get("nqn")), nqn), keys))
        for namespace in each.get("namespaces") or ():
            attributes = {
                "bdev_name": self._name(namespace.get("bdev_name")),
                "uuid": _lower(namespace.get("uuid")),
                "nguid": _lower(namespace.get("nguid")),
                "eui64": _lower(namespace.get("eui64")),
            }
            found.append(Resource(Id(Kind.NAMESPACE, str(namespace.get("nsid")), nqn), attributes))
        for address in each.get("listen_addresses") or ():
            if str(address.get("trtype")).upper() == "TCP":
                own = Id(Kind.LISTENER, _address(address), nqn)
                found.append(Resource(own, {"secure_channel": False}))
        return found

    def _vhosts(self) -> list[Resource]:
        method = "vhost_get_controllers"
        found = []
        for each in _objects(self._get(method), method):
            block = (each.get("backend_specific") or {}).get("block")
            if block is None:
                continue
            name = str(each.get("ctrlr"))
            self.observed.vhost_sockets[name] = str(each.get("socket", ""))
            self.observed.vhost_session_counts[name] = len(each.get("sessions") or ())
            bdev = block.get("bdev")
            attributes = {
                # A controller whose bdev was deleted stays, with none.
                "bdev_name": None if bdev is None else self._name(bdev),
                "readonly": bool(block.get("readonly")),
                "cpumask": each.get("cpumask"),
            }
            found.append(Resource(Id(Kind.VHOST, name), attributes))
        return found


def _bdev(facts: BdevFacts) -> Resource:
    driver = DRIVERS[facts.product_name]
    specific = facts.driver_specific.get(driver) or {}
    attributes: dict[str, Any] = {"driver": driver, "block_size": facts.block_size}
    if driver in ("malloc", "null"):
        attributes["num_blocks"] = facts.num_blocks
    else:
        attributes["filename"] = specific.get("filename")
    if driver == "aio":
        attributes["readonly"] = bool(specific.get("readonly"))
    return Resource(Id(Kind.BDEV, facts.name), attributes, {"uuid": facts.uuid})


def _lvol(facts: BdevFacts, specific: Mapping[str, Any], stores: Mapping[str, Mapping[str, Any]]) -> Resource:
    store_name, _, name = facts.name.partition("/")
    store = stores.get(str(specific.get("lvol_store_uuid")), {})
    attributes = {
        "size_in_mib": -(-facts.size_bytes // MIB),
        "thin_provision": bool(specific.get("thin_provision")),
        "cluster_mib": max(1, int(store.get("cluster_size", MIB)) // MIB),
    }
    return Resource(Id(Kind.LVOL, name, store_name), attributes)


_CONTROLLER_OPTIONS = (
    "hdgst",
    "ddgst",
    "ctrlr_loss_timeout_sec",
    "reconnect_delay_sec",
    "fast_io_fail_timeout_sec",
    "psk",
    "dhchap_key",
    "dhchap_ctrlr_key",
)


def _controller(name: str, trids: list[dict[str, Any]], attached: Mapping[str, Any]) -> Resource:
    trtype = str(trids[0].get("trtype", "TCP"))
    is_local = trtype.upper() == "PCIE"
    paths = [str(trid.get("traddr")) if is_local else _address(trid) for trid in trids]
    attributes: dict[str, Any] = {
        "trtype": trtype,
        "paths": tuple(paths),
        "subnqn": None if is_local else trids[0].get("subnqn"),
        "hostnqn": None if is_local else trids[0].get("hostnqn"),
    }
    attributes |= {option: attached.get(option) for option in _CONTROLLER_OPTIONS}
    return Resource(Id(Kind.CONTROLLER, name), attributes)


def _address(trid: Mapping[str, Any]) -> str:
    return join_address(str(trid.get("traddr")), str(trid.get("trsvcid")))


def _lower(value: Any) -> str | None:
    return str(value).lower() if value else None


def _list(untrusted: Any, method: str) -> list[Any]:
    if not isinstance(untrusted, list):
        raise RpcProtocolError(f"{method}: result: expected a list, got {type(untrusted).__name__}")
    return untrusted


def _object(untrusted: Any, method: str) -> dict[str, Any]:
    if not isinstance(untrusted, dict):
        raise RpcProtocolError(f"{method}: result: expected an object, got {type(untrusted).__name__}")
    return untrusted


def _objects(untrusted: Any, method: str) -> list[dict[str, Any]]:
    return [_object(each, method) for each in _list(untrusted, method)]


def iostat_of(call: Caller, methods: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Counters of every bdev by any of its names; empty where they cannot be read."""
    if "bdev_get_iostat" not in methods:
        return {}
    with contextlib.suppress(RpcMethodError):
        result = _object(call("bdev_get_iostat", None), "bdev_get_iostat")
        return {str(each.get("name")): each for each in _objects(result.get("bdevs"), "bdev_get_iostat")}
    return {}
