"""The source of the GPU page kernels: its text, the names of its kernels, and what identifies a build of it.

Not here: compiling it (``kvdev_kernels.gpu_compile``).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

SOURCE_PATH = Path(__file__).with_name("hip") / "pages.hip"

SUM_KERNEL = "kvdev_sum"
CHECK_KERNEL = "kvdev_check"
KERNEL_NAMES = (
    "kvdev_pack16",
    "kvdev_pack16_sum",
    "kvdev_unpack16",
    "kvdev_unpack16_sum",
    "kvdev_pack4",
    "kvdev_unpack4",
    "kvdev_pack1",
    "kvdev_unpack1",
    SUM_KERNEL,
    CHECK_KERNEL,
)


@lru_cache(maxsize=1)
def source_text() -> str:
    """The HIP C++ text; CUDA compiles the same."""
    return SOURCE_PATH.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """BLAKE2b of the text, in hexadecimal."""
    return hashlib.blake2b(source_text().encode(), digest_size=16).hexdigest()


def move_kernel(width: int, *, is_pack: bool, has_sum: bool) -> str:
    """The kernel that moves units of ``width`` bytes; only 16-byte kernels sum on the way."""
    return f"kvdev_{'pack' if is_pack else 'unpack'}{width}{'_sum' if has_sum else ''}"
