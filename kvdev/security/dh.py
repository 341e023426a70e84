"""Diffie-Hellman over the finite field groups of RFC 7919.

Spec: RFC 7919 (groups, short exponents); NVM Express Base 2.1 figure 741, 8.3.4.5.3 and 8.3.4.5.4.
Trust: the peer's value is ``untrusted``; raises only DhValueError for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvdev.security.power import modular_power
from kvdev.wire.auth import DhGroupId

GENERATOR = 2
# group: bits of the modulus, X of its formula, bits of the exponent (twice the strength, 256 at least).
_GROUPS = {
    DhGroupId.FFDHE2048: (2048, 560316, 256),
    DhGroupId.FFDHE3072: (3072, 2625351, 288),
    DhGroupId.FFDHE4096: (4096, 5736041, 336),
    DhGroupId.FFDHE6144: (6144, 15705020, 384),
    DhGroupId.FFDHE8192: (8192, 10965728, 416),
}


class DhValueError(ValueError):
    """The peer's value is none that an honest peer sends."""


@dataclass(frozen=True)
class DhGroup:
    """One group; ``size_bytes`` is what its values take, zeroes in front included."""

    modulus: int
    size_bytes: int
    exponent_bits: int


@functools.cache
def dh_group(group_id: DhGroupId) -> DhGroup:
    """The group by its identifier; not for NULL."""
    bits, addend, exponent_bits = _GROUPS[group_id]
    # RFC 7919 appendix A: p = 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1
    modulus = (1 << bits) - (1 << (bits - 64)) + ((_scaled_e(bits - 130) + addend) << 64) - 1
    return DhGroup(modulus, bits // 8, exponent_bits)


def _scaled_e(shift: int) -> int:
    """floor(2^shift e), by the series of 1/n!."""
    guard_bits = 64
    term = total = 1 << (shift + guard_bits)
    n = 0
    while term:
        n += 1
        term //= n
        total += term
    return total >> guard_bits


class DhExchange:
    """One side of one exchange: the exponent is made here and leaves only as ``public``."""

    def __init__(self, group_id: DhGroupId, *, randomness: Callable[[int], bytes] = os.urandom) -> None:
        self._group = dh_group(group_id)
        bits = self._group.exponent_bits
        # The top bit set: the exponent is as long as the specification demands.
        self._exponent = int.from_bytes(randomness(bits // 8), "big") | 1 << (bits - 1)
        public = modular_power(GENERATOR, self._exponent, self._group.modulus)
        self.public = public.to_bytes(self._group.size_bytes, "big")

    def __repr__(self) -> str:
        return f"DhExchange({self._group.size_bytes * 8} bits)"

    def shared(self, untrusted_value: bytes) -> bytes:
        """The shared secret, as long as the modulus."""
        group = self._group
        value = int.from_bytes(untrusted_value, "big")
        if len(untrusted_value) > group.size_bytes:
            raise DhValueError(f"expected at most {group.size_bytes} bytes, got {len(untrusted_value)}")
        if not 1 < value < group.modulus - 1:
            raise DhValueError("expected a value between 1 and p-1")
        return modular_power(value, self._exponent, group.modulus).to_bytes(group.size_bytes, "big")
