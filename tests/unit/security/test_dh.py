"""The groups of RFC 7919: their primes, what is shared, and values that an honest peer does not send."""

from __future__ import annotations

import random

import pytest

from kvdev.security import power
from kvdev.security.dh import DhExchange, DhValueError, dh_group
from kvdev.wire.auth import DhGroupId

GROUPS = [each for each in DhGroupId if each != DhGroupId.NULL]
# The last 64 bits but one of each prime, as RFC 7919 appendix A prints them.
TAILS = {
    DhGroupId.FFDHE2048: "886B423861285C97",
    DhGroupId.FFDHE3072: "25E41D2B66C62E37",
    DhGroupId.FFDHE4096: "C68A007E5E655F6A",
    DhGroupId.FFDHE6144: "A40E329CD0E40E65",
    DhGroupId.FFDHE8192: "D68C8BB7C5C6424C",
}


def is_probably_prime(n: int, rounds: int = 2) -> bool:
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    draws = random.Random(7919)
    for _ in range(rounds):
        x = power.modular_power(draws.randrange(2, n - 1), odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


@pytest.mark.parametrize("group_id", GROUPS)
def test_prime_has_the_digits_that_the_rfc_prints(group_id: DhGroupId) -> None:
    group = dh_group(group_id)
    digits = f"{group.modulus:X}"
    assert len(digits) == 2 * group.size_bytes == int(group_id.name[5:]) // 4
    assert digits.startswith("FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1")
    assert digits.endswith(TAILS[group_id] + "FFFFFFFFFFFFFFFF")
    assert group.exponent_bits >= 256


@pytest.mark.parametrize("group_id", GROUPS[:2])
def test_prime_is_a_safe_prime(group_id: DhGroupId) -> None:
    modulus = dh_group(group_id).modulus
    assert is_probably_prime(modulus) and is_probably_prime(modulus // 2)


@pytest.mark.parametrize("group_id", GROUPS)
def test_exchange_when_both_sides_are_honest_then_they_share(group_id: DhGroupId) -> None:
    ours, theirs = DhExchange(group_id), DhExchange(group_id)
    size = dh_group(group_id).size_bytes
    assert len(ours.public) == len(theirs.public) == size
    assert ours.public != theirs.public
    shared = ours.shared(theirs.public)
    assert shared == theirs.shared(ours.public) and len(shared) == size
    assert str(int.from_bytes(shared, "big")) not in repr(ours)


def test_shared_when_value_is_short_then_padded_to_the_modulus() -> None:
    exchange = DhExchange(DhGroupId.FFDHE2048)
    assert exchange.shared(b"\2") == exchange.public


@pytest.mark.parametrize("value", [0, 1, -1, 0x10])
def test_shared_when_value_is_no_group_element_then_refused(value: int) -> None:
    group = dh_group(DhGroupId.FFDHE2048)
    bad = {-1: group.modulus - 1, 0x10: group.modulus + 2}.get(value, value)
    with pytest.raises(DhValueError, match="between 1 and p-1"):
        DhExchange(DhGroupId.FFDHE2048).shared(bad.to_bytes(group.size_bytes, "big"))


@pytest.mark.parametrize("size", [0, 257, 1024])
def test_shared_when_size_is_wrong_then_refused(size: int) -> None:
    with pytest.raises(DhValueError):
        DhExchange(DhGroupId.FFDHE2048).shared(b"\7" * size)


def test_power_of_openssl_is_the_power_of_python() -> None:
    library = power._libcrypto()
    if library is None:
        pytest.skip("this machine has no libcrypto.so.3")
    draws = random.Random(1)
    for bits in (64, 1024, 2048):
        for _ in range(5):
            modulus = draws.getrandbits(bits) | 1 << (bits - 1) | 1
            base, exponent = draws.randrange(modulus), draws.getrandbits(256)
            assert power._openssl_power(library, base, exponent, modulus) == pow(base, exponent, modulus)
    assert power._openssl_power(library, 0, 5, 9) == 0
    assert power._openssl_power(library, 5, 0, 9) == 1
