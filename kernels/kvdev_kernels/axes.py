"""Axes: which axis of an engine's tensor is which, and the planes that follow from its shape and strides.

A letter names an axis (``AXIS_NAMES``), parentheses axes that an engine keeps as one, outermost first: ``KLN(HD)`` is
LMCache's ``[2, layers, tokens, heads x elements]``. ``n`` and ``d`` are the inner parts of tokens and elements that an
engine takes apart: ``BHDNd`` is ``[blocks, heads, elements / x, tokens, x]``.
Not here: runs of bytes (``kvdev_kernels.layout``).
Trust: raises only ShapeError for axes and tensors that do not fit the geometry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvdev.geometry import Geometry
from kvdev_kernels.errors import ShapeError
from kvdev_kernels.tensor import TensorView, check_dtype

AXIS_NAMES = {
    "L": "layer",
    "K": "keys and values",
    "B": "block",
    "N": "token in block",
    "n": "inner token",
    "H": "KV head",
    "D": "element",
    "d": "inner element",
    "C": "keys and values of a head side by side",
}

Axis = tuple[int, int]
"""Extent, and stride in bytes."""


@dataclass(frozen=True)
class Segment:
    """A part of every head's elements in one plane: bytes ``offset_bytes`` on, ``size_bytes`` of them.

    Axes are outermost first; tokens and elements have two where an engine takes them apart. The element axes count
    elements of ``element_size_bytes``.
    """

    address: int
    block: Axis
    tokens: tuple[Axis, ...]
    head: Axis
    elements: tuple[Axis, ...]
    element_size_bytes: int
    offset_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(extent for extent, _ in self.elements) * self.element_size_bytes


@dataclass(frozen=True)
class Plane:
    """One layer's keys, values or latents: the segments of a head, in canonical order."""

    name: str
    segments: tuple[Segment, ...]


def parse_axes(geometry: Geometry, axes: str) -> list[str]:
    """The letters of each axis of the tensor; raises ShapeError."""
    groups: list[str] = []
    rest = axes
    while rest:
        inside, closed, after = rest[1:].partition(")") if rest[0] == "(" else (rest[0], ")", rest[1:])
        groups.append(inside if closed else "?")
        rest = after
    letters = [letter for group in groups for letter in group]
    if (
        len(set(letters)) != len(letters)
        or not set(letters) <= set(AXIS_NAMES)
        or "B" not in letters
        or (not all(groups))
    ):
        raise ShapeError("axes", expected=f"distinct letters of {''.join(AXIS_NAMES)} with B", got=repr(axes))
    if ("D" in letters) == ("C" in letters):
        raise ShapeError("axes", expected="one of D and C", got=repr(axes))
    if "K" in letters and ("C" in letters or geometry.attention == "mla"):
        raise ShapeError("axes", expected="no K beside C or for mla", got=repr(axes))
    if ("n" in letters and "N" not in letters) or ("d" in letters and "D" not in letters):
        raise ShapeError("axes", expected="n only with N, d only with D", got=repr(axes))
    if any(len([letter for letter in group if letter in "BNnd"]) > 1 or "C" in group[1:] for group in groups):
        raise ShapeError("axes", expected="one of BNnd and no C in parentheses", got=repr(axes))
    return groups


def has_keys_and_values(geometry: Geometry, axes: str) -> bool:
    """Whether one tensor of a layer has all its planes."""
    return geometry.attention == "mla" or "K" in axes or "C" in axes


