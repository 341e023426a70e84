"""What a fresh scan and an ANA log mean for a namespace in use."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdev.block.device import DeviceIdentity
from kvdev.initiator.change import Change, ana_log_size_bytes, ana_path_states, compare, is_changing
from kvdev.initiator.namespace import NamespaceInfo
from kvdev.native.queue import PathState
from kvdev.wire.log import AnaGroup, AnaLog, AnaState

OPENED = NamespaceInfo(
    nsid=1,
    identity=DeviceIdentity(nguid=bytes(range(16)), uuid=bytes(range(16)), serial="S"),
    csi=0,
    block_size_bytes=4096,
    block_count=1000,
    metadata_size_bytes=0,
    lba_format_index=0,
    max_transfer_bytes=131072,
    atomic_write_blocks=1,
    optimal_boundary_blocks=0,
    preferred_write_blocks=1,
    is_write_protected=False,
    anagrpid=3,
)


@pytest.mark.parametrize(
    ("changes", "change", "text"),
    [
        ({}, Change.NONE, ""),
        ({"block_count": 1001}, Change.GROWN, "from 1000 to 1001 blocks"),
        ({"block_count": 999}, Change.SHRUNK, "from 1000 to 999 blocks"),
        ({"identity": DeviceIdentity(nguid=bytes(16), uuid=bytes(range(16)))}, Change.REPLACED, "NGUID"),
        ({"identity": DeviceIdentity(nguid=bytes(range(16)))}, Change.REPLACED, "UUID: expected 0001"),
        ({"block_size_bytes": 512}, Change.REPLACED, "block size: expected 4096, got 512"),
        ({"metadata_size_bytes": 8}, Change.REPLACED, "metadata"),
        ({"csi": 2}, Change.REPLACED, "command set"),
        ({"problem": "no good"}, Change.REPLACED, "no good"),
        ({"max_transfer_bytes": 65536}, Change.REPLACED, "MDTS"),
        ({"is_shared": False}, Change.REPLACED, "NMIC"),
    ],
)
def test_compare_when_found_then_change_and_reason(
    changes: dict[str, Any], change: Change, text: str
) -> None:
    found = dataclasses.replace(OPENED, **changes)
    got, reason = compare(OPENED, found, has_other_paths=True)
    assert got is change
    assert text in reason


def test_compare_when_absent_or_private_on_one_path_then_removed_or_fine() -> None:
    assert compare(OPENED, None, has_other_paths=False)[0] is Change.REMOVED
    private = dataclasses.replace(OPENED, is_shared=False)
    assert compare(OPENED, private, has_other_paths=False)[0] is Change.NONE


def test_ana_when_states_then_paths_are_what_they_say() -> None:
    states = {
        1: AnaState.OPTIMIZED,
        2: AnaState.NON_OPTIMIZED,
        3: AnaState.INACCESSIBLE,
        4: AnaState.PERSISTENT_LOSS,
        5: AnaState.CHANGE,
    }
    groups = tuple(AnaGroup(anagrpid=each, state=state, nsids=(each,)) for each, state in states.items())
    log = AnaLog(change_count=1, groups=groups)
    expected = [PathState.OPTIMIZED, PathState.NON_OPTIMIZED, *[PathState.UNUSABLE] * 3]
    assert list(ana_path_states(log, {}, [1, 2, 3, 4, 5]).values()) == expected
    assert is_changing(log)
    assert not is_changing(AnaLog(change_count=1, groups=groups[:4]))


def test_ana_when_the_log_lists_no_namespaces_then_their_group_counts() -> None:
    log = AnaLog(change_count=1, groups=(AnaGroup(anagrpid=3, state=AnaState.NON_OPTIMIZED),))
    assert ana_path_states(log, {1: OPENED}, [1]) == {1: PathState.NON_OPTIMIZED}
    assert ana_path_states(log, {}, [1]) == {1: PathState.UNUSABLE}


@pytest.mark.parametrize(
    ("nanagrpid", "nn", "size"),
    [(0, 0, 16), (1, 1, 52), (32, 32, 16 + 32 * 36), (1 << 32, 1 << 32, 16 + 1024 * 32 + 4096 * 4)],
)
def test_ana_log_size_when_controller_says_anything_then_bounded(nanagrpid: int, nn: int, size: int) -> None:
    assert ana_log_size_bytes(nanagrpid=nanagrpid, nn=nn) == size
