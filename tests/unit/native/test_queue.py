"""Queue pairs and queues before any connection: arguments, decoding, texts of faults."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import (
    CommandError,
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    DigestError,
    MalformedPduError,
    SequenceError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.native.admin import AdminThread
from kvdev.native.io import IO_DTYPE
from kvdev.native.queue import (
    CommandBuffer,
    HostQpair,
    HostQueue,
    QpairFault,
    completion_from_bytes,
    execute_error,
    fault_error,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qid", -1),
        ("qid", 65536),
        ("queue_size", 1),
        ("queue_size", 4097),
        ("hpda", 32),
        ("maxr2t_0based", 16),
        ("rcvbuf_size_bytes", -1),
        ("sndbuf_size_bytes", (1 << 30) + 1),
        ("in_capsule_size_bytes", -1),
        ("header_digest", "on"),
        ("data_digest", ""),
    ],
)
def test_qpair_when_an_argument_is_out_of_range_then_error_names_it(field: str, value: Any) -> None:
    options: dict[str, Any] = {"qid": 1, "queue_size": 2, field: value}
    with pytest.raises(UsageError, match=rf"^{field}: expected .*, got"):
        HostQpair(**options)


def test_qpair_when_not_connected_then_it_refuses_commands_and_closes_twice() -> None:
    qpair = HostQpair(qid=3, queue_size=4096, maxr2t_0based=15, trid="tcp://192.0.2.1:4420/nqn")
    assert qpair.info.state == "idle" and not qpair.is_alive and qpair.fault is None
    with pytest.raises(ConnectionLostError, match=r"tcp://192\.0\.2\.1:4420/nqn qpair 3"):
        qpair.execute(bytes(64), deadline=Deadline.after(1))
    with pytest.raises(UsageError, match="sqe: expected 64 bytes, got 63"):
        qpair.execute(bytes(63), deadline=Deadline.after(1))
    with pytest.raises(UsageError, match="numeric address"):
        qpair.connect("localhost", 4420, deadline=Deadline.after(1))
    qpair.close()
    qpair.close()
    with pytest.raises(UsageError, match="closed one"):
        qpair.connect("127.0.0.1", 4420, deadline=Deadline.after(1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity_count", 0),
        ("capacity_count", (1 << 20) + 1),
        ("window_size_bytes", 4095),
        ("window_size_bytes", (1 << 30) + 1),
        ("command_timeout_s", 0),
        ("command_timeout_s", 86401),
        ("spin_us", -1),
    ],
)
def test_queue_when_an_argument_is_out_of_range_then_error_names_it(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"^{field}: expected .*, got"):
        HostQueue(**{field: value})  # type: ignore[arg-type]


def test_queue_when_nothing_is_in_it_then_poll_returns_and_submit_refuses() -> None:
    queue = HostQueue(capacity_count=1)
    assert len(queue.poll(min_count=1, deadline=Deadline.after(10))) == 0
    queue.submit(np.zeros(0, dtype=IO_DTYPE))
    with pytest.raises(UsageError, match=r"ios\[0\]\.device_index: expected a device of this queue, got 0"):
        queue.submit(np.zeros(1, dtype=IO_DTYPE))
    with pytest.raises(UsageError, match="IO_DTYPE"):
        queue.submit(np.zeros(1, dtype=np.uint8))
    with pytest.raises(UsageError, match="qpair_indexes"):
        queue.add_namespace(nsid=1, block_size_bytes=4096, block_count=1, qpair_indexes=[0])
    with pytest.raises(UsageError, match="qpair_index: expected one of this queue, got 5"):
        queue.remove_qpair(5)
    assert (queue.capacity_count, queue.outstanding_count, queue.stats.polls) == (1, 0, 1)
    queue.close()
    queue.close()
    assert queue.outstanding_count == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size_bytes": 511},
        {"block_size_bytes": 4097},
        {"block_size_bytes": 256},
        {"block_count": 0},
        {"qpair_indexes": []},
        {"qpair_indexes": [0] * 17},
        {"qpair_indexes": [1]},
    ],
)
def test_add_namespace_when_an_argument_is_wrong_then_usage_error(changes: dict[str, Any]) -> None:
    queue, qpair = HostQueue(capacity_count=1), HostQpair(qid=1, queue_size=2)
    options: dict[str, Any] = {"nsid": 1, "block_size_bytes": 512, "block_count": 1, "qpair_indexes": [0]}
    assert queue.add_qpair(qpair) == 0
    assert queue.add_namespace(**options) == 0
    with pytest.raises(UsageError):
        queue.add_namespace(**{**options, **changes})
    queue.close()
    qpair.close()


def test_objects_when_dropped_in_any_order_then_memory_is_freed_once() -> None:
    for order in ((0, 1), (1, 0)):
        queue, qpair = HostQueue(capacity_count=4), HostQpair(qid=1, queue_size=8)
        queue.add_qpair(qpair)
        held: list[object] = [queue, qpair]
        del queue, qpair
        for index in order:
            held[index] = None
    thread, qpair = AdminThread(), HostQpair(qid=0, queue_size=8)
    thread.adopt(qpair, keep_alive_ms=100)
    del thread, qpair


def test_completion_when_decoded_then_fields_are_where_the_specification_has_them() -> None:
    raw = bytes.fromhex("01000000 02000000 0300 0400 0510 0582".replace(" ", ""))
    completion = completion_from_bytes(raw)
    assert (completion.dw0, completion.dw1, completion.sqhd, completion.sqid) == (1, 2, 3, 4)
    assert (completion.cid, completion.status) == (0x1005, 0x4102)
    assert (completion.sct, completion.sc, completion.dnr, completion.is_success) == (1, 2, True, False)
    with pytest.raises(CommandError, match="here: expected status 0x0/0x00, got 0x1/0x02") as caught:
        completion.check("here", opcode=6, nsid=9)
    assert (caught.value.opcode, caught.value.nsid, caught.value.is_retryable) == (6, 9, False)
    assert completion_from_bytes(bytes(16)).check("here", opcode=6).is_success


def test_command_buffer_when_it_cannot_serve_then_usage_error() -> None:
    with pytest.raises(UsageError, match="1 byte to 4 GiB, got 0"):
        CommandBuffer(b"", 2, what="x")
    with pytest.raises((BufferError, TypeError, ValueError)):
        CommandBuffer(b"read only", 1, what="x")
    assert CommandBuffer(bytearray(8), 1, what="x").size_bytes == 8
    assert CommandBuffer(np.zeros((2, 4), dtype=np.uint32), 2, what="x").size_bytes == 32


FAULT = QpairFault(
    kind="protocol",
    error=-71,
    fes=1,
    fei=2,
    field="hlen",
    field_offset=2,
    pdu_type=7,
    expected=24,
    actual=16,
    cid=None,
    operation="receive",
    is_term_sent=True,
    text="C2HData hlen+0x2: expected 24, got 16, FES 0x01",
)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (FAULT, MalformedPduError),
        (replace(FAULT, fes=2), SequenceError),
        (replace(FAULT, kind="header digest", fes=3), DigestError),
        (replace(FAULT, kind="digest refused"), UnsupportedError),
        (replace(FAULT, kind="timeout"), DeadlineError),
        (replace(FAULT, kind="socket"), ConnectionLostError),
        (replace(FAULT, kind="closed by the peer"), ConnectionLostError),
        (replace(FAULT, kind="terminated by the controller"), ConnectionLostError),
    ],
)
def test_fault_when_raised_then_it_is_the_class_a_caller_acts_on(
    fault: QpairFault, kind: type[Exception]
) -> None:
    error = fault_error(fault, where="192.0.2.1:4420 qpair 3")
    assert type(error) is kind
    assert str(error) == "192.0.2.1:4420 qpair 3: C2HData hlen+0x2: expected 24, got 16, FES 0x01"
    if kind is ConnectionLostError:
        assert type(fault_error(fault, where="x", connecting=True)) is ConnectError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-110, DeadlineError),
        (-107, ConnectionLostError),
        (-16, UsageError),
        (-10, UsageError),
        (-5, TransportError),
    ],
)
def test_execute_error_when_no_fault_is_known_then_the_code_decides(code: int, kind: type[Exception]) -> None:
    error = execute_error(code, None, where="x", operation="identify", elapsed_ms=1.0)
    assert type(error) is kind and "identify" in str(error)


def test_qpair_when_its_depth_is_128_then_it_takes_less_than_a_megabyte() -> None:
    def address_space_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    before = address_space_bytes()
    qpairs = [HostQpair(qid=1, queue_size=129, trid="memory") for _ in range(32)]
    each_bytes = (address_space_bytes() - before) / len(qpairs)
    for qpair in qpairs:
        qpair.close()
    assert each_bytes < 1 << 20
