"""Data PDUs against a command: what is accepted tiles the buffer exactly, whatever the peer sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdev.native.pdu import CommandTransfer, Fault, Header, R2TTransfer
from kvdev.wire.pdu import PduFlag, PduType

DIR_C2H, DIR_H2C = 1, 2

lengths = st.sampled_from([4, 4096, 8192, 0xFFFFFFFC])
# Mostly near the truth, sometimes at the edges of 32 bits.
steps = st.tuples(
    st.sampled_from([0, 0, 0, 0, 4, -4, 0xFFFFFFFC]),  # offset, relative to the right one
    st.sampled_from([4, 4, 64, 4096, 0x80000000, 0xFFFFFFFC]),
    st.booleans(),
)


def header(kind: PduType, offset: int, length: int, *, is_last: bool = False) -> Header:
    return Header(
        type=kind,
        flags=PduFlag.LAST if is_last else 0,
        plen=0,
        data_len=0,
        cccid=1,
        ttag=1,
        datao=offset & 0xFFFFFFFF,
        datal=length,
        pda=0,
        dgst=0,
        max=0,
        fes=0,
        fei=0,
        head=b"",
    )


@given(length=lengths, sent=st.lists(steps, max_size=12))
def test_c2h_when_any_sequence_then_accepted_bytes_are_contiguous(
    length: int, sent: list[tuple[int, int, bool]]
) -> None:
    state = CommandTransfer(length=length, direction=DIR_C2H)
    end, is_over = 0, False
    for delta, datal, is_last in sent:
        pdu = header(PduType.C2H_DATA, end + delta, datal, is_last=is_last)
        result = state.c2h(pdu)
        is_legal = not is_over and pdu.datao == end and end + datal <= length
        assert isinstance(result, CommandTransfer) == is_legal, result
        if isinstance(result, Fault):
            return
        state, end, is_over = result, end + datal, is_last
        assert state.received == end <= length
        assert state.is_complete == (end == length)


@given(length=lengths, maxr2t=st.integers(0, 3), asked=st.lists(steps, max_size=12))
def test_r2t_when_any_sequence_then_asked_bytes_are_contiguous(
    length: int, maxr2t: int, asked: list[tuple[int, int, bool]]
) -> None:
    state = CommandTransfer(length=length, direction=DIR_H2C)
    for count, (delta, r2tl, _) in enumerate(asked):
        pdu = header(PduType.R2T, state.requested + delta, r2tl)
        result = state.r2t(pdu, maxr2t=maxr2t)
        is_legal = count <= maxr2t and pdu.datao == state.requested and pdu.datao + r2tl <= length
        assert isinstance(result, CommandTransfer) == is_legal, result
        if isinstance(result, Fault):
            return
        assert result.requested == state.requested + r2tl <= length
        state = result


@given(
    offset=st.sampled_from([0, 4096, 0xFFFFF000]),
    length=st.sampled_from([4, 64, 4096]),
    sent=st.lists(steps, max_size=12),
)
def test_h2c_when_any_sequence_then_r2t_is_filled_exactly(
    offset: int, length: int, sent: list[tuple[int, int, bool]]
) -> None:
    state = R2TTransfer(offset=offset, length=length, cccid=1)
    for delta, datal, is_last in sent:
        place = offset + state.received
        pdu = header(PduType.H2C_DATA, place + delta, datal, is_last=is_last)
        result = state.h2c(pdu)
        is_whole = state.received + datal == length
        is_legal = state.is_active and pdu.datao == place and state.received + datal <= length
        assert isinstance(result, R2TTransfer) == (is_legal and is_last == is_whole), result
        if isinstance(result, Fault):
            return
        assert result.received == state.received + datal and result.is_active == (not is_whole)
        state = result
