"""Structures at fixed offsets: sizes, reserved bytes, and errors that name the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdev.errors import ProtocolError, UsageError
from kvdev.wire import fabrics, features, identify, log, nvme
from kvdev.wire.layout import BitStruct, WireError, WireStruct

STRUCTS: list[type[WireStruct]] = [
    nvme.Sqe,
    nvme.Cqe,
    nvme.DsmRange,
    fabrics.ConnectData,
    identify.IdentifyController,
    identify.IdentifyNamespace,
    identify.CsiNamespaceNvm,
    identify.CsiControllerNvm,
    identify.CsiIndependentNamespace,
    log.ErrorEntry,
    log.SmartLog,
    log.FirmwareSlotLog,
    log.DiscoveryEntry,
    log.DiscoveryHeader,
    log.ReservationLog,
    features.HostBehaviorSupport,
]
BIT_STRUCTS: list[type[BitStruct]] = [
    fabrics.Cap,
    fabrics.Version,
    fabrics.Cc,
    fabrics.Csts,
    fabrics.Crto,
    features.AsyncEventConfig,
    features.VolatileWriteCache,
]


def places(cls: Any) -> list[tuple[str, int, int]]:
    found = [
        (item.name, *item.metadata["at"][:2]) for item in dataclasses.fields(cls) if "at" in item.metadata
    ]
    return sorted(found, key=lambda place: place[1])


@pytest.mark.parametrize("cls", STRUCTS)
def test_struct_when_laid_out_then_fields_do_not_overlap(cls: type[WireStruct]) -> None:
    end = 0
    for name, offset, size in places(cls):
        assert offset >= end, f"{cls.__name__}.{name}"
        end = offset + size
    assert end <= cls.SIZE


@pytest.mark.parametrize("cls", BIT_STRUCTS)
def test_bits_when_laid_out_then_fields_do_not_overlap(cls: type[BitStruct]) -> None:
    end = 0
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        low, width = item.metadata["bits"]
        assert low >= end, item.name
        end = low + width
    assert end <= 8 * cls.BYTES
    assert cls.parse(0).build() == 0
    ones = cls.parse((1 << 8 * cls.BYTES) - 1)
    assert cls.parse(ones.build()) == ones


@pytest.mark.parametrize("cls", STRUCTS)
def test_struct_when_cut_short_then_wire_error(cls: type[WireStruct]) -> None:
    data = cls().build()
    assert len(data) == cls.SIZE
    assert cls.parse(data + b"more") == cls()
    for size in {0, 1, cls.SIZE // 2, cls.SIZE - 1}:
        with pytest.raises(WireError, match=f"expected {cls.SIZE} bytes, got {size}"):
            cls.parse(data[:size])


@pytest.mark.parametrize("cls", STRUCTS)
def test_struct_when_reserved_bytes_are_set_then_ignored(cls: type[WireStruct]) -> None:
    taken = {at for _, offset, size in places(cls) for at in range(offset, offset + size)}
    if cls is identify.IdentifyNamespace:
        taken |= set(range(128, 384))
    if cls is identify.CsiNamespaceNvm:
        taken |= set(range(12, 268))
    data = bytearray(cls().build())
    for at in range(cls.SIZE):
        if at not in taken:
            data[at] = 0xFF
    assert cls.parse(data) == cls()


def test_build_when_value_does_not_fit_then_usage_error_names_the_field() -> None:
    with pytest.raises(UsageError, match="Sqe cid: expected an integer of 2 bytes, got 65536"):
        nvme.Sqe(cid=65536).build()
    with pytest.raises(UsageError, match="IdentifyController sn: expected at most 20 ASCII"):
        identify.IdentifyController(sn="x" * 21).build()
    with pytest.raises(UsageError, match="ConnectData subnqn: expected a name of at most 223 bytes"):
        fabrics.ConnectData(subnqn="n" * 224).build()
    with pytest.raises(UsageError, match="ConnectData hostid: expected 16 bytes, got 3"):
        fabrics.ConnectData(hostid=b"abc").build()
    with pytest.raises(UsageError, match="Cc iosqes: expected 4 bits, got 16"):
        fabrics.Cc(iosqes=16).build()


@pytest.mark.parametrize("length", [0, 1, 222, 223])
def test_nqn_when_within_limit_then_round_trips(length: int) -> None:
    data = fabrics.ConnectData(subnqn="n" * length)
    assert fabrics.ConnectData.parse(data.build()) == data


def test_nqn_when_unterminated_or_not_utf8_then_wire_error() -> None:
    data = bytearray(fabrics.ConnectData().build())
    data[256:480] = b"n" * 224
    with pytest.raises(WireError) as caught:
        fabrics.ConnectData.parse(data)
    assert (caught.value.field, caught.value.field_offset) == ("subnqn", 256)
    assert isinstance(caught.value, ProtocolError)
    data[256:512] = b"n" * 256
    with pytest.raises(WireError, match="expected a NUL"):
        fabrics.ConnectData.parse(data)
    data[256:512] = b"ab\xff".ljust(256, b"\0")
    with pytest.raises(WireError) as caught:
        fabrics.ConnectData.parse(data)
    assert caught.value.field_offset == 258


def test_padded_when_nul_padded_then_read_as_text() -> None:
    data = bytearray(log.DiscoveryEntry(trsvcid="4420").build())
    data[32:64] = b"8009".ljust(32, b"\0")
    assert log.DiscoveryEntry.parse(data).trsvcid == "8009"
