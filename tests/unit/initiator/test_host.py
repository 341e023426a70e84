"""The host identity: where it comes from, that it is stable, what bad files get."""

from __future__ import annotations

import json
import os
import stat
import threading
import uuid
from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev.initiator.host import HostIdentity

UUID_TEXT = "11111111-2222-3333-4444-555555555555"
UUID_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{UUID_TEXT}"


def load(tmp_path: Path, *, host_nqn: str | None = None, host_id: str | None = None) -> HostIdentity:
    return HostIdentity.load(
        host_nqn=host_nqn,
        host_id=host_id,
        system_dir=tmp_path / "etc",
        environ={"XDG_STATE_HOME": str(tmp_path / "state")},
    )


def test_load_when_first_then_created_private_and_stable(tmp_path: Path) -> None:
    first = load(tmp_path)
    path = tmp_path / "state" / "kvdev" / "host.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.source == str(path)
    assert first.host_nqn == f"nqn.2014-08.org.nvmexpress:uuid:{first.host_id}"
    assert load(tmp_path) == first
    assert [entry.name for entry in path.parent.iterdir()] == ["host.json"]


@pytest.mark.parametrize("umask", [0o777, 0o277, 0o000])
def test_load_when_the_umask_takes_everything_away_then_its_owner_can_read_it_again(
    tmp_path: Path, umask: int
) -> None:
    former = os.umask(umask)
    try:
        (tmp_path / "state").mkdir()
        (tmp_path / "state").chmod(0o700)
        first = load(tmp_path)
    finally:
        os.umask(former)
    path = tmp_path / "state" / "kvdev" / "host.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load(tmp_path) == first


def test_load_when_many_race_then_all_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[HostIdentity] = []

    def one() -> None:
        barrier.wait()
        found.append(load(tmp_path))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_load_when_system_files_then_used(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "hostnqn").write_text(UUID_NQN + "\n")
    (etc / "hostid").write_text("99999999-2222-3333-4444-555555555555\n")
    identity = load(tmp_path)
    assert identity.host_nqn == UUID_NQN
    assert str(identity.host_id) == "99999999-2222-3333-4444-555555555555"
    assert identity.host_id_bytes == identity.host_id.bytes
    assert not (tmp_path / "state").exists()


def test_load_when_only_one_system_file_then_other_follows_from_it(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "hostnqn").write_text(UUID_NQN)
    assert str(load(tmp_path).host_id) == UUID_TEXT
    (etc / "hostnqn").write_text("nqn.2024-01.io.example:host")
    derived = load(tmp_path)
    assert derived.host_id == load(tmp_path).host_id != uuid.UUID(UUID_TEXT)
    (etc / "hostnqn").unlink()
    (etc / "hostid").write_text(UUID_TEXT)
    assert load(tmp_path).host_nqn == UUID_NQN


def test_load_when_given_then_overrides(tmp_path: Path) -> None:
    identity = load(tmp_path, host_nqn="nqn.2024-01.io.example:host", host_id=UUID_TEXT)
    assert (identity.host_nqn, str(identity.host_id)) == ("nqn.2024-01.io.example:host", UUID_TEXT)
    assert load(tmp_path, host_id=UUID_TEXT).host_nqn == UUID_NQN
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hostnqn", b"not an nqn", "hostnqn: expected nqn."),
        ("hostnqn", b"", "hostnqn: expected 1 to 223 bytes"),
        ("hostnqn", b"\xff\xfe", "expected UTF-8"),
        ("hostnqn", b"x" * 5000, "at most 4096 bytes"),
        ("hostid", b"zzz", "hostid: expected a UUID, got 'zzz'"),
        ("hostid", b"00000000-0000-0000-0000-000000000000", "other than all zeroes"),
    ],
)
def test_load_when_system_file_is_bad_then_error_names_it(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"host_nqn": 1, "host_id": 2}),
        json.dumps({"host_nqn": "x", "host_id": UUID_TEXT}),
        json.dumps({"host_nqn": UUID_NQN, "host_id": "x"}),
    ],
)
def test_load_when_state_file_is_bad_then_error_names_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state" / "kvdev" / "host.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(UsageError, match=r"host\.json: "):
        load(tmp_path)


def test_load_when_no_place_to_keep_it_then_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="XDG_STATE_HOME"):
        HostIdentity.load(system_dir=tmp_path, environ={})
    (tmp_path / "state").write_text("a file")
    with pytest.raises(UsageError, match="give the host NQN"):
        load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_load_when_system_file_is_unreadable_then_error(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "hostnqn").write_text(UUID_NQN)
    (etc / "hostnqn").chmod(0)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


def test_of_when_bad_then_usage_error() -> None:
    with pytest.raises(UsageError, match="host NQN"):
        HostIdentity.of("x")
    with pytest.raises(UsageError, match="host id"):
        HostIdentity.of(UUID_NQN, host_id="x")
    with pytest.raises(UsageError, match="host id"):
        HostIdentity(UUID_NQN, uuid.UUID(int=0))
