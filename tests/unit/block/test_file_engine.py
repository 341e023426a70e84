"""The engines of file devices: the same bytes by either, memory registered or not, and a fallback that says why."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import (
    aligned_buffer,
    execute,
    flush,
    read_blocks,
    run_batch,
    transfer_ios,
    write_blocks,
)
from kvdev.block.file import FileDevice, FileOptions, choose_engine
from kvdev.block.kernel_device import queue_facts
from kvdev.clock import Deadline
from kvdev.errors import CommandError, UsageError
from kvdev.native.crc import crc32c
from kvdev.native.file import IO_URING, THREADS, FileEngine, FileHandle, unavailable_reason
from kvdev.native.io import (
    GROUP_CRC32C,
    IO_DEALLOCATE,
    IO_DTYPE,
    IO_FUA,
    IO_GROUP_DTYPE,
    OPCODE_COMPARE,
    OPCODE_DSM,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    IoArray,
    IoGroupArray,
    address_of,
)
from kvdev.native.queue import HostQueue
from kvdev.session import Session
from kvdev.staging import Arena

BLOCK = 4096
BLOCK_COUNT = 64


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(params=[IO_URING, THREADS])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == IO_URING and choose_engine().note:
        pytest.skip(choose_engine().note)
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(BLOCK * BLOCK_COUNT))
    return path


def random_batch(
    rng: np.random.Generator, device: FileDevice, memory: np.ndarray, model: bytearray
) -> IoArray:
    """Commands on places of their own, applied to the model as well; payload in ``memory``, at odd addresses too."""
    places = rng.permutation(BLOCK_COUNT // 4) * 4
    ios = np.zeros(len(places), dtype=IO_DTYPE)
    ios["device_index"] = device.device_index
    for index, place in enumerate(places):
        count = int(rng.integers(1, 5))
        start, size = int(place) * BLOCK, count * BLOCK
        offset = index * 5 * BLOCK + int(rng.choice([0, 512, 7]))
        payload = memory[offset : offset + size]
        opcode = int(
            rng.choice([OPCODE_READ, OPCODE_WRITE, OPCODE_WRITE, OPCODE_WRITE_ZEROES, OPCODE_COMPARE])
        )
        ios[index]["opcode"], ios[index]["slba"], ios[index]["lba_count"] = opcode, place, count
        if opcode == OPCODE_WRITE_ZEROES:
            ios[index]["flags"] = int(rng.choice([0, IO_FUA, IO_DEALLOCATE]))
            model[start : start + size] = bytes(size)
            continue
        ios[index]["buf_addr"], ios[index]["byte_count"] = address_of(payload), size
        if opcode == OPCODE_WRITE:
            payload[:] = rng.integers(0, 256, size, dtype=np.uint8)
            ios[index]["flags"] = int(rng.choice([0, IO_FUA]))
            model[start : start + size] = payload.tobytes()
        elif opcode == OPCODE_COMPARE:
            payload[:] = np.frombuffer(model[start : start + size], dtype=np.uint8)
        else:
            payload[:] = 0xEE
    return ios


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_random_batches_when_run_equal_the_model(
    path: Path, engine: str, direct: str, rng: np.random.Generator
) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine, direct=direct, depth=5))
    memory = np.zeros(BLOCK_COUNT * 2 * BLOCK, dtype=np.uint8)
    model = bytearray(BLOCK * BLOCK_COUNT)
    for _ in range(30):
        ios = random_batch(rng, device, memory, model)
        done = run_batch(device.queue, ios, soon())
        assert not done["error"].any()
        assert (done["submit_ns"] <= done["send_ns"]).all() and (done["send_ns"] <= done["complete_ns"]).all()
        for io in ios[ios["opcode"] == OPCODE_READ]:
            at, start = int(io["buf_addr"]) - address_of(memory), int(io["slba"]) * BLOCK
            assert (
                memory[at : at + int(io["byte_count"])].tobytes()
                == model[start : start + int(io["byte_count"])]
            )
    flush(device, soon())
    assert path.read_bytes() == model
    assert device.stats.in_flight_count == 0 and device.engine.info.in_flight_count == 0
    assert device.stats.bounced_commands > 0
    device.close()


def test_compare_when_one_byte_differs_fails(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    other = np.zeros(BLOCK, dtype=np.uint8)
    other[4095] = 1
    with pytest.raises(CommandError) as failure:
        execute(device, transfer_ios(device, OPCODE_COMPARE, 0, address_of(other), BLOCK), soon())
    assert (failure.value.sct, failure.value.sc) == (2, 0x85)
    device.close()


def grouped_batch(
    device: FileDevice, opcode: int, memory: np.ndarray, group_bytes: int, piece_bytes: int
) -> tuple[IoArray, IoGroupArray]:
    """All of ``memory`` to or from the device's start, in groups of pieces whose checksums the core computes."""
    groups = np.zeros(memory.nbytes // group_bytes, dtype=IO_GROUP_DTYPE)
    groups["buf_addr"] = address_of(memory) + np.arange(len(groups), dtype=np.uint64) * np.uint64(group_bytes)
    groups["byte_count"], groups["remaining"] = group_bytes, group_bytes // piece_bytes
    groups["flags"] = GROUP_CRC32C
    numbers = np.arange(memory.nbytes // piece_bytes, dtype=np.uint64)
    ios = np.zeros(len(numbers), dtype=IO_DTYPE)
    ios["tag"], ios["opcode"], ios["device_index"] = numbers, opcode, device.device_index
    ios["slba"] = numbers * np.uint64(piece_bytes // BLOCK)
    ios["lba_count"], ios["byte_count"] = piece_bytes // BLOCK, piece_bytes
    ios["buf_addr"] = address_of(memory) + numbers * np.uint64(piece_bytes)
    of_group = numbers // np.uint64(group_bytes // piece_bytes)
    ios["group_addr"] = address_of(groups) + of_group * np.uint64(IO_GROUP_DTYPE.itemsize)
    return ios, groups


@pytest.mark.parametrize(("group_bytes", "piece_bytes"), [(64 << 10, 16 << 10), (512 << 10, 64 << 10)])
def test_groups_when_checked_between_refills_have_the_checksums_of_their_bytes(
    path: Path, engine: str, group_bytes: int, piece_bytes: int, rng: np.random.Generator
) -> None:
    path.write_bytes(bytes(4 << 20))
    device = FileDevice(path, options=FileOptions(engine=engine, depth=3))
    memory = aligned_buffer(4 << 20)
    memory[:] = np.frombuffer(rng.bytes(memory.nbytes), dtype=np.uint8)
    wanted = [crc32c(part) for part in memory.reshape(-1, group_bytes)]
    for opcode in (OPCODE_WRITE, OPCODE_READ):
        ios, groups = grouped_batch(device, opcode, memory, group_bytes, piece_bytes)
        done = run_batch(device.queue, ios, soon())
        assert not done["error"].any() and not groups["error"].any()
        assert not groups["remaining"].any()
        assert groups["crc32c"].tolist() == wanted
        memory[:] = 0
    assert device.queue.outstanding_count == 0
    device.close()


def test_commands_when_one_place_is_free_start_before_the_one_that_left_it_is_reported(
    path: Path, engine: str
) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine, depth=1))
    memory = aligned_buffer(BLOCK * BLOCK_COUNT)
    ios, groups = grouped_batch(device, OPCODE_READ, memory, 16 * BLOCK, BLOCK)
    device.queue.submit(ios)
    for reported in range(1, len(ios) + 1):
        assert len(device.queue.poll(min_count=1, max_count=1, deadline=soon())) == 1
        assert device.stats.commands >= min(reported + 1, len(ios))
        assert device.queue.outstanding_count == len(ios) - reported
    assert groups["crc32c"].tolist() == [crc32c(bytes(16 * BLOCK))] * len(groups)
    device.close()


def test_checksums_when_their_commands_are_given_up_are_over(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine, depth=8))
    memory = aligned_buffer(BLOCK * BLOCK_COUNT)
    ios, groups = grouped_batch(device, OPCODE_READ, memory, 16 * BLOCK, BLOCK)
    device.queue.submit(ios)
    assert len(device.queue.poll(min_count=1, max_count=1, deadline=soon())) == 1
    device.queue.abandon()
    done = device.queue.poll(min_count=len(ios) - 1, deadline=soon())
    assert len(done) == len(ios) - 1 and device.queue.outstanding_count == 0
    assert not groups["remaining"].any()
    whole = groups["error"] == 0
    assert (groups["crc32c"] == np.where(whole, np.uint32(crc32c(bytes(16 * BLOCK))), np.uint32(0))).all()
    device.close()


