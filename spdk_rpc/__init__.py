"""SPDK control plane: JSON-RPC framing, client, typed methods. Standard library only.

``Client`` speaks to an ``spdk_tgt`` (or kvdev's own target) over a UNIX socket or TCP; ``SpdkRpc`` gives it
a typed method for each call that kvdev uses.
"""

from __future__ import annotations

from spdk_rpc.client import Client, parse_address
from spdk_rpc.errors import (
    RpcMethodError,
    RpcProtocolError,
    RpcStateError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUsageError,
    SpdkRpcError,
)
from spdk_rpc.methods import SpdkRpc

__all__ = [
    "Client",
    "RpcMethodError",
    "RpcProtocolError",
    "RpcStateError",
    "RpcTimeoutError",
    "RpcTransportError",
    "RpcUsageError",
    "SpdkRpc",
    "SpdkRpcError",
    "parse_address",
]
