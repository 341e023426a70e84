"""Arenas and leases: backing, allocation, refusals, and that nothing leaks."""

from __future__ import annotations

import gc
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvdev.buffers import page_addresses
from kvdev.errors import CapacityError, UnsupportedError, UsageError
from kvdev.staging import Arena, numa_node_of_pci, numa_nodes
from kvdev.staging.mapping import available_memory_bytes, parse_list
from kvdev.units import MIB


def fd_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapping_count() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_arena_when_made_then_aligned_zeroed_and_backing_named() -> None:
    with Arena(3 * MIB) as arena:
        assert arena.size_bytes == 4 * MIB
        assert arena.address % (2 * MIB) == 0
        assert arena.backing in ("hugetlb-2MiB", "thp", "4KiB")
        with arena.lease(4, MIB) as lease:
            assert not lease.array.any()


def test_arena_when_made_then_populated() -> None:
    page = mmap.PAGESIZE
    before = int(Path("/proc/self/statm").read_text().split()[1]) * page
    with Arena(32 * MIB, is_shareable=True) as arena:
        after = int(Path("/proc/self/statm").read_text().split()[1]) * page
        # Reserved huge pages are not counted as resident.
        assert arena.backing == "hugetlb-2MiB" or after - before >= 31 * MIB


def test_lease_when_page_is_odd_then_rows_aligned_and_apart() -> None:
    with Arena(2 * MIB) as arena, arena.lease(3, 5000) as lease:
        assert lease.array.shape == (3, 5000)
        assert lease.page_stride_bytes == 8192
        assert np.diff(lease.addresses).tolist() == [8192, 8192]
        assert all(int(a) % 4096 == 0 for a in lease.addresses)
        assert lease.array[1].ctypes.data == lease.addresses[1]
        assert page_addresses(lease, 5000) is lease.addresses
        assert np.array_equal(page_addresses(lease.array, 5000), lease.addresses)
        assert len(lease) == 3


def test_leases_when_random_then_disjoint_and_all_comes_back(rng: np.random.Generator) -> None:
    with Arena(4 * MIB) as arena:
        live: list[tuple[int, object]] = []
        for step in range(600):
            if live and rng.random() < 0.48:
                mark, lease = live.pop(int(rng.integers(len(live))))
                assert (lease.array == mark).all()  # type: ignore[attr-defined]
                lease.release()  # type: ignore[attr-defined]
                continue
            try:
                fresh = arena.lease(int(rng.integers(1, 6)), int(rng.integers(1, 200_000)))
            except CapacityError:
                continue
            mark = step % 251
            fresh.array[:] = mark
            live.append((mark, fresh))
        for mark, lease in live:
            assert (lease.array == mark).all()  # type: ignore[attr-defined]
            lease.release()  # type: ignore[attr-defined]
        assert arena.free_bytes == arena.size_bytes
        assert arena.lease_count == 0
        arena.lease(1, 4 * MIB).release()


def test_lease_when_arena_is_full_then_capacity_error_with_the_arithmetic() -> None:
    with Arena(2 * MIB) as arena:
        leases = [arena.lease(1, MIB // 2) for _ in range(4)]
        leases[0].release()
        leases[2].release()
        with pytest.raises(
            CapacityError, match=r"1 pages x 1 MiB = 1 MiB .*1 MiB of 2 MiB free, largest run 512 KiB"
        ):
            arena.lease(1, MIB)
        leases[1].release()
        arena.lease(1, MIB).release()


def test_lease_when_larger_than_arena_then_usage_error() -> None:
    with Arena(2 * MIB) as arena, pytest.raises(UsageError, match=r"3 pages x 1 MiB = 3 MiB"):
        arena.lease(3, MIB)


@pytest.mark.parametrize(("count", "size"), [(0, 1), (-1, 1), (1, 0), (1, 1.5), (True, 1)])
def test_lease_when_arguments_are_bad_then_usage_error(count: int, size: int) -> None:
    with Arena(2 * MIB) as arena, pytest.raises(UsageError, match="positive whole number"):
        arena.lease(count, size)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "1MiB"])
def test_arena_when_size_is_bad_then_usage_error(size: int) -> None:
    with pytest.raises(UsageError, match="size_bytes"):
        Arena(size)


def test_arena_when_larger_than_memory_then_refused_before_mapping() -> None:
    before = mapping_count()
    available, _ = available_memory_bytes()
    with pytest.raises(
        CapacityError, match=r"size_bytes: expected at most .*less 128 MiB for the system\), got"
    ):
        Arena(available * 2)
    assert mapping_count() == before


