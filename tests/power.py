"""Power cuts under load: a client that puts, overwrites, deletes and flushes, and a check by what it wrote down.

``power.py client URI LEDGER SEED`` works until it is killed; ``power.py check URI LEDGER SEED`` opens what the cut left
and says what is wrong with it, a line each. ``power_cuts`` runs both in turn around a machine that loses its power.
Not here: the machines (``kvdev.testing.killable``, the interop tests' guests).
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, KvdevError
from kvdev.geometry import Geometry
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.store import PageStatus, PageStore, Volume
from kvdev.store.volume_io import MemberMask, VolumeIo
from kvdev.testing.recovery import until

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:0e7d5c1a-6a0f-4a53-8f0e-1f2f3c4d5e70"
GEOMETRY = Geometry(model_id="power", layer_count=1, kv_head_count=1, head_size=64, tokens_per_page=128)
PAGE = GEOMETRY.page_size_bytes
STRIP = 16384
"""Half a page: each lies on both members."""
KEY_COUNT = 40
QUOTA = 48
"""More than there are keys: nothing is evicted, so what was flushed has to be there."""
JOURNAL_BLOCKS = 16
BATCH_MAX = 8
ABSENT = 0
"""The version of a key that is not stored."""
OPEN_S = 120.0
KINDS = ("put", "delete", "get", "flush")
CHANCES = (0.55, 0.1, 0.1, 0.25)
LINES_BEFORE_CUT = (10, 120)

Bytes = npt.NDArray[np.uint8]


def keys_of(numbers: npt.NDArray[np.int64]) -> Bytes:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :8] = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    return keys


def page_of(key: int, version: int) -> Bytes:
    """A page that says at its start whose it is, and holds bytes of no other."""
    page = np.random.default_rng([key, version]).integers(0, 256, PAGE, dtype=np.uint8)
    page[:16] = np.array([key, version], dtype="<u8").view(np.uint8)
    return page


# --- the ledger ----------------------------------------------------------------------------------


@dataclass
class KeyState:
    """What the ledger says of one key."""

    durable: int = ABSENT
    """Its version at the last flush, or as it was found after a cut."""
    since: list[int] = field(default_factory=list)
    """What it was made since then, whether or not that came to an end."""

    @property
    def allowed(self) -> set[int]:
        return {self.durable, *self.since}


class Ledger:
    """Lines of a file: a change before it is asked for, a flush after it has succeeded, what was found after a cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, *lines: str) -> None:
        """In one call: a client that is killed leaves whole lines."""
        os.write(self._fd, "".join(line + "\n" for line in lines).encode())

    def line_count(self) -> int:
        return self.path.read_bytes().count(b"\n")

    def flush_count(self) -> int:
        return self.path.read_text().splitlines().count("flushed")

    def version_max(self) -> int:
        return max((state for each in self.states().values() for state in each.allowed), default=ABSENT)

    def states(self) -> dict[int, KeyState]:
        states = {key: KeyState() for key in range(KEY_COUNT)}
        for line in self.path.read_text().splitlines():
            match line.split():
                case ["put", key, version]:
                    states[int(key)].since.append(int(version))
                case ["delete", key]:
                    states[int(key)].since.append(ABSENT)
                case ["found", key, version]:
                    states[int(key)] = KeyState(int(version))
                case ["flushed"]:
                    for key_number, state in states.items():
                        if state.since:
                            states[key_number] = KeyState(state.since[-1])
                case _:
                    raise AssertionError(f"the ledger has a line of no kind: {line!r}")
        return states

    def close(self) -> None:
        os.close(self._fd)


# --- the processes -------------------------------------------------------------------------------


class FlushSendsNothing(VolumeIo):
    """Canary: flushes succeed and no device hears of them."""

    def flush(self, members: MemberMask, deadline: Deadline) -> None:
        pass


def make_session(rng: np.random.Generator) -> Session:
    """Each process under a HOSTID of its own, as every writer has: a reservation tells their writes apart."""
    host = HostIdentity.of(HOST_NQN, host_id=str(uuid.UUID(bytes=rng.bytes(16), version=4)))
    options = ControllerOptions(kato_ms=4000, fence_wait_s=1.0, cqt_default_s=1.0)
    return Session(host=host, options=options)


def open_store(session: Session, uri: str, *, has_flush: bool = True) -> PageStore:
    volume = session.open_volume(uri, deadline=Deadline.after(OPEN_S))
    if not has_flush:
        io = FlushSendsNothing(volume.io.device, strip_size_bytes=volume.strip_size_bytes)
        volume = Volume(io, volume.superblock, volume.members)
    return PageStore(volume.open_namespace("kv", deadline=Deadline.after(OPEN_S)), timeout_s=OPEN_S)


