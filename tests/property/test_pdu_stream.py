"""PDU streams: what a receiver reports does not depend on how the bytes were cut, on either side."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.errors import DigestError, MalformedPduError
from kvdev.native import pdu as native
from kvdev.native.pdu import Data, Event, Fault, Header, Link, PduReceiver
from kvdev.wire import pdu
from kvdev.wire.crc32c import crc32c
from kvdev.wire.pdu import (
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleCmd,
    CapsuleResp,
    Framing,
    H2CData,
    H2CTermReq,
    ICReq,
    ICResp,
    Pdu,
    Role,
)

FUZZ_PDU_COUNT = int(os.environ.get("KVDEV_FUZZ_PDU_COUNT", "200000"))

u16 = st.integers(0, 0xFFFF)
offsets = st.integers(0, 1 << 20).map(lambda n: 4 * n)
payloads = st.integers(1, 64).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))
framings = st.builds(
    Framing, hdgst=st.booleans(), ddgst=st.booleans(), pda=st.sampled_from([0, 0, 1, 3, 15, 31])
)

TO_HOST: list[st.SearchStrategy[Pdu]] = [
    st.builds(CapsuleResp, cqe=st.binary(min_size=16, max_size=16)),
    st.builds(R2T, cccid=u16, ttag=u16, r2to=offsets, r2tl=st.integers(1, 1 << 20).map(lambda n: 4 * n)),
    st.builds(C2HData, cccid=u16, datao=offsets, data=payloads, is_last=st.booleans()),
    st.builds(C2HData, cccid=u16, datao=offsets, data=payloads, is_success=st.booleans()),
]
TO_TARGET: list[st.SearchStrategy[Pdu]] = [
    st.builds(CapsuleCmd, sqe=st.binary(min_size=64, max_size=64)),
    st.builds(CapsuleCmd, sqe=st.binary(min_size=64, max_size=64), data=payloads),
    st.builds(H2CData, cccid=u16, ttag=u16, datao=offsets, data=payloads, is_last=st.booleans()),
]


@dataclass(frozen=True)
class Stream:
    role: Role
    framing: Framing
    pdus: tuple[Pdu, ...]

    @property
    def link(self) -> Link:
        return Link(hdgst=self.framing.hdgst, ddgst=self.framing.ddgst, recv_pda=self.framing.pda)

    @property
    def bytes(self) -> bytes:
        return b"".join(pdu.build_pdu(item, self.framing) for item in self.pdus)

    @property
    def is_agreed(self) -> bool:
        return not isinstance(self.pdus[0], (ICReq, ICResp))


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    role, framing = draw(st.sampled_from(Role)), draw(framings)
    pdus: list[Pdu] = list(
        draw(st.lists(st.one_of(TO_HOST if role == Role.HOST else TO_TARGET), min_size=1, max_size=5))
    )
    if draw(st.booleans()):
        ic: Pdu = (
            ICResp(cpda=draw(st.integers(0, 31)), hdgst=framing.hdgst, ddgst=framing.ddgst)
            if role == Role.HOST
            else ICReq(hpda=draw(st.integers(0, 31)), hdgst=framing.hdgst, ddgst=framing.ddgst)
        )
        pdus.insert(0, ic)
    if draw(st.booleans()):
        term = C2HTermReq if role == Role.HOST else H2CTermReq
        pdus.append(term(fes=draw(st.integers(0, 6)), fei=7, data=draw(st.binary(max_size=128))))
    return Stream(role, framing, tuple(pdus))


def receive(stream: Stream, pieces: list[bytes], *, is_direct: bool = False) -> list[Event]:
    receiver = PduReceiver(stream.role, stream.link, is_agreed=stream.is_agreed, is_direct=is_direct)
    return [event for piece in pieces for event in receiver.feed(piece)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def value_of(header: Header, payload: Data | None) -> Pdu:
    """The PDU that the machine's events describe."""
    head, flags = header.head, pdu.PduFlag(header.flags)
    data = (payload.data or b"") if payload else b""
    match header.type:
        case pdu.PduType.IC_REQ:
            return ICReq(header.pda, bool(header.dgst & 1), bool(header.dgst & 2), header.max)
        case pdu.PduType.IC_RESP:
            return ICResp(header.pda, bool(header.dgst & 1), bool(header.dgst & 2), header.max)
        case pdu.PduType.H2C_TERM:
            return H2CTermReq(header.fes, header.fei, head[24:])
        case pdu.PduType.C2H_TERM:
            return C2HTermReq(header.fes, header.fei, head[24:])
        case pdu.PduType.CAPSULE_CMD:
            return CapsuleCmd(head[8:72], data)
        case pdu.PduType.CAPSULE_RESP:
            return CapsuleResp(head[8:24])
        case pdu.PduType.H2C_DATA:
            return H2CData(header.cccid, header.ttag, header.datao, data, pdu.PduFlag.LAST in flags)
        case pdu.PduType.C2H_DATA:
            return C2HData(
                header.cccid, header.datao, data, pdu.PduFlag.LAST in flags, pdu.PduFlag.SUCCESS in flags
            )
        case _:
            return R2T(header.cccid, header.ttag, header.datao, header.datal)


