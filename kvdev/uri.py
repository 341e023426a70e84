"""Names of devices, volumes and KV namespaces as people type them, and NVMe qualified names.

Not here: opening what they name (``kvdev.session``).
Spec: NVM Express Base, NVMe Qualified Names; TCP transport, TRADDR and TRSVCID.
Trust: every text is untrusted; raises only UsageError naming the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote

from kvdev.drill import PREFIX as DRILL_PREFIX
from kvdev.drill import DrillPlan, parse_plan
from kvdev.errors import UsageError
from kvdev.units import parse_size

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
NQN_SIZE_BYTES_MAX = 223
PORT_IO = 4420
PORT_DISCOVERY = 8009
NSID_MAX = 0xFFFF_FFFE
KEY_NAME_SIZE_BYTES_MAX = 4000
NAME_SIZE_BYTES_MAX = 223
PATH_COUNT_MAX = 16
"""Paths to one subsystem; a bound on what one URI can make us connect to."""
MEMBER_COUNT_MAX = 256
URI_SIZE_MAX = 1 << 16
DRILL_SCHEME = "drill+"
"""Before a device on which things go wrong on purpose (``kvdev.drill``)."""

_NQN_DATED = re.compile(r"nqn\.\d{4}-(?:0[1-9]|1[0-2])\.([^:]+):(.+)", re.S | re.A)
_NQN_UUID_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DOMAIN_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]{1,10}")

_KEY_OPTIONS = ("dhchap-key", "dhchap-ctrl-key", "tls-psk")

_SUBSYSTEM_VOLUMES = ("vol+tcp:", f"vol+{DRILL_SCHEME}tcp:")

# What must be escaped inside a part so that the separators of the forms above stay unambiguous.
_SAFE_IN_NQN = "/:.-_~!$'()*+;=@&"
_SAFE_IN_KEY = "/:.-_~!$'()*+;=@"
_SAFE_IN_PATH = "/:.-_~!$'()*+;=@&"
_SAFE_IN_NAME = ":.-_~!$'()*+;=@/"


class DigestPolicy(enum.Enum):
    """What the host wants of a header or data digest."""

    REQUIRE = "require"
    """Ask for it and refuse a controller that declines."""
    PREFER = "prefer"
    """Ask for it and go on without when the controller declines."""
    OFF = "off"


@dataclass(frozen=True)
class KeySource:
    """Where a secret is kept: ``file`` with a path, or ``keyring`` with a description or serial number."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


SECRET_PREFIXES = ("DHHC-1:", "NVMeTLSkey-1:")


def refuse_secret(text: str, *, field: str) -> None:
    """Raise UsageError, without repeating it, when a text holds a secret where the name of one belongs."""
    if any(prefix.lower() in text.lower() for prefix in SECRET_PREFIXES):
        raise UsageError(
            f"{field}: expected the place of a secret, got the secret itself, which other users of this machine "
            f"can read now: make a new one, keep it in a file with mode 0600 and write file:/PATH"
        )


def parse_key_source(text: str, *, field: str) -> KeySource:
    """Parse ``file:/PATH`` or ``keyring:NAME``."""
    refuse_secret(text, field=field)
    kind, colon, name = text.partition(":")
    if not colon or kind not in ("file", "keyring"):
        raise UsageError(f"{field}: expected file:/PATH or keyring:NAME, got {text!r}")
    if kind == "file" and not name.startswith("/"):
        raise UsageError(f"{field}: file: expected an absolute path, got {name!r}")
    if not name.isprintable() or not 0 < len(name.encode()) <= KEY_NAME_SIZE_BYTES_MAX:
        raise UsageError(
            f"{field}: {kind}: expected 1 to {KEY_NAME_SIZE_BYTES_MAX} bytes of printable text, got {name[:80]!r}"
        )
    return KeySource(kind, name)


