"""What the file means: the SPDK state that each entry shall have, the volumes, and one KV namespace per rank.

Everything that can be told from the file alone is checked here and reported with line and column.
Not here: YAML (``source``), field types (``schema``), what runs (``spdk_rpc.plan``, ``volumes``).
Trust: the file is ``untrusted``; raises only UsageError.
"""

from __future__ import annotations

import dataclasses
import os
import uuid as uuid_module
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from kvdev.block.stripe import STRIP_SIZE_BYTES_MAX, STRIP_SIZE_BYTES_MIN
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.units import KIB, MIB, format_size, is_power_of_two, parse_size
from kvdev_tools.provision.check import EndpointCheck, check_volumes
from kvdev_tools.provision.schema import check_source
from kvdev_tools.provision.source import Path_, Source, load_file
from spdk_rpc import RpcUsageError, parse_address
from spdk_rpc.plan import Id, Kind, Resource, State
from spdk_rpc.plan.resource import NVME_OPTIONS, id_of_bdev, split_address

UUID_NAMESPACE = uuid_module.UUID("6f1d1a0e-5c55-5d0f-9c1b-6b7664657630")
"""Derived identities are UUIDs of version 5 in this namespace, over NAME/ENTRY/BDEV."""
STRIP_SIZE_DEFAULT = 128 * KIB
CLUSTER_SIZE_DEFAULT = 4 * MIB
BLOCK_SIZE_DEFAULT = 4096
_SECRET_OPTIONS = {"psk": "tls_psk", "dhchap_key": "dhchap_key", "dhchap_ctrlr_key": "dhchap_ctrl_key"}
"""Field of a host -> the initiator's option."""
QOS_IOS_UNIT = 1000
"""SPDK rounds limits of operations up to thousands, and would then never show what was asked for."""

Role = Literal["target", "host"]


@dataclass
class Endpoint:
    """One SPDK process that is configured."""

    name: str
    role: Role
    rpc: str
    path: Path_
    desired: State = field(default_factory=dict)
    places: dict[Id, Path_] = field(default_factory=dict)
    cores: int | None = None
    hugepages: int | None = None
    nqn: str | None = None
    key_paths: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.role} {self.name}"


@dataclass(frozen=True)
class ServedNamespace:
    """A namespace of a target as the file gives it; sizes are None where only SPDK knows them."""

    nsid: int
    bdev: str | None = None
    block_size: int | None = None
    size_bytes: int | None = None


@dataclass
class ServedSubsystem:
    """A subsystem of a target, managed or not."""

    nqn: str
    target: str
    path: Path_
    listeners: list[str]
    namespaces: dict[int, ServedNamespace]
    allowed_hosts: set[str] | None
    """NQNs; None lets every host in."""
    is_managed: bool = True
    secure_listeners: frozenset[str] = frozenset()
    """Those that take nothing but TLS."""
    keyed_hosts: frozenset[str] = frozenset()
    """NQNs of the hosts that have to prove themselves."""

    @property
    def reach(self) -> str:
        """The listener by which kvdev reaches it: the first that takes a connection without TLS, if there is one."""
        return next((each for each in self.listeners if each not in self.secure_listeners), self.listeners[0])

    @property
    def is_secure(self) -> bool:
        """Whether it is reached by TLS only."""
        return bool(self.listeners) and self.reach in self.secure_listeners


@dataclass(frozen=True)
class Member:
    """A device of a volume, and where it comes from if it is a target's namespace."""

    uri: str
    subsystem: str | None = None
    nsid: int = 0


@dataclass
class VolumeSpec:
    name: str
    path: Path_
    members: list[Member]
    strip_size_bytes: int
    is_flush_required: bool
    host_nqn: str | None
    secrets: dict[str, str]
    """Where that host's secrets are kept."""


@dataclass
class RankSpec:
    """One worker process of an engine: its KV namespace and, behind a local SPDK, its vhost controller."""

    name: str
    rank: int
    geometry: Geometry
    vhost: str | None


@dataclass
class EngineSpec:
    name: str
    host: str
    path: Path_
    volume: str
    bdev: str | None
    quota_bytes: int | None
    ranks: list[RankSpec]
    checksum: str


