"""The PDU machine: every rule of its table, negotiation, padding, digests, Term PDUs, payload in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvdev.errors import DigestError, MalformedPduError, SequenceError, UsageError
from kvdev.native import pdu as native
from kvdev.native.pdu import (
    HOST,
    TARGET,
    CommandTransfer,
    Data,
    Fault,
    Header,
    Link,
    PduReceiver,
    R2TTransfer,
)
from kvdev.wire import pdu as wire
from kvdev.wire.crc32c import crc32c
from kvdev.wire.pdu import R2T, C2HData, CapsuleCmd, CapsuleResp, Framing, H2CData, ICReq, ICResp, PduType

DIR_C2H, DIR_H2C = 1, 2
PLAIN = Link()
DIGESTS = Link(hdgst=True, ddgst=True)


def put(data: bytes, offset: int, value: int, size: int) -> bytes:
    """``data`` with one little-endian field replaced."""
    return data[:offset] + value.to_bytes(size, "little") + data[offset + size :]


def put_sealed(data: bytes, offset: int, value: int, size: int) -> bytes:
    """The same in a PDU with header digest, which is made right again."""
    changed = put(data, offset, value, size)
    hlen = data[2]
    return put(changed, hlen, crc32c(changed[:hlen]), 4)


def fault_of(role: int, stream: bytes, link: Link = PLAIN, *, is_agreed: bool = True) -> Fault:
    """The fault a stream ends with."""
    events = PduReceiver(role, link, is_agreed=is_agreed).feed(stream)
    assert events and isinstance(events[-1], Fault), events
    return events[-1]


def header_of(role: int, stream: bytes, link: Link = PLAIN) -> Header:
    events = PduReceiver(role, link, is_agreed=True).feed(stream)
    assert isinstance(events[0], Header), events
    return events[0]


C2H = wire.build_pdu(C2HData(cccid=5, datao=4096, data=bytes(16)))
H2C = wire.build_pdu(H2CData(cccid=5, ttag=9, datao=0, data=bytes(16)))
R2T_BYTES = wire.build_pdu(R2T(cccid=5, ttag=9, r2to=0, r2tl=4096))
RESP = wire.build_pdu(CapsuleResp(cqe=bytes(16)))
CMD = wire.build_pdu(CapsuleCmd(sqe=bytes(64)))
CMD_DATA = wire.build_pdu(CapsuleCmd(sqe=bytes(64), data=bytes(512)))
IC_REQ = wire.build_pdu(ICReq())
IC_RESP = wire.build_pdu(ICResp())
TERM = wire.build_pdu(wire.C2HTermReq(fes=1, fei=2, data=CMD))
SEALED = Framing(hdgst=True, ddgst=True)
C2H_SEALED = wire.build_pdu(C2HData(cccid=5, datao=0, data=bytes(16)), SEALED)
RESP_SEALED = wire.build_pdu(CapsuleResp(cqe=bytes(16)), SEALED)


def c2h_header(**changes: int) -> Header:
    return dataclasses.replace(header_of(HOST, C2H), **changes)  # type: ignore[arg-type]


def r2t_header(**changes: int) -> Header:
    return dataclasses.replace(header_of(HOST, R2T_BYTES), **changes)  # type: ignore[arg-type]


def h2c_header(**changes: int) -> Header:
    return dataclasses.replace(header_of(TARGET, H2C), **changes)  # type: ignore[arg-type]


def faulted(result: object) -> Fault:
    assert isinstance(result, Fault), result
    return result


READ = CommandTransfer(length=8192, direction=DIR_C2H, received=4096)
WRITE = CommandTransfer(length=8192, direction=DIR_H2C)
ASKED = R2TTransfer(offset=0, length=16, cccid=5)

# rule: (what breaks it, FES, FEI, field)
RULES: dict[str, tuple[Callable[[], Fault], int, int, str]] = {
    "type_unknown": (lambda: fault_of(HOST, put(RESP, 0, 8, 1)), 1, 0, "type"),
    "type_direction": (lambda: fault_of(HOST, CMD), 1, 0, "type"),
    "ic_first": (lambda: fault_of(HOST, RESP, is_agreed=False), 2, 0, "type"),
    "ic_twice": (lambda: fault_of(HOST, IC_RESP + IC_RESP, is_agreed=False), 2, 0, "type"),
    "hlen": (lambda: fault_of(HOST, put(RESP, 2, 255, 1)), 1, 2, "hlen"),
    "plen_short": (lambda: fault_of(HOST, put(RESP, 4, 7, 4)), 1, 4, "plen"),
    "flag_hdgst": (lambda: fault_of(HOST, RESP, DIGESTS), 1, 1, "flags"),
    "hdgst": (
        lambda: fault_of(HOST, put(RESP_SEALED, 24, 0x11223344, 4), DIGESTS),
        3,
        0x11223344,
        "hdgst",
    ),
    "plen": (lambda: fault_of(HOST, put(C2H, 4, 41, 4)), 1, 4, "plen"),
    "pdo_short": (lambda: fault_of(HOST, put(C2H, 3, 20, 1)), 1, 3, "pdo"),
    "pdo_align": (lambda: fault_of(HOST, C2H, Link(recv_pda=3)), 1, 3, "pdo"),
    "flag_ddgst": (lambda: fault_of(HOST, put(C2H, 1, 6, 1)), 1, 1, "flags"),
    "term_hlen": (lambda: fault_of(HOST, put(TERM, 2, 25, 1)), 0, 0, "hlen"),
    "term_plen": (lambda: fault_of(HOST, put(TERM, 4, 153, 4)), 0, 0, "plen"),
    "pfv": (lambda: fault_of(HOST, put(IC_RESP, 8, 1, 2), is_agreed=False), 6, 8, "pfv"),
    "pda": (lambda: fault_of(TARGET, put(IC_REQ, 10, 32, 1), is_agreed=False), 1, 10, "pda"),
    "dgst_unrequested": (lambda: fault_of(HOST, put(IC_RESP, 11, 2, 1), is_agreed=False), 1, 11, "dgst"),
    "maxh2cdata_min": (
        lambda: fault_of(HOST, put(IC_RESP, 12, 4092, 4), is_agreed=False),
        1,
        12,
        "maxh2cdata",
    ),
    "maxh2cdata_align": (
        lambda: fault_of(HOST, put(IC_RESP, 12, 4098, 4), is_agreed=False),
        1,
        12,
        "maxh2cdata",
    ),
    "datal_zero": (lambda: fault_of(HOST, put(put(C2H, 16, 0, 4), 4, 24, 4)), 1, 16, "datal"),
    "datal_align": (lambda: fault_of(HOST, put(put(C2H, 16, 6, 4), 4, 30, 4)), 1, 16, "datal"),
    "datao_align": (lambda: fault_of(HOST, put(C2H, 12, 2, 4)), 1, 12, "datao"),
    "success_not_last": (lambda: fault_of(HOST, put(C2H, 1, 8, 1)), 1, 1, "flags"),
    "datal_maxh2cdata": (
        lambda: fault_of(
            TARGET,
            wire.build_pdu(H2CData(cccid=5, ttag=9, datao=0, data=bytes(4100))),
            Link(maxh2cdata=4096),
        ),
        5,
        0,
        "datal",
    ),
    "in_capsule_max": (lambda: fault_of(TARGET, CMD_DATA, Link(in_capsule_max=508)), 1, 4, "plen"),
    "r2tl_zero": (lambda: fault_of(HOST, put(R2T_BYTES, 16, 0, 4)), 4, 0, "r2tl"),
    "r2tl_align": (lambda: fault_of(HOST, put(R2T_BYTES, 16, 7, 4)), 1, 16, "r2tl"),
    "r2to_align": (lambda: fault_of(HOST, put(R2T_BYTES, 12, 1, 4)), 1, 12, "r2to"),
    "c2h_cccid": (lambda: native.check_no_command(c2h_header()), 1, 8, "cccid"),
    "c2h_direction": (lambda: faulted(WRITE.c2h(c2h_header())), 2, 0, "cccid"),
    "c2h_after_last": (
        lambda: faulted(dataclasses.replace(READ, last_seen=True).c2h(c2h_header())),
        2,
        0,
        "cccid",
    ),
    "c2h_range": (lambda: faulted(READ.c2h(c2h_header(datao=0xFFFFFFFC, datal=8))), 4, 0, "datao"),
    "c2h_datao": (lambda: faulted(READ.c2h(c2h_header(datao=4112))), 2, 0, "datao"),
    "resp_cid": (lambda: owner_fault("resp_cid"), 1, 20, "cid"),
    "r2t_cccid": (lambda: native.check_no_command(r2t_header()), 1, 8, "cccid"),
    "r2t_direction": (lambda: faulted(READ.r2t(r2t_header())), 2, 0, "cccid"),
    "r2t_range": (lambda: faulted(WRITE.r2t(r2t_header(datao=0xFFFFF000, datal=0x2000))), 4, 0, "r2to"),
    "r2t_r2to": (lambda: faulted(WRITE.r2t(r2t_header(datao=4096))), 2, 0, "r2to"),
    "r2t_limit": (lambda: faulted(dataclasses.replace(WRITE, r2t_count=1).r2t(r2t_header())), 5, 0, "cccid"),
    "h2c_ttag": (
        lambda: faulted(dataclasses.replace(ASKED, is_active=False).h2c(h2c_header())),
        1,
        10,
        "ttag",
    ),
    "h2c_cccid": (lambda: faulted(ASKED.h2c(h2c_header(cccid=6))), 1, 8, "cccid"),
    "h2c_range": (lambda: faulted(ASKED.h2c(h2c_header(datao=0xFFFFFFF0, datal=32))), 4, 0, "datao"),
    "h2c_datao": (lambda: faulted(ASKED.h2c(h2c_header(datao=4, datal=12))), 2, 0, "datao"),
    "h2c_last_early": (lambda: faulted(ASKED.h2c(h2c_header(datal=12))), 1, 1, "flags"),
    "h2c_last_missing": (lambda: faulted(ASKED.h2c(h2c_header(flags=0))), 1, 1, "flags"),
    "capsule_overrun": (lambda: owner_fault("capsule_overrun"), 2, 0, "cid"),
}


def owner_fault(rule: str) -> Fault:
    return native.make_fault(rule, pdu_type=PduType.CAPSULE_RESP, expected=1, actual=2)


def test_rules_when_listed_then_every_row_has_a_case() -> None:
    assert list(RULES) == native.rule_names()


@pytest.mark.parametrize("rule", RULES)
def test_rule_when_broken_then_its_fes_and_fei(rule: str) -> None:
    breach, fes, fei, field = RULES[rule]
    fault = breach()
    assert (fault.rule, fault.fes, fault.fei, fault.field) == (rule, fes, fei, field)
    assert f"{field}+" in fault.text


@pytest.mark.parametrize("plen", [0, 7, 23, 25, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("good", [RESP, R2T_BYTES, C2H])
def test_plen_when_wrong_then_fault_at_plen(plen: int, good: bytes) -> None:
    fault = fault_of(HOST, put(good, 4, plen, 4))
    assert (fault.fes, fault.fei) == (1, 4)


@pytest.mark.parametrize("pdo", [0, 23, 25, 26, 255])
def test_pdo_when_wrong_then_fault(pdo: int) -> None:
    fault = fault_of(HOST, put(C2H, 3, pdo, 1))
    assert fault.fes == 1 and fault.fei == 3


@pytest.mark.parametrize("plen", [0, 23, 153, 0xFFFFFFFF])
def test_term_when_its_length_is_wrong_then_no_term_is_owed(plen: int) -> None:
    fault = fault_of(HOST, put(TERM, 4, plen, 4))
    assert fault.fes == 0 and fault.term == b""


@pytest.mark.parametrize("size", [0, 1, 72, 128])
def test_term_when_legal_then_header_with_its_fields(size: int) -> None:
    data = bytes(range(size))
    stream = wire.build_pdu(wire.C2HTermReq(fes=3, fei=0xA1B2C3D4, data=data))
    for is_agreed in (False, True):  # it may come instead of an ICResp
        events = PduReceiver(HOST, DIGESTS, is_agreed=is_agreed).feed(stream)
        assert len(events) == 1 and isinstance(events[0], Header)
        assert (events[0].fes, events[0].fei, events[0].head[24:]) == (3, 0xA1B2C3D4, data)


def test_header_digest_when_wrong_then_nothing_behind_it_is_believed() -> None:
    """PLEN is broken too, but the digest is what is reported."""
    fault = fault_of(HOST, put(C2H_SEALED, 4, 0x7FFFFFFF, 4), DIGESTS)
    assert fault.rule == "hdgst"
    assert fault.fei == crc32c(C2H_SEALED[:24])  # FEI is the digest received


def test_header_digest_when_right_then_rules_behind_it_apply() -> None:
    assert fault_of(HOST, put_sealed(C2H_SEALED, 4, 0x7FFFFFFF, 4), DIGESTS).rule == "plen"


def test_data_digest_when_wrong_then_connection_goes_on() -> None:
    broken = put(C2H_SEALED, len(C2H_SEALED) - 4, 0, 4)
    events = PduReceiver(HOST, DIGESTS, is_agreed=True).feed(broken + C2H_SEALED)
    assert [event.ddgst_ok for event in events if isinstance(event, Data)] == [False, True]


def test_capsule_without_data_when_data_digests_are_on_then_has_none() -> None:
    link = Link(ddgst=True)
    assert header_of(TARGET, CMD, link).data_len == 0
    assert fault_of(TARGET, put(CMD, 1, 2, 1), link).rule == "flag_ddgst"
    assert fault_of(TARGET, CMD_DATA, link).rule == "flag_ddgst"


@pytest.mark.parametrize("pda", range(32))
@pytest.mark.parametrize("hdgst", [False, True])
def test_padding_when_any_alignment_then_sent_and_received(pda: int, hdgst: bool) -> None:
    link = Link(hdgst=hdgst, ddgst=True, send_pda=pda, recv_pda=pda)
    framing = Framing(hdgst=hdgst, ddgst=True, pda=pda)
    data = bytes(range(64))
    for role, value, head in (
        (HOST, C2HData(7, 64, data), native.build_c2h_data(link, cccid=7, datao=64, datal=64, flags=4)),
        (
            TARGET,
            H2CData(7, 3, 64, data),
            native.build_h2c_data(link, cccid=7, ttag=3, datao=64, datal=64, is_last=True),
        ),
        (TARGET, CapsuleCmd(bytes(64), data), native.build_capsule_cmd(link, bytes(64), 64)),
    ):
        stream = wire.build_pdu(value, framing)
        assert head == stream[: len(head)]
        assert stream[3] == len(head) and len(head) % (4 * (pda + 1)) == 0
        events = PduReceiver(role, link, is_agreed=True).feed(stream)
        assert isinstance(events[-1], Data) and events[-1] == Data(data=data, ddgst_ok=True)


def test_padding_when_longer_than_needed_then_skipped() -> None:
    """A peer may start its data later than the alignment asks for."""
    stream = put(put(C2H[:24], 3, 252, 1), 4, 252 + 16, 4) + b"\xaa" * 228 + bytes(range(16))
    events = PduReceiver(HOST, PLAIN, is_agreed=True).feed(stream)
    assert events[-1] == Data(data=bytes(range(16)), ddgst_ok=True)


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True), (True, True)])
def test_ic_when_exchanged_then_both_sides_agree(asked: tuple[bool, bool], given: tuple[bool, bool]) -> None:
    host_link = Link(hdgst=asked[0], ddgst=asked[1], recv_pda=7, maxr2t=3)
    target = PduReceiver(
        TARGET, Link(hdgst=given[0], ddgst=given[1], recv_pda=3, maxh2cdata=8192), is_agreed=False
    )
    host = PduReceiver(HOST, host_link, is_agreed=False)
    (req,) = target.feed(native.build_ic_req(host_link))
    assert isinstance(req, Header) and (req.pda, req.max) == (7, 3)
    (resp,) = host.feed(native.build_ic_resp(target.link))
    assert isinstance(resp, Header)
    both = (asked[0] and given[0], asked[1] and given[1])
    assert (host.link.hdgst, host.link.ddgst) == both == (target.link.hdgst, target.link.ddgst)
    assert (host.link.send_pda, host.link.maxh2cdata) == (3, 8192)
    assert (target.link.send_pda, target.link.maxr2t) == (7, 3)


def test_fault_when_kept_then_term_carries_the_header() -> None:
    fault = fault_of(HOST, put(C2H, 12, 2, 4))
    term = wire.parse_pdu(fault.term, receiver=wire.Role.TARGET)
    assert term == wire.H2CTermReq(fes=1, fei=12, data=put(C2H, 12, 2, 4)[:24])
    fault = fault_of(TARGET, put(H2C, 0, 8, 1))
    assert wire.parse_pdu(fault.term, receiver=wire.Role.HOST) == wire.C2HTermReq(
        fes=1, fei=0, data=put(H2C, 0, 8, 1)[:8]
    )


def test_fault_when_raised_then_class_says_what_to_do() -> None:
    with pytest.raises(DigestError):
        raise native.fault_error(fault_of(HOST, put(RESP_SEALED, 24, 1, 4), DIGESTS), "peer qpair 1")
    with pytest.raises(SequenceError, match="peer qpair 1: CapsuleResp type"):
        raise native.fault_error(fault_of(HOST, RESP, is_agreed=False), "peer qpair 1")
    error = native.fault_error(fault_of(HOST, put(RESP, 2, 16, 1)), "192.0.2.1:4420 qpair 3")
    assert isinstance(error, MalformedPduError)
    assert str(error) == "192.0.2.1:4420 qpair 3: CapsuleResp hlen+0x2: expected 24, got 16"
    assert (error.field, error.field_offset, error.fes) == ("hlen", 2, 1)


def test_machine_when_faulted_then_takes_nothing_more() -> None:
    receiver = PduReceiver(HOST, PLAIN, is_agreed=True)
    receiver.feed(put(RESP, 2, 16, 1))
    (again,) = receiver.feed(RESP)
    assert isinstance(again, Fault) and again.rule == "hlen"


def test_reserved_bits_when_set_then_accepted_and_counted() -> None:
    receiver = PduReceiver(HOST, PLAIN, is_agreed=True)
    receiver.feed(
        put(RESP, 1, 0xF2, 1) + put(C2H, 1, 0xF4, 1) + put(C2H, 20, 1, 4) + put(R2T_BYTES, 1, 2, 1) + RESP
    )
    assert (receiver.pdu_count, receiver.reserved_count) == (5, 4)


@pytest.mark.parametrize("link", [Link(recv_pda=32), Link(maxh2cdata=4095), Link(maxh2cdata=4098)])
def test_link_when_illegal_then_refused(link: Link) -> None:
    with pytest.raises(UsageError):
        PduReceiver(TARGET, link, is_agreed=False)


def test_read_when_data_arrives_in_order_then_complete() -> None:
    state: CommandTransfer | Fault = CommandTransfer(length=8192, direction=DIR_C2H)
    for datao, flags in ((0, 0), (4096, 4)):
        assert isinstance(state, CommandTransfer) and not state.is_complete
        state = state.c2h(c2h_header(datao=datao, datal=4096, flags=flags))
    assert isinstance(state, CommandTransfer) and state.is_complete and state.last_seen


def test_read_when_last_comes_early_then_not_complete() -> None:
    state = CommandTransfer(length=8192, direction=DIR_C2H).c2h(c2h_header(datao=0, datal=4096, flags=12))
    assert isinstance(state, CommandTransfer) and not state.is_complete


def test_write_when_r2ts_are_within_maxr2t_then_taken() -> None:
    state: CommandTransfer | Fault = WRITE
    for r2to in (0, 4096):
        assert isinstance(state, CommandTransfer)
        state = state.r2t(r2t_header(datao=r2to, datal=4096), maxr2t=1)
    assert isinstance(state, CommandTransfer) and (state.requested, state.r2t_count) == (8192, 2)
    assert faulted(state.r2t(r2t_header(datao=8192, datal=4), maxr2t=1)).rule == "r2t_limit"
    assert faulted(state.r2t(r2t_header(datao=8192, datal=4), maxr2t=2)).rule == "r2t_range"
    big = CommandTransfer(length=0xFFFFFFFC, direction=DIR_H2C)
    assert isinstance(big.r2t(r2t_header(datao=0, datal=0xFFFFFFFC), maxr2t=0xFFFFFFFF), CommandTransfer)


def test_r2t_when_its_data_is_complete_then_inactive() -> None:
    asked = R2TTransfer(offset=4096, length=24, cccid=5)
    half = asked.h2c(h2c_header(datao=4096, datal=16, flags=0))
    assert isinstance(half, R2TTransfer) and half.is_active
    done = half.h2c(h2c_header(datao=4112, datal=8, flags=4))
    assert isinstance(done, R2TTransfer) and not done.is_active
    assert faulted(done.h2c(h2c_header(datao=4120, datal=4))).rule == "h2c_ttag"


@pytest.mark.parametrize(("ttag", "index"), [(0, None), (1, 0), (4, 3), (5, None), (65535, None)])
def test_ttag_when_out_of_range_then_no_index(ttag: int, index: int | None) -> None:
    assert native.ttag_index(ttag, 4) == index


def test_payload_when_larger_than_kept_then_discarded_and_counted() -> None:
    """A length the peer made up sizes nothing: the bytes are taken and dropped."""
    receiver = PduReceiver(HOST, PLAIN, is_agreed=True)
    head = native.build_c2h_data(PLAIN, cccid=1, datao=0, datal=0xFFFFFF00, flags=4)
    (header,) = receiver.feed(head + bytes(1000))
    assert isinstance(header, Header) and header.data_len == 0xFFFFFF00
