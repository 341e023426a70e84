"""Steady state: whether a job's bandwidth or IOPS has stopped changing over a window of one-second samples.

Not here: taking the samples (``run``).
"""

from __future__ import annotations

from collections import deque

from kvdev_tools.probe.measure import Steady
from kvdev_tools.probe.option import SteadyState

SAMPLE_US = 1_000_000


class SteadyWatch:
    """Samples of one job; attained once a full window is within the limit."""

    def __init__(self, wanted: SteadyState, *, duration_us: int, ramp_us: int) -> None:
        self._wanted = wanted
        self._length = max(2, duration_us // SAMPLE_US)
        self._skip = ramp_us // SAMPLE_US
        self._bw: deque[float] = deque(maxlen=self._length)
        self._iops: deque[float] = deque(maxlen=self._length)
        self._slope = self._deviation = self._criterion = 0.0
        self.is_attained = False

    def add(self, bw_kib: float, iops: float) -> bool:
        """Take the rates of one second; whether the state is steady now."""
        if self._skip > 0:
            self._skip -= 1
            return False
        self._bw.append(bw_kib)
        self._iops.append(iops)
        if len(self._bw) < self._length:
            return False
        values = list(self._bw if self._wanted.kind.startswith("bw") else self._iops)
        mean = sum(values) / len(values)
        self._slope = _slope(values)
        self._deviation = max(abs(value - mean) for value in values)
        criterion = abs(self._slope) if self._wanted.kind.endswith("_slope") else self._deviation
        if self._wanted.is_percent:
            criterion = 100.0 * criterion / mean if mean else 0.0
        self._criterion = criterion
        self.is_attained = criterion < self._wanted.limit
        return self.is_attained

    def found(self) -> Steady:
        """How it stands; samples that are still to come are 0, as fio shows them."""
        missing = (0.0,) * (self._length - len(self._bw))
        return Steady(
            self.is_attained,
            self._criterion,
            self._slope,
            self._deviation,
            (*self._bw, *missing),
            (*self._iops, *missing),
        )


def _slope(values: list[float]) -> float:
    """Of the least-squares line, per sample."""
    count = len(values)
    middle = (count - 1) / 2
    mean = sum(values) / count
    square = sum((index - middle) ** 2 for index in range(count))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / square
