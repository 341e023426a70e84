"""The target under several hosts that do anything: connect, enable, write by pieces, reset, shut down, offend, vanish.

The model knows who is connected and enabled, which queues live, and what each block holds, or that nobody can know: a
block whose write was cut off. After each step the target counts the same controllers and queues.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
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

from kvdev.target.model import Transport
from kvdev.testing.raw_host import R2T, RawHost, connected_io
from kvdev.testing.recovery import until
from kvdev.testing.target import RunningTarget, running_target
from kvdev.wire.fabrics import Cc, Property, Shn
from kvdev.wire.nvme import (
    SGL_IN_CAPSULE,
    NvmOpcode,
    Sqe,
    Status,
    build_flush,
    build_keep_alive,
    build_read_write,
)

BLOCK = 4096
BLOCK_COUNT = 64
HOST_COUNT_MAX = 3
QUEUE_ID_MAX = 4
PICK = st.integers(0, 11)
"""One of those that are there, in turn."""
CID_WRITE = 20
"""Of a write that waits for its data; other commands of a queue have CID 0 and run to their end at once."""


@dataclass(eq=False)
class Queue:
    """An I/O queue of a host, with the write that it has begun."""

    qid: int
    raw: RawHost
    slba: int = 0
    data: bytes = b""
    ttag: int = 0
    sent: int = 0


@dataclass(eq=False)
class Host:
    """An association."""

    admin: RawHost
    is_enabled: bool = False
    is_shut_down: bool = False
    queues: list[Queue] = field(default_factory=list)


def command(opcode: NvmOpcode, slba: int, lba_count: int, *, cid: int = 0) -> Sqe:
    byte_count = 0 if opcode == NvmOpcode.WRITE_ZEROES else lba_count * BLOCK
    return build_read_write(opcode, nsid=1, slba=slba, lba_count=lba_count, byte_count=byte_count, cid=cid)


OFFENCES: dict[str, Callable[[RawHost], bytes]] = {
    "unknown type": lambda _: bytes((0x0B, 0, 24, 0, 24, 0, 0, 0)) + bytes(16),
    "data for nothing": lambda raw: raw.h2c_data(cccid=9, ttag=9, datao=0, data=bytes(BLOCK), is_last=True),
    "a second ICReq": lambda raw: raw.ic_req(),
    "a short capsule": lambda _: bytes((0x04, 0, 72, 0, 71, 0, 0, 0)) + bytes(64),
}


class TargetMachine(RuleBasedStateMachine):
    def __init__(self, target: RunningTarget) -> None:
        super().__init__()
        self.target = target
        self.live: list[Host] = []
        self.content = np.zeros((BLOCK_COUNT, BLOCK), dtype=np.uint8)
        self.is_known = np.ones(BLOCK_COUNT, dtype=np.bool_)
        target.bdev(1).write(0, bytes(BLOCK_COUNT * BLOCK))

    def teardown(self) -> None:
        for host in self.live:
            host.admin.close()
            for queue in host.queues[:]:
                queue.raw.close()
                self.forget(queue)
        self.live.clear()
        self.counts_agree()
        got = np.frombuffer(self.target.bdev(1).read(0, BLOCK_COUNT * BLOCK), dtype=np.uint8)
        same = (got.reshape(self.content.shape) == self.content).all(axis=1)
        assert (same | ~self.is_known).all(), "each block holds what was written last"
        assert self.target.service.defect_count == 0

    @property
    def all_queues(self) -> list[Queue]:
        return [queue for host in self.live for queue in host.queues]

    @property
    def usable_queues(self) -> list[Queue]:
        return [queue for host in self.live if not host.is_shut_down for queue in host.queues]

    @property
    def begun_queues(self) -> list[Queue]:
        """Those with a write that waits for its data."""
        return [queue for queue in self.usable_queues if queue.data]

    def forget(self, queue: Queue) -> None:
        """A queue is gone; what it had begun to write may be there, wholly or in part."""
        self.is_known[queue.slba : queue.slba + len(queue.data) // BLOCK] = False
        for host in self.live:
            if queue in host.queues:
                host.queues.remove(queue)

    def is_free(self, slba: int, lba_count: int) -> bool:
        """No write that has begun lies there: two at once leave either's bytes."""
        return all(
            queue.slba + len(queue.data) // BLOCK <= slba or slba + lba_count <= queue.slba
            for queue in self.all_queues
            if queue.data
        )

    # ---- associations ----

    @initialize(digests=st.integers(0, 3))
    def begin(self, digests: int) -> None:
        """One host with two queues; more of both come and go."""
        self.connect(is_enabled=True)
        self.add_queue(0, 1, digests, 0)
        self.add_queue(0, 2, 0, 5)

    @precondition(lambda self: len(self.live) < HOST_COUNT_MAX)
    @rule(is_enabled=st.booleans())
    def connect(self, is_enabled: bool) -> None:
        admin = RawHost(self.target.address, self.target.port)
        admin.exchange_ic()
        assert admin.connect(self.target.nqn).cqe.is_success
        if is_enabled:
            admin.enable()
        self.live.append(Host(admin, is_enabled))

    @precondition(lambda self: any(not host.is_enabled for host in self.live))
    @rule(pick=PICK)
    def enable(self, pick: int) -> None:
        waiting = [host for host in self.live if not host.is_enabled]
        host = waiting[pick % len(waiting)]
        host.admin.enable()
        host.is_enabled = True

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK)
    def keep_alive(self, pick: int) -> None:
        host = self.live[pick % len(self.live)]
        cqe = host.admin.execute(build_keep_alive()).cqe
        if host.is_enabled:
            assert cqe.is_success
        else:
            assert cqe.status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK)
    def reset(self, pick: int) -> None:
        """CC.EN to 0: the I/O queues are gone, the admin queue stays."""
        host = self.live[pick % len(self.live)]
        assert host.admin.property_set(Property.CC, Cc().build()).cqe.is_success
        assert not host.admin.property_get(Property.CSTS, 4).cqe.dw0 & 1
        for queue in host.queues[:]:
            assert queue.raw.wait_closed() == b""
            queue.raw.close()
            self.forget(queue)
        host.is_enabled = host.is_shut_down = False

    @precondition(lambda self: bool(self.live))
    @rule(pick=PICK)
    def shut_down(self, pick: int) -> None:
        """A normal shutdown completes; queues stay connected and take no more commands."""
        host = self.live[pick % len(self.live)]
        if not host.is_enabled or any(queue.data for queue in host.queues):
            return
        cc = Cc(en=1, iosqes=6, iocqes=4, shn=Shn.NORMAL)
        assert host.admin.property_set(Property.CC, cc.build()).cqe.is_success
        assert (host.admin.property_get(Property.CSTS, 4).cqe.dw0 >> 2) & 3 == 2
        host.is_shut_down = True
        for queue in host.queues:
            status = queue.raw.execute(build_flush(nsid=1)).cqe.status
            assert status & 0x7FF == Status.COMMAND_SEQUENCE_ERROR

    @precondition(lambda self: len(self.live) > 1)
    @rule(pick=PICK)
    def vanish(self, pick: int) -> None:
        """Losing the admin connection loses the association: every queue of it, and no other's."""
        host = self.live.pop(pick % len(self.live))
        host.admin.close()
        for queue in host.queues[:]:
            assert queue.raw.wait_closed() == b""
            queue.raw.close()
            self.is_known[queue.slba : queue.slba + len(queue.data) // BLOCK] = False

    @precondition(lambda self: bool(self.live))
    @rule(
        pick=PICK,
        qid=st.integers(1, QUEUE_ID_MAX + 1),
        digests=st.integers(0, 3),
        hpda=st.sampled_from([0, 5]),
    )
    def add_queue(self, pick: int, qid: int, digests: int, hpda: int) -> None:
        """An I/O queue, which takes an enabled controller and a queue id that is free."""
        host = self.live[pick % len(self.live)]
        is_free = qid <= QUEUE_ID_MAX and qid not in {queue.qid for queue in host.queues}
        if not host.is_enabled or host.is_shut_down or not is_free:
            with RawHost(self.target.address, self.target.port) as raw:
                raw.exchange_ic()
                raw.hostnqn, raw.hostid = host.admin.hostnqn, host.admin.hostid
                reply = raw.connect(self.target.nqn, qid=qid, cntlid=host.admin.cntlid)
                assert not reply.cqe.is_success
            return
        has_hdgst, has_ddgst = bool(digests & 1), bool(digests & 2)
        raw = connected_io(host.admin, self.target.nqn, qid=qid, hdgst=has_hdgst, ddgst=has_ddgst, hpda=hpda)
        host.queues.append(Queue(qid, raw))

    # ---- commands ----

    @precondition(lambda self: bool(self.usable_queues))
    @rule(
        pick=PICK,
        slba=st.integers(0, BLOCK_COUNT - 1),
        lba_count=st.integers(1, 12),
        fill=st.integers(0, 255),
        what=st.sampled_from(["write", "zeroes", "read", "outside", "flush"]),
    )
    def run(self, pick: int, slba: int, lba_count: int, fill: int, what: str) -> None:
        raw, lba_count = (
            self.usable_queues[pick % len(self.usable_queues)].raw,
            min(lba_count, BLOCK_COUNT - slba),
        )
        if what == "outside":
            sqe = command(NvmOpcode.READ, BLOCK_COUNT - 1 + lba_count, 2)
            assert raw.execute(sqe).cqe.status & 0x7FF == Status.LBA_OUT_OF_RANGE
        elif what == "flush":
            assert raw.execute(build_flush(nsid=1)).cqe.is_success
        elif what == "read":
            reply = raw.execute(command(NvmOpcode.READ, slba, lba_count))
            assert reply.cqe.is_success
            got = np.frombuffer(reply.data, dtype=np.uint8).reshape(lba_count, BLOCK)
            known = self.is_known[slba : slba + lba_count].copy()
            for other in self.all_queues:
                if other.data:  # begun: old and new bytes are both right
                    low, high = other.slba - slba, other.slba + len(other.data) // BLOCK - slba
                    known[max(low, 0) : max(high, 0)] = False
            same = (got == self.content[slba : slba + lba_count]).all(axis=1)
            assert (same | ~known).all(), "a read returns what was written last"
        elif self.is_free(slba, lba_count):
            data = b"" if what == "zeroes" else bytes([fill]) * (lba_count * BLOCK)
            if what == "zeroes":
                reply = raw.execute(command(NvmOpcode.WRITE_ZEROES, slba, lba_count))
            else:
                is_small = lba_count == 1  # what IOCCSZ offers
                sqe = command(NvmOpcode.WRITE, slba, lba_count)
                reply = raw.execute(sqe, data, in_capsule=is_small)
            assert reply.cqe.is_success, reply
            self.content[slba : slba + lba_count] = fill if data else 0
            self.is_known[slba : slba + lba_count] = True

    @precondition(lambda self: len(self.begun_queues) < len(self.usable_queues))
    @rule(
        pick=PICK,
        slba=st.integers(0, BLOCK_COUNT - 1),
        lba_count=st.integers(3, 12),
        fill=st.integers(0, 255),
    )
    def begin_write(self, pick: int, slba: int, lba_count: int, fill: int) -> None:
        """A write whose data the target asks for, and does not get yet."""
        lba_count = min(lba_count, BLOCK_COUNT - slba)
        if not self.is_free(slba, lba_count):
            return
        idle = [queue for queue in self.usable_queues if not queue.data]
        queue = idle[pick % len(idle)]
        queue.raw.send(queue.raw.capsule(command(NvmOpcode.WRITE, slba, lba_count, cid=CID_WRITE)))
        r2t = queue.raw.read_pdu()
        assert r2t.type == R2T and r2t.cccid == CID_WRITE
        assert r2t.offset_and_length == (0, lba_count * BLOCK)
        queue.slba, queue.data = slba, bytes([fill]) * (lba_count * BLOCK)
        queue.ttag, queue.sent = r2t.ttag, 0

    @precondition(lambda self: bool(self.begun_queues))
    @rule(pick=PICK, size=st.sampled_from([4, 512, BLOCK, 3 * BLOCK, 64 * BLOCK]))
    def send_data(self, pick: int, size: int) -> None:
        """The next piece of a write that has begun; with the last one it completes."""
        queue = self.begun_queues[pick % len(self.begun_queues)]
        piece = queue.data[queue.sent : queue.sent + min(size, queue.raw.maxh2cdata)]
        is_last = queue.sent + len(piece) == len(queue.data)
        queue.raw.send(
            queue.raw.h2c_data(
                cccid=CID_WRITE, ttag=queue.ttag, datao=queue.sent, data=piece, is_last=is_last
            )
        )
        queue.sent += len(piece)
        if is_last:
            cqe = queue.raw.read_pdu().cqe
            assert cqe.is_success and cqe.cid == CID_WRITE
            blocks = slice(queue.slba, queue.slba + len(queue.data) // BLOCK)
            self.content[blocks], self.is_known[blocks] = queue.data[0], True
            queue.data = b""

    @precondition(lambda self: bool(self.begun_queues))
    @rule(pick=PICK)
    def use_a_taken_cid(self, pick: int) -> None:
        queue = self.begun_queues[pick % len(self.begun_queues)]
        sqe = replace(build_flush(nsid=1), cid=CID_WRITE)
        queue.raw.send(queue.raw.capsule(sqe))
        assert queue.raw.read_pdu().cqe.status & 0x7FF == Status.COMMAND_ID_CONFLICT

    # ---- ends ----

    @precondition(lambda self: len(self.all_queues) > 1)
    @rule(pick=PICK, is_in_the_middle=st.booleans())
    def cut(self, pick: int, is_in_the_middle: bool) -> None:
        """A connection ends, perhaps inside a PDU, of which nothing is written: that queue alone."""
        queue = self.all_queues[pick % len(self.all_queues)]
        if is_in_the_middle:
            sqe = replace(command(NvmOpcode.WRITE, 0, 1, cid=30), sgl_type=SGL_IN_CAPSULE)
            queue.raw.send(queue.raw.capsule(sqe, b"\xee" * BLOCK)[:-1])
        queue.raw.close()
        self.forget(queue)

    @precondition(lambda self: len(self.all_queues) > 1)
    @rule(pick=PICK, name=st.sampled_from(sorted(OFFENCES)))
    def offend(self, pick: int, name: str) -> None:
        """A broken rule is named in a C2HTermReq and ends that queue alone."""
        queue = self.all_queues[pick % len(self.all_queues)]
        queue.raw.send(OFFENCES[name](queue.raw))
        fes, _ = queue.raw.expect_term().fes_and_fei
        assert fes in (1, 2), name
        queue.raw.close()
        self.forget(queue)

    @invariant()
    def counts_agree(self) -> None:
        service, nqn = self.target.service, self.target.nqn
        wanted = sorted((host.admin.cntlid, len(host.queues)) for host in self.live)
        until(
            lambda: sorted((each.cntlid, each.io_qpair_count) for each in service.controllers(nqn)) == wanted,
            f"controllers and their queues: {wanted}",
        )


def machine_target() -> AbstractContextManager[RunningTarget]:
    transport = Transport(max_io_qpairs_per_ctrlr=QUEUE_ID_MAX)
    return running_target(namespace_size_bytes=BLOCK_COUNT * BLOCK, transport=transport)


SETTINGS = settings(stateful_step_count=25, max_examples=max(10, settings().max_examples // 2))
"""An example is many commands over sockets: half of the usual count."""


def test_target_when_hosts_do_anything_then_it_does_as_the_model_says() -> None:
    with machine_target() as target:
        run_state_machine_as_test(lambda: TargetMachine(target), settings=SETTINGS)  # type: ignore[arg-type]


class WrongMachine(TargetMachine):
    """A model that forgets to count what was zeroed."""

    def teardown(self) -> None:
        self.content[:] = np.where(self.content == 0, 1, self.content)
        super().teardown()


def test_canary_when_a_block_is_not_as_the_model_says_then_noticed() -> None:
    with machine_target() as target:
        machine = WrongMachine(target)
        try:
            machine.teardown()
        except AssertionError as error:
            assert "each block" in str(error)
            return
        raise AssertionError("wrong blocks went unnoticed")
