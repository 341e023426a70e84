"""What the lab's scripts do with a guest that hangs before it has printed a word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.interop.conftest import LAB_SCRIPTS, free_port


@pytest.mark.parametrize("script", ["run-initiator.sh", "run-hosted.sh"])
def test_lab_when_guest_hangs_at_boot_then_boots_again_and_gives_up_by_name(
    script: str, tmp_path: Path
) -> None:
    for name in ("vmlinuz", "initiator.img", "target.img", "job.sh"):
        (tmp_path / name).touch()
    qemu = tmp_path / "bin" / "qemu-system-x86_64"
    qemu.parent.mkdir()
    qemu.write_text(f"#!/bin/sh\necho started >>{tmp_path}/starts\nexec sleep 600\n")
    qemu.chmod(0o755)
    args = [str(free_port()), "nqn.x"] if script == "run-initiator.sh" else [str(tmp_path)]
    done = subprocess.run(
        ["sh", str(LAB_SCRIPTS / script), *args],
        env={
            **os.environ,
            "LAB": str(tmp_path),
            "BOOT_S": "1",
            "PATH": f"{qemu.parent}:{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 125, done.stderr
    assert (tmp_path / "starts").read_text() == "started\n" * 3
    assert "once more, 2 of 3" in done.stderr
    assert "the guest did not boot in 1 s, 3 times" in done.stderr
    assert not list(tmp_path.glob("init.*")) and not list(tmp_path.glob("hosted.*"))
