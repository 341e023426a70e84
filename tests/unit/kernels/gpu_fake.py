"""Tensors in the memory of the fake driver, with torch's tensor methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev_kernels.driver import Driver


class Device:
    """What a layout asks of a tensor's device."""

    def __init__(self, name: str) -> None:
        self.type = name.partition(":")[0]
        self.name = name

    def __str__(self) -> str:
        return self.name


class Tensor:
    """Device memory with torch's tensor methods."""

    def __init__(self, driver: Driver, array: npt.NDArray[Any], device: str = "cuda:0") -> None:
        self.driver, self.array = driver, array
        self.shape, self.dtype, self.device = array.shape, f"torch.{array.dtype.name}", Device(device)
        self.address = driver.alloc(array.nbytes)
        self.stream = driver.make_stream()
        self._copy(self.address, array.ctypes.data)

    def _copy(self, to: int, source: int) -> None:
        event = self.driver.make_event()
        self.driver.copy(to, source, self.array.nbytes, self.stream)
        self.driver.record(event, self.stream)
        wait(lambda: self.driver.is_over(event))
        self.driver.end_event(event)

    def read(self) -> npt.NDArray[Any]:
        out = np.zeros_like(self.array)
        self._copy(out.ctypes.data, self.address)
        return out

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


def wait(is_over: Any) -> None:
    deadline = Deadline.after(60)
    while not is_over():
        assert not deadline.is_expired
