"""The page store of a process that shares an owner with others: the calls of ``kvdev.store.PageStore``.

Lookups read the owner's table in shared memory; pages are moved by this process under grants; only what changes the
table asks the pool process. While that is away there are misses and errors, never waits; it is looked for again and
again.
Not here: the connection (``link``); opening the volume as the pool's host (``kvdev.session``).
Threads: any; calls run one after the other where they ask or do I/O.
"""

from __future__ import annotations

import logging
import struct
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.buffers import AddressArray, Pages
from kvdev.clock import NS_PER_S, SYSTEM_CLOCK, Deadline
from kvdev.errors import (
    CapacityError,
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    TransportError,
    UsageError,
)
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray, PageKeys, check_keys, check_salt
from kvdev.native.checksum import SumArray
from kvdev.native.index import (
    GRANT_DTYPE,
    OUTCOME_UNKNOWN,
    SLOT_NONE,
    GrantArray,
    Uint8Array,
)
from kvdev.native.view import PageView
from kvdev.pool.link import PoolLink
from kvdev.pool.protocol import COUNT_MAX, Commit, MessageError, MessageType, parse_grants, parse_json
from kvdev.store.batch import (
    GetResult,
    PageStatus,
    PutResult,
    VerifyBy,
    check_array,
    check_batch,
    check_commit,
    check_distinct,
    check_quota,
    check_verify,
    mismatch_error,
    put_in_parts,
)
from kvdev.store.lock import WriterLock
from kvdev.store.page_io import PageIo
from kvdev.store.steady import is_loss
from kvdev.store.volume import Volume, check_geometry

CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
RECONNECT_NS_MIN = NS_PER_S // 20
RECONNECT_NS_MAX = 2 * NS_PER_S
"""Between two attempts to find the pool process again: doubles from the one to the other."""
WRITER_LOCK_ATTEMPTS = 20
_WRITER_LOCK_PAUSE_S = 0.005

log = logging.getLogger("kvdev.pool")


@dataclass(frozen=True)
class PoolFacts:
    """What the pool process says of a KV namespace: its volume's URI, and as whom to open it."""

    volume_uri: str
    namespace: str
    host_nqn: str
    host_id: str


OpenVolume = Callable[[PoolFacts, Deadline], "tuple[Volume, Callable[[], None]]"]
"""Opens the volume for data, under the host identity given; and what closes it again."""


class _Attachment:
    """One connection with everything that goes with it; replaced as a whole."""

    def __init__(self, path: str, namespace: str, open_volume: OpenVolume, deadline: Deadline) -> None:
        self.link = PoolLink(path, namespace, deadline)
        try:
            facts = self.link.facts
            self.uuid = uuid.UUID(str(facts["uuid"])).bytes
            self.what = str(facts["what"])
            self.geometry = Geometry.from_dict(facts["geometry"])
            self.quota_pages = int(facts["quota_pages"])
            self.batch_limit = int(facts["batch_limit"])
            self.salt_mark = int(facts["salt_mark"])
            # Where only time keeps a lost owner out, grants end with its lease: a third of it may be over already.
            self.write_limit_s = int(facts["lease_ms"]) / 1500 if facts["fence"] == "time" else None
            self.view = PageView(
                self.link.table,
                self.link.hints,
                block_bytes=int(facts["block_size_bytes"]),
                slot_count=int(facts["slot_count"]),
                seed=int(facts["seed"]),
            )
            host = facts["host"]
            volume, self._close_volume = open_volume(
                PoolFacts(str(facts["volume"]), namespace, str(host["host_nqn"]), str(host["host_id"])),
                deadline,
            )
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            self.link.close()
            raise MessageError(f"pool {path}: hello: {type(error).__name__}: {error}") from error
        except BaseException:
            self.link.close()
            raise
        try:
            record = volume.namespace(namespace, deadline=deadline).record
            if record.namespace_uuid != self.uuid:
                raise UsageError(
                    f"pool {path}: volume {facts['volume']}: namespace {namespace!r} is another one"
                )
            self.page_io: PageIo = volume.open_page_io(namespace, deadline=deadline)
            self.writer_lock: WriterLock = volume.writer_lock(record)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.link.close()
        self._close_volume()


