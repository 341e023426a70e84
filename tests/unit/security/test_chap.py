"""Both sides of DH-HMAC-CHAP against each other and against what the other side must not send."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvdev.errors import AuthenticationError, UsageError
from kvdev.security.chap import (
    ChapParty,
    ChapState,
    ControllerChap,
    Counter,
    Credentials,
    HostChap,
    OutOfTurnError,
    Verdict,
    augmented,
    response,
)
from kvdev.security.secret import DhchapSecret
from kvdev.wire.auth import (
    AuthHeader,
    AuthId,
    Challenge,
    DhGroupId,
    Failure,
    FailureReason,
    HashId,
    Negotiate,
    ProtocolDescriptor,
    Reply,
    ScC,
    Success1,
    Success2,
)

HOST, SUB = "nqn.2024-01.io.example:host", "nqn.2024-01.io.example:sub"
PARTY = ChapParty(HOST, SUB, dh_groups=(DhGroupId.NULL,))
SECRETS = Credentials(DhchapSecret(bytes(range(32)), 1), DhchapSecret(bytes(range(32, 80)), 2))
ONE_WAY = Credentials(SECRETS.host)


def host(party: ChapParty = PARTY, secrets: Credentials = SECRETS) -> HostChap:
    return HostChap(party, secrets, t_ids=Counter(16), seqnums=Counter(32))


def controller(party: ChapParty = PARTY, secrets: Credentials = SECRETS) -> ControllerChap:
    return ControllerChap(party, lambda: secrets, seqnums=Counter(32))


def run(ours: HostChap, theirs: ControllerChap) -> Verdict:
    """A whole authentication; the controller's last verdict."""
    assert theirs.send(ours.negotiate()) is Verdict.GO_ON
    challenge, verdict = theirs.receive()
    assert verdict is Verdict.GO_ON or AuthHeader.parse(challenge).auth_id == AuthId.FAILURE1
    assert theirs.send(ours.reply(challenge)) is Verdict.GO_ON
    success, verdict = theirs.receive()
    last = ours.conclude(success)
    return verdict if last is None else theirs.send(last)


def failure_of(theirs: ControllerChap) -> FailureReason:
    """The failure that the controller has for the host; it ends the connection."""
    assert theirs.state is ChapState.FAILURE1_READ
    message, verdict = theirs.receive()
    assert verdict is Verdict.FAILED
    failure = Failure.parse(message)
    assert (failure.auth_type, failure.auth_id, failure.reason_code) == (0, AuthId.FAILURE1, 1)
    return FailureReason(failure.reason)


# ---- agreement ----


@pytest.mark.parametrize("hash_id", list(HashId))
@pytest.mark.parametrize("group_id", list(DhGroupId)[:3])
@pytest.mark.parametrize("secrets", [SECRETS, ONE_WAY], ids=["both", "host"])
def test_both_sides_agree(hash_id: HashId, group_id: DhGroupId, secrets: Credentials) -> None:
    party = replace(PARTY, hashes=(hash_id,), dh_groups=(group_id,))
    theirs = controller(party)
    assert run(host(party, secrets), theirs) is Verdict.AUTHENTICATED
    assert run(host(party, secrets), theirs) is Verdict.AUTHENTICATED  # again on the same queue


def test_responses_cover_what_the_specification_says() -> None:
    common = {"hash_id": HashId.SHA384, "seqnum": 0x01020304, "t_id": 0x0506, "host_nqn": HOST, "subnqn": SUB}
    challenge = bytes(48)
    numbers = b"\x04\x03\x02\x01" + b"\x06\x05" + b"\x00"
    r1 = challenge + numbers + b"HostHost" + HOST.encode() + b"\0" + SUB.encode()
    r2 = challenge + numbers + b"Controller" + SUB.encode() + b"\0" + HOST.encode()
    for is_host, message in ((True, r1), (False, r2)):
        expected = hmac.new(b"key", message, hashlib.sha384).digest()
        assert response(b"key", challenge, is_host=is_host, **common) == expected  # type: ignore[arg-type]
    shared = hashlib.sha384(b"\0\7").digest()
    assert augmented(b"c", shared=b"\0\7", hash_id=HashId.SHA384) == hmac.new(shared, b"c", "sha384").digest()
    assert augmented(b"c", shared=None, hash_id=HashId.SHA384) == b"c"


def test_numbers_are_never_zero_and_go_up() -> None:
    counter = Counter(16, randomness=lambda size: b"\xff" * (size - 1) + b"\xff")
    assert [counter.next() for _ in range(3)] == [1, 2, 3]
    assert Counter(16, randomness=bytes).next() == 1
    many = Counter(16)
    drawn = [many.next() for _ in range(70000)]
    assert 0 not in drawn and all((a + 1 if a < 0xFFFF else 1) == b for a, b in itertools.pairwise(drawn))


