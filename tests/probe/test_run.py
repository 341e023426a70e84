"""Jobs that run: the same totals as fio's for our job files, the same keys, and safety, verification, endings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.testing.vhost_peer import VhostPeer, VhostScript
from kvdev.uri import parse_device_uri
from kvdev_tools.connect import make_session
from kvdev_tools.main import run
from kvdev_tools.rig import running_rig
from tests.probe.conftest import FIO, WAIT_S, is_refused, job_files, run_fio

NEEDS_FIO = pytest.mark.skipif(FIO is None, reason="fio is not installed")
ENGINE = "io_uring"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:4f1f9a52-0d1f-4d3c-9a63-5a8f8d8c7b11"
RANDOM_TOTALS = {
    "05-mix-70-30",
    "06-seq-mix",
    "07-bsrange",
    "08-bssplit",
    "09-bs-per-direction",
    "21-runtime-rate",
}
"""Whose counts depend on random numbers or on time: compared by their shares."""
GAUSS = 5.0


def document_of(text: str) -> Any:
    return json.loads(text[text.index("{") :])


def probe(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    found = run(["probe", "--output-format=json+", *arguments])
    said = capsys.readouterr()
    assert found == code, said.err
    return document_of(said.out) if "{" in said.out else said.err


def totals(job: Any) -> dict[str, int]:
    out = {}
    for way in ("read", "write", "trim"):
        out[f"{way} ios"], out[f"{way} bytes"] = job[way]["total_ios"], job[way]["io_bytes"]
    out["syncs"] = job["sync"]["total_ios"]
    return out


@NEEDS_FIO
@pytest.mark.parametrize(
    "path", [each for each in job_files() if not is_refused(each)], ids=lambda path: path.stem
)
def test_job_file_when_run_by_both_then_the_totals_match(
    path: Path,
    probe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    environment = {"PROBE_FILE": str(probe_file), "PROBE_ENGINE": ENGINE}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = shutil.copytree(path.parent, tmp_path / "jobs")  # fio leaves files beside its jobs
    done = run_fio("--output-format=json+", path.name, cwd=folder, environment=environment)
    if done.returncode and "io_uring" in done.stdout + done.stderr:
        pytest.skip("fio has no io_uring here")
    theirs = document_of(done.stdout)["jobs"]
    ours = probe(capsys, str(path), f"--destroy={probe_file}")["jobs"]
    assert [job["jobname"] for job in ours] == [job["jobname"] for job in theirs]
    assert all(job["error"] == 0 for job in (*ours, *theirs))
    for mine, other in zip(ours, theirs, strict=True):
        if path.stem not in RANDOM_TOTALS:
            assert totals(mine) == totals(other)
            continue
        mine_ios, other_ios = mine["read"]["total_ios"], other["read"]["total_ios"]
        both = mine_ios + mine["write"]["total_ios"], other_ios + other["write"]["total_ios"]
        if path.stem == "21-runtime-rate":
            assert 0 < both[0] <= 201  # 200 in 200 ms and one at the start, fewer on a slow machine
        elif mine["write"]["total_ios"]:
            assert mine_ios / both[0] == pytest.approx(
                other_ios / both[1], abs=GAUSS * (0.25 / both[0] + 0.25 / both[1]) ** 0.5
            )
        else:
            assert mine["read"]["io_bytes"] == other["read"]["io_bytes"]
            assert mine_ios == pytest.approx(other_ios, rel=0.25)


def _offsets(folder: Path, name: str, size: int) -> np.ndarray[Any, Any]:
    lines = (folder / name).read_text().splitlines()
    places = np.array([int(line.split(",")[4]) // 4096 for line in lines])
    return np.bincount(places, minlength=size)


def _chi_square(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> tuple[float, int]:
    """Of two samples in the same classes, with neighbours joined until each class has ten; and its freedom."""
    groups, held = [], np.zeros(2)
    for pair in zip(first, second, strict=True):
        held = held + pair
        if held.sum() >= 10:
            groups.append(held)
            held = np.zeros(2)
    if groups:
        groups[-1] = groups[-1] + held
    table = np.array(groups)
    a, b = table.sum(axis=0)
    expected = table.sum(axis=1, keepdims=True) * np.array([[a, b]]) / (a + b)
    return float(((table - expected) ** 2 / expected).sum()), len(groups) - 1


@NEEDS_FIO
@pytest.mark.parametrize("spread", ["random", "zipf:1.2", "zipf:0.8", "pareto:0.3", "normal:20", "normal:0"])
def test_offsets_when_spread_by_both_then_chi_square_tells_no_difference(
    spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = [
        "--name=x",
        "--rw=randread",
        "--bs=4k",
        "--size=1m",
        "--io_size=32m",
        f"--random_distribution={spread}",
    ]
    job += ["--norandommap", "--randseed=12345", "--log_offset=1"]
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    run_fio(
        *job,
        "--filename=f",
        "--ioengine=psync",
        "--invalidate=0",
        "--write_lat_log=fio",
        cwd=tmp_path,
        environment={},
    )
    probe(capsys, *job, "--filename=mem:chi?size=1m", "--write_lat_log=ours")
    theirs = _offsets(tmp_path, "fio_lat.1.log", 256)
    ours = _offsets(tmp_path, "ours_lat.1.log", 256)
    assert theirs.sum() == ours.sum() == 8192
    # Which block is the most popular is chance: ranks are compared, not places.
    value, freedom = _chi_square(np.sort(theirs)[::-1], np.sort(ours)[::-1])
    assert value < freedom + 4 * (2 * freedom) ** 0.5, (value, freedom)


def _keys(value: Any, path: str = "") -> set[str]:
    """Paths of all keys; those that are values (percentiles' names count, bins' do not)."""
    if isinstance(value, dict):
        if path.endswith(("bins", "job options", "global options")):
            return {path}
        return {path, *(key for name, each in value.items() for key in _keys(each, f"{path}.{name}"))}
    if isinstance(value, list):
        return {key for each in value for key in _keys(each, f"{path}[]")} or {path}
    return {path}


JSON_JOBS = {
    "plain": [],
    "sync": ["--fsync=4"],
    "percentiles": ["--lat_percentiles=1", "--slat_percentiles=1", "--percentile_list=50:99.9"],
    "mixed": ["--unified_rw_reporting=mixed"],
    "both": ["--unified_rw_reporting=both"],
    "reduced": ["--gtod_reduce=1"],
    "described": ["--description=what it is"],
    "clones": ["--numjobs=2", "--group_reporting"],
    "verified": ["--verify=crc32c"],
    "steady": ["--steadystate=iops:50%", "--steadystate_duration=2", "--time_based", "--runtime=1"],
}


@NEEDS_FIO
@pytest.mark.parametrize("form", ["json", "json+"])
@pytest.mark.parametrize("job", JSON_JOBS)
def test_json_when_compared_with_fios_then_the_keys_are_the_same(
    job: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    arguments = [
        f"--filename={path}",
        "--name=x",
        "--rw=randrw",
        "--size=1m",
        "--bs=4k",
        f"--ioengine={ENGINE}",
    ]
    arguments += [f"--output-format={form}", *JSON_JOBS[job]]
    theirs = document_of(run_fio(*arguments, cwd=tmp_path, environment={}).stdout)
    assert run(["probe", *arguments]) == 0
    ours = document_of(capsys.readouterr().out)
    theirs_keys = {key for key in _keys(theirs) if ".disk_util" not in key}
    ours_keys = {key for key in _keys(ours) if ".disk_util" not in key} - {".kvdev version"}
    assert ours_keys == theirs_keys


@NEEDS_FIO
def test_terse_when_compared_with_fios_then_fields_stand_in_the_same_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"--filename={tmp_path / 'f'}",
        "--name=x",
        "--rw=randrw",
        "--size=1m",
        "--bs=4k",
        "--ioengine=psync",
    ]
    theirs = run_fio(*arguments, "--minimal", cwd=tmp_path, environment={}).stdout.strip().split(";")
    assert run(["probe", *arguments, "--minimal"]) == 0
    ours = capsys.readouterr().out.strip().split(";")
    assert len(ours) == len(theirs[: len(ours)])
    assert len(theirs) - len(ours) in (0, 9)  # its disk statistics come last, where it has them
    shape = [("%" in each, "=" in each) for each in ours]
    assert shape == [("%" in each, "=" in each) for each in theirs[: len(ours)]]
    assert ours[:3] == theirs[:3]
    for index in range(4):
        float(ours[5 + index])


@NEEDS_FIO
def test_text_when_compared_with_fios_then_lines_begin_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"--filename={tmp_path / 'f'}",
        "--name=x",
        "--rw=randrw",
        "--size=4m",
        "--bs=4k",
        "--ioengine=psync",
    ]

    def heads(text: str) -> set[str]:
        lines = [line for line in text.splitlines() if line.startswith((" ", "Run")) and "lat (" not in line]
        kept = [
            line
            for line in lines
            if "vda" not in line and "Disk stats" not in line and "samples=" not in line
        ]
        return {line.partition("=")[0].partition("(")[0].rstrip("| 0123456789.th[").strip() for line in kept}

    theirs = heads(run_fio(*arguments, cwd=tmp_path, environment={}).stdout)
    assert run(["probe", *arguments]) == 0
    ours = heads(capsys.readouterr().out)
    disks = {
        each for each in theirs - ours if each.startswith(("sd", "nvme", "dm", "md", "loop", "over", "xvd"))
    }
    assert ours == theirs - disks


def test_histograms_when_jobs_are_grouped_then_bins_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--name=x", "--rw=randread", "--filename=mem:m?size=1m", "--size=1m", "--bs=4k", "--numjobs=3"]
    merged = probe(capsys, *job, "--group_reporting")["jobs"]
    assert len(merged) == 1 and merged[0]["read"]["total_ios"] == 768
    assert sum(merged[0]["read"]["clat_ns"]["bins"].values()) == 768
    apart = probe(capsys, *job)["jobs"]
    assert [sum(each["read"]["clat_ns"]["bins"].values()) for each in apart] == [256] * 3


# --- safety ---------------------------------------------------------------------------------------


def _with_signature(path: Path, offset: int, pattern: bytes) -> None:
    data = bytearray(4 << 20)
    data[offset : offset + len(pattern)] = pattern
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("what", "offset", "pattern"),
    [
        ("GPT partition table", 512, b"EFI PART"),
        ("ext2/3/4 file system", 0x438, b"\x53\xef"),
        ("md RAID superblock 1.2", 4096, b"\xfc\x4e\x2b\xa9"),
        ("LVM physical volume", 512, b"LABELONE" + bytes(16) + b"LVM2 001"),
    ],
)
@pytest.mark.parametrize("rw", ["write", "randrw", "randtrim"])
def test_write_job_when_the_device_carries_something_then_it_is_refused_by_name(
    what: str, offset: int, pattern: bytes, rw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    _with_signature(path, offset, pattern)
    before = path.read_bytes()
    job = ["--name=w", f"--rw={rw}", f"--filename=file:{path}", "--bs=64k"]
    said = probe(capsys, *job, code=2)
    assert what in said and "name this device in --destroy" in said
    assert path.read_bytes() == before
    assert probe(capsys, *job, "--rw=read")["jobs"][0]["read"]["io_bytes"] == 4 << 20
    probe(capsys, *job, f"--destroy=file:{path}")


@pytest.mark.parametrize("rw", ["read", "write"])
def test_file_when_it_holds_something_then_it_is_not_made_larger(
    rw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    _with_signature(path, 512, b"EFI PART")
    job = ["--name=g", f"--rw={rw}", f"--filename={path}", "--bs=64k", "--size=8m"]
    said = probe(capsys, *job, code=2)
    assert "holds a GPT partition table" in said and path.stat().st_size == 4 << 20
    probe(capsys, *job, f"--destroy={path}")
    assert path.stat().st_size == 8 << 20


@pytest.mark.parametrize("size", [None, 0, 1 << 20])
def test_file_when_it_is_too_small_for_a_readonly_job_then_it_stays_as_it_is(
    size: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    if size is not None:
        path.write_bytes(bytes(size))
    job = ["--readonly", "--name=r", f"--filename={path}", "--size=8m", "--bs=64k", f"--destroy={path}"]
    said = probe(capsys, *job, code=2)
    assert f"r: size: {path} has {size or 0} bytes, expected {8 << 20}; leave --readonly out" in said
    assert (path.stat().st_size if path.exists() else None) == size


def test_file_when_a_job_only_reads_then_it_is_made_but_never_made_larger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    read = ["--name=r", "--rw=read", f"--filename={path}", "--bs=64k", "--size=2m"]
    said = probe(capsys, *read, code=2)
    assert f"r: size: {path} has {1 << 20} bytes, expected {2 << 20}" in said and "a smaller size" in said
    assert path.stat().st_size == 1 << 20
    # What a job of the same run writes may be read.
    jobs = probe(capsys, *read, "--name=w", "--rw=write", *read[2:], "--stonewall")["jobs"]
    assert [each["error"] for each in jobs] == [0, 0]
    path.unlink()
    assert probe(capsys, *read)["jobs"][0]["read"]["io_bytes"] == 2 << 20


@pytest.mark.parametrize("size", [None, 4096])
def test_file_when_it_cannot_be_laid_out_then_all_files_are_as_they_were(
    size: int | None, tmp_path: Path
) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    if size is not None:
        path.write_bytes(b"x" * size)
    job = ["--name=a", "--rw=write", f"--filename={other}", "--size=1m"]
    job += ["--name=b", "--rw=write", f"--filename={path}", "--size=8m"]
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20)); "
        "from kvdev_tools.main import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "probe", *job],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    assert done.returncode == 4 and "b: size: " in done.stderr and "lower size" in done.stderr, done.stderr
    assert (path.read_bytes() if path.exists() else None) == (None if size is None else b"x" * size)
    assert not other.exists()


def test_file_when_the_disk_has_no_room_for_it_then_nothing_is_laid_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    space = os.statvfs(tmp_path)
    more = 2 * space.f_blocks * space.f_frsize
    said = probe(capsys, "--name=b", "--rw=write", f"--filename={path}", f"--size={more}", code=4)
    assert "b: size: expected at most the " in said and "lower size" in said and not path.exists()


def test_tcp_namespace_when_it_carries_something_then_its_uri_in_destroy_frees_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_rig() as rig:
        subsystem = rig.provision(host_nqn=HOST_NQN, namespace_count=1, namespace_size_bytes=16 << 20)
        uri = f"{subsystem}?nsid=1"
        assert run(["volume", "create", f"vol:{uri}", "--name", "v", "--host-nqn", HOST_NQN]) == 0
        job = ["--name=t", f"--filename={uri}", "--rw=write", "--bs=1m", f"--host-nqn={HOST_NQN}"]
        assert "kvdev volume label of volume 'v'" in probe(capsys, *job, code=2)
        assert probe(capsys, *job, f"--destroy={uri}")["jobs"][0]["write"]["io_bytes"] == 16 << 20


def _volume(tmp_path: Path) -> tuple[str, list[Path]]:
    members = [tmp_path / "m0", tmp_path / "m1"]
    for each in members:
        each.write_bytes(bytes(8 << 20))
    uri = "vol:" + ",".join(f"file:{each}" for each in members)
    assert run(["volume", "create", uri, "--name", "vol", "--strip-size", "64KiB"]) == 0
    return uri, members


def test_volume_when_read_then_it_is_probed_and_when_written_then_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, members = _volume(tmp_path)
    job = ["--name=v", f"--filename={uri}", "--bs=256k", "--iodepth=4"]
    found = probe(capsys, *job, "--rw=randread")["jobs"][0]
    whole = found["read"]["io_bytes"]
    assert whole == 16 << 20
    said = probe(capsys, *job, "--rw=write", code=2)
    assert "is a volume" in said and "--destroy" in said
    said = probe(capsys, "--name=m", f"--filename=file:{members[0]}", "--rw=write", "--bs=64k", code=2)
    assert "kvdev volume label" in said
    done = probe(capsys, *job, "--rw=write", "--verify=crc32c", f"--destroy={uri}")["jobs"][0]
    assert done["write"]["io_bytes"] == done["read"]["io_bytes"] == 16 << 20


# --- verification ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [40, 5000, 131071, 1 << 20])
def test_verify_when_a_byte_was_changed_behind_its_back_then_the_offset_is_named(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    job = ["--name=v", f"--filename={path}", "--size=2m", "--rw=randwrite", "--bs=16k", "--verify=crc32c"]
    probe(capsys, *job)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    found = run(["probe", "--output-format=json", *job, "--verify_only"])
    said = capsys.readouterr()
    assert found == 5
    interval = place // 16384 * 16384
    where = place if place - interval >= 40 else interval
    assert f"verify: file:{path}: byte {where}: " in said.err and f"the first at {interval}" in said.err
    assert document_of(said.out)["jobs"][0]["error"] == 84


# --- targets --------------------------------------------------------------------------------------


def test_tcp_namespace_when_probed_then_reads_writes_trims_and_verification_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_rig() as rig:
        subsystem = rig.provision(host_nqn=HOST_NQN, namespace_count=2, namespace_size_bytes=16 << 20)
        one = f"{subsystem}?nsid=1"
        job = ["--name=t", f"--filename={one}", "--iodepth=8", f"--host-nqn={HOST_NQN}"]
        done = probe(capsys, *job, "--rw=randwrite", "--bs=128k", "--verify=crc32c")["jobs"][0]
        assert done["write"]["io_bytes"] == done["read"]["io_bytes"] == 16 << 20
        mixed = probe(
            capsys, *job, "--rw=randrw", "--bs=4k", "--size=4m", "--numjobs=2", "--group_reporting"
        )["jobs"][0]
        assert mixed["read"]["total_ios"] + mixed["write"]["total_ios"] == 2048
        assert probe(capsys, *job, "--rw=randtrim", "--bs=64k")["jobs"][0]["trim"]["total_ios"] == 256
        big = probe(capsys, *job, "--rw=read", "--bs=4m")["jobs"][0]
        assert big["read"]["total_ios"] == 4
        traffic = rig.traffic()
        assert traffic[1].bytes_written == 0 and traffic[0].bytes_written >= 16 << 20


def test_vhost_device_when_probed_then_reads_writes_and_verification_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with VhostPeer(tmp_path / "s", VhostScript(bytearray(4 << 20))):
        job = ["--name=v", f"--filename=vhost:{tmp_path}/s", "--iodepth=4", "--size=1m"]
        done = probe(capsys, *job, "--rw=randwrite", "--bs=16k", "--verify=crc32c")["jobs"][0]
        assert done["write"]["io_bytes"] == done["read"]["io_bytes"] == 1 << 20
        mixed = probe(capsys, *job, "--rw=randrw", "--bs=4k")["jobs"][0]
        assert mixed["read"]["total_ios"] + mixed["write"]["total_ios"] == 256


def test_errors_when_continued_after_then_they_are_counted_and_else_the_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = VhostScript(bytearray(4 << 20), fail_sectors=frozenset({800, 1600}))
    with VhostPeer(tmp_path / "s", script):
        job = ["probe", "--name=e", f"--filename=vhost:{tmp_path}/s", "--rw=read", "--bs=4k", "--size=1m"]
        job += ["--output-format=json"]
        assert run([*job, "--continue_on_error=io"]) == 4
        said = capsys.readouterr()
        assert "read at byte 409600: Input/output error" in said.err and "2 errors in all" in said.err
        found = document_of(said.out)["jobs"][0]
        assert found["error"] == 5 and found["read"]["total_ios"] == 254
        assert run(job) == 4
        said = capsys.readouterr()
        assert "1 errors in all" in said.err
        assert document_of(said.out)["jobs"][0]["read"]["total_ios"] == 100


def test_tcp_namespace_when_the_job_asks_for_more_than_it_has_then_it_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_rig() as rig:
        subsystem = rig.provision(host_nqn=HOST_NQN, namespace_count=1, namespace_size_bytes=16 << 20)
        uri = f"{subsystem}?nsid=1"
        with make_session(HOST_NQN, None, timeout_s=WAIT_S) as session:
            assert (
                session.open_device(parse_device_uri(uri), deadline=Deadline.after(WAIT_S)).size_bytes
                == 16 << 20
            )
        job = ["--name=t", f"--filename={uri}", f"--host-nqn={HOST_NQN}"]
        said = probe(capsys, *job, "--rw=read", "--size=17m", code=2)
        assert "size: expected offset and size within the 16777216 bytes" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--filename=file:/nowhere/at/all"], "cannot be opened"),
        (["--filename=mem:x"], "expected mem:x?size=SIZE"),
        (["--filename=mem:x?size=1m", "--size=2m"], "size: expected offset and size within"),
        (["--filename=mem:x?size=1m", "--bs=700"], "bs: expected multiples of 512 bytes"),
        (["--filename=mem:x?size=1m", "--offset=100"], "offset: expected a multiple of the block size"),
        (["--filename=vol:mem:x?size=64m#kv"], "expected a device or a volume, got the KV namespace"),
        (["--filename=mem:x?size=1m", "--offset=2m"], "x: offset: expected an offset below the 1048576"),
        (
            ["--filename=mem:x?size=1m", "--offset_increment=1m", "--numjobs=2"],
            "x: offset_increment: expected",
        ),
        (["--filename=mem:x?size=1m", "--bs=2m"], "x: bs: expected at most the 1048576 bytes"),
        (["--filename=mem:x?size=1m", "--section=zz"], "--section: no job file is named: expected a job"),
        (["--filename=nonsense:x"], "filename: expected one device or file"),
        (["--filename=mem:x?size=1m", "--cpus_allowed=4000"], "cpus_allowed"),
        ([], "expected at least one job"),
    ],
)
def test_job_when_it_cannot_run_then_one_line_says_why(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(["probe", *(["--name=x", *arguments] if arguments else [])])
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1


# --- endings and output ---------------------------------------------------------------------------


def test_interrupt_when_a_job_runs_then_it_ends_with_results(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    arguments = ["probe", "--name=x", f"--filename={path}", "--rw=randread", "--time_based", "--runtime=600"]
    arguments += ["--output-format=json", "--eta=always"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvdev_tools.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    ) as child:
        assert child.stderr is not None
        seen = b""
        while b"IOPS" not in seen:  # the status line: it is at work
            seen += child.stderr.read(1)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == 130
    job = document_of(out.decode())["jobs"][0]
    assert job["error"] == 0 and job["read"]["total_ios"] > 0


def test_wave_when_it_cannot_be_opened_then_the_results_of_those_before_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ["--name=a", "--filename=mem:a?size=1m", "--rw=read", "--stonewall", "--name=b", "--rw=read"]
    jobs += [f"--filename=vhost:{tmp_path}/nobody", "--stonewall", "--name=c", "--filename=mem:c?size=1m"]
    assert run(["probe", "--output-format=json", "--wait=1", *jobs]) == 3
    said = capsys.readouterr()
    found = document_of(said.out)["jobs"]
    assert [each["jobname"] for each in found] == ["a"] and found[0]["read"]["io_bytes"] == 1 << 20
    assert f"{tmp_path}/nobody" in said.err and "b and later have not" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (["--filename=mem:b?size=1m", "--size=2m"], "b: size: expected offset and size within"),
        (["--filename=mem:b?size=1m", "--bs=700"], "b: bs: expected multiples"),
        (["--filename=FILE", "--rw=write", "--bs=64k"], "b: rw=write: "),
    ],
)
def test_wave_when_its_device_of_this_machine_refuses_it_then_no_wave_runs(
    second: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, first = tmp_path / "f", tmp_path / "first"
    _with_signature(path, 512, b"EFI PART")
    first.write_bytes(bytes(1 << 20))
    jobs = [
        "--name=a",
        f"--filename={first}",
        "--rw=write",
        "--buffer_pattern=0xff",
        "--name=b",
        "--stonewall",
    ]
    found = probe(capsys, *jobs, *(each.replace("FILE", str(path)) for each in second), code=2)
    assert said in found and found.count("\n") == 1
    assert first.read_bytes() == bytes(1 << 20)


def test_interrupt_when_a_later_wave_is_opened_then_the_results_of_those_before_are_printed(
    tmp_path: Path,
) -> None:
    jobs = [
        "probe",
        "--output-format=json",
        "--wait=600",
        "--name=a",
        "--filename=mem:a?size=1m",
        "--rw=read",
    ]
    jobs += ["--name=b", "--stonewall", "--rw=read"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with subprocess.Popen(
            [sys.executable, "-m", "kvdev_tools.main", *jobs, f"--filename=vhost:{tmp_path}/s"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        ) as child:
            peer, _ = silent.accept()
            with peer:
                assert peer.recv(1)  # it asks, and is not answered
                child.send_signal(signal.SIGINT)
                out, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == 130
    assert [each["jobname"] for each in document_of(out.decode())["jobs"]] == ["a"]


def test_exitall_when_one_job_ends_then_the_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    endless = ["--name=long", "--rw=randread", "--time_based", "--runtime=600"]
    jobs = probe(
        capsys, "--filename=mem:e?size=1m", "--exitall", "--name=short", "--number_ios=10", *endless
    )["jobs"]
    assert jobs[0]["read"]["total_ios"] == 10 and jobs[1]["error"] == 0


def test_steady_state_when_iops_hold_still_then_the_job_ends_before_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [
        "--name=s",
        "--filename=mem:s?size=1m",
        "--rw=randread",
        "--rate_iops=50",
        "--time_based",
        "--runtime=600",
    ]
    # Within any limit: that it ends is tested, not how steady this machine is.
    found = probe(capsys, *job, "--steadystate=iops:100%", "--steadystate_duration=2")["jobs"][0]
    assert found["steadystate"]["attained"] == 1 and len(found["steadystate"]["data"]["iops"]) == 2


def test_latency_target_when_no_depth_holds_it_then_the_job_fails_and_when_all_do_the_deepest_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [
        "--name=l",
        "--filename=mem:l?size=1m",
        "--rw=randread",
        "--iodepth=16",
        "--time_based",
        "--runtime=600",
    ]
    job += ["--latency_window=20ms", "--latency_percentile=50"]
    found = probe(capsys, *job, "--latency_target=10s")["jobs"][0]
    assert found["latency_depth"] == 16 and found["error"] == 0
    capsys.readouterr()
    assert run(["probe", *job, "--latency_target=1us", "--bs=512k", "--output-format=json"]) == 4
    said = capsys.readouterr()
    assert "latency_target: not held at any depth" in said.err
    assert document_of(said.out)["jobs"][0]["error"] == 62


def test_status_interval_when_given_then_results_so_far_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ["--name=i", "--filename=mem:i?size=1m", "--rw=randread", "--time_based", "--runtime=600"]
    job += ["--steadystate=iops:100%", "--steadystate_duration=2", "--minimal", "--status-interval=500ms"]
    assert run(["probe", *job]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) >= 3 and all(line.startswith("3;fio-3.33;i;0;0;") for line in lines)


def test_logs_when_averaged_then_windows_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = ["--name=w", "--filename=mem:w?size=1m", "--rw=randrw", "--rate_iops=500,500", "--io_size=1m"]
    probe(capsys, *job, "--write_bw_log", "--write_iops_log=other", "--write_lat_log", "--log_avg_msec=50")
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"w_bw.1.log", "other_iops.1.log", "w_lat.1.log", "w_clat.1.log", "w_slat.1.log"}
    rows = [
        [int(cell) for cell in line.split(",")] for line in (tmp_path / "w_bw.1.log").read_text().splitlines()
    ]
    assert sum(row[1] for row in rows) * 1024 * 50 // 1000 == pytest.approx(1 << 20, rel=0.02)
    assert {row[2] for row in rows} == {0, 1} and all(row[0] % 50 == 0 and len(row) == 6 for row in rows)


@pytest.mark.parametrize(
    ("option", "named"),
    [("--output", "--output: "), ("--write_bw_log", "o: write_bw_log: "), ("--html", "--html: ")],
)
def test_output_when_it_cannot_be_written_then_that_is_said_before_anything_runs(
    option: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    job = ["--name=o", f"--filename={path}", "--rw=write", "--number_ios=8", "--buffer_pattern=0xff"]
    sweep = ["sweep", "--sizes=4k", "--depths=1"] if option == "--html" else []
    assert run(["probe", *sweep, *job, f"{option}={tmp_path}/none/out"]) == 2
    said = capsys.readouterr().err
    assert named in said and "none/out" in said and said.count("\n") == 1
    assert path.read_bytes() == bytes(1 << 20)


def test_output_when_it_becomes_full_then_the_results_go_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ["--name=o", "--filename=mem:o?size=1m", "--rw=read", "--output=/dev/full"]
    assert run(["probe", "--output-format=json", *job]) == 4
    said = capsys.readouterr()
    assert document_of(said.out)["jobs"][0]["read"]["io_bytes"] == 1 << 20
    assert "--output: /dev/full: cannot be written" in said.err


def test_output_when_the_jobs_are_refused_then_no_file_is_left(tmp_path: Path) -> None:
    job = ["--name=o", "--filename=mem:o?size=1m", "--offset=100", "--output-format=json"]
    assert run(["probe", *job, f"--output={tmp_path}/out", f"--write_bw_log={tmp_path}/log"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_output_when_a_file_is_named_then_all_formats_go_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    job = ["--name=o", "--filename=mem:o?size=1m", "--rw=read"]
    assert run(["probe", *job, f"--output={path}", "--output-format=normal,terse,json"]) == 0
    assert capsys.readouterr().out == ""
    text = path.read_text()
    assert "Run status group 0" in text and "\n3;fio-3.33;o;" in text and document_of(text)["jobs"]
