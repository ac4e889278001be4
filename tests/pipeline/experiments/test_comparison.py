"""Verdicts on arms, whose slices are correlated in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pipeline.experiments.comparison import MEASURES, ArmComparison, RunningComparison, measures_of
from pipeline.sequential_test import mean_bounds
from schemas.experiments import ArmWeights, ClosedBlock, Experiment, SliceCounts
from tests.pipeline.experiments.simulated_slices import START, compare_reports, make_experiment, simulate_reports

WORKERS = tuple(f"w{n}" for n in range(16))


def compare(experiment: Experiment, seed: int, **how: Any) -> ArmComparison:
    """One run: arms are drawn by the experiment's number, and the load by the seed."""
    experiment = experiment.model_copy(update={"number": seed + 1})
    reports = simulate_reports(experiment, seed, **how)
    (found,) = compare_reports(experiment, reports).comparisons
    return found


def count_differences(experiment: Experiment, seeds: range, **how: Any) -> int:
    return sum(compare(experiment, seed, **how).verdict in ("better", "worse") for seed in seeds)


def test_the_objective_weighs_shares_of_counts() -> None:
    experiment = make_experiment(objective=ArmWeights(ttft=2, itl=3, utilisation=5, drops=7))
    counts = SliceCounts(
        first_tokens=80, late_first_tokens=8, later_tokens=200, late_tokens=10, steps=50, throttled_steps=20, drops=20,
        tokens=600, seconds=3,
    )  # fmt: skip
    found = measures_of(experiment, counts)
    assert found is not None
    assert set(found) == set(MEASURES)
    assert found["objective"] == pytest.approx(2 * 0.1 + 3 * 0.05 + 5 * 0.4 + 7 * 0.2)
    assert found["tokens_per_second"] == 200


def test_a_slice_without_requests_is_no_sample() -> None:
    assert measures_of(make_experiment(), SliceCounts(steps=3, tokens=9, seconds=1)) is None


@pytest.mark.parametrize(
    ("how", "workers"), [("time", ("w0",)), pytest.param("worker", WORKERS, marks=pytest.mark.slow)]
)
class TestPlantedArms:
    @pytest.mark.slow
    def test_a_better_and_a_worse_arm_are_found_with_their_intervals(self, how: str, workers: tuple[str, ...]) -> None:
        experiment = make_experiment(assignment=how)
        found = {
            factor: [compare(experiment, seed, effects={"more": factor}, workers=workers) for seed in range(20)]
            for factor in (0.5, 2.0)
        }
        assert [one.verdict for one in found[0.5]].count("better") >= 19
        assert [one.verdict for one in found[2.0]].count("worse") >= 19
        for one in found[0.5]:
            late = one.differences["late_tokens"]
            assert late is not None
            assert late.low < late.mean < late.high

    @pytest.mark.slow
    def test_equal_arms_are_not_found_different(self, how: str, workers: tuple[str, ...]) -> None:
        experiment = make_experiment(assignment=how)
        assert count_differences(experiment, range(100, 120), workers=workers) <= 2


AS_ALPHA = 200 * 0.05 + 2 * (200 * 0.05 * 0.95) ** 0.5
"""Of 200 runs, with two standard deviations."""


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_correlated_load_makes_no_more_differences_than_alpha(period: int) -> None:
    """The load is correlated in time with 0.95, and repeats itself."""
    experiment = make_experiment(alpha=0.05, max_blocks=32)
    assert count_differences(experiment, range(200), period=period) <= AS_ALPHA


