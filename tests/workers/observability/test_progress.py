"""The measured rate doesn't depend on how much work there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.engine import EngineStats
from engine.scheduler.latency import LatencyCounts
from workers.observability.progress import RateMeter

IDLE = EngineStats(
    computed=0, recomputed=0, cached=0, generated=0, steps=0, step_times=LatencyCounts(), preemptions=0,
    running=0, waiting=0, free_blocks=0, total_blocks=0,
)  # fmt: skip


def busy(tokens: int, **changes: int) -> EngineStats:
    return replace(IDLE, computed=tokens, running=1, **changes)


def test_idle_time_counts_for_nothing() -> None:
    meter = RateMeter()
    assert meter.measure(0.0, IDLE) is None
    assert meter.measure(10.0, busy(0)) is None
    assert meter.measure(13.0, busy(300)) == pytest.approx(100.0)
    assert meter.measure(16.0, replace(busy(600), running=0)) == pytest.approx(100.0)
    assert meter.measure(1_000.0, replace(busy(600), running=0)) == pytest.approx(100.0), "the last measured rate"
    assert meter.measure(1_003.0, busy(650)) == pytest.approx(100.0)
    assert meter.measure(1_006.0, busy(950)) == pytest.approx(100.0)


def test_cached_tokens_count_and_those_computed_twice_do_not() -> None:
    meter = RateMeter()
    meter.measure(0.0, busy(0))
    assert meter.measure(1.0, busy(100, cached=50, recomputed=30)) == pytest.approx(120.0)


def test_a_new_speed_takes_over_within_a_minute() -> None:
    meter = RateMeter()
    tokens = 0
    for second in range(0, 300, 3):
        tokens += 300
        meter.measure(float(second), busy(tokens))
    rates = []
    for second in range(300, 400, 3):
        tokens += 30
        rates.append(meter.measure(float(second), busy(tokens)))
    assert rates[0] == pytest.approx(91.0, abs=2)
    assert rates[20] == pytest.approx(21, abs=3)
    assert rates[-1] == pytest.approx(13, abs=3)
