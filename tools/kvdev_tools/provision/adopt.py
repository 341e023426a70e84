"""Write the file from what runs, and SPDK's own configuration from what runs.

What the file has no words for is left out and named, with everything that stands on it: a raid with redundancy,
a bdev of another module. A plan of the written file over the same processes is empty.
Not here: reading (``spdk_rpc.plan.observe``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError
from kvdev.geometry import Geometry
from kvdev.store import NamespaceInfo, Volume
from kvdev.store.label import Label
from kvdev.store.members import read_label
from kvdev.units import GIB, KIB, MIB, TIB
from kvdev_tools.connect import make_session
from kvdev_tools.provision.document import (
    ServedNamespace,
    ServedSubsystem,
    build_deployment,
    namespace_uri,
)
from kvdev_tools.provision.source import load_text
from kvdev_tools.provision.work import flush_of_volume, looking
from spdk_rpc import Client
from spdk_rpc.plan import FlushState, Id, Kind, Observed, Resource, State, observe
from spdk_rpc.plan.flush import verdict
from spdk_rpc.plan.resource import bdevs_used, id_of_bdev

TRANSPORT_LIMITS = ("max_io_size", "in_capsule_data_size", "max_queue_depth", "max_io_qpairs_per_ctrlr")
_RANK_NAME = re.compile(r"(?P<engine>.+)\.(?P<rank>0|[1-9]\d*)")


@dataclass
class Adopted:
    """The file's values, and what was left out of it."""

    value: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        return yaml.safe_dump(self.value, sort_keys=False, allow_unicode=True, width=110)


@dataclass
class _FoundVolume:
    name: str
    strip_size_bytes: int
    members: list[dict[str, Any]]
    uris: list[str]
    namespaces: list[NamespaceInfo]


def adopt(
    name: str,
    *,
    targets: Mapping[str, str],
    hosts: Mapping[str, str],
    host_nqn: str | None = None,
    timeout_s: float,
) -> Adopted:
    """Read processes (entry name -> RPC address) and the volumes on their namespaces."""
    adopted = Adopted({"version": 1, "name": name})
    seen = {
        **{("targets", entry): _observe(rpc, timeout_s) for entry, rpc in targets.items()},
        **{("hosts", entry): _observe(rpc, timeout_s) for entry, rpc in hosts.items()},
    }
    kept = {key: _describable(observed, key[1], adopted.notes) for key, observed in seen.items()}
    served = {
        own.name: entry
        for (section, entry), state in kept.items()
        if section == "targets"
        for own in state
        if own.kind is Kind.SUBSYSTEM
    }
    for (section, entry), state in kept.items():
        rpc = targets[entry] if section == "targets" else hosts[entry]
        described = _entry(rpc, state, served, section, adopted.notes, entry)
        adopted.value.setdefault(section, {})[entry] = described
    # Subsystems that admit one host only are looked at as that host.
    volumes = _volumes(kept, host_nqn or _only_host(kept), timeout_s, adopted.notes)
    if volumes:
        adopted.value["volumes"] = {
            volume.name: {"members": volume.members, "strip_size": _size(volume.strip_size_bytes)}
            for volume in volumes
        }
    for (section, entry), state in kept.items():
        if section == "hosts":
            engines = _engines(state, volumes, adopted.notes, entry)
            if engines:
                adopted.value["hosts"][entry]["engines"] = engines
    _adopt_bare_host(adopted, kept, volumes, host_nqn)
    _mark_swallowed(adopted, timeout_s)
    return adopted


def _observe(rpc: str, timeout_s: float) -> Observed:
    with Client(rpc, timeout_s=timeout_s) as client:
        return observe(client.call)


