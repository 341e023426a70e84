"""Every option of a job: its name, what values it takes, and what a probe does with it.

Not here: values (``value``); files and sections (``jobfile``); what the options of one job mean together (``job``).
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvdev.errors import UsageError
from kvdev_tools.probe import value as parse
from kvdev_tools.probe.value import bad

INT_MAX = (1 << 31) - 1
IODEPTH_MAX = 4096
NUMJOBS_MAX = 1024


class Use(enum.Enum):
    """What becomes of an option that fio has."""

    TAKEN = "taken"
    IGNORED = "ignored"
    """It has no meaning here: a warning."""
    REFUSED = "refused"
    """It would change what is measured, and is not there: an error."""


@dataclass(frozen=True)
class Context:
    """What the meaning of a text depends on."""

    kb_base: int = 1024


Parser = Callable[[str, str, Context], Any]


@dataclass(frozen=True)
class Option:
    """One option; ``is_flag`` needs no value (and with 0 is off)."""

    name: str
    parse: Parser
    aliases: tuple[str, ...] = ()
    use: Use = Use.TAKEN
    is_flag: bool = False
    needs_value: bool = True
    note: str = ""
    """Of one that is ignored or refused: why, or what to do."""


def _size(*, low: int = 0, percent: bool = False) -> Parser:
    def read(name: str, text: str, context: Context) -> Any:
        size = parse.parse_size(name, text, kb_base=context.kb_base, may_be_percent=percent)
        if size.value < low:
            raise bad(name, text, f"{low} or more")
        return size if percent else size.value

    return read


def _int(low: int = 0, high: int = INT_MAX) -> Parser:
    return lambda name, text, context: parse.parse_int(
        name, text, low=low, high=high, kb_base=context.kb_base
    )


def _time(unit: str) -> Parser:
    return lambda name, text, _: parse.parse_time_us(name, text, default_unit=unit)


def _float(low: float, high: float) -> Parser:
    return lambda name, text, _: parse.parse_float(name, text, low=low, high=high)


def _bool(name: str, text: str, _: Context) -> bool:
    return parse.parse_bool(name, text)


def _text(name: str, text: str, _: Context) -> str:
    if not text.strip() or "\0" in text:
        raise bad(name, text, "a text")
    return text.strip()


def _any(_name: str, text: str, _: Context) -> str:
    return text.strip()


def _choice(*names: str, **also: str) -> Parser:
    """One of the names; ``also`` maps other spellings to them."""

    def read(name: str, text: str, _: Context) -> str:
        word = text.strip()
        word = also.get(word, word)
        if word not in names:
            close = difflib.get_close_matches(word, names, 1)
            raise bad(name, text, ", ".join(names) + (f" (did you mean {close[0]}?)" if close else ""))
        return word

    return read


def _three(inner: Parser) -> Parser:
    """Up to three parts: read, write and trim; None keeps the default."""

    def read(name: str, text: str, context: Context) -> tuple[Any, Any, Any]:
        parts = parse.split_directions(name, text)
        values = [None if part is None else inner(name, part, context) for part in parts]
        return values[0], values[1], values[2]

    return read


def _range(name: str, text: str, context: Context) -> tuple[int, int]:
    return parse.parse_range(name, text, kb_base=context.kb_base)


def _split(name: str, text: str, context: Context) -> tuple[tuple[int, int], ...]:
    return parse.parse_bssplit(name, text, kb_base=context.kb_base)


RW_NAMES = {
    "read": (1, 0, 0, False),
    "write": (0, 1, 0, False),
    "trim": (0, 0, 1, False),
    "randread": (1, 0, 0, True),
    "randwrite": (0, 1, 0, True),
    "randtrim": (0, 0, 1, True),
    "rw": (1, 1, 0, False),
    "readwrite": (1, 1, 0, False),
    "randrw": (1, 1, 0, True),
    "trimwrite": (0, 1, 1, False),
    "randtrimwrite": (0, 1, 1, True),
}


@dataclass(frozen=True)
class Rw:
    """Direction and order of a job's I/O; ``sequence`` is what follows the colon: I/Os per offset, or a stride."""

    name: str
    sequence: int = 0

    @property
    def is_random(self) -> bool:
        return RW_NAMES[self.name][3]

    @property
    def has(self) -> tuple[bool, bool, bool]:
        """Whether it reads, writes, trims."""
        read, write, trim, _ = RW_NAMES[self.name]
        return bool(read), bool(write), bool(trim)


