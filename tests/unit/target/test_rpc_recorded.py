"""Replays what a real spdk_tgt was asked, in the recorded order, and compares our replies with its own.

Compared are types, keys, codes and messages, and the values too unless they are volatile. Whatever differs
on purpose stands in DIFFERENCES with its reason; a case of a method that we do not have is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.target.model import ServiceBackend, TargetModel
from kvdev.target.rpc_methods import STARTUP_ONLY_METHODS, RpcMethods
from kvdev.target.rpc_server import RpcServer
from kvdev.target.service import TargetService
from kvdev.testing.target_backend import MemoryBackend, MemoryFabric
from tests.recorded import CASES, SPDK_METHODS, Difference, Peer, methods_named_in, process_of

DEADLINE_S = 10.0

OWN_THREADS = "the threads are this target's own"
OWN_SUBSYSTEMS = "this target has the subsystems keyring, bdev, nvmf, nbd, vhost_blk only"
NO_LIMITS = "no limit is told for dataset management and write zeroes"
NO_SNAPSHOTS = "snapshots and clones are not kept"
THICK = "a thin lvol takes its clusters at once"
NO_INITIATOR = "the data path is no initiator"
NO_VHOST = "the data path serves no vhost-user sockets"
NVME_DETAILS = "a remote namespace is described by what a bdev of this target does"
DIFFERENCES: tuple[Difference, ...] = (
    Difference(r"02.*|r07.*|r20.*", r"\[\]:missing", "this target has fewer methods"),
    Difference(r"03_.*|r08.*", r"reactors\[\]\.lw_threads\[\](\.name|:missing)", OWN_THREADS),
    Difference(r"03b.*", r"threads\[\]:(missing|extra)", OWN_THREADS),
    Difference(r"03c.*", r"\[\]:missing", "there are no pools of buffers to tell of"),
    Difference(r"03g.*", r"\w+", "the kernel sizes its socket buffers, and nothing is sent without a copy"),
    Difference(r"03h.*", r"error", "sockets are of one kind"),
    Difference(r"18.*|20e.*|40m.*|50g.*", r"poll_groups\[\]\.name", OWN_THREADS),
    Difference(r"03d.*|31.*|51.*", r"\[\](\.depends_on\[\])?:missing", OWN_SUBSYSTEMS),
    Difference(r"31.*|51.*", r"error", OWN_SUBSYSTEMS),
    Difference(r"10[cd].*", r"error", NO_SNAPSHOTS),
    Difference(r"10f.*", r"\[\](:missing|\.is_clone|\.is_thin_provisioned)", NO_SNAPSHOTS),
    Difference(r"10f.*", r"\[\]\.num_allocated_clusters", THICK),
    Difference(r"11.*", r"\[\]\.memory_domains:missing", "there are no DMA domains"),
    Difference(r"11.*", r"\[\]\.supported_io_types\.\w+", "tells what this target's bdevs do"),
    Difference(r"11_.*", r"\[\]:missing", NO_SNAPSHOTS),
    Difference(
        r"11.*", r"\[\]\.driver_specific\.lvol\.(base_snapshot:missing|clone|thin_provision)", NO_SNAPSHOTS
    ),
    Difference(r"11.*", r"\[\]\.driver_specific\.lvol\.num_allocated_clusters", THICK),
    Difference(r"12_.*|50h.*", r"bdevs\[\]:(missing|extra)", NO_SNAPSHOTS),
    Difference(
        r"12_.*|50h.*", r"bdevs\[\]\.(bytes_unmapped|unmap_latency_ticks)", "a new lvol is cleared", "target"
    ),
    Difference(r"17_.*|62e.*", r"\[\]\.(dmrsl|wzsl)", NO_LIMITS),
    Difference(r"30b.*|31.*|51.*", r"\[\]\.params\.(dmrsl|wzsl)", NO_LIMITS),
    Difference(r"20[cd].*|40[kl].*", r"\[\]:missing", "no queue pair is made in this test"),
    Difference(
        r"20_.*|20j.*|40[be].*", r"\[\]\.ctrlrs\[\]\.host\.nqn", "a host's name is made up anew", "host"
    ),
    Difference(r"30.*", r"\[\]:missing", "only calls that this target has, so that the list can be loaded"),
    Difference(r"32_.*", r"\w+:(missing|extra)", "the log flags are this target's own"),
    Difference(r"32b.*", r"\[\]:missing", "there is no fsdev"),
    Difference(r"32c.*", r"\[\](:missing|:extra|\.id)", NO_SNAPSHOTS),
    Difference(r"40[cj].*", r"\[\]\.memory_domains:missing", "there are no DMA domains", "host"),
    Difference(r"40[cj].*", r"\[\]\.supported_io_types\.\w+", NVME_DETAILS, "host"),
    Difference(r"40[cj].*", r"\[\]\.(optimal|preferred)_\w+", NVME_DETAILS, "host"),
    Difference(r"40[cj].*", r"\[\]\.driver_specific\.nvme\[\]\.ctrlr_data\.vendor_id", NVME_DETAILS, "host"),
    Difference(r"61c.*|62d.*", r"error", "NVMe/TCP is the only transport"),
    Difference(r"62e.*", r"\[\]\.listen_addresses\[\]:missing", "NVMe/TCP is the only transport"),
    Difference(r"62e.*", r"\[\]\.model_number", "the default model number names this target"),
    Difference(
        r"19.*|20[gi].*|33.*|40_.*|40[cdfghinpqsuv].*|e1[345].*",
        r"error|code|message",
        NO_INITIATOR,
        "target",
    ),
    Difference(r"20_.*|20j.*|40[bejt].*", r"\[\]:missing", NO_INITIATOR, "target"),
    Difference(r"21[bd].*|50[bd].*", r"error|message", NO_VHOST, "target"),
    Difference(r"21c.*|50[cfj].*", r"\[\]:missing", NO_VHOST, "target"),
    Difference(r"e15.*", r"error", "Nvme0 was attached when it was recorded, and is detached by now", "host"),
    Difference(r"50f.*", r"\[\]\.sessions\[\]:missing", "nobody connects in this test", "host"),
)


class Target(Peer):
    """Our server, with the names of this run put into what was recorded."""

    def __init__(self, folder: Path, backend: ServiceBackend) -> None:
        self.backend = backend
        methods = RpcMethods(TargetModel(backend, allow_remote=True))
        backend.start()
        self.server = RpcServer(str(folder / "rpc.sock"), methods.call)
        self.server.start()
        super().__init__(self.server.path, folder)

    def stop(self) -> None:
        self.server.stop()
        self.backend.stop(timeout_s=DEADLINE_S)

    def learn_port(self) -> None:
        """The first listener took any free port; from now on 4420 is that one."""
        if self.port != "0":
            return
        for subsystem in self.server.run_call("nvmf_get_subsystems", None, timeout_s=DEADLINE_S):
            for address in subsystem["listen_addresses"]:
                self.port = address["trsvcid"]


@pytest.fixture(params=["configuration", "data path"])
def targets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Target]]:
    """Three processes as recorded: without a data path they are hosts too, with one they are targets only."""
    fabric = MemoryFabric()
    built: dict[str, Target] = {}
    for name in ("target", "initiator", "second target"):
        folder = tmp_path / name
        folder.mkdir()
        if request.param == "configuration":
            backend: ServiceBackend = MemoryBackend(fabric=fabric, vhost_folder=str(folder))
        else:
            backend = TargetService()
        built[name] = Target(folder, backend)
    yield built
    for target in built.values():
        target.stop()


def our_methods() -> frozenset[str]:
    return frozenset({*RpcMethods(TargetModel(MemoryBackend())).names(), *STARTUP_ONLY_METHODS})


def test_replay_in_recorded_order_answers_as_spdk(targets: dict[str, Target]) -> None:
    ours = our_methods()
    role = "target" if targets["target"].backend.remote is None else "host"
    skipped: list[str] = []
    failures: list[str] = []
    used: set[Difference] = set()
    for case in CASES:
        if methods_named_in(case) & (SPDK_METHODS - ours):
            skipped.append(case["case"])
            continue
        target = targets[process_of(case)]
        target.port = targets["target"].port if process_of(case) == "initiator" else target.port
        comparison = target.compare(case)
        target.learn_port()
        failures += comparison.unexplained(DIFFERENCES, used, role=role)
    print(f"{len(CASES) - len(skipped)} cases compared, {len(skipped)} of methods we do not have: {skipped}")
    assert not failures, "\n".join(failures)
    mine = {each for each in DIFFERENCES if each.only in ("", role)}
    assert mine == used, "a difference that is none any more"
    assert (len(CASES), skipped) == (192, ["03e_env_dpdk_get_mem_stats"])
