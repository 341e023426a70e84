"""The exceptions of the page kernels: a tensor that does not fit, a back end that is not there."""

from __future__ import annotations


class KernelError(Exception):
    """Base of everything the kernels raise on purpose."""


class BackendUnavailableError(KernelError):
    """A back end was asked for that this machine or installation cannot run."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"kernels: backend {backend}: not available: {reason}")
        self.backend = backend
        self.reason = reason


class ShapeError(KernelError, ValueError):
    """A tensor, block table or page buffer does not fit; raised before any memory is touched."""

    def __init__(self, field: str, *, expected: object, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field
        self.expected = expected
        self.got = got
