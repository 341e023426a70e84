"""The replay on real SPDK, provisioned from a file: over NVMe/TCP, and over vhost-user-blk.

Two spdk_tgt: a target (malloc, uring, raid0, lvol), and a host that attaches it over TCP and shows a raid0.
KVDEV_SPDK_TGT=/path/to/spdk_tgt names the binary (26.05 or later; started without huge pages, on one core each).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev_tools import process
from kvdev_tools.main import run
from tests.interop.spdk import Spdk, free_port

pytestmark = pytest.mark.interop

NQN = "nqn.2026-01.io.kvdev:real"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-2222-2222-222222222222"
AS_HOST = ["--host-nqn", HOST_NQN]
MIB = 1 << 20
FILE_MIB = 192
REQUEST_COUNT = int(os.environ.get("KVDEV_SPDK_REQUESTS", "60"))
"""Of the generated trace, pages of 64 KiB; more of them for figures."""
PROGRESS_BYTES = 8 * MIB
"""Written since the replay began, when something is killed: far from its end, and far from its start."""
TIMEOUT_S = 5
PATIENT_S = 120
BOUND_S = 90
"""By then a replay has given up, however busy the machine is; what it took is printed."""


@dataclass
class Site:
    """A target and a host, and the file that provisions them."""

    file: Path
    target: Spdk
    host: Spdk
    port: int

    def uri(self, way: str) -> str:
        """The KV namespace of that way: each has its own, on the same volume."""
        if way == "tcp":
            return f"vol+tcp://127.0.0.1:{self.port}/{NQN}#tcp.0"
        return f"vol:vhost:{self.host.folder}/vhost.0#vhost.0"

    def written_bytes(self) -> int:
        """What the target counted at its namespaces."""
        with self.target.client() as client:
            stats = client.call("bdev_get_iostat")
        return sum(each["bytes_written"] for each in stats["bdevs"] if each["name"] in ("r0", "u2", "m0"))


def site_text(target: Spdk, host: Spdk, port: int, *, is_lasting: bool) -> str:
    """Members: a raid0 of two uring bdevs, an lvol on a third, and memory or, where bytes have to last, a fourth."""
    folder = target.folder
    fourth = f"uring: {{file: {folder}/u3.img}}" if is_lasting else f"malloc: {{size: {2 * FILE_MIB}MiB}}"
    return f"""\
version: 1
name: {target.folder.name.replace("_", "-")}-{port}
targets:
  array0:
    rpc: {target.path}
    transport: {{max_io_size: 1MiB, in_capsule_data_size: 8KiB}}
    bdevs:
      u0: {{uring: {{file: {folder}/u0.img}}}}
      u1: {{uring: {{file: {folder}/u1.img}}}}
      u2: {{uring: {{file: {folder}/u2.img}}}}
      m0: {{{fourth}}}
    raids:
      r0: {{strip_size: 64KiB, members: [u0, u1]}}
    lvstores:
      lvs0: {{bdev: u2, cluster_size: 1MiB, lvols: {{l0: {{size: {FILE_MIB}MiB, thin: true}}}}}}
    subsystems:
      {NQN}:
        hosts: [gpu0]
        listeners: ["127.0.0.1:{port}"]
        namespaces: {{1: r0, 2: lvs0/l0, 3: m0}}
