"""Pages of one head range, put together from KV namespaces of others: TP8's read by a TP4 engine, or TP4's by TP8.

A rank writes and looks up its own KV namespace only; this is the explicit exception, for reading, and it names its
sources. Canonical bytes are rows of heads, so a page of another range is made by copying pieces of rows.
Not here: pages of an engine's tensors (``kvdev_kernels``).
Threads: one caller at a time; blocks while it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvdev.block.device import aligned_buffer
from kvdev.buffers import AddressArray, AddressedPages, Pages, page_addresses
from kvdev.clock import Deadline
from kvdev.errors import KvdevError, UsageError
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray, check_keys
from kvdev.native.checksum import CRC32C
from kvdev.native.index import GRANT_DTYPE, SLOT_NONE, GrantArray, copy_many
from kvdev.native.io import address_of
from kvdev.store.batch import GetResult, PageStatus, check_batch
from kvdev.store.namespace import Mode
from kvdev.store.page_store import BATCH_TIMEOUT_S, PageStore
from kvdev.store.volume import Volume
from kvdev.units import MIB

SCRATCH_BYTES = 32 * MIB
"""Source pages that are read at once, where the caller brings no memory: keeps every member busy."""
HEAD_FIELDS = ("kv_head_first", "kv_head_count")
"""In what the geometries of sources and reader may differ."""


class HeadRange(Protocol):
    """Something with pages of some KV heads, and its name in errors."""

    @property
    def what(self) -> str: ...

    @property
    def geometry(self) -> Geometry: ...


class PageSource(HeadRange, Protocol):
    """A KV namespace to read from: a ``PageStore``, or a ``PoolStore`` of ``kvdev.pool``."""

    def get(self, keys: KeyArray, pages: Pages, *, deadline: Deadline | None = None) -> GetResult: ...

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]: ...

    def longest_prefix(self, keys: KeyArray) -> int: ...


Source = TypeVar("Source", bound=HeadRange)


@dataclass(frozen=True)
class _Piece(Generic[Source]):
    """Heads that one source has for the reader: bytes of each row, and where they lie in both sorts of pages."""

    source: Source
    size_bytes: int
    source_offsets: AddressArray
    target_offsets: AddressArray
    is_whole: bool
    """The source's pages are the reader's as they are."""

    def copy(self, source_page: int, target_page: int) -> None:
        """Copy these heads from the page at one address to that at the other; the caller keeps both alive."""
        copy_many(
            np.uint64(target_page) + self.target_offsets,
            np.uint64(source_page) + self.source_offsets,
            self.size_bytes,
        )


class SplitReader:
    """Reads pages of a geometry from sources that hold its heads between them."""

    def __init__(
        self,
        sources: Sequence[PageSource],
        geometry: Geometry,
        *,
        scratch: npt.NDArray[np.uint8] | None = None,
        timeout_s: float = BATCH_TIMEOUT_S,
    ) -> None:
        """Check the sources; they stay the caller's to close.

        Raises UsageError naming the source and the field in which it differs, or the heads that no source has.

        Args:
            scratch: memory for source pages, such as an arena's where devices share memory with us.
        """
        if not sources:
            raise UsageError("sources: expected at least one KV namespace to read from, got none")
        for source in sources:
            _check_source(source, geometry)
        self.geometry = geometry
        self.page_size_bytes = geometry.page_size_bytes
        self._pieces = _plan(sources, geometry)
        self._timeout_s = timeout_s
        page_max = max(piece.source.geometry.page_size_bytes for piece in self._pieces)
        self._scratch = aligned_buffer(max(SCRATCH_BYTES, page_max)) if scratch is None else scratch
        if self._scratch.dtype != np.uint8 or self._scratch.ndim != 1 or self._scratch.nbytes < page_max:
            raise UsageError(
                f"scratch: expected at least {page_max} bytes, a page of the largest source, got "
                f"{self._scratch.shape} {self._scratch.dtype}"
            )

    @property
    def sources(self) -> list[str]:
        """The KV namespaces that are read from, in the order of their heads."""
        return [piece.source.what for piece in self._pieces]

    def get(self, keys: KeyArray, pages: Pages, *, deadline: Deadline | None = None) -> GetResult:
        """Read the pages that all sources have, each to its place.

        Each source verifies its page. An ERROR's bytes are undefined, and so are those of a MISS that a source had.
        ``sums`` are CRC32C of the bytes handed out, whatever the sources have, where it is a HIT; ``grants`` name no
        slot.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = check_batch(keys, pages, page_size_bytes=self.page_size_bytes, is_written=True)
        status = np.full(len(keys), PageStatus.HIT, dtype=np.uint8)
        failure: KvdevError | None = None
        for piece in self._pieces:
            # What one source does not have is not asked of the next.
            wanted = np.flatnonzero(status == PageStatus.HIT)
            got, problem = self._read(piece, keys[wanted], addresses[wanted], pages, deadline)
            status[wanted] = got
            failure = failure or problem
        hits = np.flatnonzero(status == PageStatus.HIT)
        sums = CRC32C.zeros(len(keys))
        if len(hits):
            sums[hits] = CRC32C.sums(np.ascontiguousarray(addresses[hits]), self.page_size_bytes)
        grants: GrantArray = np.zeros(len(keys), dtype=GRANT_DTYPE)
        grants["slot_index"] = SLOT_NONE
        return GetResult(status, sums, grants, failure)

    def _read(
        self,
        piece: _Piece[PageSource],
        keys: KeyArray,
        addresses: AddressArray,
        pages: Pages,
        deadline: Deadline,
    ) -> tuple[npt.NDArray[np.uint8], KvdevError | None]:
        """Have the heads of one source in place; the status of each page, and the first error."""
        if not len(keys):
            return np.zeros(0, dtype=np.uint8), None
        if piece.is_whole:
            places = AddressedPages(np.ascontiguousarray(addresses), self.page_size_bytes, pages)
            whole = piece.source.get(keys, places, deadline=deadline)
            return whole.status, whole.failure
        page_bytes = piece.source.geometry.page_size_bytes
        count = self._scratch.nbytes // page_bytes
        status = np.zeros(len(keys), dtype=np.uint8)
        failure: KvdevError | None = None
        for start in range(0, len(keys), count):
            part = slice(start, start + count)
            room = self._scratch[: len(keys[part]) * page_bytes].reshape(-1, page_bytes)
            got = piece.source.get(keys[part], room, deadline=deadline)
            status[part] = got.status
            failure = failure or got.failure
            for index in np.flatnonzero(got.status == PageStatus.HIT).tolist():
                # A copy: heads of a row lie side by side, and the device reads pages whole.
                piece.copy(address_of(room[index]), int(addresses[start + index]))
        return status, failure

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which keys all sources have stored; does not count as a use."""
        found = np.ones(len(check_keys(keys)), dtype=np.bool_)
        for piece in self._pieces:
            found &= piece.source.contains(keys)
        return found

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on all sources have stored; does not count as a use."""
        return min(piece.source.longest_prefix(keys) for piece in self._pieces)


