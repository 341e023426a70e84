"""A member of a volume goes away in service: misses and dropped puts, no call that waits, and a volume made anew."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import ConnectionLostError, CorruptionError, TransportError
from kvdev.geometry import Geometry
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session, open_pool
from kvdev.store import PageStore, Volume
from kvdev.store.recreate import recreate_volume
from kvdev.store.steady import SteadyStore
from kvdev.testing.killable import KillableTarget
from kvdev.testing.target import TEST_NQN, RunningTarget, running_target
from tests.fault.test_pool import kill, pool_process

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    connect_timeout_s=2.0,
    admin_timeout_s=2.0,
    command_timeout_s=2.0,
    shutdown_timeout_s=0.5,
    ctrl_loss_tmo_s=0,
)
GEOMETRY = Geometry.preset("small")
BOUND_NS = 60_000_000_000
"""On a busy machine; what a call waits for has limits of two seconds."""


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def target_of(stack: ExitStack, path: Path, seed: int) -> RunningTarget:
    """A target with one namespace over a file; the seed makes it another device than the others'."""
    if not path.exists():
        with path.open("wb") as file:
            file.truncate(16 << 20)
    target = stack.enter_context(running_target(namespace_count=0, nqn=f"{TEST_NQN}{seed}", seed=seed))
    target.add_file_namespace(str(path))
    return target


def test_member_that_is_lost_in_service_means_misses_and_the_volume_is_made_anew_under_the_engine(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    keys = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (40, GEOMETRY.page_size_bytes), dtype=np.uint8)
    out = np.zeros_like(pages)
    with ExitStack() as stays, ExitStack() as goes, Session(host=HOST, options=QUICK) as kv:
        kept, lost = target_of(stays, tmp_path / "kept", 1), target_of(goes, tmp_path / "lost", 2)
        uris = [f"{kept.uri}?nsid=1", f"{lost.uri}?nsid=1"]
        volume = Volume.create(
            [kv.open_device(uri) for uri in uris], name="v", strip_size_bytes=16384, deadline=soon()
        )
        volume.create_namespace("kv", GEOMETRY, quota_pages=80, deadline=soon())

        def open_store(deadline: Deadline) -> PageStore:
            members = [kv.open_device(uri) for uri in uris]
            opened = Volume.open(members, deadline=deadline)
            return PageStore(opened.open_namespace("kv", geometry=GEOMETRY, deadline=deadline))

        store = SteadyStore(open_store, reopens_by_itself=False)
        assert store.put(keys[:20], pages[:20]).stored_count == 20
        store.flush()
        assert store.get(keys[:20], out[:20]).hit_count == 20
        goes.close()  # the target of member 1 ends
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        found = store.get(keys[:20], out[:20])
        assert found.error_count == 0 and found.miss_count > 0
        assert all(np.array_equal(out[i], pages[i]) for i in np.flatnonzero(found.status == 1))
        assert store.is_away and store.stat().loss_count == 1
        assert store.stat().missed_pages == found.miss_count
        assert SYSTEM_CLOCK.monotonic_ns() - started_ns < BOUND_NS
        assert store.get(keys, out).miss_count == 40
        dropped = store.put(keys, pages)
        assert dropped.error_count == 40 and isinstance(dropped.failure, TransportError)
        assert not store.contains(keys).any() and store.longest_prefix(keys) == 0
        assert not store.delete(keys).any()
        with pytest.raises(ConnectionLostError, match=r"v#kv: flush: is away: .*connection lost"):
            store.flush()
        assert (store.stat().missed_pages, store.stat().dropped_pages) == (found.miss_count + 40, 40)
        with pytest.raises(TransportError):
            store.reopen()
        # A new device takes the lost one's place; the engine is told.
        fresh = target_of(stays, tmp_path / "fresh", 3)
        uris[1] = f"{fresh.uri}?nsid=1"
        with pytest.raises(CorruptionError, match="it is no member of a kvdev volume"):
            store.reopen()
        members = [kv.open_device(uri) for uri in uris]
        report = recreate_volume(members, replaced=[members[1].uri], deadline=soon())
        assert report.namespaces == ("kv",)
        store.reopen()
        assert not store.is_away and not store.contains(keys).any()
        assert store.put(keys, pages).stored_count == 40
        store.flush()
        assert store.get(keys, out).hit_count == 40 and np.array_equal(out, pages)
        store.close()


