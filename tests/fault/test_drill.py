"""Drills on devices as operators put them on: over TCP and files, under volumes, from the command line."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.block.device import flush, read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import CommandError, UncertainWriteError, UsageError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.namespace import NvmeNamespace
from kvdev.session import Session
from kvdev.testing.recovery import nothing_left_over
from kvdev.testing.target import running_target
from kvdev.testing.vhost_peer import VhostPeer, VhostScript
from kvdev_tools.main import run
from tests.unit.tools.test_cli_json import documented, keys_of

HOST = HostIdentity.of("nqn.2024-01.io.example:drill")
TINY = ["--layers", "1", "--kv-heads", "1", "--head-size", "4"]
SIZE_BYTES = 8 << 20


def soon() -> Deadline:
    return Deadline.after(60)


def make_file(folder: Path, name: str) -> Path:
    path = folder / name
    path.touch()
    os.truncate(path, SIZE_BYTES)
    return path


def test_namespace_over_tcp_when_it_has_a_drill_then_others_of_the_subsystem_have_not(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    data = rng.integers(0, 256, 64 << 10, dtype=np.uint8)
    with running_target(namespace_count=2) as target:
        with nothing_left_over(), Session(host=HOST) as kv:
            plain = kv.open_device(f"{target.uri}?nsid=1")
            drilled = kv.open_device(f"drill+{target.uri}?nsid=1&drill-error=1&drill-on=writes")
            other = kv.open_device(f"drill+{target.uri}?nsid=2&drill-drop=1&drill-drop-ms=1&drill-on=writes")
            with pytest.raises(CommandError, match=r"drill\+tcp.*write fault"):
                write_blocks(drilled, 0, data, soon())
            with pytest.raises(UncertainWriteError):
                write_blocks(other, 0, data, soon())
            write_blocks(plain, 0, data, soon())
            assert np.array_equal(read_blocks(drilled, 0, 16, soon()), data)
            assert isinstance(drilled, NvmeNamespace)
            # Fused pairs pass, and the queue beneath is the drill's own: nothing is outstanding on it.
            assert drilled.compare_and_write(0, data[:4096].tobytes(), bytes(4096), soon())
        assert target.service.defect_count == target.service.fault_log_count == 0
    said = [record.getMessage() for record in caplog.records if record.name == "kvdev.drill"]
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "kvdev.drill")
    assert [f"nsid={nsid}" in line for line, nsid in zip(said, (1, 2), strict=False)] == [True, True]
    assert "error=1" in said[0] and "on=writes" in said[0] and "seed=1" in said[0]
    assert "over" in said[2] and "1 failed" in said[2]


def test_vhost_device_when_it_has_a_drill_then_its_commands_meet_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 256, 64 << 10, dtype=np.uint8)
    with VhostPeer(str(tmp_path / "s"), VhostScript(bytearray(SIZE_BYTES))), Session() as kv:
        uri = f"drill+vhost:{tmp_path}/s?drill-delay-ms=1&drill-reorder=4&drill-corrupt=0.5&drill-on=reads"
        device = kv.open_device(uri)
        for _ in range(4):
            write_blocks(device, 5, data, soon())
            flush(device, soon())
        wrong = [
            int(
                np.unpackbits(
                    read_blocks(device, 5, len(data) // device.block_size_bytes, soon()) ^ data
                ).sum()
            )
            for _ in range(16)
        ]
        assert set(wrong) == {0, 1}


def test_device_when_its_drilled_name_owns_a_namespace_then_its_plain_name_is_locked_out(
    tmp_path: Path,
) -> None:
    path = make_file(tmp_path, "m0")
    assert run(["volume", "create", f"vol:file:{path}", "--name", "pool"]) == 0
    assert run(["namespace", "create", f"vol:file:{path}#kv", *TINY]) == 0
    with Session() as kv, Session() as other:
        kv.open_kv_namespace(f"vol:drill+file:{path}?drill-delay-ms=1#kv")
        with pytest.raises(UsageError, match="owned by process"):
            other.open_kv_namespace(f"vol:file:{path}#kv")


def test_volume_when_a_member_has_a_drill_then_what_could_do_harm_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, "m0")
    plain, faulty = f"vol:file:{path}", f"vol:drill+file:{path}?drill-error=0.001"
    before = path.read_bytes()
    assert run(["volume", "create", faulty, "--name", "pool"]) == 2
    assert "create a volume: expected a device without a drill" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert run(["volume", "create", plain, "--name", "pool"]) == 0
    assert run(["namespace", "create", f"{faulty}#kv", *TINY]) == 2
    assert run(["namespace", "create", f"{plain}#kv", *TINY]) == 0
    before = path.read_bytes()
    assert run(["volume", "check", faulty, "--repair"]) == 2
    assert run(["namespace", "delete", f"{faulty}#kv", "--yes", "kv"]) == 2
    capsys.readouterr()
    misleading = f"vol:drill+file:{path}?drill-corrupt=0.000001"
    assert run(["replay", f"{misleading}#kv", *TINY, "--requests", "2"]) == 2
    assert "reads of it may be wrong" in capsys.readouterr().err
    assert path.read_bytes() == before


def replayed(uri: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, list[str]]:
    code = run(["replay", f"{uri}#kv", *TINY, "--requests", "12", "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out), shown.err.splitlines()


def test_replay_when_members_are_slow_and_out_of_order_or_lie_then_no_page_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [make_file(tmp_path, f"m{index}") for index in range(2)]
    plain = "vol:" + ",".join(f"file:{path}" for path in paths)
    assert run(["volume", "create", plain, "--name", "pool"]) == 0
    assert run(["namespace", "create", f"{plain}#kv", *TINY]) == 0
    capsys.readouterr()

    def faulty(options: str) -> str:
        return "vol:" + ",".join(f"drill+file:{path}?{options}" for path in paths)

    code, report, said = replayed(faulty("drill-delay-ms=2&drill-delay=0.2&drill-reorder=16"), capsys)
    assert (code, report["mismatches"], report["page_errors"]) == (0, 0, 0)
    assert report["pages_restored"] > 0
    # The replay's other processes say so too, each for itself.
    assert sum("DRILL on file:" in line and "made on purpose" in line for line in said) >= 2
    code, report, said = replayed(faulty("drill-corrupt=0.05&drill-damage=allow"), capsys)
    assert report["mismatches"] == 0, "a page with a wrong bit is never handed out"
    assert report["page_errors"] > 0 and code == 5


def test_replay_when_reads_fail_then_they_are_misses_and_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, "m")
    assert run(["volume", "create", f"file:{path}", "--name", "pool"]) == 0
    assert run(["namespace", "create", f"vol:file:{path}#kv", *TINY]) == 0
    capsys.readouterr()
    code, report, _ = replayed(f"vol:file:{path}", capsys)
    assert (code, report["failed_reads"]) == (0, 0)
    for seed in range(1, 30):  # the first one that spares what opening reads
        faulty = f"vol:drill+file:{path}?drill-error=0.03&drill-on=reads&drill-seed={seed}"
        code = run(["replay", f"{faulty}#kv", *TINY, "--requests", "12", "--json"])
        report = json.loads(capsys.readouterr().out or "{}")
        if report.get("failed_reads"):
            break
    assert code == 0 < report["failed_reads"]
    assert (report["requests"], report["mismatches"], report["page_errors"]) == (12, 0, 0)
    assert 0 < report["pages_restored"] == report["pages_requested"] - report["pages_written"]
    code, report, _ = replayed(f"vol:file:{path}", capsys)
    assert (code, report["failed_reads"], report["mismatches"]) == (0, 0, 0)
    assert report["hit_rate"] == 1, "what could not be read was put again"


def test_drill_command_when_run_then_says_what_it_did_as_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, "device")
    arguments = [
        "drill",
        f"file:{path}",
        "--seconds",
        "0.5",
        "--error",
        "0.3",
        "--corrupt",
        "0.3",
        "--seed",
        "9",
    ]
    assert run([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert keys_of(found) == documented("drill")
    assert found["uri"] == f"drill+file:{path}?drill-seed=9&drill-error=0.3&drill-corrupt=0.3"
    assert found["reads"] > 0 and found["failed_reads"] == found["injected"]["failed"]
    assert found["wrong_reads"] == found["injected"]["corrupted"]
    lines = [line for line in shown.err.splitlines() if line.startswith("kvdev: DRILL on file:")]
    assert len(lines) == 2 and "seed=9" in lines[0] and "over" in lines[1]
    assert not any(path.read_bytes()), "it only reads"
    assert run([*arguments, "--uri-only"]) == 0
    assert capsys.readouterr().out.strip() == found["uri"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "at least one fault"),
        (["--error", "2"], "chance from 0 to 1"),
        (["--corrupt-write", "0.1"], "damage=allow"),
        (["--delay-ms", "abc"], "1 to 60000"),
    ],
)
def test_drill_command_when_its_faults_are_wrong_then_one_line_and_nothing_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert run(["drill", f"file:{tmp_path}/absent", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_drill_command_when_faults_are_in_the_name_and_in_options_then_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["drill", "drill+file:/absent?drill-error=0.1", "--error", "0.2"]) == 2
    assert "got both" in capsys.readouterr().err
