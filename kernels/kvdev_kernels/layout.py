"""Layouts: where the canonical bytes of a page lie in an engine's paged tensors, as planes times runs.

A plane is one layer's keys, values or latents: an address, a stride from block to block, and the runs of a block, in
the order in which a page has them. Everything comes from the shapes, strides and dtypes of the tensors themselves; an
adapter only says which axis is which.
Not here: what the axes are (``kvdev_kernels.axes``); moving bytes (``kvdev_kernels.cpu``, ``kvdev_kernels.reference``).
Trust: tensors and block tables are the caller's; raises only ShapeError for bad ones, before memory is touched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray
from kvdev.geometry import Geometry
from kvdev_kernels.axes import Axis, Plane, Segment, check_strides, has_keys_and_values, planes_of
from kvdev_kernels.errors import ShapeError
from kvdev_kernels.tensor import TensorView, check_one_device, view_of

FUSED_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of vLLM's fused cross-layer tensor; ``C`` holds a head's keys, then its values (mla: the latent)."""

SGLANG_HOST_AXES = {
    "mha": {
        "layer_first": "KLBHD",
        "page_first": "KBLHD",
        "page_first_direct": "KBLNHD",
        "page_head": "KBHNLD",
    },
    "mla": {"layer_first": "LBHD", "page_first": "BLHD", "page_first_direct": "BLNHD"},
}
"""Axes of SGLang's host pools; a block is a token where there is no N."""

