"""One history, ended at each of its port calls in turn: by a kill, and by a power cut; in CI at some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.history import simulate
from tests.simulation.scenario import Fault, draw

SEED = 5
"""Three workers, a deadline that is left out, nine lines: 800 calls."""


@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(97, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("kind", "seconds"), [("kill", 40.0), ("power", 3.0)])
def test_given_a_death_at_any_call_when_the_history_goes_on_then_nothing_is_broken(
    kind: str, seconds: float, stride: int
) -> None:
    quiet = replace(draw(SEED), faults=(), deadline=None)
    calls = simulate(quiet).counters["port calls"]
    assert calls > 300
    broken = {}
    for nth in range(1, calls + 1, stride):
        outcome = simulate(replace(quiet, faults=(Fault(kind, "", nth, seconds),)))
        if outcome.broken is not None:
            broken[nth] = outcome.broken
    assert broken == {}