def test_deallocate_when_given_ranges_frees_them(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    write_blocks(device, 0, b"\1" * BLOCK * BLOCK_COUNT, soon())
    flush(device, soon())
    before = path.stat().st_blocks
    device.deallocate([(0, 8), (16, 16), (40, 1)], soon())
    assert device.stats.ignored_deallocations or path.stat().st_blocks < before
    stored = read_blocks(device, 0, BLOCK_COUNT, soon()).reshape(BLOCK_COUNT, BLOCK)
    kept = [index for index in range(BLOCK_COUNT) if not (index < 8 or 16 <= index < 32 or index == 40)]
    assert (stored[kept] == 1).all()
    ios = np.zeros(1, dtype=IO_DTYPE)  # the plain form: one range in the command itself
    ios["opcode"], ios["slba"], ios["lba_count"] = OPCODE_DSM, 48, 8
    execute(device, ios, soon())
    device.write_zeroes(62, 2, soon(), may_deallocate=True)
    assert not read_blocks(device, 62, 2, soon()).any()
    with pytest.raises(UsageError, match="range: expected blocks within 0 to 63, got 2 from 63"):
        device.deallocate([(63, 2)], soon())
    device.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("slba", 64), ("lba_count", 0), ("byte_count", 512), ("buf_addr", 0), ("opcode", 0x7F)],
)
def test_malformed_command_when_submitted_is_refused_by_field(
    path: Path, engine: str, field: str, value: int
) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    buffer = np.zeros(BLOCK, dtype=np.uint8)
    ios = transfer_ios(device, OPCODE_READ, 0, address_of(buffer), BLOCK)
    ios[field] = value
    with pytest.raises(UsageError, match=rf"ios\[0\]\.{field}"):
        device.queue.submit(ios)
    assert device.queue.outstanding_count == 0
    device.close()


