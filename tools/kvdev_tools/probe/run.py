"""Running jobs: wave after wave, each job on a thread of its own, all of a wave starting together.

Not here: a job's I/O (the core); what is printed (``report_*``).
Threads: the caller's waits and looks; Ctrl-C there ends the jobs, and what they measured is kept.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Deadline
from kvdev.errors import KvdevError, UsageError
from kvdev.native.probe import BadReason, EndReason, LogArray, Probe, ResultArray, Verdict
from kvdev.uri import FileUri, MemUri
from kvdev_tools.probe.guard import check_growable, check_read_sizes, check_writable
from kvdev_tools.probe.job import READ, TRIM, WRITE, Job, Plan
from kvdev_tools.probe.measure import Measured
from kvdev_tools.probe.report_log import wants_log
from kvdev_tools.probe.steady import SteadyWatch
from kvdev_tools.probe.target import Opener, Target, buffer_stride, prepare_file, uri_of

SLICE_NS = 200_000_000
LOOK_S = 0.1
LOG_COUNT = 65536
START_NS = 3_000_000
START_JOB_NS = 200_000
"""Time for the threads of a wave to be there when it starts."""

_DISTRIBUTIONS = {"random": 0, "zipf": 1, "pareto": 2, "normal": 3}
_VERIFY = {"": 0, "crc32c": 1, "pattern": 2}
_CONTINUES = {"none": 0, "read": 1, "write": 2, "io": 3, "verify": 4, "all": 7}


@dataclass
class Status:
    """How far a wave is, for a status line."""

    running: int
    bytes: tuple[int, int, int]
    ios: tuple[int, int, int]
    elapsed_s: float
    expected_s: float | None


@dataclass
class Outcome:
    """What came of a run."""

    measured: list[Measured] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One line for each job that failed."""
    interrupt: BaseException | None = None
    failure: Exception | None = None
    """Why the waves from some one on did not run; its line is among the problems."""
    has_bad_data: bool = False


class JobRun:
    """One job: its device, its probe and its thread."""

    def __init__(self, job: Job, target: Target) -> None:
        self.job = job
        self.target = target
        self.probe = Probe(
            make_params(job, target), target.members, queue=target.queue, keep=(target.arena, target.devices)
        )
        self.failure: BaseException | None = None
        self.log: list[LogArray] = []
        self.started_ns = self.ended_ns = 0
        self.usage: tuple[Any, Any] | None = None
        self.steady = (
            SteadyWatch(job.steady, duration_us=job.steady_duration_us, ramp_us=job.steady_ramp_us)
            if job.steady is not None
            else None
        )
        self.seen: tuple[int, int, int] = (0, 0, 0)
        """Nanoseconds, bytes and I/Os at the last sample."""
        self.thread_id = 0
        self._thread = threading.Thread(target=self._work, name=f"probe {job.name}.{job.jobnum}", daemon=True)

    def start(self, start_ns: int, ended: threading.Condition) -> None:
        self._ended = ended
        self.started_ns = start_ns
        self.seen = (start_ns + (self.job.startdelay_us + self.job.ramp_us) * 1000, 0, 0)
        self.probe.set_start(start_ns + self.job.startdelay_us * 1000)
        self._thread.start()

    @property
    def is_ended(self) -> bool:
        return self.ended_ns != 0

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        self.thread_id = threading.get_native_id()
        try:
            if self.job.cpus:
                os.sched_setaffinity(0, self.job.cpus)
            with self.target.queue.lock if self.target.queue is not None else contextlib.nullcontext():
                self._drive()
        except BaseException as error:  # handed to the caller's thread
            self.failure = error
            if self.target.queue is not None:
                self.target.queue.abandon()
        finally:
            with self._ended:
                self.ended_ns = SYSTEM_CLOCK.monotonic_ns()
                self._ended.notify_all()

    def _drive(self) -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        while (verdict := self.probe.run(SLICE_NS)) is not Verdict.DONE:
            if verdict is Verdict.LOG_FULL:
                self.log.append(self.probe.take_log(LOG_COUNT))
            else:
                self.probe.look_after()
        self.log.append(self.probe.take_log(LOG_COUNT))
        self.usage = (before, resource.getrusage(resource.RUSAGE_THREAD))

    def _used(self) -> tuple[float, float, int, int, int]:
        """Seconds of user and system time, context switches, major and minor faults of the thread."""
        if self.usage is None:
            return 0.0, 0.0, 0, 0, 0
        before, after = self.usage
        return (
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw,
            after.ru_majflt - before.ru_majflt,
            after.ru_minflt - before.ru_minflt,
        )

    def measured(self) -> Measured:
        result = self.probe.result()
        error = int(result["first_error"][0])
        if not error and result["end_reason"][0] in (EndReason.RATE, EndReason.LATENCY):
            error = 62  # ETIME, as fio reports a rate or latency that was not held
        user_s, system_s, switches, major_faults, minor_faults = self._used()
        began = int(result["began_ns"][0]) or self.started_ns
        return Measured(
            job=self.job,
            result=result,
            error=error,
            user_s=user_s,
            system_s=system_s,
            switches=switches,
            major_faults=major_faults,
            minor_faults=minor_faults,
            wall_s=max(0, (int(result["ended_ns"][0]) or self.ended_ns) - began) / NS_PER_S,
            thread_id=self.thread_id,
            log=self.log,
            steady=self.steady.found() if self.steady is not None else None,
        )


