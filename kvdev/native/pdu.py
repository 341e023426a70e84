"""The C core's PDU machine: feed bytes in any pieces, get events; build headers; check commands.

The data path calls the machine from C; this binding is for tests, tools and scripted peers.
Not here: PDUs as values (``kvdev.wire.pdu``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvdev._core import ffi, lib
from kvdev.errors import DigestError, MalformedPduError, ProtocolError, SequenceError, UsageError

HOST = 0
TARGET = 1
PAYLOAD_BYTES_MAX = 1 << 24
"""Payload kept for one event; what a peer announces beyond it is received and discarded."""

FES_NONE, FES_SEQUENCE, FES_HDGST = 0, 2, 3


@dataclass(frozen=True)
class Link:
    """``struct kvdev_pdu_link``: what is asked for or offered, afterwards what is agreed."""

    hdgst: bool = False
    ddgst: bool = False
    recv_pda: int = 0
    send_pda: int = 0
    maxh2cdata: int = 131072
    maxr2t: int = 0
    in_capsule_max: int = 8192

    def to_c(self) -> Any:
        return ffi.new(
            "struct kvdev_pdu_link *",
            {
                "hdgst": int(self.hdgst),
                "ddgst": int(self.ddgst),
                "recv_pda": self.recv_pda,
                "send_pda": self.send_pda,
                "maxh2cdata": self.maxh2cdata,
                "maxr2t": self.maxr2t,
                "in_capsule_max": self.in_capsule_max,
            },
        )

    @classmethod
    def from_c(cls, link: Any) -> Link:
        return cls(
            hdgst=bool(link.hdgst),
            ddgst=bool(link.ddgst),
            recv_pda=link.recv_pda,
            send_pda=link.send_pda,
            maxh2cdata=link.maxh2cdata,
            maxr2t=link.maxr2t,
            in_capsule_max=link.in_capsule_max,
        )


@dataclass(frozen=True)
class Header:
    """A header whose rules hold; ``head`` are its HLEN bytes (a Term PDU: all of it)."""

    type: int
    flags: int
    plen: int
    data_len: int
    cccid: int
    ttag: int
    datao: int
    datal: int
    pda: int
    dgst: int
    max: int
    fes: int
    fei: int
    head: bytes


@dataclass(frozen=True)
class Data:
    """The payload of the last header is complete; ``data`` is None if it was discarded."""

    data: bytes | None
    ddgst_ok: bool


@dataclass(frozen=True)
class Fault:
    """The peer broke a rule; ``term`` is the Term PDU owed, empty if none is."""

    rule: str
    fes: int
    fei: int
    field: str
    field_offset: int
    pdu_type: int
    expected: int
    actual: int
    text: str
    term: bytes = b""


Event = Header | Data | Fault


def _fault_from_c(fault: Any, term: bytes = b"") -> Fault:
    text = ffi.new("char[200]")
    lib.kvdev_pdu_fault_text(fault, text, 200)
    return Fault(
        rule=ffi.string(lib.kvdev_pdu_rule_name(fault.rule)).decode(),
        fes=fault.fes,
        fei=fault.fei,
        field=ffi.string(lib.kvdev_pdu_rule_field(fault.rule)).decode(),
        field_offset=fault.field_offset,
        pdu_type=fault.pdu_type,
        expected=fault.expected,
        actual=fault.actual,
        text=ffi.string(text).decode(),
        term=term,
    )


def fault_from_c(fault: Any) -> Fault | None:
    """A ``struct kvdev_pdu_fault *`` of another C object (a queue pair); None if it holds none."""
    return _fault_from_c(fault) if fault.rule else None


def fault_error(fault: Fault, where: str) -> ProtocolError:
    """The exception for a fault; ``where`` names peer and queue pair."""
    message = f"{where}: {fault.text}"
    if fault.fes == FES_HDGST:
        return DigestError(message, expected=fault.expected, actual=fault.actual)
    if fault.fes == FES_SEQUENCE:
        return SequenceError(message, state=fault.rule)
    return MalformedPduError(message, field=fault.field, field_offset=fault.field_offset, fes=fault.fes)


def rule_names() -> list[str]:
    """Names of all rules in the machine's table."""
    return [ffi.string(lib.kvdev_pdu_rule_name(rule)).decode() for rule in range(1, lib.KVDEV_RULE_COUNT)]


