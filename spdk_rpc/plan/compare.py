"""Compare desired with observed state: what to make, change and remove, in which order, what stands in the way.

Not here: reading (``observe``); executing (``apply``). Nothing here talks to anybody.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spdk_rpc.plan.observe import BdevFacts, Observed, lacking_methods
from spdk_rpc.plan.resource import (
    NVME_OPTIONS,
    Call,
    Id,
    Kind,
    Resource,
    State,
    bdevs_used,
    changed_names,
    create_calls,
    delete_calls,
    id_of_bdev,
    is_removable,
    loses_data,
    needs,
    update_calls,
)

LISTED_EXTRA_COUNT = 16
"""Notes about what runs and is not in the file; the plan's ``extras`` have all of it."""
BDEV_WAIT_MS = 10_000
"""How long a namespace that appears on an attached controller may take to become a bdev."""

_IN_SUBSYSTEM = (Kind.HOST, Kind.NAMESPACE, Kind.LISTENER)


class Action(enum.Enum):
    """What happens to a resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    REPAIR = "repair"
    """Replace something that is broken and holds nothing."""
    DELETE = "delete"


@dataclass(frozen=True)
class Change:
    """One resource's way from ``before`` to ``after``; one of the two is None for CREATE and DELETE."""

    action: Action
    before: Resource | None
    after: Resource | None
    reason: str = ""

    @property
    def id(self) -> Id:
        both = self.after or self.before
        assert both is not None, "a change has a before or an after"
        return both.id

    @property
    def loses_data(self) -> bool:
        gone = self.before if self.action in (Action.REPLACE, Action.DELETE) else None
        return gone is not None and loses_data(gone.id.kind, gone.attributes)

    def differences(self) -> list[tuple[str, Any, Any]]:
        """Attribute, what it is, what it shall be."""
        if self.after is None:
            return []
        if self.before is None:
            given = self.after.given()
            given.pop("state", None)  # a raid's state is no parameter of it
            return [(name, None, value) for name, value in given.items()]
        names = changed_names(self.before, self.after)
        return [(name, self.before.attributes.get(name), self.after.attributes[name]) for name in names]


@dataclass(frozen=True)
class Step:
    """One thing to do and how to know that it was done: ``expected`` reads back, None means it is gone.

    ``before`` is what is changed in place or removed; None where it is made.
    """

    id: Id
    calls: tuple[Call, ...]
    expected: Resource | None
    before: Resource | None = None

    @property
    def is_removal(self) -> bool:
        return self.expected is None


@dataclass(frozen=True)
class Problem:
    """Why the plan cannot be carried out as it is."""

    id: Id | None
    text: str

    def __str__(self) -> str:
        return self.text if self.id is None else f"{self.id}: {self.text}"


@dataclass(frozen=True)
class Extra:
    """Something that runs and is not in the file; it stays unless it is named for removal."""

    id: Id
    part_count: int = 0
    """Hosts, namespaces, listeners, lvols and limits that belong to it alone."""
    product_name: str = ""
    """Of a bdev that a file has no words for, and that is not removed here either."""

    def text(self) -> str:
        what = f"{self.id} ({self.product_name})" if self.product_name else str(self.id)
        parts = f" with {self.part_count} part{'s' if self.part_count > 1 else ''}" if self.part_count else ""
        how = "" if self.product_name else f"; --remove {self.id.reference} takes it down"
        return f"{what}{parts}: runs, is not in the file, and stays{how}"


@dataclass
class Plan:
    """What to do to one SPDK process. With any problem nothing of it may be executed."""

    changes: list[Change] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.changes and not self.problems


