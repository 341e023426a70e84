"""Controllers of the embedded target: what Fabrics and Admin commands answer, and when a controller has expired.

Not here: sockets, queues and threads (``service``, the C core); which bdev a namespace is (``model``).
Spec: NVM Express Base 2.2 sections 3.1.4, 3.5 to 3.9, 5.1, 6.3 to 6.6.
Trust: commands and their data are ``untrusted``; what is wrong with them becomes a status, never an exception.
Threads: none of its own; the service calls under its lock. Time comes in as arguments.
"""

from __future__ import annotations

import uuid as uuid_module
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvdev.errors import ProtocolError
from kvdev.target.model import ListenAddress, NamespaceEntry, Subsystem, Transport
from kvdev.target.notice_queue import MASK_BITS, NoticeQueue
from kvdev.wire.fabrics import (
    PROPERTY_BYTES,
    Cap,
    Cc,
    CcCss,
    Crto,
    Csts,
    FabricsType,
    Property,
    PropertyCommand,
    Shn,
    Shst,
    Version,
)
from kvdev.wire.features import AsyncEventConfig, Fid, HostBehaviorSupport, NumberOfQueues, VolatileWriteCache
from kvdev.wire.identify import (
    ANACAP_STATES,
    CDFS_FORMAT_0,
    CMIC_ANA,
    CMIC_MULTI_CONTROLLER,
    CMIC_MULTI_PORT,
    CTRATT_HOSTID_128,
    FUSES_COMPARE_AND_WRITE,
    IDENTIFY_BYTES,
    LPA_EFFECTS,
    LPA_EXTENDED,
    NMIC_SHARED,
    OAES_ANA_CHANGE,
    OAES_DISCOVERY_CHANGE,
    OAES_NAMESPACE_ATTRIBUTE,
    ONCS_COMPARE,
    ONCS_COPY,
    ONCS_DSM,
    ONCS_RESERVATIONS,
    ONCS_VERIFY,
    ONCS_WRITE_ZEROES,
    RESCAP_IEKEY_1_3,
    RESCAP_PTPL,
    RESCAP_TYPES,
    SGLS_OFFSET,
    SGLS_SUPPORTED,
    SGLS_TRANSPORT,
    VWC_PRESENT,
    Cns,
    ControllerType,
    Csi,
    CsiControllerNvm,
    CsiIndependentNamespace,
    CsiNamespaceNvm,
    IdentifyController,
    IdentifyNamespace,
    LbaFormat,
    NsDescriptorList,
    build_nsid_list,
)
from kvdev.wire.log import (
    EFFECT_LOGICAL_BLOCK_CHANGE,
    EFFECT_SUPPORTED,
    AnaGroup,
    AnaLog,
    AnaState,
    ChangedNsLog,
    EffectsLog,
    ErrorEntry,
    FirmwareSlotLog,
    Lid,
    ReservationNotice,
    SmartLog,
    build_supported_log,
    cut_log,
)
from kvdev.wire.nvme import (
    NSID_ALL,
    RESERVATION_LOG_AVAILABLE,
    STATUS_DNR,
    AbortCommand,
    AdminOpcode,
    AsyncEvent,
    AsyncEventType,
    FeaturesCommand,
    GetLogPageCommand,
    IdentifyCommand,
    Notice,
    NvmOpcode,
    Sqe,
    Status,
)

AER_LIMIT: Final = 4
"""Asynchronous Event Requests held at a time (AERL + 1)."""
ERROR_LOG_LIMIT: Final = 16
"""Entries of the error log (ELPE + 1): the newest failed commands of the Admin queue."""
CQT_MS: Final = 100
"""From losing the association to the last effect of its commands. A controller's connections are closed in
one round of their poller; what remains is a write that a worker has already handed to the kernel."""
KATO_MS_DEFAULT: Final = 120_000
"""Of a host that asks for none: TCP always has a keep alive timer."""
KATO_MS_MAX: Final = 3_600_000
RTD3E_US: Final = 1_000_000
CONTROLLER_VERSION: Final = Version(major=2, minor=0, tertiary=0)
READY_TIMEOUT_500MS: Final = 2
FUSED_BLOCK_SIZE_MAX_BYTES: Final = 16384
"""The core takes fused pairs of one block that fits its staging memory (KVDEV_TARGET_STAGE_BYTES)."""
COPY_RANGE_COUNT: Final = 128
"""Source ranges of one Copy command (MSRC + 1)."""
FIRMWARE_REVISION: Final = "kvdev"
NS_PER_MS: Final = 1_000_000
_ANA_STATUS: Final = {
    AnaState.INACCESSIBLE: int(Status.ANA_INACCESSIBLE),
    AnaState.PERSISTENT_LOSS: int(Status.ANA_PERSISTENT_LOSS),
    AnaState.CHANGE: int(Status.ANA_TRANSITION),
}
_WRITE_EFFECTS = EFFECT_SUPPORTED | EFFECT_LOGICAL_BLOCK_CHANGE


