"""Random desired states over random starting states with random failures: the next apply always completes it.

The peer is the embedded target's own model and RPC server; failures happen on the wire, in a proxy between.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdev.target.serve import EmbeddedTarget
from kvdev.testing.rpc_proxy import Failure, RpcProxy
from kvdev.testing.target_backend import MemoryBackend, MemoryFabric
from kvdev_tools.provision.document import Deployment, build_deployment
from kvdev_tools.provision.source import load_text
from spdk_rpc import Client
from spdk_rpc.plan import (
    Applied,
    Id,
    Kind,
    Observed,
    Plan,
    State,
    apply_plan,
    observe,
    plan_removal,
    plan_state,
)
from spdk_rpc.plan.resource import is_removable

EXAMPLES = 2000 if os.environ.get("KVDEV_HYPOTHESIS_PROFILE") == "fuzz" else 30
HOSTS = [f"nqn.2014-08.org.nvmexpress:uuid:{digit * 8}-1111-1111-1111-111111111111" for digit in "123"]
NQNS = [f"nqn.2026-01.io.kvdev:{letter}" for letter in "ab"]
NAMES = ["m0", "m1", "m2", "m3", "m4"]
ROUND_LIMIT = 4
"""Applies after which it has to be as desired: one that fails, one that completes, and spare ones."""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


PORTS = free_ports(3)


@st.composite
def bdevs(draw: st.DrawFn, folder_token: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5)):
        block_size = draw(st.sampled_from([512, 4096]))
        driver = draw(st.sampled_from(["malloc", "null", "aio"]))
        if driver == "aio":
            found[name] = {"aio": {"file": f"{folder_token}/{name}.img", "block_size": block_size}}
        else:
            size = draw(st.sampled_from(["16MiB", "32MiB"]))
            found[name] = {driver: {"size": size, "block_size": block_size}}
        if draw(st.booleans()):
            found[name]["qos"] = {"rw_ios_per_sec": draw(st.sampled_from([0, 2000, 5000]))}
    return found


def block_size_of(bdev: dict[str, Any]) -> int:
    return int(next(iter(bdev.values()))["block_size"])


@st.composite
def keyed(draw: st.DrawFn, nqn: str, keys: list[str]) -> Any:
    """A host that has to prove itself, or that need not."""
    if not keys or draw(st.booleans()):
        return nqn
    names = draw(st.permutations(keys))[: draw(st.integers(1, len(keys)))]
    return {"host": nqn, **dict(zip(("dhchap_key", "dhchap_ctrlr_key"), names, strict=False))}


@st.composite
def targets(draw: st.DrawFn) -> dict[str, Any]:
    """One target that the file's own checks accept."""
    made = draw(bdevs("@FOLDER@"))
    free = list(made)
    target: dict[str, Any] = {"rpc": "/nowhere", "bdevs": made}
    raids: dict[str, Any] = {}
    for name in ("r0", "r1"):
        for size in (512, 4096):
            fitting = [each for each in free if block_size_of(made[each]) == size]
            if name not in raids and fitting and draw(st.booleans()):
                members = draw(st.lists(st.sampled_from(fitting), unique=True, min_size=1, max_size=3))
                strip = draw(st.sampled_from(["64KiB", "128KiB"]))
                raids[name] = {"strip_size": strip, "members": members}
                free = [each for each in free if each not in members]
    free += list(raids)
    lvstores: dict[str, Any] = {}
    fitting = [each for each in free if "malloc" in made.get(each, {})]
    if len(fitting) > 0 and draw(st.booleans()):
        base = draw(st.sampled_from(fitting))
        free.remove(base)
        names = draw(st.lists(st.sampled_from(["l0", "l1", "l2"]), unique=True))
        lvols = {
            name: {"size": draw(st.sampled_from(["1MiB", "2MiB"])), "thin": draw(st.booleans())}
            for name in names
        }
        lvstores["lvs0"] = {"bdev": base, "cluster_size": "1MiB", "lvols": lvols}
        free += [f"lvs0/{name}" for name in lvols]
    keys = draw(st.lists(st.sampled_from(["k0", "k1"]), unique=True))
    target["keys"] = {name: f"@FOLDER@/{name}" for name in keys}
    subsystems: dict[str, Any] = {}
    for nqn in draw(st.lists(st.sampled_from(NQNS), unique=True)):
        subsystem: dict[str, Any] = {
            "serial_number": draw(st.sampled_from(["A", "B"])),
            "allow_any_host": draw(st.booleans()),
            "hosts": [
                draw(keyed(nqn, keys))
                for nqn in draw(st.lists(st.sampled_from(HOSTS), unique=True, min_size=1))
            ],
            "listeners": [
                f"127.0.0.1:{port}"
                for port in draw(st.lists(st.sampled_from(PORTS), unique=True, min_size=1))
            ],
        }
        namespaces = {}
        for nsid in draw(st.lists(st.integers(1, 4), unique=True, max_size=3)):
            if free:
                namespaces[str(nsid)] = free.pop(draw(st.integers(0, len(free) - 1)))
        if namespaces:
            subsystem["namespaces"] = namespaces
        subsystems[nqn] = subsystem
    return {**target, "raids": raids, "lvstores": lvstores, "subsystems": subsystems}


