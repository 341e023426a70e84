"""The RPC server's socket, envelopes, limits and order, over a real UNIX socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.errors import ConnectError, UsageError
from kvdev.target.model import SpdkError
from kvdev.target.rpc_server import CONNECTION_COUNT_LIMIT, ListeningSocket, RpcServer
from spdk_rpc import Client
from spdk_rpc.framing import REQUEST_SIZE_LIMIT_BYTES, JsonSplitter

WAIT_S = 10.0


class Methods:
    """Methods that echo, wait, refuse or fail."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.gate: asyncio.Event | None = None

    async def call(self, method: str, params: Any) -> Any:
        self.called.append(method)
        if method == "wait":
            self.gate = self.gate or asyncio.Event()
            await self.gate.wait()
        elif method == "open":
            self.gate = self.gate or asyncio.Event()
            self.gate.set()
        elif method == "refuse":
            raise SpdkError(-19, "No such device")
        elif method == "bug":
            raise KeyError("a bug")
        elif method == "big":
            return "x" * params["size"]
        return [method, params]


@pytest.fixture
def methods() -> Methods:
    return Methods()


@pytest.fixture
def server(tmp_path: Path, methods: Methods) -> Iterator[RpcServer]:
    started = RpcServer(str(tmp_path / "rpc.sock"), methods.call)
    started.start()
    yield started
    started.stop()


def connect(server: RpcServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    connection.connect(server.path)
    return connection


def read_replies(connection: socket.socket, count: int) -> list[Any]:
    """That many replies, or fewer when the server closes."""
    splitter = JsonSplitter(size_limit_bytes=64 << 20)
    replies: list[Any] = []
    while len(replies) < count:
        chunk = connection.recv(1 << 20)
        if not chunk:
            break
        replies += [json.loads(raw) for raw in splitter.feed(chunk)]
    return replies


def ask(server: RpcServer, raw: bytes, count: int) -> list[Any]:
    with connect(server) as connection:
        connection.sendall(raw)
        return read_replies(connection, count)


def result(request_id: Any, method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": [method, params]}


INVALID = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "Invalid request"}}


def test_socket_has_mode_0600_whatever_the_umask(tmp_path: Path, methods: Methods) -> None:
    former = os.umask(0)
    try:
        listening = ListeningSocket(str(tmp_path / "s"))
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "s.lock").stat().st_mode) == 0o600
        listening.close()
    finally:
        os.umask(former)
    assert list(tmp_path.iterdir()) == []


def test_second_server_on_the_path_is_refused_and_the_first_goes_on(
    server: RpcServer, methods: Methods
) -> None:
    with pytest.raises(ConnectError, match="another process listens there"):
        RpcServer(server.path, methods.call).start()
    assert Client(server.path).call("m") == ["m", None]


def test_socket_of_a_living_process_without_our_lock_is_refused(tmp_path: Path, methods: Methods) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(ConnectError, match="another process listens there"):
            RpcServer(str(tmp_path / "s"), methods.call).start()
    assert (tmp_path / "s").exists() and not (tmp_path / "s.lock").exists()


def test_socket_of_a_dead_process_is_replaced(tmp_path: Path, methods: Methods) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    server = RpcServer(str(tmp_path / "s"), methods.call)
    server.start()
    assert Client(server.path).call("m") == ["m", None]
    server.stop()
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path, methods: Methods) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(UsageError, match="exists and is no socket"):
        RpcServer(str(tmp_path / "s"), methods.call).start()
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize(("path", "text"), [("", "1 to 107 bytes, got 0"), ("/tmp/" + "x" * 103, "got 108")])
def test_path_that_fits_no_unix_socket_is_refused(path: str, text: str, methods: Methods) -> None:
    with pytest.raises(UsageError, match=text):
        RpcServer(path, methods.call).start()


