"""CRC32C in Python: the oracle of the C core's, for the few bytes this package builds itself.

Not here: the fast one (``kvdev.native.crc``).
"""

from __future__ import annotations

POLYNOMIAL = 0x82F63B78


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        reg = byte
        for _ in range(8):
            reg = (reg >> 1) ^ POLYNOMIAL if reg & 1 else reg >> 1
        table.append(reg)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """CRC32C of ``data`` after bytes whose CRC is ``crc``."""
    reg = crc ^ 0xFFFFFFFF
    for byte in bytes(data):
        reg = _TABLE[(reg ^ byte) & 0xFF] ^ (reg >> 8)
    return reg ^ 0xFFFFFFFF
