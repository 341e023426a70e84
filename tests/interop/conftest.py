"""Real peers for the interop tests: the Linux kernel's NVMe/TCP target and initiator in QEMU guests.

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
BUILD_LIMIT_S = 600
BOOT_LIMIT_S = 180


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
        self, *, namespaces: int, mib: int, block_sizes: str = "512", ports: int = 1
    ) -> Iterator[Nvmet]:
        """A Linux target, gone at the end."""
        nqn = "nqn.2024-01.lab:nvmet"
        port = free_port()
        env = {**self.env, "BS": block_sizes, "PORTS": str(ports), "NQN": nqn}
        run_script("run-nvmet.sh", str(port), str(namespaces), str(mib), env=env, timeout_s=BOOT_LIMIT_S)
        try:
            yield Nvmet(port, nqn, self)
        finally:
            run_script("run-nvmet.sh", "stop", str(port), env=self.env, timeout_s=60)

    def initiator(
        self, port: int, nqn: str, *, out: Path, job: Path | None = None, limit_s: int = 300
    ) -> str:
        """Run a job (the smoke job if none) on the Linux initiator against 127.0.0.1:``port``."""
        args = [str(port), nqn, str(job) if job else "", str(out)]
        env = {**self.env, "LIMIT_S": str(limit_s)}
        return run_script("run-initiator.sh", *args, env=env, timeout_s=limit_s + 120)


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
    directory = Path(os.environ.get("LAB_AUTH", Path(tempfile.gettempdir()) / "kvdev-lab-auth"))
    return _built(directory, {"KERNEL_META": "linux-image-6.12-amd64"})


def _built(directory: Path, extra: dict[str, str]) -> Lab:
    if not os.environ.get("KVDEV_INTEROP"):
        missing("guests take minutes: `make interop`, or set KVDEV_INTEROP=1")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [name for name in PACKAGES if shutil.which(name, path=path) is None]
    if absent:
        packages = " ".join(PACKAGES[name] for name in absent)
        missing(f"no {', '.join(absent)} here: apt-get install --no-install-recommends {packages}")
    if not (directory / "initiator.img").exists() and not IS_REQUIRED:
        missing(f"no guest images in {directory}: `make interop` builds them (it downloads a kernel package)")
    mdadm = shutil.which("mdadm", path=path) or "mdadm"
    env = {"LAB": str(directory), "EXTRA_BINS": mdadm, "PATH": path, **extra}
    run_script("mk-initramfs.sh", env=env, timeout_s=BUILD_LIMIT_S)
    return Lab(directory)
