"""CPU page kernels, the compiled part: move runs between paged tensors and pages with the CRC32C fused.

The checksum state is kept with a zero start, so that runs and pages need no special first step:
CRC32C(page) = reduced state xor CRC32C(as many zero bytes). Vector tiers hold four accumulators in memory and
rotate through them chunk by chunk; each folds as acc = acc x X^distance + chunk (Intel, "Fast CRC Computation for
Generic Polynomials Using PCLMULQDQ Instruction", bit-reflected). The inner loops are LLVM IR behind intrinsics;
everything compiled stands in this one file, whose time stamp is part of the key of Numba's cache.
Not here: which tier this processor can run, threads, checks (``kvdev_kernels.cpu``). Nothing here checks an address.
"""

# ruff: noqa: ARG001  (Numba prescribes the parameters of intrinsics)
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types

from kvdev_kernels.nh64 import KEY_STEP

STATE_SIZE_BYTES = 256
"""Four accumulators of 64 bytes; smaller tiers use the first part."""

ACCUMULATOR_COUNT = 4
PREFETCH_DISTANCE_BYTES = 4096
# Tiers without vectors copy a tile and then checksum it while it is in the first-level cache.
TILE_SIZE_BYTES = 4096

# Places in the ``shape`` array of ``move_pages``.
PAGE_SIZE, GRANULE, IS_PACK, IS_STREAMED = range(4)
SHAPE_SIZE = 4
# Columns of its ``classes``: a block's stride, its first run and how many runs it has.
BLOCK_STRIDE, RUN_FIRST, RUN_COUNT = range(3)

# Decorators whose types differ between Numba's releases.
njit: Any = numba.njit
intrinsic: Any = numba.extending.intrinsic

_POLYNOMIAL = 0x1EDC6F41
_I1, _I8, _I32, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LANE = ir.VectorType(_I64, 2)


class Tier(NamedTuple):
    """One way to checksum: ``lanes`` of 128 bits per accumulator (0: no vectors), bytes folded at once."""

    name: str
    family: str
    """Whose instructions: ``x86``, ``arm``, or none for code that runs anywhere."""
    lanes: int
    chunk_size_bytes: int


TIERS = (
    Tier("vpclmul", "x86", 4, 64),
    Tier("vpclmul256", "x86", 2, 32),
    Tier("pclmul", "x86", 1, 16),
    Tier("sse42", "x86", 0, 8),
    Tier("pmull", "arm", 1, 16),
    Tier("armcrc", "arm", 0, 8),
    Tier("portable", "", 0, 8),
)


def _fold_constant(bits: int) -> int:
    """X^bits mod P, bit-reflected, doubled: the product of reflected factors falls short by one bit."""
    value = 1
    for _ in range(bits):
        value = (value << 1) ^ (_POLYNOMIAL if value & 0x80000000 else 0)
        value &= 0xFFFFFFFF
    return int(f"{value:032b}"[::-1], 2) << 1


def _crc_tables() -> list[int]:
    """Eight tables of 256 words for eight bytes a step (reflected polynomial)."""
    reflected = int(f"{_POLYNOMIAL:032b}"[::-1], 2)
    tables = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (reflected if value & 1 else 0)
        tables.append(value)
    for _ in range(7):
        tables += [(value >> 8) ^ tables[value & 0xFF] for value in tables[-256:]]
    return tables


