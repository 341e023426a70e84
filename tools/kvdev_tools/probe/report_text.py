"""Results as text, in the layout of fio's normal output.

Not here: what the numbers are (``measure``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvdev_tools.probe.job import Job
from kvdev_tools.probe.measure import (
    Measured,
    deviation,
    grouped,
    percentiles_of,
    rates_of,
    shares,
    used_ways,
    way_name,
)
from kvdev_tools.probe.report_json import BATCH_LEVELS, DEPTH_LEVELS, LAT_LEVELS, LAT_MS_LEVELS

_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
LINE_WIDTH = 4
"""Percentiles beside each other; three where values are long."""


def short(value: float, *, base: int = 1000, length: int = 4) -> str:
    """A number in at most ``length`` characters and a unit's letter: ``7873``, ``12.5k``, ``30.8M``."""
    names = _BINARY if base == 1024 else _DECIMAL
    index = 0
    value = float(value)
    while len(str(int(value + 0.5 if not index else value))) > length and index < len(names) - 1:
        value /= base
        index += 1
    whole = str(int(value))
    decimals = max(0, length - len(whole) - 1) if index else 0
    text = f"{value:.{decimals}f}" if index else str(int(value + 0.5))
    return text + names[index]


def size(value: float, base: int) -> str:
    return short(value, base=base) + "B"


def headline(jobs: Sequence[Job]) -> list[str]:
    """One line per job before it runs; clones are counted."""
    lines: list[str] = []
    index = 0
    while index < len(jobs):
        job = jobs[index]
        same = 1
        while index + same < len(jobs) and jobs[index + same].jobnum:
            same += 1
        names = "RWT"
        parts = [
            f"({names[way]}) {short(job.blocks[way].low, base=1024)}B-{short(job.blocks[way].high, base=1024)}B"
            for way in range(3)
        ]
        lines.append(
            f"{job.name}: (g={job.group_index}): rw={job.rw.name}, bs={', '.join(parts)}, "
            f"ioengine={job.ioengine or 'kvdev'}, iodepth={job.iodepth}"
        )
        if same > 1:
            lines.append("...")
        index += same
    lines.append(f"Starting {len(jobs)} thread{'s' if len(jobs) > 1 else ''}")
    return lines


def text_report(measured: Sequence[Measured], *, now_s: float) -> list[str]:
    """All jobs, then each group."""
    lines: list[str] = []
    for each in grouped(measured):
        lines += ["", *_job(each, now_s=now_s)]
    for group in sorted({each.job.group_index for each in measured}):
        members = [each for each in measured if each.job.group_index == group]
        lines += ["", f"Run status group {group} (all jobs):", *_group(members)]
    return lines


def _job(measured: Measured, *, now_s: float) -> Iterator[str]:
    job = measured.job
    result = measured.result[0]
    when = time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(now_s))
    yield (
        f"{job.name}: (groupid={job.group_index}, jobs={measured.job_count}): err={measured.error:2d}: "
        f"pid={measured.thread_id}: {when}"
    )
    if job.description:
        yield f"  Description  : [{job.description}]"
    for way in used_ways(measured):
        yield from _direction(measured, way)
    if result["sync"]["stat"]["count"]:
        yield "  fsync/fdatasync/sync_file_range:"
        yield _lat_line("sync", result["sync"]["stat"])
        yield from _percentiles("sync", result["sync"], job)
    total = int(result["ios"].sum())
    for unit, name, levels in (
        ("nsec", "clat_ns", LAT_LEVELS),
        ("usec", "clat_us", LAT_LEVELS),
        ("msec", "clat_ms", LAT_MS_LEVELS),
    ):
        yield from _spread(unit, levels, result[name].tolist(), total)
    wall = measured.wall_s or 1e-9
    yield (
        f"  cpu          : usr={100 * measured.user_s / wall:3.2f}%, sys={100 * measured.system_s / wall:3.2f}%, "
        f"ctx={measured.switches}, majf={measured.major_faults}, minf={measured.minor_faults}"
    )
    yield _levels("IO depths    ", DEPTH_LEVELS, shares(result["depth_map"], int(result["depth_map"].sum())))
    yield _levels("   submit    ", BATCH_LEVELS, shares(result["submit_map"], int(result["submit_count"])))
    yield _levels(
        "   complete  ", BATCH_LEVELS, shares(result["complete_map"], int(result["complete_count"]))
    )
    ios = [int(each) for each in result["ios"]]
    yield (
        f"     issued rwts: total={ios[0]},{ios[1]},{ios[2]},{int(result['sync']['stat']['count'])} "
        f"short=0,0,0,0 dropped=0,0,0,0"
    )
    if result["error_count"]:
        yield f"     errors    : total={int(result['error_count'])}, first_error={int(result['first_error'])}"
    if result["verified_bytes"]:
        yield f"     verified  : bytes={int(result['verified_bytes'])}, bad={int(result['bad_count'])}"
    depth = int(result["latency_depth"]) or job.iodepth
    yield (
        f"     latency   : target={job.latency_target_us}, window={job.latency_window_us}, "
        f"percentile={job.latency_percentile:.2f}%, depth={depth}"
    )
    if measured.steady is not None and job.steady is not None:
        steady = measured.steady
        percent = "%" if job.steady.is_percent else ""
        yield (
            f"  steadystate  : attained={'yes' if steady.is_attained else 'no'}, "
            f"{job.steady.kind.replace('_', ' ')} criterion={steady.criterion:.3f}{percent}"
        )


