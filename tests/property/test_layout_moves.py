"""Every layout, geometry, block table, alignment and back end: canonical bytes, checksums, and nothing else touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdev.geometry import Geometry
from kvdev.native.crc import crc32c
from kvdev_kernels import PageKernels
from kvdev_kernels.cpu import runnable_tiers
from kvdev_kernels.testing import ENGINE_CASES, EngineCase, GuardedMemory, expected_pages

BACKENDS = ["numpy", *(f"cpu-numba:{tier}" for tier in runnable_tiers())]


@pytest.fixture(scope="module")
def kernels() -> dict[str, PageKernels]:
    return {name: PageKernels(name, thread_count=2) for name in BACKENDS}


@dataclass(frozen=True)
class Job:
    geometry: Geometry
    case: EngineCase
    other: EngineCase
    block_size: int
    other_block_size: int
    page_count: int
    misalign_bytes: int
    backend: str
    seed: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    case = draw(st.sampled_from(ENGINE_CASES))
    other = draw(st.sampled_from([c for c in ENGINE_CASES if c.attention == case.attention]))
    is_mla = case.attention == "mla"
    tokens = draw(st.sampled_from([1, 2, 8, 12, 32, 48]))
    divisors = [d for d in range(1, tokens + 1) if tokens % d == 0]
    geometry = Geometry(
        model_id="property",
        layer_count=draw(st.integers(1, 3)),
        kv_head_count=1 if is_mla else draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([1, 3, 8, 16, 32, 40, 64, 80, 128, 576])),
        dtype=draw(st.sampled_from(["bf16", "fp32", "fp8_e4m3", "int8"])),
        tokens_per_page=tokens,
        attention=case.attention,
    )
    return Job(
        geometry,
        case,
        other,
        case.block_size(geometry, draw(st.sampled_from(divisors))),
        other.block_size(geometry, draw(st.sampled_from(divisors))),
        draw(st.integers(0, 4)),
        draw(st.sampled_from([0, 0, 4, 16, 32])),
        draw(st.sampled_from(BACKENDS)),
        draw(st.integers(0, 2**32)),
    )


def draw_table(
    rng: np.random.Generator, page_count: int, blocks_per_page: int
) -> tuple[npt.NDArray[np.int64], int]:
    """A block table and how many blocks there are: scattered, or neighbours in order as a fresh engine hands out."""
    used = page_count * blocks_per_page
    block_count = used + int(rng.integers(1, 5))
    indices = rng.permutation(block_count)[:used] if rng.random() < 0.6 else np.arange(used) + 1
    return indices.astype(np.int64).reshape(page_count, blocks_per_page), block_count


def guarded_pages(memory: GuardedMemory, job: Job) -> npt.NDArray[np.uint8]:
    pages = memory.array((job.page_count, job.geometry.page_size_bytes), 1)
    assert isinstance(pages, np.ndarray)
    return pages


@given(job=jobs())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=3 * settings.default.max_examples,  # type: ignore[union-attr]
)
def test_pack_then_unpack_into_another_layout(job: Job, kernels: dict[str, PageKernels]) -> None:
    rng = np.random.default_rng(job.seed)
    geometry, mover = job.geometry, kernels[job.backend]
    source_memory = GuardedMemory(rng, misalign_bytes=job.misalign_bytes)
    page_memory = GuardedMemory(None, misalign_bytes=job.misalign_bytes)
    target_memory = GuardedMemory(None, misalign_bytes=job.misalign_bytes)

    table, block_count = draw_table(rng, job.page_count, geometry.tokens_per_page // job.block_size)
    tensors = job.case.make(source_memory, geometry, block_count, job.block_size)
    pages = guarded_pages(page_memory, job)
    crc = mover.pack(job.case.layout(geometry, tensors), table, pages)
    expected = expected_pages(job.case, geometry, tensors, table)
    assert np.array_equal(pages, expected)
    assert crc is not None and crc.tolist() == [crc32c(page) for page in expected]

    unsummed = np.zeros_like(pages)
    assert mover.pack(job.case.layout(geometry, tensors), table, unsummed, checksums=False) is None
    assert np.array_equal(unsummed, expected)

    other_table, other_count = draw_table(
        rng, job.page_count, geometry.tokens_per_page // job.other_block_size
    )
    others = job.other.make(target_memory, geometry, other_count, job.other_block_size)
    result = mover.unpack(job.other.layout(geometry, others), other_table, pages, verify=crc)
    assert result.is_ok.all() and np.array_equal(result.crc32c, crc)
    assert np.array_equal(expected_pages(job.other, geometry, others, other_table), expected)
    assert np.array_equal(pages, expected)
    for memory in (source_memory, page_memory, target_memory):
        memory.check_guards()
    check_only_named_blocks(job, others, other_table, other_count)


def check_only_named_blocks(
    job: Job, tensors: object, table: npt.NDArray[np.int64], block_count: int
) -> None:
    unused = np.setdiff1d(np.arange(block_count), table)
    for layer in range(job.geometry.layer_count):
        for kv in range(job.geometry.planes_per_layer):
            assert not job.other.plane(tensors, layer, kv)[unused].any(), (
                "a block that was not named was written"
            )


def test_canary_when_planes_are_swapped_then_the_bytes_differ(kernels: dict[str, PageKernels]) -> None:
    """The comparison above is able to fail: a layout that is wrong on purpose is caught on every back end."""
    rng = np.random.default_rng(7)
    case, geometry = ENGINE_CASES[0], Geometry.preset("small")
    tensors = case.make(GuardedMemory(rng), geometry, 33, 16)
    table = rng.permutation(33)[:32].reshape(1, 32)
    layout = case.layout(geometry, tensors)
    broken = dataclasses.replace(
        layout, plane_addresses=layout.plane_addresses[::-1].copy(), planes=layout.planes[::-1]
    )
    expected = expected_pages(case, geometry, tensors, table)
    for mover in kernels.values():
        pages = np.zeros_like(expected)
        good = mover.pack(layout, table, pages)
        bad = mover.pack(broken, table, pages)
        assert good is not None and bad is not None
        assert not np.array_equal(pages, expected) and not np.array_equal(good, bad)