def make_params(job: Job, target: Target) -> dict[str, Any]:
    """The core's parameters of a job on its device; UsageError when the job does not fit it."""
    start, size = region_of(job, target)
    io_size = job.io_size.of(target.size_bytes) if job.io_size is not None else size
    stride = buffer_stride(job)
    fields = _params_of_io(job, target) | _params_of_pace(job)
    return fields | {
        "start": start,
        "size": size,
        "io_size": 0 if job.is_time_based else io_size,
        "buffer_addr": target.arena.address,
        "buffer_stride": stride,
        "generation": int.from_bytes(os.urandom(8), "little"),
        "log_capacity": max(LOG_COUNT, 4 * job.iodepth) if wants_log(job) else 0,
    }


def region_of(job: Job, target: Target) -> tuple[int, int]:
    """Where a job's offsets begin, and how much lies before their end."""
    whole, block = target.size_bytes, target.block_size_bytes
    start = job.offset.of(whole) + job.jobnum * job.offset_increment.of(whole)
    align = max(job.offset_align, block) if job.offset.is_percent or job.offset_align else block
    if job.offset.is_percent or job.offset_increment.is_percent or job.offset_align:
        start = start // align * align
    size = job.size.of(whole) if job.size is not None else whole - start
    if job.size is not None and job.size.is_percent:
        size = min(size, whole - start)
    size -= size % block
    for way in range(3):
        blocks = job.blocks[way]
        sizes = [blocks.low, blocks.align, *(each for each, _ in blocks.splits)]
        if job.rw.has[way] and any(each % block for each in sizes):
            raise UsageError(
                f"{job.name}: bs: expected multiples of {block} bytes, the block size of {target.uri}, got "
                f"{next(each for each in sizes if each % block)}"
            )
    if start % block or start < 0:
        raise UsageError(f"{job.name}: offset: expected a multiple of the block size {block}, got {start}")
    if start >= whole:
        option = "offset_increment" if job.offset.of(whole) < whole else "offset"
        raise UsageError(
            f"{job.name}: {option}: expected an offset below the {whole} bytes of {target.uri}, got {start}"
        )
    if job.bs_low > whole - start:
        raise UsageError(
            f"{job.name}: bs: expected at most the {whole - start} bytes that {target.uri} has from offset {start} on, "
            f"got {job.bs_low}"
        )
    if start + size > whole:
        raise UsageError(
            f"{job.name}: size: expected offset and size within the {whole} bytes of {target.uri}, got {start} + {size}"
        )
    if size < job.bs_low:
        raise UsageError(f"{job.name}: size: expected at least one block of {job.bs_low} bytes, got {size}")
    return start, size