def _describable(observed: Observed, entry: str, notes: list[str]) -> State:
    """What the file has words for."""
    kept: State = {}
    for own, resource in sorted(observed.state.items(), key=lambda each: each[0]):
        reason = _why_not(resource)
        if reason:
            notes.append(f"{entry}: {own}: left out: {reason}")
        else:
            kept[own] = resource
    is_settled = False
    while not is_settled:
        is_settled = True
        for own, resource in list(kept.items()):
            missing = [name for name in bdevs_used(resource) if id_of_bdev(name, kept) is None]
            is_orphan = own.kind is Kind.LVOL and Id(Kind.LVSTORE, own.parent) not in kept
            if missing or is_orphan:
                what = f"bdev {missing[0]}" if missing else f"lvstore {own.parent}"
                notes.append(f"{entry}: {own}: left out, as {what} is")
                del kept[own]
                is_settled = False
    return kept


def _why_not(resource: Resource) -> str:
    given = resource.attributes
    match resource.id.kind:
        case Kind.RAID if given.get("raid_level") != "raid0":
            return f"raid level {given.get('raid_level')}"
        case Kind.RAID if given.get("superblock"):
            return "it has a superblock"
        case Kind.RAID if given.get("state") != "online":
            return f"it is {given.get('state')}"
        case Kind.VHOST if given.get("bdev_name") is None:
            return "its bdev has gone"
        case Kind.KEY if not given.get("path"):
            return "it is no file"
        case Kind.BDEV if given.get("block_size") not in (512, 4096):
            return f"block size {given.get('block_size')}"
        case _:
            return ""


def _entry(
    rpc: str, state: State, served: Mapping[str, str], section: str, notes: list[str], entry: str
) -> dict[str, Any]:
    described: dict[str, Any] = {"rpc": rpc}
    if section == "hosts":
        nqns = {resource.attributes.get("hostnqn") for resource in _of(state, Kind.CONTROLLER)} - {None}
        if len(nqns) == 1:
            described["nqn"] = nqns.pop()
        elif nqns:
            notes.append(
                f"{entry}: its controllers connect under {len(nqns)} NQNs; the file has one per host"
            )
    transport = state.get(Id(Kind.TRANSPORT, "TCP"))
    if section == "targets" and transport is not None:
        described["transport"] = {
            name: _size(value) if "size" in name else value
            for name, value in transport.attributes.items()
            if name in TRANSPORT_LIMITS and value is not None
        }
    sections: dict[str, dict[str, Any]] = {
        "keys": {each.id.name: each.attributes["path"] for each in _of(state, Kind.KEY)},
        "bdevs": {each.id.name: _bdev(each, state) for each in _of(state, Kind.BDEV)},
        "controllers": {each.id.name: _controller(each, served) for each in _of(state, Kind.CONTROLLER)},
        "raids": {each.id.name: _raid(each) for each in _of(state, Kind.RAID)},
        "lvstores": {each.id.name: _lvstore(each, state) for each in _of(state, Kind.LVSTORE)},
    }
    described |= {name: value for name, value in sections.items() if value}
    subsystems = {each.id.name: _subsystem(each, state) for each in _of(state, Kind.SUBSYSTEM)}
    if section == "targets" and subsystems:
        described["subsystems"] = subsystems
    elif subsystems:
        notes.append(f"{entry}: serves {len(subsystems)} subsystem(s); name it as a target too to keep them")
    return described


def _of(state: State, kind: Kind) -> list[Resource]:
    return [resource for own, resource in state.items() if own.kind is kind]


def _size(size_bytes: int) -> int | str:
    for unit, word in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit}{word}"
    return size_bytes


def _qos(bdev: str, state: State) -> dict[str, Any]:
    limits = state.get(Id(Kind.QOS, bdev))
    if limits is None:
        return {}
    return {"qos": {name: value for name, value in limits.attributes.items() if value}}


def _bdev(resource: Resource, state: State) -> dict[str, Any]:
    given = dict(resource.attributes)
    driver = given.pop("driver")
    if "num_blocks" in given:
        given["size"] = _size(given.pop("num_blocks") * given["block_size"])
    if "filename" in given:
        given["file"] = given.pop("filename")
    # The identity is written out: labels on volumes remember it.
    return {driver: given, "uuid": resource.at_creation["uuid"], **_qos(resource.id.name, state)}