def _rw(name: str, text: str, context: Context) -> Rw:
    word, colon, rest = text.strip().partition(":")
    known = tuple(RW_NAMES)
    if word.startswith("kv"):
        raise bad(name, text, f"{', '.join(known)}; pages of a KV namespace are measured by `kvdev replay`")
    if word not in known:
        close = difflib.get_close_matches(word, known, 1)
        raise bad(name, text, ", ".join(known) + (f" (did you mean {close[0]}?)" if close else ""))
    if not colon:
        return Rw(word)
    random = RW_NAMES[word][3]
    count = parse.parse_size(name, rest, kb_base=context.kb_base).value
    if random and count < 1:
        raise bad(name, text, "1 or more I/Os per offset after the colon")
    return Rw(word, count)


@dataclass(frozen=True)
class Distribution:
    """How random offsets are spread: ``kind`` with theta, power or deviation in ``value``; ``center`` -1: anywhere."""

    kind: str = "random"
    value: float = 0.0
    center: float = -1.0


def _distribution(name: str, text: str, _: Context) -> Distribution:
    kind, *rest = text.strip().split(":")
    usual = {"random": 0.0, "zipf": 1.1, "pareto": 0.2, "normal": 0.0}
    if kind not in usual:
        more = "; zones and zoned_abs are not there" if kind.startswith("zoned") else ""
        raise bad(name, text, f"random, zipf:THETA, pareto:POWER or normal:DEVIATION{more}")
    if len(rest) > (0 if kind == "random" else 2):
        raise bad(name, text, f"{kind} with at most a value and a center")
    value = parse.parse_float(name, rest[0], low=0.0, high=1e6) if rest else usual[kind]
    if kind == "zipf" and (value <= 0.0 or value == 1.0):
        raise bad(name, text, "a theta above 0 that is not 1")
    if kind == "pareto" and not 0.0 < value < 1.0:
        raise bad(name, text, "a power between 0 and 1")
    if kind == "normal" and not 0.0 <= value < 100.0:
        raise bad(name, text, "a deviation of 0 to below 100 percent")
    center = parse.parse_float(name, rest[1], low=0.0, high=1.0) if len(rest) > 1 else -1.0
    return Distribution(kind, value, center)


@dataclass(frozen=True)
class SteadyState:
    """``kind`` is iops, iops_slope, bw or bw_slope; the limit is absolute or a percentage of the mean."""

    kind: str
    limit: float
    is_percent: bool


def _steady(name: str, text: str, context: Context) -> SteadyState:
    kind, colon, limit_text = text.strip().partition(":")
    if kind not in ("iops", "iops_slope", "bw", "bw_slope") or not colon:
        raise bad(name, text, "iops:LIMIT, iops_slope:LIMIT, bw:LIMIT or bw_slope:LIMIT, such as iops:2%")
    if limit_text.endswith("%"):
        return SteadyState(kind, parse.parse_float(name, limit_text[:-1], low=0.0, high=100.0), True)
    if kind.startswith("bw"):
        return SteadyState(kind, float(parse.parse_bytes(name, limit_text, kb_base=context.kb_base)), False)
    return SteadyState(kind, parse.parse_float(name, limit_text, low=0.0, high=1e12), False)


def _cpus(name: str, text: str, _: Context) -> tuple[int, ...]:
    return parse.parse_cpus(name, text)


def _cpumask(name: str, text: str, context: Context) -> tuple[int, ...]:
    mask = parse.parse_int(name, text, low=1, kb_base=context.kb_base)
    return tuple(index for index in range(64) if mask >> index & 1)


def _percentiles(name: str, text: str, _: Context) -> tuple[float, ...]:
    return parse.parse_percentiles(name, text)


def _pattern(name: str, text: str, _: Context) -> bytes:
    return parse.parse_pattern(name, text)


def _unified(name: str, text: str, _: Context) -> str:
    word = {"0": "none", "1": "mixed", "2": "both"}.get(text.strip(), text.strip())
    if word not in ("none", "mixed", "both"):
        raise bad(name, text, "none, mixed or both")
    return word


