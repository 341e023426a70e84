"""The power of the embedded target goes under load: its volatile cache is lost, or torn by block as the seed says.

Three cuts here; ``KVDEV_LONG=1`` makes it 50. ``KVDEV_SEED`` replays a run's cuts and calls; what was in flight at the
cut is the machine's. The same on Linux's target: ``../interop/test_nvmet_power.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.testing.killable import KillableTarget
from tests.power import power_cuts

CUT_COUNT = 50 if os.environ.get("KVDEV_LONG") else 3
CANARY_CUT_COUNT = 6
"""A cut may fall right behind the opening, before anything is flushed."""


class Cached(KillableTarget):
    """The embedded target with a volatile cache, each time of another seed."""

    def volume_uri(self) -> str:
        return f"vol+{self.uri()}"

    def start(self) -> None:
        assert self.volatile_seed is not None, "it has a volatile cache"
        self.volatile_seed += 1
        super().start()


@pytest.fixture
def target(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cached]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = Cached(tmp_path, namespace_count=2, block_size_bytes=512, volatile_seed=seed)
    with found:
        yield found


def test_power_when_cut_under_load_then_no_page_is_wrong_and_what_was_flushed_is_there(
    target: Cached, tmp_path: Path, seed: int
) -> None:
    faults = power_cuts(target, tmp_path, count=CUT_COUNT, seed=seed)
    assert not faults, faults


def test_canary_when_flushes_send_nothing_then_a_cut_shows_it(
    target: Cached, tmp_path: Path, seed: int
) -> None:
    faults = power_cuts(target, tmp_path, count=CANARY_CUT_COUNT, seed=seed, has_flush=False)
    print(*faults, sep="\n")
    assert faults, "pages that no device was told to keep were all there"
