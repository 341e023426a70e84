"""Reservations, compare, verify, copy and fused pairs between us and others: nvme-cli on Linux, SPDK's target."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.block.device import write_blocks
from kvdev.block.reservation import ReservationType
from kvdev.clock import Deadline
from kvdev.errors import CommandError, UnsupportedError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.session import Session
from kvdev.testing.target import running_target
from tests.interop.conftest import Lab
from tests.interop.test_spdk_host import spdk

pytestmark = pytest.mark.interop

BLOCK = 4096
OLD, NEW = bytes(BLOCK), b"\x5a" * BLOCK
LINUX_JOB = """set -ex
nvme connect -t tcp -a $ADDR -s $PORT -n $NQN --nr-io-queues=2 --keep-alive-tmo=30
n=0; until [ -b /dev/nvme0n1 ] || [ $n -ge 50 ]; do sleep 0.1; n=$((n + 1)); done
d=/dev/nvme0n1
nvme id-ctrl /dev/nvme0 | grep -E '^(oncs|fuses|acwu|ocfs) '
nvme id-ns $d -n 1 | grep -E '^(rescap|nmic|mssrl|mcl|msrc|dlfeat) '
dd if=/dev/urandom of=/tmp/a bs=4096 count=8 2>/dev/null
dd if=/tmp/a of=$d bs=4096 oflag=direct 2>/dev/null
nvme compare $d -s 0 -c 7 -z 32768 -d /tmp/a
dd if=/dev/urandom of=/tmp/b bs=4096 count=8 2>/dev/null
if nvme compare $d -s 0 -c 7 -z 32768 -d /tmp/b 2>/tmp/err; then exit 1; fi
nvme verify $d -n 1 -s 0 -c 31
if nvme verify $d -n 1 -s 8192 -c 0 2>/tmp/err; then exit 1; fi
nvme copy $d -n 1 --sdlba=100 --slbs=4,0 --blocks=3,3
dd if=$d of=/tmp/c bs=4096 skip=100 count=8 iflag=direct 2>/dev/null
dd if=/tmp/a bs=4096 skip=4 count=4 2>/dev/null >/tmp/want
dd if=/tmp/a bs=4096 count=4 2>/dev/null >>/tmp/want
cmp /tmp/c /tmp/want
nvme write-zeroes $d -n 1 -s 100 -c 7
dd if=$d bs=4096 skip=100 count=8 iflag=direct 2>/dev/null | tr -d '\\000' | wc -c | grep -x 0
nvme dsm $d -n 1 -d -s 0 -b 8
nvme resv-report $d -n 1 -e
nvme resv-register $d -n 1 --nrkey=0x11 --rrega=0
nvme resv-acquire $d -n 1 --crkey=0x11 --rtype=5 --racqa=0
nvme resv-report $d -n 1 -e
if nvme resv-acquire $d -n 1 --crkey=0x12 --rtype=5 --racqa=0 2>/tmp/err; then exit 1; fi
dd if=/tmp/a of=$d bs=4096 oflag=direct 2>/dev/null
nvme resv-register $d -n 1 --crkey=0x11 --nrkey=0x22 --rrega=2
nvme resv-acquire $d -n 1 --crkey=0x22 --prkey=0 --rtype=1 --racqa=1
nvme resv-release $d -n 1 --crkey=0x22 --rtype=1 --rrela=0
nvme resv-release $d -n 1 --crkey=0x22 --rrela=1
nvme resv-report $d -n 1 -e
nvme resv-notif-log /dev/nvme0
nvme disconnect -n $NQN
"""


def soon() -> Deadline:
    return Deadline.after(30)


def test_linux_compares_verifies_copies_and_reserves_on_our_target(lab: Lab, tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text(LINUX_JOB)
    with running_target(namespace_count=1, namespace_size_bytes=32 << 20) as target:
        # The job stops at the first command that does not do what it says.
        lab.initiator(target.port, target.nqn, out=tmp_path / "out", job=job)
        assert target.service.defect_count == target.service.fault_log_count == 0


def session(number: int) -> Session:
    host_id = str(uuid.UUID(int=number))
    return Session(host=HostIdentity.of(f"nqn.2014-08.org.nvmexpress:uuid:{host_id}", host_id=host_id))


@contextlib.contextmanager
def spdk_namespace(folder: Path, *, ptpl_file: str = "") -> Iterator[str]:
    """A malloc namespace of SPDK's target; its URI."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    nqn = "nqn.2016-06.io.spdk:resv"
    with spdk(folder) as client:
        client.call("nvmf_create_transport", {"trtype": "TCP"})
        bdev = {"name": "M", "num_blocks": 4096, "block_size": BLOCK, "uuid": str(uuid.UUID(int=5))}
        client.call("bdev_malloc_create", bdev)
        client.call("nvmf_create_subsystem", {"nqn": nqn, "allow_any_host": True})
        namespace = {"bdev_name": "M", **({"ptpl_file": ptpl_file} if ptpl_file else {})}
        client.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": namespace})
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
        client.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address})
        yield f"tcp://127.0.0.1:{port}/{nqn}?nsid=1"


