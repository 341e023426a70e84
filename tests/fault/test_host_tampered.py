"""A stream damaged at random: every command still completes once, in time, and no wrong byte is accepted."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from kvdev.native.io import EUNCERTAIN, OPCODE_READ, OPCODE_WRITE
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.peer import MemoryScript, PeerConnection, ScriptedPeer

SIZE = 16384
BATCH = 8


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """One fault in a reply: a flipped bit, a field of ones, bytes lost, doubled, or cut off."""
    at = int(rng.integers(0, min(len(data), 200)) if rng.random() < 0.7 else rng.integers(0, len(data)))
    kind = int(rng.integers(0, 5))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(0, 8))]) + data[at + 1 :]
    if kind == 1:
        width = int(rng.integers(1, 5))
        return data[:at] + b"\xff" * width + data[at + width :]
    if kind == 2:
        return data[:at] + data[at + int(rng.integers(1, 40)) :]
    if kind == 3:
        return data[:at] + data[max(0, at - 24) : at] + data[at:]
    return data[:at]


class DamagedScript(MemoryScript):
    """Serves a namespace; from some reply on its stream is damaged once, then it goes on as if nothing were."""

    rng: np.random.Generator
    healthy_count: int

    def __call__(self, connection: PeerConnection) -> None:
        sent = -1  # ICResp is not counted

        def tamper(data: bytes) -> bytes:
            nonlocal sent
            sent += 1
            return damage(data, self.rng) if sent == self.healthy_count + 1 else data

        connection.tamper = tamper
        super().__call__(connection)


@pytest.mark.parametrize("digests", ["off", "require"])
@pytest.mark.parametrize("round_index", range(60))
def test_stream_when_damaged_then_commands_end_guards_hold_and_digests_keep_wrong_bytes_out(
    round_index: int, digests: str, seed: int
) -> None:
    rng = np.random.default_rng([seed, round_index])
    memory = bytearray(rng.bytes(2 * BATCH * SIZE))
    before = bytes(memory)
    script = DamagedScript(memory, c2h_pdu_bytes=int(rng.choice([1024, 4096, SIZE])), r2t_bytes=8192)
    script.rng, script.healthy_count = rng, int(rng.integers(0, 2 * BATCH))
    options: dict[str, Any] = {
        "queue_options": {"command_timeout_s": 0.25},
        "header_digest": digests,
        "data_digest": digests,
    }
    with ScriptedPeer(script) as peer, PeerHost(peer, **options) as host:
        reads = [GuardedBuffer(SIZE) for _ in range(BATCH)]
        writes = [GuardedBuffer(SIZE) for _ in range(BATCH)]
        for index in range(BATCH):
            host.submit(OPCODE_READ, reads[index], slba=index * SIZE // 4096, tag=index)
            host.submit(
                OPCODE_WRITE,
                writes[index],
                slba=(BATCH + index) * SIZE // 4096,
                tag=BATCH + index,
                priority=1,
            )
        done = host.poll(2 * BATCH, seconds=3)
        assert sorted(done["tag"]) == list(range(2 * BATCH))
        assert set(done["error"]) <= {0, -errno.EIO, -errno.ENOTCONN, -errno.ETIMEDOUT, -EUNCERTAIN}
        for buffer in reads + writes:
            buffer.check_guards()
        assert all((buffer.array == 0x5A).all() for buffer in writes), "what is written is never written into"
        if digests == "require":
            for row in done[(done["error"] == 0) & (done["tag"] < BATCH)]:
                index = int(row["tag"])
                assert reads[index].array.tobytes() == before[index * SIZE : (index + 1) * SIZE]
        # The script may stumble over a host that is right to leave: its complaints are not the subject here.
        host.close()
        peer.stop()
        peer.errors.clear()
