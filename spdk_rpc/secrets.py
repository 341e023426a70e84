"""Keep secrets out of messages, logs and reprs: they are known by the names of their parameters.

Not here: which names these are (``table``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spdk_rpc.table import SECRET_NAMES

HIDDEN = "***"


def hide_secrets(params: Any) -> Any:
    """A copy of parameters in which each secret is stars."""
    if isinstance(params, Mapping):
        return {
            name: HIDDEN if name in SECRET_NAMES else hide_secrets(value) for name, value in params.items()
        }
    if isinstance(params, list | tuple):
        return [hide_secrets(each) for each in params]
    return params


def without_secrets(message: str, params: Any) -> str:
    """A peer's message in which the secrets that were sent to it are stars."""
    for value in sorted(set(_secrets_in(params)), key=len, reverse=True):
        message = message.replace(value, HIDDEN)
    return message


def _secrets_in(params: Any) -> Iterator[str]:
    if isinstance(params, Mapping):
        for name, value in params.items():
            if name in SECRET_NAMES and isinstance(value, str):
                if value:
                    yield value
            else:
                yield from _secrets_in(value)
    elif isinstance(params, list | tuple):
        for each in params:
            yield from _secrets_in(each)
