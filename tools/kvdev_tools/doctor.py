"""What this host has and what kvdev needs: each limit that is missing, and its remedy.

Reading (``read_facts``) and judging (``examine``) are apart, so that every verdict can be tested without the machine.
Not here: the site (``kvdev provision plan`` checks what a file asks for).
"""

from __future__ import annotations

import contextlib
import enum
import os
import platform
import resource
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvdev.files import read_regular
from kvdev.units import KIB, MIB, format_size

HUGEPAGE_SIZE_BYTES = 2 * MIB
OPEN_FILES_NEEDED = 4096
"""Connections of a host to many targets, each with several queue pairs, and their files."""
KERNEL_NEEDED = (5, 10)
"""Oldest kernel that it was tried on: io_uring's registered buffers, pidfd, OFD locks."""
TEXT_SIZE_LIMIT_BYTES = MIB
"""Of a file of the kernel's, or of /etc: some hundred bytes each, /proc/meminfo some thousand."""
_UNLIMITED = resource.RLIM_INFINITY
_CAP_IPC_LOCK = 14
_MFD_HUGETLB = 0x0004


class Verdict(enum.Enum):
    """What a check says."""

    OK = "ok"
    POOR = "poor"
    """It works, slower or with less safety."""
    MISSING = "missing"
    """What it is needed for does not work."""


@dataclass(frozen=True)
class Finding:
    """One check's result; ``remedy`` is empty when it is well."""

    check: str
    verdict: Verdict
    found: str
    needed_for: str
    remedy: str = ""


@dataclass
class SocketFacts:
    """A UNIX socket as this process sees it."""

    path: str
    fault: str = ""
    """Why it cannot be used: empty when connecting works."""
    peer_pid: int = 0
    """0 when the peer lives in another pid namespace."""
    version: str = ""
    vhosts: dict[str, str] = field(default_factory=dict)
    """vhost controller -> its socket."""


@dataclass
class Facts:
    """What was read from the machine; the defaults are a machine that has everything."""

    kernel: str = "6.1.0"
    hugepage_total: int = 1024
    hugepage_free: int = 1024
    hugetlb_cgroup_bytes: int | None = None
    memory_available_bytes: int = 1 << 40
    memory_cgroup_bytes: int | None = None
    shmem_thp: str = "advise"
    memlock_bytes: int = _UNLIMITED
    has_ipc_lock: bool = False
    open_files: int = 1 << 20
    memfd_fault: str = ""
    hugetlb_fault: str = ""
    io_uring_fault: str = ""
    pidfd_fault: str = ""
    core_fault: str = ""
    lock_folder_fault: str = ""
    cpu_count: int = 8
    cpu_quota: float | None = None
    has_host_nqn: bool = True
    sockets: list[SocketFacts] = field(default_factory=list)


def examine(facts: Facts, *, arena_size_bytes: int) -> list[Finding]:
    """Judge the facts for an arena of this size."""
    return [
        *_kernel(facts),
        *_memory(facts, arena_size_bytes),
        *_limits(facts, arena_size_bytes),
        *_processors(facts),
        *_identity(facts),
        *(finding for each in facts.sockets for finding in _socket(each)),
    ]


def _finding(
    check: str, is_ok: bool, found: str, needed_for: str, remedy: str, *, otherwise: Verdict
) -> Finding:
    return Finding(check, Verdict.OK if is_ok else otherwise, found, needed_for, "" if is_ok else remedy)


