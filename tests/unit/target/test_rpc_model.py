"""The model's rules that no recorded case covers, and what it asks of the backend in which order."""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.target.model import (
    DISCOVERY_NQN,
    EVENT_COUNT_LIMIT,
    BdevIoStat,
    BdevKind,
    SpdkError,
    Subsystem,
    TargetModel,
    Transport,
    is_valid_nqn,
)
from kvdev.target.rpc_methods import RpcMethods
from kvdev.testing.target_backend import MemoryBackend, MemoryFabric
from spdk_rpc.framing import encode_value

NQN = "nqn.2016-06.io.spdk:cnode1"


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(memory_limit_bytes=1 << 30)


@pytest.fixture
def model(backend: MemoryBackend) -> TargetModel:
    return TargetModel(backend)


def malloc(model: TargetModel, name: str | None, block_count: int = 1024, **options: Any) -> str:
    return model.create_malloc(name=name, block_size_bytes=4096, block_count=block_count, **options)


def subsystem(nqn: str = NQN, **options: Any) -> Subsystem:
    return Subsystem(nqn=nqn, serial_number="s", model_number="m", **options)


def refused(code: int, text: str) -> Any:
    return pytest.raises(SpdkError, match=rf"{text}.*\({code}\)")


def test_malloc_without_a_name_counts_up_and_uses_the_number_also_when_taken(model: TargetModel) -> None:
    assert malloc(model, None) == "Malloc0"
    malloc(model, "Malloc1")
    with refused(-17, "File exists: bdev 'Malloc1'"):
        malloc(model, None)
    assert malloc(model, None) == "Malloc2"


def test_bdev_is_found_by_its_uuid_and_a_uuid_is_taken_once(model: TargetModel) -> None:
    mine = uuid.UUID("11111111-2222-3333-4444-555555555555")
    malloc(model, "M", uuid=mine)
    assert model.bdev(str(mine)) == model.bdev("M")
    with refused(-17, "File exists: bdev with uuid"):
        malloc(model, "N", uuid=mine)
    with refused(-17, "File exists"):
        malloc(model, str(mine))


def test_backend_that_cannot_open_leaves_nothing_behind(model: TargetModel, backend: MemoryBackend) -> None:
    with refused(-12, "Cannot allocate memory"):
        malloc(model, "Big", 1 << 20)
    assert model.bdevs() == () and model.events(first_id=0, count_limit=9) == []


def test_raid_whose_bdev_cannot_open_gives_its_bases_back(model: TargetModel, backend: MemoryBackend) -> None:
    for name in ("A", "B"):
        malloc(model, name, 200_000)
    with refused(-12, "Failed to create RAID bdev R: Cannot allocate memory"):
        model.create_raid0(name="R", strip_size_kb=64, base_names=["A", "B"])
    assert not model.is_claimed("A") and model.raids() == ()


def test_raid_refuses_bases_that_do_not_fit(model: TargetModel) -> None:
    malloc(model, "A")
    model.create_malloc(name="B", block_size_bytes=512, block_count=1024)
    malloc(model, "Tiny", 8)
    for names, text in (
        (["A", "B"], "'A' has blocks of 4096 bytes, 'B' of 512"),
        (["A", "A"], "Operation not permitted: base_bdevs: 'A' is in use"),
        (["A", "Tiny"], "the smallest is smaller than one strip"),
    ):
        with pytest.raises(SpdkError, match=text):
            model.create_raid0(name="R", strip_size_kb=64, base_names=names)
        assert not any(model.is_claimed(name) for name in names)
    with refused(-22, "'A' has blocks of 4096 bytes, the strip has 1024"):
        model.create_raid0(name="R", strip_size_kb=1, base_names=["A"])


def test_raid_of_one_member_and_raid_of_raids(model: TargetModel, backend: MemoryBackend) -> None:
    malloc(model, "A", 1000)
    model.create_raid0(name="Inner", strip_size_kb=16, base_names=["A"])
    model.create_raid0(name="Outer", strip_size_kb=16, base_names=["Inner"])
    outer = model.bdev("Outer")
    assert outer is not None and outer.block_count == 1000 and outer.base_names == ("Inner",)
    backend.log.clear()
    model.delete_bdev("A", BdevKind.MALLOC)
    # From the top down: nothing is closed under what stands on it.
    assert [name for call, name in backend.log if call == "close_bdev"] == ["Outer", "Inner", "A"]
    assert model.bdevs() == ()


