"""One owner over NVMe/TCP: reservations keep the one before out, stopped or killed, under its HOSTID or another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.block.reservation import ReservationType
from kvdev.clock import Deadline
from kvdev.errors import CommandError, LeaseLostError, UsageError
from kvdev.geometry import Geometry
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.store import PageStore, Volume
from kvdev.store.fence import is_conflict, writer_key
from kvdev.store.lock import LockHeldError
from kvdev.store.recreate import recreate_volume
from kvdev.testing.target import RunningTarget, running_target

GEOMETRY = Geometry.preset("small")
NQN = "nqn.2024-01.io.example:host"
HOSTS = [HostIdentity.of(f"{NQN}-{letter}") for letter in "ab"]

OWNER = """
import collections
import json
import sys
import numpy as np
from kvdev.clock import Deadline
from kvdev.errors import KvdevError
from kvdev.initiator.host import HostIdentity
from kvdev.session import Session
from kvdev.store import PageStore

uri, nqn, lease_ms = sys.argv[1:]
with Session(host=HostIdentity.of(nqn)) as session:
    volume = session.open_volume(uri)
    store = PageStore(volume.open_namespace("kv", lease_ms=int(lease_ms), deadline=Deadline.after(30)))
    pages = np.full((8, store.page_size_bytes), 0xAA, dtype=np.uint8)
    keys = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    stored = store.put(keys, pages).stored_count
    store.flush()
    print(stored, flush=True)
    def outcome(call):
        try:
            return "success" if call() else "nothing"
        except KvdevError as error:
            return type(error).__name__

    out = np.empty_like(pages)
    calls = {
        "put": lambda: store.put(keys, pages ^ 0xFF).stored_count,
        "flush": lambda: store.flush() is None,
        "delete": lambda: store.delete(keys).any(),
        "pin": lambda: store.pin(keys).any(),
        "get": lambda: store.get(keys, out).hit_count,
        "contains": lambda: store.contains(keys).any(),
    }
    for line in sys.stdin:
        if line.startswith("count"):
            seen = [(name, outcome(call)) for _ in range(int(line.split()[1])) for name, call in calls.items()]
            counts = collections.Counter(f"{name} {what}" for name, what in seen)
            print(json.dumps(counts), flush=True)
            continue
        try:
            stored = store.put(keys, pages ^ 0xFF).stored_count
            store.flush()
            print("stored", stored, flush=True)
        except KvdevError as error:
            print(type(error).__name__, flush=True)
"""
KEYS = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture
def target() -> Iterator[RunningTarget]:
    with running_target(namespace_count=2, namespace_size_bytes=32 << 20) as running:
        yield running


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def volume_uri(target: RunningTarget) -> str:
    with Session(host=HOSTS[0]) as session:
        devices = [session.open_device(f"{target.uri}?nsid={nsid}") for nsid in (1, 2)]
        volume = Volume.create(devices, name="v", deadline=soon())
        volume.create_namespace("kv", GEOMETRY, quota_pages=16, deadline=soon())
    return f"vol+{target.uri}"


def opened(stack: ExitStack, uri: str, host: HostIdentity) -> Volume:
    return stack.enter_context(Session(host=host)).open_volume(uri)


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks from here on are those of another host."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "elsewhere"))


def owner_process(uri: str, nqn: str, *, lease_ms: int = 30_000) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, uri, nqn, str(lease_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "8\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGCONT)
    child.kill()
    child.wait(20)


def test_owner_registers_and_leaves_and_a_second_one_is_refused(volume_uri: str) -> None:
    with ExitStack() as stack:
        a, b = (opened(stack, volume_uri, host) for host in HOSTS)
        owner = a.open_namespace("kv", deadline=soon())
        assert owner.fence_kind == "reservation"
        for member in a.members:
            assert member.reservations is not None
            status = member.reservations.report(soon())
            assert status.reservation is ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS
            assert [each.key for each in status.registrants] == [writer_key(HOSTS[0].host_id_bytes)]
        with pytest.raises(LockHeldError, match=f"is owned by process {os.getpid()} of this host"):
            b.open_namespace("kv", deadline=soon())
        # Whoever does not ask is stopped by the device itself.
        with pytest.raises(CommandError) as refused:
            write_blocks(b.members[0], b.members[0].block_count - 1, bytes(4096), soon())
        assert is_conflict(refused.value)
        owner.close(deadline=soon())
        for member in a.members:
            assert member.reservations is not None
            assert not member.reservations.report(soon()).registrants


def test_takeover_from_a_stopped_owner_when_it_wakes_leaves_it_nothing_but_errors(
    volume_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-21, S-22: what it had under way and what it sends when it goes on is refused by the device."""
    child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=500)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.send_signal(signal.SIGSTOP)
        child.stdin.write("go\n")
        child.stdin.flush()
        elsewhere(tmp_path, monkeypatch)
        with ExitStack() as stack:
            volume = opened(stack, volume_uri, HOSTS[1])
            with pytest.raises(LockHeldError, match=f"is owned by process {child.pid} of host"):
                volume.open_namespace("kv", deadline=soon())
            store = PageStore(volume.open_namespace("kv", takeover=True, deadline=soon()))
            pages = np.full((8, store.page_size_bytes), 0x11, dtype=np.uint8)
            assert store.put(KEYS, pages).stored_count == 8
            store.flush()
            child.send_signal(signal.SIGCONT)
            assert child.stdout.readline() == "LeaseLostError\n"
            out = np.zeros_like(pages)
            assert store.get(KEYS, out).hit_count == 8
            assert np.array_equal(out, pages)
            store.close()
            again = PageStore(opened(stack, volume_uri, HOSTS[1]).open_namespace("kv", deadline=soon()))
            assert again.get(KEYS, out).hit_count == 8
            assert np.array_equal(out, pages)
            again.close()
    finally:
        end(child)


