"""Jobs: what the options of each section mean together, with every default in its place.

Not here: option texts (``option``); devices (``target``); running (``run``).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdev.errors import UsageError
from kvdev_tools.probe.jobfile import Entry, JobText, Section
from kvdev_tools.probe.option import OPTIONS, Context, Distribution, Rw, SteadyState, Use
from kvdev_tools.probe.value import Size

Three = tuple[int, int, int]
READ, WRITE, TRIM = 0, 1, 2
DIRECTIONS = ("read", "write", "trim")
BS_DEFAULT = 4096
BUFFER_SIZE_MAX = 1 << 30
"""Of one job: depth times the largest block."""
JOB_COUNT_MAX = 4096
PERCENTILES_DEFAULT = (
    1.0,
    5.0,
    10.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    70.0,
    80.0,
    90.0,
    95.0,
    99.0,
    99.5,
    99.9,
    99.95,
    99.99,
)
VERIFY_HEADER_SIZE_BYTES = 40
NOTHING = Size(0)
EVENLY = Distribution()

_SYNC_ENGINES = ("sync", "psync", "vsync", "pvsync", "pvsync2", "mmap", "posixaio")
_URI_SCHEMES = ("tcp:", "vhost:", "file:", "mem:", "vol:", "vol+", "drill+")


@dataclass(frozen=True)
class Blocks:
    """Block sizes of one direction: all of ``splits`` with their percentages, or from ``low`` to ``high``."""

    low: int
    high: int
    align: int
    splits: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Job:
    """One job, or one of the clones that numjobs makes."""

    name: str
    filename: str
    rw: Rw
    blocks: tuple[Blocks, Blocks, Blocks]
    group_index: int = 0
    jobnum: int = 0
    wave_index: int = 0
    """Jobs of a wave run together; the next wave starts when all of one have ended (stonewall)."""
    description: str = ""
    ioengine: str | None = None
    engine: str | None = None
    """Of a file: io_uring or threads; None: whichever is there."""
    direct: bool | None = None
    iodepth: int = 1
    batch_submit: int = 1
    batch_complete_min: int = 1
    batch_complete_max: int = 0
    depth_low: int = 1
    size: Size | None = None
    io_size: Size | None = None
    offset: Size = NOTHING
    offset_increment: Size = NOTHING
    offset_align: int = 0
    number_ios: int = 0
    loops: int = 1
    seed: int = 0
    has_map: bool = True
    distribution: Distribution = EVENLY
    percent_random: Three = (100, 100, 100)
    is_identical: bool = False
    read_percent: int = 50
    fsync: int = 0
    end_fsync: bool = False
    startdelay_us: int = 0
    runtime_us: int = 0
    is_time_based: bool = False
    ramp_us: int = 0
    verify: str = ""
    does_verify: bool = True
    is_verify_only: bool = False
    verify_interval: int = 0
    verify_pattern: bytes = b""
    is_verify_fatal: bool = False
    thinktime_us: int = 0
    thinktime_spin_us: int = 0
    thinktime_blocks: int = 1
    is_thinktime_issue: bool = False
    rate: Three = (0, 0, 0)
    rate_min: Three = (0, 0, 0)
    rate_iops: Three = (0, 0, 0)
    rate_iops_min: Three = (0, 0, 0)
    is_rate_poisson: bool = False
    is_thinktime_forgiven: bool = False
    rate_cycle_ms: int = 1000
    max_latency_us: Three = (0, 0, 0)
    latency_target_us: int = 0
    latency_window_us: int = 0
    latency_percentile: float = 100.0
    is_latency_run: bool = False
    cpus: tuple[int, ...] = ()
    is_cpu_split: bool = False
    exits_all: bool = False
    exit_what: str = "group"
    exits_all_on_error: bool = False
    is_grouped: bool = False
    has_job_logs: bool = True
    bw_log: str | None = None
    lat_log: str | None = None
    iops_log: str | None = None
    log_avg_ms: int = 0
    has_log_offset: bool = False
    bw_window_ms: int = 500
    iops_window_ms: int = 500
    is_zeroes: bool = False
    buffer_pattern: bytes = b""
    has_clat_percentiles: bool = True
    has_lat_percentiles: bool = False
    has_slat_percentiles: bool = False
    percentiles: tuple[float, ...] = PERCENTILES_DEFAULT
    has_lat: bool = True
    has_clat: bool = True
    has_slat: bool = True
    unified: str = "none"
    continues_on: str = "none"
    kb_base: int = 1024
    unit_base: int = 0
    steady: SteadyState | None = None
    steady_duration_us: int = 0
    steady_ramp_us: int = 0
    options: dict[str, str] = field(default_factory=dict)
    """As written, for the output: the section's own, without what was global."""

    @property
    def bs_low(self) -> int:
        return min(self.blocks[way].low for way in range(3) if self.rw.has[way])

    @property
    def bs_high(self) -> int:
        return max(self.blocks[way].high for way in range(3) if self.rw.has[way])

    @property
    def writes(self) -> bool:
        return (self.rw.has[WRITE] or self.rw.has[TRIM]) and not self.is_verify_only


