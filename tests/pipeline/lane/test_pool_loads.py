"""The loads of prefill and decode workers, from what they report, and the placements that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.placement import LatencyTargets, Placement, RequestSize
from pipeline.lane.pool_loads import DEFAULT_BYTES_PER_SECOND, PoolObserver, pool_loads
from pipeline.lane.prefix_router import PrefixRouter
from pipeline.ports import WorkerState
from pipeline.runtime.availability import ServiceUnavailable
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.workers.lane import DECODE, LaneRequest
from schemas.workers.metrics import HandoverMetrics, HistogramSample, TierMetrics, WorkerMetrics


class ManualClock(SystemClock):
    seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds


TARGETS = LatencyTargets(1.0, 0.1)
STAY = (Placement.SPLIT, Placement.WHOLE_ON_PREFILL)


def worker(role: Any, **changes: Any) -> WorkerMetrics:
    """A worker with 100 steps of 20 ms, a prefill worker with 10 of 0.2 s."""
    handover = {"role": role, "block_tokens": 16, "token_bytes": 1_000, "step_tokens": 512}
    steps = HistogramSample(counts=(100 if role == "decode" else 10,), seconds=2.0)
    tier = TierMetrics(running=3, waiting=2, answered=10, usage=Usage(prompt=4_000, cached=0, completion=500))
    fields: dict[str, Any] = {
        "model": "m",
        "handover": HandoverMetrics(**handover | changes.pop("handover", {})),
        "steps": steps,
        "prompt": 8_000 if role == "prefill" else 0,
        "kv_blocks": 1_000,
        "kv_blocks_used": 100,
        "tiers": {Tier.INTERACTIVE: tier},
    }
    return WorkerMetrics(**fields | changes)


def test_loads_are_sums_and_means_of_what_workers_report() -> None:
    received = {"received_bytes": 1_000, "held_bytes": 2_000, "fetch_seconds": 0.5}
    loads = pool_loads([worker("prefill"), worker("decode"), worker("decode", handover=received)])
    assert loads is not None
    assert (loads.prefill.workers, loads.prefill.tokens_per_second, loads.prefill.row_step_seconds) == (1, 4_000, 0.2)
    assert loads.prefill.waiting_tokens == 2 * 400, "two requests of the mean prompt"
    assert (loads.decode.workers, loads.decode.running_rows, loads.decode.step_seconds) == (2, 6, 0.02)
    assert (loads.decode.kv_tokens, loads.decode.kv_tokens_used) == (32_000, 3_200)
    assert (loads.transfer.kv_bytes_per_token, loads.transfer.bytes_per_second) == (1_000, 6_000)
    assert loads.answer_tokens == 50


def test_before_anything_was_computed_loads_are_unknown() -> None:
    idle = {"steps": HistogramSample(), "prompt": 0}
    assert pool_loads([]) is None
    assert pool_loads([worker("decode")]) is None
    assert pool_loads([worker("prefill", **idle), worker("decode")]) is None
    assert pool_loads([worker("prefill"), worker("decode", **idle)]) is None
    whole = worker("prefill").model_copy(update={"handover": None})
    assert pool_loads([whole, whole]) is None


@pytest.mark.parametrize(
    ("decode", "prompt_tokens", "answer_tokens", "expected"),
    [
        pytest.param([worker("decode")], 400, 50, Placement.SPLIT, id="steps there are shorter"),
        pytest.param([worker("decode")], 400, 1, Placement.WHOLE_ON_PREFILL, id="nothing is left to generate"),
        pytest.param([], 400, 50, Placement.WHOLE_ON_PREFILL, id="no decode worker lives"),
        pytest.param(
            [worker("decode", kv_blocks=10, kv_blocks_used=10)], 400, 5, Placement.WHOLE_ON_PREFILL, id="no room there"
        ),
        pytest.param(
            [worker("decode", handover={"received_bytes": 1_000, "fetch_seconds": 1.0})],
            4_000, 5, Placement.WHOLE_ON_PREFILL, id="a slow link",
        ),
    ],
)  # fmt: skip
def test_a_computed_prompt_goes_where_its_answer_is_sooner_complete(
    decode: list[WorkerMetrics], prompt_tokens: int, answer_tokens: int, expected: Placement
) -> None:
    loads = pool_loads([worker("prefill"), *decode])
    assert loads is not None
    assert loads.best(RequestSize(prompt_tokens, prompt_tokens - 1, answer_tokens), TARGETS, STAY) is expected


def test_a_link_whose_transfers_fail_is_slow_and_is_tried_again_later() -> None:
    clock = ManualClock()
    beats = MemoryHeartbeats(clock, 600.0)
    observer = PoolObserver(clock, beats)

    def rate(**transfers: Any) -> float:
        for role in ("prefill", "decode"):
            beats.send_heartbeat(WorkerState(role))
            beats.report_metrics(role, worker(role, handover=transfers if role == "decode" else {}))
        clock.seconds += 3
        observer.refresh()
        loads = observer.loads("m")
        assert loads is not None
        return loads.transfer.bytes_per_second

    assert rate() == DEFAULT_BYTES_PER_SECOND
    assert rate(received_bytes=5_000, fetch_seconds=1.0) == 5_000
    assert rate(received_bytes=5_000, fetch_seconds=11.0, broken_transfers=1) == pytest.approx(5_000 / 11)
    rates = [rate(received_bytes=5_000, fetch_seconds=11.0, broken_transfers=1) for _ in range(20)]
    assert rates[-1] == DEFAULT_BYTES_PER_SECOND


def test_a_link_on_which_nothing_arrives_is_the_slowest() -> None:
    loads = pool_loads([worker("prefill"), worker("decode", handover={"fetch_seconds": 20.0, "broken_transfers": 2})])
    assert loads is not None
    assert loads.best(RequestSize(4_000, 3_999, 5), TARGETS, STAY) is Placement.WHOLE_ON_PREFILL


def test_an_observer_reads_seldom_and_forgets_what_is_old() -> None:
    clock = ManualClock()
    beats = MemoryHeartbeats(clock, 60.0)
    observer = PoolObserver(clock, beats)
    for role in ("prefill", "decode"):
        beats.send_heartbeat(WorkerState(role))
        beats.report_metrics(role, worker(role))
    observer.refresh()
    assert observer.loads("m") is not None
    assert observer.loads("another") is None
    beats.leave("prefill")
    observer.refresh()
    assert observer.loads("m") is not None, "it was read a moment ago"
    clock.seconds += 3
    observer.refresh()
    assert observer.loads("m") is None
    beats.send_heartbeat(WorkerState("prefill"))
    beats.report_metrics("prefill", worker("prefill"))
    clock.seconds += 3
    observer.refresh()

    def unreachable() -> Any:
        raise ServiceUnavailable("gone")

    beats.metrics = unreachable  # type: ignore[method-assign]
    clock.seconds += 10
    observer.refresh()
    assert observer.loads("m") is not None
    clock.seconds += 10
    observer.refresh()
    assert observer.loads("m") is None


def test_a_request_goes_to_a_decode_worker_where_prompts_wait_for_long() -> None:
    clock = ManualClock()
    beats = MemoryHeartbeats(clock, 60.0)
    router = PrefixRouter(clock, beats, 1.25, TARGETS)
    body = {"model": "m", "messages": [{"role": "user", "content": "a short question"}], "max_tokens": 20}
    sent = LaneRequest("r", "key", body)

    def routed(waiting: int) -> str:
        usage = Usage(prompt=40_000, cached=0, completion=500)
        tiers = {Tier.INTERACTIVE: TierMetrics(waiting=waiting, answered=10, usage=usage)}
        streams = {Tier.INTERACTIVE: TierMetrics(running=20)}
        for name, metrics in (("w1", worker("prefill", tiers=tiers)), ("w2", worker("decode", tiers=streams))):
            beats.send_heartbeat(WorkerState(name))
            beats.report_metrics(name, metrics)
        clock.seconds += 3
        router.refresh()
        return router.route(sent).queue

    assert routed(waiting=0) == ""
    assert routed(waiting=10) == DECODE
    assert PrefixRouter(clock, beats, 1.25, targets=None).route(sent).queue == "", "all are to be handed over"
    assert router.routes()["decode"] == 1
    embedding = LaneRequest("e", "key", {"model": "m", "input": "text"}, url="/v1/embeddings")
    assert router.route(embedding).queue == ""
    assert router.route(replace(sent, attempt=2)).queue == "", "an answer that has begun goes on at once"
