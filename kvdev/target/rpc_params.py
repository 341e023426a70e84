"""Decoding of RPC parameters: SPDK's types, and one refusal that names the field.

Not here: the methods (``rpc_methods``).
Trust: parameters are ``untrusted``; raises only ParamsError.
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spdk_rpc import table
from spdk_rpc.framing import DuplicateKeys

ARRAY_SIZE_LIMIT = 1024
"""Elements of an array parameter; SPDK's own limits are below this."""


class ParamsError(Exception):
    """A parameter is missing, unknown, of a wrong type or out of range; the text names it."""


Decoder = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Field:
    """One parameter: how it is decoded and whether it must be there."""

    decode: Decoder
    is_required: bool = False


def required(decode: Decoder) -> Field:
    return Field(decode, is_required=True)


def optional(decode: Decoder) -> Field:
    return Field(decode)


def decode_object(
    fields: Mapping[str, Field], untrusted: Any, *, path: str = "", is_relaxed: bool = False
) -> dict[str, Any]:
    """Decode an object into the fields that were given; ``is_relaxed`` skips unknown names."""
    place = path.removesuffix(".") or "params"
    if not isinstance(untrusted, dict):
        raise ParamsError(f"{place}: expected an object, got {_type_name(untrusted)}")
    if isinstance(untrusted, DuplicateKeys):
        raise ParamsError(f"{place}: a name is given twice")
    decoded: dict[str, Any] = {}
    for name, value in untrusted.items():
        if name in fields:
            decoded[name] = fields[name].decode(f"{path}{name}", value)
        elif not is_relaxed:
            raise ParamsError(f"{path}{name}: unknown parameter")
    for name, spec in fields.items():
        if spec.is_required and name not in decoded:
            raise ParamsError(f"{path}{name}: missing")
    return decoded


def nested(fields: Mapping[str, Field]) -> Decoder:
    """A decoder for an object parameter."""
    return lambda path, value: decode_object(fields, value, path=f"{path}.")


def text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ParamsError(f"{path}: expected a string, got {_type_name(value)}")
    # A lone surrogate is no character and a NUL ends a C string: neither can be a name.
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ParamsError(f"{path}: expected a string of Unicode characters without NUL")
    return value


def boolean(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParamsError(f"{path}: expected true or false, got {_type_name(value)}")
    return value


def integer(low: int, high: int) -> Decoder:
    """A decoder for a whole number; 16.0 and 1e3 count as whole, as in SPDK."""

    def decode(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ParamsError(f"{path}: expected a number, got {_type_name(value)}")
        if isinstance(value, float) and not value.is_integer():
            raise ParamsError(f"{path}: expected a whole number, got {value}")
        number = int(value)
        if not low <= number <= high:
            raise ParamsError(f"{path}: expected {low} to {high}, got {number}")
        return number

    return decode


uint8 = integer(0, 0xFF)
uint16 = integer(0, 0xFFFF)
uint32 = integer(0, 0xFFFFFFFF)
uint64 = integer(0, 0xFFFFFFFFFFFFFFFF)
int32 = integer(-(1 << 31), (1 << 31) - 1)


def uuid(path: str, value: Any) -> uuid_module.UUID:
    written = text(path, value)
    try:
        if len(written) != 36:
            raise ValueError("length")
        return uuid_module.UUID(written)
    except ValueError:
        raise ParamsError(f"{path}: expected a UUID of 36 characters, got {written!r}") from None


def hex_bytes(size_bytes: int) -> Decoder:
    """A decoder for exactly that many bytes as hex digits without separators."""

    def decode(path: str, value: Any) -> bytes:
        written = text(path, value)
        try:
            if len(written) != 2 * size_bytes or not written.isalnum():
                raise ValueError("length")
            return bytes.fromhex(written)
        except ValueError:
            raise ParamsError(f"{path}: expected {2 * size_bytes} hex digits, got {written!r}") from None

    return decode


def one_of(*names: str) -> Decoder:
    def decode(path: str, value: Any) -> str:
        written = text(path, value)
        if written not in names:
            raise ParamsError(f"{path}: expected one of {', '.join(names)}, got {written!r}")
        return written

    return decode


def array_of(decode_element: Decoder, *, size_limit: int = ARRAY_SIZE_LIMIT) -> Decoder:
    def decode(path: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ParamsError(f"{path}: expected an array, got {_type_name(value)}")
        if len(value) > size_limit:
            raise ParamsError(f"{path}: expected at most {size_limit} elements, got {len(value)}")
        return [decode_element(f"{path}[{index}]", element) for index, element in enumerate(value)]

    return decode


def secret(path: str, value: Any) -> str:
    """A string whose value may not appear in any message."""
    if not isinstance(value, str):
        raise ParamsError(f"{path}: expected a string")
    return value


def fields_of(method: str) -> dict[str, Field]:
    """The parameters of a method as SPDK's table has them."""
    return {each.name: _field(each) for each in table.methods()[method].params}


def _field(param: table.Param) -> Field:
    decode = secret if param.is_secret else _decoder(param.type)
    if param.element_count_limit or param.is_set:
        decode = array_of(decode, size_limit=param.element_count_limit or ARRAY_SIZE_LIMIT)
    return Field(decode, is_required=param.is_required)


def _decoder(kind: str) -> Decoder:
    if kind in table.enums():
        return one_of(*table.enums()[kind])
    if kind in table.objects():
        return nested({each.name: _field(each) for each in table.objects()[kind]})
    scalars: dict[str, Decoder] = {
        "string": text,
        "boolean": boolean,
        "uuid": uuid,
        "uint8": uint8,
        "uint16": uint16,
        "uint32": uint32,
        "uint64": uint64,
        "int32": int32,
    }
    return scalars[kind]


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, DuplicateKeys):
        return "an object"
    return names.get(type(value), "a number")