def deployment_of(target: dict[str, Any], folder: str) -> Deployment:
    text = yaml.safe_dump({"version": 1, "name": "x", "targets": {"t": target}})
    return build_deployment(load_text(text.replace("@FOLDER@", folder)))


def desired_of(target: dict[str, Any], folder: str) -> State:
    return deployment_of(target, folder).endpoints[0].desired


@contextmanager
def peer(fabric: MemoryFabric | None = None) -> Iterator[tuple[Client, Client, RpcProxy, str]]:
    with tempfile.TemporaryDirectory(prefix="kvdev-plan-") as folder:
        for name in NAMES:
            with (Path(folder) / f"{name}.img").open("wb") as file:
                file.truncate(2 << 20)
        for name in ("k0", "k1"):
            (Path(folder) / name).touch(0o600)
        server = f"{folder}/rpc"
        with (
            EmbeddedTarget(server, backend=MemoryBackend(fabric=fabric, vhost_folder=folder)),
            RpcProxy(f"{folder}/proxy", server) as proxy,
            Client(server, timeout_s=30) as direct,
            Client(f"{folder}/proxy", timeout_s=30) as client,
        ):
            yield direct, client, proxy, folder


def plan_for(desired: State, observed: Observed) -> Plan:
    """With everything that may be replaced named, as an operator would after reading the plan."""
    references = {own.reference for own in desired if is_removable(own.kind)}
    return plan_state(desired, observed, replace=references, prune=True)


def clear_the_way(desired: State, client: Client) -> None:
    """Remove what another file left and this one does not know, so that nothing of it is in the way."""
    leftovers = {own: each for own, each in observe(client.call).state.items() if own not in desired}
    assert apply_plan(plan_removal_of(leftovers, client), client.call).failed is None


def plan_removal_of(leftovers: State, client: Client) -> Plan:
    observed = observe(client.call)
    removable = {own: each for own, each in leftovers.items() if is_removable(own.kind)}
    plan = plan_removal(removable, observed)
    plan.problems.clear()
    return plan


def bring_about(desired: State, client: Client) -> Applied:
    observed = observe(client.call)
    plan = plan_for(desired, observed)
    if plan.problems:
        # What stands in the way is a leftover that uses what has to go, or holds what is needed.
        assert all(observed.state.keys() - desired.keys() for _ in plan.problems), plan.problems
        clear_the_way(desired, client)
        plan = plan_for(desired, observe(client.call))
    assert not plan.problems, [str(each) for each in plan.problems]
    return apply_plan(plan, client.call)


