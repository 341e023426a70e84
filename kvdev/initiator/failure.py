"""What a failed connect means to an operator: the status in words, and the remedy.

Not here: faults of queue pairs (``kvdev.native.queue``); status names (``kvdev.wire.nvme``).
Spec: NVM Express Base 6.3 (Connect).
"""

from __future__ import annotations

import errno

from kvdev.errors import CommandError, ConnectError, DeadlineError, KvdevError
from kvdev.native.queue import Completion
from kvdev.uri import TcpAddress
from kvdev.wire.fabrics import InvalidParameter
from kvdev.wire.nvme import STATUS_CODE_MASK, AdminOpcode, FabricsStatus, command_error


def connect_refused(
    completion: Completion, *, where: str, subnqn: str, host_nqn: str, address: TcpAddress
) -> CommandError:
    """The error of a Connect command that completed with a status, with what to do about it."""
    return command_error(
        where,
        completion.status,
        opcode=AdminOpcode.FABRICS,
        is_admin=True,
        detail=_connect_remedy(completion, subnqn=subnqn, host_nqn=host_nqn, address=address),
    )


def is_controller_gone(completion: Completion) -> bool:
    """Whether a Connect was refused because of its CNTLID: of an I/O queue, there is no such controller any more."""
    return (
        completion.status & STATUS_CODE_MASK == FabricsStatus.CONNECT_INVALID_PARAMETERS
        and InvalidParameter.parse(completion.dw0).field == "cntlid"
    )


def _connect_remedy(completion: Completion, *, subnqn: str, host_nqn: str, address: TcpAddress) -> str:
    code = completion.status & STATUS_CODE_MASK
    if code == FabricsStatus.CONNECT_INVALID_PARAMETERS:
        parameter = InvalidParameter.parse(completion.dw0)
        remedies = {
            "subnqn": f"no subsystem {subnqn} here for this host; `kvdev discover {address}` lists the NQNs",
            "hostnqn": f"the host NQN {host_nqn} is not accepted; add it to the allow list of {subnqn}, "
            "or connect as a host on it (--host-nqn)",
            "hostid": "another host NQN uses this host id; give this host its own",
            "cntlid": "ask for any controller",
            "qid": "ask for fewer I/O queues",
            "sqsize": "ask for a smaller queue depth",
            "kato": "ask for another keep alive timeout",
            "cattr": "connect with SQ flow control",
        }
        return f"{parameter}: {remedies.get(parameter.field, 'the controller does not accept its value')}"
    remedies_by_code = {
        FabricsStatus.CONNECT_INVALID_HOST: f"add the host NQN {host_nqn} to the allow list of {subnqn}, or connect "
        "as a host on it (--host-nqn)",
        FabricsStatus.CONTROLLER_BUSY: f"{subnqn} has no free controller; try again later, or disconnect a host",
        FabricsStatus.CONNECT_RESTART_DISCOVERY: f"{subnqn} has moved; `kvdev discover {address}` tells where",
        FabricsStatus.AUTHENTICATION_REQUIRED: f"{subnqn} demands authentication; name the secret of this host "
        f"with dhchap-key=file:/PATH",
        FabricsStatus.INCOMPATIBLE_FORMAT: "the controller speaks another record format",
    }
    return remedies_by_code.get(FabricsStatus(code), "") if code in list(FabricsStatus) else ""


def with_remedy(error: KvdevError, *, address: TcpAddress) -> KvdevError:
    """The same failure of a connection being made, saying what to check."""
    if isinstance(error, DeadlineError):
        return DeadlineError(
            f"{error}; check that an NVMe/TCP target answers at {address} and that no firewall drops it",
            operation=error.operation,
            elapsed_ms=error.elapsed_ms,
            trid=error.trid,
        )
    if isinstance(error, ConnectError):
        number = error.errno or 0
        unlike = f"is it an NVMe/TCP target that listens on {address}? if it demands TLS, name the key with tls-psk="
        remedies = {
            errno.ECONNREFUSED: f"is the target listening on {address}?",
            errno.EHOSTUNREACH: f"check the address {address} and the route to it",
            errno.ENETUNREACH: f"check the address {address} and the route to it",
            errno.ECONNRESET: unlike,
            errno.ENOTCONN: unlike,
        }
        if number in remedies:
            return ConnectError(f"{error}; {remedies[number]}", errno=number, trid=error.trid)
    return error
