"""Plans for people and for scripts: a diff in colours, the exact RPCs, and one JSON document.

Not here: the tree of ``status`` (``tree``).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from kvdev_tools.provision.work import Outcome, WholePlan
from spdk_rpc.plan import Action, Call, Change, Extra, Plan

_MARKS = {
    Action.CREATE: ("+", "32"),
    Action.UPDATE: ("~", "33"),
    Action.REPLACE: ("-/+", "31"),
    Action.REPAIR: ("-/+", "33"),
    Action.DELETE: ("-", "31"),
}
_WORDS = {
    Action.CREATE: "to make",
    Action.UPDATE: "to change",
    Action.REPLACE: "to replace",
    Action.REPAIR: "to repair",
    Action.DELETE: "to remove",
}


class Painter:
    """Colours on a terminal, and only there."""

    def __init__(
        self, stream: TextIO, *, when: str = "auto", environment: Mapping[str, str] = os.environ
    ) -> None:
        is_wanted = stream.isatty() and "NO_COLOR" not in environment and environment.get("TERM") != "dumb"
        self._is_on = when == "always" or (when == "auto" and is_wanted)

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_on else text


def plan_lines(whole: WholePlan, painter: Painter, *, shows_rpcs: bool = True) -> Iterator[str]:
    """The diff, the RPCs below it, notes, problems, and the sum."""
    for view, plan in whole.endpoints:
        if plan.changes:
            yield painter.paint("1", f"{view.endpoint.title}  {view.endpoint.rpc}  {view.observed.version}")
            for change in plan.changes:
                yield from _change_lines(change, painter)
            if shows_rpcs:
                yield "  calls:"
                yield from (f"    {call_text(call)}" for step in plan.steps for call in step.calls)
    for spec, volume in whole.volumes:
        if volume.steps:
            yield painter.paint("1", f"volume {spec.name}")
            for step in volume.steps:
                yield painter.paint("32", f"  + {step.title}")
                yield from (painter.paint("32", f"      {line}") for line in step.details())
    for note in whole.notes:
        yield f"note: {note}"
    for problem in whole.problems:
        yield painter.paint("31", f"problem: {problem}")
    yield summary(whole)


def summary(whole: WholePlan) -> str:
    counts: Counter[str] = Counter()
    for _, plan in whole.endpoints:
        counts.update(_WORDS[change.action] for change in plan.changes)
    counts[_WORDS[Action.CREATE]] += sum(len(volume.steps) for _, volume in whole.volumes)
    parts = [f"{counts[word]} {word}" for word in _WORDS.values() if counts[word]]
    if whole.problems:
        parts.append(f"{len(whole.problems)} in the way")
    if parts:
        return ", ".join(parts)
    return "nothing to remove" if whole.is_removal else "nothing to do: everything is as the file says"


def _change_lines(change: Change, painter: Painter) -> Iterator[str]:
    mark, colour = _MARKS[change.action]
    reason = f"  ({change.reason})" if change.reason else ""
    lost = "  DATA IS LOST" if change.loses_data else ""
    yield painter.paint(colour, f"  {mark} {change.id}{reason}{lost}")
    for name, before, after in change.differences():
        if before is None:
            yield painter.paint(colour, f"      {name}: {_value(after)}")
        else:
            yield painter.paint(colour, f"      {name}: {_value(before)} -> {_value(after)}")


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(str(each) for each in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def call_text(call: Call) -> str:
    """One RPC as it is sent. Keys travel by name, so no parameter of ours is a secret."""
    return f"{call.method} {json.dumps(call.params)}" if call.params else call.method


def plan_document(whole: WholePlan) -> dict[str, Any]:
    """The plan for ``--json``."""
    changes: list[Mapping[str, Any]] = []
    calls: list[Mapping[str, Any]] = []
    for view, plan in whole.endpoints:
        changes += [_change_document(view.endpoint.title, change) for change in plan.changes]
        calls += _call_documents(view.endpoint.title, plan)
    for spec, volume in whole.volumes:
        for step in volume.steps:
            changes.append(
                {
                    "entry": f"volume {spec.name}",
                    "action": Action.CREATE.value,
                    "resource": step.title,
                    "reason": "",
                    "loses_data": False,
                }
            )
    return {
        "is_empty": whole.is_empty,
        "changes": changes,
        "calls": calls,
        "extras": [
            _extra_document(view.endpoint.title, extra)
            for view, plan in whole.endpoints
            for extra in plan.extras
        ],
        "notes": whole.notes,
        "problems": whole.problems,
    }


def _change_document(entry: str, change: Change) -> dict[str, Any]:
    return {
        "entry": entry,
        "action": change.action.value,
        "resource": str(change.id),
        "reason": change.reason,
        "loses_data": change.loses_data,
    }


def _extra_document(entry: str, extra: Extra) -> dict[str, Any]:
    return {
        "entry": entry,
        "resource": str(extra.id),
        "reference": None if extra.product_name else extra.id.reference,
        "part_count": extra.part_count,
    }


def _call_documents(entry: str, plan: Plan) -> list[dict[str, Any]]:
    return [
        {"entry": entry, "method": call.method, "params": json.dumps(call.params)}
        for step in plan.steps
        for call in step.calls
    ]


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    return {
        "is_done": outcome.error is None,
        "steps_done": outcome.done_count,
        "steps": outcome.step_count,
        "failed": outcome.failed or None,
        "error": None if outcome.error is None else str(outcome.error),
        "is_fate_unknown": outcome.is_fate_unknown,
        "was_undone": outcome.was_undone,
    }
