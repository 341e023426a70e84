"""Job files: ours are taken and refused as fio takes and refuses them, and mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev.errors import UsageError
from kvdev_tools.main import run
from kvdev_tools.probe.job import Job, Plan, make_plan
from kvdev_tools.probe.jobfile import Reader
from kvdev_tools.probe.option import OPTIONS, Use
from tests.probe.conftest import FIO, is_refused, job_files, run_fio

ENVIRONMENT = {"PROBE_FILE": "/dev/null", "PROBE_ENGINE": "psync"}


def plan_of(*arguments: str, environment: dict[str, str] | None = None) -> Plan:
    reader = Reader(environment=environment or ENVIRONMENT)
    for name in reader.take_arguments(arguments):
        reader.take_file(name)
    return make_plan(reader.text)


def job_of(*arguments: str) -> Job:
    return plan_of("--name=x", *arguments).jobs[0]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_job_files_when_counted_then_there_are_thirty() -> None:
    assert len(job_files()) == 30


@pytest.mark.parametrize("path", job_files(), ids=lambda path: path.stem)
def test_job_file_when_parsed_then_it_is_taken_or_refused_with_file_and_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    code = run(["probe", "--parse-only", str(path)])
    said = capsys.readouterr().err
    assert code == (2 if is_refused(path) else 0), said
    assert f"{path}:" in said or not is_refused(path)


@pytest.mark.skipif(FIO is None, reason="fio is not installed")
@pytest.mark.parametrize("path", job_files(), ids=lambda path: path.stem)
def test_job_file_when_fio_parses_it_then_it_decides_the_same(path: Path) -> None:
    done = run_fio("--parse-only", path.name, cwd=path.parent, environment=ENVIRONMENT)
    assert (done.returncode != 0) == is_refused(path), done.stdout + done.stderr


def test_sections_when_global_changes_between_them_then_each_job_has_what_was_global_before_it(
    tmp_path: Path,
) -> None:
    text = "[global]\nbs=8k\n[a]\nrw=read\n[global]\nbs=16k\n[b]\nrw=write\n[c]\nbs=32k\n"
    jobs = plan_of(write(tmp_path / "j.fio", text)).jobs
    assert [job.blocks[0].low for job in jobs] == [8192, 16384, 32768]
    assert [job.name for job in jobs] == ["a", "b", "c"]


def test_command_line_when_options_come_before_the_first_name_then_they_are_global() -> None:
    jobs = plan_of(
        "--bs=8k", "--name=a", "--rw=randread", "--name", "b", "--bs", "16k", "--time_based=0"
    ).jobs
    assert [(job.name, job.rw.name, job.blocks[0].low) for job in jobs] == [
        ("a", "randread", 8192),
        ("b", "read", 16384),
    ]


def test_include_when_beside_the_file_then_its_options_belong_to_the_section(tmp_path: Path) -> None:
    write(tmp_path / "more.inc", "bs=64k\n; nothing\nrw=randwrite # written\n")
    job = plan_of(write(tmp_path / "j.fio", "[a]\ninclude more.inc\niodepth=4\n")).jobs[0]
    assert (job.blocks[1].low, job.rw.name, job.iodepth) == (65536, "randwrite", 4)


def test_include_when_it_includes_itself_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at most 8 files within each other"):
        plan_of(
            write(tmp_path / "j.fio", "[a]\ninclude j.inc\n"), write(tmp_path / "j.inc", "include j.inc\n")
        )


def test_include_when_the_file_is_not_there_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"j.fio:2: include none.inc: there is no such file"):
        plan_of(write(tmp_path / "j.fio", "[a]\ninclude none.inc\n"))


def test_variable_when_it_is_not_set_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"j.fio:2: \$\{NOT_THERE\}: this environment variable is not set"):
        plan_of(write(tmp_path / "j.fio", "[a]\nfilename=${NOT_THERE}\n"))


def test_kv_namespace_when_named_in_a_file_then_its_sign_starts_no_comment(tmp_path: Path) -> None:
    text = "[a]\nfilename=vol:file:/x,file:/y#kv # the store\nrw=read\n"
    assert plan_of(write(tmp_path / "j.fio", text)).jobs[0].filename == "vol:file:/x,file:/y#kv"


def test_stonewall_when_between_jobs_then_waves_and_groups_count_on() -> None:
    jobs = plan_of(
        "--name=a", "--numjobs=2", "--name=b", "--name=c", "--stonewall", "--name=d", "--new_group"
    ).jobs
    assert [job.wave_index for job in jobs] == [0, 0, 0, 1, 1]
    assert [job.group_index for job in jobs] == [0, 0, 0, 1, 2]
    assert len({job.seed for job in jobs[:2]}) == 2


def test_unknown_option_when_it_resembles_one_then_the_error_names_that() -> None:
    with pytest.raises(UsageError, match=r"'iodpeth': unknown option; did you mean iodepth\?"):
        plan_of("--name=x", "--iodpeth=4")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--nrfiles=4", "nrfiles: kvdev probe does not have this option of fio"),
        ("--ioengine=null", "ioengine: expected one of"),
        ("--filename=/a:/b", "filename: expected one device or file, got 2"),
        ("--iodepth=4.5", "iodepth: expected a whole number"),
        ("--bs=4x", "bs: expected a size"),
        ("--bs=4k,4k,4k,4k", "bs: expected at most three parts"),
        ("--size=101%", "size: expected 0% to 100%"),
        ("--runtime=1x", "runtime: expected a time"),
        ("--bssplit=4k/50:8k/60", "bssplit: expected percentages that sum to 100"),
        ("--bsrange=4k", "bsrange: expected LOW-HIGH"),
        ("--cpus_allowed=3-1", "cpus_allowed: expected CPU numbers"),
        ("--verify_pattern=xyz", "verify_pattern: expected bytes"),
        ("--steadystate=iops", "steadystate: expected iops:LIMIT"),
        ("--percentile_list=99:101", "percentile_list: expected 0 to 100"),
        ("--time_based", "time_based: expected a runtime"),
        ("--size=(1+", "size: expected an expression"),
        ("--size=(1/0)", "size: expected a divisor that is not 0"),
        ("--rw=kvget", "pages of a KV namespace are measured by `kvdev replay`"),
        ("--rw=randread:0", "rw: expected 1 or more I/Os per offset"),
        ("--verify=pattern", "verify=pattern: expected verify_pattern"),
        (
            "--verify=crc32c --verify_interval=1000",
            "verify_interval: expected a divisor of the block size 4096",
        ),
        (
            "--verify=crc32c --verify_interval=8192",
            "verify_interval: expected a divisor of the block size 4096",
        ),
        ("--verify=md5", "verify: expected 0, crc32c, pattern"),
        ("--numjobs=0", "numjobs: expected 1 to 1024"),
    ],
)
def test_value_when_it_is_wrong_then_the_line_names_option_and_what_is_expected(
    argument: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        job_of("--rw=randrw", *argument.split())
    assert said in str(caught.value)


@pytest.mark.parametrize("line", ["[]", "[ ]", "["])
def test_section_when_it_has_no_name_then_it_is_refused_by_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"j.fio:2: .*expected a job's name in the brackets"):
        plan_of(write(tmp_path / "j.fio", f"; none\n{line}\nrw=read\n"))


def test_section_when_no_file_has_it_then_the_line_names_it_and_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write(tmp_path / "a.fio", "[a]\nrw=read\n"), write(tmp_path / "b.fio", "[b]\nrw=read\n")
    assert run(["probe", "--parse-only", "--section=a", "--section=b", first, second]) == 0
    assert run(["probe", "--parse-only", "--section=a", "--section=zz", first, second]) == 2
    assert f"--section: {first}, {second}: expected a job of the name 'zz'" in capsys.readouterr().err


def test_rates_when_both_kinds_are_given_then_they_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rate, rate_iops: expected one of the two"):
        job_of("--rate=1m", "--rate_iops=10")


def test_readonly_when_a_job_writes_then_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "--parse-only", "--readonly", "--name=w", "--rw=randwrite"]) == 2
    assert "w: rw: expected a job that only reads" in capsys.readouterr().err


def test_option_when_it_has_no_meaning_here_then_it_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "--parse-only", "--name=x", "--thread", "--invalidate=1"]) == 0
    said = capsys.readouterr().err
    assert "thread: has no meaning here and is ignored" in said
    assert "invalidate: has no meaning here and is ignored" in said


@pytest.mark.parametrize(
    ("text", "kb_base", "size"),
    [
        ("4k", 1024, 4096),
        ("4K", 1024, 4096),
        ("4kb", 1024, 4096),
        ("4ki", 1024, 4096),
        ("4kib", 1024, 4000),
        ("4k", 1000, 4000),
        ("4kib", 1000, 4096),
        ("0x1000", 1024, 4096),
        ("(8*512)", 1024, 4096),
        ("(2 * 2k)", 1024, 4096),
        ("(2^12)", 1024, 4096),
        ("((1+3)*1k)", 1024, 4096),
        ("(9k % 5k)", 1024, 4096),
    ],
)
def test_size_when_written_in_any_unit_then_it_is_fios(text: str, kb_base: int, size: int) -> None:
    assert job_of(f"--bs={text}", f"--kb_base={kb_base}").blocks[0].low == size


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("2", 2000000),
        ("2s", 2000000),
        ("1m", 60000000),
        ("3ms", 3000),
        ("7us", 7),
        ("1h", 3600000000),
        ("(1+1)", 2000000),
        ("(2*3ms)", 6000),
    ],
)
def test_time_when_written_in_any_unit_then_it_is_microseconds(text: str, time_us: int) -> None:
    assert job_of(f"--runtime={text}").runtime_us == time_us


def test_block_sizes_when_given_by_direction_then_parts_left_out_follow_fio() -> None:
    job = job_of("--rw=randrw", "--bs=4k,8k")
    assert [each.low for each in job.blocks] == [4096, 8192, 8192]
    job = job_of("--rw=randrw", "--bs=,16k,")
    assert [each.low for each in job.blocks] == [4096, 16384, 4096]
    job = job_of("--rw=randrw", "--bssplit=4k/25:8k/:16k/")
    assert job.blocks[0].splits == ((4096, 25), (8192, 37), (16384, 37))


def test_options_when_listed_then_every_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "--help-options"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in OPTIONS)
    assert all(use.value in listed for use in Use)
