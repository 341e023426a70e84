"""One look at everything the file names, the plan over all of it, and its execution in order.

Targets come first, then volumes and KV namespaces, then hosts: each needs what was before it.
Not here: one SPDK process (``spdk_rpc.plan``); one volume (``volumes``); printing (``render``).
"""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvdev.errors import KvdevError, UsageError
from kvdev.store import NamespaceInfo
from kvdev.units import format_size
from kvdev_tools.provision.document import Deployment, Endpoint, ServedSubsystem, VolumeSpec
from kvdev_tools.provision.stray import LOOK_LIMIT, Strays, find_strays
from kvdev_tools.provision.unmanaged import UnmanagedSeen, see_unmanaged
from kvdev_tools.provision.volumes import (
    VolumePlan,
    VolumeSeen,
    VolumeState,
    Writer,
    make_step,
    plan_volume,
    see_volume,
    session_for,
    writer_of,
)
from spdk_rpc import Client, RpcTimeoutError, RpcTransportError, SpdkRpcError, parse_address
from spdk_rpc.plan import (
    FlushHop,
    FlushState,
    Id,
    Kind,
    Observed,
    Plan,
    Problem,
    Resource,
    State,
    apply_plan,
    flush_of_bdev,
    observe,
    plan_removal,
    plan_state,
)
from spdk_rpc.plan.compare import Step
from spdk_rpc.plan.flush import verdict
from spdk_rpc.plan.resource import id_of_bdev

HUGEPAGE_SIZE_KIB = 2048


@dataclass(frozen=True)
class Peer:
    """The process behind a UNIX socket of this machine."""

    pid: int
    uid: int

    def path(self, path: str) -> Path:
        """A path as that process sees it, whatever container it lives in."""
        return Path(f"/proc/{self.pid}/root{path}")


@dataclass
class EndpointView:
    """One SPDK process: what was read, or why it could not be."""

    endpoint: Endpoint
    client: Client
    observed: Observed = field(default_factory=Observed)
    error: SpdkRpcError | None = None
    peer: Peer | None = None

    @property
    def is_up(self) -> bool:
        return self.error is None


@dataclass
class Look:
    """Everything at one moment."""

    deployment: Deployment
    endpoints: list[EndpointView]
    volumes: dict[str, VolumeSeen]
    unmanaged: dict[str, UnmanagedSeen] = field(default_factory=dict)
    strays: Strays = field(default_factory=Strays)

    def view(self, name: str, role: str) -> EndpointView | None:
        found = (each for each in self.endpoints if each.endpoint.name == name and each.endpoint.role == role)
        return next(found, None)


@dataclass
class WholePlan:
    """The plans of all processes and volumes."""

    look: Look
    endpoints: list[tuple[EndpointView, Plan]] = field(default_factory=list)
    volumes: list[tuple[VolumeSpec, VolumePlan]] = field(default_factory=list)
    is_removal: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.step_count == 0 and not self.problems

    @property
    def step_count(self) -> int:
        spdk = sum(len(plan.steps) for _, plan in self.endpoints)
        return spdk + sum(len(plan.steps) for _, plan in self.volumes)

    @property
    def problems(self) -> list[str]:
        """Everything that stands in the way, with the line of the file where there is one."""
        source = self.look.deployment.source
        found = []
        for view, plan in self.endpoints:
            for problem in plan.problems:
                place = view.endpoint.path if problem.id is None else view.endpoint.places.get(problem.id)
                found.append(source.message(place or view.endpoint.path, str(problem)))
        for spec, volume in self.volumes:
            found += [source.message(spec.path, problem) for problem in volume.problems]
        if not self.is_removal:
            for seen in self.look.unmanaged.values():
                found += [source.message(place, text) for place, text in seen.problems()]
        return found

    @property
    def notes(self) -> list[str]:
        spdk = [f"{view.endpoint.title}: {note}" for view, plan in self.endpoints for note in plan.notes]
        volumes = [note for _, plan in self.volumes for note in plan.notes]
        if self.is_removal:
            return [*spdk, *volumes, *self.warnings]
        unmanaged = [
            f"target {each.served.target}: {note}"
            for each in self.look.unmanaged.values()
            for note in each.notes
        ]
        return [*spdk, *volumes, *unmanaged, *self.look.strays.notes()]


# --- looking ----------------------------------------------------------------------------------


