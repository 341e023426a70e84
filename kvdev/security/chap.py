"""DH-HMAC-CHAP as both sides compute it: what is answered to a challenge, and the order of the messages.

A ``HostChap`` or ``ControllerChap`` is one authentication of one queue; the caller moves its messages.
Not here: Authentication Send and Receive (``kvdev.initiator.authenticate``, ``kvdev.target.authenticate``).
Spec: NVM Express Base 2.1 sections 8.3.4.4, 8.3.4.5.
Trust: messages are ``untrusted``; the host side raises only AuthenticationError, the controller side nothing.
Threads: one at a time. A step with an ffdhe group computes for up to 0.1 s (without OpenSSL: 1 s).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdev.errors import AuthenticationError, KvdevError
from kvdev.security.dh import DhExchange, DhValueError
from kvdev.security.secret import DhchapSecret
from kvdev.wire.auth import (
    AuthHeader,
    AuthId,
    AuthType,
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
from kvdev.wire.layout import WireError

HASHES_DEFAULT = (HashId.SHA256, HashId.SHA384, HashId.SHA512)
DH_GROUPS_DEFAULT = (
    DhGroupId.FFDHE2048,
    DhGroupId.FFDHE3072,
    DhGroupId.FFDHE4096,
    DhGroupId.FFDHE6144,
    DhGroupId.FFDHE8192,
    DhGroupId.NULL,
)
"""In the order a host offers them, which a kvdev target follows: enough before more, without a group last."""


class Counter:
    """Numbers that are not 0 and not used twice in a row of 2^bits - 1, from a random start. Any thread."""

    def __init__(self, bits: int, *, randomness: Callable[[int], bytes] = os.urandom) -> None:
        self._limit = (1 << bits) - 1
        self._last = int.from_bytes(randomness(bits // 8), "little")
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._last = self._last + 1 if self._last < self._limit else 1
            return self._last


@dataclass(frozen=True)
class Credentials:
    """Secrets of a host and of the subsystem towards it; without the latter only the host authenticates."""

    host: DhchapSecret
    controller: DhchapSecret | None = None


def augmented(challenge: bytes, *, shared: bytes | None, hash_id: HashId) -> bytes:
    """The challenge as the response covers it: with a group it depends on the exchange."""
    if shared is None:
        return challenge
    key = hashlib.new(hash_id.algorithm, shared).digest()
    return hmac.digest(key, challenge, hash_id.algorithm)


def response(
    key: bytes,
    challenge: bytes,
    *,
    hash_id: HashId,
    seqnum: int,
    t_id: int,
    is_host: bool,
    host_nqn: str,
    subnqn: str,
    sc_c: int = ScC.NONE,
) -> bytes:
    """R1 (``is_host``) or R2 to an augmented challenge."""
    role, first, second = (b"HostHost", host_nqn, subnqn) if is_host else (b"Controller", subnqn, host_nqn)
    message = (
        challenge
        + seqnum.to_bytes(4, "little")
        + t_id.to_bytes(2, "little")
        + bytes((sc_c,))
        + role
        + first.encode()
        + b"\0"
        + second.encode()
    )
    return hmac.digest(key, message, hash_id.algorithm)


class _FailedStepError(Exception):
    """A step failed; ``reason`` is what the other side is told."""

    def __init__(self, reason: FailureReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class ChapParty:
    """Who authenticates to whom, and what both sides use for it."""

    host_nqn: str
    subnqn: str
    hashes: Sequence[HashId] = HASHES_DEFAULT
    dh_groups: Sequence[DhGroupId] = DH_GROUPS_DEFAULT
    randomness: Callable[[int], bytes] = os.urandom


class HostChap:
    """The host's side: ``negotiate``, ``reply``, ``conclude``, in this order and once each."""

    def __init__(
        self, party: ChapParty, credentials: Credentials, *, t_ids: Counter, seqnums: Counter
    ) -> None:
        self._party = party
        self._credentials = credentials
        self.t_id = t_ids.next()
        self._seqnum = seqnums.next() if credentials.controller is not None else 0
        self._hash_id = HashId.SHA256
        self._own_challenge: bytes | None = None
        self._shared: bytes | None = None

    def negotiate(self) -> bytes:
        descriptor = ProtocolDescriptor(
            hash_ids=tuple(self._party.hashes), dh_group_ids=tuple(self._party.dh_groups)
        )
        return Negotiate(t_id=self.t_id, descriptors=(descriptor,)).build()

    def reply(self, untrusted_challenge: bytes) -> bytes:
        """The message to send after the controller's challenge."""
        try:
            return self._reply(untrusted_challenge)
        except WireError as error:
            raise self._error(FailureReason.INCORRECT_PAYLOAD, str(error)) from error
        except _FailedStepError as error:
            raise self._error(error.reason, str(error)) from error

    def conclude(self, untrusted_success: bytes) -> bytes | None:
        """What is to be sent after the controller's success, if anything; then both are authenticated."""
        try:
            return self._conclude(untrusted_success)
        except WireError as error:
            raise self._error(FailureReason.INCORRECT_PAYLOAD, str(error)) from error
        except _FailedStepError as error:
            raise self._error(error.reason, str(error)) from error

    def failure(self, reason: FailureReason) -> bytes:
        """AUTH_Failure2."""
        return Failure(auth_id=AuthId.FAILURE2, t_id=self.t_id, reason=reason).build()

    @staticmethod
    def _error(reason: FailureReason, text: str) -> AuthenticationError:
        return AuthenticationError(text, reason=reason.name.lower(), is_ours=True)

    def _expect(self, untrusted: bytes, auth_id: AuthId) -> None:
        """Raise unless it is that message of this transaction."""
        header = AuthHeader.parse(untrusted)
        if header.t_id != self.t_id:
            raise _FailedStepError(
                FailureReason.INCORRECT_PAYLOAD,
                f"T_ID: expected 0x{self.t_id:04x} as sent, got 0x{header.t_id:04x}",
            )
        if header.is_a(AuthType.COMMON, AuthId.FAILURE1):
            failure = Failure.parse(untrusted)
            reason = (
                FailureReason(failure.reason).name.lower()
                if failure.reason in list(FailureReason)
                else failure.reason_name
            )
            raise AuthenticationError(
                f"the controller refuses it ({failure.reason_name})", reason=reason, is_ours=False
            )
        if not header.is_a(AuthType.DH_HMAC_CHAP, auth_id):
            raise _FailedStepError(
                FailureReason.INCORRECT_MESSAGE,
                f"expected {auth_id.name}, got message type 0x{header.auth_type:02x} id 0x{header.auth_id:02x}",
            )

    def _reply(self, untrusted: bytes) -> bytes:
        self._expect(untrusted, AuthId.CHALLENGE)
        message = Challenge.parse(untrusted)
        if message.hash_id not in self._party.hashes:
            raise _FailedStepError(
                FailureReason.HASH_UNUSABLE, f"HashID: {HashId(message.hash_id).algorithm} was not offered"
            )
        if message.dh_group_id not in self._party.dh_groups:
            raise _FailedStepError(
                FailureReason.DH_GROUP_UNUSABLE, f"DHgID: group 0x{message.dh_group_id:02x} was not offered"
            )
        self._hash_id = HashId(message.hash_id)
        dh_value = self._exchange(DhGroupId(message.dh_group_id), message.dh_value)
        if self._credentials.controller is not None:
            self._own_challenge = self._party.randomness(self._hash_id.size_bytes)
            if hmac.compare_digest(self._own_challenge, message.challenge):
                raise _FailedStepError(FailureReason.FAILED, "the challenge is ours: no randomness here")
        return Reply(
            t_id=self.t_id,
            response=response(
                self._credentials.host.key_for(self._party.host_nqn),
                augmented(message.challenge, shared=self._shared, hash_id=self._hash_id),
                hash_id=self._hash_id,
                seqnum=message.seqnum,
                t_id=self.t_id,
                is_host=True,
                host_nqn=self._party.host_nqn,
                subnqn=self._party.subnqn,
            ),
            challenge=self._own_challenge,
            seqnum=self._seqnum,
            dh_value=dh_value,
        ).build()

    def _exchange(self, group_id: DhGroupId, untrusted_value: bytes) -> bytes:
        """Our value for the controller's; without a group there is none on either side."""
        if group_id == DhGroupId.NULL:
            if untrusted_value:
                raise _FailedStepError(FailureReason.INCORRECT_PAYLOAD, "DHVLEN: expected 0 without a group")
            return b""
        exchange = DhExchange(group_id, randomness=self._party.randomness)
        try:
            self._shared = exchange.shared(untrusted_value)
        except DhValueError as error:
            raise _FailedStepError(FailureReason.INCORRECT_PAYLOAD, f"DHV: {error}") from error
        return exchange.public

    def _conclude(self, untrusted: bytes) -> bytes | None:
        self._expect(untrusted, AuthId.SUCCESS1)
        message = Success1.parse(untrusted, hash_size_bytes=self._hash_id.size_bytes)
        secret, challenge = self._credentials.controller, self._own_challenge
        if secret is None or challenge is None:
            return None
        if message.response is None:
            raise _FailedStepError(FailureReason.FAILED, "RVALID: expected 1, got 0: no response of its own")
        expected = response(
            secret.key_for(self._party.subnqn),
            augmented(challenge, shared=self._shared, hash_id=self._hash_id),
            hash_id=self._hash_id,
            seqnum=self._seqnum,
            t_id=self.t_id,
            is_host=False,
            host_nqn=self._party.host_nqn,
            subnqn=self._party.subnqn,
        )
        if not hmac.compare_digest(expected, message.response):
            raise _FailedStepError(FailureReason.FAILED, "RVAL: the controller's response is wrong")
        return Success2(t_id=self.t_id).build()


