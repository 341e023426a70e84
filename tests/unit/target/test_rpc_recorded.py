"""Replays what a real spdk_tgt was asked, in the recorded order, and compares our replies with its own.

Compared are types, keys, codes and messages, and the values too unless they are volatile. Whatever differs
on purpose stands in DIFFERENCES with its reason; a case of a method that we do not have is counted.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvdev.target.model import ServiceBackend, TargetModel
from kvdev.target.rpc_methods import STARTUP_ONLY_METHODS, RpcMethods
from kvdev.target.rpc_server import RpcServer
from kvdev.target.service import TargetService
from kvdev.testing.target_backend import MemoryBackend, MemoryFabric
from spdk_rpc.framing import JsonSplitter, decode_value

RECORDED = Path(__file__).resolve().parents[2] / "data" / "spdk_recorded.jsonl"
DEADLINE_S = 10.0
PROBE_ID = "probe"

# Values that say when or where it ran; their types are compared.
VOLATILE = frozenset(
    {
        "tick_rate",
        "ticks",
        "pid",
        "tid",
        "busy",
        "idle",
        "sys",
        "usr",
        "elapsed",
        "lcore",
        "thread_id",
        "numa_id",
        "in_interrupt",
        "irq",
        "version",
        "suffix",
        "cntlid",
        "hostnqn",
        "hostid",
        "admin_qpairs",
        "io_qpairs",
        "current_admin_qpairs",
        "current_io_qpairs",
        "completed_nvme_io",
        "cpumask",
    }
)
# Made up anew in each process, unless the request named them.
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
IDENTITY = frozenset({"uuid", "nguid", "aliases"})
GIVEN_IDENTITY = frozenset({"ceccf520-691e-4b46-9546-34af789907c5", "ABCDEF0123456789ABCDEF0123456789"})


@dataclass(frozen=True)
class Difference:
    """Where our reply differs on purpose: a case and a place in the result, as patterns."""

    case: str
    place: str
    reason: str
    only: str = ""
    """"host" or "target": of a peer that is one only."""


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


def load_cases() -> list[dict[str, Any]]:
    """The cases in the order they were run: sorted by name but for 62b, which the nsids in its replies order."""
    cases: list[dict[str, Any]] = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return sorted(
        cases,
        key=lambda case: (
            cases.index(case)
            if not case["case"].startswith("62b")
            else next(index for index, other in enumerate(cases) if other["case"].startswith("62b"))
            + json.loads(case["response"])["result"] / 10
        ),
    )


CASES = load_cases()
SPDK_METHODS: frozenset[str] = frozenset(
    json.loads(next(case for case in CASES if case["case"] == "02_rpc_get_methods")["response"])["result"]
)


class Target:
    """A server, with the names of this run put into what was recorded."""

    def __init__(self, folder: Path, backend: ServiceBackend) -> None:
        self.backend = backend
        self.folder = folder
        self.port = "0"
        for name, size_bytes in (("backing.img", 512 << 20), ("backing2.img", 256 << 20)):
            (folder / name).touch()
            # Sparse: only the size matters.
            os.truncate(folder / name, size_bytes)
        methods = RpcMethods(TargetModel(backend, allow_remote=True))
        backend.start()
        self.server = RpcServer(str(folder / "rpc.sock"), methods.call)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self.backend.stop(timeout_s=DEADLINE_S)

    def put_names(self, text: str) -> str:
        text = text.replace("/data/backing", f"{self.folder}/backing").replace('"4420"', f'"{self.port}"')
        return re.sub(r"/var(/var)?/tmp/vhost", f"{self.folder}/vhost", text)

    def learn_port(self) -> None:
        """The first listener took any free port; from now on 4420 is that one."""
        if self.port != "0":
            return
        for subsystem in self.server.run_call("nvmf_get_subsystems", None, timeout_s=DEADLINE_S):
            for address in subsystem["listen_addresses"]:
                self.port = address["trsvcid"]

    def exchange(self, case: dict[str, Any]) -> tuple[list[Any], bool]:
        """Send the raw request; return the replies and whether the server closed the connection."""
        splitter = JsonSplitter(size_limit_bytes=32 << 20)
        replies: list[Any] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(self.server.path)
            connection.sendall(self.put_names(case["request"]).encode())
            if case["case"] == "r21_partial_then_close":
                connection.shutdown(socket.SHUT_WR)
            elif not case.get("peer_closed"):
                # Its reply ends the exchange: whatever comes before it belongs to the case.
                connection.sendall(json.dumps({"method": "framework_wait_init", "id": PROBE_ID}).encode())
            while chunk := connection.recv(65536):
                for raw in splitter.feed(chunk):
                    value = decode_value(raw)
                    if isinstance(value, dict) and value.get("id") == PROBE_ID:
                        return replies, False
                    replies.append(value)
        return replies, True


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


def process_of(case: dict[str, Any]) -> str:
    """Which of the three processes a case was recorded from."""
    if case["case"].startswith("6"):
        return "second target"
    return "initiator" if case["case"].startswith("40") and '"nvmf_' not in case["request"] else "target"


def methods_named_in(case: dict[str, Any]) -> set[str]:
    return set(re.findall(r'"method":\s*"(\w+)"', case["request"]))


def our_methods() -> frozenset[str]:
    return frozenset({*RpcMethods(TargetModel(MemoryBackend())).names(), *STARTUP_ONLY_METHODS})


class Comparison:
    """Collects where ours differs from the recorded, by place."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.found: list[tuple[str, str]] = []

    def note(self, place: str, text: str) -> None:
        self.found.append((place, text))

    def unexplained(self, used: set[Difference], *, is_host: bool) -> list[str]:
        left = []
        role = "host" if is_host else "target"
        for place, text in self.found:
            known = [
                each
                for each in DIFFERENCES
                if re.fullmatch(each.case, self.case)
                and re.fullmatch(each.place, place)
                and each.only in ("", role)
            ]
            used.update(known)
            if not known:
                left.append(f"{self.case}: {place}: {text}")
        return left

    def reply(self, recorded: dict[str, Any], ours: dict[str, Any]) -> None:
        if recorded.get("id") != ours.get("id"):
            self.note("id", f"{recorded.get('id')!r} != {ours.get('id')!r}")
        if ("error" in recorded) != ("error" in ours):
            self.note("error", f"recorded {str(recorded)[:200]}, ours {str(ours)[:200]}")
        elif "error" in recorded:
            self.error(recorded["error"], ours["error"])
        else:
            self.value("", recorded["result"], ours["result"])

    def error(self, recorded: dict[str, Any], ours: dict[str, Any]) -> None:
        if recorded["code"] != ours["code"]:
            self.note("code", f"{recorded} != {ours}")
        text: str = ours["message"]
        # Ours adds the reason after a colon.
        if text != recorded["message"] and not text.startswith(recorded["message"] + ": "):
            self.note("message", f"{recorded} != {ours}")

    def value(self, place: str, recorded: Any, ours: Any) -> None:
        if isinstance(recorded, dict) and isinstance(ours, dict):
            self.object(place, recorded, ours)
        elif type(recorded) is not type(ours):
            self.note(place, f"type {type(recorded).__name__} != {type(ours).__name__}")
        elif isinstance(recorded, list):
            self.array(place, recorded, ours)
        elif recorded != ours and not self.is_free(place, recorded):
            self.note(place, f"{recorded!r} != {ours!r}")

    @staticmethod
    def is_free(place: str, recorded: Any) -> bool:
        if isinstance(recorded, str) and UUID.fullmatch(recorded):
            return recorded not in GIVEN_IDENTITY and recorded != str(uuid.UUID(int=0))
        name = place.rsplit(".", 1)[-1].removesuffix("[]")
        if name in IDENTITY:
            return str(recorded) not in GIVEN_IDENTITY and recorded != str(uuid.UUID(int=0))
        return (
            name in VOLATILE
            or re.fullmatch(r"(bytes|num|max|min|read|write)_\w*(read|written|ops|ticks)", name) is not None
        )

    def object(self, place: str, recorded: dict[str, Any], ours: dict[str, Any]) -> None:
        dot = f"{place}." if place else ""
        for name in sorted(recorded.keys() | ours.keys()):
            if name not in ours:
                self.note(f"{dot}{name}:missing", f"{recorded[name]!r}"[:100])
            elif name not in recorded:
                self.note(f"{dot}{name}:extra", f"{ours[name]!r}"[:100])
            else:
                self.value(f"{dot}{name}", recorded[name], ours[name])

    def array(self, place: str, recorded: list[Any], ours: list[Any]) -> None:
        inner = f"{place}[]"
        theirs_by_key = {element_key(index, each): each for index, each in enumerate(recorded)}
        ours_by_key = {element_key(index, each): each for index, each in enumerate(ours)}
        for key in sorted(theirs_by_key.keys() | ours_by_key.keys(), key=str):
            if key not in ours_by_key:
                self.note(f"{inner}:missing", f"{key}")
            elif key not in theirs_by_key:
                self.note(f"{inner}:extra", f"{key}")
            else:
                self.value(inner, theirs_by_key[key], ours_by_key[key])


