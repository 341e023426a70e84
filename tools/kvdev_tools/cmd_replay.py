"""``kvdev replay``: the whole job on a request trace, on a pool of yours or on the embedded target.

Not here: planning and running it (``kvdev_tools.launch``).
"""

from __future__ import annotations

from typing import Any

import click

from kvdev_tools.connect import KATO_MS_DEFAULT, host_options, timeout_option
from kvdev_tools.geometry_options import DEFAULT_PRESET, choose_geometry, geometry_options
from kvdev_tools.output import emit, json_option

IO_QUEUE_COUNT_MAX = 16
"""``kvdev.initiator.options`` has the same; a test compares them, so that the help needs no initiator."""
REQUEST_COUNT_MAX = 1_000_000
"""The plan goes through all requests before anything starts; this many take it about a minute."""


@click.command()
@click.argument("uri", metavar="[VOLUME#NAME]", required=False)
@click.option("--trace", metavar="FILE", help="Trace of requests, JSON lines; by default one is generated.")
@click.option(
    "--requests",
    type=click.IntRange(1, REQUEST_COUNT_MAX),
    help="Requests to replay  [default: 300, or the whole FILE]",
)
@geometry_options
@click.option("--layout", help="The engine's tensors: nhd, hnd, block-outermost, sglang or mla.")
@click.option("--block-tokens", type=int, help="Tokens of an engine's block  [default: 16]")
@click.option("--capacity", metavar="SIZE", help="Room for pages; beyond it the oldest are evicted.")
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of trace and block order."
)
@click.option("--embedded", is_flag=True, help="Use a target of our own; the default without VOLUME#NAME.")
@click.option("--members", type=click.IntRange(1, 64), help="Namespaces of the embedded target  [default: 4]")
@click.option("--strip-size", metavar="SIZE", help="Strip size of the embedded volume  [default: 128KiB]")
@click.option("--files", metavar="DIR", help="Keep the embedded namespaces in files there, not in memory.")
@click.option("--salt-file", metavar="FILE", help="Salt of the tenant whose page keys these are.")
@click.option("--kill-halfway", is_flag=True, help="Kill the client half way; a new one goes on.")
@click.option("--arena", "arena_size", metavar="SIZE", help="Staging memory of the client  [default: 64MiB]")
@click.option(
    "--io-queues",
    type=click.IntRange(1, IO_QUEUE_COUNT_MAX),
    default=1,
    show_default=True,
    help="Per subsystem.",
)
@click.option(
    "--keep-alive-ms",
    "kato_ms",
    type=click.IntRange(1, 600_000),
    default=KATO_MS_DEFAULT,
    show_default=True,
    help="Keep alive timeout. After a loss, writes that were under way wait twice as long before they are sent again.",
)
@host_options
@timeout_option
@json_option
def replay(
    uri: str | None,
    trace: str | None,
    requests: int | None,
    layout: str | None,
    block_tokens: int | None,
    capacity: str | None,
    seed: int,
    embedded: bool,
    members: int | None,
    strip_size: str | None,
    files: str | None,
    salt_file: str | None,
    kill_halfway: bool,
    arena_size: str | None,
    io_queues: int,
    kato_ms: int,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    **shape: Any,
) -> int:
    """Offload and restore the KV pages of a request trace, and compare every restored page.

    One page per block of 512 prompt tokens. For each request the longest stored prefix is restored into
    paged tensors; the rest is filled with bytes that follow from key and position, packed and stored. The
    exit code is 5 when any restored page differs.

    \b
    Examples:
      kvdev replay
      kvdev replay --trace conversation_trace.jsonl --requests 500 --geometry small
      kvdev replay --kill-halfway --layout hnd --json
      kvdev replay --capacity 256MiB
      kvdev replay vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:pool#llama --geometry llama3-8b
    """
    from pathlib import Path

    from kvdev.errors import UsageError
    from kvdev.units import parse_size
    from kvdev_tools import report
    from kvdev_tools.exits import ExitCode
    from kvdev_tools.launch import ReplaySettings, geometry_of, run_replay
    from kvdev_tools.supervisor import ClientFailedError

    if uri is not None:
        for name, value in (
            ("--embedded", embedded or None),
            ("--members", members),
            ("--strip-size", strip_size),
            ("--files", files),
            ("--capacity", capacity),
        ):
            if value is not None:
                raise UsageError(
                    f"{name}: belongs to the embedded target, got it with {uri!r}; leave one of the two out"
                )
    for name, value in (("trace", trace), ("files", files)):
        if value == "":  # would mean the current folder
            raise UsageError(f"{name}: expected a path, got ''")
    if uri is not None and all(value is None for value in shape.values()):
        geometry = geometry_of(uri, host_nqn, host_id, timeout_s=timeout_s)
        geometry_name = geometry.model_id
    else:
        geometry = choose_geometry(**shape)
        geometry_name = shape["geometry"] or (DEFAULT_PRESET if shape["layers"] is None else "own")
    settings = ReplaySettings(
        uri=uri,
        trace=None if trace is None else Path(trace),
        request_limit=requests,
        geometry=geometry,
        geometry_name=geometry_name,
        layout=layout,
        block_tokens=block_tokens,
        capacity_bytes=None if capacity is None else parse_size(capacity, field="capacity"),
        seed=seed,
        member_count=members or 4,
        strip_size_bytes=parse_size("128KiB" if strip_size is None else strip_size, field="strip_size"),
        files=None if files is None else Path(files),
        is_killed_halfway=kill_halfway,
        arena_size_bytes=None if arena_size is None else parse_size(arena_size, field="arena"),
        io_queue_count=io_queues,
        kato_ms=kato_ms,
        host_nqn=host_nqn,
        host_id=host_id,
        timeout_s=timeout_s,
        salt_file=None if salt_file is None else str(Path(salt_file).absolute()),
    )
    try:
        totals, run = run_replay(settings)
    except ClientFailedError as error:
        if not error.has_said_why:
            click.echo(f"kvdev: {error}", err=True)
        return error.code
    emit(report.document(totals, run), as_json=as_json, text=lambda: report.text(totals, run))
    if totals.mismatches or totals.page_errors:
        click.echo(
            f"kvdev: replay: expected every page as it was put, got {totals.mismatches} that differ and "
            f"{totals.page_errors} damaged",
            err=True,
        )
        return int(ExitCode.DATA_FAULT)
    return int(ExitCode.OK)