def test_waiting_raid_ignores_a_base_that_does_not_fit(model: TargetModel) -> None:
    model.create_raid0(name="R", strip_size_kb=64, base_names=["A", "B"])
    malloc(model, "A")
    model.create_malloc(name="B", block_size_bytes=512, block_count=1024)
    raid = model.raid("R")
    assert raid is not None and raid.state == "configuring" and raid.discovered == {"A"}
    assert not model.is_claimed("B")


def test_base_of_a_waiting_raid_can_go(model: TargetModel) -> None:
    model.create_raid0(name="R", strip_size_kb=64, base_names=["A", "B"])
    malloc(model, "A")
    model.delete_bdev("A", BdevKind.MALLOC)
    raid = model.raid("R")
    assert raid is not None and raid.state == "configuring" and raid.discovered == set()


def test_delete_of_a_raids_bdev_by_another_module_is_refused(model: TargetModel) -> None:
    malloc(model, "A")
    model.create_raid0(name="R", strip_size_kb=64, base_names=["A"])
    with refused(-19, "No such device"):
        model.delete_bdev("R", BdevKind.MALLOC)


def test_namespace_identity_defaults_to_the_bdevs_uuid(model: TargetModel) -> None:
    malloc(model, "A", uuid=uuid.UUID(int=5))
    malloc(model, "B", uuid=uuid.UUID(int=6))
    malloc(model, "C", uuid=uuid.UUID(int=7))
    model.create_subsystem(subsystem())
    model.add_namespace(NQN, bdev_name="A")
    model.add_namespace(NQN, bdev_name="B", uuid=uuid.UUID(int=9))
    model.add_namespace(NQN, bdev_name="C", nguid=bytes(15) + b"\x01", eui64=bytes(8))
    entries = model.find_subsystem(NQN).namespaces
    assert (entries[1].uuid.int, entries[1].nguid, entries[1].eui64) == (5, uuid.UUID(int=5).bytes, b"")
    assert (entries[2].uuid.int, entries[2].nguid) == (9, uuid.UUID(int=9).bytes)
    assert (entries[3].uuid.int, entries[3].nguid) == (7, bytes(15) + b"\x01")


def test_nsid_is_the_lowest_free_one_up_to_the_limit(model: TargetModel) -> None:
    for name in "ABCD":
        malloc(model, name)
    model.create_subsystem(subsystem(max_namespaces=3))
    assert model.add_namespace(NQN, bdev_name="A", nsid=2) == 2
    assert model.add_namespace(NQN, bdev_name="B") == 1
    assert model.add_namespace(NQN, bdev_name="C") == 3
    with refused(-32602, "Invalid parameters: namespace.nsid: all 3 are in use"):
        model.add_namespace(NQN, bdev_name="D")
    with refused(-32602, "expected 1 to 3, got 4"):
        model.add_namespace(NQN, bdev_name="D", nsid=4)
    assert list(model.find_subsystem(NQN).namespaces) == [1, 2, 3]
    assert not model.is_claimed("D")


def test_namespace_leaves_the_view_before_the_backend_is_told(
    model: TargetModel, backend: MemoryBackend
) -> None:
    malloc(model, "A")
    model.create_subsystem(subsystem())
    seen: list[bool] = []

    def look(nqn: str, nsid: int) -> None:
        seen.append(nsid in model.find_subsystem(nqn).namespaces)
        # Until the data path has let go of it nobody else may claim the bdev.
        assert model.is_claimed("A")

    backend.namespace_changed = look  # type: ignore[method-assign]
    model.add_namespace(NQN, bdev_name="A")
    model.delete_bdev("A", BdevKind.MALLOC)
    assert seen == [True, False]


def test_snapshot_that_a_reader_holds_does_not_change(model: TargetModel) -> None:
    malloc(model, "A")
    model.create_subsystem(subsystem())
    before = model.find_subsystem(NQN)
    model.add_namespace(NQN, bdev_name="A")
    model.add_host(NQN, NQN + "host")
    assert before.namespaces == {} and before.hosts == ()
    with pytest.raises(TypeError):
        model.find_subsystem(NQN).namespaces[9] = None  # type: ignore[index]


def test_listening_socket_is_shared_and_ends_with_its_last_subsystem(
    model: TargetModel, backend: MemoryBackend
) -> None:
    model.create_transport(Transport())
    model.create_subsystem(subsystem())
    listener = model.add_listener(NQN, address="127.0.0.1", port=0)
    assert listener.port != 0
    assert model.add_listener(DISCOVERY_NQN, address="127.0.0.1", port=listener.port) == listener
    assert [call for call, _ in backend.log].count("start_listener") == 1
    assert model.find_subsystem(NQN).is_listening_on("127.0.0.1", listener.port)
    model.delete_subsystem(NQN)
    assert backend.listeners
    model.remove_listener(DISCOVERY_NQN, address="127.0.0.1", port=listener.port)
    assert not backend.listeners