def _params_of_io(job: Job, target: Target) -> dict[str, Any]:
    blocks = [
        {
            "low": each.low,
            "high": each.high,
            "align": each.align,
            "percent_random": job.percent_random[way],
            "split_count": len(each.splits),
            "split_size": [size for size, _ in each.splits],
            "split_percent": [percent for _, percent in each.splits],
        }
        for way, each in enumerate(job.blocks)
    ]
    pattern = job.verify_pattern if job.verify else job.buffer_pattern
    return {
        "blocks": blocks,
        "block_size_bytes": target.block_size_bytes,
        "strip_size_bytes": target.strip_size_bytes,
        "member_count": len(target.members),
        "number_ios": job.number_ios,
        "loops": job.loops,
        "seed": job.seed,
        "sequence_count": job.rw.sequence if job.rw.is_random and job.rw.sequence else 1,
        "sequence_add": 0 if job.rw.is_random else job.rw.sequence,
        "has": [int(each) for each in job.rw.has],
        "is_random": job.rw.is_random,
        "has_map": job.has_map,
        "is_identical": job.is_identical,
        "distribution": _DISTRIBUTIONS[job.distribution.kind],
        "distribution_value": job.distribution.value,
        "distribution_center": job.distribution.center,
        "read_percent": job.read_percent,
        "verify": _VERIFY[job.verify],
        "does_verify": job.does_verify,
        "is_verify_only": job.is_verify_only,
        "is_verify_fatal": job.is_verify_fatal,
        "verify_interval": job.verify_interval,
        "pattern": pattern,
        "pattern_size": len(pattern),
        "is_pattern_filled": bool(job.buffer_pattern) or job.is_zeroes,
        "continues_on": _CONTINUES[job.continues_on],
        "sync_every": job.fsync,
        "end_sync": job.end_fsync,
    }


def _params_of_pace(job: Job) -> dict[str, Any]:
    has_rate_min = any(job.rate_min) or any(job.rate_iops_min)
    return {
        "is_time_based": job.is_time_based,
        "runtime_ns": job.runtime_us * 1000,
        "ramp_ns": job.ramp_us * 1000,
        "rate": list(job.rate),
        "rate_iops": list(job.rate_iops),
        "rate_min": list(job.rate_min),
        "rate_iops_min": list(job.rate_iops_min),
        "rate_cycle_ns": job.rate_cycle_ms * 1_000_000 if has_rate_min else 0,
        "is_rate_poisson": job.is_rate_poisson,
        "thinktime_ns": job.thinktime_us * 1000,
        "thinktime_spin_ns": job.thinktime_spin_us * 1000,
        "thinktime_blocks": job.thinktime_blocks,
        "is_thinktime_issue": job.is_thinktime_issue,
        "is_thinktime_forgiven": job.is_thinktime_forgiven,
        "max_latency_ns": [each * 1000 for each in job.max_latency_us],
        "latency_target_ns": job.latency_target_us * 1000,
        "latency_window_ns": job.latency_window_us * 1000,
        "latency_percentile": job.latency_percentile,
        "is_latency_run": job.is_latency_run,
        "sample_bw_ns": job.bw_window_ms * 1_000_000,
        "sample_iops_ns": job.iops_window_ms * 1_000_000,
        "depth": job.iodepth,
        "batch_submit": job.batch_submit,
        "batch_complete_min": job.batch_complete_min,
        "batch_complete_max": job.batch_complete_max,
        "depth_low": job.depth_low,
        "has_slat": job.has_slat,
        "has_clat": job.has_clat,
        "has_lat": job.has_lat,
    }