def test_stopped_owner_that_nobody_followed_goes_on_past_its_lease(volume_uri: str) -> None:
    child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=100)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.send_signal(signal.SIGSTOP)
        with ExitStack() as stack:
            volume = opened(stack, volume_uri, HOSTS[1])
            for takeover in (False, True):
                with pytest.raises(LockHeldError, match=f"owned by process {child.pid} of this host"):
                    volume.open_namespace("kv", takeover=takeover, deadline=soon())
        child.send_signal(signal.SIGCONT)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stored 8\n"
    finally:
        end(child)


@pytest.mark.parametrize("host", HOSTS, ids=["same-hostid", "other-hostid"])
def test_killed_owner_when_followed_is_put_out_at_once(volume_uri: str, host: HostIdentity) -> None:
    child = owner_process(volume_uri, HOSTS[0].host_nqn)
    child.kill()
    child.wait(20)
    with ExitStack() as stack:
        volume = opened(stack, volume_uri, host)
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        out = np.zeros((8, store.page_size_bytes), dtype=np.uint8)
        assert store.get(KEYS, out).hit_count == 8
        assert (out == 0xAA).all()
        assert store.put(KEYS, out ^ 0xFF).stored_count == 8
        store.flush()
        for member in volume.members:
            assert member.reservations is not None
            keys = [each.key for each in member.reservations.report(soon()).registrants]
            assert keys == [writer_key(host.host_id_bytes)]
        store.close()


def test_two_owners_of_one_hostid_when_the_first_lives_are_one(
    volume_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=300)
    try:
        assert child.stdin is not None and child.stdout is not None
        elsewhere(tmp_path, monkeypatch)
        with ExitStack() as stack:
            volume = opened(stack, volume_uri, HOSTS[0])
            with pytest.raises(LockHeldError, match=f"owned by process {child.pid} of host"):
                volume.open_namespace("kv", deadline=soon())
            # One registrant: only time parts them, and the record tells the first that it has lost.
            second = volume.open_namespace("kv", takeover=True, deadline=soon())
            assert second.epoch == 0
            limit = soon()
            answer = "stored 8\n"
            while answer == "stored 8\n" and not limit.is_expired:
                child.stdin.write("go\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            assert answer == "LeaseLostError\n"
    finally:
        end(child)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["idle", "stopped"])
@pytest.mark.parametrize("host", HOSTS, ids=["same-hostid", "other-hostid"])
def test_owner_that_lost_its_lease_gets_errors_from_whatever_it_does_never_success(
    volume_uri: str, host: HostIdentity, is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=500)
    try:
        assert child.stdin is not None and child.stdout is not None
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
        elsewhere(tmp_path, monkeypatch)
        # Under one HOSTID only time parts them; a second of it stands for what a controller may take.
        options = ControllerOptions(fence_wait_s=1.0)
        with Session(host=host, options=options) as session:
            volume = session.open_volume(volume_uri)
            store = PageStore(volume.open_namespace("kv", takeover=True, deadline=soon()))
            pages = np.full((8, store.page_size_bytes), 0x11, dtype=np.uint8)
            assert store.put(KEYS, pages).stored_count == 8
            store.flush()
            child.send_signal(signal.SIGCONT)
            child.stdin.write("count 20\n")
            child.stdin.flush()
            counts = json.loads(child.stdout.readline())
            assert counts == {
                f"{name} LeaseLostError": 20 for name in ("put", "flush", "delete", "pin", "get", "contains")
            }
            out = np.zeros_like(pages)
            assert store.get(KEYS, out).hit_count == 8 and np.array_equal(out, pages)
            store.close()
            again = PageStore(volume.open_namespace("kv", deadline=soon()))
            assert again.get(KEYS, out).hit_count == 8 and np.array_equal(out, pages)
            again.close()
    finally:
        end(child)