def test_listener_is_refused_without_transport_off_loopback_and_on_a_port_in_use(
    model: TargetModel, backend: MemoryBackend
) -> None:
    model.create_subsystem(subsystem())
    with refused(-32602, "Invalid parameters: .*call nvmf_create_transport first"):
        model.add_listener(NQN, address="127.0.0.1", port=0)
    model.create_transport(Transport())
    for address in ("0.0.0.0", "::", "192.0.2.1"):
        with refused(-32602, "is not loopback: start the target with --allow-remote"):
            model.add_listener(NQN, address=address, port=0)
    other = MemoryBackend()
    _, port = other.start_listener("127.0.0.1", 0)
    with refused(-32602, f"Invalid parameters: listen_address: 127.0.0.1:{port}: Address already in use"):
        model.add_listener(NQN, address="127.0.0.1", port=port)
    assert model.find_subsystem(NQN).listeners == ()
    other.stop(timeout_s=1)


def test_remote_listener_is_let_when_allowed() -> None:
    backend = MemoryBackend()
    model = TargetModel(backend, allow_remote=True)
    model.create_transport(Transport())
    model.create_subsystem(subsystem())
    assert model.add_listener(NQN, address="0.0.0.0", port=0).address == "0.0.0.0"
    backend.stop(timeout_s=1)


def test_events_are_numbered_on_while_old_ones_are_forgotten(model: TargetModel) -> None:
    for _ in range(EVENT_COUNT_LIMIT // 2 + 5):
        malloc(model, "M")
        model.delete_bdev("M", BdevKind.MALLOC)
    events = model.events(first_id=0, count_limit=EVENT_COUNT_LIMIT * 2)
    assert len(events) == EVENT_COUNT_LIMIT
    assert [event.id for event in events] == list(range(10, EVENT_COUNT_LIMIT + 10))


@pytest.mark.parametrize(
    "nqn",
    [
        NQN,
        DISCOVERY_NQN,
        "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111",
        "nqn.2016-06.io.spdk:ü",
        "nqn.2016-06.a-b.c1:x:y",
        "nqn.2016-06.io.spdk:" + "x" * 203,
    ],
)
def test_nqn_is_valid(nqn: str) -> None:
    assert is_valid_nqn(nqn)


@pytest.mark.parametrize(
    "nqn",
    [
        "",
        "notannqn",
        "nqn.2016-06.io.spdk",
        "nqn.2016-06.io.spdk:",
        "nqn.16-06.io.spdk:x",
        "nqn.2016-06.1io.spdk:x",
        "nqn.2016-06.io-.spdk:x",
        "nqn.2016-06.io..spdk:x",
        "nqn.2014-08.org.nvmexpress:uuid:1111",
        "nqn.2016-06.io.spdk:" + "x" * 204,
        "nqn.2016-06.io.spdk:" + "ü" * 102,
    ],
)
def test_nqn_is_not_valid(nqn: str) -> None:
    assert not is_valid_nqn(nqn)


def test_file_bdev_checks_its_file(model: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()

    def create(block_size_bytes: int, filename: str = str(path)) -> str:
        return model.create_file(
            name="F", kind=BdevKind.AIO, filename=filename, block_size_bytes=block_size_bytes
        )

    with refused(-22, "has 0 bytes"):
        create(512)
    os.truncate(path, 4096 + 512)
    with refused(-22, "has 4608 bytes, expected a multiple of 4096"):
        create(4096)
    for size in (256, 513, 768):
        with refused(-22, "expected a power of two from 512"):
            create(size)
    with refused(-22, "neither a regular file nor a block device"):
        create(512, "/dev/null")
    os.mkfifo(tmp_path / "fifo")
    with refused(-22, "neither a regular file nor a block device"):
        create(512, str(tmp_path / "fifo"))
    with refused(-21, "Is a directory"):
        create(512, str(tmp_path))
    assert create(512) == "F"


async def call(methods: RpcMethods, method: str, /, **params: Any) -> Any:
    return await methods.call(method, params or None)


def run(methods: RpcMethods, method: str, /, **params: Any) -> Any:
    return asyncio.run(call(methods, method, **params))


def test_iostat_reports_and_resets_what_the_backend_counts(
    model: TargetModel, backend: MemoryBackend
) -> None:
    methods = RpcMethods(model)
    malloc(model, "A")
    malloc(model, "B")
    bdev = model.bdev("A")
    assert bdev is not None
    counted = BdevIoStat(
        bytes_read=8192, num_read_ops=2, read_latency_ns=10, max_read_latency_ns=7, io_error_count=3
    )
    backend.count_io(bdev.handle, counted)
    (stat,) = run(methods, "bdev_get_iostat", names=["A"])["bdevs"]
    assert (stat["bytes_read"], stat["num_read_ops"], stat["max_read_latency_ticks"]) == (8192, 2, 7)
    assert stat["io_error"] == {"failed": 3}
    assert len(run(methods, "bdev_get_iostat")["bdevs"]) == 2
    with refused(-22, "Invalid argument: per_channel"):
        run(methods, "bdev_get_iostat", per_channel=True)
    with refused(-95, "Operation not supported: mode"):
        run(methods, "bdev_reset_iostat", mode="maxmin")
    assert run(methods, "bdev_reset_iostat", mode="none") and backend.iostat(bdev.handle) == counted
    assert run(methods, "bdev_get_iostat", names=["A"], reset_mode="all")["bdevs"][0]["bytes_read"] == 8192
    assert backend.iostat(bdev.handle) == BdevIoStat()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_io_size": 3000}, "max_io_size: expected a power of two from 4 KiB"),
        ({"max_queue_depth": 1}, "max_queue_depth: expected 2 to 4096, got 1"),
        ({"in_capsule_data_size": 100}, "in_capsule_data_size: expected a multiple of 16"),
        ({"max_io_qpairs_per_ctrlr": 0}, "max_io_qpairs_per_ctrlr: expected 1 to 1023"),
        ({"zcopy": True}, "not supported here"),
    ],
)
def test_transport_that_cannot_be_is_refused(model: TargetModel, params: dict[str, Any], text: str) -> None:
    with refused(-32603, f"Transport type 'TCP' create failed: .*{text}"):
        run(RpcMethods(model), "nvmf_create_transport", trtype="tcp", **params)
    assert model.transport() is None