@contextlib.contextmanager
def looking(
    deployment: Deployment,
    *,
    timeout_s: float,
    reads_volumes: bool = True,
    stray_limit: int | None = LOOK_LIMIT,
) -> Iterator[Look]:
    """Read every process and volume; volumes stay open for the length of the block.

    ``stray_limit`` is how many namespaces that no volume of the file names are looked at; None means all.
    """
    with contextlib.ExitStack() as stack:
        views = [_see_endpoint(each, stack, timeout_s) for each in deployment.endpoints]
        look = Look(deployment, views, {})
        if reads_volumes:
            for spec in deployment.volumes.values():
                if unserved := _unserved_target(look, spec):
                    look.volumes[spec.name] = VolumeSeen(spec, VolumeState.UNREACHABLE, unserved)
                    continue
                session = stack.enter_context(session_for(spec, timeout_s=timeout_s))
                look.volumes[spec.name] = see_volume(session, spec, timeout_s=timeout_s)
            look.unmanaged = see_unmanaged(deployment, timeout_s=timeout_s)
            observed = [(view.endpoint, view.observed) for view in views if view.is_up]
            look.strays = find_strays(deployment, observed, timeout_s=timeout_s, limit=stray_limit)
        yield look


def _see_endpoint(endpoint: Endpoint, stack: contextlib.ExitStack, timeout_s: float) -> EndpointView:
    client = stack.enter_context(Client(endpoint.rpc, timeout_s=timeout_s))
    view = EndpointView(endpoint, client, peer=peer_of(endpoint.rpc))
    try:
        view.observed = observe(client.call)
    except (RpcTransportError, RpcTimeoutError) as error:
        view.error = error
    return view


def _unserved_target(look: Look, spec: VolumeSpec) -> str:
    """Which of a volume's namespaces are not served yet, so that connecting would only wait for a refusal."""
    for member in spec.members:
        served = look.deployment.subsystems.get(member.subsystem or "")
        if served is None or not served.is_managed:
            continue
        view = look.view(served.target, "target")
        wanted = (
            Id(Kind.NAMESPACE, str(member.nsid), served.nqn),
            Id(Kind.LISTENER, served.reach, served.nqn),
        )
        if view is None or not view.is_up or any(each not in view.observed.state for each in wanted):
            return f"{member.uri}: target {served.target} does not serve it"
    return ""


def peer_of(rpc: str) -> Peer | None:
    """Who listens on a UNIX socket; None over TCP or when nobody does."""
    address = parse_address(rpc)
    if not isinstance(address, str):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(address)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return None
    pid, uid, _ = (int.from_bytes(credentials[at : at + 4], "little") for at in (0, 4, 8))
    return Peer(pid, uid)


# --- planning ---------------------------------------------------------------------------------


def plan_everything(
    look: Look, *, replace: Collection[str] = (), remove: Collection[str] = (), prune: bool = False
) -> WholePlan:
    """The plan that makes the file true. Raises the error of a process that could not be read."""
    whole = WholePlan(look)
    for view in look.endpoints:
        if view.error is not None:
            raise view.error
    _check_named(look, replace, remove)
    for view in look.endpoints:
        plan = plan_state(
            view.endpoint.desired,
            view.observed,
            replace=_named_of(view.endpoint, replace),
            remove=_named_of(view.endpoint, remove),
            prune=prune,
            arriving=_arriving(look, view.endpoint),
        )
        plan.problems += _machine_problems(view)
        whole.endpoints.append((view, plan))
    for spec in look.deployment.volumes.values():
        seen = look.volumes[spec.name]
        volume = plan_volume(look.deployment, seen, is_coming=_is_coming(whole, spec))
        volume.problems += _flush_problems(look, spec)
        if look.volumes[spec.name].state is VolumeState.PRESENT and _is_touched(whole, spec):
            volume.notes.append(
                f"volume {spec.name}: a namespace below it is made anew; if that is another medium, its pages are "
                f"lost, and apply stops there"
            )
        whole.volumes.append((spec, volume))
    for view, plan in whole.endpoints:
        plan.problems += _writer_problems(look, view, plan)
    return whole


def _writer_problems(look: Look, view: EndpointView, plan: Plan) -> list[Problem]:
    """Namespaces that would be taken from under somebody who writes to them."""
    if view.endpoint.role != "target":
        return []
    held: dict[tuple[str | None, int], list[str]] = {}
    for seen in look.volumes.values():
        places = [(member.subsystem, member.nsid) for member in seen.spec.members]
        held |= dict.fromkeys(places, _live(seen.spec.name, seen.namespaces))
    for stray in look.strays.found:
        held |= dict.fromkeys(stray.places, _live(stray.name, stray.namespaces))
    found = []
    for step in plan.steps:
        if step.is_removal and step.id.kind is Kind.NAMESPACE:
            writers = held.get((step.id.parent, int(step.id.name)), [])
            found += [Problem(step.id, f"would be removed, and {each}") for each in writers[:1]]
    return found