class ChapState(enum.Enum):
    """What the controller's side waits for."""

    NEGOTIATE = "AUTH_Negotiate"
    CHALLENGE_READ = "challenge to be received"
    REPLY = "DH-HMAC-CHAP_Reply"
    SUCCESS1_READ = "success to be received"
    SUCCESS2 = "DH-HMAC-CHAP_Success2"
    FAILURE1_READ = "failure to be received"


class Verdict(enum.Enum):
    """What a step means to the queue."""

    GO_ON = "go on"
    AUTHENTICATED = "authenticated"
    """From now on, until a further negotiation fails."""
    FAILED = "failed"
    """The connection is to end once what the step answers is sent."""


class OutOfTurnError(Exception):
    """There is nothing to be received now."""


class ControllerChap:
    """The controller's side of one queue, for as many authentications as the host begins on it."""

    def __init__(
        self,
        party: ChapParty,
        credentials: Callable[[], Credentials],
        *,
        seqnums: Counter,
        on_failure: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """``credentials`` is asked at each negotiation and may raise KvdevError; ``on_failure`` gets a line."""
        self._party = party
        self._ask_credentials = credentials
        self._seqnums = seqnums
        self._on_failure = on_failure
        self._reset()

    def _reset(self) -> None:
        self.state = ChapState.NEGOTIATE
        self._reason = FailureReason.FAILED
        self._t_id = 0
        self._hash_id = HashId.SHA256
        self._group_id = DhGroupId.NULL
        self._exchange: DhExchange | None = None
        self._challenge = b""
        self._seqnum = 0
        self._own_response: bytes | None = None

    @property
    def is_under_way(self) -> bool:
        return self.state is not ChapState.NEGOTIATE

    def abandon(self) -> None:
        """Forget the transaction under way, if there is one."""
        self._reset()

    def send(self, untrusted: bytes) -> Verdict:
        """A message from the host."""
        try:
            return self._send(untrusted)
        except WireError as error:
            self._fail(FailureReason.INCORRECT_PAYLOAD, str(error))
        except _FailedStepError as error:
            self._fail(error.reason, str(error))
        except KvdevError as error:
            # Our own secrets cannot be had: the host learns no more than that it failed.
            self._fail(FailureReason.FAILED, str(error))
        return Verdict.GO_ON

    def receive(self) -> tuple[bytes, Verdict]:
        """The message for the host. Raises OutOfTurnError when it is the host's turn to send."""
        if self.state is ChapState.CHALLENGE_READ:
            return self._build_challenge(), Verdict.GO_ON
        if self.state is ChapState.SUCCESS1_READ:
            message = Success1(self._t_id, self._hash_id.size_bytes, self._own_response).build()
            if self._own_response is None:
                self._reset()
                return message, Verdict.AUTHENTICATED
            self.state = ChapState.SUCCESS2
            return message, Verdict.GO_ON
        if self.state is ChapState.FAILURE1_READ:
            message = Failure(t_id=self._t_id, reason=self._reason).build()
            self._reset()
            return message, Verdict.FAILED
        raise OutOfTurnError(f"expected {self.state.value}")

    def _fail(self, reason: FailureReason, text: str) -> None:
        self._on_failure(f"{reason.name.lower().replace('_', ' ')}: {text}")
        self._reason = reason
        self.state = ChapState.FAILURE1_READ

    def _send(self, untrusted: bytes) -> Verdict:
        header = AuthHeader.parse(untrusted)
        if header.is_a(AuthType.COMMON, AuthId.NEGOTIATE) and self.state is ChapState.NEGOTIATE:
            self._t_id = header.t_id
            self._negotiate(Negotiate.parse(untrusted))
            return Verdict.GO_ON
        if self.state is ChapState.NEGOTIATE:
            # There is no transaction yet: the host shall see its own number in the failure.
            self._t_id = header.t_id
        elif header.t_id != self._t_id:
            raise _FailedStepError(
                FailureReason.INCORRECT_PAYLOAD,
                f"T_ID: expected 0x{self._t_id:04x}, got 0x{header.t_id:04x}",
            )
        if header.is_a(AuthType.COMMON, AuthId.FAILURE2) and self.is_under_way:
            failure = Failure.parse(untrusted)
            self._on_failure(f"the host says {failure.reason_name}")
            self._reset()
            return Verdict.FAILED
        if header.is_a(AuthType.DH_HMAC_CHAP, AuthId.REPLY) and self.state is ChapState.REPLY:
            self._check_reply(Reply.parse(untrusted, hash_size_bytes=self._hash_id.size_bytes))
            return Verdict.GO_ON
        if header.is_a(AuthType.DH_HMAC_CHAP, AuthId.SUCCESS2) and self.state is ChapState.SUCCESS2:
            Success2.parse(untrusted)
            self._reset()
            return Verdict.AUTHENTICATED
        raise _FailedStepError(
            FailureReason.INCORRECT_MESSAGE,
            f"expected {self.state.value}, got message type 0x{header.auth_type:02x} id 0x{header.auth_id:02x}",
        )

    def _negotiate(self, message: Negotiate) -> None:
        if message.sc_c != ScC.NONE:
            raise _FailedStepError(
                FailureReason.CONCATENATION_MISMATCH, f"SC_C: expected 0, got 0x{message.sc_c:02x}"
            )
        if not message.descriptors:
            raise _FailedStepError(FailureReason.PROTOCOL_UNUSABLE, "no DH-HMAC-CHAP among the protocols")
        offered = message.descriptors[0]
        hash_id = next((each for each in offered.hash_ids if each in self._party.hashes), None)
        if hash_id is None:
            raise _FailedStepError(FailureReason.HASH_UNUSABLE, "none of the offered hashes is allowed")
        group_id = next((each for each in offered.dh_group_ids if each in self._party.dh_groups), None)
        if group_id is None:
            raise _FailedStepError(FailureReason.DH_GROUP_UNUSABLE, "none of the offered groups is allowed")
        self._hash_id, self._group_id = HashId(hash_id), DhGroupId(group_id)
        self.state = ChapState.CHALLENGE_READ

    def _build_challenge(self) -> bytes:
        self._challenge = self._party.randomness(self._hash_id.size_bytes)
        self._seqnum = self._seqnums.next()
        dh_value = b""
        if self._group_id != DhGroupId.NULL:
            self._exchange = DhExchange(self._group_id, randomness=self._party.randomness)
            dh_value = self._exchange.public
        self.state = ChapState.REPLY
        return Challenge(
            t_id=self._t_id,
            hash_id=self._hash_id,
            dh_group_id=self._group_id,
            seqnum=self._seqnum,
            challenge=self._challenge,
            dh_value=dh_value,
        ).build()

    def _check_reply(self, message: Reply) -> None:
        shared = self._shared(message.dh_value)
        if message.challenge is not None and hmac.compare_digest(message.challenge, self._challenge):
            raise _FailedStepError(FailureReason.FAILED, "CVAL: the host's challenge is the controller's own")
        credentials = self._ask_credentials()
        expected = self._response(credentials.host, self._challenge, self._seqnum, shared, is_host=True)
        if not hmac.compare_digest(expected, message.response):
            raise _FailedStepError(FailureReason.FAILED, "RVAL: the host's response is wrong")
        self._own_response = None
        if message.challenge is not None:
            if credentials.controller is None:
                raise _FailedStepError(
                    FailureReason.FAILED,
                    "CVALID: the host asks for a response, and there is no controller secret (dhchap_ctrlr_key)",
                )
            self._own_response = self._response(
                credentials.controller, message.challenge, message.seqnum, shared, is_host=False
            )
        self.state = ChapState.SUCCESS1_READ

    def _shared(self, untrusted_value: bytes) -> bytes | None:
        if self._exchange is None:
            if untrusted_value:
                raise _FailedStepError(FailureReason.INCORRECT_PAYLOAD, "DHVLEN: expected 0 without a group")
            return None
        try:
            return self._exchange.shared(untrusted_value)
        except DhValueError as error:
            raise _FailedStepError(FailureReason.INCORRECT_PAYLOAD, f"DHV: {error}") from error

    def _response(
        self, secret: DhchapSecret, challenge: bytes, seqnum: int, shared: bytes | None, *, is_host: bool
    ) -> bytes:
        nqn = self._party.host_nqn if is_host else self._party.subnqn
        return response(
            secret.key_for(nqn),
            augmented(challenge, shared=shared, hash_id=self._hash_id),
            hash_id=self._hash_id,
            seqnum=seqnum,
            t_id=self._t_id,
            is_host=is_host,
            host_nqn=self._party.host_nqn,
            subnqn=self._party.subnqn,
        )
