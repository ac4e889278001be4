"""The share of answers in time that a pool's decision gets, from the lane's counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import AnswerCounts
from pipeline.scaling.autoscaler import Autoscaler, PoolDecision
from pipeline.scaling.backlog import BacklogReader
from pipeline.scaling.goodput import WINDOW_SECONDS, GoodputWindow, observe_goodput
from pipeline.scaling.pool_observer import Pool
from schemas.settings.autoscaling import AutoscaleOptions, ScalingLimits
from schemas.settings.kv_transfer import Role
from tests.pipeline.scaling.test_backlog import MODEL, ScalingHarness

BEFORE = GoodputWindow(AnswerCounts(100, 50, 50), 1_000.0, 2)


def _share(
    counts: AnswerCounts, before: GoodputWindow = BEFORE, live: int = 2, now: float = 1_030.0, role: Role = "both"
) -> tuple[float | None, GoodputWindow]:
    pool = Pool("p", ("m", "n"), ScalingLimits(), role)
    return observe_goodput(pool, {"m": counts, "other": AnswerCounts(999, 999, 999)}, before, live, now)


@pytest.mark.parametrize(("role", "share"), [("both", 0.7), ("prefill", 0.8), ("decode", 0.9)])
def test_the_share_is_of_the_answers_since_the_last_one(role: Role, share: float) -> None:
    counts = AnswerCounts(170, 70, 60)
    assert _share(counts, role=role) == (pytest.approx(share), GoodputWindow(counts, 1_030.0, 2))


def test_too_few_answers_wait_for_others_and_are_discarded_in_time() -> None:
    few = AnswerCounts(110, 59, 50)  # 19
    assert _share(few) == (None, BEFORE)
    late = 1_000.0 + WINDOW_SECONDS
    assert _share(few, now=late) == (None, GoodputWindow(few, late, 2))


@pytest.mark.parametrize(
    ("before", "live"),
    [(GoodputWindow(), 0), (BEFORE, 3), (GoodputWindow(AnswerCounts(900), 1_000.0, 2), 2)],
    ids=["the first", "another number of workers", "an emptied lane"],
)
def test_a_new_window_begins(before: GoodputWindow, live: int) -> None:
    counts = AnswerCounts(800, 200, 200)
    assert _share(counts, before, live) == (None, GoodputWindow(counts, 1_030.0, live))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ScalingHarness]:
    made = ScalingHarness(tmp_path)
    yield made
    made.store.close()


class _Recording:
    def __init__(self) -> None:
        self.last: dict[str, PoolDecision] = {}

    def put(self, metrics: object, decisions: list[PoolDecision]) -> None:
        self.last = {one.pool: one for one in decisions}


@pytest.mark.parametrize(("least", "desired"), [(0.9, 3), (0.7, 2), (None, 2)])
def test_an_autoscaler_grows_a_pool_whose_answers_are_late(
    harness: ScalingHarness, least: float | None, desired: int
) -> None:
    """Each decision is by another autoscaler: the window is in the root."""
    lane, recording = MemoryLane(harness.world.clock), _Recording()
    options = AutoscaleOptions(limits=ScalingLimits(min_workers=2, min_goodput=least))
    for counts in (AnswerCounts(in_time=500), AnswerCounts(80, 12, 8)):
        for name in ("w1", "w2"):
            harness.send_heartbeat(name, MODEL, 400.0)
        lane.add_answers({MODEL.key: counts})
        reader = BacklogReader(harness.world, harness.heartbeats, 100.0, lane)
        Autoscaler(harness.world, reader, harness.heartbeats, options, [recording]).decide_once()
    found = recording.last["m"]
    assert (found.observed.goodput, found.desired) == (pytest.approx(0.8), desired)
    assert ("goodput" in found.decision.reason) is (desired == 3)
