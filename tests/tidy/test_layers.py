"""The layering of the design, the core's discipline and the repository's promises, read off the tree."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = {"errors", "units", "clock", "stats", "uri", "geometry", "buffers", "keys", "drill", "opcode", "files"}

# package -> the packages of kvdev it may import, besides the base and itself
ALLOWED: dict[str, set[str]] = {
    "wire": set(),
    "security": {"wire"},
    "native": set(),
    "block": {"native"},
    "staging": {"native"},
    "initiator": {"wire", "security", "block", "native"},
    "vhost": {"wire", "block", "native", "staging"},
    "target": {"wire", "security", "block", "native"},
    "store": {"block", "native"},
    "pool": {"store", "block", "native"},
    "tier": {"store", "block", "native", "staging"},
    "cluster": {"store", "pool", "block", "native"},
    "session": {"wire", "block", "native", "initiator", "vhost", "store", "staging", "pool"},
}


def python_files(*roots: str) -> list[Path]:
    return [path for root in roots for path in sorted((ROOT / root).rglob("*.py")) if "lab" not in path.parts]


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "kvdev").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", python_files("kvdev"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(path)
    if layer in {"testing", "csrc", "__init__"}:
        return
    for module in imported_modules(path):
        parts = module.split(".")
        # The target answers SPDK's RPC with the client's own framing; nothing else of the library knows it.
        assert parts[0] != "spdk_rpc" or layer == "target", f"{path}: imports {module}"
        assert parts[0] != "kvdev_tools", f"{path}: imports {module}"
        assert parts[0] != "kvdev_kernels", f"{path}: the driver library does not know the kernels"
        if parts[0] != "kvdev" or len(parts) < 2 or parts[1] in BASE or parts[1].startswith("__"):
            continue
        if parts[1] == "_core":
            assert layer == "native", f"{path}: only kvdev.native imports kvdev._core"
            continue
        assert layer not in BASE, f"{path}: the base imports only the base, not {module}"
        assert parts[1] == layer or parts[1] in ALLOWED[layer], f"{path}: {layer} must not import {module}"


def test_third_party_imports_are_the_declared_ones() -> None:
    allowed = {"kvdev": {"kvdev", "spdk_rpc", "numpy", "cffi"}, "spdk_rpc": {"spdk_rpc"}}
    for root, extra in allowed.items():
        for path in python_files(root):
            for module in imported_modules(path):
                top = module.split(".")[0]
                if path.name == "build_core.py":
                    continue
                assert top in sys.stdlib_module_names or top in extra, f"{path}: imports {module}"


def test_source_roots_are_not_packages() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tools" / "__init__.py").exists()


def test_every_module_says_what_it_is() -> None:
    for path in python_files("kvdev", "spdk_rpc", "kernels", "tools", "bench"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path}: no module docstring"


def test_the_core_does_not_know_python_and_has_no_mutable_globals() -> None:
    for path in sorted((ROOT / "kvdev" / "csrc").glob("*.[ch]")):
        text = path.read_text()
        assert "Python.h" not in text, path
        for line in text.splitlines():
            mutable = re.match(r"static (?!inline|_Thread_local)[\w\s\*]+\b\w+(\[[^\]]*\])*\s*(=|;)", line)
            assert mutable is None or "const" in line, f"{path}: a mutable global: {line}"


def tracked_text() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def test_no_machine_paths_and_no_leftovers() -> None:
    # Built in pieces, so that this file does not match itself.
    banned = re.compile("|".join(["/wo" + "rk/", "TO" + "DO", "FIX" + "ME", "XX" + "X:", "/tmp/" + "plan"]))
    for path in tracked_text():
        if not path.exists() or path.suffix in {".jsonl", ".png", ".bin", ".hex"} or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not banned.search(line), f"{path}:{number}: {line.strip()}"