def _controller(resource: Resource, served: Mapping[str, str]) -> dict[str, Any]:
    given = resource.attributes
    if str(given["trtype"]).upper() == "PCIE":
        return {"pcie": given["paths"][0]}
    described: dict[str, Any] = {"subsystem": given["subnqn"], "paths": list(given["paths"])}
    if given["subnqn"] in served:
        described = {"target": served[given["subnqn"]], **described}
    for name, theirs in (("header_digest", "hdgst"), ("data_digest", "ddgst")):
        if given.get(theirs):
            described[name] = True
    for name, theirs in (
        ("ctrlr_loss_timeout_s", "ctrlr_loss_timeout_sec"),
        ("reconnect_delay_s", "reconnect_delay_sec"),
        ("fast_io_fail_timeout_s", "fast_io_fail_timeout_sec"),
    ):
        if given.get(theirs):
            described[name] = given[theirs]
    described |= {name: given[name] for name in ("psk", "dhchap_key", "dhchap_ctrlr_key") if given.get(name)}
    return described


def _raid(resource: Resource) -> dict[str, Any]:
    given = resource.attributes
    return {
        "strip_size": _size(given["strip_size_kb"] * KIB),
        "members": list(given["base_bdevs"]),
        "uuid": resource.at_creation["uuid"],
    }


def _lvstore(resource: Resource, state: State) -> dict[str, Any]:
    given = resource.attributes
    described: dict[str, Any] = {"bdev": given["bdev_name"], "cluster_size": _size(given["cluster_sz"])}
    lvols = {}
    for each in _of(state, Kind.LVOL):
        if each.id.parent != resource.id.name:
            continue
        lvol: dict[str, Any] = {"size": _size(each.attributes["size_in_mib"] * MIB)}
        if each.attributes["thin_provision"]:
            lvol["thin"] = True
        lvols[each.id.name] = lvol | _qos(f"{resource.id.name}/{each.id.name}", state)
    if lvols:
        described["lvols"] = lvols
    return described


def _subsystem(resource: Resource, state: State) -> dict[str, Any]:
    nqn = resource.id.name
    described = {name: value for name, value in resource.attributes.items() if value is not None}
    hosts: list[Any] = []
    for each in _of(state, Kind.HOST):
        if each.id.parent == nqn:
            keys = {name: key for name, key in each.attributes.items() if key is not None}
            hosts.append({"host": each.id.name, **keys} if keys else each.id.name)
    listeners = [
        {"address": each.id.name, "secure_channel": True}
        if each.attributes.get("secure_channel")
        else each.id.name
        for each in _of(state, Kind.LISTENER)
        if each.id.parent == nqn
    ]
    namespaces = {}
    for each in _of(state, Kind.NAMESPACE):
        if each.id.parent == nqn:
            identity = {
                name: each.attributes[name] for name in ("uuid", "nguid") if each.attributes.get(name)
            }
            namespaces[each.id.name] = {"bdev": each.attributes["bdev_name"], **identity}
    for name, found in (("hosts", hosts), ("listeners", listeners), ("namespaces", namespaces)):
        if found:
            described[name] = found
    return described


# --- volumes ----------------------------------------------------------------------------------