def test_challenges_differ_each_time() -> None:
    theirs = controller()
    seen, sequence = set(), []
    for _ in range(20):
        ours = host()
        theirs.send(ours.negotiate())
        message = Challenge.parse(theirs.receive()[0])
        seen.add(message.challenge)
        sequence.append(message.seqnum)
        theirs.send(ours.failure(FailureReason.FAILED))
    assert len(seen) == 20 and sequence == list(range(sequence[0], sequence[0] + 20))


def test_controller_when_offered_many_then_takes_the_first_it_knows() -> None:
    theirs = controller(replace(PARTY, dh_groups=(DhGroupId.FFDHE2048, DhGroupId.NULL)))
    offer = ProtocolDescriptor(hash_ids=(0x77, 3, 1), dh_group_ids=(0xE0, 5, 0, 1))
    other = ProtocolDescriptor(hash_ids=(1,), dh_group_ids=(0,), auth_id=0x55)
    theirs.send(Negotiate(9, (other, offer)).build())
    message = Challenge.parse(theirs.receive()[0])
    assert (message.t_id, message.hash_id, message.dh_group_id) == (9, HashId.SHA512, DhGroupId.NULL)


# ---- wrong secrets ----


@pytest.mark.parametrize("transform", [0, 1, 2])
def test_host_when_secret_is_wrong_then_controller_refuses(transform: int) -> None:
    theirs = controller()
    ours = host(secrets=Credentials(DhchapSecret(bytes(range(1, 33)), transform)))
    theirs.send(ours.negotiate())
    theirs.send(ours.reply(theirs.receive()[0]))
    message, verdict = theirs.receive()
    assert verdict is Verdict.FAILED
    with pytest.raises(AuthenticationError) as caught:
        ours.conclude(message)
    assert (caught.value.reason, caught.value.is_ours) == ("failed", False)


def test_controller_when_secret_is_wrong_then_host_refuses() -> None:
    ours = host()
    theirs = controller(secrets=Credentials(SECRETS.host, DhchapSecret(bytes(48), 2)))
    theirs.send(ours.negotiate())
    theirs.send(ours.reply(theirs.receive()[0]))
    with pytest.raises(AuthenticationError, match="response is wrong") as caught:
        ours.conclude(theirs.receive()[0])
    assert (caught.value.reason, caught.value.is_ours) == ("failed", True)
    assert theirs.send(ours.failure(FailureReason.FAILED)) is Verdict.FAILED


def test_controller_when_it_has_no_secret_for_a_host_that_asks_then_failure() -> None:
    ours, theirs = host(), controller(secrets=ONE_WAY)
    theirs.send(ours.negotiate())
    theirs.send(ours.reply(theirs.receive()[0]))
    assert failure_of(theirs) is FailureReason.FAILED


def test_host_when_controller_gives_no_response_then_refused() -> None:
    ours, theirs = host(), controller()
    theirs.send(ours.negotiate())
    ours.reply(theirs.receive()[0])
    with pytest.raises(AuthenticationError, match="RVALID"):
        ours.conclude(Success1(ours.t_id, 32).build())


def test_controller_when_its_secrets_cannot_be_read_then_failure_and_a_line() -> None:
    lines: list[str] = []

    def gone() -> Credentials:
        raise UsageError("dhchap_key: /gone: No such file")

    theirs = ControllerChap(PARTY, gone, seqnums=Counter(32), on_failure=lines.append)
    ours = host()
    theirs.send(ours.negotiate())
    theirs.send(ours.reply(theirs.receive()[0]))
    assert failure_of(theirs) is FailureReason.FAILED
    assert lines == ["failed: dhchap_key: /gone: No such file"]


def test_replay_of_a_former_reply_is_refused() -> None:
    ours, theirs = host(), controller()
    theirs.send(ours.negotiate())
    former = ours.reply(theirs.receive()[0])
    theirs.send(former)
    theirs.receive()
    theirs.send(Success2(t_id=ours.t_id).build())
    # The same transaction number again: the attacker has heard the whole exchange.
    theirs.send(ours.negotiate())
    theirs.receive()
    theirs.send(former)
    assert failure_of(theirs) is FailureReason.FAILED


def test_controller_when_host_sends_back_its_challenge_then_failure() -> None:
    ours, theirs = host(), controller()
    theirs.send(ours.negotiate())
    challenge = Challenge.parse(theirs.receive()[0]).challenge
    theirs.send(Reply(ours.t_id, bytes(32), challenge, seqnum=1).build())
    assert failure_of(theirs) is FailureReason.FAILED


