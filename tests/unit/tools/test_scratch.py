"""Temporary folders: their own end, and what a sweep takes and leaves."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev_tools.scratch import LOCK_NAME, PREFIX, scratch_folder, sweep


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(parent: Path, name: str) -> Path:
    folder = parent / f"{PREFIX}{name}"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").touch()
    (folder / LOCK_NAME).touch()
    return folder


def test_folder_when_its_block_ends_then_it_is_gone_with_all_in_it(parent: Path) -> None:
    with scratch_folder() as folder, scratch_folder() as other:
        assert folder != other and folder.parent == other.parent == parent
        (folder / "file").write_text("x")
        sweep()
        assert (folder / "file").exists() and other.exists(), "their owner lives"
    assert list(parent.iterdir()) == []
    with pytest.raises(ValueError, match="as it was"), scratch_folder():
        raise ValueError("as it was")
    assert list(parent.iterdir()) == []


def test_sweep_takes_what_nobody_holds_and_leaves_everything_else(parent: Path) -> None:
    dead = left_behind(parent, "dead")
    live = left_behind(parent, "live")
    unknown = parent / f"{PREFIX}unknown"
    unknown.mkdir()
    elsewhere = left_behind(parent / "elsewhere", "dead")
    link = parent / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    odd = parent / f"{PREFIX}odd"
    odd.mkdir()
    (odd / LOCK_NAME).symlink_to(dead / LOCK_NAME)
    file = parent / f"{PREFIX}file"
    file.touch()
    lock = os.open(live / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with scratch_folder():
            assert not dead.exists()
        assert all(path.exists() for path in (live, unknown, elsewhere, odd, file)) and link.is_symlink()
    finally:
        os.close(lock)
    sweep()
    assert not live.exists()


def test_folder_when_none_can_be_made_then_place_and_remedy_are_named(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "none"))
    with (
        pytest.raises(UsageError, match=f"temporary folder: {parent}/none.*No such file.*TMPDIR"),
        scratch_folder(),
    ):
        pass
