"""File devices when the kernel does not do what was asked: full, short, closed, forked, killed, stuck.

What needs a mount or a loop device needs root. A frozen file system is a device that does not answer: writes to it
stay with the kernel until it is thawed, whoever has given them up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import flush, read_blocks, run_batch, transfer_ios, write_blocks
from kvdev.block.file import EngineChoice, FileDevice, FileOptions, choose_engine
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, ConnectionLostError, TransportError, UsageError
from kvdev.native.file import IO_URING, THREADS, FileEngine
from kvdev.native.io import OPCODE_WRITE
from kvdev.staging import Arena
from kvdev.store.lock import LockHeldError, OwnerLock

BLOCK = 4096
MIB = 1 << 20
FIFREEZE = 0xC0045877
FITHAW = 0xC0045878
BLKROSET = 0x125D
PATIENCE_S = 60.0


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


def until(is_so: object, what: str) -> None:
    """Wait for a condition that is bound to come."""
    assert callable(is_so)
    limit = Deadline.after(PATIENCE_S)
    pause = threading.Event()
    while not is_so():
        assert not limit.is_expired, what
        pause.wait(0.01)


@pytest.fixture(params=[IO_URING, THREADS])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == IO_URING and choose_engine().note:
        pytest.skip(choose_engine().note)
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(MIB))
    return path


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder.mkdir()
    made = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no such mount here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        run("umount", str(folder))


@contextlib.contextmanager
def loop_device(image: Path, *options: str) -> Iterator[str]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("a loop device needs root and losetup")
    made = subprocess.run(
        ["losetup", "--find", "--show", *options, str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    try:
        yield made.stdout.strip()
    finally:
        run("losetup", "--detach", made.stdout.strip())


# ---- full and short ----


def test_full_file_system_when_written_fails_by_lba_after_what_fitted(tmp_path: Path, engine: str) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m,huge=never", "none") as folder:
        (folder / "disk").touch()
        os.truncate(folder / "disk", 8 * MIB)
        device = FileDevice(folder / "disk", options=FileOptions(engine=engine, depth=1))
        data = np.arange(MIB // 8, dtype=np.uint64).view(np.uint8)
        write_blocks(device, 0, data, soon())
        (folder / "other").write_bytes(bytes(MIB // 2))
        with pytest.raises(CapacityError, match=r"file:.*/disk: write at LBA 512: No space left"):
            write_blocks(device, 512, data, soon())
        assert device.stats.resumed >= 1  # it went on after the part that fitted, to learn why
        stored = read_blocks(device, 0, 2 * MIB // BLOCK, soon())
        assert np.array_equal(stored[:MIB], data)
        (folder / "other").unlink()
        write_blocks(device, 512, data, soon())
        assert np.array_equal(read_blocks(device, 512, MIB // BLOCK, soon()), data)
        device.close()


def test_zeroes_when_the_file_system_has_no_such_call_are_written(tmp_path: Path, engine: str) -> None:
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=16m", "none") as folder:
        (folder / "disk").write_bytes(b"\1" * 6 * MIB)
        device = FileDevice(folder / "disk", options=FileOptions(engine=engine))
        device.write_zeroes(1, 3 * MIB // BLOCK, soon())
        device.write_zeroes(3 * MIB // BLOCK + 10, 5, soon(), may_deallocate=True)
        flush(device, soon())
        expected = np.ones(6 * MIB, dtype=np.uint8)
        expected[BLOCK : BLOCK + 3 * MIB] = 0
        expected[3 * MIB + 10 * BLOCK : 3 * MIB + 15 * BLOCK] = 0
        assert (folder / "disk").read_bytes() == expected.tobytes()
        assert device.stats.zeroed_by_writing >= 1
        device.close()


LIMIT_PROGRAM = """
import resource, signal, sys
from kvdev.block.device import write_blocks
from kvdev.block.file import FileDevice, FileOptions
from kvdev.clock import Deadline
from kvdev.errors import TransportError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, 3 * 4096))
device = FileDevice(sys.argv[1], options=FileOptions(engine=sys.argv[2], direct="off"))
try:
    write_blocks(device, 0, b"y" * 8 * 4096, Deadline.after(60))
except TransportError as failure:
    print(failure.errno, failure)
