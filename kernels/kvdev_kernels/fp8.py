"""Conversion of pages between 16-bit elements and fp8, with a scale per layer, plane and KV head; both ways.

An element x of a head with scale s is stored as the fp8 number nearest to x / s: ties to even, beyond the largest
number the largest, not-a-number as such. So for |x| <= largest x s the stored value differs from x by at most
max(|x| / 16, s x ``STEP_MIN[dtype]`` / 2), besides one rounding to 24 bits and, where it is read back, one to the
engine's type. bf16 and fp16 have 8 and 11 bits of precision, fp8_e4m3 has 4.
Not here: moving pages (``kvdev_kernels.dispatch``); the compiled loops (``kvdev_kernels.fp8_code``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.geometry import Geometry
from kvdev_kernels.errors import ShapeError

Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32]

LARGEST = {"fp8_e4m3": 448.0, "fp8_e4m3fnuz": 240.0}
"""Largest number of each encoding: OCP's, and that of AMD gfx940 to gfx942."""
EXPONENT_BIAS = {"fp8_e4m3": 7, "fp8_e4m3fnuz": 8}
NAN_CODE = {"fp8_e4m3": 0x7F, "fp8_e4m3fnuz": 0x80}
STEP_MIN = {"fp8_e4m3": 2.0**-9, "fp8_e4m3fnuz": 2.0**-10}
"""Distance between neighbouring numbers around zero."""


def fp8_geometry(geometry: Geometry, dtype: str) -> Geometry:
    """The geometry of the pages that pages of ``geometry`` are converted to."""
    if dtype not in LARGEST:
        raise ShapeError("dtype", expected="one of " + ", ".join(LARGEST), got=repr(dtype))
    if geometry.dtype not in ("bf16", "fp16"):
        raise ShapeError("geometry: dtype", expected="bf16 or fp16 to be made into fp8", got=geometry.dtype)
    return dataclasses.replace(geometry, dtype=dtype)


def check_scales(geometry: Geometry, scales: npt.ArrayLike) -> Scales:
    """Scales as (layer, plane, KV head) float32; ShapeError names what does not fit."""
    factors = np.asarray(scales)
    shape = (geometry.layer_count, geometry.planes_per_layer, geometry.kv_head_count)
    if factors.shape != shape or not np.issubdtype(factors.dtype, np.floating):
        raise ShapeError(
            "scales", expected=f"{shape} floating point numbers", got=f"{factors.shape} {factors.dtype}"
        )
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.ascontiguousarray(factors, dtype=np.float32)
    is_wrong = ~(np.isfinite(narrow) & (narrow >= np.finfo(np.float32).tiny))
    if is_wrong.any():
        at = tuple(int(index) for index in np.argwhere(is_wrong)[0])
        raise ShapeError(f"scales[{at}]", expected="a positive number of 32 bits", got=float(factors[at]))
    return narrow


def scales_for(pages: npt.NDArray[np.uint8], geometry: Geometry, dtype: str) -> Scales:
    """Scales that map the largest magnitude of each head in these pages to the largest fp8 number."""
    fp8_geometry(geometry, dtype)
    values = np.abs(_to_float(pages.view(np.uint16), geometry.dtype)).reshape(-1, *geometry.page_shape)
    largest = np.where(np.isfinite(values), values, 0).max(axis=(0, 3, 5), initial=0)
    scales: Scales = np.asarray(largest / np.float32(LARGEST[dtype]), np.float32)
    scales[scales < np.finfo(np.float32).tiny] = np.finfo(np.float32).tiny
    return scales


@functools.lru_cache
def decode_table(dtype: str) -> npt.NDArray[np.float32]:
    """What each of the 256 codes means, from the definition of the encoding."""
    table = np.empty(256, np.float32)
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        if exponent:
            value = (1 + fraction / 8) * 2.0 ** (exponent - EXPONENT_BIAS[dtype])
        else:
            value = fraction / 8 * 2.0 ** (1 - EXPONENT_BIAS[dtype])
        table[code] = -value if code & 0x80 else value
    nan = NAN_CODE[dtype]
    table[[nan, nan | 0x80]] = np.nan
    table.flags.writeable = False
    return table


def _to_float(bits: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _from_float(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint16]:
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def encode(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """The code nearest to each value by search in the table: the oracle of the compiled loop."""
    nan = NAN_CODE[dtype]
    last = 0x7E if dtype == "fp8_e4m3" else 0x7F
    positive = decode_table(dtype)[: last + 1].astype(np.float64)
    magnitude = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(positive, magnitude), 1, last)
    low, high = magnitude - positive[above - 1], positive[above] - magnitude
    takes_low = (low < high) | ((low == high) & (above % 2 == 1))
    code = np.where(takes_low, above - 1, above).astype(np.uint8)
    sign = np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
    if dtype == "fp8_e4m3fnuz":
        sign[code == 0] = 0
    return np.where(np.isnan(values), np.uint8(nan), code | sign)


def quantize(
    source: Bytes, target: Bytes, geometry: Geometry, dtype: str, scales: Scales, *, is_compiled: bool
) -> None:
    """Canonical bytes of one page of 16-bit elements into those of its fp8 page."""
    if is_compiled:
        loops = _loops()
        bits = source.view(np.uint16).reshape(-1, *geometry.page_shape[2:])
        codes = target.reshape(bits.shape)
        bias, largest = EXPONENT_BIAS[dtype], np.float32(LARGEST[dtype])
        loops.quantize(
            bits,
            codes,
            scales.reshape(len(bits), -1),
            geometry.dtype == "fp16",
            bias,
            largest,
            NAN_CODE[dtype],
        )
        return
    values = _to_float(source.view(np.uint16), geometry.dtype).reshape(geometry.page_shape)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = values / scales[:, :, None, :, None]
    target[...] = encode(scaled, dtype).reshape(-1)


def dequantize(
    source: Bytes, target: Bytes, geometry: Geometry, dtype: str, scales: Scales, *, is_compiled: bool
) -> None:
    """The other way; what was not a number is one quiet NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        # 256 results for each head: the conversion is a look-up.
        tables = _from_float(decode_table(dtype) * scales.reshape(-1, 1), geometry.dtype)
    shape = (geometry.layer_count * geometry.planes_per_layer, *geometry.page_shape[2:])
    codes, bits = source.reshape(shape), target.view(np.uint16).reshape(shape)
    if is_compiled:
        _loops().dequantize(codes, bits, tables.reshape(shape[0], shape[2], 256))
        return
    picked = tables.reshape(shape[0], shape[2], 256)
    for plane in range(shape[0]):
        for head in range(shape[2]):
            bits[plane, :, head] = picked[plane, head][codes[plane, :, head]]


@functools.lru_cache
def _loops() -> Any:
    from kvdev_kernels import fp8_code

    return fp8_code
