"""A target that vanishes in the middle of a replay: a bounded wait, one line, and what was flushed is there again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev_tools import process
from kvdev_tools.main import run
from spdk_rpc import Client, SpdkRpc

NQN = "nqn.2026-01.io.kvdev:gone"
HOST = ["--host-nqn", "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e6f"]
TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
PAGES_MIN = 20
PATIENCE_S = 120
"""Far more than it takes, far less than ``COMMAND_TIMEOUT_S``, which an orderly close would wait for."""
COMMAND_TIMEOUT_S = 300
STILL_S = 0.5
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LINES = {signal.SIGINT: "kvdev: interrupted", signal.SIGTERM: "kvdev: terminated"}


class FileTarget:
    """``kvdev target serve`` on two files, which stay when it dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [folder / f"ns{index}" for index in range(2)]
        self.child: subprocess.Popen[bytes] | None = None
        for path in self.files:
            path.touch()
            os.truncate(path, 64 << 20)

    def start(self) -> str:
        """Start it on a fresh socket; returns the volume's URI."""
        ready, sock = self.folder / "ready", self.folder / "rpc"
        ready.unlink(missing_ok=True)
        calls: list[dict[str, Any]] = [{"method": "nvmf_create_transport", "params": {"trtype": "TCP"}}]
        calls.append({"method": "nvmf_create_subsystem", "params": {"nqn": NQN, "allow_any_host": True}})
        for index, path in enumerate(self.files):
            # The same identifiers at each start, for the labels name them; others in another test, for a device
            # whose command failed may be held until its traceback has been collected.
            name = str(uuid.uuid5(uuid.NAMESPACE_URL, str(path)))
            bdev = {"name": f"b{index}", "filename": str(path), "block_size": 4096, "uuid": name}
            calls.append({"method": "bdev_aio_create", "params": bdev})
            namespace = {"nqn": NQN, "namespace": {"bdev_name": f"b{index}"}}
            calls.append({"method": "nvmf_subsystem_add_ns", "params": namespace})
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0"}
        listener = {"nqn": NQN, "listen_address": address}
        calls.append({"method": "nvmf_subsystem_add_listener", "params": listener})
        config = self.folder / "config"
        config.write_text(json.dumps(calls))
        arguments = ["target", "serve", "--rpc-socket", str(sock)]
        arguments += ["--config", str(config), "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        self.child = process.start("kvdev_tools.main", arguments, stdout=subprocess.DEVNULL)
        limit = Deadline.after(120)
        while not ready.exists():
            assert self.child.poll() is None
            assert not limit.is_expired
        port = json.loads(ready.read_text())["listeners"][0]["port"]
        return f"vol+tcp://127.0.0.1:{port}/{NQN}"

    def written_bytes(self) -> int:
        with Client(self.folder / "rpc", timeout_s=10) as client:
            return sum(each["bytes_written"] for each in SpdkRpc(client).bdev_get_iostat()["bdevs"])

    def kill(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(60)

    def close(self) -> None:
        if self.child is not None:
            process.stop(self.child)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[FileTarget]:
    target = FileTarget(tmp_path)
    try:
        yield target
    finally:
        target.close()


@pytest.mark.parametrize("options", [[], ["--kill-halfway"]])
def test_target_killed_mid_run_is_3_and_flushed_pages_are_there_on_reopen(
    options: list[str], target: FileTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = target.start()
    assert run(["volume", "create", volume, "--name", "pool", *HOST]) == 0
    assert run(["namespace", "create", f"{volume}#kv", *TINY, *HOST]) == 0
    before = target.written_bytes()
    arguments = ["replay", f"{volume}#kv", *TINY, *HOST]
    with (tmp_path / "err").open("wb") as errors:
        replay = process.start(
            "kvdev_tools.main",
            [*arguments, "--requests", "100000", "--timeout", "5", *options],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            limit = Deadline.after(60)
            while target.written_bytes() < before + PAGES_MIN * 8192 * 2:
                assert replay.poll() is None
                assert not limit.is_expired
            target.kill()
            code = replay.wait(120)
        finally:
            process.stop(replay)
    lines = (tmp_path / "err").read_text().splitlines()
    assert code == 3, lines
    assert len(lines) == 1
    assert lines[0].startswith("kvdev: ")
    assert f"{volume}#kv: lost after " in lines[0]

    volume = target.start()
    capsys.readouterr()
    assert run(["page", "verify", f"{volume}#kv", "--json", *HOST]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["pages_damaged"] == 0
    assert verified["pages_checked"] >= PAGES_MIN
    assert run(["replay", f"{volume}#kv", *TINY, *HOST, "--requests", "20", "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["mismatches"] == replayed["page_errors"] == 0


@pytest.mark.parametrize("options", [[], ["--kill-halfway"]])
def test_interrupt_ends_the_replay_and_its_children(options: list[str], tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "kvdev_tools.main", "replay", *TINY, "--requests", "20000", *options]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        limit = Deadline.after(240)
        while (
            not (progress := list(tmp_path.glob("kvdev-replay-*/progress"))) or not progress[0].stat().st_size
        ):
            assert child.poll() is None
            assert not limit.is_expired
        pids = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        assert len(pids) == 1 + len(options)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    assert child.returncode == 130
    assert errors.decode().strip() == "kvdev: interrupted"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_client_killed_by_somebody_is_named_with_the_signal(tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "kvdev_tools.main",
        "replay",
        *TINY,
        "--requests",
        "20000",
        "--kill-halfway",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    replay = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    try:
        limit = Deadline.after(60)
        while not any(path.stat().st_size for path in tmp_path.glob("kvdev-replay-*/progress")):
            assert replay.poll() is None
            assert not limit.is_expired
        children = Path(f"/proc/{replay.pid}/task/{replay.pid}/children").read_text().split()
        client = next(
            pid for pid in children if b"kvdev_tools.client" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(int(client), signal.SIGKILL)
        _, errors = replay.communicate(timeout=120)
    finally:
        replay.kill()
        replay.communicate()
    assert replay.returncode == 4
    assert errors.decode() == (
        "kvdev: replay client: ended by signal SIGKILL: memory ran out, or somebody killed it\n"
    )


def test_replay_runs_beside_a_folder_named_like_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A checkout is a folder named kvdev, and so is our state folder.
    for name in ("kvdev", "kvdev_tools"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert run(["replay", *TINY, "--requests", "2", "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["mismatches"] == 0


def start_replay(folder: Path, arguments: list[str], *, request_count: int) -> subprocess.Popen[bytes]:
    """A replay that keeps its files in a folder of ours and does not end by itself."""
    command = [sys.executable, "-m", "kvdev_tools.main", "replay", *arguments, *TINY]
    return subprocess.Popen(
        [*command, "--requests", str(request_count), "--timeout", str(COMMAND_TIMEOUT_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


def progress_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("kvdev-replay-*/progress"))


def wait_until_running(replay: subprocess.Popen[bytes], folder: Path) -> None:
    limit = Deadline.after(120)
    while not progress_bytes(folder):
        assert replay.poll() is None
        assert not limit.is_expired


def wait_until_stuck(replay: subprocess.Popen[bytes], folder: Path) -> None:
    """Until no request ends any more."""
    limit, before, pause = Deadline.after(60), -1, threading.Event()
    while (now := progress_bytes(folder)) != before:
        assert replay.poll() is None
        assert not limit.is_expired
        before = now
        pause.wait(STILL_S)


def interrupt(replay: subprocess.Popen[bytes], number: signal.Signals) -> None:
    replay.send_signal(number)
    _, errors = replay.communicate(timeout=PATIENCE_S)
    assert errors.decode().strip() == LINES[number]
    assert replay.returncode == CODES[number]


def end(replay: subprocess.Popen[bytes]) -> None:
    if replay.poll() is None:
        replay.kill()
        replay.communicate()


@pytest.mark.parametrize("number", list(CODES))
def test_interrupt_does_not_wait_for_a_target_that_does_not_answer(
    number: signal.Signals, target: FileTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, folder = target.start(), tmp_path / "client"
    folder.mkdir()
    assert run(["volume", "create", volume, "--name", "pool", *HOST]) == 0
    assert run(["namespace", "create", f"{volume}#kv", *TINY, *HOST]) == 0
    replay = start_replay(folder, [f"{volume}#kv", *HOST], request_count=20000)
    try:
        wait_until_running(replay, folder)
        assert target.child is not None
        target.child.send_signal(signal.SIGSTOP)
        wait_until_stuck(replay, folder)
        interrupt(replay, number)
    finally:
        end(replay)
        target.kill()
    assert list(folder.iterdir()) == []

    volume = target.start()
    capsys.readouterr()
    assert run(["page", "verify", f"{volume}#kv", "--json", *HOST]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["pages_damaged"] == 0
    assert verified["pages_checked"] > 0


def test_interrupt_does_not_wait_for_an_embedded_target_that_does_not_answer(tmp_path: Path) -> None:
    replay, children = start_replay(tmp_path, ["--embedded"], request_count=5000), []
    try:
        wait_until_running(replay, tmp_path)
        children = Path(f"/proc/{replay.pid}/task/{replay.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGSTOP)
        wait_until_stuck(replay, tmp_path)
        interrupt(replay, signal.SIGTERM)
        is_left = Path(f"/proc/{children[0]}").exists()
    finally:
        end(replay)
        # Where the replay did not end it, it still stands, and would for good.
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert not is_left
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--kill-halfway"]])
def test_embedded_target_killed_then_the_replay_ends_at_once_and_says_so(
    options: list[str], tmp_path: Path
) -> None:
    replay = start_replay(tmp_path, options, request_count=5000)
    try:
        wait_until_running(replay, tmp_path)
        children = Path(f"/proc/{replay.pid}/task/{replay.pid}/children").read_text().split()
        (target,) = (pid for pid in children if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(target), signal.SIGKILL)
        _, errors = replay.communicate(timeout=PATIENCE_S)
    finally:
        end(replay)
    assert replay.returncode == 3
    assert errors.decode() == "kvdev: embedded target: ended by SIGKILL while the replay ran; run it again\n"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_replay_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    replay = start_replay(tmp_path, ["--embedded"], request_count=5000)
    try:
        wait_until_running(replay, tmp_path)
    finally:
        end(replay)
    (left,) = tmp_path.iterdir()
    assert (left / "progress").exists(), "nobody was there to remove it"
    again = start_replay(tmp_path, ["--embedded"], request_count=2)
    _, errors = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, errors.decode()
    assert list(tmp_path.iterdir()) == []
