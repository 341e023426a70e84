"""Results as lines of semicolon-separated fields: fio's terse output, version 3.

Not here: what the numbers are (``measure``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdev_tools.probe.measure import Measured, deviation, grouped, percentiles_of, rates_of, shares
from kvdev_tools.probe.report_json import FIO_VERSION

PERCENTILE_FIELDS = 20


def terse_report(measured: Sequence[Measured]) -> list[str]:
    """One line per job or group."""
    return [_line(each) for each in grouped(measured)]


def _line(measured: Measured) -> str:
    job, result = measured.job, measured.result[0]
    wall = measured.wall_s or 1e-9
    fields: list[str] = ["3", FIO_VERSION, job.name, str(job.group_index), str(measured.error)]
    for way in (0, 1):
        fields += _direction(measured, way)
    fields += [
        f"{100 * measured.user_s / wall:f}%",
        f"{100 * measured.system_s / wall:f}%",
        str(measured.switches),
        str(measured.major_faults),
        str(measured.minor_faults),
    ]
    fields += [f"{each:3.1f}%" for each in shares(result["depth_map"], int(result["depth_map"].sum()))]
    total = int(result["ios"].sum())
    usec = result["clat_us"].tolist()
    usec[0] += int(result["clat_ns"].sum())
    for count in (*usec, *result["clat_ms"].tolist()):
        fields.append(f"{100.0 * count / total if total else 0.0:3.2f}%")
    if job.description:
        fields.append(job.description)
    return ";".join(fields)


def _direction(measured: Measured, way: int) -> list[str]:
    job, result = measured.job, measured.result[0]
    rates = rates_of(measured, way)
    fields = [
        str(int(result["bytes"][way]) >> 10),
        str(rates.bw_bytes >> 10),
        str(int(rates.iops)),
        str(rates.runtime_ms),
    ]
    fields += _lat(result["slat"][way]["stat"])
    fields += _lat(result["clat"][way]["stat"])
    clat = result["clat"][way]
    cells = []
    if job.has_clat_percentiles and clat["stat"]["count"]:
        values = percentiles_of(clat["buckets"], job.percentiles)
        cells = [f"{each:f}%={value // 1000}" for each, value in zip(job.percentiles, values, strict=True)]
    elif job.has_clat_percentiles:
        cells = [f"{each:f}%=0" for each in job.percentiles]
    fields += cells + ["0%=0"] * (PERCENTILE_FIELDS - len(cells))
    fields += _lat(result["lat"][way]["stat"])
    bw = result["bw"][way]
    share = min(100.0, 100.0 * float(bw["mean"]) * 1024 / rates.bw_bytes) if rates.bw_bytes else 0.0
    fields += [
        str(int(bw["min"])),
        str(int(bw["max"])),
        f"{share:f}%",
        f"{float(bw['mean']):f}",
        f"{deviation(bw):f}",
    ]
    return fields


def _lat(stat: Any) -> list[str]:
    """Minimum, maximum, mean and deviation in microseconds."""
    return [
        str(int(stat["min"]) // 1000),
        str(int(stat["max"]) // 1000),
        f"{float(stat['mean']) / 1000:f}",
        f"{deviation(stat) / 1000:f}",
    ]
