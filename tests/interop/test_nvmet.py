"""Our initiator against the Linux kernel's NVMe/TCP target in a QEMU guest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.device import BlockDevice, read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, ConnectError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace, scan
from kvdev.initiator.options import ControllerOptions
from kvdev.session import Session
from kvdev.uri import DigestPolicy
from tests.interop.conftest import Lab, Nvmet, free_port

pytestmark = pytest.mark.interop

HOST = HostIdentity.of("nqn.2024-01.io.example.kvdev:interop")
NAMESPACE_MIB = 64
AREA_SIZE_BYTES = 8 << 20


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline.after(seconds)


def session(**options: object) -> Session:
    return Session(host=HOST, options=ControllerOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def nvmet(lab: Lab) -> Iterator[Nvmet]:
    with lab.nvmet(namespaces=3, mib=NAMESPACE_MIB, block_sizes="512,4096") as target:
        yield target


def test_connect_when_nvmet_then_identified(nvmet: Nvmet) -> None:
    with session(io_queue_count=2) as kv:
        controller = kv.controller(nvmet.uri())
        ident = controller.identify
        assert (ident.sn, ident.mn, ident.subnqn) == ("LAB0001", "Lab nvmet", nvmet.nqn)
        assert controller.kato_ms >= 1000
        infos = scan(controller, deadline=soon())
        assert [info.nsid for info in infos] == [1, 2, 3]
        assert [info.block_size_bytes for info in infos] == [512, 4096, 512]
        assert {info.size_bytes for info in infos} == {NAMESPACE_MIB << 20}
        assert [info.problem for info in infos] == ["", "", ""]
        uuids = [info.identity.uuid for info in infos]
        assert uuids == [bytes.fromhex(f"0000000000004000800000000000000{nsid}") for nsid in (1, 2, 3)]


def test_discover_when_nvmet_then_subsystem_listed(nvmet: Nvmet) -> None:
    with session() as kv:
        entries = kv.discover(f"127.0.0.1:{nvmet.port}")
    assert nvmet.nqn in {entry.subnqn for entry in entries}


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize(
    ("header", "data"),
    [
        (DigestPolicy.OFF, DigestPolicy.OFF),
        (DigestPolicy.REQUIRE, DigestPolicy.OFF),
        (DigestPolicy.OFF, DigestPolicy.REQUIRE),
        (DigestPolicy.REQUIRE, DigestPolicy.REQUIRE),
    ],
)
@pytest.mark.parametrize("nsid", [1, 2])
def test_read_write_when_random_then_reads_what_was_written(
    nvmet: Nvmet,
    nsid: int,
    header: DigestPolicy,
    data: DigestPolicy,
    queues: int,
    rng: np.random.Generator,
) -> None:
    with session(header_digest=header, data_digest=data, io_queue_count=queues) as kv:
        device = kv.open_device(nvmet.uri(nsid))
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
        assert isinstance(device, NvmeNamespace)
        info = kv.queue.qpair(device.controller.qpair_indexes[0]).info
        assert (info.has_header_digest, info.has_data_digest) == (
            header is DigestPolicy.REQUIRE,
            data is DigestPolicy.REQUIRE,
        )
        device.flush(soon())


@pytest.mark.parametrize("nsid", [1, 2])
def test_write_zeroes_and_deallocate_when_done_then_neighbours_stay(
    nvmet: Nvmet, nsid: int, rng: np.random.Generator
) -> None:
    with session() as kv:
        device = kv.open_device(nvmet.uri(nsid))
        assert isinstance(device, NvmeNamespace)
        block = device.block_size_bytes
        count = (4 << 20) // block
        model = rng.integers(1, 256, count * block, dtype=np.uint8)
        write_blocks(device, 0, model, soon())
        device.write_zeroes(8, count - 16, soon())
        got = read_blocks(device, 0, count, soon())
        assert not got[8 * block : (count - 8) * block].any()
        assert_edges(got, model, 8 * block)
        device.deallocate([(8, 64), (count // 2, 8)], soon())
        assert_edges(read_blocks(device, 0, count, soon()), model, 8 * block)


def assert_edges(got: npt.NDArray[np.uint8], model: npt.NDArray[np.uint8], edge_bytes: int) -> None:
    assert np.array_equal(got[:edge_bytes], model[:edge_bytes])
    assert np.array_equal(got[-edge_bytes:], model[-edge_bytes:])


def test_log_pages_when_read_then_parse(nvmet: Nvmet) -> None:
    with session() as kv:
        controller = kv.controller(nvmet.uri())
        smart = controller.smart_log(deadline=soon())
        assert smart.available_spare_percent <= 100
        assert isinstance(controller.error_log(deadline=soon()), list)


def test_idle_when_three_keep_alive_times_then_still_connected(nvmet: Nvmet) -> None:
    with session(kato_ms=1000) as kv:
        device = kv.open_device(nvmet.uri(1))
        assert isinstance(device, NvmeNamespace)
        threading.Event().wait(3.5)
        assert device.controller.is_alive
        assert len(read_blocks(device, 0, 1, soon())) == device.block_size_bytes
        adopted = device.controller.channel.adopted
        assert adopted is not None
        assert adopted.info.keep_alives_done >= 3


def test_close_when_orderly_then_nothing_is_left_here_and_the_guest_saw_no_timeout(nvmet: Nvmet) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    threads = threading.active_count()
    for _ in range(3):
        with session(io_queue_count=2) as kv:
            kv.open_device(nvmet.uri(1))
            kv.open_device(nvmet.uri(2))
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert threading.active_count() == threads
    assert "keep-alive" not in nvmet.shell("dmesg | grep -i keep-alive || true").lower()


def test_connect_when_subsystem_unknown_then_remedy(nvmet: Nvmet) -> None:
    with session() as kv, pytest.raises(CommandError, match="kvdev discover"):
        kv.controller(f"tcp://127.0.0.1:{nvmet.port}/nqn.2024-01.lab:other")


def test_open_when_nsid_not_active_then_active_ones_named(nvmet: Nvmet) -> None:
    with session() as kv, pytest.raises(UsageError, match=r"active namespaces \(1, 2, 3\), got 9"):
        kv.open_device(nvmet.uri(9))


def test_connect_when_host_not_allowed_then_error_names_the_host_nqn(nvmet: Nvmet) -> None:
    config = f"/sys/kernel/config/nvmet/subsystems/{nvmet.nqn}/attr_allow_any_host"
    nvmet.shell(f"echo 0 > {config}")
    try:
        with session() as kv, pytest.raises(CommandError) as caught:
            kv.controller(nvmet.uri())
    finally:
        nvmet.shell(f"echo 1 > {config}")
    assert HOST.host_nqn in str(caught.value)


def test_connect_when_nobody_listens_then_error_says_so() -> None:
    with session() as kv, pytest.raises(ConnectError, match="is the target listening"):
        kv.controller(f"tcp://127.0.0.1:{free_port()}/nqn.2024-01.lab:nvmet")


def test_members_when_subsystem_has_mixed_block_sizes_then_all_opened(nvmet: Nvmet) -> None:
    with session() as kv:
        members: list[BlockDevice] = kv.open_members(f"vol+{nvmet.uri()}")
        assert [member.block_size_bytes for member in members] == [512, 4096, 512]
