"""Structures on media have the bytes that docs/on-disk-format.md says, at the offsets it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.errors import CorruptionError
from kvdev.native.checksum import CRC32C, NH64
from kvdev.native.crc import crc32c
from kvdev.native.index import ENTRY_DTYPE, MEDIA_HEADER_DTYPE, format_table, seal
from kvdev.store.label import Label, MemberInfo, build_label, parse_label
from kvdev.store.superblock import (
    Extent,
    Record,
    Superblock,
    build_record,
    build_superblock,
    checksum_name,
    parse_record,
    parse_superblock,
)
from kvdev_kernels.nh64 import nh64

DOC = Path(__file__).resolve().parents[2] / "docs" / "on-disk-format.md"
VOLUME = bytes(range(16))
NAMESPACE = bytes(range(100, 116))


def number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def check_header(data: bytes, magic: bytes, *, count: int, index: int, uuid: bytes, sequence: int) -> None:
    assert data[:8] == magic
    assert (number(data, 8, 2), number(data, 10, 2)) == (1, count)
    assert number(data, 12, 4) == len(data)
    assert number(data, 16, 4) == crc32c(data[:16] + bytes(4) + data[20:])
    assert (number(data, 20, 4), data[24:40], number(data, 40, 8)) == (index, uuid, sequence)


def test_label_bytes_are_as_documented() -> None:
    members = (MemberInfo(1000, 1, b"N" * 16), MemberInfo(1001, 3, b"E" * 8 + bytes(8)))
    label = Label(VOLUME, "volume é", 3, 1, 4096, 131072, 77, members)
    data = build_label(label)
    check_header(data, b"KDEVVLBL", count=2, index=1, uuid=VOLUME, sequence=3)
    assert data[64:73] == "volume é".encode()
    assert [number(data, 128, 2), number(data, 130, 2), number(data, 132, 4)] == [2, 1, 4096]
    assert [number(data, 136, 4), number(data, 144, 8)] == [131072, 77]
    assert [number(data, 192, 8), data[200], data[208:224]] == [1000, 1, b"N" * 16]
    assert [number(data, 224, 8), data[232], data[240:256]] == [1001, 3, b"E" * 8 + bytes(8)]
    assert data[256:] == bytes(4096 - 256)
    assert crc32c(data) == 0x82E54B76
    assert parse_label(data, what="l") == label
    anew = Label(VOLUME, "volume é", 3, 1, 4096, 131072, 77, members, former_uuid=b"O" * 16)
    data = build_label(anew)
    assert data[152:192] == b"O" * 16 + bytes(24)
    assert parse_label(data, what="l") == anew


def test_superblock_bytes_are_as_documented() -> None:
    superblock = Superblock(VOLUME, "v", 9, 4, 512, 65536, 1234, 64, (512, 1152), 2048, 631808, 1700000000)
    data = build_superblock(superblock, copy_index=1)
    check_header(data, b"KDEVVSBK", count=0, index=1, uuid=VOLUME, sequence=9)
    assert [number(data, 128, 2), data[130], number(data, 132, 4), number(data, 136, 4)] == [4, 1, 512, 65536]
    assert [number(data, offset, 8) for offset in range(144, 192, 8)] == [
        1234, 512, 1152, 2048, 631808, 1700000000,
    ]  # fmt: skip
    assert number(data, 140, 4) == 64
    assert crc32c(data) == 0x6C01AB50
    assert parse_superblock(data, what="s", volume_uuid=VOLUME, copy_index=1) == superblock


def test_record_bytes_are_as_documented() -> None:
    values = {
        "page_size_bytes": (184, 8),
        "slot_blocks": (192, 4),
        "slot_count": (196, 4),
        "quota_pages": (200, 4),
        "geometry_slba": (208, 8),
        "geometry_size_bytes": (216, 4),
        "geometry_crc32c": (220, 4),
        "table_slba": (224, 8),
        "table_block_count": (232, 4),
        "spare_block_count": (236, 4),
        "journal_slba": (240, 8),
        "journal_block_count": (248, 4),
        "tail_position": (252, 4),
        "tail_sequence": (256, 8),
        "epoch_first_sequence": (264, 8),
        "data_slba": (272, 8),
        "extent_slba": (280, 8),
        "extent_block_count": (288, 8),
        "owner_pid": (312, 4),
        "owner_start_ticks": (320, 8),
        "created_unix_s": (328, 8),
    }
    fields: dict[str, Any] = {name: 1000 + index for index, name in enumerate(values)}
    record = Record(
        volume_uuid=VOLUME,
        record_index=5,
        sequence=8,
        epoch=6,
        name="kv",
        namespace_uuid=NAMESPACE,
        geometry_fingerprint=b"F" * 32,
        state=1,
        flags=1,
        owner_boot_id=b"B" * 16,
        **fields,
    )
    data = build_record(record)
    check_header(data, b"KDEVVREC", count=0, index=5, uuid=VOLUME, sequence=8)
    assert number(data, 48, 8) == 6
    assert {name: number(data, *place) for name, place in values.items()} == fields
    assert (data[128:144], data[144:176], data[176], data[179]) == (NAMESPACE, b"F" * 32, 1, 1)
    assert data[296:312] == b"B" * 16
    assert data[336:] == bytes(176)
    assert crc32c(data) == 0x7E23DC12
    assert parse_record(data, what="r", volume_uuid=VOLUME) == record


def test_lease_bytes_are_as_documented() -> None:
    numbers: tuple[Any, ...] = (*range(18), b"B" * 16, 77, 88, 99)
    record = replace(
        Record(VOLUME, 5, 8, 6, "kv", NAMESPACE, b"F" * 32, 1, 2, *numbers),
        lease_host_id=b"H" * 16,
        lease_key=1 << 63 | 5,
        lease_ms=30_000,
        lease_pid_namespace=0xF0000001,
        durable_sequence=1 << 40,
        lease_host_name="kv-b",
        ttl_s=86_400,
    )
    data = build_record(record)
    assert data[179] == 2
    assert data[336:352] == b"H" * 16
    assert (number(data, 352, 8), number(data, 360, 4), number(data, 364, 4), number(data, 368, 8)) == (
        1 << 63 | 5, 30_000, 0xF0000001, 1 << 40,
    )  # fmt: skip
    assert data[376:416] == b"kv-b" + bytes(36)
    assert number(data, 416, 4) == 86_400
    assert data[420:] == bytes(92)
    assert crc32c(data) == 0x03218607
    assert parse_record(data, what="r", volume_uuid=VOLUME) == record
    assert record.is_claimed and not record.is_clean


def test_record_of_version_2_bytes_are_as_documented_and_version_1_ignores_them() -> None:
    numbers: tuple[Any, ...] = (*range(18), b"B" * 16, 77, 88, 99)
    plain = Record(VOLUME, 5, 8, 6, "kv", NAMESPACE, b"F" * 32, 1, 1, *numbers)
    record = replace(
        plain,
        priority=200,
        reserve_pages=0x01020304,
        salt_mark=0x05060708,
        erased_mib=0x090A0B0C,
        further=(Extent(1 << 33, 1 << 34, (1 << 33) + 9, 7), Extent(1, 2, 3, 4), Extent(5, 6, 7, 0)),
        scrub_slot=11,
    )
    data = build_record(record)
    assert (number(data, 8, 2), data[178]) == (2, 200)
    assert [number(data, offset, 4) for offset in (180, 204, 316)] == [0x090A0B0C, 0x01020304, 0x05060708]
    assert data[420:424] == b"\3\0\0\0"
    assert [number(data, offset, 8) for offset in (424, 432)] == [1 << 33, 1 << 34]
    assert [number(data, 440 + 24 * index, 4) for index in range(3)] == [9, 2, 2]
    assert [number(data, 444 + 24 * index, 4) for index in range(3)] == [7, 4, 0]
    assert number(data, 496, 4) == 11
    assert parse_record(data, what="r", volume_uuid=VOLUME) == record
    assert [extent.slot_count for extent in replace(record, slot_count=20).extents] == [9, 7, 4, 0]
    # To version 1 these bytes are reserved: ignored, whatever they hold.
    old = bytearray(data)
    old[8] = 1
    raw = np.frombuffer(bytes(old), dtype=np.uint8).copy()
    seal(raw, len(raw))
    assert parse_record(raw.tobytes(), what="r", volume_uuid=VOLUME) == replace(plain, scrub_slot=11)
    for news in (
        replace(plain, priority=1),
        replace(plain, reserve_pages=1),
        replace(plain, salt_mark=1),
        replace(plain, erased_mib=1),
        replace(plain, further=(Extent(1, 2, 3, 4),)),
    ):
        assert build_record(news)[8] == 2
    assert build_record(replace(plain, state=2))[8] == 2 and build_record(plain)[8] == 1
    for offset, value, text in ((8, 4, "version: expected 1 to 3, got 4"), (176, 3, "state: expected 0 to 2, got 3"),
                                (420, 4, "further extents: expected at most 3, got 4")):  # fmt: skip
        raw = np.frombuffer(data, dtype=np.uint8).copy()
        raw[offset] = value
        seal(raw, len(raw))
        with pytest.raises(CorruptionError, match=text):
            parse_record(raw.tobytes(), what="r", volume_uuid=VOLUME)


def test_table_block_bytes_are_as_documented() -> None:
    out = np.zeros(512 * 2, dtype=np.uint8)
    format_table(block_bytes=512, first_block=2, block_count=2, slot_count=25, uuid=NAMESPACE, out=out)
    for index, count in ((2, 7), (3, 4)):
        data = out[(index - 2) * 512 :][:512].tobytes()
        check_header(data, b"KDEVVTBL", count=count, index=index, uuid=NAMESPACE, sequence=0)
        slots = [number(data, 64 + 64 * entry + 60, 4) for entry in range(count)]
        assert slots == list(range(index * 7, index * 7 + count))
    assert MEDIA_HEADER_DTYPE.itemsize == ENTRY_DTYPE.itemsize == 64
    assert crc32c(out) == 0x2F180CE6


def test_entry_checksum_is_as_documented() -> None:
    key, generation, length, page_crc = bytes(range(32)), (3 << 40) + 7, 65536, 0xDEADBEEF
    identity = (
        NAMESPACE
        + key
        + generation.to_bytes(8, "little")
        + length.to_bytes(4, "little")
        + page_crc.to_bytes(4, "little")
    )
    expected = crc32c(identity) << 32 | page_crc
    made = CRC32C.entry_checksum(NAMESPACE, key, generation, length, page_crc)
    assert made == expected == 0xCAC3CBF1DEADBEEF


def test_entry_checksum_of_nh64_is_as_documented() -> None:
    key, generation, length, page_sum = bytes(range(32)), (3 << 40) + 7, 65536, 0xDEADBEEF01234567
    identity = (
        NAMESPACE
        + key
        + generation.to_bytes(8, "little")
        + length.to_bytes(4, "little")
        + (2).to_bytes(4, "little")
    )
    made = NH64.entry_checksum(NAMESPACE, key, generation, length, page_sum)
    assert made == nh64(identity) ^ page_sum == 0x58E02E76374139A7


def test_record_of_version_3_bytes_are_as_documented() -> None:
    numbers: tuple[Any, ...] = (*range(18), b"B" * 16, 77, 88, 99)
    plain = Record(VOLUME, 5, 8, 6, "kv", NAMESPACE, b"F" * 32, 1, 1, *numbers)
    data = build_record(replace(plain, checksum_number=2))
    assert (number(data, 8, 2), data[421]) == (3, 2)
    assert parse_record(data, what="r", volume_uuid=VOLUME) == replace(plain, checksum_number=2)
    # A number to come is kept, so that whoever opens the namespace can refuse it by name.
    later = parse_record(build_record(replace(plain, checksum_number=7)), what="r", volume_uuid=VOLUME)
    assert later.checksum_number == 7 and checksum_name(later) == "unknown (7)"
    # Versions before it have nothing there, and a zero is CRC32C.
    for version, value in ((1, 2), (2, 2), (3, 0)):
        raw = np.frombuffer(data, dtype=np.uint8).copy()
        raw[8], raw[421] = version, value
        seal(raw, len(raw))
        assert parse_record(raw.tobytes(), what="r", volume_uuid=VOLUME) == plain


def test_documented_entry_offsets_are_the_arrays() -> None:
    text = DOC.read_text()
    entry_part = text[text.index("Entry, 64 bytes") : text.index("**Checksum**")]
    documented = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", entry_part, re.M)]
    assert ENTRY_DTYPE.fields is not None
    actual = [(field[1], field[0].itemsize) for field in ENTRY_DTYPE.fields.values()]
    assert documented == actual
    header_part = text[text.index("## Header") : text.index("## Label")]
    documented = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", header_part, re.M)]
    assert MEDIA_HEADER_DTYPE.fields is not None
    assert documented == [(field[1], field[0].itemsize) for field in MEDIA_HEADER_DTYPE.fields.values()]
