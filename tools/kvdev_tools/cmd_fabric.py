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
        columns = ("uri", "subtype", "transport", "family")
        return table([[entry[name] for name in columns] for entry in found], header=columns)

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
    lines = fields((name, value) for name, value in found.items() if name != "namespaces")
    rows = [
        (
            each["nsid"],
            format_size(each["size_bytes"]),
            each["block_size_bytes"],
            each["nguid"] or each["uuid"] or each["eui64"] or "-",
            each["problem"] or "usable",
        )
        for each in found["namespaces"]
    ]
    header = ("nsid", "size", "block bytes", "identifier", "state")
    return [*lines, "", *(table(rows, header=header) if rows else ["no active namespace"])]
