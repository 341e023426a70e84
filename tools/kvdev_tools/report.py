"""What a replay ends with: totals of the requests, as a table and as JSON with the same figures.

Not here: measuring (``kvdev_tools.replay``). Keys are listed in docs/cli.md and held by a test.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdev.units import format_size
from kvdev_tools.output import fields, table
from kvdev_tools.progress import RequestRecord

NS_PER_MS = 1e6
KILLED_TEXT = ", the client killed half way and a new one started"


@dataclass
class Totals:
    """Sums over requests; keeps 8 bytes per request with a restore, for the percentiles."""

    requests: int = 0
    pages_requested: int = 0
    pages_restored: int = 0
    pages_written: int = 0
    pages_verified: int = 0
    mismatches: int = 0
    page_errors: int = 0
    flushes_lost: int = 0
    failed_reads: int = 0
    restore_ns: int = 0
    offload_ns: int = 0
    stored_pages: int = 0
    client_rss_max_bytes: int = 0
    restore_latency_ns: array[int] = field(default_factory=lambda: array("q"))

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        self.pages_requested += record.pages_requested
        self.pages_restored += record.pages_restored
        self.pages_written += record.pages_written
        self.pages_verified += record.pages_verified
        self.mismatches += record.mismatches
        self.page_errors += record.page_errors
        self.flushes_lost += record.flushes_lost
        self.failed_reads += record.failed_reads
        self.restore_ns += record.restore_ns
        self.offload_ns += record.offload_ns
        self.stored_pages = record.stored_pages
        self.client_rss_max_bytes = max(self.client_rss_max_bytes, record.rss_max_bytes)
        if record.pages_restored:
            self.restore_latency_ns.append(record.restore_ns)

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Totals:
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    @property
    def hit_rate(self) -> float:
        """Pages restored over pages requested; 0 when none was requested."""
        return self.pages_restored / self.pages_requested if self.pages_requested else 0.0

    def restore_latency_ms(self, percentile: float) -> float:
        """Of the requests that restored something; 0 when none did."""
        if not self.restore_latency_ns:
            return 0.0
        sample = np.frombuffer(self.restore_latency_ns, np.int64)
        return float(np.percentile(sample, percentile)) / NS_PER_MS


@dataclass(frozen=True)
class MemberBytes:
    """What one member of the volume holds and moved; None where nobody counted."""

    uri: str
    stored_bytes: int
    bytes_read: int | None = None
    bytes_written: int | None = None


@dataclass(frozen=True)
class Run:
    """The circumstances of a replay."""

    geometry: str
    layout: str
    trace: str
    seed: int
    page_size_bytes: int
    kv_namespace: str
    arena_size_bytes: int
    arena_backing: str
    kernels: str
    """The back end that moved the pages."""
    tensors_size_bytes: int
    kills: int
    elapsed_s: float
    members: tuple[MemberBytes, ...]


def _rate(size_bytes: int, ns: int) -> float:
    return size_bytes / ns if ns else 0.0  # bytes per nanosecond are GB per second


def document(totals: Totals, run: Run) -> dict[str, Any]:
    """The report with snake_case keys that carry their unit."""
    page = run.page_size_bytes
    return {
        "requests": totals.requests,
        "pages_requested": totals.pages_requested,
        "pages_restored": totals.pages_restored,
        "pages_written": totals.pages_written,
        "pages_verified": totals.pages_verified,
        "mismatches": totals.mismatches,
        "page_errors": totals.page_errors,
        "flushes_lost": totals.flushes_lost,
        "failed_reads": totals.failed_reads,
        "hit_rate": totals.hit_rate,
        "bytes_restored": totals.pages_restored * page,
        "bytes_written": totals.pages_written * page,
        "restore_gb_per_s": _rate(totals.pages_restored * page, totals.restore_ns),
        "offload_gb_per_s": _rate(totals.pages_written * page, totals.offload_ns),
        "restore_latency_ms_p50": totals.restore_latency_ms(50),
        "restore_latency_ms_p99": totals.restore_latency_ms(99),
        "stored_pages": totals.stored_pages,
        "members": [
            {
                "uri": member.uri,
                "stored_bytes": member.stored_bytes,
                "bytes_read": member.bytes_read,
                "bytes_written": member.bytes_written,
            }
            for member in run.members
        ],
        "kv_namespace": run.kv_namespace,
        "geometry": run.geometry,
        "page_size_bytes": page,
        "layout": run.layout,
        "trace": run.trace,
        "seed": run.seed,
        "kills": run.kills,
        "elapsed_s": run.elapsed_s,
        "client_rss_max_bytes": totals.client_rss_max_bytes,
        "arena_size_bytes": run.arena_size_bytes,
        "arena_backing": run.arena_backing,
        "kernels": run.kernels,
        "tensors_size_bytes": run.tensors_size_bytes,
    }


def text(totals: Totals, run: Run) -> list[str]:
    """The report for people."""
    page = run.page_size_bytes
    d = document(totals, run)
    lines = fields(
        [
            ("trace", f"{run.trace}, seed {run.seed}"),
            ("geometry", f"{run.geometry}: {format_size(page)} a page, {run.layout} layout"),
            ("requests", f"{totals.requests}{KILLED_TEXT if run.kills else ''}"),
            ("pages requested", totals.pages_requested),
            ("pages restored", f"{totals.pages_restored} ({format_size(totals.pages_restored * page)})"),
            ("pages written", f"{totals.pages_written} ({format_size(totals.pages_written * page)})"),
            ("hit rate", f"{totals.hit_rate:.4f}"),
            ("restore", f"{d['restore_gb_per_s']:.2f} GB/s" if totals.pages_restored else "-"),
            ("offload", f"{d['offload_gb_per_s']:.2f} GB/s" if totals.pages_written else "-"),
            (
                "restore latency",
                f"p50 {d['restore_latency_ms_p50']:.2f} ms, p99 {d['restore_latency_ms_p99']:.2f} ms a request",
            ),
            (
                "client memory",
                f"{format_size(totals.client_rss_max_bytes)} at most, with {format_size(run.arena_size_bytes)} "
                f"of staging ({run.arena_backing}) and {format_size(run.tensors_size_bytes)} of paged tensors",
            ),
            ("page kernels", f"{run.kernels}; on a GPU: not run, the tensors of a replay are in CPU memory"),
            ("elapsed", f"{run.elapsed_s:.1f} s"),
            ("pages verified", totals.pages_verified),
            ("pages damaged", totals.page_errors),
            ("failed reads", totals.failed_reads),
            ("flushes lost", totals.flushes_lost),
            ("mismatches", totals.mismatches),
        ]
    )
    rows = [
        (
            member.uri,
            format_size(member.stored_bytes),
            "-" if member.bytes_written is None else format_size(member.bytes_written),
            "-" if member.bytes_read is None else format_size(member.bytes_read),
        )
        for member in run.members
    ]
    return [*lines, "", *table(rows, header=("member", "holds", "written", "read"))]