print(device.stats.resumed)
"""


def test_short_write_when_resumed_meets_its_reason(path: Path, engine: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMIT_PROGRAM, str(path), engine],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failure, resumed = done.stdout.splitlines()
    assert failure == f"27 file:{path}: write at LBA 0: File too large"
    assert resumed == "1"
    assert path.read_bytes()[: 4 * BLOCK] == b"y" * 3 * BLOCK + bytes(BLOCK)


def test_file_when_cut_fails_by_lba_instead_of_giving_zeroes(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    os.truncate(path, 10 * BLOCK)
    with pytest.raises(TransportError, match=rf"file:{path}: read at LBA 8: Input/output error") as failure:
        read_blocks(device, 8, 4, soon())  # the first two blocks are there
    assert failure.value.errno == 5
    assert device.stats.resumed == 1
    device.close()


# ---- closed, forked, killed ----


def test_descriptor_when_closed_by_somebody_does_not_reach_another_file(
    path: Path, tmp_path: Path, engine: str
) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    os.close(device.fd)
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    assert victim == device.fd  # the number is taken at once
    write_blocks(device, 0, b"a" * BLOCK, soon())
    assert os.fstat(victim).st_size == 0 and path.read_bytes()[:BLOCK] == b"a" * BLOCK
    device.close()  # takes the victim's number with it, as any second close does


def test_device_when_closed_takes_no_command(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    device.close()
    with pytest.raises(UsageError, match="closed"):
        write_blocks(device, 0, bytes(BLOCK), soon())
    with pytest.raises(UsageError, match="closed"):
        device.refresh()


def test_ring_when_closed_by_somebody_fails_commands_instead_of_hanging(path: Path) -> None:
    if choose_engine().note:
        pytest.skip(choose_engine().note)

    def rings() -> set[int]:
        found = set()
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the folder's own descriptor is among them
                if "io_uring" in str(each.readlink()):
                    found.add(int(each.name))
        return found

    before = rings()
    device = FileDevice(path)
    (ring,) = rings() - before
    os.close(ring)
    with pytest.raises(TransportError) as failure:
        write_blocks(device, 0, bytes(BLOCK), soon())
    assert failure.value.errno == 9
    os.open("/dev/null", os.O_RDONLY)  # keeps the number from being anybody else's when the engine closes it
    device.close()


def test_fork_when_it_uses_or_closes_the_device_leaves_the_parent_alone(path: Path, engine: str) -> None:
    device = FileDevice(path, options=FileOptions(engine=engine))
    write_blocks(device, 0, b"p" * BLOCK, soon())
    lock = OwnerLock("thing", f"fork-{engine}-{os.getpid()}", members=[device])
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                read_blocks(device, 0, 1, soon())
            except UsageError as refusal:
                device.close()
                device.queue.close()
                del device
                code = 0 if "fork" in str(refusal) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (read_blocks(device, 0, 1, soon()) == ord("p")).all()
    write_blocks(device, 1, b"q" * BLOCK, soon())
    other = FileDevice(path)
    with pytest.raises(LockHeldError):  # the child's end did not give our lock back
        OwnerLock("thing", f"other-{engine}-{os.getpid()}", members=[other])
    other.close()
    lock.release()
    device.close()


KILL_PROGRAM = """
import sys
from kvdev.block.device import transfer_ios
from kvdev.block.file import FileDevice, FileOptions
from kvdev.clock import Deadline
from kvdev.native.io import IO_DTYPE, OPCODE_WRITE, address_of
from kvdev.store.lock import OwnerLock
import numpy as np
device = FileDevice(sys.argv[1], options=FileOptions(engine=sys.argv[2]))
lock = OwnerLock("thing", sys.argv[3], members=[device])
data = np.zeros(1 << 20, dtype=np.uint8)
ios = np.zeros(32, dtype=IO_DTYPE)
ios[:] = transfer_ios(device, OPCODE_WRITE, 0, address_of(data), data.nbytes)
print("writing", flush=True)
while True:
    device.queue.submit(ios)
    while device.queue.outstanding_count > 32:
        device.queue.poll(min_count=1, deadline=Deadline.after(60))
