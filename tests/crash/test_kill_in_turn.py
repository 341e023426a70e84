"""kill -9 of client, pool process and target in turn while a trace is replayed: what is restored is what was put.

Six kills here, of a target with a volatile cache; ``KVDEV_LONG=1`` makes it 250 with and 250
without. ``KVDEV_SEED`` replays the trace and the places of the kills, by the
number of requests between them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.testing.killable import KillableTarget
from kvdev.testing.recovery import until
from kvdev_tools.main import run
from tests import pool_client
from tests.fault.test_pool import kill, pool_process

IS_LONG = bool(os.environ.get("KVDEV_LONG"))
KILL_COUNT = 250 if IS_LONG else 6
VICTIMS = ("client", "pool", "target")
SHAPE = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
QUOTA_PAGES = 400
HOST = ["--host-nqn", "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e71"]
REQUESTS_BETWEEN = (1, 6)
HEAL_S = 300.0


class Drill:
    """The three processes, and what the client said so far."""

    def __init__(self, target: KillableTarget, folder: Path, seed: int) -> None:
        self.target = target
        self.volume = f"vol+{target.uri()}"
        self.socket = folder / "pool.sock"
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._said, self._errors = folder / "client.out", folder / "client.err"
        self._said.touch()
        self.pool = pool_process(self.volume, self.socket, *HOST)
        self.client = self._start_client()

    def _start_client(self) -> subprocess.Popen[bytes]:
        first = self.tallies()[-1]["request"] + 1 if self.tallies() else 0
        with self._said.open("ab") as out, self._errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, pool_client.__file__, str(self.socket), str(self.seed), str(first)],
                stdout=out,
                stderr=errors,
            )

    def tallies(self) -> list[dict[str, Any]]:
        """What each finished request came to; a line that a killed client left unfinished is none."""
        lines = self._said.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def wait_healthy(self, count: int) -> None:
        """So many further requests whose pages are all stored in the end, with nobody away."""
        before = len(self.tallies())

        def is_healthy() -> bool:
            assert self.client.poll() is None, f"the client ended: {self._errors.read_text()[-2000:]}"
            healthy = [
                each
                for each in self.tallies()[before:]
                if not each["lost"] and each["restored"] + each["stored"] == each["pages"]
            ]
            return len(healthy) >= count

        until(is_healthy, f"{count} requests without a loss after {dict(self.counts)}", seconds=HEAL_S)

    def kill(self, victim: str) -> None:
        if victim == "client":
            kill(self.client)
            with self._said.open("ab") as out:
                out.write(b"\n")
            self.client = self._start_client()
        elif victim == "pool":
            kill(self.pool)
            self.pool = pool_process(self.volume, self.socket, *HOST)
        else:
            self.target.kill()
            self.target.start()
        self.counts[victim] += 1

    def close(self) -> None:
        kill(self.client)
        if self.pool.poll() is None:
            self.pool.send_signal(signal.SIGTERM)
            self.pool.wait(60)


@pytest.mark.parametrize("is_volatile", [True, False] if IS_LONG else [True])
def test_replay_when_client_pool_and_target_are_killed_in_turn_then_no_page_is_wrong(
    is_volatile: bool,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rng = np.random.default_rng(seed)
    with KillableTarget(
        tmp_path,
        namespace_count=2,
        namespace_size_bytes=64 << 20,
        volatile_seed=seed if is_volatile else None,
    ) as target:
        volume = f"vol+{target.uri()}"
        assert run(["volume", "create", volume, "--name", "drill", *HOST]) == 0
        quota = ["--quota-pages", str(QUOTA_PAGES)]
        assert run(["namespace", "create", f"{volume}#kv", *SHAPE, *quota, *HOST]) == 0
        drill = Drill(target, tmp_path, seed % 1000)
        try:
            for number in range(KILL_COUNT):
                drill.wait_healthy(int(rng.integers(*REQUESTS_BETWEEN)))
                drill.kill(VICTIMS[number % len(VICTIMS)])
            drill.wait_healthy(1)
        finally:
            drill.close()
        tallies = drill.tallies()
        print(f"seed {seed}: {dict(drill.counts)}, {len(tallies)} requests")
        assert sum(each["mismatches"] for each in tallies) == 0
        assert sum(each["errors"] for each in tallies) == 0
        assert sum(each["restored"] for each in tallies) > 0
        capsys.readouterr()
        assert run(["page", "verify", f"{volume}#kv", "--json", *HOST]) == 0
        assert json.loads(capsys.readouterr().out)["pages_damaged"] == 0
