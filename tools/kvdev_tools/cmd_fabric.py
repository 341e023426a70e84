"""``kvdev discover`` and ``kvdev identify``: what a target offers, and what a controller says it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvdev.units import format_size
from kvdev_tools.connect import host_options, make_session, operation_deadline, timeout_option
from kvdev_tools.output import emit, fields, json_option, table

if TYPE_CHECKING:
    from kvdev.initiator.controller import Controller
    from kvdev.initiator.namespace import NamespaceInfo
    from kvdev.wire.log import DiscoveryEntry

_SUBTYPES = {1: "referral", 2: "nvm", 3: "discovery"}
_TRANSPORTS = {1: "rdma", 2: "fc", 3: "tcp", 254: "loop"}
_FAMILIES = {1: "ipv4", 2: "ipv6", 3: "ib", 4: "fc"}
_SECURE_CHANNELS = {0: "not specified", 1: "required", 2: "not required"}
_SECURITY_TYPES = {0: "none", 1: "tls 1.2", 2: "tls 1.3"}
_AUTHENTICATIONS = {0: "not required", 1: "required", 2: "required, and a secure channel of it"}


@click.command()
@click.argument("address", metavar="[tcp://]HOST[:PORT]")
@host_options
@timeout_option
@json_option
def discover(
    address: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """List the subsystems that a discovery service offers this host.

    \b
    Examples:
      kvdev discover 127.0.0.1:4420
      kvdev discover --json tcp://[2001:db8::1]
    """
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        entries = session.discover(address, deadline=operation_deadline(timeout_s))
    found = [_entry(entry) for entry in entries]

    def text() -> list[str]:
        if not found:
            return ["no subsystem is offered to this host"]
        columns = (
            "uri",
            "subtype",
            "transport",
            "family",
            "secure_channel",
            "security_type",
            "authentication",
        )
        rows = [["-" if entry[name] is None else entry[name] for name in columns] for entry in found]
        return table(rows, header=[name.replace("_", " ") for name in columns])

    emit({"entries": found}, as_json=as_json, text=text)


def _entry(entry: DiscoveryEntry) -> dict[str, Any]:
    address = f"[{entry.traddr}]" if ":" in entry.traddr else entry.traddr
    transport = _TRANSPORTS.get(entry.trtype, str(entry.trtype))
    return {
        "uri": f"{transport}://{address}:{entry.trsvcid}/{entry.subnqn}",
        "subnqn": entry.subnqn,
        "subtype": _SUBTYPES.get(entry.subtype, str(entry.subtype)),
        "transport": transport,
        "family": _FAMILIES.get(entry.adrfam, str(entry.adrfam)),
        "traddr": entry.traddr,
        "trsvcid": entry.trsvcid,
        "port_id": entry.portid,
        "cntlid": entry.cntlid,
        "secure_channel": _SECURE_CHANNELS.get(entry.tsc, str(entry.tsc)),
        # TSAS means this on TCP only.
        "security_type": _SECURITY_TYPES.get(entry.sectype, str(entry.sectype))
        if transport == "tcp"
        else None,
        "authentication": _AUTHENTICATIONS.get(entry.tasc, str(entry.tasc)),
    }


@click.command()
@click.argument("uri", metavar="tcp://HOST:PORT/NQN[?nsid=N]")
@host_options
@timeout_option
@json_option
def identify(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> None:
    """Show a controller and its active namespaces, or the one that nsid= names.

    \b
    Example:
      kvdev identify tcp://127.0.0.1:4420/nqn.2026-01.io.kvdev:demo
    """
    from kvdev.errors import UsageError
    from kvdev.uri import parse_subsystem_uri

    subsystem = parse_subsystem_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.initiator.namespace import scan

        deadline = operation_deadline(timeout_s)
        controller = session.controller(subsystem, deadline=deadline)
        namespaces = scan(controller, deadline=deadline)
        if subsystem.nsid is not None:
            active = [str(info.nsid) for info in namespaces]
            namespaces = [info for info in namespaces if info.nsid == subsystem.nsid]
            if not namespaces:
                raise UsageError(
                    f"uri: nsid: expected one of the active namespaces {', '.join(active) or '(none)'}, "
                    f"got {subsystem.nsid}"
                )
        found = _controller(controller)
    found["namespaces"] = [_namespace(info) for info in namespaces]
    emit(found, as_json=as_json, text=lambda: _identify_text(found))


def _controller(controller: Controller) -> dict[str, Any]:
    identify = controller.identify
    return {
        "subnqn": controller.uri.subnqn,
        "address": str(controller.address),
        "cntlid": controller.cntlid,
        "version": str(controller.version),
        "serial_number": identify.sn,
        "model_number": identify.mn,
        "firmware_revision": identify.fr,
        "max_transfer_bytes": identify.max_transfer_bytes(1 << (12 + controller.cap.mpsmin)),
        "in_capsule_bytes": controller.in_capsule_size_bytes,
        "queue_size": controller.queue_size,
        "keep_alive_timeout_ms": controller.kato_ms,
        "has_volatile_cache": identify.has_volatile_cache,
    }


def _namespace(info: NamespaceInfo) -> dict[str, Any]:
    identity = info.identity
    return {
        "nsid": info.nsid,
        "size_bytes": info.size_bytes,
        "block_size_bytes": info.block_size_bytes,
        "block_count": info.block_count,
        "metadata_size_bytes": info.metadata_size_bytes,
        "atomic_write_blocks": info.atomic_write_blocks,
        "is_write_protected": info.is_write_protected,
        "nguid": identity.nguid.hex() if identity.nguid else None,
        "eui64": identity.eui64.hex() if identity.eui64 else None,
        "uuid": identity.uuid.hex() if identity.uuid else None,
        "problem": info.problem or None,
    }


def _identify_text(found: dict[str, Any]) -> list[str]:
    limit = found["max_transfer_bytes"]
    kato_ms = found["keep_alive_timeout_ms"]
    lines = fields(
        [
            ("subsystem", found["subnqn"]),
            ("address", found["address"]),
            ("controller", f"{found['cntlid']}, NVMe {found['version']}"),
            ("model", f"{found['model_number']}, firmware {found['firmware_revision']}"),
            ("serial number", found["serial_number"]),
            ("largest transfer", f"{format_size(limit)} a command" if limit else "no limit"),
            ("in capsule", f"up to {format_size(found['in_capsule_bytes'])}"),
            ("I/O queue", f"{found['queue_size']} entries"),
            ("keep alive", f"within {kato_ms / 1000:g} s" if kato_ms else "none"),
            (
                "volatile cache",
                "yes: writes need a flush to be durable" if found["has_volatile_cache"] else "none",
            ),
        ]
    )
    rows = [
        (
            each["nsid"],
            format_size(each["size_bytes"]),
            format_size(each["block_size_bytes"]),
            each["metadata_size_bytes"] or "-",
            format_size(each["atomic_write_blocks"] * each["block_size_bytes"]),
            "read only" if each["is_write_protected"] else "read, write",
            next((f"{name} {each[name]}" for name in ("nguid", "uuid", "eui64") if each[name]), "-"),
            each["problem"] or "usable",
        )
        for each in found["namespaces"]
    ]
    header = ("nsid", "size", "block", "metadata", "atomic write", "access", "identifier", "state")
    return [*lines, "", *(table(rows, header=header) if rows else ["no active namespace"])]
