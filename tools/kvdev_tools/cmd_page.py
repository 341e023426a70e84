"""``kvdev page``: the pages of a KV namespace, listed, verified, and read, of other head ranges too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from kvdev_tools.connect import host_options, make_session, timeout_option
from kvdev_tools.output import Progress, emit, json_option, table

if TYPE_CHECKING:
    from kvdev.geometry import Geometry
    from kvdev.keys import KeyArray
    from kvdev.session import Session
    from kvdev.store.resplit import SplitReader

BATCH_SIZE_BYTES = 64 << 20
BATCH_PAGE_COUNT_MAX = 1024


@click.group()
def page() -> None:
    """List, read and verify stored pages."""


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


@page.command(short_help="Read pages of any head range, put together from the KV namespaces named.")
@click.argument("uris", metavar="VOLUME#NAME...", nargs=-1, required=True)
@click.option(
    "--key", "keys", metavar="HEX", multiple=True, help="Page to read; again for more  [default: all]"
)
@click.option(
    "--heads",
    metavar="FIRST:COUNT",
    help="KV heads to read  [default: all that the namespaces have between them]",
)
@click.option(
    "--output", metavar="FILE", help="New file for the bytes of the pages found, one after the other."
)
@host_options
@timeout_option
@json_option
def get(
    uris: tuple[str, ...],
    keys: tuple[str, ...],
    heads: str | None,
    output: str | None,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Read pages as a rank with other KV heads has them: TP8's ranks joined for TP4, or a part of one for TP16.

    A page counts as found when every namespace that is needed has it, each verified against its own checksum.
    Without --key those of the first namespace are read. Namespaces may differ in their KV heads only, and are refused
    by the name of any other field. Changes nothing, and is safe while they have owners. The exit code is 5 when a
    page cannot be read.

    \b
    Example:
      kvdev page get "vol:file:/srv/kv0.img#llama.0" "vol:file:/srv/kv0.img#llama.1" --heads 0:2 --json
    """
    from kvdev.keys import KEY_SIZE_BYTES
    from kvdev.store import PageStore
    from kvdev.store.resplit import SplitReader
    from kvdev_tools.exits import ExitCode

    wanted = _parse_keys(keys)
    chosen = None if heads is None else _parse_heads(heads)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session, contextlib.ExitStack() as stack:
        from kvdev_tools.pool import opened_namespace

        opened = [
            stack.enter_context(opened_namespace(session, uri, mode="reader", timeout_s=timeout_s))[1]
            for uri in uris
        ]
        geometry = _joined([each.geometry for each in opened], chosen)
        reader = SplitReader([PageStore(each) for each in opened], geometry, timeout_s=timeout_s)
        if wanted is None:
            wanted = opened[0].entries()["key"].copy().reshape(-1, KEY_SIZE_BYTES)
        file = None if output is None else stack.enter_context(_new_file(output))
        pages = _read(reader, wanted, file)
    found = {
        "sources": reader.sources,
        "kv_head_first": geometry.kv_head_first,
        "kv_head_count": geometry.kv_head_count,
        "page_size_bytes": geometry.page_size_bytes,
        "pages": pages,
    }
    counts = {status: sum(each["status"] == status for each in pages) for status in ("hit", "miss", "error")}

    def text() -> list[str]:
        last = geometry.kv_head_first + geometry.kv_head_count - 1
        return [
            *(f"{each['key']}: {each['status']}" for each in pages),
            f"KV heads {geometry.kv_head_first} to {last} from {', '.join(reader.sources)}: {counts['hit']} pages "
            f"found, {counts['miss']} missing, {counts['error']} that cannot be read",
        ]

    emit(found, as_json=as_json, text=text)
    return int(ExitCode.DATA_FAULT if counts["error"] else ExitCode.OK)


def _parse_keys(texts: tuple[str, ...]) -> KeyArray | None:
    """None where none is given."""
    import numpy as np

    from kvdev.errors import UsageError
    from kvdev.keys import KEY_SIZE_BYTES

    if not texts:
        return None
    keys = np.zeros((len(texts), KEY_SIZE_BYTES), dtype=np.uint8)
    for index, text in enumerate(texts):
        data = b""
        with contextlib.suppress(ValueError):
            data = bytes.fromhex(text)
        if len(data) != KEY_SIZE_BYTES:
            raise UsageError(
                f"key: expected {KEY_SIZE_BYTES} bytes as {2 * KEY_SIZE_BYTES} hex digits, got {text!r:.100}"
            )
        keys[index] = np.frombuffer(data, dtype=np.uint8)
    return keys


def _parse_heads(text: str) -> tuple[int, int]:
    from kvdev.errors import UsageError

    first, colon, count = text.partition(":")
    is_right = colon and all(each.isascii() and each.isdigit() and len(each) < 6 for each in (first, count))
    if not is_right or int(count) == 0:
        raise UsageError(f"heads: expected FIRST:COUNT, such as 0:2, got {text!r:.100}")
    return int(first), int(count)


def _joined(sources: list[Geometry], chosen: tuple[int, int] | None) -> Geometry:
    """The reader's geometry: that of the first source but for its KV heads."""
    from dataclasses import replace

    first = min(each.kv_head_first for each in sources)
    count = max(each.kv_head_first + each.kv_head_count for each in sources) - first
    if chosen is not None:
        first, count = chosen
    return replace(sources[0], kv_head_first=first, kv_head_count=count)


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    import os

    from kvdev.errors import UsageError
    from kvdev.files import open_kept

    try:
        # Prompts are private: for its owner alone.
        descriptor = open_kept(path, os.O_EXCL)
    except OSError as problem:
        raise UsageError(f"output: {path}: {problem.strerror or problem}; name a new file") from problem
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException:  # half of it would look like all of it
        Path(path).unlink()
        raise


def _read(reader: SplitReader, keys: KeyArray, file: BinaryIO | None) -> list[dict[str, Any]]:
    """What each page gave, in the order of the keys; the bytes of those found go to the file."""
    import numpy as np

    from kvdev.errors import CorruptionError
    from kvdev.store import PageStatus

    batch = max(1, min(BATCH_SIZE_BYTES // reader.page_size_bytes, BATCH_PAGE_COUNT_MAX))
    out = np.zeros((min(batch, max(1, len(keys))), reader.page_size_bytes), dtype=np.uint8)
    pages: list[dict[str, Any]] = []
    for start in range(0, len(keys), batch):
        part = np.ascontiguousarray(keys[start : start + batch])
        got = reader.get(part, out[: len(part)])
        if got.failure is not None and not isinstance(got.failure, CorruptionError):
            raise got.failure
        for index, status in enumerate(got.status.tolist()):
            is_hit = status == PageStatus.HIT
            pages.append(
                {
                    "key": part[index].tobytes().hex(),
                    "status": PageStatus(status).name.lower(),
                    "crc32c": f"{int(got.sums[index]):08x}" if is_hit else "",
                }
            )
            if is_hit and file is not None:
                file.write(out[index].data)
    return pages
