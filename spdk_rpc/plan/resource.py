"""What an SPDK process is made of: resources of a kind, with a name and attributes, and the RPCs for each.

Not here: reading them from a running SPDK (``observe``); deciding what to do (``compare``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Attributes = Mapping[str, Any]


class Kind(enum.IntEnum):
    """Kinds of resources; the number breaks ties in the order of making them.

    Listeners come last but for vhost, so that no host connects to a half-made subsystem.
    """

    OPTIONS = 0
    KEY = 1
    TRANSPORT = 2
    BDEV = 3
    CONTROLLER = 4
    RAID = 5
    LVSTORE = 6
    LVOL = 7
    QOS = 8
    SUBSYSTEM = 9
    HOST = 10
    NAMESPACE = 11
    LISTENER = 12
    VHOST = 13

    @property
    def word(self) -> str:
        return _WORDS[self]


_WORDS = {
    Kind.OPTIONS: "options",
    Kind.KEY: "key",
    Kind.TRANSPORT: "transport",
    Kind.BDEV: "bdev",
    Kind.CONTROLLER: "controller",
    Kind.RAID: "raid",
    Kind.LVSTORE: "lvstore",
    Kind.LVOL: "lvol",
    Kind.QOS: "qos",
    Kind.SUBSYSTEM: "subsystem",
    Kind.HOST: "host",
    Kind.NAMESPACE: "namespace",
    Kind.LISTENER: "listener",
    Kind.VHOST: "vhost",
}

NVME_OPTIONS = "bdev_nvme"
"""The name of the one OPTIONS resource."""


@dataclass(frozen=True, order=True)
class Id:
    """Names a resource within one SPDK process; ``parent`` is the subsystem's NQN or the lvstore's name."""

    kind: Kind
    name: str
    parent: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.LVOL:
            return f"lvol {self.parent}/{self.name}"
        if self.kind is Kind.NAMESPACE:
            return f"namespace {self.parent}#{self.name}"
        if self.kind in (Kind.HOST, Kind.LISTENER):
            return f"{self.kind.word} {self.name} of {self.parent}"
        return f"{self.kind.word} {self.name}"

    @property
    def reference(self) -> str:
        """How the command line names it: ``raid:R0``, ``namespace:NQN#1``, ``listener:NQN@ADDRESS:PORT``."""
        mark = {Kind.LVOL: "/", Kind.NAMESPACE: "#"}.get(self.kind, "@")
        own = f"{self.parent}{mark}{self.name}" if self.parent else self.name
        return f"{self.kind.word}:{own}"


@dataclass(frozen=True)
class Resource:
    """A resource as it shall be, or as it is.

    ``attributes`` are compared, those that are None are not, but for keys: without one is without one.
    ``at_creation`` only matter when it is made: what SPDK does not show afterwards, or may answer otherwise than asked.
    """

    id: Id
    attributes: Attributes
    at_creation: Attributes = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """All parameters that have a value."""
        both = {**self.attributes, **self.at_creation}
        return {name: value for name, value in both.items() if value is not None}


State = dict[Id, Resource]


@dataclass(frozen=True)
class Call:
    """One RPC."""

    method: str
    params: Attributes = field(default_factory=dict)


def state_of(resources: Iterable[Resource]) -> State:
    return {each.id: each for each in resources}


# --- references between resources --------------------------------------------------------------

_NAMESPACE_BDEV = re.compile(r"(?P<controller>.+)n(?P<nsid>[1-9]\d*)")


def controller_of_bdev(name: str, controllers: Iterable[str]) -> tuple[str, int] | None:
    """The controller and namespace id that a bdev's name stands for: ``Nvme0n2`` is (Nvme0, 2)."""
    match = _NAMESPACE_BDEV.fullmatch(name)
    if match is None or match["controller"] not in set(controllers):
        return None
    return match["controller"], int(match["nsid"])


def id_of_bdev(name: str, state: Mapping[Id, Any]) -> Id | None:
    """The resource that provides the bdev of this name."""
    for kind in (Kind.BDEV, Kind.RAID):
        if (found := Id(kind, name)) in state:
            return found
    store, slash, volume = name.partition("/")
    if slash and (found := Id(Kind.LVOL, volume, store)) in state:
        return found
    split = controller_of_bdev(name, (each.name for each in state if each.kind is Kind.CONTROLLER))
    return Id(Kind.CONTROLLER, split[0]) if split else None


