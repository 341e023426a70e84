"""Options that choose a geometry: a preset by name, or an own one by its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvdev.geometry import Geometry

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEFAULT_PRESET = "medium"
TOKENS_PER_PAGE = 512


def geometry_options(command: _Command) -> _Command:
    """``--geometry`` or ``--layers --kv-heads --head-size --dtype --attention``; see ``choose_geometry``."""
    for option in reversed(
        (
            click.option(
                "--geometry",
                metavar="NAME",
                help="small (64 KiB pages), medium (1 MiB), or a model such as llama3-8b, of those that "
                "docs/cli.md and the error for an unknown name list  [default: that of the KV namespace where one is "
                "named, else medium]",
            ),
            click.option("--layers", type=int, help="An own geometry: layers, ..."),
            click.option("--kv-heads", type=int, help="... KV heads of this rank, ..."),
            click.option(
                "--head-size", type=int, help="... elements of a head (mla: of the latent row), ..."
            ),
            click.option(
                "--dtype",
                help="... type of an element: bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, uint8  [default: bf16], ...",
            ),
            click.option("--attention", help="... mha or mla  [default: mha]."),
        )
    ):
        command = option(command)
    return command


def choose_geometry(
    *,
    geometry: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_size: int | None,
    dtype: str | None,
    attention: str | None,
) -> Geometry:
    """The preset of that name, or the geometry that the single options describe."""
    from kvdev.errors import UsageError
    from kvdev.geometry import Geometry

    given = {
        "--layers": layers,
        "--kv-heads": kv_heads,
        "--head-size": head_size,
        "--dtype": dtype,
        "--attention": attention,
    }
    used = [option for option, value in given.items() if value is not None]
    if not used:
        return Geometry.preset(DEFAULT_PRESET if geometry is None else geometry)
    if geometry is not None:
        raise UsageError(
            f"geometry: expected a name or an own one, got {geometry!r} with {used[0]}; leave one out"
        )
    if attention == "mla" and kv_heads is None:
        kv_heads = 1
    if layers is None or kv_heads is None or head_size is None:
        raise UsageError(
            f"geometry: expected --layers, --kv-heads and --head-size together, got only {' '.join(used)}"
        )
    return Geometry(
        model_id="own",
        layer_count=layers,
        kv_head_count=kv_heads,
        head_size=head_size,
        dtype="bf16" if dtype is None else dtype,
        attention="mha" if attention is None else attention,
        tokens_per_page=TOKENS_PER_PAGE,
    )
