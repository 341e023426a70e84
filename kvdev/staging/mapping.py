"""Mappings: populated memory on the largest pages this machine grants, unmapped when its last user is gone.

Not here: who uses which part (``kvdev.staging.arena``); registration with GPU runtimes.
Threads: any; ``map_memory`` blocks while the kernel clears the pages (about 0.1 s per GiB on huge pages).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.errors import CapacityError, UnsupportedError, UsageError
from kvdev.units import GIB, MIB, format_size

HUGE_PAGE_SIZE_BYTES = 2 * MIB
SMALL_PAGE_SIZE_BYTES = 4096

GIGANTIC_PAGE_SIZE_BYTES = GIB

BACKING_GIGANTIC = "hugetlb-1GiB"
BACKING_HUGETLB = "hugetlb-2MiB"
BACKING_THP = "thp"
BACKING_SMALL = "4KiB"
BACKING_AUTO = "auto"
BACKINGS = (BACKING_AUTO, BACKING_GIGANTIC, BACKING_HUGETLB, BACKING_THP, BACKING_SMALL)

# Left to the system when an arena's size is checked against the memory that is available.
MEMORY_RESERVE_BYTES = 128 * MIB

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_HUGETLB = 0x1, 0x2, 0x4
_MFD_HUGE_SHIFT = 26
_F_ADD_SEALS = 1033
_SEAL_SIZE = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: nobody who is given the descriptor can cut the memory under us."""
_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NODE_WORD_BITS = 64
_NODE_COUNT_MAX = 1024
"""As many as Linux can be built for."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.restype = ctypes.c_int
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.syscall.restype = ctypes.c_long


class Mapping:
    """Populated, zeroed memory; it lives as long as this object or any array made from it."""

    def __init__(self, address: int, size_bytes: int, fd: int | None, backing: str) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.fd = fd
        self.backing = backing
        # Not at interpreter exit: a C thread may still receive into the memory, and the process ends anyway.
        weakref.finalize(self, _unmap, address, size_bytes, fd).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of it as a writable array that keeps the mapping alive."""
        return np.asarray(self)


@dataclass(frozen=True)
class _Wish:
    """What else is asked of a mapping, done between mapping and populating and behind it."""

    numa_node: int | None
    is_locked: bool