def planes_of(geometry: Geometry, view: TensorView, axes: str) -> list[Plane]:
    """The planes of one tensor, in canonical order, after checking each axis against the geometry."""
    groups = parse_axes(geometry, axes)
    check_dtype(view, geometry.dtype, geometry.dtype_size_bytes)
    if len(view.shape) != len(groups):
        raise ShapeError(
            f"{view.name}: rank",
            expected=f"{len(groups)}: " + ", ".join(_name_of(group) for group in groups),
            got=f"{len(view.shape)}: shape {view.shape}",
        )
    axis: dict[str, Axis] = {}
    for group, extent, stride in zip(groups, view.shape, view.strides_bytes, strict=True):
        axis.update(_taken_apart(geometry, view, group, extent, stride))
    _check_extents(geometry, view, axis, axes)
    check_strides(view, [_name_of(group) for group in groups])
    one: Axis = (1, 0)
    layers, kinds = axis.get("L", one), axis.get("K", one)
    tokens = tuple(axis[name] for name in "Nn" if name in axis) or (one,)
    elements = tuple(axis[name] for name in "Dd" if name in axis)
    return [
        Plane(
            view.name,
            (
                Segment(
                    view.address + layer * layers[1] + kind * kinds[1],
                    axis["B"],
                    tokens,
                    axis.get("H", one),
                    elements,
                    geometry.dtype_size_bytes,
                ),
            ),
        )
        for layer in range(layers[0])
        for kind in range(kinds[0])
    ]


def _name_of(group: str) -> str:
    return " x ".join(AXIS_NAMES[letter] for letter in group)


def _required(geometry: Geometry) -> dict[str, int]:
    return {
        "L": geometry.layer_count,
        "K": 2,
        "H": geometry.kv_head_count,
        "D": geometry.head_size,
        "C": geometry.head_size * geometry.planes_per_layer,
    }


def _taken_apart(
    geometry: Geometry, view: TensorView, group: str, extent: int, stride: int
) -> list[tuple[str, Axis]]:
    """The axes of one tensor axis: itself, or what is merged in it, whose extents the geometry tells."""
    required = _required(geometry)
    if group == "C":
        if extent != required["C"]:
            raise ShapeError(f"{view.name}: {AXIS_NAMES['C']} extent", expected=required["C"], got=extent)
        group = "KD" if geometry.attention == "mha" else "D"
    if len(group) == 1:
        return [(group, (extent, stride))]
    unknown = [letter for letter in group if letter not in required]
    known = math.prod(required[letter] for letter in group if letter in required)
    if extent % known or (not unknown and extent != known):
        expected = f"a multiple of {known}" if unknown else str(known)
        raise ShapeError(f"{view.name}: {_name_of(group)} extent", expected=expected, got=extent)
    found, step = [], stride
    for letter in reversed(group):
        size = required.get(letter, extent // known)
        found.append((letter, (size, step)))
        step *= size
    return found


def _check_extents(geometry: Geometry, view: TensorView, axis: dict[str, Axis], axes: str) -> None:
    for name, extent in _required(geometry).items():
        if name in axis:
            got = axis[name][0] * (axis["d"][0] if name == "D" and "d" in axis else 1)
            if got != extent:
                raise ShapeError(f"{view.name}: {AXIS_NAMES[name]} extent", expected=extent, got=got)
    if "H" not in axis and geometry.kv_head_count != 1:
        raise ShapeError(f"{view.name}: axes", expected="H, as there are several KV heads", got=repr(axes))
    tokens = math.prod(axis[name][0] for name in "Nn" if name in axis)
    if axis["B"][0] < 1 or tokens < 1 or geometry.tokens_per_page % tokens:
        raise ShapeError(
            f"{view.name}: tokens per block",
            expected=f"a divisor of the page's {geometry.tokens_per_page} tokens, in one block or more",
            got=f"{tokens} in {axis['B'][0]} blocks",
        )


def check_strides(view: TensorView, names: Sequence[str]) -> None:
    """Raise ShapeError unless the innermost axis is contiguous and no two elements share memory."""
    size = view.element_size_bytes
    if view.shape[-1] > 1 and view.strides_bytes[-1] != size:
        raise ShapeError(
            f"{view.name}: {names[-1]} stride",
            expected=f"{size} bytes (contiguous elements)",
            got=f"{view.strides_bytes[-1]} bytes",
        )
    # With all other strides at least the span of what lies inside them, no two indices meet.
    order = sorted(
        (stride, extent, name)
        for name, stride, extent in zip(names, view.strides_bytes, view.shape, strict=True)
        if extent > 1
    )
    span = size
    for stride, extent, name in order:
        if stride < span:
            raise ShapeError(
                f"{view.name}: {name} stride",
                expected=f"at least {span} bytes, the size of what lies inside",
                got=f"{stride} bytes",
            )
        span = stride * (extent - 1) + span
