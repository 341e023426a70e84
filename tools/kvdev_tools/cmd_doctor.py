"""``kvdev doctor``: what this host lacks, and the remedy of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvdev_tools.connect import FiniteRange
from kvdev_tools.output import emit, json_option

if TYPE_CHECKING:
    from kvdev_tools.doctor import Finding


@click.command()
@click.option(
    "--arena",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Size of the staging arena to check for.",
)
@click.option("--rpc", "rpcs", metavar="PATH", multiple=True, help="An SPDK's RPC socket to check as well.")
@click.option("--timeout", "timeout_s", type=FiniteRange(0.1, 600), default=5.0, show_default=True)
@json_option
def doctor(arena: str, rpcs: tuple[str, ...], timeout_s: float, as_json: bool) -> int:
    """Check this host, or this container: kernel, memory, limits, sockets. Changes nothing.

    The exit code is 4 when something is missing; what is only poor works, slower or with less safety.

    \b
    Examples:
      kvdev doctor
      kvdev doctor --arena 64GiB --rpc /run/kvdev/spdk/spdk.sock
    """
    from kvdev.units import parse_size
    from kvdev_tools.doctor import examine, is_healthy, read_facts
    from kvdev_tools.exits import ExitCode
    from spdk_rpc import parse_address

    arena_size_bytes = parse_size(arena, field="arena")
    for rpc in rpcs:
        parse_address(rpc, field="--rpc")
    findings = examine(read_facts(rpcs=rpcs, timeout_s=timeout_s), arena_size_bytes=arena_size_bytes)
    is_ok = is_healthy(findings)
    document = {
        "is_ok": is_ok,
        "findings": [
            {
                "check": each.check,
                "verdict": each.verdict.value,
                "found": each.found,
                "needed_for": each.needed_for,
                "remedy": each.remedy,
            }
            for each in findings
        ],
    }
    if as_json:
        emit(document, as_json=True, text=tuple)
    else:
        for line in _lines(findings):
            click.echo(line, color=True)
    return int(ExitCode.OK if is_ok else ExitCode.REFUSED)


def _lines(findings: list[Finding]) -> Iterator[str]:
    from kvdev_tools.doctor import Verdict
    from kvdev_tools.provision.render import Painter

    painter = Painter(sys.stdout)
    colours = {Verdict.OK: "32", Verdict.POOR: "33", Verdict.MISSING: "31"}
    width = max(len(each.check) for each in findings)
    for each in findings:
        word = painter.paint(colours[each.verdict], each.verdict.value.ljust(len("missing")))
        yield f"{word}  {each.check.ljust(width)}  {each.found}"
        if each.remedy:
            yield f"         needed for {each.needed_for}"
            yield f"         remedy: {each.remedy}"
