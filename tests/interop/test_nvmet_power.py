"""The power of the Linux kernel's target goes under load: what its guest's page cache held and nobody flushed is gone.

Two cuts here; ``KVDEV_LONG=1`` makes it 50. The same on the embedded target: ``../crash/test_power_cut.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.conftest import Lab
from tests.interop.test_nvmet_recovery import NQN, KillableNvmet
from tests.power import power_cuts

pytestmark = pytest.mark.interop

CUT_COUNT = 50 if os.environ.get("KVDEV_LONG") else 2
CANARY_CUT_COUNT = 3


class Buffered(KillableNvmet):
    """Two namespaces behind the guest's page cache."""

    def volume_uri(self) -> str:
        return f"vol+tcp://127.0.0.1:{self.first_port}/{NQN}"


@pytest.fixture
def target(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffered]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = Buffered(lab, "512,512", port_count=1, is_buffered=True)
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_power_when_cut_under_load_then_no_page_is_wrong_and_what_was_flushed_is_there(
    target: Buffered, tmp_path: Path, seed: int
) -> None:
    faults = power_cuts(target, tmp_path, count=CUT_COUNT, seed=seed)
    assert not faults, faults


def test_canary_when_flushes_send_nothing_then_a_cut_shows_it(
    target: Buffered, tmp_path: Path, seed: int
) -> None:
    faults = power_cuts(target, tmp_path, count=CANARY_CUT_COUNT, seed=seed, has_flush=False)
    print(*faults, sep="\n")
    assert faults, "pages that no device was told to keep were all there"