def work(store: PageStore, ledger: Ledger, rng: np.random.Generator) -> None:
    """One call after the other until the first that fails: then the power is gone."""
    version = ledger.version_max()
    pages = np.zeros((BATCH_MAX, PAGE), dtype=np.uint8)
    while True:
        kind = str(rng.choice(KINDS, p=CHANCES))
        numbers = rng.choice(KEY_COUNT, size=int(rng.integers(1, BATCH_MAX + 1)), replace=False)
        keys = keys_of(numbers)
        failure: KvdevError | None = None
        if kind == "put":
            for place, number in enumerate(numbers.tolist()):
                pages[place] = page_of(number, version + place + 1)
            ledger.note(
                *(f"put {number} {version + place + 1}" for place, number in enumerate(numbers.tolist()))
            )
            version += len(numbers)
            failure = store.put(keys, pages[: len(numbers)]).failure
        elif kind == "delete":
            ledger.note(*(f"delete {number}" for number in numbers.tolist()))
            store.delete(keys)
        elif kind == "get":
            failure = store.get(keys, pages[: len(numbers)]).failure
        else:
            store.flush()
            ledger.note("flushed")
        if failure is not None:
            raise failure


def check(store: PageStore, ledger: Ledger) -> list[str]:
    """What differs from the ledger; what was found goes into it."""
    numbers = np.arange(KEY_COUNT)
    pages = np.zeros((KEY_COUNT, PAGE), dtype=np.uint8)
    got = store.get(keys_of(numbers), pages)
    faults = []
    lines = []
    for key, state in ledger.states().items():
        version = ABSENT
        if got.status[key] == PageStatus.HIT:
            owner, version = pages[key, :16].view("<u8").tolist()
            if owner != key or not np.array_equal(pages[key], page_of(key, version)):
                faults.append(f"key {key}: the bytes of no version of it")
        if version not in state.allowed:
            wanted = " or ".join(
                "absent" if each == ABSENT else f"version {each}" for each in sorted(state.allowed)
            )
            found = "absent" if version == ABSENT else f"version {version}"
            faults.append(
                f"key {key}: expected {wanted} by what was flushed and asked for since, got {found}"
            )
        lines.append(f"found {key} {version}")
    ledger.note(*lines)
    return faults


def main(arguments: list[str]) -> int:
    what, uri, path, seed = arguments[:4]
    rng = np.random.default_rng([int(word) for word in seed.split(",")])
    ledger = Ledger(Path(path))
    with make_session(rng) as session:
        if what == "client":
            work(open_store(session, uri, has_flush="--flush-sends-nothing" not in arguments), ledger, rng)
        try:
            store = open_store(session, uri)
        except CorruptionError as error:
            print(f"not opened: {error}", flush=True)
            return 0
        for fault in check(store, ledger):
            print(fault, flush=True)
        if rng.random() < 0.5:
            os._exit(0)  # as a crash: the next owner finds what the cut left, and this one's lease
        store.close()
    return 0


# --- the drill -----------------------------------------------------------------------------------


class Machine(Protocol):
    """What holds the media, and loses its power."""

    def volume_uri(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...


def _run(*arguments: str, errors: Path) -> subprocess.Popen[str]:
    with errors.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
        )


def make_volume(uri: str) -> None:
    with make_session(np.random.default_rng(0)) as session:
        members = session.open_members(uri, deadline=Deadline.after(OPEN_S))
        volume = Volume.create(members, name="power", strip_size_bytes=STRIP, deadline=Deadline.after(OPEN_S))
        volume.create_namespace(
            "kv",
            GEOMETRY,
            quota_pages=QUOTA,
            journal_block_count=JOURNAL_BLOCKS,
            deadline=Deadline.after(OPEN_S),
        )


def cut_once(machine: Machine, ledger: Ledger, line_count: int, seeds: str, *, has_flush: bool) -> list[str]:
    """Cut the power once the ledger has grown by so many lines under a client; what is wrong afterwards."""
    uri, errors = machine.volume_uri(), ledger.path.with_suffix(".err")
    cut_at = ledger.line_count() + line_count
    extra = [] if has_flush else ["--flush-sends-nothing"]
    client = _run("client", uri, str(ledger.path), f"{seeds},1", *extra, errors=errors)
    try:
        until(
            lambda: ledger.line_count() >= cut_at or client.poll() is not None,
            "the client works",
            seconds=2 * OPEN_S,
        )
        assert client.poll() is None, f"the client ended by itself: {errors.read_text()[-2000:]}"
        machine.kill()
    finally:
        client.kill()
        client.communicate()
    machine.start()
    checker = _run("check", uri, str(ledger.path), f"{seeds},2", errors=errors)
    try:
        faults = checker.communicate(timeout=4 * OPEN_S)[0].splitlines()
    finally:
        checker.kill()
    assert checker.returncode == 0, f"the check failed: {errors.read_text()[-2000:]}"
    return faults


def power_cuts(machine: Machine, folder: Path, *, count: int, seed: int, has_flush: bool = True) -> list[str]:
    """Cut the power of a machine with empty members ``count`` times; what the first cut left wrong that did.

    Calls and cuts follow from the seed and the number of the round.
    """
    ledger = Ledger(folder / "ledger")
    make_volume(machine.volume_uri())
    try:
        for round_index in range(count):
            print(f"power cut: seed {seed}, round {round_index}", flush=True)
            rng = np.random.default_rng([seed, round_index])
            line_count = int(rng.integers(*LINES_BEFORE_CUT))
            faults = cut_once(machine, ledger, line_count, f"{seed},{round_index}", has_flush=has_flush)
            if faults:
                return [f"seed {seed}, round {round_index}: {fault}" for fault in faults]
        assert ledger.flush_count() > count, "a cut came before anything was flushed, and the others too"
        return []
    finally:
        ledger.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
