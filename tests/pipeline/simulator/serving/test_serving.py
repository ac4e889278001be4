"""The simulation of requests reaches the limits that are known without it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pipeline.lane.placement import LatencyTargets, Placement
from pipeline.planner.estimates.capacity import HARDWARE
from pipeline.planner.estimates.published_models import PUBLISHED_MODELS
from pipeline.simulator.serving.link import LinkSettings
from pipeline.simulator.serving.replica import ReplicaSettings
from pipeline.simulator.serving.report import serving_report
from pipeline.simulator.serving.requests import REQUEST_MIXES, SimulatedRequest, arrivals, draw_requests
from pipeline.simulator.serving.roofline import PromptChunk, StepRoofline
from pipeline.simulator.serving.simulation import (
    Deployment,
    RequestTooLong,
    ServingOutcome,
    WorkerPool,
    simulate_requests,
)

ROOFLINE = StepRoofline(PUBLISHED_MODELS["llama-3.1-8b"], HARDWARE["h100"])
WORKER = ReplicaSettings(ROOFLINE, step_tokens=8_192, max_rows=64, itl_seconds=0.05)
TARGETS = LatencyTargets()
INSTANT = LinkSettings(bytes_per_second=inf, latency_seconds=0.0, window_bytes=None)
WHOLE = Deployment(WorkerPool(1, WORKER))
SPLIT = Deployment(WorkerPool(1, WORKER), WorkerPool(1, WORKER), split_all=True)
PLACED = replace(SPLIT, split_all=False)


def request(prompt: int, answer: int, at: float = 0.0, cached: int = 0, number: int = 0) -> SimulatedRequest:
    return SimulatedRequest(number, at, prompt, cached, answer)


def run(
    requests: list[SimulatedRequest], deployment: Deployment = WHOLE, link: LinkSettings = INSTANT
) -> ServingOutcome:
    return simulate_requests(requests, deployment, link, TARGETS)


def drawn(mix: str = "chat+8k", rate: float = 20.0, count: int = 300, seed: int = 0) -> list[SimulatedRequest]:
    return arrivals(draw_requests(REQUEST_MIXES[mix], count, seed), rate)


@pytest.mark.parametrize("deployment", [WHOLE, SPLIT, PLACED], ids=["whole", "split", "placed"])
@pytest.mark.parametrize("prompt", [5, 8_192, 30_000])
def test_without_load_the_first_token_takes_the_prompts_roofline_time(deployment: Deployment, prompt: int) -> None:
    (one,) = run([request(prompt, 50, at=7.0)], deployment).requests
    assert one.ttft_seconds == pytest.approx(ROOFLINE.prompt_seconds(prompt, 8_192))


@pytest.mark.parametrize("deployment", [WHOLE, SPLIT], ids=["whole", "split"])
def test_without_load_and_transfer_times_each_token_takes_a_steps_roofline_time(deployment: Deployment) -> None:
    (one,) = run([request(1_000, 5)], deployment).requests
    steps = [ROOFLINE.step_seconds(1, 1_000 + token) for token in (1, 2, 3, 4)]
    assert one.mean_itl_seconds == pytest.approx(sum(steps) / 4)


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    link = LinkSettings(bytes_per_second=1e9, latency_seconds=0.25, window_bytes=None)
    (instant,) = run([request(1_000, 5)], SPLIT).requests
    (one,) = run([request(1_000, 5)], SPLIT, link).requests
    assert one.ttft_seconds == instant.ttft_seconds
    longer = 0.25 + 1_000 * ROOFLINE.model.kv_bytes_per_token / 1e9
    assert one.mean_itl_seconds * 4 == pytest.approx(instant.mean_itl_seconds * 4 + longer)
    outcome = run([request(1_000, 5)], SPLIT, link)
    assert outcome.moved_bytes == 1_000 * ROOFLINE.model.kv_bytes_per_token
    assert max(outcome.single_itls) == pytest.approx(longer + ROOFLINE.step_seconds(1, 1_001))


def test_a_decode_worker_fetches_so_many_at_a_time() -> None:
    seconds = 1_000 * ROOFLINE.model.kv_bytes_per_token / 1e9

    def gaps(fetches: int) -> list[float]:
        link = LinkSettings(bytes_per_second=1e9, latency_seconds=0.0, window_bytes=None, max_fetches=fetches)
        # The first is computed alone; the next two in one step, and their transfers begin together.
        requests = [request(1, 1), request(1_000, 2, at=1e-6, number=1), request(1_000, 2, at=1e-6, number=2)]
        return sorted(run(requests, SPLIT, link).single_itls)

    assert gaps(2) == pytest.approx([2 * seconds, 2 * seconds], rel=0.1), "they share the link"
    assert gaps(1) == pytest.approx([seconds, 2 * seconds], rel=0.1)


def test_a_saturated_worker_decodes_at_the_rooflines_rate() -> None:
    rows, answer = WORKER.max_rows, 400
    outcome = run([request(1, answer, number=number) for number in range(rows)])
    steps = [ROOFLINE.step_seconds(rows, rows * (1 + token)) for token in range(1, answer)]
    prompts = ROOFLINE.step_seconds(0, 0, [PromptChunk(0, 1)]) + ROOFLINE.step_seconds(1, 2, [PromptChunk(0, 1)] * 63)
    assert outcome.seconds == pytest.approx(prompts + sum(steps), rel=1e-3), "the first one began alone"
    assert serving_report(outcome, WHOLE, TARGETS).busy_share == pytest.approx(1.0)


def test_a_saturated_prefill_worker_computes_prompts_at_the_rooflines_rate() -> None:
    outcome = run([request(8_192, 2, number=number) for number in range(50)], SPLIT)
    last = max(one.first_token_at or inf for one in outcome.requests)
    assert last == pytest.approx(50 * ROOFLINE.prompt_seconds(8_192, 8_192))


def test_cached_tokens_are_not_computed_and_still_attended_to() -> None:
    (one,) = run([request(8_192, 1, cached=8_000)]).requests
    assert one.ttft_seconds == pytest.approx(ROOFLINE.step_seconds(0, 0, [PromptChunk(8_000, 192)]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deployment", [WHOLE, SPLIT, PLACED], ids=["whole", "split", "placed"])
def test_work_is_conserved(deployment: Deployment, seed: int) -> None:
    outcome = run(drawn(seed=seed, rate=30.0), deployment, LinkSettings(bytes_per_second=2e9))
    computed = sum(one.prompt_tokens + one.answer_tokens - 1 for one in outcome.requests)
    assert outcome.computed_tokens == computed
    # Each token after a first one has one time since the one before it.
    between = sum(rows for _, rows in outcome.step_itls) + len(outcome.single_itls)
    assert between == sum(one.answer_tokens - 1 for one in outcome.requests)
    spent = sum(one.mean_itl_seconds * (one.answer_tokens - 1) for one in outcome.requests)
    assert sum(seconds * rows for seconds, rows in outcome.step_itls) + sum(outcome.single_itls) == pytest.approx(spent)
    split = [one for one in outcome.requests if one.placement is Placement.SPLIT]
    moved = sum(one.prompt_tokens for one in split) * ROOFLINE.model.kv_bytes_per_token
    assert outcome.moved_bytes == pytest.approx(moved)
    assert all(one.arrived_at < (one.first_token_at or 0) <= (one.ended_at or 0) for one in outcome.requests)


def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    results = [serving_report(run(drawn(seed=seed), PLACED), PLACED, TARGETS) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]


def test_a_higher_rate_has_the_same_requests_and_the_same_order() -> None:
    slow, fast = drawn(rate=1.0), drawn(rate=10.0)
    assert [one.prompt_tokens for one in slow] == [one.prompt_tokens for one in fast]
    assert slow[-1].arrived_at == pytest.approx(10 * fast[-1].arrived_at)
    assert slow[-1].arrived_at / 300 == pytest.approx(1.0, rel=0.2), "one a second on average"
    assert {one.arrived_at for one in drawn(rate=inf)} == {0.0}


def test_prompts_beside_rows_are_cut_so_that_their_steps_keep_the_target() -> None:
    outcome = run(drawn(rate=10.0))
    longest = max(seconds for seconds, _ in outcome.step_itls)
    assert 0.045 < longest <= 0.05
    unlimited = Deployment(WorkerPool(1, replace(WORKER, itl_seconds=inf)))
    assert max(seconds for seconds, _ in run(drawn(rate=10.0), unlimited).step_itls) > 0.15


def test_rows_of_split_requests_are_disturbed_by_no_prompt() -> None:
    outcome = run(drawn(rate=10.0), SPLIT)
    assert max(seconds for seconds, _ in outcome.step_itls) < 0.02


def test_placed_requests_are_in_time_at_loads_where_always_splitting_is_late() -> None:
    always, placed = (serving_report(run(drawn(rate=16.0), one), one, TARGETS) for one in (SPLIT, PLACED))
    assert always.in_time_share < 0.7
    assert placed.in_time_share > 0.9
    assert placed.placements[Placement.SPLIT] > 50
    assert placed.placements[Placement.WHOLE_ON_DECODE] > 50


def test_full_caches_let_prompts_wait_and_lose_none() -> None:
    small = StepRoofline(ROOFLINE.model, replace(HARDWARE["h100"], memory=21e9))
    pool = WorkerPool(1, replace(WORKER, roofline=small))
    assert small.kv_tokens < 4 * 8_192
    outcome = run(drawn("8k", rate=5.0, count=60), Deployment(pool, pool, split_all=True), LinkSettings())
    assert all(one.ended_at is not None for one in outcome.requests)
    with pytest.raises(RequestTooLong, match="room for"):
        run([request(small.kv_tokens, 1)], Deployment(pool))
