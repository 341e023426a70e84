"""Values of job options as fio writes them: numbers with units, percentages, ranges, lists, patterns, expressions.

Not here: which option takes which (``option``).
Trust: every text is untrusted; raises only UsageError naming the option, the value and what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvdev.errors import UsageError

TEXT_SIZE_MAX = 4096
"""Of one value: no option needs more, and an expression is read by recursion."""
NUMBER_MAX = (1 << 63) - 1
DEPTH_MAX = 32
SPLIT_COUNT_MAX = 64
"""Entries of one bssplit, as in fio."""
PERCENTILE_COUNT_MAX = 20
PATTERN_SIZE_MAX = 512

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?)")
_TIME_US = {
    "us": 1,
    "usec": 1,
    "ms": 1000,
    "msec": 1000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


@dataclass(frozen=True)
class Size:
    """Bytes, or a percentage of the device."""

    value: int
    is_percent: bool = False

    def of(self, whole: int) -> int:
        return whole * self.value // 100 if self.is_percent else self.value


def bad(option: str, text: str, expected: str) -> UsageError:
    """The error for a value that an option does not take."""
    return UsageError(f"{option}: expected {expected}, got {text!r:.120}")


def parse_size(option: str, text: str, *, kb_base: int = 1024, may_be_percent: bool = False) -> Size:
    """A size as fio reads it: ``4k`` is 4096, with ``kb_base=1000`` ``4k`` is 4000 and ``4kib`` 4096.

    With the default base ``4kib`` is 4000: fio's units are the opposite of the IEC's there.
    """
    expected = "a size such as 4k or 1g" + (", or a percentage such as 50%" if may_be_percent else "")
    text = text.strip()
    if text.startswith("("):
        return Size(int(_evaluate(option, text, lambda unit: _size_factor(unit, kb_base))))
    match = _NUMBER.match(text)
    if match is None:
        raise bad(option, text, expected)
    unit = text[match.end() :].strip().lower()
    if unit == "%" and may_be_percent:
        percent = _whole(option, match.group(), text)
        if not 0 <= percent <= 100:
            raise bad(option, text, "0% to 100%")
        return Size(percent, is_percent=True)
    factor = _size_factor(unit, kb_base)
    if factor is None:
        raise bad(option, text, expected)
    return Size(_bounded(option, text, _whole(option, match.group(), text) * factor))


def parse_bytes(option: str, text: str, *, kb_base: int = 1024) -> int:
    """A size without percentages, not negative."""
    size = parse_size(option, text, kb_base=kb_base).value
    if size < 0:
        raise bad(option, text, "a size of 0 or more")
    return size


def parse_int(option: str, text: str, *, low: int = 0, high: int = NUMBER_MAX, kb_base: int = 1024) -> int:
    """A number; fio lets every number have a unit (``numjobs=1k``)."""
    value = parse_size(option, text, kb_base=kb_base).value
    if not low <= value <= high:
        raise bad(option, text, f"{low} to {high}" if high < NUMBER_MAX else f"{low} or more")
    return value


def parse_bool(option: str, text: str) -> bool:
    """0 or 1."""
    value = text.strip()
    if not value.isdecimal() or int(value[:9]) > 1:
        raise bad(option, text, "0 or 1")
    return int(value[:9]) == 1


def parse_time_us(option: str, text: str, *, default_unit: str) -> int:
    """Microseconds of a time such as ``30``, ``10ms``, ``1m``; ``default_unit`` is that of a bare number."""
    text = text.strip()

    def factor(unit: str) -> int | None:
        return _TIME_US[default_unit] if not unit else _TIME_US.get(unit)

    if text.startswith("("):
        value = _evaluate(option, text, factor, implied=_TIME_US[default_unit])
        return _bounded(option, text, int(value))
    match = _NUMBER.match(text)
    scale = factor(text[match.end() :].strip().lower()) if match else None
    if match is None or scale is None or match.group().startswith("-"):
        raise bad(option, text, "a time such as 30s, 10ms, 500us, 1m or 2h")
    return _bounded(option, text, _whole(option, match.group(), text) * scale)


def parse_float(option: str, text: str, *, low: float, high: float) -> float:
    """A finite number within limits."""
    try:
        value = float(text)
    except ValueError:
        raise bad(option, text, "a number") from None
    if not math.isfinite(value) or not low <= value <= high:
        raise bad(option, text, f"{low:g} to {high:g}")
    return value


def split_directions(option: str, text: str) -> tuple[str | None, str | None, str | None]:
    """Read, write and trim part of ``4k``, ``4k,8k``, ``,8k`` or ``4k,8k,``; None keeps the default.

    One part is for all three; a write part without a trim part is for both; a part left empty keeps the default.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 3:
        raise bad(option, text, "at most three parts: read,write,trim")
    read: str | None = parts[0] or None
    if len(parts) == 1:
        return read, read, read
    write: str | None = parts[1] or None
    if len(parts) == 2:
        return read, write, write
    return read, write, parts[2] or None


