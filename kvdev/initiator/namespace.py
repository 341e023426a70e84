"""Namespaces of a controller: which are there, what they are, and one as a block device.

Not here: the commands' way to the wire (the C core).
Spec: NVM Express Base 5.1.13 (Identify); NVM Command Set 2.1.4, 3.2, 4.1.5.
Trust: lists and data structures are the peer's; lengths and counts in them are checked and bounded.
Threads: a namespace is driven by the one thread that drives its queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from kvdev.block.device import (
    BlockDevice,
    DeviceIdentity,
    aligned_buffer,
    error_of,
    execute,
    flush,
    run_batch,
    transfer_ios,
)
from kvdev.clock import Deadline
from kvdev.errors import (
    CommandError,
    ConnectionLostError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from kvdev.initiator import limits
from kvdev.initiator.channel import AdminChannel
from kvdev.initiator.controller import Controller
from kvdev.initiator.options import LostWrites
from kvdev.initiator.reservation import PATH_RETRY_COUNT, NamespaceReservations, on_some_path
from kvdev.native.io import (
    IO_DEALLOCATE,
    IO_DTYPE,
    OPCODE_COMPARE,
    OPCODE_COPY,
    OPCODE_DSM,
    OPCODE_VERIFY,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    IoArray,
    address_of,
)
from kvdev.native.queue import HostQueue, PairCompletion, Recovery
from kvdev.uri import TcpUri
from kvdev.wire.identify import (
    FUSES_COMPARE_AND_WRITE,
    NMIC_SHARED,
    NSFEAT_ATOMIC,
    NSFEAT_OPTPERF,
    NSID_LIST_COUNT,
    ONCS_COMPARE,
    ONCS_COPY,
    ONCS_DSM,
    ONCS_VERIFY,
    ONCS_WRITE_ZEROES,
    Cns,
    Csi,
    CsiControllerNvm,
    IdentifyNamespace,
    NsDescriptorList,
    parse_nsid_list,
)
from kvdev.wire.layout import WireError
from kvdev.wire.nvme import COPY_RANGE_BYTES, DSM_RANGE_BYTES, DsmRange, Status, build_copy_ranges

_T = TypeVar("_T")

NAMESPACE_COUNT_MAX = 4096
"""Namespaces of one controller that are looked at: a bound on what it can make us ask."""
_NSATTR_WRITE_PROTECTED = 1 << 0


@dataclass(frozen=True)
class NamespaceInfo:
    """What Identify says of one active namespace; ``problem`` is why it cannot be used, or empty."""

    nsid: int
    identity: DeviceIdentity
    csi: int
    block_size_bytes: int
    block_count: int
    metadata_size_bytes: int
    lba_format_index: int
    max_transfer_bytes: int
    atomic_write_blocks: int
    optimal_boundary_blocks: int
    """NOIOB: commands that cross a multiple of it are slower; 0 when not reported."""
    preferred_write_blocks: int
    """NPWG: writes are best in multiples of it; 1 when not reported."""
    is_write_protected: bool
    is_shared: bool = True
    """Whether several controllers may use it at once (NMIC)."""
    anagrpid: int = 0
    """ANA group; 0 where there are none."""
    reservation_capabilities: int = 0
    """RESCAP; 0 where there are no reservations."""
    compare_and_write_blocks: int = 0
    """ACWU or NACWU as a count; 0 where the controller has no fused compare and write."""
    copy_limits: tuple[int, int, int] = (0, 0, 0)
    """MSSRL, MCL and MSRC (0's based)."""
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        return self.block_size_bytes * self.block_count


def active_nsids(channel: AdminChannel, *, nn: int, deadline: Deadline) -> list[int]:
    """Active namespace ids in increasing order (CNS 02h).

    Raises ProtocolError when a list does not increase, names an impossible id, or never ends.
    """
    found: list[int] = []
    last = 0
    while True:
        data = channel.identify(Cns.ACTIVE_NSID_LIST, nsid=last, deadline=deadline)
        nsids = channel.parse(partial(parse_nsid_list, after_nsid=last), data)
        found += nsids
        if nn and found and found[-1] > nn:
            raise ProtocolError(
                f"{channel.where}: active namespace list: expected ids up to NN {nn}, got {found[-1]}"
            )
        if len(found) > NAMESPACE_COUNT_MAX:
            raise UnsupportedError(
                f"{channel.where}: active namespace list: expected at most {NAMESPACE_COUNT_MAX} ids, got more",
                feature="number of namespaces",
            )
        if len(nsids) < NSID_LIST_COUNT:
            return found
        last = found[-1]


def scan(controller: Controller, *, deadline: Deadline) -> list[NamespaceInfo]:
    """Identify every active namespace; those that share an identifier get a ``problem`` (Base 5.1.13)."""
    infos: list[NamespaceInfo] = []
    for nsid in active_nsids(controller.channel, nn=controller.identify.nn, deadline=deadline):
        info = describe(controller, nsid, deadline=deadline)
        if info is not None:
            infos.append(info)
    return mark_duplicates(infos)


def mark_duplicates(infos: Sequence[NamespaceInfo]) -> list[NamespaceInfo]:
    """The same list, with a ``problem`` where two namespaces of the subsystem claim one identifier."""
    owners: dict[tuple[str, bytes], list[int]] = {}
    for info in infos:
        for kind in ("nguid", "eui64", "uuid"):
            value: bytes | None = getattr(info.identity, kind)
            if value is not None:
                owners.setdefault((kind, value), []).append(info.nsid)
    problems: dict[int, str] = {}
    for (kind, value), nsids in owners.items():
        if len(nsids) > 1:
            names = ", ".join(str(nsid) for nsid in nsids[:8])
            for nsid in nsids:
                problems.setdefault(
                    nsid, f"{kind.upper()} {value.hex()} belongs to the namespaces {names}: give each its own"
                )
    return [
        replace(info, problem=problems[info.nsid]) if info.nsid in problems and not info.problem else info
        for info in infos
    ]


def describe(controller: Controller, nsid: int, *, deadline: Deadline) -> NamespaceInfo | None:
    """What one namespace is; None when it is not there (NCAP 0)."""
    channel = controller.channel
    where = f"{controller.where} nsid {nsid}"
    descriptors = _descriptors(channel, nsid, deadline)
    csi = Csi.NVM if descriptors.csi is None else descriptors.csi
    if csi != Csi.NVM:
        # Its Identify data has another layout, which nothing here reads.
        ident = IdentifyNamespace(nsze=1, ncap=1)
    else:
        data = channel.identify(Cns.NAMESPACE, nsid=nsid, deadline=deadline)
        ident = channel.parse(IdentifyNamespace.parse, data)
        if not ident.is_present or ident.nsze == 0:
            return None
    try:
        lba_format = ident.lba_format
    except WireError as error:
        raise WireError(f"{where}: {error}", field=error.field, field_offset=error.field_offset) from error
    index = ident.lba_format_index
    block_size_bytes = lba_format.block_size_bytes
    problem = ""
    if csi != Csi.NVM:
        problem = f"command set 0x{csi:02x} is not the NVM command set"
    elif not limits.BLOCK_SIZE_BYTES_MIN <= block_size_bytes <= limits.BLOCK_SIZE_BYTES_MAX:
        problem = f"LBADS {lba_format.lbads}: expected blocks of 512 bytes to 64 KiB"
    elif lba_format.ms:
        problem = (
            f"LBA format {index} has {lba_format.ms} bytes of metadata: "
            f"format the namespace with a format that has none"
        )
    elif ident.nsze > (1 << 63) >> lba_format.lbads:
        problem = f"NSZE 0x{ident.nsze:x} blocks: expected less than 2^63 bytes"
    transfer_bytes = 0
    if not problem:
        transfer_bytes = limits.max_transfer_bytes(
            mdts=controller.identify.mdts, mpsmin=controller.cap.mpsmin, block_size_bytes=block_size_bytes
        )
        if transfer_bytes == 0:
            problem = (
                f"MDTS {controller.identify.mdts}: not one block of {block_size_bytes} bytes may be moved"
            )
    return NamespaceInfo(
        nsid=nsid,
        identity=DeviceIdentity(
            nguid=_identifier(descriptors.nguid) or _identifier(ident.nguid),
            eui64=_identifier(descriptors.eui64) or _identifier(ident.eui64),
            uuid=_identifier(descriptors.uuid.bytes if descriptors.uuid else None),
            serial=controller.identify.sn or None,
        ),
        csi=csi,
        block_size_bytes=block_size_bytes,
        block_count=ident.nsze,
        metadata_size_bytes=lba_format.ms,
        lba_format_index=index,
        max_transfer_bytes=transfer_bytes,
        atomic_write_blocks=limits.atomic_write_blocks(
            awupf=controller.identify.awupf_0based,
            nawupf=ident.nawupf_0based,
            is_nawupf_valid=bool(ident.nsfeat & NSFEAT_ATOMIC),
            nabspf=ident.nabspf_0based,
            nabo=ident.nabo,
        ),
        optimal_boundary_blocks=ident.noiob,
        preferred_write_blocks=ident.npwg_0based + 1 if ident.nsfeat & NSFEAT_OPTPERF else 1,
        is_write_protected=bool(ident.nsattr & _NSATTR_WRITE_PROTECTED),
        is_shared=bool(ident.nmic & NMIC_SHARED),
        anagrpid=ident.anagrpid,
        reservation_capabilities=ident.rescap,
        compare_and_write_blocks=_compare_and_write_blocks(controller, ident),
        copy_limits=(ident.mssrl, ident.mcl, ident.msrc_0based),
        problem=problem,
    )


def _compare_and_write_blocks(controller: Controller, ident: IdentifyNamespace) -> int:
    identify = controller.identify
    if not identify.fuses & FUSES_COMPARE_AND_WRITE or not identify.oncs & ONCS_COMPARE:
        return 0
    is_own = ident.nsfeat & NSFEAT_ATOMIC and ident.nacwu_0based
    return 1 + (ident.nacwu_0based if is_own else identify.acwu_0based)


def _descriptors(channel: AdminChannel, nsid: int, deadline: Deadline) -> NsDescriptorList:
    """The descriptor list; empty from a controller that does not have it (before NVMe 1.3)."""
    try:
        data = channel.identify(Cns.NS_DESCRIPTOR_LIST, nsid=nsid, deadline=deadline)
    except CommandError as error:
        if (error.sct, error.sc) != (0, Status.INVALID_FIELD):
            raise
        return NsDescriptorList()
    return channel.parse(NsDescriptorList.parse, data)


def _identifier(value: bytes | None) -> bytes | None:
    """All zeroes on the wire mean that there is no identifier."""
    return value if value is not None and any(value) else None


def choose(infos: Sequence[NamespaceInfo], nsid: int | None, *, where: str) -> NamespaceInfo:
    """The namespace ``nsid`` of a ``scan``.

    Raises UsageError when the id is not active (naming those that are) and UnsupportedError when the
    namespace cannot be used, with the reason.
    """
    info = next((info for info in infos if info.nsid == nsid), None)
    if info is None:
        names = ", ".join(str(active.nsid) for active in infos[:16]) or "none"
        got = "none" if nsid is None else str(nsid)
        raise UsageError(f"{where}: nsid: expected one of the active namespaces ({names}), got {got}")
    if info.problem:
        raise UnsupportedError(f"{where} nsid {nsid}: {info.problem}", feature="namespace")
    return info


class ControllerSource(Protocol):
    """Whoever makes associations: the namespace asks it for what its controllers can do."""

    @property
    def controller(self) -> Controller:
        """The association in use, or the last one that was."""

    @property
    def fence_ns(self) -> int: ...

    def ask(self, question: Callable[[Controller], _T], *, deadline: Deadline) -> _T: ...

    def forget(self, namespace: NvmeNamespace) -> None: ...


class NvmeNamespace(BlockDevice):
    """A namespace with the NVM command set, reached through the controllers of its subsystem.

    Reads and writes go through ``queue`` in batches (``kvdev.block``); the methods here block. A lost
    connection shows as a pause: ``kvdev.initiator.options`` says how long, and what becomes of writes.
    """

    def __init__(
        self, source: ControllerSource, info: NamespaceInfo, queue: HostQueue, *, uri: TcpUri
    ) -> None:
        """Used by ``Subsystem.open_namespace``; ``uri`` is the subsystem's."""
        controller = source.controller
        options = controller.options
        self._source = source
        self.info = info
        self.uri = str(replace(uri, nsid=info.nsid))
        self.identity = info.identity
        self.block_size_bytes = info.block_size_bytes
        self.block_count = info.block_count
        self.max_transfer_bytes = info.max_transfer_bytes
        self.atomic_write_blocks = info.atomic_write_blocks
        self.has_volatile_cache = controller.identify.has_volatile_cache
        self.metadata_size_bytes = 0
        self.is_read_only = info.is_write_protected
        self.compare_and_write_blocks = info.compare_and_write_blocks
        self.reservations = NamespaceReservations(self)
        self.queue: HostQueue = queue
        self._own_queue = queue  # also while a drill stands before it
        self.device_index = queue.add_multipath(
            nsid=info.nsid,
            block_size_bytes=info.block_size_bytes,
            block_count=info.block_count,
            max_transfer_bytes=info.max_transfer_bytes,
            recovery=Recovery(
                fail_after_s=options.fail_after_s,
                retry_count=options.retry_count,
                policy=options.path_policy,
                is_uncertain_reported=options.lost_writes is LostWrites.REPORT,
                has_volatile_cache=self.has_volatile_cache,
                is_cache_shared=options.is_cache_shared,
            ),
        )
        self._is_closed = False

    @property
    def controller(self) -> Controller:
        """The association in use, or the last one that was; another one after each loss."""
        return self._source.controller

    @property
    def fence_ns(self) -> int:
        """Monotonic time after which no write that was lost so far can take effect any more; 0: none was lost."""
        return self._source.fence_ns

    @property
    def dead_writer_s(self) -> float:
        """The controller notices that the connections of a process are closed, and stops within its CQT."""
        controller = self.controller
        if controller.options.fence_wait_s is not None:
            return controller.options.fence_wait_s
        return controller.identify.cqt_ms / 1000 or controller.options.cqt_default_s

    @property
    def lost_writer_s(self) -> float:
        """Base 9.6.2, for a host with the keep alive timeout of this one."""
        controller = self.controller
        if controller.options.fence_wait_s is not None:
            return controller.options.fence_wait_s
        intervals = 3 if controller.is_traffic_based else 2
        return intervals * controller.kato_ms / 1000 + self.dead_writer_s

    def resize(self, info: NamespaceInfo) -> None:
        """The namespace has grown or shrunk (a changed namespace event)."""
        self.info = info
        self.block_count = info.block_count
        self.queue.resize_device(self.device_index, info.block_count)

    @property
    def nsid(self) -> int:
        return self.info.nsid

    @property
    def cache_loss_count(self) -> int:
        return self._own_queue.lost_count(self.device_index)

    def note_writes(self, sent_ns: int) -> None:
        self._own_queue.note_writes(self.device_index, sent_ns)

    def flush(self, deadline: Deadline) -> None:
        """Make completed writes durable; nothing to do where the controller has no volatile write cache."""
        flush(self, deadline)

    def write_zeroes(
        self, slba: int, block_count: int, deadline: Deadline, *, may_deallocate: bool = False
    ) -> None:
        """Zero a range without sending zeroes; split at what one command may cover."""
        self.check_feature(ONCS_WRITE_ZEROES, "write zeroes")
        self._check_range(slba, block_count)
        nvm = self._nvm_limits(deadline)
        piece = limits.write_zeroes_blocks(
            wzsl=nvm.wzsl,
            mpsmin=self.controller.cap.mpsmin,
            block_size_bytes=self.block_size_bytes,
            max_transfer_bytes=self.max_transfer_bytes,
        )
        ios = _range_ios(OPCODE_WRITE_ZEROES, slba, block_count, piece)
        ios["flags"] = IO_DEALLOCATE if may_deallocate else 0
        execute(self, ios, deadline)

    def verify(self, slba: int, block_count: int, deadline: Deadline) -> None:
        """Have the controller read a range and check it, without sending it.

        Raises CommandError with the first block of the command that failed.
        """
        self.check_feature(ONCS_VERIFY, "verify")
        self._check_range(slba, block_count)
        nvm = self._nvm_limits(deadline)
        piece = limits.verify_blocks(
            vsl=nvm.vsl,
            mpsmin=self.controller.cap.mpsmin,
            block_size_bytes=self.block_size_bytes,
            max_transfer_bytes=self.max_transfer_bytes,
        )
        execute(self, _range_ios(OPCODE_VERIFY, slba, block_count, piece), deadline)

    def compare(self, slba: int, data: bytes | bytearray, deadline: Deadline) -> bool:
        """Whether the blocks from ``slba`` are ``data``, as the controller says."""
        self.check_feature(ONCS_COMPARE, "compare")
        count, rest = divmod(len(data), self.block_size_bytes)
        if rest:
            raise UsageError(
                f"{self.uri}: compare: expected whole blocks of {self.block_size_bytes} bytes, got {len(data)}"
            )
        self._check_range(slba, count)
        payload = aligned_buffer(len(data))
        payload[:] = np.frombuffer(data, dtype=np.uint8)
        ios = transfer_ios(self, OPCODE_COMPARE, slba, address_of(payload), payload.nbytes)
        done = run_batch(self.queue, ios, deadline)
        is_different = done["status"] & 0x7FF == int(Status.COMPARE_FAILURE)
        failed = np.flatnonzero((done["error"] != 0) & ~is_different)
        if len(failed):
            first = int(failed[0])
            raise error_of(
                error=int(done["error"][first]),
                status=int(done["status"][first]),
                opcode=OPCODE_COMPARE,
                slba=int(ios["slba"][first]),
                uri=self.uri,
            )
        return not is_different.any()

    def compare_and_write(
        self, slba: int, expected: bytes | bytearray, new: bytes | bytearray, deadline: Deadline
    ) -> bool:
        """A fused pair on one queue pair. What never left this host is sent again when there is a connection.

        After UncertainWriteError the pair may still take effect until ``fence_ns``: read the block after that.
        """
        if not self.compare_and_write_blocks:
            identify = self.controller.identify
            raise UnsupportedError(
                f"{self.uri}: compare and write: the controller does not have it (FUSES 0x{identify.fuses:04x}, "
                f"ONCS 0x{identify.oncs:04x}); where it has reservations those fence a writer, else time does",
                feature="compare and write",
            )
        self._check_compare_and_write(slba, expected, new)
        old_data, new_data = aligned_buffer(len(expected)), aligned_buffer(len(new))
        old_data[:] = np.frombuffer(expected, dtype=np.uint8)
        new_data[:] = np.frombuffer(new, dtype=np.uint8)

        def attempt() -> bool:
            pair = self.queue.compare_and_write(
                self.device_index,
                slba=slba,
                lba_count=len(expected) // self.block_size_bytes,
                expected=old_data,
                new=new_data,
                deadline=deadline,
            )
            return self._pair_result(pair, slba)

        for _ in range(PATH_RETRY_COUNT):
            try:
                return on_some_path(attempt, deadline)
            except ConnectionLostError:
                # Without effect, or it were uncertain: sent again as soon as there is a connection.
                deadline.check("compare and write", trid=self.uri)
        return on_some_path(attempt, deadline)

    def _pair_result(self, pair: PairCompletion, slba: int) -> bool:
        if not pair.write_error:
            return True
        if pair.compare_error and pair.compare_status & 0x7FF == Status.COMPARE_FAILURE:
            return False
        is_compare = pair.write_status & 0x7FF == Status.ABORTED_FAILED_FUSED and pair.compare_status
        raise error_of(
            error=pair.compare_error if is_compare else pair.write_error,
            status=pair.compare_status if is_compare else pair.write_status,
            opcode=OPCODE_COMPARE if is_compare else OPCODE_WRITE,
            slba=slba,
            uri=self.uri,
        )

    def copy(self, slba: int, ranges: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Copy ranges (slba, block count), one after the other, to the blocks from ``slba``, inside the controller.

        Not atomic; a destination that overlaps a source is refused, because several commands may run at once.
        """
        self.check_feature(ONCS_COPY, "copy")
        total = sum(block_count for _, block_count in ranges)
        if not total:
            return
        self._check_range(slba, total)
        for start, block_count in ranges:
            self._check_range(start, block_count)
            if start < slba + total and slba < start + block_count:
                raise UsageError(
                    f"{self.uri}: copy: expected sources apart from the destination {slba} to {slba + total - 1}, "
                    f"got {block_count} blocks from {start}"
                )
        mssrl, mcl, msrc = self.info.copy_limits
        if not mssrl or not mcl:
            raise UnsupportedError(
                f"{self.uri}: copy: the namespace takes none (MSSRL {mssrl}, MCL {mcl})", feature="copy"
            )
        groups = limits.copy_groups(ranges, mssrl=mssrl, mcl=mcl, msrc=msrc)
        payload = np.frombuffer(b"".join(build_copy_ranges(group) for group in groups), dtype=np.uint8)
        sizes = np.array([len(group) * COPY_RANGE_BYTES for group in groups], dtype=np.uint64)
        blocks = np.array([sum(count for _, count in group) for group in groups], dtype=np.uint64)
        ios: IoArray = np.zeros(len(groups), dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_COPY
        ios["slba"] = np.uint64(slba) + np.cumsum(blocks) - blocks
        ios["lba_count"] = blocks
        ios["buf_addr"] = np.uint64(address_of(payload)) + np.cumsum(sizes) - sizes
        ios["byte_count"] = sizes
        execute(self, ios, deadline)

    def deallocate(self, ranges: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """Tell the controller that ranges (slba, block count) are not needed; their contents are undefined.

        A hint: never rely on what a deallocated block reads as.
        """
        self.check_feature(ONCS_DSM, "deallocate")
        for slba, block_count in ranges:
            self._check_range(slba, block_count)
        nvm = self._nvm_limits(deadline)
        groups = limits.deallocate_groups(ranges, dmrl=nvm.dmrl, dmrsl=nvm.dmrsl, dmsl=nvm.dmsl)
        if not groups:
            return
        table = b"".join(
            DsmRange(lba_count=block_count, slba=slba).build()
            for group in groups
            for slba, block_count in group
        )
        payload = np.frombuffer(table, dtype=np.uint8)
        sizes = np.array([len(group) * DSM_RANGE_BYTES for group in groups], dtype=np.uint64)
        ios: IoArray = np.zeros(len(groups), dtype=IO_DTYPE)
        ios["opcode"] = OPCODE_DSM
        ios["flags"] = IO_DEALLOCATE
        ios["buf_addr"] = np.uint64(address_of(payload)) + np.cumsum(sizes) - sizes
        ios["byte_count"] = sizes
        execute(self, ios, deadline)

    def _nvm_limits(self, deadline: Deadline) -> CsiControllerNvm:
        return self._source.ask(
            lambda controller: controller.nvm_limits(deadline=deadline), deadline=deadline
        )

    def close(self) -> None:
        """Forget the namespace; its controller stays."""
        if self._is_closed:
            return
        self._is_closed = True
        self._source.forget(self)
        if not self.queue.is_closed:
            self.queue.remove_device(self.device_index)

    def check_feature(self, bit: int, feature: str) -> None:
        """Raise UnsupportedError naming ONCS unless the controller has an optional command."""
        if not self.controller.identify.oncs & bit:
            raise UnsupportedError(
                f"{self.uri}: {feature}: the controller does not have it (ONCS "
                f"0x{self.controller.identify.oncs:04x})",
                feature=feature,
            )

    def _check_range(self, slba: int, block_count: int) -> None:
        if slba < 0 or block_count <= 0 or slba + block_count > self.block_count:
            raise UsageError(
                f"{self.uri}: range: expected blocks within 0 to {self.block_count - 1}, "
                f"got {block_count} from {slba}"
            )


def _range_ios(opcode: int, slba: int, block_count: int, piece: int) -> IoArray:
    """Commands without payload over a range, each of at most ``piece`` blocks."""
    count = -(-block_count // piece)
    ios: IoArray = np.zeros(count, dtype=IO_DTYPE)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(piece)
    ios["opcode"] = opcode
    ios["slba"] = np.uint64(slba) + starts
    ios["lba_count"] = np.minimum(np.uint64(block_count) - starts, np.uint64(piece))
    return ios
