"""vhost-user messages and the block configuration, as bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from kvdev.errors import ProtocolError, UsageError
from kvdev.testing.vhost_peer import config_of
from kvdev.vhost.options import VhostOptions
from kvdev.vhost.protocol import (
    FLAG_NEED_REPLY,
    BlkConfig,
    Inflight,
    MemoryRegion,
    Request,
    build_get_config,
    build_mem_table,
    build_message,
    name_of,
    parse_head,
    parse_u64,
)


def test_build_message_then_the_bytes_are_the_protocols() -> None:
    assert build_message(Request.SET_OWNER) == bytes.fromhex("030000000100000000000000")
    with_ack = build_message(Request.SET_FEATURES, struct.pack("<Q", 1 << 32), flags=FLAG_NEED_REPLY)
    assert with_ack == bytes.fromhex("02000000 09000000 08000000 0000000001000000".replace(" ", ""))


def test_build_mem_table_then_user_and_guest_addresses_are_ours() -> None:
    table = build_mem_table([MemoryRegion(0x10000, 0x2000, 0), MemoryRegion(0x40000, 0x1000, 0x3000)])
    assert struct.unpack_from("<II", table) == (2, 0)
    assert struct.unpack_from("<QQQQ", table, 8) == (0x10000, 0x2000, 0x10000, 0)
    assert struct.unpack_from("<QQQQ", table, 40) == (0x40000, 0x1000, 0x40000, 0x3000)
    assert len(table) == 72


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (bytes(11), "12 bytes"),
        (struct.pack("<III", 1, 4, 8), "version 1"),
        (struct.pack("<III", 1, 5, 4097), "at most 4096"),
    ],
)
def test_parse_head_when_impossible_then_the_error_names_the_field(raw: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        parse_head(raw)


def test_parse_head_when_random_bytes_then_a_head_or_its_one_error(rng: np.random.Generator) -> None:
    for _ in range(500):
        raw = rng.bytes(12)
        try:
            head = parse_head(raw)
        except ProtocolError:
            continue
        assert head.size_bytes <= 4096


@pytest.mark.parametrize("size", [0, 4, 7, 9, 16])
def test_parse_u64_when_another_size_then_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"got {size}"):
        parse_u64(bytes(size), what="GET_FEATURES")


def test_config_when_built_then_it_parses_to_the_same_and_fields_are_where_virtio_has_them() -> None:
    config = config_of(1 << 20, block_size_bytes=4096)
    raw = config.build()
    assert BlkConfig.parse(build_get_config()[:12] + raw) == config
    assert len(raw) == 60
    assert struct.unpack_from("<Q", raw, 0) == (2048,)
    assert struct.unpack_from("<I", raw, 20) == (4096,)
    assert struct.unpack_from("<H", raw, 34) == (4,)
    assert struct.unpack_from("<III", raw, 36) == (32768, 4, 1)
    assert struct.unpack_from("<IIB", raw, 48) == (32768, 1, 1)


def test_config_when_short_then_what_is_missing_reads_as_zero() -> None:
    raw = config_of(1 << 20).build()
    config = BlkConfig.parse(bytes(12) + raw[:36])
    assert (config.capacity_sectors, config.max_discard_sectors) == (2048, 0)
    with pytest.raises(ProtocolError, match="at least 20"):
        BlkConfig.parse(bytes(12) + raw[:7])


def test_inflight_when_packed_or_padded_then_both_are_read() -> None:
    whole = Inflight(8192, 4096, 2, 128).build()
    assert len(whole) == 24
    assert Inflight.parse(whole) == Inflight.parse(whole[:20]) == Inflight(8192, 4096, 2, 128)
    with pytest.raises(ProtocolError, match="got 19"):
        Inflight.parse(whole[:19])


def test_name_of_when_unknown_then_its_number() -> None:
    assert (name_of(24), name_of(99)) == ("GET_CONFIG", "request 99")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_count", 0),
        ("queue_count", 17),
        ("queue_size", 2),
        ("queue_size", 96),
        ("queue_size", 2048),
        ("max_transfer_bytes", 5000),
        ("window_size_bytes", 1),
        ("bounce_size_bytes", 4096),
    ],
)
def test_options_when_out_of_range_then_the_error_names_field_and_value(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{field}: expected .*, got {value}"):
        VhostOptions(**dict[str, Any]({field: value}))
