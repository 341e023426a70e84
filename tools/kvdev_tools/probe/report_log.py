"""Logs of bandwidth, latency and IOPS over time: files with fio's names and columns.

Columns: milliseconds, value (KiB/s, nanoseconds, I/Os per second), direction, block size, offset, priority.
Not here: counting (the core).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvdev.errors import CapacityError
from kvdev.native.probe import LOG_DTYPE, LogArray
from kvdev_tools.output import check_output
from kvdev_tools.probe.job import Job
from kvdev_tools.probe.measure import Measured

NS_PER_MS = 1_000_000
LINES_AT_ONCE = 65536


def wants_log(job: Job) -> bool:
    return job.bw_log is not None or job.lat_log is not None or job.iops_log is not None


def _logs_of(job: Job, index: int) -> Iterator[tuple[Path, str]]:
    """The log files of a job, which counts from 1, and what stands in each."""
    for kind, prefix, column in (
        ("bw", job.bw_log, "bw"),
        ("slat", job.lat_log, "slat_ns"),
        ("clat", job.lat_log, "clat_ns"),
        ("lat", job.lat_log, "lat_ns"),
        ("iops", job.iops_log, "iops"),
    ):
        if prefix is not None:
            number = f".{index}" if job.has_job_logs else ""
            yield Path(f"{prefix or job.name}_{kind}{number}.log"), column


def check_logs(jobs: Sequence[Job]) -> None:
    """UsageError unless all logs of a plan can be written."""
    for index, job in enumerate(jobs, 1):
        for path, column in _logs_of(job, index):
            option = {"bw": "write_bw_log", "iops": "write_iops_log"}.get(column, "write_lat_log")
            check_output(f"{job.name}: {option}", str(path))


def write_logs(measured: Sequence[Measured]) -> list[Path]:
    """Write every log that was asked for; returns their names. Jobs without per_job_logs share a file."""
    written: dict[Path, str] = {}
    for index, each in enumerate(measured, 1):
        job = each.job
        if not wants_log(job):
            continue
        entries = np.concatenate(each.log) if each.log else np.empty(0, dtype=LOG_DTYPE)
        for path, column in _logs_of(job, index):
            mode = "a" if path in written else "w"
            written[path] = column
            _write(path, mode, _lines(job, entries, column))
    return list(written)


def _write(path: Path, mode: str, lines: Iterator[str]) -> None:
    try:
        with path.open(mode) as file:
            file.writelines(lines)
    except OSError as error:
        raise CapacityError(f"log: {path}: cannot be written: {error.strerror}") from error


def _lines(job: Job, entries: LogArray, column: str) -> Iterator[str]:
    rows = _each(entries, column) if not job.log_avg_ms else _windows(job, entries, column)
    for time_ms, value, way, size, offset in rows:
        yield f"{time_ms}, {value}, {way}, {size}, {offset if job.has_log_offset else 0}, 0\n"


def _each(entries: LogArray, column: str) -> Iterator[tuple[int, int, int, int, int]]:
    for entry in entries:
        size = int(entry["byte_count"])
        if column == "bw":
            value = int(size * 1_000_000_000 / max(1, int(entry["clat_ns"])) / 1024)
        elif column == "iops":
            value = 1
        else:
            value = int(entry[column])
        yield int(entry["time_ns"]) // NS_PER_MS, value, int(entry["way"]), size, int(entry["offset"])


def _windows(job: Job, entries: LogArray, column: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Means over log_avg_msec, by direction; windows without I/O have no line."""
    if not len(entries):
        return
    window_ns = job.log_avg_ms * NS_PER_MS
    numbers = entries["time_ns"] // np.uint64(window_ns)
    for number in np.unique(numbers):
        inside = entries[numbers == number]
        for way in range(3):
            mine = inside[inside["way"] == way]
            if not len(mine):
                continue
            if column == "bw":
                value = int(mine["byte_count"].sum(dtype=np.uint64)) * 1000 // job.log_avg_ms // 1024
            elif column == "iops":
                value = len(mine) * 1000 // job.log_avg_ms
            else:
                value = int(mine[column].mean())
            size = int(mine["byte_count"][0]) if column not in ("bw", "iops") else 0
            yield (int(number) + 1) * job.log_avg_ms, value, way, size, int(mine["offset"][0])
