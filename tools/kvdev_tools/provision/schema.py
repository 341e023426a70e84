"""What may stand in the file: a JSON Schema, and the check of a file against it.

The check knows just the keywords that the schema uses (a test holds it to that): a general validator brings
compiled dependencies and reports paths, not lines and columns.
Not here: what names refer to (``document``).
Trust: values are ``untrusted``; raises only UsageError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvdev_tools.provision.source import Path_, Source

NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
BDEV_NAME = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
SIZE = r"^[0-9]+(\.[0-9]+)? *([KMGT](i?B)?|B)?$"
NQN = r"^nqn\.[0-9]{4}-[0-9]{2}\..{1,210}$"
ADDRESS = r"^([A-Za-z0-9._-]+|[0-9.]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$"
UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"

Schema = Mapping[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Schema) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**made, "required": list(required)} if required else made


_SHAPES = {
    NAME: "a name of up to 64 letters, digits, dots, underscores and hyphens",
    SIZE: "a size such as 64KiB, 1.5TiB or 4096",
    NQN: "an NQN such as nqn.2026-01.com.example:kv",
    ADDRESS: "HOST:PORT such as 192.0.2.7:4420 or [2001:db8::7]:4420",
    UUID: "a UUID such as 6f1d1a0e-5c55-5d0f-9c1b-6b7664657630",
    "^/.": "an absolute path",
}
"""Patterns in words: nobody should have to read them."""


def _named(values: Schema, names: str = NAME) -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"pattern": names}, "additionalProperties": values}


def _text(pattern: str, description: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "description": description}


def _count(low: int, high: int, description: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


def _size(description: str) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE}],
        "description": description,
    }


def _list(items: Schema, description: str, *, low: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "description": description}


_KEY = _text(NAME, "Name of a key in `keys` of the same entry.")
_PATH = _text("^/.", "An absolute path on the machine of that SPDK.")
_RPC = _text("^.+$", "Its RPC socket: an absolute path or HOST:PORT.")
_UUID = _text(UUID, "Identity; without it one is derived from the names, the same every time.")
_BLOCK_SIZE = {"enum": [512, 4096], "description": "Bytes of a block (4096)."}
_BDEV_NAME = _text(BDEV_NAME, "Name of a bdev: of `bdevs` or `raids`, LVSTORE/LVOL, or CONTROLLERnNSID.")

_QOS = _object(
    rw_ios_per_sec=_count(0, 1 << 40, "Reads and writes a second, in thousands; 0 is no limit."),
    rw_mbytes_per_sec=_count(0, 1 << 30, "MiB a second of reads and writes."),
    r_mbytes_per_sec=_count(0, 1 << 30, "MiB a second of reads."),
    w_mbytes_per_sec=_count(0, 1 << 30, "MiB a second of writes."),
)
_MEMORY = _object(("size",), size=_size("Its size."), block_size=_BLOCK_SIZE)
_BDEV = _object(
    malloc=_MEMORY,
    null=_MEMORY,
    aio=_object(
        ("file",),
        file=_PATH,
        block_size=_BLOCK_SIZE,
        readonly=_flag("Refuse writes (false)."),
    ),
    uring=_object(("file",), file=_PATH, block_size=_BLOCK_SIZE),
    uuid=_UUID,
    qos=_QOS,
)
_RAID = _object(
    ("members",),
    strip_size=_size("Piece of one member, a power of two (128KiB)."),
    members=_list(_BDEV_NAME, "Bdevs in their order.", low=1),
    uuid=_UUID,
)
_LVSTORE = _object(
    ("bdev",),
    bdev=_BDEV_NAME,
    cluster_size=_size("Unit of allocation (4MiB)."),
    lvols=_named(
        _object(
            ("size",),
            size=_size("Rounded up to clusters."),
            thin=_flag("Take clusters when written (false)."),
            qos=_QOS,
        )
    ),
)
_CONTROLLER = _object(
    pcie=_text(r"^[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$", "Address of a local SSD."),
    target=_text(NAME, "Entry of `targets` that serves the subsystem."),
    subsystem=_text(NQN, "NQN of the subsystem."),
    paths=_list(_text(ADDRESS, "HOST:PORT"), "Ways there; by default all listeners that the target has."),
    header_digest=_flag("CRC32C over PDU headers (false)."),
    data_digest=_flag("CRC32C over payload (false)."),
    io_queues=_count(1, 1024, "I/O queue pairs per path."),
    ctrlr_loss_timeout_s=_count(-1, 86400, "Give a path up after; -1 never."),
    reconnect_delay_s=_count(0, 3600, "Pause between attempts."),
    fast_io_fail_timeout_s=_count(0, 86400, "Fail I/O after, while reconnecting goes on."),
    psk=_KEY,
    dhchap_key=_KEY,
    dhchap_ctrlr_key=_KEY,
)
_HOST_ENTRY = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _object(("host",), host={"type": "string"}, psk=_KEY, dhchap_key=_KEY, dhchap_ctrlr_key=_KEY),
    ]
}
_LISTENER = {
    "anyOf": [
        {"type": "string", "pattern": ADDRESS},
        _object(("address",), address=_text(ADDRESS, "HOST:PORT"), secure_channel=_flag("TLS only (false).")),
    ]
}
_NAMESPACE = {
    "anyOf": [
        {"type": "string", "pattern": BDEV_NAME},
        _object(
            bdev=_BDEV_NAME,
            uuid=_UUID,
            nguid=_text("^[0-9a-fA-F]{32}$", "Identity; by default that of the bdev."),
            size=_size("Of an unmanaged target: at least this much."),
            block_size=_BLOCK_SIZE,
        ),
    ]
}
_SUBSYSTEM = _object(
    serial_number=_text("^[ -~]{1,20}$", "Shown to hosts."),
    model_number=_text("^[ -~]{1,40}$", "Shown to hosts."),
    max_namespaces=_count(1, 1024, "Highest namespace id."),
    allow_any_host=_flag("Let every host connect (false)."),
    hosts=_list(_HOST_ENTRY, "Who may connect: an entry of `hosts`, or an NQN, with the keys it uses."),
    listeners=_list(_LISTENER, "Where it is served: HOST:PORT."),
    namespaces=_named(_NAMESPACE, "^[1-9][0-9]{0,8}$"),
)
_TRANSPORT = _object(
    max_io_size=_size("Largest command."),
    in_capsule_data_size=_size("Largest payload sent with its command."),
    max_queue_depth=_count(2, 65535, "Commands of a queue pair."),
    max_io_qpairs_per_ctrlr=_count(1, 1023, "I/O queue pairs of a host."),
)
_SPDK: dict[str, Schema] = {
    "rpc": _RPC,
    "cores": _text("^0x[0-9a-fA-F]+$", "Core mask it runs on; checked, set by SPDK's -m."),
    "hugepages": _count(0, 1 << 24, "2 MiB pages its machine has; checked where it is this machine."),
    "keys": _named(_PATH),
    "bdevs": _named(_BDEV),
    "controllers": _named(_CONTROLLER),
    "raids": _named(_RAID),
    "lvstores": _named(_LVSTORE),
}
_TARGET = _object(
    (),
    **_SPDK,
    managed=_flag("false: an array or kernel target that is checked and never configured (true)."),
    transport=_TRANSPORT,
    subsystems=_named(_SUBSYSTEM, NQN),
)
_GEOMETRY = {
    "anyOf": [
        _text("^[a-z0-9.-]+$", "A preset."),
        _object(
            ("model_id", "layer_count", "kv_head_count", "head_size"),
            model_id={"type": "string", "minLength": 1},
            revision={"type": "string"},
            layer_first=_count(0, 4095, "First layer."),
            layer_count=_count(1, 4096, "Layers."),
            kv_head_count=_count(1, 4096, "KV heads of the whole model."),
            head_size=_count(1, 65536, "Elements of a head; mla: of the latent row."),
            dtype={"type": "string"},
            tokens_per_page=_count(1, 65536, "Tokens of a page."),
            attention={"enum": ["mha", "mla"]},
        ),
    ]
}
_ENGINE = _object(
    ("volume", "geometry"),
    volume=_text(NAME, "Entry of `volumes`."),
    bdev=_BDEV_NAME,
    geometry=_GEOMETRY,
    tensor_parallel=_count(1, 64, "Worker processes, each with its rank (1)."),
    quota_per_rank=_size("Bytes of pages of one rank; by default an equal part of what is free."),
    checksum={"enum": ["crc32c", "nh64"], "description": "What pages are verified by (crc32c)."},
    cpumask=_text("^0x[0-9a-fA-F]+$", "Cores of the vhost controllers."),
)
_HOST = _object(
    (),
    **_SPDK,
    nqn=_text(NQN, "NQN this host connects with."),
    psk=_text(NAME, "Name in its `keys` of the key of TLS, for listeners with a secure channel."),
    dhchap_key=_text(NAME, "Name in its `keys` of the secret it proves itself with."),
    dhchap_ctrlr_key=_text(NAME, "Name in its `keys` of the secret subsystems prove themselves with."),
    engines=_named(_ENGINE, "^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$"),
)
_MEMBER = {
    "anyOf": [
        _text("^(tcp://|file:/).+$", "A device's URI."),
        _object(
            ("target", "subsystem"),
            target=_text(NAME, "Entry of `targets`."),
            subsystem=_text(NQN, "Its subsystem."),
            nsid=_count(1, 999_999_999, "One namespace; by default all of the subsystem."),
        ),
    ]
}
_VOLUME = _object(
    ("members",),
    members=_list(_MEMBER, "Devices in their order."),
    strip_size=_size("Piece of one member, a power of two (128KiB)."),
    durability={
        "enum": ["flushed", "none"],
        "description": "none: use it although a flush on the way is swallowed (flushed).",
    },
    host=_text(NAME, "Entry of `hosts` whose NQN makes the volume, where not every host may connect."),
)

SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "kvdev provision",
    "description": "Targets, hosts, volumes and KV namespaces as they shall be.",
    **_object(
        ("version", "name"),
        version={"const": 1, "description": "Of this format."},
        name=_text(NAME, "Typed again before anything is destroyed."),
        targets=_named(_TARGET),
        hosts=_named(_HOST),
        volumes=_named(_VOLUME),
    ),
}

KEYWORDS = frozenset(
    (
        "$schema",
        "title",
        "description",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "propertyNames",
        "pattern",
        "minLength",
        "items",
        "minItems",
        "minimum",
        "maximum",
        "enum",
        "const",
        "anyOf",
    )
)

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}
_TYPE_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "boolean": "true or false",
}


def check_source(source: Source) -> None:
    """Raise UsageError at the first place, in the file's order, where it is not as the schema says."""
    faults = sorted(_faults(SCHEMA, source.value, ()), key=lambda fault: _place(source, fault[0]))
    if faults:
        path, text = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise source.error(path, text + more)


