"""Real peers for the interop tests: the Linux kernel's NVMe/TCP and RoCEv2 target and initiator in QEMU guests.

They take minutes, so they run only when ``KVDEV_INTEROP`` is set. Without the programs or images a test skips
and names what is missing; ``KVDEV_INTEROP=require`` (``make interop``) turns that into a failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

LAB_SCRIPTS = Path(__file__).parent / "lab"
IS_REQUIRED = os.environ.get("KVDEV_INTEROP") == "require"
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "nvme": "nvme-cli",
    "fio": "fio",
    "cpio": "cpio",
    "depmod": "kmod",
    "mdadm": "mdadm",
    "ldd": "libc-bin",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
}
RDMA_KERNEL_META = "linux-image-amd64"
"""Debian's kernels for clouds have no software RDMA device."""
RDMA_MODULES = "9p 9pnet_virtio overlay rdma_rxe crc32_generic nvmet-rdma nvme-rdma rdma_ucm ib_uverbs"
RDMA_PROGRAMS = {"rdma": "iproute2"}
BUILD_LIMIT_S = 600
BOOT_S = 120
"""Longest boot of a guest that is not said to hang."""
BOOT_LIMIT_S = 3 * BOOT_S + 60
"""A guest that hangs while it boots is started again, twice at most: see lab/guest.sh."""


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where real peers are required."""
    if IS_REQUIRED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def run_script(script: str, *args: str, env: dict[str, str] | None = None, timeout_s: float) -> str:
    """Output of a lab script; fails the test when it fails."""
    done = subprocess.run(
        ["sh", str(LAB_SCRIPTS / script), *args],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        pytest.fail(
            f"{script} {' '.join(args)}: exit {done.returncode}\n{done.stdout[-6000:]}", pytrace=False
        )
    return done.stdout


@dataclass(frozen=True)
class Nvmet:
    """A running Linux target on the loopback."""

    port: int
    nqn: str
    lab: Lab

    def shell(self, command: str) -> str:
        """Run a command in the guest and return what it says."""
        return run_script("run-nvmet.sh", "sh", str(self.port), command, env=self.lab.env, timeout_s=60)

    def uri(self, nsid: int | None = None, options: str = "") -> str:
        query = "&".join(part for part in (f"nsid={nsid}" if nsid else "", options) if part)
        return f"tcp://127.0.0.1:{self.port}/{self.nqn}" + (f"?{query}" if query else "")


@dataclass(frozen=True)
class Lab:
    """The guests' kernel and images."""

    directory: Path

    @property
    def env(self) -> dict[str, str]:
        return {"LAB": str(self.directory)}

    @contextmanager
    def nvmet(
        self, *, namespaces: int, mib: int, block_sizes: str = "512", ports: int = 1, link: Path | None = None
    ) -> Iterator[Nvmet]:
        """A Linux target, gone at the end; with ``link``, a socket's path, over RoCEv2 to one guest too."""
        nqn = "nqn.2024-01.lab:nvmet"
        port = free_port()
        env = {**self.env, "BS": block_sizes, "PORTS": str(ports), "NQN": nqn, "BOOT_S": str(BOOT_S)}
        if link is not None:
            env["LINK"] = str(link)
        try:
            run_script("run-nvmet.sh", str(port), str(namespaces), str(mib), env=env, timeout_s=BOOT_LIMIT_S)
            yield Nvmet(port, nqn, self)
        finally:
            run_script("run-nvmet.sh", "stop", str(port), env=self.env, timeout_s=60)

    def initiator(
        self, port: int, nqn: str, *, out: Path, job: Path | None = None, limit_s: int = 300
    ) -> str:
        """Run a job (the smoke job if none) on the Linux initiator against 127.0.0.1:``port``."""
        args = [str(port), nqn, str(job) if job else "", str(out)]
        env = {**self.env, "LIMIT_S": str(limit_s), "BOOT_S": str(BOOT_S)}
        return run_script("run-initiator.sh", *args, env=env, timeout_s=limit_s + 120 + BOOT_LIMIT_S)

    def hosted(self, folder: Path, *, out: Path, link: Path, modules: str, limit_s: int, **env: str) -> str:
        """Run ``folder``'s job in a guest with this host's file system, on the other end of a target's link."""
        env = {**self.env, "LINK": str(link), "MODS": modules, "LIMIT_S": str(limit_s), **env}
        env["BOOT_S"] = str(BOOT_LIMIT_S)  # once: the link does not outlive the guest
        return run_script(
            "run-hosted.sh", str(folder), str(out), env=env, timeout_s=limit_s + 120 + BOOT_LIMIT_S
        )


def free_port() -> int:
    """A port nobody listens on now; the guests cannot be given port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The lab, its images built where that is asked for."""
    return _built(Path(os.environ.get("LAB", Path(tempfile.gettempdir()) / "kvdev-lab")), {})


@pytest.fixture(scope="session")
def auth_lab() -> Lab:
    """A lab whose kernel has DH-HMAC-CHAP for NVMe, host and target, as Debian's older one has not."""
    if not IS_REQUIRED and not os.environ.get("KVDEV_LONG"):
        missing("guests of a second, newer kernel: `make interop`, or set KVDEV_LONG=1 too")
    directory = Path(os.environ.get("LAB_AUTH", Path(tempfile.gettempdir()) / "kvdev-lab-auth"))
    return _built(directory, {"KERNEL_META": "linux-image-6.12-amd64"})


@pytest.fixture(scope="session")
def rdma_lab() -> Lab:
    """A lab whose kernel has RoCEv2 in software; built here, because no other test needs it."""
    path = _path_with({**PACKAGES, **RDMA_PROGRAMS})
    abilities = subprocess.run(
        ["qemu-system-x86_64", "-device", "help"], capture_output=True, text=True, timeout=60, check=False
    )
    if "virtio-9p-pci" not in abilities.stdout:
        missing("QEMU here is built without virtio-9p-pci, through which the guest sees this host's files")
    directory = Path(os.environ.get("LAB_RDMA", Path(tempfile.gettempdir()) / "kvdev-lab-rdma"))
    extra = {
        "KERNEL_META": RDMA_KERNEL_META,
        "EXTRA_MODS": RDMA_MODULES,
        "BOTH_BINS": shutil.which("rdma", path=path) or "rdma",
    }
    return _built(directory, extra)


def _path_with(programs: dict[str, str]) -> str:
    """Skip where guests are not asked for or a program (name, package) is missing; the PATH that has them."""
    if not os.environ.get("KVDEV_INTEROP"):
        missing("guests take minutes: `make interop`, or set KVDEV_INTEROP=1")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [name for name in programs if shutil.which(name, path=path) is None]
    if absent:
        packages = " ".join(programs[name] for name in absent)
        missing(f"no {', '.join(absent)} here: apt-get install --no-install-recommends {packages}")
    return path


def _built(directory: Path, extra: dict[str, str]) -> Lab:
    """The lab in ``directory``, its images built where there are none; what cannot be had makes its tests skip."""
    path = _path_with(PACKAGES)
    mdadm = shutil.which("mdadm", path=path) or "mdadm"
    env = {**os.environ, "LAB": str(directory), "EXTRA_BINS": mdadm, "PATH": path, **extra}
    done = subprocess.run(
        ["sh", str(LAB_SCRIPTS / "mk-initramfs.sh")],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        missing(f"no guest images to be had in {directory}: {done.stderr.strip()[-300:]}")
    return Lab(directory)