_CONTINUE = ("none", "read", "write", "io", "verify", "all")


def _taken() -> list[Option]:
    flag = {"is_flag": True}
    return [
        Option("name", _text),
        Option("description", _text),
        Option("filename", _text),
        Option("directory", _text),
        Option("ioengine", _text),
        Option("rw", _rw, ("readwrite",)),
        Option("rw_sequencer", _choice("sequential", "identical")),
        Option("iodepth", _int(1, IODEPTH_MAX)),
        Option("iodepth_batch", _int(1), ("iodepth_batch_submit",)),
        Option("iodepth_batch_complete_min", _int(0), ("iodepth_batch_complete",)),
        Option("iodepth_batch_complete_max", _int(0)),
        Option("iodepth_low", _int(0)),
        Option("size", _size(percent=True)),
        Option("io_size", _size(percent=True), ("io_limit",)),
        Option("offset", _size(percent=True)),
        Option("offset_increment", _size(percent=True)),
        Option("offset_align", _int(0)),
        Option("number_ios", _size()),
        Option("bs", _three(_size(low=1)), ("blocksize",)),
        Option("ba", _three(_size()), ("blockalign",)),
        Option("bsrange", _three(_range), ("blocksize_range",)),
        Option("bssplit", _three(_split)),
        Option("bs_is_seq_rand", _bool),
        Option("randrepeat", _bool, ("allrandrepeat",)),
        Option("randseed", _size()),
        Option("norandommap", _bool, **flag),  # type: ignore[arg-type]
        Option("random_distribution", _distribution),
        Option("percentage_random", _three(_int(0, 100))),
        Option("fsync", _int(0)),
        Option("fdatasync", _int(0)),
        Option("end_fsync", _bool),
        Option("direct", _bool),
        Option("buffered", _bool),
        Option("loops", _int(1)),
        Option("numjobs", _int(1, NUMJOBS_MAX)),
        Option("startdelay", _time("s")),
        Option("runtime", _time("s"), ("timeout",)),
        Option("time_based", _bool, **flag),  # type: ignore[arg-type]
        Option("ramp_time", _time("s")),
        Option("verify", _choice("0", "crc32c", "pattern", **{"crc32c-intel": "crc32c", "null": "0"})),
        Option("do_verify", _bool),
        Option("verify_only", _bool, **flag),  # type: ignore[arg-type]
        Option("verify_interval", _int(0)),
        Option("verify_pattern", _pattern),
        Option("verify_fatal", _bool),
        Option("rwmixread", _int(0, 100)),
        Option("rwmixwrite", _int(0, 100)),
        Option("thinktime", _time("us")),
        Option("thinktime_spin", _time("us")),
        Option("thinktime_blocks", _int(1)),
        Option("thinktime_blocks_type", _choice("complete", "issue")),
        Option("rate", _three(_size())),
        Option("rate_min", _three(_size()), ("ratemin",)),
        Option("rate_iops", _three(_int(0))),
        Option("rate_iops_min", _three(_int(0))),
        Option("rate_process", _choice("linear", "poisson")),
        Option("rate_cycle", _int(1), ("ratecycle",)),
        Option("rate_ignore_thinktime", _bool),
        Option("max_latency", _three(_time("us"))),
        Option("latency_target", _time("us")),
        Option("latency_window", _time("us")),
        Option("latency_percentile", _float(0.0, 100.0)),
        Option("latency_run", _bool),
        Option("cpus_allowed", _cpus),
        Option("cpumask", _cpumask),
        Option("cpus_allowed_policy", _choice("shared", "split")),
        Option("exitall", _bool, **flag),  # type: ignore[arg-type]
        Option("exit_what", _choice("group", "stonewall", "all")),
        Option("exitall_on_error", _bool, **flag),  # type: ignore[arg-type]
        Option("stonewall", _bool, ("wait_for_previous",), **flag),  # type: ignore[arg-type]
        Option("new_group", _bool, **flag),  # type: ignore[arg-type]
        Option("group_reporting", _bool, **flag),  # type: ignore[arg-type]
        Option("per_job_logs", _bool),
        Option("write_bw_log", _any, needs_value=False),
        Option("write_lat_log", _any, needs_value=False),
        Option("write_iops_log", _any, needs_value=False),
        Option("log_avg_msec", _int(0)),
        Option("log_offset", _bool),
        Option("bwavgtime", _int(1)),
        Option("iopsavgtime", _int(1)),
        Option("zero_buffers", _bool, **flag),  # type: ignore[arg-type]
        Option("buffer_pattern", _pattern),
        Option("clat_percentiles", _bool),
        Option("lat_percentiles", _bool),
        Option("slat_percentiles", _bool),
        Option("percentile_list", _percentiles),
        Option("disable_lat", _bool),
        Option("disable_clat", _bool),
        Option("disable_slat", _bool),
        Option("gtod_reduce", _bool),
        Option("unified_rw_reporting", _unified),
        Option("continue_on_error", _choice(*_CONTINUE, **{"0": "none", "1": "all"})),
        Option("kb_base", _choice("1024", "1000")),
        Option("unit_base", _choice("0", "8", "1")),
        Option("steadystate", _steady, ("ss",)),
        Option("steadystate_duration", _time("s"), ("ss_dur",)),
        Option("steadystate_ramp_time", _time("s"), ("ss_ramp",)),
    ]


