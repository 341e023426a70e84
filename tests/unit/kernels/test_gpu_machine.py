"""The gfx942 machine code of the page kernels, run on the CPU: bit-exact, in bounds, 16 bytes at a time."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.geometry import Geometry
from kvdev_kernels import PagedLayout, PageKernels, gpu_shape
from kvdev_kernels.gpu_source import CHECK_KERNEL, SUM_KERNEL, move_kernel
from kvdev_kernels.nh64 import nh64, nh64_total
from kvdev_kernels.testing import ENGINE_CASES, EngineCase, GuardedMemory, expected_pages
from tests.unit.kernels.gcn import Instruction, Machine, MachineFault, Program, Range
from tests.unit.kernels.gpu_build import code_object, need

CASES = {case.name: case for case in ENGINE_CASES}
POISON = 0x5A


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return code_object("gfx942", tmp_path_factory.mktemp("gfx942"))


def program(image: Path, kernel: str) -> Program:
    (objdump,) = need("llvm-objdump-19")
    return Program.load(image, kernel, objdump=objdump)


def geometry(
    *, heads: int, head_size: int, tokens: int, layers: int = 2, dtype: str = "fp16", attention: str = "mha"
) -> Geometry:
    return Geometry(
        model_id="m",
        layer_count=layers,
        kv_head_count=heads,
        head_size=head_size,
        dtype=dtype,
        tokens_per_page=tokens,
        attention=attention,
    )


@dataclass
class Rig:
    """Tensors, staging and tables of one move in plain memory, with the ranges that a kernel may touch."""

    layout: PagedLayout
    table: npt.NDArray[np.int64]
    staging: npt.NDArray[np.uint8]
    memory: GuardedMemory
    width: int

    def __post_init__(self) -> None:
        self.planes = gpu_shape.plane_table(self.layout)
        self.totals = np.zeros(len(self.table), np.uint64)
        self.done = np.zeros(1, np.uint64)

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        return np.array([row.ctypes.data for row in self.staging], np.uint64)

    def launch(self, program: Program, *, is_pack: bool, workgroups: int, is_sum: bool = False) -> Machine:
        addresses = self.addresses
        tables = gpu_shape.Tables(
            self.planes.ctypes.data,
            self.table.ctypes.data,
            addresses.ctypes.data,
            self.totals.ctypes.data,
            self.done.ctypes.data,
        )
        size = self.layout.geometry.page_size_bytes
        if is_sum:
            shape = gpu_shape.sum_shape(size, len(self.table), workgroup_limit=workgroups, tables=tables)
        else:
            shape = gpu_shape.move_shape(
                self.layout, len(self.table), width=self.width, workgroup_limit=workgroups, tables=tables
            )
        ranges = [
            Range(array.ctypes.data, array.nbytes, is_writable)
            for array, is_writable in (
                (self.planes, False),
                (self.table, False),
                (addresses, False),
                (self.totals, True),
                (self.done, True),
            )
        ]
        ranges += [Range(int(address), size, is_pack and not is_sum) for address in addresses]
        ranges += [
            Range(whole.ctypes.data + start, length, not is_pack)
            for whole, start, length in self.memory.whole
        ]
        machine = Machine(program, ranges)
        machine.launch(int(shape["workgroup_count"]), gpu_shape.THREAD_COUNT, shape.tobytes())
        assert int(self.done[0]) == int(shape["tile_count"])
        return machine


def make(
    case: EngineCase, shape: Geometry, rng: np.random.Generator, *, pages: int, block_size: int, blocks: int
) -> tuple[Rig, object]:
    memory = GuardedMemory(rng)
    tensors = case.make(memory, shape, blocks, block_size)
    layout = case.layout(shape, tensors)
    table = rng.permutation(blocks)[: pages * layout.blocks_per_page].reshape(pages, -1).astype(np.int64)
    # Pages lie between guard bytes, at multiples of 16 but not of more.
    stride = -(-shape.page_size_bytes // 16) * 16 + 16
    whole = np.full(pages * stride + 64, POISON, np.uint8)
    start = -whole.ctypes.data % 64 + 16
    staging = whole[start : start + pages * stride].reshape(pages, stride)
    rig = Rig(layout, table, staging, memory, 0)
    rig.width = gpu_shape.unit_width(layout, rig.addresses)
    return rig, tensors


MOVES = [
    # One run a block and more than one tile a page; a grid that wraps around.
    ("vllm-nhd", geometry(heads=2, head_size=40, tokens=48), 16, 1, 2),
    # Heads outside tokens, runs of 16 bytes: every division counts.
    ("vllm-hnd", geometry(heads=3, head_size=8, tokens=32), 16, 2, 1),
    ("head-slice", geometry(heads=3, head_size=24, tokens=20, layers=1), 4, 2, 3),
    ("sglang-mha", geometry(heads=2, head_size=16, tokens=12), 1, 2, 2),
    ("fused-BHLNC-mha", geometry(heads=2, head_size=16, tokens=8), 4, 2, 1),
    ("vllm-mla", geometry(heads=1, head_size=144, tokens=16, dtype="fp8", attention="mla"), 8, 2, 2),
]


@pytest.mark.parametrize(
    ("name", "shape", "block_size", "pages", "workgroups"), MOVES, ids=lambda v: str(v)[:20]
)
def test_pack_and_unpack_when_machine_code_runs_then_as_the_reference(
    name: str,
    shape: Geometry,
    block_size: int,
    pages: int,
    workgroups: int,
    image: Path,
    rng: np.random.Generator,
) -> None:
    case = CASES[name]
    rig, tensors = make(
        case, shape, rng, pages=pages, block_size=block_size, blocks=pages * shape.tokens_per_page
    )
    assert rig.width == 16
    size = shape.page_size_bytes
    expected = expected_pages(case, shape, tensors, rig.table)
    machine = rig.launch(
        program(image, move_kernel(16, is_pack=True, has_sum=True)), is_pack=True, workgroups=workgroups
    )
    assert np.array_equal(rig.staging[:, :size], expected)
    assert (rig.staging[:, size:] == POISON).all()
    rig.memory.check_guards()
    assert rig.totals.tolist() == [nh64_total(page) for page in expected]
    assert machine.loads16 >= pages * size // 16, "a unit was loaded in pieces"
    assert machine.stores16 == pages * size // 16 and set(machine.stored16.values()) == {1}

    rig.staging[:, :size] = rng.integers(0, 256, (pages, size), dtype=np.uint8)
    rig.totals[:] = rig.done[:] = 0
    machine = rig.launch(
        program(image, move_kernel(16, is_pack=False, has_sum=True)), is_pack=False, workgroups=workgroups
    )
    assert np.array_equal(expected_pages(case, shape, tensors, rig.table), rig.staging[:, :size])
    rig.memory.check_guards()
    assert rig.totals.tolist() == [nh64_total(page[:size]) for page in rig.staging]
    assert machine.stores16 == pages * size // 16 and set(machine.stored16.values()) == {1}


@pytest.mark.parametrize(("width", "head_size", "dtype"), [(16, 32, "fp16"), (4, 66, "fp16"), (1, 7, "fp8")])
def test_plain_kernels_when_machine_code_runs_then_as_the_reference(
    width: int, head_size: int, dtype: str, image: Path, rng: np.random.Generator
) -> None:
    shape = geometry(heads=3, head_size=head_size, tokens=8, layers=1, dtype=dtype)
    case = CASES["vllm-hnd"]
    rig, tensors = make(case, shape, rng, pages=2, block_size=4, blocks=7)
    assert rig.width == width
    size = shape.page_size_bytes
    rig.launch(program(image, move_kernel(width, is_pack=True, has_sum=False)), is_pack=True, workgroups=1)
    packed = expected_pages(case, shape, tensors, rig.table)
    assert np.array_equal(rig.staging[:, :size], packed) and (rig.staging[:, size:] == POISON).all()
    rig.done[:] = 0
    rig.launch(program(image, SUM_KERNEL), is_pack=False, workgroups=2, is_sum=True)
    assert rig.totals.tolist() == [nh64_total(page) for page in packed]
    rig.staging[:, :size] = rng.integers(0, 256, (2, size), dtype=np.uint8)
    rig.done[:] = 0
    rig.launch(program(image, move_kernel(width, is_pack=False, has_sum=False)), is_pack=False, workgroups=2)
    assert np.array_equal(expected_pages(case, shape, tensors, rig.table), rig.staging[:, :size])
    rig.memory.check_guards()


def test_holes_when_packed_then_zeros_and_when_unpacked_then_untouched(
    image: Path, rng: np.random.Generator
) -> None:
    shape = geometry(heads=2, head_size=16, tokens=8)
    rig, tensors = make(CASES["vllm-nhd"], shape, rng, pages=1, block_size=2, blocks=6)
    whole = expected_pages(CASES["vllm-nhd"], shape, tensors, rig.table)[0].reshape(4, 4, -1).copy()
    rig.table[0, 2] = -1
    whole[:, 2] = 0
    rig.launch(program(image, move_kernel(16, is_pack=True, has_sum=False)), is_pack=True, workgroups=1)
    size = shape.page_size_bytes
    assert np.array_equal(rig.staging[0, :size], whole.reshape(-1))
    before = [array.copy() for array, _, _ in rig.memory.whole]
    rig.done[:] = 0
    rig.launch(program(image, move_kernel(16, is_pack=False, has_sum=False)), is_pack=False, workgroups=1)
    assert all(np.array_equal(a, b[0]) for a, b in zip(before, rig.memory.whole, strict=True))


def test_check_when_machine_code_runs_then_checksums_and_verdicts(
    image: Path, rng: np.random.Generator
) -> None:
    pages = [rng.integers(0, 256, 4100, dtype=np.uint8) for _ in range(300)]
    totals = np.array([nh64_total(page) for page in pages], np.uint64)
    expected = np.array([nh64(page) for page in pages], np.uint64)
    wanted = expected.copy()
    wanted[[0, 299]] ^= np.uint64(1 << 40)
    differs = np.full(300, 9, np.uint32)
    check = np.zeros((), gpu_shape.CHECK_DTYPE)
    for name, value in (("totals", totals), ("expected", wanted), ("differs", differs)):
        check[name] = value.ctypes.data
    check["page_size"], check["page_count"], check["workgroup_count"] = 4100, 300, 1
    ranges = [Range(array.ctypes.data, array.nbytes, True) for array in (totals, differs)]
    machine = Machine(
        program(image, CHECK_KERNEL), [*ranges, Range(wanted.ctypes.data, wanted.nbytes, False)]
    )
    machine.launch(1, gpu_shape.THREAD_COUNT, check.tobytes())
    assert np.array_equal(totals, expected)
    assert differs.tolist() == [1, *[0] * 298, 1]


def test_totals_when_computed_then_those_that_the_cpu_kernels_check(rng: np.random.Generator) -> None:
    # The machine code above is compared with this oracle; here the oracle is compared with packing on the CPU.
    shape = geometry(heads=2, head_size=16, tokens=8)
    case = CASES["vllm-nhd"]
    tensors = case.make(GuardedMemory(rng), shape, 6, 2)
    pages = np.zeros((1, shape.page_size_bytes), np.uint8)
    PageKernels("numpy").pack(case.layout(shape, tensors), [0, 3, 1, 2], pages)
    assert np.array_equal(pages, expected_pages(case, shape, tensors, np.array([[0, 3, 1, 2]])))


# What each mutation makes of an instruction; none of them can leave the result as it was wherever it is executed.
MUTATIONS = {
    "v_mul_hi_u32": "v_mul_lo_u32",
    "v_add_u32_e32": "v_sub_u32_e32",
    "v_sub_u32_e32": "v_add_u32_e32",
    "v_subrev_u32_e32": "v_sub_u32_e32",
    "v_xor_b32_e32": "v_or_b32_e32",
    "v_lshrrev_b32_e32": "v_lshlrev_b32_e32",
    "v_mul_lo_u32": "v_mul_hi_u32",
    "global_store_dwordx4": "global_store_dwordx2",
    "global_load_dwordx4": "global_load_dwordx2",
    "global_atomic_add_x2": "s_nop",
    "ds_bpermute_b32": "v_mov_b32_e32",
    "v_mad_u64_u32": "v_add_co_u32",
}


def mutants(program: Program, rng: np.random.Generator, count: int) -> list[tuple[str, Program]]:
    sites = [(at, MUTATIONS[i.name]) for at, i in program.code.items() if i.name in MUTATIONS]
    found = []
    for index in rng.permutation(len(sites))[:count]:
        at, name = sites[index]
        old = program.code[at]
        new = Instruction(name, old.operands, old.size_bytes)
        found.append((f"{old.name} at {at:#x} -> {name}", replace(program, code={**program.code, at: new})))
    return found


MAP_NORESERVE = 0x4000


def far(rng: np.random.Generator) -> tuple[Rig, npt.NDArray[np.uint8]]:
    """Tensors whose every stride is above 4 GiB, in memory of which little is touched, and the pages they hold."""
    shape = geometry(heads=2, head_size=512, tokens=4)
    token, run = (1 << 32) + 1024, 1024
    head, block = 2 * token + 4096, 4 * token + 8192
    kv = 5 * block + (1 << 32)
    size = 4 * kv
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"{size >> 30} GiB of address space cannot be had: {error}")
    whole = np.frombuffer(memory, np.uint8)
    tensors = [
        np.lib.stride_tricks.as_strided(
            whole[layer * 2 * kv :][: 2 * kv].view(np.uint16), (2, 5, 2, 2, 512), (kv, block, head, token, 2)
        )
        for layer in range(2)
    ]
    for tensor in tensors:
        tensor[:] = rng.integers(0, 1 << 16, tensor.shape, dtype=np.uint16)
    guarded = GuardedMemory(None)
    guarded.whole.append((whole, 0, size))
    table = np.array([[4, 1], [3, 2]], np.int64)
    octets = np.zeros(2 * shape.page_size_bytes + 64, np.uint8)
    staging = octets[-octets.ctypes.data % 64 :][: 2 * shape.page_size_bytes].reshape(2, -1)
    case = CASES["vllm-hnd"]
    rig = Rig(case.layout(shape, tensors), table, staging, guarded, 16)
    assert rig.layout.run_size_bytes == run and shape.page_size_bytes // 16 > gpu_shape.TILE_UNITS
    return rig, expected_pages(case, shape, tensors, table)


def near(rng: np.random.Generator) -> tuple[Rig, npt.NDArray[np.uint8]]:
    """Small tensors of short runs; more than one tile a page, so that every unrolled copy of the code is executed."""
    shape, case = geometry(heads=3, head_size=16, tokens=32, layers=3), CASES["vllm-hnd"]
    assert shape.page_size_bytes // 16 > gpu_shape.TILE_UNITS
    rig, tensors = make(case, shape, rng, pages=2, block_size=16, blocks=7)
    return rig, expected_pages(case, shape, tensors, rig.table)


def is_as_expected(rig: Rig, expected: npt.NDArray[np.uint8], program: Program) -> bool:
    machine = rig.launch(program, is_pack=True, workgroups=1)
    return (
        np.array_equal(rig.staging[:, : expected.shape[1]], expected)
        and rig.totals.tolist() == [nh64_total(page) for page in expected]
        and machine.stores16 == expected.size // 16
    )


def test_strides_when_above_4_gib_then_as_the_reference(image: Path, rng: np.random.Generator) -> None:
    rig, expected = far(rng)
    assert is_as_expected(rig, expected, program(image, move_kernel(16, is_pack=True, has_sum=True)))


def test_mutants_when_seeded_then_all_are_caught(image: Path, rng: np.random.Generator) -> None:
    whole = program(image, move_kernel(16, is_pack=True, has_sum=True))
    for what, mutant in mutants(whole, rng, 10):
        survived = []
        for rig, expected in (near(rng), far(rng)):
            try:
                survived.append(is_as_expected(rig, expected, mutant))
            except (MachineFault, AssertionError):
                survived.append(False)
        assert not all(survived), f"survived: {what}"
