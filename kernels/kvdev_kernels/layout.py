"""Layouts: where the canonical bytes of a page lie in an engine's paged tensors, as planes times runs.

A plane is one layer's keys, values or latents: a base address and, shared by all planes, the strides of block, token
and head. What is contiguous in memory and in the page alike becomes one run. Everything comes from the shapes, strides
and dtypes of the tensors themselves; an adapter only says which axis is which.
Not here: moving bytes (``kvdev_kernels.cpu``, ``kvdev_kernels.reference``).
Trust: tensors and block tables are the caller's; raises only ShapeError for bad ones, before memory is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.errors import UsageError
from kvdev.geometry import Geometry, dtype_name
from kvdev_kernels.errors import ShapeError

AXIS_NAMES = {
    "L": "layer",
    "K": "keys and values",
    "B": "block",
    "N": "token in block",
    "H": "KV head",
    "D": "element",
    "C": "keys and values of a head side by side",
}

FUSED_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of vLLM's fused cross-layer tensor; ``C`` holds a head's keys, then its values (mla: the latent)."""

# Unsigned integers that engines and NumPy use for elements they have no type for (bfloat16, float8).
_RAW_DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class TensorView:
    """What a layout needs of a tensor; ``owner`` keeps its memory alive."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_size_bytes: int
    dtype: str
    is_writable: bool
    owner: object


def view_of(tensor: Any, name: str) -> TensorView:
    """A NumPy array or anything with torch's tensor methods, seen without a copy."""
    if isinstance(tensor, np.ndarray):
        return TensorView(
            name,
            int(tensor.__array_interface__["data"][0]),
            tensor.shape,
            tensor.strides,
            tensor.itemsize,
            tensor.dtype.name,
            bool(tensor.flags.writeable),
            tensor,
        )
    if all(hasattr(tensor, method) for method in ("data_ptr", "stride", "element_size", "dtype", "shape")):
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        if device != "cpu":
            raise ShapeError(f"{name}: device", expected="cpu", got=device)
        size = int(tensor.element_size())
        return TensorView(
            name,
            int(tensor.data_ptr()),
            tuple(int(extent) for extent in tensor.shape),
            tuple(int(stride) * size for stride in tensor.stride()),
            size,
            str(tensor.dtype).rpartition(".")[2],
            True,
            tensor,
        )
    if hasattr(tensor, "__dlpack__"):
        try:
            return view_of(np.from_dlpack(tensor), name)
        except (BufferError, TypeError, RuntimeError) as error:
            raise ShapeError(name, expected="a tensor in CPU memory", got=str(error)) from error
    raise ShapeError(name, expected="a NumPy array or torch tensor", got=type(tensor).__name__)


@dataclass(frozen=True)
class _Plane:
    """One plane before merging: its first byte and (extent, stride in bytes) of each axis."""

    name: str
    address: int
    block: tuple[int, int]
    token: tuple[int, int]
    head: tuple[int, int]


