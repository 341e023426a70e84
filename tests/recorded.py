"""What a real spdk_tgt was asked and answered, and how two answers are compared.

Compared are types, keys, codes and messages, and the values too unless they are volatile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spdk_rpc.framing import JsonSplitter, decode_value

DEADLINE_S = 10.0
PROBE_ID = "probe"
RECORDED = Path(__file__).resolve().parent / "data" / "spdk_recorded.jsonl"

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


def process_of(case: dict[str, Any]) -> str:
    """Which of the three processes a case was recorded from."""
    if case["case"].startswith("6"):
        return "second target"
    return "initiator" if case["case"].startswith("40") and '"nvmf_' not in case["request"] else "target"


def methods_named_in(case: dict[str, Any]) -> set[str]:
    return set(re.findall(r'"method":\s*"(\w+)"', case["request"]))


class Comparison:
    """Collects where ours differs from the recorded, by place."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.found: list[tuple[str, str]] = []

    def note(self, place: str, text: str) -> None:
        self.found.append((place, text))

    def unexplained(
        self, differences: Iterable[Difference], used: set[Difference], *, role: str
    ) -> list[str]:
        """What no difference explains; those that explain something are added to ``used``."""
        left = []
        for place, text in self.found:
            known = [
                each
                for each in differences
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


class Peer:
    """A server that is asked what was recorded, with the names of this run put in."""

    def __init__(self, path: str, folder: Path, *, port: str = "0", deadline_s: float = DEADLINE_S) -> None:
        self.path = path
        self.folder = folder
        self.port = port
        self.deadline_s = deadline_s
        for name, size_bytes in (("backing.img", 512 << 20), ("backing2.img", 256 << 20)):
            (folder / name).touch()
            # Sparse: only the size matters.
            os.truncate(folder / name, size_bytes)

    def put_names(self, text: str) -> str:
        text = text.replace("/data/backing", f"{self.folder}/backing").replace('"4420"', f'"{self.port}"')
        return re.sub(r"/var(/var)?/tmp/vhost", f"{self.folder}/vhost", text)

    def exchange(self, case: dict[str, Any], *, reply_count: int) -> tuple[list[Any], bool]:
        """Send the raw request; return the replies and whether the server closed the connection.

        A reply may be overtaken by that to the probe: so many are waited for, within the deadline.
        """
        splitter = JsonSplitter(size_limit_bytes=32 << 20)
        replies: list[Any] = []
        has_probe = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self.deadline_s)
            connection.connect(self.path)
            connection.sendall(self.put_names(case["request"]).encode())
            if case["case"] == "r21_partial_then_close":
                connection.shutdown(socket.SHUT_WR)
            elif not case.get("peer_closed"):
                # Its reply ends the exchange: whatever comes before it belongs to the case.
                connection.sendall(json.dumps({"method": "framework_wait_init", "id": PROBE_ID}).encode())
            with contextlib.suppress(TimeoutError):
                while chunk := connection.recv(65536):
                    for raw in splitter.feed(chunk):
                        value = decode_value(raw)
                        if isinstance(value, dict) and value.get("id") == PROBE_ID:
                            has_probe = True
                        else:
                            replies.append(value)
                    if has_probe and len(replies) >= reply_count:
                        return replies, False
                return replies, True
        return replies, False

    def compare(self, case: dict[str, Any]) -> Comparison:
        """Ask again, and note where the answer is another."""
        comparison = Comparison(case["case"])
        text = self.put_names(case["response"])
        expected = [decode_value(raw) for raw in JsonSplitter(size_limit_bytes=32 << 20).feed(text.encode())]
        replies, is_closed = self.exchange(case, reply_count=len(expected))
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