def test_lease_when_released_twice_or_used_after_then_usage_error() -> None:
    with Arena(2 * MIB) as arena:
        lease = arena.lease(1, 4096)
        lease.release()
        assert lease.is_released
        with pytest.raises(UsageError, match="released twice"):
            lease.release()
        with pytest.raises(UsageError, match="after release"):
            lease.array
        with pytest.raises(UsageError, match="after release"):
            lease.addresses
        with pytest.raises(UsageError, match="after release"):
            page_addresses(lease, 4096)
        with pytest.raises(UsageError, match="after release"), lease:
            pass
        assert arena.free_bytes == arena.size_bytes


def test_arena_when_closed_then_no_lease_and_no_fd() -> None:
    arena = Arena(2 * MIB, is_shareable=True)
    arena.close()
    arena.close()
    assert arena.is_closed
    with pytest.raises(UsageError, match="after close"):
        arena.lease(1, 4096)
    with pytest.raises(UsageError, match="after close"):
        arena.fd
    with pytest.raises(UsageError, match="after close"), arena:
        pass


def test_arena_when_closed_with_lease_out_then_memory_lives_until_release() -> None:
    arena = Arena(2 * MIB)
    lease = arena.lease(2, 4096)
    view = lease.array
    arena.close()
    gc.collect()
    view[:] = 7
    lease.release()
    assert (view == 7).all()


def test_arena_when_made_and_closed_often_then_nothing_leaks() -> None:
    Arena(2 * MIB).close()
    gc.collect()
    fds, maps = fd_count(), mapping_count()
    for backing in ("auto", "4KiB") * 8:
        with Arena(2 * MIB, backing=backing) as arena:
            arena.lease(1, 4096).array[:] = 1
        del arena
    gc.collect()
    assert fd_count() == fds
    assert mapping_count() <= maps + 1


def test_arena_when_shared_by_fd_then_other_process_sees_the_bytes() -> None:
    with Arena(2 * MIB, is_shareable=True) as arena, arena.lease(1, 4096) as lease:
        lease.array[:] = 42
        code = (
            "import mmap,sys; m=mmap.mmap(int(sys.argv[1]), 2<<20); o=int(sys.argv[2]);"
            "assert m[o:o+4096]==b'*'*4096; m[o]=7"
        )
        subprocess.run(
            [sys.executable, "-S", "-c", code, str(arena.fd), str(lease.offset)],
            pass_fds=[arena.fd],
            check=True,
        )
        assert lease.array[0, 0] == 7


def test_arena_when_small_pages_asked_then_memfd_on_4k() -> None:
    with Arena(2 * MIB, backing="4KiB") as arena:
        assert arena.backing == "4KiB"
        assert os.fstat(arena.fd).st_size == 2 * MIB


@pytest.mark.parametrize("is_shareable", [False, True])
def test_arena_when_thp_asked_then_thp_or_a_clear_refusal(is_shareable: bool) -> None:
    try:
        arena = Arena(4 * MIB, backing="thp", is_shareable=is_shareable)
    except UnsupportedError as error:
        assert "this machine grants 4KiB" in str(error)
        return
    with arena:
        assert arena.backing == "thp"
        arena.lease(1, 4 * MIB).array[:] = 1
        if is_shareable:
            assert arena.fd >= 0


def test_arena_when_reserved_huge_pages_asked_then_those_or_a_clear_refusal() -> None:
    try:
        arena = Arena(2 * MIB, backing="hugetlb-2MiB")
    except CapacityError as error:
        assert "raise vm.nr_hugepages" in str(error)
        return
    with arena:
        assert arena.backing == "hugetlb-2MiB"
        arena.lease(1, 2 * MIB).array[:] = 1
        assert os.fstat(arena.fd).st_blksize == 2 * MIB


def test_arena_when_backing_is_unknown_then_usage_error() -> None:
    with pytest.raises(UsageError, match="backing: expected one of auto"):
        Arena(2 * MIB, backing="1GiB")


def test_fd_when_arena_is_anonymous_then_unsupported() -> None:
    try:
        arena = Arena(2 * MIB, backing="thp")
    except UnsupportedError as error:
        pytest.skip(str(error))
    with arena:
        if arena.has_fd:
            pytest.skip("this machine grants transparent huge pages to shared memory")
        with pytest.raises(UnsupportedError, match="is_shareable=True"):
            arena.fd


