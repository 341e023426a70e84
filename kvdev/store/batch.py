"""Batches of pages: what can be wrong with one, told before any I/O, and what each page's answer looks like.

One place for the owner's page store (``page_store``), for the halves of it (``namespace``) and for clients of a
pool process (``kvdev.pool``). Not here: moving pages; which slots they get.
Trust: every argument is a caller's; raises only UsageError and CapacityError for bad ones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages, page_addresses
from kvdev.errors import CapacityError, CorruptionError, KvdevError, UsageError
from kvdev.keys import KeyArray, check_keys
from kvdev.native.checksum import CRC32C, PageChecksum, SumArray
from kvdev.native.index import (
    GRANT_DTYPE,
    OUTCOME_FAILED,
    OUTCOME_UNKNOWN,
    OUTCOME_WRITTEN,
    GrantArray,
    Uint8Array,
    find_duplicate,
)

OUTCOME_MAX = max(OUTCOME_WRITTEN, OUTCOME_FAILED, OUTCOME_UNKNOWN)


class PageStatus(enum.IntEnum):
    """What a batch says of one page."""

    MISS = 0
    HIT = 1
    ERROR = 2
    STORED = 3


StatusArray = npt.NDArray[np.uint8]
VerifyBy = Literal["store", "kernel"]
"""Who compares a page's bytes with its checksum: the store that reads it, or the kernel that unpacks it."""


@dataclass(frozen=True)
class PutResult:
    """Per page STORED or ERROR; ``failure`` is the first page's error."""

    status: StatusArray
    sums: SumArray
    failure: KvdevError | None

    @property
    def crc32c(self) -> SumArray:
        """``sums`` under the name of the checksum that a KV namespace has unless it was made with another."""
        return self.sums

    @property
    def stored_count(self) -> int:
        return int((self.status == PageStatus.STORED).sum())

    @property
    def error_count(self) -> int:
        return int((self.status == PageStatus.ERROR).sum())


@dataclass(frozen=True)
class GetResult:
    """Per page HIT, MISS or ERROR.

    Only a HIT's bytes may be used; an ERROR's are undefined, a MISS's untouched, unless a follower or a client of a
    pool process found the page replaced when it had read it. ``sums`` are the checksums of the bytes read with
    ``verify="store"``, and what the bytes must have with ``verify="kernel"``.
    """

    status: StatusArray
    sums: SumArray
    grants: GrantArray
    failure: KvdevError | None

    @property
    def crc32c(self) -> SumArray:
        """``sums`` under the name of the checksum that a KV namespace has unless it was made with another."""
        return self.sums

    @property
    def hit_count(self) -> int:
        return int((self.status == PageStatus.HIT).sum())

    @property
    def miss_count(self) -> int:
        return int((self.status == PageStatus.MISS).sum())

    @property
    def error_count(self) -> int:
        return int((self.status == PageStatus.ERROR).sum())


# --- checks ----------------------------------------------------------------------------------


def check_batch(
    keys: KeyArray,
    pages: Pages,
    *,
    page_size_bytes: int,
    is_written: bool,
    checksums: SumArray | None = None,
    checksum: PageChecksum = CRC32C,
) -> AddressArray:
    """Everything that can be wrong with a put or get; the pages' addresses.

    Args:
        is_written: whether the pages' memory is written, as by a get.
    """
    check_keys(keys)
    addresses = page_addresses(pages, page_size_bytes, is_written=is_written)
    if len(addresses) != len(keys):
        raise UsageError(f"pages: expected one page per key, got {len(addresses)} for {len(keys)} keys")
    check_distinct(keys)
    if checksums is not None:
        check_array("checksums", checksums, len(keys), checksum.sum_dtype)
    return addresses


def check_distinct(keys: KeyArray) -> KeyArray:
    """The keys, each of them once; else UsageError naming the one that repeats another."""
    place = find_duplicate(check_keys(keys))
    if place is not None:
        raise UsageError(f"keys: key {place} ({keys[place].tobytes().hex()[:16]}...) is in the batch twice")
    return keys


def check_quota(what: str, count: int, quota_pages: int) -> None:
    """CapacityError for a batch that could never be stored as a whole."""
    if count > quota_pages:
        raise CapacityError(f"{what}: put: expected at most the quota of {quota_pages} pages, got {count}")