def values_of(events: list[Event]) -> list[Pdu]:
    values = []
    for index, event in enumerate(events):
        assert not isinstance(event, Fault), event
        if isinstance(event, Header):
            payload = events[index + 1] if event.data_len else None
            assert payload is None or isinstance(payload, Data)
            assert payload is None or payload.ddgst_ok
            values.append(value_of(event, payload))
    return values


@given(stream=streams(), places=st.lists(st.integers(0, 4096), max_size=40), is_direct=st.booleans())
def test_stream_when_cut_anywhere_then_same_events(
    stream: Stream, places: list[int], is_direct: bool
) -> None:
    whole = receive(stream, [stream.bytes])
    assert receive(stream, cut(stream.bytes, places), is_direct=is_direct) == whole


@given(stream=streams())
def test_machine_when_given_what_python_builds_then_reports_the_same_pdus(stream: Stream) -> None:
    assert values_of(receive(stream, [stream.bytes])) == list(stream.pdus)


@given(stream=streams())
def test_python_when_given_what_core_builds_then_parses_the_same_pdus(stream: Stream) -> None:
    link = Link(hdgst=stream.framing.hdgst, ddgst=stream.framing.ddgst, send_pda=stream.framing.pda)
    for item in stream.pdus:
        data = getattr(item, "data", b"")
        if isinstance(item, CapsuleCmd):
            head = native.build_capsule_cmd(link, item.sqe, len(data))
        elif isinstance(item, CapsuleResp):
            head = native.build_capsule_resp(link, item.cqe)
        elif isinstance(item, R2T):
            head = native.build_r2t(link, cccid=item.cccid, ttag=item.ttag, r2to=item.r2to, r2tl=item.r2tl)
        elif isinstance(item, H2CData):
            head = native.build_h2c_data(
                link,
                cccid=item.cccid,
                ttag=item.ttag,
                datao=item.datao,
                datal=len(data),
                is_last=item.is_last,
            )
        elif isinstance(item, C2HData):
            flags = pdu.PduFlag.LAST * item.is_last | pdu.PduFlag.SUCCESS * item.is_success
            head = native.build_c2h_data(
                link, cccid=item.cccid, datao=item.datao, datal=len(data), flags=int(flags)
            )
        else:
            continue  # ICReq, ICResp and Term PDUs: golden and unit tests
        tail = crc32c(data).to_bytes(4, "little") if data and stream.framing.ddgst else b""
        assert pdu.parse_pdu(head + data + tail, stream.framing, receiver=stream.role) == item


