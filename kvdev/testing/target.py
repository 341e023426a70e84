"""An embedded target inside this process, for tests: memory namespaces on a loopback port, no RPC socket.

Not here: the scripted peer that breaks rules; the target's own configuration (``kvdev.target``).
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvdev.native.target import NativeBdev
from kvdev.target.model import (
    NO_KEYS,
    BdevKind,
    HostKeys,
    ListenAddress,
    Subsystem,
    TargetModel,
    Transport,
)
from kvdev.target.service import TargetOptions, TargetService

TEST_NQN = "nqn.2024-01.io.kvdev:test"
STOP_TIMEOUT_S = 10.0


@dataclass
class RunningTarget:
    """A started target. ``model`` changes its configuration while it runs, as the RPC server would."""

    service: TargetService
    model: TargetModel
    nqn: str
    address: str
    port: int
    bdev_names: list[str] = field(default_factory=list)

    @property
    def uri(self) -> str:
        """The subsystem as a device URI without its nsid."""
        return f"tcp://{self.address}:{self.port}/{self.nqn}"

    def bdev(self, nsid: int) -> NativeBdev:
        """The device behind a namespace of the first subsystem, to look at its bytes directly."""
        subsystem = self.model.subsystem(self.nqn)
        assert subsystem is not None
        bdev = self.model.bdev(subsystem.namespaces[nsid].bdev_name)
        assert bdev is not None
        return self.service.bdev(bdev.handle)

    def add_memory_namespace(
        self, *, size_bytes: int, block_size_bytes: int = 4096, nqn: str | None = None
    ) -> int:
        """Attach a new memory namespace; returns its NSID."""
        name = self.model.create_malloc(
            name=None, block_size_bytes=block_size_bytes, block_count=size_bytes // block_size_bytes
        )
        self.bdev_names.append(name)
        return self.model.add_namespace(nqn or self.nqn, bdev_name=name)

    def add_file_namespace(
        self, path: str, *, block_size_bytes: int = 4096, is_readonly: bool = False, nqn: str | None = None
    ) -> int:
        """Attach an existing file as a namespace; returns its NSID."""
        name = self.model.create_file(
            name=f"File{len(self.bdev_names)}",
            kind=BdevKind.AIO,
            filename=path,
            block_size_bytes=block_size_bytes,
            is_readonly=is_readonly,
        )
        self.bdev_names.append(name)
        return self.model.add_namespace(nqn or self.nqn, bdev_name=name)

    def allow_host(self, host_nqn: str, keys: HostKeys = NO_KEYS, *, nqn: str | None = None) -> None:
        """Add a host to the first subsystem's list, with what it must prove."""
        self.model.add_host(nqn or self.nqn, host_nqn, keys)

    def add_subsystem(self, nqn: str, *, hosts: Sequence[str] | None = None) -> None:
        """A further subsystem on the same listener; with ``hosts`` only those may connect."""
        self.model.create_subsystem(_subsystem(nqn, hosts))
        for host in hosts or ():
            self.model.add_host(nqn, host)
        self.model.add_listener(nqn, address=self.address, port=self.port)

    def add_port(self) -> int:
        """A further listener of the first subsystem, on any free port; returns that."""
        return self.model.add_listener(self.nqn, address=self.address, port=0).port

    def listener(self) -> ListenAddress:
        return ListenAddress(self.address, self.port)


def _subsystem(nqn: str, hosts: Sequence[str] | None, *, ana_reporting: bool = False) -> Subsystem:
    return Subsystem(
        ana_reporting=ana_reporting,
        nqn=nqn,
        serial_number="KVDEV0000000001",
        model_number="kvdev embedded target",
        allow_any_host=hosts is None,
    )


@contextmanager
def running_target(
    *,
    namespace_count: int = 1,
    namespace_size_bytes: int = 16 << 20,
    block_size_bytes: int = 4096,
    nqn: str = TEST_NQN,
    hosts: Sequence[str] | None = None,
    transport: Transport | None = None,
    options: TargetOptions | None = None,
    address: str = "127.0.0.1",
    seed: int = 1,
    ana_reporting: bool = False,
) -> Iterator[RunningTarget]:
    """Start a target with memory namespaces 1 to ``namespace_count`` on a free port; stop it at the end.

    Namespace UUIDs follow from ``seed`` and the order of creation, so that a run can be repeated.
    """
    count = 0

    def make_uuid() -> uuid_module.UUID:
        nonlocal count
        count += 1
        return uuid_module.uuid5(uuid_module.NAMESPACE_OID, f"kvdev-test-{seed}-{count}")

    service = TargetService(options)
    model = TargetModel(service, make_uuid=make_uuid)
    service.start()
    try:
        model.create_transport(transport or Transport())
        model.create_subsystem(_subsystem(nqn, hosts, ana_reporting=ana_reporting))
        for host in hosts or ():
            model.add_host(nqn, host)
        where = model.add_listener(nqn, address=address, port=0)
        target = RunningTarget(service, model, nqn, where.address, where.port)
        for _ in range(namespace_count):
            target.add_memory_namespace(size_bytes=namespace_size_bytes, block_size_bytes=block_size_bytes)
        yield target
    finally:
        service.stop(timeout_s=STOP_TIMEOUT_S)
