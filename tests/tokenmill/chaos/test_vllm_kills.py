"""A run on vLLM, killed six times in the middle: one row for each request, parts that stay, and texts of our engine."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.tokenmill.chaos.killing import Attack, KillReport, run_undisturbed
from tests.tokenmill.chaos.running import Setup, write_requests
from tests.tokenmill.chaos.watching import answers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

ROWS, KILLS = 48, 6
GREEDY = 4
"""One of so many rows is greedy (`running.KINDS`)."""


def setup(model: Path, folder: Path, engine: str) -> Setup:
    """Runs on one engine; small shards, so that parts are committed one after the other."""
    limits = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "4"), ("TOKENMILL_CHECKPOINT_SECONDS", "0.2"))
    return Setup(f"tiny={model}", folder, ("--engine", engine, "--max-num-seqs", "4", "--threads", "1"), limits)


def test_six_kills_lose_nothing_and_greedy_rows_go_on_as_they_were(vllm_model_folder: Path, tmp_path: Path) -> None:
    source, jobs = tmp_path / "requests.jsonl", list[Path]()
    vllm = setup(vllm_model_folder, tmp_path, "vllm")
    write_requests(source, "tiny", ROWS, 160)
    whole = run_undisturbed(vllm, source, tmp_path / "whole")
    report = KillReport()
    while len(report.lives) < KILLS:  # on a busy machine a job may end before its last kill
        assert len(jobs) < 4, f"{len(jobs)} jobs ended after {len(report.lives)} kills"
        jobs.append(tmp_path / f"killed-{len(jobs)}")
        attack = Attack(vllm, source, jobs[-1], whole, random.Random(3), signal.SIGKILL)
        attack.run(KILLS - len(report.lives), 0.2, report)

    ours = answers_of_our_engine(vllm_model_folder, tmp_path, source)
    for out in jobs:
        got = answers(out)
        assert set(got) == set(whole.answers) == set(ours), "one row for each request"
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["counts"]["failed"] == 1
        assert manifest["usage"]["repeated"] <= manifest["repeated_at_most"]
        assert manifest["models"][0]["engine"] == "vllm"
        assert manifest["engine"]["engine"] == "vllm"
        assert "sampled ones" in manifest["engine"]["resumed_rows"]
        greedy = [row for row in got if row % GREEDY == 0]
        assert sum(got[row] == whole.answers[row] for row in greedy) >= 0.95 * len(greedy)
        assert sum(got[row] == ours[row] for row in greedy) >= 0.9 * len(greedy)

    mixed = setup(vllm_model_folder, tmp_path, "tokenmill").start(source, jobs[0])
    _, err = mixed.communicate()
    assert mixed.returncode != 0, "answers of two engines are never mixed in one job"
    assert "engine" in err


def answers_of_our_engine(model: Path, folder: Path, source: Path) -> dict[int, tuple[Any, ...]]:
    process = setup(model, folder, "tokenmill").start(source, folder / "ours")
    _, err = process.communicate()
    assert process.returncode == 0, err
    return answers(folder / "ours")


def test_a_quantized_checkpoint_of_ours_runs_in_vllm(vllm_model_folder: Path, tmp_path: Path) -> None:
    small, out = tmp_path / "int8", tmp_path / "out"
    quantize = ("quantize", str(vllm_model_folder), "--to", "int8", "--output", str(small))
    subprocess.run([sys.executable, "-m", "tokenmill", *quantize], check=True, cwd=tmp_path)
    source = tmp_path / "requests.jsonl"
    write_requests(source, "tiny", 8, 16)
    process = setup(small, tmp_path, "vllm").start(source, out)
    _, err = process.communicate()
    assert process.returncode == 0, err
    rows = pq.read_table(out / "results").to_pylist()
    assert sum(row["status"] == "succeeded" for row in rows) == 7
    assert sum(row["completion_tokens"] or 0 for row in rows) > 50