def test_folder_that_is_not_there_is_named(tmp_path: Path, methods: Methods) -> None:
    with pytest.raises(ConnectError, match="none/s: No such file or directory"):
        RpcServer(str(tmp_path / "none" / "s"), methods.call).start()


def test_stop_ends_connections_and_removes_the_socket(tmp_path: Path, methods: Methods) -> None:
    server = RpcServer(str(tmp_path / "s"), methods.call)
    server.start()
    with connect(server) as connection:
        connection.sendall(b'{"method":"wait","id":1}')
        ask(server, b'{"method":"m","id":1}', 1)
        server.stop(timeout_s=WAIT_S)
        assert connection.recv(1) == b""
    assert list(tmp_path.iterdir()) == []
    server.stop()


@pytest.mark.parametrize("cut", range(0, 66, 7))
def test_requests_glued_and_cut_anywhere_each_get_a_reply(server: RpcServer, cut: int) -> None:
    raw = b'{"method":"a","id":1}\n {"method":"b","id":"\xc3\xa9","params":["x"]}{"method":"c","id":2.5}'
    with connect(server) as connection:
        connection.sendall(raw[:cut])
        connection.sendall(raw[cut:])
        assert read_replies(connection, 3) == [result(1, "a"), result("é", "b", ["x"]), result(2.5, "c")]


def test_batch_answers_in_one_array_without_notifications(server: RpcServer) -> None:
    raw = b'[{"method":"a","id":1},{"method":"b"},5,{"method":"refuse","id":3}]{"method":"c","id":4}'
    error = {"jsonrpc": "2.0", "id": 3, "error": {"code": -19, "message": "No such device"}}
    assert ask(server, raw, 2) == [[result(1, "a"), INVALID, error], result(4, "c")]


def test_batch_of_notifications_gets_no_reply_and_an_empty_one_is_invalid(
    server: RpcServer, methods: Methods
) -> None:
    raw = b'[{"method":"a"},{"method":"b","id":null}][]{"method":"c","id":4}'
    assert ask(server, raw, 2) == [INVALID, result(4, "c")]
    assert methods.called == ["a", "b", "c"]


@pytest.mark.parametrize(
    "request_json",
    [
        '{"jsonrpc":"1.0","method":"m","id":1}',
        '{"jsonrpc":2.0,"method":"m","id":1}',
        '{"method":5,"id":1}',
        '{"id":1}',
        "{}",
        '{"method":"m","id":{}}',
        '{"method":"m","id":[1]}',
        '{"method":"m","id":true}',
        '{"method":"m","id":1,"params":5}',
        '{"method":"m","id":1,"params":"x"}',
        '{"method":"m","id":1,"more":1}',
        '{"method":"m","method":"m","id":1}',
        '{"method":"m","id":"' + "x" * 129 + '"}',
        '{"method":"m","id":1e999}',
    ],
)
def test_invalid_request_is_answered_without_id_and_the_connection_goes_on(
    server: RpcServer, request_json: str, methods: Methods
) -> None:
    assert ask(server, request_json.encode() + b'{"method":"c","id":4}', 2) == [INVALID, result(4, "c")]
    assert methods.called == ["c"]


def test_null_params_are_none(server: RpcServer) -> None:
    assert ask(server, b'{"method":"m","id":1,"params":null}', 1) == [result(1, "m")]


@pytest.mark.parametrize(
    "raw", [b"hello", b'{"a":1,}', b"{]", b"/**/{}", b'{"method":"\xff"}', b"[" * 65, b'{"id":NaN}']
)
def test_malformed_json_closes_without_a_reply_after_what_came_before(server: RpcServer, raw: bytes) -> None:
    assert ask(server, raw, 1) == []
    assert ask(server, b'{"method":"m","id":1}', 1) == [result(1, "m")]