def test_arms_that_take_turns_would_be_found_different_by_the_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the order is drawn: with a load that repeats itself after two slices."""
    monkeypatch.setattr(
        "tests.pipeline.experiments.simulated_slices.arm_of",
        lambda experiment, worker, number: experiment.arms[number % len(experiment.arms)],
    )
    assert count_differences(make_experiment(max_blocks=32), range(20)) >= 18


@pytest.mark.slow
def test_workers_that_differ_make_no_more_differences_than_alpha() -> None:
    """Workers whose slices are correlated with 0.99 are the samples, not their slices."""
    experiment = make_experiment(assignment="worker", alpha=0.05, max_blocks=16)
    assert count_differences(experiment, range(200), workers=WORKERS[:10]) <= AS_ALPHA


def test_workers_that_come_with_the_load_are_compared_within_slices() -> None:
    """Most workers of the second arm are there only in the second half, as an autoscaler's are, where a tenth of the
    tokens is late at every worker, instead of a hundredth."""
    experiment = make_experiment(assignment="worker", max_blocks=8)
    given = simulate_reports(experiment, 1, workers=WORKERS)
    late_comers = sorted({report.worker for report in given if report.arm == "more"})[3:]
    reports = [
        one.model_copy(update={"counts": SliceCounts(later_tokens=100, late_tokens=10 if one.slice >= 4 else 1)})
        for one in given
        if one.slice >= 4 or one.worker not in late_comers
    ]
    assert len(late_comers) >= 3
    (found,) = compare_reports(experiment, reports).comparisons
    late = found.differences["late_tokens"]
    assert late is not None
    assert (found.tested, late.mean) == (8, pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize("arms", [("a", "b"), ("a", "b", "c", "d")])
def test_all_arms_that_are_compared_share_the_error(arms: tuple[str, ...]) -> None:
    experiment = make_experiment(*arms, min_blocks=32, max_blocks=32)
    reports = simulate_reports(experiment, 1)
    objectives: dict[str, list[float]] = {arm: [] for arm in arms}
    for report in reports:
        measures = measures_of(experiment, report.counts)
        assert measures is not None
        objectives[report.arm].append(measures["objective"])
    differences = [one - control for one, control in zip(objectives["b"], objectives["a"], strict=True)]
    first, *_ = compare_reports(experiment, reports).comparisons
    assert first.differences["objective"] == mean_bounds(differences, 0.05 / 2 / 2 / (len(arms) - 1))


@pytest.mark.slow
def test_a_verdict_stays_whatever_comes_after_it() -> None:
    experiment = make_experiment()
    reports = simulate_reports(experiment, 5, {"more": 0.4})
    found = []
    for blocks in range(64):
        now = START + timedelta(seconds=2 * blocks * experiment.slice_seconds + 61)
        found.append(compare_reports(experiment, reports, now).comparisons[0])
    first = next(at for at, one in enumerate(found) if one.verdict != "undecided")
    assert found[first].verdict == "better"
    assert {(one.verdict, one.tested) for one in found[first:]} == {("better", found[first].tested)}
    assert {(one.verdict, one.tested) for one in found[:8]} == {("undecided", 0)}


def test_a_block_is_closed_once_its_reports_had_time_to_be_stored() -> None:
    experiment = make_experiment(slice_seconds=100)
    reports = simulate_reports(experiment, 1, slices=20)
    counts = [
        compare_reports(experiment, reports, START + timedelta(seconds=at)).samples for at in (1_059, 1_060, 1_260)
    ]
    assert counts == [4, 5, 6]


def test_a_block_without_one_arm_is_left_out() -> None:
    experiment = make_experiment()
    reports = [one for one in simulate_reports(experiment, 1, slices=40) if one.slice != 7]
    assert compare_reports(experiment, reports).samples == 19


def test_when_time_is_over_all_samples_are_tested() -> None:
    experiment = make_experiment(max_blocks=64)
    reports = simulate_reports(experiment, 1, slices=100)
    (one,) = compare_reports(experiment, reports).comparisons
    assert (one.verdict, one.tested) == ("no difference shown", 50)


def test_two_workers_of_an_arm_are_too_few_for_a_verdict() -> None:
    experiment = make_experiment(assignment="worker")
    reports = simulate_reports(experiment, 1, {"more": 0.1}, workers=WORKERS)
    kept = sorted({one.worker for one in reports if one.arm == "more"})[:2]
    few = [one for one in reports if one.arm == "own" or one.worker in kept]
    (found,) = compare_reports(experiment, few).comparisons
    assert (found.verdict, found.differences["objective"]) == ("no difference shown", None)


def test_a_machine_is_one_sample_however_often_its_worker_restarts() -> None:
    experiment = make_experiment(assignment="worker", max_blocks=8)
    steady = simulate_reports(experiment, 1, workers=WORKERS)
    restarting = [
        one.model_copy(
            update={"worker": f"{one.worker}-{one.slice if one.worker == 'w0' else 0}", "machine": one.worker}
        )
        for one in steady
    ]
    assert len({one.worker for one in restarting}) == len(WORKERS) + 7
    found = compare_reports(experiment, restarting)
    assert sum(arm.machines for arm in found.arms) == len(WORKERS)
    assert found == compare_reports(experiment, steady)


def test_workers_of_one_machine_are_one_sample() -> None:
    """Without a GPU workers of one host are: they have its load in common."""
    experiment = make_experiment(assignment="worker", max_blocks=8)
    single = simulate_reports(experiment, 1, workers=WORKERS)
    double = [one.model_copy(update={"worker": name, "machine": one.worker}) for one in single for name in ("a", "b")]
    found, same = (compare_reports(experiment, reports) for reports in (double, single))
    assert [arm.machines for arm in found.arms] == [arm.machines for arm in same.arms]
    assert found.comparisons == same.comparisons


def test_blocks_are_added_in_order_and_once() -> None:
    running = RunningComparison(make_experiment())
    running.add(ClosedBlock(block=0, reports=0))
    for block in (0, 2):
        with pytest.raises(ValueError, match="does not follow 1"):
            running.add(ClosedBlock(block=block, reports=0))