def check_nqn(text: str, *, field: str) -> str:
    """Return ``text`` when it is a valid NVMe qualified name, else raise UsageError naming ``field``."""
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{field}: expected UTF-8 text, got {text!r}") from None
    if not 0 < size_bytes <= NQN_SIZE_BYTES_MAX:
        raise UsageError(f"{field}: expected 1 to {NQN_SIZE_BYTES_MAX} bytes, got {size_bytes}")
    if text == DISCOVERY_NQN:
        return text
    if text.startswith(_NQN_UUID_PREFIX):
        if not _UUID.fullmatch(text[len(_NQN_UUID_PREFIX) :]):
            raise UsageError(
                f"{field}: expected {_NQN_UUID_PREFIX} and a UUID of 8-4-4-4-12 hex digits, got {text!r}"
            )
        return text
    match = _NQN_DATED.fullmatch(text)
    is_valid = (
        match is not None
        and all(_DOMAIN_LABEL.fullmatch(label) for label in match.group(1).split("."))
        and text.isprintable()
    )
    if not is_valid:
        raise UsageError(
            f"{field}: expected nqn.YYYY-MM.REVERSE.DOMAIN:NAME or {_NQN_UUID_PREFIX}UUID, got {text!r}"
        )
    return text


@dataclass(frozen=True)
class TcpAddress:
    """Where a controller or discovery service listens; ``host`` is a name or an address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host.replace('%', '%25')}]:{self.port}"
        return f"{self.host}:{self.port}"


def _with_options(base: str, options: list[str], drill: DrillPlan | None) -> str:
    options = options if drill is None else [*options, *drill.options()]
    query = "?" + "&".join(options) if options else ""
    return f"{'' if drill is None else 'drill+'}{base}{query}"


@dataclass(frozen=True)
class TcpUri:
    """A namespace of a subsystem (``nsid`` set), or the subsystem (``nsid`` None), over NVMe/TCP.

    ``addresses`` are the paths, the first one being the URI's own; policies are None when not given.
    """

    addresses: tuple[TcpAddress, ...]
    subnqn: str
    nsid: int | None = None
    header_digest: DigestPolicy | None = None
    data_digest: DigestPolicy | None = None
    dhchap_key: KeySource | None = None
    dhchap_ctrl_key: KeySource | None = None
    tls_psk: KeySource | None = None
    drill: DrillPlan | None = None

    @property
    def address(self) -> TcpAddress:
        return self.addresses[0]

    def __str__(self) -> str:
        options = []
        if self.nsid is not None:
            options.append(f"nsid={self.nsid}")
        if self.header_digest is not None:
            options.append(f"hdgst={self.header_digest.value}")
        if self.data_digest is not None:
            options.append(f"ddgst={self.data_digest.value}")
        sources = (self.dhchap_key, self.dhchap_ctrl_key, self.tls_psk)
        for name, source in zip(_KEY_OPTIONS, sources, strict=True):
            if source is not None:
                options.append(f"{name}={quote(str(source), safe=_SAFE_IN_KEY)}")
        options += [f"path={address}" for address in self.addresses[1:]]
        return _with_options(
            f"tcp://{self.address}/{quote(self.subnqn, safe=_SAFE_IN_NQN)}", options, self.drill
        )


@dataclass(frozen=True)
class FileUri:
    """A regular file or block device of this machine; options are None when not given."""

    path: str
    engine: str | None = None
    direct: str | None = None
    depth: int | None = None
    is_polled: bool | None = None
    drill: DrillPlan | None = None

    def __str__(self) -> str:
        options = []
        if self.engine is not None:
            options.append(f"engine={self.engine}")
        if self.direct is not None:
            options.append(f"direct={self.direct}")
        if self.depth is not None:
            options.append(f"depth={self.depth}")
        if self.is_polled is not None:
            options.append(f"poll={'on' if self.is_polled else 'off'}")
        return _with_options(f"file:{quote(self.path, safe=_SAFE_IN_PATH)}", options, self.drill)


@dataclass(frozen=True)
class VhostUri:
    """A vhost-user-blk back end behind a UNIX socket."""

    path: str
    drill: DrillPlan | None = None

    def __str__(self) -> str:
        return _with_options(f"vhost:{quote(self.path, safe=_SAFE_IN_PATH)}", [], self.drill)


@dataclass(frozen=True)
class MemUri:
    """Memory of this process; ``size_bytes`` is needed where the name is opened first."""

    name: str
    size_bytes: int | None = None
    drill: DrillPlan | None = None

    def __str__(self) -> str:
        options = [] if self.size_bytes is None else [f"size={self.size_bytes}"]
        return _with_options(f"mem:{quote(self.name, safe=_SAFE_IN_NAME)}", options, self.drill)


DeviceUri: TypeAlias = "TcpUri | FileUri | VhostUri | MemUri"


@dataclass(frozen=True)
class VolumeUri:
    """A volume: its member devices, or the subsystem whose labelled namespaces are its members."""

    members: tuple[DeviceUri, ...] = ()
    subsystem: TcpUri | None = None

    def __str__(self) -> str:
        if self.subsystem is not None:
            return f"vol+{self.subsystem}"
        return "vol:" + ",".join(str(member) for member in self.members)


@dataclass(frozen=True)
class KvNamespaceUri:
    """A KV namespace of a volume."""

    volume: VolumeUri
    name: str

    def __str__(self) -> str:
        return f"{self.volume}#{quote(self.name, safe=_SAFE_IN_NAME)}"


Uri: TypeAlias = "DeviceUri | VolumeUri | KvNamespaceUri"

_FORMS = (
    "tcp://HOST:PORT/NQN?nsid=N, vhost:/SOCKET, file:/PATH, mem:NAME?size=SIZE, vol:URI,URI,... , "
    "vol+tcp://HOST:PORT/NQN or VOLUME#NAME"
)


def parse_uri(text: str) -> Uri:
    """Parse any of the forms; ``str()`` of the result gives a text that parses to the same value."""
    refuse_secret(text, field="uri")
    if len(text) > URI_SIZE_MAX:
        raise UsageError(f"uri: expected at most {URI_SIZE_MAX} characters, got {len(text)}")
    volume_text, has_name, name_text = text.partition("#")
    if text.startswith(("vol:", "vol+")):
        volume = _parse_volume(volume_text)
        if not has_name:
            return volume
        return KvNamespaceUri(volume, _parse_name(name_text, field="namespace name", text=text))
    if has_name:
        raise UsageError(
            f"uri: #{name_text}: a KV namespace is named VOLUME#NAME with a volume (vol:... or vol+tcp:...), "
            f"got {text!r}; write %23 for a # inside a path"
        )
    return _parse_device(text)


def parse_device_uri(text: str) -> DeviceUri:
    """Parse one device; a volume or KV namespace is refused."""
    uri = parse_uri(text)
    if isinstance(uri, (VolumeUri, KvNamespaceUri)):
        raise UsageError(f"uri: expected one device (tcp:, vhost:, file: or mem:), got {text!r}")
    return uri


def parse_volume_uri(text: str) -> VolumeUri:
    """Parse a volume; a single device is taken as a volume of one member."""
    uri = parse_uri(text)
    if isinstance(uri, KvNamespaceUri):
        raise UsageError(
            f"uri: expected a volume, got the KV namespace {text!r}; leave out #{uri.name} to name its volume"
        )
    return uri if isinstance(uri, VolumeUri) else VolumeUri(members=(uri,))


def parse_kv_namespace_uri(text: str) -> KvNamespaceUri:
    """Parse a KV namespace."""
    uri = parse_uri(text)
    if not isinstance(uri, KvNamespaceUri):
        raise UsageError(f"uri: expected a KV namespace VOLUME#NAME, got {text!r}; append #NAME")
    return uri


def parse_subsystem_uri(text: str) -> TcpUri:
    """Parse ``tcp://HOST:PORT/NQN`` (an nsid is allowed)."""
    uri = parse_uri(text)
    if not isinstance(uri, TcpUri):
        raise UsageError(f"uri: expected a subsystem tcp://HOST:PORT/NQN, got {text!r}")
    if uri.drill is not None:
        raise UsageError(f"uri: {DRILL_SCHEME}: a drill is for reads and writes of a device, got {text!r}")
    return uri


