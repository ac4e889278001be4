"""The open experiment's blocks are closed, compared, and end it; by several controllers, late and damaged reports
included."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from pipeline.experiments import registry as registry_module
from pipeline.experiments.comparison import ExperimentComparison, compare_arms
from pipeline.experiments.controller import ExperimentController
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.ledger.ledger import LedgerError
from pipeline.ports import World
from schemas.experiments import ClosedBlock, Experiment, SliceReport
from tests.pipeline.experiments.simulated_slices import START, make_experiment, simulate_reports
from tests.pipeline.simulation import MemoryStore, SeededRandomness, SimulatedClock


class CountingStore(MemoryStore):
    """A store that counts reads by key."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def read(self, key: str) -> bytes:
        self.reads[key] += 1
        return super().read(key)

    def most_reads_of_a_report(self) -> int:
        return max((count for key, count in self.reads.items() if "/slices/" in key), default=0)


class ControllerHarness:
    """An experiment in a store, and controllers."""

    def __init__(self, experiment: Experiment) -> None:
        self.store, self.clock, self.experiment = CountingStore(), SimulatedClock(), experiment
        self.registry = ExperimentRegistry(self.store)
        self.registry.begin(experiment)
        self.controller = self.another_controller()

    def another_controller(self) -> ExperimentController:
        return ExperimentController(World(self.store, self.clock, SeededRandomness(1)))

    def store_reports(self, reports: Sequence[SliceReport]) -> None:
        for report in reports:
            self.registry.report(self.experiment, report)

    def poll_after(self, blocks: int, controller: ExperimentController | None = None) -> None:
        """Poll when this many blocks are to be closed."""
        seconds = 61 + blocks * self.experiment.block_slices * self.experiment.slice_seconds
        due = START + timedelta(seconds=seconds)
        self.clock.sleep(max(0.0, (due - self.clock.now()).total_seconds()))
        (controller or self.controller).poll()

    def compared(self) -> ExperimentComparison:
        return compare_arms(self.experiment, self.registry.closed_blocks(self.experiment))


def test_a_late_report_changes_no_test() -> None:
    """Of two workers one is cut off from the store while the first blocks end."""
    harness = ControllerHarness(make_experiment())
    reports = simulate_reports(harness.experiment, 5, workers=("a", "b"))
    late = [one for one in reports if one.worker == "b" and one.slice < 12]
    harness.store_reports([one for one in reports if one not in late])
    harness.poll_after(16)
    before = harness.compared()
    harness.store_reports(late)
    harness.poll_after(17)
    harness.poll_after(18, harness.another_controller())
    after = harness.compared()
    assert before.comparisons[0].tested == 16
    assert after.comparisons == before.comparisons
    closed = range(after.blocks * 2)
    assert harness.registry.num_reports(harness.experiment, closed) - after.reports == len(late) == 12


def test_a_report_that_comes_before_its_block_is_closed_counts() -> None:
    harness = ControllerHarness(make_experiment())
    reports = simulate_reports(harness.experiment, 5, slices=4)
    harness.store_reports(reports[:1])
    harness.poll_after(0)
    harness.store_reports(reports[1:])
    harness.poll_after(2)
    assert (harness.compared().reports, harness.compared().samples) == (4, 2)


def test_each_report_is_read_once_by_all_controllers_together() -> None:
    harness = ControllerHarness(make_experiment(max_blocks=12))
    harness.store_reports(simulate_reports(harness.experiment, 1, workers=("a", "b", "c")))
    for blocks in range(12):
        harness.poll_after(blocks)
        harness.poll_after(blocks, harness.another_controller())
    harness.compared()
    assert harness.store.most_reads_of_a_report() == 1
    harness.poll_after(12)
    last = harness.registry.last()
    assert last is not None
    assert last.outcome is not None
    assert harness.compared().reports == 72