def _live(volume: str, namespaces: list[NamespaceInfo]) -> list[str]:
    return [
        f"KV namespace {volume}#{info.name} has a live writer, process {info.record.owner_pid}; stop it first"
        for info in namespaces
        if writer_of(info.record) is Writer.LIVE
    ]


def plan_destruction(look: Look) -> WholePlan:
    """The plan that takes down what the file describes, hosts first. Volumes' bytes stay where media stay."""
    whole = WholePlan(look, is_removal=True)
    for view in sorted(look.endpoints, key=lambda each: each.endpoint.role != "host"):
        if view.error is not None:
            raise view.error
        whole.endpoints.append((view, plan_removal(view.endpoint.desired, view.observed)))
    return whole


def live_writers(look: Look, *, assume_dead: bool) -> list[str]:
    """Why destroying is refused: everybody who writes, or may write, to what would be taken down."""
    found = []
    held = [(name, seen.namespaces) for name, seen in look.volumes.items()]
    held += [(stray.name, stray.namespaces) for stray in look.strays.found]
    for name, namespaces in held:
        for info in namespaces:
            writer = writer_of(info.record)
            what = f"KV namespace {name}#{info.name}"
            if writer is Writer.LIVE:
                found.append(f"{what}: has a live writer, process {info.record.owner_pid} of this host")
            elif writer is Writer.UNKNOWN and not assume_dead:
                found.append(
                    f"{what}: was not closed by a writer elsewhere; with --assume-dead it counts as dead"
                )
    if not assume_dead:
        untold = "whether it has a writer cannot be told; --assume-dead"
        found += [f"volume {each.name}: {each.reason}: {untold}" for each in look.strays.found if each.reason]
        found += [f"namespace {nqn}#{nsid}: {why}: {untold}" for (nqn, nsid), why in look.strays.unread]
    for seen in look.volumes.values():
        name = seen.spec.name
        if seen.state is VolumeState.REFUSED and not assume_dead:
            found.append(
                f"volume {name}: {seen.reason}: whether it has a writer cannot be told; --assume-dead"
            )
        is_served = not _unserved_target(look, seen.spec)
        if seen.state is VolumeState.UNREACHABLE and is_served and not assume_dead:
            found.append(
                f"volume {name}: {seen.reason}: whether it has a writer cannot be told; --assume-dead"
            )
    for view in look.endpoints:
        for vhost, count in view.observed.vhost_session_counts.items():
            if count and Id(Kind.VHOST, vhost) in view.endpoint.desired:
                found.append(f"{view.endpoint.title}: vhost {vhost}: has {count} connected process(es)")
    return found


def _check_named(look: Look, replace: Collection[str], remove: Collection[str]) -> None:
    """What is named has to be somewhere, and what is named for removal may not be in the file."""
    desired = _references(look, lambda view: view.endpoint.desired)
    observed = _references(look, lambda view: view.observed.state)
    for each in replace:
        if each not in desired | observed:
            raise UsageError(f"replace: {each!r}: expected KIND:NAME or ENTRY/KIND:NAME, such as raid:R0")
    for each in remove:
        if each in desired:
            raise UsageError(f"remove: {each!r}: is in the file; take it out there first")
        if each not in observed:
            raise UsageError(f"remove: {each!r}: runs nowhere; expected KIND:NAME or ENTRY/KIND:NAME")


def _references(look: Look, state_of: Callable[[EndpointView], State]) -> set[str]:
    own = {(view.endpoint.name, each.reference) for view in look.endpoints for each in state_of(view)}
    return {reference for _, reference in own} | {f"{entry}/{reference}" for entry, reference in own}


def _named_of(endpoint: Endpoint, named: Collection[str]) -> set[str]:
    """References that mean this process: with its name before them, or with none."""
    prefix = f"{endpoint.name}/"
    own = {each.removeprefix(prefix) for each in named if each.startswith(prefix)}
    return own | {each for each in named if each.partition(":")[0].find("/") < 0}