def bdevs_used(resource: Resource) -> tuple[str, ...]:
    """The bdevs that a resource opens."""
    given = resource.attributes
    match resource.id.kind:
        case Kind.RAID:
            return tuple(given.get("base_bdevs") or ())
        case Kind.LVSTORE | Kind.NAMESPACE | Kind.VHOST:
            return (given["bdev_name"],) if given.get("bdev_name") else ()
        case Kind.QOS:
            return (resource.id.name,)
        case _:
            return ()


def bdevs_claimed(resource: Resource) -> tuple[str, ...]:
    """The bdevs that a resource keeps others from; vhost controllers share theirs."""
    return bdevs_used(resource) if resource.id.kind in (Kind.RAID, Kind.LVSTORE, Kind.NAMESPACE) else ()


_KEY_NAMES = ("psk", "dhchap_key", "dhchap_ctrlr_key")


def needs(resource: Resource, state: Mapping[Id, Any]) -> set[Id]:
    """What has to be there first, as far as it is in ``state``."""
    own = resource.id
    found: set[Id] = set()
    for name in bdevs_used(resource):
        provider = id_of_bdev(name, state)
        if provider is not None:
            found.add(provider)
    for name in _KEY_NAMES:
        if key := resource.given().get(name):
            found.add(Id(Kind.KEY, key))
    match own.kind:
        case Kind.CONTROLLER:
            found.add(Id(Kind.OPTIONS, NVME_OPTIONS))
        case Kind.LVOL:
            found.add(Id(Kind.LVSTORE, own.parent))
        case Kind.HOST | Kind.NAMESPACE:
            found.add(Id(Kind.SUBSYSTEM, own.parent))
        case Kind.LISTENER:
            found |= {Id(Kind.SUBSYSTEM, own.parent), Id(Kind.TRANSPORT, "TCP")}
        case _:
            pass
    return {each for each in found if each in state}


# --- RPCs -------------------------------------------------------------------------------------


def split_address(text: str) -> tuple[str, str]:
    """``HOST:PORT`` or ``[V6]:PORT`` into traddr and trsvcid."""
    address, _, port = text.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), port


def join_address(address: str, port: str) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def tcp_address(text: str) -> dict[str, str]:
    """SPDK's listen_address of a listener's name."""
    address, port = split_address(text)
    family = "IPv6" if ":" in address else "IPv4"
    return {"trtype": "TCP", "adrfam": family, "traddr": address, "trsvcid": port}


def create_calls(resource: Resource) -> list[Call]:
    """The RPCs that make a resource."""
    return _KINDS[resource.id.kind].create(resource)


def delete_calls(resource: Resource) -> list[Call]:
    """The RPCs that remove one, as it was observed; empty for what SPDK cannot remove."""
    delete = _KINDS[resource.id.kind].delete
    return [] if delete is None else delete(resource)


def update_calls(before: Resource, after: Resource) -> list[Call] | None:
    """The RPCs that change one in place; None when it has to be removed and made anew."""
    changed = changed_names(before, after)
    return _KINDS[after.id.kind].update(before, after, changed)


def loses_data(kind: Kind, attributes: Attributes) -> bool:
    """Whether removing it destroys stored bytes."""
    if kind is Kind.BDEV:
        return attributes.get("driver") == "malloc"
    return kind in (Kind.LVOL, Kind.LVSTORE)


def is_removable(kind: Kind) -> bool:
    return _KINDS[kind].delete is not None


def changed_names(before: Resource, after: Resource) -> list[str]:
    """The attributes in which two differ, as far as ``after`` says anything about them; no key is none."""
    return [
        name
        for name, value in after.attributes.items()
        if (value is not None or name in _KEY_NAMES)
        and not _is_same(after.id.kind, name, before.attributes, after.attributes)
    ]


def _is_same(kind: Kind, name: str, before: Attributes, after: Attributes) -> bool:
    was, wanted = before.get(name), after[name]
    if kind is Kind.LVOL and name == "size_in_mib" and was is not None:
        # SPDK rounds up to whole clusters.
        return bool(wanted <= was < wanted + max(1, before.get("cluster_mib") or 1))
    if kind is Kind.CONTROLLER and name == "paths":
        return set(was or ()) == set(wanted)
    return bool(was == wanted)


_Changed = list[str]


@dataclass(frozen=True)
class _KindCalls:
    create: Callable[[Resource], list[Call]]
    delete: Callable[[Resource], list[Call]] | None
    update: Callable[[Resource, Resource, _Changed], list[Call] | None]


