"""An interpreter of gfx942 machine code: runs a kernel of a code object on the CPU, one wave of 64 lanes at a time.

Reads what ``llvm-objdump`` says of the real code object and its kernel descriptor. Every access is checked against
the declared ranges and its natural alignment; 16-byte accesses are counted; scratch, flat accesses and instructions
that are not known here raise. Timing, caches, missing waits and races between waves are not modelled.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WAVE = 64
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
INSTRUCTIONS_MAX = 500_000
"""Per wave; more means a loop that does not end."""
_SPECIAL = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127}
_REGISTER = re.compile(r"([sv])(?:(\d+)|\[(\d+):(\d+)\])")
_BITS = np.uint64(1) << np.arange(WAVE, dtype=np.uint64)
U32, U64 = np.uint32, np.uint64

Lanes = npt.NDArray[Any]


class MachineFault(Exception):
    """The code did what a GPU would fault on, or what this interpreter does not accept."""


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: tuple[str, ...]
    size_bytes: int


@dataclass
class Range:
    """Device memory that a kernel may use."""

    address: int
    size_bytes: int
    is_writable: bool


@dataclass
class Program:
    """One kernel of a code object."""

    first: int
    code: dict[int, Instruction]
    rsrc2: int
    scratch_size_bytes: int

    @classmethod
    def load(cls, path: Path, kernel: str, *, objdump: str, arch: str = "gfx942") -> Program:
        text = subprocess.run(
            [objdump, "-d", f"--mcpu={arch}", f"--disassemble-symbols={kernel}", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        code: dict[int, Instruction] = {}
        for line in text.splitlines():
            if not line.startswith("\t"):
                continue
            source, comment = line.split("//", 1)
            where, words = comment.strip().split(":", 1)
            name, _, operands = source.strip().partition(" ")
            code[int(where, 16)] = Instruction(
                name,
                tuple(part.strip() for part in operands.split(",")) if operands.strip() else (),
                4 * len(words.split("<")[0].split()),
            )
        if not code:
            raise KeyError(kernel)
        descriptor = _kernel_descriptor(path.read_bytes(), kernel)
        scratch = struct.unpack_from("<I", descriptor, 4)[0]
        return cls(min(code), code, struct.unpack_from("<I", descriptor, 52)[0], scratch)

    def names(self) -> Counter[str]:
        return Counter(instruction.name for instruction in self.code.values())


def _kernel_descriptor(image: bytes, kernel: str) -> bytes:
    """The 64 bytes of the symbol KERNEL.kd of an ELF64 file."""
    (start,) = struct.unpack_from("<Q", image, 40)
    (count,) = struct.unpack_from("<H", image, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, start + 64 * i) for i in range(count)]
    for section in sections:
        if section[1] != 11:  # SHT_DYNSYM
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, where, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            text = image[names + name : image.index(0, names + name)].decode()
            if text == kernel + ".kd":
                offset = sections[where][4] + value - sections[where][3]
                return image[offset : offset + 64]
    raise KeyError(kernel)


@dataclass
class Machine:
    """Runs one program over its grid; ``loads16`` and ``stores16`` count lanes' 16-byte accesses."""

    program: Program
    ranges: list[Range]
    loads16: int = 0
    stores16: int = 0
    narrow_loads: Counter[int] = field(default_factory=Counter)
    stored16: Counter[int] = field(default_factory=Counter)
    """How often each address was the start of a 16-byte store."""

    def launch(self, workgroups: int, threads: int, arguments: bytes) -> None:
        if self.program.scratch_size_bytes:
            raise MachineFault(f"scratch: {self.program.scratch_size_bytes} bytes")
        kernarg = ctypes.create_string_buffer(arguments + bytes(256), len(arguments) + 256)
        address = ctypes.addressof(kernarg)
        self.ranges = [*self.ranges, Range(address, len(arguments), False)]
        with np.errstate(all="ignore"):
            for workgroup in range(workgroups):
                for first in range(0, threads, WAVE):
                    _Wave(self, address, workgroup, first, min(WAVE, threads - first)).run()

    def check(self, address: int, size_bytes: int, *, is_store: bool) -> None:
        word = "store" if is_store else "load"
        if address % min(size_bytes, 16):
            raise MachineFault(f"{word} of {size_bytes} bytes misaligned at {address:#x}")
        for each in self.ranges:
            if each.address <= address and address + size_bytes <= each.address + each.size_bytes:
                if is_store and not each.is_writable:
                    raise MachineFault(f"store to read-only memory at {address:#x}")
                return
        raise MachineFault(f"{word} of {size_bytes} bytes out of bounds at {address:#x}")

    def read(self, address: int, size_bytes: int) -> bytes:
        self.check(address, size_bytes, is_store=False)
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        self.check(address, len(data), is_store=True)
        ctypes.memmove(address, data, len(data))


