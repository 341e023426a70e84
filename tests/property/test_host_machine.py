"""A host's queue pair against a peer led step by step: any mixture of commands, transfers, ends and offences.

The model knows what each command was given and what has to come of it: its completion, once; the bytes of a read that
succeeded; the bytes that a write was asked for; and that nothing around a buffer is ever touched.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvdev.clock import Deadline
from kvdev.native.io import EUNCERTAIN, OPCODE_FLUSH, OPCODE_READ, OPCODE_WRITE
from kvdev.testing.host import GuardedBuffer, PeerHost
from kvdev.testing.peer import CAPSULE_CMD, H2C_DATA, H2C_TERM, PduFromHost, PeerConnection, ScriptedPeer

BLOCK = 4096
OUTSTANDING_MAX = 6
PICK = st.integers(0, OUTSTANDING_MAX - 1)
"""One of the commands that it can be done to, in turn."""
WAIT_S = 60.0
NO_CID = 0xFFFF


@dataclass(eq=False)
class Sent:
    """One command between its submission and its completion."""

    tag: int
    opcode: int
    buffer: GuardedBuffer | None
    pdu: PduFromHost
    content: bytes = b""
    """What a read was given, or what a write holds."""
    moved: int = 0
    ttag: int = 0

    @property
    def size(self) -> int:
        return 0 if self.buffer is None else len(self.buffer.array)

    @property
    def left(self) -> int:
        return self.size - self.moved


@dataclass
class Link:
    """A connection of one host: what came from it, in order."""

    inbox: queue.Queue[PduFromHost] = field(default_factory=queue.Queue)
    connection: queue.Queue[PeerConnection] = field(default_factory=queue.Queue)

    def script(self, **options: Any) -> Callable[[PeerConnection], None]:
        def run(connection: PeerConnection) -> None:
            connection.accept_ic(**options)
            self.connection.put(connection)
            while True:
                self.inbox.put(connection.receive_pdu())

        return run


# name -> (for which command it is one, what the peer sends, FES)
Offence = tuple[Callable[[Sent], bool], Callable[[PeerConnection, Sent], bytes], int]
OFFENCES: dict[str, Offence] = {
    "completion_of_nothing": (lambda _: True, lambda c, _: c.pack_response(NO_CID), 1),
    "data_for_nothing": (lambda _: True, lambda c, _: c.pack_c2h_data(NO_CID, 0, bytes(4)), 1),
    "r2t_for_nothing": (lambda _: True, lambda c, _: c.pack_r2t(NO_CID, 1, 0, 4), 1),
    "stale_generation": (lambda _: True, lambda c, s: c.pack_response(s.pdu.cid ^ 0x1000), 1),
    "data_that_skips": (
        lambda s: s.opcode == OPCODE_READ and s.left >= 8,
        lambda c, s: c.pack_c2h_data(s.pdu.cid, s.moved + 4, bytes(4), is_last=False),
        2,
    ),
    "data_beyond": (
        lambda s: s.opcode == OPCODE_READ,
        lambda c, s: c.pack_c2h_data(s.pdu.cid, s.moved, bytes(s.left + 4)),
        4,
    ),
    "data_for_a_write": (
        lambda s: s.opcode == OPCODE_WRITE,
        lambda c, s: c.pack_c2h_data(s.pdu.cid, 0, bytes(s.size)),
        2,
    ),
    "r2t_for_a_read": (
        lambda s: s.opcode == OPCODE_READ,
        lambda c, s: c.pack_r2t(s.pdu.cid, 1, 0, s.size),
        2,
    ),
    "r2t_that_skips": (
        lambda s: s.opcode == OPCODE_WRITE and s.left >= 8,
        lambda c, s: c.pack_r2t(s.pdu.cid, 9, s.moved + 4, 4),
        2,
    ),
    "r2t_beyond": (
        lambda s: s.opcode == OPCODE_WRITE,
        lambda c, s: c.pack_r2t(s.pdu.cid, 9, s.moved, s.left + 4),
        4,
    ),
    "unknown_type": (lambda _: True, lambda *_: bytes((0x0A, 0, 24, 0, 24, 0, 0, 0)) + bytes(16), 1),
}


class HostMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.peer: ScriptedPeer | None = None
        self.host: PeerHost | None = None
        self.live: list[Sent] = []
        self.finished: dict[int, Any] = {}
        self.tag_next = 1
        self.options: dict[str, Any] = {}

    # ---- the connection ----

    @initialize(
        header_digest=st.booleans(),
        data_digest=st.booleans(),
        cpda=st.sampled_from([0, 1, 4, 31]),
        hpda=st.sampled_from([0, 3, 31]),
    )
    def begin(self, header_digest: bool, data_digest: bool, cpda: int, hpda: int) -> None:
        self.options = {
            "header_digest": "require" if header_digest else "off",
            "data_digest": "require" if data_digest else "off",
            "hpda": hpda,
        }
        self.cpda = cpda
        self.open()

    def open(self) -> None:
        self.link = Link()
        self.peer = ScriptedPeer(self.link.script(cpda=self.cpda))
        self.host = PeerHost(self.peer, **self.options)
        self.connection = self.link.connection.get(timeout=WAIT_S)

    def shut(self) -> None:
        if self.host is not None and self.peer is not None:
            self.host.close()
            self.peer.stop()
            assert not self.peer.errors, self.peer.errors
        self.host = self.peer = None

    def teardown(self) -> None:
        self.shut()

    def pump(self, condition: Callable[[], bool], what: str) -> None:
        """Drive the host until the condition holds; completions on the way are kept."""
        assert self.host is not None
        limit, pause = Deadline.after(WAIT_S), threading.Event()
        while not condition():
            assert not limit.is_expired, what
            for entry in self.host.queue.poll(min_count=0, deadline=limit):
                tag = int(entry["tag"])
                assert tag not in self.finished, "a command completes once"
                assert tag in {sent.tag for sent in self.live}, "what completes was submitted"
                self.finished[tag] = entry
            pause.wait(0.0002)

    def next_pdu(self, what: str) -> PduFromHost:
        self.pump(lambda: not self.link.inbox.empty(), what)
        return self.link.inbox.get()

    def expect(self, sent: Sent, error: int | tuple[int, ...], status: int) -> None:
        """Wait for a completion, and check it; the command is over."""
        self.pump(lambda: sent.tag in self.finished, f"completion of {sent}")
        entry = self.finished.pop(sent.tag)
        wanted = error if isinstance(error, tuple) else (error,)
        assert int(entry["error"]) in wanted and int(entry["status"]) == status, (entry, error, status)
        self.live.remove(sent)
        if sent.buffer is None:
            return
        sent.buffer.check_guards()
        if sent.opcode == OPCODE_WRITE:
            assert sent.buffer.array.tobytes() == sent.content, "a write's payload stays as it is"
        elif not entry["error"]:
            assert sent.buffer.array.tobytes() == sent.content

    # ---- commands ----

    @precondition(lambda self: len(self.live) < OUTSTANDING_MAX)
    @rule(
        opcode=st.sampled_from([OPCODE_READ, OPCODE_WRITE, OPCODE_FLUSH]),
        blocks=st.integers(1, 6),
        fill=st.integers(0, 255),
    )
    def submit(self, opcode: int, blocks: int, fill: int) -> None:
        assert self.host is not None
        buffer = None if opcode == OPCODE_FLUSH else GuardedBuffer(blocks * BLOCK)
        content = b""
        if buffer is not None and opcode == OPCODE_WRITE:
            buffer.array[:] = (np.arange(len(buffer.array)) + fill) % 251
            content = buffer.array.tobytes()
        tag, self.tag_next = self.tag_next, self.tag_next + 1
        self.host.submit(opcode, buffer, slba=tag, tag=tag)
        pdu = self.next_pdu("the capsule")
        assert (pdu.type, pdu.opcode) == (CAPSULE_CMD, opcode)
        if buffer is not None:
            assert (pdu.slba, pdu.lba_count, pdu.sgl_length) == (tag, blocks, len(buffer.array))
        assert pdu.cid not in {sent.pdu.cid for sent in self.live}
        self.live.append(Sent(tag, opcode, buffer, pdu, content))

    @property
    def unfed(self) -> list[Sent]:
        """Reads that can be given data, and one more piece after it."""
        return [sent for sent in self.live if sent.opcode == OPCODE_READ and sent.left > 4]

    @property
    def unasked(self) -> list[Sent]:
        """Writes that can be asked for data."""
        return [sent for sent in self.live if sent.opcode == OPCODE_WRITE and sent.left]

    @precondition(lambda self: bool(self.unfed))
    @rule(pick=PICK, share=st.integers(1, 4), fill=st.integers(0, 255))
    def give_data(self, pick: int, share: int, fill: int) -> None:
        """A piece of a read's data, not marked as its last."""
        sent = self.unfed[pick % len(self.unfed)]
        size = min(sent.left - 4, max(4, sent.size // share // 4 * 4))
        piece = bytes((index * 7 + fill) & 0xFF for index in range(size))
        self.connection.send(self.connection.pack_c2h_data(sent.pdu.cid, sent.moved, piece, is_last=False))
        sent.content += piece
        sent.moved += size

    @precondition(lambda self: bool(self.unasked))
    @rule(pick=PICK, share=st.integers(1, 4))
    def ask_for_data(self, pick: int, share: int) -> None:
        """A piece of a write's data, which the host must send whole and in order."""
        sent = self.unasked[pick % len(self.unasked)]
        size = min(sent.left, max(4, sent.size // share // 4 * 4))
        sent.ttag += 1
        self.connection.send(self.connection.pack_r2t(sent.pdu.cid, sent.ttag, sent.moved, size))
        got = b""
        while len(got) < size:
            pdu = self.next_pdu("the data asked for")
            assert (pdu.type, pdu.cid, pdu.ttag) == (H2C_DATA, sent.pdu.cid, sent.ttag)
            assert pdu.datao == sent.moved + len(got) and pdu.pdo % (4 * self.cpda + 4) == 0
            got += pdu.data
            assert bool(pdu.flags & 0x04) == (len(got) == size), "LAST_PDU on the last of each R2T"
        assert got == sent.content[sent.moved : sent.moved + size]
        sent.moved += size

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK, is_success_used=st.booleans(), is_all=st.booleans())
    def succeed(self, pick: int, is_success_used: bool, is_all: bool) -> None:
        """The peer says success: of a transfer that is not whole the host makes a data transfer error."""
        sent = self.live[pick % len(self.live)]
        connection = self.connection
        if sent.opcode == OPCODE_READ and is_all and sent.left:
            piece = bytes(range(256)) * (sent.left // 256) + bytes(sent.left % 256)
            out = connection.pack_c2h_data(sent.pdu.cid, sent.moved, piece, is_success=is_success_used)
            sent.content += piece
            sent.moved = sent.size
            connection.send(out if is_success_used else out + connection.pack_response(sent.pdu.cid))
        else:
            connection.send(connection.pack_response(sent.pdu.cid))
        self.expect(sent, 0 if not sent.left else -errno.EIO, 0 if not sent.left else 0x04)

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK, status=st.sampled_from([0x02, 0x80, 0x281, 0x4002]))
    def fail(self, pick: int, status: int) -> None:
        sent = self.live[pick % len(self.live)]
        self.connection.send(self.connection.pack_response(sent.pdu.cid, status=status))
        self.expect(sent, -errno.EIO, status)

    # ---- ends ----

    def all_lost(self) -> None:
        """The connection is gone: each command ends, what may have changed something with an unknown fate."""
        for sent in self.live[:]:
            errors = {OPCODE_READ: (-errno.ENOTCONN,), OPCODE_WRITE: (-EUNCERTAIN,)}
            self.expect(sent, errors.get(sent.opcode, (-errno.ENOTCONN, -EUNCERTAIN)), 0)
        assert self.host is not None and not self.host.qpair.is_alive
        self.shut()
        self.open()

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK, name=st.sampled_from(sorted(OFFENCES)))
    def offend(self, pick: int, name: str) -> None:
        """The peer breaks a rule: the host names it and ends the connection."""
        sent = self.live[pick % len(self.live)]
        applies, build, fes = OFFENCES[name]
        if not applies(sent):
            return
        self.connection.send(build(self.connection, sent))
        term = self.next_pdu("H2CTermReq")
        assert (term.type, term.fes) == (H2C_TERM, fes), (name, term)
        self.all_lost()

    @precondition(lambda self: bool(self.live))
    @rule()
    def peer_goes_away(self) -> None:
        self.connection.reset()
        self.all_lost()

    @precondition(lambda self: bool(self.live))
    @rule()
    def host_gives_up(self) -> None:
        """What is abandoned ends at once, and its memory is its owner's."""
        assert self.host is not None
        self.host.queue.abandon()
        buffers = [(sent, sent.buffer) for sent in self.live if sent.buffer is not None]
        for sent, buffer in buffers:
            buffer.array[:] = 0x77
            sent.content = bytes([0x77]) * sent.size
        for sent in self.live[:]:
            any_error = (-errno.ENOTCONN, -EUNCERTAIN, -errno.ECANCELED, -errno.ETIMEDOUT)
            self.expect(sent, any_error, 0)
        for sent, buffer in buffers:
            assert buffer.array.tobytes() == sent.content, "nobody writes to it any more"
        self.shut()
        self.open()

    @invariant()
    def accounts_agree(self) -> None:
        if self.host is None:
            return
        assert self.host.queue.outstanding_count == len(self.live)
        for sent in self.live:
            if sent.buffer is not None:
                sent.buffer.check_guards()


SETTINGS = settings(stateful_step_count=25, max_examples=max(10, settings().max_examples // 2))
"""An example is many commands over sockets: half of the usual count."""


def test_host_when_a_peer_does_anything_then_it_does_as_the_model_says() -> None:
    run_state_machine_as_test(HostMachine, settings=SETTINGS)


class Forger(PeerConnection):
    """A peer that sends other bytes than the model says."""

    def pack_c2h_data(self, cid: int, datao: int, data: bytes, **options: Any) -> bytes:
        return super().pack_c2h_data(cid, datao, data[:-1] + bytes([data[-1] ^ 1]), **options)


def test_canary_when_bytes_are_not_as_the_model_says_then_noticed() -> None:
    machine = HostMachine()
    machine.begin(header_digest=False, data_digest=False, cpda=0, hpda=0)
    try:
        machine.submit(OPCODE_READ, 2, 0)
        machine.connection.__class__ = Forger
        with pytest.raises(AssertionError):
            machine.succeed(0, is_success_used=True, is_all=True)
    finally:
        machine.teardown()