class PduReceiver:
    """One connection's receive side.

    ``is_direct``: payload goes through payload_want and payload_landed, as a poller that reads from the
    socket to the final address does, instead of through step.
    """

    def __init__(
        self, role: int, link: Link | None = None, *, is_agreed: bool, is_direct: bool = False
    ) -> None:
        self._rx = ffi.new("struct kvdev_pdu_rx *")
        init = lib.kvdev_pdu_rx_init_agreed if is_agreed else lib.kvdev_pdu_rx_init
        if init(self._rx, role, (link or Link()).to_c()) != 0:
            raise UsageError(f"link: expected alignments up to 31 and a legal MAXH2CDATA, got {link}")
        self._is_direct = is_direct
        self._payload: Any = None

    @property
    def link(self) -> Link:
        return Link.from_c(self._rx.link)

    @property
    def pdu_count(self) -> int:
        return int(self._rx.pdu_count)

    @property
    def reserved_count(self) -> int:
        """Headers accepted with reserved bits that were not 0."""
        return int(self._rx.reserved_count)

    def feed(self, untrusted: bytes | bytearray | memoryview) -> list[Event]:
        """Take a piece of the stream; the events it completes. After a Fault nothing more is taken."""
        events: list[Event] = []
        buffer = ffi.from_buffer("uint8_t[]", untrusted)
        used = ffi.new("size_t *")
        at, size = 0, len(buffer)
        while at < size:
            landed = self._land(buffer, at, size)
            if landed:
                at += landed[0]
                event = landed[1]
            else:
                event = lib.kvdev_pdu_rx_step(self._rx, buffer + at, size - at, used)
                at += used[0]
            if event == lib.KVDEV_PDU_HEADER:
                events.append(self._header())
            elif event == lib.KVDEV_PDU_DATA_DONE:
                data = None if self._payload is None else bytes(ffi.buffer(self._payload))
                events.append(Data(data=data, ddgst_ok=bool(self._rx.ddgst_ok)))
                self._payload = None
            elif event == lib.KVDEV_PDU_FAULT:
                events.append(self.fault())
                break
        return events

    def _land(self, buffer: Any, at: int, size: int) -> tuple[int, int] | None:
        if not self._is_direct:
            return None
        dst, want = ffi.new("uint8_t **"), ffi.new("size_t *")
        if not lib.kvdev_pdu_rx_payload_want(self._rx, dst, want):
            return None
        n = min(want[0], size - at)
        ffi.memmove(dst[0], buffer + at, n)
        return n, lib.kvdev_pdu_rx_payload_landed(self._rx, n)

    def _header(self) -> Header:
        pdu, rx = self._rx.pdu, self._rx
        self._payload = None
        if 0 < pdu.data_len <= PAYLOAD_BYTES_MAX:
            self._payload = ffi.new("uint8_t[]", pdu.data_len)
            lib.kvdev_pdu_rx_set_payload(rx, self._payload)
        return Header(
            type=pdu.type,
            flags=pdu.flags,
            plen=pdu.plen,
            data_len=pdu.data_len,
            cccid=pdu.cccid,
            ttag=pdu.ttag,
            datao=pdu.datao,
            datal=pdu.datal,
            pda=pdu.pda,
            dgst=pdu.dgst,
            max=pdu.max,
            fes=pdu.fes,
            fei=pdu.fei,
            head=bytes(ffi.buffer(rx.head, rx.head_len)),
        )

    def fault(self) -> Fault:
        """The fault the machine stopped at, with the Term PDU it owes."""
        out = ffi.new("uint8_t[]", lib.KVDEV_PDU_BUILD_MAX)
        n = lib.kvdev_pdu_build_term(out, self._rx, ffi.addressof(self._rx, "fault"))
        return _fault_from_c(ffi.addressof(self._rx, "fault"), bytes(ffi.buffer(out, n)))


