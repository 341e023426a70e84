"""Volumes of the provision file: made once, never over something else, and finished after an interruption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.session import Session
from kvdev.store.lock import boot_id, start_ticks
from kvdev.store.media import UNIT_BYTES
from kvdev_tools.provision.document import Deployment, build_deployment
from kvdev_tools.provision.source import load_text
from kvdev_tools.provision.volumes import (
    VolumeSeen,
    VolumeState,
    Writer,
    make_step,
    plan_volume,
    see_volume,
    writer_of,
)

TIMEOUT_S = 20.0


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as opened:
        yield opened


def site(
    folder: Path, *, engines: str = "llama: {volume: pool, geometry: small, tensor_parallel: 2}"
) -> Deployment:
    for index in range(2):
        path = folder / f"m{index}"
        if not path.exists():
            path.touch()
            with path.open("r+b") as file:
                file.truncate(16 << 20)
    text = f"""\
version: 1
name: x
hosts: {{h: {{engines: {{{engines}}}}}}}
volumes:
  pool: {{members: ["file:{folder}/m0", "file:{folder}/m1"], strip_size: 64KiB}}
"""
    return build_deployment(load_text(text))


def see(deployment: Deployment) -> VolumeSeen:
    with Session() as session:
        return see_volume(session, deployment.volumes["pool"], timeout_s=TIMEOUT_S)


def make(deployment: Deployment) -> int:
    """Plan and do it; how many steps it took."""
    plan = plan_volume(deployment, see(deployment), is_coming=False)
    assert not plan.problems, plan.problems
    with Session() as session:
        for step in plan.steps:
            make_step(session, step, timeout_s=TIMEOUT_S)
    return len(plan.steps)


def test_a_volume_is_made_once_and_grows_by_what_the_file_adds(tmp_path: Path) -> None:
    one = "llama: {volume: pool, geometry: small, tensor_parallel: 2, quota_per_rank: 2MiB}"
    assert make(site(tmp_path, engines=one)) == 3
    assert make(site(tmp_path, engines=one)) == 0
    two = f"{one}, qwen: {{volume: pool, geometry: medium}}"
    assert make(site(tmp_path, engines=two)) == 1
    seen = see(site(tmp_path, engines=two))
    assert [each.name for each in seen.namespaces] == ["llama.0", "llama.1", "qwen.0"]
    other = one.replace("small", "medium").replace("2MiB", "4MiB")
    plan = plan_volume(site(tmp_path, engines=other), see(site(tmp_path, engines=other)), is_coming=False)
    assert len(plan.problems) == 2 and "model_id" in plan.problems[0]
    smaller = one.replace("2MiB", "1MiB")
    plan = plan_volume(site(tmp_path, engines=smaller), see(site(tmp_path, engines=smaller)), is_coming=False)
    assert "quota_per_rank: expected 32 pages, got 64" in plan.problems[0]


def test_a_checksum_in_the_file_is_made_and_held(tmp_path: Path) -> None:
    one = "llama: {volume: pool, geometry: small, quota_per_rank: 2MiB, checksum: nh64}"
    plan = plan_volume(site(tmp_path, engines=one), see(site(tmp_path, engines=one)), is_coming=False)
    assert "; checksum: nh64" in "\n".join(plan.steps[-1].details())
    assert make(site(tmp_path, engines=one)) == 2
    assert [each.checksum for each in see(site(tmp_path, engines=one)).namespaces] == ["nh64"]
    other = one.replace(", checksum: nh64", "")
    plan = plan_volume(site(tmp_path, engines=other), see(site(tmp_path, engines=other)), is_coming=False)
    assert "KV namespace pool#llama.0: checksum: expected crc32c, got nh64" in plan.problems[0]


def interrupt(folder: Path, *, labelled: int) -> None:
    """The bytes that creating leaves when it ends after so many labels, before the superblock."""
    for index in range(2):
        with (folder / f"m{index}").open("r+b") as file:
            start = UNIT_BYTES if index < labelled else 0
            file.seek(start)
            file.write(bytes(4 * UNIT_BYTES - start))


@pytest.mark.parametrize("labelled", [0, 1, 2])
def test_an_interrupted_creation_is_finished_by_the_next_apply(tmp_path: Path, labelled: int) -> None:
    deployment = site(tmp_path)
    make(deployment)
    interrupt(tmp_path, labelled=labelled)
    seen = see(deployment)
    assert seen.state is VolumeState.ABSENT and len(seen.unfinished) == labelled, seen.reason
    assert make(deployment) == 3
    assert see(deployment).state is VolumeState.PRESENT


def test_anything_else_on_a_member_is_never_overwritten(tmp_path: Path, session: Session) -> None:
    deployment = site(tmp_path)
    step = plan_volume(deployment, see(deployment), is_coming=False).steps[0]
    with (tmp_path / "m1").open("r+b") as file:
        file.write(b"XFSB")
    seen = see(deployment)
    assert seen.state is VolumeState.REFUSED and "XFS" in seen.reason
    with pytest.raises(UsageError, match="XFS"):
        make_step(session, step, timeout_s=TIMEOUT_S)
    with (tmp_path / "m1").open("r+b") as file:
        file.write(bytes(4))
    make(deployment)
    # A label is lost, but the superblock is there: pages may be too.
    with (tmp_path / "m1").open("r+b") as file:
        file.write(bytes(UNIT_BYTES))
    seen = see(deployment)
    assert seen.state is VolumeState.REFUSED and "has no label, while other members have one" in seen.reason


def test_members_in_another_order_or_of_another_volume_are_refused(tmp_path: Path) -> None:
    deployment = site(tmp_path)
    make(deployment)
    spec = deployment.volumes["pool"]
    with Session() as session:
        turned = dataclasses.replace(spec, members=spec.members[::-1])
        assert "another order" in see_volume(session, turned, timeout_s=TIMEOUT_S).reason
    with Session() as session:
        renamed = dataclasses.replace(spec, name="lake")
        assert "are those of volume 'pool'" in see_volume(session, renamed, timeout_s=TIMEOUT_S).reason
    with Session() as session:
        wider = dataclasses.replace(spec, strip_size_bytes=128 << 10)
        assert "strip_size: expected 128 KiB" in see_volume(session, wider, timeout_s=TIMEOUT_S).reason


def test_a_writer_is_told_by_its_process_and_boot(tmp_path: Path, session: Session) -> None:
    deployment = site(tmp_path)
    make(deployment)
    seen = see_volume(session, deployment.volumes["pool"], timeout_s=TIMEOUT_S)
    assert seen.volume is not None
    opened = seen.volume.open_namespace("llama.0", mode="owner", deadline=Deadline.after(TIMEOUT_S))
    record = seen.volume.namespace("llama.0", deadline=Deadline.after(TIMEOUT_S)).record
    assert writer_of(record) is Writer.LIVE
    assert record.owner_boot_id == boot_id() and record.owner_start_ticks == start_ticks(record.owner_pid)
    # The same pid of another process, a pid that is gone, another boot.
    assert (
        writer_of(dataclasses.replace(record, owner_start_ticks=record.owner_start_ticks + 1)) is Writer.DEAD
    )
    assert writer_of(dataclasses.replace(record, owner_pid=2**22 + 1)) is Writer.DEAD
    assert writer_of(dataclasses.replace(record, owner_boot_id=bytes(16))) is Writer.UNKNOWN
    opened.close(deadline=Deadline.after(TIMEOUT_S))
    record = seen.volume.namespace("llama.0", deadline=Deadline.after(TIMEOUT_S)).record
    assert writer_of(record) is Writer.NONE
