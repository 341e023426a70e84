"""Identify structures a controller may get wrong, and what the values mean."""

from __future__ import annotations

import uuid

import pytest

from kvdev.errors import UsageError
from kvdev.wire import identify
from kvdev.wire.identify import IdentifyController, IdentifyNamespace, LbaFormat, NsDescriptorList
from kvdev.wire.layout import WireError


@pytest.mark.parametrize(
    ("nlbaf", "nulbaf", "flbas", "index"),
    [
        (0, 0, 0x00, 0),
        (15, 0, 0x6F, 15),
        (16, 0, 0x20, 16),
        (15, 1, 0x20, 16),
        (63, 0, 0x6F, 63),
        (0, 0, 0x10, 0),
    ],
)
def test_lba_format_when_many_then_flbas_has_six_bits(
    nlbaf: int, nulbaf: int, flbas: int, index: int
) -> None:
    """Bits 6:5 count only when there are more than 16 formats."""
    formats = tuple(LbaFormat(lbads=9 + (at == index)) for at in range(min(64, nlbaf + 1 + nulbaf)))
    space = IdentifyNamespace(nlbaf_0based=nlbaf, nulbaf=nulbaf, flbas=flbas, lbaf=formats)
    parsed = IdentifyNamespace.parse(space.build())
    assert parsed.lba_format_index == index
    assert parsed.lba_format.block_size_bytes == 1024


def test_lba_format_when_out_of_range_then_wire_error() -> None:
    with pytest.raises(WireError, match=r"flbas\+0x1a: expected a format below 1, got 3"):
        _ = IdentifyNamespace.parse(IdentifyNamespace(flbas=3).build()).lba_format
    data = bytearray(IdentifyNamespace().build())
    data[25] = data[82] = 255  # more formats than there is room for
    assert len(IdentifyNamespace.parse(data).lbaf) == 64
    with pytest.raises(UsageError, match="at most 64, got 65"):
        IdentifyNamespace(lbaf=(LbaFormat(),) * 65).build()
    assert LbaFormat(lbads=200).block_size_bytes == 0


@pytest.mark.parametrize(
    ("mdts", "expected"), [(0, 0), (1, 8192), (5, 131072), (40, 4096 << 40), (41, 0), (255, 0)]
)
def test_mdts_when_any_value_then_no_overflow(mdts: int, expected: int) -> None:
    assert IdentifyController(mdts=mdts).max_transfer_bytes(4096) == expected


@pytest.mark.parametrize(("ioccsz", "expected"), [(0, 0), (3, 0), (4, 0), (5, 16), (260, 4096)])
def test_ioccsz_when_any_value_then_in_capsule_bytes(ioccsz: int, expected: int) -> None:
    assert IdentifyController(ioccsz_16b=ioccsz).in_capsule_bytes_max == expected


def test_descriptors_when_absent_then_none() -> None:
    assert NsDescriptorList.parse(bytes(4096)) == NsDescriptorList()
    assert NsDescriptorList.parse(b"") == NsDescriptorList()
    only = NsDescriptorList(uuid=uuid.UUID(int=5))
    assert NsDescriptorList.parse(only.build()) == only


def test_descriptors_when_length_is_wrong_then_wire_error() -> None:
    with pytest.raises(WireError, match=r"nidl\+0x1: expected 8 bytes for EUI64, got 7"):
        NsDescriptorList.parse(b"\x01\x07\0\0" + bytes(7) + bytes(100))
    with pytest.raises(WireError, match=r"nidl\+0x1: expected at most 4 bytes, got 16"):
        NsDescriptorList.parse(b"\x02\x10\0\0" + bytes(4))
    with pytest.raises(UsageError, match="nguid: expected 16 bytes, got 1"):
        NsDescriptorList(nguid=b"x").build()


def test_descriptors_when_type_is_unknown_then_skipped() -> None:
    data = b"\x7f\x03\0\0abc" + NsDescriptorList(csi=0).build()
    assert NsDescriptorList.parse(data) == NsDescriptorList(csi=0)


def test_nsid_list_when_full_then_continues_after_the_last() -> None:
    nsids = list(range(1, 2000))
    first = identify.parse_nsid_list(identify.build_nsid_list(nsids))
    assert len(first) == 1024
    rest = identify.parse_nsid_list(
        identify.build_nsid_list(nsids, after_nsid=first[-1]), after_nsid=first[-1]
    )
    assert first + rest == nsids


@pytest.mark.parametrize("nsids", [[2, 1], [1, 1], [5], [7, 0xFFFFFFFF]])
def test_nsid_list_when_not_increasing_then_wire_error(nsids: list[int]) -> None:
    data = b"".join(nsid.to_bytes(4, "little") for nsid in nsids).ljust(4096, b"\0")
    with pytest.raises(WireError, match="expected an id above"):
        identify.parse_nsid_list(data, after_nsid=5 if nsids == [5] else 0)


def test_lists_when_short_then_wire_error() -> None:
    with pytest.raises(WireError):
        identify.parse_nsid_list(bytes(4092))
    with pytest.raises(WireError):
        identify.parse_io_command_set_list(bytes(8))
    assert identify.parse_io_command_set_list(identify.build_io_command_set_list([1, 5])) == [1, 5]


def test_namespace_when_all_zero_then_not_present() -> None:
    assert not IdentifyNamespace.parse(bytes(4096)).is_present
    assert IdentifyController(vwc=identify.VWC_PRESENT).has_volatile_cache
    assert not identify.CsiIndependentNamespace(nstat=0).is_ready
