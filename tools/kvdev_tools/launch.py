"""From a command's settings to a finished replay: plan, provision when the target is ours, run the clients, collect.

Not here: options (``kvdev_tools.cmd_replay``); one client (``kvdev_tools.client``).
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvdev.errors import ConnectError, KvdevError, UsageError
from kvdev.geometry import Geometry
from kvdev.units import format_size
from kvdev.uri import KvNamespaceUri, TcpUri, VolumeUri, parse_kv_namespace_uri
from kvdev_tools.client import ClientConfig, run_client
from kvdev_tools.connect import make_session, operation_deadline, session_keys
from kvdev_tools.plan import (
    TARGET_BASE_BYTES,
    ClientPlan,
    Demand,
    TraceNeeds,
    available_memory,
    check_fit,
    client_demands,
    count_needs,
    disk_free_bytes,
    plan_client,
)
from kvdev_tools.pool import PoolSize, check_pool, create_pool, pool_geometry, size_pool
from kvdev_tools.progress import read_progress
from kvdev_tools.report import MemberBytes, Run, Totals
from kvdev_tools.rig import Rig, TargetEndedInterrupt, running_rig
from kvdev_tools.scratch import scratch_folder
from kvdev_tools.supervisor import run_clients
from kvdev_tools.tensors import block_tokens, check_layout, default_layout
from kvdev_tools.trace import Request, generate_conversations, read_trace

REQUEST_COUNT_DEFAULT = 300
"""Of the generated trace: about 2,070 distinct pages, 2 GiB at a page of 1 MiB."""
KV_NAMESPACE_NAME = "replay"
DISK_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What the user asked for; sizes are bytes."""

    uri: str | None
    trace: Path | None
    request_limit: int | None
    geometry: Geometry
    geometry_name: str
    layout: str | None
    block_tokens: int | None
    capacity_bytes: int | None
    seed: int
    member_count: int
    strip_size_bytes: int
    files: Path | None
    is_killed_halfway: bool
    arena_size_bytes: int | None
    io_queue_count: int
    kato_ms: int
    host_nqn: str | None
    host_id: str | None
    timeout_s: float
    salt_file: str | None = None

    def requests(self) -> Iterator[Request]:
        """The requests to replay, in order."""
        if self.trace is not None:
            return read_trace(self.trace, limit=self.request_limit)
        return islice(generate_conversations(seed=self.seed), self.request_limit or REQUEST_COUNT_DEFAULT)