class Runner:
    """Runs a plan; ``on_status`` is called about ten times a second with the running wave."""

    def __init__(
        self,
        opener: Opener,
        *,
        destroy: frozenset[str],
        timeout_s: float,
        on_status: Callable[[Status], None] | None = None,
        on_interval: Callable[[list[Measured]], None] | None = None,
        interval_s: float = 0.0,
    ) -> None:
        self._opener = opener
        self._destroy = destroy
        self._timeout_s = timeout_s
        self._on_status = on_status
        self._on_interval = on_interval
        self._interval_s = interval_s

    def run(self, plan: Plan) -> Outcome:
        """Run all waves; a job that fails ends itself, and with exitall_on_error the rest."""
        outcome = Outcome()
        for job in plan.jobs:
            uri_of(job)  # a wrong name is said before anything has run
            if job.cpus and not set(job.cpus) & os.sched_getaffinity(0):
                raise UsageError(
                    f"{job.name}: cpus_allowed: expected CPUs that this process may use, got {job.cpus[0]}"
                )
            check_growable(job, self._destroy, Deadline.after(self._timeout_s))
        check_read_sizes(plan.jobs, self._destroy, is_read_only=self._opener.is_read_only)
        with contextlib.ExitStack() as undo:
            for job in plan.jobs:
                prepare_file(job, undo)
            undo.pop_all()
        if plan.jobs[-1].wave_index:
            self._check_here(plan.jobs)
        for wave in sorted({job.wave_index for job in plan.jobs}):
            jobs = [job for job in plan.jobs if job.wave_index == wave]
            is_over = self._run_wave(jobs, outcome)
            if is_over or outcome.interrupt is not None:
                break
        return outcome

    def _check_here(self, jobs: Sequence[Job]) -> None:
        """Refuse what a later wave's job cannot do with a device of this machine before the first wave runs."""
        for job in jobs:
            if isinstance(uri_of(job), (FileUri, MemUri)):
                with contextlib.ExitStack() as undo:
                    make_params(job, self._open(job, undo))

    def _open(self, job: Job, undo: contextlib.ExitStack) -> Target:
        deadline = Deadline.after(self._timeout_s)
        target = self._opener.open(job, deadline)
        undo.callback(target.close)
        check_writable(job, target, self._destroy, deadline)
        return target

    def _run_wave(self, jobs: Sequence[Job], outcome: Outcome) -> bool:
        """Whether nothing more shall run."""
        with contextlib.ExitStack() as undo:
            try:
                runs = [JobRun(job, self._open(job, undo)) for job in jobs]
            except (KvdevError, OSError) as error:
                if not outcome.measured:
                    raise
                outcome.failure = error
                outcome.problems.append(
                    f"{error}; the jobs before have run, {jobs[0].name} and later have not"
                )
                return True
            except Exception:
                raise
            except BaseException as interrupt:  # as while jobs run: what earlier waves have is kept
                if not outcome.measured:
                    raise
                outcome.interrupt = interrupt
                return True
            self._drive(runs, outcome)
            for each in runs:
                each.join()
            for each in runs:
                self._collect(each, outcome)
        return any(
            (each.job.exits_all and each.job.exit_what == "all")
            or (each.job.exits_all_on_error and _has_failed(each))
            for each in runs
        )

    def _drive(self, runs: Sequence[JobRun], outcome: Outcome) -> None:
        ended = threading.Condition()
        start_ns = SYSTEM_CLOCK.monotonic_ns() + START_NS + START_JOB_NS * len(runs)
        for each in runs:
            each.start(start_ns, ended)
        next_interval = self._interval_s
        while not all(each.is_ended for each in runs):
            try:
                with ended:
                    if not all(each.is_ended for each in runs):
                        ended.wait(LOOK_S)
                self._look(runs, start_ns)
                elapsed = (SYSTEM_CLOCK.monotonic_ns() - start_ns) / NS_PER_S
                if self._on_interval is not None and self._interval_s and elapsed >= next_interval:
                    next_interval += self._interval_s
                    self._on_interval([each.measured() for each in runs])
            except Exception:
                _stop(runs)
                raise
            except BaseException as interrupt:  # Ctrl-C or SIGTERM: the jobs end, and what they have is kept
                outcome.interrupt = outcome.interrupt or interrupt
                _stop(runs)

    def _look(self, runs: Sequence[JobRun], start_ns: int) -> None:
        now = SYSTEM_CLOCK.monotonic_ns()
        for each in runs:
            if each.steady is not None and not each.is_ended and now >= each.seen[0] + NS_PER_S:
                _sample(each, now)
        for each in runs:
            if each.is_ended and (each.job.exits_all or (each.job.exits_all_on_error and _has_failed(each))):
                is_group = each.job.exit_what == "group"
                _stop([o for o in runs if not is_group or o.job.group_index == each.job.group_index])
        if self._on_status is None:
            return
        results = [each.probe.result() for each in runs]
        expected = [(each.job.runtime_us + each.job.ramp_us) / 1e6 for each in runs if each.job.runtime_us]
        self._on_status(
            Status(
                running=sum(not each.is_ended for each in runs),
                bytes=_sums(results, "bytes"),
                ios=_sums(results, "ios"),
                elapsed_s=max(0.0, (now - start_ns) / NS_PER_S),
                expected_s=max(expected) if len(expected) == len(runs) else None,
            )
        )

    def _collect(self, run: JobRun, outcome: Outcome) -> None:
        measured = run.measured()
        if run.failure is not None:
            if not isinstance(run.failure, (KvdevError, OSError)):
                raise run.failure
            measured.error = measured.error or getattr(run.failure, "errno", None) or 5
            outcome.problems.append(f"{run.job.name}: {run.failure}")
        outcome.measured.append(measured)
        if problem := _problem(run.job, run.target, measured):
            outcome.problems.append(problem)
        outcome.has_bad_data = outcome.has_bad_data or bool(measured.result["bad_count"][0])