def check_verify(verify: str) -> None:
    """UsageError for what is no way to verify."""
    if verify not in get_args(VerifyBy):
        raise UsageError(f"verify: expected {' or '.join(get_args(VerifyBy))}, got {verify!r}")


def check_array(name: str, array: object, count: int, dtype: np.dtype[np.generic]) -> None:
    """UsageError unless it is a ``(count,)`` array of this type."""
    got = type(array).__name__
    if isinstance(array, np.ndarray):
        if array.shape == (count,) and array.dtype == dtype:
            return
        got = f"{array.shape} {_type_name(array.dtype)}"
    raise UsageError(f"{name}: expected a ({count},) {_type_name(dtype)} array, got {got}")


def _type_name(dtype: np.dtype[np.generic]) -> str:
    return "grant" if dtype == GRANT_DTYPE else str(dtype)


def check_grants(grants: GrantArray) -> GrantArray:
    """The grants as a contiguous array of their type; UsageError for anything else."""
    check_array("grants", grants, len(grants) if isinstance(grants, np.ndarray) else 0, GRANT_DTYPE)
    return np.ascontiguousarray(grants)


def check_commit(
    keys: KeyArray, grants: GrantArray, sums: SumArray, outcome: Uint8Array, *, checksum: PageChecksum
) -> None:
    """What written grants are given back with: an element each for every key."""
    check_keys(keys)
    for name, array, dtype in (
        ("grants", grants, GRANT_DTYPE),
        ("sums", sums, checksum.sum_dtype),
        ("outcome", outcome, np.dtype(np.uint8)),
    ):
        check_array(name, array, len(keys), dtype)
        if not array.flags.c_contiguous:
            raise UsageError(f"{name}: expected a contiguous array, got strides {array.strides}")
    if outcome.max(initial=0) > OUTCOME_MAX:
        raise UsageError(f"outcome: expected 0 to {OUTCOME_MAX}, got {int(outcome.max())}")


def mismatch_error(
    what: str,
    positions: npt.NDArray[np.intp],
    is_bad: npt.NDArray[np.bool_],
    expected: SumArray,
    actual: SumArray,
    *,
    checksum: PageChecksum,
) -> CorruptionError:
    """The first page whose bytes are not those put under its key; ``positions`` are places in the caller's batch."""
    first = int(np.flatnonzero(is_bad)[0])
    place = int(positions[first])
    return CorruptionError(
        f"{what}: page {place} of the batch: checksum: expected {checksum.text(expected[first])}, "
        f"got {checksum.text(actual[first])}; withdrawn",
        extent=place,
        expected=int(expected[first]),
        actual=int(actual[first]),
    )


# --- a batch in parts ------------------------------------------------------------------------

PutSome = Callable[
    [KeyArray, AddressArray, "SumArray | None"],
    "tuple[npt.NDArray[np.bool_], SumArray, KvdevError | None]",
]
"""Stores the first pages it is given, at least one: which of those are stored, their checksums, and the first error."""


def put_in_parts(
    put_some: PutSome,
    keys: KeyArray,
    addresses: AddressArray,
    checksums: SumArray | None,
    *,
    limit: int,
    checksum: PageChecksum = CRC32C,
    ends_with: tuple[type[KvdevError], ...] = (),
) -> PutResult:
    """Put a batch part by part, at most ``limit`` pages at once, and say of each page what became of it.

    CapacityError is raised while nothing of the batch has been written. Later it is the answer of the pages, one by
    one, that have no room.

    Args:
        ends_with: errors after which whatever is left of the batch has failed too.
    """
    status = np.full(len(keys), PageStatus.ERROR, dtype=np.uint8)
    sums = checksum.zeros(len(keys))
    failure: KvdevError | None = None
    done, step = 0, limit
    while done < len(keys):
        part = slice(done, done + step)
        given = None if checksums is None else checksums[part].copy()
        try:
            stored, checked, problem = put_some(keys[part], addresses[part], given)
        except CapacityError as error:
            if not done:
                raise
            if step > 1 and len(keys[part]) > 1:
                step = max(1, min(step, len(keys[part])) // 2)  # some of them may have room
                continue
            failure = failure or CapacityError(f"page {done} of the batch: {error}")
            done += 1
            continue
        except ends_with as error:
            failure = failure or error
            break
        part = slice(done, done + len(stored))
        status[part][stored] = PageStatus.STORED
        sums[part] = checked
        failure = failure or problem
        done += len(stored)
        step = min(limit, 2 * step)
    return PutResult(status, sums, failure)
