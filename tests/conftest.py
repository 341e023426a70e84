"""Shared test configuration: derandomised Hypothesis, one printed seed for everything else."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SEED = int(os.environ.get("KVDEV_SEED", "20260131"))

settings.register_profile(
    "kvdev", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("KVDEV_HYPOTHESIS_PROFILE", "kvdev"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"kvdev seed: {SEED} (KVDEV_SEED replays it)"


@pytest.fixture
def seed() -> int:
    """The seed of this run; tests derive their generators from it."""
    return SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
