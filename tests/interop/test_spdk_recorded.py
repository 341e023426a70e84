"""Every recorded case once more, in the recorded order, to spdk_tgt processes of today: the same shapes and codes.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later; started without huge pages). It may be built with
other transports and modules than the recorded one, and stand on another machine: DIFFERENCES says where that shows.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.interop.spdk import free_port, running_spdk
from tests.recorded import CASES, Difference, Peer, process_of

pytestmark = pytest.mark.interop

DEADLINE_S = 60.0
MEMORY_MIB = 2560
"""What the recorded malloc bdevs take, 1.3 GiB, and SPDK's own pools."""

DIFFERENCES: tuple[Difference, ...] = ()


def test_recorded_cases_are_answered_by_spdk_as_when_they_were_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers: dict[str, Peer] = {}
    failures: list[str] = []
    used: set[Difference] = set()
    with contextlib.ExitStack() as stack:
        for core, name in enumerate(("target", "initiator", "second target")):
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            spdk = stack.enter_context(running_spdk(folder, "spdk", core=core % 2, memory_mib=MEMORY_MIB))
            peers[name] = Peer(spdk.path, folder, port=str(free_port()), deadline_s=DEADLINE_S)
        for case in CASES:
            peer = peers[process_of(case)]
            if process_of(case) == "initiator":
                peer.port = peers["target"].port
            failures += peer.compare(case).unexplained(DIFFERENCES, used, role="")
    with capsys.disabled():
        print(f"\n{len(CASES)} recorded cases asked again")
    assert not failures, "\n".join(failures)
    assert set(DIFFERENCES) == used, "a difference that is none any more"
