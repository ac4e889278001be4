"""Parts of the simulator: a worker's speed, a trace, and an oracle scheduler."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest

from pipeline.planner.shard_cut import ShardLimits, cut
from pipeline.simulator.lower_bound import OracleJob
from pipeline.simulator.oracle import best
from pipeline.simulator.simulation import EPOCH
from pipeline.simulator.trace import BadTrace, Pattern, TraceSettings, draw_trace, read_trace
from pipeline.simulator.worker_model import EXAMPLE, BadWorkerModel, Decoding, WorkerModel, read_worker_model
from pipeline.simulator.workers import SimJob, SimulatedJobOrder, SimWorker
from schemas.jobs.job import Tier
from schemas.requests.limits import PlanSettings

STEPS = WorkerModel(
    name="steps of 20 ms",
    prefill=100_000.0,
    decode=(Decoding(batch=1, tokens_per_second=50.0), Decoding(batch=8, tokens_per_second=400.0)),
    cold_start_seconds=60.0,
)
"""Its steps take 20 ms, whatever is in them."""
PATTERNS: tuple[Pattern, ...] = ("bursts", "ramp", "daynight", "spot-storm")


def sim_job(rows: int, answer: float = 100.0, tier: Tier = Tier.STANDARD) -> SimJob:
    return SimJob(SimulatedJobOrder("j", "t", tier, None, EPOCH), 0.0, None, rows, rows, 1.0, answer, answer + 1)


# -- a worker


def test_given_measured_batches_then_steps_between_them_take_what_lies_between() -> None:
    model = WorkerModel(
        name="m", prefill=1e9,
        decode=(Decoding(batch=1, tokens_per_second=100.0), Decoding(batch=11, tokens_per_second=550.0)),
    )  # fmt: skip
    assert model.step_seconds(1) == 0.01
    assert model.step_seconds(6) == pytest.approx(0.015)
    assert model.step_seconds(11) == pytest.approx(0.02)
    assert model.rows_per_second(99, 1.0, 100.0) == pytest.approx(5.5, rel=1e-3), "no batch is larger than the largest"


def test_given_an_idle_worker_then_a_shard_takes_its_steps() -> None:
    # 100 tokens each, 8 at a time: two batches for 16 rows, of 2 s each.
    for rows, seconds in ((1, 2.0), (8, 2.0), (16, 4.0), (80, 20.0)):
        worker = SimWorker(0, STEPS, 0.0, 0.0)
        assert worker.take(sim_job(rows), 0, rows, True, 100.0).finish == pytest.approx(100 + seconds, rel=0.01)


def test_given_shards_behind_each_other_then_the_batch_stays_full_between_them() -> None:
    worker = SimWorker(0, STEPS, 0.0, 0.0)
    finishes = [worker.take(sim_job(40), number, 40, True, 0.0).finish for number in range(4)]
    assert finishes == pytest.approx([10, 20, 30, 40], rel=0.01)


def test_given_an_urgent_shard_then_it_goes_before_bulk_ones_and_they_wait_for_it() -> None:
    worker = SimWorker(0, STEPS, 0.0, 0.0)
    bulk = worker.take(sim_job(400, tier=Tier.BULK), 0, 400, False, 0.0)
    assert worker.wants_urgent()
    urgent = worker.take(sim_job(40), 1, 40, True, 50.0)
    assert urgent.finish == pytest.approx(60, rel=0.01)
    assert bulk.finish == pytest.approx(110, rel=0.01)
    assert not worker.wants_urgent()


def test_given_a_released_shard_then_its_computed_rows_stay_done() -> None:
    worker = SimWorker(0, STEPS, 0.0, 0.0)
    shard = worker.take(sim_job(400), 0, 400, True, 0.0)
    assert worker.drop(shard, 25.0) == pytest.approx(300, rel=0.02)
    assert not worker.held
    assert worker.busy == 25.0


def test_given_rows_that_are_alike_then_jobs_are_cut_as_the_planner_cuts_them() -> None:
    plan = PlanSettings()
    for tokens, rows in ((50, 9_000), (500, 2_000), (40_000, 30)):
        limits = ShardLimits(plan.shard_tokens, plan.max_shard_rows, plan.max_copies)
        ones = np.zeros(rows, dtype=np.int64)
        ranges = cut(ones + tokens, ones, np.zeros(rows, np.int32), np.zeros(rows, np.bool_), limits)
        job = sim_job(rows)
        job.rows_in_shard = max(1, min(plan.max_shard_rows, int(plan.shard_tokens / tokens)))
        job.__post_init__()
        assert [end - begin for begin, end in ranges] == [job.rows_of(number) for number in range(job.shards)]


def test_given_what_bench_printed_then_it_is_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    results = [
        {"name": "scheduler alone, batch 256", "rows": 256, "tokens_per_second": 1e6},
        {"name": "prefill, prompts of 256 tokens", "rows": 16, "tokens_per_second": 2_000.0},
        {"name": "decode, batch 16", "rows": 16, "tokens_per_second": 800.0},
        {"name": "decode, batch 1", "rows": 1, "tokens_per_second": 90.0},
    ]
    path.write_text(json.dumps({"model": "sha256:ab", "machine": "here", "prefill": 2_000.0, "results": results}))
    model = read_worker_model(path, cold_start_seconds=30.0)
    assert (model.prefill, model.batch, model.cold_start_seconds) == (2_000.0, 16, 30.0)
    assert [point.batch for point in model.decode] == [1, 16]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "give the output of"),
        ('{"name": "m", "prefill": 1, "decode": []}', "decode"),
        ('{"name": "m", "prefill": 0, "decode": [{"batch": 1, "tokens_per_second": 1}]}', "prefill"),
        ('{"results": [], "prefill": 3}', "decode"),
    ],
)
def test_given_an_invalid_worker_file_then_the_error_has_the_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "worker.json"
    path.write_text(text)
    with pytest.raises(BadWorkerModel, match=says):
        read_worker_model(path)


# -- traces


def test_given_a_file_then_jobs_and_interruptions_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 9, "rows": 5}\n\n{"at": 3, "rows": 7, "tier": "bulk"}\n{"at": 4, "interrupt": 0.5}\n')
    trace = read_trace(path)
    assert [(job.at, job.rows) for job in trace.jobs] == [(3, 7), (9, 5)]
    assert trace.interruptions[0].interrupt == 0.5
    assert trace.requests == 12


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"at": 1, "rows": 0}', ":2: .*rows"),
        ('{"at": 1, "rows": 3, "tier": "interactive"}', ":2: .*tier"),
        ('{"at": 1, "interrupt": 2}', ":2: .*interrupt"),
        ("nonsense", ":2: "),
        ("7", ":2: "),
    ],
)
def test_given_an_invalid_line_then_the_error_has_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"at": 1, "rows": 3}}\n{line}\n')
    with pytest.raises(BadTrace, match=says):
        read_trace(path)


def test_given_a_file_without_jobs_then_it_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 1, "interrupt": 0.5}\n')
    with pytest.raises(BadTrace, match="has no job"):
        read_trace(path)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_given_a_seed_then_the_trace_is_the_same_and_another_seed_gives_another(pattern: Pattern) -> None:
    drawn = TraceSettings(requests=1_000_000)
    trace = draw_trace(pattern, drawn, 3)
    assert trace == draw_trace(pattern, drawn, 3)
    assert trace.jobs != draw_trace(pattern, drawn, 4).jobs
    assert trace.requests == pytest.approx(1_000_000, rel=0.001)
    assert all(one.at <= two.at for one, two in pairwise(trace.jobs))
    assert bool(trace.interruptions) == (pattern == "spot-storm")


def test_given_day_and_night_then_the_night_is_quiet() -> None:
    jobs = draw_trace("daynight", TraceSettings(requests=10**6, jobs=2_000), 0).jobs
    night = sum(job.at < 4 * 3_600 or job.at > 20 * 3_600 for job in jobs)
    assert night < 0.2 * len(jobs)


# -- who knows everything


def test_given_one_task_then_it_costs_its_work_and_a_start_for_each_worker_that_it_needs() -> None:
    assert best([OracleJob(0, 100, 1_000)], 9, 30, 0).worker_seconds == 130
    # 1,000 s of work in 250 s need four.
    found = best([OracleJob(0, 1_000, 250)], 9, 30, 0)
    assert (found.worker_seconds, found.peak, found.met) == (1_000 + 4 * 30, 4, (True,))


def test_given_quiet_between_two_tasks_then_it_costs_a_start_or_the_waiting() -> None:
    assert best([OracleJob(0, 100, 200), OracleJob(1_000, 100, 1_200)], 9, 30, 0).worker_seconds == 200 + 30 + 30
    assert best([OracleJob(0, 100, 200), OracleJob(210, 100, 400)], 9, 30, 0).worker_seconds == 200 + 30 + 10
    assert best([OracleJob(0, 100, 200), OracleJob(200, 100, 400)], 9, 30, 0).worker_seconds == 200 + 30, (
        "they may follow"
    )


def test_given_two_that_are_due_apart_in_one_stretch_then_each_start_is_paid_or_the_waiting_between() -> None:
    # The third reaches across the quiet, so they are one stretch; two workers are needed at both of its ends.
    tasks = [OracleJob(2_000, 400, 2_200), OracleJob(4_000, 400, 4_200), OracleJob(2_000, 100, 4_200)]
    assert best(tasks, 9, 30, 0, step=10.0).worker_seconds == pytest.approx(900 + 4 * 30, abs=20)
    assert best(tasks, 9, 1_000, 0, step=10.0).worker_seconds == pytest.approx(900 + 4 * 1_000, abs=20)
    # So dear that one stays and does the third's work meanwhile.
    assert 900 + 3 * 1_900 < best(tasks, 9, 1_900, 0, step=10.0).worker_seconds <= 900 + 3 * 1_900 + 1_700


def test_given_a_whole_worker_that_half_the_work_would_fill_then_it_gathers_and_starts_again_or_stays() -> None:
    # 50 s of work each 100 s, to be done within 1,000 s: one start for each ten, or standing idle half of the time.
    tasks = [OracleJob(at, 50, at + 1_000) for at in range(0, 10_000, 100)]
    found = best(tasks, 1, 200, 0, step=10.0).worker_seconds
    assert 5_000 + 5 * 200 - 50 <= found <= 5_000 + 10 * 200


def test_given_machines_that_are_not_there_at_the_beginning_then_what_is_due_before_is_lost() -> None:
    tasks = [OracleJob(0, 50, 100), OracleJob(0, 50, 400)]
    assert best(tasks, 1, 240, 0, ready=240.0).met == (False, True)
    assert best(tasks, 1, 240, 0).met == (True, True)


def test_given_more_than_can_be_done_then_the_largest_is_left_out() -> None:
    tasks = [OracleJob(0, 50, 100), OracleJob(0, 80, 100), OracleJob(0, 40, 100)]
    found = best(tasks, 1, 0, 0)
    assert found.met == (True, False, True)
    assert found.worker_seconds == 90


def test_given_two_machines_then_they_do_what_one_could_not() -> None:
    tasks = [OracleJob(0, 100, 100), OracleJob(0, 100, 100)]
    assert best(tasks, 1, 0, 0).met in ((True, False), (False, True))
    assert best(tasks, 2, 0, 0).met == (True, True)


def test_given_an_urgent_task_that_comes_later_then_it_goes_first() -> None:
    assert best([OracleJob(0, 100, 150), OracleJob(10, 20, 40)], 1, 0, 0).met == (True, True)
    assert sum(best([OracleJob(0, 100, 115), OracleJob(10, 20, 40)], 1, 0, 0).met) == 1


def test_given_work_without_a_deadline_then_it_costs_and_is_never_late() -> None:
    found = best([OracleJob(0, 500, inf)], 1, 30, 1_000)
    assert (found.met, found.worker_seconds) == ((True,), 530)


def test_the_example_is_said_to_be_assumed() -> None:
    assert "assumed" in EXAMPLE.name
