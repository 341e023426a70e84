"""DH-HMAC-CHAP on one queue after its Connect: when it must be, the messages moved, failures with their remedy.

Not here: the protocol (``kvdev.security.chap``); where secrets are kept (``kvdev.security.source``).
Spec: NVM Express Base 2.1 sections 6.1 to 6.3, 8.3.4.5, figure 748.
Trust: what the controller sends is checked before use; no secret is in a message.
Threads: one at a time for a queue; blocks no longer than the deadline, and for what the group costs
(``kvdev.security.chap``).
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Protocol

from kvdev.clock import Deadline
from kvdev.errors import AuthenticationError, ConnectionLostError, KvdevError, UnsupportedError, UsageError
from kvdev.initiator.options import ControllerOptions
from kvdev.native.queue import Completion
from kvdev.security.chap import ChapParty, Counter, Credentials, HostChap
from kvdev.security.source import read_secret
from kvdev.uri import TcpAddress
from kvdev.wire.auth import MESSAGE_SIZE_BYTES_MAX, AuthCommand, FailureReason
from kvdev.wire.fabrics import ConnectResult
from kvdev.wire.nvme import STATUS_CODE_MASK, Status, status_name

log = logging.getLogger("kvdev.initiator")

_UNSUPPORTED = {Status.INVALID_OPCODE, Status.INVALID_FIELD, Status.COMMAND_SEQUENCE_ERROR}
"""How controllers without authentication answer Authentication Send."""


class Execute(Protocol):
    """Runs one 64-byte command to its completion, whatever its status."""

    def __call__(self, sqe: bytes, *, data: Any, is_write: bool, deadline: Deadline) -> Completion: ...


class HostAuthenticator:
    """Authenticates the queues of one association; transactions and sequences are numbered over all of them."""

    def __init__(
        self, *, host_nqn: str, subnqn: str, options: ControllerOptions, address: TcpAddress
    ) -> None:
        self._host_nqn = host_nqn
        self._subnqn = subnqn
        self._options = options
        self._address = address
        self._t_ids = Counter(16)
        self._seqnums = Counter(32)

    def admit(self, execute: Execute, result: ConnectResult, *, where: str, deadline: Deadline) -> None:
        """Authenticate after a Connect, where the controller demands it or the host wants proof of it."""
        if result.authreq_ascr:
            raise UnsupportedError(
                f"{where}: connect: the subsystem {self._subnqn} demands a secure channel made of the "
                f"authentication (ASCR), which kvdev does not do; let it ask for authentication alone",
                feature="secure channel concatenation",
            )
        if result.authreq_atr and self._options.dhchap_key is None:
            raise AuthenticationError(
                f"{where}: connect: the subsystem {self._subnqn} demands authentication and this host has no "
                f"secret for it; name the secret that the target has for {self._host_nqn} with "
                f"dhchap-key=file:/PATH or --dhchap-key",
                reason="no secret",
                is_ours=True,
            )
        if result.authreq_atr or self._options.dhchap_ctrl_key is not None:
            self.run(execute, where=where, deadline=deadline)

    def run(self, execute: Execute, *, where: str, deadline: Deadline) -> None:
        """One authentication. Raises AuthenticationError; the connection is of no more use then."""
        party = ChapParty(
            self._host_nqn, self._subnqn, self._options.dhchap_digests, self._options.dhchap_dhgroups
        )
        chap = HostChap(party, self._credentials(), t_ids=self._t_ids, seqnums=self._seqnums)
        exchange = _Exchange(execute, where=where, deadline=deadline)
        try:
            exchange.send(chap.negotiate())
            exchange.send(chap.reply(exchange.receive()))
            success2 = chap.conclude(exchange.receive())
            if success2 is not None:
                exchange.send(success2)
        except AuthenticationError as error:
            if error.is_ours and error.reason in _REASONS:
                # It ends the connection; the controller shall know why, if it still listens.
                with contextlib.suppress(KvdevError):
                    exchange.send(chap.failure(FailureReason[error.reason.upper()]))
            raise AuthenticationError(
                f"{where}: authentication: {error}; {self._remedy(error)}",
                reason=error.reason,
                is_ours=error.is_ours,
            ) from error
        except ConnectionLostError as error:
            # Some targets close before their AUTH_Failure1 can be received.
            refused = AuthenticationError("", reason="failed", is_ours=False)
            raise ConnectionLostError(
                f"{error}, while this host authenticated; {self._remedy(refused)}",
                errno=error.errno or 0,
                trid=error.trid,
            ) from error
        log.info("%s: authenticated%s", where, " both ways" if success2 is not None else "")

    def _credentials(self) -> Credentials:
        """Both secrets, read now. Raises UsageError, or UnsupportedError for a keyring out of reach."""
        host, controller = self._options.dhchap_key, self._options.dhchap_ctrl_key
        if host is None:
            raise UsageError("dhchap-key: expected where the secret of this host is kept, got none")
        found = Credentials(
            host=read_secret(host, field="dhchap-key"),
            controller=read_secret(controller, field="dhchap-ctrl-key") if controller is not None else None,
        )
        if found.controller == found.host:
            raise UsageError(
                "dhchap-ctrl-key: expected another secret than dhchap-key: each proves one side; "
                "`kvdev key generate` makes one"
            )
        return found

    def _remedy(self, error: AuthenticationError) -> str:
        hashes = ", ".join(each.algorithm for each in self._options.dhchap_digests)
        groups = ", ".join(each.name.lower() for each in self._options.dhchap_dhgroups)
        has_ctrl_key = self._options.dhchap_ctrl_key is not None
        refused = f"check that dhchap-key is the secret that the target has for host {self._host_nqn}"
        if has_ctrl_key:
            refused += f", and that it has a controller secret (dhchap_ctrlr_key) for it in {self._subnqn}"
        unproven = (
            f"is it the right target at {self._address}? check that dhchap-ctrl-key is the controller secret "
            f"(dhchap_ctrlr_key) that it has for host {self._host_nqn}"
        )
        remedies = {
            "failed": unproven if error.is_ours else refused,
            "no authentication": f"give {self._subnqn} secrets for host {self._host_nqn}, or leave out "
            f"dhchap-ctrl-key",
            "hash_unusable": f"this host takes {hashes}: allow one of them on the target, or more here",
            "dh_group_unusable": f"this host takes {groups}: allow one of them on the target, or more here",
            "concatenation_mismatch": "let the target ask for authentication without a secure channel",
            "protocol_unusable": "let the target use DH-HMAC-CHAP",
        }
        return remedies.get(error.reason, f"is it an NVMe/TCP target with DH-HMAC-CHAP at {self._address}?")


_REASONS = {each.name.lower() for each in FailureReason}


class _Exchange:
    """Messages to and from the controller of one queue."""

    def __init__(self, execute: Execute, *, where: str, deadline: Deadline) -> None:
        self._execute = execute
        self._where = where
        self._deadline = deadline
        self._count = 0

    def send(self, message: bytes) -> None:
        self._run(AuthCommand(len(message), is_send=True), message)

    def receive(self) -> bytes:
        data = bytearray(MESSAGE_SIZE_BYTES_MAX)
        self._run(AuthCommand(len(data), is_send=False), data)
        return bytes(data)

    def _run(self, command: AuthCommand, data: bytes | bytearray) -> None:
        completion = self._execute(
            command.to_sqe().build(), data=data, is_write=command.is_send, deadline=self._deadline
        )
        self._count += 1
        if completion.is_success:
            return
        what = "authentication " + ("send" if command.is_send else "receive")
        code = completion.status & STATUS_CODE_MASK
        if self._count == 1 and code in _UNSUPPORTED:
            raise AuthenticationError(
                f"the controller takes no authentication ({status_name(completion.status)})",
                reason="no authentication",
                is_ours=False,
            )
        raise AuthenticationError(
            f"{what}: got {status_name(completion.status)}", reason="refused", is_ours=False
        )