def test_target_that_forgot_its_reservations_gets_them_back_with_the_next_renewal(volume_uri: str) -> None:
    with ExitStack() as stack:
        volume = opened(stack, volume_uri, HOSTS[0])
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        control = volume.members[0].reservations
        assert control is not None
        control.clear(writer_key(HOSTS[0].host_id_bytes), soon())
        store.namespace.renew(deadline=soon())
        assert control.report(soon()).registrants[0].key == writer_key(HOSTS[0].host_id_bytes)
        store.close()


def test_owner_put_out_between_two_writes_learns_it_from_the_first_that_is_refused(
    volume_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        a, b = (opened(stack, volume_uri, host) for host in HOSTS)
        child = owner_process(volume_uri, HOSTS[0].host_nqn)
        try:
            elsewhere(tmp_path, monkeypatch)
            taken = b.open_namespace("kv", takeover=True, deadline=soon())
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "LeaseLostError\n"
            taken.close(deadline=soon())
        finally:
            end(child)
        assert not a.namespace("kv", deadline=soon()).record.lease_ms


def test_volume_when_reserved_is_changed_by_another_host_as_a_guest(volume_uri: str) -> None:
    with ExitStack() as stack:
        a, b = (opened(stack, volume_uri, host) for host in HOSTS)
        owner = a.open_namespace("kv", deadline=soon())
        b.create_namespace("more", GEOMETRY, quota_pages=4, deadline=soon())
        assert a.members[0].reservations is not None
        keys = [each.key for each in a.members[0].reservations.report(soon()).registrants]
        assert keys == [writer_key(HOSTS[0].host_id_bytes)]
        second = b.open_namespace("more", deadline=soon())
        assert len(a.members[0].reservations.report(soon()).registrants) == 2
        second.close(deadline=soon())
        owner.close(deadline=soon())


def test_follower_of_another_host_reads_under_the_reservation(volume_uri: str) -> None:
    child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=100)
    try:
        assert child.stdin is not None and child.stdout is not None
        with ExitStack() as stack:
            volume = opened(stack, volume_uri, HOSTS[1])
            store = PageStore(volume.open_namespace("kv", mode="follower", deadline=soon()))
            out = np.zeros((8, store.page_size_bytes), dtype=np.uint8)
            seen, limit = set(), soon()
            while 0x55 not in seen and not limit.is_expired:
                child.stdin.write("go\n")
                child.stdin.flush()
                assert child.stdout.readline() == "stored 8\n"
                store.namespace.refresh(deadline=soon())
                got = store.get(KEYS, out)
                assert got.error_count == 0
                for page in out[got.status == 1]:
                    assert (page == page[0]).all()
                    seen.add(int(page[0]))
            assert seen == {0xAA, 0x55}
    finally:
        end(child)


def test_reservation_of_another_type_is_refused_by_name(volume_uri: str) -> None:
    with ExitStack() as stack:
        a, b = (opened(stack, volume_uri, host) for host in HOSTS)
        control = b.members[1].reservations
        assert control is not None
        control.register(7, soon())
        control.acquire(7, ReservationType.WRITE_EXCLUSIVE, soon())
        with pytest.raises(
            UsageError, match="expected none or write-exclusive-all-registrants, got write-exclusive"
        ):
            a.open_namespace("kv", deadline=soon())
        control.clear(7, soon())
        a.open_namespace("kv", deadline=soon()).close(deadline=soon())