def parse_range(option: str, text: str, *, kb_base: int = 1024) -> tuple[int, int]:
    """``LOW-HIGH`` in bytes; the two in either order."""
    low_text, dash, high_text = text.partition("-")
    if not dash:
        raise bad(option, text, "LOW-HIGH such as 1k-4k")
    low = parse_bytes(option, low_text, kb_base=kb_base)
    high = parse_bytes(option, high_text, kb_base=kb_base)
    low, high = min(low, high), max(low, high)
    if low < 1:
        raise bad(option, text, "block sizes of at least 1 byte")
    return low, high


def parse_bssplit(option: str, text: str, *, kb_base: int = 1024) -> tuple[tuple[int, int], ...]:
    """``SIZE/PERCENT:SIZE/PERCENT``: what has no percentage shares what is left of 100."""
    sizes: list[tuple[int, int | None]] = []
    for entry in text.split(":"):
        size_text, slash, percent_text = entry.partition("/")
        if not slash and ":" not in text:
            raise bad(option, text, "SIZE/PERCENT:SIZE/PERCENT such as 4k/60:64k/40")
        size = parse_int(option, size_text, low=1, kb_base=kb_base)
        percent = parse_int(option, percent_text, high=100) if percent_text.strip() else None
        sizes.append((size, percent))
    if len(sizes) > SPLIT_COUNT_MAX:
        raise bad(option, text, f"at most {SPLIT_COUNT_MAX} sizes")
    total = sum(percent for _, percent in sizes if percent is not None)
    open_count = sum(percent is None for _, percent in sizes)
    if total > 100 or (total < 100 and not open_count):
        raise bad(option, text, f"percentages that sum to 100 (they sum to {total})")
    share = (100 - total) // open_count if open_count else 0
    return tuple((size, share if percent is None else percent) for size, percent in sizes)


def parse_percentiles(option: str, text: str) -> tuple[float, ...]:
    """Up to 20 percentiles between colons, in rising order."""
    values = [parse_float(option, part, low=0.0, high=100.0) for part in text.split(":")]
    if len(values) > PERCENTILE_COUNT_MAX:
        raise bad(option, text, f"at most {PERCENTILE_COUNT_MAX} percentiles")
    return tuple(sorted(values))


def parse_cpus(option: str, text: str) -> tuple[int, ...]:
    """CPU numbers of ``0-3,8`` (commas or colons between)."""
    cpus: set[int] = set()
    for part in re.split(r"[,:]", text):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?\s*", part)
        if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
            raise bad(option, text, "CPU numbers such as 0-3,8")
        cpus.update(range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1))
    return tuple(sorted(cpus))


