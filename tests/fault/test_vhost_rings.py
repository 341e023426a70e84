"""Commands over the rings against a scripted back end: what they carry, and every lie it may tell."""

from __future__ import annotations

import dataclasses
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.device import execute, read_blocks, run_batch, transfer_ios, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectionLostError, UnsupportedError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.io import (
    GROUP_CRC32C,
    IO_DEALLOCATE,
    IO_DTYPE,
    IO_FUA,
    IO_GROUP_DTYPE,
    IO_MAY_COPY,
    OPCODE_COMPARE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    address_of,
)
from kvdev.staging import Arena
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.peer import MemoryScript, ScriptedPeer
from kvdev.testing.vhost_peer import FEATURES_ALL, BlkRequest, VhostPeer, VhostScript, Vring, config_of
from kvdev.testing.vhost_rig import VhostRig
from kvdev.vhost import SharedMemory, VhostDevice, VhostOptions
from kvdev.vhost.protocol import Feature

DISK_BYTES = 8 << 20


def script(**fields: Any) -> VhostScript:
    return VhostScript(bytearray(DISK_BYTES), **fields)


# ---- what goes over the rings ----


def test_commands_when_sent_then_requests_are_what_virtio_says(tmp_path: Path) -> None:
    offer = script(config=config_of(DISK_BYTES, block_size_bytes=4096))
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        offer.disk[:] = b"\x01" * DISK_BYTES
        assert rig.run(OPCODE_WRITE, slba=3, size_bytes=8192)["error"] == 0
        assert rig.run(OPCODE_READ, slba=3, size_bytes=4096, offset=4096)["error"] == 0
        assert rig.run(OPCODE_FLUSH)["error"] == 0
        assert rig.run(OPCODE_WRITE_ZEROES, slba=4, lba_count=2, flags=IO_DEALLOCATE)["error"] == 0
        assert rig.run(OPCODE_DSM, slba=8, lba_count=1)["error"] == 0
        ranges = np.frombuffer(struct.pack("<IIQIIQ", 0, 1, 16, 0, 3, 32), dtype=np.uint8)
        done = rig.run(OPCODE_DSM, lba_count=0, buf_addr=address_of(ranges), byte_count=32)
        assert done["error"] == 0
        assert (done["submit_ns"] <= done["send_ns"]) and (done["send_ns"] <= done["complete_ns"])
    assert not peer.errors
    assert [(request.kind, request.sector, request.size_bytes) for request in peer.requests] == [
        (1, 24, 8192),
        (0, 24, 4096),
        (4, 0, 0),
        (13, 0, 16),
        (11, 0, 16),
        (11, 0, 32),
    ]
    assert not any(offer.disk[4 * 4096 : 6 * 4096])
    assert not any(offer.disk[8 * 4096 : 9 * 4096]) and offer.disk[9 * 4096] == 1
    assert not any(offer.disk[16 * 4096 : 17 * 4096]) and not any(offer.disk[32 * 4096 : 35 * 4096])


def test_fua_when_the_device_has_a_cache_then_the_write_ends_after_its_flush(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script()) as peer, VhostRig(peer.path) as rig:
        assert rig.run(OPCODE_WRITE, size_bytes=4096, flags=IO_FUA)["error"] == 0
        assert [request.kind for request in peer.requests] == [1, 4]
    with VhostPeer(tmp_path / "s", script(features=FEATURES_ALL & ~Feature.FLUSH)) as peer:
        with VhostRig(peer.path) as rig:
            assert rig.run(OPCODE_WRITE, size_bytes=4096, flags=IO_FUA)["error"] == 0
        assert [request.kind for request in peer.requests] == [1]