def test_lost_owner_when_it_closes_says_so(
    volume_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        a, b = (opened(stack, volume_uri, host) for host in HOSTS)
        owner = a.open_namespace("kv", lease_ms=100, deadline=soon())
        elsewhere(tmp_path, monkeypatch)
        stranger = b.open_namespace("kv", takeover=True, deadline=soon())
        with pytest.raises(LeaseLostError):
            limit = soon()
            while not limit.is_expired:
                owner.contains(KEYS)
        with pytest.raises(LeaseLostError):
            owner.close(deadline=soon())
        stranger.close(deadline=soon())


# --- a volume made anew under reservations -------------------------------------------------------


def keys_on(session: Session, uri: str) -> list[int]:
    """The reservation keys that a device knows."""
    control = session.open_device(uri).reservations
    assert control is not None
    return [each.key for each in control.report(soon()).registrants]


@pytest.mark.parametrize("lost", [0, 1])
def test_volume_made_anew_puts_out_an_owner_that_may_be_alive_only_when_told(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says so on both members, or on the lost one alone: then the reservations do."""
    with running_target(namespace_count=3, namespace_size_bytes=32 << 20) as target, ExitStack() as stack:
        uris = [f"{target.uri}?nsid={nsid}" for nsid in (1, 2, 3)]
        volume_uri = "vol:" + ",".join(uris[:2])
        with Session(host=HOSTS[0]) as session:
            volume = Volume.create([session.open_device(uri) for uri in uris[:2]], name="v", deadline=soon())
            volume.create_namespace("kv", GEOMETRY, quota_pages=16, deadline=soon())
        child = owner_process(volume_uri, HOSTS[0].host_nqn, lease_ms=500)
        stack.callback(end, child)
        elsewhere(tmp_path, monkeypatch)
        session = stack.enter_context(Session(host=HOSTS[1]))
        kept, new = uris[1 - lost], uris[2]
        members = [session.open_device(uri) for uri in (kept, new)]
        before = read_blocks(members[1], 0, 64, soon())
        owner_key = writer_key(HOSTS[0].host_id_bytes)
        with pytest.raises(LockHeldError) as refusal:
            recreate_volume(members, replaced=[members[1].uri], deadline=soon())
        named = {
            f"v#kv: is owned by process {child.pid} of host" in str(refusal.value),
            f"HOSTID {HOSTS[0].host_id} is registered with {members[0].uri}, and may own"
            in str(refusal.value),
        }
        assert named == {True, False}
        assert np.array_equal(read_blocks(members[1], 0, 64, soon()), before)
        assert keys_on(session, kept) == [owner_key] and not keys_on(session, new)
        report = recreate_volume(members, replaced=[members[1].uri], takeover=True, deadline=soon())
        assert report.namespaces == ("kv",)
        assert not keys_on(session, kept) and not keys_on(session, new)
        assert child.stdin is not None and child.stdout is not None
        # What lies on the lost member alone it may write until it renews its lease, or writes to another.
        counts, limit = {"put success": 1}, soon()
        while "put success" in counts and not limit.is_expired:
            child.stdin.write("count 1\n")
            child.stdin.flush()
            counts = json.loads(child.stdout.readline())
        assert counts == {
            f"{name} LeaseLostError": 1 for name in ("put", "flush", "delete", "pin", "get", "contains")
        }
        anew = session.open_volume(f"vol:{kept},{new}")
        store = PageStore(anew.open_namespace("kv", deadline=soon()))
        pages = np.full((8, store.page_size_bytes), 0x22, dtype=np.uint8)
        assert not store.contains(KEYS).any() and store.put(KEYS, pages).stored_count == 8
        store.close()


def test_volume_made_anew_puts_an_owner_of_two_namespaces_out_at_once_and_waits_for_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_target(namespace_count=3, namespace_size_bytes=32 << 20) as target, ExitStack() as stack:
        uris = [f"{target.uri}?nsid={nsid}" for nsid in (1, 2, 3)]
        session = stack.enter_context(Session(host=HOSTS[0]))
        volume = Volume.create([session.open_device(uri) for uri in uris[:2]], name="v", deadline=soon())
        for name in ("a", "b"):
            volume.create_namespace(name, GEOMETRY, quota_pages=4, deadline=soon())
        owners = [volume.open_namespace(name, deadline=soon()) for name in ("a", "b")]
        elsewhere(tmp_path, monkeypatch)
        other = stack.enter_context(Session(host=HOSTS[1]))
        members = [other.open_device(uri) for uri in (uris[0], uris[2])]
        report = recreate_volume(members, replaced=[members[1].uri], takeover=True, deadline=soon())
        assert report.namespaces == ("a", "b")
        for owner in owners:
            with pytest.raises(LeaseLostError):
                owner.renew(deadline=soon())
            owner.abandon()
        assert not any("may land" in each.getMessage() for each in caplog.records)
