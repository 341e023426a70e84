"""Where an SPDK's RPC server listens: a UNIX socket path, or a host and a port."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any

from spdk_rpc.errors import RpcUsageError
from spdk_rpc.results import ListenAddress

# sun_path holds 108 bytes with the terminating zero.
UNIX_PATH_LIMIT_BYTES = 107
_TCP_ADDRESS = re.compile(r"(?:tcp://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^/:\[\]]+)):(?P<port>\d{1,5})")


def parse_address(address: str | os.PathLike[str], *, field: str = "RPC address") -> str | tuple[str, int]:
    """A UNIX socket path, or (host, port) for ``HOST:PORT``, ``[V6]:PORT`` and ``tcp://…``.

    Whatever contains a slash (or starts with ``unix:``) is a path. ``field`` is the place that an error names.
    """
    text = os.fspath(address)
    if text.startswith("unix:"):
        text = text[len("unix:") :]
    else:
        match = _TCP_ADDRESS.fullmatch(text)
        if match is not None:
            port = int(match["port"])
            if not 0 < port < 65536:
                raise RpcUsageError(
                    f"{field}: port: expected 1 to 65535, got {port} in {text!r}; name the port of SPDK's RPC proxy"
                )
            return match["v6"] or match["host"], port
        if "/" not in text:
            remedy = (
                f"write ./{text} for a socket in this folder" if text else "SPDK's own is /var/tmp/spdk.sock"
            )
            raise RpcUsageError(f"{field}: expected a socket path or HOST:PORT, got {text!r}; {remedy}")
    size_bytes = len(os.fsencode(text))
    if "\0" in text:
        raise RpcUsageError(
            f"{field}: expected a socket path without a NUL, got {text!r}; name SPDK's RPC socket"
        )
    if not text or size_bytes > UNIX_PATH_LIMIT_BYTES:
        raise RpcUsageError(
            f"{field}: expected a UNIX socket path of 1 to {UNIX_PATH_LIMIT_BYTES} bytes, got {size_bytes}: {text!r}; "
            f"have SPDK listen on a shorter one (-r), or name it from a nearer folder"
        )
    return text


def address_family(traddr: str | None) -> str | None:
    """ipv4 or ipv6 of a numeric address; None for what is neither (a host name, none at all)."""
    try:
        return f"ipv{ipaddress.ip_address(traddr or '').version}"
    except ValueError:
        return None


def listen_address(
    *, traddr: str, trsvcid: int | str, trtype: str = "TCP", adrfam: str | None = None
) -> ListenAddress:
    """The address of a listener; the family follows from the address."""
    address: ListenAddress = {"trtype": trtype, "traddr": traddr, "trsvcid": str(trsvcid)}
    family = adrfam if adrfam is not None else address_family(traddr)
    if family is not None:
        address["adrfam"] = family
    return address


def without_none(**fields: Any) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in fields.items() if value is not None}