def test_engine_goes_on_by_itself_when_the_target_is_back(tmp_path: Path, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 256, (20, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (20, GEOMETRY.page_size_bytes), dtype=np.uint8)
    out = np.zeros_like(pages)
    with KillableTarget(tmp_path) as target:
        with Session(host=HOST, options=QUICK) as kv:
            volume = Volume.create([kv.open_device(f"{target.uri()}?nsid=1")], name="v", deadline=soon())
            volume.create_namespace("kv", GEOMETRY, quota_pages=40, deadline=soon())
        sessions: list[Session] = []

        def open_store(deadline: Deadline) -> PageStore:
            # One of its own, anew each time: attempts come from another thread, and one that fails leaves some open.
            while sessions:
                sessions.pop().close(deadline=deadline)
            sessions.append(Session(host=HOST, options=QUICK))
            opened = sessions[0].open_volume(f"vol+{target.uri()}", deadline=deadline)
            return PageStore(opened.open_namespace("kv", geometry=GEOMETRY, deadline=deadline))

        store = SteadyStore(open_store, retry_s_min=0.05, retry_s_max=0.2)
        assert store.put(keys, pages).stored_count == 20
        store.flush()
        target.kill()
        assert store.get(keys, out).hit_count == 0 and store.is_away
        limit, pause = soon(), threading.Event()
        while store.stat().attempt_count < 2:
            assert not limit.is_expired and store.put(keys, pages).error_count == 20
            pause.wait(0.05)
        target.start()
        while store.is_away:
            assert not limit.is_expired, store.stat()
            pause.wait(0.05)
        assert store.get(keys, out).hit_count == 20 and np.array_equal(out, pages)
        store.close()
        sessions[0].close()


def test_pool_whose_member_is_lost_drops_and_misses_is_stopped_and_follows_the_volume_made_anew(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    keys = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (40, GEOMETRY.page_size_bytes), dtype=np.uint8)
    out = np.zeros_like(pages)
    path = tmp_path / "pool.sock"
    with ExitStack() as stays, ExitStack() as goes:
        kept, lost = target_of(stays, tmp_path / "kept", 1), target_of(goes, tmp_path / "lost", 2)
        uris = [f"{kept.uri}?nsid=1", f"{lost.uri}?nsid=1"]
        with Session(options=QUICK) as session:
            made = Volume.create(
                [session.open_device(uri) for uri in uris], name="v", strip_size_bytes=16384, deadline=soon()
            )
            made.create_namespace("kv", GEOMETRY, quota_pages=80, deadline=soon())
        server = pool_process(f"vol:{','.join(uris)}", path, "--timeout", "5")
        stays.callback(kill, server)
        store = open_pool(str(path), "kv", geometry=GEOMETRY, options=QUICK)
        stays.callback(store.close)
        assert store.put(keys[:20], pages[:20]).stored_count == 20
        store.flush()
        assert store.get(keys[:20], out[:20]).hit_count == 20
        goes.close()  # the target of member 1 ends
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        found = store.get(keys[:20], out[:20])
        assert found.error_count == 0 < found.miss_count and found.failure is None
        assert all(np.array_equal(out[i], pages[i]) for i in np.flatnonzero(found.status == 1))
        assert SYSTEM_CLOCK.monotonic_ns() - started_ns < BOUND_NS
        missed = store.missed_pages
        assert (store.lost_count, missed) == (1, found.miss_count)
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        for _ in range(50):  # the engine goes on by recompute
            assert store.get(keys, out).miss_count == 40 and store.put(keys, pages).error_count == 40
        assert SYSTEM_CLOCK.monotonic_ns() - started_ns < BOUND_NS
        assert (store.missed_pages, store.dropped_pages) == (missed + 50 * 40, 50 * 40)
        assert not store.contains(keys).any() and store.longest_prefix(keys) == 0
        server.send_signal(signal.SIGTERM)
        server.wait(150)
        fresh = target_of(stays, tmp_path / "fresh", 3)
        uris[1] = f"{fresh.uri}?nsid=1"
        with Session(options=QUICK) as session:
            members = [session.open_device(uri) for uri in uris]
            # The pool process has ended without closing: by what is left it may have been another host's.
            report = recreate_volume(members, replaced=[uris[1]], takeover=True, deadline=soon())
            assert report.namespaces == ("kv",)
        again = pool_process(f"vol:{','.join(uris)}", path)
        stays.callback(kill, again)
        limit, pause = soon(), threading.Event()
        while not store.is_attached:
            assert not limit.is_expired
            pause.wait(0.05)
        assert not store.contains(keys).any() and store.put(keys, pages).stored_count == 40
        store.flush()
        assert store.get(keys, out).hit_count == 40 and np.array_equal(out, pages)