LMCACHE_AXES = {
    "KV_2LTD": "KLB(HD)",
    "KV_T2D": "BK(HD)",
    "KV_2TD": "KB(HD)",
    "KV_MLA_FMT": "HLBD",
}
"""Axes of LMCache's chunks, whose tokens are the blocks; KV_T2D and KV_2TD are one tensor per layer."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunClass:
    """What planes with the same strides have in common: the runs of a block.

    Byte ``offsets[i]`` from a block's start on, ``sizes[i]`` bytes are the next ones of the page.
    """

    block_stride: int
    offsets: Int64Array
    sizes: Int64Array


@dataclass(frozen=True)
class PagedLayout:
    """Planes times runs of one engine's paged tensors for one geometry; valid once constructed.

    Run i of (plane, block) starts at plane_addresses[plane] + block x block_stride + offsets[i]; stride, offsets and
    sizes are those of ``classes[plane_class[plane]]``. Where ``is_regular``, all planes are of one class with runs of
    one size, and the same address is plane_addresses[plane] + block x block_stride + token x token_stride
    + head x head_stride (merged axes have extent 1); otherwise those fields mean nothing.
    The layout keeps the tensors alive. Their owner keeps them at rest during a call.
    """

    geometry: Geometry
    plane_addresses: Int64Array
    plane_class: Int64Array
    classes: tuple[RunClass, ...]
    block_count: int
    block_size: int
    """Tokens per block."""
    is_regular: bool
    block_stride: int
    token_count: int
    token_stride: int
    head_count: int
    head_stride: int
    run_size_bytes: int
    """Size of every run of a block; of the smallest one where the layout is not regular."""
    planes: tuple[Plane, ...]
    """Before runs are merged: for the reference, and for layouts made from this one."""
    views: tuple[TensorView, ...]
    device: str
    is_writable: bool

    @property
    def blocks_per_page(self) -> int:
        return self.geometry.tokens_per_page // self.block_size

    @property
    def runs_per_plane(self) -> int:
        """Runs of one page in one plane at most, before neighbouring blocks are merged."""
        return self.blocks_per_page * max(len(each.sizes) for each in self.classes)

    @property
    def run_granule_bytes(self) -> int:
        """What every run's size is a multiple of."""
        return int(np.gcd.reduce(np.concatenate([each.sizes for each in self.classes])))

    @functools.cached_property
    def run_table(self) -> tuple[Int64Array, Int64Array]:
        """For compiled code: (block stride, first run, run count) of each class; offsets and sizes of their runs."""
        counts = [len(each.sizes) for each in self.classes]
        firsts = np.cumsum([0, *counts[:-1]])
        columns = [
            [each.block_stride, first, count]
            for each, first, count in zip(self.classes, firsts, counts, strict=True)
        ]
        runs = np.concatenate([np.stack([each.offsets, each.sizes]) for each in self.classes], axis=1)
        return np.array(columns, np.int64), np.ascontiguousarray(runs)

    def is_aligned(self, size_bytes: int) -> bool:
        """Whether every run starts at a multiple of this power of two, as streaming stores into the tensors need."""
        bits = int(np.bitwise_or.reduce(self.plane_addresses))
        for each in self.classes:
            bits |= int(np.bitwise_or.reduce(each.offsets))
            bits |= each.block_stride if self.block_count > 1 else 0
        return bits % size_bytes == 0

    @functools.cached_property
    def memories(self) -> npt.NDArray[np.uint64]:
        """(start, end) of the memory the tensors span, ascending and apart from each other."""
        return np.array([(start, end) for start, end, _ in _memories(self.views)], np.uint64).reshape(-1, 2)

    def shares_memory(self, addresses: AddressArray, size_bytes: int) -> bool:
        """Whether any of these pieces of memory reaches into what the tensors span."""
        starts, ends = self.memories[:, 0], self.memories[:, 1]
        before = np.searchsorted(starts, addresses + np.uint64(size_bytes), side="left") - 1
        return bool(((before >= 0) & (ends[before] > addresses)).any())

    @property
    def owners(self) -> tuple[object, ...]:
        """The tensors."""
        return tuple(view.owner for view in self.views)

    @classmethod
    def from_axes(
        cls, geometry: Geometry, tensors: Any, axes: str, *, value_axes: str | None = None
    ) -> PagedLayout:
        """The layout of tensors whose axes are named by letters, outermost first (``kvdev_kernels.axes``).

        Args:
            tensors: one tensor when ``axes`` has L; else one per layer when it has K or C or the geometry is mla;
                else two per layer: keys and values of layer 0, of layer 1, …
            axes: for example ``KBNHD``. Without N a block is one token; without H there is one head.
            value_axes: of every second tensor, where an engine keeps values in another order than keys.
        """
        sequence = [tensors] if "L" in axes else list(tensors)
        has_both = has_keys_and_values(geometry, axes)
        expected = 1 if "L" in axes else geometry.layer_count * (1 if has_both else 2)
        if has_both and value_axes is not None:
            raise ShapeError(
                "value_axes", expected="none, as a tensor has keys and values", got=repr(value_axes)
            )
        if "L" in axes and not has_both:
            raise ShapeError("axes", expected="K or C beside L", got=repr(axes))
        if len(sequence) != expected:
            raise ShapeError("tensors", expected=f"{expected} of axes {axes}", got=len(sequence))
        views = [view_of(tensor, f"tensors[{index}]") for index, tensor in enumerate(sequence)]
        planes: list[Plane] = []
        for index, view in enumerate(views):
            planes += planes_of(geometry, view, axes if value_axes is None or index % 2 == 0 else value_axes)
        return _from_planes(geometry, planes, views)

    @classmethod
    def from_vllm(cls, geometry: Geometry, kv_caches: Sequence[Any], axes: str = "BHNC") -> PagedLayout:
        """vLLM from 0.29 on: per layer ``[blocks, heads, tokens, keys and values]``, in any order of strides.

        ``axes`` BNHC where tokens are named before heads.
        """
        if axes not in ("BHNC", "BNHC"):
            raise ShapeError("axes", expected="BHNC or BNHC", got=repr(axes))
        return cls.from_axes(geometry, kv_caches, axes)

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

    @classmethod
    def from_rocm_paged(
        cls, geometry: Geometry, key_caches: Sequence[Any], value_caches: Sequence[Any]
    ) -> PagedLayout:
        """Per layer keys ``[blocks, heads, elements / x, tokens, x]``, values ``[blocks, heads, elements, tokens]``."""
        return cls.from_axes(geometry, _paired(key_caches, value_caches), "BHDNd", value_axes="BHDN")

    @classmethod
    def from_aiter_shuffled(
        cls, geometry: Geometry, key_caches: Sequence[Any], value_caches: Sequence[Any]
    ) -> PagedLayout:
        """Keys as ``from_rocm_paged``, values per layer ``[blocks, heads, tokens / x, elements, x]``."""
        return cls.from_axes(geometry, _paired(key_caches, value_caches), "BHDNd", value_axes="BHNDn")

    @classmethod
    def from_mla_split(
        cls, geometry: Geometry, kv_caches: Sequence[Any], part_sizes_bytes: Sequence[int]
    ) -> PagedLayout:
        """Per layer ``[blocks, tokens, row]`` or ``[blocks, tokens x row]`` whose blocks are taken apart: the first
        part of every token's row (the values), then the next part of every row (their scales), …"""
        row = geometry.head_size * geometry.dtype_size_bytes
        if geometry.attention != "mla" or sum(part_sizes_bytes) != row or min(part_sizes_bytes) < 1:
            raise ShapeError(
                "part_sizes_bytes", expected=f"parts of mla's row of {row} bytes", got=list(part_sizes_bytes)
            )
        if len(kv_caches) != geometry.layer_count:
            raise ShapeError("tensors", expected=f"{geometry.layer_count}, one per layer", got=len(kv_caches))
        views = [view_of(tensor, f"tensors[{index}]") for index, tensor in enumerate(kv_caches)]
        planes = []
        for view in views:
            whole = planes_of(geometry, view, "B(ND)" if len(view.shape) == 2 else "BND")[0].segments[0]
            tokens = whole.tokens[0][0]
            if tokens > 1 and whole.tokens[0][1] != row:
                raise ShapeError(
                    f"{view.name}: token stride", expected=f"{row} bytes", got=whole.tokens[0][1]
                )
            parts, start = [], 0
            for size in part_sizes_bytes:
                parts.append(
                    Segment(
                        whole.address + start * tokens,
                        whole.block,
                        ((tokens, size),),
                        (1, 0),
                        ((size, 1),),
                        1,
                        start,
                    )
                )
                start += size
            planes.append(Plane(view.name, tuple(parts)))
        return _from_planes(geometry, planes, views)

    @classmethod
    def from_sglang_host(cls, geometry: Geometry, buffer: Any, order: str) -> PagedLayout:
        """A host pool in one of the orders of ``SGLANG_HOST_AXES``."""
        known = SGLANG_HOST_AXES[geometry.attention]
        if order not in known:
            raise ShapeError("order", expected="one of " + ", ".join(known), got=repr(order))
        return cls.from_axes(geometry, buffer, known[order])

    @classmethod
    def from_trtllm(cls, geometry: Geometry, pool: Any) -> PagedLayout:
        """A pool ``[blocks, layers, 2, heads, tokens, elements]``, the last three as one axis or apart (mla: 1 and one
        head)."""
        kinds = "K" if geometry.attention == "mha" else "H"
        rest = ("H" if geometry.attention == "mha" else "") + "ND"
        rank = view_of(pool, "tensors[0]").shape
        return cls.from_axes(geometry, pool, f"BL{kinds}({rest})" if len(rank) == 4 else f"BL{kinds}{rest}")

    @classmethod
    def from_lmcache(cls, geometry: Geometry, chunk: Any, memory_format: str) -> PagedLayout:
        """One of LMCache's memory objects, its tokens being the blocks; ``LMCACHE_AXES`` has the formats."""
        if memory_format not in LMCACHE_AXES:
            raise ShapeError(
                "memory_format", expected="one of " + ", ".join(LMCACHE_AXES), got=repr(memory_format)
            )
        return cls.from_axes(geometry, chunk, LMCACHE_AXES[memory_format])

    @classmethod
    def from_states(cls, geometry: Geometry, states: Sequence[Sequence[Any]]) -> PagedLayout:
        """Opaque bytes per block, such as mamba states: per layer the tensors ``[blocks, …]`` that make up the state.

        A block of each is contiguous and they have one block stride. ``Geometry.opaque`` is their geometry.
        """
        if len(states) != geometry.layer_count:
            raise ShapeError("states", expected=f"{geometry.layer_count}, one per layer", got=len(states))
        size = geometry.page_size_bytes // geometry.layer_count
        planes, views = [], []
        for layer, parts in enumerate(states):
            segments: list[Segment] = []
            start = 0
            for index, tensor in enumerate(parts):
                view = view_of(tensor, f"states[{layer}][{index}]")
                segments.append(_state(view, start))
                start += segments[-1].size_bytes
                views.append(view)
            if start != size:
                raise ShapeError(f"states[{layer}]", expected=f"{size} bytes per block", got=start)
            planes.append(Plane(f"states[{layer}]", tuple(segments)))
        return _from_planes(geometry, planes, views, block_size=geometry.tokens_per_page)

    def heads(self, first: int, count: int) -> PagedLayout:
        """The layout of some KV heads, counted from this one's first: pages of ranks that split heads another way."""
        own = self.geometry
        if not (
            isinstance(first, int)
            and isinstance(count, int)
            and 0 <= first < first + count <= own.kv_head_count
        ):
            raise ShapeError(
                "heads",
                expected=f"a part of the {own.kv_head_count} KV heads",
                got=f"{count} from {first} on",
            )
        geometry = dataclasses.replace(own, kv_head_first=own.kv_head_first + first, kv_head_count=count)
        planes = [
            Plane(
                plane.name,
                tuple(
                    dataclasses.replace(
                        part, address=part.address + first * part.head[1], head=(count, part.head[1])
                    )
                    for part in plane.segments
                ),
            )
            for plane in self.planes
        ]
        return _from_planes(geometry, planes, list(self.views))

    def check_table(self, block_table: Any, page_count: int, *, is_written: bool) -> npt.NDArray[np.int64]:
        """The block table as ``(page_count, blocks_per_page) int64``, every index in range.

        A flat table is cut into pages. ``is_written`` refuses a block that is named twice: two pages would be
        written over each other.
        """
        try:
            table = np.asarray(block_table.cpu() if hasattr(block_table, "cpu") else block_table)
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


