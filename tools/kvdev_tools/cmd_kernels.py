"""``kvdev kernels``: which page kernels this machine can run, what is missing for the others, what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdev_tools.output import emit, json_option, table

if TYPE_CHECKING:
    from kvdev_kernels.gpu_status import GpuStatus


@click.command()
@click.option("--calibrate", is_flag=True, help="Measure the GPUs that were not measured yet, and keep it.")
@json_option
def kernels(calibrate: bool, as_json: bool) -> int:
    """List the page kernels' back ends: those that work here, and the reason for each that does not.

    For each GPU that was measured, also how fast pages cross the link on each route, and the one that is taken.

    \b
    Examples:
      kvdev kernels
      kvdev kernels --calibrate
      KVDEV_CUDA_LIBRARY=/opt/driver/libcuda.so.1 kvdev kernels --json
    """
    from kvdev_kernels import availability
    from kvdev_kernels.gpu_compile import cache_folder
    from kvdev_kernels.gpu_status import gpu_status
    from kvdev_tools.exits import ExitCode

    folder = cache_folder()
    found = gpu_status()
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
                    has_dma_buf=each.has_dma_buf,
                    reason=each.reason,
                )
                for each in found
            ),
        ],
        "routes": [row for each in found if not each.reason for row in _routes(each, folder, calibrate)],
        "cache": str(folder) if folder else "",
        "has_run_on_gpu": False,
    }
    emit(document, as_json=as_json, text=lambda: _lines(document))
    return int(ExitCode.OK)


def _routes(status: GpuStatus, folder: Path | None, calibrate: bool) -> Iterator[dict[str, Any]]:
    """The saved calibration of a device, or with ``calibrate`` a new one where there is none."""
    from kvdev_kernels.driver import Driver
    from kvdev_kernels.driver_calls import VENDORS
    from kvdev_kernels.gpu import WORKGROUP_COUNT_DEFAULT, GpuKernels
    from kvdev_kernels.gpu_calibration import calibrate as calibrated
    from kvdev_kernels.gpu_calibration import calibration_path, load_calibration

    vendor = next(each for each in VENDORS if each.backend == status.backend)
    driver = Driver(vendor, int(status.device.partition(":")[0]))
    if calibrate:
        with GpuKernels(driver, cache=folder) as opened:
            found = calibrated(opened, folder)
    elif folder is None:
        return
    else:
        saved = load_calibration(calibration_path(driver, folder, WORKGROUP_COUNT_DEFAULT))
        if saved is None:
            return
        found = saved
    for rate in found.rates:
        chosen = found.route(is_pack=rate.is_pack, run_size_bytes=rate.run_size_bytes)
        yield {
            "backend": status.backend,
            "device": status.device,
            "direction": "pack" if rate.is_pack else "unpack",
            "run_size_bytes": rate.run_size_bytes,
            "route": rate.route.value,
            "bytes_per_s": rate.bytes_per_s,
            "is_chosen": rate.route is chosen,
        }


def _row(
    backend: str,
    *,
    reason: str,
    device: str = "",
    arch: str = "",
    driver_version: int = 0,
    compiler_version: str = "",
    has_batches: bool = False,
    has_dma_buf: bool = False,
) -> dict[str, Any]:
    return {
        "backend": backend,
        "is_available": not reason,
        "device": device,
        "arch": arch,
        "driver_version": driver_version,
        "compiler_version": compiler_version,
        "has_batches": has_batches,
        "has_dma_buf": has_dma_buf,
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
    measured = [
        (
            row["device"],
            row["direction"],
            row["run_size_bytes"],
            row["route"],
            f"{row['bytes_per_s'] / 1e9:.2f}",
            "taken" if row["is_chosen"] else "-",
        )
        for row in document["routes"]
    ]
    if measured:
        yield ""
        yield from table(measured, header=("DEVICE", "WAY", "RUN BYTES", "ROUTE", "GB/S", ""))
        yield ""
    for row in document["backends"]:
        if row["device"]:
            word = "available and unused" if row["has_dma_buf"] else "not available"
            yield f"{row['backend']} {row['device']}: dma-buf export of its memory is {word}"
    yield f"compiled GPU kernels are kept in {document['cache'] or 'no folder'}"
    yield "the GPU kernels of this version have been tested on emulated hardware only"
