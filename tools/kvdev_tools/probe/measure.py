"""What was measured: results of jobs, merged and unified, as percentiles, rates and shares, computed as fio does.

Not here: counting (the core); printing (``report_json``, ``report_text``, ``report_terse``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.native.probe import BUCKET_COUNT, LogArray, ResultArray, bucket_value, merge_lat
from kvdev_tools.probe.job import DIRECTIONS, Job

Lat = Any
"""One element of a ``LAT_DTYPE`` array."""
_SUMS = (
    "bytes",
    "ios",
    "short_ios",
    "drop_ios",
    "depth_map",
    "submit_map",
    "complete_map",
    "submit_count",
    "complete_count",
    "clat_ns",
    "clat_us",
    "clat_ms",
    "error_count",
    "verified_bytes",
    "bad_count",
)


@dataclass(frozen=True)
class Steady:
    """How steady-state detection went."""

    is_attained: bool
    criterion: float
    slope: float
    deviation: float
    bw: tuple[float, ...]
    iops: tuple[float, ...]


@dataclass
class Measured:
    """One job, or several reported as one."""

    job: Job
    result: ResultArray
    """One ``RESULT_DTYPE``."""
    error: int = 0
    """Errno, as fio reports it; 0 when all went well."""
    user_s: float = 0.0
    system_s: float = 0.0
    switches: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    wall_s: float = 0.0
    thread_id: int = 0
    job_count: int = 1
    log: list[LogArray] = field(default_factory=list)
    steady: Steady | None = None
    is_mixed: bool = False

    @property
    def runtime_ms(self) -> int:
        return int(max(self.result["runtime_ns"][0]) // 1_000_000)


def merge(group: Sequence[Measured]) -> Measured:
    """Several jobs as one: every sample as if it had come to one histogram, window samples summed as fio does."""
    first = group[0]
    if len(group) == 1:
        return first
    total = first.result.copy()
    for each in group[1:]:
        other = each.result
        for name in ("slat", "clat", "lat"):
            for way in range(3):
                merge_lat(total[name][0, way : way + 1], np.ascontiguousarray(other[name][0, way : way + 1]))
        merge_lat(total["sync"], np.ascontiguousarray(other["sync"]))
        for name in ("bw", "iops"):
            for member in ("min", "max", "mean", "square", "count"):
                total[name][member] += other[name][member]
        for name in _SUMS:
            total[name] += other[name]
        total["runtime_ns"] = np.maximum(total["runtime_ns"], other["runtime_ns"])
        total["began_ns"] = np.minimum(total["began_ns"], other["began_ns"])
        total["ended_ns"] = np.maximum(total["ended_ns"], other["ended_ns"])
    return replace(
        first,
        result=total,
        error=next((each.error for each in group if each.error), 0),
        user_s=sum(each.user_s for each in group),
        system_s=sum(each.system_s for each in group),
        switches=sum(each.switches for each in group),
        major_faults=sum(each.major_faults for each in group),
        minor_faults=sum(each.minor_faults for each in group),
        wall_s=max(each.wall_s for each in group),
        job_count=sum(each.job_count for each in group),
        log=[],
    )


def unify(measured: Measured) -> Measured:
    """All directions as one, in the place of the reads."""
    total = measured.result.copy()
    for way in (1, 2):
        for name in ("slat", "clat", "lat"):
            merge_lat(total[name][0, :1], np.ascontiguousarray(total[name][0, way : way + 1]))
            total[name][0, way] = np.zeros((), dtype=total[name].dtype)
        for name in ("bw", "iops"):
            for member in ("min", "max", "mean", "square"):
                total[name][member][0, 0] += total[name][member][0, way]
            total[name]["count"][0, 0] = max(total[name]["count"][0, 0], total[name]["count"][0, way])
            total[name][0, way] = np.zeros((), dtype=total[name].dtype)
        for name in ("bytes", "ios", "short_ios", "drop_ios"):
            total[name][0, 0] += total[name][0, way]
            total[name][0, way] = 0
        total["runtime_ns"][0, 0] = max(total["runtime_ns"][0, 0], total["runtime_ns"][0, way])
        total["runtime_ns"][0, way] = 0
    return replace(measured, result=total, is_mixed=True)


def grouped(measured: Sequence[Measured]) -> list[Measured]:
    """What is reported: jobs with group_reporting as one per group, the others each for itself."""
    out: list[list[Measured]] = []
    for each in measured:
        last = out[-1][0] if out else None
        if (
            last
            and each.job.is_grouped
            and last.job.is_grouped
            and last.job.group_index == each.job.group_index
        ):
            out[-1].append(each)
        else:
            out.append([each])
    found = []
    for group in out:
        merged = merge(group)
        found.append(merged)
        if merged.job.unified == "mixed":
            found[-1] = unify(merged)
        elif merged.job.unified == "both":
            found.append(unify(merged))
    return found


def deviation(stat: Any) -> float:
    """The sample standard deviation."""
    count = int(stat["count"])
    return math.sqrt(max(0.0, float(stat["square"]) / (count - 1))) if count > 1 else 0.0


def percentiles_of(buckets: npt.NDArray[np.uint64], wanted: Sequence[float]) -> list[int]:
    """For each percentile the value of the first bucket up to which that share of all samples lies."""
    total = int(buckets.sum())
    if not total:
        return [0 for _ in wanted]
    sums = np.cumsum(buckets, dtype=np.uint64)
    found = []
    for percentile in wanted:
        need = percentile / 100.0 * total
        index = int(np.searchsorted(sums.astype(np.float64), need, side="left"))
        found.append(bucket_value(min(index, BUCKET_COUNT - 1)))
    return found


def bins_of(buckets: npt.NDArray[np.uint64]) -> dict[int, int]:
    """Values and counts of the buckets that are not empty."""
    return {bucket_value(int(index)): int(buckets[index]) for index in np.flatnonzero(buckets)}


def shares(counts: npt.NDArray[np.uint64], total: int) -> list[float]:
    """Percentages; what is there at all is at least 0.1."""
    out = []
    for count in counts.tolist():
        share = 100.0 * count / total if total else 0.0
        out.append(0.1 if count and share < 0.1 else share)
    return out


@dataclass(frozen=True)
class Rates:
    """Of one direction over its runtime, rounded down to milliseconds as fio has it."""

    runtime_ms: int
    bw_bytes: int
    iops: float


def rates_of(measured: Measured, way: int) -> Rates:
    runtime_ms = int(measured.result["runtime_ns"][0, way]) // 1_000_000
    if not runtime_ms and measured.result["ios"][0, way]:
        runtime_ms = 1
    bytes_, ios = int(measured.result["bytes"][0, way]), int(measured.result["ios"][0, way])
    if not runtime_ms:
        return Rates(0, 0, 0.0)
    return Rates(runtime_ms, 1000 * bytes_ // runtime_ms, 1000.0 * ios / runtime_ms)


def used_ways(measured: Measured) -> list[int]:
    """Directions that moved something."""
    return [way for way in range(3) if measured.result["ios"][0, way]]


def way_name(measured: Measured, way: int) -> str:
    return "mixed" if measured.is_mixed else DIRECTIONS[way]
