"""Structures at fixed offsets: dataclass fields that know their place, one parser and one builder for all.

Not here: what the bytes mean (the other modules of this package).
Trust: arguments named ``untrusted`` come from a peer; a parser raises only WireError for bad input,
a builder UsageError for a value that does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

from kvdev.errors import ProtocolError, UsageError

NQN_BYTES_MAX = 223
"""Longest NQN without its NUL (Base 4.7)."""


class WireError(ProtocolError):
    """Bytes from a peer do not form the structure they should; says which field at which offset."""

    def __init__(self, message: str, *, field: str, field_offset: int) -> None:
        super().__init__(message)
        self.field = field
        self.field_offset = field_offset


_S = TypeVar("_S", bound="WireStruct")
_B = TypeVar("_B", bound="BitStruct")


def uint(offset: int, size: int, default: int = 0) -> Any:
    """A little-endian unsigned integer of ``size`` bytes."""
    return dataclasses.field(default=default, metadata={"at": (offset, size, "uint")})


def u8(offset: int, default: int = 0) -> Any:
    return uint(offset, 1, default)


def u16(offset: int, default: int = 0) -> Any:
    return uint(offset, 2, default)


def u32(offset: int, default: int = 0) -> Any:
    return uint(offset, 4, default)


def u64(offset: int, default: int = 0) -> Any:
    return uint(offset, 8, default)


def raw(offset: int, size: int) -> Any:
    """Exactly ``size`` bytes."""
    return dataclasses.field(default=bytes(size), metadata={"at": (offset, size, "raw")})


def padded(offset: int, size: int, default: str = "") -> Any:
    """ASCII padded with spaces (serial number, transport address); NUL padding is accepted on receive."""
    return dataclasses.field(default=default, metadata={"at": (offset, size, "padded")})


def nqn(offset: int, size: int = 256, default: str = "") -> Any:
    """A NUL-terminated UTF-8 name of at most 223 bytes."""
    return dataclasses.field(default=default, metadata={"at": (offset, size, "nqn")})


def _parse_field(owner: str, name: str, kind: str, untrusted: bytes, offset: int) -> int | str | bytes:
    if kind == "uint":
        return int.from_bytes(untrusted, "little")
    if kind == "padded":
        return untrusted.decode("ascii", "replace").rstrip(" \0").lstrip(" ")
    if kind == "nqn":
        text, nul, _ = untrusted.partition(b"\0")
        if not nul or len(text) > NQN_BYTES_MAX:
            raise WireError(
                f"{owner} {name}+{offset:#x}: expected a NUL within {NQN_BYTES_MAX + 1} bytes, "
                f"got {len(text)} bytes without one",
                field=name,
                field_offset=offset,
            )
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WireError(
                f"{owner} {name}+{offset:#x}: expected UTF-8, got byte {text[error.start]:#04x}",
                field=name,
                field_offset=offset + error.start,
            ) from error
    return bytes(untrusted)


def _build_field(owner: str, name: str, kind: str, value: Any, size: int) -> bytes:
    if kind == "uint":
        if not isinstance(value, int) or not 0 <= value < 1 << (8 * size):
            raise UsageError(f"{owner} {name}: expected an integer of {size} bytes, got {value!r}")
        return int(value).to_bytes(size, "little")
    if kind == "padded":
        if not isinstance(value, str) or not value.isascii() or len(value) > size:
            raise UsageError(f"{owner} {name}: expected at most {size} ASCII characters, got {value!r}")
        return value.encode().ljust(size)
    if kind == "nqn":
        text = value.encode() if isinstance(value, str) else b""
        if not isinstance(value, str) or len(text) > NQN_BYTES_MAX or b"\0" in text:
            raise UsageError(
                f"{owner} {name}: expected a name of at most {NQN_BYTES_MAX} bytes, got {value!r}"
            )
        return text.ljust(size, b"\0")
    if len(value) != size:
        raise UsageError(f"{owner} {name}: expected {size} bytes, got {len(value)}")
    return bytes(value)


class WireStruct:
    """Base of dataclasses whose fields were made by ``u8`` ... ``nqn``; reserved bytes are built as zero
    and ignored when parsed."""

    SIZE: ClassVar[int]

    @classmethod
    def parse(cls: type[_S], untrusted: bytes | bytearray | memoryview) -> _S:
        """Read the structure from its first SIZE bytes; more are ignored."""
        owner = cls.__name__
        if len(untrusted) < cls.SIZE:
            raise WireError(
                f"{owner}: expected {cls.SIZE} bytes, got {len(untrusted)}",
                field=owner,
                field_offset=len(untrusted),
            )
        data = bytes(untrusted[: cls.SIZE])
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if "at" in field.metadata:
                offset, size, kind = field.metadata["at"]
                values[field.name] = _parse_field(
                    owner, field.name, kind, data[offset : offset + size], offset
                )
        values.update(cls._parse_rest(data))
        return cls(**values)

    @classmethod
    def _parse_rest(cls, untrusted: bytes) -> dict[str, Any]:  # noqa: ARG003 (for the classes that have arrays)
        """Fields that have no single place: arrays."""
        return {}

    def build(self) -> bytes:
        """The SIZE bytes of this structure; UsageError names a field whose value does not fit."""
        owner = type(self).__name__
        out = bytearray(self.SIZE)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "at" in field.metadata:
                offset, size, kind = field.metadata["at"]
                out[offset : offset + size] = _build_field(
                    owner, field.name, kind, getattr(self, field.name), size
                )
        self._build_rest(out)
        return bytes(out)

    def _build_rest(self, out: bytearray) -> None:
        """Put the fields of ``_parse_rest`` into ``out``."""


def bits(low: int, high: int | None = None, default: int = 0) -> Any:
    """Bits ``high``:``low`` of a register, both included."""
    return dataclasses.field(
        default=default, metadata={"bits": (low, (low if high is None else high) - low + 1)}
    )


class BitStruct:
    """Base of dataclasses that are the fields of one integer."""

    BYTES: ClassVar[int] = 4

    @classmethod
    def parse(cls: type[_B], untrusted_value: int) -> _B:
        values = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            low, width = field.metadata["bits"]
            values[field.name] = (untrusted_value >> low) & ((1 << width) - 1)
        return cls(**values)

    def build(self) -> int:
        value = 0
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            low, width = field.metadata["bits"]
            item = getattr(self, field.name)
            if not 0 <= item < 1 << width:
                raise UsageError(f"{type(self).__name__} {field.name}: expected {width} bits, got {item}")
            value |= int(item) << low
        return value


def parse_u32_list(untrusted: bytes | bytearray | memoryview, *, count_max: int) -> list[int]:
    """Little-endian dwords up to the first zero."""
    data = bytes(untrusted[: count_max * 4])
    found = []
    for at in range(0, len(data) - 3, 4):
        value = int.from_bytes(data[at : at + 4], "little")
        if value == 0:
            break
        found.append(value)
    return found