def map_memory(
    size_bytes: int,
    *,
    is_shareable: bool,
    backing: str = BACKING_AUTO,
    numa_node: int | None = None,
    is_locked: bool = False,
) -> Mapping:
    """Map and populate memory, on huge pages where there are any.

    ``backing`` auto tries in this order: a memfd on reserved 1 GiB pages where the size is a multiple of that, and on
    reserved 2 MiB pages; a memfd on transparent huge pages where this machine grants them to shared memory; unless
    ``is_shareable``, anonymous memory on transparent huge pages; a memfd on 4 KiB pages. Another ``backing`` is that
    or UnsupportedError. ``numa_node`` places all of it on one node, ``is_locked`` keeps it from being swapped.
    Raises CapacityError with the arithmetic, before anything is mapped, when the memory is not there.
    """
    if backing not in BACKINGS:
        raise UsageError(f"staging arena: backing: expected one of {', '.join(BACKINGS)}, got {backing!r}")
    wish = _Wish(_checked_node(numa_node), is_locked)
    for name, page_size in (
        (BACKING_GIGANTIC, GIGANTIC_PAGE_SIZE_BYTES),
        (BACKING_HUGETLB, HUGE_PAGE_SIZE_BYTES),
    ):
        whole = -(-size_bytes // page_size) * page_size
        # Nobody who did not ask for it pays for up to 1 GiB that is not used.
        if backing == name or (backing == BACKING_AUTO and (page_size < GIB or whole == size_bytes)):
            mapping = _map_hugetlb(whole, page_size, name, wish)
            if mapping is not None:
                return mapping
            if backing == name:
                raise CapacityError(
                    f"staging arena: backing: expected {format_size(whole)} of free {format_size(page_size)} huge "
                    f"pages{_on_node(numa_node)}, this machine has {_huge_pages(page_size)} pages; "
                    + (
                        "raise vm.nr_hugepages or use backing auto"
                        if page_size < GIB
                        else "reserve them with hugepagesz=1G hugepages=N on the kernel's command line, or in "
                        f"{_huge_pages_folder(page_size)}/nr_hugepages, or use backing auto"
                    )
                )
    size_bytes = -(-size_bytes // HUGE_PAGE_SIZE_BYTES) * HUGE_PAGE_SIZE_BYTES
    _check_available(size_bytes)
    if backing == BACKING_SMALL:
        return _map_memfd(size_bytes, wish, advice=None)
    if is_shareable or _shmem_grants_huge_pages():
        mapping = _map_memfd(size_bytes, wish, advice=_MADV_HUGEPAGE)
    else:
        mapping = _map_anonymous(size_bytes, wish)
    if backing not in (BACKING_AUTO, mapping.backing):
        raise UnsupportedError(
            f"staging arena: backing: expected {backing}, this machine grants {mapping.backing}; see "
            f"/sys/kernel/mm/transparent_hugepage",
            feature="transparent huge pages",
        )
    return mapping


def numa_node_of_pci(address: str, *, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node next to a PCI device such as a GPU or NIC (``0000:c1:00.0``), None where the machine has none."""
    try:
        node = int((root / address / "numa_node").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"numa node: pci address: expected a device below {root}, got {address!r}"
        ) from error
    return node if node >= 0 else None


def numa_nodes() -> list[int]:
    """The NUMA nodes of this machine that have memory."""
    for name in ("has_memory", "online"):
        try:
            text = (Path("/sys/devices/system/node") / name).read_text().strip()
        except OSError:
            continue
        return parse_list(text)
    return [0]


def parse_list(text: str) -> list[int]:
    """Linux's lists of numbers, as in ``0-3,8``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def _checked_node(node: int | None) -> int | None:
    if node is None:
        return None
    nodes = numa_nodes()
    if isinstance(node, bool) or not isinstance(node, int) or node not in nodes or node >= _NODE_COUNT_MAX:
        listed = ", ".join(str(each) for each in nodes)
        raise UsageError(f"staging arena: numa_node: expected one of {listed}, got {node!r}")
    return node


def _on_node(node: int | None) -> str:
    return "" if node is None else f" on NUMA node {node}"


def _place(mapping: Mapping, wish: _Wish) -> None:
    """Have the pages come from the wished node when they are populated."""
    if wish.numa_node is None:
        return
    number = _SYS_MBIND.get(os.uname().machine)
    words = (ctypes.c_uint64 * (_NODE_COUNT_MAX // _NODE_WORD_BITS))()
    words[wish.numa_node // _NODE_WORD_BITS] = 1 << (wish.numa_node % _NODE_WORD_BITS)
    arguments = [
        mapping.address,
        mapping.size_bytes,
        _MPOL_BIND,
        ctypes.addressof(words),
        _NODE_COUNT_MAX + 1,
        0,
    ]
    if number is None or _libc.syscall(number, *[ctypes.c_ulong(value) for value in arguments]) != 0:
        reason = os.strerror(ctypes.get_errno()) if number else f"unknown machine {os.uname().machine}"
        raise UnsupportedError(
            f"staging arena: numa_node: memory cannot be bound to node {wish.numa_node}: {reason}; a container needs "
            f"mbind in its seccomp profile (SYS_NICE), or leave numa_node out",
            feature="mbind",
        )


def _lock(mapping: Mapping, wish: _Wish) -> None:
    if not wish.is_locked or _libc.mlock(mapping.address, mapping.size_bytes) == 0:
        return
    number = ctypes.get_errno()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    raise CapacityError(
        f"staging arena: is_locked: {format_size(mapping.size_bytes)} cannot be locked, the limit of locked memory "
        f"(RLIMIT_MEMLOCK) is {told}: {os.strerror(number)}; raise it with ulimit -l, LimitMEMLOCK= of a systemd unit "
        f"or --ulimit memlock=-1 of the container, or use reserved huge pages, which are never swapped"
    )


def _check_available(size_bytes: int) -> None:
    available, source = available_memory_bytes()
    usable = max(0, available - MEMORY_RESERVE_BYTES)
    if size_bytes > usable:
        raise CapacityError(
            f"staging arena: size_bytes: expected at most {format_size(usable)} ({source} "
            f"{format_size(available)} less {format_size(MEMORY_RESERVE_BYTES)} for the system), "
            f"got {format_size(size_bytes)}; make the arena smaller"
        )


def available_memory_bytes() -> tuple[int, str]:
    """Memory that can be used without swapping, and where that number comes from."""
    available, source = _meminfo("MemAvailable"), "MemAvailable"
    group = Path("/sys/fs/cgroup") / _own_cgroup()
    try:
        limit = int((group / "memory.max").read_text())
        room = limit - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such controller here, or "max"
        return available, source
    return (room, "cgroup memory.max less memory.current") if room < available else (available, source)


def _own_cgroup() -> str:
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                return line[4:]
    except OSError:
        pass
    return ""


def _meminfo(name: str) -> int:
    """One line of /proc/meminfo: bytes of a size, the number itself of a count, 0 when there is no such line."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, rest = line.partition(":")
        if field == name:
            words = rest.split()
            return int(words[0]) * (1024 if len(words) > 1 else 1)
    return 0


def _shmem_grants_huge_pages() -> bool:
    root = Path("/sys/kernel/mm/transparent_hugepage")
    for name in ("shmem_enabled", "hugepages-2048kB/shmem_enabled"):
        try:
            text = (root / name).read_text()
        except OSError:
            continue
        chosen = text.partition("[")[2].partition("]")[0]
        if chosen in ("always", "advise", "within_size", "force"):
            return True
    return False


def _huge_pages_folder(page_size: int) -> Path:
    return Path(f"/sys/kernel/mm/hugepages/hugepages-{page_size // 1024}kB")


def _huge_pages(page_size: int) -> int:
    """Reserved huge pages of one size that are free and promised to nobody."""
    counts = []
    for name in ("free_hugepages", "resv_hugepages"):
        try:
            counts.append(int((_huge_pages_folder(page_size) / name).read_text()))
        except (OSError, ValueError):
            return 0
    return max(0, counts[0] - counts[1])


def _map_hugetlb(size_bytes: int, page_size: int, backing: str, wish: _Wish) -> Mapping | None:
    if _huge_pages(page_size) * page_size < size_bytes:
        return None
    size_code = (page_size.bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create("kvdev-staging", _MFD_CLOEXEC | _MFD_ALLOW_SEALING | _MFD_HUGETLB | size_code)
    except OSError:
        return None
    try:
        os.ftruncate(fd, size_bytes)
        # mmap reserves the pages, so running out shows here and not as a signal at the first access.
        address = _mmap_aligned(size_bytes, fd, page_size)
    except OSError:
        os.close(fd)
        return None
    _seal(fd)
    mapping = Mapping(address, size_bytes, fd, backing)
    _place(mapping, wish)
    _populate(mapping)
    _lock(mapping, wish)
    return mapping


def _map_memfd(size_bytes: int, wish: _Wish, *, advice: int | None) -> Mapping:
    fd = os.memfd_create("kvdev-staging", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        address = _mmap_aligned(size_bytes, fd)
    except OSError as error:
        os.close(fd)
        raise _map_error(size_bytes, error) from error
    _seal(fd)
    mapping = Mapping(address, size_bytes, fd, BACKING_SMALL)
    if advice is not None:
        _libc.madvise(address, size_bytes, advice)
    _place(mapping, wish)
    _populate(mapping)
    _lock(mapping, wish)
    mapping.backing = _measured_backing(mapping)
    return mapping


def _seal(fd: int) -> None:
    with contextlib.suppress(OSError):  # hugetlb before Linux 4.16 has no seals
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SIZE)


def _map_anonymous(size_bytes: int, wish: _Wish) -> Mapping:
    try:
        address = _mmap_aligned(size_bytes, None)
    except OSError as error:
        raise _map_error(size_bytes, error) from error
    mapping = Mapping(address, size_bytes, None, BACKING_SMALL)
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
    # Copy on write after a fork would move pages that a device or a C thread writes to.
    _libc.madvise(address, size_bytes, _MADV_DONTFORK)
    _place(mapping, wish)
    _populate(mapping)
    _lock(mapping, wish)
    mapping.backing = _measured_backing(mapping)
    return mapping


def _map_error(size_bytes: int, error: OSError) -> CapacityError:
    return CapacityError(
        f"staging arena: size_bytes: {format_size(size_bytes)} cannot be mapped: {error.strerror}"
    )


def _mmap_aligned(size_bytes: int, fd: int | None, alignment: int = HUGE_PAGE_SIZE_BYTES) -> int:
    """Map at a boundary of huge pages, which transparent ones need: reserve more, map inside, give back the rest."""
    span = size_bytes + alignment
    base = _mmap(None, span, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-base // alignment) * alignment
    flags = _MAP_FIXED | (_MAP_SHARED if fd is not None else _MAP_PRIVATE | _MAP_ANONYMOUS)
    try:
        _mmap(address, size_bytes, _PROT_READ_WRITE, flags, -1 if fd is None else fd)
    except OSError:
        _libc.munmap(base, span)
        raise
    if address > base:
        _libc.munmap(base, address - base)
    if base + span > address + size_bytes:
        _libc.munmap(address + size_bytes, base + span - address - size_bytes)
    return address


def _mmap(address: int | None, size_bytes: int, prot: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size_bytes, prot, flags, fd, 0)
    if result == _MAP_FAILED or result is None:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _populate(mapping: Mapping) -> None:
    if _libc.madvise(mapping.address, mapping.size_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number in (12, 14, 133):  # ENOMEM, EFAULT, EHWPOISON: touching would end in a signal
        raise CapacityError(
            f"staging arena: size_bytes: {format_size(mapping.size_bytes)} cannot be populated: "
            f"{os.strerror(number)}"
        )
    mapping.bytes()[::SMALL_PAGE_SIZE_BYTES] = 0  # Linux before 5.14


def _measured_backing(mapping: Mapping) -> str:
    """What the kernel gave, from /proc/self/smaps: "thp" when at least half of the memory is on huge pages."""
    huge_bytes = 0
    is_ours = False
    end = mapping.address + mapping.size_bytes
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if not head.endswith(":"):
                first, _, last = head.partition("-")
                is_ours = int(first, 16) < end and int(last, 16) > mapping.address
            elif is_ours and head in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                huge_bytes += int(line.split()[1]) * 1024
    return BACKING_THP if 2 * huge_bytes >= mapping.size_bytes else BACKING_SMALL


def _unmap(address: int, size_bytes: int, fd: int | None) -> None:
    _libc.munmap(address, size_bytes)
    if fd is not None:
        os.close(fd)


def check_size_bytes(size_bytes: int) -> None:
    """Raise UsageError unless this is a size an arena can have."""
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 1:
        raise UsageError(
            f"staging arena: size_bytes: expected a positive number of bytes, got {size_bytes!r}"
        )
