"""The store's benchmark runs at toy size: every figure is there, and the look-ups answer the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_store_bench_runs_at_toy_size(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        str(ROOT / "bench" / "store.py"),
        "--toy",
        "--json",
        str(result),
        "--seed",
        "5",
    ]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    assert {"cpu", "kernel", "python", "numpy", "kvdev", "seed", "load_average"} <= set(report["machine"])
    assert [cell["pages"] for cell in report["cells"]] == [1000, 10000]
    for cell in report["cells"]:
        assert all(cell[name] > 0 for name in cell if name not in ("pages", "answers", "huge_page_bytes"))
    assert [(cell["what"], cell["page_bytes"] >> 10) for cell in report["pages"]] == [
        ("put", 256),
        ("get", 256),
        ("put", 4096),
        ("get", 4096),
    ]
    for cell in report["pages"]:
        assert len(cell["pair_ratios"]) == 2 and min(cell["pair_ratios"]) > 0
        assert cell["gb_per_s"] > 0 and cell["raw_gb_per_s"] > 0
        # A burst of puts costs one commit: the flush at its end.
        assert cell["commits_per_round"] == (1 if cell["what"] == "put" else 0)
    assert set(report["targets"]) == {
        "open_s_per_10m",
        "bytes_per_page",
        "contains_m_per_s",
        "prefix_us",
        "write_amplification",
        "put_256_kib_ratio",
        "get_256_kib_ratio",
        "put_4096_kib_ratio",
        "get_4096_kib_ratio",
    }
    assert "from 1000 to 10000 pages, x10: open x" in done.stdout
    assert report["cells"][1]["answers"] in done.stdout
    assert report["pages"][0]["answers"] in done.stdout
    assert not list(tmp_path.iterdir()) or list(tmp_path.iterdir()) == [result], "the files are removed"
