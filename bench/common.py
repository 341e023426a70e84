"""What every benchmark says of the machine that it ran on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvdev


def machine(seed: int | None = None) -> dict[str, Any]:
    """What a figure must be read with; ``seed`` where the benchmark has one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else "unknown",
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvdev": kvdev.__version__,
        **({} if seed is None else {"seed": seed}),
        "command": " ".join(sys.argv),
    }
