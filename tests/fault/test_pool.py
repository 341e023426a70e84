"""One pool process for many engine processes: shared, killed on either side, told nonsense."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.buffers import page_addresses
from kvdev.clock import Deadline
from kvdev.errors import CapacityError, ConnectError, ConnectionLostError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import PageKeys, salt_mark
from kvdev.native.checksum import CRC32C, NH64
from kvdev.pool.link import Channel, ask_status
from kvdev.pool.protocol import (
    BODY_SIZE_BYTES_MAX,
    HEADER,
    MAGIC,
    VERSION,
    Commit,
    MessageError,
    MessageType,
    build_json,
    build_message,
    parse_commit,
    parse_grants,
    parse_header,
    parse_json,
    parse_keys,
)
from kvdev.pool.server import PoolServer
from kvdev.session import Session, open_pool
from kvdev.store import PageStatus, Volume
from kvdev.store.recreate import recreate_volume
from kvdev.store.resplit import SplitReader
from kvdev.testing.killable import KillableTarget
from kvdev.testing.target import running_target
from kvdev.uri import parse_volume_uri
from kvdev_kernels.nh64 import nh64
from tests.served import GEOMETRY, PAGE, QUOTA, ServerThread, keys_of, make_volume, pages_of, soon

ENGINE = """
import sys
import numpy as np
from kvdev.session import open_pool

path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = open_pool(path, "kv")


