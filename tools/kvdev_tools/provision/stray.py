"""Volumes on what the file's targets serve, found by their labels, that the file does not name.

A plan says that they are there; nothing below them is taken away while they may have a writer.
Not here: the volumes of the file (``volumes``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvdev.block.device import BlockDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError
from kvdev.session import Session
from kvdev.store import NamespaceInfo, Volume
from kvdev.store.label import Label
from kvdev.store.members import read_label
from kvdev_tools.connect import make_session
from kvdev_tools.provision.document import (
    Deployment,
    Endpoint,
    ServedNamespace,
    ServedSubsystem,
    namespace_uri,
)
from spdk_rpc.plan import Id, Kind, Observed

LOOK_LIMIT = 32
"""Namespaces whose labels a plan reads: connecting costs some 10 ms each."""

Place = tuple[str, int]
"""A subsystem's NQN and a namespace id."""


@dataclass
class Stray:
    """One volume; ``reason`` says why its KV namespaces could not be read."""

    name: str
    places: list[Place]
    namespaces: list[NamespaceInfo] = field(default_factory=list)
    reason: str = ""

    def text(self) -> str:
        where = ", ".join(f"{nqn}#{nsid}" for nqn, nsid in self.places)
        names = ", ".join(info.name for info in self.namespaces)
        held = f" with KV namespaces {names}" if names else ""
        unread = f"; it cannot be opened: {self.reason}" if self.reason else ""
        return f"volume {self.name} on {where}{held}: is not in the file and stays{unread}"


@dataclass
class Strays:
    """What was found, and what could not be looked at."""

    found: list[Stray] = field(default_factory=list)
    unread: list[tuple[Place, str]] = field(default_factory=list)
    left_count: int = 0

    def notes(self) -> list[str]:
        notes = [each.text() for each in self.found]
        notes += [
            f"namespace {nqn}#{nsid}: its label was not read: {why}" for (nqn, nsid), why in self.unread
        ]
        if self.left_count:
            notes.append(
                f"{self.left_count} namespaces are of no volume of the file and were not looked at; "
                f"kvdev provision status looks at all"
            )
        return notes


@dataclass
class _Part:
    label: Label
    place: Place
    device: BlockDevice


def find_strays(
    deployment: Deployment,
    observed: list[tuple[Endpoint, Observed]],
    *,
    timeout_s: float,
    limit: int | None = None,
) -> Strays:
    """Read the labels of served namespaces that are no members of the file's volumes."""
    strays = Strays()
    known = {
        (member.subsystem, member.nsid) for spec in deployment.volumes.values() for member in spec.members
    }
    subsystems = [
        each
        for endpoint, seen in observed
        if endpoint.role == "target"
        for each in _served(deployment, endpoint, seen)
    ]
    left = limit
    parts: dict[bytes, list[_Part]] = {}
    sessions: dict[tuple[str | None, bool], Session] = {}
    try:
        for served in subsystems:
            nsids = [nsid for nsid in sorted(served.namespaces) if (served.nqn, nsid) not in known]
            looked = nsids if left is None else nsids[:left]
            strays.left_count += len(nsids) - len(looked)
            left = None if left is None else left - len(looked)
            if looked:
                host = host_for(deployment, served)
                how = (host, served.is_secure)
                if how not in sessions:
                    keys = deployment.secrets_for(host, served)
                    sessions[how] = make_session(host, None, timeout_s=timeout_s, keys=keys)
                for part in _look(sessions[how], served, looked, timeout_s, strays):
                    parts.setdefault(part.label.volume_uuid, []).append(part)
        strays.found = [_open(each, timeout_s) for each in parts.values()]
    finally:
        for session in sessions.values():
            session.close()
    return strays


def _served(deployment: Deployment, endpoint: Endpoint, seen: Observed) -> Iterator[ServedSubsystem]:
    """The subsystems of a target that hosts can reach, those of the file first."""
    nqns = [own.name for own in seen.state if own.kind is Kind.SUBSYSTEM]
    for nqn in sorted(nqns, key=lambda each: (each not in deployment.subsystems, each)):
        own = [each for each in seen.state if each.parent == nqn]
        listeners = [each.name for each in own if each.kind is Kind.LISTENER]
        secure = frozenset(
            each.name
            for each in own
            if each.kind is Kind.LISTENER and seen.state[each].attributes.get("secure_channel")
        )
        hosts = {each.name for each in own if each.kind is Kind.HOST}
        namespaces = {int(each.name) for each in own if each.kind is Kind.NAMESPACE}
        is_open = bool(seen.state[Id(Kind.SUBSYSTEM, nqn)].attributes.get("allow_any_host"))
        if listeners and (hosts or is_open):
            yield ServedSubsystem(
                nqn,
                endpoint.name,
                (),
                listeners,
                {nsid: ServedNamespace(nsid) for nsid in namespaces},
                None if is_open else hosts,
                secure_listeners=secure,
            )


def host_for(deployment: Deployment, served: ServedSubsystem) -> str | None:
    """As whom to look: a host of the file where one is let in; None is this machine's own NQN."""
    nqns = [spec.host_nqn for spec in deployment.volumes.values() if spec.host_nqn is not None]
    nqns += deployment.host_nqns.values()
    if served.allowed_hosts is None:
        return nqns[0] if nqns and not served.is_managed else None
    return next((nqn for nqn in nqns if nqn in served.allowed_hosts), min(served.allowed_hosts))


def _look(
    session: Session, served: ServedSubsystem, nsids: list[int], timeout_s: float, strays: Strays
) -> Iterator[_Part]:
    for index, nsid in enumerate(nsids):
        deadline = Deadline.after(timeout_s)
        try:
            device = session.open_device(namespace_uri(served, nsid), deadline=deadline)
            yield _Part(read_label(device, deadline), (served.nqn, nsid), device)
        except CorruptionError:
            continue  # no label: no member of a volume
        except (KvdevError, OSError) as error:
            # What refuses one of its namespaces will refuse the others, each after a wait.
            strays.unread += [((served.nqn, each), str(error)) for each in nsids[index:]]
            return


def _open(parts: list[_Part], timeout_s: float) -> Stray:
    parts.sort(key=lambda part: part.label.member_index)
    stray = Stray(parts[0].label.volume_name, [part.place for part in parts])
    deadline = Deadline.after(timeout_s)
    try:
        volume = Volume.open([part.device for part in parts], deadline=deadline)
        stray.namespaces = volume.namespaces(deadline=deadline)
    except (KvdevError, OSError) as error:
        stray.reason = str(error)
    return stray