def element_key(index: int, element: Any) -> str:
    """What names an element of a list, so that lists of different length can be compared."""
    if isinstance(element, str):
        return f"{index}" if UUID.fullmatch(element) else element
    if not isinstance(element, dict):
        return f"{index}"
    if "method" in element:
        params = element.get("params", {})
        named = [params.get(name) for name in ("name", "nqn", "trtype")]
        return f"{element['method']} {named} {params.get('namespace', {}).get('nsid')}"
    if "ctx" in element:
        # Ids count in the order of events, whatever a bdev's UUID is.
        return f"{element['type']} {element['id'] if UUID.fullmatch(element['ctx']) else element['ctx']}"
    if {"thread_id", "lcore", "admin_qpairs", "elapsed"} & element.keys():
        return f"{index}"
    if "lvol" in element.get("driver_specific", {}):
        return f"{element['aliases']}"
    if UUID.fullmatch(str(element.get("name"))):
        return f"a bdev with the UUID as its name, {index}"
    return next(
        (f"{element[name]}" for name in ("nsid", "nqn", "subsystem", "trtype", "name") if name in element),
        f"{index}",
    )


def compare(target: Target, case: dict[str, Any]) -> Comparison:
    comparison = Comparison(case["case"])
    replies, is_closed = target.exchange(case)
    target.learn_port()
    text = target.put_names(case["response"])
    expected = [decode_value(raw) for raw in JsonSplitter(size_limit_bytes=32 << 20).feed(text.encode())]
    if bool(case.get("peer_closed")) != is_closed and case["case"] != "r21_partial_then_close":
        comparison.note("closed", f"recorded {case.get('peer_closed')}, ours {is_closed}")
    if len(replies) != len(expected):
        comparison.note("count", f"recorded {len(expected)} replies, ours {len(replies)}")
    for recorded, ours in zip(expected, replies, strict=False):
        if isinstance(recorded, list):
            for one_recorded, one_ours in zip(recorded, ours, strict=True):
                comparison.reply(one_recorded, one_ours)
        else:
            comparison.reply(recorded, ours)
    return comparison


def test_replay_in_recorded_order_answers_as_spdk(targets: dict[str, Target]) -> None:
    ours = our_methods()
    is_host = targets["target"].backend.remote is not None
    skipped: list[str] = []
    failures: list[str] = []
    used: set[Difference] = set()
    for case in CASES:
        if methods_named_in(case) & (SPDK_METHODS - ours):
            skipped.append(case["case"])
            continue
        target = targets[process_of(case)]
        target.port = targets["target"].port if process_of(case) == "initiator" else target.port
        failures += compare(target, case).unexplained(used, is_host=is_host)
    print(f"{len(CASES) - len(skipped)} cases compared, {len(skipped)} of methods we do not have: {skipped}")
    assert not failures, "\n".join(failures)
    mine = {each for each in DIFFERENCES if each.only in ("", "host" if is_host else "target")}
    assert mine == used, "a difference that is none any more"
    assert (len(CASES), skipped) == (192, ["03e_env_dpdk_get_mem_stats"])
