"""PDU values: what a builder refuses, what a parser says; the rules themselves are tested on the core."""

from __future__ import annotations

import pytest

from kvdev.errors import DigestError, MalformedPduError, UsageError
from kvdev.wire import pdu
from kvdev.wire.pdu import R2T, C2HData, C2HTermReq, CapsuleCmd, CapsuleResp, Framing, ICReq, Role


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (CapsuleCmd(bytes(63)), "sqe: expected 64 bytes, got 63"),
        (CapsuleResp(bytes(17)), "cqe: expected 16 bytes, got 17"),
        (C2HTermReq(1, 0, bytes(129)), "term data: expected at most 128 bytes, got 129"),
        (R2T(1, 1, 1 << 32, 4), "r2to: expected an integer of 4 bytes"),
        (ICReq(hpda=256), "pda: expected an integer of 1 bytes"),
    ],
)
def test_build_when_value_does_not_fit_then_usage_error(value: pdu.Pdu, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pdu.build_pdu(value)


@pytest.mark.parametrize("size", range(8))
def test_parse_when_shorter_than_common_header_then_malformed(size: int) -> None:
    with pytest.raises(MalformedPduError, match=f"expected 8 bytes of common header, got {size}"):
        pdu.parse_pdu(bytes(size), receiver=Role.HOST)


@pytest.mark.parametrize("value", [C2HData(1, 0, bytes(8)), CapsuleResp(bytes(16)), R2T(1, 2, 0, 4)])
@pytest.mark.parametrize("framing", [Framing(), Framing(hdgst=True, ddgst=True, pda=3)])
def test_parse_when_cut_anywhere_then_malformed(value: pdu.Pdu, framing: Framing) -> None:
    data = pdu.build_pdu(value, framing)
    for size in range(len(data)):
        with pytest.raises(MalformedPduError):
            pdu.parse_pdu(data[:size], framing, receiver=Role.HOST)
    with pytest.raises(MalformedPduError, match="plen"):
        pdu.parse_pdu(data + b"x", framing, receiver=Role.HOST)


def test_parse_when_digest_is_wrong_then_digest_error() -> None:
    framing = Framing(hdgst=True, ddgst=True)
    data = bytearray(pdu.build_pdu(C2HData(1, 0, bytes(8)), framing))
    data[30] ^= 1
    with pytest.raises(DigestError, match="C2HData ddgst"):
        pdu.parse_pdu(bytes(data), framing, receiver=Role.HOST)
    data[8] ^= 1
    with pytest.raises(DigestError, match="C2HData hdgst"):
        pdu.parse_pdu(bytes(data), framing, receiver=Role.HOST)


def test_parse_when_field_is_wrong_then_message_names_it() -> None:
    data = bytearray(pdu.build_pdu(C2HData(1, 0, bytes(8))))
    data[2] = 16
    with pytest.raises(MalformedPduError, match=r"^C2HData hlen\+0x2: expected 24, got 16$") as caught:
        pdu.parse_pdu(bytes(data), receiver=Role.HOST)
    assert (caught.value.field_offset, caught.value.fes) == (2, pdu.Fes.INVALID_HEADER)
