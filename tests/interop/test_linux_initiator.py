"""The Linux kernel's NVMe/TCP initiator in a QEMU guest against our embedded target."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvdev.testing.target import running_target
from tests.interop.conftest import Lab

pytestmark = pytest.mark.interop

JOB_HEAD = """set -ex
nvme connect -t tcp -a $ADDR -s $PORT -n $NQN --nr-io-queues=2 --keep-alive-tmo=30 OPTIONS
for nsid in 1 2; do
  n=0; until [ -b /dev/nvme0n$nsid ] || [ $n -ge 50 ]; do sleep 0.1; n=$((n + 1)); done
done
"""
DIGEST_JOB = (
    JOB_HEAD
    + """
nvme id-ctrl /dev/nvme0
nvme id-ns /dev/nvme0n1
nvme ns-descs /dev/nvme0n1
nvme smart-log /dev/nvme0
nvme error-log /dev/nvme0 -e 1
for nsid in 1 2; do
  fio --name=v --filename=/dev/nvme0n$nsid --rw=randwrite --bsrange=4k-128k --size=8m --direct=1 \\
      --ioengine=libaio --iodepth=8 --verify=crc32c --output-format=json+ --output=/out/verify-$nsid.json
done
dd if=/dev/urandom of=/dev/nvme0n1 bs=64k count=16 oflag=direct
nvme write-zeroes /dev/nvme0n1 -s 8 -c 15
bs=$(cat /sys/block/nvme0n1/queue/logical_block_size)
dd if=/dev/nvme0n1 bs=$bs skip=8 count=16 iflag=direct | tr -d '\\000' | wc -c | grep -x 0
nvme dsm /dev/nvme0n1 -d -s 32 -b 8
nvme flush /dev/nvme0n1 -n 1
nvme disconnect -n $NQN
"""
)


def verified(path: Path) -> None:
    """fio's own result: it read back what it wrote."""
    job = json.loads(path.read_text())["jobs"][0]
    assert job["error"] == 0
    assert job["write"]["io_bytes"] > 0
    assert job["read"]["io_bytes"] > 0


def test_linux_when_smoke_job_then_discovers_reads_writes_and_verifies(lab: Lab, tmp_path: Path) -> None:
    with running_target(namespace_count=1, namespace_size_bytes=64 << 20) as target:
        text = lab.initiator(target.port, target.nqn, out=tmp_path / "out")
    verified(tmp_path / "out" / "verify.json")
    assert "(no discovery controller)" not in text
    assert f"subnqn:  {target.nqn}" in text


# Each case boots a guest: the other two combinations belong to the full counts.
CASES = [(512, "--hdr-digest --data-digest"), (4096, "")]
if os.environ.get("KVDEV_LONG"):
    CASES += [(512, ""), (4096, "--hdr-digest --data-digest")]


@pytest.mark.parametrize(("block_size_bytes", "options"), CASES)
def test_linux_when_digests_and_block_sizes_then_verifies(
    lab: Lab, tmp_path: Path, options: str, block_size_bytes: int
) -> None:
    job = tmp_path / "job.sh"
    job.write_text(DIGEST_JOB.replace("OPTIONS", options))
    with running_target(
        namespace_count=2, namespace_size_bytes=32 << 20, block_size_bytes=block_size_bytes
    ) as target:
        lab.initiator(target.port, target.nqn, out=tmp_path / "out", job=job)
    for nsid in (1, 2):
        verified(tmp_path / "out" / f"verify-{nsid}.json")
    dmesg = (tmp_path / "out" / "dmesg").read_text()
    for word in ("I/O error", "timeout", "digest error", "failed"):
        assert not [line for line in dmesg.splitlines() if "nvme" in line and word in line]