@dataclass(frozen=True)
class PagedLayout:
    """Planes times runs of one engine's paged tensors for one geometry; valid once constructed.

    Address of (plane, block, token, head) = plane_addresses[plane] + block x block_stride + token x token_stride
    + head x head_stride; ``run_size_bytes`` bytes from there on are contiguous. Merged axes have extent 1.
    The layout keeps the tensors alive. Their owner keeps them at rest during a call.
    """

    geometry: Geometry
    plane_addresses: npt.NDArray[np.int64]
    block_count: int
    block_size: int
    """Tokens per block."""
    block_stride: int
    token_count: int
    token_stride: int
    head_count: int
    head_stride: int
    run_size_bytes: int
    row_strides: tuple[int, int]
    """Strides of token and head before merging, for the reference."""
    is_writable: bool
    owners: tuple[object, ...]

    @property
    def blocks_per_page(self) -> int:
        return self.geometry.tokens_per_page // self.block_size

    @property
    def runs_per_plane(self) -> int:
        """Runs of one page in one plane, before neighbouring blocks are merged."""
        return self.blocks_per_page * self.token_count * self.head_count

    @property
    def is_line_aligned(self) -> bool:
        """Whether every run starts on a cache line, as streaming stores into the tensors need."""
        used = [self.block_stride] if self.block_count > 1 else []
        used += [self.token_stride] if self.token_count > 1 else []
        used += [self.head_stride] if self.head_count > 1 else []
        return not any(value % 64 for value in used) and not bool((self.plane_addresses % 64).any())

    @classmethod
    def from_axes(cls, geometry: Geometry, tensors: Any, axes: str) -> PagedLayout:
        """The layout of tensors whose axes are named by letters, outermost first (``AXIS_NAMES``).

        Args:
            tensors: one tensor when ``axes`` has L; else one per layer when it has K or C or the geometry is mla;
                else two per layer: keys and values of layer 0, of layer 1, …
            axes: for example ``KBNHD``. Without N a block is one token; without H there is one head.
        """
        _check_axes(geometry, axes)
        sequence = [tensors] if "L" in axes else list(tensors)
        has_both = geometry.attention == "mla" or "K" in axes or "C" in axes
        expected = 1 if "L" in axes else geometry.layer_count * (1 if has_both else 2)
        if len(sequence) != expected:
            raise ShapeError("tensors", expected=f"{expected} of axes {axes}", got=len(sequence))
        planes: list[_Plane] = []
        views = [view_of(tensor, f"tensors[{index}]") for index, tensor in enumerate(sequence)]
        for view in views:
            planes += _planes_of(geometry, view, axes)
        return _merge(geometry, planes, views)

    @classmethod
    def from_vllm_nhd(cls, geometry: Geometry, kv_caches: Sequence[Any]) -> PagedLayout:
        """Per layer ``[2, blocks, tokens, heads, elements]`` (flash attention); strides may be permuted."""
        return cls.from_axes(geometry, kv_caches, "KBNHD")

    @classmethod
    def from_vllm_hnd(cls, geometry: Geometry, kv_caches: Sequence[Any]) -> PagedLayout:
        """Per layer ``[2, blocks, heads, tokens, elements]``."""
        return cls.from_axes(geometry, kv_caches, "KBHND")

    @classmethod
    def from_flashinfer_nhd(cls, geometry: Geometry, kv_caches: Sequence[Any]) -> PagedLayout:
        """Per layer ``[blocks, 2, tokens, heads, elements]``."""
        return cls.from_axes(geometry, kv_caches, "BKNHD")

    @classmethod
    def from_flashinfer_hnd(cls, geometry: Geometry, kv_caches: Sequence[Any]) -> PagedLayout:
        """Per layer ``[blocks, 2, heads, tokens, elements]``."""
        return cls.from_axes(geometry, kv_caches, "BKHND")

    @classmethod
    def from_block_outermost(cls, geometry: Geometry, tensor: Any) -> PagedLayout:
        """One tensor ``[blocks, layers, 2, tokens, heads, elements]``: a block is contiguous over all layers."""
        return cls.from_axes(geometry, tensor, "BLKNHD")

    @classmethod
    def from_fused(cls, geometry: Geometry, tensor: Any, order: str) -> PagedLayout:
        """One tensor over all layers in one of ``FUSED_ORDERS``."""
        if order not in FUSED_ORDERS:
            raise ShapeError("order", expected="one of " + ", ".join(FUSED_ORDERS), got=repr(order))
        return cls.from_axes(geometry, tensor, order)

    @classmethod
    def from_vllm_mla(cls, geometry: Geometry, kv_caches: Sequence[Any]) -> PagedLayout:
        """Per layer ``[blocks, tokens, latent]``."""
        return cls.from_axes(geometry, kv_caches, "BND")

    @classmethod
    def from_sglang_mha(
        cls, geometry: Geometry, k_buffers: Sequence[Any], v_buffers: Sequence[Any]
    ) -> PagedLayout:
        """Token pools, per layer ``[slots, heads, elements]`` for keys and for values; a block is one slot."""
        if len(k_buffers) != len(v_buffers):
            raise ShapeError(
                "v_buffers", expected=f"{len(k_buffers)}, as many as k_buffers", got=len(v_buffers)
            )
        pairs = [tensor for pair in zip(k_buffers, v_buffers, strict=True) for tensor in pair]
        return cls.from_axes(geometry, pairs, "BHD")

    @classmethod
    def from_sglang_mla(cls, geometry: Geometry, kv_buffers: Sequence[Any]) -> PagedLayout:
        """Token pools, per layer ``[slots, 1, latent]``; a block is one slot."""
        return cls.from_axes(geometry, kv_buffers, "BHD")

    def check_table(self, block_table: Any, page_count: int, *, is_written: bool) -> npt.NDArray[np.int64]:
        """The block table as ``(page_count, blocks_per_page) int64``, every index in range.

        A flat table is cut into pages. ``is_written`` refuses a block that is named twice: two pages would be
        written over each other.
        """
        try:
            table = np.asarray(block_table)
        except ValueError as error:
            raise ShapeError("block_table: shape", expected="rows of one length", got=error) from error
        if not np.issubdtype(table.dtype, np.integer):
            raise ShapeError("block_table: dtype", expected="whole numbers", got=table.dtype)
        shape = (page_count, self.blocks_per_page)
        if table.shape != shape and not (table.ndim == 1 and table.size == shape[0] * shape[1]):
            raise ShapeError("block_table: shape", expected=shape, got=table.shape)
        if table.size:
            low, high = int(table.min()), int(table.max())
            if low < 0 or high >= self.block_count:
                bad = low if low < 0 else high
                raise ShapeError("block_table: index", expected=f"0 to {self.block_count - 1}", got=bad)
        indices = np.ascontiguousarray(table.reshape(shape), dtype=np.int64)
        if is_written:
            seen = np.zeros(self.block_count, np.bool_)
            seen[indices.ravel()] = True
            if np.count_nonzero(seen) != indices.size:
                counts = np.bincount(indices.ravel())
                raise ShapeError(
                    "block_table: index",
                    expected="every block once",
                    got=f"block {int(counts.argmax())} twice",
                )
        return indices


