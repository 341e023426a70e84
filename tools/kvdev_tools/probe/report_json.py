"""Results as fio's JSON: ``json`` and ``json+`` with the keys of fio 3.33.

Not here: what the numbers are (``measure``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvdev import __version__
from kvdev_tools.probe.job import Plan
from kvdev_tools.probe.measure import (
    Measured,
    bins_of,
    deviation,
    grouped,
    percentiles_of,
    rates_of,
    shares,
    way_name,
)

FIO_VERSION = "fio-3.33"
"""Whose keys these are: scripts choose by it how to read the rest."""
ETA_UNKNOWN = 2147483647
DEPTH_LEVELS = ("1", "2", "4", "8", "16", "32", ">=64")
BATCH_LEVELS = ("0", "4", "8", "16", "32", "64", ">=64")
LAT_LEVELS = ("2", "4", "10", "20", "50", "100", "250", "500", "750", "1000")
LAT_MS_LEVELS = (*LAT_LEVELS, "2000", ">=2000")


def json_document(
    plan: Plan, measured: Sequence[Measured], *, has_bins: bool, now_s: float
) -> dict[str, Any]:
    """One document of all jobs."""
    local = time.localtime(now_s)
    return {
        "fio version": FIO_VERSION,
        "kvdev version": __version__,
        "timestamp": int(now_s),
        "timestamp_ms": int(now_s * 1000),
        "time": time.strftime("%a %b %e %H:%M:%S %Y", local),
        "global options": plan.global_options,
        "jobs": [_job(each, has_bins=has_bins) for each in grouped(measured)],
        "disk_util": [],
    }


def _job(measured: Measured, *, has_bins: bool) -> dict[str, Any]:
    job, result = measured.job, measured.result[0]
    runtime_s = measured.wall_s or 1e-9
    document: dict[str, Any] = {
        "jobname": job.name,
        "groupid": job.group_index,
        "error": measured.error,
        "eta": ETA_UNKNOWN,
        "elapsed": max(1, int(measured.wall_s) + 1),
    }
    if job.description:
        document["desc"] = job.description
    document["job options"] = job.options
    for way in range(3):
        if measured.is_mixed and way:
            continue
        document[way_name(measured, way)] = _direction(measured, way, has_bins=has_bins)
    if not measured.is_mixed:
        document["sync"] = {
            "total_ios": int(result["sync"]["stat"]["count"]),
            "lat_ns": _lat(measured, result["sync"], has_percentiles=True, has_bins=has_bins),
        }
    ios = int(result["ios"].sum())
    document |= {
        "job_runtime": sum(int(each) // 1_000_000 for each in result["runtime_ns"])
        if measured.is_mixed
        else measured.runtime_ms * measured.job_count,
        "usr_cpu": 100.0 * measured.user_s / runtime_s,
        "sys_cpu": 100.0 * measured.system_s / runtime_s,
        "ctx": measured.switches,
        "majf": measured.major_faults,
        "minf": measured.minor_faults,
        "iodepth_level": dict(
            zip(DEPTH_LEVELS, shares(result["depth_map"], int(result["depth_map"].sum())), strict=True)
        ),
        "iodepth_submit": dict(
            zip(BATCH_LEVELS, shares(result["submit_map"], int(result["submit_count"])), strict=True)
        ),
        "iodepth_complete": dict(
            zip(BATCH_LEVELS, shares(result["complete_map"], int(result["complete_count"])), strict=True)
        ),
        "latency_ns": dict(zip(LAT_LEVELS, _parts(result["clat_ns"], ios), strict=True)),
        "latency_us": dict(zip(LAT_LEVELS, _parts(result["clat_us"], ios), strict=True)),
        "latency_ms": dict(zip(LAT_MS_LEVELS, _parts(result["clat_ms"], ios), strict=True)),
        "latency_depth": int(result["latency_depth"]) or job.iodepth,
        "latency_target": job.latency_target_us,
        "latency_percentile": job.latency_percentile,
        "latency_window": job.latency_window_us,
    }
    if measured.steady is not None and job.steady is not None:
        steady = measured.steady
        bw, iops = steady.bw, steady.iops
        document["steadystate"] = {
            "ss": f"{job.steady.kind}:{job.steady.limit:f}{'%' if job.steady.is_percent else ''}",
            "duration": job.steady_duration_us // 1_000_000,
            "attained": int(steady.is_attained),
            "criterion": f"{steady.criterion:f}{'%' if job.steady.is_percent else ''}",
            "max_deviation": steady.deviation,
            "slope": steady.slope,
            "data": {
                "bw_mean": int(sum(bw) / len(bw)) if bw else 0,
                "iops_mean": int(sum(iops) / len(iops)) if iops else 0,
                "iops": [int(each) for each in iops],
                "bw": [int(each) for each in bw],
            },
        }
    return document


def _parts(counts: Any, total: int) -> list[float]:
    return [round(100.0 * count / total, 6) if total else 0.0 for count in counts.tolist()]


def _direction(measured: Measured, way: int, *, has_bins: bool) -> dict[str, Any]:
    job, result = measured.job, measured.result[0]
    rates = rates_of(measured, way)
    bytes_ = int(result["bytes"][way])
    bw, iops = result["bw"][way], result["iops"][way]
    return {
        "io_bytes": bytes_,
        "io_kbytes": bytes_ >> 10,
        "bw_bytes": rates.bw_bytes,
        "bw": rates.bw_bytes >> 10,
        "iops": rates.iops,
        "runtime": rates.runtime_ms,
        "total_ios": int(result["ios"][way]),
        "short_ios": int(result["short_ios"][way]),
        "drop_ios": int(result["drop_ios"][way]),
        "slat_ns": _lat(
            measured, result["slat"][way], has_percentiles=job.has_slat_percentiles, has_bins=has_bins
        ),
        "clat_ns": _lat(
            measured, result["clat"][way], has_percentiles=job.has_clat_percentiles, has_bins=has_bins
        ),
        "lat_ns": _lat(
            measured, result["lat"][way], has_percentiles=job.has_lat_percentiles, has_bins=has_bins
        ),
        "bw_min": int(bw["min"]),
        "bw_max": int(bw["max"]),
        "bw_agg": _aggregate(float(bw["mean"]), rates.bw_bytes),
        "bw_mean": float(bw["mean"]),
        "bw_dev": deviation(bw),
        "bw_samples": int(bw["count"]),
        "iops_min": int(iops["min"]),
        "iops_max": int(iops["max"]),
        "iops_mean": float(iops["mean"]),
        "iops_stddev": deviation(iops),
        "iops_samples": int(iops["count"]),
    }


def _aggregate(mean_kib: float, bw_bytes: int) -> float:
    """The windows' mean as a share of the whole."""
    return min(100.0, 100.0 * mean_kib * 1024 / bw_bytes) if bw_bytes else 0.0


def _lat(measured: Measured, lat: Any, *, has_percentiles: bool, has_bins: bool) -> dict[str, Any]:
    stat = lat["stat"]
    document: dict[str, Any] = {
        "min": int(stat["min"]),
        "max": int(stat["max"]),
        "mean": float(stat["mean"]),
        "stddev": deviation(stat),
        "N": int(stat["count"]),
    }
    if has_percentiles and stat["count"]:
        wanted = measured.job.percentiles
        values = percentiles_of(lat["buckets"], wanted)
        document["percentile"] = {f"{each:f}": value for each, value in zip(wanted, values, strict=True)}
        if has_bins:
            document["bins"] = {str(value): count for value, count in bins_of(lat["buckets"]).items()}
    return document
