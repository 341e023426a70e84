"""``status``: target, subsystem, namespace, member, volume, KV namespace, with health, size, use, iostat and flush.

Not here: reading (``work``, ``volumes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvdev.units import format_size
from kvdev_tools.provision.render import Painter
from kvdev_tools.provision.unmanaged import UnmanagedSeen
from kvdev_tools.provision.volumes import VolumeSeen, VolumeState, describe_namespaces
from kvdev_tools.provision.work import EndpointView, Look, WholePlan, flush_of_volume
from spdk_rpc import SpdkRpcError
from spdk_rpc.plan import Id, Kind
from spdk_rpc.plan.flush import verdict
from spdk_rpc.plan.observe import iostat_of
from spdk_rpc.plan.resource import Attributes, bdevs_used, changed_names

_COUNTERS = {
    "bytes_read": "bytes_read",
    "bytes_written": "bytes_written",
    "reads": "num_read_ops",
    "writes": "num_write_ops",
}


def status_document(look: Look, whole: WholePlan | None, *, timeout_s: float) -> dict[str, Any]:
    """All of it as one document; ``whole`` is the plan, None when not everything could be read."""
    notes = [] if whole is None else list(whole.notes)
    stats = {id(view): _iostat(view) for view in look.endpoints}
    members = {
        (member.subsystem, member.nsid): (seen.spec.name, index)
        for seen in look.volumes.values()
        for index, member in enumerate(seen.spec.members)
    }
    targets = [
        _target(look, view, stats[id(view)], members)
        for view in look.endpoints
        if view.endpoint.role == "target"
    ]
    unmanaged: dict[str, list[str]] = {}
    for served in look.deployment.subsystems.values():
        if not served.is_managed:
            unmanaged.setdefault(served.target, []).append(served.nqn)
    targets += [_unmanaged(look, name, nqns, members) for name, nqns in unmanaged.items()]
    hosts = [_host(view, stats[id(view)]) for view in look.endpoints if view.endpoint.role == "host"]
    volumes = [_volume(look, seen, timeout_s, notes) for seen in look.volumes.values()]
    return {
        "name": look.deployment.name,
        "pending_steps": None if whole is None else whole.step_count,
        "targets": targets,
        "hosts": hosts,
        "volumes": volumes,
        "problems": [] if whole is None else whole.problems,
        "notes": notes,
    }


def is_healthy(document: Mapping[str, Any]) -> bool:
    """Whether everything is up and as the file says."""
    entries = [*document["targets"], *document["hosts"], *document["volumes"]]
    return (
        document["pending_steps"] == 0
        and not document["problems"]
        and all(entry["health"] in ("ok", "not checked") for entry in entries)
    )


def _iostat(view: EndpointView) -> dict[str, dict[str, Any]]:
    try:
        return iostat_of(view.client.call, view.observed.methods) if view.is_up else {}
    except SpdkRpcError:
        return {}


def _counters(stats: Mapping[str, Mapping[str, Any]], view: EndpointView, bdev: str | None) -> dict[str, Any]:
    facts = view.observed.bdevs.get(bdev or "")
    # An lvol's counters stand under its UUID.
    stat = stats.get(bdev or "") or stats.get(facts.uuid if facts is not None else "") or {}
    errors = stat.get("io_error") or {}
    counted = {name: stat.get(theirs) for name, theirs in _COUNTERS.items()}
    return {**counted, "io_errors": sum(errors.values()) if isinstance(errors, dict) else None}


def _health(view: EndpointView, own: Id) -> str:
    """Of one resource: ok, missing, or what differs."""
    if not view.is_up:
        return "unreachable"
    found = view.observed.state.get(own)
    if found is None:
        return "missing"
    differing = changed_names(found, view.endpoint.desired[own])
    if not differing:
        return "ok"
    return _difference(
        differing[0], found.attributes.get(differing[0]), view.endpoint.desired[own].attributes
    )


def _difference(name: str, is_: Any, wanted: Attributes) -> str:
    """In words: what it is, has not, or has beside what the file names."""
    shall = wanted[name]
    if isinstance(shall, (tuple, list)) and isinstance(is_, (tuple, list)):
        lost, more = [each for each in shall if each not in is_], [each for each in is_ if each not in shall]
        if lost:
            return f"lacks {', '.join(map(str, lost))}"
        return f"has {', '.join(map(str, more))} too" if more else f"{name} are in another order"
    return f"has no {name}" if is_ is None else f"{name} is {is_}"


def _whole(own: str, parts: Iterable[Mapping[str, Any]]) -> str:
    """The health of what consists of parts: degraded where it is there and one of them is not as it shall be."""
    return "degraded" if own == "ok" and any(part["health"] != "ok" for part in parts) else own


def _target(
    look: Look,
    view: EndpointView,
    stats: Mapping[str, Mapping[str, Any]],
    members: Mapping[tuple[str | None, int], tuple[str, int]],
) -> dict[str, Any]:
    subsystems = []
    for served in look.deployment.subsystems.values():
        if served.target != view.endpoint.name:
            continue
        namespaces = []
        for nsid, namespace in sorted(served.namespaces.items()):
            facts = view.observed.bdevs.get(namespace.bdev or "")
            namespaces.append(
                {
                    "nsid": nsid,
                    "bdev": namespace.bdev,
                    "health": _health(view, Id(Kind.NAMESPACE, str(nsid), served.nqn)),
                    "size_bytes": None if facts is None else facts.size_bytes,
                    **_counters(stats, view, namespace.bdev),
                    **_membership(members, served.nqn, nsid),
                }
            )
        listeners = [
            {"address": each, "health": _health(view, Id(Kind.LISTENER, each, served.nqn))}
            for each in served.listeners
        ]
        own = _health(view, Id(Kind.SUBSYSTEM, served.nqn))
        subsystems.append(
            {
                "nqn": served.nqn,
                "health": _whole(own, (*listeners, *namespaces)),
                "listeners": listeners,
                "connected_hosts": _connected(view, served.nqn),
                "namespaces": namespaces,
            }
        )
    entry = _entry(view)
    return {**entry, "health": _whole(entry["health"], subsystems), "subsystems": subsystems}


def _membership(
    members: Mapping[tuple[str | None, int], tuple[str, int]], nqn: str, nsid: int
) -> dict[str, Any]:
    volume, index = members.get((nqn, nsid), (None, None))
    return {"volume": volume, "member_index": index}


def _connected(view: EndpointView, nqn: str) -> list[str]:
    method = "nvmf_subsystem_get_controllers"
    if not view.is_up or method not in view.observed.methods:
        return []
    try:
        found = view.client.call(method, {"nqn": nqn})
    except SpdkRpcError:
        return []  # it is not there
    return sorted({str(each.get("hostnqn")) for each in found if isinstance(each, dict)})


def _entry(view: EndpointView) -> dict[str, Any]:
    return {
        "name": view.endpoint.name,
        "rpc": view.endpoint.rpc,
        "health": "ok" if view.is_up else "unreachable",
        "reason": None if view.error is None else str(view.error),
        "version": view.observed.version or None,
    }


def _unmanaged(
    look: Look, name: str, nqns: list[str], members: Mapping[tuple[str | None, int], tuple[str, int]]
) -> dict[str, Any]:
    """A target that is not ours: discovered and connected to."""
    subsystems = []
    for nqn in nqns:
        seen = look.unmanaged.get(nqn) or UnmanagedSeen(look.deployment.subsystems[nqn])
        namespaces = []
        for nsid, namespace in sorted(seen.served.namespaces.items()):
            found = seen.namespaces.get(nsid)
            namespaces.append(
                {
                    "nsid": nsid,
                    "bdev": None,
                    "health": seen.namespace_health(nsid),
                    "size_bytes": namespace.size_bytes if found is None else found.size_bytes,
                    **dict.fromkeys((*_COUNTERS, "io_errors")),
                    **_membership(members, nqn, nsid),
                }
            )
        subsystems.append(
            {
                "nqn": nqn,
                # A path that is down is a note while another one is up.
                "health": _whole(seen.health, namespaces),
                "listeners": [
                    {"address": each, "health": seen.listeners.get(each, "not checked")}
                    for each in seen.served.listeners
                ],
                "connected_hosts": [],
                "namespaces": namespaces,
            }
        )
    models = {each.model for each in look.unmanaged.values() if each.served.target == name and each.model}
    healths = {each["health"] for each in subsystems}
    return {
        "name": name,
        "rpc": None,
        "health": healths.pop() if len(healths) == 1 else "degraded" if healths else "not checked",
        "reason": "managed: false",
        "version": ", ".join(sorted(models)) or None,
        "subsystems": subsystems,
    }


def _host(view: EndpointView, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    observed = view.observed
    desired = view.endpoint.desired
    controllers = [
        {
            "name": own.name,
            "health": _health(view, own),
            "path_states": observed.controller_states.get(own.name, []),
        }
        for own in desired
        if own.kind is Kind.CONTROLLER
    ]
    raids = [
        {"name": own.name, "health": _health(view, own), **_counters(stats, view, own.name)}
        for own in desired
        if own.kind is Kind.RAID
    ]
    vhosts = [
        {
            "name": own.name,
            "health": _health(view, own),
            "bdev": bdevs_used(desired[own])[0],
            "socket": observed.vhost_sockets.get(own.name),
            "sessions": observed.vhost_session_counts.get(own.name, 0),
        }
        for own in desired
        if own.kind is Kind.VHOST
    ]
    entry = _entry(view)
    health = _whole(entry["health"], (*controllers, *raids, *vhosts))
    return {**entry, "health": health, "controllers": controllers, "raids": raids, "vhosts": vhosts}


def _volume(look: Look, seen: VolumeSeen, timeout_s: float, notes: list[str]) -> dict[str, Any]:
    ways = flush_of_volume(look, seen.spec)
    health = {
        VolumeState.PRESENT: "ok",
        VolumeState.ABSENT: "missing",
        VolumeState.UNREACHABLE: "unreachable",
        VolumeState.REFUSED: "refused",
    }[seen.state]
    return {
        "name": seen.spec.name,
        "health": health,
        "reason": seen.reason or None,
        "size_bytes": None if seen.volume is None else seen.volume.size_bytes,
        "free_bytes": seen.free_bytes if seen.volume is not None else None,
        "members": [member.uri for member in seen.spec.members],
        "flush": [
            {
                "way": way,
                "state": verdict(hops).value,
                "hops": [
                    {"where": hop.where, "state": hop.state.value, "reason": hop.reason} for hop in hops
                ],
            }
            for way, hops in ways
        ],
        "kv_namespaces": describe_namespaces(seen, timeout_s=timeout_s, on_error=notes.append),
    }


# --- the tree ---------------------------------------------------------------------------------


def tree_lines(document: Mapping[str, Any], painter: Painter) -> Iterator[str]:
    """The document as a tree."""

    def shown(health: str) -> str:
        colour = {"ok": "32", "not checked": "33"}.get(health, "31")
        return painter.paint(colour, health)

    yield painter.paint("1", str(document["name"]))
    volumes = {volume["name"]: volume for volume in document["volumes"]}
    for target in document["targets"]:
        yield f"├─ target {target['name']}  {target['rpc'] or target['reason']}  {shown(target['health'])}"
        for subsystem in target["subsystems"]:
            listeners = ", ".join(each["address"] for each in subsystem["listeners"])
            yield f"│  ├─ subsystem {subsystem['nqn']}  {listeners}  {shown(subsystem['health'])}"
            for each in subsystem["listeners"]:
                if each["health"] not in ("ok", subsystem["health"]):
                    yield f"│  │  · {each['address']}: {shown(each['health'])}"
            for host in subsystem["connected_hosts"]:
                yield f"│  │  · connected: {host}"
            for namespace in subsystem["namespaces"]:
                yield f"│  │  ├─ {_namespace_text(namespace)}  {shown(namespace['health'])}"
    for host in document["hosts"]:
        yield f"├─ host {host['name']}  {host['rpc']}  {shown(host['health'])}"
        for controller in host["controllers"]:
            states = " ".join(controller["path_states"])
            yield f"│  ├─ controller {controller['name']}  {states}  {shown(controller['health'])}"
        for raid in host["raids"]:
            yield f"│  ├─ raid {raid['name']}  {_traffic(raid)}  {shown(raid['health'])}"
        for vhost in host["vhosts"]:
            text = f"{vhost['bdev']}  {vhost['socket'] or 'no socket'}  {vhost['sessions']} connected"
            yield f"│  ├─ vhost {vhost['name']}  {text}  {shown(vhost['health'])}"
    for volume in volumes.values():
        yield from _volume_lines(volume, shown(volume["health"]))
    if document["pending_steps"]:
        yield f"{document['pending_steps']} steps pending; kvdev provision plan shows them"
    yield from (f"note: {note}" for note in document["notes"])
    yield from (painter.paint("31", f"problem: {problem}") for problem in document["problems"])


def _volume_lines(volume: Mapping[str, Any], health: str) -> Iterator[str]:
    size = ""
    if volume["size_bytes"] is not None:
        size = f"  {format_size(volume['size_bytes'])}, {format_size(volume['free_bytes'])} free"
    yield f"├─ volume {volume['name']}{size}  {health}" + (
        f"  {volume['reason']}" if volume["reason"] else ""
    )
    for index, member in enumerate(volume["members"]):
        yield f"│  ├─ member {index}  {member}"
    for ways in _alike(volume["flush"], _flush_course):
        yield f"│  ├─ flush by {_first_of(ways, 'way')}: {ways[0]['state']}"
        hops = [hop for way in ways for hop in way["hops"]]
        for same in _alike(hops, lambda hop: (hop["state"], hop["reason"])):
            yield f"│  │  · {_first_of(same, 'where')}: {same[0]['state']} ({same[0]['reason']})"
    for each in volume["kv_namespaces"]:
        pages = "?" if each["pages"] is None else each["pages"]
        page = format_size(each["page_size_bytes"])
        yield (
            f"│  ├─ KV namespace {each['name']}  {each['model_id']}  {pages} of {each['quota_pages']} pages of {page}  "
            f"writer: {each['writer']}"
        )


def _flush_course(way: Mapping[str, Any]) -> tuple[Any, ...]:
    """What becomes of a flush on this way, whatever its hops are called."""
    return (way["state"], *((hop["state"], hop["reason"]) for hop in way["hops"]))


def _alike(
    entries: Iterable[Mapping[str, Any]], course: Callable[[Mapping[str, Any]], tuple[Any, ...]]
) -> list[list[Mapping[str, Any]]]:
    """Those of which the same is said, together, in the order of the first of them."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in entries:
        found.setdefault(course(each), []).append(each)
    return list(found.values())


def _first_of(entries: list[Mapping[str, Any]], name: str) -> str:
    """The first one, and how many more there are."""
    return f"{entries[0][name]}" + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")


def _namespace_text(namespace: Mapping[str, Any]) -> str:
    size = "" if namespace["size_bytes"] is None else f"  {format_size(namespace['size_bytes'])}"
    bdev = f"  {namespace['bdev']}" if namespace["bdev"] else ""
    member = f"  member {namespace['member_index']} of {namespace['volume']}" if namespace["volume"] else ""
    return f"namespace {namespace['nsid']}{bdev}{size}{member}  {_traffic(namespace)}".rstrip()


def _traffic(stat: Mapping[str, Any]) -> str:
    if stat["bytes_read"] is None:
        return ""
    errors = f", {stat['io_errors']} errors" if stat["io_errors"] else ""
    return f"read {format_size(stat['bytes_read'])}, written {format_size(stat['bytes_written'])}{errors}"
