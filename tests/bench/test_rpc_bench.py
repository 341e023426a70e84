"""The benchmark of planning runs at toy size: every row is there, and the second plan is empty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rpc_bench_runs_at_toy_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "rpc.py"), "--toy", "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(result.read_text())
    assert {"cpu", "kernel", "python", "kvdev", "command"} <= set(report["machine"])
    assert [(row["how"], row["has_state"]) for row in report["raw"]] == [
        ("one by one", False),
        ("batches", False),
        ("overlapping", False),
        ("one by one", True),
    ]
    assert all(row["seconds"] > 0 and row["call_count"] == 19 for row in report["raw"])
    plan = report["plan"]
    assert plan["step_count"] == 19 and plan["second_plan_step_count"] == 0
    command = report["command"]
    assert command["is_second_plan_empty"] and min(command["plan_empty_s"], command["plan_full_s"]) > 0
    # Names and UUIDs follow from the load alone: the same on every machine.
    assert plan["sha256"] in done.stdout or plan["sha256"][:16] in done.stdout