def test_leases_when_many_threads_then_none_overlap() -> None:
    with Arena(8 * MIB) as arena:
        failures: list[int] = []

        def churn(mark: int) -> None:
            for _ in range(200):
                with arena.lease(2, 8192) as lease:
                    lease.array[:] = mark
                    if not (lease.array == mark).all():
                        failures.append(mark)

        threads = [threading.Thread(target=churn, args=(mark,)) for mark in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert arena.free_bytes == arena.size_bytes


def test_arena_when_gigantic_pages_asked_then_those_or_the_remedy() -> None:
    try:
        arena = Arena(3 * MIB, backing="hugetlb-1GiB")
    except CapacityError as error:
        assert "expected 1 GiB of free 1 GiB huge pages" in str(error)
        assert "hugepagesz=1G" in str(error)
        return
    with arena:
        assert (arena.backing, arena.size_bytes) == ("hugetlb-1GiB", 1024 * MIB)
        assert arena.address % (1024 * MIB) == 0


def test_arena_when_placed_on_a_numa_node_then_its_pages_are_there() -> None:
    node = numa_nodes()[0]
    for is_shareable in (False, True):
        try:
            arena = Arena(4 * MIB, numa_node=node, is_shareable=is_shareable)
        except UnsupportedError as error:
            pytest.skip(str(error))
        with arena:
            start = f"{arena.address:x} "
            maps = Path("/proc/self/numa_maps").read_text().splitlines()
            words = next(line for line in maps if line.startswith(start)).split()
            assert f"bind:{node}" in words
            assert {word.partition("=")[0] for word in words if re.match(r"N\d+=", word)} == {f"N{node}"}


@pytest.mark.parametrize("node", [-1, 1023, 10**6, True, "0"])
def test_arena_when_numa_node_is_wrong_then_refused_with_the_nodes_there_are(node: int) -> None:
    before = mapping_count()
    with pytest.raises(UsageError, match=r"numa_node: expected one of 0.*, got"):
        Arena(2 * MIB, numa_node=node)
    assert mapping_count() == before


def test_numa_node_when_of_a_pci_device_then_sysfs_tells(tmp_path: Path) -> None:
    for name, text in (("0000:01:00.0", "1\n"), ("0000:02:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa_node_of_pci("0000:01:00.0", root=tmp_path) == 1
    assert numa_node_of_pci("0000:02:00.0", root=tmp_path) is None
    with pytest.raises(UsageError, match="pci address: expected a device below"):
        numa_node_of_pci("0000:03:00.0", root=tmp_path)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-2,5", [0, 1, 2, 5]), ("", []), ("3,7-7", [3, 7])]
)
def test_list_when_of_the_kernel_then_its_numbers(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers


def test_arena_when_locked_then_its_pages_are() -> None:
    def locked_kib() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmLck"))

    before = locked_kib()
    try:
        arena = Arena(2 * MIB, backing="4KiB", is_locked=True)
    except CapacityError as error:
        pytest.skip(str(error))
    with arena:
        assert locked_kib() - before == 2048
    del arena
    gc.collect()
    assert locked_kib() == before


def test_arena_when_more_than_may_be_locked_then_the_limit_and_the_remedy() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody whose limit counts")
    code = """
import os, resource
from kvdev.errors import CapacityError
from kvdev.staging import Arena
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setresuid(65534, 65534, 65534)
maps = len(open("/proc/self/maps").readlines())
try:
    Arena(4 << 20, backing="4KiB", is_locked=True)
except CapacityError as error:
    print(error)
assert len(open("/proc/self/maps").readlines()) <= maps + 1
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "4 MiB cannot be locked, the limit of locked memory (RLIMIT_MEMLOCK) is 64 KiB" in run.stdout
    assert "LimitMEMLOCK=" in run.stdout


def test_arena_when_its_process_is_killed_then_memory_lives_until_the_fd_is_closed() -> None:
    ours, theirs = socket.socketpair()
    code = """
import socket, sys
from kvdev.staging import Arena
peer = socket.socket(fileno=int(sys.argv[1]))
arena = Arena(4 << 20, is_shareable=True)
lease = arena.lease(1, 4096)
lease.array[:] = 42
socket.send_fds(peer, [str(lease.offset).encode()], [arena.fd])
peer.recv(1)
"""
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        ours.settimeout(60)
        text, fds, _, _ = socket.recv_fds(ours, 64, 1)
        child.kill()
        child.wait(60)
    with mmap.mmap(fds[0], 4 * MIB) as memory:
        assert memory[int(text) : int(text) + 4096] == b"*" * 4096
    os.close(fds[0])