def test_request_of_256_kib_is_served_and_one_byte_more_closes(server: RpcServer) -> None:
    head, tail = b'{"method":"m","id":1,"params":["', b'"]}'
    padding = b"x" * (REQUEST_SIZE_LIMIT_BYTES - len(head) - len(tail))
    (reply,) = ask(server, head + padding + tail, 1)
    assert reply["id"] == 1
    assert ask(server, head + padding + b"x" + tail, 1) == []


def test_fault_of_ours_is_an_internal_error_and_the_server_goes_on(server: RpcServer) -> None:
    replies = ask(server, b'{"method":"bug","id":1}{"method":"m","id":2}', 2)
    assert replies[0]["error"] == {"code": -32603, "message": "Internal error: KeyError"}
    assert replies[1] == result(2, "m")


def test_method_that_waits_lets_later_requests_overtake(server: RpcServer) -> None:
    raw = b'{"method":"wait","id":1}{"method":"m","id":2}{"method":"open","id":3}'
    replies = ask(server, raw, 3)
    assert replies[0] == result(2, "m")
    assert sorted(reply["id"] for reply in replies) == [1, 2, 3]


def test_large_reply_arrives_whole_and_one_over_32_mib_is_refused(server: RpcServer) -> None:
    client = Client(server.path)
    assert len(client.call("big", {"size": 30 << 20})) == 30 << 20
    replies = ask(server, b'{"method":"big","id":1,"params":{"size":33554432}}', 1)
    assert replies[0]["error"]["code"] == -32603


def is_served(server: RpcServer) -> bool:
    with contextlib.suppress(ConnectionError):
        return ask(server, b'{"method":"m","id":1}', 1) == [result(1, "m")]
    return False


def test_connection_over_the_limit_is_closed_and_a_freed_place_is_taken(server: RpcServer) -> None:
    held = [connect(server) for _ in range(CONNECTION_COUNT_LIMIT)]
    try:
        for connection in held:
            connection.sendall(b'{"method":"m","id":1}')
            assert read_replies(connection, 1) == [result(1, "m")]
        with connect(server) as extra:
            assert extra.recv(1) == b""
    finally:
        for connection in held:
            connection.close()
    # The server learns of the closed ones at its own pace.
    assert any(is_served(server) for _ in range(1000))


def test_client_that_leaves_does_not_disturb_the_others(server: RpcServer) -> None:
    with connect(server) as leaving:
        leaving.sendall(b'{"method":"big","id":1,"params":{"size":20000000}}{"method":"wait","id":2}')
        leaving.recv(10)
    assert Client(server.path).call("m") == ["m", None]


def test_run_call_runs_on_the_servers_loop(server: RpcServer) -> None:
    assert server.run_call("m", {"a": 1}, timeout_s=WAIT_S) == ["m", {"a": 1}]
    with pytest.raises(SpdkError):
        server.run_call("refuse", None, timeout_s=WAIT_S)


def test_many_clients_at_once_each_get_their_own_replies(server: RpcServer) -> None:
    wrong: list[Any] = []

    def work(name: str) -> None:
        with Client(server.path) as client:
            wrong.extend(reply for _ in range(30) if (reply := client.call(name)) != [name, None])

    threads = [threading.Thread(target=work, args=(f"m{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []


def test_clients_that_leave_before_their_replies_fill_no_log(
    server: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    request = b'{"jsonrpc":"2.0","id":1,"method":"big","params":{"size":100000}}'
    for _ in range(CONNECTION_COUNT_LIMIT // 2):
        with connect(server) as connection:
            connection.sendall(request * 50)
    assert ask(server, b'{"id":2,"method":"m"}', 1) == [result(2, "m")]
    full = [connect(server) for _ in range(CONNECTION_COUNT_LIMIT)]
    for _ in range(20):
        with connect(server) as connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    for connection in full:
        connection.close()
    loud = [record.getMessage() for record in caplog.records if record.levelname not in ("INFO", "DEBUG")]
    assert loud == [f"rpc socket {server.path}: more than {CONNECTION_COUNT_LIMIT} connections"]