def _register(operand: str) -> tuple[str, int] | None:
    found = _REGISTER.fullmatch(operand)
    if found:
        return found[1], int(found[2] or found[3])
    return ("s", _SPECIAL[operand]) if operand in _SPECIAL else None


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


class _Wave:
    """Registers of one wave, and what each instruction does to them."""

    def __init__(self, machine: Machine, kernarg: int, workgroup: int, first_thread: int, lanes: int) -> None:
        self.machine = machine
        self.program = machine.program
        self.scalar = [0] * 128
        self.vector = np.zeros((256, WAVE), U32)
        self.scc = 0
        self.set_scalar("s[0:1]", kernarg, 2)
        place = (self.program.rsrc2 >> 1) & 31  # user registers, then the workgroup's ids
        for bit, value in ((7, workgroup), (8, 0), (9, 0)):
            if self.program.rsrc2 >> bit & 1:
                self.scalar[place] = value
                place += 1
        self.set_scalar("exec", (1 << lanes) - 1, 2)
        self.vector[0][:lanes] = np.arange(first_thread, first_thread + lanes)

    def run(self) -> None:
        at = self.program.first
        for _ in range(INSTRUCTIONS_MAX):
            instruction = self.program.code.get(at)
            if instruction is None:
                raise MachineFault(f"jump to {at:#x}, where no instruction starts")
            if instruction.name == "s_endpgm":
                return
            at += instruction.size_bytes
            jump = _action(instruction.name)(self, instruction.operands)
            if jump is not None:
                at += 4 * jump
        raise MachineFault("a wave does not end")

    # --- operands
    def scalar_of(self, operand: str, words: int = 1) -> int:
        register = _register(operand)
        if register is None:
            try:
                value = int(operand, 0)
            except ValueError:
                value = int(struct.unpack("<I", struct.pack("<f", float(operand)))[0])
            return value & (MASK64 if words == 2 else MASK32)
        if register[0] != "s":
            raise MachineFault(f"expected a scalar operand, got {operand}")
        return sum(self.scalar[register[1] + i] << (32 * i) for i in range(words))

    def set_scalar(self, operand: str, value: int, words: int = 1) -> None:
        register = _register(operand)
        assert register is not None and register[0] == "s", operand
        for i in range(words):
            self.scalar[register[1] + i] = (value >> (32 * i)) & MASK32

    def lanes_of(self, operand: str, words: int = 1) -> Lanes:
        register = _register(operand)
        if register and register[0] == "v":
            values: Lanes = self.vector[register[1]].copy()
            if words == 2:
                values = values.astype(U64) | self.vector[register[1] + 1].astype(U64) << U64(32)
            return values
        return np.full(WAVE, self.scalar_of(operand, words), U64 if words == 2 else U32)

    def set_lanes(self, operand: str, values: Lanes, words: int = 1) -> None:
        register = _register(operand)
        assert register is not None and register[0] == "v", operand
        active = self.active()
        if words == 1:
            self.vector[register[1]][active] = values.astype(U32)[active]
        else:
            self.vector[register[1]][active] = (values & U64(MASK32)).astype(U32)[active]
            self.vector[register[1] + 1][active] = (values >> U64(32)).astype(U32)[active]

    def exec_mask(self) -> int:
        return self.scalar[126] | self.scalar[127] << 32

    def active(self) -> npt.NDArray[np.bool_]:
        return np.asarray((U64(self.exec_mask()) & _BITS) != 0, np.bool_)

    def flags_of(self, operand: str) -> npt.NDArray[np.bool_]:
        return np.asarray((U64(self.scalar_of(operand, 2)) & _BITS) != 0, np.bool_)

    def set_flags(self, operand: str, flags: npt.NDArray[np.bool_]) -> None:
        self.set_scalar(operand, int(_BITS[flags & self.active()].sum(dtype=U64)), 2)

    # --- memory
    def addresses(self, offset: str, last: str) -> npt.NDArray[np.int64]:
        words = last.split()
        plus = next((int(word[7:]) for word in words[1:] if word.startswith("offset:")), 0)
        if words[0] == "off":
            return self.lanes_of(offset, 2).astype(np.int64) + plus
        return self.lanes_of(offset).astype(np.int64) + self.scalar_of(words[0], 2) + plus

    def global_load(self, o: tuple[str, ...], size_bytes: int) -> None:
        where, register = self.addresses(o[1], o[2]), _register(o[0])
        assert register is not None
        for lane in np.flatnonzero(self.active()):
            data = self.machine.read(int(where[lane]), size_bytes)
            if size_bytes == 16:
                self.machine.loads16 += 1
            else:
                self.machine.narrow_loads[size_bytes] += 1
            words = np.frombuffer(data.ljust(4, b"\0"), U32)
            self.vector[register[1] : register[1] + len(words), lane] = words

    def global_store(self, o: tuple[str, ...], size_bytes: int) -> None:
        where, register = self.addresses(o[0], o[2]), _register(o[1])
        assert register is not None
        words = -(-size_bytes // 4)
        for lane in np.flatnonzero(self.active()):
            self.machine.write(
                int(where[lane]), self.vector[register[1] : register[1] + words, lane].tobytes()[:size_bytes]
            )
            if size_bytes == 16:
                self.machine.stores16 += 1
                self.machine.stored16[int(where[lane])] += 1

    def global_atomic_add_x2(self, o: tuple[str, ...]) -> None:
        where, values = self.addresses(o[0], o[2]), self.lanes_of(o[1], 2)
        for lane in np.flatnonzero(self.active()):
            old = int.from_bytes(self.machine.read(int(where[lane]), 8), "little")
            self.machine.write(int(where[lane]), ((old + int(values[lane])) & MASK64).to_bytes(8, "little"))

    def scalar_load(self, o: tuple[str, ...], words: int) -> None:
        register = _register(o[0])
        assert register is not None
        address = self.scalar_of(o[1], 2) + self.scalar_of(o[2])
        for i in range(words):  # aligned to four bytes, whatever the size
            self.scalar[register[1] + i] = int.from_bytes(self.machine.read(address + 4 * i, 4), "little")

    def ds_bpermute_b32(self, o: tuple[str, ...]) -> None:
        source = (self.lanes_of(o[1]) >> U32(2)) & U32(63)
        values = self.lanes_of(o[2].split()[0])
        self.set_lanes(o[0], np.where(self.active()[source], values[source], U32(0)))

    def first_lane(self) -> int:
        mask = self.exec_mask()
        return (mask & -mask).bit_length() - 1 if mask else 0


Action = Callable[[_Wave, tuple[str, ...]], "int | None"]


def _branch(operands: tuple[str, ...]) -> int:
    value = int(operands[0].split()[0])
    return value - 65536 if value > 32767 else value


def _jump(condition: Callable[[_Wave], bool]) -> Action:
    return lambda w, o: _branch(o) if condition(w) else None


def _scalar(words: int, compute: Callable[[int, int], int], *, sets_scc: bool = True) -> Action:
    def action(w: _Wave, o: tuple[str, ...]) -> None:
        value = compute(w.scalar_of(o[1], words), w.scalar_of(o[2], words)) & (
            MASK64 if words == 2 else MASK32
        )
        w.set_scalar(o[0], value, words)
        if sets_scc:
            w.scc = int(value != 0)

    return action


def _sum32(compute: Callable[[int, int, int], int], *, is_signed: bool = False) -> Action:
    """Scalar addition and subtraction; scc is the carry, the borrow or the signed overflow."""

    def action(w: _Wave, o: tuple[str, ...]) -> None:
        a, b = w.scalar_of(o[1]), w.scalar_of(o[2])
        if is_signed:
            value = compute(_signed(a), _signed(b), 0)
            w.scc = int(not -(1 << 31) <= value < 1 << 31)
        else:
            value = compute(a, b, w.scc)
            w.scc = int(not 0 <= value <= MASK32)
        w.set_scalar(o[0], value & MASK32)

    return action


def _compare(words: int, test: Callable[[int, int], bool]) -> Action:
    def action(w: _Wave, o: tuple[str, ...]) -> None:
        w.scc = int(test(w.scalar_of(o[0], words), w.scalar_of(o[1], words)))

    return action


def _saveexec(compute: Callable[[int, int], int]) -> Action:
    def action(w: _Wave, o: tuple[str, ...]) -> None:
        old, value = w.exec_mask(), compute(w.scalar_of(o[1], 2), w.exec_mask()) & MASK64
        w.set_scalar(o[0], old, 2)
        w.set_scalar("exec", value, 2)
        w.scc = int(value != 0)

    return action


def _bit_find(w: _Wave, o: tuple[str, ...]) -> None:
    value = w.scalar_of(o[1], 2)
    w.set_scalar(o[0], ((value & -value).bit_length() - 1) & MASK32)


def _bit_count(w: _Wave, o: tuple[str, ...]) -> None:
    w.scc = int(w.scalar_of(o[1], 2) != 0)
    w.set_scalar(o[0], w.scalar_of(o[1], 2).bit_count())


def _movk(w: _Wave, o: tuple[str, ...]) -> None:
    value = int(o[1], 0) & 0xFFFF
    w.set_scalar(o[0], (value - 65536 if value > 32767 else value) & MASK32)


def _lanes(
    compute: Callable[..., Lanes], inputs: int, words_in: tuple[int, ...] = (1, 1, 1), words: int = 1
) -> Action:
    return lambda w, o: w.set_lanes(
        o[0], compute(*(w.lanes_of(o[1 + i], words_in[i]) for i in range(inputs))), words
    )


def _mad(w: _Wave, o: tuple[str, ...]) -> None:
    product = w.lanes_of(o[2]).astype(U64) * w.lanes_of(o[3]).astype(U64)
    addend = w.lanes_of(o[4], 2)
    total = product + addend
    w.set_flags(o[1], total < product)
    w.set_lanes(o[0], total, 2)


def _carry(compute: Callable[[Lanes, Lanes, Lanes], Lanes], *, has_carry_in: bool) -> Action:
    def action(w: _Wave, o: tuple[str, ...]) -> None:
        carry = w.flags_of(o[4]).astype(np.int64) if has_carry_in else np.zeros(WAVE, np.int64)
        value = compute(w.lanes_of(o[2]).astype(np.int64), w.lanes_of(o[3]).astype(np.int64), carry)
        w.set_flags(o[1], (value < 0) | (value > MASK32))
        w.set_lanes(o[0], (value & MASK32).astype(U32))

    return action


def _vector_compare(test: Callable[[Lanes, Lanes], Lanes], words: int, *, is_signed: bool) -> Action:
    kind = {(1, True): np.int32, (2, True): np.int64}.get((words, is_signed))

    def action(w: _Wave, o: tuple[str, ...]) -> None:
        a, b = w.lanes_of(o[1], words), w.lanes_of(o[2], words)
        w.set_flags(o[0], test(a.view(kind), b.view(kind)) if kind else test(a, b))

    return action


def _mbcnt(low_lane: int) -> Action:
    def action(w: _Wave, o: tuple[str, ...]) -> None:
        mask = w.lanes_of(o[1])
        below = [(1 << max(0, min(lane - low_lane, 32))) - 1 for lane in range(WAVE)]
        counts = [(int(mask[lane]) & below[lane]).bit_count() for lane in range(WAVE)]
        w.set_lanes(o[0], np.array(counts, U32) + w.lanes_of(o[2]))

    return action


def _perm(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    both, out = a.astype(U64) << U64(32) | b.astype(U64), np.zeros(WAVE, U64)
    for i in range(4):
        which = (selector >> U32(8 * i)) & U32(0xFF)
        octet = (both >> (np.minimum(which, U32(7)).astype(U64) * U64(8))) & U64(0xFF)
        out |= np.where(which <= 7, octet, np.where(which == 12, U64(0), U64(0xFF))) << U64(8 * i)
        if bool(((which > 7) & (which < 12)).any()):
            raise MachineFault("v_perm_b32 with sign bytes")
    return out.astype(U32)


def _alignbit(a: Lanes, b: Lanes, shift: Lanes) -> Lanes:
    both: Lanes = a.astype(U64) << U64(32) | b.astype(U64)
    return np.asarray(both >> (shift.astype(U64) & U64(31)), U64).astype(U32)


_SELECT = {
    "DWORD": (0, 32),
    **{f"WORD_{i}": (16 * i, 16) for i in range(2)},
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
}


def _or_sdwa(w: _Wave, o: tuple[str, ...]) -> None:
    """Parts of registers: the compiler joins bytes with it."""
    last, *modifiers = o[2].split()
    chosen = dict(word.split(":") for word in modifiers)
    if chosen["dst_unused"] != "UNUSED_PAD":
        raise MachineFault(f"v_or_b32_sdwa {chosen}")

    def part(operand: str, select: str) -> Lanes:
        shift, bits = _SELECT[chosen[select]]
        return np.asarray((w.lanes_of(operand) >> U32(shift)) & U32((1 << bits) - 1))

    shift, bits = _SELECT[chosen["dst_sel"]]
    value = (part(o[1], "src0_sel") | part(last, "src1_sel")) & U32((1 << bits) - 1)
    w.set_lanes(o[0], value << U32(shift))


def _nothing(_w: _Wave, _o: tuple[str, ...]) -> None:
    return None


def _shift(value: Lanes) -> Lanes:
    return np.asarray(value.astype(U64) & U64(63))


def _actions() -> dict[str, Action]:
    table: dict[str, Action] = {
        "s_nop": _nothing,
        "s_waitcnt": _nothing,
        "s_mov_b32": lambda w, o: w.set_scalar(o[0], w.scalar_of(o[1])),
        "s_mov_b64": lambda w, o: w.set_scalar(o[0], w.scalar_of(o[1], 2), 2),
        "s_movk_i32": _movk,
        "s_add_u32": _sum32(lambda a, b, _c: a + b),
        "s_addc_u32": _sum32(lambda a, b, c: a + b + c),
        "s_sub_u32": _sum32(lambda a, b, _c: a - b),
        "s_subb_u32": _sum32(lambda a, b, c: a - b - c),
        "s_add_i32": _sum32(lambda a, b, _c: a + b, is_signed=True),
        "s_sub_i32": _sum32(lambda a, b, _c: a - b, is_signed=True),
        "s_mul_i32": _scalar(1, lambda a, b: a * b, sets_scc=False),
        "s_mul_hi_u32": _scalar(1, lambda a, b: a * b >> 32, sets_scc=False),
        "s_lshl_b32": _scalar(1, lambda a, b: a << (b & 31)),
        "s_lshr_b32": _scalar(1, lambda a, b: a >> (b & 31)),
        "s_lshl_b64": lambda w, o: _shift64(w, o, lambda a, b: a << b),
        "s_lshr_b64": lambda w, o: _shift64(w, o, lambda a, b: a >> b),
        "s_ff1_i32_b64": _bit_find,
        "s_bcnt1_i32_b64": _bit_count,
        "s_cselect_b32": lambda w, o: w.set_scalar(o[0], w.scalar_of(o[1] if w.scc else o[2])),
        "s_cselect_b64": lambda w, o: w.set_scalar(o[0], w.scalar_of(o[1] if w.scc else o[2], 2), 2),
        "s_and_saveexec_b64": _saveexec(lambda a, e: a & e),
        "s_or_saveexec_b64": _saveexec(lambda a, e: a | e),
        "s_andn2_saveexec_b64": _saveexec(lambda a, e: a & ~e),
        "s_branch": _jump(lambda _w: True),
        "s_cbranch_scc0": _jump(lambda w: not w.scc),
        "s_cbranch_scc1": _jump(lambda w: bool(w.scc)),
        "s_cbranch_vccz": _jump(lambda w: w.scalar_of("vcc", 2) == 0),
        "s_cbranch_vccnz": _jump(lambda w: w.scalar_of("vcc", 2) != 0),
        "s_cbranch_execz": _jump(lambda w: w.exec_mask() == 0),
        "s_cbranch_execnz": _jump(lambda w: w.exec_mask() != 0),
        "v_mov_b32": _lanes(lambda a: a, 1),
        "v_mov_b64": _lanes(lambda a: a, 1, (2,), 2),
        "v_add_u32": _lanes(lambda a, b: a + b, 2),
        "v_sub_u32": _lanes(lambda a, b: a - b, 2),
        "v_subrev_u32": _lanes(lambda a, b: b - a, 2),
        "v_add3_u32": _lanes(lambda a, b, c: a + b + c, 3),
        "v_mul_lo_u32": _lanes(lambda a, b: a * b, 2),
        "v_mul_hi_u32": _lanes(lambda a, b: a.astype(U64) * b.astype(U64) >> U64(32), 2),
        "v_and_b32": _lanes(lambda a, b: a & b, 2),
        "v_or_b32": _lanes(lambda a, b: a | b, 2),
        "v_xor_b32": _lanes(lambda a, b: a ^ b, 2),
        "v_lshlrev_b16": _lanes(lambda a, b: (b << (a & U32(15))) & U32(0xFFFF), 2),
        "v_lshlrev_b32": _lanes(lambda a, b: b << (a & U32(31)), 2),
        "v_lshrrev_b32": _lanes(lambda a, b: b >> (a & U32(31)), 2),
        "v_lshl_or_b32": _lanes(lambda a, b, c: a << (b & U32(31)) | c, 3),
        "v_lshl_add_u32": _lanes(lambda a, b, c: (a << (b & U32(31))) + c, 3),
        "v_lshlrev_b64": _lanes(lambda a, b: b << _shift(a), 2, (1, 2), 2),
        "v_lshrrev_b64": _lanes(lambda a, b: b >> _shift(a), 2, (1, 2), 2),
        "v_lshl_add_u64": _lanes(lambda a, b, c: (a << (b.astype(U64) & U64(7))) + c, 3, (2, 1, 2), 2),
        "v_or_b32_sdwa": _or_sdwa,
        "v_perm_b32": _lanes(_perm, 3),
        "v_alignbit_b32": _lanes(_alignbit, 3),
        "v_mad_u64_u32": _mad,
        "v_add_co_u32": _carry(lambda a, b, _c: a + b, has_carry_in=False),
        "v_addc_co_u32": _carry(lambda a, b, c: a + b + c, has_carry_in=True),
        "v_sub_co_u32": _carry(lambda a, b, _c: a - b, has_carry_in=False),
        "v_subrev_co_u32": _carry(lambda a, b, _c: b - a, has_carry_in=False),
        "v_subb_co_u32": _carry(lambda a, b, c: a - b - c, has_carry_in=True),
        "v_cndmask_b32": lambda w, o: w.set_lanes(
            o[0], np.where(w.flags_of(o[3]), w.lanes_of(o[2]), w.lanes_of(o[1]))
        ),
        "v_mbcnt_lo_u32_b32": _mbcnt(0),
        "v_mbcnt_hi_u32_b32": _mbcnt(32),
        "v_readfirstlane_b32": lambda w, o: w.set_scalar(o[0], int(w.lanes_of(o[1])[w.first_lane()])),
        "v_readlane_b32": lambda w, o: w.set_scalar(o[0], int(w.lanes_of(o[1])[w.scalar_of(o[2]) & 63])),
        "ds_bpermute_b32": _Wave.ds_bpermute_b32,
        "global_atomic_add_x2": _Wave.global_atomic_add_x2,
    }
    for name, compute in (
        ("and", lambda a, b: a & b),
        ("or", lambda a, b: a | b),
        ("xor", lambda a, b: a ^ b),
        ("andn2", lambda a, b: a & ~b),
    ):
        for words in (1, 2):
            table[f"s_{name}_b{32 * words}"] = _scalar(words, compute)
    tests: dict[str, tuple[Any, Any]] = {
        "eq": (lambda a, b: a == b, np.equal),
        "lg": (lambda a, b: a != b, None),
        "ne": (None, np.not_equal),
        "gt": (lambda a, b: a > b, np.greater),
        "ge": (lambda a, b: a >= b, np.greater_equal),
        "lt": (lambda a, b: a < b, np.less),
        "le": (lambda a, b: a <= b, np.less_equal),
    }
    for name, (scalar, vector) in tests.items():
        for words in (1, 2):
            if scalar:
                table[f"s_cmp_{name}_u{32 * words}"] = _compare(words, scalar)
            if vector:
                for letter in "iu":
                    table[f"v_cmp_{name}_{letter}{32 * words}"] = _vector_compare(
                        vector, words, is_signed=letter == "i"
                    )
    for name, size in (("ubyte", 1), ("dword", 4), ("dwordx2", 8), ("dwordx4", 16)):
        table[f"global_load_{name}"] = lambda w, o, size=size: w.global_load(o, size)  # type: ignore[misc]
        stored = name.replace("ubyte", "byte")
        table[f"global_store_{stored}"] = lambda w, o, size=size: w.global_store(o, size)  # type: ignore[misc]
    for name, words in (("dword", 1), ("dwordx2", 2), ("dwordx4", 4), ("dwordx8", 8)):
        table[f"s_load_{name}"] = lambda w, o, words=words: w.scalar_load(o, words)  # type: ignore[misc]
    return table


def _shift64(w: _Wave, o: tuple[str, ...], compute: Callable[[int, int], int]) -> None:
    value = compute(w.scalar_of(o[1], 2), w.scalar_of(o[2]) & 63) & MASK64
    w.set_scalar(o[0], value, 2)
    w.scc = int(value != 0)


_ACTIONS = _actions()
_ENCODING = re.compile(r"_e(32|64)$")


def _action(name: str) -> Action:
    found = _ACTIONS.get(_ENCODING.sub("", name))
    if found is None:
        raise MachineFault(f"instruction {name} is not known here")
    return found
