"""A worker that stands still for longer than its heartbeats live, and then goes on: another has its shards by then. One
whose engine takes so long for a step is not silent, and keeps them."""

from __future__ import annotations

import json
import math

import pytest

from tests.simulation.history import Outcome, simulate
from tests.simulation.scenario import Fault, Line, Scenario

ROWS = 20
TOKENS = 90
STEP_SECONDS = 0.2
CHECKPOINT_SECONDS = 1.0
MAX_NUM_SEQS = 4
TURNS = 4
"""Of the worker's loop, until what revokes its shards is found and acted upon."""


def scenario(*faults: Fault) -> Scenario:
    """Two workers, and two shards that take each of them long."""
    lines = []
    for row in range(ROWS):
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "prompt": f"{row} abc."}
        request = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(Line(json.dumps(request), f"id-{row}", "/v1/completions", body))
    return Scenario(
        seed=5, lines=tuple(lines), segment_rows=100, shard_rows=ROWS // 2, shard_tokens=100_000, planners=1,
        dispatchers=1, workers=2, max_num_seqs=MAX_NUM_SEQS, step_seconds=STEP_SECONDS,
        checkpoint_seconds=CHECKPOINT_SECONDS, max_open_shards=1, backlog=2, deadline=None, faults=faults,
        threaded=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    outcome = simulate(scenario())
    assert outcome.broken is None
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("step", [60, 90, 121])
def test_given_a_pause_beyond_the_silence_limit_then_work_is_repeated_for_an_interval_at_most(
    step: int, undisturbed: Outcome
) -> None:
    outcome = simulate(scenario(Fault("pause", "engine.step", step, 16.0)))
    assert outcome.broken is None
    assert outcome.counters["completed"] == 1
    assert outcome.counters["shards taken again"], "the other worker takes a shard over"
    repeated = outcome.counters["tokens sampled"] - undisturbed.counters["tokens sampled"]
    # What the last checkpoint before the pause lacks is computed by the other; what comes after it, by both.
    seconds = 2 * CHECKPOINT_SECONDS + TURNS * STEP_SECONDS
    assert 0 < repeated <= math.ceil(seconds / STEP_SECONDS) * MAX_NUM_SEQS


@pytest.mark.slow
def test_given_a_step_longer_than_the_silence_limit_then_nothing_is_computed_twice(undisturbed: Outcome) -> None:
    outcome = simulate(scenario(Fault("slow", "engine.step", 60, 40.0)))
    assert outcome.broken is None
    assert outcome.counters["completed"] == outcome.counters["slow"] == 1
    assert outcome.counters["shards taken again"] == 0
    assert outcome.counters["tokens sampled"] == undisturbed.counters["tokens sampled"]