def _c_pdu(header: Header) -> Any:
    return ffi.new(
        "struct kvdev_pdu *",
        {
            "type": header.type,
            "flags": header.flags,
            "plen": header.plen,
            "data_len": header.data_len,
            "cccid": header.cccid,
            "ttag": header.ttag,
            "datao": header.datao,
            "datal": header.datal,
        },
    )


@dataclass(frozen=True)
class CommandTransfer:
    """``struct kvdev_pdu_cmd``: what a host knows of one command's data."""

    length: int
    direction: int
    received: int = 0
    requested: int = 0
    r2t_count: int = 0
    last_seen: bool = False

    def _to_c(self) -> Any:
        return ffi.new("struct kvdev_pdu_cmd *", {**vars(self), "last_seen": int(self.last_seen)})

    def _from_c(self, cmd: Any) -> CommandTransfer:
        return replace(
            self,
            received=cmd.received,
            requested=cmd.requested,
            r2t_count=cmd.r2t_count,
            last_seen=bool(cmd.last_seen),
        )

    def c2h(self, header: Header) -> CommandTransfer | Fault:
        """The state after this C2HData, or the rule it breaks."""
        cmd, fault = self._to_c(), ffi.new("struct kvdev_pdu_fault *")
        if lib.kvdev_pdu_cmd_c2h(cmd, _c_pdu(header), fault) != 0:
            return _fault_from_c(fault)
        return self._from_c(cmd)

    def r2t(self, header: Header, *, maxr2t: int = 0) -> CommandTransfer | Fault:
        """The state after this R2T, or the rule it breaks."""
        cmd, fault = self._to_c(), ffi.new("struct kvdev_pdu_fault *")
        if lib.kvdev_pdu_cmd_r2t(cmd, _c_pdu(header), maxr2t, fault) != 0:
            return _fault_from_c(fault)
        return self._from_c(cmd)

    @property
    def is_complete(self) -> bool:
        return bool(lib.kvdev_pdu_cmd_is_complete(self._to_c()))


def check_no_command(header: Header) -> Fault:
    """The rule a C2HData or R2T breaks whose CCCID names no outstanding command."""
    fault = ffi.new("struct kvdev_pdu_fault *")
    if header.type == lib.KVDEV_PDU_R2T:
        lib.kvdev_pdu_cmd_r2t(ffi.NULL, _c_pdu(header), 0, fault)
    else:
        lib.kvdev_pdu_cmd_c2h(ffi.NULL, _c_pdu(header), fault)
    return _fault_from_c(fault)


@dataclass(frozen=True)
class R2TTransfer:
    """``struct kvdev_pdu_r2t``: what a target knows of one R2T it sent."""

    offset: int
    length: int
    cccid: int
    received: int = 0
    is_active: bool = True

    def h2c(self, header: Header) -> R2TTransfer | Fault:
        """The state after this H2CData, or the rule it breaks."""
        fault = ffi.new("struct kvdev_pdu_fault *")
        r2t = ffi.new(
            "struct kvdev_pdu_r2t *",
            {
                "offset": self.offset,
                "length": self.length,
                "received": self.received,
                "cccid": self.cccid,
                "active": int(self.is_active),
            },
        )
        if lib.kvdev_pdu_r2t_h2c(r2t, _c_pdu(header), fault) != 0:
            return _fault_from_c(fault)
        return replace(self, received=r2t.received, is_active=bool(r2t.active))


def ttag_index(ttag: int, count: int) -> int | None:
    """Table index of a TTAG in 1..count."""
    index = int(lib.kvdev_pdu_ttag_index(ttag, count))
    return None if index < 0 else index


# ---- building: headers with digest and padding; data and its digest follow ----


def _built(n: int, out: Any) -> bytes:
    return bytes(ffi.buffer(out, n))