@dataclass(frozen=True)
class Answer:
    """How a command completes; with ``is_held`` it does not yet (an Asynchronous Event Request)."""

    status: int = 0
    dw0: int = 0
    dw1: int = 0
    data: bytes = b""
    is_held: bool = False


SUCCESS = Answer()
HELD = Answer(is_held=True)


def refused(status: int, *, dw0: int = 0, is_final: bool = True) -> Answer:
    """A failed command; ``is_final`` sets Do Not Retry."""
    return Answer(status=int(status) | (STATUS_DNR if is_final else 0), dw0=dw0)


@dataclass(frozen=True)
class NamespaceFacts:
    """What Identify says of a namespace beyond its entry: taken from the bdev when it was attached."""

    entry: NamespaceEntry
    block_size_bytes: int
    block_count: int
    has_volatile_cache: bool
    optimal_io_boundary_blocks: int = 0
    """Strip of a raid0: I/O that crosses it is split by the target."""


@dataclass(frozen=True)
class IoTotals:
    """Sum over the namespaces, for the health log."""

    read_bytes: int = 0
    read_count: int = 0
    write_bytes: int = 0
    write_count: int = 0


@dataclass(frozen=True)
class Surroundings:
    """What a controller asks of the target around it; every callable is quick and safe under the lock."""

    namespaces: Callable[[str], Mapping[int, NamespaceFacts]]
    """Attached namespaces of a subsystem, by NSID."""
    io_totals: Callable[[str], IoTotals]
    discovery_log: Callable[[Controller], bytes]
    set_ready: Callable[[Controller, bool], None]
    """Let the I/O queues execute commands, or stop them."""
    drop_io_queues: Callable[[Controller], None]
    complete_held: Callable[[Controller, int, Answer], None]
    """Complete an Asynchronous Event Request by its handle."""
    flush_for_shutdown: Callable[[Controller], None]
    """Make everything durable, then call ``shutdown_done``: at once where nothing is cached."""
    is_persistent: Callable[[str, int], bool]
    """The PTPL state of a namespace."""
    set_persistent: Callable[[str, int, bool], int]
    """Change it; the status that this ends with."""