# ---- malformed and out of order, to the controller ----


def negotiated() -> tuple[HostChap, ControllerChap, bytes]:
    ours, theirs = host(), controller()
    theirs.send(ours.negotiate())
    return ours, theirs, theirs.receive()[0]


def patched(message: bytes, offset: int, value: bytes) -> bytes:
    return message[:offset] + value + message[offset + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m[:5], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: m[:7], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: m[:-1], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 7, b"\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 7, b"\2"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 7, b"\x11"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 10, b"\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 10, b"\x1f"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 11, b"\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 11, b"\x1f"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 8, b"\2"), FailureReason.PROTOCOL_UNUSABLE),
        (lambda m: patched(m, 6, bytes((ScC.NEW_TLS_PSK,))), FailureReason.CONCATENATION_MISMATCH),
        (lambda m: patched(m, 6, bytes((ScC.REPLACE_TLS_PSK,))), FailureReason.CONCATENATION_MISMATCH),
        (lambda m: patched(m, 6, b"\1"), FailureReason.CONCATENATION_MISMATCH),
        (lambda m: patched(m, 12, b"\x04\x05\x06"), FailureReason.HASH_UNUSABLE),
        (lambda m: patched(m, 42, b"\x06"), FailureReason.DH_GROUP_UNUSABLE),
        (lambda m: patched(m, 0, b"\1"), FailureReason.INCORRECT_MESSAGE),
        (lambda m: patched(m, 1, b"\2"), FailureReason.INCORRECT_MESSAGE),
    ],
)
def test_controller_when_negotiation_is_wrong_then_failure(
    spoil: Callable[[bytes], bytes], reason: FailureReason
) -> None:
    theirs = controller()
    assert theirs.send(spoil(host().negotiate())) is Verdict.GO_ON
    assert failure_of(theirs) is reason


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m[:5], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: m[:15], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: m[:47], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: m[:79], FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 4, b"\0\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 6, b"\x30"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 6, b"\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 8, b"\2"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 10, b"\1\0"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 10, b"\xfc\xff"), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 10, b"\4\0") + bytes(4), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 12, bytes(4)), FailureReason.INCORRECT_PAYLOAD),
        (lambda m: patched(m, 16, bytes(32)), FailureReason.FAILED),
        (lambda m: patched(m, 0, b"\0"), FailureReason.INCORRECT_MESSAGE),
        (lambda m: patched(m, 1, b"\4"), FailureReason.INCORRECT_MESSAGE),
        (lambda m: patched(m, 0, b"\0\0"), FailureReason.INCORRECT_MESSAGE),
    ],
)
def test_controller_when_reply_is_wrong_then_failure(
    spoil: Callable[[bytes], bytes], reason: FailureReason
) -> None:
    ours, theirs, challenge = negotiated()
    theirs.send(spoil(ours.reply(challenge)))
    assert failure_of(theirs) is reason


@pytest.mark.parametrize("value", [b"", bytes(256), bytes(255) + b"\1", b"\xff" * 256, b"\7" * 260])
def test_controller_when_value_is_no_group_element_then_failure(value: bytes) -> None:
    party = replace(PARTY, dh_groups=(DhGroupId.FFDHE2048,))
    ours, theirs = host(party), controller(party)
    theirs.send(ours.negotiate())
    theirs.receive()
    theirs.send(Reply(ours.t_id, bytes(32), dh_value=value).build())
    assert failure_of(theirs) is FailureReason.INCORRECT_PAYLOAD


def test_controller_when_a_message_is_out_of_order_then_failure() -> None:
    orders: list[Callable[[HostChap, ControllerChap], None]] = [
        lambda ours, theirs: theirs.send(Success2(t_id=ours.t_id).build()) and None,
        lambda ours, theirs: theirs.send(ours.negotiate()) and theirs.send(ours.negotiate()) and None,
        lambda ours, theirs: theirs.send(Reply(ours.t_id, bytes(32)).build()) and None,
        lambda ours, theirs: theirs.send(ours.failure(FailureReason.FAILED)) and None,
    ]
    for order in orders:
        ours, theirs = host(), controller()
        order(ours, theirs)
        assert failure_of(theirs) is FailureReason.INCORRECT_MESSAGE
    ours, theirs, challenge = negotiated()
    theirs.send(ours.reply(challenge))
    theirs.send(Success2(t_id=ours.t_id).build())  # before the success was received
    assert failure_of(theirs) is FailureReason.INCORRECT_MESSAGE


