"""Tensors: address, shape, strides and device of what a caller holds, seen without a copy and without importing torch.

Not here: what the axes mean (``kvdev_kernels.axes``).
Trust: tensors are the caller's; raises only ShapeError for what is none or has no memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdev.buffers import AddressedPages
from kvdev.errors import UsageError
from kvdev.geometry import dtype_name
from kvdev_kernels.errors import ShapeError

CPU = "cpu"

# Unsigned integers that engines and NumPy use for elements they have no type for (bfloat16, float8).
RAW_DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}

_TORCH_METHODS = ("data_ptr", "stride", "element_size", "dtype", "shape")
# DLPack's numbers of devices whose memory a processor reaches: plain and pinned, the latter by CUDA's and ROCm's word.
_DLPACK_HOST_DEVICES = (1, 3, 11)


@dataclass(frozen=True)
class TensorView:
    """What a layout needs of a tensor; ``owner`` keeps its memory alive."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_size_bytes: int
    dtype: str
    device: str
    """``cpu``, or the device as torch writes it, for example ``cuda:0`` (ROCm's devices have that name too)."""
    is_writable: bool
    owner: object


def view_of(tensor: Any, name: str) -> TensorView:
    """A NumPy array, anything with torch's tensor methods, or anything with DLPack in memory the processor reaches."""
    if isinstance(tensor, np.ndarray):
        return TensorView(
            name,
            int(tensor.__array_interface__["data"][0]),
            tensor.shape,
            tensor.strides,
            tensor.itemsize,
            tensor.dtype.name,
            CPU,
            bool(tensor.flags.writeable),
            tensor,
        )
    if all(hasattr(tensor, method) for method in _TORCH_METHODS):
        size = int(tensor.element_size())
        device = getattr(tensor, "device", CPU)
        address = int(tensor.data_ptr())
        if address == 0 and all(int(extent) for extent in tensor.shape):
            raise ShapeError(f"{name}: device", expected="a device with memory", got=device)
        return TensorView(
            name,
            address,
            tuple(int(extent) for extent in tensor.shape),
            tuple(int(stride) * size for stride in tensor.stride()),
            size,
            str(tensor.dtype).rpartition(".")[2],
            CPU if str(device).partition(":")[0] == CPU else str(device),
            True,
            tensor,
        )
    if hasattr(tensor, "__dlpack__"):
        return view_of(_from_dlpack(tensor, name), name)
    raise ShapeError(name, expected="a NumPy array or torch tensor", got=type(tensor).__name__)


def is_tensor(value: Any) -> bool:
    """Whether ``view_of`` takes it, other than a NumPy array."""
    return all(hasattr(value, method) for method in _TORCH_METHODS) or hasattr(value, "__dlpack__")


def tensor_pages(tensor: Any, size_bytes: int, *, is_written: bool) -> tuple[AddressedPages, str]:
    """The rows of a tensor ``(n, size_bytes)`` of bytes as pages, and the device they are on."""
    view = view_of(tensor, "pages")
    if is_written and not view.is_writable:
        raise ShapeError(
            "pages",
            expected="writable memory",
            got="a read-only tensor, or DLPack before 1.0, which does not say",
        )
    shape, strides = view.shape, view.strides_bytes
    if len(shape) != 2 or shape[1] != size_bytes or view.element_size_bytes != 1:
        raise ShapeError(
            "pages", expected=f"a (n, {size_bytes}) tensor of uint8", got=f"{shape} {view.dtype}"
        )
    if (shape[1] > 1 and strides[1] != 1) or (shape[0] > 1 and strides[0] < size_bytes):
        raise ShapeError("pages: strides", expected="rows that are contiguous and apart", got=strides)
    addresses = np.uint64(view.address) + np.arange(shape[0], dtype=np.uint64) * np.uint64(max(strides[0], 0))
    return AddressedPages(addresses, size_bytes, view.owner), view.device


def stream_number(stream: Any, tensor: object) -> int | None:
    """The stream that moves come after: a number, torch's stream, or else the current one of a torch tensor's device.

    None where nobody says: a tensor of someone else, without a stream.
    """
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return int(stream)
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if stream is not None:
        raise ShapeError("stream", expected="a stream's number or torch's stream", got=type(stream).__name__)
    torch = sys.modules.get("torch")  # whoever has a torch tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor):
        return None
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _from_dlpack(tensor: Any, name: str) -> Any:
    kind = tensor.__dlpack_device__()[0] if hasattr(tensor, "__dlpack_device__") else 1
    if int(kind) not in _DLPACK_HOST_DEVICES:
        raise ShapeError(
            f"{name}: device",
            expected="memory the processor reaches, or a torch tensor of that device",
            got=f"DLPack device {int(kind)}",
        )
    try:
        return np.from_dlpack(tensor)
    except (BufferError, TypeError, RuntimeError) as error:
        raise ShapeError(name, expected="a tensor in CPU memory", got=str(error)) from error


def check_dtype(view: TensorView, dtype: str, size_bytes: int) -> None:
    """Raise ShapeError unless the elements are of this type, or raw integers of its size."""
    try:
        matches = dtype_name(view.dtype) == dtype
    except UsageError:
        matches = False
    if not matches and RAW_DTYPES.get(view.dtype) != size_bytes:
        raise ShapeError(
            f"{view.name}: dtype",
            expected=f"{dtype} or unsigned integers of {size_bytes} bytes",
            got=view.dtype,
        )


def check_one_device(views: list[TensorView]) -> str:
    """The device of all of them; ShapeError names the first that is elsewhere."""
    for view in views:
        if view.device != views[0].device:
            raise ShapeError(
                f"{view.name}: device", expected=f"{views[0].device} as {views[0].name}", got=view.device
            )
    return views[0].device
