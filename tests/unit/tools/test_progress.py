"""The replay's state file and report: what a killed client leaves, and what the figures say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev_tools.progress import ProgressFile, RequestRecord, peak_rss_bytes, read_progress, trim_progress
from kvdev_tools.report import MemberBytes, Run, Totals, document, text

RUN = Run(
    geometry="small",
    layout="nhd",
    trace="generated",
    seed=1,
    page_size_bytes=65536,
    kv_namespace="vol:mem:a#kv",
    arena_size_bytes=1 << 20,
    arena_backing="thp",
    kernels="numpy",
    tensors_size_bytes=1 << 21,
    kills=1,
    elapsed_s=2.5,
    members=(MemberBytes("mem:a", 10, 20, 30), MemberBytes("mem:b", 11)),
)


def record(index: int, *, restored: int = 1, mismatches: int = 0) -> RequestRecord:
    return RequestRecord(
        request_index=index,
        pages_requested=4,
        pages_restored=restored,
        pages_written=4 - restored,
        pages_verified=restored,
        mismatches=mismatches,
        page_errors=0,
        restore_ns=1000 * (index + 1),
        offload_ns=5000,
        stored_pages=3 * index,
        rss_max_bytes=100 + index,
    )


def test_records_come_back_and_a_torn_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert list(read_progress(path)) == []
    assert trim_progress(path) == 0
    records = [record(index) for index in range(5)]
    with ProgressFile(path) as file:
        for item in records:
            file.append(item)
    assert list(read_progress(path)) == records
    whole = path.read_bytes()
    last_line = len(whole) - whole.rindex(b"\n", 0, -1) - 1
    for cut in range(1, last_line + 1):
        path.write_bytes(whole[:-cut])
        assert list(read_progress(path)) == records[:4]
        assert trim_progress(path) == 4
        with ProgressFile(path) as file:
            file.append(records[4])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1,2]\n", b"{}\n", b"[7,4,1,3,1,0,0,1000,5000,0,100]\n"])
def test_a_foreign_line_is_refused_by_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "progress"
    path.write_bytes(line)
    with pytest.raises(UsageError, match=r"progress:1: expected"):
        list(read_progress(path))


def test_totals_and_document() -> None:
    totals = Totals.of([record(0, restored=0), record(1), record(2, restored=4, mismatches=1)])
    report = document(totals, RUN)
    assert report["requests"] == 3
    assert report["hit_rate"] == 5 / 12
    assert report["pages_written"] == 7
    assert report["mismatches"] == 1
    assert report["restore_latency_ms_p50"] == pytest.approx(0.0025)
    assert report["restore_latency_ms_p99"] == pytest.approx(0.00299)
    assert report["restore_gb_per_s"] == pytest.approx(5 * 65536 / 6000)
    assert report["client_rss_max_bytes"] == 102
    json.dumps(report)
    shown = "\n".join(text(totals, RUN))
    for part in ("mismatches", "hit rate", "0.4167", "mem:a", "thp"):
        assert part in shown


def test_report_of_nothing_divides_by_nothing() -> None:
    report = document(Totals(), RUN)
    assert (report["hit_rate"], report["restore_gb_per_s"], report["restore_latency_ms_p99"]) == (
        0.0,
        0.0,
        0.0,
    )


def test_peak_rss_is_this_process_s() -> None:
    assert peak_rss_bytes() > 1 << 20
    assert peak_rss_bytes(Path("/nonexistent")) == 0
