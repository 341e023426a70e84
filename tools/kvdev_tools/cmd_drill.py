"""``kvdev drill``: faults on a real device, watched under reads; and the name under which others meet them too."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvdev_tools.connect import FiniteRange, host_options, make_session, operation_deadline, timeout_option
from kvdev_tools.output import Progress, emit, fields, json_option

if TYPE_CHECKING:
    from kvdev.block.device import BlockDevice
    from kvdev.block.drill import DrillCounts
    from kvdev.uri import DeviceUri

_Command = TypeVar("_Command", bound=Callable[..., Any])

READ_BYTES_MAX = 128 << 10
SECONDS_MAX = 86_400.0
READ_COUNT_MAX = 1 << 20
"""Latencies kept for the percentiles; the watching ends there."""
_FAULTS = {
    "delay-ms": ("MS", "Complete this late."),
    "delay": ("CHANCE", "Chance of being late  [default: 1]"),
    "error": ("CHANCE", "Chance to fail with a media error, before the device sees it."),
    "drop": ("CHANCE", "Chance that the completion never comes."),
    "drop-ms": ("MS", "When the fate of a dropped command is given up as unknown  [default: 1000]"),
    "corrupt": ("CHANCE", "Chance that a read returns one wrong bit."),
    "corrupt-write": ("CHANCE", "Chance that a write stores one wrong bit; only with --damage allow."),
    "throttle-mib": ("MIB", "At most so many MiB a second."),
    "reorder": ("COUNT", "Send so many commands in any order."),
    "on": ("KIND", "Faults on reads, writes or all  [default: all]"),
    "seed": ("NUMBER", "The same seed and commands meet the same faults  [default: 1]"),
    "damage": ("allow", "Content may be lost: what could do harm is not refused."),
}


def fault_options(command: _Command) -> _Command:
    for name, (metavar, text) in reversed(_FAULTS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    return command


@click.command()
@click.argument("device", metavar="DEVICE")
@fault_options
@click.option(
    "--seconds",
    type=FiniteRange(0.1, SECONDS_MAX),
    default=10.0,
    show_default=True,
    help="How long to read.",
)
@click.option("--uri-only", is_flag=True, help="Print the device's name with the faults, and do nothing.")
@host_options
@timeout_option
@json_option
def drill(
    device: str,
    seconds: float,
    uri_only: bool,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
    as_json: bool,
    **faults: str | None,
) -> int:
    """Let faults happen on a device on purpose, read it meanwhile, and say what came of it.

    Only reads; what they return is compared with reads without the faults. The name that is printed, in place of
    the device's own, lets other commands and engines meet the same faults: replay, connectors, members of a volume.
    Making or changing a volume under faults is refused, and so is owning a KV namespace while reads may be wrong,
    unless --damage allow is given.

    \b
    Examples:
      kvdev drill file:/dev/nvme1n1 --delay-ms 20 --delay 0.1
      kvdev drill "tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv?nsid=1" --error 0.001 --drop 0.001 --seed 7
      kvdev replay "vol:$(kvdev drill file:/srv/kv0.img --error 0.001 --uri-only)#kv" --geometry small
    """
    from kvdev.drill import parse_plan
    from kvdev.errors import UsageError
    from kvdev.uri import parse_device_uri
    from kvdev_tools.exits import ExitCode

    parsed = parse_device_uri(device)
    given = {name.replace("_", "-"): text for name, text in faults.items() if text is not None}
    if given and parsed.drill is not None:
        raise UsageError(f"drill: expected faults in the name or as options, got both: --{next(iter(given))}")
    if parsed.drill is None:
        parsed = dataclasses.replace(parsed, drill=parse_plan(given, where=f"drill {device}"))
    if uri_only:
        emit({"uri": str(parsed)}, as_json=as_json, text=lambda: [str(parsed)])
        return int(ExitCode.OK)
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        deadline = operation_deadline(timeout_s)
        plain = session.open_device(dataclasses.replace(parsed, drill=None), deadline=deadline)
        drilled = session.open_device(parsed, deadline=deadline)
        watched = _Watch(plain, drilled, seed=parsed.drill.seed if parsed.drill else 1, timeout_s=timeout_s)
        watched.run(seconds)
        found = watched.document(parsed)
    emit(found, as_json=as_json, text=lambda: _text(found))
    # Each wrong bit that the drill made is one; more than those are the device's own.
    is_sound = found["wrong_reads"] <= found["injected"]["corrupted"]
    return int(ExitCode.OK if is_sound else ExitCode.DATA_FAULT)


class _Watch:
    """Reads at random places of a device with faults, each compared with what the device holds without them."""

    def __init__(self, plain: BlockDevice, drilled: BlockDevice, *, seed: int, timeout_s: float) -> None:
        import numpy as np

        self._plain = plain
        self._drilled = drilled
        self._random = np.random.default_rng(seed)
        self._timeout_s = timeout_s
        self._latencies_ms: list[float] = []
        self._failures: Counter[str] = Counter()
        self._read_count = 0
        self._wrong_count = 0
        self._changed_count = 0

    def run(self, seconds: float) -> None:
        bar = Progress("drill", int(seconds * 1000))
        limit = operation_deadline(seconds)
        try:
            while not limit.is_expired and len(self._latencies_ms) < READ_COUNT_MAX:
                self._step()
                bar.update(int(limit.elapsed_ms()))
        finally:
            bar.close()

    def _step(self) -> None:
        import numpy as np

        from kvdev.block.device import read_blocks
        from kvdev.errors import KvdevError

        block_bytes = self._plain.block_size_bytes
        limit = max(1, min(READ_BYTES_MAX // block_bytes, self._plain.block_count))
        count = int(self._random.integers(1, limit + 1))
        slba = int(self._random.integers(0, self._plain.block_count - count + 1))
        before = read_blocks(self._plain, slba, count, operation_deadline(self._timeout_s))
        started = operation_deadline(self._timeout_s)
        self._read_count += 1
        try:
            got = read_blocks(self._drilled, slba, count, started)
        except KvdevError as error:
            self._failures[type(error).__name__] += 1
            return
        finally:
            self._latencies_ms.append(started.elapsed_ms())
        if np.array_equal(got, before):
            return
        after = read_blocks(self._plain, slba, count, operation_deadline(self._timeout_s))
        # Somebody may be writing there: then nothing can be said about this one.
        if np.array_equal(after, before):
            self._wrong_count += 1
        else:
            self._changed_count += 1

    def document(self, uri: DeviceUri) -> dict[str, Any]:
        import numpy as np

        counts: DrillCounts = self._drilled.queue.counts(self._drilled)  # type: ignore[attr-defined]
        latencies = np.array(self._latencies_ms or [0.0])
        return {
            "uri": str(uri),
            "reads": self._read_count,
            "failed_reads": sum(self._failures.values()),
            "wrong_reads": self._wrong_count,
            "changed_reads": self._changed_count,
            "failures": [{"error": name, "count": count} for name, count in sorted(self._failures.items())],
            "latency_ms_p50": round(float(np.percentile(latencies, 50)), 3),
            "latency_ms_p99": round(float(np.percentile(latencies, 99)), 3),
            "latency_ms_max": round(float(latencies.max()), 3),
            "injected": vars(counts),
        }


def _text(found: dict[str, Any]) -> list[str]:
    failures = ", ".join(f"{each['count']} {each['error']}" for each in found["failures"]) or "none"
    injected = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["injected"].items())
    return fields(
        [
            ("name with the faults", found["uri"]),
            ("reads", found["reads"]),
            ("failed", failures),
            ("wrong", found["wrong_reads"]),
            ("changed by somebody meanwhile", found["changed_reads"]),
            (
                "latency ms, p50 p99 max",
                f"{found['latency_ms_p50']} {found['latency_ms_p99']} {found['latency_ms_max']}",
            ),
            ("made on purpose", injected),
        ]
    )