def test_two_devices_when_on_one_queue_share_the_calls(path: Path, tmp_path: Path, engine: str) -> None:
    other_path = tmp_path / "other"
    other_path.write_bytes(b"\2" * BLOCK * BLOCK_COUNT)
    queue, choice = HostQueue(), choose_engine(engine)
    devices = [FileDevice(each, queue=queue, choice=choice) for each in (path, other_path)]
    memory = np.zeros((2, 16 * BLOCK), dtype=np.uint8)
    ios = np.zeros(16, dtype=IO_DTYPE)
    for index, device in enumerate(devices * 8):
        ios[index] = transfer_ios(device, OPCODE_READ, 0, address_of(memory[index % 2]), 16 * BLOCK)[0]
    done = run_batch(queue, ios, soon())
    assert not done["error"].any() and len(done) == 16
    assert (memory[0] == 0).all() and (memory[1] == 2).all()
    info = choice.engine.info
    assert info.operations == 16 and info.calls < 16
    devices[0].close()
    assert (read_blocks(devices[1], 0, 1, soon()) == 2).all()
    devices[1].close()
    queue.close()
    choice.engine.close()


def test_arena_when_registered_is_used_without_pinning(path: Path) -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)
    with Session() as kv:
        early = kv.make_arena(1 << 20)  # before there is an engine
        device = kv.open_device(f"file:{path}")
        assert isinstance(device, FileDevice)
        if not device.engine.info.has_fixed_buffers:
            pytest.skip("this kernel has no table for registered memory")
        late = kv.make_arena(1 << 20)
        for index, arena in enumerate((early, late)):
            with arena.lease(1, 4 * BLOCK) as lease:
                lease.array[:] = index + 1
                address = int(lease.addresses[0])
                execute(device, transfer_ios(device, OPCODE_WRITE, 8 * index, address, 4 * BLOCK), soon())
                lease.array[:] = 0
                execute(device, transfer_ios(device, OPCODE_READ, 8 * index, address, 4 * BLOCK), soon())
                assert (lease.array == index + 1).all()
        assert device.engine.info.fixed_operations == 4
        assert "2 of 2 memory regions registered" in device.description
        assert (read_blocks(device, 8, 4, soon()) == 2).all()  # outside every region
        assert device.engine.info.fixed_operations == 4
        early.close()
        kv.make_arena(1 << 20)  # takes the closed one's place
        assert device.engine.info.region_count == 2
        late.close()


