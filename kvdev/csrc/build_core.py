"""cffi builder of ``kvdev._core``: every ``*.c`` beside this file, declared by the headers' cdef sections.

A header states its public API once: what stands between the lines ``/* cdef begin */`` and
``/* cdef end */`` is given to cffi verbatim, the rest (asserts, inlines) only to the compiler.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
CDEF = re.compile(r"/\* cdef begin \*/\n(.*?)/\* cdef end \*/", re.S)


def headers() -> list[Path]:
    """Headers with a cdef section, io.h first (the others use its structs), then by name."""
    found = [path for path in HERE.glob("*.h") if CDEF.search(path.read_text())]
    return sorted(found, key=lambda path: (path.name != "io.h", path.name))


def compile_flags() -> list[str]:
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fno-strict-aliasing", "-fvisibility=hidden", "-pthread"]
    if os.environ.get("KVDEV_SANITIZE"):
        flags += [
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
            "-fno-omit-frame-pointer",
            "-g",
            "-O1",
        ]
    return flags


ffibuilder = FFI()
for header in headers():
    for section in CDEF.findall(header.read_text()):
        ffibuilder.cdef(section)

# Relative paths: setuptools refuses absolute sources when building an sdist or editable install.
_root = Path.cwd()
ffibuilder.set_source(
    "kvdev._core",
    "\n".join(f'#include "{header.name}"' for header in headers()),
    sources=[os.path.relpath(path, _root) for path in sorted(HERE.glob("*.c"))],
    depends=[os.path.relpath(path, _root) for path in sorted(HERE.glob("*.h"))],
    include_dirs=[os.path.relpath(HERE, _root)],
    extra_compile_args=compile_flags(),
    extra_link_args=[
        "-pthread",
        "-ldl",
        "-lm",
        *(["-fsanitize=address,undefined"] if os.environ.get("KVDEV_SANITIZE") else []),
    ],
    py_limited_api=True,
)

if __name__ == "__main__":
    sys.exit("run pip install -e . ; this file only describes the module")
