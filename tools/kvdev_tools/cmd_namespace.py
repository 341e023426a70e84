"""``kvdev namespace``: KV namespaces of a volume, each for one geometry and with a quota."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from kvdev.units import format_size
from kvdev_tools.connect import host_options, make_session, operation_deadline, timeout_option
from kvdev_tools.geometry_options import choose_geometry, geometry_options
from kvdev_tools.output import Progress, emit, fields, json_option, table

if TYPE_CHECKING:
    from kvdev.store import NamespaceInfo
    from kvdev.store.room import Gift

TAKEOVER_WAIT_S = 90.0
"""Beyond lease and timeout: what a controller may take to notice that a host is gone (Base 9.6.2)."""


@click.group()
def namespace() -> None:
    """Make and inspect KV namespaces of a volume; one is named VOLUME#NAME."""


@namespace.command()
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--quota", metavar="SIZE", help="Bytes of pages it may hold  [default: all that is free]")
@click.option("--quota-pages", type=click.IntRange(1), help="The same as a number of pages.")
@click.option(
    "--eviction",
    type=click.Choice(["lru", "lfu", "s3fifo", "fifo", "none"]),
    default="lru",
    show_default=True,
    help="What goes at the quota: the page unused longest, the one used least often (older uses count less), what was "
    "put and not used again (S3-FIFO), the one put first, or none: puts fail.",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=click.IntRange(0),
    default=0,
    help="Seconds after which a page is gone  [default: never]",
)
@click.option(
    "--priority",
    type=click.IntRange(0, 255),
    default=0,
    show_default=True,
    help="Those of lower priority make room for it, and it for those of higher.",
)
@click.option(
    "--reserve", metavar="SIZE", help="As much of the quota never makes room for another  [default: 0]"
)
@click.option("--reserve-pages", type=click.IntRange(0), help="The same as a number of pages.")
@click.option(
    "--make-room",
    is_flag=True,
    help="Shrink namespaces of lower priority, the lowest first, down to their reserve, until there is room.",
)
@click.option(
    "--salt-file", metavar="FILE", help="Salt of its tenant: page keys made with another are refused."
)
@click.option(
    "--checksum",
    type=click.Choice(["crc32c", "nh64"]),
    default="crc32c",
    show_default=True,
    help="What pages are verified by; nh64 is computed by GPUs as well.",
)
@click.option("--tokens-per-page", type=click.IntRange(1), default=512, show_default=True)
@click.option("--revision", default="", help="Revision of the model's weights.")
@geometry_options
@host_options
@timeout_option
@json_option
def create(
    uri: str,
    quota: str | None,
    quota_pages: int | None,
    eviction: str,
    ttl_s: int,
    priority: int,
    reserve: str | None,
    reserve_pages: int | None,
    make_room: bool,
    salt_file: str | None,
    checksum: str,
    tokens_per_page: int,
    revision: str,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    **shape: Any,
) -> None:
    """Make an empty KV namespace for one geometry.

    \b
    Examples:
      kvdev namespace create "vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv#llama" \\
          --geometry llama3-8b --quota 200GiB --priority 10 --reserve 50GiB
      kvdev namespace create "vol:file:/srv/kv0.img#mine" --layers 32 --kv-heads 8 --head-size 128
    """
    import dataclasses

    from kvdev.errors import CapacityError, UsageError
    from kvdev.units import parse_size
    from kvdev.uri import parse_kv_namespace_uri
    from kvdev_tools.salt import read_salt_file

    parsed = parse_kv_namespace_uri(uri)
    geometry = dataclasses.replace(
        choose_geometry(**shape), tokens_per_page=tokens_per_page, revision=revision
    )
    if quota is not None and quota_pages is not None:
        raise UsageError("quota: expected --quota or --quota-pages, got both")
    quota_bytes = None if quota is None else parse_size(quota, field="quota")
    reserved = _reserve_pages(reserve, reserve_pages, geometry.page_size_bytes) or 0
    salt_mark = 0 if salt_file is None else read_salt_file(salt_file).mark
    if make_room and quota_bytes is None and quota_pages is None:
        raise UsageError("make-room: expected --quota or --quota-pages with it: how much room is to be made")
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store.room import create_with_room
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        if quota_bytes is None and quota_pages is None:
            largest = max((count for _, count in volume.free_extents(deadline)), default=0)
            quota_pages = volume.pages_for(geometry, largest * volume.block_size_bytes)
            if quota_pages < 1:
                raise CapacityError(
                    f"volume {volume.name}: namespace {parsed.name!r}: expected room for one page of "
                    f"{format_size(geometry.page_size_bytes)} and its table, got "
                    f"{format_size(largest * volume.block_size_bytes)} free in one piece; "
                    f"delete a namespace or enlarge the volume"
                )
        info, gifts = create_with_room(
            volume,
            parsed.name,
            geometry,
            quota_bytes=quota_bytes,
            quota_pages=quota_pages,
            eviction_policy=eviction,
            ttl_s=ttl_s,
            priority=priority,
            reserve_pages=reserved,
            salt_mark=salt_mark,
            checksum=checksum,
            takes=make_room,
            deadline=deadline,
        )
    found = _describe(info) | {"given": _given(gifts)}
    emit(found, as_json=as_json, text=lambda: _text(found))


