"""Subsystems of targets that are not ours to configure: discovered, connected to, and compared with the file.

Not here: the volumes on them (``volumes``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote

from kvdev.clock import Deadline
from kvdev.errors import KvdevError
from kvdev.initiator.namespace import NamespaceInfo, scan
from kvdev.session import Session
from kvdev.units import format_size
from kvdev_tools.connect import make_session
from kvdev_tools.provision.document import Deployment, ServedSubsystem
from kvdev_tools.provision.source import Path_
from kvdev_tools.provision.stray import host_for
from spdk_rpc.plan.resource import join_address

TRTYPE_TCP = 3
OK = "ok"
UNREACHABLE = "unreachable"


@dataclass
class UnmanagedSeen:
    """One subsystem at one moment."""

    served: ServedSubsystem
    listeners: dict[str, str] = field(default_factory=dict)
    """Address -> ok, or why a host cannot use it."""
    namespaces: dict[int, NamespaceInfo] = field(default_factory=dict)
    has_volatile_cache: bool | None = None
    model: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return OK in self.listeners.values()

    @property
    def health(self) -> str:
        if not self.listeners:
            return "not checked"
        return OK if self.is_up else UNREACHABLE

    def namespace_health(self, nsid: int) -> str:
        """ok, or how a namespace differs from the file."""
        if not self.is_up:
            return self.health
        found = self.namespaces.get(nsid)
        if found is None:
            return "missing"
        if found.problem:
            return found.problem
        wanted = self.served.namespaces[nsid]
        if wanted.size_bytes is not None and wanted.size_bytes != found.size_bytes:
            return f"size is {format_size(found.size_bytes)}"
        if wanted.block_size is not None and wanted.block_size != found.block_size_bytes:
            return f"block_size is {found.block_size_bytes}"
        return OK

    def problems(self) -> list[tuple[Path_, str]]:
        """What stands in the way of using it as the file says, with its place there."""
        if not self.listeners:
            return []
        if not self.is_up:
            address, reason = next(iter(self.listeners.items()))
            return [(self.served.path, reason if address in reason else f"{address}: {reason}")]
        found: list[tuple[Path_, str]] = []
        for nsid, wanted in sorted(self.served.namespaces.items()):
            health = self.namespace_health(nsid)
            if health == OK:
                continue
            active = ", ".join(str(each) for each in sorted(self.namespaces)) or "none"
            text = {"missing": f"this subsystem has no such namespace; active are {active}"}.get(
                health, health
            )
            if health.startswith("size"):
                text += f", expected {format_size(wanted.size_bytes or 0)}"
            elif health.startswith("block_size"):
                text += f", expected {wanted.block_size}"
            found.append(((*self.served.path, "namespaces", str(nsid)), text))
        return found


def see_unmanaged(deployment: Deployment, *, timeout_s: float) -> dict[str, UnmanagedSeen]:
    """Ask every subsystem of an unmanaged target, over each of its listeners. Never raises for what it finds."""
    found: dict[str, UnmanagedSeen] = {}
    for served in deployment.subsystems.values():
        if served.is_managed:
            continue
        host = host_for(deployment, served)
        keys = deployment.secrets_for(host, served)
        with make_session(host, None, timeout_s=timeout_s, keys=keys) as session:
            found[served.nqn] = _see(session, served, timeout_s)
    return found


def _see(session: Session, served: ServedSubsystem, timeout_s: float) -> UnmanagedSeen:
    seen = UnmanagedSeen(served)
    for address in served.listeners:
        try:
            _ask(session, seen, address, timeout_s)
            seen.listeners[address] = OK
        except (KvdevError, OSError) as error:
            seen.listeners[address] = str(error)
    down = [
        why if address in why else f"{address}: {why}" for address, why in seen.listeners.items() if why != OK
    ]
    if seen.is_up:
        seen.notes += [f"{served.nqn}: a path is down: {each}" for each in down]
        more = sorted(set(seen.namespaces) - set(served.namespaces))
        if more:
            listed = ", ".join(str(nsid) for nsid in more)
            seen.notes.append(f"{served.nqn}: has namespaces {listed}, which the file does not name")
        seen.notes += _not_listed(session, served, timeout_s)
    return seen


def _ask(session: Session, seen: UnmanagedSeen, address: str, timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    nqn = quote(seen.served.nqn, safe=":.-_")
    controller = session.controller(f"tcp://{address}/{nqn}", deadline=deadline)
    if not seen.namespaces:
        seen.namespaces = {info.nsid: info for info in scan(controller, deadline=deadline)}
        seen.has_volatile_cache = controller.identify.has_volatile_cache
        seen.model = controller.identify.mn


def _not_listed(session: Session, served: ServedSubsystem, timeout_s: float) -> list[str]:
    """Whether the discovery service beside the first listener knows the subsystem; many arrays have it elsewhere."""
    address = next(iter(served.listeners))
    try:
        entries = session.discover(address, deadline=Deadline.after(timeout_s))
    except (KvdevError, OSError):
        return []
    own = [entry for entry in entries if entry.subnqn == served.nqn]
    if not own:
        what = f"{served.nqn}: the discovery service at {address} does not list it for this host"
        return [what] if entries else []
    offered = {join_address(entry.traddr, entry.trsvcid) for entry in own if entry.trtype == TRTYPE_TCP}
    more = sorted(offered - set(served.listeners))
    return (
        [f"{served.nqn}: is offered at {', '.join(more)} too, which the file does not name"] if more else []
    )
