"""The client against scripted servers that do what a broken, slow or restarted peer does."""

from __future__ import annotations

import asyncio
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
    AsyncClient,
    AsyncSpdkRpc,
    Client,
    PeerInfo,
    RpcMethodError,
    RpcProtocolError,
    RpcStateError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUnsupportedError,
    RpcUsageError,
    SpdkRpc,
    calls,
    parse_address,
)
from spdk_rpc.aio import _Waiter
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


class BlockingAsync:
    """An ``AsyncClient`` on a loop of its own that runs while a call waits: the tests see no difference."""

    def __init__(self, address: str | Path, **options: float) -> None:
        self._loop = asyncio.new_event_loop()
        self.inner = AsyncClient(address, **options)

    def call(self, method: str, params: dict[str, Any] | None = None, **options: float) -> Any:
        return self._loop.run_until_complete(self.inner.call(method, params, **options))

    def batch(self, requests: list[Any], **options: float) -> list[Any]:
        return self._loop.run_until_complete(self.inner.batch(requests, **options))

    def peer(self) -> PeerInfo:
        return self._loop.run_until_complete(self.inner.peer())

    @property
    def dropped_reply_count(self) -> int:
        return self.inner.dropped_reply_count

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self.inner.close())
            # Tasks that were cancelled get their turn to end.
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def __enter__(self) -> BlockingAsync:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


AnyClient = Client | BlockingAsync
Connect = Callable[..., AnyClient]


