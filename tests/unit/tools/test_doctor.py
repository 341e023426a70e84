"""``kvdev doctor``: each missing limit has its finding and its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.serve import EmbeddedTarget
from kvdev.testing.target_backend import MemoryBackend
from kvdev_tools.doctor import (
    Facts,
    Finding,
    SocketFacts,
    Verdict,
    examine,
    is_healthy,
    read_facts,
    socket_fault,
)
from kvdev_tools.main import run
from tests.unit.tools.test_cli_json import documented, keys_of

ARENA = 1 << 30

# A lack -> the check that names it, its verdict, and what the remedy has to mention.
LACKS: dict[str, tuple[dict[str, Any], str, Verdict, str]] = {
    "old kernel": ({"kernel": "4.19.0-5-amd64"}, "kernel", Verdict.MISSING, "5.10"),
    "no core": ({"core_fault": "no"}, "core", Verdict.MISSING, "wheel"),
    "io_uring": ({"io_uring_fault": "EPERM"}, "io_uring", Verdict.POOR, "kernel.io_uring_disabled=0"),
    "pidfd": ({"pidfd_fault": "EPERM"}, "pidfd", Verdict.POOR, "seccomp"),
    "huge pages": (
        {"hugepage_free": 100, "hugepage_total": 200},
        "hugepages",
        Verdict.POOR,
        "vm.nr_hugepages=612",
    ),
    "memfd": ({"memfd_fault": "EPERM"}, "memfd", Verdict.MISSING, "memfd_create"),
    "hugetlb cgroup": (
        {"hugetlb_cgroup_bytes": 1 << 20},
        "hugepages of the cgroup",
        Verdict.MISSING,
        "hugepages-2Mi: 1024Mi",
    ),
    "memory": (
        {"hugepage_free": 0, "memory_available_bytes": 1 << 20},
        "memory",
        Verdict.MISSING,
        "--arena",
    ),
    "memory limit": (
        {"hugepage_free": 0, "memory_cgroup_bytes": 1 << 20},
        "memory",
        Verdict.MISSING,
        "limit",
    ),
    "shmem": ({"hugepage_free": 0, "shmem_thp": "never"}, "shmem huge pages", Verdict.POOR, "shmem_enabled"),
    "memlock": ({"memlock_bytes": 8 << 20}, "memlock", Verdict.MISSING, "LimitMEMLOCK=infinity"),
    "files": ({"open_files": 1024}, "open files", Verdict.POOR, "LimitNOFILE=4096"),
    "locks": ({"lock_folder_fault": "not writable"}, "lock folder", Verdict.MISSING, "XDG_RUNTIME_DIR"),
    "one processor": ({"cpu_count": 1}, "processors", Verdict.POOR, "two processors"),
    "a quota": ({"cpu_quota": 0.5}, "processors", Verdict.POOR, "two processors"),
    "no NQN": ({"has_host_nqn": False}, "host NQN", Verdict.POOR, "gen-hostnqn"),
    "socket": ({"sockets": [SocketFacts("/s", fault="/s: no")]}, "RPC socket /s", Verdict.MISSING, "mount"),
    "pid namespace": (
        {"sockets": [SocketFacts("/s", peer_pid=0, version="SPDK")]},
        "pid namespace of /s",
        Verdict.POOR,
        "shareProcessNamespace",
    ),
    "vhost": (
        {"sockets": [SocketFacts("/s", peer_pid=1, vhosts={"v.0": "/nowhere/v.0"})]},
        "vhost socket of v.0",
        Verdict.MISSING,
        "mount the folder",
    ),
}


def bad(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.verdict is not Verdict.OK]


def test_a_machine_that_has_everything_is_well() -> None:
    findings = examine(Facts(), arena_size_bytes=ARENA)
    assert not bad(findings) and is_healthy(findings)
    assert all(not each.remedy for each in findings)


@pytest.mark.parametrize("lack", LACKS)
def test_each_lack_is_named_with_its_remedy(lack: str) -> None:
    fields, check, verdict, remedy = LACKS[lack]
    findings = examine(dataclasses.replace(Facts(), **fields), arena_size_bytes=ARENA)
    found = next(each for each in bad(findings) if each.check == check)
    assert found.verdict is verdict and remedy in found.remedy, found
    assert is_healthy(findings) == all(each.verdict is Verdict.POOR for each in bad(findings))


def test_capabilities_and_limits_that_are_just_enough_are_well() -> None:
    enough = Facts(memlock_bytes=ARENA, hugepage_free=512, open_files=4096, hugetlb_cgroup_bytes=ARENA)
    assert not bad(examine(enough, arena_size_bytes=ARENA))
    assert bad(examine(enough, arena_size_bytes=ARENA + 1))
    assert not bad(examine(Facts(memlock_bytes=0, has_ipc_lock=True), arena_size_bytes=ARENA))


def test_the_machine_is_read_from_proc_and_sys(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemAvailable: 2048 kB\nHugePages_Total: 7\nHugePages_Free: 5\nHugePages_Rsvd: 2\n"
        "Hugepagesize: 2048 kB\n",
        "proc/self/status": "Name: x\nCapEff:\t0000000000004000\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "4096\n",
        "sys/fs/cgroup/a/memory.current": "1096\n",
        "sys/fs/cgroup/a/hugetlb.2MB.max": "max\n",
        "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
        "etc/nvme/hostnqn": "nqn\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = read_facts(root=tmp_path)
    assert (facts.hugepage_total, facts.hugepage_free, facts.memory_available_bytes) == (7, 3, 2048 << 10)
    assert facts.has_ipc_lock and facts.has_host_nqn and facts.shmem_thp == "never"
    assert (facts.memory_cgroup_bytes, facts.hugetlb_cgroup_bytes, facts.cpu_quota) == (3000, None, 1.5)
    nothing = read_facts(root=tmp_path / "none")
    assert (nothing.hugepage_total, nothing.has_host_nqn, nothing.cpu_quota) == (0, False, None)


def test_an_rpc_socket_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rpc.sock")
    with EmbeddedTarget(path, backend=MemoryBackend()):
        code = run(["doctor", "--arena", "1MiB", "--rpc", path, "--json"])
        found = json.loads(capsys.readouterr().out)
    assert keys_of(found) == documented("doctor")
    by_check = {each["check"]: each for each in found["findings"]}
    assert by_check[f"RPC socket {path}"]["verdict"] == "ok"
    assert by_check[f"pid namespace of {path}"]["found"] == f"its process is {os.getpid()}"
    assert code == (0 if found["is_ok"] else 4)
    assert run(["doctor", "--arena", "1MiB", "--rpc", path]) == 4
    assert "remedy: start that SPDK" in capsys.readouterr().out
    assert run(["doctor", "--arena", "much"]) == 2


def test_a_path_that_is_no_socket_is_said(tmp_path: Path) -> None:
    assert "is no socket" in socket_fault(str(tmp_path))
    assert "No such file" in socket_fault(str(tmp_path / "none"))