"""


def test_locks_of_a_killed_process_are_free_once_its_writes_have_ended(path: Path, engine: str) -> None:
    key = f"kill-{engine}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", KILL_PROGRAM, str(path), engine, key],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        device = FileDevice(path)
        with pytest.raises(LockHeldError):
            OwnerLock("thing", f"{key}-other", members=[device])
        child.kill()
    OwnerLock("thing", key, members=[device]).release()
    device.close()


# ---- a kernel that keeps what it was given ----


@contextlib.contextmanager
def freezable(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file on a file system of its own, and that file system's folder to freeze and thaw it by."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 32 * MIB)
    run("mkfs.ext4", "-q", "-F", str(image))
    with loop_device(image) as loop, mounted(tmp_path / "ext4", loop) as folder:
        (folder / "disk").write_bytes(bytes(MIB))
        os.sync()
        fd = os.open(folder, os.O_RDONLY)
        try:
            yield folder / "disk", fd
        finally:
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, FITHAW, 0)
            os.close(fd)


def stuck_write(device: FileDevice, address: int, wait_s: float) -> int:
    """One write that cannot end before its deadline; the error it completes with."""
    ios = transfer_ios(device, OPCODE_WRITE, 4, address, 4 * BLOCK)
    return int(run_batch(device.queue, ios, Deadline.after(wait_s))["error"][0])


def test_memory_of_an_arena_is_withheld_until_the_kernel_is_done(tmp_path: Path, engine: str) -> None:
    with freezable(tmp_path) as (path, folder_fd):
        choice = EngineChoice(FileEngine(engine, give_up_wait_s=0.1))
        arena = Arena(MIB)
        choice.engine.add_region(arena.address, arena.size_bytes, keep=arena.bytes(), hold=arena.hold)
        device = FileDevice(path, options=FileOptions(engine=engine), choice=choice)
        lease = arena.lease(1, 4 * BLOCK)
        lease.array[:] = 7
        fcntl.ioctl(folder_fd, FIFREEZE, 0)
        assert stuck_write(device, int(lease.addresses[0]), 0.1) in (-110, -125)
        assert device.is_stuck and device.queue.outstanding_count == 0
        free = arena.free_bytes
        lease.release()
        assert arena.held_bytes == 4 * BLOCK and arena.free_bytes == free
        with pytest.raises(ConnectionLostError):  # nothing is written beside what may still land
            write_blocks(device, 0, bytes(BLOCK), soon())
        fcntl.ioctl(folder_fd, FITHAW, 0)
        until(lambda: not device.is_stuck, "the kernel gives the write back once it can")
        assert arena.held_bytes == 0 and arena.free_bytes == arena.size_bytes
        write_blocks(device, 0, b"n" * BLOCK, soon())
        assert (read_blocks(device, 0, 1, soon()) == ord("n")).all()
        device.close()
        choice.engine.close()
        arena.close()


def test_device_when_closed_with_memory_withheld_gives_it_back_later(tmp_path: Path, engine: str) -> None:
    with freezable(tmp_path) as (path, folder_fd):
        choice = EngineChoice(FileEngine(engine, give_up_wait_s=0.1))
        arena = Arena(MIB)
        choice.engine.add_region(arena.address, arena.size_bytes, keep=arena.bytes(), hold=arena.hold)
        device = FileDevice(path, options=FileOptions(engine=engine), choice=choice)
        lease = arena.lease(1, 4 * BLOCK)
        fcntl.ioctl(folder_fd, FIFREEZE, 0)
        assert stuck_write(device, int(lease.addresses[0]), 0.1) in (-110, -125)
        lease.release()
        device.close()
        assert arena.held_bytes == 4 * BLOCK
        fcntl.ioctl(folder_fd, FITHAW, 0)
        until(lambda: arena.held_bytes == 0, "the kernel gives the memory back once it can")
        arena.close()


def test_memory_that_nobody_can_withhold_is_waited_for(tmp_path: Path, engine: str) -> None:
    with freezable(tmp_path) as (path, folder_fd):
        choice = EngineChoice(FileEngine(engine, give_up_wait_s=0.1))
        device = FileDevice(path, options=FileOptions(engine=engine), choice=choice)
        memory = np.zeros(5 * BLOCK, dtype=np.uint8)
        start = -memory.ctypes.data % BLOCK
        errors: list[int] = []
        fcntl.ioctl(folder_fd, FIFREEZE, 0)
        writer = threading.Thread(
            target=lambda: errors.append(stuck_write(device, memory.ctypes.data + start, 0.1))
        )
        writer.start()
        writer.join(1.0)  # ten times as long as an arena's memory would be waited for
        assert writer.is_alive() and not errors
        fcntl.ioctl(folder_fd, FITHAW, 0)
        writer.join(PATIENCE_S)
        assert errors and errors[0] in (-110, -125)
        assert not device.is_stuck
        write_blocks(device, 0, b"n" * BLOCK, soon())
        device.close()
        choice.engine.close()


INTERRUPT_PROGRAM = """
import sys
from kvdev.block.device import write_blocks
from kvdev.block.file import FileDevice, FileOptions
from kvdev.clock import Deadline
device = FileDevice(sys.argv[1], options=FileOptions(engine=sys.argv[2]))
print("writing", flush=True)
try:
    write_blocks(device, 0, b"i" * 4096 * 8, Deadline.after(60))
