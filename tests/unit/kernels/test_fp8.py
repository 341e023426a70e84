"""fp8: the encodings, the stated error, and compiled loops that equal the definition bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev_kernels import PagedLayout, PageKernels, ShapeError
from kvdev_kernels.fp8 import (
    LARGEST,
    STEP_MIN,
    _from_float,
    _to_float,
    decode_table,
    dequantize,
    encode,
    fp8_geometry,
    quantize,
    scales_for,
)

DTYPES = sorted(LARGEST)


def geometry_of(dtype: str) -> Geometry:
    return Geometry(
        model_id="m", layer_count=2, kv_head_count=3, head_size=64, dtype=dtype, tokens_per_page=16
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_when_decoded_then_known_values_and_back(dtype: str) -> None:
    table = decode_table(dtype)
    known = {
        "fp8_e4m3": {0x00: 0.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0, 0xB8: -1.0},
        "fp8_e4m3fnuz": {0x00: 0.0, 0x01: 2.0**-10, 0x08: 2.0**-7, 0x40: 1.0, 0x7F: 240.0, 0xC0: -1.0},
    }[dtype]
    assert {code: float(table[code]) for code in known} == known
    codes = np.flatnonzero(~np.isnan(table)).astype(np.uint8)
    assert np.array_equal(encode(table[codes], dtype), codes)
    assert len(codes) == (254 if dtype == "fp8_e4m3" else 255)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", ["bf16", "fp16"])
def test_loops_when_given_all_65536_elements_then_equal_to_the_definition(dtype: str, wide: str) -> None:
    geometry = Geometry(
        model_id="m", layer_count=1, kv_head_count=2, head_size=16384, dtype=wide, tokens_per_page=1
    )
    source = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for scale in (1.0, 0.037, 5.0, 2.0**-140):
        scales = np.full((1, 2, 2), max(scale, 2.0**-126), np.float32)
        pages = [np.zeros(65536, np.uint8) for _ in range(2)]
        wides = [np.zeros(131072, np.uint8) for _ in range(2)]
        for is_compiled in (False, True):
            quantize(source, pages[is_compiled], geometry, dtype, scales, is_compiled=is_compiled)
            dequantize(
                pages[is_compiled], wides[is_compiled], geometry, dtype, scales, is_compiled=is_compiled
            )
        assert np.array_equal(pages[0], pages[1])
        assert np.array_equal(wides[0], wides[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["numpy", "cpu-numba"])
def test_pages_when_made_fp8_and_back_then_within_the_stated_error(
    dtype: str, wide: str, backend: str, rng: np.random.Generator
) -> None:
    geometry = geometry_of(wide)
    spread = np.exp2(rng.uniform(-12, 3, (2, 2, 6, 8, 3, 64))) * rng.choice([-1.0, 1.0], (2, 2, 6, 8, 3, 64))
    bits = _from_float(spread.astype(np.float32), wide)
    layout = PagedLayout.from_vllm_nhd(geometry, list(bits))
    table = [[4, 1], [0, 5]]
    with PageKernels(backend) as kernels:
        plain = np.zeros((2, geometry.page_size_bytes), np.uint8)
        kernels.pack(layout, table, plain)
        scales = scales_for(plain, geometry, dtype)
        pages = np.zeros((2, fp8_geometry(geometry, dtype).page_size_bytes), np.uint8)
        assert pages.nbytes * 2 == plain.nbytes
        sums = kernels.pack_fp8(layout, table, pages, dtype=dtype, scales=scales)
        assert sums is not None and sums.tolist() == [crc32c(page) for page in pages]
        target = np.zeros_like(bits)
        back = PagedLayout.from_vllm_nhd(geometry, list(target))
        assert kernels.unpack_fp8(back, table, pages, dtype=dtype, scales=scales, verify=sums).is_ok.all()
    blocks = [4, 1, 0, 5]
    before = _to_float(bits[:, :, blocks], wide).astype(np.float64)
    after = _to_float(target[:, :, blocks], wide).astype(np.float64)
    scale = scales.astype(np.float64)[:, :, None, None, :, None]
    stored = np.maximum(np.abs(before) / 16, scale * STEP_MIN[dtype] / 2)
    # What the roundings besides that of fp8 add: 24 bits of the division, then the engine's own type.
    read_back = np.abs(after) * (2.0**-8 if wide == "bf16" else 2.0**-11) + (
        2.0**-25 if wide == "fp16" else 0
    )
    assert (np.abs(after - before) <= stored * (1 + 2.0**-20) + read_back).all()
    assert not target[:, :, [2, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_when_not_finite_or_too_large_then_nan_or_the_largest(dtype: str) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1e9, -1e9, -0.0], np.float32)
    decoded = decode_table(dtype)[encode(values, dtype)]
    largest = LARGEST[dtype]
    assert decoded[:2].tolist() == [largest, -largest] and np.isnan(decoded[2])
    assert decoded[3:5].tolist() == [largest, -largest] and decoded[5] == 0


def test_fp8_arguments_when_wrong_then_shape_error_and_nothing_moves() -> None:
    geometry = geometry_of("bf16")
    layout = PagedLayout.from_vllm_nhd(geometry, [np.zeros((2, 4, 8, 3, 64), np.uint16) for _ in range(2)])
    pages = np.full((1, geometry.page_size_bytes // 2), 7, np.uint8)
    scales = np.ones((2, 2, 3), np.float32)
    with PageKernels("numpy") as kernels:
        for bad, message in (
            ({"dtype": "fp8_e5m2"}, "dtype: expected one of fp8_e4m3, fp8_e4m3fnuz, got 'fp8_e5m2'"),
            ({"scales": scales[0]}, r"scales: expected \(2, 2, 3\) floating point numbers, got \(2, 3\)"),
            ({"scales": scales.astype(int)}, "scales: expected"),
            (
                {"scales": scales * 0},
                r"scales\[\(0, 0, 0\)\]: expected a positive number of 32 bits, got 0.0",
            ),
            ({"scales": scales * np.nan}, "expected a positive number"),
            ({"scales": scales.astype(np.float64) * 1e300}, "expected a positive number"),
        ):
            arguments = {"dtype": "fp8_e4m3", "scales": scales, **bad}
            with pytest.raises(ShapeError, match=message):
                kernels.pack_fp8(layout, [0, 1], pages, **arguments)
        with pytest.raises(ShapeError, match="pages"):
            kernels.pack_fp8(
                layout,
                [0, 1],
                np.zeros((1, geometry.page_size_bytes), np.uint8),
                dtype="fp8_e4m3",
                scales=scales,
            )
        raw = PagedLayout.from_vllm_nhd(
            geometry_of("int8"), [np.zeros((2, 4, 8, 3, 64), np.int8) for _ in range(2)]
        )
        with pytest.raises(ShapeError, match="geometry: dtype: expected bf16 or fp16"):
            kernels.pack_fp8(raw, [0, 1], pages, dtype="fp8_e4m3", scales=scales)
    assert (pages == 7).all()
