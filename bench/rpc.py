"""How long planning and provisioning take: 64 subsystems of 4 namespaces each, against the embedded target.

Run alone on the machine: ``.venv/bin/python bench/rpc.py``. The target is a process of its own with its data path;
bdevs are null bdevs, so that no memory is filled. Plan: observe and compare. Apply: each step executed and checked by
reading. The row of the command is ``kvdev provision plan FILE`` as an operator runs it, with the interpreter's start
and the labels it looks for. The rows of raw calls say what the clients add. Excluded: starting the target, connecting.
Ends with an empty second plan and a hash of what the target says it is.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spdk_rpc import AsyncClient, AsyncSpdkRpc, Call, Client, SpdkRpc, calls
from spdk_rpc.plan import Id, Kind, Resource, apply_plan, observe, plan_state
from spdk_rpc.plan.resource import State, state_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:7a1c7c52-6d1e-4f0b-9f43-3f6f1d2b9c10"
PLAN_LIMIT_S = 2.0
START_TIMEOUT_S = 60.0


def subsystem_nqn(index: int) -> str:
    return f"nqn.2026-01.io.kvdev:bench{index}"


def bdev_uuid(name: str) -> str:
    """The same in each run, so that the hash at the end is."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def desired_state(subsystem_count: int, namespace_count: int) -> State:
    """What shall be: every namespace on a bdev of its own, one host let in everywhere."""
    resources = [Resource(Id(Kind.TRANSPORT, "TCP"), {})]
    for index in range(subsystem_count):
        nqn = subsystem_nqn(index)
        resources.append(Resource(Id(Kind.SUBSYSTEM, nqn), {"serial_number": f"S{index}"}))
        resources.append(Resource(Id(Kind.HOST, HOST_NQN, nqn), {}))
        for nsid in range(1, namespace_count + 1):
            name = f"B{index}.{nsid}"
            bdev = {"driver": "null", "block_size": 4096, "num_blocks": 1 << 20}
            resources.append(Resource(Id(Kind.BDEV, name), bdev, {"uuid": bdev_uuid(name)}))
            resources.append(Resource(Id(Kind.NAMESPACE, str(nsid), nqn), {"bdev_name": name}))
    return state_of(resources)


def provisioning_calls(subsystem_count: int, namespace_count: int) -> list[Call[Any]]:
    """The same as raw calls, without looking."""
    made: list[Call[Any]] = [calls.nvmf_create_transport()]
    for index in range(subsystem_count):
        nqn = subsystem_nqn(index)
        made.append(calls.nvmf_create_subsystem(nqn, serial_number=f"S{index}"))
        made.append(calls.nvmf_subsystem_add_host(nqn=nqn, host=HOST_NQN))
        for nsid in range(1, namespace_count + 1):
            name = f"B{index}.{nsid}"
            made.append(
                calls.bdev_null_create(name=name, num_blocks=1 << 20, block_size=4096, uuid=bdev_uuid(name))
            )
            made.append(calls.nvmf_subsystem_add_ns(nqn=nqn, bdev_name=name, nsid=nsid))
    return made


