"""Geometry: arithmetic, refusals, and golden fingerprints that must never change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvdev.errors import UsageError
from kvdev.geometry import DTYPE_SIZE_BYTES, PRESETS, Geometry, dtype_name

VALID: dict[str, Any] = {"model_id": "org/model", "layer_count": 4, "kv_head_count": 2, "head_size": 64}

GOLDEN = {
    "small": "fe46b85943b0ed6fe4e9f522247c8d9a662cc9ae12b408461360aace56f26da9",
    "medium": "f3edc6a5e9f970caf349940d6c1549f7d86fc6c2c3085e59157c9f2de44811ce",
    "llama3-8b": "3a9545f65f80b7da953521c43b4853d58119f04c752c0ed71b23c19244586fa5",
    "qwen3-coder-480b-tp8": "0e6586182bd3be515ac846c92353ef92d8d0b540689e1cac77705205f12c0ba7",
    "deepseek-v3": "fc1afcf0dd7dd238c929b6eb8e7715271f723d329410f7102906786dbbd53dd1",
}

TOKEN_BYTES = {
    "small": 128,
    "medium": 2048,
    "llama3-8b": 131072,
    "llama3-70b-tp8": 40960,
    "mistral-7b": 131072,
    "qwen2.5-7b": 57344,
    "qwen2.5-32b": 262144,
    "qwen3-32b-tp2": 131072,
    "qwen3-235b-tp4": 48128,
    "qwen3-coder-480b-tp8": 31744,
    "deepseek-v3": 70272,
    "deepseek-v3-fp8": 35136,
    "kimi-k2": 70272,
}


def test_presets_have_their_true_bytes_per_token() -> None:
    assert {name: g.bytes_per_token for name, g in PRESETS.items()} == TOKEN_BYTES
    assert Geometry.preset("small").page_size_bytes == 64 << 10
    assert Geometry.preset("medium").page_size_bytes == 1 << 20


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_fingerprint_equals_the_golden_vector(name: str) -> None:
    assert PRESETS[name].fingerprint().hex() == GOLDEN[name]


def test_fingerprint_when_any_field_differs_then_differs() -> None:
    base = Geometry(**VALID, kv_head_total=8)
    changes: dict[str, Any] = {
        "model_id": "org/other",
        "revision": "abc",
        "layer_first": 1,
        "layer_count": 5,
        "kv_head_first": 1,
        "kv_head_count": 3,
        "kv_head_total": 9,
        "head_size": 128,
        "dtype": "fp16",
        "tokens_per_page": 256,
    }
    prints = {dataclasses.replace(base, **{k: v}).fingerprint() for k, v in changes.items()}
    prints.add(Geometry(model_id="org/model", layer_count=4, kv_head_count=1, head_size=64).fingerprint())
    prints.add(
        Geometry(
            model_id="org/model", layer_count=4, kv_head_count=1, head_size=64, attention="mla"
        ).fingerprint()
    )
    assert base.fingerprint() not in prints
    assert len(prints) == len(changes) + 2


def test_page_shape_when_multiplied_then_equals_page_size() -> None:
    for geometry in PRESETS.values():
        count = 1
        for extent in geometry.page_shape:
            count *= extent
        assert count * geometry.dtype_size_bytes == geometry.page_size_bytes
        assert (
            geometry.row_size_bytes * geometry.page_shape[0] * geometry.page_shape[1]
            == geometry.bytes_per_token
        )


def test_dict_round_trip_when_every_preset_then_equal() -> None:
    for geometry in PRESETS.values():
        assert Geometry.from_dict(geometry.to_dict()) == geometry


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", ""),
        ("model_id", "a\nb"),
        ("model_id", "x" * 256),
        ("model_id", 7),
        ("revision", "\x00"),
        ("layer_count", 0),
        ("layer_count", 4097),
        ("layer_count", True),
        ("layer_count", 1.5),
        ("layer_count", "4"),
        ("layer_first", -1),
        ("kv_head_count", 0),
        ("kv_head_first", -1),
        ("kv_head_total", 1),
        ("head_size", 0),
        ("dtype", "fp4"),
        ("dtype", 16),
        ("tokens_per_page", 0),
        ("tokens_per_page", 65537),
        ("attention", "gqa"),
        ("canonical_order", 2),
        ("colour", "red"),
    ],
)
def test_from_dict_when_field_is_bad_then_error_names_it(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        Geometry.from_dict({**VALID, field: value})


@pytest.mark.parametrize("field", sorted(VALID))
def test_from_dict_when_field_is_missing_then_error_names_it(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field}: required"):
        Geometry.from_dict({k: v for k, v in VALID.items() if k != field})


def test_mla_when_more_than_one_head_then_refused() -> None:
    with pytest.raises(UsageError, match="kv_head_total"):
        Geometry(model_id="m", layer_count=2, kv_head_count=2, head_size=576, attention="mla")


def test_page_size_when_beyond_limit_then_refused_with_the_arithmetic() -> None:
    with pytest.raises(UsageError, match=r"65536 tokens x 262144 bytes"):
        dataclasses.replace(PRESETS["qwen2.5-32b"], tokens_per_page=65536)


def test_preset_when_unknown_then_lists_them() -> None:
    with pytest.raises(UsageError, match="small, medium"):
        Geometry.preset("gpt")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bf16"),
        ("float16", "fp16"),
        ("torch.float8_e4m3fn", "fp8_e4m3"),
        ("uint8", "uint8"),
    ],
)
def test_dtype_name_when_engine_word_then_ours(text: str, name: str) -> None:
    assert dtype_name(text) == name
    assert name in DTYPE_SIZE_BYTES


def test_fp8_when_of_the_other_bias_then_another_geometry() -> None:
    plain, fnuz = dtype_name("torch.float8_e4m3fn"), dtype_name("torch.float8_e4m3fnuz")
    assert (plain, fnuz) == ("fp8_e4m3", "fp8_e4m3fnuz")
    assert dtype_name("float8_e5m2fnuz") == "fp8_e5m2fnuz"
    prints = {Geometry(**VALID, dtype=name).fingerprint() for name in (plain, fnuz)}
    assert len(prints) == 2


@pytest.mark.parametrize("size", [1, 4096, 65537, 16 * 8192 * 3, 65536 * 65536 // 1024])
def test_opaque_when_any_size_then_a_page_is_that_size(size: int) -> None:
    if size == 65537:  # a prime above the limit of one factor
        with pytest.raises(UsageError, match="state_size_bytes: expected a product of two numbers"):
            Geometry.opaque("m", layer_count=2, state_size_bytes=size)
        return
    geometry = Geometry.opaque("m", layer_count=2, state_size_bytes=size)
    assert geometry.page_size_bytes == 2 * size and geometry.dtype == "uint8"
