"""Files that are kept: whatever the umask takes away, their owner can use them again."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.files import open_lock
from kvdev.store.lock import OwnerLock, WriterLock, runtime_folder
from kvdev.target.state import StateFile
from kvdev_tools.provision.lock import _locked
from kvdev_tools.scratch import LOCK_NAME, scratch_folder


@pytest.fixture(params=[0o777, 0o277, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_lock_files_and_their_folder_are_their_owners_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    OwnerLock("v", "namespace-1").release()
    assert WriterLock("writers-1", members=[], byte=0).take()
    StateFile(str(tmp_path / "state")).close()
    with _locked(tmp_path / "provision.lock"):
        pass
    with scratch_folder() as scratch:
        assert (mode_of(Path(scratch)), mode_of(Path(scratch) / LOCK_NAME)) == (0o700, 0o600)
    folder = runtime_folder()
    assert mode_of(folder) == 0o700
    files = [folder / "namespace-1.lock", folder / "writers-1.lock", tmp_path / "state.lock"]
    assert {path.name: mode_of(path) for path in [*files, tmp_path / "provision.lock"]} == {
        "namespace-1.lock": 0o600,
        "writers-1.lock": 0o600,
        "state.lock": 0o600,
        "provision.lock": 0o600,
    }


def test_lock_file_that_an_umask_has_closed_is_opened_again_and_a_link_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o640)
    os.close(open_lock(path))
    assert mode_of(path) == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_lock(tmp_path / "link")
    with pytest.raises(FileExistsError):
        open_lock(path, os.O_EXCL)