SMALL_HOST = (
    CapsuleResp(bytes(range(16))),
    C2HData(1, 0, bytes(range(8)), is_last=False),
    R2T(2, 3, 0, 4),
    C2HData(1, 8, b"last", is_success=True),
)
SMALL_TARGET = (
    CapsuleCmd(bytes(range(64))),
    CapsuleCmd(bytes(64), b"data"),
    H2CData(4, 5, 0, bytes(range(12))),
)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("digests", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("pda", [0, 3, 31])
@pytest.mark.parametrize("role", list(Role))
def test_stream_when_split_at_every_byte_then_same_events(
    role: Role, pda: int, digests: tuple[bool, bool], is_direct: bool
) -> None:
    framing = Framing(*digests, pda=pda)
    ic: Pdu = ICResp(hdgst=digests[0], ddgst=digests[1])
    if role == Role.TARGET:
        ic = ICReq(hdgst=digests[0], ddgst=digests[1])
    stream = Stream(role, framing, (ic, *(SMALL_HOST if role == Role.HOST else SMALL_TARGET)))
    data = stream.bytes
    whole = receive(stream, [data])
    assert values_of(whole) == list(stream.pdus)
    for place in range(len(data) + 1):
        assert receive(stream, [data[:place], data[place:]], is_direct=is_direct) == whole, place
    assert receive(stream, [data[at : at + 1] for at in range(len(data))], is_direct=is_direct) == whole


# ---- broken bytes: the two implementations of the rules give one verdict ----


Verdict = tuple[str, int, int] | str


def verdict_of_machine(data: bytes, role: Role, link: Link) -> Verdict:
    """What the C machine says of one PDU: (field, offset, FES), or "more", "ok", "ddgst"."""
    is_ic = bool(data) and data[0] in (pdu.PduType.IC_REQ, pdu.PduType.IC_RESP)
    events = PduReceiver(role, link, is_agreed=not is_ic).feed(data)
    if not events:
        return "more"
    first = events[0]
    if isinstance(first, Fault):
        return (first.field, first.field_offset, first.fes)
    assert isinstance(first, Header)
    if first.plen != len(data):
        return "more"
    if first.data_len and isinstance(events[1], Data) and not events[1].ddgst_ok:
        return "ddgst"
    return "ok"


def verdict_of_twin(data: bytes, role: Role, framing: Framing) -> Verdict:
    try:
        pdu.parse_pdu(data, framing, receiver=role)
    except MalformedPduError as error:
        return (error.field, error.field_offset, error.fes)
    except DigestError as error:
        return ("hdgst", 0, pdu.Fes.HDGST) if " hdgst" in str(error) else "ddgst"
    return "ok"


def check_same_verdict(data: bytes, role: Role, framing: Framing, link: Link) -> None:
    machine, twin = verdict_of_machine(data, role, link), verdict_of_twin(data, role, framing)
    if machine == "more":  # the twin wants exactly one PDU and says that PLEN is not its length
        assert twin == ("plen", 4, pdu.Fes.INVALID_HEADER), (machine, twin, data.hex())
    else:
        assert machine == twin, (machine, twin, data.hex())


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, Role, Framing]:
    """One legal PDU with up to three fields overwritten, its header digest made right again or not."""
    role, framing = draw(st.sampled_from(Role)), draw(framings)
    ic: st.SearchStrategy[Pdu] = st.just(ICReq() if role == Role.TARGET else ICResp())
    value = draw(st.one_of(ic, *(TO_HOST if role == Role.HOST else TO_TARGET)))
    data = bytearray(pdu.build_pdu(value, framing))
    hlen = data[2]
    odd = st.sampled_from([0, 1, 2, 7, 24, 28, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF])
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([1, 1, 1, 2, 4]))
        at = draw(st.one_of(st.integers(0, 20), st.integers(0, len(data) - 4)))
        bits = (1 << 8 * size) - 1
        data[at : at + size] = (draw(st.one_of(odd, st.integers(0, bits))) & bits).to_bytes(size, "little")
    if framing.hdgst and draw(st.booleans()):
        data[hlen : hlen + 4] = crc32c(data[:hlen]).to_bytes(4, "little")
    return bytes(data), role, framing


@given(case=mutated())
def test_pdu_when_mutated_then_machine_and_twin_agree(case: tuple[bytes, Role, Framing]) -> None:
    data, role, framing = case
    limited = Framing(framing.hdgst, framing.ddgst, framing.pda, maxh2cdata=4096, in_capsule_max=8192)
    link = Link(hdgst=framing.hdgst, ddgst=framing.ddgst, recv_pda=framing.pda, maxh2cdata=4096)
    check_same_verdict(data, role, limited, link)


@given(data=st.binary(max_size=300), role=st.sampled_from(Role), framing=framings, is_agreed=st.booleans())
def test_machine_when_given_any_bytes_then_events_or_one_fault(
    data: bytes, role: Role, framing: Framing, is_agreed: bool
) -> None:
    link = Link(hdgst=framing.hdgst, ddgst=framing.ddgst, recv_pda=framing.pda)
    events = PduReceiver(role, link, is_agreed=is_agreed).feed(data)
    faults = [event for event in events if isinstance(event, Fault)]
    assert len(faults) <= 1 and (not faults or events[-1] is faults[0])
    assert all(len(fault.term) <= 152 for fault in faults)


def test_twins_when_one_breaks_a_rule_then_it_is_noticed() -> None:
    """Canary: a twin that forgot the data alignment must not pass for the real one."""
    data = pdu.build_pdu(C2HData(1, 0, bytes(8)))
    with pytest.raises(AssertionError):
        check_same_verdict(data, Role.HOST, Framing(pda=0), Link(recv_pda=3))


def test_fuzz_when_streams_are_mutated_then_all_receivers_agree(seed: int) -> None:
    report = native.fuzz(seed=seed, pdu_count=FUZZ_PDU_COUNT)
    print(f"pdu fuzz: seed {seed}, {report}")
    assert report.mismatch_count == 0, f"kvdev.native.pdu.fuzz(seed={report.mismatch_seed}, pdu_count=1)"
    assert report.unmutated_fault_count == 0
    assert report.fault_count > report.stream_count // 10 and report.digest_error_count > 0
    reached = {rule for rule, count in report.rules.items() if count}
    assert len(reached) >= 26, reached