class PoolStore:
    """Pages of a KV namespace whose owner is the pool process."""

    def __init__(
        self,
        path: str,
        namespace: str,
        open_volume: OpenVolume,
        *,
        geometry: Geometry | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        deadline: Deadline | None = None,
    ) -> None:
        """Connect; the pool must be there now, later it may go and come.

        Args:
            geometry: what the caller expects; refused, naming the field, when the namespace has another.
        """
        self.path = path
        self._name = namespace
        self._open_volume = open_volume
        self._timeout_s = timeout_s
        self._mutex = threading.RLock()
        self._pause = threading.Event()  # never set: a pause between two attempts at the writers' lock
        self._retry_ns = 0
        self._retry_step_ns = RECONNECT_NS_MIN
        self._is_closed = False
        self.lost_count = 0
        """How often the pool process, or a member, went away."""
        self.missed_pages = 0
        """Asked for while it was away, or lost with it in the batch that found out."""
        self.dropped_pages = 0
        """Put likewise, and what failed to be put before."""
        self._refusal = ""
        self.stale_count = 0
        deadline = deadline or Deadline.after(CONNECT_TIMEOUT_S)
        self._attached: _Attachment | None = _Attachment(path, namespace, open_volume, deadline)
        self.what = self._attached.what
        self.uuid = self._attached.uuid
        self.geometry = self._attached.geometry
        self.page_size_bytes = self.geometry.page_size_bytes
        self.quota_pages = self._attached.quota_pages
        self.checksum = self._attached.page_io.checksum
        self._salt_mark = self._attached.salt_mark
        if geometry is not None:
            try:
                check_geometry(self.what, expected=geometry, actual=self.geometry)
            except BaseException:
                self.close()
                raise

    # --- the connection ----------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether the pool process is there, as far as a look tells."""
        return self._attachment() is not None

    def _attachment(self) -> _Attachment | None:
        """The connection; looked for anew when it was lost and the last attempt is a while ago."""
        with self._mutex:
            if self._is_closed:
                raise UsageError(f"{self.what}: is closed")
            attached = self._attached
            if attached is not None and attached.link.is_alive:
                return attached
            if attached is not None:
                self._lose(attached, f"the pool process at {self.path} is away")
            if SYSTEM_CLOCK.monotonic_ns() < self._retry_ns:
                return None
            return self._attach()

    def _lose(self, attached: _Attachment, why: str) -> None:
        log.warning("%s: %s: misses and dropped puts until it is back", self.what, why)
        self.lost_count += 1
        self._refusal = ""
        self._attached = None
        self._retry_ns = 0
        self._retry_step_ns = RECONNECT_NS_MIN
        attached.close()

    def _check_member(
        self, attached: _Attachment | None, failure: KvdevError | None, is_own_deadline: bool
    ) -> bool:
        """Whether an error says that a member is gone: then nothing is asked of any before the volume opens again.

        A deadline of the caller's own may be as short as it likes.
        """
        if not is_loss(failure) and not (is_own_deadline and isinstance(failure, DeadlineError)):
            return False
        with self._mutex:
            if attached is not None and self._attached is attached:
                self._lose(attached, f"a member is away ({failure})")
        return True

    def _attach(self) -> _Attachment | None:
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        try:
            found = _Attachment(self.path, self._name, self._open_volume, Deadline.after(CONNECT_TIMEOUT_S))
        except KvdevError as error:
            now_ns = SYSTEM_CLOCK.monotonic_ns()
            # Whatever an attempt costs, four fifths of the time nobody waits for one.
            self._retry_ns = now_ns + max(self._retry_step_ns, 4 * (now_ns - started_ns))
            self._retry_step_ns = min(2 * self._retry_step_ns, RECONNECT_NS_MAX)
            if not isinstance(error, ConnectError) and str(error) != self._refusal:
                self._refusal = str(error)
                log.warning("%s: %s", self.what, error)
            return None
        if found.geometry != self.geometry or found.page_io.checksum is not self.checksum:
            found.close()
            raise UsageError(
                f"{self.what}: the pool at {self.path} serves another KV namespace of that name now"
            )
        is_anew = found.uuid != self.uuid  # as after the loss of a member: nothing that was stored is there
        log.warning(
            "%s: the pool process at %s is back%s",
            self.what,
            self.path,
            ", with an empty namespace" * is_anew,
        )
        self.uuid, self.quota_pages = found.uuid, found.quota_pages
        self._attached = found
        return found

    def _ask(
        self, kind: MessageType, body: bytes, deadline: Deadline | None, *, granter: _Attachment | None = None
    ) -> bytes:
        """``granter`` is the connection that a request belongs to: another one knows nothing of its grants."""
        with self._mutex:
            attached = self._attachment()
            if attached is None or (granter is not None and attached is not granter):
                raise ConnectionLostError(
                    f"{self.what}: the pool process at {self.path} is away", trid=self.path
                )
            return attached.link.ask(kind, body, deadline or Deadline.after(self._timeout_s))

    # --- the table ---------------------------------------------------------------------------

    def lookup(self, keys: KeyArray) -> GrantArray:
        """A grant to read each key's page; ``slot_index`` SLOT_NONE where it is not stored. No round trip."""
        check_keys(keys)
        attached = self._attachment()
        if attached is None:
            grants: GrantArray = np.zeros(len(keys), dtype=GRANT_DTYPE)
            grants["slot_index"] = SLOT_NONE
            return grants
        return attached.view.lookup(keys)[0]

    def contains(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which keys are stored. No round trip."""
        found: npt.NDArray[np.bool_] = self.lookup(keys)["slot_index"] != SLOT_NONE
        return found

    def longest_prefix(self, keys: KeyArray) -> int:
        """How many keys from the first on are stored. No round trip."""
        check_keys(keys)
        attached = self._attachment()
        return 0 if attached is None else attached.view.longest_prefix(keys)

    def reserve(
        self, keys: KeyArray, *, may_be_fewer: bool = False, deadline: Deadline | None = None
    ) -> GrantArray:
        """Grants to write a page for each key; each must be committed, written or not.

        See ``KvNamespace.reserve``; CapacityError for more keys than one message takes.
        """
        check_keys(keys)
        if len(keys) > COUNT_MAX:
            raise CapacityError(
                f"{self.what}: reserve: expected at most {COUNT_MAX} pages at once, got {len(keys)}"
            )
        kind = MessageType.RESERVE_SOME if may_be_fewer else MessageType.RESERVE
        answer = self._ask(kind, keys.tobytes(), deadline) if len(keys) else b""
        grants = parse_grants("reserve", answer) if len(keys) else np.zeros(0, dtype=GRANT_DTYPE)
        if len(grants) > len(keys) or (len(grants) < len(keys) and not may_be_fewer):
            raise MessageError(f"pool {self.path}: reserve: expected {len(keys)} grants, got {len(grants)}")
        return grants

    def commit(
        self,
        keys: KeyArray,
        grants: GrantArray,
        sums: SumArray,
        *,
        outcome: Uint8Array | None = None,
        members: npt.NDArray[np.bool_],
        sent_ns: int | None = None,
        deadline: Deadline | None = None,
        _granter: _Attachment | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Make written grants readable for everybody, and give the others back; see ``KvNamespace.commit``."""
        if outcome is None:
            outcome = np.zeros(len(keys), dtype=np.uint8)
        check_commit(keys, grants, sums, outcome, checksum=self.checksum)
        check_array("members", members, len(members), np.dtype(np.bool_))
        if len(keys) > COUNT_MAX:
            raise CapacityError(
                f"{self.what}: commit: expected at most {COUNT_MAX} pages at once, got {len(keys)}"
            )
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        sent_ns = SYSTEM_CLOCK.monotonic_ns() if sent_ns is None else sent_ns
        body = Commit(keys, grants, sums, outcome, members, sent_ns).build()
        answer = self._ask(MessageType.COMMIT, body, deadline, granter=_granter)
        return np.frombuffer(answer, dtype=np.bool_)

    def page_keys(self, *, salt: str | bytes = b"", cache_group: str | bytes = b"") -> PageKeys:
        """As ``PageStore.page_keys``. The salt stays in this process."""
        check_salt(self.what, salt, expected_mark=self._salt_mark)
        return PageKeys(salt, cache_group)

    # --- pages -------------------------------------------------------------------------------

    def put(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        checksums: SumArray | None = None,
        deadline: Deadline | None = None,
    ) -> PutResult:
        """Store pages, as ``PageStore.put``. While the pool, or a member, is away each is an ERROR, and counted."""
        is_own_deadline = deadline is None
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = check_batch(
            keys,
            pages,
            page_size_bytes=self.page_size_bytes,
            is_written=False,
            checksums=checksums,
            checksum=self.checksum,
        )
        check_quota(self.what, len(keys), self.quota_pages)

        def put_some(
            keys: KeyArray, addresses: AddressArray, checksums: SumArray | None
        ) -> tuple[npt.NDArray[np.bool_], SumArray, KvdevError | None]:
            return self._put_some(keys, addresses, checksums, deadline)

        with self._mutex:
            attached = self._attachment()
            limit = 1 if attached is None else min(attached.batch_limit, COUNT_MAX)
            # Once it is away what is left would fare the same.
            result = put_in_parts(
                put_some,
                keys,
                addresses,
                checksums,
                limit=limit,
                checksum=self.checksum,
                ends_with=(TransportError,),
            )
            self.dropped_pages += result.error_count
            self._check_member(attached, result.failure, is_own_deadline)
            return result

    def _put_some(
        self,
        keys: KeyArray,
        addresses: npt.NDArray[np.uint64],
        checksums: SumArray | None,
        deadline: Deadline,
    ) -> tuple[npt.NDArray[np.bool_], SumArray, KvdevError | None]:
        attached = self._attachment()
        if attached is None:
            raise ConnectionLostError(f"{self.what}: the pool process at {self.path} is away", trid=self.path)
        self._take_writer_lock(attached)
        if attached.write_limit_s is not None and attached.write_limit_s < deadline.remaining_s():
            deadline = Deadline.after(attached.write_limit_s, clock=deadline.clock)
        try:
            grants = self.reserve(keys, may_be_fewer=True, deadline=deadline)
            keys, addresses = keys[: len(grants)], addresses[: len(grants)]
            sent_ns = SYSTEM_CLOCK.monotonic_ns()
            try:
                result = attached.page_io.write(
                    grants, addresses, deadline=deadline, wants_sums=checksums is None
                )
            except BaseException:
                # Nobody knows how far it came; when the pool cannot be told either, it finds out by itself.
                self._give_back(attached, keys, grants, sent_ns)
                raise
            sums = result.sums if checksums is None else checksums[: len(grants)]
            stored = self.commit(
                keys,
                grants,
                sums,
                outcome=result.outcome,
                members=result.members,
                sent_ns=sent_ns,
                deadline=deadline,
                _granter=attached,
            )
            return stored, sums, result.failure
        finally:
            attached.writer_lock.drop()

    def _give_back(self, attached: _Attachment, keys: KeyArray, grants: GrantArray, sent_ns: int) -> None:
        try:
            self.commit(
                keys,
                grants,
                self.checksum.zeros(len(keys)),
                outcome=np.full(len(keys), OUTCOME_UNKNOWN, dtype=np.uint8),
                members=attached.page_io.all_members(),
                sent_ns=sent_ns,
                deadline=Deadline.after(CONNECT_TIMEOUT_S),
                _granter=attached,
            )
        except KvdevError as error:
            log.warning("%s: grants not given back: %s", self.what, error)

    def _take_writer_lock(self, attached: _Attachment) -> None:
        """Held while anything may be written: the next owner waits for it."""
        for _ in range(WRITER_LOCK_ATTEMPTS):
            if attached.writer_lock.take():
                return
            self._pause.wait(_WRITER_LOCK_PAUSE_S)
        raise ConnectionLostError(
            f"{self.what}: another owner is about to follow the pool process", trid=self.path
        )

    def get(
        self,
        keys: KeyArray,
        pages: Pages,
        *,
        verify: VerifyBy = "store",
        deadline: Deadline | None = None,
    ) -> GetResult:
        """Read the pages that are stored, each to its place; see ``PageStore.get``.

        A page that is replaced or evicted while it is read is a MISS, with undefined bytes in its place, and so is one
        that a lost member has.

        Args:
            verify: ``store`` checks every page here; with ``kernel`` the caller compares ``sums`` with the
                bytes and reports the pages that differ to ``report_bad``.
        """
        check_verify(verify)
        is_own_deadline = deadline is None
        deadline = deadline or Deadline.after(self._timeout_s)
        addresses = check_batch(keys, pages, page_size_bytes=self.page_size_bytes, is_written=True)
        status = np.zeros(len(keys), dtype=np.uint8)
        sums = self.checksum.zeros(len(keys))
        grants = self.lookup(keys)
        attached = self._attached
        hits = np.flatnonzero(grants["slot_index"] != SLOT_NONE)
        if attached is None:
            self.missed_pages += len(keys)
        if attached is None or not len(hits):
            return GetResult(status, sums, grants, None)
        with self._mutex:
            if self._attached is not attached:  # lost by another thread since
                self.missed_pages += len(keys)
                return GetResult(status, sums, grants, None)
            result = attached.page_io.read(
                np.ascontiguousarray(grants[hits]),
                np.ascontiguousarray(addresses[hits]),
                deadline=deadline,
                wants_sums=verify == "store",
            )
        hit_keys, hit_grants = np.ascontiguousarray(keys[hits]), np.ascontiguousarray(grants[hits])
        actual = result.sums
        if verify == "kernel":
            actual = self.checksum.grant_sums(self.uuid, hit_keys, hit_grants)
        is_right, _ = self.checksum.verify(
            self.uuid, hit_keys, hit_grants, actual, length=self.page_size_bytes
        )
        is_read = result.error == 0
        found = np.where(is_read & is_right, PageStatus.HIT, PageStatus.ERROR).astype(np.uint8)
        failure = result.failure
        is_bad = is_read & ~is_right
        # What is not compared here may be half another page: it counts only while its entry is what it was.
        is_doubtful = is_bad if verify == "store" else is_read
        if is_doubtful.any():
            now = attached.view.lookup(hit_keys)[0]
            is_stale = is_doubtful & (now["generation"] != hit_grants["generation"])
            found[is_stale] = PageStatus.MISS
            self.stale_count += int(is_stale.sum())
            is_bad &= ~is_stale
        if is_bad.any():
            expected = self.checksum.grant_sums(self.uuid, hit_keys, hit_grants)
            failure = failure or mismatch_error(
                self.what, hits, is_bad, expected, actual, checksum=self.checksum
            )
            self._withdraw(np.ascontiguousarray(hit_grants[is_bad]))
        if self._check_member(attached, failure, is_own_deadline):
            is_lost = found == PageStatus.ERROR
            found[is_lost] = PageStatus.MISS
            self.missed_pages += int(is_lost.sum())
            failure = None
        status[hits] = found
        sums[hits] = actual
        self._touch(attached, np.ascontiguousarray(hit_keys[found == PageStatus.HIT]))
        return GetResult(status, sums, grants, failure)

    def _withdraw(self, grants: GrantArray) -> None:
        try:
            self._ask_withdraw(grants, None)
        except TransportError as error:
            log.warning("%s: %d bad pages not withdrawn: %s", self.what, len(grants), error)

    def _ask_withdraw(self, grants: GrantArray, deadline: Deadline | None) -> int:
        answers = [
            self._ask(MessageType.WITHDRAW, grants[start : start + COUNT_MAX].tobytes(), deadline)
            for start in range(0, len(grants), COUNT_MAX)
        ]
        return sum(struct.unpack("<I", answer)[0] for answer in answers)

    def _touch(self, attached: _Attachment, keys: KeyArray) -> None:
        """Have pages count as used; nobody waits for that."""
        with self._mutex:
            for start in range(0, len(keys), COUNT_MAX):
                attached.link.tell(MessageType.TOUCH, keys[start : start + COUNT_MAX].tobytes())

    def report_bad(
        self, result: GetResult, is_bad: npt.NDArray[np.bool_], *, deadline: Deadline | None = None
    ) -> int:
        """Withdraw pages whose bytes a kernel found wrong after ``get(verify="kernel")``, unless they were replaced
        meanwhile; returns how many."""
        check_array("is_bad", is_bad, len(result.status), np.dtype(np.bool_))
        return self._ask_withdraw(result.grants[is_bad & (result.status == PageStatus.HIT)], deadline)

    # --- the rest ----------------------------------------------------------------------------

    def delete(self, keys: KeyArray, *, deadline: Deadline | None = None) -> npt.NDArray[np.bool_]:
        """Remove pages; True where there was one. Durable with the next ``flush``."""
        return self._flags(MessageType.DELETE, keys, deadline)

    def pin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Keep pages from being evicted while this pool process runs; True where there is one."""
        return self._flags(MessageType.PIN, keys, None)

    def unpin(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        return self._flags(MessageType.UNPIN, keys, None)

    def _flags(self, kind: MessageType, keys: KeyArray, deadline: Deadline | None) -> npt.NDArray[np.bool_]:
        check_distinct(keys)
        parts = [
            self._ask(kind, keys[start : start + COUNT_MAX].tobytes(), deadline)
            for start in range(0, len(keys), COUNT_MAX)
        ]
        flags: npt.NDArray[np.bool_] = np.frombuffer(b"".join(parts), dtype=np.bool_).copy()
        return flags

    def flush(self, *, deadline: Deadline | None = None) -> None:
        """Make everything put and deleted so far, by any client, durable."""
        self._ask(MessageType.FLUSH, b"", deadline)

    def stat(self, *, deadline: Deadline | None = None) -> dict[str, Any]:
        """The pool process's counters."""
        return parse_json("stat", self._ask(MessageType.STAT, b"", deadline))

    def close(self) -> None:
        """Let go of the pool and the volume; twice does nothing. What was put stays the pool's to flush."""
        with self._mutex:
            self._is_closed = True
            if self._attached is not None:
                self._attached.close()
                self._attached = None


def longest_common_prefix(stores: list[PoolStore], keys: KeyArray) -> int:
    """How many keys from the first on are stored for every rank: a prefix counts when all have committed it."""
    return min((store.longest_prefix(keys) for store in stores), default=0)
