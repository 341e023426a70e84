"""``serve`` as a process: ready line, configuration, signals, and one clear line for what goes wrong."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.errors import UsageError
from kvdev.target.serve import EmbeddedTarget, _StopRequest, read_config
from kvdev.target.state import CONFIG_SIZE_LIMIT_BYTES
from kvdev.testing.target_backend import MemoryBackend
from spdk_rpc import Client, SpdkRpc

WAIT_S = 30.0
NQN = "nqn.2016-06.io.spdk:cnode1"
# The same program as ``python -m kvdev.target``, without a data path.
PROGRAM = """
import sys
from kvdev.target.__main__ import parse_arguments
from kvdev.target.serve import serve
from kvdev.testing.target_backend import MemoryBackend
sys.exit(serve(parse_arguments(), make_backend=MemoryBackend))
"""


class Process:
    """A target process; its standard output and error are pipes."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def end(self) -> tuple[int, str]:
        _, error = self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode, error


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def run(*arguments: str, path: str | None = None) -> Process:
        started.append(Process("--rpc-socket", path or str(tmp_path / "rpc.sock"), *arguments))
        return started[-1]

    yield run
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_target_serves_until_a_signal_and_removes_what_it_made(
    start: Any, tmp_path: Path, number: int
) -> None:
    process = start("--json", "--ready-file", str(tmp_path / "ready"))
    ready = json.loads(process.ready_line())
    assert ready == {"rpc_socket": str(tmp_path / "rpc.sock"), "pid": process.popen.pid, "listeners": []}
    assert json.loads((tmp_path / "ready").read_text()) == ready
    with Client(ready["rpc_socket"]) as client:
        assert SpdkRpc(client).bdev_malloc_create(num_blocks=8, block_size=512) == "Malloc0"
        process.popen.send_signal(number)
        assert process.end() == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_ready_file_takes_no_fifo_away(start: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    code, error = start("--ready-file", str(tmp_path / "fifo")).end()
    assert code == 2
    assert "fifo: expected a regular file or none" in error
    assert (tmp_path / "fifo").is_fifo()


def test_module_runs_the_data_path(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "kvdev.target", "--rpc-socket", str(tmp_path / "rpc.sock")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith(
                "kvdev target ready: rpc "
            )
            with Client(tmp_path / "rpc.sock") as client:
                assert SpdkRpc(client).nvmf_get_stats()["poll_groups"]
        finally:
            process.terminate()
        assert process.wait(WAIT_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_configuration_is_applied_before_the_ready_line(start: Any, tmp_path: Path) -> None:
    (tmp_path / "member").touch()
    os.truncate(tmp_path / "member", 1 << 20)
    listen_address = {"trtype": "TCP", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": "0"}
    calls: list[dict[str, Any]] = [
        {
            "method": "bdev_aio_create",
            "params": {"name": "A", "filename": str(tmp_path / "member"), "block_size": 512},
        },
        {"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
        {"method": "nvmf_create_subsystem", "params": {"nqn": NQN}},
        {"method": "nvmf_subsystem_add_ns", "params": {"nqn": NQN, "namespace": {"bdev_name": "A"}}},
        {"method": "nvmf_subsystem_add_listener", "params": {"nqn": NQN, "listen_address": listen_address}},
        {"method": "bdev_wait_for_examine"},
    ]
    (tmp_path / "config").write_text(json.dumps(calls))
    process = start("--json", "--config", str(tmp_path / "config"))
    (listener,) = json.loads(process.ready_line())["listeners"]
    socket.create_connection((listener["address"], listener["port"]), timeout=WAIT_S).close()
    with Client(tmp_path / "rpc.sock") as client:
        (subsystem,) = SpdkRpc(client).nvmf_get_subsystems(nqn=NQN)
        saved = {
            "subsystems": [
                {"subsystem": name, "config": SpdkRpc(client).framework_get_config(name)}
                for name in ("bdev", "nvmf")
            ]
        }
    process.popen.terminate()
    assert process.end() == (0, "")
    # What it tells of itself brings it back.
    (tmp_path / "saved").write_text(json.dumps(saved))
    again = start("--config", str(tmp_path / "saved"))
    assert again.ready_line().startswith("kvdev target ready: rpc ")
    with Client(tmp_path / "rpc.sock") as client:
        assert SpdkRpc(client).nvmf_get_subsystems(nqn=NQN) == [subsystem]


def test_refused_configuration_names_file_method_and_reason(start: Any, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        '[{"method":"bdev_malloc_create","params":{"num_blocks":8,"block_size":513}}]'
    )
    code, error = start("--config", str(tmp_path / "config")).end()
    assert code == 4
    assert error.startswith(
        f"kvdev target: config: {tmp_path}/config: bdev_malloc_create: Invalid argument: block_size"
    )
    assert error.count("\n") == 1 and not (tmp_path / "rpc.sock").exists()


def test_port_in_use_is_one_clear_line(start: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen_address = {"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": str(port)}
        calls = [
            {"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
            {"method": "nvmf_create_subsystem", "params": {"nqn": NQN}},
            {
                "method": "nvmf_subsystem_add_listener",
                "params": {"nqn": NQN, "listen_address": listen_address},
            },
        ]
        (tmp_path / "config").write_text(json.dumps(calls))
        code, error = start("--config", str(tmp_path / "config")).end()
    assert code == 4 and f"listen_address: 127.0.0.1:{port}: Address already in use" in error
    assert error.count("\n") == 1


def test_second_target_on_the_socket_is_refused(start: Any, tmp_path: Path) -> None:
    first = start()
    first.ready_line()
    code, error = start().end()
    assert code == 3 and "another process listens there" in error and error.count("\n") == 1
    assert Client(tmp_path / "rpc.sock").call("framework_wait_init") is True


def test_socket_of_a_killed_target_is_taken_over(start: Any, tmp_path: Path) -> None:
    first = start()
    first.ready_line()
    first.popen.kill()
    first.popen.wait()
    assert (tmp_path / "rpc.sock").exists()
    assert "ready" in start().ready_line()


@pytest.mark.parametrize("path", ["/tmp/" + "x" * 110, "/nonexistent/folder/rpc.sock"])
def test_bad_socket_path_is_one_clear_line(start: Any, path: str) -> None:
    code, error = start(path=path).end()
    assert code in (2, 3) and error.startswith("kvdev target: rpc socket: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("5", "expected a list of calls"),
        ("{}", "expected a list of calls"),
        ("[5]", r"\[0\]: expected"),
        ('[{"method":5}]', r"\[0\]: expected"),
        ('[{"method":"m","params":[]}]', r"\[0\].params: expected an object"),
        ('{"subsystems":[{"config":{}}]}', r"subsystems\[0\].config: expected a list"),
        ('{"subsystems":[{"config":[{}]}]}', r"subsystems\[0\].config\[0\]: expected"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_bad_configuration_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(UsageError, match=rf"config: .*/c: {message}"):
        read_config(str(tmp_path / "c"))


def test_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config: .*/none: No such file"):
        read_config(str(tmp_path / "none"))


def test_configuration_of_a_subsystem_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "c").write_text('{"subsystems":[{"subsystem":"scsi","config":null}]}')
    assert read_config(str(tmp_path / "c")) == []


def test_embedded_target_that_cannot_listen_stops_its_data_path(tmp_path: Path) -> None:
    backend = MemoryBackend()
    (tmp_path / "s").write_text("mine")
    with pytest.raises(UsageError):
        EmbeddedTarget(tmp_path / "s", backend=backend).start()
    assert backend.log == [("start", None), ("stop", None)]


def test_a_signal_at_any_moment_of_the_wait_ends_it() -> None:
    # With an Event, or a handler that writes into a pipe, one of some tens of turns hangs.
    faulthandler.dump_traceback_later(WAIT_S, exit=True, file=2)
    try:
        for turn in range(500):
            with _StopRequest() as stopping:
                former = signal.signal(signal.SIGALRM, stopping._request)
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 50))
                stopping.wait()
                signal.signal(signal.SIGALRM, former)
                assert stopping.is_set
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_configuration_over_the_limit_is_read_up_to_it(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.touch()
    os.truncate(config, CONFIG_SIZE_LIMIT_BYTES + 1)
    with pytest.raises(
        UsageError, match=f"config: {config}: expected at most {CONFIG_SIZE_LIMIT_BYTES} bytes"
    ):
        read_config(str(config))


def test_configuration_that_is_no_file_is_refused_and_nothing_waits_for_it(
    start: Any, tmp_path: Path
) -> None:
    pipe = tmp_path / "config"
    os.mkfifo(pipe)
    for path, kind in ((str(pipe), "a pipe"), ("/dev/zero", "a device"), (str(tmp_path), "a folder")):
        code, error = start("--config", path).end()
        assert code == 2
        assert error == (
            f"kvdev target: config: {path}: expected a regular file, got {kind}; name another file\n"
        )
    assert list(tmp_path.iterdir()) == [pipe]


def test_ready_file_that_is_no_file_is_left_alone(start: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, error = start("--ready-file", str(pipe)).end()
    assert code == 2
    assert error.count("\n") == 1
    assert "ready file" in error
    assert str(pipe) in error
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