@dataclass
class Deployment:
    """The whole file."""

    name: str
    source: Source
    endpoints: list[Endpoint]
    subsystems: dict[str, ServedSubsystem]
    volumes: dict[str, VolumeSpec]
    engines: list[EngineSpec]
    host_nqns: dict[str, str]
    """Of the entries of hosts that have one."""
    host_secrets: dict[str, dict[str, str]]
    """Host NQN -> where its secrets are kept, as ``make_session`` takes them."""

    def secrets_for(self, host_nqn: str | None, served: ServedSubsystem) -> dict[str, str]:
        """What ``host_nqn`` connects to ``served`` with: with a key of TLS connections are encrypted or not made."""
        return _secrets_for(self.host_secrets.get(host_nqn or "", {}), is_secure=served.is_secure)

    def endpoint(self, name: str) -> Endpoint:
        for each in self.endpoints:
            if name in (each.name, f"{each.role}s.{each.name}"):
                return each
        known = ", ".join(each.name for each in self.endpoints) or "none"
        raise UsageError(f"{self.source.filename}: {name!r}: expected one of {known}")

    def of_volume(self, volume: str) -> list[EngineSpec]:
        return [engine for engine in self.engines if engine.volume == volume]


def load_deployment(filename: str) -> Deployment:
    """Read a file and check all that can be told from it alone."""
    return build_deployment(load_file(filename))


def build_deployment(source: Source) -> Deployment:
    """As ``load_deployment``, from text that was read already."""
    check_source(source)
    return _Builder(source).build()


