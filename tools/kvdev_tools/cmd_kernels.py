"""``kvdev kernels``: which page kernels this machine can run, and what is missing for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from kvdev_tools.output import emit, json_option, table


@click.command()
@json_option
def kernels(as_json: bool) -> int:
    """List the page kernels' back ends: those that work here, and the reason for each that does not.

    \b
    Examples:
      kvdev kernels
      KVDEV_CUDA_LIBRARY=/opt/driver/libcuda.so.1 kvdev kernels --json
    """
    from kvdev_kernels import availability
    from kvdev_kernels.gpu_compile import cache_folder
    from kvdev_kernels.gpu_status import gpu_status
    from kvdev_tools.exits import ExitCode

    folder = cache_folder()
    document = {
        "backends": [
            *(_row(name, reason=reason) for name, reason in availability().items()),
            *(
                _row(
                    each.backend,
                    device=each.device,
                    arch=each.arch,
                    driver_version=each.driver_version,
                    compiler_version=each.compiler_version,
                    has_batches=each.has_batches,
                    reason=each.reason,
                )
                for each in gpu_status()
            ),
        ],
        "cache": str(folder) if folder else "",
        "has_run_on_gpu": False,
    }
    emit(document, as_json=as_json, text=lambda: _lines(document))
    return int(ExitCode.OK)


def _row(
    backend: str,
    *,
    reason: str,
    device: str = "",
    arch: str = "",
    driver_version: int = 0,
    compiler_version: str = "",
    has_batches: bool = False,
) -> dict[str, Any]:
    return {
        "backend": backend,
        "is_available": not reason,
        "device": device,
        "arch": arch,
        "driver_version": driver_version,
        "compiler_version": compiler_version,
        "has_batches": has_batches,
        "reason": reason,
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            row["backend"],
            "yes" if row["is_available"] else "no",
            " ".join(part for part in (row["device"], row["arch"]) if part) or "-",
            row["reason"] or "-",
        )
        for row in document["backends"]
    ]
    yield from table(rows, header=("BACK END", "WORKS", "DEVICE", "REASON"))
    yield f"compiled GPU kernels are kept in {document['cache'] or 'no folder'}"
    yield "the GPU kernels of this version have been tested on emulated hardware only"
