"""Pages of TP8 ranks read by a TP4 engine, and the other way round, are those that it would have packed itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.clock import Deadline
from kvdev.errors import CorruptionError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.native.crc import crc32c
from kvdev.store.page_store import PageStatus, PageStore
from kvdev.store.resplit import SplitReader, open_split_reader
from kvdev_kernels import PagedLayout, PageKernels

HEADS = 8
TOKENS = 16
BLOCK = 4
MODEL = Geometry(
    model_id="split", layer_count=3, kv_head_count=HEADS, head_size=20, tokens_per_page=TOKENS, dtype="bf16"
)
PAGES = 5
TABLE = np.arange(PAGES * TOKENS // BLOCK)[::-1].reshape(PAGES, -1).copy()
KEYS: KeyArray = np.arange(PAGES * 32, dtype=np.uint8).reshape(PAGES, 32)


def soon() -> Deadline:
    return Deadline.after(60)


def rank(ranks: int, index: int) -> Geometry:
    """The geometry of one of so many ranks."""
    count = HEADS // ranks
    return replace(MODEL, kv_head_first=index * count, kv_head_count=count, kv_head_total=HEADS)


@pytest.fixture(scope="module")
def caches() -> list[npt.NDArray[np.uint16]]:
    """Per layer [2, blocks, tokens, all heads, elements], as one engine without tensor parallelism has them."""
    rng = np.random.default_rng(11)
    shape = (2, PAGES * TOKENS // BLOCK, BLOCK, HEADS, MODEL.head_size)
    return [rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(MODEL.layer_count)]


def packed(caches: list[npt.NDArray[np.uint16]], geometry: Geometry) -> npt.NDArray[np.uint8]:
    """The canonical pages that an engine with this head range packs."""
    first = geometry.kv_head_first
    mine = [np.ascontiguousarray(layer[:, :, :, first : first + geometry.kv_head_count]) for layer in caches]
    pages = np.zeros((PAGES, geometry.page_size_bytes), dtype=np.uint8)
    with PageKernels("numpy") as kernels:
        kernels.pack(PagedLayout.from_vllm_nhd(geometry, mine), TABLE, pages)
    return pages


def offload(lab: Any, caches: list[npt.NDArray[np.uint16]], ranks: int) -> list[str]:
    """What each rank puts into its own KV namespace; their names."""
    names = []
    for index in range(ranks):
        names.append(f"tp{ranks}.{index}")
        geometry = rank(ranks, index)
        lab.volume.create_namespace(
            names[-1], geometry, quota_pages=PAGES, journal_block_count=4, deadline=soon()
        )
        store = PageStore(lab.volume.open_namespace(names[-1], geometry=geometry, deadline=soon()))
        assert store.put(KEYS, packed(caches, geometry)).stored_count == PAGES
        store.close()
    return names


@pytest.mark.parametrize(("theirs", "ours"), [(8, 4), (4, 8), (8, 1), (1, 8), (8, 8), (2, 4)])
def test_pages_of_other_ranks_equal_what_the_engine_itself_packs(
    lab: Any, caches: list[npt.NDArray[np.uint16]], theirs: int, ours: int
) -> None:
    names = offload(lab, caches, theirs)
    for index in range(ours):
        geometry = rank(ours, index)
        reader = open_split_reader(lab.volume, names, geometry, deadline=soon())
        out = np.zeros((PAGES, geometry.page_size_bytes), dtype=np.uint8)
        got = reader.get(KEYS, out)
        assert got.hit_count == PAGES and got.failure is None
        assert np.array_equal(out, packed(caches, geometry))
        assert got.crc32c.tolist() == [crc32c(page.tobytes()) for page in out]
        assert len(reader.sources) == max(1, theirs // ours)
        assert reader.contains(KEYS).all() and reader.longest_prefix(KEYS) == PAGES


def test_page_when_one_source_lacks_or_damages_it_is_a_miss_or_an_error(
    lab: Any, caches: list[npt.NDArray[np.uint16]]
) -> None:
    names = offload(lab, caches, 4)
    stores = [PageStore(lab.volume.open_namespace(name, deadline=soon())) for name in names]
    stores[1].delete(KEYS[1:2])
    stores[3].delete(KEYS[4:5])
    grant = stores[2].namespace.lookup(KEYS[3:4])[0]
    lab.volume.io.write(stores[2].namespace.slot_slba(int(grant["slot_index"])), bytes(4096), soon())
    reader = SplitReader(stores, replace(MODEL, kv_head_total=HEADS))
    assert reader.contains(KEYS).tolist() == [True, False, True, True, False]
    assert reader.longest_prefix(KEYS) == 1
    out = np.full((PAGES, MODEL.page_size_bytes), 0xEE, dtype=np.uint8)
    got = reader.get(KEYS, out)
    assert got.status.tolist() == [
        PageStatus.HIT,
        PageStatus.MISS,
        PageStatus.HIT,
        PageStatus.ERROR,
        PageStatus.MISS,
    ]
    assert isinstance(got.failure, CorruptionError) and "v#tp4.2" in str(got.failure)
    right = packed(caches, MODEL)
    assert np.array_equal(out[[0, 2]], right[[0, 2]])
    for store in stores:
        store.namespace.abandon()


def test_scratch_when_it_holds_one_page_reads_them_one_by_one(
    lab: Any, caches: list[npt.NDArray[np.uint16]]
) -> None:
    stores = [
        PageStore(lab.volume.open_namespace(name, mode="reader", deadline=soon()))
        for name in offload(lab, caches, 2)
    ]
    page_bytes = rank(2, 0).page_size_bytes
    with pytest.raises(UsageError, match=f"scratch: expected at least {page_bytes} bytes"):
        SplitReader(stores, MODEL, scratch=np.zeros(page_bytes - 1, dtype=np.uint8))
    reader = SplitReader(stores, MODEL, scratch=np.zeros(page_bytes, dtype=np.uint8))
    out = np.zeros((PAGES, MODEL.page_size_bytes), dtype=np.uint8)
    assert reader.get(KEYS, out).hit_count == PAGES
    assert np.array_equal(out, packed(caches, MODEL))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", "other"),
        ("revision", "r2"),
        ("layer_first", 1),
        ("layer_count", 2),
        ("dtype", "fp16"),
        ("tokens_per_page", 32),
        ("head_size", 10),
        ("kv_head_total", 16),
    ],
)
def test_sources_of_another_geometry_are_refused_naming_the_field(lab: Any, field: str, value: Any) -> None:
    lab.volume.create_namespace("s", MODEL, quota_pages=PAGES, journal_block_count=4, deadline=soon())
    with pytest.raises(
        UsageError, match=rf"v#s: geometry: {field}: expected {value!r} as the reader has, got"
    ):
        open_split_reader(lab.volume, ["s"], replace(MODEL, **{field: value}), deadline=soon())


def test_sources_when_heads_are_missing_are_refused_naming_them(
    lab: Any, caches: list[npt.NDArray[np.uint16]]
) -> None:
    names = offload(lab, caches, 8)
    with pytest.raises(
        UsageError, match=r"expected KV heads 0 to 7, got none for 2 to 4: v#tp8.0 \(0 to 0\), "
    ):
        open_split_reader(lab.volume, [*names[:2], *names[5:]], MODEL, deadline=soon())
    with pytest.raises(UsageError, match="sources: expected at least one"):
        open_split_reader(lab.volume, [], MODEL, deadline=soon())
    with pytest.raises(UsageError, match="mode: expected reader or follower"):
        open_split_reader(lab.volume, names, MODEL, mode="owner", deadline=soon())
    # A rank has its own head range, and is told so when it opens another's.
    with pytest.raises(UsageError, match="geometry: kv_head_first: expected 1, the namespace has 0"):
        lab.volume.open_namespace(names[0], geometry=rank(8, 1), deadline=soon())
    reader = open_split_reader(lab.volume, names, rank(4, 1), deadline=soon())
    with pytest.raises(UsageError, match="is in the batch twice"):
        reader.get(KEYS[[0, 0]], np.zeros((2, reader.page_size_bytes), dtype=np.uint8))


def test_latents_of_any_rank_are_read_as_they_are(lab: Any) -> None:
    geometry = Geometry(
        model_id="mla", layer_count=2, kv_head_count=1, head_size=72, tokens_per_page=16, attention="mla"
    )
    pages = np.random.default_rng(3).integers(0, 256, (PAGES, geometry.page_size_bytes), np.uint8)
    for name in ("a", "b"):
        lab.volume.create_namespace(name, geometry, quota_pages=PAGES, journal_block_count=4, deadline=soon())
        store = PageStore(lab.volume.open_namespace(name, deadline=soon()))
        store.put(KEYS, pages)
        store.close()
    reader = open_split_reader(lab.volume, ["a", "b"], geometry, deadline=soon())
    out = np.zeros_like(pages)
    assert reader.get(KEYS, out).hit_count == PAGES and np.array_equal(out, pages)
    assert reader.sources == ["v#a"]