except KeyboardInterrupt:
    print("interrupted", device.stats.in_flight_count, device.queue.outstanding_count, flush=True)
"""


def test_ctrl_c_with_a_write_in_flight_returns_once_the_kernel_is_done(tmp_path: Path, engine: str) -> None:
    with freezable(tmp_path) as (path, folder_fd):
        fcntl.ioctl(folder_fd, FIFREEZE, 0)
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPT_PROGRAM, str(path), engine], stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None and child.stdout.readline() == "writing\n"
                until(lambda: is_writing(child.pid), "the child gives its write to the kernel")
                child.send_signal(signal.SIGINT)
                assert select.select([child.stdout], [], [], 0.5)[0] == []  # the memory is not free yet
                fcntl.ioctl(folder_fd, FITHAW, 0)
                assert child.stdout.readline() == "interrupted 0 0\n"
                assert child.wait(PATIENCE_S) == 0
            finally:
                fcntl.ioctl(folder_fd, FITHAW, 0) if child.poll() is None else None
                child.kill()


def is_writing(pid: int) -> bool:
    """Whether a thread of the process sleeps uninterruptibly: in the write to the frozen file system."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


# ---- block devices ----


def test_block_device_when_used_has_its_shape_and_bytes(tmp_path: Path, engine: str) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"\1" * 8 * MIB)
    with loop_device(image) as loop:
        device = FileDevice(loop, options=FileOptions(engine=engine))
        assert device.is_block_device and (device.block_size_bytes, device.block_count) == (512, 16384)
        data = np.arange(MIB // 8, dtype=np.uint64).view(np.uint8)
        write_blocks(device, 1, data, soon())
        device.write_zeroes(4096, 100, soon())
        device.deallocate([(8192, 2048)], soon())
        flush(device, soon())
        assert np.array_equal(read_blocks(device, 1, MIB // 512, soon()), data)
        assert not read_blocks(device, 4096, 100, soon()).any()
        assert (read_blocks(device, 4196, 1, soon()) == 1).all()
        os.truncate(image, 16 * MIB)
        run("losetup", "--set-capacity", loop)
        device.refresh()
        assert device.block_count == 32768
        write_blocks(device, 32767, b"e" * 512, soon())
        device.close()
        assert image.read_bytes()[-512:] == b"e" * 512


def test_block_device_when_read_only_is_known_to_be(tmp_path: Path, engine: str) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(MIB))
    with loop_device(image, "--read-only") as loop:
        device = FileDevice(loop, options=FileOptions(engine=engine))
        assert device.is_read_only and "read-only" in device.description
        assert not read_blocks(device, 0, 8, soon()).any()
        with pytest.raises(TransportError, match="write at LBA 3"):
            write_blocks(device, 3, bytes(512), soon())
        device.close()


def test_block_device_when_write_through_needs_no_flush(tmp_path: Path, engine: str) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(MIB))
    with loop_device(image) as loop:
        cache = Path(f"/sys/block/{Path(loop).name}/queue/write_cache")
        cached = FileDevice(loop, options=FileOptions(engine=engine))
        assert cached.has_volatile_cache == (cache.read_text() == "write back\n")
        cached.close()
        before = cache.read_text()
        cache.write_text("write through")
        try:
            device = FileDevice(loop, options=FileOptions(engine=engine))
            assert device.has_volatile_cache == (not device.is_direct)
            flush(device, soon())
            device.close()
        finally:
            cache.write_text(before)
