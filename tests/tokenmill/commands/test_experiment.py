"""`tokenmill experiment` as it is typed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.experiments.blocks import close_block
from pipeline.experiments.controller import ExperimentController
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.ports import World
from schemas.experiments import Experiment
from tests.pipeline.experiments.simulated_slices import make_experiment, simulate_reports
from tests.pipeline.simulation import SeededRandomness, SimulatedClock

ARMS = ("--arm", "own", "--arm", "more:utilisation=3,drops=0")


def run(tokenmill: Any, *words: object) -> Any:
    done = tokenmill("experiment", *words)
    assert done.code == 0, done.err
    return done


def measured(folder: Path, better: float, closed: int = 0) -> Experiment:
    """An experiment that is over, whose second arm has this multiple of the control's late tokens. `closed`: blocks."""
    experiment = make_experiment(started_at=datetime(2020, 1, 1, tzinfo=UTC), max_blocks=32)
    with FolderStore(folder) as store:
        registry = ExperimentRegistry(store)
        registry.begin(experiment)
        for report in simulate_reports(experiment, 1, {"more": better}):
            registry.report(experiment, report)
        for block in range(closed):
            close_block(registry, experiment, block)
    return experiment


@pytest.mark.slow
def test_given_an_experiment_then_it_starts_shows_its_arms_and_stops(
    tokenmill: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_LANE__SLO__WEIGHT_TTFT", "2")
    root = ("--root", folder / "root")
    begun = run(tokenmill, "start", "weights", *ARMS, "--slice", "1m", "--objective", "itl=4", *root, "--json").json()
    own = {"ttft": 2, "itl": 1, "utilisation": 0.3, "drops": 1}
    assert begun["arms"] == [
        {"name": "own", "weights": own}, {"name": "more", "weights": own | {"utilisation": 3, "drops": 0}}
    ]  # fmt: skip
    assert (begun["objective"], begun["slice_seconds"], begun["number"]) == (own | {"itl": 4}, 60, 1)
    refused = tokenmill("experiment", "start", "again", *ARMS, *root)
    assert refused.code == 1
    assert "experiment weights is open; 'tokenmill experiment stop' ends it" in refused.err
    shown = run(tokenmill, "status", *root).out
    assert re.search("experiment 1, weights: open until 20.* UTC at the latest; by time, slices of 1 min 00 s", shown)
    assert "more: ttft 2, itl 1, utilisation 3, drops 0" in shown
    shown = run(tokenmill, "report", *root).out
    assert "more: undecided, without a test" in shown
    assert re.search(r"\(or serve\) closes the first block after 20.* UTC", shown)
    run(tokenmill, "stop", *root)
    state = run(tokenmill, "status", *root, "--json").json()
    assert (state["outcome"]["by"], state["arm"]) == ("operator", None)
    assert tokenmill("experiment", "stop", *root).code == 1
    assert run(tokenmill, "start", "again", *ARMS, *root, "--json").json()["number"] == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--arm", "own"), "2"),
        (("--arm", "own", "--arm", "own"), "two arms have one name"),
        (("--arm", "own", "--arm", "a:speed=1"), "terms are ttft, itl, utilisation, drops"),
        (("--arm", "own", "--arm", "a:itl"), "TERM=WEIGHT"),
        (("--arm", "own", "--arm", "a:itl=-1"), "itl"),
        (("--arm", "own", "--arm", "a:itl=nan"), "itl"),
        (("--arm", "own", "--arm", "A/B"), "pattern"),
        ((*ARMS, "--slice", "1s"), "5s or more"),
        ((*ARMS, "--min-blocks", 9, "--max-blocks", 8), "max_blocks"),
        ((*ARMS, "--alpha", 0.9), "--alpha"),
    ],
)
@pytest.mark.slow
def test_what_makes_no_experiment_is_refused(tokenmill: Any, folder: Path, options: Any, reason: str) -> None:
    refused = tokenmill("experiment", "start", "weights", *options, "--root", folder / "root")
    assert refused.code == 2, refused.err
    assert reason in refused.err
    assert not list((folder / "root").glob("experiments/*"))


