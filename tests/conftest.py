"""Shared test configuration: derandomised Hypothesis, one printed seed for everything else."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SEED = int(os.environ.get("KVDEV_SEED", "20260131"))

# Examples of a property: what a commit pays for, the full counts of `make long`, fresh seeds of `make fuzz`.
for _name, _count in (("kvdev", 30), ("long", 600), ("fuzz", 2000)):
    settings.register_profile(
        _name,
        derandomize=_name != "fuzz",
        deadline=None,
        max_examples=_count,
        suppress_health_check=[HealthCheck.too_slow],
    )
_default = "long" if os.environ.get("KVDEV_LONG") else "kvdev"
settings.load_profile(os.environ.get("KVDEV_HYPOTHESIS_PROFILE", _default))


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would hang.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"kvdev seed: {SEED} (KVDEV_SEED replays it)"


@pytest.fixture
def seed() -> int:
    """The seed of this run; tests derive their generators from it."""
    return SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
