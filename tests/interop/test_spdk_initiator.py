"""Our initiator against a real spdk_tgt: connecting, data, digests, the rules where SPDK has its own ways.

KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later; started without huge pages).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectError, UnsupportedError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace, scan
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.uri import DigestPolicy
from spdk_rpc import Client, SpdkRpc
from tests.interop.spdk import Spdk, free_port, running_spdk

pytestmark = pytest.mark.interop

NQN = "nqn.2026-01.io.kvdev:spdk"
HOST = HostIdentity.of("nqn.2026-01.io.kvdev:interop")
NAMESPACE_MIB = 64
AREA_SIZE_BYTES = 8 << 20


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


def session(**options: object) -> Session:
    return Session(host=HOST, options=ControllerOptions(**options))  # type: ignore[arg-type]


@dataclass
class Served:
    """A target with three namespaces: malloc of 512 and of 4096, uring of 4096."""

    spdk: Spdk
    rpc: SpdkRpc
    port: int

    def uri(self, nsid: int | None = None) -> str:
        return f"tcp://127.0.0.1:{self.port}/{NQN}" + (f"?nsid={nsid}" if nsid else "")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("spdk")
    with running_spdk(folder, "spdk") as spdk, Client(spdk.path, timeout_s=30) as client:
        rpc, port = SpdkRpc(client), free_port()
        with (folder / "u.img").open("wb") as file:
            file.truncate(NAMESPACE_MIB << 20)
        rpc.nvmf_create_transport(trtype="TCP")
        rpc.bdev_malloc_create(name="M512", num_blocks=(NAMESPACE_MIB << 20) // 512, block_size=512)
        rpc.bdev_malloc_create(name="M4K", num_blocks=(NAMESPACE_MIB << 20) // 4096, block_size=4096)
        rpc.bdev_uring_create(name="U4K", filename=str(folder / "u.img"), block_size=4096)
        rpc.nvmf_create_subsystem(nqn=NQN, serial_number="SPDK0001", model_number="real", allow_any_host=True)
        for name in ("M512", "M4K", "U4K"):
            rpc.nvmf_subsystem_add_ns(nqn=NQN, bdev_name=name)
        rpc.nvmf_subsystem_add_listener(nqn=NQN, traddr="127.0.0.1", trsvcid=port)
        yield Served(spdk, rpc, port)


def test_connect_when_spdk_then_identified(served: Served) -> None:
    with session(io_queue_count=2) as kv:
        controller = kv.controller(served.uri())
        ident = controller.identify
        assert (ident.sn, ident.mn, ident.subnqn) == ("SPDK0001", "real", NQN)
        infos = scan(controller, deadline=soon())
        assert [info.block_size_bytes for info in infos] == [512, 4096, 4096]
        assert {info.size_bytes for info in infos} == {NAMESPACE_MIB << 20}
        assert [info.problem for info in infos] == ["", "", ""]
        assert NQN in {entry.subnqn for entry in kv.discover(f"127.0.0.1:{served.port}")}


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize("digest", [DigestPolicy.OFF, DigestPolicy.REQUIRE])
@pytest.mark.parametrize("nsid", [1, 2, 3])
def test_read_write_when_random_then_reads_what_was_written(
    served: Served, nsid: int, digest: DigestPolicy, queues: int, rng: np.random.Generator
) -> None:
    with session(header_digest=digest, data_digest=digest, io_queue_count=queues) as kv:
        device = kv.open_device(served.uri(nsid))
        assert isinstance(device, NvmeNamespace)
        model = rng.integers(0, 256, AREA_SIZE_BYTES, dtype=np.uint8)
        write_blocks(device, 0, model, soon())
        block = device.block_size_bytes
        for _ in range(30):
            count = int(rng.choice([1, 2, 7, 8, 16, 17, 256, 300]))
            slba = int(rng.integers(0, AREA_SIZE_BYTES // block - count))
            payload = rng.integers(0, 256, count * block, dtype=np.uint8)
            write_blocks(device, slba, payload, soon())
            model[slba * block : (slba + count) * block] = payload
            again = int(rng.integers(0, AREA_SIZE_BYTES // block - count))
            got = read_blocks(device, again, count, soon())
            assert np.array_equal(got, model[again * block : (again + count) * block])
        assert np.array_equal(read_blocks(device, 0, AREA_SIZE_BYTES // block, soon()), model)
        device.flush(soon())


@pytest.mark.parametrize("nsid", [1, 2])
def test_write_zeroes_when_done_then_neighbours_stay(
    served: Served, nsid: int, rng: np.random.Generator
) -> None:
    with session() as kv:
        device = kv.open_device(served.uri(nsid))
        assert isinstance(device, NvmeNamespace)
        block = device.block_size_bytes
        count = (4 << 20) // block
        model = rng.integers(1, 256, count * block, dtype=np.uint8)
        write_blocks(device, 0, model, soon())
        device.write_zeroes(8, count - 16, soon())
        got = read_blocks(device, 0, count, soon())
        assert not got[8 * block : (count - 8) * block].any()
        for edge in (slice(8 * block), slice(-8 * block, None)):
            assert np.array_equal(got[edge], model[edge])
        # One namespace of the subsystem, the uring bdev, cannot: SPDK then offers it for none.
        with pytest.raises(UnsupportedError, match="deallocate"):
            device.deallocate([(8, 64)], soon())


def test_idle_when_three_keep_alive_times_then_still_connected(served: Served) -> None:
    with session(kato_ms=1000) as kv:
        device = kv.open_device(served.uri(2))
        threading.Event().wait(3.5)
        assert len(read_blocks(device, 0, 1, soon())) == device.block_size_bytes


def test_connect_when_refused_then_the_error_says_why(served: Served) -> None:
    with session() as kv, pytest.raises(CommandError, match="kvdev discover"):
        kv.controller(f"tcp://127.0.0.1:{served.port}/nqn.2026-01.io.kvdev:other")
    with session() as kv, pytest.raises(UsageError, match=r"active namespaces \(1, 2, 3\), got 9"):
        kv.open_device(served.uri(9))
    with session() as kv, pytest.raises(ConnectError, match="is the target listening"):
        kv.controller(f"tcp://127.0.0.1:{free_port()}/{NQN}")
    served.rpc.nvmf_subsystem_allow_any_host(nqn=NQN, allow_any_host=False)
    try:
        with session() as kv, pytest.raises(CommandError) as caught:
            kv.controller(served.uri())
    finally:
        served.rpc.nvmf_subsystem_allow_any_host(nqn=NQN, allow_any_host=True)
    assert HOST.host_nqn in str(caught.value)
