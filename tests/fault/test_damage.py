"""Every damage to every structure: what `volume check` says, what is lost, and that no page is ever wrong.

docs/damage.md has the table that this makes; ``KVDEV_GOLDEN=update`` writes it anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.local import LocalQueue
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.errors import KvdevError
from kvdev.geometry import Geometry
from kvdev.store.check import CheckReport, check_volume
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.volume import Volume

DOC = Path(__file__).resolve().parents[2] / "docs" / "damage.md"
BEGIN, END = "<!-- made by tests/fault/test_damage.py -->\n", "<!-- end -->\n"
GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
BLOCK = 4096
STRIP = 16384
MEMBER_COUNT = 3
MEMBER_BYTES = 4 << 20
QUOTA = 80
JOURNAL_BLOCKS = 8
Bytes = npt.NDArray[np.uint8]


def soon() -> Deadline:
    return Deadline.after(60)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def place_of(lba: int) -> tuple[int, int]:
    """Member and first byte of a logical block."""
    strip, within = divmod(lba, STRIP // BLOCK)
    return strip % MEMBER_COUNT, (strip // MEMBER_COUNT * (STRIP // BLOCK) + within) * BLOCK


class Made:
    """A volume with a history, on images that tests copy: pages in the table, others in the journal alone."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        queue = LocalQueue()
        self.members = [
            MemoryDevice(size_bytes=MEMBER_BYTES, name=f"m{index}", queue=queue)
            for index in range(MEMBER_COUNT)
        ]
        half = MEMBER_COUNT * MEMBER_BYTES // 2
        volume = Volume.create(
            self.members, name="v", strip_size_bytes=STRIP, size_bytes=half, deadline=soon()
        )
        for name in ("kv", "other"):
            volume.create_namespace(
                name, GEOMETRY, quota_pages=QUOTA, journal_block_count=JOURNAL_BLOCKS, deadline=soon()
            )
        self.keys = rng.integers(0, 256, (40, 32), dtype=np.uint8)
        self.pages = rng.integers(0, 256, (40, PAGE), dtype=np.uint8)
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        for _ in range(
            JOURNAL_BLOCKS
        ):  # once around the journal, and an older page in every slot that is used
            store.put(self.keys, self.pages[::-1].copy())
            store.flush()
        store.close()
        self.before = [member.data.copy() for member in self.members]
        volume.grow(deadline=soon())
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        store.put(self.keys[:25], self.pages[:25])
        store.close()
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
        for start in (25, 30, 35):  # a block of the journal each
            store.put(self.keys[start : start + 5], self.pages[start : start + 5])
            store.flush()
        self.slots: list[int] = store.namespace.lookup(self.keys, touch=False)["slot_index"].tolist()
        store.namespace.abandon()
        self.record = volume.namespace("kv", deadline=soon()).record
        self.other = volume.namespace("other", deadline=soon()).record
        self.slba_of = volume.directory.slba_of
        self.now = [member.data.copy() for member in self.members]

    def slot_lba(self, number: int) -> int:
        return self.record.data_slba + self.slots[number] * self.record.slot_blocks


Place = tuple[int, int]


@dataclass(frozen=True)
class Structure:
    """Blocks that are damaged together, each with another of its kind to change places with."""

    name: str
    places: list[Place]
    others: list[Place]


def structures(made: Made) -> list[Structure]:
    record, newer = made.record, made.record.sequence % 2
    index, other = record.record_index, made.other.record_index

    def copies(*which: int) -> tuple[list[Place], list[Place]]:
        return (
            [place_of(made.slba_of(index, copy)) for copy in which],
            [place_of(made.slba_of(other, copy)) for copy in which],
        )

    def blocks(first: int, second: int) -> tuple[list[Place], list[Place]]:
        return [place_of(first)], [place_of(second)]

    tail = record.tail_position
    journal = [record.journal_slba + (tail + step) % JOURNAL_BLOCKS for step in range(3)]
    return [
        Structure("label", [(1, 0)], [(2, 0)]),
        Structure("superblock copy", [(0, BLOCK)], [(1, BLOCK)]),
        Structure("both superblock copies", [(0, BLOCK), (1, BLOCK)], [(1, BLOCK), (0, BLOCK)]),
        Structure("record, newer copy", *copies(newer)),
        Structure("record, older copy", *copies(1 - newer)),
        Structure("record, both copies", *copies(0, 1)),
        Structure("geometry in the extent", *blocks(record.geometry_slba, made.other.geometry_slba)),
        Structure("table block", *blocks(record.table_slba, record.table_slba + 1)),
        Structure("table block, of another namespace", *blocks(record.table_slba, made.other.table_slba)),
        Structure("journal block, not the last", *blocks(journal[0], journal[1])),
        Structure("journal block, the last", *blocks(journal[2], journal[1])),
        Structure("page", *blocks(made.slot_lba(3), made.slot_lba(4))),
    ]


Damage = Callable[[list[Bytes], Made, Made, Structure], None]