@dataclass(frozen=True)
class Plan:
    """All jobs in order, what was global, and what was ignored on the way."""

    jobs: tuple[Job, ...]
    global_options: dict[str, str]
    warnings: tuple[str, ...]


def make_plan(text: JobText, *, is_read_only: bool = False) -> Plan:
    """Check every option of every job; UsageError names job, option, value and remedy."""
    warnings: dict[str, None] = {}
    jobs: list[Job] = []
    group = wave = 0
    for index, section in enumerate(text.sections):
        values = _values(section.merged(), warnings)
        if index and (values.get("stonewall") or values.get("new_group")):
            group += 1
            wave += bool(values.get("stonewall"))
        job = _job(section, values, warnings)
        if is_read_only and job.writes:
            raise UsageError(
                f"{job.name}: rw: expected a job that only reads, since --readonly is given, "
                f"got {job.rw.name}"
            )
        count = values.get("numjobs", 1)
        if len(jobs) + count > JOB_COUNT_MAX:
            raise UsageError(f"{job.name}: numjobs: expected at most {JOB_COUNT_MAX} jobs in all")
        jobs += [_clone(job, number, group, wave) for number in range(count)]
    shown = {name: entry.text or "" for name, entry in text.globals.items()}
    return Plan(tuple(jobs), shown, tuple(warnings))