@pytest.mark.slow
def test_a_report_has_means_differences_and_the_verdict(tokenmill: Any, folder: Path) -> None:
    measured(folder / "root", better=0.5, closed=32)
    shown = run(tokenmill, "report", "--root", folder / "root")
    assert shown.out.count("more: better: objective -0.1") == 1
    found = run(tokenmill, "report", 1, "--root", folder / "root", "--json").json()
    assert [arm["slices"] for arm in found["arms"]] == [32, 32]
    (compared,) = found["comparisons"]
    assert (compared["verdict"], found["samples"]) == ("better", 32)
    bounds = compared["differences"]["late_tokens"]
    assert bounds["low"] < bounds["mean"] < bounds["high"] < 0
    means = [arm["means"]["late_tokens"]["mean"] for arm in found["arms"]]
    assert means[1] < means[0]
    assert tokenmill("experiment", "report", 7, "--root", folder / "root").code == 1


@pytest.mark.slow
def test_a_report_says_what_it_leaves_out_and_what_it_waits_for(tokenmill: Any, folder: Path) -> None:
    experiment = measured(folder / "root", better=1.0, closed=9)
    with FolderStore(folder / "root") as store:
        for report in simulate_reports(experiment, 1, workers=("late",), slices=20):
            ExperimentRegistry(store).report(experiment, report)
        store.create("experiments/00001/slices/00000018-damaged.json", b"{")
        close_block(ExperimentRegistry(store), experiment, 9)
    shown = run(tokenmill, "report", "--root", folder / "root").out
    assert "10 of 32 blocks are closed; 10 of them are samples, with each arm measured; the next test is at 16" in shown
    assert "left out: 18 reports that came after their block was closed, 1 that are unusable" in shown
    assert "22 more blocks are over and not closed yet: is a dispatcher (or serve) running?" in shown
    assert "more - own, first 8 samples" in shown
    found = run(tokenmill, "report", "--root", folder / "root", "--json").json()
    assert [found[name] for name in ("blocks", "samples", "next_test", "reports", "unusable", "late")] == [
        10, 10, 16, 22, 1, 18
    ]  # fmt: skip


def test_a_report_by_worker_says_that_machines_are_too_few(tokenmill: Any, folder: Path) -> None:
    experiment = make_experiment(assignment="worker", started_at=datetime(2020, 1, 1, tzinfo=UTC), max_blocks=8)
    with FolderStore(folder / "root") as store:
        ExperimentRegistry(store).begin(experiment)
        for block in range(8):
            close_block(ExperimentRegistry(store), experiment, block)
    shown = run(tokenmill, "report", "--root", folder / "root").out
    assert "no test is possible by worker: each arm needs 3 machines" in shown


@pytest.mark.parametrize(("better", "by"), [(0.3, "comparison"), (1.0, "time")])
def test_the_controller_ends_what_is_decided_or_over(tokenmill: Any, folder: Path, better: float, by: str) -> None:
    experiment = measured(folder / "root", better=better)
    clock = SimulatedClock()
    with FolderStore(folder / "root") as store:
        world = World(store, clock, SeededRandomness(1))
        for hours in (1, 30):
            clock.sleep((experiment.started_at - clock.now()).total_seconds() + 3_600 * hours)
            ExperimentController(world).poll()
            state = ExperimentRegistry(store).last()
            assert state is not None
            if hours == 1:
                assert state.outcome is None, "six blocks"
        assert state.outcome is not None
        assert state.outcome.by == by
        assert state.outcome.reasons[0].startswith("more: " + ("better" if by == "comparison" else "no difference"))
    assert state.outcome.reasons[0] in run(tokenmill, "status", "--root", folder / "root").out


@pytest.mark.slow
def test_the_same_arms_are_simulated(tokenmill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_LANE__SLO__ITL_SECONDS", "0.05")
    options = ("--arm", "own", "--arm", "more:utilisation=9", "--slice", "10s", "--min-blocks", 4, "--max-blocks", 4)
    document = run(tokenmill, "simulate", *options, "--json").json()
    assert [arm["slices"] for arm in document["arms"]] == [4, 4]
    late = [arm["means"]["late_tokens"]["mean"] for arm in document["arms"]]
    assert late[1] > 2 * late[0] > 0
    shown = run(tokenmill, "simulate", *options).out
    assert f"{late[1]:.4g}" in shown, "the same seed gives the same result"
    assert "more - own" in shown