hosts:
  gpu0:
    rpc: {host.path}
    nqn: {HOST_NQN}
    controllers:
      Nvme0: {{target: array0, subsystem: "{NQN}", ctrlr_loss_timeout_s: -1, reconnect_delay_s: 1}}
    raids:
      R0: {{strip_size: 128KiB, members: [Nvme0n1, Nvme0n2, Nvme0n3]}}
    engines:
      tcp: {{volume: pool, geometry: small, quota_per_rank: 160MiB}}
      vhost: {{volume: pool, geometry: small, quota_per_rank: 160MiB}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
    strip_size: 128KiB
    durability: none
"""


@contextlib.contextmanager
def running_site(folder: Path, *, is_lasting: bool) -> Iterator[Site]:
    for name in ("u0", "u1", "u2", "u3"):
        (folder / f"{name}.img").touch()
        # The lvol's store has metadata of its own, the raid is as large as the lvol.
        os.truncate(folder / f"{name}.img", 2 * FILE_MIB * MIB if name in ("u2", "u3") else FILE_MIB * MIB)
    # Malloc bdevs come out of SPDK's own memory, and its pools take most of a gibibyte.
    target = Spdk(folder, "target", core=0, memory_mib=1024 if is_lasting else 2048)
    host = Spdk(folder, "host", core=1)
    site = Site(folder / "site.yaml", target, host, free_port())
    site.file.write_text(site_text(target, host, site.port, is_lasting=is_lasting))
    try:
        target.start()
        host.start()
        yield site
    finally:
        host.close()
        target.close()


def apply(site: Site, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = run(["provision", "apply", str(site.file), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err + captured.out
    done: dict[str, Any] = json.loads(captured.out)
    assert done["is_done"], done
    return done


@dataclass
class Replay:
    """A replay in a process of its own."""

    child: subprocess.Popen[bytes]
    folder: Path
    name: str

    @property
    def errors(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()

    @property
    def report(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads((self.folder / f"{self.name}.out").read_text())
        return shown

    def wait(self, timeout_s: float) -> int:
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still running: {self.errors[-2000:]}") from None


@contextlib.contextmanager
def replaying(site: Site, way: str, *, name: str, timeout_s: float, seed: int = 1) -> Iterator[Replay]:
    folder = site.file.parent
    arguments = ["replay", site.uri(way), "--geometry", "small", "--requests", str(REQUEST_COUNT), *AS_HOST]
    arguments += ["--timeout", str(timeout_s), "--seed", str(seed), "--json"]
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        child = process.start("kvdev_tools.main", arguments, stdout=out, stderr=err)
    try:
        yield Replay(child, folder, name)
    finally:
        process.stop(child)


def replayed(site: Site, way: str, *, name: str, seed: int = 1) -> dict[str, Any]:
    with replaying(site, way, name=name, timeout_s=PATIENT_S, seed=seed) as replay:
        assert replay.wait(600) == 0, replay.errors
        return replay.report


def wait_until_busy(site: Site, replay: Replay, before: int) -> None:
    deadline = Deadline.after(120)
    while site.written_bytes() < before + PROGRESS_BYTES:
        assert replay.child.poll() is None, f"it ended before anything was killed: {replay.errors}"
        deadline.check("the replay to write")


def check_pages(site: Site, way: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = run(["page", "verify", site.uri(way), "--json", *AS_HOST])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    verified: dict[str, Any] = json.loads(captured.out)
    assert verified["pages_damaged"] == 0
    return verified


def show(capsys: pytest.CaptureFixture[str], what: str, report: dict[str, Any]) -> None:
    with capsys.disabled():
        print(
            f"\n{what}: {report['requests']} requests, {report['pages_requested']} pages of 64 KiB, hit rate "
            f"{report['hit_rate']:.3f}, restore {report['restore_gb_per_s'] or 0:.2f} GB/s, offload "
            f"{report['offload_gb_per_s'] or 0:.2f} GB/s, {report['mismatches']} mismatches, "
            f"{report['page_errors']} unreadable, {report['elapsed_s']:.1f} s"
        )


def test_replay_over_tcp_and_over_vhost_restores_every_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_site(tmp_path, is_lasting=False) as site:
        began = time.monotonic()
        done = apply(site, capsys)
        with capsys.disabled():
            print(f"\nprovisioned: {done['steps']} steps in {time.monotonic() - began:.1f} s")
        assert apply(site, capsys)["steps"] == 0
        for way in ("tcp", "vhost"):
            for name in (f"{way}-first", f"{way}-again"):
                report = replayed(site, way, name=name)
                show(capsys, name, report)
                assert report["mismatches"] == report["page_errors"] == 0
                assert report["requests"] == REQUEST_COUNT
                assert report["pages_restored"] > 0
            assert check_pages(site, way, capsys)["pages_checked"] > 0


VICTIMS = [("tcp", "target"), ("vhost", "target"), ("vhost", "host")]


@pytest.mark.parametrize(("way", "victim"), VICTIMS)
def test_replay_when_spdk_is_killed_and_stays_away_then_a_clear_error_and_the_next_run_resumes(
    way: str, victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_site(tmp_path, is_lasting=True) as site:
        apply(site, capsys)
        before = site.written_bytes()
        killed: Spdk = getattr(site, victim)
        with replaying(site, way, name="killed", timeout_s=TIMEOUT_S) as replay:
            wait_until_busy(site, replay, before)
            killed.kill()
            began = time.monotonic()
            code = replay.wait(BOUND_S)
            took_s = time.monotonic() - began
        with capsys.disabled():
            print(f"\n{way}, {victim} killed: code {code} after {took_s:.1f} s: {replay.errors.strip()}")
        lines = replay.errors.splitlines()
        assert code == 3, replay.errors
        assert len(lines) == 1 and lines[0].startswith("kvdev: ") and ": lost after " in lines[0]

        bring_back(site, killed, capsys)
        verified = check_pages(site, way, capsys)
        report = replayed(site, way, name="resumed")
        show(capsys, f"{way}, resumed on {verified['pages_checked']} pages", report)
        assert verified["pages_checked"] > 0
        assert report["mismatches"] == report["page_errors"] == 0
        assert report["pages_restored"] >= verified["pages_checked"] / 2


@pytest.mark.parametrize(("way", "victim"), VICTIMS)
def test_replay_when_spdk_is_killed_and_comes_back_then_it_goes_on_by_itself(
    way: str, victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_site(tmp_path, is_lasting=True) as site:
        apply(site, capsys)
        before = site.written_bytes()
        killed: Spdk = getattr(site, victim)
        with replaying(site, way, name="killed", timeout_s=PATIENT_S) as replay:
            wait_until_busy(site, replay, before)
            killed.kill()
            bring_back(site, killed, capsys)
            code = replay.wait(600)
        assert code == 0, replay.errors
        show(capsys, f"{way}, {victim} killed and back", replay.report)
        assert replay.report["mismatches"] == replay.report["page_errors"] == 0
        assert replay.report["requests"] == REQUEST_COUNT
        check_pages(site, way, capsys)


def bring_back(site: Site, killed: Spdk, capsys: pytest.CaptureFixture[str]) -> None:
    """Start it again, bare, and apply the file again: its bytes are on files."""
    killed.start()
    apply(site, capsys)