def _clone(job: Job, number: int, group: int, wave: int) -> Job:
    cpus = job.cpus
    if cpus and job.is_cpu_split:
        cpus = (cpus[number % len(cpus)],)
    seed = (job.seed + number * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    filename = job.filename.replace("$jobnum", str(number))
    return replace(
        job, jobnum=number, group_index=group, wave_index=wave, cpus=cpus, seed=seed, filename=filename
    )


def _values(entries: dict[str, Entry], warnings: dict[str, None]) -> dict[str, Any]:
    """The options' values; what the text of one depends on is read first."""
    context = Context()
    if base := entries.get("kb_base"):
        context = Context(kb_base=int(_value("kb_base", base, context)))
    values: dict[str, Any] = {}
    for name, entry in entries.items():
        option = OPTIONS[name]
        if option.use is Use.IGNORED:
            note = f": {option.note}" if option.note else ""
            warnings[f"{entry.where}: {name}: has no meaning here and is ignored{note}"] = None
            continue
        values[name] = _value(name, entry, context)
    return values


def _value(name: str, entry: Entry, context: Context) -> Any:
    option = OPTIONS[name]
    if entry.text is None:
        return True if option.is_flag else ""
    try:
        return option.parse(name, entry.text, context)
    except UsageError as error:
        raise UsageError(f"{entry.where}: {error}") from None


def _job(section: Section, values: dict[str, Any], warnings: dict[str, None]) -> Job:
    name = section.name
    rw: Rw = values.get("rw", Rw("read"))
    read_percent = values.get("rwmixread", 100 - values["rwmixwrite"] if "rwmixwrite" in values else 50)
    iodepth = _iodepth(name, values, warnings)
    filename = _filename(name, values)
    blocks = _blocks(name, values, rw)
    fields: dict[str, Any] = {
        "name": name,
        "filename": filename,
        "rw": rw,
        "blocks": blocks,
        "options": {each: entry.text or "" for each, entry in section.options.items() if each != "name"},
        "iodepth": iodepth,
        "read_percent": read_percent,
        "engine": _engine(name, filename, values, warnings),
        "direct": _direct(values, filename),
        "seed": _seed(values),
        "has_map": not values.get("norandommap", False) and "ba" not in values,
        "fsync": values.get("fsync", 0) or values.get("fdatasync", 0),
        "verify": "" if values.get("verify", "0") == "0" else values["verify"],
        "cpus": values.get("cpus_allowed", values.get("cpumask", ())),
        "is_cpu_split": values.get("cpus_allowed_policy") == "split",
        "is_identical": values.get("rw_sequencer") == "identical",
        "is_rate_poisson": values.get("rate_process") == "poisson",
        "is_thinktime_issue": values.get("thinktime_blocks_type") == "issue",
        "kb_base": int(values.get("kb_base", 1024)),
        "unit_base": int(values.get("unit_base", 0)),
    }
    fields.update(_depths(values, iodepth))
    for option, member in _PLAIN.items():
        if option in values:
            fields[member] = values[option]
    if values.get("gtod_reduce"):
        fields.update(has_lat=False, has_clat=False, has_slat=False)
    for option, member in (
        ("disable_lat", "has_lat"),
        ("disable_clat", "has_clat"),
        ("disable_slat", "has_slat"),
    ):
        if values.get(option):
            fields[member] = False
    for option, member in _THREES.items():
        if option in values:
            usual: Three = (100, 100, 100) if option == "percentage_random" else (0, 0, 0)
            given = values[option]
            fields[member] = tuple(usual[way] if given[way] is None else given[way] for way in range(3))
    job = Job(**fields)
    return _checked(job, values, warnings)


_PLAIN = {
    "description": "description",
    "ioengine": "ioengine",
    "size": "size",
    "io_size": "io_size",
    "offset": "offset",
    "offset_increment": "offset_increment",
    "offset_align": "offset_align",
    "number_ios": "number_ios",
    "loops": "loops",
    "random_distribution": "distribution",
    "end_fsync": "end_fsync",
    "startdelay": "startdelay_us",
    "runtime": "runtime_us",
    "time_based": "is_time_based",
    "ramp_time": "ramp_us",
    "do_verify": "does_verify",
    "verify_only": "is_verify_only",
    "verify_interval": "verify_interval",
    "verify_pattern": "verify_pattern",
    "verify_fatal": "is_verify_fatal",
    "thinktime": "thinktime_us",
    "thinktime_spin": "thinktime_spin_us",
    "thinktime_blocks": "thinktime_blocks",
    "rate_ignore_thinktime": "is_thinktime_forgiven",
    "rate_cycle": "rate_cycle_ms",
    "latency_target": "latency_target_us",
    "latency_window": "latency_window_us",
    "latency_percentile": "latency_percentile",
    "latency_run": "is_latency_run",
    "exitall": "exits_all",
    "exit_what": "exit_what",
    "exitall_on_error": "exits_all_on_error",
    "group_reporting": "is_grouped",
    "per_job_logs": "has_job_logs",
    "write_bw_log": "bw_log",
    "write_lat_log": "lat_log",
    "write_iops_log": "iops_log",
    "log_avg_msec": "log_avg_ms",
    "log_offset": "has_log_offset",
    "bwavgtime": "bw_window_ms",
    "iopsavgtime": "iops_window_ms",
    "zero_buffers": "is_zeroes",
    "buffer_pattern": "buffer_pattern",
    "clat_percentiles": "has_clat_percentiles",
    "lat_percentiles": "has_lat_percentiles",
    "slat_percentiles": "has_slat_percentiles",
    "percentile_list": "percentiles",
    "unified_rw_reporting": "unified",
    "continue_on_error": "continues_on",
    "steadystate": "steady",
    "steadystate_duration": "steady_duration_us",
    "steadystate_ramp_time": "steady_ramp_us",
}
"""Options that are one field each."""
_THREES = {
    "rate": "rate",
    "rate_min": "rate_min",
    "rate_iops": "rate_iops",
    "rate_iops_min": "rate_iops_min",
    "percentage_random": "percent_random",
    "max_latency": "max_latency_us",
}


def _iodepth(name: str, values: dict[str, Any], warnings: dict[str, None]) -> int:
    iodepth = int(values.get("iodepth", 1))
    if iodepth > 1 and values.get("ioengine") in _SYNC_ENGINES:
        warnings[
            f"{name}: iodepth: {values['ioengine']} has one I/O at a time, as in fio: the depth is 1"
        ] = None
        return 1
    return iodepth


def _depths(values: dict[str, Any], iodepth: int) -> dict[str, int]:
    low = values.get("iodepth_low", 0)
    batch = values.get("iodepth_batch", 1)
    least = min(values.get("iodepth_batch_complete_min", 1), iodepth)
    return {
        "depth_low": iodepth if not low or low > iodepth else low,
        "batch_submit": iodepth if not batch or batch > iodepth else batch,
        "batch_complete_min": least,
        "batch_complete_max": max(values.get("iodepth_batch_complete_max", 0), least),
    }


def is_uri(filename: str) -> bool:
    return filename.startswith(_URI_SCHEMES)


def _filename(name: str, values: dict[str, Any]) -> str:
    filename = values.get("filename")
    if filename is None:
        # As fio names the one file of a job.
        filename = f"{name.replace('/', '_')}.$jobnum.0"
    elif is_uri(filename):
        return str(filename)
    else:
        pieces = [piece.replace("\0", ":") for piece in filename.replace("\\:", "\0").split(":")]
        if len(pieces) > 1:
            raise UsageError(
                f"{name}: filename: expected one device or file, got {len(pieces)}; give each its own job, "
                f"and write \\: for a colon in a path"
            )
        filename = pieces[0]
    if directory := values.get("directory"):
        return str(Path(directory) / filename)
    return str(filename)


def _engine(name: str, filename: str, values: dict[str, Any], warnings: dict[str, None]) -> str | None:
    engine = values.get("ioengine")
    if engine is None:
        return None
    known = {"io_uring": "io_uring", "libaio": None, **dict.fromkeys(_SYNC_ENGINES, "threads")}
    if is_uri(filename) and not filename.startswith("file:"):
        warnings[
            f"{name}: ioengine={engine}: {filename} has its own way to the device; the engine is ignored"
        ] = None
        return None
    if engine not in known:
        raise UsageError(
            f"{name}: ioengine: expected one of {', '.join(known)}, or a filename that is a device's URI, "
            f"got {engine!r:.40}"
        )
    found = known[engine]
    if engine != found:
        warnings[f"{name}: ioengine={engine}: files are read and written by {found or 'io_uring'} here"] = (
            None
        )
    return found


def _direct(values: dict[str, Any], filename: str) -> bool | None:
    if "direct" in values:
        return bool(values["direct"])
    if "buffered" in values:
        return not values["buffered"]
    return None if is_uri(filename) else False


def _seed(values: dict[str, Any]) -> int:
    if "randseed" in values:
        return int(values["randseed"]) & ((1 << 64) - 1)
    if values.get("randrepeat", True):
        return 0x6B766465765F7072
    return int.from_bytes(os.urandom(8), "little")


def _blocks(name: str, values: dict[str, Any], rw: Rw) -> tuple[Blocks, Blocks, Blocks]:
    def of(option: str, way: int) -> Any:
        given = values.get(option)
        return None if given is None else given[way]

    found = []
    for way in range(3):
        size = of("bs", way) or BS_DEFAULT
        low, high = of("bsrange", way) or (size, size)
        splits = of("bssplit", way) or ()
        if splits:
            low, high = min(each for each, _ in splits), max(each for each, _ in splits)
        align = of("ba", way) or low
        if align % low and low % align:
            raise UsageError(
                f"{name}: ba: expected a multiple or divisor of the block size {low}, got {align}"
            )
        found.append(Blocks(low, high, align, splits))
    if values.get("bs_is_seq_rand") and len(set(found)) > 1:
        raise UsageError(f"{name}: bs_is_seq_rand: expected one block size with it; write one job for each")
    del rw
    return found[0], found[1], found[2]


def _checked(job: Job, values: dict[str, Any], warnings: dict[str, None]) -> Job:
    """What options forbid, or make of, each other."""
    name = job.name
    if (any(job.rate) and any(job.rate_iops)) or (any(job.rate_min) and any(job.rate_iops_min)):
        raise UsageError(f"{name}: rate, rate_iops: expected one of the two")
    for way in range(3):
        if job.rate[way] and job.rate[way] < job.rate_min[way]:
            raise UsageError(
                f"{name}: rate_min: expected at most the rate {job.rate[way]}, got {job.rate_min[way]}"
            )
        if job.rate_iops[way] and job.rate_iops[way] < job.rate_iops_min[way]:
            raise UsageError(
                f"{name}: rate_iops_min: expected at most rate_iops {job.rate_iops[way]}, got {job.rate_iops_min[way]}"
            )
    if job.is_time_based and not job.runtime_us:
        raise UsageError(f"{name}: time_based: expected a runtime with it")
    if job.iodepth * job.bs_high > BUFFER_SIZE_MAX:
        raise UsageError(
            f"{name}: iodepth: expected at most {BUFFER_SIZE_MAX} bytes of payload (iodepth times block size), "
            f"got {job.iodepth * job.bs_high}"
        )
    if "ba" in values and job.rw.is_random and not values.get("norandommap"):
        warnings[f"{name}: ba: random offsets have no map, as with norandommap"] = None
    if job.distribution.kind != "random":
        job = replace(job, has_map=False)
    if job.thinktime_spin_us > job.thinktime_us:
        job = replace(job, thinktime_spin_us=job.thinktime_us)
    if job.latency_target_us and not job.latency_window_us:
        job = replace(job, latency_window_us=job.latency_target_us)
    if job.verify:
        job = _verify_checked(job)
    elif job.is_verify_only:
        raise UsageError(f"{name}: verify_only: expected verify=crc32c or verify=pattern with it")
    return job


def _verify_checked(job: Job) -> Job:
    blocks = job.blocks[WRITE] if job.rw.has[WRITE] else job.blocks[READ]
    interval = job.verify_interval or blocks.low
    sizes = [size for size, _ in blocks.splits] or [blocks.low, blocks.high]
    if job.verify_interval and any(size % interval for size in sizes):
        raise UsageError(
            f"{job.name}: verify_interval: expected a divisor of the block size "
            f"{next(size for size in sizes if size % interval)}, got {interval}"
        )
    if any(size % interval for size in sizes):
        interval = math.gcd(*sizes)
    if job.verify == "crc32c" and interval < VERIFY_HEADER_SIZE_BYTES + 8:
        raise UsageError(
            f"{job.name}: verify_interval: expected at least {VERIFY_HEADER_SIZE_BYTES + 8} bytes for header and "
            f"payload, got {interval}"
        )
    if job.verify == "pattern" and not job.verify_pattern:
        raise UsageError(f"{job.name}: verify=pattern: expected verify_pattern with it")
    if job.rw.has[TRIM]:
        raise UsageError(f"{job.name}: verify: expected a job that does not trim, got rw={job.rw.name}")
    return replace(job, verify_interval=interval)