@namespace.command(name="list")
@click.argument("uri", metavar="VOLUME")
@host_options
@timeout_option
@json_option
def list_(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> None:
    """List the KV namespaces of a volume.

    \b
    Example:
      kvdev namespace list vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv
    """
    from kvdev.uri import parse_volume_uri

    parsed = parse_volume_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store.check import erasing_of
        from kvdev_tools.pool import erasing_line, open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed, deadline=deadline)
        infos = [_describe(info) for info in volume.namespaces(deadline=deadline)]
        erasing = [
            erasing_of(record, volume.block_size_bytes)
            for record in volume.records(deadline=deadline)
            if record.is_erasing
        ]

    def text() -> list[str]:
        notes = [erasing_line(each, uri) for each in erasing]
        if not infos:
            return [*notes, "no KV namespace"]
        rows = [
            (
                info["name"],
                info["geometry"]["model_id"],
                format_size(info["page_size_bytes"]),
                info["quota_pages"],
                format_size(info["quota_pages"] * info["page_size_bytes"]),
                info["reserve_pages"],
                info["priority"],
                format_size(info["extent_bytes"]),
                _eviction(info),
                _state(info),
            )
            for info in infos
        ]
        header = (
            "name",
            "model",
            "page",
            "quota pages",
            "quota",
            "reserve",
            "priority",
            "extent",
            "eviction",
            "state",
        )
        return [*table(rows, header=header), *notes]

    found = {"namespaces": infos, "erasing": [dataclasses.asdict(each) for each in erasing]}
    emit(found, as_json=as_json, text=text)