def _volumes(
    kept: Mapping[tuple[str, str], State], host_nqn: str | None, timeout_s: float, notes: list[str]
) -> list[_FoundVolume]:
    """The volumes whose members the targets serve, by their labels."""
    candidates = list(_candidates(kept))
    if not candidates:
        return []
    labelled: dict[bytes, list[tuple[Label, str, dict[str, Any], BlockDevice]]] = {}
    found = []
    with make_session(host_nqn, None, timeout_s=timeout_s) as session:
        for uri, member in candidates:
            deadline = Deadline.after(timeout_s)
            try:
                device = session.open_device(uri, deadline=deadline)
                label = read_label(device, deadline)
            except CorruptionError:
                continue  # no label: no member of ours
            except KvdevError as error:
                notes.append(f"{uri}: cannot look for a volume: {error}")
                continue
            labelled.setdefault(label.volume_uuid, []).append((label, uri, member, device))
        for parts in labelled.values():
            parts.sort(key=lambda part: part[0].member_index)
            name = parts[0][0].volume_name
            try:
                deadline = Deadline.after(timeout_s)
                volume = Volume.open([device for _, _, _, device in parts], deadline=deadline)
                infos = volume.namespaces(deadline=deadline)
            except KvdevError as error:
                notes.append(f"volume {name}: left out: {error}")
                continue
            found.append(
                _FoundVolume(
                    name,
                    volume.strip_size_bytes,
                    [member for _, _, member, _ in parts],
                    [uri for _, uri, _, _ in parts],
                    infos,
                )
            )
    return found


def _candidates(kept: Mapping[tuple[str, str], State]) -> Iterable[tuple[str, dict[str, Any]]]:
    for (section, entry), state in kept.items():
        if section != "targets":
            continue
        for own in state:
            if own.kind is not Kind.NAMESPACE:
                continue
            listeners = [
                each.name for each in state if each.kind is Kind.LISTENER and each.parent == own.parent
            ]
            if listeners:
                nsid = int(own.name)
                served = ServedSubsystem(
                    own.parent, entry, (), listeners, {nsid: ServedNamespace(nsid)}, None
                )
                member = {"target": entry, "subsystem": own.parent, "nsid": nsid}
                yield namespace_uri(served, nsid), member


def _engines(state: State, volumes: list[_FoundVolume], notes: list[str], entry: str) -> dict[str, Any]:
    """Vhost controllers NAME.0 … NAME.n−1 on one bdev, with the KV namespaces of the same names."""
    ranks: dict[str, dict[int, Resource]] = {}
    for vhost in _of(state, Kind.VHOST):
        match = _RANK_NAME.fullmatch(vhost.id.name)
        if match is None:
            notes.append(f"{entry}: {vhost.id}: left out: its name is not ENGINE.RANK")
        else:
            ranks.setdefault(match["engine"], {})[int(match["rank"])] = vhost
    engines: dict[str, Any] = {}
    for engine, by_rank in ranks.items():
        described = _engine(engine, by_rank, volumes)
        if described is None:
            notes.append(f"{entry}: vhost {engine}.*: left out: no volume has KV namespaces of these names")
        else:
            engines[engine] = described
    return engines


def _engine(
    engine: str, by_rank: Mapping[int, Resource], volumes: list[_FoundVolume]
) -> dict[str, Any] | None:
    bdevs = {vhost.attributes["bdev_name"] for vhost in by_rank.values()}
    if len(bdevs) != 1 or sorted(by_rank) != list(range(len(by_rank))):
        return None
    for volume in volumes:
        infos = {info.name: info for info in volume.namespaces}
        own = [infos[name] for rank in range(len(by_rank)) if (name := f"{engine}.{rank}") in infos]
        if len(own) == len(by_rank):
            return {"bdev": bdevs.pop(), **_bare_engine(volume, own)}
    return None


