"""JSON values out of a byte stream that has no framing: values follow each other, newline or not.

Not here: what a value means (``client``); sockets.
Trust: bytes are ``untrusted``; raises only FramingError for bad input. The cut between two reads may
fall anywhere, inside a string escape or a UTF-8 character too: the splitter looks at ASCII bytes only
and a value is decoded when it is whole.
"""

from __future__ import annotations

import json
import re
from typing import Any

REPLY_SIZE_LIMIT_BYTES = 32 << 20
"""SPDK's send buffer never grows beyond this."""
REQUEST_SIZE_LIMIT_BYTES = 256 << 10
"""SPDK's receive buffer; a longer request makes it close the connection."""
DEPTH_LIMIT = 64
"""SPDK's parser nests no deeper, and Python's must not recurse at a peer's will."""

_OUTSIDE_STRING = re.compile(rb'["{}\[\]]')
_INSIDE_STRING = re.compile(rb'["\\]')
_NO_SPACE = re.compile(rb"[^ \t\r\n]")


class FramingError(Exception):
    """The bytes are no sequence of JSON objects and arrays, or one of them is too long or too deep."""


class DuplicateKeys(dict[str, Any]):
    """A JSON object in which a name came twice; the last value won."""


class JsonSplitter:
    """Cuts a byte stream into whole JSON objects and arrays, in time linear in the bytes fed."""

    def __init__(self, *, size_limit_bytes: int, depth_limit: int = DEPTH_LIMIT) -> None:
        self._size_limit_bytes = size_limit_bytes
        self._depth_limit = depth_limit
        self._buffer = bytearray()
        self._scan_index = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def pending_size_bytes(self) -> int:
        """Bytes of an incomplete value that are waiting for their rest."""
        return len(self._buffer)

    def feed(self, untrusted: bytes) -> list[bytes]:
        """Take bytes; return the values that are complete now, in order."""
        self._buffer += untrusted
        values: list[bytes] = []
        while self._scan():
            values.append(bytes(self._buffer[: self._scan_index]))
            del self._buffer[: self._scan_index]
            self._scan_index = 0
        if len(self._buffer) > self._size_limit_bytes:
            raise FramingError(f"a JSON value is longer than {self._size_limit_bytes} bytes")
        return values

    def _scan(self) -> bool:
        """Advance to the end of the first value; False when it is not there yet."""
        if self._depth == 0 and not self._skip_space():
            return False
        buffer = self._buffer
        while self._scan_index < len(buffer):
            if self._in_string:
                self._scan_string()
                continue
            match = _OUTSIDE_STRING.search(buffer, self._scan_index)
            if match is None:
                self._scan_index = len(buffer)
                return False
            self._scan_index = match.end()
            char = match.group()
            if char == b'"':
                self._in_string = True
            elif char in b"{[":
                self._depth += 1
                if self._depth > self._depth_limit:
                    raise FramingError(f"a JSON value nests deeper than {self._depth_limit}")
            else:
                self._depth -= 1
                if self._depth == 0:
                    self._check_size(self._scan_index)
                    return True
        return False

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._size_limit_bytes:
            raise FramingError(f"a JSON value is longer than {self._size_limit_bytes} bytes")

    def _skip_space(self) -> bool:
        """Drop white space before a value and check how the value starts."""
        match = _NO_SPACE.search(self._buffer)
        if match is None:
            self._buffer.clear()
            return False
        del self._buffer[: match.start()]
        self._scan_index = 0
        if self._buffer[0] not in b"{[":
            raise FramingError(f"expected a JSON object or array, got byte 0x{self._buffer[0]:02x}")
        return True

    def _scan_string(self) -> None:
        if self._is_escaped:
            self._is_escaped = False
            self._scan_index += 1
            return
        match = _INSIDE_STRING.search(self._buffer, self._scan_index)
        if match is None:
            self._scan_index = len(self._buffer)
            return
        self._scan_index = match.end()
        if match.group() == b'"':
            self._in_string = False
        else:
            self._is_escaped = True


def _object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    return built if len(built) == len(pairs) else DuplicateKeys(built)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def decode_value(untrusted: bytes) -> Any:
    """Parse one whole JSON value; an object with a name given twice comes as DuplicateKeys."""
    try:
        text = untrusted.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FramingError(f"invalid UTF-8 at byte {error.start} of a JSON value") from error
    try:
        return json.loads(text, object_pairs_hook=_object_from_pairs, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise FramingError(f"malformed JSON at character {error.pos}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        # A number of more digits than Python converts, a constant such as NaN.
        raise FramingError(f"malformed JSON: {type(error).__name__}") from error


def encode_value(value: Any) -> bytes:
    """One JSON value as compact UTF-8 (non-ASCII escaped). Raises ValueError or TypeError when it is none."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
