"""Geometry: what the bytes of one KV page mean, whatever tensor layout an engine keeps them in.

Canonical page bytes, in C order: mha [layer][K, V][token][KV head][element]; mla [layer][token][latent].
Not here: the engine's own layout (``kvdev_kernels.layout``); where a page lies on media (``kvdev.store``).
Trust: ``Geometry.from_dict`` takes untrusted values; raises only UsageError for bad input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from kvdev.errors import UsageError
from kvdev.units import GIB, format_size

AttentionKind = Literal["mha", "mla"]

ATTENTION_PLANES: dict[str, int] = {"mha": 2, "mla": 1}
"""Planes per layer of each attention kind: keys and values apart, or one latent plane."""

DTYPE_SIZE_BYTES: dict[str, int] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    # The same bits mean half as much in these (AMD gfx940 to gfx942): never one fingerprint with the others.
    "fp8_e4m3fnuz": 1,
    "fp8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Element types of a KV cache; the name, not only the size, is part of the fingerprint."""

DTYPE_ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}
"""What engines and array libraries call them."""

CANONICAL_ORDER = 1
"""Version of the canonical order of page bytes; a new order is a new number, never a new meaning."""

FINGERPRINT_PREFIX = b"kvdev geometry 1\n"
FINGERPRINT_SIZE_BYTES = 32

# Bounds of what is believable; they keep every product below inside 64 bits and catch swapped arguments.
LAYER_COUNT_MAX = 4096
HEAD_COUNT_MAX = 4096
HEAD_SIZE_MAX = 65536
TOKENS_PER_PAGE_MAX = 65536
NAME_SIZE_MAX = 255
PAGE_SIZE_BYTES_MAX = 4 * GIB


def _fail(field: str, expected: str, value: object) -> UsageError:
    return UsageError(f"geometry: {field}: expected {expected}, got {value!r}")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _fail(field, f"a whole number from {low} to {high}", value)


def _check_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > NAME_SIZE_MAX:
        raise _fail(field, f"printable text of at most {NAME_SIZE_MAX} bytes", value)


