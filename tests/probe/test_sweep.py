"""The size × depth map: every pair is there, in text, JSON and HTML that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdev_tools.main import run

JOB = ["--filename=mem:s?size=1m", "--rw=randrw", "--number_ios=64"]


def test_sweep_when_run_then_every_pair_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--sizes=16k,4k", "--depths=1,8,2"]
    assert run(["probe", "sweep", *axes, "--output-format=json", *JOB]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    pairs = [(cell["block_size_bytes"], cell["depth"]) for cell in cells]
    assert pairs == [(bs, depth) for bs in (4096, 16384) for depth in (1, 2, 8)]
    for cell in cells:
        assert (
            cell["iops"] > 0 and cell["bw_bytes_per_s"] > 0 and cell["clat_ns_p99"] >= cell["clat_ns_p50"] > 0
        )


def test_sweep_when_html_is_named_then_it_is_one_file_without_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.html"
    arguments = ["--sizes=4k,64k", "--depths=1,4", f"--html={path}", *JOB]
    assert run(["probe", "sweep", *arguments, "--description=<b>&"]) == 0
    text = capsys.readouterr().out
    assert text.count("depth 1") == text.count("depth 4") == 3 and "bandwidth:" in text
    page = path.read_text()
    assert page.count("<td style=") == 12 and "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)


def test_sweep_when_a_job_file_is_given_then_its_job_is_swept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j.fio"
    path.write_text("[global]\nfilename=mem:s?size=1m\nbs=8k\n[x]\nrw=read\nnumber_ios=8\n")
    assert run(["probe", "sweep", "--sizes=4k", "--depths=2", "--output-format=json", str(path)]) == 0
    assert [cell["block_size_bytes"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [4096]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--sizes=4x", *JOB], "--sizes: expected a size"),
        (["sweep", "--depths=0", *JOB], "--depths: expected 1 to 4096"),
        (["sweep", "--output-format=terse", *JOB], "expected normal or json of a sweep"),
        (["sweep", *JOB, "--name=a", "--name=b"], "sweep: expected one job, got 2"),
        (["--depths=1", "--name=a", *JOB], "expected `kvdev probe sweep` with them"),
        (["sweep", "--sizes=2m", *JOB], "bs: expected at most the 1048576 bytes"),
    ],
)
def test_sweep_when_it_is_wrong_then_one_line_says_why(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["probe", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_sweep_when_it_writes_to_what_holds_something_then_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(512) + b"EFI PART" + bytes((1 << 20) - 520))
    job = [f"--filename=file:{path}", "--rw=write", "--number_ios=4", "--sizes=4k", "--depths=1"]
    assert run(["probe", "sweep", *job]) == 2
    assert "GPT partition table" in capsys.readouterr().err
    assert run(["probe", "sweep", *job, f"--destroy=file:{path}"]) == 0