def _arriving(look: Look, endpoint: Endpoint) -> dict[str, int | None]:
    """Bdevs that this process's controllers will show, with their block size."""
    found: dict[str, int | None] = {}
    for own, resource in endpoint.desired.items():
        nqn = resource.attributes.get("subnqn") if own.kind is Kind.CONTROLLER else None
        served = look.deployment.subsystems.get(nqn) if nqn else None
        if served is None:
            continue
        for nsid in served.namespaces:
            found[f"{own.name}n{nsid}"] = _served_block_size(look, served, nsid)
    return found


def _served_block_size(look: Look, served: ServedSubsystem, nsid: int) -> int | None:
    namespace = served.namespaces[nsid]
    if namespace.bdev is None:
        seen = look.unmanaged.get(served.nqn)
        found = None if seen is None else seen.namespaces.get(nsid)
        return namespace.block_size if found is None else found.block_size_bytes
    view = look.view(served.target, "target")
    if view is None:
        return None
    if (facts := view.observed.bdevs.get(namespace.bdev)) is not None:
        return facts.block_size
    return _desired_block_size(view.endpoint.desired, namespace.bdev)


def _desired_block_size(state: State, bdev: str) -> int | None:
    own = id_of_bdev(bdev, state)
    if own is None:
        return None
    if own.kind is Kind.RAID:
        return _desired_block_size(state, state[own].attributes["base_bdevs"][0])
    if own.kind is Kind.LVOL:
        return _desired_block_size(state, state[Id(Kind.LVSTORE, own.parent)].attributes["bdev_name"])
    size = state[own].attributes.get("block_size")
    return size if isinstance(size, int) else None


def _is_coming(whole: WholePlan, spec: VolumeSpec) -> bool:
    """Whether the plan makes something that the volume's members are served by."""
    targets = {
        whole.look.deployment.subsystems[member.subsystem].target
        for member in spec.members
        if member.subsystem in whole.look.deployment.subsystems
    }
    return any(view.endpoint.name in targets and plan.steps for view, plan in whole.endpoints)


def _machine_problems(view: EndpointView) -> list[Problem]:
    """Cores, huge pages, key files and backing files: what SPDK's RPC does not tell but this machine does."""
    found: list[Problem] = []
    endpoint, observed = view.endpoint, view.observed
    if endpoint.cores is not None and observed.cores:
        expected = tuple(core for core in range(endpoint.cores.bit_length()) if endpoint.cores >> core & 1)
        if expected != observed.cores:
            actual = sum(1 << core for core in observed.cores)
            found.append(
                Problem(
                    None,
                    f"cores: expected {endpoint.cores:#x}, got {actual:#x}; start it with -m {endpoint.cores:#x}",
                )
            )
    if view.peer is None:
        return found
    if endpoint.hugepages is not None:
        total = hugepage_count()
        if total < endpoint.hugepages:
            found.append(
                Problem(
                    None,
                    f"hugepages: expected at least {endpoint.hugepages} of 2 MiB, got {total}; "
                    f"sysctl vm.nr_hugepages={endpoint.hugepages}",
                )
            )
    for own, resource in endpoint.desired.items():
        fault = ""
        if own.kind is Kind.KEY:
            fault = key_fault(view.peer, resource.attributes["path"])
        elif own.kind is Kind.BDEV and own not in observed.state and "filename" in resource.attributes:
            fault = file_fault(view.peer, resource.attributes["filename"])
        if fault:
            found.append(Problem(own, fault))
    return found


def hugepage_count(meminfo: Path = Path("/proc/meminfo")) -> int:
    """2 MiB pages in the pool of this machine."""
    values = {}
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            values[name] = rest.split()
    is_2m = values.get("Hugepagesize", ["0"])[0] == str(HUGEPAGE_SIZE_KIB)
    return int(values.get("HugePages_Total", ["0"])[0]) if is_2m else 0


def key_fault(peer: Peer, path: str) -> str:
    """What SPDK would refuse about a key file; its content is never read."""
    try:
        status = peer.path(path).stat()
    except FileNotFoundError:
        return f"file {path}: expected a key file, there is none"
    except OSError:
        return ""  # we may not look there; SPDK will say
    if not stat.S_ISREG(status.st_mode):
        return f"file {path}: expected a regular file"
    if status.st_mode & 0o077:
        return f"file {path}: expected mode 0600, got {stat.S_IMODE(status.st_mode):04o}; chmod 600"
    if status.st_uid != peer.uid:
        return f"file {path}: expected to belong to uid {peer.uid}, as SPDK runs, got uid {status.st_uid}"
    return ""


