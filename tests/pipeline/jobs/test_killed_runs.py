"""A run that is killed, again and again, at any moment: the same command goes on, and commits stand."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.jobs.summaries import list_jobs
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import OutputLocked
from tests.pipeline.run_a_job import run_a_job

ROWS = 60
REFUSED = "part-00000.parquet"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """60 lines, each seventh of them broken."""
    path = tmp_path / "in.jsonl"
    lines = []
    for row in range(ROWS):
        body = {"model": "tiny", "prompt": f"prompt number {row} " * 3, "max_tokens": 8}
        line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append("{broken" if row % 7 == 6 else json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def parts_of(out: Path) -> dict[str, bytes]:
    folder = out / "results"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def shards_done(out: Path) -> int:
    """How many parts hold answers; the others are the refused rows of the plan's segments."""
    tables = [pq.read_table(path) for path in sorted((out / "results").glob("*.parquet"))]
    return sum("succeeded" in table["status"].to_pylist() for table in tables)


def check_what_stands(out: Path) -> None:
    """Every moment after a kill: readers and listings work, each row at most once."""
    parts = parts_of(out)
    assert all(name.startswith("part-") for name in parts)
    rows = [row for name in sorted(parts) for row in pq.read_table(out / "results" / name)["row"].to_pylist()]
    assert len(set(rows)) == len(rows)
    store = FolderStore(out, read_only=True)
    for summary in list_jobs(store):
        assert summary.problem is None


@pytest.mark.slow
def test_given_kills_at_any_moment_when_the_run_is_repeated_then_it_ends_whole(tmp_path: Path, source: Path) -> None:
    """Of eight lives every second one is killed soon after a commit. None may commit more than one shard, of many."""
    out, chance, committed, done = tmp_path / "out", random.Random(5), {}, 0
    out.mkdir()
    for life in range(8):
        permits = FORK.Semaphore(life % 2)
        run = FORK.Process(target=run_a_job, args=(out, source), kwargs={"permits": permits})
        run.start()
        while life % 2 and shards_done(out) == done:
            assert run.is_alive(), f"it ended with code {run.exitcode}"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.25)
        assert run.is_alive(), f"it ended with code {run.exitcode}"
        run.kill()
        run.join()
        check_what_stands(out)
        now = parts_of(out)
        assert {name: now.get(name) for name in committed} == committed, "a committed part changed or vanished"
        committed, done = now, shards_done(out)
    assert done == 4
    manifest = run_a_job(out, source) or JobLedger(FolderStore(out, read_only=True)).manifest()
    assert manifest is not None
    assert manifest.counts.total == ROWS
    table = pq.read_table(out / "results").to_pylist()
    assert sorted(row["row"] for row in table) == list(range(ROWS))
    assert {row["row"] for row in table if row["error_code"] == "invalid_json"} == set(range(6, ROWS, 7))
    assert all(row["custom_id"] == f"id-{row['row']}" for row in table if row["status"] == "succeeded")
    assert manifest.repeated_at_most >= manifest.usage.repeated == 0
    assert not list(out.glob(".tmp*")), "temporaries of the killed runs are swept"


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    first = FORK.Process(target=run_a_job, args=(out, source), kwargs={"permits": FORK.Semaphore(0)})
    first.start()
    while not (out / "results" / REFUSED).exists():
        assert first.is_alive()
        time.sleep(0.005)
    try:
        with pytest.raises(OutputLocked, match=f"pid {first.pid}"):
            run_a_job(out, source)
    finally:
        first.kill()
        first.join()
    manifest = run_a_job(out, source)
    assert manifest is not None
    assert manifest.counts.total == ROWS


def test_a_finished_run_again_computes_nothing(tmp_path: Path, source: Path) -> None:
    first = run_a_job(tmp_path / "out", source)
    before = parts_of(tmp_path / "out")
    again = run_a_job(tmp_path / "out", source)
    assert again == first
    assert parts_of(tmp_path / "out") == before


@pytest.mark.slow
def test_fresh_starts_anew_without_old_objects(tmp_path: Path, source: Path) -> None:
    first = run_a_job(tmp_path / "out", source)
    again = run_a_job(tmp_path / "out", source, fresh=True)
    assert first is not None
    assert again is not None
    assert again.job != first.job
    assert again.counts == first.counts
    assert again.usage.repeated == 0
