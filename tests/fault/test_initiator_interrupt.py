"""Ctrl-C while a target does not answer: the process ends at once, in order, whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys
import threading
from kvdev.block.device import read_blocks
from kvdev.clock import Deadline
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.testing.controller import ControllerScript
from kvdev.testing.peer import ScriptedPeer

silent = threading.Event()
script = ControllerScript(answer=lambda connection, pdu, sqe: silent.is_set())
host = HostIdentity.of("nqn.2024-01.io.example:host")
REPORT = bytes([0x0E]) + bytes(63)
with ScriptedPeer(script) as peer:
    try:
        with Session(host=host, options=ControllerOptions(shutdown_timeout_s=0.5)) as kv:
            device = kv.open_device(f"tcp://127.0.0.1:{peer.port}/nqn.2024-01.io.example:scripted?nsid=1")
            silent.set()
            print("waiting", flush=True)
            if sys.argv[1] == "read":
                read_blocks(device, 0, 1, Deadline.after(60))
            else:
                device.queue.execute(
                    device.device_index, REPORT, data=bytearray(64), deadline=Deadline.after(60)
                )
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("what", ["read", "report of reservations"])
def test_command_when_interrupted_then_session_closes_within_its_bound(what: str) -> None:
    arguments = [sys.executable, "-c", PROGRAM, what]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "waiting\n"
            started = time.monotonic()
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            # Half of what the command would wait: a busy machine takes its time to run a second process.
            assert time.monotonic() - started < 30
            assert child.wait(60) == 0
        finally:
            child.kill()
