"""A session without any peer: local devices by URI, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import ConnectError, UsageError
from kvdev.geometry import Geometry
from kvdev.session import Session
from kvdev.store.volume import Volume


def test_open_device_when_memory_then_shared_by_name() -> None:
    with Session() as kv:
        first = kv.open_device("mem:a?size=1MiB")
        write_blocks(first, 1, b"x" * 4096, Deadline.after(60))
        again = kv.open_device("mem:a")
        assert bytes(read_blocks(again, 1, 1, Deadline.after(60))) == b"x" * 4096
        with pytest.raises(UsageError, match="size: expected 1048576 as first opened"):
            kv.open_device("mem:a?size=2MiB")
        with pytest.raises(UsageError, match=r"expected mem:b\?size=SIZE"):
            kv.open_device("mem:b")


def test_open_members_when_files_then_in_order_and_none_stays_after_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    with Session() as kv:
        members = kv.open_members(f"vol:file:{tmp_path}/a,file:{tmp_path}/b")
        assert [member.uri for member in members] == [f"file:{tmp_path}/a", f"file:{tmp_path}/b"]
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(UsageError, match="missing"):
            kv.open_members(f"vol:file:{tmp_path}/a,file:{tmp_path}/missing")
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_session_when_closed_then_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Session() as kv:
        kv.open_device(f"file:{tmp_path}/a")
        assert len(list(Path("/proc/self/fd").iterdir())) > before
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(UsageError, match="closed"):
        kv.open_device(f"file:{tmp_path}/a")


def test_open_device_when_vhost_socket_is_missing_then_the_error_names_it_and_a_remedy(
    tmp_path: Path,
) -> None:
    with Session() as kv, pytest.raises(ConnectError, match="start the back end") as caught:
        kv.open_device(f"vhost:{tmp_path}/vhost.0")
    assert caught.value.trid == f"vhost:{tmp_path}/vhost.0"


def test_close_when_interrupted_then_everything_is_closed_and_the_interrupt_raised_again() -> None:
    kv = Session()
    closed: list[str] = []

    def interrupted(_: Deadline) -> None:
        raise KeyboardInterrupt

    kv._closers.append(("first", lambda limit: closed.append(f"first expired={limit.is_expired}")))
    kv._closers.append(("second", interrupted))
    with pytest.raises(KeyboardInterrupt):
        kv.close()
    assert closed == ["first expired=True"]
    kv.close()


def test_open_kv_namespace_when_members_in_any_order_then_found_by_label() -> None:
    geometry = Geometry.preset("small")
    limit = Deadline.after(20)
    with Session() as kv:
        members = kv.open_members("vol:mem:a?size=32MiB,mem:b?size=32MiB", deadline=limit)
        volume = Volume.create(members, name="v", strip_size_bytes=64 << 10, deadline=limit)
        volume.create_namespace("x", geometry, quota_pages=16, deadline=limit)
        assert kv.open_volume("vol:mem:b,mem:a", deadline=limit).name == "v"
        namespace = kv.open_kv_namespace("vol:mem:b,mem:a#x", geometry=geometry, deadline=limit)
        assert namespace.mode == "owner"
        with pytest.raises(UsageError, match="member 1 is missing"):
            kv.open_volume("vol:mem:a", deadline=limit)
        assert kv.open_device("mem:a").uri == "mem:a"