def _paired(keys: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    if len(keys) != len(values):
        raise ShapeError("value_caches", expected=f"{len(keys)}, as many as key_caches", got=len(values))
    return [tensor for pair in zip(keys, values, strict=True) for tensor in pair]


def _state(view: TensorView, start: int) -> Segment:
    """The bytes of one tensor's blocks, which are contiguous, as one token's elements."""
    if not view.shape or not all(view.shape):
        raise ShapeError(f"{view.name}: shape", expected="blocks with contents", got=view.shape)
    check_strides(view, ["block", *["state"] * (len(view.shape) - 1)])
    size = view.element_size_bytes
    for extent, stride in zip(reversed(view.shape[1:]), reversed(view.strides_bytes[1:]), strict=True):
        if extent > 1 and stride != size:
            raise ShapeError(f"{view.name}: state stride", expected=f"{size} bytes (contiguous)", got=stride)
        size *= extent
    return Segment(
        view.address, (view.shape[0], view.strides_bytes[0]), ((1, 0),), (1, 0), ((size, 1),), 1, start
    )


def _offsets(axes: Sequence[Axis]) -> Int64Array:
    total = np.zeros(1, np.int64)
    for extent, stride in axes:
        total = np.add.outer(total, np.arange(extent, dtype=np.int64) * stride).ravel()
    return total


def _run_class(plane: Plane) -> RunClass:
    """The runs of a block in canonical order, neighbours in memory merged."""
    base = plane.segments[0].address
    offsets, sizes = [], []
    for part in plane.segments:
        size, elements = part.element_size_bytes, list(part.elements)
        while elements and (elements[-1][0] == 1 or elements[-1][1] == size):
            size *= elements.pop()[0]
        rows = np.add.outer(_offsets(part.tokens), _offsets([part.head]))
        places = np.add.outer(rows, _offsets(elements)) + (part.address - base)
        offsets.append(places)
        sizes.append(np.full(places.shape, size, np.int64))
    offset, size_of = np.concatenate(offsets, axis=2).ravel(), np.concatenate(sizes, axis=2).ravel()
    is_first = np.ones(offset.size, np.bool_)
    is_first[1:] = offset[1:] != offset[:-1] + size_of[:-1]
    starts = np.flatnonzero(is_first)
    return RunClass(
        plane.segments[0].block[1], np.ascontiguousarray(offset[starts]), np.add.reduceat(size_of, starts)
    )


def _from_planes(
    geometry: Geometry, planes: list[Plane], views: list[TensorView], *, block_size: int = 0
) -> PagedLayout:
    """Check that the planes fit each other, and merge what is contiguous into runs."""
    device = check_one_device(views)
    first = planes[0].segments[0]
    tokens = block_size or _extent(first.tokens)
    for plane in planes:
        for part in plane.segments:
            if not block_size and _extent(part.tokens) != tokens:
                raise ShapeError(
                    f"{plane.name}: tokens per block",
                    expected=f"{tokens} as {planes[0].name}",
                    got=_extent(part.tokens),
                )
            if part.block[0] != first.block[0]:
                raise ShapeError(
                    f"{plane.name}: block extent",
                    expected=f"{first.block[0]} as {planes[0].name}",
                    got=part.block[0],
                )
            if part.block[1] != plane.segments[0].block[1]:
                raise ShapeError(
                    f"{plane.name}: block stride",
                    expected=f"{plane.segments[0].block[1]} bytes for every part of a layer",
                    got=part.block[1],
                )
    classes: list[RunClass] = []
    numbers: dict[object, int] = {}
    plane_class = np.zeros(len(planes), np.int64)
    for index, plane in enumerate(planes):
        base = plane.segments[0].address
        key = tuple(dataclasses.replace(part, address=part.address - base) for part in plane.segments)
        if key not in numbers:
            numbers[key] = len(classes)
            classes.append(_run_class(plane))
        plane_class[index] = numbers[key]
    addresses = np.array([plane.segments[0].address for plane in planes], dtype=np.int64)
    _check_apart(planes, views, addresses, plane_class, classes)
    regular = _regular_form(planes[0]) if len(classes) == 1 else None
    (token_count, token_stride), (head_count, head_stride), run = regular or ((1, 0), (1, 0), 0)
    return PagedLayout(
        geometry=geometry,
        plane_addresses=addresses,
        plane_class=plane_class,
        classes=tuple(classes),
        block_count=first.block[0],
        block_size=tokens,
        is_regular=regular is not None,
        block_stride=classes[0].block_stride,
        token_count=token_count,
        token_stride=token_stride,
        head_count=head_count,
        head_stride=head_stride,
        run_size_bytes=run or min(int(each.sizes.min()) for each in classes),
        planes=tuple(planes),
        views=tuple(views),
        device=device,
        is_writable=all(view.is_writable for view in views),
    )


def _extent(axes: Sequence[Axis]) -> int:
    return int(np.prod([extent for extent, _ in axes]))


def _regular_form(plane: Plane) -> tuple[Axis, Axis, int] | None:
    """Token axis, head axis and run of a plane whose tokens and heads stand in one axis each, with whole heads."""
    part = plane.segments[0]
    run = part.size_bytes
    is_whole = len(part.elements) == 1 and (
        part.elements[0][0] == 1 or part.elements[0][1] == part.element_size_bytes
    )
    if len(plane.segments) > 1 or len(part.tokens) > 1 or not is_whole:
        return None
    tokens, heads = part.tokens[0], part.head
    if heads[0] == 1 or heads[1] == run:
        run, heads = run * heads[0], (1, 0)
        if tokens[0] == 1 or tokens[1] == run:
            run, tokens = run * tokens[0], (1, 0)
    return (tokens if tokens[0] > 1 else (1, 0)), heads, run


def _span(view: TensorView) -> tuple[int, int]:
    """First byte and first byte behind; strides are not negative."""
    last = sum((n - 1) * step for n, step in zip(view.shape, view.strides_bytes, strict=True))
    return view.address, view.address + last + view.element_size_bytes


def _memories(views: Sequence[TensorView]) -> list[tuple[int, int, int]]:
    """What the tensors span: start, end and how many; those that reach into each other are taken together."""
    memories: list[tuple[int, int, int]] = []
    for start, end in sorted(_span(view) for view in views):
        if memories and start < memories[-1][1]:
            memories[-1] = (memories[-1][0], max(end, memories[-1][1]), memories[-1][2] + 1)
        else:
            memories.append((start, end, 1))
    return memories


def _check_apart(
    planes: list[Plane],
    views: list[TensorView],
    addresses: Int64Array,
    plane_class: Int64Array,
    classes: list[RunClass],
) -> None:
    """No two planes share memory: inside a tensor strides tell, tensors cut out of one memory are compared by runs."""
    if np.unique(addresses).size != addresses.size:
        raise ShapeError("tensors", expected="distinct memory for every layer", got="the same address twice")
    memories = _memories(views)
    if all(count == 1 for _, _, count in memories):
        return
    places = [addresses[i] + classes[number].offsets for i, number in enumerate(plane_class)]
    sizes = np.concatenate([classes[number].sizes for number in plane_class])
    plane_of = np.repeat(np.arange(len(planes)), [len(each) for each in places])
    starts = np.concatenate(places)
    steps = np.array([classes[number].block_stride for number in plane_class])
    has_blocks = planes[0].segments[0].block[0] > 1
    for first, end, count in memories:
        if count > 1:
            inside = (starts >= first) & (starts < end)
            who = plane_of[inside]
            _check_runs(planes, starts[inside], sizes[inside], who, steps[who] if has_blocks else None)


def _check_runs(
    planes: list[Plane], start: Int64Array, size: Int64Array, who: Int64Array, steps: Int64Array | None
) -> None:
    """Runs of one memory: those of different planes share no byte, in any block."""
    if steps is not None:
        if (steps != steps[0]).any():
            raise ShapeError(
                "tensors",
                expected="one block stride where tensors share memory",
                got=f"strides {set(steps.tolist())}",
            )
        # With one block stride, planes meet in some pair of blocks only where their runs meet modulo that stride.
        start = start % steps[0]
    order = np.argsort(start, kind="stable")
    start, end, who = start[order], (start + size)[order], who[order]
    furthest = np.maximum.accumulate(end)
    meets = np.flatnonzero((start[1:] < furthest[:-1]) & (who[1:] != who[:-1]))
    if meets.size:
        raise ShapeError(
            f"{planes[who[meets[0] + 1]].name}: memory",
            expected=f"apart from {planes[who[meets[0]]].name}",
            got="bytes that both have",
        )