def _kernel(facts: Facts) -> Iterator[Finding]:
    numbers = tuple(int(part) for part in facts.kernel.split("-")[0].split(".")[:2] if part.isdigit())
    needed = ".".join(str(each) for each in KERNEL_NEEDED)
    yield _finding(
        "kernel",
        numbers >= KERNEL_NEEDED,
        f"Linux {facts.kernel}",
        "everything",
        f"use Linux {needed} or later",
        otherwise=Verdict.MISSING,
    )
    yield _finding(
        "core",
        not facts.core_fault,
        facts.core_fault or "the C core loads",
        "everything",
        "install the wheel for this machine, or build it with make setup",
        otherwise=Verdict.MISSING,
    )
    yield _finding(
        "io_uring",
        not facts.io_uring_fault,
        f"{facts.io_uring_fault}; file: devices use threads"
        if facts.io_uring_fault
        else "file: devices use it",
        "file: devices and the local NVMe tier at full speed",
        "sysctl kernel.io_uring_disabled=0; in a container a seccomp profile that allows io_uring_setup, "
        "io_uring_enter and io_uring_register",
        otherwise=Verdict.POOR,
    )
    yield _finding(
        "pidfd",
        not facts.pidfd_fault,
        facts.pidfd_fault or "usable",
        "knowing that a vhost back end is dead before its memory is used again",
        "in a container a seccomp profile that allows pidfd_open",
        otherwise=Verdict.POOR,
    )