def test_controller_when_asked_out_of_turn_then_says_so_and_stays() -> None:
    ours, theirs = host(), controller()
    for _ in range(2):
        with pytest.raises(OutOfTurnError):
            theirs.receive()
    theirs.send(ours.negotiate())
    challenge = theirs.receive()[0]
    with pytest.raises(OutOfTurnError):
        theirs.receive()
    theirs.send(ours.reply(challenge))
    last = ours.conclude(theirs.receive()[0])
    assert last is not None and theirs.send(last) is Verdict.AUTHENTICATED


# ---- malformed and out of order, to the host ----


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m[:5], "incorrect_payload"),
        (lambda m: m[:15], "incorrect_payload"),
        (lambda m: m[:47], "incorrect_payload"),
        (lambda m: patched(m, 4, b"\0\0"), "incorrect_payload"),
        (lambda m: patched(m, 6, b"\x30"), "incorrect_payload"),
        (lambda m: patched(m, 8, b"\x09"), "incorrect_payload"),
        (lambda m: patched(m, 10, b"\4\0") + bytes(4), "incorrect_payload"),
        (lambda m: patched(m, 10, b"\2\0"), "incorrect_payload"),
        (lambda m: patched(m, 10, b"\xfc\xff"), "incorrect_payload"),
        (lambda m: patched(m, 12, bytes(4)), "incorrect_payload"),
        (lambda m: patched(m, 9, b"\1"), "dh_group_unusable"),
        (lambda m: patched(m, 0, b"\0"), "incorrect_message"),
        (lambda m: patched(m, 1, b"\3"), "incorrect_message"),
        (lambda m: patched(m, 0, b"\0\0"), "incorrect_message"),
    ],
)
def test_host_when_challenge_is_wrong_then_error(spoil: Callable[[bytes], bytes], reason: str) -> None:
    ours, _, challenge = negotiated()
    with pytest.raises(AuthenticationError) as caught:
        ours.reply(spoil(challenge))
    assert (caught.value.reason, caught.value.is_ours) == (reason, True)


def test_host_when_hash_was_not_offered_then_error() -> None:
    ours = host(replace(PARTY, hashes=(HashId.SHA512,)))
    with pytest.raises(AuthenticationError) as caught:
        ours.reply(Challenge(ours.t_id, HashId.SHA256, 0, 1, bytes(32)).build())
    assert caught.value.reason == "hash_unusable"


@pytest.mark.parametrize("value", [b"", bytes(256), bytes(255) + b"\1", b"\7" * 260])
def test_host_when_value_is_no_group_element_then_error(value: bytes) -> None:
    ours = host(replace(PARTY, dh_groups=(DhGroupId.FFDHE2048,)))
    with pytest.raises(AuthenticationError, match="DHV") as caught:
        ours.reply(Challenge(ours.t_id, HashId.SHA256, 1, 1, bytes(32), value).build())
    assert caught.value.reason == "incorrect_payload"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m[:15], "incorrect_payload"),
        (lambda m: m[:47], "incorrect_payload"),
        (lambda m: patched(m, 4, b"\0\0"), "incorrect_payload"),
        (lambda m: patched(m, 6, b"\x40"), "incorrect_payload"),
        (lambda m: patched(m, 8, b"\2"), "incorrect_payload"),
        (lambda m: patched(m, 16, bytes(32)), "failed"),
        (lambda m: patched(m, 1, b"\4"), "incorrect_message"),
    ],
)
def test_host_when_success_is_wrong_then_error(spoil: Callable[[bytes], bytes], reason: str) -> None:
    ours, theirs, challenge = negotiated()
    theirs.send(ours.reply(challenge))
    with pytest.raises(AuthenticationError) as caught:
        ours.conclude(spoil(theirs.receive()[0]))
    assert (caught.value.reason, caught.value.is_ours) == (reason, True)


@pytest.mark.parametrize("reason", [*FailureReason, 0, 0x55])
def test_host_when_controller_fails_then_error_has_its_reason(reason: int) -> None:
    ours = host()
    with pytest.raises(AuthenticationError) as caught:
        ours.reply(Failure(t_id=ours.t_id, reason=reason).build())
    expected = (
        FailureReason(reason).name.lower() if reason in list(FailureReason) else f"reason 0x{reason:02x}"
    )
    assert (caught.value.reason, caught.value.is_ours) == (expected, False)


# ---- what is shown ----


def test_messages_and_credentials_when_shown_then_have_no_secret() -> None:
    ours, theirs, challenge = negotiated()
    reply = ours.reply(challenge)
    shown = repr([SECRETS, Challenge.parse(challenge), Reply.parse(reply, hash_size_bytes=32), ours, theirs])
    for part in (bytes(range(32)), Challenge.parse(challenge).challenge, reply[16:48], reply[48:80]):
        assert part.hex() not in shown and repr(part)[2:-1] not in shown