def run_replay(settings: ReplaySettings) -> tuple[Totals, Run]:
    """Do all of it; whatever was started for it is gone afterwards, also after an error."""
    started_ns = time.monotonic_ns()
    geometry = settings.geometry
    layout = check_layout(default_layout(geometry) if settings.layout is None else settings.layout, geometry)
    tokens = block_tokens(layout, geometry, settings.block_tokens)
    is_embedded = settings.uri is None
    needs = count_needs(
        settings.requests(), is_distinct_counted=is_embedded and settings.capacity_bytes is None
    )
    if not needs.requests:
        raise UsageError(f"trace: expected at least one request, got none in {settings.trace}")
    client = plan_client(geometry, needs, arena_size_bytes=settings.arena_size_bytes)
    with contextlib.ExitStack() as stack:
        if is_embedded:
            size = _plan_embedded(settings, needs, client)
            rig = stack.enter_context(running_rig())
            stack.enter_context(_target_named(rig))
            folder = rig.folder
            # A host of its own: the replay leaves nothing behind on this machine.
            host_nqn: str | None = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
            host_id: str | None = None
            quota_pages = size.quota_pages
            kv_namespace = _provision(settings, size, rig, str(host_nqn))
        else:
            rig = None
            folder = stack.enter_context(scratch_folder())
            host_nqn, host_id = settings.host_nqn, settings.host_id
            kv_namespace = parse_kv_namespace_uri(str(settings.uri))
            quota_pages = _plan_existing(settings, client, kv_namespace)
        config = ClientConfig(
            kv_namespace=str(kv_namespace),
            geometry=geometry.to_dict(),
            layout=layout,
            block_tokens=tokens,
            tensor_page_count=client.tensor_page_count,
            # One batch replaces the whole of a pool that holds no more.
            batch_page_count=min(client.batch_page_count, quota_pages),
            arena_size_bytes=client.arena_size_bytes,
            request_count=needs.requests,
            seed=settings.seed,
            trace=None if settings.trace is None else str(settings.trace),
            progress_path=str(folder / "progress"),
            info_path=str(folder / "info"),
            timeout_s=settings.timeout_s,
            io_queue_count=settings.io_queue_count,
            kato_ms=settings.kato_ms,
            host_nqn=host_nqn,
            host_id=host_id,
            keys=session_keys(),
            salt_file=settings.salt_file,
        )
        kills = 0
        if settings.is_killed_halfway:
            kills = run_clients(config, kill_after=needs.requests // 2, folder=folder)
        else:
            run_client(config)
        totals = Totals.of(read_progress(Path(config.progress_path)))
        info = json.loads(Path(config.info_path).read_text())
        run = Run(
            geometry=settings.geometry_name,
            layout=layout,
            trace="generated conversations" if settings.trace is None else str(settings.trace),
            seed=settings.seed,
            page_size_bytes=geometry.page_size_bytes,
            kv_namespace=str(kv_namespace),
            arena_size_bytes=info["arena_size_bytes"],
            arena_backing=info["arena_backing"],
            kernels=info["kernels"],
            tensors_size_bytes=client.tensors_size_bytes,
            kills=kills,
            elapsed_s=(time.monotonic_ns() - started_ns) / 1e9,
            members=_members(info["members"], rig),
        )
    return totals, run


@contextlib.contextmanager
def _target_named(rig: Rig) -> Iterator[None]:
    """Where our own target has ended, that ends the replay at once, and is what went wrong, whatever its client
    met then."""
    try:
        with rig.watched():
            yield
    except (KvdevError, TargetEndedInterrupt) as error:
        how = rig.end_text()
        if how is None:
            raise
        met = f" ({error})" if str(error) else ""
        raise ConnectError(f"embedded target: {how} while the replay ran; run it again{met}") from error


def _plan_embedded(settings: ReplaySettings, needs: TraceNeeds, client: ClientPlan) -> PoolSize:
    """Size the pool, and refuse a plan over memory or disk before anything is made."""
    geometry = settings.geometry
    if settings.capacity_bytes is not None:
        page_count = settings.capacity_bytes // geometry.page_size_bytes
        if page_count < 1:
            raise UsageError(
                f"capacity: expected at least one page of {format_size(geometry.page_size_bytes)}, "
                f"got {format_size(settings.capacity_bytes)}"
            )
    else:
        assert needs.pages_distinct is not None
        page_count = needs.pages_distinct
    size = size_pool(
        geometry,
        page_count=page_count,
        member_count=settings.member_count,
        strip_size_bytes=settings.strip_size_bytes,
    )
    namespaces = Demand(
        "namespaces",
        settings.member_count * size.member_size_bytes,
        f"{settings.member_count} x {format_size(size.member_size_bytes)} for {page_count} pages of "
        f"{format_size(geometry.page_size_bytes)}",
    )
    memory = [*client_demands(geometry, client, page_count), Demand("target", TARGET_BASE_BYTES)]
    available = available_memory()
    if settings.files is not None:
        check_fit(
            [namespaces],
            available_bytes=disk_free_bytes(settings.files),
            where=f"disk at {settings.files}",
            remedy=_remedy(settings, needs, namespaces, disk_free_bytes(settings.files) * DISK_SHARE),
            share=DISK_SHARE,
        )
    else:
        memory.insert(0, namespaces)
    rest = sum(demand.size_bytes for demand in memory if demand is not namespaces)
    check_fit(
        memory,
        available_bytes=available.memory_bytes,
        where=f"memory ({available.memory_source})",
        remedy=_remedy(settings, needs, namespaces, available.memory_bytes * 0.9 - rest),
    )
    return size


def _remedy(settings: ReplaySettings, needs: TraceNeeds, namespaces: Demand, allowed_bytes: float) -> str:
    """What would fit instead."""
    if needs.pages_distinct:
        pages = int(max(0.0, allowed_bytes) / (namespaces.size_bytes / needs.pages_distinct) * 0.95)
        fitting = needs.requests_within(pages)
        if fitting:
            return f"try --requests {fitting}, --capacity to evict, or a smaller --geometry"
    if settings.capacity_bytes is not None:
        return "lower --capacity or --requests, or take a smaller --geometry"
    return "take a smaller --geometry, or fewer and shorter requests"


def geometry_of(uri: str, host_nqn: str | None, host_id: str | None, *, timeout_s: float) -> Geometry:
    """The geometry of a KV namespace that is there: of one rank where it belongs to one."""
    with make_session(host_nqn, host_id, timeout_s=timeout_s) as session:
        return pool_geometry(session, parse_kv_namespace_uri(uri), deadline=operation_deadline(timeout_s))


def _plan_existing(settings: ReplaySettings, client: ClientPlan, uri: KvNamespaceUri) -> int:
    """Refuse a pool that is not there or of another geometry, and a client over memory; returns its quota."""
    with make_session(settings.host_nqn, settings.host_id, timeout_s=settings.timeout_s) as session:
        quota_pages = check_pool(
            session, uri, settings.geometry, deadline=operation_deadline(settings.timeout_s)
        )
    available = available_memory()
    check_fit(
        client_demands(settings.geometry, client, quota_pages),
        available_bytes=available.memory_bytes,
        where=f"memory ({available.memory_source})",
        remedy="take shorter requests or a smaller --arena",
    )
    return quota_pages


def _provision(settings: ReplaySettings, size: PoolSize, rig: Rig, host_nqn: str) -> KvNamespaceUri:
    """Namespaces through the target's RPC, then a volume and a KV namespace on them through our initiator."""
    subsystem = rig.provision(
        host_nqn=host_nqn,
        namespace_count=settings.member_count,
        namespace_size_bytes=size.member_size_bytes,
        files=settings.files,
    )
    members = tuple(
        TcpUri(subsystem.addresses, subsystem.subnqn, nsid=index + 1)
        for index in range(settings.member_count)
    )
    with make_session(host_nqn, None, timeout_s=settings.timeout_s) as session:
        create_pool(
            session,
            VolumeUri(members=members),
            name=KV_NAMESPACE_NAME,
            geometry=settings.geometry,
            size=size,
            timeout_s=settings.timeout_s,
        )
    # From here on the members are found by their labels, wherever they are.
    return KvNamespaceUri(VolumeUri(subsystem=subsystem), KV_NAMESPACE_NAME)


def _members(found: list[dict[str, object]], rig: Rig | None) -> tuple[MemberBytes, ...]:
    traffic = rig.traffic() if rig is not None else []
    members = []
    for index, member in enumerate(found):
        counted = traffic[index] if index < len(traffic) else None
        members.append(
            MemberBytes(
                str(member["uri"]),
                int(str(member["stored_bytes"])),
                None if counted is None else counted.bytes_read,
                None if counted is None else counted.bytes_written,
            )
        )
    return tuple(members)
