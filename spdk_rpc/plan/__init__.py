"""Desired state of SPDK processes: observe, compare, plan, apply; each step is checked by reading.

Standard library only.

Not here: the operator's file (``kvdev_tools.provision``); volumes and KV namespaces, which are no SPDK objects.
"""

from __future__ import annotations

from spdk_rpc.plan.apply import Applied, apply_plan
from spdk_rpc.plan.compare import Action, Change, Extra, Plan, Problem, plan_removal, plan_state
from spdk_rpc.plan.flush import FlushHop, FlushState, flush_of_bdev
from spdk_rpc.plan.observe import Observed, observe
from spdk_rpc.plan.resource import Call, Id, Kind, Resource, State

__all__ = [
    "Action",
    "Applied",
    "Call",
    "Change",
    "Extra",
    "FlushHop",
    "FlushState",
    "Id",
    "Kind",
    "Observed",
    "Plan",
    "Problem",
    "Resource",
    "State",
    "apply_plan",
    "flush_of_bdev",
    "observe",
    "plan_removal",
    "plan_state",
]