def test_of_two_controllers_the_first_sums_of_a_block_count() -> None:
    harness = ControllerHarness(make_experiment())
    first, second = ClosedBlock(block=0, reports=1), ClosedBlock(block=0, reports=2)
    assert harness.registry.close(harness.experiment, first) == first
    assert harness.registry.close(harness.experiment, second) == first
    harness.store_reports(simulate_reports(harness.experiment, 1, slices=4))
    harness.poll_after(2)
    assert [one.reports for one in harness.registry.closed_blocks(harness.experiment)] == [1, 2]


@pytest.mark.parametrize(("better", "by", "blocks"), [(0.01, "comparison", 8), (1.0, "time", 32)])
def test_a_controller_that_was_away_ends_what_was_decided_at_the_same_block(
    better: float, by: str, blocks: int
) -> None:
    harness = ControllerHarness(make_experiment(max_blocks=32))
    harness.store_reports(simulate_reports(harness.experiment, 1, {"more": better}))
    harness.poll_after(500)
    last = harness.registry.last()
    assert last is not None
    assert last.outcome is not None
    assert last.outcome.by == by
    assert harness.compared().blocks == blocks
    assert last.outcome.reasons[0].endswith(f"at {blocks} samples")


def test_an_experiment_without_any_report_ends_with_its_time() -> None:
    harness = ControllerHarness(make_experiment(max_blocks=8))
    harness.poll_after(8)
    last = harness.registry.last()
    assert last is not None
    assert last.outcome is not None
    assert last.outcome.reasons == ("more: no difference shown, without a test",)


def test_more_reports_than_are_read_and_damaged_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_REPORTS", 5)
    harness = ControllerHarness(make_experiment(max_blocks=8))
    harness.store.create("experiments/00001/slices/00000000-damaged.json", b"{")
    harness.store_reports(simulate_reports(harness.experiment, 1, workers=("a", "b", "c")))
    with capture_logs() as logs:
        harness.poll_after(8)
    compared, last = harness.compared(), harness.registry.last()
    assert (compared.reports, compared.unusable) == (4 + 7 * 5, 3 + 7)
    assert last is not None
    assert last.outcome is not None
    events = Counter(log["event"] for log in logs if log["log_level"] == "warning")
    assert events == {
        "a slice's report can't be used": 1,
        "there are too many reports of slices; this one and later ones are left out": 8,
    }


@pytest.mark.parametrize("change", [{"block": 1}, {"machines": [{"arm": "x", "machine": "m", "counts": {}}]}])
def test_sums_that_do_not_fit_are_named(change: dict[str, object]) -> None:
    harness = ControllerHarness(make_experiment())
    block = ClosedBlock.model_validate({"block": 0, "reports": 1} | change)
    harness.store.create("experiments/00001/blocks/00000000.json", block.to_json())
    with pytest.raises(LedgerError, match=r"blocks/00000000\.json: does not fit"):
        harness.poll_after(1)


def test_a_stop_signal_ends_a_poll_between_two_blocks() -> None:
    harness, stop = ControllerHarness(make_experiment()), threading.Event()
    harness.poll_after(0)
    harness.clock.sleep(harness.experiment.num_slices * harness.experiment.slice_seconds)
    stop.set()
    harness.controller.poll(stop)
    assert harness.compared().blocks == 0


@pytest.mark.exhaustive
def test_an_experiment_with_two_hundred_thousand_reports_ends() -> None:
    harness = ControllerHarness(make_experiment(max_blocks=64))
    reports = simulate_reports(harness.experiment, 1, workers=[f"w{n}" for n in range(1_600)])
    harness.store.objects |= {
        f"experiments/00001/slices/{one.slice:08d}-{one.worker}.json": one.to_json() for one in reports
    }
    harness.poll_after(64)
    last = harness.registry.last()
    assert last is not None
    assert last.outcome is not None
    assert harness.compared().reports == len(reports) == 204_800
