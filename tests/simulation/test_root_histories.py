"""Simulated histories of whole roots: many jobs of many tenants, from ingest to published messages."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.campaign import Summary, read_scenario, run_scenario, run_seeds
from tests.simulation.root.history import simulate_root
from tests.simulation.root.scenario import RootScenario, draw_root

STORED = sorted((Path(__file__).parent / "kept" / "roots").glob("*.json"))
SEEDS = range(11, 14)
"""In which processes die often; `make simulate` draws more."""
MORE_SEEDS = 400


def run(seeds: range) -> Summary:
    return run_seeds(seeds, kind="root", processes=min(2, os.cpu_count() or 1))


@pytest.mark.slow
def test_given_roots_where_all_can_fail_when_3_histories_are_over_then_no_promise_is_broken() -> None:
    summary = run(SEEDS)
    assert summary.broken == {}
    assert summary.counters["deaths"] > len(SEEDS)
    assert summary.counters["jobs"] > len(SEEDS)
    assert summary.counters["completed"] > len(SEEDS)
    assert summary.counters["records"]


@pytest.mark.exhaustive
def test_given_faults_of_every_kind_when_400_histories_are_over_then_each_has_struck_and_nothing_is_broken() -> None:
    summary = run(range(MORE_SEEDS))
    assert summary.broken == {}
    assert summary.missing == []
    for what in (
        "commits that lost the race",
        "ended as cancelled",
        "ended as expired",
        "tokens resumed",
        "shards taken again",
        "steps alongside a second thread",
        "rows blamed",
        "jobs tried again",
        "jobs removed",
        "jobs whose results went",
        "roots in a folder",
        "roots in a bucket",
        "floods",
    ):
        assert summary.counters[what], f"it never happened: {what}"


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
@pytest.mark.slow
def test_a_root_that_once_broke_does_not_break_again(path: Path) -> None:
    scenario = read_scenario(path.read_text())
    outcome = run_scenario(scenario)
    assert outcome.broken is None
    assert outcome.calls_never_made(scenario.faults) == set()


@pytest.mark.slow
def test_one_seed_is_one_root_to_the_byte() -> None:
    seed = next(seed for seed in range(100) if draw_root(seed).faults and draw_root(seed).records)
    first, second = simulate_root(draw_root(seed)), simulate_root(draw_root(seed))
    assert first.trace == second.trace
    assert first.digest == second.digest


def test_a_root_is_written_down_whole() -> None:
    for seed in range(20):
        scenario = draw_root(seed)
        assert RootScenario.from_json(scenario.to_json()) == scenario
        assert json.loads(scenario.to_json())["root"]["seed"] == seed


@pytest.mark.slow
def test_given_no_faults_when_several_jobs_come_in_then_each_token_is_sampled_once_and_all_are_published() -> None:
    for seed in range(4):
        drawn = draw_root(seed)
        drops = tuple(
            replace(drop, poison=(), deadline=None, cancel_at=None, remove_at=None, retry=False) for drop in drawn.drops
        )
        outcome = simulate_root(replace(drawn, faults=(), drops=drops, foremen=1))
        assert outcome.broken is None
        assert outcome.counters["deaths"] == 0
        assert outcome.counters["ended as expired"] == outcome.counters["ended as cancelled"] == 0
        assert outcome.counters["completed"] >= len(drops)
        assert outcome.counters["messages"] > outcome.counters["parts"]
