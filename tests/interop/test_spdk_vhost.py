"""A real SPDK as the local back end: vhost-blk over a raid0 bdev, our front end on it.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later, started without huge pages).
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import execute, transfer_ios
from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.native.io import IO_FUA, OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.session import Session
from kvdev.staging import Arena
from kvdev.store import PageStatus, PageStore, Volume
from kvdev.testing.vhost_rig import VhostRig
from kvdev.units import MIB
from kvdev.vhost import SharedMemory, VhostOptions
from spdk_rpc import Client, RpcTransportError, SpdkRpc
from tests.interop.conftest import missing

pytestmark = pytest.mark.interop

START_TIMEOUT_S = 60.0
MEMBER_BYTES = 32 * MIB


@dataclass
class Spdk:
    """A running spdk_tgt; vhost sockets are made in its folder."""

    rpc: SpdkRpc
    folder: Path
    process: subprocess.Popen[bytes]

    def socket(self, name: str) -> str:
        return str(self.folder / name)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def spdk(folder: Path) -> Iterator[Spdk]:
    binary = os.environ.get("KVDEV_SPDK_TGT")
    if not binary:
        missing("KVDEV_SPDK_TGT names no spdk_tgt")
    path = str(folder / "rpc.sock")
    arguments = [binary, "--no-pci", "--no-huge", "-s", "1024", "-m", "0x1", "--disable-cpumask-locks"]
    arguments += ["-r", path, "-S", str(folder)]
    with (
        (folder / "spdk.log").open("ab") as log,
        subprocess.Popen(arguments, stdout=log, stderr=log) as process,
    ):
        try:
            with wait_until_it_answers(path, process) as client:
                yield Spdk(SpdkRpc(client), folder, process)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()


def wait_until_it_answers(path: str, process: subprocess.Popen[bytes]) -> Client:
    deadline = Deadline.after(START_TIMEOUT_S)
    while True:
        try:
            client = Client(path, timeout_s=START_TIMEOUT_S)
            SpdkRpc(client).framework_wait_init()
            return client
        except RpcTransportError:
            deadline.check("start of spdk_tgt")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            raise AssertionError(f"spdk_tgt ended with {process.returncode}")


def members(target: Spdk, count: int = 2, *, driver: str = "aio") -> list[Path]:
    """Files of the folder as bdevs F0, F1, and so on: what they hold survives the process."""
    files = []
    for index in range(count):
        file = target.folder / f"member{index}.img"
        if not file.exists():
            with file.open("wb") as out:
                out.truncate(MEMBER_BYTES)
        create = target.rpc.bdev_uring_create if driver == "uring" else target.rpc.bdev_aio_create
        create(name=f"F{index}", filename=str(file), block_size=512)
        files.append(file)
    return files


def slow(target: Spdk) -> None:
    """F0 with a second of delay, shown as vhost.0: at the time of a kill something is on its way for certain."""
    target.rpc.bdev_delay_create(
        base_bdev_name="F0",
        name="Slow",
        avg_read_latency=10**6,
        p99_read_latency=10**6,
        avg_write_latency=10**6,
        p99_write_latency=10**6,
    )
    target.rpc.vhost_create_blk_controller(ctrlr="vhost.0", dev_name="Slow")


def raid(target: Spdk) -> list[Path]:
    """Raid0 over two files, strips of 64 KiB, shown as vhost.0."""
    files = members(target)
    target.rpc.bdev_raid_create(name="Raid0", base_bdevs=["F0", "F1"], raid_level="raid0", strip_size_kb=64)
    target.rpc.vhost_create_blk_controller(ctrlr="vhost.0", dev_name="Raid0")
    return files


@pytest.mark.parametrize("queue_count", [1, 4])
def test_spdk_when_written_through_raid0_then_the_files_hold_the_strips(
    queue_count: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    with spdk(tmp_path) as target:
        files = raid(target)
        options = VhostOptions(queue_count=queue_count)
        with VhostRig(target.socket("vhost.0"), options=options, arena_size_bytes=16 * MIB) as rig:
            assert rig.device.agreement.queue_count == queue_count
            assert rig.device.size_bytes == 2 * MEMBER_BYTES
            data = np.frombuffer(rig.fill(rng, 16 * MIB), dtype=np.uint8)
            execute(
                rig.device,
                transfer_ios(rig.device, OPCODE_WRITE, 0, rig.arena.address, 16 * MIB),
                rig.deadline(),
            )
            assert rig.run(OPCODE_WRITE, slba=8, size_bytes=4096, offset=4096, flags=IO_FUA)["error"] == 0
            rig.device.flush(rig.deadline())
            strips = data.reshape(-1, 65536)
            for index, file in enumerate(files):
                stored = np.frombuffer(file.read_bytes()[: 8 * MIB], dtype=np.uint8).reshape(-1, 65536)
                assert (stored == strips[index::2]).all()
            rig.bytes[:] = 0
            execute(
                rig.device,
                transfer_ios(rig.device, OPCODE_READ, 0, rig.arena.address, 16 * MIB),
                rig.deadline(),
            )
            assert (rig.bytes[: len(data)] == data).all()
            rig.device.write_zeroes(0, 256, rig.deadline())
            assert not any(any(file.read_bytes()[:65536]) for file in files)
        # The next front end is served as the first was.
        with VhostRig(target.socket("vhost.0")) as rig:
            assert rig.run(OPCODE_READ, size_bytes=4096)["error"] == 0


def test_spdk_when_memory_is_shared_later_then_it_is_reached(tmp_path: Path) -> None:
    with spdk(tmp_path) as target:
        raid(target)
        with VhostRig(target.socket("vhost.0")) as rig, Arena(4 * MIB, is_shareable=True) as arena:
            assert rig.run(OPCODE_READ, size_bytes=4096)["error"] == 0
            rig.device.share(SharedMemory.of(arena), deadline=rig.deadline())
            arena.bytes()[:] = 0x42
            assert rig.run(OPCODE_WRITE, slba=64, size_bytes=MIB, buf_addr=arena.address)["error"] == 0
            assert rig.run(OPCODE_READ, slba=64, size_bytes=MIB)["error"] == 0
            assert (rig.bytes[:MIB] == 0x42).all()


def test_spdk_when_the_bdev_grows_then_the_capacity_follows(tmp_path: Path) -> None:
    with spdk(tmp_path) as target:
        target.rpc.bdev_null_create(name="N0", num_blocks=65536, block_size=512)
        target.rpc.vhost_create_blk_controller(ctrlr="vhost.n", dev_name="N0")
        with VhostRig(target.socket("vhost.n")) as rig:
            assert rig.device.block_count == 65536
            target.rpc.bdev_null_resize(name="N0", new_size=64)
            for _ in range(300):
                assert rig.run(OPCODE_WRITE, size_bytes=512)["error"] == 0
                if rig.device.block_count == 131072:
                    break
                rig.device._pause.wait(0.01)
            assert rig.device.block_count == 131072


def test_spdk_when_killed_with_commands_in_flight_then_its_successor_carries_them_out(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """SPDK keeps its commands in flight in shared memory: nothing is lost and nothing is uncertain."""
    count, size = 64, 65536
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(spdk(tmp_path))
        files = members(target, 1)
        slow(target)
        options = VhostOptions(queue_count=2)
        rig = stack.enter_context(VhostRig(target.socket("vhost.0"), options=options, timeout_s=60))
        data = rig.fill(rng, count * size)
        for tag in range(count):
            rig.submit(OPCODE_WRITE, slba=tag * size // 512, size_bytes=size, offset=tag * size, tag=tag)
        assert len(rig.poll(1, timeout_s=0.2)) == 0
        target.kill()
        assert len(rig.poll(1, timeout_s=0.3)) == 0 and rig.device.state == "held"
        # Whatever the dead one had written is taken back: what is there in the end is the successor's.
        files[0].write_bytes(bytes(MEMBER_BYTES))
        successor = stack.enter_context(spdk(tmp_path))
        members(successor, 1)
        successor.rpc.vhost_create_blk_controller(ctrlr="vhost.0", dev_name="F0")
        done = rig.poll(count)
        assert sorted(done["tag"].tolist()) == list(range(count))
        assert not done["error"].any() and rig.device.state == "ready"
        assert rig.run(OPCODE_FLUSH)["error"] == 0
        assert files[0].read_bytes()[: len(data)] == data


def test_spdk_when_killed_and_commands_are_not_kept_then_they_are_uncertain(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(spdk(tmp_path))
        members(target, 1)
        slow(target)
        options = VhostOptions(wants_inflight=False)
        rig = stack.enter_context(VhostRig(target.socket("vhost.0"), options=options, timeout_s=60))
        rig.submit(OPCODE_WRITE, size_bytes=4096)
        assert len(rig.poll(1, timeout_s=0.2)) == 0
        target.kill()
        assert rig.poll(1)["error"].tolist() == [-errno.ENOTCONN]
        rig.device.wait_quarantine(Deadline.after(5))
        successor = stack.enter_context(spdk(tmp_path))
        members(successor, 1)
        successor.rpc.vhost_create_blk_controller(ctrlr="vhost.0", dev_name="F0")
        rig.device.reconnect(rig.deadline())
        assert rig.run(OPCODE_WRITE, size_bytes=4096)["error"] == 0


GEOMETRY = Geometry(model_id="test", layer_count=4, kv_head_count=2, head_size=64, tokens_per_page=16)
PAGE_COUNT = 100


def show_members(target: Spdk, count: int) -> str:
    """Each bdev on a vhost controller of its own; the volume's URI."""
    for index in range(count):
        target.rpc.vhost_create_blk_controller(ctrlr=f"vhost.{index}", dev_name=f"F{index}")
    return "vol:" + ",".join(f"vhost:{target.socket(f'vhost.{index}')}" for index in range(count))