def plan_state(
    desired: State,
    observed: Observed,
    *,
    replace: Collection[str] = (),
    remove: Collection[str] = (),
    prune: bool = False,
    arriving: Mapping[str, int | None] | None = None,
) -> Plan:
    """The plan that makes ``desired`` true and leaves everything else alone.

    Args:
        replace: references (``raid:R0``) of resources that may be removed and made anew if they differ.
        remove: references of resources that are not in the file and shall go.
        prune: remove hosts, namespaces and listeners of the file's subsystems, and limits of its bdevs, that it
            does not name.
        arriving: bdevs of controllers that will be there by then, with their block size where it is known.
    """
    planner = _Planner(desired, observed, frozenset(replace), prune, dict(arriving or {}))
    return planner.plan(frozenset(remove))


def plan_removal(desired: State, observed: Observed) -> Plan:
    """The plan that removes every resource of ``desired`` that is there; options and transports stay."""
    plan = Plan()
    removed = {
        own
        for own in desired
        if own in observed.state and is_removable(own.kind) and own.kind is not Kind.QOS
    }
    for own in _dependents(removed, observed.state):
        if own.kind in _IN_SUBSYSTEM or own.kind is Kind.QOS:
            removed.add(own)
        elif own not in removed:
            used = ", ".join(
                str(each) for each in sorted(needs(observed.state[own], observed.state) & removed)
            )
            plan.problems.append(Problem(own, f"is not in the file and uses {used}; remove it first"))
    order = _order({own: observed.state[own] for own in removed}, observed.state)
    for own in reversed(order):
        before = observed.state[own]
        plan.changes.append(Change(Action.DELETE, before, None))
        plan.steps.append(Step(own, tuple(delete_calls(before)), None, before))
    _check_methods(plan, observed)
    return plan


