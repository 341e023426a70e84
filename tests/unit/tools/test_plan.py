"""The plan's arithmetic: needs of a trace, sizes of the client, and refusal with the sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.units import GIB, MIB
from kvdev_tools.plan import (
    ARENA_SIZE_BYTES_TARGET,
    Demand,
    available_memory,
    check_fit,
    client_demands,
    count_needs,
    disk_free_bytes,
    plan_client,
)
from kvdev_tools.trace import Request, generate_trace, summarise


def request(*ids: int) -> Request:
    return Request(0, 512 * len(ids), 1, ids)


def test_needs_agree_with_the_summary(seed: int) -> None:
    requests = generate_trace(200, seed=seed)
    needs, summary = count_needs(requests), summarise(requests)
    assert (needs.requests, needs.pages_requested) == (summary.requests, summary.pages_requested)
    assert needs.pages_distinct == summary.pages_distinct == needs.distinct_by_request[-1]
    assert needs.pages_per_request_max == max(len(r.hash_ids) for r in requests)


def test_needs_say_how_many_requests_fit() -> None:
    needs = count_needs([request(1, 2), request(1, 2, 3), request(1, 9), request((1 << 64) - 1)])
    assert list(needs.distinct_by_request) == [2, 3, 4, 5]
    assert [needs.requests_within(count) for count in (0, 1, 2, 3, 4, 5, 6)] == [0, 0, 1, 2, 3, 4, 4]


def test_needs_of_nothing_and_without_counting() -> None:
    assert count_needs([]).pages_distinct is None
    needs = count_needs([request(1), request(1, 2)], is_distinct_counted=False)
    assert (needs.requests, needs.pages_requested, needs.pages_per_request_max) == (2, 3, 2)
    assert needs.pages_distinct is None


@pytest.mark.parametrize(
    ("geometry", "pages", "batch"),
    [("medium", 48, 48), ("medium", 200, 64), ("small", 2000, 1024), ("qwen2.5-32b", 3, 1)],
)
def test_client_has_tensors_for_the_largest_request_and_an_arena_for_a_batch(
    geometry: str, pages: int, batch: int
) -> None:
    shape = Geometry.preset(geometry)
    client = plan_client(shape, count_needs([request(*range(pages))]))
    assert client.batch_page_count == batch
    assert client.tensors_size_bytes == pages * shape.page_size_bytes
    assert client.arena_size_bytes == batch * shape.page_size_bytes
    assert client.arena_size_bytes <= max(ARENA_SIZE_BYTES_TARGET, shape.page_size_bytes)


def test_arena_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(UsageError, match=r"arena: .*1 MiB.*512 KiB"):
        plan_client(Geometry.preset("medium"), count_needs([request(1)]), arena_size_bytes=MIB // 2)


def test_page_size_that_is_no_multiple_of_4_kib_is_rounded_in_the_arena() -> None:
    geometry = Geometry(model_id="t", layer_count=1, kv_head_count=1, head_size=3, tokens_per_page=512)
    client = plan_client(geometry, count_needs([request(1, 2)]))
    assert (geometry.page_size_bytes, client.arena_size_bytes) == (6144, 2 * 8192)


def test_plan_that_does_not_fit_is_refused_with_the_whole_sum() -> None:
    geometry = Geometry.preset("medium")
    client = plan_client(geometry, count_needs([request(*range(64))]))
    demands = [Demand("namespaces", 3 * GIB, "4 x 768 MiB"), *client_demands(geometry, client, 2000)]
    check_fit(demands, available_bytes=8 * GIB, where="memory", remedy="fewer requests")
    with pytest.raises(UsageError) as caught:
        check_fit(demands, available_bytes=2 * GIB, where="memory", remedy="try --requests 10")
    text = str(caught.value)
    for part in (
        "plan: memory",
        "namespaces 3 GiB (4 x 768 MiB)",
        "paged tensors 64 MiB (64 pages x 1 MiB)",
        "2000 pages x 100 B",
        "2 GiB available",
        "try --requests 10",
    ):
        assert part in text
    assert "\n" not in text


def test_memory_is_the_least_of_the_machine_and_its_control_groups(tmp_path: Path) -> None:
    meminfo, cgroup, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    cgroup.write_text("0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    assert available_memory(meminfo, cgroup, root).memory_bytes == 8000 * 1024
    (root / "a" / "memory.max").write_text("1000000\n")
    (root / "a" / "memory.current").write_text("400000\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    found = available_memory(meminfo, cgroup, root)
    assert (found.memory_bytes, found.memory_source) == (600_000, str(root / "a" / "memory.max"))
    assert available_memory(tmp_path / "none", cgroup, root).memory_source == "unknown"


def test_disk_of_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert disk_free_bytes(tmp_path) > 0
    with pytest.raises(UsageError, match=r"files: .*none"):
        disk_free_bytes(tmp_path / "none")
