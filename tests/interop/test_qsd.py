"""A real vhost-user-blk back end: qemu-storage-daemon, exporting a file.

One that is started by the lab's script; without the program a test skips and names the package.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import execute, read_blocks, transfer_ios
from kvdev.clock import SYSTEM_CLOCK, Deadline
from kvdev.errors import DeadlineError, UsageError
from kvdev.geometry import Geometry
from kvdev.native.io import IO_DTYPE, IO_FUA, OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.session import Session
from kvdev.staging import Arena
from kvdev.store import PageStatus, PageStore, Volume
from kvdev.testing.vhost_rig import VhostRig
from kvdev.units import MIB
from kvdev.vhost import VhostOptions
from tests.interop.conftest import missing, run_script

pytestmark = pytest.mark.interop

DISK_MIB = 64


@dataclass(frozen=True)
class Daemon:
    """A running qemu-storage-daemon."""

    socket: Path
    file: Path

    @property
    def pid(self) -> int:
        return int(Path(f"{self.socket}.pid").read_text())

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        pidfd = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        waiter = select.poll()
        waiter.register(pidfd, 1)
        assert waiter.poll(10_000)
        os.close(pidfd)


@contextmanager
def daemon(folder: Path, *, name: str = "disk", **env: str) -> Iterator[Daemon]:
    if shutil.which("qemu-storage-daemon") is None:
        missing("no qemu-storage-daemon here: apt-get install --no-install-recommends qemu-system-common")
    sock, file = folder / f"{name}.sock", folder / f"{name}.img"
    run_script("qsd.sh", str(sock), str(file), str(DISK_MIB), env=env, timeout_s=60)
    try:
        yield Daemon(sock, file)
    finally:
        subprocess.run(["pkill", "-CONT", "-F", f"{sock}.pid"], check=False, stderr=subprocess.DEVNULL)
        run_script("qsd.sh", "stop", str(sock), timeout_s=60)


def random_pieces(rig: VhostRig, rng: np.random.Generator, count: int) -> np.ndarray:
    """Writes of random sizes that cover the disk's start without overlap; payload at the same offset."""
    sizes = rng.integers(1, 257, count) * 512
    starts = np.cumsum(sizes) - sizes
    ios = np.zeros(count, dtype=IO_DTYPE)
    ios["opcode"], ios["device_index"] = OPCODE_WRITE, rig.device.device_index
    ios["slba"], ios["lba_count"], ios["byte_count"] = starts // 512, sizes // 512, sizes
    ios["buf_addr"] = np.uint64(rig.arena.address) + starts.astype(np.uint64)
    rng.shuffle(ios)
    return ios


