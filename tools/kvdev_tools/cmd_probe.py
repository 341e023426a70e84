"""``kvdev probe``: measure devices with fio's job files and command line.

Not here: the jobs (``kvdev_tools.probe``).
"""

from __future__ import annotations

import click

from kvdev_tools.exits import ExitCode


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "help_option_names": ["-h", "--help"],
    }
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION=VALUE]... [JOBFILE]...")
@click.option("--parse-only", is_flag=True, help="Check the jobs and run none.")
@click.option("--readonly", is_flag=True, help="Refuse jobs that write or trim.")
@click.option("--section", multiple=True, metavar="NAME", help="Only this job of the files; may be repeated.")
@click.option(
    "--help-options", is_flag=True, help="List the options of jobs, and what becomes of fio's others."
)
def probe(
    arguments: tuple[str, ...],
    parse_only: bool,
    readonly: bool,
    section: tuple[str, ...],
    help_options: bool,
) -> int:
    """Measure devices with fio's job files, or with jobs on the command line.

    \b
    Examples:
      kvdev probe --parse-only nightly.fio
      kvdev probe --parse-only --name=restore --filename=file:/dev/nvme1n1 --rw=randread --bs=128k
    """
    from kvdev.errors import UnsupportedError, UsageError
    from kvdev_tools.probe.job import make_plan
    from kvdev_tools.probe.jobfile import Reader

    if help_options:
        _list_options()
        return int(ExitCode.OK)
    reader = Reader()
    for name in reader.take_arguments(arguments):
        reader.take_file(name, sections=frozenset(section))
    plan = make_plan(reader.text, is_read_only=readonly)
    for warning in plan.warnings:
        click.echo(f"kvdev probe: {warning}", err=True)
    if parse_only:
        return int(ExitCode.OK)
    if not plan.jobs:
        raise UsageError("probe: expected at least one job: a job file, or --name=NAME with its options")
    raise UnsupportedError(
        "probe: jobs can be checked (--parse-only) but not run yet", feature="running probe jobs"
    )


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