class _Planner:
    def __init__(
        self,
        desired: State,
        observed: Observed,
        replace: frozenset[str],
        prune: bool,
        arriving: dict[str, int | None],
    ) -> None:
        self._desired = desired
        self._observed = observed
        self._replace = replace
        self._prune = prune
        self._arriving = arriving
        self._plan = Plan()
        self._extras: list[Id] = []
        self._staying_parts: list[Id] = []
        self._part_counts: Counter[Id] = Counter()
        self._changes: dict[Id, Change] = {}
        self._removed: set[Id] = set()

    def plan(self, remove: frozenset[str]) -> Plan:
        unknown = self._replace - {own.reference for own in self._observed.state}
        for reference in sorted(unknown & {own.reference for own in self._desired}):
            self._plan.notes.append(f"{reference}: is not there yet, nothing to replace")
        for own, after in self._desired.items():
            self._compare(own, after)
        self._compare_extras(remove)
        self._reattach()
        self._spread_removal()
        self._note_extras()
        self._check_sessions()
        self._check_options()
        for change in self._changes.values():
            if change.after is not None and change.action is not Action.UPDATE:
                self._check_bdevs(change.after)
                self._check_file(change.after)
        self._lay_out()
        _check_methods(self._plan, self._observed)
        return self._plan

    def _problem(self, own: Id, text: str) -> None:
        self._plan.problems.append(Problem(own, text))

    # --- what differs ---

    def _compare(self, own: Id, after: Resource) -> None:
        lacking = lacking_methods(own.kind, self._observed.methods)
        if lacking:
            self._problem(own, f"{self._observed.version} has no {lacking[0]}: it cannot be read")
            return
        before = self._observed.state.get(own)
        if before is None:
            if own.kind is not Kind.QOS or any(after.attributes.values()):
                self._changes[own] = Change(Action.CREATE, None, after)
            return
        differing = changed_names(before, after)
        if not differing:
            return
        if own.kind is Kind.RAID and before.attributes.get("state") != "online":
            # It has no bdev, so nothing uses it; making it anew writes nothing.
            state = before.attributes.get("state")
            self._remove(own, before, after, Action.REPAIR, f"it was left {state}")
        elif own.kind is Kind.VHOST and before.attributes.get("bdev_name") is None:
            self._remove(own, before, after, Action.REPAIR, "its bdev has gone")
        elif own.reference in self._replace and is_removable(own.kind):
            self._remove(own, before, after, Action.REPLACE, "named for replacement")
        elif update_calls(before, after) is not None:
            self._changes[own] = Change(Action.UPDATE, before, after)
        else:
            self._problem(own, _why_not_in_place(before, after, differing))

    def _remove(self, own: Id, before: Resource, after: Resource, action: Action, reason: str) -> None:
        self._changes[own] = Change(action, before, after, reason)
        self._removed.add(own)

    def _compare_extras(self, remove: frozenset[str]) -> None:
        """What runs and is not in the file: it stays, and is named, but for what was asked to go."""
        for own, before in self._observed.state.items():
            if own in self._desired or not is_removable(own.kind):
                continue
            whole = self._whole_of(own)
            if own.reference in remove:
                self._delete(own, before, "named for removal")
            elif whole in self._desired and own.kind in (*_IN_SUBSYSTEM, Kind.QOS):
                self._compare_part(own, before)
            elif whole is not None and whole not in self._desired:
                self._part_counts[whole] += 1
            else:
                self._extras.append(own)

    def _note_extras(self) -> None:
        """Only now: what stands on something that goes, goes with it."""
        for own in self._staying_parts:
            if own not in self._removed:
                self._plan.notes.append(f"{own}: is not in the file and stays; --prune removes it")
        staying = sorted(own for own in self._extras if own not in self._removed)
        self._plan.extras = [Extra(own, self._part_counts[own]) for own in staying]
        self._plan.extras += [
            Extra(Id(Kind.BDEV, name), product_name=facts.product_name)
            for name, facts in sorted(self._observed.bdevs.items())
            if id_of_bdev(name, self._observed.state) is None
        ]
        listed = self._plan.extras[:LISTED_EXTRA_COUNT]
        self._plan.notes += [each.text() for each in listed]
        if more := len(self._plan.extras) - len(listed):
            self._plan.notes.append(f"{more} more run, are not in the file, and stay; --json names them")

    def _whole_of(self, own: Id) -> Id | None:
        """What a part belongs to: its subsystem, lvstore, or the bdev it limits."""
        if own.kind in _IN_SUBSYSTEM:
            return Id(Kind.SUBSYSTEM, own.parent)
        if own.kind is Kind.LVOL:
            return Id(Kind.LVSTORE, own.parent)
        return id_of_bdev(own.name, self._observed.state) if own.kind is Kind.QOS else None

    def _compare_part(self, own: Id, before: Resource) -> None:
        """A host, namespace or listener of our subsystems, or limits of our bdevs, that the file does not name."""
        if self._prune:
            self._delete(own, before, "not in the file")
        elif own.kind is Kind.LISTENER and self._lacks_listener(own.parent):
            self._problem(own, "listens on another address than the file says; name it there, or use --prune")
        else:
            self._staying_parts.append(own)

    def _delete(self, own: Id, before: Resource, reason: str) -> None:
        self._changes[own] = Change(Action.DELETE, before, None, reason)
        self._removed.add(own)

    def _lacks_listener(self, nqn: str) -> bool:
        return any(own.kind is Kind.LISTENER and own.parent == nqn for own in self._changes)

    def _reattach(self) -> None:
        """Controllers that were named for it are attached anew, so that their SPDK takes the options."""
        if Id(Kind.OPTIONS, NVME_OPTIONS) not in self._changes:
            return
        for own, before in self._observed.state.items():
            is_named = own.kind is Kind.CONTROLLER and own.reference in self._replace
            if is_named and own in self._desired and own not in self._removed:
                reason = "its flushes are swallowed until it is attached anew"
                self._remove(own, before, self._desired[own], Action.REPLACE, reason)

    def _spread_removal(self) -> None:
        """What uses something that is made anew is made anew as well."""
        state = self._observed.state
        for own in _dependents(self._removed, state):
            causes = needs(state[own], state) & self._removed
            if not causes:
                continue  # it uses something that is a problem of its own and stays
            cause = min(causes)
            if own in self._desired:
                if own not in self._removed:
                    self._remove(own, state[own], self._desired[own], Action.REPLACE, f"it needs {cause}")
            elif own.kind in (*_IN_SUBSYSTEM, Kind.QOS, Kind.LVOL):
                self._delete(own, state[own], f"it needs {cause}")
            else:
                self._problem(
                    own,
                    f"is not in the file and uses {cause}, which would be removed; --remove {own.reference} "
                    f"takes it down too",
                )

    # --- what stands in the way ---

    def _check_sessions(self) -> None:
        for own in sorted(self._removed):
            count = self._observed.vhost_session_counts.get(own.name, 0) if own.kind is Kind.VHOST else 0
            if count:
                self._problem(
                    own, f"would be removed, and has {count} connected process(es); stop them first"
                )

    def _check_options(self) -> None:
        own = Id(Kind.OPTIONS, NVME_OPTIONS)
        if own not in self._changes:
            return
        attached = [
            each.name
            for each in self._observed.state
            if each.kind is Kind.CONTROLLER and each not in self._removed
        ]
        if attached:
            references = " ".join(f"--replace controller:{name}" for name in attached)
            self._problem(
                own,
                "enable_flush: expected true, got false, so that flushes are swallowed, and SPDK does not change it "
                f"while controllers are attached; {references} attaches them anew, or restart that SPDK",
            )

    def _check_bdevs(self, after: Resource) -> None:
        sizes: dict[str, int] = {}
        for name in bdevs_used(after):
            facts = self._facts(name)
            provider = id_of_bdev(name, self._desired)
            if facts is None and provider is None:
                self._problem(after.id, f"bdev {name}: is not there, and nothing in the file makes it")
                continue
            if facts is None and provider is not None and provider.kind is Kind.CONTROLLER:
                self._check_arrival(after.id, name, provider)
            if facts is not None and after.id.kind is not Kind.QOS:
                self._check_claim(after, name, facts)
            size = self._block_size(name, facts, provider)
            if size:
                sizes[name] = size
        if after.id.kind is Kind.RAID and len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            self._problem(after.id, f"members: expected equal block sizes, got {listed}")

    def _facts(self, name: str) -> BdevFacts | None:
        """A bdev that is there and will still be there."""
        own = id_of_bdev(name, self._observed.state)
        return None if own in self._removed else self._observed.bdevs.get(name)

    def _check_arrival(self, own: Id, name: str, controller: Id) -> None:
        is_new = controller in self._changes and self._changes[controller].action is not Action.UPDATE
        if is_new or name in self._arriving:
            return
        states = ", ".join(self._observed.controller_states.get(controller.name, ())) or "not attached"
        self._problem(own, f"bdev {name}: {controller} ({states}) does not have this namespace")

    def _check_claim(self, after: Resource, name: str, facts: BdevFacts) -> None:
        holders = [each for each in self._observed.holders(name) if each != after.id]
        kept = [each for each in holders if each not in self._removed]
        if kept:
            self._problem(after.id, f"bdev {name}: is claimed by {kept[0]}")
        elif facts.is_claimed and not self._observed.holders(name):
            self._problem(after.id, f"bdev {name}: is claimed by something else in that SPDK")

    def _block_size(self, name: str, facts: BdevFacts | None, provider: Id | None) -> int | None:
        if facts is not None:
            return facts.block_size
        if name in self._arriving:
            return self._arriving[name]
        if provider is None or provider.kind is not Kind.BDEV:
            return None
        return self._desired[provider].attributes.get("block_size")

    def _check_file(self, after: Resource) -> None:
        filename = after.attributes.get("filename") if after.id.kind is Kind.BDEV else None
        if filename is None:
            return
        for own, other in self._observed.state.items():
            is_open = other.attributes.get("filename") == filename
            if own.kind is Kind.BDEV and own != after.id and is_open and own not in self._removed:
                self._problem(after.id, f"file {filename}: is open as {own}")

    # --- the order ---

    def _lay_out(self) -> None:
        state = self._observed.state
        gone = _order({own: state[own] for own in self._removed}, state)
        for own in reversed(gone):
            self._plan.steps.append(Step(own, tuple(delete_calls(state[own])), None, state[own]))
        made = {own: change.after for own, change in self._changes.items() if change.after is not None}
        for own in _order(made, self._desired):
            change = self._changes[own]
            after = made[own]
            self._plan.changes.append(change)
            before = change.before if change.action is Action.UPDATE else None
            if before is not None:
                calls = update_calls(before, after) or []
            else:
                calls = [*self._waits(after), *create_calls(after)]
            self._plan.steps.append(Step(own, tuple(calls), after, before))
        self._plan.changes += [change for change in self._changes.values() if change.action is Action.DELETE]

    def _waits(self, after: Resource) -> Iterable[Call]:
        """A namespace of a controller may become a bdev only a moment after its controller was told."""
        for name in bdevs_used(after):
            provider = id_of_bdev(name, self._desired)
            if provider is not None and provider.kind is Kind.CONTROLLER:
                yield Call("bdev_get_bdevs", {"name": name, "timeout": BDEV_WAIT_MS})


