"""Bytes written through Linux md raid0 over two of our namespaces are read through our mapping, and back."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.block.stripe import StripeDevice
from kvdev.clock import Deadline
from kvdev.initiator.host import HostIdentity
from kvdev.session import Session
from kvdev.testing.target import running_target
from tests.interop.conftest import Lab

pytestmark = pytest.mark.interop

HOST = HostIdentity.of("nqn.2024-01.io.example.kvdev:interop")
STRIP_SIZE_BYTES = 64 << 10
MEMBER_SIZE_BYTES = 16 << 20
AREA_SIZE_BYTES = 8 << 20

# The first area is what we wrote, the second one the guest writes; both are named by their SHA-256.
JOB = """set -ex
nvme connect -t tcp -a $ADDR -s $PORT -n $NQN --nr-io-queues=1
for nsid in 1 2; do
  n=0; until [ -b /dev/nvme0n$nsid ] || [ $n -ge 50 ]; do sleep 0.1; n=$((n + 1)); done
done
modprobe raid0
mdadm --build /dev/md0 --level=0 --chunk=64 --raid-devices=2 /dev/nvme0n1 /dev/nvme0n2
cat /proc/mdstat
echo ours $(dd if=/dev/md0 bs=1M count=8 iflag=direct | sha256sum)
dd if=/dev/urandom of=/tmp/area bs=1M count=8
dd if=/tmp/area of=/dev/md0 bs=32k seek=256 oflag=direct
sync
echo theirs $(sha256sum </tmp/area)
echo size $(cat /sys/block/md0/size)
mdadm --stop /dev/md0
nvme disconnect -n $NQN
"""


def test_raid0_when_md_and_we_share_members_then_both_read_what_the_other_wrote(
    lab: Lab, tmp_path: Path, rng: np.random.Generator
) -> None:
    job = tmp_path / "job.sh"
    job.write_text(JOB)
    area = rng.integers(0, 256, AREA_SIZE_BYTES, dtype=np.uint8)
    with (
        running_target(namespace_count=2, namespace_size_bytes=MEMBER_SIZE_BYTES) as target,
        Session(host=HOST) as kv,
    ):
        members = kv.open_members(f"vol:{target.uri}?nsid=1,{target.uri}?nsid=2")
        stripe = StripeDevice(members, strip_size_bytes=STRIP_SIZE_BYTES)
        write_blocks(stripe, 0, area, Deadline.after(30))
        text = lab.initiator(target.port, target.nqn, out=tmp_path / "out", job=job)
        block_count = AREA_SIZE_BYTES // stripe.block_size_bytes
        theirs = read_blocks(stripe, block_count, block_count, Deadline.after(30))
    said = {
        parts[0]: parts[1]
        for parts in map(str.split, text.splitlines())
        if len(parts) > 1 and parts[0] in ("ours", "theirs", "size")
    }
    assert said["ours"] == hashlib.sha256(area.tobytes()).hexdigest()
    assert said["theirs"] == hashlib.sha256(theirs.tobytes()).hexdigest()
    assert int(said["size"]) * 512 == stripe.size_bytes
