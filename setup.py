"""Build description: packages live in three source roots, the C core is one abi3 cffi module."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
_match = re.search(r'__version__ = "([^"]+)"', (ROOT / "kvdev" / "__init__.py").read_text())
assert _match, "kvdev/__init__.py states __version__"

setup(
    version=_match.group(1),
    packages=[
        *find_packages(".", include=["kvdev", "kvdev.*", "spdk_rpc", "spdk_rpc.*"]),
        *find_packages("kernels"),
        *find_packages("tools"),
    ],
    package_dir={
        "kvdev_kernels": "kernels/kvdev_kernels",
        "kvdev_tools": "tools/kvdev_tools",
    },
    package_data={
        "kvdev": ["py.typed"],
        "spdk_rpc": ["py.typed"],
        "kvdev_kernels": ["hip/pages.hip", "hip/shim.h"],
    },
    include_package_data=False,
    cffi_modules=["kvdev/csrc/build_core.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,
)
