"""Carry out a plan: one step at a time, each checked by reading; stops at the first that fails.

SPDK's RPCs are no transaction, so what was done stays, and the next plan goes on from there. The one thing
undone is a raid that did not come online: it would keep its members claimed without being of use.
Not here: what to do (``compare``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from spdk_rpc.errors import RpcMethodError, RpcTimeoutError, RpcTransportError, SpdkRpcError
from spdk_rpc.plan.compare import Plan, Step
from spdk_rpc.plan.observe import Caller, Focus, observe, observe_one
from spdk_rpc.plan.resource import Id, Kind, Resource, bdevs_used, changed_names, delete_calls

_MAY_APPEAR_BY_ITSELF = (Kind.LVSTORE, Kind.LVOL, Kind.RAID)
"""SPDK finds these on bdevs when it examines them."""


@dataclass(frozen=True)
class Applied:
    """How far it came. ``failed`` is the step that did not get done, None when all were."""

    done_count: int
    skipped_count: int = 0
    failed: Id | None = None
    error: Exception | None = None
    is_fate_unknown: bool = False
    was_undone: bool = False


class StepError(SpdkRpcError):
    """A step's calls succeeded, but reading shows something else than expected."""


def apply_plan(
    plan: Plan,
    call: Caller,
    *,
    methods: frozenset[str] | None = None,
    on_step: Callable[[int, Step], None] | None = None,
) -> Applied:
    """Execute the steps in order; ``on_step`` hears of each before it starts. Never raises for a refusal."""
    assert not plan.problems, "a plan with problems is not executed"
    done_count = skipped_count = 0
    for index, step in enumerate(plan.steps):
        if on_step is not None:
            on_step(index, step)
        try:
            was_there = _run(step, call, methods)
        except (SpdkRpcError, OSError) as error:
            return Applied(
                done_count,
                skipped_count,
                step.id,
                error,
                is_fate_unknown=_is_fate_unknown(error),
                was_undone=_undo(step, call, error),
            )
        done_count += 1
        skipped_count += was_there
    return Applied(done_count, skipped_count)


def _run(step: Step, call: Caller, methods: frozenset[str] | None) -> bool:
    """Do it and check it; True when it was there or gone already."""
    if (step.is_removal or step.id.kind in _MAY_APPEAR_BY_ITSELF) and not _fault(step, call, methods):
        return True
    try:
        for each in step.calls:
            call(each.method, each.params or None)
    except RpcMethodError:
        # Refused because it is there already, or gone already, is as good as done; reading tells.
        if not _fault(step, call, methods):
            return True
        raise
    fault = _fault(step, call, methods)
    if fault:
        raise StepError(fault)
    return False


def _fault(step: Step, call: Caller, methods: frozenset[str] | None) -> str:
    """How what is there differs from what the step was to bring about; empty when it does not."""
    found = observe_one(call, _focus(step), methods=methods)
    if step.expected is None:
        return "" if found is None else f"{step.id}: expected it gone, it is there"
    if found is None:
        return "" if _is_nothing(step.expected) else f"{step.id}: expected it there, it is not"
    names = changed_names(found, step.expected)
    return ", ".join(_difference(step.id, name, found, step.expected) for name in names)


def _focus(step: Step) -> Focus:
    expected = step.expected
    if expected is None:
        return Focus(step.id, is_in_config=False)
    is_in_config = step.id.kind is Kind.HOST and any(expected.attributes.values())
    is_in_config |= step.id.kind is Kind.LISTENER and bool(expected.attributes.get("secure_channel"))
    return Focus(step.id, bdevs_used(expected), is_in_config)


def _is_nothing(expected: Resource) -> bool:
    """No limits at all is how a bdev without QoS reads."""
    return expected.id.kind is Kind.QOS and not any(expected.attributes.values())


def _difference(own: Id, name: str, found: Resource, expected: Resource) -> str:
    return f"{own}: {name}: expected {expected.attributes[name]}, got {found.attributes.get(name)}"


def _is_fate_unknown(error: Exception) -> bool:
    return isinstance(error, (RpcTransportError, RpcTimeoutError)) and error.is_fate_unknown


def _undo(step: Step, call: Caller, error: Exception) -> bool:
    if (
        step.id.kind is not Kind.RAID
        or step.is_removal
        or isinstance(error, (RpcTransportError, RpcTimeoutError))
    ):
        return False
    with contextlib.suppress(SpdkRpcError, OSError):
        found = observe(call, kinds=(Kind.RAID,)).state.get(step.id)
        if found is None or found.attributes.get("state") == "online":
            return False
        for each in delete_calls(found):
            call(each.method, each.params)
        return True
    return False
