"""Conversion to and from fp8, the compiled loops; same values as ``kvdev_kernels.fp8``, which defines them.

Rounding is arithmetic on the bits of a float32: of normal numbers 20 bits are rounded off, and below the smallest
normal number an addition leaves exactly the bits wanted.
Not here: checks. Numba's cache keeps what was compiled.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# A decorator whose types differ between Numba's releases.
njit: Any = numba.njit

OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def _quantize(
    bits: Any, codes: Any, scales: Any, is_half: Any, bias: Any, largest: Any, nan_code: Any
) -> None:
    buffer = np.empty(bits.shape[3], np.float32)
    words = buffer.view(np.uint32)
    smallest_normal = np.uint32((128 - bias) << 23)
    # The bits of 2^(23 + 1 - bias - 3): next to it float32 numbers are one subnormal step apart.
    magic = np.uint32((127 + 21 - bias) << 23)
    magic_value = np.float32(2.0 ** (21 - bias))
    drops_zero_sign = nan_code == 0x80
    for plane in range(bits.shape[0]):
        for token in range(bits.shape[1]):
            for head in range(bits.shape[2]):
                scale = scales[plane, head]
                for i in range(bits.shape[3]):
                    word = np.uint32(bits[plane, token, head, i])
                    if is_half:
                        # Exponents of fp16 are 112 lower; a multiplication sets that right for its subnormals too.
                        words[i] = (word & np.uint32(0x7FFF)) << np.uint32(13)
                        if word & np.uint32(0x7C00) == np.uint32(0x7C00):
                            words[i] |= np.uint32(0x7F800000)
                        else:
                            buffer[i] *= np.float32(2.0**112)
                        words[i] |= (word & np.uint32(0x8000)) << np.uint32(16)
                    else:
                        words[i] = word << np.uint32(16)
                for i in range(bits.shape[3]):
                    buffer[i] /= scale
                for i in range(bits.shape[3]):
                    sign = (words[i] >> np.uint32(24)) & np.uint32(0x80)
                    words[i] &= np.uint32(0x7FFFFFFF)
                    if words[i] > np.uint32(0x7F800000):
                        codes[plane, token, head, i] = np.uint8(nan_code)
                        continue
                    buffer[i] = min(buffer[i], largest)
                    if words[i] >= smallest_normal:
                        word = words[i] + np.uint32(0x7FFFF) + ((words[i] >> np.uint32(20)) & np.uint32(1))
                        code = (word >> np.uint32(20)) - np.uint32((127 - bias) << 3)
                    else:
                        buffer[i] += magic_value
                        code = words[i] - magic
                    if code == np.uint32(0) and drops_zero_sign:
                        sign = np.uint32(0)
                    codes[plane, token, head, i] = np.uint8(code | sign)


def _dequantize(codes: Any, bits: Any, tables: Any) -> None:
    for plane in range(codes.shape[0]):
        for token in range(codes.shape[1]):
            for head in range(codes.shape[2]):
                for i in range(codes.shape[3]):
                    bits[plane, token, head, i] = tables[plane, head, codes[plane, token, head, i]]


quantize: Any = njit(**OPTIONS)(_quantize)
dequantize: Any = njit(**OPTIONS)(_dequantize)
