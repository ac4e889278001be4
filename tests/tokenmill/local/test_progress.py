"""The progress display of a run, and its summary."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from engine.engine import EngineStats
from engine.scheduler.latency import LatencyCounts
from schemas.jobs.outcome import Counts, JobStatus, Manifest, Usage
from tests.waiting import HANG_SECONDS
from tokenmill.local import progress
from tokenmill.local.progress import ProgressDisplay, RunSnapshot, describe
from tokenmill.local.summary import last_line, summary_table
from tokenmill.local.tracker import RotationObserver, RunTracker
from tokenmill.output import duration, size
from workers.observability.progress import WorkerCounts, WorkerProgress

RUNNING = RunSnapshot(
    phase="computing",
    total=200,
    done=60,
    before=10,
    failed=2,
    prompt_tokens=4000,
    cached_tokens=1000,
    output_tokens=2000,
    seconds=10.0,
    seconds_left=84.0,
)


def test_given_a_snapshot_when_described_then_rates_hits_and_eta_are_right() -> None:
    line = describe(RUNNING)

    assert "60/200 rows (2 failed)  5.0 rows/s" in line
    assert "1,250 rows/s" in describe(replace(RUNNING, total=20_000, done=12_510))
    assert "400 tok/s in" in line
    assert "200 tok/s out" in line
    assert "25 % of input cached" in line
    assert "about 1 min 24 s left" in line
    assert "left" not in describe(replace(RUNNING, seconds_left=None))


def test_given_answers_much_longer_than_those_that_ended_when_described_then_they_are_named() -> None:
    tail = replace(RUNNING, done=197, output_tokens=187 * 50 + 3 * 2100, running=3, running_tokens=3 * 2100)

    assert describe(tail).endswith("left  3 long answers of 2,100 tokens so far")
    assert "long" not in describe(replace(tail, output_tokens=187 * 600 + 3 * 2100)), "the others are as long"
    assert "long" not in describe(replace(tail, output_tokens=187 * 50 + 3 * 900, running_tokens=3 * 900))
    assert "  1 long answer of 2,100 tokens" in describe(replace(tail, running=1, running_tokens=2100))
    assert "long" not in describe(replace(tail, done=10)), "none has ended"


def test_given_a_workers_progress_when_tracked_then_tokens_of_answers_that_did_not_end_are_those_of_running_ones() -> (
    None
):
    engine = EngineStats(
        computed=9000, recomputed=0, cached=0, generated=7250, steps=2100, step_times=LatencyCounts(), preemptions=0,
        running=3, waiting=0, free_blocks=10, total_blocks=20,
    )  # fmt: skip
    counts = WorkerCounts(succeeded=19, completion_tokens=950)
    tracker = RunTracker()
    tracker.set_plan(Counts(total=22, pending=22))
    tracker.computing()
    RotationObserver(tracker.update, 0).progress(WorkerProgress(counts, engine, queued=0, shards_open=1))

    snapshot = tracker.snapshot()

    assert (snapshot.running, snapshot.running_tokens, snapshot.output_tokens) == (3, 6300, 7250)
    assert snapshot.long_answer == 2100


def test_given_nothing_computed_yet_when_described_then_only_the_phase_is_shown() -> None:
    assert describe(RunSnapshot("loading the model", total=200, done=50)) == "loading the model"


def test_given_no_row_that_ended_when_described_then_no_speed_of_rows_and_prompts_is_shown() -> None:
    began = replace(RUNNING, done=10, failed=0, prompt_tokens=0, cached_tokens=0, seconds_left=None)

    assert describe(began) == "10/200 rows  200 tok/s out  10.0 s"


def test_given_a_price_when_described_then_the_cost_so_far_is_shown() -> None:
    assert "cost 0.005556" in describe(replace(RUNNING, price_per_hour=2.0))
    assert "cost" not in describe(RUNNING)


def test_given_rows_that_generate_nothing_when_described_then_no_output_is_shown() -> None:
    embedding = replace(RUNNING, output_tokens=0)

    assert "400 tok/s in  25 % of input cached  10.0 s  about 1 min 24 s left" in describe(embedding)


def test_given_a_notebook_when_shown_then_one_display_is_updated_and_keeps_the_last_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    def show(renderable: Any, **_: Any) -> Any:
        shown.append(renderable._repr_mimebundle_(None, None)["text/html"])
        return SimpleNamespace(update=show)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=show))
    monkeypatch.setattr(progress, "NOTEBOOK_SECONDS", 0.01)
    last = replace(RUNNING, done=200)
    snapshots = [RunSnapshot("planning"), RUNNING]
    with ProgressDisplay(Console(force_jupyter=True), lambda: snapshots.pop(0) if snapshots else last):
        until = time.monotonic() + HANG_SECONDS
        while not any("60/200 rows" in html for html in shown) and time.monotonic() < until:
            time.sleep(0.01)

    assert "planning" in shown[0]
    assert "60/200 rows" in shown[1]
    assert "200/200 rows" in shown[-1]
    assert len(shown) >= 3


def test_given_no_terminal_when_shown_then_plain_lines_are_printed_and_a_phase_once() -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    snapshots = [RunSnapshot("planning"), RunSnapshot("planning"), RUNNING]

    with ProgressDisplay(console, lambda: snapshots.pop(0) if len(snapshots) > 1 else snapshots[0], interval=0.01):
        until = time.monotonic() + HANG_SECONDS
        while "60/200" not in text.getvalue() and time.monotonic() < until:
            time.sleep(0.01)

    lines = text.getvalue().splitlines()
    assert lines[0] == "planning"
    assert lines.count("planning") == 1
    assert "60/200 rows" in lines[1]


def test_given_a_terminal_when_shown_then_one_live_line_is_drawn_and_gone_at_the_end() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)

    with ProgressDisplay(console, lambda: RUNNING):
        pass

    assert "60/200 rows" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")  # the line is erased: what follows is the summary


def test_given_a_manifest_when_summed_up_then_rows_tokens_speed_and_cost_are_there() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    manifest = Manifest(
        job="j",
        status=JobStatus.COMPLETED,
        counts=Counts(total=1200, succeeded=1190, failed=10),
        usage=Usage(prompt=40_000, cached=10_000, completion=5_000, repeated=7),
        created_at=now,
        finished_at=now + timedelta(seconds=90),
        wall_seconds=90.0,
        engine_seconds=80.0,
        tokens_per_second=62.5,
        total_tokens_per_second=562.5,
        price_per_hour=2.0,
        cost=0.05,
    )
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(manifest))

    shown = {" ".join(line.split()) for line in text.getvalue().splitlines()}
    assert {"rows 1,200", "failed 10", "input tokens 40,000", "cached 10,000 (25 %)", "repeated 7"} <= shown
    assert {"output tokens/s 62", "wall time 1 min 30 s", "cost 0.0500 (at 2 an hour)"} <= shown
    assert last_line(manifest.counts, Path("out")) == "out/results: 1,190 of 1,200 rows succeeded, 10 failed"


def test_given_amounts_when_written_for_people_then_units_fit() -> None:
    assert [size(n) for n in (999, 98_362_432, 2.5e12)] == ["999 B", "98.4 MB", "2.5 TB"]
    assert [duration(s) for s in (0.04, 9.96, 75, 7320, 200_000)] == [
        "40 ms",
        "10.0 s",
        "1 min 15 s",
        "2 h 02 min",
        "2.3 days",
    ]
