"""RoCEv2 between two QEMU guests: the Linux target in one, nvme-rdma and kvdev in the other.

The wire is a socket between the guests' network cards; each guest has the kernel's software RDMA device on it.
What one guest stored over RDMA is then read by this process over TCP, from the same subsystem.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvdev_tools.main import run
from tests.interop.conftest import LAB_SCRIPTS, Lab, Nvmet

pytestmark = pytest.mark.interop

MEMBER_COUNT = 4
MEMBER_MIB = 64
REQUEST_COUNT = 60 if os.environ.get("KVDEV_LONG") else 12
LIMIT_S = 1500
"""Of a guest that shares two cores with other things; alone it needs a tenth of that."""
TARGET_ADDRESS = "192.0.2.1"
COUNTERS = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
ROCE_PAYLOAD_BYTES = 4096

STEPS_PROGRAM = [sys.executable, str(LAB_SCRIPTS / "kvdev-steps.py")]
# The NumPy kernels, because compiling Numba's takes minutes under emulation.
JOB_HEAD = f"""set -eu
export HOME=/run TMPDIR=/run KVDEV_KERNELS=numpy PYTHONSAFEPATH=1 PYTHONPYCACHEPREFIX=BYTECODE
kvdev_steps() {{ {shlex.join(STEPS_PROGRAM)}; }}
counters() {{ echo "rxe $1 $(cat {COUNTERS}/sent_pkts) $(cat {COUNTERS}/rcvd_pkts)"; }}
grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
"""
TIMEOUT = "--timeout 600"
"""Of commands in a guest that may get a tenth of a processor."""
REPLAY_OPTIONS = f"--geometry small --requests {REQUEST_COUNT} --arena 4MiB --kill-halfway {TIMEOUT}"
REPLAY_STEP = f"""replay VOLUME#kv {REPLAY_OPTIONS} --json
"""
NVME_RDMA_JOB = f"""{JOB_HEAD}
nvme connect -t rdma -a {TARGET_ADDRESS} -s 4420 -n NQN --nr-io-queues=1 --keep-alive-tmo=120
n=0; until [ -b /dev/nvme0n{MEMBER_COUNT} ] || [ $n -ge 600 ]; do sleep 0.1; n=$((n + 1)); done
echo transport $(cat /sys/class/nvme/nvme0/transport)
counters before
kvdev_steps <<STEPS
volume create --name pool VOLUME {TIMEOUT}
namespace create VOLUME#kv --geometry small {TIMEOUT}
{REPLAY_STEP}STEPS
counters after
nvme disconnect -n NQN
"""


@dataclass(frozen=True)
class Replayed:
    """What a guest's job said: the replay's own document, and the packets of its RDMA device meanwhile."""

    text: str
    report: dict[str, Any]
    sent_packet_count: int
    received_packet_count: int


def replay_in_guest(
    lab: Lab, target: Nvmet, link: Path, folder: Path, *, job: str, volume: str, modules: str, **env: str
) -> Replayed:
    (folder / "job").mkdir()
    bytecode = str(folder / "bytecode")
    # Compiled here, where it is quick: the guest finds the files at the same path.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONSAFEPATH": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(STEPS_PROGRAM, env=environment, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=True)
    text = job.replace("VOLUME", volume).replace("NQN", target.nqn).replace("BYTECODE", bytecode)
    (folder / "job" / "job.sh").write_text(text)
    said = lab.hosted(folder / "job", out=folder / "out", link=link, modules=modules, limit_s=LIMIT_S, **env)
    counters = {
        line.split()[1]: [int(word) for word in line.split()[2:]]
        for line in said.splitlines()
        if line.startswith("rxe ")
    }
    sent, received = (
        after - before for before, after in zip(counters["before"], counters["after"], strict=True)
    )
    document, _ = json.JSONDecoder().raw_decode(said[said.index("\n{") + 1 :])
    return Replayed(said, document, sent, received)


def check_replay(replayed: Replayed, target: Nvmet, capsys: pytest.CaptureFixture[str]) -> None:
    """No wrong byte, all of it over RDMA, and the same pages are there over TCP."""
    report = replayed.report
    assert (report["mismatches"], report["page_errors"], report["kills"]) == (0, 0, 1)
    assert report["requests"] == REQUEST_COUNT
    assert report["pages_verified"] == report["pages_restored"] > 0
    assert report["stored_pages"] > 0
    # A packet carries at most the path's MTU: so many at least crossed the wire, in both directions.
    assert replayed.sent_packet_count >= report["bytes_written"] // ROCE_PAYLOAD_BYTES
    assert replayed.received_packet_count >= report["bytes_restored"] // ROCE_PAYLOAD_BYTES
    capsys.readouterr()
    code = run(["page", "verify", f"vol+{target.uri()}#kv", "--json"])
    verified = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (verified["pages_checked"], verified["pages_damaged"]) == (report["stored_pages"], 0)


def test_nvme_rdma_when_replay_is_killed_and_resumed_in_a_guest_then_every_page_is_right_there_and_over_tcp(
    rdma_lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link.sock"
    devices = ",".join(f"file:/dev/nvme0n{index + 1}" for index in range(MEMBER_COUNT))
    with rdma_lab.nvmet(namespaces=MEMBER_COUNT, mib=MEMBER_MIB, link=link) as target:
        replayed = replay_in_guest(
            rdma_lab,
            target,
            link,
            tmp_path,
            job=NVME_RDMA_JOB,
            volume=f"vol:{devices}",
            modules="nvme-rdma",
            APPEND="nvme_core.io_timeout=600",
        )
        assert "transport rdma" in replayed.text
        check_replay(replayed, target, capsys)
    dmesg = (tmp_path / "out" / "dmesg").read_text()
    for word in ("I/O error", "timeout", "reconnect"):
        assert not [line for line in dmesg.splitlines() if "nvme nvme0" in line and word in line]