def keys_of(numbers):
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :8] = np.asarray(numbers, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return keys


def pages_of(numbers):
    return np.stack([np.random.default_rng(n).integers(0, 256, store.page_size_bytes, np.uint8) for n in numbers])


if count < 0:  # take grants, and never write
    grants = store.reserve(keys_of(range(-count)))
    print("reserved", flush=True)
    sys.stdin.read()
out = np.zeros((4, store.page_size_bytes), dtype=np.uint8)
step = 0
while True:
    numbers = [first + (step * 4 + i) % count for i in range(4)]
    step += 1
    put = store.put(keys_of(numbers), pages_of(numbers))
    got = store.get(keys_of(numbers), out)
    expected = pages_of(numbers)
    for status, page, right in zip(got.status, out, expected):
        assert status != 1 or (page == right).all(), "wrong bytes"
    print(put.stored_count, got.hit_count, flush=True)
"""


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def volume(tmp_path: Path) -> str:
    return make_volume(tmp_path)


@pytest.fixture
def served(volume: str, tmp_path: Path) -> Iterator[ServerThread]:
    server = ServerThread(volume, tmp_path / "pool.sock", "kv", "rank1")
    yield server
    server.close()


def pool_process(volume: str, path: Path, *options: str, also: str | None = None) -> subprocess.Popen[bytes]:
    """``also`` is the URI of a further KV namespace to serve."""
    ready = path.with_suffix(".ready")
    ready.unlink(missing_ok=True)
    names = [f"{volume}#kv", *([] if also is None else [also])]
    arguments = ["pool", "serve", *names, "--socket", str(path), "--ready-file", str(ready), *options]
    child = subprocess.Popen([sys.executable, "-m", "kvdev_tools.main", *arguments])
    wait_for(lambda: ready.exists() or child.poll() is not None)
    assert child.poll() is None, "the pool process did not start"
    return child


def engine(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(path), str(first), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    limit, pause = soon(), threading.Event()
    while not condition():
        assert not limit.is_expired, "it does not come"
        pause.wait(0.02)


def wait_for_answer(child: subprocess.Popen[str], stored: int, hits: int) -> None:
    """Read what an engine prints until it says this. It prints a thousand lines a second: none of them waits for us."""
    limit = soon()
    assert child.stdout is not None
    while line := child.stdout.readline():
        if line.split() == [str(stored), str(hits)]:
            return
        assert not limit.is_expired, "it does not come"
    pytest.fail("the engine has ended")


def server_pid(path: Path) -> int:
    """Of the pool process that serves there now, 0 when there is none."""
    try:
        return int(ask_status(str(path), soon())["pid"])
    except TransportError:
        return 0


def kill(child: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    child.wait(20)


# --- together --------------------------------------------------------------------------------


def test_two_clients_see_each_others_pages_without_asking(served: ServerThread) -> None:
    a, b = (open_pool(served.path, "kv", geometry=GEOMETRY) for _ in range(2))
    numbers = list(range(20))
    assert a.put(keys_of(numbers), pages_of(numbers)).stored_count == 20
    before = served.server.request_count
    assert b.contains(keys_of([*numbers, 99])).tolist() == [True] * 20 + [False]
    assert b.longest_prefix(keys_of([*numbers, 99])) == 20
    assert b.lookup(keys_of(numbers))["length"].tolist() == [PAGE] * 20
    assert served.server.request_count == before
    out = np.zeros((21, PAGE), dtype=np.uint8)
    got = b.get(keys_of([*numbers, 99]), out)
    assert got.status.tolist() == [PageStatus.HIT] * 20 + [PageStatus.MISS]
    assert np.array_equal(out[:20], pages_of(numbers))
    # Replaced by one, read by the other; deleted by the other, missed by the one.
    assert b.put(keys_of([3]), pages_of([1003])).stored_count == 1
    assert a.get(keys_of([3]), out[:1]).hit_count == 1
    assert np.array_equal(out[:1], pages_of([1003]))
    assert b.delete(keys_of([4, 98])).tolist() == [True, False]
    assert not a.contains(keys_of([4])).any()
    a.flush()
    assert a.stat()["namespaces"][0]["pages"] == 19
    a.close()
    b.close()


def test_pages_at_the_quota_go_by_use_of_all_clients_and_pins_stay(served: ServerThread) -> None:
    a, b = (open_pool(served.path, "kv") for _ in range(2))
    a.put(keys_of(range(QUOTA)), pages_of(range(QUOTA)))
    assert a.pin(keys_of([7])).all()
    out = np.zeros((4, PAGE), dtype=np.uint8)
    assert b.get(keys_of([0, 1, 2, 3]), out).hit_count == 4
    # The uses were told on b's connection: an answer there comes after them.
    b.stat()
    for start in range(100, 150, 10):
        assert a.put(keys_of(range(start, start + 10)), pages_of(range(start, start + 10))).stored_count == 10
    assert b.contains(keys_of([0, 1, 2, 3, 7])).all()
    assert b.contains(keys_of(range(QUOTA))).sum() == 14
    assert a.unpin(keys_of([7, 99])).tolist() == [True, False]
    with pytest.raises(CapacityError, match=f"expected at most the quota of {QUOTA} pages"):
        a.put(keys_of(range(QUOTA + 1)), pages_of(range(QUOTA + 1)))
    a.close()
    b.close()


def test_ranks_of_one_pool_stay_apart(served: ServerThread) -> None:
    stores = [open_pool(served.path, name) for name in ("kv", "rank1")]
    stores[0].put(keys_of([1, 2, 3]), pages_of([1, 2, 3]))
    stores[1].put(keys_of([1]), pages_of([11]))
    from kvdev.pool.client import longest_common_prefix

    assert longest_common_prefix(stores, keys_of([1, 2, 3])) == 1
    out = np.zeros((1, PAGE), dtype=np.uint8)
    assert stores[1].get(keys_of([1]), out).hit_count == 1
    assert np.array_equal(out, pages_of([11]))
    for store in stores:
        store.close()


def flip_bit_of_page(folder: Path, number: int) -> None:
    needle = pages_of([number])[0].tobytes()
    for path in (folder / "m0", folder / "m1"):
        place = path.read_bytes().find(needle)
        if place >= 0:
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([needle[0] ^ 1]))
            return
    pytest.fail("the page is on no member")


def test_page_damaged_on_media_is_an_error_once_and_then_a_miss(served: ServerThread, tmp_path: Path) -> None:
    store = open_pool(served.path, "kv")
    store.put(keys_of([1, 2]), pages_of([1, 2]))
    flip_bit_of_page(tmp_path, 1)
    out = np.zeros((2, PAGE), dtype=np.uint8)
    got = store.get(keys_of([1, 2]), out)
    assert got.status.tolist() == [PageStatus.ERROR, PageStatus.HIT]
    assert "page 0 of the batch: checksum" in str(got.failure)
    wait_for(lambda: not store.contains(keys_of([1])).any())
    store.close()


class ReplacedMeanwhile:
    """Reads pages after another client has replaced them."""

    def __init__(self, page_io: Any, replace: Callable[[], object]) -> None:
        self._page_io = page_io
        self._replace = replace

    def read(self, *arguments: Any, **options: Any) -> Any:
        self._replace()
        return self._page_io.read(*arguments, **options)


def test_bytes_are_left_to_a_kernel_where_it_is_asked_for_and_what_it_reports_goes(
    served: ServerThread, tmp_path: Path
) -> None:
    store, other = (open_pool(served.path, "kv") for _ in range(2))
    with pytest.raises(UsageError, match="verify: expected store or kernel, got 'nobody'"):
        store.get(keys_of([1]), np.zeros((1, PAGE), dtype=np.uint8), verify="nobody")  # type: ignore[arg-type]
    put = store.put(keys_of([1, 2, 3]), pages_of([1, 2, 3]))
    flip_bit_of_page(tmp_path, 1)
    flip_bit_of_page(tmp_path, 3)
    out = np.zeros((4, PAGE), dtype=np.uint8)
    got = store.get(keys_of([1, 2, 9, 3]), out, verify="kernel")
    hit, miss = PageStatus.HIT, PageStatus.MISS
    assert got.status.tolist() == [hit, hit, miss, hit] and got.failure is None
    assert got.sums[[0, 1, 3]].tolist() == put.sums.tolist(), "what the bytes must have"
    is_bad = store.checksum.sums(page_addresses(out, PAGE), PAGE) != got.sums
    is_bad &= got.status == hit
    assert is_bad.tolist() == [True, False, False, True]
    # One of the two is replaced before it is reported: the new page stays.
    other.put(keys_of([3]), pages_of([33]))
    assert store.report_bad(got, is_bad) == 1
    assert store.contains(keys_of([1, 2, 3])).tolist() == [False, True, True]
    assert store.get(keys_of([3]), out[:1]).hit_count == 1 and np.array_equal(out[:1], pages_of([33]))
    # Replaced while it is read: no kernel gets to see what is half the one and half the other.
    attached = store._attached
    assert attached is not None
    attached.page_io = ReplacedMeanwhile(  # type: ignore[assignment]
        attached.page_io, lambda: other.put(keys_of([2]), pages_of([22]))
    )
    got = store.get(keys_of([2, 3]), out[:2], verify="kernel")
    assert got.status.tolist() == [miss, hit] and store.stale_count == 1
    store.close()
    other.close()


# --- bad input -------------------------------------------------------------------------------


def hello(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(path)
    sock.sendall(build_message(MessageType.HELLO, 1, build_json({"namespace": "kv"})))
    head = parse_header(sock.recv(HEADER.size, socket.MSG_WAITALL))
    assert parse_json("hello", sock.recv(head.body_size_bytes, socket.MSG_WAITALL))["namespace"] == "kv"
    return sock


def answer_to(path: str, data: bytes, *, says_hello: bool = True) -> str:
    """The error that the server names; the connection is closed behind it."""
    sock = hello(path) if says_hello else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not says_hello:
        sock.settimeout(30)
        sock.connect(path)
    with sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(65536):
            received += part
    head = parse_header(received[: HEADER.size])
    assert head.type == MessageType.ERROR
    return str(parse_json("error", received[HEADER.size :])["message"])


KEYS = keys_of([1, 2]).tobytes()
NO_MESSAGES: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "magic+0x0: expected 4b445650, got 47455420"),
    (
        HEADER.pack(MAGIC, VERSION + 1, 2, 1, 0, 0),
        f"version+0x4: expected {VERSION}, got {VERSION + 1}: use the same kvdev on both sides",
    ),
    (HEADER.pack(MAGIC, VERSION, 99, 1, 0, 0), "type+0x6: expected 1 to 11, got 99"),
    (
        HEADER.pack(MAGIC, VERSION, 2, 1, BODY_SIZE_BYTES_MAX + 1, 0),
        "size+0xc: expected at most 8388608, got 8388609",
    ),
    (HEADER.pack(MAGIC, VERSION, 2, 1, 0xFFFFFFFF, 0), "size+0xc: expected at most"),
    (
        build_message(MessageType.RESERVE, 1, KEYS[:-1]),
        "pool reserve: expected keys of 32 bytes, got 63 bytes",
    ),
    (build_message(MessageType.RESERVE, 1, b""), "pool reserve: expected 1 to 65536 pages, got 0"),
    (build_message(MessageType.RESERVE, 1, bytes(32 * 65537)), "expected 1 to 65536 pages, got 65537"),
    (build_message(MessageType.COMMIT, 1, b"x"), "pool commit: expected at least 16 bytes, got 1"),
    (
        build_message(MessageType.COMMIT, 1, struct.pack("<IIQ", 2, 1, 0)),
        "expected 122 bytes of keys, grants",
    ),
    (build_message(MessageType.COMMIT, 1, struct.pack("<IIQ", 1, 65, 0)), "expected 1 to 64 members, got 65"),
    (build_message(MessageType.WITHDRAW, 1, b"abc"), "pool withdraw: expected grants of 24 bytes"),
    (build_message(MessageType.ERROR, 1, b""), "pool error: expected a request"),
    (
        build_message(MessageType.HELLO, 1, build_json({"namespace": "kv"})),
        "pool hello: expected one, got a second",
    ),
]


def test_what_is_no_message_is_named_and_others_are_served(served: ServerThread) -> None:
    store = open_pool(served.path, "kv")
    for data, text in NO_MESSAGES:
        assert text in answer_to(served.path, data)
    assert "hello first" in answer_to(
        served.path, build_message(MessageType.RESERVE, 1, KEYS), says_hello=False
    )
    for body in (b"\xff", b"[]", b"{"):
        assert "pool hello: expected" in answer_to(
            served.path, build_message(MessageType.HELLO, 1, body), says_hello=False
        )
    assert served.server.refused_count == len(NO_MESSAGES) + 4
    assert store.put(keys_of([1]), pages_of([1])).stored_count == 1
    store.close()


def test_messages_cut_at_every_byte_and_then_gone_leave_nothing(served: ServerThread) -> None:
    data = build_message(MessageType.RESERVE, 7, KEYS)
    for size in range(0, len(data), 3):
        with hello(served.path) as sock:
            sock.sendall(data[:size])
    store = open_pool(served.path, "kv")
    wait_for(lambda: store.stat()["clients"] == 1)
    assert store.stat()["namespaces"][0]["reserved_slots"] == 0
    store.close()


def test_parsers_take_back_what_was_built_and_refuse_outcomes_that_are_none(rng: np.random.Generator) -> None:
    keys = rng.integers(0, 256, (3, 32), dtype=np.uint8)
    grants = np.zeros(3, dtype=parse_grants("x", bytes(24)).dtype)
    grants["generation"] = [1, 2, 3]
    commit = Commit(
        keys,
        grants,
        np.arange(3, dtype=np.uint32),
        np.array([0, 1, 2], np.uint8),
        np.array([True, False]),
        99,
    )
    again = parse_commit(commit.build(), CRC32C)
    assert np.array_equal(again.keys, keys) and np.array_equal(again.grants, grants)
    assert again.members.tolist() == [True, False] and again.sent_ns == 99
    assert np.array_equal(parse_keys("x", keys.tobytes()), keys)
    raw = bytearray(commit.build())
    raw[-1] = 3
    with pytest.raises(MessageError, match="outcome: expected 0 to 2, got 3"):
        parse_commit(bytes(raw), CRC32C)


def test_grants_of_others_and_unknown_names_are_refused_and_the_connection_stays(
    served: ServerThread,
) -> None:
    a, b = (open_pool(served.path, "kv") for _ in range(2))
    grants = a.reserve(keys_of([1, 2]))
    crc = np.zeros(2, dtype=np.uint32)
    members = np.ones(2, dtype=np.bool_)
    for wrong in (grants, grants[[0, 0]]):
        with pytest.raises(UsageError, match="commit: grants: expected what was reserved here, each once"):
            b.commit(keys_of([1, 2]), wrong, crc, members=members)
    with pytest.raises(UsageError, match="expected 2 members, got 3"):
        a.commit(keys_of([1, 2]), grants, crc, members=np.ones(3, dtype=np.bool_))
    outcome = np.ones(2, dtype=np.uint8)
    assert not a.commit(keys_of([1, 2]), grants, crc, outcome=outcome, members=members).any()
    assert a.stat()["namespaces"][0]["reserved_slots"] == 0
    with pytest.raises(UsageError, match="namespace 'nope': expected one of kv, rank1"):
        open_pool(served.path, "nope")
    other = Geometry(model_id="other", layer_count=1, kv_head_count=1, head_size=64, tokens_per_page=32)
    with pytest.raises(UsageError, match="geometry: model_id: expected 'other', the namespace has 'pool'"):
        open_pool(served.path, "kv", geometry=other)
    a.close()
    b.close()
    with pytest.raises(UsageError, match="is closed"):
        a.contains(keys_of([1]))


def test_socket_is_this_users_alone_and_is_not_taken_from_one_that_serves(
    served: ServerThread, volume: str, tmp_path: Path
) -> None:
    assert stat.S_IMODE(Path(served.path).stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="another process serves there"):
        PoolServer(served.path, [], volume_uris=[], host={})
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(dead))
    with pytest.raises(ConnectError, match="start it with `kvdev pool serve`"):
        open_pool(str(dead), "kv")
    server = PoolServer(str(dead), [], volume_uris=[], host={})
    server.close()
    assert not dead.exists()
    assert ask_status(served.path, soon())["pid"] == os.getpid()


def test_client_that_reads_no_answers_is_dropped_and_others_are_served(served: ServerThread) -> None:
    store = open_pool(served.path, "kv")
    with hello(served.path) as sock:
        sock.settimeout(0.2)
        request = build_message(MessageType.DELETE, 1, keys_of(range(10_000)).tobytes())
        sent = 0
        with contextlib.suppress(TimeoutError, OSError):
            for _ in range(200):
                sock.sendall(request)
                sent += 1
        assert store.put(keys_of([1]), pages_of([1])).stored_count == 1
    wait_for(lambda: store.stat()["clients"] == 1)
    store.close()


# --- deaths ----------------------------------------------------------------------------------


def test_client_killed_with_grants_leaves_its_slots_to_others_after_a_rest(served: ServerThread) -> None:
    store = open_pool(served.path, "kv")
    child = engine(Path(served.path), 0, -10)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "reserved\n"
        assert store.stat()["namespaces"][0]["reserved_slots"] == 10
        child.send_signal(signal.SIGSTOP)
    finally:
        kill(child)
    wait_for(lambda: store.stat()["namespaces"][0]["orphaned_clients"] == 1)
    assert store.stat()["namespaces"][0]["reserved_slots"] == 10
    wait_for(lambda: store.stat()["namespaces"][0]["reserved_slots"] == 0)
    assert store.stat()["namespaces"][0]["orphaned_clients"] == 0
    assert store.put(keys_of(range(QUOTA)), pages_of(range(QUOTA))).stored_count == QUOTA
    store.close()


def test_client_that_only_lost_its_connection_may_write_on_and_its_slots_rest(served: ServerThread) -> None:
    store = open_pool(served.path, "kv")
    store.reserve(keys_of([1, 2]))
    store.close()
    watcher = open_pool(served.path, "kv")
    wait_for(lambda: watcher.stat()["namespaces"][0]["orphaned_clients"] == 1)
    threading.Event().wait(1.5)
    assert watcher.stat()["namespaces"][0]["reserved_slots"] == 2
    watcher.close()


def test_two_engines_when_one_is_killed_the_other_goes_on_and_so_does_the_pool(
    volume: str, tmp_path: Path
) -> None:
    path = tmp_path / "pool.sock"
    server = pool_process(volume, path)
    engines = [engine(path, first, 24) for first in (0, 12)]
    try:
        for child in engines:
            assert child.stdout is not None
            for _ in range(8):
                stored, hits = child.stdout.readline().split()
            assert (stored, hits) == ("4", "4")
        kill(engines[0])
        assert engines[1].stdout is not None
        for _ in range(8):
            stored, hits = engines[1].stdout.readline().split()
        assert stored == "4"
        kill(server)
        # Without a pool: nothing is stored, nothing is found, nobody waits.
        wait_for_answer(engines[1], 0, 0)
        server = pool_process(volume, path)
        wait_for_answer(engines[1], 4, 4)
        assert engines[1].poll() is None
        store = open_pool(str(path), "kv")
        out = np.zeros((36, PAGE), dtype=np.uint8)
        got = store.get(keys_of(range(36)), out)
        assert got.error_count == 0 < got.hit_count
        for number in np.flatnonzero(got.status == PageStatus.HIT).tolist():
            assert np.array_equal(out[number], pages_of([number])[0])
        store.close()
    finally:
        for each in engines:
            kill(each)
        kill(server)


def test_pool_killed_under_a_client_is_followed_and_what_was_flushed_is_there(
    volume: str, tmp_path: Path
) -> None:
    path = tmp_path / "pool.sock"
    server = pool_process(volume, path)
    try:
        store = open_pool(str(path), "kv")
        numbers = list(range(30))
        store.put(keys_of(numbers), pages_of(numbers))
        store.flush()
        kill(server)
        assert not store.contains(keys_of(numbers)).any()
        assert store.longest_prefix(keys_of(numbers)) == 0
        out = np.zeros((30, PAGE), dtype=np.uint8)
        assert store.get(keys_of(numbers), out).miss_count == 30
        put = store.put(keys_of([50]), pages_of([50]))
        assert put.error_count == 1
        assert isinstance(put.failure, ConnectionLostError)
        with pytest.raises(ConnectionLostError, match="is away"):
            store.flush()
        server = pool_process(volume, path)
        wait_for(lambda: store.is_attached)
        assert store.get(keys_of(numbers), out).hit_count == 30
        assert np.array_equal(out, pages_of(numbers))
        assert store.put(keys_of([50]), pages_of([50])).stored_count == 1
        assert store.lost_count == 1
        store.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        with Session() as session:
            assert session.open_volume(volume).namespace("kv", deadline=soon()).is_clean
    finally:
        kill(server)


def test_supervisor_starts_a_killed_pool_again_and_ends_it_in_order(volume: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    supervisor = pool_process(volume, path, "--restart")
    try:
        store = open_pool(str(path), "kv")
        store.put(keys_of([1]), pages_of([1]))
        store.flush()
        first = store.stat()["pid"]
        assert first != supervisor.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server_pid(path) not in (0, first))
        wait_for(lambda: store.is_attached)
        assert store.contains(keys_of([1])).all()
        store.close()
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(60) in (0, 143)
        assert not path.exists()
        with Session() as session:
            assert session.open_volume(volume).namespace("kv", deadline=soon()).is_clean
    finally:
        kill(supervisor)


def test_supervisor_ends_when_what_was_asked_for_is_wrong(volume: str, tmp_path: Path) -> None:
    arguments = ["pool", "serve", "--restart", "--socket", str(tmp_path / "s"), f"{volume}#nosuch"]
    done = subprocess.run(
        [sys.executable, "-m", "kvdev_tools.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "nosuch" in done.stderr and "started again" not in done.stderr


def test_next_owner_waits_for_those_who_write_under_old_grants(volume: str, tmp_path: Path) -> None:
    """A slot that the new owner takes for free may be written by a worker of the one before."""
    server = ServerThread(volume, tmp_path / "pool.sock")
    store = open_pool(server.path, "kv")
    attached = store._attached
    assert attached is not None
    assert attached.writer_lock.take()
    server.close()
    with Session() as session:
        following = session.open_volume(volume).open_namespace("kv", deadline=soon())
        with pytest.raises(TimeoutError, match="writes of the owner before may still land"):
            following.flush(deadline=Deadline.after(0.1))
        attached.writer_lock.drop()
        following.flush(deadline=soon())
        assert following.epoch == 2
        following.close()
    store.close()


def test_workers_write_as_the_pool_and_are_kept_out_with_it(tmp_path: Path) -> None:
    with running_target(namespace_count=1, namespace_size_bytes=16 << 20) as target:
        uri = f"vol+{target.uri}"
        with Session() as session:
            device = session.open_device(f"{target.uri}?nsid=1")
            made = Volume.create([device], name="v", deadline=soon())
            made.create_namespace("kv", GEOMETRY, quota_pages=QUOTA, deadline=soon())
        path = tmp_path / "pool.sock"
        server = pool_process(uri, path)
        try:
            store = open_pool(str(path), "kv")
            assert store.put(keys_of([1]), pages_of([1])).stored_count == 1
            store.flush()
            grants = store.reserve(keys_of([2]))
            old = store._attached
            assert old is not None
            kill(server)
            server = pool_process(uri, path)
            # The old grant is written late, by a worker that has not noticed: the target refuses it.
            late = old.page_io.write(
                grants, np.array([pages_of([2]).ctypes.data], np.uint64), deadline=soon()
            )
            assert "reservation conflict" in str(late.failure)
            wait_for(lambda: store.is_attached)
            out = np.zeros((1, PAGE), dtype=np.uint8)
            assert store.get(keys_of([1]), out).hit_count == 1
            assert store.put(keys_of([2]), pages_of([2])).stored_count == 1
            store.close()
        finally:
            kill(server)


def test_pages_that_a_target_took_with_it_are_not_vouched_for(tmp_path: Path, seed: int) -> None:
    """A client's writes go through its own connection: the pool's flush must not succeed over the loss of them."""
    path = tmp_path / "pool.sock"
    with KillableTarget(tmp_path, volatile_seed=seed) as target:
        uri = f"vol+{target.uri()}"
        with Session() as session:
            made = Volume.create([session.open_device(f"{target.uri()}?nsid=1")], name="v", deadline=soon())
            for name in ("kv", "rank1"):
                made.create_namespace(name, GEOMETRY, quota_pages=QUOTA, deadline=soon())
        server = pool_process(uri, path, also=f"{uri}#rank1")
        try:
            stores = [open_pool(str(path), name) for name in ("kv", "rank1")]
            numbers = list(range(16))
            for store in stores:
                assert store.put(keys_of(numbers), pages_of(numbers)).stored_count == 16
            target.kill()
            target.start()
            for store in stores:  # the first flush tells of the loss, and must not be the only one that does
                with pytest.raises(TransportError):
                    store.flush()
                assert not store.contains(keys_of(numbers)).any()
            for store in stores:
                assert store.put(keys_of(numbers), pages_of(numbers)).stored_count == 16
                store.flush()
            target.kill()
            target.start()
            out = np.zeros((16, PAGE), dtype=np.uint8)
            for store in stores:
                store.flush()
                assert store.get(keys_of(numbers), out).hit_count == 16
                assert np.array_equal(out, pages_of(numbers))
                store.close()
        finally:
            kill(server)


def test_answer_that_comes_too_late_closes_the_connection(served: ServerThread) -> None:
    channel = Channel(served.path, soon())
    with pytest.raises(TimeoutError, match="stat: no answer in time"):
        channel.ask(MessageType.STAT, b"", Deadline.after(-1))
    assert not channel.is_alive


def test_client_takes_up_the_namespace_of_a_volume_that_was_made_anew(volume: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    server = ServerThread(volume, path)
    store = open_pool(str(path), "kv")
    try:
        assert store.put(keys_of([1, 2]), pages_of([1, 2])).stored_count == 2
        before = store.uuid
        server.close()
        kept, lost = volume.removeprefix("vol:").split(",")[:2]
        fresh = tmp_path / "fresh"
        with fresh.open("wb") as file:
            file.truncate(Path(lost.removeprefix("file:")).stat().st_size)
        anew = volume.replace(lost, f"file:{fresh}")
        with Session() as session:
            members = session.open_members(parse_volume_uri(anew), deadline=soon())
            recreate_volume(members, replaced=[f"file:{fresh}"], deadline=soon())
        assert not store.contains(keys_of([1, 2])).any() and kept in anew
        server = ServerThread(anew, path)
        wait_for(lambda: store.is_attached)
        assert store.uuid != before
        out = np.zeros((2, PAGE), dtype=np.uint8)
        assert store.get(keys_of([1, 2]), out).miss_count == 2
        assert store.put(keys_of([1, 2]), pages_of([1, 2])).stored_count == 2
        assert store.get(keys_of([1, 2]), out).hit_count == 2 and np.array_equal(out, pages_of([1, 2]))
    finally:
        store.close()
        server.close()


# --- checksums -------------------------------------------------------------------------------


def test_pages_of_a_namespace_with_nh64_are_put_and_judged_by_it_through_the_pool(
    volume: str, tmp_path: Path
) -> None:
    with Session() as session:
        session.open_volume(volume).create_namespace(
            "sums", GEOMETRY, quota_pages=8, checksum="nh64", deadline=soon()
        )
    server = ServerThread(volume, tmp_path / "pool.sock", "sums")
    try:
        first, second = open_pool(server.path, "sums"), open_pool(server.path, "sums")
        pages = pages_of([1, 2])
        sums = np.array([nh64(page) for page in pages], dtype=np.uint64)
        assert (
            first.checksum is NH64 and first.put(keys_of([1]), pages[:1]).sums.tolist() == sums[:1].tolist()
        )
        assert second.put(keys_of([2]), pages[1:], checksums=sums[1:]).stored_count == 1
        wrong = sums[1:] ^ np.uint64(1)
        assert second.put(keys_of([3]), pages[1:], checksums=wrong).stored_count == 1
        out = np.zeros((3, PAGE), dtype=np.uint8)
        got = first.get(keys_of([1, 2, 3]), out)
        assert got.status.tolist() == [PageStatus.HIT, PageStatus.HIT, PageStatus.ERROR]
        assert np.array_equal(out[:2], pages) and got.sums[:2].tolist() == sums.tolist()
        assert f"expected 0x{int(wrong[0]):016x}, got 0x{int(sums[1]):016x}" in str(got.failure)
        with pytest.raises(UsageError, match=r"checksums: expected a \(1,\) uint64 array"):
            first.put(keys_of([4]), pages[:1], checksums=np.zeros(1, np.uint32))
        first.close()
        second.close()
    finally:
        server.close()


# --- tenants ---------------------------------------------------------------------------------


def test_client_makes_keys_with_the_salt_of_its_namespace_only(volume: str, tmp_path: Path) -> None:
    salt = bytes(range(32))
    with Session() as session:
        session.open_volume(volume).create_namespace(
            "mine", GEOMETRY, quota_pages=8, salt_mark=salt_mark(salt), deadline=soon()
        )
    server = ServerThread(volume, tmp_path / "pool.sock", "mine")
    try:
        store = open_pool(server.path, "mine")
        with pytest.raises(
            UsageError, match=r"v#mine: salt: expected that of its tenant, of mark .*, got none"
        ):
            store.page_keys()
        keys = store.page_keys(salt=salt).derive([b"block 0"])
        assert store.put(keys, pages_of([1])).stored_count == 1
        assert not store.contains(PageKeys().derive([b"block 0"])).any()
        store.close()
    finally:
        server.close()


def test_pages_of_other_ranks_are_read_through_the_pool(served: ServerThread) -> None:
    sources = [open_pool(served.path, name) for name in ("kv", "rank1")]
    sources[0].put(keys_of([1, 2]), pages_of([1, 2]))
    reader = SplitReader(sources, GEOMETRY)
    out = np.zeros((3, PAGE), dtype=np.uint8)
    got = reader.get(keys_of([1, 2, 3]), out)
    assert got.status.tolist() == [PageStatus.HIT, PageStatus.HIT, PageStatus.MISS]
    assert np.array_equal(out[:2], pages_of([1, 2]))
    for store in sources:
        store.close()