@contextmanager
def running_target(folder: Path, *, has_state: bool = False) -> Iterator[Client]:
    """A target process and a client of it."""
    path = folder / "rpc.sock"
    command = [sys.executable, "-m", "kvdev.target", "--rpc-socket", str(path)]
    if has_state:
        command += ["--state", str(folder / "state.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"bench: the target ended with {process.wait(START_TIMEOUT_S)}")
            with Client(path) as client:
                client.peer()
                yield client
        finally:
            process.terminate()


def elapsed_s(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def run_raw(how: str, folder: Path, made: list[Call[Any]], *, has_state: bool = False) -> float:
    """Seconds for all calls: one by one, as batches, or overlapping on asyncio where order does not matter."""
    with running_target(folder, has_state=has_state) as client:
        rpc = SpdkRpc(client)
        if how == "one by one":
            return elapsed_s(lambda: [rpc.run(each) for each in made])
        if how == "batches":
            return elapsed_s(lambda: rpc.batch(made))
        return asyncio.run(_overlapping(client.address, made))


async def _overlapping(address: str, made: list[Call[Any]]) -> float:
    """Namespaces after their bdevs and subsystems; within a kind all at once."""
    ranks = ("nvmf_create", "bdev_", "nvmf_")
    async with AsyncClient(address) as client:
        rpc = AsyncSpdkRpc(client)
        await rpc.spdk_get_version()
        started = time.perf_counter()
        for rank in range(len(ranks)):
            wave = [
                each
                for each in made
                if next(index for index, word in enumerate(ranks) if each.method.startswith(word)) == rank
            ]
            await asyncio.gather(*(rpc.run(each) for each in wave))
        return time.perf_counter() - started


def site_text(rpc: str, subsystem_count: int, namespace_count: int) -> str:
    """The same load as a provision file."""
    bdevs, subsystems = [], []
    for index in range(subsystem_count):
        names = {nsid: f"B{index}.{nsid}" for nsid in range(1, namespace_count + 1)}
        bdevs += [
            f"      {name}: {{null: {{size: 4GiB}}, uuid: {bdev_uuid(name)}}}" for name in names.values()
        ]
        subsystems += [
            f"      {subsystem_nqn(index)}:",
            f"        serial_number: S{index}",
            f'        hosts: ["{HOST_NQN}"]',
            f"        namespaces: {{{', '.join(f'{nsid}: {name}' for nsid, name in names.items())}}}",
        ]
    lines = ["version: 1", "name: bench", "targets:", "  array0:", f"    rpc: {rpc}", "    bdevs:", *bdevs]
    return "\n".join([*lines, "    subsystems:", *subsystems, ""])


def run_command(folder: Path, subsystem_count: int, namespace_count: int, round_count: int) -> dict[str, Any]:
    """The command on an empty target and on the full one."""
    site = folder / "site.yaml"
    command = [sys.executable, "-m", "kvdev_tools.main", "provision"]

    def run(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [*command, *arguments, str(site), "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"bench: {done.stderr.strip()}")
        return dict(json.loads(done.stdout))

    with running_target(folder) as client:
        site.write_text(site_text(client.address, subsystem_count, namespace_count))
        empty = [elapsed_s(lambda: run("plan")) for _ in range(round_count)]
        run("apply")
        full = [elapsed_s(lambda: run("plan")) for _ in range(round_count)]
        is_empty = bool(run("plan")["is_empty"])
    return {
        "plan_empty_s": statistics.median(empty),
        "plan_full_s": statistics.median(full),
        "is_second_plan_empty": is_empty,
    }


def plan_and_apply(folder: Path, desired: State, round_count: int) -> dict[str, Any]:
    """Plan on an empty target, apply, and plan again on the full one."""
    with running_target(folder) as client:
        empty = [elapsed_s(lambda: plan_state(desired, observe(client.call))) for _ in range(round_count)]
        plan = plan_state(desired, observe(client.call))
        if plan.problems:
            raise SystemExit(f"bench: {plan.problems[0]}")
        started = time.perf_counter()
        applied = apply_plan(plan, client.call)
        apply_s = time.perf_counter() - started
        if applied.error is not None:
            raise SystemExit(f"bench: {applied.failed}: {applied.error}")
        full = [elapsed_s(lambda: plan_state(desired, observe(client.call))) for _ in range(round_count)]
        again = plan_state(desired, observe(client.call))
        says = [SpdkRpc(client).nvmf_get_subsystems(), SpdkRpc(client).bdev_get_bdevs()]
    digest = hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()
    return {
        "plan_empty_s": statistics.median(empty),
        "plan_full_s": statistics.median(full),
        "apply_s": apply_s,
        "step_count": len(plan.steps),
        "second_plan_step_count": len(again.steps),
        "sha256": digest,
    }


def measure(subsystem_count: int, namespace_count: int, round_count: int) -> dict[str, Any]:
    """All rows."""
    made = provisioning_calls(subsystem_count, namespace_count)
    rows = []
    for how, has_state in (
        ("one by one", False),
        ("batches", False),
        ("overlapping", False),
        ("one by one", True),
    ):
        with tempfile.TemporaryDirectory(prefix="kvdev-bench-") as folder:
            seconds = run_raw(how, Path(folder), made, has_state=has_state)
        rows.append(
            {
                "how": how,
                "has_state": has_state,
                "call_count": len(made),
                "seconds": seconds,
                "us_per_call": 1e6 * seconds / len(made),
            }
        )
    with tempfile.TemporaryDirectory(prefix="kvdev-bench-") as folder:
        desired = desired_state(subsystem_count, namespace_count)
        planned = plan_and_apply(Path(folder), desired, round_count)
    with tempfile.TemporaryDirectory(prefix="kvdev-bench-") as folder:
        command = run_command(Path(folder), subsystem_count, namespace_count, round_count)
    return {
        "machine": machine(),
        "subsystem_count": subsystem_count,
        "namespace_count": namespace_count,
        "raw": rows,
        "plan": planned,
        "command": command,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a small load, to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    given = parser.parse_args(arguments)
    report = measure(3, 2, 1) if given.toy else measure(64, 4, 5)
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    for row in report["raw"]:
        state = " with --state" if row["has_state"] else ""
        print(
            f"{row['call_count']} calls {row['how']}{state}: {row['seconds']:.3f} s, "
            f"{row['us_per_call']:.0f} us a call"
        )
    plan = report["plan"]
    print(
        f"plan on an empty target: {plan['plan_empty_s']:.3f} s; on the full one: {plan['plan_full_s']:.3f} s"
    )
    command = report["command"]
    print(
        f"kvdev provision plan on an empty target: {command['plan_empty_s']:.3f} s; on the full one: "
        f"{command['plan_full_s']:.3f} s"
    )
    print(f"apply {plan['step_count']} steps: {plan['apply_s']:.3f} s")
    print(f"second plan: {plan['second_plan_step_count']} steps; sha256 {plan['sha256'][:16]}")
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    slowest_s = max(each[name] for each in (plan, command) for name in ("plan_empty_s", "plan_full_s"))
    is_right = plan["second_plan_step_count"] == 0 and command["is_second_plan_empty"]
    is_good = is_right and (given.toy or slowest_s < PLAN_LIMIT_S)
    print(f"limit {PLAN_LIMIT_S:g} s for a plan: {'kept' if is_good else 'NOT KEPT'}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
