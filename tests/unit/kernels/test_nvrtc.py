"""The kernels compiled for sm_90 by NVRTC itself, which needs no GPU; skipped where its package is not installed."""

from __future__ import annotations

import struct

import pytest

from kvdev_kernels.driver_calls import NVIDIA
from kvdev_kernels.errors import BackendUnavailableError
from kvdev_kernels.gpu_compile import Compiler
from kvdev_kernels.gpu_source import KERNEL_NAMES

REGISTERS_MAX = 64
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
_WITH_SIZE = 0x04


@pytest.fixture
def compiler() -> Compiler:
    try:
        return Compiler(NVIDIA)
    except BackendUnavailableError as error:
        pytest.skip(f"NVRTC is missing (pip install 'kvdev[nvrtc]'): {error.reason}")


class Cubin:
    """Sections and symbols of a code object, and what is said of each kernel."""

    def __init__(self, image: bytes) -> None:
        assert image[:6] == b"\x7fELF\x02\x01"
        (start,) = struct.unpack_from("<Q", image, 40)
        _, count, names_index = struct.unpack_from("<HHH", image, 58)
        rows = [_SECTION.unpack_from(image, start + index * _SECTION.size) for index in range(count)]
        bodies = [image[row[4] : row[4] + row[5]] for row in rows]

        def text(table: bytes, at: int) -> str:
            return table[at : table.index(b"\0", at)].decode()

        self.sections = {
            text(bodies[names_index], row[0]): (row, body) for row, body in zip(rows, bodies, strict=True)
        }
        row, table = self.sections[".symtab"]
        self.symbols = [text(bodies[row[6]], each[0]) for each in _SYMBOL.iter_unpack(table)]

    def attribute(self, number: int) -> dict[str, int]:
        """Of each kernel, from the section that the driver reads."""
        info, at, found = self.sections[".nv.info"][1], 0, {}
        while at < len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            at += 4
            if form == _WITH_SIZE and attribute == number:
                symbol, value = struct.unpack_from("<II", info, at)
                found[self.symbols[symbol]] = value
            at += size if form == _WITH_SIZE else 0
        return found


def test_source_when_compiled_by_nvrtc_then_all_kernels_without_spills(compiler: Compiler) -> None:
    cubin = Cubin(compiler.compile("sm_90"))
    kernels = sorted(name.removeprefix(".text.") for name in cubin.sections if name.startswith(".text."))
    assert kernels == sorted(KERNEL_NAMES)
    frames, registers = cubin.attribute(_FRAME_SIZE), cubin.attribute(_REGISTER_COUNT)
    assert {frames[name] for name in KERNEL_NAMES} == {0}, (
        "bytes that do not fit registers are in local memory"
    )
    assert all(0 < registers[name] <= REGISTERS_MAX for name in KERNEL_NAMES), registers


def test_arch_when_nvrtc_does_not_know_it_then_its_own_words(compiler: Compiler) -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"no code object for sm_1: nvrtc: error: invalid value"
    ):
        compiler.compile("sm_1")