def _check_axes(geometry: Geometry, axes: str) -> None:
    if len(set(axes)) != len(axes) or not set(axes) <= set(AXIS_NAMES) or "B" not in axes:
        raise ShapeError("axes", expected=f"distinct letters of {''.join(AXIS_NAMES)} with B", got=repr(axes))
    if ("D" in axes) == ("C" in axes):
        raise ShapeError("axes", expected="one of D and C", got=repr(axes))
    if "K" in axes and ("C" in axes or geometry.attention == "mla"):
        raise ShapeError("axes", expected="no K beside C or for mla", got=repr(axes))


def _planes_of(geometry: Geometry, view: TensorView, axes: str) -> list[_Plane]:
    """The planes of one tensor, in canonical order, after checking each axis against the geometry."""
    _check_dtype(geometry, view)
    if len(view.shape) != len(axes):
        raise ShapeError(
            f"{view.name}: rank",
            expected=f"{len(axes)}: " + ", ".join(AXIS_NAMES[axis] for axis in axes),
            got=f"{len(view.shape)}: shape {view.shape}",
        )
    axis = {name: (view.shape[i], view.strides_bytes[i]) for i, name in enumerate(axes)}
    size = geometry.dtype_size_bytes
    row = geometry.head_size * size
    planes_in_c = geometry.planes_per_layer
    required = {
        "L": geometry.layer_count,
        "K": 2,
        "H": geometry.kv_head_count,
        "D": geometry.head_size,
        "C": geometry.head_size * planes_in_c,
    }
    for name, extent in required.items():
        if name in axis and axis[name][0] != extent:
            raise ShapeError(f"{view.name}: {AXIS_NAMES[name]} extent", expected=extent, got=axis[name][0])
    if "H" not in axis and geometry.kv_head_count != 1:
        raise ShapeError(f"{view.name}: axes", expected="H, as there are several KV heads", got=repr(axes))
    tokens = axis.get("N", (1, 0))
    if axis["B"][0] < 1 or tokens[0] < 1 or geometry.tokens_per_page % tokens[0]:
        raise ShapeError(
            f"{view.name}: tokens per block",
            expected=f"a divisor of the page's {geometry.tokens_per_page} tokens, in one block or more",
            got=f"{tokens[0]} in {axis['B'][0]} blocks",
        )
    _check_strides(view, axes, size)
    planes = []
    for layer in range(axis.get("L", (1, 0))[0]):
        at_layer = view.address + layer * axis.get("L", (1, 0))[1]
        if "K" in axis:
            starts = [at_layer, at_layer + axis["K"][1]]
        elif "C" in axis:
            starts = [at_layer + row * index for index in range(planes_in_c)]
        else:
            starts = [at_layer]
        planes += [_Plane(view.name, start, axis["B"], tokens, axis.get("H", (1, 0))) for start in starts]
    return planes