def _room() -> Any:
    return ffi.new("uint8_t[]", lib.KVDEV_PDU_BUILD_MAX)


def build_ic_req(link: Link) -> bytes:
    out = _room()
    return _built(lib.kvdev_pdu_build_ic_req(out, link.to_c()), out)


def build_ic_resp(link: Link) -> bytes:
    out = _room()
    return _built(lib.kvdev_pdu_build_ic_resp(out, link.to_c()), out)


def build_capsule_cmd(link: Link, sqe: bytes, data_len: int = 0) -> bytes:
    if len(sqe) != lib.KVDEV_SQE_BYTES:
        raise UsageError(f"sqe: expected {lib.KVDEV_SQE_BYTES} bytes, got {len(sqe)}")
    out = _room()
    return _built(lib.kvdev_pdu_build_capsule_cmd(out, link.to_c(), sqe, data_len), out)


def build_capsule_resp(link: Link, cqe: bytes) -> bytes:
    if len(cqe) != lib.KVDEV_CQE_BYTES:
        raise UsageError(f"cqe: expected {lib.KVDEV_CQE_BYTES} bytes, got {len(cqe)}")
    out = _room()
    return _built(lib.kvdev_pdu_build_capsule_resp(out, link.to_c(), cqe), out)


def build_h2c_data(link: Link, *, cccid: int, ttag: int, datao: int, datal: int, is_last: bool) -> bytes:
    out = _room()
    n = lib.kvdev_pdu_build_h2c_data(out, link.to_c(), cccid, ttag, datao, datal, int(is_last))
    return _built(n, out)


def build_c2h_data(link: Link, *, cccid: int, datao: int, datal: int, flags: int) -> bytes:
    out = _room()
    return _built(lib.kvdev_pdu_build_c2h_data(out, link.to_c(), cccid, datao, datal, flags), out)


def build_r2t(link: Link, *, cccid: int, ttag: int, r2to: int, r2tl: int) -> bytes:
    out = _room()
    return _built(lib.kvdev_pdu_build_r2t(out, link.to_c(), cccid, ttag, r2to, r2tl), out)


# ---- the seeded mutation loop ----


@dataclass(frozen=True)
class FuzzReport:
    """``struct kvdev_pdu_fuzz_report``."""

    stream_count: int
    pdu_count: int
    mutation_count: int
    header_count: int
    data_count: int
    fault_count: int
    digest_error_count: int
    unmutated_fault_count: int
    mismatch_count: int
    mismatch_seed: int
    rules: dict[str, int]
    """Faults by rule name."""


def fuzz(*, seed: int, pdu_count: int) -> FuzzReport:
    """Give mutated streams of ``pdu_count`` PDUs to receivers that see them in different pieces."""
    report = ffi.new("struct kvdev_pdu_fuzz_report *")
    lib.kvdev_pdu_fuzz(seed, pdu_count, report)
    names = rule_names()
    return FuzzReport(
        stream_count=report.stream_count,
        pdu_count=report.pdu_count,
        mutation_count=report.mutation_count,
        header_count=report.header_count,
        data_count=report.data_count,
        fault_count=report.fault_count,
        digest_error_count=report.digest_error_count,
        unmutated_fault_count=report.unmutated_fault_count,
        mismatch_count=report.mismatch_count,
        mismatch_seed=report.mismatch_seed,
        rules={name: report.rule_count[index + 1] for index, name in enumerate(names)},
    )


def parse_many(link: Link, count: int) -> int:
    """Parse one legal C2HData ``count`` times in the core, for benchmarks; the number accepted."""
    return int(lib.kvdev_pdu_parse_many(link.to_c(), count))


def make_fault(rule: str, *, pdu_type: int, expected: int, actual: int) -> Fault:
    """A fault by its rule's name, as C code outside the machine reports its own verdicts."""
    fault = ffi.new("struct kvdev_pdu_fault *")
    lib.kvdev_pdu_fault_set(fault, rule_names().index(rule) + 1, pdu_type, expected, actual)
    return _fault_from_c(fault)