@pytest.fixture(params=[Client, BlockingAsync], ids=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind and closes them."""
    clients: list[AnyClient] = []

    def make(address: str | Path, **options: float) -> AnyClient:
        clients.append(request.param(address, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def reply_to(request: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


def echo(peer: Peer) -> None:
    while True:
        request = peer.request()
        peer.send(reply_to(request, [request["method"], request.get("params")]))


def test_call_sends_the_request_and_returns_the_result(connect: Connect, serve: Serve) -> None:
    with connect(serve(echo).path) as client:
        assert client.call("m", {"a": 1}) == ["m", {"a": 1}]
        assert client.call("n") == ["n", None]


def test_late_reply_never_reaches_the_next_call(connect: Connect, serve: Serve) -> None:
    def late(peer: Peer) -> None:
        request = peer.request()
        if peer.index == 0:
            peer.wait_for_release()
        peer.send(reply_to(request, f"answer to {request['method']}"))
        peer.request()

    server = serve(late)
    client = connect(server.path)
    with pytest.raises(RpcTimeoutError, match=r"first: no reply within 0\.05 s") as caught:
        client.call("first", timeout_s=0.05)
    assert caught.value.method == "first" and caught.value.is_fate_unknown
    server.released.set()
    assert client.call("second", timeout_s=WAIT_S) == "answer to second"
    assert server.connection_count == 2, "the timed-out connection is not used again"


def test_reply_trickled_byte_by_byte_is_put_together(connect: Connect, serve: Serve) -> None:
    def trickle(peer: Peer) -> None:
        for byte in json.dumps(reply_to(peer.request(), {"text": 'é\\"{'}), ensure_ascii=False).encode():
            peer.send(bytes([byte]))

    assert connect(serve(trickle).path).call("m") == {"text": 'é\\"{'}


def test_deadline_covers_the_whole_call_when_bytes_keep_coming(connect: Connect, serve: Serve) -> None:
    def drip(peer: Peer) -> None:
        peer.request()
        while not peer.released.wait(0.02):
            peer.send(b" ")

    started = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        connect(serve(drip).path).call("m", timeout_s=0.2)
    assert 0.15 < time.monotonic() - started < 5


def test_two_replies_in_one_read_the_one_with_our_id_counts(connect: Connect, serve: Serve) -> None:
    def glue(peer: Peer) -> None:
        request = peer.request()
        stale = {"jsonrpc": "2.0", "id": 99, "result": "stale"}
        peer.send(json.dumps(stale).encode() + json.dumps(reply_to(request, "ours")).encode())
        echo(peer)

    client = connect(serve(glue).path)
    assert client.call("m") == "ours"
    assert client.dropped_reply_count == 1
    assert client.call("n") == ["n", None]


def test_reply_cut_inside_a_utf8_character_at_4096_arrives(connect: Connect, serve: Serve) -> None:
    def cut(peer: Peer) -> None:
        head = f'{{"jsonrpc":"2.0","id":{peer.request()["id"]},"result":"'.encode()
        raw = head + b"x" * (4095 - len(head)) + "é".encode() + b'"}'
        peer.send(raw[:4096])
        peer.wait_for_release()
        peer.send(raw[4096:])

    server = serve(cut)
    timer = threading.Timer(0.05, server.released.set)
    timer.start()
    assert connect(server.path).call("m").endswith("xé")
    timer.join()


def test_reply_with_a_wrong_id_only_ends_in_a_timeout(connect: Connect, serve: Serve) -> None:
    def wrong(peer: Peer) -> None:
        request = peer.request()
        peer.send({"jsonrpc": "2.0", "id": request["id"] + 1000, "result": 1})
        peer.send({"jsonrpc": "2.0", "id": str(request["id"]), "result": 2})
        peer.wait_for_release()

    client = connect(serve(wrong).path)
    with pytest.raises(RpcTimeoutError):
        client.call("m", timeout_s=0.5)
    assert client.dropped_reply_count == 2


def test_reply_over_32_mib_is_refused_and_the_client_goes_on(connect: Connect, serve: Serve) -> None:
    def flood(peer: Peer) -> None:
        request = peer.request()
        if peer.index == 0:
            peer.send(b'{"jsonrpc":"2.0","result":"')
            while True:
                peer.send(b"x" * (1 << 20))
        peer.send(reply_to(request, "fine"))

    client = connect(serve(flood).path)
    with pytest.raises(RpcProtocolError, match=f"longer than {REPLY_SIZE_LIMIT_BYTES} bytes"):
        client.call("m")
    assert client.call("m") == "fine"


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400\r\n", b'{"id":1,}', b'{"id":"\xff"}', b'[{"id":1,"result":1}]']
)
def test_garbage_is_a_protocol_error_and_the_client_goes_on(
    connect: Connect, serve: Serve, garbage: bytes
) -> None:
    def speak(peer: Peer) -> None:
        request = peer.request()
        peer.send(garbage if peer.index == 0 else reply_to(request, "fine"))
        peer.wait_for_release()

    client = connect(serve(speak).path)
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
def test_reply_without_result_or_proper_error_is_a_protocol_error(
    connect: Connect, serve: Serve, body: dict[str, Any]
) -> None:
    with pytest.raises(RpcProtocolError):
        connect(
            serve(lambda peer: peer.send({"jsonrpc": "2.0", "id": peer.request()["id"], **body})).path
        ).call("m")


def test_socket_that_is_not_there_names_the_path(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(RpcTransportError, match=r"gone\.sock: connect: No such file") as caught:
        connect(tmp_path / "gone.sock").call("m")
    assert not caught.value.is_fate_unknown


def test_socket_nobody_listens_on_is_refused(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(RpcTransportError, match="connect: Connection refused"):
        connect(path).call("m")


def test_connection_closed_before_the_reply_has_an_unknown_fate(connect: Connect, serve: Serve) -> None:
    def hang_up(peer: Peer) -> None:
        peer.request()

    client = connect(serve(hang_up).path)
    with pytest.raises(RpcTransportError, match="m: connection closed before the reply") as caught:
        client.call("m")
    assert caught.value.is_fate_unknown


def test_server_restarted_between_calls_is_connected_again(connect: Connect, serve: Serve) -> None:
    def once(peer: Peer) -> None:
        peer.send(reply_to(peer.request(), "first"))
        peer.wait_for_release()

    server = serve(once)
    client = connect(server.path)
    assert client.call("m") == "first"
    server.close()
    with pytest.raises(RpcTransportError):
        client.call("m", timeout_s=1)
    serve(echo)
    assert client.call("m") == ["m", None]


def test_request_over_256_kib_is_refused_before_it_is_sent(connect: Connect, serve: Serve) -> None:
    server = serve(echo)
    client = connect(server.path)
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
    connect: Connect, serve: Serve, code: int, message: str, expected: type[RpcMethodError], errno: int
) -> None:
    def refuse(peer: Peer) -> None:
        peer.send({"jsonrpc": "2.0", "id": peer.request()["id"], "error": {"code": code, "message": message}})

    with pytest.raises(RpcMethodError) as caught:
        connect(serve(refuse).path).call("m")
    assert type(caught.value) is expected
    assert (caught.value.method, caught.value.code, caught.value.message) == ("m", code, message)
    assert caught.value.errno == errno


def test_error_without_an_id_answers_the_only_call(connect: Connect, serve: Serve) -> None:
    error = {"code": -32600, "message": "Invalid request"}
    with pytest.raises(RpcMethodError, match="Invalid request"):
        connect(
            serve(lambda peer: peer.send({"id": None, "error": error}) if peer.request() else None).path
        ).call("m")


def test_secret_quoted_by_the_peer_is_blanked(connect: Connect, serve: Serve) -> None:
    def tell(peer: Peer) -> None:
        request = peer.request()
        error = {"code": -22, "message": f"bad key {request['params']['dhchap_key']}"}
        peer.send({"jsonrpc": "2.0", "id": request["id"], "error": error})

    with pytest.raises(RpcMethodError) as caught:
        connect(serve(tell).path).call("m", {"dhchap_key": "DHHC-1:00:abc"})
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


def test_client_over_tcp(connect: Connect) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def run() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(EOFError):
            echo(Peer(connection, 0, threading.Event()))

    threading.Thread(target=run, daemon=True).start()
    with connect(f"127.0.0.1:{port}") as client:
        assert client.call("m") == ["m", None]
    listening.close()


def test_tcp_port_nobody_listens_on_is_refused(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(RpcTransportError, match=f"127.0.0.1:{port}: connect: Connection refused"):
        connect(f"127.0.0.1:{port}").call("m")


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


@pytest.mark.parametrize("text", ["", "spdk", "host:0", "host:65536", "unix:", "/a\0b", "/" + "x" * 107])
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(RpcUsageError, match=r"^RPC address: .*expected .*, got .*; (name|write|have|SPDK)"):
        parse_address(text)
    with pytest.raises(RpcUsageError, match=r"^--rpc: "):
        parse_address(text, field="--rpc")


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


def as_spdk(peer: Peer, *, version: tuple[int, int] = (26, 5), seen: list[Any] | None = None) -> None:
    """Answers as an SPDK of that version; ``fail*`` is refused, ``nope*`` is a method it does not have."""

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        method = request["method"]
        head = {"jsonrpc": "2.0", "id": request["id"]}
        if method == "spdk_get_version":
            major, minor = version
            fields = {"major": major, "minor": minor, "patch": 0, "suffix": ""}
            return {**head, "result": {"version": f"SPDK v{major:02}.{minor:02}", "fields": fields}}
        if method == "rpc_get_methods":
            return {**head, "result": ["spdk_get_version", "bdev_get_bdevs"]}
        if method.startswith("fail"):
            return {**head, "error": {"code": -17, "message": "File exists"}}
        if method.startswith("nope"):
            return {**head, "error": {"code": -32601, "message": "Method not found"}}
        return {**head, "result": [method, request.get("params")]}

    while True:
        request: Any = peer.request()
        if seen is not None:
            seen.append(request)
        peer.send(
            json.dumps([reply(each) for each in request]).encode()
            if isinstance(request, list)
            else reply(request)
        )
        if not isinstance(request, list) and request["method"] == "leave":
            return


def test_batch_is_one_array_and_each_call_has_its_outcome(connect: Connect, serve: Serve) -> None:
    seen: list[Any] = []
    client = connect(serve(lambda peer: as_spdk(peer, seen=seen)).path)
    first, second, third = client.batch([("a", {"x": 1}), ("fail", {"psk": "s"}), ("b", None)])
    assert (first, third) == (["a", {"x": 1}], ["b", None])
    assert isinstance(second, RpcMethodError) and (second.method, second.code) == ("fail", -17)
    assert [len(each) for each in seen if isinstance(each, list)] == [3]


def test_batch_for_an_older_spdk_goes_call_by_call(connect: Connect, serve: Serve) -> None:
    seen: list[Any] = []
    client = connect(serve(lambda peer: as_spdk(peer, version=(26, 1), seen=seen)).path)
    first, second = client.batch([("fail", None), ("b", None)])
    assert isinstance(first, RpcMethodError) and second == ["b", None]
    assert not any(isinstance(each, list) for each in seen)


def test_long_batch_is_cut_into_arrays_that_spdk_takes(connect: Connect, serve: Serve) -> None:
    seen: list[Any] = []
    client = connect(serve(lambda peer: as_spdk(peer, seen=seen)).path)
    big = "x" * (100 << 10)
    requests = [("m", {"i": i, "a": big if i < 5 else ""}) for i in range(300)]
    assert [each[1]["i"] for each in client.batch(requests)] == list(range(300))
    arrays = [each for each in seen if isinstance(each, list)]
    assert [len(each) for each in arrays] == [2, 2, 128, 128, 40]
    assert all(len(json.dumps(each, separators=(",", ":"))) <= REQUEST_SIZE_LIMIT_BYTES for each in arrays)
    with pytest.raises(RpcUsageError, match="m: request: expected at most"):
        client.batch([("a", None), ("m", {"a": "x" * REQUEST_SIZE_LIMIT_BYTES})])
    assert client.batch([]) == []


def test_batch_answered_out_of_order_is_matched_by_id(connect: Connect, serve: Serve) -> None:
    def shuffle(peer: Peer) -> None:
        for _ in range(2):
            peer.send(reply_to(request, SPDK_2605)) if (request := peer.request())[
                "method"
            ] == "spdk_get_version" else (peer.send(reply_to(request, [])))
        request = peer.request()
        assert isinstance(request, list)
        peer.send(json.dumps([reply_to(each, each["method"]) for each in reversed(request)]).encode())

    assert connect(serve(shuffle).path).batch([("a", None), ("b", None), ("c", None)]) == ["a", "b", "c"]


SPDK_2605 = {"version": "SPDK v26.05", "fields": {"major": 26, "minor": 5, "patch": 0, "suffix": ""}}


def test_array_that_no_batch_asked_for_is_a_protocol_error(connect: Connect, serve: Serve) -> None:
    with pytest.raises(RpcProtocolError, match="expected an object, got an array"):
        connect(serve(lambda peer: peer.send(json.dumps([reply_to(peer.request(), 1)]).encode())).path).call(
            "m"
        )


def test_method_the_peer_lacks_is_named_with_the_peers_version(connect: Connect, serve: Serve) -> None:
    server = serve(as_spdk)
    with pytest.raises(RpcUnsupportedError) as caught:
        connect(server.path).call("nope_create")
    assert str(caught.value) == f"nope_create: SPDK v26.05 at {server.path} has no such method (-32601)"
    assert (caught.value.method, caught.value.version, caught.value.code) == (
        "nope_create",
        "SPDK v26.05",
        -32601,
    )


def test_unknown_method_of_a_peer_without_a_version_is_still_named(connect: Connect, serve: Serve) -> None:
    def know_nothing(peer: Peer) -> None:
        while True:
            error = {"code": -32601, "message": "Method not found"}
            peer.send({"jsonrpc": "2.0", "id": peer.request()["id"], "error": error})

    with pytest.raises(RpcUnsupportedError, match="m: a peer of unknown version at"):
        connect(serve(know_nothing).path).call("m")


def test_peer_is_asked_once_per_connection(connect: Connect, serve: Serve) -> None:
    seen: list[Any] = []
    server = serve(lambda peer: as_spdk(peer, seen=seen))
    client = connect(server.path)
    assert client.peer() == client.peer()
    assert client.peer().release == (26, 5) and client.peer().methods == {
        "spdk_get_version",
        "bdev_get_bdevs",
    }
    assert len(seen) == 2
    assert client.call("leave") == ["leave", None]
    server.close()
    seen.clear()
    serve(lambda peer: as_spdk(peer, version=(25, 9), seen=seen))
    with contextlib.suppress(RpcTransportError):
        client.call("m")
    assert client.call("m") == ["m", None]
    assert client.peer().release == (25, 9)


@pytest.mark.parametrize(
    "version",
    [{}, {"fields": {}}, {"fields": {"major": "26", "minor": 5}}, {"fields": {"major": 26, "minor": True}}],
)
def test_peer_with_a_strange_version_is_a_protocol_error(
    connect: Connect, serve: Serve, version: Any
) -> None:
    def strange(peer: Peer) -> None:
        while True:
            peer.send(reply_to(peer.request(), version))

    with pytest.raises(RpcProtocolError, match="spdk_get_version: result"):
        connect(serve(strange).path).peer()


def test_long_method_has_the_long_deadline_and_what_spdk_waits_on_top(connect: Connect, serve: Serve) -> None:
    def silent(peer: Peer) -> None:
        peer.request()
        peer.wait_for_release()

    client = connect(serve(silent).path, timeout_s=0.05, long_timeout_s=0.1)
    for method, params, limit_s in (
        ("bdev_get_iostat", None, "0.1"),
        ("bdev_get_bdevs", {"name": "x", "timeout": 50}, "0.15"),
        ("log_get_flags", {"timeout": 50}, "0.05"),
        ("method_of_the_future", None, "0.05"),
    ):
        with pytest.raises(RpcTimeoutError, match=rf"{method}: no reply within {limit_s} s"):
            client.call(method, params)
    with pytest.raises(RpcTimeoutError, match=r"no reply within 0\.01 s"):
        client.call("bdev_get_iostat", timeout_s=0.01)


def test_secrets_are_in_no_log(connect: Connect, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="spdk_rpc"):
        client = connect(serve(as_spdk).path)
        client.call("m", {"psk": "hidden-psk"})
        client.batch([("m", {"dhchap_key": "hidden-key"}), ("fail", {"password": "hidden-word"})])
    assert "m took" in caplog.text and "hidden" not in caplog.text
    assert "hidden" not in repr(client)


def test_secret_deep_in_the_parameters_is_blanked(connect: Connect, serve: Serve) -> None:
    def tell(peer: Peer) -> None:
        request = peer.request()
        error = {"code": -22, "message": f"bad: {json.dumps(request['params'])}"}
        peer.send({"jsonrpc": "2.0", "id": request["id"], "error": error})

    with pytest.raises(RpcMethodError) as caught:
        connect(serve(tell).path).call("m", {"list": [{"password": "hidden"}]})
    assert "hidden" not in str(caught.value)


def test_asyncio_calls_overlap_and_a_slow_one_is_overtaken(serve: Serve) -> None:
    def reorder(peer: Peer) -> None:
        slow, fast = sorted((peer.request(), peer.request()), key=lambda request: str(request["method"]))
        peer.send(reply_to(fast, "fast"))
        peer.wait_for_release()
        peer.send(reply_to(slow, "slow"))
        peer.request()

    async def run(server: ScriptedServer) -> None:
        async with AsyncClient(server.path) as client:
            slow = asyncio.ensure_future(client.call("a", timeout_s=WAIT_S))
            assert await client.call("b", timeout_s=WAIT_S) == "fast"
            assert not slow.done()
            server.released.set()
            assert await slow == "slow"

    asyncio.run(run(serve(reorder)))


def test_asyncio_timeout_of_one_call_leaves_the_others_on_its_connection_alone(serve: Serve) -> None:
    def late(peer: Peer) -> None:
        if peer.index:
            peer.send(reply_to(peer.request(), "from the new connection"))
            peer.request()
        first, second = peer.request(), peer.request()
        peer.wait_for_release()
        peer.send(reply_to(first, "late"))
        peer.send(reply_to(second, "second"))

    async def run(server: ScriptedServer) -> None:
        async with AsyncClient(server.path) as client:
            first = asyncio.ensure_future(client.call("first", timeout_s=0.1))
            await asyncio.sleep(0.01)
            second = asyncio.ensure_future(client.call("second", timeout_s=WAIT_S))
            with pytest.raises(RpcTimeoutError, match="first: no reply"):
                await first
            assert await client.call("third") == "from the new connection"
            server.released.set()
            assert await second == "second"
            for _ in range(3):
                await asyncio.sleep(0)
            assert client.dropped_reply_count == 1

    asyncio.run(run(serve(late)))


def test_asyncio_cancelled_call_is_never_answered_to_another(serve: Serve) -> None:
    def late(peer: Peer) -> None:
        request = peer.request()
        if peer.index == 0:
            peer.wait_for_release()
        peer.send(reply_to(request, request["method"]))
        peer.request()

    async def run(server: ScriptedServer) -> None:
        async with AsyncClient(server.path) as client:
            task = asyncio.ensure_future(client.call("first"))
            while server.connection_count == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.released.set()
            assert await client.call("second") == "second"

    asyncio.run(run(serve(late)))


def test_asyncio_cancellation_in_the_turn_that_ends_the_wait_is_not_forgotten() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter("m", "a", WAIT_S, loop.time() + WAIT_S)
        reply: asyncio.Future[int] = loop.create_future()
        task = asyncio.ensure_future(waiter.within(reply, "waiting", was_sent=True))
        await asyncio.sleep(0)
        reply.set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_asyncio_close_ends_calls_under_way(serve: Serve) -> None:
    def silent(peer: Peer) -> None:
        peer.request()
        peer.wait_for_release()

    async def run(path: str) -> None:
        client = AsyncClient(path)
        call = asyncio.ensure_future(client.call("m"))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(RpcTransportError, match="connection closed before the reply"):
            await call

    asyncio.run(run(serve(silent).path))


def test_typed_methods_of_both_facades(serve: Serve) -> None:
    def typed(peer: Peer) -> None:
        while True:
            request: Any = peer.request()
            if isinstance(request, list):
                peer.send(json.dumps([reply_to(each, True) for each in request]).encode())
            elif request["method"] == "spdk_get_version":
                peer.send(reply_to(request, SPDK_2605))
            elif request["method"] == "rpc_get_methods":
                peer.send(reply_to(request, ["bdev_get_bdevs", "ublk_get_disks"]))
            else:
                peer.send(reply_to(request, [{"name": "x"}]))

    path = serve(typed).path
    with Client(path) as client:
        rpc = SpdkRpc(client)
        assert rpc.bdev_get_bdevs(name="x")[0]["name"] == "x"
        assert rpc.batch([calls.bdev_malloc_delete("a"), calls.nvmf_delete_subsystem("n")]) == [True, True]
        with pytest.raises(
            RpcProtocolError, match="bdev_get_bdevs: result: expected a list of objects, got bool"
        ):
            rpc.batch([calls.bdev_get_bdevs()])
        assert rpc.supports("bdev_get_bdevs") and not rpc.supports("nbd_get_disks")
        with pytest.raises(RpcUnsupportedError, match=r"nbd_get_disks: SPDK v26\.05 at"):
            rpc.require("bdev_get_bdevs", "nbd_get_disks")
        assert rpc.batch([]) == []

    async def run() -> None:
        async with AsyncClient(path) as client:
            rpc = AsyncSpdkRpc(client).within(5)
            assert (await rpc.bdev_get_bdevs(name="x"))[0]["name"] == "x"
            assert await rpc.batch([calls.bdev_malloc_delete("a")]) == [True]
            assert await rpc.supports("ublk_get_disks")
            with pytest.raises(RpcUnsupportedError):
                await rpc.require("nbd_get_disks")

    asyncio.run(run())