def test_commands_when_the_back_end_lacks_them_then_invalid_opcode_or_read_only(tmp_path: Path) -> None:
    without = FEATURES_ALL & ~(Feature.DISCARD | Feature.WRITE_ZEROES)
    with VhostPeer(tmp_path / "s", script(features=without)) as peer, VhostRig(peer.path) as rig:
        for opcode in (OPCODE_WRITE_ZEROES, OPCODE_DSM):
            done = rig.run(opcode, lba_count=1)
            assert (done["error"], done["status"]) == (-errno.EIO, 0x001)
        fields = {"lba_count": 1, "byte_count": 512, "buf_addr": rig.arena.address}
        assert rig.run(OPCODE_COMPARE, **fields)["status"] == 0x001
        assert not peer.requests
        with pytest.raises(UnsupportedError, match="write zeroes"):
            rig.device.write_zeroes(0, 1, rig.deadline())
        with pytest.raises(UnsupportedError, match="deallocate"):
            rig.device.deallocate([(0, 1)], rig.deadline())
    with (
        VhostPeer(tmp_path / "s", script(features=FEATURES_ALL | Feature.RO)) as peer,
        VhostRig(peer.path) as rig,
    ):
        assert rig.device.is_read_only
        assert rig.run(OPCODE_WRITE, size_bytes=512)["status"] == 0x182
        assert rig.run(OPCODE_READ, size_bytes=512)["error"] == 0


def test_write_zeroes_and_deallocate_when_long_then_they_are_split(tmp_path: Path) -> None:
    config = dataclasses.replace(
        config_of(DISK_BYTES), max_discard_sectors=1000, max_write_zeroes_sectors=3000
    )
    offer = script(config=config)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        offer.disk[:] = b"\x01" * DISK_BYTES
        rig.device.write_zeroes(1, 8000, rig.deadline())
        rig.device.deallocate([(8100, 2500), (11000, 1)], rig.deadline())
        with pytest.raises(UsageError, match="range: expected blocks within 0 to 16383"):
            rig.device.write_zeroes(16383, 2, rig.deadline())
        for opcode, count in ((OPCODE_WRITE_ZEROES, 3001), (OPCODE_DSM, 1001)):
            with pytest.raises(UsageError, match="lba_count"):
                rig.submit(opcode, lba_count=count)
    assert [request.kind for request in peer.requests] == [13] * 3 + [11] * 4
    is_zero = np.frombuffer(offer.disk, dtype=np.uint8)[::512] == 0
    assert is_zero[1:8001].all() and not is_zero[0] and not is_zero[8001:8100].any()


def test_io_error_when_reported_then_the_status_names_its_kind_and_others_go_on(tmp_path: Path) -> None:
    offer = script(fail_sectors=frozenset({8}))
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        for opcode, status in ((OPCODE_READ, 0x281), (OPCODE_WRITE, 0x280)):
            rig.submit(opcode, slba=8, size_bytes=512, tag=1)
            rig.submit(opcode, slba=16, size_bytes=512, tag=2)
            done = {int(row["tag"]): row for row in rig.poll(2)}
            assert (done[1]["error"], done[1]["status"]) == (-errno.EIO, status)
            assert done[2]["error"] == 0
        assert rig.device.state == "ready"
        with pytest.raises(CommandError):
            execute(rig.device, rig.io(OPCODE_READ, slba=8, size_bytes=512), rig.deadline())


