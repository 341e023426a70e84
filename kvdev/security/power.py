"""Modular powers: by the machine's OpenSSL where there is one, else by Python.

OpenSSL's takes the same time for every exponent, an eighth of Python's, and does not hold the interpreter.
The only importer of libcrypto. Threads: any.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LIBRARIES = ("libcrypto.so.3",)
_POINTER_RESULTS = ("BN_bin2bn", "BN_new", "BN_CTX_new")
_FREED_BY = {"BN_bin2bn": "BN_clear_free", "BN_new": "BN_clear_free", "BN_CTX_new": "BN_CTX_free"}


def modular_power(base: int, exponent: int, modulus: int) -> int:
    """base ** exponent mod an odd modulus."""
    library = _libcrypto()
    if library is None:
        return pow(base, exponent, modulus)
    found = _openssl_power(library, base, exponent, modulus)
    return found if found is not None else pow(base, exponent, modulus)


@functools.cache
def _libcrypto() -> Any:
    """The library with the functions used here declared; None where this machine has none."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            for function in _POINTER_RESULTS:
                getattr(library, function).restype = ctypes.c_void_p
            library.BN_mod_exp_mont_consttime.argtypes = [ctypes.c_void_p] * 6
            library.BN_bn2binpad.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
            library.BN_bin2bn.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
            for function in set(_FREED_BY.values()):
                getattr(library, function).argtypes = [ctypes.c_void_p]
                getattr(library, function).restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None


def _openssl_power(library: Any, base: int, exponent: int, modulus: int) -> int | None:
    """None when OpenSSL is out of memory."""
    size = (modulus.bit_length() + 7) // 8
    made: list[tuple[str, int]] = []

    def make(function: str, *arguments: Any) -> int | None:
        pointer: int | None = getattr(library, function)(*arguments)
        if pointer:
            made.append((function, pointer))
        return pointer

    try:
        texts = [n.to_bytes(max(1, (n.bit_length() + 7) // 8), "big") for n in (base, exponent, modulus)]
        numbers = [make("BN_bin2bn", text, len(text), None) for text in texts]
        result, context = make("BN_new"), make("BN_CTX_new")
        if not all(numbers) or not result or not context:
            return None
        if not library.BN_mod_exp_mont_consttime(result, *numbers, context, None):
            return None
        out = ctypes.create_string_buffer(size)
        if library.BN_bn2binpad(result, out, size) != size:
            return None
        return int.from_bytes(out.raw, "big")
    finally:
        for function, pointer in reversed(made):
            getattr(library, _FREED_BY[function])(pointer)
