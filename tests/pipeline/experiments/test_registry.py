"""Stored experiments and reports, damaged ones included."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from pipeline.experiments.assignment import arm_of
from pipeline.experiments.registry import ExperimentError, ExperimentRegistry
from pipeline.ledger.ledger import LedgerError
from schemas.experiments import Experiment, ExperimentOutcome
from tests.pipeline.experiments.simulated_slices import START, make_experiment, simulate_reports, stored_reports
from tests.pipeline.simulation import MemoryStore

END = ExperimentOutcome(by="operator", at=START + timedelta(hours=1))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def registry(store: MemoryStore) -> ExperimentRegistry:
    return ExperimentRegistry(store)


def test_one_experiment_is_open_at_a_time(registry: ExperimentRegistry) -> None:
    assert registry.next_number() == 1
    registry.begin(make_experiment())
    with pytest.raises(ExperimentError, match="experiment stop"):
        registry.next_number()
    registry.end(make_experiment(), END)
    assert registry.next_number() == 2


def test_of_two_that_begin_or_end_at_once_the_first_counts(registry: ExperimentRegistry) -> None:
    registry.begin(make_experiment())
    with pytest.raises(ExperimentError, match="just now"):
        registry.begin(make_experiment(name="other"))
    assert registry.end(make_experiment(), END) == END
    assert registry.end(make_experiment(), END.model_copy(update={"by": "time"})) == END


def test_the_reports_of_slices_are_read_in_order_and_the_first_of_each_counts(registry: ExperimentRegistry) -> None:
    experiment = make_experiment()
    reports = simulate_reports(experiment, 1, slices=12)
    for report in reversed(reports):
        registry.report(experiment, report)
        registry.report(experiment, report.model_copy(update={"model": "again"}))
    for slices in (range(12), range(4, 6), range(10, 99)):
        wanted = [report for report in reports if report.slice in slices]
        assert list(registry.reports(experiment, slices)) == wanted
        assert registry.num_reports(experiment, slices) == len(wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"arm": "unknown"},
        {"slice": 0},
        {"worker": "w1"},
        {"counts": {"seconds": 1e9}},
        {"counts": {"late_tokens": 5}},
        {"counts": {"late_tokens": -5}},
        {"version": 2},
    ],
)
def test_a_report_that_does_not_fit_is_left_out(
    registry: ExperimentRegistry, store: MemoryStore, change: dict[str, Any]
) -> None:
    experiment = make_experiment()
    good, bad = simulate_reports(experiment, 1, slices=2)
    registry.report(experiment, good)
    raw = bad.model_construct(**(bad.model_dump() | change)).model_dump_json(warnings=False).encode()
    store.create("experiments/00001/slices/00000001-w0.json", raw)
    with capture_logs() as logs:
        assert list(registry.reports(experiment, range(2))) == [good, None]
    assert [log["event"] for log in logs] == ["a slice's report can't be used"]


def test_other_objects_beside_the_reports_are_passed_over(registry: ExperimentRegistry, store: MemoryStore) -> None:
    for name in ("x.json", "00000001-.json", "1-w.json", "00000000-w0.json.tmp"):
        store.create(f"experiments/00001/slices/{name}", b"{}")
    store.create("experiments/00001/slices/00000003-big.json", b" " * 20_000)
    store.create("experiments/unknown/experiment.json", b"{}")
    with capture_logs() as logs:
        assert stored_reports(registry, make_experiment()) == []
    assert registry.last() is None
    assert logs == []


def test_a_damaged_experiment_is_named(registry: ExperimentRegistry, store: MemoryStore) -> None:
    store.create("experiments/00003/experiment.json", b'{"version": 1, "number": 3}')
    with pytest.raises(LedgerError, match="00003/experiment"):
        registry.last()


@pytest.mark.parametrize(
    "change",
    [
        {"arms": make_experiment("a", "b").arms[:1]},
        {"arms": make_experiment("a", "b").arms + make_experiment("a", "c").arms},
        {"name": "../x"},
        {"slice_seconds": 0},
        {"carry_over": 1.0},
        {"alpha": 0},
        {"min_blocks": 9, "max_blocks": 8},
        {"unknown": 1},
    ],
)
def test_an_impossible_experiment_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Experiment(**(make_experiment().model_dump() | change))


def test_a_weight_that_would_overflow_is_refused() -> None:
    arms = [arm.model_dump() for arm in make_experiment().arms]
    arms[0]["weights"]["utilisation"] = 1e5
    with pytest.raises(ValidationError, match="1000"):
        Experiment(**(make_experiment().model_dump() | {"arms": arms}))


def test_a_restarted_worker_has_the_arm_of_its_machine(registry: ExperimentRegistry) -> None:
    experiment = make_experiment(assignment="worker")
    machines = {arm_of(experiment, f"gpu{n}", 0).name: f"gpu{n}" for n in range(8)}
    (first,) = simulate_reports(experiment, 1, workers=(machines["more"],), slices=1)
    after_restarts = [first.model_copy(update={"worker": f"w{n}", "machine": machines["more"]}) for n in range(8)]
    on_others = [one.model_copy(update={"worker": "x", "machine": machines["own"]}) for one in after_restarts[:1]]
    for report in after_restarts + on_others:
        registry.report(experiment, report)
    assert stored_reports(registry, experiment) == after_restarts
