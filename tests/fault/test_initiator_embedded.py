"""Our initiator against our target in one process: data, refusals, and a target that goes away."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.errors import CommandError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev.initiator.event import EventKind
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume
from kvdev.target.model import Transport
from kvdev.testing.target import running_target
from kvdev.uri import DigestPolicy

IS_LONG = bool(os.environ.get("KVDEV_LONG"))
HOST = HostIdentity.of("nqn.2024-01.io.example:host")
QUICK = ControllerOptions(
    connect_timeout_s=2.0,
    admin_timeout_s=2.0,
    command_timeout_s=2.0,
    shutdown_timeout_s=0.5,
    reconnect_delay_s=0.5,
    fast_io_fail_tmo_s=1.0,
)


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Descriptors and threads are as before when a test ends, whatever failed in it."""
    before, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("digest", [DigestPolicy.OFF, DigestPolicy.REQUIRE])
@pytest.mark.parametrize("block_size_bytes", [512, 4096])
@pytest.mark.parametrize("queues", [1, 4])
def test_data_when_random_then_reads_what_was_written(
    digest: DigestPolicy, block_size_bytes: int, queues: int, rng: np.random.Generator
) -> None:
    options = ControllerOptions(io_queue_count=queues, header_digest=digest, data_digest=digest)
    size = 4 << 20
    with (
        running_target(
            namespace_count=2, namespace_size_bytes=size, block_size_bytes=block_size_bytes
        ) as target,
        Session(host=HOST, options=options) as kv,
    ):
        devices = [kv.open_device(f"{target.uri}?nsid={nsid}") for nsid in (1, 2)]
        models = [rng.integers(0, 256, size, dtype=np.uint8) for _ in devices]
        for device, model in zip(devices, models, strict=True):
            assert isinstance(device, NvmeNamespace)
            write_blocks(device, 0, model, soon())
            assert np.array_equal(read_blocks(device, 0, device.block_count, soon()), model)
            for _ in range(20):
                count = int(rng.integers(1, 80))
                slba = int(rng.integers(0, device.block_count - count))
                if rng.integers(0, 4) == 0:
                    device.write_zeroes(slba, count, soon())
                    payload = np.zeros(count * block_size_bytes, dtype=np.uint8)
                else:
                    payload = rng.integers(0, 256, count * block_size_bytes, dtype=np.uint8)
                    write_blocks(device, slba, payload, soon())
                model[slba * block_size_bytes : (slba + count) * block_size_bytes] = payload
            device.flush(soon())
            assert np.array_equal(read_blocks(device, 0, device.block_count, soon()), model)
        assert devices[0].identity != devices[1].identity