_IGNORED: dict[str, str] = {
    "thread": "jobs are always threads",
    "softrandommap": "the map of random offsets never lacks memory here: a job that cannot have it is refused",
    "random_generator": "offsets come from one generator, of equal quality",
    "invalidate": "no page cache is emptied; use direct=1",
    "fadvise_hint": "devices take no hints",
    "fallocate": "devices are as large as they are",
    "create_serialize": "files are made before any job starts",
    "create_fsync": "files are made before any job starts",
    "create_on_open": "files are made before any job starts",
    "openfiles": "a job has one device",
    "refill_buffers": "payload is filled once, or for each write where verify needs it",
    "scramble_buffers": "payload is filled once, or for each write where verify needs it",
    "bs_unaligned": "blocks are whole blocks of the device",
    "mem": "payload lies in a staging arena",
    "iomem": "payload lies in a staging arena",
    "iomem_align": "payload is aligned for any device",
    "mem_align": "payload is aligned for any device",
    "hugepage-size": "payload lies in a staging arena",
    "lockmem": "no memory is locked away",
    "clocksource": "times are CLOCK_MONOTONIC",
    "gtod_cpu": "times are CLOCK_MONOTONIC",
    "ioscheduler": "the device's scheduler is left as it is",
    "nice": "start kvdev under nice",
    "prio": "start kvdev under ionice",
    "prioclass": "start kvdev under ionice",
    "uid": "start kvdev as that user",
    "gid": "start kvdev as that group",
    "cgroup": "start kvdev in that cgroup",
    "cgroup_weight": "start kvdev in that cgroup",
    "cgroup_nodelete": "start kvdev in that cgroup",
    "numa_cpu_nodes": "use cpus_allowed",
    "numa_mem_policy": "use cpus_allowed",
    "verify_async": "what is read is checked by the job's own thread",
    "verify_async_cpus": "what is read is checked by the job's own thread",
    "verify_dump": "the error says where and what",
    "verifysort": "",
    "verifysort_nr": "",
    "verify_state_save": "no state is kept: verify_only works from the job's own options",
    "verify_state_load": "no state is kept: verify_only works from the job's own options",
    "disk_util": "not of this host's disks, which may not be under the device",
    "disable_bw_measurement": "",
    "disable_bw": "",
    "significant_figures": "figures are printed as fio's usual four",
    "log_entries": "logs grow as they need",
    "log_compression": "",
    "log_compression_cpus": "",
    "log_store_compressed": "",
    "log_prio": "",
    "log_unix_epoch": "",
    "log_alternate_epoch": "",
    "log_alternate_epoch_clock_id": "",
    "stats": "every job has statistics",
    "error_dump": "errors are always said",
    "io_submit_mode": "a job's own thread submits",
    "write_barrier": "",
    "rwmixcycle": "",
    "unlink": "",
    "unlink_each_loop": "",
    "fsync_on_close": "use end_fsync",
    "overwrite": "blocks of a device are always overwritten",
    "allow_mounted_write": "use --destroy",
    "unique_filename": "",
    "filename_format": "",
    "lockfile": "",
    "create_only": "",
    "allow_file_create": "",
    "pre_read": "",
    "block_error_percentiles": "",
    "registerfiles": "of fio's io_uring engine: files are always registered where the kernel can",
    "fixedbufs": "of fio's io_uring engine: memory is always registered where the kernel can",
    "nonvectored": "of fio's io_uring engine",
    "sqthread_poll": "of fio's io_uring engine",
    "sqthread_poll_cpu": "of fio's io_uring engine",
    "cmdprio_percentage": "of fio's engines",
    "userspace_reap": "of fio's libaio engine",
    "hipri": "write file:PATH?poll=on",
    "serialize_overlap": "",
}
_REFUSED: dict[str, str] = {
    "nrfiles": "a job has one device: give each its job",
    "file_service_type": "a job has one device: give each its job",
    "filesize": "use size",
    "opendir": "name one device per job",
    "file_append": "use offset",
    "fill_device": "use size=100%",
    "sync_file_range": "use fsync",
    "sync": "use fsync=1",
    "atomic": "",
    "wait_for": "use stonewall",
    "verify_offset": "the header is at the start of its interval",
    "verify_backlog": "verification follows the writes of a job",
    "verify_backlog_batch": "verification follows the writes of a job",
    "experimental_verify": "",
    "trim_percentage": "use rw=randtrimwrite",
    "trim_verify_zero": "",
    "trim_backlog": "",
    "trim_backlog_batch": "",
    "write_iolog": "",
    "read_iolog": "kvdev replay replays a trace of pages",
    "read_iolog_chunked": "",
    "replay_no_stall": "",
    "replay_redirect": "",
    "replay_scale": "",
    "replay_align": "",
    "replay_time_scale": "",
    "replay_skip": "",
    "merge_blktrace_file": "",
    "merge_blktrace_scalars": "",
    "merge_blktrace_iters": "",
    "exec_prerun": "a probe runs no commands",
    "exec_postrun": "a probe runs no commands",
    "zonemode": "",
    "zonesize": "",
    "zonecapacity": "",
    "zonerange": "",
    "zoneskip": "",
    "read_beyond_wp": "",
    "max_open_zones": "",
    "job_max_open_zones": "",
    "ignore_zone_limits": "",
    "zone_reset_threshold": "",
    "zone_reset_frequency": "",
    "thinktime_iotime": "use thinktime_blocks",
    "write_hint": "",
    "write_hist_log": "use output-format=json+",
    "log_hist_msec": "use output-format=json+",
    "log_hist_coarseness": "use output-format=json+",
    "log_max_value": "logs hold means",
    "log_window_value": "logs hold means",
    "buffer_compress_percentage": "payload is random, or buffer_pattern",
    "buffer_compress_chunk": "payload is random, or buffer_pattern",
    "dedupe_percentage": "payload is random, or buffer_pattern",
    "dedupe_mode": "",
    "dedupe_global": "",
    "dedupe_working_set_percentage": "",
    "ignore_error": "use continue_on_error",
    "profile": "",
    "flow": "",
    "flow_id": "",
    "flow_watermark": "",
    "flow_sleep": "",
}


