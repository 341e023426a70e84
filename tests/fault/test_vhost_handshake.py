"""The handshake against a scripted back end: what it may leave out, refuse, break, and end."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from kvdev.native.io import OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.native.queue import HostQueue
from kvdev.staging import Arena
from kvdev.testing.vhost_peer import FEATURES_ALL, PROTOCOL_ALL, VhostPeer, VhostScript, config_of
from kvdev.testing.vhost_rig import VhostRig
from kvdev.vhost import SharedMemory, VhostDevice, VhostOptions
from kvdev.vhost.protocol import Feature, ProtocolFeature, Request

DISK_BYTES = 4 << 20


def script(**fields: Any) -> VhostScript:
    return VhostScript(bytearray(DISK_BYTES), **fields)


VARIANTS: dict[str, tuple[Callable[[], VhostScript], dict[str, Any]]] = {
    "everything": (script, {}),
    "two_queues": (script, {"queue_count": 2}),
    "more_queues_asked_than_offered": (script, {"queue_count": 16}),
    "no_mq": (lambda: script(features=FEATURES_ALL & ~Feature.MQ), {"queue_count": 4}),
    "no_mq_protocol": (
        lambda: script(protocol_features=PROTOCOL_ALL & ~ProtocolFeature.MQ),
        {"queue_count": 4},
    ),
    "no_event_idx": (lambda: script(features=FEATURES_ALL & ~Feature.EVENT_IDX), {}),
    "no_indirect": (lambda: script(features=FEATURES_ALL & ~Feature.INDIRECT_DESC), {"queue_size": 16}),
    "neither": (
        lambda: script(features=FEATURES_ALL & ~(Feature.INDIRECT_DESC | Feature.EVENT_IDX)),
        {"queue_size": 4},
    ),
    "least": (
        lambda: script(
            features=Feature.VERSION_1 | Feature.PROTOCOL_FEATURES, protocol_features=ProtocolFeature.CONFIG
        ),
        {"queue_count": 4},
    ),
    "blocks_of_4096": (lambda: script(config=config_of(DISK_BYTES, block_size_bytes=4096)), {}),
    "small_segments": (
        lambda: script(
            features=FEATURES_ALL | Feature.SIZE_MAX,
            config=replace(config_of(DISK_BYTES), size_max=16384 + 100, seg_max=7),
        ),
        {},
    ),
    "small_segments_direct": (
        lambda: script(
            features=(FEATURES_ALL | Feature.SIZE_MAX) & ~Feature.INDIRECT_DESC,
            config=replace(config_of(DISK_BYTES), size_max=16384, seg_max=7),
        ),
        {"queue_size": 32},
    ),
    "inflight": (lambda: script(has_inflight=True), {"queue_count": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_handshake_when_less_is_offered_then_data_goes_round(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    make, options = VARIANTS[name]
    offer = make()
    with (
        VhostPeer(tmp_path / "s", offer) as peer,
        VhostRig(peer.path, options=VhostOptions(**options)) as rig,
    ):
        device = rig.device
        block = device.block_size_bytes
        assert device.block_count * block == DISK_BYTES
        sizes = [block, 4096, 65536, device.max_transfer_bytes]
        offsets = np.cumsum([0, *sizes]).tolist()
        data = rig.fill(rng, sum(sizes))
        for _ in range(8):  # more than the smallest ring holds
            for size, offset in zip(sizes, offsets, strict=False):
                rig.submit(OPCODE_WRITE, slba=offset // block, size_bytes=size, offset=offset)
        assert not rig.poll(32)["error"].any()
        assert bytes(offer.disk[: len(data)]) == data
        rig.bytes[:] = 0
        for size, offset in zip(sizes, offsets, strict=False):
            rig.submit(OPCODE_READ, slba=offset // block, size_bytes=size, offset=offset)
        assert not rig.poll(4)["error"].any()
        assert rig.bytes[: len(data)].tobytes() == data
        assert rig.run(OPCODE_FLUSH)["error"] == 0
        assert not peer.errors
        flushes = [request for request in peer.requests if request.kind == 4]
        assert len(flushes) == int(bool(offer.features & Feature.FLUSH)) == int(device.has_volatile_cache)
        assert all(r.is_indirect == bool(offer.features & Feature.INDIRECT_DESC) for r in peer.requests)
        used = {request.queue_index for request in peer.requests}
        assert used == set(range(device.agreement.queue_count))
    assert not peer.errors


def test_handshake_then_queue_and_transfer_limits_follow_the_offer(tmp_path: Path) -> None:
    offer = VARIANTS["small_segments"][0]()
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        assert rig.device.max_transfer_bytes == 7 * 16384, "seven segments of whole blocks"


def connect(path: Path | str, *, timeout_s: float = 0.5, **options: Any) -> VhostDevice:
    queue = HostQueue()
    try:
        return VhostDevice(
            str(path), queue, options=VhostOptions(**options), deadline=Deadline.after(timeout_s)
        )
    finally:
        queue.close()


@pytest.mark.parametrize(
    ("offer", "feature"),
    [
        ({"features": FEATURES_ALL & ~Feature.VERSION_1}, "VERSION_1"),
        ({"features": FEATURES_ALL & ~Feature.PROTOCOL_FEATURES}, "PROTOCOL_FEATURES"),
        ({"protocol_features": PROTOCOL_ALL & ~ProtocolFeature.CONFIG}, "CONFIG"),
    ],
)
def test_handshake_when_what_we_need_is_missing_then_the_error_names_it(
    offer: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    with VhostPeer(tmp_path / "s", script(**offer)) as peer:
        with pytest.raises(UnsupportedError, match=f"expected {feature}, which it does not offer") as caught:
            connect(peer.path)
        assert caught.value.feature == feature


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blk_size", 513),
        ("blk_size", 0),
        ("blk_size", 1 << 20),
        ("capacity_sectors", 0),
        ("capacity_sectors", 1 << 60),
    ],
)
def test_handshake_when_config_is_impossible_then_the_error_names_field_and_value(
    field: str, value: int, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {field: value}
    config = replace(config_of(DISK_BYTES), **fields)
    with VhostPeer(tmp_path / "s", script(config=config)) as peer:
        name = field.removesuffix("_sectors")
        with pytest.raises(ProtocolError, match=f"config {name}: expected .*, got {value}"):
            connect(peer.path)


STEPS = [
    Request.GET_FEATURES,
    Request.GET_PROTOCOL_FEATURES,
    Request.SET_PROTOCOL_FEATURES,
    Request.SET_BACKEND_REQ_FD,
    Request.GET_CONFIG,
    Request.GET_QUEUE_NUM,
    Request.GET_INFLIGHT_FD,
    Request.SET_FEATURES,
    Request.SET_INFLIGHT_FD,
    Request.SET_MEM_TABLE,
    Request.SET_VRING_NUM,
    Request.SET_VRING_BASE,
    Request.SET_VRING_ADDR,
    Request.SET_VRING_CALL,
    Request.SET_VRING_KICK,
    Request.SET_VRING_ENABLE,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("has_ack", [True, False], ids=["ack", "no_ack"])
def test_handshake_when_the_back_end_hangs_up_then_connection_lost(
    step: Request, has_ack: bool, tmp_path: Path
) -> None:
    protocol = PROTOCOL_ALL if has_ack else PROTOCOL_ALL & ~ProtocolFeature.REPLY_ACK
    offer = script(protocol_features=protocol, has_inflight=True, hang_up_at=(step, 0))

    def attempt() -> None:
        with VhostPeer(tmp_path / "s", offer) as peer, pytest.raises(ConnectionLostError, match="vhost:"):
            connect(peer.path)

    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    attempt()
    gc.collect()
    after = len(list(Path("/proc/self/fd").iterdir()))
    assert after == before, "no descriptor leaks"


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step != Request.SET_PROTOCOL_FEATURES], ids=lambda step: step.name
)  # fmt: skip
def test_handshake_when_the_back_end_is_silent_then_the_deadline_ends_it(
    step: Request, tmp_path: Path
) -> None:
    offer = script(has_inflight=True, mute_at=step)
    with VhostPeer(tmp_path / "s", offer) as peer:
        with pytest.raises(DeadlineError, match=step.name) as caught:
            connect(peer.path, timeout_s=0.15)
        assert caught.value.elapsed_ms < 2000


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step.name.startswith("SET") and step != Request.SET_PROTOCOL_FEATURES],
    ids=lambda step: step.name,
)  # fmt: skip
def test_handshake_when_a_message_is_refused_then_the_error_names_it(step: Request, tmp_path: Path) -> None:
    offer = script(has_inflight=True, nack=frozenset({step}))
    with (
        VhostPeer(tmp_path / "s", offer) as peer,
        pytest.raises(ConnectError, match=f"{step.name}: expected acknowledgement 0, got 0x1"),
    ):
        connect(peer.path)


@pytest.mark.parametrize(
    ("step", "reply", "what"),
    [
        (Request.GET_FEATURES, struct.pack("<IIIQ", 15, 5, 8, 1), "expected request 1"),
        (Request.GET_FEATURES, struct.pack("<IIIQ", 1, 1, 8, 1), "with the reply flag"),
        (Request.GET_FEATURES, struct.pack("<IIIQ", 1, 6, 8, 1), "version 1"),
        (Request.GET_FEATURES, struct.pack("<III", 1, 5, 0), "expected 8 bytes, got 0"),
        (Request.GET_FEATURES, struct.pack("<III", 1, 5, 1 << 31), "at most 4096"),
        (Request.GET_CONFIG, struct.pack("<III", 24, 5, 0), "at least 20 bytes, got 0"),
        (Request.GET_INFLIGHT_FD, struct.pack("<III", 31, 5, 24) + bytes(24), "expected one descriptor"),
        (Request.SET_FEATURES, struct.pack("<III", 2, 5, 0), "SET_FEATURES reply: expected 8 bytes"),
    ],
)
def test_handshake_when_a_reply_is_wrong_then_the_error_names_field_expected_and_got(
    step: Request, reply: bytes, what: str, tmp_path: Path
) -> None:
    offer = script(has_inflight=True, replies={step: reply})
    with VhostPeer(tmp_path / "s", offer) as peer, pytest.raises(ProtocolError, match=what):
        connect(peer.path)


def test_handshake_when_replies_are_random_bytes_then_one_of_our_errors(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    for index in range(20):
        reply = struct.pack("<III", 24, 5, 72) + bytes(12) + rng.bytes(60)
        offer = script(replies={Request.GET_CONFIG: reply})
        with VhostPeer(tmp_path / f"s{index}", offer) as peer:
            try:
                connect(peer.path).close()
            except KvdevError as error:
                assert not isinstance(error, DeadlineError), reply.hex()


def test_connect_when_nobody_is_there_then_each_cause_has_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="start the back end, or correct the path"):
        connect(tmp_path / "absent")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    with pytest.raises(ConnectError, match="nobody listens on it"):
        connect(tmp_path / "dead")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConnectError):
        connect(tmp_path / "file")
    with pytest.raises(ConnectError, match="expected the socket"):
        connect("/" + "x" * 200)


def test_connect_when_the_back_end_serves_another_then_the_deadline_says_so(tmp_path: Path) -> None:
    with (
        VhostPeer(tmp_path / "s", script()) as peer,
        VhostRig(peer.path),
        pytest.raises(DeadlineError, match="serves another front end"),
    ):
        connect(peer.path, timeout_s=0.1)


def test_reply_when_it_trickles_then_it_is_put_together(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(1)

    def trickle() -> None:
        sock, _ = listener.accept()
        sock.recv(12 + 12)
        for byte in struct.pack("<IIIQ", 1, 5, 8, FEATURES_ALL & ~Feature.VERSION_1):
            sock.send(bytes([byte]))
            threading.Event().wait(0.001)
        sock.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(UnsupportedError, match="VERSION_1"):
        connect(tmp_path / "s")
    thread.join()
    listener.close()


# ---- memory ----


def test_share_when_memory_comes_later_then_payload_may_lie_there(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    offer = script()
    with (
        VhostPeer(tmp_path / "s", offer) as peer,
        VhostRig(peer.path) as rig,
        Arena(2 << 20, is_shareable=True) as arena,
        arena.lease(1, 65536) as lease,
    ):
        lease.array[0] = rng.integers(0, 256, 65536, dtype=np.uint8)
        fields = {"slba": 8, "size_bytes": 65536, "buf_addr": int(lease.addresses[0])}
        with pytest.raises(UsageError, match=r"ios\[0\].buf_addr: expected a payload inside memory shared"):
            rig.submit(OPCODE_WRITE, **fields)
        rig.device.share(SharedMemory.of(arena), deadline=rig.deadline())
        assert rig.run(OPCODE_WRITE, **fields)["error"] == 0
        assert bytes(offer.disk[8 * 512 :][:65536]) == lease.array[0].tobytes()
        rig.device.share(rig.device._memory[1], deadline=rig.deadline())  # again: nothing to do
        assert len(rig.device._memory) == 2


def test_shared_memory_when_given_with_a_descriptor_then_it_works(tmp_path: Path) -> None:
    fd = os.memfd_create("callers")
    os.ftruncate(fd, 3 * 4096)
    mapped = mmap.mmap(fd, 8192, mmap.MAP_SHARED, offset=4096)
    view = np.frombuffer(mapped, dtype=np.uint8)
    memory = SharedMemory(
        address=view.ctypes.data, size_bytes=8192, fd=fd, fd_offset=4096, keep=view, name="the caller's"
    )
    os.close(fd)  # it was duplicated
    offer = script()
    with VhostPeer(tmp_path / "s", offer) as peer, VhostRig(peer.path) as rig:
        rig.device.share(memory, deadline=rig.deadline())
        view[4096:] = 7
        done = rig.run(OPCODE_WRITE, size_bytes=4096, buf_addr=view.ctypes.data + 4096)
        assert done["error"] == 0 and set(offer.disk[:4096]) == {7}
        over = {"size_bytes": 4096, "buf_addr": view.ctypes.data + 4608}
        with pytest.raises(UsageError, match="buf_addr"):
            rig.submit(OPCODE_WRITE, **over)


def test_shared_memory_when_it_cannot_be_then_the_error_names_the_field(tmp_path: Path) -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 4096)
    good: dict[str, Any] = {"address": 1 << 20, "size_bytes": 4096, "fd": fd}
    for field, value in (("address", 100), ("size_bytes", 0), ("fd_offset", 5), ("fd", 9999)):
        with pytest.raises(UsageError, match=f"{field}: expected"):
            SharedMemory(**{**good, field: value})
    with pytest.raises(UsageError, match="expected at least 8192 bytes"):
        SharedMemory(**{**good, "size_bytes": 8192})
    with VhostPeer(tmp_path / "s", script()) as peer, VhostRig(peer.path) as rig:
        rig.device.share(SharedMemory(**good), deadline=rig.deadline())
        with pytest.raises(UsageError, match="pieces apart"):
            rig.device.share(SharedMemory(**good), deadline=rig.deadline())
        extra = [SharedMemory(address=(2 + i) << 20, size_bytes=4096, fd=fd) for i in range(6)]
        for memory in extra[:5]:
            rig.device.share(memory, deadline=rig.deadline())
        with pytest.raises(UsageError, match="at most 7 pieces"):
            rig.device.share(extra[5], deadline=rig.deadline())
    os.close(fd)


def test_share_when_arena_has_no_descriptor_then_the_remedy_is_named() -> None:
    with Arena(2 << 20) as arena:
        if arena.has_fd:
            pytest.skip("this machine backs every arena with a memfd")
        with pytest.raises(UnsupportedError, match="is_shareable=True"):
            SharedMemory.of(arena)


# ---- the end ----


def test_close_then_virtqueues_are_stopped_in_order_and_the_next_front_end_is_served(tmp_path: Path) -> None:
    with VhostPeer(tmp_path / "s", script()) as peer:
        for count in (1, 2):
            with VhostRig(peer.path, options=VhostOptions(queue_count=2)) as rig:
                assert rig.run(OPCODE_READ, size_bytes=4096)["error"] == 0
                connection = peer.connection
            assert rig.device.state == "closed"
            assert connection is not None
            assert connection.messages[-3:] == [Request.GET_VRING_BASE] * 2 + [Request.RESET_DEVICE]
            assert peer.connection_count == count
            rig.device.close()
        with pytest.raises(UsageError, match="closed"):
            rig.device.reconnect(Deadline.after(1))
