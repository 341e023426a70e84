"""SPDK's target killed and started again, or stopped, under a replay of ours: it goes on, and every page is right.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later, started without huge pages).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from kvdev.clock import Deadline
from kvdev.testing.killable import KillableTarget
from spdk_rpc import Client, RpcTransportError
from tests.fault.test_recovery_replay import replayed
from tests.interop.conftest import missing

pytestmark = pytest.mark.interop

START_TIMEOUT_S = 120.0
CYCLE_COUNT = 100 if os.environ.get("KVDEV_LONG") else 3


class KillableSpdk(KillableTarget):
    """``spdk_tgt`` on the same files, with the same configuration each time it is started."""

    def start(self) -> None:
        is_bdev = [call["method"].startswith("bdev_") for call in self.calls]
        bdevs = [call for call, is_one in zip(self.calls, is_bdev, strict=True) if is_one]
        others = [call for call, is_one in zip(self.calls, is_bdev, strict=True) if not is_one]
        parts = [{"subsystem": "bdev", "config": bdevs}, {"subsystem": "nvmf", "config": others}]
        config = self.folder / "spdk.json"
        config.write_text(json.dumps({"subsystems": parts}))
        self.rpc_socket.unlink(missing_ok=True)
        arguments = [os.environ["KVDEV_SPDK_TGT"], "--no-pci", "--no-huge", "-s", "1024", "-m", "0x1"]
        arguments += ["--disable-cpumask-locks", "-S", str(self.folder), "-r", str(self.rpc_socket)]
        arguments += ["--json", str(config)]
        with (self.folder / "spdk.log").open("ab") as log:
            self.child = subprocess.Popen(arguments, stdout=log, stderr=log)
        limit, pause = Deadline.after(START_TIMEOUT_S), threading.Event()
        while True:
            with contextlib.suppress(RpcTransportError), Client(str(self.rpc_socket), timeout_s=30) as client:
                client.call("framework_wait_init")
                return
            limit.check("start of spdk_tgt")
            assert self.child.poll() is None, (self.folder / "spdk.log").read_text()[-2000:]
            pause.wait(0.1)


@pytest.mark.parametrize("is_paused", [False, True])
def test_replay_when_spdk_is_killed_or_stopped_then_it_goes_on_and_no_page_is_wrong(
    tmp_path: Path, is_paused: bool
) -> None:
    if "KVDEV_SPDK_TGT" not in os.environ:
        missing("KVDEV_SPDK_TGT names no spdk_tgt")
    with KillableSpdk(tmp_path, namespace_count=2, namespace_size_bytes=64 << 20) as target:
        # SPDK holds hosts to their keep alive to the millisecond; ours may be late on a busy machine.
        report = replayed(target, tmp_path, kill_count=CYCLE_COUNT, is_paused=is_paused, keep_alive_ms=4000)
        assert report["mismatches"] == report["page_errors"] == 0
        assert report["pages_restored"] > 0
