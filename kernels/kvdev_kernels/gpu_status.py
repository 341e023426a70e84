"""What GPU back ends this machine has: drivers, devices, compilers, and what is missing and why.

Not here: CPU back ends (``kvdev_kernels.dispatch.availability``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdev_kernels.driver import Driver
from kvdev_kernels.driver_calls import VENDORS, Vendor
from kvdev_kernels.errors import BackendUnavailableError
from kvdev_kernels.gpu_compile import Compiler


@dataclass(frozen=True)
class GpuStatus:
    """One back end or one device of it; ``reason`` is empty where it can be used."""

    backend: str
    device: str
    arch: str
    driver_version: int
    compiler_version: str
    has_batches: bool
    has_dma_buf: bool
    """Its memory can be exported as dma-buf; no engine consumes that yet, so nothing does."""
    reason: str


def gpu_status() -> list[GpuStatus]:
    """Each device of each vendor; one line with the reason for a vendor without any."""
    return [status for vendor in VENDORS for status in _of(vendor)]


def _of(vendor: Vendor) -> list[GpuStatus]:
    found: list[GpuStatus] = []
    count = 1
    while len(found) < count:
        index = len(found)
        try:
            driver = Driver(vendor, index)
        except BackendUnavailableError as error:
            found.append(GpuStatus(vendor.backend, "", "", 0, "", False, False, error.reason))
            continue
        count = driver.device_count
        version, reason = "", ""
        try:
            version = Compiler(vendor).version
        except BackendUnavailableError as error:
            reason = error.reason
        name = f"{index}: {driver.device_name}"
        found.append(
            GpuStatus(
                vendor.backend,
                name,
                driver.arch,
                driver.version,
                version,
                driver.has_batches,
                driver.has_dma_buf,
                reason,
            )
        )
    return found
