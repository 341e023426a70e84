"""The NumPy layouts and the C structs are one layout."""

from __future__ import annotations

import numpy as np
import pytest

from kvdev._core import ffi, lib
from kvdev.native.io import IO_DONE_DTYPE, IO_DTYPE, IO_GROUP_DTYPE


@pytest.mark.parametrize(
    ("dtype", "struct"),
    [
        (IO_DTYPE, "struct kvdev_io"),
        (IO_DONE_DTYPE, "struct kvdev_io_done"),
        (IO_GROUP_DTYPE, "struct kvdev_io_group"),
    ],
)
def test_dtype_matches_the_c_struct(dtype: np.dtype[np.void], struct: str) -> None:
    assert dtype.itemsize == ffi.sizeof(struct)
    assert dtype.names is not None and dtype.fields is not None
    for name in dtype.names:
        assert dtype.fields[name][1] == ffi.offsetof(struct, name), name


def test_sizes_seen_by_the_compiler() -> None:
    assert (lib.kvdev_io_size(), lib.kvdev_io_done_size(), lib.kvdev_io_group_size()) == (64, 56, 64)