@namespace.command(short_help="Show geometry, quota and use of a KV namespace.")
@click.argument("uri", metavar="VOLUME#NAME")
@host_options
@timeout_option
@json_option
def show(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> None:
    """Show one KV namespace: its geometry, quota and how much of it is used; safe while it has an owner.

    \b
    Example:
      kvdev namespace show "vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv#llama"
    """
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import opened_namespace

        with opened_namespace(session, parsed, mode="reader", timeout_s=timeout_s) as (volume, opened):
            found = _describe(volume.namespace(parsed.name, deadline=operation_deadline(timeout_s)))
            stat = opened.stat()
    found |= {
        "pages": stat.index.live_count,
        "stored_bytes": stat.index.live_count * found["page_size_bytes"],
        "journal_used_blocks": stat.journal_used_blocks,
        "journal_block_count": stat.journal_block_count,
    }
    emit(found, as_json=as_json, text=lambda: _text(found))


@namespace.command(short_help="Delete a KV namespace and all its pages.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--yes", metavar="NAME", help="The name again, to say that its pages may go.")
@click.option(
    "--erase", is_flag=True, help="Overwrite everything it held with zeroes, and verify by reading."
)
@click.option(
    "--rate", metavar="SIZE", help="Erase no more than this a second, writing and reading together."
)
@click.option("--takeover", is_flag=True, help="Also from an owner of another host that is known to be dead.")
@host_options
@timeout_option
@json_option
def delete(
    uri: str,
    yes: str | None,
    erase: bool,
    rate: str | None,
    takeover: bool,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Delete a KV namespace and all pages in it; refused while it may have an owner.

    With --erase its blocks are deallocated, overwritten and read back, which takes as long as writing and
    reading all of them. From its start on the namespace cannot be opened any more; interrupted, the same
    command goes on where it was.

    \b
    Examples:
      kvdev namespace delete "vol:file:/srv/kv0.img#mine" --yes mine
      kvdev namespace delete "vol:file:/srv/kv0.img#mine" --yes mine --erase --rate 500MiB
    """
    from kvdev.errors import UsageError
    from kvdev.units import parse_size
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    if yes != parsed.name:
        got = "no --yes" if yes is None else repr(yes)
        raise UsageError(f"yes: expected --yes {parsed.name}, as its pages are lost, got {got}")
    if rate is not None and not erase:
        raise UsageError("rate: expected --erase with it, as nothing else takes long; leave it out")
    bytes_per_s = None if rate is None else parse_size(rate, field="rate")
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        bar = Progress("erase", 100)
        try:
            erased = volume.delete_namespace(
                parsed.name,
                erase=erase,
                takeover=takeover,
                bytes_per_s=bytes_per_s,
                progress=lambda done, total: bar.update(
                    100 * done // total, f"{format_size(done)} of {format_size(total)}"
                ),
                deadline=deadline,
            )
        finally:
            bar.close()
    said = f"deleted {parsed.name}" + (f", erased {format_size(erased)}" if erase else "")
    emit({"deleted": parsed.name, "erased_bytes": erased}, as_json=as_json, text=lambda: [said])


@namespace.command()
@click.argument("uri", metavar="VOLUME#NAME")
@click.argument("new_name", metavar="NEW_NAME")
@host_options
@timeout_option
@json_option
def rename(
    uri: str, new_name: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """Give a KV namespace another name; its pages stay. Refused while it may have an owner.

    \b
    Example:
      kvdev namespace rename "vol:file:/srv/kv0.img#mine" yours
    """
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        volume.rename_namespace(parsed.name, new_name, deadline=deadline)
    found = {"name": new_name, "previous_name": parsed.name}
    emit(found, as_json=as_json, text=lambda: [f"renamed {parsed.name} to {new_name}"])


@namespace.command(name="takeover", short_help="Put an owner out and close the KV namespace in order.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--yes", metavar="NAME", help="The name again, to say that its owner is dead or shall stop.")
@host_options
@timeout_option
@json_option
def takeover_(
    uri: str, yes: str | None, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """Put the owner of a KV namespace out and close it in order, so that another can open it.

    For an owner on another host that is dead, or that cannot be reached. Where the members have reservations
    it is kept out at once; elsewhere the command waits until its lease and its last writes have ended. An
    owner that is alive gets errors from then on. One of this host is stopped instead: its lock ends with it.

    \b
    Example:
      kvdev namespace takeover "vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv#llama" --yes llama
    """
    from kvdev.errors import UsageError
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    if yes != parsed.name:
        got = "no --yes" if yes is None else repr(yes)
        raise UsageError(f"yes: expected --yes {parsed.name}, as its owner is stopped, got {got}")
    with make_session(host_nqn, host_id, timeout_s=timeout_s, is_writer=True) as session:
        from kvdev.clock import Deadline
        from kvdev_tools.pool import open_volume

        volume = open_volume(session, parsed.volume, deadline=operation_deadline(timeout_s))
        before = volume.namespace(parsed.name, deadline=operation_deadline(timeout_s))
        opened = volume.open_namespace(parsed.name, takeover=True, deadline=operation_deadline(timeout_s))
        fence = opened.fence_kind
        try:
            lease_s = before.record.lease_ms / 1000
            opened.settle(deadline=Deadline.after(timeout_s + lease_s + TAKEOVER_WAIT_S))
        except BaseException:
            opened.abandon()
            raise
        opened.close(deadline=operation_deadline(timeout_s))
    found = {"name": parsed.name, "fence": fence, **_owner(before)}
    said = "had no owner" if found["owner_pid"] is None else f"took over from {_holder(found)}"
    emit(found, as_json=as_json, text=lambda: [f"{parsed.name}: {said}; fence: {fence}"])


@namespace.command(short_help="Make an empty KV namespace like another one.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.argument("new_name", metavar="NEW_NAME")
@host_options
@timeout_option
@json_option
def clone(
    uri: str, new_name: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """Make an empty KV namespace like another one: geometry, quota, eviction policy, time to live, checksum.

    \b
    Example:
      kvdev namespace clone "vol:file:/srv/kv0.img#mine" yours
    """
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        found = _describe(volume.clone_namespace(parsed.name, new_name, deadline=deadline))
    emit(found, as_json=as_json, text=lambda: _text(found))


@namespace.command(short_help="Give a KV namespace another quota.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--quota", metavar="SIZE", help="Bytes of pages it may hold.")
@click.option("--quota-pages", type=click.IntRange(1), help="The same as a number of pages.")
@click.option(
    "--make-room",
    is_flag=True,
    help="Shrink namespaces of lower priority, the lowest first, down to their reserve, until there is room.",
)
@host_options
@timeout_option
@json_option
def resize(
    uri: str,
    quota: str | None,
    quota_pages: int | None,
    make_room: bool,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Give a KV namespace another quota, and the room that goes with it; refused while it has an owner.

    Growing takes what is free behind its extent, else elsewhere; pages stay where they are. Shrinking evicts
    what is above the new quota, moves pages from the slots that go, and frees their room.

    \b
    Examples:
      kvdev namespace resize "vol:file:/srv/kv0.img#mine" --quota 300GiB
      kvdev namespace resize "vol:file:/srv/kv0.img#mine" --quota-pages 1000
    """
    from kvdev.errors import UsageError
    from kvdev.units import parse_size
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    if (quota is None) == (quota_pages is None):
        raise UsageError("quota: expected one of --quota and --quota-pages")
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store.room import resize_with_room
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        before = volume.namespace(parsed.name, deadline=deadline)
        if quota_pages is None:
            assert quota is not None
            quota_pages = parse_size(quota, field="quota") // before.page_size_bytes
        report, gifts = resize_with_room(
            volume, parsed.name, quota_pages=quota_pages, takes=make_room, deadline=deadline
        )
        found = {
            "name": parsed.name,
            "quota_pages": report.quota_pages,
            "previous_quota_pages": before.quota_pages,
            "extent_bytes": report.extent_bytes,
            "previous_extent_bytes": before.extent_bytes,
            "evicted_pages": report.evicted_pages,
            "moved_pages": report.moved_pages,
            "given": _given(gifts),
        }
    emit(found, as_json=as_json, text=lambda: _with_gifts(found))


@namespace.command(name="set", short_help="Give a KV namespace another priority or reserve.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--priority", type=click.IntRange(0, 255), help="Those of lower priority make room for it.")
@click.option("--reserve", metavar="SIZE", help="As much of the quota never makes room for another.")
@click.option("--reserve-pages", type=click.IntRange(0), help="The same as a number of pages.")
@host_options
@timeout_option
@json_option
def set_(
    uri: str,
    priority: int | None,
    reserve: str | None,
    reserve_pages: int | None,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Give a KV namespace another priority or reserve; its pages stay. Refused while it may have an owner.

    \b
    Example:
      kvdev namespace set "vol:file:/srv/kv0.img#mine" --priority 10 --reserve 50GiB
    """
    from kvdev.errors import UsageError
    from kvdev.uri import parse_kv_namespace_uri

    parsed = parse_kv_namespace_uri(uri)
    if priority is None and reserve is None and reserve_pages is None:
        raise UsageError("set: expected --priority, --reserve or --reserve-pages, got none of them")
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev.store.room import set_room_rules
        from kvdev_tools.pool import open_volume

        deadline = operation_deadline(timeout_s)
        volume = open_volume(session, parsed.volume, deadline=deadline)
        page_bytes = volume.namespace(parsed.name, deadline=deadline).page_size_bytes
        info = set_room_rules(
            volume,
            parsed.name,
            priority=priority,
            reserve_pages=_reserve_pages(reserve, reserve_pages, page_bytes),
            deadline=deadline,
        )
    found = _describe(info)
    emit(found, as_json=as_json, text=lambda: _text(found))


def _reserve_pages(reserve: str | None, reserve_pages: int | None, page_size_bytes: int) -> int | None:
    """The reserve in pages, rounded up; None where it is not said."""
    from kvdev.errors import UsageError
    from kvdev.units import parse_size

    if reserve is not None and reserve_pages is not None:
        raise UsageError("reserve: expected --reserve or --reserve-pages, got both")
    if reserve is None:
        return reserve_pages
    return -(-parse_size(reserve, field="reserve") // page_size_bytes)


def _given(gifts: list[Gift]) -> list[dict[str, Any]]:
    return [
        {
            "name": gift.name,
            "priority": gift.priority,
            "previous_quota_pages": gift.previous_quota_pages,
            "quota_pages": gift.quota_pages,
            "freed_bytes": gift.freed_bytes,
            "evicted_pages": gift.evicted_pages,
        }
        for gift in gifts
    ]


def _with_gifts(found: dict[str, Any]) -> list[str]:
    plain = [(name, value) for name, value in found.items() if name != "given"]
    return [*fields(plain), *_gift_lines(found["given"])]


def _gift_lines(given: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['name']} (priority {each['priority']}) gave {format_size(each['freed_bytes'])}: from "
        f"{each['previous_quota_pages']} to {each['quota_pages']} pages, {each['evicted_pages']} evicted"
        for each in given
    ]


def _owner(info: NamespaceInfo) -> dict[str, Any]:
    """Who has a KV namespace open, or has ended without closing it; all null when nobody has."""
    import uuid

    from kvdev.store.lease import OwnerIdentity, is_held, is_process_gone

    record = info.record
    held = is_held(record)
    return {
        "owner_pid": record.owner_pid if held else None,
        "owner_host_name": record.lease_host_name if held else None,
        "owner_host_id": str(uuid.UUID(bytes=record.lease_host_id))
        if held and any(record.lease_host_id)
        else None,
        "owner_lease_ms": record.lease_ms if held else None,
        "owner_is_gone": is_process_gone(record, OwnerIdentity.current()) if held else None,
    }


def _holder(found: dict[str, Any]) -> str:
    where = f" of host {found['owner_host_name']}" if found["owner_host_name"] else ""
    return f"process {found['owner_pid']}{where}"


def _state(found: dict[str, Any]) -> str:
    if found["owner_pid"] is None:
        return "closed" if found["is_clean"] else "not closed in order"
    if found["owner_is_gone"]:
        return f"not closed in order: its owner {_holder(found)} has ended"
    return f"owned by {_holder(found)}"


def _describe(info: NamespaceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "uuid": info.uuid,
        "geometry": info.geometry.to_dict(),
        "fingerprint": info.geometry.fingerprint().hex(),
        "page_size_bytes": info.page_size_bytes,
        "quota_pages": info.quota_pages,
        "slot_count": info.slot_count,
        "extent_bytes": info.extent_bytes,
        "epoch": info.epoch,
        "is_clean": info.is_clean,
        "eviction_policy": info.eviction_policy,
        "ttl_s": info.ttl_s,
        "priority": info.priority,
        "reserve_pages": info.reserve_pages,
        "checksum": info.checksum,
        "salt_mark": f"{info.salt_mark:08x}" if info.salt_mark else None,
        **_owner(info),
    }


def _eviction(found: dict[str, Any]) -> str:
    return f"{found['eviction_policy']}" + (f", after {found['ttl_s']} s" if found["ttl_s"] else "")


def _text(found: dict[str, Any]) -> list[str]:
    page = found["page_size_bytes"]
    geometry = found["geometry"]
    revision = f", revision {geometry['revision']}" if geometry["revision"] else ""
    lines = [
        ("KV namespace", found["name"]),
        ("uuid", found["uuid"]),
        ("state", _state(found)),
        ("epoch", found["epoch"]),
    ]
    if found["owner_pid"] is not None:
        host_id = f", HOSTID {found['owner_host_id']}" if found["owner_host_id"] else ""
        lines.append(("owner", f"{_holder(found)}, lease {found['owner_lease_ms'] / 1000:g} s{host_id}"))
    if "pages" in found:
        lines.append(("stored", f"{found['pages']} pages, {format_size(found['stored_bytes'])}"))
    lines += [
        ("quota", f"{found['quota_pages']} pages, {format_size(found['quota_pages'] * page)}"),
        ("reserve", f"{found['reserve_pages']} pages, {format_size(found['reserve_pages'] * page)}"),
        ("priority", found["priority"]),
        ("extent", f"{format_size(found['extent_bytes'])}, {found['slot_count']} slots"),
    ]
    if "journal_block_count" in found:
        used = f"{found['journal_used_blocks']} of {found['journal_block_count']} blocks"
        lines.append(("journal", used))
    lines += [
        ("eviction", _eviction(found)),
        ("checksum", found["checksum"]),
        ("model", f"{geometry['model_id']}{revision}"),
        ("page", f"{format_size(page)}, {geometry['tokens_per_page']} tokens"),
        ("layers", _range(geometry["layer_first"], geometry["layer_count"])),
        (
            "KV heads",
            f"{_range(geometry['kv_head_first'], geometry['kv_head_count'])} of {geometry['kv_head_total']}",
        ),
        ("head size", f"{geometry['head_size']}, {geometry['dtype']}, {geometry['attention']}"),
        ("fingerprint", f"{found['fingerprint']}, order of bytes {geometry['canonical_order']}"),
    ]
    if found["salt_mark"] is not None:
        lines.append(("salt of mark", found["salt_mark"]))
    return [*fields(lines), *_gift_lines(found.get("given", []))]


def _range(first: int, count: int) -> str:
    """``32 (0 to 31)``."""
    return f"{count} ({first} to {first + count - 1})"