def file_fault(peer: Peer, path: str) -> str:
    """Why SPDK could not open a bdev's backing file."""
    try:
        status = peer.path(path).stat()
    except FileNotFoundError:
        return f"file {path}: is not there; make it first, such as with truncate -s 10G {path}"
    except OSError:
        return ""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return f"file {path}: expected a regular file or block device"
    if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20:
        return f"file {path}: expected at least 1 MiB, got {format_size(status.st_size)}"
    return ""


# --- flush ------------------------------------------------------------------------------------


def flush_of_volume(look: Look, spec: VolumeSpec) -> list[tuple[str, list[FlushHop]]]:
    """The hops of a flush on every way to the volume: by each member, and by each host's local SPDK."""
    ways = [(member.uri, _member_hops(look, spec, index)) for index, member in enumerate(spec.members)]
    for engine in look.deployment.of_volume(spec.name):
        view = look.view(engine.host, "host")
        if view is None or engine.bdev is None:
            continue
        if not view.is_up:
            asked = FlushHop(view.endpoint.title, FlushState.UNKNOWN, "its SPDK cannot be asked")
            ways.append((f"host {engine.host}", [asked]))
            continue
        state = {**view.observed.state, **view.endpoint.desired}
        hops = flush_of_bdev(engine.bdev, state, view.observed.bdevs, beyond=lambda c, n: _beyond(look, c, n))
        top = FlushHop(
            f"vhost {engine.ranks[0].name}", _vhost_state(hops), "vhost-blk: offers what its bdev has"
        )
        ways.append((f"host {engine.host}", [top, *hops]))
    return ways


def _vhost_state(hops: list[FlushHop]) -> FlushState:
    return hops[0].state if hops else FlushState.UNKNOWN


def _member_hops(look: Look, spec: VolumeSpec, index: int) -> list[FlushHop]:
    member = spec.members[index]
    served = look.deployment.subsystems.get(member.subsystem or "")
    if served is not None and served.is_managed:
        return _served_hops(look, served, member.nsid)
    if member.uri.startswith("file:"):
        return [FlushHop(member.uri, FlushState.EFFECTIVE, "file: fdatasync")]
    seen = look.volumes.get(spec.name)
    has_cache = None if seen is None else seen.has_volatile_cache.get(member.uri)
    if has_cache is None and served is not None:
        has_cache = _unmanaged_cache(look, served.nqn)
    return [_controller_hop(member.uri, has_cache)]


def _controller_hop(where: str, has_cache: bool | None) -> FlushHop:
    if has_cache is None:
        return FlushHop(where, FlushState.UNKNOWN, "its controller could not be asked")
    if has_cache:
        return FlushHop(where, FlushState.EFFECTIVE, "the controller has a volatile cache and takes flushes")
    return FlushHop(where, FlushState.NOT_NEEDED, "the controller has no volatile cache")


def _served_hops(look: Look, served: ServedSubsystem, nsid: int) -> list[FlushHop]:
    view = look.view(served.target, "target")
    bdev = served.namespaces[nsid].bdev if nsid in served.namespaces else None
    where = f"target {served.target} {served.nqn}#{nsid}"
    if view is None or bdev is None:
        return [FlushHop(where, FlushState.UNKNOWN, "its target is not managed here")]
    if not view.is_up:
        return [FlushHop(where, FlushState.UNKNOWN, "its target cannot be asked")]
    state = {**view.observed.state, **view.endpoint.desired}
    hops = flush_of_bdev(bdev, state, view.observed.bdevs, beyond=lambda c, n: _beyond(look, c, n))
    top = hops[0].state
    reason = {
        FlushState.EFFECTIVE: "nvmf: passes it to its bdev",
        FlushState.SWALLOWED: "nvmf: says success, as its bdev has no flush",
        FlushState.NOT_NEEDED: "nvmf: nothing below keeps data in a cache",
        FlushState.UNKNOWN: "nvmf: its bdev is not known",
    }[top]
    return [FlushHop(where, top, reason), *hops]


def _beyond(look: Look, controller: Resource, nsid: int) -> list[FlushHop]:
    """What stands behind a controller of the file: the namespace as its target serves it."""
    nqn = controller.attributes.get("subnqn")
    served = look.deployment.subsystems.get(str(nqn))
    if served is None:
        return []
    if served.is_managed:
        return _served_hops(look, served, nsid)
    where = f"target {served.target} {served.nqn}#{nsid}"
    return [_controller_hop(where, _unmanaged_cache(look, served.nqn))]