MEMLOCK_PROGRAM = """
import os, resource, sys
from kvdev.native.crc import crc32c
from kvdev.native.file import FileEngine
from kvdev.staging import Arena
arena = Arena(4 << 20)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
region = FileEngine("io_uring").add_region(arena.address, arena.size_bytes)
print(region.refusal)
"""


def test_memory_when_memlock_forbids_it_is_used_unregistered_with_the_reason() -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)
    done = subprocess.run(
        [sys.executable, "-c", MEMLOCK_PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "memlock" in done.stdout or "no table" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != 65536  # it was the child's limit alone


SECCOMP_PROGRAM = """
import ctypes, os, struct, sys
IO_URING_SETUP, ALLOW, ERRNO = 425, 0x7FFF0000, 0x00050000
code = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0),                      # load the number of the call
    (0x15, 0, 1, IO_URING_SETUP),         # the next one for io_uring_setup, else skip it
    (0x06, 0, 0, ERRNO | int(sys.argv[2])),
    (0x06, 0, 0, ALLOW),
))
buffer = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0, ctypes.get_errno()
from kvdev.block.device import read_blocks, write_blocks
from kvdev.block.file import FileDevice, FileOptions
from kvdev.clock import Deadline
from kvdev.errors import UnsupportedError
device = FileDevice(sys.argv[1])
write_blocks(device, 1, b"x" * 4096, Deadline.after(30))
assert bytes(read_blocks(device, 1, 1, Deadline.after(30))) == b"x" * 4096
print(device.description)
try:
    FileDevice(sys.argv[1], options=FileOptions(engine="io_uring"))
except UnsupportedError as refusal:
    print(refusal)
"""


@pytest.mark.parametrize(("code", "why"), [(1, "EPERM"), (38, "ENOSYS")])
def test_engine_when_io_uring_is_not_there_falls_back_and_says_why(path: Path, code: int, why: str) -> None:
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("the call's number is not known here")
    done = subprocess.run(
        [sys.executable, "-c", SECCOMP_PROGRAM, str(path), str(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    description, refusal = done.stdout.splitlines()
    assert description.startswith("threads") and why in description
    assert refusal.startswith("io_uring: ") and why in refusal


def test_reasons_name_the_remedy() -> None:
    assert "5.10" in unavailable_reason(38)
    assert "seccomp" in unavailable_reason(1) or "sysctl" in unavailable_reason(1)
    assert "memlock" in unavailable_reason(12)


def test_size_when_changed_is_seen_by_refresh(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    os.truncate(path, 2 * BLOCK * BLOCK_COUNT)
    with pytest.raises(UsageError, match="slba"):
        read_blocks(device, BLOCK_COUNT, 1, soon())
    device.refresh()
    assert device.block_count == 2 * BLOCK_COUNT
    write_blocks(device, 2 * BLOCK_COUNT - 1, b"z" * BLOCK, soon())
    os.truncate(path, BLOCK)
    device.refresh()
    assert device.block_count == 1
    os.truncate(path, 0)
    with pytest.raises(UsageError, match="size: expected at least one block, got 0 bytes"):
        device.refresh()
    device.close()


def test_options_when_wrong_name_the_field(path: Path) -> None:
    with pytest.raises(UsageError, match="file options: engine: expected auto, io_uring, threads, got 'aio'"):
        FileOptions(engine="aio")
    with pytest.raises(UsageError, match="file options: depth: expected 1 to 4096, got 0"):
        FileOptions(depth=0)
    with pytest.raises(UsageError, match="max_transfer_bytes: expected 512 to 1048576, got 2097152"):
        FileDevice(path, max_transfer_bytes=2 << 20)
    with pytest.raises(UsageError, match="kind: expected io_uring or threads"):
        FileEngine("aio")
    with pytest.raises(UsageError, match="thread_count: expected 1 to 64, got 65"):
        FileEngine(THREADS, thread_count=65)
    device = FileDevice(path, options=FileOptions(is_polled=True))
    assert not device.is_polled and "queue/io_poll" in device.description
    device.close()


def test_direct_when_blocks_are_smaller_than_its_unit_is_refused(path: Path) -> None:
    device = FileDevice(path, options=FileOptions(direct="off"))
    assert not device.is_direct and device.has_volatile_cache and "page cache" in device.description
    device.close()


def test_queue_facts_when_read_from_sysfs(tmp_path: Path) -> None:
    disk = tmp_path / "nvme1n1"
    (disk / "queue").mkdir(parents=True)
    (disk / "nvme1n1p1").mkdir()
    facts = queue_facts(disk)
    assert facts.has_volatile_cache and not facts.can_poll and facts.optimal_io_bytes == 0
    for name, text in (
        ("write_cache", "write through"),
        ("io_poll", "1"),
        ("optimal_io_size", "131072"),
        ("physical_block_size", "4096"),
    ):
        (disk / "queue" / name).write_text(text + "\n")
    for folder in (disk, disk / "nvme1n1p1"):  # a partition's queue is its disk's
        facts = queue_facts(folder)
        assert not facts.has_volatile_cache and facts.can_poll
        assert (facts.optimal_io_bytes, facts.physical_block_bytes) == (131072, 4096)
    (disk / "queue" / "write_cache").write_text("unheard of\n")
    assert queue_facts(disk).has_volatile_cache


def test_regions_when_too_many_are_refused_and_removed_ones_make_room() -> None:
    engine = FileEngine(THREADS)
    with Arena(1 << 20) as arena:
        regions = [engine.add_region(arena.address + BLOCK * index, BLOCK) for index in range(64)]
        with pytest.raises(UsageError, match="one of at most 64 regions"):
            engine.add_region(arena.address + BLOCK * 64, BLOCK)
        engine.remove_region(regions[3])
        engine.add_region(arena.address + BLOCK * 64, BLOCK)
        assert engine.info.region_count == 64
    engine.close()


def test_polled_device_when_its_queue_cannot_be_polled_goes_on_with_interrupts(path: Path) -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)
    engine = FileEngine(IO_URING, wants_iopoll=True)
    assert engine.info.has_iopoll
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    handle = FileHandle(
        engine,
        fd=fd,
        block_size_bytes=BLOCK,
        block_count=BLOCK_COUNT,
        max_transfer_bytes=1 << 20,
        depth=4,
        memory_alignment=BLOCK,
        has_volatile_cache=True,
        is_block_device=False,
        is_polled=True,
    )
    queue = HostQueue()
    index = handle.attach(queue)
    with Arena(1 << 20) as arena:
        engine.add_region(arena.address, arena.size_bytes, keep=arena.bytes())
        memory = arena.bytes()
        memory[: 8 * BLOCK] = 5
        ios = np.zeros(24, dtype=IO_DTYPE)
        ios["device_index"], ios["byte_count"], ios["lba_count"] = index, BLOCK, 1
        ios["opcode"][:8], ios["opcode"][8:16], ios["opcode"][16:] = OPCODE_WRITE, OPCODE_FLUSH, OPCODE_READ
        ios["byte_count"][8:16] = ios["lba_count"][8:16] = 0
        ios["slba"] = np.arange(24) % 8
        ios["buf_addr"] = arena.address + np.arange(24, dtype=np.uint64) * np.uint64(BLOCK)
        for part in (ios[:8], ios[8:16], ios[16:]):
            assert not run_batch(queue, part.copy(), soon())["error"].any()
        assert (memory[16 * BLOCK : 24 * BLOCK] == 5).all()
    assert handle.info.commands == 24
    queue.remove_device(index)
    queue.close()
    handle.close()
    engine.close()
    os.close(fd)
