"""How a row of the table of RPC methods looks: the handler, its parameters, and how SPDK refuses wrong ones.

Not here: the rows (``rpc_methods``, ``rpc_stack``, ``rpc_host``); the types of parameters (``rpc_params``).
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdev.target import rpc_params as p
from kvdev.target.model import NULL_UUID
from spdk_rpc.errors import ERROR_INTERNAL, ERROR_INVALID_PARAMS, ERROR_PARSE

Result = Any
Handler = Callable[..., "Result | Awaitable[Result]"]

TICK_RATE_HZ = 1_000_000_000
"""Ticks in results are nanoseconds."""


@dataclass(frozen=True)
class Method:
    """How one method is called. ``fields`` None: it takes no parameters, and says ``no_params_text``."""

    handler: Handler
    fields: Mapping[str, p.Field] | None = field(default_factory=dict)
    no_params_text: str = ""
    refusal_code: int = ERROR_INTERNAL
    refusal_text: str = "spdk_json_decode_object failed"
    is_relaxed: bool = False


def nvmf(handler: Handler, fields: Mapping[str, p.Field], *, is_relaxed: bool = False) -> Method:
    return Method(
        handler,
        fields,
        refusal_code=ERROR_INVALID_PARAMS,
        refusal_text="Invalid parameters",
        is_relaxed=is_relaxed,
    )


def raid_row(handler: Handler, fields: Mapping[str, p.Field]) -> Method:
    return Method(handler, fields, refusal_code=ERROR_PARSE)


def no_params(handler: Handler, text: str) -> Method:
    return Method(handler, None, no_params_text=text)


def flat(handler: Handler, fields: Mapping[str, p.Field], text: str = "Invalid parameters") -> Method:
    """A method that answers every refusal with -32602."""
    return Method(handler, fields, refusal_code=ERROR_INVALID_PARAMS, refusal_text=text)


def true_after(change: Callable[..., None], **renamed: str) -> Handler:
    """A handler that makes a change and answers true; ``renamed``: SPDK's name of a parameter to the change's."""

    def handler(**arguments: Any) -> Result:
        change(**{renamed.get(name, name): value for name, value in arguments.items()})
        return True

    return handler


def given(uuid: uuid_module.UUID | None) -> uuid_module.UUID | None:
    """An all-zero UUID asks for a new one, as in SPDK."""
    return None if uuid == NULL_UUID else uuid
