"""What becomes of a flush on its way down: each hop passes it on, swallows it, or needs none.

SPDK's bdev_nvme completes FLUSH by itself unless ``enable_flush`` is set, and its NVMe-oF target reports success
where a bdev has no flush; both lose what a power cut catches in a volatile cache.
Not here: what lies beyond a controller (the caller knows it); reading (``observe``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spdk_rpc.plan.observe import BdevFacts
from spdk_rpc.plan.resource import NVME_OPTIONS, Id, Kind, Resource, State, controller_of_bdev, id_of_bdev


class FlushState(enum.Enum):
    """What a hop does with a flush."""

    EFFECTIVE = "effective"
    SWALLOWED = "swallowed"
    NOT_NEEDED = "not needed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FlushHop:
    """One hop and why it is so."""

    where: str
    state: FlushState
    reason: str


Beyond = Callable[[Resource, int], list[FlushHop]]
"""The hops behind a controller's namespace; empty when nothing is known of them."""

HOP_COUNT_LIMIT = 64
"""Bdevs stacked on each other; a ring would have no end."""


def verdict(hops: list[FlushHop]) -> FlushState:
    """A flush over all of them."""
    states = {hop.state for hop in hops}
    for state in (FlushState.SWALLOWED, FlushState.UNKNOWN, FlushState.EFFECTIVE):
        if state in states:
            return state
    return FlushState.NOT_NEEDED if states else FlushState.UNKNOWN


def flush_of_bdev(
    name: str,
    state: State,
    facts: Mapping[str, BdevFacts],
    *,
    beyond: Beyond | None = None,
    depth: int = 0,
) -> list[FlushHop]:
    """The hops of a flush to this bdev, top first; from what is there, or from what shall be (no facts)."""
    if depth >= HOP_COUNT_LIMIT:
        return [FlushHop(name, FlushState.UNKNOWN, "bdevs stand on each other in a ring")]
    own = id_of_bdev(name, state)

    def below(base: str) -> list[FlushHop]:
        return flush_of_bdev(base, state, facts, beyond=beyond, depth=depth + 1)

    if own is None:
        known = facts.get(name)
        if known is None:
            return [FlushHop(name, FlushState.UNKNOWN, "no such bdev")]
        passes = known.is_flush_supported
        reason = known.product_name if passes else f"{known.product_name}: has no flush"
        return [FlushHop(name, FlushState.EFFECTIVE if passes else FlushState.SWALLOWED, reason)]
    resource = state[own]
    if own.kind is Kind.BDEV:
        return [_leaf(name, resource, facts.get(name))]
    if own.kind is Kind.RAID:
        bases = resource.attributes.get("base_bdevs") or ()
        members = [hop for base in bases for hop in below(base)]
        has_flush = facts[name].is_flush_supported if name in facts else _pass_on(bases, state, facts)
        return [_middle(name, "raid0", has_flush, members), *members]
    if own.kind is Kind.LVOL:
        store = state.get(Id(Kind.LVSTORE, own.parent))
        base = store.attributes.get("bdev_name") if store is not None else None
        rest = below(base) if base else []
        return [_middle(name, "lvol", False, rest), *rest]
    assert own.kind is Kind.CONTROLLER, "these kinds provide bdevs"
    split = controller_of_bdev(name, [own.name])
    rest = beyond(resource, split[1]) if beyond is not None and split is not None else []
    options = state.get(Id(Kind.OPTIONS, NVME_OPTIONS))
    is_enabled = options is not None and bool(options.attributes.get("enable_flush"))
    if rest and verdict(rest) is FlushState.NOT_NEEDED:
        return [
            FlushHop(name, FlushState.NOT_NEEDED, "bdev_nvme: nothing behind it keeps data in a cache"),
            *rest,
        ]
    reason = "bdev_nvme: enable_flush is set" if is_enabled else "bdev_nvme: enable_flush is not set"
    return [FlushHop(name, FlushState.EFFECTIVE if is_enabled else FlushState.SWALLOWED, reason), *rest]


def _leaf(name: str, resource: Resource, facts: BdevFacts | None) -> FlushHop:
    driver = resource.attributes["driver"]
    if driver in ("malloc", "null"):
        return FlushHop(name, FlushState.NOT_NEEDED, f"{driver}: memory, lost with its process anyway")
    has_flush = facts.is_flush_supported if facts is not None else driver == "aio"
    if has_flush:
        return FlushHop(name, FlushState.EFFECTIVE, f"{driver}: reaches the device")
    return FlushHop(name, FlushState.SWALLOWED, f"{driver}: SPDK's {driver} bdev has no flush; use aio")


def _pass_on(bases: tuple[str, ...], state: State, facts: Mapping[str, BdevFacts]) -> bool:
    """Whether a raid has a flush: when all its members do."""
    for base in bases:
        own = id_of_bdev(base, state)
        if base in facts:
            if not facts[base].is_flush_supported:
                return False
        elif own is not None and (own.kind is Kind.LVOL or state[own].attributes.get("driver") == "uring"):
            return False
    return True


def _middle(name: str, what: str, has_flush: bool, below: list[FlushHop]) -> FlushHop:
    if below and verdict(below) is FlushState.NOT_NEEDED:
        return FlushHop(name, FlushState.NOT_NEEDED, f"{what}: nothing below keeps data in a cache")
    if has_flush:
        return FlushHop(name, FlushState.EFFECTIVE, f"{what}: passes it to its members")
    reason = "has no flush" if what == "lvol" else "has no flush, because a member has none"
    return FlushHop(name, FlushState.SWALLOWED, f"{what}: {reason}")
