"""The splitter finds whole values whatever the cuts, and refuses what is no JSON at the first chance."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdk_rpc.framing import (
    DEPTH_LIMIT,
    DuplicateKeys,
    FramingError,
    JsonSplitter,
    decode_value,
    encode_value,
)

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 64) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


def split(stream: bytes, cuts: list[int], size_limit_bytes: int = 1 << 20) -> list[bytes]:
    splitter = JsonSplitter(size_limit_bytes=size_limit_bytes)
    found: list[bytes] = []
    start = 0
    for end in [*sorted(cuts), len(stream)]:
        found += splitter.feed(stream[start:end])
        start = max(start, end)
    assert splitter.pending_size_bytes == 0
    return found


@given(
    documents=st.lists(DOCUMENTS, max_size=4), gap=st.sampled_from([b"", b"\n", b" \r\n\t"]), data=st.data()
)
def test_split_of_a_stream_cut_anywhere_gives_the_documents(
    documents: list[Any], gap: bytes, data: st.DataObject
) -> None:
    raw = [
        json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass") for document in documents
    ]
    stream = gap.join(raw)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    assert split(stream, cuts) == raw
    assert split(stream, list(range(len(stream)))) == raw


def test_split_inside_a_utf8_character_at_4096_keeps_the_reply() -> None:
    prefix = b'{"result":"'
    reply = prefix + b"x" * (4095 - len(prefix)) + "é".encode() + b'"}'
    assert reply[4095:4097] == "é".encode()
    (raw,) = split(reply, [4096])
    assert decode_value(raw)["result"].endswith("xé")


@pytest.mark.parametrize(
    "stream", [b"hello\n", b"/* c */{}", b"1", b'"text"', b"null", b"}", b"{}x", b"\xef\xbb\xbf{}", b"{}{}]"]
)
def test_feed_of_what_starts_no_object_is_refused(stream: bytes) -> None:
    with pytest.raises(FramingError, match="expected a JSON object or array"):
        JsonSplitter(size_limit_bytes=100).feed(stream)


def test_size_limit_allows_the_limit_and_refuses_one_more() -> None:
    value = b'{"a":"' + b"x" * 20 + b'"}'
    assert split(value, [], len(value)) == [value]
    assert split(value + value, [5], len(value)) == [value, value]
    for cuts in ([], [len(value) - 1], list(range(len(value)))):
        with pytest.raises(FramingError, match="longer than"):
            split(value, cuts, len(value) - 1)


def test_depth_limit_allows_the_limit_and_refuses_one_more() -> None:
    at_limit = b"[" * DEPTH_LIMIT + b"]" * DEPTH_LIMIT
    assert split(at_limit, []) == [at_limit]
    with pytest.raises(FramingError, match="deeper"):
        JsonSplitter(size_limit_bytes=1 << 20).feed(b"[" * (DEPTH_LIMIT + 1))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,}',
        b"{]",
        b'{"a" 1}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":"\xff"}',
        b'{"a":"\n"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"{a:1}",
    ],
)
def test_decode_of_malformed_json_is_refused(raw: bytes) -> None:
    with pytest.raises(FramingError):
        decode_value(raw)


@given(st.binary(max_size=60))
def test_untrusted_bytes_raise_only_framing_errors(untrusted: bytes) -> None:
    try:
        for raw in JsonSplitter(size_limit_bytes=50).feed(b"{" + untrusted):
            decode_value(raw)
    except FramingError:
        pass


def test_decode_marks_a_name_given_twice() -> None:
    assert isinstance(decode_value(b'{"a":1,"a":2}'), DuplicateKeys)
    assert not isinstance(decode_value(b'{"a":1,"b":2}'), DuplicateKeys)


@given(DOCUMENTS)
def test_encode_then_decode_gives_the_value(document: Any) -> None:
    assert decode_value(encode_value(document)) == document


def test_feed_takes_time_linear_in_the_bytes() -> None:
    # 2 MiB of small values and one value of 2 MiB, in small pieces: quadratic work would take minutes.
    stream = b'{"a":"b"}' * 200_000 + b'{"a":"' + b"x" * (2 << 20) + b'"}'
    splitter = JsonSplitter(size_limit_bytes=4 << 20)
    count = sum(len(splitter.feed(stream[start : start + 65536])) for start in range(0, len(stream), 65536))
    assert count == 200_001
