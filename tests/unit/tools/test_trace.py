"""Reading traces: good lines, bad lines, and the generator's promises."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev_tools.trace import (
    TRACE_BLOCK_TOKENS,
    Request,
    generate_conversations,
    generate_trace,
    parse_request,
    read_trace,
    summarise,
)

ROOT = Path(__file__).resolve().parents[3]
SHARED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"

GOOD = {"timestamp": 5, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]}


def test_parse_request_when_good_then_fields() -> None:
    assert parse_request(json.dumps(GOOD), where="t:1") == Request(5, 1100, 7, (1, 2, 3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "0"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"hash_ids": []}, "hash_ids"),
        ({"hash_ids": "123"}, "hash_ids"),
        ({"hash_ids": [1, -2, 3]}, r"hash_ids\[1\]"),
        ({"hash_ids": [1, 2, 1 << 64]}, r"hash_ids\[2\]"),
        ({"hash_ids": [1, 2, 2]}, "hash_ids"),
        ({"hash_ids": [1, 2]}, "expected 3 blocks"),
    ],
)
def test_parse_request_when_a_field_is_bad_then_names_it(change: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        parse_request(json.dumps({**GOOD, **change}), where="trace.jsonl:17")
    assert str(caught.value).startswith("trace.jsonl:17: ")


@pytest.mark.parametrize(
    "line", ["", "[]", "3", "{", "null", "[" * 100_000, '{"timestamp": 1}', "x" * (1 << 20) + "y"]
)
def test_parse_request_when_no_record_then_one_error(line: str) -> None:
    with pytest.raises(UsageError):
        parse_request(line, where="t:1")


def test_read_trace_when_a_line_is_bad_then_names_its_number(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "input_length": 9}) + "\n")
    with pytest.raises(UsageError, match=r"t\.jsonl:3: hash_ids"):
        list(read_trace(path))
    assert len(list(read_trace(path, limit=1))) == 1


def test_read_trace_when_missing_or_binary_then_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        list(read_trace(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot read"):
        list(read_trace(tmp_path))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(UsageError, match="UTF-8"):
        list(read_trace(tmp_path / "b"))


def test_generated_trace_is_deterministic_and_in_the_published_format(tmp_path: Path, seed: int) -> None:
    first, again = generate_trace(200, seed=seed), generate_trace(200, seed=seed)
    assert first == again
    assert first != generate_trace(200, seed=seed + 1)
    path = tmp_path / "generated.jsonl"
    path.write_text("".join(request.to_json() + "\n" for request in first))
    assert list(read_trace(path)) == first


def test_generated_trace_shares_only_equal_prefixes(seed: int) -> None:
    predecessor: dict[int, int] = {}
    times = []
    for request in islice(generate_conversations(seed=seed), 500):
        times.append(request.timestamp_ms)
        assert len(request.hash_ids) == -(-request.input_length // TRACE_BLOCK_TOKENS)
        before = -1
        for hash_id in request.hash_ids:
            assert predecessor.setdefault(hash_id, before) == before
            before = hash_id
    assert times == sorted(times)


def test_generated_trace_reuses_like_real_ones(seed: int) -> None:
    summary = summarise(generate_trace(300, seed=seed))
    assert 0.25 < summary.hit_rate < 0.75


def test_summarise_counts_only_unbroken_prefixes() -> None:
    requests = [Request(0, 1024, 1, (1, 2)), Request(1, 1536, 1, (1, 9, 2)), Request(2, 512, 1, (2,))]
    summary = summarise(requests)
    assert (summary.pages_requested, summary.pages_restorable, summary.pages_distinct) == (6, 2, 3)
    assert summarise([]).hit_rate == 0.0


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the published trace is not in ../shared")
def test_published_trace_reads_whole_and_reuses_as_published() -> None:
    summary = summarise(read_trace(SHARED_TRACE))
    assert summary.requests == 12031
    assert round(summary.hit_rate, 3) == 0.366
