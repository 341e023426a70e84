"""The Linux kernel's initiator in a QEMU guest while our target is killed, started again, stopped and let go on.

Also what it finds in our discovery log.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.testing.killable import KillableTarget
from kvdev.testing.recovery import until
from kvdev.testing.target import running_target
from spdk_rpc import Client, SpdkRpcError
from tests.interop.conftest import Lab

pytestmark = pytest.mark.interop

IS_LONG = bool(os.environ.get("KVDEV_LONG"))
CYCLE_COUNT = int(os.environ.get("KVDEV_CYCLES", "100" if IS_LONG else "4"))
LIMIT_S = 300 + 30 * CYCLE_COUNT
"""A cycle takes the emulated guest some seconds."""
PROGRESS_S = 240.0
OPERATION_COUNT = 20
"""Commands of the guest between two faults."""
STOPS_S = (0.2, 1.0, 7.0)
"""The last is longer than the guest's keep alive timeout: it gives up on the controller meanwhile."""
LINUX_HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
"""Of the lab's initiator."""

# Each round writes other bytes to the same blocks and reads them back; the director says when it is enough.
JOB = """set -e
nvme connect -t tcp -a $ADDR -s $PORT -n $NQN --nr-io-queues=2 --keep-alive-tmo=5 \\
    --reconnect-delay=1 --ctrl-loss-tmo=3600 OPTIONS
n=0; until [ -b /dev/nvme0n1 ] || [ $n -ge 100 ]; do sleep 0.1; n=$((n + 1)); done
round=0
while :; do
  round=$((round + 1))
  fio --name=v --filename=/dev/nvme0n1 --rw=randwrite --bsrange=4k-64k --size=8m --direct=1 --ioengine=libaio \\
      --iodepth=8 --verify=crc32c --verify_fatal=1 --randseed=$round --output-format=json+ --output=/out/verify.json
  [ "$(nc $ADDR DIRECTOR </dev/null)" = go ] || break
done
echo "rounds done: $round"
nvme disconnect -n $NQN
"""


class Director:
    """Tells each who connects to go on, until it is told to say stop."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.answer = b"go\n"
        self.asked_count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked_count += 1
                connection.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def operation_count(target: KillableTarget) -> int:
    """Reads and writes the target has carried out since it was started; 0 while it cannot say."""
    try:
        with Client(str(target.rpc_socket), timeout_s=10) as client:
            stats: Any = client.call("bdev_get_iostat", {"names": ["b0"]})
    except SpdkRpcError:
        return 0
    (bdev,) = stats["bdevs"]
    return int(bdev["num_read_ops"]) + int(bdev["num_write_ops"])


def cycle(target: KillableTarget, rng: np.random.Generator, guest: Future[str]) -> str:
    """One fault, and the guest going on after it; what it was."""
    if rng.integers(0, 2):
        what, before = "kill", 0
        target.kill()
        threading.Event().wait(float(rng.uniform(0.0, 0.5)))
        target.start()
    else:
        stop_s = float(rng.choice(STOPS_S, p=[0.5, 0.35, 0.15]))
        what, before = f"stop {stop_s:g} s", operation_count(target)
        target.pause()
        threading.Event().wait(stop_s)
        target.resume()
    until(
        lambda: operation_count(target) >= before + OPERATION_COUNT or guest.done(),
        f"the guest goes on after {what}",
        seconds=PROGRESS_S,
    )
    threading.Event().wait(float(rng.uniform(0.0, 1.0)))
    return what


CASES = [(512, "--hdr-digest --data-digest"), (4096, "")]


@pytest.mark.parametrize(("block_size_bytes", "options"), CASES)
def test_linux_when_our_target_is_killed_and_stopped_then_fio_verifies(
    lab: Lab, tmp_path: Path, rng: np.random.Generator, seed: int, block_size_bytes: int, options: str
) -> None:
    director, counts = Director(), Counter[str]()
    job = tmp_path / "job.sh"
    job.write_text(JOB.replace("OPTIONS", options).replace("DIRECTOR", str(director.port)))
    with (
        KillableTarget(tmp_path, namespace_size_bytes=32 << 20, block_size_bytes=block_size_bytes) as target,
        ThreadPoolExecutor(1) as pool,
    ):
        out = tmp_path / "out"
        guest = pool.submit(lab.initiator, target.ports[0], target.nqn, out=out, job=job, limit_s=LIMIT_S)
        try:
            until(
                lambda: operation_count(target) > 0 or guest.done(), "the guest is there", seconds=PROGRESS_S
            )
            while counts.total() < CYCLE_COUNT and not guest.done():
                counts[cycle(target, rng, guest)] += 1
        finally:
            director.answer = b"stop\n"
        text = guest.result(LIMIT_S)
        director.close()
    assert counts.total() == CYCLE_COUNT, f"the guest ended after {dict(counts)}: {text[-2000:]}"
    rounds = re.search(r"^rounds done: (\d+)$", text, re.M)
    assert rounds is not None, text[-2000:]
    dmesg = (out / "dmesg").read_text()
    reconnected = len(re.findall(r"nvme.*[Ss]uccessfully reconnected", dmesg))
    print(
        f"seed {seed}: {dict(counts)}, {rounds[1]} rounds of 8 MiB, {reconnected} times reconnected "
        f"({block_size_bytes} bytes a block, {options or 'no digests'})"
    )
    assert reconnected >= counts["kill"]
    last: Any = json.loads((out / "verify.json").read_text())["jobs"][0]
    assert last["error"] == 0 and last["read"]["io_bytes"] >= 8 << 20
    for word in ("I/O error", "digest error"):
        assert not [line for line in dmesg.splitlines() if word in line]


DISCOVERY_JOB = """set -e
nvme discover -t tcp -a $ADDR -s $PORT -o json >/out/log.json
nvme discover -t tcp -a $ADDR -s $PORT
"""


def test_linux_when_it_discovers_then_the_log_is_what_this_host_may_connect_to(
    lab: Lab, tmp_path: Path
) -> None:
    job = tmp_path / "job.sh"
    job.write_text(DISCOVERY_JOB)
    open_nqn, allowed_nqn = "nqn.2024-01.io.example:open", "nqn.2024-01.io.example:allowed"
    with running_target(nqn=open_nqn) as target:
        ports = {str(target.port), str(target.add_port())}
        target.add_subsystem(allowed_nqn, hosts=[LINUX_HOST_NQN])
        target.add_subsystem("nqn.2024-01.io.example:hidden", hosts=["nqn.2024-01.io.example:other"])
        text = lab.initiator(target.port, open_nqn, out=tmp_path / "out", job=job)
        assert target.service.defect_count == target.service.fault_log_count == 0
    log: Any = json.loads((tmp_path / "out" / "log.json").read_text())
    records = [each for each in log["records"] if each["subtype"] == "nvme subsystem"]
    assert sorted((each["subnqn"], each["trsvcid"]) for each in records) == sorted(
        [(open_nqn, port) for port in ports] + [(allowed_nqn, str(target.port))]
    )
    for record in records:
        assert (record["trtype"], record["adrfam"], record["traddr"]) == ("tcp", "ipv4", "127.0.0.1")
        # nvme-cli has no word for both of TREQ's fields at once, so that one is not looked at here.
        assert record["sectype"] == "none", record
    assert f"Discovery Log Number of Records {len(log['records'])}," in text
    assert "hidden" not in text