def dtype_name(text: str) -> str:
    """Our name of an element type, from ours or an engine's (``torch.bfloat16`` -> ``bf16``).

    Raises UsageError naming the known types.
    """
    short = text.rpartition(".")[2].lower() if isinstance(text, str) else ""
    short = DTYPE_ALIASES.get(short, short)
    if short not in DTYPE_SIZE_BYTES:
        raise _fail("dtype", "one of " + ", ".join(DTYPE_SIZE_BYTES), text)
    return short


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The identity and shape of one rank's KV pages; always valid once constructed.

    ``layer_first`` and ``layer_count`` say which layers of the model the page holds (pipeline parallel),
    ``kv_head_first``, ``kv_head_count`` and ``kv_head_total`` which KV heads (tensor parallel). For mla there
    is one head whose ``head_size`` is the latent size (compressed KV plus the rotary part).
    """

    model_id: str
    layer_count: int
    kv_head_count: int
    head_size: int
    dtype: str = "bf16"
    tokens_per_page: int = 512
    attention: str = "mha"
    revision: str = ""
    layer_first: int = 0
    kv_head_first: int = 0
    kv_head_total: int = 0
    canonical_order: int = CANONICAL_ORDER

    def __post_init__(self) -> None:
        _check_name("model_id", self.model_id)
        if not self.model_id:
            raise _fail("model_id", "the name of the model", self.model_id)
        _check_name("revision", self.revision)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.attention not in ATTENTION_PLANES:
            raise _fail("attention", "mha or mla", self.attention)
        _check_int("layer_first", self.layer_first, 0, LAYER_COUNT_MAX - 1)
        _check_int("layer_count", self.layer_count, 1, LAYER_COUNT_MAX)
        _check_int("kv_head_count", self.kv_head_count, 1, HEAD_COUNT_MAX)
        _check_int("kv_head_first", self.kv_head_first, 0, HEAD_COUNT_MAX - 1)
        _check_int("kv_head_total", self.kv_head_total, 0, HEAD_COUNT_MAX)
        if self.kv_head_total == 0:
            object.__setattr__(self, "kv_head_total", self.kv_head_first + self.kv_head_count)
        if self.kv_head_first + self.kv_head_count > self.kv_head_total:
            raise _fail(
                "kv_head_total",
                f"at least kv_head_first + kv_head_count = {self.kv_head_first + self.kv_head_count}",
                self.kv_head_total,
            )
        if self.attention == "mla" and self.kv_head_total != 1:
            raise _fail("kv_head_total", "1, as mla keeps one latent row per token", self.kv_head_total)
        _check_int("head_size", self.head_size, 1, HEAD_SIZE_MAX)
        _check_int("tokens_per_page", self.tokens_per_page, 1, TOKENS_PER_PAGE_MAX)
        if self.canonical_order != CANONICAL_ORDER:
            raise _fail(
                "canonical_order", f"{CANONICAL_ORDER}, the one this version knows", self.canonical_order
            )
        if self.page_size_bytes > PAGE_SIZE_BYTES_MAX:
            raise UsageError(
                f"geometry: page_size_bytes: expected at most {format_size(PAGE_SIZE_BYTES_MAX)}, got "
                f"{format_size(self.page_size_bytes)} = {self.tokens_per_page} tokens x "
                f"{self.bytes_per_token} bytes; lower tokens_per_page"
            )

    @property
    def planes_per_layer(self) -> int:
        return ATTENTION_PLANES[self.attention]

    @property
    def dtype_size_bytes(self) -> int:
        return DTYPE_SIZE_BYTES[self.dtype]

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one token in one plane: all KV heads of it."""
        return self.kv_head_count * self.head_size * self.dtype_size_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.layer_count * self.planes_per_layer * self.row_size_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.bytes_per_token * self.tokens_per_page

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Canonical shape of a page in elements: (layer, plane, token, KV head, element)."""
        return (
            self.layer_count,
            self.planes_per_layer,
            self.tokens_per_page,
            self.kv_head_count,
            self.head_size,
        )

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever the meaning of a page's bytes differs.

        BLAKE2b-256 over a version line and the fields as JSON (sorted keys, no blanks, ASCII).
        """
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(
            FINGERPRINT_PREFIX + text.encode("ascii"), digest_size=FINGERPRINT_SIZE_BYTES
        ).digest()

    def to_dict(self) -> dict[str, str | int]:
        """The fields under their names, as stored and as ``--json`` prints them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, untrusted: Mapping[str, object]) -> Geometry:
        """The geometry of a mapping as ``to_dict`` makes it; optional fields may be left out."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name) for name in untrusted if name not in known)
        if unknown:
            raise UsageError(
                f"geometry: {unknown[0]}: no such field; known fields: {', '.join(sorted(known))}"
            )
        missing = [n for n in ("model_id", "layer_count", "kv_head_count", "head_size") if n not in untrusted]
        if missing:
            raise UsageError(f"geometry: {missing[0]}: required field is missing")
        return cls(**untrusted)  # type: ignore[arg-type]  # __post_init__ checks every value

    @classmethod
    def opaque(
        cls,
        model_id: str,
        *,
        layer_count: int,
        state_size_bytes: int,
        revision: str = "",
        layer_first: int = 0,
    ) -> Geometry:
        """The geometry of states whose bytes nobody takes apart, such as mamba's: ``state_size_bytes`` in each layer.

        A page is one state; its "tokens" and "elements" are only the two factors that the size is written with.
        """
        _check_int("state_size_bytes", state_size_bytes, 1, HEAD_SIZE_MAX * TOKENS_PER_PAGE_MAX)
        rows = -(-state_size_bytes // HEAD_SIZE_MAX)
        while rows <= TOKENS_PER_PAGE_MAX and state_size_bytes % rows:
            rows += 1
        if rows > TOKENS_PER_PAGE_MAX:
            raise _fail(
                "state_size_bytes", f"a product of two numbers of at most {HEAD_SIZE_MAX}", state_size_bytes
            )
        return cls(
            model_id=model_id,
            revision=revision,
            layer_first=layer_first,
            layer_count=layer_count,
            kv_head_count=1,
            head_size=state_size_bytes // rows,
            tokens_per_page=rows,
            dtype="uint8",
            attention="mla",
        )

    @classmethod
    def preset(cls, name: str) -> Geometry:
        """A geometry of ``PRESETS`` by name; raises UsageError that lists them."""
        if name not in PRESETS:
            raise UsageError(f"geometry: preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        return PRESETS[name]


def _mha(model_id: str, layers: int, heads: int, head_size: int, *, tp: int = 1) -> Geometry:
    # Fewer KV heads than ranks would be replicated, not split: then a rank holds one head.
    count = max(1, heads // tp)
    return Geometry(
        model_id=model_id, layer_count=layers, kv_head_count=count, kv_head_total=heads, head_size=head_size
    )


def _mla(model_id: str, layers: int, latent_size: int, dtype: str = "bf16") -> Geometry:
    return Geometry(
        model_id=model_id,
        layer_count=layers,
        kv_head_count=1,
        head_size=latent_size,
        dtype=dtype,
        attention="mla",
    )


PRESETS: dict[str, Geometry] = {
    # Synthetic: pages of exactly 64 KiB and 1 MiB at 512 tokens, two KV heads so that head order matters.
    "small": _mha("kvdev/small", 2, 2, 8),
    "medium": _mha("kvdev/medium", 4, 2, 64),
    # Real models, rank 0. Source of each: num_hidden_layers, num_key_value_heads and head_dim (mla:
    # kv_lora_rank + qk_rope_head_dim) in the config.json published with the model's weights.
    "llama3-8b": _mha("meta-llama/Meta-Llama-3-8B", 32, 8, 128),  # 131072 bytes per token
    "llama3-70b-tp8": _mha("meta-llama/Meta-Llama-3-70B", 80, 8, 128, tp=8),  # 40960
    "mistral-7b": _mha("mistralai/Mistral-7B-v0.3", 32, 8, 128),  # 131072
    "qwen2.5-7b": _mha("Qwen/Qwen2.5-7B", 28, 4, 128),  # 57344
    "qwen2.5-32b": _mha("Qwen/Qwen2.5-32B", 64, 8, 128),  # 262144
    "qwen3-32b-tp2": _mha("Qwen/Qwen3-32B", 64, 8, 128, tp=2),  # 131072
    "qwen3-235b-tp4": _mha("Qwen/Qwen3-235B-A22B", 94, 4, 128, tp=4),  # 48128
    "qwen3-coder-480b-tp8": _mha("Qwen/Qwen3-Coder-480B-A35B-Instruct", 62, 8, 128, tp=8),  # 31744
    "deepseek-v3": _mla("deepseek-ai/DeepSeek-V3", 61, 512 + 64),  # 70272
    "deepseek-v3-fp8": _mla("deepseek-ai/DeepSeek-V3", 61, 512 + 64, "fp8_e4m3"),  # 35136
    "kimi-k2": _mla("moonshotai/Kimi-K2-Instruct", 61, 512 + 64),  # 70272
}
"""Geometries by name for the command line and benchmarks; the weights' revision is left to the user."""
