"""What one SPDK process's desired state has to be in itself: no name twice, no bdev claimed twice, no ring.

Not here: reading the file (``document``); what runs (``spdk_rpc.plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvdev.errors import UsageError
from kvdev.units import format_size
from kvdev_tools.provision.source import Source
from spdk_rpc.plan import Id, Kind, Resource
from spdk_rpc.plan.resource import bdevs_claimed, bdevs_used, id_of_bdev, needs

if TYPE_CHECKING:
    from kvdev_tools.provision.document import Endpoint, EngineSpec, Member, ServedSubsystem, VolumeSpec

NAMESPACES_DEFAULT = 32
"""What SPDK takes for max_namespaces where the file says nothing."""
STRIPS_MIN = 4
"""Of a member: row 0 has the labels, and the directory has two copies with a strip between them."""


class EndpointCheck:
    """What one process's desired state has to be in itself: no name twice, no bdev claimed twice, no ring."""

    def __init__(self, source: Source, endpoint: Endpoint) -> None:
        self._source = source
        self._endpoint = endpoint
        self._state = endpoint.desired

    def _error(self, own: Id, text: str) -> UsageError:
        return self._source.error(self._endpoint.places[own], text)

    def run(self) -> None:
        self._check_names()
        self._check_files()
        self._check_references()
        self._check_rings()
        self._check_claims()
        self._check_block_sizes()
        self._check_namespace_ids()

    def _check_names(self) -> None:
        """Bdevs, raids and lvstores' names are one name space of SPDK's bdevs, controllers' prefix it."""
        seen: dict[str, Id] = {}
        for own in self._state:
            if own.kind in (Kind.BDEV, Kind.RAID):
                if own.name in seen:
                    raise self._error(own, f"{own.name}: is the name of {seen[own.name]} already")
                seen[own.name] = own

    def _check_files(self) -> None:
        seen: dict[str, Id] = {}
        for own, resource in self._state.items():
            filename = resource.attributes.get("filename")
            if filename is not None:
                if filename in seen:
                    raise self._error(own, f"file {filename}: is {seen[filename]}'s already")
                seen[filename] = own

    def _check_references(self) -> None:
        for own, resource in self._state.items():
            for name in bdevs_used(resource):
                if id_of_bdev(name, self._state) is None:
                    raise self._error(own, f"bdev {name}: {self._endpoint.title} has no such bdev")

    def _check_claims(self) -> None:
        claims: dict[str, Id] = {}
        for own, resource in self._state.items():
            for name in bdevs_claimed(resource):
                if name in claims:
                    raise self._error(own, f"bdev {name}: is claimed by {claims[name]}")
                claims[name] = own
        for own, resource in self._state.items():
            for name in bdevs_used(resource) if own.kind is Kind.VHOST else ():
                if name in claims:
                    raise self._error(own, f"bdev {name}: is claimed by {claims[name]}")

    def _check_rings(self) -> None:
        for own in self._state:
            reached, queue = set[Id](), [own]
            while queue:
                for need in needs(self._state[queue.pop()], self._state):
                    if need == own:
                        raise self._error(own, f"{own}: stands on itself")
                    if need not in reached:
                        reached.add(need)
                        queue.append(need)

    def _check_block_sizes(self) -> None:
        for own, resource in self._state.items():
            if own.kind is not Kind.RAID:
                continue
            sizes = {}
            for name in resource.attributes["base_bdevs"]:
                provider = id_of_bdev(name, self._state)
                if provider is not None and provider.kind is Kind.BDEV:
                    sizes[name] = self._state[provider].attributes["block_size"]
            if len(set(sizes.values())) > 1:
                listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
                raise self._error(own, f"members: expected equal block sizes, got {listed}")

    def _check_namespace_ids(self) -> None:
        for own in self._state:
            if own.kind is not Kind.NAMESPACE:
                continue
            limit = self._state[Id(Kind.SUBSYSTEM, own.parent)].attributes.get("max_namespaces")
            limit = NAMESPACES_DEFAULT if limit is None else limit
            if int(own.name) > limit:
                raise self._error(
                    own, f"expected a namespace id up to max_namespaces {limit}, got {own.name}"
                )


def check_volumes(
    source: Source,
    endpoints: Sequence[Endpoint],
    subsystems: Mapping[str, ServedSubsystem],
    volumes: Mapping[str, VolumeSpec],
    engines: Sequence[EngineSpec],
) -> None:
    """What can be told of volumes and quotas before anything is made: the members that the file itself describes."""
    states = {endpoint.name: endpoint.desired for endpoint in endpoints if endpoint.role == "target"}
    for volume in volumes.values():
        place = (*volume.path, "members")
        known = [_described(member, subsystems, states) for member in volume.members]
        block_sizes = {
            member.uri: block for member, (block, _) in zip(volume.members, known, strict=True) if block
        }
        if len(set(block_sizes.values())) > 1:
            listed = ", ".join(f"{uri} {size}" for uri, size in block_sizes.items())
            raise source.error(place, f"expected equal block sizes, got {listed}")
        least = STRIPS_MIN * volume.strip_size_bytes
        for member, (_, size) in zip(volume.members, known, strict=True):
            if size is not None and size < least:
                raise source.error(
                    place,
                    f"{member.uri}: expected at least {STRIPS_MIN} strips of "
                    f"{format_size(volume.strip_size_bytes)}, got {format_size(size)}",
                )
        sizes = [size for _, size in known if size is not None]
        if len(sizes) == len(known):
            _check_quotas(source, volume, min(sizes) * len(sizes), engines)


def _check_quotas(source: Source, volume: VolumeSpec, size: int, engines: Sequence[EngineSpec]) -> None:
    for engine in engines:
        if engine.volume == volume.name and engine.quota_bytes is not None:
            needed = engine.quota_bytes * len(engine.ranks)
            if needed > size:
                raise source.error(
                    (*engine.path, "quota_per_rank"),
                    f"expected at most what volume {volume.name} holds, {format_size(size)}, got "
                    f"{format_size(engine.quota_bytes)} for each of {len(engine.ranks)} ranks",
                )


def _described(
    member: Member, subsystems: Mapping[str, ServedSubsystem], states: Mapping[str, Mapping[Id, Resource]]
) -> tuple[int | None, int | None]:
    """Block size and bytes of a member, as far as the file says."""
    served = subsystems.get(member.subsystem or "")
    if served is None or member.nsid not in served.namespaces:
        return None, None
    namespace = served.namespaces[member.nsid]
    if namespace.bdev is None:
        return namespace.block_size, None
    state = states.get(served.target, {})
    provider = id_of_bdev(namespace.bdev, state)
    if provider is None or provider.kind is not Kind.BDEV:
        return None, None
    given = state[provider].attributes
    count = given.get("num_blocks")
    return given.get("block_size"), None if count is None else count * given["block_size"]