def _place(source: Source, path: Path_) -> tuple[int, int]:
    while path not in source.marks and path:
        path = path[:-1]
    return source.marks.get(path, (0, 0))


def _faults(schema: Schema, value: Any, path: Path_) -> Iterator[tuple[Path_, str]]:
    if "anyOf" in schema:
        yield from _any_of(schema["anyOf"], value, path)
        return
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        yield path, f"expected {schema['const']}, got {_shown(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield path, f"expected {' or '.join(str(each) for each in schema['enum'])}, got {_shown(value)}"
        return
    kind = schema.get("type")
    if kind is not None and not _is_type(value, kind):
        yield path, f"expected {_TYPE_WORDS[kind]}, got {_shown(value)}"
        return
    if isinstance(value, str):
        yield from _text_faults(schema, value, path)
    elif isinstance(value, dict):
        yield from _object_faults(schema, value, path)
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield path, f"expected at least {schema['minItems']}, got {len(value)}"
        for index, each in enumerate(value):
            yield from _faults(schema.get("items", {}), each, (*path, index))
    elif isinstance(value, int):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high:
            bound = f"{low} to {high}" if "maximum" in schema else f"{low} or more"
            yield path, f"expected {bound}, got {value}"


def _is_type(value: Any, kind: str) -> bool:
    # Python counts booleans among the integers.
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _any_of(choices: list[Schema], value: Any, path: Path_) -> Iterator[tuple[Path_, str]]:
    fitting = [each for each in choices if _is_type(value, each["type"])]
    if not fitting:
        words = " or ".join(_TYPE_WORDS[each["type"]] for each in choices)
        yield path, f"expected {words}, got {_shown(value)}"
        return
    # Of the choices of the right type the one with the fewest faults is what was meant.
    yield from min((list(_faults(each, value, path)) for each in fitting), key=len)


