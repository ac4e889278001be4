"""Simulated histories, those that once broke, and what the simulator itself must keep: one seed is one history, and
an oracle that sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.campaign import run_seeds
from tests.simulation.history import simulate
from tests.simulation.machine import InvariantViolated
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import Scenario, draw
from tests.simulation.watch import Watch

HERE = Path(__file__).parent
STORED = sorted((HERE / "kept").glob("*.json"))
SEEDS = range(43, 63)
"""Twenty in which everything that is looked for happens; `make simulate` draws thousands."""


@pytest.mark.slow
def test_given_faults_of_every_kind_when_20_histories_are_over_then_no_promise_is_broken() -> None:
    summary = run_seeds(SEEDS, processes=min(2, os.cpu_count() or 1))
    assert summary.broken == {}
    assert summary.missing == []
    for what in (
        "commits that lost the race",
        "completed",
        "ended as cancelled",
        "ended as expired",
        "died of a full disk",
        "tokens resumed",
        "shards taken again",
        "steps alongside a second thread",
        "steps failed",
        "ended with a broken engine",
        "rows blamed",
    ):
        assert summary.counters[what], f"it never happened: {what}"
    assert summary.counters["deaths"] > len(SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_a_history_that_once_broke_does_not_break_again(path: Path) -> None:
    scenario = Scenario.from_json(path.read_text())
    outcome = simulate(scenario)
    assert outcome.broken is None
    assert outcome.calls_never_made(scenario.faults) == set()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_seed_is_one_history_to_the_byte() -> None:
    seed = 17
    assert draw(seed).faults
    first, second = simulate(draw(seed)), simulate(draw(seed))
    assert first.trace == second.trace
    assert first.digest == second.digest
    code = f"from tests.simulation.campaign import run_seed; print(run_seed({seed}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    elsewhere = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert elsewhere.stdout.strip() == first.digest, elsewhere.stderr


def test_given_a_planned_job_that_ended_without_rows_then_the_oracle_finds_it(tmp_path: Path) -> None:
    scenario = draw(3)
    manifest = {"status": "cancelled", "counts": {"total": 0}}
    for name, record in (("closing.json", {"kind": "cancel"}), ("manifest.json", manifest)):
        (tmp_path / name).write_text(json.dumps(record))
    Oracle(scenario, tmp_path, set(), "", Watch(scenario, tmp_path), alone=False).look()
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "00000.json").write_text("{}")
    with pytest.raises(InvariantViolated, match=r"I1: manifest.json stands, but rows .* have no result"):
        Oracle(scenario, tmp_path, set(), "", Watch(scenario, tmp_path), alone=False).look()


def test_a_scenario_is_written_down_whole() -> None:
    for seed in range(20):
        assert Scenario.from_json(draw(seed).to_json()) == draw(seed)


@pytest.mark.slow
def test_without_faults_nothing_is_lost_and_nothing_repeated() -> None:
    for seed in range(5):
        outcome = simulate(replace(draw(seed), faults=(), poison=(), deadline=None))
        assert outcome.broken is None
        assert outcome.counters["deaths"] == 0
        assert outcome.counters["completed"] == 1
