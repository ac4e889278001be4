"""The time left, against simulated engines whose ends are known; and the counts from which it is made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from schemas.jobs.outcome import Counts
from schemas.jobs.plan import PlanSegment, RejectsRef, ShardRef
from tokenmill.local.remaining_time import WINDOW_SECONDS, RemainingTime, RunMeasurement
from tokenmill.local.tracker import RunTracker, WorkerUpdate

SLOTS = 64
STEP = 0.05
REPORT = 0.5
"""Seconds between two measurements, and of a step."""
Estimates = list[tuple[float, float, int]]
"""Estimated seconds, true ones, and rows left at that time."""


def simulate(
    lengths: Sequence[int], seconds: Callable[[float], float] = lambda _: STEP, *, generates: bool = True
) -> Estimates:
    """The estimates of a run whose answers have these lengths, in steps."""
    remaining, waiting, running = RemainingTime(), list(reversed(lengths)), list[int]()
    now, tokens, done = 0.0, 0, 0
    made: list[tuple[float, float | None, int]] = []
    while done < len(lengths):
        while waiting and len(running) < SLOTS:
            running.append(waiting.pop())
        now += seconds(now)
        tokens += len(running)
        running = [left - 1 for left in running if left > 1]
        done = len(lengths) - len(waiting) - len(running)
        if not made or now - made[-1][0] >= REPORT:
            remaining.add(RunMeasurement(now, done, len(running), tokens if generates else 0))
            made.append((now, remaining.estimate(len(lengths) - done), len(lengths) - done))
    return [(estimate, now - at, left) for at, estimate, left in made if estimate is not None]


def test_given_a_first_step_that_takes_long_when_few_rows_have_ended_then_the_time_left_is_unknown() -> None:
    remaining = RemainingTime()
    remaining.add(RunMeasurement(0.0, rows=0, running=0, tokens=0))
    remaining.add(RunMeasurement(9.0, rows=0, running=64, tokens=64))
    remaining.add(RunMeasurement(10.0, rows=8, running=56, tokens=640))

    assert remaining.estimate(192) is None


def test_given_answers_of_one_length_then_the_time_left_is_shown_from_the_second_wave_on_and_becomes_right() -> None:
    found = simulate([100] * 1000)

    assert found[0][2] == 1000 - SLOTS, "before the first wave ends nothing is known"
    assert all(true / 1.2 < estimate < 2.1 * true for estimate, true, left in found if left > 2 * SLOTS)
    assert all(true / 1.2 < estimate < 1.4 * true for estimate, true, left in found if 700 > left > 2 * SLOTS)
    assert min(left for *_, left in found) >= SLOTS - 1


def test_given_answers_of_any_length_then_the_first_ones_to_end_do_not_make_the_time_short() -> None:
    chance = random.Random(1)
    lengths = [1 + int(chance.expovariate(1 / 100)) for _ in range(2000)]

    found = simulate(lengths)

    assert 2000 - 2 * SLOTS <= found[0][2] <= 2000 - 0.9 * SLOTS
    assert all(true / 1.6 < estimate < 1.6 * true for estimate, true, left in found if left > 600)


def test_given_rows_that_are_all_computed_at_once_then_no_time_is_shown() -> None:
    assert simulate(range(50, 300, 5)) == []


def test_given_a_last_answer_that_is_long_then_no_time_is_shown_for_it() -> None:
    assert min(left for *_, left in simulate([60] * 500 + [1500])) > 1


def test_given_a_slow_beginning_then_the_time_left_forgets_it() -> None:
    found = simulate([20] * 6000, lambda now: 1.0 if now < 100 else STEP)

    end = found[0][1] + 20  # the first estimate is made when the first rows have ended
    settled = [one for one in found if end - one[1] > 101 + WINDOW_SECONDS and one[2] > 2 * SLOTS]
    assert settled
    assert all(true / 1.2 < estimate < 1.2 * true for estimate, true, _ in settled)


def test_given_rows_that_generate_nothing_then_the_time_left_is_by_rows() -> None:
    found = simulate([1] * 10_000, generates=False)

    assert found
    assert all(estimate == pytest.approx(true, rel=0.05, abs=0.2) for estimate, true, _ in found)


def test_given_rows_that_need_no_computing_when_counted_then_the_line_ends_with_all_of_them() -> None:
    tracker = RunTracker()
    tracker.set_plan(Counts(total=100, succeeded=10, failed=5, pending=85), whole=False)
    shard = ShardRef(
        number=3, key="s", sha256="0" * 64, size=1, rows=50, computed_rows=50, model="m", prompt_tokens=1,
        expected_tokens=1,
    )  # fmt: skip
    rejects = RejectsRef(number=2, key="r", sha256="0" * 64, size=1, rows=50)
    tracker.add_segment(
        PlanSegment(
            job="j",
            index=1,
            attempt="a",
            first_row=100,
            end_row=200,
            rejected=20,
            reused=30,
            rejects=rejects,
            unique=50,
            shards=(shard,),
            last=True,
        )
    )
    tracker.computing()
    tracker.update(WorkerUpdate(95, 1, 40, 0, 0, 0, 95, 0), 0)

    snapshot = tracker.snapshot()

    assert (snapshot.done, snapshot.total, snapshot.failed) == (200, 200, 26)
    assert snapshot.done - snapshot.before == 95, "rows a second are those of this run"
