"""The size × depth map: one job at every pair of the two, as tables, JSON and one self-contained HTML file.

Not here: running a job (``run``).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvdev.errors import CapacityError, KvdevError, UsageError
from kvdev_tools.output import table
from kvdev_tools.probe.job import Plan, make_plan
from kvdev_tools.probe.jobfile import Reader
from kvdev_tools.probe.measure import Measured, merge, percentiles_of, rates_of, used_ways
from kvdev_tools.probe.report_text import short, size
from kvdev_tools.probe.run import Outcome
from kvdev_tools.probe.value import parse_int

SIZES_DEFAULT = "4k,16k,64k,128k,1m"
DEPTHS_DEFAULT = "1,4,16,64"
CELL_COUNT_MAX = 256
CELL_RUNTIME = "2"
"""Seconds of a cell where the job says neither time nor amount."""


@dataclass(frozen=True)
class Cell:
    """What one pair brought, all directions together."""

    block_size_bytes: int
    depth: int
    bw_bytes_per_s: float
    iops: float
    clat_ns_p50: int
    clat_ns_p99: int


def parse_axis(option: str, text: str, *, high: int) -> list[int]:
    """The numbers of one axis, rising, each once."""
    values = [parse_int(option, part, low=1, high=high) for part in text.split(",")]
    return sorted(set(values))


def run_sweep(
    arguments: Sequence[str],
    sizes: Sequence[int],
    depths: Sequence[int],
    *,
    run: Callable[[Plan], Outcome],
    is_read_only: bool,
) -> tuple[list[Cell], Outcome]:
    """Run the one job of the arguments at every pair; stops at the first that fails or is interrupted."""
    if len(sizes) * len(depths) > CELL_COUNT_MAX:
        raise UsageError(f"sweep: expected at most {CELL_COUNT_MAX} pairs, got {len(sizes) * len(depths)}")
    plans = [
        (bs, depth, _plan(arguments, bs, depth, is_read_only=is_read_only))
        for bs in sizes
        for depth in depths
    ]
    cells: list[Cell] = []
    outcome = Outcome()
    for bs, depth, plan in plans:
        try:
            outcome = run(plan)
        except (KvdevError, OSError) as error:
            if not cells:
                raise
            outcome = Outcome(
                problems=[f"{error}; bs={bs} at depth {depth} and later have not run"], failure=error
            )
        if outcome.problems or outcome.interrupt is not None:
            break
        cells.append(_cell(bs, depth, merge(outcome.measured)))
    return cells, outcome


def _plan(arguments: Sequence[str], bs: int, depth: int, *, is_read_only: bool) -> Plan:
    reader = Reader()
    files = reader.take_arguments(arguments)
    for name in files:
        reader.take_file(name)
    if not reader.text.sections:
        reader.take_arguments(["--name=sweep"])
    if len(reader.text.sections) != 1:
        raise UsageError(
            f"sweep: expected one job, got {len(reader.text.sections)}; choose it with --section"
        )
    section = reader.text.sections[0]
    has_end = {"runtime", "io_size", "number_ios"} & set(section.merged())
    more = [f"--bs={bs}", f"--iodepth={depth}"]
    more += [] if has_end else [f"--runtime={CELL_RUNTIME}", "--time_based"]
    extra = Reader()
    extra.take_arguments(["--name=sweep", *more])
    section.options.update({k: v for k, v in extra.text.sections[0].options.items() if k != "name"})
    return make_plan(reader.text, is_read_only=is_read_only)


def _cell(bs: int, depth: int, measured: Measured) -> Cell:
    ways = used_ways(measured)
    rates = [rates_of(measured, way) for way in ways]
    buckets = measured.result["clat"][0]["buckets"].sum(axis=0)
    p50, p99 = percentiles_of(buckets, (50.0, 99.0))
    return Cell(
        bs, depth, float(sum(each.bw_bytes for each in rates)), sum(each.iops for each in rates), p50, p99
    )


_VIEWS: tuple[tuple[str, Callable[[Cell], float], Callable[[float], str]], ...] = (
    ("bandwidth", lambda cell: cell.bw_bytes_per_s, lambda value: f"{size(value, 1024)}/s"),
    ("I/Os per second", lambda cell: cell.iops, short),
    ("clat, 99th percentile", lambda cell: float(cell.clat_ns_p99), lambda value: f"{short(value / 1000)}us"),
)


def sweep_text(cells: Sequence[Cell]) -> list[str]:
    """One table per view: sizes down, depths across."""
    lines: list[str] = []
    depths = sorted({cell.depth for cell in cells})
    for name, value_of, show in _VIEWS:
        rows = [[label, *cells_] for label, cells_ in _rows(cells, depths, value_of, show)]
        lines += [f"{name}:", *table(rows, header=("bs", *(f"depth {each}" for each in depths))), ""]
    return lines


def _rows(
    cells: Sequence[Cell],
    depths: Sequence[int],
    value_of: Callable[[Cell], float],
    show: Callable[[float], str],
) -> list[tuple[str, list[str]]]:
    found = {(cell.block_size_bytes, cell.depth): cell for cell in cells}
    return [
        (
            size(bs, 1024),
            [show(value_of(found[bs, depth])) if (bs, depth) in found else "-" for depth in depths],
        )
        for bs in sorted({cell.block_size_bytes for cell in cells})
    ]


def sweep_document(cells: Sequence[Cell]) -> dict[str, Any]:
    return {"cells": [asdict(cell) for cell in cells]}


def write_html(path: Path, cells: Sequence[Cell], *, title: str) -> None:
    """One file that needs no other: heat maps as tables with coloured cells."""
    depths = sorted({cell.depth for cell in cells})
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(title)}</title>",
        "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}",
        "td,th{padding:.5em .9em;text-align:right;border:1px solid #ccc}",
        "caption{text-align:left;font-weight:bold}</style>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    for name, value_of, show in _VIEWS:
        values = [value_of(cell) for cell in cells]
        parts.append(f"<table><caption>{html.escape(name)}</caption><tr><th>bs")
        parts += [f"<th>depth {depth}" for depth in depths]
        found = {(cell.block_size_bytes, cell.depth): value_of(cell) for cell in cells}
        for bs in sorted({cell.block_size_bytes for cell in cells}):
            parts.append(f"<tr><th>{size(bs, 1024)}")
            for depth in depths:
                value = found.get((bs, depth))
                if value is None:
                    parts.append("<td>-")
                else:
                    parts.append(
                        f'<td style="background:{_colour(value, values)}">{html.escape(show(value))}'
                    )
        parts.append("</table>")
    parts.append("</html>\n")
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise CapacityError(f"--html: {path}: cannot be written: {error.strerror}") from error


def _colour(value: float, values: Sequence[float]) -> str:
    """From white to blue by the logarithm: figures span orders of magnitude."""
    low, high = (math.log(max(each, 1e-9)) for each in (min(values), max(values)))
    share = (math.log(max(value, 1e-9)) - low) / (high - low) if high > low else 0.0
    return f"hsl(210,80%,{95 - 45 * share:.0f}%)"