@pytest.mark.skipif(not os.environ.get("KVDEV_SPDK_TGT"), reason="KVDEV_SPDK_TGT names no spdk_tgt")
def test_we_compare_and_write_and_reserve_on_spdk(tmp_path: Path) -> None:
    ptpl = tmp_path / "ptpl.json"
    rtype = ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS
    with spdk_namespace(tmp_path, ptpl_file=str(ptpl)) as uri, session(1) as one, session(2) as two:
        first, second = one.open_device(uri), two.open_device(uri)
        assert isinstance(first, NvmeNamespace) and first.reservations and second.reservations
        assert first.compare_and_write(3, OLD, NEW, soon())
        assert not first.compare_and_write(3, OLD, NEW, soon())
        assert first.compare(3, NEW, soon()) and not first.compare(3, OLD, soon())
        first.copy(100, [(3, 1), (0, 1)], soon())
        assert first.compare(100, NEW + OLD, soon())
        with pytest.raises(UnsupportedError, match="verify"):
            first.verify(0, 1, soon())
        first.reservations.register(0xA, soon(), is_persistent=True)
        first.reservations.acquire(0xA, rtype, soon())
        with pytest.raises(CommandError, match="reservation conflict"):
            write_blocks(second, 0, NEW, soon())
        status = second.reservations.report(soon())
        assert status.reservation is rtype and status.is_persistent
        assert [(each.host_id, each.key) for each in status.registrants] == [(uuid.UUID(int=1).bytes, 0xA)]
        second.reservations.register(0xB, soon())
        second.reservations.preempt(0xB, 0xA, rtype, soon(), aborts=False)
        with pytest.raises(CommandError, match="reservation conflict"):
            write_blocks(first, 0, NEW, soon())
        second.reservations.clear(0xB, soon())
        assert not first.reservations.report(soon()).registrants


@pytest.mark.skipif(not os.environ.get("KVDEV_SPDK_TGT"), reason="KVDEV_SPDK_TGT names no spdk_tgt")
def test_reservations_that_spdk_saved_are_taken_over_by_our_target(tmp_path: Path) -> None:
    ptpl = tmp_path / "ptpl.json"
    rtype = ReservationType.EXCLUSIVE_ACCESS
    with spdk_namespace(tmp_path, ptpl_file=str(ptpl)) as uri, session(1) as one:
        device = one.open_device(uri)
        assert device.reservations
        device.reservations.register(0xA, soon(), is_persistent=True)
        device.reservations.acquire(0xA, rtype, soon())
    with running_target() as target, session(2) as two:
        target.model.remove_namespace(target.nqn, 1)
        target.model.add_namespace(
            target.nqn, bdev_name=target.bdev_names[0], nsid=1, uuid=uuid.UUID(int=5), ptpl_file=str(ptpl)
        )
        other = two.open_device(f"{target.uri}?nsid=1")
        assert other.reservations
        status = other.reservations.report(soon())
        assert status.reservation is rtype and [each.key for each in status.registrants] == [0xA]
        with pytest.raises(CommandError, match="reservation conflict"):
            write_blocks(other, 0, NEW, soon())
