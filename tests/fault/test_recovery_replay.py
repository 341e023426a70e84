"""A replay whose target is killed and started again while it runs: it goes on by itself, and every page is right."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from kvdev.testing.killable import KillableTarget
from kvdev.testing.recovery import until
from kvdev_tools import process
from kvdev_tools.main import run

HOST = ["--host-nqn", "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e6f"]
TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
REQUESTS_PER_KILL = 100
PROGRESS_BYTES = 256 << 10
"""Written between two interruptions."""
IS_LONG = bool(os.environ.get("KVDEV_LONG"))


def written_bytes(target: KillableTarget) -> int:
    return sum(path.stat().st_blocks for path in target.files) * 512


def replayed(
    target: KillableTarget,
    tmp_path: Path,
    *,
    kill_count: int,
    is_paused: bool = False,
    keep_alive_ms: int = 1000,
) -> dict[str, Any]:
    """Replay over a volume of the target's namespaces; kill or stop it every now and then. The report."""
    volume = f"vol+{target.uri()}"
    assert run(["volume", "create", volume, "--name", "pool", *HOST]) == 0
    assert run(["namespace", "create", f"{volume}#kv", *TINY, *HOST]) == 0
    arguments = ["replay", f"{volume}#kv", *TINY, *HOST, "--json"]
    arguments += [
        "--requests",
        str(REQUESTS_PER_KILL * kill_count),
        "--keep-alive-ms",
        str(keep_alive_ms),
        "--timeout",
        "120",
    ]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        child = process.start("kvdev_tools.main", arguments, stdout=out, stderr=err)
        try:
            for _ in range(kill_count):
                before = written_bytes(target)

                def has_gone_on(before: int = before) -> bool:
                    return written_bytes(target) >= before + PROGRESS_BYTES or child.poll() is not None

                until(has_gone_on, "the replay goes on", seconds=120)
                assert child.poll() is None, "it ended before it was interrupted"
                if is_paused:
                    target.pause()
                    threading.Event().wait(0.4)
                    target.resume()
                else:
                    target.kill()
                    target.start()
            code = child.wait(240 if not IS_LONG else 3600)
        except subprocess.TimeoutExpired:
            raise AssertionError((tmp_path / "err").read_text()[-2000:]) from None
        finally:
            process.stop(child)
    assert code == 0, (tmp_path / "err").read_text()[-2000:]
    report: dict[str, Any] = json.loads((tmp_path / "out").read_text())
    return report


@pytest.mark.parametrize("volatile_seed", [None, 1] if IS_LONG else [1])
def test_replay_when_target_is_killed_and_restarted_then_no_page_is_wrong(
    tmp_path: Path, volatile_seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_count = 100 if IS_LONG else 1
    with KillableTarget(
        tmp_path, namespace_count=2, namespace_size_bytes=64 << 20, volatile_seed=volatile_seed
    ) as target:
        report = replayed(target, tmp_path, kill_count=kill_count)
        assert report["mismatches"] == 0
        assert report["page_errors"] == 0
        assert report["requests"] == REQUESTS_PER_KILL * kill_count
        assert report["pages_restored"] > 0
        capsys.readouterr()
        assert run(["page", "verify", f"vol+{target.uri()}#kv", "--json", *HOST]) == 0
        assert json.loads(capsys.readouterr().out)["pages_damaged"] == 0


def test_replay_when_target_is_stopped_and_goes_on_then_no_page_is_wrong(tmp_path: Path) -> None:
    with KillableTarget(tmp_path, namespace_count=2, namespace_size_bytes=64 << 20) as target:
        report = replayed(target, tmp_path, kill_count=100 if IS_LONG else 1, is_paused=True)
        assert report["mismatches"] == report["page_errors"] == 0
