"""Page kernels: pack and unpack KV pages between an engine's paged tensors and staging pages.

Numba is imported when a back end that needs it is opened, not with this package.
"""

from kvdev_kernels.dispatch import PageKernels, UnpackResult, availability, pack, unpack
from kvdev_kernels.errors import BackendUnavailableError, KernelError, ShapeError
from kvdev_kernels.layout import PagedLayout

__all__ = [
    "BackendUnavailableError",
    "KernelError",
    "PageKernels",
    "PagedLayout",
    "ShapeError",
    "UnpackResult",
    "availability",
    "pack",
    "unpack",
]