def _immutable(_before: Resource, _after: Resource, _changed: _Changed) -> list[Call] | None:
    return None


def _set_options(resource: Resource) -> list[Call]:
    return [Call("bdev_nvme_set_options", resource.given())]


def _update_options(_before: Resource, after: Resource, _changed: _Changed) -> list[Call] | None:
    return _set_options(after)


def _create_key(resource: Resource) -> list[Call]:
    return [Call("keyring_file_add_key", {"name": resource.id.name, "path": resource.attributes["path"]})]


def _create_transport(resource: Resource) -> list[Call]:
    return [Call("nvmf_create_transport", {"trtype": resource.id.name, **resource.given()})]


def _create_bdev(resource: Resource) -> list[Call]:
    given = resource.given()
    driver = given.pop("driver")
    # Registering a bdev makes SPDK look for lvstores and raids on it; wait, so that the next step sees them.
    return [
        Call(f"bdev_{driver}_create", {"name": resource.id.name, **given}),
        Call("bdev_wait_for_examine"),
    ]


def _delete_bdev(resource: Resource) -> list[Call]:
    return [Call(f"bdev_{resource.attributes['driver']}_delete", {"name": resource.id.name})]


def path_params(trtype: str, path: str) -> dict[str, str]:
    if trtype.upper() == "PCIE":
        return {"trtype": "PCIe", "traddr": path}
    return {**tcp_address(path), "trtype": trtype}


def _attach(resource: Resource, paths: Iterable[str]) -> list[Call]:
    given = resource.given()
    del given["paths"]
    trtype = given.pop("trtype", "TCP")
    calls = [
        Call("bdev_nvme_attach_controller", {"name": resource.id.name, **path_params(trtype, path), **given})
        for path in paths
    ]
    return [*calls, Call("bdev_wait_for_examine")]


def _create_controller(resource: Resource) -> list[Call]:
    return _attach(resource, resource.attributes["paths"])


def _update_controller(before: Resource, after: Resource, changed: _Changed) -> list[Call] | None:
    if changed != ["paths"]:
        return None
    was, wanted = before.attributes["paths"], after.attributes["paths"]
    added = [path for path in wanted if path not in was]
    gone = [path for path in was if path not in wanted]
    if set(gone) == set(was) and not added:
        return None
    trtype = before.attributes.get("trtype") or "TCP"
    subnqn = before.attributes.get("subnqn")
    named = {"name": after.id.name, **({"subnqn": subnqn} if subnqn else {})}
    # New paths first: I/O goes on over them.
    return [
        *(_attach(after, added) if added else []),
        *(Call("bdev_nvme_detach_controller", {**named, **path_params(trtype, path)}) for path in gone),
    ]


def _create_raid(resource: Resource) -> list[Call]:
    given = resource.given()
    given.pop("state", None)
    return [
        Call("bdev_raid_create", {"name": resource.id.name, **given}),
        Call("bdev_wait_for_examine"),
    ]


def _create_lvstore(resource: Resource) -> list[Call]:
    return [Call("bdev_lvol_create_lvstore", {"lvs_name": resource.id.name, **resource.given()})]


def _create_lvol(resource: Resource) -> list[Call]:
    names = {"lvol_name": resource.id.name, "lvs_name": resource.id.parent}
    return [Call("bdev_lvol_create", {**names, **resource.given()})]


def _lvol_name(resource: Resource) -> str:
    return f"{resource.id.parent}/{resource.id.name}"


def _update_lvol(before: Resource, after: Resource, changed: _Changed) -> list[Call] | None:
    size_mib = after.attributes["size_in_mib"]
    # Shrinking cuts stored bytes off: only by naming it for replacement.
    if changed != ["size_in_mib"] or size_mib < before.attributes["size_in_mib"]:
        return None
    return [Call("bdev_lvol_resize", {"name": _lvol_name(after), "size_in_mib": size_mib})]


QOS_LIMITS = ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")


def _set_qos(resource: Resource) -> list[Call]:
    return [Call("bdev_set_qos_limit", {"name": resource.id.name, **resource.given()})]


def _update_qos(_before: Resource, after: Resource, _changed: _Changed) -> list[Call] | None:
    return _set_qos(after)


def _clear_qos(resource: Resource) -> list[Call]:
    return [Call("bdev_set_qos_limit", {"name": resource.id.name, **dict.fromkeys(QOS_LIMITS, 0)})]


