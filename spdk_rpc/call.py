"""One call: method, parameters, and the type of its result; checked against the table before it is sent.

Not here: the signatures (``calls``); sending (``client``, ``aio``).
Trust: results are ``untrusted``; only their outer type is checked here. Raises RpcUsageError for parameters
and RpcProtocolError for results.
"""

from __future__ import annotations

import enum
import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from spdk_rpc import table
from spdk_rpc.errors import RpcProtocolError, RpcUsageError
from spdk_rpc.secrets import hide_secrets

T = TypeVar("T")


class Shape(enum.Enum):
    """The outer type of a result."""

    ANY = "anything"
    BOOLEAN = "a boolean"
    INTEGER = "an integer"
    TEXT = "a string"
    OBJECT = "an object"
    OBJECTS = "a list of objects"
    OBJECTS_OR_NULL = "a list of objects or null"
    TEXTS = "a list of strings"

    def fits(self, untrusted: Any) -> bool:
        match self:
            case Shape.ANY:
                return True
            case Shape.BOOLEAN:
                return isinstance(untrusted, bool)
            case Shape.INTEGER:
                return isinstance(untrusted, int) and not isinstance(untrusted, bool)
            case Shape.TEXT:
                return isinstance(untrusted, str)
            case Shape.OBJECT:
                return isinstance(untrusted, dict)
            case Shape.TEXTS:
                return isinstance(untrusted, list) and all(isinstance(each, str) for each in untrusted)
            case Shape.OBJECTS_OR_NULL if untrusted is None:
                return True
            case Shape.OBJECTS | Shape.OBJECTS_OR_NULL:
                return isinstance(untrusted, list) and all(isinstance(each, dict) for each in untrusted)


@dataclass(frozen=True, repr=False)
class Call(Generic[T]):
    """A call that was not sent yet; the same call may be sent any number of times."""

    method: str
    params: Mapping[str, Any]
    shape: Shape = Shape.ANY

    def result_of(self, untrusted: Any) -> T:
        """The result of the type that the method promises, or RpcProtocolError."""
        if not self.shape.fits(untrusted):
            raise RpcProtocolError(
                f"{self.method}: result: expected {self.shape.value}, got {type(untrusted).__name__}"
            )
        return cast(T, untrusted)

    def __repr__(self) -> str:
        return f"Call({self.method!r}, {hide_secrets(self.params)!r})"


def build_call(method: str, params: Mapping[str, Any], shape: Shape) -> Call[Any]:
    """A call without the parameters that are None. Raises RpcUsageError naming the parameter."""
    given = {name: value for name, value in params.items() if value is not None}
    check_params(method, given)
    return Call(method, given, shape)


def check_params(method: str, params: Mapping[str, Any]) -> None:
    """Compare parameters with the table; a method that it does not have is let through."""
    known = table.methods().get(method)
    if not isinstance(params, Mapping):
        raise RpcUsageError(f"{method}: params: expected an object")
    if known is not None:
        _check_fields(method, known.params, params)


def _check_fields(where: str, fields: tuple[table.Param, ...], given: Mapping[str, Any]) -> None:
    by_name = {each.name: each for each in fields}
    for name, value in given.items():
        field = by_name.get(name)
        if field is None:
            raise RpcUsageError(f"{where}: {name}: no such parameter")
        fault = _fault(f"{where}: {name}", field, value)
        if fault:
            shown = "" if field.is_secret else f", got {value!r}"
            raise RpcUsageError(f"{where}: {name}: expected {fault}{shown}")
    for field in fields:
        if field.is_required and field.name not in given:
            raise RpcUsageError(f"{where}: {field.name}: missing")


def _fault(where: str, field: table.Param, value: Any) -> str:
    """What was expected instead of the value; empty when it fits."""
    limit = field.element_count_limit or (64 if field.is_set else 0)
    if not limit:
        return _scalar_fault(where, field.type, value)
    if not isinstance(value, list | tuple):
        return "a list"
    if len(value) > limit:
        return f"at most {limit} elements"
    return next((fault for each in value if (fault := _scalar_fault(where, field.type, each))), "")


def _scalar_fault(where: str, kind: str, value: Any) -> str:
    if kind in table.INTEGERS:
        low, high = table.INTEGERS[kind]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_whole and low <= value <= high else f"a whole number from {low} to {high}"
    if kind == "boolean":
        return "" if isinstance(value, bool) else "true or false"
    if kind in table.enums():
        names = table.enums()[kind]
        return "" if value in names else f"one of {', '.join(names)}"
    if kind in table.objects():
        if not isinstance(value, Mapping):
            return "an object"
        _check_fields(where, table.objects()[kind], value)
        return ""
    if not isinstance(value, str):
        return "a string"
    if kind == "uuid":
        try:
            uuid_module.UUID(value)
        except ValueError:
            return "a UUID"
    return ""
