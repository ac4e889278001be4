"""A worker's part in an experiment: arms are applied between two steps, and slices are measured, on an engine whose
steps take simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SloConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import RowState, StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.runner.null_runner import NullRunner
from engine.scheduler.slo_control import SloTerms
from pipeline.experiments.assignment import arm_of
from pipeline.experiments.blocks import close_block
from pipeline.experiments.comparison import compare_arms
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.ports import StoreUnavailable
from schemas.experiments import ArmWeights, Experiment, ExperimentArm, ExperimentOutcome, SliceCounts, SliceReport
from tests.pipeline.experiments.simulated_slices import stored_reports
from tests.pipeline.simulation import START, MemoryStore, SimulatedClock
from tokenmill.local.experiment_simulation import SimulatedMachine, simulate_worker
from workers.experiments import ExperimentSideWork
from workers.side_work import NoSideWork

SPEC = ModelSpec("none", 1, 1, 1, 8, 8, 1_000, 4_000, (None,), (2,), 0, torch.float32)
OWN = SloConfig(ttft_seconds=0.5, itl_seconds=0.1, weight_ttft=2.0)
OWN_TERMS = SloTerms(2.0, 1.0, 0.3, 1.0)


def make_experiment(**more: Any) -> Experiment:
    arms = [
        ExperimentArm(name=name, weights=ArmWeights(utilisation=weight)) for name, weight in (("a", 0.5), ("b", 2.5))
    ]
    return Experiment(**{
        "number": 1, "name": "e", "arms": tuple(arms), "started_at": START, "slice_seconds": 20, "min_blocks": 4,
        "max_blocks": 4,
    } | more)  # fmt: skip


class UnavailableStore(MemoryStore):
    """A store that can be away."""

    is_away = False
    listings = 0

    def folders(self, prefix: str) -> Iterator[str]:
        self.listings += 1
        return super().folders(prefix)

    def create(self, key: str, data: Any) -> bool:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return super().read(key)


class ExperimentHarness:
    """A worker with endless work, whose steps take a quarter of a second.

    Attributes:
        side_work: the worker's.  weights: the engine's, at each step, with the seconds since the start.
    """

    def __init__(self, slo: SloConfig | None = OWN, model: str = "m") -> None:
        self.store, self.clock = UnavailableStore(), SimulatedClock()
        self.registry = ExperimentRegistry(self.store)
        self.step_seconds = 0.25
        config = EngineConfig(
            cache=CacheConfig(block_size=16, prefix_caching=False), schedule=ScheduleConfig(8, slo=slo)
        )
        self.engine = Engine.without_model(SPEC, config, 4_000, self.clock.monotonic, self._runner)
        self.side_work = ExperimentSideWork(
            NoSideWork(self.clock), self.engine, model, self.clock, self.registry, "w", "gpu"
        )
        self.weights: list[tuple[float, SloTerms]] = []
        self._added = 0

    def _runner(self, rows: RowState, vocab_size: int) -> ExperimentHarness:
        self._null = NullRunner(rows, vocab_size)
        return self

    def execute(self, plan: StepPlan) -> StepOutput:
        self.clock.sleep(self.step_seconds)
        return self._null.execute(plan)

    def run(self, until: float, refresh: bool = True) -> None:
        """Step until this time, in seconds since the start."""
        while self.clock.seconds < until:
            if refresh:
                self.side_work.refresh()
            self.side_work.poll(admit=True)
            slo = self.engine.stats().slo
            if slo is not None:
                self.weights.append((self.clock.seconds, slo.weights))
            while self.engine.num_running + self.engine.num_waiting < 8:
                self._added += 1
                params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
                prompt = np.full(5, 7, dtype=np.int32)
                self.engine.add(Request(f"r{self._added}", prompt, params, priority=2 * (self._added % 2)))
            self.engine.step()

    def reports(self, experiment: Experiment) -> list[SliceReport]:
        self.side_work.refresh()
        return stored_reports(self.registry, experiment)


def test_arms_are_applied_slice_by_slice_and_the_own_weights_return() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.registry.begin(experiment)
    harness.run(200)
    for at, weights in harness.weights:
        number = int(at // 20)
        arm = arm_of(experiment, "gpu", number).weights.utilisation if number < 8 else None
        assert weights == (OWN_TERMS if arm is None else SloTerms(1.0, 1.0, arm, 1.0)), at


def test_what_is_reported_is_what_the_engine_counted_behind_the_carry_over() -> None:
    harness, experiment = ExperimentHarness(), make_experiment(carry_over=0.25)
    harness.registry.begin(experiment)
    harness.run(5)
    before = harness.engine.stats()
    harness.run(20)
    after = harness.engine.stats()
    harness.run(20.1)
    (report,) = harness.reports(experiment)
    assert before.slo is not None
    assert after.slo is not None
    assert (report.slice, report.worker, report.machine, report.model) == (0, "w", "gpu", "m")
    assert report.arm == arm_of(experiment, "gpu", 0).name
    assert report.counts.seconds == 15
    assert report.counts.steps == 60 == after.slo.steps - before.slo.steps
    assert report.counts.tokens == after.generated + after.prompt - before.generated - before.prompt
    assert report.counts.later_tokens == after.slo.later_tokens - before.slo.later_tokens > 0
    assert report.counts.late_tokens == report.counts.later_tokens, "each step takes 0.25 s"


def test_a_slice_that_the_worker_did_not_have_from_its_begin_is_not_reported() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.run(3)
    harness.registry.begin(experiment)
    harness.run(45)
    assert [report.slice for report in harness.reports(experiment)] == [1]


@pytest.mark.parametrize(("stall", "missing"), [(0.5, set()), (3, {1, 2}), (22, {1, 2, 3})])
def test_a_slice_whose_bounds_a_long_step_passed_is_not_reported(stall: float, missing: set[int]) -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.registry.begin(experiment)
    harness.run(39)
    harness.step_seconds = 1 + stall
    harness.run(39.1)
    harness.step_seconds = 0.25
    harness.run(100.5)
    assert {report.slice for report in harness.reports(experiment)} == {0, 1, 2, 3, 4} - missing


def test_when_it_is_stopped_the_own_weights_return_at_once_and_the_slice_is_not_reported() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.registry.begin(experiment)
    harness.run(35)
    harness.registry.end(experiment, ExperimentOutcome(by="operator", at=harness.clock.now()))
    harness.run(60)
    assert all(weights == OWN_TERMS for at, weights in harness.weights if at >= 35)
    assert [report.slice for report in harness.reports(experiment)] == [0]


def test_the_next_experiment_is_found() -> None:
    harness, first = ExperimentHarness(), make_experiment()
    harness.registry.begin(first)
    harness.run(5)
    harness.registry.end(first, ExperimentOutcome(by="operator", at=harness.clock.now()))
    second = make_experiment(number=2, started_at=START + timedelta(seconds=10))
    harness.registry.begin(second)
    harness.run(31)
    assert [report.slice for report in harness.reports(second)] == [0]
    assert harness.reports(first) == []


def test_the_store_is_listed_once() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.run(5)
    harness.registry.begin(experiment)
    harness.run(6)
    assert {weights for _, weights in harness.weights} > {OWN_TERMS}, "the first experiment is found"
    assert harness.store.listings == 1


def test_while_the_store_is_away_arms_go_on_and_reports_wait() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    harness.registry.begin(experiment)
    harness.run(10)
    harness.store.is_away = True
    with capture_logs() as logs:
        harness.run(70)
    assert [log["event"] for log in logs].count("experiments can't be followed") == 1
    harness.store.is_away = False
    assert stored_reports(harness.registry, experiment) == []
    assert [report.slice for report in harness.reports(experiment)] == [0, 1, 2]


def test_a_damaged_experiment_changes_nothing() -> None:
    harness = ExperimentHarness()
    harness.store.create("experiments/00001/experiment.json", b'{"version": 1, "arms": "all"}')
    with capture_logs() as logs:
        harness.run(5)
    assert [log["event"] for log in logs] == ["experiments can't be followed"]
    assert {weights for _, weights in harness.weights} == {OWN_TERMS}


def test_workers_of_other_models_and_engines_without_slos_take_no_part() -> None:
    experiment = make_experiment(model="other")
    for harness in (ExperimentHarness(), ExperimentHarness(slo=None, model="other")):
        harness.registry.begin(experiment)
        with harness.side_work.running():
            harness.run(45, refresh=False)
        harness.side_work.refresh()
        harness.run(90)
        assert harness.reports(experiment) == []
        assert {weights for _, weights in harness.weights} <= {OWN_TERMS}


def test_the_metrics_have_the_present_arm_and_the_counts_of_each_arm() -> None:
    harness, experiment = ExperimentHarness(), make_experiment()
    assert harness.side_work.metrics().experiment is None
    harness.registry.begin(experiment)
    harness.run(90.1)
    found = harness.side_work.metrics().experiment
    assert found is not None
    assert (found.name, found.arm) == ("e", arm_of(experiment, "gpu", 4).name)
    of_reports = {"a": SliceCounts(), "b": SliceCounts()}
    for report in harness.reports(experiment):
        of_reports[report.arm] += report.counts
    assert found.arms == of_reports
    assert found.arms["a"].tokens > 0


def test_the_thread_follows_the_store_and_the_end_restores_the_weights() -> None:
    harness, experiment = ExperimentHarness(), make_experiment(max_blocks=2_000)
    harness.registry.begin(experiment)
    with harness.side_work.running():
        while not any(weights != OWN_TERMS for _, weights in harness.weights):
            harness.run(harness.clock.seconds + 1, refresh=False)
        first = int(harness.clock.seconds // 20) + 1
        harness.run(20.0 * first + 20.1, refresh=False)
    stats = harness.engine.stats()
    assert stats.slo is not None
    assert stats.slo.weights == OWN_TERMS
    assert first in {report.slice for report in harness.reports(experiment)}, "pending reports are stored at the end"


MACHINE = SimulatedMachine(rate_spread=0.3)
SLO = SloConfig(itl_seconds=0.05, ttft_seconds=1.0)


def simulate(number: int, seed: int, better: float, blocks: int, slice_seconds: float) -> Any:
    """An experiment of the control and an arm with this weight of utilisation."""
    weights = (("own", 3.0), ("other", better))
    arms = tuple(ExperimentArm(name=name, weights=ArmWeights(utilisation=weight)) for name, weight in weights)
    experiment = make_experiment(number=number, arms=arms, slice_seconds=slice_seconds, max_blocks=blocks)
    registry = ExperimentRegistry(MemoryStore())
    registry.begin(experiment)
    simulate_worker(experiment, registry, SLO, MACHINE, seed=seed)
    blocks = (close_block(registry, experiment, block) for block in range(experiment.max_blocks))
    (found,) = compare_arms(experiment, blocks).comparisons
    return found


@pytest.mark.slow
def test_a_better_arm_is_found_by_the_scheduler_s_own_controller() -> None:
    found = simulate(1, 1, better=0.1, blocks=4, slice_seconds=25)
    assert (found.verdict, found.tested) == ("better", 4)
    assert found.differences["late_tokens"].high < 0


@pytest.mark.exhaustive
def test_of_twenty_runs_a_better_arm_is_found_and_an_equal_one_is_not() -> None:
    better = [simulate(seed + 1, seed, better=0.1, blocks=8, slice_seconds=30).verdict for seed in range(20)]
    equal = [simulate(seed + 1, seed, better=3.0, blocks=8, slice_seconds=30).verdict for seed in range(20)]
    print("better arm:", better.count("better"), "found; equal arm:", 20 - equal.count("no difference shown"), "found")
    assert better.count("better") >= 19
    assert equal.count("no difference shown") >= 18
