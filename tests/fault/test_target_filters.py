"""Delays, limits and injected errors under a namespace, as a host sees them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, KvdevError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.target.model import BdevKind, Injection, Latencies, RateLimits
from kvdev.target.stack import BdevStack
from kvdev.testing.target import RunningTarget, running_target

NO_DELAY = Latencies(0, 0, 0, 0)
HOST = HostIdentity.of("nqn.2024-01.io.example:host")
# What the target does, without the host making it good again.
OPTIONS = ControllerOptions(
    connect_timeout_s=2.0,
    admin_timeout_s=2.0,
    command_timeout_s=8.0,
    shutdown_timeout_s=0.5,
    ctrl_loss_tmo_s=0,
    retry_count=0,
)


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


@dataclass
class Drill:
    """A namespace on a delay and an error bdev, on a memory bdev of 4 MiB."""

    target: RunningTarget
    stack: BdevStack
    device: NvmeNamespace

    def inject(self, io_type: str, error_type: str, count: int = 1, **options: int) -> None:
        self.stack.inject("EE_D", io_type=io_type, injection=Injection(error_type, count, **options))


@contextmanager
def drill(latencies: Latencies = NO_DELAY) -> Iterator[Drill]:
    with running_target(namespace_count=0) as target, Session(host=HOST, options=OPTIONS) as kv:
        stack = BdevStack(target.model)
        target.model.create_malloc(name="M", block_size_bytes=4096, block_count=1024)
        stack.create_delay("D", base_name="M", latencies=latencies)
        stack.create_error("D")
        nsid = target.model.add_namespace(target.nqn, bdev_name="EE_D", uuid=uuid.UUID(int=1))
        device = kv.open_device(f"{target.uri}?nsid={nsid}")
        assert isinstance(device, NvmeNamespace)
        yield Drill(target, stack, device)


def elapsed_s(work: Any) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def best_s(work: Any) -> float:
    """The shortest of many tries: what is not held back is quick once, however busy the machine is."""
    return min(elapsed_s(work) for _ in range(20))


@pytest.mark.parametrize("count", [1, 64])
def test_data_goes_through_filters_unchanged(count: int, rng: np.random.Generator) -> None:
    with drill() as under:
        data = rng.integers(0, 256, count * 4096, dtype=np.uint8)
        write_blocks(under.device, 3, data, soon())
        assert np.array_equal(read_blocks(under.device, 3, count, soon()), data)
        under.device.flush(soon())
        under.device.deallocate([(3, count)], soon())
        assert not read_blocks(under.device, 3, count, soon()).any()


def test_failure_is_a_media_error_of_the_next_commands_only() -> None:
    with drill() as under:
        under.inject("read", "failure", 2)
        for _ in range(2):
            with pytest.raises(CommandError) as caught:
                read_blocks(under.device, 0, 1, soon())
            assert (caught.value.sct, caught.value.sc) == (2, 0x81)
        read_blocks(under.device, 0, 1, soon())
        under.inject("write", "failure")
        with pytest.raises(CommandError) as caught:
            write_blocks(under.device, 0, np.zeros(4096, np.uint8), soon())
        assert (caught.value.sct, caught.value.sc) == (2, 0x80)
        under.inject("flush", "failure")
        with pytest.raises(CommandError):
            under.device.flush(soon())
        under.device.flush(soon())


def test_nvme_failure_reaches_the_host_as_it_is() -> None:
    with drill() as under:
        under.inject("read", "nvme_failure", sct=3, sc=0x02)
        with pytest.raises(CommandError) as caught:
            read_blocks(under.device, 0, 1, soon())
        assert (caught.value.sct, caught.value.sc) == (3, 0x02)


def test_corrupt_data_reaches_the_host() -> None:
    with drill() as under:
        under.inject("read", "corrupt_data", corrupt_offset=5000, corrupt_value=0xFF)
        got = read_blocks(under.device, 0, 8, soon())
        assert got[5000] == 0xFF and np.count_nonzero(got) == 1
        assert not read_blocks(under.device, 0, 8, soon()).any()


def test_nomem_is_late_and_succeeds() -> None:
    with drill() as under:
        under.inject("read", "nomem", 3)
        for _ in range(3):
            assert elapsed_s(lambda: read_blocks(under.device, 0, 1, soon())) >= 0.001


def test_pending_commands_wait_for_resume_and_others_pass() -> None:
    with drill() as under:
        # Many small commands at once: more of them than the target has workers.
        under.inject("write", "pending", 1000)
        data = np.full(1 << 20, 7, np.uint8)
        writer = threading.Thread(target=lambda: write_blocks(under.device, 0, data, soon()))
        writer.start()
        time.sleep(0.1)
        assert writer.is_alive()
        # Another connection is served meanwhile.
        with Session(host=HOST, options=OPTIONS) as other:
            device = other.open_device(f"{under.target.uri}?nsid=1")
            assert not read_blocks(device, 0, 256, soon()).any()
            under.inject("clear", "pending")
            under.stack.resume_pending("EE_D")
            writer.join(10)
            assert not writer.is_alive()
            assert np.array_equal(read_blocks(device, 0, 256, soon()), data)


def handle_of(under: Drill, name: str) -> int:
    bdev = under.target.model.bdev(name)
    assert bdev is not None
    return bdev.handle


def test_removing_a_namespace_ends_its_pending_commands() -> None:
    with drill() as under:
        under.inject("read", "pending", 100)
        failed: list[BaseException] = []

        def read() -> None:
            try:
                read_blocks(under.device, 0, 1, soon())
            except CommandError as error:
                failed.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.1)
        assert elapsed_s(lambda: under.target.model.delete_bdev("M", BdevKind.MALLOC)) < 3
        reader.join(10)
        assert len(failed) == 1
        assert under.target.model.bdevs() == ()


def read_until_it_fails(device: NvmeNamespace) -> None:
    with contextlib.suppress(KvdevError):
        read_blocks(device, 0, 1, soon())


def test_target_stops_with_commands_pending() -> None:
    with Session(host=HOST, options=OPTIONS) as kv:
        with running_target(namespace_count=0) as target:
            stack = BdevStack(target.model)
            target.model.create_malloc(name="M", block_size_bytes=4096, block_count=1024)
            stack.create_error("M")
            target.model.add_namespace(target.nqn, bdev_name="EE_M")
            stack.inject("EE_M", io_type="read", injection=Injection("pending", 100))
            device = kv.open_device(f"{target.uri}?nsid=1")
            assert isinstance(device, NvmeNamespace)
            reader = threading.Thread(target=read_until_it_fails, args=(device,))
            reader.start()
            time.sleep(0.05)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        # The session goes after who polls it.
        reader.join(10)
        assert not reader.is_alive()


def test_delay_holds_each_operation_without_holding_workers() -> None:
    with drill(Latencies(30_000, 30_000, 60_000, 60_000)) as under:
        assert 0.03 <= elapsed_s(lambda: read_blocks(under.device, 0, 1, soon())) < 2
        assert 0.06 <= elapsed_s(lambda: write_blocks(under.device, 0, np.zeros(4096, np.uint8), soon())) < 2
        # 256 KiB are several commands at a time: all are held together, on four workers.
        assert elapsed_s(lambda: read_blocks(under.device, 0, 512, soon())) < 1.5
        under.stack.update_latency("D", which="avg_read", latency_us=0)
        under.stack.update_latency("D", which="p99_read", latency_us=0)
        assert best_s(lambda: [read_blocks(under.device, 0, 1, soon()) for _ in range(5)]) < 0.15
        stat = under.target.service.bdev(handle_of(under, "D")).stat()
        assert stat.write_count == 1


def test_limits_of_a_bdev_below_slow_the_namespace_and_go_away() -> None:
    with drill() as under:
        model = under.target.model
        bdev = model.find_bdev("M")
        model.set_limits(bdev, RateLimits(rw_mbytes_per_sec=8))
        # 2 MiB at 8 MiB/s.
        assert 0.2 <= elapsed_s(lambda: read_blocks(under.device, 0, 512, soon())) < 3
        model.set_limits(model.find_bdev("M"), RateLimits(w_mbytes_per_sec=1))
        assert best_s(lambda: read_blocks(under.device, 0, 512, soon())) < 0.2
        model.set_limits(model.find_bdev("M"), RateLimits())
        assert best_s(lambda: read_blocks(under.device, 0, 512, soon())) < 0.2


def test_limit_on_operations_holds_over_many_at_once() -> None:
    with drill() as under:
        model = under.target.model
        model.set_limits(model.find_bdev("M"), RateLimits(rw_ios_per_sec=1000))
        took_s = elapsed_s(lambda: [read_blocks(under.device, index, 1, soon()) for index in range(200)])
        assert 0.15 <= took_s < 3


def test_histogram_of_a_delayed_bdev_has_the_delay() -> None:
    with drill(Latencies(2000, 2000, 0, 0)) as under:
        backend = under.target.model.backend
        backend.start_histogram(handle_of(under, "EE_D"), "read")
        for _ in range(5):
            read_blocks(under.device, 0, 1, soon())
        counts = backend.histogram(handle_of(under, "EE_D"))
        # 2 ms is in the range of 2^20 to 2^21 ns or above.
        assert sum(counts) == 5 and sum(counts[: 14 * 128]) == 0


def test_lvol_shows_no_bytes_of_a_deleted_one_and_resizes_under_a_host() -> None:
    with running_target(namespace_count=0) as target, Session(host=HOST, options=OPTIONS) as kv:
        stack = BdevStack(target.model)
        target.model.create_malloc(name="M", block_size_bytes=4096, block_count=4096)
        store = stack.create_store("M", name="S", cluster_size_bytes=1 << 20)
        options: dict[str, Any] = {"size_mib": 2, "is_thin": False, "is_cleared": True}
        stack.create_lvol(store, name="a", **options)
        stack.create_lvol(store, name="b", **options)
        nsid = target.model.add_namespace(target.nqn, bdev_name="S/b")
        device = kv.open_device(f"{target.uri}?nsid={nsid}")
        write_blocks(device, 0, np.full(2 << 20, 9, np.uint8), soon())
        stack.delete_lvol("S/a")
        # Its new clusters are those that a had, and the first free ones.
        stack.resize_lvol("S/b", size_mib=5)
        with Session(host=HOST, options=OPTIONS) as other:
            grown = other.open_device(f"{target.uri}?nsid={nsid}")
            assert grown.block_count == 5 * 256
            assert (read_blocks(grown, 0, 512, soon()) == 9).all()
            assert not read_blocks(grown, 512, 3 * 256, soon()).any()
        stack.delete_lvol("S/b")
        stack.create_lvol(store, name="c", **{**options, "size_mib": 10})
        nsid = target.model.add_namespace(target.nqn, bdev_name="S/c")
        with Session(host=HOST, options=OPTIONS) as other:
            assert not read_blocks(other.open_device(f"{target.uri}?nsid={nsid}"), 0, 10 * 256, soon()).any()


def test_splits_are_disjoint_parts_of_their_base(rng: np.random.Generator) -> None:
    with running_target(namespace_count=0) as target, Session(host=HOST, options=OPTIONS) as kv:
        stack = BdevStack(target.model)
        target.model.create_malloc(name="M", block_size_bytes=4096, block_count=1024)
        names = stack.create_split("M", count=3)
        data = [rng.integers(0, 256, 341 * 4096, dtype=np.uint8) for _ in names]
        for name, part in zip(names, data, strict=True):
            nsid = target.model.add_namespace(target.nqn, bdev_name=name)
            write_blocks(kv.open_device(f"{target.uri}?nsid={nsid}"), 0, part, soon())
        base = target.service.bdev(target.model.find_bdev("M").handle)
        assert base.read(0, 3 * 341 * 4096) == b"".join(part.tobytes() for part in data)
        assert not any(base.read(1023 * 4096, 4096))