def parse_discovery_uri(text: str) -> TcpUri:
    """Parse a discovery service: ``[tcp://]HOST[:PORT][/NQN]``, by default port 8009, the known NQN."""
    rest = text[len("tcp://") :] if text.startswith("tcp://") else text
    # A query cannot be part of the address, so it marks where a missing NQN belongs.
    head, has_query, query = rest.partition("?")
    address, _, nqn = head.partition("/")
    uri_text = f"tcp://{address}/{nqn or DISCOVERY_NQN}" + (f"?{query}" if has_query else "")
    uri = parse_uri(uri_text)
    if not isinstance(uri, TcpUri):
        raise UsageError(f"uri: expected a discovery service HOST[:PORT], got {text!r}")
    return uri


def parse_address(text: str, *, port: int | None, field: str = "address") -> TcpAddress:
    """Parse ``HOST[:PORT]``; ``port`` is the default, None when one must be given."""
    if text.startswith("["):
        inner, closing, after = text[1:].partition("]")
        if not closing or (after and not after.startswith(":")):
            raise UsageError(f"{field}: expected [IPV6]:PORT, got {text!r}")
        host, port_text = inner.replace("%25", "%"), after[1:] if after else None
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise UsageError(f"{field}: expected an IPv6 address in the brackets, got {inner!r}") from None
        if not all("!" <= c <= "~" and c not in "/?#,%]" for c in host.partition("%")[2]):
            raise UsageError(f"{field}: expected a plain interface name after the %, got {inner!r}")
    else:
        host, has_port, port_given = text.partition(":")
        port_text = port_given if has_port else None
        if text.count(":") > 1:
            raise UsageError(
                f"{field}: expected an IPv6 address in brackets, such as [::1]:4420, got {text!r}"
            )
        _check_host(host, field=field)
    if port_text is None:
        if port is None:
            raise UsageError(
                f"{field}: expected HOST:PORT, got {text!r}; append the port, such as :{PORT_IO}"
            )
        return TcpAddress(host, port)
    if not _NUMBER.fullmatch(port_text) or not 1 <= int(port_text) <= 65535:
        raise UsageError(f"{field}: port: expected 1 to 65535, got {port_text!r}")
    return TcpAddress(host, int(port_text))


