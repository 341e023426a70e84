"""``kvdev volume``: make a RAID0 volume over devices, show it, check it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from kvdev.units import format_size, parse_size
from kvdev_tools.connect import host_options, make_session, operation_deadline, timeout_option
from kvdev_tools.output import Progress, emit, fields, json_option, table

if TYPE_CHECKING:
    from kvdev.clock import Deadline
    from kvdev.store import Volume
    from kvdev.store.check import CheckProgress, CheckReport


RECREATE_TIMEOUT_FACTOR = 4
"""Several steps, each within the timeout; the writes of former owners are waited for among them."""


@click.group()
def volume() -> None:
    """Make and inspect RAID0 volumes.

    \b
    A volume is named by its members, vol:DEVICE,DEVICE,..., or by a subsystem whose labelled namespaces are
    its members, vol+tcp://HOST:PORT/NQN. A single device is a volume of one member.
    """


@volume.command()
@click.argument("uri", metavar="VOLUME")
@click.option("--name", required=True, help="Name of the volume, kept in its labels.")
@click.option("--strip-size", metavar="SIZE", default="128KiB", show_default=True, help="16KiB to 4MiB.")
@click.option("--size", metavar="SIZE", help="Use so much of the members  [default: all]")
@click.option(
    "--destroy",
    metavar="DEVICE",
    multiple=True,
    help="Overwrite what this device holds; once per device, named as in VOLUME.",
)
@host_options
@timeout_option
@json_option
def create(
    uri: str,
    name: str,
    strip_size: str,
    size: str | None,
    destroy: tuple[str, ...],
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Label devices and make an empty volume over them.

    Refuses a device that holds a partition table, a file system, LVM, md, another volume or another
    cache, and one that is mounted or held, unless that device is named in --destroy. With
    vol+tcp://HOST:PORT/NQN every active namespace of the subsystem becomes a member.

    \b
    Examples:
      kvdev volume create --name pool "vol:tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv?nsid=1"
      kvdev volume create --name local vol:file:/srv/kv0.img,file:/srv/kv1.img --strip-size 256KiB
    """
    from kvdev.units import parse_size
    from kvdev.uri import parse_device_uri, parse_volume_uri

    parsed = parse_volume_uri(uri)
    strip_size_bytes = parse_size(strip_size, field="strip_size")
    size_bytes = None if size is None else parse_size(size, field="size")
    # Compared in the form that devices show, whichever way they were typed.
    destroyed = frozenset(str(parse_device_uri(text)) for text in destroy)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store import Volume

        deadline = operation_deadline(timeout_s)
        made = Volume.create(
            session.open_members(parsed, deadline=deadline),
            name=name,
            strip_size_bytes=strip_size_bytes,
            size_bytes=size_bytes,
            destroy=destroyed,
            deadline=deadline,
        )
        found = _describe(made, deadline)
    emit(found, as_json=as_json, text=lambda: _text(found))


