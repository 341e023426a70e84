"""Compiled kernels for processors that are not here: their instructions are in the machine code, others are not."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from kvdev_kernels.cpu import TIER_FEATURES
from kvdev_kernels.cpu_code import TIERS, _Emitter

TRIPLE = {
    "x86": "x86_64-unknown-linux-gnu",
    "arm": "aarch64-unknown-linux-gnu",
    "": "x86_64-unknown-linux-gnu",
}
WANTED = {
    "vpclmul": ("vpclmulqdq", "zmm", "vmovntdq", "prefetcht1"),
    "vpclmul256": ("vpclmulqdq", "ymm", "vmovntdq"),
    "pclmul": ("pclmulqdq", "movntdq"),
    "sse42": ("crc32q",),
    "pmull": ("pmull", "crc32cx", "stnp", "prfm"),
    "armcrc": ("crc32cx",),
    "portable": (),
}
UNWANTED = {
    "vpclmul256": ("zmm",),
    "pclmul": ("ymm", "zmm"),
    "sse42": ("pclmul", "ymm"),
    "portable": ("crc32", "pclmul"),
}


def assembly(name: str) -> str:
    tier = next(tier for tier in TIERS if tier.name == name)
    module = ir.Module(name)
    module.triple = TRIPLE[tier.family]
    for has_store, has_crc in ((True, True), (True, False), (False, True)):
        function = _Emitter(module, tier).move(has_store=has_store, has_crc=has_crc)
        function.linkage = "external"
    _Emitter(module, tier).finish().linkage = "external"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(module.triple)
    except RuntimeError:
        pytest.skip(f"this build of LLVM has no {module.triple}")
    features = ",".join(f"+{feature}" for feature in TIER_FEATURES[name])
    machine = target.create_target_machine(cpu="generic", features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("name", [tier.name for tier in TIERS])
def test_code_when_compiled_for_a_tier_then_its_instructions_and_no_others(name: str) -> None:
    text = assembly(name)
    for word in WANTED[name]:
        assert word in text
    for word in UNWANTED.get(name, ()):
        assert word not in text


def test_tiers_when_listed_then_each_has_its_features() -> None:
    assert [tier.name for tier in TIERS] == list(TIER_FEATURES)