@pytest.mark.parametrize(
    ("queues", "options", "env"),
    [
        (1, VhostOptions(), {}),
        (4, VhostOptions(queue_count=4, queue_size=16), {"QUEUES": "4"}),
        (2, VhostOptions(queue_count=2, has_indirect=False, has_event_idx=False), {"QUEUES": "2"}),
    ],
    ids=["one_queue", "four_queues", "plain_rings"],
)
def test_qsd_when_random_pieces_are_written_then_the_file_and_reads_agree(
    queues: int, options: VhostOptions, env: dict[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    with (
        daemon(tmp_path, **env) as qsd,
        VhostRig(str(qsd.socket), options=options, arena_size_bytes=64 * MIB) as rig,
    ):
        assert rig.device.agreement.queue_count == queues
        assert rig.device.size_bytes == DISK_MIB * MIB
        for _ in range(3):
            ios = random_pieces(rig, rng, 400)
            total = int(ios["byte_count"].sum())
            data = rig.fill(rng, total)
            execute(rig.device, ios, rig.deadline())
            rig.device.flush(rig.deadline())
            assert qsd.file.read_bytes()[:total] == data
            rig.bytes[:] = 0
            ios["opcode"] = OPCODE_READ
            execute(rig.device, ios, rig.deadline())
            assert rig.bytes[:total].tobytes() == data
        assert rig.run(OPCODE_WRITE, size_bytes=4096, flags=IO_FUA)["error"] == 0
        rig.device.write_zeroes(0, 100_000, rig.deadline())
        rig.device.deallocate([(100_000, 8)], rig.deadline())
        assert not any(qsd.file.read_bytes()[: 100_000 * 512])


def test_qsd_when_blocks_are_4096_then_they_are_used(tmp_path: Path, rng: np.random.Generator) -> None:
    with daemon(tmp_path, BLOCK_SIZE="4096", DIRECT="on") as qsd, VhostRig(str(qsd.socket)) as rig:
        assert (rig.device.block_size_bytes, rig.device.block_count) == (4096, DISK_MIB * 256)
        data = rig.fill(rng, MIB)
        execute(rig.device, transfer_ios(rig.device, OPCODE_WRITE, 7, rig.arena.address, MIB), rig.deadline())
        assert read_blocks(rig.device, 7, 256, rig.deadline()).tobytes() == data
        assert qsd.file.read_bytes()[7 * 4096 :][:MIB] == data


def test_qsd_when_read_only_then_reads_pass_and_writes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(b"\x17" * (DISK_MIB * MIB))
    with daemon(tmp_path, WRITABLE="off") as qsd, VhostRig(str(qsd.socket)) as rig:
        assert rig.device.is_read_only
        assert rig.run(OPCODE_WRITE, size_bytes=4096)["status"] == 0x182
        assert rig.run(OPCODE_READ, size_bytes=4096)["error"] == 0
        assert (rig.bytes[:4096] == 0x17).all()


def test_qsd_when_throttled_then_the_rate_holds_and_nothing_is_lost(tmp_path: Path) -> None:
    with daemon(tmp_path, IOPS="200") as qsd, VhostRig(str(qsd.socket)) as rig:
        start_ns = SYSTEM_CLOCK.monotonic_ns()
        for tag in range(120):
            rig.submit(OPCODE_READ, slba=tag, size_bytes=512, tag=tag)
        done = rig.poll(120)
        elapsed_s = (SYSTEM_CLOCK.monotonic_ns() - start_ns) / 1e9
        assert sorted(done["tag"].tolist()) == list(range(120)) and not done["error"].any()
        assert elapsed_s > 0.3, f"120 requests at 200 a second took {elapsed_s:.2f} s"


def test_qsd_when_killed_then_commands_are_uncertain_and_its_successor_is_used(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with daemon(tmp_path, IOPS="50") as qsd, VhostRig(str(qsd.socket)) as rig:
        for tag in range(64):
            rig.submit(OPCODE_WRITE, slba=8 * tag, size_bytes=4096, offset=4096 * tag, tag=tag)
        first = rig.poll(1)
        qsd.kill()
        rest = rig.poll(64 - len(first))
        assert len(first) + len(rest) == 64
        assert set(rest["error"].tolist()) <= {0, -errno.ENOTCONN} and (rest["error"] != 0).any()
        rig.device.wait_quarantine(Deadline.after(5))
        assert rig.device.state == "dead" and rig.device.quarantines == ()
        with daemon(tmp_path) as successor:
            rig.device.reconnect(rig.deadline())
            data = rig.fill(rng, MIB)
            execute(
                rig.device, transfer_ios(rig.device, OPCODE_WRITE, 0, rig.arena.address, MIB), rig.deadline()
            )
            rig.device.flush(rig.deadline())
            assert successor.file.read_bytes()[:MIB] == data


def test_qsd_when_stopped_and_abandoned_then_memory_is_held_until_it_is_dead(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    (tmp_path / "disk.img").write_bytes(b"\x33" * (DISK_MIB * MIB))
    with daemon(tmp_path) as qsd, VhostRig(str(qsd.socket), command_timeout_s=0.5) as rig:
        rig.bytes[:] = 0
        os.kill(qsd.pid, signal.SIGSTOP)
        rig.submit(OPCODE_READ, size_bytes=65536)
        assert rig.poll(1)["error"].tolist() == [-errno.ETIMEDOUT]
        (quarantine,) = rig.device.quarantines
        assert quarantine.process.pid == qsd.pid
        with pytest.raises(DeadlineError, match=f"process {qsd.pid} still runs"):
            rig.device.wait_quarantine(Deadline.after(0.05))
        rig.bytes = rig.bytes[:0]
        address = int(rig.lease.addresses[0])
        rig.lease.release()
        assert rig.arena.held_bytes == rig.arena.size_bytes
        # Continued, it may do what it was told: that is what the quarantine is for.
        os.kill(qsd.pid, signal.SIGCONT)
        for _ in range(200):
            if rig.arena.bytes()[address - rig.arena.address] == 0x33:
                break
            rig.device._pause.wait(0.01)
        qsd.kill()
        rig.device.wait_quarantine(Deadline.after(5))
        assert rig.arena.held_bytes == 0
        rig.lease = rig.arena.lease(1, rig.arena.size_bytes)


def test_store_when_its_members_are_vhost_devices_then_pages_come_back_after_a_restart(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    geometry = Geometry(
        model_id="test", revision="0", layer_first=0, layer_count=4, kv_head_first=0, kv_head_count=2,
        kv_head_total=2, head_size=64, dtype="fp16", tokens_per_page=16,
    )  # fmt: skip
    keys = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    with daemon(tmp_path, name="a") as one, daemon(tmp_path, name="b") as two:
        uri = f"vol:vhost:{one.socket},vhost:{two.socket}"
        with Session() as kv:
            members = kv.open_members(uri)
            volume = Volume.create(members, name="v", strip_size_bytes=65536, deadline=Deadline.after(30))
            volume.create_namespace("n", geometry, quota_pages=64, deadline=Deadline.after(30))
        with Session() as kv:
            store = PageStore(kv.open_kv_namespace(uri + "#n", geometry=geometry))
            with kv.make_arena(8 * MIB) as arena, arena.lease(40, geometry.page_size_bytes) as lease:
                lease.array[:] = rng.integers(0, 256, lease.array.shape, dtype=np.uint8)
                pages = lease.array.copy()
                assert (store.put(keys, lease).status == PageStatus.STORED).all()
                private = np.zeros_like(pages)
                with pytest.raises(UsageError, match=r"Arena\(is_shareable=True\)"):
                    store.get(keys, private)
                store.flush()
        for qsd in (one, two):
            qsd.kill()
        with daemon(tmp_path, name="a") as one, daemon(tmp_path, name="b") as two, Session() as kv:
            store = PageStore(kv.open_kv_namespace(uri + "#n", geometry=geometry))
            with kv.make_arena(8 * MIB) as arena, arena.lease(40, geometry.page_size_bytes) as lease:
                got = store.get(keys, lease)
                assert (got.status == PageStatus.HIT).all()
                assert (lease.array == pages).all()


def test_session_when_an_arena_is_shared_before_the_device_opens_then_it_is_known(tmp_path: Path) -> None:
    with daemon(tmp_path) as qsd, Session() as kv, Arena(2 * MIB, is_shareable=True) as arena:
        kv.share(arena)
        device = kv.open_device(f"vhost:{qsd.socket}")
        execute(device, transfer_ios(device, OPCODE_READ, 0, arena.address, MIB), Deadline.after(10))
        flush = np.zeros(1, dtype=IO_DTYPE)
        flush["opcode"] = OPCODE_FLUSH
        execute(device, flush, Deadline.after(10))
