"""Loads are those of the workers that take requests now, at the speed of the last seconds."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.overload.load_meter import LoadMeter
from pipeline.ports import WorkerState
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.workers.metrics import HistogramSample, TierMetrics, WorkerMetrics

KEY = "key"


def state(name: str = "w", **more: Any) -> WorkerState:
    return WorkerState(name, **({"models": frozenset({KEY}), "max_num_seqs": 8, "takes_lane_requests": True} | more))


def report(seconds: float, answered: int, *, gap_seconds: float = 0.02, accepted: int = 0, running: int = 3) -> Any:
    """A worker that has answered so many requests of eleven tokens."""
    gaps = answered * 10 - accepted
    tier = TierMetrics(
        running=running, answered=answered, usage=Usage(completion=answered * 11, accepted=accepted),
        itl=HistogramSample(counts=(gaps,), seconds=gaps * gap_seconds),
    )  # fmt: skip
    return WorkerMetrics(model="name", seconds=seconds, tiers={Tier.INTERACTIVE: tier})


def test_workers_are_added_up() -> None:
    meter = LoadMeter()
    found = meter.read([state("a"), state("b")], {"a": report(1, 10), "b": report(1, 30)}, 0.0)
    name, load = found[KEY]
    assert name == "name"
    assert (load.slots, load.running, load.answer_tokens) == (16, 6, 11)
    assert load.token_seconds == pytest.approx(0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"takes_lane_requests": False}, {"draining": True}, {"max_num_seqs": None}, {"max_num_seqs": 0},
        {"models": frozenset()},
    ],
)  # fmt: skip
def test_others_dont_count(changes: dict[str, Any]) -> None:
    assert LoadMeter().read([state(**changes)], {"w": report(1, 10)}, 0.0) == {}


def test_a_model_and_its_adapter_have_the_load_of_their_worker() -> None:
    found = LoadMeter().read([state(models=frozenset({KEY, "adapter"}))], {"w": report(1, 10)}, 0.0)
    assert found.keys() == {KEY, "adapter"}
    assert found[KEY] == found["adapter"]


def test_without_an_ended_answer_there_is_no_load() -> None:
    meter = LoadMeter()
    assert meter.read([state()], {}, 0.0) == {}
    assert meter.read([state()], {"w": WorkerMetrics(model="name", seconds=1)}, 0.0) == {}
    assert meter.read([state()], {"w": report(1, 0)}, 1.0) == {}


def test_the_speed_is_that_of_the_last_seconds_and_stays_when_nothing_is_answered() -> None:
    meter = LoadMeter()
    slow, fast = report(0, 100, gap_seconds=0.5), 0.0
    meter.read([state()], {"w": slow}, 0.0)
    itl = slow.tiers[Tier.INTERACTIVE].itl
    for number in range(1, 8):
        gaps = number * 100
        tier = TierMetrics(
            answered=100 + number * 10, usage=Usage(completion=1_100 + number * 110),
            itl=HistogramSample(counts=(itl.samples + gaps,), seconds=itl.seconds + gaps * 0.01),
        )  # fmt: skip
        one = WorkerMetrics(model="name", seconds=number * 3.0, tiers={Tier.INTERACTIVE: tier})
        fast = meter.read([state()], {"w": one}, number * 3.0)[KEY][1].token_seconds
    assert fast == pytest.approx(0.01)
    # The same report again and again: nothing new is known.
    for second in range(60):
        assert meter.read([state()], {"w": one}, 30.0 + second)[KEY][1].token_seconds == pytest.approx(0.01)


def test_a_worker_that_begins_anew_is_measured_anew() -> None:
    meter = LoadMeter()
    meter.read([state()], {"w": report(100, 1_000)}, 0.0)
    assert meter.read([state()], {"w": report(1, 10, gap_seconds=0.1)}, 3.0)[KEY][1].token_seconds == pytest.approx(0.1)


def test_accepted_drafts_and_limits_of_requests() -> None:
    load = LoadMeter(max_requests=4).read([state()], {"w": report(1, 10, accepted=55)}, 0.0)[KEY][1]
    assert load.slots == 4
    assert load.gap_tokens == pytest.approx(2.0)
