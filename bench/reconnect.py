"""What waiting costs: controllers whose port refuses, each trying again after its delay, in this process's CPU seconds.

Run alone on the machine: ``.venv/bin/python bench/reconnect.py``. The target is stopped after everybody has connected;
counting begins once the delays have grown to ``reconnect_delay_s``. Excluded: connecting, the target (which is gone).
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import threading
from pathlib import Path

from kvdev.clock import SYSTEM_CLOCK
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.target.model import Transport
from kvdev.testing.recovery import descriptor_count
from kvdev.testing.target import running_target

NS_PER_S = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controllers", type=int, default=100)
    parser.add_argument("--delay", type=float, default=10.0, help="reconnect_delay_s; default %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to count; default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    options = ControllerOptions(reconnect_delay_s=args.delay, fast_io_fail_tmo_s=0, ctrl_loss_tmo_s=3600)
    before = descriptor_count()
    with running_target(transport=Transport(max_queue_depth=16)) as target:
        kv = Session(host=HostIdentity.of("nqn.2024-01.io.example:host"), options=options)
        subsystems = []
        for index in range(args.controllers):
            name = f"nqn.2024-01.io.kvdev:many{index}"
            target.add_subsystem(name)
            subsystems.append(kv.subsystem(f"tcp://127.0.0.1:{target.port}/{name}"))
    pause = threading.Event()
    try:
        # The delays double up to the whole one: as long again passes before the first whole one has gone by.
        pause.wait(2 * args.delay)
        counts, started_ns = [], SYSTEM_CLOCK.monotonic_ns()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        first = sum(each.path_infos[0].attempt_count for each in subsystems)
        while SYSTEM_CLOCK.monotonic_ns() - started_ns < args.seconds * NS_PER_S:
            pause.wait(min(1.0, args.seconds))
            counts.append(descriptor_count() - before)
        now = resource.getrusage(resource.RUSAGE_SELF)
        attempt_count = sum(each.path_infos[0].attempt_count for each in subsystems) - first
        elapsed_s = (SYSTEM_CLOCK.monotonic_ns() - started_ns) / NS_PER_S
        cpu_s = (now.ru_utime - usage.ru_utime) + (now.ru_stime - usage.ru_stime)
    finally:
        kv.close()
    report = {
        "controllers": args.controllers,
        "reconnect_delay_s": args.delay,
        "elapsed_s": elapsed_s,
        "attempts": attempt_count,
        "core_share": cpu_s / elapsed_s,
        "cpu_ms_per_attempt": 1e3 * cpu_s / attempt_count if attempt_count else None,
        "most_descriptors": max(counts),
        "least_descriptors": min(counts),
    }
    each_ms = f", {report['cpu_ms_per_attempt']:.2f} ms an attempt" if attempt_count else ""
    print(
        f"{args.controllers} controllers, delay {args.delay:g} s: {attempt_count} attempts in {elapsed_s:.0f} s,"
        f" {100 * report['core_share']:.2f} % of a core{each_ms},"
        f" {min(counts)} to {max(counts)} descriptors held"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