def _table() -> dict[str, Option]:
    options = _taken()
    options += [
        Option(name, _any, use=Use.IGNORED, note=note, needs_value=False) for name, note in _IGNORED.items()
    ]
    options += [
        Option(name, _any, use=Use.REFUSED, note=note, needs_value=False) for name, note in _REFUSED.items()
    ]
    return {name: option for option in options for name in (option.name, *option.aliases)}


OPTIONS: Mapping[str, Option] = _table()
"""By name and alias."""


def find_option(name: str, *, where: str) -> Option:
    """The option of a name or alias; UsageError names the nearest one there is."""
    found = OPTIONS.get(name)
    if found is None:
        taken = [each for each, option in OPTIONS.items() if option.use is Use.TAKEN]
        close = difflib.get_close_matches(name, taken, 1, 0.5) or difflib.get_close_matches(
            name, list(OPTIONS), 1
        )
        nearest = f"; did you mean {close[0]}?" if close else "; `kvdev probe --help-options` lists them"
        raise UsageError(f"{where}: {name!r:.80}: unknown option{nearest}")
    if found.use is Use.REFUSED:
        remedy = f"; {found.note}" if found.note else "; leave it out"
        raise UsageError(f"{where}: {name}: kvdev probe does not have this option of fio{remedy}")
    return found
