"""The contract of heartbeats while their server runs. An adapter's test module subclasses `HeartbeatsContract` and
gives a `make_heartbeats` fixture: a function lifetime -> one more view of the same, initially empty, server; and
`pass_time`, which lets seconds go by on the clock that counts there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.ports import Heartbeats, WorkerState
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.workers.metrics import (
    HistogramSample,
    SloMetrics,
    SloWeights,
    SpeculationMetrics,
    TierMetrics,
    WorkerMetrics,
)

MakeHeartbeats = Callable[[float], Heartbeats]
LIFETIME = 4.0
"""Long beside the pauses of a busy machine."""

WHOLE = WorkerState(
    "gpu-7.rack/2",
    models=frozenset({"0123456789abcdef", "any"}),
    held=frozenset({("job-a", 1), ("job-a", 0), ("job-b", 4096)}),
    waiting_tokens=123_456_789_012,
    tokens_per_second=1234.5,
    draining=True,
    passed_over=frozenset({("job-a", 7)}),
    max_num_seqs=1024,
    takes_lane_requests=True,
    role="prefill",
)

METRICS = WorkerMetrics(
    model='a "model" of\nany name',
    seconds=12.5,
    tiers={
        Tier.BULK: TierMetrics(
            running=3, answered=7, usage=Usage(prompt=10, completion=2**40),
            itl=HistogramSample(counts=(0, 3, 2**40), seconds=0.25),
        )
    },
    generated=5,
    kv_blocks=100,
    pace=SloMetrics(weights=SloWeights(ttft=1.0), terms=SloWeights(itl=0.5), others=0.25),
    speculation=SpeculationMetrics(drafted=3, accepted=1, gained=-2.5, seconds=0.5),
)  # fmt: skip


class HeartbeatsContract:
    """Given any adapter of the port, then this holds."""

    @pytest.fixture
    def beats(self, make_heartbeats: MakeHeartbeats) -> Heartbeats:
        return make_heartbeats(LIFETIME)

    def test_no_worker_is_alive_at_first(self, beats: Heartbeats) -> None:
        assert beats.workers() == []

    def test_a_state_comes_back_as_it_was_sent(self, make_heartbeats: MakeHeartbeats) -> None:
        make_heartbeats(LIFETIME).send_heartbeat(WHOLE)
        assert make_heartbeats(LIFETIME).workers() == [WHOLE]

    def test_the_latest_state_of_each_worker_counts_and_they_are_sorted_by_name(self, beats: Heartbeats) -> None:
        for name in ("w10", "w2", "b"):
            beats.send_heartbeat(WorkerState(name, held=frozenset({("job-a", 1)})))
        beats.send_heartbeat(WorkerState("w10", waiting_tokens=5))
        assert [state.name for state in beats.workers()] == ["b", "w10", "w2"]
        assert beats.workers()[1] == WorkerState("w10", waiting_tokens=5)

    @pytest.mark.slow
    def test_workers_without_heartbeats_expire_and_the_others_live(
        self, beats: Heartbeats, pass_time: Callable[[float], None]
    ) -> None:
        beats.send_heartbeat(WorkerState("dies"))
        for _ in range(4):
            beats.send_heartbeat(WorkerState("lives"))
            pass_time(LIFETIME * 0.35)
        assert [state.name for state in beats.workers()] == ["lives"]
        pass_time(LIFETIME * 1.2)
        assert beats.workers() == []

    def test_a_worker_that_leaves_is_gone_at_once_and_may_come_back(self, beats: Heartbeats) -> None:
        beats.send_heartbeat(WorkerState("w"))
        beats.leave("w")
        beats.leave("never came")
        assert beats.workers() == []
        beats.send_heartbeat(WorkerState("w"))
        assert beats.workers() == [WorkerState("w")]

    @pytest.mark.slow
    def test_since_counts_from_the_first_stored_heartbeat(
        self, make_heartbeats: MakeHeartbeats, pass_time: Callable[[float], None]
    ) -> None:
        one = make_heartbeats(LIFETIME)
        one.send_heartbeat(WorkerState("w"))
        before = one.since()
        for _ in range(5):
            pass_time(LIFETIME * 0.3)
            one.send_heartbeat(WorkerState("w"))
        assert before < LIFETIME * 0.3
        assert LIFETIME * 1.4 < one.since() < LIFETIME * 3

    def test_metrics_come_back_as_they_were_reported_and_change_no_state(self, make_heartbeats: MakeHeartbeats) -> None:
        one, other = make_heartbeats(LIFETIME), make_heartbeats(LIFETIME)
        one.send_heartbeat(WHOLE)
        one.send_heartbeat(WorkerState("silent about itself"))
        one.report_metrics(WHOLE.name, WorkerMetrics(model="before"))
        one.report_metrics(WHOLE.name, METRICS)
        assert other.metrics() == {WHOLE.name: METRICS}
        assert other.workers() == [WHOLE, WorkerState("silent about itself")]

    @pytest.mark.slow
    def test_metrics_are_removed_with_their_worker(
        self, make_heartbeats: MakeHeartbeats, pass_time: Callable[[float], None]
    ) -> None:
        beats = make_heartbeats(LIFETIME)
        for name in ("leaves", "dies"):
            beats.send_heartbeat(WorkerState(name))
            beats.report_metrics(name, METRICS)
        beats.leave("leaves")
        assert beats.metrics() == {"dies": METRICS}
        pass_time(LIFETIME * 1.2)
        assert beats.metrics() == {}

    def test_metrics_without_a_heartbeat_are_ignored(self, beats: Heartbeats) -> None:
        beats.report_metrics("never beat", METRICS)
        assert beats.metrics() == {}
