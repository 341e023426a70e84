"""Sizes and counts as people write them; the only place that converts between units.

Not here: block arithmetic of one device (``kvdev.block``).
"""

from __future__ import annotations

import re

from kvdev.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KIB": KIB,
    "M": MIB,
    "MIB": MIB,
    "G": GIB,
    "GIB": GIB,
    "T": TIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*")
"""Twenty digits are more bytes than any address has bits for; more would overflow a float further on."""


def parse_size(text: str, *, field: str) -> int:
    """Bytes of a size such as ``64KiB``, ``1.5G`` or ``4096`` (K, M, G, T are powers of 1024).

    Raises UsageError naming ``field`` when the text is no size or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).upper() not in _UNITS:
        raise UsageError(f"{field}: expected a size such as 64KiB or 1GiB, got {text!r:.80}")
    size = float(match.group(1)) * _UNITS[match.group(2).upper()]
    if size != int(size):
        raise UsageError(f"{field}: expected a whole number of bytes, got {text!r}")
    if "." not in match.group(1):
        return int(match.group(1)) * _UNITS[match.group(2).upper()]
    return int(size)


def format_size(size_bytes: float) -> str:
    """A size in the largest binary unit that keeps it at 1 or more: ``1.5 GiB``."""
    for limit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.4g} {name}"
    return f"{size_bytes:.0f} B"


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
