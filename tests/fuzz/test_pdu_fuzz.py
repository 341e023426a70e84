"""The fuzzer of the PDU layer itself: it passes the core as it is, and catches it broken on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "kvdev" / "csrc"
FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]
FLAGS += ["-fno-omit-frame-pointer", "-fno-strict-aliasing", "-pthread"]

long = pytest.mark.skipif(
    not os.environ.get("KVDEV_LONG"),
    reason="builds the core many times: KVDEV_LONG=1; CI runs make fuzz-short",
)

# What is taken out of the core: file, text, what stands there instead.
CANARIES = {
    "data beyond the buffer": ("pdu.c", "if (end > cmd->length)", "if (0)"),
    "data for a write": ("pdu.c", "if (cmd->direction != KVDEV_DIR_C2H)\n", "if (0)\n"),
    "a gap in the data": ("pdu.c", "if (pdu->datao != cmd->received)", "if (0)"),
    "tag 0": ("pdu.c", "ttag >= 1 && ttag <= count ? ttag - 1", "ttag <= count ? (ttag ? ttag - 1 : 0)"),
    "PLEN of data": ("pdu.c", "if (pdu->plen != whole)", "if (0)"),
    "more R2Ts than agreed": ("pdu.c", "if (cmd->r2t_count > maxr2t)", "if (0)"),
    "FES of a Term PDU": ("pdu.c", "kvdev_store_le16(buf + AT_FES, fault->fes);", ""),
    "short reads": ("qpair.c", "} else if (!has_moved_all && !req->may_be_short) {", "} else if (0) {"),
    "data digests": ("qpair.c", "if (req->has_ddgst_error) {", "if (0) {"),
    "generation of a CID": ("qpair.c", " || qp->requests[slot].cid != cid)", ")"),
    "MAXH2CDATA": ("qpair.c", "uint32_t len = left < limit ? left : limit;", "uint32_t len = left;"),
    "memory of a PDU half sent": (
        "qpair.c",
        "    if (req->tx_items) {\n        req->state",
        "    if (0) {\n        req->state",
    ),
    "digest of a capsule": ("target_command.c", "if (!rx->ddgst_ok)", "if (0)"),
    "buffers given back": (
        "target_command.c",
        "poller->buffers[poller->buffer_count++] = request->buffer;",
        "",
    ),
}


def compile_object(source: Path, target: Path, *, is_core: bool) -> None:
    seam = ["-include", str(ROOT / "tests/fuzz/seam.h")] if is_core else []
    command = ["gcc", *FLAGS, f"-I{source.parent}", f"-I{CSRC}", f"-I{ROOT}/tests/fuzz", *seam]
    subprocess.run([*command, "-c", "-o", target, source], check=True)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Objects of the core and of the fuzzer, built once."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is missing: apt-get install gcc libc6-dev")
    folder = tmp_path_factory.mktemp("fuzz")
    for source in sorted(CSRC.glob("*.c")):
        compile_object(source, folder / f"core_{source.stem}.o", is_core=True)
    for source in sorted((ROOT / "tests/fuzz").glob("*.c")):
        compile_object(source, folder / f"fuzz_{source.stem}.o", is_core=False)
    return folder


def link_and_run(objects: list[Path], program: Path, *, mutated: int) -> subprocess.CompletedProcess[str]:
    subprocess.run(["gcc", *FLAGS, "-o", program, *objects, "-lm"], check=True)
    return subprocess.run(
        [program, "--seed", "1", "--mutated", str(mutated)], capture_output=True, text=True, timeout=1200
    )


@pytest.mark.parametrize("name", CANARIES)
def test_canary_when_the_core_changes_then_what_it_takes_out_is_still_there(name: str) -> None:
    file, text, _ = CANARIES[name]
    assert text in (CSRC / file).read_text(), f"{file} has no {text!r} any more: change the canary with it"


@long
def test_fuzzer_when_the_core_is_whole_then_it_finds_nothing(objects: Path, tmp_path: Path) -> None:
    result = link_and_run(sorted(objects.glob("*.o")), tmp_path / "whole", mutated=100_000)
    assert result.returncode == 0, result.stderr
    assert "mutated" in result.stdout


@long
@pytest.mark.parametrize("name", CANARIES)
def test_fuzzer_when_a_check_is_taken_out_then_it_is_caught(name: str, objects: Path, tmp_path: Path) -> None:
    file, text, instead = CANARIES[name]
    (tmp_path / file).write_text((CSRC / file).read_text().replace(text, instead, 1))
    compile_object(tmp_path / file, tmp_path / "broken.o", is_core=True)
    kept = [path for path in sorted(objects.glob("*.o")) if path.name != f"core_{Path(file).stem}.o"]
    result = link_and_run([*kept, tmp_path / "broken.o"], tmp_path / "broken", mutated=100_000)
    assert result.returncode != 0
    assert "it happened with --seed" in result.stderr