def _why_not_in_place(before: Resource, after: Resource, differing: list[str]) -> str:
    facts = ", ".join(
        f"{name}: expected {_shown(after.attributes[name])}, got {_shown(before.attributes.get(name))}"
        for name in differing
    )
    if not is_removable(after.id.kind):
        return f"{facts}; SPDK does not change it once it is made: restart that SPDK without it"
    lost = ", and its data is lost" if loses_data(before.id.kind, before.attributes) else ""
    return f"{facts}; --replace {after.id.reference} removes it and makes it anew{lost}"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(str(each) for each in value) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dependents(removed: Collection[Id], state: State) -> list[Id]:
    """What needs something removed, directly or through others, in an order in which causes come first."""
    found: list[Id] = []
    reached = set(removed)
    by_need: dict[Id, list[Id]] = {}
    for own, resource in state.items():
        for need in needs(resource, state):
            by_need.setdefault(need, []).append(own)
    queue = sorted(removed)
    while queue:
        for own in sorted(by_need.get(queue.pop(0), ())):
            if own not in reached:
                reached.add(own)
                found.append(own)
                queue.append(own)
    return found


def _order(chosen: Mapping[Id, Resource], state: State) -> list[Id]:
    """The chosen ones, each after what it needs; kinds in their order where nothing else decides."""
    waiting = {own: needs(resource, state) & set(chosen) for own, resource in chosen.items()}
    rank = {own: index for index, own in enumerate(chosen)}
    by_need: dict[Id, list[Id]] = {}
    for own, wanted in waiting.items():
        for need in wanted:
            by_need.setdefault(need, []).append(own)
    ready = [(own.kind, rank[own], own) for own, wanted in waiting.items() if not wanted]
    heapq.heapify(ready)
    ordered: list[Id] = []
    while ready:
        own = heapq.heappop(ready)[2]
        ordered.append(own)
        for dependent in by_need.get(own, ()):
            waiting[dependent].discard(own)
            if not waiting[dependent]:
                heapq.heappush(ready, (dependent.kind, rank[dependent], dependent))
    # A ring cannot be made in any order; SPDK would refuse it, so would the file's check.
    return ordered + [own for own in chosen if own not in set(ordered)]


def _check_methods(plan: Plan, observed: Observed) -> None:
    lacking: dict[str, Id] = {}
    for step in plan.steps:
        for call in step.calls:
            if call.method not in observed.methods:
                lacking.setdefault(call.method, step.id)
    for method, own in lacking.items():
        plan.problems.append(Problem(own, f"{observed.version} has no {method}"))
