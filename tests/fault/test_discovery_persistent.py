"""Discovery that stays: change events, a service that goes away and comes back, referrals with their bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvdev.errors import UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.testing.controller import GOOD_CONTROLLER, ControllerScript
from kvdev.testing.peer import ScriptedPeer
from kvdev.testing.proxy import Relay
from kvdev.testing.recovery import soon
from kvdev.testing.target import running_target
from kvdev.uri import DISCOVERY_NQN
from kvdev.wire.log import AddressFamily, DiscoveryEntry, SubsystemType, TransportType

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(connect_timeout_s=20.0, admin_timeout_s=20.0, shutdown_timeout_s=0.3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_change_when_a_subsystem_comes_then_told_once_and_the_log_has_it(stack: ExitStack) -> None:
    target = stack.enter_context(running_target())
    kv = stack.enter_context(Session(host=HOST, options=QUICK))
    service = kv.persistent_discovery(f"{target.address}:{target.port}")
    assert {entry.subnqn for entry in service.entries(deadline=soon())} == {target.nqn}
    assert not service.wait_change(deadline=soon(0.1))
    for name in ("nqn.2024-01.io.kvdev:second", "nqn.2024-01.io.kvdev:third"):
        target.add_subsystem(name)
        assert service.wait_change(deadline=soon())
        assert name in {entry.subnqn for entry in service.entries(deadline=soon())}
    limit = soon()
    while service.wait_change(deadline=soon(0.2)):
        assert not limit.is_expired, "each step of adding one may be a change of its own, but they end"
    kv.close()
    with pytest.raises(UsageError, match="closed"):
        service.entries(deadline=soon())


def test_change_when_the_service_goes_away_and_returns_then_that_is_one(stack: ExitStack) -> None:
    target = stack.enter_context(running_target())
    relay = stack.enter_context(Relay((target.address, target.port)))
    kv = stack.enter_context(Session(host=HOST, options=QUICK))
    service = kv.persistent_discovery(f"127.0.0.1:{relay.port}")
    service.entries(deadline=soon())
    relay.cut()
    timer = threading.Timer(0.3, relay.mend)
    timer.start()
    assert service.wait_change(deadline=soon())
    assert service.entries(deadline=soon())
    timer.join()


def entry(peer: ScriptedPeer, *, subtype: SubsystemType, subnqn: str) -> DiscoveryEntry:
    return DiscoveryEntry(
        trtype=TransportType.TCP,
        adrfam=AddressFamily.IPV4,
        subtype=subtype,
        trsvcid=str(peer.port),
        traddr=peer.address,
        subnqn=subnqn,
    )


def service_peer(stack: ExitStack) -> tuple[ControllerScript, ScriptedPeer]:
    script = ControllerScript(identify=GOOD_CONTROLLER)
    return script, stack.enter_context(ScriptedPeer(script))


def test_referrals_when_followed_then_all_subsystems_and_a_ring_ends(stack: ExitStack) -> None:
    first, first_peer = service_peer(stack)
    second, second_peer = service_peer(stack)
    dead = stack.enter_context(ScriptedPeer(lambda connection: None))
    first.discovery = [
        entry(first_peer, subtype=SubsystemType.NVM, subnqn="nqn.2024-01.io.example:a"),
        entry(second_peer, subtype=SubsystemType.REFERRAL, subnqn=DISCOVERY_NQN),
        entry(dead, subtype=SubsystemType.REFERRAL, subnqn=DISCOVERY_NQN),
    ]
    second.discovery = [
        entry(second_peer, subtype=SubsystemType.NVM, subnqn="nqn.2024-01.io.example:b"),
        entry(first_peer, subtype=SubsystemType.REFERRAL, subnqn=DISCOVERY_NQN),
    ]
    kv = stack.enter_context(Session(host=HOST, options=QUICK))
    where = f"{first_peer.address}:{first_peer.port}"
    assert len(kv.discover(where)) == 3
    found = kv.discover(where, has_referrals=True, deadline=soon())
    assert [each.subnqn for each in found] == ["nqn.2024-01.io.example:a", "nqn.2024-01.io.example:b"]


def test_referrals_when_they_never_end_then_bounded(stack: ExitStack) -> None:
    """Each of many services refers to the next."""
    services = [service_peer(stack) for _ in range(20)]
    for index, (script, _) in enumerate(services):
        following = services[(index + 1) % len(services)][1]
        script.discovery = [entry(following, subtype=SubsystemType.REFERRAL, subnqn=DISCOVERY_NQN)]
    kv = stack.enter_context(Session(host=HOST, options=QUICK))
    first = services[0][1]
    assert kv.discover(f"{first.address}:{first.port}", has_referrals=True, deadline=soon()) == []
    assert sum(bool(script.connects) for script, _ in services) == 16