def _check_host(host: str, *, field: str) -> None:
    if host and all(c in "0123456789." for c in host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise UsageError(f"{field}: host: expected an IPv4 address a.b.c.d, got {host!r}") from None
        return
    labels = host[:-1].split(".") if host.endswith(".") else host.split(".")
    if len(host) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise UsageError(f"{field}: host: expected a host name or an address, got {host!r}")


def _parse_drill(text: str) -> DeviceUri:
    """A device with faults: ``drill+`` before it, and what goes wrong among its options."""
    head, has_query, query = text[len(DRILL_SCHEME) :].partition("?")
    given: dict[str, str] = {}
    others = []
    for item in query.split("&") if has_query else ():
        name, equals, value = item.partition("=")
        if not name.startswith(DRILL_PREFIX):
            others.append(item)
            continue
        name = name[len(DRILL_PREFIX) :]
        if not equals or not value:
            raise UsageError(f"uri: option {item!r}: expected NAME=VALUE in {text!r}")
        if name in given:
            raise UsageError(f"uri: option '{DRILL_PREFIX}{name}' is given twice in {text!r}")
        given[name] = value
    if head.startswith(DRILL_SCHEME):
        raise UsageError(
            f"uri: {DRILL_SCHEME}: expected it once, got {text!r}; one drill may have several faults"
        )
    device = _parse_device(head + ("?" + "&".join(others) if others else ""))
    return dataclasses.replace(device, drill=parse_plan(given, where=text))


def _parse_device(text: str) -> DeviceUri:
    if text.startswith(DRILL_SCHEME):
        return _parse_drill(text)
    scheme, colon, rest = text.partition(":")
    if not colon:
        raise UsageError(f"uri: expected {_FORMS}, got {text!r}")
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    if scheme == "mem":
        return _parse_mem(text, rest)
    if scheme == "file":
        return _parse_file(text, rest)
    if scheme == "vhost":
        path_text, has_query, query = rest.partition("?")
        if has_query:
            raise UsageError(
                f"uri: {query!r}: expected no options after vhost:, got {text!r}; write %3F for a ? in the path"
            )
        return VhostUri(_parse_path(path_text, scheme=scheme, text=text))
    raise UsageError(f"uri: scheme {scheme!r}: expected {_FORMS}, got {text!r}")


FILE_ENGINES = ("auto", "io_uring", "threads")
FILE_DIRECT = ("auto", "on", "off")
FILE_DEPTH_MAX = 4096


def _parse_file(text: str, rest: str) -> FileUri:
    path_text, _, query = rest.partition("?")
    options: dict[str, str] = {}
    for name, value in _options(query, text=text):
        if name not in ("engine", "direct", "depth", "poll"):
            raise UsageError(
                f"uri: option {name!r}: expected engine, direct, depth or poll in {text!r}; "
                f"write %3F for a ? in the path"
            )
        if name in options:
            raise UsageError(f"uri: {name}: is given twice in {text!r}")
        options[name] = value
    for name, choices in (("engine", FILE_ENGINES), ("direct", FILE_DIRECT), ("poll", ("on", "off"))):
        if name in options and options[name] not in choices:
            raise UsageError(f"uri: {name}: expected {', '.join(choices)}, got {options[name]!r} in {text!r}")
    depth = options.get("depth")
    if depth is not None and not (_NUMBER.fullmatch(depth) and 1 <= int(depth) <= FILE_DEPTH_MAX):
        raise UsageError(f"uri: depth: expected 1 to {FILE_DEPTH_MAX}, got {depth!r} in {text!r}")
    return FileUri(
        _parse_path(path_text, scheme="file", text=text),
        engine=options.get("engine"),
        direct=options.get("direct"),
        depth=None if depth is None else int(depth),
        is_polled=options["poll"] == "on" if "poll" in options else None,
    )


def _parse_tcp(text: str, rest: str) -> TcpUri:
    if not rest.startswith("//"):
        raise UsageError(f"uri: expected tcp://HOST:PORT/NQN, got {text!r}")
    head, has_query, query = rest[2:].partition("?")
    address_text, slash, nqn_text = head.partition("/")
    if not slash or not nqn_text:
        raise UsageError(
            f"uri: subsystem NQN: expected tcp://HOST:PORT/NQN, got {text!r}; `kvdev discover` lists the NQNs"
        )
    subnqn = check_nqn(_unquote(nqn_text, field="uri: subsystem NQN"), field="uri: subsystem NQN")
    port = PORT_DISCOVERY if subnqn == DISCOVERY_NQN else PORT_IO
    addresses = [parse_address(address_text, port=port, field="uri: address")]
    given: dict[str, str] = {}
    for name, value in _options(query if has_query else "", text=text):
        if name == "path":
            address = parse_address(value, port=port, field="uri: path")
            if address in addresses:
                raise UsageError(f"uri: path: {address} is named twice in {text!r}")
            addresses.append(address)
            if len(addresses) > PATH_COUNT_MAX:
                raise UsageError(f"uri: path: expected at most {PATH_COUNT_MAX} paths in {text[:80]!r}")
            continue
        if name not in ("nsid", "hdgst", "ddgst", *_KEY_OPTIONS):
            raise UsageError(
                f"uri: option {name!r}: expected nsid=, hdgst=, ddgst=, dhchap-key=, dhchap-ctrl-key=, tls-psk= "
                f"or path= in {text!r}"
            )
        if name in given:
            raise UsageError(f"uri: option {name!r} is given twice in {text!r}")
        given[name] = value
    return TcpUri(
        addresses=tuple(addresses),
        subnqn=subnqn,
        nsid=_parse_nsid(given["nsid"]) if "nsid" in given else None,
        header_digest=_parse_policy("hdgst", given["hdgst"]) if "hdgst" in given else None,
        data_digest=_parse_policy("ddgst", given["ddgst"]) if "ddgst" in given else None,
        dhchap_key=_parse_key("dhchap-key", given),
        dhchap_ctrl_key=_parse_key("dhchap-ctrl-key", given),
        tls_psk=_parse_key("tls-psk", given),
    )


def _parse_mem(text: str, rest: str) -> MemUri:
    name_text, has_query, query = rest.partition("?")
    name = _parse_name(name_text, field="memory device name", text=text)
    size_bytes: int | None = None
    for option, value in _options(query if has_query else "", text=text):
        if option != "size":
            raise UsageError(f"uri: option {option!r}: expected size= in {text!r}")
        if size_bytes is not None:
            raise UsageError(f"uri: option 'size' is given twice in {text!r}")
        size_bytes = parse_size(value, field="uri: size")
        if not 0 < size_bytes < 1 << 63:
            raise UsageError(f"uri: size: expected more than 0 and less than 2^63 bytes, got {value!r}")
    return MemUri(name, size_bytes)


def _parse_volume(text: str) -> VolumeUri:
    if text.startswith("vol+"):
        subsystem = _parse_device(text[len("vol+") :]) if text.startswith(_SUBSYSTEM_VOLUMES) else None
        if not isinstance(subsystem, TcpUri):
            raise UsageError(f"uri: expected vol+tcp://HOST:PORT/NQN or vol:URI,URI,..., got {text!r}")
        if subsystem.nsid is not None:
            raise UsageError(
                f"uri: nsid: vol+tcp: takes all labelled namespaces, got nsid={subsystem.nsid}; "
                f"use vol:{subsystem} for single ones"
            )
        return VolumeUri(subsystem=subsystem)
    body = text[len("vol:") :]
    if not body:
        raise UsageError("uri: members: expected at least one device after vol:, got none")
    texts = body.split(",")
    if len(texts) > MEMBER_COUNT_MAX:
        raise UsageError(f"uri: members: expected at most {MEMBER_COUNT_MAX} devices, got {len(texts)}")
    members: list[DeviceUri] = []
    for member_index, member_text in enumerate(texts):
        if not member_text:
            raise UsageError(f"uri: member {member_index}: expected a device, got nothing in {text!r}")
        if member_text.startswith(("vol:", "vol+")):
            raise UsageError(f"uri: member {member_index}: expected a device, got a volume in {text!r}")
        member = _parse_device(member_text)
        if _place(member) in map(_place, members):
            raise UsageError(f"uri: member {member_index}: {member_text} is named twice in {text!r}")
        if isinstance(member, TcpUri) and member.nsid is None:
            raise UsageError(
                f"uri: member {member_index}: expected a namespace, got the subsystem {member_text!r}; "
                f"append ?nsid=N, or use vol+tcp: for all labelled namespaces"
            )
        members.append(member)
    return VolumeUri(members=tuple(members))


def _place(uri: DeviceUri) -> object:
    """A file is the same one whatever the options, any device whatever its drill; else it is like itself alone."""
    return uri.path if isinstance(uri, FileUri) else dataclasses.replace(uri, drill=None)


def _options(query: str, *, text: str) -> Iterator[tuple[str, str]]:
    for item in query.split("&") if query else ():
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise UsageError(f"uri: option {item!r}: expected NAME=VALUE in {text!r}")
        if name.startswith(DRILL_PREFIX):
            raise UsageError(f"uri: option {name!r}: expected {DRILL_SCHEME} before the device in {text!r}")
        yield name, value


def _unquote(text: str, *, field: str) -> str:
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise UsageError(f"{field}: expected two hex digits after each %, got {text!r}")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise UsageError(f"{field}: expected escapes of UTF-8 text, got {text!r}") from None


def _parse_path(path_text: str, *, scheme: str, text: str) -> str:
    path = _unquote(path_text, field=f"uri: {scheme} path")
    if path.startswith("//"):
        path = "/" + path.lstrip("/")
    if not path.startswith("/") or path == "/" or not path.isprintable():
        raise UsageError(
            f"uri: {scheme} path: expected an absolute path, such as {scheme}:/PATH, got {text!r}"
        )
    return path


def _parse_name(name_text: str, *, field: str, text: str) -> str:
    name = _unquote(name_text, field=f"uri: {field}")
    if not name or not name.isprintable():
        raise UsageError(f"uri: {field}: expected a printable name, got {name!r} in {text!r}")
    if len(name.encode(errors="surrogatepass")) > NAME_SIZE_BYTES_MAX:
        raise UsageError(f"uri: {field}: expected at most {NAME_SIZE_BYTES_MAX} bytes, got {name!r}")
    return name


def _parse_nsid(value: str) -> int:
    if not _NUMBER.fullmatch(value) or not 1 <= int(value) <= NSID_MAX:
        raise UsageError(f"uri: nsid: expected 1 to {NSID_MAX}, got {value!r}")
    return int(value)


def _parse_policy(name: str, value: str) -> DigestPolicy:
    try:
        return DigestPolicy(value)
    except ValueError:
        raise UsageError(f"uri: {name}: expected require, prefer or off, got {value!r}") from None


def _parse_key(name: str, given: dict[str, str]) -> KeySource | None:
    if name not in given:
        return None
    return parse_key_source(_unquote(given[name], field=f"uri: {name}"), field=f"uri: {name}")
