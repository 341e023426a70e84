"""SPDK's own programs as hosts of the embedded target: spdk_nvme_identify and spdk_nvme_perf.

They are looked for beside the spdk_tgt that KVDEV_SPDK_TGT names (26.05 or later).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kvdev.testing.target import RunningTarget, running_target
from tests.interop.conftest import missing
from tests.interop.spdk import spdk_binary

pytestmark = pytest.mark.interop

RUN_TIMEOUT_S = 180.0
SECONDS = os.environ.get("KVDEV_SPDK_SECONDS", "1")
"""How long each pattern of spdk_nvme_perf runs; more of it for figures."""
COLUMNS = ("iops", "mib_per_s", "average_us", "min_us", "max_us")


def run_program(name: str, *arguments: str) -> str:
    """What it says; the test fails when it ends with another code than 0."""
    binary = Path(spdk_binary()).with_name(name)
    if not binary.exists():
        missing(f"no {name} beside the spdk_tgt that KVDEV_SPDK_TGT names: build SPDK's apps")
    command = [str(binary), "--no-huge", *arguments]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stdout[-4000:]}"
    return done.stdout


HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:33333333-3333-3333-3333-333333333333"


def transport_id(target: RunningTarget) -> str:
    """With a host's name: spdk_nvme_perf connects without one otherwise, which the specification does not allow."""
    address = f"traddr:{target.address} trsvcid:{target.port} subnqn:{target.nqn}"
    return f"hostnqn:{HOST_NQN} trtype:TCP adrfam:IPv4 {address}"


def check_target(target: RunningTarget) -> None:
    """It found nothing wrong with what it was sent, and nothing of its own went wrong."""
    assert target.service.defect_count == 0
    assert target.service.fault_log_count == 0


@pytest.mark.parametrize("block_size_bytes", [512, 4096])
def test_identify_tells_what_the_target_is(block_size_bytes: int) -> None:
    with running_target(namespace_count=2, block_size_bytes=block_size_bytes) as target:
        shown = run_program("spdk_nvme_identify", "-r", transport_id(target))
        check_target(target)
    fields: dict[str, str] = {}
    for line in shown.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    assert fields["Model Number"] == "kvdev embedded target"
    assert fields["Serial Number"] == "KVDEV0000000001"
    assert fields["NVMe Specification Version (Identify)"].startswith(("1.", "2."))
    assert re.findall(r"^Namespace ID:(\d+)", shown, re.MULTILINE) == ["1", "2"]
    blocks = (16 << 20) // block_size_bytes
    assert re.findall(r"^Size \(in LBAs\): +(\d+)", shown, re.MULTILINE) == [str(blocks)] * 2
    assert f"LBA Format #00: Data Size: {block_size_bytes:>5}" in shown


@pytest.mark.parametrize("digests", [(), ("-H", "-I")], ids=["plain", "digests"])
@pytest.mark.parametrize(
    ("pattern", "size", "depth"),
    [
        ("randread", 4096, 1),
        ("randread", 4096, 32),
        ("randwrite", 4096, 32),
        ("read", 131072, 8),
        ("write", 131072, 8),
        ("rw", 131072, 32),
        ("read", 1 << 20, 8),
        ("write", 1 << 20, 8),
    ],
)
def test_perf_runs_without_an_error(
    pattern: str, size: int, depth: int, digests: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with running_target(namespace_count=1, namespace_size_bytes=64 << 20) as target:
        arguments = [
            "-q",
            str(depth),
            "-o",
            str(size),
            "-w",
            pattern,
            "-t",
            SECONDS,
            "-s",
            "512",
            "-c",
            "0x2",
        ]
        arguments += ["-M", "50"] if pattern == "rw" else []
        shown = run_program("spdk_nvme_perf", *arguments, *digests, "-r", transport_id(target))
        check_target(target)
    total = re.search(r"^Total +: +([\d. ]+)$", shown, re.MULTILINE)
    assert total, shown[-3000:]
    figures = dict(zip(COLUMNS, map(float, total.group(1).split()), strict=True))
    assert figures["iops"] > 0
    assert "completed with error" not in shown, shown[-3000:]
    with capsys.disabled():
        kind = "header and data digest" if digests else "no digest"
        print(
            f"\nspdk_nvme_perf {pattern} {size} depth {depth}, {kind}: {figures['iops']:.0f} IOPS, "
            f"{figures['mib_per_s'] * 1.048576 / 1000:.2f} GB/s, {figures['average_us']:.0f} us on average"
        )