def _check_dtype(geometry: Geometry, view: TensorView) -> None:
    try:
        matches = dtype_name(view.dtype) == geometry.dtype
    except UsageError:
        matches = False
    if not matches and _RAW_DTYPES.get(view.dtype) != geometry.dtype_size_bytes:
        raise ShapeError(
            f"{view.name}: dtype",
            expected=f"{geometry.dtype} or unsigned integers of {geometry.dtype_size_bytes} bytes",
            got=view.dtype,
        )


def _check_strides(view: TensorView, axes: str, size: int) -> None:
    """Elements of a head are contiguous, and no two elements share memory."""
    last = max(axes.find("D"), axes.find("C"))
    if view.shape[last] > 1 and view.strides_bytes[last] != size:
        raise ShapeError(
            f"{view.name}: {AXIS_NAMES[axes[last]]} stride",
            expected=f"{size} bytes (contiguous elements)",
            got=f"{view.strides_bytes[last]} bytes",
        )
    # With all other strides at least the span of what lies inside them, no two indices meet.
    order = sorted(
        (stride, extent, name)
        for name, stride, extent in zip(axes, view.strides_bytes, view.shape, strict=True)
        if extent > 1
    )
    span = size
    for stride, extent, name in order:
        if stride < span:
            raise ShapeError(
                f"{view.name}: {AXIS_NAMES[name]} stride",
                expected=f"at least {span} bytes, the size of what lies inside",
                got=f"{stride} bytes",
            )
        span = stride * (extent - 1) + span


def _merge(geometry: Geometry, planes: list[_Plane], views: list[TensorView]) -> PagedLayout:
    """Check that the planes agree, and merge contiguous axes into runs."""
    first = planes[0]
    for plane in planes[1:]:
        for field in ("block", "token", "head"):
            if getattr(plane, field) != getattr(first, field):
                raise ShapeError(
                    f"{plane.name}: {field} extent and stride",
                    expected=f"{getattr(first, field)} as {first.name}",
                    got=getattr(plane, field),
                )
    addresses = np.array([plane.address for plane in planes], dtype=np.int64)
    if np.unique(addresses).size != addresses.size:
        raise ShapeError("tensors", expected="distinct memory for every layer", got="the same address twice")
    run = geometry.head_size * geometry.dtype_size_bytes
    (tokens, token_stride), (heads, head_stride) = first.token, first.head
    row_strides = (token_stride, head_stride)
    block_size = tokens
    if heads == 1 or head_stride == run:
        run, heads, head_stride = run * heads, 1, 0
        if tokens == 1 or token_stride == run:
            run, tokens, token_stride = run * tokens, 1, 0
    return PagedLayout(
        geometry=geometry,
        plane_addresses=addresses,
        block_count=first.block[0],
        block_size=block_size,
        block_stride=first.block[1],
        token_count=tokens,
        token_stride=token_stride,
        head_count=heads,
        head_stride=head_stride,
        run_size_bytes=run,
        row_strides=row_strides,
        is_writable=all(view.is_writable for view in views),
        owners=tuple(view.owner for view in views),
    )