def _memory(facts: Facts, arena_size_bytes: int) -> Iterator[Finding]:
    pages = -(-arena_size_bytes // HUGEPAGE_SIZE_BYTES)
    arena = format_size(arena_size_bytes)
    yield _finding(
        "hugepages",
        facts.hugepage_free >= pages,
        f"{facts.hugepage_free} of {facts.hugepage_total} pages of 2 MiB free",
        f"a staging arena of {arena} in huge pages, and SPDK",
        f"sysctl vm.nr_hugepages={max(facts.hugepage_total + pages - facts.hugepage_free, pages)} at boot, in "
        "/etc/sysctl.d; in Kubernetes the resource hugepages-2Mi",
        otherwise=Verdict.POOR,
    )
    yield _finding(
        "hugetlb memfd",
        not facts.hugetlb_fault,
        facts.hugetlb_fault or "can be made",
        "an arena in huge pages that SPDK maps",
        "reserve huge pages; without them the arena takes ordinary pages",
        otherwise=Verdict.POOR,
    )
    yield _finding(
        "memfd",
        not facts.memfd_fault,
        facts.memfd_fault or "can be made",
        "the staging arena",
        "in a container a seccomp profile that allows memfd_create",
        otherwise=Verdict.MISSING,
    )
    if facts.hugetlb_cgroup_bytes is not None:
        yield _finding(
            "hugepages of the cgroup",
            facts.hugetlb_cgroup_bytes >= arena_size_bytes,
            f"at most {format_size(facts.hugetlb_cgroup_bytes)}",
            f"an arena of {arena} in huge pages: a page over it ends the process with SIGBUS",
            f"hugepages-2Mi: {pages * 2}Mi in the limits of this container",
            otherwise=Verdict.MISSING,
        )
    room = facts.memory_available_bytes
    if facts.memory_cgroup_bytes is not None:
        room = min(room, facts.memory_cgroup_bytes)
    is_huge = facts.hugepage_free >= pages and not facts.hugetlb_fault
    yield _finding(
        "memory",
        is_huge or room >= arena_size_bytes,
        f"{format_size(room)} available",
        f"an arena of {arena} without huge pages",
        "a smaller arena (--arena), more memory, or a higher memory limit of this container",
        otherwise=Verdict.MISSING,
    )
    if not is_huge:
        yield _finding(
            "shmem huge pages",
            facts.shmem_thp in ("advise", "always", "within_size", "force"),
            f"shmem_enabled is {facts.shmem_thp or 'not there'}",
            "an arena in transparent huge pages, when none are reserved",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            otherwise=Verdict.POOR,
        )


def _limits(facts: Facts, arena_size_bytes: int) -> Iterator[Finding]:
    is_enough = (
        facts.has_ipc_lock or facts.memlock_bytes == _UNLIMITED or facts.memlock_bytes >= arena_size_bytes
    )
    shown = "unlimited" if facts.memlock_bytes == _UNLIMITED else format_size(facts.memlock_bytes)
    yield _finding(
        "memlock",
        is_enough,
        shown + (", with CAP_IPC_LOCK" if facts.has_ipc_lock else ""),
        f"registering an arena of {format_size(arena_size_bytes)} with io_uring, RDMA or a GPU",
        "LimitMEMLOCK=infinity in the unit; --ulimit memlock=-1 for a container; in Kubernetes the limit of the "
        "container runtime's unit, or the capability IPC_LOCK",
        otherwise=Verdict.MISSING,
    )
    yield _finding(
        "open files",
        facts.open_files >= OPEN_FILES_NEEDED,
        str(facts.open_files),
        "queue pairs to many targets",
        f"LimitNOFILE={OPEN_FILES_NEEDED} or more in the unit, ulimit -n in a shell",
        otherwise=Verdict.POOR,
    )
    yield _finding(
        "lock folder",
        not facts.lock_folder_fault,
        facts.lock_folder_fault or "writable",
        "one owner per KV namespace on this host",
        "set XDG_RUNTIME_DIR to a folder of this user; containers of one host share it",
        otherwise=Verdict.MISSING,
    )


def _processors(facts: Facts) -> Iterator[Finding]:
    usable = facts.cpu_count if facts.cpu_quota is None else min(facts.cpu_count, facts.cpu_quota)
    yield _finding(
        "processors",
        usable >= 2,
        f"{facts.cpu_count} in the affinity mask"
        + ("" if facts.cpu_quota is None else f", {facts.cpu_quota:g} by the cgroup's quota"),
        "a poller beside the engine",
        "give the process two processors or more, and SPDK cores of its own",
        otherwise=Verdict.POOR,
    )


def _identity(facts: Facts) -> Iterator[Finding]:
    yield _finding(
        "host NQN",
        facts.has_host_nqn,
        "/etc/nvme/hostnqn is there" if facts.has_host_nqn else "/etc/nvme/hostnqn is not there",
        "being the same host to targets for every user of this machine",
        "nvme gen-hostnqn > /etc/nvme/hostnqn; until then each user has one of its own",
        otherwise=Verdict.POOR,
    )


def _socket(facts: SocketFacts) -> Iterator[Finding]:
    yield _finding(
        f"RPC socket {facts.path}",
        not facts.fault,
        facts.fault or facts.version or "answers",
        "kvdev provision and the local SPDK",
        "start that SPDK, mount its socket's folder into this container, run as its user",
        otherwise=Verdict.MISSING,
    )
    if facts.fault:
        return
    yield _finding(
        f"pid namespace of {facts.path}",
        facts.peer_pid > 0,
        f"its process is {facts.peer_pid}" if facts.peer_pid else "its process is in another pid namespace",
        "knowing that the back end is dead before its memory is used again",
        "shareProcessNamespace: true in the pod, or --pid=container:NAME",
        otherwise=Verdict.POOR,
    )
    for name, path in facts.vhosts.items():
        fault = socket_fault(path)
        yield _finding(
            f"vhost socket of {name}",
            not fault,
            fault or path,
            "the data path over the local SPDK",
            "mount the folder of SPDK's -S option here at the same path; let this user write to the socket",
            otherwise=Verdict.MISSING,
        )


# --- reading ----------------------------------------------------------------------------------


def read_facts(*, rpcs: Sequence[str] = (), timeout_s: float = 5.0, root: Path = Path("/")) -> Facts:
    """Read this machine; ``root`` stands before /proc and /sys, and RPC sockets are asked."""
    memory = _meminfo(root)
    is_2m = memory.get("Hugepagesize", 0) == HUGEPAGE_SIZE_BYTES // KIB
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cgroup = _cgroup(root)
    return Facts(
        kernel=platform.release(),
        hugepage_total=memory.get("HugePages_Total", 0) if is_2m else 0,
        hugepage_free=memory.get("HugePages_Free", 0) - memory.get("HugePages_Rsvd", 0) if is_2m else 0,
        hugetlb_cgroup_bytes=_limit(cgroup, "hugetlb.2MB.max"),
        memory_available_bytes=memory.get("MemAvailable", 0) * KIB,
        memory_cgroup_bytes=_cgroup_room(cgroup),
        shmem_thp=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        memlock_bytes=memlock,
        has_ipc_lock=_has_capability(root, _CAP_IPC_LOCK),
        open_files=open_files,
        memfd_fault=_memfd_fault(0),
        hugetlb_fault=_memfd_fault(_MFD_HUGETLB),
        io_uring_fault=_io_uring_fault(),
        pidfd_fault=_pidfd_fault(),
        core_fault=_core_fault(),
        lock_folder_fault=_lock_folder_fault(),
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(cgroup),
        has_host_nqn=bool(_text(root / "etc/nvme/hostnqn").strip()),
        sockets=[_socket_facts(rpc, timeout_s) for rpc in rpcs],
    )


def _text(path: Path) -> str:
    try:
        return read_regular(path, TEXT_SIZE_LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0])
    return values


