"""The client against scripted servers that do what a broken, slow or restarted peer does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spdk_rpc import (
    Client,
    RpcMethodError,
    RpcProtocolError,
    RpcStateError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUsageError,
    SpdkRpc,
    parse_address,
)
from spdk_rpc.framing import REPLY_SIZE_LIMIT_BYTES, REQUEST_SIZE_LIMIT_BYTES, JsonSplitter

Script = Callable[["Peer"], None]
WAIT_S = 10.0


class Peer:
    """The server's end of one connection, for a script to act on."""

    def __init__(self, connection: socket.socket, index: int, released: threading.Event) -> None:
        self.connection = connection
        self.index = index
        self.released = released
        self._splitter = JsonSplitter(size_limit_bytes=1 << 20)
        self._requests: list[dict[str, Any]] = []

    def request(self) -> dict[str, Any]:
        while not self._requests:
            chunk = self.connection.recv(65536)
            if not chunk:
                raise EOFError
            self._requests += [json.loads(raw) for raw in self._splitter.feed(chunk)]
        return self._requests.pop(0)

    def send(self, reply: dict[str, Any] | bytes) -> None:
        self.connection.sendall(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

    def wait_for_release(self) -> None:
        assert self.released.wait(WAIT_S)


class ScriptedServer:
    """Runs a script for each connection, one after the other."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path = str(path)
        self.released = threading.Event()
        self.connection_count = 0
        self._script = script
        self._is_closed = False
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            peer = Peer(connection, self.connection_count, self.released)
            self.connection_count += 1
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        with peer.connection, contextlib.suppress(EOFError, OSError):
            self._script(peer)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.released.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(WAIT_S)
        Path(self.path).unlink()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Script], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(tmp_path / "s.sock", script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Serve = Callable[[Script], ScriptedServer]


def reply_to(request: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


def echo(peer: Peer) -> None:
    while True:
        request = peer.request()
        peer.send(reply_to(request, [request["method"], request.get("params")]))


def test_call_sends_the_request_and_returns_the_result(serve: Serve) -> None:
    with Client(serve(echo).path) as client:
        assert client.call("m", {"a": 1}) == ["m", {"a": 1}]
        assert client.call("n") == ["n", None]


def test_late_reply_never_reaches_the_next_call(serve: Serve) -> None:
    def late(peer: Peer) -> None:
        request = peer.request()
        if peer.index == 0:
            peer.wait_for_release()
        peer.send(reply_to(request, f"answer to {request['method']}"))
        peer.request()

    server = serve(late)
    client = Client(server.path)
    with pytest.raises(RpcTimeoutError, match=r"first: no reply within 0\.05 s") as caught:
        client.call("first", timeout_s=0.05)
    assert caught.value.method == "first" and caught.value.is_fate_unknown
    server.released.set()
    assert client.call("second", timeout_s=WAIT_S) == "answer to second"
    assert server.connection_count == 2, "the timed-out connection is not used again"


def test_reply_trickled_byte_by_byte_is_put_together(serve: Serve) -> None:
    def trickle(peer: Peer) -> None:
        for byte in json.dumps(reply_to(peer.request(), {"text": 'é\\"{'}), ensure_ascii=False).encode():
            peer.send(bytes([byte]))

    assert Client(serve(trickle).path).call("m") == {"text": 'é\\"{'}


def test_deadline_covers_the_whole_call_when_bytes_keep_coming(serve: Serve) -> None:
    def drip(peer: Peer) -> None:
        peer.request()
        while not peer.released.wait(0.02):
            peer.send(b" ")

    started = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        Client(serve(drip).path).call("m", timeout_s=0.2)
    assert 0.15 < time.monotonic() - started < 2


def test_two_replies_in_one_read_the_one_with_our_id_counts(serve: Serve) -> None:
    def glue(peer: Peer) -> None:
        request = peer.request()
        stale = {"jsonrpc": "2.0", "id": 99, "result": "stale"}
        peer.send(json.dumps(stale).encode() + json.dumps(reply_to(request, "ours")).encode())
        echo(peer)

    client = Client(serve(glue).path)
    assert client.call("m") == "ours"
    assert client.dropped_reply_count == 1
    assert client.call("n") == ["n", None]


def test_reply_cut_inside_a_utf8_character_at_4096_arrives(serve: Serve) -> None:
    def cut(peer: Peer) -> None:
        head = f'{{"jsonrpc":"2.0","id":{peer.request()["id"]},"result":"'.encode()
        raw = head + b"x" * (4095 - len(head)) + "é".encode() + b'"}'
        peer.send(raw[:4096])
        peer.wait_for_release()
        peer.send(raw[4096:])

    server = serve(cut)
    timer = threading.Timer(0.05, server.released.set)
    timer.start()
    assert Client(server.path).call("m").endswith("xé")
    timer.join()


def test_reply_with_a_wrong_id_only_ends_in_a_timeout(serve: Serve) -> None:
    def wrong(peer: Peer) -> None:
        request = peer.request()
        peer.send({"jsonrpc": "2.0", "id": request["id"] + 1000, "result": 1})
        peer.send({"jsonrpc": "2.0", "id": str(request["id"]), "result": 2})
        peer.wait_for_release()

    client = Client(serve(wrong).path)
    with pytest.raises(RpcTimeoutError):
        client.call("m", timeout_s=0.1)
    assert client.dropped_reply_count == 2


def test_reply_over_32_mib_is_refused_and_the_client_goes_on(serve: Serve) -> None:
    def flood(peer: Peer) -> None:
        request = peer.request()
        if peer.index == 0:
            peer.send(b'{"jsonrpc":"2.0","result":"')
            while True:
                peer.send(b"x" * (1 << 20))
        peer.send(reply_to(request, "fine"))

    client = Client(serve(flood).path)
    with pytest.raises(RpcProtocolError, match=f"longer than {REPLY_SIZE_LIMIT_BYTES} bytes"):
        client.call("m")
    assert client.call("m") == "fine"


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400\r\n", b'{"id":1,}', b'{"id":"\xff"}', b'[{"id":1,"result":1}]']
)
def test_garbage_is_a_protocol_error_and_the_client_goes_on(serve: Serve, garbage: bytes) -> None:
    def speak(peer: Peer) -> None:
        request = peer.request()
        peer.send(garbage if peer.index == 0 else reply_to(request, "fine"))
        peer.wait_for_release()

    client = Client(serve(speak).path)
    with pytest.raises(RpcProtocolError):
        client.call("m")
    assert client.call("m") == "fine"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"error": 5},
        {"error": {"code": "x", "message": "m"}},
        {"error": {"code": 1}},
        {"error": {"code": True}},
    ],
)
def test_reply_without_result_or_proper_error_is_a_protocol_error(serve: Serve, body: dict[str, Any]) -> None:
    with pytest.raises(RpcProtocolError):
        Client(
            serve(lambda peer: peer.send({"jsonrpc": "2.0", "id": peer.request()["id"], **body})).path
        ).call("m")


def test_socket_that_is_not_there_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(RpcTransportError, match=r"gone\.sock: connect: No such file") as caught:
        Client(tmp_path / "gone.sock").call("m")
    assert not caught.value.is_fate_unknown


def test_socket_nobody_listens_on_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(RpcTransportError, match="connect: Connection refused"):
        Client(path).call("m")


def test_connection_closed_before_the_reply_has_an_unknown_fate(serve: Serve) -> None:
    def hang_up(peer: Peer) -> None:
        peer.request()

    client = Client(serve(hang_up).path)
    with pytest.raises(RpcTransportError, match="m: connection closed before the reply") as caught:
        client.call("m")
    assert caught.value.is_fate_unknown


def test_server_restarted_between_calls_is_connected_again(serve: Serve) -> None:
    def once(peer: Peer) -> None:
        peer.send(reply_to(peer.request(), "first"))
        peer.wait_for_release()

    server = serve(once)
    client = Client(server.path)
    assert client.call("m") == "first"
    server.close()
    with pytest.raises(RpcTransportError):
        client.call("m", timeout_s=1)
    serve(echo)
    assert client.call("m") == ["m", None]


def test_request_over_256_kib_is_refused_before_it_is_sent(serve: Serve) -> None:
    server = serve(echo)
    client = Client(server.path)
    overhead = len(
        json.dumps({"jsonrpc": "2.0", "method": "m", "id": 1, "params": {"a": ""}}, separators=(",", ":"))
    )
    assert client.call("m", {"a": "x" * (REQUEST_SIZE_LIMIT_BYTES - overhead)})[0] == "m"
    with pytest.raises(RpcUsageError, match="expected at most 262144 bytes, got 262145"):
        client.call("m", {"a": "x" * (REQUEST_SIZE_LIMIT_BYTES - overhead + 1)})
    assert client.call("n") == ["n", None]


def test_params_that_are_no_json_are_refused_without_their_value() -> None:
    with pytest.raises(RpcUsageError) as caught:
        Client("/nonexistent/x").call("m", {"psk": b"hidden"})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message", "expected", "errno"),
    [
        (-17, "File exists", RpcMethodError, 17),
        (-32602, "Invalid parameters", RpcMethodError, 0),
        (-1, "Operation not permitted", RpcMethodError, 1),
        (-1, "Method may only be called before framework is initialized.", RpcStateError, 0),
    ],
)
def test_error_reply_becomes_its_exception(
    serve: Serve, code: int, message: str, expected: type[RpcMethodError], errno: int
) -> None:
    def refuse(peer: Peer) -> None:
        peer.send({"jsonrpc": "2.0", "id": peer.request()["id"], "error": {"code": code, "message": message}})

    with pytest.raises(RpcMethodError) as caught:
        Client(serve(refuse).path).call("m")
    assert type(caught.value) is expected
    assert (caught.value.method, caught.value.code, caught.value.message) == ("m", code, message)
    assert caught.value.errno == errno


def test_error_without_an_id_answers_the_only_call(serve: Serve) -> None:
    error = {"code": -32600, "message": "Invalid request"}
    with pytest.raises(RpcMethodError, match="Invalid request"):
        Client(
            serve(lambda peer: peer.send({"id": None, "error": error}) if peer.request() else None).path
        ).call("m")


def test_secret_quoted_by_the_peer_is_blanked(serve: Serve) -> None:
    def tell(peer: Peer) -> None:
        request = peer.request()
        error = {"code": -22, "message": f"bad key {request['params']['dhchap_key']}"}
        peer.send({"jsonrpc": "2.0", "id": request["id"], "error": error})

    with pytest.raises(RpcMethodError) as caught:
        Client(serve(tell).path).call("m", {"dhchap_key": "DHHC-1:00:abc"})
    assert "DHHC" not in str(caught.value) and "bad key ***" in str(caught.value)


def test_calls_of_several_threads_each_get_their_own_reply(serve: Serve) -> None:
    client = Client(serve(echo).path)
    wrong: list[Any] = []

    def work(name: str) -> None:
        wrong.extend(reply for _ in range(50) if (reply := client.call(name)) != [name, None])

    threads = [threading.Thread(target=work, args=(f"m{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []


def test_waiting_for_another_threads_call_counts_against_the_deadline(serve: Serve) -> None:
    def stay_silent(peer: Peer) -> None:
        peer.request()
        peer.wait_for_release()

    def call_first() -> None:
        with pytest.raises(RpcTimeoutError):
            client.call("a", timeout_s=0.6)

    server = serve(stay_silent)
    client = Client(server.path)
    first = threading.Thread(target=call_first)
    first.start()
    while server.connection_count == 0:
        time.sleep(0.001)
    with pytest.raises(RpcTimeoutError, match="waiting for another call") as caught:
        client.call("b", timeout_s=0.05)
    assert not caught.value.is_fate_unknown
    first.join(WAIT_S)


def test_client_over_tcp() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def run() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(EOFError):
            echo(Peer(connection, 0, threading.Event()))

    threading.Thread(target=run, daemon=True).start()
    with Client(f"127.0.0.1:{port}") as client:
        assert client.call("m") == ["m", None]
    listening.close()


def test_tcp_port_nobody_listens_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(RpcTransportError, match=f"127.0.0.1:{port}: connect: Connection refused"):
        Client(f"127.0.0.1:{port}").call("m")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/var/tmp/spdk.sock", "/var/tmp/spdk.sock"),
        ("./a.sock", "./a.sock"),
        ("unix:a", "a"),
        ("host:5260", ("host", 5260)),
        ("tcp://127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_parse_address(text: str, expected: object) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "spdk", "host:0", "host:65536", "unix:", "/" + "x" * 107])
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(RpcUsageError, match="RPC address"):
        parse_address(text)


def test_parse_address_takes_the_longest_path() -> None:
    assert parse_address("/" + "x" * 106) == "/" + "x" * 106


@pytest.mark.parametrize("result", [None, 5, {}, ["x"], "text"])
def test_typed_call_refuses_a_result_of_another_type(serve: Serve, result: Any) -> None:
    rpc = SpdkRpc(Client(serve(lambda peer: peer.send(reply_to(peer.request(), result))).path))
    with pytest.raises(RpcProtocolError, match="bdev_get_bdevs: result"):
        rpc.bdev_get_bdevs()


def test_typed_call_sends_only_what_is_given(serve: Serve) -> None:
    seen: list[dict[str, Any]] = []

    def record(peer: Peer) -> None:
        while True:
            request = peer.request()
            seen.append(request.get("params", {}))
            peer.send(reply_to(request, 7 if request["method"].endswith("add_ns") else True))

    rpc = SpdkRpc(Client(serve(record).path)).within(5)
    assert rpc.nvmf_create_transport(max_io_size=1 << 20)
    assert rpc.nvmf_subsystem_add_ns(nqn="n", bdev_name="b", nsid=7) == 7
    assert rpc.nvmf_subsystem_add_listener(nqn="n", traddr="::1", trsvcid=0)
    assert seen == [
        {"trtype": "TCP", "max_io_size": 1 << 20},
        {"nqn": "n", "namespace": {"bdev_name": "b", "nsid": 7}},
        {"nqn": "n", "listen_address": {"trtype": "TCP", "adrfam": "ipv6", "traddr": "::1", "trsvcid": "0"}},
    ]