def _sums(results: Sequence[ResultArray], name: str) -> tuple[int, int, int]:
    total = sum(each[name][0].astype(int) for each in results)
    assert not isinstance(total, int), "there is a job"
    return int(total[READ]), int(total[WRITE]), int(total[TRIM])


def _sample(run: JobRun, now: int) -> None:
    """Give the steady-state watch what the last second brought, and end the job when it is steady."""
    assert run.steady is not None
    result = run.probe.result()
    if not result["is_running"][0]:
        return
    bytes_, ios = int(result["bytes"][0].sum()), int(result["ios"][0].sum())
    before_ns, before_bytes, before_ios = run.seen
    run.seen = (now, bytes_, ios)
    if bytes_ < before_bytes:  # the end of a ramp
        return
    span_s = (now - before_ns) / NS_PER_S
    if run.steady.add((bytes_ - before_bytes) / span_s / 1024, (ios - before_ios) / span_s):
        run.probe.stop()


def _has_failed(run: JobRun) -> bool:
    return run.failure is not None or run.probe.result()["end_reason"][0] >= EndReason.ERROR


def _stop(runs: Sequence[JobRun]) -> None:
    for each in runs:
        each.probe.stop()


_BAD = {
    BadReason.HEADER: "no intact header of a verified write",
    BadReason.PLACE: "a header that belongs to another place",
    BadReason.STALE: "what an earlier run has written: the write of this one is lost",
    BadReason.PAYLOAD: "other bytes than were written",
}


def _problem(job: Job, target: Target, measured: Measured) -> str:
    """One line on what went wrong; empty when nothing did."""
    result = measured.result[0]
    if result["bad_count"]:
        return (
            f"{job.name}: verify: {target.uri}: byte {int(result['bad_offset'])}: expected what was written, got "
            f"{_BAD[BadReason(int(result['bad_reason']))]}; {int(result['bad_count'])} intervals are bad, the first at "
            f"{int(result['bad_interval'])}"
        )
    if result["error_count"]:
        what = ("read", "write", "trim", "flush")[int(result["first_way"])]
        status = f", NVMe status 0x{int(result['first_status']):x}" if result["first_status"] else ""
        return (
            f"{job.name}: {target.uri}: {what} at byte {int(result['first_error_offset'])}: "
            f"{os.strerror(int(result['first_error']))}{status}; {int(result['error_count'])} errors in all"
        )
    if result["end_reason"] == EndReason.RATE:
        return f"{job.name}: rate_min: the rate fell below it"
    if result["end_reason"] == EndReason.LATENCY:
        return f"{job.name}: latency_target: not held at any depth"
    return ""