def hide_members(target: Spdk, count: int) -> None:
    for index in range(count):
        target.rpc.vhost_delete_controller(f"vhost.{index}")


def show_raid(target: Spdk, count: int) -> str:
    """A raid0 bdev over the members, on vhost.r; the volume's URI."""
    names = [f"F{index}" for index in range(count)]
    target.rpc.bdev_raid_create(name="R", base_bdevs=names, raid_level="raid0", strip_size_kb=64)
    target.rpc.vhost_create_blk_controller(ctrlr="vhost.r", dev_name="R")
    return f"vol:vhost:{target.socket('vhost.r')}"


def hide_raid(target: Spdk) -> None:
    target.rpc.vhost_delete_controller("vhost.r")
    target.rpc.bdev_raid_delete("R")


class Pages:
    """Pages under keys, all of them known."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.keys = rng.integers(0, 256, (PAGE_COUNT, 32), dtype=np.uint8)
        self.data = rng.integers(0, 256, (PAGE_COUNT, GEOMETRY.page_size_bytes), dtype=np.uint8)

    def put(self, uri: str) -> None:
        with Session() as kv:
            store = PageStore(kv.open_kv_namespace(f"{uri}#n", geometry=GEOMETRY))
            with kv.make_arena(8 * MIB) as arena, arena.lease(PAGE_COUNT, GEOMETRY.page_size_bytes) as lease:
                lease.array[:] = self.data
                assert (store.put(self.keys, lease).status == PageStatus.STORED).all()
                store.flush()

    def check(self, uri: str) -> None:
        with Session() as kv:
            store = PageStore(kv.open_kv_namespace(f"{uri}#n", geometry=GEOMETRY))
            with kv.make_arena(8 * MIB) as arena, arena.lease(PAGE_COUNT, GEOMETRY.page_size_bytes) as lease:
                assert (store.get(self.keys, lease).status == PageStatus.HIT).all()
                assert (lease.array == self.data).all()


@pytest.mark.parametrize("driver", ["uring", "aio"])
@pytest.mark.parametrize("count", [2, 3])
def test_store_when_members_and_raid0_of_spdk_take_turns_then_each_reads_the_others_pages(
    count: int, driver: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    first, second = Pages(rng), Pages(rng)
    with spdk(tmp_path) as target:
        members(target, count, driver=driver)
        uri = show_members(target, count)
        with Session() as kv:
            volume = Volume.create(
                kv.open_members(uri), name="v", strip_size_bytes=65536, deadline=Deadline.after(60)
            )
            volume.create_namespace("n", GEOMETRY, quota_pages=2 * PAGE_COUNT, deadline=Deadline.after(60))
        first.put(uri)
        hide_members(target, count)
        # Its raid0 over the same members: the labels are found in its logical space, our strips are its strips.
        uri = show_raid(target, count)
        first.check(uri)
        second.put(uri)
        hide_raid(target)
        # And back: what was written through the raid, read over the members, in any order.
        uri = show_members(target, count)
        first.check(uri)
        second.check(uri)
        target.kill()
    with spdk(tmp_path) as target:
        members(target, count, driver=driver)
        uri = show_raid(target, count)
        first.check(uri)
        second.check(uri)


def test_volume_when_the_raid0_of_spdk_has_its_members_in_another_order_then_it_is_refused(
    tmp_path: Path,
) -> None:
    with spdk(tmp_path) as target:
        members(target, 2)
        uri = show_members(target, 2)
        with Session() as kv:
            Volume.create(kv.open_members(uri), name="v", strip_size_bytes=65536, deadline=Deadline.after(60))
        hide_members(target, 2)
        target.rpc.bdev_raid_create(name="X", base_bdevs=["F1", "F0"], raid_level="raid0", strip_size_kb=64)
        target.rpc.vhost_create_blk_controller(ctrlr="vhost.x", dev_name="X")
        with Session() as kv, pytest.raises(UsageError, match="order"):
            kv.open_volume(f"vol:vhost:{target.socket('vhost.x')}")
