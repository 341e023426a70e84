"""One NVMe/TCP controller: from the first connection to the orderly shutdown.

Not here: namespaces as block devices (``namespace``); discovery (``discovery``); bytes (``kvdev.wire``);
sockets (the C core).
Spec: NVM Express Base 3.1, 3.5, 3.6, 3.9, 6.3; TCP transport 3.1, 3.3.
Trust: everything the controller reports is checked before use; a lie ends in ProtocolError and a closed
connection.
Threads: connect, attach and close from one thread at a time; admin commands from any.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from kvdev.clock import NS_PER_MS, Deadline
from kvdev.errors import (
    CommandError,
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    KvdevError,
    ProtocolError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from kvdev.initiator import limits
from kvdev.initiator.authenticate import HostAuthenticator
from kvdev.initiator.cancel import CancelToken
from kvdev.initiator.channel import LOG_CHUNK_SIZE_BYTES, AdminChannel, sooner
from kvdev.initiator.failure import connect_refused, is_controller_gone, with_remedy
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.resolve import resolve
from kvdev.initiator.secure import IDENTITY_VERSIONS, SecureTransport, TlsHandshakeError
from kvdev.native.admin import AdminThread
from kvdev.native.queue import Completion, HostQpair, HostQueue
from kvdev.uri import DISCOVERY_NQN, TcpAddress, TcpUri
from kvdev.wire.fabrics import (
    CATTR_DISABLE_SQ_FLOW_CONTROL,
    CSTS_GONE,
    Cap,
    Cc,
    CcCss,
    ConnectCommand,
    ConnectData,
    ConnectResult,
    Crto,
    Csts,
    Property,
    Shn,
    Shst,
    Version,
)
from kvdev.wire.features import AsyncEventConfig, Fid, HostBehaviorSupport, NumberOfQueues
from kvdev.wire.identify import (
    CMIC_ANA,
    CTRATT_TBKAS,
    LPA_EXTENDED,
    Cns,
    Csi,
    CsiControllerNvm,
    IdentifyController,
)
from kvdev.wire.log import ErrorEntry, Lid, ReservationLog, ReservationNotice, SmartLog, parse_error_log
from kvdev.wire.nvme import CNTLID_DYNAMIC, NSID_ALL, AsyncEvent, FeaturesCommand, Sqe, status_name

log = logging.getLogger("kvdev.initiator")

ADMIN_QUEUE_SIZE = 32
"""Submission queue entries of the admin queue pair: the least a controller must offer."""
IN_CAPSULE_SIZE_BYTES_MAX = 64 << 10
"""More in a capsule than this gains nothing over asking for it."""
EVENT_REQUEST_COUNT = 4
"""Asynchronous Event Requests kept outstanding: one for each kind of event that is enabled, and one more."""
RESERVATION_NOTICE_COUNT_MAX = 256
"""Notices taken at once: a controller with more gets its next event answered with the rest."""
EVENT_LOG_SIZES_BYTES: dict[int, int] = {
    Lid.ERROR: ErrorEntry.SIZE,
    Lid.SMART: SmartLog.SIZE,
    Lid.CHANGED_NS: 4096,
    # The header: CHGCNT and NGRPS; reading any of the page clears the event.
    Lid.ANA: 16,
    # Likewise: GENCTR and NUMREC; the reader asks for the rest.
    Lid.DISCOVERY: 1024,
}
_READY_PAUSE_FIRST_S = 0.001
_READY_PAUSE_LAST_S = 0.1
_CAP_GONE = 0xFFFF_FFFF_FFFF_FFFF


def no_path_error(uri: TcpUri, failures: Sequence[TransportError]) -> TransportError:
    """What to raise when every address of ``uri`` failed: the only failure itself, or one that names all."""
    if len(failures) == 1:
        return failures[0]
    return ConnectError(
        f"{uri.subnqn}: no path: " + "; ".join(str(failure) for failure in failures),
        errno=failures[0].errno or 0,
        trid=str(uri.address),
    )


class Controller:
    """An association with one controller: connected and enabled from ``connect`` until ``close``.

    The admin thread keeps it alive meanwhile. I/O queue pairs come with ``attach``.
    """

    def __init__(
        self,
        *,
        uri: TcpUri,
        address: TcpAddress,
        host: HostIdentity,
        options: ControllerOptions,
        channel: AdminChannel,
        numeric_address: str,
    ) -> None:
        """Used by ``connect``."""
        self.uri = uri
        self.address = address
        self.host = host
        self.options = options
        self.channel = channel
        self.cntlid = CNTLID_DYNAMIC
        self.cap = Cap()
        self.version = Version()
        self.identify = IdentifyController()
        self.kato_ms = options.kato_ms
        self.io_queue_count = 0
        """I/O queue pairs that the controller granted."""
        self._numeric_address = numeric_address
        self._nvm_limits: CsiControllerNvm | None = None
        self._queue: HostQueue | None = None
        self._qpairs: dict[int, HostQpair] = {}
        self._authenticator = HostAuthenticator(
            host_nqn=host.host_nqn, subnqn=uri.subnqn, options=options, address=address
        )
        self._secure: SecureTransport | None = None
        self._is_closed = False
        self._token: CancelToken | None = None
        # Never set: a pause between two looks at CSTS, with a bound.
        self._pause = threading.Event()

    @classmethod
    def connect(
        cls,
        uri: TcpUri,
        *,
        host: HostIdentity,
        admin: AdminThread,
        options: ControllerOptions | None = None,
        token: CancelToken | None = None,
        deadline: Deadline,
    ) -> Controller:
        """Connect to the first of the URI's addresses that answers, and enable the controller.

        The URI's digest policies win over the options'; its nsid is not looked at. Blocks no longer than
        the deadline. Nothing stays open when it raises: ConnectError, DeadlineError, CommandError (the
        target refused), ProtocolError (it broke a rule) or UnsupportedError, each with a remedy.
        """
        options = _merge(uri, options or ControllerOptions())
        failures: list[TransportError] = []
        for address in uri.addresses:
            try:
                return cls._connect_address(
                    uri, address, host=host, admin=admin, options=options, token=token, deadline=deadline
                )
            except TransportError as error:
                # Another path may do; a refusal by the target (CommandError) holds for all of them.
                failures.append(error)
        raise no_path_error(uri, failures)

    @classmethod
    def _connect_address(
        cls,
        uri: TcpUri,
        address: TcpAddress,
        *,
        host: HostIdentity,
        admin: AdminThread,
        options: ControllerOptions,
        token: CancelToken | None,
        deadline: Deadline,
    ) -> Controller:
        failure: TransportError | None = None
        versions = (None,) if options.tls_psk is None else IDENTITY_VERSIONS
        found = resolve(address, deadline=sooner(deadline, options.connect_timeout_s))
        for numeric, version in itertools.product(found, versions):
            if version != versions[0] and not _is_tls(failure):
                continue
            qpair = HostQpair(
                qid=0,
                queue_size=ADMIN_QUEUE_SIZE,
                header_digest=options.header_digest.value,
                data_digest=options.data_digest.value,
                trid=str(address),
            )
            channel = AdminChannel(qpair, timeout_s=options.admin_timeout_s)
            controller = cls(
                uri=uri,
                address=address,
                host=host,
                options=options,
                channel=channel,
                numeric_address=numeric,
            )
            controller._token = token
            try:
                if token is not None:
                    token.watch(channel)
                controller._secure_with(admin, version)
                controller._establish(admin, deadline)
                return controller
            except TransportError as error:
                controller.abandon()
                if failure is None or (_is_tls(failure) and not _is_tls(error)):
                    failure = error
            except BaseException:
                controller.abandon()
                raise
        assert failure is not None, "a name resolves to one address at least"
        raise failure

    def _secure_with(self, admin: AdminThread, version: int | None) -> None:
        """Read the key of TLS, for all connections of this association; None: plain TCP."""
        source = self.options.tls_psk
        if source is None or version is None:
            return
        self._secure = SecureTransport(
            source,
            version=version,
            host_nqn=self.host.host_nqn,
            subnqn=self.uri.subnqn,
            address=self.address,
            admin=admin,
        )

    def _establish(self, admin: AdminThread, deadline: Deadline) -> None:
        """Connection, Connect, enable, Identify, keep alive, queue count: an association ready for use."""
        channel = self.channel
        self._connect_qpair(channel.qpair, sqsize_0based=ADMIN_QUEUE_SIZE - 1, deadline=deadline)
        self._enable(deadline)
        # The keep alive timer runs from CSTS.RDY on (Base 3.9.2), so from here the admin thread drives.
        channel.adopt(admin, keep_alive_ms=self.kato_ms)
        self.identify = channel.parse(
            IdentifyController.parse, channel.identify(Cns.CONTROLLER, deadline=deadline)
        )
        self._check_identify()
        self._settle_keep_alive(deadline)
        if not self.is_discovery:
            self.io_queue_count = self._grant_queues(deadline)
            self._enable_retry_delays(deadline)
            self.arm_events(deadline=deadline)

    def _connect_qpair(self, qpair: HostQpair, *, sqsize_0based: int, deadline: Deadline) -> None:
        """TCP, ICReq/ICResp and the Connect command of one queue pair; sets CNTLID on the admin queue."""
        limit = sooner(deadline, self.options.connect_timeout_s)
        if self._secure is not None:
            self._secure.protect(qpair)
        try:
            qpair.connect(self._numeric_address, self.address.port, deadline=limit)
        except KvdevError as error:
            found = error if self._secure is None else self._secure.explain(error, qpair)
            raise with_remedy(found, address=self.address) from error
        is_admin = qpair.qid == 0
        flow_off = self.options.disable_sq_flow_control and not is_admin
        command = ConnectCommand(
            qid=qpair.qid,
            sqsize_0based=sqsize_0based,
            kato_ms=self.options.kato_ms if is_admin else 0,
            cattr=CATTR_DISABLE_SQ_FLOW_CONTROL if flow_off else 0,
        )
        data = ConnectData(
            hostid=self.host.host_id_bytes,
            cntlid=self.cntlid,
            subnqn=self.uri.subnqn,
            hostnqn=self.host.host_nqn,
        )
        completion = qpair.execute(command.to_sqe().build(), data=data.build(), is_write=True, deadline=limit)
        if not completion.is_success:
            if not is_admin and is_controller_gone(completion):
                # Whatever DNR says: the association ended between its admin queue and this one, and a new one may do.
                raise ConnectionLostError(
                    f"{qpair.where}: connect: controller 0x{self.cntlid:04x} is gone: its association has ended "
                    f"meanwhile; connect again",
                    errno=errno.ENOTCONN,
                    trid=self.where,
                )
            raise connect_refused(
                completion,
                where=qpair.where,
                subnqn=self.uri.subnqn,
                host_nqn=self.host.host_nqn,
                address=self.address,
            )
        result = ConnectResult.parse(completion.dw0)
        if is_admin:
            self.cntlid = result.cntlid
        elif result.cntlid != self.cntlid:
            raise ProtocolError(
                f"{qpair.where}: connect CNTLID: expected 0x{self.cntlid:04x} as on the admin queue, "
                f"got 0x{result.cntlid:04x}"
            )
        self._authenticator.admit(
            qpair.execute,
            result,
            where=qpair.where,
            deadline=sooner(deadline, self.options.admin_timeout_s),
        )

    def reauthenticate(self, *, deadline: Deadline) -> None:
        """Authenticate again on the admin queue, both sides where there is a controller secret.

        Secrets are read anew. Raises AuthenticationError, after which the association has ended; UsageError
        where this host has no secret.
        """
        channel = self.channel

        def execute(sqe: bytes, *, data: Any, is_write: bool, deadline: Deadline) -> Completion:
            return channel.run_unchecked(
                Sqe.parse(sqe), what="authentication", data=data, is_write=is_write, deadline=deadline
            )

        self._authenticator.run(execute, where=self.where, deadline=deadline)

    def _enable(self, deadline: Deadline) -> None:
        """Base 3.5.2: configure with CC.EN 0, set it, wait for CSTS.RDY."""
        channel = self.channel
        self._read_cap(deadline)
        self.version = Version.parse(channel.property_get(Property.VS, deadline=deadline))
        cc = Cc.parse(channel.property_get(Property.CC, deadline=deadline))
        if cc.en:
            off = dataclasses.replace(cc, en=0)
            channel.property_set(Property.CC, off.build(), deadline=deadline)
            self._wait_csts("disable", lambda csts: not csts.rdy, self._ready_timeout_s(deadline), deadline)
        cc = self._configuration()
        channel.property_set(Property.CC, cc.build(), deadline=deadline)
        # What CAP says may depend on CC.CSS (Base 3.5.2).
        self._read_cap(deadline)
        timeout_s = self._ready_timeout_s(deadline)
        channel.property_set(Property.CC, dataclasses.replace(cc, en=1).build(), deadline=deadline)
        self._wait_csts("enable", lambda csts: bool(csts.rdy), timeout_s, deadline)

    def _read_cap(self, deadline: Deadline) -> None:
        value = self.channel.property_get(Property.CAP, deadline=deadline)
        if value == _CAP_GONE:
            raise ConnectError(f"{self.where}: CAP: expected a value, got all ones: the controller is gone")
        self.cap = Cap.parse(value)

    def _ready_timeout_s(self, deadline: Deadline) -> float:
        cap = self.cap
        has_crto = bool(cap.crwms or cap.crims)
        crto = Crto.parse(self.channel.property_get(Property.CRTO, deadline=deadline)) if has_crto else Crto()
        return limits.ready_timeout_s(cap_to=cap.to_500ms, crms=has_crto, crwmt=crto.crwmt_500ms)

    def _configuration(self) -> Cc:
        """CC for this controller, EN clear: command sets, entry sizes, page size."""
        cap = self.cap
        if cap.mpsmax < cap.mpsmin:
            raise ProtocolError(
                f"{self.where}: CAP: expected MPSMAX of at least MPSMIN {cap.mpsmin}, got {cap.mpsmax}"
            )
        if cap.has_io_command_sets:
            css = CcCss.ALL_SUPPORTED
        elif cap.has_nvm_command_set or self.is_discovery:
            css = CcCss.NVM
        else:
            raise UnsupportedError(
                f"{self.where}: CAP.CSS: expected the NVM command set, got 0x{cap.css:02x}",
                feature="command set",
            )
        return Cc(css=css, mps=cap.mpsmin, iosqes=6, iocqes=4)

    def _wait_csts(
        self, operation: str, is_done: Callable[[Csts], bool], timeout_s: float, deadline: Deadline
    ) -> None:
        """Read CSTS until ``is_done``; ends with CSTS.CFS, a controller that is gone, or the time limit."""
        limit = sooner(deadline, timeout_s)
        pause_s = _READY_PAUSE_FIRST_S
        while True:
            value = self.channel.property_get(Property.CSTS, deadline=deadline)
            csts = Csts.parse(value)
            if value == CSTS_GONE:
                raise ConnectError(f"{self.where}: {operation}: CSTS is all ones: the controller is gone")
            if csts.cfs:
                raise ConnectError(
                    f"{self.where}: {operation}: CSTS.CFS: expected 0, got 1: the controller has failed; "
                    f"see the target's log"
                )
            if is_done(csts):
                return
            if limit.is_expired:
                raise DeadlineError(
                    f"{self.where}: {operation}: expected CSTS to show it within {timeout_s:g} s, "
                    f"got 0x{value:08x}",
                    operation=operation,
                    elapsed_ms=limit.elapsed_ms(),
                    trid=str(self.address),
                )
            self._pause.wait(min(pause_s, limit.remaining_s()))
            pause_s = min(pause_s * 2, _READY_PAUSE_LAST_S)

    def _check_identify(self) -> None:
        """What a controller must report before it is used (Base 6.3, TCP 3.3.1)."""
        ident = self.identify
        if ident.cntlid != self.cntlid:
            raise ProtocolError(
                f"{self.where}: identify controller CNTLID: expected 0x{self.cntlid:04x} as in connect, "
                f"got 0x{ident.cntlid:04x}"
            )
        if self.is_discovery:
            return
        rules = (
            ("KAS", ident.kas_100ms > 0, "more than 0: keep alive is mandatory on TCP", ident.kas_100ms),
            ("IOCCSZ", ident.ioccsz_16b >= 4, "at least 4", ident.ioccsz_16b),
            ("IORCSZ", ident.iorcsz_16b >= 1, "at least 1", ident.iorcsz_16b),
            ("ICDOFF", ident.icdoff_16b == 0, "0", ident.icdoff_16b),
        )
        for field, is_good, expected, actual in rules:
            if not is_good:
                raise ProtocolError(
                    f"{self.where}: identify controller {field}: expected {expected}, got {actual}"
                )

    def _settle_keep_alive(self, deadline: Deadline) -> None:
        """Use the keep alive timeout in effect, which the controller may have raised (Base 5.1.14)."""
        adopted = self.channel.adopted
        assert adopted is not None, "establish adopts before it settles"
        if self.is_discovery and self.identify.kas_100ms == 0:
            self.kato_ms = 0
        else:
            completion = self.channel.feature_get(Fid.KEEP_ALIVE_TIMER, deadline=deadline)
            if completion.is_success:
                # Some controllers do not implement reading it back: then what Connect asked for stands.
                self.kato_ms = completion.dw0
            if self.kato_ms == 0:
                raise ProtocolError(
                    f"{self.where}: feature 0x0f KATO: expected about {self.options.kato_ms} ms, got 0: "
                    f"keep alive is mandatory on TCP"
                )
        if self.kato_ms != self.options.kato_ms:
            adopted.set_keep_alive_ms(self.kato_ms)
        adopted.set_traffic_based(is_traffic_based=self.is_traffic_based)

    def _grant_queues(self, deadline: Deadline) -> int:
        """Ask for I/O queues (Base 5.1.25.1.5); an error status means none, and admin stays usable."""
        wanted = self.options.io_queue_count
        completion = self.channel.feature_set(
            Fid.NUMBER_OF_QUEUES, NumberOfQueues(wanted, wanted).build(), deadline=deadline
        )
        if not completion.is_success:
            log.warning("%s: number of queues: got %s", self.where, status_name(completion.status))
            return 0
        return min(NumberOfQueues.parse(completion.dw0).qpair_count, wanted)

    def _enable_retry_delays(self, deadline: Deadline) -> None:
        """Have the controller say how long to wait before a retry, where it knows (ACRE, Base 5.1.25.1.14)."""
        if not any(self.retry_delays_ns):
            return
        data = HostBehaviorSupport(acre=1).build()
        command = FeaturesCommand(
            fid=Fid.HOST_BEHAVIOR_SUPPORT, is_set=True, value=0, byte_count=len(data)
        ).to_sqe()
        what = "set features 0x16"
        completion = self.channel.run_unchecked(
            command, what=what, data=data, is_write=True, deadline=deadline
        )
        if not completion.is_success:
            log.warning("%s: retry delays: got %s", self.where, status_name(completion.status))

    def arm_events(self, *, deadline: Deadline) -> None:
        """Enable the events this host acts on, as far as OAES has them, and keep requests outstanding.

        Done by ``connect``, but for discovery controllers, which are mostly read once.
        """
        offered = AsyncEventConfig.parse(self.identify.oaes)
        if self.is_discovery:
            if not offered.discovery_change:
                return
            wanted = AsyncEventConfig(discovery_change=1)
        else:
            wanted = AsyncEventConfig(
                # Critical warnings of SMART (bits 5:0) need no OAES bit (Base 5.1.25.1.6).
                smart=0x3F,
                namespace_attribute=offered.namespace_attribute,
                ana_change=offered.ana_change,
            )
        completion = self.channel.feature_set(Fid.ASYNC_EVENT_CONFIG, wanted.build(), deadline=deadline)
        if not completion.is_success:
            # An event that stays off costs freshness, not correctness: identities are checked on use.
            log.warning("%s: asynchronous events: got %s", self.where, status_name(completion.status))
        adopted = self.channel.adopted
        assert adopted is not None, "establish adopts before it arms"
        adopted.arm_events(min(self.identify.aerl_0based + 1, EVENT_REQUEST_COUNT))

    def take_event(self, *, deadline: Deadline) -> AsyncEvent | None:
        """The next asynchronous event; None when none came by the deadline.

        Its log page has been read, so that the controller may report the next of its kind (Base 5.1.2).
        Raises what the association was lost to when no event will come any more.
        """
        adopted = self.channel.adopted
        if self._is_closed or adopted is None:
            raise UsageError(f"{self.where}: take_event: expected an open controller, got a closed one")
        dw0 = adopted.take_event(deadline=deadline)
        if dw0 is None:
            return None
        event = AsyncEvent.parse(dw0)
        if event.lid == Lid.RESERVATION:
            return event  # reading its page takes a notice away: whoever handles the event reads them all
        size_bytes = EVENT_LOG_SIZES_BYTES.get(event.lid)
        if size_bytes is None:
            log.warning("%s: event %s names log page 0x%02x: not read", self.where, event, event.lid)
            return event
        # NSID is 0 in a discovery controller's log page, all ones in any other (Base 5.1.12).
        nsid = 0 if event.lid == Lid.DISCOVERY else NSID_ALL
        limit = Deadline.after(self.options.admin_timeout_s)
        self.log_page(event.lid, size_bytes, nsid=nsid, deadline=limit)
        return event

    @property
    def where(self) -> str:
        """The peer, for messages."""
        return f"{self.address} {self.uri.subnqn}"

    @property
    def is_discovery(self) -> bool:
        return self.uri.subnqn == DISCOVERY_NQN

    @property
    def is_alive(self) -> bool:
        """Whether the association stands, as far as the admin thread knows."""
        return not self._is_closed and self.channel.is_alive

    @property
    def is_traffic_based(self) -> bool:
        """Whether any command is a sign of life to the controller (TBKAS, Base 3.9.4)."""
        return bool(self.identify.ctratt & CTRATT_TBKAS)

    @property
    def has_ana(self) -> bool:
        return bool(self.identify.cmic & CMIC_ANA)

    @property
    def retry_delays_ns(self) -> tuple[int, int, int]:
        """CRDT1 to CRDT3."""
        ident = self.identify
        unit_ns = 100 * NS_PER_MS
        return (ident.crdt1_100ms * unit_ns, ident.crdt2_100ms * unit_ns, ident.crdt3_100ms * unit_ns)

    @property
    def queue_size(self) -> int:
        """Submission queue entries of each I/O queue pair."""
        return limits.queue_size(
            queue_depth=self.options.queue_depth, mqes=self.cap.mqes_0based, maxcmd=self.identify.maxcmd
        )

    @property
    def in_capsule_size_bytes(self) -> int:
        """Data that an I/O command may carry in its capsule (TCP 3.3.1)."""
        return min(self.identify.in_capsule_bytes_max, IN_CAPSULE_SIZE_BYTES_MAX)

    @property
    def qpair_indexes(self) -> tuple[int, ...]:
        """The I/O queue pairs in the queue they are attached to."""
        return tuple(self._qpairs)

    def attach(self, queue: HostQueue, *, deadline: Deadline) -> tuple[int, ...]:
        """Connect all I/O queue pairs and let ``queue`` drive them; returns their indexes there.

        Attaching the same queue again does nothing. When one queue pair fails none stays.
        """
        if self._is_closed:
            raise UsageError(f"{self.where}: attach: expected an open controller, got a closed one")
        if self._queue is not None:
            if self._queue is not queue:
                raise UsageError(
                    f"{self.where}: attach: expected the queue it is attached to, got another one"
                )
            return self.qpair_indexes
        if self.io_queue_count == 0:
            raise UnsupportedError(
                f"{self.where}: number of queues: expected 1 or more, got none from the controller",
                feature="I/O queues",
            )
        qpairs = self.connect_io_qpairs(deadline=deadline)
        self._queue = queue
        try:
            for qpair in qpairs:
                self._qpairs[queue.add_qpair(qpair)] = qpair
        except BaseException:
            self._close_io_qpairs()
            raise
        finally:
            for qpair in qpairs:
                if qpair.owner is None:
                    qpair.close()
        return self.qpair_indexes

    def connect_io_qpairs(self, *, deadline: Deadline) -> list[HostQpair]:
        """All I/O queue pairs, connected, in nobody's hands; when one fails none stays open."""
        qpairs: list[HostQpair] = []
        try:
            for qid in range(1, self.io_queue_count + 1):
                qpairs.append(self._connect_io_qpair(qid, deadline))
        except BaseException:
            for qpair in qpairs:
                qpair.close()
            raise
        return qpairs

    def attach_as(
        self, queue: HostQueue, controller_index: int, qpairs: Sequence[HostQpair], *, made_ns: int
    ) -> None:
        """Let ``queue`` drive connected queue pairs as a controller that namespaces may share (multipath)."""
        indexes = queue.raise_controller(
            controller_index,
            qpairs,
            made_ns=made_ns,
            has_ana=self.has_ana,
            retry_delays_ns=self.retry_delays_ns,
        )
        self._queue = queue
        self._qpairs = dict(zip(indexes, qpairs, strict=True))

    def _connect_io_qpair(self, qid: int, deadline: Deadline) -> HostQpair:
        qpair = HostQpair(
            qid=qid,
            queue_size=self.queue_size,
            header_digest=self.options.header_digest.value,
            data_digest=self.options.data_digest.value,
            in_capsule_size_bytes=self.in_capsule_size_bytes,
            trid=str(self.address),
        )
        try:
            if self._token is not None:
                self._token.watch(qpair)
            qpair.join(self.channel.qpair)
            self._connect_qpair(qpair, sqsize_0based=self.queue_size - 1, deadline=deadline)
        except BaseException:
            qpair.close()
            raise
        return qpair

    def log_page(
        self,
        lid: int,
        size_bytes: int,
        *,
        nsid: int = NSID_ALL,
        retain_event: bool = False,
        deadline: Deadline,
    ) -> bytes:
        """Bytes of a log page from its start; ``retain_event`` keeps the event it reports pending."""
        return self.channel.log_page(
            lid,
            size_bytes,
            nsid=nsid,
            retain_event=retain_event,
            has_offset=bool(self.identify.lpa & LPA_EXTENDED) or self.is_discovery,
            deadline=deadline,
        )

    def smart_log(self, *, deadline: Deadline) -> SmartLog:
        """SMART / health information of the controller (page 02h)."""
        data = self.log_page(Lid.SMART, SmartLog.SIZE, retain_event=True, deadline=deadline)
        return self.channel.parse(SmartLog.parse, data)

    def reservation_notices(self, *, deadline: Deadline) -> list[ReservationLog]:
        """The reservation notices that wait (page 80h), oldest first; they are gone from the controller then."""
        found: list[ReservationLog] = []
        while len(found) < RESERVATION_NOTICE_COUNT_MAX:
            data = self.log_page(Lid.RESERVATION, ReservationLog.SIZE, deadline=deadline)
            page = self.channel.parse(ReservationLog.parse, data)
            if page.notice_type == ReservationNotice.EMPTY:
                break
            found.append(page)
        return found

    def error_log(self, *, deadline: Deadline) -> list[ErrorEntry]:
        """Entries of the error log (page 01h), newest first."""
        count = self.identify.elpe_0based + 1
        if not self.identify.lpa & LPA_EXTENDED:
            count = min(count, LOG_CHUNK_SIZE_BYTES // ErrorEntry.SIZE)
        data = self.log_page(Lid.ERROR, count * ErrorEntry.SIZE, retain_event=True, deadline=deadline)
        return self.channel.parse(parse_error_log, data)

    def nvm_limits(self, *, deadline: Deadline) -> CsiControllerNvm:
        """Limits of write zeroes and deallocate (CNS 06h), read once; all 0 where it has no such page."""
        if self._nvm_limits is None:
            try:
                data = self.channel.identify(Cns.CSI_CONTROLLER, csi=Csi.NVM, deadline=deadline)
                self._nvm_limits = self.channel.parse(CsiControllerNvm.parse, data)
            except CommandError:
                self._nvm_limits = CsiControllerNvm()
        return self._nvm_limits

    def close(self, deadline: Deadline | None = None) -> None:
        """Shut the controller down in order and close its connections; closing twice does nothing.

        Bounded by the deadline and the option ``shutdown_timeout_s``, also when the peer is dead. Commands
        outstanding complete with an error; no memory of theirs is touched after this returns.
        """
        if self._is_closed:
            return
        self._is_closed = True
        timeout_s = self.options.shutdown_timeout_s
        limit = Deadline.after(timeout_s) if deadline is None else sooner(deadline, timeout_s)
        try:
            if self.channel.is_alive:
                self._shut_down(limit)
        except KvdevError as error:
            # The connection is closed in any case, which ends the association as well.
            log.warning("%s: shutdown: %s", self.where, error)
        finally:
            try:
                self._close_io_qpairs()
            finally:
                self.channel.close()
                if self._secure is not None:
                    self._secure.close()

    def abandon(self) -> None:
        """Close all connections at once, without a word to the controller; closing twice does nothing."""
        self._is_closed = True
        try:
            self._close_io_qpairs()
        finally:
            self.channel.close()
            if self._secure is not None:
                self._secure.close()

    def reset(self, deadline: Deadline) -> None:
        """Stop the controller over its admin queue (Base 3.7.2): on return it executes nothing any more."""
        cc = Cc.parse(self.channel.property_get(Property.CC, deadline=deadline))
        off = dataclasses.replace(cc, en=0)
        self.channel.property_set(Property.CC, off.build(), deadline=deadline)
        self._wait_csts("reset", lambda csts: not csts.rdy, self._ready_timeout_s(deadline), deadline)

    def _close_io_qpairs(self) -> None:
        """Take the queue pairs back from the queue, unless it was closed first, and close them."""
        queue, qpairs = self._queue, self._qpairs
        self._queue, self._qpairs = None, {}
        for index, qpair in qpairs.items():
            if queue is not None and qpair.owner is queue:
                queue.remove_qpair(index)
            qpair.close()

    def _shut_down(self, limit: Deadline) -> None:
        """Base 3.6.2: CC.SHN, then CSTS.SHST says when it is complete; no keep alive meanwhile (3.9.2)."""
        adopted = self.channel.adopted
        if adopted is not None:
            adopted.set_keep_alive_ms(0)
        cc = Cc.parse(self.channel.property_get(Property.CC, deadline=limit))
        cc = dataclasses.replace(cc, shn=Shn.NORMAL)
        self.channel.property_set(Property.CC, cc.build(), deadline=limit)
        timeout_s = limits.shutdown_timeout_s(rtd3e_us=self.identify.rtd3e_us, limit_s=limit.remaining_s())
        self._wait_csts("shutdown", lambda csts: csts.shst == Shst.COMPLETE, timeout_s, limit)

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_tls(error: TransportError | None) -> bool:
    return isinstance(error, TlsHandshakeError)


def _merge(uri: TcpUri, options: ControllerOptions) -> ControllerOptions:
    """The options with the URI's digest policies and secrets, which win."""
    return dataclasses.replace(
        options,
        header_digest=uri.header_digest or options.header_digest,
        data_digest=uri.data_digest or options.data_digest,
        dhchap_key=uri.dhchap_key or options.dhchap_key,
        dhchap_ctrl_key=uri.dhchap_ctrl_key or options.dhchap_ctrl_key,
        tls_psk=uri.tls_psk or options.tls_psk,
    )
