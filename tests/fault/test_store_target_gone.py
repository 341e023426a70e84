"""A store over NVMe/TCP whose target goes away: bounded waits, honest results, and what was flushed stays."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import TransportError
from kvdev.geometry import Geometry
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.store import PageStore, Volume
from kvdev.testing.target import RunningTarget, running_target

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    connect_timeout_s=2.0,
    admin_timeout_s=2.0,
    command_timeout_s=2.0,
    shutdown_timeout_s=0.5,
    ctrl_loss_tmo_s=0,
)
GEOMETRY = Geometry.preset("small")


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"member{index}" for index in range(4)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(16 << 20)
    return paths


def start(stack: ExitStack, paths: list[Path]) -> RunningTarget:
    target = stack.enter_context(running_target(namespace_count=0))
    for path in paths:
        target.add_file_namespace(str(path))
    return target


def members_of(kv: Session, target: RunningTarget) -> list[str]:
    return [f"{target.uri}?nsid={nsid}" for nsid in range(1, 5)]


def test_store_when_the_target_is_stopped_and_started_has_what_was_flushed(
    paths: list[Path], rng: np.random.Generator
) -> None:
    keys = rng.integers(0, 256, (60, 32), dtype=np.uint8)
    pages = rng.integers(0, 256, (60, GEOMETRY.page_size_bytes), dtype=np.uint8)
    out = np.zeros_like(pages)
    with ExitStack() as first, Session(host=HOST, options=QUICK) as kv:
        target = start(first, paths)
        members = [kv.open_device(uri) for uri in members_of(kv, target)]
        volume = Volume.create(members, name="v", strip_size_bytes=16384, deadline=soon())
        volume.create_namespace("kv", GEOMETRY, quota_pages=80, deadline=soon())
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        assert store.put(keys[:40], pages[:40]).stored_count == 40
        store.flush()
        assert store.put(keys[40:50], pages[40:50]).stored_count == 10
        assert store.get(keys[:50], out[:50]).hit_count == 50
        assert np.array_equal(out[:50], pages[:50])
        first.close()
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        lost = store.put(keys[50:], pages[50:])
        assert lost.error_count == 10
        assert isinstance(lost.failure, TransportError)
        assert "connection lost" in str(lost.failure)
        assert store.get(keys[:5], out[:5]).error_count == 5
        with pytest.raises(TransportError):
            store.flush()
        # Withdrawn: what that flush covered, not what an earlier one had made durable.
        assert store.contains(keys).tolist() == [True] * 40 + [False] * 20
        with pytest.raises(TransportError):
            store.close()
        assert SYSTEM_CLOCK.monotonic_ns() - started_ns < 10_000_000_000
    with ExitStack() as second, Session(host=HOST, options=QUICK) as kv:
        target = start(second, paths)
        volume = kv.open_volume(f"vol+{target.uri}")
        store = PageStore(volume.open_namespace("kv", geometry=GEOMETRY, deadline=soon()))
        out[:] = 0
        assert store.get(keys[:40], out[:40]).hit_count == 40
        assert np.array_equal(out[:40], pages[:40])
        assert store.put(keys[40:], pages[40:]).stored_count == 20
        store.close()