def _adopt_bare_host(
    adopted: Adopted,
    kept: Mapping[tuple[str, str], State],
    volumes: list[_FoundVolume],
    host_nqn: str | None,
) -> None:
    """KV namespaces NAME.0 … NAME.n−1 that no vhost controller shows: of workers that connect by themselves."""
    hosts: dict[str, Any] = adopted.value.get("hosts", {})
    taken = {
        (engine["volume"], name)
        for host in hosts.values()
        for name, engine in host.get("engines", {}).items()
    }
    engines: dict[str, Any] = {}
    for volume in volumes:
        ranks: dict[str, dict[int, NamespaceInfo]] = {}
        for info in volume.namespaces:
            match = _RANK_NAME.fullmatch(info.name)
            name, rank = (match["engine"], int(match["rank"])) if match else (info.name, -1)
            if (volume.name, name) not in taken:
                ranks.setdefault(name, {})[rank] = info
        for name, by_rank in ranks.items():
            infos = [by_rank[rank] for rank in sorted(by_rank)]
            if sorted(by_rank) != list(range(len(by_rank))) or name in engines:
                left = ", ".join(f"{volume.name}#{info.name}" for info in infos)
                adopted.notes.append(
                    f"KV namespaces {left}: left out: their names are not ENGINE.0, ENGINE.1, …"
                )
            else:
                engines[name] = _bare_engine(volume, infos)
    if not engines:
        return
    entry = next(name for name in (f"host{index}" for index in range(len(hosts) + 1)) if name not in hosts)
    known = {host.get("nqn") for host in hosts.values()}
    nqn = host_nqn or _only_host(kept)
    described = {"nqn": nqn} if nqn is not None and nqn not in known else {}
    adopted.value.setdefault("hosts", {})[entry] = {**described, "engines": engines}
    adopted.notes.append(
        f"{entry}: stands for the workers of KV namespaces that no adopted host shows; give it their host's name"
    )


def _only_host(kept: Mapping[tuple[str, str], State]) -> str | None:
    nqns = {own.name for state in kept.values() for own in state if own.kind is Kind.HOST}
    return nqns.pop() if len(nqns) == 1 else None


def _bare_engine(volume: _FoundVolume, infos: list[NamespaceInfo]) -> dict[str, Any]:
    first = infos[0]
    return {
        "volume": volume.name,
        "geometry": _geometry(first.geometry, len(infos)),
        "tensor_parallel": len(infos),
        **_quota(infos),
        **({"checksum": infos[0].checksum} if infos[0].checksum != "crc32c" else {}),
    }


def _quota(infos: list[NamespaceInfo]) -> dict[str, Any]:
    """Ranks that shared what was free have not all the same quota."""
    if len({info.quota_pages for info in infos}) > 1:
        return {}
    return {"quota_per_rank": _size(infos[0].quota_pages * infos[0].page_size_bytes)}


def _geometry(rank: Geometry, rank_count: int) -> dict[str, Any]:
    whole = rank.kv_head_count if rank_count == 1 or rank.attention == "mla" else rank.kv_head_total
    return {
        "model_id": rank.model_id,
        "revision": rank.revision,
        "layer_first": rank.layer_first,
        "layer_count": rank.layer_count,
        "kv_head_count": whole,
        "head_size": rank.head_size,
        "dtype": rank.dtype,
        "tokens_per_page": rank.tokens_per_page,
        "attention": rank.attention,
    }


def _mark_swallowed(adopted: Adopted, timeout_s: float) -> None:
    """Volumes are adopted as they are, also where a flush to them is swallowed."""
    deployment = build_deployment(load_text(adopted.text(), "the adopted file"))
    with looking(deployment, timeout_s=timeout_s, reads_volumes=False) as look:
        for name, spec in deployment.volumes.items():
            if any(verdict(hops) is FlushState.SWALLOWED for _, hops in flush_of_volume(look, spec)):
                adopted.value["volumes"][name]["durability"] = "none"
                adopted.notes.append(f"volume {name}: a flush to it is swallowed; status shows where")


# --- SPDK's own configuration -------------------------------------------------------------------


def export_config(client: Client) -> dict[str, Any]:
    """What SPDK's ``--json`` option reads at its start, from what runs now."""
    subsystems = []
    for each in client.call("framework_get_subsystems"):
        name = str(each["subsystem"])
        config = client.call("framework_get_config", {"name": name})
        subsystems.append({"subsystem": name, "config": config})
    return {"subsystems": subsystems}