def parse_pattern(option: str, text: str) -> bytes:
    """Bytes of ``0xdeadbeef``, a number below 256 or more (little-endian), or ``"text"``, in any sequence.

    A ``0x`` pattern is taken digit pair by digit pair as written.
    """
    expected = 'bytes such as 0xdeadbeef, 171 or "text"'
    rest, out = text.strip(), bytearray()
    while rest:
        if rest[0] == '"':
            end = rest.find('"', 1)
            if end < 0:
                raise bad(option, text, "a closing quote")
            out += rest[1:end].encode()
            rest = rest[end + 1 :]
            continue
        if match := re.match(r"0[xX]([0-9a-fA-F]+)", rest):
            digits = match.group(1)
            out += bytes.fromhex(digits if len(digits) % 2 == 0 else "0" + digits)
        elif match := re.match(r"-?[0-9]{1,10}", rest):
            number = int(match.group())
            if not -(1 << 31) <= number < 1 << 32:
                raise bad(option, text, "numbers of 32 bits")
            if number < 0:
                number += 1 << 32
            out += number.to_bytes(max(1, (number.bit_length() + 7) // 8), "little")
        else:
            raise bad(option, text, expected)
        rest = rest[match.end() :]
    if not out or len(out) > PATTERN_SIZE_MAX:
        raise bad(option, text, f"{expected}, 1 to {PATTERN_SIZE_MAX} bytes")
    return bytes(out)


def _size_factor(unit: str, kb_base: int) -> int | None:
    """What a unit multiplies by; None if there is no such unit. ``ki`` is as ``k``: only ``kib`` changes the base."""
    if unit in ("", "b"):
        return 1
    power = _POWERS.get(unit[0])
    if power is None or unit[1:] not in ("", "b", "i", "ib"):
        return None
    base = kb_base if unit[1:] != "ib" else (1000 if kb_base == 1024 else 1024)
    return int(base**power)


def _whole(option: str, number: str, text: str) -> int:
    if "x" in number.lower():
        return int(number, 16)
    if "." in number:
        raise bad(option, text, "a whole number (write 1536 for 1.5k)")
    if len(number) > 20:
        raise bad(option, text, f"at most {NUMBER_MAX}")
    return int(number)


def _bounded(option: str, text: str, value: int) -> int:
    if abs(value) > NUMBER_MAX:
        raise bad(option, text, f"at most {NUMBER_MAX}")
    return value


# --- expressions --------------------------------------------------------------------------------


def _evaluate(option: str, text: str, factor: Callable[[str], int | None], *, implied: int = 1) -> float:
    """The value of an arithmetic expression in parentheses; units belong to the numbers in it.

    ``implied`` scales the whole when none of its numbers has a unit (times).
    """
    if len(text) > TEXT_SIZE_MAX:
        raise bad(option, text, f"at most {TEXT_SIZE_MAX} characters")
    reader = _Expression(option, text, factor)
    value = reader.sum(0)
    reader.end()
    if not reader.has_unit:
        value *= implied
    if not math.isfinite(value) or abs(value) > NUMBER_MAX:
        raise bad(option, text, f"at most {NUMBER_MAX}")
    return value


class _Expression:
    """Recursive descent over one expression: + - * / % ^ and parentheses."""

    _TOKEN = re.compile(r"\s*(?:((?:0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?))\s*([A-Za-z]*)|([-+*/%^()]))")

    def __init__(self, option: str, text: str, factor: Callable[[str], int | None]) -> None:
        self._option, self._text = option, text
        self._tokens: list[float | str] = []
        self.has_unit = False
        at = 0
        while at < len(text.rstrip()):
            match = self._TOKEN.match(text, at)
            if match is None:
                raise self._bad()
            at = match.end()
            number, unit, sign = match.groups()
            if sign:
                self._tokens.append(sign)
                continue
            scale = factor(unit.lower()) if unit else 1
            if scale is None:
                raise self._bad()
            self.has_unit = self.has_unit or bool(unit)
            plain = float(int(number, 16)) if "x" in number.lower() else float(number)
            self._tokens.append(plain * scale)
        self._at = 0

    def _bad(self) -> UsageError:
        return bad(self._option, self._text, "an expression of numbers, + - * / % ^ and parentheses")

    def _take(self, signs: str) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if isinstance(token, str) and token and token in signs:
            self._at += 1
            return token
        return ""

    def end(self) -> None:
        if self._at != len(self._tokens):
            raise self._bad()

    def sum(self, depth: int) -> float:
        if depth > DEPTH_MAX:
            raise self._bad()
        value = self._product(depth)
        while sign := self._take("+-"):
            other = self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> float:
        value = self._power(depth)
        while sign := self._take("*/%"):
            other = self._power(depth)
            if sign == "*":
                value *= other
            elif other == 0:
                raise bad(self._option, self._text, "a divisor that is not 0")
            else:
                value = value / other if sign == "/" else math.fmod(value, other)
        return value

    def _power(self, depth: int) -> float:
        base = self._atom(depth)
        if self._take("^"):
            exponent = self._power(depth + 1) if depth < DEPTH_MAX else 0.0
            try:
                result = base**exponent
            except (OverflowError, ZeroDivisionError):
                raise self._bad() from None
            if isinstance(result, complex):
                raise self._bad()
            return float(result)
        return base

    def _atom(self, depth: int) -> float:
        if self._take("-"):
            return -self._atom(depth + 1) if depth < DEPTH_MAX else 0.0
        if self._take("("):
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise self._bad()
            return value
        if self._at == len(self._tokens) or isinstance(self._tokens[self._at], str):
            raise self._bad()
        number = self._tokens[self._at]
        self._at += 1
        assert isinstance(number, float), "signs are strings"
        return number