def _create_subsystem(resource: Resource) -> list[Call]:
    return [Call("nvmf_create_subsystem", {"nqn": resource.id.name, **resource.given()})]


def _update_subsystem(_before: Resource, after: Resource, changed: _Changed) -> list[Call] | None:
    if changed != ["allow_any_host"]:
        return None
    is_open = after.attributes["allow_any_host"]
    return [Call("nvmf_subsystem_allow_any_host", {"nqn": after.id.name, "allow_any_host": is_open})]


def _in_subsystem(resource: Resource) -> dict[str, Any]:
    return {"nqn": resource.id.parent}


def _create_host(resource: Resource) -> list[Call]:
    named = {**_in_subsystem(resource), "host": resource.id.name}
    return [Call("nvmf_subsystem_add_host", {**named, **resource.given()})]


def _update_host(_before: Resource, after: Resource, changed: _Changed) -> list[Call] | None:
    if not set(changed) <= {"dhchap_key", "dhchap_ctrlr_key"}:
        return None
    keys = {name: after.attributes[name] for name in ("dhchap_key", "dhchap_ctrlr_key")}
    given = {name: key for name, key in keys.items() if key is not None}
    return [Call("nvmf_subsystem_set_keys", {**_in_subsystem(after), "host": after.id.name, **given})]


def _delete_host(resource: Resource) -> list[Call]:
    return [Call("nvmf_subsystem_remove_host", {**_in_subsystem(resource), "host": resource.id.name})]


def _create_namespace(resource: Resource) -> list[Call]:
    namespace = {"nsid": int(resource.id.name), **resource.given()}
    return [Call("nvmf_subsystem_add_ns", {**_in_subsystem(resource), "namespace": namespace})]


def _delete_namespace(resource: Resource) -> list[Call]:
    params = {**_in_subsystem(resource), "nsid": int(resource.id.name)}
    return [Call("nvmf_subsystem_remove_ns", params)]


def _create_listener(resource: Resource) -> list[Call]:
    params = {**_in_subsystem(resource), "listen_address": tcp_address(resource.id.name)}
    return [Call("nvmf_subsystem_add_listener", {**params, **resource.given()})]


def _delete_listener(resource: Resource) -> list[Call]:
    params = {**_in_subsystem(resource), "listen_address": tcp_address(resource.id.name)}
    return [Call("nvmf_subsystem_remove_listener", params)]


def _create_vhost(resource: Resource) -> list[Call]:
    given = resource.given()
    params = {"ctrlr": resource.id.name, "dev_name": given.pop("bdev_name"), **given}
    return [Call("vhost_create_blk_controller", params)]


def _simple_delete(method: str, name: str = "name") -> Callable[[Resource], list[Call]]:
    return lambda resource: [Call(method, {name: resource.id.name})]


_KINDS: dict[Kind, _KindCalls] = {
    Kind.OPTIONS: _KindCalls(_set_options, None, _update_options),
    Kind.KEY: _KindCalls(_create_key, _simple_delete("keyring_file_remove_key"), _immutable),
    Kind.TRANSPORT: _KindCalls(_create_transport, None, _immutable),
    Kind.BDEV: _KindCalls(_create_bdev, _delete_bdev, _immutable),
    Kind.CONTROLLER: _KindCalls(
        _create_controller, _simple_delete("bdev_nvme_detach_controller"), _update_controller
    ),
    Kind.RAID: _KindCalls(_create_raid, _simple_delete("bdev_raid_delete"), _immutable),
    Kind.LVSTORE: _KindCalls(
        _create_lvstore, _simple_delete("bdev_lvol_delete_lvstore", "lvs_name"), _immutable
    ),
    Kind.LVOL: _KindCalls(
        _create_lvol,
        lambda resource: [Call("bdev_lvol_delete", {"name": _lvol_name(resource)})],
        _update_lvol,
    ),
    Kind.QOS: _KindCalls(_set_qos, _clear_qos, _update_qos),
    Kind.SUBSYSTEM: _KindCalls(
        _create_subsystem, _simple_delete("nvmf_delete_subsystem", "nqn"), _update_subsystem
    ),
    Kind.HOST: _KindCalls(_create_host, _delete_host, _update_host),
    Kind.NAMESPACE: _KindCalls(_create_namespace, _delete_namespace, _immutable),
    Kind.LISTENER: _KindCalls(_create_listener, _delete_listener, _immutable),
    Kind.VHOST: _KindCalls(_create_vhost, _simple_delete("vhost_delete_controller", "ctrlr"), _immutable),
}