class _Emitter:
    """Writes IR functions of one tier into a module; ``b`` stands at the place being written."""

    def __init__(self, module: ir.Module, tier: Tier) -> None:
        self.module = module
        self.tier = tier
        self.vector = ir.VectorType(_I64, 2 * max(1, tier.lanes))
        self.step = ACCUMULATOR_COUNT * tier.chunk_size_bytes
        self.b = ir.IRBuilder()

    def define(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> tuple[ir.Function, bool]:
        """The tier's function of that name, and whether it is new: then ``b`` stands at its start."""
        name = f"kvdev_{self.tier.name}_{name}"
        if name in self.module.globals:
            return self.module.globals[name], False
        function = ir.Function(self.module, ir.FunctionType(result, arguments), name)
        function.linkage = "internal"
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        return function, True

    def extern(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def word(self, value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    def at(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.b.inttoptr(address, kind.as_pointer())

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.b.load(self.at(address, kind), align=1)

    def store(self, value: ir.Value, address: ir.Value, *, is_streamed: bool = False) -> None:
        place = self.at(address, value.type)
        stored = self.b.store(value, place, align=self.tier.chunk_size_bytes if is_streamed else 1)
        if is_streamed:
            stored.set_metadata("nontemporal", self.module.add_metadata([ir.Constant(_I32, 1)]))

    @contextmanager
    def repeat(self, condition: Callable[[], ir.Value]) -> Iterator[None]:
        """A loop that runs while the condition holds, checked first."""
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        end = self.b.append_basic_block("end")
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition(), body, end)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(end)

    def fold(self, value: ir.Value, bits: int, lanes: int) -> ir.Value:
        """Every lane of ``value`` moved on by ``bits`` of the stream."""
        vector = ir.VectorType(_I64, 2 * lanes)
        factors = (_fold_constant(bits + 32), _fold_constant(bits - 32))
        if self.tier.family == "arm":
            return self.fold_arm(value, factors)
        name = {4: "llvm.x86.pclmulqdq.512", 2: "llvm.x86.pclmulqdq.256", 1: "llvm.x86.pclmulqdq"}[lanes]
        multiply = self.extern(name, vector, [vector, vector, _I8])
        factor = ir.Constant(vector, list(factors) * lanes)
        low = self.b.call(multiply, [value, factor, ir.Constant(_I8, 0x00)])
        high = self.b.call(multiply, [value, factor, ir.Constant(_I8, 0x11)])
        return self.b.xor(low, high)

    def fold_arm(self, value: ir.Value, factors: tuple[int, int]) -> ir.Value:
        octets = ir.VectorType(_I8, 16)
        multiply = self.extern("llvm.aarch64.neon.pmull64", octets, [_I64, _I64])
        products = [
            self.b.bitcast(
                self.b.call(
                    multiply, [self.b.extract_element(value, ir.Constant(_I32, half)), self.word(factor)]
                ),
                _LANE,
            )
            for half, factor in enumerate(factors)
        ]
        return self.b.xor(*products)

    def crc_word(self, crc: ir.Value, word: ir.Value) -> ir.Value:
        """The state (64 bits wide, upper half zero) after eight more bytes."""
        if self.tier.family == "x86":
            return self.b.call(self.extern("llvm.x86.sse42.crc32.64.64", _I64, [_I64, _I64]), [crc, word])
        if self.tier.family == "arm":
            step = self.extern("llvm.aarch64.crc32cx", _I32, [_I32, _I64])
            return self.b.zext(self.b.call(step, [self.b.trunc(crc, _I32), word]), _I64)
        mixed = self.b.xor(crc, word)
        parts = [
            self.table(7 - k, self.b.and_(self.b.lshr(mixed, self.word(8 * k)), self.word(0xFF)))
            for k in range(8)
        ]
        value = parts[0]
        for part in parts[1:]:
            value = self.b.xor(value, part)
        return self.b.zext(value, _I64)

    def crc_byte(self, crc: ir.Value, byte: ir.Value) -> ir.Value:
        """The state (32 bits) after one more byte."""
        if self.tier.family == "x86":
            return self.b.call(self.extern("llvm.x86.sse42.crc32.32.8", _I32, [_I32, _I8]), [crc, byte])
        if self.tier.family == "arm":
            step = self.extern("llvm.aarch64.crc32cb", _I32, [_I32, _I32])
            return self.b.call(step, [crc, self.b.zext(byte, _I32)])
        index = self.b.and_(self.b.xor(crc, self.b.zext(byte, _I32)), ir.Constant(_I32, 0xFF))
        return self.b.xor(self.table(0, self.b.zext(index, _I64)), self.b.lshr(crc, ir.Constant(_I32, 8)))

    def table(self, number: int, index: ir.Value) -> ir.Value:
        name = "kvdev_crc_tables"
        table = self.module.globals.get(name)
        if table is None:
            kind = ir.ArrayType(_I32, 2048)
            table = ir.GlobalVariable(self.module, kind, name)
            table.linkage = "internal"
            table.global_constant = True
            table.initializer = ir.Constant(kind, _crc_tables())
        place = self.b.gep(table, [self.word(0), self.b.add(index, self.word(256 * number))])
        return self.b.load(place)

    def chunk(self, *, has_store: bool, has_crc: bool) -> ir.Function:
        """(target, source, accumulator, is_streamed): one chunk, for what is left of whole steps."""
        name = f"chunk_{int(has_store)}{int(has_crc)}"
        function, is_new = self.define(name, ir.VoidType(), [_I64, _I64, _I64, _I1])
        if is_new:
            target, source, accumulator, is_streamed = function.args
            value = self.load(source, self.vector)
            if has_store:
                with self.b.if_else(is_streamed) as (streamed, cached):
                    with streamed:
                        self.store(value, target, is_streamed=True)
                    with cached:
                        self.store(value, target)
            if has_crc:
                moved = self.fold(self.load(accumulator, self.vector), 8 * self.step, self.tier.lanes)
                self.store(self.b.xor(moved, value), accumulator)
            self.b.ret_void()
        return function

    def steps(self, *, has_store: bool, has_crc: bool, is_streamed: bool) -> ir.Function:
        """(target, source, size, state, prefetch): whole steps of four chunks, at least one."""
        name = f"steps_{int(has_store)}{int(has_crc)}{int(is_streamed)}"
        function, is_new = self.define(name, ir.VoidType(), [_I64] * 5)
        if not is_new:
            return function
        target, source, size, state, prefetch = function.args
        chunk = self.tier.chunk_size_bytes
        fetch = self.extern("llvm.prefetch.p0", ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        to_second_level = [ir.Constant(_I32, value) for value in (0, 2, 1)]
        places = (
            [self.b.add(state, self.word(chunk * j)) for j in range(ACCUMULATOR_COUNT)] if has_crc else []
        )
        starts = [self.load(place, self.vector) for place in places]
        entry = self.b.block
        loop, end = self.b.append_basic_block("loop"), self.b.append_basic_block("end")
        self.b.branch(loop)
        self.b.position_at_end(loop)
        i = self.b.phi(_I64)
        i.add_incoming(self.word(0), entry)
        accumulators = []
        for value in starts:
            accumulator = self.b.phi(self.vector)
            accumulator.add_incoming(value, entry)
            accumulators.append(accumulator)

        def place_in(base: ir.Value, offset: int) -> ir.Value:
            return self.b.add(self.b.add(base, i), self.word(offset))

        for line in range(0, self.step, 64):
            self.b.call(fetch, [self.at(place_in(prefetch, line), _I8), *to_second_level])
        chunks = [self.load(place_in(source, chunk * j), self.vector) for j in range(ACCUMULATOR_COUNT)]
        if has_store:
            for j, value in enumerate(chunks):
                self.store(value, place_in(target, chunk * j), is_streamed=is_streamed)
        folded = [
            self.b.xor(self.fold(accumulator, 8 * self.step, self.tier.lanes), value)
            for accumulator, value in zip(accumulators, chunks, strict=False)
        ]
        following = self.b.add(i, self.word(self.step))
        for phi, value in zip([i, *accumulators], [following, *folded], strict=True):
            phi.add_incoming(value, loop)
        self.b.cbranch(self.b.icmp_unsigned("<", following, size), loop, end)
        self.b.position_at_end(end)
        for place, value in zip(places, folded, strict=True):
            self.store(value, place)
        self.b.ret_void()
        return function

    def move(self, *, has_store: bool, has_crc: bool) -> ir.Function:
        """(target, source, size, state, phase, prefetch, is_streamed) -> phase; size is whole chunks.

        ``phase`` is the accumulator of the next chunk. Streamed stores need a target on a cache line.
        """
        if not self.tier.lanes:
            return self.move_scalar(has_store=has_store, has_crc=has_crc)
        parts = {"has_store": has_store, "has_crc": has_crc}
        chunk_step = self.chunk(**parts)
        cached_steps = self.steps(**parts, is_streamed=False)
        streamed_steps = self.steps(**parts, is_streamed=True) if has_store else cached_steps
        name = f"move_{int(has_store)}{int(has_crc)}"
        function, is_new = self.define(name, _I64, [_I64] * 6 + [_I1])
        if not is_new:
            return function
        target, source, size, state, start_phase, prefetch, is_streamed = function.args
        chunk = self.word(self.tier.chunk_size_bytes)
        b = self.b
        i, phase = b.alloca(_I64), b.alloca(_I64)
        b.store(self.word(0), i)
        b.store(start_phase, phase)

        def one_chunk() -> None:
            at, index = b.load(i), b.load(phase)
            place = b.add(state, b.mul(index, chunk))
            b.call(chunk_step, [b.add(target, at), b.add(source, at), place, is_streamed])
            b.store(b.add(at, chunk), i)
            b.store(b.and_(b.add(index, self.word(1)), self.word(ACCUMULATOR_COUNT - 1)), phase)

        def is_inside() -> ir.Value:
            return b.icmp_unsigned("<", b.load(i), size)

        with self.repeat(lambda: b.and_(b.icmp_unsigned("!=", b.load(phase), self.word(0)), is_inside())):
            one_chunk()
        at = b.load(i)
        whole = b.and_(b.sub(size, at), self.word(-self.step))
        with b.if_then(b.icmp_unsigned("!=", whole, self.word(0))):
            arguments = [b.add(target, at), b.add(source, at), whole, state, b.add(prefetch, at)]
            with b.if_else(is_streamed) as (streamed, cached):
                with streamed:
                    b.call(streamed_steps, arguments)
                with cached:
                    b.call(cached_steps, arguments)
            b.store(b.add(at, whole), i)
        with self.repeat(is_inside):
            one_chunk()
        b.ret(b.load(phase))
        return function

    def move_scalar(self, *, has_store: bool, has_crc: bool) -> ir.Function:
        """As ``move``, tile by tile: copy, then checksum word by word."""
        name = f"move_{int(has_store)}{int(has_crc)}"
        function, is_new = self.define(name, _I64, [_I64] * 6 + [_I1])
        if not is_new:
            return function
        target, source, size, state, phase, _prefetch, _is_streamed = function.args
        b = self.b
        i, j, crc = b.alloca(_I64), b.alloca(_I64), b.alloca(_I64)
        b.store(self.word(0), i)
        b.store(self.load(state, _I64), crc)
        with self.repeat(lambda: b.icmp_unsigned("<", b.load(i), size)):
            at = b.load(i)
            left = b.sub(size, at)
            is_short = b.icmp_unsigned("<", left, self.word(TILE_SIZE_BYTES))
            end = b.add(at, b.select(is_short, left, self.word(TILE_SIZE_BYTES)))
            if has_store:
                self.copy(b.add(target, at), b.add(source, at), b.sub(end, at))
            if has_crc:
                b.store(at, j)
                with self.repeat(lambda end=end: b.icmp_unsigned("<", b.load(j), end)):  # type: ignore[misc]
                    value = self.load(b.add(source, b.load(j)), _I64)
                    b.store(self.crc_word(b.load(crc), value), crc)
                    b.store(b.add(b.load(j), self.word(8)), j)
            b.store(end, i)
        self.store(b.load(crc), state)
        b.ret(phase)
        return function

    def copy(self, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
        pointer = _I8.as_pointer()
        function = self.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, _I64])
        self.b.call(function, [self.at(target, _I8), self.at(source, _I8), size, ir.Constant(_I1, 0)])

    def finish(self) -> ir.Function:
        """(state, phase, tail, tail size) -> state of the checksum; the tail is shorter than a chunk."""
        function, is_new = self.define("finish", _I32, [_I64] * 4)
        if not is_new:
            return function
        state, phase, tail, tail_size = function.args
        b = self.b
        if self.tier.lanes:
            # The oldest chunk is in the accumulator that would be next; lanes follow each other in memory.
            first = b.mul(phase, self.word(self.tier.chunk_size_bytes))
            value = self.load(b.add(state, first), _LANE)
            for lane in range(1, ACCUMULATOR_COUNT * self.tier.lanes):
                offset = b.and_(b.add(first, self.word(16 * lane)), self.word(self.step - 1))
                value = b.xor(self.fold(value, 128, 1), self.load(b.add(state, offset), _LANE))
            crc = self.word(0)
            for half in range(2):
                crc = self.crc_word(crc, b.extract_element(value, ir.Constant(_I32, half)))
        else:
            crc = self.load(state, _I64)
        held, i = b.alloca(_I32), b.alloca(_I64)
        b.store(b.trunc(crc, _I32), held)
        b.store(self.word(0), i)
        with self.repeat(lambda: b.icmp_unsigned("<", b.load(i), tail_size)):
            b.store(self.crc_byte(b.load(held), self.load(b.add(tail, b.load(i)), _I8)), held)
            b.store(b.add(b.load(i), self.word(1)), i)
        b.ret(b.load(held))
        return function


@intrinsic(prefer_literal=True)
def move_bytes(
    typingctx: Any,
    tier: Any,
    has_store: Any,
    has_crc: Any,
    target: Any,
    source: Any,
    size: Any,
    state: Any,
    phase: Any,
    prefetch: Any,
    is_streamed: Any,
) -> Any:
    """``_Emitter.move`` of a tier; the first three arguments are literals."""
    tier_index, stores, checks = (
        tier.literal_value,
        bool(has_store.literal_value),
        bool(has_crc.literal_value),
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = _Emitter(builder.module, TIERS[tier_index]).move(has_store=stores, has_crc=checks)
        streamed = builder.icmp_unsigned("!=", args[9], ir.Constant(_I64, 0))
        return builder.call(function, [*args[3:9], streamed])

    return types.int64(tier, has_store, has_crc, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def finish_crc(typingctx: Any, tier: Any, state: Any, phase: Any, tail: Any, tail_size: Any) -> Any:
    """``_Emitter.finish`` of a tier; the first argument is a literal."""
    tier_index = tier.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.call(_Emitter(builder.module, TIERS[tier_index]).finish(), args[1:])

    return types.uint32(tier, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def store_fence(typingctx: Any, tier: Any) -> Any:
    """Streaming stores become visible before what follows; nothing in tiers that have none."""
    told = TIERS[tier.literal_value]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if told.lanes and told.family == "arm":
            builder.fence("release")
        elif told.lanes:
            name = "llvm.x86.sse.sfence"
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(tier), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        emitter = _Emitter(builder.module, TIERS[-1])
        emitter.b = builder
        emitter.copy(*args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def clear_state(typingctx: Any, state: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        function = builder.module.declare_intrinsic("llvm.memset", [pointer, _I64])
        place = builder.inttoptr(args[0], pointer)
        size = ir.Constant(_I64, STATE_SIZE_BYTES)
        builder.call(function, [place, ir.Constant(_I8, 0), size, ir.Constant(_I1, 0)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def load_byte(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I8.as_pointer()))

    return types.uint8(types.int64), codegen


def build_nh64() -> Callable[[int, int], int]:
    """The total of NH-64 (``kvdev_kernels.nh64``) of (address, size), for any processor."""
    step = np.uint64(KEY_STEP)
    half = np.uint64(32)
    low_bits = np.uint64(0xFFFFFFFF)

    def nh64_total(address: Any, size: Any) -> Any:
        total = np.uint64(0)
        key = np.uint64(0)
        whole = size // 8 * 8
        for offset in range(0, whole, 8):
            key += step
            mixed = load_word(address + offset) ^ key
            low, high = mixed & low_bits, mixed >> half
            total += low * high + ((low + high) << half)
        if whole < size:
            word = np.uint64(0)
            for offset in range(whole, size):
                word |= np.uint64(load_byte(address + offset)) << np.uint64(8 * (offset - whole))
            mixed = word ^ (key + step)
            low, high = mixed & low_bits, mixed >> half
            total += low * high + ((low + high) << half)
        return total

    compiled: Callable[[int, int], int] = _compile(nh64_total, (types.int64, types.int64))
    return compiled


MOVE_ARGUMENTS = (
    types.Array(types.int64, 1, "C"),
    types.Array(types.int64, 1, "C"),
    types.Array(types.int64, 2, "C"),
    types.Array(types.int64, 2, "C"),
    types.Array(types.int64, 2, "C"),
    types.Array(types.uint64, 1, "C", readonly=True),
    types.Array(types.int64, 1, "C"),
    types.Array(types.uint32, 1, "C"),
    types.Array(types.int64, 3, "C"),
    types.int64,
    types.uint32,
    types.int64,
    types.int64,
)


def build_move(tier_name: str, *, has_crc: bool) -> Callable[..., None]:
    """``move_pages`` of a tier, compiled here or taken from Numba's cache.

    Emits that tier's instructions and no others: the caller knows that the processor has them.
    """
    # Plain numbers, which are literals to Numba; in a closure they are part of the cache's key.
    tier_index = [tier.name for tier in TIERS].index(tier_name)
    chunk = TIERS[tier_index].chunk_size_bytes
    with_crc = int(has_crc)

    def move_pages(
        planes: Any,
        plane_class: Any,
        classes: Any,
        block_runs: Any,
        table: Any,
        pages: Any,
        shape: Any,
        crc32c: Any,
        scratch: Any,
        state: Any,
        zeros_crc: Any,
        first: Any,
        last: Any,
    ) -> None:
        """Move pages [first, last); ``scratch`` and ``state`` are this caller's own.

        ``block_runs`` holds the (offset, size) of each class's runs of a block, one class after another; ``scratch``
        takes (class, 2, runs of a page), whose first entry is the number of runs.
        """
        is_pack = shape[IS_PACK] != 0
        is_streamed = shape[IS_STREAMED]
        page_size = shape[PAGE_SIZE]
        plane_size = page_size // planes.size
        is_whole = shape[GRANULE] % chunk == 0
        for p in range(first, last):
            # The runs of this page in the planes of each class, as offsets; neighbours in memory are merged.
            for c in range(classes.shape[0]):
                run_first, run_last = classes[c, RUN_FIRST], classes[c, RUN_FIRST] + classes[c, RUN_COUNT]
                count = 0
                end = np.int64(0)
                for block in table[p]:
                    at = block * classes[c, BLOCK_STRIDE]
                    for r in range(run_first, run_last):
                        offset = at + block_runs[0, r]
                        if count > 0 and end == offset:
                            scratch[c, 1, count] += block_runs[1, r]
                        else:
                            count += 1
                            scratch[c, 0, count] = offset
                            scratch[c, 1, count] = block_runs[1, r]
                        end = offset + block_runs[1, r]
                scratch[c, 0, 0] = count
            page = np.int64(pages[p])
            clear_state(state)
            phase = 0
            absorbed = page
            for plane in range(planes.size):
                base = planes[plane]
                number = plane_class[plane]
                count = scratch[number, 0, 0]
                following_plane = min(plane + 1, planes.size - 1)
                ahead = planes[following_plane]
                ahead_number = plane_class[following_plane]
                ahead_count = scratch[ahead_number, 0, 0]
                look = 1 + PREFETCH_DISTANCE_BYTES // scratch[number, 1, 1]
                place = page + plane * plane_size
                end = place + plane_size
                if not is_whole and not is_pack:
                    # Checksum first: it brings the page into the cache. Its last bytes may wait for the next plane.
                    whole = (end - absorbed) // chunk * chunk
                    phase = move_bytes(tier_index, 0, with_crc, 0, absorbed, whole, state, phase, absorbed, 0)
                    absorbed += whole
                for r in range(1, count + 1):
                    size = scratch[number, 1, r]
                    tensor = base + scratch[number, 0, r]
                    if not is_whole:
                        if is_pack:
                            copy_bytes(place, tensor, size)
                        else:
                            copy_bytes(tensor, place, size)
                    elif is_pack:
                        if r + look <= count:
                            following = base + scratch[number, 0, r + look]
                        else:
                            following = ahead + scratch[ahead_number, 0, min(r + look - count, ahead_count)]
                        # The last bytes of a run fetch the run that comes that much later.
                        far = max(0, size - PREFETCH_DISTANCE_BYTES)
                        for part in range(0 if far > 0 else 1, 2):
                            start = far if part else 0
                            length = size - far if part else far
                            fetch = following if part else tensor + PREFETCH_DISTANCE_BYTES
                            phase = move_bytes(
                                tier_index,
                                1,
                                with_crc,
                                place + start,
                                tensor + start,
                                length,
                                state,
                                phase,
                                fetch,
                                is_streamed,
                            )
                    else:
                        # The page is read in order, which the processor foresees; fetching ahead costs nothing.
                        fetch = place + PREFETCH_DISTANCE_BYTES
                        phase = move_bytes(
                            tier_index, 1, with_crc, tensor, place, size, state, phase, fetch, is_streamed
                        )
                    place += size
                if is_whole:
                    absorbed = end
                elif is_pack:
                    whole = (end - absorbed) // chunk * chunk
                    phase = move_bytes(tier_index, 0, with_crc, 0, absorbed, whole, state, phase, absorbed, 0)
                    absorbed += whole
            if with_crc:
                crc32c[p] = (
                    finish_crc(tier_index, state, phase, absorbed, page + page_size - absorbed) ^ zeros_crc
                )
        store_fence(tier_index)

    compiled: Callable[..., None] = _compile(move_pages, MOVE_ARGUMENTS)
    return compiled


def _compile(function: Any, arguments: Any) -> Any:
    """The function for these types only, from Numba's cache where there is one."""
    # error_model numpy: no ZeroDivision path. No bounds checks: indices were checked before the call.
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        compiled = njit(cache=True, **options)(function)
        compiled.compile(arguments)
    except (RuntimeError, OSError):
        # Neither the package's folder nor the user's cache can be written, or the disk is full.
        compiled = njit(**options)(function)
        compiled.compile(arguments)
    compiled.disable_compile()
    return compiled