@volume.command()
@click.argument("uri", metavar="VOLUME")
@host_options
@timeout_option
@json_option
def show(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> None:
    """Show a volume, its members and its KV namespaces.

    \b
    Example:
      kvdev volume show vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv
    """
    from kvdev.uri import parse_volume_uri

    parsed = parse_volume_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        found = _describe(open_volume(session, parsed, deadline=deadline), deadline)
    emit(found, as_json=as_json, text=lambda: _text(found))


@volume.command()
@click.argument("uri", metavar="VOLUME")
@click.option("--size", metavar="SIZE", help="Use so much of the members  [default: all]")
@host_options
@timeout_option
@json_option
def grow(
    uri: str, size: str | None, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """Take in what the members have got larger by.

    The smallest member counts. KV namespaces stay as they are, and may be in use; `kvdev namespace resize` and
    `create` use the new room. Interrupted, the volume has its old size or the new one; a second call finishes.

    \b
    Example:
      kvdev volume grow vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv
    """
    from kvdev.uri import parse_volume_uri

    parsed = parse_volume_uri(uri)
    size_bytes = None if size is None else parse_size(size, field="size")
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        opened = open_volume(session, parsed, deadline=deadline)
        gained = opened.grow(size_bytes=size_bytes, deadline=deadline)
        found = {"grown_bytes": gained, **_describe(opened, deadline)}
    emit(found, as_json=as_json, text=lambda: [f"grown by {format_size(gained)}", *_text(found)])


@volume.command(short_help="Make a volume anew, empty, after a member is lost.")
@click.argument("uri", metavar="VOLUME")
@click.option(
    "--replace",
    "replaced",
    metavar="DEVICE",
    multiple=True,
    required=True,
    help="Takes the place of a lost member; once per device, named as in VOLUME.",
)
@click.option(
    "--destroy",
    metavar="DEVICE",
    multiple=True,
    help="Overwrite what this new device holds; once per device.",
)
@click.option("--drop", metavar="NAME", multiple=True, help="Leave this KV namespace out.")
@click.option("--takeover", is_flag=True, help="From owners on other hosts that are known to be dead.")
@host_options
@timeout_option
@json_option
def recreate(
    uri: str,
    replaced: tuple[str, ...],
    destroy: tuple[str, ...],
    drop: tuple[str, ...],
    takeover: bool,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Make a volume anew after the loss of a member: empty, with the same KV namespaces.

    VOLUME names the members that are left and the new ones. Names, quotas, policies and geometries are kept, UUIDs
    are new: a lost member that comes back is a stranger, and no page that is left anywhere is found again.
    Interrupted, the same call goes on. Engines go on by recompute meanwhile, and open it anew afterwards.

    \b
    Example:
      kvdev volume recreate vol:file:/srv/kv0.img,file:/srv/new.img --replace file:/srv/new.img
    """
    from kvdev.uri import parse_device_uri, parse_volume_uri

    parsed = parse_volume_uri(uri)
    newcomers = [str(parse_device_uri(text)) for text in replaced]
    destroyed = frozenset(str(parse_device_uri(text)) for text in destroy)
    with make_session(host_nqn, host_id, timeout_s=timeout_s, is_writer=True) as session:
        from kvdev.store.recreate import recreate_volume
        from kvdev_tools.pool import open_members

        deadline = operation_deadline(RECREATE_TIMEOUT_FACTOR * timeout_s)
        report = recreate_volume(
            open_members(session, parsed, besides=newcomers, deadline=deadline),
            replaced=newcomers,
            destroy=destroyed,
            drop=frozenset(drop),
            takeover=takeover,
            deadline=deadline,
        )
        found = {
            "former_uuid": report.former_uuid.hex(),
            "replaced_members": list(report.lost_members),
            "dropped": list(report.dropped),
            "lost_records": list(report.lost_places),
            **_describe(report.volume, deadline),
        }

    def text() -> list[str]:
        lines = [f"made anew in place of {found['former_uuid']}; its KV namespaces are empty"]
        lines += [f"left out: {name}" for name in report.dropped]
        if report.lost_places:
            places = ", ".join(map(str, report.lost_places))
            lines.append(f"no copy survived of records {places}: KV namespaces there, if any, are gone")
        return [*lines, "", *_text(found)]

    emit(found, as_json=as_json, text=text)


@volume.command(short_help="Verify everything on the members; --repair mends.")
@click.argument("uri", metavar="VOLUME")
@click.option("--structures-only", is_flag=True, help="Leave the pages out.")
@click.option("--repair", is_flag=True, help="Put right what is found; nothing lost comes back.")
@click.option("--rate", metavar="SIZE", help="Bytes of pages to read a second, at most  [default: no limit]")
@click.option("--start", metavar="NAME:SLOT", help="Go on where an interrupted check said it was.")
@host_options
@timeout_option
@json_option
def check(
    uri: str,
    structures_only: bool,
    repair: bool,
    rate: str | None,
    start: str | None,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Read labels, superblocks, records, page tables, journals and every page; changes nothing by itself.

    The exit code is 5 when anything is not as it should be, unless all of it was repaired. With --repair,
    pages that fail leave the page table, damaged table blocks become empty, and a lost copy of superblock or
    record is written again; namespaces must not be in use then. One that is being erased is named, with how far it is
    and what goes on with it; it is no finding.

    \b
    Example:
      kvdev volume check vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv
    """
    from kvdev.uri import parse_volume_uri
    from kvdev_tools.exits import ExitCode

    parsed = parse_volume_uri(uri)
    bytes_per_s = None if rate is None else parse_size(rate, field="rate")
    start_at = None if start is None else _parse_start(start)
    at: CheckProgress | None = None

    def show(now: CheckProgress) -> None:
        nonlocal at
        at = now
        share = 100 * now.checked_pages // max(1, now.total_pages)
        bar.update(share, f"{now.namespace}: {now.checked_pages} of {now.total_pages} pages")

    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store.check import CheckReport, check_volume
        from kvdev_tools.pool import open_members

        members = open_members(session, parsed, deadline=operation_deadline(timeout_s))
        bar = Progress("check", 100)
        report = CheckReport()
        try:
            check_volume(
                members,
                progress=show,
                reads_pages=not structures_only,
                repair=repair,
                bytes_per_s=bytes_per_s,
                start_at=start_at,
                timeout_s=timeout_s,
                report=report,
            )
        except Exception:
            raise
        except BaseException:  # Ctrl-C or SIGTERM: what was found so far is not lost
            bar.close()
            go_on = None if at is None else f"{at.namespace}:{at.next_slot}"
            if report.volume:
                lines = _check_text(
                    report, uri, reads_pages=not structures_only, repair=repair, is_whole=False
                )
                emit(_check_document(report, go_on), as_json=as_json, text=lambda: lines)
            if go_on is not None:
                click.echo(f"check: go on with --start {go_on}", err=True)
            raise
        finally:
            bar.close()
    lines = _check_text(report, uri, reads_pages=not structures_only, repair=repair, is_whole=True)
    emit(_check_document(report, None), as_json=as_json, text=lambda: lines)
    is_sound = all(finding.is_repaired for finding in report.all_findings)
    return int(ExitCode.OK if is_sound else ExitCode.DATA_FAULT)


def _check_document(report: CheckReport, go_on: str | None) -> dict[str, Any]:
    """What ``volume check --json`` prints; ``go_on`` is where an interrupted one is to start."""
    return {
        "volume": report.volume,
        "is_ok": report.is_ok,
        "go_on": go_on,
        "namespaces": [
            {
                "name": each.name,
                "pages": each.pages,
                "good_pages": each.good_pages,
                "bad_pages": each.bad_pages,
                "unreadable_pages": each.unreadable_pages,
                "skipped_pages": each.skipped_pages,
                "replayed_records": each.replayed_records,
            }
            for each in report.namespaces
        ],
        "skipped_namespaces": report.skipped_namespaces,
        "erasing": [dataclasses.asdict(each) for each in report.erasing],
        "intact_labels": [dataclasses.asdict(each) for each in report.intact_labels],
        "findings": [
            {
                "where": each.where,
                "what": each.what,
                "lost_pages_max": each.lost_pages_max,
                "is_repaired": each.is_repaired,
            }
            for each in report.all_findings
        ],
    }


def _check_text(
    report: CheckReport, uri: str, *, reads_pages: bool, repair: bool, is_whole: bool
) -> list[str]:
    from kvdev_tools.pool import erasing_line

    findings = report.all_findings
    lines = [
        f"{each.name}: {each.pages} pages"
        + (f", {each.good_pages} good, {each.bad_pages} damaged" if reads_pages else "")
        + (f", {each.skipped_pages} not read" if each.skipped_pages else "")
        for each in report.namespaces
    ]
    lines += [erasing_line(each, uri) for each in report.erasing]
    lines += [f"{name}: not read" for name in report.skipped_namespaces]
    lines += [
        f"{each.uri}: label intact: member {each.member_index} of {each.member_count} of volume {each.volume!r}"
        for each in report.intact_labels
    ]
    lines += [f"{each}" + ("; repaired" if each.is_repaired else "") for each in findings]
    count = f"{len(findings)} finding" + ("" if len(findings) == 1 else "s")
    if not is_whole:
        count += " so far"
    elif repair and not report.volume:
        count += "; nothing repaired: the volume does not open"
    return [*lines, f"volume {report.volume or '(does not open)'}: {count}"]


def _parse_start(text: str) -> tuple[str, int]:
    from kvdev.errors import UsageError

    name, colon, slot = text.rpartition(":")
    if not colon or not name or not slot.isascii() or not slot.isdigit() or len(slot) > 10:
        raise UsageError(f"start: expected NAME:SLOT, got {text!r:.100}")
    return name, int(slot)


def _describe(opened: Volume, deadline: Deadline) -> dict[str, Any]:
    free = sum(count for _, count in opened.free_extents(deadline)) * opened.block_size_bytes
    return {
        "name": opened.name,
        "uuid": opened.uuid.hex(),
        "strip_size_bytes": opened.strip_size_bytes,
        "block_size_bytes": opened.block_size_bytes,
        "size_bytes": opened.size_bytes,
        "free_bytes": free,
        "growable_bytes": opened.growable_bytes,
        "members": [
            {"member_index": index, "uri": member.uri, "size_bytes": member.size_bytes}
            for index, member in enumerate(opened.members)
        ],
        "namespaces": [
            {"name": info.name, "extent_bytes": info.extent_bytes, "quota_pages": info.quota_pages}
            for info in opened.namespaces(deadline=deadline)
        ],
    }


def _text(found: dict[str, Any]) -> list[str]:
    lines = fields(
        [
            ("volume", found["name"]),
            ("uuid", found["uuid"]),
            ("strip size", format_size(found["strip_size_bytes"])),
            ("size", format_size(found["size_bytes"])),
            ("free", format_size(found["free_bytes"])),
        ]
    )
    if found["growable_bytes"]:
        lines.append(
            f"the members have {format_size(found['growable_bytes'])} more: kvdev volume grow takes them in"
        )
    members = [
        (each["member_index"], each["uri"], format_size(each["size_bytes"])) for each in found["members"]
    ]
    lines += ["", *table(members, header=("member", "device", "size"))]
    namespaces = [
        (each["name"], each["quota_pages"], format_size(each["extent_bytes"])) for each in found["namespaces"]
    ]
    if namespaces:
        lines += ["", *table(namespaces, header=("KV namespace", "quota pages", "extent"))]
    return lines
