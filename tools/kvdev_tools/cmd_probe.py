"""``kvdev probe``: measure devices with fio's job files and command line.

Not here: the jobs (``kvdev_tools.probe``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvdev_tools.connect import FiniteRange, host_options, make_session
from kvdev_tools.exits import ExitCode, exit_code_of

if TYPE_CHECKING:
    from kvdev.session import Session
    from kvdev_tools.probe.job import Plan
    from kvdev_tools.probe.measure import Measured
    from kvdev_tools.probe.run import Outcome, Status

FORMATS = ("normal", "json", "json+", "terse")


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "help_option_names": ["-h", "--help"],
    }
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION=VALUE]... [JOBFILE]...")
@click.option("--parse-only", is_flag=True, help="Check the jobs and run none.")
@click.option("--readonly", is_flag=True, help="Refuse jobs that write or trim.")
@click.option(
    "--destroy",
    multiple=True,
    metavar="DEVICE",
    help="Write to this device whatever it holds; may be repeated.",
)
@click.option("--section", multiple=True, metavar="NAME", help="Only this job of the files; may be repeated.")
@click.option("--output", metavar="FILE", help="Write the results there.")
@click.option(
    "--output-format",
    "formats",
    default="normal",
    show_default=True,
    metavar="FORMAT",
    help="normal, json, json+ or terse; several with commas between.",
)
@click.option("--minimal", is_flag=True, help="As --output-format terse.")
@click.option(
    "--status-interval",
    "interval",
    metavar="TIME",
    help="Print results so far each time this has passed (30, 500ms, 1m).",
)
@click.option(
    "--eta",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Show a status line.",
)
@click.option(
    "--wait",
    "timeout_s",
    metavar="SECONDS",
    type=FiniteRange(0.1, 3600.0),
    default=30.0,
    show_default=True,
    help="Longest wait for a target, and for one command.",
)
@click.option(
    "--queues",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Connections of each job to an NVMe/TCP controller.",
)
@click.option("--sizes", metavar="SIZES", help="Of a sweep: block sizes with commas between.")
@click.option("--depths", metavar="DEPTHS", help="Of a sweep: depths with commas between.")
@click.option(
    "--html", metavar="FILE", help="Of a sweep: write its heat maps there, as one file that needs no other."
)
@click.option(
    "--help-options", is_flag=True, help="List the options of jobs, and what becomes of fio's others."
)
@host_options
def probe(
    arguments: tuple[str, ...],
    parse_only: bool,
    readonly: bool,
    destroy: tuple[str, ...],
    section: tuple[str, ...],
    output: str | None,
    formats: str,
    minimal: bool,
    interval: str | None,
    eta: str,
    timeout_s: float,
    queues: int,
    sizes: str | None,
    depths: str | None,
    html: str | None,
    help_options: bool,
    host_nqn: str | None,
    host_id: str | None,
) -> int:
    """Measure devices with fio's job files, or with jobs on the command line.

    A job that writes to a device with a volume, partition table, file system, md or LVM on it, or in use, is refused
    unless --destroy names that device. Ctrl-C ends the jobs and prints what they have measured.

    `kvdev probe sweep` and one job run it at every pair of --sizes and --depths, two seconds each unless it says how
    long, and print what each pair brought.

    \b
    Examples:
      kvdev probe nightly.fio
      kvdev probe --name=restore --filename=file:/dev/nvme1n1 --rw=randread --bs=128k --iodepth=32 --runtime=10
      kvdev probe sweep --html=map.html --filename=file:/dev/nvme1n1 --rw=randread
      kvdev probe --output-format=json+ --output=array.json --name=x --rw=randread --size=1g \\
          --filename="tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv?nsid=1"
    """
    from kvdev.errors import UsageError
    from kvdev_tools.output import check_output
    from kvdev_tools.probe.guard import parse_destroy
    from kvdev_tools.probe.job import make_plan
    from kvdev_tools.probe.jobfile import Reader
    from kvdev_tools.probe.report_log import check_logs
    from kvdev_tools.probe.run import Runner
    from kvdev_tools.probe.sweep import DEPTHS_DEFAULT, SIZES_DEFAULT
    from kvdev_tools.probe.target import Opener
    from kvdev_tools.probe.value import parse_time_us

    if help_options:
        _list_options()
        return int(ExitCode.OK)
    wanted = ("terse",) if minimal else tuple(part.strip() for part in formats.split(","))
    for each in wanted:
        if each not in FORMATS:
            raise UsageError(f"--output-format: expected {', '.join(FORMATS)}, got {each!r:.40}")
    interval_s = parse_time_us("--status-interval", interval, default_unit="s") / 1e6 if interval else 0.0

    def session() -> Session:
        return make_session(host_nqn, host_id, timeout_s=timeout_s, io_queue_count=queues)

    line = _StatusLine(eta)

    def run(plan: Plan, on_interval: Callable[[list[Measured]], None] | None = None) -> Outcome:
        runner = Runner(
            Opener(session, is_read_only=readonly),
            destroy=parse_destroy(destroy),
            timeout_s=timeout_s,
            on_status=line.show if line.is_shown else None,
            on_interval=on_interval,
            interval_s=interval_s,
        )
        try:
            return runner.run(plan)
        finally:
            line.clear()

    if arguments[:1] == ("sweep",):
        axes = (sizes or SIZES_DEFAULT, depths or DEPTHS_DEFAULT)
        return _sweep(arguments[1:], axes, wanted, output, html, run=run, is_read_only=readonly)
    if sizes or depths or html:
        raise UsageError("--sizes, --depths, --html: expected `kvdev probe sweep` with them")
    reader = Reader()
    reader.take_files(reader.take_arguments(arguments), sections=frozenset(section))
    plan = make_plan(reader.text, is_read_only=readonly)
    for warning in plan.warnings:
        click.echo(f"kvdev probe: {warning}", err=True)
    if parse_only:
        return int(ExitCode.OK)
    if not plan.jobs:
        raise UsageError("probe: expected at least one job: a job file, or --name=NAME with its options")

    if output is not None:
        check_output("--output", output)
    check_logs(plan.jobs)
    printer = _Printer(plan, wanted, output)
    printer.begin()
    return _finish(run(plan, printer.print), printer)


def _sweep(
    arguments: tuple[str, ...],
    axes: tuple[str, str],
    formats: tuple[str, ...],
    output: str | None,
    html: str | None,
    *,
    run: Callable[[Plan], Outcome],
    is_read_only: bool,
) -> int:
    from pathlib import Path

    from kvdev.errors import UsageError
    from kvdev_tools.output import check_output
    from kvdev_tools.probe.option import IODEPTH_MAX
    from kvdev_tools.probe.sweep import parse_axis, run_sweep, sweep_document, sweep_text, write_html

    if formats not in (("normal",), ("json",)):
        raise UsageError("--output-format: expected normal or json of a sweep")
    sizes = parse_axis("--sizes", axes[0], high=1 << 30)
    depths = parse_axis("--depths", axes[1], high=IODEPTH_MAX)
    for option, path in (("--output", output), ("--html", html)):
        if path is not None:
            check_output(option, path)
    cells, outcome = run_sweep(arguments, sizes, depths, run=run, is_read_only=is_read_only)
    if cells:
        text = [json.dumps(sweep_document(cells), indent=2)] if formats == ("json",) else sweep_text(cells)
        _write(text, output, mode="w")
    if html and cells:
        write_html(Path(html), cells, title=f"kvdev probe sweep {' '.join(arguments)}")
    return _end(outcome)


def _finish(outcome: Outcome, printer: _Printer) -> int:
    from kvdev_tools.probe.report_log import write_logs

    try:
        printer.print(outcome.measured)
    finally:
        write_logs(outcome.measured)
    return _end(outcome)


def _end(outcome: Outcome) -> int:
    """Say what went wrong; the exit code."""
    for problem in outcome.problems:
        click.echo(f"kvdev: {problem}", err=True)
    if outcome.interrupt is not None:
        is_ours = isinstance(outcome.interrupt, KeyboardInterrupt)
        return int(ExitCode.INTERRUPTED if is_ours else ExitCode.TERMINATED)
    if outcome.has_bad_data:
        return int(ExitCode.DATA_FAULT)
    if outcome.failure is not None:
        return int(exit_code_of(outcome.failure))
    return int(ExitCode.REFUSED if outcome.problems else ExitCode.OK)


class _Printer:
    """Prints results in the formats that were asked for, to standard output or a file."""

    def __init__(self, plan: Plan, formats: tuple[str, ...], output: str | None) -> None:
        self._plan = plan
        self._formats = formats
        self._output = output
        self._has_begun = False

    def begin(self) -> None:
        from kvdev_tools.probe.report_text import headline

        if "normal" in self._formats:
            self._write(headline(self._plan.jobs))

    def print(self, measured: list[Measured]) -> None:
        from kvdev_tools.probe.report_json import json_document
        from kvdev_tools.probe.report_terse import terse_report
        from kvdev_tools.probe.report_text import text_report

        now_s = time.time_ns() / 1e9
        for each in self._formats:
            if each == "normal":
                self._write(text_report(measured, now_s=now_s))
            elif each == "terse":
                self._write(terse_report(measured))
            else:
                document = json_document(self._plan, measured, has_bins=each == "json+", now_s=now_s)
                self._write([json.dumps(document, indent=2)])

    def _write(self, lines: list[str]) -> None:
        _write(lines, self._output, mode="a" if self._has_begun else "w")
        self._has_begun = True


def _write(lines: list[str], output: str | None, *, mode: str) -> None:
    """To standard output, or a file."""
    from kvdev.errors import CapacityError

    text = "".join(f"{line}\n" for line in lines)
    if output is None:
        click.echo(text, nl=False)
        sys.stdout.flush()
        return
    try:
        with open(output, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        click.echo(text, nl=False)  # what was measured is not lost with a full disk
        sys.stdout.flush()
        raise CapacityError(f"--output: {output}: cannot be written: {error.strerror}") from error


class _StatusLine:
    """One line on standard error that says how far the jobs are."""

    def __init__(self, eta: str) -> None:
        self.is_shown = eta == "always" or (eta == "auto" and sys.stderr.isatty())
        self._last: tuple[float, tuple[int, int, int], tuple[int, int, int]] = (0.0, (0, 0, 0), (0, 0, 0))
        self._is_drawn = False

    def show(self, status: Status) -> None:
        from kvdev_tools.probe.report_text import short, size

        at, bytes_, ios = self._last
        span = status.elapsed_s - at
        if 0 <= span < 0.5 and self._is_drawn:
            return
        if span < 0 or status.bytes < bytes_:  # another wave, or the end of a ramp
            at, bytes_, ios = 0.0, (0, 0, 0), (0, 0, 0)
            span = status.elapsed_s
        self._last = (status.elapsed_s, status.bytes, status.ios)
        span = max(span, 1e-6)
        names = ("r", "w", "t")
        used = [way for way in range(3) if status.bytes[way]]
        bw = ",".join(
            f"{names[way]}={size((status.bytes[way] - bytes_[way]) / span, 1024)}/s" for way in used
        )
        rate = ",".join(f"{names[way]}={short((status.ios[way] - ios[way]) / span)}" for way in used)
        done = (
            f"[{min(100.0, 100 * status.elapsed_s / status.expected_s):.1f}%]"
            if status.expected_s
            else f"[{status.elapsed_s:.0f}s]"
        )
        sys.stderr.write(f"\r\x1b[KJobs: {status.running}: {done}[{bw}][{rate} IOPS]")
        sys.stderr.flush()
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _list_options() -> None:
    from kvdev_tools.output import table
    from kvdev_tools.probe.option import OPTIONS

    rows = []
    for name in sorted(OPTIONS):
        option = OPTIONS[name]
        alias = f"as {option.name}" if name != option.name else option.note
        rows.append((name, option.use.value, alias))
    for line in table(rows, header=("option", "", "")):
        click.echo(line)