@dataclass
class Controller:
    """One association. Invariant: ``keep_alive_ns`` is meaningful only while ``is_timer_active``."""

    subsystem: Subsystem
    transport: Transport
    cntlid: int
    host_nqn: str
    host_id: uuid_module.UUID
    listen: ListenAddress
    kato_ms: int
    around: Surroundings
    core_index: int = -1
    connection: int = 0
    cc: Cc = field(default_factory=Cc)
    csts: Csts = field(default_factory=Csts)
    keep_alive_ns: int = 0
    io_queue_count: int = 0
    """Granted; Number of Queues lowers it."""
    io_connections: dict[int, int] = field(default_factory=dict)
    """QID to connection."""
    aers: dict[int, int] = field(default_factory=dict)
    """CID to handle of the held Asynchronous Event Requests, oldest first."""
    event_config: AsyncEventConfig = field(default_factory=AsyncEventConfig)
    changed_nsids: set[int] = field(default_factory=set)
    masked_lids: set[int] = field(default_factory=set)
    """Log pages whose event was sent and not yet read: no further event until then."""
    pending_events: dict[int, AsyncEvent] = field(default_factory=dict)
    """Log page to the event that waits for a request to carry it: one each at most."""
    errors: deque[ErrorEntry] = field(default_factory=lambda: deque(maxlen=ERROR_LOG_LIMIT))
    error_count: int = 0
    feature_values: dict[int, int] = field(default_factory=dict)
    host_behavior: HostBehaviorSupport = field(default_factory=HostBehaviorSupport)
    ana_change_count: int = 0
    notices: NoticeQueue = field(default_factory=NoticeQueue)

    def __post_init__(self) -> None:
        self.io_queue_count = 0 if self.is_discovery else self.transport.max_io_qpairs_per_ctrlr
        self.kato_ms = self.effective_kato_ms(self.kato_ms)

    @property
    def is_discovery(self) -> bool:
        return self.subsystem.is_discovery

    # ---- keep alive (Base 3.9) ----

    @property
    def is_timer_active(self) -> bool:
        return bool(self.csts.rdy) and self.cc.shn == Shn.NONE

    @property
    def expires_ns(self) -> int:
        """When the host counts as gone unless a Keep Alive arrives before."""
        return self.keep_alive_ns + self.kato_ms * NS_PER_MS

    def effective_kato_ms(self, wanted_ms: int) -> int:
        """Raised to the minimum and rounded up to the granularity KAS; 0 takes the transport's default."""
        granularity_ms = max(1, self.transport.kas) * 100
        wanted_ms = max(wanted_ms or KATO_MS_DEFAULT, self.transport.min_kato)
        return -(-wanted_ms // granularity_ms) * granularity_ms

    # ---- commands ----

    def execute(self, untrusted_sqe: Sqe, untrusted_data: bytes, *, handle: int, arrival_ns: int) -> Answer:
        """Answer one command of the Admin queue."""
        sqe = untrusted_sqe
        if sqe.opc == AdminOpcode.FABRICS:
            answer = self._fabrics(sqe, arrival_ns)
        elif not self.csts.rdy:
            answer = refused(Status.COMMAND_SEQUENCE_ERROR)
        else:
            answer = self._admin(sqe, untrusted_data, handle, arrival_ns)
        if answer.status:
            self._log_error(sqe, answer)
        return answer

    def _admin(self, sqe: Sqe, data: bytes, handle: int, arrival_ns: int) -> Answer:
        if sqe.flags & 3:
            return refused(Status.INVALID_FIELD)  # no fused operations
        match sqe.opc:
            case AdminOpcode.IDENTIFY:
                return self._identify(IdentifyCommand.from_sqe(sqe), sqe.sgl_len)
            case AdminOpcode.GET_LOG_PAGE:
                return self._log_page(GetLogPageCommand.from_sqe(sqe), sqe.sgl_len)
            case AdminOpcode.KEEP_ALIVE:
                self.keep_alive_ns = max(self.keep_alive_ns, arrival_ns)
                return SUCCESS
            case AdminOpcode.ASYNC_EVENT_REQUEST:
                return self._async_event_request(sqe.cid, handle)
            case AdminOpcode.SET_FEATURES:
                return self._set_features(FeaturesCommand.from_sqe(sqe), data, arrival_ns)
            case AdminOpcode.GET_FEATURES:
                return self._get_features(FeaturesCommand.from_sqe(sqe), sqe.sgl_len)
            case AdminOpcode.ABORT if not self.is_discovery:
                return self._abort(AbortCommand.from_sqe(sqe))
            case _:
                return refused(Status.INVALID_OPCODE)

    def _log_error(self, sqe: Sqe, answer: Answer) -> None:
        self.error_count += 1
        self.errors.appendleft(
            ErrorEntry(
                error_count=self.error_count,
                cid=sqe.cid,
                status_p=answer.status << 1,
                nsid=0 if sqe.opc == AdminOpcode.FABRICS else sqe.nsid,
                trtype=3,
                opcode=sqe.opc,
                parameter_error_location=0xFFFF,
            )
        )

    # ---- Fabrics commands and properties ----

    def _fabrics(self, sqe: Sqe, arrival_ns: int) -> Answer:
        match sqe.fctype:
            case FabricsType.PROPERTY_GET:
                return self._property_get(PropertyCommand.from_sqe(sqe))
            case FabricsType.PROPERTY_SET:
                return self._property_set(PropertyCommand.from_sqe(sqe), arrival_ns)
            case FabricsType.CONNECT:
                return refused(Status.COMMAND_SEQUENCE_ERROR)  # this queue is connected
            case _:
                return refused(Status.INVALID_FIELD)

    @property
    def cap(self) -> Cap:
        return Cap(
            mqes_0based=self.transport.max_queue_depth - 1,
            cqr=1,
            to_500ms=READY_TIMEOUT_500MS,
            css=1,
            crwms=1,
        )

    def _property_get(self, command: PropertyCommand) -> Answer:
        values = {
            Property.CAP: self.cap.build(),
            Property.VS: CONTROLLER_VERSION.build(),
            Property.CC: self.cc.build(),
            Property.CSTS: self.csts.build(),
            Property.CRTO: Crto(crwmt_500ms=READY_TIMEOUT_500MS).build(),
        }
        if command.offset not in values or PROPERTY_BYTES[Property(command.offset)] != command.size_bytes:
            return refused(Status.INVALID_FIELD)
        value = values[Property(command.offset)]
        return Answer(dw0=value & 0xFFFFFFFF, dw1=value >> 32)

    def _property_set(self, command: PropertyCommand, arrival_ns: int) -> Answer:
        if command.offset != Property.CC or command.size_bytes != 4:
            return refused(Status.INVALID_FIELD)
        cc = Cc.parse(command.value)
        if cc.mps != 0 or cc.ams != 0 or cc.css not in (CcCss.NVM, CcCss.ADMIN_ONLY) or cc.shn > Shn.ABRUPT:
            return refused(Status.INVALID_FIELD)
        if cc.en and (cc.iosqes not in (0, 6) or cc.iocqes not in (0, 4)):
            return refused(Status.INVALID_FIELD)
        before, self.cc = self.cc, cc
        if cc.shn != Shn.NONE and before.shn == Shn.NONE:
            self._shut_down()
        elif cc.en and not before.en:
            self._enable(arrival_ns)
        elif before.en and not cc.en:
            self._reset()
        return SUCCESS

    def _enable(self, arrival_ns: int) -> None:
        self.csts = Csts(rdy=1)
        self.keep_alive_ns = arrival_ns
        self.around.set_ready(self, True)

    def _shut_down(self) -> None:
        """Stop the I/O queues, then make durable what they wrote (Base 3.6.2)."""
        self.around.set_ready(self, False)
        self.csts = replace(self.csts, shst=Shst.OCCURRING)
        if self.cc.shn == Shn.NORMAL:
            self.around.flush_for_shutdown(self)
        else:
            self.shutdown_done()

    def shutdown_done(self) -> None:
        """Report the shutdown as complete, unless a reset has overtaken it."""
        if self.csts.shst == Shst.OCCURRING:
            self.csts = replace(self.csts, shst=Shst.COMPLETE)

    def _reset(self) -> None:
        """Controller reset: I/O queues are gone, the Admin queue stays (Base 3.7.2)."""
        self.around.set_ready(self, False)
        self.around.drop_io_queues(self)
        for handle in self.aers.values():
            self.around.complete_held(self, handle, Answer(status=Status.ABORTED_SQ_DELETION))
        self.aers.clear()
        self.csts = Csts()
        self.event_config = AsyncEventConfig()
        self.pending_events.clear()
        self.masked_lids.clear()
        self.changed_nsids.clear()
        self.notices = NoticeQueue()
        self.feature_values.clear()
        self.host_behavior = HostBehaviorSupport()
        self.io_queue_count = 0 if self.is_discovery else self.transport.max_io_qpairs_per_ctrlr

    # ---- Identify ----

    def _identify(self, command: IdentifyCommand, data_room: int) -> Answer:
        if data_room < IDENTIFY_BYTES:
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        if command.cns == Cns.CONTROLLER:
            return Answer(data=self._identify_controller().build())
        if self.is_discovery:
            return refused(Status.INVALID_FIELD)
        namespaces = self.around.namespaces(self.subsystem.nqn)
        match command.cns:
            case Cns.ACTIVE_NSID_LIST:
                return self._nsid_list(command.nsid, namespaces)
            case Cns.CSI_ACTIVE_NSID_LIST if command.csi == Csi.NVM:
                return self._nsid_list(command.nsid, namespaces)
            case Cns.CSI_CONTROLLER if command.csi == Csi.NVM:
                return Answer(data=CsiControllerNvm(vsl=self._mdts, dmrl=0, dmrsl=0, wzsl=0).build())
            case Cns.NAMESPACE | Cns.NS_DESCRIPTOR_LIST | Cns.CSI_NAMESPACE | Cns.CSI_INDEPENDENT_NAMESPACE:
                return self._identify_namespace(command, namespaces)
            case _:
                return refused(Status.INVALID_FIELD)

    @staticmethod
    def _nsid_list(after_nsid: int, nsids: Iterable[int]) -> Answer:
        if after_nsid >= NSID_ALL - 1:
            return refused(Status.INVALID_NAMESPACE_OR_FORMAT)
        return Answer(data=build_nsid_list(nsids, after_nsid=after_nsid))

    def _identify_namespace(
        self, command: IdentifyCommand, namespaces: Mapping[int, NamespaceFacts]
    ) -> Answer:
        if not 1 <= command.nsid <= self.subsystem.max_namespaces:
            return refused(Status.INVALID_NAMESPACE_OR_FORMAT)
        facts = namespaces.get(command.nsid)
        if command.cns == Cns.NAMESPACE:
            # An inactive namespace reads as zeroes (Base 5.1.13.2.1).
            return Answer(data=self._namespace_data(facts) if facts else bytes(IDENTIFY_BYTES))
        if facts is None:
            return refused(Status.INVALID_NAMESPACE_OR_FORMAT)
        if command.cns == Cns.NS_DESCRIPTOR_LIST:
            entry = facts.entry
            descriptors = NsDescriptorList(
                eui64=entry.eui64 or None, nguid=entry.nguid or None, uuid=entry.uuid, csi=Csi.NVM
            )
            return Answer(data=descriptors.build())
        if command.cns == Cns.CSI_NAMESPACE:
            if command.csi != Csi.NVM:
                return refused(Status.INVALID_FIELD)
            return Answer(data=CsiNamespaceNvm().build())
        independent = CsiIndependentNamespace(
            nmic=NMIC_SHARED,
            rescap=self._rescap(facts.entry),
            anagrpid=self._anagrpid(facts.entry),
            nstat=1,
        )
        return Answer(data=independent.build())

    @property
    def _mdts(self) -> int:
        """Also the limit of Verify and Copy."""
        return (self.transport.max_io_size // 4096).bit_length() - 1

    @staticmethod
    def _rescap(entry: NamespaceEntry) -> int:
        return RESCAP_TYPES | RESCAP_IEKEY_1_3 | (RESCAP_PTPL if entry.ptpl_file else 0)

    def _anagrpid(self, entry: NamespaceEntry) -> int:
        return entry.anagrpid if self.subsystem.ana_reporting else 0

    def _namespace_data(self, facts: NamespaceFacts) -> bytes:
        count = facts.block_count
        copy_blocks = self.transport.max_io_size // facts.block_size_bytes
        return IdentifyNamespace(
            nsze=count,
            ncap=count,
            nuse=count,
            nmic=NMIC_SHARED,
            rescap=self._rescap(facts.entry),
            mssrl=min(copy_blocks, 0xFFFF),
            mcl=copy_blocks,
            msrc_0based=COPY_RANGE_COUNT - 1,
            dlfeat=1,  # deallocated blocks read as zeroes; file systems that cannot punch holes keep the data
            noiob=facts.optimal_io_boundary_blocks if facts.optimal_io_boundary_blocks <= 0xFFFF else 0,
            anagrpid=self._anagrpid(facts.entry),
            nguid=facts.entry.nguid or bytes(16),
            eui64=facts.entry.eui64 or bytes(8),
            lbaf=(LbaFormat(lbads=facts.block_size_bytes.bit_length() - 1),),
        ).build()

    def _identify_controller(self) -> IdentifyController:
        transport = self.transport
        common = IdentifyController(
            sn=self.subsystem.serial_number[:20],
            mn=self.subsystem.model_number[:40],
            fr=FIRMWARE_REVISION,
            cntlid=self.cntlid,
            ver=CONTROLLER_VERSION.build(),
            rtd3e_us=RTD3E_US,
            mdts=self._mdts,
            aerl_0based=AER_LIMIT - 1,
            elpe_0based=ERROR_LOG_LIMIT - 1,
            lpa=LPA_EFFECTS | LPA_EXTENDED,
            ctratt=CTRATT_HOSTID_128,
            kas_100ms=max(1, transport.kas),
            cqt_ms=CQT_MS,
            maxcmd=transport.max_queue_depth,
            sgls=SGLS_SUPPORTED | SGLS_OFFSET | SGLS_TRANSPORT,
            subnqn=self.subsystem.nqn,
            ioccsz_16b=4,
            iorcsz_16b=1,
            msdbd=1,
        )
        if self.is_discovery:
            return replace(common, cntrltype=ControllerType.DISCOVERY, oaes=OAES_DISCOVERY_CHANGE)
        namespaces = self.around.namespaces(self.subsystem.nqn).values()
        can_fuse = all(facts.block_size_bytes <= FUSED_BLOCK_SIZE_MAX_BYTES for facts in namespaces)
        is_cached = any(facts.has_volatile_cache for facts in namespaces)
        has_ana = self.subsystem.ana_reporting
        return replace(
            common,
            cmic=CMIC_MULTI_PORT | CMIC_MULTI_CONTROLLER | (CMIC_ANA if has_ana else 0),
            cntrltype=ControllerType.IO,
            oaes=OAES_NAMESPACE_ATTRIBUTE | (OAES_ANA_CHANGE if has_ana else 0),
            acl_0based=3,
            frmw=3,  # one slot, read only
            sqes=0x66,
            cqes=0x44,
            nn=self.subsystem.max_namespaces,
            mnan=self.subsystem.max_namespaces,
            oncs=ONCS_COMPARE | ONCS_DSM | ONCS_WRITE_ZEROES | ONCS_VERIFY | ONCS_COPY | ONCS_RESERVATIONS,
            # One block: AWUN, AWUPF and ACWU are 0.
            fuses=FUSES_COMPARE_AND_WRITE if can_fuse else 0,
            cdfs=CDFS_FORMAT_0,
            # Flush with NSID FFFFFFFFh is not supported (bits 2:1 = 10b).
            vwc=(VWC_PRESENT | 2 << 1) if is_cached else 0,
            anacap=ANACAP_STATES if has_ana else 0,
            anatt_s=10 if has_ana else 0,
            anagrpmax=self.subsystem.max_namespaces if has_ana else 0,
            nanagrpid=self.subsystem.max_namespaces if has_ana else 0,
            ioccsz_16b=(64 + transport.in_capsule_data_size) // 16,
        )

    # ---- features ----

    @property
    def _oaes(self) -> int:
        return self._identify_controller().oaes

    def _set_features(self, command: FeaturesCommand, data: bytes, arrival_ns: int) -> Answer:
        if command.save:
            return refused(Status.FEATURE_NOT_SAVEABLE)
        if self.is_discovery and command.fid not in (Fid.ASYNC_EVENT_CONFIG, Fid.KEEP_ALIVE_TIMER):
            return refused(Status.INVALID_FIELD)
        match command.fid:
            case Fid.NUMBER_OF_QUEUES:
                return self._set_queue_count(command.value)
            case Fid.KEEP_ALIVE_TIMER:
                if command.value == 0 or command.value > KATO_MS_MAX:
                    return refused(Status.KEEP_ALIVE_INVALID)
                self.kato_ms = self.effective_kato_ms(command.value)
                self.keep_alive_ns = max(self.keep_alive_ns, arrival_ns)
                return SUCCESS
            case Fid.ASYNC_EVENT_CONFIG:
                # Bits 7:0 are the SMART warnings, which never occur here; the notices are those of OAES.
                if command.value & ~(self._oaes | 0xFF):
                    return refused(Status.INVALID_FIELD)
                self.event_config = AsyncEventConfig.parse(command.value)
                self._send_events()
                return SUCCESS
            case Fid.VOLATILE_WRITE_CACHE:
                if not self._identify_controller().has_volatile_cache:
                    return refused(Status.INVALID_FIELD)
                enable = VolatileWriteCache.parse(command.value).wce
                return SUCCESS if enable else refused(Status.FEATURE_NOT_CHANGEABLE)
            case Fid.HOST_BEHAVIOR_SUPPORT:
                return self._set_host_behavior(data)
            case Fid.HOST_IDENTIFIER:
                return refused(Status.COMMAND_SEQUENCE_ERROR)  # Connect has set it
            case Fid.RESERVATION_NOTIFICATION_MASK | Fid.RESERVATION_PERSISTENCE:
                return self._set_reservation_feature(command)
            case Fid.POWER_MANAGEMENT if command.value & 0x1F:
                return refused(Status.INVALID_FIELD)  # there is only power state 0
            case (
                Fid.ARBITRATION
                | Fid.POWER_MANAGEMENT
                | Fid.TEMPERATURE_THRESHOLD
                | Fid.ERROR_RECOVERY
                | Fid.WRITE_ATOMICITY
            ):
                self.feature_values[command.fid] = command.value
                return SUCCESS
            case _:
                return refused(Status.INVALID_FIELD)

    def _set_queue_count(self, value: int) -> Answer:
        if self.io_connections:
            return refused(Status.COMMAND_SEQUENCE_ERROR)
        if value & 0xFFFF == 0xFFFF or value >> 16 == 0xFFFF:
            return refused(Status.INVALID_FIELD)
        wanted = NumberOfQueues.parse(value).qpair_count
        self.io_queue_count = min(wanted, self.transport.max_io_qpairs_per_ctrlr)
        return Answer(dw0=NumberOfQueues(self.io_queue_count, self.io_queue_count).build())

    def _set_host_behavior(self, data: bytes) -> Answer:
        try:
            self.host_behavior = HostBehaviorSupport.parse(data)
        except ProtocolError:
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        return SUCCESS

    def _get_features(self, command: FeaturesCommand, data_room: int) -> Answer:
        if command.select == 3:
            # Supported capabilities: nothing is saveable, some can be changed, some are per namespace.
            is_changeable = command.fid not in (Fid.VOLATILE_WRITE_CACHE, Fid.HOST_IDENTIFIER)
            is_per_namespace = command.fid in (Fid.RESERVATION_NOTIFICATION_MASK, Fid.RESERVATION_PERSISTENCE)
            return Answer(dw0=(4 if is_changeable else 0) | (2 if is_per_namespace else 0))
        match command.fid:
            case Fid.KEEP_ALIVE_TIMER:
                return Answer(dw0=self.kato_ms)
            case Fid.ASYNC_EVENT_CONFIG:
                return Answer(dw0=self.event_config.build())
            case _ if self.is_discovery:
                return refused(Status.INVALID_FIELD)
            case Fid.NUMBER_OF_QUEUES:
                return Answer(dw0=NumberOfQueues(self.io_queue_count, self.io_queue_count).build())
            case Fid.VOLATILE_WRITE_CACHE:
                if not self._identify_controller().has_volatile_cache:
                    return refused(Status.INVALID_FIELD)
                return Answer(dw0=1)
            case Fid.HOST_BEHAVIOR_SUPPORT:
                return self._feature_data(self.host_behavior.build(), data_room)
            case Fid.HOST_IDENTIFIER:
                if not command.value & 1:
                    return refused(Status.INVALID_FIELD)  # EXHID: over Fabrics it has 128 bits
                return self._feature_data(self.host_id.bytes, data_room)
            case Fid.RESERVATION_NOTIFICATION_MASK | Fid.RESERVATION_PERSISTENCE:
                return self._get_reservation_feature(command)
            case (
                Fid.ARBITRATION
                | Fid.POWER_MANAGEMENT
                | Fid.TEMPERATURE_THRESHOLD
                | Fid.ERROR_RECOVERY
                | Fid.WRITE_ATOMICITY
            ):
                return Answer(dw0=self.feature_values.get(command.fid, 0))
            case _:
                return refused(Status.INVALID_FIELD)

    def _set_reservation_feature(self, command: FeaturesCommand) -> Answer:
        namespaces = self.around.namespaces(self.subsystem.nqn)
        nsids = sorted(namespaces) if command.nsid == NSID_ALL else [command.nsid]
        if not set(nsids) <= set(namespaces):
            return refused(Status.INVALID_FIELD)
        for nsid in nsids:
            if command.fid == Fid.RESERVATION_NOTIFICATION_MASK:
                self.notices.masks[nsid] = command.value & MASK_BITS
                continue
            if command.nsid == NSID_ALL and not namespaces[nsid].entry.ptpl_file:
                continue
            status = self.around.set_persistent(self.subsystem.nqn, nsid, bool(command.value & 1))
            if status:
                return refused(status)
        return SUCCESS

    def _get_reservation_feature(self, command: FeaturesCommand) -> Answer:
        if command.nsid not in self.around.namespaces(self.subsystem.nqn):
            return refused(Status.INVALID_FIELD)
        if command.fid == Fid.RESERVATION_NOTIFICATION_MASK:
            return Answer(dw0=self.notices.masks.get(command.nsid, 0))
        return Answer(dw0=int(self.around.is_persistent(self.subsystem.nqn, command.nsid)))

    @staticmethod
    def _feature_data(data: bytes, data_room: int) -> Answer:
        if data_room < len(data):
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        return Answer(data=data)

    # ---- log pages ----

    def _log_page(self, command: GetLogPageCommand, data_room: int) -> Answer:
        if data_room < command.byte_count:
            return refused(Status.DATA_SGL_LENGTH_INVALID)
        if command.nsid not in (0, NSID_ALL) and command.lid == Lid.SMART:
            return refused(Status.INVALID_FIELD)  # health is the controller's (LPA bit 0 is 0)
        page = self._log_bytes(command)
        if page is None:
            return refused(Status.INVALID_LOG_PAGE)
        if command.offset > len(page) or command.offset % 4:
            return refused(Status.INVALID_FIELD)
        if not command.retain_event:
            self._log_was_read(command.lid)
        return Answer(data=cut_log(page, offset=command.offset, byte_count=command.byte_count))

    def _log_bytes(self, command: GetLogPageCommand) -> bytes | None:
        if self.is_discovery:
            match command.lid:
                case Lid.SUPPORTED:
                    return build_supported_log((Lid.SUPPORTED, Lid.ERROR, Lid.DISCOVERY))
                case Lid.ERROR:
                    return self._error_log()
                case Lid.DISCOVERY:
                    return self.around.discovery_log(self)
                case _:
                    return None
        match command.lid:
            case Lid.SUPPORTED:
                lids = [Lid.SUPPORTED, Lid.ERROR, Lid.SMART, Lid.FIRMWARE_SLOT, Lid.CHANGED_NS, Lid.EFFECTS]
                lids.append(Lid.RESERVATION)
                return build_supported_log(lids + ([Lid.ANA] if self.subsystem.ana_reporting else []))
            case Lid.ERROR:
                return self._error_log()
            case Lid.SMART:
                return self._smart_log()
            case Lid.FIRMWARE_SLOT:
                return FirmwareSlotLog(afi=1, frs1=FIRMWARE_REVISION).build()
            case Lid.CHANGED_NS:
                return ChangedNsLog(nsids=tuple(self.changed_nsids), has_overflowed=False).build()
            case Lid.EFFECTS:
                return self._effects_log()
            case Lid.RESERVATION:
                return self.notices.take().build()
            case Lid.ANA if self.subsystem.ana_reporting:
                return self._ana_log(is_without_nsids=bool(command.lsp & 1))
            case _:
                return None

    def _error_log(self) -> bytes:
        page = b"".join(entry.build() for entry in self.errors)
        return page.ljust(ERROR_LOG_LIMIT * ErrorEntry.SIZE, b"\0")

    def _smart_log(self) -> bytes:
        totals = self.around.io_totals(self.subsystem.nqn)
        unit = SmartLog.DATA_UNIT_BYTES
        return SmartLog(
            composite_temperature_kelvin=300,
            available_spare_percent=100,
            available_spare_threshold_percent=10,
            data_units_read=-(-totals.read_bytes // unit),
            data_units_written=-(-totals.write_bytes // unit),
            host_read_commands=totals.read_count,
            host_write_commands=totals.write_count,
            error_log_entries=self.error_count,
        ).build()

    @staticmethod
    def _effects_log() -> bytes:
        admin = (
            AdminOpcode.GET_LOG_PAGE,
            AdminOpcode.IDENTIFY,
            AdminOpcode.ABORT,
            AdminOpcode.SET_FEATURES,
            AdminOpcode.GET_FEATURES,
            AdminOpcode.ASYNC_EVENT_REQUEST,
            AdminOpcode.KEEP_ALIVE,
        )
        io = {
            int(NvmOpcode.FLUSH): EFFECT_SUPPORTED,
            int(NvmOpcode.WRITE): _WRITE_EFFECTS,
            int(NvmOpcode.READ): EFFECT_SUPPORTED,
            int(NvmOpcode.COMPARE): EFFECT_SUPPORTED,
            int(NvmOpcode.WRITE_ZEROES): _WRITE_EFFECTS,
            int(NvmOpcode.DSM): _WRITE_EFFECTS,
            int(NvmOpcode.VERIFY): EFFECT_SUPPORTED,
            int(NvmOpcode.COPY): _WRITE_EFFECTS,
            int(NvmOpcode.RESERVATION_REGISTER): EFFECT_SUPPORTED,
            int(NvmOpcode.RESERVATION_REPORT): EFFECT_SUPPORTED,
            int(NvmOpcode.RESERVATION_ACQUIRE): EFFECT_SUPPORTED,
            int(NvmOpcode.RESERVATION_RELEASE): EFFECT_SUPPORTED,
        }
        return EffectsLog(admin={int(opcode): EFFECT_SUPPORTED for opcode in admin}, io=io).build()

    def _ana_log(self, *, is_without_nsids: bool) -> bytes:
        groups: dict[int, list[int]] = {}
        for nsid, facts in self.around.namespaces(self.subsystem.nqn).items():
            groups.setdefault(facts.entry.anagrpid, []).append(nsid)
        return AnaLog(
            change_count=self.ana_change_count,
            groups=tuple(
                AnaGroup(
                    anagrpid=group,
                    state=self.subsystem.ana_state(self.listen, group),
                    change_count=self.ana_change_count,
                    nsids=() if is_without_nsids else tuple(sorted(nsids)),
                )
                for group, nsids in sorted(groups.items())
            ),
        ).build()

    # ---- events ----

    def _async_event_request(self, cid: int, handle: int) -> Answer:
        if len(self.aers) >= AER_LIMIT:
            return refused(Status.AER_LIMIT_EXCEEDED)
        self.aers[cid] = handle
        self._send_events()
        return HELD

    def _abort(self, command: AbortCommand) -> Answer:
        handle = self.aers.pop(command.command_cid, None) if command.sqid == 0 else None
        if handle is None:
            return Answer(dw0=1)  # other commands run to their end at once: too late to abort
        self.around.complete_held(self, handle, Answer(status=Status.ABORT_REQUESTED))
        return SUCCESS

    def notify_namespace_changed(self, nsid: int) -> None:
        """A namespace came, went or was replaced."""
        self.changed_nsids.add(nsid)
        self.ana_change_count += 1
        self._raise_event(Notice.NAMESPACE_ATTRIBUTE, Lid.CHANGED_NS)

    def notify_ana_changed(self) -> None:
        """The state of an ANA group has changed for this controller."""
        self.ana_change_count += 1
        self._raise_event(Notice.ANA_CHANGE, Lid.ANA)

    def ana_status(self, entry: NamespaceEntry) -> int:
        """What I/O to a namespace completes with for its ANA state; 0 where it is accessible."""
        if not self.subsystem.ana_reporting:
            return 0
        return _ANA_STATUS.get(self.subsystem.ana_state(self.listen, entry.anagrpid), 0)

    def notify_reservation(self, nsid: int, notice: ReservationNotice) -> None:
        """Something has happened to a registration or reservation of this host's."""
        if self.notices.add(nsid, notice):
            self.pending_events[Lid.RESERVATION] = AsyncEvent(
                AsyncEventType.IO_COMMAND_SET, RESERVATION_LOG_AVAILABLE, Lid.RESERVATION
            )
            self._send_events()

    def notify_discovery_changed(self) -> None:
        """What the discovery log says to this host may have changed."""
        self._raise_event(Notice.DISCOVERY_LOG_CHANGE, Lid.DISCOVERY)

    def _raise_event(self, notice: Notice, lid: Lid) -> None:
        self.pending_events[lid] = AsyncEvent(AsyncEventType.NOTICE, notice, lid)
        self._send_events()

    def _is_enabled(self, event: AsyncEvent) -> bool:
        if event.event_type == AsyncEventType.IO_COMMAND_SET:
            return True  # masked notices make no log page in the first place
        if event.info == Notice.DISCOVERY_LOG_CHANGE:
            return bool(self.event_config.discovery_change)
        if event.info == Notice.ANA_CHANGE:
            return bool(self.event_config.ana_change)
        return bool(self.event_config.namespace_attribute)

    def _send_events(self) -> None:
        for lid in list(self.pending_events):
            event = self.pending_events[lid]
            if not self.aers or lid in self.masked_lids or not self._is_enabled(event):
                continue
            del self.pending_events[lid]
            self.masked_lids.add(lid)
            cid = next(iter(self.aers))
            self.around.complete_held(self, self.aers.pop(cid), Answer(dw0=event.build()))

    def _log_was_read(self, lid: int) -> None:
        if lid == Lid.CHANGED_NS:
            self.changed_nsids.clear()
        if lid in self.masked_lids:
            self.masked_lids.discard(lid)
            self._send_events()
        else:
            self.pending_events.pop(lid, None)