def test_deallocate_when_ranges_then_neighbours_stay(rng: np.random.Generator) -> None:
    with running_target() as target, Session(host=HOST, options=QUICK) as kv:
        device = kv.open_device(f"{target.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        model = rng.integers(0, 256, 64 * 4096, dtype=np.uint8)
        write_blocks(device, 0, model, soon())
        device.deallocate([(4, 8), (20, 1), (40, 23)], soon())
        got = read_blocks(device, 0, 64, soon()).reshape(64, 4096)
        kept = [block for block in range(64) if not (4 <= block < 12 or block == 20 or 40 <= block < 63)]
        assert np.array_equal(got[kept], model.reshape(64, 4096)[kept])
        with pytest.raises(UsageError, match="range: expected blocks within"):
            device.deallocate([(device.block_count, 1)], soon())


def test_stripe_when_members_share_the_queue_then_data_lies_as_raid0(rng: np.random.Generator) -> None:
    strip = 64 << 10
    with running_target(namespace_count=3) as target, Session(host=HOST, options=QUICK) as kv:
        members = kv.open_members(f"vol+{target.uri}")
        stripe = StripeDevice(members, strip_size_bytes=strip)
        data = rng.integers(0, 256, 3 << 20, dtype=np.uint8)
        write_blocks(stripe, 0, data, soon())
        for index, member in enumerate(members):
            got = read_blocks(member, 0, (1 << 20) // member.block_size_bytes, soon())
            assert np.array_equal(got.reshape(-1, strip), data.reshape(-1, strip)[index::3])


def test_idle_when_two_keep_alive_times_then_still_connected() -> None:
    """S-20: idle for longer than either side would wait; with KVDEV_LONG for 130 s at the default."""
    options = ControllerOptions() if IS_LONG else ControllerOptions(kato_ms=1000)
    with (
        running_target(transport=Transport(kas=1, min_kato=100)) as target,
        Session(host=HOST, options=options) as kv,
    ):
        device = kv.open_device(f"{target.uri}?nsid=1")
        assert isinstance(device, NvmeNamespace)
        assert device.controller.kato_ms == options.kato_ms
        threading.Event().wait(130 if IS_LONG else 2.2)
        assert device.controller.is_alive
        assert len(target.service.controllers(target.nqn)) == 1
        assert len(read_blocks(device, 0, 1, soon())) == 4096


def test_discover_when_two_subsystems_then_those_for_this_host() -> None:
    other = "nqn.2024-01.io.kvdev:other"
    secret = "nqn.2024-01.io.kvdev:secret"
    with running_target() as target, Session(host=HOST, options=QUICK) as kv:
        target.add_subsystem(other, hosts=[HOST.host_nqn])
        target.add_subsystem(secret, hosts=["nqn.2024-01.io.example:someone"])
        found = {entry.subnqn for entry in kv.discover(f"{target.address}:{target.port}")}
        assert {target.nqn, other} <= found
        assert secret not in found
        assert kv.controller(f"tcp://{target.address}:{target.port}/{other}").is_alive
        with pytest.raises(CommandError, match=f"add the host NQN {HOST.host_nqn}|kvdev discover"):
            kv.controller(f"tcp://{target.address}:{target.port}/{secret}")


def test_connect_when_subsystem_unknown_then_remedy() -> None:
    with (
        running_target() as target,
        Session(host=HOST, options=QUICK) as kv,
        pytest.raises(CommandError, match="kvdev discover"),
    ):
        kv.controller(f"tcp://{target.address}:{target.port}/nqn.2024-01.io.kvdev:none")


def test_close_when_repeated_then_controllers_are_gone_on_the_target() -> None:
    with running_target() as target:
        for _ in range(5):
            with Session(host=HOST, options=QUICK) as kv:
                kv.open_device(f"{target.uri}?nsid=1")
                assert len(target.service.controllers(target.nqn)) == 1
            limit = soon(5)
            while target.service.controllers(target.nqn) and not limit.is_expired:
                threading.Event().wait(0.01)
            assert not target.service.controllers(target.nqn)


def test_target_when_stopped_under_io_then_bounded_error_and_close() -> None:
    with running_target() as target:
        kv = Session(host=HOST, options=QUICK)
        device = kv.open_device(f"{target.uri}?nsid=1")
        write_blocks(device, 0, bytes(4096), soon())
    try:
        limit = soon(5)
        with pytest.raises(TransportError):
            write_blocks(device, 0, bytes(4096), limit)
        with pytest.raises(TransportError):
            kv.controller(target.uri)
        assert not limit.is_expired
    finally:
        limit = soon(5)
        kv.close()
        assert not limit.is_expired


def test_reopen_when_target_returns_then_session_connects_anew() -> None:
    with running_target() as target, Session(host=HOST, options=QUICK) as kv:
        first = kv.controller(target.uri)
        first.close()
        assert not first.is_alive
        device = kv.open_device(f"{target.uri}?nsid=1")
        assert len(read_blocks(device, 0, 1, soon())) == 4096


def test_volume_when_opened_by_subsystem_then_labelled_namespaces_are_its_members() -> None:
    limit = soon(30)
    keys = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    with running_target(namespace_count=3, namespace_size_bytes=32 << 20) as target:
        with Session(host=HOST, options=QUICK) as kv:
            with pytest.raises(UsageError, match="got none of 3"):
                kv.open_volume(f"vol+{target.uri}", deadline=limit)
            members = kv.open_members(f"vol:{target.uri}?nsid=3,{target.uri}?nsid=1", deadline=limit)
            volume = Volume.create(members, name="v", strip_size_bytes=64 << 10, deadline=limit)
            geometry = Geometry.preset("small")
            volume.create_namespace("x", geometry, quota_pages=64, deadline=limit)
        pages = np.random.default_rng(1).integers(0, 256, (8, geometry.page_size_bytes), dtype=np.uint8)
        for is_written in (True, False):
            with Session(host=HOST, options=QUICK) as kv:
                store = PageStore(kv.open_kv_namespace(f"vol+{target.uri}#x", deadline=limit))
                if is_written:
                    store.put(keys, pages)
                    store.flush()
                    continue
                got = np.zeros_like(pages)
                store.get(keys, got)
                assert np.array_equal(got, pages)


def test_connect_when_ipv6_then_as_over_ipv4() -> None:
    try:
        target_context = running_target(address="::1")
        target = target_context.__enter__()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        with Session(host=HOST, options=QUICK) as kv:
            device = kv.open_device(f"tcp://[::1]:{target.port}/{target.nqn}?nsid=1")
            assert len(read_blocks(device, 0, 2, soon())) == 2 * device.block_size_bytes
            assert kv.queue.qpair(0).peer_address == f"[::1]:{target.port}"
            assert {entry.traddr for entry in kv.discover(f"[::1]:{target.port}")} == {"::1"}
    finally:
        target_context.__exit__(None, None, None)


def test_events_when_namespaces_come_then_each_is_told_once_its_page_was_read() -> None:
    with (
        running_target(namespace_count=1, namespace_size_bytes=1 << 20) as target,
        Session(host=HOST, options=QUICK) as kv,
    ):
        kv.open_device(f"{target.uri}?nsid=1")
        subsystem = kv.subsystem(target.uri)
        assert subsystem.take_event(deadline=soon(0.05)) is None
        for _ in range(3):
            nsid = target.add_memory_namespace(size_bytes=1 << 20)
            event = subsystem.take_event(deadline=soon(5))
            assert event is not None
            assert (event.kind, event.nsid) == (EventKind.NAMESPACE_ADDED, nsid)
        assert subsystem.take_event(deadline=soon(0.05)) is None
        controller = kv.controller(target.uri)
        kv.close()
        with pytest.raises(UsageError, match="closed"):
            controller.take_event(deadline=soon(1))