def open_split_reader(
    volume: Volume,
    names: Sequence[str],
    geometry: Geometry,
    *,
    mode: Mode = "reader",
    deadline: Deadline,
) -> SplitReader:
    """A reader of pages of ``geometry`` from these KV namespaces of a volume, none of which it owns.

    Args:
        mode: ``reader`` sees the pages that are there now, ``follower`` also those that are stored later.
    """
    if mode == "owner":
        raise UsageError("mode: expected reader or follower, as sources are read only, got 'owner'")
    stores = [PageStore(volume.open_namespace(name, mode=mode, deadline=deadline)) for name in names]
    return SplitReader(stores, geometry)


@dataclass(frozen=True)
class HeadPages:
    """Pages in memory, ``(n, page size)`` bytes, of one head range."""

    geometry: Geometry
    pages: npt.NDArray[np.uint8]

    @property
    def what(self) -> str:
        return f"pages of KV heads {self.geometry.kv_head_first} to {_head_end(self.geometry) - 1}"


def join_heads(parts: Sequence[HeadPages], geometry: Geometry) -> npt.NDArray[np.uint8]:
    """The pages of ``geometry`` from the same pages of other head ranges, which cover it between them.

    Raises UsageError naming the part and the field in which it does not fit, or the heads that no part has.
    """
    if not parts:
        raise UsageError("parts: expected pages of at least one head range, got none")
    for part in parts:
        _check_source(part, geometry)
        expected = (len(parts[0].pages), part.geometry.page_size_bytes)
        page_addresses(part.pages, part.geometry.page_size_bytes)
        if part.pages.shape != expected:
            raise UsageError(
                f"{part.what}: expected {expected[0]} as the first part has, got {len(part.pages)}"
            )
    joined = np.empty((len(parts[0].pages), geometry.page_size_bytes), dtype=np.uint8)
    for piece in _plan(parts, geometry):
        for source, target in zip(piece.source.pages, joined, strict=True):
            piece.copy(address_of(source), address_of(target))
    return joined


def _check_source(source: HeadRange, geometry: Geometry) -> None:
    stored = source.geometry.to_dict()
    for field, expected in geometry.to_dict().items():
        if field not in HEAD_FIELDS and stored[field] != expected:
            raise UsageError(
                f"{source.what}: geometry: {field}: expected {expected!r} as the reader has, got {stored[field]!r}; "
                f"sources may differ in {' and '.join(HEAD_FIELDS)} only"
            )


def _plan(sources: Sequence[Source], geometry: Geometry) -> list[_Piece[Source]]:
    """Which heads come from which source, in order; of sources that share heads the one that goes furthest."""
    pieces: list[_Piece[Source]] = []
    head, end = geometry.kv_head_first, geometry.kv_head_first + geometry.kv_head_count
    while head < end:
        able = [each for each in sources if each.geometry.kv_head_first <= head < _head_end(each.geometry)]
        if not able:
            later = [each.geometry.kv_head_first for each in sources if each.geometry.kv_head_first > head]
            names = ", ".join(
                f"{each.what} ({each.geometry.kv_head_first} to {_head_end(each.geometry) - 1})"
                for each in sources
            )
            raise UsageError(
                f"sources: kv_head_first: expected KV heads {geometry.kv_head_first} to {end - 1}, got none for "
                f"{head} to {min([end, *later]) - 1}: {names}"
            )
        source = max(able, key=lambda each: _head_end(each.geometry))
        last = min(end, _head_end(source.geometry))
        pieces.append(_piece(source, geometry, head, last - head))
        head = last
    return pieces


def _head_end(geometry: Geometry) -> int:
    return geometry.kv_head_first + geometry.kv_head_count


def _piece(source: Source, geometry: Geometry, head: int, head_count: int) -> _Piece[Source]:
    theirs = source.geometry
    head_bytes = geometry.head_size * geometry.dtype_size_bytes
    rows = np.arange(
        geometry.layer_count * geometry.planes_per_layer * geometry.tokens_per_page, dtype=np.uint64
    )
    return _Piece(
        source,
        size_bytes=head_count * head_bytes,
        source_offsets=rows * np.uint64(theirs.row_size_bytes)
        + np.uint64((head - theirs.kv_head_first) * head_bytes),
        target_offsets=rows * np.uint64(geometry.row_size_bytes)
        + np.uint64((head - geometry.kv_head_first) * head_bytes),
        is_whole=theirs == geometry,
    )
