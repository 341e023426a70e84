"""``kvdev page``: the pages of a KV namespace, listed and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvdev_tools.connect import host_options, make_session, timeout_option
from kvdev_tools.output import Progress, emit, json_option, table

if TYPE_CHECKING:
    from kvdev.session import Session

BATCH_SIZE_BYTES = 64 << 20
BATCH_PAGE_COUNT_MAX = 1024


@click.group()
def page() -> None:
    """List and verify stored pages."""


@page.command(short_help="List the keys of stored pages, the last used first.")
@click.argument("uri", metavar="VOLUME#NAME")
@click.option("--limit", type=click.IntRange(1), help="Show at most so many  [default: all]")
@host_options
@timeout_option
@json_option
def ls(
    uri: str, limit: int | None, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """List the keys of stored pages, most recently used first; safe while the namespace has an owner.

    \b
    Example:
      kvdev page ls --limit 20 "vol:file:/srv/kv0.img#mine"
    """
    import numpy as np

    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import opened_namespace

        with opened_namespace(session, uri, mode="reader", timeout_s=timeout_s) as (_, opened):
            entries = opened.entries()
    total = len(entries)
    order = np.argsort(entries["last_use"], kind="stable")[::-1]
    entries = entries[order[:limit]]
    pages: list[dict[str, Any]] = [
        {
            "key": bytes(entry["key"]).hex(),
            "generation": int(entry["generation"]),
            "length_bytes": int(entry["length"]),
            "checksum": f"{int(entry['checksum']):016x}",
            "last_use": int(entry["last_use"]),
        }
        for entry in entries
    ]

    def text() -> list[str]:
        columns = ("key", "generation", "length_bytes", "checksum")
        lines = table([[each[name] for name in columns] for each in pages], header=columns) if pages else []
        return [*lines, f"{len(pages)} of {total} pages"]

    emit({"pages_total": total, "pages": pages}, as_json=as_json, text=text)


@page.command(short_help="Read every stored page and check it.")
@click.argument("uri", metavar="VOLUME#NAME")
@host_options
@timeout_option
@json_option
def verify(uri: str, host_nqn: str | None, host_id: str | None, timeout_s: float, as_json: bool) -> int:
    """Read every stored page and check its bytes, key and generation against its checksum.

    Changes nothing, and is safe while the namespace has an owner: a page that its owner replaces meanwhile
    is left out. The exit code is 5 when a page is damaged.

    \b
    Example:
      kvdev page verify "vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv#llama"
    """
    from kvdev_tools.exits import ExitCode

    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        from kvdev_tools.pool import opened_namespace

        with opened_namespace(session, uri, mode="reader", timeout_s=timeout_s) as (_, opened):
            checked, bad = _verify(session, opened, timeout_s)
    found = {"pages_checked": checked, "pages_damaged": len(bad), "damaged_keys": bad}

    def text() -> list[str]:
        return [*(f"damaged: {key}" for key in bad), f"{checked} pages checked, {len(bad)} damaged"]

    emit(found, as_json=as_json, text=text)
    return int(ExitCode.DATA_FAULT if bad else ExitCode.OK)


def _verify(session: Session, opened: Any, timeout_s: float) -> tuple[int, list[str]]:
    """Pages checked, and the keys of damaged ones."""
    import numpy as np

    from kvdev.errors import CorruptionError
    from kvdev.keys import KEY_SIZE_BYTES
    from kvdev.store import PageStatus, PageStore

    keys = np.ascontiguousarray(opened.entries()["key"]).view(np.uint8).reshape(-1, KEY_SIZE_BYTES)
    batch = max(1, min(BATCH_SIZE_BYTES // opened.page_size_bytes, BATCH_PAGE_COUNT_MAX, max(1, len(keys))))
    store = PageStore(opened, timeout_s=timeout_s)
    bad: list[str] = []
    bar = Progress("verify", len(keys))
    page_bytes = -(-opened.page_size_bytes // 4096) * 4096
    try:
        with session.make_arena(batch * page_bytes) as arena:
            for start in range(0, len(keys), batch):
                part = keys[start : start + batch]
                with arena.lease(len(part), opened.page_size_bytes) as lease:
                    got = store.get(part, lease)
                if got.failure is not None and not isinstance(got.failure, CorruptionError):
                    raise got.failure
                bad += [
                    part[index].tobytes().hex() for index in np.flatnonzero(got.status == PageStatus.ERROR)
                ]
                bar.update(start + len(part), f"{start + len(part)} of {len(keys)} pages")
    finally:
        bar.close()
    return len(keys), bad