def torn(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    """The first 128 bytes are those that were written, the rest those before."""
    for member, byte in structure.places:
        images[member][byte + 128 : byte + BLOCK] = made.before[member][byte + 128 : byte + BLOCK]
        if np.array_equal(images[member][byte : byte + BLOCK], made.now[member][byte : byte + BLOCK]):
            images[member][byte + 128 : byte + BLOCK] = 0  # never written before


def flipped(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    for member, byte in structure.places:
        images[member][byte + 100] ^= 0x04


def zeroed(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    for member, byte in structure.places:
        images[member][byte : byte + BLOCK] = 0


def swapped(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    for (member, byte), (second, second_byte) in zip(structure.places, structure.others, strict=True):
        images[member][byte : byte + BLOCK] = made.now[second][second_byte : second_byte + BLOCK]
        images[second][second_byte : second_byte + BLOCK] = made.now[member][byte : byte + BLOCK]


def stale(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    for member, byte in structure.places:
        images[member][byte : byte + BLOCK] = made.before[member][byte : byte + BLOCK]


def foreign_blocks(images: list[Bytes], made: Made, foreign: Made, structure: Structure) -> None:
    for member, byte in structure.places:
        images[member][byte : byte + BLOCK] = foreign.now[member][byte : byte + BLOCK]


DAMAGES: dict[str, Damage] = {
    "torn": torn,
    "flipped": flipped,
    "zeroed": zeroed,
    "swapped": swapped,
    "stale": stale,
    "foreign": foreign_blocks,
}


def load(made: Made, images: list[Bytes]) -> None:
    for member, image in zip(made.members, images, strict=True):
        member.data[:] = image


def found_pages(made: Made) -> tuple[int, int] | None:
    """How many pages are found as they were put last, and as they were put before; None when nothing opens."""
    out = np.zeros_like(made.pages)
    try:
        volume = Volume.open(made.members, deadline=soon())
        store = PageStore(volume.open_namespace("kv", deadline=soon()))
    except KvdevError:
        return None
    status = store.get(made.keys, out).status
    store.namespace.abandon()
    hits = np.flatnonzero(status == PageStatus.HIT)
    last = {number for number in hits if np.array_equal(out[number], made.pages[number])}
    before = {number for number in hits if np.array_equal(out[number], made.pages[39 - number])} - last
    wrong = set(hits.tolist()) - last - before
    assert not wrong, f"pages {sorted(wrong)}: bytes that were never put under their keys"
    return len(last), len(before)


def said(report: CheckReport) -> str:
    """The findings in a line, without what differs from run to run."""
    texts = []
    for finding in report.all_findings:
        text = re.sub(r"\b(0x)?[0-9a-f]{8,}\b", "…", str(finding).removeprefix("volume: "))
        page = r"page … in slot \d+ at LBA \d+ \(LBA \d+ of mem:m\d\)"
        texts.append(re.sub(page, "page … in slot S at LBA L (LBA M of mem:mI)", text))
    return "; ".join(text for text, _ in groupby(texts)) or "nothing"


@dataclass(frozen=True)
class Row:
    structure: str
    damage: str
    says: str
    lost: str
    repaired: str


def row_of(made: Made, foreign: Made, structure: Structure, damage: str) -> Row | None:
    """What one damage does; None where it changes nothing."""
    images = [image.copy() for image in made.now]
    DAMAGES[damage](images, made, foreign, structure)
    if all(np.array_equal(one, two) for one, two in zip(images, made.now, strict=True)):
        return None
    load(made, images)
    report = check_volume(made.members)
    assert all(np.array_equal(m.data, image) for m, image in zip(made.members, images, strict=True)), (
        "read-only"
    )
    says = said(report)
    pages = found_pages(made)
    load(made, images)  # as the damage left it: an owner has opened it meanwhile
    lost = "all, refused" if pages is None else str(40 - pages[0]) if pages[0] < 40 else "none"
    if pages is not None and pages[1]:
        lost += f" ({pages[1]} are found as they were put before)"
    bound = sum(finding.lost_pages_max for finding in report.all_findings)
    where = f"{structure.name}, {damage}"
    if pages is not None and says != "nothing" and bound:
        assert 40 - pages[0] <= bound, f"{where}: more is lost than it says: {says}"
    repaired = check_volume(made.members, repair=True)
    after = check_volume(made.members)
    still = found_pages(made)
    if pages is not None:
        assert still is not None and still >= pages, f"{where}: {pages} before repair, {still} after"
        assert after.is_ok, f"{where}: after repair: {after.all_findings}"
    word = "whole" if after.is_ok else "refused"
    if after.is_ok and still is None:
        word = "whole, without the namespace"
    assert after.is_ok == all(finding.is_repaired for finding in repaired.all_findings), where
    return Row(structure.name, damage, says, lost, word)


def render(rows: list[Row]) -> str:
    lines = [
        "| structure | damage | `volume check` says | pages lost of 40 | after `--repair` |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.structure} | {row.damage} | {row.says.replace('|', '/')} | {row.lost} | {row.repaired} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def test_every_damage_says_what_the_table_says_and_gives_no_wrong_page() -> None:
    made, foreign = Made(1), Made(2)
    rows = []
    for structure in structures(made):
        for damage in DAMAGES:
            row = row_of(made, foreign, structure, damage)
            if row is not None:
                rows.append(row)
    text = DOC.read_text()
    head, _, rest = text.partition(BEGIN)
    table, _, tail = rest.partition(END)
    assert rest and _, "docs/damage.md has the two marks"
    if os.environ.get("KVDEV_GOLDEN") == "update":
        DOC.write_text(head + BEGIN + render(rows) + END + tail)
        return
    assert table == render(rows), "KVDEV_GOLDEN=update writes it anew; read the difference"
