"""Ctrl-C while a target does not answer: the process ends at once, in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

PROGRAM = """
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
with ScriptedPeer(script) as peer:
    try:
        with Session(host=host, options=ControllerOptions(shutdown_timeout_s=0.5)) as kv:
            device = kv.open_device(f"tcp://127.0.0.1:{peer.port}/nqn.2024-01.io.example:scripted?nsid=1")
            silent.set()
            print("reading", flush=True)
            read_blocks(device, 0, 1, Deadline.after(60))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_read_when_interrupted_then_session_closes_within_its_bound() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "reading\n"
            started = time.monotonic()
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            assert time.monotonic() - started < 3
            assert child.wait(10) == 0
        finally:
            child.kill()