def _direction(measured: Measured, way: int) -> Iterator[str]:
    job, result = measured.job, measured.result[0]
    rates = rates_of(measured, way)
    bytes_ = int(result["bytes"][way])
    base, other = (1024, 1000) if job.kb_base == 1024 else (1000, 1024)
    yield (
        f"  {way_name(measured, way)}: IOPS={short(rates.iops)}, BW={size(rates.bw_bytes, base)}/s "
        f"({size(rates.bw_bytes, other)}/s)({size(bytes_, base)}/{rates.runtime_ms}msec)"
        f"{'; 0 zone resets' if way == 1 else ''}"
    )
    for name in ("slat", "clat", "lat"):
        if result[name][way]["stat"]["count"]:
            yield _lat_line(name, result[name][way]["stat"])
    for name, has in (
        ("clat", job.has_clat_percentiles),
        ("lat", job.has_lat_percentiles),
        ("slat", job.has_slat_percentiles),
    ):
        if has and result[name][way]["stat"]["count"]:
            yield from _percentiles(name, result[name][way], job)
    bw, iops = result["bw"][way], result["iops"][way]
    if bw["count"]:
        share = min(100.0, 100.0 * float(bw["mean"]) * 1024 / rates.bw_bytes) if rates.bw_bytes else 0.0
        yield (
            f"   bw (  KiB/s): min={int(bw['min']):5d}, max={int(bw['max']):5d}, per={share:3.2f}%, "
            f"avg={float(bw['mean']):5.2f}, stdev={deviation(bw):5.2f}, samples={int(bw['count'])}"
        )
    if iops["count"]:
        yield (
            f"   iops        : min={int(iops['min']):5d}, max={int(iops['max']):5d}, "
            f"avg={float(iops['mean']):5.2f}, stdev={deviation(iops):5.2f}, samples={int(iops['count'])}"
        )


def _scale(low: float, high: float) -> tuple[int, str]:
    """The largest unit in which both are more than a thousand, as fio chooses it."""
    if low > 2_000_000 and high > 99_999_000:
        return 1_000_000, "msec"
    if low > 2000 and high > 99_999:
        return 1000, "usec"
    return 1, "nsec"


def _lat_line(name: str, stat: Any) -> str:
    scale, unit = _scale(float(stat["min"]), float(stat["max"]))
    low, high = short(float(stat["min"]) / scale, length=6), short(float(stat["max"]) / scale, length=6)
    return (
        f"    {name:>4} ({unit}): min={low}, max={high}, avg={float(stat['mean']) / scale:5.2f}, "
        f"stdev={deviation(stat) / scale:5.2f}"
    )


def _percentiles(name: str, lat: Any, job: Job) -> Iterator[str]:
    values = percentiles_of(lat["buckets"], job.percentiles)
    scale, unit = _scale(float(min(values)), float(max(values)))
    yield f"    {name} percentiles ({unit}):"
    width = max(len(str(value // scale)) for value in values)
    count = 4 if width <= 5 else 3
    cells = [
        f"{percentile:5.2f}th=[{value // scale:{width}d}]"
        for percentile, value in zip(job.percentiles, values, strict=True)
    ]
    for start in range(0, len(cells), count):
        end = "," if start + count < len(cells) else ""
        yield "     | " + ", ".join(cells[start : start + count]) + end


def _spread(unit: str, levels: Sequence[str], counts: Sequence[int], total: int) -> Iterator[str]:
    """Shares of latencies by level, five to a line; levels that nothing lies in are left out."""
    cells = [
        f"{level}={max(100.0 * count / total, 0.01):.2f}%"
        for level, count in zip(levels, counts, strict=True)
        if count and total
    ]
    for start in range(0, len(cells), 5):
        yield f"  lat ({unit})   : " + ", ".join(cells[start : start + 5])


def _levels(name: str, levels: Sequence[str], values: Sequence[float]) -> str:
    cells = [f"{level}={value:3.1f}%" for level, value in zip(levels, values, strict=True)]
    return f"  {name}: " + ", ".join(cells)


def _group(members: Sequence[Measured]) -> Iterator[str]:
    for way, name in enumerate(("READ", "WRITE", "TRIM")):
        used = [each for each in members if each.result["ios"][0, way]]
        if not used:
            continue
        base, other = (1024, 1000) if used[0].job.kb_base == 1024 else (1000, 1024)
        rates = [rates_of(each, way) for each in used]
        bytes_ = sum(int(each.result["bytes"][0, way]) for each in used)
        longest, shortest = max(each.runtime_ms for each in rates), min(each.runtime_ms for each in rates)
        total = 1000 * bytes_ // longest if longest else 0
        low, high = min(each.bw_bytes for each in rates), max(each.bw_bytes for each in rates)
        yield (
            f"{name:>7}: bw={size(total, base)}/s ({size(total, other)}/s), "
            f"{size(low, base)}/s-{size(high, base)}/s ({size(low, other)}/s-{size(high, other)}/s), "
            f"io={size(bytes_, base)} ({size(bytes_, other)}), run={shortest}-{longest}msec"
        )