@given(
    before=targets(),
    after=targets(),
    cut_at=st.integers(0, 25),
    start_cut_at=st.integers(0, 25),
    failure=st.sampled_from(list(Failure)),
)
@settings(max_examples=EXAMPLES)
def test_apply_completes_after_any_failure_and_a_second_apply_is_empty(
    before: dict[str, Any], after: dict[str, Any], cut_at: int, start_cut_at: int, failure: Failure
) -> None:
    with peer() as (direct, client, proxy, folder):
        # A random starting state: another file, of which some step may have failed.
        proxy.fail(start_cut_at, Failure.REFUSED)
        bring_about(desired_of(before, folder), client)
        desired = desired_of(after, folder)
        proxy.fail(-1, failure)
        observed = observe(direct.call)
        if plan_for(desired, observed).problems:
            clear_the_way(desired, direct)
        proxy.fail(cut_at, failure)
        results = []
        for _ in range(ROUND_LIMIT):
            result = bring_about(desired, client)
            results.append(result)
            if result.failed is None:
                break
        assert results[-1].failed is None, [str(each.error) for each in results]
        assert len(results) == 1 + proxy.has_failed or results[0].failed is None
        reached = observe(direct.call)
        second = plan_for(desired, reached)
        assert second.is_empty and not second.steps, [str(each.id) for each in second.changes]
        count = proxy.changing_count
        assert apply_plan(second, client.call) == Applied(0)
        assert proxy.changing_count == count
        assert observe(direct.call).state == reached.state
        # No raid stays half made, whatever failed.
        raids = [each for own, each in reached.state.items() if own.kind is Kind.RAID]
        assert all(each.attributes["state"] == "online" for each in raids if each.id in desired)


SERVED = {
    "rpc": "/served",
    "bdevs": {
        f"m{at}": {"malloc": {"size": "16MiB", "block_size": block_size}}
        for at, block_size in enumerate([512, 512, 4096, 4096, 4096])
    },
    "subsystems": {
        NQNS[0]: {
            "hosts": HOSTS[:1],
            "listeners": [f"127.0.0.1:{port}" for port in PORTS[:2]],
            "namespaces": {str(at + 1): f"m{at}" for at in range(4)},
        },
        NQNS[1]: {"allow_any_host": True, "listeners": [f"127.0.0.1:{PORTS[2]}"], "namespaces": {"1": "m4"}},
    },
}
"""What the hosts below attach: four namespaces of two block sizes over two paths, and one more."""


@st.composite
def hosts(draw: st.DrawFn) -> dict[str, Any]:
    """A host with controllers, raids over their namespaces, and vhost controllers over those."""
    controllers: dict[str, Any] = {}
    free: list[str] = []
    if draw(st.booleans()):
        controllers["Nvme0"] = {
            "subsystem": NQNS[0],
            "paths": [
                f"127.0.0.1:{port}" for port in draw(st.permutations(PORTS[:2]))[: draw(st.integers(1, 2))]
            ],
            "data_digest": draw(st.booleans()),
        }
        free += draw(
            st.sampled_from([["Nvme0n1", "Nvme0n2"], ["Nvme0n3", "Nvme0n4"], ["Nvme0n4", "Nvme0n3"]])
        )
    if draw(st.booleans()):
        controllers["Nvme1"] = {"subsystem": NQNS[1]}
    host: dict[str, Any] = {"rpc": "/host", "nqn": HOSTS[0], "controllers": controllers}
    if len(free) > 0 and draw(st.booleans()):
        host["raids"] = {"R0": {"strip_size": draw(st.sampled_from(["64KiB", "128KiB"])), "members": free}}
        ranks = draw(st.integers(0, 3))
        if ranks:
            host["engines"] = {
                "e": {"volume": "v", "geometry": "small", "tensor_parallel": max(1, ranks & 2)}
            }
    return host


def site_of(host: dict[str, Any]) -> Deployment:
    value: dict[str, Any] = {"version": 1, "name": "x", "targets": {"t": SERVED}, "hosts": {"h": host}}
    if "engines" in host:
        raid = host["raids"]["R0"]
        nsids = [int(name.rpartition("n")[2]) for name in raid["members"]]
        members = [{"target": "t", "subsystem": NQNS[0], "nsid": nsid} for nsid in nsids]
        value["volumes"] = {"v": {"members": members, "strip_size": raid["strip_size"]}}
    return build_deployment(load_text(yaml.safe_dump(value)))


