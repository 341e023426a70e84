"""SPDK control plane: JSON-RPC framing, clients, typed methods. Standard library only.

``Client`` speaks to an ``spdk_tgt`` (or kvdev's own target) over a UNIX socket or TCP, ``SpdkRpc`` gives it a
typed method for each call of the table; ``AsyncClient`` and ``AsyncSpdkRpc`` do the same under asyncio.
"""

from __future__ import annotations

from spdk_rpc.address import parse_address
from spdk_rpc.aio import AsyncClient
from spdk_rpc.call import Call
from spdk_rpc.client import Client
from spdk_rpc.errors import (
    RpcMethodError,
    RpcProtocolError,
    RpcStateError,
    RpcTimeoutError,
    RpcTransportError,
    RpcUnsupportedError,
    RpcUsageError,
    SpdkRpcError,
)
from spdk_rpc.methods import AsyncSpdkRpc, SpdkRpc
from spdk_rpc.protocol import PeerInfo

__all__ = [
    "AsyncClient",
    "AsyncSpdkRpc",
    "Call",
    "Client",
    "PeerInfo",
    "RpcMethodError",
    "RpcProtocolError",
    "RpcStateError",
    "RpcTimeoutError",
    "RpcTransportError",
    "RpcUnsupportedError",
    "RpcUsageError",
    "SpdkRpc",
    "SpdkRpcError",
    "parse_address",
]
