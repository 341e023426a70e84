"""The main job end to end: the embedded target, a client killed with SIGKILL half way, every page as it was put."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdev_tools.trace import generate_trace, read_trace, summarise

ROOT = Path(__file__).resolve().parents[2]
SHARED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
TINY = ["--layers", "1", "--kv-heads", "2", "--head-size", "4"]


def replay(*arguments: str, kernels: str = "auto") -> dict[str, Any]:
    """Run the command in a process of its own and return its report."""
    done = subprocess.run(
        [sys.executable, "-m", "kvdev_tools.main", "replay", "--json", *arguments],
        env={**os.environ, "KVDEV_KERNELS": kernels},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_client_killed_half_way_then_the_next_one_finds_every_page(seed: int) -> None:
    report = replay(*TINY, "--embedded", "--kill-halfway", "--requests", "60", "--seed", str(seed % 1000))
    summary = summarise(generate_trace(60, seed=seed % 1000))
    assert report["kills"] == 1
    assert (report["mismatches"], report["page_errors"]) == (0, 0)
    assert report["requests"] == 60
    assert report["pages_restored"] == report["pages_verified"] == summary.pages_restorable
    assert report["pages_written"] == report["stored_pages"] == summary.pages_distinct
    assert report["hit_rate"] == summary.hit_rate
    assert len(report["members"]) == 4
    stored = [member["stored_bytes"] for member in report["members"]]
    assert sum(stored) == report["stored_pages"] * report["page_size_bytes"]
    assert all(member["bytes_written"] >= member["stored_bytes"] for member in report["members"])


@pytest.mark.parametrize("layout", ["nhd", "hnd", "block-outermost", "sglang", "mla"])
def test_every_layout_survives_the_kill(layout: str, tmp_path: Path) -> None:
    shape = ["--layers", "2", "--head-size", "4"]
    shape += ["--attention", "mla"] if layout == "mla" else ["--kv-heads", "2"]
    report = replay(
        *shape,
        "--layout",
        layout,
        "--requests",
        "12",
        "--kill-halfway",
        "--members",
        "1",
        "--files",
        str(tmp_path),
        # Nothing to compile; the compiled kernels run in the other tests.
        kernels="numpy",
    )
    assert (report["mismatches"], report["kills"], report["layout"]) == (0, 1, layout)
    assert report["pages_restored"] > 0
    assert list(tmp_path.iterdir()) == []


def test_capacity_evicts_and_loses_hits_only() -> None:
    summary = summarise(generate_trace(80, seed=1))
    report = replay(*TINY, "--requests", "80", "--capacity", str(60 * 16384), "--kill-halfway")
    assert report["mismatches"] == 0
    assert report["stored_pages"] <= 60
    assert 0 < report["pages_restored"] < summary.pages_restorable
    assert report["pages_restored"] + report["pages_written"] == summary.pages_requested


def test_capacity_of_one_page_still_ends_without_a_mismatch() -> None:
    report = replay(*TINY, "--requests", "10", "--capacity", "16KiB", "--members", "1", kernels="numpy")
    assert (report["mismatches"], report["stored_pages"]) == (0, 1)


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the published trace is not in ../shared")
def test_published_trace_has_the_hit_rate_that_it_implies() -> None:
    report = replay(*TINY, "--trace", str(SHARED_TRACE), "--requests", "500")
    summary = summarise(read_trace(SHARED_TRACE, limit=500))
    assert report["mismatches"] == 0
    assert report["hit_rate"] == summary.hit_rate
    assert report["pages_verified"] == summary.pages_restorable


def test_memory_stays_within_its_bound_and_does_not_grow_with_requests() -> None:
    reports = [replay(*TINY, "--requests", count, "--capacity", "4MiB") for count in ("400", "800")]
    for report in reports:
        bound = (
            300e6 + report["arena_size_bytes"] + report["tensors_size_bytes"] + 100 * report["stored_pages"]
        )
        assert report["client_rss_max_bytes"] < bound
    growth = reports[1]["client_rss_max_bytes"] - reports[0]["client_rss_max_bytes"]
    # The longest request of each half differs, and tensors are as large as the longest.
    growth -= reports[1]["tensors_size_bytes"] - reports[0]["tensors_size_bytes"]
    growth -= reports[1]["arena_size_bytes"] - reports[0]["arena_size_bytes"]
    assert growth < 5_000_000