class _Builder:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._value: dict[str, Any] = source.value
        self._host_nqns: dict[str, str] = {
            name: host["nqn"] for name, host in self._section("hosts").items() if host and "nqn" in host
        }
        self._host_secrets: dict[str, dict[str, str]] = {}
        self._subsystems: dict[str, ServedSubsystem] = {}

    def _section(self, name: str) -> dict[str, Any]:
        return self._value.get(name) or {}

    def _error(self, path: Path_, text: str) -> UsageError:
        return self._source.error(path, text)

    def build(self) -> Deployment:
        name = str(self._value["name"])
        self._check_hosts()
        for target, value in self._section("targets").items():
            self._read_subsystems(target, value, ("targets", target))
        endpoints = [
            *self._endpoints(name, "targets", "target"),
            *self._endpoints(name, "hosts", "host"),
        ]
        self._check_addresses(endpoints)
        volumes = self._volumes()
        engines = list(self._engines(endpoints, volumes))
        for endpoint in endpoints:
            EndpointCheck(self._source, endpoint).run()
        check_volumes(self._source, endpoints, self._subsystems, volumes, engines)
        return Deployment(
            name,
            self._source,
            endpoints,
            self._subsystems,
            volumes,
            engines,
            dict(self._host_nqns),
            {self._host_nqns[host]: secrets for host, secrets in self._host_secrets.items()},
        )

    def _check_hosts(self) -> None:
        seen: dict[str, str] = {}
        for name, nqn in self._host_nqns.items():
            if nqn in seen:
                raise self._error(("hosts", name, "nqn"), f"{nqn}: is host {seen[nqn]}'s already")
            seen[nqn] = name
        for name, host in self._section("hosts").items():
            if secrets := self._read_secrets(name, host or {}):
                self._host_secrets[name] = secrets

    def _read_secrets(self, name: str, host: dict[str, Any]) -> dict[str, str]:
        """Where kvdev finds what this host proves itself with; SPDK gets it by name from its keyring."""
        path = ("hosts", name)
        secrets: dict[str, str] = {}
        for field_name, option in _SECRET_OPTIONS.items():
            if field_name not in host:
                continue
            key = host[field_name]
            if key not in (host.get("keys") or {}):
                raise self._error((*path, field_name), f"{key!r}: expected a name in keys of host {name}")
            if "nqn" not in host:
                raise self._error((*path, field_name), "needs an nqn: the secret belongs to it")
            secrets[option] = f"file:{host['keys'][key]}"
        if "dhchap_ctrl_key" in secrets and "dhchap_key" not in secrets:
            raise self._error((*path, "dhchap_ctrlr_key"), "needs a dhchap_key: the host proves itself first")
        return secrets

    def _check_secret(
        self,
        served: ServedSubsystem,
        nqn: str | None,
        names: Collection[str],
        path: Path_,
        *,
        is_secure: bool,
    ) -> None:
        """``names``: the fields of secrets that the host has; ``is_secure``: whether it comes by TLS only."""
        if nqn in served.keyed_hosts and "dhchap_key" not in names:
            raise self._error(
                path, f"{served.nqn}: demands a dhchap_key of {nqn}; name it here, and in its keys"
            )
        if is_secure and "psk" not in names:
            whose = "this host" if nqn is None else nqn
            raise self._error(
                path, f"{served.nqn}: takes TLS only; name the psk of {whose} here, and in its keys"
            )

    def _check_addresses(self, endpoints: list[Endpoint]) -> None:
        seen: dict[str, str] = {}
        for endpoint in endpoints:
            try:
                where = parse_address(endpoint.rpc, field="address")
            except RpcUsageError as error:
                raise self._error((*endpoint.path, "rpc"), str(error)) from None
            address = os.path.realpath(where) if isinstance(where, str) else endpoint.rpc
            if address in seen:
                raise self._error((*endpoint.path, "rpc"), f"{endpoint.rpc}: is {seen[address]}'s already")
            seen[address] = endpoint.title

    # --- subsystems of targets ---

    def _read_subsystems(self, target: str, value: dict[str, Any], path: Path_) -> None:
        is_managed = value.get("managed", True)
        if is_managed and "rpc" not in value:
            raise self._error(path, "rpc: missing; a target without an RPC socket needs managed: false")
        if not is_managed:
            for name in value:
                if name not in ("managed", "subsystems"):
                    raise self._error((*path, name), "an unmanaged target takes only subsystems")
        for nqn, given in (value.get("subsystems") or {}).items():
            here = (*path, "subsystems", nqn)
            if nqn in self._subsystems:
                raise self._error(here, f"is served by target {self._subsystems[nqn].target} already")
            self._subsystems[nqn] = self._read_subsystem(target, nqn, given, here, is_managed)

    def _read_subsystem(
        self, target: str, nqn: str, given: dict[str, Any], here: Path_, is_managed: bool
    ) -> ServedSubsystem:
        listeners: list[str] = []
        secure: list[str] = []
        for index, each in enumerate(given.get("listeners", ())):
            address = each if isinstance(each, str) else each["address"]
            port = int(address.rpartition(":")[2])
            if not 0 < port < 65536:
                raise self._error((*here, "listeners", index), f"port: expected 1 to 65535, got {port}")
            if address in listeners:
                raise self._error((*here, "listeners", index), f"{address}: is there twice")
            listeners.append(address)
            if isinstance(each, dict) and each.get("secure_channel", False):
                secure.append(address)
        namespaces = {}
        for nsid, each in (given.get("namespaces") or {}).items():
            place = (*here, "namespaces", nsid)
            namespaces[int(nsid)] = self._read_namespace(int(nsid), each, place, is_managed)
        allowed = None
        if is_managed and not given.get("allow_any_host", False):
            allowed = {
                self._host_nqn(each, (*here, "hosts", i)) for i, each in enumerate(given.get("hosts", ()))
            }
        keyed = frozenset(
            self._host_nqn(each, (*here, "hosts", index))
            for index, each in enumerate(given.get("hosts", ()))
            if is_managed and isinstance(each, dict) and "dhchap_key" in each
        )
        return ServedSubsystem(
            nqn, target, here, listeners, namespaces, allowed, is_managed, frozenset(secure), keyed
        )

    def _read_namespace(self, nsid: int, given: Any, place: Path_, is_managed: bool) -> ServedNamespace:
        if isinstance(given, str):
            given = {"bdev": given}
        if is_managed:
            if "bdev" not in given:
                raise self._error(place, "bdev: missing")
            for name in ("size", "block_size"):
                if name in given:
                    raise self._error((*place, name), "is the bdev's; only unmanaged targets take it")
            return ServedNamespace(nsid, given["bdev"])
        for name in ("bdev", "uuid", "nguid"):
            if name in given:
                raise self._error((*place, name), "of an unmanaged target: take it out")
        size = given.get("size")
        size_bytes = None if size is None else self._size(size, (*place, "size"))
        return ServedNamespace(nsid, None, given.get("block_size"), size_bytes)

    def _host_nqn(self, given: Any, place: Path_) -> str:
        """The NQN of an entry in a subsystem's hosts: an NQN, or the name of a host with one."""
        name = given if isinstance(given, str) else given["host"]
        if name.startswith("nqn."):
            return str(name)
        if name not in self._section("hosts"):
            raise self._error(place, f"{name!r}: expected an NQN or an entry of hosts")
        if name not in self._host_nqns:
            raise self._error(place, f"host {name}: has no nqn; give it one in hosts.{name}")
        return self._host_nqns[name]

    def _size(self, given: Any, path: Path_) -> int:
        try:
            return given if isinstance(given, int) else parse_size(given, field="size")
        except UsageError:
            raise self._error(
                path, f"expected a whole number of bytes such as 64KiB, got {given!r}"
            ) from None

    # --- SPDK processes ---

    def _endpoints(self, deployment: str, section: str, role: Role) -> Iterator[Endpoint]:
        for name, value in self._section(section).items():
            path = (section, name)
            if role == "host" and "rpc" not in value:
                self._check_bare_host(value, path)
                continue
            if not value.get("managed", True):
                continue
            endpoint = Endpoint(
                name,
                role,
                value["rpc"],
                path,
                cores=int(value["cores"], 16) if "cores" in value else None,
                hugepages=value.get("hugepages"),
                nqn=value.get("nqn"),
            )
            seed = f"{deployment}/{section}/{name}"
            _EndpointBuilder(self, endpoint, value, seed).build()
            yield endpoint

    def _check_bare_host(self, value: dict[str, Any], path: Path_) -> None:
        for name in value:
            if name not in ("nqn", "engines", "hugepages", "keys", *_SECRET_OPTIONS):
                raise self._error((*path, name), "needs the rpc socket of this host's SPDK")

    # --- volumes and engines ---

    def _volumes(self) -> dict[str, VolumeSpec]:
        volumes: dict[str, VolumeSpec] = {}
        used: dict[str, str] = {}
        for name, value in self._section("volumes").items():
            path = ("volumes", name)
            members = [
                member
                for index, given in enumerate(value["members"])
                for member in self._members(given, (*path, "members", index))
            ]
            for member in members:
                if member.uri in used:
                    raise self._error(
                        (*path, "members"), f"{member.uri}: is a member of {used[member.uri]} already"
                    )
                used[member.uri] = f"volume {name}"
            strip = self._strip(
                value.get("strip_size"), (*path, "strip_size"), STRIP_SIZE_BYTES_MIN, STRIP_SIZE_BYTES_MAX
            )
            host = value.get("host")
            if host is not None and host not in self._host_nqns:
                raise self._error((*path, "host"), f"{host!r}: expected an entry of hosts with an nqn")
            nqn = self._volume_nqn(host, members, (*path, "host"))
            volumes[name] = VolumeSpec(
                name,
                path,
                members,
                strip,
                value.get("durability", "flushed") == "flushed",
                nqn,
                self._volume_secrets(nqn, members, path),
            )
        return volumes

    def _volume_secrets(self, nqn: str | None, members: list[Member], path: Path_) -> dict[str, str]:
        """With what the host of a volume connects to all of its members: by TLS to all, or to none."""
        entry = next((each for each, own in self._host_nqns.items() if own == nqn), None)
        secrets = self._host_secrets.get(entry or "", {})
        names = [field for field, option in _SECRET_OPTIONS.items() if option in secrets]
        secure: dict[bool, str] = {}
        for member in members:
            served = self._subsystems.get(member.subsystem or "")
            if served is not None:
                where = path if entry is None else ("hosts", entry)
                self._check_secret(served, nqn, names, where, is_secure=served.is_secure)
            secure[served is not None and served.is_secure] = member.uri
        if len(secure) == 2:
            raise self._error(
                (*path, "members"),
                f"{secure[True]} takes TLS only and {secure[False]} does not; give all their subsystems "
                "a secure_channel, or none",
            )
        return _secrets_for(secrets, is_secure=True in secure)

    def _members(self, given: Any, place: Path_) -> Iterator[Member]:
        if isinstance(given, str):
            from kvdev.uri import TcpUri, parse_device_uri

            try:
                parsed = parse_device_uri(given)
            except UsageError as error:
                raise self._error(place, str(error)) from None
            if isinstance(parsed, TcpUri) and parsed.nsid is None:
                raise self._error(place, "expected a namespace: append ?nsid=N")
            yield Member(str(parsed))
            return
        nqn = given["subsystem"]
        served = self._subsystems.get(nqn)
        if served is None or served.target != given["target"]:
            raise self._error(place, f"target {given['target']} serves no subsystem {nqn}")
        if not served.listeners:
            raise self._error(place, f"{nqn}: has no listener to reach it by")
        nsids = [given["nsid"]] if "nsid" in given else sorted(served.namespaces)
        for nsid in nsids:
            if nsid not in served.namespaces:
                raise self._error(place, f"{nqn}: has no namespace {nsid}")
            yield Member(namespace_uri(served, nsid), nqn, nsid)
        if not nsids:
            raise self._error(place, f"{nqn}: has no namespace")

    def _volume_nqn(self, host: str | None, members: list[Member], path: Path_) -> str | None:
        """As whom a volume is made: every subsystem of its members has to let that host in."""
        if host is not None:
            nqn = self._host_nqns[host]
            for member in members:
                served = self._subsystems.get(member.subsystem or "")
                if (
                    served is not None
                    and served.allowed_hosts is not None
                    and nqn not in served.allowed_hosts
                ):
                    raise self._error(path, f"{served.nqn}: does not let host {host} in")
            return nqn
        common: set[str] | None = None
        for member in members:
            served = self._subsystems.get(member.subsystem or "")
            if served is not None and served.allowed_hosts is not None:
                common = served.allowed_hosts if common is None else common & served.allowed_hosts
        if common is None:
            return None
        own = [nqn for nqn in self._host_nqns.values() if nqn in common]
        chosen = own or sorted(common)
        if not chosen:
            raise self._error(path[:-1], "no host is allowed by the subsystems of all members")
        return chosen[0]

    def _strip(self, given: Any, path: Path_, least: int = 4 * KIB, most: int = 64 * MIB) -> int:
        """SPDK's raid takes more sizes than a volume does."""
        size = STRIP_SIZE_DEFAULT if given is None else self._size(given, path)
        if not is_power_of_two(size) or not least <= size <= most:
            raise self._error(
                path, f"expected a power of two from {format_size(least)} to {format_size(most)}, got {given}"
            )
        return size

    def _engines(self, endpoints: list[Endpoint], volumes: dict[str, VolumeSpec]) -> Iterator[EngineSpec]:
        names: dict[tuple[str, str], str] = {}
        for host, value in self._section("hosts").items():
            endpoint = next((e for e in endpoints if e.role == "host" and e.name == host), None)
            for name, given in (value.get("engines") or {}).items():
                path = ("hosts", host, "engines", name)
                volume = volumes.get(given["volume"])
                if volume is None:
                    raise self._error((*path, "volume"), f"{given['volume']!r}: expected an entry of volumes")
                owner = names.setdefault((volume.name, name), host)
                if owner != host:
                    raise self._error(
                        path, f"volume {volume.name} has an engine {name} on host {owner} already"
                    )
                yield self._engine(host, endpoint, name, given, path, volume)

    def _engine(
        self,
        host: str,
        endpoint: Endpoint | None,
        name: str,
        given: dict[str, Any],
        path: Path_,
        volume: VolumeSpec,
    ) -> EngineSpec:
        geometry = self._geometry(given["geometry"], (*path, "geometry"))
        rank_count = given.get("tensor_parallel", 1)
        bdev: str | None = None
        if endpoint is None:
            for field_name in ("bdev", "cpumask"):
                if field_name in given:
                    raise self._error((*path, field_name), "needs the rpc socket of this host's SPDK")
        else:
            bdev = self._engine_bdev(endpoint, given, path)
            self._check_raid(endpoint, bdev, volume, path)
        quota = given.get("quota_per_rank")
        ranks = []
        for rank in range(rank_count):
            rank_name = f"{name}.{rank}"
            part = self._rank_geometry(geometry, rank, rank_count, path)
            if endpoint is not None:
                self._add_vhost(endpoint, rank_name, bdev, given.get("cpumask"), path)
            ranks.append(RankSpec(rank_name, rank, part, rank_name if endpoint is not None else None))
        quota_bytes = None if quota is None else self._size(quota, (*path, "quota_per_rank"))
        if quota_bytes is not None and quota_bytes < ranks[0].geometry.page_size_bytes:
            page = ranks[0].geometry.page_size_bytes
            raise self._error(
                (*path, "quota_per_rank"), f"expected at least one page of {page} bytes, got {quota}"
            )
        checksum = given.get("checksum", "crc32c")
        return EngineSpec(name, host, path, volume.name, bdev, quota_bytes, ranks, checksum)

    def _engine_bdev(self, endpoint: Endpoint, given: dict[str, Any], path: Path_) -> str:
        if "bdev" in given:
            if id_of_bdev(given["bdev"], endpoint.desired) is None:
                raise self._error((*path, "bdev"), f"{given['bdev']}: no bdev of this host")
            return str(given["bdev"])
        raids = [own.name for own in endpoint.desired if own.kind is Kind.RAID]
        if len(raids) != 1:
            raise self._error(path, f"bdev: missing; this host has {len(raids)} raids to choose from")
        return raids[0]

    def _check_raid(self, endpoint: Endpoint, bdev: str, volume: VolumeSpec, path: Path_) -> None:
        """What a vhost controller shows has to be the volume: its members in order, in strips of the same size."""
        own = id_of_bdev(bdev, endpoint.desired)
        assert own is not None, "checked when the engine's bdev was chosen"
        resource = endpoint.desired[own]
        is_raid = own.kind is Kind.RAID
        bases = resource.attributes["base_bdevs"] if is_raid else (bdev,)
        found = [self._namespace_of(endpoint, base) for base in bases]
        wanted = [(member.subsystem, member.nsid) for member in volume.members]
        if None in found or any(subsystem is None for subsystem, _ in wanted):
            return  # some of it is known to SPDK or to the device only
        if found != wanted:
            raise self._error(
                path, f"bdev {bdev}: its members or their order differ from those of volume {volume.name}"
            )
        strip = resource.attributes["strip_size_kb"] * KIB if is_raid else volume.strip_size_bytes
        if strip != volume.strip_size_bytes:
            raise self._error(
                path,
                f"bdev {bdev}: strip size: expected volume {volume.name}'s {volume.strip_size_bytes}, got {strip}",
            )

    def _namespace_of(self, endpoint: Endpoint, bdev: str) -> tuple[str | None, int] | None:
        from spdk_rpc.plan.resource import controller_of_bdev

        own = id_of_bdev(bdev, endpoint.desired)
        if own is None or own.kind is not Kind.CONTROLLER:
            return None
        split = controller_of_bdev(bdev, [own.name])
        assert split is not None, "the bdev was found by this name"
        nqn = endpoint.desired[own].attributes.get("subnqn")
        return None if nqn is None else (nqn, split[1])

    def _add_vhost(
        self, endpoint: Endpoint, name: str, bdev: str | None, cpumask: str | None, path: Path_
    ) -> None:
        own = Id(Kind.VHOST, name)
        if own in endpoint.desired:
            raise self._error(path, f"vhost controller {name}: another engine of this host has this name")
        attributes = {"bdev_name": bdev, "readonly": False}
        endpoint.desired[own] = Resource(own, attributes, {"cpumask": cpumask} if cpumask else {})
        endpoint.places[own] = path

    def _geometry(self, given: Any, path: Path_) -> Geometry:
        try:
            if isinstance(given, str):
                preset = Geometry.preset(given)
                return dataclasses.replace(
                    preset, kv_head_count=preset.kv_head_total or preset.kv_head_count, kv_head_first=0
                )
            return Geometry(**given)
        except UsageError as error:
            raise self._error(path, str(error)) from None

    def _rank_geometry(self, whole: Geometry, rank: int, count: int, path: Path_) -> Geometry:
        if whole.attention == "mla" or count == 1:
            return whole
        heads = whole.kv_head_count
        if heads % count and count % heads:
            raise self._error(
                (*path, "tensor_parallel"), f"expected a divisor or multiple of {heads} KV heads, got {count}"
            )
        # Fewer heads than ranks are replicated: neighbouring ranks hold the same one.
        return dataclasses.replace(
            whole,
            kv_head_count=max(1, heads // count),
            kv_head_first=rank * heads // count,
            kv_head_total=heads,
        )


class _EndpointBuilder:
    """The desired state of one SPDK process."""

    def __init__(self, parent: _Builder, endpoint: Endpoint, value: dict[str, Any], seed: str) -> None:
        self._parent = parent
        self._endpoint = endpoint
        self._value = value
        self._seed = seed
        self._keys: dict[str, str] = value.get("keys") or {}

    def build(self) -> None:
        for name, key_path in self._keys.items():
            self._add(Kind.KEY, name, {"path": key_path}, ("keys", name))
        self._endpoint.key_paths = dict(self._keys)
        for name, value in (self._value.get("bdevs") or {}).items():
            self._bdev(name, value, ("bdevs", name))
        controllers = self._value.get("controllers") or {}
        if controllers:
            # Before any attach, or SPDK completes flushes by itself and says so to nobody.
            self._add(Kind.OPTIONS, NVME_OPTIONS, {"enable_flush": True}, ("controllers",))
        for name, value in controllers.items():
            self._controller(name, value, ("controllers", name))
        for name, value in (self._value.get("raids") or {}).items():
            self._raid(name, value, ("raids", name))
        for name, value in (self._value.get("lvstores") or {}).items():
            self._lvstore(name, value, ("lvstores", name))
        subsystems = self._value.get("subsystems") or {}
        if subsystems or "transport" in self._value:
            self._transport(self._value.get("transport") or {})
        for nqn, value in subsystems.items():
            self._subsystem(nqn, value, ("subsystems", nqn))

    def _error(self, path: Path_, text: str) -> UsageError:
        return self._parent._error((*self._endpoint.path, *path), text)

    def _size(self, given: Any, path: Path_) -> int:
        return self._parent._size(given, (*self._endpoint.path, *path))

    def _uuid(self, given: dict[str, Any], name: str) -> str:
        return str(given.get("uuid") or uuid_module.uuid5(UUID_NAMESPACE, f"{self._seed}/{name}")).lower()

    def _add(
        self,
        kind: Kind,
        name: str,
        attributes: Mapping[str, Any],
        path: Path_,
        *,
        parent: str = "",
        at_creation: Mapping[str, Any] | None = None,
    ) -> None:
        own = Id(kind, name, parent)
        self._endpoint.desired[own] = Resource(own, dict(attributes), dict(at_creation or {}))
        self._endpoint.places[own] = (*self._endpoint.path, *path)

    def _bdev(self, name: str, value: dict[str, Any], path: Path_) -> None:
        drivers = [driver for driver in ("malloc", "null", "aio", "uring") if driver in value]
        if len(drivers) != 1:
            raise self._error(path, f"expected one of malloc, null, aio and uring, got {len(drivers)}")
        driver = drivers[0]
        given = value[driver]
        block_size = given.get("block_size", BLOCK_SIZE_DEFAULT)
        attributes: dict[str, Any] = {"driver": driver, "block_size": block_size}
        if driver in ("malloc", "null"):
            size_bytes = self._size(given["size"], (*path, driver, "size"))
            if size_bytes % block_size:
                raise self._error(
                    (*path, driver, "size"), f"expected a multiple of {block_size}, got {given['size']}"
                )
            attributes["num_blocks"] = size_bytes // block_size
        else:
            attributes["filename"] = given["file"]
        if driver == "aio":
            attributes["readonly"] = given.get("readonly", False)
        self._add(Kind.BDEV, name, attributes, path, at_creation={"uuid": self._uuid(value, name)})
        self._qos(name, value, path)

    def _qos(self, bdev: str, value: dict[str, Any], path: Path_) -> None:
        if "qos" not in value:
            return
        limits = {
            name: value["qos"].get(name, 0)
            for name in ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")
        }
        if limits["rw_ios_per_sec"] % QOS_IOS_UNIT:
            got = limits["rw_ios_per_sec"]
            raise self._error(
                (*path, "qos", "rw_ios_per_sec"), f"expected a multiple of {QOS_IOS_UNIT}, got {got}"
            )
        self._add(Kind.QOS, bdev, limits, (*path, "qos"))

    def _controller(self, name: str, value: dict[str, Any], path: Path_) -> None:
        if "pcie" in value:
            for other in value:
                if other != "pcie":
                    raise self._error((*path, other), "a local SSD (pcie) takes no other field")
            self._add(Kind.CONTROLLER, name, {"trtype": "PCIe", "paths": (value["pcie"].lower(),)}, path)
            return
        if "subsystem" not in value:
            raise self._error(path, "expected pcie, or the subsystem to attach")
        nqn = value["subsystem"]
        served = self._parent._subsystems.get(nqn)
        if "target" in value and (served is None or served.target != value["target"]):
            raise self._error((*path, "target"), f"target {value['target']} serves no subsystem {nqn}")
        paths = value.get("paths") or (served.listeners if served is not None else [])
        if not paths:
            raise self._error(path, "paths: missing; the file names no listener of this subsystem")
        if len(set(paths)) != len(paths):
            raise self._error((*path, "paths"), "a path is there twice")
        if served is not None and served.allowed_hosts is not None:
            self._check_allowed(served, path)
        # What the host proves itself with holds for each of its controllers that names nothing else.
        value = {
            **{name: self._value[name] for name in ("dhchap_key", "dhchap_ctrlr_key") if name in self._value},
            **value,
        }
        if served is not None:
            secure = [each in served.secure_listeners for each in paths]
            if any(secure) and not all(secure):
                raise self._error(
                    (*path, "paths"), "some of these listeners take TLS only, others none; name one sort"
                )
            if "psk" in self._value and any(secure):
                value = {"psk": self._value["psk"], **value}
            where = (*self._endpoint.path, *path)
            self._parent._check_secret(served, self._endpoint.nqn, value, where, is_secure=any(secure))
        attributes = {
            "trtype": "TCP",
            "subnqn": nqn,
            "paths": tuple(paths),
            "hostnqn": self._endpoint.nqn,
            "hdgst": value.get("header_digest", False),
            "ddgst": value.get("data_digest", False),
            "ctrlr_loss_timeout_sec": value.get("ctrlr_loss_timeout_s"),
            "reconnect_delay_sec": value.get("reconnect_delay_s"),
            "fast_io_fail_timeout_sec": value.get("fast_io_fail_timeout_s"),
            **self._key_names(value, path),
        }
        at_creation = {"num_io_queues": value.get("io_queues")}
        if len(paths) > 1:
            at_creation["multipath"] = "multipath"
        self._add(Kind.CONTROLLER, name, attributes, path, at_creation=at_creation)

    def _check_allowed(self, served: ServedSubsystem, path: Path_) -> None:
        if self._endpoint.nqn is None:
            raise self._error(
                path, f"{served.nqn} lets only some hosts in: give {self._endpoint.title} an nqn"
            )
        if served.allowed_hosts is not None and self._endpoint.nqn not in served.allowed_hosts:
            raise self._error(
                path, f"{served.nqn}: does not let {self._endpoint.nqn} in; add it to its hosts"
            )

    def _key_names(self, value: Mapping[str, Any], path: Path_) -> dict[str, Any]:
        names = {name: value.get(name) for name in ("psk", "dhchap_key", "dhchap_ctrlr_key")}
        for name, key in names.items():
            if key is not None and key not in self._keys:
                raise self._error(
                    (*path, name), f"{key!r}: expected a name in keys of {self._endpoint.title}"
                )
        return names

    def _raid(self, name: str, value: dict[str, Any], path: Path_) -> None:
        strip = self._parent._strip(value.get("strip_size"), (*self._endpoint.path, *path, "strip_size"))
        members = value["members"]
        if len(set(members)) != len(members):
            raise self._error((*path, "members"), "a member is there twice")
        attributes = {
            "raid_level": "raid0",
            "strip_size_kb": strip // KIB,
            "base_bdevs": tuple(members),
            "superblock": False,
            "state": "online",
        }
        self._add(Kind.RAID, name, attributes, path, at_creation={"uuid": self._uuid(value, name)})

    def _lvstore(self, name: str, value: dict[str, Any], path: Path_) -> None:
        cluster = CLUSTER_SIZE_DEFAULT
        if "cluster_size" in value:
            cluster = self._size(value["cluster_size"], (*path, "cluster_size"))
        if not is_power_of_two(cluster) or cluster < MIB:
            raise self._error(
                (*path, "cluster_size"), f"expected a power of two of at least 1MiB, got {cluster}"
            )
        self._add(Kind.LVSTORE, name, {"bdev_name": value["bdev"], "cluster_sz": cluster}, path)
        for lvol, given in (value.get("lvols") or {}).items():
            here = (*path, "lvols", lvol)
            size_bytes = self._size(given["size"], (*here, "size"))
            attributes = {
                "size_in_mib": -(-size_bytes // MIB),
                "thin_provision": given.get("thin", False),
            }
            self._add(Kind.LVOL, lvol, attributes, here, parent=name)
            self._qos(f"{name}/{lvol}", given, here)

    def _transport(self, value: dict[str, Any]) -> None:
        attributes = {
            name: self._size(given, ("transport", name)) if "size" in name else given
            for name, given in value.items()
        }
        self._add(Kind.TRANSPORT, "TCP", attributes, ("transport",))

    def _subsystem(self, nqn: str, value: dict[str, Any], path: Path_) -> None:
        is_open = value.get("allow_any_host", False)
        attributes = {
            "serial_number": value.get("serial_number"),
            "model_number": value.get("model_number"),
            "max_namespaces": value.get("max_namespaces"),
            "allow_any_host": is_open,
        }
        self._add(Kind.SUBSYSTEM, nqn, attributes, path)
        for index, host in enumerate(value.get("hosts", ())):
            place = (*path, "hosts", index)
            host_nqn = self._parent._host_nqn(host, (*self._endpoint.path, *place))
            if Id(Kind.HOST, host_nqn, nqn) in self._endpoint.desired:
                raise self._error(place, f"{host_nqn}: is there twice")
            keys = self._key_names({} if isinstance(host, str) else host, place)
            self._add(Kind.HOST, host_nqn, keys, place, parent=nqn)
        for index, listener in enumerate(value.get("listeners", ())):
            place = (*path, "listeners", index)
            address = listener if isinstance(listener, str) else listener["address"]
            is_secure = not isinstance(listener, str) and listener.get("secure_channel", False)
            if is_secure and is_open:
                raise self._error(place, "secure_channel: SPDK refuses it together with allow_any_host")
            _check_listen_address(self._parent._source, address, (*self._endpoint.path, *place))
            self._add(Kind.LISTENER, address, {"secure_channel": is_secure}, place, parent=nqn)
        for nsid, given in (value.get("namespaces") or {}).items():
            given = {"bdev": given} if isinstance(given, str) else given
            identity = {
                "uuid": _lower(given.get("uuid")),
                "nguid": _lower(given.get("nguid")),
            }
            place = (*path, "namespaces", nsid)
            self._add(Kind.NAMESPACE, nsid, {"bdev_name": given["bdev"], **identity}, place, parent=nqn)


def _check_listen_address(source: Source, text: str, path: Path_) -> None:
    import ipaddress

    address, _ = split_address(text)
    try:
        canonical = str(ipaddress.ip_address(address))
    except ValueError:
        raise source.error(path, f"expected a numeric address to listen on, got {address!r}") from None
    if canonical != address:
        raise source.error(path, f"expected the address as {canonical}, got {address}")


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def namespace_uri(served: ServedSubsystem, nsid: int) -> str:
    """The device URI of a served namespace, over the listener that kvdev reaches it by."""
    from kvdev.uri import parse_device_uri

    return str(parse_device_uri(f"tcp://{served.reach}/{quote(served.nqn, safe=':.-_')}?nsid={nsid}"))


def _secrets_for(secrets: Mapping[str, str], *, is_secure: bool) -> dict[str, str]:
    return {option: place for option, place in secrets.items() if option != "tls_psk" or is_secure}