def _text_faults(schema: Schema, value: str, path: Path_) -> Iterator[tuple[Path_, str]]:
    if len(value) < schema.get("minLength", 0):
        yield path, "expected some text, got none"
    pattern = schema.get("pattern")
    if pattern is not None and not _matches(pattern, value):
        what = schema.get("description", "")
        shape = _SHAPES.get(pattern, f"a match of {pattern}")
        yield path, f"expected {shape}{f' ({what.rstrip(chr(46))})' if what else ''}, got {value!r}"


def _object_faults(schema: Schema, value: Mapping[str, Any], path: Path_) -> Iterator[tuple[Path_, str]]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield path, f"{name}: missing"
    names = schema.get("propertyNames", {}).get("pattern")
    for name, each in value.items():
        here = (*path, name)
        if name in properties:
            yield from _faults(properties[name], each, here)
        elif schema.get("additionalProperties") is False:
            yield here, f"no such field; expected one of {', '.join(properties)}"
        else:
            if names is not None and not _matches(names, name):
                yield here, f"name: expected a match of {names}, got {name!r}"
            yield from _faults(schema.get("additionalProperties", {}), each, here)


def _matches(pattern: str, value: str) -> bool:
    # In Python $ matches before a last line feed too, which no name shall have.
    return "\n" not in value and re.search(pattern, value) is not None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else repr(value)
