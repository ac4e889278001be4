"""Prefill and decode workers are pools of their own: each grows and shrinks with the resource that it is bound by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.lane.memory import MemoryLane
from pipeline.ports import WorkerState
from pipeline.scaling.backlog import BacklogReader
from pipeline.scaling.policy import PolicyState, PoolObservation, decide
from pipeline.scaling.pool_observer import FirstTokens, interactive_workers, observe, observe_root, pools_of
from schemas.jobs.job import Tier
from schemas.settings.autoscaling import AutoscaleOptions, PoolOptions, ScalingLimits
from schemas.settings.kv_transfer import Role
from schemas.workers.heartbeat import StoredHeartbeat
from schemas.workers.lane import LaneRequest
from schemas.workers.metrics import HistogramSample, TierMetrics, TokenRates, WorkerMetrics
from tests.pipeline.scaling.test_backlog import MODEL, ScalingHarness

LIMITS = ScalingLimits(max_workers=50, cold_start_seconds=60.0, ttft_target_seconds=2.0, interactive_target_share=0.5)
POOLS = AutoscaleOptions(
    limits=LIMITS,
    pools={
        "prompts": PoolOptions(models=("m",), role="prefill"),
        "answers": PoolOptions(models=("m",), role="decode"),
    },
)


def prefill(prompt_rate: float = 0.0, waiting: int = 0, batch_prompts: int = 0) -> WorkerMetrics:
    """A prefill worker that computes 10,000 prompt tokens a second, in prompts of 1,000."""
    tiers = {Tier.INTERACTIVE: TierMetrics(ttft=HistogramSample(counts=(100,)))}
    if batch_prompts:
        tiers[Tier.BULK] = TierMetrics(ttft=HistogramSample(counts=(batch_prompts,)))
    tokens = 1_000 * (100 + batch_prompts)
    return WorkerMetrics(
        model="m", prompt=tokens, steps=HistogramSample(counts=(100,), seconds=tokens / 10_000), tiers=tiers,
        rates=TokenRates(prompt=prompt_rate), lane_waiting=waiting,
    )  # fmt: skip


def decode(used: int = 0, running: int = 0, waiting: int = 0, batch_rows: int = 0) -> WorkerMetrics:
    """A decode worker with 100 blocks."""
    tiers = {Tier.INTERACTIVE: TierMetrics(running=running)}
    if batch_rows:
        tiers[Tier.STANDARD] = TierMetrics(running=batch_rows)
    return WorkerMetrics(model="m", kv_blocks=100, kv_blocks_used=used, lane_waiting=waiting, tiers=tiers)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ScalingHarness]:
    made = ScalingHarness(tmp_path)
    yield made
    made.store.close()


def pools(harness: ScalingHarness, lane: MemoryLane | None = None) -> dict[str, PoolObservation]:
    reader = BacklogReader(harness.world, harness.heartbeats, assumed=100.0, lane=lane)
    seen = observe_root(reader, harness.heartbeats, harness.world.clock.now())
    return {pool.name: observe(pool, seen, FirstTokens())[0] for pool in pools_of(POOLS, {"m"})}


def beat(harness: ScalingHarness, name: str, role: Role, metrics: WorkerMetrics) -> None:
    harness.heartbeats.send_heartbeat(WorkerState(name, frozenset({MODEL.key}), tokens_per_second=100.0, role=role))
    harness.heartbeats.report_metrics(name, metrics)


# -- what is observed


def test_given_workers_of_roles_then_each_pool_counts_its_own(harness: ScalingHarness) -> None:
    harness.submit("job", "m")
    beat(harness, "p1", "prefill", prefill())
    beat(harness, "d1", "decode", decode(used=40, running=8))
    beat(harness, "d2", "decode", decode(used=20, running=2))
    beat(harness, "old", "both", decode(used=100, running=9))
    found = pools(harness)
    assert {name: pool.live for name, pool in found.items()} == {"prompts": 1, "answers": 2}
    assert found["answers"].kv_used == pytest.approx(0.3)
    assert not found["prompts"].demands, "shards are computed whole, and count once"
    assert found["answers"].work > 0


def test_given_requests_on_the_lane_then_those_that_decode_workers_took_are_not_prompts(
    harness: ScalingHarness,
) -> None:
    lane = MemoryLane(harness.world.clock)
    for number in range(7):
        lane.send(LaneRequest(f"r{number}", MODEL.key, {"messages": []}))
    beat(harness, "p1", "prefill", prefill(waiting=1))
    beat(harness, "d1", "decode", decode(used=10, running=1, waiting=3))
    found = pools(harness, lane)
    assert (found["prompts"].callers_waiting, found["answers"].callers_waiting) == (4, 3)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_given_no_worker_of_a_role_when_requests_wait_then_its_first_one_is_started(
    harness: ScalingHarness, role: Role
) -> None:
    lane = MemoryLane(harness.world.clock)
    lane.send(LaneRequest("r", MODEL.key, {"messages": []}))
    beat(harness, "other", "decode" if role == "prefill" else "prefill", prefill())
    observed = pools(harness, lane)["prompts" if role == "prefill" else "answers"]
    assert (observed.live, observed.callers_waiting) == (0, 1)
    assert decide(LIMITS, PolicyState(), observed, 0.0).desired == 1


def test_given_an_older_workers_heartbeat_then_it_has_both_roles() -> None:
    assert StoredHeartbeat.model_validate({"name": "w"}).role == "both"


# -- what it takes


def needed(role: Role, *metrics: WorkerMetrics, waiting: int = 0) -> float:
    (pool,) = (one for one in pools_of(POOLS, {"m"}) if one.role == role)
    return interactive_workers(pool, metrics, waiting)


def test_prefill_workers_follow_the_prompts_that_come_and_those_that_wait() -> None:
    assert needed("prefill", prefill(), prefill()) == 0.0
    # 15,000 tokens a second keep 1.5 workers busy, at half of their time.
    assert needed("prefill", prefill(10_000.0), prefill(5_000.0)) == pytest.approx(3.0)
    # 40 prompts wait, 4 s of one worker, and should be computed within 2 s.
    assert needed("prefill", prefill(), waiting=40) == pytest.approx(2.0)
    assert needed("prefill", prefill(10_000.0), waiting=40) == pytest.approx(4.0)


def test_prompts_of_jobs_start_no_prefill_worker() -> None:
    assert needed("prefill", prefill(10_000.0, batch_prompts=300)) == pytest.approx(2.0 / 4)


def test_decode_workers_follow_the_room_that_answers_take_and_wait_for() -> None:
    assert needed("decode", decode(), decode()) == 0.0
    assert needed("decode", decode(used=80, running=8), decode(used=40, running=4)) == pytest.approx(2.4)
    assert needed("decode", decode(used=80, running=8), waiting=4) == pytest.approx(1.6 + 0.8)
    assert needed("decode", decode(used=80, running=2, batch_rows=6)) == pytest.approx(0.4), "jobs' rows leave for them"


def test_other_pools_are_not_sized_by_requests() -> None:
    (pool,) = pools_of(AutoscaleOptions(), {"m"})
    assert interactive_workers(pool, [prefill(10_000.0), decode(100, 9)], 50) == 0.0


# -- what is decided


def run(loads: list[float], live: int = 1, cold_start_seconds: float = 60.0) -> list[int]:
    """Live workers after each half minute, of a pool that so many busy workers' interactive requests reach; machines
    come a cold start after they were wanted."""
    limits = replace_limits(cold_start_seconds)
    memory, coming, sizes = PolicyState(), [live] * ceil(cold_start_seconds / 30), []
    for number, load in enumerate(loads):
        live = min(coming.pop(0), *coming) if coming else live
        observed = PoolObservation((), live, None, callers=ceil(load), interactive_workers=load / 0.5)
        decision = decide(limits, memory, observed, 1e6 + 30.0 * number)
        memory = decision.memory
        coming.append(decision.desired)
        sizes.append(live)
    return sizes


def replace_limits(cold_start_seconds: float) -> ScalingLimits:
    return LIMITS.model_copy(update={"cold_start_seconds": cold_start_seconds})


def test_given_a_rising_and_falling_load_then_the_pool_follows_it_and_settles() -> None:
    sizes = run([1.0] * 10 + [8.0] * 60 + [2.0] * 120)
    assert sizes[9] == 2
    assert sizes[60] == 16
    assert set(sizes[30:70]) == {16}, "it doesn't flap"
    assert sizes[-1] == 4
    assert set(sizes[-40:]) == {4}


def test_given_the_reason_then_it_says_interactive_requests() -> None:
    decision = decide(LIMITS, PolicyState(), PoolObservation((), 2, callers=9, interactive_workers=6.5), 0.0)
    assert (decision.desired, decision.reason, decision.retained) == (7, "interactive requests", 7)
    pressed = replace(PoolObservation((), 8, callers=9, interactive_workers=6.5), ttft_p95=60.0)
    assert decide(LIMITS, PolicyState(), pressed, 0.0).desired == 10, "late first tokens still add a quarter"


# -- settings


def test_a_model_has_one_pool_or_one_of_each_role() -> None:
    both = PoolOptions(models=("m",))
    for second in (both, PoolOptions(models=("m",), role="prefill")):
        with pytest.raises(ValidationError, match="'m' is in pools of the roles"):
            AutoscaleOptions(pools={"a": both, "b": second})
    with pytest.raises(ValidationError, match="prefill, prefill"):
        AutoscaleOptions(pools={name: PoolOptions(models=("m",), role="prefill") for name in "ab"})
    assert [pool.role for pool in pools_of(POOLS, {"m"})] == ["decode", "prefill"]