@pytest.mark.parametrize(
    ("method", "params", "code", "text"),
    [
        ("bdev_malloc_create", {"num_blocks": 8, "block_size": 512, "md_size": 8}, -95, "md_size"),
        ("bdev_malloc_create", {"num_blocks": 8.5, "block_size": 512}, -32603, "num_blocks: expected a whole number"),
        ("bdev_malloc_create", {"num_blocks": 1 << 64, "block_size": 512}, -32603, "num_blocks: expected 0 to"),
        ("bdev_malloc_create", {"num_blocks": True, "block_size": 512}, -32603, "num_blocks: expected a number"),
        ("bdev_malloc_create", {"num_blocks": 8, "block_size": 512, "uuid": "x"}, -32603, "uuid: expected a UUID"),
        ("bdev_malloc_create", {"num_blocks": 8, "block_size": 512, "name": "\ud800"}, -32603, "name"),
        ("bdev_get_bdevs", {"name": "a\0"}, -32603, "name: expected a string of Unicode"),
        ("bdev_raid_create", {"name": "R", "raid_level": "raid1", "base_bdevs": ["x"]}, -22, "raid0 only"),
        (
            "bdev_raid_create",
            {"name": "R", "raid_level": "0", "strip_size_kb": 64, "base_bdevs": ["x"], "superblock": True},
            -95,
            "superblock",
        ),
        ("bdev_raid_create", {"name": "R", "raid_level": "0", "base_bdevs": [""]}, -22, "cannot be empty"),
        ("bdev_raid_create", {"name": "R", "raid_level": "0", "base_bdevs": [5]}, -32700, r"base_bdevs\[0\]"),
        ("nvmf_create_subsystem", {"nqn": NQN, "serial_number": "x" * 21}, -32602, "serial_number: expected at most"),
        ("nvmf_create_subsystem", {"nqn": NQN, "model_number": "ü"}, -32602, "model_number: expected at most"),
        ("nvmf_create_subsystem", {"nqn": NQN, "passthrough": True}, -32602, "passthrough: not supported"),
        ("nvmf_create_subsystem", {"nqn": NQN, "max_namespaces": 1025}, -32603, "max_namespaces: expected 1 to 1024"),
        ("nvmf_create_subsystem", {"nqn": NQN, "tgt_name": "other"}, -32602, "tgt_name"),
        ("nvmf_create_subsystem", {"nqn": DISCOVERY_NQN}, -32603, "Unable to create subsystem"),
        ("nvmf_delete_subsystem", {"nqn": DISCOVERY_NQN}, -32602, "the discovery subsystem stays"),
        ("nvmf_subsystem_add_host", {"nqn": DISCOVERY_NQN, "host": NQN, "psk": "secret!"}, -32602, "psk: no such key"),
        ("nvmf_subsystem_add_ns", {"nqn": DISCOVERY_NQN, "namespace": {"bdev_name": "x"}}, -32602, "has no namespaces"),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": []}, -32602, "namespace: expected an object"),
        ("framework_get_config", {"name": "x"}, -32602, "Subsystem 'x' not found"),
        ("log_set_level", {"level": "LOUD"}, -32603, "level: expected one of"),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(
    model: TargetModel, method: str, params: dict[str, Any], code: int, text: str
) -> None:
    with refused(code, f".*{text}") as caught:
        run(RpcMethods(model), method, **params)
    assert "secret!" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ({"trtype": "RDMA", "traddr": "127.0.0.1", "trsvcid": "1"}, "listen_address.trtype: expected TCP"),
        (
            {"trtype": "tcp", "traddr": "localhost", "trsvcid": "1"},
            "listen_address.traddr: expected an IP address",
        ),
        ({"trtype": "tcp", "traddr": "127.0.0.1", "adrfam": "ipv6", "trsvcid": "1"}, "listen_address.adrfam"),
        (
            {"trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "65536"},
            "listen_address.trsvcid: expected a port",
        ),
        (
            {"trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "-1"},
            "listen_address.trsvcid: expected a port",
        ),
        ({"trtype": "tcp", "traddr": "127.0.0.1"}, "listen_address.trsvcid: expected a port"),
        ({"trtype": "tcp", "trsvcid": "1"}, "listen_address.traddr: missing"),
    ],
)
def test_listen_address_is_checked(model: TargetModel, address: dict[str, str], text: str) -> None:
    model.create_transport(Transport())
    model.create_subsystem(subsystem())
    with refused(-32602, f"Invalid parameters: {text}"):
        run(RpcMethods(model), "nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)


def test_get_bdevs_with_a_timeout_returns_as_soon_as_the_bdev_is_there(model: TargetModel) -> None:
    methods = RpcMethods(model)

    async def wait_for_it() -> Any:
        waiting = asyncio.create_task(call(methods, "bdev_get_bdevs", name="Late", timeout=60_000))
        await asyncio.sleep(0)
        await call(methods, "bdev_malloc_create", name="Other", num_blocks=8, block_size=512)
        await call(methods, "bdev_malloc_create", name="Late", num_blocks=8, block_size=512)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(wait_for_it())[0]["name"] == "Late"


METHODS = RpcMethods(TargetModel(MemoryBackend())).fields()
NAMES = st.sampled_from(["A", "B", "C", "R"])
SCALARS = (
    NAMES
    | st.integers(-2, 9)
    | st.booleans()
    | st.none()
    | st.floats()
    | st.text(max_size=3)
    | st.just("/dev/null")
)
UNTRUSTED = (
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["nsid", "traddr"]), SCALARS)
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES,
    "nqn": st.sampled_from([NQN, NQN, DISCOVERY_NQN]),
    "host": st.sampled_from([NQN, DISCOVERY_NQN]),
    "num_blocks": st.sampled_from([8, 64]),
    "block_size": st.sampled_from([512, 4096]),
    "strip_size_kb": st.just(4),
    "raid_level": st.just("raid0"),
    "base_bdevs": st.lists(NAMES, min_size=1, max_size=2),
    "category": st.sampled_from(["all", "offline"]),
    "trtype": st.just("TCP"),
    "nsid": st.integers(1, 3),
    "allow_any_host": st.booleans(),
    "base_bdev": NAMES,
    "base_bdev_name": NAMES,
    "base_name": NAMES,
    "bdev_name": NAMES,
    "lvs_name": st.just("S"),
    "lvol_name": st.sampled_from(["x", "y"]),
    "cluster_sz": st.just(4096),
    "size_in_mib": st.just(1),
    "split_count": st.integers(1, 3),
    "avg_read_latency": st.just(1),
    "p99_read_latency": st.just(1),
    "avg_write_latency": st.just(1),
    "p99_write_latency": st.just(1),
    "ctrlr": st.sampled_from(["v", "w"]),
    "dev_name": NAMES,
    "old_name": st.sampled_from(["S", "S/x"]),
    "new_name": st.sampled_from(["S", "x"]),
    "traddr": st.just("127.0.0.1"),
    "trsvcid": st.just("4420"),
    "subnqn": st.just(NQN),
    "new_size": st.integers(0, 1),
    "namespace": st.fixed_dictionaries({"bdev_name": NAMES}, optional={"nsid": st.integers(0, 3)}),
    "listen_address": st.just({"trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0"}),
}
CHANGES = [
    name
    for name in METHODS
    if name.endswith(("create", "delete"))
    or name.startswith(("nvmf_create", "nvmf_sub", "bdev_lvol", "vhost_", "bdev_null_resize"))
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Any]:
    """A call that is right more often than chance would make it."""
    # Log levels belong to the whole process.
    quiet = [name for name in METHODS if not name.startswith("log_set")]
    method = draw(st.sampled_from(CHANGES) | st.sampled_from(quiet))
    is_bad = draw(st.integers(0, 9)) == 0
    if is_bad and draw(st.booleans()):
        return method, draw(UNTRUSTED)
    params = {}
    for name, field in METHODS[method].items():
        if field.is_required or is_bad or name in ("name", "strip_size_kb", "lvs_name", "cluster_sz"):
            params[name] = draw(UNTRUSTED if is_bad and draw(st.booleans()) else GOOD.get(name, UNTRUSTED))
    if params.get("timeout"):
        params["timeout"] = 0
    return method, params or None


@given(st.lists(calls(), max_size=25))
def test_untrusted_calls_raise_only_refusals_and_keep_the_invariants(sequence: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_untrusted(sequence, folder)


def run_untrusted(sequence: list[tuple[str, Any]], folder: str) -> None:
    backend = MemoryBackend(memory_limit_bytes=1 << 23, fabric=MemoryFabric(), vhost_folder=folder)
    model = TargetModel(backend)
    methods = RpcMethods(model)

    async def run_all() -> None:
        for name in "AB":
            await call(methods, "bdev_malloc_create", name=name, num_blocks=8192, block_size=512)
        await call(methods, "nvmf_create_transport", trtype="TCP")
        await call(methods, "nvmf_create_subsystem", nqn=NQN)
        for method, params in sequence:
            try:
                encode_value(await methods.call(method, params))
            except SpdkError as error:
                encode_value([error.code, error.message])
            check_invariants(methods, model, backend)

    try:
        asyncio.run(run_all())
    finally:
        backend.stop(timeout_s=1)


def check_invariants(methods: RpcMethods, model: TargetModel, backend: MemoryBackend) -> None:
    """Claims, raids, namespaces and listeners agree with each other and with the backend."""
    names = {bdev.name for bdev in model.bdevs()}
    assert {bdev.handle for bdev in model.bdevs()} == backend.open_bdevs.keys()
    claimed = [entry.bdev_name for each in model.subsystems() for entry in each.namespaces.values()]
    claimed += [name for raid in model.raids() for name in raid.discovered]
    stacked = [bdev for bdev in model.bdevs() if bdev.kind in (BdevKind.DELAY, BdevKind.ERROR)]
    claimed += [bdev.base_names[0] for bdev in stacked]
    claimed += {bdev.base_names[0] for bdev in model.bdevs() if bdev.kind is BdevKind.SPLIT}
    stores = methods.stack.stores()
    claimed += [store.base_name for store in stores]
    lvols = {str(lvol.uuid) for store in stores for lvol in store.lvols.values()}
    assert lvols == {bdev.name for bdev in model.bdevs() if bdev.kind is BdevKind.LVOL}
    for store in stores:
        used = [cluster for lvol in store.lvols.values() for cluster in lvol.clusters]
        assert len(used) == len(set(used)) and len(used) + store.free_cluster_count == store.cluster_count
    for vhost in methods.host.vhost.controllers.values():
        assert vhost.bdev_name is None or vhost.bdev_name in names
    assert len(claimed) == len(set(claimed)) and set(claimed) <= names
    assert {name for name in names if model.is_claimed(name)} == set(claimed)
    assert {raid.name for raid in model.raids() if raid.state == "online"} == {
        bdev.name for bdev in model.bdevs() if bdev.kind is BdevKind.RAID0
    }
    listeners = {
        (each.address, each.port) for subsystem in model.subsystems() for each in subsystem.listeners
    }
    assert listeners == backend.listeners.keys()
