"""What a fresh scan says about a namespace in use, and what the ANA log does. Decisions only.

Spec: NVM Express Base 5.1.13 (identity), 8.1.1 (ANA).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from kvdev.initiator.namespace import NamespaceInfo
from kvdev.native.queue import PathState
from kvdev.wire.log import AnaGroup, AnaLog, AnaState

ANA_GROUP_COUNT_MAX = 1024
ANA_NSID_COUNT_MAX = 4096
"""What an ANA log is read for at most, whatever the controller says it may have."""


class Change(enum.Enum):
    NONE = "none"
    GROWN = "grown"
    SHRUNK = "shrunk"
    REMOVED = "removed"
    REPLACED = "replaced"
    """Not the namespace that was opened: it must not be used in its place."""


def compare(
    opened: NamespaceInfo, found: NamespaceInfo | None, *, has_other_paths: bool
) -> tuple[Change, str]:
    """How a namespace stands to the one that was opened under its id, and why it cannot be used."""
    if found is None:
        return Change.REMOVED, "it is not active here"
    for field in ("nguid", "eui64", "uuid"):
        before, now = getattr(opened.identity, field), getattr(found.identity, field)
        if before != now:
            return Change.REPLACED, f"{field.upper()}: expected {_hex(before)}, got {_hex(now)}"
    for name, before, now in (
        ("block size", opened.block_size_bytes, found.block_size_bytes),
        ("metadata", opened.metadata_size_bytes, found.metadata_size_bytes),
        ("command set", opened.csi, found.csi),
    ):
        if before != now:
            return Change.REPLACED, f"{name}: expected {before}, got {now}"
    if found.problem:
        return Change.REPLACED, found.problem
    if found.max_transfer_bytes < opened.max_transfer_bytes:
        wanted, got = opened.max_transfer_bytes, found.max_transfer_bytes
        return Change.REPLACED, f"MDTS: expected at least {wanted} bytes, got {got}"
    if has_other_paths and not found.is_shared:
        return Change.REPLACED, "NMIC: expected a shared namespace on several paths, got a private one"
    if found.block_count > opened.block_count:
        return Change.GROWN, f"from {opened.block_count} to {found.block_count} blocks"
    if found.block_count < opened.block_count:
        return Change.SHRUNK, f"from {opened.block_count} to {found.block_count} blocks"
    return Change.NONE, ""


def _hex(value: bytes | None) -> str:
    return "none" if value is None else value.hex()


def ana_log_size_bytes(*, nanagrpid: int, nn: int) -> int:
    """Bytes of an ANA log that cannot be longer, by what the controller says and by our own bounds."""
    groups = min(nanagrpid, ANA_GROUP_COUNT_MAX)
    return AnaLog.HEADER_BYTES + groups * AnaGroup.HEADER_BYTES + min(nn, ANA_NSID_COUNT_MAX) * 4


def ana_path_states(
    log: AnaLog, infos: Mapping[int, NamespaceInfo], nsids: Sequence[int]
) -> dict[int, PathState]:
    """What a controller is to each namespace by its ANA log; one in no group is not usable."""
    by_nsid = {nsid: group.state for group in log.groups for nsid in group.nsids}
    by_group = {group.anagrpid: group.state for group in log.groups}
    states = {}
    for nsid in nsids:
        state = by_nsid.get(nsid)
        if state is None and nsid in infos:
            state = by_group.get(infos[nsid].anagrpid)
        states[nsid] = (
            _PATH_STATES.get(state, PathState.UNUSABLE) if state is not None else PathState.UNUSABLE
        )
    return states


def is_changing(log: AnaLog) -> bool:
    return any(group.state == AnaState.CHANGE for group in log.groups)


_PATH_STATES = {
    AnaState.OPTIMIZED: PathState.OPTIMIZED,
    AnaState.NON_OPTIMIZED: PathState.NON_OPTIMIZED,
}