def _unmanaged_cache(look: Look, nqn: str) -> bool | None:
    seen = look.unmanaged.get(nqn)
    return None if seen is None else seen.has_volatile_cache


def _flush_problems(look: Look, spec: VolumeSpec) -> list[str]:
    if not spec.is_flush_required:
        return []
    for way, hops in flush_of_volume(look, spec):
        if verdict(hops) is FlushState.SWALLOWED:
            hop = next(each for each in reversed(hops) if each.state is FlushState.SWALLOWED)
            return [
                f"volume {spec.name}: durability: a flush by {way} is swallowed at {hop.where} ({hop.reason}); "
                f"change that, or say durability: none"
            ]
    return []


# --- doing ------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How far an execution came."""

    done_count: int = 0
    step_count: int = 0
    failed: str = ""
    error: Exception | None = None
    is_fate_unknown: bool = False
    was_undone: bool = False


OnStep = Callable[[int, str], None]


def carry_out(whole: WholePlan, *, timeout_s: float, on_step: OnStep) -> Outcome:
    """Execute: targets, volumes, hosts; for a removal hosts, then targets. Stops at the first failure."""
    outcome = Outcome(step_count=whole.step_count)
    for stage in _stages(whole):
        if isinstance(stage, EndpointView):
            plan = next(plan for view, plan in whole.endpoints if view is stage)
            is_done = _run_endpoint(outcome, stage, plan, on_step)
        else:
            is_done = _run_volume(outcome, whole, stage, timeout_s, on_step)
        if not is_done:
            break
    return outcome


def _stages(whole: WholePlan) -> list[EndpointView | VolumeSpec]:
    targets = [view for view, _ in whole.endpoints if view.endpoint.role == "target"]
    hosts = [view for view, _ in whole.endpoints if view.endpoint.role == "host"]
    return (
        [*hosts, *targets] if whole.is_removal else [*targets, *(spec for spec, _ in whole.volumes), *hosts]
    )


def _run_endpoint(outcome: Outcome, view: EndpointView, plan: Plan, on_step: OnStep) -> bool:
    first = outcome.done_count
    title = view.endpoint.title

    def heard(index: int, step: Step) -> None:
        verb = "remove" if step.is_removal else "make" if step.before is None else "change"
        on_step(first + index, f"{title}: {verb} {step.id}")

    applied = apply_plan(plan, view.client.call, methods=view.observed.methods, on_step=heard)
    outcome.done_count += applied.done_count
    if applied.failed is None:
        return True
    outcome.failed = f"{title}: {applied.failed}"
    outcome.error = applied.error
    outcome.is_fate_unknown = applied.is_fate_unknown
    outcome.was_undone = applied.was_undone
    return False


def _run_volume(
    outcome: Outcome, whole: WholePlan, spec: VolumeSpec, timeout_s: float, on_step: OnStep
) -> bool:
    plan = next(plan for each, plan in whole.volumes if each is spec)
    is_touched = _is_touched(whole, spec)
    if not plan.steps and not is_touched:
        return True
    # A session of its own: the one that looked may hold connections to a target that has changed since.
    with session_for(spec, timeout_s=timeout_s) as session:
        steps = plan.steps
        if not steps:
            # The volume was there, and a namespace below it was made anew: it may be another medium now.
            seen = see_volume(session, spec, timeout_s=timeout_s)
            plan = plan_volume(whole.look.deployment, seen, is_coming=False)
            if plan.problems:
                outcome.failed, outcome.error = f"volume {spec.name}", UsageError(plan.problems[0])
                return False
            steps = plan.steps
            outcome.step_count += len(steps)
        for step in steps:
            on_step(outcome.done_count, f"make {step.title}")
            try:
                make_step(session, step, timeout_s=timeout_s)
            except (KvdevError, OSError) as error:
                outcome.failed, outcome.error = step.title, error
                return False
            outcome.done_count += 1
    return True


def _is_touched(whole: WholePlan, spec: VolumeSpec) -> bool:
    """Whether a namespace that is a member of the volume was made by this plan."""
    places = {(member.subsystem, member.nsid) for member in spec.members}
    return any(
        step.id.kind is Kind.NAMESPACE and (step.id.parent, int(step.id.name)) in places
        for view, plan in whole.endpoints
        if view.endpoint.role == "target"
        for step in plan.steps
    )