@given(
    before=hosts(),
    after=hosts(),
    cut_at=st.integers(0, 12),
    start_cut_at=st.integers(0, 12),
    is_attached_by_hand=st.booleans(),
    failure=st.sampled_from(list(Failure)),
)
@settings(max_examples=EXAMPLES)
def test_a_host_is_completed_after_any_failure(
    before: dict[str, Any],
    after: dict[str, Any],
    cut_at: int,
    start_cut_at: int,
    is_attached_by_hand: bool,
    failure: Failure,
) -> None:
    fabric = MemoryFabric()
    with peer(fabric) as (served, _, _, _), peer(fabric) as (direct, client, proxy, _):
        assert bring_about(site_of(before).endpoint("t").desired, served).failed is None
        if is_attached_by_hand:
            # By somebody who did not think of flushes; the options cannot change while it stays.
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(PORTS[0])}
            params = {"name": "Nvme0", **address, "subnqn": NQNS[0], "hostnqn": HOSTS[0]}
            direct.call("bdev_nvme_attach_controller", params)
        else:
            proxy.fail(start_cut_at, Failure.REFUSED)
            bring_about(site_of(before).endpoint("h").desired, client)
        desired = site_of(after).endpoint("h").desired
        if plan_for(desired, observe(direct.call)).problems:
            clear_the_way(desired, direct)
        proxy.fail(cut_at, failure)
        results = [bring_about(desired, client)]
        if results[0].failed is not None:
            assert proxy.has_failed, results[0].error
            results.append(bring_about(desired, client))
        assert results[-1].failed is None, results[-1].error
        reached = observe(direct.call)
        assert plan_for(desired, reached).is_empty
        if any(own.kind is Kind.CONTROLLER for own in desired):
            assert reached.state[Id(Kind.OPTIONS, "bdev_nvme")].attributes["enable_flush"] is True


@given(target=targets(), cut_at=st.integers(0, 25), failure=st.sampled_from(list(Failure)))
@settings(max_examples=EXAMPLES)
def test_removal_completes_after_any_failure_and_leaves_nothing(
    target: dict[str, Any], cut_at: int, failure: Failure
) -> None:
    with peer() as (direct, client, proxy, folder):
        desired = desired_of(target, folder)
        assert bring_about(desired, direct).failed is None
        proxy.fail(cut_at, failure)
        for _ in itertools.repeat(None, ROUND_LIMIT):
            plan = plan_removal(desired, observe(client.call))
            assert not plan.problems
            if apply_plan(plan, client.call).failed is None:
                break
        left = observe(direct.call).state
        assert {own.kind for own in left} <= {Kind.TRANSPORT, Kind.OPTIONS}


def plan_with_everything_named(desired: State, observed: Observed) -> Plan:
    """What differs is named for replacement, what is not in the file for removal."""
    extras = {own.reference for own in observed.state if own not in desired and is_removable(own.kind)}
    replaced = {own.reference for own in desired if is_removable(own.kind)}
    return plan_state(desired, observed, replace=replaced, remove=extras, prune=True)


@given(before=targets(), after=targets(), cut_at=st.integers(0, 25), failure=st.sampled_from(list(Failure)))
@settings(max_examples=EXAMPLES // 3)
def test_what_is_named_for_removal_goes_whatever_fails_and_only_the_file_is_left(
    before: dict[str, Any], after: dict[str, Any], cut_at: int, failure: Failure
) -> None:
    with peer() as (direct, client, proxy, folder):
        assert bring_about(desired_of(before, folder), direct).failed is None
        desired = desired_of(after, folder)
        # Told before anything is named: each extra is one that is there and not in the file.
        told = {each.id for each in plan_state(desired, observe(direct.call)).extras}
        assert told <= observe(direct.call).state.keys() - desired.keys()
        proxy.fail(cut_at, failure)
        for _ in range(ROUND_LIMIT):
            plan = plan_with_everything_named(desired, observe(client.call))
            assert not plan.problems and not plan.extras, [str(each) for each in plan.problems]
            if apply_plan(plan, client.call).failed is None:
                break
        reached = observe(direct.call)
        kept = {own for own in reached.state if is_removable(own.kind)}
        assert kept <= desired.keys()
        second = plan_state(desired, reached)
        assert second.is_empty and not second.extras and not second.notes