def _chosen(text: str) -> str:
    """The word in brackets of ``always [never] advise``."""
    return text.partition("[")[2].partition("]")[0]


def _cgroup(root: Path) -> Path | None:
    """This process's folder in cgroup v2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = root / "sys/fs/cgroup" / line[3:].strip().lstrip("/")
            # In a cgroup namespace the path may be of another root: then the mount is this process's folder.
            return folder if folder.is_dir() else root / "sys/fs/cgroup"
    return None


def _limit(folder: Path | None, name: str) -> int | None:
    text = "" if folder is None else _text(folder / name).strip()
    return int(text) if text.isdigit() else None


def _cgroup_room(folder: Path | None) -> int | None:
    limit, used = _limit(folder, "memory.max"), _limit(folder, "memory.current")
    return None if limit is None else max(0, limit - (used or 0))


def _cpu_quota(folder: Path | None) -> float | None:
    words = ("" if folder is None else _text(folder / "cpu.max")).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _has_capability(root: Path, number: int) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _memfd_fault(flags: int) -> str:
    try:
        fd = os.memfd_create("kvdev-doctor", os.MFD_CLOEXEC | flags)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    os.close(fd)
    return ""


def _io_uring_fault() -> str:
    """Why file devices cannot have a ring; it is set up as they do, and given back at once."""
    try:
        from kvdev.native.file import IO_URING, FileEngine
    except ImportError:
        return "not tried: the C core does not load"
    from kvdev.errors import UnsupportedError

    try:
        FileEngine(IO_URING).close()
    except UnsupportedError as refusal:
        return str(refusal)
    return ""


def _pidfd_fault() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return ""


def _core_fault() -> str:
    try:
        import kvdev._core  # noqa: F401
    except ImportError as error:
        return f"the C core does not load: {error}"
    return ""


def _lock_folder_fault() -> str:
    from kvdev.errors import UsageError
    from kvdev.store.lock import runtime_folder

    try:
        folder = runtime_folder()
    except UsageError as error:
        return str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def socket_fault(path: str) -> str:
    """Why a UNIX socket cannot be connected to; the connection is closed at once."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISSOCK(mode):
        return f"{path}: is no socket"
    # Connecting would count as a session of the controller; being allowed to is what matters.
    return "" if os.access(path, os.W_OK) else f"{path}: Permission denied"


def _socket_facts(rpc: str, timeout_s: float) -> SocketFacts:
    from kvdev_tools.provision.work import peer_of
    from spdk_rpc import Client, SpdkRpcError
    from spdk_rpc.plan import Kind, observe

    facts = SocketFacts(rpc)
    with contextlib.suppress(OSError, ValueError):
        peer = peer_of(rpc)
        facts.peer_pid = 0 if peer is None else peer.pid
    try:
        with Client(rpc, timeout_s=timeout_s) as client:
            observed = observe(client.call, kinds=(Kind.VHOST,))
    except (SpdkRpcError, OSError) as error:
        facts.fault = str(error)
        return facts
    facts.version = observed.version
    facts.vhosts = dict(observed.vhost_sockets)
    return facts


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(each.verdict is not Verdict.MISSING for each in findings)