def test_group_when_its_last_piece_arrives_then_its_checksum_is_there(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    offer = script()
    data = rng.bytes(1 << 20)
    offer.disk[: 1 << 20] = data
    with (
        VhostPeer(tmp_path / "s", offer) as peer,
        VhostRig(peer.path, options=VhostOptions(queue_count=2)) as rig,
    ):
        group = np.zeros(1, dtype=IO_GROUP_DTYPE)
        group["remaining"], group["flags"] = 16, GROUP_CRC32C
        group["buf_addr"], group["byte_count"] = rig.arena.address, 1 << 20
        for index in range(16):
            offset = index * 65536
            rig.submit(
                OPCODE_READ, slba=offset // 512, size_bytes=65536, offset=offset, group_addr=address_of(group)
            )
        assert not rig.poll(16)["error"].any()
        assert (group["remaining"][0], group["error"][0]) == (0, 0)
        assert group["crc32c"][0] == crc32c(data)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"opcode": 0x99, "size_bytes": 512}, "opcode"),
        ({"opcode": OPCODE_READ, "size_bytes": 0}, "lba_count"),
        ({"opcode": OPCODE_READ, "size_bytes": 512, "slba": DISK_BYTES // 512}, "slba"),
        ({"opcode": OPCODE_READ, "size_bytes": 1024, "slba": DISK_BYTES // 512 - 1}, "slba"),
        ({"opcode": OPCODE_READ, "size_bytes": 512, "byte_count": 1024}, "byte_count"),
        ({"opcode": OPCODE_READ, "size_bytes": 2 << 20}, "byte_count"),
        ({"opcode": OPCODE_READ, "size_bytes": 512, "buf_addr": 0}, "buf_addr"),
        ({"opcode": OPCODE_WRITE, "size_bytes": 512, "buf_addr": 4096}, "buf_addr"),
        ({"opcode": OPCODE_WRITE, "size_bytes": 512, "buf_addr": (1 << 64) - 512}, "buf_addr"),
        ({"opcode": OPCODE_FLUSH, "byte_count": 512}, "byte_count"),
        ({"opcode": OPCODE_DSM, "byte_count": 80, "buf_addr": 1 << 20}, "byte_count"),
    ],
)
def test_submit_when_a_command_is_malformed_then_the_error_names_the_field(
    fields: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with VhostPeer(tmp_path / "s", script()) as peer, VhostRig(peer.path) as rig:
        with pytest.raises(UsageError, match=rf"ios\[0\].{field}: expected"):
            rig.submit(**fields)
        assert rig.queue.outstanding_count == 0


def test_submit_when_payload_is_at_the_edges_of_a_region_then_only_whole_ones_pass(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script()) as peer, VhostRig(peer.path) as rig:
        start, end = rig.arena.address, rig.arena.address + rig.arena.size_bytes
        for address in (start, end - 1024):
            assert rig.run(OPCODE_READ, size_bytes=1024, buf_addr=address)["error"] == 0
        for address in (start - 1, start - 512, end - 1023, end - 512, end):
            with pytest.raises(UsageError, match=f"Arena.is_shareable=True.*got 0x{address:x}"):
                rig.submit(OPCODE_READ, size_bytes=1024, buf_addr=address)


# ---- metadata in private memory ----


def test_private_memory_when_marked_as_metadata_then_it_is_copied_and_counted(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    offer = script(fail_sectors=frozenset({7000}))
    options = VhostOptions(bounce_size_bytes=1 << 20)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path, options=options) as rig:
        data = rng.bytes(3 << 20)
        write_blocks(rig.device, 0, data, rig.deadline())  # three times the bounce buffer
        assert bytes(offer.disk[: 3 << 20]) == data
        assert read_blocks(rig.device, 0, len(data) // 512, rig.deadline()).tobytes() == data
        stats = rig.device.stats
        assert (stats.bounced_commands, stats.bounced_bytes) == (6, 6 << 20)
        buffer = GuardedBuffer(4096)
        done = rig.run(
            OPCODE_READ, slba=0, size_bytes=4096, buf_addr=address_of(buffer.array), flags=IO_MAY_COPY
        )
        assert done["error"] == 0 and buffer.array.tobytes() == data[:4096]
        buffer.array[:] = 0x5A
        done = rig.run(
            OPCODE_READ, slba=7000, size_bytes=4096, buf_addr=address_of(buffer.array), flags=IO_MAY_COPY
        )
        assert done["status"] == 0x281 and set(buffer.array) == {0x5A}, (
            "a failed read leaves private memory alone"
        )
        buffer.check_guards()
        shared = rig.io(OPCODE_WRITE, size_bytes=4096, flags=IO_MAY_COPY)
        rig.queue.submit(shared)
        rig.poll(1)
        assert rig.device.stats.bounced_commands == 8, "shared payload is not copied"


def test_private_memory_when_there_is_no_bounce_buffer_then_it_is_refused(tmp_path: Path) -> None:
    options = VhostOptions(bounce_size_bytes=0)
    with (
        VhostPeer(tmp_path / "s", script()) as peer,
        VhostRig(peer.path, options=options) as rig,
        pytest.raises(UsageError, match="buf_addr: expected a payload inside memory shared"),
    ):
        read_blocks(rig.device, 0, 1, rig.deadline())


# ---- lies ----


def used_id(value: int) -> Callable[[Vring, BlkRequest, int], None]:
    def tamper(ring: Vring, request: BlkRequest, written: int) -> None:
        ring.put_used(value, written)
        ring.publish()

    return tamper


def used_len(change: int) -> Callable[[Vring, BlkRequest, int], None]:
    def tamper(ring: Vring, request: BlkRequest, written: int) -> None:
        ring.put_used(request.head, written + change)
        ring.publish()

    return tamper


def twice(ring: Vring, request: BlkRequest, written: int) -> None:
    ring.put_used(request.head, written)
    ring.put_used(request.head, written)
    ring.publish()


def idx_ahead(by: int) -> Callable[[Vring, BlkRequest, int], None]:
    def tamper(ring: Vring, request: BlkRequest, written: int) -> None:
        ring.put_used(request.head, written)
        ring.publish(ring.used_idx + by & 0xFFFF)

    return tamper


def status(value: int) -> Callable[[Vring, BlkRequest, int], None]:
    def tamper(ring: Vring, request: BlkRequest, written: int) -> None:
        request.status[0] = value
        ring.put_used(request.head, written)
        ring.publish()

    return tamper


LIES: dict[str, tuple[Callable[[Vring, BlkRequest, int], None], str]] = {
    "id_of_nothing": (used_id(77), "used.id"),
    "id_beyond_the_ring": (used_id(128), "used.id"),
    "id_huge": (used_id(0xFFFFFFFF), "used.id"),
    "len_beyond_the_buffers": (used_len(1), "used.len"),
    "len_huge": (used_len(0x7FFFFFFF), "used.len"),
    "len_short_of_a_successful_read": (used_len(-2), "used.len"),
    "answered_twice": (twice, "used.idx"),
    "idx_one_ahead": (idx_ahead(1), "used.idx"),
    "idx_a_ring_ahead": (idx_ahead(128), "used.idx"),
    "idx_half_way_round": (idx_ahead(0x7FFF), "used.idx"),
    "idx_behind": (idx_ahead(-2), "used.idx"),
    "status_unknown": (status(3), "status"),
    "status_not_written": (status(0xFF), "status"),
}


@pytest.mark.parametrize("direct", [False, True], ids=["indirect", "direct"])
@pytest.mark.parametrize("name", LIES)
def test_used_ring_when_it_lies_then_the_device_is_dead_and_says_which_field(
    name: str, direct: bool, tmp_path: Path
) -> None:
    tamper, field = LIES[name]
    offer = script(tamper=tamper)
    options = VhostOptions(has_indirect=not direct)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path, options=options) as rig:
        rig.bytes[:] = 0xEE
        done = rig.run(OPCODE_READ, size_bytes=4096, offset=8192)
        assert done["error"] == -errno.ENOTCONN
        assert rig.device.state == "dead"
        fault = rig.device.fault
        assert fault is not None and (fault.kind, fault.field, fault.queue_index) == ("ring", field, 0)
        assert f"virtqueue 0: {field}: expected " in fault.text and f"got {fault.actual}" in fault.text
        assert (rig.bytes[:8192] == 0xEE).all() and (rig.bytes[12288:] == 0xEE).all(), "outside the payload"
        with pytest.raises(ConnectionLostError):
            execute(rig.device, rig.io(OPCODE_READ, size_bytes=512), rig.deadline())
        assert [item.spans for item in rig.device.quarantines] == [((rig.arena.address + 8192, 4096),)]


def test_used_ring_when_a_direct_id_is_no_head_then_the_device_is_dead(tmp_path: Path) -> None:
    offer = script(tamper=used_id(1))
    with (
        VhostPeer(tmp_path / "s", offer) as peer,
        VhostRig(peer.path, options=VhostOptions(has_indirect=False)) as rig,
    ):
        assert rig.run(OPCODE_WRITE, size_bytes=4096)["error"] == -errno.ENOTCONN
        assert rig.device.fault is not None and rig.device.fault.field == "used.id"


def test_used_ring_when_answers_are_random_then_each_command_ends_once(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    seeds = rng.integers(0, 1 << 32, 25).tolist()
    for seed in seeds:
        noise = np.random.default_rng(seed)

        def tamper(
            ring: Vring, request: BlkRequest, written: int, noise: np.random.Generator = noise
        ) -> None:
            what = noise.integers(0, 8)
            head = int(noise.integers(0, 256)) if what == 0 else request.head
            length = int(noise.integers(0, 1 << 32)) if what == 1 else written
            if what == 2:
                request.status[0] = int(noise.integers(0, 256))
            if what == 3:
                return
            ring.put_used(head, length)
            ring.publish(int(noise.integers(0, 1 << 16)) if what == 4 and noise.integers(0, 4) == 0 else None)

        path = tmp_path / f"s{seed}"
        with (
            VhostPeer(path, script(tamper=tamper)) as peer,
            VhostRig(str(path), command_timeout_s=0.3) as rig,
        ):
            for tag in range(32):
                rig.submit(OPCODE_READ, slba=8 * tag, size_bytes=4096, offset=4096 * tag, tag=tag)
            done = rig.poll(32, timeout_s=60.0)
            assert sorted(done["tag"].tolist()) == list(range(32)), f"seed {seed}"
            assert not peer.errors, f"seed {seed}"


def test_back_end_when_it_talks_out_of_turn_then_the_device_is_dead(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script(is_silent=True)) as peer, VhostRig(peer.path) as rig:
        rig.submit(OPCODE_READ, size_bytes=512)
        rig.poll(1, timeout_s=0.05)
        peer.do(lambda connection: connection.sock.sendall(struct.pack("<IIIQ", 1, 5, 8, 0)))
        assert rig.poll(1)["error"].tolist() == [-errno.ENOTCONN]
        assert rig.device.fault is not None and rig.device.fault.kind == "message"


# ---- beside NVMe/TCP ----


def test_queue_when_it_has_tcp_and_vhost_devices_then_one_poll_drives_both(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    memory = bytearray(1 << 20)
    offer = script()
    with (
        ScriptedPeer(MemoryScript(memory)) as tcp,
        PeerHost(tcp) as host,
        VhostPeer(tmp_path / "s", offer) as peer,
        Arena(2 << 20, is_shareable=True) as arena,
        arena.lease(1, 65536) as lease,
    ):
        deadline = Deadline.after(10)
        device = VhostDevice(peer.path, host.queue, memory=[SharedMemory.of(arena)], deadline=deadline)
        lease.array[0] = rng.integers(0, 256, 65536, dtype=np.uint8)
        ios = np.zeros(2, dtype=IO_DTYPE)
        ios["opcode"], ios["buf_addr"], ios["byte_count"] = OPCODE_WRITE, lease.addresses[0], 65536
        ios["device_index"] = [host.device_index, device.device_index]
        ios["lba_count"] = [16, 128]
        assert not run_batch(host.queue, ios, deadline)["error"].any()
        assert bytes(memory[:65536]) == lease.array[0].tobytes() == bytes(offer.disk[:65536])
        peer.hang_up()
        assert sorted(run_batch(host.queue, ios, deadline)["error"].tolist()) == [-errno.ENOTCONN, 0]
        device.close()


def test_queue_when_commands_exceed_the_ring_then_priority_decides(tmp_path: Path) -> None:
    offer = script()
    options = VhostOptions(queue_size=4, has_indirect=False)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path, options=options) as rig:
        for index in range(8):
            rig.submit(OPCODE_READ, slba=index, size_bytes=512, priority=1)
        rig.submit(OPCODE_READ, slba=100, size_bytes=512, priority=0)
        assert len(rig.poll(9)) == 9
        assert peer.requests[0].sector == 100


def test_transfer_ios_when_larger_than_one_command_then_all_of_it_moves(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    offer = script()
    options = VhostOptions(max_transfer_bytes=65536, queue_count=4)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path, options=options) as rig:
        data = rig.fill(rng, DISK_BYTES)
        ios = transfer_ios(rig.device, OPCODE_WRITE, 0, rig.arena.address, DISK_BYTES)
        assert len(ios) == 128
        execute(rig.device, ios, rig.deadline())
        assert bytes(offer.disk) == data
        rig.bytes[:] = 0
        execute(
            rig.device,
            transfer_ios(rig.device, OPCODE_READ, 0, rig.arena.address, DISK_BYTES),
            rig.deadline(),
        )
        assert rig.bytes[:DISK_BYTES].tobytes() == data


# ---- time ----


def test_command_when_it_does_not_end_in_time_then_the_device_is_given_up(tmp_path: Path) -> None:
    with (
        VhostPeer(tmp_path / "s", script(is_silent=True)) as peer,
        VhostRig(peer.path, command_timeout_s=0.1) as rig,
    ):
        rig.submit(OPCODE_WRITE, size_bytes=512, tag=7)
        done = rig.poll(1)
        assert (done["tag"].tolist(), done["error"].tolist()) == ([7], [-errno.ETIMEDOUT])
        assert rig.device.fault is not None and rig.device.fault.kind == "timeout"
        assert rig.poll(1, timeout_s=0.0).size == 0


def test_poll_when_the_deadline_ends_first_then_the_command_stays(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script(is_silent=True)) as peer, VhostRig(peer.path) as rig:
        rig.submit(OPCODE_READ, size_bytes=512)
        assert len(rig.poll(1, timeout_s=0.1)) == 0
        assert rig.queue.outstanding_count == 1
        peer.do(lambda connection: connection.complete(*connection.outstanding.pop()))
        assert rig.poll(1)["error"].tolist() == [0]
        assert rig.device.stats.wakes >= 1, "it slept"


def test_wait_when_notifications_are_bare_then_sleeping_still_ends(tmp_path: Path) -> None:
    offer = script(is_silent=True, features=FEATURES_ALL & ~Feature.EVENT_IDX)
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        for _ in range(3):
            rig.submit(OPCODE_READ, size_bytes=512)
            rig.poll(1, timeout_s=0.05)
            peer.do(lambda connection: connection.complete(*connection.outstanding.pop()))
            assert rig.poll(1)["error"].tolist() == [0]


def test_run_batch_when_its_deadline_ends_then_the_device_is_dead_and_payload_in_quarantine(
    tmp_path: Path,
) -> None:
    with VhostPeer(tmp_path / "s", script(is_silent=True)) as peer, VhostRig(peer.path) as rig:
        ios = np.repeat(rig.io(OPCODE_WRITE, size_bytes=4096), 3)
        ios["buf_addr"] += np.arange(3, dtype=np.uint64) * np.uint64(4096)
        done = run_batch(rig.queue, ios, Deadline.after(0.05))
        assert done["error"].tolist() == [-errno.ETIMEDOUT] * 3
        (quarantine,) = rig.device.quarantines
        assert quarantine.process.pid == os.getpid() and not quarantine.is_over
        assert sorted(quarantine.spans) == [(rig.arena.address + 4096 * i, 4096) for i in range(3)]
