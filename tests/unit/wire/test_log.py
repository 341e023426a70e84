"""Log pages a controller may get wrong; counts it sends size nothing."""

from __future__ import annotations

import pytest

from kvdev.errors import UsageError
from kvdev.wire import features, log
from kvdev.wire.layout import WireError
from kvdev.wire.log import (
    AnaGroup,
    AnaLog,
    AnaState,
    ChangedNsLog,
    DiscoveryEntry,
    DiscoveryHeader,
    ErrorEntry,
)

ANA = AnaLog(
    change_count=1,
    groups=(AnaGroup(1, AnaState.OPTIMIZED, 1, (1, 2)), AnaGroup(2, AnaState.CHANGE, 1, (3,))),
)


def put(data: bytes, offset: int, value: int, size: int) -> bytes:
    return data[:offset] + value.to_bytes(size, "little") + data[offset + size :]


@pytest.mark.parametrize(
    ("offset", "value", "size", "field"),
    [
        (8, 3, 2, "anagrpid"),  # more groups than bytes
        (8, 0xFFFF, 2, "anagrpid"),
        (16, 0, 4, "anagrpid"),
        (16, 17, 4, "anagrpid"),
        (16, 2, 4, "anagrpid"),  # twice
        (20, 0xFFFFFFFF, 4, "nnsids"),
        (20, 12, 4, "nnsids"),
        (32, 0, 1, "state"),
        (32, 5, 1, "state"),
    ],
)
def test_ana_when_broken_then_field_is_named(offset: int, value: int, size: int, field: str) -> None:
    with pytest.raises(WireError) as caught:
        AnaLog.parse(put(ANA.build(), offset, value, size), anagrpmax=16)
    assert caught.value.field == field


def test_ana_when_cut_anywhere_then_wire_error() -> None:
    data = ANA.build()
    assert AnaLog.parse(data + bytes(100), anagrpmax=2) == ANA
    for size in range(len(data)):
        with pytest.raises(WireError):
            AnaLog.parse(data[:size], anagrpmax=16)


def test_ana_state_when_upper_bits_are_set_then_ignored() -> None:
    assert AnaLog.parse(put(ANA.build(), 32, 0xF1, 1), anagrpmax=16) == ANA


def test_discovery_header_when_unknown_or_huge_then_wire_error() -> None:
    assert DiscoveryHeader(numrec=log.DISCOVERY_ENTRY_COUNT_MAX).check().numrec == 4096
    with pytest.raises(WireError, match="recfmt"):
        DiscoveryHeader(recfmt=1).check()
    with pytest.raises(WireError, match="numrec"):
        DiscoveryHeader(numrec=1 << 63).check()


def test_discovery_log_when_built_then_parsed() -> None:
    entries = [DiscoveryEntry(trsvcid=str(port), subnqn="nqn.a", traddr="::1") for port in (4420, 4421)]
    page = log.build_discovery_log(entries, genctr=3)
    header = DiscoveryHeader.parse(page).check()
    assert (header.genctr, header.numrec) == (3, 2)
    assert log.parse_discovery_entries(page[1024:], entry_count=2) == entries
    with pytest.raises(WireError):
        log.parse_discovery_entries(page[1024:], entry_count=3)


def test_changed_ns_when_overflowed_then_says_so() -> None:
    many = ChangedNsLog(nsids=tuple(range(1, 1026)), has_overflowed=False)
    assert ChangedNsLog.parse(many.build()) == ChangedNsLog((), has_overflowed=True)
    full = ChangedNsLog(nsids=tuple(range(1, 1025)), has_overflowed=False)
    assert ChangedNsLog.parse(full.build()) == full


def test_error_log_when_parsed_then_ends_at_empty_entry() -> None:
    page = ErrorEntry(error_count=2).build() + ErrorEntry(error_count=1).build() + bytes(64)
    assert [entry.error_count for entry in log.parse_error_log(page)] == [2, 1]
    assert log.parse_error_log(page[:100]) == [ErrorEntry(error_count=2)]


def test_effects_when_short_then_wire_error() -> None:
    with pytest.raises(WireError):
        log.EffectsLog.parse(bytes(2048))


def test_cut_log_when_past_the_end_then_zeros() -> None:
    assert log.cut_log(b"abcdef", offset=4, byte_count=4) == b"ef\0\0"
    assert log.cut_log(b"abcdef", offset=1 << 62, byte_count=4) == bytes(4)


def test_supported_log_when_built_then_one_dword_per_page() -> None:
    page = log.build_supported_log([log.Lid.SMART, log.Lid.DISCOVERY])
    assert page[8] == page[4 * 0x70] == 1 and sum(page) == 2
    with pytest.raises(UsageError):
        log.build_supported_log([256])


@pytest.mark.parametrize(("value", "count"), [(0x0003_0003, 4), (0x0000_FFFF, 1), (0x0007_0003, 4)])
def test_queue_count_when_halves_differ_then_the_smaller(value: int, count: int) -> None:
    parsed = features.NumberOfQueues.parse(value)
    assert parsed.qpair_count == count
    if value != 0x0000_FFFF:
        assert parsed.build() == value


@pytest.mark.parametrize("count", [0, 65536])
def test_queue_count_when_out_of_range_then_usage_error(count: int) -> None:
    with pytest.raises(UsageError, match=f"got {count}"):
        features.NumberOfQueues(count, 1).build()
