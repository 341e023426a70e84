"""Every recorded case once more, in the recorded order, to spdk_tgt processes of today: the same shapes and codes.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later; started without huge pages). It may be built with
other transports and modules than the recorded one, and stand on another machine: DIFFERENCES says where that shows.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from spdk_rpc import Client
from tests.interop.spdk import free_port, running_spdk
from tests.recorded import CASES, SPDK_METHODS, Difference, Peer, methods_named_in, process_of

pytestmark = pytest.mark.interop

DEADLINE_S = 60.0
MEMORY_MIB = 2560
"""What the recorded malloc bdevs take, 1.3 GiB, and SPDK's own pools."""

OTHER_BUILD = "built with other modules or transports than the recorded one"
OTHER_RUN = "of that run alone: a port, a name made up anew"
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        r"01_.*|r.*", r"fields\.commit:(missing|extra)", "built from a git tree, which it names, or not"
    ),
    Difference(r"02.*|r07.*|r20.*", r"\[\]:(missing|extra)", OTHER_BUILD),
    Difference(r"03_.*|r08.*", r"reactors\[\]\.lw_threads\[\](:missing|:extra|\.id|\.name)", OTHER_BUILD),
    Difference(r"03b.*", r"threads\[\]:missing", OTHER_BUILD),
    Difference(r"03d.*|31.*|51.*", r"\[\](\.depends_on\[\])?:(missing|extra)", OTHER_BUILD),
    Difference(r"31.*|51.*", r"error", OTHER_BUILD),
    Difference(r"32_.*", r"\w+:(missing|extra)", OTHER_BUILD),
    Difference(r"32b.*", r"\[\]:missing", OTHER_BUILD),
    Difference(r"61c.*|62d.*", r"error", OTHER_BUILD),
    Difference(r"62e.*", r"\[\]\.listen_addresses\[\]:missing", OTHER_BUILD),
    Difference(r"e06b.*", r"code|message", OTHER_BUILD),
    Difference(r"03e.*", r"filename", OTHER_RUN),
    Difference(r"20_.*|20j.*|40[be].*", r"\[\]\.ctrlrs\[\]\.host\.nqn", OTHER_RUN),
    Difference(r"20d.*|40l.*", r"\[\]\.peer_address\.trsvcid", OTHER_RUN),
    Difference(r"11_.*", r"\[\]\.supported_io_types\.(get_zone_info|zone_management)", "uring without zones"),
    Difference(r"12c.*", r"channels\[\]:missing", "a bdev has a channel while something is open on it"),
    Difference(r"50f.*", r"\[\]\.sessions\[\]:missing", "nobody connects in this test"),
    Difference(r"e15.*", r"error", "Nvme0 was attached when it was recorded, and is detached by now"),
)


def built_methods(path: str) -> frozenset[str]:
    with Client(path, timeout_s=DEADLINE_S) as client:
        return frozenset(client.call("rpc_get_methods"))


def test_recorded_cases_are_answered_by_spdk_as_when_they_were_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers: dict[str, Peer] = {}
    failures: list[str] = []
    skipped: list[str] = []
    used: set[Difference] = set()
    with contextlib.ExitStack() as stack:
        for core, name in enumerate(("target", "initiator", "second target")):
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            spdk = stack.enter_context(running_spdk(folder, "spdk", core=core % 2, memory_mib=MEMORY_MIB))
            peers[name] = Peer(spdk.path, folder, port=str(free_port()), deadline_s=DEADLINE_S)
        methods = built_methods(peers["target"].path)
        for case in CASES:
            if not methods_named_in(case) & SPDK_METHODS <= methods:
                skipped.append(case["case"])
                continue
            peer = peers[process_of(case)]
            if process_of(case) == "initiator":
                peer.port = peers["target"].port
            failures += peer.compare(case).unexplained(DIFFERENCES, used, role="")
    with capsys.disabled():
        print(f"\n{len(CASES) - len(skipped)} recorded cases asked again; not in this build: {skipped}")
    assert not failures, "\n".join(failures)
